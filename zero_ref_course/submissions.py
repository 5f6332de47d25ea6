"""A folder of what a class hands in: who handed in what, and every exercise of everybody graded.

    SUBMISSIONS/ada/03_partition.ipynb            a folder for each student, with any folders inside
    SUBMISSIONS/bob_LATE_17_03_partition.ipynb    or a file for each, as Canvas names them

Workers of their own grade one exercise at a time. A worker that does not answer is ended, and another one
takes its place, so a notebook can harm no other. Verdicts are kept in a file as they come: what was graded
already, with the same answer, the same seed and the same package, is not graded again.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import json
import math
import os
import queue
import re
import secrets
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple, get_args

import zero_ref
from zero_ref.lab.own import FILE
from zero_ref.lab.patience import patience
from zero_ref_course import exercises
from zero_ref_course.apart.confine import Limits, protections
from zero_ref_course.grading import (
    OF_OWN,
    Assigned,
    Status,
    Verdict,
    answer_cell_in,
    answer_in,
    cells_of_own,
    judge,
    modules_of,
)
from zero_ref_course.isolated import Cells, Nursery
from zero_ref_course.notebook import read_notebook
from zero_ref_course.predictions import points_of, predictions

LARGEST_NOTEBOOK = 20 * 2**20


class Submission(NamedTuple):
    """What one student has handed in.

    Args:
        student: the name of the folder, or of the file without the chapter's.
        notebooks: by path, in order; one that cannot be read is not in it.
        problems: what cannot be read, and why.
        late: why it is late, in words.
        days_late: days begun after the date; 0 where no time of handing in is known.
        own: the text of `my_zero.py`, if it is there.
    """

    student: str
    notebooks: dict[Path, dict[str, Any]]
    problems: tuple[str, ...] = ()
    late: tuple[str, ...] = ()
    days_late: int = 0
    own: str | None = None

    @property
    def is_empty(self) -> bool:
        """Nothing of it can be graded."""
        return not self.notebooks and self.own is None


class Graded(NamedTuple):
    """A student's verdicts, by exercise in the book's order, and the points of what was predicted.

    Args:
        predictions: by name; None for what was not predicted. They are no marks: whoever has run the
            notebook knows the answers.
        seconds: by exercise, that grading took; nothing for what was not graded.
    """

    submission: Submission
    verdicts: dict[str, Verdict]
    predictions: Mapping[str, float | None] = {}
    seconds: Mapping[str, float] = {}


class Job(NamedTuple):
    """One exercise of one student."""

    student: str
    exercise: str
    cells: Cells
    seed: int

    @property
    def key(self) -> str:
        """What its verdict depends on."""
        parts = [zero_ref.__version__, self.student, self.exercise, *self.cells[:3], str(self.seed)]
        return hashlib.sha256(json.dumps(parts, default=list).encode()).hexdigest()


# ------------------------------------------------------------------------------------- who handed in what


def submissions_in(
    folder: str | Path,
    chapters: Iterable[str],
    due: datetime | None = None,
    roster: Sequence[str] = (),
    submitted: Mapping[str, datetime] = {},
) -> list[Submission]:
    """What is in a folder, student by student, in the order of their names.

    No link is followed: it may lead to what another student has handed in, or out of the folder.

    Args:
        chapters: the names of the chapters' notebooks, "03_partition": they are no part of a student's name.
        due: what was handed in after that is late. A file's own time says nothing: it is that of a download.
        roster: students, of whom some may have handed in nothing.
        submitted: when each student handed in, as the learning platform has it. Where it says nothing, LATE
            in a name that Canvas gives is all that is known.
    Raises:
        OSError: the folder cannot be read.
        ValueError: there are no notebooks in it.
    """
    folder = Path(folder)
    files: dict[str, list[Path]] = {student: [] for student in roster}
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        if path.is_dir():
            found = [path] if path.is_symlink() else sorted(_notebooks_in(path))
            files.setdefault(path.name, []).extend(found)
        elif _is_handed_in(path):
            files.setdefault(student_of(path.stem, [*chapters, Path(FILE).stem]), []).append(path)
    if not any(files.values()):
        raise ValueError(f"there are no notebooks in {folder}: it has a folder or a file for each student.")
    made = [_submission(student, paths, folder) for student, paths in sorted(files.items())]
    return [_with_lateness(one, due, submitted) if due and not one.is_empty else one for one in made]


def read_submitted(text: str) -> dict[str, datetime]:
    """When each student handed in, from a CSV with the columns `student` and `submitted`.

    >>> read_submitted("student,submitted\\nada,2026-05-01T22:10+02:00\\n")["ada"].isoformat()
    '2026-05-01T22:10:00+02:00'

    Raises:
        ValueError: a column is missing, or a time is none.
    """
    found = {}
    for row in rows_in(text, ("student", "submitted")):
        if row["submitted"]:
            try:
                time_of = datetime.fromisoformat(row["submitted"])
            except ValueError:
                raise ValueError(
                    f"{row['submitted']!r} of {row['student']} is no time such as 2026-05-01T23:59."
                ) from None
            found[row["student"]] = time_of if time_of.tzinfo else time_of.astimezone()
    return found


def rows_in(text: str, columns: Sequence[str]) -> list[dict[str, str]]:
    """The rows of a CSV that has at least these columns.

    Raises:
        ValueError: it lacks one.
    """
    table = csv.DictReader(io.StringIO(text.removeprefix("\ufeff")))
    names = [name.strip().lower() for name in table.fieldnames or []]
    if missing := [column for column in columns if column not in names]:
        raise ValueError(f"its first line has no column {missing[0]!r}; it takes {','.join(columns)}.")
    table.fieldnames = names
    return [{name: (row[name] or "").strip() for name in columns} for row in table]


def _with_lateness(one: Submission, due: datetime, submitted: Mapping[str, datetime]) -> Submission:
    if one.student not in submitted:
        return one
    if (handed_in := submitted[one.student]) <= due:
        return one._replace(late=())  # the platform knows better than a name
    days = math.ceil((handed_in - due) / timedelta(days=1))
    when = handed_in.isoformat(sep=" ", timespec="minutes")
    return one._replace(late=(f"handed in {when}",), days_late=days)


def student_of(stem: str, chapters: Iterable[str]) -> str:
    """Whose a file is, from its name without the chapter's and without what Canvas adds.

    >>> student_of("lovelaceada_LATE_4711_815_03_partition-2", ["03_partition"])
    'lovelaceada'
    >>> student_of("ada", ["03_partition"])
    'ada'
    """
    for chapter in chapters:
        stem = re.sub(rf"[-_ .]*{re.escape(chapter)}.*$", "", stem)
    return re.sub(r"(_LATE)?(_\d+)*$", "", stem) or "unnamed"


def _notebooks_in(folder: Path) -> list[Path]:
    found = (path for path in folder.rglob("*") if _is_handed_in(path))
    return [
        path for path in found if not any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]


def _is_handed_in(path: Path) -> bool:
    is_own = path.suffix == ".py" and Path(FILE).stem in path.stem
    return (path.suffix == ".ipynb" or is_own) and (path.is_file() or path.is_symlink())


def _submission(student: str, paths: Sequence[Path], folder: Path) -> Submission:
    notebooks, problems, late, own = {}, [], [], None
    for path in paths:
        name = str(path.relative_to(folder))
        if "_LATE_" in path.name:
            late.append(name)
        try:
            if path.is_symlink():
                raise ValueError("it is a link, and links are not followed")
            if path.stat().st_size > LARGEST_NOTEBOOK:
                raise ValueError(f"it has more than {LARGEST_NOTEBOOK:,} bytes")
            if path.suffix == ".py":
                own = path.read_text(encoding="utf-8")
                continue
            notebook = read_notebook(path)
            if not any(cell["cell_type"] == "code" for cell in notebook["cells"]):
                raise ValueError("it has no cell with code")
            notebooks[path] = notebook
        except (OSError, ValueError, RecursionError) as error:
            problems.append(f"{name}: {str(error).removeprefix(str(path)).strip()}")
    return Submission(student, notebooks, tuple(problems), tuple(late), own=own)


def cells_for(submission: Submission, wanted: Assigned) -> Cells | None:
    """A student's answer to an exercise, or the file of which it is a rung."""
    if wanted.exercise.startswith(OF_OWN):
        return None if submission.own is None else cells_of_own(submission.own)
    path = notebook_with(submission, wanted)
    return answer_in(submission.notebooks[path], wanted) if path else None


def notebook_with(submission: Submission, wanted: Assigned) -> Path | None:
    """Where a student's answer to an exercise is, first of notebooks that are called as the chapter is."""
    by_name = sorted(submission.notebooks, key=lambda path: wanted.chapter not in path.name)
    return next((path for path in by_name if answer_cell_in(submission.notebooks[path], wanted)), None)


# ------------------------------------------------------------------------------------- everybody graded


def grade_submissions(
    submissions: Sequence[Submission],
    assigned: Sequence[Assigned],
    *,
    seed: int,
    workers: int = 2,
    seconds: float = 120.0,
    kept: Path | None = None,
    progress: Callable[[str, str, Verdict], None] = lambda *_: None,
) -> list[Graded]:
    """Grade every exercise of everybody.

    Args:
        seed: of the hidden cases; 0 for none. Keep it: with another one the marks may be others.
        workers: processes that grade at the same time.
        seconds: for one exercise, times `patience()`; then it is ended, and has failed.
        kept: a file for verdicts, which is read first and then gets a line for each.
        progress: called with a student, an exercise and its verdict.
    Raises:
        RuntimeError: answers cannot be graded on this system.
    """
    verdicts: dict[tuple[str, str], Verdict] = {}
    seconds_of: dict[str, dict[str, float]] = {one.student: {} for one in submissions}
    known, jobs = _read_kept(kept), []
    for wanted in assigned:  # one exercise after the other: its room is made once for each worker
        for submission in submissions:
            cells = cells_for(submission, wanted)
            if cells is None:
                missing = Verdict("missing", _where_it_is_missing(submission, wanted))
                verdicts[submission.student, wanted.exercise] = missing
                continue
            job = Job(submission.student, wanted.exercise, cells, seed)
            if job.key in known:
                verdict, seconds_of[job.student][job.exercise] = known[job.key]
                verdicts[job.student, job.exercise] = verdict
            else:
                jobs.append(job)
    if jobs:
        for job, verdict, took in _verdicts(
            jobs, modules_of(assigned), min(workers, len(jobs)), seconds * patience()
        ):
            verdicts[job.student, job.exercise] = verdict
            seconds_of[job.student][job.exercise] = took
            if kept:
                with kept.open("a", encoding="utf-8") as file:
                    file.write(json.dumps([job.key, *verdict, took]) + "\n")
            progress(job.student, job.exercise, verdict)
    chapters = dict.fromkeys(
        each.exercise.partition(".")[0] for each in assigned if not each.exercise.startswith(OF_OWN)
    )
    asked = [question for chapter in chapters for question in predictions(chapter)]
    return [
        Graded(
            one,
            {each.exercise: verdicts[one.student, each.exercise] for each in assigned},
            points_of(one.notebooks.values(), asked),
            seconds_of[one.student],
        )
        for one in submissions
    ]


def _where_it_is_missing(submission: Submission, wanted: Assigned) -> str:
    if wanted.exercise.startswith(OF_OWN):
        return f"there is no {FILE} among what was handed in."
    where = "any of the notebooks" if submission.notebooks else "anything that was handed in"
    return f"no cell of {where} defines {wanted.function}."


def _read_kept(kept: Path | None) -> dict[str, tuple[Verdict, float]]:
    known = {}
    if kept and kept.is_file():
        for line in kept.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):  # the last one, if we were ended as we wrote it
                key, status, message, took = json.loads(line)
                if status in get_args(Status):
                    known[key] = Verdict(status, message), took
    return known


def _verdicts(
    jobs: Sequence[Job], modules: Sequence[str], workers: int, seconds: float
) -> Iterable[tuple[Job, Verdict, float]]:
    """Each job with its verdict and the seconds that it took, as they come."""
    waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[Job, Verdict, float] | BaseException] = queue.SimpleQueue()
    for job in jobs:
        waiting.put(job)
    stopping = threading.Event()
    with Nursery(modules) as nursery:
        if protections()["files"] and (open_ones := nursery.readable_originals()):
            raise RuntimeError(f"answers could read {', '.join(open_ones)}. No answer was graded.")

        def work() -> None:
            worker = _Worker(nursery.path)
            try:
                while not stopping.is_set():
                    try:
                        job = waiting.get_nowait()
                    except queue.Empty:
                        return
                    began = time.monotonic()
                    verdict = worker.judge(job, seconds)
                    done.put((job, verdict, round(time.monotonic() - began, 3)))
            except BaseException as error:
                done.put(error)
            finally:
                worker.end()

        threads = [threading.Thread(target=work, daemon=True) for _ in range(workers)]
        try:
            for thread in threads:
                thread.start()
            for _ in jobs:
                found = done.get()
                if isinstance(found, BaseException):
                    raise found
                yield found
        finally:
            stopping.set()
            for thread in threads:
                thread.join()


class _Worker:
    """The grader's process, in which exercises are graded one after another, started when there is one."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._process: subprocess.Popen[bytes] | None = None

    def judge(self, job: Job, seconds: float) -> Verdict:
        """The verdict, which bears a number that only this worker has been told."""
        nonce = secrets.token_hex(16)
        asked = {"nonce": nonce, "exercise": job.exercise, "cells": job.cells, "seed": job.seed}
        try:
            process = self._started(seconds)
            assert process.stdin is not None
            process.stdin.write(json.dumps(asked).encode() + b"\n")
            process.stdin.flush()
            said = self._line(process, nonce, time.monotonic() + seconds)
        except TimeoutError:  # an OSError too
            self.end()
            return Verdict("failed", f"it did not end within {seconds:g} s, and was ended.")
        except (OSError, EOFError):
            self.end()
            return Verdict("failed", "the check ended before it had a verdict.")
        return Verdict(*said)

    def _started(self, seconds: float) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", f"from {__name__} import _work; _work()", self.path],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
                start_new_session=True,
            )
            self._line(self._process, "ready", time.monotonic() + max(seconds, 300.0))
        return self._process

    def _line(self, process: subprocess.Popen[bytes], nonce: str, deadline: float) -> Any:
        """What the line says that begins with the nonce. Ranks and libraries may print others."""
        assert process.stdout is not None
        file, begun = process.stdout.fileno(), b""
        with selectors.DefaultSelector() as selector:
            selector.register(file, selectors.EVENT_READ)
            while selector.select(max(0.0, deadline - time.monotonic())):
                part = os.read(file, 2**16)
                if not part:
                    raise EOFError
                *lines, begun = (begun + part).split(b"\n")
                for line in lines:
                    if line.startswith(nonce.encode()):
                        return json.loads(line[len(nonce) :])
        raise TimeoutError

    def end(self) -> None:
        """End it, with the ranks that it has started."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                with contextlib.suppress(OSError):
                    pipe.close()
        self._process = None


def _work() -> None:
    """In a worker: judge what stdin asks for, a line for each, until it is closed."""
    nursery = Nursery.at(sys.argv[1])
    exercises()
    print("ready[]", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        setup, source, function, forbids, limits = asked["cells"]
        cells = Cells(tuple(setup), source, function, tuple(forbids), Limits(*limits))
        verdict = judge(nursery, asked["exercise"], cells, asked["seed"])
        print(asked["nonce"] + json.dumps(verdict), flush=True)


def counts(graded: Sequence[Graded]) -> Mapping[str, int]:
    """How many verdicts there are of each status."""
    statuses = [verdict.status for one in graded for verdict in one.verdicts.values()]
    return {status: statuses.count(status) for status in get_args(Status)}
