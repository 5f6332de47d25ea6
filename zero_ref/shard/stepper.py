"""The step of a rank's slices: `self.local.step()` of `stairs/owners.py`, for tensors that are no parameters.

In `stairs/owners.py` the local optimizer steps parameters, which have gradients. Here it steps local tensors,
which first have to be given the gradients of their slices. There are three steppers, chosen once when the
shard is arranged:

    Stepper         steps local tensors that lie in the parameters' own memory
    CopyStepper     also steps copies of slices, in 32 bits or in other memory, in pieces
    MergedStepper   steps neighbours in memory as one tensor, and leaves the rest to one of the other two

All have the same methods, which a step calls in this order:

    stepper.set_gradients(source)    set the `.grad` of each local tensor to the gradient of its slice
    stepper.step(**options)          step the local optimizer; write new values of copies into the parameters
    stepper.restore_gradients()      restore every `.grad` as the user knows it
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch.optim import Optimizer

from zero_ref.shard.foreign import ForeignStep
from zero_ref.shard.groups import options_of, params_of, replace_options
from zero_ref.shard.local_class import is_known
from zero_ref.shard.merged import MERGED_NUMEL, MergedSlices
from zero_ref.shard.offload import PieceGradients, StatePlace, in_pieces
from zero_ref.shard.owned import Copies, OwnedSlice

CAST_NBYTES = 2**22
"""Bytes of masters whose gradients are cast at a time: the casts stay in the cache until they are used."""


class GradientSource(NamedTuple):
    """The places of the gradients of an update.

    Args:
        by_param: gradients by parameter number, each in its parameter's shape and strides; the step updates
            only these parameters. None means the `.grad` of each parameter.
        in_slices: gradients of parameters that are cut are in the slices' own `.grad`. Otherwise they are
            parts of the parameters' gradients.
    """

    by_param: Mapping[int, torch.Tensor] | None = None
    in_slices: bool = False

    def of_param(self, number: int, param: torch.Tensor) -> torch.Tensor | None:
        """Return the gradient of a whole parameter."""
        return param.grad if self.by_param is None else self.by_param.get(number)

    def of_slice(self, own: OwnedSlice) -> torch.Tensor | None:
        """Return the gradient of a slice that this rank owns."""
        if self.in_slices and not own.is_whole:
            return own.leaf.grad
        grad = self.of_param(own.piece.param, own.param)
        return None if grad is None else own.part_of(grad)


class AnyStepper(Protocol):
    """The methods that all steppers have."""

    def set_gradients(self, source: GradientSource, *, at_once: bool = False) -> None: ...
    def step(self, **options: Any) -> Any: ...
    def restore_gradients(self) -> None: ...


class Stepper:
    """Steps the local tensors where they lie: parameters that are owned whole, and slices that are views.

    Args:
        owned: the slices that this rank owns.
        local: the local optimizer; a `ForeignStep` around it, if its class is not torch's.
    """

    def __init__(self, owned: Iterable[OwnedSlice], local: Optimizer | ForeignStep) -> None:
        owned = list(owned)
        self.local = local
        trained = [own for own in owned if own.param.requires_grad]
        self.frozen = [own for own in owned if not own.param.requires_grad and not own.is_copy]
        # A whole parameter has its gradient; a slice may have to be given its part.
        self.whole = [own for own in trained if own.local is own.param]
        self.views = [own for own in trained if own.local is not own.param and not own.is_copy]
        self._given: list[OwnedSlice] = []  # the views that were given their part
        self._hidden: list[tuple[torch.Tensor, torch.Tensor | None]] = []  # (tensor, its gradient)

    def set_gradients(
        self, source: GradientSource, *, at_once: bool = False, but: Container[torch.Tensor] = ()
    ) -> None:
        """Give each local tensor the gradient of its slice, and hide gradients that must not be used.

        Args:
            source: the places of the gradients.
            at_once: all gradients have to be set when this returns, not piece by piece in `step`.
            but: local tensors that already have their gradients.
        """
        # 1. A gradient from before the parameter was frozen would update the parameter on its owner only.
        for own in self.frozen:
            self.hide(own.local)
        # 2. Whole parameters.
        if source.by_param is not None:
            for own in self.whole:
                self.hide(own.param)
                own.param.grad = source.by_param.get(own.piece.param)
        # 3. Slices that are views, unless backward has left their gradients there. A `CopyStepper` sees to
        # copies.
        self._given = [] if source.in_slices else self.views
        for own in self._given:
            part = source.of_slice(own)
            own.local.grad = None if part is None else part.to(own.local.dtype)

    def step(self, **options: Any) -> Any:
        """Step the local optimizer, and return what it returns."""
        return self.local.step(**options)

    def restore_gradients(self) -> None:
        """Undo `set_gradients`."""
        # The last first: of a parameter that was hidden twice, the first gradient is the user's.
        for tensor, grad in reversed(self._hidden):
            tensor.grad = grad
        self._hidden.clear()
        # A part is a view: it would keep the parameter's whole gradient alive after zero_grad().
        for own in self._given:
            own.local.grad = None
        self._given = []

    def hide(self, tensor: torch.Tensor) -> None:
        """Set the `.grad` of a parameter or slice to None until `restore_gradients`."""
        self._hidden.append((tensor, tensor.grad))
        tensor.grad = None


class CopyStepper(Stepper):
    """Steps copies of slices, in 32 bits or in other memory, and rounds them into the parameters.

    A gradient has to be cast for a copy, or copied to the copy's memory. This is done in pieces: a piece
    takes little memory, and while one piece is stepped, the gradients of others are being copied.

    Args:
        owned, local: as `Stepper`.
        copies: the slices whose local tensors are copies.
        optim: the local optimizer.
        transfer: casts gradients for the copies, or copies them to the copies' place.
        used: receives the numbers of the parameters whose local tensors have had a gradient.
    """

    def __init__(
        self,
        owned: Iterable[OwnedSlice],
        local: Optimizer | ForeignStep,
        copies: Copies,
        optim: Optimizer,
        transfer: Casts | StatePlace,
        used: set[int],
    ) -> None:
        super().__init__(owned, local)
        self.copies, self.optim, self.transfer, self.used = copies, optim, transfer, used
        self._copy_of = {own.local: own for own in copies.slices}
        # A class that is not torch's may count its steps somewhere, so it makes one step for all pieces.
        self._may_step_pieces = is_known(optim)
        self._pieces: list[PieceGradients] = []  # not stepped yet
        self._updated: Container[int] | None = None  # numbers of parameters; None for all trained ones

    def set_gradients(
        self, source: GradientSource, *, at_once: bool = False, but: Container[torch.Tensor] = ()
    ) -> None:
        # 1. Set the gradients of local tensors that are no copies.
        super().set_gradients(source, but=but)
        # 2. Start to transfer those of copies.
        given = [
            (own, part) for own in self.copies.slices if (part := self._part(own, source, but)) is not None
        ]
        self._pieces = self.transfer.start_copies((own.local, part) for own, part in given)
        # 3. `step` sets them piece by piece, or they are all set now.
        if at_once or not self._may_step_pieces:
            for piece in self._pieces:
                self.transfer.set_gradients(piece)
                # The gradients are needed until the step: the next piece must not overwrite them.
                self.transfer.release_memory()
            self._pieces = []
        # 4. Note what this step updates.
        self.used.update(own.piece.param for own, _ in given)
        stepped = (*self.views, *self.copies.slices)
        self.used.update(own.piece.param for own in stepped if own.local.grad is not None)
        self._updated = source.by_param

    def _part(
        self, own: OwnedSlice, source: GradientSource, but: Container[torch.Tensor]
    ) -> torch.Tensor | None:
        return source.of_slice(own) if own.param.requires_grad and own.local not in but else None

    def step(self, **options: Any) -> Any:
        """Step the local optimizer, once for each piece of the copies, and publish the copies."""
        # 1. Step all pieces but the last. Each starts from the same options: a class that counts its steps
        # there counts one for all pieces.
        before = [options_of(group) for group in self.optim.param_groups]
        published = set[torch.Tensor]()
        while len(self._pieces) > 1:
            published |= self._step_piece(self._pieces.pop(0), options)
            replace_options(before, self.optim.param_groups)
        # 2. Step the last piece, and publish all that is not published yet. If there is one piece or none,
        # this also steps the local tensors that are no copies.
        for piece in self._pieces:
            self.transfer.set_gradients(piece)
        result = self.local.step(**options)
        trained = [
            own for own in self.copies.slices if own.param.requires_grad and own.local not in published
        ]
        if self._updated is not None:
            trained = [own for own in trained if own.piece.param in self._updated]
        self.copies.publish(trained, self.optim.state)
        return result

    def _step_piece(self, piece: PieceGradients, options: Mapping[str, Any]) -> set[torch.Tensor]:
        """Step a piece of copies, and all tensors that have gradients; publish the copies and return them."""
        self.transfer.set_gradients(piece)
        self.local.step(**options)
        # Local tensors that were stepped with this piece must not be stepped again with the next one.
        for own in (*self.whole, *self.views):
            if own.local.grad is not None:
                self.hide(own.local)
        for tensor in [own.local for own in self.copies.slices] + params_of(self.optim.param_groups):
            tensor.grad = None
        self.copies.publish((self._copy_of[local] for local in piece.locals), self.optim.state)
        return set(piece.locals)

    def restore_gradients(self) -> None:
        super().restore_gradients()
        for own in self.copies.slices:
            own.local.grad = None
        self._pieces, self._updated = [], None
        self.transfer.release_memory()


class Casts:
    """Casts gradients to the dtype of masters.

    On a CPU, allocating memory for a cast takes longer than the update. So there gradients are cast in pieces
    that stay in the cache until they are used, all into the same memory. On a GPU they are cast at once,
    since torch's allocator there reuses memory.
    """

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None  # for the gradients of one piece

    @torch.no_grad()
    def start_copies(self, gradients: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> list[PieceGradients]:
        """Set the gradients that are not cast in pieces; return the pieces of the others.

        Args:
            gradients: masters, and their gradients.
        """
        on_cpu: list[tuple[torch.Tensor, torch.Tensor]] = []
        casts: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for local, grad in gradients:
            if grad.layout != torch.strided:
                local.grad = grad.to(local.dtype)
            elif local.device.type == "cpu":
                on_cpu.append((local, grad))
            else:
                local.grad = torch.empty_like(local, requires_grad=False)
                casts.append(local.grad)
                sources.append(grad)
        if casts:
            torch._foreach_copy_(casts, sources)
        return [
            PieceGradients([local for local, _ in piece], [grad for _, grad in piece])
            for piece in in_pieces(on_cpu, CAST_NBYTES)
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
        """Forget the memory: it is freed with the last gradient that lies in it."""
        self._memory = None


class MergedStepper:
    """Steps neighbours in memory as one tensor, and leaves all others to another stepper.

    Args:
        inner: steps the local tensors that are not merged.
        small: the small parameters and masters that lie end to end; their gradients are copied together.
        shares: the neighbours of any size in a share, for a backward that leaves gradients end to end too.
    """

    def __init__(self, inner: Stepper, small: MergedSlices, shares: MergedSlices) -> None:
        self.inner, self.small, self.shares = inner, small, shares
        self.merged = small  # those of the two that the last step has merged

    def set_gradients(self, source: GradientSource, *, at_once: bool = False) -> None:
        """Set gradients as `Stepper` does; list each run as one tensor in the local optimizer's groups."""
        # 1. Choose the runs to merge. A tensor may be in two, so the others first give up their counters.
        in_shares = source.in_slices and bool(self.shares.runs)
        merged = self.shares if in_shares else self.small
        if merged is not self.merged:
            self.merged.unshare()
            self.merged = merged
        # 2. Set the gradients and merge.
        if source.by_param is not None:
            # Such an update has some parameters and not others: from now on each has its own step counter.
            merged.dissolve()
            self.inner.set_gradients(source, at_once=at_once)
        elif in_shares:
            # The slices' gradients lie end to end already, where the merge finds them.
            self.inner.set_gradients(source, at_once=at_once)
            merged.merge()
        else:
            # The merge copies the parameters' gradients, so the members need none of their own.
            merged.merge()
            self.inner.set_gradients(source, at_once=at_once, but=merged.members)

    def step(self, **options: Any) -> Any:
        """Step the local optimizer, and return what it returns."""
        return self.inner.step(**options)

    def restore_gradients(self) -> None:
        """Undo `set_gradients`; list the neighbours again, each with its part of the merged state."""
        self.merged.split()
        self.inner.restore_gradients()


def _unmerged_stepper(
    owned: Sequence[OwnedSlice],
    local: Optimizer | ForeignStep,
    copies: Copies,
    optim: Optimizer,
    transfer: Casts | StatePlace,
    used: set[int],
) -> Stepper:
    """Make the stepper that merges nothing: a `CopyStepper`, if there are copies. Args: as `CopyStepper`."""
    if copies.slices:
        return CopyStepper(owned, local, copies, optim, transfer, used)
    return Stepper(owned, local)


class Steppers:
    """The stepper of a rank's slices, chosen once.

    Args:
        owned: the slices.
        copies: the slices whose local tensors are copies.
        optim: the local optimizer.
        transfer, used: as `CopyStepper`.
        merge: step neighbours in memory as one tensor, if their class is elementwise.
        in_ranges: ranks own equal shares of ranges of parameters.
        buffers: by parameter, memory for the values of those that are sent together.

    Attributes:
        chosen: the stepper that a step uses.
        alone: the stepper that steps each local tensor by itself; inside of `chosen`, if that merges.
        small, shares: the neighbours that are stepped as one, as `MergedStepper`.
    """

    def __init__(
        self,
        owned: Sequence[OwnedSlice],
        copies: Copies,
        optim: Optimizer,
        *,
        transfer: Casts | StatePlace,
        used: set[int],
        merge: bool,
        in_ranges: bool,
        buffers: Mapping[torch.Tensor, torch.Tensor],
    ) -> None:
        # 1. Find the neighbours that can be merged.
        trained = [own for own in owned if own.param.requires_grad] if merge else []
        small = {own.local: own.param for own in trained if own.is_whole}
        self.small = MergedSlices(optim, small, MERGED_NUMEL, buffers if merge else {})
        # In a share neighbours lie together, as do their gradients after ShardedDataParallel's backward.
        in_share = [own.local for own in trained if in_ranges and not own.is_copy]
        self.shares = MergedSlices(optim, dict(zip(in_share, in_share)))
        runs = [*self.small.runs, *self.shares.runs]
        # 2. A class that is not torch's may give tensors other memory.
        self._foreign = None if is_known(optim) else ForeignStep(optim, (own.local for own in owned))
        # 3. Choose the stepper.
        self.alone = _unmerged_stepper(owned, self._foreign or optim, copies, optim, transfer, used)
        self.chosen: AnyStepper = MergedStepper(self.alone, self.small, self.shares) if runs else self.alone

    def restore_memory(self) -> None:
        """Undo that a class which is not torch's has given tensors other memory."""
        if self._foreign is not None:
            self._foreign.restore_memory()

    def dissolve(self) -> None:
        """Step each neighbour by itself from now on."""
        self.small.dissolve()
        self.shares.dissolve()
