"""Clusters: links between devices, and how long each collective takes on them.

`traffic` says how many messages and bytes a collective makes, and a `Cluster` how long they take on its
links. The clusters known by name are made from the tables in `devices` and `presets`.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from zero_ref.simulator import devices, presets
from zero_ref.simulator._checks import check_name, check_number
from zero_ref.simulator._records import parse_json, record
from zero_ref.simulator.device import Device
from zero_ref.simulator.traffic import BACKENDS, OPERATIONS, Traffic, traffic

ALGORITHMS = ("auto", "ring", "tree", "nvls")

NCCL_CALL_US = 8.4
"""The microseconds of a call of NCCL beside its messages. Source: `baseLat` of src/graph/tuning.cc."""

TREE_SHARE = 0.92
"""The share of a ring's bandwidth that NCCL expects of its tree. Source: src/graph/tuning.cc."""

TREE_SHARE_OF_ONE = 0.85
"""The same on top, where all of a node's traffic goes to and from one GPU: nodes with one rank."""

NVLS_SHARE = 0.85
"""The share of the link's bandwidth that NCCL expects of sums in the switch on Hopper; on Blackwell 0.74.
Source: `nvlsEfficiency` of src/graph/tuning.cc."""

NVLS_US = 25.0
"""The latency of such a reduction, there and back (`hwLatencies`)."""

FIGURES = (1e-9, 1e12)
"""Every measured or published figure of a machine lies between these, except for latencies and overheads,
which may be less. Times computed from other figures would be infinite."""


def _check_figures(value: Any, what: str = "cluster") -> None:
    """Raise a ValueError for a number, however deep in the value, that is outside FIGURES."""
    if isinstance(value, dict):
        for name, each in value.items():
            _check_figures(each, f"{what}.{name}")
    elif isinstance(value, bool) or not isinstance(value, (int, float)):
        return
    elif value > FIGURES[1] or (
        value < FIGURES[0] and not what.endswith(("_us", "passes", "_share", "library_gb"))
    ):
        raise ValueError(f"{what} {value:g} is no figure of a machine: {FIGURES[0]:g} to {FIGURES[1]:g} are")


@dataclass(frozen=True)
class Link:
    """A connection from one rank to another.

    Args:
        latency_us: microseconds that each message takes, whatever its size.
        gb_per_s: 10^9 bytes that a rank can send in a second, while it receives as many.
        reached: the share of that rate that large messages reach. Packets have headers, and NCCL waits for
            flags.
    Raises:
        ValueError: a latency below 0, a bandwidth that is not above 0, or a share above 1.
    """

    latency_us: float
    gb_per_s: float
    reached: float = 1.0

    def __post_init__(self) -> None:
        check_number("a link's latency_us", self.latency_us)
        check_number("a link's gb_per_s", self.gb_per_s, above=True)
        if not 0 < self.reached <= 1:
            raise ValueError(
                f"a link's reached is a share of its rate, above 0 up to 1, got {self.reached:g}."
            )

    def ms(self, rounds: float, nbytes: float) -> float:
        """The milliseconds of so many messages, one after another, with so many bytes.

        >>> Link(latency_us=10, gb_per_s=50).ms(rounds=2, nbytes=50e6)
        1.02
        """
        return rounds * self.latency_us / 1e3 + nbytes / (self.gb_per_s * self.reached * 1e6)

    def scaled(self, *, latency: float = 1.0, bandwidth: float = 1.0) -> Link:
        """The link with its latency and bandwidth multiplied."""
        return Link(self.latency_us * latency, self.gb_per_s * bandwidth, self.reached)


@dataclass(frozen=True)
class Protocol:
    """One of the ways in which a library sends a message.

    Args:
        latency, bandwidth: of a link under this protocol, as multiples of the link's own.
    Raises:
        ValueError: a factor is not above 0.
    """

    name: str
    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        check_number(f"protocol {self.name}: latency", self.latency, above=True)
        check_number(f"protocol {self.name}: bandwidth", self.bandwidth, above=True)


NCCL_PROTOCOLS = (Protocol("Simple", 1, 1), Protocol("LL128", 0.56, 0.92), Protocol("LL", 0.18, 0.25))
"""NCCL waits for large messages as a whole, and sends small ones with flags inside, which cost bandwidth. So
the share of a link's rate that a call reaches grows with its size, from LL's quarter up.

Source: NCCL's tuning model, src/graph/tuning.cc: latencies of 3.4, 1.9 and 0.6 microseconds in a ring over
NVLink, bandwidths of 1, 0.92 and 1/4.
"""


class _Span(NamedTuple):
    """The number of nodes that a group's ranks lie on, and the fewest and the most of its ranks on a node."""

    nodes: int
    fewest: int
    most: int


@lru_cache(maxsize=64)
def _spans(ranks_per_node: int, ranks: int, groups: int) -> frozenset[_Span]:
    """The ways in which so many groups of consecutive ranks lie on nodes."""
    # They repeat after as many groups as a node has ranks, or sooner.
    cycle = ranks_per_node // math.gcd(ranks_per_node, ranks)
    return frozenset(
        _span(ranks_per_node, group * ranks % ranks_per_node, ranks) for group in range(min(groups, cycle))
    )


@lru_cache(maxsize=64)
def _strided_spans(ranks_per_node: int, ranks: int, groups: int, stride: int) -> frozenset[_Span]:
    """The same of groups whose ranks are `stride` apart."""
    block = ranks * stride
    cycle = ranks_per_node // math.gcd(ranks_per_node, block)
    firsts = (
        at * block + offset for at in range(min(-(-groups // stride), cycle)) for offset in range(stride)
    )
    spans = set()
    for first in firsts:
        counts = Counter(rank // ranks_per_node for rank in range(first, first + block, stride)).values()
        spans.add(_Span(len(counts), min(counts), max(counts)))
    return frozenset(spans)


def _span(ranks_per_node: int, first: int, ranks: int) -> _Span:
    """The nodes of consecutive ranks, the first of which has this place on its node."""
    on_first = min(ranks_per_node - first, ranks)
    full, on_last = divmod(ranks - on_first, ranks_per_node)
    counts = [on_first] + [ranks_per_node] * min(full, 1) + [on_last] * (on_last > 0)
    return _Span(1 + full + (on_last > 0), min(counts), max(counts))


FREE_GB_PER_S = 1e15
"""The rate of a link that takes no time worth counting."""


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of equal devices, a rank on each.

    >>> h100 = cluster("h100-ib")
    >>> round(h100.ms("all_reduce", 1e9, 8), 2), round(h100.ms("all_reduce", 1e9, 64), 2)
    (4.8, 5.94)

    Args:
        device: of each rank.
        ranks_per_node: ranks on one node.
        within: the link between two ranks of a node.
        between: the link between ranks of two nodes: one rank's share of the node's network.
        backend: whose algorithms: one of BACKENDS.
        shared: all ranks of a node share the bandwidth of `within`, as processes share a machine's
            loopback: then a collective takes the time of all its bytes, not of the busiest rank's.
        overlaps: a rank computes and sends at once. False where both need the same processor cores.
        link_of_op: measured links of single operations, used in place of `within`.
        call_us: microseconds that each call takes beside its messages, to start a kernel and to meet.
        protocols: a call uses the fastest. None means that the links are what they are.
        nvls: the switch in a node can add (NVLink SHARP), so that a rank sends and receives each element of
            an all-reduce once. "auto" then considers it.
        nvls_share: the share of `within`'s bandwidth that such sums reach.
        mesh: `within` is a rank's links to all others of its node together, one to each, with no switch. A
            group of fewer ranks uses fewer of them.
        disk_gb_per_s: 10^9 bytes a second that all ranks of a node together read from the storage of
            checkpoints, or write to it; None where it is not known.
        source: where the figures come from.
    Raises:
        ValueError: an unknown backend or operation, a node without ranks, a share above 1 or a rate of 0.
        TypeError: `ranks_per_node` is no whole number, or `shared`, `overlaps`, `nvls` or `mesh` no bool.
    """

    name: str
    device: Device
    ranks_per_node: int
    within: Link
    between: Link
    backend: str = "nccl"
    shared: bool = False
    overlaps: bool = True
    link_of_op: Mapping[str, Link] = field(default_factory=dict, hash=False)
    source: str = ""
    call_us: float = 0.0
    protocols: tuple[Protocol, ...] = ()
    nvls: bool = False
    nvls_share: float = NVLS_SHARE
    mesh: bool = False
    disk_gb_per_s: float | None = None

    def __post_init__(self) -> None:
        check_name("backend", self.backend, BACKENDS)
        if not isinstance(self.ranks_per_node, int):
            raise TypeError(f"ranks_per_node must be a whole number, got {self.ranks_per_node!r}.")
        if self.ranks_per_node < 1:
            raise ValueError(f"a node has at least 1 rank, got ranks_per_node={self.ranks_per_node}.")
        check_number(f"{self.name}: call_us", self.call_us)
        if not 0 < self.nvls_share <= 1:
            raise ValueError(f"{self.name}: nvls_share is above 0 up to 1, got {self.nvls_share:g}.")
        if self.disk_gb_per_s is not None:
            check_number(f"{self.name}: disk_gb_per_s", self.disk_gb_per_s, above=True)
        for what in ("shared", "overlaps", "nvls", "mesh"):
            if not isinstance(getattr(self, what), bool):
                raise TypeError(f"{what} must be True or False, got {getattr(self, what)!r}.")
        for op in self.link_of_op:
            check_name("operation", op, OPERATIONS)

    def nodes(self, world_size: int) -> int:
        """The number of nodes that so many ranks fill.

        >>> cluster("h100-ib").nodes(8), cluster("h100-ib").nodes(9)
        (1, 2)
        """
        return -(-world_size // self.ranks_per_node)

    def ms(
        self,
        op: str,
        nbytes: float,
        world_size: int,
        *,
        algorithm: str = "auto",
        shares: Sequence[float] | None = None,
        follows: bool = False,
        ranks: int | None = None,
        stride: int = 1,
    ) -> float:
        """The milliseconds of a collective, if all ranks call it together and the network is free.

        Over several nodes a ring's bytes leave a node through the outer links of all its ranks at once. So
        one rank's inner link or a node's outer links together, whichever is slower, set the pace; a last node
        that is not full has fewer outer links. In an exchange or an all-to-all, each rank's own bytes pass
        through its own outer link. A send goes to another node if there is one. Every call takes `call_us`.

        Groups of consecutive ranks make their calls at the same time, each on the links of its own ranks.
        They share only a bandwidth that all ranks of a node share. A group within a node uses inner links
        only.

        >>> h100 = cluster("h100-ib")
        >>> {name: round(h100.ms("all_reduce", 1e3, 1024, algorithm=name), 3) for name in ALGORITHMS}
        {'auto': 0.052, 'ring': 1.749, 'tree': 0.052, 'nvls': 0.069}
        >>> h100.ms("all_reduce", 1e9, 1024, ranks=8) == h100.ms("all_reduce", 1e9, 8)
        True
        >>> round(h100.ms("all_reduce", 1e9, 1024, ranks=128, stride=8), 1)     # 1.98 GB at 50 GB/s
        45.8

        Args: as `traffic`, and
            algorithm: "auto" takes the fastest of ring, tree and, on a cluster that has it, NVLS, as NCCL
                tries to.
            follows: right behind a call of the same kind. Around NCCL's rings a broadcast or reduce then does
                not wait until the one before has reached the last rank: it adds its bytes and one round.
                This follows from the algorithm, and is not measured.
            ranks: the size of the groups that each make this call; the time is that of the slowest group.
                None for one call of all ranks.
            stride: from one rank of a group to the next: 8 for groups of the first ranks of all nodes with 8,
                of the second ranks, and so on. Each rank then uses its own outer link. Of a stride that does
                not divide a node, groups may have more ranks on some nodes than on others.
        Raises:
            ValueError: as `traffic`, or the ranks cannot be divided into such groups.
        Source: a ring through all nodes crosses from each node to the next once; the tree and its share of a
            ring's bandwidth are those of NCCL's tuning model (src/graph/tuning.cc).
        """
        check_name("algorithm", algorithm, ALGORITHMS)
        if ranks is None:
            ranks = world_size
        elif ranks < 1 or stride < 1 or world_size % (ranks * stride):
            apart = "" if stride == 1 else f" at a stride of {stride}"
            raise ValueError(f"{world_size} ranks cannot be divided into groups of {ranks}{apart}.")
        choice = [algorithm] if algorithm != "auto" else self._algorithms(op)
        loads = {
            one: traffic(op, nbytes, ranks, backend=self.backend, algorithm=one, shares=shares)
            for one in choice
        }
        if follows and self.backend == "nccl" and op in ("broadcast", "reduce"):
            loads = {one: load._replace(rounds=min(load.rounds, 1)) for one, load in loads.items()}
        # The groups of a node that call at the same time divide a bandwidth that all its ranks share.
        at_once = min(self.ranks_per_node, world_size) / ranks if self.shared else None
        groups = world_size // ranks
        if stride == 1:
            spans = _spans(self.ranks_per_node, ranks, groups)
        else:
            spans = _strided_spans(self.ranks_per_node, ranks, groups, stride)
        if not any(load.rounds for load in loads.values()):
            return 0.0
        return self.call_us / 1e3 + max(
            min(
                at._ms_of(op, one, load, ranks, span, at_once)
                for at in self._by_protocol
                for one, load in loads.items()
            )
            for span in spans
        )

    def _algorithms(self, op: str) -> list[str]:
        """Return the algorithms that "auto" considers."""
        if self.backend != "nccl" or op != "all_reduce":
            return ["ring"]
        return ["ring", "tree", "nvls"] if self.nvls else ["ring", "tree"]

    @cached_property
    def _by_protocol(self) -> tuple[Cluster, ...]:
        """The cluster with the links that each protocol makes of them."""
        if not self.protocols:
            return (self,)
        return tuple(self.with_links(latency=one.latency, bandwidth=one.bandwidth) for one in self.protocols)

    def _ms_of(
        self, op: str, algorithm: str, load: Traffic, ranks: int, span: _Span, at_once: float | None
    ) -> float:
        """The milliseconds of the collective of a group whose ranks lie on nodes in this way."""
        inside_bytes = load.busiest_bytes if at_once is None else load.total_bytes * at_once
        if span.most == 1:
            inside_bytes = 0.0  # each rank is on a node of its own
        within = self.link_of_op.get(op) or self._inner(op, span)
        if op in ("exchange", "send"):
            if span.nodes == 1:
                return within.ms(load.rounds, inside_bytes)
            outside = 1.0 if op == "send" else (ranks - span.fewest) / (ranks - 1)
            return max(
                within.ms(load.rounds, inside_bytes * (1 - outside)),
                self.between.ms(load.rounds, load.busiest_bytes * outside),
            )
        if self.backend == "nccl" and op == "all_reduce" and algorithm != "ring":
            return self._by_nodes_ms(algorithm, load, ranks, within, inside_bytes, span)
        hops_inside, hops_outside = self._hops(op, load.rounds, ranks, span)
        inside_ms = within.ms(hops_inside, inside_bytes)
        if span.nodes == 1:
            return inside_ms
        node = self.between.scaled(bandwidth=span.fewest)
        return max(
            inside_ms + node.ms(hops_outside, 0),
            within.ms(hops_inside, 0) + node.ms(hops_outside, load.busiest_bytes),
        )

    def _inner(self, op: str, span: _Span) -> Link:
        """The link between a group's ranks on a node; of a mesh, where the group has the fewest links."""
        together = span.most if span.fewest == 1 else span.fewest
        if not self.mesh or together == 1:
            return self.within
        used = 1 if op == "send" else together - 1
        return self.within.scaled(bandwidth=used / (self.ranks_per_node - 1))

    def _by_nodes_ms(
        self, algorithm: str, load: Traffic, ranks: int, within: Link, inside_bytes: float, span: _Span
    ) -> float:
        """An all-reduce in each node, and among nodes up a tree and down again.

        In a node NCCL's tree is a chain of its ranks. With NVLS the switch adds: each rank sends its part and
        receives the sum of its share, and the other way round.
        """
        if algorithm == "nvls":
            payload = load.busiest_bytes * ranks / (ranks + 1)
            latency_ms, share, inside_bytes = NVLS_US / 1e3, self.nvls_share, payload * (1 + 1 / span.most)
        else:
            payload = load.busiest_bytes / 2
            latency_ms, share = within.ms(2 * (span.most - 1), 0), TREE_SHARE
        inside_ms = latency_ms + within.scaled(bandwidth=share).ms(0, inside_bytes)
        if span.nodes == 1:
            return inside_ms
        share = TREE_SHARE * (TREE_SHARE_OF_ONE if span.most == 1 else 1)
        node, hops = self.between.scaled(bandwidth=span.fewest * share), 2 * math.ceil(math.log2(span.nodes))
        return max(inside_ms + node.ms(hops, 0), latency_ms + node.ms(hops, 2 * payload))

    def _hops(self, op: str, rounds: int, ranks: int, span: _Span) -> tuple[float, float]:
        """Divide messages that follow one another into those that stay in a node and those that leave one."""
        if not rounds or span.nodes == 1:
            return rounds, 0
        if op == "broadcast" and self.backend == "gloo":  # a tree that crosses nodes first
            outside = math.ceil(math.log2(span.nodes))
            return rounds - outside, outside
        outside_share = span.nodes / ranks  # of the hops of a ring one leaves each node
        return rounds * (1 - outside_share), rounds * outside_share

    def with_links(self, *, latency: float = 1.0, bandwidth: float = 1.0) -> Cluster:
        """The same cluster with every link's latency and bandwidth multiplied; `call_us` is a latency, too.

        >>> cluster("h100-ib").with_links(bandwidth=0.5).between
        Link(latency_us=14.0, gb_per_s=25.0, reached=0.94)
        """
        factors = {"latency": latency, "bandwidth": bandwidth}
        return replace(
            self,
            call_us=self.call_us * latency,
            within=self.within.scaled(**factors),
            between=self.between.scaled(**factors),
            link_of_op={op: link.scaled(**factors) for op, link in self.link_of_op.items()},
        )

    def with_only(self, link: str) -> Cluster:
        """The same cluster, where one of the two links is as it is and nothing else takes time.

        >>> h100 = cluster("h100-ib")
        >>> [round(h100.with_only(link).ms("all_gather", 1e9, 64), 2) for link in ("within", "between")]
        [2.86, 2.73]
        >>> round(h100.ms("all_gather", 1e9, 64), 2)
        2.97

        Args:
            link: "within" or "between".
        """
        check_name("link", link, ("within", "between"))
        of_op = self.link_of_op if link == "within" else {}
        other = "between" if link == "within" else "within"
        free: dict[str, Any] = {other: Link(0, FREE_GB_PER_S)}
        return replace(self, call_us=0, link_of_op=of_op, **free)

    def to_json(self) -> str:
        """As text that `Cluster.from_json` reads."""
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Cluster:
        """Make a cluster from the text that `to_json` gives.

        Raises:
            ValueError: it is no JSON, a field is missing or unknown, or a value makes no sense.
        """
        try:
            values = parse_json(text)
            made = record(cls, values, "cluster")
            _check_figures(values)
        except ValueError as error:
            raise ValueError(
                f"this is no cluster: {str(error).rstrip('.')}. It takes JSON with name, device, "
                "ranks_per_node, within and between, as `Cluster.to_json` gives it."
            ) from None
        return made


def _preset(name: str, *, device: str, within: str, between: str, **others: Any) -> Cluster:
    if others.get("backend", "nccl") == "nccl":
        others = {"call_us": NCCL_CALL_US, "protocols": NCCL_PROTOCOLS} | others
    return Cluster(
        name,
        Device(device, **devices.DEVICES[device]),
        within=Link(**presets.LINKS[within]),
        between=Link(**presets.LINKS[between]),
        **others,
    )


CLUSTERS: dict[str, Cluster] = {name: _preset(name, **fields) for name, fields in presets.CLUSTERS.items()}
"""Clusters by name, from the tables of `devices` and `presets`."""


def cluster(name: str) -> Cluster:
    """A preset by its name.

    Raises:
        ValueError: the name is not in CLUSTERS.
    """
    check_name("cluster", name, CLUSTERS)
    return CLUSTERS[name]
