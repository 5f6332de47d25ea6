"""One ZeRO step from above: what each rank holds in each phase of a stage, from a real partition."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from html import escape
from itertools import accumulate
from types import MappingProxyType
from typing import NamedTuple
from zlib import crc32

from zero_ref.live.names import names_of, short_names
from zero_ref.live.palette import ALARM, FAINT, MUTED, PAPER, RANK_COLOURS, rank_colour, text_colour_on, tint
from zero_ref.live.svg import BOLD, Drawing, Stacked, element, line, paragraph, text, text_width
from zero_ref.plan.partition import Partition, Slice
from zero_ref.plan.rules import from_lists

PHASES = {
    "reduce": "Gradients are averaged over all ranks",
    "step": "Each rank updates only what it owns",
    "broadcast": "Each owner sends its new values",
    "equal": "All ranks hold the same again",
}
PHASES_OF_STAGE = {
    1: PHASES,
    2: {
        "forward": "Forward: every rank has all parameters",
        "backward": "Backward: each bucket of gradients is averaged at its owners",
        **{phase: PHASES[phase] for phase in ("step", "broadcast", "equal")},
    },
}

LOST = {"broadcast": "not sent", "equal": "stale"}
"""The words in a box whose parameter lacks its new values, by phase."""

SIDE, NAMES, NUMBER, EACH, TWO = 14.0, 50.0, 16.0, 36.0, 1.3
"""Pixels of the margins, of the ranks' names, of a phase's number, and from one rank to the next; how many
times as far that is where a rank has a strip of parameters and one of gradients."""

AVERAGED = 0.4
"""The strength of the owner's colour in averaged gradients."""

HEAD, ASIDE = 6.0, 0.22
"""Pixels of half an arrow's head; the part of a box to the left of an arrow that goes past its name."""


def step_diagram(
    partition: Partition,
    *,
    names: Sequence[str] | None = None,
    phases: Sequence[str] | None = None,
    lost: Collection[int] = (),
    stage: int = 1,
    blocks: Sequence[Collection[int]] | None = None,
) -> Drawing:
    """One step from above: ranks as rows, parameters as boxes to scale, coloured by owner; hatched is old.

    In the backward of stage 2 a rank has two strips: parameters, and gradients below them. An empty box is
    what the rank does not hold. `pieces_over_time` draws all stages.

    >>> from zero_ref.plan.rules import sorted_greedy
    >>> step_diagram(sorted_greedy([6, 5, 4, 2], 2), names=["wte", "qkv", "fc", "proj"]).words
    'One step of ZeRO on 2 ranks: reduce, step, broadcast, equal.'
    >>> step_diagram(cut_each([6, 6, 4, 4], 2), stage=2, phases=["backward", "step"]).words
    "One step of ZeRO's stage 2 on 2 ranks: backward, step."

    Args:
        partition: a small one, of at most 8 ranks.
        names: of the parameters; their numbers if None.
        phases: which of the stage's PHASES_OF_STAGE to draw, in this order; None for all. Each keeps
            the number that it has in the whole step.
        lost: parameters whose broadcast is left out. They stay stale on every rank but their owner.
        stage: of ZeRO, 1 or 2.
        blocks: the parameters of each bucket of stage 2's gradients, in the order of forward; None for one of
            each parameter. A middle one is being sent.
    Raises:
        ValueError: more than 8 ranks, an unknown stage or phase, not one name for each parameter, or blocks
            that do not have each parameter once.
    """
    names = names_of(partition, names)
    if stage not in PHASES_OF_STAGE:
        raise ValueError(f"a step of stage {stage} is not drawn; choose of {list(PHASES_OF_STAGE)}.")
    of_stage = PHASES_OF_STAGE[stage]
    phases = tuple(of_stage) if phases is None else phases
    blocks = [[param] for param in range(len(names))] if blocks is None else blocks
    if sorted(param for block in blocks for param in block) != list(range(len(names))):
        raise ValueError(f"blocks must have each of the {len(names)} parameters once, got {blocks}.")
    if partition.world_size > len(RANK_COLOURS):
        raise ValueError(
            f"{partition.world_size} ranks do not fit: draw a step of at most {len(RANK_COLOURS)}."
        )
    if not set(phases) <= set(of_stage):
        raise ValueError(f"unknown phase in {list(phases)}; choose of {', '.join(of_stage)}.")
    whose = "ZeRO" if stage == 1 else f"ZeRO's stage {stage}"
    words = f"One step of {whose} on {partition.world_size} ranks: {', '.join(phases)}."
    hatch = f"old-{crc32(words.encode()):08x}"
    block_of_param = {param: number for number, block in enumerate(blocks) for param in block}
    board = Board(partition, names, hatch, SIDE + NAMES, 0.0, lost, stage, block_of_param)
    return Drawing(words, partial(_draw, board, phases))


def cut_each(numels: Sequence[int], world_size: int) -> Partition:
    """Cut each parameter into as many pieces as there are ranks.

    >>> cut_each([6, 3], 2).slices_of_rank[1]
    (Slice(param=0, start=3, stop=6), Slice(param=1, start=1, stop=3))

    Raises:
        ValueError: a parameter has fewer elements than there are ranks.
    """
    cuts = [[numel * rank // world_size for rank in range(world_size + 1)] for numel in numels]
    return from_lists(
        numels,
        [[Slice(param, *at[rank : rank + 2]) for param, at in enumerate(cuts)] for rank in range(world_size)],
    )


def _draw(board: Board, phases: Sequence[str], width: float) -> Stacked:
    board = board._replace(width=width - 2 * SIDE - NAMES)
    parts, y = [board.hatching()], SIDE
    for phase in phases:
        of_phase, y = board.phase(phase, y, EACH)
        parts += of_phase
        y += 12
    indent = 0 if board.stage == 1 else NAMES
    said, bottom = paragraph(
        board.legend(phases), board.left - indent, y + 8, board.width + indent, fill=MUTED
    )
    return parts + said, bottom - 8


Box = tuple[Slice, int, float, float]
"""A piece, its owner, its left edge and its width."""


class Board(NamedTuple):
    """The parameters end to end: where each piece lies, and how it looks.

    Args:
        hatch: the name of the hatching in the picture that the board is in.
        left, width: of the parameters; the ranks' names are to their left.
        lost: parameters whose broadcast is left out.
        stage: of ZeRO.
        block_of_param: the number of each parameter's block, or of its bucket of gradients.
    """

    partition: Partition
    names: Sequence[str]
    hatch: str
    left: float
    width: float
    lost: Collection[int] = ()
    stage: int = 1
    block_of_param: Mapping[int, int] = MappingProxyType({})

    def boxes(self) -> list[Box]:
        """Each piece, its owner, its left edge and its width."""
        begins = list(accumulate(self.partition.numels, initial=0))
        px = self.width / (begins[-1] or 1)
        return [
            (piece, owner, self.left + px * (begins[piece.param] + piece.start), px * piece.numel)
            for of_param in self.partition.pieces_of_param
            for piece, owner in of_param
            if piece.numel
        ]

    def legend(self, phases: Sequence[str]) -> str:
        """Explain the colours and hatches of the boxes."""
        if self.stage == 1:
            return "a colour: an owner; hatched: old"
        words = ["a colour: an owner"]
        if {"step", "broadcast"} & set(phases):
            words.append("hatched: old")
        if "backward" in phases:
            words.append("grey: a rank's own gradients, not averaged yet")
        return "; ".join([*words, "empty: not held"])

    def phase(self, phase: str, y: float, each: float) -> Stacked:
        """Draw all ranks in a phase below each other, `each` pixels apart, below the name of the phase."""
        each *= TWO if phase == "backward" else 1
        parts = [text(self.left - NAMES, y + 11, str(list(PHASES_OF_STAGE[self.stage]).index(phase) + 1))]
        left, room = self.left - NAMES + NUMBER, self.width + NAMES - NUMBER
        title, base = paragraph(self._title(phase), left, y + 11, room)
        parts, y = [*parts, *title], base - 11
        for rank in range(self.partition.world_size):
            low = y + each * rank
            parts.append(text(self.left - NAMES, low + each / 2 + 3, f"rank {rank}", fill=MUTED))
            parts += self.row(low, each - 3, phase, rank)
        top, high = _second_strip(each - 3) if phase == "backward" else (0.0, each - 3)
        parts += self._arrows(phase, y + top, each, high)
        return parts, y + each * self.partition.world_size

    def _is_sent(self, phase: str, param: int) -> bool:
        """Whether a parameter, or its gradient, is on its way in a phase that is drawn."""
        if phase == "broadcast":
            return param not in self.lost
        return phase == "backward" and self._until(param) == 0

    def _until(self, param: int) -> int:
        """Count the blocks that backward comes to before the parameter's: 0 for the current one, which is a
        middle one, and below 0 if it is past.
        """
        blocks, own = max(self.block_of_param.values()) + 1, self.block_of_param[param]
        return (blocks - 1) // 2 - own

    def _title(self, phase: str) -> str:
        lost = ", ".join(self.names[param] for param in sorted(self.lost))
        if phase == "broadcast" and self.partition.world_size == 1:
            return "One rank: nothing to send"
        if phase == "equal" and lost and self.partition.world_size > 1:
            return f"Never sent, so stale on all but the owner: {lost}"
        return PHASES_OF_STAGE[self.stage][phase]

    def row(self, y: float, height: float, phase: str, rank: int) -> list[str]:
        """Draw the boxes of a rank in a phase: averaged gradients, or parameters; in backward both."""
        below, strip = _second_strip(height) if phase == "backward" else (0.0, height)
        parts = []
        for one in self.boxes():
            if phase != "reduce":
                parts.append(self._parameters(one, y, strip, phase, rank))
            if phase in ("reduce", "backward"):
                parts.append(self._gradients(one, y + below, strip, phase, rank))
        return parts

    def _parameters(self, one: Box, y: float, height: float, phase: str, rank: int) -> str:
        """A box of parameters: there, or old."""
        piece, owner, x, wide = one
        colour, names = rank_colour(owner, len(RANK_COLOURS)), short_names(self.names[piece.param])
        lost = piece.param in self.lost
        beside = self._beside_arrow(names, one, phase) if phase == "backward" else names
        always = phase in ("forward", "backward")
        if owner == rank or always or (phase == "equal" and not lost):
            return self.box(x, y, wide, height, colour, *beside)
        return self.old(x, y, wide, height, names[0], LOST.get(phase, "") if lost else "")

    def _gradients(self, one: Box, y: float, height: float, phase: str, rank: int) -> str:
        """A box of gradients: averaged, of the rank's own batch, or not held."""
        piece, owner, x, wide = one
        colour, names = rank_colour(owner, len(RANK_COLOURS)), short_names(self.names[piece.param])
        words = [f"∇{name}" for name in names]
        if phase == "reduce":
            return self.box(x, y, wide, height, tint(colour, AVERAGED), *words, names[-1])
        until = self._until(piece.param)
        if until == 0:
            return self.box(x, y, wide, height, FAINT, *self._beside_arrow(words, one, phase))
        if until < 0 and owner == rank:
            return self.box(x, y, wide, height, tint(colour, AVERAGED), *words)
        return self._empty(x, y, wide, height)

    def _beside_arrow(self, words: Sequence[str], one: Box, phase: str) -> list[str]:
        """The words that have room in the middle of a box, beside the arrow that crosses it, if one does."""
        piece, _, _, wide = one
        room = 2 * ((0.5 - ASIDE) * wide - HEAD) if self._is_sent(phase, piece.param) else wide
        return [word for word in words if text_width(word) <= room]

    def _empty(self, x: float, y: float, width: float, height: float) -> str:
        """A box of what a rank does not hold."""
        size = {"x": x + 0.5, "y": y + 0.5, "width": max(0.0, width - 2), "height": height - 1}
        return element("rect", **size, fill=PAPER, stroke=FAINT, stroke_dasharray="3 3")

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

    def _arrows(self, phase: str, y: float, each: float, height: float) -> list[str]:
        """Up and down the column of each piece that is sent: from its owner, or with gradients to its owner.

        Args:
            y, each, height: of the strips: the top of the first, from one to the next, of each.
        """
        lines, heads = [], []
        for piece, owner, x, wide in self.boxes():
            if not self._is_sent(phase, piece.param) or wide < 2 * HEAD:
                continue
            aside = 0.5 if phase == "broadcast" or wide < HEAD / ASIDE else ASIDE
            middle, colour = x + aside * wide, rank_colour(owner, len(RANK_COLOURS))
            for rank in range(self.partition.world_size):
                if rank != owner:
                    sender, receiver = (rank, owner) if phase == "backward" else (owner, rank)
                    down = receiver > sender
                    begin = y + each * sender + (height if down else 0)
                    end = y + each * receiver + height / 2
                    back = end + (-7 if down else 7)
                    points = f"{middle - HEAD:g},{back:g} {middle + HEAD:g},{back:g} {middle:g},{end:g}"
                    lines.append(line(middle, begin, middle, back, colour, 2.5))
                    heads.append(element("polygon", points=points, fill=colour, stroke=PAPER))
        return lines + heads


def _second_strip(height: float) -> tuple[float, float]:
    """Divide `height` pixels into two strips: return the beginning of the second, and the height of each."""
    strip = (height - 2) / 2
    return strip + 2, strip
