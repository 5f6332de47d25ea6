"""The partition explorer: what each rank owns under each rule, side by side, on up to 1,024 ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from zero_ref.live.explorer import RANKS, Answer, Control, Explorer, params_of
from zero_ref.live.loads import bars_compared, curves_against_ranks
from zero_ref.live.numbers import short, short_count
from zero_ref.live.svg import MARGIN, picture, text
from zero_ref.plan.choice import RULES, plan_partition
from zero_ref.plan.partition import Partition
from zero_ref.simulator.models import MODELS

POWERS = tuple(2**power for power in range(11))
NAMES = {rule: rule.replace("_", " ") for rule in RULES if rule not in ("balanced", "equal_shares")}
"""Without those that divide a model as "even" does, unless it has matrices that stay whole or many ranges."""


def _draw(width: float, model: str, ranks: int, fullest_first: bool) -> Answer:
    plans = {rule: _plan(model, rule, ranks) for rule in NAMES}
    over_mean = {rule: _over_mean(plan) for rule, plan in plans.items()}
    largest = max(next(iter(plans.values())).numels)
    numbers: dict[str, float] = {"largest tensor, elements": largest}
    rows = [["rule", "fullest rank", "× the mean", "ranks that own nothing"]]
    for rule, plan in plans.items():
        idle = sum(load == 0 for load in plan.loads)
        numbers[f"{rule}, fullest, elements"] = max(plan.loads)
        numbers[f"{rule}, fullest / mean"] = over_mean[rule]
        numbers[f"{rule}, idle ranks"] = idle
        rows.append([NAMES[rule], f"{max(plan.loads):,}", short(over_mean[rule]), f"{idle:,}"])
    balance = {rule: [_over_mean(_plan(model, rule, power)) for power in POWERS] for rule in NAMES}
    for rule, values in balance.items():
        numbers |= {f"{rule}, {power} ranks, fullest / mean": one for power, one in zip(POWERS, values)}
    said = ", ".join(f"{short(over_mean[rule])} times the mean under {NAMES[rule]}" for rule in NAMES)
    words = f"{model} on {ranks:,} rank{'s' if ranks > 1 else ''}: the fullest rank owns {said}."
    svg = _picture(width, plans, over_mean, balance, fullest_first, words)
    return Answer(svg, words, rows, numbers)


@lru_cache(maxsize=128)
def _plan(model: str, rule: str, ranks: int) -> Partition:
    return plan_partition(rule, params_of(model), ranks)


def _over_mean(plan: Partition) -> float:
    return max(plan.loads) * plan.world_size / sum(plan.loads)


def _picture(
    width: float, plans: Mapping[str, Partition], over_mean: Mapping[str, float],
    balance: Mapping[str, Sequence[float]], fullest_first: bool, words: str,
) -> str:  # fmt: skip
    left, right = MARGIN, width - MARGIN
    some = next(iter(plans.values()))
    titles = {}
    for rule, plan in plans.items():
        title = f"{NAMES[rule]}: {short(over_mean[rule])} × the mean"
        if width > 480:
            title += f" ({short_count(max(plan.loads))} elements on the fullest rank)"
        titles[title] = plan.loads
    parts, y = bars_compared(titles, _elements, left, 10.0, right - left, fullest_first)
    parts.append(text(left, y + 28, "fullest rank / mean, as ranks are added", bold=True))
    curves = {NAMES[rule]: dict(zip(POWERS, values)) for rule, values in balance.items()}
    lower, y = curves_against_ranks(curves, _times, left, y + 42, right - left, here=some.world_size)
    return picture(width, y, words, parts + lower)


def _elements(load: float) -> str:
    return f"{load:,.0f} elements"


def _times(value: float) -> str:
    return f"{short(value)} ×"


PARTITION = Explorer(
    "partition",
    "Partition explorer",
    (
        Control("model", "model", "llama3-8b", tuple(MODELS)),
        Control("ranks", "ranks", 32, RANKS),
        Control("fullest_first", "fullest first", False),
    ),
    _draw,
)
