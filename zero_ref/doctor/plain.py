"""The plain loop: one process with the data of all ranks, which the program under test must equal.

A `PlainLoop` plays a trial's steps and gives what each rank should have noted. What a reordered sum or
another kernel may change is found by playing it again with `Noise`. `reading.py` plays it with the gradients
that the program was seen to have.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zero_ref.doctor.on_rank import INTERRUPTED, Case, added_batch
from zero_ref.doctor.program import averaged
from zero_ref.doctor.trace import Phase, Snapshot, Tensors, Trace, noted, options_of
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
        seed: another seed, other bits.
        gradients: the dtype in which gradients may be rounded; None: their own.
        opposite: the same noise with the other sign.
    """

    def __init__(self, seed: int, gradients: torch.dtype | None = None, opposite: bool = False) -> None:
        self.generator, self.gradients = torch.Generator().manual_seed(seed), gradients
        self.sign = -1 if opposite else 1

    def units(self, shape: torch.Size) -> torch.Tensor:
        """Numbers between 1/2 and 1 of either sign: no element is left as it was."""
        size = torch.rand(shape, generator=self.generator, dtype=torch.float64) / 2 + 0.5
        return self.sign * size * (2 * torch.randint(2, shape, generator=self.generator) - 1)

    @torch.no_grad()
    def move(self, tensor: torch.Tensor) -> None:
        """Move each element by about a unit in the last place."""
        if tensor.is_floating_point():
            places = 1.5 if tensor.dtype.itemsize >= 4 else 0.75  # most operations leave 16 bits as they are
            units = places * torch.finfo(tensor.dtype).eps * self.units(tensor.shape)
            tensor.copy_((tensor.double() * (1 + units)).to(tensor.dtype))

    def added_to(self, grad: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        """A gradient, and what rounding may change in a sum of terms whose sizes add up to `sizes`."""
        eps = torch.finfo(grad.dtype).eps
        if self.gradients is not None:
            eps = max(eps, torch.finfo(self.gradients).eps)
        return grad + (eps * self.units(grad.shape) * sizes).to(grad.dtype)


class PlainLoop:
    """The plain loop of a trial.

    Args:
        case: the trial and its data.
        model: as it is before the first step; it is copied.
        make: gives the plain optimizer of a model.
        ranks: how many ranks play up to the save, and after it: twice the same, except where a trial loads
            "elsewhere".
        masters: whether the optimizer steps 32-bit copies of the parameters.
        mean: whether the gradients of a step's micro-batches are averaged; otherwise they are added up.
        noise: None for the loop itself.
    """

    def __init__(
        self,
        case: Case,
        model: nn.Module,
        make: Make,
        ranks: tuple[int, int],
        *,
        masters: bool = False,
        mean: bool = False,
        noise: Noise | None = None,
    ) -> None:
        self.case, self.ranks_of_parts, self.noise, self.mean = case, ranks, noise, mean
        self.ranks, self.make, self.masters = ranks[0], make, masters
        self.model = copy.deepcopy(model)
        self.added = nn.ModuleDict()
        self.stepped = copy.deepcopy(self.model).float() if masters else self.model
        self.optimizer = make(self.stepped)
        self.base_lrs: list[float] = []
        self.buffers = [{n: b.clone() for n, b in model.named_buffers()} for _ in range(max(ranks))]
        self.local: list[list[Tensors]] = []
        self.weights: list[list[float]] = []
        self.had: set[str] = set()
        self.averages: dict[str, torch.Tensor] = {}
        self.parts: list[Part] = []

    def named(self) -> dict[str, nn.Parameter]:
        """The parameters of the model, and those that were added."""
        added = ((f"added.{name}", param) for name, param in self.added.named_parameters())
        return dict(self.model.named_parameters()) | dict(added)

    # --------------------------------------------------------------------------------------- the steps

    def play(self, last: int | None = None) -> list[Part]:
        """Play all steps, or those up to the number `last`."""
        self.begin_part()
        self.note(0, "start", self.values())
        for step in self.case.trial.steps[: None if last is None else last + 1]:
            if step.reloads:
                if self.case.trial.elsewhere:
                    self.ranks = self.ranks_of_parts[1]
                    self.begin_part()
                self.note(step.number, "load", self.values())
            self.step(step)
        return self.parts

    def begin_part(self) -> None:
        """New traces, of the ranks that there are now."""
        self.parts.append(Part([[] for _ in range(self.ranks)]))

    def note(self, step: int, phase: Phase, tensors: Tensors) -> None:
        """A snapshot in each rank's trace."""
        snapshot = Snapshot(
            step, phase, noted(tensors), options_of(self.optimizer) if phase == "step" else ()
        )
        for trace in self.parts[-1].traces:
            trace.append(snapshot)

    def values(self) -> Tensors:
        """Copies of all parameters."""
        return {name: param.detach().clone() for name, param in self.named().items()}

    def gradients(self) -> Tensors:
        """Copies of all gradients."""
        return {
            name: None if param.grad is None else param.grad.detach().clone()
            for name, param in self.named().items()
        }

    def step(self, step: Step) -> None:
        """One step on all ranks."""
        if step.adds:
            self.added["layer"] = self.case.added_layer()
            params = list(self.added.parameters())
            self.optimizer.add_param_group({"params": params, **self.case.added_options})
        if step.freezes is not None:
            self.model.get_submodule(FROZEN).requires_grad_(not step.freezes)
        if step.factor is not None:
            self.set_lr_factor(step.factor)
        if step.raises:  # buffers have changed
            for _ in self.losses(step, INTERRUPTED):
                pass
        self.forward(step)
        self.weights = self.case.weights(self.model, step, self.ranks)
        for name, param in self.named().items():
            grad = self.reduced(name, step)
            if grad is None and not step.set_to_none and param.requires_grad and name in self.had:
                grad = torch.zeros_like(param)
            param.grad = grad
            self.had |= {name} if grad is not None else set()
        self.note(step.number, "backward", self.gradients())
        if step.max_norm is not None:
            nn.utils.clip_grad_norm_(list(self.named().values()), step.max_norm)
            self.note(step.number, "clip", self.gradients())
        if not step.nan:
            self.update(step)
        if step.averages:
            values = {name: param.detach().clone() for name, param in self.named().items()}
            self.averages = averaged(self.averages, values)
            self.note(step.number, "average", dict(self.averages))
        self.note(step.number, "step", self.values())

    def set_lr_factor(self, factor: float) -> None:
        """As a scheduler does: each group's first learning rate times this factor."""
        groups = self.optimizer.param_groups
        self.base_lrs += [group["lr"] for group in groups[len(self.base_lrs) :]]
        for group, lr in zip(groups, self.base_lrs):
            group["lr"] = lr * factor

    def forward(self, step: Step) -> None:
        """Losses and gradients of each rank's micro-batches, each by itself, into `local`."""
        self.local = [[] for _ in range(self.ranks)]
        losses: list[list[torch.Tensor]] = [[] for _ in range(self.ranks)]
        for micro in range(step.micro):
            for rank, loss in enumerate(self.losses(step, micro)):
                for param in self.named().values():
                    param.grad = None
                loss.backward()
                losses[rank].append(loss.detach().float().reshape(()))
                self.local[rank].append({name: param.grad for name, param in self.named().items()})
        for rank, trace in enumerate(self.parts[-1].traces):
            trace.append(Snapshot(step.number, "forward", {"loss": torch.stack(losses[rank])}))

    def losses(self, step: Step, micro: int) -> Iterator[torch.Tensor]:
        """Forward of a micro-batch on each rank, one after the other."""
        self.begun = copy.deepcopy(self.buffers)
        for rank in range(self.ranks):
            yield self.loss(step, micro, rank)

    def loss(self, step: Step, micro: int, rank: int) -> torch.Tensor:
        """Forward of one micro-batch of a rank."""
        case = self.case
        # As under DDP, which sends no buffers after a backward that reduced nothing.
        buffers = self.begun[rank if 0 < micro < step.micro else 0]
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                buffer.copy_(buffers[name])
        batch = case.data(step, micro, rank)
        torch.default_generator.manual_seed(case.random_seed(step, micro, rank))
        loss = case.loss(self.model, batch) if case.loss else self.model(batch)
        self.buffers[rank] = {name: buffer.detach().clone() for name, buffer in self.model.named_buffers()}
        if self.added:
            loss = loss + self.added["layer"](added_batch(case, step, micro, rank))
        return loss * math.nan if step.nan and rank == self.ranks - 1 else loss

    def reduced(self, name: str, step: Step) -> torch.Tensor | None:
        """The gradient of a parameter: of one process with the data of all ranks and micro-batches.

        It is a weighted mean over all of them; without `mean`, times the number of micro-batches.
        """
        total: torch.Tensor | None = None
        sizes: torch.Tensor | float = 0.0
        alike = self.case.added_alike and name.startswith("added.")
        for of_rank, weights in zip(self.local, self.weights):
            for micro, weight in zip(of_rank, weights):
                weight = 1 / (self.ranks * step.micro) if alike else weight
                if (grad := micro.get(name)) is not None:
                    part = grad * weight
                    total, sizes = part if total is None else total + part, sizes + part.abs().double()
        if total is None:
            return None
        if not self.mean:
            total, sizes = total * step.micro, sizes * step.micro
        if self.noise is not None and isinstance(sizes, torch.Tensor) and total.is_floating_point():
            # A model of the program's own sums over a batch's rows: also small elements have large terms.
            sizes = sizes + (2 * sizes.max() if self.case.own and sizes.numel() else 0.0)
            total = self.noise.added_to(total, sizes)
        return total

    def update(self, step: Step) -> None:
        """The optimizer's step, on the masters if there are any."""
        pairs = list(zip(self.model.parameters(), self.stepped.parameters())) if self.masters else []
        for param, master in pairs:
            master.grad = None if param.grad is None else param.grad.to(master.dtype)
        self.optimizer.step()
        if self.noise is not None:
            for param in [*self.stepped.parameters(), *self.added.parameters()]:
                self.noise.move(param)
            for state in self.optimizer.state.values():
                for value in state.values() if isinstance(state, dict) else [state]:
                    if isinstance(value, torch.Tensor) and value.numel() > 1:
                        self.noise.move(value)
        with torch.no_grad():
            for param, master in pairs:
                param.copy_(master)
