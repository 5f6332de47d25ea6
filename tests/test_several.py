"""Several optimizer classes in one: groups name their class, and each part equals its plain optimizer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from training import assert_state_dicts_equal

from zero_ref.comm.collectives import Collectives
from zero_ref.lab import virtual
from zero_ref.lab.meter import state_bytes
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.plan.choice import loads_under, plan_partition
from zero_ref.plan.rules import even, newton_schulz_operations
from zero_ref.shard.owned import MASTER
from zero_ref.shard.several import SeveralOptimizers, split_state_dict
from zero_ref.simulator.ledger import state_bytes_of_rank
from zero_ref.simulator.models import matrices_whole, shapes, specs
from zero_ref.state.sharded import load_sharded, save_sharded

MATRICES = [(64, 32), (8, 48), (16, 16), (100, 3)]
OTHERS = [(32,), (301,), (), (500, 4)]
ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.5, 0.9), "weight_decay": 0.1}
MUON: dict[str, Any] = {"lr": 0.02, "ns_steps": 3}
RULES = ["sorted_greedy", "registration_greedy", "even", "balanced"]
Values = list[torch.Tensor]


def start() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in MATRICES + OTHERS]


def groups_of(params: list[nn.Parameter]) -> list[dict[str, Any]]:
    count = len(MATRICES)
    return [
        {"params": params[count:-1]},
        {"params": params[:2], "optimizer_class": optim.Muon, **MUON},
        {"params": params[2:count], "optimizer_class": optim.Muon, "lr": 0.01},
        {"params": params[-1:], "lr": 0.1},
    ]


def fill(params: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step + 1)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


class Plain:
    """The two plain optimizers that the one must be equal to.

    They step `stepped`: copies in 32 bits of the 16-bit parameters, and the other parameters themselves.
    """

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.params = params
        self.stepped = [p if p.itemsize == 4 else nn.Parameter(p.detach().float()) for p in params]
        groups = groups_of(self.stepped)
        self.muon = optim.Muon([{k: v for k, v in g.items() if k != "optimizer_class"} for g in groups[1:3]])
        self.adamw = optim.AdamW([groups[0], groups[3]], **ADAMW)

    def step(self) -> None:
        for param, stepped in zip(self.params, self.stepped, strict=True):
            stepped.grad = None if param.grad is None else param.grad.to(stepped.dtype)
        self.muon.step()
        self.adamw.step()
        for param, stepped in zip(self.params, self.stepped, strict=True):
            param.data.copy_(stepped.detach())

    def train(self, steps: range) -> Values:
        for step in steps:
            fill(self.params, step)
            self.step()
        return [param.detach().clone() for param in self.params]


def one_of(params: list[nn.Parameter], comm: Collectives, **options: Any) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(groups_of(params), optim.AdamW, comm, **options, **ADAMW)


def train(params: list[nn.Parameter], optimizer: Any, steps: range) -> Values:
    for step in steps:
        fill(params, step)
        optimizer.step()
    return [param.detach().clone() for param in params]


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("partition", RULES)
def test_one_optimizer_equals_the_plain_ones(partition: str, flat: bool, world_size: int) -> None:
    def on_rank(comm: Collectives) -> Values:
        params = start()
        optimizer = one_of(params, comm, partition=partition, parameters_as_bucket_view=flat)
        assert isinstance(optimizer.optim, SeveralOptimizers)
        if partition in ("even", "balanced") and world_size == 4:
            assert not optimizer.partition.is_whole
        matrices = optimizer.partition.pieces_of_param[3:7]  # in registration order: the groups 1 and 2
        assert all(len(pieces) == 1 for pieces in matrices)
        return train(params, optimizer, range(6))

    expected = Plain(start()).train(range(6))
    for values in virtual.run(on_rank, world_size, timeout=180):
        assert all(map(torch.equal, values, expected))


def test_what_is_put_in_place_of_state_and_groups_counts_in_the_next_step() -> None:
    """As of a plain optimizer: a new state begins anew, and a group that was taken out is not stepped."""
    params, plain = start(), Plain(start())
    several = SeveralOptimizers(groups_of(params), optim.AdamW, **ADAMW)
    assert all(map(torch.equal, train(params, several, range(2)), plain.train(range(2))))
    several.param_groups = several.param_groups[:2]
    plain.muon.param_groups.pop()
    plain.adamw.param_groups.pop()
    for one in (several, plain.muon, plain.adamw):
        one.state = defaultdict(dict)
    assert all(map(torch.equal, train(params, several, range(2, 4)), plain.train(range(2, 4))))


def test_groups_have_the_options_of_their_own_class() -> None:
    def on_rank(comm: Collectives) -> list[set[str]]:
        optimizer = one_of(start(), comm)
        assert [group["optimizer_class"] for group in optimizer.param_groups] == [
            optim.AdamW,
            optim.Muon,
            optim.Muon,
            optim.AdamW,
        ]
        assert optimizer.param_groups[2]["ns_steps"] == 5
        return [set(group) for group in optimizer.param_groups]

    plain = Plain(start())
    muon, adamw = ({*one.param_groups[0], "optimizer_class"} for one in (plain.muon, plain.adamw))
    for keys in virtual.run(on_rank, 2, timeout=180):
        assert keys == [adamw, muon, muon, adamw]


def test_a_scheduler_sees_one_list_of_groups() -> None:
    def on_rank(comm: Collectives) -> Values:
        params = start()
        optimizer = one_of(params, comm, partition="even")
        scheduler = optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for step in range(4):
            fill(params, step)
            optimizer.step()
            scheduler.step()
        return [param.detach() for param in params]

    plain = Plain(start())
    schedulers = [optim.lr_scheduler.ExponentialLR(one, 0.5) for one in (plain.muon, plain.adamw)]
    for step in range(4):
        fill(plain.params, step)
        plain.step()
        for scheduler in schedulers:
            scheduler.step()
    for values in virtual.run(on_rank, 2, timeout=180):
        assert all(map(torch.equal, values, plain.params))


def test_a_closure_is_called_once_for_all_classes() -> None:
    def on_rank(comm: Collectives) -> tuple[Values, int]:
        params, calls = start(), []
        optimizer = one_of(params, comm, partition="even")

        def closure() -> float:
            assert torch.is_grad_enabled()
            fill(params, len(calls))
            calls.append(None)
            return 0.25

        assert [optimizer.step(closure) for _ in range(3)] == [0.25] * 3
        return [param.detach() for param in params], len(calls)

    expected = Plain(start()).train(range(3))
    for values, calls in virtual.run(on_rank, 2, timeout=180):
        assert calls == 3
        assert all(map(torch.equal, values, expected))


def test_a_group_of_a_second_class_may_come_later(tmp_path: Path) -> None:
    """And one that is refused leaves the optimizer as it was."""

    def on_rank(comm: Collectives) -> Values:
        params = start()
        first, muon, more, last = groups_of(params)
        optimizer = ZeroRedundancyOptimizer([first], optim.AdamW, comm, partition="even", **ADAMW)
        train(params, optimizer, range(2))
        with pytest.raises((ValueError, RuntimeError), match="2D parameters"):
            optimizer.add_param_group(
                {"params": [nn.Parameter(torch.ones(3))], "optimizer_class": optim.Muon}
            )
        assert type(optimizer.optim) is optim.AdamW
        with pytest.raises(TypeError, match="takes a class"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))], "optimizer_class": "Muon"})
        for group in (muon, more, last):
            optimizer.add_param_group(group)
        values = train(params, optimizer, range(2, 6))
        optimizer.repartition("balanced")
        save_sharded(optimizer, tmp_path)
        return values

    plain = Plain(start())
    for param in plain.params[:4] + plain.params[-1:]:
        param.requires_grad_(False)
    for step in range(6):
        fill(plain.params, step)
        if step < 2:
            for param in plain.params[:4] + plain.params[-1:]:
                param.grad = None
        plain.step()
    for values in virtual.run(on_rank, 3, timeout=180):
        assert all(map(torch.equal, values, plain.params))


@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize(
    ("before", "after"), [("sorted_greedy", "even"), ("balanced", "registration_greedy")]
)
def test_checkpoints_go_to_other_ranks_and_to_the_plain_optimizers(
    before: str, after: str, masters: bool, tmp_path: Path
) -> None:
    """Saved at 4 ranks, loaded at 3 under another rule, sharded or whole, and at 1 in plain torch.

    With masters, all but one of the parameters have 16 bits.
    """
    options: dict[str, Any] = {"master_dtype": torch.float32} if masters else {}

    def begin() -> list[nn.Parameter]:
        params = start()
        if masters:
            for param in params[1:]:
                param.data = param.data.bfloat16()
        return params

    def save(comm: Collectives) -> tuple[Values, dict[str, Any]]:
        params = begin()
        optimizer = one_of(params, comm, partition=before, **options)
        values = train(params, optimizer, range(3))
        save_sharded(optimizer, tmp_path / "sharded")
        optimizer.consolidate_state_dict("all")
        return values, optimizer.state_dict()

    def load(comm: Collectives, values: Values, state: dict[str, Any] | None) -> Values:
        params = begin()
        optimizer = one_of(params, comm, partition=after, parameters_as_bucket_view=True, **options)
        if state is None:
            load_sharded(optimizer, tmp_path / "sharded")
        else:
            for param, value in zip(params, values, strict=True):
                param.data.copy_(value)
            optimizer.load_state_dict(state)
        return train(params, optimizer, range(3, 6))

    expected = Plain(begin()).train(range(6))
    values, state = virtual.run(save, 4, timeout=180)[0]
    torch.save(state, tmp_path / "whole.pt")
    state = torch.load(tmp_path / "whole.pt", weights_only=True)
    for world_size in (1, 3):
        for given in (state, None):
            for trained in virtual.run(load, world_size, values, given, timeout=180):
                assert all(map(torch.equal, trained, expected))

    parts = split_state_dict(state)
    assert list(parts) == ["AdamW", "Muon"]
    reference, fresh = Plain(begin()), Plain(begin())
    reference.train(range(3))
    for param, value in zip(fresh.params, values, strict=True):
        param.data.copy_(value)
    for plain, goes_on in ((reference.adamw, fresh.adamw), (reference.muon, fresh.muon)):
        part = parts[type(plain).__name__]
        goes_on.load_state_dict(part)  # it keeps the masters, and has no use for them
        without = {
            number: {key: value for key, value in of_param.items() if key != MASTER}
            for number, of_param in part["state"].items()
        }
        assert_state_dicts_equal({**part, "state": without}, plain.state_dict())
        for stepped, of_param in goes_on.state.items():
            assert (MASTER in of_param) != any(stepped is param for param in fresh.params)
            if MASTER in of_param:
                stepped.data.copy_(of_param[MASTER])
    assert all(map(torch.equal, fresh.stepped, reference.stepped))
    assert all(map(torch.equal, fresh.train(range(3, 6)), expected))


def test_a_checkpoint_of_another_class_is_refused_on_all_ranks() -> None:
    def on_rank(comm: Collectives) -> dict[str, Any]:
        params = start()
        optimizer = one_of(params, comm)
        train(params, optimizer, range(1))
        optimizer.consolidate_state_dict("all")
        state = optimizer.state_dict()
        swapped = [{**group, "optimizer_class": "Lion"} for group in state["param_groups"]]
        with pytest.raises(ValueError, match="group 0 is of Lion, this optimizer's is of AdamW"):
            optimizer.load_state_dict({**state, "param_groups": swapped})
        single = ZeroRedundancyOptimizer(groups_of_one_class(params), optim.AdamW, comm)
        with pytest.raises(ValueError, match="group 1 is of Muon, this optimizer's is of AdamW"):
            single.load_state_dict(state)
        return state

    def groups_of_one_class(params: list[nn.Parameter]) -> list[dict[str, Any]]:
        return [{"params": group["params"]} for group in groups_of(params)]

    state = virtual.run(on_rank, 2, timeout=180)[0]
    state["param_groups"][0].pop("optimizer_class")
    with pytest.raises(ValueError, match="does not name its optimizer_class"):
        split_state_dict(state)


def test_ranks_that_name_other_classes_all_raise() -> None:
    def on_rank(comm: Collectives) -> None:
        params = start()
        groups = groups_of(params)
        if comm.rank == 1:
            groups[2]["optimizer_class"] = optim.Adafactor
        with pytest.raises(ValueError, match="Adafactor"):
            ZeroRedundancyOptimizer(groups, optim.AdamW, comm, **ADAMW)

    virtual.run(on_rank, 2, timeout=180)


def test_frozen_matrices_stand_still_and_are_trained_again() -> None:
    def frozen_then_trained(params: list[nn.Parameter], step: Any) -> Values:
        for number in range(6):
            for param in params[:3]:
                param.requires_grad_(number not in (2, 3))
            fill(params, number)
            for param in params:
                if not param.requires_grad:
                    param.grad = None
            step()
        return [param.detach().clone() for param in params]

    def on_rank(comm: Collectives) -> Values:
        params = start()
        optimizer = one_of(params, comm, partition="balanced", parameters_as_bucket_view=True)
        return frozen_then_trained(params, optimizer.step)

    plain = Plain(start())
    expected = frozen_then_trained(plain.params, plain.step)
    for values in virtual.run(on_rank, 3, timeout=180):
        assert all(map(torch.equal, values, expected))


@pytest.mark.parametrize("partition", RULES)
def test_the_simulator_counts_the_state_of_both_classes(partition: str) -> None:
    def on_rank(comm: Collectives) -> tuple[int, int]:
        params = start()
        optimizer = one_of(params, comm, partition=partition)
        train(params, optimizer, range(1))
        specs = optimizer.built.specs
        return state_bytes(optimizer), state_bytes_of_rank(optimizer.partition, specs, "Muon+AdamW")[
            comm.rank
        ]

    for measured, predicted in virtual.run(on_rank, 3, timeout=180):
        assert measured == predicted > 0


@pytest.mark.parametrize("ranks", [8, 64])
@pytest.mark.parametrize("model", ["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"])
def test_operations_of_muon_are_balanced(model: str, ranks: int) -> None:
    """Under 1.05 times the lower bound.

    That is the mean, or the largest matrix, or the two smallest of one matrix more than there are ranks: two
    of them have the same owner.
    """
    params = matrices_whole(specs(shapes(model)))
    operations = loads_under("balanced", plan_partition("balanced", params, ranks), params)
    costs = sorted((newton_schulz_operations(param) for param in params if param.whole), reverse=True)
    bound = max(sum(operations) / ranks, costs[0], sum(costs[ranks - 1 : ranks + 1]))
    assert max(operations) < 1.05 * bound


def test_elements_are_level_beside_whole_matrices() -> None:
    params = matrices_whole(specs(shapes("gpt2")))
    loads = plan_partition("balanced", params, 8).loads
    assert max(loads) - min(loads) <= 64


class Noisy(optim.SGD):
    """Draws random numbers, before its closure or in its update."""

    def step(self, closure: Any = None) -> Any:
        torch.rand(())
        return super().step(closure)


class Averaging(optim.SGD):
    """Keeps something that belongs to no parameter."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "average": 1.0}


@pytest.mark.filterwarnings("ignore:.* can be trained, but not saved or repartitioned:UserWarning")
@pytest.mark.parametrize("with_closure", [False, True])
def test_a_class_that_draws_random_numbers_is_told_of(with_closure: bool) -> None:
    def on_rank(comm: Collectives, optimizer_class: Any) -> None:
        params = start()
        optimizer = ZeroRedundancyOptimizer(params, optimizer_class, comm, lr=0.1)
        fill(params, 0)
        if with_closure:
            optimizer.step(lambda: torch.rand(()))  # which a user's closure may
        else:
            optimizer.step()

    with pytest.warns(UserWarning, match="Noisy drew random numbers in its step"):
        virtual.run(on_rank, 1, Noisy, timeout=180)
    virtual.run(on_rank, 1, Averaging, timeout=180)  # a warning would be an error


@pytest.mark.filterwarnings("ignore:.* can be trained, but not saved or repartitioned:UserWarning")
@pytest.mark.parametrize("several", [False, True])
def test_state_beside_that_of_parameters_is_refused_where_it_would_be_lost(
    several: bool, tmp_path: Path
) -> None:
    def on_rank(comm: Collectives) -> None:
        params = start()
        groups: list[dict[str, Any]] = [{"params": params[:4]}, {"params": params[4:]}]
        if several:
            groups[0]["optimizer_class"] = optim.Muon
        optimizer = ZeroRedundancyOptimizer(groups, Averaging, comm, lr=0.1)
        values = train(params, optimizer, range(2))
        lost: list[Any] = [
            optimizer.consolidate_state_dict,
            lambda: save_sharded(optimizer, tmp_path),
            lambda: optimizer.repartition("registration_greedy"),
        ]
        for action in lost:
            with pytest.raises(TypeError, match=r"Averaging keeps \['average'\] in its state_dict"):
                action()
        assert all(map(torch.equal, values, params))
        train(params, optimizer, range(2, 3))

    virtual.run(on_rank, 2, timeout=180)


# --------------------------------------------------------------------------------- users' odd, legal programs


class Coupled(optim.SGD):
    """Scales by the norm of all gradients."""

    def __init__(self, params: Any, lr: float = 0.1, coupled: bool = True) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            group.setdefault("coupled", coupled)

    def step(self, closure: Any = None) -> Any:
        params = [p for group in self.param_groups if group["coupled"] for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in params if p.grad is not None] or [torch.ones(())]).norm()
        for param in params:
            if param.grad is not None:
                param.grad = param.grad / norm
        return super().step(closure)


@pytest.mark.parametrize("lr", [0.1, 0.0])
def test_a_class_that_couples_parameters_is_refused_in_any_group_at_any_time(lr: float) -> None:
    def on_rank(comm: Collectives) -> None:
        one, two, three, four = start()[:4]
        coupled = {"optimizer_class": Coupled, "lr": lr}
        with pytest.raises((ValueError, RuntimeError), match="beside another one"):
            ZeroRedundancyOptimizer([{"params": [one], **coupled}, {"params": [two]}], optim.AdamW, comm)
        groups = [{"params": [one], "coupled": False}, {"params": [two], "coupled": True}]
        with pytest.raises((ValueError, RuntimeError), match="beside another one"):
            ZeroRedundancyOptimizer(groups, Coupled, comm, lr=lr)
        optimizer = ZeroRedundancyOptimizer([three], optim.AdamW, comm)
        with pytest.raises((ValueError, RuntimeError), match="beside another one"):
            optimizer.add_param_group({"params": [four], **coupled})

    virtual.run(on_rank, 2, timeout=180)


class Lamb(optim.SGD):
    """Scales each update by the norm of its tensor."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=group["lr"] * float(param.norm()))


def test_a_warm_up_from_zero_does_not_hide_that_shapes_are_used() -> None:
    def on_rank(comm: Collectives) -> bool:
        params = [nn.Parameter(torch.ones(200, 100))]
        return ZeroRedundancyOptimizer(params, Lamb, comm, partition="even", lr=0.0).partition.is_whole

    assert virtual.run(on_rank, 2, timeout=180) == [True, True]


def test_the_main_class_may_get_its_first_group_later() -> None:
    def on_rank(comm: Collectives) -> float:
        first, second = start()[:2]
        groups = [{"params": [first], "optimizer_class": optim.Muon}]
        optimizer = ZeroRedundancyOptimizer(groups, optim.AdamW, comm, lr=0.5)
        optimizer.add_param_group({"params": [second]})
        return optimizer.param_groups[1]["lr"]

    assert virtual.run(on_rank, 2, timeout=180) == [0.5, 0.5]


def test_errors_name_the_main_class_of_a_group_that_names_none() -> None:
    def on_rank(comm: Collectives) -> None:
        first, second, third = start()[:3]
        groups = [{"params": [first], "optimizer_class": optim.Muon}, {"params": [second]}]
        optimizer = ZeroRedundancyOptimizer(groups, optim.Adafactor, comm, partition=cut_later)
        with pytest.raises(ValueError, match="Adafactor may look at a parameter's shape"):
            optimizer.add_param_group({"params": [third]})

    def cut_later(numels: Sequence[int], world_size: int) -> Any:
        return [[0], [1]] if len(numels) == 2 else even(numels, world_size)

    virtual.run(on_rank, 2, timeout=180)


def test_a_refused_group_leaves_no_class_behind() -> None:
    def on_rank(comm: Collectives) -> list[str]:
        one, two, bias, matrix, last = *start()[:2], *start()[4:5], *start()[2:4]
        groups = [{"params": [one], "optimizer_class": optim.Adagrad}, {"params": [two]}]
        optimizer = ZeroRedundancyOptimizer(groups, optim.AdamW, comm, lr=0.1)
        new = matrix if comm.rank else bias  # Muon takes matrices
        with pytest.raises((ValueError, RuntimeError)):
            optimizer.add_param_group({"params": [new], "optimizer_class": optim.Muon})
        optimizer.add_param_group({"params": [last], "optimizer_class": optim.Muon})
        optimizer.repartition("balanced")
        return [one.__name__ for one in optimizer.optim.optimizers]  # type: ignore[attr-defined]

    assert virtual.run(on_rank, 2, timeout=180) == [["Adagrad", "AdamW", "Muon"]] * 2


class WantsRate(optim.SGD):
    """Has no default for its learning rate, and keeps an option by itself."""

    def __init__(self, params: Any, lr: float, sign: float = 1.0) -> None:
        self.sign = sign
        super().__init__(params, lr)

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] = abs(group["lr"]) * self.sign
        return super().step(closure)


def test_options_of_a_groups_class_reach_its_constructor() -> None:
    def on_rank(comm: Collectives) -> Values:
        params = start()[:2]
        groups = [
            {"params": params[:1]},
            {"params": params[1:], "optimizer_class": WantsRate, "lr": 0.1, "sign": -1.0},
        ]
        optimizer = ZeroRedundancyOptimizer(groups, optim.AdamW, comm)
        return train(params, optimizer, range(2))

    params = start()[:2]
    plain = WantsRate(params[1:], 0.1, sign=-1.0)
    for step in range(2):
        fill(params, step)
        plain.step()
    for values in virtual.run(on_rank, 2, timeout=180):
        assert torch.equal(values[1], params[1])


class CountsForAll(optim.SGD):
    def step(self, closure: Any = None) -> Any:
        self.state["count"] = self.state.get("count", 0) + 1
        return super().step(closure)


@pytest.mark.filterwarnings("ignore:.* can be trained, but not saved or repartitioned:UserWarning")
def test_state_of_no_parameter_is_refused_beside_another_class() -> None:
    def on_rank(comm: Collectives) -> None:
        params = start()
        groups = [{"params": params[:1], "optimizer_class": CountsForAll}, {"params": params[1:]}]
        optimizer = ZeroRedundancyOptimizer(groups, optim.SGD, comm, lr=0.1)
        fill(params, 0)
        with pytest.raises(RuntimeError, match="keeps 'count' in it, which belongs to no parameter"):
            optimizer.step()

    virtual.run(on_rank, 1, timeout=180)


def test_one_class_that_a_group_names_is_no_second_one() -> None:
    def on_rank(comm: Collectives) -> dict[str, Any]:
        params = start()
        groups = [{"params": params[:2], "optimizer_class": optim.AdamW}, {"params": params[2:]}]
        optimizer = ZeroRedundancyOptimizer(groups, optim.AdamW, comm, **ADAMW)
        train(params, optimizer, range(1))
        optimizer.consolidate_state_dict("all")
        return optimizer.state_dict()

    state = virtual.run(on_rank, 2, timeout=180)[0]
    params = start()
    plain = optim.AdamW([{"params": params[:2]}, {"params": params[2:]}], **ADAMW)
    train(params, plain, range(1))
    assert_state_dicts_equal(state, plain.state_dict())
