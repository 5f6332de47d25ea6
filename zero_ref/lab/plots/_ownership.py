"""The ownership map of a model in parts: who holds which parameter, and what crosses between workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch

from zero_ref.lab.plots._style import SMALL_PT, TEXT_PT, bare, colour_key, filled_box, in_style, label_box
from zero_ref.live.palette import FAINT, INK, MUTED, PAPER, PART_COLOURS, RANK_COLOURS, rank_colour

BOX_WIDTH, HEADER, ROW, CROSSING, GAP = 0.86, 0.9, 0.8, 1.0, 0.55
"""Sizes in the plot's own units: workers are 1 apart, an arrow takes 1 of height."""


class Crossing(NamedTuple):
    """Something that one worker sends to another.

    Args:
        phase: of the iteration in which it is sent, such as "forward"; written where it changes.
        sender, receiver: workers, by their numbers.
        what: the words beside the arrow.
        tensors: how many tensors travel; a crossing without any is drawn dashed.
    """

    phase: str
    sender: int
    receiver: int
    what: str
    tensors: int = 1


@in_style
def ownership(held: Sequence[Sequence[str]], crossings: Sequence[Crossing], ax: Axes) -> Axes:
    """Each worker with the parameters it holds, and below, in order, what crosses between workers.

    A parameter has its gradient and its optimizer state beside it, on the same worker: three squares.

    >>> from zero_ref.lab.plots import Crossing, figure
    >>> fig, ax = figure(6, 4)
    >>> sent = [Crossing("forward", 0, 1, "activations"), Crossing("step", 0, 1, "the order", tensors=0)]
    >>> _ = ownership([["layer 0"], ["layer 1"]], sent, ax)

    Args:
        held: for each worker the names of its parameters; at most 8 workers.
        crossings: in the order in which they are sent.
    Raises:
        ValueError: there are no workers, or more than 8, or a crossing is not between two of them.
    """
    _check(held, crossings)
    deepest = max(1, *(len(names) for names in held))
    for worker, names in enumerate(held):
        _worker(ax, worker, len(held), names, deepest)
    top = HEADER + deepest * ROW + GAP
    bottom = top + len(crossings) * CROSSING
    for worker in range(len(held)):
        ax.plot([worker] * 2, [top - GAP, bottom], color=FAINT, linewidth=1.4, zorder=0, label="lifeline")
    ticks, before = [], ""
    for number, crossing in enumerate(crossings):
        y = top + (number + 0.62) * CROSSING
        _arrow(ax, crossing, y)
        if crossing.phase != before:
            ticks.append((y, crossing.phase))
            before = crossing.phase
    bare(ax, keep=())
    ax.set_xlim(-0.5, len(held) - 0.5)
    ax.set_ylim(bottom, -0.05)
    ax.set_xticks([])
    ax.set_yticks([y for y, _ in ticks], [phase for _, phase in ticks])
    ax.tick_params(labelcolor=INK)
    names_of_parts = {
        "parameters": "parameter",
        "gradients": "gradient",
        "optimizer state": "optimizer state",
    }
    colour_key(ax, {names_of_parts[part]: colour for part, colour in PART_COLOURS.items()})
    return ax


def _check(held: Sequence[Sequence[str]], crossings: Sequence[Crossing]) -> None:
    if not 1 <= len(held) <= len(RANK_COLOURS):
        raise ValueError(f"{len(held)} workers do not fit: draw 1 to {len(RANK_COLOURS)}.")
    for crossing in crossings:
        ends = {crossing.sender, crossing.receiver}
        if len(ends) < 2 or not ends <= set(range(len(held))):
            raise ValueError(
                f"{crossing.what!r} goes from worker {crossing.sender} to worker {crossing.receiver}: "
                f"name two of the workers 0 to {len(held) - 1}."
            )


def _worker(ax: Axes, worker: int, count: int, names: Sequence[str], deepest: int) -> None:
    colour = rank_colour(worker, count)
    left, right = worker - BOX_WIDTH / 2, worker + BOX_WIDTH / 2
    called = [f"worker {worker}", f"{worker}"]
    filled_box(ax, (left, 0.0, right, HEADER), colour, called, text={"fontsize": TEXT_PT}, linewidth=0)
    body = (left, HEADER, right, HEADER + deepest * ROW)
    filled_box(ax, body, PAPER, edgecolor=colour, linewidth=1.2, zorder=1)
    if not names:
        label_box(
            ax, (left, HEADER, right, HEADER + ROW), ["nothing"], color=MUTED, fontsize=SMALL_PT, zorder=3
        )
    for row, name in enumerate(names):
        y = HEADER + row * ROW
        squares = right - 0.05 - len(PART_COLOURS) * 0.09
        choices = [name, name.split()[-1]]
        label_box(ax, (left, y, squares, y + ROW), choices, color=INK, fontsize=SMALL_PT, zorder=3)
        for place, part in enumerate(PART_COLOURS.values()):
            start = squares + place * 0.09 + 0.01
            square = (start, y + 0.22, start + 0.07, y + ROW - 0.22)
            filled_box(ax, square, part, linewidth=0, zorder=2, label=f"{name}, worker {worker}")


def _arrow(ax: Axes, crossing: Crossing, y: float) -> None:
    ax.add_patch(
        FancyArrowPatch(
            (crossing.sender, y),
            (crossing.receiver, y),
            arrowstyle="-|>",
            mutation_scale=13,
            shrinkA=0,
            shrinkB=0,
            color=INK if crossing.tensors else MUTED,
            linewidth=1.8 if crossing.tensors else 1.2,
            linestyle="-" if crossing.tensors else (0, (4, 3)),
            label="crossing",
        )
    )
    ax.text(
        (crossing.sender + crossing.receiver) / 2,
        y - 0.12,
        crossing.what,
        ha="center",
        va="bottom",
        color=INK if crossing.tensors else MUTED,
        fontsize=SMALL_PT,
        bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 1},
    )
