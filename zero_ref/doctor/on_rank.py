"""One trial with the program under test, on one rank."""

from __future__ import annotations

import ast
import copy
import inspect
import linecache
import math
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zero_ref.doctor.all_data import shares
from zero_ref.doctor.model import Factors, Layer, Model, batch_for, factors_for, set_values
from zero_ref.doctor.nccl_on_gloo import nccl_on_gloo
from zero_ref.doctor.program import Loss, NotSupportedError, Program, as_program
from zero_ref.doctor.trace import Snapshot, Trace, noted, options_of
from zero_ref.doctor.trials import ADDED, FROZEN, MICRO, Step, Trial

ADDED_OPTIONS = {"lr": 2.0**-3}
"""The learning rate of the group that is added, which has a weight decay too if the optimizer knows one."""
ADDED_DECAY = 0.25


@dataclass(frozen=True)
class Case:
    """A trial, as all ranks need to know it.

    Args:
        factory: makes the program.
        own: the factory takes no model; `batch` and `loss` are its.
        batch: of (rank, number), where the program has a model of its own.
        first, last: the steps to play, from `first` up to and without `last`.
        added_options: of the group that is added.
        added_alike: in the added layer all ranks count alike, since the doctor's own method averages it.
    """

    trial: Trial
    factory: Callable[..., Any]
    seed: int
    own: bool = False
    batch: Callable[[int, int], Any] | None = None
    loss: Loss | None = None
    first: int = 0
    last: int = 1 << 30
    folder: str = ""
    added_options: dict[str, Any] = field(default_factory=dict)
    added_alike: bool = False

    def data(self, step: Step, micro: int, rank: int) -> Any:
        """A rank's batch of a step."""
        if self.batch is not None:
            return self.batch(rank, step.number * (MICRO + 1) + min(micro, MICRO))
        without = step.unused + (step.unused_on_first if rank == 0 else ())
        trial = self.trial
        return batch_for(
            trial.shape, self.seed, trial.name, step.number, len(trial.steps), rank, micro, without
        )

    def weights(self, model: nn.Module, step: Step, ranks: int) -> list[list[float]]:
        """For each rank and micro-batch, its share of the loss of one process that has all data of the step.

        The doctor's own batches all count alike, and so do those of a program of which that loss is unknown.
        """
        number = ranks * step.micro
        found = None
        if self.batch is not None and self.loss is not None and not step.nan:
            batches = [self.data(step, micro, rank) for rank in range(ranks) for micro in range(step.micro)]
            found = shares(model, self.loss, batches)
        found = found or [1 / number] * number
        return [found[rank * step.micro :][: step.micro] for rank in range(ranks)]

    def random_seed(self, step: Step, micro: int, rank: int) -> int:
        """Return the seed of a rank's forward, so that its dropout is that of the plain loop."""
        return Random(f"{self.seed}.{step.number}.{micro}.{rank}.forward").getrandbits(40)

    def added_layer(self) -> Layer:
        """The layer that is added, the same on each rank."""
        layer = Layer(*ADDED, bias=not self.trial.shape.matrices_only)
        set_values(layer, self.seed + 1)
        return layer


def added_batch(case: Case, step: Step, micro: int, rank: int) -> Factors:
    """A rank's factors for the layer that is added."""
    shape, trial = case.trial.shape, case.trial
    key = f"{case.seed}.{trial.name}.added"
    return factors_for(shape, key, ADDED, step.number, len(trial.steps), rank, micro)


def takes_model(factory: Callable[..., Any]) -> bool:
    """Whether a factory takes the doctor's model: it has a parameter without a default."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return True
    return any(
        one.default is one.empty and one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
        for one in parameters
    )


def added_options(optimizer: Any) -> dict[str, Any]:
    """The options of the group that is added, of those that this optimizer knows."""
    groups = getattr(optimizer, "param_groups", None) or [{}]
    return ADDED_OPTIONS | ({"weight_decay": ADDED_DECAY} if "weight_decay" in groups[0] else {})


APART = 1000
"""The seeds of ranks that begin with different values are so far apart."""
LATE = 0.03
"""The seconds by which a rank comes late to a step: what the others do not wait for has not arrived then."""
INTERRUPTED = 15
"""The number of the micro-batch that an exception ends."""

BY_RAISE = ", by a raise statement"
"""Ends the note of an error with which a program refused something."""


def leave_refusal(folder: Path, rank: int, reason: str) -> None:
    """Leave a rank's reason in the folder of the trial, for `refusals_in`.

    Other ranks may go on, and wait for this one until a collective gives up. Then the call raises, and what
    this rank returned is lost.
    """
    (folder / f"refused-by-rank-{rank}").write_text(reason, encoding="utf-8")


def refusals_in(folder: Path) -> dict[int, str]:
    """The reasons that were left in the folder of a trial, by rank."""
    found = folder.glob("refused-by-rank-*")
    return {int(file.name.rpartition("-")[2]): file.read_text(encoding="utf-8") for file in found}


@dataclass
class Played:
    """The record that one rank made of a trial.

    Attributes:
        module: where the program has a model of its own, a copy of it as it was at first.
        given: what a shim gave to the program, because Gloo lacks it.
        averages_added: whether the program averages the added layer's gradients by the doctor's own method.
    """

    trace: Trace
    module: Any = None
    given: frozenset[str] = frozenset()
    averages_added: bool = False


class Player:
    """One rank's program, played through the steps of a trial."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.trace: Trace = []
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.number, self.doing = case.first, "construction"

    def play_all(self) -> Played:
        """Make the program, and play the steps from one save to the next."""
        case, steps = self.case, self.case.trial.steps
        self.program = self.make()
        if reason := self.program.refuses(case.trial.name):
            raise NotSupportedError(reason)
        module = copy.deepcopy(self.program.model).cpu() if case.own and case.first == 0 else None
        if case.first == 0:
            self.note(0, "start", self.program.values())
        else:
            self.load(Path(case.folder), case.first)
        for step in steps[case.first : case.last]:
            if step.reloads and not case.trial.elsewhere:
                self.program = self.make()
                self.load(Path(case.folder, "again"), step.number)
            self.play(step)
        own = type(self.program).end_of_backward is Program.end_of_backward
        return Played(self.trace, module, averages_added=own)

    def make(self) -> Program:
        """A new program."""
        case = self.case
        seed = case.seed + (APART * self.rank if case.trial.apart else 0)
        torch.manual_seed(seed)
        if case.own:
            return as_program(case.factory(), None, case.loss)
        model = Model(case.trial.shape, seed)
        return as_program(case.factory(model), model, case.loss)

    def note(self, step: int, phase: Any, tensors: Any) -> None:
        """Add a snapshot to the trace."""
        options = options_of(self.program.optimizer) if phase == "step" else ()
        self.trace.append(Snapshot(step, phase, noted(dict(tensors)), options))

    def play(self, step: Step) -> None:
        """One step of the trial."""
        program, self.number = self.program, step.number
        if step.adds:
            self.add_group()
        if step.freezes is not None:
            self.freeze(step.freezes)
        if step.factor is not None:
            self.doing = "the scheduler"
            program.set_lr_factor(step.factor)
        self.doing = "zero_grad"
        program.zero_grad(set_to_none=step.set_to_none)
        self.gradients(step)
        if step.max_norm is not None:
            self.doing = "clip"
            program.clip(step.max_norm)
            self.note(step.number, "clip", program.gradients())
        self.doing = "skips"
        if not program.skips(step.nan):
            if self.case.trial.late and step.number % self.ranks == self.rank:
                time.sleep(LATE)
            self.doing = "step"
            program.step()
        if step.averages:
            self.doing = "average"
            self.note(step.number, "average", program.average())
        if self.is_saved_after(step):
            self.save(Path(self.case.folder, "" if self.case.trial.elsewhere else "again"))
        self.doing = "values"
        self.note(step.number, "step", program.values())

    def is_saved_after(self, step: Step) -> bool:
        """Whether the state is saved after a step, before anything else reads it."""
        following = self.case.trial.steps[step.number + 1 :][:1]
        return any(one.reloads for one in following)

    def add_group(self) -> None:
        """Add the layer of this trial."""
        self.doing = "add_group"
        layer = self.case.added_layer().to(next(self.program.model.parameters()).device)
        self.program.add_group(layer, **self.case.added_options)

    def freeze(self, frozen: bool) -> None:
        """Freeze the layer of this trial, or unfreeze it."""
        self.doing = "freeze"
        self.program.freeze(self.program.model.get_submodule(FROZEN), frozen)

    def gradients(self, step: Step) -> None:
        """Forward and backward of all micro-batches."""
        program = self.program
        if step.raises:
            self.doing = "forward, before an exception"
            self.loss(step, INTERRUPTED)
        losses = []
        for micro in range(step.micro):
            self.doing = "forward"
            if micro < step.micro - 1:
                with program.no_sync():
                    losses.append(self.backward(step, micro))
            else:
                losses.append(self.backward(step, micro))
        self.doing = "after backward"
        program.end_of_backward()
        self.note(step.number, "forward", {"loss": torch.stack(losses)})
        self.note(step.number, "backward", program.gradients())

    def backward(self, step: Step, micro: int) -> torch.Tensor:
        """Forward and backward of one micro-batch; its loss."""
        loss = self.loss(step, micro)
        self.doing = "backward"
        self.program.backward(loss)
        return loss.detach().float().reshape(())

    def loss(self, step: Step, micro: int) -> torch.Tensor:
        """Forward of one micro-batch."""
        of_added = None
        if self.program.added:
            of_added = added_batch(self.case, step, micro, self.rank)
        # torch.manual_seed notes a traceback for each kind of device: that is slower than the forward itself.
        torch.default_generator.manual_seed(self.case.random_seed(step, micro, self.rank))
        loss = self.program.loss(self.case.data(step, micro, self.rank), of_added)
        return loss * math.nan if step.nan and self.rank == self.ranks - 1 else loss

    def save(self, folder: Path) -> None:
        """Into a folder that rank 0 makes."""
        self.doing = "save"
        folder.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        self.program.save(folder)
        dist.barrier()

    def load(self, folder: Path, number: int) -> None:
        """From a folder into a new program, which first gets the groups that the saved one had."""
        earlier = self.case.trial.steps[:number]
        if any(step.adds for step in earlier):
            self.add_group()
        if [step.freezes for step in earlier if step.freezes is not None][-1:] == [True]:
            self.freeze(True)
        if any(step.factor is not None for step in self.case.trial.steps):
            self.program.set_lr_factor(1.0)  # as a scheduler, which is made before the state is loaded
        self.doing, self.number = "load", number
        self.program.load(folder)
        self.note(number, "load", self.program.values())


def play_on_rank(case: Case) -> Played | None:
    """Play the steps of a trial on this rank, from one save to the next. None: the program cannot do it.

    Collective: all ranks of the default group.
    """
    player = Player(case)
    try:
        with warnings.catch_warnings():
            # A warning of the program is no error, whatever the caller's filters.
            warnings.simplefilter("default")
            with nccl_on_gloo() as given:
                played = player.play_all()
            return replace(played, given=frozenset(given))
    except NotSupportedError as refusal:
        leave_refusal(Path(case.folder), player.rank, str(refusal))
        return None
    except BaseException as error:
        how = BY_RAISE if is_deliberate(error) else ""
        error.add_note(f"in {player.doing}, step {player.number} of the trial {case.trial.name!r}{how}")
        raise


def is_deliberate(error: BaseException) -> bool:
    """Whether a `raise` statement of the program refused something, in place of an operation that failed.

    A statement in `torch.optim` is none of the program: the plain loop's optimizer has passed it.
    """
    if not isinstance(error, ValueError | TypeError | RuntimeError | AssertionError):
        return False
    frame = traceback.extract_tb(error.__traceback__)[-1]
    if Path(frame.filename).is_relative_to(Path(torch.optim.__file__).parent):
        return False
    # The line is that of a condition or of a message, and the statement may begin before it.
    statements = ast.walk(ast.parse("".join(linecache.getlines(frame.filename))))
    return any(
        isinstance(one, ast.Raise | ast.Assert) and one.lineno <= frame.lineno <= (one.end_lineno or 0)
        for one in statements
        if frame.lineno
    )
