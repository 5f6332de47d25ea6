"""Grade a whole notebook as it stands in its file, as `zero-ref check notebooks/03_partition.ipynb` does.

Each exercise runs by itself, in a process of its own: the notebook's cell of imports, the cell with the
reader's function, the check. A cell that fails, hangs or ends its process harms no other exercise. `grading`
grades the notebooks of a class in the same way.

Code from the file runs with the caller's rights: grade only notebooks that you would run.
"""

from __future__ import annotations

import contextlib
import json
import linecache
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import zero_ref
from zero_ref.lab.patience import patience
from zero_ref.simulator._records import read_json
from zero_ref_course import ExerciseFailed, StillTheStub, grade


class ExerciseCells(NamedTuple):
    """An exercise in a notebook: its name, the name of the reader's function, the source of its cells."""

    exercise: str
    function: str
    setup: str
    stub: str
    solution: str

    def define(self, source: str) -> Callable[..., Any]:
        """Run the setup cell and then `source` in a namespace of their own, and return the function.

        Raises:
            ExerciseFailed: a cell raises, or does not define the function.
        """
        namespace: dict[str, Any] = {"__name__": "__main__"}  # as in a notebook: it travels to ranks by value
        _run_cell(self.setup, "the setup cell", namespace)
        _run_cell(source, "its cell", namespace)
        if self.function not in namespace:
            raise ExerciseFailed(f"its cell does not define {self.function}.")
        return namespace[self.function]


class Verdict(NamedTuple):
    """The grade of an answer, and the message of the check.

    Args:
        status: "hidden cases failed": the answer is right in the cases that everybody can read.
    """

    status: Literal["passed", "hidden cases failed", "failed", "not started"]
    message: str


class ExerciseResult(NamedTuple):
    """The result of one exercise of a notebook."""

    exercise: str
    passed: bool
    message: str


def check_notebook(path: str | Path, seconds: float = 120.0) -> list[ExerciseResult]:
    """Grade every exercise of a notebook, with the reader's cells as they are in the file.

    >>> check_notebook("notebooks/03_partition.ipynb")[0]                                # doctest: +SKIP
    ExerciseResult(exercise='partition.largest_first', passed=False, message='largest_first is still ...')

    Args:
        seconds: for each exercise, the start of its process included, times `patience()`; then it is ended.
    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a notebook.
    """
    folder = Path(os.path.realpath(path)).parent  # where Jupyter runs it
    verdicts = [(cells.exercise, grade_alone(cells, folder, seconds)) for cells in exercises_in(path)]
    return [ExerciseResult(name, one.status == "passed", one.message) for name, one in verdicts]


def exercises_in(path: str | Path) -> list[ExerciseCells]:
    """The exercises of a notebook, in their order there.

    The function is in the last cell tagged `exercise` before the one tagged `check`, which names both; a
    cell tagged `solution` follows. The imports are the first code cell that is not tagged `install`. Tags
    survive editors that write new cell ids.

    Raises:
        OSError, ValueError: as in `check_notebook`.
    """
    cells = [cell for cell in read_notebook(path)["cells"] if cell["cell_type"] == "code"]
    code = [("".join(cell["source"]), tags) for cell in cells if "install" not in (tags := tags_of(cell))]
    found: list[ExerciseCells] = []
    stub = ""
    for source, tags in code:
        if "exercise" in tags:
            stub = source
        elif "check" in tags and (call := re.search(r"""check\(\s*["']([\w.]+)["'],\s*(\w+)\s*\)""", source)):
            found.append(ExerciseCells(call[1], call[2], setup=code[0][0], stub=stub, solution=""))
        elif "solution" in tags and found:
            found[-1] = found[-1]._replace(solution=source)
    return found


def read_notebook(path: str | Path) -> dict[str, Any]:
    """The contents of a notebook's file: `cells` with type, source and metadata, and all other keys.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a notebook.
    """
    try:
        notebook = read_json(path)
        for cell in notebook["cells"]:
            source, tags = cell["source"], cell["metadata"].get("tags", [])
            texts = [cell["cell_type"], *([source] if isinstance(source, str) else list[str](source))]
            if not (isinstance(tags, list) and all(isinstance(text, str) for text in (*texts, *tags))):
                raise TypeError("a source or tags that are not text")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = f": {error}" if isinstance(error, ValueError) else ""
        raise ValueError(f"{path} is not a Jupyter notebook (format 4){why}.") from None
    return dict(notebook)


def tags_of(cell: dict[str, Any]) -> list[str]:
    """The tags of a cell."""
    return list(cell["metadata"].get("tags", ()))


def _run_cell(source: str, name: str, namespace: dict[str, Any]) -> None:
    lines = [line for line in source.splitlines(keepends=True) if not line.startswith(("%", "!"))]
    file = f"<{name}>"
    linecache.cache[file] = (len(source), None, lines, file)  # what error messages quote
    try:
        exec(compile("".join(lines), file, "exec", dont_inherit=True), namespace)
    except Exception as error:
        advice = ""
        if isinstance(error, NameError) and name == "its cell":
            advice = " Besides this cell only the notebook's cell of imports is run."
        raise ExerciseFailed(f"{name} raises {type(error).__name__}: {error}.{advice}") from None


# ---------------------------------------------------------------------------------- a process for each


def grade_alone(cells: ExerciseCells, folder: Path, seconds: float, seed: int = 0) -> Verdict:
    """Check the answer in `cells.stub` in a process of its own.

    The process writes its verdict into a file. An answer that ends the process, or never ends, does not
    pass, whatever it prints.

    Args:
        folder: the folder in which the answer runs.
        seconds: the most time for the process, its start included, times `patience()`; then it is ended.
        seed: of hidden cases, which are tried too; 0 for none.
    """
    seconds *= patience()
    with tempfile.TemporaryDirectory(prefix="zero_ref-check-") as scratch:
        result, errors = Path(scratch, "result.json"), Path(scratch, "errors.txt")
        with errors.open("wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-c", f"from {__name__} import _main; _main()"],
                cwd=folder,
                env=os.environ | {"PYTHONPATH": import_path()},
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                start_new_session=True,  # so that all it starts can be ended together
            )
            try:
                # What it grades comes through a pipe, which is long enough for any notebook.
                process.communicate(json.dumps([cells, seed, str(result)]).encode(), seconds)
            except subprocess.TimeoutExpired:
                return Verdict("failed", f"it did not end within {seconds:g} s, and was ended.")
            finally:
                _end(process)
        with contextlib.suppress(OSError, ValueError):  # not written, or not to its end
            return Verdict(*json.loads(result.read_text(encoding="utf-8")))
        last = errors.read_text(encoding="utf-8", errors="replace").strip().rpartition("\n")[2]
    ended = f"its process ended with code {process.returncode} before the check did"
    return Verdict("failed", f"{ended}: {last}" if last else f"{ended}.")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and all that it started, if they have not ended already."""
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.wait()


def import_path() -> str:
    """A PYTHONPATH for a process in another folder: both packages, and this process's own PYTHONPATH."""
    packages = [str(Path(file).parents[1]) for file in (zero_ref.__file__, __file__)]
    given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return os.pathsep.join(dict.fromkeys(map(os.path.abspath, [*packages, *given])))


def _main() -> None:
    """Grade one exercise in a process of its own, and write the verdict to a file."""
    fields, seed, result = json.load(sys.stdin)
    verdict = judge(ExerciseCells(*fields), seed)
    Path(result).write_text(json.dumps(verdict), encoding="utf-8")


def judge(cells: ExerciseCells, seed: int) -> Verdict:
    """Check the answer in `cells.stub` in this process.

    Args:
        seed: of hidden cases, which are tried too; 0 for none.
    """
    known = ""
    try:
        answer = cells.define(cells.stub)
        known = grade(cells.exercise, answer)
        return Verdict("passed", grade(cells.exercise, answer, seed) if seed else known)
    except StillTheStub as error:
        return Verdict("not started", str(error))
    except ExerciseFailed as error:
        return Verdict("hidden cases failed" if known else "failed", str(error))
    except Exception as error:
        return Verdict("failed", f"the check itself failed: {type(error).__name__}: {error}")
