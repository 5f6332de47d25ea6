"""Graders of the chapter on sharded gradients: one order of buckets, a reduction in two parts, groups."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import permutations, starmap
from statistics import mean
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from zero_ref.backward.sharded_data_parallel import ShardedDataParallel
from zero_ref.comm.backend import as_collectives
from zero_ref.comm.collectives import Collectives
from zero_ref.lab import ranks, virtual
from zero_ref.lab.meter import bytes_sent_by, recording
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
"""The order in which buckets become full on a rank, and their number. The first case shows most mistakes."""

MOMENTS = Form(list_of(list_of(is_whole)), "It must return a list of lists of buckets.")


@exercise("sharded.reduce_in_order", draws=reductions)
def reduce_in_order(answer: Answer) -> str:
    """Check which reductions a rank starts at each moment, so that all ranks start them in the same order."""
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


# ------------------------------------------------------------------------------- a reduction in two parts

WORLDS = [(2, 3), (2, 2), (3, 2), (4, 1), (1, 3), (1, 1)]
"""The ranks of a group, and the number of groups."""
SHARE = 6

Worlds = tuple[list[virtual.World], list[virtual.World]]


class _Reduced(NamedTuple):
    """The value that a rank returned, and its calls within its group and between groups."""

    value: Any
    within: list[Call]
    between: list[Call]


@exercise("sharded.reduce_in_groups", seconds=20.0, on_ranks=True)
def reduce_in_groups(answer: Answer) -> str:
    """Check gradients reduced within groups and then between them, on virtual and on four real ranks."""
    for group, groups in WORLDS + answer.drawn(lambda rng: (rng.randint(1, 4), rng.randint(1, 3)), 3):
        of_ranks = on_virtual_ranks(
            _reduce_on_a_virtual_rank,
            group * groups,
            answer,
            ([virtual.World(group) for _ in range(groups)], [virtual.World(groups) for _ in range(group)]),
            waiting=lambda why, n=group, m=groups: (  # type: ignore[misc]
                f"in {m} groups of {n}, ranks wait for each other: {why} Every rank makes the same calls: "
                "one among the ranks of its group, and one among those that have the same share."
            ),
        )
        _check_reduced(answer, group, of_ranks)
    _check_reduced(answer, 2, on_ranks(_reduce_on_a_real_rank, 4, answer, 2))
    return f"the mean over all ranks in {len(WORLDS)} worlds, and on 4 real ranks in 2 groups"


def _whole_gradient(rank: int, group: int, seed: int) -> torch.Tensor:
    return torch.randn(group * SHARE, generator=torch.Generator().manual_seed(1000 * seed + rank))


def _reduce_on_a_virtual_rank(comm: Collectives, answer: Answer, worlds: Worlds) -> _Reduced:
    of_groups, of_places = worlds
    number, place = divmod(comm.rank, len(of_places))
    return _reduce_here(
        answer, comm.rank, of_groups[number].collectives(place), of_places[place].collectives(number)
    )


def _reduce_on_a_real_rank(answer: Answer, group: int) -> _Reduced:
    shape = dist.get_world_size() // group, group
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shard"))
    within, between = (as_collectives(mesh[name].get_group()) for name in ("shard", "replicas"))
    return _reduce_here(answer, dist.get_rank(), within, between)


def _reduce_here(answer: Answer, rank: int, within: Collectives, between: Collectives) -> _Reduced:
    arguments = _whole_gradient(rank, within.world_size, answer.seed), within, between
    with (
        recording(within) as calls_within,
        recording(between) as calls_between,
        in_words("flat, within, between", answer, *arguments),
    ):
        value = answer(*arguments)
    return _Reduced(value, calls_within, calls_between)


def _check_reduced(answer: Answer, group: int, of_ranks: Sequence[_Reduced]) -> None:
    size = len(of_ranks)
    gradients = torch.stack([_whole_gradient(rank, group, answer.seed) for rank in range(size)])
    for rank, found in enumerate(of_ranks):
        where = f"{answer.name} on rank {rank} of {size}, in groups of {group},"
        is_share = isinstance(found.value, torch.Tensor) and found.value.numel() == SHARE
        assert is_share, (
            f"{where} must return this rank's share, {SHARE} of {group * SHARE} elements; it returned "
            f"{shown(found.value)}."
        )
        between = sum(call.nbytes for call in found.between)
        assert between <= 4 * SHARE or size == group, (
            f"{where} sends {between} bytes between groups; {4 * SHARE} are enough, one share. The links "
            "between groups are the slow ones: reduce within the group first."
        )
        others = {call.op for call in found.within} - {"reduce_shares"}
        assert not others, (
            f"{where} calls {', '.join(sorted(others))} within the group. There each rank needs one share: "
            "within.reduce_shares moves half as many bytes as an all-reduce."
        )
        _check_share(where, found.value.flatten(), gradients, rank, group)


def _check_share(where: str, value: torch.Tensor, gradients: torch.Tensor, rank: int, group: int) -> None:
    size, place = len(gradients), rank % group
    shares = gradients.view(size, group, SHARE)[:, place]
    own = slice(rank - place, rank - place + group)

    def is_(other: torch.Tensor) -> bool:
        return torch.allclose(value, other, rtol=1e-4, atol=1e-6)

    if is_(shares.mean(0)):
        return
    mistakes = {
        f"It is the sum over all {size} ranks: divide by their number.": is_(shares.sum(0)),
        "It is the mean over this rank's group alone. Other groups have gradients, too.": (
            is_(shares[own].mean(0)) or is_(shares[own].sum(0)) or is_(shares[own].sum(0) / size)
        ),
        "It is not divided by the number of groups: an all-reduce adds up.": is_(shares.sum(0) / group),
        "It is not divided by the ranks of the group: reduce_shares adds up.": (
            is_(shares.sum(0) * group / size)
        ),
        "It is this rank's own gradient, reduced between groups and not within.": any(
            is_(gradients[place::group].view(-1, group, SHARE)[:, one].mean(0)) for one in range(group)
        ),
    }
    raise AssertionError(
        f"{where} returns other values than its share of the mean over all ranks. "
        + named(mistakes, "First the sum within the group, then the sum of the groups' sums.")
    )


# ----------------------------------------------------------------------------------- bytes of hybrid groups

HYBRID = [(2, 8), (4, 8), (8, 64), (8, 8), (1, 4), (16, 512), (1, 1)]
"""The ranks of a group, and all ranks."""
CLOSE = 1e-3
WITHIN_AND_BETWEEN = Form(
    list_of(is_number, 2),
    "It must return two numbers: bytes within the group, and bytes between groups.",
)


@exercise("sharded.hybrid_bytes", on_ranks=True)
def hybrid_bytes(answer: Answer) -> str:
    """Check a rank's bytes within its group and between groups: by the simulator, the sum by real ranks."""
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
    """The bytes within a group and between groups, but those that say which parameters had a gradient."""
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
    """On one of four ranks, in two groups of two: the bytes of all parameters, and the bytes sent."""
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
    "Llama 3 8B on 64 ranks: an iteration takes longer if gradients go to their owners in pairs than if they "
    "go to shares. How many times as long?",
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
