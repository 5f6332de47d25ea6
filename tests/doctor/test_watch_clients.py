"""`watch` in training loops of others, under torchrun: the files that the doctor's page shows."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ranks, pytest.mark.thorough]
ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "book" / "watch"


def launched(source: str, folder: Path, *arguments: str) -> tuple[int, str]:
    """Run a program by torchrun on two ranks; its exit code, and what it printed."""
    (folder / "program.py").write_text(source, encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "program.py",
    ]
    started = subprocess.Popen(
        [*command, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        start_new_session=True,
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "OMP_NUM_THREADS": "1",
        }
        | {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"},
    )
    try:
        said, _ = started.communicate(timeout=900)
    finally:
        if started.poll() is None:
            os.killpg(started.pid, signal.SIGTERM)
            started.wait()
    return started.returncode, said


@pytest.mark.parametrize(
    ("name", "library", "arguments"),
    [
        ("trainer", "transformers", ()),
    ],
)
def test_a_right_loop_passes_and_another_plain_class_departs(
    name: str, library: str, arguments: tuple[str, ...], tmp_path: Path
) -> None:
    pytest.importorskip(library)
    source = (PROGRAMS / f"{name}.py").read_text(encoding="utf-8")
    code, said = launched(source, tmp_path, *arguments)
    assert code == 0, said
    assert "on each rank the shadow will hold" in said
    code, said = launched(
        source.replace("optimizer, model=", "optimizer, torch.optim.SGD, model="), tmp_path, *arguments
    )
    assert code == 1
    assert "step 0, step: parameter" in said, said
