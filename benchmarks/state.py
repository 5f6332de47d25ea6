"""The suites about state: gathering it, giving it back, how much there is of it, and making an optimizer."""

from __future__ import annotations

import copy
import gc
import itertools
import statistics
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks import contenders
from benchmarks.contenders import OURS, PLAIN, SETS, TORCH, TORCH_BEST, Make, Set, give_gradients, result
from benchmarks.results import SuiteResult, Taken
from benchmarks.rounds import WARM_UP, Case, peak_growth, take_turns, touch_memory
from zero_ref.lab import meter

State = Mapping[int, Mapping[str, Any]]

CONSOLIDATING = ("zero_ref", TORCH, "fairscale")
LOADING = ("zero_ref", OURS, TORCH, TORCH_BEST, "fairscale")
CONSTRUCTED = ("zero_ref", OURS, contenders.EVEN, TORCH, TORCH_BEST, "fairscale")

MOST_CONSOLIDATIONS = 5
"""However many rounds are asked for: one of torch's takes seconds."""

PEAKS = 3

# How each is made to free what it has gathered.
FORGET: dict[str, Callable[[Any], None]] = {
    "zero_ref": lambda optimizer: optimizer.whole.forget_gathered(),
    "torch": lambda optimizer: setattr(optimizer, "_all_state_dicts", []),
    "fairscale": lambda optimizer: setattr(optimizer, "_all_states", []),
}


# --------------------------------------------------------------------------------------------- checkpoint


def checkpoint(set_name: str, rounds: int) -> SuiteResult:
    """Gathering the state on rank 0, and taking over one's shard of a whole state.

    All have made one step from the same gradients, so they gather the same, and what was loaded can be
    gathered again: both are checked, bit for bit.

    Args:
        rounds: of loading. Of gathering there are no more than `MOST_CONSOLIDATIONS`.
    Raises:
        RuntimeError: two contenders gathered different states, or one did not load what it was given.
    """
    torch.set_num_threads(1)
    optimizers = {name: _stepped(make, SETS[set_name]) for name, make in _chosen(LOADING).items()}
    ours = optimizers["zero_ref"]
    ours.consolidate_state_dict(to="all")  # the only one of these that can leave it on all ranks and on one
    whole: State = ours.state_dict()["state"]
    _forget("zero_ref", ours)

    consolidating = {name: optimizers[name] for name in CONSOLIDATING if name in optimizers}
    gathering = {
        f"{name}: consolidate": Case(each.consolidate_state_dict, touch_memory, partial(_forget, name, each))
        for name, each in consolidating.items()
    }
    taken = take_turns(gathering, min(rounds, MOST_CONSOLIDATIONS))
    for label, case in gathering.items():
        taken[label].figures = _peaks_by_rank(case)
    check_gathers(consolidating, whole)

    loading = {f"{name}: load": _loading(each, whole) for name, each in optimizers.items()}
    # Ours copies by default. The peers' keep the dict's tensors, as ours does by choice.
    loading[f"{OURS}: load without copies"] = _loading(optimizers[OURS], whole, copy=False)
    taken |= take_turns(loading, rounds)
    for case in loading.values():
        case.before()
        case.run()
    check_gathers(optimizers, whole)
    return result("checkpoint", set_name, taken)


def _stepped(make: Make, model: Set) -> Any:
    """An optimizer that has made one step, on its own copy of the model."""
    params = list(model.make().parameters())
    give_gradients(params)
    optimizer = make(params)
    optimizer.step()
    for param in params:
        param.grad = None
    return optimizer


def _forget(name: str, optimizer: Any) -> None:
    """Free the gathered state, so that no contender's time includes it."""
    FORGET[name.split(",")[0]](optimizer)
    gc.collect()


def _peaks_by_rank(case: Case) -> dict[str, float]:
    """Measure the peak memory of a consolidation on rank 0, which receives, and on the others."""
    peaks = []
    for _ in range(PEAKS):
        case.before()
        peaks.append(meter.gather_from_ranks(peak_growth(case.run)))
        case.after()
    if any(None in of_ranks for of_ranks in peaks):
        return {}
    return {
        "peak_bytes": statistics.median(of_ranks[0] for of_ranks in peaks),
        "peak_bytes_others": max((peak for of_ranks in peaks for peak in of_ranks[1:]), default=0),
    }


def _loading(optimizer: Any, whole: State, **options: bool) -> Case:
    """The optimizer begins without state, as a new one does, and gets a state dict with its own options."""
    numbers = itertools.count()
    groups = [
        {**group, "params": [next(numbers) for _ in group["params"]]} for group in optimizer.param_groups
    ]
    given: dict[str, Any] = {}

    def make_ready() -> None:
        optimizer.state.clear()
        optimizer.optim.state.clear()
        # The peers change the dict that they load, but no tensor in it.
        state = {number: dict(of_param) for number, of_param in whole.items()}
        given.update(state=state, param_groups=copy.deepcopy(groups))
        gc.collect()
        touch_memory()

    return Case(lambda: optimizer.load_state_dict(given, **options), make_ready)


def check_gathers(optimizers: Mapping[str, Any], expected: State) -> None:
    """Let all gather their state on rank 0, where each must be `expected`, bit for bit.

    Raises:
        RuntimeError: on all ranks; names the first that gathers something else.
    Collective: all ranks of the default group.
    """
    for name, optimizer in optimizers.items():
        optimizer.consolidate_state_dict()
        found = first_difference(optimizer.state_dict()["state"], expected) if dist.get_rank() == 0 else None
        _forget(name, optimizer)
        said = meter.gather_from_ranks(found)[0]
        if said is not None:
            raise RuntimeError(f"{name} gathers another state than zero_ref did after the step: {said}.")


def first_difference(state: State, expected: State) -> str | None:
    """Say where two states differ; None where they are equal bit for bit.

    >>> one, other = torch.tensor([1.0]), torch.tensor([2.0])
    >>> first_difference({0: {"exp_avg": one}}, {0: {"exp_avg": other}})
    'exp_avg of parameter 0'
    """
    if state.keys() != expected.keys():
        return f"{len(state)} parameters have a state, where {len(expected)} should"
    for number, of_param in expected.items():
        if state[number].keys() != of_param.keys():
            return f"parameter {number} has {sorted(state[number])}, where it should have {sorted(of_param)}"
        for key, value in of_param.items():
            if not torch.equal(state[number][key], value):
                return f"{key} of parameter {number}"
    return None


# ------------------------------------------------------------------------------------------------- memory


def memory(set_name: str, rounds: int) -> SuiteResult:
    """The state that each keeps, and what a warm step takes beyond what is there before it.

    The figures of each contender:
        state_bytes: of the rank that keeps the most.
        state_share: how many times 1/N of the plain optimizer's state that is.
        peak_bytes: the median, over `rounds` steps, of the rank that took the most.
    """
    torch.set_num_threads(1)
    makes = contenders.whole() | contenders.sharded()
    taken = {name: Taken(figures=_memory_of(make, SETS[set_name], rounds)) for name, make in makes.items()}
    even_share = taken[PLAIN].figures["state_bytes"] / dist.get_world_size()
    for one in taken.values():
        one.figures["state_share"] = one.figures["state_bytes"] / even_share
    return result("memory", set_name, taken)


def _memory_of(make: Make, model: Set, rounds: int) -> dict[str, float]:
    """Measure one contender's memory while no other exists: it could get memory that another has freed."""
    params = list(model.make().parameters())
    give_gradients(params)
    optimizer = make(params)
    for _ in range(WARM_UP):
        optimizer.step()
    held = meter.state_bytes(getattr(optimizer, "optim", optimizer))
    figures: dict[str, float] = {"state_bytes": max(meter.gather_from_ranks(held))}
    peaks = [meter.gather_from_ranks(peak_growth(optimizer.step)) for _ in range(rounds)]
    if not any(None in of_ranks for of_ranks in peaks):
        figures["peak_bytes"] = statistics.median(max(of_ranks) for of_ranks in peaks)
    del optimizer, params
    gc.collect()
    return figures


# ------------------------------------------------------------------------------------------- construction


def construction(set_name: str, rounds: int) -> SuiteResult:
    """Making the optimizer of a model that has made no step: `rounds` times, on new parameters each time."""
    torch.set_num_threads(1)
    model = SETS[set_name].make()
    cases = {name: _making(make, model) for name, make in _chosen(CONSTRUCTED).items()}
    return result("construction", set_name, take_turns(cases, rounds))


def _making(make: Make, model: nn.Module) -> Case:
    params: list[torch.Tensor] = []
    made: list[object] = []

    def make_ready() -> None:
        params.extend(copy.deepcopy(model).parameters())
        touch_memory()

    def free() -> None:
        made.clear()
        params.clear()
        gc.collect()  # an optimizer may be part of a cycle

    return Case(lambda: made.append(make(params)), make_ready, free)


def _chosen(names: tuple[str, ...]) -> dict[str, Make]:
    """Return the installed contenders among these names."""
    return {name: make for name, make in contenders.sharded().items() if name in names}
