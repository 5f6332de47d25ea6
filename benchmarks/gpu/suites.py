"""Tests and notebooks on an accelerator, run by pytest in a process of its own.

ZERO_REF_DEVICE and ZERO_REF_BACKEND tell `lab.ranks` where the ranks' tensors are and what sends them, so the
tests are those that run on the CPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import torch

from benchmarks.gpu.budget import Budget, Found
from zero_ref.comm import devices

ROOT = Path(__file__).parents[2]

FILES = tuple(
    f"tests/ranks/test_{name}.py"
    for name in (
        *("equal_shares", "parity", "ddp_buckets", "reduction", "clip_ranks"),
        *("stage_3", "checkpoint_ranks", "repartition_ranks", "sharded_ranks"),
    )
)
"""The parts of a step, checkpoints, and trainings against DDP and the plain optimizer, most at 2 and 4 ranks.
They take three minutes on two cores.

Left out are tests of processes, RPC, other users and time-outs, which do not depend on the device, and tests
that take long: Join, local SGD, all of the overlapped ways.
"""

ONE_RANK = (
    "tests/ranks/test_equal_shares.py::test_every_way_gathers_shares_and_adds_them_up[1]",
    "tests/ranks/test_parity.py::test_five_optimizers_in_every_mode_equal_torchs_class_and_the_plain_optimizer[1]",
    "tests/ranks/test_reduction.py::test_training_equals_ddp_and_the_plain_optimizer[1]",
    "tests/ranks/test_checkpoint_ranks.py::test_state_of_every_dtype_arrives[1]",
    "tests/ranks/test_overlap.py::test_masters_equal_a_loop_that_keeps_them_whole[AdamW-1]",
    "tests/ranks/test_overlap.py::test_a_single_rank_and_ranks_that_own_nothing[1]",
)
"""Tests of a single rank, which NCCL takes on a single GPU."""

CHOSEN_BY_RANKS = {"ZERO_REF_DEVICE": "", "ZERO_REF_BACKEND": ""}
"""For notebooks: `lab.placement` chooses by itself, and what a cell puts on the CPU stays there."""

NOTEBOOKS = tuple(
    f"notebooks/{name}.ipynb" for name in ("01_ledger", "04_step", "05_buckets", "11_clipping", "13_matrices")
)


class PytestRun(NamedTuple):
    """One run of pytest.

    Args:
        what: in words.
        tests: files, or single tests.
        environ: variables beside those of this process.
    """

    what: str
    tests: tuple[str, ...]
    environ: dict[str, str]
    options: tuple[str, ...] = ()


class NotAllPassed(Exception):
    """Some tests did not pass; `found` has all that was run."""

    def __init__(self, message: str, found: Found) -> None:
        super().__init__(message)
        self.found = found


def runs_on(device: torch.device, count: int) -> list[PytestRun]:
    """The runs of the tests on so many accelerators of this kind.

    >>> [run.what for run in runs_on(torch.device("cpu"), 2)]
    ['gloo, one rank', 'Gloo, ranks that share one cpu', 'gloo, 2 ranks on 2 of kind cpu']
    """
    kind, backend = device.type, devices.backend_of(device)
    one = kind if device.index is None else f"{kind}:{device.index}"
    everywhere = {"ZERO_REF_DEVICE": kind, "ZERO_REF_BACKEND": ""}
    runs = [
        PytestRun(f"{backend}, one rank", ONE_RANK, {**everywhere, "ZERO_REF_BACKEND": backend}),
        PytestRun(
            f"Gloo, ranks that share one {kind}",
            FILES,
            {"ZERO_REF_DEVICE": one, "ZERO_REF_BACKEND": "gloo"},
        ),
    ]
    if count > 1:  # tests of more ranks than that share the accelerators, by Gloo
        what = f"{backend}, {'2 ranks' if count < 4 else '2 and 4 ranks'} on {count} of kind {kind}"
        runs.append(PytestRun(what, FILES, everywhere))
    return runs


def on_ranks(
    device: torch.device, budget: Budget, *, runs: Sequence[PytestRun] | None = None, root: Path = ROOT
) -> Found:
    """The tests on real ranks, on the device: see `runs_on`.

    Raises:
        NotAllPassed: a test failed, or a run did not end in time.
    """
    planned = runs_on(device, devices.accelerator_count()) if runs is None else runs
    return _all_passed([_pytest(run, budget, root) for run in planned])


def notebooks(
    device: torch.device, budget: Budget, *, files: Sequence[str] = NOTEBOOKS, root: Path = ROOT
) -> Found:
    """Some chapters from top to bottom, whose ranks take the accelerators by themselves.

    Raises: as `on_ranks`.
    """
    options = ("--nbval-lax", "--nbval-current-env", "--nbval-cell-timeout=300")
    run = PytestRun("notebooks", tuple(files), CHOSEN_BY_RANKS, options)
    return _all_passed([_pytest(run, budget, root)])


def _pytest(run: PytestRun, budget: Budget, root: Path) -> Found:
    """How a run went. It ends with the budget, and nothing is known then of the tests it has made."""
    if budget.over:
        return {"what": run.what, "left_out": "no time was left"}
    began = time.monotonic()
    parallel = ["-n", "4", "--dist", "loadfile"] if len(run.tests) > 1 else []
    with tempfile.TemporaryDirectory(prefix="zero_ref-gpu-") as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        try:
            done = subprocess.run(
                [*command, *parallel, *run.options, *run.tests],
                cwd=root,
                env={**os.environ, **run.environ},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=budget.left_s,
            )
            outcome = _outcome_in(report, done.returncode, done.stdout)
        except subprocess.TimeoutExpired:
            outcome = {"error": "it did not end in the time that was left"}
    # The variables are in the report: with them anybody can run the same alone.
    about = {"what": run.what, "environ": run.environ, "tests": list(run.tests)}
    return {**about, "seconds": round(time.monotonic() - began, 1), **outcome}


def _outcome_in(report: Path, code: int, output: str) -> dict[str, Any]:
    if not report.is_file() or code not in (0, 1):  # 0: all passed; 1: some failed
        last = [line for line in output.splitlines() if line.strip()][-3:]
        return {"error": f"pytest ended with code {code}: {' / '.join(last)}"}
    passed, failed, skipped = 0, dict[str, str](), list[str]()
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        problem = next((part for part in case if part.tag in ("failure", "error")), None)
        left = case.find("skipped")
        if problem is not None:
            failed[name] = (problem.get("message") or "").split("\n")[0][:300]
        elif left is not None:
            skipped.append(f"{name}: {left.get('message')}")
        else:
            passed += 1
    return {"passed": passed, "failed": failed, "skipped": skipped}


def _all_passed(runs: list[Found]) -> Found:
    found: Found = {"runs": runs}
    problems = [f"{run['what']}: {run['error']}" for run in runs if "error" in run]
    problems += [f"{run['what']}: {len(run['failed'])} tests failed" for run in runs if run.get("failed")]
    if problems:
        raise NotAllPassed("; ".join(problems), found)
    return found
