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

from zero_ref.comm.collectives import Collectives
from zero_ref.comm.objects import gather_bytes
from zero_ref.plan.calls import CHECK
from zero_ref.shard.buckets import broadcast_messages, messages_by_parameter
from zero_ref.shard.built import Built
from zero_ref.shard.digests import digests

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
