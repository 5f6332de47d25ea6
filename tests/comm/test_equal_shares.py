"""All-gather and reduce-scatter of equal shares on processes: pairwise, by a ring, by the backend itself."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from zero_ref.comm.pairwise import GlooCollectives, PairwiseCollectives
from zero_ref.comm.process_group import ProcessGroupCollectives
from zero_ref.lab import ranks
from zero_ref.lab.meter import recording
from zero_ref.plan.calls import Call
from zero_ref.shard.buckets import Message

pytestmark = pytest.mark.ranks

SHARE = 192
WAYS = {"pairwise": PairwiseCollectives, "ring": GlooCollectives, "native": ProcessGroupCollectives}


def flat_of(rank: int, world_size: int, dtype: torch.dtype) -> torch.Tensor:
    """Whole numbers, so that sums are exact in every order."""
    return (torch.arange(world_size * SHARE) % 7 + rank).to(dtype)


def in_shares(way: str, dtype: torch.dtype) -> list[str]:
    comm = WAYS[way]()
    rank, size = comm.rank, comm.world_size
    gathered = flat_of(rank, size, dtype)
    expected = gathered.clone()
    for other in range(size):
        expected[other * SHARE :][:SHARE] = flat_of(other, size, dtype)[other * SHARE :][:SHARE]
    sums = torch.stack([flat_of(other, size, dtype) for other in range(size)]).sum(0)
    share, again = torch.empty(SHARE, dtype=dtype), torch.empty(SHARE, dtype=dtype)
    with recording(comm) as calls:
        # Several under way at once, completed in the order in which they were started.
        works = [
            comm.gather_shares(gathered),
            comm.reduce_shares(flat_of(rank, size, dtype), share),
            comm.reduce_shares(2 * flat_of(rank, size, dtype), again),
        ]
        for work in works:
            work.wait()
    assert torch.equal(gathered, expected), way
    assert torch.equal(share, sums[rank * SHARE :][:SHARE]), way
    assert torch.equal(again, 2 * share), way
    assert calls == [Call("all_gather", expected.nbytes), *[Call("reduce_shares", expected.nbytes)] * 2]
    return [call.op for call in calls]


def in_every_way() -> None:
    for way in WAYS:
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            in_shares(way, dtype)


@pytest.mark.parametrize("world_size", [1, 3])
def test_every_way_gathers_shares_and_adds_them_up(world_size: int) -> None:
    ranks.run(in_every_way, world_size, timeout=300)


def early_receives() -> None:
    """Receives that were started before the call are its own, as a step starts them."""
    comm = PairwiseCollectives()
    flat = flat_of(comm.rank, comm.world_size, torch.float32)
    shares = flat.chunk(comm.world_size)
    expected = comm.expect([Message(src, share, ()) for src, share in enumerate(shares)])
    dist.barrier()
    comm.gather_shares(flat, expected).wait()
    for other in range(comm.world_size):
        theirs = flat_of(other, comm.world_size, torch.float32)
        assert torch.equal(flat.chunk(comm.world_size)[other], theirs.chunk(comm.world_size)[other])


def test_shares_may_be_received_early() -> None:
    ranks.run(early_receives, 3, timeout=300)
