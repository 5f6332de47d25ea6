"""Check the built pages for errors that a reader would meet.

    python book/check_pages.py _build/html
    python book/check_pages.py _build/zero_ref-book.html

Fails on: a link to a file or anchor of the book that does not exist, a picture without an alternative text, a
page that is too heavy, and, if book/vendor/ was filled, anything that a page would load from another host. A
single file may have any weight, but may load nothing.
Standard library only.
"""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

BOOK = Path(__file__).resolve().parent
LOADS = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "audio": "src"}
LOADING_RELS = {"stylesheet", "icon", "preload", "modulepreload", "manifest"}

# What a reader waits for. Text, code and pictures written into a page; the heaviest has 0.53 MB.
MOST_HTML = 550_000
# With the scripts, styles and pictures that it names, as on disk. MathJax is 1.2 MB, the theme 0.6 MB.
# Fonts come on top: 0.2 MB of icons, and of MathJax's 20 to 35 kB a style of letters.
MOST_ON_OPENING = 3_000_000


class Page(HTMLParser):
    """The links of one page, the files that it loads and the pictures that it shows."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.images_without_text: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Called by the parser for every opening tag."""
        a = {name: value or "" for name, value in attrs}
        self.anchors.update(a[name] for name in ("id", "name") if name in a)
        if tag == "a" and "href" in a:
            self.links.append(a["href"])
        if tag in LOADS and LOADS[tag] in a:
            self.loads.append(a[LOADS[tag]])
        if tag == "link" and LOADING_RELS & set(a.get("rel", "").split()):
            self.loads.append(a["href"])
        if tag == "img" and says_nothing(a.get("alt", "")):
            self.images_without_text.append(a.get("src", "?"))


def says_nothing(alt: str) -> bool:
    """Whether an alt text is missing or only the file name that Sphinx puts there.

    >>> says_nothing(""), says_nothing("../_images/3f2a.svg"), says_nothing("State bytes by rank.")
    (True, True, False)
    """
    return not alt.strip() or alt.endswith((".png", ".svg", ".jpg", ".jpeg"))


def is_local(url: str) -> bool:
    """Whether a URL is a file of the book: no host and no scheme."""
    parts = urlsplit(url)
    return not parts.netloc and parts.scheme == ""


def weight_on_opening(path: Path, page: Page) -> int:
    """The bytes of a page and of the book's files that it names, each counted once, uncompressed."""
    names = {unquote(urlsplit(url).path) for url in page.loads if is_local(url)}
    files = {path.resolve()} | {(path.parent / name).resolve() for name in names if name}
    return sum(file.stat().st_size for file in files if file.is_file())


def too_heavy(path: Path, page: Page) -> list[str]:
    """Return the parts of a page's weight that are over their limits."""
    html, all_of_it = path.stat().st_size, weight_on_opening(path, page)
    found = []
    if html > MOST_HTML:
        found.append(f"its HTML is {html / 1e6:.2f} MB, and {MOST_HTML / 1e6:.2f} MB is the limit")
    if all_of_it > MOST_ON_OPENING:
        found.append(
            f"opening it loads {all_of_it / 1e6:.2f} MB, and {MOST_ON_OPENING / 1e6:.2f} MB is the limit"
        )
    return found


def heaviest(root: Path) -> str:
    """The heaviest page, in words."""
    files = [path for path in sorted(root.rglob("*.html")) if "_static" not in path.parts]
    weights = {path: weight_on_opening(path, Page(path)) for path in files}
    path = max(weights, key=weights.__getitem__)
    return f"{path.relative_to(root)}, {weights[path] / 1e6:.1f} MB on opening"


def complaints(root: Path, offline: bool) -> list[str]:
    """Everything wrong with the pages below `root`, or in the one file `root`, a sentence each."""
    is_one_file = root.is_file()
    below = [root] if is_one_file else sorted(root.rglob("*.html"))
    files = [path for path in below if "_static" not in path.parts]
    pages = {path.resolve(): Page(path) for path in files}
    found = []
    for path, page in pages.items():
        where = path.relative_to(root.resolve().parent if is_one_file else root.resolve())
        for url in page.links + page.loads:
            if not is_local(url) or url in ("", "#"):
                continue
            parts = urlsplit(url)
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            if not target.exists():
                found.append(f"{where}: {url} is not there")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                found.append(f"{where}: {url} has no such anchor")
        for url in page.loads:
            if is_one_file and not url.startswith("data:"):
                found.append(f"{where}: loads {url}, which is not in the file")
            elif offline and not is_local(url) and not url.startswith("data:"):
                found.append(f"{where}: loads {url} from another host, so it does not read offline")
        found += [] if is_one_file else [f"{where}: {what}" for what in too_heavy(path, page)]
        for src in page.images_without_text:
            found.append(
                f"{where}: {src} has no alt text. For a cell's picture, say what it shows in the cell's "
                'metadata: "mystnb": {"image": {"alt": "..."}}'
            )
    return found if pages else [f"{root}: no pages"]


def main() -> None:
    """Check the pages in the folder given, or the one file."""
    root = Path(sys.argv[1])
    offline = (BOOK / "vendor" / "versions.json").is_file()
    found = complaints(root, offline)
    for line in found:
        print(line)
    if found:
        sys.exit(f"book: {len(found)} things to mend in {root}")
    print(f"book: links, pictures{' and offline reading' if offline else ''} are in order in {root}")
    if root.is_dir():
        print(f"book: the heaviest page is {heaviest(root)}")


if __name__ == "__main__":
    main()
