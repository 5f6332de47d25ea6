"""Chapter 6's graders: a bucket size beside others, calls beside a recording, a hook beside plain Adam."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from zero_ref.backward.overlap import hook_with_zero_step_interleaved
from zero_ref.backward.reduction import gradients_in
from zero_ref.comm import devices
from zero_ref.lab.meter import recording_all_reduce
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.plan.calls import Call, ordinary
from zero_ref.plan.partition import ParamSpec, Partition
from zero_ref.plan.rules import sorted_greedy
from zero_ref.simulator.cluster import cluster
from zero_ref.simulator.models import MODELS
from zero_ref.simulator.scenario import Scenario
from zero_ref.simulator.schedule import calls_of_rank
from zero_ref.simulator.timeline import BucketTimes, bucket_times, simulate
from zero_ref_course import Answer, call_text, exercise, shown
from zero_ref_course._company import on_ranks
from zero_ref_course._rehearsal import HookBucket, rehearse
from zero_ref_course.predictions import prediction

# ------------------------------------------------------------------------------------ 7.1 the bucket size

LINKS = [  # bytes, backward ms, latency ms, GB/s
    (1e9, 100.0, 0.05, 25.0),
    (1e9, 100.0, 2.0, 25.0),
    (100e6, 50.0, 0.5, 1.0),
    (3e9, 1000.0, 10.0, 12.0),
    (10e6, 5.0, 0.02, 10.0),
    (100e6, 400.0, 30.0, 10.0),
]
"""A short latency, a long one, a link too slow to hide, a large model, a small one, one bucket the best."""

COUNTS = [*range(1, 65), *(round(64 * 1.05**i) for i in range(1, 48))]
TOLERANCE = 1.1
MOST_BUCKETS = 20_000


@exercise("overlap.bucket_size")
def bucket_size(answer: Answer) -> str:
    """Bytes of a bucket with which an iteration takes hardly longer than with the best of many sizes."""
    for link in LINKS + answer.drawn(_drawn_link, 4):
        nbytes, _, latency_ms, _ = link
        chosen = answer(*link)
        call = f"{call_text(answer.name, *link)} returned {shown(chosen)}"
        is_size = isinstance(chosen, (int, float)) and math.isfinite(chosen) and chosen > 0
        assert is_size, f"{call}. It must return a number of bytes above 0."
        assert nbytes / chosen <= MOST_BUCKETS, (
            f"{call}. It must return the bytes of one bucket, not MB and not the number of buckets: this "
            f"would make {nbytes / chosen:,.0f} buckets."
        )
        best = min(COUNTS, key=lambda count, link=link: _iteration_ms(nbytes / count, *link))  # type: ignore[misc]
        shortest_ms, taken_ms = _iteration_ms(nbytes / best, *link), _iteration_ms(chosen, *link)
        if taken_ms > TOLERANCE * shortest_ms:
            buckets = _buckets(chosen, *link)
            last_ms = buckets[-1].reduce_ms + buckets[-1].broadcast_ms
            raise AssertionError(
                f"{call}: an iteration takes {taken_ms:.1f} ms, where {nbytes / best / 1e6:.3g} MB take "
                f"{shortest_ms:.1f} ms. "
                + (
                    f"Each of the {2 * len(buckets)} calls pays the latency of {latency_ms:g} ms: the "
                    "buckets are too small."
                    if len(buckets) > best
                    else f"The last bucket is reduced and sent after backward, and nothing hides its "
                    f"{last_ms:.1f} ms: the buckets are too large."
                )
            )
    return f"{len(LINKS)} models and links, each within 10% of the best of {len(COUNTS)} bucket sizes"


def _drawn_link(rng: random.Random) -> tuple[float, float, float, float]:
    return 1e6 * rng.randint(50, 2000), rng.uniform(50, 800), rng.uniform(0.3, 20), rng.uniform(2, 40)


def _buckets(
    size: float, nbytes: float, backward_ms: float, latency_ms: float, gb_per_s: float
) -> list[BucketTimes]:
    # A size rounded down leaves a rest of a few bytes, which nobody means to send by itself.
    size = nbytes / math.ceil(nbytes / size - 1e-3) if nbytes > size else size
    return bucket_times(
        nbytes, size, world_size=8, latency_ms=latency_ms, gb_per_s=gb_per_s, backward_ms=backward_ms
    )


def _iteration_ms(size: float, *link: float) -> float:
    return simulate(_buckets(size, *link), "interleaved").makespan_ms


# ----------------------------------------------------------------------------- 7.2 the calls in their order

RUNS: list[tuple[int, list[int], str | list[list[int]], int]] = [
    (2, [4, 3, 6, 2, 5], "sorted_greedy", 60),
    (2, [16, 20, 12, 8], "even", 400),
    (3, [4, 3, 6, 2], [[5, 0, 3], [], [1, 2, 4]], 40),
    (2, [4, 3, 2], "sorted_greedy", 10**6),
]
"""Ranks, widths of the layers, partition, bytes of a bucket. Whole parameters; parameters that are cut;
owners in no order and a rank without any; one bucket for all."""


@exercise(
    "overlap.interleaved_calls",
    on_ranks=True,
    forbids=(
        "zero_ref.simulator.schedule.schedule",
        "zero_ref.simulator.schedule.calls_of_rank",
    ),
)
def interleaved_calls(answer: Answer) -> str:
    """The calls of an interleaved iteration, as two and three real ranks make them."""
    count = 0
    for world_size, *run in RUNS + answer.drawn(_drawn_run, 2):
        of_rank = on_ranks(_record, world_size, *run)
        partition, buckets, recorded = of_rank[0]
        assert all(calls == recorded for _, _, calls in of_rank), "the ranks made different calls"
        theirs = _as_calls(answer, partition, buckets)
        owned = [[tuple(piece) for piece in slices] for slices in partition.slices_of_rank]
        assert theirs == recorded, (
            f"{world_size} ranks own the slices {owned}, and DDP's buckets are {buckets}: "
            f"{_mistake_in_calls(theirs, recorded, partition, buckets)}"
        )
        count += len(recorded)
    return f"{count} calls in {len(RUNS)} runs on real ranks, in this order on every rank"


def _drawn_run(rng: random.Random) -> tuple[int, list[int], str, int]:
    widths = [rng.randint(2, 20) for _ in range(rng.randint(3, 5))]
    return rng.randint(2, 3), widths, rng.choice(("sorted_greedy", "even")), rng.choice((60, 300))


def _layers(widths: Sequence[int]) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(inputs, outputs) for inputs, outputs in pairwise(widths)]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())))


def _record(
    widths: list[int], strategy: str | list[list[int]], cap_bytes: int
) -> tuple[Partition, list[list[int]], list[Call]]:
    """On a rank: the buckets and the calls of the second interleaved iteration."""
    model = _layers(widths)
    number_of_param = {param: number for number, param in enumerate(model.parameters())}
    ddp = DistributedDataParallel(model, bucket_cap_mb=cap_bytes / 2**20)
    zero = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.Adam, overlap_with_ddp=True, partition=strategy
    )
    calls: list[Call] = []
    buckets: list[list[int]] = []
    zero.collectives.observers.append(calls.append)
    hook = hook_with_zero_step_interleaved(recording_all_reduce(calls), ddp, zero)

    def noting(state, bucket):  # type: ignore[no-untyped-def]
        buckets.append([number_of_param[param] for param in bucket.parameters()])
        return hook(state, bucket)

    ddp.register_comm_hook(None, noting)
    for _ in range(2):
        calls.clear()
        buckets.clear()
        zero.zero_grad()
        ddp(torch.ones(2, widths[0])).sum().backward()
        zero.step()
    return zero.partition, buckets, ordinary(calls)


def _as_calls(answer: Answer, partition: Partition, buckets: list[list[int]]) -> list[Call]:
    returned = answer(partition, [list(bucket) for bucket in buckets])
    are_calls = isinstance(returned, (list, tuple)) and all(
        isinstance(call, tuple) and len(call) == 3 for call in returned
    )
    assert are_calls, (
        f"{answer.name} returned {shown(returned)}. It must return a list of calls, such as "
        'Call("broadcast", 40, 1).'
    )
    return [Call(*call) for call in returned]


def _mistake_in_calls(
    theirs: list[Call], recorded: list[Call], partition: Partition, buckets: list[list[int]]
) -> str:
    params = [ParamSpec(numel) for numel in partition.numels]
    if [call._replace(nbytes=4 * call.nbytes) for call in theirs] == recorded:
        return "the calls are right, but their sizes are elements. Each has 4 bytes."
    if theirs == calls_of_rank(partition, params, 0, buckets=buckets):
        return (
            "all broadcasts come after the last reduction. That is hook_with_zero_step; interleaved, a "
            "bucket is sent as soon as the reduction of the next one was started."
        )
    alone = [calls_of_rank(partition, params, 0, buckets=[bucket]) for bucket in buckets]
    if theirs == [call for calls in alone for call in calls]:
        return (
            "a bucket's broadcasts follow its own reduction at once. But they have to wait until it is done, "
            "so the reduction of the next bucket is started before."
        )
    sums = [[call for call in calls if call.op == "all_reduce"] for calls in (theirs, recorded)]
    if sums[0] == sums[1][::-1] != sums[1]:
        return "the buckets come in the opposite order. buckets[0], with the last layers, is ready first."
    if theirs == recorded[: len(theirs)]:
        return (
            f"{len(theirs)} calls are right, and {recorded[len(theirs)]} should come next. The last bucket "
            "has to be sent too, or its update is lost."
        )
    where = next(i for i, pair in enumerate(zip([*theirs, None], [*recorded, None])) if pair[0] != pair[1])
    should_be = recorded[where] if where < len(recorded) else "the end"
    is_there = theirs[where] if where < len(theirs) else "the end"
    order = (
        " Each is there, but not in its place: within a bucket broadcasts go owner by owner, and an owner's "
        "slices as slices_of_rank has them."
        if sorted(map(repr, theirs)) == sorted(map(repr, recorded))
        else ""
    )
    return f"call {where}, counted from 0, should be {should_be}, and is {is_there}.{order}"


# -------------------------------------------------------------------------------------- 7.3 write the hook


@exercise("overlap.on_bucket", seconds=20.0, may_return_none=True, on_ranks=True)
def on_bucket(answer: Answer) -> str:
    """An interleaved hook: rehearsed with a clock, then in DDP on two real ranks beside plain Adam."""
    for count in (6, 2, 1, *answer.drawn(lambda rng: rng.randint(3, 12), 3)):
        rehearse(answer, [BucketTimes(4, 3, 1, 1.5)] * count)
    for rank, equal in enumerate(on_ranks(_train_beside_plain, 2, answer)):
        assert all(equal), (
            f"with {answer.name} as DDP's hook, rank {rank} of 2 has other parameters than plain Adam after "
            f"iteration {equal.index(False) + 1}. Does it do the same on every rank, and in every iteration?"
        )
    return "as fast as the package's on paper; on two real ranks 3 iterations as plain Adam's, bit for bit"


def _train_beside_plain(answer: Answer) -> list[bool]:
    """On a rank: after each of three iterations, whether the parameters are those of DDP and plain Adam."""
    model, twin = _layers([4, 3, 6, 2, 5]), _layers([4, 3, 6, 2, 5])
    ddp, plain = (DistributedDataParallel(each, bucket_cap_mb=60 / 2**20) for each in (model, twin))
    params = list(model.parameters())
    owners = sorted_greedy([param.numel() for param in params], dist.get_world_size()).owner_of_param
    owner_of_param: dict[torch.Tensor, int] = dict(zip(params, owners))
    optimizers: dict[torch.Tensor, torch.optim.Adam] = {
        param: torch.optim.Adam([param], lr=0.1)
        for param, owner in owner_of_param.items()
        if owner == dist.get_rank()
    }
    optimizer = torch.optim.Adam(twin.parameters(), lr=0.1)
    so_far: list[HookBucket] = []

    def hook(_, bucket):  # type: ignore[no-untyped-def]
        if bucket.index() == 0:
            so_far.clear()
        so_far.append(_RealBucket(bucket, owner_of_param, optimizers))
        answer(list(so_far), bucket.is_last())
        reduced = devices.future(bucket.buffer().device)
        reduced.set_result(bucket.buffer())
        return reduced

    ddp.register_comm_hook(None, hook)
    equal = []
    for iteration in range(3):
        generator = torch.Generator().manual_seed(10 * iteration + dist.get_rank() + answer.seed)
        passages = torch.randn(8, 4, generator=generator)
        optimizer.zero_grad()
        ddp(passages).square().mean().backward()
        plain(passages).square().mean().backward()
        optimizer.step()
        equal.append(all(torch.equal(p, q) for p, q in zip(params, twin.parameters(), strict=True)))
        for param in params:
            param.grad = None
    return equal


class _RealBucket(HookBucket):
    def __init__(
        self,
        bucket: Any,
        owner_of_param: Mapping[torch.Tensor, int],
        optimizers: Mapping[torch.Tensor, torch.optim.Adam],
    ) -> None:
        super().__init__(bucket.index())
        self.flat: torch.Tensor = bucket.buffer()
        self.params: list[torch.Tensor] = bucket.parameters()
        self.owner_of_param, self.optimizers = owner_of_param, optimizers
        self.under_way: list[Any] = []

    def _do(self, action: str) -> None:
        if action == "start_reduction":
            self.flat /= dist.get_world_size()
            self.under_way = [dist.all_reduce(self.flat, async_op=True)]
        elif action == "start_broadcast":
            self.under_way = [
                dist.broadcast(param.detach(), group_src=self.owner_of_param[param], async_op=True)
                for param in self.params
            ]
        elif action == "step":
            for param, gradient in zip(self.params, gradients_in(self.flat, self.params), strict=True):
                if param in self.optimizers:
                    param.grad = gradient.clone()
                    self.optimizers[param].step()
        else:
            for work in self.under_way:
                work.wait()


# --------------------------------------------------------------------------------------------- predictions


@prediction(
    "overlap.tokens",
    "With how many tokens on each GPU does the interleaved hook save more time?",
    choices=("1,024", "4,096", "both the same"),
)
def _saves_more() -> str:
    saved = {sequences: _saved_ms(sequences) for sequences in (1, 4)}
    few, many = (round(saved[sequences]) for sequences in (1, 4))
    return "both the same" if few == many else "1,024" if few > many else "4,096"


def _saved_ms(sequences: int) -> float:
    """Of an iteration of GPT-2 XL on 64 A100, in buckets of 25 MiB, with passages of 1,024 tokens."""
    ways = (
        Scenario(MODELS["gpt2-xl"], cluster("a100-ib"), 64, batch=sequences, way=way, bucket_bytes=25 * 2**20)
        for way in ("plain", "interleaved")
    )
    plain, interleaved = (scenario.run("zero").iteration_ms for scenario in ways)
    return plain - interleaved


@prediction(
    "overlap.bytes",
    "How often does an iteration send as many elements as there are parameters, with reduce_to_owners?",
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
