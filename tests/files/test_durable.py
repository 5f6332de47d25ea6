"""Saved files survive a loss of power: each file and each folder that lists it is synced."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import torch
from torch import nn, optim

from zero_ref.comm.collectives import Collectives
from zero_ref.files import durable
from zero_ref.files.durable import make_directory, open_regular, read_regular, replacing
from zero_ref.files.sharded import save_sharded
from zero_ref.lab import checkpoints, virtual
from zero_ref.lab.config import GPTConfig, TrainConfig
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool, list[str]]]:
    """Each thing synced: its path, whether it is a folder, and if so the names that were in it then."""
    log: list[tuple[str, bool, list[str]]] = []
    fsync = os.fsync
    paths: dict[int, str] = {}
    opened = os.open

    def remembered(path: str, *args: int, **kwargs: int) -> int:
        descriptor = opened(path, *args, **kwargs)
        paths[os.fstat(descriptor).st_ino] = str(path)
        return descriptor

    def logged(descriptor: int) -> None:
        status = os.fstat(descriptor)
        is_folder = stat.S_ISDIR(status.st_mode)
        path = paths[status.st_ino] if is_folder else ""
        log.append((path, is_folder, sorted(os.listdir(path)) if is_folder else []))
        fsync(descriptor)

    monkeypatch.setattr(durable.os, "open", remembered)
    monkeypatch.setattr(durable.os, "fsync", logged)
    return log


def test_a_new_directory_is_listed_durably_up_to_the_one_that_existed(
    tmp_path: Path, synced: list[tuple[str, bool, list[str]]]
) -> None:
    make_directory(tmp_path / "a" / "b" / "c")
    listed = {path: names for path, _, names in synced}
    assert listed == {f"{tmp_path}/a/b": ["c"], f"{tmp_path}/a": ["b"], str(tmp_path): ["a"]}
    synced.clear()
    make_directory(tmp_path / "a" / "b" / "c")
    assert synced == [], "nothing is new"


def test_a_replaced_file_is_synced_before_it_gets_its_name_and_its_folder_after(
    tmp_path: Path, synced: list[tuple[str, bool, list[str]]]
) -> None:
    path = tmp_path / "file"
    for text in (b"one", b"two"):
        synced.clear()
        with replacing(path) as file:
            file.write(text)
            assert not path.exists() or path.read_bytes() == b"one"
        assert path.read_bytes() == text
        assert synced == [("", False, []), (str(tmp_path), True, ["file"])]


def test_an_interrupted_replacement_leaves_the_file_before_and_the_next_one_succeeds(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("before")

    def interrupted() -> None:
        with replacing(path) as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_text() == "before"
    with replacing(path) as file:
        file.write(b"after")
    assert path.read_text() == "after"
    assert os.listdir(tmp_path) == ["file"]


def folders_in(synced: list[tuple[str, bool, list[str]]]) -> dict[str, list[str]]:
    """Return the names in each folder when it was synced last."""
    return {path: names for path, is_folder, names in synced if is_folder}


def test_a_sharded_save_is_listed_durably_from_its_tables_up_to_the_directory_that_existed(
    tmp_path: Path, synced: list[tuple[str, bool, list[str]]]
) -> None:
    def on_rank(comm: Collectives) -> None:
        optimizer = ZeroRedundancyOptimizer([nn.Parameter(torch.ones(4))], optim.SGD, comm, lr=0.1)
        save_sharded(optimizer, tmp_path / "a" / "b")

    virtual.run(on_rank, 1)
    assert folders_in(synced) == {
        str(tmp_path): ["a"],
        f"{tmp_path}/a": ["b"],
        f"{tmp_path}/a/b": ["owner.json", "save-00000001"],
        f"{tmp_path}/a/b/save-00000001": ["save.json", "shard-0-of-1.bin", "shard-0-of-1.json"],
    }
    assert [is_folder for _, is_folder, _ in synced].count(False) == 4, "owner, mark, data, table"


def test_the_single_file_of_the_main_job_is_durable_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, synced: list[tuple[str, bool, list[str]]]
) -> None:
    monkeypatch.setattr(checkpoints.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(checkpoints, "as_collectives", lambda _: None)
    monkeypatch.setattr(checkpoints.Agreement, "agree", lambda *args: said.append(args[2]))
    said: list[object] = []
    config = TrainConfig(
        model=GPTConfig(layers=1, heads=1, width=8, context=8), checkpoint=str(tmp_path / "a" / "run.pt")
    )
    model = checkpoints.GPT(config.model)
    checkpoints.save_checkpoint(config, model, optim.SGD(model.parameters()), 7)
    assert said == [[]], "no error"
    assert synced == [
        (str(tmp_path), True, ["a"]),
        ("", False, []),
        (f"{tmp_path}/a", True, ["run.pt"]),
    ]
    assert checkpoints.read_checkpoint(str(config.checkpoint))["step"] == 7


@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_only_regular_files_are_opened(tmp_path: Path, kind: str) -> None:
    path = tmp_path / kind
    path.mkdir() if kind == "folder" else os.mkfifo(path)
    for read in (open_regular, lambda path: read_regular(path, 10)):
        with pytest.raises(ValueError, match=rf"{kind} is no regular file"):
            read(path)


def test_a_file_is_read_up_to_its_limit_and_no_larger_one(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    assert read_regular(path, 10) == b"0123456789"
    with pytest.raises(ValueError, match="file has 10 bytes; at most 9 were expected"):
        read_regular(path, 9)
