"""Clipping by the global norm of gradients whose owners are different ranks.

With `minimal.py` every rank has all gradients, and `torch.nn.utils.clip_grad_norm_` is right. This module
adds a norm for gradients that only their owners may have. The norm of all gradients is the norm of their
norms. So each rank computes the norms of the slices that it owns, 1/N of the work, and one small all-reduce
gives every rank the norms of all slices. It is exact, because all ranks but the owner add zero. From there on
each rank does what torch's function does: it takes the norm of the norms, and multiplies every gradient by
one factor. With whole parameters the total is that of torch on the unsharded model, bit for bit.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.utils import clip_grads_with_norm_

# torch's own choice of kernels and order, which decide the last bits of a norm (tests/test_clip.py).
from torch.utils._foreach_utils import (
    _device_has_foreach_support,
    _group_tensors_by_device_and_dtype,
    _has_foreach_support,
)

from zero_ref.comm.agreement import agree
from zero_ref.optimizer.buckets import flat_like
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.plan.partition import Slice

# In place of a norm or of a digest, neither of which is ever negative.
ABSENT = -1.0
FAILED = -1.0


def clip_grad_norm_(
    optimizer: ZeroRedundancyOptimizer,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    params: Iterable[torch.Tensor] | torch.Tensor | None = None,
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

    Args:
        max_norm, norm_type, error_if_nonfinite, foreach: as torch's; `norm_type` may be "inf".
        params: some of the optimizer's parameters, in any order; only their gradients are counted and scaled.
            None is all. To count some and scale others, use `get_total_norm`, then
            `torch.nn.utils.clip_grads_with_norm_`.
    Returns:
        The norm before clipping, shape (), the same on all ranks. It is torch's total over the parameters in
        registration order, in torch's dtype (what the gradients' dtypes promote to) and on torch's device
        (that of the first gradient); 0.0 if there is no gradient. If no parameter is split between ranks, it
        is equal to the last bit. Otherwise it is more exact, because shorter sums round less: float32 2-norms
        on a CPU are within 1e-6 of torch's for split parameters of a thousand elements, 1e-5 for a million
        and 4e-4 for ten million; in bfloat16, within a unit in the last place (2**-7).
    Raises:
        RuntimeError: the total is not finite and `error_if_nonfinite` (names the parameter; no gradient is
            changed); the update was already made in backward (`overlap_with_ddp`), or backward did not end; a
            gradient is sparse; another rank stopped, or makes other calls.
        ValueError: ranks pass different arguments; `params` holds one that the optimizer does not have.
        TypeError, ValueError: as torch's, on arguments that are no numbers. If one rank raises, all raise.
    Collective: all ranks of the optimizer's group. Inside `Join`, those that still have data.
    Cost: one all-reduce of 8 bytes for each slice and each rank, and on an accelerator one wait, for the
        norms. Inside `Join` nothing is sent, and each rank computes all norms.
    """
    chosen, total = _total_norm(optimizer, norm_type, error_if_nonfinite, foreach, params, max_norm)
    parts = optimizer.backward.gradients.parts or {}
    apart = [_with_gradient(part) for piece, part in parts.items() if piece.param in chosen]
    clip_grads_with_norm_([*chosen.values(), *apart], float(max_norm), total, foreach)
    optimizer.backward.gradients.note_change()
    return total


def get_total_norm(
    optimizer: ZeroRedundancyOptimizer,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    params: Iterable[torch.Tensor] | torch.Tensor | None = None,
) -> torch.Tensor:
    """The norm of the gradients of all ranks, which stay as they are. See `clip_grad_norm_`.

    For a norm that is only logged, or for one that covers a second optimizer too:

    >>> norms = torch.stack([get_total_norm(first), get_total_norm(second)])             # doctest: +SKIP
    >>> total = torch.linalg.vector_norm(norms)                                          # doctest: +SKIP
    >>> torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, total)             # doctest: +SKIP

    Args, Returns, Raises, Collective, Cost: as `clip_grad_norm_`.
    """
    total = _total_norm(optimizer, norm_type, error_if_nonfinite, foreach, params)[1]
    optimizer.backward.gradients.show(optimizer.built.params)  # the caller may scale them, as above
    optimizer.backward.gradients.note_change(freely=True)
    return total


@torch.no_grad()
def _total_norm(
    zero: ZeroRedundancyOptimizer,
    norm_type: float,
    error_if_nonfinite: bool,
    foreach: bool | None,
    params: Iterable[torch.Tensor] | torch.Tensor | None,
    max_norm: float = math.inf,
) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
    """The parameters to clip, by their numbers, and the norm of their gradients."""
    if not isinstance(zero, ZeroRedundancyOptimizer):
        raise TypeError(
            f"clip over shards takes the ZeroRedundancyOptimizer, not {type(zero).__name__}: it knows which "
            "rank owns what. For an unsharded model use torch.nn.utils.clip_grad_norm_."
        )
    # Ranks that have left a Join loop do not call this function. Those in the loop have all gradients.
    alone = zero.joined is not None
    facts: Sequence[str] | Exception
    pieces = _pieces(zero)
    norms = torch.empty(0, device="cpu")
    try:
        norm_type = float(norm_type)
        chosen = _chosen(zero, params)
        facts = [
            f"max_norm={float(max_norm)}, norm_type={norm_type}, error_if_nonfinite={error_if_nonfinite}",
            "all parameters" if params is None else f"parameters {list(chosen)}",
        ]
        _check_can_be_clipped(zero, chosen)
        counted = pieces if alone else zero.partition.slices_of_rank[zero.rank]
        norms = _norms_of_slices(zero, counted, chosen, norm_type, foreach)
    except Exception as error:
        if alone:
            raise
        facts = error
    of_pieces = zip(pieces, norms.tolist() if alone else _shared(zero, norms, facts), strict=True)
    present = {piece: norm for piece, norm in of_pieces if norm != ABSENT}
    norm_of_param = _norms_of_params(zero, present, norm_type)
    if not norm_of_param:
        return chosen, torch.tensor(0.0)
    params = [chosen[number] for number in norm_of_param]
    together = _in_torchs_order(params, [*norm_of_param.values()])
    if error_if_nonfinite and not bool(torch.linalg.vector_norm(together, norm_type).isfinite()):
        raise RuntimeError(_nonfinite_error(zero, norm_of_param, norm_type))
    # By the kernel that torch's function would use, without waiting until the accelerator can take the norms.
    return chosen, torch.linalg.vector_norm(together.to(params[0].device, non_blocking=True), norm_type)


def _chosen(
    zero: ZeroRedundancyOptimizer, params: Iterable[torch.Tensor] | torch.Tensor | None
) -> dict[int, torch.Tensor]:
    """These parameters by their numbers, in registration order."""
    all_params = dict(enumerate(zero.built.params))
    if params is None:
        return all_params
    known = set(all_params.values())
    wanted = [params] if isinstance(params, torch.Tensor) else list(params)
    for param in wanted:
        if not (isinstance(param, torch.Tensor) and param in known):
            shape = f" of shape {tuple(param.shape)}" if isinstance(param, torch.Tensor) else ""
            raise ValueError(
                f"rank {zero.rank}: `params` holds a {type(param).__name__}{shape} that is no parameter of "
                "this optimizer. Pass some of those that it was constructed with."
            )
    chosen = set(wanted)
    return {number: param for number, param in all_params.items() if param in chosen}


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
    pieces: Sequence[Slice],
    chosen: Mapping[int, torch.Tensor],
    norm_type: float,
    foreach: bool | None,
) -> torch.Tensor:
    """The norm of each slice's gradient, or ABSENT: (pieces,), float64, where control messages are made."""
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
    """The norms of all `_pieces`, from those of each rank's. If `facts` differ, all ranks raise as `agree`.

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


def _norms_of_params(
    zero: ZeroRedundancyOptimizer, norms: Mapping[Slice, float], norm_type: float
) -> dict[int, float]:
    """The norm of each parameter that has a gradient on its owners, from the norms of its slices."""
    of_param = {}
    for number, parts in itertools.groupby(sorted(norms), key=lambda piece: piece.param):
        of_parts = [norms[piece] for piece in parts]
        if len(zero.partition.pieces_of_param[number]) > 1:
            together = torch.tensor(of_parts, dtype=torch.float64, device="cpu")
            of_parts = [torch.linalg.vector_norm(together, norm_type).item()]
        of_param[number] = of_parts[0]
    return of_param


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


def _pieces(zero: ZeroRedundancyOptimizer) -> list[Slice]:
    """Every slice, rank by rank: in the same order on all of them."""
    return [piece for owned in zero.partition.slices_of_rank for piece in owned]


def _nonfinite_error(
    zero: ZeroRedundancyOptimizer, norm_of_param: Mapping[int, float], norm_type: float
) -> str:
    culprits = [number for number, norm in norm_of_param.items() if not math.isfinite(norm)]
    where = "though that of each parameter is finite"
    if culprits:
        owners = " and ".join(str(owner) for _, owner in zero.partition.pieces_of_param[culprits[0]])
        where = (
            f"as that of parameter {zero.built.name(culprits[0])}, owned by rank {owners}, is "
            f"{norm_of_param[culprits[0]]} (one of {len(culprits)} such parameters)"
        )
    return (
        f"rank {zero.rank}: The total norm of order {norm_type} for gradients from `parameters` is "
        f"non-finite, {where}, so it cannot be clipped. All ranks raise this and no gradient was changed: "
        "to skip the step, call zero_grad() on all of them. To disable this error and scale the gradients by "
        "the non-finite norm anyway, set `error_if_nonfinite=False`."
    )
