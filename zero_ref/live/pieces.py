"""All stages over one iteration: which rank holds which piece of what at each moment, and what is sent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from zero_ref.live.lanes import label_colour
from zero_ref.live.palette import FAINT, MUTED, PAPER, PART_COLOURS, RANK_COLOURS, rank_colour, tint
from zero_ref.live.svg import LINE, Drawing, Stacked, element, key, line, paragraph, text
from zero_ref.simulator.operations import NETWORK, Operation
from zero_ref.simulator.play import Played
from zero_ref.simulator.schedule import Schedule
from zero_ref.simulator.traffic import traffic

WHOLE, CUT, GATHERED, OWN, NOTHING = "whole", "cut", "gathered", "own", "nothing"
"""The ways in which ranks hold a block: each has all of it; its own piece only; its own piece, and those of
the others for a moment; gradients of its own batch, which are not averaged yet; none of it."""

DOWN, UP = "down", "up"
"""The pieces of a block go to their owners, or from their owners to all ranks."""

SIDE, NAMES, BETWEEN = 14.0, 82.0, 28.0
"""Pixels of the margins, of the names of the rows, and between two panels side by side."""

TWO_PANELS = 640.0
"""Pixels of a picture from which on two panels stand side by side."""

STRIPE, APART, ARROW = 3.5, 2.0, 8.0
"""Pixels of the height of a piece, between two blocks, and of an arrow's width."""

PALE, EMPTY = 0.5, 0.45
"""The strength of an owner's colour in what is gathered for a moment, and of the grey of what is not held."""

NOT_AVERAGED = label_colour("backward")
"""The colour of gradients of a rank's own batch."""

LEGEND = (
    "A square has a column for each rank; its rows are the blocks of the model, one below the other, in as "
    "many pieces as there are ranks. Colour: the owner of a piece. Pale: gathered for a moment. Grey: "
    "gradients of a rank's own batch. An arrow sends one block: down, each piece to its owner; up, from its "
    "owner to all ranks."
)


class Arrow(NamedTuple):
    """One block on its way: its `kind` is gradients or parameters, its `way` DOWN or UP."""

    kind: str
    way: str


class Moment(NamedTuple):
    """What ranks hold while something computes, and what is sent around it.

    Args:
        label: forward, backward or step.
        parameters, gradients: how each block is held, in the order of forward.
        sent: before it computes, and after it.
    """

    label: str
    parameters: tuple[str, ...]
    gradients: tuple[str, ...]
    sent: tuple[Arrow, ...]


def moments_of(plan: Schedule) -> list[Moment]:
    """The moments of an iteration without overlap: forward and backward of each block, and the step.

    >>> from zero_ref.plan.partition import ParamSpec
    >>> from zero_ref.simulator.recipe import recipe
    >>> from zero_ref.simulator.schedule import schedule
    >>> stage_3 = recipe("zero-3", prefetch=0)
    >>> for one in moments_of(schedule(stage_3, [ParamSpec(8)] * 2, 4, blocks=[[], [0], [1]])):
    ...     print(one.label, *one.parameters, "|", *one.gradients, "|", *(arrow.way for arrow in one.sent))
    forward gathered cut | nothing nothing | up
    forward cut gathered | nothing nothing | up
    backward cut gathered | nothing own | up down
    backward gathered cut | own cut | up down
    step cut cut | cut cut |

    Args:
        plan: of a model of equal blocks, each of which is one bucket of gradients, and at stage 3 one unit.
    Raises:
        ValueError: the plan has not one backward for each block and one step.
    """
    backwards = [one for one in plan.operations if one.label == "backward"]
    steps = [one for one in plan.operations if one.label == "step"]
    if len(steps) != 1 or len({one.numel for one in backwards}) != 1:
        raise ValueError(
            f"draw one step behind the backwards of equal blocks, got {len(steps)} steps and backwards of "
            f"{sorted(one.numel for one in backwards)} elements."
        )
    return list(_Held(plan, backwards).moments())


class _Held:
    """Goes through the operations of a plan, and notes how each block is held."""

    def __init__(self, plan: Schedule, backwards: Sequence[Operation]) -> None:
        self.plan, self.count = plan, len(backwards)
        # Backward goes from the last block to the first.
        self.block_of_part = {one.part: self.count - 1 - place for place, one in enumerate(backwards)}
        self.block_bytes = backwards[0].takes
        kept = CUT if plan.parameter_bytes_max < self.count * self.block_bytes else WHOLE
        self.parameters, self.gradients = [kept] * self.count, [NOTHING] * self.count

    def moments(self) -> Iterator[Moment]:
        """One moment for each block and computation; what is sent behind a computation belongs to it."""
        found: list[Moment] = []
        before: list[Arrow] = []
        for one in self.plan.operations:
            if one.lane == NETWORK:
                arrows = self._arrows(one)
                if one.label == "gather":  # the block is about to compute
                    self.parameters[self.block_of_part[one.part]] = GATHERED
                    before += arrows
                    continue
                if one.label == "reduce":
                    averaged = WHOLE if one.op == "all_reduce" else CUT
                    self.gradients[self.block_of_part[one.part]] = averaged
                found[-1] = found[-1]._replace(sent=(*found[-1].sent, *arrows))
                continue
            blocks = [self.block_of_part[one.part]] if one.part is not None else range(self.count)
            if one.label == "backward":
                self.gradients[blocks[0]] = OWN
            times = len(blocks) if one.label == "forward" else 1
            found += [Moment(one.label, tuple(self.parameters), tuple(self.gradients), tuple(before))] * times
            before = []
            for block in blocks:
                if self.parameters[block] == GATHERED:
                    self.parameters[block] = CUT
        yield from found

    def _arrows(self, one: Operation) -> list[Arrow]:
        """As many arrows as blocks move: an all-reduce moves its block twice."""
        ranks = self.plan.world_size
        once = traffic("all_gather", self.block_bytes, ranks).total_bytes
        kind = "gradients" if one.label == "reduce" else "parameters"
        times = round(traffic(one.op, one.nbytes, ranks).total_bytes / once) if once else 0
        if one.op == "all_reduce":
            return [Arrow(kind, DOWN), Arrow(kind, UP)] * (times // 2)
        return [Arrow(kind, DOWN if kind == "gradients" else UP)] * times


def pieces_over_time(plays: Mapping[str, Played]) -> Drawing:
    """Which rank holds which piece at each moment of an iteration, and what is sent: a panel for each stage.

    >>> from zero_ref.simulator.stages import plays_of_equal_blocks
    >>> pieces_over_time(plays_of_equal_blocks(3, world_size=4)).words.partition("stage 1")[0]
    'DDP: a rank holds at most 16 bytes a parameter; a block is sent 6 times; '

    Args:
        plays: for each title the play of a plan that `moments_of` takes, on a cluster that does not overlap,
            so that what the picture shows is what the play has.
    Raises:
        ValueError: more than 8 ranks; a cluster that overlaps; or as `moments_of`.
    """
    panels = {}
    for title, played in plays.items():
        if played.overlaps:
            raise ValueError(f"{title}: play it on a cluster that does not overlap, such as 'loopback'.")
        panels[title] = _Panel(title, played)
    said = [
        f"{title}: a rank holds at most {panel.peak} bytes a parameter; a block is sent {panel.sent} times"
        for title, panel in panels.items()
    ]
    return Drawing("; ".join(said), lambda width: _draw(list(panels.values()), width))


def _draw(panels: Sequence[_Panel], width: float) -> Stacked:
    beside = 2 if width >= TWO_PANELS and len(panels) > 1 else 1
    each = (width - 2 * SIDE - BETWEEN * (beside - 1)) / beside
    parts: list[str] = []
    bottom = SIDE
    for first in range(0, len(panels), beside):
        top = bottom
        for place, panel in enumerate(panels[first : first + beside]):
            drawn, bottom = panel.draw(SIDE + place * (each + BETWEEN), top, each)
            parts += drawn
        bottom += 14
    ranks = panels[0].world_size
    colours = {f"rank {rank}": rank_colour(rank, ranks) for rank in range(ranks)}
    named, bottom = key(colours, SIDE, bottom, width - 2 * SIDE)
    said, bottom = paragraph(LEGEND, SIDE, bottom + 14, width - 2 * SIDE, fill=MUTED)
    return parts + named + said, bottom - 6


class _Panel:
    """One stage: a column for each moment, rows for parameters, gradients, state and what is sent."""

    def __init__(self, title: str, played: Played) -> None:
        plan = played.schedule
        self.title, self.world_size = title, plan.world_size
        if self.world_size > len(RANK_COLOURS):
            raise ValueError(f"{self.world_size} ranks do not fit: draw at most {len(RANK_COLOURS)}.")
        self.moments = moments_of(plan)
        numel = sum(one.numel for one in plan.operations if one.label == "backward")
        peak_bytes = max(held for rank in range(self.world_size) for _, held in played.memory(rank))
        self.peak = f"{peak_bytes / numel:.3g}"
        self.sent = sum(len(one.sent) for one in self.moments)
        (step,) = (one for one in plan.operations if one.label == "step")
        self.state = (WHOLE if step.shares is None else CUT,)
        self.colours = [rank_colour(rank, self.world_size) for rank in range(self.world_size)]

    def draw(self, x: float, y: float, width: float) -> Stacked:
        left, column = x + NAMES, (width - NAMES) / len(self.moments)
        said = f"at most {self.peak} bytes a parameter"
        parts = [text(x, y + 13, self.title, bold=True), text(x + width, y + 13, said, anchor="end")]
        y += LINE + 2
        labels = [one.label for one in self.moments]
        for label in dict.fromkeys(labels):
            middle = left + column * (labels.index(label) + labels.count(label) / 2)
            parts.append(text(middle - 3, y + 12, label, fill=MUTED, anchor="middle"))
            if labels.index(label):
                at = left + column * labels.index(label) - 3
                parts.append(line(at, y + 2, at, y + LINE + self._height, dashes="2 3"))
        y += LINE
        squares = _Squares(self.colours, column - 6)
        for name in ("parameters", "gradients", "state"):
            for place, one in enumerate(self.moments):
                held = self.state if name == "state" else getattr(one, name)
                bottom = squares.add(held, left + column * place, y)
            parts.append(text(x, (y + bottom) / 2 + 4.5, name))
            y = bottom + 8
        parts += squares.drawn()
        parts.append(text(x, y + 12, f"sent: {self.sent}"))
        for place, one in enumerate(self.moments):
            for number, arrow in enumerate(one.sent):
                parts.append(_arrow(arrow, left + column * place + (ARROW + 1) * number, y + 1))
        return parts, y + LINE

    @property
    def _height(self) -> float:
        """Pixels of the four rows below the names of the moments."""
        blocks = len(self.moments[0].parameters)
        square = STRIPE * self.world_size
        return 2 * (blocks * (square + APART) - APART + 8) + square + 8 + LINE


class _Squares:
    """Collects what is drawn in each colour, so that a picture has few elements.

    Args:
        colours: of the ranks.
        width: of a square, in pixels.
    """

    def __init__(self, colours: Sequence[str], width: float) -> None:
        self.colours, self.width = colours, width
        self.boxes: dict[str, list[str]] = {}

    def add(self, held: Sequence[str], x: float, y: float) -> float:
        """Draw how ranks hold each block, below each other; return where the last one ends."""
        ranks = len(self.colours)
        each = self.width / ranks
        for how in held:
            self._box(tint(FAINT, EMPTY), x, y, self.width, STRIPE * ranks)
            if how == OWN:
                self._box(NOT_AVERAGED, x, y, self.width, STRIPE * ranks)
            for owner, colour in enumerate(self.colours):
                at = y + STRIPE * owner
                if how in (WHOLE, GATHERED):
                    self._box(colour if how == WHOLE else tint(colour, PALE), x, at, self.width, STRIPE)
                if how in (CUT, GATHERED):
                    self._box(colour, x + each * owner, at, each, STRIPE)
            for rank in range(1, ranks):
                self._box(PAPER, x + each * rank - 0.5, y, 1, STRIPE * ranks)
            y += STRIPE * ranks + APART
        return y - APART

    def _box(self, colour: str, x: float, y: float, width: float, height: float) -> None:
        self.boxes.setdefault(colour, []).append(f"M{x:.4g} {y:.4g}h{width:.3g}v{height:.3g}h-{width:.3g}z")

    def drawn(self) -> list[str]:
        """One element for each colour: first what lies below others."""
        below = [tint(FAINT, EMPTY), NOT_AVERAGED, PAPER]
        order = sorted(self.boxes, key=lambda colour: below.index(colour) if colour in below else len(below))
        order.sort(key=lambda colour: colour in self.colours)
        return [element("path", d="".join(self.boxes[colour]), fill=colour) for colour in order]


def _arrow(arrow: Arrow, x: float, y: float) -> str:
    """A small arrow in the colour of what is sent."""
    middle, right, high = x + ARROW / 2, x + ARROW, 13.0
    begin, end, back = (y, y + high, y + high - 6) if arrow.way == DOWN else (y + high, y, y + 6)
    points = (
        f"{middle - 1.2:g},{begin:g} {middle - 1.2:g},{back:g} {x:g},{back:g} {middle:g},{end:g} "
        f"{right:g},{back:g} {middle + 1.2:g},{back:g} {middle + 1.2:g},{begin:g}"
    )
    return element("polygon", points=points, fill=PART_COLOURS[arrow.kind])
