"""The partition explorer: what each rank owns under each rule, side by side, on up to 1,024 ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

from zero_ref.live.explorer import RANKS, Answer, Control, Explorer, params_of
from zero_ref.live.numbers import short, short_count
from zero_ref.live.palette import ALARM, INK, MUTED, SERIES_COLOURS, rank_colour
from zero_ref.live.svg import LINE, MARGIN, Stacked, bar, curve, key, line, picture, text
from zero_ref.plan.choice import RULES, plan_partition
from zero_ref.plan.partition import Partition
from zero_ref.simulator.models import MODELS

POWERS = tuple(2**power for power in range(11))
NAMES = {rule: rule.replace("_", " ") for rule in RULES if rule not in ("balanced", "equal_shares")}
"""Without those that divide a model as "even" does, unless it has matrices that stay whole or many ranges."""
MOST_BARS = 64
"""Above this many ranks a bar is thinner than a line: one outline replaces the bars."""


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
    left, right, high, y = MARGIN, width - MARGIN, 76.0, 10.0
    some = next(iter(plans.values()))
    mean = sum(some.numels) / some.world_size
    most = max(max(plan.loads) for plan in plans.values())
    parts: list[str] = []
    for rule, plan in plans.items():
        title = f"{NAMES[rule]}: {short(over_mean[rule])} × the mean"
        if width > 480:
            title += f" ({short_count(max(plan.loads))} elements on the fullest rank)"
        parts.append(text(left, y + 13, title, bold=True))
        y += LINE + 4
        parts += _bars(plan, left, y, right - left, high, most, fullest_first)
        at = y + high * (1 - mean / most)
        parts.append(line(left, at, right, at, INK, 1.2, "5 3"))
        y += high + 10
    ends = ("the fullest", "the emptiest") if fullest_first else ("rank 0", f"rank {some.world_size - 1:,}")
    parts += [
        text(left, y + 6, ends[0], fill=MUTED),
        text(right, y + 6, ends[1], fill=MUTED, anchor="end"),
        text((left + right) / 2, y + 6, "dashed: the mean", fill=INK, anchor="middle"),
    ]
    lower, y = _balance(balance, some.world_size, left, y + 34, right - left)
    return picture(width, y, words, parts + lower)


def _bars(
    plan: Partition, x: float, y: float, width: float, high: float, most: float, fullest_first: bool
) -> list[str]:
    # sorted() keeps the order of equal keys: without fullest_first that of the ranks.
    ranks = sorted(range(plan.world_size), key=lambda rank: -plan.loads[rank] * fullest_first)
    each = width / len(ranks)
    base = line(x, y + high, x + width, y + high, MUTED)
    if len(ranks) > MOST_BARS:
        points = [(x, y + high)]
        for place, rank in enumerate(ranks):
            top = y + high * (1 - plan.loads[rank] / most)
            points += [(x + place * each, top), (x + (place + 1) * each, top)]
        outline = " ".join(f"{px:.2f},{py:.2f}" for px, py in [*points, (x + width, y + high)])
        return [f'<polygon points="{outline}" fill="#8A94A6"/>', base]
    gap = min(3.0, 0.15 * each)
    bars = [
        bar(
            x + place * each + gap / 2,
            y + high * (1 - plan.loads[rank] / most),
            each - gap,
            high * plan.loads[rank] / most,
            rank_colour(rank, len(ranks)),
            f"rank {rank}: {plan.loads[rank]:,} elements",
        )
        for place, rank in enumerate(ranks)
    ]
    return [*bars, base]


def _balance(
    balance: Mapping[str, Sequence[float]], ranks: int, left: float, y: float, width: float
) -> Stacked:
    """The fullest rank beside the mean as ranks are added; on both scales a step doubles."""
    parts = [text(left, y, "fullest rank / mean, as ranks are added", bold=True)]
    doublings = math.ceil(max(1.0, *(_log2(max(values)) for values in balance.values())))
    x, top, high, wide = left + 36, y + 14, 130.0, width - 36
    for power in range(0, doublings + 1, -(-doublings // 5)):
        at = top + high * (1 - power / doublings)
        parts += [line(x, at, x + wide, at), text(x - 6, at + 4, f"{2**power:,}", fill=MUTED, anchor="end")]
    for power in POWERS[:: 1 if width > 480 else 2]:
        at = x + wide * _log2(power) / _log2(POWERS[-1])
        parts.append(text(at, top + high + 17, f"{power:,}", fill=MUTED, anchor="middle"))
    at = x + wide * _log2(ranks) / _log2(POWERS[-1])
    parts.append(line(at, top, at, top + high, ALARM, 1.6, "5 3"))
    for place, (colour, values) in enumerate(zip(SERIES_COLOURS, balance.values())):
        points = [
            (x + wide * _log2(power) / _log2(POWERS[-1]), top + high * (1 - _log2(value) / doublings))
            for power, value in zip(POWERS, values)
        ]
        parts.append(curve(points, colour, 7.0 - 2.2 * place))  # lines that coincide are all seen
    parts.append(text(x + wide, top + high + 34, "ranks; dashed: here", fill=MUTED, anchor="end"))
    names, bottom = key(dict(zip(NAMES.values(), SERIES_COLOURS)), left, top + high + 46, width)
    return parts + names, bottom + 2


def _log2(value: float) -> float:
    return math.log2(max(1.0, value))


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
