"""Chapter 16's graders: a design and its bill, the last doubling that helps.

`Job`, `Design` and `bill_of` are for readers too: the limits of a run, the reader's choices, their cost.
`as_first_priced` gives the prediction of the simulator's first version.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from zero_ref.simulator import spread
from zero_ref.simulator.activations import CHECKPOINTING
from zero_ref.simulator.cluster import Cluster, cluster
from zero_ref.simulator.models import GPT2, MODELS, Architecture
from zero_ref.simulator.play import play
from zero_ref.simulator.recipe import RECIPES
from zero_ref.simulator.scenario import Scenario, SimulatedRun
from zero_ref_course import Answer, exercise, shown
from zero_ref_course.predictions import prediction

# ------------------------------------------------------------------------------- the first version's prices

SHARES = {"H100": 0.40, "A100": 0.45}
"""The speed of a GPU's kernels in the first version: the share of the peak that whole published runs reach.
Sources: arXiv:2407.21783, table 4 (38 to 43%); arXiv:2104.04473, table 1 (44 to 52%)."""


FIRST_GB = {"titan-8b-8": 95.8, "titan-8b-8-32k": 48.0}
"""The first version's prediction of the memory of two published runs, in 10^9 bytes. It counted activations
by another formula, which is gone."""


@dataclass(frozen=True)
class KnownRun:
    """A published run under stage 3, with its published time and memory.

    Args:
        tokens_per_s_gpu: None where no time was published.
        memory_gib: the memory reserved by the allocator of the fullest GPU; None where it was not published.
    """

    scenario: Scenario
    tokens_per_s_gpu: float | None = None
    memory_gib: float | None = None

    @property
    def ranks(self) -> int:
        """The number of GPUs that trained together."""
        return self.scenario.world_size

    @property
    def tokens(self) -> int:
        """The tokens of a rank in one iteration."""
        return self.scenario.batch * self.scenario.tokens_of_sequence


def with_one_share(machines: Cluster, reached: float) -> Cluster:
    """Return machines that compute everything at one share of the peak, with links at the data sheet's rate.

    >>> one = with_one_share(cluster("h100-ib"), 0.4)
    >>> one.device.reached, one.within.reached, one.device.memory_reached
    (0.4, 1.0, None)
    """
    device = replace(
        machines.device, reached=reached, product_passes=0.0, attention_reached=None, memory_reached=None
    )
    within, between = (replace(link, reached=1.0) for link in (machines.within, machines.between))
    return replace(machines, device=device, within=within, between=between)


def as_first_priced(run: KnownRun) -> SimulatedRun:
    """Price a published run as the first version of this simulator did.

    >>> round(as_first_priced(RUNS["titan-8b-8"]).tokens_per_second / 8)
    6425

    Raises:
        ValueError: the run's GPU is not in SHARES.
    """
    usual = run.scenario
    name = usual.cluster.device.name
    share = next((share for known, share in SHARES.items() if known in name), None)
    if share is None:
        raise ValueError(f"the run's GPU is {name}; the first version has shares for {', '.join(SHARES)}.")
    return Scenario(
        usual.architecture,
        with_one_share(usual.cluster, share),
        run.ranks,
        batch=usual.batch,
        sequence=usual.tokens_of_sequence,
        checkpointing="full" if usual.checkpointing == "full" else "none",  # it knew no other way
    ).run("zero-3")


# ------------------------------------------------------------------------------------------ published runs

_H100 = cluster("h100-ib")
H100_96 = replace(
    _H100, device=replace(_H100.device, name="H100 96 GB", memory_gb=102.0, memory_gb_per_s=2400)
)
"""The machines of torchtitan's runs on H100: 96 GB of HBM2e at 2.4 TB/s."""

GPT_175B = GPT2(width=12288, depth=96, heads=96, vocabulary=51200, positions=2048)

OPERATIONS_OF_TOKEN = 96 * 96 * 12288**2 * (1 + 2048 / (6 * 12288) + 51200 / (16 * 96 * 12288))
"""Operations for a token of GPT_175B where every block is computed twice: equation 3 of arXiv:2104.04473."""


def _titan(
    model: Architecture,
    ranks: int,
    machines: Cluster,
    *,
    batch: int = 1,
    length: int = 8192,
    checkpointing: str = "by-operation",
    **options: Any,
) -> Scenario:
    """A run of torchtitan: gradients are reduced in 32 bits, and keys and values copied for every head."""
    return Scenario(
        model,
        machines,
        ranks,
        batch=batch,
        sequence=length,
        checkpointing=checkpointing,
        reduce_dtype="float32",
        update="foreach",
        repeated_kv=True,
        **options,
    )


def _narayanan(ranks: int, batch: int, tflops: float) -> KnownRun:
    run = Scenario(
        GPT_175B,
        cluster("a100-ib"),
        ranks,
        batch=batch,
        sequence=2048,
        dtype="float16",
        checkpointing="full",
        program="deepspeed",
    )
    return KnownRun(run, tflops * 1e12 / OPERATIONS_OF_TOKEN)


_A100, _8B = cluster("a100-ib"), MODELS["llama3-8b"]

RUNS = {
    "titan-8b-8": KnownRun(_titan(_8B, 8, H100_96, batch=2, norms="by-hand"), 5762, 82.4),
    "titan-a100-8b-op": KnownRun(_titan(_8B, 64, _A100), 2973),
    "titan-a100-70b-full": KnownRun(_titan(MODELS["llama3-70b"], 64, _A100, checkpointing="full"), 331),
    "gpt-175b-384": _narayanan(384, 4, 144),
    "gpt-175b-768": _narayanan(768, 2, 88),
    "gpt-175b-1536": _narayanan(1536, 1, 44),
    "titan-8b-8-32k": KnownRun(
        _titan(_8B, 8, H100_96, length=32_768, checkpointing="full", compiled=True, norms="by-hand"),
        memory_gib=83.9,
    ),
}
"""Seven of the runs in `benchmarks/published_runs`, which names their sources."""

SIX = tuple(name for name, run in RUNS.items() if run.tokens_per_s_gpu is not None)
"""Published runs that the first version priced."""


# --------------------------------------------------------------------------------------------- the link

LATENCY_TOLERANCE, BANDWIDTH_TOLERANCE = 0.2, 0.15
"""Three repeats of nine sizes with 4% of noise leave a few percent open; a method that is misled misses by
more than half."""


# ----------------------------------------------------------------------------------------- the design


@dataclass(frozen=True)
class Job:
    """A run that somebody wants: each iteration trains on so many sequences, divided among the ranks.

    Args:
        model: one of `models.MODELS`.
        cluster: one of `cluster.CLUSTERS`; as many of its GPUs as you like.
        sequences: of one iteration, on all ranks together.
        length: the tokens of each sequence.
        longest_s: the most seconds of an iteration.
        most_gpu_hours: the most GPU-hours of an iteration: ranks times hours.
    """

    model: str
    cluster: str
    sequences: int
    length: int
    longest_s: float
    most_gpu_hours: float


@dataclass(frozen=True)
class Design:
    """Your choices for a job.

    Args:
        ranks: a divisor of the job's sequences.
        strategy: one of DESIGNED.
        checkpointing: one of `activations.CHECKPOINTING`.
        prefetch: the number of blocks by which stage 3 gathers parameters ahead.
    """

    ranks: int
    strategy: str
    checkpointing: str = "none"
    prefetch: int = 1


@dataclass(frozen=True)
class Bill:
    """The cost of a design.

    Args:
        fits: None if that is undecided: the device's memory lies in the interval around the prediction.
    """

    memory_gb: float
    fits: bool | None
    step_s: float
    gpu_hours: float


DESIGNED = ("ddp", "zero-even", "zero-2", "zero-3")


def bill_of(job: Job, design: Design) -> Bill:
    """Memory, time and GPU-hours of an iteration. A second or so for a trillion parameters.

    >>> job = Job("llama3-8b", "h100-ib", sequences=64, length=2048, longest_s=9, most_gpu_hours=1)
    >>> bill = bill_of(job, Design(64, "zero-3", "full"))
    >>> bill.fits, bill.gpu_hours == 64 * bill.step_s / 3600
    (True, True)

    Raises:
        ValueError: a field of the design is wrong, or a rank gets no sequence.
    """
    _check_design(job, design)
    run = Scenario(
        MODELS[job.model],
        cluster(job.cluster),
        design.ranks,
        batch=job.sequences // design.ranks,
        sequence=job.length,
        checkpointing=design.checkpointing,
        prefetch=design.prefetch,
    ).run(design.strategy)
    step_s = run.iteration_ms / 1e3
    return Bill(run.peak_bytes / 1e9, run.fits, step_s, design.ranks * step_s / 3600)


def _check_design(job: Job, design: Design) -> None:
    if design.strategy not in DESIGNED or design.checkpointing not in CHECKPOINTING:
        raise ValueError(
            f"{design}: strategy is one of {', '.join(DESIGNED)}, checkpointing one of "
            f"{', '.join(CHECKPOINTING)}."
        )
    if not isinstance(design.ranks, int) or design.ranks < 1 or design.prefetch not in (0, 1, 2):
        raise ValueError(f"{design}: ranks is a whole number of 1 or more, prefetch 0, 1 or 2.")
    if job.sequences % design.ranks:
        raise ValueError(
            f"{job.sequences:,} sequences cannot be divided among {design.ranks:,} ranks: each takes whole "
            "sequences, as many as the others."
        )


JOBS = (
    Job("zero-1t", "h200-ib", sequences=1024, length=2048, longest_s=70, most_gpu_hours=12),
    Job("llama3-70b", "a100-ethernet", sequences=1024, length=2048, longest_s=30, most_gpu_hours=2.5),
)
"""A trillion parameters, for which one number of ranks keeps all limits; 70 billion on a slow network."""


@exercise("scale.design", seconds=60)
def design(answer: Answer) -> str:
    """Check for ranks, strategy, checkpointing and prefetch that fit in memory, in time and in a budget."""
    bills = []
    for job in JOBS:
        chosen = answer(job)
        call = f"{answer.name}({job.model} on {job.cluster}) returned {shown(chosen)}"
        assert isinstance(chosen, Design), f"{call}. Return a Design."
        try:
            bill = bill_of(job, chosen)
        except ValueError as error:
            raise AssertionError(f"{call}. {error}") from None
        _check_bill(f"{call}:", job, chosen, bill)
        bills.append(f"{job.model} on {chosen.ranks:,} ranks, {bill.memory_gb:.0f} GB, {bill.step_s:.0f} s")
    return "; ".join(bills)


def _check_bill(call: str, job: Job, chosen: Design, bill: Bill) -> None:
    if bill.fits is not True:
        room = cluster(job.cluster).device.memory_gb or math.inf
        why = "More ranks hold less each."
        if RECIPES[chosen.strategy].stage < 3:
            why = "Stages before the third keep all parameters on every rank."
        elif chosen.checkpointing != "full" and bill_of(job, replace(chosen, checkpointing="full")).fits:
            why = "Activations do not shrink when state is divided. Checkpointing helps."
        verdict = "it does not fit in memory" if bill.fits is False else "whether it fits is undecided"
        least, most = (nbytes / 1e9 for nbytes in spread.MEMORY.around(bill.memory_gb * 1e9))
        raise AssertionError(
            f"{call} {verdict}. A rank needs {bill.memory_gb:,.1f} GB by prediction, {least:,.0f} to "
            f"{most:,.0f} GB with its error, and has {room:.1f} GB. {why}"
        )
    assert bill.step_s <= job.longest_s, (
        f"{call} it is too slow. An iteration takes {bill.step_s:.1f} s, "
        f"{bill.step_s - job.longest_s:.1f} s more than the {job.longest_s:g} s allowed. With more ranks "
        "each computes less."
    )
    assert bill.gpu_hours <= job.most_gpu_hours, (
        f"{call} it costs too much. An iteration takes {bill.gpu_hours:.2f} GPU-hours, "
        f"{bill.gpu_hours / job.most_gpu_hours - 1:.0%} over the {job.most_gpu_hours:g} allowed. GPUs that "
        "wait for the network are paid too: with fewer ranks, or prefetching, less is exposed."
    )


# -------------------------------------------------------------------------------- one doubling too many

CASES = (("gpt2-xl", "h100-ib", 1024), ("gpt2-xl", "a100-ethernet", 1024), ("gpt2", "rtx4090-10gbe", 512))
"""Models, clusters, and the sequences of an iteration."""


@exercise("scale.largest_number_that_helps", seconds=60)
def largest_number_that_helps(answer: Answer) -> str:
    """Check the last number of ranks in 1, 2, 4 ... that shortens an iteration with divided sequences."""
    for model, name, sequences in CASES:
        scenario = Scenario(MODELS[model], cluster(name), 1)
        times = {n: step_ms(scenario, n, sequences // n) for n in _powers(sequences)}
        right = _last_that_helps(times)
        chosen = answer(scenario, sequences)
        call = f"{answer.name}({model}, {name}, {sequences:,} sequences) returned {shown(chosen)}"
        assert chosen in times, f"{call}. Return one of 1, 2, 4 ... {sequences:,}."
        if chosen == right:
            continue
        weak = {n: step_ms(scenario, n, sequences) for n in _powers(sequences)}
        assert chosen != min(weak, key=lambda n: weak[n]), (
            f"{call}. With a fixed number of sequences on each rank no more ranks make an iteration shorter. "
            "Here the sequences are divided: each of N ranks computes 1/N of them."
        )
        if chosen > right:
            raise AssertionError(
                f"{call}: {times[chosen]:.1f} ms an iteration, and {right:,} ranks take {times[right]:.1f} "
                "ms. The last doubling saved less than a tenth: there is hardly anything left to "
                "compute, and each message passes through more ranks."
            )
        raise AssertionError(
            f"{call}: {times[chosen]:.1f} ms an iteration. Twice as many ranks take {times[2 * chosen]:.1f} "
            "ms, at least a tenth less, so adding GPUs still helps, though they wait more and more."
        )
    return ", ".join(f"{model} on {name}" for model, name, _ in CASES)


def step_ms(scenario: Scenario, ranks: int, batch: int) -> float:
    """Milliseconds of an iteration under zero-even, without looking at memory.

    >>> scenario = Scenario(MODELS["gpt2"], cluster("h100-ib"), 1)
    >>> step_ms(scenario, 8, batch=1) < step_ms(scenario, 8, batch=2)
    True
    """
    one = replace(scenario, world_size=ranks, batch=batch)
    return play(one.schedule("zero-even"), one.cluster, one.workload_of("zero-even")).iteration_ms


def _powers(most: int) -> list[int]:
    return [2**power for power in range(most.bit_length()) if 2**power <= most]


def _last_that_helps(times: dict[int, float]) -> int:
    best = 1
    while 2 * best in times and times[2 * best] <= 0.9 * times[best]:
        best *= 2
    return best


# --------------------------------------------------------------------------------------- predictions


@prediction(
    "scale.furthest",
    "Which of the six answers of the simple estimate is furthest off?",
    choices=SIX,
)
def _furthest() -> str:
    def off(name: str) -> float:
        run = RUNS[name]
        rate = as_first_priced(run).tokens_per_second / run.ranks
        return abs(math.log(rate / (run.tokens_per_s_gpu or rate)))

    return max(SIX, key=off)


@prediction(
    "scale.trillion",
    "The trillion under stage 3, on 1,024 GPUs: does it fit?",
    choices=("fits", "undecided", "does not fit"),
)
def _trillion_fits() -> str:
    trillion = Scenario(
        MODELS["zero-1t"], cluster("h100-ib"), 1024, batch=1, sequence=2048, checkpointing="full"
    )
    return {True: "fits", None: "undecided", False: "does not fit"}[trillion.run("zero-3").fits]


@prediction(
    "scale.latency",
    "GPT-2 XL under stage 3, 1,024 ranks, four times the latency: how many times as long is an iteration?",
    unit="times",
)
def _four_times_the_latency() -> float:
    lean = Scenario(MODELS["gpt2-xl"], cluster("h100-ib"), 1024, batch=1, sequence=1024)
    late = replace(lean, cluster=lean.cluster.with_links(latency=4))
    return late.run("zero-3").iteration_ms / lean.run("zero-3").iteration_ms
