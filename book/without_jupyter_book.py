"""Build the book by Sphinx alone, from the same settings: for the day on which jupyter-book 1 cannot be used.

    python book/execute.py                  # or take --no-outputs below
    python book/without_jupyter_book.py _build/newest/html

jupyter-book 1 holds Sphinx below 8 and MyST's parser below 4. `ADDED` has the settings that it adds to
_config.yml. A workflow builds the book with the newest versions of everything; CONTRIBUTING.md lists the
differences.
Warnings are counted and not an error; the exit code is 1 if a page could not be written.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml
from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[1]

ADDED: dict[str, Any] = {
    "external_toc_path": "_toc.yml",
    "external_toc_exclude_missing": True,
    "html_sourcelink_suffix": "",
    "html_theme": "sphinx_book_theme",
    "myst_url_schemes": ["mailto", "http", "https"],
    "numfig": True,
}
"""The settings of jupyter-book that differ from Sphinx's."""


def settings(root: Path = ROOT) -> tuple[list[str], dict[str, Any]]:
    """The folders of the book's own extensions, and Sphinx's settings as jupyter-book makes them."""
    book = yaml.safe_load((root / "_config.yml").read_text(encoding="utf-8"))
    own = book["sphinx"]["config"]
    return sorted({str(root / folder) for folder in book["sphinx"]["local_extensions"].values()}), {
        **ADDED,
        "project": book["title"],
        "author": book["author"],
        "copyright": book["copyright"],
        "html_title": book["title"],
        "html_logo": book["logo"],
        "html_favicon": book["html"]["favicon"],
        "exclude_patterns": ["_build", "**.ipynb_checkpoints", *book["exclude_patterns"]],
        "bibtex_bibfiles": book["bibtex_bibfiles"],
        "myst_enable_extensions": book["parse"]["myst_enable_extensions"],
        "nb_execution_mode": book["execute"]["execute_notebooks"],
        "nb_execution_timeout": book["execute"]["timeout"],
        "nb_execution_cache_path": str(root / "_build" / ".jupyter_cache"),
        "nb_output_stderr": book["execute"]["stderr_output"],
        **own,
        "extensions": [name for name in own["extensions"] if name != "jupyter_book"],
    }


def main() -> int:
    """Build into the folder named; say how many warnings there were."""
    target = Path(sys.argv[1])
    folders, found = settings()
    sys.path[:0] = folders
    if "--no-outputs" in sys.argv:
        found["nb_execution_mode"] = "off"
    app = Sphinx(
        srcdir=ROOT,
        confdir=None,
        outdir=target,
        doctreedir=target.parent / "doctrees",
        buildername="html",
        confoverrides=found,
        status=None,
        freshenv=True,
    )
    app.build(force_all=True)
    print(f"book: {app._warncount} warnings; pages are in {target}")
    return app.statuscode


if __name__ == "__main__":
    sys.exit(main())
