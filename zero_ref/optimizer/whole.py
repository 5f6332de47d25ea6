"""Save and load the state of a sharded optimizer in the form of the unsharded optimizer.

This module adds to `state_dict` of `minimal.py`: the state can be gathered on one chosen rank, all ranks
refuse a state that does not fit, and a load that fails leaves the optimizer unchanged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from traceback import walk_stack
from typing import Any, Literal

import torch
from torch.optim import Optimizer

from zero_ref.comm.agreement import RanksLostError, agreement
from zero_ref.comm.collectives import Collectives
from zero_ref.optimizer import checkpoint
from zero_ref.optimizer.accord import Accord, facts_of_options
from zero_ref.shard.built import Built
from zero_ref.shard.coupling import switch, trial
from zero_ref.shard.groups import ParamGroup, params_of, replace_options
from zero_ref.shard.local_state import SliceState, StateOfParameters
from zero_ref.shard.owned import MASTER
from zero_ref.shard.several import is_known, keys_beside_state, local_optimizer, optimizers_in
from zero_ref.shard.shard import Shard


def _is_asked_by_torchs_setter() -> bool:
    """Whether the caller is `set_optimizer_state_dict`, which gives no other sign of it.

    Where it gets no keys, it fails with "Expected device to be set" (torch 2.13; tests/ranks/test_dcp.py).
    """
    return any(frame.f_code.co_name == "_load_optim_state_dict" for frame, _ in walk_stack(None))


class WithWholeState(Optimizer):
    """The part of `ZeroRedundancyOptimizer` that gathers the state onto a rank and loads a shard of it."""

    accord: Accord
    collectives: Collectives
    shard: Shard
    broadcast_dtype: torch.dtype | None
    check_groups: Callable[[], None]
    current: Callable[[], Built]
    standing_facts: Callable[[], list[str]]
    _given: list[ParamGroup]
    _main: tuple[type[Optimizer], Mapping[str, Any]]
    _compared: int
    _consolidated: checkpoint.State | None = None
    _is_everywhere = True  # all ranks have `_consolidated`, or what the constructor made
    _is_as_constructed = True  # no update and no load since, on any rank

    @property
    def rank(self) -> int:
        return self.collectives.rank

    @property
    def world_size(self) -> int:
        return self.collectives.world_size

    @property
    def optim(self) -> Optimizer:
        return self.shard.optim

    @property  # type: ignore[override]
    def state(self) -> MutableMapping[Any, Any]:
        """This rank's part of the state, by parameter; it may be changed in place, or replaced.

        For a parameter that is cut it has a `SliceState`, which says the range of its elements. It has
        nothing for a parameter of another rank. Call `consolidate_state_dict` after a change.

        Raises:
            KeyError: this rank has no state of that parameter.
            RuntimeError: it has several parts of it; see `parts_of_state`. All ranks raise.
        """
        return StateOfParameters(self.shard.states)

    @state.setter
    def state(self, state: Mapping[Any, Any]) -> None:
        if hasattr(self, "shard"):  # else torch's constructor sets it to an empty one
            self.shard.replace_state(state)
            self.state_changes()

    def parts_of_state(self, param: torch.Tensor) -> list[SliceState]:
        """The parts that this rank has of a parameter's state, each with the range of its elements.

        >>> for part in optimizer.parts_of_state(param):                                     # doctest: +SKIP
        ...     part["exp_avg"].mul_(mask.view(-1)[part.start : part.stop])

        Returns:
            One part if the rank owns all of the parameter, none if it owns nothing of it.
        Raises:
            KeyError: it is no parameter of this optimizer.
        """
        return self.shard.states.parts(param)

    def consolidate_state_dict(self, to: int | Literal["all"] = 0) -> None:
        """Gather the optimizer state onto one rank, or onto all; then `state_dict()` returns it there.

        Args:
            to: a rank of the group, or "all".
        Raises:
            ValueError: `to` is not a rank of the group, or ranks pass different values.
            TypeError: the state holds something other than tensors, numbers, strings and None, and lists,
                tuples and dicts of these; or one of these in the state of a parameter that is cut.
            MemoryError: `to` lacks memory for the state. If one rank raises, all raise.
        Collective: all ranks of the group.
        Cost: `to` receives the (N-1)/N of the state that it does not own, directly into the final tensors in
            CPU memory. Other ranks allocate 256 KiB, to send small tensors together. Three all-gathers of 32
            bytes.
        """
        built = self.current()
        with agreement(self.collectives, "consolidate the optimizer state") as facts:
            facts += [f"to={to}", *self.standing_facts()]
            if to != "all" and not (isinstance(to, int) and 0 <= to < self.world_size):
                raise ValueError(
                    f"rank {self.rank}: to={to!r} is no rank of a group of {self.world_size}, nor 'all'."
                )
            packed = checkpoint.pack(self.shard.owned, self.shard.state)
        self._consolidated = checkpoint.consolidate(self.collectives, to, built.params, packed)
        self._is_everywhere = to == "all"

    def state_dict(self) -> dict[str, Any]:
        """The state that the unsharded optimizer would have. It loads there, and here at any world size.

        Its tensors are copies; to change the state, write into `state`, then consolidate again.
        Before the first update or load it needs no consolidation: it is what the constructor makes, for most
        classes nothing.

        Raises:
            RuntimeError: the state was not consolidated onto this rank since the last update or load; or,
                before the first, a class that is not torch's makes state in its constructor. Or torch's
                `set_optimizer_state_dict` asks for it, to find the keys that a whole state has.
        """
        self.check_groups()
        for before_hook in self._optimizer_state_dict_pre_hooks.values():
            before_hook(self)
        whole = self._consolidated
        if whole is None and self._is_as_constructed:
            whole = self._constructed_state()
        if not (whole and self._is_everywhere) and _is_asked_by_torchs_setter():
            raise RuntimeError(
                f"rank {self.rank}: torch's set_optimizer_state_dict, with full_state_dict or "
                "broadcast_from_rank0, asks the optimizer for the keys of the whole state, and a rank has "
                "those of its shard. Pass zero_ref.OptimizerToLoad(optimizer) in place of the optimizer."
            )
        if whole is None:
            raise RuntimeError(
                f"rank {self.rank}: the optimizer state is spread over {self.world_size} ranks and has not "
                "been gathered on this one since the last step. Call "
                f"consolidate_state_dict({self.rank}) on all ranks, or state_dict() only on the rank that "
                "the state was gathered to. Options, such as lr, are in optimizer.param_groups at any time."
            )
        state_dict: dict[str, Any] = {
            "state": {param: dict(state) for param, state in whole.items()},
            "param_groups": checkpoint.packed_groups(self.param_groups),
        }
        for after_hook in self._optimizer_state_dict_post_hooks.values():
            state_dict = after_hook(self, state_dict) or state_dict
        return state_dict

    def _constructed_state(self) -> checkpoint.State | None:
        """The state that the unsharded optimizer's constructor makes, without communication.

        A rank that owns nothing cannot tell from its own state, so each constructs the optimizer on
        stand-ins for all parameters. Nothing is written into their memory, so they take none.

        Returns:
            By parameter number, on the CPU. None if only a consolidation can tell: a class that is not
            torch's makes state, which may depend on the values of parameters.
        """
        masters = self.shard.masters

        def stand_in(param: torch.Tensor) -> torch.Tensor:
            dtype = masters.dtype if masters is not None and masters.copies(param) else param.dtype
            return torch.empty_like(param, dtype=dtype, device="cpu", requires_grad=param.requires_grad)

        try:
            with torch.device("cpu"):  # also where the default is another
                optim = self._optimizer_of(stand_in)
        except Exception:  # a class may refuse the stand-ins
            return None
        if keys_beside_state(optim) or (optim.state and not is_known(optim)):
            return None
        state: checkpoint.State = optim.state_dict()["state"]
        return state

    def _optimizer_of(self, stand_in: Callable[[torch.Tensor], torch.Tensor]) -> Optimizer:
        """An optimizer like the local one, on stand-ins for all parameters."""
        groups = [
            {**given, "params": [stand_in(param) for param in group["params"]]}
            for group, given in zip(self.param_groups, self._given, strict=True)
        ]
        return local_optimizer(groups, *self._main)

    def keys_of_state(self) -> list[list[Any]]:
        """For each parameter the keys that its state has after an update, as a trial on small ones finds out.

        Cost: an update of 2**ndim elements for each parameter, on the CPU.
        """

        def stand_in(param: torch.Tensor) -> torch.Tensor:
            small = torch.zeros([2] * param.ndim, requires_grad=param.requires_grad)
            small.grad = torch.zeros_like(small) if param.requires_grad else None
            return small

        with trial():
            optim = self._optimizer_of(stand_in)
            for one in optimizers_in(optim):
                switch(one, "train")
            optim.step()
        masters = self.shard.masters
        return [
            [*optim.state.get(small, {}), *[MASTER] * (masters is not None and masters.copies(param))]
            for small, param in zip(params_of(optim.param_groups), self.current().params, strict=True)
        ]

    def state_changes(self) -> None:
        """Note that what was gathered, and what the constructor made, is no longer the state."""
        self._consolidated, self._is_as_constructed = None, False

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load this rank's shard of a whole optimizer's state.

        Args:
            state_dict: from the plain torch optimizer or from a consolidated ZeroRedundancyOptimizer, at any
                world size and partition, or whole from FSDP or torch.distributed.checkpoint. Where it and
                this optimizer have names for parameters, groups and parameters may come in any order. This
                rank's shard is copied, so later steps do not change the dict.
        Raises:
            ValueError: the dict is not for these parameters; names the first that does not fit. If one rank
                raises, all raise and the optimizer is unchanged.
        Collective: all ranks of the group, each with the whole dict.
        Cost: one all-gather of 32 bytes.
        """
        self.current()
        with self.loading("load the state dict") as facts:
            for before_hook in self._optimizer_load_state_dict_pre_hooks.values():
                state_dict = before_hook(self, state_dict) or state_dict
            state_dict = checkpoint.arranged(state_dict, self.param_groups)
            facts += checkpoint.check_fits(state_dict, self.param_groups, self.optim)
            ids = checkpoint.saved_ids(state_dict)
            mine = checkpoint.shard_of(state_dict["state"], ids, self.shard.owned)
            self.shard.load(mine, state_dict["param_groups"])
        for after_hook in self._optimizer_load_state_dict_post_hooks.values():
            after_hook(self)

    @contextlib.contextmanager
    def loading(self, action: str) -> Iterator[list[str]]:
        """An `agreement` around code that loads the shard; if a rank raises, the shard is unchanged.

        If the network fails during the agreement, other ranks may have loaded and this rank has not. This
        rank then refuses to step.
        """
        before = {"state": self.optim.state, "param_groups": self.optim.param_groups}
        # torch adds a default when it loads; groups that are added later would have it on some ranks only.
        defaults = [(one, dict(one.defaults)) for one in (self.optim, *optimizers_in(self.optim))]
        try:
            with agreement(self.collectives, action) as facts:
                yield facts
                facts += facts_of_options(self.optim.param_groups, self.optim)
        except BaseException as error:
            self.optim.__setstate__(before)
            for one, had in defaults:
                for key in one.defaults.keys() - had.keys():
                    del one.defaults[key]
            if isinstance(error, RanksLostError) or not isinstance(error, Exception):
                self.accord.was_cut_off(action)
            raise
        self.shard.settle()
        replace_options(self.optim.param_groups, self.param_groups)
        self.state_changes()
        self.accord.lost = {}
        if self.broadcast_dtype is not None:
            self._compared = len(self.shard.built.params)  # a rank may have loaded rounded values

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "a ZeroRedundancyOptimizer cannot be copied or pickled: it is tied to those of the other ranks. "
            "Use consolidate_state_dict() and state_dict(). To copy a model in ShardedDataParallel, copy its "
            "`module`."
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        raise TypeError(
            "a ZeroRedundancyOptimizer takes no __setstate__(), which would give this rank the state of all. "
            "Use load_state_dict(), or assign optimizer.state."
        )
