"""What a benchmark brings home: every sample, as plain values, and what follows. Standard library only."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple


class Spread(NamedTuple):
    """The median of some samples and the quartiles beside it."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """Median and quartiles.

    >>> spread([1.0, 2.0, 3.0, 4.0, 5.0])
    Spread(median=3.0, low=1.5, high=4.5)
    """
    if len(values) < 2:
        return Spread(values[0], values[0], values[0])
    low, middle, high = statistics.quantiles(values, n=4)
    return Spread(middle, low, high)


@dataclass
class Taken:
    """What one contender took.

    Args:
        wall_ms: for each round the milliseconds from a barrier until the slowest rank was done.
        cpu_ms: for each round the processor time of all ranks together, their backend's threads included.
        wire_bytes: what all ranks sent together in one go; None where nobody counted.
        figures: other numbers, by name: "state_bytes", "peak_bytes".
    """

    wall_ms: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)
    wire_bytes: int | None = None
    figures: dict[str, float] = field(default_factory=dict)


@dataclass
class SuiteResult:
    """One suite on one set: what every contender and every limit took, round by round.

    Args:
        suite: "step", "sync", "iteration", "checkpoint", "memory" or "construction".
        set: of `sets.SETS`.
        ranks: the number of ranks.
        tensors, parameters: of the model.
        taken: by contender. A limit's name begins with "limit: ".
    """

    suite: str
    set: str
    ranks: int
    tensors: int
    parameters: int
    taken: dict[str, Taken]

    def ratio(self, one: str, other: str, of: str = "wall_ms") -> Spread:
        """How many times as long `one` took as `other`, round by round."""
        return spread(
            [a / b for a, b in zip(getattr(self.taken[one], of), getattr(self.taken[other], of), strict=True)]
        )

    def as_json(self) -> dict[str, Any]:
        """As plain values, for json."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> SuiteResult:
        """What `as_json` made plain values of."""
        return cls(**{**value, "taken": {name: Taken(**taken) for name, taken in value["taken"].items()}})
