"""The checkpoints from which the main job goes on: one whole file, or sharded saves in a directory.

`Checkpoints` does nothing, `WholeFile` and `ShardedSaves` load and save; `checkpoints_for` chooses. In a
directory of saves rank 0 also keeps `steps.jsonl`, a line for each step that was trained. A step that was
trained again after a rank was lost has several lines, of which the last counts, since it belongs to what the
newest save holds: `stretches` and `counted` tell which steps ran on how many ranks.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from zero_ref.comm.agreement import agree
from zero_ref.comm.backend import as_collectives
from zero_ref.files.durable import make_directory, replacing
from zero_ref.files.saves import DamagedError, saves_in
from zero_ref.files.shard_files import read_tables
from zero_ref.files.sharded import load_sharded, save_sharded
from zero_ref.lab import stage_3
from zero_ref.lab.config import GPTConfig, TrainConfig
from zero_ref.lab.model import GPT
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.shard.owned import MASTER

STEPS = "steps.jsonl"


class NothingLeftError(Exception):
    """All steps that were asked for have been trained; there is no error to correct."""


class Losses:
    """Training losses by step, the mean over ranks. They are averaged only when asked for: no step waits."""

    def __init__(self, means: Sequence[float] = ()) -> None:
        self._means = list(means)
        self._own: list[torch.Tensor] = []

    def add(self, loss: torch.Tensor) -> None:
        """Add this rank's loss of the next step."""
        self._own.append(loss.detach())

    def means(self) -> list[float]:
        """The losses of all steps so far.

        Collective: all ranks of the default group.
        Cost: one all-reduce of a number for each step that was added since the last call.
        """
        if self._own:
            new = torch.stack(self._own)
            dist.all_reduce(new)
            self._means += (new / dist.get_world_size()).tolist()
            self._own.clear()
        return list(self._means)


class Checkpoints:
    """The checkpoints of a run that begins at step 0 and saves nothing; the base of the other classes."""

    def load(self) -> tuple[int, Losses]:
        """Load model and optimizer; return the number of steps done, and their losses if these were saved.

        Collective: all ranks. What one rank cannot read is an error on all.
        """
        return 0, Losses()

    def reached(self, step: int) -> None:
        """Note that so many steps are done. Nothing is sent."""

    def save(self, step: int, losses: Losses) -> None:
        """Save model and optimizer after so many steps.

        Collective: all ranks; all go on when it is complete.
        """


def checkpoints_for(config: TrainConfig, model: GPT, optimizer: torch.optim.Optimizer) -> Checkpoints:
    """The form of checkpoint that the config names."""
    if config.checkpoint_dir:
        assert isinstance(optimizer, ZeroRedundancyOptimizer)  # as `config.shard_saves` has made sure
        return ShardedSaves(config, optimizer)
    return WholeFile(config, model, optimizer) if config.checkpoint else Checkpoints()


# -------------------------------------------------------------------------------------------- one whole file


class WholeFile(Checkpoints):
    """The file `config.checkpoint`. Losses of earlier runs are not in it."""

    def __init__(self, config: TrainConfig, model: GPT, optimizer: torch.optim.Optimizer) -> None:
        self.config, self.model, self.optimizer = config, model, optimizer

    def load(self) -> tuple[int, Losses]:
        """As in `Checkpoints`."""
        config = self.config
        return load_checkpoint(config, self.model, self.optimizer) if config.resume else 0, Losses()

    def save(self, step: int, losses: Losses) -> None:
        """As in `Checkpoints`."""
        save_checkpoint(self.config, self.model, self.optimizer, step)


def save_checkpoint(config: TrainConfig, model: GPT, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Write model and optimizer as if they had never been sharded; an interrupted write leaves the old file.

    Collective: all ranks. Rank 0 writes; all go on when the file is complete.
    """
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        optimizer.consolidate_state_dict(to=0)
    of_model, of_optimizer = model.state_dict(), {}
    if dist.get_rank() == 0 or config.recipe.stage == 3:
        of_optimizer = optimizer.state_dict()
    if config.recipe.stage == 3:
        of_model, of_optimizer = (
            stage_3.whole(state, keep=dist.get_rank() == 0) for state in (of_model, of_optimizer)
        )
    failure: Exception | None = None
    if dist.get_rank() == 0:
        path = Path(str(config.checkpoint))
        try:
            make_directory(path.parent)
            with replacing(path) as file:
                torch.save(
                    {
                        "step": step,
                        "config": asdict(config.model),
                        "model": of_model,
                        "optimizer": of_optimizer,
                    },
                    file,
                )
        except Exception as error:  # torch.save raises RuntimeError where the disk is full
            failure = error
    agree(as_collectives(None), "write the checkpoint", failure or [])


def load_checkpoint(config: TrainConfig, model: GPT, optimizer: torch.optim.Optimizer) -> int:
    """Fill model and optimizer from a file, on every rank; return the number of steps it was trained for.

    Collective: all ranks. A file that one rank cannot read is an error on all.
    """
    path = str(config.checkpoint)
    saved: dict[str, Any] = {}
    facts: Sequence[str] | Exception
    try:
        saved = read_checkpoint(path)
        if GPTConfig(**saved["config"]) != config.model:  # the first checkpoints name no dtype
            raise ValueError(f"{path} holds a model of {saved['config']}, not of {asdict(config.model)}.")
        has_masters = any(MASTER in of_param for of_param in saved["optimizer"]["state"].values())
        if has_masters != (config.master_dtype is not None):
            raise ValueError(
                f"{path} was written {'with' if has_masters else 'without'} masters: go on with "
                f"master_dtype {'float32' if has_masters else 'left out'}."
            )
        if saved["step"] + 2 > config.steps:
            raise ValueError(
                f"{path} was trained for {saved['step']} steps; {config.steps} were asked for. Steps count "
                f"from the beginning: ask for {saved['step'] + 2} or more, since DDP builds its buckets in "
                "the first."
            )
        facts = [f"step {saved['step']}"]
    except Exception as error:
        facts = error
    agree(as_collectives(None), "read the checkpoint", facts)
    if config.recipe.stage == 3:
        stage_3.load_whole(model, optimizer, saved["model"], saved["optimizer"])
    else:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    return int(saved["step"])


def read_checkpoint(path: str) -> dict[str, Any]:
    """The contents of a file that `save_checkpoint` wrote. Runs no code that is in it.

    Raises:
        OSError: there is no such file, or it may not be read.
        ValueError: it is damaged, or something else.
    """
    with open(path, "rb") as file:
        try:
            saved = torch.load(file, map_location="cpu", weights_only=True)
            if {"step", "config", "model", "optimizer"} <= set(saved):
                return dict(saved)
            problem = f"it holds {type(saved).__name__} {sorted(saved)}"
        except Exception as error:  # a damaged file meets torch.load in many ways
            problem = f"{type(error).__name__}: {error}"
    raise ValueError(f"{path} is no checkpoint of this program, or damaged: {problem}")


# ------------------------------------------------------------------------------- sharded saves in a directory


class ShardedSaves(Checkpoints):
    """The saves in `config.checkpoint_dir`: each rank writes what it owns, and reads what it will own."""

    def __init__(self, config: TrainConfig, optimizer: ZeroRedundancyOptimizer) -> None:
        self.config, self.optimizer = config, optimizer
        self.directory = Path(str(config.checkpoint_dir))

    def load(self) -> tuple[int, Losses]:
        """As in `Checkpoints`, from the newest intact save; from the beginning if `elastic` finds none.

        Raises:
            NothingLeftError: it holds as many steps as were asked for.
            FileNotFoundError: there is none, and the run is not elastic.
            ValueError: it is of another model, dtype or seed, or of more steps, or all are damaged.
        """
        if not self.config.goes_on:
            return 0, Losses()
        try:
            notes = load_sharded(self.optimizer, self.directory)
        except FileNotFoundError:
            if not self.config.elastic:
                raise
            return 0, Losses()
        check_notes(self.config, notes)
        return int(notes["step"]), Losses(notes["losses"])

    def reached(self, step: int) -> None:
        """Add a line to `steps.jsonl`. It is for reports alone, so a full disk is left to the next save."""
        if self.optimizer.rank == 0:
            with contextlib.suppress(OSError):
                make_directory(self.directory)
                with open(self.directory / STEPS, "a", encoding="utf-8") as file:
                    file.write(json.dumps({"step": step, "ranks": self.optimizer.world_size}) + "\n")

    def save(self, step: int, losses: Losses) -> None:
        """As in `Checkpoints`."""
        save_sharded(
            self.optimizer,
            self.directory,
            notes={"step": step, "losses": losses.means(), **_identity(self.config)},
        )


def _identity(config: TrainConfig) -> dict[str, Any]:
    """Return the settings that must stay the same when a run goes on from a save."""
    return {"model": asdict(config.model), "master_dtype": config.master_dtype, "seed": config.seed}


def check_notes(config: TrainConfig, notes: dict[str, Any]) -> None:
    """Return if a run can go on from the save that has these notes.

    Raises:
        NothingLeftError: it holds as many steps as were asked for.
        ValueError: it is of another model, dtype or seed, of more steps, or of another program.
    """
    directory = config.checkpoint_dir
    for name, ours in _identity(config).items():
        if name not in notes:
            raise ValueError(f"the save in {directory} is of another program: its notes have no {name!r}.")
        theirs = notes[name]
        if name == "model" and isinstance(theirs, dict):  # earlier saves do not name all sizes
            theirs = asdict(GPTConfig()) | theirs
        if theirs != ours:
            raise ValueError(
                f"the save in {directory} is of a run with {name} {theirs}, not {ours}: go on with the "
                "same, or save into another directory."
            )
    done, steps = notes["step"], config.steps
    if done == steps:
        raise NothingLeftError(f"{directory} holds a model trained for {done} steps: nothing is left to do.")
    if done + 2 > steps:
        raise ValueError(
            f"the save in {directory} was trained for {done} steps; {steps} were asked for. Steps count from "
            f"the beginning: ask for {done + 2} or more, since DDP builds its buckets in the first."
        )


def newest_step(directory: str | Path) -> int:
    """The number of steps in the newest save whose tables are intact; 0 without one. Reads no tensors."""
    for save in reversed(saves_in(Path(directory))):
        if save.is_complete:
            with contextlib.suppress(DamagedError):
                return int(read_tables(save)[0]["contents"]["notes"]["step"])
    return 0


# --------------------------------------------------------------------------------- which steps ran, and where


class Stretch(NamedTuple):
    """Steps trained one after another: `done` of them were done before, and `until` after."""

    ranks: int
    done: int
    until: int


def stretches_in(lines: Iterable[str]) -> list[Stretch]:
    """The stretches in the lines of `steps.jsonl`, in the order of the training. A cut line is left out.

    >>> stretches_in(['{"step": 1, "ranks": 4}', '{"step": 2, "ranks": 4}', '{"step": 2, "ranks": 3}', '{"'])
    [Stretch(ranks=4, done=0, until=2), Stretch(ranks=3, done=1, until=2)]
    """
    found: list[Stretch] = []
    for line in lines:
        try:
            entry = json.loads(line)
            step, ranks = int(entry["step"]), int(entry["ranks"])
        except (ValueError, KeyError, TypeError):
            continue
        if found and (found[-1].ranks, found[-1].until) == (ranks, step - 1):
            found[-1] = found[-1]._replace(until=step)
        else:
            found.append(Stretch(ranks, step - 1, step))
    return found


def stretches(directory: str | Path) -> list[Stretch]:
    """The stretches that were trained in a directory, repeated steps included; empty if there are none."""
    try:
        with open(Path(directory, STEPS), encoding="utf-8", errors="replace") as file:
            return stretches_in(file)
    except OSError:
        return []


def counted(ran: Sequence[Stretch]) -> list[Stretch]:
    """Each step once: where steps were repeated, the last time counts.

    >>> counted([Stretch(4, 0, 37), Stretch(3, 30, 50)])
    [Stretch(ranks=4, done=0, until=30), Stretch(ranks=3, done=30, until=50)]
    """
    kept: list[Stretch] = []
    for stretch in ran:
        kept = [one._replace(until=min(one.until, stretch.done)) for one in kept if one.done < stretch.done]
        kept.append(stretch)
    return kept


def repeated_steps(ran: Sequence[Stretch]) -> int:
    """The number of steps that were trained again.

    >>> repeated_steps([Stretch(4, 0, 37), Stretch(3, 30, 50)])
    7
    """
    return sum(one.until - one.done for one in ran) - sum(one.until - one.done for one in counted(ran))


def in_words(ran: Sequence[Stretch]) -> str:
    """One line: which steps count, and how many were repeated.

    >>> in_words([Stretch(4, 0, 37), Stretch(3, 30, 50), Stretch(4, 50, 90)])
    'steps 1 to 30 on 4 ranks, 31 to 50 on 3, 51 to 90 on 4; 7 steps were repeated'
    """
    kept = [f"{one.done + 1} to {one.until} on {one.ranks}" for one in counted(ran)]
    kept[0] += " rank" if counted(ran)[0].ranks == 1 else " ranks"
    again = repeated_steps(ran)
    number = {0: "none was", 1: "1 step was"}.get(again, f"{again} steps were")
    return f"steps {', '.join(kept)}; {number} repeated"
