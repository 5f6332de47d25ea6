"""The folders of saves: only what carries our mark is counted, loaded or removed."""

from __future__ import annotations

import json
import os
import resource
import shutil
from pathlib import Path

import pytest
from library.saved import newest_complete

from zero_ref.files import saves
from zero_ref.files.saves import (
    FORMAT,
    MARK,
    DamagedError,
    Mark,
    look_at,
    new_save,
    read_sealed,
    remove_old,
    saves_in,
    sealed,
)
from zero_ref.files.shard_files import newest_intact


def complete(folder: Path) -> Path:
    """Give a save of two ranks all its files."""
    for rank in (0, 1):
        for kind in ("bin", "json"):
            (folder / f"shard-{rank}-of-2.{kind}").write_text("")
    return folder


def saved(directory: Path, number: int, token: str = "me") -> Path:
    """A complete save of that number."""
    folder = directory / f"save-{number:08d}"
    folder.mkdir(parents=True)
    Mark(number, f"{number:032x}", 2, "2026-07-01T00:00:00+00:00", {"token": token}).write(folder)
    return complete(folder)


def names_in(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


def test_saves_are_numbered_on_and_a_number_is_not_given_twice(tmp_path: Path) -> None:
    directory = tmp_path / "directory"
    directory.mkdir()
    first, mark = new_save(directory, 2, {"pid": 7})
    assert (mark.number, mark.ranks, mark.owner, len(mark.id)) == (1, 2, {"pid": 7}, 32)
    assert Mark.read(first) == mark
    complete(first)
    interrupted, other = new_save(directory, 2, {})
    assert (first.name, interrupted.name) == ("save-00000001", "save-00000002")
    assert mark.id != other.id
    assert newest_complete(directory).path == first
    third, _ = new_save(directory, 2, {})
    remove_old(third, 2)
    assert names_in(directory) == ["save-00000001", "save-00000003"], "the interrupted one is gone"


def test_folders_of_the_users_own_are_neither_counted_nor_removed_whatever_their_names(
    tmp_path: Path,
) -> None:
    theirs = ["save-20240101", "save-00000001", "save-00000002", "save-99999999", "save-notes"]
    for name in theirs:
        (tmp_path / name).mkdir()
        (tmp_path / name / "precious.txt").write_text(name)
    (tmp_path / "save-00000003").write_text("a file")
    os.symlink(tmp_path / "save-notes", tmp_path / "save-00000004")
    theirs += ["save-00000003", "save-00000004"]
    for _ in range(3):
        folder, _ = new_save(tmp_path, 2, {})
        complete(folder)
        remove_old(folder, 1)
        assert newest_complete(tmp_path).path == folder
    assert folder.name == "save-00000007"
    assert names_in(tmp_path) == sorted([*theirs, folder.name])
    assert (tmp_path / "save-99999999" / "precious.txt").read_text() == "save-99999999"


def test_numbers_may_outgrow_their_eight_digits(tmp_path: Path) -> None:
    saved(tmp_path, 99_999_998)
    names = []
    for _ in range(3):
        folder, _ = new_save(tmp_path, 2, {})
        complete(folder)
        assert newest_complete(tmp_path).path == folder
        remove_old(folder, 2)
        names.append(folder.name)
    assert names == ["save-99999999", "save-100000000", "save-100000001"]
    assert names_in(tmp_path) == sorted(names[1:])


def test_as_many_complete_saves_are_kept_and_what_came_to_no_end_goes(tmp_path: Path) -> None:
    for number in (2, 3, 5, 6, 8):
        saved(tmp_path, number)
    (tmp_path / "save-00000005" / "shard-0-of-2.json").unlink()
    newest = tmp_path / "save-00000006"
    remove_old(newest, 2, damaged=[tmp_path / "save-00000003"])
    # 3 does not count, but is not older than what is kept; 5 is no save; 8 is newer.
    assert names_in(tmp_path) == [f"save-0000000{number}" for number in (2, 3, 6, 8)]
    remove_old(newest, 1)
    assert names_in(tmp_path) == [f"save-0000000{number}" for number in (6, 8)]


def test_a_save_whose_mark_is_damaged_or_of_another_folder_is_shown_and_stays(tmp_path: Path) -> None:
    for number in (1, 2, 3, 4):
        saved(tmp_path, number)
    (tmp_path / "save-00000001" / MARK).unlink()
    (tmp_path / "save-00000002" / MARK).write_text("{}")
    shutil.rmtree(tmp_path / "save-00000003")
    shutil.copytree(tmp_path / "save-00000004", tmp_path / "save-00000003")
    problems = [save.problem for save in saves_in(tmp_path)]
    assert "save-00000001 has no save.json" in problems[0]
    assert "save.json is damaged, or of another program" in problems[1]
    assert "this folder was written as save-00000004: rename it back" in problems[2]
    assert not any(save.is_complete for save in saves_in(tmp_path)[:3])
    remove_old(tmp_path / "save-00000004", 1)
    assert len(saves_in(tmp_path)) == 4
    assert new_save(tmp_path, 2, {})[0].name == "save-00000005"


def test_what_the_user_has_put_into_a_save_stays_when_the_save_goes(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    (tmp_path / "save-00000001" / "tokenizer.json").write_text("mine")
    remove_old(saved(tmp_path, 2), 1)
    assert names_in(tmp_path / "save-00000001") == ["tokenizer.json"]
    assert saves_in(tmp_path)[0].number == 2


def test_an_interrupted_removal_leaves_nothing_that_looks_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each removal of a file is the last one once."""
    for stop_at in range(6):
        directory = tmp_path / str(stop_at)
        saved(directory, 1)
        newest = saved(directory, 2)
        unlinked: list[Path] = []
        unlink = Path.unlink

        def stopping(path: Path, *, missing_ok: bool = False) -> None:
            if len(unlinked) == stop_at:  # noqa: B023
                raise KeyboardInterrupt
            unlinked.append(path)  # noqa: B023
            unlink(path, missing_ok=missing_ok)  # noqa: B023

        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", stopping)
            try:
                remove_old(newest, 1)
            except KeyboardInterrupt:
                [old, _] = saves_in(directory)
                assert old.is_complete == (stop_at == 0)
                assert old.mark, "it can be removed later"
        remove_old(newest, 1)
        assert names_in(directory) == ["save-00000002"]


def test_a_crash_before_the_mark_or_after_it_leaves_no_folder_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    for number, (owner, step) in enumerate(((os, "fsync"), (Path, "replace"), (Path, "rmdir"))):
        directory = tmp_path / str(number)
        first = saved(directory, 1)
        with monkeypatch.context() as patch:
            patch.setattr(owner, step, crash)
            with pytest.raises(KeyboardInterrupt):
                remove_old(saved(directory, 2), 1) if step == "rmdir" else new_save(directory, 2, {})
        [left] = {*directory.iterdir()} - {save.path for save in saves_in(directory)}
        assert left.name == ("save-00000001" if step == "rmdir" else "save-00000002")
        assert not names_in(left) or (left / f"{MARK}.part").exists()
        newest, _ = new_save(directory, 2, {})
        remove_old(complete(newest), 2)
        assert names_in(directory) == sorted(
            [first.name if step != "rmdir" else "save-00000002", newest.name]
        )


def test_an_unmarked_folder_with_anything_else_in_it_stays(tmp_path: Path) -> None:
    for number, name in ((1, "mine.txt"), (2, f"{MARK}.part")):
        (tmp_path / f"save-0000000{number}").mkdir()
        (tmp_path / f"save-0000000{number}" / name).write_text("no mark of ours")
    (tmp_path / "elsewhere").mkdir()
    os.symlink("elsewhere", tmp_path / "save-00000003")
    (tmp_path / "save-00000009").mkdir()
    before = names_in(tmp_path)
    newest, _ = new_save(tmp_path, 2, {})
    remove_old(complete(newest), 1)
    assert names_in(tmp_path) == sorted([*before, "save-00000004"])


def test_where_there_is_no_complete_save_the_error_says_what_is_missing(tmp_path: Path) -> None:
    for directory in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(FileNotFoundError, match=f"{directory} holds no complete sharded checkpoint"):
            newest_intact(directory, None, {})
    (saved(tmp_path, 1) / "shard-1-of-2.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"the newest save lacks shard-1-of-2\.json\."):
        newest_intact(tmp_path, None, {})
    new_save(tmp_path, 100, {})
    with pytest.raises(FileNotFoundError, match=r"lacks shard-0-of-100\.json, .*, .* and 97 more\."):
        newest_intact(tmp_path, None, {})


def test_numbers_of_ranks_cost_nothing_wherever_they_are_claimed(tmp_path: Path) -> None:
    """An empty file of that name once cost 857 MB."""
    folder = saved(tmp_path, 1)
    (folder / "shard-0-of-5000000.json").write_text("")
    other = tmp_path / "save-00000002"
    other.mkdir()
    Mark(2, "0" * 32, 10**12, "", {}).write(other)
    (other / "shard-0-of-1000000000000.json").write_text("")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert newest_complete(tmp_path).path == folder
    assert len(saves_in(tmp_path)[1].lacks) < 200
    assert "and 999999999996 more" in saves_in(tmp_path)[1].lacks
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000, "kilobytes"


MARKS = {
    "other format": {"format": "DCP"},
    "no ranks": {"ranks": 0},
    "a text for a number": {"ranks": "2"},
    "true for a number": {"ranks": True},
    "no identity": {"id": None},
    "no owner": {"owner": []},
}


@pytest.mark.parametrize("entries", MARKS.values(), ids=MARKS.keys())
def test_a_mark_is_believed_only_if_it_says_all_that_it_should(
    tmp_path: Path, entries: dict[str, object]
) -> None:
    folder = saved(tmp_path, 1)
    mark = {"format": FORMAT, **Mark.read(folder)._asdict()}
    (folder / MARK).write_bytes(sealed(mark | entries))
    with pytest.raises(DamagedError, match=r"save\.json is damaged"):
        Mark.read(folder)
    del mark[next(iter(entries))]
    (folder / MARK).write_bytes(sealed(mark))
    with pytest.raises(DamagedError, match=r"save\.json is damaged.*KeyError"):
        Mark.read(folder)


@pytest.mark.parametrize("name", ["save-1", "save-000000001", "save-0000000x", "save-"])
def test_names_that_no_save_has(tmp_path: Path, name: str) -> None:
    saved(tmp_path, 1).rename(tmp_path / name)
    assert look_at(tmp_path / name) is None
    assert saves_in(tmp_path) == []


def test_a_sealed_file_is_json_and_every_byte_of_it_counts(tmp_path: Path) -> None:
    path = tmp_path / "sealed.json"
    value = {"a": [1, 2.5, "é", None], "b": {}}
    path.write_bytes(sealed(value))
    entries = json.loads(path.read_text())
    assert set(entries.pop("sha256")) <= set("0123456789abcdef")
    assert entries == value
    assert read_sealed(path, 1000)["a"] == value["a"]
    original = path.read_bytes()
    for changed in (original[:-1], original + b" ", original.upper(), b"", original.replace(b"1", b" 1")):
        path.write_bytes(changed)
        with pytest.raises(DamagedError, match=r"do not have the SHA-256|at most"):
            read_sealed(path, 1000)
    assert saves.TABLE.fullmatch("shard-0-of-2.json")
