"""The doctor: a program on real ranks, held against the plain loop, trial by trial."""

from __future__ import annotations

import contextlib
import io
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from zero_ref.doctor.causes import Causes
from zero_ref.doctor.compare import Where, bounds_of, first_departure
from zero_ref.doctor.mistake import Patient
from zero_ref.doctor.model import Model, Shape, quiet_scale
from zero_ref.doctor.on_rank import BY_RAISE, Case, Played, Refused, added_options, play_on_rank, takes_model
from zero_ref.doctor.plain import Make, Noise, Part, PlainLoop
from zero_ref.doctor.program import Loss
from zero_ref.doctor.report import Departure, NotTried, Raised, Report
from zero_ref.doctor.trials import NAMES, Trial, make_trials
from zero_ref.lab import ranks as lab_ranks

NOISY_RUNS = 6
"""Runs of the plain loop with noise, from which the bound is taken (`compare.SAFETY` says how)."""
MOST_HANGS = 2
"""After so many trials that hung, the rest is not tried: each waits for the whole time-out."""
PRINTED_LINES = 20
"""Of what ranks printed in a trial that raised, so many lines are in the report."""


def diagnose(
    factory: Callable[..., Any],
    *,
    from_plain: Callable[..., Any] | None = None,
    options: dict[str, Any] | None = None,
    reference: Callable[..., Any] | None = None,
    ranks: Sequence[int] = (2, 3),
    steps: int = 5,
    seed: int = 0,
    without: Sequence[str] = (),
    only: Sequence[str] | None = None,
    batch: Callable[[int, int], Any] | None = None,
    loss: Loss | None = None,
    masters: bool = False,
    backend: str | None = "gloo",
    timeout: float = 30.0,
    name: str | None = None,
) -> Report:
    """Hold a sharded optimizer, or a wrapper, against the plain loop: the first step that departs, and why.

    The program runs on real ranks with different data on each; the plain loop runs here, with the data of
    all ranks. Each thing that training does is a trial of its own (`TRIALS` has their names).

    >>> def sharded(model):
    ...     ddp = DistributedDataParallel(model)
    ...     return ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=0.05), ddp
    >>> report = diagnose(sharded, from_plain=torch.optim.AdamW, options={"lr": 0.05})  # doctest: +SKIP
    >>> report.check()  # doctest: +SKIP

    Args:
        factory: called on each rank, in a process group. It takes the doctor's model and returns the
            optimizer, (optimizer, wrapper) or a `Program`; of an optimizer alone the doctor averages the
            gradients. Or it takes nothing and returns (model, optimizer) or (model, optimizer, wrapper) of
            its own; then `batch` and `loss` are needed.
        from_plain: the class of the plain optimizer, made as `from_plain(model.parameters(), **options)`.
        reference: in place of it, a function that takes the plain model and returns its optimizer.
        ranks: numbers of ranks to try.
        steps: of each trial, 3 or more.
        seed: of values and data.
        without: names of trials to leave out.
        only: names of the trials to play; None: all.
        batch: of (rank, number), a batch of the program's own model; the same each time it is asked.
        loss: of (wrapper or model, batch), the loss.
        masters: the plain optimizer steps 32-bit copies of 16-bit parameters.
        backend: of the process groups; None: as `zero_ref.lab.ranks.run` chooses.
        timeout: seconds for a trial, times `patience()`.
        name: of the program in the report; None: the factory's.
    Returns:
        A Report; its `check()` raises if the program is not healthy.
    Raises:
        ValueError, TypeError: an argument is wrong, or no plain loop can be made of it.
    Cost: seconds to start the ranks, then tenths of a second a trial; to explain a departure takes seconds.
    """
    make = plain_maker(from_plain, options, reference)
    own = not takes_model(factory)
    _check(ranks, without, only, own, batch, loss)
    with one_thread():
        shape, optimizer = (Shape(), None) if own else shape_for(make, seed)
        trials = make_trials(steps, shape)
        case = Case(trials[0], factory, seed, own, batch, loss, added_options=added_options(optimizer))
        doctor = _Doctor(case, make, tuple(ranks), masters, backend, timeout)
        for trial in trials:
            if trial.name in without or (only is not None and trial.name not in only):
                doctor.not_tried.append(NotTried(trial.name, "left out", tuple(ranks)))
            elif own and not trial.own:
                reason = "the program has a model of its own, and this needs the doctor's"
                doctor.not_tried.append(NotTried(trial.name, reason, tuple(ranks)))
            else:
                for number in ranks:
                    doctor.examine(trial, number)
    if shape.matrices_only:
        reason = "the plain optimizer refuses parameters that are not matrices"
        doctor.not_tried.append(NotTried("biases", reason, tuple(ranks)))
    return Report(
        name or str(getattr(factory, "__name__", type(factory).__name__)),
        tuple(ranks),
        tuple(doctor.tried),
        tuple(doctor.departures),
        tuple(doctor.raised),
        tuple(doctor.not_tried),
        {"steps": steps, "seed": seed, "masters": masters, "backend": backend},
    )


def plain_maker(
    from_plain: Callable[..., Any] | None,
    options: dict[str, Any] | None,
    reference: Callable[..., Any] | None,
) -> Make:
    """A function that gives the plain optimizer of a model.

    Raises:
        ValueError: not exactly one of `from_plain` and `reference` is given, or options without a class.
    """
    if (from_plain is None) == (reference is None):
        both = "neither" if from_plain is None else "both"
        raise ValueError(f"give from_plain= or reference=, and not {both}: one of them is the plain loop.")
    if reference is not None:
        if options is not None:
            raise ValueError("options= belong to from_plain=; a reference has its own.")
        return reference
    assert from_plain is not None
    made, given = from_plain, dict(options or {})
    return lambda model: made(model.parameters(), **given)


def shape_for(make: Make, seed: int) -> tuple[Shape, Any]:
    """The doctor's model, without biases if the plain optimizer takes only matrices; and its optimizer.

    Raises:
        ValueError: the plain optimizer cannot be made.
    """
    problem: Exception | None = None
    for shape in (Shape(), Shape(matrices_only=True)):
        try:
            optimizer = make(Model(shape, seed))
        except (TypeError, ValueError) as error:
            problem = problem or error
            continue
        if not all(hasattr(optimizer, name) for name in ("step", "state", "param_groups")):
            raise ValueError(
                f"the plain loop's factory gave a {type(optimizer).__name__}: return its optimizer."
            )
        eps = getattr(optimizer, "defaults", {}).get("eps")
        return replace(shape, quiet=quiet_scale(eps if isinstance(eps, float) else None)), optimizer
    raise ValueError(f"the plain optimizer cannot be made: {type(problem).__name__}: {problem}") from problem


def _check(
    ranks: Sequence[int],
    without: Sequence[str],
    only: Sequence[str] | None,
    own: bool,
    batch: object,
    loss: object,
) -> None:
    if not ranks or any(not isinstance(number, int) or number < 1 for number in ranks):
        raise ValueError(f"ranks is {ranks!r}: give one or more numbers of ranks, such as (2, 3).")
    for name in [*without, *(only or ())]:
        if name not in NAMES:
            raise ValueError(f"there is no trial {name!r}. There are: {', '.join(NAMES)}.")
    if own and (batch is None or loss is None):
        raise ValueError(
            "the factory takes no model: give batch=, of (rank, number), and loss=, of (model, batch)."
        )
    if not own and batch is not None:
        raise ValueError("the factory takes the doctor's model, which has data of its own: leave batch= out.")


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """The ranks compute with one thread, and so does the plain loop."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def is_refusal(error: lab_ranks.RankError, number: int) -> bool:
    """Whether all ranks raised the same error by a raise statement, but for the numbers in its text."""
    if BY_RAISE not in str(error):
        return False
    begin = re.sub(r"\d+", "", f"raised {error.summary}".split("\n")[0])[:60]
    return all(re.sub(r"\d+", "", text).startswith(begin) for text in error.others.values())


class _Doctor:
    """What is the same for all trials, and what was found."""

    def __init__(
        self,
        case: Case,
        make: Make,
        ranks: tuple[int, ...],
        masters: bool,
        backend: str | None,
        timeout: float,
    ) -> None:
        self.case, self.make, self.ranks, self.masters = case, make, ranks, masters
        self.backend, self.timeout, self.hangs = backend, timeout, 0
        self.tried: list[tuple[str, int]] = []
        self.departures: list[Departure] = []
        self.raised: list[Raised] = []
        self.not_tried: list[NotTried] = []
        self.causes = Causes()

    def other(self, number: int) -> int:
        """The number of ranks on which a save is loaded: the next that is tried, or one more."""
        place = self.ranks.index(number)
        after = self.ranks[(place + 1) % len(self.ranks)]
        return after if after != number else number + 1

    def examine(self, trial: Trial, number: int) -> None:
        """One trial on one number of ranks."""
        if trial.name != "plain" and any(one.trial == "plain" and one.ranks == number for one in self.raised):
            self.not_tried.append(NotTried(trial.name, "the trial 'plain' raised", (number,)))
            return
        if self.hangs >= MOST_HANGS:
            self.not_tried.append(NotTried(trial.name, f"{self.hangs} trials hung before it", (number,)))
            return
        second = self.other(number) if trial.elsewhere else number
        divisor = number * second if trial.elsewhere else number
        case = replace(self.case, trial=trial, data_ranks=divisor)
        self.printed = io.StringIO()
        try:
            played = self.play(case, number, second)
        except lab_ranks.RankError as error:
            if trial.name != "plain" and is_refusal(error, number):
                self.not_tried.append(
                    NotTried(trial.name, f"all ranks refuse it: {error.summary}", (number,))
                )
                return
            self.hangs += error.summary == "timed out"
            self.tried.append((trial.name, number))
            printed = self.printed.getvalue().splitlines()[-PRINTED_LINES:]
            text = "\n".join([str(error), *(["", "printed last:", *printed] if printed else [])])
            self.raised.append(Raised(trial.name, number, error.rank, error.summary, text))
            return
        if isinstance(played, Refused):
            self.not_tried.append(NotTried(trial.name, played.reason, (number,)))
            return
        parts, model = played
        try:
            self.compare(case, model, (number, second), parts)
        except Exception as error:
            reason = f"the plain loop itself raises {type(error).__name__}: {error}"
            self.not_tried.append(NotTried(trial.name, reason, (number,)))
        else:
            self.tried.append((trial.name, number))

    def play(self, case: Case, number: int, second: int) -> Refused | tuple[list[Part], nn.Module]:
        """The program on real ranks: what they noted, and the model that they began with."""
        reloads = next((step.number for step in case.trial.steps if step.reloads), 0)
        with tempfile.TemporaryDirectory(prefix="zero_ref-doctor-") as folder:
            case = replace(case, folder=folder)
            calls = [(case, number)]
            if case.trial.elsewhere:
                calls = [(replace(case, last=reloads), number), (replace(case, first=reloads), second)]
            parts: list[Part] = []
            module: Any = None
            for call, size in calls:
                with contextlib.redirect_stdout(self.printed), contextlib.redirect_stderr(self.printed):
                    outcomes = lab_ranks.run(
                        play_on_rank, size, call, timeout=self.timeout, backend=self.backend
                    )
                traces = []
                for outcome in outcomes:
                    if isinstance(outcome, Refused):
                        return outcome
                    assert isinstance(outcome, Played)
                    traces.append(outcome.trace)
                    module = module or outcome.module
                parts.append(Part(traces))
        return parts, module if case.own else Model(case.trial.shape, case.seed)

    def compare(self, case: Case, model: nn.Module, ranks: tuple[int, int], observed: list[Part]) -> None:
        """Hold what ranks noted against the plain loop, and explain what departs."""

        def loop(noise: Noise | None = None) -> list[Part]:
            return PlainLoop(case, model, self.make, ranks, masters=self.masters, noise=noise).play()

        expected = loop()
        if first_departure(observed, expected, bounds_of(expected, [])) is None:
            return  # nothing to be explained by noise
        bounds = bounds_of(expected, [loop(Noise(run)) for run in range(NOISY_RUNS)])
        where: Where | None = first_departure(observed, expected, bounds)
        if where is not None:
            patient = Patient(case, model, self.make, ranks, self.masters, observed, expected, bounds, where)
            found = self.causes.of(patient)
            self.departures.append(
                Departure(case.trial.name, ranks[where.part], where.step, where.phase, where.places, found)
            )
