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
from typing import Any, NamedTuple


def _check_name(what: str, name: str, known: Sequence[str]) -> None:
    if name not in known:
        raise ValueError(f"unknown {what} {name!r}; choose one of {', '.join(known)}.")


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
OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "exchange", "send")
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
    an all-reduce twice. A tree needs fewer rounds, about log2 N, for as many bytes. Gloo differs: its
    reduce-scatter is an all-reduce inside, and its broadcast hands the whole payload down a binomial tree.

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
        algorithm: "ring" or "tree", for NCCL's all-reduce and broadcast.
        shares: for an exchange, the bytes of the payload that each owner owns: it receives them from every
            other rank. Even shares on all ranks if None.
    Raises:
        ValueError: an operation, backend or algorithm that is unknown, a negative payload, or no rank.
    Source: bus bandwidths of nccl-tests (doc/PERFORMANCE.md); rounds as in NCCL's own tuning model
        (src/graph/tuning.cc); Gloo's bytes were counted by the kernel, see chapter 2 and bench/wire.py.
    """
    _check_name("operation", op, OPERATIONS)
    _check_name("backend", backend, BACKENDS)
    if algorithm not in ("ring", "tree"):
        raise ValueError(f"unknown algorithm {algorithm!r}; choose ring or tree.")
    if nbytes < 0:
        raise ValueError(f"a payload cannot have {nbytes:g} bytes.")
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1 rank, got {world_size}.")
    n, s = world_size, float(nbytes)
    if n == 1 or s == 0:
        return Traffic(0, 0.0, 0.0)
    part, levels = s * (n - 1) / n, math.ceil(math.log2(n))
    if op == "send":
        return Traffic(1, s, s)
    if op == "exchange":
        owned = [float(share) for share in shares or [s / n] * n]
        sent = s - (min(owned) if len(owned) == n else 0.0)  # by the rank that owns least of it
        return Traffic(1, max(sent, max(owned) * (n - 1)), s * (n - 1))
    if op == "all_reduce" or (op == "reduce_scatter" and backend == "gloo"):
        if algorithm == "tree" and backend == "nccl":
            return Traffic(2 * levels, 2 * s, 2 * (n - 1) * s)
        return Traffic(2 * (n - 1), 2 * part, 2 * (n - 1) * s)
    if op in ("reduce_scatter", "all_gather"):
        return Traffic(n - 1, part, (n - 1) * s)
    if backend == "gloo":  # broadcast: the source sends the whole payload once for each level
        return Traffic(levels, levels * s, (n - 1) * s)
    return Traffic(levels if algorithm == "tree" else n - 1, s, (n - 1) * s)


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
        if not (math.isfinite(self.latency_us) and self.latency_us >= 0):
            raise ValueError(f"a latency must be 0 microseconds or more, got {self.latency_us:g}.")
        if not (math.isfinite(self.gb_per_s) and self.gb_per_s > 0):
            raise ValueError(f"a bandwidth must be above 0 GB/s, got {self.gb_per_s:g}.")

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
        reached: the share of `tflops` that training reaches.
        memory_gb: 10^9 bytes of memory; None where it is not known.
        memory_gb_per_s: 10^9 bytes a second that it reads or writes: what an optimizer step is made of.
    """

    name: str
    tflops: float
    reached: float
    memory_gb: float | None
    memory_gb_per_s: float

    def __post_init__(self) -> None:
        for what in ("tflops", "memory_gb_per_s"):
            if not getattr(self, what) > 0:
                raise ValueError(f"{self.name}: {what} must be above 0, got {getattr(self, what):g}.")
        if not 0 < self.reached <= 1:
            raise ValueError(
                f"{self.name}: reached is a share of the peak, above 0 up to 1, got {self.reached:g}."
            )

    def compute_ms(self, flops: float) -> float:
        """How long so many floating-point operations take."""
        return flops / (self.tflops * self.reached * 1e9)

    def touch_ms(self, nbytes: float) -> float:
        """How long it takes to read or write so many bytes."""
        return nbytes / (self.memory_gb_per_s * 1e6)


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of equal devices, a rank on each.

    >>> h100 = cluster("h100-ib")
    >>> round(h100.ms("all_reduce", 1e9, 8), 2), round(h100.ms("all_reduce", 1e9, 64), 2)
    (3.93, 5.08)

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
    """

    name: str
    device: Device
    ranks_per_node: int
    within: Link
    between: Link
    backend: str = "nccl"
    shared: bool = False
    overlaps: bool = True
    link_of_op: Mapping[str, Link] = field(default_factory=dict)
    source: str = ""

    def __post_init__(self) -> None:
        _check_name("backend", self.backend, BACKENDS)
        if self.ranks_per_node < 1:
            raise ValueError(f"a node has at least 1 rank, got {self.ranks_per_node}.")
        for op in self.link_of_op:
            _check_name("operation", op, OPERATIONS)

    def nodes(self, world_size: int) -> int:
        """How many nodes so many ranks fill."""
        return -(-world_size // self.ranks_per_node)

    def ms(
        self,
        op: str,
        nbytes: float,
        world_size: int,
        *,
        algorithm: str = "auto",
        shares: Sequence[float] | None = None,
    ) -> float:
        """How long a collective takes, if all ranks call it together and the network is free.

        Over several nodes a ring's bytes leave a node through all of its ranks' links to the outside at once,
        so the slower of one rank's inner link and a node's outer links together sets the pace. Of an
        exchange, each rank's own bytes pass its own outer link.

        Args: as `traffic`, and
            algorithm: "auto" takes the faster of ring and tree, as NCCL tries to.
        Raises:
            ValueError: as `traffic`.
        """
        _check_name("algorithm", algorithm, ALGORITHMS)
        if algorithm == "auto":
            both = (
                ("ring", "tree")
                if self.backend == "nccl" and op in ("all_reduce", "broadcast")
                else ("ring",)
            )
            return min(self.ms(op, nbytes, world_size, algorithm=one, shares=shares) for one in both)
        load = traffic(op, nbytes, world_size, backend=self.backend, algorithm=algorithm, shares=shares)
        within = self.link_of_op.get(op, self.within)
        nodes = self.nodes(world_size)
        if nodes == 1:
            return within.ms(load.rounds, load.total_bytes if self.shared else load.busiest_bytes)
        if op in ("exchange", "send"):
            outside = 1.0 if op == "send" else (world_size - self.ranks_per_node) / (world_size - 1)
            return max(
                within.ms(load.rounds, load.busiest_bytes * (1 - outside)),
                self.between.ms(load.rounds, load.busiest_bytes * outside),
            )
        # Of the hops of a ring one leaves each node; a tree crosses nodes first, then spreads within them.
        crossing = nodes / world_size
        if algorithm == "tree" or (op == "broadcast" and self.backend == "gloo"):
            crossing = math.ceil(math.log2(nodes)) / math.ceil(math.log2(world_size))
        pace = min(within.gb_per_s, self.between.gb_per_s * self.ranks_per_node)
        latency_us = crossing * self.between.latency_us + (1 - crossing) * within.latency_us
        return Link(latency_us, pace).ms(load.rounds, load.busiest_bytes)

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
            values: dict[str, Any] = json.loads(text)
            return cls(
                **{
                    **values,
                    "device": Device(**values["device"]),
                    "within": Link(**values["within"]),
                    "between": Link(**values["between"]),
                    "link_of_op": {op: Link(**link) for op, link in values.get("link_of_op", {}).items()},
                }
            )
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(
                f"this is no cluster: {type(error).__name__}: {error}. It takes JSON with name, device, "
                "ranks_per_node, within and between, as `zero-ref calibrate --out FILE` writes it."
            ) from None


# ------------------------------------------------------------------------------------------- the presets

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
            "both ways together; DGX H100: 400 Gb/s InfiniBand for each GPU. Share of the peak: 38 to 43% in the "
            "Llama 3 report (arXiv:2407.21783, table 4).",
        ),
        Cluster(
            "a100-ib",
            A100,
            ranks_per_node=8,
            within=Link(_NVLINK_US, 300),
            between=Link(_FABRIC_US, 25),
            source="NVIDIA A100 80 GB SXM data sheet: 312 TFLOPS dense bf16, 80 GB, 2,039 GB/s, NVLink 600 "
            "GB/s both ways together; DGX A100: 200 Gb/s InfiniBand for each GPU. Share of the peak: 44 to 52% "
            "in Narayanan et al. (arXiv:2104.04473, table 1).",
        ),
        Cluster(
            "v100-ib",
            V100,
            ranks_per_node=16,
            within=Link(_NVLINK_US, 150),
            between=Link(_FABRIC_US, 6.25),
            source="The ZeRO paper's cluster (arXiv:1910.02054, section 10): DGX-2 nodes of 16 V100, 800 "
            "Gb/s between nodes, over 30% of the peak. NVIDIA V100 SXM3 data sheet: 125 TFLOPS, 32 GB, 900 GB/s, "
            "NVLink 300 GB/s both ways together.",
        ),
        Cluster(
            "a100-ethernet",
            A100,
            ranks_per_node=8,
            within=Link(_NVLINK_US, 300),
            between=Link(_ETHERNET_US, 6.25),
            source="As a100-ib, with 400 Gb/s of Ethernet for a node's 8 GPUs together, as AWS p4d.24xlarge.",
        ),
        Cluster(
            "rtx4090-10gbe",
            RTX4090,
            ranks_per_node=4,
            within=Link(_PCIE_US, 32),
            between=Link(_ETHERNET_US, 0.3125),
            source="NVIDIA Ada whitepaper: 165 TFLOPS dense bf16 with fp32 sums, 24 GB, 1,008 GB/s; PCIe 4.0 "
            "x16, 32 GB/s each way; 10 Gb/s Ethernet for a workstation's four GPUs together.",
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
