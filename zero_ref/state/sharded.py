"""Checkpoints that no rank ever holds whole: each rank writes what it owns, and reads what it will own.

This module adds to `state_dict` of `minimal.py` that nothing is gathered, that a save may go on in the
background, and that an interrupted save leaves the one before it as it was. `save_sharded` and
`save_sharded_async` write, `load_sharded` reads, at any other world size and partition. All that ranks say to
each other is here. Below it are

    contents.py       what a rank stores of an optimizer: named flat tensors, and JSON
    files.py          how these lie in a rank's two files, and how damage is found
    saves.py          the folders of a directory: which save is complete, which may be removed
    save_owner.py     which job may save into a directory

A save has four phases. Ranks agree on what they save, and rank 0 makes the folder. Each rank writes its own
files; the last of them, its table, says that the rank is done. Ranks seal the save: they hear that all have
written. Rank 0 tidies up: it removes older saves. Only the first and the third phase communicate, on the
calling thread, so that the second can go on in the background.

The `save` and `load` of torch.distributed.checkpoint (DCP) are not called: they exchange pickled objects
between ranks, which a background thread must not do while training communicates.
"""

from __future__ import annotations

import contextlib
import json
import os
import warnings
import weakref
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zero_ref.comm.agreement import agree, agreement
from zero_ref.comm.collectives import Collectives
from zero_ref.comm.objects import broadcast_json, gather_texts
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.shard.buckets import Message, broadcast_messages, messages_by_parameter
from zero_ref.state.contents import Contents, LoadedShard, contents_of, ranges_to_save
from zero_ref.state.durable import make_directory
from zero_ref.state.files import Ranges, ShardReader, ShardWriter, Table, read_tables
from zero_ref.state.save_owner import Ownership, become_owner
from zero_ref.state.saves import DamagedError, name_of, new_save, nothing_in, remove_old, saves_in

Directory = str | os.PathLike[str]


# ------------------------------------------------------------------------------------------------- to save


def save_sharded(
    optimizer: ZeroRedundancyOptimizer,
    directory: Directory,
    *,
    notes: Mapping[str, Any] | None = None,
    parameters: bool = True,
    keep: int = 2,
    take_over: bool = False,
) -> None:
    """Write a checkpoint, each rank what it owns: the optimizer's state and the parameters.

    If the save is interrupted, for whatever reason, `load_sharded` still finds the one before. Hooks on
    `state_dict` are not called: there is none. `zero-ref checkpoints` lists the saves of a directory.

    >>> save_sharded(optimizer, "run7/checkpoint", notes={"iteration": 1200})  # doctest: +SKIP

    Args:
        directory: one that all ranks see, and no other optimizer saves to. Whatever else lies there stays.
        notes: what JSON can express, the same on all ranks; `load_sharded` returns it.
        parameters: write the parameters too, frozen ones included. A model's buffers, such as the running
            means of a BatchNorm, are no parameters: save them yourself.
        keep: so many complete saves stay; older ones are removed once the new one is complete.
        take_over: save even though the directory belongs to another job, of which you know that it is gone.
            Without it the first save after a crash waits, 5 minutes at most (see `save_owner.py`).
    Raises:
        OSError: this rank could not write, such as for a full disk; names the file.
        TypeError: the state, an option or a note is none that can be saved.
        RuntimeError: another job saves into this directory; names it.
        RuntimeError, ValueError: another rank failed, stopped, or passes other arguments.
        If one rank raises, all raise.
    Warns:
        UserWarning: the directory is another job's, and rank 0 waits to see whether that job lives.
    Collective: all ranks of the group.
    Cost: each rank writes its 1/N of state and parameters, and computes their SHA-256. Between ranks: two
        all-gathers of 32 bytes, one broadcast of the folder's name. Until it is complete, the disk holds one
        save more than `keep`.
    """
    save = _agree_on_save(optimizer, directory, notes, parameters, keep, take_over)
    failure = save.write()
    save.seal(failure)
    save.tidy()


def save_sharded_async(
    optimizer: ZeroRedundancyOptimizer,
    directory: Directory,
    *,
    notes: Mapping[str, Any] | None = None,
    parameters: bool = True,
    keep: int = 2,
    take_over: bool = False,
) -> PendingSave:
    """As `save_sharded`, but return when the state is copied, and write in the background.

    The background thread talks to no other rank, so training may go on and communicate. The save is complete
    when the slowest rank has written, also if nobody waits for it. The next save or load of this optimizer
    waits for it first.

    Returns:
        Its `wait()` returns when the save is complete, or raises what went wrong.
    Raises:
        As `save_sharded`; an error in writing is raised by `wait()`, or else by the next save or load.
    Collective: all ranks of the group.
    Cost: as `save_sharded`, and in CPU memory a copy of what this rank writes until it is written.
    """
    save = _agree_on_save(optimizer, directory, notes, parameters, keep, take_over, as_copies=True)
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="save_sharded")
    pending = _PENDING[optimizer] = PendingSave(save, thread.submit(save.write))
    thread.shutdown(wait=False)  # ends when it has written, and the interpreter waits for that
    return pending


class PendingSave:
    """A sharded save under way in the background."""

    def __init__(self, save: _Save, writing: Future[Exception | None]) -> None:
        self._unsealed: _Save | None = save
        self._writing = writing

    def done(self) -> bool:
        """Whether this rank has written its part, or failed to. The others may still write."""
        return self._writing.done()

    def wait(self) -> None:
        """Return when the save is complete; later calls return immediately.

        Raises:
            OSError: this rank could not write its part.
            RuntimeError: another rank could not, or stopped.
        Collective: all ranks of the group.
        """
        save, self._unsealed = self._unsealed, None
        if save is not None:
            save.seal(self._writing.result())
            save.tidy()


_PENDING: weakref.WeakKeyDictionary[ZeroRedundancyOptimizer, PendingSave] = weakref.WeakKeyDictionary()
"""The last background save of each optimizer."""

_OWNERSHIPS: weakref.WeakKeyDictionary[ZeroRedundancyOptimizer, set[Ownership]] = weakref.WeakKeyDictionary()
"""The directories that an optimizer has saved to, which belong to this job for as long as it lives."""

_KNOWN_DAMAGED: set[Path] = set()
"""The saves that a load has skipped. They do not count as saves to keep."""


def _wait_for_pending(optimizer: ZeroRedundancyOptimizer) -> None:
    pending = _PENDING.pop(optimizer, None)
    if pending is not None:
        pending.wait()


@dataclass
class _Save:
    """One save on this rank.

    Args:
        ranges: what this rank writes; freed when it is written.
        ownership: of the directory, on rank 0. None elsewhere.
    """

    comm: Collectives
    folder: Path
    writer: ShardWriter
    ranges: dict[str, Ranges]
    keep: int
    ownership: Ownership | None

    def write(self) -> Exception | None:
        """Write this rank's files, without communication; return the error, if any, for `seal`."""
        try:
            self.writer.save(self.ranges)
        except Exception as error:
            return error
        finally:
            self.ranges = {}
        return None

    def seal(self, failure: Exception | None) -> None:
        """Return when all ranks have written; raise on all ranks if one has failed. Collective."""
        agree(self.comm, f"complete the checkpoint {self.folder}", failure or [])

    def tidy(self) -> None:
        """Remove older saves and what interrupted ones have left, on rank 0. The next save tries again."""
        if self.ownership is not None and self.ownership.is_valid():
            damaged = [path.name for path in _KNOWN_DAMAGED if path.parent == self.folder.parent]
            with contextlib.suppress(OSError):
                remove_old(self.folder, self.keep, self.ownership.may_remove, damaged)


@torch.no_grad()
def _agree_on_save(
    optimizer: ZeroRedundancyOptimizer,
    directory: Directory,
    notes: Mapping[str, Any] | None,
    parameters: bool,
    keep: int,
    take_over: bool,
    as_copies: bool = False,
) -> _Save:
    """Collect what this rank writes; return when all ranks have, and rank 0 has made a folder. Collective."""
    _wait_for_pending(optimizer)
    optimizer.current()
    comm, path = optimizer.collectives, Path(directory).absolute()
    ownership, name_and_id = None, ["", ""]
    with agreement(comm, "save a sharded checkpoint") as facts:
        if type(keep) is not int or keep < 1:
            raise ValueError(f"rank {comm.rank}: keep takes a number of saves from 1 on, not {keep!r}.")
        notes_text = _notes_as_json(notes)
        ranges, entries = ranges_to_save(optimizer, parameters, as_copies)
        contents: dict[str, Any] = {"state": entries}
        if comm.rank == 0:
            contents |= {"notes": json.loads(notes_text), **contents_of(optimizer)}
            make_directory(path)
            ownership = become_owner(path, take_over)
            _OWNERSHIPS.setdefault(optimizer, set()).add(ownership)
            folder, mark = new_save(path, comm.world_size, ownership.owner._asdict())
            name_and_id = [folder.name, mark.id]
        facts += [f"directory {path}", f"parameters={parameters}", f"keep={keep}", f"notes {notes_text}"]
        facts += optimizer.standing_facts()
    name, id_ = broadcast_json(comm, name_and_id, src=0)
    writer = ShardWriter(path / name, comm.rank, comm.world_size, contents, id_)
    save = _Save(comm, path / name, writer, ranges, keep, ownership)
    save.tidy()  # before the disk is needed
    return save


def _notes_as_json(notes: Mapping[str, Any] | None) -> str:
    try:
        return json.dumps(notes or {}, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise TypeError(f"notes must be what JSON can express: {error}.") from error


# ------------------------------------------------------------------------------------------------- to load


@torch.no_grad()
def load_sharded(
    optimizer: ZeroRedundancyOptimizer,
    directory: Directory,
    *,
    parameters: bool = True,
    save: int | str | None = None,
) -> dict[str, Any]:
    """Load the newest intact checkpoint, saved at any world size and under any partition.

    Each rank reads the ranges that it owns, and checks them. Parameters then travel as after a step: one rank
    reads each element and sends it to the others, since a network between ranks is faster than a file system
    that all of them read the whole model from. All of it takes effect on all ranks, or nothing does.

    >>> iteration = load_sharded(optimizer, "run7/checkpoint")["iteration"]  # doctest: +SKIP

    Args:
        directory: what was passed to `save_sharded`.
        parameters: load the parameters too. They were saved with `parameters=True`. Values of 32 bits become
            the masters of 16-bit parameters, and masters become the values of 32-bit parameters.
        save: load this one and no other: its number, or the name of its folder, such as "save-00000007".
    Returns:
        The notes passed to `save_sharded`; tuples in them have become lists.
    Raises:
        FileNotFoundError: there is no complete checkpoint, or not this one.
        ValueError: it is of another model or optimizer, which names the parameter, or all that are there are
            damaged, which names file, parameter and rank.
        RuntimeError: another rank could not read, or stopped. If one rank raises, all raise, and optimizer
            and parameters are as they were. Only where the network fails in the very last message can ranks
            not know of each other; one that has not loaded then refuses to step, until it has loaded
            parameters again.
    Warns:
        UserWarning: the newest checkpoint is damaged, and an older one is loaded; on all ranks.
    Collective: all ranks of the group.
    Cost: each rank reads 1/N of state and parameters, and receives the parameters that it does not own. Rank
        0 reads all tables, and broadcasts them. Until all ranks have everything, each holds the parameters a
        second time, on their device: call `zero_grad()` before, if memory is short. Three all-gathers of 32
        bytes, one of 8.
    """
    _wait_for_pending(optimizer)
    with optimizer.accord.reloading() if parameters else contextlib.nullcontext():
        optimizer.current()
        return _read(optimizer, Path(directory).absolute(), parameters, save).take_effect()


def _read(
    optimizer: ZeroRedundancyOptimizer, path: Path, parameters: bool, save: int | str | None
) -> _Loading:
    """Read this rank's part of the newest checkpoint that is intact on all ranks. Collective."""
    comm = optimizer.collectives
    name = name_of(save) if isinstance(save, int) else save
    only = [f"save={name}"] if name is not None else []
    agree(comm, "find a sharded checkpoint", [f"directory {path}", f"parameters={parameters}", *only])
    skipped: dict[str, str] = {}  # folder name -> what is damaged in it; the same on all ranks
    while True:
        folder, tables = _find_and_share(comm, path, name, skipped)
        loading, problem = None, ""
        with agreement(comm, f"read the checkpoint {folder}"):
            try:
                loading = _Loading(optimizer, folder, tables, parameters)
            except DamagedError as error:
                problem = f"{error}"
        if not (problem := next(filter(None, gather_texts(comm, problem)), "")):
            assert loading is not None
            if skipped:
                found = "; ".join(skipped.values())
                warnings.warn(f"loading {folder}, since newer ones are damaged: {found}", stacklevel=4)
            return loading
        skipped[folder.name] = problem


_KINDS = (FileNotFoundError, OSError, ValueError, RuntimeError)


def _find_and_share(
    comm: Collectives, path: Path, name: str | None, skipped: dict[str, str]
) -> tuple[Path, list[Table]]:
    """A save and its tables, read by rank 0: N ranks need not open N files each. Adds to `skipped`."""
    found: list[Any] = []
    if comm.rank == 0:
        try:
            found = [*newest_intact(path, name, skipped), None, ""]
        except Exception as error:
            kind = next((n for n, kind in enumerate(_KINDS) if isinstance(error, kind)), len(_KINDS) - 1)
            found = ["", [], {}, kind, str(error)]
    # Not by agree: here all ranks raise the same kind of error, so that a script can catch it and start anew.
    folder_name, tables, damaged, kind, message = broadcast_json(comm, found, src=0)
    skipped.update(damaged)
    _KNOWN_DAMAGED.update(path / folder for folder in skipped)
    if kind is not None:
        raise _KINDS[kind](message)
    return path / folder_name, tables


def newest_intact(
    path: Path, name: str | None, skipped: Mapping[str, str]
) -> tuple[str, list[Table], dict[str, str]]:
    """The newest complete save whose tables are intact, or the one of that name; and all that are damaged."""
    saves = [save for save in saves_in(path) if name in (None, save.path.name)]
    if name is not None and not saves:
        raise FileNotFoundError(f"{path} has no save {name!r}.")
    problems = dict(skipped)
    for save in reversed(saves):
        if save.path.name in problems or (save.lacks and not save.problem):
            continue
        try:
            return save.path.name, read_tables(save.path), problems
        except DamagedError as error:
            problems[save.path.name] = str(error)
    if problems:
        raise DamagedError("; ".join(problems.values()))
    raise nothing_in(path, saves)


class _Loading:
    """What this rank has read of a checkpoint. Until `take_effect`, nothing is changed."""

    def __init__(
        self, optimizer: ZeroRedundancyOptimizer, folder: Path, tables: list[Table], parameters: bool
    ) -> None:
        self.optimizer, self.folder, self.parameters = optimizer, folder, parameters
        reader = ShardReader(folder, tables)
        self.contents = Contents(reader)
        self.facts = self.contents.check_fits(optimizer, parameters)
        self.shard = LoadedShard(reader, self.contents, optimizer, parameters)

    def take_effect(self) -> dict[str, Any]:
        """Send the parameters; load state and parameters when all ranks have them. Collective."""
        optimizer = self.optimizer
        before = [(own.window, own.window.clone()) for own, _ in self.shard.parameters]
        try:
            for own, values in self.shard.parameters:
                own.window.copy_(values)
            received = _exchange_parameters(optimizer) if self.parameters else []
            with optimizer.whole.loading(f"load the checkpoint {self.folder}") as facts:
                facts += self.facts
                optimizer.shard.load(self.shard.state, self.contents.state_dict["param_groups"])
        except BaseException:
            for window, values in before:
                window.copy_(values)
            raise
        for place, values in received:
            place.copy_(values)
        if self.parameters:
            torch.autograd.graph.increment_version(optimizer.built.params)
        return self.contents.notes


def _exchange_parameters(optimizer: ZeroRedundancyOptimizer) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Send what this rank owns and receive the rest, rounded to the broadcast dtype as after a step.

    Returns:
        Pairs (memory of parameters that others own, the values received for it).
    """
    comm, built = optimizer.collectives, optimizer.built
    received = []

    def set_apart(message: Message) -> Message:
        """With memory of its own where it is another rank's: parameters must not change if a rank fails."""
        if message.owner == comm.rank:
            return message._replace(whole=None)
        received.append((message.tensor, torch.empty_like(message.tensor)))
        return message._replace(tensor=received[-1][1], whole=None)

    trained = [set_apart(message) for message in built.messages]
    broadcast_messages(comm, trained, optimizer.broadcast_dtype, name=built.name)
    frozen = messages_by_parameter(built.partition, built.params, frozen=True)
    broadcast_messages(comm, [set_apart(message) for message in frozen])
    return received
