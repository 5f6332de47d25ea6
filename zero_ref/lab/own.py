"""The reader's own optimizer: the file that the book builds, run on a rank, and made ready to be trained.

The file is run anew in each call, so an edit counts at once. It is run with the rights of whoever asks.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from zero_ref.lab import meter
from zero_ref.lab.strategies import Trainable
from zero_ref.plan.rules import sorted_greedy

CLASS = "MyZero"
"""The name of the class in the reader's file."""

CLASS_3 = "MyZero3"
"""The name of the class of stage 3 there, which is given a model and its blocks."""

FILE = "my_zero.py"
"""The name of the file in the book."""


def load_own(path: str | os.PathLike[str]) -> ModuleType:
    """The reader's file as a module.

    Raises:
        OSError: it cannot be read.
        SyntaxError: it is not Python.
        BaseException: what its own lines raise.
    """
    file = os.path.realpath(path)
    source = Path(file).read_bytes()
    linecache.checkcache(file)  # error messages quote it as it is now
    module = ModuleType(Path(FILE).stem)
    module.__file__ = file
    sys.modules[module.__name__] = module  # dataclasses and pickle look there
    exec(compile(source, file, "exec", dont_inherit=True), module.__dict__)
    return module


def own_class(path: str | os.PathLike[str]) -> Any:
    """The class `MyZero` of the reader's file.

    Raises:
        ValueError: the file has no such class.
        BaseException: as `load_own`.
    """
    made = getattr(load_own(path), CLASS, None)
    if not isinstance(made, type):
        raise ValueError(f"{path} has no class {CLASS}: the book begins it in chapter 4.")
    return made


class OwnLoop:
    """The reader's optimizer as a training loop uses one, however far the file is.

    Raises:
        ValueError: it has no torch optimizer `local`.

    Attributes:
        mine: the reader's `MyZero`.
        local: the torch optimizer of `mine`, which has this rank's state.
    """

    def __init__(self, mine: Any, params: list[nn.Parameter]) -> None:
        self.mine, self.params = mine, params
        local = getattr(mine, "local", None)
        if not isinstance(local, torch.optim.Optimizer):
            raise ValueError(
                f"{CLASS} has no torch optimizer `self.local`, in which the state is looked for."
            )
        self.local = local

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of `mine`; before chapter 14, which adds them, the local optimizer's."""
        return getattr(self.mine, "param_groups", self.local.param_groups)

    def zero_grad(self) -> None:
        """Call `mine.zero_grad`; before chapter 14, which adds it, set all gradients to None."""
        if hasattr(self.mine, "zero_grad"):
            self.mine.zero_grad()
        else:
            for param in self.params:
                param.grad = None

    def step(self) -> None:
        """Call `mine.step`."""
        self.mine.step()

    @property
    def reduces(self) -> bool:
        """Whether hooks of `mine` average gradients on their owners. Otherwise DDP averages them."""
        return hasattr(self.mine, "reduce")

    def cuts(self, rank: int, world_size: int) -> bool:
        """Whether this rank steps other tensors than the whole parameters that the book's rule gives it."""
        owners = sorted_greedy([param.numel() for param in self.params], world_size).owner_of_param
        owned = [param.numel() for param, owner in zip(self.params, owners) if owner == rank]
        return sorted(piece.numel() for piece in self._pieces()) != sorted(owned)

    def _pieces(self) -> list[torch.Tensor]:
        return [piece for group in self.local.param_groups for piece in group["params"]]

    def check_equal_share(self, world_size: int) -> None:
        """Check that a rank steps 1/N of the elements, as it must where parameters are cut.

        Raises:
            ValueError: this rank steps more.
        """
        numel = sum(piece.numel() for piece in self._pieces())
        total = sum(param.numel() for param in self.params)
        if numel > -(-total // world_size):
            raise ValueError(
                f"{CLASS}.local steps {numel:,} elements on rank {dist.get_rank()}, and an equal share of "
                f"{total:,} is {-(-total // world_size):,}: `zero-ref check --rung shards` says more."
            )


class OwnTrainable(Trainable):
    """The reader's optimizer: calls are recorded where it makes them, its state is the local optimizer's."""

    @property
    def cuts_by_itself(self) -> bool:
        loop = cast(OwnLoop, self.optimizer)
        return loop.reduces and loop.cuts(dist.get_rank(), dist.get_world_size())

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        with meter.recording_distributed(also=True) as calls:
            yield
        self.calls.extend(calls)

    def held(self) -> meter.HeldBytes:
        local = cast(OwnLoop, self.optimizer).local
        params = list(self.model.parameters())
        stepped = [param for group in local.param_groups for param in group["params"]]
        of_model = meter.held_bytes(params, local)
        in_all = meter.held_bytes([*params, *stepped], local)
        masters = in_all.parameters - of_model.parameters
        return meter.HeldBytes(of_model.parameters, in_all.gradients, of_model.optimizer_state + masters)


def trainable_own(path: str, model: nn.Module, learning_rate: float, master_dtype: str | None) -> Trainable:
    """The model with the reader's optimizer, AdamW on the owners; under DDP until the file reduces by itself.

    Args:
        master_dtype: passed on if it is not None.
    Raises:
        ValueError: the file has no class `MyZero`, or cuts parameters into unequal shares.
        BaseException: what the file raises.
    Collective: all ranks of the default group.
    """
    masters = {} if master_dtype is None else {"master_dtype": getattr(torch, master_dtype)}
    mine = own_class(path)(model.parameters(), torch.optim.AdamW, lr=learning_rate, **masters)
    loop = OwnLoop(mine, list(model.parameters()))
    if loop.reduces:
        if loop.cuts(dist.get_rank(), dist.get_world_size()):
            loop.check_equal_share(dist.get_world_size())
        return OwnTrainable(model, cast(torch.optim.Optimizer, loop))
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, meter.recording_all_reduce([]))
    return OwnTrainable(ddp, cast(torch.optim.Optimizer, loop))
