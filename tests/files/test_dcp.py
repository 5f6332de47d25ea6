"""torch.distributed.checkpoint and FSDP beside this optimizer, both ways, at other world sizes.

A model is trained for some steps by one program, saved, and goes on in the other. Gradients are the same for
both, so the parameters must equal those of the plain optimizer on one process bit for bit.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from library.training import Snapshot, assert_same, filled
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, OptimStateKeyType, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import SGD, AdamW

from zero_ref.files.dcp import OptimizerToLoad, StatefulOptimizer
from zero_ref.lab.ranks import run
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.plan.partition import Partition, Slice
from zero_ref.plan.rules import from_lists

pytestmark = pytest.mark.ranks


class Momentum(SGD):
    """SGD that has a state."""

    def __init__(self, params: Any, lr: float = 0.1, momentum: float = 0.9, weight_decay: float = 0) -> None:
        super().__init__(params, lr, momentum, weight_decay=weight_decay)


EVERYTHING = StateDictOptions(full_state_dict=True, cpu_offload=True)
PARTIAL = DefaultLoadPlanner(allow_partial_load=True)


class Parts(nn.Module):
    """Parameters of 1, 2 and 4 dimensions; `unused` never gets a gradient, `shift` is frozen."""

    def __init__(self, channels_last: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(9, 70)
        self.conv = nn.Conv2d(5, 6, 3)
        self.norm = nn.LayerNorm(8)
        self.unused = nn.Linear(3, 5)
        self.shift = nn.Parameter(torch.zeros(7), requires_grad=False)
        filled(self)
        if channels_last:
            self.conv.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.names = [name for name, _ in self.named_parameters()]

    def forward(self, step: int) -> torch.Tensor:
        """Its gradients are those of that step."""
        return torch.stack(
            [
                (
                    self.get_submodule(name.rpartition(".")[0]).__getattr__(name.rpartition(".")[2]) * grad
                ).sum()
                for name, grad in gradients(self.names, Parts(), step)
            ]
        ).sum()


def gradients(names: list[str], shaped: nn.Module, step: int) -> Iterator[tuple[str, torch.Tensor]]:
    """The gradients of a step by name, the same on all ranks."""
    for index, name in enumerate(names):
        if name != "shift" and not name.startswith("unused"):
            generator = torch.Generator().manual_seed(1000 * step + index)
            yield name, torch.randn(shaped.get_parameter(name).shape, generator=generator)


def groups(model: nn.Module, turned: bool = False, named: bool = False) -> list[dict[str, Any]]:
    """Vectors and tensors with other options; `turned`, the groups and what is in them in another order."""
    found: dict[bool, list[Any]] = {False: [], True: []}
    for name, param in model.named_parameters():
        is_matrix = name.endswith("weight") and "norm" not in name  # FSDP1 makes all parameters flat
        found[is_matrix].append((name, param) if named else param)
    made = [
        {"params": found[False], "weight_decay": 0.0, "lr": 0.03},
        {"params": found[True], "weight_decay": 0.1, "lr": 0.02, "betas": (0.8, 0.95)},
    ]
    return [{**group, "params": group["params"][::-1]} for group in reversed(made)] if turned else made


def steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, which: range, rounded: torch.dtype = torch.float32
) -> list[Snapshot]:
    """Parameters after each step, whole and by the order of the model; the same gradients on all ranks."""
    snapshots = []
    for step in which:
        for name, grad in gradients(model.names, Parts(), step):  # type: ignore[arg-type]
            param = model.get_parameter(name)
            if isinstance(param, DTensor):
                grad = distribute_tensor(grad, param.device_mesh, param.placements)
            param.grad = torch.empty_like(param).copy_(grad.to(rounded))
        optimizer.step()
        snapshots.append([whole(param).detach().clone() for param in model.parameters()])
    return snapshots


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def plain() -> tuple[list[Snapshot], Any]:
    """On one process: parameters after steps 2 and 3, and the state after step 1 by names."""
    model = Parts()
    optimizer = AdamW(groups(model))
    steps(model, optimizer, range(2))
    state = get_optimizer_state_dict(model, optimizer)
    return steps(model, optimizer, range(2, 4)), state


def fsdp(**options: Any) -> tuple[nn.Module, AdamW]:
    model = Parts()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, AdamW(groups(model, **options))


def ours(
    channels_last: bool = False,
    turned: bool = False,
    named: bool = False,
    optimizer_class: Any = AdamW,
    **options: Any,
) -> tuple[nn.Module, ZeroRedundancyOptimizer]:
    model = Parts(channels_last)
    options = {"partition": "even", "elementwise": True, **options}  # `Momentum` is none of torch's classes
    return model, ZeroRedundancyOptimizer(groups(model, turned, named), optimizer_class, **options)


# -------------------------------------------------------------------------- DCP, sharded, in both directions


def ours_saves(path: Path, flatten: bool = False, **options: Any) -> None:
    model, optimizer = ours(**options)
    steps(model, optimizer, range(2))
    state = {
        "model": get_model_state_dict(model),
        "optim": StatefulOptimizer(model, optimizer, flatten=flatten),
    }
    dcp.save(state, checkpoint_id=path)


def ours_goes_on(path: Path, **options: Any) -> tuple[list[Snapshot], Any]:
    model, optimizer = ours(**options)
    zeroed(model)
    state: dict[str, Any] = {"model": get_model_state_dict(model)}
    dcp.load({**state, "optim": StatefulOptimizer(model, optimizer, path)}, checkpoint_id=path)
    set_model_state_dict(model, state["model"])
    return steps(model, optimizer, range(2, 4)), list_of_state(optimizer)


def list_of_state(optimizer: ZeroRedundancyOptimizer) -> list[int]:
    """Return the number of elements of state on this rank."""
    return sum(value.numel() for of in optimizer.optim.state.values() for value in of.values() if value.ndim)


def fsdp_saves(path: Path, flatten: bool = False, **options: Any) -> None:
    model, optimizer = fsdp(**options)
    steps(model, optimizer, range(2))
    as_said = StateDictOptions(flatten_optimizer_state_dict=flatten)
    state = get_optimizer_state_dict(model, optimizer, options=as_said)
    dcp.save({"model": get_model_state_dict(model), "optim": state}, checkpoint_id=path)


def fsdp_goes_on(path: Path, flatten: bool = False, **options: Any) -> list[Snapshot]:
    model, optimizer = fsdp(**options)
    zeroed(model)
    as_said = StateDictOptions(flatten_optimizer_state_dict=flatten, strict=False)
    state = {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optimizer, options=as_said),
    }
    dcp.load(state, checkpoint_id=path, planner=PARTIAL)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optim"], options=as_said)
    return steps(model, optimizer, range(2, 4))


@torch.no_grad()
def zeroed(model: nn.Module) -> None:
    for param in model.parameters():
        param.zero_()


@pytest.mark.parametrize("flatten", [False, True])
def test_what_fully_shard_saved_at_2_goes_on_here_at_3(tmp_path: Path, flatten: bool) -> None:
    rest, _ = plain()
    run(fsdp_saves, 2, tmp_path, flatten)
    results = run(ours_goes_on, 3, tmp_path, channels_last=True, turned=not flatten)
    numels = [numel for _, numel in results]
    for trained, _ in results:
        assert_same(trained, rest, "from fully_shard")
    assert max(numels) < 0.4 * sum(numels)


def test_what_was_saved_here_at_3_goes_on_under_fully_shard_at_2(tmp_path: Path) -> None:
    rest, _ = plain()
    run(ours_saves, 3, tmp_path, flatten=True, channels_last=True, turned=True)
    for trained in run(fsdp_goes_on, 2, tmp_path, flatten=True, turned=True):
        assert_same(trained, rest, "to fully_shard")


@pytest.mark.parametrize("flatten", [False, True])
def test_the_keys_shapes_and_dtypes_are_those_of_a_plain_optimizer(tmp_path: Path, flatten: bool) -> None:
    run(fsdp_saves, 2, tmp_path / "fsdp", flatten)
    run(ours_saves, 3, tmp_path / "ours", flatten)

    def described(path: Path) -> dict[str, Any]:
        found = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        return {
            name: (stored.size, stored.properties.dtype) if hasattr(stored, "size") else "bytes"
            for name, stored in found.items()
        }

    assert described(tmp_path / "ours") == described(tmp_path / "fsdp")


def test_a_save_here_goes_on_here_at_another_world_size(tmp_path: Path) -> None:
    rest, _ = plain()
    run(ours_saves, 2, tmp_path, partition="equal_shares", channels_last=True)
    for trained, _ in run(ours_goes_on, 3, tmp_path, turned=True):
        assert_same(trained, rest, "here and here")


def in_turn(numels: Sequence[int], world_size: int) -> Partition:
    """Each parameter in pieces of 10 elements, which the ranks own in turn."""
    owned: list[list[Slice]] = [[] for _ in range(world_size)]
    for number, numel in enumerate(numels):
        for start in range(0, numel, 10):
            owned[start // 10 % world_size].append(Slice(number, start, min(start + 10, numel)))
    return from_lists(numels, owned)


def test_slices_of_one_parameter_on_one_rank_count_their_own_steps(tmp_path: Path) -> None:
    rest, _ = plain()
    run(ours_saves, 2, tmp_path)
    for trained, _ in run(ours_goes_on, 2, tmp_path, partition=in_turn):
        assert_same(trained, rest, "in turn")


# ------------------------------------------------------------------------------------ whole states, by names


def middle() -> tuple[Snapshot, Any]:
    """Return the plain optimizer's parameters and state by names after step 1, on one process."""
    model = Parts()
    optimizer = AdamW(groups(model))
    (_, values) = steps(model, optimizer, range(2))
    return values, get_optimizer_state_dict(model, optimizer)


def with_values(model: nn.Module) -> nn.Module:
    """The model with the parameters after step 1."""
    with torch.no_grad():
        for param, value in zip(model.parameters(), middle()[0], strict=True):
            param.copy_(value)
    return model


def fsdp_whole() -> Any:
    model, optimizer = fsdp(turned=True)
    steps(model, optimizer, range(2))
    return get_optimizer_state_dict(model, optimizer, options=EVERYTHING)


def takes_whole(state: Any, optimizer_class: Any = AdamW, **options: Any) -> list[Snapshot]:
    model, optimizer = ours(optimizer_class=optimizer_class, **options)
    optimizer.load_state_dict(state)
    return steps(with_values(model), optimizer, range(2, 4))


def test_a_whole_state_of_fully_shard_loads_here_by_names_whatever_the_order(tmp_path: Path) -> None:
    rest, _ = plain()
    state, _ = run(fsdp_whole, 2)
    for trained in run(takes_whole, 3, state, named=True):
        assert_same(trained, rest, "a whole state")


SET_OPTIONS = [
    {},
    {"full_state_dict": True},
    {"full_state_dict": True, "cpu_offload": True},
    {"full_state_dict": True, "broadcast_from_rank0": True},
    {"flatten_optimizer_state_dict": True},
]


def gets_and_sets() -> list[tuple[list[Snapshot], bool]]:
    """Set what the plain optimizer has, train, get the state, and set it again where it was not yet."""
    results = []
    for chosen in SET_OPTIONS:
        flatten = StateDictOptions(flatten_optimizer_state_dict="flatten_optimizer_state_dict" in chosen)
        reference = with_values(Parts())
        plain_optimizer = AdamW(groups(reference))
        set_optimizer_state_dict(
            reference, plain_optimizer, middle()[1], options=StateDictOptions(strict=False)
        )
        state = get_optimizer_state_dict(reference, plain_optimizer, options=flatten)
        if "broadcast_from_rank0" in chosen and dist.get_rank():
            state = {}
        model, optimizer = ours(turned=True)
        to_set = StateDictOptions(strict=False, **chosen)
        set_optimizer_state_dict(model, OptimizerToLoad(optimizer), state, options=to_set)
        trained = steps(with_values(model), optimizer, range(2, 4))
        steps(reference, plain_optimizer, range(2, 4))
        optimizer.consolidate_state_dict("all")
        found = get_optimizer_state_dict(model, optimizer, options=flatten)
        expected = get_optimizer_state_dict(reference, plain_optimizer, options=flatten)
        results.append((trained, equal(found, expected)))
    return results


BARE_OPTIONS: list[dict[str, Any]] = [
    {"full_state_dict": True},
    {"full_state_dict": True, "broadcast_from_rank0": True},
    {"flatten_optimizer_state_dict": True},
]


def sets_without_keys() -> list[list[str]]:
    """Return the errors of torch's function before any step, after one, and once all ranks have the state."""
    model, optimizer = ours()
    reference = Parts()
    plain_optimizer = AdamW(groups(reference))
    steps(reference, plain_optimizer, range(2))

    def said() -> list[str]:
        of_options = []
        for options in BARE_OPTIONS:
            chosen = StateDictOptions(strict=False, **options)
            state = get_optimizer_state_dict(reference, plain_optimizer, options=chosen)
            mine = {} if "broadcast_from_rank0" in options and optimizer.rank else state
            of_options.append(
                caught(partial(set_optimizer_state_dict, model, optimizer, mine, options=chosen))
            )
        return of_options

    before_any_step = said()
    steps(model, optimizer, range(2))
    after_a_step = said()
    optimizer.consolidate_state_dict("all")
    return [before_any_step, after_a_step, [said()[0]]]


def test_where_torch_asks_for_keys_that_no_rank_has_the_error_names_the_way() -> None:
    for before_any_step, after_a_step, of_gathered in run(sets_without_keys, 3):
        for said in (*before_any_step, *after_a_step):
            assert "zero_ref.StatefulOptimizer" in said
        assert of_gathered == ["nothing"], "all have the whole, and so its keys"


def equal(found: Any, expected: Any) -> bool:
    """Two state dicts are the same, but for the order of groups and of what is in them.

    A tuple may be a list: with `full_state_dict`, torch makes it one.
    """
    if isinstance(expected, tuple):
        found, expected = list(found), list(expected)
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(equal(found[key], expected[key]) for key in expected)
    if isinstance(expected, list):
        return len(found) == len(expected) and all(any(equal(one, it) for one in found) for it in expected)
    return torch.equal(found, expected) if isinstance(expected, torch.Tensor) else bool(found == expected)


def test_torchs_functions_get_and_set_the_state_with_each_of_their_options() -> None:
    rest, _ = plain()
    for of_rank in run(gets_and_sets, 3, timeout=120):
        for chosen, (trained, same) in zip(SET_OPTIONS, of_rank, strict=True):
            assert_same(trained, rest, str(chosen))
            assert same, chosen


def gives_whole() -> Any:
    model, optimizer = ours()
    steps(model, optimizer, range(2))
    optimizer.consolidate_state_dict(0)
    return get_optimizer_state_dict(model, optimizer) if dist.get_rank() == 0 else {}


def fsdp_takes_whole(state: Any) -> list[Snapshot]:
    model, optimizer = fsdp()
    model_options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, with_values(Parts()).state_dict(), options=model_options)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    set_optimizer_state_dict(model, optimizer, state if dist.get_rank() == 0 else {}, options=options)
    return steps(model, optimizer, range(2, 4))


def test_a_whole_state_from_here_goes_on_under_fully_shard() -> None:
    rest, _ = plain()
    state, *_ = run(gives_whole, 3)
    for trained in run(fsdp_takes_whole, 2, state):
        assert_same(trained, rest, "a whole state")


def on_a_rank_that_owns_nothing() -> tuple[list[str], list[tuple[bool, int, int]], list[Any], list[Snapshot]]:
    """Return the errors where no rank has the whole state, what `state` has, the whole states, the steps."""
    model, optimizer = ours(partition=[[*range(9)], []])
    said, held, states = [], [], []

    def get() -> None:
        states.append(get_optimizer_state_dict(model, optimizer))

    def look() -> None:
        held.append((bool(optimizer.state), len(optimizer.state), len([*optimizer.state])))

    look()
    said.append(caught(get))
    set_optimizer_state_dict(model, optimizer, middle()[1], options=StateDictOptions(strict=False))
    said.append(caught(get))
    look()
    for which in (range(2, 3), range(3, 4)):
        trained = steps(with_values(model) if which[0] == 2 else model, optimizer, which)
        optimizer.zero_grad()
        said.append(caught(get))
        optimizer.consolidate_state_dict("all")
        get()
    return said, held, states, trained


def test_torchs_functions_say_on_all_ranks_alike_what_they_can_give_and_step_nothing() -> None:
    """They step an optimizer without state: a rank that owns nothing would step alone, and wait."""
    rest, _ = plain()
    reference = with_values(Parts())
    plain_optimizer = AdamW(groups(reference))
    set_optimizer_state_dict(reference, plain_optimizer, middle()[1], options=StateDictOptions(strict=False))
    for rank, (said, held, states, trained) in enumerate(run(on_a_rank_that_owns_nothing, 2)):
        assert len(said) == 4
        assert all("zero_ref.StatefulOptimizer" in one for one in said), said
        assert held == [(False, 0, 0), [(True, 6, 6), (False, 0, 0)][rank]]
        assert_same(trained, rest[1:], "no step but the program's")
        assert len(states) == 2
    for step, state in zip(range(2, 4), states, strict=True):
        steps(reference, plain_optimizer, range(step, step + 1))
        assert equal(state, get_optimizer_state_dict(reference, plain_optimizer))


class App:
    """The Stateful class of torch's tutorial on distributed checkpoints."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, gathers: bool) -> None:
        self.model, self.optimizer, self.gathers = model, optimizer, gathers

    def state_dict(self) -> dict[str, Any]:
        if self.gathers and isinstance(self.optimizer, ZeroRedundancyOptimizer):
            self.optimizer.consolidate_state_dict("all")
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
        )


def linear(optimizer_class: Any = AdamW) -> tuple[nn.Module, ZeroRedundancyOptimizer]:
    model = filled(nn.Linear(3, 2))
    return model, ZeroRedundancyOptimizer(model.parameters(), optimizer_class, lr=0.1)


def as_in_the_tutorial(path: Path, gathers: bool) -> tuple[list[str], bool]:
    """Save and load by the class; return the errors, and whether the state came back in the end."""
    model, optimizer = linear()
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    said = [caught(partial(dcp.save, {"app": App(model, optimizer, gathers)}, checkpoint_id=path))]
    other, again = linear()
    load = partial(dcp.load, {"app": App(other, again, gathers)}, checkpoint_id=path)
    said.append(caught(load))
    if not gathers:
        return said, False
    # Once the optimizer has stepped, its state has the keys that torch reads.
    other(torch.zeros(3)).sum().backward()
    again.step()
    said.append(caught(load))
    optimizer.consolidate_state_dict("all")
    again.consolidate_state_dict("all")
    return said, equal(again.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("gathers", [True, False])
def test_the_class_of_torchs_tutorial_never_loads_moments_of_zero_in_silence(
    tmp_path: Path, gathers: bool
) -> None:
    for said, is_equal in run(as_in_the_tutorial, 2, tmp_path, gathers):
        refused = ["zero_ref.StatefulOptimizer" in one for one in said]
        assert refused == ([False, True, False] if gathers else [True, True]), said
        assert is_equal == gathers


# ----------------------------------------------------------------------------------------------------- FSDP1


def fsdp1(optimizer_class: Any) -> tuple[Any, torch.optim.Optimizer]:
    cpu = torch.device("cpu")
    model = Parts()
    model.unused = FullyShardedDataParallel(model.unused, use_orig_params=True, device_id=cpu)  # type: ignore
    wrapped = FullyShardedDataParallel(model, use_orig_params=True, device_id=cpu)
    return wrapped, optimizer_class(groups(wrapped))


def fsdp1_steps(model: Any, optimizer: torch.optim.Optimizer, which: range) -> list[Snapshot]:
    snapshots = []
    for step in which:
        optimizer.zero_grad()
        model(step).backward()
        optimizer.step()
        with FullyShardedDataParallel.summon_full_params(model):
            snapshots.append([param.detach().clone() for param in model.parameters()])
    return snapshots


def fsdp1_whole() -> tuple[Any, Any]:
    """The whole state keyed by name and by number.

    Of SGD: on a CPU, FSDP1 of torch 2.13 gathers all tensors of a parameter's state into the same memory, so
    that of AdamW's moments only the last is right.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP1 is deprecated
        model, optimizer = fsdp1(Momentum)
        fsdp1_steps(model, optimizer, range(2))
        by_name = FullyShardedDataParallel.full_optim_state_dict(model, optimizer, rank0_only=False)
        by_number = FullyShardedDataParallel.rekey_optim_state_dict(
            copy.deepcopy(by_name), OptimStateKeyType.PARAM_ID, model, optim=optimizer
        )
    return by_name, by_number


def fsdp1_saves(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, optimizer = fsdp1(AdamW)
        fsdp1_steps(model, optimizer, range(2))
        sharded = FullyShardedDataParallel.sharded_optim_state_dict(model, optimizer)
        dcp.save({"optim": sharded}, checkpoint_id=path)


def takes_sharded(path: Path) -> list[Snapshot]:
    model, optimizer = ours(turned=True)
    dcp.load({"optim": StatefulOptimizer(model, optimizer, path)}, checkpoint_id=path)
    return steps(with_values(model), optimizer, range(2, 4))


def test_whole_states_of_fsdp1_go_on_here_by_name_and_by_number() -> None:
    (by_name, by_number), _ = run(fsdp1_whole, 2)
    model = with_values(Parts())
    optimizer = Momentum(groups(model))
    state = copy.deepcopy(by_name)
    set_optimizer_state_dict(model, optimizer, state, options=StateDictOptions(strict=False))
    rest = steps(model, optimizer, range(2, 4))
    for trained in run(takes_whole, 3, by_name, Momentum, turned=True, named=True):
        assert_same(trained, rest, "by name")
    for trained in run(takes_whole, 3, by_number, Momentum):
        assert_same(trained, rest, "by number")


def test_a_sharded_state_of_fsdp1_goes_on_here(tmp_path: Path) -> None:
    rest, _ = plain()
    run(fsdp1_saves, 2, tmp_path)
    for trained in run(takes_sharded, 3, tmp_path):
        assert_same(trained, rest, "sharded")


def fsdp1_takes(state: Any) -> list[Snapshot]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, optimizer = fsdp1(AdamW)
        with FullyShardedDataParallel.summon_full_params(model):
            with_values(model)
        theirs = FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, state)
        optimizer.load_state_dict(theirs)
        return fsdp1_steps(model, optimizer, range(2, 4))


def test_a_whole_state_from_here_goes_on_under_fsdp1() -> None:
    rest, _ = plain()
    state, *_ = run(gives_whole, 3)
    for trained in run(fsdp1_takes, 2, state):
        # FSDP1 cuts anywhere, and the last elements of a piece are rounded otherwise than in a whole tensor.
        for step, values in zip(trained, rest, strict=True):
            torch.testing.assert_close(step, values, rtol=1e-5, atol=1e-7)


# ----------------------------------------------------------------------------------------- in the background


def saves_while_it_trains(path: Path) -> None:
    model, optimizer = ours()
    steps(model, optimizer, range(2))
    state = {"model": get_model_state_dict(model), "optim": StatefulOptimizer(model, optimizer)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about pinned memory
        saving = dcp.async_save(state, checkpoint_id=path, process_group=dist.new_group(backend="gloo"))
    steps(model, optimizer, range(2, 4))
    saving.result()


def test_dcp_saves_in_the_background_what_was_there_when_it_began(tmp_path: Path) -> None:
    rest, _ = plain()
    run(saves_while_it_trains, 2, tmp_path)
    for trained, _ in run(ours_goes_on, 3, tmp_path):
        assert_same(trained, rest, "async_save")


# ----------------------------------------------------------------------------------------- 16-bit parameters


def halved(channels_last: bool = False, **options: Any) -> tuple[nn.Module, ZeroRedundancyOptimizer]:
    model = Parts(channels_last).bfloat16()
    options = {"partition": "even", "master_dtype": torch.float32, **options}
    return model, ZeroRedundancyOptimizer(groups(model, named=True), AdamW, **options)


def halved_saves(path: Path) -> None:
    model, optimizer = halved()
    steps(model, optimizer, range(2))
    dcp.save({"optim": StatefulOptimizer(model, optimizer)}, checkpoint_id=path)


def halved_goes_on(path: Path | None, **options: Any) -> list[Snapshot]:
    model, optimizer = halved(**options)
    if path is None:
        return steps(model, optimizer, range(4))[2:]
    dcp.load({"optim": StatefulOptimizer(model, optimizer, path)}, checkpoint_id=path)
    with warnings.catch_warnings():
        # The gradients here do not depend on the weights, which come with the first update.
        warnings.filterwarnings("ignore", message=".*the model's own weights were not loaded")
        return steps(model, optimizer, range(2, 4))


def test_masters_go_on_and_come_from_parameters_of_32_bits(tmp_path: Path) -> None:
    run(halved_saves, 2, tmp_path / "narrow")
    expected = run(halved_goes_on, 2, None)[0]
    for trained in run(halved_goes_on, 3, tmp_path / "narrow", channels_last=True):
        assert_same(trained, expected, "masters")
    run(fsdp_saves, 2, tmp_path / "wide")
    expected = run(halved_from_wide, 1, tmp_path / "wide")[0]
    for trained in run(halved_goes_on, 3, tmp_path / "wide"):
        assert_same(trained, [[value.bfloat16() for value in values] for values in expected], "from 32 bits")


def halved_from_wide(path: Path) -> list[Snapshot]:
    """The plain optimizer on float32 parameters with the gradients of a model in bfloat16."""
    model = with_values(Parts())
    optimizer = AdamW(groups(model))
    set_optimizer_state_dict(model, optimizer, middle()[1], options=StateDictOptions(strict=False))
    return steps(model, optimizer, range(2, 4), torch.bfloat16)


# -------------------------------------------------------------------------------------------------- mistakes


def mistakes(path: Path) -> list[str]:
    model, optimizer = ours()
    other = Parts()
    wrong = nn.ParameterDict({"up": nn.Parameter(torch.zeros(3))})
    elsewhere = ZeroRedundancyOptimizer(wrong.parameters(), AdamW)
    differs = nn.ModuleDict({"up": nn.Linear(70, 9), "norm": nn.LayerNorm(8)})
    of_differs = ZeroRedundancyOptimizer(groups(differs), AdamW)
    before = copy.deepcopy(dict(optimizer.optim.state_dict()))

    def load(state: Any) -> None:
        dcp.load({"optim": state}, checkpoint_id=path)

    def on_one_rank() -> None:
        """Rank 1 reads a folder that is not there."""
        load(StatefulOptimizer(model, optimizer, path / "nowhere" if dist.get_rank() else path))

    said = [
        caught(lambda: StatefulOptimizer(other, optimizer)),
        caught(lambda: load(StatefulOptimizer(model, optimizer, path, key="optimizer"))),
        caught(lambda: load(StatefulOptimizer(wrong, elsewhere, path))),
        caught(lambda: load(StatefulOptimizer(differs, of_differs, path))),
        caught(lambda: StatefulOptimizer(model, optimizer).load_state_dict({})),
        caught(on_one_rank),
    ]
    assert equal(dict(optimizer.optim.state_dict()), before)
    return said


def caught(call: Callable[[], Any]) -> str:
    try:
        call()
    except BaseException as error:  # DCP's own is none of Exception
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_mistakes_are_named_on_all_ranks(tmp_path: Path) -> None:
    run(fsdp_saves, 2, tmp_path)
    for rank, said in enumerate(run(mistakes, 2, tmp_path)):
        another, key, wrong, differs, to_save, one_rank = said
        assert f"rank {rank}: parameters [0, 1, 2, 3, 4, 5, 6, 7, 8] of the optimizer are none of" in another
        assert "no optimizer under the key 'optimizer'; its keys are ['model', 'optim']" in key
        assert "parameter groups of [6, 3] parameters and this optimizer has [1]" in wrong
        assert "parameter groups of [6, 3] parameters and this optimizer has [3, 1]" in differs
        assert "is to save. To load, make one with the checkpoint" in to_save
        assert "rank 1" in one_rank or "nowhere" in one_rank


def loads_another_step(path: Path) -> str:
    for step in (1, 2):
        model, optimizer = ours()
        for _ in range(step):
            for param in model.parameters():
                param.grad = torch.ones_like(param)
            optimizer.step()
        dcp.save({"optim": StatefulOptimizer(model, optimizer)}, checkpoint_id=path / str(step))
    mine = path / str(1 + dist.get_rank())
    return caught(StatefulOptimizer(model, optimizer, mine).state_dict)


def test_ranks_that_load_saves_of_different_steps_all_raise(tmp_path: Path) -> None:
    for message in run(loads_another_step, 2, tmp_path):
        assert "ranks disagree, so none can give the optimizer state to DCP: rank 1 has [save " in message
        assert "Give the reader of one checkpoint on every rank" in message


def fsdp_of_another_shape(path: Path) -> None:
    model = Parts()
    model.up = nn.Linear(70, 9)
    dcp.save({"optim": get_optimizer_state_dict(model, stepped(model))}, checkpoint_id=path)


def stepped(model: nn.Module) -> AdamW:
    optimizer = AdamW(groups(model))
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    return optimizer


def loads_another_shape(path: Path) -> str:
    model, optimizer = ours()
    return caught(lambda: dcp.load({"optim": StatefulOptimizer(model, optimizer, path)}, checkpoint_id=path))


def test_a_state_of_other_shapes_is_refused(tmp_path: Path) -> None:
    run(fsdp_of_another_shape, 1, tmp_path)
    for said in run(loads_another_shape, 2, tmp_path):
        assert "'exp_avg' for parameter up.bias has shape (9,); the parameter has (70,)" in said, said
