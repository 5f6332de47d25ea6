"""Flat tensors laid out by a `BucketLayout`; the parameters are views of them.

`stairs/owners.py` sends one broadcast for each parameter. This module adds buckets, with which one broadcast
for each owner is enough. A bucket sends all its parameters in one message, and nothing is copied before or
after: writing the bucket writes the parameters, because they share memory.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from itertools import chain, islice, pairwise, zip_longest
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zero_ref.comm.collectives import Collectives, PendingCall, Then
from zero_ref.plan.layout import BucketLayout, end_to_end, runs_within
from zero_ref.plan.parcels import PACKED_NUMEL, parcels
from zero_ref.plan.partition import Partition, Slice


class Message(NamedTuple):
    """A tensor that one broadcast sends.

    Args:
        owner: the rank that sends it.
        tensor: (numel,), contiguous, sharing memory with the parameters.
        slices: the slices in `tensor`.
        starts: the offset in `tensor` of each slice's first element.
        whole: the flat tensor, if `tensor` is one of its N equal shares; None otherwise. The messages of all
            shares follow each other, and one all-gather sends them.
    """

    owner: int
    tensor: torch.Tensor
    slices: tuple[Slice, ...]
    starts: tuple[int, ...] = (0,)
    whole: torch.Tensor | None = None


class Parcel:
    """Small tensors of one owner that one broadcast sends together, by way of a buffer.

    Args:
        messages: of one owner, dtype and device.

    Attributes:
        owner: the rank that sends it.
        tensor: (numel,), contiguous: the buffer.
        slices: the slices in `tensor`, end to end.
        windows: for each of the messages a view of `tensor`.
    """

    def __init__(self, messages: Sequence[Message]) -> None:
        self.owner = messages[0].owner
        self.slices = tuple(chain.from_iterable(message.slices for message in messages))
        self._places = [message.tensor for message in messages]
        numels = [place.numel() for place in self._places]
        self.tensor = self._places[0].new_empty(sum(numels))
        self.windows = self.tensor.split(numels)

    def pack(self) -> None:
        """Copy the parameters into the buffer."""
        torch._foreach_copy_(self.windows, self._places)

    def unpack(self) -> None:
        """Copy the buffer into the parameters."""
        torch._foreach_copy_(self._places, self.windows)


def flat_view(tensor: torch.Tensor) -> torch.Tensor:
    """All elements of `tensor` in memory order, as a 1-D view.

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
    """The elements of `tensor` in the memory order of `reference`: a view if strides agree, else a copy."""
    if tensor.stride() != reference.stride():
        tensor = torch.empty_like(reference, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    return flat_view(tensor)


def check_can_be_flattened(params: Sequence[torch.Tensor]) -> None:
    """Refuse parameters that cannot be moved into flat tensors.

    Raises:
        ValueError: a parameter belongs to a DistributedDataParallel(mixed_precision=...), which moves its
            parameters back to their old memory in every iteration, so a step on flat tensors would be lost.
    """
    for number, param in enumerate(params):
        if hasattr(param, "_fp_param"):
            raise ValueError(
                f"parameter {number} belongs to a DistributedDataParallel(mixed_precision=...), which moves "
                "it back to its old memory after each forward. Construct the optimizer before it, or without "
                "parameters_as_bucket_view."
            )


def kept_view(optimizer: Optimizer, params: Sequence[torch.Tensor]) -> int | None:
    """Find a parameter of which the optimizer keeps a view; return its number, or None if there is none.

    Parameters in the optimizer's groups and in the keys of its state do not count: these are replaced when
    parameters move.
    """
    # (address, number) of each parameter. Without memory ("meta"), the address is 0.
    starts = sorted((start, number) for number, param in enumerate(params) if (start := param.data_ptr()))
    groups = [{**group, "params": ()} for group in optimizer.param_groups]
    # Search all objects that the optimizer refers to, directly or through others.
    left: list[Any] = [{**vars(optimizer), "param_groups": groups}]
    seen = {id(param) for param in params}
    while left:
        value = left.pop()
        if id(value) in seen or isinstance(value, (type, ModuleType, FunctionType)):
            continue
        seen.add(id(value))
        is_wrapper: bool = is_traceable_wrapper_subclass(value)
        if isinstance(value, torch.Tensor) and not is_wrapper:
            number = _param_at(value, starts, params)
            if number is not None:
                return number
        else:
            left += _values_in(value)
    return None


def _param_at(
    tensor: torch.Tensor, starts: Sequence[tuple[int, int]], params: Sequence[torch.Tensor]
) -> int | None:
    """Return the number of the parameter in whose memory the tensor begins, or None.

    Args:
        starts: (address, number) of each parameter, sorted.
    """
    if tensor.layout != torch.strided or not tensor.numel():
        return None
    # Only the last parameter that begins at or before the tensor can contain the tensor's first element.
    at = bisect(starts, (tensor.data_ptr(), len(params))) - 1
    if at < 0:
        return None
    start, number = starts[at]
    return number if tensor.data_ptr() < start + params[number].nbytes else None


def _values_in(value: Any) -> Iterable[Any]:
    """List what an object holds: its items, its attributes, or the inner tensors of a wrapper subclass."""
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, (list, tuple, set, frozenset)):
        return value
    if is_traceable_wrapper_subclass(value):
        return [getattr(value, inner) for inner in value.__tensor_flatten__()[0]]
    return vars(value).values() if hasattr(value, "__dict__") else ()


@torch.no_grad()
def flatten_parameters(layout: BucketLayout, params: Sequence[torch.Tensor]) -> list[Message]:
    """Move the parameters into flat tensors and return one message for each bucket.

    Values, shapes, strides and the Parameter objects stay the same; only the memory changes. Parts of a flat
    tensor that share no parameter are allocated one by one, and the memory that each part replaces is freed
    before the next: with whole parameters, the peak is one bucket above the model, not a second model.

    Args:
        layout: the layout of `params`.
        params: in registration order.
    Returns:
        The buckets in the order in which every rank sends them.
    """
    messages = []
    for flat in layout.flats:
        # A bucket that begins inside a parameter must share memory with the bucket before it.
        firsts = [0] if flat.shared else [n for n, b in enumerate(flat.buckets) if b.slices[0].start == 0]
        for first, end in pairwise([*firsts, len(flat.buckets)]):
            buckets = flat.buckets[first:end]
            # 1. Allocate this part. Padding is zero, so that no checkpoint or sum has uninitialised memory.
            start = buckets[0].start
            stop = flat.buckets[end].start if end < len(flat.buckets) else flat.numel
            tensor = torch.zeros(stop - start, dtype=getattr(torch, flat.dtype), device=flat.device)
            # 2. Move its parameters: copy their values, then point them to the new memory.
            _move_into(
                tensor,
                {
                    params[index]: flat.offset_of_param[index] - start
                    for bucket in buckets
                    for index, *_ in bucket.slices
                },
            )
            # 3. Each bucket is a message, and a view of the part.
            messages += [
                Message(
                    bucket.owner,
                    tensor[bucket.start - start : bucket.stop - start],
                    bucket.slices,
                    bucket.starts,
                    tensor if flat.shared else None,
                )
                for bucket in buckets
            ]
    return messages


def _move_into(flat: torch.Tensor, offsets: Mapping[torch.Tensor, int]) -> None:
    """Make parameters views of a flat tensor, with the values that they have.

    Args:
        offsets: the parameters, each with the offset of its first element.
    """
    windows = [flat.as_strided(param.size(), param.stride(), offset) for param, offset in offsets.items()]
    if windows:
        torch._foreach_copy_(windows, list(offsets))
    for param, window in zip(offsets, windows):
        param.data = window


def messages_by_parameter(
    partition: Partition, params: Sequence[torch.Tensor], *, frozen: bool = False
) -> list[Message]:
    """Make the messages of an optimizer without buckets: one for each trained (or frozen) slice, by owner."""
    return [
        Message(owner, flat_view(params[piece.param].detach())[piece.start : piece.stop], (piece,))
        for owner, slices in enumerate(partition.slices_of_rank)
        for piece in slices
        if piece.numel and params[piece.param].requires_grad != frozen
    ]


def messages_within(messages: Iterable[Message], params: Container[int]) -> list[Message]:
    """Cut these messages down to `params`, in as few messages as their memory allows."""
    return [
        Message(message.owner, message.tensor[run.start : run.stop], run.slices, end_to_end(run.slices))
        for message in messages
        for run in runs_within(message.slices, message.starts, params)
    ]


def joined(messages: Iterable[Message], buffer_size: int) -> list[Message | Parcel]:
    """Join the messages of small tensors: those of one owner, dtype and device travel together.

    Args:
        messages: each a tensor of its own.
        buffer_size: the most elements of a buffer. 0 joins nothing.
    Returns:
        The parcels, then the messages that travel as they are: those of large tensors, or without company.
    """
    listed = list(messages)
    if not buffer_size:
        return [*listed]

    def kind(number: int) -> object:
        owner, tensor, *_ = listed[number]
        # A copy of tensors that wrap others may do more than copy, so these travel alone.
        is_wrapper: bool = is_traceable_wrapper_subclass(tensor)
        return number if is_wrapper else (owner, tensor.dtype, tensor.device)

    sizes = [(kind(number), message.tensor.numel()) for number, message in enumerate(listed)]
    return [
        listed[numbers[0]] if len(numbers) == 1 else Parcel([listed[number] for number in numbers])
        for numbers in parcels(sizes, buffer_size, PACKED_NUMEL)
    ]


def start_broadcasts(
    comm: Collectives,
    messages: Iterable[Message | Parcel],
    dtype: torch.dtype | None = None,
    expected: Iterable[PendingCall | None] = (),
) -> list[PendingCall]:
    """Start to send every message from its owner; wait for the returned works to complete them.

    Args:
        messages: those of `joined`; or, if there is a `dtype`, each by itself.
        dtype: send parameters of a larger floating-point dtype in this one; None sends all as they are. The
            owner keeps its unrounded values, the other ranks receive rounded ones.
        expected: what `comm.expect` returned for these messages; `dtype` is then None, since rounded values
            arrive in temporary tensors.
    Collective: all ranks of the group, with the same messages in the same order.
    Cost: each rank receives the elements that it does not own.
    """
    if comm.world_size == 1:
        return []
    works: list[PendingCall] = []
    left = iter(zip_longest(messages, expected))
    for message, receiving in left:
        tensor, owner = message.tensor, message.owner
        if isinstance(message, Parcel):
            if owner == comm.rank:
                message.pack()
                works.append(comm.broadcast(tensor, owner))
            else:
                works.append(Then(comm.broadcast(tensor, owner, receiving), message.unpack))
            continue
        if dtype is not None and tensor.is_floating_point() and tensor.itemsize > dtype.itemsize:
            rounded = tensor.to(dtype) if owner == comm.rank else torch.empty_like(tensor, dtype=dtype)
            works.append(_RoundedBroadcast(comm.broadcast(rounded, src=owner), message, rounded, comm.rank))
        elif message.whole is None:
            works.append(comm.broadcast(tensor, owner, receiving))
        else:
            # The first of N shares: the all-gather sends the N - 1 messages that follow, too.
            of_other_shares = [other for _, other in islice(left, comm.world_size - 1)]
            works.append(comm.gather_shares(message.whole, [receiving, *of_other_shares]))
    return works


class _RoundedBroadcast:
    """A pending broadcast of `rounded`; `wait` copies `rounded` into the message, except on the owner."""

    def __init__(self, work: PendingCall, message: Message, rounded: torch.Tensor, rank: int) -> None:
        self.work, self.message, self.rounded, self.rank = work, message, rounded, rank
        # bfloat16 has the exponents of float32, so rounding cannot overflow.
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
        """Find the slice of the first element that was too large for the dtype of the broadcast."""
        too_large = self.rounded.isinf().nonzero()[:1].tolist()  # one index, or none: the values have a NaN
        placed = zip(self.message.slices, self.message.starts)
        return next((p for p, start in placed for [at] in too_large if at < start + p.numel), None)


def finish_broadcasts(works: Sequence[PendingCall], name: Callable[[int], str] = str) -> None:
    """Wait until all messages have arrived.

    Args:
        works: all works that `start_broadcasts` returned, on all ranks.
        name: gives a parameter's name from its number.
    Raises:
        RuntimeError: a value was too large for the dtype of the broadcast. Every rank sees the infinite
            value, so all raise.
    """
    # 1. Complete all broadcasts, so that no rank raises while another one waits.
    narrow = []
    for work in works:
        work.wait()
        if isinstance(work, _RoundedBroadcast) and work.may_overflow:
            narrow.append(work)
    if not narrow:
        return
    # 2. Look for infinities. On a GPU, tolist waits for the broadcasts: call it once for all of them.
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
    messages: Sequence[Message | Parcel],
    dtype: torch.dtype | None = None,
    expected: Iterable[PendingCall | None] = (),
    name: Callable[[int], str] = str,
) -> None:
    """Call `start_broadcasts`, then `finish_broadcasts`."""
    # Start every broadcast before waiting on one: they share the network.
    finish_broadcasts(start_broadcasts(comm, messages, dtype, expected), name)
