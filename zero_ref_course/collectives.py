"""Graders of chapter 2, collectives: what does a collective cost?"""

from __future__ import annotations

import math
import random
from typing import NamedTuple

import torch

from zero_ref.comm.backend import as_collectives
from zero_ref.comm.collectives import Collectives, PendingCall
from zero_ref.lab.meter import bytes_sent_by
from zero_ref.simulator.traffic import traffic
from zero_ref_course import Answer, ExerciseFailed, call_text, exercise, shown
from zero_ref_course._company import on_ranks, on_virtual_ranks
from zero_ref_course.predictions import prediction

# ---------------------------------------------------------------------------------------- a ring all-reduce


class _Neighbours:
    """Sends to the next rank and receives from the previous one for an answer, and records all messages."""

    def __init__(self, comm: Collectives) -> None:
        self.comm, self.sent, self.under_way = comm, list[int](), list[PendingCall]()
        self.received = list[list[float]]()
        self.next, self.previous = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size

    def send(self, chunk: torch.Tensor) -> None:
        assert isinstance(chunk, torch.Tensor), f"send takes a tensor, not {shown(chunk)}."
        values = chunk.detach().to(torch.float64).flatten().clone()  # the reader may change it at once
        self.sent.append(values.numel())
        for tensor in (torch.tensor([values.numel()]), values):
            self.under_way.append(self.comm.send(tensor, self.next))

    def recv(self) -> torch.Tensor:
        numel = torch.zeros(1, dtype=torch.int64)
        self.comm.recv(numel, self.previous).wait()
        values = torch.empty(int(numel.item()), dtype=torch.float64)
        self.comm.recv(values, self.previous).wait()
        self.received.append(values[:2].tolist())
        return values

    def finish(self) -> None:
        for work in self.under_way:
            work.wait()


class _Outcome(NamedTuple):
    """The result on one rank: its chunks, the number of elements in each message that it sent, and the first
    two elements of each message that it received, which tell whose parts of which chunk it has."""

    chunks: list[list[float]]
    sent: list[int]
    received: list[list[float]]


def _part(rank: int, sizes: list[int], seed: int) -> list[torch.Tensor]:
    """A rank's tensor, in chunks: the first element of a chunk tells the rank, the others tell the chunk.

    With a seed no rank can know another rank's tensor.
    """
    secret = random.Random(f"{seed} {rank}").randrange(10**6) if seed else 0
    return [
        torch.tensor([10.0**rank, *[100.0 * (chunk + 1) + rank + secret] * (size - 1)], dtype=torch.float64)
        for chunk, size in enumerate(sizes)
    ]


def _reduced(comm: Collectives, answer: Answer, sizes: list[int]) -> _Outcome:
    chunks = _part(comm.rank, sizes, answer.seed)
    neighbours = _Neighbours(comm)
    arguments = (comm.rank, comm.world_size, chunks, neighbours.send, neighbours.recv)
    call = call_text(answer.name, *arguments)
    try:
        answer(*arguments)
    except ExerciseFailed as failure:  # chunks and functions would fill lines, and tell nothing
        short = f"{answer.name}(rank={comm.rank}, world_size={comm.world_size}, ...)"
        hint = ". Chunk numbers count modulo N." if "IndexError" in str(failure) else ""
        raise ExerciseFailed(str(failure).replace(call, short) + hint) from None
    neighbours.finish()
    return _Outcome([chunk.flatten().tolist() for chunk in chunks], neighbours.sent, neighbours.received)


SIZES = [[3, 3, 3], [4, 4], [4, 4, 4, 4], [5, 5, 4, 4], [3] * 8, [6]]
"""Elements of each chunk, with as many ranks as chunks; one of the tensors does not divide evenly. Three
ranks come first: on two, the one message of the first half does not show whether its receiver adds."""

REAL = [100_000] * 4
"""The sizes on real ranks: chunks of 800 kB, so large that the headers of packets do not count."""


@exercise("collectives.ring_all_reduce", seconds=20.0, may_return_none=True, on_ranks=True)
def ring_all_reduce(answer: Answer) -> str:
    """Check the sums and the bytes of a ring on virtual ranks; then on real ones, counted by the kernel."""
    for sizes in SIZES + answer.drawn(lambda rng: [rng.randint(2, 7)] * rng.randint(2, 7), 3):
        _check_ring(answer, sizes, _on_virtual_ranks(answer, sizes))
    outcomes = on_ranks(_reduced_here, len(REAL), answer, REAL)
    _check_ring(answer, REAL, [outcome for outcome, _ in outcomes])
    share = _share_sent([nbytes for _, nbytes in outcomes], 8 * sum(REAL))
    counted = "" if share is None else f"; on 4 real ones each sent {share:.2f} times its tensor"
    return f"every sum, on 1 to {max(map(len, SIZES))} ranks{counted}"


def _reduced_here(answer: Answer, sizes: list[int]) -> tuple[_Outcome, int | None]:
    outcomes: list[_Outcome] = []
    sent = bytes_sent_by(lambda: outcomes.append(_reduced(as_collectives(None), answer, sizes)))
    return outcomes[-1], sent


def _share_sent(sent: list[int | None], payload: int) -> float | None:
    counted = [nbytes for nbytes in sent if nbytes is not None]
    expected = traffic("all_reduce", payload, len(sent)).busiest_bytes
    assert all(math.isclose(nbytes, expected, rel_tol=0.01) for nbytes in counted), (
        f"the kernel counted {max(counted):,} bytes from one rank, and the messages have {expected:,.0f}. "
        "Is there another call than `send` and `recv`?"
    )
    return max(counted) / payload if counted else None


def _on_virtual_ranks(answer: Answer, sizes: list[int]) -> list[_Outcome]:
    return on_virtual_ranks(
        _reduced,
        len(sizes),
        answer,
        sizes,
        waiting=lambda _: (
            f"on {len(sizes)} ranks a rank waits in recv() for a message that nobody sends. In each "
            "round every rank sends, and then receives: if all wait first, nobody sends. There are "
            "2(N - 1) rounds, and none on one rank."
        ),
    )


def _check_ring(answer: Answer, sizes: list[int], outcomes: list[_Outcome]) -> None:
    n = len(sizes)
    parts = [_part(rank, sizes, answer.seed) for rank in range(n)]
    sums = [sum(of_rank[chunk] for of_rank in parts).tolist() for chunk in range(n)]  # type: ignore[union-attr]
    right = [[got == want for got, want in zip(outcome.chunks, sums)] for outcome in outcomes]
    for rank, outcome in enumerate(outcomes):
        assert [len(chunk) for chunk in outcome.chunks] == sizes, (
            f"{answer.name} leaves chunks of {[len(chunk) for chunk in outcome.chunks]} elements on rank "
            f"{rank}; they had {sizes}. Put each sum into its chunk."
        )
    rounds = min(len(outcome.sent) for outcome in outcomes)
    if rounds < 2 * (n - 1) and all(sum(of_rank) == 1 for of_rank in right):
        raise AssertionError(
            f"on {n} ranks each rank ends with one finished chunk. That is a reduce-scatter: the finished "
            "chunks have to go round once more, N - 1 rounds without adding."
        )
    for rank, of_rank in enumerate(right):
        for chunk, is_right in enumerate(of_rank):
            if not is_right:
                found = outcomes[rank].chunks[chunk]
                raise AssertionError(
                    f"on {n} ranks, chunk {chunk} of rank {rank} {_mistake_in_sum(found, n)} "
                    + _mistake_in_round(outcomes, sizes, answer.seed)
                )
    busiest = max((outcome.sent for outcome in outcomes), key=sum)
    most, payload, rounds = sum(busiest), sum(sizes), 2 * (n - 1)
    assert most <= rounds * max(sizes), (
        f"the sums are right, but on {n} ranks one rank sends {most} elements, {most / payload:.2f} times "
        f"its tensor, in {len(busiest)} messages. A ring has 2(N - 1) = {rounds}, one chunk each: "
        f"{rounds / n:.2f} times the tensor."
    )


def _mistake_in_sum(found: list[float], world_size: int) -> str:
    """Describe whose parts are in a chunk; the digits of its first element tell."""
    digits = f"{int(found[0]):0{world_size}d}"[::-1] if 0 < found[0] < 10**world_size else ""
    missing = [rank for rank, digit in enumerate(digits) if digit == "0"]
    repeated = [rank for rank, digit in enumerate(digits) if digit > "1"]
    if repeated:
        return f"has the part of rank {repeated[0]} more than once."
    if missing:
        return f"lacks the part of rank {missing[0]}."
    return "is not the sum of the ranks' parts: another chunk is mixed in."


def _mistake_in_round(outcomes: list[_Outcome], sizes: list[int], seed: int) -> str:
    """Describe which half of the rounds goes wrong; the messages tell."""
    n = len(sizes)
    parts = [_part(rank, sizes, seed) for rank in range(n)]
    if all(outcome.chunks == [chunk.tolist() for chunk in own] for outcome, own in zip(outcomes, parts)):
        return "The list is as it was: put the sums into it. What the function returns is not read."
    for rank, outcome in enumerate(outcomes):
        # In round r, from 1, comes chunk rank - r, with the parts of the r ranks before this one.
        right = [
            torch.stack([parts[rank - back][rank - r][:2] for back in range(1, r + 1)]).sum(0).tolist()
            for r in range(1, n)
        ]
        if outcome.received[: n - 1] != right:
            return (
                "In the first half each rank sends the chunk of its own number first, and then, round by "
                "round, the chunk to which it has just added."
            )
    rounds = max(len(outcome.received) for outcome in outcomes)
    if rounds > 2 * (n - 1):
        return f"Each half has N - 1 = {n - 1} rounds; yours have {rounds} together."
    return (
        "The first half is right. In the second, each rank first sends the chunk that it has just finished, "
        "and puts what comes into the list without adding."
    )


# -------------------------------------------------------------------------------------------- small or large

LINKS = [
    ("all_reduce", 64, 30.0, 1.25),
    ("all_reduce", 8, 3.0, 450.0),
    ("all_reduce", 2, 3.0, 450.0),
    ("all_gather", 8, 10.0, 50.0),
    ("reduce_scatter", 16, 100.0, 2.5),
    ("broadcast", 4, 10.0, 25.0),
    ("exchange", 4, 10.0, 25.0),
    ("send", 2, 10.0, 25.0),
]
"""Operation, ranks, latency in microseconds, 10^9 bytes a second. The first case has not 8 ranks, because
there two mistakes, gigabits for gigabytes and a single message, give the same payload."""


@exercise("collectives.small_or_large")
def small_or_large(answer: Answer) -> str:
    """Check the payload for which latency and bandwidth take the same time, on several links."""
    for op, world_size, latency_us, gb_per_s in LINKS + answer.drawn(_drawn_link):
        arguments = (op, world_size, latency_us, gb_per_s)
        found = answer(*arguments)
        call = f"{call_text(answer.name, *arguments)} returned {shown(found)}"
        is_size = isinstance(found, (int, float)) and math.isfinite(found) and found > 0
        assert is_size, f"{call}. It must return a number of bytes above 0."
        load = traffic(op, found, world_size)
        latency_ms, bytes_ms = load.rounds * latency_us / 1e3, load.busiest_bytes / (gb_per_s * 1e6)
        if not math.isclose(latency_ms, bytes_ms, rel_tol=1e-3):
            raise AssertionError(
                f"{call}. With that payload the {load.rounds} rounds take {latency_ms:.4g} ms, and the "
                f"{load.busiest_bytes:,.0f} bytes of the busiest rank {bytes_ms:.4g} ms. "
                + _mistake_in_size(bytes_ms / latency_ms, found, latency_us * gb_per_s * 1e3, load.rounds)
            )
    return f"{len(LINKS)} collectives and links"


def _drawn_link(rng: random.Random) -> tuple[str, int, float, float]:
    op = rng.choice(("all_reduce", "all_gather", "reduce_scatter", "broadcast"))
    return op, rng.randint(3, 99), rng.uniform(1, 200), rng.uniform(0.5, 500)


def _mistake_in_size(times: float, found: float, of_one_message: float, rounds: int) -> str:
    for power in (3, 6, 9):
        if math.isclose(times, 10**power, rel_tol=1e-3) or math.isclose(times, 10**-power, rel_tol=1e-3):
            return "That is a power of 1,000 off: a microsecond is 10^-6 s, a gigabyte 10^9 bytes."
    if math.isclose(found, of_one_message, rel_tol=1e-3):
        return (
            "That is α times β: either one message alone was counted, or the bytes of all ranks together "
            "(`total_bytes`) where the time depends on those of the busiest rank (`busiest_bytes`)."
        )
    if math.isclose(found, of_one_message * rounds, rel_tol=1e-3):
        return "All rounds are counted, but the busiest rank does not carry one payload."
    if math.isclose(times, 8, rel_tol=1e-3) or math.isclose(times, 1 / 8, rel_tol=1e-3):
        return "That is a factor of 8 off: `gb_per_s` counts gigabytes, not gigabits."
    return "Both must take the same time: `traffic` knows the rounds and the bytes of the busiest rank."


# ------------------------------------------------------------------------------------------ predictions


@prediction(
    "collectives.ring", "A ring all-reduce of 1 GB on eight ranks: how much does each rank send?", unit="GB"
)
def _sent_on_a_ring() -> float:
    return traffic("all_reduce", 1.0, 8).busiest_bytes


@prediction(
    "collectives.second_way",
    "A reduce-scatter and an all-gather: how many bytes do they send, compared with plain data parallel "
    "training?",
    choices=("half of them", "the same", "one and a half times as many"),
)
def _second_way() -> str:
    both = sum(traffic(op, 1, 8).total_bytes for op in ("reduce_scatter", "all_gather"))
    beside = both / traffic("all_reduce", 1, 8).total_bytes
    return {0.5: "half of them", 1.0: "the same", 1.5: "one and a half times as many"}[beside]


FIVE = ("all_reduce", "broadcast", "all_gather", "exchange", "reduce_scatter")


@prediction("collectives.impostor", "Which collective of Gloo sends more than theory says?", choices=FIVE)
def _impostor() -> str:
    return max(
        FIVE, key=lambda op: traffic(op, 1, 8, backend="gloo").total_bytes / traffic(op, 1, 8).total_bytes
    )
