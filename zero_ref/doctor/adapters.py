"""Programs of other libraries, as the doctor drives them: what differs from an optimizer under DDP.

torch's ZeroRedundancyOptimizer, DDP, FairScale's OSS, dion's optimizers and anybody's own class need none of
these: return the optimizer, or the optimizer and its wrapper. None of the libraries is imported before a
program of its own is made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from zero_ref.doctor.program import NotSupportedError, Program

__all__ = ["FSDP2", "FairScale", "DeepSpeed", "Accelerate", "Fabric"]

_OPTIONS = "it has no way to add a parameter group to an optimizer that was prepared"


class FSDP2(Program):
    """A module that `fully_shard` was called on, and a torch optimizer of its parameters.

    >>> def sharded(model):
    ...     fully_shard(model)
    ...     return FSDP2(torch.optim.AdamW(model.parameters(), lr=0.05), model)

    State is saved whole, by torch.distributed.checkpoint.state_dict, so it loads on any number of ranks.
    """

    cannot: ClassVar[dict[str, str]] = {
        "unused parameters": "fully_shard reduces the gradients that a rank has, in one message: all ranks "
        "must use the same layers",
        "mixed dtypes": "fully_shard wants one dtype for all parameters of a module",
    }

    def save(self, folder: Path) -> None:
        """The whole state, from all ranks. Collective: all ranks."""
        if self.added:
            raise NotSupportedError(
                "torch gives the state of parameters that the model has, and of no others"
            )
        if any(not one.requires_grad and self.optimizer.state.get(one) for one in self.model.parameters()):
            raise NotSupportedError("torch leaves out the state of parameters that are frozen at the time")
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_optimizer_state_dict(self.model, self.optimizer, options=options)
        values, buffers = self.values(), self.buffers()
        if dist.get_rank() == 0:
            torch.save({"optimizer": state, "values": values, "buffers": buffers}, folder / "0.pt")

    def load(self, folder: Path) -> None:
        """Every rank reads the whole state and keeps its part. Collective: all ranks."""
        saved = torch.load(folder / "0.pt", weights_only=False)
        options = StateDictOptions(full_state_dict=True)
        set_model_state_dict(self.model, saved["values"] | saved["buffers"], options=options)
        set_optimizer_state_dict(self.model, self.optimizer, saved["optimizer"], options=options)


class FairScale(Program):
    """FairScale's OSS under its ShardedDataParallel.

    >>> def sharded(model):
    ...     optimizer = OSS(model.parameters(), torch.optim.AdamW, lr=0.05)
    ...     return FairScale(optimizer, model, ShardedDataParallel(model, optimizer))
    """

    cannot: ClassVar[dict[str, str]] = {
        "unused parameters": "ShardedDataParallel waits for the gradients of all parameters",
        "unused on a rank": "ShardedDataParallel waits for the gradients of all parameters",
        "group added": "ShardedDataParallel reduces the gradients of the model that it was made with",
    }

    def zero_grad(self, set_to_none: bool = True) -> None:
        """The wrapper's, which knows where its gradients lie."""
        self.wrapper.zero_grad(set_to_none=set_to_none)

    def save(self, folder: Path) -> None:
        """The whole state, from rank 0. Collective: all ranks."""
        self.optimizer.consolidate_state_dict(recipient_rank=0)
        values, buffers = self.values(), self.buffers()
        if dist.get_rank() == 0:
            state = self.optimizer.state_dict()
            torch.save({"optimizer": state, "values": values, "buffers": buffers}, folder / "0.pt")

    def load(self, folder: Path) -> None:
        """Every rank reads the whole state and keeps its part."""
        saved = torch.load(folder / "0.pt", weights_only=False)
        self.set_values(saved["values"], saved["buffers"])
        self.optimizer.load_state_dict(saved["optimizer"])


class DeepSpeed(Program):
    """The result of `deepspeed.initialize`. Its engine averages, clips and zeroes gradients by itself.

    >>> def sharded(model):
    ...     made = torch.optim.AdamW(model.parameters(), lr=0.05)
    ...     engine, *_ = deepspeed.initialize(model=model, optimizer=made, config=config)
    ...     return DeepSpeed(engine)

    Args:
        engine: of stage 0 to 3, with gradient_accumulation_steps of 1: the adapter says itself which
            backward is a step's last.
    """

    cannot: ClassVar[dict[str, str]] = {
        "group added": _OPTIONS,
        "frozen layer": "its buffers of gradients are made once, for the parameters that train then",
        "another world size": "its checkpoints are ranks' parts; another program converts them",
        "NaN step": "it looks for values that are no numbers by itself, inside its step",
    }

    def __init__(self, engine: Any) -> None:
        super().__init__(engine.optimizer, engine.module, engine)
        self.engine = engine
        self._clipped = False

    def backward(self, loss: torch.Tensor) -> None:
        """By the engine, which reduces gradients."""
        self.engine.backward(loss)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """The engine is told that the step's last backward is still to come."""
        self.engine.set_gradient_accumulation_boundary(is_boundary=False)
        yield
        self.engine.step()  # counts the micro-batch, and changes nothing
        self.engine.set_gradient_accumulation_boundary(is_boundary=True)

    def clip(self, max_norm: float) -> None:
        """By the engine, in its step."""
        self.engine._config.gradient_clipping = max_norm
        self.engine.optimizer.clip_grad = max_norm
        self._clipped = True

    def gradients(self) -> dict[str, torch.Tensor | None]:
        """Return the averaged gradients; none if the engine clips, since it does so while it steps."""
        if self._clipped:
            return {}
        full = _of_deepspeed("safe_get_full_grad")
        return {name: _copy(full(param)) for name, param in self.model.named_parameters()}

    def step(self) -> None:
        """The engine's."""
        self.engine.step()
        self._clipped = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """The engine's, which has emptied its own buffers in step."""
        self.engine.zero_grad()

    def values(self) -> dict[str, torch.Tensor]:
        """Whole parameters, which stage 3 gathers. Collective: all ranks."""
        full = _of_deepspeed("safe_get_full_fp32_param")
        if not any(hasattr(param, "ds_id") for param in self.model.parameters()):
            return super().values()
        return {name: full(param).detach().clone() for name, param in self.model.named_parameters()}

    def save(self, folder: Path) -> None:
        """The engine's checkpoint. Collective: all ranks."""
        self.engine.save_checkpoint(str(folder))

    def load(self, folder: Path) -> None:
        """The engine's checkpoint. Collective: all ranks."""
        self.engine.load_checkpoint(str(folder))


def _of_deepspeed(name: str) -> Any:
    from deepspeed import utils

    return getattr(utils, name)


def _copy(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return None if gradient is None else gradient.detach().clone()


class _Inside(Program):
    """A program whose optimizer is a library's wrapper of another, which has the state and the groups."""

    def add_group(self, layer: nn.Module, **options: Any) -> None:
        """To the optimizer inside: the wrapper may be a copy of its attributes."""
        with self._bare():
            super().add_group(layer, **options)

    def save(self, folder: Path) -> None:
        """The state of the optimizer inside. Collective: all ranks."""
        with self._bare():
            super().save(folder)

    def load(self, folder: Path) -> None:
        """As `save`."""
        with self._bare():
            super().load(folder)

    @contextlib.contextmanager
    def _bare(self) -> Iterator[None]:
        """While it lasts, the program's optimizer is the one inside."""
        wrapped = self.optimizer
        self.optimizer = wrapped.optimizer
        try:
            yield
        finally:
            self.optimizer = wrapped


class Accelerate(_Inside):
    """A model and an optimizer that an `accelerate.Accelerator` has prepared.

    >>> def sharded(model):
    ...     accelerator = Accelerator(cpu=True)
    ...     wrapped, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.05))
    ...     return Accelerate(accelerator, optimizer, model, wrapped)
    """

    def __init__(self, accelerator: Any, optimizer: Any, model: nn.Module, wrapper: nn.Module) -> None:
        super().__init__(optimizer, model, wrapper)
        self.accelerator = accelerator

    def backward(self, loss: torch.Tensor) -> None:
        """The accelerator's."""
        self.accelerator.backward(loss)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """The accelerator's, which also makes its optimizer rest."""
        with self.accelerator.no_sync(self.wrapper):
            yield

    def clip(self, max_norm: float) -> None:
        """The accelerator's."""
        self.accelerator.clip_grad_norm_([*self.model.parameters(), *self.added.parameters()], max_norm)


class Fabric(_Inside):
    """A model and an optimizer that a `lightning.Fabric` has set up.

    >>> def sharded(model):
    ...     fabric = lightning.Fabric(strategy=ZeroRedundancyStrategy(), num_nodes=1, devices=2)
    ...     wrapped, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.05))
    ...     return Fabric(fabric, optimizer, model, wrapped)
    """

    def __init__(self, fabric: Any, optimizer: Any, model: nn.Module, wrapper: nn.Module) -> None:
        super().__init__(optimizer, model, wrapper)
        self.fabric = fabric

    def _needs_all_gradients(self) -> bool:
        return not getattr(self.wrapper.module, "find_unused_parameters", True)

    def backward(self, loss: torch.Tensor) -> None:
        """Fabric's."""
        self.fabric.backward(loss)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Fabric's."""
        with self.fabric.no_backward_sync(self.wrapper):
            yield

    def clip(self, max_norm: float) -> None:
        """Fabric's."""
        self.fabric.clip_gradients(self.wrapper, self.optimizer, max_norm=max_norm)
