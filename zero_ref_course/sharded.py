"""Chapter 7's graders: one order for all buckets, a reduce-scatter around a ring, bytes of groups."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import permutations, starmap
from statistics import mean
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from zero_ref.backward.sharded_data_parallel import ShardedDataParallel
from zero_ref.comm.backend import as_collectives
from zero_ref.comm.collectives import Collectives, PendingCall, ToPeer
from zero_ref.lab import ranks
from zero_ref.lab.meter import bytes_sent_by, recording
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.plan.calls import Call
from zero_ref.plan.partition import ParamSpec
from zero_ref.simulator.cluster import cluster
from zero_ref.simulator.ledger import nbytes_of
from zero_ref.simulator.models import MODELS, shapes, specs
from zero_ref.simulator.play import play
from zero_ref.simulator.price import Workload
from zero_ref.simulator.recipe import recipe
from zero_ref.simulator.scenario import Scenario
from zero_ref.simulator.schedule import schedule
from zero_ref.simulator.traffic import traffic
from zero_ref_course import Answer, call_text, exercise, in_words, shown
from zero_ref_course._cases import Form, check_cases, is_number, is_whole, list_of
from zero_ref_course._company import on_ranks, on_virtual_ranks
from zero_ref_course.predictions import prediction

# ------------------------------------------------------------------------------ 17.1 buckets in one order

READY = [([1, 0, 3], 4), ([0, 1, 2], 3), ([2, 1, 0], 3), ([], 2), ([3], 4), ([0, 2, 4, 1, 3], 5)]
"""What becomes full on a rank, and the number of buckets: the first case shows most mistakes."""

MOMENTS = Form(list_of(list_of(is_whole)), "It must return a list of lists of buckets.")


@exercise("sharded.reduce_in_order")
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


# ------------------------------------------------------------------------------------ 17.2 a ring

SIZES = [3, 2, 4, 5, 1, 8]
"""Ranks of each world. Three first: with two, one message does not show whether its receiver adds."""
SHARE = 6
REAL_RANKS = 3


class _Outcome(NamedTuple):
    """What one rank has in the end, what it has asked of the network, and the first value that it sent."""

    share: list[float] | None
    calls: list[Call]
    first_sent: float | None


@exercise("sharded.ring", seconds=20.0, on_ranks=True)
def ring(answer: Answer) -> str:
    """A reduce-scatter by messages to the next rank only, on virtual ranks and on real ones."""
    for size in SIZES:
        _check_ring(answer, _on_virtual_ranks(answer, size))
    _check_ring(answer, on_ranks(_on_real, REAL_RANKS, answer))
    return (
        f"the sums of 1 to {max(SIZES)} ranks, N - 1 messages each, and the same on {REAL_RANKS} real ranks"
    )


def _on_virtual_ranks(answer: Answer, size: int) -> list[_Outcome]:
    return on_virtual_ranks(
        _reduced,
        size,
        answer,
        waiting=lambda _: (
            f"on {size} ranks a rank waits for a message that nobody sends. Each rank receives as many "
            "messages as it sends, from the rank before it."
        ),
    )


def _on_real(answer: Answer) -> _Outcome:
    return _reduced(as_collectives(None), answer)


def _shares(rank: int, size: int, seed: int) -> list[torch.Tensor]:
    """By their values one can tell whose part of which share they are: 100 (share + 1), and a bit a rank.

    With a seed nobody can know what is in another rank's.
    """
    secret = random.Random(f"{seed} {rank}").randrange(1000) if seed else 0
    return [torch.full((SHARE,), 1000.0 * (share + 1) + 2.0**rank + secret) for share in range(size)]


def _reduced(comm: Collectives, answer: Answer) -> _Outcome:
    shares = _shares(comm.rank, comm.world_size, answer.seed)
    sent: list[float] = []
    send, exchange = comm.send, comm.exchange

    def noting_send(tensor: torch.Tensor, dst: int) -> PendingCall:
        sent.extend(tensor.flatten()[:1].tolist())
        return send(tensor, dst)

    def noting_exchange(sends: Sequence[ToPeer], recvs: Sequence[ToPeer], **how: Any) -> PendingCall:
        sent.extend(value for _, tensor in sends for value in tensor.flatten()[:1].tolist())
        return exchange(sends, recvs, **how)

    with (
        recording(comm, checks=True) as calls,
        patch.multiple(comm, send=noting_send, exchange=noting_exchange),
        in_words("comm, shares", answer, comm, shares),
    ):
        share = answer(comm, shares)
    is_share = isinstance(share, torch.Tensor) and share.numel() == SHARE
    return _Outcome(share.detach().flatten().tolist() if is_share else None, calls, sent[0] if sent else None)


def _check_ring(answer: Answer, outcomes: Sequence[_Outcome]) -> None:
    size = len(outcomes)
    for rank, outcome in enumerate(outcomes):
        where = f"{answer.name} on rank {rank} of {size}"
        assert outcome.share is not None, (
            f"{where} must return a tensor as large as a share: the sum of its own."
        )
        sends = [call for call in outcome.calls if call.op == "send"]
        others = {call.op for call in outcome.calls} - {"send", "recv"}
        assert not others, (
            f"{where} called {', '.join(sorted(others))}. Write it from messages: "
            "comm.exchange, or send and recv."
        )
        _check_sends(where, sends, rank, size)
        expected = sum(float(_shares(other, size, answer.seed)[rank][0]) for other in range(size))
        assert all(value == expected for value in outcome.share), (
            f"{where} returned {outcome.share[0]:g}, and the sum of all ranks' share {rank} is "
            f"{expected:g}. {_mistake_in_sum(outcome, rank, size, answer.seed)}"
        )


def _check_sends(where: str, sends: Sequence[Call], rank: int, size: int) -> None:
    following = (rank + 1) % size
    elsewhere = [call.peer for call in sends if call.peer != following]
    assert not elsewhere, (
        f"{where} sent to rank {elsewhere[0]}. In a ring a rank sends to the next one "
        f"only, which is {following}."
    )
    assert len(sends) == size - 1, (
        f"{where} sent {len(sends)} messages. Each share passes through {size - 1} links before all "
        f"ranks have added to it, so a rank sends {size - 1}."
    )
    nbytes = 4 * SHARE
    larger = [call.nbytes for call in sends if call.nbytes != nbytes]
    assert not larger, f"{where} sent a message of {larger[0]} bytes. A share has {nbytes}."


def _mistake_in_sum(outcome: _Outcome, rank: int, size: int, seed: int) -> str:
    value = outcome.share[0] if outcome.share else 0.0
    for share in range(size):
        if value == sum(float(_shares(other, size, seed)[share][0]) for other in range(size)):
            return (
                f"That is the sum of share {share}, which rank {share} is to have. Which share must a rank "
                "send first, so that its own arrives last?"
            )
    own = [float(share[0]) for share in _shares(rank, size, seed)]
    first, before = own.index(outcome.first_sent) if outcome.first_sent in own else None, (rank - 1) % size
    if first not in (None, before):
        return (
            f"It sends share {first} first. What a rank sends first is complete, in the end, on the rank "
            f"before it: here rank {before}, which is to have share {before}."
        )
    for count in range(1, size):
        if value // (1000 * (rank + 1)) == count:
            return f"That is the sum of {count} of {size} parts. Add what arrives to this rank's part."
    return "In each round, add what arrives to this rank's part of that share, and pass the sum on."


# ------------------------------------------------------------------------------ 17.3 bytes of hybrid groups

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
