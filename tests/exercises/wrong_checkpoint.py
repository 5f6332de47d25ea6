"""Chapter 8: answers that a reader may give, each with a part of the message that must meet them."""

from __future__ import annotations

import re
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from zero_ref.plan.partition import Partition, Slice
from zero_ref_course.checkpoint import Table as TableOfRank, tables_in

Reads = list[tuple[int, int, int]]

# ------------------------------------------------------------------------------ 8.1 what to read


def _pieces(old: Partition, new: Partition, rank: int) -> list[tuple[int, Slice, int, int, int]]:
    """(old rank, its slice, elements before it in its file, where the overlap begins, its elements)."""
    found = []
    for wanted in new.slices_of_rank[rank]:
        for piece, src in old.pieces_of_param[wanted.param]:
            start, stop = max(piece.start, wanted.start), min(piece.stop, wanted.stop)
            if start < stop:
                in_file = old.slices_of_rank[src]
                before = sum(other.numel for other in in_file[: in_file.index(piece)])
                found.append((src, piece, before, start, stop - start))
    return found


def joins_nothing(old: Partition, new: Partition, rank: int) -> Reads:
    return [
        (src, before + start - piece.start, numel)
        for src, piece, before, start, numel in _pieces(old, new, rank)
    ]


def counts_from_the_parameter(old: Partition, new: Partition, rank: int) -> Reads:
    return [(src, start, numel) for src, _, _, start, numel in _pieces(old, new, rank)]


def counts_from_the_slice(old: Partition, new: Partition, rank: int) -> Reads:
    return [(src, start - piece.start, numel) for src, piece, _, start, numel in _pieces(old, new, rank)]


def always_from_the_slices_start(old: Partition, new: Partition, rank: int) -> Reads:
    return [(src, before, numel) for src, _, before, _, numel in _pieces(old, new, rank)]


def adds_the_place_in_the_parameter(old: Partition, new: Partition, rank: int) -> Reads:
    return [(src, before + start, numel) for src, _, before, start, numel in _pieces(old, new, rank)]


def only_from_others(old: Partition, new: Partition, rank: int) -> Reads:
    return [read for read in joins_nothing(old, new, rank) if read[0] != rank]


def file_by_file(old: Partition, new: Partition, rank: int) -> Reads:
    return sorted(joins_nothing(old, new, rank), key=lambda read: read[0])


def in_bytes(old: Partition, new: Partition, rank: int) -> Reads:
    return [(src, 4 * first, 4 * numel) for src, first, numel in joins_nothing(old, new, rank)]


def the_whole_files(old: Partition, new: Partition, rank: int) -> Reads:
    return [(src, 0, old.loads[src]) for src in sorted({read[0] for read in joins_nothing(old, new, rank)})]


def all_reads_of_the_first_file(old: Partition, new: Partition, rank: int) -> Reads:
    return [(0, first, numel) for _, first, numel in joins_nothing(old, new, rank)]


def without_the_rank(old: Partition, new: Partition, rank: int) -> list[tuple[int, int]]:
    return [(first, numel) for _, first, numel in joins_nothing(old, new, rank)]


# ------------------------------------------------------------------------------ 8.2 shards put together


def _whole(partition: Partition, shapes: Any, shards: Any) -> dict[int, dict[str, torch.Tensor]]:
    whole: dict[int, dict[str, torch.Tensor]] = {}
    for shard in shards:
        for piece, state in shard.items():
            of_param = whole.setdefault(piece.param, {"step": state["step"].clone()})
            for key in ("exp_avg", "exp_avg_sq"):
                full = of_param.setdefault(key, torch.zeros(shapes[piece.param]))
                full.view(-1)[piece.start : piece.stop] = state[key]
    return whole


def one_after_the_other(partition: Partition, shapes: Any, shards: Any) -> Any:
    whole = _whole(partition, shapes, shards)
    for param, of_param in whole.items():
        for key in ("exp_avg", "exp_avg_sq"):
            parts = [shard[piece][key] for shard in shards for piece in shard if piece.param == param]
            of_param[key] = torch.cat(parts).view(shapes[param])
    return whole


def from_the_start_each(partition: Partition, shapes: Any, shards: Any) -> Any:
    whole = _whole(partition, shapes, shards)
    for shard in shards:
        for piece, state in shard.items():
            whole[piece.param]["exp_avg"].view(-1)[: piece.numel] = state["exp_avg"]
    return whole


def flat(partition: Partition, shapes: Any, shards: Any) -> Any:
    return {
        param: {key: value.flatten() if value.ndim else value for key, value in of_param.items()}
        for param, of_param in _whole(partition, shapes, shards).items()
    }


def adds_up_the_steps(partition: Partition, shapes: Any, shards: Any) -> Any:
    whole = _whole(partition, shapes, shards)
    for param, of_param in whole.items():
        of_param["step"] = sum(
            shard[piece]["step"] for shard in shards for piece in shard if piece.param == param
        )
    return whole


def zeros_for_the_unused(partition: Partition, shapes: Any, shards: Any) -> Any:
    empty = {"step": torch.tensor(0.0)}
    whole = _whole(partition, shapes, shards)
    return {param: whole.get(param, empty) for param in range(len(shapes))}


def only_rank_0(partition: Partition, shapes: Any, shards: Any) -> Any:
    return _whole(partition, shapes, shards[:1])


def keeps_the_shards_memory(partition: Partition, shapes: Any, shards: Any) -> Any:
    whole = _whole(partition, shapes, shards)
    for shard in shards:
        for piece, state in shard.items():
            if piece.numel == partition.numels[piece.param]:
                whole[piece.param]["exp_avg"] = state["exp_avg"].view(shapes[piece.param])
    return whole


# ------------------------------------------------------------------------- 8.3 killed while it saves


def _names(number: int, shards: list[bytes]) -> list[str]:
    return [f"save-{number}/shard-{rank}-of-{len(shards)}" for rank in range(len(shards))]


def _remove_all_but(disk: Any, names: list[str]) -> None:
    for name in disk.names():
        if name not in names:
            disk.remove(name)


def writes_in_place(disk: Any, number: int, shards: list[bytes]) -> None:
    names = _names(number, shards)
    for name, shard in zip(names, shards):
        disk.write(name, shard)
    _remove_all_but(disk, names)


def removes_first(disk: Any, number: int, shards: list[bytes]) -> None:
    names = _names(number, shards)
    _remove_all_but(disk, names)
    for name, shard in zip(names, shards):
        disk.write("unfinished", shard)
        disk.rename("unfinished", name)


def never_removes(disk: Any, number: int, shards: list[bytes]) -> None:
    for name, shard in zip(_names(number, shards), shards):
        disk.write("unfinished", shard)
        disk.rename("unfinished", name)


def replaces_the_old_files(disk: Any, number: int, shards: list[bytes]) -> None:
    for name, shard in zip(_names(number - 1, shards), shards):
        disk.write("unfinished", shard)
        disk.rename("unfinished", name)


def starts_in_the_old_folder(disk: Any, number: int, shards: list[bytes]) -> None:
    replaces_the_old_files(disk, number, shards)
    never_removes(disk, number, shards)
    _remove_all_but(disk, _names(number, shards))


def forgets_what_killed_saves_leave(disk: Any, number: int, shards: list[bytes]) -> None:
    older = [name for name in disk.names() if name.startswith(f"save-{number - 1}/")]
    names = _names(number, shards)
    for name, shard in zip(names, shards):
        disk.write(f"{name}.unfinished", shard)
        disk.rename(f"{name}.unfinished", name)
    for name in older:
        disk.remove(name)


def mixes_up_the_ranks(disk: Any, number: int, shards: list[bytes]) -> None:
    names = _names(number, shards)
    for name, shard in zip(names, reversed(shards)):
        disk.write("unfinished", shard)
        disk.rename("unfinished", name)
    _remove_all_but(disk, names)


def never_renames(disk: Any, number: int, shards: list[bytes]) -> None:
    for name, shard in zip(_names(number, shards), shards):
        disk.write(f"{name}.unfinished", shard)


def tidies_up_when_killed(disk: Any, number: int, shards: list[bytes]) -> None:
    try:
        writes_in_place(disk, number, shards)
    except BaseException:
        return


# ------------------------------------------------------------------------- 8.4 the newest intact save


def _number(folder: Path) -> int:
    return int(folder.name.removeprefix("save-"))


def _folders(directory: Path) -> list[Path]:
    return [folder for folder in directory.iterdir() if re.fullmatch(r"save-\d+", folder.name)]


def _is_complete(folder: Path) -> bool:
    tables = tables_in(folder)
    return bool(tables) and len(tables) == tables[0].ranks


def _is_as_written(table: TableOfRank) -> bool:
    return table.data.exists() and sha256(table.data.read_bytes()).hexdigest() == table.sha256


def _is_intact(folder: Path) -> bool:
    return _is_complete(folder) and all(map(_is_as_written, tables_in(folder)))


def in_the_order_of_texts(directory: Path) -> Path | None:
    return max(filter(_is_intact, _folders(directory)), default=None)


def changed_last(directory: Path) -> Path | None:
    intact = filter(_is_intact, _folders(directory))
    return max(intact, key=lambda folder: folder.stat().st_mtime, default=None)


def the_first_that_is_intact(directory: Path) -> Path | None:
    return min(filter(_is_intact, _folders(directory)), key=_number, default=None)


def does_not_ask_for_all_tables(directory: Path) -> Path | None:
    good = [
        folder
        for folder in _folders(directory)
        if tables_in(folder) and all(map(_is_as_written, tables_in(folder)))
    ]
    return max(good, key=_number, default=None)


def believes_a_folder_without_tables(directory: Path) -> Path | None:
    def is_good(folder: Path) -> bool:
        tables = tables_in(folder)
        return all(map(_is_as_written, tables)) and len(tables) == max((t.ranks for t in tables), default=0)

    return max(filter(is_good, _folders(directory)), key=_number, default=None)


def believes_the_tables(directory: Path) -> Path | None:
    return max(filter(_is_complete, _folders(directory)), key=_number, default=None)


def asks_only_whether_the_files_are_there(directory: Path) -> Path | None:
    def is_good(folder: Path) -> bool:
        return _is_complete(folder) and all(table.data.exists() for table in tables_in(folder))

    return max(filter(is_good, _folders(directory)), key=_number, default=None)


def compares_lengths(directory: Path) -> Path | None:
    def is_good(folder: Path) -> bool:
        there = _is_complete(folder) and all(table.data.exists() for table in tables_in(folder))
        return there and all(table.data.stat().st_size == table.nbytes for table in tables_in(folder))

    return max(filter(is_good, _folders(directory)), key=_number, default=None)


def only_the_newest(directory: Path) -> Path | None:
    newest = max(_folders(directory), key=_number, default=None)
    return newest if newest and _is_intact(newest) else None


def trips_over_a_missing_file(directory: Path) -> Path | None:
    def is_good(folder: Path) -> bool:
        tables = tables_in(folder)
        digests = [sha256(table.data.read_bytes()).hexdigest() for table in tables]
        return _is_complete(folder) and digests == [table.sha256 for table in tables]

    return max(filter(is_good, _folders(directory)), key=_number, default=None)


def trips_over_a_foreign_name(directory: Path) -> Path | None:
    return max(filter(_is_intact, directory.iterdir()), key=_number, default=None)


def takes_what_begins_as_a_save(directory: Path) -> Path | None:
    def number(folder: Path) -> int:
        digits = re.match(r"save-(\d+)", folder.name)
        return int(digits[1]) if digits else -1

    return max(filter(_is_intact, directory.iterdir()), key=number, default=None)


def raises_where_nothing_is_intact(directory: Path) -> Path | None:
    return max(filter(_is_intact, _folders(directory)), key=_number)


def tidies_up(directory: Path) -> Path | None:
    for folder in _folders(directory):
        if not _is_intact(folder):
            for path in folder.iterdir():
                path.unlink()
    return max(filter(_is_intact, _folders(directory)), key=_number, default=None)


def returns_the_name(directory: Path) -> Any:
    newest = max(filter(_is_intact, _folders(directory)), key=_number, default=None)
    return newest and newest.name


def forgets_to_return(directory: Path) -> None:
    max(filter(_is_intact, _folders(directory)), key=_number, default=None)


WRONG = [
    ("checkpoint.reads", joins_nothing, r"right elements, in 3 reads where 2 are enough"),
    ("checkpoint.reads", counts_from_the_parameter, r"from the beginning of the parameter"),
    ("checkpoint.reads", counts_from_the_slice, r"Other slices may lie before it"),
    ("checkpoint.reads", always_from_the_slices_start, r"from its middle on"),
    ("checkpoint.reads", adds_the_place_in_the_parameter, r"is to be subtracted"),
    ("checkpoint.reads", only_from_others, r"nothing is in memory"),
    ("checkpoint.reads", file_by_file, r"in the order of the new rank's slices"),
    ("checkpoint.reads", in_bytes, r"Count elements"),
    ("checkpoint.reads", the_whole_files, r"192 elements in all, and the rank is to own 128"),
    (
        "checkpoint.reads",
        all_reads_of_the_first_file,
        r"number 0 of parameter 0; the rank.s is number 192",
    ),
    ("checkpoint.reads", without_the_rank, r"must return a list of \(old rank, first element"),
    ("checkpoint.consolidate", one_after_the_other, r"right elements in the wrong order.* its `start`"),
    ("checkpoint.consolidate", from_the_start_each, r"wrong elements of 384"),
    ("checkpoint.consolidate", flat, r"'exp_avg' has the shape \(384,\); its parameter has \(16, 24\)"),
    ("checkpoint.consolidate", adds_up_the_steps, r"'step' is 4, after 2 steps"),
    ("checkpoint.consolidate", zeros_for_the_unused, r"a parameter that never had a gradient has no state"),
    ("checkpoint.consolidate", only_rank_0, r"parameter 1 is missing"),
    ("checkpoint.consolidate", keeps_the_shards_memory, r"lies in the memory of a shard"),
    ("checkpoint.save", writes_in_place, r"takes the half of shard 0 for the whole"),
    ("checkpoint.save", removes_first, r"killed in write\(.* finds no complete save"),
    ("checkpoint.save", never_removes, r"save number 10 there still are \['save-9/shard-0-of-1'\]"),
    (
        "checkpoint.save",
        replaces_the_old_files,
        r"after save number 10 the file 'save-10/shard-0-of-1' is missing",
    ),
    ("checkpoint.save", starts_in_the_old_folder, r"shards of two saves side by side"),
    (
        "checkpoint.save",
        forgets_what_killed_saves_leave,
        r"save number 11 there still are \['save-9/shard-0-of-1'",
    ),
    ("checkpoint.save", mixes_up_the_ranks, r"each in the file of its rank"),
    ("checkpoint.save", never_renames, r"shard-0-of-1' is missing"),
    ("checkpoint.save", tidies_up_when_killed, r"takes the half of shard 0 for the whole"),
    (
        "checkpoint.newest_intact",
        in_the_order_of_texts,
        r"'save-10' comes before 'save-9'. Compare the numbers",
    ),
    ("checkpoint.newest_intact", changed_last, r"It was changed last.* highest number: save-10"),
    ("checkpoint.newest_intact", the_first_that_is_intact, r"returned save-1\. save-2 is newer, and intact"),
    ("checkpoint.newest_intact", does_not_ask_for_all_tables, r"save-5 lacks the table of rank 1 of 4"),
    ("checkpoint.newest_intact", believes_a_folder_without_tables, r"save-5 has no table at all"),
    ("checkpoint.newest_intact", believes_the_tables, r"data file of rank 1 of 4 in save-5 is missing"),
    ("checkpoint.newest_intact", asks_only_whether_the_files_are_there, r"is cut short.* not intact"),
    ("checkpoint.newest_intact", compares_lengths, r"only the checksum tells"),
    (
        "checkpoint.newest_intact",
        only_the_newest,
        r"returned None. save-4 is intact: .* an older one will do",
    ),
    (
        "checkpoint.newest_intact",
        trips_over_a_missing_file,
        r"\(a file is missing\).*raised FileNotFoundError.*pass it over",
    ),
    ("checkpoint.newest_intact", trips_over_a_foreign_name, r"save-7-copy.*raised ValueError.*pass it over"),
    (
        "checkpoint.newest_intact",
        takes_what_begins_as_a_save,
        r"save-7-copy is a folder that somebody has made",
    ),
    ("checkpoint.newest_intact", raises_where_nothing_is_intact, r"raised ValueError.*return None"),
    ("checkpoint.newest_intact", tidies_up, r"A search changes nothing"),
    ("checkpoint.newest_intact", returns_the_name, r"returned 'save-2'. It must return one of the folders"),
    ("checkpoint.newest_intact", forgets_to_return, r"Does the function end in a `return`"),
]
