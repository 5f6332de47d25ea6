"""Ranks as workers of torch.distributed.rpc: what can be called, who serves whom, what failures tell."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc

from zero_ref.lab import _worker, ranks
from zero_ref.lab.patience import patience
from zero_ref.lab.ranks import RankError

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(not rpc.is_available(), reason="this torch has no RPC"),
]

on_workers = functools.partial(ranks.run, backend="gloo", rpc=True, timeout=20.0)


def name() -> str:
    return rpc.get_worker_info().name


def ask_all(world_size: int) -> list[str]:
    return [rpc.rpc_sync(f"worker{other}", name) for other in range(world_size)]


def has_returned() -> bool:
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    return _worker.perform.__name__ not in [f.f_code.co_name for f, _ in traceback.walk_stack(frame)]


def await_return() -> None:
    while not rpc.rpc_sync("worker1", has_returned):
        time.sleep(0.001)


def one_asks_late() -> tuple[int, str]:
    asked = ""
    if dist.get_rank() == 0:
        await_return()
        asked = rpc.rpc_sync("worker1", name)
    return dist.get_rank(), asked


def test_a_rank_that_has_returned_goes_on_serving() -> None:
    assert on_workers(one_asks_late, 2) == [(0, "worker1"), (1, "")]


def has_worker() -> bool:
    return rpc.api._is_current_rpc_agent_set()


def test_a_call_without_rpc_has_no_worker() -> None:
    assert on_workers(has_worker, 2) == [True, True]
    assert ranks.run(has_worker, 2, backend="gloo") == [False, False]


def shut_rpc_down() -> int:
    # A graceful one waits at times, in torch 2.11 and 2.13, for the deletion of references that nobody holds.
    rpc.shutdown(graceful=False)
    return dist.get_rank()


def test_a_function_that_shuts_rpc_down_leaves_the_next_call_as_it_was() -> None:
    for _ in range(2):
        assert on_workers(shut_rpc_down, 2) == [0, 1]
        assert on_workers(ask_all, 2, 2) == [["worker0", "worker1"]] * 2


def a_reference() -> int:
    return 0 if dist.get_rank() else rpc.remote("worker1", int, args=("7",)).to_here()


def test_references_work_in_every_call() -> None:
    # In torch they do not, in a process that has left RPC and joined it again.
    assert [on_workers(a_reference, 2) for _ in range(3)] == [[7, 0]] * 3


def time_out() -> float:
    return rpc.get_rpc_timeout()


def test_an_rpc_gives_up_before_the_call_does() -> None:
    assert on_workers(time_out, 2) == [16.0 * patience()] * 2
    assert on_workers(time_out, 2, timeout=10.0) == [8.0 * patience()] * 2


def test_torch_without_rpc_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed.rpc, "is_available", lambda: False)
    with pytest.raises(
        RuntimeError, match=r"has no RPC: use one whose torch\.distributed\.rpc\.is_available"
    ):
        on_workers(name, 2)


def test_what_a_script_defines_can_be_called_until_the_call_ends(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
            import sys
            import torch
            import torch.distributed as dist
            import torch.distributed.rpc as rpc
            from zero_ref.lab import _worker, ranks

            class Twice(torch.nn.Module):
                def forward(self, x):
                    return twice(x)

            def twice(x):
                return 2 * x

            def square(x):
                return x * x

            def helper():
                return rpc.rpc_sync("worker1", square, args=(3,))

            def main():
                if dist.get_rank() == 0:
                    module = rpc.remote("worker1", Twice)
                    return module.rpc_sync().forward(torch.tensor(21)).item(), helper()

            if __name__ == "__main__":
                with ranks.Pool(2, "gloo") as pool:
                    for _ in range(2):
                        print(pool.run(main, rpc=True))
                    print(pool.run(lambda: hasattr(sys.modules["__main__"], "square")))
        """)
    )
    env = {**os.environ, "PYTHONPATH": str(Path(ranks.__file__).parents[2])}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=600, env=env)
    assert (done.stdout, done.stderr) == ("[(42, 9), None]\n" * 2 + "[False, False]\n", "")


def listening_addresses() -> set[str]:
    own = {
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if fd.isdigit() and _is_link(fd)
    }
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    return {row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own}


def _is_link(fd: str) -> bool:
    return os.path.islink(f"/proc/self/fd/{fd}")


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_workers_listen_on_loopback_only() -> None:
    for addresses in on_workers(listening_addresses, 2):
        assert addresses == {"0100007F"}  # 127.0.0.1, as a little-endian number


def boom() -> None:
    raise ValueError("boom")


def wait() -> None:
    threading.Event().wait(3600)


def end() -> None:
    os._exit(3)


def ask_the_other_to(do: Callable[[], None], still_there: bool) -> None:
    if dist.get_rank() == 0:
        if not still_there:
            await_return()
        rpc.rpc_sync("worker1", do)
    elif still_there:
        wait()


def failure_of(fn: Callable[..., object], *args: object) -> RankError:
    with pytest.raises(RankError) as caught:
        on_workers(fn, 2, *args)
    assert on_workers(dist.get_rank, 2) == [0, 1], "the next call works"
    return caught.value


def test_an_error_raised_on_a_worker_reaches_the_caller_with_its_name() -> None:
    error = failure_of(ask_the_other_to, boom, False)
    assert error.rank == 0, "it is the caller's function that raised"
    assert "name=worker1" in error.summary
    assert isinstance(error.__cause__, ValueError)


def test_an_error_in_a_ranks_own_function_is_that_ranks() -> None:
    error = failure_of(raise_on_one)
    assert (error.rank, error.summary) == (1, "ValueError: boom")


def raise_on_one() -> None:
    if dist.get_rank() == 1:
        boom()
    rpc.rpc_sync("worker1", wait)


@pytest.mark.usefixtures("all_may_report")
def test_a_worker_that_ends_in_the_middle_of_a_call_is_named() -> None:
    error = failure_of(ask_the_other_to, end, True)
    assert (error.rank, error.summary) == (1, "ended with exit code 3")
    assert "rank 0" not in error.summary
    assert "end of file" in error.others[0]
