"""Graders of the chapter on overlap: reductions in time, and a hook beside Adam."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from zero_ref.backward.reduction import gradients_in
from zero_ref.comm import devices
from zero_ref.comm.backend import as_collectives
from zero_ref.comm.collectives import Collectives
from zero_ref.plan.rules import sorted_greedy
from zero_ref.simulator.cluster import cluster
from zero_ref.simulator.models import MODELS
from zero_ref.simulator.operations import COMPUTE, NETWORK
from zero_ref.simulator.scenario import Scenario
from zero_ref.simulator.timeline import BucketTimes, Event, Timeline, simulate
from zero_ref_course import Answer, exercise, in_words, shown
from zero_ref_course._cases import list_of, named
from zero_ref_course._company import on_ranks, on_virtual_ranks
from zero_ref_course._pictures import timelines
from zero_ref_course._rehearsal import HookBucket, rehearse
from zero_ref_course.predictions import prediction

# ------------------------------------------------------------------------- reduce while backward goes on

BACKWARD_MS, REDUCE_MS = 4.0, 3.0
"""The times of a layer's backward and of its gradient's reduction on the rehearsal's clock."""

NUMEL = 5


class _Watched:
    """A rank's network with a clock. A tensor has no values until the answer has waited for its reduction."""

    def __init__(self, comm: Collectives) -> None:
        self._comm = comm
        self.now_ms = self.network_free_ms = 0.0
        self.events: list[Event] = []
        self.left: set[int] = set()
        self.other_calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._comm, name)
        if not callable(value):
            return value

        def noted(*args: Any, **kwargs: Any) -> Any:
            self.other_calls.append(name)
            return value(*args, **kwargs)

        return noted

    @property
    def rank(self) -> int:
        return self._comm.rank

    @property
    def world_size(self) -> int:
        return self._comm.world_size

    def backward(self, number: int, seed: int) -> torch.Tensor:
        start_ms, self.now_ms = self.now_ms, self.now_ms + BACKWARD_MS
        self.events.append(Event(COMPUTE, "backward", number, start_ms, self.now_ms))
        return _layer_gradient(self.rank, number, seed)

    def all_reduce(self, tensor: torch.Tensor) -> _Reduction:
        number = sum(event.lane == NETWORK for event in self.events)
        start_ms = max(self.now_ms, self.network_free_ms)
        self.network_free_ms = start_ms + REDUCE_MS
        self.events.append(Event(NETWORK, "reduce", number, start_ms, self.network_free_ms))
        values = tensor.detach().clone()
        self._comm.all_reduce(values).wait()
        tensor.detach().fill_(torch.nan)
        self.left.add(number)
        return _Reduction(self, number, tensor, values, self.network_free_ms)


class _Reduction:
    """An all-reduce that was started."""

    def __init__(
        self, of: _Watched, number: int, tensor: torch.Tensor, values: torch.Tensor, done_ms: float
    ) -> None:
        self.of, self.number, self.tensor, self.values, self.done_ms = of, number, tensor, values, done_ms

    def wait(self) -> None:
        self.of.now_ms = max(self.of.now_ms, self.done_ms)
        if self.number in self.of.left:
            self.of.left.remove(self.number)
            self.tensor.detach().copy_(self.values)


class _Reduced(NamedTuple):
    """The value that a rank returned, its timeline, and the reductions that nobody has waited for."""

    value: Any
    timeline: Timeline
    left: set[int]
    other_calls: list[str]


@exercise("overlap.reduce_as_ready", seconds=20.0, on_ranks=True, draws=timelines)
def reduce_as_ready(answer: Answer) -> str:
    """Check gradients averaged during backward: with a clock on virtual ranks, then on real ones."""
    for size, count in [(2, 4), (3, 2), (2, 1), (1, 3), *answer.drawn(_drawn_backward, 3)]:
        of_ranks = on_virtual_ranks(
            _rehearse_backward,
            size,
            answer,
            count,
            waiting=lambda why, n=size: (  # type: ignore[misc]
                f"on {n} ranks, ranks wait for each other: {why} Every rank reduces the gradient of every "
                "layer, in the order of backward."
            ),
        )
        answer.shows(of_ranks[0].timeline, _as_soon_as_ready(count))
        for rank, found in enumerate(of_ranks):
            _check_reduced(answer, f"on rank {rank} of {size}, with {count} layers,", found, size, count)
    for rank, value in enumerate(on_ranks(_reduce_on_a_real_rank, 2, answer, 4)):
        _check_means(answer, f"on real rank {rank} of 2,", value, 2, 4)
    return "every average, each reduction started before the next layer computes; also on two real ranks"


def _drawn_backward(rng: random.Random) -> tuple[int, int]:
    return rng.randint(2, 4), rng.randint(1, 7)


def _layer_gradient(rank: int, number: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + 10 * rank + number)
    return torch.randn(NUMEL, generator=generator)


def _rehearse_backward(comm: Collectives, answer: Answer, count: int) -> _Reduced:
    watched = _Watched(comm)
    backward = [partial(watched.backward, number, answer.seed) for number in range(count)]
    value = _called(answer, backward, watched)
    return _Reduced(value, Timeline(tuple(watched.events)), watched.left, watched.other_calls)


def _reduce_on_a_real_rank(answer: Answer, count: int) -> Any:
    comm = as_collectives(None)
    backward = [partial(_layer_gradient, comm.rank, number, answer.seed) for number in range(count)]
    return _called(answer, backward, comm)


def _called(answer: Answer, parts: Sequence[Callable[[], torch.Tensor]], comm: Any) -> Any:
    backward = [_function_of(part) for part in parts]
    with in_words("backward, comm", answer, backward, comm):
        return answer(backward, comm)


def _function_of(part: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    def layer() -> torch.Tensor:
        """Compute the gradient of the next layer, and return it."""
        return part()

    return layer


def _as_soon_as_ready(count: int) -> Timeline:
    times = [BucketTimes(BACKWARD_MS, REDUCE_MS, 0.0, 0.0)] * count
    both = ("backward", "reduce")
    return Timeline(tuple(event for event in simulate(times, "plain").events if event.label in both))


def _check_reduced(answer: Answer, where: str, found: _Reduced, size: int, count: int) -> None:
    events = found.timeline.events
    order = [event.label for event in events]
    assert not found.other_calls, (
        f"{where} {answer.name} calls {found.other_calls[0]}. Use all_reduce, once for each layer."
    )
    assert order.count("backward") == count, (
        f"{where} {answer.name} computes {order.count('backward')} gradients. Each layer is computed once."
    )
    assert order.count("reduce") == count, (
        f"{where} {answer.name} starts {order.count('reduce')} reductions. Start one for each layer as soon "
        "as its gradient is there; a sum of all at the end hides behind nothing."
    )
    assert not found.left, (
        f"{where} {answer.name} returns while the reduction of gradient {min(found.left)} is under way. "
        "Call .wait() on what all_reduce returned, before you return."
    )
    _check_means(answer, where, found.value, size, count)
    possible_ms = _as_soon_as_ready(count).makespan_ms
    if found.timeline.makespan_ms > possible_ms:
        late = order[:count] == ["backward"] * count and count > 1
        raise AssertionError(
            f"{where} the gradients are right, and after {found.timeline.makespan_ms:g} ms, where "
            f"{possible_ms:g} ms are possible. "
            + (
                "Nothing is sent before backward has ended. Start a layer's reduction before you compute the "
                "next layer."
                if late
                else "It waits for a reduction before it computes the next layer, so backward stands still "
                "while the network works. Keep what all_reduce returns, and wait at the end."
            )
        )


def _check_means(answer: Answer, where: str, value: Any, size: int, count: int) -> None:
    are_tensors = list_of(lambda one: isinstance(one, torch.Tensor) and one.numel() == NUMEL, count)(value)
    assert are_tensors, (
        f"{where} {answer.name} returned {shown(value)}. It must return a list: the averaged gradient of "
        "each layer, in the order of backward."
    )
    for number, theirs in enumerate(value):
        of_ranks = torch.stack([_layer_gradient(rank, number, answer.seed) for rank in range(size)])
        if torch.allclose(theirs.detach(), of_ranks.mean(0), rtol=1e-5, atol=1e-6):
            continue
        mistakes = {
            "It was used before its reduction was over: until wait() returns a tensor belongs to the "
            "call.": bool(theirs.isnan().any()),
            f"It is the sum over the {size} ranks: divide by their number.": (
                torch.allclose(theirs, of_ranks.sum(0), rtol=1e-5)
            ),
            "It is one rank's own gradient, not reduced.": any(
                torch.allclose(theirs, one, rtol=1e-5) for one in of_ranks
            ),
        }
        raise AssertionError(
            f"{where} gradient {number} is not the mean over the ranks. "
            + named(mistakes, "A tensor must not be changed from the start of its reduction to its end.")
        )


def _layers(widths: Sequence[int]) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(inputs, outputs) for inputs, outputs in pairwise(widths)]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())))


# ------------------------------------------------------------------------------------------ write the hook


@exercise("overlap.on_bucket", seconds=20.0, may_return_none=True, on_ranks=True, draws=timelines)
def on_bucket(answer: Answer) -> str:
    """Check an interleaved hook: rehearsed with a clock, then in DDP on two real ranks against plain Adam."""
    for count in (6, 2, 1, *answer.drawn(lambda rng: rng.randint(3, 12), 3)):
        rehearse(answer, [BucketTimes(4, 3, 1, 1.5)] * count)
    for rank, equal in enumerate(on_ranks(_train_beside_plain, 2, answer)):
        assert all(equal), (
            f"with {answer.name} as DDP's hook, rank {rank} of 2 has other parameters than plain Adam after "
            f"iteration {equal.index(False) + 1}. Does it do the same on every rank, and in every iteration?"
        )
    return "as fast as the package's on paper; on two real ranks 3 iterations as plain Adam's, bit for bit"


def _train_beside_plain(answer: Answer) -> list[bool]:
    """On a rank: whether the parameters equal those of DDP and plain Adam, after each of three iterations."""
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
    "overlap.paper",
    "The four buckets under the interleaved hook: how long does the iteration take?",
    unit="ms",
)
def _on_paper() -> float:
    return simulate(
        [BucketTimes(backward_ms=4, reduce_ms=3, step_ms=1, broadcast_ms=1.5)] * 4, "interleaved"
    ).makespan_ms


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
    """The ms that interleaving saves per iteration of GPT-2 XL on 64 A100: 25 MiB buckets, 1,024 tokens."""
    ways = (
        Scenario(MODELS["gpt2-xl"], cluster("a100-ib"), 64, batch=sequences, way=way, bucket_bytes=25 * 2**20)
        for way in ("plain", "interleaved")
    )
    plain, interleaved = (scenario.run("zero").iteration_ms for scenario in ways)
    return plain - interleaved
