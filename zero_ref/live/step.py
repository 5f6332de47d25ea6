"""One ZeRO step from above: what each rank holds in each of its four phases, from a real partition."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from html import escape
from itertools import accumulate
from typing import NamedTuple
from zlib import crc32

from zero_ref.live.names import names_of, short_names
from zero_ref.live.palette import ALARM, MUTED, PAPER, RANK_COLOURS, rank_colour, text_colour_on, tint
from zero_ref.live.svg import BOLD, Drawing, Stacked, element, line, paragraph, text, text_width
from zero_ref.plan.partition import Partition, Slice

PHASES = {
    "reduce": "Gradients are averaged over all ranks",
    "step": "Each rank updates only what it owns",
    "broadcast": "Each owner sends its new values",
    "equal": "All ranks hold the same again",
}
LOST = {"broadcast": "not sent", "equal": "stale"}
"""What is written where a parameter's new values are missing, by phase."""

SIDE, NAMES, NUMBER, EACH = 14.0, 50.0, 16.0, 36.0
"""Pixels of the margins, of the ranks' names, of a phase's number, and from one rank to the next."""

HEAD = 6.0
"""Pixels of half an arrow's head."""


def step_diagram(
    partition: Partition,
    *,
    names: Sequence[str] | None = None,
    phases: Sequence[str] = tuple(PHASES),
    lost: Collection[int] = (),
) -> Drawing:
    """One step from above: ranks as rows, parameters as boxes to scale, coloured by owner; hatched is old.

    >>> from zero_ref.plan.rules import sorted_greedy
    >>> step_diagram(sorted_greedy([6, 5, 4, 2], 2), names=["wte", "qkv", "fc", "proj"]).words
    'One step of ZeRO on 2 ranks: reduce, step, broadcast, equal.'

    Args:
        partition: a small one, of at most 8 ranks.
        names: of the parameters; their numbers if None.
        phases: which of "reduce", "step", "broadcast", "equal" to draw, in this order. Each keeps the number
            that it has in the whole step.
        lost: parameters whose broadcast is left out. They stay stale on every rank but their owner.
    Raises:
        ValueError: more than 8 ranks, an unknown phase, or not one name for each parameter.
    """
    names = names_of(partition, names)
    if partition.world_size > len(RANK_COLOURS):
        raise ValueError(
            f"{partition.world_size} ranks do not fit: draw a step of at most {len(RANK_COLOURS)}."
        )
    if not set(phases) <= set(PHASES):
        raise ValueError(f"unknown phase in {list(phases)}; choose of {', '.join(PHASES)}.")
    words = f"One step of ZeRO on {partition.world_size} ranks: {', '.join(phases)}."
    board = Board(partition, names, f"old-{crc32(words.encode()):08x}", SIDE + NAMES, 0.0, lost)
    return Drawing(words, partial(_draw, board, phases))


def _draw(board: Board, phases: Sequence[str], width: float) -> Stacked:
    board = board._replace(width=width - 2 * SIDE - NAMES)
    parts, y = [board.hatching()], SIDE
    for phase in phases:
        of_phase, y = board.phase(phase, y, EACH)
        parts += of_phase
        y += 12
    parts.append(text(board.left, y + 8, "a colour: an owner; hatched: old", fill=MUTED))
    return parts, y + 18


class Board(NamedTuple):
    """The parameters end to end: where each piece lies, and how it looks.

    Args:
        hatch: the name of the hatching in the picture that the board is in.
        left, width: of the parameters; the ranks' names are to their left.
        lost: parameters whose broadcast is left out.
    """

    partition: Partition
    names: Sequence[str]
    hatch: str
    left: float
    width: float
    lost: Collection[int] = ()

    def boxes(self) -> list[tuple[Slice, int, float, float]]:
        """Each piece, its owner, its left edge and its width."""
        begins = list(accumulate(self.partition.numels, initial=0))
        px = self.width / (begins[-1] or 1)
        return [
            (piece, owner, self.left + px * (begins[piece.param] + piece.start), px * piece.numel)
            for of_param in self.partition.pieces_of_param
            for piece, owner in of_param
            if piece.numel
        ]

    def phase(self, phase: str, y: float, each: float) -> Stacked:
        """All ranks in a phase, below each other so many pixels apart, and the phase's name above them."""
        parts = [text(self.left - NAMES, y + 11, str(list(PHASES).index(phase) + 1))]
        left, room = self.left - NAMES + NUMBER, self.width + NAMES - NUMBER
        title, base = paragraph(self._title(phase), left, y + 11, room)
        parts, y = [*parts, *title], base - 11
        for rank in range(self.partition.world_size):
            low = y + each * rank
            parts.append(text(self.left - NAMES, low + each / 2 + 3, f"rank {rank}", fill=MUTED))
            parts += self.row(low, each - 3, phase, rank)
        if phase == "broadcast":
            parts += self._arrows(y, each)
        return parts, y + each * self.partition.world_size

    def _title(self, phase: str) -> str:
        lost = ", ".join(self.names[param] for param in sorted(self.lost))
        if phase == "broadcast" and self.partition.world_size == 1:
            return "One rank: nothing to send"
        if phase == "equal" and lost and self.partition.world_size > 1:
            return f"Never sent, so stale on all but the owner: {lost}"
        return PHASES[phase]

    def row(self, y: float, height: float, phase: str, rank: int) -> list[str]:
        """What a rank holds in a phase: averaged gradients, or parameters."""
        parts = []
        for piece, owner, x, wide in self.boxes():
            colour, names = rank_colour(owner, len(RANK_COLOURS)), short_names(self.names[piece.param])
            lost = piece.param in self.lost
            if phase == "reduce":
                gradients = [f"∇{name}" for name in names]
                parts.append(self.box(x, y, wide, height, tint(colour, 0.4), *gradients, names[-1]))
            elif owner == rank or (phase == "equal" and not lost):
                parts.append(self.box(x, y, wide, height, colour, *names))
            else:
                parts.append(self.old(x, y, wide, height, names[0], LOST.get(phase, "") if lost else ""))
        return parts

    def box(
        self, x: float, y: float, width: float, height: float, fill: str, *words: str, **more: str
    ) -> str:
        """A box with the first of `words` that has room; `grows` and `appears` are classes of the two."""
        rect = element("rect", x=x, y=y, width=width - 1, height=height, fill=fill, class_=more.get("grows"))
        fits = next((one for one in words if text_width(one) + 3 <= width), None)
        if fits is None:
            return rect
        named = text(x + width / 2, y + height / 2 + 4.5, fits, fill=text_colour_on(fill), anchor="middle")
        return rect + (element("g", named, class_=more["appears"]) if "appears" in more else named)

    def old(self, x: float, y: float, width: float, height: float, name: str, missing: str = "") -> str:
        """A hatched box: what a rank holds there is of the step before; `missing` says what went wrong."""
        size = {"x": x + 0.5, "y": y + 0.5, "width": max(0.0, width - 2), "height": height - 1}
        hint = element("title", escape(f"{name}, {missing or 'old'}"))
        stroke = ALARM if missing == LOST["equal"] else tint(MUTED, 0.45)
        rect = element("rect", hint, **size, fill=f"url(#{self.hatch})", stroke=stroke)
        if not missing or BOLD * text_width(missing) + 6 > width:
            return rect
        middle, base = x + width / 2, y + height / 2 + 4.5
        return rect + text(middle, base, missing, fill=ALARM, anchor="middle", bold=True, halo=True)

    def hatching(self) -> str:
        """The pattern of what is old, once in a picture."""
        stroke = line(0, 0, 0, 7, tint(MUTED, 0.45), 2.2)
        ground = element("rect", width=7, height=7, fill=PAPER)
        size = {"width": 7, "height": 7, "patternUnits": "userSpaceOnUse", "patternTransform": "rotate(45)"}
        return element("pattern", ground, stroke, id=self.hatch, **size)

    def _arrows(self, y: float, each: float) -> list[str]:
        """From each owner's box up and down its column, to those that receive it."""
        lines, heads = [], []
        for piece, owner, x, wide in self.boxes():
            if piece.param in self.lost or wide < 2 * HEAD:
                continue
            middle, colour = x + wide / 2, rank_colour(owner, len(RANK_COLOURS))
            for rank in range(self.partition.world_size):
                if rank != owner:
                    down = rank > owner
                    begin = y + each * owner + (each - 3 if down else 0)
                    end = y + each * rank + (each - 3) / 2
                    back = end + (-7 if down else 7)
                    points = f"{middle - HEAD:g},{back:g} {middle + HEAD:g},{back:g} {middle:g},{end:g}"
                    lines.append(line(middle, begin, middle, back, colour, 2.5))
                    heads.append(element("polygon", points=points, fill=colour, stroke=PAPER))
        return lines + heads
