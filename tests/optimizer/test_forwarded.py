"""Attributes of the wrapped class, and its `train` and `eval`, called on all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from library.schedule_free import Free, FreeOnMasters, switching
from library.tied import RULES, Tied, averaged, data, gradients_of, values_of
from library.training import (
    MODES,
    Backward,
    Tangle,
    assert_same,
    assert_trains_as_plain,
    caught,
    run_script,
)
from torch import nn, optim
from torch.optim import Optimizer

from zero_ref import OSS, ShardedDataParallel, consolidation_callback
from zero_ref.comm.collectives import Collectives
from zero_ref.files.sharded import load_sharded, save_sharded
from zero_ref.lab import virtual
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer

EVERY_MODE = [*MODES, ("balanced", False), ("equal_shares", True)]
FEW_MODES = [("sorted_greedy", True), ("even", False), ("equal_shares", True)]


def params_of_ones(count: int = 3, numel: int = 128) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(numel)) for _ in range(count)]


def update(params: list[nn.Parameter], optimizer: Optimizer) -> None:
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()


# ------------------------------------------------------------------------------------------- train and eval


def test_a_schedule_free_optimizer_trains_and_switches_as_plain_in_every_mode() -> None:
    assert_trains_as_plain(switching, Free, modes=EVERY_MODE)


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
    assert_trains_as_plain(freezing, Free, modes=FEW_MODES)


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

    assert_trains_as_plain(adding, Free, modes=FEW_MODES, groups=all_but_one, check_moved=False)


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


@pytest.mark.parametrize(
    ("script", "in_files", "partition", "as_view"),
    [(switching, True, "even", True), (freezing, False, "sorted_greedy", False)],
)
def test_masters_and_state_in_files_are_switched(
    script: Any, in_files: bool, partition: str, as_view: bool, tmp_path: Path
) -> None:
    model = in_16_bits()
    plain = run_script(script, model, FreeOnMasters(model.parameters(), Free), 3)

    def on_rank(comm: Collectives) -> Any:
        model = in_16_bits()
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), Free, comm, as_view, partition=partition, elementwise=True,
            master_dtype=torch.float32, state_device=tmp_path if in_files else None,
        )  # fmt: skip
        return run_script(script, model, optimizer, comm.world_size, comm)

    for ours in virtual.run(on_rank, 3):
        assert_same(ours, plain, partition)


def test_broadcast_dtype_rounds_what_other_ranks_own() -> None:
    def on_rank(comm: Collectives) -> bool:
        params = params_of_ones(2, 6)
        optimizer = OSS(params, Free, comm, broadcast_dtype=torch.bfloat16)
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


@pytest.mark.parametrize(("rule", "in_forward"), [(rule, bool(n % 2)) for n, rule in enumerate(RULES)])
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
        optimizer: Any = ZeroRedundancyOptimizer(
            model.parameters(), Free, comm, partition=rule, elementwise=True, lr=0.01
        )
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


class Noting(Free):
    """Its method writes state, and no parameter."""

    def eval(self) -> None:
        for state in self.state.values():
            state["z"].add_(1)


@pytest.mark.parametrize("optimizer_class", [Free, Noting])
def test_a_gathered_state_is_not_given_out_after_a_method_may_have_changed_it(optimizer_class: Any) -> None:
    def on_rank(comm: Collectives) -> str:
        params = params_of_ones()
        optimizer: Any = ZeroRedundancyOptimizer(params, optimizer_class, comm)
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

    def on_rank(comm: Collectives, optimizer_class: Any, saves: bool = True) -> bool:
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
        control = SimpleNamespace(should_save=saves)
        callback.on_evaluate(arguments, None, control, optimizer=optimizer)  # type: ignore[arg-type]
        if saves:
            optimizer.state_dict()
        return bool(calls)

    assert virtual.run(on_rank, 2, Free) == [True, True]
    assert virtual.run(on_rank, 2, Free, False) == [False, False]
    assert virtual.run(on_rank, 2, optim.SGD) == [False, False]


def test_the_names_of_the_state_are_found_out_in_train_mode() -> None:
    def on_rank(comm: Collectives) -> Any:
        optimizer = ZeroRedundancyOptimizer(params_of_ones(1), Free, comm)
        return optimizer.whole.keys()

    assert virtual.run(on_rank, 2) == [[["z"]]] * 2


# ----------------------------------------------------------------------------------------- which there are


class Odd(Free):
    """With attributes, and with methods that are not forwarded."""

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

    def reset(self) -> None: ...


def test_the_attributes_are_there_exactly_if_the_class_has_them() -> None:
    def on_rank(comm: Collectives) -> None:
        free: Any = ZeroRedundancyOptimizer(params_of_ones(), Odd, comm)
        plain = ZeroRedundancyOptimizer(params_of_ones(), optim.AdamW, comm)
        oss = OSS(params_of_ones(), Free, comm)
        for name in ("train", "eval"):
            assert callable(getattr(free, name))
            assert callable(getattr(oss, name))
            assert not hasattr(plain, name)
            with pytest.raises(AttributeError, match=f"ZeroRedundancyOptimizer.* has no attribute '{name}'"):
                getattr(plain, name)
        assert (free.public, free.mean, free.helper(2)) == (3, 1.0, 2)
        for name in ("made", "reset"):
            with pytest.raises(
                AttributeError, match=rf"call optimizer.optim.{name}\(\) if that is what you want"
            ):
                getattr(free, name)

    virtual.run(on_rank, 2)


class SkipsSpikes(optim.SGD):
    """Is given the loss before each step, and leaves the step out if the loss is a spike."""

    note = ""

    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, lr)
        self.losses: list[Any] = []
        self.numel = sum(param.numel() for group in self.param_groups for param in group["params"])

    @property
    def latest_loss(self) -> Any:
        return self.losses[-1]

    @latest_loss.setter
    def latest_loss(self, loss: Any) -> None:
        self.losses.append(loss)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.skipped = self.latest_loss > getattr(self, "limit", 1000)
        if not self.skipped:
            super().step(closure)


def skipping(make: Any, ranks: int = 1) -> list[Any]:
    params = params_of_ones(2, 6)
    optimizer, seen = make(params), []
    optimizer.limit = torch.tensor(10.0)  # what the class does not declare, and reads
    for loss in (1.0, 99.0, 1.0, 99.0):
        optimizer.latest_loss = torch.tensor(loss)
        update(params, optimizer)
        seen += [params[1][0].item(), optimizer.latest_loss.item(), optimizer.skipped.item()]
    del optimizer.limit
    return [*seen, hasattr(optimizer, "limit"), optimizer.note]


def test_a_class_is_given_what_is_set_on_the_optimizer() -> None:
    plain = skipping(SkipsSpikes)
    assert plain[::3][:4] == [0, 0, -1, -1]
    for ranks in (1, 2, 3):  # the third owns nothing
        ours = virtual.run(
            lambda comm: skipping(lambda params: ZeroRedundancyOptimizer(params, SkipsSpikes, comm)), ranks
        )
        assert ours == [plain] * ranks


def test_defaults_that_a_program_replaces_count_for_groups_that_are_added_later() -> None:
    def lr_of_later_group(make: Any) -> float:
        first, second = params_of_ones(2)
        optimizer = make([first])
        optimizer.defaults = {**optimizer.defaults, "lr": 0.5}
        optimizer.add_param_group({"params": [second]})
        return optimizer.param_groups[1]["lr"]  # type: ignore[no-any-return]

    def on_rank(comm: Collectives) -> float:
        return lr_of_later_group(lambda params: ZeroRedundancyOptimizer(params, optim.SGD, comm, lr=0.1))

    assert lr_of_later_group(lambda params: optim.SGD(params, lr=0.1)) == 0.5
    assert virtual.run(on_rank, 2) == [0.5, 0.5]


def test_a_decision_by_a_loss_that_differs_raises_on_all_ranks_before_it_is_made() -> None:
    def on_rank(comm: Collectives) -> tuple[str, list[float]]:
        params = params_of_ones(2, 6)
        optimizer: Any = ZeroRedundancyOptimizer(params, SkipsSpikes, comm)
        optimizer.latest_loss = 1.0 + 2000.0 * comm.rank
        return caught(lambda: update(params, optimizer)), [param[0].item() for param in params]

    for message, values in virtual.run(on_rank, 2):
        assert "ranks disagree, so none can make update 1 of optimizer 0 (SkipsSpikes)" in message
        assert "[attribute losses[0]: 2001.0]" in message
        assert "to a loss that was averaged over ranks" in message
        assert values == [1, 1]


class SkipsByNorm(optim.SGD):
    """Decides by the norm of the gradients that it has: on each rank by another one."""

    norm = 0.0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        grads = [param.grad for group in self.param_groups for param in group["params"]]
        self.norm = torch.nn.utils.get_total_norm([grad for grad in grads if grad is not None])
        if self.norm < 3:
            super().step(closure)


def test_a_decision_by_what_the_class_computes_of_its_own_parameters_raises_on_all_ranks() -> None:
    def on_rank(comm: Collectives) -> str:
        params = [nn.Parameter(torch.ones(numel)) for numel in (16, 4)]
        optimizer = ZeroRedundancyOptimizer(params, SkipsByNorm, comm)
        update(params, optimizer)
        return caught(lambda: update(params, optimizer))

    for message in virtual.run(on_rank, 2):
        assert "none can make update 2" in message
        assert "SkipsByNorm computes it from all parameters that it has, and cannot be sharded" in message


class Rebinding(optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.data = param.data - group["lr"] * param.grad


def steps(model: nn.Module, optimizer: Any, backward: Backward) -> Iterator[None]:
    for step in range(3):
        backward(step)
        optimizer.step()
        yield


def test_an_optimizer_that_gives_parameters_other_memory_trains_as_plain() -> None:
    assert_trains_as_plain(steps, Rebinding, world_sizes=[3], modes=FEW_MODES, lr=0.1)


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


class Failing(Free):
    def eval(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.numel() == 128:
                    raise ValueError("no")


def test_options_that_differ_between_ranks_raise_on_all_and_change_nothing() -> None:
    def on_rank(comm: Collectives) -> str:
        params = params_of_ones()
        optimizer: Any = ZeroRedundancyOptimizer(params, Free, comm)
        optimizer.train()
        for _ in range(2):
            update(params, optimizer)
        before = [param.detach().clone() for param in params]
        optimizer.param_groups[0]["beta"] = 0.5 + comm.rank / 10
        message = caught(optimizer.eval)
        assert all(map(torch.equal, params, before))
        return message

    for message in virtual.run(on_rank, 2):
        assert "ValueError: ranks disagree, so none can call eval() of optimizer 0 (Free)" in message
        assert "beta=" in message


def test_a_rank_that_switches_while_another_steps_raises_on_both() -> None:
    def on_rank(comm: Collectives) -> str:
        optimizer: Any = ZeroRedundancyOptimizer(params_of_ones(), Free, comm)
        return caught(lambda: optimizer.eval() if comm.rank == 0 else optimizer.step())

    for message in virtual.run(on_rank, 2):
        assert "call eval() of optimizer 0 (Free)" in message
        assert "make update 1 of optimizer 0" in message


def test_a_method_that_raises_on_all_ranks_stops_none() -> None:
    def on_rank(comm: Collectives) -> list[str]:
        params = params_of_ones(2)
        optimizer: Any = ZeroRedundancyOptimizer(params, Failing, comm)
        optimizer.train()
        return [caught(optimizer.eval), caught(lambda: update(params, optimizer))]

    assert virtual.run(on_rank, 2) == [["ValueError: no", "nothing"]] * 2


def test_a_method_that_raises_on_one_rank_stops_all(tmp_path: Path) -> None:
    def on_rank(comm: Collectives) -> list[str]:
        params = [nn.Parameter(torch.ones(numel)) for numel in (128, 64)]
        optimizer: Any = ZeroRedundancyOptimizer(params, Failing, comm)
        optimizer.train()
        save_sharded(optimizer, tmp_path)
        messages = [
            caught(optimizer.eval),
            caught(lambda: update(params, optimizer)),
            caught(optimizer.train),
        ]
        load_sharded(optimizer, tmp_path)
        update(params, optimizer)
        return messages

    first, second = virtual.run(on_rank, 2)
    assert first[0] == "ValueError: no"
    assert second[0].endswith("rank 0 could not call eval() of optimizer 0 (Failing): ValueError: no")
    for _, *later in (first, second):
        for message in later:
            assert "eval() of optimizer 0 (Failing) raised on ranks [0] and not on the others" in message
