"""One point of a curve of growth, as plain values, and the work there was to do. Standard library only."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

AXES = ("parameters", "tensors", "ranks")
TIMED = ("step", "sync", "consolidate", "construct")


@dataclass(frozen=True)
class GrowthPoint:
    """What one contender took for one thing at one size.

    Args:
        axis: what is varied: of AXES.
        what: of TIMED.
        contender: a limit's name begins with "limit: ".
        tensors, parameters: of the model; all tensors but the first have one size, and it what is left.
        wall_ms, cpu_ms: of each round, as `results.Taken` has them.
    """

    axis: str
    what: str
    contender: str
    ranks: int
    tensors: int
    parameters: int
    wall_ms: tuple[float, ...]
    cpu_ms: tuple[float, ...]

    @property
    def amount(self) -> int:
        """Where the point lies on its axis."""
        return int(getattr(self, self.axis))

    @property
    def work(self) -> float:
        """What there is to do: tensors where these are varied, else bytes of memory traffic of all ranks.

        An element's update moves 28 bytes. Its new value is read and written twice on the way to each other
        rank: by the sender into the kernel, by the receiver out of it. Of state there are 8 bytes an element;
        rank 0 copies its own part and is sent the others. Construction copies all parameters on every rank.

        >>> [GrowthPoint("ranks", what, "ours", 4, 100, 10**6, (), ()).work / 1e6 for what in TIMED]
        [76.0, 48.0, 28.0, 32.0]
        """
        if self.axis == "tensors":
            return self.tensors
        sent = 16 * (self.ranks - 1)
        an_element = {
            "step": 28 + sent,
            "sync": sent,
            "consolidate": (16 + 2 * sent) / self.ranks,
            "construct": 8 * self.ranks,
        }
        return self.parameters * an_element[self.what]

    @property
    def times_ms(self) -> tuple[float, ...]:
        """Wall time; where ranks are varied the processor time of all of them, because they share cores."""
        return self.cpu_ms if self.axis == "ranks" else self.wall_ms

    def as_json(self) -> dict[str, Any]:
        """As plain values, for json."""
        return asdict(self)
