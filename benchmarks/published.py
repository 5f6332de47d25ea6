"""Runs that others published: what was trained, on which machines, how fast and in how much memory.

They lie in `published_runs/`, one file for each source, with the models and the machines that only this
source has, and with what is "usual" for its runs; `shared.json` has the models and machines of several
sources. Only runs that can be simulated are there: no tensor, pipeline or context parallelism. `judged`
holds the simulator against them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from zero_ref.simulator.cluster import CLUSTERS, Cluster, Link
from zero_ref.simulator.configuration import from_config
from zero_ref.simulator.models import GPT2, TRANSFORMERS, Llama, Transformer
from zero_ref.simulator.scenario import Scenario

PLACE = Path(__file__).with_name("published_runs")

SHARED = "shared"
"""The file with the rule, and the models and the machines of several sources."""

FAMILIES: dict[str, type[GPT2] | type[Llama]] = {"GPT2": GPT2, "Llama": Llama}


def use_of(source: str) -> str:
    """Say whether the runs of a source are for fitting, by a rule fixed before any of them was seen.

    A quarter of the sources is for fitting: those where the first digit of the SHA-256 of the key, in
    hexadecimal, is 0, 1, 2 or 3. The files of the first sources say by themselves what each run is for.

    >>> use_of("litgpt"), use_of("torchtune")
    ('test', 'fit')

    Args:
        source: its key, which is the name of its file without the ending.
    """
    return "fit" if hashlib.sha256(source.encode()).hexdigest()[0] in "0123" else "test"


@dataclass(frozen=True)
class Source:
    """The place where runs were published.

    Args:
        kind: of the programs, one of `spread.KINDS`, by what the source says of them.
        read: which part, and what had to be looked up elsewhere.
        commit: of the repository, where it has one.
        added: the month in which the source was entered, before any of its runs was predicted; None for the
            sources that were there before kinds were.
        cause: why figures of the source are off, where they are.
    """

    title: str
    url: str
    kind: str
    read: str
    commit: str | None = None
    added: str | None = None
    cause: str = ""


@dataclass(frozen=True)
class Machines:
    """The machines of a run: a preset, with what is different.

    Args:
        preset: one of `cluster.CLUSTERS`.
        source: of what is different from it.
        device: fields of `device.Device`.
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
        """Make the cluster that the simulator takes.

        >>> Machines("h100-ib", "", between_gb_per_s=12.5).cluster("half the network").between.gb_per_s
        12.5
        """
        preset = CLUSTERS[self.preset]
        between = preset.between
        return replace(
            preset,
            name=name,
            source=self.source,
            device=replace(preset.device, **self.device),
            ranks_per_node=self.ranks_per_node or preset.ranks_per_node,
            between=between
            if self.between_gb_per_s is None
            else Link(between.latency_us, self.between_gb_per_s),
        )


@dataclass(frozen=True)
class Run:
    """One published run.

    >>> run = published().run("titan-8b-8")
    >>> run.tokens, run.time, run.memory_gib
    (16384, {'tokens_per_s_gpu': 5762}, 82.4)
    >>> round(run.tokens_per_s_gpu(published().models[run.model]))
    5762

    Args:
        id: a name of its own.
        source: the key of its source.
        kind: of the program, one of `spread.KINDS`: the source's, unless the run says another.
        use: "test", or "fit time", "fit memory" or "fit" where constants of the simulator may be fitted to
            the time of the run, to its memory, or to both.
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
        memory_of: "allocated" for what is in tensors; "reserved" for what PyTorch's allocator has taken for
            them; "driver" for what the allocator and libraries have taken; "unpooled" for tensors and
            libraries of a program without such an allocator.
        ran: False for a run that ended out of memory.
        supposed: what the source does not say of this run, beside what it does not say of the machines.
        cause: why its figures are off, where that is not the source's cause.
    """

    id: str
    source: str
    kind: str
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
    cause: str = ""

    @property
    def tokens(self) -> int:
        """The tokens of a rank, from one update to the next."""
        return self.batch * self.sequence * self.accumulation

    def tests(self, figure: str) -> bool:
        """Say whether the run's "time" or "memory" may not be used in fitting."""
        return self.use not in ("fit", f"fit {figure}")

    def tokens_per_s_gpu(self, model: Transformer) -> float | None:
        """Give the published time as a rate; None where none was published."""
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

    >>> gpt3 = GPT2(width=12288, depth=96, heads=96, vocabulary=51200, positions=2048)
    >>> round(operations_of_token(gpt3, 2048) / 1e12, 2)
    1.43

    Source: Narayanan et al. (arXiv:2104.04473), equation 3, of a GPT with a head as wide as its vocabulary.
    """
    depth, width = model.depth, model.width
    return 96.0 * depth * width**2 * (1 + sequence / (6 * width) + model.vocabulary / (16 * depth * width))


@dataclass(frozen=True)
class Published:
    """All runs, with the sources, models and clusters that they name.

    Args:
        params: of models whose number of parameters was published, that number.
    """

    sources: Mapping[str, Source]
    models: Mapping[str, Transformer]
    params: Mapping[str, int]
    clusters: Mapping[str, Machines]
    runs: tuple[Run, ...]

    def run(self, name: str) -> Run:
        """Return the run with this id."""
        return {run.id: run for run in self.runs}[name]

    def supposed(self, run: Run) -> tuple[str, ...]:
        """List all that had to be supposed to simulate the run."""
        return (*self.clusters[run.cluster].supposed, *run.supposed)

    def scenario(self, run: Run) -> Scenario:
        """Describe a run as the simulator takes it.

        >>> scenario = published().scenario(published().run("titan-8b-8"))
        >>> scenario.world_size, scenario.batch, scenario.cluster.device.name
        (8, 2, 'H100 96 GB')
        """
        return Scenario(
            self.models[run.model],
            self.clusters[run.cluster].cluster(run.cluster),
            run.ranks,
            batch=run.batch,
            sequence=run.sequence,
            accumulation=run.accumulation,
            checkpointing=run.checkpointing,
            program=run.kind,
            **run.options,
        )


@cache
def published() -> Published:
    """Read all runs in `published_runs/`."""
    files = {path.stem: json.loads(path.read_text("utf-8")) for path in sorted(PLACE.glob("*.json"))}
    models = {name: size for file in files.values() for name, size in file.get("models", {}).items()}
    clusters = {
        name: Machines(**one) for file in files.values() for name, one in file.get("clusters", {}).items()
    }
    sources = {key: file for key, file in files.items() if key != SHARED}
    runs = tuple(
        _run(key, {"kind": file["source"]["kind"], **file.get("usual", {}), **run})
        for key, file in sources.items()
        for run in file["runs"]
    )
    presets = {run.model for run in runs} - models.keys()
    return Published(
        {key: Source(**file["source"]) for key, file in sources.items()},
        {name: _model(size) for name, size in models.items()}
        | {name: TRANSFORMERS[name] for name in presets},
        {name: size["published_params"] for name, size in models.items() if "published_params" in size},
        clusters
        | {name: Machines(name, "the preset") for name in {run.cluster for run in runs} - clusters.keys()},
        runs,
    )


def _model(size: Mapping[str, Any]) -> Transformer:
    if "config" in size:
        return from_config(size["config"])
    sizes = {name: value for name, value in size.items() if name not in ("family", "published_params")}
    return FAMILIES[size["family"]](**sizes)


def _run(key: str, written: Mapping[str, Any]) -> Run:
    """Make a run of the source with this key. A run's options stand beside its other fields."""
    known = {each.name for each in fields(Run)}
    options = {name: value for name, value in written.items() if name not in known}
    own = {name: value for name, value in written.items() if name in known}
    return Run(**{"use": use_of(key), **own, "source": key, "options": options})
