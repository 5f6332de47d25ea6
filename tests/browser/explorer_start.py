"""Measure the time of an explorer of the book from the press of its button to the first answer.

    make book && .venv/bin/python tests/browser/explorer_start.py

Each start is a reader's first: a new browser, nothing cached, pages from a server on this machine. Needs a
Chromium, as the browser's tests do.
"""

from __future__ import annotations

import statistics
import threading
import time
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from playwright.sync_api import sync_playwright
from reader import OPTIONS, find_chromium

ROOT = Path(__file__).resolve().parents[2]

STARTS = 7
NAMES = ("memory", "partition", "overlap", "which")


class Quiet(SimpleHTTPRequestHandler):
    """Writes no log."""

    def log_message(self, *args: object) -> None:
        """Nothing."""


def starts_s(site: str, name: str) -> list[float]:
    """Seconds from the button to the first answer, in a new browser each time."""
    found = []
    with sync_playwright() as playwright:
        for _ in range(STARTS):
            browser = playwright.chromium.launch(executable_path=find_chromium(), args=OPTIONS)
            page = browser.new_page()
            page.goto(f"{site}book/explorers.html")
            began = time.perf_counter()
            page.locator(f'[data-explorer="{name}"] .explorer-start').click()
            page.wait_for_selector(f'[data-explorer="{name}"][data-state=live]', timeout=60_000)
            found.append(time.perf_counter() - began)
            browser.close()
    return found


def main() -> None:
    """Print the median and the longest for each explorer."""
    handler = partial(Quiet, directory=str(ROOT / "_build" / "html"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for name in NAMES:
            found = starts_s(f"http://127.0.0.1:{server.server_port}/", name)
            median, longest = statistics.median(found), max(found)
            print(f"{name:10} median {median:.1f} s, longest {longest:.1f} s of {STARTS}")
        server.shutdown()


if __name__ == "__main__":
    main()
