"""A reader with a browser: which Chromium, how wide its window is, and what it notices on a page."""

import os
import shutil
from pathlib import Path

from playwright.sync_api import Page, Request, Response

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ON_MACOS = "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"
PHONE, DESK = 390, 1250
"""Widths in pixels: a usual phone's, and a window that shows both side bars."""

PATIENCE_MS = 600_000
"""For whatever is waited for: no measure of speed (explorer_start.py is), only an end to waiting."""

OPTIONS = [
    "--no-sandbox",  # in a container Chromium cannot have one; it opens this book's pages only
    "--disable-dev-shm-usage",
    # No other host has an address, so a page that asks one fails here as it does without a network.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
]


def find_chromium() -> str | None:
    """The Chromium to use: the one that CHROMIUM names, else one on the PATH, else macOS's usual place."""
    named = os.environ.get("CHROMIUM")
    if named:
        return shutil.which(named)
    found = next(filter(None, map(shutil.which, NAMES)), None)
    return found or (ON_MACOS if Path(ON_MACOS).is_file() else None)


def darken(page: Page) -> None:
    """Change an open page to its dark colours, and wait until it is drawn in them."""
    page.emulate_media(color_scheme="dark", reduced_motion="reduce")
    page.wait_for_function("document.documentElement.dataset.theme === 'dark'")
    page.evaluate("new Promise(drawn => requestAnimationFrame(() => requestAnimationFrame(drawn)))")


class Visit:
    """One page, open in a browser, and what went wrong while it was.

    `page` is Playwright's. `elsewhere`, `failed` and `errors` grow as long as it is open: requests to other
    hosts; requests that failed, or were answered by 400 or more; errors that scripts threw or wrote.
    """

    def __init__(self, page: Page, site: str) -> None:
        self.page, self.site = page, site
        self.requests: list[str] = []
        self.elsewhere: list[str] = []
        self.failed: list[str] = []
        self.errors: list[str] = []
        page.on("request", self._requested)
        page.on("requestfailed", lambda request: self.failed.append(f"{request.url}: {request.failure}"))
        page.on("response", self._answered)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", lambda line: self.errors.append(line.text) if line.type == "error" else None)

    def _requested(self, request: Request) -> None:
        self.requests.append(request.url)
        if not request.url.startswith((self.site, "data:", "blob:")):
            self.elsewhere.append(request.url)

    def _answered(self, response: Response) -> None:
        if response.status >= 400:
            self.failed.append(f"{response.url}: {response.status}")

    def trouble(self) -> list[str]:
        """All that went wrong up to now, a line each."""
        return (
            [f"asks another host: {url}" for url in self.elsewhere]
            + [f"request failed: {what}" for what in self.failed]
            + [f"script error: {what}" for what in self.errors]
        )
