"""The norms of all parameters on every rank, from those that each rank has computed.

One optimizer's ranks all know the same slices, so one all-reduce brings every rank the norms of all slices:
all ranks but a slice's owner add zero. Where optimizers have different ranks, no rank knows all slices, and
ranks send each norm together with its slice.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterable, Mapping, Sequence

import torch

from zero_ref.clip.norms import Chosen, ParameterNorm, SliceNorm, counted, of_params, present
from zero_ref.comm.agreement import agree
from zero_ref.comm.collectives import Collectives
from zero_ref.comm.devices import CPU
from zero_ref.comm.objects import gather_texts
from zero_ref.comm.process_group import global_ranks
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer

FAILED = -1.0
"""In place of a digest, which is never negative."""


def shared(zero: ZeroRedundancyOptimizer, own: torch.Tensor, facts: Sequence[str] | Exception) -> list[float]:
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


def norms_of_one(
    zero: ZeroRedundancyOptimizer,
    chosen: Mapping[int, torch.Tensor],
    norms: Sequence[float],
    norm_type: float,
) -> list[ParameterNorm]:
    """The norms of an optimizer's parameters, from those of all slices."""
    slices = present(counted(zero, alone=True), norms, chosen)
    return [
        ParameterNorm(zero.built.name(number), owners, chosen[number], norm)
        for number, owners, _, norm in of_params(slices, norm_type)
    ]


Table = tuple[list[int], str, list[SliceNorm]]
"""What a rank tells of one optimizer: the places of its ranks among all, the optimizer and the parameters in
words, and the norms of the slices that the rank owns."""


def norms_of_several(
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

    # Each rank tells of its slices; who takes part alone (inside Join) knows all of them.
    place_of_rank = {rank: place for place, rank in enumerate(global_ranks(comm))}
    mine: list[Table] = []
    for (zero, of_zero), of_slices in zip(chosen.items(), norms, strict=True):
        group = [place_of_rank[rank] for rank in global_ranks(zero.collectives)]
        slices = present(counted(zero, alone), of_slices.tolist(), of_zero)
        slices = [one._replace(owner=group[one.owner]) for one in slices]
        mine.append(([comm.rank] if alone else group, told(zero, of_zero), slices))
    of_rank = {comm.rank: mine}
    if not alone:
        of_rank = dict(enumerate(map(json.loads, gather_texts(comm, json.dumps(mine)))))

    # Each group of ranks has parameters of its own.
    device = next((param.device for of_zero in chosen.values() for param in of_zero.values()), CPU)
    found = []
    for index, zero in enumerate(chosen):
        tables = {rank: of_each[index] for rank, of_each in of_rank.items()}
        groups = _of_groups(tables)
        if norm_type:  # that of order 0 is a count
            _warn_of_copies(tables[comm.rank][1], groups.values())
        for members, slices in groups.items():
            for number, owners, dtype, norm in of_params(slices, norm_type):
                name = zero.built.name(number) if comm.rank in members else f"{number} of ranks {[*members]}"
                like = torch.empty(0, dtype=getattr(torch, dtype), device=device)
                found.append(ParameterNorm(name, owners, like, norm))
    return found


def _of_groups(tables: Mapping[int, Table]) -> dict[tuple[int, ...], list[SliceNorm]]:
    """The norms of each group of ranks, from what each rank tells of the same optimizer.

    Raises:
        ValueError: ranks of one group tell of other parameters or ranks.
    """
    groups: dict[tuple[int, ...], list[SliceNorm]] = {}
    for rank, (group, what, slices) in tables.items():
        groups.setdefault(tuple(group), []).extend(SliceNorm(*one) for one in slices)
        for member in group:
            their_group, theirs, _ = tables[member]
            if (their_group, theirs) != (group, what):
                raise ValueError(
                    f"ranks disagree, so none can clip the gradients: rank {rank} has [{what}] over the "
                    f"ranks {group} where rank {member} has [{theirs}] over {their_group}. Pass the same "
                    "optimizers, in the same order, on every rank."
                )
    return groups


def _warn_of_copies(what: str, groups: Iterable[Sequence[SliceNorm]]) -> None:
    """Warn if groups of ranks have gradients of the same norms, which those of other parameters have not."""
    norms = [tuple(sorted((*one[:3], one.norm) for one in slices)) for slices in groups]
    used = [of_group for of_group in norms if any(norm for *_, norm in of_group)]
    if len(set(used)) < len(used):
        warnings.warn(
            f"groups of ranks have the same norms of {what}, and each group counts: if these parameters "
            "are copies (hybrid sharding), the norm is too large. Clip optimizers of one group together.",
            stacklevel=6,
        )


def told(zero: ZeroRedundancyOptimizer, chosen: Mapping[int, torch.Tensor]) -> str:
    """An optimizer and the numbers of the parameters to clip, for ranks to compare."""
    some = "all parameters" if len(chosen) == len(zero.built.params) else f"parameters {list(chosen)}"
    return f"{zero.accord.what}, {some}"
