"""Gradients averaged over the ranks, one DDP bucket at a time: on all ranks, or only on their owners.

`stairs/owners.py` leaves it to DDP to give every rank every averaged gradient, by an all-reduce of each
bucket. But only the owner of an element updates it. This module adds `reduce_to_owners`, a communication hook
that sends gradients to their owners and nowhere else: half the traffic of the all-reduce, and a rank can
release the gradients of what it does not own. That is the second stage of ZeRO. Gradients travel in messages
between pairs of ranks (`PairsToOwners`), or by the backend's own reduce (`ReduceToOwners`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch

from zero_ref.comm import devices
from zero_ref.comm.collectives import AllOf, Collectives, PendingCall
from zero_ref.comm.process_group import global_ranks
from zero_ref.optimizer import join
from zero_ref.optimizer.during_backward import in_backward
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer, listed
from zero_ref.plan.calls import REDUCED_BY
from zero_ref.plan.partition import Partition
from zero_ref.shard.buckets import flat_view

Hook = Callable[[Any, Any], torch.futures.Future[torch.Tensor]]
"""A DDP communication hook: takes its state and a `dist.GradBucket`, returns the reduced bucket to come."""


def gradients_in(flat: torch.Tensor, params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients in a bucket, as views of it in their parameters' shapes and strides.

    DDP gives a gradient its parameter's memory layout. `GradBucket.gradients()` reads it as if it were
    contiguous, which mixes up the elements of a channels_last weight.
    """
    flat = flat.to(params[0].dtype)  # torch's fp16_compress_wrapper leaves it in 16 bits
    if flat.layout != torch.strided:
        return [flat]  # a sparse gradient has a bucket to itself
    parts = flat.split([param.numel() for param in params])
    return [part.as_strided(param.size(), param.stride()) for part, param in zip(parts, params, strict=True)]


def after_backward(action: Callable[[], None]) -> None:
    """Call `action` when DDP has put the reduced gradients into `.grad`; outside of backward immediately."""
    if not in_backward():
        action()
        return
    engine = torch.autograd.Variable._execution_engine
    # DDP queues its own end of backward after the last hook. A callback that a callback queues comes later.
    engine.queue_callback(lambda: engine.queue_callback(action))


class ByHook:
    """The reduction of one bucket by a user's hook, such as torch's `allreduce_hook`.

    Attributes:
        params: of the bucket, in its order.
        future: the reduced bucket, for which DDP waits.
    """

    def __init__(self, comm: Collectives, hook: Hook, state: Any, bucket: Any) -> None:
        self.what = f"rank {comm.rank} of {comm.world_size}: the reduction of DDP's bucket {bucket.index()}"
        self.params: list[torch.Tensor] = bucket.parameters()
        self.future = hook(state, bucket)

    def wait(self) -> torch.Tensor:
        """The bucket's averaged gradients, (numel,)."""
        try:
            return self.future.wait()
        except RuntimeError as error:
            raise RuntimeError(f"{self.what} did not complete: {error}") from error


class ToOwners:
    """The reduction of one bucket to its owners, under way. A subclass says how gradients travel.

    Args:
        flat: (numel,), the bucket, with this rank's own gradients.
        params: of the bucket, in its order.
        runs_of_rank: for each rank the runs of `flat` that it owns.
        divisor: of the sum; None for the number of ranks.

    Attributes:
        future: the bucket, for which DDP waits.
    """

    def __init__(
        self,
        comm: Collectives,
        flat: torch.Tensor,
        params: list[torch.Tensor],
        runs_of_rank: Sequence[Sequence[slice]],
        divisor: int | None = None,
    ) -> None:
        self.flat, self.params, self.runs = flat, params, runs_of_rank[comm.rank]
        self.numels = [run.stop - run.start for run in self.runs]
        self.future = devices.future(flat.device)
        # Divide before the sum, as DDP does: float16 could overflow.
        if divisor != 1:
            flat.mul_(1 / (divisor or comm.world_size))
        self.start(comm, runs_of_rank)

    def start(self, comm: Collectives, runs_of_rank: Sequence[Sequence[slice]]) -> None:
        """Start to send every owner its runs of the bucket."""
        raise NotImplementedError

    def finish(self) -> None:
        """Wait for the sums of this rank's runs, write them into the bucket, and let all other memory go."""
        raise NotImplementedError

    def wait(self) -> torch.Tensor:
        """As `ByHook.wait`, but only this rank's runs are averaged. The others' may be overwritten."""
        if not self.future.done():
            self.finish()
            self.future.set_result(self.flat)
        return self.flat


class PairsToOwners(ToOwners):
    """The reduction of one bucket in messages: each owner receives all ranks' gradients and adds them up.

    Cost: each rank sends the parts of other owners, and an owner receives its part N-1 times. If every rank
    owns 1/N of the bucket, each sends and receives (N-1)/N of it. Memory for what is received.
    """

    def start(self, comm: Collectives, runs_of_rank: Sequence[Sequence[slice]]) -> None:
        """As `ToOwners.start`."""
        flat = self.flat
        # 1. Pack for each owner what it owns.
        wire = comm.wire_of(flat.device)
        lower, higher = range(comm.rank), range(comm.rank + 1, comm.world_size)
        sends = []
        for peer in (*lower, *higher):
            if runs_of_rank[peer]:
                sends.append((peer, _packed(flat, runs_of_rank[peer]).to(wire)))
        self.sent = [tensor for _, tensor in sends]
        # 2. Memory for what the peers send, if this rank owns a part of the bucket.
        self.of_lower: list[torch.Tensor] = []
        self.of_higher: list[torch.Tensor] = []
        if self.runs:
            numel = sum(self.numels)
            self.of_lower = [flat.new_empty(numel, device=wire) for _ in lower]
            self.of_higher = [flat.new_empty(numel, device=wire) for _ in higher]
        received = [*zip(lower, self.of_lower), *zip(higher, self.of_higher)]
        self.work: PendingCall = comm.exchange(sends, received)

    def finish(self) -> None:
        """As `ToOwners.finish`."""
        self.work.wait()
        # In the order of ranks, so that the sum is the same on every owner.
        for other in self.of_lower[1:]:
            self.of_lower[0].add_(other)
        own = [self.flat[run] for run in self.runs]
        for packed in (*self.of_lower[:1], *self.of_higher):
            torch._foreach_add_(own, packed.to(self.flat.device).split(self.numels))
        _used_on_this_stream((*self.sent, *self.of_lower, *self.of_higher))
        self.sent, self.of_lower, self.of_higher, self.work = [], [], [], AllOf([])


class ReduceToOwners(ToOwners):
    """The reduction of one bucket by the backend's own reduce, one call for each owner of a part.

    The backend adds, in an order of its own.

    Cost: N-1 times the bucket is sent in all. On NCCL no rank sends or receives more than the bucket, whoever
    owns it. Memory for the parts of owners that own several runs of the bucket.
    """

    def start(self, comm: Collectives, runs_of_rank: Sequence[Sequence[slice]]) -> None:
        """As `ToOwners.start`."""
        # All ranks start the calls in the order of owners. A part of several runs is packed; one run is a
        # view of the bucket, which is reduced in place.
        parts = {owner: _packed(self.flat, runs) for owner, runs in enumerate(runs_of_rank) if runs}
        self.own = parts.get(comm.rank)
        self.packed = [parts[owner] for owner in parts if len(runs_of_rank[owner]) > 1]
        self.work: PendingCall = AllOf([comm.reduce(part, owner) for owner, part in parts.items()])

    def finish(self) -> None:
        """As `ToOwners.finish`."""
        self.work.wait()
        if self.own is not None and len(self.runs) > 1:
            torch._foreach_copy_([self.flat[run] for run in self.runs], self.own.split(self.numels))
        _used_on_this_stream(self.packed)
        self.own, self.packed, self.work = None, [], AllOf([])


def _used_on_this_stream(tensors: Iterable[torch.Tensor]) -> None:
    for tensor in tensors:
        if devices.is_accelerator(tensor.device):
            # Allocated on backward's stream and perhaps used on another one, which must be done with the
            # memory before it is allocated again.
            tensor.record_stream(devices.current_stream(tensor.device))


def _packed(flat: torch.Tensor, runs: Sequence[slice]) -> torch.Tensor:
    """Join the runs to one tensor; a single run is a view."""
    return flat[runs[0]] if len(runs) == 1 else torch.cat([flat[run] for run in runs] or [flat[:0]])


def reduce_to_owners(
    zero: ZeroRedundancyOptimizer | Sequence[ZeroRedundancyOptimizer],
    *,
    scaled: bool = False,
    may_change: bool = False,
    by: str | None = None,
) -> Hook:
    """A DDP communication hook after which each rank has the gradients of what it owns, and no others.

    >>> ddp.register_comm_hook(None, reduce_to_owners(zero))                 # doctest: +SKIP
    >>> ddp.register_comm_hook(None, reduce_to_owners([body, head]))         # doctest: +SKIP

    With the parameter broadcasts of a step, 2Ψ elements travel in an iteration of a model with Ψ parameters,
    as in plain data parallelism; all-reduced gradients and broadcasts are 3Ψ. The ZeRO paper counts 2Ψ for
    stage 1 too, and Megatron-LM's distributed optimizer sends as much. After backward `.grad` is None for
    parameters of which this rank owns nothing, and zero where other ranks own parts of a parameter. (A rank
    that owns no gradient at all has one of zeros, for the smallest parameter.)

    DDP keeps its flat buckets. With `gradient_as_bucket_view` gradients need no memory beside them; without,
    those of other ranks' parameters are released after backward. No rank has all gradients, so clip with
    `zero_ref.clip_grad_norm_`. Call `zero.zero_grad()` in every iteration, or the gradients that are left on
    owners would be averaged once more.

    Args:
        zero: the optimizer, over the same ranks as DDP; or a list, if several optimizers have the parameters
            of the model. Every parameter that DDP reduces must be in exactly one.
        scaled: for use with torch.amp.GradScaler, which looks for infinite gradients on each rank by itself:
            if one rank has one, all ranks get one. Without, `zero.step` refuses such a scaler.
        may_change: gradients may be changed between backward and step by a function that treats each element
            by itself, as torch.nn.utils.clip_grad_value_ does. Without, `zero.step` refuses all changes but
            those by `zero_ref.clip_grad_norm_` and a scaler.
        by: how gradients travel. "reduce": one reduce of the backend for each owner of a part of a bucket.
            On NCCL that takes about as long as a reduce-scatter, also where one rank owns the whole bucket.
            "pairs": messages between pairs of ranks, which owners add in the order of ranks. So the sums do
            not depend on who owns what, but an owner of the whole bucket receives it N-1 times. None for
            "pairs" on Gloo, and "reduce" on other backends.
    Raises:
        RuntimeError: (in backward) the reduced gradients of an earlier backward are still there, so they
            would be averaged twice: zero them after each step. Accumulate under `ddp.no_sync()`. (In step) a
            backward that reduced nothing has added to them.
        TypeError: `zero` is no ZeroRedundancyOptimizer, nor a list of them.
        ValueError: `by` is unknown; a parameter is in two of the optimizers, or these are over different
            ranks; ranks pass other optimizers or options. (In backward) DDP reduces a parameter that no
            optimizer has, or a sparse gradient; or a `Join` has only some of the optimizers.
    Collective: all ranks, here and in backward.
    Cost: here one all-gather of 32 bytes. In backward (N-1) Ψ elements are sent in all, see `by`; for each
        optimizer `scaled` adds an all-reduce of 4 bytes, and for one a `Join` with
        `divide_by_initial_world_size=False` one of 8.
    Source: ZeRO stage 2, "P_os+g" (arXiv:1910.02054, section 5.2). FairScale's ShardedDataParallel also
        reduces to one rank at a time, and so does DeepSpeed with `use_multi_rank_bucket_allreduce=False`.
    """
    return OwnerReduction(listed(zero, "reduce_to_owners"), scaled, may_change, by).on_bucket


class OwnerReduction:
    """The hook of `reduce_to_owners`, and its state from one bucket of a backward to the next."""

    def __init__(
        self,
        zeros: Sequence[ZeroRedundancyOptimizer],
        scaled: bool,
        may_change: bool,
        by: str | None = None,
    ) -> None:
        self.zeros = zeros
        self.scaled, self.may_change, self.by = scaled, may_change, by
        self._divisor = self.comm.world_size
        self._planned_for: list[Partition] = []
        self._place_of: dict[torch.Tensor, tuple[ZeroRedundancyOptimizer, int]] = {}
        self._plans: dict[tuple[int, ...], tuple[list[torch.Tensor], list[list[slice]]]] = {}
        with zeros[0].accord.preparing("reduce gradients to owners") as facts:
            options = f"scaled={scaled}, may_change={may_change}, by={by!r}"
            facts += [options, *(zero.accord.what for zero in zeros)]
            if by is not None and by not in REDUCED_BY:
                raise ValueError(f"unknown by={by!r}; choose one of {', '.join(REDUCED_BY)}, or None.")
            for zero in zeros[1:]:
                if (ours := global_ranks(self.comm)) != (theirs := global_ranks(zero.collectives)):
                    raise ValueError(
                        f"reduce_to_owners was given an optimizer over the ranks {ours} and one over the "
                        f"ranks {theirs}. Construct all of them over the ranks of DistributedDataParallel."
                    )
            self._find_places()

    # DDP refuses annotations other than its own classes, and typing knows no name for those.
    def on_bucket(self, _, bucket):  # type: ignore[no-untyped-def]
        """Start to reduce a bucket, and complete those before it, whose gradients have had time to arrive."""
        reduction = self.start(bucket)
        for earlier in self._under_way[:-1]:
            earlier.wait()
        if bucket.is_last():
            reduction.wait()
            if not in_backward():
                self.keep_own_gradients()
            after_backward(self.release_others)
        return reduction.future

    @property
    def comm(self) -> Collectives:
        """Sends the buckets: each may have parameters of several optimizers, and is sent as one."""
        return self.zeros[0].collectives

    @property
    def _under_way(self) -> list[Any]:
        return self.zeros[0].backward.under_way

    def start(self, bucket: Any) -> ToOwners:
        """Start to send the bucket's gradients to their owners."""
        flat, params = bucket.buffer(), bucket.parameters()
        if flat.layout != torch.strided:
            raise ValueError("reduce_to_owners takes dense gradients; use allreduce_hook for sparse ones.")
        if bucket.index() == 0:
            memory = flat.untyped_storage().data_ptr()
            gradients = [param.grad for param in params if param.grad is not None]
            are_views = any(grad.untyped_storage().data_ptr() == memory for grad in gradients)
            for zero in self.zeros:
                zero.backward.begin(params, are_views)
                zero.current()
            self._find_places()
            self._divisor = join.divisor_of_gradients(self.zeros, active=in_backward())
        # Every backward has the same buckets. A plan keeps its parameters alive, so their ids stay theirs.
        key = tuple(map(id, params))
        if key not in self._plans:
            self._plans[key] = params, self._runs_of_rank(params)
        by_reduce = self.comm.prefers_reduce(flat.device) if self.by is None else self.by == "reduce"
        way = ReduceToOwners if by_reduce else PairsToOwners
        reduction = way(self.comm, flat, params, self._plans[key][1], self._divisor)
        self._under_way.append(reduction)
        return reduction

    def _find_places(self) -> None:
        """Find the optimizer and the number of each parameter; forget the plans made for other owners."""
        partitions = [zero.partition for zero in self.zeros]
        if [*map(id, partitions)] == [*map(id, self._planned_for)]:
            return
        self._planned_for, self._plans, self._place_of = partitions, {}, {}
        for zero in self.zeros:
            for number, param in enumerate(zero.built.params):
                if param in self._place_of:
                    raise ValueError(
                        f"parameter {zero.built.name(number)} is in two of the optimizers that "
                        "reduce_to_owners was given, so it has two owners. Leave it out of one."
                    )
                self._place_of[param] = zero, number

    def _runs_of_rank(self, params: Sequence[torch.Tensor]) -> list[list[slice]]:
        """The runs of a bucket that each rank owns."""
        owned: list[tuple[int, int]] = []  # owner and elements, end to end in the bucket
        for param in params:
            if param not in self._place_of:
                raise ValueError(
                    f"DDP reduces a parameter of shape {tuple(param.shape)} that the optimizer does not "
                    "have, so it has no owner. Give the optimizer all parameters of the model, or "
                    "reduce_to_owners a list of the optimizers that have them."
                )
            zero, number = self._place_of[param]
            pieces = zero.partition.pieces_of_param[number]
            owned += [(owner, piece.numel) for piece, owner in pieces if piece.numel]
        runs_of_rank: list[list[slice]] = [[] for _ in range(self.comm.world_size)]
        start = 0
        for owner, run in groupby(owned, key=itemgetter(0)):
            stop = start + sum(numel for _, numel in run)
            runs_of_rank[owner].append(slice(start, stop))
            start = stop
        return runs_of_rank

    def keep_own_gradients(self) -> None:
        """Set `.grad` on a rank that only shadows a backward: there DDP does not."""
        for reduction in self._under_way:
            gradients = gradients_in(reduction.flat, reduction.params)
            for param, grad in zip(reduction.params, gradients, strict=True):
                param.grad = grad.clone()

    def release_others(self) -> None:
        """Release the gradients of what other ranks own."""
        for zero in self.zeros:
            self._release_others(zero)

    @torch.no_grad()
    def _release_others(self, zero: ZeroRedundancyOptimizer) -> None:
        used = frozenset(n for n, param in enumerate(zero.built.params) if param.grad is not None)
        kept = {  # ordered, unlike a set, so that the same gradients are watched in every run
            own.param: None for own in zero.shard.owned if own.param.requires_grad
        }
        for param in zero.built.params:
            if param not in kept:
                param.grad = None
            elif param.grad is not None and len(self.zeros) > 1:
                # Views of a DDP bucket count writes together. With a count of its own, as `.data` has, a
                # gradient does not look changed when that of another optimizer was.
                param.grad = param.grad.data
        self._zero_parts_of_others(zero)
        keep_one_to_watch(zero, kept)
        if self.scaled:
            share_infinities(zero.collectives, gradients_of(kept))
        zero.backward.end_on_owners(kept, scaled=self.scaled, may_change=self.may_change, used=used)

    def _zero_parts_of_others(self, zero: ZeroRedundancyOptimizer) -> None:
        """Set the parts of cut parameters' gradients that other ranks own to zero."""
        for number, param, _ in zero.built.cut:
            for piece, owner in zero.partition.pieces_of_param[number]:
                if param.grad is not None and owner != zero.rank:
                    flat_view(param.grad)[piece.start : piece.stop] = 0


def keep_one_to_watch(
    zero: ZeroRedundancyOptimizer, kept: dict[torch.Tensor, None], *, cut_in_slices: bool = False
) -> None:
    """Add a parameter with a gradient of zeros to those in `kept`, if none of them has a gradient.

    A rank without gradients could not see a change that torch makes to all gradients. The added parameter is
    one that this rank does not step.

    Args:
        kept: the parameters whose gradients this rank keeps.
        cut_in_slices: gradients of parameters that are cut are in the slices' own `.grad`, where a step takes
            them, so a parameter of which this rank owns a slice may be added, too.
    """
    for param in kept:
        if param.grad is not None and param.numel():
            return
    smallest = _smallest_not_stepped(zero, cut_in_slices)
    if smallest is not None:
        smallest.grad = torch.zeros_like(smallest, requires_grad=False)
        kept[smallest] = None


def _smallest_not_stepped(zero: ZeroRedundancyOptimizer, cut_in_slices: bool) -> torch.Tensor | None:
    """Find the smallest trained parameter that this rank does not step, if possible one that others own."""
    mine = {own.param for own in zero.shard.owned}
    stepped = {own.param for own in zero.shard.owned if own.is_whole or not cut_in_slices}
    others = [p for p in zero.built.params if p.requires_grad and p.numel() and p not in stepped]
    return min(others, key=lambda param: (param in mine, param.numel()), default=None)


def gradients_of(params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients of these parameters that have elements."""
    return [param.grad for param in params if param.grad is not None and param.numel()]


def share_infinities(comm: Collectives, own: Sequence[torch.Tensor]) -> None:
    """If one rank has a gradient that is not finite, give every rank one, so that GradScaler finds it.

    Args:
        own: the gradients of this rank; empty if the rank owns all parameters, and none was used.
    Collective: all ranks.
    Cost: an all-reduce of 4 bytes, and a wait for an accelerator if control messages are on the CPU.
    """
    if not own:
        comm.all_reduce(torch.zeros(1, device=comm.control_device)).wait()
        return
    first = flat_view(own[0])[:1]
    norms = torch._foreach_norm(list(own), torch.inf)
    finite = torch.stack([norm.to(first.device) for norm in norms]).isfinite().all()
    found = finite.logical_not().to(comm.control_device, torch.float32).view(1)
    comm.all_reduce(found).wait()
    if found.device == first.device:
        first.masked_fill_(found > 0, torch.nan)  # without asking, for which the host would wait
    elif found.item():
        first.fill_(torch.nan)
