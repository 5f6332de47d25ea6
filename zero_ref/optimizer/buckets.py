"""A `BucketLayout` made real: flat tensors whose windows are the parameters.

It adds to the broadcasts of `minimal.py`, one for each parameter, that one for each owner will do. Sending a
bucket then sends all its parameters in one message, and nothing is copied before or after: writing the bucket
writes the parameters, because they are the same memory.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise, zip_longest
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zero_ref.comm.collectives import Collectives, PendingCall
from zero_ref.plan.layout import BucketLayout, runs_within
from zero_ref.plan.partition import Partition, Slice


class Message(NamedTuple):
    """A piece of the parameters that travels as one.

    Args:
        owner: the rank that sends it.
        tensor: (numel,), contiguous, sharing memory with the parameters.
        slices: what it holds, end to end.
    """

    owner: int
    tensor: torch.Tensor
    slices: tuple[Slice, ...]


def flat_view(tensor: torch.Tensor) -> torch.Tensor:
    """All elements of `tensor` in the order of its memory, as a 1-D view.

    >>> flat_view(torch.tensor([[1, 2], [3, 4]]).t())          # transposed: the memory still reads 1 2 3 4
    tensor([1, 2, 3, 4])

    Raises:
        ValueError: the elements do not fill a range of memory (an expanded or strided tensor).
    """
    if tensor.is_contiguous():
        return tensor.view(-1)
    if not torch.ops.aten.is_non_overlapping_and_dense(tensor):
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} has gaps or overlaps in "
            "memory; make it .contiguous() first."
        )
    return tensor.as_strided((tensor.numel(),), (1,))


def flat_like(tensor: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """The elements of `tensor` in the order of `reference`'s memory: a view if strides agree, else a copy."""
    if tensor.stride() != reference.stride():
        tensor = torch.empty_like(reference, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    return flat_view(tensor)


def check_can_be_flattened(params: Sequence[torch.Tensor]) -> None:
    """Refuse parameters whose memory somebody else puts back.

    Raises:
        ValueError: DistributedDataParallel(mixed_precision=...) remembers where its parameters lay and
            returns them there in every iteration, so that a step on flat tensors would be lost.
    """
    for number, param in enumerate(params):
        if hasattr(param, "_fp_param"):
            raise ValueError(
                f"parameter {number} belongs to a DistributedDataParallel(mixed_precision=...), which moves "
                "it back to its old memory after each forward. Construct the optimizer before it, or without "
                "parameters_as_bucket_view."
            )


def kept_view(optimizer: Optimizer, params: Sequence[torch.Tensor]) -> int | None:
    """The number of a parameter in whose memory the optimizer keeps a tensor of its own, if it keeps one.

    The parameters themselves do not count, nor do the optimizer's groups and the keys of its state: what
    stands there can be replaced when parameters move.
    """
    starts = sorted((start, number) for number, param in enumerate(params) if (start := param.data_ptr()))
    groups = [{**group, "params": ()} for group in optimizer.param_groups]
    left: list[Any] = [{**vars(optimizer), "param_groups": groups}]
    seen = {id(param) for param in params}
    while left:
        value = left.pop()
        if id(value) in seen or isinstance(value, (type, ModuleType, FunctionType)):
            continue
        seen.add(id(value))
        if isinstance(value, Mapping):
            left += value.values()
        elif isinstance(value, (list, tuple, set, frozenset)):
            left += value
        elif is_traceable_wrapper_subclass(value):
            left += (getattr(value, inner) for inner in value.__tensor_flatten__()[0])
        elif not isinstance(value, torch.Tensor):
            left += vars(value).values() if hasattr(value, "__dict__") else ()
        elif value.layout == torch.strided and value.numel():
            at = bisect(starts, (value.data_ptr(), len(params))) - 1
            if at >= 0 and value.data_ptr() < starts[at][0] + params[starts[at][1]].nbytes:
                return starts[at][1]
    return None


@torch.no_grad()
def flatten_parameters(layout: BucketLayout, params: Sequence[torch.Tensor]) -> list[Message]:
    """Move the parameters into flat tensors and return one message for each bucket.

    Values, shapes, strides and the Parameter objects stay as they are; only where the values live changes.
    Parts of a flat tensor that no parameter crosses are allocated one by one, and what they replace is freed
    on the way: with whole parameters, there is room for one owner's bucket twice, not for the whole model.

    Args:
        layout: made for `params`.
        params: in registration order.
    Returns:
        The buckets in the order in which every rank sends them.
    """
    messages = []
    for flat in layout.flats:
        # A bucket that begins with the rest of a parameter must follow the one before it in memory.
        firsts = [number for number, bucket in enumerate(flat.buckets) if bucket.slices[0].start == 0]
        for first, end in pairwise([*firsts, len(flat.buckets)]):
            buckets = flat.buckets[first:end]
            start = buckets[0].start
            stop = flat.buckets[end].start if end < len(flat.buckets) else flat.numel
            tensor = torch.empty(stop - start, dtype=getattr(torch, flat.dtype), device=flat.device)
            # Padding must not show uninitialised memory in a checkpoint or a sum.
            tensor[buckets[-1].stop - start :].zero_()
            for index in {piece.param for bucket in buckets for piece in bucket.slices}:
                param = params[index]
                place = flat.offset_of_param[index] - start
                param.data = tensor.as_strided(param.size(), param.stride(), place).copy_(param)
            messages += [
                Message(bucket.owner, tensor[bucket.start - start : bucket.stop - start], bucket.slices)
                for bucket in buckets
            ]
    return messages


def messages_by_parameter(
    partition: Partition, params: Sequence[torch.Tensor], *, frozen: bool = False
) -> list[Message]:
    """One message for each slice that is trained, or frozen, owner by owner: what is sent without buckets."""
    return [
        Message(owner, flat_view(params[piece.param].detach())[piece.start : piece.stop], (piece,))
        for owner, slices in enumerate(partition.slices_of_rank)
        for piece in slices
        if piece.numel and params[piece.param].requires_grad != frozen
    ]


def messages_within(messages: Iterable[Message], params: Container[int]) -> list[Message]:
    """Of these messages the part that concerns `params`, in as few messages as memory allows."""
    return [
        Message(message.owner, message.tensor[run.start : run.stop], run.slices)
        for message in messages
        for run in runs_within(message.slices, params)
    ]


def expect_broadcasts(
    comm: Collectives, messages: Iterable[Message], dtype: torch.dtype | None = None
) -> list[PendingCall | None]:
    """Let what others will broadcast arrive at any time from now on, where the network can.

    Args:
        dtype: as of `start_broadcasts`. What is rounded on the way has another place to arrive in: nothing
            is expected.
    Returns:
        What to pass to `start_broadcasts`, which has to follow with the same messages.
    """
    return [] if dtype is not None else [comm.expect(message.tensor, message.owner) for message in messages]


def start_broadcasts(
    comm: Collectives,
    messages: Iterable[Message],
    dtype: torch.dtype | None = None,
    expected: Iterable[PendingCall | None] = (),
) -> list[PendingCall]:
    """Start to send every message from its owner to all ranks; they have arrived when all works are done.

    Args:
        dtype: what travels, where the parameters are of a larger floating-point dtype; None for theirs. The
            owner keeps its values as they are, the others get rounded ones.
        expected: what `expect_broadcasts` gave for these messages, which then go in their own dtype.
    Collective: all ranks of the group, with the same messages in the same order.
    Cost: each rank receives the elements that it does not own.
    """
    if comm.world_size == 1:
        return []
    return [_start_broadcast(comm, message, dtype, work) for message, work in zip_longest(messages, expected)]


def _start_broadcast(
    comm: Collectives, message: Message, dtype: torch.dtype | None, expected: PendingCall | None
) -> PendingCall:
    tensor = message.tensor
    if dtype is None or not tensor.is_floating_point() or tensor.itemsize <= dtype.itemsize:
        return comm.broadcast(tensor, message.owner, expected)
    rounded = tensor.to(dtype) if message.owner == comm.rank else torch.empty_like(tensor, dtype=dtype)
    return _Rounded(comm.broadcast(rounded, src=message.owner), message, rounded, comm.rank)


class _Rounded:
    """A broadcast under way into `rounded`, which on all ranks but the owner goes to the message's place."""

    def __init__(self, work: PendingCall, message: Message, rounded: torch.Tensor, rank: int) -> None:
        self.work, self.message, self.rounded, self.rank = work, message, rounded, rank
        # bfloat16 has the exponents of float32: there is nothing to look at.
        self.may_overflow = 2 * torch.finfo(rounded.dtype).max < torch.finfo(message.tensor.dtype).max
        self.extremes = rounded.new_empty(0)

    def wait(self) -> object:
        self.work.wait()
        if self.may_overflow:
            self.extremes = torch.stack(self.rounded.aminmax())
        if self.message.owner == self.rank:
            return self.message.tensor
        return self.message.tensor.copy_(self.rounded)

    def overflow(self) -> Slice | None:
        """The slice with the first element that was too large for the dtype in which it was sent."""
        too_large = self.rounded.isinf().nonzero()[:1].tolist()
        ends = accumulate(piece.numel for piece in self.message.slices)
        return next((p for p, end in zip(self.message.slices, ends) for [at] in too_large if at < end), None)


def finish_broadcasts(works: Sequence[PendingCall], name: Callable[[int], str] = str) -> None:
    """Return when all messages have arrived.

    Args:
        works: all that `start_broadcasts` gave, on all ranks.
        name: of a parameter, by its number.
    Raises:
        RuntimeError: a value was too large for the dtype in which it was sent. All ranks see that in what
            they have sent or received, so all raise.
    """
    for work in works:
        work.wait()
    narrow = [work for work in works if isinstance(work, _Rounded) and work.may_overflow]
    if not narrow:
        return
    # On a GPU this waits for the broadcasts, once for all of them.
    extremes = torch.stack([work.extremes.to(narrow[0].rounded.device) for work in narrow]).tolist()
    for work, found in zip(narrow, extremes, strict=True):
        piece = None if all(map(math.isfinite, found)) else work.overflow()
        if piece is not None:
            dtype = work.rounded.dtype
            raise RuntimeError(
                f"rank {work.rank}: parameter {name(piece.param)}, which rank {work.message.owner} owns, has "
                f"values beyond {torch.finfo(dtype).max:g}, the largest number of {dtype}: broadcast_dtype "
                "has made them infinite on all other ranks. Use torch.bfloat16, which has the range of "
                "float32, and load the last checkpoint."
            )


def broadcast_messages(
    comm: Collectives,
    messages: Sequence[Message],
    dtype: torch.dtype | None = None,
    expected: Iterable[PendingCall | None] = (),
    name: Callable[[int], str] = str,
) -> None:
    """As `start_broadcasts`, then `finish_broadcasts`."""
    # Start every broadcast before waiting on one: they share the network.
    finish_broadcasts(start_broadcasts(comm, messages, dtype, expected), name)
