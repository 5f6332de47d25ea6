"""The advice of `which.compared`, as JSON and as a table, for `zero-ref which`."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from zero_ref.lab.commands import program, simulate_command
from zero_ref.lab.simulated import print_heading
from zero_ref.live.numbers import short
from zero_ref.simulator import spread
from zero_ref.simulator.bill import Bill
from zero_ref.simulator.stages import STRATEGY_OF_STAGE
from zero_ref.simulator.tree import Question, nodes_on
from zero_ref.simulator.which import ALIKE, BEYOND, SHORT_BLOCK_MS, Compared

FITS = {True: "yes", False: "no", None: "?"}


def as_json(named: Sequence[str], cluster: str, found: Compared, bill: Bill | None) -> dict[str, Any]:
    """Return the JSON of `zero-ref which --json`: bytes, milliseconds of an update.

    Args:
        named: the option that names the model, and its value.
        cluster: as it was given.
        bill: of the whole training; None if nobody asked for it.
    """
    ranks = found.scenario.world_size
    asked = _asked(found)
    return {
        "model": named[1],
        "elements": found.scenario.numel,
        "ranks": ranks,
        "cluster": found.scenario.cluster.name,
        "advice": found.advice.name,
        "because": found.advice.because,
        "questions": [
            {"question": node.text, "yes": answer, "because": node.answered} for node, answer in asked
        ],
        "fastest": found.fastest,
        "behind": found.behind,
        "checkpointing": found.scenario.checkpointing,
        "tokens_of_pass": found.scenario.tokens_of_pass,
        "tokens_needed": None if math.isinf(found.tokens_needed) else found.tokens_needed,
        "ways": {
            name: {
                "memory_bytes": run.peak_bytes,
                "memory_interval_bytes": list(run.memory_interval),
                "fits": run.fits,
                "unlikely": run.is_unlikely,
                "update_ms": run.iteration_ms,
                "exposed_communication_ms": run.exposed_ms,
                "tokens_per_second": run.tokens_per_second,
                "model_flops_utilisation": run.utilisation,
                **({} if bill is None else bill.values(run.tokens_per_second, ranks, run.scenario.program)),
            }
            for name, run in found.runs.items()
        },
        "simulate": _command(named, cluster, found),
        "program": _program(found),
    }


def print_advice(
    named: Sequence[str],
    cluster: str,
    found: Compared,
    bill: Bill | None,
    width: int | None = None,
    *,
    asked: str,
) -> None:
    """Print the advice, the questions that led there, all ways, and how the advised one is written.

    Args:
        width: columns; None for those of the terminal.
        asked: the checkpointing that was asked for.
    """
    from rich.console import Console

    console, scenario = Console(width=width, highlight=False), found.scenario
    console.print(_first_line(found), markup=False)
    print_heading(console, named[1], scenario)
    passes = scenario.accumulation
    of_update = "one pass an update" if passes == 1 else f"{passes:,} passes an update"
    console.print(
        f"{scenario.numel:,} {scenario.dtype} parameters, {scenario.optimizer}; on each rank "
        f"{scenario.batch:,} x {scenario.tokens_of_sequence:,} tokens in a pass, {of_update}\n"
    )
    if found.scenario.checkpointing != asked:
        console.print(
            f"with --checkpointing {found.scenario.checkpointing}: with {asked} no way surely fits\n"
        )
    for node, answer in _asked(found):
        console.print(f"{node.text} {'Yes' if answer else 'No'}: {node.answered}.", markup=False)
    console.print()
    console.print(_table(found, bill))
    console.print()
    for line in _notes(named, cluster, found, bill):
        console.print(line, markup=False, soft_wrap=line.startswith(" "))


def _asked(found: Compared) -> list[tuple[Question, bool]]:
    """The questions on the way to the advice, with the answers."""
    nodes = nodes_on(found.tree, found.path)
    return [(node, answer) for node, answer in zip(nodes, found.path) if isinstance(node, Question)]


def _first_line(found: Compared) -> str:
    if found.fastest is not None:
        return f"{found.advice.name}: {found.advice.because[0].lower()}{found.advice.because[1:]}"
    if any(run.fits is None for run in found.runs.values()):
        return "no way surely fits, and some may: try the leanest for a few steps, or keep fewer activations"
    return f"{BEYOND}: no way fits. {found.advice.because}"


def _table(found: Compared, bill: Bill | None) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    memory_gb, ranks = found.scenario.cluster.device.memory_gb, found.scenario.world_size
    device = "" if memory_gb is None else f" of {memory_gb:.1f}"
    for column in ("way", f"GB{device}", "fits", "ms", "exposed", "tokens/s", "MFU"):
        table.add_column(column, no_wrap=True, justify="left" if column in ("way", "fits") else "right")
    if bill is not None:
        table.add_column("GPU-hours", justify="right")
    for name, run in found.runs.items():
        row = [
            name,
            f"{run.peak_bytes / 1e9:,.1f}",
            "" if memory_gb is None else "??" if run.is_unlikely else FITS[run.fits],
            f"{run.iteration_ms:,.0f}",
            f"{run.exposed_ms:,.0f}",
            f"{run.tokens_per_second:,.0f}",
            f"{run.utilisation:.1%}",
        ]
        if bill is not None:
            row.append(short(bill.gpu_hours(run.tokens_per_second, ranks)))
        table.add_row(*row, style="bold" if name == found.advice.name else "")
    return table


def _notes(named: Sequence[str], cluster: str, found: Compared, bill: Bill | None) -> Iterator[str]:
    """Yield sentences: how sure the numbers are, the price, and how the advised way is written."""
    kind = found.scenario.program
    low, high = spread.interval_of_memory(kind).around(1.0)
    least, most = spread.around(1.0, kind)
    yield "ms and exposed are of an update; ? is undecided: the device's memory lies in the interval"
    if any(run.is_unlikely for run in found.runs.values()):
        yield "?? is unlikely: so too, and more is predicted than the device has"
    yield (
        f"four of five published runs took {low:.2f} to {high:.2f} times the memory predicted for them, and "
        f"{least:.2f} to {most:.2f} times the time"
    )
    if found.fastest is None:
        yield "zero-ref search tries other batches, checkpointing and options, and says what comes nearest"
        return
    advised = found.runs[found.advice.name]
    if found.behind and found.advice.name != found.fastest:
        about = "about as fast" if found.behind <= ALIKE else f"{found.behind:.0%} slower in this count"
        yield f"the fastest way that surely fits is {found.fastest}; {found.advice.name} is {about}"
    if found.block_ms < SHORT_BLOCK_MS:
        yield "the pass is short: the time in which the host starts it is not simulated"
    if bill is not None:
        yield bill.in_words(advised.tokens_per_second, found.scenario.world_size, kind)
    yield "everything that it sends and waits for:"
    yield f"    {_command(named, cluster, found)}"
    if lines := _program(found):
        yield "in a program of your own:"
        yield from (f"    {line}" for line in lines)


def _command(named: Sequence[str], cluster: str, found: Compared) -> str | None:
    if found.fastest is None:
        return None
    words = simulate_command(*_advised(found), named, cluster)
    return None if words is None else shlex.join(words)


def _program(found: Compared) -> list[str] | None:
    return None if found.fastest is None else program(*_advised(found))


def _advised(found: Compared) -> tuple[Any, str]:
    """The scenario and the strategy of the advised way."""
    name = found.advice.name.removesuffix(", no_sync")
    return found.runs[found.advice.name].scenario, STRATEGY_OF_STAGE[name]
