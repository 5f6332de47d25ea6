"""The commands on the page on several machines, run: two nodes on this machine, one rank each, on the CPU."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from library.running_page import slurm_script

from zero_ref.lab import ranks
from zero_ref.lab.config import GPTConfig, TrainConfig
from zero_ref.lab.train import train

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parents[2]
SMALL = " --steps 4 --batch-size 2 --layers 1 --heads 2 --width 16 --context 16"
JOB = TrainConfig(
    strategy="zero-bucket", steps=4, batch_size=2, model=GPTConfig(layers=1, heads=2, width=16, context=16)
)
# Both tasks of a job begin together, as srun has it, and the job fails if one does.
SRUN = """#!/bin/bash
pids=()
for ((task = 0; task < SLURM_NNODES; task++)); do SLURM_NODEID=$task "$@" & pids+=($!); done
for pid in "${pids[@]}"; do wait "$pid" || exit 1; done
"""
SCONTROL = """#!/bin/bash
[ "$*" = "show hostnames $SLURM_JOB_NODELIST" ] || exit 1
printf 'localhost\\nanother-node\\n'
"""


@pytest.fixture
def port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def small(script: str, port: int) -> str:
    """The script with one rank a node in place of eight, a free port, and a small model."""
    for old, new in (
        ("--nproc-per-node=8", "--nproc-per-node=1"),
        ("29500", str(port)),
        ("--strategy zero-bucket", "--strategy zero-bucket" + SMALL),
    ):
        assert script.count(old) == 1
        script = script.replace(old, new)
    return script


def environ(folder: Path, **more: str) -> dict[str, str]:
    programs = f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    quiet = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "ZERO_REF_DEVICE": "cpu"}
    return {**os.environ, **quiet, "PYTHONPATH": str(ROOT), "PATH": programs, **more}


def check(out: str, err: str) -> None:
    result = json.loads(out)
    assert (result["ranks"], result["calls_equal"]) == (2, True), err
    assert "1 rank: Gloo, on this machine's CPU" in err, "of each node"


def test_the_slurm_script_trains_on_two_nodes_as_ranks_of_one_do(tmp_path: Path, port: int) -> None:
    for name, source in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(source)
        (tmp_path / name).chmod(0o755)
    of_job = {"SLURM_NNODES": "2", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "localhost,another-node"}
    done = subprocess.run(
        ["bash", "-c", small(slurm_script(), port)],
        capture_output=True,
        text=True,
        timeout=600,
        env=environ(tmp_path, **of_job),
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    check(done.stdout, done.stderr)
    assert json.loads(done.stdout)["final_loss"] == ranks.run(train, 2, JOB)[0].held_out_loss
