"""The load that each collective puts on the network: rounds of messages, and bytes.

The algorithms are those of NCCL and Gloo. How long the messages take on a network is said by `cluster`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from zero_ref.plan.calls import PAIRWISE_RANKS
from zero_ref.plan.partition import check_world_size
from zero_ref.simulator._checks import check_name, check_number


class Traffic(NamedTuple):
    """The load that one collective puts on the network.

    Args:
        rounds: messages that follow one another, each waiting for the one before.
        busiest_bytes: what the busiest rank sends, or receives if that is more.
        total_bytes: what all ranks send together: bytes on the wire.
    """

    rounds: int
    busiest_bytes: float
    total_bytes: float


OPERATIONS = (
    "all_reduce",
    "reduce_scatter",
    "reduce_shares",
    "all_gather",
    "broadcast",
    "reduce",
    "exchange",
    "send",
)
BACKENDS = ("nccl", "gloo")


def traffic(
    op: str,
    nbytes: float,
    world_size: int,
    *,
    backend: str = "nccl",
    algorithm: str = "ring",
    shares: Sequence[float] | None = None,
) -> Traffic:
    """Return the load that a collective over `world_size` ranks puts on the network.

    On one rank there is nothing to do. In a ring each rank sends (N-1)/N of the payload, and twice that for
    an all-reduce, which is the least that an all-reduce can do with while ranks add. A broadcast goes around
    the ring, and so do the sums of a reduce: each rank passes on the payload once. A tree needs fewer
    rounds, about log2 N up and as many down, and its inner ranks send more.
    Gloo's algorithms differ: its reduce-scatter is an all-reduce inside, its broadcast sends the whole
    payload down a binomial tree, and its reduce is a reduce-scatter whose parts are then sent to one rank.
    This package's own reduce-scatter, "reduce_shares", is NCCL's on NCCL. On Gloo it is a message between
    each pair of ranks, and on more than PAIRWISE_RANKS ranks a ring.

    >>> traffic("all_reduce", 100, 4)
    Traffic(rounds=6, busiest_bytes=150.0, total_bytes=600.0)
    >>> for op in ("reduce_scatter", "reduce_shares"):
    ...     print(op, [traffic(op, 100, 4, backend=backend).total_bytes for backend in BACKENDS])
    reduce_scatter [300.0, 600.0]
    reduce_shares [300.0, 300.0]
    >>> traffic("exchange", 100, 4, shares=[100])       # one rank owns it all, and receives it three times
    Traffic(rounds=1, busiest_bytes=300.0, total_bytes=300.0)
    >>> traffic("reduce", 100, 4)                       # the same sum at the same rank, passed along a chain
    Traffic(rounds=3, busiest_bytes=100.0, total_bytes=300.0)

    Args:
        op: one of OPERATIONS. "exchange" is the reduction to owners by pairwise messages, see `shares`;
            "reduce" is that to one owner by the backend's own call.
        nbytes: the payload, which is the whole tensor: what each rank has after an all_gather, or before a
            reduce_scatter.
        backend: one of BACKENDS.
        algorithm: "ring", "tree" or "nvls", for NCCL's all-reduce; everything else has one algorithm only.
            With NVLS a switch adds what all ranks send, and sends each sum to all of them.
        shares: for an exchange, the bytes of the payload that each owner owns, and receives
            from every other rank. Ranks beyond the last share own nothing. None for even shares on all ranks.
    Raises:
        ValueError: an operation, backend or algorithm is unknown, the payload is negative, there is no rank,
            or the shares do not add up to the payload.
    Source: bus bandwidths of nccl-tests (doc/PERFORMANCE.md); rounds of a ring, and which operations have a
        tree, as in NCCL's own tuning model (src/graph/tuning.cc); Gloo's bytes are counted on each rank's
        connections by tests/simulator/test_wire.py and in chapter 2.
    """
    check_name("operation", op, OPERATIONS)
    check_name("backend", backend, BACKENDS)
    if algorithm not in ("ring", "tree", "nvls"):
        raise ValueError(f"unknown algorithm {algorithm!r}; choose ring, tree or nvls.")
    check_number("a payload's bytes", nbytes)
    check_world_size(world_size)
    if shares is not None:
        _check_shares(shares, nbytes, world_size)
    n, s = world_size, float(nbytes)
    if n == 1 or s == 0:
        return Traffic(0, 0.0, 0.0)
    part, levels = s * (n - 1) / n, math.ceil(math.log2(n))
    if op == "send":
        return Traffic(1, s, s)
    if op == "exchange":
        owned = [s / n] * n if shares is None else shares
        sent = s - (min(owned) if len(owned) == n else 0.0)  # by the rank that owns least
        return Traffic(1, float(max(sent, max(owned) * (n - 1))), s * (n - 1))
    if op == "all_reduce" or (op == "reduce_scatter" and backend == "gloo"):
        if algorithm == "tree" and backend == "nccl":
            return Traffic(2 * levels, 2 * s, 2 * (n - 1) * s)
        if algorithm == "nvls" and backend == "nccl":
            return Traffic(2, s + s / n, (n + 1) * s)
        return Traffic(2 * (n - 1), 2 * part, 2 * (n - 1) * s)
    if op in ("reduce_scatter", "reduce_shares", "all_gather"):
        pairwise = op == "reduce_shares" and backend == "gloo" and n <= PAIRWISE_RANKS
        return Traffic(1 if pairwise else n - 1, part, (n - 1) * s)
    if op == "reduce" and backend == "gloo":  # a ring's reduce-scatter, then all parts to one rank
        return Traffic(n, 2 * part, (n - 1) * s + part)
    if op == "broadcast" and backend == "gloo":  # the source sends the whole payload once for each level
        return Traffic(levels, levels * s, (n - 1) * s)
    return Traffic(n - 1, s, (n - 1) * s)


def _check_shares(shares: Sequence[float], nbytes: float, world_size: int) -> None:
    for share in shares:
        check_number("a share's bytes", share)
    if len(shares) > world_size:
        raise ValueError(f"{len(shares)} shares for {world_size} ranks: give one for each owner at most.")
    if not math.isclose(sum(shares), nbytes, rel_tol=1e-9):
        raise ValueError(
            f"the shares add up to {sum(shares):g} bytes, the payload has {nbytes:g}: each has one owner."
        )
