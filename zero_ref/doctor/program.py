"""A `Program` is one rank's model, wrapper and optimizer, with the methods by which the doctor drives them.

The methods of `Program` suit modules, DistributedDataParallel and whatever has the interface of a
torch.optim.Optimizer. An adapter for another library is a subclass that overrides what differs there. A
method that a program cannot carry out raises `NotSupportedError` on all ranks; then the report lists the
trial as not tried.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from zero_ref.clip import grad_norm
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer

Loss = Callable[[Any, Any], torch.Tensor]
"""Gives the loss. Its arguments are the wrapper (or the model, without a wrapper) and a batch."""


class NotSupportedError(Exception):
    """A program cannot do what a trial needs; the text says why. Raise it on all ranks alike."""


class Program:
    """One rank's part of a training program, as the doctor drives it.

    A factory returns one for a program that is not driven like a torch optimizer. Override the methods that
    differ; here the wrapper scales the loss before backward:

    >>> class Scaled(Program):
    ...     def backward(self, loss):
    ...         self.wrapper.scaled(loss).backward()
    >>> def sharded(model):
    ...     return Scaled(torch.optim.AdamW(model.parameters(), lr=0.05), model, Wrapper(model))

    Args:
        optimizer: has `step()`. With `zero_grad()`, `param_groups`, `add_param_group()` and `state_dict()`,
            more trials can be tried.
        model: the module itself, whose parameters are compared with the plain loop's.
        wrapper: is called in place of the model, such as DistributedDataParallel(model). None: the model is
            called.
        averaged_by: who averages gradients over the ranks. "program": its wrapper, hooks or step. "doctor":
            `end_of_backward` does by all_reduce, for an optimizer that expects averaged gradients.
        loss: gives the loss of the wrapper and a batch. None: the wrapper, called with the batch, returns the
            loss.
    Attributes:
        cannot: the trials that this kind of program cannot do: the reason by the trial's name.
        added: the layer that `add_group` was given, as "layer"; empty before. `loss` calls it beside the
            wrapper.
        averages: the running average of each parameter, by name; empty before the first.
    """

    cannot: ClassVar[dict[str, str]] = {}

    def __init__(
        self,
        optimizer: Any,
        model: nn.Module,
        wrapper: Any = None,
        *,
        averaged_by: Literal["program", "doctor"] = "program",
        loss: Loss | None = None,
    ) -> None:
        self.optimizer, self.model = optimizer, model
        self.wrapper: Any = model if wrapper is None else wrapper
        self.averaged_by, self.loss_of = averaged_by, loss
        self.added = nn.ModuleDict()
        self.averages: dict[str, torch.Tensor] = {}
        self._base_lrs: list[float] = []

    # ------------------------------------------------------------------------------ what it cannot do

    def refuses(self, trial: str) -> str | None:
        """The reason why a trial, given by its name, cannot be tried with this program; None if it can."""
        if trial in ("unused parameters", "unused on a rank") and self._needs_all_gradients():
            return "DistributedDataParallel was made without find_unused_parameters=True"
        if trial == "unused on a rank" and hasattr(self.wrapper, "set_requires_gradient_sync"):
            return "fully_shard needs all ranks to run the same layers"
        if trial in ("buffers", "different starts") and self.wrapper is self.model:
            return "the program has no wrapper that could send rank 0's values to the others"
        return self.cannot.get(trial)

    def _needs_all_gradients(self) -> bool:
        wrapper = self.wrapper
        return isinstance(wrapper, DistributedDataParallel) and not wrapper.find_unused_parameters

    # ---------------------------------------------------------------------------- forward and backward

    def loss(self, batch: Any, of_added: Any = None) -> torch.Tensor:
        """The loss of this rank's batch, plus that of the added layer if there is one.

        Args:
            batch: of the model.
            of_added: the batch of the added layer; None: no layer was added.
        """
        loss = self.wrapper(batch) if self.loss_of is None else self.loss_of(self.wrapper, batch)
        return loss if of_added is None else loss + self.added["layer"](of_added)

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients of one micro-batch, and add them to those that are there."""
        loss.backward()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context in which gradients are not averaged: around each micro-batch of a step but the last."""
        if hasattr(self.wrapper, "no_sync"):
            with self.wrapper.no_sync():
                yield
        elif hasattr(self.wrapper, "set_requires_gradient_sync"):  # FSDP2
            self.wrapper.set_requires_gradient_sync(False)
            yield
            self.wrapper.set_requires_gradient_sync(True)
        else:
            yield

    def end_of_backward(self) -> None:
        """Called after the last backward of a step: average the gradients that nothing else averages.

        These are those of the added layer, and with `averaged_by="doctor"` all. A program whose `backward`
        divides the loss overrides this, so that the added layer fits.

        Collective: all ranks.
        """
        of_model = list(self.model.parameters()) if self.averaged_by == "doctor" else []
        average([*of_model, *self.added.parameters()])

    def gradients(self) -> dict[str, torch.Tensor | None]:
        """Each parameter's gradient on this rank by its name, whole; None where `.grad` is None.

        A name may be left out: then nothing is known of that gradient, and the doctor does not look at it.

        Collective: all ranks, where gradients are DTensors.
        """
        named = [*self.model.named_parameters(), *self.named_added()]
        return {name: None if param.grad is None else whole(param.grad) for name, param in named}

    # ------------------------------------------------------------------------------------------ the step

    def clip(self, max_norm: float) -> None:
        """Scale the gradients so that the norm of all of them together is at most `max_norm`."""
        if isinstance(self.optimizer, ZeroRedundancyOptimizer):
            grad_norm.clip_grad_norm_(self.optimizer, max_norm)
            return
        for owner in (self.wrapper, self.optimizer):
            for method in ("clip_grad_norm_", "clip_grad_norm"):
                if callable(getattr(owner, method, None)):
                    getattr(owner, method)(max_norm)
                    return
        nn.utils.clip_grad_norm_([*self.model.parameters(), *self.added.parameters()], max_norm)

    def skips(self, is_nan: bool) -> bool:
        """Whether this rank leaves out the step. A program that decides this by itself overrides the method.

        Args:
            is_nan: whether the loss of some rank is NaN; the plain loop leaves out such a step.
        """
        return is_nan

    def step(self) -> None:
        """Update the parameters. Afterwards `values` gives the new values on every rank."""
        self.optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set all gradients to None, or to 0 if `set_to_none` is false."""
        if hasattr(self.optimizer, "zero_grad"):
            if takes(self.optimizer.zero_grad, "set_to_none"):
                self.optimizer.zero_grad(set_to_none=set_to_none)
            elif set_to_none:
                self.optimizer.zero_grad()
            else:
                raise NotSupportedError(f"{type(self.optimizer).__name__}.zero_grad takes no set_to_none")
            return
        for param in [*self.model.parameters(), *self.added.parameters()]:
            param.grad = None if set_to_none or param.grad is None else torch.zeros_like(param.grad)

    def values(self) -> dict[str, torch.Tensor]:
        """Every parameter by its name, whole, with the values that this rank has.

        Collective: all ranks, where parameters are sharded.
        """
        if hasattr(self.wrapper, "wait_for_parameters"):  # ShardedDataParallel(gather_in_forward=True)
            self.wrapper.wait_for_parameters()
        named = [*self.model.named_parameters(), *self.named_added()]
        return {name: whole(param) for name, param in named}

    def average(self) -> dict[str, torch.Tensor]:
        """Update a running average of the parameters after a step, before the next forward, and return it.

        Collective: all ranks, where parameters are sharded.
        """
        self.averages = averaged(self.averages, self.values())
        return self.averages

    def named_added(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters of the added layer, with names such as "added.layer.weight"."""
        return [(f"added.{name}", param) for name, param in self.added.named_parameters()]

    def buffers(self) -> dict[str, torch.Tensor]:
        """Every buffer of this rank's model by its name."""
        return {name: buffer.detach().clone() for name, buffer in self.model.named_buffers()}

    # -------------------------------------------------------------------------------- what comes between

    def set_lr_factor(self, factor: float) -> None:
        """Do what a scheduler does: set every group's learning rate to `factor` times its first one."""
        groups = getattr(self.optimizer, "param_groups", None)
        if groups is None:
            raise NotSupportedError(
                f"{type(self.optimizer).__name__} has no param_groups, where a scheduler writes"
            )
        if not all(isinstance(group.get("lr"), float | int | torch.Tensor) for group in groups):
            raise NotSupportedError(f"{type(self.optimizer).__name__} has a group without a learning rate")
        self._base_lrs += [group["lr"] for group in groups[len(self._base_lrs) :]]
        for group, lr in zip(groups, self._base_lrs, strict=True):
            group["lr"] = lr * factor

    def add_group(self, layer: nn.Module, **options: Any) -> None:
        """Train this layer too, in a parameter group of its own with these options."""
        if not hasattr(self.optimizer, "add_param_group"):
            raise NotSupportedError(f"{type(self.optimizer).__name__} has no add_param_group")
        self.added["layer"] = layer
        self.optimizer.add_param_group({"params": list(layer.parameters()), **options})

    def freeze(self, layer: nn.Module, frozen: bool) -> None:
        """Stop training a layer of the model, or train it again if `frozen` is false."""
        if self._needs_all_gradients():
            raise NotSupportedError("DistributedDataParallel was made without find_unused_parameters=True")
        layer.requires_grad_(not frozen)
        if frozen:
            for param in layer.parameters():
                param.grad = None

    # ----------------------------------------------------------------------------------- save and load

    def save(self, folder: Path) -> None:
        """Write the parameters, the buffers and the optimizer state into this empty folder.

        Collective: all ranks.
        """
        rank = dist.get_rank()
        for method in ("state_dict", "load_state_dict"):
            if not hasattr(self.optimizer, method):
                raise NotSupportedError(f"{type(self.optimizer).__name__} has no {method}")
        if hasattr(self.optimizer, "consolidate_state_dict"):
            self.optimizer.consolidate_state_dict(0)
        values, each_rank = self.values(), not hasattr(self.optimizer, "consolidate_state_dict")
        if rank == 0 or each_rank:
            saved = {
                "each_rank": each_rank,
                "optimizer": mapped(self.optimizer.state_dict(), whole),
                "values": values,
                "buffers": self.buffers(),
                "ranks": dist.get_world_size(),
            }
            torch.save(saved, folder / f"{rank}.pt")

    def load(self, folder: Path) -> None:
        """Read what `save` wrote, perhaps on another number of ranks. This program is newly made.

        Collective: all ranks.
        """
        mine, first = folder / f"{dist.get_rank()}.pt", folder / "0.pt"
        saved = torch.load(first, weights_only=False)
        if saved["each_rank"] and saved["ranks"] == dist.get_world_size():
            saved = torch.load(mine, weights_only=False)
        elif saved["each_rank"] and not self.has_whole(saved["optimizer"]):
            raise NotSupportedError(
                f"{type(self.optimizer).__name__}.state_dict() lacks the state of some parameters, as a "
                "rank's own part does, and there is no consolidate_state_dict: override save and load of "
                "doctor.Program"
            )
        self.set_values(saved["values"], saved["buffers"])
        self.optimizer.load_state_dict(self.distributed(saved["optimizer"]))

    def has_whole(self, state_dict: Any) -> bool:
        """Whether a state dict has state for all parameters of the model, or for none, on every rank.

        Collective: all ranks.
        """
        known = [*self.model.parameters(), *self.added.parameters()]
        try:
            params = [param for group in self.optimizer.param_groups for param in group["params"]]
            saved = [len(group["params"]) for group in state_dict["param_groups"]]
            whole = (
                {id(param) for param in known if param.requires_grad} <= set(map(id, params))
                and set(map(id, params)) <= set(map(id, known))
                and saved == [len(group["params"]) for group in self.optimizer.param_groups]
                and len(state_dict["state"]) in (0, sum(saved))
            )
        except (AttributeError, KeyError, TypeError):
            whole = False
        lacking = torch.tensor([float(not whole)], device=known[0].device)
        dist.all_reduce(lacking)
        return not lacking.item()

    def distributed(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A state dict of whole tensors; the state of parameters that are DTensors is sharded like them."""
        numbered = [param for group in self.optimizer.param_groups for param in group["params"]]
        if not any(hasattr(param, "full_tensor") for param in numbered):
            return state_dict
        state = {
            number: {key: as_like(value, numbered[number]) for key, value in of_param.items()}
            for number, of_param in state_dict["state"].items()
        }
        return state_dict | {"state": state}

    @torch.no_grad()
    def set_values(self, values: dict[str, torch.Tensor], buffers: dict[str, torch.Tensor]) -> None:
        """Copy saved parameters and buffers, given by name, into the model and the added layer."""
        for name, param in [*self.model.named_parameters(), *self.named_added()]:
            if name in values:
                param.copy_(as_like(values[name], param))
        for name, buffer in self.model.named_buffers():
            buffer.copy_(buffers[name])


def averaged(before: dict[str, torch.Tensor], values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The running averages of parameters with new values, half of which count; at first the values.

    >>> averaged({"bias": torch.tensor([1.0])}, {"bias": torch.tensor([2.0])})
    {'bias': tensor([1.5000])}
    """
    return {name: (before.get(name, value) + value) / 2 for name, value in values.items()}


def average(params: list[nn.Parameter]) -> None:
    """Replace gradients by their mean over the ranks. A rank without a gradient counts as one with 0.

    Collective: all ranks, with the same parameters.
    """
    for param in params:
        has = torch.tensor([float(param.grad is not None)], device=param.device)
        dist.all_reduce(has)
        if has.item():
            grad = torch.zeros_like(param) if param.grad is None else param.grad
            dist.all_reduce(grad)
            param.grad = grad.div_(dist.get_world_size())


def takes(function: Callable[..., Any], name: str) -> bool:
    """Whether a function takes an argument of this name. One that cannot be looked into is taken to do so."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return True
    return name in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values())


def mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A copy of nested dicts and lists in which `change` was applied to each tensor."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: mapped(one, change) for key, one in value.items()}
    if isinstance(value, list):
        return [mapped(one, change) for one in value]
    return value


def as_like(value: Any, param: Any) -> Any:
    """A whole tensor as a DTensor that is sharded like `param`, if that is a DTensor of the same shape.

    Otherwise `value` itself.
    """
    if not hasattr(param, "full_tensor") or getattr(value, "shape", None) != param.shape:
        return value
    from torch.distributed.tensor import distribute_tensor  # takes a second to import

    return distribute_tensor(value, param.device_mesh, param.placements)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the whole tensor. Collective: all ranks, if it is a DTensor, whose parts are gathered."""
    full = getattr(tensor, "full_tensor", None)
    return (full() if callable(full) else tensor).detach().clone()


def as_program(returned: Any, model: nn.Module | None, loss: Loss | None) -> Program:
    """Wrap the result of a factory as a Program.

    Args:
        model: the doctor's; None if the factory makes a model of its own.
        loss: gives the loss of the wrapper and a batch; None: the wrapper does when called.
    Raises:
        TypeError: the factory returned something else than an optimizer, a tuple of an optimizer and
            modules, or a Program.
    """
    if isinstance(returned, Program):
        if returned.loss_of is None:
            returned.loss_of = loss
        return returned
    parts = list(returned) if isinstance(returned, tuple) else [returned]
    modules = [part for part in parts if isinstance(part, nn.Module)]
    optimizers = [part for part in parts if not isinstance(part, nn.Module) and hasattr(part, "step")]
    expected = "an optimizer, (optimizer, wrapper)" if model is not None else "(model, optimizer[, wrapper])"
    too_many = len(modules) > 2 or (model is not None and len(modules) == 2 and modules[0] is not model)
    if len(optimizers) != 1 or too_many or len(modules) + len(optimizers) != len(parts):
        kinds = ", ".join(type(part).__name__ for part in parts)
        raise TypeError(
            f"the factory returned ({kinds}): return {expected} or a doctor.Program; a wrapper is a "
            "torch.nn.Module."
        )
    if model is None:
        if not modules:
            raise TypeError(
                "the factory takes no model and returned none: return (model, optimizer[, wrapper])."
            )
        return Program(optimizers[0], modules[0], modules[-1], loss=loss)
    by: Literal["program", "doctor"] = "program" if modules else "doctor"
    return Program(optimizers[0], model, modules[-1] if modules else None, averaged_by=by, loss=loss)
