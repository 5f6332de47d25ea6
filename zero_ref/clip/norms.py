"""The norms of gradients that one rank computes, with torch's kernels, for the slices that it owns.

The norm of all gradients is the norm of their norms. A whole parameter has the norm that torch computes for
it, to the last bit. The norm of a slice is kept in more bits, so that the norm of its parameter is rounded
only once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch

# torch's own choice of kernels and order, which decide the last bits of a norm (tests/clip/test_clip.py).
from torch.utils._foreach_utils import (
    _device_has_foreach_support,
    _group_tensors_by_device_and_dtype,
    _has_foreach_support,
)

from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.plan.partition import Slice
from zero_ref.shard.groups import dtype_name
from zero_ref.shard.owned import own_slices
from zero_ref.shard.stepper import GradientSource

ABSENT = -1.0
"""Stands for the norm of a slice without a gradient; norms are never negative."""

Chosen = dict[ZeroRedundancyOptimizer, dict[int, torch.Tensor]]
"""The parameters to clip, by optimizer and number."""


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


def norms_of_slices(
    zero: ZeroRedundancyOptimizer,
    chosen: Mapping[int, torch.Tensor],
    norm_type: float,
    foreach: bool | None,
    alone: bool,
) -> torch.Tensor:
    """The norm of the gradient of each slice to count, or ABSENT: (slices,), float64, on the control device.

    Args:
        chosen: the parameters to clip; slices of others count as ABSENT.
        alone: count the slices of all ranks, not only those of this rank.
    """
    pieces, control = [piece for piece, _ in slices_to_count(zero, alone)], zero.collectives.control_device
    # 1. Whole parameters, as torch does it.
    gradients = _gradients_of(zero, chosen, pieces, alone)
    whole = {piece: grad for piece, grad in gradients.items() if piece.numel == chosen[piece.param].numel()}
    norms = _norms_of_whole(whole, norm_type, foreach)
    # 2. Parts of parameters.
    for piece in gradients.keys() - whole.keys():
        part = gradients[piece]
        # Not in 16 bits, so that the norm of the whole parameter is rounded only once.
        dtype = torch.float32 if part.dtype in (torch.float16, torch.bfloat16) else None
        norms[piece] = torch.linalg.vector_norm(part, norm_type, dtype=dtype).double()
    device = next((norm.device for norm in norms.values()), control)
    absent = torch.full((), ABSENT, dtype=torch.float64, device=device)
    # 3. Stack the norms on their own device, so that one copy takes all of them to the control device.
    return torch.stack([absent, *(norms.get(piece, absent).to(device) for piece in pieces)])[1:].to(control)


def _gradients_of(
    zero: ZeroRedundancyOptimizer, chosen: Mapping[int, torch.Tensor], pieces: Iterable[Slice], alone: bool
) -> dict[Slice, torch.Tensor]:
    """The gradients of the slices of chosen parameters; slices without a gradient are left out."""
    source = GradientSource(in_slices=zero.backward.gradients.in_slices)
    # If this rank is `alone`, it has whole gradients, and computes the norms of other ranks' slices, too.
    slices = own_slices(pieces, zero.built.params) if alone else zero.shard.owned
    gradients = {}
    for own in slices:
        grad = source.of_slice(own) if own.piece.param in chosen else None
        if grad is not None:
            gradients[own.piece] = grad
    return gradients


def _norms_of_whole(
    whole: Mapping[Slice, torch.Tensor], norm_type: float, foreach: bool | None
) -> dict[Slice, torch.Tensor]:
    """The norm of each gradient, rounded to its dtype, by the kernels that torch's function would use."""
    norms: dict[Slice, torch.Tensor] = {}
    # Grouped and computed as in torch.nn.utils.get_total_norm.
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


def slices_to_count(zero: ZeroRedundancyOptimizer, alone: bool) -> list[tuple[Slice, int]]:
    """(slice, owner) of the slices whose norms this rank computes: its own, or all if it is `alone`."""
    of_ranks = enumerate(zero.partition.slices_of_rank)
    return [(piece, rank) for rank, owned in of_ranks if alone or rank == zero.rank for piece in owned]


def slices_with_gradient(
    slices: Sequence[tuple[Slice, int]], norms: Sequence[float], chosen: Mapping[int, torch.Tensor]
) -> list[SliceNorm]:
    """Join slices, owners and norms; leave out slices without a gradient."""
    return [
        SliceNorm(*piece, owner, dtype_name(chosen[piece.param].dtype), norm)
        for (piece, owner), norm in zip(slices, norms, strict=True)
        if norm != ABSENT
    ]


def norms_of_params(
    slices: Iterable[SliceNorm], norm_type: float
) -> Iterator[tuple[int, list[int], str, float]]:
    """(number, owners, dtype, norm) of each parameter; its norm is the norm of the norms of its slices."""
    for number, of_param in itertools.groupby(sorted(slices), key=itemgetter(0)):
        parts = list(of_param)
        norm = parts[0].norm  # of a whole parameter this is torch's norm, to the last bit
        if len(parts) > 1:
            together = torch.tensor([part.norm for part in parts], dtype=torch.float64, device="cpu")
            norm = torch.linalg.vector_norm(together, norm_type).item()
        yield number, [part.owner for part in parts], parts[0].dtype, norm


def norms_in_torchs_order(params: Sequence[torch.Tensor], norms: Sequence[float]) -> torch.Tensor:
    """The norms in the order and dtype in which torch takes the norm of them: (params,), on the CPU."""
    # torch computes the norms of each device and dtype together, in the dtype of the gradients.
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
