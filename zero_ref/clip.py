"""Clipping by the global norm of gradients whose owners are different ranks.

With `minimal.py` every rank has all gradients, and `torch.nn.utils.clip_grad_norm_` is right. This module
adds a norm for gradients that only their owners may have. The norm of all gradients is the norm of their
norms. So each rank computes the norms of the slices that it owns, 1/N of the work, and one small all-reduce
gives every rank the norms of all slices. It is exact, because all ranks but the owner add zero. From there on
each rank does what torch's function does: it takes the norm of the norms, and multiplies every gradient by
one factor. With whole parameters the total is that of torch on the unsharded model, bit for bit.

Several optimizers have one norm. One of them may be over fewer ranks, such as that of experts, of which each
group of ranks has others. Then no rank knows all slices, so ranks send each norm together with its slice.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grads_with_norm_

# torch's own choice of kernels and order, which decide the last bits of a norm (tests/test_clip.py).
from torch.utils._foreach_utils import (
    _device_has_foreach_support,
    _group_tensors_by_device_and_dtype,
    _has_foreach_support,
)

from zero_ref.comm.agreement import agree
from zero_ref.comm.backend import as_collectives
from zero_ref.comm.collectives import Collectives
from zero_ref.comm.devices import CPU
from zero_ref.comm.objects import gather_texts
from zero_ref.comm.process_group import global_ranks
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer, listed
from zero_ref.plan.partition import Slice
from zero_ref.shard.buckets import flat_like
from zero_ref.shard.groups import dtype_name

# In place of a norm or of a digest, neither of which is ever negative.
ABSENT = -1.0
FAILED = -1.0


Optimizers = ZeroRedundancyOptimizer | Sequence[ZeroRedundancyOptimizer]


def clip_grad_norm_(
    optimizer: Optimizers,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    params: Iterable[torch.Tensor] | torch.Tensor | None = None,
    across: dist.ProcessGroup | Collectives | None = None,
) -> torch.Tensor:
    """Scale the gradients of all ranks by one factor, so that their norm together is at most `max_norm`.

    Equal to `torch.nn.utils.clip_grad_norm_` on the unsharded model, and called in the same place: between
    backward and step, after `scaler.unscale_(optimizer)`. If all ranks have all gradients, torch's function
    gives the same at N times the work. If each rank has only the gradients that it owns
    (`reduce_to_owners`), torch's function would find another norm and another factor on each rank.

    >>> from zero_ref.lab import virtual
    >>> def on_rank(comm):                               # rank 0 owns the first parameter, rank 1 the other
    ...     weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    ...     zero = ZeroRedundancyOptimizer(weights, torch.optim.SGD, comm, lr=0.1)
    ...     weights[comm.rank].grad = torch.tensor([[3.0, 0.0], [0.0, 4.0]][comm.rank])
    ...     total = clip_grad_norm_(zero, max_norm=2.5)
    ...     return total.item(), weights[comm.rank].grad.round(decimals=4).tolist()
    >>> virtual.run(on_rank, 2)
    [(5.0, [1.5, 0.0]), (5.0, [0.0, 2.0])]

    Several optimizers have one norm, and are scaled by one factor: `clip_grad_norm_([body, head], 1.0)`. If
    one is over fewer ranks than another, its groups count as different parameters: so
    `clip_grad_norm_([dense, experts], 1.0)`, where `dense` is over all ranks and `experts` over those that
    share some experts, clips by the norm of the dense parameters and of the experts of all groups. If groups
    have copies of the same parameters (hybrid sharding), give all optimizers the same group: beside a wider
    one each copy would count, of which a warning tells.

    Args:
        optimizer: the optimizer, or a list of them.
        max_norm, norm_type, error_if_nonfinite, foreach: as torch's; `norm_type` may be "inf".
        params: some of the optimizer's parameters, in any order; only their gradients are counted and scaled.
            None is all. To count some and scale others, use `get_total_norm`, then
            `torch.nn.utils.clip_grads_with_norm_`.
        across: all ranks whose gradients count; None for those of the optimizer with the most. A wider group
            is needed if each optimizer is over a part of them, such as experts alone.
    Returns:
        The norm before clipping, shape (), the same on all ranks. It is torch's total over the parameters in
        registration order, in torch's dtype (what the gradients' dtypes promote to) and on torch's device
        (that of the first gradient); 0.0 if there is no gradient. If no parameter is split between ranks, it
        is equal to the last bit. With several optimizers torch's total is that over the parameters of the
        first, then of the second, and so on, each time of all groups in the order of their ranks; for a model
        that lists them otherwise torch adds the same norms in another order, and the last bit may differ. If
        parameters are split, the total is more exact, because shorter sums round less: float32 2-norms
        on a CPU are within 1e-6 of torch's for split parameters of a thousand elements, 1e-5 for a million
        and 4e-4 for ten million; in bfloat16, within a unit in the last place (2**-7).
    Raises:
        RuntimeError: the total is not finite and `error_if_nonfinite` (names the parameter; no gradient is
            changed); the update was already made in backward (`overlap_with_ddp`), or backward did not end; a
            gradient is sparse; another rank stopped, or makes other calls.
        ValueError: ranks pass different arguments or optimizers; `params` holds one that no optimizer has; a
            parameter is in two optimizers; `across`, or the widest group, lacks ranks of an optimizer.
        TypeError, ValueError: as torch's, on arguments that are no numbers. If one rank raises, all raise.
    Collective: all ranks of the optimizer's group, or of `across`. Inside `Join`, those that still have data.
    Cost: one all-reduce of 8 bytes for each slice and each rank, and on an accelerator one wait, for the
        norms. Of several optimizers, or with `across`, three all-gathers: of 32 bytes, of 8, and of a text of
        about 50 bytes for each slice that a rank owns. Inside `Join` nothing is sent, and each rank computes
        all norms.
    """
    chosen, total = _total_norm(optimizer, norm_type, error_if_nonfinite, foreach, params, across, max_norm)
    tensors: list[torch.Tensor] = []
    for zero, of_zero in chosen.items():
        parts = zero.backward.gradients.parts or {}
        tensors += of_zero.values()
        tensors += (_with_gradient(part) for piece, part in parts.items() if piece.param in of_zero)
    clip_grads_with_norm_(tensors, float(max_norm), total, foreach)
    for zero in chosen:
        zero.backward.gradients.note_change()
    return total


def get_total_norm(
    optimizer: Optimizers,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    params: Iterable[torch.Tensor] | torch.Tensor | None = None,
    across: dist.ProcessGroup | Collectives | None = None,
) -> torch.Tensor:
    """The norm of the gradients of all ranks, which stay as they are. See `clip_grad_norm_`.

    For a norm that is only logged, or one of some parameters, by which you scale more than those:

    >>> total = get_total_norm([body, head], params=model.body.parameters())             # doctest: +SKIP
    >>> torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, total)             # doctest: +SKIP

    Args, Returns, Raises, Collective, Cost: as `clip_grad_norm_`.
    """
    chosen, total = _total_norm(optimizer, norm_type, error_if_nonfinite, foreach, params, across)
    for zero in chosen:
        # The caller may scale them, as above.
        zero.backward.gradients.show(zero.built.params, {own.param for own in zero.shard.owned})
        zero.backward.gradients.note_change(freely=True)
    return total


Chosen = dict[ZeroRedundancyOptimizer, dict[int, torch.Tensor]]
"""For each optimizer the parameters to clip, by their numbers."""


class SliceNorm(NamedTuple):
    """The norm of the gradient of a slice of parameter `number`."""

    number: int
    start: int
    stop: int
    owner: int
    dtype: str
    norm: float


class ParameterNorm(NamedTuple):
    """The norm of the gradient of a parameter. `like` has its dtype and device."""

    name: str
    owners: list[int]
    like: torch.Tensor
    norm: float


@torch.no_grad()
def _total_norm(
    optimizer: Optimizers,
    norm_type: float,
    error_if_nonfinite: bool,
    foreach: bool | None,
    params: Iterable[torch.Tensor] | torch.Tensor | None,
    across: dist.ProcessGroup | Collectives | None,
    max_norm: float = math.inf,
) -> tuple[Chosen, torch.Tensor]:
    """The parameters to clip, and the norm of their gradients."""
    zeros = listed(
        optimizer, "clip over shards", " For an unsharded model use torch.nn.utils.clip_grad_norm_."
    )
    widest = max((zero.collectives for zero in zeros), key=lambda one: one.world_size)
    comm = widest if across is None else as_collectives(across)
    is_one = len(zeros) == 1 and comm is widest
    # Ranks that have left a Join loop do not call this function. Those in the loop have all gradients.
    alone = any(zero.joined is not None for zero in zeros)
    facts: list[str] | Exception
    chosen: Chosen = {}
    norms = [torch.empty(0, device="cpu")]
    try:
        norm_type = float(norm_type)
        facts = [
            f"max_norm={float(max_norm)}, norm_type={norm_type}, error_if_nonfinite={error_if_nonfinite}"
        ]
        chosen = _chosen(zeros, params)
        facts.append(_told(zeros[0], chosen[zeros[0]]) if is_one else f"{len(zeros)} optimizers")
        for zero, of_zero in chosen.items():
            _check_ranks(zero, comm, alone)
            _check_can_be_clipped(zero, of_zero)
        norms = [_norms_of_slices(*of, norm_type, foreach, alone) for of in chosen.items()]
    except Exception as error:
        if alone:
            raise
        facts = error
    if is_one:
        of_all = norms[0].tolist() if alone else _shared(zeros[0], norms[0], facts)
        found = _norms_of_one(zeros[0], chosen[zeros[0]], of_all, norm_type)
    else:
        found = _norms_of_several(comm, chosen, norms, facts, norm_type, alone)
    if not found:
        return chosen, torch.tensor(0.0)
    together = _in_torchs_order([one.like for one in found], [one.norm for one in found])
    if error_if_nonfinite and not bool(torch.linalg.vector_norm(together, norm_type).isfinite()):
        raise RuntimeError(_nonfinite_error(comm.rank, found, norm_type))
    # By the kernel that torch's function would use, without waiting until the accelerator can take the norms.
    device = found[0].like.device
    return chosen, torch.linalg.vector_norm(together.to(device, non_blocking=True), norm_type)


def _chosen(
    zeros: Sequence[ZeroRedundancyOptimizer], params: Iterable[torch.Tensor] | torch.Tensor | None
) -> Chosen:
    """These parameters by their numbers, in registration order."""
    chosen: Chosen = {zero: dict(enumerate(zero.built.params)) for zero in zeros}
    known = {param for zero in zeros for param in zero.built.params}
    if len(known) < sum(map(len, chosen.values())):
        raise ValueError(
            f"rank {zeros[0].rank}: a parameter is in two of the optimizers and would count twice."
        )
    if params is None:
        return chosen
    wanted = [params] if isinstance(params, torch.Tensor) else list(params)
    for param in wanted:
        if not (isinstance(param, torch.Tensor) and param in known):
            shape = f" of shape {tuple(param.shape)}" if isinstance(param, torch.Tensor) else ""
            raise ValueError(
                f"rank {zeros[0].rank}: `params` holds a {type(param).__name__}{shape} that is no parameter "
                "of this optimizer. Pass some of those that it was constructed with."
            )
    some = set(wanted)
    return {zero: {n: param for n, param in of.items() if param in some} for zero, of in chosen.items()}


def _told(zero: ZeroRedundancyOptimizer, chosen: Mapping[int, torch.Tensor]) -> str:
    """What ranks compare: the optimizer, and the numbers of the parameters to clip."""
    some = "all parameters" if len(chosen) == len(zero.built.params) else f"parameters {list(chosen)}"
    return f"{zero.accord.what}, {some}"


def _check_ranks(zero: ZeroRedundancyOptimizer, comm: Collectives, alone: bool) -> None:
    """Refuse an optimizer with ranks that `comm` lacks, and inside Join one over fewer ranks."""
    ours, theirs = global_ranks(zero.collectives), global_ranks(comm)
    if not {*ours} <= {*theirs}:
        raise ValueError(
            f"rank {zero.rank}: the ranks {theirs} are to have one norm, and an optimizer is over {ours}. "
            "Pass across=, the process group of all ranks whose gradients count."
        )
    if alone and (zero.joined is None or ours != theirs):
        raise RuntimeError(
            f"rank {zero.rank}: inside Join nothing is sent for a norm, so the optimizers must all be in it, "
            "and over the same ranks."
        )


def _check_can_be_clipped(zero: ZeroRedundancyOptimizer, chosen: Mapping[int, torch.Tensor]) -> None:
    gradients = zero.backward.gradients
    if gradients.why_no_clipping is not None:
        raise RuntimeError(f"rank {zero.rank}: {gradients.why_no_clipping}")
    if zero.joined and gradients.on_owners:
        raise RuntimeError(
            f"rank {zero.rank}: inside Join a rank that has run out of data takes no part in clipping, and "
            "with reduce_to_owners no other has the gradients that it owns. Use DDP without that hook."
        )
    gradients.check_as_left(zero.rank, zero.built)
    for number, param in chosen.items():  # owned or not, so that all ranks raise the same
        if param.grad is not None and param.grad.layout != torch.strided:
            raise RuntimeError(
                f"rank {zero.rank}: parameter {zero.built.name(number)} has a sparse gradient, of "
                "which torch computes no norm. Construct its layer with sparse=False, or leave it out with "
                "`params`."
            )


def _with_gradient(part: torch.Tensor) -> torch.Tensor:
    """A tensor whose gradient is the part, for functions of torch that take parameters."""
    holder = torch.empty_like(part)
    holder.grad = part
    return holder


def _norms_of_slices(
    zero: ZeroRedundancyOptimizer,
    chosen: Mapping[int, torch.Tensor],
    norm_type: float,
    foreach: bool | None,
    alone: bool,
) -> torch.Tensor:
    """The norm of the gradient of each slice to count, or ABSENT: (slices,), float64.

    It lies where control messages are made.
    """
    pieces = [piece for piece, _ in _counted(zero, alone)]
    parts, control = zero.backward.gradients.parts, zero.collectives.control_device
    whole: dict[Slice, torch.Tensor] = {}
    norms: dict[Slice, torch.Tensor] = {}
    for piece in pieces:
        param = chosen.get(piece.param)
        if param is None:
            continue
        is_whole = piece.numel == param.numel()
        grad = param.grad if parts is None or is_whole else parts.get(piece)
        if grad is None:
            continue
        if is_whole:
            whole[piece] = grad
        else:
            part = flat_like(grad, param)[piece.start : piece.stop] if parts is None else grad
            # Not in 16 bits: the norm of the whole parameter is to be rounded only once.
            dtype = torch.float32 if part.dtype in (torch.float16, torch.bfloat16) else None
            norms[piece] = torch.linalg.vector_norm(part, norm_type, dtype=dtype).double()
    norms |= _norms(whole, norm_type, foreach)
    device = next((norm.device for norm in norms.values()), control)
    absent = torch.full((), ABSENT, dtype=torch.float64, device=device)
    # Put together on their device, so that one copy brings all of them to another.
    return torch.stack([absent, *(norms.get(piece, absent).to(device) for piece in pieces)])[1:].to(control)


def _norms(
    whole: Mapping[Slice, torch.Tensor], norm_type: float, foreach: bool | None
) -> dict[Slice, torch.Tensor]:
    """The norm of each gradient, rounded to its dtype, by the kernels that torch's function would use."""
    norms: dict[Slice, torch.Tensor] = {}
    pieces = list(whole)
    for (device, _), ((of_kind, *_), indices) in _by_kind(list(whole.values())).items():
        if foreach and not _device_has_foreach_support(device):
            raise RuntimeError(
                f"foreach=True was passed, but can't use the foreach API on {device.type} tensors. "
                "Leave foreach out."
            )
        if _has_foreach_support(of_kind, device) if foreach is None else foreach:
            of_each = list(torch._foreach_norm(of_kind, norm_type))
        else:
            of_each = [torch.linalg.vector_norm(tensor, norm_type) for tensor in of_kind]
        norms |= zip((pieces[index] for index in indices), torch.stack(of_each).double(), strict=True)
    return norms


def _shared(
    zero: ZeroRedundancyOptimizer, own: torch.Tensor, facts: Sequence[str] | Exception
) -> list[float]:
    """The norms of all slices, from those of each rank's. If `facts` differ, all ranks raise as `agree`.

    Collective: all ranks of the group.
    Cost: one all-reduce of 8 bytes for each slice and each rank.
    """
    comm = zero.collectives
    counts = [len(owned) for owned in zero.partition.slices_of_rank]
    before, count = sum(counts[: comm.rank]), sum(counts)
    vector = torch.zeros(count + comm.world_size, dtype=torch.float64, device=comm.control_device)
    vector[before : before + len(own)] = own
    if isinstance(facts, Exception):
        vector[count + comm.rank] = FAILED
    else:  # 48 bits, which a float64 holds exactly
        digest = hashlib.sha256("\n".join(facts).encode()).digest()
        vector[count + comm.rank] = float(int.from_bytes(digest[:6]))
    comm.all_reduce(vector).wait()
    shared = vector.tolist()
    digests = set(shared[count:])
    if FAILED in digests or len(digests) > 1:
        agree(comm, "clip the gradients", facts)  # raises
    return shared[:count]


def _norms_of_one(
    zero: ZeroRedundancyOptimizer,
    chosen: Mapping[int, torch.Tensor],
    norms: Sequence[float],
    norm_type: float,
) -> list[ParameterNorm]:
    """The norms of an optimizer's parameters, from those of all slices."""
    slices = _present(_counted(zero, alone=True), norms, chosen)
    return [
        ParameterNorm(zero.built.name(number), owners, chosen[number], norm)
        for number, owners, _, norm in _of_params(slices, norm_type)
    ]


def _norms_of_several(
    comm: Collectives,
    chosen: Chosen,
    norms: Sequence[torch.Tensor],
    facts: list[str] | Exception,
    norm_type: float,
    alone: bool,
) -> list[ParameterNorm]:
    """The norms of the parameters of several optimizers, and of all groups of each, from those of this rank.

    Raises: as `agree`, and ValueError on all ranks if those of a group were given other optimizers.
    Collective: all ranks of `comm`.
    Cost: three all-gathers, of 32 bytes, 8 bytes and the norms.
    """
    if not alone:
        agree(comm, "clip the gradients", facts)
    place_of_rank = {rank: place for place, rank in enumerate(global_ranks(comm))}
    mine: list[tuple[list[int], str, list[SliceNorm]]] = []
    for (zero, of_zero), of_slices in zip(chosen.items(), norms, strict=True):
        group = [place_of_rank[rank] for rank in global_ranks(zero.collectives)]
        slices = _present(_counted(zero, alone), of_slices.tolist(), of_zero)
        slices = [one._replace(owner=group[one.owner]) for one in slices]
        mine.append(([comm.rank] if alone else group, _told(zero, of_zero), slices))
    of_rank = {comm.rank: mine}
    if not alone:
        of_rank = dict(enumerate(map(json.loads, gather_texts(comm, json.dumps(mine)))))
    device = next((param.device for of_zero in chosen.values() for param in of_zero.values()), CPU)
    found = []
    for index, zero in enumerate(chosen):
        groups: dict[tuple[int, ...], list[SliceNorm]] = {}
        for rank, tables in of_rank.items():
            group, told, slices = tables[index]
            groups.setdefault(tuple(group), []).extend(SliceNorm(*one) for one in slices)
            for member in group:
                their_group, theirs, _ = of_rank[member][index]
                if (their_group, theirs) != (group, told):
                    raise ValueError(
                        f"ranks disagree, so none can clip the gradients: rank {rank} has [{told}] over the "
                        f"ranks {group} where rank {member} has [{theirs}] over {their_group}. Pass the same "
                        "optimizers, in the same order, on every rank."
                    )
        if norm_type:  # that of order 0 is a count
            _warn_of_copies(told, groups.values())
        for members, slices in groups.items():  # each group of ranks has parameters of its own
            for number, owners, dtype, norm in _of_params(slices, norm_type):
                name = zero.built.name(number) if comm.rank in members else f"{number} of ranks {[*members]}"
                like = torch.empty(0, dtype=getattr(torch, dtype), device=device)
                found.append(ParameterNorm(name, owners, like, norm))
    return found


def _warn_of_copies(told: str, groups: Iterable[Sequence[SliceNorm]]) -> None:
    """Warn if groups of ranks have gradients of the same norms, which those of other parameters have not."""
    norms = [tuple(sorted((*one[:3], one.norm) for one in slices)) for slices in groups]
    used = [of_group for of_group in norms if any(norm for *_, norm in of_group)]
    if len(set(used)) < len(used):
        warnings.warn(
            f"groups of ranks have the same norms of {told}, and each group counts: if these parameters "
            "are copies (hybrid sharding), the norm is too large. Clip optimizers of one group together.",
            stacklevel=6,
        )


def _counted(zero: ZeroRedundancyOptimizer, alone: bool) -> list[tuple[Slice, int]]:
    """The slices whose norms this rank computes, with their owners: its own, or if it is `alone` all."""
    of_ranks = enumerate(zero.partition.slices_of_rank)
    return [(piece, rank) for rank, owned in of_ranks if alone or rank == zero.rank for piece in owned]


def _present(
    counted: Sequence[tuple[Slice, int]], norms: Sequence[float], chosen: Mapping[int, torch.Tensor]
) -> list[SliceNorm]:
    """The slices that have a gradient."""
    return [
        SliceNorm(*piece, owner, dtype_name(chosen[piece.param].dtype), norm)
        for (piece, owner), norm in zip(counted, norms, strict=True)
        if norm != ABSENT
    ]


def _of_params(slices: Iterable[SliceNorm], norm_type: float) -> Iterator[tuple[int, list[int], str, float]]:
    """By parameter its number, its owners, its dtype, and the norm of the norms of its slices."""
    for number, of_param in itertools.groupby(sorted(slices), key=itemgetter(0)):
        parts = list(of_param)
        norm = parts[0].norm
        if len(parts) > 1:
            together = torch.tensor([part.norm for part in parts], dtype=torch.float64, device="cpu")
            norm = torch.linalg.vector_norm(together, norm_type).item()
        yield number, [part.owner for part in parts], parts[0].dtype, norm


def _in_torchs_order(params: Sequence[torch.Tensor], norms: Sequence[float]) -> torch.Tensor:
    """(params,): the norms as torch takes the norm of them, in the gradients' common dtype; on the CPU."""
    of_kinds = [
        torch.tensor([norms[index] for index in indices], dtype=torch.float64, device="cpu").to(
            dtype.to_real()
        )
        for (_, dtype), (_, indices) in _by_kind(params).items()
    ]
    return torch.cat(of_kinds)


def _by_kind(tensors: Sequence[torch.Tensor]) -> dict[Any, Any]:
    """(device, dtype) -> ([its tensors], their positions in `tensors`), in torch's order."""
    return _group_tensors_by_device_and_dtype([list(tensors)], with_indices=True) if tensors else {}


def _nonfinite_error(rank: int, norms: Sequence[ParameterNorm], norm_type: float) -> str:
    culprits = [one for one in norms if not math.isfinite(one.norm)]
    where = "though that of each parameter is finite"
    if culprits:
        first = culprits[0]
        where = (
            f"as that of parameter {first.name}, owned by rank {' and '.join(map(str, first.owners))}, is "
            f"{first.norm} (one of {len(culprits)} such parameters)"
        )
    return (
        f"rank {rank}: The total norm of order {norm_type} for gradients from `parameters` is "
        f"non-finite, {where}, so it cannot be clipped. All ranks raise this and no gradient was changed: "
        "to skip the step, call zero_grad() on all of them. To disable this error and scale the gradients by "
        "the non-finite norm anyway, set `error_if_nonfinite=False`."
    )
