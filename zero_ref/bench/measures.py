"""How the number of a target is read from what contenders took. Plain arithmetic."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from zero_ref.bench.results import LIMIT, Spread, SuiteResult, spread


class Measure(Protocol):
    """How a number is read from what the contenders of a suite took."""

    def needs(self) -> tuple[str, ...]:
        """The other contenders and limits that it reads."""

    def of(self, result: SuiteResult, ours: str) -> Spread | None:
        """The number; None where it was not counted on that machine."""

    def says(self) -> str:
        """What the number is."""


class TimesFaster(NamedTuple):
    """A peer's time by ours, round by round."""

    peer: str
    time: str = "wall_ms"

    def needs(self) -> tuple[str, ...]:
        return (self.peer,)

    def of(self, result: SuiteResult, ours: str) -> Spread:
        return result.ratio(self.peer, ours, self.time)

    def says(self) -> str:
        return f"{self.peer} / ours, {'wall' if self.time == 'wall_ms' else 'CPU'} time"


class OverLimits(NamedTuple):
    """Our time by the sum of some limits, round by round."""

    limits: tuple[str, ...]

    def needs(self) -> tuple[str, ...]:
        return self.limits

    def of(self, result: SuiteResult, ours: str) -> Spread:
        return result.over(ours, self.limits)

    def says(self) -> str:
        return f"ours / ({' + '.join(limit.removeprefix(LIMIT) for limit in self.limits)})"


class Wire(NamedTuple):
    """What all ranks sent, in (N-1)Ψ."""

    def needs(self) -> tuple[str, ...]:
        return ()

    def of(self, result: SuiteResult, ours: str) -> Spread | None:
        units = result.wire_units(ours)
        return None if units is None else spread([units])

    def says(self) -> str:
        return "bytes sent, in (N-1)Ψ"


class ExtraMemory(NamedTuple):
    """A figure of the contender's that counts bytes, in MB."""

    figure: str
    where: str

    def needs(self) -> tuple[str, ...]:
        return ()

    def of(self, result: SuiteResult, ours: str) -> Spread | None:
        found = result.taken[ours].figures.get(self.figure)
        return None if found is None else spread([found / 1e6])

    def says(self) -> str:
        return f"extra MB {self.where}"


class StateShare(NamedTuple):
    """Our state on the fullest rank, as a multiple of 1/N of a contender's that keeps all of it."""

    whole: str

    def needs(self) -> tuple[str, ...]:
        return (self.whole,)

    def of(self, result: SuiteResult, ours: str) -> Spread | None:
        mine, all_of_it = (result.taken[name].figures.get("state_bytes") for name in (ours, self.whole))
        return spread([mine * result.ranks / all_of_it]) if mine is not None and all_of_it else None

    def says(self) -> str:
        return "state on the fullest rank, in 1/N of all of it"
