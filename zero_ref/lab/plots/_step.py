"""One optimizer step under ZeRO, drawn from a real partition."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from zero_ref.lab.plots._style import SMALL_PT, bare, in_style, label_box, names_of, short_names
from zero_ref.live.palette import ALARM, INK, MUTED, PAPER, RANK_COLOURS, rank_colour, text_colour_on, tint
from zero_ref.plan.partition import Partition, Slice

STAGES = {
    "gradients": "Gradients, averaged: the same on every rank",
    "local step": "Each rank steps only what it owns; hatched is old",
    "broadcast": "Each owner sends its new values to the others",
    "parameters": "Parameters: the same on every rank",
}
ROW, GAP, TITLE = 1.0, 0.75, 0.85


@in_style
def step_diagram(
    partition: Partition,
    ax: Axes,
    *,
    names: Sequence[str] | None = None,
    stages: Sequence[str] = tuple(STAGES),
    lost: Collection[int] = (),
) -> Axes:
    """One step from above: ranks as rows, parameters as boxes to scale, coloured by owner.

    >>> from zero_ref.lab.plots import figure
    >>> from zero_ref.plan.rules import sorted_greedy
    >>> fig, ax = figure(6, 6)
    >>> _ = step_diagram(sorted_greedy([6, 5, 4, 2], 2), ax, names=["wte", "qkv", "fc", "proj"])

    Args:
        partition: a small one, of at most 8 ranks.
        names: of the parameters; their numbers if None.
        stages: which of "gradients", "local step", "broadcast", "parameters" to draw, in this order. Each
            keeps the number that it has in the whole step.
        lost: parameters whose broadcast is left out. They stay stale on every rank but their owner.
    Raises:
        ValueError: more than 8 ranks, an unknown stage, or not one name for each parameter.
    """
    world_size = partition.world_size
    names = names_of(partition, names)
    if world_size > len(RANK_COLOURS):
        raise ValueError(f"{world_size} ranks do not fit: draw a step of at most {len(RANK_COLOURS)}.")
    if not set(stages) <= set(STAGES):
        raise ValueError(f"unknown stage in {list(stages)}; choose of {', '.join(STAGES)}.")

    begins = list(accumulate(partition.numels, initial=0))
    pieces = [
        (piece, owner, begins[param] + piece.start, begins[param] + piece.stop)
        for param, of_param in enumerate(partition.pieces_of_param)
        for piece, owner in of_param
        if piece.numel
    ]
    total = begins[-1] or 1
    top, ticks = 0.0, []
    for stage in stages:
        number = list(STAGES).index(stage) + 1
        ax.text(0, top + 0.5 * TITLE, _title(stage, number, lost, partition, names), va="center", color=INK)
        top += TITLE
        for rank in range(world_size):
            for piece, owner, left, right in pieces:
                state = _state(stage, rank, owner, piece, lost)
                _box(
                    ax, (left, top + rank, right, top + rank + 0.86), owner, state, names[piece.param], stage
                )
        if stage == "broadcast":
            _arrows(ax, pieces, world_size, top, total, lost)
        ticks += [(top + rank + 0.43, f"rank {rank}") for rank in range(world_size)]
        top += world_size * ROW + GAP
    ax.set_xlim(0, total)
    ax.set_ylim(top - GAP, 0)
    bare(ax, keep=())
    ax.set_xticks([])
    ax.set_yticks([y for y, _ in ticks], [text for _, text in ticks])
    ax.tick_params(labelcolor=INK)
    return ax


def _state(stage: str, rank: int, owner: int, piece: Slice, lost: Collection[int]) -> str:
    """What a rank holds of a piece at a stage: "gradient", "new", "old", "not sent" or "stale"."""
    if stage == "gradients":
        return "gradient"
    if rank == owner:
        return "new"
    if stage == "parameters":
        return "stale" if piece.param in lost else "new"
    return "not sent" if stage == "broadcast" and piece.param in lost else "old"


def _title(stage: str, number: int, lost: Collection[int], partition: Partition, names: Sequence[str]) -> str:
    if stage == "parameters" and lost and partition.world_size > 1:
        which = ", ".join(names[param] for param in sorted(lost))
        return f"{number}  Never sent, so stale on all but the owner: {which}"
    if stage == "broadcast" and partition.world_size == 1:
        return f"{number}  One rank: nothing to send"
    return f"{number}  {STAGES[stage]}"


def _box(
    ax: Axes, box: tuple[float, float, float, float], owner: int, state: str, name: str, stage: str
) -> None:
    left, top, right, bottom = box
    colour = rank_colour(owner, len(RANK_COLOURS))
    face = {"gradient": tint(colour, 0.4), "new": colour, "old": PAPER, "not sent": PAPER, "stale": PAPER}[
        state
    ]
    hatched = state in ("old", "not sent", "stale")
    ax.add_patch(
        Rectangle(
            (left, top),
            right - left,
            bottom - top,
            facecolor=face,
            edgecolor=ALARM if state == "stale" else tint(MUTED, 0.45) if hatched else PAPER,
            hatch="////" if hatched else None,
            linewidth=0 if hatched else 1.2,
            label=f"{stage}: {state}, owner {owner}",
        )
    )
    if not hatched:
        prefix = "∇" if state == "gradient" else ""
        choices = [prefix + short for short in short_names(name)]
        label_box(ax, (left, bottom, right, top), choices, color=text_colour_on(face), fontsize=SMALL_PT)
    elif state != "old":
        label_box(
            ax,
            (left, bottom, right, top),
            [state],
            color=ALARM,
            fontsize=SMALL_PT,
            weight="bold",
            bbox={"facecolor": PAPER, "linewidth": 0, "pad": 1.5},
        )


def _arrows(
    ax: Axes,
    pieces: Sequence[tuple[Slice, int, int, int]],
    world_size: int,
    top: float,
    total: int,
    lost: Collection[int],
) -> None:
    """From each owner straight up and down its column: a parameter has the same place on every rank."""
    for piece, owner, left, right in pieces:
        if piece.param in lost or right - left < total / 40:
            continue
        middle = (left + right) / 2
        for marker, edge, receivers in (
            ("^", top + owner, range(owner - 1, -1, -1)),
            ("v", top + owner + 0.86, range(owner + 1, world_size)),
        ):
            if receivers:
                ends = [top + rank + 0.43 for rank in receivers]
                line = [middle] * (len(ends) + 1), [edge, *ends]
                ax.plot(*line, color=PAPER, linewidth=5.5, solid_capstyle="butt")
                ax.plot(*line, color=rank_colour(owner, world_size), linewidth=2.2, solid_capstyle="butt")
                ax.plot(
                    *([middle] * len(ends), ends),
                    marker,
                    color=rank_colour(owner, world_size),
                    markersize=9,
                    markeredgecolor=PAPER,
                    label=f"from {owner}",
                )
