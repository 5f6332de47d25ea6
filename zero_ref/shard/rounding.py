"""Stochastic rounding, by which 16-bit weights keep small updates without master copies.

bfloat16 has 8 significant bits: rounding to the nearest loses an update that is smaller than 1/512 of a
weight. `master_dtype` of `ZeroRedundancyOptimizer` keeps such updates in 32-bit copies. Rounded
stochastically, the weights have them too, on average: of the two neighbours of a value, the upper one is
taken with a probability equal to the distance from the lower one, divided by the gap.

The random number is a hash of the value and its offset in the parameter. So a checkpoint needs no state of a
generator, and the result does not depend on the partition or the number of ranks.
"""

from __future__ import annotations

import hashlib

import torch

from zero_ref.shard.buckets import flat_like, flat_view

BLOCK_NUMEL = 2**16
"""Elements that are rounded at a time on a CPU, so that the hash values stay in the cache."""

BLOCK_NUMEL_ON_GPU = 2**24
"""Elements that are rounded at a time on a GPU, so that temporary tensors stay small beside a model."""

_GOLDEN = 0x9E3779B1 - 2**32
"""An odd number near 2**32 over the golden ratio: neighbouring offsets get hash values far apart."""


@torch.no_grad()
def round_stochastically(values: torch.Tensor, into: torch.Tensor, *, seed: int, first: int = 0) -> None:
    """Round each value to one of its two neighbours in the smaller dtype, the nearer one more often.

    A value that the dtype can represent is exact. Finite values beyond the dtype's largest number become that
    number; NaN and infinities stay.

    >>> weights = torch.full((10000,), 1 + 2**-9)             # a quarter of the way from 1 to 1 + 2**-7
    >>> rounded = torch.empty(10000, dtype=torch.bfloat16)
    >>> round_stochastically(weights, rounded, seed=0)
    >>> sorted(set(rounded.tolist())), 0.73 < (rounded == 1).float().mean().item() < 0.77
    ([1.0, 1.0078125], True)

    Args:
        values: float32, any shape; dense in memory.
        into: a 16-bit dtype, in the shape of `values`, with any strides.
        seed: the seed of the hash.
        first: the offset of the first element in its parameter, in memory order.
    Source: stochastic rounding for 16-bit weights: Gupta et al., arXiv:1502.02551; Zamirai et al.,
        arXiv:2010.06192. The mixing function is Chris Wellons's lowbias32.
    """
    flat = flat_view(values)
    rounded = torch.empty(flat.shape, dtype=into.dtype, device=flat.device)
    largest = BLOCK_NUMEL if flat.device.type == "cpu" else BLOCK_NUMEL_ON_GPU
    start = 0
    while start < flat.numel():
        # Blocks end at multiples of their size in the parameter, so that no block crosses offset 2**31.
        stop = min(flat.numel(), start + largest - (first + start) % largest)
        rounded[start:stop] = _rounded(flat[start:stop], into.dtype, seed, first + start)
        start = stop
    into.copy_(rounded.as_strided(values.size(), values.stride()))


@torch.no_grad()
def add_stochastically(weights: torch.Tensor, update: torch.Tensor, *, seed: int, first: int = 0) -> None:
    """Add an update to 16-bit weights, and round each sum to one of its two neighbours at random.

    This needs no master copy, and so 4 bytes less for each parameter: the weights themselves have small
    updates, on average. The sums are in 32 bits, for a block of elements at a time.
    An optimizer class that steps in this way can be sharded like any other: chapter 12 has one.

    >>> weights = torch.ones(10000, dtype=torch.bfloat16)
    >>> for step in range(100):                     # an update of 0.0001 is far below half the gap, 0.004
    ...     add_stochastically(weights, torch.full((10000,), 1e-4), seed=step)
    >>> round(weights.float().mean().item(), 3)
    1.01

    Args:
        weights: a 16-bit dtype, any shape; dense in memory.
        update: float32, in the shape of `weights`.
        seed: another one in every step, such as the step's number. The random number follows from the sum,
            its offset and the seed. A weight that did not move meets the same sum again under the same
            update, so with the same seed it would never move.
        first: the offset of the first element in its parameter, in memory order.
    Source: Zamirai et al., arXiv:2010.06192, for training without master copies. AdamW of torchao does so
        with `bf16_stochastic_round=True`.
    """
    flat, added = flat_view(weights), flat_like(update, weights)
    largest = BLOCK_NUMEL if flat.device.type == "cpu" else BLOCK_NUMEL_ON_GPU
    for start in range(0, flat.numel(), largest):
        block = flat[start : start + largest]
        sums = block.float().add_(added[start : start + largest])
        round_stochastically(sums, block, seed=seed, first=first + start)


def _rounded(values: torch.Tensor, dtype: torch.dtype, seed: int, first: int) -> torch.Tensor:
    # 1. Find the neighbour towards zero. Floats are sign and magnitude, so adding 1 to the bits is one step
    # away from zero, and subtracting 1 is one step towards zero.
    nearest = values.to(dtype)
    away = nearest.abs().float() > values.abs()
    below = nearest.view(torch.int16) - away.to(torch.int16)
    # 2. Choose it or the next one away from zero.
    low, high = below.view(dtype).float(), (below + 1).view(dtype).float()
    up = (values - low) / (high - low) > _chance(values, seed, first)
    # NaN compares as False: values that are not finite, or have no finite neighbour above, stay.
    return torch.where(up, below + 1, below).view(dtype)


def _chance(values: torch.Tensor, seed: int, first: int) -> torch.Tensor:
    """Compute a number in [0, 1) for each value: a hash of the value's bits and its offset."""
    # The upper bits of the offset are in the key, since a word has only 31 bits for the offset.
    key = int.from_bytes(hashlib.sha256(f"{seed} {first >> 31}".encode()).digest()[:4], signed=True)
    # lowbias32. int32 wraps around, and >> shifts in copies of the sign bit, which the masks remove.
    word = torch.arange(values.numel(), dtype=torch.int32, device=values.device)
    word = word.add_(first & 0x7FFFFFFF).mul_(_GOLDEN).add_(values.view(torch.int32)).bitwise_xor_(key)
    word = (word ^ ((word >> 16) & 0xFFFF)).mul_(0x7FEB352D)
    word = (word ^ ((word >> 15) & 0x1FFFF)).mul_(0x846CA68B - 2**32)
    word = word ^ ((word >> 16) & 0xFFFF)
    # float32 has 24 significant bits: keep so many, and the number is exact and below 1.
    return ((word >> 8) & 0xFFFFFF).to(torch.float32).mul_(2**-24)
