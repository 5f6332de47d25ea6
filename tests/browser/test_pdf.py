"""The book as a PDF: all of it, with numbered pages and links that lead somewhere."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "book"))

from print_book import read  # noqa: E402  # book/print_book.py

pytestmark = [pytest.mark.browser, pytest.mark.thorough]


def run(script: str, *files: Path) -> None:
    command = [sys.executable, str(ROOT / "book" / script), *map(str, files)]
    subprocess.run(command, check=True, timeout=800)


def test_the_book_is_printed_and_its_links_lead_somewhere(pages: Path, tmp_path: Path) -> None:
    edition, pdf = tmp_path / "book.html", tmp_path / "book.pdf"
    run("offline_edition.py", pages, edition)
    chapters = re.findall(r'<article class="bd-article" id="(\w+)"', edition.read_text())
    assert len(chapters) > 20
    run("print_book.py", edition, pdf)
    printed = read(pdf.read_bytes())
    assert printed.pages > 5 * len(chapters)
    assert printed.links - printed.places == set()
    assert set(chapters) <= printed.links  # the table of contents names each
    assert "counter(page)" in (ROOT / "book" / "offline_edition.css").read_text()
