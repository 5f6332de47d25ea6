"""Explorers: the book's pictures with sliders, for a notebook that has a kernel.

>>> explorer = partition_explorer(model="gpt2", ranks=8)
>>> explorer.controls["ranks"].value = 64                  # what a reader does with the slider

`partition_explorer`, `memory_explorer` and `overlap_explorer` each return an `Explorer`. As the last line of
a cell it shows its controls and, as an output of its own, its picture; each change of a control draws the
picture anew. The picture is an ordinary output, so it stays in the notebook when it is saved and in the page
that nbconvert or Jupyter Book make of it, and shows there what it showed last.

A published page has no kernel: a slider moves nothing there. Pages of the book therefore use static figures
of `zero_ref.lab.plots`, which make the point by themselves; explorers are for a notebook that is open.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any

import ipywidgets
from IPython.display import DisplayHandle, display

from zero_ref.lab import plots
from zero_ref.lab.plots import Picture
from zero_ref.partition import STRATEGIES as RULES, ParamSpec, plan_partition
from zero_ref.simulator.activations import CHECKPOINTING, activation_bytes
from zero_ref.simulator.cluster import CLUSTERS
from zero_ref.simulator.ledger import CONVENTIONS, STATE_RULES
from zero_ref.simulator.memory import Recipe, average_memory
from zero_ref.simulator.models import MODELS, TRANSFORMERS, blocks, shapes, specs
from zero_ref.simulator.operations import WAYS
from zero_ref.simulator.play import Work, play
from zero_ref.simulator.schedule import MIB, STRATEGIES, Schedule, ddp_buckets, schedule

MOST_RANKS = 1024
POWERS = [2**power for power in range(11)]


class Explorer:
    """Controls, and the picture that they draw.

    >>> explorer = memory_explorer(model="gpt2", stage=1)
    >>> before = explorer.picture
    >>> explorer.controls["stage"].value = 3
    >>> explorer.picture is before
    False

    Args:
        draw: makes the picture, given the value of each control by its name.
        controls: by name; each has a `value`.
        useless: which controls have no effect at these values; they are greyed out.
    """

    def __init__(
        self,
        draw: Callable[..., Picture],
        controls: Mapping[str, Any],
        useless: Callable[..., Iterable[str]] = lambda **values: (),
    ) -> None:
        self.controls = dict(controls)
        self.widget = ipywidgets.VBox(list(self.controls.values()))
        self._draw = draw
        self._useless = useless
        self._shown: list[DisplayHandle] = []
        self.picture = self._drawn()
        for control in self.controls.values():
            control.observe(self._changed, names="value")

    @property
    def values(self) -> dict[str, Any]:
        """What each control stands at."""
        return {name: control.value for name, control in self.controls.items()}

    def _drawn(self) -> Picture:
        useless = set(self._useless(**self.values))
        for name, control in self.controls.items():
            control.disabled = name in useless
        return self._draw(**self.values)

    def _changed(self, change: object) -> None:
        self.picture = self._drawn()
        for shown in self._shown:
            shown.update(self.picture)

    def _ipython_display_(self) -> None:
        # Two outputs. Inside the widget the picture would be lost on a page without a kernel.
        display(self.widget)
        shown = display(self.picture, display_id=True)
        if shown is not None:  # outside of IPython nothing can be drawn anew
            self._shown.append(shown)


# --------------------------------------------------------------------------------------------- partition


def partition_explorer(model: str = "gpt2", rule: str = "sorted_greedy", ranks: int = 64) -> Explorer:
    """How much each rank owns under a rule, and how balance changes as ranks are added, up to 1,024.

    The line of the largest tensor shows where whole parameters stop helping.

    >>> list(partition_explorer("mlp-tiny").controls)
    ['model', 'rule', 'ranks', 'fullest_first']

    Args:
        model: a name in `simulator.models.MODELS`.
        rule: a name in `partition.STRATEGIES`.
        ranks: 1 to 1,024.
    Raises:
        ValueError: a name is unknown, or there are too few or too many ranks.
    """
    return Explorer(
        _draw_partition,
        {
            "model": _choice("model", model, MODELS),
            "rule": _choice("rule", rule, RULES),
            "ranks": _ranks_slider(ranks),
            "fullest_first": _checkbox("fullest first", False),
        },
    )


def _draw_partition(model: str, rule: str, ranks: int, fullest_first: bool) -> Picture:
    params = _params(model)
    fig, (upper, lower) = plots.panels([2.6, 3.2])
    plots.loads(plan_partition(rule, params, ranks), upper, fullest_first=fullest_first)
    # Both rules where they differ: the even split shows what cutting tensors would give.
    rules = tuple(dict.fromkeys((rule, "even")))
    plots.balance_against_ranks([param.numel for param in params], POWERS, lower, strategies=rules)
    lower.axvline(ranks, color="black", linewidth=1.0, linestyle=":", zorder=0, label="ranks")
    return fig


# ------------------------------------------------------------------------------------------------ memory


def memory_explorer(
    model: str = "llama3-8b",
    ranks: int = 64,
    stage: int = 1,
    *,
    cluster: str = "h100-ib",
    convention: str = "mixed-16",
    optimizer: str = "AdamW",
    batch: int = 1,
    sequence: int = 4096,
    checkpointing: str = "full",
) -> Explorer:
    """What a rank holds, item by item, under every stage, against the device's memory.

    Averages: what a stage divides is taken to divide evenly (`simulator.memory.average_memory`).

    >>> memory_explorer("gpt2").values["stage"]
    1

    Args:
        model: a name in `simulator.models.TRANSFORMERS`.
        ranks: 1 to 1,024.
        stage: of ZeRO, 0 to 3: the one that is marked.
        cluster: a name in `simulator.cluster.CLUSTERS` whose device is known by its memory.
        convention: a name in `simulator.ledger.CONVENTIONS`.
        optimizer: a name in `simulator.ledger.STATE_RULES`.
        batch: sequences that a rank computes in one go, 1 to 64.
        sequence: tokens in each, a power of two from 128 to 32,768.
        checkpointing: a name in `simulator.activations.CHECKPOINTING`.
    Raises:
        ValueError: a name is unknown, or a number is out of its range.
    """
    known = [name for name, one in CLUSTERS.items() if one.device.memory_gb is not None]
    return Explorer(
        _draw_memory,
        {
            "model": _choice("model", model, TRANSFORMERS),
            "cluster": _choice("cluster", cluster, known),
            "ranks": _ranks_slider(ranks),
            "stage": _slider("stage", stage, 0, 3),
            "convention": _choice("convention", convention, CONVENTIONS),
            "optimizer": _choice("optimizer", optimizer, STATE_RULES),
            "batch": _slider("batch", batch, 1, 64),
            "sequence": _steps("sequence", sequence, [2**power for power in range(7, 16)]),
            "checkpointing": _choice("checkpointing", checkpointing, CHECKPOINTING),
        },
    )


def _draw_memory(
    model: str,
    cluster: str,
    ranks: int,
    stage: int,
    convention: str,
    optimizer: str,
    batch: int,
    sequence: int,
    checkpointing: str,
) -> Picture:
    activations = activation_bytes(TRANSFORMERS[model], batch, sequence, checkpointing)
    items = {}
    for one in range(4):
        recipe = Recipe(one, convention, optimizer, activation_bytes=activations)
        items[f"stage {one}"] = average_memory(_params(model), ranks, recipe).items
    memory_gb = CLUSTERS[cluster].device.memory_gb
    fig, ax = plots.figure(6, 3.6)
    plots.memory_items(
        items, ax, device_bytes=None if memory_gb is None else 1e9 * memory_gb, chosen=f"stage {stage}"
    )
    return fig


# ----------------------------------------------------------------------------------------------- overlap


def overlap_explorer(
    model: str = "llama3-8b",
    cluster: str = "a100-ethernet",
    strategy: str = "zero-2",
    way: str = "interleaved",
    *,
    bucket_mb: int = 25,
    ranks: int = 64,
    tokens: int = 4096,
    native: bool = True,
) -> Explorer:
    """One iteration on one rank, beside plain DDP: what is exposed, and which work decides how long it takes.

    Below the lanes stands the critical path, by what is done. Greyed out is what a strategy has no use for.

    >>> explorer = overlap_explorer("gpt2", strategy="ddp")
    >>> [name for name, control in explorer.controls.items() if control.disabled]
    ['way', 'native']

    Args:
        model: a name in `simulator.models.MODELS`.
        cluster: a name in `simulator.cluster.CLUSTERS`.
        strategy: a name in `simulator.schedule.STRATEGIES`.
        way: a name in `simulator.operations.WAYS`.
        bucket_mb: MiB of DDP's gradient buckets, a power of two from 1 to 1,024, or 25, which is its default.
        ranks: 1 to 1,024.
        tokens: of each rank's part of the batch, a power of two from 128 to 131,072.
        native: the calls of a GPU's library, not this package's own messages.
    Raises:
        ValueError: a name is unknown, or a number is out of its range.
    """
    return Explorer(
        _draw_overlap,
        {
            "model": _choice("model", model, MODELS),
            "cluster": _choice("cluster", cluster, CLUSTERS),
            "strategy": _choice("strategy", strategy, STRATEGIES),
            "way": _choice("way", way, WAYS),
            "bucket_mb": _steps("bucket MiB", bucket_mb, sorted([25, *POWERS])),
            "ranks": _ranks_slider(ranks),
            "tokens": _steps("tokens", tokens, [2**power for power in range(7, 18)]),
            "native": _checkbox("native collectives", native),
        },
        _useless_for_overlap,
    )


def _useless_for_overlap(strategy: str, **others: object) -> Iterable[str]:
    if STRATEGIES[strategy].partition is None:
        yield from ("way", "native")
    if STRATEGIES[strategy].stage == 3:
        yield "bucket_mb"


def _draw_overlap(
    model: str,
    cluster: str,
    strategy: str,
    way: str,
    bucket_mb: int,
    ranks: int,
    tokens: int,
    native: bool,
) -> Picture:
    on_a_gpu = CLUSTERS[cluster].backend == "nccl"
    sharded = STRATEGIES[strategy].partition is not None
    plans = {"ddp": _plan(model, "ddp", ranks, bucket_mb)}
    options = (way, native, on_a_gpu) if sharded else ()
    plans[strategy] = _plan(model, strategy, ranks, bucket_mb, *options)
    played = {name: play(plan, CLUSTERS[cluster], Work(tokens)) for name, plan in plans.items()}
    fig, ax = plots.figure(6, 2.4 + 1.5 * len(played))
    plots.timeline({name: one.timeline() for name, one in played.items()}, ax)
    critical = played[strategy].critical_ms()
    total = sum(critical.values()) or 1.0
    shares = [f"{label} {ms / total:.0%}" for label, ms in critical.items() if ms >= 0.005 * total]
    words = textwrap.fill(f"critical path of {strategy}: {', '.join(shares)}", 54)
    ax.set_xlabel(f"{ax.get_xlabel()}\n{words}")
    return fig


@lru_cache(maxsize=8)
def _plan(
    model: str,
    strategy: str,
    ranks: int,
    bucket_mb: int,
    way: str = "plain",
    native: bool = False,
    side_stream: bool = False,
) -> Schedule:
    """A schedule knows no clock: other links, devices and batches play the same one."""
    params = _params(model)
    stage_3 = STRATEGIES[strategy].stage == 3
    return schedule(
        strategy,
        params,
        ranks,
        ddp_buckets=ddp_buckets(params, cap_bytes=bucket_mb * MIB),
        blocks=blocks(params) if stage_3 else None,
        rows=[one.shape[0] for one in shapes(model)] if stage_3 else None,
        way=way,
        native=native,
        side_stream=side_stream,
    )


# ---------------------------------------------------------------------------------------------- controls


@lru_cache(maxsize=4)
def _params(model: str) -> tuple[ParamSpec, ...]:
    return tuple(specs(shapes(model), "bfloat16"))


_LOOK: dict[str, Any] = {
    "style": {"description_width": "9em"},
    "layout": {"width": "30em"},
}
_ON_RELEASE: dict[str, Any] = {"continuous_update": False, **_LOOK}
"""A slider that is dragged draws once, when it is let go: pictures do not queue up behind the hand."""


def _choice(what: str, value: str, names: Iterable[str]) -> Any:
    names = list(names)
    if value not in names:
        raise ValueError(f"unknown {what} {value!r}; choose one of {', '.join(names)}.")
    return ipywidgets.Dropdown(options=names, value=value, description=what, **_LOOK)


def _slider(what: str, value: int, least: int, most: int) -> Any:
    if not least <= value <= most:
        raise ValueError(f"{what} must be {least:,} to {most:,}, got {value:,}.")
    return ipywidgets.IntSlider(value=value, min=least, max=most, description=what, **_ON_RELEASE)


def _ranks_slider(value: int) -> Any:
    return _slider("ranks", value, 1, MOST_RANKS)


def _steps(what: str, value: int, values: list[int]) -> Any:
    if value not in values:
        raise ValueError(f"{what} must be one of {', '.join(map(str, values))}; got {value}.")
    options = [(f"{one:,}", one) for one in values]
    return ipywidgets.SelectionSlider(options=options, value=value, description=what, **_ON_RELEASE)


def _checkbox(what: str, value: bool) -> Any:
    return ipywidgets.Checkbox(value=value, description=what, indent=True, **_LOOK)
