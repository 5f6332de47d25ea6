"""Graders of the chapter on sharded gradients: one order of buckets, a mean over unequal passes."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import permutations, starmap
from typing import NamedTuple

import torch

from zero_ref.comm.backend import as_collectives
from zero_ref.comm.collectives import Collectives
from zero_ref.lab.meter import recording
from zero_ref.plan.calls import Call
from zero_ref.simulator.cluster import cluster
from zero_ref.simulator.ledger import nbytes_of
from zero_ref.simulator.models import shapes, specs
from zero_ref.simulator.play import play
from zero_ref.simulator.price import Workload
from zero_ref.simulator.schedule import schedule
from zero_ref_course import Answer, exercise, in_words, shown
from zero_ref_course._cases import Form, check_cases, is_whole, list_of, named
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


# ------------------------------------------------------------------------------ a mean over all tokens

TOKENS = [
    [[1, 6, 3], [2, 2, 4], [9, 1, 5]],
    [[4, 1], [3, 8]],
    [[2, 2], [2, 2]],  # every mean is right here
    [[5], [1], [2], [7]],
    [[3, 1, 4]],
]
"""The tokens of each pass of each rank. The first three ranks show most mistakes."""

SHARE = 4
"""The elements of a rank's share."""


class _Outcome(NamedTuple):
    """The share that a rank returned, and the calls that it made."""

    share: list[float] | None
    calls: list[Call]


@exercise("sharded.token_mean", seconds=20.0, on_ranks=True)
def token_mean(answer: Answer) -> str:
    """Check the gradient of the mean over all tokens, on virtual ranks and on three real ones."""
    cases = [*TOKENS, *answer.drawn(_drawn_tokens, 3)]
    for tokens in cases:
        outcomes = on_virtual_ranks(
            _averaged,
            len(tokens),
            answer,
            tokens,
            waiting=lambda said: f"ranks wait for each other: {said} All ranks make the same calls.",
        )
        _check_mean(answer, tokens, outcomes)
    _check_mean(answer, TOKENS[0], on_ranks(_averaged_here, 3, answer, TOKENS[0]))
    return f"{len(cases)} updates on 1 to 4 ranks, and one of them on three real ranks"


def _drawn_tokens(rng: random.Random) -> list[list[int]]:
    passes = rng.randint(1, 4)
    return [[rng.randint(1, 20) for _ in range(passes)] for _ in range(rng.randint(1, 4))]


def _passes_of(rank: int, tokens: Sequence[Sequence[int]], seed: int) -> list[tuple[torch.Tensor, int]]:
    """Each element tells its share, its pass and its rank; with a seed, the answer cannot know them."""
    secret = random.Random(f"{seed} {rank}").randrange(100) if seed else 0
    base = torch.arange(len(tokens)).repeat_interleave(SHARE) * 1000.0
    return [(base + 60 * i + 8 * 2.0**rank + secret, count) for i, count in enumerate(tokens[rank])]


def _averaged_here(answer: Answer, tokens: Sequence[Sequence[int]]) -> _Outcome:
    return _averaged(as_collectives(None), answer, tokens)


def _averaged(comm: Collectives, answer: Answer, tokens: Sequence[Sequence[int]]) -> _Outcome:
    passes = _passes_of(comm.rank, tokens, answer.seed)
    said = f"comm, {len(passes)} passes of {', '.join(map(str, tokens[comm.rank]))} tokens"
    with recording(comm, checks=True) as calls, in_words(said, answer, comm, passes):
        share = answer(comm, passes)
    is_share = isinstance(share, torch.Tensor) and share.numel() == SHARE
    return _Outcome(share.detach().flatten().tolist() if is_share else None, list(calls))


def _check_mean(answer: Answer, tokens: Sequence[Sequence[int]], outcomes: Sequence[_Outcome]) -> None:
    of_ranks = [
        [(g.view(-1, SHARE), count) for g, count in _passes_of(rank, tokens, answer.seed)]
        for rank in range(len(tokens))
    ]
    flat = [pair for passes in of_ranks for pair in passes]
    in_all = sum(count for _, count in flat)
    right = _weighed(flat) / in_all
    mistakes = {
        "That is the mean of all passes, as if each had as many tokens. Weigh each gradient by its tokens.": (
            torch.stack([g for g, _ in flat]).mean(0)
        ),
        "That weighs the passes of a rank, and then takes the ranks as equal. Divide once, by the tokens of "
        "all ranks.": torch.stack([_weighed(one) / sum(n for _, n in one) for one in of_ranks]).mean(0),
        "That is the sum over all tokens. Divide by their number.": right * in_all,
        "That is the sum of all passes' means.": torch.stack([g for g, _ in flat]).sum(0),
    }
    for rank, outcome in enumerate(outcomes):
        where = f"{answer.name} on rank {rank} of {len(tokens)}, whose passes have {tokens[rank]} tokens,"
        assert outcome.share is not None, (
            f"{where} must return a tensor of {SHARE} elements: this rank's share of the gradient."
        )
        value, expected = outcome.share[0], float(right[rank][0])
        assert all(math.isclose(one, expected, rel_tol=1e-5) for one in outcome.share), (
            f"{where} returned {value:g} and it should be {expected:g}. "
            + named(
                {text: _is_near(value, one[rank]) for text, one in mistakes.items()}
                | {
                    "That divides by this rank's own tokens. Add up those of all ranks.": _is_near(
                        value, right[rank] * in_all / sum(tokens[rank])
                    ),
                    "That is the share of another rank.": any(_is_near(value, one) for one in right),
                },
                "Multiply each gradient by its tokens, add up, and divide by the tokens of all ranks.",
            )
        )
        _check_calls(where, outcome.calls, len(tokens))


def _weighed(passes: Sequence[tuple[torch.Tensor, int]]) -> torch.Tensor:
    return torch.stack([gradient * count for gradient, count in passes]).sum(0)


def _is_near(value: float, share: torch.Tensor) -> bool:
    return math.isclose(value, float(share[0]), rel_tol=1e-5)


def _check_calls(where: str, calls: Sequence[Call], world_size: int) -> None:
    """A gradient goes to its owners once, and beside it a few numbers."""
    whole = 4 * SHARE * world_size
    large = [call.op for call in calls if call.nbytes >= whole]
    if world_size > 1 and large != ["reduce_shares"]:
        raise AssertionError(
            f"{where} sent whole gradients by {', '.join(large) or 'no call'}. One comm.reduce_shares is "
            "enough: add the passes up first. The number of tokens is one number, for comm.all_reduce."
        )


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
