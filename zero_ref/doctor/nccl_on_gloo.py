"""Collectives that NCCL has and Gloo lacks, so that a program written for NCCL runs unchanged on a CPU.

Held against Gloo of torch 2.13: it averages (`ReduceOp.AVG`, since torch 2.8) and reduces and scatters, also
unevenly, by itself. It lacks

- `all_gather` of tensors whose sizes differ: here one broadcast from each rank;
- `get_future()` of the works of `reduce_scatter`, `reduce_scatter_tensor`, `isend` and `irecv`: here a thread
  waits for the work, and then completes the future;
- coalescing on a device, as `batch_isend_irecv` and `_coalescing_manager(device=...)` use it with NCCL: here
  each call starts at once, and the work that is returned at the end waits for all of them.

Methods of torch's class ProcessGroup are replaced, because `from torch.distributed import all_gather` binds
the function before anybody could replace it. NCCL's groups, and calls that Gloo can make, go through as they
are. Only timing differs from NCCL: no call here says anything about streams.

Its tests were also run with torch 2.11 and 2.12, where some calls have other names than the `..._single` of
torch 2.13: both are known.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

UNEVEN = "all_gather of tensors of different sizes"
FUTURE = "get_future() of a reduce-scatter, send or receive"
COALESCING = "coalescing on a device"

_WITHOUT_FUTURE = (
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_single",
    "send",
    "recv",
    "recv_anysource",
)
_OTHERS = (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "_allgather_base", "all_gather_single"),
    *("allgather_into_tensor_coalesced", "all_gather_single_coalesced", "reduce_scatter_tensor_coalesced"),
    *(
        "reduce_scatter_single_coalesced",
        "allgather_coalesced",
        "alltoall",
        "alltoall_base",
        "gather",
        "scatter",
    ),
)


class _Work:
    """Several works of Gloo as one, with a future. What else a work has is the last one's."""

    def __init__(self, works: Sequence[Any], result: Any, given: set[str]) -> None:
        self._works, self._result, self._given = list(works), result, given

    def wait(self, *timeout: Any) -> bool:
        """Wait for all of them."""
        for work in self._works:
            work.wait(*timeout)
        return True

    def is_completed(self) -> bool:
        """Whether all of them are complete."""
        return all(work.is_completed() for work in self._works)

    def get_future(self) -> torch.futures.Future[Any]:
        """A future that is complete when the work is."""
        self._given.add(FUTURE)
        future: torch.futures.Future[Any] = torch.futures.Future()

        def complete() -> None:
            try:
                self.wait()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(self._result)

        threading.Thread(target=complete, daemon=True).start()
        return future

    def __getattr__(self, name: str) -> Any:
        return getattr(self._works[-1], name)


@contextlib.contextmanager
def nccl_on_gloo() -> Iterator[set[str]]:
    """A context in which Gloo's groups do what only NCCL's can; yields the set of what was given so far.

    >>> with nccl_on_gloo() as given:                                                    # doctest: +SKIP
    ...     dist.all_gather([torch.empty(2), torch.empty(3)], torch.ones(2 + dist.get_rank()))
    >>> given                                                                            # doctest: +SKIP
    {'all_gather of tensors of different sizes'}

    Collective: none by itself. Enter it on all ranks, because a given call is made of other calls.
    Cost: an uneven all-gather sends as many bytes as NCCL's, in N messages.
    """
    given: set[str] = set()
    open_lists: dict[Any, list[Any]] = {}
    kind = dist.ProcessGroup
    names = ("allgather", "_start_coalescing", "_end_coalescing", *_WITHOUT_FUTURE, *_OTHERS)
    # Names differ between versions of torch. What the class itself holds binds to a group; getattr gives a
    # function that does not, so it is good for calling only.
    held = {name: vars(kind)[name] for name in names if name in vars(kind)}
    originals = {name: getattr(kind, name) for name in held}

    def noted(group: Any, work: Any) -> Any:
        """The work, which is also kept where the group is coalescing."""
        if group in open_lists and work is not None:
            open_lists[group].append(work)
        return work

    def plain(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda group, *args, **kwargs: noted(group, original(group, *args, **kwargs))

    def with_future(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(group: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
            work = original(group, outputs, *args, **kwargs)
            return noted(
                group, _Work([work], outputs, given) if work is not None and _is_gloo(group) else work
            )

        return call

    def allgather(group: Any, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        nested = isinstance(outputs[0], list) and len(outputs) == 1
        lists = outputs[0] if nested else outputs
        if not nested or not _is_gloo(group) or len({tensor.shape for tensor in lists}) == 1:
            return noted(group, originals["allgather"](group, outputs, inputs, *args, **kwargs))
        given.add(UNEVEN)
        mine = lists[group.rank()]
        if mine.shape != inputs[0].shape:
            raise ValueError(
                f"rank {group.rank()} gathers {tuple(inputs[0].shape)} into {tuple(mine.shape)}: the output "
                "at a rank's place has the shape of its input."
            )
        mine.copy_(inputs[0])
        works = []
        for root, tensor in enumerate(lists):
            options = dist.BroadcastOptions()
            options.rootRank, options.asyncOp = root, True
            works.append(originals["broadcast"](group, [tensor], options))
        return noted(group, _Work(works, lists, given))

    def start(group: Any, device: torch.device) -> None:
        if _is_gloo(group):
            given.add(COALESCING)
            open_lists[group] = []
        else:
            originals["_start_coalescing"](group, device)

    def end(group: Any, device: torch.device) -> Any:
        if group not in open_lists:
            return originals["_end_coalescing"](group, device)
        return _Work(open_lists.pop(group), [], given)

    replaced = {"allgather": allgather, "_start_coalescing": start, "_end_coalescing": end}
    try:
        for name, original in originals.items():
            wrap = with_future if name in _WITHOUT_FUTURE else plain
            setattr(kind, name, replaced.get(name) or wrap(original))
        yield given
    finally:
        for name, method in held.items():
            setattr(kind, name, method)


def _is_gloo(group: Any) -> bool:
    cpu = torch.device("cpu")
    return cpu in group._device_types and group._get_backend(cpu).name() == "gloo"
