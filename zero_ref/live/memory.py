"""The memory explorer, and a picture of what a rank holds beside the device's memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from zero_ref.live.explorer import RANKS, Answer, Control, Explorer, controls_of, params_of
from zero_ref.live.numbers import short_bytes
from zero_ref.live.palette import ALARM, INK, ITEM_COLOURS
from zero_ref.live.svg import LINE, MARGIN, Drawing, Stacked, axis, bar, centred, key, line, picture, text
from zero_ref.simulator import spread
from zero_ref.simulator.cluster import CLUSTERS
from zero_ref.simulator.device import Device
from zero_ref.simulator.ledger import CONVENTIONS, STATE_RULES
from zero_ref.simulator.memory import MemorySettings, average_memory
from zero_ref.simulator.models import TRANSFORMERS
from zero_ref.simulator.peak import with_peak
from zero_ref.simulator.scenario import Scenario

WITH_MEMORY = tuple(name for name, one in CLUSTERS.items() if one.device.memory_gb is not None)
"""The clusters whose devices have a known memory, so that something can be said to fit."""

DEVICES: dict[str, Device] = {CLUSTERS[name].device.name: CLUSTERS[name].device for name in WITH_MEMORY}

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
    bars = {f"stage {one}": items for one, items in enumerate(held)}
    parts, bottom = items_bars(bars, device_bytes, f"stage {stage}", MARGIN, 14.0, width - 2 * MARGIN)
    svg = picture(width, bottom, words, parts)
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
    return coloured(memory.peak_items)


def memory_items(
    items_by_name: Mapping[str, Mapping[str, float]],
    *,
    device_bytes: float | None = None,
    chosen: str | None = None,
) -> Drawing:
    """Draw what a rank holds, item by item, one bar below the other, against the device's memory.

    >>> from zero_ref.simulator.models import shapes, specs
    >>> params = specs(shapes("llama3-8b"))
    >>> held = {
    ...     f"stage {stage}": average_memory(params, 64, MemorySettings(stage)).items for stage in range(4)
    ... }
    >>> memory_items(held, device_bytes=80e9, chosen="stage 1").words
    'stage 0: 145 GB; stage 1: 49.7 GB; stage 2: 17.8 GB; stage 3: 7.08 GB; the device has 80 GB'

    Args:
        items_by_name: name of the bar -> item -> bytes, as `Memory.items` gives them.
        device_bytes: of the device's memory, drawn as a line; far above all bars it is only named.
        chosen: the bar that is marked, its total set bold.
    Raises:
        ValueError: there is no bar, or `chosen` is none of them.
    """
    if not items_by_name or (chosen is not None and chosen not in items_by_name):
        raise ValueError(f"there are bars {list(items_by_name)}, and none named {chosen!r}.")
    said = [f"{name}: {short_bytes(sum(items.values()))}" for name, items in items_by_name.items()]
    if device_bytes is not None:
        said.append(f"the device has {short_bytes(device_bytes)}")

    def draw(width: float) -> Stacked:
        return items_bars(items_by_name, device_bytes, chosen, MARGIN, 14.0, width - 2 * MARGIN)

    return Drawing("; ".join(said), draw)


def items_bars(
    items_by_name: Mapping[str, Mapping[str, float]], device_bytes: float | None, chosen: str | None,
    x: float, y: float, width: float,
) -> Stacked:  # fmt: skip
    """Draw the bars of `memory_items` at a place of a larger picture. A bar without a name has no title."""
    held = {name: coloured(items) for name, items in items_by_name.items()}
    shown = [item for item in ITEM_COLOURS if any(items[item] for items in held.values())]
    parts, top = key({item: ITEM_COLOURS[item] for item in shown}, x, y, width)
    totals = {name: sum(items.values()) for name, items in held.items()}
    most = scale_bytes(list(totals.values()), device_bytes or 0.0) or 1.0
    begin, y = top + LINE, top + LINE + 4
    bars, titles = [], []
    for name, items in held.items():
        if name:
            over = device_bytes is not None and spread.fits(totals[name], device_bytes) is False
            title = f"{'▸ ' if name == chosen else ''}{name}: {short_bytes(totals[name])}"
            fill = ALARM if over else INK
            titles.append(text(x, y + 13, title, fill=fill, bold=name == chosen, halo=True))
            y += LINE
        left = x
        for item, nbytes in items.items():
            wide = width * nbytes / most
            bars.append(bar(left, y, wide, HIGH, ITEM_COLOURS[item], f"{item}: {short_bytes(nbytes)}"))
            left += wide
        y += HIGH + 12
    parts += [*axis(x, width, begin, y, most, short_bytes), *bars]
    if device_bytes is not None:
        parts += device_mark(device_bytes, most, x, width, begin, y)
    return parts + titles, y + 26


def coloured(items: Mapping[str, float]) -> dict[str, float]:
    """Bytes by the items that have a colour; all the rest is "other"."""
    named = {item: items.get(item, 0.0) for item in ITEM_COLOURS}
    named["other"] += sum(nbytes for item, nbytes in items.items() if item not in ITEM_COLOURS)
    return named


def scale_bytes(totals: Sequence[float], device_bytes: float) -> float:
    """The right end of the scale: all bars fit, and the device's memory unless it is far off."""
    most = max(totals)
    return 1.02 * (most if device_bytes > FAR * most else max(most, device_bytes))


def device_mark(
    device_bytes: float, most: float, x: float, width: float, top: float, bottom: float
) -> list[str]:
    """The device's memory as a line through the bars, or where to look for it."""
    words = f"the device's {short_bytes(device_bytes)}"
    if device_bytes > most:
        return [text(x + width, top - 5, f"{words}: far to the right", fill=ALARM, anchor="end")]
    at = x + width * device_bytes / most
    return [line(at, top, at, bottom, ALARM, 1.6, "5 3"), centred(at, top - 5, words, ALARM, x, x + width)]


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
