"""The page says what the table says, fetches nothing, and trusts no text."""

from __future__ import annotations

import base64
from html.parser import HTMLParser
from pathlib import Path

import pytest

from zero_ref.lab.report import Check, Exhibit, verdict, write_report

COLUMNS = ["strategy", "state", "calls", "loss"]
GOOD = [
    ["ddp", Check(8_000_000, 8_000_000, "bytes"), Check(4, 4), 1.5],
    ["zero", Check(2000, 2000, "bytes"), Check(9, 9), 1.5],
]
SVG = '<svg xmlns="http://www.w3.org/2000/svg" width="4" height="4"/>'


class Drawing:
    def _repr_svg_(self) -> str:
        return SVG


class Page(HTMLParser):
    """The tags of a page, the text in it, and whether every tag that opens also closes."""

    VOID = ("meta", "img", "link", "br", "hr", "input")

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.open: list[str] = []
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data

    def having(self, tag: str, **attributes: str) -> list[dict[str, str | None]]:
        return [a for t, a in self.tags if t == tag and all(a.get(k) == v for k, v in attributes.items())]


@pytest.fixture
def page(tmp_path):
    def write(**parts):
        defaults = {"title": "A run", "columns": COLUMNS, "rows": GOOD}
        write_report(tmp_path / "run.html", **(defaults | parts))
        return Page(tmp_path / "run.html")

    return write


def test_a_good_run_says_so(page):
    good = page()
    assert "4 of 4 predictions equal their measurement" in good.text
    assert good.having("div", **{"class": "verdict good"})
    assert len(good.having("td", **{"class": "equal"})) == 4
    assert not good.having("td", **{"class": "differs"})


def test_a_miss_is_in_the_verdict_by_name_and_with_exact_numbers(page):
    rows = [GOOD[0], ["zero", Check(2_000_000, 2_000_001, "bytes"), Check(9, 9), 1.5]]
    bad = page(rows=rows)
    assert "3 of 4 predictions equal their measurement" in bad.text
    assert bad.having("div", **{"class": "verdict bad"})
    assert "zero, state: predicted 2,000,000 B, measured 2,000,001 B" in bad.text
    # Rounded, both would read 2.00 MB.
    assert "2,000,000 B | 2,000,001 B ≠" in bad.text
    assert len(bad.having("td", **{"class": "differs"})) == 1


def test_a_table_without_a_prediction_is_no_success():
    assert verdict(["strategy", "loss"], [["ddp", 1.5]]) == (
        False,
        "No prediction was held against a measurement",
        [],
    )


def test_text_is_escaped_everywhere(page):
    evil = "<script>alert(\"$x & 'y'\")</script>"
    escaped = page(
        title=evil,
        lead=evil,
        columns=[evil, evil],
        rows=[[evil, Check(1, 2)], ["plain", evil]],
        figures=[(Drawing(), evil, evil)],
        environment={evil: evil},
    )
    assert not escaped.having("script")
    assert "<script" not in escaped.source
    assert escaped.text.count(evil) >= 8
    (image,) = escaped.having("img")
    assert image["alt"] == evil


def test_nothing_is_fetched(page, tmp_path):
    (tmp_path / "dot.png").write_bytes(b"\x89PNG bytes")
    whole = page(figures=[(tmp_path / "dot.png", "a dot", "dot"), (Drawing(), "a drawing", "drawing")])
    for tag, attributes in whole.tags:
        assert tag not in ("script", "link", "iframe", "object", "embed")
        for name in ("src", "href", "srcset", "poster"):
            assert (attributes.get(name) or "data:").startswith("data:")
    style = whole.source.split("<style>")[1].split("</style>")[0]
    assert "url(" not in style
    assert "@import" not in style
    (policy,) = whole.having("meta", **{"http-equiv": "Content-Security-Policy"})
    assert policy["content"].startswith("default-src 'none'")


def test_images_arrive_byte_for_byte(page, tmp_path):
    (tmp_path / "dot.png").write_bytes(b"\x89PNG bytes")
    (tmp_path / "dot.svg").write_text(SVG)
    images = page(
        figures=[
            (tmp_path / "dot.png", "png", "a"),
            (str(tmp_path / "dot.svg"), "svg", "b"),
            Exhibit(Drawing(), "drawn", "c"),
        ]
    ).having("img")
    heads, contents = zip(*(image["src"].split(";base64,") for image in images))
    assert heads == ("data:image/png", "data:image/svg+xml", "data:image/svg+xml")
    assert [base64.b64decode(content) for content in contents] == [
        b"\x89PNG bytes",
        SVG.encode(),
        SVG.encode(),
    ]
    assert [image["alt"] for image in images] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"rows": [["ddp", 1]]}, "has 2 cells for 4 columns"),
        ({"figures": [("plot.pdf", "a plot", "a")]}, "'plot.pdf'"),
        ({"figures": [(Drawing(), "a plot", " ")]}, "'a plot' has no alternative text"),
        ({"rows": [[Check(1, 1), 1, 1, 1]]}, "its name, not a check"),
    ],
)
def test_what_cannot_be_shown_is_an_error_and_writes_nothing(page, tmp_path, parts, message):
    with pytest.raises(ValueError, match=message):
        page(**parts)
    assert not (tmp_path / "run.html").exists()
