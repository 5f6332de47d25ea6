"""`check_notebook` and `zero-ref check`: each exercise by itself, whatever the others do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from zero_ref import cli
from zero_ref_course.notebook import (
    ExerciseCells,
    ExerciseResult,
    Verdict,
    check_notebook,
    exercises_in,
    judge,
)

# Some start processes that import torch: one test after another, as for those on ranks.
pytestmark = pytest.mark.ranks

PARTITION = Path(__file__).parents[2] / "notebooks" / "03_partition.ipynb"

RIGHT = "def adversary():\n    return [3, 3, 2, 2, 2]\n"
PASSED = (
    True,
    "[3, 3, 2, 2, 2] on 2 ranks: largest first fills one with 7, the best possible is 6: 16.7% more, "
    "the worst there is on 2 ranks",
)


def cell(source: str, *tags: str) -> dict[str, Any]:
    """A code cell as an editor writes it that keeps no ids."""
    lines = source.splitlines(keepends=True)
    return {
        "cell_type": "code",
        "source": lines,
        "metadata": {"tags": list(tags)},
        "outputs": [],
        "execution_count": 3,
    }


def notebook(folder: Path, *answers: str, setup: str = "import math\n") -> Path:
    """A notebook that asks for the same exercise again and again, with these answers."""
    check = cell('check("partition.adversary", adversary)', "check")
    cells = [{"cell_type": "markdown", "source": "# 3", "metadata": {}}, cell(setup)]
    for answer in answers:
        cells += [cell(answer, "exercise"), check, cell("raise SystemExit", "solution")]
    path = folder / "answers.ipynb"
    path.write_text(json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 4}))
    return path


def outcomes(results: list[ExerciseResult]) -> list[tuple[bool, str]]:
    return [(passed, message) for _, passed, message in results]


def alive(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


def ended(pids: list[int]) -> bool:
    """Whether they end: a process that was killed may be there a moment longer."""
    deadline = time.monotonic() + 60
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    left = [pid for pid in pids if alive(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return not left


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def here(cells: ExerciseCells, folder: Path, seconds: float) -> Verdict:
        return judge(cells, seed=0)

    monkeypatch.setattr("zero_ref_course.notebook.grade_alone", here)


# ------------------------------------------------------------------------------- in a process for each


def test_a_cell_that_ends_its_process_or_breaks_the_grader_harms_no_other(tmp_path: Path) -> None:
    path = notebook(
        tmp_path,
        "import sys\nsys.exit('enough')\n",
        "import zero_ref_course.partition as grader\ngrader._best_of_two = None\n" + RIGHT,
        RIGHT,
    )
    exits, breaks_the_grader, right = outcomes(check_notebook(path))
    assert exits == (False, "its process ended with code 1 before the check did: enough")
    assert breaks_the_grader == (
        False,
        "the check itself failed: TypeError: 'NoneType' object is not callable",
    )
    assert right == PASSED


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_cell_that_hangs_is_ended_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, children = tmp_path / "pid", []

    class Patience(subprocess.Popen[bytes]):
        """Runs out when the cell hangs and not before, however busy the machine is."""

        def wait(self, timeout: float | None = None) -> int:
            while timeout is not None and self.poll() is None:
                if written.exists() and (pid := written.read_text()):
                    written.unlink()
                    children.append(int(pid))
                    raise subprocess.TimeoutExpired(self.args, timeout)
                time.sleep(0.02)
            return super().wait()

    monkeypatch.setattr(subprocess, "Popen", Patience)
    hangs = (
        "import pathlib, subprocess, time\n"
        "child = subprocess.Popen(['sleep', '1000'])\n"
        f"pathlib.Path({str(written)!r}).write_text(str(child.pid))\n"
        "time.sleep(1000)\n"
    )
    [hung] = outcomes(check_notebook(notebook(tmp_path, hangs), seconds=15))
    assert hung == (False, "it did not end within 150 s, and was ended."), "15 s, and 10 times the patience"
    assert ended(children)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_what_a_cell_leaves_running_is_ended(tmp_path: Path) -> None:
    leaves = (
        "import pathlib, subprocess\n"
        "child = subprocess.Popen(['sleep', '1000'])\n"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(child.pid))\n"
    )
    assert outcomes(check_notebook(notebook(tmp_path, leaves + RIGHT))) == [PASSED]
    assert ended([int((tmp_path / "pid").read_text())])


def test_a_cell_runs_in_the_notebooks_folder_with_its_setup(tmp_path: Path) -> None:
    (tmp_path / "sizes.txt").write_text("3 3 2 2 2")
    setup = "%config InlineBackend.figure_formats = ['svg']\n!echo hello\nimport pathlib\n"
    reads = "def adversary():\n    return list(map(int, pathlib.Path('sizes.txt').read_text().split()))\n"
    assert outcomes(check_notebook(notebook(tmp_path, reads, setup=setup))) == [PASSED]


# ----------------------------------------------------------------------------------- what a check says


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("def adversary(:\n", "its cell raises SyntaxError: invalid syntax (<its cell>, line 1)."),
        ("1 / 0\n", "its cell raises ZeroDivisionError: division by zero."),
        ("adversary = [3, 3, 2, 2, 2]\n", "check was given [3, 3, 2, 2, 2]. It takes the function itself"),
        ("def adversry():\n    return [3, 3, 2, 2, 2]\n", "its cell does not define adversary."),
        (
            "sizes = helper()\n" + RIGHT,
            "its cell raises NameError: name 'helper' is not defined. "
            "Besides this cell only the notebook's cell of imports is run.",
        ),
    ],
)
def test_what_is_wrong_with_a_cell_is_said(answer: str, said: str, tmp_path: Path) -> None:
    [(passed, message)] = outcomes(check_notebook(notebook(tmp_path, answer)))
    assert not passed
    assert message.startswith(said)


@pytest.mark.usefixtures("in_this_process")
def test_the_cell_that_installs_the_package_is_not_run(tmp_path: Path) -> None:
    path = notebook(tmp_path, "def adversary():\n    return math.floor\n", RIGHT)
    text = json.loads(path.read_text())
    text["cells"].insert(1, cell("raise SystemExit('installed again')", "install", "remove-cell"))
    path.write_text(json.dumps(text))
    assert [cells.setup for cells in exercises_in(path)] == ["import math\n"] * 2
    assert outcomes(check_notebook(path))[1] == PASSED


@pytest.mark.usefixtures("in_this_process")
def test_a_setup_that_fails_is_told_apart(tmp_path: Path) -> None:
    [(passed, message)] = outcomes(check_notebook(notebook(tmp_path, RIGHT, setup="import nowhere\n")))
    assert not passed
    assert message == "the setup cell raises ModuleNotFoundError: No module named 'nowhere'."


@pytest.mark.usefixtures("in_this_process")
def test_the_command_prints_a_line_for_each_exercise_and_ends_with_1_if_one_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = json.loads(PARTITION.read_text())
    solutions = {cells.stub: cells.solution for cells in exercises_in(PARTITION)[:2]}
    for code in text["cells"]:
        code["source"] = solutions.get("".join(code["source"]), code["source"])
    path = tmp_path / "half-solved.ipynb"
    path.write_text(json.dumps(text))
    assert cli.main(["check", str(path)]) == 1
    first, second, third = capsys.readouterr().out.splitlines()
    assert first.startswith("passed  partition.largest_first  ")
    assert second.startswith("passed  partition.even_split     ")
    assert third.startswith("FAILED  partition.adversary      adversary is still the stub")


@pytest.mark.usefixtures("in_this_process")
def test_the_command_prints_no_control_sequence_of_a_notebook(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raises = "def adversary():\n    raise ValueError('\\x1b[2J\\n\\x1b[31mpassed')\n"
    assert cli.main(["check", str(notebook(tmp_path, raises))]) == 1
    printed = capsys.readouterr().out
    assert r"raised ValueError: \x1b[2J" in printed
    assert "\x1b" not in printed


@pytest.mark.usefixtures("in_this_process")
def test_the_command_gives_json_and_ends_with_0_if_all_passed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["check", str(notebook(tmp_path, RIGHT)), "--json"]) == 0
    [right] = json.loads(capsys.readouterr().out)
    assert right == {"exercise": "partition.adversary", "passed": True, "message": PASSED[1]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        ("this is no notebook", "is not a Jupyter notebook"),
        ('{"cells": [{"cell_type": "code"}]}', "is not a Jupyter notebook"),
        ('{"cells": []}', "has no exercises"),
    ],
)
def test_what_is_no_notebook_with_exercises_ends_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, message: str
) -> None:
    path = tmp_path / "n.ipynb"
    if content is not None:
        path.write_text(content)
    assert cli.main(["check", str(path)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err
    assert "n.ipynb" in printed.err
