"""Pictures that move by themselves: CSS inside an SVG, no script, a pause, and a whole picture when still.

What moves is added to a picture that is complete without it. So it reads the same on paper, as a screenshot,
and for readers whose system asks for less motion: for them nothing moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from html import escape
from itertools import groupby
from zlib import crc32

from zero_ref.live.page import NARROW, WIDE, style_of_two_widths, two_widths
from zero_ref.live.svg import element, picture

Moment = tuple[float, str]
"""A second of the loop, and the CSS declarations that hold then. In between they change evenly."""

JUMP_S = 0.01
"""The duration of a change that looks sudden."""


class Motion:
    """The movements of one picture, each a class for the elements that make it.

    >>> motion = Motion("picture", loop_s=10, first_s=8)
    >>> motion.of((2, "opacity:0"), (4, "opacity:1"))
    'picture-0'
    >>> motion.style().rpartition("@")[2]
    'keyframes picture-0{0%,20%{opacity:0}40%,100%{opacity:1}}'

    Args:
        name: of all its classes; another for each picture of a page.
        loop_s: seconds until it begins anew.
        first_s: the second with which it begins, the first time: that of the state to see at once.
    """

    def __init__(self, name: str, loop_s: float, first_s: float) -> None:
        self.name, self.loop_s, self.first_s = name, loop_s, first_s
        self._class_of: dict[tuple[Moment, ...], str] = {}

    def of(self, *moments: Moment) -> str:
        """The class of a movement. Before its first moment and after its last all stays as it is then."""
        if not 0 <= moments[0][0] <= moments[-1][0] <= self.loop_s or list(moments) != sorted(
            moments, key=lambda moment: moment[0]
        ):
            raise ValueError(f"moments must follow each other within {self.loop_s:g} s, got {moments}.")
        return self._class_of.setdefault(moments, f"{self.name}-{len(self._class_of)}")

    def appears(self, second: float, until_s: float | None = None) -> str:
        """The class of what is seen from a second on, or until another."""
        moments = [(second, "opacity:0"), (second + JUMP_S, "opacity:1")]
        if until_s is not None:
            moments += [(until_s - JUMP_S, "opacity:1"), (until_s, "opacity:0")]
        return self.of(*moments)

    def grows(self, start_s: float, stop_s: float, along: str = "X") -> str:
        """The class of what grows from nothing, to the right along X, upwards along Y."""
        return self.of((start_s, f"transform:scale{along}(0)"), (stop_s, f"transform:scale{along}(1)"))

    def flies(
        self, from_px: float, opacity: str, start_s: float, arrive_s: float, gone_s: float | None = None
    ) -> str:
        """The class of what comes to its place from so many pixels below it, and stays or is gone again."""
        far, here = (f"transform:translateY({px:g}px);opacity:" for px in (from_px, 0.0))
        seen_s = start_s + (JUMP_S if gone_s is None else 0.1)
        moments = [(start_s, f"{far}0"), (seen_s, f"{far}{opacity}"), (arrive_s, f"{here}{opacity}")]
        return self.of(*moments, *([] if gone_s is None else [(gone_s, f"{here}0")]))

    def style(self) -> str:
        """The style sheet of all movements so far; `still` and `moving` are for what only one state shows."""
        name, rules, frames = self.name, [], []
        for moments, of_class in self._class_of.items():
            at = {"0%": moments[0][1]}
            at |= {f"{round(100 * second / self.loop_s, 3):g}%": css for second, css in moments}
            at["100%"] = moments[-1][1]
            joined = (f"{','.join(same)}{{{css}}}" for css, same in groupby(at, at.__getitem__))
            rules.append(f".{name} .{of_class}{{animation-name:{of_class}}}")
            frames.append(f"@keyframes {of_class}{{{''.join(joined)}}}")
        timing = (
            f"animation:{self.loop_s:g}s linear {self.first_s * -1:g}s infinite;"
            "transform-box:fill-box;transform-origin:left bottom"
        )
        moving = (
            f".{name} .still{{display:none}}.{name} .moving{{display:inline}}"
            f'.{name} [class^="{name}-"]{{{timing}}}{"".join(rules)}'
        )
        return (
            f".{name} .moving{{display:none}}"
            f"@media screen and (prefers-reduced-motion:no-preference){{{moving}}}{''.join(frames)}"
        )

    def picture(self, width: float, height: float, words: str, parts: Iterable[str]) -> str:
        """The whole picture with its style sheet."""
        drawn = element("g", *parts, class_=self.name)
        return picture(width, height, words, [element("style", self.style()), drawn])


# Here and not in a style sheet of the book, so that a notebook has it too. Paused is what the tick says, so
# that it moves without it; without motion there is nothing to pause.
STYLE = f"""{style_of_two_widths("zero-animation")}\
.zero-animation-pause{{width:1.5em;height:1.5em;margin:.3em .4em .3em 0;vertical-align:middle}}
.zero-animation-pause:checked~.zero-animation-picture *{{animation-play-state:paused!important}}
@media print,(prefers-reduced-motion:reduce){{.zero-animation :is(input,label){{display:none}}}}
"""


def html(wide: str, narrow: str, label: str) -> str:
    """A piece of a page: a tick that pauses, and the picture in the width that fits.

    >>> piece = html("<svg/>", "<svg/>", "Pause: one step")
    >>> piece.count("<svg/>"), piece.count('type="checkbox"'), ">Pause: one step</label>" in piece
    (2, 1, True)

    Args:
        wide, narrow: the same animation as SVG, 720 and 340 pixels wide.
        label: of the tick.
    """
    tick = f"pause-{crc32((label + wide).encode()):08x}"
    return element(
        "div",
        element("style", STYLE),
        element("input", type="checkbox", id=tick, class_="zero-animation-pause"),
        element("label", escape(label), for_=tick),
        two_widths("zero-animation", wide, narrow),
        class_="zero-animation",
    )


@dataclass(frozen=True)
class Animation:
    """A picture that moves by itself, as the last line of a cell or as SVG.

    Args:
        title: the name of the picture's pause button.
        words: a description for readers who cannot see the picture.
        draw: returns the SVG for a width in CSS pixels and a name for its classes.
    """

    title: str
    words: str
    draw: Callable[[float, str], str]

    def svg(self, width: float = WIDE) -> str:
        """The picture for a width.

        Raises:
            ValueError: it is not between 300 and 4,000 pixels.
        """
        if not 300 <= width <= 4000:
            raise ValueError(f"an animation is 300 to 4,000 pixels wide, got {width:g}.")
        return self.draw(width, f"z{crc32(self.words.encode()):08x}-{width:g}")

    def _repr_html_(self) -> str:
        return html(self.svg(WIDE), self.svg(NARROW), f"Pause the animation: {self.title}")
