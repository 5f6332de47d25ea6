"""The results of a search, as JSON and as a table, for `zero-ref search`."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from zero_ref.lab.commands import program, simulate_command, train_command
from zero_ref.lab.simulated import NOT_MODELLED, in_words, print_heading
from zero_ref.live.numbers import short, short_count
from zero_ref.simulator.bill import Bill
from zero_ref.simulator.ledger import format_bytes
from zero_ref.simulator.scenario import Scenario
from zero_ref.simulator.search import SEARCHED, VARIED, Candidate, Found, Remedy


def as_json(
    named: Sequence[str],
    cluster: str,
    scenario: Scenario,
    found: Found,
    bill: Bill | None = None,
    others: Sequence[Remedy] = (),
) -> dict[str, Any]:
    """Return the JSON of `zero-ref search --json`: bytes, milliseconds of an update, tokens a second.

    Args:
        named: the option that names the model, and its value.
        cluster: as it was given.
        bill: of the whole training; None if nobody asked for it.
        others: what makes a run fit, where none does.
    """
    device = scenario.cluster.device
    return {
        "model": named[1],
        "elements": scenario.numel,
        "ranks": scenario.world_size,
        "cluster": scenario.cluster.name,
        "device": device.name,
        "tokens": found.tokens,
        "sequence": scenario.tokens_of_sequence,
        "tried": found.tried,
        "timed": len(found.listed),
        "best": [_as_json(one, named, cluster, bill) for one in found.best],
        "listed": [_as_json(one, named, cluster, bill) for one in found.listed],
        "left_out": {
            strategy: {
                "count": left_out.count,
                "least_bytes": left_out.least.peak_bytes,
                "peak_items_bytes": dict(left_out.least.memory.peak_items),
                "most_of_it": left_out.most_of_it,
            }
            for strategy in SEARCHED
            if (left_out := found.left_out(strategy))
        },
        "impossible": dict(found.impossible),
        "would_fit": {one.words: _as_json(one.best, named, cluster, bill) for one in others},
    }


def _as_json(one: Candidate, named: Sequence[str], cluster: str, bill: Bill | None) -> dict[str, Any]:
    scenario = one.scenario
    return {
        "strategy": one.strategy,
        **{name: getattr(scenario, name) for name in VARIED},
        "tokens": one.tokens,
        "fits": one.fits,
        "memory_bytes": one.peak_bytes,
        "memory_interval_bytes": list(one.memory_interval),
        "update_ms": one.update_ms,
        "tokens_per_second": one.tokens_per_second,
        "tokens_per_second_interval": list(one.rate_interval),
        "model_flops_utilisation": one.utilisation,
        **({} if bill is None else bill.values(one.tokens_per_second, scenario.world_size, scenario.program)),
        "simulate": _joined(simulate_command(scenario, one.strategy, named, cluster)),
        "train": _joined(train_command(scenario, one.strategy)),
        "program": program(scenario, one.strategy),
    }


def print_found(
    named: Sequence[str],
    cluster: str,
    scenario: Scenario,
    found: Found,
    width: int | None = None,
    *,
    every: bool = False,
    bill: Bill | None = None,
    others: Sequence[Remedy] = (),
) -> None:
    """Print the list, the commands that belong to it, and what was left out.

    Args:
        bill: of the whole training; None if nobody asked for it.
        others: what makes a run fit, where none does.
        width: columns; None for those of the terminal.
        every: list all that may fit, and not the best alone.
    """
    from rich.console import Console

    console = Console(width=width, highlight=False)
    if not found.listed:
        console.print(f"nothing of what was tried fits, and {in_words(NOT_MODELLED)} are not modelled")
    print_heading(console, named[1], scenario)
    shown = found.listed if every else found.best
    asked, computed = found.tokens, {one.tokens for one in shown}
    nearest = min(computed, key=lambda tokens: abs(tokens - asked), default=asked)
    said = f"{nearest:,}" if nearest == asked else f"{nearest:,} (the nearest to {asked:,})"
    console.print(f"{scenario.numel:,} {scenario.dtype} parameters, {scenario.optimizer}")
    console.print(f"{said} tokens an update, in sequences of {scenario.tokens_of_sequence:,}\n")
    if shown:
        console.print(_table(shown, bill))
        console.print()
    for number, one in enumerate(shown, 1):
        for line in _commands(one, named, cluster, nearest):
            console.print(f"{number}  {line}", markup=False, soft_wrap=True)
    if shown:
        console.print()
    fitting = next((one for one in shown if one.fits), None)
    if fitting is not None and (lines := program(fitting.scenario, fitting.strategy)) is not None:
        console.print(f"{shown.index(fitting) + 1} in a program of your own:", markup=False)
        for line in lines:
            console.print(f"    {line}", markup=False, soft_wrap=True)
        console.print()
    for line in _notes(found, every):
        console.print(line, markup=False)
    if fitting is None:
        console.print()
        for line in _would_fit(found, named, cluster, others, bill):
            console.print(line, markup=False, soft_wrap=line.startswith(" "))
    elif bill is not None:
        said = bill.in_words(fitting.tokens_per_second, scenario.world_size, scenario.program)
        console.print(f"{shown.index(fitting) + 1}: {said}", markup=False)


def _would_fit(
    found: Found, named: Sequence[str], cluster: str, others: Sequence[Remedy], bill: Bill | None
) -> Iterator[str]:
    """Yield what comes nearest to fitting, and what would make a run fit, the cheapest first."""
    if (nearest := found.nearest) is not None:
        yield (
            f"nearest: {nearest.strategy}, {_batch(nearest.scenario)}, checkpointing "
            f"{nearest.scenario.checkpointing}, needs {_gb(nearest.peak_bytes)} GB"
        )
    if not others:
        yield "neither a fused loss, offload, moments in 8 bits, no masters, LoRA nor more ranks make it fit"
    if any("--offload" in one.words for one in others):
        yield "the CPU's update is as fast as its memory here; published ones took 2 to 4 times as long"
    for number, one in enumerate(others, 1):
        best = one.best
        price = (
            ""
            if bill is None
            else f"; {bill.in_words(best.tokens_per_second, best.scenario.world_size, best.scenario.program)}"
        )
        changes = f" ({one.changes})" if one.changes else ""
        ranks = best.scenario.world_size
        of_gpu = "" if ranks == 1 else f", {short_count(one.tokens_per_second_of_gpu)} a GPU"
        yield (
            f"{number}. fits with {one.words}{changes}: {best.strategy}, {_gb(best.peak_bytes)} GB, "
            f"{short_count(best.tokens_per_second)} tokens/s{of_gpu}{price}"
        )
        yield f"    {_joined(simulate_command(best.scenario, best.strategy, named, cluster))}"


def _table(shown: Sequence[Candidate], bill: Bill | None) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    priced = "tokens/s" if bill is None else "GPU-hours"
    for column in ("", "strategy", "batch", "checkpointing", "ms", "MFU", priced, "GB"):
        table.add_column(column, no_wrap=True)
    for number, one in enumerate(shown, 1):
        scenario, ranks, rate = one.scenario, one.scenario.world_size, one.tokens_per_second
        group = f", {scenario.shard_group:,}" if scenario.shard_group else ""
        ways = (one.strategy + group, _batch(scenario), scenario.checkpointing)
        took = f"{1e3 * one.tokens / rate:,.0f}", f"{one.utilisation:.0%}"
        paid, ends = short_count(rate), list(one.rate_interval)
        if bill is not None:
            paid = short_count(bill.gpu_hours(rate, ranks))
            ends = [bill.gpu_hours(end, ranks) for end in reversed(ends)]
        table.add_row(str(number), *ways, *took, paid, f"{_gb(one.peak_bytes)}{_mark(one)}")
        memory = " to ".join(map(_gb, one.memory_interval))
        table.add_row("", "", "", "", "", "", " to ".join(map(short_count, ends)), memory, style="dim")
    return table


def _mark(one: Candidate) -> str:
    return "" if one.fits else " ??" if one.is_unlikely else " ?"


def _batch(scenario: Scenario) -> str:
    if scenario.accumulation == 1:
        return f"{scenario.batch:,}"
    return f"{scenario.batch:,} x {scenario.accumulation:,}{' no_sync' * scenario.no_sync}"


def _gb(nbytes: float) -> str:
    return short(nbytes / 1e9)


def _commands(one: Candidate, named: Sequence[str], cluster: str, tokens: int) -> Iterator[str]:
    remark = "" if one.tokens == tokens else f"  # {one.tokens:,} tokens an update"
    simulated = _joined(simulate_command(one.scenario, one.strategy, named, cluster))
    yield (
        simulated or f"{one.scenario.accumulation:,} backwards are too many for zero-ref simulate"
    ) + remark
    if (trained := _joined(train_command(one.scenario, one.strategy))) is not None:
        yield trained


def _joined(words: list[str] | None) -> str | None:
    return None if words is None else shlex.join(words)


def _notes(found: Found, every: bool) -> Iterator[str]:
    """Yield sentences about the choices that were tried, and those that were left out and why."""
    fitting = sum(one.fits is True for one in found.listed)
    undecided = len(found.listed) - fitting
    too_large = found.tried - len(found.listed)
    yield f"{found.tried:,} tried: {fitting:,} fit, {undecided:,} undecided, {too_large:,} do not fit"
    if undecided:
        yield "?  undecided: the device's memory lies in the interval, or is not known"
    if any(one.is_unlikely for one in found.listed):
        yield "??  unlikely: so too, and more is predicted than the device has"
    if not every and len(found.best) < len(found.listed):
        hidden = len(found.listed) - len(found.best)
        yield f"{hidden:,} of these are as slow or slower with as much memory or more: --all lists them"
    for strategy in SEARCHED:
        if (left_out := found.left_out(strategy)) is not None:
            most = left_out.least.memory.peak_items[left_out.most_of_it]
            yield (
                f"{strategy}: {left_out.count:,} too large; the least of them needs "
                f"{format_bytes(round(left_out.least.peak_bytes))}, of which "
                f"{format_bytes(round(most))} are {left_out.most_of_it}"
            )
        if strategy in found.impossible:
            yield f"{strategy}: {found.impossible[strategy]}"
