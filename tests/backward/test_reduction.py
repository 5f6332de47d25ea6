"""Gradients reduced to their owners: what each rank has after backward, and what an optimizer makes of it."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from library.training import CountingReads, OnMasters, Tangle, assert_same, loss_on_own_data, snapshot
from test_overlap import (
    BOTH_WAYS,
    BY_REDUCE,
    INTERLEAVED,
    MAY_CHANGE,
    OWNERS,
    SCALED,
    SCALED_BY_REDUCE,
    SMALL_BUCKETS,
    Branches,
    Job,
    Matrices,
    Small,
    Sparse,
    accumulating,
    assert_equals_plain,
    backward,
    caught,
    freezing_and_thawing,
    loss_of_branches,
    loss_of_small,
    loss_of_sparse,
    loss_of_stack,
    made,
    noting_buckets,
    two_groups,
    with_a_closure,
)
from torch import nn, optim
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP

from zero_ref.backward.reduction import (
    PairsToOwners,
    ReduceToOwners,
    ToOwners,
    gradients_in,
    reduce_to_owners,
    share_infinities,
)
from zero_ref.clip.grad_norm import clip_grad_norm_, get_total_norm
from zero_ref.comm.backend import as_collectives
from zero_ref.comm.collectives import Collectives
from zero_ref.lab import virtual
from zero_ref.lab.meter import held_bytes, recording
from zero_ref.lab.ranks import run
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.plan.calls import Call
from zero_ref.shard.buckets import flat_view
from zero_ref.shard.groups import specs_of
from zero_ref.simulator.schedule import calls_of_rank

pytestmark = pytest.mark.ranks


# ------------------------------------------------------------------------------ one bucket, worked by hand


RUNS = [[slice(0, 1), slice(2, 3), slice(4, 6)], [slice(1, 2), slice(3, 4)], []]
"""The runs of each rank's part of a bucket of six elements. Rank 2 owns nothing."""


def bucket_on(comm: Collectives, way: type[ToOwners]) -> tuple[list[float], list[float], bool, Any]:
    """Rank r has 3, 6, ..., 18 times ten to the power of r."""
    flat = torch.arange(3.0, 19.0, 3.0) * 10**comm.rank
    reduction = way(comm, flat, [], RUNS)
    done_at_once = reduction.future.done()
    result = reduction.wait()
    assert result is reduction.wait() is reduction.future.value() is flat
    return flat.tolist(), result.tolist(), done_at_once, reduction


def test_each_owner_gets_the_average_and_the_rest_is_not_its_business() -> None:
    first, second, third = virtual.run(bucket_on, 3, PairsToOwners, timeout=10)
    assert first[0] == [111.0, 2.0, 333.0, 4.0, 555.0, 666.0]
    assert second[0] == [10.0, 222.0, 30.0, 444.0, 50.0, 60.0]
    assert third[0] == [100.0, 200.0, 300.0, 400.0, 500.0, 600.0]
    for _, _, done_at_once, reduction in (first, second, third):
        assert not done_at_once
        kept = reduction.sent + reduction.of_lower + reduction.of_higher
        assert not kept, "what was sent and received is not kept"


def test_each_owner_gets_the_average_by_reduce_too() -> None:
    first, second, third = virtual.run(bucket_on, 3, ReduceToOwners, timeout=10)
    assert [first[0][at] for at in (0, 2, 4, 5)] == [111.0, 333.0, 555.0, 666.0]
    assert [second[0][at] for at in (1, 3)] == [222.0, 444.0]
    for _, _, done_at_once, reduction in (first, second, third):
        assert not done_at_once
        assert reduction.own is None, "no packed part is kept"
        assert not reduction.packed


DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def reduced_by_gloo() -> list[list[float]]:
    of_dtypes = [(torch.arange(3.0, 19.0, 3.0) * 2 ** dist.get_rank()).to(dtype) for dtype in DTYPES]
    return [ReduceToOwners(as_collectives(None), flat, [], RUNS).wait().tolist() for flat in of_dtypes]


def test_gloo_reduces_to_owners_in_each_dtype() -> None:
    # 7/3 of 3, 6, ... are whole, but are divided before they are added, in the bucket's dtype.
    for dtype, first, second, _ in zip(DTYPES, *run(reduced_by_gloo, 3), strict=True):
        tolerance = 4 * torch.finfo(dtype).eps
        assert [first[at] for at in (0, 2, 4, 5)] == pytest.approx([7, 21, 35, 42], rel=tolerance)
        assert [second[at] for at in (1, 3)] == pytest.approx([14, 28], rel=tolerance)


def order_of_sums(comm: Collectives, owner: int) -> float:
    """1e8 - 1e8 + 1 is 1 in the order of the ranks, and 0 where 1 comes before the end."""
    flat = torch.tensor([[1e8], [-1e8], [1.0], [0.0]][comm.rank]) * comm.world_size
    return (
        PairsToOwners(comm, flat, [], [[slice(0, 1)] if rank == owner else [] for rank in range(4)])
        .wait()
        .item()
    )


def test_the_sum_is_in_the_order_of_the_ranks_whoever_owns_it() -> None:
    for owner in range(4):
        assert virtual.run(order_of_sums, 4, owner, timeout=10)[owner] == 1.0


def sum_of_large(comm: Collectives, way: type[ToOwners]) -> float:
    flat = torch.full((1,), 60000.0, dtype=torch.float16)
    return way(comm, flat, [], [[slice(0, 1)], []]).wait().item()


@pytest.mark.parametrize("way", [PairsToOwners, ReduceToOwners])
def test_gradients_are_averaged_before_they_are_added_as_ddp_does(way: type[ToOwners]) -> None:
    assert virtual.run(sum_of_large, 2, way, timeout=10)[0] == 60000.0


def test_gradients_of_a_bucket_have_the_strides_of_their_parameters() -> None:
    conv = nn.Conv2d(2, 3, 2, bias=False).to(memory_format=torch.channels_last)
    scalar = nn.Parameter(torch.tensor(1.0))
    flat = torch.arange(25.0)
    of_conv, of_scalar = gradients_in(flat, [conv.weight, scalar])
    assert of_conv.stride() == conv.weight.stride()
    assert torch.equal(flat_view(of_conv), flat[:24])
    assert of_scalar.shape == ()
    assert of_scalar.item() == 24.0
    of_conv.zero_()
    assert flat[:24].sum() == 0, "they share the bucket's memory"
    assert [grad.dtype for grad in gradients_in(flat.half(), [conv.weight, scalar])] == [torch.float32] * 2
    sparse = torch.eye(3).to_sparse()
    assert gradients_in(sparse, [nn.Parameter(torch.eye(3))]) == [sparse]


# ------------------------------------------------------------------------------------ what backward leaves


def after_backward(partition: str, as_views: bool, as_bucket: bool, reduction: str) -> list[Any]:
    """Each rank's gradients against those that all have, and bytes of gradients held."""
    ddp, zero = made(
        None, reduction, ddp={"gradient_as_bucket_view": as_views}, partition=partition,
        parameters_as_bucket_view=as_bucket,
    )  # fmt: skip
    reference: Any = DDP(Tangle(), **SMALL_BUCKETS)
    for step in range(3):  # DDP rebuilds its buckets on the way
        zero.zero_grad()
        reference.zero_grad()
        backward(ddp, step)
        backward(reference, step)
        seen = []
        for number, (param, other) in enumerate(
            zip(ddp.module.parameters(), reference.module.parameters(), strict=True)
        ):
            pieces = zero.partition.pieces_of_param[number]
            mine = [piece for piece, owner in pieces if owner == zero.rank]
            if not mine or not param.requires_grad:
                assert param.grad is None, number
                continue
            expected = torch.zeros_like(other)
            for piece in mine:
                flat_view(expected)[piece.start : piece.stop] = flat_view(other.grad)[
                    piece.start : piece.stop
                ]
            assert torch.equal(param.grad, expected), number
            assert param.grad.stride() == param.stride()
            seen.append(number)
    gc.collect()
    assert not [thing for thing in gc.get_objects() if isinstance(thing, ToOwners)], "exchanges are kept"
    return [seen, held_bytes(zero.built.params, zero).gradients]


@pytest.mark.parametrize(
    ("partition", "as_views", "reduction"),
    [("sorted_greedy", False, OWNERS), ("sorted_greedy", True, BY_REDUCE), ("even", True, OWNERS),
     ("even", False, BY_REDUCE)],
)  # fmt: skip
def test_gradients_are_left_only_where_they_are_owned(partition: str, as_views: bool, reduction: str) -> None:
    (first, first_nbytes), (second, second_nbytes) = run(
        after_backward, 2, partition, as_views, as_views, reduction
    )
    params = list(Tangle().parameters())
    trained = {number for number, param in enumerate(params) if param.requires_grad}
    cut = set(first) & set(second)
    assert {*first, *second} == trained
    assert len(cut) == (partition == "even")
    if not as_views:
        nbytes = sum(params[number].nbytes for number in trained) + sum(
            params[number].nbytes for number in cut
        )
        assert first_nbytes + second_nbytes == nbytes


def calls_as_planned(by: str) -> list[Call]:
    buckets: list[list[int]] = []
    ddp, zero = made(None, OWNERS)
    ddp = DDP(ddp.module, **SMALL_BUCKETS)
    ddp.register_comm_hook(None, noting_buckets(reduce_to_owners(zero, by=by), zero, buckets))
    for step in range(3):
        zero.zero_grad()
        with recording(zero.collectives) as calls:
            backward(ddp, step)
            zero.step()
    planned = calls_of_rank(
        zero.partition,
        specs_of(zero.param_groups),
        zero.rank,
        buckets=buckets,
        to_owners=True,
        reduced_by=by,
    )
    assert len(buckets) == 4
    assert calls == planned
    return calls


def test_each_rank_makes_the_planned_calls() -> None:
    of_rank = run(calls_as_planned, 3, "pairs")
    trained_bytes = sum(param.nbytes for param in Tangle().parameters() if param.requires_grad)
    sent = [call.nbytes for calls in of_rank for call in calls if call.op == "send"]
    assert sum(sent) == 2 * trained_bytes, "N-1 times the gradients, half of what all-reduces put on the wire"


# --------------------------------------------------------------------------- what an optimizer makes of it


DDP_MODES: list[dict[str, Any]] = [
    {},
    {"gradient_as_bucket_view": True},
    {"static_graph": True},
    {"find_unused_parameters": True},
]


def every_mode() -> None:
    assert_equals_plain(
        *(
            Job(
                None,
                OWNERS,
                ddp=SMALL_BUCKETS | mode,
                zero={"partition": partition, "parameters_as_bucket_view": v},
            )
            for mode, (partition, v) in itertools.product(
                DDP_MODES, [("sorted_greedy", False), ("even", True)]
            )
        ),
        *(
            Job(
                None, OWNERS, loop=loop, groups=two_groups, zero={"partition": partition}, moves_at_once=False
            )
            for loop in (accumulating, with_a_closure, freezing_and_thawing)
            for partition in ("sorted_greedy", "even")
        ),
        *(
            Job(
                None,
                OWNERS,
                make_model=Branches,
                loss=loss_of_branches,
                steps=7,
                ddp=SMALL_BUCKETS | {"find_unused_parameters": True},
                zero={"partition": partition},
            )
            for partition in ("sorted_greedy", "even")
        ),
        Job(None, OWNERS, make_model=Small, loss=loss_of_small),
    )


def test_training_equals_ddp_and_the_plain_optimizer() -> None:
    run(every_mode, 3)


def by_reduce() -> None:
    job = Job(None, BY_REDUCE)
    assert_equals_plain(
        *(
            replace(
                job,
                ddp=SMALL_BUCKETS | mode,
                zero={"partition": partition, "parameters_as_bucket_view": view},
            )
            for mode, (partition, view) in itertools.product(
                DDP_MODES, [("sorted_greedy", False), ("even", True)]
            )
        ),
        *(
            replace(job, loop=loop, groups=two_groups, zero={"partition": "even"}, moves_at_once=False)
            for loop in (accumulating, with_a_closure, freezing_and_thawing)
        ),
        replace(
            job,
            make_model=Branches,
            loss=loss_of_branches,
            steps=7,
            ddp=SMALL_BUCKETS | {"find_unused_parameters": True},
        ),
        replace(job, reduction=SCALED_BY_REDUCE, loop=with_a_scaler, steps=5, optimizer_class=optim.Adam),
        *(
            replace(job, way=way, zero={"partition": partition})
            for way in BOTH_WAYS
            for partition in ("sorted_greedy", "even")
        ),
        replace(job, make_model=Small, loss=loss_of_small),
    )


def test_training_by_reduce_equals_ddp_and_the_plain_optimizer() -> None:
    run(by_reduce, 2, timeout=60)


def on_a_subgroup() -> None:
    odd = dist.new_group([1, 3])
    if dist.get_rank() % 2:
        jobs = [Job(None, reduction, group=odd) for reduction in (OWNERS, BY_REDUCE)]
        assert_equals_plain(*jobs, *(replace(job, zero={"partition": "even"}) for job in jobs))


def far_apart(reduction: str) -> float:
    """The largest difference to DDP's own all-reduce in ten iterations, over how far parameters moved."""
    worst = 0.0
    for optimizer_class, options in [(optim.SGD, {"lr": 0.1, "momentum": 0.9}), (optim.Adam, {"lr": 0.01})]:
        job = Job(INTERLEAVED, reduction, optimizer_class=optimizer_class, options=options, steps=10)
        ours, plain = job.run(sharded=True)[0], replace(job, reduction=allreduce_hook).run(sharded=False)[0]
        start = snapshot(Tangle())
        for mine, theirs in zip(ours, plain, strict=True):
            apart = max((a - b).abs().max().item() for a, b in zip(mine, theirs, strict=True) if a.numel())
            moved = max((a - b).abs().max().item() for a, b in zip(theirs, start, strict=True) if a.numel())
            worst = max(worst, apart / moved)
    return worst


def test_four_ranks_differ_from_an_all_reduce_by_rounding_only() -> None:
    # Sums of four in another order differ in the last of float32's 24 bits; Adam divides small gradients by
    # themselves, and ten iterations pass it on.
    for worst in run(far_apart, 4, OWNERS):
        assert 0 < worst < 1e-5


# ---------------------------------------------------------------------------- with torch.amp.GradScaler


def with_a_scaler(job: Job, ddp: Any, optimizer: Any) -> Iterator[None]:
    """The first rank has an infinite gradient in the second step, the last one, of another, in the fourth."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    params = list(ddp.parameters())
    infinite = {1: (0, params[0]), 3: (last, params[INFINITE if isinstance(ddp.module, Tangle) else 0])}
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for step in range(job.steps):
        optimizer.zero_grad()
        loss = job.loss(ddp, rank, step)
        if step in infinite and infinite[step][0] == rank:
            loss = loss + infinite[step][1].sum() * float("inf")
        before = snapshot(ddp)
        scaler.scale(loss).backward()
        if step % 3:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        yield
        if step in infinite:
            assert_same([snapshot(ddp)], [before], "skipped")
    scales = [torch.empty(()) for _ in range(last + 1)]
    dist.all_gather(scales, torch.tensor(scaler.get_scale()))
    assert {scale.item() for scale in scales} == {256.0}, "all ranks skipped the same two steps"


INFINITE = 10  # under sorted_greedy its owner is not that of parameter 0


def all_to_rank_0(numels: list[int], world_size: int) -> list[list[int]]:
    return [list(range(len(numels))), *([] for _ in range(world_size - 1))]


def unused_by_its_owner(numels: list[int], world_size: int) -> list[list[int]]:
    """The last rank owns what nobody uses in the second step, and nothing else."""
    return [[0, 1, 6, 7], *([] for _ in range(world_size - 2)), [2, 3, 4, 5]]


def scaled() -> list[Any]:
    job = Job(None, SCALED, loop=with_a_scaler, steps=5, optimizer_class=optim.Adam)
    unused = replace(
        job, make_model=Branches, loss=loss_of_branches, ddp=SMALL_BUCKETS | {"find_unused_parameters": True}
    )
    masters = replace(
        job, make_model=partial(Matrices, *[torch.bfloat16] * 4), loss=loss_of_stack,
        ddp={"bucket_cap_mb": 0.0002}, unsharded_class=partial(OnMasters, optimizer_class=optim.Adam),
    )  # fmt: skip
    assert_equals_plain(
        *(replace(job, zero={"partition": p}) for p in ("sorted_greedy", "even", all_to_rank_0)),
        *(replace(unused, zero={"partition": p}) for p in ("sorted_greedy", unused_by_its_owner)),
        *(
            replace(masters, reduction=r, zero={"partition": p, "master_dtype": torch.float32})
            for r, p in itertools.product((SCALED, allreduce_hook), ("sorted_greedy", "even"))
        ),
    )
    owner_of_param = made(None, OWNERS)[1].partition.owner_of_param
    return [owner_of_param[0], owner_of_param[INFINITE]]


def test_an_infinite_gradient_on_one_rank_skips_the_step_on_all() -> None:
    for first, second in run(scaled, 3):
        assert first != second


@pytest.mark.parametrize("infinite", [None, 0, 1, 2])
def test_a_gradient_that_is_not_finite_becomes_known_without_a_read_of_any(infinite: int | None) -> None:
    def on_rank(comm: Collectives) -> tuple[list[bool], int]:
        own = [torch.ones(2, 2), torch.full((3,), 1e300, dtype=torch.float64), torch.ones(3).bfloat16()]
        if infinite is not None and comm.rank == 1:
            own[infinite].view(-1)[-1] = -torch.inf
        with CountingReads() as counting:
            share_infinities(comm, own)
        return [bool(grad.isfinite().all()) for grad in own], counting.reads

    of_ranks = virtual.run(on_rank, 3)
    for rank, (finite, reads) in enumerate(of_ranks):
        assert all(finite) == (infinite is None), f"rank {rank}"
        assert reads == 0


def test_a_rank_whose_parameters_nobody_has_used_learns_of_nothing_and_holds_nobody_up() -> None:
    def on_rank(comm: Collectives) -> list[torch.Tensor]:
        own = [] if comm.rank else [torch.tensor([torch.inf])]
        share_infinities(comm, own)
        return own

    assert virtual.run(on_rank, 2, timeout=10)[1] == []


# ---------------------------------------------------------------- what cannot work says so, on all ranks


def refusals() -> dict[str, str]:
    """Return the refusals' messages, each by a part that it must contain; then training goes on."""
    messages = {}

    ddp, zero = made(None, OWNERS)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(loss_on_own_data(ddp, dist.get_rank(), 0)).backward()
    messages["Use reduce_to_owners(zero, scaled=True)"] = caught(lambda: scaler.step(zero))
    zero.zero_grad()
    backward(ddp, 1)
    zero.step()
    zero.zero_grad()
    backward(ddp, 2)
    zero.zero_grad()
    backward(ddp, 3)
    messages["this backward adds to gradients that the last one reduced"] = caught(lambda: backward(ddp, 4))

    model = Tangle()
    zero = ZeroRedundancyOptimizer(list(model.parameters())[1:], optim.SGD, lr=0.1)
    ddp = Job(None, OWNERS).wrap(model, zero)
    messages["DDP reduces a parameter of shape () that the optimizer does not have"] = caught(
        lambda: backward(ddp)
    )

    zero = ZeroRedundancyOptimizer(model.parameters(), optim.SGD, lr=0.1)
    messages["unknown by='tree'; choose one of pairs, reduce, or None"] = caught(
        lambda: reduce_to_owners(zero, by="tree")
    )
    messages["ranks disagree, so none can reduce gradients to owners: rank 1"] = caught(
        lambda: reduce_to_owners(zero, by=["pairs", "reduce"][dist.get_rank()])
    )

    sparse, zero = made(None, OWNERS, Sparse())
    messages["takes dense gradients; use allreduce_hook"] = caught(
        lambda: loss_of_sparse(sparse, dist.get_rank(), 0).backward()
    )
    return messages


def second_backwards(are_views: bool, buckets: dict[str, Any]) -> list[str]:
    """Return the errors of the next backward, after different treatments of the last one's gradients.

    DDP builds its buckets in the first backward and makes others of them before the second.
    """
    betweens: list[Callable[[Any, ZeroRedundancyOptimizer], Any]] = [
        lambda ddp, zero: zero.step(),
        lambda ddp, zero: clip_grad_norm_(zero, 1e-3),
        lambda ddp, zero: (clip_grad_norm_(zero, 1e-3), zero.step()),
        lambda ddp, zero: ddp.zero_grad(),
        lambda ddp, zero: (zero.step(), ddp.zero_grad()),
        lambda ddp, zero: (zero.step(), zero.zero_grad(set_to_none=False)),
        lambda ddp, zero: zero.zero_grad(),
        lambda ddp, zero: (zero.zero_grad(), under_no_sync(ddp)),
    ]
    raised = []
    for between, before in itertools.product(betweens, (0, 3)):
        ddp, zero = made(None, OWNERS, ddp=buckets | {"gradient_as_bucket_view": are_views})
        for step in range(before):
            backward(ddp, step)
            zero.zero_grad()
        backward(ddp, 3)
        between(ddp, zero)
        raised.append(caught(lambda ddp=ddp: backward(ddp, 4)))
    return raised


def under_no_sync(ddp: Any) -> None:
    with ddp.no_sync():
        backward(ddp)


@pytest.mark.parametrize(("are_views", "buckets"), [(False, {"bucket_cap_mb": 25}), (True, SMALL_BUCKETS)])
def test_only_a_backward_on_top_of_reduced_gradients_is_refused(
    are_views: bool, buckets: dict[str, Any]
) -> None:
    for raised in run(second_backwards, 2, are_views, buckets, timeout=120):
        refused = ["adds to gradients that the last one reduced" in message for message in raised]
        assert refused == [True] * 6 + [False] * 10
        assert raised[6:] == ["nothing"] * 10


CHANGES: list[Callable[[Any, ZeroRedundancyOptimizer], Any]] = [
    lambda ddp, zero: nn.utils.clip_grad_norm_(ddp.parameters(), 1e-3),
    lambda ddp, zero: nn.utils.clip_grad_norm_(ddp.parameters(), 1e6),  # by the factor of 1
    lambda ddp, zero: (nn.utils.clip_grad_norm_(ddp.parameters(), 1e-3), clip_grad_norm_(zero, 1e-3)),
    lambda ddp, zero: (clip_grad_norm_(zero, 1e-3), nn.utils.clip_grad_norm_(ddp.parameters(), 1e-3)),
]


def changed_by_each_rank() -> list[str]:
    messages = []
    for partition, change in itertools.product(["even", all_to_rank_0], CHANGES):
        ddp, zero = made(None, OWNERS, partition=partition)
        before = snapshot(ddp)

        def change_and_step(change: Any = change, ddp: Any = ddp, zero: Any = zero) -> None:
            change(ddp, zero)
            zero.step()

        def closure(change: Any = change, ddp: Any = ddp, zero: Any = zero) -> None:
            zero.zero_grad()
            backward(ddp)
            change(ddp, zero)

        backward(ddp)
        messages += [caught(change_and_step), caught(lambda zero=zero, closure=closure: zero.step(closure))]
        assert_same([snapshot(ddp)], [before], "after the errors")
        zero.zero_grad()
        backward(ddp)
        zero.step()
        assert not torch.equal(snapshot(ddp)[0], before[0])
    return messages


def test_gradients_that_each_rank_has_changed_by_itself_are_refused_on_all_ranks() -> None:
    for messages in run(changed_by_each_rank, 2, timeout=120):
        assert len(messages) == 16
        for message in messages:
            assert "was changed after backward" in message
            assert "zero_ref.clip_grad_norm_(optimizer, max_norm)" in message


def added_by_another_backward() -> list[str]:
    """Return the errors of a step and a norm after a second backward that reduced nothing, or was refused."""
    backwards: list[Callable[[Any], Any]] = [
        under_no_sync,
        lambda ddp: backward(ddp.module),
        lambda ddp: caught(lambda: backward(ddp)),
    ]
    messages = []
    for reduction, partition, again in itertools.product(
        (OWNERS, MAY_CHANGE), ("sorted_greedy", "even"), backwards
    ):
        ddp, zero = made(None, reduction, partition=partition)
        backward(ddp)
        again(ddp)
        messages += [caught(zero.step), caught(lambda zero=zero: get_total_norm(zero))]
        zero.zero_grad()
        zero.step()
    return messages


def test_a_backward_that_adds_to_reduced_gradients_is_not_taken_for_clipping() -> None:
    for rank, messages in enumerate(run(added_by_another_backward, 2, timeout=120)):
        assert len(messages) == 24
        for message in messages:
            assert message.startswith(
                f"RuntimeError: rank {rank}: a backward that reduced nothing, as under ddp"
            )


def one_rank_adds() -> str:
    """One rank owns all parameters, and so has no gradient that could tell."""
    ddp, zero = made(None, OWNERS, partition=all_to_rank_0)
    backward(ddp)
    under_no_sync(ddp)
    return caught(zero.step)


def test_where_a_second_backward_and_clipping_look_alike_the_message_names_both() -> None:
    first, second = run(one_rank_adds, 2)
    assert "was changed after backward" in first
    assert "If another backward has added to the gradient, call zero_grad() before it." in first
    assert "a backward that reduced nothing" in second


def clipping_by_value(job: Job, ddp: Any, optimizer: Any) -> Iterator[None]:
    for step in range(job.steps):
        optimizer.zero_grad()
        job.loss(ddp, dist.get_rank(), step).backward()
        nn.utils.clip_grad_value_(ddp.parameters(), 0.01)
        optimizer.step()
        yield


def clipping_by_a_norm_of_all(job: Job, ddp: Any, optimizer: Any) -> Iterator[None]:
    for step in range(job.steps):
        optimizer.zero_grad()
        job.loss(ddp, dist.get_rank(), step).backward()
        if isinstance(optimizer, ZeroRedundancyOptimizer):
            total = get_total_norm(optimizer)
            nn.utils.clip_grads_with_norm_(ddp.parameters(), 0.1, total)
        else:
            nn.utils.clip_grad_norm_(ddp.parameters(), 0.1)
        optimizer.step()
        yield


def changed_alike() -> None:
    by_value = Job(None, MAY_CHANGE, loop=clipping_by_value)
    by_norm = Job(None, OWNERS, loop=clipping_by_a_norm_of_all)
    assert_equals_plain(by_value, replace(by_value, zero={"partition": "even"}), by_norm)


def test_gradients_changed_by_the_same_rule_on_all_ranks_train_as_plain() -> None:
    run(changed_alike, 2, timeout=120)


def test_what_cannot_work_is_refused_on_all_ranks() -> None:
    for messages in run(refusals, 2):
        assert len(messages) == 6
        for text, message in messages.items():
            assert text in message
            assert message.startswith(("RuntimeError", "ValueError"))
