"""ShardedDataParallel: gradients by its own hooks, in shards, equal to the average over all ranks."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from library.tied import RULES, SHARES, Tied, Values, averaged, data, gradients_of, values_of
from library.training import caught, filled, in_groups, owned_gradients, sum_in_rank_order
from torch import nn, optim
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from zero_ref import OSS, ShardedDataParallel, clip_grad_norm_, get_total_norm
from zero_ref.backward import sharded_data_parallel
from zero_ref.backward.arguments import FAIRSCALE, WrapperOptions
from zero_ref.comm.agreement import MAY_DIFFER
from zero_ref.comm.collectives import Collectives
from zero_ref.lab import meter, ranks, virtual
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.plan.partition import Slice
from zero_ref.plan.rules import equal_shares
from zero_ref.shard import stepper
from zero_ref.shard.buckets import flat_like

ADAMW: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
CAP = 300  # elements of a bucket: several buckets


Losses = Callable[[nn.Module, int, int], Sequence[torch.Tensor]]
"""(model, rank, step): the losses of one update, each with a backward."""


def one_loss(model: nn.Module, rank: int, step: int) -> Sequence[torch.Tensor]:
    return [model(data(rank, step))]


def wrapped(
    comm: Any = None, model: Any = None, *, partition: Any = "sorted_greedy", lr: float = 0.1, **options: Any
) -> tuple[Any, ZeroRedundancyOptimizer, ShardedDataParallel]:
    """A model, here `Tied` if none is given, its SGD, and the model in the wrapper, which has the options."""
    model = Tied() if model is None else model
    zero = ZeroRedundancyOptimizer(model.parameters(), optim.SGD, comm, partition=partition, lr=lr)
    return model, zero, ShardedDataParallel(model, zero, **options)


@functools.cache  # each number of ranks once, for all partitions
def expected(
    world_size: int,
    steps: int,
    optimizer_of: Callable[[nn.Module], optim.Optimizer],
    losses: Losses = one_loss,
    model_of: Callable[[], nn.Module] = Tied,
) -> list[Values]:
    """Parameters after each update of a plain loop that computes all ranks' gradients."""
    models = [model_of() for _ in range(world_size)]  # each rank has its own running statistics
    optimizer, after = optimizer_of(models[0]), []
    for step in range(steps):
        gradients = [
            gradients_of(model, lambda m, r=rank, s=step: losses(m, r, s))
            for rank, model in enumerate(models)
        ]
        for param, grad in zip(models[0].parameters(), averaged(gradients), strict=True):
            param.grad = grad
        optimizer.step()
        for model in models[1:]:
            for mine, theirs in zip(model.parameters(), models[0].parameters(), strict=True):
                mine.data.copy_(theirs)
        after.append(values_of(models[0]))
    return after


def run(
    world_size: int,
    steps: int,
    make: Callable[[nn.Module, Collectives], Any],
    losses: Losses = one_loss,
    model_of: Callable[[], nn.Module] = Tied,
    **options: Any,
) -> list[list[Values]]:
    def on_rank(comm: Collectives) -> list[Values]:
        model = model_of()
        optimizer = make(model, comm)
        sharded = ShardedDataParallel(
            model, optimizer, reduce_buffer_size=CAP, broadcast_buffers=False, **options
        )
        after = []
        for step in range(steps):
            optimizer.zero_grad()
            for loss in losses(sharded, comm.rank, step):
                loss.backward()
            optimizer.step()
            sharded.wait_for_parameters()
            after.append(values_of(model))
        return after

    return virtual.run(on_rank, world_size, timeout=180)


def assert_equal(ours: Sequence[list[Values]], plain: list[Values]) -> None:
    for of_rank in ours:
        for step, (mine, theirs) in enumerate(zip(of_rank, plain, strict=True)):
            for number, (one, other) in enumerate(zip(mine, theirs, strict=True)):
                assert torch.equal(one, other), (step, number, (one - other).abs().max())


def adamw(model: nn.Module) -> optim.Optimizer:
    return optim.AdamW(model.parameters(), **ADAMW)


def assert_trains_as_plain(
    world_size: int,
    steps: int,
    losses: Losses = one_loss,
    plain: Losses | None = None,
    *,
    flat: bool = True,
    partition: Any = "sorted_greedy",
    **options: Any,
) -> None:
    """AdamW comes to what it comes to in a plain loop, which may have losses of its own."""

    def make(model: nn.Module, comm: Collectives) -> Any:
        return ZeroRedundancyOptimizer(
            model.parameters(), optim.AdamW, comm, flat, partition=partition, **ADAMW
        )

    ours = run(world_size, steps, make, losses, **options)
    assert_equal(ours, expected(world_size, steps, adamw, plain or losses))


@pytest.mark.parametrize(("world_size", "flat"), [(1, False), (2, False), (3, True)])
@pytest.mark.parametrize("partition", RULES)
def test_training_equals_a_plain_loop(partition: Any, flat: bool, world_size: int) -> None:
    assert_trains_as_plain(world_size, 4, flat=flat, partition=partition)


SGD = {"lr": 0.1, "momentum": 0.9}


def skipping(model: nn.Module, rank: int, step: int) -> Sequence[torch.Tensor]:
    """In update 1 no rank uses a layer, in update 2 only rank 0, in update 3 all do."""
    return [model(data(rank, step), skip=step == 1 or (step == 2 and rank > 0))]


def twice(model: nn.Module, rank: int, step: int) -> Sequence[torch.Tensor]:
    return [model(data(rank, 10 * step + batch)) for batch in range(2)]


def inside(model: Any) -> Any:
    """The module that was wrapped; the plain loop has it as it is."""
    return model.module if isinstance(model, ShardedDataParallel) else model


def without_sync(model: Any) -> Any:
    return model.no_sync() if isinstance(model, ShardedDataParallel) else contextlib.nullcontext()


def under_no_sync(model: nn.Module, rank: int, step: int) -> Sequence[torch.Tensor]:
    """The first of two batches is added up on each rank; the second uses less, in odd updates."""
    with without_sync(model):
        model(data(rank, 10 * step)).backward()
    return [model(data(rank, 10 * step + 1), skip=step % 2 == 1)]


def reduced_by_hand(model: nn.Module, rank: int, step: int) -> Sequence[torch.Tensor]:
    """Both batches are added up on each rank, and what they have come to is then reduced."""
    with without_sync(model):
        for loss in twice(model, rank, step):
            loss.backward()
    if isinstance(model, ShardedDataParallel):
        model.reduce()
    return []


def asking_by_hand(model: nn.Module, rank: int, step: int) -> Sequence[torch.Tensor]:
    """torch.autograd.grad, here on one rank only, is no backward: nothing is sent, and nothing is added."""
    if rank == 0:
        params = [param for param in inside(model).parameters() if param.requires_grad]
        torch.autograd.grad(model(data(rank, step)), params, allow_unused=True)
    return [model(data(rank, step))]


def freezing(model: nn.Module, rank: int, step: int) -> Sequence[torch.Tensor]:
    """Layers are frozen for two updates, and trained again."""
    for param in [*inside(model).skipped.parameters(), inside(model).last.bias]:
        param.requires_grad_(step not in (1, 2))
    return [model(data(rank, step))]


def switching(model: nn.Module, rank: int, step: int) -> Sequence[torch.Tensor]:
    """A forward in eval before each update; update 2 has its backward in eval, as for fine-tuning."""
    inside(model).first.bias.requires_grad_(step != 1)
    model.eval()
    with torch.no_grad():
        model(data(rank, 50))
    model.train(step != 2)
    return [model(data(rank, step))]


LOOPS = [skipping, under_no_sync, reduced_by_hand, asking_by_hand, freezing, switching]


@pytest.mark.parametrize("partition", ["sorted_greedy", SHARES])
@pytest.mark.parametrize("losses", LOOPS, ids=lambda losses: losses.__name__)
def test_a_loop_of_another_kind_equals_a_plain_one(losses: Losses, partition: Any) -> None:
    assert_trains_as_plain(3, 4, losses, partition=partition)


@pytest.mark.parametrize("partition", ["sorted_greedy", "even", SHARES])
def test_several_backwards_add_up_in_the_shard(partition: Any) -> None:
    def on_rank(comm: Collectives) -> list[dict[Slice, torch.Tensor]]:
        _, zero, sharded = wrapped(comm, partition=partition, reduce_buffer_size=CAP, broadcast_buffers=False)
        gradients = []
        for batch in range(3):  # without zero_grad, and a step in between
            sharded(data(comm.rank, batch)).backward()
            gradients.append(owned_gradients(zero))
            if batch == 1:
                zero.param_groups[0]["lr"] = 0.0
                zero.step()
        return gradients

    models = [Tied() for _ in range(2)]
    single = [
        [gradients_of(m, lambda m, b=b, r=r: [m(data(r, b))]) for b in range(3)] for r, m in enumerate(models)
    ]
    means = [averaged([of_rank[batch] for of_rank in single]) for batch in range(3)]
    params = [*models[0].parameters()]
    of_ranks = virtual.run(on_rank, 2, timeout=180)
    for batch in range(3):
        covered = [piece for gradients in of_ranks for piece in gradients[batch]]
        assert sum(piece.numel for piece in covered) == sum(p.numel() for p in params) - 5  # not `never`
        for gradients in of_ranks:
            for piece, ours in gradients[batch].items():
                total = means[0][piece.param]
                for mean in means[1 : batch + 1]:
                    total = total + mean[piece.param]  # type: ignore[operator]
                assert torch.equal(ours, flat_like(total, params[piece.param])[piece.start : piece.stop])  # type: ignore[arg-type]


def test_no_sync_after_averaged_gradients_is_refused() -> None:
    def on_rank(comm: Collectives) -> None:
        model, zero, sharded = wrapped(comm)
        sharded(data(comm.rank, 0)).backward()
        with sharded.no_sync(), pytest.raises(RuntimeError, match=r"Call optimizer.zero_grad\(\) before it"):
            sharded(data(comm.rank, 1)).backward()
        model.zero_grad()  # not the optimizer's: the gradients are gone all the same
        with sharded.no_sync():
            sharded(data(comm.rank, 1)).backward()
        sharded(data(comm.rank, 2)).backward()
        zero.step()

    virtual.run(on_rank, 2, timeout=180)


def test_a_rank_that_owns_only_what_is_not_used() -> None:
    def last_is_alone(numels: Sequence[int], world_size: int) -> list[list[int]]:
        return [[0], list(range(1, len(numels)))]  # parameter 0 is `never`

    assert_trains_as_plain(2, 2, flat=False, partition=last_is_alone)


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        raise ArithmeticError("in the middle of backward")


def test_a_backward_that_raised_loses_nothing_silently() -> None:
    def on_rank(comm: Collectives) -> list[Values]:
        model = Tied()
        optimizer = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, comm, **ADAMW)
        sharded = ShardedDataParallel(model, optimizer, broadcast_buffers=False)
        inner = model.first.forward
        sharded(data(comm.rank, 7)).backward()
        model.first.forward = lambda x: Failing.apply(inner(x))  # type: ignore[method-assign]
        failing = sharded(data(comm.rank, 8))
        model.first.forward = inner  # type: ignore[method-assign]
        with pytest.raises(ArithmeticError):
            failing.backward()
        with pytest.raises(RuntimeError, match="gradients to which it was to add are lost"):
            sharded(data(comm.rank, 9)).backward()
        sharded.zero_grad()
        model.norm.reset_running_stats()
        sharded(data(comm.rank, 0)).backward()
        optimizer.step()
        return [values_of(model)]

    assert_equal(virtual.run(on_rank, 2, timeout=180), expected(2, 1, adamw))


def test_gradients_are_only_where_they_are_owned() -> None:
    def on_rank(comm: Collectives) -> None:
        model, zero, sharded = wrapped(comm, reduce_buffer_size=CAP)
        sharded(data(comm.rank, 0)).backward()
        own = {own.param for own in zero.shard.owned}
        for name, param in model.named_parameters():
            assert (param.grad is not None) == (param in own and name != "never"), name
        zero.zero_grad()
        assert all(param.grad is None for param in model.parameters())

    virtual.run(on_rank, 3, timeout=180)


@pytest.mark.parametrize(
    ("partition", "by_hand"), [("sorted_greedy", False), ("even", False), ("even", True), (SHARES, False)]
)
def test_clipping_sees_the_norm_of_all_gradients(partition: Any, by_hand: bool) -> None:
    def on_rank(comm: Collectives) -> Values:
        model, zero, sharded = wrapped(
            comm, partition=partition, reduce_buffer_size=CAP, broadcast_buffers=False, may_change=by_hand
        )
        sharded(data(comm.rank, 0)).backward()
        if by_hand:
            norm = get_total_norm(zero)
            nn.utils.clip_grads_with_norm_(model.parameters(), 0.01, norm)
        else:
            norm = clip_grad_norm_(zero, 0.01)
        zero.step()
        return [norm, *values_of(model)]

    models = [Tied() for _ in range(2)]
    mean = averaged([gradients_of(m, lambda m, r=r: one_loss(m, r, 0)) for r, m in enumerate(models)])
    for param, grad in zip(models[0].parameters(), mean, strict=True):
        param.grad = grad
    norm = nn.utils.clip_grad_norm_(models[0].parameters(), 0.01)
    optim.SGD(models[0].parameters(), lr=0.1).step()
    for ours in virtual.run(on_rank, 2, timeout=180):
        # Of a parameter that is cut the norm is added up from parts, in float64.
        close = torch.equal if partition == "sorted_greedy" else partial(torch.allclose, rtol=1e-6, atol=1e-7)
        assert all(map(close, ours, [norm, *values_of(models[0])]))


@pytest.mark.parametrize("clips", [True, False])
def test_torchs_factor_which_does_not_reach_slices_is_refused_on_all_ranks(clips: bool) -> None:
    """Rank 1 has slices alone: it sees the change in a gradient of zeros."""

    def on_rank(comm: Collectives) -> None:
        model, zero, sharded = wrapped(comm, Three(), partition=in_pieces)
        sharded().backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        else:
            nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, get_total_norm(zero))
        with pytest.raises(RuntimeError, match=r"was changed after backward.*pass may_change=True"):
            zero.step()

    virtual.run(on_rank, 2, timeout=60)


@pytest.mark.parametrize("partition", ["sorted_greedy", "even", SHARES])
def test_a_further_backward_adds_where_the_last_one_left_its_averages(partition: Any) -> None:
    def on_rank(comm: Collectives) -> None:
        _, zero, sharded = wrapped(comm, Three(), partition=partition)
        places = []
        for _ in range(2):
            sharded().backward()
            places.append([own.leaf.grad.data_ptr() for own in zero.shard.owned if own.leaf.grad is not None])
        assert places[0] == places[1] != []
        zero.zero_grad()
        assert all(own.leaf.grad is None for own in zero.shard.owned)

    virtual.run(on_rank, 2, timeout=60)


def test_slices_that_were_frozen_after_backward_keep_values_and_gradients() -> None:
    def on_rank(comm: Collectives) -> None:
        model, zero, sharded = wrapped(comm, Three(), partition=in_pieces)
        sharded().backward()
        model.params[1].requires_grad_(False)
        zero.step()
        assert [param.unique().tolist() for param in model.params[:2]] == [[torch.tensor(-0.1).item()], [0.0]]
        for own in zero.shard.owned:
            grad = own.leaf.grad
            assert grad is None if own.piece.param == 2 else grad.eq(own.piece.param + 1).all()

    virtual.run(on_rank, 2, timeout=60)


class Three(nn.Module):
    """Two parameters that every forward uses, and a smaller one that none does."""

    def __init__(self) -> None:
        super().__init__()
        self.params = nn.ParameterList(torch.zeros(rows, 64) for rows in (4, 4, 2))

    def forward(self) -> torch.Tensor:
        return self.params[0].sum() + 2 * self.params[1].sum()


def in_pieces(_: Sequence[int], world_size: int) -> list[list[Slice]]:
    """Each rank has a piece of each parameter, and rank 0 two of the larger ones, which are not adjacent."""
    assert world_size == 2
    first = [Slice(0, 0, 64), Slice(0, 128, 256), Slice(1, 0, 64), Slice(1, 128, 256), Slice(2, 0, 64)]
    return [first, [Slice(number, 64, 128) for number in range(3)]]


def gradient_of_pieces(comm: Collectives, backwards: int, to_zeros: bool = False) -> list[Any]:
    """The values of each parameter after one step of SGD, which subtracts gradient and decay."""
    model = Three()
    model.params[2].data.fill_(1.0)
    options = {"lr": 1.0, "weight_decay": 0.5}
    zero = ZeroRedundancyOptimizer(model.parameters(), optim.SGD, comm, partition=in_pieces, **options)
    sharded = ShardedDataParallel(model, zero)
    for _ in range(backwards):
        sharded().backward()
    if to_zeros:
        zero.zero_grad(set_to_none=False)
    zero.step()
    return [param.unique().tolist() for param in model.parameters()]


@pytest.mark.parametrize(("backwards", "values"), [(1, [[-1.0], [-2.0]]), (2, [[-2.0], [-4.0]])])
def test_gradients_of_several_pieces_of_a_parameter_are_added_to(
    backwards: int, values: list[list[float]]
) -> None:
    for found in virtual.run(gradient_of_pieces, 2, backwards):
        assert found[:2] == values


@pytest.mark.parametrize("to_zeros", [False, True])
def test_a_parameter_that_is_nowhere_used_is_not_decayed(to_zeros: bool) -> None:
    for values in virtual.run(gradient_of_pieces, 2, 1, to_zeros):
        assert values[2] == [1.0]


@pytest.mark.parametrize("scaled", [False, True])
def test_masters_of_shares_equal_masters_of_whole_parameters(scaled: bool) -> None:
    def on_rank(comm: Collectives, partition: Any) -> list[Values]:
        model, after = filled(Deep()).bfloat16(), []
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), optim.AdamW, comm, True, partition=partition,
            master_dtype=torch.float32, **ADAMW,
        )  # fmt: skip
        sharded = ShardedDataParallel(model, optimizer, reduce_buffer_size=CAP, scaled=scaled)
        for step in range(3):
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * step + comm.rank))
            optimizer.zero_grad()
            sharded(x.bfloat16()).backward()
            optimizer.step()
            after.append(values_of(model))
        return after

    whole, shares = (virtual.run(on_rank, 2, rule, timeout=180) for rule in ("sorted_greedy", SHARES))
    for one, other in zip(whole, shares, strict=True):
        for mine, theirs in zip(one, other, strict=True):
            assert all(map(torch.equal, mine, theirs))


@pytest.mark.parametrize("world_size", [1, 2])
def test_masters_beside_32_bit_parameters(world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stepper, "CAST_NBYTES", 256)  # a master each: the others must not be stepped again
    dtypes = [torch.bfloat16] * 3 + [torch.float32] * 3

    def on_rank(comm: Collectives, partition: Any) -> list[Values]:
        model = nn.ParameterList(nn.Parameter(torch.ones(64, dtype=dtype)) for dtype in dtypes)
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), optim.SGD, comm, True, partition=partition,
            master_dtype=torch.float32, lr=0.25,
        )  # fmt: skip
        sharded = ShardedDataParallel(model, optimizer)
        for _ in range(2):
            optimizer.zero_grad()
            sum(param.sum() for param in sharded.module).backward()  # type: ignore[union-attr]
            optimizer.step()
            assert all(own.leaf.grad is not None for own in optimizer.shard.owned), "until zero_grad"
        return values_of(model)

    def in_parts(numels: Sequence[int], world_size: int) -> list[list[Slice]]:
        """Each rank has a part of each parameter."""
        part = 64 // world_size
        return [
            [Slice(number, rank * part, (rank + 1) * part) for number in range(len(numels))]
            for rank in range(world_size)
        ]

    for partition in (SHARES, in_parts):
        for values in virtual.run(on_rank, world_size, partition, timeout=60):
            assert all(torch.equal(value, torch.full_like(value, 0.5)) for value in values)


def test_gradients_set_to_zero_or_none_by_hand_are_gone_from_slices_too() -> None:
    """The plain optimizer steps zeros, with its momentum, and leaves out what has no gradient."""
    sgd = {"lr": 0.1, "momentum": 0.9}

    def train(model: nn.Module, loss: Any, optimizer: Any, rank: int) -> list[Values]:
        after = []
        for step, clear in enumerate([None, optimizer.zero_grad, model.zero_grad]):
            optimizer.zero_grad()
            loss(data(rank, step)).backward()
            if clear is not None:
                clear(set_to_none=False) if clear == optimizer.zero_grad else clear()
            optimizer.step()
            after.append(values_of(model))
        return after

    def on_rank(comm: Collectives) -> list[Values]:
        model = Tied()
        optimizer = ZeroRedundancyOptimizer(model.parameters(), optim.SGD, comm, partition="even", **sgd)
        assert optimizer.built.cut
        sharded = ShardedDataParallel(model, optimizer, reduce_buffer_size=CAP, broadcast_buffers=False)
        return train(model, sharded, optimizer, 0)  # on all ranks the same data

    model = Tied()
    assert_equal(
        virtual.run(on_rank, 2, timeout=180), train(model, model, optim.SGD(model.parameters(), **sgd), 0)
    )


def test_a_share_is_stepped_as_one_tensor() -> None:
    """As many tensors as ranges, and the same result: each parameter begins where vectors do."""
    stepped: list[int] = []

    def count(optimizer: optim.Optimizer, *_: Any) -> None:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        stepped.append(sum(param.grad is not None for param in params))

    def on_rank(comm: Collectives, **options: Any) -> list[Values]:
        model, after = filled(Deep()), []
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), optim.AdamW, comm, fused=True, **options, **ADAMW
        )
        if options:
            optimizer.optim.register_step_pre_hook(count)
        sharded = ShardedDataParallel(model, optimizer)
        for step in range(3):
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * step + comm.rank))
            optimizer.zero_grad()
            sharded(x).backward()
            optimizer.step()
            after.append(values_of(model))
        return after

    by_one = virtual.run(on_rank, 3, timeout=180)
    rule = partial(equal_shares, range_numel=40_000)
    shares = virtual.run(on_rank, 3, partition=rule, parameters_as_bucket_view=True, timeout=180)
    assert stepped == [3] * 9  # 99,840 elements, in ranges of 40,000 or a layer more
    for one, other in zip(by_one, shares, strict=True):
        for mine, theirs in zip(one, other, strict=True):
            assert all(map(torch.equal, mine, theirs))


def test_two_optimizers_share_a_model() -> None:
    def halves(model: nn.Module) -> tuple[list[Any], list[Any]]:
        params = list(model.parameters())
        return params[::2], params[1::2]

    class Both:
        """Two optimizers in a training loop that knows one."""

        def __init__(self, optimizers: Any) -> None:
            self.optimizers = optimizers

        def step(self) -> None:
            for optimizer in self.optimizers:
                optimizer.step()

    def on_rank(comm: Collectives) -> list[Values]:
        model = Tied()
        first, second = halves(model)
        optimizers = [
            ZeroRedundancyOptimizer(first, optim.AdamW, comm, **ADAMW),
            ZeroRedundancyOptimizer(second, optim.SGD, comm, lr=0.1),
        ]
        sharded = ShardedDataParallel(model, optimizers, reduce_buffer_size=CAP, broadcast_buffers=False)
        after = []
        for step in range(3):
            sharded.zero_grad()
            sharded(data(comm.rank, step)).backward()
            Both(optimizers).step()
            after.append(values_of(model))
        return after

    def plain(model: nn.Module) -> Any:
        first, second = halves(model)
        return Both([optim.AdamW(first, **ADAMW), optim.SGD(second, lr=0.1)])

    assert_equal(virtual.run(on_rank, 3, timeout=180), expected(3, 3, plain))


def test_rank_0s_parameters_and_buffers_are_sent() -> None:
    def on_rank(comm: Collectives) -> Values:
        model = Tied()
        model.norm.running_mean.fill_(comm.rank)  # type: ignore[union-attr]
        with torch.no_grad():
            model.conv.weight += comm.rank
        _, _, sharded = wrapped(comm, model)
        started = [*values_of(model), model.norm.running_mean.clone()]  # type: ignore[union-attr]
        model.norm.running_mean.fill_(comm.rank)  # type: ignore[union-attr]
        sharded(torch.ones(4, 8))
        return [*started, model.norm.running_mean.clone()]  # type: ignore[union-attr]

    first, second = virtual.run(on_rank, 2, timeout=180)
    assert all(map(torch.equal, first, second))
    assert first[-2].abs().max() == 0


def test_checkpointed_activations() -> None:
    def on_rank(comm: Collectives, reentrant: bool) -> list[Values]:
        model = Tied()
        inner = model.skipped.forward
        model.skipped.forward = lambda y: checkpoint(inner, y, use_reentrant=reentrant)  # type: ignore[method-assign]
        optimizer = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, comm, **ADAMW)
        sharded = ShardedDataParallel(model, optimizer, reduce_buffer_size=CAP, broadcast_buffers=False)
        after = []
        for step in range(2):
            sharded.zero_grad()
            sharded(data(comm.rank, step)).backward()
            optimizer.step()
            after.append(values_of(model))
        return after

    assert_equal(virtual.run(on_rank, 2, False, timeout=180), expected(2, 2, adamw))
    with pytest.raises(RuntimeError, match="pass use_reentrant=False"):
        virtual.run(on_rank, 2, True, timeout=180)


def test_gradients_sent_in_16_bits_are_rounded() -> None:
    def make(model: nn.Module, comm: Collectives) -> Any:
        return ZeroRedundancyOptimizer(model.parameters(), optim.SGD, comm, lr=0.1)

    exact = expected(2, 1, lambda model: optim.SGD(model.parameters(), lr=0.1))
    for ours in run(2, 1, make, reduce_fp16=True):
        for one, other in zip(ours[0], exact[0], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0.1 * 2**-10)  # gradients below 1, 11 bits
        assert not all(map(torch.equal, ours[0], exact[0]))


def test_mistakes_are_named() -> None:
    def on_rank(comm: Collectives) -> None:
        model = Tied()
        whole = OSS(model.parameters(), optim.SGD, comm, lr=0.1)
        first = ShardedDataParallel(model, whole)
        with pytest.raises(ValueError, match="parameter never is in another ShardedDataParallel"):
            ShardedDataParallel(model, whole)
        del first
        second = ShardedDataParallel(model, whole)
        assert second.norm is model.norm  # as FairScale's: what it does not have is the module's
        assert not hasattr(second, "nothing")
        complex_ = nn.ParameterList([nn.Parameter(torch.ones(3, dtype=torch.complex64))])
        for_complex = ZeroRedundancyOptimizer(complex_.parameters(), optim.SGD, comm, lr=0.1)
        with pytest.raises(ValueError, match="would drop a part"):
            ShardedDataParallel(complex_, for_complex, reduce_fp16=True, sync_models_at_startup=False)
        embedding = nn.Embedding(10, 4, sparse=True, _weight=torch.ones(10, 4))
        sparse = ShardedDataParallel(
            embedding, ZeroRedundancyOptimizer(embedding.parameters(), optim.SGD, comm, lr=0.1),
            sync_models_at_startup=False,
        )  # fmt: skip
        with pytest.raises(ValueError, match="sparse gradient"):
            sparse(torch.tensor([1, 2])).sum().backward()

    virtual.run(on_rank, 2, timeout=180)


def test_a_program_written_for_fairscale() -> None:
    def make(model: nn.Module, comm: Collectives) -> Any:
        return OSS(params=model.parameters(), optim=optim.AdamW, group=comm, **ADAMW)

    def on_rank(comm: Collectives) -> list[Values]:
        model = Tied()
        optimizer = make(model, comm)
        ddp = ShardedDataParallel(
            model,
            optimizer,
            comm,
            broadcast_buffers=False,
            sync_models_at_startup=True,
            reduce_buffer_size=2**23,
            auto_refresh_trainable=True,
            reduce_fp16=False,
            warn_on_trainable_params_changed=False,
        )
        after = []
        for step in range(3):
            ddp.train()
            ddp.zero_grad(set_to_none=True)
            ddp(data(comm.rank, step)).backward()
            optimizer.step()
            after.append(values_of(model))
        return after

    assert_equal(virtual.run(on_rank, 2, timeout=180), expected(2, 3, adamw))


@pytest.mark.parametrize(("partition", "flat"), [("sorted_greedy", True), ("even", False), (SHARES, True)])
def test_parameters_arrive_in_the_next_forward(partition: Any, flat: bool) -> None:
    assert_trains_as_plain(3, 4, flat=flat, partition=partition, gather_in_forward=True)


# ------------------------------------------------------------------------------------------------ real ranks


class Deep(nn.Module):
    """Layers of which each is a few buckets, and whose gradients come one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(64, 64) for _ in range(24)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).tanh().square().mean()


def alive() -> dict[int, torch.UntypedStorage]:
    """By address, all memory that a tensor has."""
    tensors = [one for one in gc.get_objects() if isinstance(one, torch.Tensor)]
    tensors += [one.grad for one in tensors if one.is_leaf and one.grad is not None]
    return {part.data_ptr(): part for part in (one.untyped_storage() for one in tensors)}


def beside_ddp(partition: Any) -> int:
    """Train by ShardedDataParallel and by DDP; return the most bytes of gradients that were alive at once."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    ours, theirs = filled(Deep()), filled(Deep())
    zero = ZeroRedundancyOptimizer(ours.parameters(), optim.AdamW, partition=partition, **ADAMW)
    sharded = ShardedDataParallel(ours, zero, reduce_buffer_size=5000)
    ddp = nn.parallel.DistributedDataParallel(theirs)
    ddp.register_comm_hook(dist.group.WORLD, sum_in_rank_order)
    plain = optim.AdamW(theirs.parameters(), **ADAMW)
    most, before = 0, dict[int, torch.UntypedStorage]()

    def count(_: torch.Tensor) -> None:
        nonlocal most
        if before:
            most = max(most, sum(one.nbytes() for place, one in alive().items() if place not in before))

    for param in ours.parameters():
        param.register_post_accumulate_grad_hook(count)
    for step in range(3):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * step + rank))
        zero.zero_grad()
        plain.zero_grad()
        for batch in range(2):
            loss = sharded(x * (batch + 1))
            before.update(alive() if batch == 0 else {})  # which keeps it, so that none is used again
            loss.backward()
            before.clear()
            with ddp.no_sync() if batch == 0 else contextlib.nullcontext():
                ddp(x * (batch + 1)).backward()
        zero.step()
        plain.step()
        for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            # Two sums of two batches: of averages here, averaged there.
            torch.testing.assert_close(
                mine, other, rtol=1e-5, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}"
            )
    own = sum(piece.numel for piece in zero.partition.slices_of_rank[rank])
    assert most <= 4 * (own + (world_size + 1) * (5000 + 64 * 64 + 100)), (most, own, world_size)
    return most


@pytest.mark.ranks
def test_processes_equal_ddp_and_hold_a_share_of_gradients() -> None:
    """A share, two buckets, and what is received of one. DDP holds all, in its buckets and in `.grad`."""
    for partition in ("even", partial(equal_shares, range_numel=5000)):
        most = max(ranks.run(beside_ddp, 2, partition, timeout=120))
        assert most < 4 * 24 * (64 * 64 + 64)


def masters_follow() -> list[float]:
    """Rank 0's parameters, changed after the optimizer was constructed, reach the masters of all owners."""
    model = nn.ParameterList([nn.Parameter(torch.ones(4, dtype=torch.bfloat16)) for _ in range(4)])
    zero = ZeroRedundancyOptimizer(model.parameters(), optim.SGD, master_dtype=torch.float32, lr=0.1)
    if dist.get_rank() == 0:
        for param in model:
            param.data.fill_(5)
    sharded = ShardedDataParallel(model, zero)
    sum(param.sum() * 0 for param in sharded.module).backward()  # type: ignore[union-attr]
    zero.step()
    return [param[0].item() for param in model]


@pytest.mark.ranks
def test_start_values_reach_the_masters() -> None:
    assert ranks.run(masters_follow, 2, timeout=180) == [[5.0] * 4] * 2


# ----------------------------------------------------------------------------------------- groups of ranks


SMOOTH = ADAMW | {"eps": 1e-3}
"""A bias before a norm has a gradient of rounding errors, which Adam would divide by its own size."""


def trained_in_groups(partition: Any, shard: int) -> tuple[Values, int]:
    """Parameters after three updates, and the elements that this rank's state has."""
    replicas = dist.get_world_size() // shard
    mesh = init_device_mesh("cpu", (replicas, shard), mesh_dim_names=("replicas", "shard"))
    model = Tied()
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optim.AdamW, mesh["shard"], True, partition=partition, **SMOOTH
    )
    sharded = ShardedDataParallel(
        model,
        optimizer,
        reduce_buffer_size=CAP,
        broadcast_buffers=False,
        replicas=mesh["replicas"],
    )
    for step in range(3):
        optimizer.zero_grad()
        for loss in skipping(sharded, dist.get_rank(), step):
            loss.backward()
        clip_grad_norm_(optimizer, 0.5)
        optimizer.step()
    moments = sum(state["exp_avg"].numel() for state in optimizer.optim.state.values())
    return values_of(model), moments


@pytest.mark.ranks
@pytest.mark.parametrize("shard", [1, 2])
def test_groups_share_the_state_and_average_their_shares(shard: int) -> None:
    def plain() -> Values:
        model = Tied()
        ddp = DistributedDataParallel(model, find_unused_parameters=True)
        optimizer = optim.AdamW(model.parameters(), **SMOOTH)
        for step in range(3):
            optimizer.zero_grad()
            for loss in skipping(ddp, dist.get_rank(), step):
                loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        return values_of(model)

    numel = sum(param.numel() for param in Tied().parameters()) - 5  # `never` has no gradient, and no state
    reference = ranks.run(plain, 4, timeout=180)[0]
    for partition in ("even", SHARES):
        of_ranks = ranks.run(trained_in_groups, 4, partition, shard, timeout=180)
        for values, moments in of_ranks:
            assert all(map(torch.equal, values, of_ranks[0][0]))
            assert moments < numel / shard + 300
        assert sum(moments for _, moments in of_ranks) == numel * 4 // shard
        for ours, theirs in zip(of_ranks[0][0], reference, strict=True):
            # The sums of four are in another order.
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def bytes_of_an_iteration(partition: Any, no_sync: bool, in_forward: bool) -> tuple[int | None, int]:
    """Bytes that this rank sends in four backwards and a step, or in one, and those of the parameters."""
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(6)))
    zero = ZeroRedundancyOptimizer(model.parameters(), optim.SGD, None, True, partition=partition, lr=0.1)
    sharded = ShardedDataParallel(model, zero, reduce_buffer_size=2**19, gather_in_forward=in_forward)

    def iterate() -> None:
        zero.zero_grad()
        if no_sync:
            with sharded.no_sync():
                for _ in range(3):
                    sharded(torch.ones(2, 512)).sum().backward()
        sharded(torch.ones(2, 512)).sum().backward()
        zero.step()
        sharded.wait_for_parameters()

    for _ in range(4):  # steps 1, 2 and 4 compare options
        iterate()
    return meter.bytes_sent_by(iterate), sum(param.nbytes for param in model.parameters())


@pytest.mark.ranks
def test_an_iteration_sends_each_gradient_and_each_parameter_once() -> None:
    world_size = 3
    shares = partial(equal_shares, range_numel=2**19)
    for partition, no_sync, in_forward in (
        ("sorted_greedy", False, False),
        ("even", True, False),
        (shares, False, True),
    ):
        of_ranks = ranks.run(bytes_of_an_iteration, world_size, partition, no_sync, in_forward, timeout=180)
        sent = [nbytes for nbytes, _ in of_ranks if nbytes is not None]
        if len(sent) < world_size:
            pytest.skip("the kernel does not count them")
        # Above it: headers of messages, the count of used parameters, and a range's padding.
        assert 2 <= sum(sent) / ((world_size - 1) * of_ranks[0][1]) <= 2.01, (partition, no_sync, in_forward)


# ------------------------------------------------------------------------------------- what ranks compare


DISAGREE = "ValueError: ranks disagree, so none can construct ShardedDataParallel: rank 1 has "
F16, B16 = torch.float16, torch.bfloat16


@pytest.mark.parametrize(
    ("option", "usual", "other"),
    [
        ("reduce_dtype", F16, B16),
        ("reduce_fp16", False, True),
        ("reduce_buffer_size", 64, 10**6),
        ("broadcast_buffers", True, False),
        ("sync_models_at_startup", True, False),
        ("scaled", False, True),
        ("may_change", True, False),
        ("gather_in_forward", False, True),
    ],
)
def test_an_option_that_differs_on_one_rank_is_named_on_all(option: str, usual: Any, other: Any) -> None:
    def on_rank(comm: Collectives) -> str:
        model = Tied()
        zero = ZeroRedundancyOptimizer(model.parameters(), optim.SGD, comm, lr=0.1)
        before = values_of(model)
        with torch.no_grad():
            model.tied += comm.rank
        differing = other if comm.rank == 1 else usual
        message = caught(lambda: ShardedDataParallel(model, zero, **{option: differing}))
        assert torch.equal(model.tied, before[1] + comm.rank), "nothing may be sent before all agree"
        # Nothing has been hooked either: the next wrapper trains.
        sharded = ShardedDataParallel(model, zero, broadcast_buffers=False)
        sharded(data(comm.rank, 0)).backward()
        zero.step()
        return message

    for message in virtual.run(on_rank, 3):
        assert message.startswith(f"{DISAGREE}[{option}={other}] where rank 0 has [{option}={usual}]")


def test_an_option_added_to_the_dataclass_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class OneMore(WrapperOptions):
        added: int = 0

    here = threading.local()  # each virtual rank is a thread
    monkeypatch.setattr(
        sharded_data_parallel, "WrapperOptions", lambda **given: OneMore(**given, added=here.rank)
    )

    def on_rank(comm: Collectives) -> str:
        here.rank = comm.rank
        model = Tied()
        zero = ZeroRedundancyOptimizer(model.parameters(), optim.SGD, comm, lr=0.1)
        return caught(lambda: ShardedDataParallel(model, zero))

    for message in virtual.run(on_rank, 2):
        assert message.startswith(f"{DISAGREE}[added=1] where rank 0 has [added=0]")


def test_every_argument_but_module_and_optimizers_is_an_option() -> None:
    arguments = inspect.signature(ShardedDataParallel).parameters.keys()
    options = {field.name: field.metadata for field in fields(WrapperOptions)}
    others = {"module", "sharded_optimizer", "process_group", "fairscale"}
    assert options.keys() == (arguments - others) | {*FAIRSCALE}
    without_effect = {"auto_refresh_trainable", "warn_on_trainable_params_changed"}
    assert {name for name, metadata in options.items() if MAY_DIFFER in metadata} == without_effect


def another_buffer(model: nn.Module, zero: Any) -> Any:
    model.norm.register_buffer("more", torch.ones(2))
    return model, zero


def a_frozen_parameter(model: nn.Module, zero: Any) -> Any:
    model.first.bias.requires_grad_(False)  # type: ignore[union-attr]
    return model, zero


def another_name(model: nn.Module, zero: Any) -> Any:
    model.other, model.last = model.last, None  # type: ignore[assignment]
    return model, zero


def another_order(model: nn.Module, zero: Any) -> Any:
    return model, zero[::-1]


def another_rate(model: nn.Module, zero: Any) -> Any:
    zero[1].param_groups[0]["lr"] = 0.5
    return model, zero


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (another_buffer, "[buffer norm.more: shape (2,), torch.float32]"),
        (
            a_frozen_parameter,
            "[parameter first.bias of the module: shape (16,), torch.float32, requires_grad=F",
        ),
        (another_name, "[parameter other.weight of the module: shape (8, 16)"),
        (another_order, "[optimizers: optimizer 1 (SGD), optimizer 0 (AdamW)] where rank 0 has [optimizers"),
        (another_rate, "[group 0: lr=0.5] where rank 0 has [group 0: lr=0.1]"),
    ],
)
def test_a_module_or_an_optimizer_that_differs_on_one_rank_is_named_on_all(change: Any, text: str) -> None:
    def on_rank(comm: Collectives) -> str:
        model = Tied()
        params = list(model.parameters())
        zeros = [
            ZeroRedundancyOptimizer(params[::2], optim.AdamW, comm, **ADAMW),
            ZeroRedundancyOptimizer(params[1::2], optim.SGD, comm, lr=0.1),
        ]
        if comm.rank == 1:
            model, zeros = change(model, zeros)
        return caught(lambda: ShardedDataParallel(model, zeros))

    for message in virtual.run(on_rank, 3):
        assert message.startswith(DISAGREE + text)


def with_wider_gradients(model: nn.Module, zero: Any) -> None:
    """Wrap the model while a parameter is to have gradients of another dtype than its own."""
    first = next(model.parameters())
    first.grad_dtype = torch.float64
    try:
        ShardedDataParallel(model, zero)
    finally:
        first.grad_dtype = first.dtype


def mistakes(model: nn.Module, zero: Any, group: Any) -> dict[str, Callable[[], Any]]:
    """By a part of its text, what makes the constructor raise."""
    params = list(model.parameters())
    late = ZeroRedundancyOptimizer(params, optim.SGD, group, overlap_with_ddp=True, lr=0.1)
    part = ZeroRedundancyOptimizer(params[1:], optim.SGD, group, lr=0.1)
    return {
        "or a list of them, not SGD": lambda: ShardedDataParallel(model, [zero, optim.SGD(params, lr=0.1)]),  # type: ignore[list-item]
        "has it, so it has no owner": lambda: ShardedDataParallel(model, part),
        "is in two of the optimizers": lambda: ShardedDataParallel(model, [zero, part]),
        "of the optimizer is not in the module": lambda: ShardedDataParallel(model.last, zero),  # type: ignore[arg-type]
        "overlap_with_ddp=True": lambda: ShardedDataParallel(model, late),
        "process_group is another group": lambda: ShardedDataParallel(model, zero, object()),  # type: ignore[arg-type]
        "takes a floating-point dtype": lambda: ShardedDataParallel(model, zero, reduce_dtype=torch.int32),
        "process_group takes": lambda: ShardedDataParallel(model, zero, replicas=0.5),  # type: ignore[arg-type]
        "unexpected option 'reduce_bf16'": lambda: ShardedDataParallel(model, zero, reduce_bf16=True),
        "has grad_dtype=torch.float64": lambda: with_wider_gradients(model, zero),
    }


def test_a_mistake_of_one_rank_is_told_to_all() -> None:
    def on_rank(comm: Collectives) -> list[tuple[str, str]]:
        model = Tied()
        zero = ZeroRedundancyOptimizer(model.parameters(), optim.SGD, comm, lr=0.1)
        return [
            (text, caught(mistake if comm.rank == 1 else lambda: ShardedDataParallel(model, zero)))
            for text, mistake in mistakes(model, zero, comm).items()
        ]

    of_ranks = virtual.run(on_rank, 3)
    for rank, messages in enumerate(of_ranks):
        for text, message in messages:
            assert text in message
            told = f"RuntimeError: rank {rank}: rank 1 could not construct ShardedDataParallel: "
            assert message.startswith(told) == (rank != 1), message


@pytest.mark.ranks
def test_one_rank_with_a_plain_optimizer_or_none_is_told_to_all() -> None:
    """Such a rank has no optimizer's group: it tells the one that was passed in, or the default group."""

    def on_rank() -> list[str]:
        model = filled(nn.Linear(4, 4))
        zero = ZeroRedundancyOptimizer(model.parameters(), optim.SGD, lr=0.1)
        plain: Any = optim.SGD(model.parameters(), lr=0.1)
        group = dist.group.WORLD
        return [
            caught(partial(ShardedDataParallel, model, zero if dist.get_rank() else wrong, *args))
            for wrong, args in (([], ()), (plain, ()), (plain, (group,)), (None, ()))
        ]

    first, *others = ranks.run(on_rank, 3, timeout=60)
    for message, text in zip(first, ("empty list", "not SGD", "not SGD", "not NoneType"), strict=True):
        assert text in message
    for messages in others:
        for message, cause in zip(messages, first, strict=True):
            assert message.endswith(f"rank 0 could not construct ShardedDataParallel: {cause}")


# In the tests below there are two groups of two ranks.


def hybrid(
    comm: Collectives, replicas: Any, partition: Any = "equal_shares", **options: Any
) -> tuple[nn.Module, ZeroRedundancyOptimizer, ShardedDataParallel]:
    return wrapped(comm, replicas=replicas, partition=partition, **options)


@pytest.mark.parametrize(
    ("usual", "other", "text"),
    [
        ({}, {"reduce_dtype": B16}, "[reduce_dtype=torch.bfloat16]"),
        ({}, {"may_change": True}, "[may_change=True]"),
        ({}, {"lr": 0.5}, "[group 0: lr=0.5] where rank 0 has [group 0: lr=0.1]"),
        ({}, {"partition": "sorted_greedy"}, "[partition "),
        ({"partition": [range(6), range(6, 11)]}, {"partition": [range(6, 11), range(6)]}, "[partition "),
        ({}, {"partition": "even"}, "[partition "),
    ],
)
def test_what_differs_between_groups_is_named_on_all_ranks(usual: Any, other: Any, text: str) -> None:
    def on_rank(comm: Collectives, replicas: Collectives, group: int) -> str:
        return caught(lambda: hybrid(comm, replicas, **(other if group else usual)))

    for message in in_groups(on_rank, 2, 2):
        assert (
            "so none can construct ShardedDataParallel to train replicas of a model: rank 1 has " in message
        )
        assert text in message


def test_partitions_of_equal_slices_differ_by_their_ranges() -> None:
    """A range is reduced as one bucket, and its shares are sent as one tensor."""

    def on_rank(comm: Collectives) -> str:
        model = filled(nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))))
        rules = ("equal_shares", "even")
        owned = [
            ZeroRedundancyOptimizer(model.parameters(), optim.SGD, comm, lr=0.1, partition=rule).partition
            for rule in rules
        ]
        assert owned[0].slices_of_rank == owned[1].slices_of_rank
        rule = rules[comm.rank]
        return caught(
            lambda: ZeroRedundancyOptimizer(model.parameters(), optim.SGD, comm, partition=rule, lr=1.0)
        )

    for message in virtual.run(on_rank, 2):
        assert "so none can construct the optimizer: rank 1 has [partition " in message


def test_what_one_rank_of_four_does_otherwise_is_told_to_all() -> None:
    def on_rank(comm: Collectives, replicas: Collectives, group: int) -> list[str]:
        is_odd = group == 1 and comm.rank == 0
        option = {"reduce_buffer_size": CAP if is_odd else 2 * CAP}
        wrong = {"reduce_dtype": torch.int32} if is_odd else {}
        return [caught(lambda o=o: hybrid(comm, replicas, **o)) for o in (option, wrong)]

    for differs, fails in in_groups(on_rank, 2, 2):
        assert "[reduce_buffer_size=300] where rank 0 has [reduce_buffer_size=600]" in differs
        assert "takes a floating-point dtype" in fails


def test_replicas_own_the_same_slices_in_other_groups() -> None:
    """The own group, or one that goes across: its ranks have other places."""

    def own(comm: Collectives, replicas: Collectives, group: int) -> str:
        return caught(lambda: hybrid(comm, comm))

    def across(comm: Collectives, replicas: Collectives, group: int) -> str:
        swapped = virtual.VirtualCollectives(comm.world, comm.rank ^ group)  # type: ignore[attr-defined]
        return caught(lambda: hybrid(swapped, replicas))

    for way in (own, across):
        for message in in_groups(way, 2, 2):
            assert message.count(" has [the slices of rank ") == 2
            assert "`replicas` are the ranks that own the same slices" in message


@pytest.mark.ranks
@pytest.mark.parametrize("shard", [1, 2])
def test_replicas_share_only_this_rank_with_the_group(shard: int) -> None:
    def on_rank() -> list[str]:
        me = dist.get_rank()
        groups = [dist.new_group(list(range(n, n + shard))) for n in range(0, 4, shard)]
        own = groups[me // shard]
        return [
            caught(lambda g=g: hybrid(own, g)) for g in ((own,) if shard == 1 else (own, dist.group.WORLD))
        ]  # type: ignore[arg-type]

    for rank, messages in enumerate(ranks.run(on_rank, 4, timeout=60)):
        start = rank // shard * shard
        for message, theirs in zip(messages, (list(range(start, start + shard)), [0, 1, 2, 3]), strict=False):
            assert message.startswith(
                f"ValueError: replicas is the group of ranks {theirs}, and the optimizer"
            )


@pytest.mark.parametrize(("update", "of_whole_group"), [(0, False), (2, True)])
def test_a_rate_that_later_differs_between_groups_is_named_before_the_update(
    update: int, of_whole_group: bool
) -> None:
    def on_rank(comm: Collectives, replicas: Collectives, group: int) -> tuple[str, bool]:
        model, zero, sharded = hybrid(comm, replicas)
        for step in range(update + 1):
            zero.zero_grad()
            sharded(data(comm.rank, step)).backward()
            before = values_of(model)
            if step == update and group == 1 and (of_whole_group or comm.rank == 1):
                zero.param_groups[0]["lr"] = 0.5
            message = caught(zero.step)
            if step < update:
                assert message == "nothing"
        unchanged = all(map(torch.equal, before, values_of(model)))
        zero.param_groups[0]["lr"] = 0.1
        zero.step()  # after the mistake is mended it goes on
        return message, unchanged

    for message, unchanged in in_groups(on_rank, 2, 2):
        assert f"can make update {update + 1} of optimizer 0 (SGD) to train replicas of a model: " in message
        assert "[group 0: lr=0.5] where rank 0 has [group 0: lr=0.1]" in message
        assert unchanged


def test_what_only_one_group_changes_is_named_before_gradients_are_averaged() -> None:
    def on_rank(comm: Collectives, replicas: Collectives, group: int) -> str:
        model, zero, sharded = hybrid(comm, replicas)
        for step in range(3):
            zero.zero_grad()
            if step == 2 and group == 1:
                model.first.bias.requires_grad_(False)  # type: ignore[union-attr]
            message = caught(sharded(data(comm.rank, step)).backward)
            if step < 2:
                zero.step()
        return message

    for message in in_groups(on_rank, 2, 2):
        assert "none can run a backward for update 3 of optimizer 0 (SGD) to train replicas" in message
        assert "requires_grad=False" in message


def test_an_update_that_one_group_has_lost_is_told_to_the_other_groups() -> None:
    failing = weakref.WeakSet[optim.Optimizer]()  # attributes would be compared between ranks

    class Failing(optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if self in failing:
                raise ArithmeticError("on one owner")
            return super().step(closure)

    def on_rank(comm: Collectives, replicas: Collectives, group: int) -> list[str]:
        model = Tied()
        zero = ZeroRedundancyOptimizer(model.parameters(), Failing, comm, lr=0.1)
        sharded = ShardedDataParallel(model, zero, replicas=replicas)
        messages = []
        for step in range(3):
            zero.zero_grad()
            if step == 1 and group == 1 and comm.rank == 1:
                failing.add(zero.optim)
            sharded(data(comm.rank, step)).backward()
            messages.append(caught(zero.step))
        return messages

    for number, (first, second, third) in enumerate(in_groups(on_rank, 2, 2)):
        assert first == "nothing"
        assert (second == "nothing") == (number < 2)
        assert "ArithmeticError: on one owner" in third


@pytest.mark.parametrize(
    ("rank", "update", "with_buffers"), [(0, 1, True), (1, 2, False), (1, 4, True), (0, 4, False)]
)
def test_a_rank_that_leaves_out_a_step_meets_the_others_in_it(
    rank: int, update: int, with_buffers: bool
) -> None:
    """In updates 1, 2, 4, 8, ..., by its next backward, or the forward before it, if that sends buffers."""

    def on_rank(comm: Collectives) -> str:
        model = Tied() if with_buffers else filled(nn.Sequential(nn.Linear(8, 8)))
        _, zero, sharded = wrapped(comm, model)

        def train() -> None:
            for step in range(1, 6):
                zero.zero_grad()
                sharded(data(comm.rank, step)).sum().backward()
                if (step, comm.rank) != (update, rank):
                    zero.step()

        return caught(train)

    words = {True: f"run a {'forward' if with_buffers else 'backward'} for", False: "make"}
    for mine, message in enumerate(virtual.run(on_rank, 3)):
        doing = [
            f"{words[mine == rank]} update {update} of optimizer 0",
            f"{words[mine != rank]} update {update} of",
        ]
        assert message.startswith(f"RuntimeError: rank {mine} is to {doing[0]}")
        assert doing[1] in message


@pytest.mark.ranks
def test_a_gradient_is_never_taken_for_a_parameter() -> None:
    """Between the same two ranks, whichever is sent first: not even by a rank that has left out a step."""

    def on_rank() -> list[float]:
        _, zero, sharded = wrapped(None, nn.Linear(2, 2))
        (reduction,) = sharded._reductions
        calls = [reduction.comm, zero.collectives]
        assert calls[0].observers is calls[1].observers
        received = [torch.zeros(1) for _ in calls]
        if dist.get_rank() == 0:
            works = [comm.send(torch.full((1,), float(number)), 1) for number, comm in enumerate(calls)]
        else:
            works = [comm.recv(received[number], 0) for number, comm in reversed([*enumerate(calls)])]
        for work in works:
            work.wait()
        return [one.item() for one in received]

    assert ranks.run(on_rank, 2, timeout=120)[1] == [0.0, 1.0]


def test_in_hybrid_sharding_it_is_found_in_each_update() -> None:
    def on_rank(comm: Collectives, replicas: Collectives, group: int) -> str:
        _, zero, sharded = hybrid(comm, replicas)

        def train() -> None:
            for step in range(6):
                zero.zero_grad()
                sharded(data(comm.rank, step)).backward()
                if not (step == 4 and group == comm.rank == 1):
                    zero.step()

        return caught(train)

    for message in in_groups(on_rank, 2, 2):
        assert "make update 5 of optimizer 0 (SGD)" in message
        assert "run a forward for update 5 of optimizer 0 (SGD)" in message


# -------------------------------------------------------------------------------------------- casts and modes


def cast_to_64_bits_and_back(model: nn.Module) -> None:
    model.double().float()


def cast_a_layer(model: nn.Module) -> None:
    model.skipped.double()  # type: ignore[operator, union-attr]


class Casting(Tied):
    """`Tied`, with inputs in the dtype of the layer that they go to."""

    def __init__(self) -> None:
        super().__init__()
        for layer in (self.first, self.norm, self.conv, self.skipped, self.last):
            layer.register_forward_pre_hook(lambda layer, x: x[0].to(next(layer.parameters()).dtype))

    def forward(self, x: torch.Tensor, skip: bool = False) -> torch.Tensor:
        y = self.norm(self.first(x))
        y = torch.tanh(self.skipped(y)).to(y.dtype)
        y = y + self.conv(y.view(-1, 1, 4, 4)).mean()
        return self.last(y).square().mean()  # type: ignore[no-any-return]


CASTS = [cast_to_64_bits_and_back, nn.Module.double, nn.Module.bfloat16, cast_a_layer]


@pytest.mark.parametrize(
    ("partition", "cast"),
    [*(("even", cast) for cast in CASTS), ("sorted_greedy", cast_a_layer), (SHARES, nn.Module.bfloat16)],
)
def test_a_cast_between_two_updates(partition: Any, cast: Callable[[nn.Module], Any]) -> None:
    sgd = {"lr": 0.1, "momentum": 0.9}

    def train(model: nn.Module, loss: nn.Module, optimizer: Any) -> list[Values]:
        after = []
        for step in range(4):
            if step in (0, 2):
                cast(model)
            optimizer.zero_grad()
            for batch in range(2):
                loss(data(0, 10 * step + batch)).backward()  # on all ranks the same
            optimizer.step()
            after.append(values_of(model))
        return after

    def on_rank(comm: Collectives) -> list[Values]:
        model = Casting()
        flat = partition != "sorted_greedy"
        zero = ZeroRedundancyOptimizer(model.parameters(), optim.SGD, comm, flat, partition=partition, **sgd)
        return train(model, ShardedDataParallel(model, zero, reduce_buffer_size=CAP), zero)

    model = Casting()
    plain = train(model, model, optim.SGD(model.parameters(), **sgd))
    for ours in virtual.run(on_rank, 2):
        assert_equal([ours], plain)
        for values, others in zip(ours, plain, strict=True):
            assert [one.dtype for one in values] == [one.dtype for one in others]


def test_a_range_is_cast_as_a_whole() -> None:
    def on_rank(comm: Collectives) -> str:
        model, _, sharded = wrapped(comm, Casting(), partition=SHARES)
        cast_a_layer(model)
        return caught(lambda: sharded(data(0, 0)).backward())

    for message in virtual.run(on_rank, 2):
        assert "have come to differ in dtype, and lie in one range" in message


def cast_a_buffer(model: nn.Module) -> None:
    model.norm.running_mean = model.norm.running_mean.double()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("cast", "text"),
    [
        (cast_a_layer, "rank 1 is to cast parameters"),
        (cast_a_buffer, "rank 1 has [buffer norm.running_mean: torch.float64, shape (16,)]"),
        (nn.Module.double, "rank 1 has [buffer norm.running_mean: torch.float64, shape (16,)]"),
    ],
)
def test_a_cast_on_one_rank_is_named_on_all(cast: Callable[[nn.Module], Any], text: str) -> None:
    def on_rank(comm: Collectives) -> str:
        model, zero, sharded = wrapped(comm, Casting())
        sharded(data(0, 0)).backward()
        zero.step()
        zero.zero_grad()
        if comm.rank == 1:
            cast(model)
        return caught(lambda: sharded(data(0, 1)).backward())

    for rank, message in enumerate(virtual.run(on_rank, 3)):
        assert text in message, (rank, message)


def test_buffers_of_another_kind_are_told_before_they_are_sent() -> None:
    """In any update: Gloo would end the process of a rank that receives more than it expects."""

    def on_rank(comm: Collectives) -> str:
        model, zero, sharded = wrapped(comm, Casting())
        for step in range(3):
            zero.zero_grad()
            if comm.rank == 1 and step == 2:
                cast_a_buffer(model)
            message = caught(lambda step=step: sharded(data(0, step)).backward())  # type: ignore[misc]
            if message == "nothing":
                zero.step()
        return message

    message = virtual.run(on_rank, 2, timeout=5)[1]
    assert message.startswith("RanksLostError: rank 1 was to run a forward for update 3 of optimizer 0 (SGD)")


def test_a_cast_that_the_wrapper_has_not_seen_is_refused() -> None:
    """Its hooks before a gradient are gone, so without a forward of the wrapper nothing begins a backward."""

    def on_rank(comm: Collectives) -> str:
        model, _, sharded = wrapped(comm, Casting())
        model.double()
        message = caught(model(data(0, 0)).backward)
        sharded.zero_grad()
        sharded.refresh_trainable()
        model(data(0, 0)).backward()
        return message

    for message in virtual.run(on_rank, 2):
        assert message.startswith("RuntimeError: parameters were cast, and their ShardedDataParallel has not")


def test_a_wrapper_is_constructed_without_gradients() -> None:
    def make(model: nn.Module, comm: Collectives) -> list[Values]:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, comm, **ADAMW)
        with torch.no_grad():
            sharded = ShardedDataParallel(model, optimizer, broadcast_buffers=False)
        sharded(data(comm.rank, 0)).backward()
        optimizer.step()
        return [values_of(model)]

    assert_equal(virtual.run(lambda comm: make(Tied(), comm), 2), expected(2, 1, adamw))


def test_a_cast_on_one_rank_is_named_by_a_step_too() -> None:
    def on_rank(comm: Collectives) -> str:
        model = filled(nn.Linear(8, 8))
        zero = ZeroRedundancyOptimizer(model.parameters(), optim.SGD, comm, lr=0.1)
        if comm.rank == 1:
            model.double()
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        return caught(zero.step)

    for message in virtual.run(on_rank, 2):
        assert "cast parameters" in message
        assert "make update 1" in message


def test_gradients_of_gradients_are_refused() -> None:
    def on_rank(comm: Collectives) -> list[str]:
        model, _, sharded = wrapped(comm)
        loss = sharded(data(0, 0))
        messages = [caught(lambda: loss.backward(create_graph=True))]
        sharded.zero_grad()
        model.first.bias.grad = torch.zeros(16, requires_grad=True)
        return [*messages, caught(lambda: sharded(data(0, 0)))]

    for messages in virtual.run(on_rank, 2):
        for message in messages:
            assert message.startswith("RuntimeError: a gradient requires a gradient itself")


def test_attributes_that_programs_read_of_ddp() -> None:
    def on_rank(comm: Collectives) -> None:
        model, _, sharded = wrapped(comm)
        assert (sharded.device, sharded.device_type) == (torch.device("cpu"), "cpu")
        assert not sharded.is_multi_device_module
        assert sharded.find_unused_parameters
        assert sharded.process_group is comm
        assert sharded.module is model

    virtual.run(on_rank, 1)


# ----------------------------------------------------------------------------------------- in other programs


@pytest.mark.ranks
def test_a_join_is_refused_on_all_ranks() -> None:
    def on_rank() -> str:
        _, zero, sharded = wrapped(None, nn.Linear(4, 4))
        with pytest.raises(RuntimeError, match="no hooks for a Join") as caught, Join([zero]):
            sharded(torch.ones(1, 4))
        return str(caught.value)

    assert len(ranks.run(on_rank, 2, timeout=180)) == 2


def test_a_layer_that_comes_later_needs_an_owner() -> None:
    def on_rank(comm: Collectives) -> None:
        model, zero, sharded = wrapped(comm, filled(nn.Sequential(nn.Linear(8, 8))))
        model.append(filled(nn.Linear(8, 8)))
        with pytest.raises(ValueError, match=r"parameter 1\.weight is trained, and no optimizer has it"):
            sharded(data(comm.rank, 0))
        zero.add_param_group({"params": list(model[1].parameters())})
        sharded(data(comm.rank, 0)).sum().backward()
        zero.step()

    virtual.run(on_rank, 2, timeout=180)


def test_a_compiled_module_trains_as_it_is() -> None:
    def on_rank(comm: Collectives, compiled: bool) -> Values:
        model = filled(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)))
        zero = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, comm, partition=SHARES, **ADAMW)
        # The graph is taken as it is: a backend that writes code for the processor would round otherwise.
        module: nn.Module = torch.compile(model, backend="aot_eager") if compiled else model  # type: ignore[assignment]
        sharded = ShardedDataParallel(module, zero)
        for step in range(3):
            zero.zero_grad()
            sharded(data(comm.rank, step)).square().mean().backward()
            zero.step()
        return values_of(model)

    (plain,) = virtual.run(on_rank, 1, False, timeout=180)
    (compiled,) = virtual.run(on_rank, 1, True, timeout=180)
    assert all(map(torch.equal, plain, compiled))
