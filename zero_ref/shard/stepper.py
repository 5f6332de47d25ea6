"""How a rank steps what it owns: `self.local.step()` of `minimal.py`, for tensors that are no parameters.

In `minimal.py` the local optimizer steps parameters, which have their gradients. Here it steps local tensors,
which first have to be given theirs. There are three steppers, chosen once when the shard is arranged:

    Stepper         steps local tensors that lie in the parameters' own memory
    CopyStepper     steps copies of them, in 32 bits or in other memory, in pieces
    MergedStepper   steps neighbours in memory as one tensor, and leaves the rest to one of the other two

All have the same methods, which a step calls in this order:

    stepper.take(source)       set the `.grad` of each local tensor to the gradient of its slice
    stepper.step(**options)    step the local optimizer; write new values of copies into the parameters
    stepper.give_back()        restore every `.grad` as the user knows it
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch.optim import Optimizer

from zero_ref.plan.partition import Slice
from zero_ref.shard.foreign import ForeignStep
from zero_ref.shard.groups import options_of, params_of, replace_options
from zero_ref.shard.merged import SMALL_NUMEL, MergedSlices
from zero_ref.shard.offload import PieceGradients, StatePlace, in_pieces
from zero_ref.shard.owned import Copies, OwnedSlice
from zero_ref.shard.several import is_known

CAST_NBYTES = 2**22
"""Gradients that are cast for a step at a time: they stay in the cache until they are used."""


class GradientSource(NamedTuple):
    """Where the gradients of an update are.

    Args:
        by_param: by parameter number, each in its parameter's shape and strides; the step updates only these
            parameters. None means the `.grad` of each parameter.
        by_slice: by slice, the gradients of slices of parameters that are cut, (numel,) each. None means that
            the gradients of their parameters have them.
    """

    by_param: Mapping[int, torch.Tensor] | None = None
    by_slice: Mapping[Slice, torch.Tensor] | None = None

    def of_param(self, number: int, param: torch.Tensor) -> torch.Tensor | None:
        """The gradient of a whole parameter."""
        return param.grad if self.by_param is None else self.by_param.get(number)

    def of_slice(self, own: OwnedSlice) -> torch.Tensor | None:
        """The gradient of a slice that this rank owns."""
        if self.by_slice is not None and not own.is_whole:
            return self.by_slice.get(own.piece)
        grad = self.of_param(own.piece.param, own.param)
        return None if grad is None else own.part_of(grad)


class AnyStepper(Protocol):
    """The methods that all steppers have."""

    def take(self, source: GradientSource, *, at_once: bool = False) -> None: ...
    def step(self, **options: Any) -> Any: ...
    def give_back(self) -> None: ...


class Stepper:
    """Steps the local tensors where they lie: parameters that are owned whole, and slices that are views.

    Args:
        owned: the slices that this rank owns.
        local: the local optimizer, or what stands between it and the stepper.
    """

    def __init__(self, owned: Iterable[OwnedSlice], local: Optimizer | ForeignStep) -> None:
        owned = list(owned)
        self.local = local
        self.frozen = [own for own in owned if own.local is own.param and not own.param.requires_grad]
        trained = [own for own in owned if own.param.requires_grad]
        # A whole parameter has its gradient; a slice has to be given its part.
        self.whole = [own for own in trained if own.local is own.param]
        self.slices = [own for own in trained if own.local is not own.param]
        self._hidden: list[tuple[torch.Tensor, torch.Tensor | None]] = []

    def take(
        self, source: GradientSource, *, at_once: bool = False, but: Container[torch.Tensor] = ()
    ) -> None:
        """Give each local tensor the gradient of its slice, and hide those that must not be used.

        Args:
            source: where the gradients are.
            at_once: all gradients are to be set when `take` returns.
            but: local tensors that already have theirs.
        """
        # A gradient from before the parameter was frozen would update the parameter on its owner only.
        for own in self.frozen:
            self.hide(own.param)
        if source.by_param is not None:
            for own in self.whole:
                self.hide(own.param)
                own.param.grad = source.by_param.get(own.piece.param)
        for own in self.slices:
            if not own.is_copy and own.local not in but and (part := source.of_slice(own)) is not None:
                own.local.grad = part.to(own.local.dtype)

    def step(self, **options: Any) -> Any:
        """Step the local optimizer, and return what it returns."""
        return self.local.step(**options)

    def give_back(self) -> None:
        """Undo `take`."""
        # A slice's gradient is a view: it would keep the whole gradient alive after zero_grad().
        for own in self.slices:
            own.local.grad = None
        for param, grad in reversed(self._hidden):  # one may have been hidden twice
            param.grad = grad
        self._hidden.clear()

    def hide(self, param: torch.Tensor) -> None:
        """Take a parameter's `.grad` away until `give_back`."""
        self._hidden.append((param, param.grad))
        param.grad = None


class CopyStepper(Stepper):
    """Steps copies of slices, masters in 32 bits or in other memory, and rounds them into the parameters.

    A gradient has to be cast for a copy, or carried to its memory. This is done in pieces: a piece takes
    little memory, and while one is stepped, others are on their way.

    Args:
        owned, local: as `Stepper`.
        copies: those of the slices whose local tensors are copies.
        optim: the local optimizer.
        way: how gradients come to the copies.
        used: receives the numbers of the parameters whose local tensors have had a gradient.
    """

    def __init__(
        self,
        owned: Iterable[OwnedSlice],
        local: Optimizer | ForeignStep,
        copies: Copies,
        optim: Optimizer,
        way: Casts | StatePlace,
        used: set[int],
    ) -> None:
        super().__init__(owned, local)
        self.copies, self.optim, self.way, self.used = copies, optim, way, used
        self._copy_of = {own.local: own for own in copies.slices}
        # Another class than torch's may count its steps somewhere, so it makes one for all pieces.
        self._may_step_pieces = is_known(optim)
        self._coming: list[PieceGradients] = []
        self._updated: Container[int] | None = None  # numbers of parameters; None for all trained ones

    def take(
        self, source: GradientSource, *, at_once: bool = False, but: Container[torch.Tensor] = ()
    ) -> None:
        super().take(source, but=but)
        given = [
            (own, part) for own in self.copies.slices if (part := self._part(own, source, but)) is not None
        ]
        self._coming = self.way.start_copies((own.local, part) for own, part in given)
        if at_once or not self._may_step_pieces:
            for piece in self._coming:
                self.way.set_gradients(piece)
                self.way.release_memory()  # the next piece must not overwrite what this one has cast
            self._coming = []
        self.used.update(own.piece.param for own, _ in given)
        self.used.update(own.piece.param for own in self.slices if own.local.grad is not None)
        self._updated = source.by_param

    def _part(
        self, own: OwnedSlice, source: GradientSource, but: Container[torch.Tensor]
    ) -> torch.Tensor | None:
        return source.of_slice(own) if own.param.requires_grad and own.local not in but else None

    def step(self, **options: Any) -> Any:
        """Step the local optimizer, once for each piece of the copies, and publish the copies."""
        # Each piece starts from the same options: a class that writes some counts one step for all pieces.
        before = [options_of(group) for group in self.optim.param_groups]
        published = set[torch.Tensor]()
        while len(self._coming) > 1:
            published |= self._step_piece(self._coming.pop(0), options)
            replace_options(before, self.optim.param_groups)
        for piece in self._coming:
            self.way.set_gradients(piece)
        # The last piece, with all local tensors that are no copies if there is no other.
        result = self.local.step(**options)
        trained = [
            own for own in self.copies.slices if own.param.requires_grad and own.local not in published
        ]
        if self._updated is not None:
            trained = [own for own in trained if own.piece.param in self._updated]
        self.copies.publish(trained, self.optim.state)
        return result

    def _step_piece(self, piece: PieceGradients, options: Mapping[str, Any]) -> set[torch.Tensor]:
        """Step what has gradients, and the copies of a piece; publish these and return them."""
        self.way.set_gradients(piece)
        self.local.step(**options)
        # What was stepped with this piece must not be stepped again with the next one.
        for own in self.whole:
            if own.param.grad is not None:
                self.hide(own.param)
        for tensor in [own.local for own in self.slices] + params_of(self.optim.param_groups):
            tensor.grad = None
        self.copies.publish((self._copy_of[local] for local in piece.locals), self.optim.state)
        return set(piece.locals)

    def give_back(self) -> None:
        super().give_back()
        self._coming, self._updated = [], None
        self.way.release_memory()


class Casts:
    """Casts gradients to the dtype of masters.

    On a CPU, new memory for a cast takes longer than the update. So there the gradients are cast in pieces
    that stay in the cache until they are used, all into the same memory. On a GPU they are cast at once,
    since its allocator has memory at hand.
    """

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None

    @torch.no_grad()
    def start_copies(self, gradients: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> list[PieceGradients]:
        """Set what is not cast in pieces; return the pieces.

        Args:
            gradients: masters, and their gradients.
        """
        later, casts, parts = (
            list[tuple[torch.Tensor, torch.Tensor]](),
            list[torch.Tensor](),
            list[torch.Tensor](),
        )
        for local, grad in gradients:
            if grad.layout != torch.strided:
                local.grad = grad.to(local.dtype)
            elif local.device.type == "cpu":
                later.append((local, grad))
            else:
                local.grad = torch.empty_like(local, requires_grad=False)
                casts.append(local.grad)
                parts.append(grad)
        if casts:
            torch._foreach_copy_(casts, parts)
        return [
            PieceGradients([o for o, _ in piece], [g for _, g in piece])
            for piece in in_pieces(later, CAST_NBYTES)
        ]

    @torch.no_grad()
    def set_gradients(self, piece: PieceGradients) -> None:
        """Cast the gradients of a piece, and set them."""
        numels = [local.numel() for local in piece.locals]
        if self._memory is None or self._memory.numel() < sum(numels):
            self._memory = torch.empty(sum(numels), dtype=piece.locals[0].dtype)
        parts = self._memory[: sum(numels)].split(numels)
        grads = [part.as_strided(o.size(), o.stride()) for part, o in zip(parts, piece.locals)]
        torch._foreach_copy_(grads, piece.gradients)
        for local, grad in zip(piece.locals, grads):
            local.grad = grad

    def release_memory(self) -> None:
        """Free the memory, or leave it to the gradients that lie in it."""
        self._memory = None


class MergedStepper:
    """Steps neighbours in memory as one tensor, and leaves all others to another stepper.

    Args:
        inner: steps what is not merged.
        small: the small parameters and masters that lie end to end; their gradients are copied together.
        shares: the neighbours of any size in a share, for a backward that leaves gradients end to end too.
    """

    def __init__(self, inner: Stepper, small: MergedSlices, shares: MergedSlices) -> None:
        self.inner, self.small, self.shares = inner, small, shares
        self.merged = small

    def take(self, source: GradientSource, *, at_once: bool = False) -> None:
        """As `Stepper.take`; then the local optimizer's groups list each run as one tensor."""
        in_shares = source.by_slice is not None and bool(self.shares.runs)
        merged = self.shares if in_shares else self.small
        if merged is not self.merged:  # the other runs are stepped now
            self.merged.unshare()
            self.merged = merged
        if source.by_param is not None:
            # Such an update has some parameters and not others: from now on each has its own step counter.
            merged.dissolve()
            self.inner.take(source, at_once=at_once)
        elif in_shares:
            self.inner.take(source, at_once=at_once)  # slices are given their gradients, which lie end to end
            merged.merge()
        else:
            merged.merge()
            self.inner.take(source, at_once=at_once, but=merged.members)

    def step(self, **options: Any) -> Any:
        """Step the local optimizer, and return what it returns."""
        return self.inner.step(**options)

    def give_back(self) -> None:
        """Undo `take`; list the neighbours again, each with its part of the merged state."""
        self.merged.split()
        self.inner.give_back()


class Steppers:
    """The stepper of a rank's slices, chosen once.

    Args:
        owned: the slices.
        copies: those of them whose local tensors are copies.
        optim: the local optimizer.
        foreign: watches its steps, if its class is not torch's.
        way: how gradients come to copies.
        used: receives the numbers of the parameters whose local tensors have had a gradient.
        merge: step neighbours in memory as one tensor, if their class is elementwise.
        in_ranges: ranks own equal shares of ranges of parameters.

    Attributes:
        chosen: the stepper.
        alone: the one that steps each local tensor by itself.
        small, shares: the neighbours that are stepped as one.
    """

    def __init__(
        self,
        owned: Sequence[OwnedSlice],
        copies: Copies,
        optim: Optimizer,
        foreign: ForeignStep,
        *,
        way: Casts | StatePlace,
        used: set[int],
        merge: bool,
        in_ranges: bool,
    ) -> None:
        mine = [own for own in owned if own.param.requires_grad] if merge else []
        self.small = MergedSlices(optim, {own.local: own.param for own in mine if own.is_whole}, SMALL_NUMEL)
        # In a share neighbours lie together, as do their gradients after ShardedDataParallel's backward.
        in_place = [own.local for own in mine if in_ranges and not own.is_copy]
        self.shares = MergedSlices(optim, dict(zip(in_place, in_place)))
        runs = [*self.small.runs, *self.shares.runs]

        local: Optimizer | ForeignStep = optim
        if not is_known(optim):
            local = foreign
            foreign.watch(optim, [*(own.local for own in owned), *(run.whole for run in runs)])
        self.alone = (
            CopyStepper(owned, local, copies, optim, way, used) if copies.slices else Stepper(owned, local)
        )
        self.chosen: AnyStepper = MergedStepper(self.alone, self.small, self.shares) if runs else self.alone

    def unmerge(self) -> None:
        """Give each neighbour a step counter of its own, before it is used by itself."""
        self.small.unshare()
        self.shares.unshare()

    def dissolve(self) -> None:
        """Step each neighbour by itself from now on."""
        self.small.dissolve()
        self.shares.dissolve()
