"""The simulator's prediction of a run, as JSON and as a table, for `zero-ref simulate` and for dry runs."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from zero_ref.lab._arguments import short as shortened
from zero_ref.live.numbers import short, short_count
from zero_ref.simulator import spread
from zero_ref.simulator._records import read_json
from zero_ref.simulator.bill import Bill
from zero_ref.simulator.cluster import CLUSTERS, Cluster
from zero_ref.simulator.ledger import format_bytes
from zero_ref.simulator.options import values_of
from zero_ref.simulator.peak import share_reserved
from zero_ref.simulator.recipe import LOCAL_SGD
from zero_ref.simulator.scenario import Scenario, SimulatedRun
from zero_ref.simulator.sensitivity import SWITCH
from zero_ref.simulator.traced import Traced

MFU_COUNTS = (
    "6 operations for each token and each parameter that it goes through, and those of attention over whole "
    "sequences, as if nothing were masked; of a traced model, those of its products and of attention; what "
    "is computed again does not count"
)
"""The operations in model FLOPs utilisation, in words. Source: PaLM (arXiv:2204.02311), appendix B."""

BETTER = {
    "latency": "half the latency",
    "bandwidth within nodes": "twice the bandwidth within nodes",
    "bandwidth between nodes": "twice the bandwidth between nodes",
    "compute": "computing twice as fast",
    "memory bandwidth": "twice the memory bandwidth",
    "share of links": "links at their full rate",
    "share of products": "matrix products at the peak",
    "share of attention": "attention twice as close to the peak",
    "share of memory": "kernels at the full memory bandwidth",
    SWITCH: "all-reduces added in the switch (NVLS)",
    "even pace": "no rank slower than the others",
}

NOT_MODELLED = ("tensor", "pipeline", "context")
"""The kinds of parallelism that could make a model fit, and of which nothing is known here."""

PHASES_IN_WORDS = {
    "forward": "after forward",
    "loss": "at the loss",
    "backward": "in backward",
    "last block": "in backward's last block",
    "reduction": "after backward",
    "step": "in the step",
    "sending": "while sending",
}
"""The phases of `peak.PHASES`, as the table has them."""

FITS = {True: "fits", False: "does not fit", None: "undecided"}

LABELS = (
    "forward", "gather", "backward", "reduce", "step", "broadcast", "agree",
    "average",
)  # fmt: skip
"""The labels of operations, in the order in which they are printed."""


def cluster_named(name: str) -> Cluster:
    """A preset, or the cluster in a file of JSON.

    Raises:
        ValueError: it is neither; the message begins with `--cluster`.
    """
    if name in CLUSTERS:
        return CLUSTERS[name]
    if not os.path.isfile(name):
        raise ValueError(
            f"--cluster {shortened(name)}: choose one of {', '.join(CLUSTERS)}, or a file "
            "with a cluster in JSON, as `Cluster.to_json` gives it."
        )
    try:
        values = read_json(name)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--cluster {name} cannot be read: {getattr(error, 'strerror', None) or error}."
        ) from None
    try:
        return Cluster.from_json(json.dumps(values))
    except ValueError as error:
        raise ValueError(f"--cluster {name}: {error}") from None


def as_json(
    named: str, scenario: Scenario, runs: Sequence[SimulatedRun], bill: Bill | None = None
) -> dict[str, Any]:
    """Return the JSON of `zero-ref simulate --json`: bytes and milliseconds of one iteration.

    Args:
        bill: of the whole training; None if nobody asked for it.
    """
    device = scenario.cluster.device
    return {
        "model": named,
        "elements": scenario.numel,
        "active_elements": scenario.active,
        "trained_elements": scenario.trained_numel,
        "not_counted": list(scenario.missing),
        "tensors": len(scenario.params),
        "ranks": scenario.world_size,
        "cluster": scenario.cluster.name,
        "device": device.name,
        "device_memory_bytes": None if device.memory_gb is None else device.memory_gb * 1e9,
        **values_of(scenario),
        "sequence": scenario.tokens_of_sequence,
        "attention_share": scenario.attention_share,
        "not_modelled": list(NOT_MODELLED),
        "strategies": {run.strategy: _run_as_json(run, bill) for run in runs},
    }


def _run_as_json(run: SimulatedRun, bill: Bill | None) -> dict[str, Any]:
    return {
        "fullest_rank": run.fullest,
        "memory_bytes": run.memory.items,
        "memory_total_bytes": run.memory.total_bytes,
        "memory_total_bytes_of_rank": [memory.total_bytes for memory in run.memories],
        "memory_phase_bytes": dict(run.memory.phase_bytes),
        "memory_allocated_bytes": run.memory.allocated_bytes,
        "memory_reserved_bytes": run.memory.reserved_bytes,
        "memory_peak_bytes": run.peak_bytes,
        "memory_peak_interval_bytes": list(run.memory_interval),
        "memory_peak_phase": run.memory.phase,
        "memory_peak_items_bytes": dict(run.memory.peak_items),
        "memory_peak_bytes_of_rank": [memory.peak_bytes for memory in run.memories],
        "memory_host_bytes": run.memory.host_bytes,
        "fits": run.fits,
        "sent_bytes_per_rank": run.sent_bytes,
        "calls": run.calls,
        "iteration_ms": run.iteration_ms,
        "iteration_interval_ms": list(run.time_interval),
        "exposed_communication_ms": run.exposed_ms,
        "idle_ms": run.idle_ms,
        "busy_ms": run.busy_ms,
        "critical_path_ms": dict(run.what_if.critical_ms),
        "computing_ms": run.computing_ms,
        "iteration_ms_if": {BETTER[name]: ms for name, ms in run.what_if.improved_ms.items()},
        "tokens_per_second": run.tokens_per_second,
        "model_flops_utilisation": run.utilisation,
        "model_flops_utilisation_counts": MFU_COUNTS,
        **_bill_as_json(run, bill),
    }


def _bill_as_json(run: SimulatedRun, bill: Bill | None) -> dict[str, Any]:
    if bill is None:
        return {}
    return bill.values(run.tokens_per_second, run.schedule.world_size, run.scenario.program)


def print_runs(
    named: str,
    scenario: Scenario,
    runs: Sequence[SimulatedRun],
    width: int | None = None,
    bill: Bill | None = None,
) -> None:
    """Print a table and notes.

    Args:
        bill: of the whole training; None if nobody asked for it.
        width: columns; None for those of the terminal.
    """
    from rich.console import Console
    from rich.table import Table

    console = Console(width=width, highlight=False)
    if runs and all(run.fits is False for run in runs):
        console.print(f"does not fit, and {in_words(NOT_MODELLED)} are not modelled")
    print_heading(console, named, scenario)
    console.print(
        f"{_parameters(scenario)}, {scenario.optimizer}; on each rank "
        f"{'' if scenario.accumulation == 1 else f'{scenario.accumulation:,} x '}{scenario.batch:,} x "
        f"{scenario.tokens_of_sequence:,} tokens\n"
    )
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("one iteration")
    for run in runs:
        table.add_column(run.strategy, justify="right")
    for label, values, style in _rows(runs, bill):
        table.add_row(label, *values, style=style)
    console.print(table)
    console.print()
    for line in _notes(scenario, runs):
        console.print(line, markup=False)


def _parameters(scenario: Scenario) -> str:
    """Describe the number of parameters, and the formats of computation."""
    words = [f"{scenario.numel:,} {scenario.dtype} parameters"]
    if scenario.autocast:
        words[0] += f" under autocast to {scenario.autocast}"
    if scenario.fp8:
        words.append("products of blocks in FP8")
    if scenario.active != scenario.numel:
        words.append(f"{scenario.active:,} for a token")
    if scenario.trained_numel < scenario.numel:
        words.append(f"{scenario.trained_numel:,} of them trained")
    return ", ".join(words)


def print_heading(console: Any, named: str, scenario: Scenario) -> None:
    """Print the model, the ranks and the cluster."""
    from rich.markup import escape

    cluster, ranks = scenario.cluster, scenario.world_size
    counted = f"{ranks:,} rank{'' if ranks == 1 else 's'}"
    console.print(f"[bold]{escape(named)} on {counted} of {escape(cluster.name)}[/]", end=" ")
    console.print(f"({cluster.device.name})", markup=False)


def in_words(names: Sequence[str]) -> str:
    """Kinds of parallelism."""
    return f"{', '.join(names[:-1])} and {names[-1]} parallelism"


def _notes(scenario: Scenario, runs: Sequence[SimulatedRun]) -> Iterator[str]:
    """Yield sentences: the changes that would make each strategy faster, and the numbers' assumptions."""
    for run in runs:
        yield f"faster under {run.strategy}: {_savings(run)}"
    for run in runs:
        peers = scenario.recipe(run.strategy).group_of(scenario.world_size) - 1
        if peers > 1 and any(one.op == "exchange" for one in run.schedule.operations):
            yield (
                f"{run.strategy}: the owner of a whole matrix receives its gradient from {peers:,} ranks, "
                "one message from each"
            )
    if any(run.strategy == LOCAL_SGD for run in runs):
        yield f"{LOCAL_SGD}: {_averages(scenario)}"
    leaner = replace(scenario, checkpointing="full").activation_bytes
    kept = scenario.activation_bytes
    if leaner < kept and any(run.fits is False and kept > run.peak_bytes / 3 for run in runs):
        yield (
            f"--checkpointing full keeps {format_bytes(leaner)} of activations, not {format_bytes(kept)}, "
            "and computes a forward more"
        )
    if isinstance(scenario.architecture, Traced):
        yield (
            "traced: norms, SiLU, copies of keys and the loss are as the model's code computes them, and "
            "attention is fused; options that say otherwise change nothing"
        )
    if scenario.tokens_of_sequence > (positions := getattr(scenario.architecture, "positions", math.inf)):
        yield f"supposed: sequences go beyond the model's {positions:,} positions"
    if share := scenario.attention_share:
        yield f"attention adds {share:.0%} to what the parameters' products take"
    cluster = scenario.machine
    if cluster.name in CLUSTERS:
        yield f"supposed: {_supposed(scenario)}"
    else:
        yield f"times from: {cluster.source}"
    if cluster.device.peaks and scenario.computed_in not in cluster.device.peaks:
        yield (
            f"supposed: {cluster.device.name} multiplies {scenario.computed_in} at {cluster.device.tflops:g} "
            f"TFLOPS; a peak is known in {', '.join(cluster.device.peaks)}: ask for one of these with --dtype"
        )
    if scenario.fp8:
        yield f"MFU: of {cluster.device.tflops:g} TFLOPS, the peak in 16 bits, also where products are in FP8"
    if scenario.offload:
        yield (
            f"supposed: the CPU updates at {cluster.device.host_memory_gb_per_s:g} GB/s a GPU, as fast as "
            "its memory; three published programs needed 2 to 4 times as long"
        )
    if scenario.update == "fused" and cluster.backend == "nccl":
        yield (
            "supposed: the update of moments in 8 bits is as fast as memory; in torchao's table Llama 2 7B "
            "takes 7 to 10% longer with them than with torch's fused AdamW"
            if scenario.states_8
            else "supposed: one fused kernel makes the update; torch's own choice on GPUs is --update foreach"
        )
        if any(scenario.settings(run.strategy).masters_apart for run in runs):
            yield (
                "supposed: beside 32-bit masters gradients are converted into a 32-bit copy before the "
                "update, but under zero-3, which keeps no others; its memory is counted and its time is not"
            )
    yield f"four in five: of programs of the kind {scenario.program}, by runs that others published"
    known = scenario.cluster.device.attention_by
    if scenario.attention_kernel is None and known.get("cudnn", 0) > (
        scenario.machine.device.attention_reached or 1
    ):
        yield (
            "supposed: attention is FlashAttention-2's; torch from 2.11 on takes cuDNN's on this GPU: "
            "--attention-kernel cudnn"
        )
    if share := share_reserved(scenario.allocator, cluster.device):
        yield (
            f"supposed: the allocator reserves {share:.0%} more of what comes and goes within an iteration, "
            f"and none of what stays: --allocator {scenario.allocator}"
        )
        if any(scenario.recipe(run.strategy).stage == 3 for run in runs):
            yield (
                "supposed: under stage 3 it also holds gathered parameters and shards of gradients in pools "
                "of other streams; before it runs out it gives back what no tensor uses"
            )
    if scenario.active < scenario.numel:
        yield "supposed: experts get as many tokens as others"
    yield "; ".join(["not counted: starting kernels, other jobs' traffic", *scenario.missing])


def _supposed(scenario: Scenario) -> str:
    """The shares of what data sheets promise that a preset supposes."""
    cluster = scenario.machine
    device = cluster.device
    if device.memory_reached is None:
        return f"products at {device.reached:.0%} of {device.tflops:g} TFLOPS, links at full rate"
    attention = device.attention_reached or device.reached
    peak = f"{device.tflops:g} TFLOPS"
    if scenario.fp8:
        peak = f"{device.in_dtype('fp8').tflops:g} TFLOPS in FP8 and, in the head, of {peak}"
    return (
        f"large products at {device.reached:.0%} of {peak}, attention at {attention:.0%}, "
        f"other kernels at {device.memory_reached:.0%} of {device.memory_gb_per_s:g} GB/s, links at "
        f"{cluster.within.reached:.0%} of {cluster.within.gb_per_s:g} GB/s within nodes and "
        f"{cluster.between.reached:.0%} of {cluster.between.gb_per_s:g} between"
    )


def _averages(scenario: Scenario) -> str:
    """Describe how often local SGD averages parameters and gradients, and over which ranks."""
    steps = "step" if scenario.period == 1 else f"{scenario.period:,} steps"
    parameters = f"parameters averaged every {steps}"
    if scenario.gradient_group == 1:
        return f"{parameters}, gradients never"
    return f"{parameters}, gradients every step among {scenario.gradient_group:,} ranks"


class Row(NamedTuple):
    """A row of the table: its label, and a value for each strategy."""

    label: str
    values: list[str]
    style: str = ""


def _rows(runs: Sequence[SimulatedRun], bill: Bill | None) -> list[Row]:
    rows = [Row("memory on", [f"rank {run.fullest:,}" for run in runs], "bold")]
    memories = [run.memory for run in runs]
    for item in memories[0].peak_items:
        if any(memory.peak_items[item] >= 1e3 for memory in memories):
            rows.append(Row(f"  {item}", [_bytes(memory.peak_items[item]) for memory in memories]))
    rows.append(Row("  peak", [_bytes(memory.peak_bytes) for memory in memories], "bold"))
    rows.append(Row("  interval", [_interval(run.memory_interval, 1e9) for run in runs]))
    rows.append(Row("  which is", [PHASES_IN_WORDS[memory.phase] for memory in memories]))
    if any(memory.host_bytes for memory in memories):
        rows.append(Row("  on the host", [_bytes(memory.host_bytes) for memory in memories]))
    memory_gb = runs[0].scenario.cluster.device.memory_gb
    if memory_gb is not None:
        rows.append(Row(f"  in {memory_gb:.1f} GB", [_verdict(run) for run in runs]))
    calls = [f"{run.calls:,.4g}" if run.calls < 10 else f"{run.calls:,.0f}" for run in runs]
    rows += [
        Row("network", [""] * len(runs), "bold"),
        Row("  sent a rank", [_bytes(run.sent_bytes) for run in runs]),
        Row("  calls", calls),
        Row("  exposed", [_ms(run.exposed_ms) for run in runs]),
        Row("time", [_ms(run.iteration_ms) for run in runs], "bold"),
        Row("  interval", [_interval(run.time_interval) for run in runs]),
        *_busy_rows(runs),
        Row("critical path", [""] * len(runs), "bold"),
    ]
    spent = {label for run in runs for label in run.what_if.critical_ms}
    for label in sorted(spent, key=LABELS.index):
        rows.append(Row(f"  {label}", [_ms(run.what_if.critical_ms.get(label, 0)) for run in runs]))
    return [
        *rows,
        Row("tokens a second", [f"{run.tokens_per_second:,.0f}" for run in runs]),
        Row("MFU", [f"{run.utilisation:.1%}" for run in runs]),
        *_bill_rows(runs, bill),
    ]


BUSY = {
    "computing": "  computing",
    "step": "    the step",
    "beside it, the CPU": "  beside it, the CPU",
    "network": "  network",
    "within nodes": "    within nodes",
    "between nodes": "    between nodes",
}
"""The rows of what is busy, as `SimulatedRun.busy_ms` names them."""


def _busy_rows(runs: Sequence[SimulatedRun]) -> Iterator[Row]:
    """Yield how long each resource works, and which share of the time that is."""
    yield Row("busy", [""] * len(runs), "bold")
    links = {"within nodes", "between nodes"}
    several = any(run.busy_ms["between nodes"] for run in runs)
    for name, label in BUSY.items():
        if (name not in links or several) and any(run.busy_ms.get(name) for run in runs):
            yield Row(label, [_share(run.busy_ms.get(name, 0), run.iteration_ms) for run in runs])


def _share(ms: float, of_ms: float) -> str:
    """Milliseconds, and the share of the iteration that they are."""
    return f"{_ms(ms)}, {ms / of_ms:.0%}" if ms else "-"


def _verdict(run: SimulatedRun) -> str:
    """Whether it fits: unlikely, if more is predicted than there is, though the interval has less too."""
    return "unlikely" if run.is_unlikely else FITS[run.fits]


def _bill_rows(runs: Sequence[SimulatedRun], bill: Bill | None) -> Iterator[Row]:
    """Yield days, GPU-hours and cost of the whole training."""
    if bill is None:
        return
    rates = [(run.tokens_per_second, run.schedule.world_size) for run in runs]
    yield Row(f"{short_count(bill.tokens)} tokens: days", [short(bill.days(rate)) for rate, _ in rates])
    yield Row("  GPU-hours", [short(bill.gpu_hours(*rate)) for rate in rates])
    hours = [bill.gpu_hours(*rate) for rate in rates]
    yield Row("  interval", [_interval(spread.around(one, runs[0].scenario.program)) for one in hours])
    if bill.price is not None:
        yield Row(f"  cost, at {bill.price:g}", [short(bill.price * one) for one in hours])


def _interval(ends: tuple[float, float], unit: float = 1) -> str:
    return " to ".join(short(end / unit) for end in ends)


def _savings(run: SimulatedRun) -> str:
    """List the changes that would save a hundredth of the iteration or more, the best first."""
    saved = {
        name: 1 - ms / run.iteration_ms if run.iteration_ms else 0.0
        for name, ms in run.what_if.improved_ms.items()
    }
    helping = sorted((name for name in saved if saved[name] >= 0.01), key=lambda name: -saved[name])
    return ", ".join(f"{BETTER[name]} -{saved[name]:.0%}" for name in helping) or "nothing alone"


def _bytes(nbytes: float) -> str:
    return format_bytes(round(nbytes)) if nbytes else "-"


def _ms(ms: float) -> str:
    return f"{ms:,.0f} ms" if ms >= 1000 else f"{ms:.1f} ms" if ms else "-"
