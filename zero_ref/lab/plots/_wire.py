"""The cost of collectives: bytes on the wire against ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from zero_ref.lab.plots._style import in_style, key_above, numbered, with_levels
from zero_ref.live.numbers import short
from zero_ref.live.palette import ALARM, INK, SERIES_COLOURS

SHAPES = ("o", "s", "D", "^", "v", "p", "h", "*")
SIZES_PT = (17.0, 12.0, 7.5, 4.0)
"""Largest first: where several marks lie on one point, each is seen around the next."""

OFF_THE_LINE = 0.05
"""A measurement this much away from its line is marked: headers of packets are far below it."""


# ------------------------------------------------------------------------------------------ bytes on the wire


@in_style
def bytes_on_wire(
    lines: Mapping[str, Callable[[int], float]],
    line_of_op: Mapping[str, str],
    measured: Mapping[str, Mapping[int, float]],
    ax: Axes,
) -> Axes:
    """Bytes on the wire over the payload, against the number of ranks: lines are theory, marks measurements.

    A mark away from the line where theory has its operation stands out, with a dotted line from there.

    >>> from zero_ref.lab.plots import figure
    >>> fig, ax = figure(6, 3.4)
    >>> lines = {"2 (N - 1)": lambda n: 2 * (n - 1), "N - 1": lambda n: n - 1}
    >>> of_op = {"all_reduce": "2 (N - 1)", "broadcast": "N - 1"}
    >>> _ = bytes_on_wire(lines, of_op, {"all_reduce": {2: 2.0, 4: 6.0}, "broadcast": {2: 1.0}}, ax)

    Args:
        lines: name of a line -> its height for a number of ranks.
        line_of_op: operation -> the line on which theory has it; at most 4 on one, 8 in all.
        measured: operation -> number of ranks -> bytes of all ranks over the payload. May be empty.
    Raises:
        ValueError: more operations than there are marks, or one whose line is unknown.
    """
    if len(line_of_op) > len(SHAPES):
        raise ValueError(f"{len(line_of_op)} operations: there are marks for {len(SHAPES)}.")
    sizes: dict[str, float] = {}
    for name in lines:
        on_it = [op for op, line in line_of_op.items() if line == name]
        if len(on_it) > len(SIZES_PT):
            raise ValueError(
                f"{len(on_it)} operations on the line {name!r}: at most {len(SIZES_PT)} are seen."
            )
        sizes |= dict(zip(on_it, SIZES_PT))
    styles = {op: (shape, sizes[op]) for shape, op in zip(SHAPES, line_of_op) if op in sizes}
    unknown = [op for op in (*line_of_op, *measured) if op not in styles]
    if unknown:
        raise ValueError(f"no line for {unknown[0]!r}: give one of {', '.join(lines)} in line_of_op.")

    most = max([8, *(n for of_op in measured.values() for n in of_op)])
    colours = dict(zip(lines, SERIES_COLOURS))
    off = set()
    for name, height in lines.items():
        ranks = range(1, most + 1)
        ax.plot(ranks, [height(n) for n in ranks], color=colours[name], linewidth=1.8, label=name)
    for op, of_op in measured.items():
        for n, found in of_op.items():
            expected = lines[line_of_op[op]](n)
            wrong = abs(found - expected) > OFF_THE_LINE * expected
            if wrong:
                off.add(op)
                ax.plot(
                    [n, n], [expected, found], color=ALARM, linewidth=1.4, linestyle=":", label=f"off: {op}"
                )
            ax.plot([n], [found], **_mark(styles[op], ALARM if wrong else INK), label=op)
    tallest = max(height(most) for height in lines.values())
    for name, height in lines.items():
        ax.text(1.05 * most, height(most), name, va="center", color=colours[name], clip_on=False)
    ax.set_xlim(0.8, 1.03 * most)
    ax.set_ylim(0, 1.1 * tallest)
    with_levels(ax)
    ax.set_xticks(sorted({1, 2, 4, most, *(n for of_op in measured.values() for n in of_op)}))
    numbered(ax.yaxis, lambda value: f"{short(value)} ×", MaxNLocator(5, integer=True))
    ax.set_xlabel("ranks N")
    ax.set_title("Bytes on the wire, as multiples of the payload", pad=8 if not measured else 48)
    if measured:
        _mark_key(ax, {op: _mark(styles[op], ALARM if op in off else INK) for op in measured})
    return ax


def _mark(style: tuple[str, float], colour: str) -> dict[str, Any]:
    shape, size = style
    return {
        "linestyle": "none",
        "marker": shape,
        "ms": size,
        "markeredgewidth": 1.6,
        "markeredgecolor": colour,
        "markerfacecolor": colour if size == SIZES_PT[-1] else "none",
    }


def _mark_key(ax: Axes, marks: Mapping[str, dict[str, Any]]) -> None:
    """A mark for each operation, in two rows above the Axes."""
    handles = [Line2D([], [], **(mark | {"ms": min(mark["ms"], 10)}), label=op) for op, mark in marks.items()]
    key_above(ax, handles, columns=3, handletextpad=0.3)
