"""The book's views of stairs are computed from the files, and stand in the chapters in reading order."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import pytest

from zero_ref.lab.source import without_docstrings
from zero_ref.lab.stairs import StairDiff, in_one_file, path_of
from zero_ref.stairs import BEFORE, STAIRS

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
ALL = 10**6


def kept(lines: list[str], marks: str) -> list[str]:
    return [line[1:] for line in lines if line[0] in marks]


@pytest.mark.parametrize("stair", STAIRS[1:])
def test_the_lines_of_a_difference_are_those_of_both_files(stair: str) -> None:
    lines = StairDiff(stair, context=ALL).lines
    assert kept(lines, " -") == without_docstrings(in_one_file(BEFORE[stair])).splitlines()
    assert kept(lines, " +") == without_docstrings(in_one_file(stair)).splitlines()


@pytest.mark.parametrize("stair", STAIRS)
def test_a_stair_in_one_file_is_its_file_without_what_others_gave(stair: str) -> None:
    in_file = path_of(stair).read_text(encoding="utf-8").partition("class MinimalZero")[2]
    assert in_one_file(stair).partition("class MinimalZero")[2] == in_file
    compile(in_one_file(stair), stair, "exec")


@pytest.mark.parametrize("stair", STAIRS[:-1])
def test_a_method_can_be_left_out_of_both(stair: str) -> None:
    whole, less = StairDiff(stair, context=ALL), StairDiff(stair, ["state_dict"], ALL)
    assert "def state_dict(" in whole.text
    assert "def state_dict(" not in less.text
    assert "all_gather_object" not in less.text
    assert "def step(" in less.text
    names = re.findall(r"def (\w+)", less.text)
    assert set(names) == set(re.findall(r"def (\w+)", whole.text)) - {"state_dict"}


@pytest.mark.parametrize("stair", STAIRS)
def test_a_difference_is_read_the_same_in_colour_and_as_text(stair: str) -> None:
    difference = StairDiff(stair)
    assert repr(difference) == difference.text
    shown = difference._repr_html_()
    assert html.unescape(re.sub(r"<[^>]*>", "", shown)) == difference.text + "\n"
    assert shown.count("background: rgb") == sum(line[0] in "+-" for line in difference.lines)
    assert '"""' not in difference.text


def test_an_unknown_stair_is_refused() -> None:
    with pytest.raises(ValueError, match="there is no stair 'roof'; there are owners, buckets,"):
        StairDiff("roof")


def test_chapters_show_the_stairs_in_reading_order_each_before_what_the_package_adds() -> None:
    """But for the last one, which goes on from stage 2: the chapter on stage 3 comes next after that."""
    shown = []
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        source = {cell["id"]: "".join(cell["source"]) for cell in cells}
        if "stair-diff" not in source:
            continue
        shown += re.findall(r'^StairDiff\("(\w+)"', source["stair-diff"])
        below = [
            text for id, text in source.items() if list(source).index(id) > list(source).index("stair-diff")
        ]
        assert any("the package adds" in text.lower() or "and adds:" in text for text in below[:4]), path.name
    assert tuple(stair for stair in shown if stair != "parameters") == STAIRS[:-1]
