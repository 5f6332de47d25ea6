"""Chapter 17: answers that a reader may give, each with a part of the message that must meet them."""

from __future__ import annotations

from typing import Any

import torch

from zero_ref.comm.collectives import Collectives


def as_they_come(ready: list[int], count: int) -> list[list[int]]:
    rest = [bucket for bucket in range(count) if bucket not in ready]
    return [*([bucket] for bucket in ready), rest]


def only_the_one_that_came(ready: list[int], count: int) -> list[list[int]]:
    started, next_one = [], 0
    for bucket in ready:
        started.append([bucket] if bucket == next_one else [])
        next_one += bucket == next_one
    return [*started, list(range(next_one, count))]


def nothing_at_the_end(ready: list[int], count: int) -> list[list[int]]:
    moments = in_order(ready, count)
    return moments[:-1]


def unused_never(ready: list[int], count: int) -> list[list[int]]:
    *moments, last = in_order(ready, count)
    return [*moments, [bucket for bucket in last if bucket in ready]]


def all_up_to_it(ready: list[int], count: int) -> list[list[int]]:
    started, next_one = [], 0
    for bucket in ready:
        started.append(list(range(next_one, bucket + 1)))
        next_one = max(next_one, bucket + 1)
    return [*started, list(range(next_one, count))]


def all_at_the_end(ready: list[int], count: int) -> list[list[int]]:
    return [*([] for _ in ready), list(range(count))]


def again_at_the_end(ready: list[int], count: int) -> list[list[int]]:
    return [*in_order(ready, count)[:-1], list(range(count))]


def one_list(ready: list[int], count: int) -> Any:
    return list(range(count))


def in_order(ready: list[int], count: int) -> list[list[int]]:
    started, full, next_one = [], set(), 0
    for bucket in ready:
        full.add(bucket)
        now = []
        while next_one in full:
            now.append(next_one)
            next_one += 1
        started.append(now)
    return [*started, list(range(next_one, count))]


def _round(comm: Collectives, share: torch.Tensor) -> torch.Tensor:
    received, size = torch.empty_like(share), comm.world_size
    comm.exchange([((comm.rank + 1) % size, share)], [((comm.rank - 1) % size, received)]).wait()
    return received


def begins_with_its_own(comm: Collectives, shares: list[torch.Tensor]) -> torch.Tensor:
    rank, size = comm.rank, comm.world_size
    for number in range(size - 1):
        shares[(rank - number - 1) % size] += _round(comm, shares[(rank - number) % size])
    return shares[(rank + 1) % size]


def passes_on_without_adding(comm: Collectives, shares: list[torch.Tensor]) -> torch.Tensor:
    rank, size = comm.rank, comm.world_size
    for number in range(1, size):
        shares[(rank - number - 1) % size] = _round(comm, shares[(rank - number) % size])
    return shares[rank]


def to_each_owner(comm: Collectives, shares: list[torch.Tensor]) -> torch.Tensor:
    peers = [peer for peer in range(comm.world_size) if peer != comm.rank]
    received = {peer: torch.empty_like(shares[0]) for peer in peers}
    comm.exchange([(peer, shares[peer]) for peer in peers], list(received.items())).wait()
    return sum(received.values(), shares[comm.rank])


def one_round_more(comm: Collectives, shares: list[torch.Tensor]) -> torch.Tensor:
    rank, size = comm.rank, comm.world_size
    for number in range(1, size + 1):
        shares[(rank - number - 1) % size] += _round(comm, shares[(rank - number) % size])
    return shares[rank]


def everything_each_round(comm: Collectives, shares: list[torch.Tensor]) -> torch.Tensor:
    total = torch.stack(shares)
    passed = total.clone()
    for _ in range(comm.world_size - 1):
        passed = _round(comm, passed)
        total += passed
    return total[comm.rank]


def asks_for_an_all_reduce(comm: Collectives, shares: list[torch.Tensor]) -> torch.Tensor:
    comm.all_reduce(shares[comm.rank]).wait()
    return shares[comm.rank]


def all_shares(comm: Collectives, shares: list[torch.Tensor]) -> Any:
    return shares


def only_the_reduction(psi: int, shard_group: int, world_size: int) -> tuple[float, float]:
    groups = world_size // shard_group
    within = psi * (shard_group - 1) / shard_group
    return within, 2 * psi / shard_group * (groups - 1) / groups


def all_gradients_between(psi: int, shard_group: int, world_size: int) -> tuple[float, float]:
    groups = world_size // shard_group
    return 2 * psi * (shard_group - 1) / shard_group, 2 * psi * (groups - 1) / groups


def one_way_between(psi: int, shard_group: int, world_size: int) -> tuple[float, float]:
    groups = world_size // shard_group
    return 2 * psi * (shard_group - 1) / shard_group, psi / shard_group * (groups - 1) / groups


def among_all_ranks(psi: int, shard_group: int, world_size: int) -> tuple[float, float]:
    groups = world_size // shard_group
    return 2 * psi * (world_size - 1) / world_size, 2 * psi / shard_group * (groups - 1) / groups


def all_ranks_between(psi: int, shard_group: int, world_size: int) -> tuple[float, float]:
    within = 2 * psi * (shard_group - 1) / shard_group
    return within, 2 * psi / shard_group * (world_size - 1) / world_size


def its_own_part_between(psi: int, shard_group: int, world_size: int) -> tuple[float, float]:
    return 2 * psi * (shard_group - 1) / shard_group, 2 * psi / shard_group


def the_other_way_round(psi: int, shard_group: int, world_size: int) -> tuple[float, float]:
    within, between = right(psi, shard_group, world_size)
    return between, within


def in_all(psi: int, shard_group: int, world_size: int) -> Any:
    return sum(right(psi, shard_group, world_size))


def right(psi: int, shard_group: int, world_size: int) -> tuple[float, float]:
    groups = world_size // shard_group
    within = 2 * psi * (shard_group - 1) / shard_group
    return within, 2 * psi / shard_group * (groups - 1) / groups


def begins_with_its_own_and_returns_its_own(comm: Collectives, shares: list[torch.Tensor]) -> torch.Tensor:
    begins_with_its_own(comm, shares)
    return shares[comm.rank]


def begins_one_further(comm: Collectives, shares: list[torch.Tensor]) -> torch.Tensor:
    rank, size = comm.rank, comm.world_size
    for number in range(1, size):
        shares[(rank - number - 2) % size] += _round(comm, shares[(rank - number - 1) % size])
    return shares[rank]


WRONG = [
    ("sharded.reduce_in_order", as_they_come, r"another order would start others"),
    ("sharded.reduce_in_order", only_the_one_that_came, r"may start earlier.* may let several start"),
    ("sharded.reduce_in_order", nothing_at_the_end, r"a moment more: when backward ends"),
    ("sharded.reduce_in_order", unused_never, r"Bucket 2 is never reduced.* reduced with zeros"),
    (
        "sharded.reduce_in_order",
        all_up_to_it,
        r"Bucket 0 is reduced when bucket 1 becomes full, and it is not",
    ),
    ("sharded.reduce_in_order", all_at_the_end, r"may start earlier"),
    ("sharded.reduce_in_order", again_at_the_end, r"Bucket 0 is reduced twice"),
    ("sharded.reduce_in_order", one_list, r"must return a list of lists"),
    ("sharded.ring", begins_with_its_own, r"sum of share 1, which rank 1 is to have.*must a rank send first"),
    ("sharded.ring", passes_on_without_adding, r"sum of 1 of 3 parts.*Add what arrives to this rank's part"),
    ("sharded.ring", to_each_owner, r"sent to rank 2. In a ring a rank sends to the next one only"),
    ("sharded.ring", one_round_more, r"sent 3 messages.*so a rank sends 2"),
    ("sharded.ring", everything_each_round, r"sent a message of 72 bytes. A share has 24"),
    ("sharded.ring", asks_for_an_all_reduce, r"called all_reduce. Write it from messages"),
    ("sharded.ring", all_shares, r"must return a tensor as large as a share"),
    ("sharded.hybrid_bytes", only_the_reduction, r"new parameters are gathered too"),
    ("sharded.hybrid_bytes", all_gradients_between, r"only this rank's share travels"),
    ("sharded.hybrid_bytes", one_way_between, r"so it moves twice"),
    ("sharded.hybrid_bytes", among_all_ranks, r"go around the ranks of the group, and not around all"),
    ("sharded.hybrid_bytes", all_ranks_between, r"as there are groups, not all ranks"),
    ("sharded.hybrid_bytes", its_own_part_between, r"does not send its own part of the ring's"),
    ("sharded.hybrid_bytes", the_other_way_round, r"in the other order"),
    ("sharded.hybrid_bytes", in_all, r"must return two numbers"),
    (
        "sharded.ring",
        begins_with_its_own_and_returns_its_own,
        r"It sends share 0 first\. .* here rank 2, which is to have share 2",
    ),
    ("sharded.ring", begins_one_further, r"It sends share 1 first\. .* which is to have share 2"),
]
