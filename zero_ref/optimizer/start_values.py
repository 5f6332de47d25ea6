"""The values from which ranks start, compared before the first update.

`minimal.py` takes for granted that all ranks start from the same values. A program may construct the
optimizer first and DistributedDataParallel, which sends rank 0's values to all, afterwards. So nothing is
compared when the optimizer is constructed, and everything before the first update. If values differ then, the
update still makes them equal, since all ranks receive what the owners have; but the gradients were averaged
over different models, and so all ranks warn.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable

import torch

from zero_ref.comm.collectives import Collectives, gather_bytes
from zero_ref.optimizer.buckets import broadcast_messages, flat_view, messages_by_parameter
from zero_ref.optimizer.built import Built
from zero_ref.plan.calls import CHECK

DIGEST_NBYTES = 8


def compare_start_values(comm: Collectives, built: Built, first: int = 0) -> None:
    """Warn on all ranks if values differ between ranks; those of frozen parameters become their owners'.

    Args:
        first: the number of the first parameter to compare.
    Warns:
        UserWarning: names the first parameter that differs, and what to do.
    Collective: all ranks of the group.
    Cost: one pass over the parameters' memory, and an all-gather of 32 bytes. If values differ, also one of 8
        bytes for each parameter, and the frozen parameters are broadcast.
    """
    if comm.world_size == 1:
        return
    mine = b"".join(int(one or "0", 16).to_bytes(DIGEST_NBYTES) for one in digests(built.params[first:]))
    if len({*map(bytes, gather_bytes(comm, hashlib.sha256(mine).digest(), CHECK))}) == 1:
        return
    of_ranks = [bytes(other) for other in gather_bytes(comm, mine, CHECK)]
    starts = range(0, len(mine), DIGEST_NBYTES)
    of_params = [[of_rank[start : start + DIGEST_NBYTES] for of_rank in of_ranks] for start in starts]
    differing = [number for number, values in enumerate(of_params) if len(set(values)) > 1]
    values = of_params[differing[0]]
    odd = next(rank for rank, value in enumerate(values) if value != values[0])
    warnings.warn(
        f"rank {comm.rank}: before its first update parameter {built.name(first + differing[0])} has other "
        f"values on rank {odd} than on rank 0 ({len(differing)} of {len(of_params)} parameters differ). Each "
        "parameter's owner sends its values to all ranks, so that from this update on all are equal; but "
        "these gradients are averages over different models. Start from the same values, in the same order: "
        "call torch.manual_seed with one number on all ranks before the model is made, or wrap the model in "
        "DistributedDataParallel, which sends rank 0's values to all. If only the order of parameters "
        "differs, list them in one that all processes share, as that of a set is not.",
        stacklevel=4,
    )
    # An update does not send parameters that are not trained.
    broadcast_messages(comm, messages_by_parameter(built.partition, built.params, frozen=True))


WORDS = 16_381
"""The number of different weights. A prime, so that no two rows of a matrix get the same weights."""


@torch.no_grad()
def digests(params: Iterable[torch.Tensor]) -> list[str]:
    """A digest of each parameter's bits, in hexadecimal; empty if its values cannot be read.

    The digest is a sum of the bits, read as 64-bit integers, each times a weight that depends on its offset.
    Integer sums are exact in any order. NaNs compare by their bits.

    >>> digests([torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0]), torch.tensor([1.0, 2.0])])
    ['400000003f800000', '3f80000040000000', '400000003f800000']

    Cost: one pass over the parameters' memory, on their devices, and one synchronization with each device.
    """
    weights: dict[torch.device, torch.Tensor] = {}
    sums: dict[torch.device, list[torch.Tensor]] = {}
    places: list[tuple[torch.device, int] | None] = []
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
    numbers = {device: torch.stack(of_device).tolist() for device, of_device in sums.items()}
    return [f"{numbers[place[0]][place[1]] % 2**64:016x}" if place else "" for place in places]


def _sum_of_bits(flat: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The weighted sum modulo 2**64, shape ()."""
    if flat.storage_offset() * flat.itemsize % 8:  # not aligned to int64, as it may be on another rank
        flat = flat.clone()
    split = flat.nbytes // 8 * 8
    whole = split == flat.nbytes  # most parameters are; skip the views, for a model may have thousands
    words = flat.view(torch.int64) if whole else flat.view(torch.uint8)[:split].view(torch.int64)
    in_rows = words.numel() // WORDS * WORDS
    total = _weighted(words[in_rows:] if in_rows else words, weights)
    if in_rows:
        total = total + _weighted(words[:in_rows].view(-1, WORDS).sum(0), weights)
    return total if whole else total + _weighted(flat.view(torch.uint8)[split:].long(), weights)


def _weighted(words: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    weights = weights[: words.numel()]
    # A GPU has no dot product of integers.
    return torch.dot(words, weights) if words.device.type == "cpu" else (words * weights).sum()
