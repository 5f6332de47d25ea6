"""Save and load the state of a sharded optimizer in the form of the unsharded optimizer.

This module adds to `state_dict` of `stairs/owners.py`: the state can be gathered on one chosen rank, all
ranks refuse a state that does not fit, and a load that fails leaves the optimizer unchanged.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Protocol

import torch
from torch.optim import Optimizer

from zero_ref.comm.agreement import RanksLostError
from zero_ref.comm.collectives import Collectives
from zero_ref.shard.built import Built
from zero_ref.shard.groups import ParamGroup, params_of, replace_options
from zero_ref.shard.local_class import is_known, keys_beside_state
from zero_ref.shard.owned import MASTER, local_dtype
from zero_ref.shard.shard import Shard
from zero_ref.state import checkpoint
from zero_ref.state.entries import State, pack
from zero_ref.state.gather import consolidate

FOR_DCP = (
    "Give zero_ref.StatefulOptimizer to torch.distributed.checkpoint in place of get_state_dict, and "
    "zero_ref.OptimizerToLoad(optimizer) to set_optimizer_state_dict."
)

_ONE_AT_A_TIME = threading.Lock()  # set_stance is global, and virtual ranks are threads


@contextlib.contextmanager
def _trial() -> Iterator[None]:
    """Run one trial at a time, on the CPU whatever the default device, without effect on random numbers."""
    # Compiling a function for a trial would be slow. If torch._dynamo was not imported, nothing was compiled
    # yet, and importing it would be slow too.
    uncompiled = (
        torch.compiler.set_stance("force_eager")
        if "torch._dynamo" in sys.modules
        else contextlib.nullcontext()
    )
    with _ONE_AT_A_TIME, uncompiled, torch.device("cpu"), torch.random.fork_rng(devices=[]):
        yield


class Accord(Protocol):
    """The part of the optimizer's agreements that this module uses."""

    @property
    def updates(self) -> int: ...
    def preparing(self, action: str) -> contextlib.AbstractContextManager[list[str]]: ...
    def note_cut_off(self, action: str) -> None: ...
    def note_loaded(self, rounded: int) -> None: ...


class Options(Protocol):
    """The option of which a load has to know."""

    @property
    def broadcast_dtype(self) -> torch.dtype | None: ...


class Registered(Protocol):
    """The part of the user's arguments that this module uses."""

    @property
    def options(self) -> Options: ...
    def unsharded(self, params_of_groups: Sequence[list[torch.Tensor]]) -> Optimizer: ...


class Zero(Protocol):
    """The part of a `ZeroRedundancyOptimizer` that this module uses."""

    built: Built
    collectives: Collectives
    param_groups: list[ParamGroup]
    shard: Shard

    @property
    def accord(self) -> Accord: ...
    @property
    def registered(self) -> Registered: ...
    def current(self) -> Built: ...
    def standing_facts(self) -> list[str]: ...


class WholeState:
    """The state of the unsharded optimizer: gathered from all ranks, or cut into each rank's shard.

    Args:
        zero: the optimizer.

    Attributes:
        gathered: the state that was gathered onto this rank, if it has not changed since; else None.
    """

    def __init__(self, zero: Zero) -> None:
        # A strong reference would make a cycle: a dropped optimizer would keep its memory until Python's
        # garbage collector runs.
        self.zero: Zero = weakref.proxy(zero)
        self.gathered: State | None = None
        self._was_replaced = False  # the state was loaded or assigned, or a method has changed it
        self._is_to_be_made = False  # torch.distributed.checkpoint takes the state as not yet made

    def note_change(self) -> None:
        """Note that other than by an update, the state has become another one than the constructor made."""
        self.gathered, self._was_replaced = None, True

    def forget_gathered(self) -> None:
        """Free the gathered state, which has to be gathered anew then."""
        self.gathered = None

    def gather(self, to: int | Literal["all"]) -> None:
        """Gather the state onto rank `to`, or onto all: `ZeroRedundancyOptimizer.consolidate_state_dict`."""
        zero, world_size = self.zero, self.zero.collectives.world_size
        built = zero.current()
        with zero.accord.preparing("consolidate the optimizer state") as facts:
            facts += [f"to={to}", *zero.standing_facts()]
            if to != "all" and not (isinstance(to, int) and 0 <= to < world_size):
                raise ValueError(
                    f"rank {zero.collectives.rank}: to={to!r} is no rank of a group of {world_size}, nor "
                    "'all'."
                )
            packed = pack(zero.shard.owned, zero.shard.state)
        self.gathered = consolidate(zero.collectives, to, built.params, packed)

    def is_to_be_made(self) -> bool:
        """Return whether a step without gradient mode is torch.distributed.checkpoint's, to make a state.

        Its functions step an optimizer without state, with learning rates and gradients of zero, to have the
        state's keys. Ranks without state would do so while others, which have some, do not. So that step does
        nothing here; `as_gathered` and a load, which follow on all ranks, say or do what all ranks can.
        """
        zero = self.zero
        self._is_to_be_made = (
            not zero.shard.states
            and not any(group.get("lr", 0) for group in zero.param_groups)
            and all(
                param.grad is not None and param.grad.layout is torch.strided and not param.grad.any()
                for param in params_of(zero.param_groups)
                if param.requires_grad
            )
        )
        return self._is_to_be_made

    def as_gathered(self) -> dict[str, Any]:
        """The gathered state as a state dict, before hooks: `ZeroRedundancyOptimizer.state_dict`."""
        rank, whole = self.zero.collectives.rank, self.gathered
        must_be_made, self._is_to_be_made = self._is_to_be_made, False
        if whole is None and not self._was_replaced and not self.zero.accord.updates:
            whole = self._constructed()
        if must_be_made and whole == {} and any(self.keys()):
            # Without keys torch would load no state, and say nothing.
            raise RuntimeError(
                f"rank {rank}: the optimizer has no state yet, and no rank would have all of it. {FOR_DCP}"
            )
        if whole is None:
            raise RuntimeError(
                f"rank {rank}: the optimizer state is spread over {self.zero.collectives.world_size} ranks "
                "and has not been gathered on this one since the last step. Call "
                f"consolidate_state_dict({rank}) on all ranks, or state_dict() only on the rank "
                "onto which it was gathered. Options, such as lr, are in optimizer.param_groups at any time. "
                f"{FOR_DCP}"
            )
        return {
            "state": {param: dict(state) for param, state in whole.items()},
            "param_groups": checkpoint.packed_groups(self.zero.param_groups),
        }

    def _constructed(self) -> State | None:
        """The state that the unsharded optimizer's constructor makes, without communication.

        A rank that owns nothing cannot tell from its own state, so each rank constructs the optimizer on
        stand-ins for all parameters. Nothing is written into them, so the system gives them no memory.

        Returns:
            The state by parameter number, on the CPU. None if a class that is not torch's makes state, which
            may depend on the values of parameters: then it has to be gathered.
        """
        master_dtype = self.zero.shard.master_dtype

        def stand_in(param: torch.Tensor) -> torch.Tensor:
            dtype = local_dtype(param, master_dtype)
            return torch.empty_like(param, dtype=dtype, device="cpu", requires_grad=param.requires_grad)

        try:
            with torch.device("cpu"):  # torch's default device may be another one
                optim = self._optimizer_of(stand_in)
        except Exception:  # a class may refuse the stand-ins
            return None
        if keys_beside_state(optim) or (optim.state and not is_known(optim)):
            return None
        state: State = optim.state_dict()["state"]
        return state

    def _optimizer_of(self, stand_in: Callable[[torch.Tensor], torch.Tensor]) -> Optimizer:
        """An optimizer like the local one, on stand-ins for all parameters."""
        return self.zero.registered.unsharded(
            [[stand_in(param) for param in group["params"]] for group in self.zero.param_groups]
        )

    def keys(self) -> list[list[Any]]:
        """Find out by a trial on small tensors which keys each parameter's state has after an update.

        Cost: an update of 2**ndim elements for each parameter, on the CPU.
        """

        def stand_in(param: torch.Tensor) -> torch.Tensor:
            small = torch.zeros([2] * param.ndim, requires_grad=param.requires_grad)
            small.grad = torch.zeros_like(small) if param.requires_grad else None
            return small

        # The number of elements does not change the keys, but the number of dimensions may.
        with _trial():
            optim = self._optimizer_of(stand_in)
            # A schedule-free optimizer steps after `train()`.
            getattr(optim, "train", lambda: None)()
            optim.step()
        master_dtype = self.zero.shard.master_dtype
        return [
            [*optim.state.get(small, {}), *[MASTER] * (local_dtype(param, master_dtype) != param.dtype)]
            for small, param in zip(params_of(optim.param_groups), self.zero.current().params, strict=True)
        ]

    def load(self, state_dict: dict[str, Any], copy: bool = True) -> list[str]:
        """Load this rank's shard of a whole state. Call it inside `loading`, before ranks have agreed.

        Args:
            state_dict, copy: as in `ZeroRedundancyOptimizer.load_state_dict`.
        Returns:
            The facts that must be equal on all ranks.
        Raises:
            ValueError: the state is not for these parameters.
        """
        zero = self.zero
        checkpoint.check_form(state_dict)
        state_dict = checkpoint.arranged(state_dict, zero.param_groups)
        ids = checkpoint.check_fits(state_dict, zero.param_groups, zero.shard.optim)
        facts = checkpoint.facts_of(state_dict, ids)
        mine = checkpoint.shard_of(state_dict["state"], ids, zero.shard.owned, copy)
        zero.shard.load(mine, state_dict["param_groups"])
        return facts

    @contextlib.contextmanager
    def loading(self, action: str) -> Iterator[list[str]]:
        """A context around code that loads the shard; if any rank raises, no shard is changed.

        If the network fails during the agreement, other ranks may have loaded the state and this rank has
        not. This rank then refuses to step.
        """
        # 1. Keep what a load replaces.
        zero, optim = self.zero, self.zero.shard.optim
        before = {"state": optim.state, "param_groups": optim.param_groups}
        # torch adds missing defaults when it loads. After a failed load, groups that are added later would
        # have them on some ranks only.
        defaults = dict(optim.defaults)
        try:
            with zero.accord.preparing(action) as facts:
                yield facts  # 2. The caller loads, and ranks agree that all of them could.
                facts += zero.shard.facts_of_options(optim.param_groups)
        except BaseException as error:
            # 3. Or put back what was there.
            optim.__setstate__(before)
            for key in optim.defaults.keys() - defaults.keys():
                del optim.defaults[key]
            if isinstance(error, RanksLostError) or not isinstance(error, Exception):
                zero.accord.note_cut_off(action)
            raise

        # 4. All ranks have loaded: take over the options, and drop what belonged to the old state.
        zero.shard.restore_copies()
        replace_options(optim.param_groups, zero.param_groups)
        self.note_change()
        # Ranks other than the owner may have rounded values, which are not compared.
        zero.accord.note_loaded(len(zero.built.params) if zero.registered.options.broadcast_dtype else 0)
