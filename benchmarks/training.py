"""Suites of training: the step alone, gradients averaged and stepped from ("sync"), and whole iterations.

The last two go through DistributedDataParallel's backward, as a user's training does. At the end of these all
contenders must have the same parameters, since they had the same gradients as often: a fast wrong one takes
no part.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from benchmarks import contenders
from benchmarks.contenders import (
    ADAMW_BYTES,
    OURS,
    OWN_HOOKS,
    OWN_HOOKS_BEST,
    REFERENCE,
    SETS,
    SHARES,
    TO_OWNERS,
    TORCH,
    TORCH_BEST,
    give_gradients,
    result,
)
from benchmarks.results import SuiteResult, Taken
from benchmarks.rounds import Case, take_turns
from zero_ref.backward.overlap import hook_with_zero_step, hook_with_zero_step_interleaved
from zero_ref.backward.reduction import reduce_to_owners
from zero_ref.backward.sharded_data_parallel import ShardedDataParallel
from zero_ref.lab import meter, stage_3
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer

FSDP_LAYERS = 100
"""The number of layers in a chain that are gathered and reduced together; a block of `gpt` has 12 tensors."""

APART = 1e-3
"""The largest distance between a contender and REFERENCE, over REFERENCE's own distance from the start.

Where more than two gradients are added in another order, an average near 0 may come out with the other sign,
and AdamW's step depends on little but the sign. That happens to some 2**-24 of the elements, and a length is
the root of a sum of squares: 2**-12, a quarter of the limit. One update lost among 20 is 0.05.
"""


class Way(NamedTuple):
    """A way to train under DistributedDataParallel, or under ShardedDataParallel in its place.

    Args:
        make: the optimizer.
        views: DDP's gradient_as_bucket_view: gradients lie in its buckets and are not copied out of them.
        hook: makes DDP's communication hook of the model and the optimizer; None for DDP's own all-reduce.
        in_place_of_ddp: wraps the model, given it and the optimizer; None for DDP.
    """

    make: contenders.Make
    views: bool = True
    hook: Callable[[DistributedDataParallel, Any], Any] | None = None
    in_place_of_ddp: Callable[[nn.Module, Any], nn.Module] | None = None


class Training(NamedTuple):
    """A contender ready to train."""

    model: nn.Module
    optimizer: Optimizer


def ways() -> dict[str, Way]:
    """All contenders under DDP: those by default with DDP's defaults, the others with gradients as views."""
    makes = contenders.sharded() | contenders.whole()
    defaults = [contenders.DEFAULT, TORCH, "fairscale", contenders.PLAIN]
    peers = [*defaults, TORCH_BEST, "fairscale, fused", REFERENCE, OURS]

    def overlapping(params: Sequence[torch.Tensor]) -> Optimizer:
        return ZeroRedundancyOptimizer(
            params, AdamW, overlap_with_ddp=True, partition="even", **contenders.BEST
        )

    def overlapped(hook_with_step: Callable[..., Any]) -> Way:
        return Way(overlapping, hook=lambda ddp, zero: hook_with_step(reduce_to_owners(zero), ddp, zero))

    return {
        **{name: Way(makes[name], views=name not in defaults) for name in peers if name in makes},
        TO_OWNERS: Way(makes[OURS], hook=lambda _, zero: reduce_to_owners(zero)),
        f"{TO_OWNERS}, even": Way(makes[contenders.EVEN], hook=lambda _, zero: reduce_to_owners(zero)),
        OWN_HOOKS: Way(makes[OURS], in_place_of_ddp=ShardedDataParallel),
        f"{OWN_HOOKS}, even": Way(makes[contenders.EVEN], in_place_of_ddp=ShardedDataParallel),
        SHARES: Way(makes[contenders.EQUAL], in_place_of_ddp=ShardedDataParallel),
        OWN_HOOKS_BEST: Way(
            makes[contenders.EQUAL],
            in_place_of_ddp=partial(ShardedDataParallel, gather_in_forward=True),
        ),
        f"{TO_OWNERS}, overlapped": overlapped(hook_with_zero_step),
        f"{TO_OWNERS}, interleaved": overlapped(hook_with_zero_step_interleaved),
    }


def wrapped(model: nn.Module, way: Way) -> Training:
    """The model under DDP, and its optimizer. Collective: all ranks of the default group."""
    if way.in_place_of_ddp is not None:
        zero: Any = way.make(list(model.parameters()))
        return Training(way.in_place_of_ddp(model, zero), zero)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=way.views)
    optimizer = way.make(list(model.parameters()))
    if way.hook is not None:
        ddp.register_comm_hook(None, way.hook(ddp, optimizer))
    return Training(ddp, optimizer)


# --------------------------------------------------------------------------------------------- step, sync


def step(set_name: str, rounds: int) -> SuiteResult:
    """The step of an optimizer whose gradients are there: the local update, and new parameters to all."""
    torch.set_num_threads(1)
    cases: dict[str, Case] = {}
    for name, make in contenders.sharded().items():
        params = list(SETS[set_name].make().parameters())
        give_gradients(params)
        cases[name] = Case(make(params).step)
    numel, update, send = _limits(params)
    cases["limit: fused AdamW of a share"] = Case(update)
    cases["limit: copy of as many bytes"] = Case(contenders.copy(ADAMW_BYTES * numel))
    cases["limit: exchange of shares"] = Case(send)
    cases["limit: both, one after the other"] = Case(lambda: (update(), send()))
    halves = [nn.Parameter(param.detach().bfloat16()) for param in params]
    give_gradients(halves)
    masters = ZeroRedundancyOptimizer(halves, AdamW, master_dtype=torch.float32, **contenders.BEST)
    cases[contenders.MASTERS] = Case(masters.step)
    mine = [own.param for own in masters.shard.owned]
    cases["limit: casts and fused AdamW"] = Case(contenders.cast_update(mine))
    cases["limit: casts in new memory and fused AdamW"] = Case(contenders.cast_update(mine, new_memory=True))
    cases["limit: exchange of 16-bit shares"] = Case(contenders.exchange(numel // 2))
    return result("step", set_name, take_turns(cases, rounds))


def _limits(params: Sequence[torch.Tensor]) -> tuple[int, Callable[[], object], Callable[[], object]]:
    """Elements of a rank's share, the fused update of them, and their exchange."""
    numel = contenders.share(sum(param.numel() for param in params), dist.get_world_size())
    return numel, contenders.fused_update(numel), contenders.exchange(numel)


class Given(torch.autograd.Function):
    """A loss whose gradients are given: nothing to compute in backward, all of them ready at once."""

    @staticmethod
    def forward(ctx: Any, gradients: Sequence[torch.Tensor], *params: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return params[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        # New tensors on the given memory. What somebody else holds autograd would copy, and it is to take
        # these for its own, as it does where a layer has computed them.
        return None, *(gradient.detach() for gradient in ctx.gradients)


class WithGiven(nn.Module):
    """A model whose parameters have given gradients."""

    def __init__(self, model: nn.Module, gradients: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.model, self.gradients = model, gradients

    def forward(self) -> torch.Tensor:
        """A loss without a meaning."""
        loss: torch.Tensor = Given.apply(self.gradients, *self.parameters())  # type: ignore[no-untyped-call]
        return loss


def sync(set_name: str, rounds: int) -> SuiteResult:
    """Time the way from each rank's own gradients to new parameters everywhere: average, update, send."""
    torch.set_num_threads(1)
    model = SETS[set_name].make()
    give_gradients(list(model.parameters()), seed=dist.get_rank())
    drawn = [param.grad for param in model.parameters() if param.grad is not None]
    # All contenders are given the same memory. DDP averages in it, so what was drawn is put back before each.
    given = [gradient.clone() for gradient in drawn]
    trainings = {name: wrapped(WithGiven(SETS[set_name].make(), given), way) for name, way in ways().items()}

    def average_and_step(ddp: nn.Module, optimizer: Optimizer) -> None:
        ddp().backward()
        optimizer.step()
        if isinstance(ddp, ShardedDataParallel):
            ddp.wait_for_parameters()  # a forward would have waited

    cases = {
        name: Case(
            partial(average_and_step, *one),
            before=lambda: torch._foreach_copy_(given, drawn),
            after=one.optimizer.zero_grad,
        )
        for name, one in trainings.items()
    }
    _, update, send = _limits(drawn)
    cases["limit: fused AdamW of a share"] = Case(update)
    cases["limit: exchange of shares, twice"] = Case(lambda: (send(), send()))
    cases["limit: exchange, update, exchange"] = Case(lambda: (send(), update(), send()))
    return _checked("sync", set_name, take_turns(cases, rounds), trainings)


# ---------------------------------------------------------------------------------------------- iteration


def iteration(set_name: str, rounds: int) -> SuiteResult:
    """Forward, backward, step and zero_grad, each rank on its own data."""
    torch.set_num_threads(1)
    chosen = SETS[set_name]
    batches = chosen.batches(dist.get_rank(), 8)
    trainings = {name: wrapped(chosen.make(), way) for name, way in ways().items()}
    trainings["fsdp2"] = fully_sharded(chosen.make())

    def iterate(model: nn.Module, optimizer: Optimizer, inputs: Iterator[tuple[torch.Tensor, ...]]) -> None:
        chosen.loss(model(*next(inputs))).backward()
        optimizer.step()
        optimizer.zero_grad()

    cases = {name: Case(partial(iterate, *one, itertools.cycle(batches))) for name, one in trainings.items()}
    return _checked("iteration", set_name, take_turns(cases, rounds), trainings)


def fully_sharded(model: nn.Module) -> Training:
    """The model under FSDP2, block by block, or so many layers of a chain at a time, and plain fused AdamW.

    Collective: all ranks of the default group.
    """
    if isinstance(model, nn.Sequential):
        starts = range(0, len(model), FSDP_LAYERS)
        model = nn.Sequential(
            OrderedDict(blocks=nn.Sequential(*(model[at : at + FSDP_LAYERS] for at in starts)))
        )
    stage_3.shard(model)
    return Training(model, AdamW(model.parameters(), fused=True))


# -------------------------------------------------------------------------------------------------- the end


def _checked(
    suite: str, set_name: str, taken: dict[str, Taken], trainings: Mapping[str, Training]
) -> SuiteResult:
    """The result, once all contenders have come to the same parameters."""
    for model, _ in trainings.values():
        if isinstance(model, ShardedDataParallel):
            model.wait_for_parameters()
    start = _flat(SETS[set_name].make())
    apart = how_far_apart(start, {name: training.model for name, training in trainings.items()})
    for name, (model, optimizer) in trainings.items():
        held = stage_3.held_bytes(model.parameters(), getattr(optimizer, "optim", optimizer))
        taken[name].figures["state_bytes"] = max(meter.gather_from_ranks(held.optimizer_state))
        taken[name].figures["apart"] = apart[name]
    far = {name: distance for name, distance in apart.items() if not distance <= APART}
    if far:
        raise RuntimeError(
            f"{suite}, {set_name}: after as many iterations these are apart from {REFERENCE!r} by more than "
            f"{APART:g} of the way that it has come: {far}. Their times mean nothing."
        )
    return result(suite, set_name, taken)


@torch.no_grad()
def how_far_apart(start: torch.Tensor, models: Mapping[str, nn.Module]) -> dict[str, float]:
    """Measure each model's distance from REFERENCE, over the distance from `start` to REFERENCE.

    The distance is infinite if ranks do not have the same parameters to the last bit.

    Args:
        start: (numel,), all parameters end to end, before the training.
    Collective: all ranks of the default group, which get the same result.
    """
    end = _flat(models[REFERENCE])
    way = (end - start).norm().item()
    apart = {}
    for name, model in models.items():
        here = _flat(model)
        on_ranks = meter.gather_from_ranks(int(here.view(torch.int32).sum()))
        same = len(set(on_ranks)) == 1
        apart[name] = max(meter.gather_from_ranks((here - end).norm().item() / way if same else torch.inf))
    return apart


@torch.no_grad()
def _flat(model: nn.Module) -> torch.Tensor:
    whole = (param.full_tensor() if isinstance(param, DTensor) else param for param in model.parameters())
    return torch.cat([param.flatten() for param in whole])
