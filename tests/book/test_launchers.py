"""The pages about running, as far as nothing has to be started for them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from library.running_page import BOOK, blocks, commands, slurm_script
from torch.distributed.run import get_args_parser

from zero_ref.cli import main, make_parser
from zero_ref.lab import train


def number_of(option: str, words: list[str]) -> str:
    return next(word.partition("=")[2] for word in words if word.startswith(f"--{option}="))


@pytest.mark.parametrize("script", blocks("bash"))
def test_bash_can_read_every_script(script: str) -> None:
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_torchrun_and_the_job_accept_every_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    lines = commands("torchrun")
    assert len(lines) == 4
    for words in lines:
        numbers = [word.replace("$SLURM_NNODES", "2") for word in words]
        arguments = get_args_parser().parse_args(numbers)
        assert (arguments.module, arguments.training_script) == (True, "zero_ref.lab.train")
        assert train.main(arguments.training_script_args) == 2
        assert "start this with torchrun" in capsys.readouterr().err, "it has read its options"


def test_zero_ref_accepts_every_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The one that shows settings is run, as later ones read its file."""
    monkeypatch.chdir(tmp_path)
    lines = commands("zero-ref")
    assert len(lines) >= 9
    for words in lines:
        make_parser()[0].parse_args(words)
        if "--show-config" in words:
            assert main(words) == 0
            Path("run.toml").write_text(capsys.readouterr().out)


def test_slurm_starts_one_task_a_node_and_a_rank_a_gpu() -> None:
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", slurm_script(), flags=re.M))
    assert asked["ntasks-per-node"] == "1"
    (words,) = [words for words in commands("torchrun") if "--nnodes=$SLURM_NNODES" in words]
    assert number_of("nproc-per-node", words) == asked["gpus-per-node"]
    assert re.fullmatch(r"\d\d:\d\d:\d\d", asked["time"])
    assert set(asked) == {"nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "time"}


def test_the_page_says_which_cuda_make_install_brings() -> None:
    text = "\n".join(blocks("bash"))
    (named,) = re.findall(r"brings CUDA (\d+)", text)
    locked = (BOOK.parent / "requirements" / "cuda.txt").read_text(encoding="utf-8")
    assert re.findall(r"^cuda-toolkit==(\d+)\.", locked, flags=re.M) == [named]
