"""What this rank owns: its slices, and the local optimizer that steps them.

`minimal.py` has this in its constructor and its step. This module adds slices and copies of parameters.
A step calls three methods:

    shard.take(gradients)     set the `.grad` of each local tensor to the gradient of its slice
    shard.step(closure)       step the local optimizer
    shard.publish()           round the new values of copies into the parameters
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from zero_ref.plan.partition import Partition, Slice
from zero_ref.shard.buckets import kept_view
from zero_ref.shard.built import Built
from zero_ref.shard.groups import ParamGroup, loaded_options, options_of, replace_options
from zero_ref.shard.local_state import LocalStates, StateOfParameters
from zero_ref.shard.merged import CONTAINERS, SMALL_NUMEL, MergedSlices, place_end_to_end
from zero_ref.shard.methods import DirectCalls, has_method
from zero_ref.shard.offload import Arrival, StatePlace, in_pieces
from zero_ref.shard.owned import MASTER, Copies, OwnedSlice, own_slices
from zero_ref.shard.rounding import Masters
from zero_ref.shard.several import (
    SeveralOptimizers,
    check_nothing_beside_state,
    defaults_of,
    is_known,
    local_optimizer,
    optimizers_in,
    title,
)

logger = logging.getLogger("zero_ref.optimizer")

CAST_NBYTES = 2**22
"""Gradients that are cast for a step at a time: they stay in the cache until they are used."""


class Shard:
    """A rank's part of an optimizer.

    Args:
        built: the parameters and their partition.
        rank: this rank.
        groups: for each parameter group the options that the user gave, "optimizer_class" among them.
        optimizer_class, defaults: the class of the other groups, and the options of its constructor.
        merge: step adjacent small parameters as one tensor, if their optimizer is elementwise.
        masters: the copies to step in place of 16-bit parameters; None for no copies.
        place: where values and state are, if not on the parameters' devices.

    Attributes:
        owned: the slices that this rank owns.
        copies: those of them whose local tensors are copies.
        optim: the local optimizer.
        cut: (number, parameter, strides) of each parameter that more than one rank owns a part of.
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
        masters: Masters | None = None,
        place: StatePlace | None = None,
    ) -> None:
        self.rank, self.masters, self.place_of_state = rank, masters, place
        self.owned = own_slices(built.partition.slices_of_rank[rank], built.params, masters, place)
        local = self._by_group(built, len(groups))
        self.optim: Optimizer = local_optimizer(
            [{**given, "params": params} for given, params in zip(groups, local, strict=True)],
            optimizer_class,
            defaults,
        )
        self._merge = merge and place is None
        self._calls = DirectCalls(rank)
        self._coming: list[Arrival] = []
        self._published: set[torch.Tensor] = set()  # local tensors
        self._casts: torch.Tensor | None = None  # memory for the gradients of a piece, within a step
        self._steps = 0
        self._generator_was: torch.Tensor | None = None
        self._small = self._shares = self.merged = MergedSlices(self.optim, {})
        self._withheld: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self._used: set[int] = set()  # numbers of the parameters whose local tensors have had a gradient
        self.built = built
        self.replace_state(self.optim.state)
        self._arrange()
        self.copies.forget_versions()

    # ---------------------------------------------------------------------------------------- the three verbs

    def take(
        self,
        gradients: Mapping[int, torch.Tensor] | None = None,
        parts: Mapping[Slice, torch.Tensor] | None = None,
        merge: bool = True,
    ) -> None:
        """Set the `.grad` of each local tensor, and hide that of frozen parameters.

        Trained parameters that are owned whole and have no copy already have their gradients.

        Args:
            gradients: by parameter number, each in its parameter's shape and strides. The step then updates
                only these parameters. None means the `.grad` of each parameter.
            parts: by slice, the gradients of slices of parameters that are cut, (numel,) each; None if those
                of their parameters have them.
            merge: step adjacent small tensors as one, where that was chosen at construction.
        Raises:
            RuntimeError: a parameter that is split has a sparse gradient. Every rank checks all split
                parameters, so all raise.
        """

        def gradient_of(number: int, param: torch.Tensor) -> torch.Tensor | None:
            return param.grad if gradients is None else gradients.get(number)

        def part_of(own: OwnedSlice) -> torch.Tensor | None:
            if parts is not None and not own.is_whole:
                return parts.get(own.piece)
            grad = gradient_of(own.piece.param, own.param)
            return None if grad is None else own.part_of(grad)

        for number, param, _ in self.cut:
            grad = gradient_of(number, param)
            if grad is not None and grad.layout != torch.strided:
                raise RuntimeError(
                    f"parameter {self.built.name(number)} has a sparse gradient, which cannot be cut. Use a "
                    'partition of whole parameters, such as "sorted_greedy".'
                )
        for own in self._frozen:
            # A gradient from before the parameter was frozen would update the parameter on its owner only.
            self._replace(own.param, None)
        in_shares = merge and parts is not None and bool(self._shares.runs)
        if self.merged is not (merged := self._shares if in_shares else self._small):
            self.merged.unshare()
            self.merged = merged
        if gradients is not None:
            self.merged.dissolve()
            for own in self._in_place:
                self._replace(own.param, gradients.get(own.piece.param))
        elif not merge:
            self.merged.unshare()
        elif not in_shares:
            self.merged.merge()
        members = self.merged.members if merge and not in_shares else ()  # these have their gradients
        alone = [own for own in self._apart if own.local not in members]
        given = [(own, part) for own in alone if (part := part_of(own)) is not None]
        if self.place_of_state is not None:
            away = [(own.local, part) for own, part in given if own.is_copy]
            self._coming = self.place_of_state.fetch(away)
            self._used.update(own.piece.param for own, _ in given)
            given = [(own, part) for own, part in given if not own.is_copy]
        elif self.masters is not None and is_known(self.optim):
            cast = [(own, part) for own, part in given if _is_cast_in_pieces(own, part)]
            pairs = in_pieces([(own.local, part) for own, part in cast], CAST_NBYTES)
            self._coming = [Arrival([o for o, _ in piece], [g for _, g in piece]) for piece in pairs]
            self._used.update(own.piece.param for own, _ in cast)
            given = [(own, part) for own, part in given if not _is_cast_in_pieces(own, part)]
        _give(given)
        if in_shares:
            self.merged.merge()  # now slices of cut parameters have their gradients, too
        self._used.update(own.piece.param for own in self._apart if own.local.grad is not None)

    def step(
        self, closure: Callable[[], Any] | None = None, take: Callable[[], None] | None = None, **kwargs: Any
    ) -> Any:
        """Step the local optimizer, then restore all gradients as they were before `take`.

        Args:
            closure: computes the gradients.
            take: calls `take` with them, after the closure; None for a `take` without arguments.
            **kwargs: passed to the local optimizer's `step`.
        Returns:
            What the local optimizer's `step` returns.
        """
        if closure is not None:
            kwargs["closure"] = self._taking_after(closure, take or self.take)
        self._published.clear()
        self._steps += 1
        self._watch_generator()
        self._calls.expected = True
        options = [options_of(group) for group in self.optim.param_groups]
        try:
            while len(self._coming) > 1 and closure is None and is_known(self.optim):
                self._step_piece(self._coming.pop(0), kwargs)
                replace_options(options, self.optim.param_groups)
            if len(self._coming) == 1:
                return self._step_piece(self._coming.pop(), kwargs)
            # Another class may count its steps somewhere, so it makes one for all pieces.
            self._arrive_all()
            return self.optim.step(**kwargs)
        finally:
            self._calls.expected = False
            self._put_back()
            self.give_back()
            self._casts, self._coming = None, []
            self._warn_if_drawn()

    def call(
        self,
        name: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        parts: Mapping[Slice, torch.Tensor] | None,
    ) -> Any:
        """Call a method of the local optimizer's class while the local tensors have their gradients.

        Args:
            name, args, kwargs: the method, and its arguments.
            parts: as for `take`.
        Returns:
            What the method returns; a list if several classes have it.
        """
        used = set(self._used)
        if isinstance(self.optim, SeveralOptimizers):
            self.optim.hand_out()
        self._calls.expected = True
        self._generator_was = None if is_known(self.optim) else torch.get_rng_state()
        try:
            self.take(None, parts, merge=False)
            self._arrive_all()
            having = [one for one in optimizers_in(self.optim) if has_method(type(one), name)]
            results = [getattr(one, name)(*args, **kwargs) for one in having]
        finally:
            self._calls.expected = False
            self._put_back()
            self.give_back()
            self._casts, self._coming, self._used = None, [], used
            self._warn_if_drawn(f"{name}()")
        return results if len(results) > 1 else results[0]

    def publish_written(self, numbers: set[int]) -> None:
        """Round the copies of these parameters into them, also into frozen ones."""
        self._used |= numbers
        self.copies.publish(
            (own for own in self.copies.slices if own.piece.param in numbers), self.optim.state
        )

    @torch.no_grad()
    def _put_back(self) -> None:
        """Where the class has given a tensor other memory (`p.data = ...`), copy the values to its own.

        Messages and parameters share memory with the local tensors.
        """
        for tensor, memory in self._memory:
            if tensor.data_ptr() != memory.data_ptr():
                tensor.data = memory.copy_(tensor)

    def _step_piece(self, piece: Arrival, kwargs: dict[str, Any]) -> Any:
        """Step the local tensors that have gradients, and those of the piece, whose gradients arrive."""
        self._arrive(piece)
        result = self.optim.step(**kwargs)
        self._put_back()
        self.merged.done()
        for own in self._in_place:
            if own.param.grad is not None:
                self._replace(own.param, None)  # it is stepped with the first piece
        for own in self._apart:
            own.local.grad = None
        self.copies.publish((self._copy_of[local] for local in piece.locals), self.optim.state)
        self._published.update(piece.locals)
        return result

    @torch.no_grad()
    def _arrive(self, piece: Arrival) -> None:
        """Wait for the gradients of a piece, and set them."""
        for event in piece.ready:
            event.synchronize()
        if self.place_of_state is not None:
            for local, grad in zip(piece.locals, piece.gradients, strict=True):
                local.grad = grad.to(local.dtype)
            return
        numels = [local.numel() for local in piece.locals]
        if self._casts is None or self._casts.numel() < sum(numels):
            self._casts = torch.empty(sum(numels), dtype=piece.locals[0].dtype)
        parts = self._casts[: sum(numels)].split(numels)
        grads = [part.as_strided(o.size(), o.stride()) for part, o in zip(parts, piece.locals)]
        torch._foreach_copy_(grads, piece.gradients)
        for local, grad in zip(piece.locals, grads):
            local.grad = grad

    def _arrive_all(self) -> None:
        for piece in self._coming:
            self._arrive(piece)
            self._casts = None  # the next piece must not overwrite it
        self._coming = []

    def _watch_generator(self) -> None:
        """Note the state of torch's CPU generator in steps 1, 2, 4 and so on, of classes not torch's own."""
        watch = self._steps & (self._steps - 1) == 0 and not is_known(self.optim)
        self._generator_was = torch.get_rng_state() if watch else None

    def _warn_if_drawn(self, where: str = "its step") -> None:
        before, self._generator_was = self._generator_was, None
        if before is not None and not torch.equal(before, torch.get_rng_state()):
            warnings.warn(
                f"{title(self.optim)} drew random numbers in {where}. Each rank draws other ones, so the "
                "result is not that of one process with all parameters, and depends on who owns what.",
                stacklevel=4,
            )

    def publish(self, numbers: Container[int] | None = None) -> None:
        """Round the new values of copies into their parameters: all trained ones, or those in `numbers`."""
        self.copies.publish(
            (
                own
                for own in self.copies.slices
                if own.param.requires_grad
                and own.local not in self._published
                and (numbers is None or own.piece.param in numbers)
            ),
            self.optim.state,
        )

    def give_back(self) -> None:
        """Undo `take`."""
        self.merged.split()
        for own in self._apart:
            own.local.grad = None  # else the slice would keep the whole gradient alive after zero_grad()
        for param, grad in reversed(self._withheld):  # one may have been withheld twice
            param.grad = grad
        self._withheld.clear()

    def _replace(self, param: torch.Tensor, grad: torch.Tensor | None) -> None:
        self._withheld.append((param, param.grad))
        param.grad = grad

    def _taking_after(self, closure: Callable[[], Any], take: Callable[[], None]) -> Callable[[], Any]:
        def closure_then_take() -> Any:
            self.give_back()  # the user's code must see its own gradients
            self._warn_if_drawn()
            self._put_back()
            # An optimizer may change its parameters before it calls the closure. Publish only the changed
            # ones: a write would invalidate an autograd graph that was made before the step.
            self.publish(self.copies.changed())
            self.copies.note_versions()
            loss = closure()
            self.copies.follow_parameters()  # it may have changed parameters, too
            self._watch_generator()  # the closure may draw, as dropout does
            self._published.clear()
            take()
            self._arrive_all()
            return loss

        return closure_then_take

    # -------------------------------------------------------------------------------- when something changes

    def own(self, partition: Partition, params: Sequence[torch.Tensor], first: int = 0) -> list[OwnedSlice]:
        """The slices that this rank would own under another partition, from slice `first` on."""
        pieces = partition.slices_of_rank[self.rank][first:]
        return own_slices(pieces, params, self.masters, self.place_of_state, self._kept)

    @property
    def _kept(self) -> dict[Slice, torch.Tensor]:
        return {own.piece: own.local for own in self.owned if own.is_copy}

    @torch.no_grad()
    def place(self, built: Built) -> None:
        """Make the owned slices anew, after parameters were moved (also to another device) or frozen."""
        before, self.built = self.owned, built
        pieces = built.partition.slices_of_rank[self.rank]
        self.owned = own_slices(pieces, built.params, self.masters, self.place_of_state, self._kept)
        state = dict(self.states)
        for old, new in zip(before, self.owned, strict=True):
            if old.local is not new.local and old.local in state:
                state[new.local] = state.pop(old.local)
        self.replace_state(state)
        for group, local in zip(
            self.optim.param_groups, self._by_group(built, len(self.optim.param_groups)), strict=True
        ):
            group["params"] = local
        if any(old != own.local.device for old, own in zip(self._devices, self.owned)):
            # load_state_dict moves each value to the right device; step counters may stay on the CPU.
            here = {n: state[own.local] for n, own in enumerate(self.owned) if own.local in state}
            self.load(here, self.optim.param_groups)
        self._arrange()

    @torch.no_grad()
    def _arrange(self) -> None:
        """Sort the slices by what `take` and `publish` do with them."""
        built = self.built
        self.cut = [
            (number, param, param.stride())
            for number, param in enumerate(built.params)
            if built.is_cut(number)
        ]
        self._devices = [own.local.device for own in self.owned]
        self.copies = Copies(self.owned, self.masters, self.place_of_state)
        self._copy_of = {own.local: own for own in self.copies.slices}
        trained = [own for own in self.owned if own.param.requires_grad]
        self._in_place = [own for own in trained if own.local is own.param]
        self._apart = [own for own in trained if own.local is not own.param]
        self._frozen = [own for own in self.owned if own.local is own.param and not own.param.requires_grad]
        self._small.dissolve()
        self._shares.dissolve()
        mine = trained if self._merge else []
        whole = {own.local: own.param for own in mine if own.is_whole}
        self._small = self.merged = MergedSlices(self.optim, whole, SMALL_NUMEL)
        # In a share neighbours lie together, as do their gradients after ShardedDataParallel's backward.
        in_place = {own.local: own.local for own in mine if built.partition.ranges and not own.is_copy}
        self._shares = MergedSlices(self.optim, in_place)
        self._memory: list[tuple[torch.Tensor, torch.Tensor]] = []
        if not is_known(self.optim):
            runs = [*self._small.runs, *self._shares.runs]
            tensors = [own.local for own in self.owned] + [run.whole for run in runs]
            self._memory = [(tensor, tensor.detach()) for tensor in tensors]
            self._calls.watch(self.optim)

    def follow(self) -> None:
        """Follow what the user has written into parameters, or put in place of the local state."""
        self.copies.follow_parameters()
        if not isinstance(self.optim.state, LocalStates):
            self.replace_state(self.optim.state)

    def replace_state(self, state: Mapping[Any, Any]) -> None:
        """Go on with this state, by parameter or by local tensor."""
        states = LocalStates(
            self.built, self.owned, state.states if isinstance(state, StateOfParameters) else state
        )
        for one in (self.optim, *optimizers_in(self.optim)):
            one.state = states  # type: ignore[assignment]

    def _by_group(self, built: Built, count: int) -> list[list[torch.Tensor]]:
        """For each parameter group the local tensors of this rank's slices."""
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
        for number, (param, numel) in enumerate(zip(params, self.built.partition.numels, strict=True)):
            if param.numel() != numel:
                raise RuntimeError(
                    f"rank {self.rank}: parameter {self.built.name(number)} had {numel} elements and now has "
                    f"{param.numel()}. Build a new optimizer for a model of other sizes."
                )
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
        for number, param, strides in self.cut:
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
        for optim in optimizers_in(self.optim):
            number = kept_view(optim, self.built.params)
            if number is not None:
                raise RuntimeError(
                    f"rank {self.rank}: {type(optim).__name__} keeps views of parameter "
                    f"{self.built.name(number)} from when it was constructed, and to {action} would give it "
                    "other tensors: it would go on updating the old ones. Consolidate the state, construct a "
                    "new optimizer as you want it, and load."
                )

    # ---------------------------------------------------------------------------------------------- its state

    @property
    def states(self) -> LocalStates:
        """The local optimizer's state; it may have been replaced by the user."""
        if not isinstance(self.optim.state, LocalStates):
            self.replace_state(self.optim.state)
        return self.optim.state  # type: ignore[return-value]

    @property
    def state(self) -> Mapping[Any, dict[str, Any]]:
        """By local tensor, the state that is sent and saved: the optimizer's state and the values of copies.

        A copy that was never stepped equals its parameter and is left out: a plain optimizer that loads a
        state of only these values would take it for its own and not initialize the rest.

        Raises:
            TypeError: the class keeps more in its `state_dict`, which would be lost.
        """
        check_nothing_beside_state(self.optim)
        copies = {
            own.local: {**self.states.get(own.local, {}), MASTER: own.local.detach()}
            for own in self.copies.slices
            if own.is_master and own.piece.param in self._used
        }
        return {**self.states, **copies} if copies else self.states

    def load(self, state: Mapping[int, Mapping[str, Any]], saved_groups: Sequence[ParamGroup]) -> None:
        """Load state and options into the local optimizer, which converts their device and dtype.

        Args:
            state: by index in `owned`, each entry as in the property `state`.
            saved_groups: as in a state dict; only their options are used.
        Raises:
            ValueError: the saved values of a copy do not have its shape.
        """
        for number, of_slice in state.items():
            own, values = self.owned[number], of_slice.get(MASTER)
            if own.is_master and values is not None and getattr(values, "shape", None) != own.local.shape:
                shape = tuple(getattr(values, "shape", ()))
                raise ValueError(
                    f"the state {MASTER!r} of parameter {self.built.name(own.piece.param)} has shape "
                    f"{shape}, and what it stands for has {tuple(own.local.shape)}."
                )
        ends = [0, *accumulate(len(group["params"]) for group in self.optim.param_groups)]
        # torch searches them for each entry of the state, which in lists instead of ranges is quadratic.
        groups = [
            {**loaded_options(saved, ours, defaults_of(ours, self.optim)), "params": range(*of_group)}
            for ours, saved, of_group in zip(
                self.optim.param_groups, saved_groups, pairwise(ends), strict=True
            )
        ]
        self.optim.load_state_dict({"state": state, "param_groups": groups})
        for number, of_slice in state.items():
            # torch treats a string as an iterable and replaces it by str(generator), so restore the strings.
            loaded = self.optim.state[self.owned[number].local]
            for key, value in of_slice.items():
                if isinstance(value, (str, *CONTAINERS)):
                    loaded[key] = tree_map(
                        lambda now, text: text if type(text) is str else now, loaded[key], value
                    )
        self.replace_state(self.optim.state)

    def adopt(self, owned: list[OwnedSlice], state: Mapping[torch.Tensor, dict[str, Any]]) -> None:
        """Replace the owned slices and their state. Call `place` afterwards."""
        self.owned = owned
        if self.place_of_state is None:
            place_end_to_end(own.local for own in owned if own.is_copy)
        self._devices = [own.local.device for own in owned]
        self.replace_state(state)
        self.settle()

    @torch.no_grad()
    def settle(self) -> None:
        """Move the values of copies out of the loaded state; copies without a value get their parameter's."""
        self._used.clear()
        for own in self.owned:
            if self.place_of_state is not None:
                self.place_of_state.keep(self.optim.state.get(own.local, {}), own.local)
            # Remove the key even without a copy: the state may be from an optimizer that had copies.
            values = self.optim.state.get(own.local, {}).pop(MASTER, None)
            if own.is_copy:
                own.local.copy_(own.window if values is None or not own.is_master else values)
                self._used |= {own.piece.param} if values is not None and own.is_master else set()
        self.copies.note_versions()


def _is_cast_in_pieces(own: OwnedSlice, grad: torch.Tensor) -> bool:
    # On a CPU new memory for all casts takes longer than the update. A GPU's allocator has it at hand.
    return own.is_copy and own.local.device.type == "cpu" and grad.layout == torch.strided


def _give(gradients: Iterable[tuple[OwnedSlice, torch.Tensor]]) -> None:
    """Set the `.grad` of local tensors to the gradients of their slices, in the dtype of the local tensor."""
    parts, casts = list[torch.Tensor](), list[torch.Tensor]()
    for own, part in gradients:
        if own.is_copy and part.layout == torch.strided:
            parts.append(part)
            casts.append(part := torch.empty_like(own.local, requires_grad=False))
        own.local.grad = part.to(own.local.dtype)
    if casts:
        torch._foreach_copy_(casts, parts)


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
        len(built.messages),
        sum(message.tensor.nbytes for message in built.messages),
    )
    if level == dist.DebugLevel.DETAIL:  # type: ignore[attr-defined]
        for own in shard.owned:
            name = built.name(own.piece.param)
            logger.info("rank %d owns %s of parameter %s", shard.rank, own.piece, name)
