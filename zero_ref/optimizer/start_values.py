"""The comparison of the values from which an update starts: between ranks, and with masters that were loaded.

`stairs/owners.py` assumes that all ranks start from the same values. A program may construct the optimizer
before DistributedDataParallel, which sends rank 0's values to all ranks. So values are compared before the
first update, not when the optimizer is constructed. If they differ, the update still makes them equal, since
all ranks receive the owners' values. But the gradients were averaged over different models, so all ranks
warn.
"""

from __future__ import annotations

import hashlib

from zero_ref.comm.collectives import Collectives
from zero_ref.comm.objects import gather_bytes
from zero_ref.optimizer.warned import warn_user
from zero_ref.plan.calls import CHECK
from zero_ref.shard.buckets import broadcast_messages, messages_by_parameter
from zero_ref.shard.built import Built
from zero_ref.shard.digests import digests
from zero_ref.shard.shard import Shard

DIGEST_NBYTES = 8  # of a parameter


def compare_start_values(comm: Collectives, built: Built, first: int = 0) -> None:
    """Warn on all ranks if values differ between ranks, and send frozen parameters from their owners.

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
    # 1. Compare one digest of all parameters; usually it is equal. A tensor that cannot be read has an empty
    # digest.
    mine = b"".join(int(one or "0", 16).to_bytes(DIGEST_NBYTES) for one in digests(built.params[first:]))
    if len({*map(bytes, gather_bytes(comm, hashlib.sha256(mine).digest(), CHECK))}) == 1:
        return

    # 2. Gather a digest of each parameter, and name the first parameter that differs.
    of_ranks = [bytes(other) for other in gather_bytes(comm, mine, CHECK)]
    starts = range(0, len(mine), DIGEST_NBYTES)
    of_params = [[of_rank[start : start + DIGEST_NBYTES] for of_rank in of_ranks] for start in starts]
    differing = [number for number, values in enumerate(of_params) if len(set(values)) > 1]
    values = of_params[differing[0]]
    odd = next(rank for rank, value in enumerate(values) if value != values[0])
    warn_user(
        f"rank {comm.rank}: before its first update parameter {built.name(first + differing[0])} has other "
        f"values on rank {odd} than on rank 0 ({len(differing)} of {len(of_params)} parameters differ). Each "
        "parameter's owner sends its values to all ranks, so that from this update on all are equal; but "
        "these gradients are averages over different models. Start from the same values, in the same order: "
        "call torch.manual_seed with one number on all ranks before the model is made, or wrap the model in "
        "DistributedDataParallel, which sends rank 0's values to all. If only the order of parameters "
        "differs, list them in one that all processes share, as that of a set is not."
    )

    # 3. An update sends only trained parameters, so make the others equal here.
    broadcast_messages(comm, messages_by_parameter(built.partition, built.params, frozen=True))


def compare_with_masters(shard: Shard, rank: int) -> None:
    """Warn, in the first update after masters were loaded, if the model's own weights were not.

    Warns:
        UserWarning: names the first parameter that this rank owns and that differs from its master.
    """
    behind = shard.copies.left_behind() if shard.masters_came else ()
    shard.masters_came = False
    if behind:
        warn_user(
            f"rank {rank}: the loaded masters have other values than {len(behind)} parameters here, such as "
            f"{shard.built.name(min(behind))}: the model's own weights were not loaded. This update's "
            "gradients belong to the old weights, and the new weights will be those of the masters. Load the "
            "model's state dict too, before the first forward."
        )
