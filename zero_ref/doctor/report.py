"""What the doctor found: in a terminal, as JSON, and as JUnit's XML for a continuous integration."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any
from xml.etree import ElementTree

from zero_ref.doctor.compare import Place

SHOWN_LINES = 24
"""Of the text of an error so many lines are shown, the last ones."""


@dataclass(frozen=True)
class Departure:
    """Where one trial departs from the plain loop.

    Attributes:
        trial: its name.
        ranks: the number of ranks.
        step: the first step that departs, from 0 on.
        phase: the phase in which it begins: start, load, forward, backward, clip, step.
        places: the parameters, ranks and element ranges that depart there, the first parameter first.
        causes: those that give, within what reordered sums explain, what was observed. Empty: unknown.
    """

    trial: str
    ranks: int
    step: int
    phase: str
    places: tuple[Place, ...]
    causes: tuple[str, ...] = ()

    @property
    def parameter(self) -> str:
        """The first parameter that departs."""
        return self.places[0].parameter

    @property
    def rank(self) -> int:
        """The first rank on which it does."""
        return self.places[0].rank

    @property
    def ranks_departing(self) -> tuple[int, ...]:
        """All ranks on which something departs in this step and phase."""
        return tuple(sorted({place.rank for place in self.places}))

    @property
    def parameters(self) -> tuple[str, ...]:
        """All parameters that depart in this step and phase."""
        return tuple(dict.fromkeys(place.parameter for place in self.places))

    def __str__(self) -> str:
        place = self.places[0]
        others = len(self.parameters) - 1
        also = f", and {others} other{'s' if others > 1 else ''}" if others else ""
        on = ", ".join(map(str, self.ranks_departing))
        ranks = f"rank{'s' if len(self.ranks_departing) > 1 else ''} {on} of {self.ranks}"
        lines = [
            f"{self.trial}: departs in step {self.step}, in {self.phase}, on {ranks}",
            f"  first {place.parameter}[{place.start}:{place.stop}] of {place.numel} elements{also}",
            f"  {place.observed:.9g} on rank {place.rank} and not {place.expected:.9g}: {_ulps(place)}",
        ]
        if self.causes:
            lines += [f"  likely cause: {cause}" for cause in self.causes]
        else:
            lines.append("  departs here, cause unknown")
        return "\n".join(lines)


def _ulps(place: Place) -> str:
    if place.ulps == float("inf"):
        return "not a number, or not there"
    return f"{place.ulps:,.3g} ulps, and reordered sums explain {place.allowed_ulps:,.3g}"


@dataclass(frozen=True)
class Raised:
    """A trial in which the program raised, ended or hung.

    Attributes:
        rank: the first on which it did.
        summary: in one line.
        text: with the traceback, and what became of the other ranks.
    """

    trial: str
    ranks: int
    rank: int
    summary: str
    text: str

    def __str__(self) -> str:
        lines = self.text.splitlines()[1:]
        if len(lines) > SHOWN_LINES:
            lines = [f"... ({len(lines) - SHOWN_LINES} more lines in the JSON)", *lines[-SHOWN_LINES:]]
        indented = "\n".join(f"    {line}" for line in lines)
        return f"{self.trial}: rank {self.rank} of {self.ranks}: {self.summary}\n{indented}"


@dataclass(frozen=True)
class NotTried:
    """A trial that was not tried, and why."""

    trial: str
    reason: str
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.trial}: {self.reason}"


@dataclass(frozen=True)
class Report:
    """The verdict on one program.

    Attributes:
        name: of the factory.
        ranks: the numbers of ranks that were tried.
        tried: the trials that were played, as (trial, ranks).
        departures: where trials depart from the plain loop.
        raised: trials in which the program raised or hung.
        not_tried: trials that were left out, each with its reason.
        settings: steps, seed, and whatever else is needed to repeat it.
    """

    name: str
    ranks: tuple[int, ...]
    tried: tuple[tuple[str, int], ...]
    departures: tuple[Departure, ...]
    raised: tuple[Raised, ...]
    not_tried: tuple[NotTried, ...]
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def healthy(self) -> bool:
        """Nothing that was tried departs or raised."""
        return not self.departures and not self.raised

    def check(self) -> None:
        """Do nothing if the program is healthy.

        Raises:
            AssertionError: it is not; the text is the report.
        """
        if not self.healthy:
            raise AssertionError(f"\n{self}")

    def __str__(self) -> str:
        sizes = ", ".join(map(str, self.ranks))
        names = dict.fromkeys(name for name, _ in self.tried)
        found: list[Departure | Raised] = [*self.departures, *self.raised]
        bad = {one.trial for one in found}
        lines = [
            f"{self.name} on {sizes} ranks: {'healthy' if self.healthy else 'departs from the plain loop'}"
        ]
        good = [name for name in names if name not in bad]
        if good:
            lines.append(f"equal to the plain loop: {', '.join(good)}")
        for same in grouped(self.departures):
            lines += ["", str(same[0]), *_also(same[1:])]
        for one in self.raised:
            lines += ["", str(one)]
        if self.not_tried:
            by_reason: dict[str, list[str]] = {}
            for left in self.not_tried:
                names_of = by_reason.setdefault(left.reason, [])
                names_of += [left.trial] if left.trial not in names_of else []
            lines += ["", "not tried:"]
            lines += [f"  {', '.join(trials)}: {reason}" for reason, trials in by_reason.items()]
        return "\n".join(lines)

    def to_json(self) -> str:
        """All of it as JSON; numbers that are not finite become null."""
        as_dict = asdict(self) | {"healthy": self.healthy}
        return json.dumps(_finite(as_dict), indent=2, allow_nan=False)

    def to_junit(self) -> str:
        """All of it as JUnit's XML: a test case for each trial and number of ranks."""
        suite = ElementTree.Element("testsuite", name=f"zero-ref doctor {self.name}")
        found: list[Departure | Raised] = [*self.departures, *self.raised]
        bad = {(one.trial, one.ranks): one for one in found}
        for trial, ranks in self.tried:
            case = _case(suite, self.name, f"{trial} on {ranks} ranks")
            if one := bad.get((trial, ranks)):
                kind = "error" if isinstance(one, Raised) else "failure"
                text = str(one)
                ElementTree.SubElement(case, kind, message=text.split("\n")[0]).text = _printable(text)
        for left in self.not_tried:
            case = _case(suite, self.name, left.trial)
            ElementTree.SubElement(case, "skipped", message=left.reason)
        counts = {kind: len(suite.findall(f"testcase/{kind}")) for kind in ("failure", "error", "skipped")}
        suite.set("tests", str(len(suite)))
        suite.set("failures", str(counts["failure"]))
        suite.set("errors", str(counts["error"]))
        suite.set("skipped", str(counts["skipped"]))
        ElementTree.indent(suite)
        return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def grouped(departures: Sequence[Departure]) -> list[list[Departure]]:
    """Departures that have the same causes, together; the first of each is the one to be read."""
    by_causes: dict[tuple[str, ...], list[Departure]] = {}
    for one in departures:
        by_causes.setdefault(one.causes, []).append(one)
    return list(by_causes.values())


def _also(departures: Sequence[Departure]) -> list[str]:
    """A line with the trials that depart for the same reason."""
    of_trial: dict[str, list[str]] = {}
    for one in departures:
        of_trial.setdefault(one.trial, []).append(str(one.ranks))
    if not of_trial:
        return []
    why = "for the same cause" if departures[0].causes else "for no known cause"
    trials = ", ".join(f"{trial} ({', '.join(ranks)})" for trial, ranks in of_trial.items())
    return [f"  also departs {why}, in trials (on ranks): {trials}"]


def _case(suite: ElementTree.Element, name: str, test: str) -> ElementTree.Element:
    return ElementTree.SubElement(suite, "testcase", classname=f"doctor.{_printable(name)}", name=test)


def _printable(text: str) -> str:
    """Without the control characters that XML does not know."""
    return "".join(char for char in text if char.isprintable() or char in "\n\t")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return value
