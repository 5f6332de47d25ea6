"""Pictures of bytes sent and bytes held, by strategy and number of ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, LogLocator, MaxNLocator

from zero_ref.lab.plots._ends import end_labels, level
from zero_ref.lab.plots._style import colours_of, in_style, numbered, with_levels
from zero_ref.live.numbers import short, short_bytes


@in_style
def volume_against_ranks(volumes: Mapping[str, Mapping[int, float]], ax: Axes) -> Axes:
    """Draw the bytes that a rank sends in an iteration, in units of Ψ elements, as ranks are added.

    Ψ is the model's number of parameters, and an element has the bytes of a parameter.

    >>> from zero_ref.lab.plots import figure
    >>> from zero_ref.plan.partition import ParamSpec
    >>> from zero_ref.simulator.schedule import schedule
    >>> params, psi_bytes = [ParamSpec(2**20)], 4 * 2**20
    >>> volumes = {
    ...     name: {n: schedule(name, params, n).wire_bytes() / n / psi_bytes for n in (1, 2, 4, 8)}
    ...     for name in ("ddp", "zero-even", "zero-2", "zero-3")
    ... }
    >>> fig, ax = figure(6, 3)
    >>> _ = volume_against_ranks(volumes, ax)

    Args:
        volumes: strategy -> number of ranks -> bytes that a rank sends, over the bytes of all parameters.
    Raises:
        ValueError: there is no strategy, more than 7, or one without a point.
    """
    colours = lines_over_ranks(ax, volumes)
    highest = max(max(curve.values()) for curve in volumes.values())
    ax.set_ylim(0, max(1.0, 1.12 * highest))
    numbered(ax.yaxis, in_psi, MaxNLocator(5, integer=True))
    end_labels(ax, {name: curve[max(curve)] for name, curve in volumes.items()}, colours, in_psi)
    ax.set_title("What a rank sends in an iteration")
    return ax


def in_psi(value: float) -> str:
    """A number of elements over the number of parameters, or of bytes over those of all parameters."""
    return f"{short(value)} Ψ"


@in_style
def memory_against_ranks(
    memories: Mapping[str, Mapping[int, float]], ax: Axes, *, device_bytes: float | None = None
) -> Axes:
    """Draw the bytes that a rank holds as ranks are added, on logarithmic axes: a divided share falls.

    >>> from zero_ref.lab.plots import figure
    >>> from zero_ref.simulator.ledger import ledger
    >>> fig, ax = figure(6, 3)
    >>> held = {
    ...     f"stage {stage}": {n: ledger(7 * 10**9, n, stage).total_bytes for n in (1, 8, 64, 512)}
    ...     for stage in range(4)
    ... }
    >>> _ = memory_against_ranks(held, ax, device_bytes=80e9)

    Args:
        memories: strategy -> number of ranks -> bytes, above 0: of the fullest rank, or on average.
        device_bytes: of the device's memory, drawn as a line.
    Raises:
        ValueError: there is no strategy, more than 7, or one without a point; or bytes are not above 0.
    """
    for name, curve in memories.items():
        if min(curve.values(), default=1) <= 0:
            raise ValueError(f"{name}: bytes must be above 0 to be drawn on a logarithmic axis.")
    colours = lines_over_ranks(ax, memories)
    ax.set_yscale("log")
    values = [nbytes for curve in memories.values() for nbytes in curve.values()]
    values += [] if device_bytes is None else [device_bytes]
    low, high = min(values) / 1.5, max(values) * 1.7
    ax.set_ylim(low, high)
    if device_bytes is not None:
        level(ax, device_bytes, f"the device's {short_bytes(device_bytes)}")
    numbered(ax.yaxis, short_bytes, LogLocator(subs=(1.0,) if high > 100 * low else (1.0, 2.0, 5.0)))
    end_labels(ax, {name: curve[max(curve)] for name, curve in memories.items()}, colours, short_bytes)
    ax.set_title("What a rank holds")
    return ax


def lines_over_ranks(ax: Axes, curves: Mapping[str, Mapping[int, float]]) -> dict[str, str]:
    """The curves over a logarithmic axis of ranks; returns their colours."""
    colours = colours_of(curves)
    for index, (name, curve) in enumerate(curves.items()):
        width = 1.8 + 1.7 * (len(curves) - 1 - index)  # curves that coincide are all seen
        ranks = sorted(curve)
        ax.plot(
            ranks,
            [curve[n] for n in ranks],
            "o-",
            color=colours[name],
            linewidth=width,
            ms=width + 2.2,
            label=name,
            clip_on=False,
        )
    all_ranks = sorted({n for curve in curves.values() for n in curve})
    ax.set_xscale("log", base=2)
    ax.set_xlim(all_ranks[0] / 1.08, all_ranks[-1] * 1.06)
    _name_ranks(ax, all_ranks)
    with_levels(ax)
    return colours


def _name_ranks(ax: Axes, all_ranks: Sequence[int]) -> None:
    """Label as many of the numbers of ranks as have room: from the last one down, not too close together."""
    apart = max(math.log2(all_ranks[-1] / all_ranks[0]) / 8, 1e-9)
    named = [all_ranks[-1]]
    for n in reversed(all_ranks[:-1]):
        if math.log2(named[-1] / n) >= apart:
            named.append(n)
    numbered(ax.xaxis, lambda n: f"{int(n):,}", FixedLocator(named))
    ax.set_xlabel("ranks")
