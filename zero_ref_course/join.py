"""Graders of the chapter on join: what if ranks run out of data?"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from zero_ref.comm.backend import as_collectives
from zero_ref.comm.collectives import Collectives
from zero_ref.plan.rules import even, sorted_greedy
from zero_ref_course import Answer, exercise, shown
from zero_ref_course._cases import Form, is_number, list_of, named
from zero_ref_course._company import on_ranks, on_virtual_ranks, outcomes_of
from zero_ref_course.predictions import prediction

# ------------------------------------------------------------------------------------ write the shadow step

STEPS = 3
SHAPES = [(4, 3), (3,), (3, 2), (2,), (5,)]


@exercise("join.shadow_step", seconds=20.0, may_return_none=True, on_ranks=True)
def shadow_step(answer: Answer) -> str:
    """Check three steps in which some ranks have left, on virtual ranks, then once on real ones."""
    for world_size, joined in [(2, {0}), (2, {1}), (3, {0, 2}), (3, {1})]:
        where = f"on {world_size} ranks of which {sorted(joined)} have left"
        outcomes = on_virtual_ranks(
            _train,
            world_size,
            answer,
            joined,
            waiting=lambda why, where=where: (  # type: ignore[misc]
                f"{where}, ranks waited for each other: {why} Receive one gradient for each parameter that "
                "this rank owns, no more, and take part in every broadcast, in the order of the parameters."
            ),
        )
        _check(outcomes, joined)
    joined = {0, 1}
    _check(on_ranks(_train_on_real_ranks, 3, answer, joined), joined)
    return f"{STEPS} steps with ranks that have left are the plain optimizer's, bit for bit, on all ranks"


def _train_on_real_ranks(answer: Answer, joined: set[int]) -> Any:
    return _train(as_collectives(None), answer, joined)


def _train(comm: Collectives, answer: Answer, joined: set[int]) -> Any:
    """Train; return the parameters after each step on this rank, and those of a plain optimizer."""
    generator = torch.Generator().manual_seed(answer.seed)
    params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    twins = copy.deepcopy(params)
    owners = list(sorted_greedy([param.numel() for param in params], comm.world_size).owner_of_param)
    owned = [param for param, owner in zip(params, owners) if owner == comm.rank]
    local = torch.optim.Adam([{"params": owned}], lr=0.1)
    plain = torch.optim.Adam(twins, lr=0.1)
    source = min(set(range(comm.world_size)) - joined)
    history = []
    for _ in range(STEPS):
        for param, twin in zip(params, twins):
            twin.grad = torch.randn(twin.shape, generator=generator)
            # Who has left has a gradient too: that of its last batch, long ago.
            param.grad = torch.ones_like(param) if comm.rank in joined else twin.grad.clone()
        plain.step()
        if comm.rank in joined:
            answer(comm, local, params, owners, source)
        else:
            _step_of_who_stays(comm, local, params, owners, joined, source)
        history.append(([p.detach().clone() for p in params], [t.detach().clone() for t in twins]))
    return owners, history


def _step_of_who_stays(
    comm: Collectives, local: Any, params: Sequence[Any], owners: list[int], joined: set[int], source: int
) -> None:
    if comm.rank == source:
        for param, owner in zip(params, owners):
            if owner in joined:
                comm.send(param.grad, owner).wait()
    local.step()
    for param, owner in zip(params, owners):
        comm.broadcast(param.detach(), owner).wait()


def _check(outcomes: Sequence[Any], joined: set[int]) -> None:
    world_size = len(outcomes)
    owners, _ = outcomes[0]
    for step in range(STEPS):
        for param, owner in enumerate(owners):
            for rank in (owner, *(other for other in range(world_size) if other != owner)):
                ours, plain = (values[param] for values in outcomes[rank][1][step])
                if torch.equal(ours, plain):
                    continue
                where = (
                    f"after step {step + 1} on {world_size} ranks of which {sorted(joined)} have left, "
                    f"parameter {param}, which rank {owner} owns,"
                )
                start = outcomes[rank][1][step - 1][0][param] if step else None
                assert rank not in joined or start is None or not torch.equal(ours, start), (
                    f"{where} has not changed on rank {rank}. Was local.step() called?"
                )
                raise AssertionError(
                    f"{where} is not on rank {rank} what the plain optimizer gives. A rank that has left has "
                    "in .grad what its last batch gave: receive the gradients of what it owns from rank "
                    "`source`, in the order of the parameters, before the local step; then take part in the "
                    "broadcast of every parameter."
                )


# ----------------------------------------------------------------------------------- what one batch counts

INPUTS = [[3, 5, 7], [2, 2, 2], [4, 1], [1, 3, 0]]


@exercise("join.averages", seconds=20.0, on_ranks=True)
def averages(answer: Answer) -> str:
    """Check the averaged gradient of every iteration against DistributedDataParallel's on real ranks."""
    for batches in INPUTS + answer.drawn(_drawn_batches, 2):
        for by_initial in (True, False):
            ours = list(answer(list(batches), by_initial))
            measured = max(on_ranks(_averages, len(batches), batches, by_initial), key=len)
            call = f"averages({batches}, divide_by_initial_world_size={by_initial})"
            assert len(ours) == len(measured), (
                f"{call} has {len(ours)} entries, and training goes on for {len(measured)} iterations: as "
                "long as any rank has data."
            )
            for iteration, (mine, theirs) in enumerate(zip(ours, measured)):
                active = sum(count > iteration for count in batches)
                divisor = f"all {len(batches)}" if by_initial else f"the {active} that have data"
                assert abs(float(mine) - theirs) < 1e-6, (
                    f"{call}: in iteration {iteration} DDP's averaged gradient is {theirs:.4g}, not "
                    f"{mine:.4g}. {active} of {len(batches)} ranks still have data; the others add zero. "
                    f"The sum is divided by the number of ranks, with {by_initial} of {divisor}."
                )
    return f"the averages of DDP on real ranks, for {len(INPUTS)} inputs and both ways to divide"


def _drawn_batches(rng: random.Random) -> list[int]:
    return [rng.randint(1, 6) for _ in range(rng.randint(2, 3))]


def _averages(batches: Sequence[int], by_initial: bool) -> list[float]:
    """DDP's averaged gradients of a model with one parameter, whose gradient is 1 for every batch."""
    model = nn.Linear(1, 1, bias=False)
    ddp = DistributedDataParallel(model)
    seen = []
    with Join([ddp], divide_by_initial_world_size=by_initial):
        for _ in range(batches[dist.get_rank()]):
            model.zero_grad()
            ddp(torch.ones(1, 1)).sum().backward()
            assert model.weight.grad is not None
            seen.append(model.weight.grad.item())
    return seen


# ---------------------------------------------------------------------------- until all ranks are done

EPOCHS: list[list[list[float]]] = [
    [[3.0, 4.0, 6.0], [1.0]],
    [[2.0], [4.0, 6.0], [0.0, 3.0, 9.0]],
    [[0.0, 0.0, 5.0], [0.0, -1.0]],
    [[], [7.0, 8.0]],
    [[1.0, 2.0], [3.0, 5.0], [8.0, 2.0]],
    [[4.0, 2.0]],
    [[], []],
]
"""The gradients of each rank, a number for each batch: few and many, zeros, a rank without data."""

AVERAGES = Form(list_of(is_number), "It must return a list of numbers, the average of each iteration.")

NOBODY_LEAVES = (
    "A rank whose data are used up goes on making the call of each iteration, with zeros, until no rank has "
    "data. And when all are done, every rank must see so in the same iteration."
)


@exercise("join.until_all_are_done", seconds=20.0, on_ranks=True)
def until_all_are_done(answer: Answer) -> str:
    """Check epochs of different lengths, on virtual ranks and then on real ones."""
    for epoch in EPOCHS + answer.drawn(_drawn_epoch):
        _check_epoch(answer, epoch)
    for epoch in EPOCHS[1:2] + EPOCHS[3:4]:
        _check_epoch(answer, epoch, real=True)
    return f"{len(EPOCHS)} uneven epochs, 2 of them on real ranks: no rank waits, and all have the averages"


def _drawn_epoch(rng: random.Random) -> list[list[float]]:
    return [[float(rng.randint(-9, 9)) for _ in range(rng.randint(0, 5))] for _ in range(rng.randint(2, 4))]


def _check_epoch(answer: Answer, epoch: list[list[float]], real: bool = False) -> None:
    given = ", ".join(f"the gradients {of_rank} on rank {rank}" for rank, of_rank in enumerate(epoch))
    outcomes = outcomes_of(answer, [(list(each),) for each in epoch], given, NOBODY_LEAVES, real=real)
    sums, active = _sums(epoch)
    right = [total / count for total, count in zip(sums, active)]
    for rank, (value, calls, _) in enumerate(outcomes):
        assert AVERAGES.fits(value), f"{answer.name} returned {shown(value)} on rank {rank}. {AVERAGES.words}"
        theirs = [float(each) for each in value]
        if len(theirs) != len(right) or any(abs(a - b) > 1e-5 for a, b in zip(theirs, right)):
            raise AssertionError(
                f"with {given}, {answer.name} returns {shown(theirs)} on rank {rank}; it should be "
                f"{shown(right)}. {_mistake_in_epoch(theirs, epoch, rank)}"
            )
        most = len(right) + 1
        assert len(calls) <= most, (
            f"with {given}, rank {rank} makes {len(calls)} calls; {most} are enough, one for each iteration "
            "and one in which all see that nobody has data. The sum and the number of ranks that add to it "
            "can travel in one tensor."
        )


def _sums(epoch: list[list[float]]) -> tuple[list[float], list[int]]:
    """The sum of the gradients in each iteration, and the number of ranks that have data in it."""
    iterations = range(max(map(len, epoch)))
    active = [[of_rank[i] for of_rank in epoch if i < len(of_rank)] for i in iterations]
    return [sum(each) for each in active], [len(each) for each in active]


def _mistake_in_epoch(theirs: list[float], epoch: list[list[float]], rank: int) -> str:
    sums, _ = _sums(epoch)
    if len(theirs) != len(sums):
        return (
            f"The epoch has {len(sums)} iterations, as many as the rank with the most data has batches; this "
            f"is a list of {len(theirs)}."
        )
    return named(
        {
            "These are the sums. Divide each by the number of ranks that have data in it.": theirs == sums,
            f"This divides by all {len(epoch)} ranks to the end. Those that have left add nothing: count the "
            "ranks that have data.": theirs == [total / len(epoch) for total in sums],
            "These are this rank's own gradients. The average is of all ranks.": (
                theirs[: len(epoch[rank])] == epoch[rank] != []
            ),
        },
        "In each iteration add up the gradients of the ranks that have data, and divide by their number.",
    )


# --------------------------------------------------------------------------------------- predictions

BATCHES = [3, 5, 7]
NUMELS = [64 * 96, 96, 96 * 10, 10]


@prediction(
    "join.lent",
    "How many bytes of gradients are lent in iteration 5?",
    unit="bytes",
)
def _lent_in_5() -> float:
    loads = even(NUMELS, len(BATCHES)).loads
    return sum(4 * load for load, count in zip(loads, BATCHES) if count <= 5)


@prediction(
    "join.without",
    "What happens with the second batch of rank 1?",
    choices=("a step by itself", "an error after a time-out", "a wait without end"),
)
def _without_join() -> str:
    return "an error after a time-out"  # a collective needs all ranks, and every group has a time-out


@prediction(
    "join.equal",
    "Of rank 2's seven iterations, how many end with the parameters of plain AdamW?",
    unit="iterations",
)
def _equal_on_rank_2() -> float:
    return BATCHES[2]  # all: shadows step with the gradients and the options of the others
