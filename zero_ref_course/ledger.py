"""Chapter 1's graders: the ranks that a run needs, and the floor of the memory."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import starmap

import torch

from zero_ref.lab import ranks
from zero_ref.lab.meter import HeldBytes, held_bytes
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.plan.partition import ParamSpec
from zero_ref.simulator.ledger import FP32_16, format_bytes, ledger
from zero_ref.simulator.models import shapes
from zero_ref.simulator.schedule import schedule
from zero_ref_course import Answer, exercise
from zero_ref_course._cases import Form, check_cases, is_number, is_whole, named
from zero_ref_course.predictions import prediction

# ---------------------------------------------------------------------------- how many ranks does it take

Run = tuple[int, int, int, tuple[int, int, int]]
"""Parameters, room in bytes, stage, and the bytes of each parameter: itself, its gradient, its state."""

MIXED, FP32 = (2, 2, 12), (4, 4, 8)
BILLION = 10**9

RUNS: list[Run] = [
    (7_500_000_000, 80 * BILLION, 1, MIXED),
    (7_500_000_000, 40 * BILLION, 1, MIXED),
    (7_500_000_000, 40 * BILLION, 2, MIXED),
    (7_500_000_000, 40 * BILLION, 3, MIXED),
    (7_500_000_000, 31_406_250_000, 1, MIXED),  # exactly, on 64
    (7_500_000_000, 31_406_249_999, 1, MIXED),
    (7_500_000_000, 30 * BILLION, 1, MIXED),  # exactly what is not divided
    (7_500_000_000, 20 * BILLION, 1, MIXED),
    (7_500_000_000, 120 * BILLION, 0, MIXED),
    (7_500_000_000, 119 * BILLION, 0, MIXED),
    (7_500_000_000, 200 * BILLION, 2, MIXED),
    (7_500_000_000, 70 * BILLION, 1, FP32),
    (7_500_000_000, 60 * BILLION, 1, FP32),
    (70 * BILLION, 160 * BILLION, 2, (2, 4, 12)),
    (70 * BILLION, 80 * BILLION, 2, (2, 4, 12)),
    (10**12, 15_625_000_000, 3, MIXED),
    (10**12, 80 * BILLION, 3, (2, 4, 12)),
    (1001, 4500, 1, MIXED),
]
"""Runs that fit to the byte, runs that miss by one byte, runs that fit on no number of ranks."""

RANKS_OR_NONE = Form(
    lambda found: found is None or is_whole(found), "It must return a whole number of ranks, or None."
)


@exercise("ledger.ranks_to_fit", may_return_none=True)
def ranks_to_fit(answer: Answer) -> str:
    """Check the fewest ranks on which a run fits, or that no number is enough."""
    assert any(answer(*run) is not None for run in RUNS), (
        f"{answer.name} returns None for every run. Does the function end in a `return`?"
    )
    runs = RUNS + answer.drawn(_drawn_run)
    check_cases(
        answer,
        runs,
        starmap(_fewest, runs),
        RANKS_OR_NONE.returned_by,
        mistakes=_MISTAKES,
        # Whether one rank is looked at by itself is another matter than what is divided.
        tells=lambda theirs, right: theirs != right or right != 1,
        otherwise=_what_it_overlooks,
    )
    return f"{len(runs)} runs, some of which fit on no number of ranks"


def _drawn_run(rng: random.Random) -> Run:
    numel, stage = rng.randint(10**6, 10**11), rng.randint(0, 3)
    nbytes = rng.choice((MIXED, FP32, (2, 4, 12), (2, 4, 14)))
    whole, divided = _parts(numel, stage, nbytes)
    return numel, whole + divided // rng.randint(1, 300) + rng.randint(-1, 1), stage, nbytes


def _parts(numel: int, stage: int, nbytes: Sequence[int]) -> tuple[int, int]:
    """The bytes that every rank has, and the bytes that the ranks share."""
    divided = sum(part for part, since in zip(nbytes, (3, 2, 1)) if stage >= since)
    return numel * (sum(nbytes) - divided), numel * divided


def _fewest(numel: int, room: int, stage: int, nbytes: Sequence[int]) -> int | None:
    return _fewest_of(room, *_parts(numel, stage, nbytes))


def _fewest_of(room: int, whole: int, divided: int) -> int | None:
    if whole + divided <= room:
        return 1
    left = room - whole
    return -(-divided // left) if divided and left > 0 else None


def _what_it_overlooks(
    theirs: int | None, right: int | None, numel: int, room: int, stage: int, nbytes: Sequence[int]
) -> str:
    whole, divided = _parts(numel, stage, nbytes)
    if theirs is None:
        return (
            f"{right} ranks have {_in_print(whole + divided / (right or 1))} each, and that is not more than "
            f"{_in_print(room)}."
        )
    if theirs < 1:
        return "That is no number of ranks. What is not divided fills the room: return None."
    if right is None:
        return (
            f"Each of {theirs} ranks has {_exactly(whole + divided / theirs)}: however many there are, "
            f"{_exactly(whole)} of it are on every rank. No number is enough: return None."
        )
    if theirs > right:
        return f"It fits on {right} already: {_exactly(whole + divided / right)} each."
    return (
        f"Each of {theirs} ranks has {_exactly(whole + divided / theirs)}, and there is room for "
        f"{_exactly(room)}."
    )


def _one_part(numel: int, stage: int, nbytes: Sequence[int]) -> tuple[int, int]:
    divided = (0, *reversed(nbytes))[stage]
    return numel * (sum(nbytes) - divided), numel * divided


def _rounded_down(room: int, whole: int, divided: int) -> int | None:
    right = _fewest_of(room, whole, divided)
    return right if right in (None, 1) else divided // (room - whole)


def _one_too_many(room: int, whole: int, divided: int) -> int | None:
    if not divided:
        return _fewest_of(room, whole, divided)
    return divided // (room - whole) + 1 if room > whole else None


_DIVISIONS: dict[str, Callable[[int, int, int, Sequence[int]], tuple[int, int, int]]] = {
    "": lambda numel, room, stage, nbytes: (room, *_parts(numel, stage, nbytes)),
    "This divides all of a parameter's bytes. What a stage leaves whole is on every rank: subtract it from "
    "the room first.": lambda numel, room, stage, nbytes: (room, 0, numel * sum(nbytes)),
    "This subtracts what is whole from the room, and then divides all bytes. Only the rest is shared.": (
        lambda numel, room, stage, nbytes: (room - _parts(numel, stage, nbytes)[0], 0, numel * sum(nbytes))
    ),
    "This counts 2 + 2 + 12 bytes whatever `nbytes` says.": (
        lambda numel, room, stage, nbytes: (room, *_parts(numel, stage, MIXED))
    ),
    "Each stage divides one part alone here. Stage 2 divides what stage 1 does, and the gradients too.": (
        lambda numel, room, stage, nbytes: (room, *_one_part(numel, stage, nbytes))
    ),
    "Every stage divides one part too few (> for >=, perhaps): stage 1 divides the optimizer's part.": (
        lambda numel, room, stage, nbytes: (room, *_parts(numel, max(0, stage - 1), nbytes))
    ),
    "Every stage divides one part too many: stage 0 divides nothing, stage 1 the optimizer's part.": (
        lambda numel, room, stage, nbytes: (room, *_parts(numel, min(3, stage + 1), nbytes))
    ),
    "`nbytes` is (parameter, gradient, state): stage 1 divides the last of them, and this the first.": (
        lambda numel, room, stage, nbytes: (room, *_parts(numel, stage, nbytes[::-1]))
    ),
}
"""The room, the whole and the divided bytes as a reader may count them, by the message about it."""

_QUOTIENTS: dict[str, Callable[[int, int, int], int | None]] = {
    "": _fewest_of,
    "The quotient is rounded down. A part of a rank is no rank: round up.": _rounded_down,
    "Where the room is filled to the byte, this takes one rank more than needed. Round up; do not add 1.": (
        _one_too_many
    ),
}
"""The number of ranks that a reader may compute from these three, by the message about it."""


def _made(
    division: Callable[..., tuple[int, int, int]], quotient: Callable[..., int | None]
) -> Callable[..., int | None]:
    return lambda *run: quotient(*division(*run))


_MISTAKES = {
    f"{divided} {rounded}".strip(): _made(division, quotient)
    for divided, division in _DIVISIONS.items()
    for rounded, quotient in _QUOTIENTS.items()
    if divided or rounded
}
"""Mistakes in the division, in the quotient, or in both, by the message about each."""


# ---------------------------------------------------------------------------------------------- the floor

ONE_LARGE = [60_000, 2_000, 2_000, 1_000, 500]


@exercise("ledger.floor", on_ranks=True)
def floor(answer: Answer) -> str:
    """Check the bytes below which the fullest rank does not fall, however many ranks there are."""
    measured = sum(_fullest(ranks.run(_step_under_zero, 2, ONE_LARGE)))
    _check_floor(answer, "On 2 real ranks, where one owns the largest tensor alone,", ONE_LARGE, measured)
    models = {
        "[7]": [7],
        "[5, 5, 5]": [5, 5, 5],
        "GPT-2": [shape.numel for shape in shapes("gpt2")],
        "Llama-3-8B": [shape.numel for shape in shapes("llama3-8b")],
    }
    drawn = answer.drawn(lambda rng: rng.choices(range(1, 10**6), k=rng.randint(1, 9)))
    models |= {f"model {number}": numels for number, numels in enumerate(drawn)}
    for name, numels in models.items():
        run = f"{name} on {2 * len(numels)} ranks:"
        _check_floor(answer, run, numels, sum(_predicted(numels, 2 * len(numels))))
    return f"the fuller of 2 real ranks, and {len(models)} models on paper"


BYTES = Form(is_number, "It must return a number of bytes.")


def _check_floor(answer: Answer, run: str, numels: list[int], right: int) -> None:
    theirs = BYTES.returned_by(answer, numels)
    assert theirs == right, (
        f"{run} the fullest rank holds {right:,} bytes, and {answer.name} says {theirs:,}. "
        + _mistake_in_floor(theirs, right, numels)
    )


def _mistake_in_floor(theirs: float, right: int, numels: list[int]) -> str:
    elements, largest, counter = sum(numels), max(numels), 4
    mistakes = {
        "AdamW keeps 4 bytes more for each tensor that a rank owns: its step counter.": [right - counter],
        "The rank with the largest tensor owns no other here, so it has one step counter.": [
            right - counter + counter * len(numels)
        ],
        "Those are parameters and gradients. Somebody owns the largest tensor, and its state.": [
            8 * elements
        ],
        "That is a rank's memory when nothing is sharded.": [16 * elements],
        "That is the state alone. Under stage 1 every rank has all parameters and all gradients.": [
            8 * largest,
            8 * largest + counter,
        ],
        "Parameters and gradients of all tensors stay on every rank, not of the largest alone.": [
            16 * largest,
            16 * largest + counter,
        ],
        "Those are the bytes of mixed precision, 2 + 2 + 12. This run is in fp32: 4 + 4 + 8.": [
            4 * elements + 12 * largest,
            4 * elements + 12 * largest + counter,
        ],
    }
    return named(
        {mistake: theirs in wrong for mistake, wrong in mistakes.items()},
        "Add what no number of ranks divides: all parameters, all gradients, the largest tensor's state.",
    )


# ------------------------------------------------------------------------------------------- small parts


def _step_under_zero(numels: Sequence[int]) -> HeldBytes:
    """On a rank: make a step of fp32 AdamW, sharded by whole tensors, and return the bytes that it holds."""
    params = [torch.nn.Parameter(torch.zeros(numel, device=ranks.device())) for numel in numels]
    optimizer = ZeroRedundancyOptimizer(params, torch.optim.AdamW)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    return held_bytes(params, optimizer)


def _predicted(numels: Sequence[int], world_size: int) -> HeldBytes:
    """The bytes that the fullest rank holds after such a step, by the simulator's schedule."""
    plan = schedule("zero", [ParamSpec(numel) for numel in numels], world_size)
    return HeldBytes(plan.parameter_bytes_max, plan.gradient_bytes_max, plan.state_bytes_max)


def _fullest(held: Sequence[HeldBytes]) -> HeldBytes:
    return max(held, key=sum)


def _in_print(nbytes: float) -> str:
    return format_bytes(nbytes) if nbytes >= 1000 else f"{nbytes:,.4g} bytes"


def _exactly(nbytes: float) -> str:
    return f"{nbytes:,.15g} bytes"


# ------------------------------------------------------------------------------------------ predictions


@prediction(
    "ledger.stage_1",
    "GPT-2 XL in mixed precision, four ranks, stage 1: how much does each rank hold?",
    unit="GB",
)
def _gpt2_xl_on_four() -> float:
    return ledger(sum(shape.numel for shape in shapes("gpt2-xl")), 4, stage=1).total_bytes / 1e9


@prediction(
    "ledger.plain_32_bit",
    "7.5 billion parameters in plain 32-bit training, 64 ranks, stage 1: how much does each rank hold?",
    unit="GB",
)
def _plain_on_64() -> float:
    return ledger(7_500_000_000, 64, stage=1, convention=FP32_16).total_bytes / 1e9


@prediction(
    "ledger.two_ranks",
    "Stage 1 on two ranks, in 32 bits: how much of its memory without ZeRO does a rank hold?",
    unit="percent",
)
def _held_on_two() -> float:
    return 100 * ledger(1, 2, 1, FP32_16).total_bytes / ledger(1, 2, 0, FP32_16).total_bytes
