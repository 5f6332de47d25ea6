"""Chapter 1's graders: the ranks that a run needs, and what it still holds that was hoped to be gone."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch

from zero_ref.lab import ranks
from zero_ref.lab.meter import HeldBytes, held_bytes
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.plan.partition import ParamSpec
from zero_ref.simulator.ledger import FP32_16, format_bytes, ledger
from zero_ref.simulator.models import shapes
from zero_ref.simulator.schedule import schedule
from zero_ref_course import Answer, call_text, exercise, shown
from zero_ref_course.predictions import prediction

# ------------------------------------------------------------------------ 1.1 how many ranks does it take

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
"""Some fit to the byte, some miss by one; some fit on no number of ranks."""


@exercise("ledger.ranks_to_fit", may_return_none=True)
def ranks_to_fit(answer: Answer) -> str:
    """The fewest ranks on which a run fits, or that none are enough."""
    runs = RUNS + answer.drawn(_drawn_run)
    given = {run: _count_or_none(answer, run) for run in runs}
    for run, theirs in given.items():
        right = _fewest(*run)
        assert theirs == right, (
            f"{call_text(answer.name, *run)} is {theirs}; it should be {right}. "
            + _mistake_in_fewest(given, run, theirs, right)
        )
    return f"{len(runs)} runs, some of which fit on no number of ranks"


def _drawn_run(rng: random.Random) -> Run:
    numel, stage = rng.randint(10**6, 10**11), rng.randint(0, 3)
    nbytes = rng.choice((MIXED, FP32, (2, 4, 12), (2, 4, 14)))
    whole, divided = _parts(numel, stage, nbytes)
    return numel, whole + divided // rng.randint(1, 300) + rng.randint(-1, 1), stage, nbytes


def _count_or_none(answer: Answer, run: Run) -> int | None:
    theirs = answer(*run)
    assert theirs is None or (isinstance(theirs, int) and not isinstance(theirs, bool)), (
        f"{call_text(answer.name, *run)} returned {shown(theirs)}. It must return a whole number of ranks, "
        "or None."
    )
    return theirs


def _parts(numel: int, stage: int, nbytes: Sequence[int]) -> tuple[int, int]:
    """Bytes that every rank has, bytes that the ranks share."""
    divided = sum(part for part, since in zip(nbytes, (3, 2, 1)) if stage >= since)
    return numel * (sum(nbytes) - divided), numel * divided


def _fewest(numel: int, room: int, stage: int, nbytes: Sequence[int]) -> int | None:
    return _fewest_of(room, *_parts(numel, stage, nbytes))


def _fewest_of(room: int, whole: int, divided: int) -> int | None:
    if whole + divided <= room:
        return 1
    left = room - whole
    return -(-divided // left) if divided and left > 0 else None


def _mistake_in_fewest(
    given: Mapping[Run, int | None], run: Run, theirs: int | None, right: int | None
) -> str:
    """What to say: the first mistake that explains all answers, else what this one overlooks."""
    if set(given.values()) == {None}:
        return "It returns None for every run. Does the function end in a `return`?"
    # Whether one rank is looked at by itself is another matter than what is divided.
    telling = {each: said for each, said in given.items() if said != _fewest(*each) or said != 1}
    for mistake, rule in _MISTAKES.items():
        if all(rule(*each) == said for each, said in telling.items()):
            return mistake
    numel, room, stage, nbytes = run
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
            f"{_exactly(whole)} of it are on every rank."
        )
    if theirs > right:
        return f"It fits on {right} already: {_exactly(whole + divided / right)} each."
    return (
        f"Each of {theirs} ranks has {_exactly(whole + divided / theirs)}, and there is room for "
        f"{_exactly(room)}."
    )


def _each_part_alone(numel: int, room: int, stage: int, nbytes: Sequence[int]) -> int | None:
    divided = numel * (0, *reversed(nbytes))[stage]
    return _fewest_of(room, numel * sum(nbytes) - divided, divided)


def _rounded_down(numel: int, room: int, stage: int, nbytes: Sequence[int]) -> int | None:
    right = _fewest(numel, room, stage, nbytes)
    whole, divided = _parts(numel, stage, nbytes)
    return right if right in (None, 1) else max(1, divided // (room - whole))


def _one_too_many(numel: int, room: int, stage: int, nbytes: Sequence[int]) -> int | None:
    whole, divided = _parts(numel, stage, nbytes)
    return (
        divided // (room - whole) + 1 if divided and room > whole else None if divided or whole > room else 1
    )


_MISTAKES: dict[str, Callable[[int, int, int, Sequence[int]], int | None]] = {
    "This divides all of a parameter's bytes. What a stage leaves whole is on every rank: subtract it from "
    "the room first.": lambda numel, room, stage, nbytes: -(-numel * sum(nbytes) // room),
    "This subtracts what is whole from the room, and then divides all bytes. Only the rest is shared.": (
        lambda numel, room, stage, nbytes: (
            _fewest(numel, room, stage, nbytes)
            and -(-numel * sum(nbytes) // max(1, room - _parts(numel, stage, nbytes)[0]))
        )
    ),
    "This counts 2 + 2 + 12 bytes whatever `nbytes` says.": (
        lambda numel, room, stage, nbytes: _fewest(numel, room, stage, MIXED)
    ),
    "Each stage divides one part alone here. Stage 2 divides what stage 1 does, and the gradients too.": (
        _each_part_alone
    ),
    "Every stage divides one part too few (> for >=, perhaps): stage 1 divides the optimizer's part.": (
        lambda numel, room, stage, nbytes: _fewest(numel, room, max(0, stage - 1), nbytes)
    ),
    "Every stage divides one part too many: stage 0 divides nothing, stage 1 the optimizer's part.": (
        lambda numel, room, stage, nbytes: _fewest(numel, room, min(3, stage + 1), nbytes)
    ),
    "`nbytes` is (parameter, gradient, state): stage 1 divides the last of them, and this the first.": (
        lambda numel, room, stage, nbytes: _fewest(numel, room, stage, nbytes[::-1])
    ),
    "The quotient is rounded down. A part of a rank is no rank: round up.": _rounded_down,
    "Where the room is filled to the byte, this takes one rank more than needed. Round up; do not add 1.": (
        _one_too_many
    ),
}
"""What a reader may have written, by what there is to say."""


# ------------------------------------------------------------------- 1.2 why a run did not shrink as much

BALANCED = [9_000, 8_000, 8_000, 7_000, 600, 500, 500, 400]
ONE_LARGE = [60_000, 2_000, 2_000, 1_000, 500]
RECOMMENDER = [10**9, 256 * 1024, 1024, 1024 * 256, 256]
HALF_IN_ONE = [55 * 10**6, *[3 * 10**6] * 15]


@exercise("ledger.what_would_help", on_ranks=True, forbids=("zero_ref.simulator.schedule.schedule",))
def what_would_help(answer: Answer) -> str:
    """The better of two remedies and its saving, for runs under stage 1: two real ones, three on paper."""
    for name, numels in (("an even model", BALANCED), ("a model with one large tensor", ONE_LARGE)):
        held = _fullest(ranks.run(_step_under_zero, 2, numels))
        _check_remedy(answer, f"{name} on 2 real ranks", numels, 2, held)
    on_paper = {
        ("Llama-3-8B", 64): [shape.numel for shape in shapes("llama3-8b")],
        ("a recommender", 16): RECOMMENDER,
        ("a model with half of it in one tensor", 8): HALF_IN_ONE,
    }
    drawn = enumerate(answer.drawn(lambda rng: ([*rng.choices(range(500, 10**6), k=9)], rng.randint(2, 30))))
    on_paper |= {(f"model {number}", n): numels for number, (numels, n) in drawn}
    for (name, n), numels in on_paper.items():
        _check_remedy(answer, f"{name} on {n} ranks", numels, n, _predicted(numels, n))
    return "2 runs on real ranks, 3 on paper"


def _check_remedy(answer: Answer, run: str, numels: Sequence[int], n: int, held: HeldBytes) -> None:
    returned = answer(list(numels), n, held)
    is_pair = isinstance(returned, (tuple, list)) and len(returned) == 2 and _is_number(returned[1])
    assert is_pair, (
        f"{answer.name} returned {shown(returned)}. Return two values: a remedy, a number of bytes."
    )
    remedy, saved = returned
    saved_by = {
        "stage 2": held.gradients - held.gradients / n,
        "even partition": held.optimizer_state - 8 * sum(numels) / n,
    }
    assert remedy in saved_by, f'The remedy is "stage 2" or "even partition", not {shown(remedy)}.'
    best = max(saved_by, key=lambda name: saved_by[name])
    # Step counters, 4 bytes a tensor, may count as saved or as kept.
    is_right = remedy == best and abs(saved - saved_by[best]) <= 4 * len(numels)
    assert is_right, (
        f"{run}: {sum(numels):,} elements, {max(numels):,} of them in the largest tensor; the fullest rank "
        f"holds {held}. {answer.name} says that {remedy!r} saves {saved:,.0f} bytes. "
        + _mistake_in_remedy(remedy, saved, held, n, sum(numels), saved_by)
    )


def _mistake_in_remedy(
    remedy: str, saved: float, held: HeldBytes, n: int, elements: int, saved_by: dict[str, float]
) -> str:
    state = held.optimizer_state
    mistakes = {
        "even partition": {
            "But that state is one rank's share already. An even share is 1/N of the state of all ranks "
            "together: 8 bytes for each element of the model, divided by N.": state - state / n,
            "AdamW in fp32 keeps 8 bytes an element, two numbers and no copy: an even share is "
            f"8 x {elements:,} / {n}.": state - 12 * elements / n,
            "Not all of the state goes: an even share, 1/N of all ranks' state, stays.": state,
        },
        "stage 2": {
            "But a rank keeps the gradients of what it owns: 1/N of them stays.": held.gradients,
            "Those are the parameters and the gradients. Stage 2 divides the gradients; parameters wait for "
            "stage 3.": (held.parameters + held.gradients) * (1 - 1 / n),
        },
    }
    for mistake, wrong in mistakes[remedy].items():
        if math.isclose(saved, wrong, rel_tol=1e-3):
            return mistake
    rest = (
        "Stage 2 leaves 1/N of the gradients on the rank, so it takes away the rest: "
        f"{held.gradients:,} - 1/{n} of it."
    )
    if math.isclose(saved, saved_by[remedy], rel_tol=1e-2):
        # Whoever looks at what is largest now does not pass over gradients that are.
        passed_over = remedy == "even partition" and held.gradients > state
        return f"It does, but the other remedy saves {max(saved_by.values()):,.0f}. " + (
            rest if passed_over else "Compare what each would take away, not what is largest now."
        )
    if math.isclose(saved, held.gradients / n, rel_tol=1e-3):
        return rest
    return (
        "Stage 2 would leave 1/N of the gradients. An even partition would leave 1/N of the whole model's "
        "state, 8 bytes an element. Subtract each from what the rank holds now."
    )


# ------------------------------------------------------------------------------------------ 1.3 the floor


@exercise("ledger.floor", on_ranks=True, forbids=("zero_ref.simulator.schedule.schedule",))
def floor(answer: Answer) -> str:
    """Bytes below which the fullest rank does not fall, however many ranks there are."""
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


def _check_floor(answer: Answer, run: str, numels: list[int], right: int) -> None:
    theirs = _number(answer, list(numels))
    assert theirs == right, (
        f"{run} the fullest rank holds {right:,} bytes, and {answer.name} says {theirs:,}. "
        + _mistake_in_floor(theirs, right, sum(numels), max(numels), len(numels))
    )


def _mistake_in_floor(theirs: float, right: int, elements: int, largest: int, tensors: int) -> str:
    counter = 4
    mistakes = {
        "AdamW keeps 4 bytes more for each tensor that a rank owns: its step counter.": [right - counter],
        "The rank with the largest tensor owns no other here, so it has one step counter.": [
            right - counter + counter * tensors
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
    for mistake, wrong in mistakes.items():
        if theirs in wrong:
            return mistake
    return "Add what no number of ranks divides: all parameters, all gradients, the largest tensor's state."


# ------------------------------------------------------------------------------------------- small parts


def _step_under_zero(numels: Sequence[int]) -> HeldBytes:
    """On a rank: what it holds after a step of fp32 AdamW, sharded by whole tensors."""
    params = [torch.nn.Parameter(torch.zeros(numel, device=ranks.device())) for numel in numels]
    optimizer = ZeroRedundancyOptimizer(params, torch.optim.AdamW)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    return held_bytes(params, optimizer)


def _predicted(numels: Sequence[int], world_size: int) -> HeldBytes:
    """The same on paper, for the fullest rank."""
    plan = schedule("zero", [ParamSpec(numel) for numel in numels], world_size)
    return HeldBytes(plan.parameter_bytes_max, plan.gradient_bytes_max, plan.state_bytes_max)


def _fullest(held: Sequence[HeldBytes]) -> HeldBytes:
    return max(held, key=sum)


def _number(answer: Answer, *args: Any) -> float:
    value = answer(*args)
    assert _is_number(value), (
        f"{call_text(answer.name, *args)} returned {shown(value)}. It must return a number of bytes."
    )
    return value


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


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
    "How much of the memory does stage 1 leave on two ranks, in 32 bits?",
    unit="percent",
)
def _left_on_two() -> float:
    return 100 * ledger(1, 2, 1, FP32_16).total_bytes / ledger(1, 2, 0, FP32_16).total_bytes
