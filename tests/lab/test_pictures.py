"""All pictures have the same bytes each time, text inside and on no other text, known colours."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import pytest
from all_pictures import DRAWINGS, PLOTS
from library.pictures import assert_readable, assert_repeatable

from zero_ref.lab import plots
from zero_ref.live import lanes, palette
from zero_ref.live.palette import rank_colour, tint
from zero_ref.live.svg import BOLD, Drawing, text_width

SVG = "{http://www.w3.org/2000/svg}"
PHONE, COLUMN, WIDE = 340, 576, 760

PLAIN = {
    "#000000", "#FFFFFF", palette.INK, palette.MUTED, palette.FAINT, palette.ALARM, *palette.RANK_COLOURS,
    *palette.PART_COLOURS.values(), *palette.SERIES_COLOURS, *palette.ITEM_COLOURS.values(), lanes.OTHER,
    *lanes.COLOURS.values(), *lanes.COLOURS_OF_MORE.values(),
    *(rank_colour(rank, ranks) for ranks in (9, 10, 64) for rank in range(ranks)),
}  # fmt: skip
OF_A_RING = {
    tint(palette.SERIES_COLOURS[0], (part / whole) ** 1.5) for whole in (2, 3, 4) for part in range(5)
}
PALETTE = PLAIN | OF_A_RING | {tint(colour, share / 100) for colour in PLAIN for share in range(100)}


class Line(NamedTuple):
    """A line of text, and where it is at least: its letters may be a little narrower than estimated."""

    words: str
    left: float
    right: float
    base: float


def lines(drawing: Drawing, width: float) -> list[Line]:
    found = []
    for one in ElementTree.fromstring(drawing.svg(width)).iter(f"{SVG}text"):
        words, x = "".join(one.itertext()), float(one.attrib["x"])
        wide = 0.85 * text_width(words) * (BOLD if "font-weight" in one.attrib else 1)
        left = x - {"start": 0, "middle": wide / 2, "end": wide}[one.get("text-anchor", "start")]
        found.append(Line(words, left, left + wide, float(one.attrib["y"])))
    return found


@pytest.mark.parametrize("name", DRAWINGS)
def test_a_drawing_says_what_it_shows_in_the_colours_of_the_palette_and_fits_every_width(name: str) -> None:
    drawing = DRAWINGS[name]()
    svg = drawing._repr_svg_()
    assert svg == DRAWINGS[name]()._repr_svg_(), "it is the same each time"
    root = ElementTree.fromstring(svg)
    assert root.get("role") == "img"
    assert root[0].text == drawing.words != ""
    assert set(re.findall("#[0-9A-Fa-f]{6}", svg)) <= PALETTE
    for width in (PHONE, COLUMN, WIDE):
        assert_inside(drawing, width)
        assert_no_text_lies_on_another(drawing, width)


def assert_inside(drawing: Drawing, width: int) -> None:
    root = ElementTree.fromstring(drawing.svg(width))
    height = float(root.attrib["height"])
    assert float(root.attrib["width"]) == width
    for one in root.iter(f"{SVG}rect"):
        x, y = float(one.get("x", 0)), float(one.get("y", 0))
        assert 0 <= x <= x + float(one.attrib["width"]) <= width + 0.1  # hundredths of a pixel
        assert 0 <= y <= y + float(one.attrib["height"]) <= height
    for line in lines(drawing, width):
        assert -1 <= line.left <= line.right <= width + 1, line
        assert 10 <= line.base <= height - 2, line


def assert_no_text_lies_on_another(drawing: Drawing, width: int) -> None:
    for one, other in combinations(lines(drawing, width), 2):
        beside = one.right <= other.left or other.right <= one.left
        assert beside or abs(one.base - other.base) >= 11, f"{one} lies on {other}"


# -------------------------------------------------------------------------------------------- by matplotlib


@pytest.mark.parametrize("name", list(PLOTS)[:3])
def test_a_plot_has_the_same_bytes_every_time(name: str, tmp_path: Path) -> None:
    assert_repeatable(PLOTS[name][0], tmp_path)


@pytest.mark.parametrize(
    ("name", "height"), [(name, height) for name, (_, heights) in PLOTS.items() for height in heights]
)
def test_all_text_of_a_plot_is_inside_none_lies_on_another_and_nothing_warns(
    name: str, height: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_readable(PLOTS[name][0], monkeypatch, height)


def test_a_plot_has_the_same_pixels_every_time(tmp_path: Path) -> None:
    for attempt in ("first", "second"):
        fig, ax = plots.figure(6, 4)
        next(iter(PLOTS.values()))[0](ax)
        plots.save(fig, tmp_path / f"{attempt}.png")
    assert (tmp_path / "first.png").read_bytes() == (tmp_path / "second.png").read_bytes()


# ---------------------------------------------------------------------------------------------- the table

NO_PICTURES = {
    "figure", "panels", "save", "Picture", "Drawing", "StepParts", "step_parts", "Crossing", "Read",
    "rank_colour", "text_colour_on", "cut_each", "fitted",
}  # fmt: skip


def test_each_public_picture_is_in_the_table() -> None:
    assert {name.split(",")[0] for name in (*DRAWINGS, *PLOTS)} == set(plots.__all__) - NO_PICTURES


@pytest.mark.parametrize("ending", ["pdf", "png"])
def test_a_drawing_is_saved_as_svg_and_nothing_else(ending: str, tmp_path: Path) -> None:
    drawing = plots.ring_rounds(2)
    plots.save(drawing, tmp_path / "ring.svg")
    assert (tmp_path / "ring.svg").read_text(encoding="utf-8") == drawing.svg()
    with pytest.raises(ValueError, match=rf"'ring.{ending}': .*\.svg"):
        plots.save(drawing, tmp_path / f"ring.{ending}")
