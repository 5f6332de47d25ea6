"""Flat tensors in files: written in any pieces, read in any others; nothing that lies there is executed."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings, strategies as st
from library.saved import CountingFile, newest_complete

from zero_ref.files import durable, shard_files
from zero_ref.files.flat_slices import FlatSlices
from zero_ref.files.saves import MARK, Mark, Save, look_at, sealed
from zero_ref.files.shard_files import Ranges, ShardReader, ShardWriter, read_tables, verify

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.int64, torch.int16]
DTYPES += [torch.uint8, torch.bool, torch.float8_e4m3fn]


def numbers(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Distinct values as far as the dtype has them."""
    return torch.arange(1, numel + 1).to(dtype)


def cut(tensor: torch.Tensor, ends: list[int]) -> dict[int, torch.Tensor]:
    return {start: tensor[start:stop] for start, stop in itertools.pairwise([0, *ends, len(tensor)])}


def write(directory: Path, shards: list[Mapping[str, Ranges]], contents: Any = None, number: int = 1) -> Path:
    """A save of that number; its folder."""
    folder = directory / f"save-{number:08d}"
    folder.mkdir(parents=True)
    mark = Mark(number, f"{number:032x}", len(shards), "2026-07-01T00:00:00+00:00", {})
    mark.write(folder)
    for rank, tensors in enumerate(shards):
        writer = ShardWriter(folder, rank, len(shards), contents, mark.id)
        writer.finish(*writer.write_data(tensors))
    return folder


def reader_of(folder: Path) -> ShardReader:
    return ShardReader(folder, read_tables(save_in(folder)))


def save_in(folder: Path) -> Save:
    save = look_at(folder)
    assert save is not None
    return save


def read(folder: Path, wanted: Mapping[str, Ranges]) -> None:
    reader_of(folder).read(wanted)


def two_ranks(directory: Path, number: int = 1) -> Path:
    """A save of "a", of which rank 0 has the first 6 of 10 elements, and of "b", which is rank 1's."""
    a, b = numbers(10, torch.float32), numbers(3, torch.int64)
    return write(
        directory,
        [{"a": Ranges({0: a[:6]}, 10)}, {"a": Ranges({6: a[6:]}, 10), "b": Ranges({0: b}, 3)}],
        number=number,
    )


# ------------------------------------------------------------------------------------------ out and in again


def test_a_data_file_is_the_tensors_end_to_end_and_a_table_says_where(tmp_path: Path) -> None:
    folder = two_ranks(tmp_path)
    assert sorted(os.listdir(folder)) == [
        MARK,
        *(f"shard-{rank}-of-2.{kind}" for rank in (0, 1) for kind in ("bin", "json")),
    ]
    table = json.loads((folder / "shard-1-of-2.json").read_text())
    data = (folder / "shard-1-of-2.bin").read_bytes()
    digests = [hashlib.sha256(data[:16]).hexdigest(), hashlib.sha256(data[16:]).hexdigest()]
    assert table["tensors"] == {
        "a": {"dtype": "float32", "numel": 10, "pieces": [[6, 4, 0, digests[0]]]},
        "b": {"dtype": "int64", "numel": 3, "pieces": [[0, 3, 16, digests[1]]]},
    }
    assert [table[key] for key in ("save", "rank", "ranks")] == [f"{1:032x}", 1, 2]
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
    directory = tmp_path_factory.mktemp("save")
    pieces = list(cut(tensor, saved).items())
    shards = [dict(pieces[rank::writers]) for rank in range(writers)]
    folder = write(directory, [{"t": Ranges(shard, 30)} if shard else {} for shard in shards])
    places = list(cut(torch.zeros(30, dtype=dtype), wanted).items())
    for rank in range(readers):
        mine = dict(places[rank::readers])
        if mine:
            read(folder, {"t": Ranges(mine, 30)})
    for start, place in places:
        same = place.view(torch.uint8).equal(tensor[start : start + len(place)].view(torch.uint8))
        assert same, f"elements from {start} on"
    shutil.rmtree(directory)


def test_exactly_the_blocks_asked_for_are_read_and_no_other_file_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_files, "BLOCK_NBYTES", 8)  # two elements
    reader = reader_of(two_ranks(tmp_path))
    read_of_file: dict[str, int] = {}
    monkeypatch.setattr(shard_files, "open_regular", lambda path: CountingFile(path, read_of_file))
    middle = torch.zeros(3)
    reader.read({"a": Ranges({4: middle}, 10)})
    assert middle.tolist() == [5, 6, 7]
    assert read_of_file == {"shard-0-of-2.bin": 8, "shard-1-of-2.bin": 8}, "the third block, and the first"
    read_of_file.clear()
    reader.read({"a": Ranges({0: torch.zeros(6)}, 10)})
    assert read_of_file == {"shard-0-of-2.bin": 24}


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


# ----------------------------------------------------------------------------- writing that does not end


class Interrupted(Exception):
    """A process that ends here."""


def test_an_interruption_at_any_write_leaves_the_save_incomplete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the calls that reach the disk is the last one once."""
    reached: list[str] = []
    for stop_at in range(100):
        calls = itertools.count()
        directory = tmp_path / str(stop_at)

        def perhaps(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
            def called(*args: Any, **kwargs: Any) -> Any:
                if next(calls) == stop_at:  # noqa: B023
                    reached.append(name)
                    raise Interrupted
                return original(*args, **kwargs)

            return called

        with monkeypatch.context() as patch:
            patch.setattr(durable, "open", perhaps("open", open), raising=False)
            patch.setattr(durable.os, "fsync", perhaps("fsync", os.fsync))
            patch.setattr(Path, "replace", perhaps("replace", Path.replace))
            try:
                two_ranks(directory)
            except Interrupted:
                # The last rank's last call makes the new name itself safe from a loss of power.
                with contextlib.suppress(FileNotFoundError):
                    newest_complete(directory)
                    assert (reached[-1], len(reached)) == ("fsync", 16)
            else:
                break
    file = ["open", "fsync"]
    mark = table = [*file, "replace", "fsync"]
    assert reached == [*mark, *file, *table, *file, *table]
    read(newest_complete(directory).path, {"a": Ranges({0: torch.zeros(10)}, 10)})


def test_a_full_disk_is_reported_with_the_name_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    folder = write(tmp_path, [])
    monkeypatch.setattr(durable.os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: .*shard-0-of-1\.bin"):
        ShardWriter(folder, 0, 1).write_data({"a": Ranges({0: numbers(3, torch.int64)}, 3)})


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
    (folder / ".metadata").write_bytes(hostile)  # where DCP would look
    wanted = {"a": Ranges({0: torch.zeros(10)}, 10)}
    read(folder, wanted)
    for name in ("shard-0-of-2.bin", "shard-0-of-2.json", MARK):
        path = folder / name
        before = path.read_bytes()
        path.write_bytes(hostile[: len(before)].ljust(len(before)))
        with pytest.raises(ValueError, match=rf"{name} is damaged"):
            read(folder, wanted)
        path.write_bytes(before)
    read(folder, wanted)
    assert not mark.exists()


def changed(**entries: Any) -> Callable[[Path], None]:
    """Change entries of rank 1's table, as somebody would who can compute checksums."""

    def change(folder: Path) -> None:
        path = folder / "shard-1-of-2.json"
        table = json.loads(path.read_text()) | entries
        del table["sha256"]
        path.write_bytes(sealed(table))

    return change


def claims(
    *pieces: list[Any], dtype: Any = "float32", numel: Any = 10, nbytes: int = 16, digests: str | None = None
) -> Callable[[Path], None]:
    """Rank 1's table has these pieces of "a" and nothing else; its data file has so many bytes."""

    def change(folder: Path) -> None:
        with_digests = [[*piece, "0" * 64 if digests is None else digests] for piece in pieces or [[6, 4, 0]]]
        changed(tensors={"a": {"dtype": dtype, "numel": numel, "pieces": with_digests}}, nbytes=nbytes)(
            folder
        )
        os.truncate(folder / "shard-1-of-2.bin", nbytes)

    return change


def pipe(name: str) -> Callable[[Path], None]:
    """A named pipe in the place of a file: whoever opens it waits for the other end."""

    def change(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return change


def in_the_place_of(name: str, other: str) -> Callable[[Path], Any]:
    return lambda folder: shutil.copy(folder / other, folder / name)


def of_a_later_save(*names: str) -> Callable[[Path], None]:
    """Files of the same ranks and sizes, from a save of other values."""

    def change(folder: Path) -> None:
        a, b = numbers(10, torch.float32) + 1, numbers(3, torch.int64) + 1
        shards = [
            {"a": Ranges({0: a[:6]}, 10)},
            {"a": Ranges({6: a[6:]}, 10), "b": Ranges({0: b}, 3)},
        ]
        later = write(folder.parent / "later", shards, number=2)
        for name in names:
            shutil.copy(later / name, folder / name)

    return change


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
    "table of a later save": (
        of_a_later_save("shard-1-of-2.json"),
        rf"shard-1-of-2\.json is damaged.* for the save {2:032x}; this is save-00000001, {1:032x}",
    ),
    "table and data of a later save": (
        of_a_later_save("shard-1-of-2.json", "shard-1-of-2.bin"),
        r"shard-1-of-2\.json is damaged",
    ),
    "mark of a later save": (of_a_later_save(MARK), r"save\.json is damaged.* was written as save-00000002"),
    "table of another rank": (
        in_the_place_of("shard-1-of-2.json", "shard-0-of-2.json"),
        r"shard-1-of-2\.json is damaged.* it was written by rank 0 of 2",
    ),
    "mark missing": (lambda folder: (folder / MARK).unlink(), r"save-00000001 has no save\.json"),
    "mark is huge": (lambda folder: os.truncate(folder / MARK, 2**40), r"save\.json is .* at most 65536"),
    "table is huge": (
        lambda folder: os.truncate(folder / "shard-1-of-2.json", 2**40),
        r"shard-1-of-2\.json has 1099511627776 bytes; at most 67108864",
    ),
    "mark is a pipe": (pipe(MARK), r"save\.json is no regular file"),
    "table is a pipe": (pipe("shard-1-of-2.json"), r"shard-1-of-2\.json is no regular file"),
    "data is a pipe": (pipe("shard-1-of-2.bin"), r"shard-1-of-2\.bin has 0 bytes"),
    "other format": (changed(format="DCP"), r"shard-1-of-2\.json is damaged, or of another program.*'DCP'"),
    "other byte order": (changed(byteorder="big"), r"shard-1-of-2\.json .*big-endian"),
    "no tensors": (changed(tensors=None), r"shard-1-of-2\.json is damaged"),
    "gap": (claims([7, 3, 0], nbytes=12), "those from 6 on are in no shard"),
    "overlap": (claims([5, 5, 0], nbytes=20), "those from 6 on are in no shard, or others are"),
    "overlap at the end": (claims([6, 4, 0], [8, 2, 16], nbytes=24), "or others are in two"),
    "no end": (claims([6, 3, 0], nbytes=12), "those from 9 on are in no shard"),
    "other size": (claims(numel=11), r"shard-1-of-2\.json .* not so for another rank"),
    "other dtype": (claims(dtype="int32"), r"shard-1-of-2\.json .* not so for another rank"),
    "no dtype": (claims(dtype="load"), "no dtype is called 'load'"),
    "before the file": (claims([6, 4, -4]), "a piece lies outside of the data file"),
    "behind the file": (claims([6, 4, 28]), "a piece lies outside of the data file"),
    "the same bytes twice": (claims([6, 4, 0], [6, 4, 0]), "outside of the data file, or on another one"),
    "bytes in no piece": (claims([6, 4, 0], nbytes=20), "16 bytes are in pieces, of 20"),
    "huge": (claims([6, 10**15, 0]), "a piece of 4000000000000000 bytes has other checksums"),
    "no checksums": (claims(digests=""), "a piece of 16 bytes has other checksums"),
    "fractions": (claims([6.0, 4, 0]), "a piece lies outside"),
    "strange piece": (claims([6, "x", 0]), r"shard-1-of-2\.json is damaged"),
}


@pytest.mark.parametrize(("damage", "text"), DAMAGES.values(), ids=DAMAGES.keys())
def test_damage_is_found_before_anything_is_read(
    tmp_path: Path, damage: Callable[[Path], Any], text: str
) -> None:
    folder = two_ranks(tmp_path)
    place = torch.zeros(10)
    read(folder, {"a": Ranges({0: place}, 10)})
    damage(folder)
    untouched = torch.zeros(10)
    with pytest.raises(ValueError, match=text):
        read(folder, {"a": Ranges({0: untouched}, 10)})
    assert not untouched.any()


IN_DATA: dict[str, tuple[Callable[[Path], Any], str]] = {
    "NaN in the place of data": (
        lambda folder: (folder / "shard-0-of-2.bin").write_bytes(b"\0\0\xc0\x7f" * 6),
        r"shard-0-of-2\.bin is damaged: a, elements \[0, 6\), is not what rank 0 wrote there",
    ),
    "data of a later save": (
        of_a_later_save("shard-1-of-2.bin"),
        r"shard-1-of-2\.bin is damaged: a, elements \[6, 10\), is not what rank 1 wrote there",
    ),
}


@pytest.mark.parametrize(("damage", "text"), IN_DATA.values(), ids=IN_DATA.keys())
def test_data_that_is_not_what_was_written_is_refused(
    tmp_path: Path, damage: Callable[[Path], Any], text: str
) -> None:
    folder = two_ranks(tmp_path)
    damage(folder)
    with pytest.raises(ValueError, match=text):
        read(folder, {"a": Ranges({0: torch.zeros(10)}, 10)})


def test_a_file_that_ends_while_it_is_read_is_named(tmp_path: Path) -> None:
    folder = two_ranks(tmp_path)
    reader = reader_of(folder)
    os.truncate(folder / "shard-1-of-2.bin", 10)
    with pytest.raises(ValueError, match=r"shard-1-of-2\.bin ends at byte 10"):
        reader.read({"a": Ranges({0: torch.zeros(10)}, 10)})


def test_a_flipped_bit_is_found_in_whatever_byte_it_lies(tmp_path: Path) -> None:
    """Every byte of a small save: so it is no matter of chance. `test_sharded.py` flips bits under a load."""
    tensor = torch.randn(40, dtype=torch.float64)
    folder = write(tmp_path, [{"t": Ranges(cut(tensor, [9]), 40)}], contents={"notes": "é"})
    assert verify(save_in(folder)) == []
    for path in sorted(folder.iterdir()):
        original = path.read_bytes()
        for place in range(len(original)):
            flipped = bytearray(original)
            flipped[place] ^= 1 << place % 8
            path.write_bytes(flipped)
            problems = verify(save_in(folder))
            assert problems, f"bit {place % 8} of byte {place} of {path.name}"
            assert path.name in problems[0]
        path.write_bytes(original)
    assert verify(save_in(folder)) == []


def test_what_is_damaged_is_named_to_the_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_files, "BLOCK_NBYTES", 16)
    folder = write(tmp_path, [{"t": Ranges({0: torch.arange(20.0)}, 20), "u": Ranges({0: torch.ones(3)}, 3)}])
    path = folder / "shard-0-of-1.bin"
    data = bytearray(path.read_bytes())
    data[4 * 9] ^= 1
    data[4 * 21] ^= 1
    path.write_bytes(data)
    first, second = verify(save_in(folder))
    assert re.search(r"shard-0-of-1\.bin is damaged: t, elements \[8, 12\), is not what rank 0 wrote", first)
    assert re.search(r": u, elements \[0, 3\), is not what rank 0", second)
    intact = torch.zeros(8)
    read(folder, {"t": Ranges({12: intact}, 20)})
    assert intact.tolist() == list(range(12, 20)), "what is intact can be read"
    for start in (4, 5, 8, 10, 11):
        with pytest.raises(ValueError, match=r"elements \[8, 12\)"):
            read(folder, {"t": Ranges({start: torch.zeros(5)}, 20)})


def test_a_table_that_nobody_would_read_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_files, "TABLE_NBYTES", 1000)
    with pytest.raises(ValueError, match=r"shard-0-of-1\.json would have \d+ bytes, most of them notes"):
        write(tmp_path, [{"a": Ranges({0: numbers(3, torch.int64)}, 3)}], contents="n" * 1000)
