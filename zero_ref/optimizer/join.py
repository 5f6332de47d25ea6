"""Uneven inputs: ranks that have run out of data go on updating what they own.

`stairs/owners.py` needs the same number of batches on every rank. Here torch's `Join` context lets a rank
leave its training loop when it has no more data. From then on that rank shadows the calls of the others: its
DDP takes part in their reductions with gradients of zero, and its optimizer goes on stepping its shard.

    with Join([ddp, zero]):
        for batch in batches_of_this_rank:
            loss_of(ddp, batch).backward()
            zero.step()

But a rank that runs no backward has no gradients, and its learning rate no longer changes. So inside `Join`
every step begins with an all-gather that tells which ranks have left. If any have, one rank that still trains
sends all of them its options, and sends each the gradients of the slices that it owns. `ShadowStep` is such a
step on a rank that has left.

`Join` shadows each forward of the DDP model, so a rank with data must step after each forward: it cannot
accumulate gradients over several, and torch.amp.GradScaler must not skip a step. When all ranks have left,
DDP gives them the parameters of one rank: with `broadcast_dtype` of `OSS`, the owners' full precision is lost
then.

Write `with Join(...)`: as long as a `Join` is kept in a variable, it counts as one that has not ended.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.distributed.algorithms.join import JoinHook

from zero_ref.comm.collectives import Collectives, ToPeer
from zero_ref.comm.objects import broadcast_json
from zero_ref.plan.partition import Slice
from zero_ref.shard.buckets import flat_like
from zero_ref.shard.built import Built
from zero_ref.shard.gradients import Backward
from zero_ref.shard.groups import describe_options, options_of
from zero_ref.shard.owned import own_slices
from zero_ref.shard.shard import Shard

Layout = list[int] | None
"""A gradient's layout: None if it is dense; [entries, sparse dimensions] if it is sparse."""


class Zero(Protocol):
    """The part of a `ZeroRedundancyOptimizer` that this module uses."""

    collectives: Collectives
    backward: Backward
    built: Built
    shard: Shard
    param_groups: list[dict[str, Any]]

    @property
    def joined(self) -> ShadowStep | None: ...
    def begin_update(self) -> None: ...
    def make_update(self, *, gradients: dict[int, torch.Tensor]) -> Any: ...


class ShadowStep(JoinHook):
    """A step on a rank that has left its loop, which `Join` calls once for each step of the others.

    When all ranks have left, the optimizer takes over the options of a rank that stayed longest. If a
    scheduler steps in every iteration, it has fallen behind on the other ranks: load its state from a rank
    that stayed longest.

    Args:
        zero: the optimizer.
        divide_by_initial_world_size: DDP divides gradients by the number of all ranks; if False, by the
            number of ranks that still have data.
        **_: `Join`'s arguments for other classes.
    Raises:
        ValueError: the update is made in backward and depends on which parameters were used in it, which a
            rank without a backward cannot know.
    """

    def __init__(self, zero: Zero, divide_by_initial_world_size: bool = True, **_: Any) -> None:
        if zero.backward.late:
            raise ValueError(
                "overlap_with_ddp=True cannot be joined where DistributedDataParallel has "
                "find_unused_parameters=True or static_graph=True: a rank without data does not learn which "
                "parameters were used. Construct either without it."
            )
        self.zero = zero
        self.divide_by_initial_world_size = divide_by_initial_world_size

    def main_hook(self) -> None:
        """Step this rank's shard as if it still had data."""
        zero = self.zero
        if zero.backward.take_update({}):
            return  # the backward of DDP's shadow has called the hook that steps
        owner_only = zero.backward.gradients.on_owners
        try:
            gradients = send_to_joined(zero, active=False)
            zero.begin_update()
            zero.make_update(gradients=gradients)
        except RuntimeError as error:
            error.add_note(
                "This rank has run out of data, and makes one step for each forward of the others. If none "
                "has stopped, one did not step, or not in the order in which Join lists the optimizers."
            )
            raise
        if owner_only:
            # DDP's shadow has set `.grad`, and a later backward would add to it.
            for param in zero.built.params:
                param.grad = None

    def post_hook(self, is_last_joiner: bool) -> None:
        """Take over the options of a rank that had data until the end."""
        share_options(self.zero, active=is_last_joiner)


def divisor_of_gradients(zeros: Sequence[Zero], active: bool) -> int:
    """The divisor for DDP's sum of gradients: the number of all ranks, or of those that have data.

    Args:
        zeros: the optimizers of the model, over the same ranks.
        active: this rank still has data.
    Raises:
        ValueError: some of the optimizers are in a `Join`, and others are not.
    Collective: all ranks of the group, inside a `Join` with `divide_by_initial_world_size=False`.
    Cost: one all-reduce of 8 bytes in such a `Join`, else nothing.
    """
    zero = zeros[0]
    if any((other.joined is None) != (zero.joined is None) for other in zeros):
        raise ValueError(
            "some of this model's optimizers are in the Join and others are not: a rank without data would "
            "leave out the steps of the others. List all of them: Join([ddp, first, second])."
        )
    if zero.joined is None or zero.joined.divide_by_initial_world_size:
        return zero.collectives.world_size
    count = torch.full((1,), int(active), device=zero.collectives.control_device)
    zero.collectives.all_reduce(count).wait()
    return int(count.item())


def send_to_joined(zero: Zero, active: bool) -> dict[int, torch.Tensor]:
    """Send ranks without data the gradients and options that they need to step what they own.

    Args:
        active: this rank still has data.
    Returns:
        On a rank without data, gradients by parameter number, for the parameters of which it owns a part and
        that have a gradient on other ranks. Each has the parameter's shape and strides, and is correct in the
        owned part. The parameters' `.grad` does not change. On other ranks an empty dict.
    Raises:
        ValueError: on all ranks, if ranks that have data have different options.
    Collective: all ranks of the group.
    Cost: one all-gather of 8 bytes. If ranks have left, a broadcast of the options, and each of these ranks
        receives the gradients of the elements that it owns.
    """
    # 1. Learn which ranks have left.
    has_data = _gather_has_data(zero, active)
    if all(has_data):
        return {}

    # 2. The first rank with data sends its options, and says which gradients it has.
    source = has_data.index(True)
    layouts = _broadcast_options(zero, source, active)

    # 3. It also sends the gradients, unless backward has reduced them to their owners.
    if zero.backward.gradients.on_owners:
        return {} if active else _own_gradients(zero, layouts)
    if not active:
        return _receive_gradients(zero, source, layouts)
    if zero.collectives.rank == source:
        joined = [rank for rank, stays in enumerate(has_data) if not stays]
        zero.collectives.exchange([send for rank in joined for send in _gradients_for(zero, rank)], []).wait()
    return {}


def share_options(zero: Zero, active: bool) -> None:
    """Send the options to ranks without data; as `send_to_joined`, but without the gradients."""
    has_data = _gather_has_data(zero, active)
    if not all(has_data):
        _broadcast_options(zero, has_data.index(True), active)


def _gather_has_data(zero: Zero, active: bool) -> list[bool]:
    """Gather from each rank whether it has data, and compare the options of the ranks that have.

    Raises:
        ValueError: ranks that have data have different options.
    """
    # One int64 carries both: 56 bits of a digest of the options, and `active` as the lowest bit.
    comm = zero.collectives
    options = [line for group in zero.param_groups for line in describe_options(group)]
    digest = int.from_bytes(hashlib.sha256("\n".join(options).encode()).digest()[:7])
    word = torch.full((1,), 2 * digest + active, device=comm.control_device)
    words: list[int] = torch.cat(comm.all_gather(word)).tolist()
    staying = [rank for rank, other in enumerate(words) if other % 2]
    for rank in staying:
        if words[rank] != words[staying[0]]:
            raise ValueError(
                f"rank {comm.rank}: ranks {staying[0]} and {rank} have different options; here they are "
                f"{', '.join(options)}. A scheduler that steps in every iteration falls behind on a rank "
                "that runs out of data: before the next epoch load into it, on all ranks, the state_dict() "
                "of the scheduler of a rank that had the most."
            )
    return [other % 2 == 1 for other in words]


def _broadcast_options(zero: Zero, source: int, active: bool) -> dict[int, Layout]:
    """Copy the options of rank `source` to ranks without data; return the layouts of its gradients."""
    layouts: Any = _layouts(zero)
    trained = [param.requires_grad for param in zero.built.params]
    options = [
        {key: value for key, value in options_of(group).items() if _is_plain(value)}
        for group in zero.param_groups
    ]
    layouts, trained, options = broadcast_json(zero.collectives, [layouts, trained, options], source)
    if not active:
        for param, is_trained in zip(zero.built.params, trained, strict=True):
            param.requires_grad_(is_trained)
        for group, theirs in zip(zero.param_groups, options, strict=True):
            group.update({key: _in_type_of(group.get(key), value) for key, value in theirs.items()})
    return dict(layouts)


def _layouts(zero: Zero) -> list[list[Any]]:
    """(number, layout) for each parameter that has a gradient on this rank."""
    if zero.backward.gradients.on_owners:  # the gradients of other owners have been released
        return [[number, None] for number in sorted(zero.backward.gradients.used)]
    return [
        [number, None if grad.layout == torch.strided else [grad._nnz(), grad.sparse_dim()]]
        for number, param in enumerate(zero.built.params)
        if param.requires_grad and (grad := param.grad) is not None
    ]


def _is_plain(value: Any) -> bool:
    """Return whether JSON can express the value."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    if isinstance(value, (tuple, list)):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))


def _in_type_of(ours: Any, theirs: Any) -> Any:
    """Convert `theirs`, a value from JSON, to the type of `ours`: a learning rate may be a tensor."""
    if isinstance(ours, torch.Tensor):
        return ours.fill_(theirs)
    if isinstance(ours, (tuple, list)):
        return type(ours)(map(_in_type_of, ours, theirs))
    return theirs


def _gradients_for(zero: Zero, rank: int) -> list[ToPeer]:
    """The messages to `rank`: this rank's gradients of the slices that `rank` owns."""
    tensors: list[torch.Tensor] = []
    for piece, param, *_ in own_slices(zero.built.partition.slices_of_rank[rank], zero.built.params):
        if param.requires_grad and param.grad is not None:
            tensors += _tensors_of(param.grad, piece, param)
    return [(rank, tensor.to(zero.collectives.wire_of(tensor.device))) for tensor in tensors]


def _receive_gradients(zero: Zero, source: int, layouts: dict[int, Layout]) -> dict[int, torch.Tensor]:
    """Receive from rank `source` the messages that its `_gradients_for` makes for this rank."""
    gradients: dict[int, torch.Tensor] = {}
    places: list[torch.Tensor] = []  # views of the gradients, in the order of the messages
    for piece, param, *_ in zero.shard.owned:
        if piece.param in layouts:
            gradient = gradients.setdefault(piece.param, _zero_gradient(param, layouts[piece.param]))
            places += _tensors_of(gradient, piece, param)
    wire_of = zero.collectives.wire_of
    received = [place.to(wire_of(place.device)) for place in places]  # a copy only if the network needs one
    zero.collectives.exchange([], [(source, tensor) for tensor in received]).wait()
    for place, tensor in zip(places, received, strict=True):
        if tensor is not place:
            place.copy_(tensor)
    return gradients


def _own_gradients(zero: Zero, layouts: dict[int, Layout]) -> dict[int, torch.Tensor]:
    """This rank's gradients of the parameters that it owns and that have a gradient on rank `source`."""
    own = {piece.param: param.grad for piece, param, *_ in zero.shard.owned}
    return {number: grad for number, grad in own.items() if grad is not None and number in layouts}


def _zero_gradient(param: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Make a gradient of zeros for `param`, to receive into."""
    if layout is None:
        return torch.zeros_like(param)
    entries, dimensions = layout
    # The indices are all 0 until the others arrive, so the tensor must not be checked or coalesced yet.
    indices = torch.zeros(dimensions, entries, dtype=torch.int64, device=param.device)
    values = param.new_zeros(entries, *param.shape[dimensions:])
    return torch.sparse_coo_tensor(indices, values, size=param.shape, check_invariants=False)


def _tensors_of(grad: torch.Tensor, piece: Slice, param: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that make up a slice of a gradient; a sparse gradient is never cut."""
    if grad.layout == torch.strided:
        parts = [flat_like(grad, param)[piece.start : piece.stop]]
    else:
        parts = [grad._indices().contiguous(), grad._values().contiguous()]
    return [part for part in parts if part.numel()]
