"""Graders of the chapter on sharded gradients: one order for all buckets, gradients that add up, groups."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from itertools import permutations, starmap
from statistics import mean
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from zero_ref.backward.sharded_data_parallel import ShardedDataParallel
from zero_ref.comm.backend import as_collectives
from zero_ref.comm.collectives import Collectives
from zero_ref.lab import ranks
from zero_ref.lab.meter import bytes_sent_by
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.plan.calls import Call
from zero_ref.plan.partition import ParamSpec
from zero_ref.plan.rules import sorted_greedy
from zero_ref.simulator.cluster import cluster
from zero_ref.simulator.ledger import nbytes_of
from zero_ref.simulator.models import MODELS, shapes, specs
from zero_ref.simulator.play import play
from zero_ref.simulator.price import Workload
from zero_ref.simulator.recipe import recipe
from zero_ref.simulator.scenario import Scenario
from zero_ref.simulator.schedule import calls_of_rank, schedule
from zero_ref.simulator.traffic import traffic
from zero_ref_course import Answer, call_text, exercise, in_words, shown
from zero_ref_course._cases import Form, check_cases, is_number, is_whole, list_of, named
from zero_ref_course._company import on_ranks, on_virtual_ranks
from zero_ref_course._pictures import reductions
from zero_ref_course.predictions import prediction

# ----------------------------------------------------------------------------------- buckets in one order

READY = [([1, 0, 3], 4), ([0, 1, 2], 3), ([2, 1, 0], 3), ([], 2), ([3], 4), ([0, 2, 4, 1, 3], 5)]
"""What becomes full on a rank, and the number of buckets: the first case shows most mistakes."""

MOMENTS = Form(list_of(list_of(is_whole)), "It must return a list of lists of buckets.")


@exercise("sharded.reduce_in_order", draws=reductions)
def reduce_in_order(answer: Answer) -> str:
    """Which reductions a rank starts at each moment, so that all ranks start them in the same order."""
    cases = [*READY, *((list(order), 4) for order in permutations(range(4))), *answer.drawn(_drawn_order)]
    check_cases(
        answer,
        cases,
        starmap(_in_order, cases),
        lambda answer, *case: [list(moment) for moment in MOMENTS.returned_by(answer, *case)],
        otherwise=_mistake_in_order,
    )
    return f"{len(cases)} orders: whatever becomes full first, all ranks start the same reductions in turn"


def _drawn_order(rng: random.Random) -> tuple[list[int], int]:
    count = rng.randint(3, 12)
    return rng.sample(range(count), rng.randint(0, count)), count


def _in_order(ready: Sequence[int], count: int) -> list[list[int]]:
    started, full, next_one = list[list[int]](), set[int](), 0
    for bucket in ready:
        full.add(bucket)
        begin = next_one
        while next_one in full:
            next_one += 1
        started.append(list(range(begin, next_one)))
    return [*started, list(range(next_one, count))]


def _mistake_in_order(
    theirs: list[list[int]], right: list[list[int]], ready: Sequence[int], count: int
) -> str:
    if len(theirs) == len(ready):
        return (
            "There is a moment more: when backward ends. Buckets that have not become full are reduced then, "
            "because other ranks may have gradients for them."
        )
    if len(theirs) != len(right):
        return f"There are {len(ready)} moments at which a bucket becomes full, and the end of backward."
    flat = [bucket for moment in theirs for bucket in moment]
    twice = {bucket for bucket in flat if flat.count(bucket) > 1}
    if twice:
        return f"Bucket {min(twice)} is reduced twice."
    if flat != sorted(flat):
        return (
            f"This rank starts its reductions in the order {shown(flat)}. A rank on which buckets become "
            "full in another order would start others, and the ranks would add up gradients of different "
            "buckets."
        )
    missing = [bucket for bucket in range(count) if bucket not in flat]
    if missing:
        return (
            f"Bucket {missing[0]} is never reduced on this rank. The other ranks would wait for it: a bucket "
            "that is not full when backward ends is reduced with zeros."
        )
    for moment, (bucket, started) in enumerate(zip(ready, theirs)):
        early = [one for one in started if one not in ready[: moment + 1]]
        if early:
            return (
                f"Bucket {early[0]} is reduced when bucket {bucket} becomes full, and it is not full itself."
            )
    return (
        "A reduction may start earlier: as soon as its bucket and all buckets before it are full. A bucket "
        "that becomes full may let several start."
    )


# ------------------------------------------------------------------------ gradients that add up in shares

WORLDS = [(2, 3), (3, 2), (4, 1), (1, 2), (2, 4)]
"""Ranks, and micro-batches of each."""
SHARE = 6
REAL_RANKS = 3


class _Accumulated(NamedTuple):
    """What a rank returned, and when it ran a backward and made which call."""

    value: Any
    events: list[Call]


@exercise("sharded.accumulate", seconds=20.0, on_ranks=True)
def accumulate(answer: Answer) -> str:
    """This rank's share of the mean over ranks and micro-batches, on virtual ranks and on real ones."""
    for size, count in WORLDS + answer.drawn(lambda rng: (rng.randint(2, 5), rng.randint(1, 5)), 3):
        of_ranks = on_virtual_ranks(
            _accumulate_here,
            size,
            answer,
            count,
            waiting=lambda why, n=size: (  # type: ignore[misc]
                f"on {n} ranks, ranks wait for each other: {why} Every rank reduces after each micro-batch."
            ),
        )
        _check_accumulated(answer, count, of_ranks)
    _check_accumulated(answer, 2, on_ranks(_accumulate_on_a_real_rank, REAL_RANKS, answer, 2))
    return f"the mean of 1 to 4 micro-batches on {len(WORLDS)} worlds, and on {REAL_RANKS} real ranks"


def _gradient(rank: int, size: int, number: int, seed: int) -> torch.Tensor:
    """Of the whole model, from one micro-batch of one rank."""
    generator = torch.Generator().manual_seed(1000 * seed + 10 * rank + number)
    return torch.randn(size * SHARE, generator=generator)


def _accumulate_here(comm: Collectives, answer: Answer, count: int) -> _Accumulated:
    events: list[Call] = []
    comm.observers.append(events.append)

    def backward_of(number: int) -> Callable[[], torch.Tensor]:
        def backward() -> torch.Tensor:
            """Run one micro-batch; gives the gradient of all parameters, in one flat tensor."""
            events.append(Call("backward", 0, number))
            return _gradient(comm.rank, comm.world_size, number, answer.seed)

        return backward

    micro_batches = [backward_of(number) for number in range(count)]
    try:
        with in_words("micro_batches, comm", answer, micro_batches, comm):
            value = answer(micro_batches, comm)
    finally:
        comm.observers.remove(events.append)
    return _Accumulated(value, events)


def _accumulate_on_a_real_rank(answer: Answer, count: int) -> _Accumulated:
    return _accumulate_here(as_collectives(None), answer, count)


def _check_accumulated(answer: Answer, count: int, of_ranks: Sequence[_Accumulated]) -> None:
    size = len(of_ranks)
    for rank, (value, events) in enumerate(of_ranks):
        where = f"{answer.name} on rank {rank} of {size}, with {count} micro-batches,"
        is_share = isinstance(value, torch.Tensor) and value.numel() == SHARE
        assert is_share, (
            f"{where} must return this rank's share, {SHARE} of {size * SHARE} elements; it returned "
            f"{shown(value)}."
        )
        names = [event.op for event in events]
        others = {*names} - {"backward", "reduce_shares"}
        assert not others, (
            f"{where} called {', '.join(sorted(others))}. Reduce to shares, with comm.reduce_shares: an "
            "all-reduce moves twice as many bytes, and leaves whole gradients on every rank."
        )
        assert names.count("backward") == count, (
            f"{where} ran {names.count('backward')} backwards. Each micro-batch is run once."
        )
        if names != ["backward", "reduce_shares"] * count:
            raise AssertionError(f"{where} {_mistake_in_moments(names, count)}")
        _check_mean(where, value, rank, size, count, answer.seed)


def _mistake_in_moments(names: Sequence[str], count: int) -> str:
    reduced = names.count("reduce_shares")
    if reduced == 1 < count:
        return (
            "reduces once, after the last micro-batch. Until then it adds up whole gradients, as stage 1 "
            "does: a rank of stage 2 has room for its share of the sum and for one micro-batch's gradients."
        )
    if reduced == count:
        return (
            "runs the next backward before the gradients of the last one are reduced, so it holds those of "
            "several micro-batches at once."
        )
    return f"reduces {reduced} times. Each micro-batch's gradients are reduced as soon as they are there."


def _check_mean(where: str, value: torch.Tensor, rank: int, size: int, count: int, seed: int) -> None:
    of_all = [[_gradient(r, size, number, seed) for number in range(count)] for r in range(size)]
    shares = torch.stack([torch.stack([one.chunk(size)[rank] for one in of_rank]) for of_rank in of_all])
    right = shares.mean((0, 1))

    def is_(other: torch.Tensor) -> bool:
        return torch.allclose(value.flatten(), other, rtol=1e-4, atol=1e-6)

    if is_(right):
        return
    first = torch.stack([torch.stack(of_rank) for of_rank in of_all]).mean((0, 1)).chunk(size)[0]
    mistakes = {
        "It is the sum over ranks and micro-batches. Divide by both numbers.": is_(shares.sum((0, 1))),
        f"It is not divided by the {size} ranks: reduce_shares adds up.": is_(shares.sum(0).mean(0)),
        f"It is not divided by the {count} micro-batches.": is_(shares.mean(0).sum(0)),
        "It has the last micro-batch alone. Add each one's share to those before.": (
            is_(shares[:, -1].mean(0)) or is_(shares[:, -1].sum(0)) or is_(shares[:, -1].mean(0) / count)
        ),
        "It is rank 0's share.": is_(first),
    }
    raise AssertionError(
        f"{where} returns other values than its share of the mean. "
        + named(mistakes, "Add up what reduce_shares leaves in the share, and divide once at the end.")
    )


# ----------------------------------------------------------------------------------- bytes of hybrid groups

HYBRID = [(2, 8), (4, 8), (8, 64), (8, 8), (1, 4), (16, 512), (1, 1)]
"""Ranks of a group, and of all."""
CLOSE = 1e-3
WITHIN_AND_BETWEEN = Form(
    list_of(is_number, 2),
    "It must return two numbers: bytes within the group, and bytes between groups.",
)


@exercise("sharded.hybrid_bytes", on_ranks=True, forbids=("zero_ref.simulator.schedule.schedule",))
def hybrid_bytes(answer: Answer) -> str:
    """What a rank sends within its group and between groups: the simulator's, and the sum on real ranks."""
    groups = HYBRID + answer.drawn(_drawn_groups)
    cases = [(numel, *of_group) for numel in (2**20, 2**24) for of_group in groups]
    check_cases(
        answer,
        [(4 * numel, *of_group) for numel, *of_group in cases],
        starmap(_sent_by_plan, cases),
        WITHIN_AND_BETWEEN.returned_by,
        same=lambda theirs, right: all(map(_is_close, theirs, right)),
        otherwise=_mistake_in_bytes,
    )
    psi, counted = ranks.run(_sent_in_hybrid, 4, timeout=60.0, backend="gloo")[0]
    if counted is None:
        return f"{2 * len(HYBRID)} cases as simulated; this system has no counters to check it on real ranks"
    theirs = sum(answer(psi, 2, 4))
    assert math.isclose(theirs, counted, rel_tol=0.01), (
        f"{call_text(answer.name, psi, 2, 4)} returned {theirs:,.0f} bytes in all, and real ranks sent "
        f"{counted:,.0f} each."
    )
    return f"{2 * len(HYBRID)} cases as simulated, and their sum within 1% of what 4 real ranks sent"


def _drawn_groups(rng: random.Random) -> tuple[int, int]:
    group = 2 ** rng.randint(0, 5)
    return group, group * 2 ** rng.randint(0, 4)


def _sent_by_plan(numel: int, group: int, size: int) -> tuple[float, float]:
    """Within and between, without the few bytes that say which parameters had a gradient."""
    plan = schedule(recipe("zero-2", shard_group=group), [ParamSpec(numel)], size)
    sent = {True: 0.0, False: 0.0}
    for one in plan.operations:
        if one.op and one.label != "agree":
            among = one.ranks or size
            sent[one.stride == 1 and among == group] += traffic(one.op, one.nbytes, among).total_bytes / among
    return sent[True], sent[False]


def _is_close(theirs: float, right: float) -> bool:
    return math.isclose(theirs, right, rel_tol=CLOSE, abs_tol=1e-6)


def _mistake_in_bytes(
    theirs: Sequence[float], right: tuple[float, float], psi: int, group: int, size: int
) -> str:
    within, between = right
    if _is_close(theirs[0], between) and _is_close(theirs[1], within):
        return "These are the two, in the other order."
    if not _is_close(theirs[0], within):
        if _is_close(theirs[0], within / 2):
            return "Within the group gradients are reduced to shares, and new parameters are gathered too."
        if _is_close(theirs[0], 2 * psi * (size - 1) / size):
            return "Within the group both movements go around the ranks of the group, and not around all."
        if _is_close(theirs[0], 2 * psi):
            return "A rank does not send its own part."
        return "Within the group there are two movements, as in stage 2 on as many ranks as the group has."
    if _is_close(theirs[1], between * group):
        return "Between groups only this rank's share travels, and not all gradients."
    if _is_close(theirs[1], between / 2):
        return "Between groups a share is all-reduced: every replica needs the average, so it moves twice."
    if size > group and _is_close(theirs[1], 2 * (size - 1) / size * psi / group):
        return "As many ranks take part in the all-reduce of a share as there are groups, not all ranks."
    if size > group and _is_close(theirs[1], 2 * psi / group):
        return "Between groups too a rank does not send its own part of the ring's."
    return "Between groups one share is all-reduced, among as many ranks as there are groups."


def _sent_in_hybrid() -> tuple[int, float | None]:
    """On one of four ranks, in two groups of two: the bytes of all parameters, and what a rank sends."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False) for _ in range(4)))
    psi = sum(param.nbytes for param in model.parameters())
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shard"))
    zero = ZeroRedundancyOptimizer(
        model.parameters(),
        torch.optim.AdamW,
        mesh["shard"].get_group(),
        partition="equal_shares",
        parameters_as_bucket_view=True,
    )
    wrapped = ShardedDataParallel(model, zero, replicas=mesh["replicas"])

    def iteration() -> None:
        zero.zero_grad()
        wrapped(torch.ones(2, 512)).square().mean().backward()
        zero.step()

    for _ in range(4):  # steps 1, 2 and 4 also compare options
        iteration()
    sent = bytes_sent_by(iteration)
    of_ranks: list[int | None] = [None] * 4
    dist.all_gather_object(of_ranks, sent)
    counted = [nbytes for nbytes in of_ranks if nbytes is not None]
    return psi, mean(counted) if len(counted) == 4 else None


# --------------------------------------------------------------------------------------- predictions


@prediction(
    "sharded.most",
    "In which of the three ways does a rank hold the most bytes in gradients, at some moment of backward?",
    choices=("DDP", "to owners", "to shares"),
)
def _holds_most() -> str:
    llama = specs(shapes("llama3-8b"), "bfloat16")
    buckets = sum(map(nbytes_of, llama))
    most = {"DDP": buckets}  # its gradients are views of the buckets
    for way, strategy, beside in (("to owners", "zero-even", buckets), ("to shares", "zero-2", 0)):
        played = play(schedule(strategy, llama, 8), cluster("h100-ib"), Workload(4096))
        most[way] = beside + round(max(held for _, held in played.memory(held_bytes=0)))
    return max(most, key=most.__getitem__)


@prediction(
    "sharded.bytes",
    "With reduce_to_owners, how many times (N - 1) Ψ elements do all ranks together send in an iteration?",
    unit="times (N - 1) Ψ",
)
def _sent_with_owners() -> float:
    world_size, specs = 4, [ParamSpec(384 * 384)] * 8
    partition = sorted_greedy([spec.numel for spec in specs], world_size)
    calls = [calls_of_rank(partition, specs, rank, to_owners=True) for rank in range(world_size)]
    sends = sum(call.nbytes for of_rank in calls for call in of_rank if call.op == "send")
    broadcasts = sum(call.nbytes for call in calls[0] if call.op == "broadcast")
    return (sends + (world_size - 1) * broadcasts) / (
        (world_size - 1) * sum(4 * spec.numel for spec in specs)
    )


@prediction(
    "sharded.owners",
    "Llama 3 8B on 64 ranks: how many times as long does an iteration take in pairs to owners as to shares?",
    unit="times",
)
def _to_owners_of_64() -> float:
    llama = Scenario(MODELS["llama3-8b"], cluster("h100-ib"), 64, sequence=2048)
    params, work = specs(shapes("llama3-8b"), "bfloat16"), llama.workload_of("zero-2")
    owners, shares = (
        play(schedule(how, params, 64), llama.cluster, work).iteration_ms
        for how in (recipe("zero-even", to_owners=True), "zero-2")
    )
    return owners / shares


@prediction(
    "sharded.groups",
    "2 nodes of 4 ranks, groups of 4: what does a rank send in all, within its node and between nodes?",
    unit="Ψ",
)
def _sent_in_groups() -> float:
    plan = schedule(recipe("zero-2", shard_group=4), [ParamSpec(2**20)], 8)
    moved = [one for one in plan.operations if one.op and one.label != "agree"]
    among = [one.ranks or 8 for one in moved]
    sent = sum(traffic(one.op, one.nbytes, n).total_bytes / n for one, n in zip(moved, among, strict=True))
    return sent / (4 * 2**20)
