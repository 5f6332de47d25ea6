"""The plain loop: one process with the data of all ranks, which the program under test must equal.

A `PlainLoop` plays a trial's steps and gives what each rank should have noted. What a reordered sum or
another kernel may change is found by playing it again with `Noise`: gradients summed over the ranks in
another order, and values and state moved by a unit in the last place, at random, after each step.
`causes.py` plays loops with a mistake in them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import nn

from zero_ref.doctor.on_rank import INTERRUPTED, Case
from zero_ref.doctor.trace import Phase, Snapshot, Tensors, Trace, noted
from zero_ref.doctor.trials import FROZEN, Step

Make = Callable[[nn.Module], Any]
"""Gives the plain optimizer of a model."""


@dataclass
class Part:
    """The traces of the ranks that were there up to a save, or from it on."""

    traces: list[Trace]


class Noise:
    """Noise that every correct program may have: the order of sums, and the last bit of an update.

    Args:
        seed: another seed, another order and other bits.
    """

    def __init__(self, seed: int) -> None:
        self.rng, self.generator = Random(seed), torch.Generator().manual_seed(seed)

    def order(self, ranks: int) -> list[int]:
        """The ranks in an order drawn at random."""
        return self.rng.sample(range(ranks), ranks)

    @torch.no_grad()
    def move(self, tensor: torch.Tensor) -> None:
        """Move each element by a unit in the last place, up, down or not at all."""
        if tensor.is_floating_point():
            units = torch.randint(-1, 2, tensor.shape, generator=self.generator)
            tensor.mul_((1 + torch.finfo(tensor.dtype).eps * units.double()).to(tensor.dtype))


class Copy:
    """A model with its plain optimizer.

    Args:
        masters: whether the optimizer steps 32-bit copies of the parameters.
    """

    def __init__(self, model: nn.Module, make: Make, masters: bool) -> None:
        self.model, self.make, self.masters = model, make, masters
        self.added: nn.ModuleDict = nn.ModuleDict()
        self.stepped = copy.deepcopy(model).float() if masters else model
        self.optimizer = make(self.stepped)
        self.base_lrs: list[float] = []

    def named(self) -> dict[str, nn.Parameter]:
        """The parameters of the model, and those that were added."""
        added = ((f"added.{name}", param) for name, param in self.added.named_parameters())
        return dict(self.model.named_parameters()) | dict(added)

    def add(self, layer: nn.Module, options: dict[str, Any]) -> None:
        """Another layer, in a group of its own with these options."""
        self.added["layer"] = layer
        self.optimizer.add_param_group({"params": list(layer.parameters()), **options})

    def set_lr_factor(self, factor: float) -> None:
        """As a scheduler does: each group's first learning rate times this factor."""
        groups = self.optimizer.param_groups
        self.base_lrs += [group["lr"] for group in groups[len(self.base_lrs) :]]
        for group, lr in zip(groups, self.base_lrs):
            group["lr"] = lr * factor

    def step(self) -> None:
        """The update, on the masters if there are any."""
        if not self.masters:
            self.optimizer.step()
            return
        pairs = list(zip(self.model.parameters(), self.stepped.parameters()))
        for param, master in pairs:
            master.grad = None if param.grad is None else param.grad.to(master.dtype)
        self.optimizer.step()
        with torch.no_grad():
            for param, master in pairs:
                param.copy_(master)


class PlainLoop:
    """The plain loop of a trial.

    Args:
        case: the trial and its data.
        model: as it is before the first step; it is copied.
        make: gives the plain optimizer of a model.
        ranks: how many ranks play up to the save, and after it: twice the same, except in the trial "another
            world size".
        noise: None for the loop itself.
    """

    per_rank = False
    """Whether ranks come apart, so that each has a model of its own."""

    def __init__(
        self,
        case: Case,
        model: nn.Module,
        make: Make,
        ranks: tuple[int, int],
        *,
        masters: bool = False,
        noise: Noise | None = None,
    ) -> None:
        self.case, self.ranks_of_parts, self.noise = case, ranks, noise
        self.ranks = ranks[0]
        self.made = make
        self.masters = masters
        self.copies = [
            Copy(copy.deepcopy(model), self.make, masters) for _ in range(max(ranks) if self.per_rank else 1)
        ]
        self.buffers = [{n: b.clone() for n, b in model.named_buffers()} for _ in range(max(ranks))]
        self.local: list[list[Tensors]] = []
        self.had: set[str] = set()
        self.parts: list[Part] = []

    def make(self, model: nn.Module) -> Any:
        """The plain optimizer of a model."""
        return self.made(model)

    def copy_of(self, rank: int) -> Copy:
        """Return the model and optimizer of a rank."""
        return self.copies[rank if self.per_rank else 0]

    # --------------------------------------------------------------------------------------- the steps

    def play(self) -> list[Part]:
        """Play all steps."""
        self.begin_part()
        self.note(0, "start", self.values)
        for step in self.case.trial.steps:
            if step.reloads:
                self.reload(step)
            self.step(step)
        return self.parts

    def begin_part(self) -> None:
        """New traces, of the ranks that there are now."""
        self.parts.append(Part([[] for _ in range(self.ranks)]))

    def note(self, step: int, phase: Phase, of_copy: Callable[[Copy], Tensors]) -> None:
        """A snapshot in each rank's trace."""
        of_copies = [of_copy(each) for each in self.copies]
        for rank, trace in enumerate(self.parts[-1].traces):
            trace.append(Snapshot(step, phase, noted(of_copies[rank if self.per_rank else 0])))

    @staticmethod
    def values(of: Copy) -> Tensors:
        """Copies of all parameters."""
        return {name: param.detach().clone() for name, param in of.named().items()}

    @staticmethod
    def gradients(of: Copy) -> Tensors:
        """Copies of all gradients."""
        return {
            name: None if param.grad is None else param.grad.detach().clone()
            for name, param in of.named().items()
        }

    def step(self, step: Step) -> None:
        """One step on all ranks."""
        for each in self.copies:
            if step.adds:
                each.add(self.case.added_layer(), self.case.added_options)
            if step.freezes is not None:
                each.model.get_submodule(FROZEN).requires_grad_(not step.freezes)
            if step.factor is not None:
                self.schedule(each, step.factor)
        if step.raises:
            self.interrupted(step)
        self.forward(step)
        self.backward(step)
        self.note(step.number, "backward", self.gradients)
        if step.max_norm is not None:
            for rank, each in enumerate(self.copies):
                self.clip(each, rank, step.max_norm)
            self.note(step.number, "clip", self.gradients)
        if not step.nan:
            self.update(step)
        self.note(step.number, "step", self.values)

    def interrupted(self, step: Step) -> None:
        """A forward whose loss is thrown away: buffers have changed."""
        for _ in self.losses(step, INTERRUPTED):
            pass

    def forward(self, step: Step) -> None:
        """Losses and gradients of each rank's micro-batches, each by itself, into `local`."""
        self.local = [[] for _ in range(self.ranks)]
        losses: list[list[torch.Tensor]] = [[] for _ in range(self.ranks)]
        for micro in range(step.micro):
            for rank, loss in enumerate(self.losses(step, micro)):
                named = self.copy_of(rank).named()
                for param in named.values():
                    param.grad = None
                loss.backward()
                losses[rank].append(loss.detach().float().reshape(()))
                self.local[rank].append({name: param.grad for name, param in named.items()})
                if self.noise and self.case.own:  # whose sums are not exact
                    for param in named.values():
                        if param.grad is not None:
                            self.noise.move(param.grad)
        for rank, trace in enumerate(self.parts[-1].traces):
            trace.append(Snapshot(step.number, "forward", {"loss": torch.stack(losses[rank])}))

    def losses(self, step: Step, micro: int) -> Iterator[torch.Tensor]:
        """Forward of a micro-batch on each rank, one after the other."""
        self.begun = copy.deepcopy(self.buffers)
        for rank in range(self.ranks):
            yield self.loss(step, micro, rank)

    def loss(self, step: Step, micro: int, rank: int) -> torch.Tensor:
        """Forward of one micro-batch of a rank."""
        case, of = self.case, self.copy_of(rank)
        # As under DDP, which sends no buffers after a backward that reduced nothing.
        buffers = self.begun[rank if 0 < micro < step.micro else self.source_of_buffers(rank)]
        with torch.no_grad():
            for name, buffer in of.model.named_buffers():
                buffer.copy_(buffers[name])
        batch = case.data(step, micro, rank)
        torch.default_generator.manual_seed(case.random_seed(step, micro, rank))
        loss = case.loss(of.model, batch) if case.loss else of.model(batch)
        self.buffers[rank] = {name: buffer.detach().clone() for name, buffer in of.model.named_buffers()}
        if of.added:
            inputs, targets = case.added_data(step, micro, rank)
            loss = loss + (of.added["layer"](inputs) * targets).sum()
        return loss * math.nan if step.nan and rank == self.ranks - 1 else loss

    def source_of_buffers(self, rank: int) -> int:
        """The rank whose buffers a forward on this rank begins with."""
        return 0

    def backward(self, step: Step) -> None:
        """The gradients that the ranks step with."""
        for rank, each in enumerate(self.copies):
            for name, param in each.named().items():
                grad = self.reduced(name, rank)
                if grad is None and not step.set_to_none and param.requires_grad and name in self.had:
                    grad = torch.zeros_like(param)
                param.grad = grad
                self.had |= {name} if grad is not None else set()

    def reduced(self, name: str, rank: int) -> torch.Tensor | None:
        """The gradient of a parameter: the mean over the ranks of the sum over their micro-batches."""
        return mean(self.summed(name), self.noise.order(self.ranks) if self.noise else None)

    def summed(self, name: str) -> list[torch.Tensor | None]:
        """Each rank's sum over its micro-batches; None where the parameter was not used."""
        return [total([micro.get(name) for micro in of_rank]) for of_rank in self.local]

    # ------------------------------------------------------------------------------- what a mistake changes

    def schedule(self, of: Copy, factor: float) -> None:
        """Change the learning rates as a scheduler would."""
        of.set_lr_factor(factor)

    def clip(self, of: Copy, rank: int, max_norm: float) -> None:
        """Clip by the norm of all gradients."""
        nn.utils.clip_grad_norm_(list(of.named().values()), max_norm)

    def update(self, step: Step) -> None:
        """The optimizer's step on all ranks."""
        for each in self.copies:
            each.step()
            if self.noise:
                for param in each.named().values():
                    self.noise.move(param)
                for state in each.optimizer.state.values():
                    for value in state.values() if isinstance(state, dict) else [state]:
                        if isinstance(value, torch.Tensor) and value.numel() > 1:
                            self.noise.move(value)

    def reload(self, step: Step) -> None:
        """Saving and loading changes nothing but, perhaps, the number of ranks."""
        if self.case.trial.elsewhere:
            self.ranks = self.ranks_of_parts[1]
            self.begin_part()
        for each in self.copies:
            self.loaded(each)
        self.note(step.number, "load", self.values)

    def loaded(self, of: Copy) -> None:
        """Change what new objects have after loading; in a right program nothing."""


def total(parts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """The sum of those that are there."""
    there = [part for part in parts if part is not None]
    return torch.stack(there).sum(0) if there else None


def mean(parts: Sequence[torch.Tensor | None], order: Sequence[int] | None = None) -> torch.Tensor | None:
    """The sum of those that are there, one after the other, divided by the number of all."""
    sum_of: torch.Tensor | None = None
    for number in order or range(len(parts)):
        part = parts[number]
        if part is not None:
            sum_of = part.clone() if sum_of is None else sum_of + part
    return None if sum_of is None else sum_of / len(parts)
