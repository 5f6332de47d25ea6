"""Write the whole book as one file that reads without a network and prints.

    python book/offline_edition.py _build/html _build/zero_ref-book.html

The file is put together from the pages that `make book` wrote, in the order of their table of contents:
nothing is run again, and numbers, pictures and outputs are those of the pages. Pictures, style sheets and
MathJax (from book/vendor/) go into the file; links between pages become links within it. The API reference is
left out, and links to it become plain text. Explorers stand still and say so. Standard library only.
"""

import base64
import html
import json
import posixpath
import re
import sys
from collections import Counter
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

BOOK = Path(__file__).resolve().parent
MATHJAX = BOOK / "vendor" / "mathjax" / "es5" / "tex-svg.js"
FRONT = "book/index.html"
LINE = re.compile(
    r'class="caption-text">(.*?)<'
    r'|<li class="toctree-l1[^>]*>\s*<a [^>]*href="([^"]*)"[^>]*>\s*(.*?)\s*</a>',
    re.S,
)
LEFT_OUT = re.compile(r"book/api(\.html|/)")
SHEETS = ("pygments.css", "mystnb.*.css", "sphinx-design.min.css", "zero.css", "explorer.css")
NAMES_AN_ID = {"id", "for", "headers", "aria-labelledby", "aria-describedby", "aria-controls"}
TYPES = {".svg": "image/svg+xml", ".png": "image/png", ".jpg": "image/jpeg"}


class Entry(NamedTuple):
    """A line of the table of contents: a page, and the part of the book that begins with it, if one does."""

    part: str
    page: str
    title: str


def contents(front: str) -> list[Entry]:
    """The pages in order, as the front page's sidebar has them; titles are HTML.

    Raises:
        ValueError: there is no such list.
    """
    sidebar = front.partition('<nav class="bd-links')[2].partition("</nav>")[0]
    found, part = [], ""
    for caption, href, title in LINE.findall(sidebar):
        if caption:
            part = caption
            continue
        page = FRONT if href == "#" else posixpath.normpath(posixpath.join("book", href))
        if not LEFT_OUT.match(page):
            found.append(Entry(part, page, title))
            part = ""
    if not found:
        raise ValueError(f"{FRONT} has no list of pages in its sidebar; another theme writes it otherwise.")
    return found


def anchor_of(page: str, fragment: str = "") -> str:
    """The id in the one file of a page, or of a place on it.

    >>> anchor_of("notebooks/05_buckets.html"), anchor_of("book/index.html", "id1")
    ('05_buckets', 'index--id1')
    """
    return Path(page).stem + (f"--{fragment}" if fragment else "")


def data_uri(path: Path) -> str:
    """A picture as a `data:` address, which holds its bytes.

    Raises:
        FileNotFoundError: there is no such file.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is shown in the book but is not there. Write the pages again: make book"
        )
    return f"data:{TYPES[path.suffix]};base64,{base64.b64encode(path.read_bytes()).decode()}"


class Article(HTMLParser):
    """The text of one page, rewritten for the one file. `written` is the result.

    Args:
        pages: all pages of the file, as `notebooks/05_buckets.html`; a link to another one becomes text.
        root: the folder of the pages.
    """

    def __init__(self, page: str, text: str, pages: set[str], root: Path) -> None:
        super().__init__(convert_charrefs=False)
        self.page, self.pages, self.root = page, pages, root
        self.pieces: list[str] = []
        self.skipping = ""  # the tag whose end brings the text back
        self.ends_to_drop: set[str] = set()
        self.feed(text)
        self.close()

    @property
    def written(self) -> str:
        """The rewritten text."""
        return "".join(self.pieces)

    def handle_data(self, data: str) -> None:
        """Add a piece of text, unless it is within something left out."""
        if not self.skipping:
            self.pieces.append(data)

    def handle_entityref(self, name: str) -> None:
        self.handle_data(f"&{name};")

    def handle_charref(self, name: str) -> None:
        self.handle_data(f"&#{name};")

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self.skipping:
            return
        given = {name: value or "" for name, value in attrs}
        if tag == "script" or "headerlink" in given.get("class", "").split():
            self.skipping = tag
            return
        opening = self.get_starttag_text() or ""
        changed = {name: self.rewritten(tag, name, value) for name, value in given.items()}
        if tag == "a" and changed.get("href") is None and "href" in given:
            self.ends_to_drop.add(tag)
        elif changed == given:
            self.handle_data(opening)
        else:
            inner = "".join(f' {name}="{html.escape(value or "")}"' for name, value in changed.items())
            self.handle_data(f"<{tag}{inner}{'/' * opening.endswith('/>')}>")

    handle_startendtag = handle_starttag

    def handle_endtag(self, tag: str) -> None:
        if self.skipping:
            self.skipping = "" if self.skipping == tag else self.skipping
        elif tag in self.ends_to_drop:
            self.ends_to_drop.remove(tag)
        else:
            self.handle_data(f"</{tag}>")

    def rewritten(self, tag: str, name: str, value: str) -> str | None:
        """An attribute's value in the one file; None for a link to a page that is not in the file."""
        if name in NAMES_AN_ID or (tag, name) in (("input", "name"), ("a", "name")):
            return " ".join(anchor_of(self.page, word) for word in value.split())
        if name in ("href", "xlink:href"):
            return self.link(value)
        if tag == "img" and name == "src" and not value.startswith("data:"):
            return data_uri(self.root / posixpath.dirname(self.page) / unquote(urlsplit(value).path))
        return re.sub(r"url\(#([^)]*)\)", lambda m: f"url(#{anchor_of(self.page, m[1])})", value)

    def link(self, href: str) -> str | None:
        """Return the target of a link: another site as before, else a place in the file, or nothing."""
        parts = urlsplit(href)
        if parts.scheme or parts.netloc:
            return href
        beside = posixpath.join(posixpath.dirname(self.page), unquote(parts.path))
        page = posixpath.normpath(beside) if parts.path else self.page
        return f"#{anchor_of(page, unquote(parts.fragment))}" if page in self.pages else None


def styles(sheets: Mapping[str, str]) -> str:
    """Style sheets, by name, as one element.

    Raises:
        ValueError: one of the style sheets would load a file.
    """
    for name, sheet in sheets.items():
        loads = re.search(r"@import|url\((?![\"']?(?:data:|#))[^)]*\)", sheet)
        if loads:
            raise ValueError(f"{name} loads a file ({loads[0]}), which is not in the offline edition.")
    return "<style>\n" + "\n".join(sheets.values()) + "\n</style>"


def mathjax(pages: Mapping[str, str], script: str) -> str:
    """MathJax with the pages' own settings, less its menu, which would load more files."""
    found = (re.search(r"window\.MathJax = (\{.*\})</script>", text) for text in pages.values())
    window = json.loads(next((match[1] for match in found if match), "{}"))
    window["options"] = {**window.get("options", {}), "enableMenu": False}
    inline = script.replace("</script", r"<\/script")
    return f"<script>window.MathJax = {json.dumps(window)}</script>\n<script>{inline}</script>"


def edition(root: Path, sheets: Mapping[str, str], script: str) -> str:
    """The one file, from the pages below `root`.

    Args:
        sheets: style sheets, by name.
        script: MathJax, a component that holds its fonts.
    Raises:
        ValueError: an id stands twice, or a style sheet would load a file.
        FileNotFoundError: a page or a picture is missing.
    """
    entries = contents((root / FRONT).read_text(encoding="utf-8"))
    pages = {entry.page: (root / entry.page).read_text(encoding="utf-8") for entry in entries}
    listed, articles = [], []
    for part, page, title in entries:
        inside = pages[page].partition('<article class="bd-article"')[2].partition(">")[2]
        inner = inside.rpartition("</article>")[0]
        if not inner.strip():
            raise ValueError(f"{page} has no article in it; another theme writes it otherwise.")
        anchor = anchor_of(page)
        article = Article(page, inner, set(pages), root).written
        articles.append(f'<article class="bd-article" id="{anchor}">{article}</article>')
        listed += [f'<li class="part">{part}</li>'] if part else []
        listed.append(f'<li><a href="#{anchor}">{title}</a></li>')
    # The front page comes first, then the contents, so that the file opens as the book does.
    nav = f'<nav id="contents" aria-label="Contents"><h2>Contents</h2><ul>{"".join(listed)}</ul></nav>'
    text = "\n".join([articles[0], nav, *articles[1:]])
    twice = [name for name, n in Counter(re.findall(r'<[^<>]*\sid="([^"]*)"', text)).items() if n > 1]
    if twice:
        raise ValueError(f"These ids stand more than once in the one file: {', '.join(twice)}")
    page = (BOOK / "offline_edition.html").read_text(encoding="utf-8")
    for place, filling in {"styles": styles(sheets), "mathjax": mathjax(pages, script), "book": text}.items():
        page = page.replace(f"<!-- {place} -->", filling)
    return page


def main() -> None:
    """Write the file named last from the pages in the folder named first."""
    root, target = Path(sys.argv[1]), Path(sys.argv[2])
    if not (root / FRONT).is_file():
        sys.exit(f"book: {root} has no pages. Write them first: make book")
    if not MATHJAX.is_file():
        sys.exit("book: the offline edition needs MathJax in book/vendor/: install npm, then make book")
    files = [path for name in SHEETS for path in sorted((root / "_static").glob(name))]
    files.append(BOOK / "offline_edition.css")
    sheets = {path.name: path.read_text(encoding="utf-8") for path in files}
    target.write_text(edition(root, sheets, MATHJAX.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"book: {target} holds the whole book, {target.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
