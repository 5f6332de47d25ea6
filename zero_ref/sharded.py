"""Checkpoints that no rank ever holds whole: each writes what it owns, each reads what it will own.

`save_sharded` and `save_sharded_async` write, `load_sharded` reads, at any other world size and partition.
Here stands what ranks say to each other; `shard_contents.py` says what a rank writes and where it goes when
it is read, `shard_files.py` what lies in the directory, and why an interrupted save leaves the one before it
as it was.

Planning, and the reading and writing of tensors, are torch.distributed.checkpoint's (DCP). Its own `save` and
`load` are not called: they exchange pickled objects between ranks, which a thread in the background must not
do while training sends other things. Here ranks agree before they write and after it, on the thread that
called; while they write each is alone, and says that it is done by a file.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from zero_ref.buckets import broadcast_messages, messages_by_parameter
from zero_ref.collectives import Collectives, agree, agreement, broadcast_json
from zero_ref.optimizer import ZeroRedundancyOptimizer
from zero_ref.shard_contents import Room, Saved, contents_of, facts_for_loading, slices_to_save
from zero_ref.shard_files import (
    ShardReader,
    ShardWriter,
    Table,
    make_folder,
    newest_complete,
    read_tables,
    remove_older,
)

Directory = str | os.PathLike[str]


# ------------------------------------------------------------------------------------------------- to save


def save_sharded(
    optimizer: ZeroRedundancyOptimizer,
    directory: Directory,
    *,
    notes: Mapping[str, Any] | None = None,
    parameters: bool = True,
) -> None:
    """Write a checkpoint, each rank what it owns: the optimizer's state and the parameters.

    If it does not come to its end, for whatever reason, `load_sharded` goes on finding the one before. Hooks
    on `state_dict` are not called: there is none.

    >>> save_sharded(optimizer, "run7/checkpoint", notes={"iteration": 1200})  # doctest: +SKIP

    Args:
        directory: one that all ranks see, and no other optimizer saves to. Once the new save is complete the
            older ones in it are removed.
        notes: what JSON can express, the same on all ranks; `load_sharded` returns it.
        parameters: write the parameters too, frozen ones included. A model's buffers, such as the running
            means of a BatchNorm, are no parameters: save them yourself.
    Raises:
        OSError: this rank could not write, such as for a full disk; names the file.
        TypeError: the state, an option or a note is none that can be saved.
        RuntimeError, ValueError: another rank failed, stopped, or passes other arguments.
        If one rank raises, all raise.
    Collective: all ranks of the group.
    Cost: each rank writes its 1/N of state and parameters. Between ranks: two all-gathers of 32 bytes, one
        broadcast of the folder's name.
    """
    folder, write = _prepare(optimizer, directory, notes, parameters, as_copies=False)
    _settle(optimizer.collectives, folder, write)


def save_sharded_async(
    optimizer: ZeroRedundancyOptimizer,
    directory: Directory,
    *,
    notes: Mapping[str, Any] | None = None,
    parameters: bool = True,
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
    folder, write = _prepare(optimizer, directory, notes, parameters, as_copies=True)
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="save_sharded")
    pending = PendingSave(optimizer.collectives, folder, thread.submit(write))
    thread.shutdown(wait=False)  # ends when it has written, and the interpreter waits for that
    _PENDING[optimizer] = pending
    return pending


class PendingSave:
    """A sharded save under way in the background."""

    # It does not hold what it writes: the copies are freed as soon as they are written.
    def __init__(self, comm: Collectives, folder: Path, writing: Future[None]) -> None:
        self._comm, self._folder, self._writing = comm, folder, writing
        self._waited_for = False

    def done(self) -> bool:
        """This rank has written its part, or failed to. The others may still write."""
        return self._writing.done()

    def wait(self) -> None:
        """Return when the save is complete; a second time at once.

        Raises:
            OSError: this rank could not write its part.
            RuntimeError: another rank could not, or stopped.
        Collective: all ranks of the group.
        """
        if self._waited_for:
            return
        self._waited_for = True
        _settle(self._comm, self._folder, self._writing.result)


_PENDING: weakref.WeakKeyDictionary[ZeroRedundancyOptimizer, PendingSave] = weakref.WeakKeyDictionary()
"""The last save of each optimizer that went to the background."""


def _wait_for_pending(optimizer: ZeroRedundancyOptimizer) -> None:
    pending = _PENDING.pop(optimizer, None)
    if pending is not None:
        pending.wait()


def _settle(comm: Collectives, folder: Path, write: Callable[[], None]) -> None:
    """Write, and hear from all ranks that they have; only then do the older saves go. Collective."""
    with agreement(comm, f"complete the checkpoint {folder}"):
        write()
    if comm.rank == 0:
        remove_older(folder)


@torch.no_grad()
def _prepare(
    optimizer: ZeroRedundancyOptimizer,
    directory: Directory,
    notes: Mapping[str, Any] | None,
    parameters: bool,
    as_copies: bool,
) -> tuple[Path, Callable[[], None]]:
    """Collect what this rank will write; give the folder that is made for it, and what writes. Collective."""
    _wait_for_pending(optimizer)
    optimizer._rebuild_if_changed()
    comm = optimizer.collectives
    path = Path(directory).absolute()
    name = ""
    with agreement(comm, "save a sharded checkpoint") as facts:
        notes_text = _notes_as_json(notes)
        tensors, lines = slices_to_save(optimizer, parameters, as_copies)
        contents: dict[str, Any] = {"state": lines}
        if comm.rank == 0:  # what all ranks know is written by one
            contents |= {"notes": json.loads(notes_text), **contents_of(optimizer)}
            name = make_folder(path).name
        facts += [f"directory {path}", f"parameters={parameters}", f"notes {notes_text}"]
    folder = path / broadcast_json(comm, name, src=0)
    return folder, partial(ShardWriter(folder, comm.rank, comm.world_size, contents).save, tensors)


def _notes_as_json(notes: Mapping[str, Any] | None) -> str:
    try:
        return json.dumps(notes or {}, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise TypeError(f"notes must be what JSON can express: {error}.") from error


# ------------------------------------------------------------------------------------------------- to load


@torch.no_grad()
def load_sharded(
    optimizer: ZeroRedundancyOptimizer, directory: Directory, *, parameters: bool = True
) -> dict[str, Any]:
    """Take over the newest complete checkpoint, saved at any world size and under any partition.

    Each rank reads the ranges that it owns. Parameters then travel as after a step: one rank reads each
    element and sends it to the others, since a network between ranks is faster than a file system that all of
    them read the whole model from.

    >>> iteration = load_sharded(optimizer, "run7/checkpoint")["iteration"]  # doctest: +SKIP

    Args:
        directory: what was passed to `save_sharded`.
        parameters: load the parameters too. They were saved with `parameters=True`.
    Returns:
        The notes passed to `save_sharded`; tuples in them have become lists.
    Raises:
        FileNotFoundError: there is no complete checkpoint.
        ValueError: it is of another model, which names the parameter, or damaged, which names the file.
        RuntimeError: another rank could not read, or stopped.
        If one rank raises, all raise, and optimizer and parameters are as they were.
    Collective: all ranks of the group.
    Cost: each rank reads 1/N of state and parameters, and receives the parameters that it does not own. Rank
        0 reads all tables, and broadcasts them. Two all-gathers of 32 bytes.
    """
    _wait_for_pending(optimizer)
    optimizer._rebuild_if_changed()
    comm = optimizer.collectives
    folder, tables = _find_and_share(comm, Path(directory).absolute(), parameters)
    with optimizer._loading(f"load the checkpoint {folder}") as facts:
        reader = ShardReader(folder, tables)
        saved = Saved.of(reader)
        facts += facts_for_loading(saved, optimizer, parameters)
        room = Room(saved, optimizer, parameters)
        reader.load(room.tensors, saved.metadata)
        room.load_state(optimizer)
    if parameters:
        for own, values in room.parameters:
            own.local.detach().copy_(values)
        _send_parameters(optimizer)
    return saved.notes


def _send_parameters(optimizer: ZeroRedundancyOptimizer) -> None:
    """Bring what each rank owns to all: trained parameters as after a step, also rounded as then."""
    params = optimizer._params
    frozen = messages_by_parameter(optimizer.partition, params, frozen=True)
    broadcast_messages(optimizer.collectives, optimizer._messages, optimizer.broadcast_dtype)
    broadcast_messages(optimizer.collectives, frozen)
    torch.autograd.graph.increment_version(params)


_KINDS = (FileNotFoundError, OSError, ValueError, RuntimeError)


def _find_and_share(comm: Collectives, path: Path, parameters: bool) -> tuple[Path, list[Table]]:
    """The newest complete save and its tables, read by rank 0: N ranks need not open N files each."""
    agree(comm, "find a sharded checkpoint", [f"directory {path}", f"parameters={parameters}"])
    found: list[Any] = []
    if comm.rank == 0:
        try:
            folder = newest_complete(path)
            found = [folder.name, read_tables(folder), None]
        except Exception as error:
            kind = next((n for n, kind in enumerate(_KINDS) if isinstance(error, kind)), len(_KINDS) - 1)
            found = [str(error), [], kind]
    # Not by agree: here all ranks raise the same kind of error, so that a script can catch it and start anew.
    text, tables, kind = broadcast_json(comm, found, src=0)
    if kind is not None:
        raise _KINDS[kind](text)
    return path / text, tables
