"""A run that somebody submits: read from a file, and scored.

The file has the form of those in `published_runs/`, in JSON or in TOML, and may be put there as it is.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from zero_ref.simulator._records import parse_json, read_text
from zero_ref.simulator.cluster import Cluster
from zero_ref.simulator.published import published, with_source
from zero_ref.simulator.runs import Published, Run
from zero_ref.simulator.scenario import Scenario
from zero_ref.simulator.spread import MEMORY, TIME
from zero_ref.simulator.validation import Compared, Predicted, compare, predicted, scenario_of

CONSTANTS = (
    *("device.reached", "device.product_passes", "device.attention_reached", "device.memory_reached"),
    *("device.allocator_share", "device.library_gb"),
    *("within.latency_us", "within.reached", "between.latency_us", "between.reached"),
)
"""What was fitted or supposed of a machine, and is on no data sheet: fields of a cluster's parts."""

LESS = 0.9
"""What a constant is multiplied with, to see whether a prediction depends on it. Shares stay below 1."""


def read_submission(path: str | Path) -> tuple[str, Published]:
    """The runs of a file, beside all that are published: its key, and the data with it.

    Args:
        path: its name without the ending is the key of the source. A name that ends in .toml is read as TOML,
            any other as JSON.
    Raises:
        OSError: the file cannot be read.
        ValueError: it is neither, there is a source of this name already, or it has no run; and as
            `with_source`.
    """
    path = Path(path)
    text = read_text(path)
    if path.suffix == ".toml":
        try:
            text = json.dumps(tomllib.loads(text), default=str)  # a date becomes text
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"it is not TOML: {error}") from None
    values = parse_json(text)
    data = with_source(published(), path.stem, values)
    if not any(run.source == path.stem for run in data.runs):
        raise ValueError("it has no run: runs is an empty list. Write at least one.")
    return path.stem, data


@dataclass(frozen=True)
class Scored:
    """A run that was submitted, beside what the simulator says of it.

    Args:
        compared: its figures; none of a run that ended out of memory.
        said: the prediction.
        effects: by figure and constant, by what share the prediction changes if the constant is LESS of what
            it is. A constant with 0 would change nothing, so no error comes from it.
    """

    run: Run
    compared: tuple[Compared, ...]
    said: Predicted
    effects: Mapping[str, Mapping[str, float]]

    def interval(self, one: Compared) -> tuple[float, float]:
        """Around the prediction of a figure, in its unit, as around every prediction for a user."""
        if one.figure == "memory":
            return MEMORY.around(one.predicted)
        slow, quick = TIME.around(1 / one.predicted)
        return 1 / quick, 1 / slow

    def inside(self, one: Compared) -> bool:
        """Whether the figure that was submitted lies in the interval."""
        low, high = self.interval(one)
        return low <= one.published <= high


def score(run: Run, data: Published) -> Scored:
    """Simulate a run that was submitted, and simulate it again with each constant changed.

    >>> from zero_ref.simulator.published import published
    >>> scored = score(published().run("nanogpt-4090"), published())
    >>> [name for name, effect in scored.effects["time"].items() if not effect]
    ['device.allocator_share', 'device.library_gb', 'within.latency_us', 'within.reached',
     'between.latency_us', 'between.reached']
    >>> round(scored.effects["time"]["device.reached"], 2)
    0.05

    Args:
        data: has the run's model and machines, as `read_submission` gives it.
    Raises:
        ValueError: the simulator cannot simulate the run; the message names it.
    """
    try:
        scenario = scenario_of(run, data)
        said, compared = predicted(run, scenario), tuple(compare(run, data))
        changed = {name: _with_less(run, scenario, name) for name in CONSTANTS}
    except ValueError as error:
        raise ValueError(f"run {run.id}: {error}") from None
    effects = {
        "time": {name: said.tokens_per_s_gpu / one.tokens_per_s_gpu - 1 for name, one in changed.items()},
        "memory": {name: one.gib / said.gib - 1 for name, one in changed.items()},
    }
    return Scored(run, compared, said, effects)


def _with_less(run: Run, scenario: Scenario, constant: str) -> Predicted:
    """The prediction if one of CONSTANTS is less."""
    part, _, name = constant.partition(".")
    value = getattr(getattr(scenario.cluster, part), name)
    if not value:  # a device may have no rate of attention, and no allocator
        return predicted(run, scenario)
    return predicted(run, replace(scenario, cluster=_changed(scenario.cluster, part, name, value * LESS)))


def _changed(machine: Cluster, part: str, name: str, value: float) -> Cluster:
    changed: dict[str, Any] = {part: replace(getattr(machine, part), **{name: value})}
    assert part in {each.name for each in fields(machine)}
    return replace(machine, **changed)
