"""The norms of gradients that one rank computes: of the slices that it owns, by the kernels of torch.

The norm of all gradients is the norm of their norms. Whole parameters have the norm that torch computes for
them, to the last bit; the norm of a slice is kept in more bits, as that of its parameter is to be rounded
only once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch

# torch's own choice of kernels and order, which decide the last bits of a norm (tests/test_clip.py).
from torch.utils._foreach_utils import (
    _device_has_foreach_support,
    _group_tensors_by_device_and_dtype,
    _has_foreach_support,
)

from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.plan.partition import Slice
from zero_ref.shard.groups import dtype_name
from zero_ref.shard.owned import OwnedSlice
from zero_ref.shard.stepper import GradientSource

ABSENT = -1.0
"""In place of the norm of a slice without a gradient: a norm is never negative."""

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


def norms_of_slices(
    zero: ZeroRedundancyOptimizer,
    chosen: Mapping[int, torch.Tensor],
    norm_type: float,
    foreach: bool | None,
    alone: bool,
) -> torch.Tensor:
    """The norm of the gradient of each slice to count, or ABSENT: (slices,), float64.

    It lies where control messages are made.
    """
    pieces, control = [piece for piece, _ in counted(zero, alone)], zero.collectives.control_device
    gradients = _gradients_of(zero, chosen, pieces)
    whole = {piece: grad for piece, grad in gradients.items() if piece.numel == chosen[piece.param].numel()}
    norms = _norms(whole, norm_type, foreach)
    for piece in gradients.keys() - whole.keys():
        part = gradients[piece]
        # Not in 16 bits: the norm of the whole parameter is to be rounded only once.
        dtype = torch.float32 if part.dtype in (torch.float16, torch.bfloat16) else None
        norms[piece] = torch.linalg.vector_norm(part, norm_type, dtype=dtype).double()
    device = next((norm.device for norm in norms.values()), control)
    absent = torch.full((), ABSENT, dtype=torch.float64, device=device)
    # Put together on their device, so that one copy brings all of them to another.
    return torch.stack([absent, *(norms.get(piece, absent).to(device) for piece in pieces)])[1:].to(control)


def _gradients_of(
    zero: ZeroRedundancyOptimizer, chosen: Mapping[int, torch.Tensor], pieces: Iterable[Slice]
) -> dict[Slice, torch.Tensor]:
    """The gradients of those slices that have one and belong to a chosen parameter."""
    source = GradientSource(by_slice=zero.backward.gradients.parts)
    gradients = {}
    for piece in pieces:
        param = chosen.get(piece.param)
        grad = None if param is None else source.of_slice(OwnedSlice(piece, param, param))
        if grad is not None:
            gradients[piece] = grad
    return gradients


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


def counted(zero: ZeroRedundancyOptimizer, alone: bool) -> list[tuple[Slice, int]]:
    """The slices whose norms this rank computes, with their owners: its own, or if it is `alone` all."""
    of_ranks = enumerate(zero.partition.slices_of_rank)
    return [(piece, rank) for rank, owned in of_ranks if alone or rank == zero.rank for piece in owned]


def present(
    counted: Sequence[tuple[Slice, int]], norms: Sequence[float], chosen: Mapping[int, torch.Tensor]
) -> list[SliceNorm]:
    """The slices that have a gradient."""
    return [
        SliceNorm(*piece, owner, dtype_name(chosen[piece.param].dtype), norm)
        for (piece, owner), norm in zip(counted, norms, strict=True)
        if norm != ABSENT
    ]


def of_params(slices: Iterable[SliceNorm], norm_type: float) -> Iterator[tuple[int, list[int], str, float]]:
    """By parameter its number, its owners, its dtype, and the norm of the norms of its slices."""
    for number, of_param in itertools.groupby(sorted(slices), key=itemgetter(0)):
        parts = list(of_param)
        norm = parts[0].norm
        if len(parts) > 1:
            together = torch.tensor([part.norm for part in parts], dtype=torch.float64, device="cpu")
            norm = torch.linalg.vector_norm(together, norm_type).item()
        yield number, [part.owner for part in parts], parts[0].dtype, norm


def in_torchs_order(params: Sequence[torch.Tensor], norms: Sequence[float]) -> torch.Tensor:
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
