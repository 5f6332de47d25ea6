"""A decision tree: questions below each other, and each advice beside the answer that leads to it."""

from __future__ import annotations

from collections.abc import Sequence

from zero_ref.live.palette import FAINT, INK, MUTED, PAPER, SERIES_COLOURS, text_colour_on, tint
from zero_ref.live.svg import LINE, MARGIN, Drawing, Stacked, curve, element, paragraph, text
from zero_ref.simulator.tree import Advice, Node, Question, nodes_on, words_of

SIDE_BY_SIDE = 440.0
"""From so many pixels on an advice stands at the right of its question; in less room it stands below."""

INSIDE, GAP, ARROW, STEM = 9.0, 26.0, 54.0, 20.0
"""Pixels from a box to its text, between boxes below each other, of an arrow to the right, and from the left
edge of a box to the arrow that leaves it downwards."""

FIRST_LINE, HEAD = 18.0, 5.0
"""Pixels from the top of a box to the middle of its first line, and of half an arrow's head."""

CHOSEN = SERIES_COLOURS[0]

Place = tuple[bool, ...]
"""The place of a node in the tree: the answers that lead to it."""


def decision_tree(root: Question, *, path: Sequence[bool] | None = None) -> Drawing:
    """A decision tree from its data, on a wide page and on a phone.

    >>> fits = Question("Does it fit?", yes=Advice("DDP", "It sends least."), no=Advice("stage 1"))
    >>> decision_tree(fits).words
    'Does it fit? Yes: DDP (It sends least.). No: stage 1.'
    >>> decision_tree(fits, path=[False]).words
    'Does it fit? No. So: stage 1.'

    Args:
        root: the first question.
        path: the answers for one model, True for yes. Its way is drawn bold, with the numbers that decided;
            all else is muted. None for no model.
    Raises:
        ValueError: the path is longer than the tree.
    """
    words = words_of(root)
    if path is not None:
        *asked, reached = nodes_on(root, path)
        told = [
            f"{node.text} {'Yes' if answer else 'No'}{_decided(node)}."
            for node, answer in zip(asked, path)
            if isinstance(node, Question)
        ]
        end = f"So: {words_of(reached)}" if isinstance(reached, Advice) else reached.text
        words = " ".join([*told, end])
    return Drawing(words, lambda width: tree_parts(root, path, MARGIN, 14.0, width - 2 * MARGIN))


def _decided(question: Question) -> str:
    return f" ({question.answered})" if question.answered else ""


def tree_parts(root: Node, path: Sequence[bool] | None, x: float, y: float, width: float) -> Stacked:
    """Draw the tree of `decision_tree` at a place of a larger picture.

    Args:
        root: the first question.
        path: as in `decision_tree`.
        x, y, width: where to draw, in pixels.
    """
    tree = _Tree(None if path is None else tuple(path), x + width)
    bottom, _ = tree.node(root, (), x, y)
    return tree.parts + tree.parts_on_way, bottom + 14


class _Tree:
    """The elements so far; those on a model's way through the tree are drawn above all others.

    Args:
        path: the model's answers; None where no model goes through the tree.
        right: the right edge of the picture.
    """

    def __init__(self, path: tuple[bool, ...] | None, right: float) -> None:
        self.path, self.right = path, right
        self.parts: list[str] = []
        self.parts_on_way: list[str] = []

    def _is_on_way(self, place: Place) -> bool:
        return self.path is not None and self.path[: len(place)] == place

    def node(self, node: Node, place: Place, x: float, y: float) -> tuple[float, float]:
        """Draw a node and all that follows it; return where that ends, and where an arrow to it points."""
        wide = self.right - x
        # The width of a box that has room for another at its right.
        beside = 0.56 * (wide - ARROW) if wide >= SIDE_BY_SIDE else 0.0
        if isinstance(node, Advice):
            bottom = self._box(node, place, x, y, beside or wide)
            return bottom, (y + bottom) / 2
        # The shorter branch goes to the side, the longer one down; of two of one length, "yes" to the side.
        follows = (node.yes, (*place, True)), (node.no, (*place, False))
        (side, to_side), (down, below) = sorted(follows, key=lambda one: _depth(one[0]))
        if isinstance(side, Advice) and beside:
            bottom, begin = self._box(node, place, x, y, beside), x + beside + ARROW
            low = max(bottom, self._box(side, to_side, begin, y, self.right - begin))
            self._arrow(to_side, [(x + beside, y + FIRST_LINE), (begin, y + FIRST_LINE)])
        else:
            bottom, begin = self._box(node, place, x, y, wide), x + STEM + 0.7 * ARROW
            low, at = self.node(side, to_side, begin, bottom + (12 if isinstance(side, Advice) else GAP))
            self._arrow(to_side, [(x + STEM, bottom), (x + STEM, at), (begin, at)])
        self._arrow(below, [(x + STEM, bottom), (x + STEM, low + GAP)])
        return self.node(down, below, x, low + GAP)[0], y + FIRST_LINE

    def _box(self, node: Node, place: Place, x: float, y: float, width: float) -> float:
        """Draw the box of a node; return where it ends."""
        on_way = self._is_on_way(place)
        muted = self.path is not None and not on_way
        fill, ink = PAPER, MUTED if muted else INK
        if isinstance(node, Advice):
            fill = CHOSEN if on_way else PAPER if muted else tint(CHOSEN, 0.12)
            ink = text_colour_on(fill) if on_way else ink
            lines = [(node.name, ink, True), (node.because, ink, False)]
        else:
            answered = node.answered if on_way else ""
            lines = [(node.text, ink, not muted), (node.threshold, MUTED, False), (answered, CHOSEN, False)]
        words, base = [], y + INSIDE + 11
        for said, colour, bold in lines:
            if said:
                more, base = paragraph(said, x + INSIDE, base, width - 2 * INSIDE, fill=colour, bold=bold)
                words += more
        bottom = base - LINE + INSIDE - 2
        stroke = CHOSEN if on_way or (isinstance(node, Advice) and not muted) else FAINT if muted else MUTED
        rect = element(
            "rect", x=x, y=y, width=width, height=bottom - y, rx=5, fill=fill, stroke=stroke,
            stroke_width=2.5 if on_way else 1.2,
        )  # fmt: skip
        self._add(place, [rect, *words])
        return bottom

    def _arrow(self, to: Place, points: Sequence[tuple[float, float]]) -> None:
        """Draw the arrow of the last answer along some points, the answer beside its last piece."""
        on_way, name = self._is_on_way(to), "yes" if to[-1] else "no"
        colour = CHOSEN if on_way else MUTED if self.path is None else FAINT
        (x1, _), (x2, y2) = points[-2:]
        if x1 == x2:
            label = text(x2 + 9, y2 - 8, name, fill=CHOSEN if on_way else MUTED, bold=on_way)
            stop, corners = (x2, y2 - HEAD), [(x2 - HEAD, y2 - 8), (x2 + HEAD, y2 - 8)]
        else:
            middle = (x1 + x2) / 2 - 2
            label = text(middle, y2 - 6, name, fill=CHOSEN if on_way else MUTED, anchor="middle", bold=on_way)
            stop, corners = (x2 - HEAD, y2), [(x2 - 8, y2 - HEAD), (x2 - 8, y2 + HEAD)]
        shaft = curve([*points[:-1], stop], colour, 3.0 if on_way else 1.4)
        head = " ".join(f"{x:g},{y:g}" for x, y in [*corners, (x2, y2)])
        self._add(to, [shaft, element("polygon", points=head, fill=colour), label])

    def _add(self, place: Place, parts: Sequence[str]) -> None:
        (self.parts_on_way if self._is_on_way(place) else self.parts).extend(parts)


def _depth(node: Node) -> int:
    """Count the questions on the longest way down from a node, the node included."""
    return 0 if isinstance(node, Advice) else 1 + max(_depth(node.yes), _depth(node.no))
