"""Cells that readers edit and run in a page: each needs the standard library and the page's archive alone."""

from __future__ import annotations

import doctest
import importlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from zero_ref.live import cell as of_reader
from zero_ref.live.cell import run

ROOT = Path(__file__).parents[2]
"""The chapters whose cells of the simulator can be tried."""

sys.path.insert(0, str(ROOT / "book" / "_ext"))
try_it, explorer = (importlib.import_module(name) for name in ("try_it", "explorer"))
sys.path.pop(0)


def notebooks() -> list[Path]:
    return sorted((ROOT / "notebooks").glob("*.ipynb"))


def cells_of(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return found


def tried(path: Path) -> list[int]:
    """The places of a notebook's cells to try."""
    return [
        place for place, one in enumerate(cells_of(path)) if try_it.TAG in one["metadata"].get("tags", ())
    ]


def before_of(path: Path, place: int) -> list[str]:
    """Return the pieces of code that run before a cell."""
    cells = cells_of(path)
    others = {cells[one]["id"]: try_it.trial(cells, one)["source"] for one in tried(path)}
    pieces = try_it.trial(cells, place)["before"]
    return [piece if isinstance(piece, str) else others[piece["cell"]] for piece in pieces]


TRIALS = [(path, place) for path in notebooks() for place in tried(path)]
NAMES = [f"{path.stem}-{cells_of(path)[place]['id']}" for path, place in TRIALS]


# ------------------------------------------------------------------------------------------------ the cells


def test_the_examples_of_the_extension_hold() -> None:
    assert doctest.testmod(try_it).failed == 0


def test_a_cell_to_try_is_shown_and_has_an_output_to_compare() -> None:
    for path, place in TRIALS:
        cell = cells_of(path)[place]
        assert not {"hide-input", "hide-cell", "remove-input"} & set(cell["metadata"]["tags"]), cell["id"]
        assert "print(" in try_it.source_of(cell), cell["id"]


@pytest.fixture(scope="session")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The archive that a page fetches: the package's modules of the standard library."""
    folder = tmp_path_factory.mktemp("html")
    (folder / "_static" / "live").mkdir(parents=True)
    explorer.write_modules(SimpleNamespace(outdir=folder, builder=SimpleNamespace(format="html")), None)
    return folder / "_static" / "live" / "zero_ref.zip"


def test_every_cell_runs_with_the_standard_library_and_the_archive(archive: Path, tmp_path: Path) -> None:
    given = [
        (json.dumps(before_of(path, place)), try_it.trial(cells_of(path), place)["source"])
        for path, place in TRIALS
    ]
    # -S leaves out every package that is installed, -I the folder and what the environment says.
    # One Python runs all, as in a page.
    script = "import json, sys; sys.path.insert(0, sys.argv[1]); from zero_ref import live"
    script += "; print(json.dumps([live.run_cell(*cell) for cell in json.load(sys.stdin)]))"
    command = [sys.executable, "-I", "-S", "-c", script, str(archive)]
    done = subprocess.run(
        command, input=json.dumps(given), capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    answers = dict(zip(NAMES, map(json.loads, json.loads(done.stdout)), strict=True))
    assert {name: answer["error"] for name, answer in answers.items() if answer["error"]} == {}
    assert [name for name, answer in answers.items() if not answer["printed"]] == []


def test_the_archive_has_nothing_that_needs_more(archive: Path) -> None:
    with zipfile.ZipFile(archive) as modules:
        assert "zero_ref/live/cell.py" in modules.namelist()
        assert not any("optimizer" in name or "lab" in name for name in modules.namelist())


# ------------------------------------------------------------------------------------ what runs before a cell


def code(name: str, source: str, *tags: str) -> dict[str, Any]:
    return {"id": name, "cell_type": "code", "metadata": {"tags": list(tags)}, "source": source}


def test_a_cell_gets_what_it_needs_and_no_more() -> None:
    cells = [
        code("install", "ranks = 0", "install"),
        code("setup", "import torch\nfrom math import ceil, floor\n\nranks = 4", "hide-input"),
        {"id": "text", "cell_type": "markdown", "metadata": {}, "source": "ranks = 5"},
        code("helper", "def share(numel):\n    return ceil(numel / ranks)  # rounded up\n\n\nunused = torch"),
        code("first", "numel = 10\nprint(numel)", "try-it"),
        code("stub", "def share(numel):\n    raise NotImplementedError", "exercise"),
        code("second", "print(share(numel))\nreveal('a.b', numel)", "try-it"),
    ]
    trial = try_it.trial(cells, 6)
    assert trial["before"] == [
        "from math import ceil\nranks = 4",
        "def share(numel):\n    return ceil(numel / ranks)  # rounded up",
        {"cell": "first"},
    ]
    assert trial["source"] == "print(share(numel))"
    texts = [piece if isinstance(piece, str) else "numel = 10" for piece in trial["before"]]
    assert run(texts, trial["source"]).printed == "3\n"


# --------------------------------------------------------------------------------------------- running a cell


def test_only_the_cells_own_output_is_shown() -> None:
    assert run(["print('above')"], "print('here')\n{'a': 1}") == of_reader.Ran("here\n{'a': 1}\n")
    assert run([], "x = 1") == of_reader.Ran("")
    assert run([], "None").printed == ""


def test_an_error_is_told_with_the_readers_lines_and_what_was_printed_before_it() -> None:
    ran = run([], "from zero_ref import even\nprint('so far')\neven([3], 0)")
    assert ran.printed == "so far\n"
    first, where, line, *_, last = ran.error.splitlines()
    assert first == "Traceback (most recent call last):"
    assert where == '  File "<this cell>", line 3, in <module>'
    assert line == "    even([3], 0)"
    assert last == "ValueError: world_size must be at least 1 rank, got 0."


@pytest.mark.parametrize(
    ("source", "last"),
    [
        ("for rank in range(4)", "SyntaxError: expected ':'"),
        ("import torch_of_another_world", "ModuleNotFoundError: No module named 'torch_of_another_world'"),
        ("import sys\nsys.exit(3)", "SystemExit: 3"),
    ],
)
def test_every_kind_of_end_is_told(source: str, last: str) -> None:
    error = run([], source).error
    assert error.splitlines()[-1] == last
    assert "live/cell.py" not in error


def test_a_cell_that_prints_without_end_is_stopped() -> None:
    ran = run([], "while True:\n    print('again')")
    assert len(ran.printed) <= of_reader.MOST_PRINTED
    assert "The cell was stopped: it printed more than 50,000 characters." in ran.error
