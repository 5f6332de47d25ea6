"""Fetch what the book's pages load (MathJax, Pyodide), so that they read and move offline.

    python book/vendor.py

Puts the files under book/vendor/ (not in git); does nothing when they are there. Without npm, or without a
network, it says so and ends well: the book then builds with links to a CDN (book/_ext/offline.py chooses),
and its explorers stand still (book/_ext/explorer.py).
A package whose checksum is not the pinned one is an error. Needs npm, and Python's standard library.
"""

import base64
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import NamedTuple

VENDOR = Path(__file__).resolve().parent / "vendor"
STAMP = VENDOR / "versions.json"


class Package(NamedTuple):
    """One npm package. `keep` is a pattern for the files (below `package/`) that pages need."""

    name: str
    version: str
    sha512: str
    folder: str
    keep: str


PACKAGES = [
    Package(
        "mathjax",
        "3.2.2",
        "Bt+SSVU8eBG27zChVewOicYs7Xsdt40qm4+UpHyX7k0/O9NliPc+x77k1/FEsPsjKPZGJvtRZM1vO+geW0OhGw==",
        "mathjax",
        # tex-svg.js, which needs no fonts, is for book/offline_edition.py.
        r"LICENSE|es5/(tex-mml-chtml\.js|tex-svg\.js|output/chtml/fonts/.*|input/tex/extensions/.*|a11y/.*|ui/.*"
        r"|sre/mathmaps/(base|en)\.json)",
    ),
    # Python 3.13 for the browser: what the explorers run. MPL-2.0, as its package.json says.
    Package(
        "pyodide",
        "0.29.5",
        "TkYrUv9m8QmfImADKRmpwZulL48E0uUaBSO+dvRQKyAJc0qh9gu7jn8btyHPh3NZm1r2IH2YrJhIr7Q2B9urAw==",
        "pyodide",
        r"package\.json|pyodide\.js|pyodide\.asm\.(js|wasm)|python_stdlib\.zip|pyodide-lock\.json",
    ),
]


def wanted() -> dict[str, str]:
    """Return the content of a complete stamp: the version of each package and the files kept of it."""
    return {p.name: f"{p.version} {p.keep}" for p in PACKAGES}


def is_complete() -> bool:
    """Whether book/vendor/ already holds these versions."""
    return STAMP.is_file() and json.loads(STAMP.read_text()) == wanted()


def fetch(package: Package, into: Path) -> Path:
    """Download one package with npm into a new folder and check it. Returns the archive."""
    into.mkdir(parents=True)
    command = ["npm", "pack", f"{package.name}@{package.version}", "--loglevel=error"]
    # Its cache and logs go with the folder: nothing is left at home.
    kept = [*command, "--cache", str(into / "cache")]
    done = subprocess.run(kept, capture_output=True, text=True, timeout=180, cwd=into)
    archives = list(into.glob("*.tgz"))
    if done.returncode != 0 or len(archives) != 1:
        first_words = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[0]
        raise OSError(f"`{' '.join(command)}` failed ({first_words})")
    archive = archives[0]
    digest = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    if digest != package.sha512:
        sys.exit(
            f"book/vendor.py: {package.name}@{package.version} has the checksum sha512-{digest}, "
            f"but sha512-{package.sha512} is pinned. Do not use it; compare with the registry's page."
        )
    return archive


def unpack(archive: Path, package: Package, into: Path) -> None:
    """Write the files that pages need to `into`, without the archive's leading `package/`."""
    with tarfile.open(archive) as tar:
        for member in tar.getmembers():
            path = member.name.removeprefix("package/")
            if not member.isfile() or ".." in path or not re.fullmatch(package.keep, path):
                continue
            target = into / path
            target.parent.mkdir(parents=True, exist_ok=True)
            source = tar.extractfile(member)
            assert source is not None  # it is a regular file
            target.write_bytes(source.read())


def main() -> None:
    """Fetch all packages or none."""
    if is_complete():
        print("book: what pages load is in book/vendor/; they will read offline, and explorers will move")
        return
    without = "the book still builds: pages load MathJax from a CDN, explorers stand still"
    if shutil.which("npm") is None:
        print(f"book: npm is not installed; {without}")
        return
    with tempfile.TemporaryDirectory() as scratch:
        ready = Path(scratch, "vendor")
        try:
            for package in PACKAGES:
                archive = fetch(package, Path(scratch, package.folder))
                unpack(archive, package, ready / package.folder)
        except (OSError, subprocess.TimeoutExpired) as error:
            print(f"book: {error}; {without}")
            return
        (ready / STAMP.name).write_text(json.dumps(wanted(), indent=1))
        shutil.rmtree(VENDOR, ignore_errors=True)
        shutil.copytree(ready, VENDOR)
    fetched = ", ".join(f"{package.name} {package.version}" for package in PACKAGES)
    print(f"book: fetched {fetched}; pages will read offline, and explorers will move")


if __name__ == "__main__":
    main()
