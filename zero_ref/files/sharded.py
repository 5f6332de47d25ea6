"""Checkpoints that no rank ever holds whole: each rank writes what it owns, and reads what it will own.

This module adds to `state_dict` of `stairs/owners.py` that nothing is gathered, that a save may go on in the
background, and that an interrupted save leaves the save before it as it was. `save_sharded` and
`save_sharded_async` write a checkpoint. `load_sharded` reads it, at any other world size and partition. All
communication is in this module. It uses

    contents.py       what a rank stores of an optimizer: named flat tensors, and JSON
    shard_files.py    how these lie in a rank's two files, and how damage is found
    saves.py          the folders of a directory: which save is complete, which may be removed
    save_owner.py     which job may save into a directory

A save has four phases:

1. Prepare: rank 0 makes the folder, and ranks agree on what they save. If they do not agree, the folder stays
   empty, and the next save removes it.
2. Write: each rank writes its own files. The last of them, its table, says that the rank is done.
3. Seal: ranks agree that all have written.
4. Tidy: rank 0 removes older saves.

Only the first and the third phase communicate, on the calling thread, so that the second can go on in the
background.

A load has four phases, too:

1. Find: rank 0 reads the tables of the newest save, and sends them to all ranks.
2. Read: each rank checks that the save is of its model, reads what it will own, and checks the checksums. If
   a rank finds damage, all ranks go back to phase 1, for an older save.
3. Exchange: owners send their parameters to the other ranks, which keep them apart.
4. Load: ranks agree that all have everything, and only then replace state and parameters.

The `save` and `load` of torch.distributed.checkpoint (DCP) are not called: they exchange pickled objects
between ranks, which a background thread must not do while training communicates.
"""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zero_ref.comm.agreement import TOLD
from zero_ref.comm.objects import broadcast_json
from zero_ref.files.contents import Contents, LoadedShard, contents_of, ranges_to_save
from zero_ref.files.durable import make_directory
from zero_ref.files.save_owner import Ownership, become_owner
from zero_ref.files.saves import DamagedError, new_save, remove_old
from zero_ref.files.shard_files import Ranges, ShardReader, ShardWriter, newest_intact
from zero_ref.optimizer.accord import Accord
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.shard.buckets import Message, broadcast_messages, messages_by_parameter

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
    """Write a checkpoint: each rank writes the optimizer's state and the parameters that it owns.

    If the save is interrupted, for whatever reason, `load_sharded` still finds the save before. Hooks on
    `state_dict` are not called, since no state dict is made. `zero-ref checkpoints` lists the saves of a
    directory.

    >>> save_sharded(optimizer, "run7/checkpoint", notes={"iteration": 1200})  # doctest: +SKIP

    Args:
        directory: a directory that all ranks see, and that no other optimizer saves to. Other files in it
            stay.
        notes: what JSON can express, the same on all ranks; `load_sharded` returns it.
        parameters: write the parameters too, including frozen ones. A model's buffers, such as the running
            means of a BatchNorm, are no parameters: save them yourself.
        keep: the number of complete saves that stay; older saves are removed once the new one is complete.
        take_over: save even though another job was saving here, which you know to be gone. Without
            this option a save that was interrupted on another host is an error (see `save_owner.py`).
    Raises:
        OSError: this rank could not write, such as for a full disk; names the file.
        TypeError: the state, an option or a note cannot be saved.
        RuntimeError: another process saves into this directory, or was interrupted there; names it.
        RuntimeError, ValueError: another rank failed, stopped, or passes other arguments.
        If one rank raises, all raise.
    Collective: all ranks of the group.
    Cost: each rank writes its 1/N of state and parameters, and computes their SHA-256. Between ranks: two
        all-gathers of 32 bytes, one broadcast of the folder's name. Until the new save is complete, the disk
        has one save more than `keep`.
    """
    save = _prepare_save(optimizer, directory, notes, parameters, keep, take_over)
    save.complete(save.write())


def save_sharded_async(
    optimizer: ZeroRedundancyOptimizer,
    directory: Directory,
    *,
    notes: Mapping[str, Any] | None = None,
    parameters: bool = True,
    keep: int = 2,
    take_over: bool = False,
) -> PendingSave:
    """Save as `save_sharded` does, but return when the state is copied, and write in the background.

    The background thread does not communicate, so training may go on and communicate. The save is complete
    when the slowest rank has written, even if nobody waits for it. The next save or load of this optimizer
    waits for it first.

    Returns:
        An object whose `wait()` returns when the save is complete, or raises what went wrong.
    Raises:
        As `save_sharded`; an error in writing is raised by `wait()`, or else by the next save or load.
    Collective: all ranks of the group.
    Cost: as `save_sharded`, and in CPU memory a copy of what this rank writes until it is written.
    """
    save = _prepare_save(optimizer, directory, notes, parameters, keep, take_over, as_copies=True)
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="save_sharded")
    pending = PendingSave(save, thread.submit(save.write))
    optimizer.saves.begin(pending)
    # The thread ends when it has written. The interpreter does not exit before.
    thread.shutdown(wait=False)
    return pending


class PendingSave:
    """A sharded save under way in the background."""

    def __init__(self, save: _PreparedSave, writing: Future[Exception | None]) -> None:
        self._unsealed: _PreparedSave | None = save
        self._writing = writing

    def done(self) -> bool:
        """Whether this rank has written its part, or failed to. Other ranks may still write."""
        return self._writing.done()

    def wait(self) -> None:
        """Return when the save is complete; later calls return immediately.

        Raises:
            OSError: this rank could not write its part.
            RuntimeError: another rank could not write its part, or stopped.
        Collective: all ranks of the group.
        """
        # Also after an error the save is not completed again: the other ranks would not take part.
        save, self._unsealed = self._unsealed, None
        if save is not None:
            save.complete(self._writing.result())


@dataclass
class _PreparedSave:
    """A save that ranks have agreed on: this rank has yet to `write` and `complete` it.

    Args:
        folder: the new save's folder, the same on all ranks.
        ranges: the ranges that this rank writes; freed when they are written.
        damaged: the folders of saves that do not count as saves to keep.
        ownership: the ownership of the directory, on rank 0; None on other ranks.
    """

    accord: Accord
    folder: Path
    writer: ShardWriter
    ranges: dict[str, Ranges]
    keep: int
    damaged: set[Path]
    ownership: Ownership | None

    def write(self) -> Exception | None:
        """Write this rank's files, without communication; return the error, if any, for `complete`."""
        try:
            self.writer.finish(*self.writer.write_data(self.ranges))
        except Exception as error:
            return error
        finally:
            # Free the copies of a background save, though nobody may have waited for it.
            self.ranges = {}
        return None

    def complete(self, failure: Exception | None) -> None:
        """Return when all ranks have written; raise on all ranks if one has failed. Collective."""
        try:
            self.accord.agree(f"complete the checkpoint {self.folder}", failure or [])
            self.tidy()
        finally:
            if self.ownership is not None:
                self.ownership.end()

    def tidy(self) -> None:
        """Remove older saves and what interrupted saves have left, on rank 0."""
        # Another job may have taken the directory over while this one wrote.
        if self.ownership is not None and self.ownership.is_valid():
            # The checkpoint is complete whether or not this succeeds. The next save tries again.
            with contextlib.suppress(OSError):
                remove_old(self.folder, self.keep, self.damaged)


@torch.no_grad()
def _prepare_save(
    optimizer: ZeroRedundancyOptimizer,
    directory: Directory,
    notes: Mapping[str, Any] | None,
    parameters: bool,
    keep: int,
    take_over: bool,
    as_copies: bool = False,
) -> _PreparedSave:
    """Collect what this rank writes; return when all ranks have, and rank 0 has made a folder. Collective."""
    optimizer.saves.finish()
    optimizer.current()
    comm, path = optimizer.collectives, Path(directory).absolute()
    ownership, name_and_id = None, ["", ""]
    with contextlib.ExitStack() as on_failure:
        with optimizer.accord.preparing("save a sharded checkpoint") as facts:
            # 1. Each rank collects what it is to write. If a rank fails here, all ranks raise.
            if type(keep) is not int or keep < 1:
                raise ValueError(f"rank {comm.rank}: keep takes a number of saves from 1 on, not {keep!r}.")
            notes_text = _notes_as_json(notes)
            ranges, entries = ranges_to_save(optimizer, parameters, as_copies)
            contents: dict[str, Any] = {"state": entries}
            # 2. Rank 0 makes this process the owner of the directory, and makes a folder for the save.
            if comm.rank == 0:
                contents |= {"notes": json.loads(notes_text), **contents_of(optimizer)}
                make_directory(path)
                ownership = become_owner(path, take_over)
                on_failure.callback(ownership.end)
                folder, mark = new_save(path, comm.world_size, ownership.owner._asdict())
                name_and_id = [folder.name, mark.id]
            # 3. All ranks compare what they are about to save, and learn that rank 0 owns the directory.
            facts += [f"directory {path}", f"parameters={parameters}", f"keep={keep}", f"notes {notes_text}"]
            facts += optimizer.standing_facts()
        # All ranks have agreed. Rank 0 tells them the folder.
        name, id_ = broadcast_json(comm, name_and_id, src=0)
        writer = ShardWriter(path / name, comm.rank, comm.world_size, contents, id_)
        save = _PreparedSave(
            optimizer.accord, path / name, writer, ranges, keep, optimizer.saves.damaged, ownership
        )
        # What interrupted saves have left may be what fills the disk, so remove it before writing.
        save.tidy()
        # The directory stays this process's own until the save is complete.
        on_failure.pop_all()
    return save


def _notes_as_json(notes: Mapping[str, Any] | None) -> str:
    """Write the notes as JSON, with sorted keys, so that ranks can compare the text."""
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

    Each rank reads the ranges that it owns, and checks them. Owners then broadcast the parameters, as after a
    step: each element is read by one rank, since a network between ranks is faster than a file system from
    which all ranks read the whole model. Either the whole checkpoint takes effect on all ranks, or nothing
    does.

    >>> iteration = load_sharded(optimizer, "run7/checkpoint")["iteration"]  # doctest: +SKIP

    Args:
        directory: the directory that was passed to `save_sharded`.
        parameters: load the parameters too; they must have been saved with `parameters=True`. Values of 32
            bits become the masters of 16-bit parameters, and masters become the values of 32-bit parameters.
        save: load this checkpoint and no other: its number, or the name of its folder, such as
            "save-00000007".
    Returns:
        The notes passed to `save_sharded`; tuples in them have become lists.
    Raises:
        FileNotFoundError: there is no complete checkpoint, or not the one that `save` names.
        ValueError: the checkpoint is of another model or optimizer, and the parameter is named; or all
            checkpoints are damaged, and file, parameter and rank are named.
        RuntimeError: another rank could not read, or stopped. If one rank raises, all raise, and optimizer
            and parameters are as they were. Only if the network fails in the very last message, a rank
            cannot know whether the others have loaded. It then refuses to step until it has loaded
            parameters again.
    Warns:
        UserWarning: the newest checkpoint is damaged, and an older one is loaded; on all ranks.
    Collective: all ranks of the group.
    Cost: each rank reads 1/N of state and parameters, and receives the parameters that it does not own. Rank
        0 reads all tables, and broadcasts them. Until all ranks have everything, each has the parameters a
        second time, on their device: call `zero_grad()` before, if memory is short. Four all-gathers of 32
        bytes.
    """
    optimizer.saves.finish()
    with optimizer.accord.reloading() if parameters else contextlib.nullcontext():
        optimizer.current()
        folder, loaded = _read_newest(optimizer, Path(directory).absolute(), parameters, save)
        _take_effect(optimizer, folder, loaded, parameters)
    return loaded.contents.notes


def _read_newest(
    optimizer: ZeroRedundancyOptimizer, path: Path, parameters: bool, save: int | str | None
) -> tuple[Path, LoadedShard]:
    """Read this rank's part of the newest checkpoint that is intact on all ranks. Collective.

    Returns:
        The folder of the checkpoint, and this rank's part.
    """
    # 1. Ranks agree on what they look for, since rank 0 looks for all of them.
    accord, comm = optimizer.accord, optimizer.collectives
    facts = [f"directory {path}", f"parameters={parameters}", f"save={save}"]
    accord.agree("find a sharded checkpoint", facts)
    # They try one save after the other. Folder name -> what is damaged in it; the same on all ranks.
    skipped: dict[str, str] = {}
    while True:
        # 2. Rank 0 finds the save and reads its tables for all, so that N ranks need not open N files each.
        found = None
        with _raising_alike(accord, "read the tables of a checkpoint", FileNotFoundError, DamagedError):
            if comm.rank == 0:
                found = newest_intact(path, save, skipped)
        name, tables, skipped = broadcast_json(comm, found, src=0)
        folder = path / name
        optimizer.saves.damaged.update(path / name for name in skipped)
        # 3. Each rank reads its part. Damage in the data is seen only by the rank that reads them.
        try:
            with _raising_alike(accord, f"read the checkpoint {folder}", DamagedError):
                loaded = LoadedShard(Contents(ShardReader(folder, tables)), optimizer, parameters)
        except DamagedError as error:
            # An older save may be intact.
            skipped[folder.name] = str(error)
            continue
        if skipped:
            reasons = "; ".join(skipped.values())
            warnings.warn(f"loading {folder}, since newer ones are damaged: {reasons}", stacklevel=4)
        return folder, loaded


@contextlib.contextmanager
def _raising_alike(accord: Accord, action: str, *kinds: type[Exception]) -> Iterator[None]:
    """A block from which all ranks raise an exception of one of these classes if one rank does.

    A script may catch a FileNotFoundError, and start anew. From a DamagedError, ranks turn to an older save.
    """
    try:
        with accord.preparing(action):
            yield
    except RuntimeError as error:
        name, _, text = vars(error).get(TOLD, "").partition(": ")
        for kind in kinds:
            if kind.__name__ == name:
                raise kind(text) from error
        raise


def _take_effect(
    optimizer: ZeroRedundancyOptimizer, folder: Path, loaded: LoadedShard, parameters: bool
) -> None:
    """Exchange the parameters; load state and parameters when all ranks have everything. Collective."""
    # If anything fails on any rank, the parameters that this rank owns get their old values back.
    before = [(own.window, own.window.clone()) for own, _ in loaded.parameters]
    try:
        # 1. Broadcasts send the parameters that this rank owns, so these get their values first.
        for own, values in loaded.parameters:
            own.window.copy_(values)
        received = _exchange_parameters(optimizer) if parameters else []
        # 2. Load the state, and agree for the last time: all ranks have everything, or all raise.
        with optimizer.whole.loading(f"load the checkpoint {folder}"):
            optimizer.shard.load(loaded.state, loaded.contents.state_dict["param_groups"])
    except BaseException:
        for window, values in before:
            window.copy_(values)
        raise
    # 3. All ranks have agreed. Write the parameters that other ranks own, which cannot fail.
    for place, values in received:
        place.copy_(values)
    if parameters:
        # Autograd must refuse a backward that needs the old values.
        torch.autograd.graph.increment_version(optimizer.built.params)


def _exchange_parameters(optimizer: ZeroRedundancyOptimizer) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Send the parameters that this rank owns, and receive the others, rounded as after a step. Collective.

    Returns:
        Pairs (memory of parameters that other ranks own, the values received for it).
    """
    comm, built = optimizer.collectives, optimizer.built
    received = []

    def with_own_memory(message: Message) -> Message:
        """Receive into new memory: parameters must not change if a rank fails."""
        if message.owner == comm.rank:
            return message._replace(whole=None)
        received.append((message.tensor, torch.empty_like(message.tensor)))
        return message._replace(tensor=received[-1][1], whole=None)

    # After a step only trained parameters are sent. A load also sends the frozen ones, in their own dtype.
    trained = [with_own_memory(message) for message in built.messages]
    broadcast_messages(comm, trained, optimizer.registered.options.broadcast_dtype, name=built.name)
    frozen = messages_by_parameter(built.partition, built.params, frozen=True)
    broadcast_messages(comm, [with_own_memory(message) for message in frozen])
    return received
