"""Where a program departs from the plain loop: a row a parameter, a column a rank, a cell the elements."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from zero_ref.live.palette import ALARM, MUTED, SERIES_COLOURS
from zero_ref.live.svg import MARGIN, Drawing, Stacked, bar, key, paragraph, text, text_width

EQUAL = SERIES_COLOURS[5]
ROW, GAP = 22.0, 6.0
"""Pixels of a row, and between two cells."""
MOST_ROWS = 24
"""Of a model with more parameters those that depart come first, and the others are counted."""


class Part(NamedTuple):
    """Elements of a parameter that depart on one rank: those from `start` to before `stop`."""

    parameter: str
    rank: int
    start: int
    stop: int


def departures(title: str, numels: Mapping[str, int], ranks: int, parts: Sequence[Part]) -> Drawing:
    """Which elements of which parameter depart, on which rank.

    >>> drawing = departures("step 0", {"weight": 8, "bias": 2}, 2, [Part("weight", 1, 4, 8)])
    >>> drawing.words
    'step 0. On rank 1 of 2: weight[4:8].'

    Args:
        numels: the elements of every parameter, in the model's order.
        ranks: their number.
    """
    by_rank: dict[int, list[str]] = {}
    for part in parts:
        by_rank.setdefault(part.rank, []).append(f"{part.parameter}[{part.start}:{part.stop}]")
    said = [f"On rank {rank} of {ranks}: {', '.join(by_rank[rank])}." for rank in sorted(by_rank)]
    words = " ".join([f"{title}.", *said]) if said else f"{title}. Nothing departs."
    departing = {part.parameter for part in parts}
    shown = list(numels)
    if len(shown) > MOST_ROWS:
        shown = sorted(shown, key=lambda name: name not in departing)[:MOST_ROWS]
    places = {(part.parameter, part.rank): part for part in parts}

    def draw(width: float) -> Stacked:
        drawn, y = paragraph(title, MARGIN, 24, width - 2 * MARGIN, bold=True)
        names = min(max(map(text_width, shown), default=0.0) + 10, width / 2)
        left, y = MARGIN + names, y + 6
        wide = (width - MARGIN - left + GAP) / ranks
        gap = GAP if wide > 3 * GAP else 1.0
        apart = max(1, math.ceil(text_width("1000") / wide))
        for rank in range(0, ranks, apart):
            at = left + rank * wide
            said = f"rank {rank}" if wide > text_width("rank 10") else str(rank)
            drawn.append(text(at + (wide - gap) / 2, y, said, fill=MUTED, anchor="middle"))
        y += 8
        for name in shown:
            drawn.append(text(left - 10, y + ROW - 9, _fitting(name, names - 10), anchor="end"))
            for rank in range(ranks):
                at, cell = left + rank * wide, wide - gap
                drawn.append(bar(at, y, cell, ROW - GAP, EQUAL, f"{name} on rank {rank}: equal"))
                if part := places.get((name, rank)):
                    scale = cell / max(1, numels[name])
                    long = max(2.0, scale * (part.stop - part.start))
                    hint = f"{name}[{part.start}:{part.stop}] on rank {rank} departs"
                    drawn.append(
                        bar(min(at + scale * part.start, at + cell - long), y, long, ROW - GAP, ALARM, hint)
                    )
            y += ROW
        if left_out := len(numels) - len(shown):
            more = f"{left_out} more parameters are not drawn."
            drawn.append(text(MARGIN, y + 14, more, fill=MUTED))
            y += ROW
        meanings, y = key(
            {"as in the plain loop": EQUAL, "departs": ALARM}, MARGIN, y + 8, width - 2 * MARGIN
        )
        return [*drawn, *meanings], y + 4

    return Drawing(words, draw)


def _fitting(name: str, width: float) -> str:
    """The name, without its middle if it is wider than that.

    >>> _fitting("blocks.30.attention.query.weight", 100)
    'blocks…weight'
    """
    if text_width(name) <= width:
        return name
    most = int(width / text_width("m"))
    begins = max(1, (most - 1) // 2)
    return f"{name[:begins]}…{name[begins - most + 1 :]}"
