"""Pictures of memory: parameters, gradients and optimizer state, stacked."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from zero_ref.lab.plots._style import (
    TEXT_PT,
    colour_key,
    in_style,
    numbered,
    stacked_rows,
    with_levels,
    write_beside,
)
from zero_ref.live.numbers import short, short_bytes
from zero_ref.live.palette import PART_COLOURS
from zero_ref.simulator.ledger import MIXED_16, Convention, ledger

MOST_NAMED_BARS = 24
"""More bars than this in one picture are too narrow for their rank numbers."""

MOST_BARS = 256
"""More than this are thinner than a pixel on a phone: one outline each part says the same."""

STAGE_NAMES = {
    0: "Stage 0: everything on every rank",
    1: "Stage 1: optimizer state divided",
    2: "Stage 2: gradients divided too",
    3: "Stage 3: parameters divided too",
}

Held = tuple[float, float, float]
"""Bytes of parameters, of gradients and of optimizer state on one rank (`zero_ref.lab.meter.HeldBytes`)."""


@in_style
def memory_by_rank(held_by_strategy: Mapping[str, Sequence[Held]], ax: Axes) -> Axes:
    """Draw what each rank holds, stacked, for one strategy or several side by side.

    >>> from zero_ref.lab.plots import figure
    >>> fig, ax = figure(6, 3)
    >>> ddp = [(40e6, 40e6, 80e6), (40e6, 40e6, 80e6)]
    >>> zero = [(40e6, 40e6, 44e6), (40e6, 40e6, 36e6)]
    >>> _ = memory_by_rank({"ddp": ddp, "zero": zero}, ax)

    Args:
        held_by_strategy: for each strategy, for each rank, its bytes of (parameters, gradients, optimizer
            state). Measured ones are HeldBytes; of a Schedule take
            `list(zip(schedule.parameter_bytes, schedule.gradient_bytes, schedule.state_bytes))`.
    Raises:
        ValueError: there is no strategy, or one has another number of ranks.
    """
    counts = {name: len(held) for name, held in held_by_strategy.items()}
    if len(set(counts.values())) != 1 or 0 in counts.values():
        raise ValueError(
            f"each strategy needs the bytes of the same ranks, at least one; got ranks {counts}."
        )
    world_size = next(iter(counts.values()))
    bars = world_size * len(counts)
    for place, held in enumerate(held_by_strategy.values()):
        edges = [place - 0.42 + 0.84 * bar / world_size for bar in range(world_size + 1)]
        _stack(ax, edges, held, bars)
        fullest = max(sum(of_rank) for of_rank in held)
        write_beside(ax, short_bytes(fullest), (place, fullest), (0, 3), ha="center")

    named = bars <= MOST_NAMED_BARS and world_size > 1
    at = [
        place - 0.42 + 0.84 * (rank + 0.5) / world_size
        for place in range(len(counts))
        for rank in range(world_size)
    ]
    ax.set_xticks(
        at if named else [], [str(rank) for rank in range(world_size)] * len(counts) if named else []
    )
    for place, name in enumerate(counts):
        wrapped = textwrap.fill(name, max(8, 52 // len(counts)))
        below: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "annotation_clip": False}
        shift = 0, -22 if named else -7
        write_beside(ax, wrapped, (place, 0), shift, ha="center", va="top", fontsize=TEXT_PT, **below)
    with_levels(ax)
    numbered(ax.yaxis, short_bytes, MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
    ax.margins(x=0.02, y=0.12)
    colour_key(ax, PART_COLOURS)
    which = "each rank" if named else f"each of {world_size:,} ranks"
    ax.set_title("Bytes" if world_size == 1 else f"Bytes on {which} (number: the fullest)", pad=30)
    return ax


def _stack(ax: Axes, edges: Sequence[float], held: Sequence[Held], bars: int) -> None:
    """The bars of one strategy between `edges`, part upon part."""
    base = [0.0] * len(held)
    for (part, colour), values in zip(PART_COLOURS.items(), zip(*held)):
        top = [low + value for low, value in zip(base, values)]
        if bars > MOST_BARS:
            ax.stairs(top, edges, baseline=base, fill=True, color=colour, linewidth=0, label=part)
        else:
            width = (edges[1] - edges[0]) * (0.88 if bars <= 2 * MOST_NAMED_BARS else 1)
            centres = [(left + right) / 2 for left, right in pairwise(edges)]
            ax.bar(centres, values, width, bottom=base, color=colour, label=part)
        base = top


@in_style
def ledger_stages(
    numel: int,
    world_sizes: Sequence[int],
    ax: Axes,
    *,
    convention: Convention = MIXED_16,
    stages: Sequence[int] = (0, 1, 2, 3),
) -> Axes:
    """Draw what one rank holds under each ZeRO stage, as ranks are added.

    >>> from zero_ref.lab.plots import figure
    >>> fig, ax = figure(6, 5.5)
    >>> _ = ledger_stages(7_500_000_000, [1, 4, 64, 1024], ax)

    Args:
        numel: parameters of the model; 1 for bytes per parameter.
        world_sizes: numbers of ranks.
        convention: which bytes are counted; its summary is written below the bars.
        stages: of ZeRO; 0 is plain data parallelism.
    Source:
        ZeRO (arXiv:1910.02054), figure 1, by `zero_ref.simulator.ledger.ledger`.
    """
    bars: dict[str, dict[str, Held]] = {}
    for stage in stages:
        of_stage = bars.setdefault(STAGE_NAMES[stage], {})
        for n in world_sizes:
            books = ledger(numel, n, stage, convention)
            parts = books.parameter_bytes, books.gradient_bytes, books.optimizer_bytes
            of_stage[f"{n:,} rank{'s' if n > 1 else ''}"] = parts
    ax.margins(x=0.02)
    stacked_rows(ax, bars, PART_COLOURS, short if numel == 1 else short_bytes, between=1.3)
    ax.set_xlim(left=0)
    ax.set_xlabel(textwrap.fill(f"Counted: {convention.summary or convention}", 62), loc="left")
    ax.set_title("Bytes per parameter on one rank" if numel == 1 else "Bytes on one rank", pad=30)
    return ax
