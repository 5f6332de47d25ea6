"""The programs that the page on the doctor shows: each library's optimizer is held against the plain loop."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from zero_ref import doctor
from zero_ref.doctor.files import InFile

pytestmark = pytest.mark.ranks

PROGRAMS = Path(__file__).parents[2] / "book" / "doctor"
OPTIONS = {"from_plain": torch.optim.AdamW, "options": {"lr": 0.05}}

LIBRARY = {
    "accelerate_zero": "accelerate",
    "deepspeed_zero": "deepspeed",
    "dion_muon": "dion",
    "fairscale_oss": "fairscale",
    "lightning_fabric": "lightning",
}

DEPARTS = {"fairscale_oss": [("all together", "clip")]}
"""OSS keeps the list of parameters that it clips. A layer that is unfrozen later is not in its norm."""

OWN = ("ddp", "fsdp2", "plain_function", "torch_zero")

QUICK = ("plain", "accumulation", "clipping", "save and load", "another world size")


def test_every_program_is_tried() -> None:
    assert {path.stem for path in PROGRAMS.glob("*.py")} == {*LIBRARY, *OWN}


def test_torchs_own_class_is_healthy() -> None:
    report = doctor.diagnose(
        InFile(str(PROGRAMS / "torch_zero.py"), "sharded"), **OPTIONS, ranks=(2,), only=QUICK, timeout=120
    )
    report.check()
    assert {trial for trial, _ in report.tried} == set(QUICK)


# Other libraries warn, of torch's newer names and of variables that torchrun would have set.
@pytest.mark.filterwarnings("default")
@pytest.mark.thorough
@pytest.mark.parametrize("name", sorted({*LIBRARY, *OWN}))
def test_each_program_is_healthy_but_for_what_the_page_says(name: str) -> None:
    if name in LIBRARY:
        pytest.importorskip(LIBRARY[name])
    factory = InFile(str(PROGRAMS / f"{name}.py"), "sharded")
    plain = {"reference": InFile(factory.path, "plain")} if name == "dion_muon" else OPTIONS
    # What torch's own classes can do is tried in course/test_museum_ranks.py.
    trials = {"only": QUICK} if name in OWN else {}
    report = doctor.diagnose(
        factory,
        **plain,
        **trials,
        ranks=(3,),
        timeout=300,
        fresh=name == "deepspeed_zero",
    )
    assert [(one.trial, one.phase) for one in report.departures] == DEPARTS.get(name, []), str(report)
    assert not report.raised, str(report)
    assert ("plain", 3) in report.tried


TESTS = """import torch
from zero_ref import ZeroRedundancyOptimizer, doctor
def sharded(model):
    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.05)
def check(lr):
    plain = {"from_plain": torch.optim.AdamW, "options": {"lr": lr}}
    doctor.diagnose(sharded, **plain, ranks=(2,), only=["plain"]).check()
def test_it_trains_as_adamw() -> None:
    check(0.05)
def test_it_trains_as_adamw_with_another_rate() -> None:
    check(0.06)
"""


def test_in_a_repository_of_its_own_a_test_passes_or_says_where_it_departs(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS, "utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "FAILED test_it.py::test_it_trains_as_adamw_with_another_rate" in done.stdout
    assert "departs in step 0" in done.stdout
