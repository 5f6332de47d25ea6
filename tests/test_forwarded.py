"""Methods of the wrapped class: forwarded to all ranks, and noticed where a user calls them on one."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from schedule_free import Free, FreeOnMasters, switching
from test_merged import Beads
from test_sharded_data_parallel import RULES, Tied, averaged, data, gradients_of, values_of
from torch import nn, optim
from torch.optim import Optimizer
from training import (
    MODES,
    Backward,
    Tangle,
    assert_same,
    assert_state_dicts_equal,
    assert_trains_as_plain,
    caught,
    run_script,
    snapshot,
    train,
)

from zero_ref import OSS, ShardedDataParallel, consolidation_callback
from zero_ref.comm.collectives import Collectives
from zero_ref.lab import virtual
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.shard.coupling import couples_parameters, updates_elementwise
from zero_ref.state.sharded import load_sharded, save_sharded

EVERY_MODE = [*MODES, ("balanced", False), ("equal_shares", True)]


def params_of_ones(count: int = 3, numel: int = 128) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(numel)) for _ in range(count)]


def update(params: list[nn.Parameter], optimizer: Optimizer) -> None:
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()


# ------------------------------------------------------------------------------------------- train and eval


def test_a_schedule_free_optimizer_trains_and_switches_as_plain_in_every_mode() -> None:
    assert_trains_as_plain(switching, Free, modes=EVERY_MODE)


class Together(Free):
    elementwise = True


def test_small_parameters_that_are_stepped_as_one_switch_as_plain_and_stay_so() -> None:
    assert_trains_as_plain(switching, Together, modes=EVERY_MODE, make_model=Beads)

    def on_rank(comm: Collectives) -> list[int]:
        params = params_of_ones(6)
        optimizer: Any = ZeroRedundancyOptimizer(params, Together, comm, True)
        optimizer.train()  # without gradients
        update(params, optimizer)
        return [len(run.members) for run in optimizer.shard.steppers.small.runs]

    assert virtual.run(on_rank, 2) == [[3], [3]]


class Skipping(optim.Adam):
    elementwise = True

    def skip(self) -> None:
        """Count ten updates that were not made, in place: each parameter has a counter of its own."""
        for state in self.state.values():
            state["step"] += 10


def skipping(model: Any, optimizer: Any, backward: Backward) -> Iterator[None]:
    for step in range(4):
        backward(step)
        optimizer.step()
        yield
        optimizer.skip()
        yield


def test_parameters_that_are_stepped_as_one_have_counters_of_their_own_in_a_method() -> None:
    assert_trains_as_plain(skipping, Skipping, world_sizes=[2], modes=EVERY_MODE, make_model=Beads, lr=0.1)


def test_more_ranks_than_parameters_switch_as_plain() -> None:
    assert_trains_as_plain(
        switching, Free, world_sizes=[5], modes=[("sorted_greedy", True), ("even", False)],
        make_model=lambda: nn.ParameterList(params_of_ones(2, 6)),
    )  # fmt: skip


def freezing(model: Any, optimizer: Any, backward: Backward) -> Iterator[None]:
    """A parameter is trained, frozen, switched while it is frozen, and trained again."""
    optimizer.train()
    for step in range(4):
        model.up.weight.requires_grad_(step in (0, 3))
        model.up.weight.grad = None
        backward(step)
        optimizer.step()
        yield
        for switch in (optimizer.eval, optimizer.train):
            switch()
            yield


def test_frozen_parameters_are_switched_on_all_ranks_too() -> None:
    assert_trains_as_plain(freezing, Free, modes=EVERY_MODE)


def adding(model: Any, optimizer: Any, backward: Backward) -> Iterator[None]:
    optimizer.train()
    for step in range(4):
        if step == 2:
            added = {"params": list(model.up.parameters()), "lr": 0.05, "train_mode": True}
            optimizer.add_param_group(added)
        backward(step)
        optimizer.step()
        yield
        for switch in (optimizer.eval, optimizer.train):
            switch()
            yield


def test_groups_added_later_are_switched() -> None:
    def all_but_one(model: Any) -> Any:
        return [param for name, param in model.named_parameters() if not name.startswith("up.")]

    assert_trains_as_plain(adding, Free, modes=EVERY_MODE, groups=all_but_one, check_moved=False)


def by_hand(model: Any, optimizer: Any, backward: Backward) -> Iterator[None]:
    """An option is changed between an update and a switch that uses it."""
    optimizer.train()
    for step in range(3):
        backward(step)
        optimizer.step()
        yield
        optimizer.param_groups[0]["beta"] = 0.5 + step / 10
        for switch in (optimizer.eval, optimizer.train):
            switch()
            yield


def test_options_set_by_hand_count_in_a_switch() -> None:
    assert_trains_as_plain(by_hand, Free, world_sizes=[3], modes=[("sorted_greedy", True), ("even", False)])


def in_16_bits() -> nn.Module:
    model = Tangle()
    model.down.bfloat16()
    model.up.half()
    model.forward = None  # type: ignore[assignment, method-assign]  # gradients are made up
    return model


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize(("partition", "as_view"), [("sorted_greedy", False), ("even", True)])
@pytest.mark.parametrize("in_files", [False, True])
@pytest.mark.parametrize("script", [switching, freezing])
def test_masters_and_state_in_files_are_switched(
    script: Any, in_files: bool, partition: str, as_view: bool, rounding: str, tmp_path: Path
) -> None:
    model = in_16_bits()
    plain = run_script(script, model, FreeOnMasters(model.parameters(), Free, rounding), 3)

    def on_rank(comm: Collectives) -> Any:
        model = in_16_bits()
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), Free, comm, as_view, partition=partition, master_dtype=torch.float32,
            rounding=rounding, rounding_seed=7, state_device=tmp_path if in_files else None,
        )  # fmt: skip
        return run_script(script, model, optimizer, comm.world_size, comm)

    for ours in virtual.run(on_rank, 3):
        assert_same(ours, plain, f"{partition}, {rounding}")


def test_broadcast_dtype_rounds_what_other_ranks_own() -> None:
    def on_rank(comm: Collectives) -> bool:
        params = params_of_ones(2, 6)
        optimizer = ZeroRedundancyOptimizer(params, Free, comm, broadcast_dtype=torch.bfloat16)
        plain = [nn.Parameter(param.detach().clone()) for param in params]
        unsharded = Free(plain)
        for one, its in ((optimizer, params), (unsharded, plain)):
            one.train()  # type: ignore[attr-defined]
            update(its, one)
            update(its, one)
            one.eval()  # type: ignore[attr-defined]
        owners = optimizer.partition.owner_of_param
        assert [param[0].item() != 1 for param in params] == [True, True]
        return all(
            torch.equal(param, value if owner == comm.rank else value.bfloat16().float())
            for param, value, owner in zip(params, plain, owners)
        )

    assert virtual.run(on_rank, 2) == [True, True]


@pytest.mark.parametrize("in_forward", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_a_model_in_sharded_data_parallel_is_switched(rule: Any, in_forward: bool) -> None:
    ranks = 3

    def evaluated(model: nn.Module, optimizer: Any) -> list[list[torch.Tensor]]:
        seen = []
        for switch in (optimizer.eval, optimizer.train):
            switch()
            seen.append(values_of(model))  # at once: no forward has waited for them
        return seen

    models = [Tied() for _ in range(ranks)]
    free, expected = Free(models[0].parameters(), lr=0.01), []
    free.train()
    for step in range(3):
        gradients = [gradients_of(m, lambda m, r=r, s=step: [m(data(r, s))]) for r, m in enumerate(models)]
        for param, grad in zip(models[0].parameters(), averaged(gradients), strict=True):
            param.grad = grad
        free.step()
        expected += evaluated(models[0], free)
        for model in models[1:]:
            model.load_state_dict({**model.state_dict(), **dict(models[0].named_parameters())})

    def on_rank(comm: Collectives) -> list[list[torch.Tensor]]:
        model, seen = Tied(), []
        optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), Free, comm, partition=rule, lr=0.01)
        ddp = ShardedDataParallel(
            model, optimizer, broadcast_buffers=False, reduce_buffer_size=300, gather_in_forward=in_forward
        )
        optimizer.train()
        for step in range(3):
            optimizer.zero_grad()
            ddp(data(comm.rank, step)).backward()
            optimizer.train()  # as transformers' Trainer does, before each backward
            optimizer.step()
            seen += evaluated(model, optimizer)
        return seen

    for ours in virtual.run(on_rank, ranks):
        for a, b in zip(ours, expected, strict=True):
            assert all(map(torch.equal, a, b))


# --------------------------------------------------------------------------------------- saves in either mode


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("as_view", [False, True])
@pytest.mark.parametrize("partition", ["sorted_greedy", "even"])
def test_a_state_saved_in_either_mode_is_the_plain_one_and_loads(
    partition: str, as_view: bool, mode: str, tmp_path: Path
) -> None:
    def goes_on(model: nn.Module, optimizer: Any) -> list[Any]:
        seen = [snapshot(model)]
        optimizer.train()
        for _ in train(model, optimizer, range(3, 5)):
            seen.append(snapshot(model))
        optimizer.eval()
        return [*seen, snapshot(model)]

    def begins(model: nn.Module, optimizer: Any) -> None:
        optimizer.train()
        list(train(model, optimizer, range(3)))
        getattr(optimizer, mode)()

    plain_model = Tangle()
    plain = Free(plain_model.parameters())
    begins(plain_model, plain)
    state, values = copy.deepcopy(plain.state_dict()), snapshot(plain_model)
    expected = goes_on(plain_model, plain)

    def on_rank(comm: Collectives) -> tuple[Any, Any]:
        model = Tangle()
        optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), Free, comm, as_view, partition=partition)
        begins(model, optimizer)
        optimizer.consolidate_state_dict("all")
        whole = optimizer.state_dict()
        save_sharded(optimizer, tmp_path / "shards")
        return whole, goes_on(model, optimizer)

    def resumed(comm: Collectives, from_files: bool) -> Any:
        model = Tangle()
        optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), Free, comm, as_view, partition=partition)
        if from_files:
            load_sharded(optimizer, tmp_path / "shards")
        else:
            optimizer.load_state_dict(state)
            model.load_state_dict(dict(zip(dict(model.named_parameters()), values)), strict=False)
        return goes_on(model, optimizer)

    for whole, ours in virtual.run(on_rank, 3):
        assert_state_dicts_equal(whole, {**state, "state": {k: v for k, v in state["state"].items() if v}})
        assert_same(ours, expected, "after the saves")
    for from_files in (False, True):
        for ours in virtual.run(resumed, 2, from_files):
            assert_same(ours, expected, f"from files: {from_files}")


def test_a_fresh_optimizer_in_train_mode_has_the_plain_state_dict() -> None:
    model = Tangle()
    plain = Free(model.parameters())
    plain.train()

    def on_rank(comm: Collectives) -> Any:
        optimizer: Any = ZeroRedundancyOptimizer(Tangle().parameters(), Free, comm)
        optimizer.train()
        return optimizer.state_dict()

    for state in virtual.run(on_rank, 2):
        assert state["param_groups"] == plain.state_dict()["param_groups"]
        assert not any(state["state"].values())


def test_a_method_alone_makes_no_masters_into_state() -> None:
    def on_rank(comm: Collectives) -> Any:
        params = [param.bfloat16().detach().requires_grad_() for param in params_of_ones(2)]
        optimizer: Any = ZeroRedundancyOptimizer(params, Free, comm, master_dtype=torch.float32)
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.train()
        optimizer.consolidate_state_dict("all")
        return optimizer.state_dict()["state"]

    assert virtual.run(on_rank, 2) == [{}, {}]


def test_a_gathered_state_is_not_given_out_after_a_method_may_have_changed_it() -> None:
    def on_rank(comm: Collectives) -> str:
        params = params_of_ones()
        optimizer: Any = ZeroRedundancyOptimizer(params, Free, comm)
        optimizer.train()
        update(params, optimizer)
        optimizer.consolidate_state_dict("all")
        optimizer.eval()
        return caught(optimizer.state_dict)

    for message in virtual.run(on_rank, 2):
        assert "has not been gathered on this one since the last step" in message


def test_the_trainers_callback_gathers_again_after_an_evaluation_that_switches() -> None:
    callback = consolidation_callback()
    arguments = SimpleNamespace(save_only_model=False, save_on_each_node=True, save_strategy="steps")

    def on_rank(comm: Collectives, optimizer_class: Any) -> bool:
        params = params_of_ones()
        optimizer: Any = ZeroRedundancyOptimizer(params, optimizer_class, comm, lr=0.1)
        if optimizer_class is Free:
            optimizer.train()
        update(params, optimizer)
        control = SimpleNamespace(should_save=True)
        callback.on_step_end(arguments, None, control, optimizer=optimizer)  # type: ignore[arg-type]
        calls: list[Any] = []
        if optimizer_class is Free:
            optimizer.eval()
        comm.observers.append(calls.append)
        callback.on_evaluate(arguments, None, control, optimizer=optimizer)  # type: ignore[arg-type]
        optimizer.state_dict()
        return bool(calls)

    assert virtual.run(on_rank, 2, Free) == [True, True]
    assert virtual.run(on_rank, 2, optim.SGD) == [False, False]


def test_the_names_of_the_state_are_found_out_in_train_mode() -> None:
    def on_rank(comm: Collectives) -> Any:
        optimizer = ZeroRedundancyOptimizer(params_of_ones(1), Free, comm)
        return optimizer.whole.keys()

    assert virtual.run(on_rank, 2) == [[["z"]]] * 2


# ----------------------------------------------------------------------------------------- which there are


class Odd(Free):
    """With what is no method: none of these is forwarded."""

    public = 3

    @property
    def mean(self) -> float:
        return 1.0

    @staticmethod
    def helper(x: int) -> int:
        return x

    @classmethod
    def made(cls, params: Any) -> Odd:
        return cls(params)

    def _private(self) -> None: ...


def test_the_attributes_are_there_exactly_if_the_class_has_them() -> None:
    def on_rank(comm: Collectives) -> None:
        free = ZeroRedundancyOptimizer(params_of_ones(), Odd, comm)
        plain = ZeroRedundancyOptimizer(params_of_ones(), optim.AdamW, comm)
        oss = OSS(params_of_ones(), Free, comm)
        for name in ("train", "eval"):
            assert callable(getattr(free, name))
            assert callable(getattr(oss, name))
            assert not hasattr(plain, name)
            with pytest.raises(AttributeError, match=f"ZeroRedundancyOptimizer.* has no attribute '{name}'"):
                getattr(plain, name)
        for name in ("public", "mean", "helper", "made", "_private", "profile_hook_step"):
            assert not hasattr(free, name) or hasattr(Optimizer, name), name

    virtual.run(on_rank, 2)


# ------------------------------------------------------------------------------------------- other methods


class Handy(optim.SGD):
    """With methods that write, that need gradients, and that only tell."""

    def halve(self, by: float = 0.5, *, but: str = "") -> str:
        for group in self.param_groups:
            for param in group["params"]:
                param.data = param.data * by  # other memory, as old programs do it
        return f"halved by {by}{but}"

    def note_gradients(self) -> None:
        """As Sophia's `update_hessian`: from gradients, into the state."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.state[param]["seen"] = param.grad.clone()

    @torch.no_grad()
    def move(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(self.state[param].get("seen", 0))

    def largest(self) -> float:
        return max((p.abs().max().item() for g in self.param_groups for p in g["params"]), default=0.0)

    def take(self, value: Any) -> None: ...

    def fail(self, on: tuple[int, ...] = (128,)) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.numel() in on:
                    raise ValueError("no")


def handy(model: Any, optimizer: Any, backward: Backward) -> Iterator[None]:
    for step in range(2):
        backward(step)
        optimizer.note_gradients()
        yield
        optimizer.halve(0.75)
        yield
        optimizer.move()
        yield
        optimizer.step()
        yield


@pytest.mark.parametrize("masters", [False, True])
def test_any_method_is_called_with_gradients_and_what_it_writes_is_published(masters: bool) -> None:
    if not masters:
        assert_trains_as_plain(handy, Handy, world_sizes=[3], modes=EVERY_MODE, lr=0.1, check_moved=False)
        return

    class On(FreeOnMasters):
        def note_gradients(self) -> None:
            for param, master in self.pairs:
                if master is not param and param.grad is not None:
                    master.grad = param.grad.float()
            self.switch("note_gradients")

        def halve(self, by: float) -> None:
            self.optim.halve(by)
            self.switch("largest")

        def move(self) -> None:
            self.switch("move")

    def in_bfloat16() -> nn.Module:
        return nn.ParameterList(params_of_ones(3, 200)).bfloat16()

    model = in_bfloat16()
    plain = run_script(handy, model, On(model.parameters(), Handy, lr=0.1), 2)

    def on_rank(comm: Collectives, partition: str) -> Any:
        model = in_bfloat16()
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), Handy, comm, partition=partition, master_dtype=torch.float32, lr=0.1
        )
        return run_script(handy, model, optimizer, comm.world_size, comm)

    for partition in ("sorted_greedy", "even"):
        for ours in virtual.run(on_rank, 2, partition):
            assert_same(ours, plain, partition)


class Rebinding(Handy):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.data = param.data - group["lr"] * param.grad


class RebindingTogether(Rebinding):
    elementwise = True


def steps(model: nn.Module, optimizer: Any, backward: Backward) -> Iterator[None]:
    for step in range(3):
        backward(step)
        optimizer.step()
        yield


@pytest.mark.parametrize("optimizer_class", [Rebinding, RebindingTogether])
def test_an_optimizer_that_gives_parameters_other_memory_trains_as_plain(optimizer_class: Any) -> None:
    for make_model in (Tangle, Beads):
        assert_trains_as_plain(
            steps, optimizer_class, world_sizes=[3], modes=EVERY_MODE, make_model=make_model, lr=0.1
        )


def test_what_a_method_returns_is_returned_and_arguments_go_through() -> None:
    def on_rank(comm: Collectives) -> tuple[str, float]:
        params = [nn.Parameter(torch.full((64,), float(number + 1))) for number in range(2)]
        optimizer: Any = ZeroRedundancyOptimizer(params, Handy, comm, lr=0.1)
        return optimizer.halve(0.25, but="!"), optimizer.largest() * 4

    assert virtual.run(on_rank, 2) == [("halved by 0.25!", 1.0), ("halved by 0.25!", 2.0)]


def test_a_call_that_writes_nothing_sends_only_short_messages() -> None:
    def on_rank(comm: Collectives) -> list[list[tuple[str, int]]]:
        params = params_of_ones(2, 6)
        optimizer: Any = ZeroRedundancyOptimizer(params, Free, comm)
        sent = []
        optimizer.train()
        for _ in range(2):
            update(params, optimizer)
        for switch in (optimizer.train, optimizer.eval, optimizer.eval):
            calls: list[Any] = []
            comm.observers.append(calls.append)
            switch()
            sent.append([(call.op, call.nbytes) for call in calls])
            comm.observers.remove(calls.append)
        return sent

    for idle, switched, again in virtual.run(on_rank, 2):
        assert idle == again == [("all_gather", 32), ("all_gather", 3)]
        assert switched == [*idle, ("broadcast", 24), ("broadcast", 24)]


# ------------------------------------------------------------------------------------------------- mistakes


def test_calls_that_differ_between_ranks_raise_on_all_and_change_nothing() -> None:
    def on_rank(comm: Collectives) -> list[str]:
        params = params_of_ones()
        optimizer: Any = ZeroRedundancyOptimizer(params, Handy, comm, lr=0.1)
        first = comm.rank == 0
        messages = [
            caught(lambda: optimizer.halve(0.5 if first else 0.25)),
            caught(lambda: optimizer.take(torch.full((2,), float(comm.rank)))),
            caught(lambda: optimizer.halve() if first else optimizer.move()),
            caught(lambda: optimizer.halve() if first else optimizer.step()),
            caught(lambda: optimizer.take(params[0])),
            caught(lambda: optimizer.take(by=optimizer.param_groups[0])),
        ]
        optimizer.param_groups[0]["lr"] = float(comm.rank)
        messages.append(caught(optimizer.halve))
        optimizer.param_groups[0]["lr"] = 0.1
        optimizer.take({"fine": torch.ones(2)})
        assert all(param.eq(1).all() for param in params)
        optimizer.halve()
        assert all(param.eq(0.5).all() for param in params)
        return messages

    for messages in virtual.run(on_rank, 2):
        values, tensors, others, step, param, group, options = messages
        assert "ValueError: ranks disagree, so none can call halve() of optimizer 0 (Handy)" in values
        assert "[arguments=[0.5]]" in values or "[arguments=[0.25]]" in values
        assert "with the digest" in tensors
        assert "is to call" in others
        assert "halve() of optimizer 0 (Handy) while rank" in others or "move() of" in others
        assert "make update 1 of optimizer 0" in step
        assert param.startswith("TypeError: a parameter, or a group of them, is among the arguments")
        assert group.startswith("TypeError: a parameter, or a group of them, is among the arguments")
        assert "lr=" in options


def test_wrong_arguments_raise_on_all_ranks_which_go_on() -> None:
    def on_rank(comm: Collectives) -> str:
        params = params_of_ones()
        optimizer: Any = ZeroRedundancyOptimizer(params, Handy, comm, lr=0.1)
        message = caught(lambda: optimizer.halve(wrong=1))
        update(params, optimizer)
        assert all(torch.allclose(param, torch.tensor(0.9)) for param in params)
        return message

    assert all("unexpected keyword argument 'wrong'" in message for message in virtual.run(on_rank, 2))


def test_a_method_that_raises_on_one_rank_stops_all(tmp_path: Path) -> None:
    def on_rank(comm: Collectives) -> list[str]:
        params = [nn.Parameter(torch.ones(numel)) for numel in (128, 64)]
        optimizer: Any = ZeroRedundancyOptimizer(params, Handy, comm, lr=0.1)
        save_sharded(optimizer, tmp_path)
        messages = [
            caught(optimizer.fail),
            caught(lambda: update(params, optimizer)),
            caught(optimizer.halve),
        ]
        load_sharded(optimizer, tmp_path)
        update(params, optimizer)
        return messages

    first, second = virtual.run(on_rank, 2)
    assert first[0] == "ValueError: no"
    assert (
        second[0]
        == "RuntimeError: rank 1: rank 0 could not call fail() of optimizer 0 (Handy): ValueError: no"
    )
    for _, *later in (first, second):
        for message in later:
            assert "fail() of Handy raised on ranks [0] and not on the others" in message


# ----------------------------------------------------------------------------- calls on the local optimizer


@pytest.mark.parametrize("as_view", [False, True])
@pytest.mark.parametrize("partition", ["sorted_greedy", "even"])
@pytest.mark.parametrize("master_dtype", [None, torch.float64])
def test_a_method_called_on_the_local_optimizer_is_an_error_if_it_writes(
    master_dtype: Any, partition: str, as_view: bool
) -> None:
    def on_rank(comm: Collectives) -> list[str]:
        params = params_of_ones()
        optimizer: Any = ZeroRedundancyOptimizer(
            params, Handy, comm, as_view, partition=partition, master_dtype=master_dtype, lr=0.1
        )
        update(params, optimizer)
        update(params, optimizer)  # the first one compares start values
        local = optimizer.optim
        return [caught(local.largest), caught(lambda: local.halve(0.5)), caught(local.largest)]

    for rank, (before, halved, after) in enumerate(virtual.run(on_rank, 2)):
        assert before == after == "nothing"
        assert halved.startswith(
            f"RuntimeError: rank {rank}: halve() of Handy, called on the local optimizer"
        )
        assert "Call optimizer.halve() on all ranks" in halved


class CallsItsOwn(Handy):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.halve(0.5)


def test_a_step_may_call_the_methods_of_its_class() -> None:
    assert_trains_as_plain(steps, CallsItsOwn, world_sizes=[3], modes=EVERY_MODE, make_model=Beads, lr=0.1)


def test_the_local_optimizer_is_freed_with_the_sharded_one() -> None:
    def on_rank(comm: Collectives) -> bool:
        optimizer: Any = ZeroRedundancyOptimizer(params_of_ones(), Handy, comm, lr=0.1)
        optimizer.halve()
        local = weakref.ref(optimizer.optim)
        gc.disable()
        try:
            del optimizer
            return local() is None
        finally:
            gc.enable()

    assert virtual.run(on_rank, 1) == [True]


# -------------------------------------------------------------------------------------------------- the trial


class Centered(Free):
    """`eval` uses the shape: each row loses its mean."""

    def eval(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.data.sub_(param.data.mean(-1, keepdim=True))


class Clipping(Free):
    """`eval` scales by a norm over all parameters."""

    def eval(self) -> None:
        params = [param.data for group in self.param_groups for param in group["params"]]
        for param in params:
            param.div_(torch.stack([other.norm() for other in params]).norm())


def test_a_trial_steps_in_train_mode_and_tries_eval_too() -> None:
    assert updates_elementwise(Free, {}, {"lr": 0.1})
    assert not updates_elementwise(Centered, {}, {"lr": 0.1})
    assert not couples_parameters(Centered, {}, {"lr": 0.1})
    assert couples_parameters(Clipping, {}, {"lr": 0.1})


class WithModes(optim.SGD):
    """`train` is another thing here, and does not disturb the trial."""

    eval = 3

    def train(self, model: nn.Module) -> None: ...

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        norm = sum(float(p.grad.norm()) for g in self.param_groups for p in g["params"] if p.grad is not None)
        for group in self.param_groups:
            for param in group["params"]:
                param.data.sub_(param.grad / norm)


def test_a_train_of_another_kind_does_not_hide_that_parameters_are_coupled() -> None:
    assert couples_parameters(WithModes, {}, {"lr": 0.1})


class Projecting(Handy):
    """With methods for which a rank would need all parameters, or whole ones."""

    @torch.no_grad()
    def to_sphere(self) -> None:
        params = [param for group in self.param_groups for param in group["params"]]
        norm = torch.stack([param.norm() for param in params]).norm()
        for param in params:
            param.div_(norm)

    @torch.no_grad()
    def center_rows(self, of: float = 1.0) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(of * param.mean(-1, keepdim=True))

    def apply(self, function: Callable[[torch.Tensor], None]) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                function(param.data)

    @torch.no_grad()
    def shake(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.add_(torch.rand_like(param))


def projected(comm: Collectives, partition: str) -> tuple[ZeroRedundancyOptimizer, list[nn.Parameter]]:
    params = [nn.Parameter(torch.arange(2048.0).view(64, 32) + number) for number in range(2)]
    return ZeroRedundancyOptimizer(params, Projecting, comm, partition=partition, lr=0.1), params


def test_a_method_that_needs_all_parameters_is_refused_on_all_ranks() -> None:
    def on_rank(comm: Collectives) -> str:
        optimizer, params = projected(comm, "sorted_greedy")
        before = [param.detach().clone() for param in params]
        message = caught(optimizer.to_sphere)  # type: ignore[attr-defined]
        assert all(map(torch.equal, params, before))
        return message

    for message in virtual.run(on_rank, 2):
        assert message.startswith("ValueError: to_sphere() of Projecting changed a tensor otherwise beside")


def test_a_method_that_uses_shapes_is_refused_where_parameters_are_split_and_works_elsewhere() -> None:
    def on_rank(comm: Collectives, partition: str) -> tuple[str, list[torch.Tensor]]:
        optimizer, params = projected(comm, partition)
        return caught(lambda: optimizer.center_rows(of=1.0)), params  # type: ignore[attr-defined]

    plain = [nn.Parameter(torch.arange(2048.0).view(64, 32) + number) for number in range(2)]
    unsharded = Projecting(plain, lr=0.1)
    for message, params in virtual.run(on_rank, 3, "even"):
        assert message.startswith("ValueError: center_rows() of Projecting may use the shape of a parameter")
        assert all(map(torch.equal, params, plain))
    unsharded.center_rows()
    for message, params in virtual.run(on_rank, 2, "sorted_greedy"):
        assert message == "nothing"
        assert all(map(torch.equal, params, plain))


def test_a_function_among_the_arguments_is_called_for_what_the_rank_owns_and_no_more() -> None:
    def on_rank(comm: Collectives) -> list[int]:
        optimizer, params = projected(comm, "even")
        numels: list[int] = []

        def zero(values: torch.Tensor) -> None:
            numels.append(values.numel())
            values.zero_()

        optimizer.apply(zero)  # type: ignore[attr-defined]
        assert not any(param.any() for param in params)
        return numels

    assert sum(map(sum, virtual.run(on_rank, 2))) == 4096


def test_a_method_that_draws_random_numbers_is_told_of() -> None:
    def on_rank(comm: Collectives) -> bool:
        optimizer, _ = projected(comm, "sorted_greedy")
        with pytest.warns(UserWarning, match=r"Projecting drew random numbers in shake\(\)"):
            optimizer.shake()  # type: ignore[attr-defined]
        return True

    assert virtual.run(on_rank, 1) == [True]
