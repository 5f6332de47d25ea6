"""The doctor's report: as text, as JSON, and as JUnit's XML, which continuous integration reads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any
from xml.etree import ElementTree

from zero_ref.doctor.compare import Place

SHOWN_LINES = 24
"""The text of an error is cut to this many lines, the last ones; the JSON has all."""


@dataclass(frozen=True)
class Departure:
    """The place where one trial departs from the plain loop.

    Attributes:
        trial: the trial's name.
        ranks: the number of ranks.
        step: the first step that departs, counted from 0.
        phase: where in that step the departure begins: start, load, forward, backward, clip, step.
        places: the parameters, ranks and element ranges that depart there, in the model's order.
        causes: the mistakes that give what was observed, but for what reordered sums explain. Empty: the
            cause is unknown.
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
        """The first rank on which that parameter departs."""
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
            f"  {_difference(place)}",
        ]
        if self.causes:
            lines += [f"  likely cause: {cause}" for cause in self.causes]
        else:
            lines.append("  departs here, cause unknown")
        return "\n".join(lines)


def _difference(place: Place) -> str:
    if place.observed is None:
        return f"rank {place.rank} has no such tensor, or one of another shape: a Program gives whole ones"
    values = f"{place.observed:.9g} on rank {place.rank} and not {place.expected:.9g}"
    if place.ulps == float("inf"):
        return values
    return f"{values}: {place.ulps:,.3g} ulps, and reordered sums explain {place.allowed_ulps:,.3g}"


@dataclass(frozen=True)
class Raised:
    """A trial in which the program raised, ended or hung.

    Attributes:
        trial: the trial's name.
        ranks: the number of ranks.
        rank: the first rank on which the program did.
        summary: the error in one line; "timed out" if the program hung.
        text: the error with its traceback, and what became of the other ranks.
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
    """A trial that was not tried, and why.

    Attributes:
        trial: the trial's name.
        reason: why it was not tried.
        ranks: the numbers of ranks on which it was not.
        refused: whether the program refused it, or is one that cannot do it.
    """

    trial: str
    reason: str
    ranks: tuple[int, ...]
    refused: bool = False

    def __str__(self) -> str:
        return f"{self.trial}: {self.reason}"


@dataclass(frozen=True)
class Report:
    """The verdict on one program.

    Attributes:
        name: the program's name, by default the factory's.
        ranks: the numbers of ranks that were tried.
        tried: (trial, number of ranks) of each trial that was played.
        departures: the trials that depart from the plain loop, one entry for each number of ranks.
        raised: trials in which the program raised, ended or hung.
        not_tried: trials that were not played, each with its reason.
        settings: steps, seed, masters and backend, to repeat the run.
        given: the calls of NCCL that Gloo lacks and `nccl_on_gloo` gave to the program.
    """

    name: str
    ranks: tuple[int, ...]
    tried: tuple[tuple[str, int], ...]
    departures: tuple[Departure, ...]
    raised: tuple[Raised, ...]
    not_tried: tuple[NotTried, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    given: tuple[str, ...] = ()

    @property
    def healthy(self) -> bool:
        """Whether something was tried and no trial departs or raised; trials not tried do not count."""
        return bool(self.tried) and not self.departures and not self.raised

    @property
    def refused(self) -> tuple[NotTried, ...]:
        """The trials that the program refused, or cannot do."""
        return tuple(one for one in self.not_tried if one.refused)

    def check(self, *, strict: bool = False) -> None:
        """Raise if the program is not healthy; otherwise do nothing.

        Args:
            strict: raise also if the program refused a trial; leave out those that it may refuse.
        Raises:
            AssertionError: a trial departs or raised, or nothing was tried; the text is the report.
        """
        if not self.healthy:
            raise AssertionError(f"\n{self}")
        if strict and self.refused:
            raise AssertionError(f"{self.refusals}\n{self}")

    @property
    def refusals(self) -> str:
        """The message of a strict check if the program is healthy but refused some trials."""
        names = ", ".join(dict.fromkeys(one.trial for one in self.refused))
        return f"the program refused {names}, and the check is strict: leave out what it may refuse."

    @property
    def verdict(self) -> str:
        """The report in some words."""
        if self.departures:
            return "departs from the plain loop"
        if self.raised:
            return "raises or hangs"
        return "healthy" if self.healthy else "nothing could be tried"

    def __str__(self) -> str:
        sizes = ", ".join(map(str, self.ranks))
        names = dict.fromkeys(name for name, _ in self.tried)
        found: list[Departure | Raised] = [*self.departures, *self.raised]
        bad = {one.trial for one in found}
        lines = [f"{self.name} on {sizes} {'rank' if sizes == '1' else 'ranks'}: {self.verdict}"]
        good = [name for name in names if name not in bad]
        if good:
            lines.append(f"equal to the plain loop: {', '.join(good)}")
        if self.given:
            lines.append(f"given by the doctor, since Gloo lacks it: {'; '.join(self.given)}")
        for same in grouped(self.departures):
            lines += ["", str(same[0]), *_also(same[1:])]
            if not same[0].causes and any(one.trial == "plain" and one.causes for one in self.departures):
                lines.append("  the trial 'plain' departs too: mend that first")
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
        """The whole report as JSON. Infinity and NaN become null."""
        as_dict = asdict(self) | {"healthy": self.healthy}
        return json.dumps(_finite(as_dict), indent=2, allow_nan=False)

    def to_junit(self) -> str:
        """The whole report as JUnit's XML: a test case for each trial on each number of ranks.

        A departure is a failure, a trial that raised is an error, and one that was not tried is skipped.
        """
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
            on = ", ".join(map(str, left.ranks))
            case = _case(suite, self.name, f"{left.trial} on {on} ranks")
            ElementTree.SubElement(case, "skipped", message=left.reason)
        counts = {kind: len(suite.findall(f"testcase/{kind}")) for kind in ("failure", "error", "skipped")}
        suite.set("tests", str(len(suite)))
        suite.set("failures", str(counts["failure"]))
        suite.set("errors", str(counts["error"]))
        suite.set("skipped", str(counts["skipped"]))
        ElementTree.indent(suite)
        return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def grouped(departures: Sequence[Departure]) -> list[list[Departure]]:
    """Lists of departures that have the same causes. The report shows the first of each list in full."""
    by_causes: dict[tuple[str, ...], list[Departure]] = {}
    for one in departures:
        by_causes.setdefault(one.causes, []).append(one)
    return list(by_causes.values())


def _also(departures: Sequence[Departure]) -> list[str]:
    """A line that names these trials, which depart for the same reason as the one above; none if empty."""
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
    """The text without control characters, which XML does not allow."""
    return "".join(char for char in text if char.isprintable() or char in "\n\t")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return value
