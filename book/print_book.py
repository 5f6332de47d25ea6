"""Print the offline edition as a PDF with numbered pages, an outline, and links that work.

    python book/print_book.py _build/zero_ref-book.html _build/zero_ref-book.pdf

Chromium prints it, the one that the tests of the pages use (tests/browser/ready.py says what is missing).
"""

import re
import sys
from pathlib import Path
from typing import NamedTuple

from playwright.sync_api import sync_playwright

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "browser"))

from reader import OPTIONS, PATIENCE_MS, find_chromium  # tests/browser/reader.py


class Printed(NamedTuple):
    """The contents of a PDF.

    Args:
        pages: how many.
        links: the places in the file that its links name.
        places: the places that can be named.
    """

    pages: int
    links: set[str]
    places: set[str]


def print_book(edition: Path, target: Path) -> None:
    """Print one page of HTML, when MathJax has set its formulas.

    Raises:
        FileNotFoundError: there is no such page, or no Chromium.
    """
    program = find_chromium()
    if program is None:
        raise FileNotFoundError("a PDF needs Chromium or Google Chrome, or its path in the variable CHROMIUM")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=OPTIONS, timeout=PATIENCE_MS)
        page = browser.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.goto(edition.resolve(strict=True).as_uri())
        page.evaluate("MathJax.startup.promise")
        page.pdf(path=target, prefer_css_page_size=True, outline=True, tagged=True)
        browser.close()


def read(pdf: bytes) -> Printed:
    """Pages, links and places of a PDF that Chromium wrote, which leaves its objects uncompressed."""
    return Printed(
        len(re.findall(rb"/Type /Page\b", pdf)),
        {name.decode() for name in re.findall(rb"/Dest /(\S+)", pdf)},
        {name.decode() for name in re.findall(rb"/(\S+) \[\d+ 0 R /XYZ", pdf)},
    )


def main() -> None:
    """Print the file named first into the one named last."""
    edition, target = Path(sys.argv[1]), Path(sys.argv[2])
    try:
        print_book(edition, target)
    except FileNotFoundError as error:
        sys.exit(f"book: {error}. The edition is written by: make offline")
    printed = read(target.read_bytes())
    print(f"book: {target} has {printed.pages} pages, {target.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
