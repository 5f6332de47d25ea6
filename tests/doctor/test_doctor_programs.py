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

WITHOUT = {"fairscale_oss": ("mixed dtypes",)}
"""OSS asserts that there is one dtype."""

OWN = ("ddp", "fsdp2", "plain_function", "torch_zero")

QUICK = ("plain", "accumulation", "clipping", "save and load", "another world size")


def test_every_program_is_tried() -> None:
    assert {path.stem for path in PROGRAMS.glob("*.py")} == {*LIBRARY, *OWN}


@pytest.mark.parametrize("name", ["torch_zero", pytest.param("fsdp2", marks=pytest.mark.thorough)])
def test_torchs_own_programs_are_healthy(name: str) -> None:
    report = doctor.diagnose(
        InFile(str(PROGRAMS / f"{name}.py"), "sharded"), **OPTIONS, ranks=(2,), only=QUICK, timeout=120
    )
    report.check()
    assert {trial for trial, _ in report.tried} == set(QUICK)


# Other libraries warn, of torch's newer names and of variables that torchrun would have set.
@pytest.mark.filterwarnings("default")
@pytest.mark.thorough
@pytest.mark.parametrize("name", sorted({*LIBRARY, *OWN}))
def test_each_program_is_healthy_in_all_that_it_can_do(name: str) -> None:
    if name in LIBRARY:
        pytest.importorskip(LIBRARY[name])
    factory = InFile(str(PROGRAMS / f"{name}.py"), "sharded")
    plain = {"reference": InFile(factory.path, "plain")} if name == "dion_muon" else OPTIONS
    report = doctor.diagnose(
        factory,
        **plain,
        ranks=(2, 3),
        without=WITHOUT.get(name, ()),
        timeout=300,
        fresh=name == "deepspeed_zero",
    )
    report.check()
    assert ("plain", 3) in report.tried


TEST = """import torch
from zero_ref import ZeroRedundancyOptimizer, doctor
def sharded(model):
    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=RATE)
def test_the_sharded_optimizer_trains_as_adamw() -> None:
    doctor.diagnose(sharded, from_plain=torch.optim.AdamW, options={"lr": 0.05}, only=["plain"]).check()
"""


@pytest.mark.parametrize(("rate", "says"), [("0.05", "1 passed"), ("0.06", "departs in step 0")])
def test_a_repository_of_one_test_passes_or_says_where_it_departs(
    tmp_path: Path, rate: str, says: str
) -> None:
    (tmp_path / "test_it.py").write_text(TEST.replace("RATE", rate), "utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert says in done.stdout, done.stdout + done.stderr
    assert done.returncode == (0 if says == "1 passed" else 1)
