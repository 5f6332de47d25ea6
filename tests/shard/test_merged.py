"""Small parameters stepped as one train as if each were stepped by itself, and nothing shows of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from library.training import (
    ELEMENTWISE,
    Backward,
    OnMasters,
    Run,
    assert_same,
    assert_state_dicts_equal,
    assert_trains_as_plain,
    fill_gradients,
    run_script,
)
from torch import nn, optim
from torch.optim import Optimizer

from zero_ref.comm.collectives import Collectives
from zero_ref.lab import virtual
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.shard.merged import MERGED_NUMEL

FORMS: list[tuple[Any, bool]] = [("sorted_greedy", True), ("even", True), ("sorted_greedy", False)]
"""(partition, whether parameters are views of flat tensors or are copied into buffers)"""


class Beads(nn.Module):
    """Many small parameters: most can be merged, one has an odd size, one is too large, one lies across."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        shapes = [
            (64,),
            (8, 8),
            (128,),
            (3, 5),
            (64, 2),
            (MERGED_NUMEL + 64,),
            (64,),
            (192,),
            (16, 4, 2, 2),
            (64,),
        ]
        self.beads = nn.ParameterList(
            nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes
        )
        self.beads[8].data = self.beads[8].data.contiguous(memory_format=torch.channels_last)


def steps(model: nn.Module, optimizer: Optimizer, backward: Backward) -> Iterator[None]:
    for step in range(4):
        backward(step)
        optimizer.step()
        yield


def merged_with(comm: Collectives, optimizer_class: Any = optim.AdamW, **options: Any) -> Any:
    model = Beads()
    params = list(model.parameters())
    optimizer = ZeroRedundancyOptimizer(
        params, optimizer_class, comm, parameters_as_bucket_view=True, **options
    )
    return params, optimizer


def members(optimizer: Any) -> list[list[torch.Tensor]]:
    return [run.members for run in optimizer.shard.steppers.small.runs]


@pytest.mark.parametrize(
    ("optimizer_class", "options"), ELEMENTWISE[::2], ids=lambda value: getattr(value, "__name__", str(value))
)
def test_it_trains_as_the_plain_optimizer_bit_for_bit(optimizer_class: Any, options: dict[str, Any]) -> None:
    assert_trains_as_plain(steps, optimizer_class, modes=FORMS, make_model=Beads, **options)


def test_what_is_merged_is_small_whole_and_a_multiple_of_64() -> None:
    def on_rank(comm: Collectives) -> None:
        params, optimizer = merged_with(comm)
        numbers = {param: number for number, param in enumerate(params)}
        assert [[numbers[member] for member in of_run] for of_run in members(optimizer)] == [
            [0, 1, 2],
            [6, 7, 8, 9],
        ]  # 3 has an odd size, 4 has no neighbour, 5 is too large

    virtual.run(on_rank, 1)


def test_parameters_that_lie_apart_are_merged_in_the_buffers_in_which_they_are_sent() -> None:
    def on_rank(comm: Collectives) -> None:
        params = list(Beads().parameters())
        optimizer = ZeroRedundancyOptimizer(params, optim.AdamW, comm)
        numbers = {param: number for number, param in enumerate(params)}
        assert [[numbers[member] for member in of_run] for of_run in members(optimizer)] == [
            [0, 1, 2],
            [4, 6, 7, 8, 9],
        ]  # 3 has an odd size, and 5 is too large for the buffer
        places = [param.data_ptr() for param in params]
        fill_gradients(params, 0, world_size=1)
        optimizer.step()
        assert [param.data_ptr() for param in params] == places

    virtual.run(on_rank, 1)


def test_values_that_a_program_writes_into_data_are_what_the_next_step_starts_from() -> None:
    def script(model: Any, optimizer: Any, backward: Backward) -> Iterator[None]:
        for step in range(3):
            backward(step)
            optimizer.step()
            model.beads[1].data.mul_(0.5)  # which changes no version
            yield

    assert_trains_as_plain(script, modes=FORMS, make_model=Beads)


def test_a_closure_sees_the_parameters_and_not_the_buffers() -> None:
    def script(model: Any, optimizer: Any, backward: Backward) -> Iterator[None]:
        for step in range(3):

            def closure(step: int = step) -> None:
                with torch.no_grad():
                    model.beads[1].add_(1.0)
                backward(step)

            optimizer.step(closure)
            yield

    assert_trains_as_plain(script, modes=FORMS, make_model=Beads)


def test_other_optimizers_and_parameters_without_buckets_or_buffers_are_left_alone() -> None:
    def on_rank(comm: Collectives) -> None:
        assert members(merged_with(comm)[1])
        assert not members(merged_with(comm, optim.Adafactor)[1])
        assert not members(merged_with(comm, overlap_with_ddp=True)[1])
        one_by_one = ZeroRedundancyOptimizer(Beads().parameters(), optim.AdamW, comm, broadcast_buffer_size=0)
        assert not members(one_by_one)

    def members(optimizer: Any) -> list[Any]:
        return list(optimizer.shard.steppers.small.runs)

    virtual.run(on_rank, 1)


def test_between_steps_groups_list_the_parameters_and_each_has_its_own_state() -> None:
    def on_rank(comm: Collectives) -> None:
        params, optimizer = merged_with(comm)
        for step in range(2):
            fill_gradients(params, step, world_size=1)
            optimizer.step()
            assert optimizer.optim.param_groups[0]["params"] == params
            assert set(optimizer.state) == set(params)
            for param in params:
                assert optimizer.state[param]["exp_avg"].shape == param.shape
                assert optimizer.state[param]["exp_avg"].stride() == param.stride()
                assert optimizer.state[param]["step"] == step + 1

    virtual.run(on_rank, 1)


def test_a_state_changed_in_place_is_what_the_next_step_starts_from() -> None:
    def script(model: Any, optimizer: Any, backward: Backward) -> Iterator[None]:
        for step in range(4):
            backward(step)
            optimizer.step()
            for of_param in optimizer.state.values():
                of_param["exp_avg"].mul_(0.5)
            if step == 1:
                optimizer.state.clear()  # start anew
            yield

    assert_trains_as_plain(script, modes=FORMS[::2], make_model=Beads)


def test_a_parameter_without_a_gradient_is_left_out_and_counts_its_own_steps() -> None:
    def script(model: Any, optimizer: Any, backward: Backward) -> Iterator[None]:
        for step in range(5):
            backward(step)
            if step in (1, 3):
                model.beads[1].grad = None
            optimizer.step()
            yield

    assert_trains_as_plain(script, modes=FORMS, make_model=Beads)


def test_a_group_added_and_a_frozen_parameter_in_the_middle() -> None:
    def script(model: Any, optimizer: Any, backward: Backward) -> Iterator[None]:
        extra = nn.Parameter(torch.ones(128))
        for step in range(6):
            backward(step)
            if step == 1:
                model.beads[2].requires_grad_(False).grad = None
            if step == 2:
                optimizer.add_param_group({"params": [extra], "lr": 0.5})
            if step == 3:
                model.beads[2].requires_grad_(True)
            extra.grad = torch.full_like(extra, 0.5)
            optimizer.step()
            yield

    assert_trains_as_plain(script, modes=FORMS, make_model=Beads, check_moved=False)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_of_merged_state_is_that_of_the_plain_optimizer_and_goes_on(ranks: int) -> None:
    run = Run(make_model=Beads, lr=0.01)
    trained, state = run.plain(range(3))
    for ours, our_state in run.sharded(ranks, range(3), parameters_as_bucket_view=True):
        assert all(map(torch.equal, ours[-1], trained[-1]))
        assert_state_dicts_equal(our_state, state)
    further, _ = run.plain(range(3, 6), trained[-1], state)
    for ours, _ in run.sharded(ranks, range(3, 6), trained[-1], state, parameters_as_bucket_view=True):
        assert all(map(torch.equal, ours[-1], further[-1]))


@pytest.mark.parametrize("odd", ["another step", "no state"])
def test_a_checkpoint_in_which_parameters_were_not_stepped_together(odd: str) -> None:
    run = Run(make_model=Beads, lr=0.01)
    trained, state = run.plain(range(3))
    if odd == "another step":
        state["state"][1]["step"] += 5
    else:
        del state["state"][6]  # the first of its run
    further, _ = run.plain(range(3, 6), trained[-1], state)
    for ours, _ in run.sharded(1, range(3, 6), trained[-1], state, parameters_as_bucket_view=True):
        assert all(map(torch.equal, ours[-1], further[-1]))


@settings(max_examples=25)
@given(
    st.lists(st.sampled_from([(64,), (32, 2), (5,), (192,), ()]), min_size=1, max_size=9), st.integers(1, 3)
)
def test_any_run_of_shapes_trains_as_plain(shapes: list[tuple[int, ...]], world_size: int) -> None:
    def make_model() -> nn.Module:
        generator = torch.Generator().manual_seed(1)
        return nn.ParameterList(nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes)

    assert_trains_as_plain(steps, modes=FORMS, make_model=make_model, world_sizes=[world_size], fused=True)


# ------------------------------------------------------------------------------------------------ masters


def with_masters(comm: Collectives, optimizer_class: Any = optim.AdamW, **options: Any) -> tuple[Any, Any]:
    model = Beads().bfloat16()
    return model, ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class, comm, master_dtype=torch.float32, **options
    )


@pytest.mark.parametrize(
    ("flat", "optimizer_class", "options"),
    [
        (False, optim.AdamW, {"fused": True}),
        (True, optim.AdamW, {}),
        (True, optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    ],
)
def test_small_masters_are_merged_and_train_as_masters_by_themselves(
    flat: bool, optimizer_class: Any, options: dict[str, Any]
) -> None:
    def script(model: Any, optimizer: Any, backward: Backward) -> Iterator[None]:
        extra = nn.Parameter(torch.ones(128, dtype=torch.bfloat16))
        for step in range(9):
            backward(step)
            extra.grad = torch.full_like(extra, 0.5)
            if step == 1:
                optimizer.add_param_group({"params": [extra], "lr": 0.5})
            if step == 5:
                model.beads[1].requires_grad_(False)  # with a gradient that must not be used
            if step == 6:
                model.beads[1].requires_grad_(True)
            if step == 7:
                model.beads[2].grad = None
            optimizer.step(*[lambda: backward(50)] * (step == 3))
            if step < 6 and isinstance(optimizer, ZeroRedundancyOptimizer) and optimizer.world_size == 1:
                assert members(optimizer)
            yield

    plain_model = Beads().bfloat16()
    plain = OnMasters(plain_model.parameters(), optimizer_class, **options)
    expected = run_script(script, plain_model, plain, 1)

    def on_rank(comm: Collectives) -> Any:
        model, optimizer = with_masters(comm, optimizer_class, parameters_as_bucket_view=flat, **options)
        return run_script(script, model, optimizer, 1)

    for world_size in (1, 3):
        for ours in virtual.run(on_rank, world_size, timeout=20):
            assert_same(ours, expected, f"{world_size} ranks")


def test_masters_of_a_run_that_lacks_a_gradient_are_stepped_by_themselves_beside_another_run() -> None:
    def script(model: Any, optimizer: Any, backward: Backward) -> Iterator[None]:
        for step in range(3):
            backward(step)
            if step > 0:
                model.beads[7].grad = None
            optimizer.step()
            yield

    def groups(model: Any) -> list[dict[str, Any]]:
        return [{"params": model.beads[:5]}, {"params": model.beads[5:], "lr": 0.5}]

    plain_model = Beads().bfloat16()
    plain = OnMasters(groups(plain_model), optim.AdamW)

    def on_rank(comm: Collectives) -> Any:
        model = Beads().bfloat16()
        optimizer = ZeroRedundancyOptimizer(groups(model), optim.AdamW, comm, master_dtype=torch.float32)
        assert len(members(optimizer)) == 2
        ours = run_script(script, model, optimizer, 1)
        assert len(members(optimizer)) == 1
        return ours

    (ours,) = virtual.run(on_rank, 1, timeout=20)
    assert_same(ours, run_script(script, plain_model, plain, 1), "two runs of masters")


def test_small_masters_lie_end_to_end_and_keep_no_gradients_between_steps() -> None:
    def on_rank(comm: Collectives) -> None:
        model, optimizer = with_masters(comm)
        numbers = {own.local: own.piece.param for own in optimizer.shard.owned}
        # As in a bucket, but copies that cannot be merged lie elsewhere, so one run has all the others.
        assert [[numbers[one] for one in of_run] for of_run in members(optimizer)] == [
            [0, 1, 2, 4, 6, 7, 8, 9]
        ]
        fill_gradients(list(model.parameters()), 0, world_size=1)
        optimizer.step()
        assert all(own.local.grad is None for own in optimizer.shard.owned)
        assert all(run.gradient is None and not run.gradients for run in optimizer.shard.steppers.small.runs)
        assert optimizer.optim.param_groups[0]["params"] == [own.local for own in optimizer.shard.owned]

    virtual.run(on_rank, 1)
