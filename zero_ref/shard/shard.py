"""A rank's shard: the slices that it owns, and the local optimizer that steps them.

`stairs/owners.py` has the shard in its constructor and its step. This module adds slices and copies of
parameters. Parameters may be frozen, moved, loaded, or given to other ranks. `stepper.py` has the step
itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from zero_ref.plan.partition import Partition, Slice
from zero_ref.shard.buckets import kept_view
from zero_ref.shard.built import Built
from zero_ref.shard.checks import facts_of_options
from zero_ref.shard.groups import ParamGroup, loaded_options, plain
from zero_ref.shard.local_class import (
    check_belongs_to_parameters,
    numbers_in_attributes,
    numbers_in_state,
)
from zero_ref.shard.local_state import LocalStates, StateOfParameters
from zero_ref.shard.merged import CONTAINERS
from zero_ref.shard.offload import StatePlace
from zero_ref.shard.owned import MASTER, Copies, OwnedSlice, own_slices
from zero_ref.shard.stepper import Casts, GradientSource, Steppers

logger = logging.getLogger("zero_ref.optimizer")


class Shard:
    """A rank's part of an optimizer.

    Args:
        built: the parameters and their partition.
        rank: this rank.
        groups: for each parameter group the options that the user gave.
        optimizer_class, defaults: the class of the local optimizer, and the options of its constructor.
        merge: step adjacent small parameters as one tensor, if their optimizer is elementwise.
        master_dtype: the dtype of the copies that are stepped in place of smaller parameters; None for none.
        place: the place of values and state; None for the parameters' own devices.

    Attributes:
        owned: the slices that this rank owns.
        parts: the owned slices that are not all of their parameter.
        copies: the owned slices whose local tensors are copies.
        optim: the local optimizer.
        masters_came: masters were loaded, and no update was made since.
        steppers: the objects that step the slices.
    """

    def __init__(
        self,
        built: Built,
        rank: int,
        groups: Sequence[ParamGroup],
        optimizer_class: type[Optimizer],
        defaults: Mapping[str, Any],
        *,
        merge: bool,
        master_dtype: torch.dtype | None = None,
        place: StatePlace | None = None,
    ) -> None:
        self.rank, self.master_dtype, self.place_of_state = rank, master_dtype, place
        self.owned = own_slices(built.partition.slices_of_rank[rank], built.params, master_dtype, place)
        local = self._by_group(built, len(groups))
        self.optim = optimizer_class(
            [{**given, "params": params} for given, params in zip(groups, local, strict=True)], **defaults
        )
        # As plain numbers: a tensor may be changed in place.
        self._at_first = {name: plain(value) for name, value in numbers_in_attributes(self.optim).items()}
        self._merge = merge and place is None
        self.masters_came = False
        self._used: set[int] = set()  # numbers of the parameters whose local tensors have had a gradient
        self.built = built
        self.replace_state(self.optim.state)
        self._arrange()
        self.copies.forget_versions()

    # ------------------------------------------------------------------------------------------------ a step

    def step(self, source: GradientSource, **options: Any) -> Any:
        """Step the local optimizer with the gradients of what this rank owns, and publish the new values.

        Args:
            source: the places of the gradients.
            **options: passed to the local optimizer's `step`.
        Returns:
            What the local optimizer's `step` returns.
        Raises:
            RuntimeError: a parameter that is cut has a sparse gradient. Every rank checks all parameters that
                are cut, so all raise.
        """
        # 1. Give each local tensor the gradient of its slice.
        stepper = self.steppers.chosen
        if self.built.cut:
            self._check_can_be_cut(source)
        stepper.set_gradients(source)
        # 2. Step, then give the parameters back the gradients that the user knows.
        try:
            return stepper.step(**options)
        finally:
            stepper.restore_gradients()

    def step_with(self, closure: Callable[[], Any], in_slices: Callable[[], bool], **options: Any) -> Any:
        """Step the local optimizer, which calls the closure to compute the gradients.

        Args:
            closure: re-evaluates the model, and returns the loss.
            in_slices: returns what is `GradientSource.in_slices` after the closure's backward.
            **options, Returns, Raises: as `step`.
        """
        try:
            return self.steppers.chosen.step(closure=partial(self._evaluate, closure, in_slices), **options)
        finally:
            self.steppers.chosen.restore_gradients()

    def _check_can_be_cut(self, source: GradientSource) -> None:
        """Refuse a sparse gradient of a parameter that is cut, on all ranks: not only on its owners."""
        for number, param, _ in self.built.cut:
            grad = source.of_param(number, param)
            if grad is not None and grad.layout != torch.strided:
                raise RuntimeError(
                    f"parameter {self.built.name(number)} has a sparse gradient, which cannot be cut. Use a "
                    'partition of whole parameters, such as "sorted_greedy".'
                )

    def _evaluate(self, closure: Callable[[], Any], in_slices: Callable[[], bool]) -> Any:
        """Call the user's closure inside the step of the local optimizer, then set the new gradients."""
        # 1. The user's code must see its own gradients, and the values that the class has made so far.
        self.steppers.chosen.restore_gradients()
        self.steppers.restore_memory()
        # A class may change its parameters before it calls the closure. Publish only the changed ones: a
        # write would invalidate an autograd graph that was made before the step.
        changed = self.copies.changed()
        trained = [own for own in self.copies.slices if own.param.requires_grad]
        self.copies.publish((own for own in trained if own.piece.param in changed), self.optim.state)
        self.copies.note_versions()
        # 2. Call it. It may change parameters, too.
        loss = closure()
        self.copies.follow_parameters()
        # 3. Set all gradients at once: the class goes on with its step when this returns.
        source = GradientSource(in_slices=in_slices())
        self._check_can_be_cut(source)
        self.steppers.chosen.set_gradients(source, at_once=True)
        return loss

    def call(self, name: str) -> Any:
        """Call a method of the local optimizer's class, such as `eval`.

        Returns:
            What the method returns.
        """
        try:
            return getattr(self.optim, name)()
        finally:
            self.steppers.restore_memory()

    def publish_written(self, numbers: set[int]) -> None:
        """Round the copies of these parameters, also of frozen ones, into the parameters."""
        self._used |= numbers
        self.copies.publish(
            (own for own in self.copies.slices if own.piece.param in numbers), self.optim.state
        )

    def drop_gradients(self, *, to_zeros: bool) -> None:
        """Set the gradients of slices of parameters that are cut to None.

        Args:
            to_zeros: set the `.grad` of each of these parameters to zeros if its slice had a gradient, as the
                next backward adds to that; else to None, as only a change of it was to be noticed.
        """
        for own in self.parts:
            if to_zeros:
                had = own.leaf.grad is not None
                own.param.grad = torch.zeros_like(own.param, requires_grad=False) if had else None
            own.leaf.grad = None

    # -------------------------------------------------------------------------------- when something changes

    def slices_under(
        self, partition: Partition, params: Sequence[torch.Tensor], first: int = 0
    ) -> list[OwnedSlice]:
        """Make the slices that this rank would own under another partition, from slice `first` on."""
        pieces = partition.slices_of_rank[self.rank][first:]
        return own_slices(pieces, params, self.master_dtype, self.place_of_state, self._kept)

    @property
    def _kept(self) -> dict[Slice, torch.Tensor]:
        return {own.piece: own.local for own in self.owned if own.is_copy}

    @torch.no_grad()
    def place(self, built: Built) -> None:
        """Make the owned slices anew, after parameters were moved (also to another device) or frozen."""
        # 1. Make the new slices.
        self.steppers.dissolve()
        before, self.built = self.owned, built
        self.owned = self.slices_under(built.partition, built.params)
        # 2. Give the new tensors the gradients and the state of the old ones, and their places in the groups.
        state = dict(self.states)
        for old, new in zip(before, self.owned, strict=True):
            if old.leaf is not new.leaf and old.leaf.grad is not None:
                new.leaf.grad = old.leaf.grad.to(new.leaf)
            if old.local is not new.local and old.local in state:
                state[new.local] = state.pop(old.local)
        self.replace_state(state)
        for group, local in zip(
            self.optim.param_groups, self._by_group(built, len(self.optim.param_groups)), strict=True
        ):
            group["params"] = local
        # 3. Move the state along. load_state_dict knows the right device: step counters may stay on the CPU.
        if any(old != own.local.device for old, own in zip(self._devices, self.owned)):
            here = {n: state[own.local] for n, own in enumerate(self.owned) if own.local in state}
            self.load(here, self.optim.param_groups)
        self._arrange()

    @torch.no_grad()
    def _arrange(self) -> None:
        """Find the slices that are copies, and make the steppers."""
        built = self.built
        self._devices = [own.local.device for own in self.owned]
        self.parts = [own for own in self.owned if not own.is_whole]
        self.copies = Copies(self.owned, self.place_of_state)
        self.steppers = Steppers(
            self.owned,
            self.copies,
            self.optim,
            transfer=self.place_of_state or Casts(),
            used=self._used,
            merge=self._merge,
            in_ranges=bool(built.partition.ranges),
            buffers=built.buffers_of(self.rank),
        )

    def follow(self) -> None:
        """Use values that the user has written into parameters, and a state that the user has replaced."""
        if self.copies.slices:
            self.copies.follow_parameters()
        if not isinstance(self.optim.state, LocalStates):
            self.replace_state(self.optim.state)

    def replace_state(self, state: Mapping[Any, Any]) -> None:
        """Replace the local optimizer's state.

        Args:
            state: by parameter or by local tensor.
        """
        states = state.states if isinstance(state, StateOfParameters) else state
        self.optim.state = LocalStates(self.built, self.owned, states)  # type: ignore[assignment]

    def _by_group(self, built: Built, count: int) -> list[list[torch.Tensor]]:
        """List the local tensors of this rank's slices, for each parameter group."""
        local: list[list[torch.Tensor]] = [[] for _ in range(count)]
        for own in self.owned:
            local[built.specs[own.piece.param].group].append(own.local)
        return local

    def check_same_elements(self, params: Sequence[torch.Tensor]) -> None:
        """Refuse parameters whose elements are no longer those of the plan.

        Raises:
            RuntimeError: the size of a parameter has changed, or the strides of one that is cut; a range has
                trained parameters of several dtypes.
        """
        # 1. Each parameter has the size that was planned.
        for number, (param, numel) in enumerate(zip(params, self.built.partition.numels, strict=True)):
            if param.numel() != numel:
                raise RuntimeError(
                    f"rank {self.rank}: parameter {self.built.name(number)} had {numel} elements and now has "
                    f"{param.numel()}. Build a new optimizer for a model of other sizes."
                )
        # 2. A range is one flat tensor, so its trained parameters have one dtype.
        for shared in self.built.partition.ranges:
            first, *others = [number for number in shared.params if params[number].requires_grad] or [0]
            for number in others:
                if params[number].dtype != params[first].dtype:
                    one, other = (f"{self.built.name(n)} ({params[n].dtype})" for n in (first, number))
                    raise RuntimeError(
                        f"rank {self.rank}: parameters {one} and {other} have come to differ in dtype, and "
                        "lie in one range, which ranks share. Cast all parameters, or cast them before the "
                        "optimizer is constructed."
                    )
        # 3. A slice is a range of memory: the same strides mean the same elements.
        for number, param, strides in self.built.cut:
            if param.stride() != strides:
                raise RuntimeError(
                    f"rank {self.rank}: parameter {self.built.name(number)} is split between ranks along its "
                    f"memory, and its strides changed from {strides} to {param.stride()}: its state would "
                    "belong to other elements. Change the memory format before constructing the optimizer, "
                    'or use a partition of whole parameters, such as "sorted_greedy".'
                )

    def check_keeps_no_views(self, action: str) -> None:
        """Refuse to move parameters of which the local optimizer keeps views, which would not move along.

        Raises:
            RuntimeError: the local optimizer keeps a view; names the parameter.
        """
        number = kept_view(self.optim, self.built.params)
        if number is not None:
            raise RuntimeError(
                f"rank {self.rank}: {type(self.optim).__name__} keeps views of parameter "
                f"{self.built.name(number)} from when it was constructed, and to {action} would give it "
                "other tensors: it would go on updating the old ones. Consolidate the state, construct a "
                "new optimizer with the arguments that you want, and load the state into it."
            )

    def facts_of_options(self, param_groups: Sequence[ParamGroup]) -> list[str]:
        """The facts that must be equal on all ranks at any time: options, and what the class keeps for all.

        What a constructor has set does not count: it may be the rank, or the number of parameters here.
        """
        attributes = numbers_in_attributes(self.optim).items()
        kept = numbers_in_state(self.optim)
        kept |= {name: value for name, value in attributes if plain(value) != self._at_first.get(name)}
        return facts_of_options(param_groups, type(self.optim), kept)

    # ---------------------------------------------------------------------------------------------- its state

    @property
    def states(self) -> LocalStates:
        """The local optimizer's state, also if the user has replaced it."""
        if not isinstance(self.optim.state, LocalStates):
            self.replace_state(self.optim.state)
        return self.optim.state  # type: ignore[return-value]

    @property
    def state(self) -> Mapping[Any, dict[str, Any]]:
        """The state that is sent and saved, by local tensor: the optimizer's state and the values of copies.

        A copy that was never stepped equals its parameter and is left out: a plain optimizer that loads an
        entry of only these values would take the entry for its own and not initialize the rest.

        Raises:
            TypeError: the class keeps more than the state of parameters, which would be lost.
        """
        check_belongs_to_parameters(self.optim)
        copies = {
            own.local: {**self.states.get(own.local, {}), MASTER: own.local.detach()}
            for own in self.copies.slices
            if own.is_master and own.piece.param in self._used
        }
        return {**self.states, **copies}

    def load(self, state: Mapping[int, Mapping[str, Any]], saved_groups: Sequence[ParamGroup]) -> None:
        """Load state and options into the local optimizer, which converts their device and dtype.

        Args:
            state: by index in `owned`, each entry as in the property `state`.
            saved_groups: as in a state dict; only their options are used.
        Raises:
            ValueError: the saved values of a copy do not have its shape.
        """
        # 1. Check before anything is changed.
        for number, of_slice in state.items():
            own, values = self.owned[number], of_slice.get(MASTER)
            if own.is_master and values is not None and getattr(values, "shape", None) != own.local.shape:
                shape = tuple(getattr(values, "shape", ()))
                raise ValueError(
                    f"the state {MASTER!r} of parameter {self.built.name(own.piece.param)} has shape "
                    f"{shape}, and what it stands for has {tuple(own.local.shape)}."
                )
        # 2. Load. torch searches "params" for each entry of the state, which takes long in lists: use ranges.
        ends = [0, *accumulate(len(group["params"]) for group in self.optim.param_groups)]
        groups = [
            {**loaded_options(saved, ours, self.optim.defaults), "params": range(*of_group)}
            for ours, saved, of_group in zip(
                self.optim.param_groups, saved_groups, pairwise(ends), strict=True
            )
        ]
        self.optim.load_state_dict({"state": state, "param_groups": groups})
        # 3. torch treats a string as an iterable and replaces it by str(generator), so restore the strings.
        for number, of_slice in state.items():
            loaded = self.optim.state[self.owned[number].local]
            for key, value in of_slice.items():
                if isinstance(value, (str, *CONTAINERS)):
                    loaded[key] = tree_map(
                        lambda now, text: text if type(text) is str else now, loaded[key], value
                    )
        self.replace_state(self.optim.state)

    def adopt(self, owned: list[OwnedSlice]) -> None:
        """Replace the owned slices by others, without state. Call `place` afterwards, then load a state."""
        self.owned = owned
        self._devices = [own.local.device for own in owned]
        self.replace_state({})

    @torch.no_grad()
    def restore_copies(self) -> None:
        """Move the values of copies out of loaded state; a copy without a value gets its parameter's."""
        self._used.clear()
        for own in self.owned:
            if self.place_of_state is not None:
                self.place_of_state.keep(self.optim.state.get(own.local, {}), own.local)
            # Remove the key even without a copy: the state may be from an optimizer that had copies.
            of_slice = self.optim.state.get(own.local, {})
            values = of_slice.pop(MASTER, None)
            if not of_slice:
                self.optim.state.pop(own.local, None)
            if own.is_copy:
                own.local.copy_(own.window if values is None or not own.is_master else values)
                self._used |= {own.piece.param} if values is not None and own.is_master else set()
        self.copies.note_versions()
        self.masters_came = bool(self._used)


def log_share(built: Built, shard: Shard, world_size: int) -> None:
    """Log partition and message sizes at TORCH_DISTRIBUTED_DEBUG=INFO; every owned slice at DETAIL."""
    level = dist.get_debug_level()  # type: ignore[attr-defined]
    if level == dist.DebugLevel.OFF:  # type: ignore[attr-defined]
        return
    total, mine = sum(built.partition.numels), built.partition.loads[shard.rank]
    logger.info(
        "rank %d of %d owns %d of %d elements (%.1f%%) in %d slices; a step sends %d messages, %d bytes",
        shard.rank,
        world_size,
        mine,
        total,
        100 * mine / max(total, 1),
        len(shard.owned),
        len(built.to_send),
        sum(message.tensor.nbytes for message in built.to_send),
    )
    if level == dist.DebugLevel.DETAIL:  # type: ignore[attr-defined]
        for own in shard.owned:
            name = built.name(own.piece.param)
            logger.info("rank %d owns %s of parameter %s", shard.rank, own.piece, name)
