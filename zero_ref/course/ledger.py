"""Chapter 1's graders: the ZeRO paper's table, and what a run still holds that was hoped to be gone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

import torch

from zero_ref.course import Answer, call_text, exercise, shown
from zero_ref.course.predictions import prediction
from zero_ref.lab import ranks
from zero_ref.lab.meter import HeldBytes, held_bytes
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.plan.partition import ParamSpec
from zero_ref.simulator.ledger import FP32_16, format_bytes, ledger
from zero_ref.simulator.models import shapes
from zero_ref.simulator.schedule import schedule

# --------------------------------------------------------------------------------------- 1.1 table 1

Cell = tuple[int, int, int]
"""Parameters of the model, ranks, stage."""


@exercise("ledger.table_1", forbids=("zero_ref.simulator.ledger.ledger",))
def table_1(answer: Answer) -> str:
    """Bytes on one rank, as in Table 1 of arXiv:1910.02054 and wherever else the formula holds."""
    models = (7_500_000_000, 128 * 10**9, 10**12)
    table: list[Cell] = [
        (numel, n, stage) for numel in models for stage in (1, 2, 3) for n in (4, 1, 16, 64, 256, 1024)
    ]
    others: list[Cell] = [
        (numel, n, stage) for numel in (models[0], 1001) for stage in (0, 1, 2, 3) for n in (1, 3, 64)
    ]
    others += answer.drawn(lambda rng: (rng.randint(10**3, 10**11), rng.randint(1, 2000), rng.randint(0, 3)))
    given = {cell: _number(answer, *cell) for cell in table + others}
    for cell, theirs in given.items():
        right = ledger(*cell).total_bytes
        source, is_, should_be = "Table 1 has", _in_print(theirs), _in_print(right)
        if cell not in table or is_ == should_be:
            source, is_, should_be = "it should be", _exactly(theirs), _exactly(right)
        assert math.isclose(theirs, right, rel_tol=1e-9), (
            f"{call_text(answer.name, *cell)} is {is_}; {source} {should_be}. " + _mistake_in_table(given)
        )
    return f"all {len(table)} cells of Table 1, and {len(others)} more"


def _mistake_in_table(given: dict[Cell, float]) -> str:
    """What to say: the first mistake that explains every number given."""
    for mistake, per_param in _MISTAKES.items():
        if all(_close(theirs, numel * per_param(n, stage)) for (numel, n, stage), theirs in given.items()):
            return mistake
    right = {cell: ledger(*cell).total_bytes for cell in given}
    for unit, nbytes in {"gigabytes": 10**9, "GiB": 2**30}.items():
        if all(_close(theirs, right[cell] / nbytes) for cell, theirs in given.items()):
            return f"That is in {unit}. Return bytes."
    if all(_close(theirs, right[cell] / cell[0]) for cell, theirs in given.items()):
        return "Those are the bytes of one parameter. Multiply by numel."
    if all(abs(theirs - right[cell]) < 4 for cell, theirs in given.items()):
        return "An average over ranks need not be a whole number: divide with /, not //, and do not round."
    return "Add up three parts, 2, 2 and 12 bytes a parameter, each divided by the ranks from its stage on."


_MISTAKES: dict[str, Callable[[int, int], float]] = {
    "Nothing is divided by the number of ranks.": lambda n, stage: 16,
    "All 16 bytes are divided at every stage. Stage 1 divides the optimizer's 12 and leaves 2 + 2 whole.": (
        lambda n, stage: 16 / n if stage else 16
    ),
    "Each stage divides one part alone. Stage 2 divides what stage 1 does, and the gradients too.": (
        lambda n, stage: (16, 4 + 12 / n, 14 + 2 / n, 14 + 2 / n)[stage]
    ),
    "These are the bytes of fp32 training, 4 + 4 + 8. The table counts mixed precision, 2 + 2 + 12.": (
        lambda n, stage: (16, 8 + 8 / n, 4 + 12 / n, 16 / n)[stage]
    ),
    "The fp32 copy of the parameters is not divided. Only the optimizer uses it: it is one of its 12 bytes'"
    " three parts.": lambda n, stage: (16, 8 + 8 / n, 6 + 10 / n, 4 + 12 / n)[stage],
    "Stages 2 and 3 are exchanged.": lambda n, stage: (16, 4 + 12 / n, 16 / n, 2 + 14 / n)[stage],
    "Every stage divides one part too few (> for >=, perhaps): stage 1 divides the optimizer's part.": (
        lambda n, stage: (16, 16, 4 + 12 / n, 2 + 14 / n)[stage]
    ),
    "Every stage divides one part too many: stage 0 divides nothing, stage 1 the optimizer's part.": (
        lambda n, stage: (4 + 12 / n, 2 + 14 / n, 16 / n, 16 / n)[stage]
    ),
}
"""What a reader may have written, as bytes per parameter for (ranks, stage), by what there is to say."""


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


def _close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-9)


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
