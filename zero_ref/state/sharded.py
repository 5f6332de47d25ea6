"""Checkpoints that no rank ever holds whole: each writes what it owns, each reads what it will own.

`save_sharded` and `save_sharded_async` write, `load_sharded` reads, at any other world size and partition.
Here stands what ranks say to each other; `contents.py` says what a rank writes and where it goes when
it is read, `files.py` how tensors lie in files and how damage is found, `saves.py` what lies in the
directory, and why an interrupted save leaves the one before it as it was, `save_owner.py` who may save there.

Planning, and the reading and writing of tensors, are torch.distributed.checkpoint's (DCP). Its own `save` and
`load` are not called: they exchange pickled objects between ranks, which a thread in the background must not
do while training sends other things. Here ranks agree before they write and after it, on the thread that
called; while they write each is alone, and says that it is done by a file.
"""

from __future__ import annotations

import contextlib
import json
import os
import warnings
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zero_ref.comm.agreement import agree, agreement
from zero_ref.comm.collectives import Collectives, broadcast_json, gather_texts
from zero_ref.optimizer.buckets import Message, broadcast_messages, messages_by_parameter
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.state.contents import Room, Saved, contents_of, facts_for_loading, slices_to_save
from zero_ref.state.durable import make_directory
from zero_ref.state.files import ShardReader, ShardWriter, Table, read_tables
from zero_ref.state.save_owner import Hold, take
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

    If it does not come to its end, for whatever reason, `load_sharded` goes on finding the one before. Hooks
    on `state_dict` are not called: there is none. `zero-ref checkpoints` lists what is there.

    >>> save_sharded(optimizer, "run7/checkpoint", notes={"iteration": 1200})  # doctest: +SKIP

    Args:
        directory: one that all ranks see, and no other optimizer saves to. Whatever else lies there stays.
        notes: what JSON can express, the same on all ranks; `load_sharded` returns it.
        parameters: write the parameters too, frozen ones included. A model's buffers, such as the running
            means of a BatchNorm, are no parameters: save them yourself.
        keep: so many complete saves stay; older ones go once the new one is complete.
        take_over: save even though the directory belongs to another job, of which you know that it is gone.
            After a crash it is found out by itself, at the latest 5 minutes later (`save_owner.py` says how).
    Raises:
        OSError: this rank could not write, such as for a full disk; names the file.
        TypeError: the state, an option or a note is none that can be saved.
        RuntimeError: another job saves into this directory; names it.
        RuntimeError, ValueError: another rank failed, stopped, or passes other arguments.
        If one rank raises, all raise.
    Collective: all ranks of the group.
    Cost: each rank writes its 1/N of state and parameters, and computes their SHA-256. Between
        ranks: two all-gathers of 32 bytes, one broadcast of the folder's name. On the disk for a while one
        save more than are kept.
    """
    save = _Save(optimizer, directory, notes, parameters, keep, take_over, as_copies=False)
    save.settle(save.write)


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

    The background thread talks to no other rank, so that training may go on, and communicate, in the
    meantime. The save is complete when the slowest rank has written, also if nobody waits for it. The next
    save or load of this optimizer waits for it first.

    Returns:
        Its `wait()` returns when the save is complete, or raises what went wrong.
    Raises:
        As `save_sharded`; what goes wrong in writing is raised by `wait()`, or else by the next save or load.
    Collective: all ranks of the group.
    Cost: as `save_sharded`, and in CPU memory a copy of what this rank writes until it is written.
    """
    save = _Save(optimizer, directory, notes, parameters, keep, take_over, as_copies=True)
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="save_sharded")
    pending = PendingSave(save, thread.submit(save.write))
    thread.shutdown(wait=False)  # ends when it has written, and the interpreter waits for that
    _PENDING[optimizer] = pending
    return pending


class PendingSave:
    """A sharded save under way in the background."""

    def __init__(self, save: _Save, writing: Future[None]) -> None:
        self._save, self._writing = save, writing
        self._waited_for = False

    def done(self) -> bool:
        """This rank has written its part, or failed to. The others may still write."""
        return self._writing.done()

    def wait(self) -> None:
        """Return when the save is complete; later calls return immediately.

        Raises:
            OSError: this rank could not write its part.
            RuntimeError: another rank could not, or stopped.
        Collective: all ranks of the group.
        """
        if self._waited_for:
            return
        self._waited_for = True
        self._save.settle(self._writing.result)


_PENDING: weakref.WeakKeyDictionary[ZeroRedundancyOptimizer, PendingSave] = weakref.WeakKeyDictionary()
"""The last save of each optimizer that went to the background."""

_HELD: weakref.WeakKeyDictionary[ZeroRedundancyOptimizer, set[Hold]] = weakref.WeakKeyDictionary()
"""The directories that an optimizer has saved to, which belong to this job for as long as it lives."""

_KNOWN_DAMAGED: set[Path] = set()
"""Saves that were skipped in loading: where saves are counted, they do not count."""


def _wait_for_pending(optimizer: ZeroRedundancyOptimizer) -> None:
    pending = _PENDING.pop(optimizer, None)
    if pending is not None:
        pending.wait()


class _Save:
    """A save: what this rank will write is collected, and a folder is made for it. Collective."""

    @torch.no_grad()
    def __init__(
        self,
        optimizer: ZeroRedundancyOptimizer,
        directory: Directory,
        notes: Mapping[str, Any] | None,
        parameters: bool,
        keep: int,
        take_over: bool,
        as_copies: bool,
    ) -> None:
        _wait_for_pending(optimizer)
        optimizer.current()
        self.comm, self.keep = optimizer.collectives, keep
        self.hold: Hold | None = None
        path = Path(directory).absolute()
        name, id_ = "", ""
        with agreement(self.comm, "save a sharded checkpoint") as facts:
            if type(keep) is not int or keep < 1:
                raise ValueError(
                    f"rank {self.comm.rank}: keep takes a number of saves from 1 on, not {keep!r}."
                )
            notes_text = _notes_as_json(notes)
            tensors, lines = slices_to_save(optimizer, parameters, as_copies)
            contents: dict[str, Any] = {"state": lines}
            if self.comm.rank == 0:  # what all ranks know is written by one
                contents |= {"notes": json.loads(notes_text), **contents_of(optimizer)}
                make_directory(path)
                self.hold = take(path, take_over)
                _HELD.setdefault(optimizer, set()).add(self.hold)
                self.folder, mark = new_save(path, self.comm.world_size, self.hold.owner._asdict())
                self.hold.first = self.hold.first or mark.number
                self._remove_old()
                name, id_ = self.folder.name, mark.id
            facts += [f"directory {path}", f"parameters={parameters}", f"keep={keep}", f"notes {notes_text}"]
            facts += optimizer.standing_facts()
        name, id_ = broadcast_json(self.comm, [name, id_], src=0)
        self.folder = path / name
        writer = ShardWriter(self.folder, self.comm.rank, self.comm.world_size, contents, id_)
        self._unwritten: list[Callable[[], None]] = [partial(writer.save, tensors)]

    def write(self) -> None:
        """Write this rank's part, once: what it holds is then freed."""
        self._unwritten.pop()()

    def settle(self, written: Callable[[], None]) -> None:
        """Hear from all ranks that they have written; only then do older saves go. Collective."""
        with agreement(self.comm, f"complete the checkpoint {self.folder}"):
            written()
        with contextlib.suppress(OSError):  # what stays now can go at the next save
            self._remove_old()

    def _remove_old(self) -> None:
        if self.hold is not None and self.hold.is_valid():
            damaged = {path.name for path in _KNOWN_DAMAGED if path.parent == self.folder.parent}
            remove_old(self.folder, self.keep, self.hold.may_remove, damaged)


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
    """Take over the newest intact checkpoint, saved at any world size and under any partition.

    Each rank reads the ranges that it owns, and checks them. Parameters then travel as after a step: one rank
    reads each element and sends it to the others, since a network between ranks is faster than a file system
    that all of them read the whole model from. All of it takes effect on all ranks, or nothing does.

    >>> iteration = load_sharded(optimizer, "run7/checkpoint")["iteration"]  # doctest: +SKIP

    Args:
        directory: what was passed to `save_sharded`.
        parameters: load the parameters too. They were saved with `parameters=True`.
        save: take this one and no other: its number, or the name of its folder, such as "save-00000007".
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
    with optimizer.accord.made_good() if parameters else contextlib.nullcontext():
        optimizer.current()
        return _read(optimizer, Path(directory).absolute(), parameters, save).take_effect()


def _read(
    optimizer: ZeroRedundancyOptimizer, path: Path, parameters: bool, save: int | str | None
) -> _Loading:
    """Read this rank's part of the newest checkpoint that is intact on all ranks. Collective."""
    comm = optimizer.collectives
    name = name_of(save) if isinstance(save, int) else save
    agree(
        comm,
        "find a sharded checkpoint",
        [f"directory {path}", f"parameters={parameters}"] + [f"save={name}"] * (name is not None),
    )
    skipped: dict[str, str] = {}  # the damaged ones, and what is wrong with them; the same on all ranks
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


class _Found(NamedTuple):
    """What rank 0 tells the others: a folder and its tables, or an error."""

    name: str
    tables: list[Table]
    skipped: dict[str, str]
    kind: int | None = None
    error: str = ""


def _find_and_share(
    comm: Collectives, path: Path, name: str | None, skipped: dict[str, str]
) -> tuple[Path, list[Table]]:
    """A save and its tables, read by rank 0: N ranks need not open N files each. Adds to `skipped`."""
    found: _Found | None = None
    if comm.rank == 0:
        try:
            found = _newest_intact(path, name, skipped)
        except Exception as error:
            kind = next((n for n, kind in enumerate(_KINDS) if isinstance(error, kind)), len(_KINDS) - 1)
            found = _Found("", [], {}, kind, str(error))
    # Not by agree: here all ranks raise the same kind of error, so that a script can catch it and start anew.
    found = _Found(*broadcast_json(comm, found, src=0))
    skipped.update(found.skipped)
    _KNOWN_DAMAGED.update(path / name for name in skipped)
    if found.kind is not None:
        raise _KINDS[found.kind](found.error)
    return path / found.name, found.tables


def _newest_intact(path: Path, name: str | None, skipped: Mapping[str, str]) -> _Found:
    """The newest complete save whose tables are intact, or the one of that name."""
    saves = [save for save in saves_in(path) if name in (None, save.path.name)]
    if name is not None and not saves:
        raise FileNotFoundError(f"{path} has no save {name!r}.")
    problems = dict(skipped)
    for save in reversed(saves):
        if save.path.name in problems or (save.lacks and not save.problem):
            continue
        try:
            return _Found(save.path.name, read_tables(save.path), problems)
        except DamagedError as error:
            problems[save.path.name] = str(error)
    if problems:
        raise DamagedError("; ".join(problems.values()))
    raise nothing_in(path, saves)


class _Loading:
    """What this rank has read of a checkpoint. Nothing has been changed yet."""

    def __init__(
        self, optimizer: ZeroRedundancyOptimizer, folder: Path, tables: list[Table], parameters: bool
    ) -> None:
        self.optimizer, self.folder, self.parameters = optimizer, folder, parameters
        reader = ShardReader(folder, tables)
        self.saved = Saved.of(reader)
        self.facts = facts_for_loading(self.saved, optimizer, parameters)
        self.room = Room(self.saved, optimizer, parameters)
        self.room.read(reader, self.saved)

    def take_effect(self) -> dict[str, Any]:
        """Send the parameters; load all of it when all ranks have everything. Collective."""
        optimizer = self.optimizer
        before = [(own.window, own.window.clone()) for own, _ in self.room.parameters]
        try:
            for own, values in self.room.parameters:
                own.window.copy_(values)
            arrived = _exchange_parameters(optimizer) if self.parameters else []
            with optimizer.loading(f"load the checkpoint {self.folder}") as facts:
                facts += self.facts
                optimizer.shard.load(self.room.state, self.room.saved_groups)
        except BaseException:
            for window, values in before:
                window.copy_(values)
            raise
        for place, values in arrived:
            place.copy_(values)
        if self.parameters:
            torch.autograd.graph.increment_version(optimizer.built.params)
        return self.saved.notes


def _exchange_parameters(optimizer: ZeroRedundancyOptimizer) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Send what this rank owns, receive the rest: trained parameters as after a step, also rounded as then.

    Returns:
        Where the parameters of others belong, and what has come for there.
    """
    comm, built = optimizer.collectives, optimizer.built
    frozen = messages_by_parameter(built.partition, built.params, frozen=True)
    arrived = []

    def aside(message: Message) -> Message:
        """Another rank's message with room of its own: half of the messages may never come."""
        if message.owner == comm.rank:
            return message
        room = torch.empty_like(message.tensor)
        arrived.append((message.tensor, room))
        return message._replace(tensor=room)

    trained = [*map(aside, built.messages)]
    broadcast_messages(comm, trained, optimizer.broadcast_dtype, name=built.name)
    broadcast_messages(comm, [*map(aside, frozen)])
    return arrived
