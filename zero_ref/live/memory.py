"""The memory explorer: what a rank holds under each stage, beside the device's memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from zero_ref.live.explorer import RANKS, Answer, Control, Explorer, controls_of, params_of
from zero_ref.live.numbers import short_bytes
from zero_ref.live.palette import ALARM, INK, ITEM_COLOURS
from zero_ref.live.svg import LINE, MARGIN, Stacked, axis, bar, centred, key, line, picture, text
from zero_ref.simulator import spread
from zero_ref.simulator.cluster import CLUSTERS, Device
from zero_ref.simulator.ledger import CONVENTIONS, STATE_RULES
from zero_ref.simulator.memory import Memory, MemorySettings, average_memory, with_peak
from zero_ref.simulator.models import TRANSFORMERS
from zero_ref.simulator.scenario import Scenario

DEVICES: dict[str, Device] = {
    one.device.name: one.device for one in CLUSTERS.values() if one.device.memory_gb is not None
}

FAR = 3.0
"""A device's memory this many times above all bars would press them flat: it is named, not drawn."""

HIGH = 26.0
"""Pixels of a bar of items."""

VERDICTS = {True: ".", False: ", which is too much.", None: ": whether that fits is undecided."}


def _draw(width: float, model: str, ranks: int, stage: int, device: str, **counted: Any) -> Answer:
    held = [_items(model, ranks, one, device, **counted) for one in range(4)]
    totals = [sum(items.values()) for items in held]
    device_bytes = 1e9 * (DEVICES[device].memory_gb or 0)
    numbers = {
        f"stage {one}, {item}, bytes": nbytes
        for one, items in enumerate(held)
        for item, nbytes in items.items()
    }
    verdict = VERDICTS[spread.fits(totals[stage], device_bytes)]
    words = (
        f"{model} on {ranks:,} rank{'s' if ranks > 1 else ''} under stage {stage}: each rank holds up to "
        f"{short_bytes(totals[stage])} of the {short_bytes(device_bytes)} of an {device}{verdict} "
        f"Plain data parallelism would hold {short_bytes(totals[0])}."
    )
    svg = _picture(width, held, device_bytes, stage, words)
    return Answer(svg, words, _table(held), {**numbers, "device, bytes": device_bytes})


@lru_cache(maxsize=64)
def _items(
    model: str, ranks: int, stage: int, device: str, convention: str, optimizer: str, **of_scenario: Any
) -> dict[str, float]:
    # The scenario counts the activations, which are the same on every cluster.
    kept = Scenario(TRANSFORMERS[model], CLUSTERS["h100-ib"], ranks, **of_scenario).activations
    settings = MemorySettings(
        stage,
        convention,
        optimizer,
        activation_bytes=kept.kept,
        head_bytes=kept.head,
        loss_bytes=kept.loss,
        block_bytes=kept.again + kept.gradients,
        masters_apart=convention == "mixed-16" and stage < 3,
    )
    params = params_of(model)
    memory = with_peak(
        average_memory(params, ranks, settings),
        params,
        settings,
        allocator_share=DEVICES[device].allocator_share,
        library_bytes=1e9 * DEVICES[device].library_gb,
    )
    return named_items(memory)


def named_items(memory: Memory) -> dict[str, float]:
    """What a rank holds when it holds most, by the items that have a colour; all the rest is "other"."""
    at_peak = memory.peak_items
    named = {item: at_peak.get(item, 0.0) for item in ITEM_COLOURS}
    return {**named, "other": memory.peak_bytes - sum(named.values())}


def items_key(held: Sequence[Mapping[str, float]], x: float, y: float, width: float) -> Stacked:
    """The colours of what somebody holds."""
    shown = {item: colour for item, colour in ITEM_COLOURS.items() if any(items[item] > 0 for items in held)}
    return key(shown, x, y, width)


def scale_bytes(totals: Sequence[float], device_bytes: float) -> float:
    """The right end of the scale: all bars fit, and the device's memory unless it is far off."""
    most = max(totals)
    return 1.02 * (most if device_bytes > FAR * most else max(most, device_bytes))


def items_bar(items: Mapping[str, float], x: float, y: float, px_per_byte: float) -> list[str]:
    """A bar of items, one behind the other."""
    parts = []
    for item, nbytes in items.items():
        wide = px_per_byte * nbytes
        parts.append(bar(x, y, wide, HIGH, ITEM_COLOURS[item], f"{item}: {short_bytes(nbytes)}"))
        x += wide
    return parts


def device_mark(
    device_bytes: float, most: float, x: float, width: float, top: float, bottom: float
) -> list[str]:
    """The device's memory as a line through the bars, or where to look for it."""
    words = f"the device's {short_bytes(device_bytes)}"
    if device_bytes > most:
        return [text(x + width, top - 5, f"{words}: far to the right", fill=ALARM, anchor="end")]
    at = x + width * device_bytes / most
    return [line(at, top, at, bottom, ALARM, 1.6, "5 3"), centred(at, top - 5, words, ALARM, x, x + width)]


def _picture(width: float, held: list[dict[str, float]], device_bytes: float, stage: int, words: str) -> str:
    left, wide = MARGIN, width - 2 * MARGIN
    parts, top = items_key(held, left, 14, wide)
    totals = [sum(items.values()) for items in held]
    most = scale_bytes(totals, device_bytes)
    begin, y = top + LINE, top + LINE + 4
    for one, items in enumerate(held):
        over = spread.fits(totals[one], device_bytes) is False
        name = f"{'▸ ' if one == stage else ''}stage {one}: {short_bytes(totals[one])}"
        parts.append(text(left, y + 13, name, fill=ALARM if over else INK, bold=one == stage))
        parts += items_bar(items, left, y + LINE, wide / most)
        y += LINE + HIGH + 12
    grid = axis(left, wide, begin, y, most, short_bytes)
    parts += device_mark(device_bytes, most, left, wide, begin, y)
    return picture(width, y + 26, words, [*grid, *parts])


def _table(held: list[dict[str, float]]) -> list[list[str]]:
    rows = [["on each rank", *(f"stage {one}" for one in range(4))]]
    for item in ITEM_COLOURS:
        if any(items[item] for items in held):
            rows.append([item, *(short_bytes(items[item]) for items in held)])
    return [*rows, ["at the peak", *(short_bytes(sum(items.values())) for items in held)]]


MEMORY = Explorer(
    "memory",
    "Memory explorer",
    (
        Control("model", "model", "llama3-8b", tuple(TRANSFORMERS)),
        Control("ranks", "ranks", 64, RANKS),
        Control("stage", "ZeRO stage", 1, range(4)),
        Control("convention", "bytes counted", "mixed-16", tuple(CONVENTIONS)),
        Control("optimizer", "optimizer", "AdamW", tuple(STATE_RULES)),
        Control("device", "device", "H100 80 GB", tuple(DEVICES)),
        *controls_of(
            Scenario, ("batch", "sequence", "checkpointing"), sequence=8192, checkpointing="by-operation"
        ),
    ),
    _draw,
    along="ranks",
)
"""Averages: what a stage divides is taken to divide evenly (`simulator.memory.average_memory`)."""
