"""Values that must stay equal on all ranks are compared in some steps, and where ranks agree anyway."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from library.training import (
    Tangle,
    assert_same,
    caught,
    fill_gradients,
    ring_early,
    run_script,
    snapshot,
    train,
)
from torch import nn, optim

from zero_ref.comm.agreement import MAY_DIFFER
from zero_ref.comm.collectives import Collectives
from zero_ref.dropin.oss import OSS
from zero_ref.files.sharded import load_sharded, save_sharded
from zero_ref.lab import virtual
from zero_ref.lab.meter import recording
from zero_ref.optimizer.accord import number_on
from zero_ref.optimizer.registered import Options
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.plan.calls import CHECK, Call, ordinary

Make = Callable[[Any, Collectives], ZeroRedundancyOptimizer]


def sgd(params: Any, comm: Collectives) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(params, optim.SGD, comm, lr=0.1, momentum=0.9)


def bucketed(params: Any, comm: Collectives) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(
        params,
        optim.AdamW,
        comm,
        partition="even",
        parameters_as_bucket_view=True,
    )


def oss(params: Any, comm: Collectives) -> ZeroRedundancyOptimizer:
    return OSS(params, optim.SGD, comm, lr=0.1)


class Trainee:
    """A model and an optimizer on a virtual rank; `step` also averages made-up gradients."""

    def __init__(self, comm: Collectives, make: Make = sgd) -> None:
        self.comm, self.model = comm, Tangle()
        self.zero = make(self.model.parameters(), comm)
        self.steps = 0

    def step(self, closure: Any = None) -> None:
        fill_gradients(list(self.model.parameters()), self.steps, self.comm.world_size, self.comm)
        self.steps += 1
        self.zero.step(closure)

    def fails(self, call: Callable[[], Any] | None = None) -> str:
        """Return the error of a call, by default of the next step, as "Type: text"; empty if none."""
        try:
            (call or self.step)()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""


# --------------------------------------------------------------------------------------------------- when


def test_steps_1_2_4_8_make_a_call_more_and_others_make_none() -> None:
    def on_rank(comm: Collectives) -> list[list[Call]]:
        trainee = Trainee(comm)
        of_steps = []
        for step in range(1, 20):
            fill_gradients(list(trainee.model.parameters()), step, comm.world_size, comm)
            with recording(comm, checks=True) as calls:
                trainee.zero.step()
            of_steps.append(calls)
        return of_steps

    for of_steps in virtual.run(on_rank, 2, timeout=20):
        checked = {
            step: calls[0] for step, calls in enumerate(of_steps, start=1) if len(calls) > len(of_steps[2])
        }
        assert checked == dict.fromkeys((1, 2, 4, 8, 16), Call(CHECK, 32))
        assert all(ordinary(calls) == of_steps[2] for calls in of_steps)


def test_one_rank_has_nobody_to_compare_with() -> None:
    def on_rank(comm: Collectives) -> None:
        with recording(comm, checks=True) as calls:
            trainee = Trainee(comm)
            del calls[:]
            for step in range(4):
                fill_gradients(list(trainee.model.parameters()), step, 1)
                trainee.zero.step()
        assert calls == []

    virtual.run(on_rank, 1, timeout=20)


# ------------------------------------------------------------------------------------------------ options


@pytest.mark.parametrize(
    ("make", "after", "found"), [(sgd, 0, 1), (bucketed, 1, 2), (oss, 2, 4), (sgd, 4, 8), (bucketed, 7, 8)]
)
def test_an_option_set_on_one_rank_is_an_error_on_all_in_the_next_check(
    make: Make, after: int, found: int
) -> None:
    def on_rank(comm: Collectives) -> tuple[int, str]:
        trainee = Trainee(comm, make)
        for step in range(1, 20):
            if step == after + 1 and comm.rank == 1:
                trainee.zero.param_groups[0]["weight_decay"] = 0.5
            if message := trainee.fails():
                return step, message
        return 0, ""

    for step, message in virtual.run(on_rank, 3, timeout=20):
        assert step == found
        assert message.startswith("ValueError: ranks disagree")
        assert f"none can make update {found} of optimizer 0" in message
        assert "rank 1 has [group 0: weight_decay=0.5] where rank 0 has [group 0: weight_decay=0" in message
        assert "by a scheduler on each" in message


@dataclass(frozen=True)
class OneMore(Options):
    added: int = 0


def test_an_option_added_to_the_dataclass_is_compared() -> None:
    class Zero(ZeroRedundancyOptimizer):
        def __init__(self, params: Any, comm: Collectives, added: int) -> None:
            self.make_options = partial(OneMore, added=added)
            super().__init__(params, optim.SGD, comm)

    def on_rank(comm: Collectives) -> tuple[str, str]:
        differs = caught(lambda: Zero(Tangle().parameters(), comm, added=comm.rank))
        trainee = Trainee(comm, lambda params, comm: Zero(params, comm, added=0))
        trainee.zero.registered.options = replace(trainee.zero.registered.options, added=comm.rank)
        return differs, trainee.fails()

    for in_the_constructor, later in virtual.run(on_rank, 2, timeout=20):
        for message, action in ((in_the_constructor, "construct the optimizer"), (later, "make update 1")):
            assert message.startswith(f"ValueError: ranks disagree, so none can {action}")
            assert "rank 1 has [added=1] where rank 0 has [added=0]" in message


def test_every_argument_but_parameters_and_ranks_is_a_compared_option() -> None:
    arguments = inspect.signature(ZeroRedundancyOptimizer).parameters.keys() - {"params", "process_group"}
    options = {field.name: field.metadata for field in fields(Options)}
    assert options.keys() - arguments == {"broadcast_dtype"}  # of OSS
    assert arguments <= options.keys()
    # The others differ by what ranks compare in their place.
    assert {name for name, metadata in options.items() if MAY_DIFFER in metadata} == {"partition", "defaults"}


def test_when_the_options_are_equal_again_training_goes_on_as_plain() -> None:
    def on_rank(comm: Collectives) -> Any:
        trainee = Trainee(comm)
        if comm.rank == 1:
            trainee.zero.param_groups[0]["lr"] = 0.2
        assert trainee.fails()
        assert trainee.fails(), "it is not forgotten before it is right"
        trainee.zero.param_groups[0]["lr"] = 0.2
        return [snapshot(trainee.model) for _ in train(trainee.model, trainee.zero, range(3))]

    model = Tangle()
    plain = [
        snapshot(model) for _ in train(model, optim.SGD(model.parameters(), lr=0.2, momentum=0.9), range(3))
    ]
    for ours in virtual.run(on_rank, 2, timeout=20):
        assert_same(ours, plain, "after an error")


def frozen_step(trainee: Trainee, _: Path) -> None:
    trainee.model.scale.requires_grad_(False)
    try:
        trainee.zero.step()
    finally:
        trainee.model.scale.requires_grad_(True)


AGREEMENTS: dict[str, Callable[[Trainee, Path], Any]] = {
    "consolidate": lambda trainee, _: trainee.zero.consolidate_state_dict(),
    "save": lambda trainee, path: save_sharded(trainee.zero, path / "new"),
    "change which parameters": frozen_step,
}


@pytest.mark.parametrize("action", AGREEMENTS)
def test_what_ranks_agree_on_anyway_compares_options_too(action: str, tmp_path: Path) -> None:
    def on_rank(comm: Collectives) -> str:
        trainee = Trainee(comm)
        for _ in range(4):
            trainee.step()
        trainee.zero.param_groups[0]["lr"] = 0.1 + 0.1 * comm.rank
        return trainee.fails(lambda: AGREEMENTS[action](trainee, tmp_path))

    for message in virtual.run(on_rank, 2, timeout=20):
        assert "ValueError: ranks disagree" in message
        assert action in message
        assert "[group 0: lr=0.2]" in message


def test_a_load_compares_the_options_that_it_leaves() -> None:
    plain = optim.SGD(Tangle().parameters(), lr=0.3, momentum=0.9)

    def on_rank(comm: Collectives) -> str:
        trainee = Trainee(comm)
        trainee.zero.param_groups[0]["lr"] = 0.1 + 0.1 * comm.rank
        state = plain.state_dict()
        trainee.zero.load_state_dict(state)  # has the learning rate of all
        assert [group["lr"] for group in trainee.zero.param_groups] == [0.3]
        state["param_groups"][0]["nesterov"] = comm.rank == 1
        return trainee.fails(lambda: trainee.zero.load_state_dict(state))

    for message in virtual.run(on_rank, 2, timeout=20):
        assert "rank 1 has [group 0: nesterov=True]" in message


# --------------------------------------------------------------------------- the order of two optimizers


def test_two_optimizers_stepped_in_another_order_on_one_rank_are_an_error_on_all() -> None:
    def on_rank(comm: Collectives) -> str:
        first, second = Trainee(comm), Trainee(comm)
        for trainee in (first, second):
            fill_gradients(list(trainee.model.parameters()), 0, comm.world_size, comm)
        ordered = (first, second) if comm.rank == 0 else (second, first)
        return ordered[0].fails(ordered[0].zero.step)

    messages = virtual.run(on_rank, 2, timeout=20)
    assert (
        "rank 0 is to make update 1 of optimizer 0 (SGD) while rank 1 is to make update 1 of optimizer 1"
        in messages[0]
    )
    assert "same calls in the same order" in messages[1]


def test_an_optimizer_made_on_one_rank_more_is_found_where_the_next_is_made() -> None:
    def on_rank(comm: Collectives) -> str:
        if comm.rank == 1:
            number_on(comm)
        try:
            Trainee(comm)
        except ValueError as error:
            return str(error)
        return ""

    for message in virtual.run(on_rank, 2, timeout=20):
        assert "[optimizer 1 of the group] where rank 0 has [optimizer 0 of the group]" in message


# ----------------------------------------------------------------------------- statistics over all parameters


class Estimating(optim.SGD):
    """From its third step on keeps a number computed from all parameters."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps > 2:
            seen = sum(float(p.detach().abs().sum()) for group in self.param_groups for p in group["params"])
            self.keep(seen)

    def keep(self, seen: float) -> None:
        for group in self.param_groups:
            group["d"] = seen


class EstimatingInState(Estimating):
    def keep(self, seen: float) -> None:
        self.state["d"] = torch.tensor(seen)  # type: ignore[index]


@pytest.mark.parametrize(
    ("optimizer_class", "where"), [(Estimating, "group 0: d="), (EstimatingInState, "state 'd': ")]
)
def test_a_number_that_each_rank_computes_otherwise_names_the_optimizer_and_the_value(
    optimizer_class: Any, where: str
) -> None:
    def on_rank(comm: Collectives) -> tuple[int, str]:
        trainee = Trainee(
            comm, lambda params, comm: ZeroRedundancyOptimizer(params, optimizer_class, comm, lr=0.1)
        )
        for step in range(1, 20):
            if message := trainee.fails():
                return step, message
        return 0, ""

    for step, message in virtual.run(on_rank, 2, timeout=20):
        assert step == 4, "kept in step 3"
        assert f"[{where}" in message
        assert f"{optimizer_class.__name__} computes it from all parameters" in message


# ----------------------------------------------------------------------------------------- lost updates


def hook_that_raises(*_: Any) -> None:
    raise ZeroDivisionError("no step today")


def step_that_fails(trainee: Trainee, failing: bool, closure: Any = None) -> str:
    hook = trainee.zero.optim.register_step_pre_hook(hook_that_raises) if failing else None
    message = trainee.fails(lambda: trainee.step(closure))
    if hook is not None:
        hook.remove()
    return message


@pytest.mark.parametrize(("make", "with_closure"), [(sgd, True), (bucketed, False), (oss, False)])
def test_an_update_lost_on_one_rank_is_an_error_on_all_until_a_state_is_loaded(
    make: Make, with_closure: bool, tmp_path: Path
) -> None:
    def on_rank(comm: Collectives) -> Any:
        trainee = Trainee(comm, make)
        for _ in range(2):
            trainee.step()
        save_sharded(trainee.zero, tmp_path)
        closure = (lambda: 1.0) if with_closure else None
        at_once = step_that_fails(trainee, failing=comm.rank == 1, closure=closure)
        later = [trainee.fails() for _ in range(2)]
        later += [trainee.fails(lambda c=call: c(trainee, tmp_path)) for call in AGREEMENTS.values()]  # type: ignore[misc]
        load_sharded(trainee.zero, tmp_path)
        return (
            at_once,
            later,
            [snapshot(trainee.model) for _ in train(trainee.model, trainee.zero, range(2, 4))],
        )

    def script(model: Any, optimizer: Any, backward: Any) -> Any:
        for step in range(2):
            backward(step)
            optimizer.step()
        yield from train(model, optimizer, range(2, 4))

    of_ranks = virtual.run(on_rank, 3, timeout=20)
    if make is not bucketed:  # whose ranks hold rounded values
        plain_model = Tangle()
        momentum = 0.9 if make is sgd else 0.0
        plain = run_script(
            script, plain_model, optim.SGD(plain_model.parameters(), lr=0.1, momentum=momentum), 3
        )
    for rank, (at_once, later, trained) in enumerate(of_ranks):
        assert at_once.startswith(
            "ZeroDivisionError" if rank == 1 else f"RuntimeError: rank {rank}: in update 3 of "
        )
        for message in later:
            assert "the local optimizer of rank 1 raised ZeroDivisionError: no step today" in message
            assert "load_sharded" in message
        if make is not bucketed:
            assert_same(trained, plain, f"rank {rank}, after the load")


def test_an_error_in_the_local_step_of_every_rank_is_the_callers_affair() -> None:
    def on_rank(comm: Collectives) -> str:
        trainee = Trainee(comm)
        messages = {step_that_fails(trainee, failing=True) for _ in range(3)}
        assert messages == {"ZeroDivisionError: no step today"}
        return trainee.fails()

    assert virtual.run(on_rank, 3, timeout=20) == ["", "", ""]


def test_a_closure_that_raises_on_all_ranks_leaves_nothing_behind() -> None:
    def on_rank(comm: Collectives) -> str:
        trainee = Trainee(comm)
        with recording(comm) as calls:
            assert (
                trainee.fails(lambda: trainee.zero.step(hook_that_raises))
                == "ZeroDivisionError: no step today"
            )
        assert calls == []
        return trainee.fails()

    assert virtual.run(on_rank, 2, timeout=20) == ["", ""]


def test_a_rank_that_owns_nothing_loses_nothing() -> None:
    def on_rank(comm: Collectives) -> tuple[str, str]:
        weight = nn.Parameter(torch.ones(3))
        zero = ZeroRedundancyOptimizer([weight], optim.SGD, comm, lr=0.1)
        hook = zero.optim.register_step_pre_hook(hook_that_raises) if comm.rank == 1 else None
        messages = []
        for _ in range(2):
            weight.grad = torch.ones(3)
            try:
                zero.step()
                messages.append("")
            except Exception as error:
                messages.append(str(error))
            if hook is not None:
                hook.remove()
        assert weight.tolist() == pytest.approx([0.8] * 3)
        return messages[0], messages[1]

    assert virtual.run(on_rank, 2, timeout=20) == [("", ""), ("no step today", "")]


def test_an_alarm_of_a_later_update_is_heard_in_its_turn() -> None:
    assert virtual.run(ring_early, 2, timeout=20) == [[{}, {1: "lost"}, {}], [{}, {}, {}]]


class Mute(virtual.VirtualCollectives):
    """A network without alarms, as NCCL's."""

    def __init__(self, comm: Any) -> None:
        super().__init__(comm.world, comm.rank)

    def open_channel(self, number: int, devices: Any) -> None:  # type: ignore[override]
        return None


def test_without_an_alarm_a_lost_update_is_found_in_the_next_agreement() -> None:
    def on_rank(comm: Any) -> list[str]:
        trainee = Trainee(Mute(comm))
        for _ in range(4):
            trainee.step()
        at_once = step_that_fails(trainee, failing=comm.rank == 1)
        steps = [trainee.fails() for _ in range(2)]
        return [
            at_once,
            *steps,
            trainee.fails(lambda: trainee.zero.consolidate_state_dict()),
            trainee.fails(),
        ]

    silent, loud = virtual.run(on_rank, 2, timeout=20)
    assert silent[:3] == ["", "", ""]
    assert loud[:3] == ["ZeroDivisionError: no step today", "", ""]
    for consolidated, eighth in (silent[3:], loud[3:]):
        for message in (consolidated, eighth):
            assert "rank 1 has [an update lost by ZeroDivisionError: no step today]" in message
            assert "Load the last checkpoint" in message
