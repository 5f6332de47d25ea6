"""Say whether the built pages can be checked in a browser here, and fetch axe-core for it.

    python tests/browser/ready.py

Ends with status 0 if there is a Chromium that starts, and axe-core (fetched with npm into this folder and
pinned by its checksum; neither in git nor part of the pages). Else it says in one line what to install, with
status 1.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Error, sync_playwright
from reader import OPTIONS, PATIENCE_MS, find_chromium

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "book"))

import vendor  # noqa: E402  # book/vendor.py

AXE = vendor.Package(
    "axe-core",
    "4.14.1",
    "FHfa+lmNjQZfJz1q8wKqIDwC6DExcHt/pkjNQb09a3NPjCKg2rhu5qb2S4r76ASyFNNtuFooJpZe37OgudVGtQ==",
    ".axe-core-4.14.1",
    r"axe\.min\.js|LICENSE",
)
AXE_SCRIPT = Path(__file__).resolve().parent / AXE.folder / "axe.min.js"


def what_is_missing() -> str:
    """Return the reason why pages cannot be checked on this machine; empty if they can."""
    chromium = find_chromium()
    if chromium is None:
        return "install Chromium or Google Chrome, or name one in the variable CHROMIUM"
    try:
        with sync_playwright() as playwright:
            playwright.chromium.launch(executable_path=chromium, args=OPTIONS, timeout=PATIENCE_MS).close()
    except Error as error:
        return f"{chromium} does not start: {error.message.splitlines()[0]}"
    return fetch_axe()


def fetch_axe() -> str:
    """Put axe-core where AXE_SCRIPT says, if it is not there; returns why it could not be, or nothing."""
    if AXE_SCRIPT.is_file():
        return ""
    if shutil.which("npm") is None:
        return "install npm, which fetches axe-core"
    try:
        with tempfile.TemporaryDirectory() as scratch:
            archive = vendor.fetch(AXE, Path(scratch, AXE.folder))
            vendor.unpack(archive, AXE, AXE_SCRIPT.parent)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"axe-core could not be fetched: {error}"
    return ""


if __name__ == "__main__":
    missing = what_is_missing()
    if missing:
        sys.exit(f"The pages were NOT checked in a browser: {missing}.")
