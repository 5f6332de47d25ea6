"""The built book behind a server, and a Chromium to read it with.

    python -m pytest -m browser        # after `make book`

These tests read `_build/html`, or the folder that ZERO_REF_PAGES names, with an installed Chromium: the
one that CHROMIUM names, or one that is found. No browser is downloaded, and only that server is reached.
"""

import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright
from reader import DESK, OPTIONS, PATIENCE_MS, Visit, find_chromium
from ready import AXE_SCRIPT, fetch_axe

ROOT = Path(__file__).resolve().parents[2]
PAGES = Path(os.environ.get("ZERO_REF_PAGES") or ROOT / "_build" / "html")
CONFIG = yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))["sphinx"]["config"]
A_PAGE_OF_EACH_KIND = {
    "book/explorers.html",
    "book/glossary.html",
    "book/index.html",
    "book/running.html",
    "notebooks/03_partition.html",
    "search.html",
}
FORWARDED: dict[str, str] = CONFIG["redirects"]
"""Old addresses of chapters, without their ending, and the names of the pages that stand for them."""


class QuietHandler(SimpleHTTPRequestHandler):
    """Serves files and writes no log."""

    def log_message(self, *args: Any) -> None:
        """Nothing: a request is in the Visit."""


@pytest.fixture(scope="session")
def pages() -> Path:
    """The folder of the built pages."""
    folder = Path(os.environ.get("ZERO_REF_PAGES") or ROOT / "_build" / "html")
    if not (folder / "index.html").is_file():
        pytest.fail(
            f"{folder} has no pages: build them with `make book`, or name their folder in ZERO_REF_PAGES"
        )
    return folder


@pytest.fixture(scope="session")
def forwarded() -> dict[str, str]:
    """The chapters' old addresses, and where they lead."""
    return FORWARDED


@pytest.fixture(scope="session")
def site(pages: Path) -> Iterator[str]:
    """The address of the book, such as http://127.0.0.1:40123/ ; served until the tests end."""
    handler = partial(QuietHandler, directory=str(pages))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """One Chromium without a window, for all tests."""
    program = find_chromium()
    if program is None:
        named = os.environ.get("CHROMIUM")
        pytest.fail(
            (f"CHROMIUM={named} is not a program. " if named else "no Chromium found. ")
            + "Install Chromium or Google Chrome, or give the path of one in the variable CHROMIUM"
        )
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=OPTIONS, timeout=PATIENCE_MS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def _contexts() -> dict[tuple[bool, int], BrowserContext]:
    # One for each look, kept: MathJax then comes from the cache, as for a reader who turns the page.
    return {}


@pytest.fixture
def visit(
    site: str, browser: Browser, _contexts: dict[tuple[bool, int], BrowserContext]
) -> Iterator[Callable[..., Visit]]:
    """`visit("notebooks/01_ledger.html", dark=True, width=PHONE)` opens a page, closed when the test ends.

    It returns when all scripts have run and the formulas are set.
    """
    opened: list[Page] = []

    def open_page(address: str, *, dark: bool = False, width: int = DESK, height: int = 900) -> Visit:
        look = (dark, width)
        if look not in _contexts:
            scheme = "dark" if dark else "light"
            _contexts[look] = browser.new_context(color_scheme=scheme, reduced_motion="reduce")
            _contexts[look].set_default_timeout(PATIENCE_MS)
        page = _contexts[look].new_page()
        opened.append(page)
        page.set_viewport_size({"width": width, "height": height})
        one = Visit(page, site)
        page.goto(site + address, wait_until="load")
        page.evaluate("window.MathJax?.startup?.promise?.then(() => null)")
        return one

    yield open_page
    for page in opened:
        page.close()


@pytest.fixture(scope="session")
def axe() -> str:
    """The source of axe-core, which looks a page over for what shuts readers out."""
    missing = fetch_axe()
    if missing:
        pytest.fail(missing)
    return AXE_SCRIPT.read_text(encoding="utf-8")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that asks for `address` is run for every page that was built: one of each kind always."""
    if "address" in metafunc.fixturenames:
        found = sorted(path.relative_to(PAGES).as_posix() for path in PAGES.rglob("*.html"))
        # _static holds templates; index.html and the old addresses of chapters only send on.
        sent_on = {"index.html", *(f"{old}.html" for old in FORWARDED)}
        addresses = [name for name in found if not name.startswith("_static/") and name not in sent_on]
        # The package's sources are coloured by one program and framed by one template: two stand for all.
        sources = [name for name in addresses if name.startswith("_modules/")]
        addresses = [name for name in addresses if name not in sources[2:]] or ["book/index.html"]
        reference = [name for name in addresses if name.startswith("book/api/")]
        always = {*A_PAGE_OF_EACH_KIND, *sources[:1], *reference[:1]}
        thorough = pytest.mark.thorough
        metafunc.parametrize(
            "address", [pytest.param(name, marks=() if name in always else thorough) for name in addresses]
        )
