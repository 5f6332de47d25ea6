"""Flat tensors in files: written in any pieces, read in any others; nothing that lies there is executed."""

from __future__ import annotations

import errno
import itertools
import json
import os
import pickle
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings, strategies as st

from zero_ref import shard_files
from zero_ref.shard_files import (
    FlatSlices,
    ShardReader,
    ShardWriter,
    make_folder,
    missing_tables,
    newest_complete,
    read_tables,
    remove_older,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.int64, torch.int16]
DTYPES += [torch.uint8, torch.bool, torch.float8_e4m3fn]


def numbers(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Distinct values as far as the dtype has them."""
    return torch.arange(1, numel + 1).to(dtype)


def cut(tensor: torch.Tensor, ends: list[int]) -> dict[int, torch.Tensor]:
    return {start: tensor[start:stop] for start, stop in itertools.pairwise([0, *ends, len(tensor)])}


def write(folder: Path, shards: list[Mapping[str, FlatSlices]], contents: Any = None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for rank, tensors in enumerate(shards):
        ShardWriter(folder, rank, len(shards), contents).save(tensors)


def read(folder: Path, wanted: Mapping[str, FlatSlices]) -> None:
    reader = ShardReader(folder)
    reader.load(wanted, reader.read_metadata())


def two_ranks(folder: Path) -> Path:
    """A save of "a", which rank 0 has the first 6 of 10 elements of, and "b", which is rank 1's."""
    a, b = numbers(10, torch.float32), numbers(3, torch.int64)
    write(
        folder,
        [{"a": FlatSlices({0: a[:6]}, 10)}, {"a": FlatSlices({6: a[6:]}, 10), "b": FlatSlices({0: b}, 3)}],
    )
    return folder


# ------------------------------------------------------------------------------------------ out and in again


def test_a_data_file_is_the_tensors_end_to_end_and_a_table_says_where(tmp_path: Path) -> None:
    two_ranks(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [
        f"shard-{rank}-of-2.{kind}" for rank in (0, 1) for kind in ("bin", "json")
    ]
    table = json.loads((tmp_path / "shard-1-of-2.json").read_text())
    assert table["tensors"] == {
        "a": {"dtype": "float32", "numel": 10, "pieces": [[6, 4, 0]]},
        "b": {"dtype": "int64", "numel": 3, "pieces": [[0, 3, 16]]},
    }
    data = (tmp_path / "shard-1-of-2.bin").read_bytes()
    assert torch.frombuffer(bytearray(data[:16]), dtype=torch.float32).tolist() == [7, 8, 9, 10]
    assert torch.frombuffer(bytearray(data[16:]), dtype=torch.int64).tolist() == [1, 2, 3]


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(DTYPES),
    st.lists(st.integers(1, 29), max_size=5, unique=True).map(sorted),
    st.lists(st.integers(1, 29), max_size=5, unique=True).map(sorted),
    st.integers(1, 3),
    st.integers(1, 3),
)
def test_what_is_written_in_any_pieces_is_read_in_any_others(
    tmp_path_factory: pytest.TempPathFactory,
    dtype: torch.dtype,
    saved: list[int],
    wanted: list[int],
    writers: int,
    readers: int,
) -> None:
    tensor = numbers(30, dtype)
    folder = tmp_path_factory.mktemp("save")
    pieces = list(cut(tensor, saved).items())
    shards = [dict(pieces[rank::writers]) for rank in range(writers)]
    write(folder, [{"t": FlatSlices(shard, 30)} if shard else {} for shard in shards])
    places = list(cut(torch.zeros(30, dtype=dtype), wanted).items())
    for rank in range(readers):
        mine = dict(places[rank::readers])
        if mine:
            read(folder, {"t": FlatSlices(mine, 30)})
    for start, place in places:
        same = place.view(torch.uint8).equal(tensor[start : start + len(place)].view(torch.uint8))
        assert same, f"elements from {start} on"
    shutil.rmtree(folder)


class CountingFile:
    """Stands in for a file opened to be read, and counts."""

    def __init__(self, path: Any, log: dict[str, int]) -> None:
        self.file, self.log, self.name = path.open("rb", buffering=0), log, path.name
        log.setdefault(self.name, 0)

    def __enter__(self) -> CountingFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def seek(self, offset: int) -> None:
        self.file.seek(offset)

    def readinto(self, memory: memoryview) -> int:
        count = self.file.readinto(memory[:7])  # short reads are allowed
        self.log[self.name] += count
        return count


def test_exactly_the_bytes_asked_for_are_read_and_no_other_file_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_ranks(tmp_path)
    reader = ShardReader(tmp_path)
    read_of_file: dict[str, int] = {}
    monkeypatch.setattr(
        shard_files, "open", lambda path, *_, **__: CountingFile(path, read_of_file), raising=False
    )
    middle = torch.zeros(3)
    reader.load({"a": FlatSlices({4: middle}, 10)}, reader.read_metadata())
    assert middle.tolist() == [5, 6, 7]
    assert read_of_file == {"shard-0-of-2.bin": 8, "shard-1-of-2.bin": 4}
    read_of_file.clear()
    reader.load({"a": FlatSlices({0: torch.zeros(6)}, 10)}, reader.read_metadata())
    assert read_of_file == {"shard-0-of-2.bin": 24}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_dcp_loads_whole_tensors_from_the_files_by_itself(tmp_path: Path) -> None:
    two_ranks(tmp_path)
    wanted = {"a": torch.zeros(10, dtype=torch.float64), "b": torch.zeros(3, dtype=torch.int64)}
    dcp.load(wanted, storage_reader=ShardReader(tmp_path), no_dist=True)
    assert wanted["a"].tolist() == list(range(1, 11))
    assert wanted["b"].tolist() == [1, 2, 3]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_flat_slices_are_saved_and_loaded_by_dcps_own_files_too(tmp_path: Path) -> None:
    tensor = numbers(10, torch.float32)
    dcp.save({"t": FlatSlices(cut(tensor, [3, 4]), 10)}, checkpoint_id=tmp_path, no_dist=True)
    places = cut(torch.zeros(10), [7])
    dcp.load({"t": FlatSlices(places, 10)}, checkpoint_id=tmp_path, no_dist=True)
    assert torch.cat(list(places.values())).equal(tensor)


def test_flat_slices_have_a_size_but_no_values() -> None:
    slices = FlatSlices({4: torch.ones(2), 8: torch.ones(1)}, 10)
    assert slices.size() == (10,)
    assert slices.dtype == torch.float32
    assert repr(slices) == "FlatSlices([4, 6), [8, 9) of 10)"
    with pytest.raises(NotImplementedError, match="only a part is here"):
        slices + 1


# ----------------------------------------------------------------------------------------------- the folders


def test_saves_are_numbered_on_and_a_number_is_not_given_twice(tmp_path: Path) -> None:
    first = make_folder(tmp_path / "new" / "directory")
    two_ranks(first)
    interrupted = make_folder(first.parent)
    assert (first.name, interrupted.name) == ("save-00000001", "save-00000002")
    assert newest_complete(first.parent) == first
    third = make_folder(first.parent)
    assert third.name == "save-00000003"
    assert sorted(os.listdir(first.parent)) == ["save-00000001", "save-00000003"], (
        "the interrupted one is gone"
    )


def test_a_new_save_keeps_the_newest_complete_one_and_what_is_no_save(tmp_path: Path) -> None:
    for number in (3, 9, 10):
        two_ranks(tmp_path / f"save-{number:08d}")
    (tmp_path / "save-00000010" / "shard-0-of-2.json").unlink()
    (tmp_path / "save-notes").mkdir()
    (tmp_path / "save-00000001").write_text("a file")
    assert newest_complete(tmp_path).name == "save-00000009"
    assert make_folder(tmp_path).name == "save-00000011"
    left = ["save-00000001", "save-00000009", "save-00000011", "save-notes"]
    assert sorted(os.listdir(tmp_path)) == left
    remove_older(tmp_path / "save-00000011")
    assert sorted(os.listdir(tmp_path)) == ["save-00000001", "save-00000011", "save-notes"]


def test_a_save_is_complete_when_all_ranks_have_their_table(tmp_path: Path) -> None:
    two_ranks(tmp_path)
    assert missing_tables(tmp_path) == []
    (tmp_path / "shard-1-of-2.json").rename(tmp_path / "shard-1-of-2.tmp")
    assert missing_tables(tmp_path) == ["shard-1-of-2.json"]
    (tmp_path / "shard-0-of-2.json").unlink()
    assert missing_tables(tmp_path) == ["all of its tables"]


def test_where_there_is_no_complete_save_the_error_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere holds no complete sharded checkpoint"):
        newest_complete(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="holds no complete sharded checkpoint"):
        newest_complete(tmp_path)
    (two_ranks(tmp_path / "save-00000001") / "shard-1-of-2.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"the newest save lacks shard-1-of-2\.json"):
        newest_complete(tmp_path)


class Interrupted(Exception):
    """A process that ends here."""


def test_an_interruption_at_any_write_leaves_the_save_incomplete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the calls that reach the disk is the last one once."""
    reached: list[str] = []
    for stop_at in range(100):
        calls = itertools.count()
        folder = tmp_path / f"save-{stop_at + 1:08d}"

        def perhaps(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
            def called(*args: Any, **kwargs: Any) -> Any:
                if next(calls) == stop_at:  # noqa: B023
                    reached.append(name)
                    raise Interrupted
                return original(*args, **kwargs)

            return called

        with monkeypatch.context() as patch:
            patch.setattr(shard_files, "open", perhaps("open", open), raising=False)
            patch.setattr(shard_files.os, "fsync", perhaps("fsync", os.fsync))
            patch.setattr(Path, "replace", perhaps("replace", Path.replace))
            try:
                two_ranks(folder)
            except Interrupted:
                # The last rank's last call makes the new name itself safe from a loss of power.
                if missing_tables(folder):
                    continue
                assert reached[-1] == "fsync"
            else:
                break
    one_rank = ["open", "fsync", "open", "fsync", "replace", "fsync"]
    assert reached == 2 * one_rank
    read(folder, {"a": FlatSlices({0: torch.zeros(10)}, 10)})


def test_a_full_disk_is_reported_with_the_name_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shard_files.os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: .*shard-0-of-2\.bin"):
        two_ranks(tmp_path)


# ------------------------------------------------------------------------------- files not to be believed


class Exploding:
    """Unpickled, it leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def test_pickles_in_the_place_of_files_are_not_executed(tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    hostile = pickle.dumps(Exploding(mark))
    with pytest.raises(FileNotFoundError):
        (pickle.loads(hostile), (mark / "not there").stat())
    assert mark.exists(), "the pickle does what it should not"
    mark.rmdir()

    folder = two_ranks(tmp_path / "data")
    size = (folder / "shard-0-of-2.bin").stat().st_size
    (folder / "shard-0-of-2.bin").write_bytes(hostile[:size].ljust(size))
    (folder / ".metadata").write_bytes(hostile)  # where DCP would look
    read(folder, {"a": FlatSlices({0: torch.zeros(10)}, 10)})

    (folder / "shard-0-of-2.json").write_bytes(hostile)
    with pytest.raises(ValueError, match=r"shard-0-of-2\.json is damaged, or of another program"):
        read(folder, {"a": FlatSlices({0: torch.zeros(10)}, 10)})
    assert not mark.exists()


def changed(**entries: Any) -> Callable[[Path], None]:
    """Change entries of rank 1's table."""

    def change(folder: Path) -> None:
        path = folder / "shard-1-of-2.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | entries))

    return change


def a_is(dtype: Any = "float32", numel: Any = 10, pieces: Any = ((6, 4, 0),)) -> dict[str, Any]:
    return {"a": {"dtype": dtype, "numel": numel, "pieces": pieces}}


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "table missing": (lambda folder: (folder / "shard-1-of-2.json").unlink(), r"lacks shard-1-of-2\.json"),
    "table empty": (
        lambda folder: (folder / "shard-1-of-2.json").write_bytes(b""),
        r"shard-1-of-2\.json is dam",
    ),
    "table cut short": (
        lambda folder: os.truncate(folder / "shard-1-of-2.json", 99),
        r"shard-1-of-2\.json is dam",
    ),
    "table is a list": (
        lambda folder: (folder / "shard-1-of-2.json").write_text("[]"),
        r"shard-1-of-2\.json is dam",
    ),
    "table nested": (
        lambda folder: (folder / "shard-1-of-2.json").write_text("[" * 10**5),
        r"shard-1-of-2\.json is dam",
    ),
    "data missing": (lambda folder: (folder / "shard-1-of-2.bin").unlink(), r"shard-1-of-2\.bin is missing"),
    "data cut short": (
        lambda folder: os.truncate(folder / "shard-0-of-2.bin", 23),
        r"-0-of-2\.bin has 23 bytes",
    ),
    "data too long": (
        lambda folder: os.truncate(folder / "shard-0-of-2.bin", 25),
        r"-0-of-2\.bin has 25 bytes",
    ),
    "other format": (changed(format="DCP"), r"shard-1-of-2\.json is damaged, or of another program.*'DCP'"),
    "other byte order": (changed(byteorder="big"), r"shard-1-of-2\.json .*big-endian"),
    "no tensors": (changed(tensors=None), r"shard-1-of-2\.json is damaged"),
    "gap": (changed(tensors=a_is(pieces=[[7, 3, 0]])), "those from 6 on are in no shard"),
    "overlap": (changed(tensors=a_is(pieces=[[5, 5, 0]])), "those from 6 on are in no shard, or others are"),
    "overlap at the end": (changed(tensors=a_is(pieces=[[6, 4, 0], [8, 2, 0]])), "or others are in two"),
    "no end": (changed(tensors=a_is(pieces=[[6, 3, 0]])), "those from 9 on are in no shard"),
    "other size": (changed(tensors=a_is(numel=11)), r"shard-1-of-2\.json .* not so for another rank"),
    "other dtype": (changed(tensors=a_is(dtype="int32")), r"shard-1-of-2\.json .* not so for another rank"),
    "no dtype": (changed(tensors=a_is(dtype="load")), "no dtype is called 'load'"),
    "before the file": (changed(tensors=a_is(pieces=[[6, 4, -4]])), "a piece lies outside of the data file"),
    "behind the file": (changed(tensors=a_is(pieces=[[6, 4, 28]])), "a piece lies outside of the data file"),
    "huge": (changed(tensors=a_is(numel=10**15, pieces=[[6, 10**15, 0]])), "not so for another rank"),
    "strange piece": (changed(tensors=a_is(pieces=[[6, "x", 0]])), r"shard-1-of-2\.json is damaged"),
}


@pytest.mark.parametrize(("damage", "text"), DAMAGES.values(), ids=DAMAGES.keys())
def test_damage_is_found_before_anything_is_read(
    tmp_path: Path, damage: Callable[[Path], Any], text: str
) -> None:
    folder = two_ranks(tmp_path)
    place = torch.zeros(10)
    read(folder, {"a": FlatSlices({0: place}, 10)})
    damage(folder)
    untouched = torch.zeros(10)
    with pytest.raises(ValueError, match=text):
        read(folder, {"a": FlatSlices({0: untouched}, 10)})
    assert not untouched.any()


def test_a_file_that_ends_while_it_is_read_is_named(tmp_path: Path) -> None:
    folder = two_ranks(tmp_path)
    reader = ShardReader(folder, read_tables(folder))
    os.truncate(folder / "shard-1-of-2.bin", 10)
    with pytest.raises(ValueError, match=r"shard-1-of-2\.bin ends at byte 10"):
        reader.load({"a": FlatSlices({0: torch.zeros(10)}, 10)}, reader.read_metadata())
