"""The wheel of the package, in a fresh environment that has torch and what torch needs, and nothing else."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import venv
from importlib.metadata import distribution
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.ranks, pytest.mark.thorough]

TRAIN = """
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from zero_ref import ZeroRedundancyOptimizer

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
ddp = DistributedDataParallel(model)
zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, partition="even")
before = model.weight.detach().clone()
for _ in range(3):
    zero.zero_grad()
    ddp(torch.ones(2, 8)).square().mean().backward()
    zero.step()
zero.consolidate_state_dict(to=0)
moved = not torch.equal(before, model.weight)
os.write(1, f"rank {dist.get_rank()}: moved {moved}\\n".encode())  # whole, beside the other rank's
dist.barrier()
dist.destroy_process_group()
"""


def needed_by(name: str, found: set[str]) -> set[str]:
    """A distribution and what it needs without an extra, as far as it is installed here."""
    if name not in found:
        found.add(name)
        for line in distribution(name).requires or ():
            required = re.match(r"[\w.-]+", line)
            if required and "extra ==" not in line:
                try:
                    needed_by(required[0].lower(), found)
                except ModuleNotFoundError:  # of another platform or Python
                    found.discard(required[0].lower())
    return found


def link(name: str, site: Path) -> None:
    """Put what a distribution installed into another environment, by links."""
    installed = distribution(name)
    tops = {file.parts[0] for file in installed.files or ()}
    for top in tops - {"..", "__pycache__"}:
        if not (site / top).exists():
            (site / top).symlink_to(Path(str(installed.locate_file(top))))


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the programs of an environment with the wheel."""
    wheels, environment = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("fresh")
    source = tmp_path_factory.mktemp("source")  # a build writes beside its sources
    shutil.copytree(ROOT / "zero_ref", source / "zero_ref", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "LICENSE-docs"):
        shutil.copy(ROOT / name, source)
    build = ["pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", wheels, source]
    subprocess.run([sys.executable, "-m", *build], check=True, timeout=600)
    (wheel,) = wheels.glob("zero_ref-*.whl")
    venv.create(environment, with_pip=True)
    (site,) = environment.glob("lib/python*/site-packages")
    for name in needed_by("torch", set()):
        link(name, site)
    programs = environment / "bin"
    # What it needs is there already. With anything else missing, pip would fail: it has no index.
    run(programs / "python", "-m", "pip", "install", "--no-index", wheel, cwd=environment)
    return programs


def run(*words: str | Path, cwd: Path, code: int = 0) -> str:
    """Run a program that sees nothing of the test's clone, and return the text that it prints."""
    ended = subprocess.run(
        words, cwd=cwd, capture_output=True, text=True, timeout=600, env={"PATH": "/usr/bin:/bin"}
    )
    assert ended.returncode == code, ended.stderr
    return ended.stdout + ended.stderr


def test_it_simulates(fresh: Path, tmp_path: Path) -> None:
    words = ["--model", "gpt2", "--ranks", "4", "--cluster", "h100-ib", "--strategy", "zero-2", "--json"]
    answer = json.loads(run(fresh / "zero-ref", "simulate", *words, cwd=tmp_path))
    assert list(answer["strategies"]) == ["zero-2"]


def test_it_trains_on_two_ranks(fresh: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    printed = run(
        *(fresh / "python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py"),
        cwd=tmp_path,
    )
    assert sorted(re.findall(r"rank \d: moved \w+", printed)) == ["rank 0: moved True", "rank 1: moved True"]


def test_it_has_neither_the_course_nor_the_benchmarks(fresh: Path, tmp_path: Path) -> None:
    for name in ("zero_ref_course", "benchmarks", "tests"):
        printed = run(fresh / "python", "-c", f"import {name}", cwd=tmp_path, code=1)
        assert f"No module named '{name}'" in printed
    assert "zero_ref_course" in run(fresh / "zero-ref", "check", "my_zero.py", cwd=tmp_path, code=2)
