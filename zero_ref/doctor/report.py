"""The doctor's report: as text, as JSON, and as Markdown and JUnit's XML, for continuous integration."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from math import isfinite
from typing import Any
from xml.etree import ElementTree

from zero_ref.doctor.compare import Place

SHOWN_PLACES = 3
"""Of a departure so many parameters are shown with their numbers; the JSON has all."""
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
        hints: what can be read off the numbers, each with its evidence; perhaps nothing.
    """

    trial: str
    ranks: int
    step: int
    phase: str
    places: tuple[Place, ...]
    hints: tuple[str, ...] = ()

    @property
    def parameter(self) -> str:
        """The first parameter that departs."""
        return self.places[0].parameter

    @property
    def begins(self) -> tuple[str, tuple[str, ...]]:
        """The phase and the parameters in which it begins."""
        return self.phase, self.parameters

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
        on = ", ".join(map(str, self.ranks_departing))
        ranks = f"rank{'s' if len(self.ranks_departing) > 1 else ''} {on} of {self.ranks}"
        lines = [f"{self.trial}: departs in step {self.step}, in {self.phase}, on {ranks}"]
        shown = list({place.parameter: place for place in reversed(self.places)}.values())[::-1]
        for place in shown[:SHOWN_PLACES]:
            what = "loss" if place.kind == "loss" else f"{place.kind} of {place.parameter}"
            lines += [f"  {what}, {place.elements}", f"    {_difference(place)}"]
        if len(shown) > SHOWN_PLACES:
            lines.append(f"  and {len(shown) - SHOWN_PLACES} more")
        return "\n".join([*lines, *(f"  {hint}" for hint in self.hints)])


def _difference(place: Place) -> str:
    if place.observed is None:
        return f"rank {place.rank} has no such tensor, or one of another shape: a Program gives whole ones"
    values = f"rank {place.rank} has {place.observed:.7g} and not {place.expected:.7g}"
    if not isfinite(place.observed):
        return values
    ratio = f", {place.ratio:.4g} times in each of them" if place.ratio and place.departing > 1 else ""
    off = f"off by {place.observed - place.expected:.3g}, and rounding explains {place.allowed:.1g}"
    return f"{values}{ratio}: {off}"


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
        settings: steps, seed, masters, gradients, accumulation and backend, to repeat the run.
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
        if ("accumulation", self.ranks[0]) in self.tried and self.settings.get("accumulation"):
            lines.append(f"gradients of a step's micro-batches: their {self.settings['accumulation']}")
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
        """The whole report as JSON. Infinity and NaN become null."""
        as_dict = asdict(self) | {"healthy": self.healthy}
        return json.dumps(_finite(as_dict), indent=2, allow_nan=False)

    def to_markdown(self) -> str:
        """The report as Markdown, for the summary of a job in continuous integration."""
        found: list[Departure | Raised] = [*self.departures, *self.raised]
        bad = {(one.trial, one.ranks): one for one in found}
        lines = [f"## {self.name}: {self.verdict}", "", "| trial | ranks | result |", "|---|---|---|"]
        for trial, ranks in self.tried:
            one = bad.get((trial, ranks))
            result = "equal to the plain loop"
            if one is not None:
                result = str(one).split("\n")[0].partition(": ")[2].replace("|", "\\|")
            lines.append(f"| {trial} | {ranks} | {result} |")
        for left in self.not_tried:
            lines.append(f"| {left.trial} | {', '.join(map(str, left.ranks))} | not tried: {left.reason} |")
        shown: list[Departure | Raised] = [*(same[0] for same in grouped(self.departures)), *self.raised]
        for one in shown:
            lines += ["", "```text", *str(one).split("\n"), "```"]
        return "\n".join(lines) + "\n"

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
    """Lists of departures that begin in the same phase and parameters. The report shows the first in full."""
    by_place: dict[tuple[str, tuple[str, ...]], list[Departure]] = {}
    for one in departures:
        by_place.setdefault(one.begins, []).append(one)
    return list(by_place.values())


def _also(departures: Sequence[Departure]) -> list[str]:
    """A line that names these trials, which depart in the same phase and parameters; none if empty."""
    of_trial: dict[str, list[str]] = {}
    for one in departures:
        of_trial.setdefault(one.trial, []).append(str(one.ranks))
    if not of_trial:
        return []
    trials = ", ".join(f"{trial} ({', '.join(ranks)})" for trial, ranks in of_trial.items())
    return [f"  also departs there, in trials (on ranks): {trials}"]


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
