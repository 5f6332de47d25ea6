"""The seam of what a rank owns: local tensors may be copies of the parameters in another dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from library.training import Listing, OnMasters
from torch import nn, optim

from zero_ref.comm.collectives import Collectives
from zero_ref.files.sharded import load_sharded, save_sharded
from zero_ref.lab import virtual
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.plan.rules import equal_shares
from zero_ref.shard.owned import MASTER
from zero_ref.shard.stepper import GradientSource

SHAPES = [(64, 32), (32,), (48, 16), (301,), ()]
DTYPES = [torch.bfloat16, torch.bfloat16, torch.float32, torch.bfloat16, torch.float16]
OPTIONS = {"lr": 1e-4, "weight_decay": 0.1}
Values = list[torch.Tensor]


OnCopies = partial(ZeroRedundancyOptimizer, master_dtype=torch.float32)


def start() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [
        nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        for shape, dtype in zip(SHAPES, DTYPES, strict=True)
    ]


def fill(params: Iterable[torch.Tensor], step: int) -> None:
    generator = torch.Generator().manual_seed(step + 1)
    for param in params:
        param.grad = (torch.randn(param.shape, generator=generator) * 1e-2).to(param.dtype)


def train(params: list[nn.Parameter], optimizer: ZeroRedundancyOptimizer, steps: range) -> Values:
    for step in steps:
        fill(params, step)
        optimizer.step()
    return [param.detach().clone() for param in params]


def unsharded(steps: int) -> tuple[Values, Values, optim.Optimizer]:
    """Parameters, copies and optimizer of a plain loop."""
    params = start()
    copies = [param.detach().float().requires_grad_() for param in params]
    adam = optim.AdamW(copies, **OPTIONS)
    for step in range(steps):
        fill(params, step)
        for param, copy in zip(params, copies, strict=True):
            assert param.grad is not None
            copy.grad = param.grad.float()
        adam.step()
        for param, copy in zip(params, copies, strict=True):
            param.data.copy_(copy.detach())
    return [param.detach() for param in params], [copy.detach() for copy in copies], adam


def made(comm: Collectives, partition: Any, flat: bool) -> tuple[list[nn.Parameter], ZeroRedundancyOptimizer]:
    params = start()
    groups = [{"params": params[:2]}, {"params": params[2:]}]
    return params, OnCopies(
        groups, optim.AdamW, comm, partition=partition, parameters_as_bucket_view=flat, **OPTIONS
    )


def assert_equal(ours: Values, theirs: Values) -> None:
    assert all(map(torch.equal, ours, theirs))


WAYS = pytest.mark.parametrize(
    ("partition", "flat"),
    [("sorted_greedy", True), ("even", False)],
)


def test_updates_too_small_for_16_bits_add_up_in_a_copy() -> None:
    def trained(optimizer_class: Callable[..., ZeroRedundancyOptimizer], comm: Collectives) -> float:
        weight = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
        optimizer = optimizer_class([weight], optim.AdamW, comm, lr=1e-4, weight_decay=0.0)
        for _ in range(100):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        return weight[0].item()

    assert virtual.run(partial(trained, ZeroRedundancyOptimizer), 2, timeout=180) == [1.0, 1.0]
    assert virtual.run(partial(trained, OnCopies), 2, timeout=180) == pytest.approx([0.99, 0.99], abs=2**-9)


@WAYS
def test_checkpoints_keep_the_copies_at_any_number_of_ranks(
    partition: str, flat: bool, tmp_path: Path
) -> None:
    def save(comm: Collectives) -> tuple[Values, dict[str, Any]]:
        params, optimizer = made(comm, partition, flat)
        values = train(params, optimizer, range(3))
        save_sharded(optimizer, tmp_path)
        optimizer.consolidate_state_dict("all")
        return values, optimizer.state_dict()

    def load(comm: Collectives, state: dict[str, Any] | None, values: Values) -> Values:
        params, optimizer = made(comm, "sorted_greedy" if partition == "even" else "even", flat)
        if state is None:
            load_sharded(optimizer, tmp_path)
        else:
            for param, value in zip(params, values, strict=True):
                param.data.copy_(value)
            optimizer.load_state_dict(state)
        return train(params, optimizer, range(3, 6))

    _, copies, _ = unsharded(3)
    expected, _, _ = unsharded(6)
    values, state = virtual.run(save, 3, timeout=180)[0]
    for number, copy in enumerate(copies):
        if DTYPES[number] != torch.float32:
            assert torch.equal(state["state"][number][MASTER], copy)
        else:
            assert MASTER not in state["state"][number]
    for world_size in (1, 2, 4):
        for given in (state, None):
            for trained in virtual.run(load, world_size, given, values, timeout=180):
                assert_equal(trained, expected)


def test_a_checkpoint_without_copies_starts_them_from_the_parameters() -> None:
    def on_rank(comm: Collectives) -> tuple[Values, Values]:
        params, optimizer = made(comm, "even", False)
        train(params, optimizer, range(3))
        optimizer.consolidate_state_dict("all")
        state = optimizer.state_dict()
        for of_param in state["state"].values():
            of_param.pop(MASTER, None)
        optimizer.load_state_dict(state)
        return [own.local.detach() for own in optimizer.shard.owned], [
            own.window.float() for own in optimizer.shard.owned
        ]

    for copies, rounded in virtual.run(on_rank, 2, timeout=180):
        assert_equal(copies, rounded)


@pytest.mark.parametrize("optimizer_class", [optim.AdamW, optim.SGD])
def test_a_run_of_32_bits_goes_on_in_16_bits_with_masters_and_back(
    optimizer_class: Any, tmp_path: Path
) -> None:
    """The masters begin with the 32-bit values, and 32-bit parameters begin with the masters."""
    lr = 1e-3 if optimizer_class is optim.AdamW else 0.1
    masters = {"master_dtype": torch.float32}

    def wide() -> list[nn.Parameter]:
        return [nn.Parameter(param.detach().float()) for param in start()]

    def save(comm: Collectives) -> tuple[Values, dict[str, Any]]:
        params = wide()
        optimizer = ZeroRedundancyOptimizer(params, optimizer_class, comm, partition="even", lr=lr)
        values = train(params, optimizer, range(3))
        save_sharded(optimizer, tmp_path / "32")
        optimizer.consolidate_state_dict("all")
        return values, optimizer.state_dict()

    def go_on(comm: Collectives, state: Any) -> Values:
        params = start()
        optimizer = ZeroRedundancyOptimizer(params, optimizer_class, comm, lr=lr, **masters)
        if state is None:
            load_sharded(optimizer, tmp_path / "32")
        else:
            for param, value in zip(params, values, strict=True):
                param.data.copy_(value)
            optimizer.load_state_dict(state)
        trained = [value for step in range(3, 6) for value in train(params, optimizer, range(step, step + 1))]
        save_sharded(optimizer, tmp_path / "16")
        return trained

    def back(comm: Collectives) -> Values:
        params = wide()
        optimizer = ZeroRedundancyOptimizer(params, optimizer_class, comm, partition="even", lr=lr)
        load_sharded(optimizer, tmp_path / "16")
        return train(params, optimizer, range(6, 8))

    values, state = virtual.run(save, 4, timeout=180)[0]
    for number, value in enumerate(values):
        if DTYPES[number] != torch.float32:
            state["state"].setdefault(number, {})[MASTER] = value  # what a user may write into a whole state
    params = start()
    plain = OnMasters(params, optimizer_class, lr=lr)
    for param, value in zip(params, values, strict=True):
        param.data.copy_(value)
    plain.load_state_dict(deepcopy(state))  # it keeps the step counters themselves
    expected: Values = []
    for step in range(3, 6):
        fill(params, step)
        plain.step()
        expected += [param.detach().clone() for param in params]
    for given in (state, None):
        for trained in virtual.run(go_on, 3, given, timeout=180):
            assert_equal(trained, expected)

    copies = [copy for _, copy in plain.pairs]
    for step in range(6, 8):
        fill(copies, step)
        plain.optim.step()
    for trained in virtual.run(back, 2, timeout=180):
        assert_equal(trained, [copy.detach() for copy in copies])


def test_a_frozen_parameter_is_left_as_it_is_on_all_ranks() -> None:
    def on_rank(comm: Collectives) -> tuple[Values, list[int]]:
        params, optimizer = made(comm, "sorted_greedy", False)
        params[0].requires_grad_(False)
        params[0].data.fill_(5)
        version = params[0]._version
        values = train(params, optimizer, range(2))
        return values, [params[0]._version - version]

    (first, versions), (second, others) = virtual.run(on_rank, 2, timeout=180)
    assert_equal(first, second)
    assert versions == others == [0]
    assert bool((first[0] == 5).all())


def test_only_what_was_stepped_is_published() -> None:
    def on_rank(comm: Collectives) -> list[int]:
        params, optimizer = made(comm, "sorted_greedy", False)
        fill(params, 0)
        before = [param._version for param in params]
        optimizer.shard.step(GradientSource({1: params[1].grad}))  # type: ignore[dict-item]
        return [number for number, param in enumerate(params) if param._version != before[number]]

    assert virtual.run(on_rank, 1, timeout=180) == [[1]]


def test_values_of_another_shape_are_refused_on_all_ranks_before_anything_is_loaded() -> None:
    def on_rank(comm: Collectives) -> tuple[str, bool]:
        params, optimizer = made(comm, "sorted_greedy", False)
        train(params, optimizer, range(2))
        optimizer.consolidate_state_dict("all")
        state = optimizer.state_dict()
        before = [own.local.detach().clone() for own in optimizer.shard.owned]
        state["state"][3][MASTER] = torch.zeros(300)
        with pytest.raises((ValueError, RuntimeError)) as error:
            optimizer.load_state_dict(state)
        return str(error.value), all(
            torch.equal(own.local, values) for own, values in zip(optimizer.shard.owned, before, strict=True)
        )

    for message, same in virtual.run(on_rank, 2, timeout=180):
        assert (
            "the state 'master_weight' of parameter 3 has shape (300,), and what it stands for has (301,)"
            in message
        )
        assert same


def test_what_others_write_into_a_parameter_is_taken_into_its_copy() -> None:
    def on_rank(comm: Collectives) -> tuple[float, float, bool]:
        weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        optimizer = OnCopies([weight], optim.SGD, comm, lr=1.0)

        def step(update: float) -> None:
            weight.grad = torch.full_like(weight, -update)
            optimizer.step()

        step(0.001)
        with torch.no_grad():
            weight[0] = 5.0  # as a loaded model
        step(0.001)
        (own,) = optimizer.shard.owned or [None]
        kept = own is None or abs(own.local[1].item() - 1.002) < 1e-5  # nothing of the small updates is lost
        return weight[0].item(), weight[1].item(), kept

    assert virtual.run(on_rank, 2, timeout=180) == [(5.0, 1.0, True)] * 2


def test_a_graph_from_before_the_step_may_be_used_in_its_closure() -> None:
    def on_rank(comm: Collectives) -> float:
        weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        optimizer = OnCopies([weight], optim.SGD, comm, lr=0.5)
        loss = (weight * weight).sum()

        def closure() -> torch.Tensor:
            loss.backward()
            return loss

        assert optimizer.step(closure) is loss
        return weight[0].item()

    assert virtual.run(on_rank, 2, timeout=180) == [0.0, 0.0]


def test_copies_follow_a_change_of_memory_format() -> None:
    def on_rank(comm: Collectives) -> bool:
        weight = nn.Parameter(torch.arange(36.0).reshape(1, 4, 3, 3).bfloat16())
        optimizer = OnCopies([weight], optim.SGD, comm, lr=1.0, momentum=0.9)
        weight.data = weight.data.to(memory_format=torch.channels_last)
        weight.grad = torch.arange(36.0).reshape(1, 4, 3, 3).bfloat16()
        optimizer.step()
        optimizer.consolidate_state_dict("all")
        state = optimizer.state_dict()["state"][0]
        return torch.equal(state["momentum_buffer"], weight.grad.float()) and torch.equal(
            state[MASTER].bfloat16(), weight.detach()
        )

    assert virtual.run(on_rank, 2, timeout=180) == [True, True]


def test_masters_of_an_earlier_run_do_not_come_back() -> None:
    def on_rank(comm: Collectives) -> list[bool]:
        params, optimizer = made(comm, "sorted_greedy", False)
        train(params, optimizer, range(2))
        optimizer.consolidate_state_dict("all")
        without = ZeroRedundancyOptimizer(params, optim.AdamW, comm, **OPTIONS)
        state = optimizer.state_dict()
        without.load_state_dict({**state, "param_groups": without_groups(state)})
        without.consolidate_state_dict("all")
        return [MASTER in of_param for of_param in without.state_dict()["state"].values()]

    def without_groups(state: dict[str, Any]) -> list[dict[str, Any]]:
        first, second = state["param_groups"]
        return [{**first, "params": first["params"] + second["params"]}]

    assert not any(map(any, virtual.run(on_rank, 2, timeout=180)))


def test_a_state_that_some_owners_of_a_parameter_lack_is_refused_on_all_ranks() -> None:
    def on_rank(comm: Collectives) -> str:
        weight = nn.Parameter(torch.ones(256, dtype=torch.bfloat16))
        optimizer = OnCopies([weight], optim.SGD, comm, partition="even", lr=1.0)
        weight.grad = torch.ones_like(weight) if comm.rank == 0 else None
        optimizer.step()
        with pytest.raises((ValueError, RuntimeError)) as error:
            optimizer.consolidate_state_dict(1)
        return str(error.value)

    for message in virtual.run(on_rank, 2, timeout=180):
        assert "128 of 256 elements of parameter 0 have the state 'master_weight'" in message


def test_an_optimizer_that_lists_its_parameters_itself_goes_on_after_a_layer_is_frozen() -> None:
    def on_rank(comm: Collectives) -> float:
        params = [nn.Parameter(torch.ones(4, dtype=torch.bfloat16)) for _ in range(2)]
        optimizer = OnCopies(params, Listing, comm, lr=1.0)
        params[0].requires_grad_(False)
        params[1].grad = torch.ones_like(params[1])
        optimizer.step()
        return params[1][0].item()

    assert virtual.run(on_rank, 2, timeout=180) == [0.75, 0.75]


def test_what_others_write_is_taken_although_a_layer_is_frozen_or_the_state_is_saved_next() -> None:
    def on_rank(comm: Collectives) -> tuple[float, float]:
        params = [nn.Parameter(torch.ones(2, dtype=torch.bfloat16)) for _ in range(2)]
        optimizer = OnCopies(params, optim.SGD, comm, lr=0.5)

        def step() -> None:
            for param in params:
                param.grad = torch.ones_like(param)
            optimizer.step()

        step()
        with torch.no_grad():
            params[0].fill_(5.0)
        params[1].requires_grad_(False)
        step()
        after = params[0][0].item()
        with torch.no_grad():
            params[0].fill_(7.0)
        optimizer.consolidate_state_dict("all")
        return after, optimizer.state_dict()["state"][0][MASTER][0].item()

    assert virtual.run(on_rank, 2, timeout=180) == [(4.5, 7.0)] * 2


CLASSES = {
    "AdamW": (optim.AdamW, OPTIONS),
    "SGD": (optim.SGD, {"lr": 1e-2, "momentum": 0.9}),
    "Adafactor": (optim.Adafactor, {"lr": 1e-2}),
    "Muon": (optim.Muon, {"lr": 1e-2, "ns_steps": 3}),
}


@pytest.mark.parametrize("name", CLASSES)
def test_masters_equal_the_unsharded_loop_whatever_the_partition(name: str) -> None:
    optimizer_class, options = CLASSES[name]

    def begin() -> list[nn.Parameter]:
        generator = torch.Generator().manual_seed(0)
        shapes = [(64, 32), (8, 24), (48, 16), (301, 5)]
        return [nn.Parameter(torch.randn(shape, generator=generator).bfloat16()) for shape in shapes]

    def on_rank(comm: Collectives, partition: Any, flat: bool) -> Values:
        params = begin()
        optimizer = ZeroRedundancyOptimizer(
            params, optimizer_class, comm, flat, partition=partition, master_dtype=torch.float32, **options
        )
        return [value for step in range(4) for value in train(params, optimizer, range(step, step + 1))]

    params = begin()
    plain = OnMasters(params, optimizer_class, **options)
    expected = []
    for step in range(4):
        fill(params, step)
        plain.step()
        expected += [param.detach().clone() for param in params]
    shares = partial(equal_shares, range_numel=1000)
    for number, partition in enumerate(("sorted_greedy", "registration_greedy", "even", "balanced", shares)):
        for world_size in (1, 3):
            for values in virtual.run(on_rank, world_size, partition, number % 2 == 0, timeout=180):
                assert_equal(values, expected)
