"""`zero-ref checkpoints`: what it lists, and what it finds damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from zero_ref import cli
from zero_ref.cli import checkpoints
from zero_ref.comm.collectives import Collectives
from zero_ref.files.saves import MARK, sealed
from zero_ref.files.sharded import save_sharded
from zero_ref.lab import virtual
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Two saves of two ranks."""

    def on_rank(comm: Collectives) -> None:
        params = [torch.nn.Parameter(torch.ones(300)) for _ in range(2)]
        optimizer = ZeroRedundancyOptimizer(params, torch.optim.SGD, comm, lr=0.1)
        for iteration in (10, 20):
            save_sharded(optimizer, tmp_path, notes={"iteration": iteration})

    virtual.run(on_rank, 2, timeout=120)
    return tmp_path


def asked(capsys: pytest.CaptureFixture[str], directory: Path, *words: str) -> tuple[int, str]:
    code = cli.main(["checkpoints", str(directory), *words])
    return code, capsys.readouterr().out


def as_json(
    capsys: pytest.CaptureFixture[str], directory: Path, *words: str
) -> tuple[int, list[dict[str, Any]]]:
    code, printed = asked(capsys, directory, *words, "--json")
    return code, json.loads(printed)


def test_a_line_for_each_save(capsys: pytest.CaptureFixture[str], directory: Path) -> None:
    code, printed = asked(capsys, directory)
    assert code == 0
    for line, number in zip(printed.splitlines(), (1, 2), strict=True):
        assert line.startswith(f"save-0000000{number}  20")
        assert line.endswith(f'2 ranks         0.0 MB  complete  {{"iteration": {number}0}}')
    code, saves = as_json(capsys, directory, "--verify")
    assert code == 0
    for save in saves:
        assert (save["ranks"], save["state"], save["problems"]) == (2, "verified", [])
        folder = directory / save["save"]
        assert save["nbytes"] == sum(path.stat().st_size for path in folder.iterdir()) > 2400


def test_damaged_data_is_found_by_verifying_and_damaged_tables_and_marks_without(
    capsys: pytest.CaptureFixture[str], directory: Path
) -> None:
    newest = directory / "save-00000002"
    path = newest / "shard-1-of-2.bin"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert asked(capsys, directory)[0] == 0
    code, printed = asked(capsys, directory, "--verify")
    assert code == 1
    first, second, problem = printed.splitlines()
    assert "verified" in first
    assert "DAMAGED" in second
    assert f"{path} is damaged: parameters.1, elements [0, 300), is not what rank 1 wrote there" in problem
    for name, text in (("shard-0-of-2.json", "do not have the SHA-256"), (MARK, "do not have the SHA-256")):
        table = newest / name
        original = table.read_bytes()
        table.write_bytes(original.replace(b"format", b"FORMAT"))
        code, [_, save] = as_json(capsys, directory)
        assert (code, save["state"], save["notes"]) == (1, "DAMAGED", None)
        assert name in save["problems"][0]
        assert text in save["problems"][0]
        table.write_bytes(original)


def test_what_a_folder_says_is_printed_and_does_not_reach_the_terminal_as_commands(
    capsys: pytest.CaptureFixture[str], directory: Path
) -> None:
    hostile = "\x1b]0;owned\x07\x1b[2J"
    path = directory / "save-00000001" / MARK
    mark = json.loads(path.read_text())
    del mark["sha256"]
    path.write_bytes(sealed({**mark, "began": hostile}))
    (directory / "save-00000002" / MARK).unlink()
    renamed = directory.rename(directory.with_name("saves\x9b2J\n\x1b[2J"))
    code, printed = asked(capsys, renamed)
    assert code == 1
    first, _, problem = printed.splitlines()
    assert first.startswith(r"save-00000001  \x1b]0;owned\x07\x1b[2J")
    assert problem.strip().startswith(
        rf"{directory.parent}/saves\x9b2J\n\x1b[2J/save-00000002 has no save.json"
    )
    (renamed / "empty").mkdir()
    assert asked(capsys, renamed / "empty")[1] == (
        rf"{directory.parent}/saves\x9b2J\n\x1b[2J/empty holds no sharded checkpoint." + "\n"
    )


def test_an_error_keeps_its_lines_and_does_not_reach_the_terminal_as_commands(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(checkpoints, "listed", Mock(side_effect=OSError("a file \x1b[2J\nof two lines")))
    assert cli.main(["checkpoints", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "zero-ref checkpoints: a file \\x1b[2J\nof two lines\n"


def test_an_interrupted_save_is_incomplete_and_no_damage(
    capsys: pytest.CaptureFixture[str], directory: Path
) -> None:
    (directory / "save-00000002" / "shard-1-of-2.json").unlink()
    code, saves = as_json(capsys, directory, "--verify")
    assert code == 0
    assert [save["state"] for save in saves] == ["verified", "incomplete: lacks shard-1-of-2.json"]
    (directory / "save-00000001" / "shard-0-of-2.json").unlink()
    assert asked(capsys, directory)[0] == 1, "none is complete"


def test_where_there_is_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert asked(capsys, tmp_path) == (1, f"{tmp_path} holds no sharded checkpoint.\n")
    assert cli.main(["checkpoints", str(tmp_path / "nowhere")]) == 2
    assert capsys.readouterr().err == f"zero-ref checkpoints: {tmp_path}/nowhere is no folder.\n"
    assert cli.main(["checkpoints", "x" * 300]) == 2, "no folder can be called so"
    assert capsys.readouterr().err.endswith(" is no folder.\n")
