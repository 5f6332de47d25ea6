"""How the optimizer's times grow: with parameters, with tensors, with ranks, one of them at a time.

Beside it torch's in its best form, and what the machine takes for the bytes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.optim import AdamW, Optimizer

from benchmarks import contenders
from benchmarks.contenders import BEST, OURS, TORCH_BEST, copy, exchange, fused_update, give_gradients
from benchmarks.results import LIMIT, SuiteResult, Taken
from benchmarks.rounds import Case, take_turns, touch_memory
from zero_ref.lab import ranks
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer

LARGE = 30_000_000
"""Models above this number of parameters are not all in memory at once: contenders come one after the other.
300 million take 10 GB at 2 ranks."""

TORCH_CONSOLIDATES = (10_000_000, 1_000)
"""Most parameters and tensors for which torch's consolidation, some 30 s a GB, is waited for."""

POINT_SECONDS = 1800.0


class Size(NamedTuple):
    """Where on which axis."""

    axis: str
    ranks: int
    tensors: int
    parameters: int


def sizes(quick: bool = False) -> Iterator[Size]:
    """What `measure_growth` measures, in its order.

    >>> for size in sizes(quick=True):
    ...     print(*size)
    parameters 2 100 100000
    parameters 2 100 300000
    parameters 2 100 1000000
    tensors 2 10 400000
    tensors 2 100 400000
    tensors 2 1000 400000
    ranks 1 100 400000
    ranks 2 100 400000
    ranks 3 100 400000
    """
    million = 10**5 if quick else 10**6
    for parameters in (1, 3, 10) if quick else (1, 3, 10, 30, 100, 300):
        yield Size("parameters", 2, 100, parameters * million)
    for tensors in (10, 100, 1_000) if quick else (10, 30, 100, 300, 1_000, 3_000, 10_000):
        yield Size("tensors", 2, tensors, 4 * million)
    for world_size in (1, 2, 3) if quick else (1, 2, 3, 4, 6, 8):
        yield Size("ranks", world_size, 100, 4 * million)


def measure_growth(
    rounds: int, quick: bool = False, *, tell: Callable[[str], object] = lambda line: None
) -> list[SuiteResult]:
    """Time step, sync alone, consolidation and construction at all sizes, on ranks that it starts.

    Args:
        rounds: at each size.
        quick: a tenth of the sizes, and fewer: to see that it works.
        tell: called with a line before each size.
    """
    found: list[SuiteResult] = []
    for size in sizes(quick):
        tell(f"{size.axis}: {size.ranks} ranks, {size.tensors:,} tensors, {size.parameters:,} parameters")
        with closing(ranks.Pool(size.ranks)) as pool:  # all memory goes back before the next
            found += pool.run(measure, size, rounds, timeout=POINT_SECONDS)[0]
    return found


def measure(size: Size, rounds: int) -> list[SuiteResult]:
    """Time everything at one size. Collective: all ranks of the default group, which are `size.ranks`."""
    from torch.distributed.optim import ZeroRedundancyOptimizer as TorchOptimizer

    torch.set_num_threads(1)
    most_parameters, most_tensors = TORCH_CONSOLIDATES
    found = []
    for what, timed in TIMED.items():
        makers: dict[str, Callable[[], Case]] = {OURS: partial(timed.case, ZeroRedundancyOptimizer, size)}
        if what != "consolidate" or (size.parameters <= most_parameters and size.tensors <= most_tensors):
            makers[TORCH_BEST] = partial(timed.case, TorchOptimizer, size)
        if size.ranks > 1 or what in ("step", "construct"):  # nothing is sent to nobody
            makers[LIMIT + timed.limit] = partial(timed.alone, size)
        taken: dict[str, Taken] = {}
        for group in [[name] for name in makers] if size.parameters > LARGE else [list(makers)]:
            touch_memory()
            taken |= take_turns({name: makers[name]() for name in group}, rounds)
        found.append(SuiteResult(what, *size, taken))
    return found


# -------------------------------------------------------------------------------------------- what is timed

Make = Callable[..., Any]
"""(params, optimizer_class, **options): an optimizer that shards."""


class Still(Optimizer):
    """Updates nothing, so that a step around it is its communication alone."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Nothing."""


def _params(size: Size) -> list[torch.Tensor]:
    numel, left = divmod(size.parameters, size.tensors)
    return [torch.ones(numel + (left if n == 0 else 0), requires_grad=True) for n in range(size.tensors)]


def _ready(make: Make, size: Size) -> Any:
    params = _params(size)
    give_gradients(params)
    return make(params, AdamW, **BEST)


def _consolidate(make: Make, size: Size) -> Case:
    optimizer = _ready(make, size)
    # A step drops what was consolidated last.
    return Case(lambda: optimizer.consolidate_state_dict(0), before=optimizer.step)


def _construct(make: Make, size: Size) -> Case:
    held: list[Any] = []
    return Case(
        lambda: held.append(make(held[0], AdamW, **BEST)),
        before=lambda: held.append(_params(size)),
        after=held.clear,
    )


def _alone(size: Size, *runs: Callable[[int], Callable[[], object]]) -> Case:
    """Made of one rank's share, one after the other."""
    share = contenders.share(size.parameters, size.ranks)
    made = [run(share) for run in runs]
    return Case(lambda: [run() for run in made])


class Timed(NamedTuple):
    """One of `results.GROWING`.

    Args:
        case: made of an optimizer's class and a size.
        limit: what the machine takes for the bytes alone.
        alone: its case.
    """

    case: Callable[[Make, Size], Case]
    limit: str
    alone: Callable[[Size], Case]


TIMED: dict[str, Timed] = {
    "step": Timed(
        lambda make, size: Case(_ready(make, size).step),
        "fused AdamW of a share, exchange",
        lambda size: _alone(size, fused_update, exchange),
    ),
    "sync": Timed(
        lambda make, size: Case(make(_params(size), Still, parameters_as_bucket_view=True).step),
        "exchange of shares",
        lambda size: _alone(size, exchange),
    ),
    "consolidate": Timed(
        _consolidate,
        "two shares to rank 0",
        lambda size: _alone(size, lambda share: exchange(2 * share, to=[0])),
    ),
    "construct": Timed(_construct, "copy of the parameters", lambda size: Case(copy(4 * size.parameters))),
}
