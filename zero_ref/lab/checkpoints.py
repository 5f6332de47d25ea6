"""The checkpoints from which the main job goes on: one whole file, or sharded saves in a directory.

`Checkpoints` does nothing, `WholeFile` and `ShardedSaves` load and save; `checkpoints_for` chooses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zero_ref.comm.agreement import Agreement
from zero_ref.comm.backend import as_collectives
from zero_ref.files.durable import make_directory, replacing
from zero_ref.files.sharded import load_sharded, save_sharded
from zero_ref.lab import stage_3
from zero_ref.lab.config import GPTConfig, TrainConfig
from zero_ref.lab.model import GPT
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.shard.owned import MASTER


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
    Agreement(as_collectives(None)).agree("write the checkpoint", failure or [])


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
    Agreement(as_collectives(None)).agree("read the checkpoint", facts)
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
        """As in `Checkpoints`, from the newest intact save; from the beginning if there is none.

        Raises:
            NothingLeftError: it holds as many steps as were asked for.
            ValueError: it is of another model, dtype or seed, or of more steps, or all are damaged.
        """
        if not self.config.resume:
            return 0, Losses()
        try:
            notes = load_sharded(self.optimizer, self.directory)
        except FileNotFoundError:
            return 0, Losses()
        check_notes(self.config, notes)
        return int(notes["step"]), Losses(notes["losses"])

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
