"""Checks of every picture: the same bytes each time, no warnings, no text outside or on another text."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.backend_bases import RendererBase
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from zero_ref.lab import plots

Plot = Callable[[Axes], object]


def drawn(plot: Plot, height: float = 4.0) -> Axes:
    """The Axes after `plot`, with everything laid out and labels fitted to their boxes."""
    fig, ax = plots.figure(6, height)
    plot(ax)
    fig.draw_without_rendering()
    return ax


def written(ax: Axes) -> list[str]:
    return [text.get_text() for text in ax.findobj(Text) if text.get_text()]


def assert_repeatable(plot: Plot, folder: Path) -> None:
    """The same bytes for the same data, saved once or twice."""
    for attempt in ("first", "second"):
        fig, ax = plots.figure(6, 4)
        plot(ax)
        plots.save(fig, folder / f"{attempt}.svg")
    plots.save(fig, folder / "again.svg")
    svg = (folder / "first.svg").read_bytes()
    assert svg == (folder / "second.svg").read_bytes() == (folder / "again.svg").read_bytes()


def assert_readable(plot: Plot, monkeypatch: pytest.MonkeyPatch, height: float = 4.0) -> None:
    """All text is inside the picture, and none lies on another.

    Nothing warns, and `plot` returns the Axes that it was given.
    """
    seen: dict[Text, Bbox] = {}
    draw = Text.draw

    def watched(text: Text, renderer: RendererBase) -> None:
        draw(text, renderer)
        if text.get_text() and text.get_visible():
            seen[text] = text.get_window_extent(renderer)

    fig, ax = plots.figure(6, height)
    monkeypatch.setattr(Text, "draw", watched)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a missing glyph, a layout that found no room
        assert plot(ax) is ax
        seen.clear()
        fig.draw_without_rendering()
    assert seen
    inside = fig.bbox.padded(0.5)
    for text, extent in seen.items():
        assert inside.contains(extent.x0, extent.y0), text
        assert inside.contains(extent.x1, extent.y1), text
    for (one, box), (other, other_box) in combinations(seen.items(), 2):
        assert not box.padded(-0.5).overlaps(other_box.padded(-0.5)), f"{one} lies on {other}"
