"""Clipping by the global norm of gradients whose owners are different ranks.

With `stairs/owners.py` every rank has all gradients, and `torch.nn.utils.clip_grad_norm_` is right. Here only
the owner of a slice may have its gradient. The norm of all gradients is the norm of their norms. So each rank
computes the norms of the slices that it owns, 1/N of the work (`norms.py`), and one small all-reduce gives
every rank the norms of all slices (`among_ranks.py`). Then each rank does what torch's function does: it
takes the norm of the norms, and multiplies every gradient by one factor. With whole parameters the total is
equal to torch's on the unsharded model, bit for bit.

Several optimizers have one norm together. One of them may be over fewer ranks, such as an optimizer of
experts, if each group of ranks has other experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grads_with_norm_

from zero_ref.clip.among_ranks import describe, norms_of_one, norms_of_several, share_norms
from zero_ref.clip.norms import Chosen, ParameterNorm, norms_in_torchs_order, norms_of_slices
from zero_ref.comm.backend import as_collectives
from zero_ref.comm.collectives import Collectives
from zero_ref.comm.process_group import global_ranks
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer, listed

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

    Several optimizers have one norm together, and their gradients are scaled by one factor:
    `clip_grad_norm_([body, head], 1.0)`. If an optimizer is over fewer ranks than another, its groups of
    ranks count as different parameters. For example, if `dense` is over all ranks and `experts` over the
    ranks that share some experts, `clip_grad_norm_([dense, experts], 1.0)` clips by the norm of the dense
    parameters and of the experts of all groups. If groups have copies of the same parameters (hybrid
    sharding), give all optimizers the same group: otherwise each copy counts, and a warning says so.

    Args:
        optimizer: the optimizer, or a list of them.
        max_norm, norm_type, error_if_nonfinite, foreach: as torch's; `norm_type` may be "inf".
        params: some of the optimizer's parameters, in any order; only their gradients are counted and scaled.
            None is all. To count some and scale others, use `get_total_norm`, then
            `torch.nn.utils.clip_grads_with_norm_`.
        across: all ranks whose gradients count; None for the ranks of the optimizer with the most ranks. A
            wider group is needed if every optimizer is over a part of the ranks only, such as experts alone.
    Returns:
        The norm before clipping, shape (), the same on all ranks. It is torch's total over the parameters in
        registration order, in torch's dtype (to which the gradients' dtypes promote) and on torch's device
        (that of the first gradient); 0.0 if there is no gradient. If no parameter is split between ranks, all
        bits are equal. With several optimizers, torch's total is over the parameters of the first, then of
        the second, and so on, each time of all groups in the order of their ranks. For a model that lists
        them otherwise, torch adds the same norms in another order, and the last bit may differ. If parameters
        are split, the total is more exact, because shorter sums round less: float32 2-norms on a CPU are
        within 1e-6 of torch's for split parameters of a thousand elements, 1e-5 for a million and 4e-4 for
        ten million; in bfloat16, within a unit in the last place (2**-7).
    Raises:
        RuntimeError: the total is not finite and `error_if_nonfinite` (names the parameter; no gradient is
            changed); the update was already made in backward (`overlap_with_ddp`), or backward did not end; a
            gradient is sparse; another rank stopped, or makes other calls.
        ValueError: ranks pass different arguments or optimizers; `params` holds a tensor that no optimizer
            has; a parameter is in two optimizers; `across`, or the widest group, lacks ranks of an optimizer.
        TypeError, ValueError: as torch's, on arguments that are no numbers. If one rank raises, all raise.
    Collective: all ranks of the optimizer's group, or of `across`; inside `Join`, the ranks with data.
    Cost: one all-reduce of 8 bytes for each slice and each rank, and on an accelerator one wait, for the
        norms. With several optimizers, or with `across`, three all-gathers: of 32 bytes, of 8, and of a text
        of about 50 bytes for each slice that a rank owns. Inside `Join` nothing is sent, and each rank
        computes all norms.
    """
    chosen, total = _total_norm(optimizer, norm_type, error_if_nonfinite, foreach, params, across, max_norm)
    tensors: list[torch.Tensor] = []
    # Scale the gradients of parameters, and those that slices of parameters have.
    for zero, of_zero in chosen.items():
        tensors += of_zero.values()
        tensors += (own.leaf for own in zero.shard.parts if own.piece.param in of_zero)
    clip_grads_with_norm_(tensors, float(max_norm), total, foreach)
    # A step refuses gradients that were changed otherwise, so note that this change is right.
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
    """The norm of the gradients of all ranks; the gradients do not change. See `clip_grad_norm_`.

    Use it to log the norm, or to scale more gradients than those that are counted:

    >>> total = get_total_norm([body, head], params=model.body.parameters())             # doctest: +SKIP
    >>> torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, total)             # doctest: +SKIP

    `ShardedDataParallel` leaves gradients of parameters that are cut in slices, where torch's function does
    not find them. A step then refuses what was scaled, unless the wrapper was made with `may_change=True`.

    Args, Returns, Raises, Collective, Cost: as `clip_grad_norm_`.
    """
    chosen, total = _total_norm(optimizer, norm_type, error_if_nonfinite, foreach, params, across)
    for zero in chosen:
        # The caller may scale the gradients, if all of them are where torch's function finds them.
        if not (zero.built.cut and zero.backward.gradients.in_slices):
            zero.backward.gradients.note_change(freely=True)
    return total


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
    """Find the parameters to clip, and compute the norm of their gradients.

    Args, Raises, Collective, Cost: as `clip_grad_norm_`.
    """
    zeros = listed(
        optimizer, "clip over shards", " For an unsharded model use torch.nn.utils.clip_grad_norm_."
    )
    widest = max((zero.collectives for zero in zeros), key=lambda one: one.world_size)
    comm = widest if across is None else as_collectives(across)
    is_one = len(zeros) == 1 and comm is widest
    # Ranks that have left a Join loop do not call this function. Ranks in the loop have all gradients.
    alone = any(zero.joined is not None for zero in zeros)

    # 1. Each rank checks what it was given, and computes the norms of its slices.
    facts: list[str] | Exception
    chosen: Chosen = {}
    norms = [torch.empty(0, device="cpu")]
    try:
        norm_type = float(norm_type)
        chosen = _choose(zeros, params)
        facts = [
            f"max_norm={float(max_norm)}, norm_type={norm_type}, error_if_nonfinite={error_if_nonfinite}",
            describe(zeros[0], chosen[zeros[0]]) if is_one else f"{len(zeros)} optimizers",
        ]
        for zero, of_zero in chosen.items():
            _check_ranks(zero, comm, alone)
            _check_can_be_clipped(zero, of_zero)
        norms = [norms_of_slices(*of, norm_type, foreach, alone) for of in chosen.items()]
    except Exception as error:
        if alone:
            raise
        facts = error

    # 2. Ranks exchange the norms. If one rank failed, or was given other arguments, all raise.
    if is_one:
        of_all = norms[0].tolist() if alone else share_norms(zeros[0], norms[0], facts)
        found = norms_of_one(zeros[0], chosen[zeros[0]], of_all, norm_type)
    else:
        found = norms_of_several(comm, chosen, norms, facts, norm_type, alone)

    # 3. Each rank takes the norm of the norms.
    return chosen, _norm_of_norms(comm.rank, found, norm_type, error_if_nonfinite)


def _norm_of_norms(
    rank: int, found: Sequence[ParameterNorm], norm_type: float, error_if_nonfinite: bool
) -> torch.Tensor:
    """The norm of all gradients, by the kernel and on the device that torch's function uses.

    Raises:
        RuntimeError: the norm is not finite, and `error_if_nonfinite` is set.
    """
    if not found:
        return torch.tensor(0.0)
    together = norms_in_torchs_order([one.like for one in found], [one.norm for one in found])
    if error_if_nonfinite and not bool(torch.linalg.vector_norm(together, norm_type).isfinite()):
        raise RuntimeError(_nonfinite_error(rank, found, norm_type))
    # The host does not wait for the copy to an accelerator.
    together = together.to(found[0].like.device, non_blocking=True)
    return torch.linalg.vector_norm(together, norm_type)


def _choose(
    zeros: Sequence[ZeroRedundancyOptimizer], params: Iterable[torch.Tensor] | torch.Tensor | None
) -> Chosen:
    """The parameters to clip, for each optimizer by number; None is all parameters.

    Raises:
        ValueError: a parameter is in two optimizers, or in none.
    """
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
        if not isinstance(param, torch.Tensor) or param not in known:
            raise ValueError(_stranger_error(zeros[0].rank, param))
    some = set(wanted)
    return {zero: {n: param for n, param in of.items() if param in some} for zero, of in chosen.items()}


def _stranger_error(rank: int, param: object) -> str:
    shape = f" of shape {tuple(param.shape)}" if isinstance(param, torch.Tensor) else ""
    return (
        f"rank {rank}: `params` holds a {type(param).__name__}{shape} that is no parameter "
        "of this optimizer. Pass some of the parameters with which it was constructed."
    )


def _check_ranks(zero: ZeroRedundancyOptimizer, comm: Collectives, alone: bool) -> None:
    """Refuse an optimizer with ranks that `comm` lacks; inside Join also one over fewer ranks than `comm`."""
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
    """Refuse gradients of which this module cannot compute a norm.

    Raises:
        RuntimeError: says why.
    """
    gradients = zero.backward.gradients
    if gradients.why_no_clipping is not None:
        raise RuntimeError(f"rank {zero.rank}: {gradients.why_no_clipping}")
    if zero.joined and gradients.on_owners:
        raise RuntimeError(
            f"rank {zero.rank}: inside Join a rank that has run out of data takes no part in clipping, and "
            "with reduce_to_owners no other has the gradients that it owns. Use DDP without that hook."
        )
    gradients.check_as_left(zero.rank, zero.built)
    for number, param in chosen.items():  # also those of other owners, so that all ranks raise the same error
        if param.grad is not None and param.grad.layout != torch.strided:
            raise RuntimeError(
                f"rank {zero.rank}: parameter {zero.built.name(number)} has a sparse gradient, of "
                "which torch computes no norm. Construct its layer with sparse=False, or leave it out with "
                "`params`."
            )


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
