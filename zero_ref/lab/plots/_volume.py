"""What sharding costs and what it saves: bytes sent and bytes held, by strategy and number of ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from zero_ref.lab.plots._ends import end_labels, level
from zero_ref.lab.plots._style import _STYLE, Picture, bare, in_style
from zero_ref.live.numbers import short, short_bytes
from zero_ref.live.palette import FAINT, SERIES_COLOURS


def panels(heights: Sequence[float], width: float = 6.0) -> tuple[Picture, tuple[Axes, ...]]:
    """A picture of several Axes, one below the other.

    >>> fig, (upper, lower) = panels([2.5, 3])
    >>> fig.get_size_inches().tolist()
    [6.0, 5.5]

    Args:
        heights: of each, in inches, with what is written around it.
    Raises:
        ValueError: there is none.
    """
    if not heights:
        raise ValueError("a picture has at least one panel: give its height in inches.")
    with matplotlib.rc_context(_STYLE):
        fig = Picture(figsize=(width, sum(heights)), layout="constrained")
        FigureCanvasAgg(fig)
        axes = fig.subplots(len(heights), squeeze=False, height_ratios=list(heights))
        return fig, tuple(axes[:, 0])


@in_style
def volume_against_ranks(volumes: Mapping[str, Mapping[int, float]], ax: Axes) -> Axes:
    """What a rank sends in an iteration, in units of Ψ, the model's size, as ranks are added.

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
    colours = _lines(ax, volumes)
    highest = max(max(curve.values()) for curve in volumes.values())
    ax.set_ylim(0, max(1.0, 1.12 * highest))
    ax.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{short(value)} Ψ"))
    ends = {name: curve[max(curve)] for name, curve in volumes.items()}
    end_labels(ax, ends, colours, lambda value: f"{short(value)} Ψ")
    ax.set_title("What a rank sends in an iteration")
    return ax


@in_style
def memory_against_ranks(
    memories: Mapping[str, Mapping[int, float]], ax: Axes, *, device_bytes: float | None = None
) -> Axes:
    """What a rank holds as ranks are added, on logarithmic axes: a share that is divided is a falling line.

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
    colours = _lines(ax, memories)
    ax.set_yscale("log")
    values = [nbytes for curve in memories.values() for nbytes in curve.values()]
    values += [] if device_bytes is None else [device_bytes]
    low, high = min(values) / 1.5, max(values) * 1.7
    ax.set_ylim(low, high)
    if device_bytes is not None:
        level(ax, device_bytes, f"the device's {short_bytes(device_bytes)}")
    ax.yaxis.set_major_locator(LogLocator(subs=(1.0,) if high > 100 * low else (1.0, 2.0, 5.0)))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short_bytes(value)))
    end_labels(ax, {name: curve[max(curve)] for name, curve in memories.items()}, colours, short_bytes)
    ax.set_title("What a rank holds")
    return ax


def _lines(ax: Axes, curves: Mapping[str, Mapping[int, float]]) -> dict[str, str]:
    """The curves over a logarithmic axis of ranks; returns their colours."""
    if not 0 < len(curves) <= len(SERIES_COLOURS) or not all(curves.values()):
        points = {name: len(curve) for name, curve in curves.items()}
        raise ValueError(
            f"give 1 to {len(SERIES_COLOURS)} curves with a point or more each; got points {points}."
        )
    colours = dict(zip(curves, SERIES_COLOURS))
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
    bare(ax, keep=("bottom",))
    ax.grid(axis="y", color=FAINT, linewidth=0.6)
    return colours


def _name_ranks(ax: Axes, all_ranks: Sequence[int]) -> None:
    """As many of the numbers of ranks as have room: from the last one down, not too close to each other."""
    apart = max(math.log2(all_ranks[-1] / all_ranks[0]) / 8, 1e-9)
    named = [all_ranks[-1]]
    for n in reversed(all_ranks[:-1]):
        if math.log2(named[-1] / n) >= apart:
            named.append(n)
    ax.xaxis.set_major_locator(FixedLocator(named))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{int(n):,}"))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xlabel("ranks")
