"""A program that reads, changes or replaces the state of parameters does so under every partition.

Each script is written for the plain optimizer and runs on it and on the sharded one, whose parameters must
stay equal bit for bit. By `state_of` a script uses `optimizer.state`, and then `optimizer.optim.state`.
"""

from __future__ import annotations

import copy
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from library.training import (
    MODES,
    Backward,
    Script,
    assert_same,
    assert_trains_as_plain,
    fill_gradients,
    run_script,
)
from torch import nn, optim
from torch.optim import Optimizer

from zero_ref.comm.collectives import Collectives
from zero_ref.dropin.oss import OSS
from zero_ref.lab import virtual
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.plan.partition import Slice

StateOf = Callable[[Any], Any]
SOME_MODES: list[tuple[Any, bool]] = [("sorted_greedy", True), ("even", False)]


def by_parameter(optimizer: Any) -> Any:
    return optimizer.state


def by_local_optimizer(optimizer: Any) -> Any:
    return getattr(optimizer, "optim", optimizer).state


Change = Callable[[nn.Module, Any], None]


def training(*changes: Change) -> Script:
    """Two steps, and then each change with a step after it."""

    def script(model: nn.Module, optimizer: Optimizer, backward: Backward) -> Iterator[None]:
        for step in range(2 + len(changes)):
            if step >= 2:
                changes[step - 2](model, optimizer)
            backward(step)
            optimizer.step()
            yield

    return script


def reset_in_place(state_of: StateOf) -> Change:
    """As ReLoRA resets its optimizer: what has no state is another rank's."""

    def change(model: nn.Module, optimizer: Any) -> None:
        for param in model.parameters():
            state = state_of(optimizer).get(param, {})
            if len(state) > 0:
                state["exp_avg"].zero_()
                state["exp_avg_sq"].mul_(0.5)

    return change


def replaced_entries(state_of: StateOf) -> Change:
    def change(model: nn.Module, optimizer: Any) -> None:
        for param in model.parameters():
            if state := state_of(optimizer).get(param):
                state["exp_avg"] = torch.full_like(param, 0.25)
                state["exp_avg_sq"] = torch.ones_like(state["exp_avg_sq"])

    return change


def replaced_states(state_of: StateOf) -> Change:
    def change(model: nn.Module, optimizer: Any) -> None:
        for param in model.parameters():
            if param.requires_grad:
                state_of(optimizer)[param] = {
                    "step": torch.tensor(7.0),
                    "exp_avg": 0.1 * param.detach(),
                    "exp_avg_sq": torch.ones_like(param),
                }

    return change


def deleted_states(state_of: StateOf) -> Change:
    def change(model: nn.Module, optimizer: Any) -> None:
        for param in list(model.parameters())[::2]:
            if param.requires_grad:
                del state_of(optimizer)[param]

    return change


def one_counter(state_of: StateOf) -> Change:
    """A counter of one parameter is no other's, also where small parameters are stepped as one."""

    def change(model: nn.Module, optimizer: Any) -> None:
        param = next(iter(model.parameters()))
        if state := state_of(optimizer).get(param):
            state["step"].zero_()

    return change


@pytest.mark.parametrize("state_of", [by_parameter, by_local_optimizer])
def test_a_program_that_changes_the_state_of_parameters_trains_as_with_the_plain_optimizer(
    state_of: StateOf,
) -> None:
    changes = [reset_in_place, replaced_entries, replaced_states, one_counter, deleted_states]
    script = training(*(change(state_of) for change in changes))
    assert_trains_as_plain(script, world_sizes=[3], modes=MODES, lr=0.01)


def emptied(model: nn.Module, optimizer: Any) -> None:
    optimizer.state = defaultdict(dict)


def emptied_in_the_local_optimizer(model: nn.Module, optimizer: Any) -> None:
    getattr(optimizer, "optim", optimizer).state = defaultdict(dict)


def cleared(model: nn.Module, optimizer: Any) -> None:
    optimizer.state.clear()


def given_by_parameter(model: nn.Module, optimizer: Any) -> None:
    of_param = {"step": torch.tensor(3.0)}
    optimizer.state = defaultdict(
        dict,
        {
            param: {
                **copy.deepcopy(of_param),
                "exp_avg": torch.zeros_like(param),
                "exp_avg_sq": param.detach() ** 2,
            }
            for param in model.parameters()
            if param.requires_grad
        },
    )


def test_the_state_may_be_replaced_as_a_whole() -> None:
    script = training(emptied, emptied_in_the_local_optimizer, cleared, given_by_parameter)
    assert_trains_as_plain(script, world_sizes=[3], modes=SOME_MODES, lr=0.01)


def test_a_state_that_was_put_aside_may_be_put_back() -> None:
    def script(model: nn.Module, optimizer: Optimizer, backward: Backward) -> Iterator[None]:
        aside = None
        for step in range(6):
            backward(step)
            optimizer.step()
            yield
            if step == 1:
                aside, optimizer.state = optimizer.state, defaultdict(dict)
            if step == 3:
                optimizer.state = aside  # type: ignore[assignment]

    assert_trains_as_plain(script, world_sizes=[3], modes=SOME_MODES, lr=0.01)


@pytest.mark.parametrize("options", [{"master_dtype": torch.float32}, {"state_device": True}])
def test_the_state_of_copies_is_found_by_their_parameters(options: dict[str, Any], tmp_path: Path) -> None:
    options = {**options, **({"state_device": tmp_path} if "state_device" in options else {})}

    def on_rank(comm: Collectives, partition: Any) -> int:
        params = [nn.Parameter(torch.ones(shape, dtype=torch.bfloat16)) for shape in ((40, 40), (70,))]
        zero = ZeroRedundancyOptimizer(params, optim.AdamW, comm, partition=partition, lr=0.1, **options)
        fill_gradients(params, 0, comm.world_size, comm)
        zero.step()
        found = 0
        for param in params:
            for state in (zero.state.get(param, {}), zero.optim.state[param]):
                if len(state):
                    assert any(
                        state["exp_avg"] is of_local["exp_avg"] for of_local in zero.optim.state.values()
                    )
                    found += state["exp_avg"].numel()
        return found

    for partition in ("sorted_greedy", "even"):
        assert sum(virtual.run(on_rank, 2, partition)) == 2 * 1670


def stepped(comm: Collectives, partition: Any = "even", **options: Any) -> tuple[list[nn.Parameter], Any]:
    params = [nn.Parameter(torch.ones(shape)) for shape in ((40, 40), (70,))]
    zero = ZeroRedundancyOptimizer(params, optim.AdamW, comm, partition=partition, lr=0.1, **options)
    fill_gradients(params, 0, comm.world_size, comm)
    zero.step()
    return params, zero


def test_a_part_says_the_range_of_its_elements() -> None:
    def on_rank(comm: Collectives) -> list[list[int]]:
        params, zero = stepped(comm)
        for param, state in zero.state.items():
            if isinstance(state, dict):  # of a whole parameter it is the local optimizer's own
                continue
            assert state.param is params[0] is param
            assert set(state) == {"step", "exp_avg", "exp_avg_sq"}
            assert len(state) == 3
            # After one step the first moment is a tenth of the gradient, and the gradients are whole here.
            of_range = param.grad.view(-1)[state.start : state.stop]
            torch.testing.assert_close(state["exp_avg"], 0.1 * of_range)
            assert f"elements [{state.start}, {state.stop}) of (" in repr(state)
        return [[part.start, part.stop] for param in params for part in zero.parts_of_state(param)]

    assert virtual.run(on_rank, 2) == [[[0, 896]], [[896, 1600], [0, 70]]]


def in_turns(numels: Sequence[int], world_size: int) -> list[list[Slice]]:
    """A user's own rule, under which a rank has several parts of a large parameter."""
    owned: list[list[Slice]] = [[] for _ in range(world_size)]
    for number, numel in enumerate(numels):
        for place, start in enumerate(range(0, max(numel, 1), 128)):
            owned[place % world_size].append(Slice(number, start, min(start + 128, numel)))
    return owned


def test_several_parts_of_a_parameter_are_refused_alike_and_given_by_a_method() -> None:
    def script(model: nn.Module, optimizer: Any, backward: Backward) -> Iterator[None]:
        for step in range(3):
            backward(step)
            optimizer.step()
            yield
            for param in model.parameters():
                if isinstance(optimizer, ZeroRedundancyOptimizer):
                    for part in optimizer.parts_of_state(param):
                        if part:
                            part["exp_avg"] = torch.full_like(part["exp_avg"], 0.5)
                elif param in optimizer.state:
                    optimizer.state[param]["exp_avg"].fill_(0.5)

    assert_trains_as_plain(script, modes=[(in_turns, False), (in_turns, True)], lr=0.01)

    def on_rank(comm: Collectives) -> None:
        params, zero = stepped(comm, in_turns)
        for state in (zero.state, zero.optim.state):
            with pytest.raises(RuntimeError, match=r"parameter 0 is cut into \d+ parts.*parts_of_state"):
                state[params[0]]

    virtual.run(on_rank, 2)


def test_what_a_rank_does_not_have_is_said_or_empty_and_never_stored() -> None:
    def on_rank(comm: Collectives) -> None:
        params, zero = stepped(comm, "sorted_greedy")
        mine, others = params[comm.rank], params[1 - comm.rank]
        assert mine in zero.state
        assert others not in zero.state
        assert list(zero.state) == [mine]
        assert bool(zero.state)
        with pytest.raises(KeyError, match=r"param in optimizer\.state.*consolidate_state_dict"):
            zero.state[others]
        assert zero.optim.state[others] == {}
        zero.optim.state[others]["exp_avg"] = torch.ones(3)
        del zero.state[others]
        assert list(zero.optim.state) == [mine]
        with pytest.raises(KeyError, match="no parameter of this optimizer"):
            zero.parts_of_state(nn.Parameter(torch.ones(3)))

    virtual.run(on_rank, 2)


def test_a_part_takes_no_tensor_of_another_size() -> None:
    def on_rank(comm: Collectives) -> None:
        params, zero = stepped(comm)
        if comm.rank == 1:
            return
        with pytest.raises(
            ValueError, match=r"elements \[0, 896\) .* \(896,\), or one in the shape .* \(5,\)"
        ):
            zero.state[params[0]]["exp_avg"] = torch.ones(5)
        with pytest.raises(ValueError, match="not \\(5,\\)"):
            zero.state[params[0]] = {"exp_avg": torch.ones(5)}

    virtual.run(on_rank, 2)


def test_what_was_gathered_is_no_longer_the_state_once_that_was_replaced() -> None:
    def on_rank(comm: Collectives) -> None:
        _, zero = stepped(comm)
        zero.consolidate_state_dict("all")
        zero.state = defaultdict(dict)
        with pytest.raises(RuntimeError, match="has not been gathered"):
            zero.state_dict()
        zero.consolidate_state_dict("all")
        assert zero.state_dict()["state"] == {}

    virtual.run(on_rank, 2)


@pytest.mark.parametrize("partition", ["sorted_greedy", "even", [[0, 1], []]])
def test_truth_length_items_membership_and_lookup_agree(partition: Any) -> None:
    def agrees(state: Any, params: list[nn.Parameter]) -> int:
        keys = [*state]
        assert bool(state) == bool(keys)
        assert len(state) == len(keys) == len(state.items())
        assert all(key in state and len(state[key]) == 3 for key in keys)
        for param in params:
            assert (param in state) == (state.get(param) is not None)
        return len(keys)

    def on_rank(comm: Collectives) -> tuple[int, int]:
        params, zero = stepped(comm, partition)
        found = agrees(zero.state, params)
        assert found == agrees(zero.optim.state, params) == sum(param in zero.state for param in params)
        kept = {param: dict(of_param) for param, of_param in zero.state.items()}
        popped = [zero.state.pop(param, None) for param in params]
        assert [one for one in popped if one is not None] == [*kept.values()]
        return found, agrees(zero.state, params)

    found = virtual.run(on_rank, 2)
    assert found == [(one, 0) for one, _ in found]
    assert sum(one for one, _ in found) == (3 if partition == "even" else 2)


def test_masters_alone_are_no_state_of_the_class() -> None:
    def on_rank(comm: Collectives) -> None:
        params = [nn.Parameter(torch.ones(3, dtype=torch.bfloat16)) for _ in range(2)]
        zero = ZeroRedundancyOptimizer(params, optim.SGD, comm, master_dtype=torch.float32, lr=0.1)
        fill_gradients(params, 0, comm.world_size, comm)
        zero.step()
        zero.consolidate_state_dict("all")
        zero.load_state_dict(zero.state_dict())
        assert not zero.state

    virtual.run(on_rank, 2)


def test_a_copy_of_a_state_is_a_plain_one() -> None:
    def on_rank(comm: Collectives, partition: str) -> None:
        _, zero = stepped(comm, partition)
        for state in (zero.state, zero.optim.state):
            for copied in (copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
                assert type(copied) is defaultdict
                assert len(copied) == len(state) > 0
                for of_copy, of_state in zip(copied.values(), state.values(), strict=True):
                    assert torch.equal(of_copy["exp_avg"], of_state["exp_avg"])
                assert copied[nn.Parameter(torch.ones(1))] == {}

    for partition in ("sorted_greedy", "even"):
        virtual.run(on_rank, 2, partition)


# ------------------------------------------------------------------------------------------- parameter groups


def popped(groups: list[dict[str, Any]]) -> None:
    groups.pop()


def shortened(groups: list[dict[str, Any]]) -> None:
    groups[0]["params"].pop()


def turned(groups: list[dict[str, Any]]) -> None:
    groups[0]["params"].reverse()


def swapped(groups: list[dict[str, Any]]) -> None:
    groups[0]["params"], groups[1]["params"] = groups[1]["params"], groups[0]["params"]


def moved_over(groups: list[dict[str, Any]]) -> None:
    groups[1]["params"].insert(0, groups[0]["params"].pop())


def replaced(groups: list[dict[str, Any]]) -> None:
    groups[0]["params"][1] = nn.Parameter(torch.ones(4))


def appended(groups: list[dict[str, Any]]) -> None:
    groups[0]["params"].append(nn.Parameter(torch.ones(4)))


def added(groups: list[dict[str, Any]]) -> None:
    groups.append({**groups[0], "params": [nn.Parameter(torch.ones(4))]})


@pytest.mark.parametrize(
    ("change", "optimizer_class"),
    [
        *(
            (change, ZeroRedundancyOptimizer)
            for change in (popped, shortened, turned, swapped, moved_over, replaced, appended, added)
        ),
        (shortened, OSS),
    ],
)
def test_lists_of_parameters_that_were_changed_are_refused_before_anything_is_computed(
    change: Callable[[list[dict[str, Any]]], None], optimizer_class: Any
) -> None:
    """And once they are as they were, training goes on as if nothing had been."""

    def on_rank(comm: Collectives, mistaken: bool) -> list[torch.Tensor]:
        params = [nn.Parameter(torch.full((4,), float(number))) for number in range(4)]
        zero = (
            optimizer_class([{"params": params[:2]}, {"params": params[2:]}], optim.AdamW, group=comm, lr=0.1)
            if optimizer_class is OSS
            else optimizer_class([{"params": params[:2]}, {"params": params[2:]}], optim.AdamW, comm, lr=0.1)
        )
        for step in range(3):
            fill_gradients(params, step, comm.world_size, comm)
            if mistaken and step == 1:
                before = [param.detach().clone() for param in params]
                groups = list(zero.param_groups)
                lists = [list(group["params"]) for group in groups]
                zero.consolidate_state_dict("all")
                change(zero.param_groups)
                for act in (zero.step, zero.state_dict, zero.consolidate_state_dict):
                    with pytest.raises(RuntimeError, match=r"param_groups has .* requires_grad_\(False\)"):
                        act()
                assert all(map(torch.equal, params, before))
                zero.param_groups[:] = groups
                for group, of_group in zip(groups, lists):
                    group["params"][:] = of_group
            zero.step()
        return [param.detach().clone() for param in params]

    for world_size in (1, 2):
        right = virtual.run(on_rank, world_size, False)
        for ours, theirs in zip(virtual.run(on_rank, world_size, True), right):
            assert_same([ours], [theirs], change.__name__)


def test_the_way_that_the_error_names_leads_to_a_smaller_optimizer() -> None:
    """As a program prunes: half of one parameter's elements, and another parameter altogether."""

    def pruned(state_dict: dict[str, Any]) -> dict[str, Any]:
        kept = copy.deepcopy(state_dict)
        del kept["state"][2]
        kept["param_groups"][0]["params"].pop()
        for key in ("exp_avg", "exp_avg_sq"):
            kept["state"][0][key] = kept["state"][0][key][:2]
        return kept

    class Pruned(nn.Module):
        def __init__(self, params: list[torch.Tensor]) -> None:
            super().__init__()
            self.params = nn.ParameterList(params)

    def values() -> list[nn.Parameter]:
        return [nn.Parameter(torch.full((4, 3), float(number))) for number in range(3)]

    def rest(params: list[nn.Parameter]) -> list[nn.Parameter]:
        return [nn.Parameter(params[0].detach()[:2].clone()), params[1]]

    def on_rank(comm: Collectives) -> list[list[torch.Tensor]]:
        params = values()
        zero = ZeroRedundancyOptimizer(params, optim.AdamW, comm, lr=0.1)
        fill_gradients(params, 0, 1)
        zero.step()
        zero.consolidate_state_dict("all")
        kept = rest(params)
        smaller = ZeroRedundancyOptimizer(kept, optim.AdamW, comm, lr=0.1)
        smaller.load_state_dict(pruned(zero.state_dict()))
        return run_script(training(), Pruned(kept), smaller, 1)

    params = values()
    plain = optim.AdamW(params, lr=0.1)
    fill_gradients(params, 0, 1)
    plain.step()
    kept = rest(params)
    smaller = optim.AdamW(kept, lr=0.1)
    smaller.load_state_dict(pruned(plain.state_dict()))
    right = run_script(training(), Pruned(kept), smaller, 1)
    for ours in virtual.run(on_rank, 2):
        assert_same(ours, right, "pruned")
