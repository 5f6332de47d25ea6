"""The bytes of Gloo's collectives on the wire, counted on each rank's own connections, equal `traffic`."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from zero_ref.comm.pairwise import GlooCollectives, PairwiseCollectives
from zero_ref.lab import ranks
from zero_ref.lab.meter import bytes_sent_by
from zero_ref.simulator.traffic import OPERATIONS, traffic

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(sys.platform != "linux", reason="the kernel's counters are Linux's"),
]

NBYTES = 4 * 2**20
CLOSE = 0.01
"""Headers of Gloo's messages and the barriers around a call: some kilobytes beside 4 MB."""


def newer_or_older(newer: str, older: str) -> Callable[..., object]:
    """torch 2.13 warns of the older name, 2.11 has no other."""
    return getattr(dist, newer, None) or getattr(dist, older)


def calls() -> dict[str, Callable[[], object]]:
    """Each operation of `traffic`, as a rank makes it. Some in two ways, which send as much."""
    comm, around = PairwiseCollectives(), GlooCollectives()  # the latter as on more ranks
    rank, n = comm.rank, comm.world_size
    whole, part = torch.ones(NBYTES // 4), torch.ones(NBYTES // 4 // n)
    others = [other for other in range(n) if other != rank]
    all_gather = newer_or_older("all_gather_single", "all_gather_into_tensor")
    reduce_scatter = newer_or_older("reduce_scatter_single", "reduce_scatter_tensor")

    def exchange() -> None:
        received = [(other, torch.empty_like(part)) for other in others]
        comm.exchange([(other, part) for other in others], received).wait()

    def send() -> None:
        if rank == 0:
            comm.send(whole, 1).wait()
        elif rank == 1:
            comm.recv(torch.empty_like(whole), 0).wait()

    return {
        "all_reduce": lambda: dist.all_reduce(whole),
        "reduce_scatter": lambda: reduce_scatter(torch.empty_like(part), whole),
        "reduce_shares": lambda: comm.reduce_shares(whole.clone(), torch.empty_like(part)).wait(),
        "reduce_shares, a ring": lambda: around.reduce_shares(whole.clone(), torch.empty_like(part)).wait(),
        "all_gather": lambda: all_gather(torch.empty_like(whole), part),
        "broadcast": lambda: dist.broadcast(whole, group_src=n - 1),
        "reduce": lambda: dist.reduce(whole, group_dst=0),
        "exchange": exchange,
        "send": send,
    }


def measured() -> dict[str, int | None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as torch's of an older name
        return {name: bytes_sent_by(call) for name, call in calls().items()}


@pytest.mark.parametrize("world_size", [2, 4])
def test_gloo_sends_what_traffic_says_in_all_and_from_the_busiest_rank(world_size: int) -> None:
    of_ranks = ranks.run(measured, world_size, backend="gloo")
    assert {name.partition(",")[0] for name in of_ranks[0]} == set(OPERATIONS)
    for name in of_ranks[0]:
        sent = [of_rank[name] or 0 for of_rank in of_ranks]
        predicted = traffic(name.partition(",")[0], NBYTES, world_size, backend="gloo")
        assert sum(sent) == pytest.approx(predicted.total_bytes, rel=CLOSE), name
        # The root of a reduction receives the most, and only what is sent is counted here.
        busiest = NBYTES if name == "reduce" else predicted.busiest_bytes
        assert max(sent) == pytest.approx(busiest, rel=CLOSE), name


def test_what_another_rank_sends_does_not_count_here() -> None:
    def only_rank_0_sends() -> int | None:
        return bytes_sent_by(lambda: dist.broadcast(torch.ones(NBYTES // 4), group_src=0))

    here, there = ranks.run(only_rank_0_sends, 2, backend="gloo")
    assert here is not None
    assert there is not None
    assert here == pytest.approx(NBYTES, rel=CLOSE)
    assert there < CLOSE * NBYTES
