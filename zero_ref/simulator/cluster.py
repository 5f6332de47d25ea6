"""The machines: links, devices, and what each collective costs on them.

A collective is priced in two steps. `traffic` says what an algorithm makes the network do: how many messages
follow one another, how many bytes the busiest rank carries, how many bytes travel in all. A `Cluster` then
says how long that takes on its links. The presets carry their sources; a cluster measured on the machine at
hand comes from `zero_ref.simulator.calibrate`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

from zero_ref.simulator._records import parse_json, record


def _check_name(what: str, name: str, known: Sequence[str]) -> None:
    if name not in known:
        raise ValueError(f"unknown {what} {name!r}; choose one of {', '.join(known)}.")


def _check_number(what: str, value: float, *, above: bool) -> None:
    """Finite, and above 0 or at least 0."""
    if not (math.isfinite(value) and (value > 0 if above else value >= 0)):
        raise ValueError(f"{what} must be {'above 0' if above else '0 or more'}, got {value:g}.")


FIGURES = (1e-9, 1e12)
"""Between these lies every figure of a machine that was measured or is on a data sheet, but for latencies and
overheads, which may be less. Times computed with others would be infinite."""


def _check_figures(value: Any, what: str = "cluster") -> None:
    """Raise a ValueError for a number, however deep in the value, that is outside FIGURES."""
    if isinstance(value, dict):
        for name, each in value.items():
            _check_figures(each, f"{what}.{name}")
    elif isinstance(value, bool) or not isinstance(value, (int, float)):
        return
    elif value > FIGURES[1] or (value < FIGURES[0] and not what.endswith("_us")):
        raise ValueError(f"{what} {value:g} is no figure of a machine: {FIGURES[0]:g} to {FIGURES[1]:g} are")


# ------------------------------------------------------------------------------- what the network has to do


class Traffic(NamedTuple):
    """What one collective makes the network do.

    Args:
        rounds: messages that follow one another, each waiting for the one before.
        busiest_bytes: what the rank that carries most sends or receives, whichever is more.
        total_bytes: what all ranks send, together: bytes on the wire.
    """

    rounds: int
    busiest_bytes: float
    total_bytes: float


ALGORITHMS = ("auto", "ring", "tree")
OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "exchange", "send")
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
    """What a collective over `world_size` ranks makes the network do.

    On one rank there is nothing to do. A ring passes N parts around: each rank sends (N-1)/N of the payload,
    an all-reduce twice. A tree needs fewer rounds, up and down about log2 N each, and its inner ranks carry
    more. Gloo differs: its reduce-scatter is an all-reduce inside, its broadcast hands the whole payload down
    a binomial tree, and its reduce is a reduce-scatter whose parts then go to one rank.

    >>> traffic("all_reduce", 100, 4)
    Traffic(rounds=6, busiest_bytes=150.0, total_bytes=600.0)
    >>> [traffic("reduce_scatter", 100, 4, backend=backend).total_bytes for backend in BACKENDS]
    [300.0, 600.0]
    >>> traffic("exchange", 100, 4, shares=[100])       # one rank owns it all, and receives it three times
    Traffic(rounds=1, busiest_bytes=300.0, total_bytes=300.0)

    Args:
        op: one of OPERATIONS. "exchange" is the reduction to owners by pairwise messages, see `shares`.
        nbytes: the payload: the whole tensor. For all_gather what each rank has at the end, for
            reduce_scatter what each rank has before.
        backend: one of BACKENDS.
        algorithm: "ring" or "tree", for NCCL's all-reduce; whatever else there is has one algorithm only.
        shares: for an exchange, the bytes of the payload that each owner owns: it receives them from every
            other rank. They add up to the payload; ranks beyond the last of them own nothing. Even shares
            on all ranks if None.
    Raises:
        ValueError: an operation, backend or algorithm that is unknown, a negative payload, no rank, or
            shares that are not the payload's.
    Source: bus bandwidths of nccl-tests (doc/PERFORMANCE.md); rounds of a ring, and which operations have a
        tree, as in NCCL's own tuning model (src/graph/tuning.cc); Gloo's bytes are counted on each rank's
        connections by tests/ranks/test_wire.py and in chapter 2.
    """
    _check_name("operation", op, OPERATIONS)
    _check_name("backend", backend, BACKENDS)
    if algorithm not in ("ring", "tree"):
        raise ValueError(f"unknown algorithm {algorithm!r}; choose ring or tree.")
    _check_number("a payload's bytes", nbytes, above=False)
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1 rank, got {world_size}.")
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
        sent = s - (min(owned) if len(owned) == n else 0.0)  # by the rank that owns least of it
        return Traffic(1, float(max(sent, max(owned) * (n - 1))), s * (n - 1))
    if op == "all_reduce" or (op == "reduce_scatter" and backend == "gloo"):
        if algorithm == "tree" and backend == "nccl":
            return Traffic(2 * levels, 2 * s, 2 * (n - 1) * s)
        return Traffic(2 * (n - 1), 2 * part, 2 * (n - 1) * s)
    if op in ("reduce_scatter", "all_gather"):
        return Traffic(n - 1, part, (n - 1) * s)
    if op == "reduce" and backend == "gloo":  # a reduce-scatter on a ring; then all send their parts to one
        return Traffic(n, 2 * part, (n - 1) * s + part)
    if op == "broadcast" and backend == "gloo":  # the source sends the whole payload once for each level
        return Traffic(levels, levels * s, (n - 1) * s)
    return Traffic(n - 1, s, (n - 1) * s)


def _check_shares(shares: Sequence[float], nbytes: float, world_size: int) -> None:
    for share in shares:
        _check_number("a share's bytes", share, above=False)
    if len(shares) > world_size:
        raise ValueError(f"{len(shares)} shares for {world_size} ranks: give one for each owner at most.")
    if not math.isclose(sum(shares), nbytes, rel_tol=1e-9):
        raise ValueError(
            f"the shares add up to {sum(shares):g} bytes, the payload has {nbytes:g}: each has one owner."
        )


# ---------------------------------------------------------------------------------------- what there is


@dataclass(frozen=True)
class Link:
    """How a rank reaches another.

    Args:
        latency_us: microseconds that a message takes beside its bytes.
        gb_per_s: 10^9 bytes that a rank can send in a second, while it receives as many.
    Raises:
        ValueError: a latency below 0, or a bandwidth that is not above 0.
    """

    latency_us: float
    gb_per_s: float

    def __post_init__(self) -> None:
        _check_number("a link's latency_us", self.latency_us, above=False)
        _check_number("a link's gb_per_s", self.gb_per_s, above=True)

    def ms(self, rounds: float, nbytes: float) -> float:
        """How long so many messages, one after another, and so many bytes take.

        >>> Link(latency_us=10, gb_per_s=50).ms(rounds=2, nbytes=50e6)
        1.02
        """
        return rounds * self.latency_us / 1e3 + nbytes / (self.gb_per_s * 1e6)


@dataclass(frozen=True)
class Device:
    """What computes one rank's part.

    Args:
        tflops: 10^12 operations a second that it can do at most on the dtype that the model is trained in.
        reached: the share of `tflops` that the model's products are supposed to reach.
        memory_gb: 10^9 bytes of memory; None where it is not known.
        memory_gb_per_s: 10^9 bytes a second that it reads or writes: what an optimizer step is made of.
        overhead_us: microseconds of forward and backward for each parameter tensor, beside its operations.
            Of weight for small models; 0 in the presets, since only a measurement tells.
        update_overhead_us: the same of an optimizer step.
    Raises:
        ValueError: a figure that is not above 0, or `reached` above 1.
    """

    name: str
    tflops: float
    reached: float
    memory_gb: float | None
    memory_gb_per_s: float
    overhead_us: float = 0.0
    update_overhead_us: float = 0.0

    def __post_init__(self) -> None:
        _check_number(f"{self.name}: tflops", self.tflops, above=True)
        _check_number(f"{self.name}: memory_gb_per_s", self.memory_gb_per_s, above=True)
        _check_number(f"{self.name}: overhead_us", self.overhead_us, above=False)
        _check_number(f"{self.name}: update_overhead_us", self.update_overhead_us, above=False)
        if self.memory_gb is not None:
            _check_number(f"{self.name}: memory_gb", self.memory_gb, above=True)
        if not 0 < self.reached <= 1:
            raise ValueError(
                f"{self.name}: reached is a share of the peak, above 0 up to 1, got {self.reached:g}."
            )

    def compute_ms(self, flops: float, tensors: float = 0) -> float:
        """How long so many floating-point operations take, in forward and backward of so many tensors.

        >>> cluster("a100-ib").device.compute_ms(312e12 * 0.45)
        1000.0
        """
        return tensors * self.overhead_us / 1e3 + flops / (self.tflops * self.reached * 1e9)

    def touch_ms(self, nbytes: float, tensors: float = 0) -> float:
        """How long it takes to read or write so many bytes, in an update of so many tensors.

        >>> cluster("a100-ib").device.touch_ms(2039e9)
        1000.0
        """
        return tensors * self.update_overhead_us / 1e3 + nbytes / (self.memory_gb_per_s * 1e6)


class _Span(NamedTuple):
    """On how many nodes a group's ranks lie; on one of them the fewest, on another the most."""

    nodes: int
    fewest: int
    most: int


@lru_cache(maxsize=64)
def _spans(ranks_per_node: int, ranks: int, groups: int) -> frozenset[_Span]:
    """The ways in which so many groups of consecutive ranks lie on nodes."""
    # They come again after as many groups as a node has ranks, or sooner.
    cycle = ranks_per_node // math.gcd(ranks_per_node, ranks)
    return frozenset(
        _span(ranks_per_node, group * ranks % ranks_per_node, ranks) for group in range(min(groups, cycle))
    )


def _span(ranks_per_node: int, first: int, ranks: int) -> _Span:
    """The nodes of consecutive ranks, of which the first sits at this place of its node."""
    on_first = min(ranks_per_node - first, ranks)
    full, on_last = divmod(ranks - on_first, ranks_per_node)
    counts = [on_first] + [ranks_per_node] * min(full, 1) + [on_last] * (on_last > 0)
    return _Span(1 + full + (on_last > 0), min(counts), max(counts))


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of equal devices, a rank on each.

    >>> h100 = cluster("h100-ib")
    >>> round(h100.ms("all_reduce", 1e9, 8), 2), round(h100.ms("all_reduce", 1e9, 64), 2)
    (3.93, 5.1)

    Args:
        device: of each rank.
        ranks_per_node: ranks that `within` joins; more ranks need more nodes.
        within: between two ranks of a node.
        between: between a rank and one of another node: its own share of the node's network.
        backend: whose algorithms: one of BACKENDS.
        shared: all ranks of a node share the bandwidth of `within`, as processes share a machine's
            loopback: then a collective takes the time of all its bytes, not of the busiest rank's.
        overlaps: a rank computes and sends at once. False where both need the same processor cores.
        link_of_op: measured links of single operations, which take the place of `within`.
        source: where the figures come from.
    Raises:
        ValueError: an unknown backend or operation, a node without ranks.
        TypeError: a number of ranks that is not whole, or a yes or no that is something else.
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

    def __post_init__(self) -> None:
        _check_name("backend", self.backend, BACKENDS)
        if not isinstance(self.ranks_per_node, int):
            raise TypeError(f"ranks_per_node must be a whole number, got {self.ranks_per_node!r}.")
        if self.ranks_per_node < 1:
            raise ValueError(f"a node has at least 1 rank, got ranks_per_node={self.ranks_per_node}.")
        for what in ("shared", "overlaps"):
            if not isinstance(getattr(self, what), bool):
                raise TypeError(f"{what} must be True or False, got {getattr(self, what)!r}.")
        for op in self.link_of_op:
            _check_name("operation", op, OPERATIONS)

    def nodes(self, world_size: int) -> int:
        """How many nodes so many ranks fill.

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
    ) -> float:
        """How long a collective takes, if all ranks call it together and the network is free.

        Over several nodes a ring's bytes leave a node through all of its ranks' links to the outside at once,
        so the slower of one rank's inner link and a node's outer links together sets the pace; a last node
        that is not full has fewer of these. Of an exchange, each rank's own bytes pass its own outer link. A
        send then goes to another node.

        Groups of consecutive ranks work at once, each with the links of its own ranks; only a bandwidth that
        a node's ranks share they share too. A group that fits a node stays inside.

        >>> h100 = cluster("h100-ib")
        >>> {name: round(h100.ms("all_reduce", 1e3, 1024, algorithm=name), 3) for name in ALGORITHMS}
        {'auto': 0.182, 'ring': 7.928, 'tree': 0.182}
        >>> h100.ms("all_reduce", 1e9, 1024, ranks=8) == h100.ms("all_reduce", 1e9, 8)
        True

        Args: as `traffic`, and
            algorithm: "auto" takes the faster of ring and tree, as NCCL tries to.
            follows: right behind a call of the same kind. Around NCCL's rings a broadcast or reduce then does
                not wait until the one before has reached the last rank: it adds its bytes and one round.
                That is reasoned, not measured.
            ranks: of a group, where each group makes this call; the time is then that of the slowest. None
                for one call of all ranks.
        Raises:
            ValueError: as `traffic`, or the ranks cannot be divided into such groups.
        Source: a ring through all nodes crosses from each node to the next once; the tree is that of NCCL's
            tuning model (src/graph/tuning.cc).
        """
        _check_name("algorithm", algorithm, ALGORITHMS)
        if ranks is None:
            ranks = world_size
        elif ranks < 1 or world_size % ranks:
            raise ValueError(f"{world_size} ranks cannot be divided into groups of {ranks}.")
        has_tree = self.backend == "nccl" and op == "all_reduce"
        choice = [algorithm] if algorithm != "auto" else ["ring", "tree"] if has_tree else ["ring"]
        loads = {
            one: traffic(op, nbytes, ranks, backend=self.backend, algorithm=one, shares=shares)
            for one in choice
        }
        if follows and self.backend == "nccl" and op in ("broadcast", "reduce"):
            loads = {one: load._replace(rounds=min(load.rounds, 1)) for one, load in loads.items()}
        # Of groups in a node each has its part of a bandwidth that all ranks share.
        at_once = min(self.ranks_per_node, world_size) / ranks if self.shared else None
        return max(
            min(self._ms_of(op, one, load, ranks, span, at_once) for one, load in loads.items())
            for span in _spans(self.ranks_per_node, ranks, world_size // ranks)
        )

    def _ms_of(
        self, op: str, algorithm: str, load: Traffic, ranks: int, span: _Span, at_once: float | None
    ) -> float:
        """How long a collective of a group takes that lies on nodes in this way."""
        inside_bytes = load.busiest_bytes if at_once is None else load.total_bytes * at_once
        within = self.link_of_op.get(op, self.within)
        if op in ("exchange", "send"):
            if span.nodes == 1:
                return within.ms(load.rounds, inside_bytes)
            outside = 1.0 if op == "send" else (ranks - span.fewest) / (ranks - 1)
            return max(
                within.ms(load.rounds, inside_bytes * (1 - outside)),
                self.between.ms(load.rounds, load.busiest_bytes * outside),
            )
        hops_inside, hops_outside = self._hops(op, load.rounds, ranks, algorithm, span)
        inside_ms = within.ms(hops_inside, inside_bytes)
        if span.nodes == 1:
            return inside_ms
        node = Link(self.between.latency_us, self.between.gb_per_s * span.fewest)
        return max(
            inside_ms + node.ms(hops_outside, 0),
            within.ms(hops_inside, 0) + node.ms(hops_outside, load.busiest_bytes),
        )

    def _hops(self, op: str, rounds: int, ranks: int, algorithm: str, span: _Span) -> tuple[float, float]:
        """How many of the messages that follow one another stay in a node, and how many leave one."""
        if rounds and algorithm == "tree" and self.backend == "nccl" and op == "all_reduce":
            # NCCL's tree joins the nodes; the ranks of a node are a chain. Up and down again.
            return 2 * (span.most - 1), 2 * math.ceil(math.log2(span.nodes))
        if not rounds or span.nodes == 1:
            return rounds, 0
        if op == "broadcast" and self.backend == "gloo":  # a tree that crosses nodes first
            outside = math.ceil(math.log2(span.nodes))
            return rounds - outside, outside
        outside_share = span.nodes / ranks  # of the hops of a ring one leaves each node
        return rounds * (1 - outside_share), rounds * outside_share

    def with_links(self, *, latency: float = 1.0, bandwidth: float = 1.0) -> Cluster:
        """The same cluster with every link's latency and bandwidth multiplied.

        >>> cluster("h100-ib").with_links(bandwidth=0.5).between
        Link(latency_us=10.0, gb_per_s=25.0)
        """

        def scaled(link: Link) -> Link:
            return Link(link.latency_us * latency, link.gb_per_s * bandwidth)

        return replace(
            self,
            within=scaled(self.within),
            between=scaled(self.between),
            link_of_op={op: scaled(link) for op, link in self.link_of_op.items()},
        )

    def to_json(self) -> str:
        """As text that `Cluster.from_json` reads."""
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Cluster:
        """A cluster from text, such as `zero-ref calibrate --out` writes.

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
                "ranks_per_node, within and between, as `zero-ref calibrate --out FILE` writes it."
            ) from None
        return made


# ------------------------------------------------------------------------------------------- the presets

# Published shares of the peak are of whole runs, so some waiting is in them already: a time made of them and
# of communication on top is a little too long.
V100 = Device("V100 32 GB", tflops=125, reached=0.35, memory_gb=32, memory_gb_per_s=900)
A100 = Device("A100 80 GB", tflops=312, reached=0.45, memory_gb=80, memory_gb_per_s=2039)
H100 = Device("H100 80 GB", tflops=989, reached=0.40, memory_gb=80, memory_gb_per_s=3350)
RTX4090 = Device("RTX 4090", tflops=165, reached=0.45, memory_gb=24, memory_gb_per_s=1008)
CPU_CORE = Device("one CPU core", tflops=0.1, reached=0.5, memory_gb=None, memory_gb_per_s=8)

# No data sheet states latencies: a few microseconds in a node and some ten between nodes is the order that
# published nccl-tests runs show for small messages. `sensitivity` says where they matter.
_NVLINK_US, _FABRIC_US, _ETHERNET_US, _PCIE_US = 3.0, 10.0, 30.0, 6.0

CLUSTERS: dict[str, Cluster] = {
    each.name: each
    for each in (
        Cluster(
            "h100-ib",
            H100,
            ranks_per_node=8,
            within=Link(_NVLINK_US, 450),
            between=Link(_FABRIC_US, 50),
            source="NVIDIA H100 SXM data sheet: 989 TFLOPS dense bf16, 80 GB, 3.35 TB/s, NVLink 900 GB/s "
            "both ways together; DGX H100: 400 Gb/s InfiniBand for each GPU. Share of the peak: 38 to 43% in "
            "the Llama 3 report (arXiv:2407.21783, table 4).",
        ),
        Cluster(
            "a100-ib",
            A100,
            ranks_per_node=8,
            within=Link(_NVLINK_US, 300),
            between=Link(_FABRIC_US, 25),
            source="NVIDIA A100 80 GB SXM data sheet: 312 TFLOPS dense bf16, 80 GB, 2,039 GB/s, NVLink 600 "
            "GB/s both ways together; DGX A100: 200 Gb/s InfiniBand for each GPU. Share of the peak: 44 to "
            "52% in Narayanan et al. (arXiv:2104.04473, table 1).",
        ),
        Cluster(
            "v100-ib",
            V100,
            ranks_per_node=16,
            within=Link(_NVLINK_US, 150),
            between=Link(_FABRIC_US, 6.25),
            source="The ZeRO paper's cluster (arXiv:1910.02054, section 10): DGX-2 nodes of 16 V100, 800 "
            "Gb/s between nodes, over 30% of the peak. NVIDIA V100 SXM3 data sheet: 125 TFLOPS, 32 GB, 900 "
            "GB/s, NVLink 300 GB/s both ways together.",
        ),
        Cluster(
            "a100-ethernet",
            A100,
            ranks_per_node=8,
            within=Link(_NVLINK_US, 300),
            between=Link(_ETHERNET_US, 6.25),
            source="As a100-ib, with 400 Gb/s of Ethernet for a node's 8 GPUs together: AWS p4de.24xlarge.",
        ),
        Cluster(
            "rtx4090-10gbe",
            RTX4090,
            ranks_per_node=4,
            within=Link(_PCIE_US, 16),
            between=Link(_ETHERNET_US, 0.3125),
            source="NVIDIA Ada whitepaper: 165 TFLOPS dense bf16 with fp32 sums, 24 GB, 1,008 GB/s; PCIe 4.0 "
            "x16 has 32 GB/s each way, of which we suppose half: these cards reach each other through "
            "the host's memory; 10 Gb/s Ethernet for a workstation's four GPUs together. Share of the peak: "
            "supposed.",
        ),
        Cluster(
            "loopback",
            CPU_CORE,
            ranks_per_node=64,
            within=Link(100, 2.5),
            between=Link(100, 2.5),
            backend="gloo",
            shared=True,
            overlaps=False,
            source="Gloo between processes of one machine: a laptop's order of magnitude. `zero-ref "
            "calibrate` measures yours.",
        ),
    )
}
"""Clusters by name. Bandwidths are line rates in one direction: what NCCL reaches is less."""


def cluster(name: str) -> Cluster:
    """A preset by its name.

    Raises:
        ValueError: the name is not in CLUSTERS.
    """
    _check_name("cluster", name, tuple(CLUSTERS))
    return CLUSTERS[name]
