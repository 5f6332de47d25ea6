"""The book in one file: what pages load goes into it, and links between pages become links within it."""

from __future__ import annotations

import base64
import doctest
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given, strategies as st

ROOT = Path(__file__).parents[2]

SIDEBAR = """
<nav class="bd-links bd-docs-nav"><ul><li class="toctree-l1 on"><a class="a" href="#"> Front </a></li></ul>
<p class="caption"><span class="caption-text">Chapters</span></p>
<ul><li class="toctree-l1"><a class="a" href="../notebooks/01_first.html">1 First</a></li></ul>
<p class="caption"><span class="caption-text">Reference</span></p>
<ul><li class="toctree-l1 has-children"><a class="a" href="api.html">API</a>
<ul><li class="toctree-l2"><a class="a" href="api/optimizer.html">Optimizer</a></li></ul></li>
<li class="toctree-l1"><a class="a" href="glossary.html">Glossary</a></li></ul></nav>
"""
TEXT = {
    "book/index.html": '<h1 id="same">Front<a class="headerlink" href="#same">#</a></h1><p>words</p>',
    "notebooks/01_first.html": (
        '<h1 id="same">First</h1><a href="../book/glossary.html#same">a word</a>, <a href="#same">above</a>, '
        '<a href="02_gone.html">not here</a>, <a href="https://example.org/#same">elsewhere</a>'
        '<img alt="a dot" src="../_images/dot.svg"/><script src="../_static/a.js">let x = "<p>";</script>'
        '<svg viewBox="0 0 1 1" aria-labelledby="t"><title id="t">T</title><rect fill="url(#t)"/></svg>'
    ),
    "book/glossary.html": '<h1 id="same">Glossary</h1><a href="../notebooks/01_first.html">chapter 1</a>',
}
DOT = b'<svg xmlns="http://www.w3.org/2000/svg"><circle r="1"/></svg>'


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "book" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


offline = load_script("offline_edition")
check_pages = load_script("check_pages")


@pytest.fixture
def pages(tmp_path: Path) -> Path:
    """Three small pages in a folder."""
    for name, text in TEXT.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        settings = '<script>window.MathJax = {"options": {"a": 1}}</script>'
        path.write_text(f'{settings}{SIDEBAR}<article class="bd-article">\n{text}\n</article><p>frame</p>')
    (tmp_path / "_images").mkdir()
    (tmp_path / "_images" / "dot.svg").write_bytes(DOT)
    return tmp_path


def one_file(pages: Path) -> str:
    written = offline.edition(pages, {"a.css": "p { color: red }"}, "draw('</script>')")
    assert isinstance(written, str)
    return written


def chapter(text: str, root: Path = ROOT) -> str:
    written = offline.Article("notebooks/01_first.html", text, set(TEXT), root).written
    assert isinstance(written, str)
    return written


def test_examples() -> None:
    assert doctest.testmod(offline).failed == 0


def test_contents_are_the_sidebars_without_the_reference() -> None:
    assert offline.contents(SIDEBAR) == [
        ("", "book/index.html", "Front"),
        ("Chapters", "notebooks/01_first.html", "1 First"),
        ("Reference", "book/glossary.html", "Glossary"),
    ]


def test_links_lead_within_the_file_or_to_another_site(pages: Path) -> None:
    written = one_file(pages)
    assert '<a href="#glossary--same">a word</a>, <a href="#01_first--same">above</a>' in written
    assert '<a href="https://example.org/#same">elsewhere</a>' in written
    assert '<a href="#01_first">chapter 1</a>' in written


def test_ids_are_unique_and_what_names_them_follows(pages: Path) -> None:
    written = one_file(pages)
    ids = re.findall(r'\sid="([^"]*)"', written)
    assert len(ids) == len(set(ids))
    assert {"index--same", "01_first--same", "glossary--same"} <= set(ids)
    assert 'aria-labelledby="01_first--t"><title id="01_first--t">' in written
    assert 'fill="url(#01_first--t)"' in written


def test_an_id_that_stands_twice_on_a_page_is_an_error(pages: Path) -> None:
    (pages / "book" / "glossary.html").write_text(
        '<article class="bd-article"><p id="a"></p><p id="a"></p></article>'
    )
    with pytest.raises(ValueError, match=r"more than once.*: glossary--a"):
        one_file(pages)


def test_pictures_are_in_the_file(pages: Path) -> None:
    (source,) = re.findall(r'<img alt="a dot" src="([^"]*)"/>', one_file(pages))
    kind, _, content = source.partition(",")
    assert kind == "data:image/svg+xml;base64"
    assert base64.b64decode(content) == DOT


def test_a_missing_picture_is_an_error(pages: Path) -> None:
    (pages / "_images" / "dot.svg").unlink()
    with pytest.raises(FileNotFoundError, match=r"dot\.svg is shown in the book but is not there"):
        one_file(pages)


@pytest.mark.parametrize(
    "rule", ["@import 'b.css';", "p { background: url(dot.svg) }", 'p{src:url("a.woff2")}']
)
def test_a_style_sheet_that_loads_a_file_is_an_error(rule: str) -> None:
    with pytest.raises(ValueError, match=r"a\.css loads a file"):
        offline.styles({"a.css": rule})


def test_mathjax_has_the_pages_settings_and_cannot_end_its_element_early(pages: Path) -> None:
    written = one_file(pages)
    assert 'window.MathJax = {"options": {"a": 1, "enableMenu": false}}' in written
    assert r"draw('<\/script>')</script>" in written


def test_the_file_passes_the_check_of_pages_and_loads_nothing(pages: Path) -> None:
    target = pages / "one.html"
    target.write_text(one_file(pages))
    assert check_pages.complaints(target, offline=True) == []
    page = check_pages.Page(target)
    assert [load.partition(",")[0] for load in page.loads] == ["data:image/svg+xml;base64"]


@pytest.mark.parametrize(
    ("piece", "complaint"),
    [
        ('<a href="#nowhere">x</a>', "has no such anchor"),
        ('<img alt="dot" src="_images/dot.svg">', "is not in the file"),
        ('<script src="https://example.org/a.js"></script>', "is not in the file"),
    ],
)
def test_the_check_of_pages_sees_what_is_not_in_the_file(pages: Path, piece: str, complaint: str) -> None:
    target = pages / "one.html"
    target.write_text(one_file(pages) + piece)
    (found,) = check_pages.complaints(target, offline=True)
    assert found.startswith("one.html: ")
    assert complaint in found


@given(st.text(st.characters(codec="utf-8", exclude_characters="\r\0"), max_size=30))
def test_text_without_tags_stays_as_it_is(text: str) -> None:
    escaped = text.replace("&", "&amp;").replace("<", "&lt;")
    assert chapter(f"<p>{escaped}</p><br/><hr>") == f"<p>{escaped}</p><br/><hr>"
