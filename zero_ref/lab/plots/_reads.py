"""Which rank reads which bytes of which file, as when a sharded checkpoint is loaded by other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes

from zero_ref.lab.plots._style import bare, filled_box, in_style
from zero_ref.live.palette import INK, PAPER, RANK_COLOURS, rank_colour

BAR = 0.8
"""The height of a file's bar; files are 1 apart."""


class Read(NamedTuple):
    """Bytes `start` to `stop` of a file, and the rank that reads them.

    Args:
        file: its number, from 0.
    """

    file: int
    start: int
    stop: int
    reader: int


@in_style
def file_reads(reads: Sequence[Read], ax: Axes, *, names: Sequence[str]) -> Axes:
    """Draw a bar for each file, to scale, and in it the ranges of bytes in the colours of their readers.

    A range says its reader and, below, its bytes, where they fit.

    >>> from zero_ref.lab.plots import Read, figure
    >>> fig, ax = figure(6, 2)
    >>> _ = file_reads([Read(0, 0, 512, 0), Read(1, 0, 256, 0), Read(1, 256, 512, 1)], ax, names=["a", "b"])

    Args:
        reads: in any order.
        names: of the files, in the order of their numbers.
    Raises:
        ValueError: a reader is not one of at most 8 ranks, or a file has no name.
    """
    for read in reads:
        if not (0 <= read.reader < len(RANK_COLOURS) and 0 <= read.file < len(names)):
            raise ValueError(
                f"{read} does not fit: readers are ranks 0 to {len(RANK_COLOURS) - 1}, and there are "
                f"{len(names)} names of files."
            )
        box = (read.start, read.file + BAR, read.stop, read.file)
        colour, label = rank_colour(read.reader, len(RANK_COLOURS)), f"rank {read.reader}"
        nbytes = f"{read.stop - read.start:,}"
        choices = [f"{label}\n{nbytes}", f"{read.reader}\n{nbytes}", f"{read.reader}"]
        filled_box(ax, box, colour, choices, edgecolor=PAPER, linewidth=1.6, label=label)
    ax.set_xlim(0, max((read.stop for read in reads), default=1))
    ax.set_ylim(len(names), BAR - 1)
    bare(ax, keep=())
    ax.set_xticks([])
    ax.set_xlabel("bytes, end to end, to scale", loc="left")
    ax.set_yticks([file + BAR / 2 for file in range(len(names))], names)
    ax.tick_params(labelcolor=INK)
    return ax
