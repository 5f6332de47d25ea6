"""Digests of tensors' bits: to compare values between ranks, or with those of an earlier time.

`stairs/owners.py` compares no values.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from zero_ref.shard.buckets import flat_view

WORDS = 16_381
"""The number of different weights. A prime, so that no two rows of a matrix get the same weights."""


@torch.no_grad()
def digests(params: Iterable[torch.Tensor]) -> list[str]:
    """Compute a digest of each parameter's bits, in hexadecimal; empty if its values cannot be read.

    The digest is a sum of the bits, read as 64-bit integers, each times a weight that depends on its offset.
    Integer sums are exact in any order. NaNs compare by their bits.

    >>> digests([torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0]), torch.tensor([1.0, 2.0])])
    ['400000003f800000', '3f80000040000000', '400000003f800000']

    Cost: one pass over the parameters' memory, on their devices, and one synchronization with each device.
    """
    weights: dict[torch.device, torch.Tensor] = {}
    sums: dict[torch.device, list[torch.Tensor]] = {}
    places: list[tuple[torch.device, int] | None] = []  # of each parameter's sum in `sums`
    # 1. Launch all sums. They stay on the devices, so that nothing waits here.
    for param in params:
        # The values of a "meta" tensor, or of a subclass with its own dispatch, cannot be read this way.
        if param.is_meta or type(param).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            places.append(None)
            continue
        device = param.device
        if device not in weights:
            weights[device] = 2 * torch.arange(WORDS, device=device) + 1
            sums[device] = []
        places.append((device, len(sums[device])))
        sums[device].append(_sum_of_bits(flat_view(param.detach()), weights[device]))
    # 2. Copy the sums of each device to the CPU together, which waits for the device once.
    numbers = {device: torch.stack(of_device).tolist() for device, of_device in sums.items()}
    return [f"{numbers[place[0]][place[1]] % 2**64:016x}" if place else "" for place in places]


def _sum_of_bits(flat: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Compute the weighted sum of a tensor's words modulo 2**64, shape ()."""
    # A view as int64 needs an aligned tensor. A clone is one, and has the same sum as an aligned tensor.
    if flat.storage_offset() * flat.itemsize % 8:
        flat = flat.clone()
    split = flat.nbytes // 8 * 8
    whole = split == flat.nbytes  # so for most parameters: spare two views for each of thousands
    words = flat.view(torch.int64) if whole else flat.view(torch.uint8)[:split].view(torch.int64)
    if flat.itemsize >= 8:
        # Changes of highest bits alone (signs) could add up to a multiple of 2**64, so mix them into others.
        words = words ^ (words >> 32)
    # Fold the words into one row of WORDS, then weigh the row: far fewer products than words.
    in_rows = words.numel() // WORDS * WORDS
    total = _weighted(words[in_rows:] if in_rows else words, weights)
    if in_rows:
        total = total + _weighted(words[:in_rows].view(-1, WORDS).sum(0), weights)
    return total if whole else total + _weighted(flat.view(torch.uint8)[split:].long(), weights)


def _weighted(words: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    weights = weights[: words.numel()]
    # A GPU has no dot product of integers.
    return torch.dot(words, weights) if words.device.type == "cpu" else (words * weights).sum()
