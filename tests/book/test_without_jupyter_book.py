"""The book can be built by Sphinx alone, from the settings that jupyter-book makes of _config.yml."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

IN_ITS_OWN_WAY = {
    "comments_config": "no comments are shown",
    "external_toc_path": "the same file",
    "html_baseurl": "there is none",
    "html_title": "from the same title",
    "latex_engine": "no LaTeX is written",
    "nb_execution_cache_path": "the same folder, by its full name",
    "nb_execution_excludepatterns": "there are none",
    "pygments_style": "the theme has its own",
    "use_jupyterbook_latex": "no LaTeX is written",
    "use_multitoc_numbering": "chapters have numbers of their own",
}
"""Settings of jupyter-book that Sphinx alone does not need, and why."""


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("alone", ROOT / "book" / "without_jupyter_book.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def of_jupyter_book() -> dict[str, Any]:
    """Return the settings that jupyter-book gives to Sphinx."""
    config = pytest.importorskip("jupyter_book.config")
    path = list(sys.path)
    found, _ = config.get_final_config(
        user_yaml=ROOT / "_config.yml", sourcedir=ROOT, cli_config={"latex_individualpages": False}
    )
    sys.path[:] = path
    return dict(found)


def test_sphinx_alone_has_the_settings_that_jupyter_book_makes() -> None:
    folders, alone = load_script().settings()
    assert [Path(folder).relative_to(ROOT).as_posix() for folder in folders] == ["book", "book/_ext"]
    theirs = of_jupyter_book()
    left_out = {"jupyter_book", "sphinx_jupyterbook_latex", "sphinx_multitoc_numbering"}
    assert alone["extensions"] == [name for name in theirs["extensions"] if name not in left_out]
    for name, value in theirs.items():
        if name not in IN_ITS_OWN_WAY and name not in ("extensions", "exclude_patterns"):
            usual = {"nb_execution_allow_errors": False, "nb_execution_in_temp": False}
            assert alone.get(name, usual.get(name)) == value, name
    assert set(theirs["exclude_patterns"]) - {".DS_Store", "Thumbs.db"} == set(alone["exclude_patterns"])
