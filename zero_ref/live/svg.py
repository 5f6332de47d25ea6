"""SVG as text, with the standard library: what a page draws without matplotlib.

Lengths are CSS pixels. A picture is drawn for the width at which it is shown, so that its text has the same
size on a phone and on a wide page; what does not fit is left out or wrapped, never shrunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from zero_ref.live.palette import FAINT, INK, MUTED, PAPER

Stacked = tuple[list[str], float]
"""Elements, and where the next line begins below them."""

FONT = 13.0
LINE = 18.0
"""Text is 13 pixels high, a line of it 18."""

COLUMN = 576.0
"""Pixels of a notebook's picture: 6 inches, as wide as those of matplotlib."""

_LETTER, BOLD = 0.58, 1.2
"""The average width of a letter in a sans-serif font, over the font size; how much wider bold letters are.
Both are rather too large than too small."""


def element(name: str, /, *children: str, **attributes: object) -> str:
    """Return one element; underscores in attributes become hyphens, attributes of None are left out.

    >>> element("rect", x=1, y=2.5, stroke_width=None, fill="#FFFFFF")
    '<rect x="1" y="2.5" fill="#FFFFFF"/>'
    """
    words = [name]
    for key, value in attributes.items():
        if value is not None:
            words.append(f'{key.rstrip("_").replace("_", "-")}="{_written(value)}"')
    opening = " ".join(words)
    return f"<{opening}>{''.join(children)}</{name}>" if children else f"<{opening}/>"


def _written(value: object) -> str:
    if isinstance(value, float):
        return f"{round(value, 2):g}" if math.isfinite(value) else "0"
    return escape(str(value))


def picture(width: float, height: float, label: str, parts: Iterable[str]) -> str:
    """Return a picture on a light ground. `label` describes it for readers who cannot see it."""
    ground = element("rect", width=width, height=height, rx=6, fill=PAPER)
    return element(
        "svg", element("title", escape(label)), ground, *parts, xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width:g} {height:g}", width=width, height=height, role="img",
        font_family="system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif", font_size=FONT,
        fill=INK,
    )  # fmt: skip


@dataclass(frozen=True)
class Drawing:
    """A picture that is drawn anew for each width; a notebook shows one that is the last line of a cell.

    Args:
        words: what it shows, for who cannot see it.
        draw: given the width in CSS pixels, what is drawn and how high it is.
    """

    words: str
    draw: Callable[[float], Stacked]

    def svg(self, width: float = COLUMN) -> str:
        """The picture for a width in CSS pixels.

        Raises:
            ValueError: it is not between 240 and 4,000 pixels.
        """
        if not 240 <= width <= 4000:
            raise ValueError(f"a picture is 240 to 4,000 pixels wide, got {width:g}.")
        parts, height = self.draw(width)
        return picture(width, height, self.words, parts)

    def _repr_svg_(self) -> str:
        return self.svg()


def text(
    x: float, y: float, words: str, *more: str, fill: str = INK, anchor: str = "start", bold: bool = False,
    halo: bool = False,
) -> str:  # fmt: skip
    """One line of text whose baseline is at `y`; `more` elements in it; `anchor` is start, middle or end.

    A `halo` of paper keeps it readable on lines and hatching.
    """
    ground = {"stroke": PAPER, "stroke_width": 4, "paint_order": "stroke"} if halo else {}
    return element(
        "text", escape(words), *more, x=x, y=y, fill=None if fill == INK else fill,
        text_anchor=None if anchor == "start" else anchor, font_weight=600 if bold else None, **ground,
    )  # fmt: skip


def text_width(words: str) -> float:
    """About how wide a line of text is, in pixels.

    >>> text_width("10 ms") < text_width("stage 3: 10 ms")
    True
    """
    return _LETTER * FONT * len(words)


def wrapped(words: str, width: float) -> list[str]:
    """Lines of text, none wider than `width` pixels, if its words allow.

    >>> wrapped("one two three", 60)
    ['one two', 'three']
    """
    lines: list[str] = []
    for word in words.split():
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and text_width(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


def paragraph(words: str, x: float, y: float, width: float, fill: str = INK, bold: bool = False) -> Stacked:
    """Lines of text below each other, the baseline of the first at `y`, none wider than `width` pixels."""
    lines = wrapped(words, width / BOLD if bold else width)
    parts = [text(x, y + LINE * number, one, fill=fill, bold=bold) for number, one in enumerate(lines)]
    return parts, y + LINE * len(lines)


def bar(x: float, y: float, width: float, height: float, fill: str, hint: str = "") -> str:
    """A filled rectangle; `hint` is shown when a pointer rests on it."""
    inside = [element("title", escape(hint))] if hint else []
    return element("rect", *inside, x=x, y=y, width=max(0.0, width), height=height, fill=fill)


def line(
    x1: float, y1: float, x2: float, y2: float, stroke: str = FAINT, width: float = 1.0, dashes: str = ""
) -> str:
    """A straight line."""
    return element(
        "line", x1=x1, y1=y1, x2=x2, y2=y2, stroke=stroke, stroke_width=width, stroke_dasharray=dashes or None
    )


def curve(points: Sequence[tuple[float, float]], stroke: str, width: float = 2.0) -> str:
    """Straight lines from point to point."""
    listed = " ".join(f"{x:.2f},{y:.2f}" for x, y in points)
    return element("polyline", points=listed, fill="none", stroke=stroke, stroke_width=width)


def ticks(top: float, most: int = 5) -> list[float]:
    """Round values from 0 up to `top`, at most so many above 0.

    >>> ticks(80), ticks(0.9, 3)
    ([0.0, 20.0, 40.0, 60.0, 80.0], [0.0, 0.5])
    """
    if not top > 0:
        return [0.0]
    rough = top / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * nice for nice in (1, 2, 2.5, 5, 10) if power * nice >= rough * (1 - 1e-9))
    return [step * count for count in range(int(top / step * (1 + 1e-9)) + 1)]


def key(colours: Mapping[str, str], x: float, y: float, width: float) -> Stacked:
    """Coloured squares with their meaning, in as many rows as they need."""
    parts: list[str] = []
    left = x
    for name, colour in colours.items():
        wide = 18 + text_width(name) + 16
        if left > x and left + wide - 16 > x + width:
            left, y = x, y + LINE + 2
        parts += [bar(left, y, 12, 12, colour), text(left + 18, y + 11, name)]
        left += wide
    return parts, y + LINE + 6


MARGIN = 22.0
"""Pixels at both sides of what is drawn: room for half a number."""


def axis(
    x: float,
    width: float,
    top: float,
    bottom: float,
    most: float,
    show: Callable[[float], str],
    unit: str = "",
) -> list[str]:
    """Vertical grid lines on a scale from 0 to `most`, as many as have room for their names below."""
    named = {0.0: show(0.0)}
    for count in (6, 5, 4, 3, 2, 1):
        found = {value: show(value) for value in ticks(most, count)}
        apart = width * (max(found) / most) / max(1, len(found) - 1) if most else width
        if max(text_width(name) for name in found.values()) + 6 <= apart:
            named = found
            break
    parts = []
    for value, name in named.items():
        at = x + width * value / most if most else x
        below = centred(at, bottom + 15, name, MUTED, x - MARGIN, x + width + MARGIN)
        parts += [line(at, top, at, bottom), below]
    if unit:
        parts.append(text(x + width, bottom + 31, unit, fill=MUTED, anchor="end"))
    return parts


def centred(x: float, y: float, words: str, fill: str, left: float, right: float) -> str:
    """Text in the middle of `x`, or as near to it as `left` and `right` let it be."""
    half = text_width(words) / 2
    at, anchor = (left, "start") if x - half < left else (right, "end") if x + half > right else (x, "middle")
    return text(at, y, words, fill=fill, anchor=anchor)
