"""The exchange of norms: every rank gets the norms of all parameters from those that each rank has computed.

All ranks of one optimizer know the same slices. So one all-reduce gives every rank the norms of all slices,
to which only the owner of a slice adds anything but zero. If optimizers have different ranks, no rank knows
all slices, and ranks send each norm together with its slice.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterable, Mapping, Sequence

import torch

from zero_ref.clip.norms import (
    Chosen,
    ParameterNorm,
    SliceNorm,
    norms_of_params,
    slices_to_count,
    slices_with_gradient,
)
from zero_ref.comm.agreement import Agreement
from zero_ref.comm.collectives import Collectives
from zero_ref.comm.devices import CPU
from zero_ref.comm.objects import gather_texts
from zero_ref.comm.process_group import global_ranks
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer

FAILED = -1.0
"""Stands for the digest of a rank that has failed; digests are never negative."""


def share_norms(
    zero: ZeroRedundancyOptimizer, own: torch.Tensor, facts: Sequence[str] | Exception
) -> list[float]:
    """Give every rank the norms of all slices. If `facts` differ, all ranks raise as `Agreement.agree`.

    Args:
        own: (slices of this rank,), float64.
    Collective: all ranks of the group.
    Cost: one all-reduce of 8 bytes for each slice and each rank.
    """
    # One vector carries all: the norms of rank 0's slices, those of rank 1's, ..., then a digest of the facts
    # of each rank. Every rank fills in its own, and the sum over ranks fills in the rest.
    comm = zero.collectives
    counts = [len(owned) for owned in zero.partition.slices_of_rank]
    before, count = sum(counts[: comm.rank]), sum(counts)
    vector = torch.zeros(count + comm.world_size, dtype=torch.float64, device=comm.control_device)
    vector[before : before + len(own)] = own
    if isinstance(facts, Exception):
        vector[count + comm.rank] = FAILED
    else:  # 48 bits of a digest, which a float64 holds exactly
        digest = hashlib.sha256("\n".join(facts).encode()).digest()
        vector[count + comm.rank] = float(int.from_bytes(digest[:6]))
    comm.all_reduce(vector).wait()
    sums = vector.tolist()
    digests = set(sums[count:])
    if FAILED in digests or len(digests) > 1:
        zero.accord.agree("clip the gradients", facts)  # raises, and says what differs
    return sums[:count]


def norms_of_one(
    zero: ZeroRedundancyOptimizer,
    chosen: Mapping[int, torch.Tensor],
    norms: Sequence[float],
    norm_type: float,
) -> list[ParameterNorm]:
    """The norms of an optimizer's parameters, from the norms of all slices."""
    slices = slices_with_gradient(slices_to_count(zero, alone=True), norms, chosen)
    return [
        ParameterNorm(zero.built.name(number), owners, chosen[number], norm)
        for number, owners, _, norm in norms_of_params(slices, norm_type)
    ]


NormReport = tuple[list[int], str, list[SliceNorm]]
"""A rank's message about one optimizer: the positions of the optimizer's ranks in the group of all ranks, the
optimizer and its parameters in words, and the norms of the slices that the rank owns."""


def norms_of_several(
    comm: Collectives,
    chosen: Chosen,
    norms: Sequence[torch.Tensor],
    facts: list[str] | Exception,
    norm_type: float,
    alone: bool,
) -> list[ParameterNorm]:
    """The norms of the parameters of several optimizers, for each optimizer those of all its groups of ranks.

    Args:
        chosen: for each optimizer the parameters to count.
        norms: for each optimizer the norms that this rank has computed.
        alone: this rank has all gradients and computes all norms, without communication.
    Raises: as `Agreement.agree`, and ValueError on all ranks if ranks of one group were given different
        optimizers.
    Collective: all ranks of `comm`.
    Cost: three all-gathers, of 32 bytes, 8 bytes and the norms.
    """
    # 1. All ranks have computed their norms.
    if not alone:
        Agreement(comm).agree("clip the gradients", facts)

    # 2. Each rank reports the norms of its slices to all ranks.
    mine = _reports(comm, chosen, norms, alone)
    of_rank = {comm.rank: mine}
    if not alone:
        of_rank = dict(enumerate(map(json.loads, gather_texts(comm, json.dumps(mine)))))

    # 3. Put the slices of each parameter together. Each group of ranks has parameters of its own.
    device = next((param.device for of_zero in chosen.values() for param in of_zero.values()), CPU)
    found = []
    for index, zero in enumerate(chosen):
        reports = {rank: of_each[index] for rank, of_each in of_rank.items()}
        groups = _norms_of_groups(reports)
        if norm_type:  # a norm of order 0 is a count, which may be equal by chance
            _warn_of_copies(reports[comm.rank][1], groups.values())
        for members, slices in groups.items():
            for number, owners, dtype, norm in norms_of_params(slices, norm_type):
                name = zero.built.name(number) if comm.rank in members else f"{number} of ranks {[*members]}"
                like = torch.empty(0, dtype=getattr(torch, dtype), device=device)
                found.append(ParameterNorm(name, owners, like, norm))
    return found


def _reports(
    comm: Collectives, chosen: Chosen, norms: Sequence[torch.Tensor], alone: bool
) -> list[NormReport]:
    """This rank's report on each optimizer, with ranks as positions in `comm`."""
    place_of_rank = {rank: place for place, rank in enumerate(global_ranks(comm))}
    reports: list[NormReport] = []
    for (zero, of_zero), of_slices in zip(chosen.items(), norms, strict=True):
        group = [place_of_rank[rank] for rank in global_ranks(zero.collectives)]
        slices = slices_with_gradient(slices_to_count(zero, alone), of_slices.tolist(), of_zero)
        slices = [one._replace(owner=group[one.owner]) for one in slices]
        reports.append(([comm.rank] if alone else group, describe(zero, of_zero), slices))
    return reports


def _norms_of_groups(reports: Mapping[int, NormReport]) -> dict[tuple[int, ...], list[SliceNorm]]:
    """The norms of slices by group of ranks, from the reports of all ranks on the same optimizer.

    Raises:
        ValueError: ranks of one group report other parameters or ranks.
    """
    groups: dict[tuple[int, ...], list[SliceNorm]] = {}
    for rank, (group, what, slices) in reports.items():
        groups.setdefault(tuple(group), []).extend(SliceNorm(*one) for one in slices)
        for member in group:
            their_group, theirs, _ = reports[member]
            if (their_group, theirs) != (group, what):
                raise ValueError(
                    f"ranks disagree, so none can clip the gradients: rank {rank} has [{what}] over the "
                    f"ranks {group} where rank {member} has [{theirs}] over {their_group}. Pass the same "
                    "optimizers, in the same order, on every rank."
                )
    return groups


def _warn_of_copies(what: str, groups: Iterable[Sequence[SliceNorm]]) -> None:
    """Warn if groups of ranks have gradients of equal norms, as only copies of one parameter have."""
    norms = [tuple(sorted((*one[:3], one.norm) for one in slices)) for slices in groups]
    used = [of_group for of_group in norms if any(norm for *_, norm in of_group)]
    if len(set(used)) < len(used):
        warnings.warn(
            f"groups of ranks have the same norms of {what}, and each group counts: if these parameters "
            "are copies (hybrid sharding), the norm is too large. Clip optimizers of one group together.",
            stacklevel=6,
        )


def describe(zero: ZeroRedundancyOptimizer, chosen: Mapping[int, torch.Tensor]) -> str:
    """Name an optimizer and the parameters to clip, in words that ranks compare."""
    some = "all parameters" if len(chosen) == len(zero.built.params) else f"parameters {list(chosen)}"
    return f"{zero.accord.what}, {some}"
