"""Runs that others published: what was trained, on which machines, and how fast or in how much memory.

They lie in `published.json`, each with its source. Only data-parallel and fully sharded runs are there:
tensor, pipeline, context and expert parallelism are not simulated. `validation` holds the simulator against
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from zero_ref.simulator._checks import check_name
from zero_ref.simulator._records import read_json, record
from zero_ref.simulator.cluster import Cluster, Link, cluster
from zero_ref.simulator.models import GPT2, Llama

USES = ("fit time", "fit memory", "test")
"""What a run is for. A constant of the simulator may be fitted to the times of the first and to the memory of
the second; the rest only tests."""

MEMORIES = ("allocated", "reserved", "unpooled")
"""What is in tensors; what PyTorch's allocator has taken for them; and what the driver says is taken by a
program that has no such allocator: tensors and libraries."""

FAMILIES: dict[str, type[GPT2] | type[Llama]] = {"GPT2": GPT2, "Llama": Llama}

PLACE = Path(__file__).with_name("published.json")


@dataclass(frozen=True)
class Source:
    """Where runs were published.

    Args:
        read: which part, and what had to be looked up elsewhere.
        commit: of the repository, where it has one.
    """

    title: str
    url: str
    read: str
    commit: str | None = None


@dataclass(frozen=True)
class Machines:
    """What the runs ran on: a preset, with what is different.

    Args:
        preset: one of `cluster.CLUSTERS`.
        source: of what is different from it.
        device: fields of `cluster.Device`.
        ranks_per_node, between_gb_per_s: None as in the preset.
        supposed: what the source does not say.
    """

    preset: str
    source: str
    device: Mapping[str, Any] = field(default_factory=dict)
    ranks_per_node: int | None = None
    between_gb_per_s: float | None = None
    supposed: tuple[str, ...] = ()

    def cluster(self, name: str) -> Cluster:
        """As the simulator takes it.

        >>> Machines("h100-ib", "", between_gb_per_s=12.5).cluster("half the network").between.gb_per_s
        12.5
        """
        made = replace(cluster(self.preset), name=name, source=self.source)
        if self.device:
            made = replace(made, device=replace(made.device, **self.device))
        if self.ranks_per_node is not None:
            made = replace(made, ranks_per_node=self.ranks_per_node)
        if self.between_gb_per_s is not None:
            made = replace(made, between=Link(made.between.latency_us, self.between_gb_per_s))
        return made


@dataclass(frozen=True)
class Run:
    """One published run.

    >>> run = published().run("titan-8b-8")
    >>> run.tokens, run.time, run.memory_gib
    (16384, {'tokens_per_s_gpu': 5762.0}, 82.4)
    >>> round(run.tokens_per_s_gpu(published().models[run.model]))
    5762

    Args:
        id: a name of its own.
        source, model, cluster: keys in the same file.
        use: one of USES.
        batch: sequences that a rank computes in one go.
        sequence: tokens in each.
        accumulation: how often, before an update is made.
        checkpointing, strategy, dtype, masters, no_sync, reduce_dtype, bucket_view, compiled, fused_loss,
            shard_group: as `Scenario`. A run without DDP, whose gradients lie once, has a `bucket_view`.
        time: what was published: one of tokens_per_s_gpu, ms (of an iteration) and tflops (of each GPU, with
            the operations that are computed again).
        memory_gib: of the fullest GPU.
        memory_of: whose memory that is: one of MEMORIES.
        ran: False for a run that ended out of memory.
        supposed: what the source does not say of this run, beside what it does not say of the machines.
    Raises:
        ValueError: an unknown use, or a time in another unit.
    """

    id: str
    source: str
    use: str
    model: str
    cluster: str
    ranks: int
    sequence: int
    checkpointing: str
    strategy: str = "zero-3"
    batch: int = 1
    accumulation: int = 1
    dtype: str = "bfloat16"
    masters: bool = True
    no_sync: bool = False
    reduce_dtype: str | None = None
    bucket_view: bool = False
    compiled: bool = False
    fused_loss: bool = False
    shard_group: int | None = None
    time: Mapping[str, float] | None = None
    memory_gib: float | None = None
    memory_of: str = "reserved"
    ran: bool = True
    supposed: tuple[str, ...] = ()
    note: str = ""

    def __post_init__(self) -> None:
        check_name("use", self.use, USES)
        check_name("memory", self.memory_of, MEMORIES)
        for unit in self.time or ():
            check_name("unit of time", unit, ("tokens_per_s_gpu", "ms", "tflops"))

    @property
    def tokens(self) -> int:
        """Of a rank, from one update to the next."""
        return self.batch * self.sequence * self.accumulation

    def tests(self, figure: str) -> bool:
        """Whether the run's "time" or "memory" may not be used in fitting."""
        return self.use != f"fit {figure}"

    def tokens_per_s_gpu(self, model: GPT2 | Llama) -> float | None:
        """The published time as a rate; None where none was published."""
        if not self.time:
            return None
        ((unit, value),) = self.time.items()
        if unit == "ms":
            return self.tokens / value * 1e3
        if unit == "tflops":
            return value * 1e12 / operations_of_token(model, self.sequence)
        return value


def operations_of_token(model: GPT2 | Llama, sequence: int) -> float:
    """Floating-point operations for one token where every block is computed twice, as the source counts them.

    >>> published().models["megatron-175b"].width
    12288
    >>> round(operations_of_token(published().models["megatron-175b"], 2048) / 1e12, 2)
    1.43

    Source: Narayanan et al. (arXiv:2104.04473), equation 3, of a GPT with a head as wide as its vocabulary.
    """
    depth, width = model.depth, model.width
    return 96.0 * depth * width**2 * (1 + sequence / (6 * width) + model.vocabulary / (16 * depth * width))


@dataclass(frozen=True)
class Published:
    """All runs, with what they name.

    Args:
        rule: how the runs for fitting were chosen.
        params: of models whose number of parameters was published, that number.
    """

    rule: str
    sources: Mapping[str, Source]
    models: Mapping[str, GPT2 | Llama]
    params: Mapping[str, int]
    clusters: Mapping[str, Machines]
    runs: tuple[Run, ...]

    def run(self, name: str) -> Run:
        """The run with this id.

        Raises:
            ValueError: there is none.
        """
        by_name = {run.id: run for run in self.runs}
        check_name("run", name, by_name)
        return by_name[name]

    def supposed(self, run: Run) -> tuple[str, ...]:
        """All that had to be supposed to simulate the run."""
        return self.clusters[run.cluster].supposed + run.supposed


@lru_cache(maxsize=1)
def published() -> Published:
    """What is in published.json."""
    values = read_json(PLACE)
    sizes = {name: dict(size) for name, size in values["models"].items()}
    params = {
        name: size.pop("published_params") for name, size in sizes.items() if "published_params" in size
    }
    return Published(
        values["rule"],
        {name: record(Source, each, name) for name, each in values["sources"].items()},
        {name: record(FAMILIES[size.pop("family")], size, name) for name, size in sizes.items()},
        params,
        {name: record(Machines, each, name) for name, each in values["clusters"].items()},
        tuple(record(Run, each, each["id"]) for each in values["runs"]),
    )
