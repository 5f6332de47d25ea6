"""A run that somebody published: what was trained, on which machines, and how fast or in how much memory.

`published` reads them from files, and `validation` holds the simulator against them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, get_type_hints

from zero_ref.simulator._checks import check_name
from zero_ref.simulator._records import checked
from zero_ref.simulator.cluster import Cluster, Link, cluster
from zero_ref.simulator.device import Device
from zero_ref.simulator.models import Transformer

USES = ("fit time", "fit memory", "fit", "test")
"""What a run is for. A constant of the simulator may be fitted to the times of the first, to the memory of
the second and to both of the third; the rest only tests."""

MEMORIES = ("allocated", "reserved", "driver", "unpooled")
"""What is in tensors; what PyTorch's allocator has taken for them; what the driver says is taken: by the
allocator and by libraries; and the same of a program without such an allocator: tensors and libraries."""


TIMES = ("tokens_per_s_gpu", "ms", "tflops")
"""Units of a time: tokens a second a GPU, milliseconds of an iteration, and what each GPU computes with the
operations that are computed again."""


def use_of(source: str) -> str:
    """What the runs of a new source are for, by a rule that was fixed before any was seen.

    A quarter of the sources is for fitting: those where the first digit of the SHA-256 of the key, in
    hexadecimal, is 0, 1, 2 or 3.

    >>> use_of("litgpt"), use_of("torchtune")
    ('test', 'fit')

    Args:
        source: its key, which is the name of its file without the ending.
    """
    return "fit" if hashlib.sha256(source.encode()).hexdigest()[0] in "0123" else "test"


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
        device: fields of `device.Device`.
        ranks_per_node, between_gb_per_s: None as in the preset.
        supposed: what the source does not say.
    Raises:
        ValueError: the preset is unknown, or as `Device`, `Link` and `Cluster`.
    """

    preset: str
    source: str
    device: Mapping[str, Any] = field(default_factory=dict)
    ranks_per_node: int | None = None
    between_gb_per_s: float | None = None
    supposed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        hints = get_type_hints(Device)
        for name, value in self.device.items():
            check_name("field of a device", name, hints)
            checked(hints[name], value, f"device.{name}")
        self.cluster("")  # raises what is wrong

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

    >>> from zero_ref.simulator.published import published
    >>> run = published().run("titan-8b-8")
    >>> run.tokens, run.time, run.memory_gib
    (16384, {'tokens_per_s_gpu': 5762.0}, 82.4)
    >>> round(run.tokens_per_s_gpu(published().models[run.model]))
    5762

    Args:
        id: a name of its own.
        source: the key of its source.
        use: one of USES.
        model, cluster: keys in the same file or in that of shared ones, or names of `models.MODELS` and of
            `cluster.CLUSTERS`.
        batch: sequences that a rank computes in one go.
        sequence: tokens in each.
        accumulation: how often, before an update is made.
        checkpointing: as `Scenario`.
        options: further fields of `Scenario`, which a file has beside the others.
        time: what was published: one of tokens_per_s_gpu, ms (of an iteration) and tflops (of each GPU, with
            the operations that are computed again).
        memory_gib: of the fullest GPU.
        memory_of: whose memory that is: one of MEMORIES.
        ran: False for a run that ended out of memory.
        supposed: what the source does not say of this run, beside what it does not say of the machines.
    Raises:
        ValueError: an unknown use, a time in another unit or in two, a figure that is not above 0, none for a
            run that ran, or one for a run that did not.
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
    options: Mapping[str, Any] = field(default_factory=dict)
    time: Mapping[str, float] | None = None
    memory_gib: float | None = None
    memory_of: str = "reserved"
    ran: bool = True
    supposed: tuple[str, ...] = ()
    note: str = ""

    def __post_init__(self) -> None:
        check_name(f"use of run {self.id}:", self.use, USES)
        check_name(f"memory_of of run {self.id}:", self.memory_of, MEMORIES)
        for unit in self.time or ():
            check_name(f"unit of time of run {self.id}:", unit, TIMES)
        if self.time is not None and len(self.time) != 1:
            raise ValueError(f"run {self.id}: a time has one of {', '.join(TIMES)}, got {len(self.time)}.")
        figures = [*(self.time or {}).values(), *([] if self.memory_gib is None else [self.memory_gib])]
        if any(number <= 0 for number in figures):
            raise ValueError(f"run {self.id}: a time and a memory are above 0, got {min(figures):g}.")
        if bool(figures) != self.ran:
            raise ValueError(
                f"run {self.id} must have a time, or memory_gib, or both."
                if self.ran
                else f"run {self.id} did not run, so it has no time and no memory_gib."
            )

    @property
    def tokens(self) -> int:
        """Of a rank, from one update to the next."""
        return self.batch * self.sequence * self.accumulation

    def tests(self, figure: str) -> bool:
        """Whether the run's "time" or "memory" may not be used in fitting."""
        return self.use not in ("fit", f"fit {figure}")

    def tokens_per_s_gpu(self, model: Transformer) -> float | None:
        """The published time as a rate; None where none was published."""
        if not self.time:
            return None
        ((unit, value),) = self.time.items()
        if unit == "ms":
            return self.tokens / value * 1e3
        if unit == "tflops":
            return value * 1e12 / operations_of_token(model, self.sequence)
        return value


def operations_of_token(model: Transformer, sequence: int) -> float:
    """Floating-point operations for one token where every block is computed twice, as the source counts them.

    >>> from zero_ref.simulator.models import GPT2
    >>> gpt3 = GPT2(width=12288, depth=96, heads=96, vocabulary=51200, positions=2048)
    >>> round(operations_of_token(gpt3, 2048) / 1e12, 2)
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
    models: Mapping[str, Transformer]
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
