"""What RPC workers really send: messages from TensorPipe's log, bytes from the kernel's counters.

Most of rpc's messages start in C++: gradients on their way back, the counting of references, the end of an
autograd context. So they are counted in TensorPipe, the transport, where each has to pass.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
import torch.distributed.rpc as rpc

from zero_ref.lab.meter import sent_bytes
from zero_ref.lab.ranks import Pool, RankError

__all__ = ["run", "counting", "Sent"]

T = TypeVar("T")

# Some messages follow when the call that caused them has returned. They have come when all requests are
# answered, and no more were made for so long, twice in a row: a busy machine can hold one up for 0.1 s.
QUIET_SECONDS = 0.2


class Sent(NamedTuple):
    """What a worker has sent to all others (and to itself, where rpc does that).

    Args:
        requests: messages that another worker has to answer.
        replies: answers to those of others.
        tensors: tensors in all of them.
        nbytes: on the wire; None where the kernel does not tell, see `zero_ref.lab.meter.sent_bytes`.
    """

    requests: int
    replies: int
    tensors: int
    nbytes: int | None

    def __sub__(self, before: Sent) -> Sent:
        nbytes = None if self.nbytes is None or before.nbytes is None else self.nbytes - before.nbytes
        return Sent(
            self.requests - before.requests,
            self.replies - before.replies,
            self.tensors - before.tensors,
            nbytes,
        )


def run(fn: Callable[..., T], world_size: int, *args: Any, timeout: float = 60.0) -> list[T]:
    """`zero_ref.lab.ranks.run(fn, world_size, *args, rpc=True)`, with workers that `counting` can look into.

    The processes are new ones and end with the call, so that a second one counts the same to the byte.

    Args:
        fn, world_size, args, timeout: as in `ranks.run`.
    Raises: as `ranks.run`.
    """
    __tracebackhide__ = True
    before = os.environ.get("TP_VERBOSE_LOGGING")
    os.environ["TP_VERBOSE_LOGGING"] = "1"  # TensorPipe reads it once in a process
    try:
        with Pool(world_size, "gloo", rpc=True) as pool:
            return pool.run(_Logged(fn), *args, timeout=timeout, rpc=True)
    except RankError as error:
        raise error.with_traceback(None) from error.__cause__
    finally:
        del os.environ["TP_VERBOSE_LOGGING"]
        if before is not None:
            os.environ["TP_VERBOSE_LOGGING"] = before


@contextlib.contextmanager
def counting() -> Iterator[dict[str, Sent]]:
    """A dict that has, when the context ends, what each worker has sent meanwhile.

    For one worker at a time. At both ends it waits until every request of every worker has been answered and
    nothing new has been asked for some tenths of a second, so that what follows a call, such as the end of an
    autograd context, is counted where it belongs. The counting itself is not in the count.

    >>> with counting() as sent:                                                # doctest: +SKIP
    ...     rpc.rpc_sync("worker1", torch.numel, args=(torch.zeros(1000),))
    >>> sent["worker0"].requests, sent["worker1"].replies                       # doctest: +SKIP
    (1, 1)

    Raises:
        RuntimeError: the workers were not started by `run` of this module.
    """
    sent: dict[str, Sent] = {}
    with ThreadPoolExecutor(
        1
    ) as thread:  # asked in this one, workers would become part of its autograd context
        *_, earlier, before = thread.submit(_looks_until_quiet).result()
        yield sent
        looks = thread.submit(_looks_until_quiet).result()
    for worker, after in looks[-1].items():
        sent[worker] = after - before[worker]
        for _ in looks:  # each look has cost what the last one before cost, to the byte
            sent[worker] -= before[worker] - earlier[worker]


def _looks_until_quiet() -> list[dict[str, Sent]]:
    """Looks at what each worker has sent so far. Between the last two nobody has sent but for the looking."""
    own = rpc.get_worker_info().name
    agent = rpc._get_current_rpc_agent()  # type: ignore[attr-defined]
    others = sorted({worker.name for worker in agent.get_worker_infos()} - {own})
    looks: list[dict[str, Sent]] = []
    totals: list[tuple[int, int]] = []
    while True:
        found = {worker: _ask(worker) for worker in others}
        looks.append({own: _sent_so_far(), **found})
        totals.append(
            (sum(one.requests for one in looks[-1].values()), sum(one.replies for one in looks[-1].values()))
        )
        # A look is a request to each of the others, whose reply counts only when the next look comes.
        answered = totals[-1][0] - totals[-1][1] == len(others)
        quiet = [now[0] - before[0] == len(others) for before, now in pairwise(totals[-3:])]
        if answered and len(quiet) == 2 and all(quiet):
            return looks
        time.sleep(QUIET_SECONDS)


class _Logged:
    """`fn`, with what TensorPipe writes on stderr in a file of its own, and the rest on stderr at the end."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.__wrapped__ = fn

    def __call__(self, *args: Any) -> Any:
        global _log_path
        os.ftruncate(2, 0)  # RPC has been started before: those messages are not the function's
        stderr = os.dup(2)
        log, _log_path = tempfile.mkstemp(prefix="zero_ref-rpc-")
        os.dup2(log, 2)
        dist.barrier()
        try:
            value = self.__wrapped__(*args)
            dist.barrier()  # the others may be counting until here
            return value
        finally:
            lines = _log_lines()
            os.unlink(_log_path)
            for line in lines:
                if not _TENSORPIPE.match(line):
                    os.write(stderr, line.encode())
            # Standard error stays the file: what follows, until this process ends, is about ending.


_log_path: str | None = None
_TENSORPIPE = re.compile(r"V\d{4} .* tensorpipe/")
_SENT = re.compile(
    r"Pipe \S+_(to|from)_\S+ received a write request \(#\d+, conta\w+ \d+ payloads and (\d+) "
)


def _log_lines() -> list[str]:
    if _log_path is None:
        raise RuntimeError(
            "this worker does not log its messages: start it with zero_ref.lab.rpc_meter.run, not ranks.run"
        )
    with open(_log_path, errors="replace") as log:
        return log.readlines()


def _sent_so_far() -> Sent:
    found = [match.groups() for line in _log_lines() if (match := _SENT.search(line))]
    # Each worker opens the pipe that it asks by, and replies on the one that the other has opened.
    ways = [way for way, _ in found]
    return Sent(ways.count("to"), ways.count("from"), sum(int(tensors) for _, tensors in found), sent_bytes())


def _counters() -> str:
    sent = _sent_so_far()
    return " ".join("-" * 20 if value is None else f"{value:020}" for value in sent)  # always as long


def _ask(worker: str) -> Sent:
    values = [None if "-" in value else int(value) for value in rpc.rpc_sync(worker, _counters).split()]
    return Sent(values[0] or 0, values[1] or 0, values[2] or 0, values[3])
