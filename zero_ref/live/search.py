"""The search explorer: every way to train a model on a cluster, by memory and speed, and the best of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from zero_ref.live.explorer import RANKS, Answer, Control, Explorer
from zero_ref.live.memory import WITH_MEMORY, device_mark, scale_bytes
from zero_ref.live.numbers import short_bytes, short_count
from zero_ref.live.palette import INK, MUTED, PAPER, SERIES_COLOURS
from zero_ref.live.svg import LINE, MARGIN, axis, curve, element, key, line, picture, text, text_width, ticks
from zero_ref.simulator.cluster import CLUSTERS
from zero_ref.simulator.models import TRANSFORMERS
from zero_ref.simulator.scenario import Scenario
from zero_ref.simulator.search import SEARCHED, Candidate, Found, search

COLOURS = dict(zip(SEARCHED, SERIES_COLOURS))
VERDICTS = {True: "fits", None: "undecided", False: "does not fit"}

HIGH = 240.0
"""Pixels of the field of dots."""


def _draw(width: float, model: str, cluster: str, ranks: int, tokens: int) -> Answer:
    found = _found(model, cluster, ranks, tokens)
    device = CLUSTERS[cluster].device
    device_bytes = 1e9 * (device.memory_gb or 0)
    fitting = [one for one in found.best if one.fits]
    undecided = sum(one.fits is None for one in found.listed)
    numbers: dict[str, float] = {
        "ways tried": found.tried,
        "ways that fit": len(found.listed) - undecided,
        "ways undecided": undecided,
        "device, bytes": device_bytes,
    }
    for place, one in enumerate(found.best, 1):
        numbers[f"{place}, tokens a second"] = one.tokens_per_second
        numbers[f"{place}, bytes"] = one.peak_bytes
    words = (
        f"{model} on {ranks:,} rank{'s' if ranks > 1 else ''} of {cluster}, {short_count(tokens)} tokens an "
        f"update: of {found.tried:,} ways {numbers['ways that fit']:,} fit into the "
        f"{short_bytes(device_bytes)} of an {device.name}, {undecided:,} are undecided. {_advice(fitting)}"
    )
    rows = [["", "way", "tokens a second", "memory", "fits"]]
    for place, one in enumerate(found.best, 1):
        low, high = map(short_bytes, one.memory_interval)
        slow, fast = map(short_count, one.rate_interval)
        rate = f"{short_count(one.tokens_per_second)} ({slow} to {fast})"
        held = f"{short_bytes(one.peak_bytes)} ({low} to {high})"
        rows.append([str(place), _named(one), rate, held, VERDICTS[one.fits]])
    return Answer(_picture(width, found, device_bytes, words), words, rows, numbers)


@lru_cache(maxsize=8)
def _found(model: str, cluster: str, ranks: int, tokens: int) -> Found:
    """Another width asks for the same search."""
    return search(Scenario(TRANSFORMERS[model], CLUSTERS[cluster], ranks), tokens)


def _advice(fitting: Sequence[Candidate]) -> str:
    if not fitting:
        return "None fits for certain."
    fastest, leanest = fitting[0], fitting[-1]
    rate = short_count(fastest.tokens_per_second)
    said = f"The fastest that fits is {_named(fastest)}: {rate} tokens a second"
    if fastest is leanest:
        return f"{said}; none that fits needs less memory."
    return f"{said}. The leanest is {_named(leanest)}, with {short_bytes(leanest.peak_bytes)}."


def _named(one: Candidate) -> str:
    scenario = one.scenario
    words = [one.strategy]
    if scenario.shard_group:
        words.append(f"groups of {scenario.shard_group}")
    words.append(f"batch {scenario.batch}")
    if scenario.accumulation > 1:
        words[-1] += f" × {scenario.accumulation}{' under no_sync' * scenario.no_sync}"
    return ", ".join([*words, f"checkpointing {scenario.checkpointing}"])


def _picture(width: float, found: Found, device_bytes: float, words: str) -> str:
    parts, y = key({name: COLOURS[name] for name in SEARCHED}, MARGIN, 14, width - 2 * MARGIN)
    fastest = max((one.tokens_per_second for one in found.listed), default=0.0)
    held = [one.peak_bytes for one in found.listed]
    levels = {value: short_count(value) for value in ticks(1.05 * fastest)}
    left = MARGIN + max(map(text_width, levels.values()))
    wide, most = width - MARGIN - left, scale_bytes(held or [device_bytes], device_bytes)
    parts.append(text(MARGIN, y + 13, "tokens a second"))
    top, bottom = y + 2 * LINE + 4, y + 2 * LINE + 4 + HIGH

    def at(one: Candidate) -> tuple[float, float]:
        above = one.tokens_per_second / (1.05 * fastest)
        return left + wide * one.peak_bytes / most, bottom - HIGH * above

    for value, name in levels.items():
        level = bottom - (HIGH * value / (1.05 * fastest) if fastest else 0)
        parts += [
            line(left, level, left + wide, level),
            text(left - 6, level + 4, name, fill=MUTED, anchor="end"),
        ]
    parts += axis(left, wide, top, bottom, most, short_bytes, "memory of the fullest rank")
    parts += device_mark(device_bytes, most, left, wide, top, bottom)
    if not found.listed:
        parts.append(
            text(left + wide / 2, top + HIGH / 2, "nothing fits", fill=INK, anchor="middle", bold=True)
        )
    parts.append(curve([at(one) for one in found.best], INK, 1.4))
    best = {id(one) for one in found.best}
    for one in sorted(found.listed, key=lambda one: id(one) in best):
        parts.append(_dot(*at(one), one, id(one) in best))
    return picture(width, bottom + 40, words, parts)


def _dot(x: float, y: float, one: Candidate, is_best: bool) -> str:
    """Filled if it fits, a ring if that is undecided; large if it is on the list."""
    colour = COLOURS[one.strategy]
    hint = f"{_named(one)}: {short_count(one.tokens_per_second)} tokens/s, {short_bytes(one.peak_bytes)}"
    return element(
        "circle", element("title", hint), cx=x, cy=y, r=5.5 if is_best else 2.8,
        fill=colour if one.fits else PAPER, stroke=colour, stroke_width=1.6,
    )  # fmt: skip


TOKENS = tuple(2**power for power in range(15, 23))

SEARCH = Explorer(
    "search",
    "Search explorer",
    (
        Control("model", "model", "llama3-8b", tuple(TRANSFORMERS)),
        Control("cluster", "cluster", "h100-ib", WITH_MEMORY),
        Control("ranks", "ranks", 64, RANKS),
        Control("tokens", "tokens of an update", 2**21, TOKENS, {one: short_count(one) for one in TOKENS}),
    ),
    _draw,
)
"""`zero-ref search` has more to choose from, and writes the commands."""
