"""`diagnose` runs a program on real ranks and compares it with the plain loop, trial by trial."""

from __future__ import annotations

import contextlib
import inspect
import io
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zero_ref.doctor.causes import Causes
from zero_ref.doctor.compare import Where, bounds_of, first_departure
from zero_ref.doctor.mistake import Patient
from zero_ref.doctor.model import Model, Shape, quiet_scale
from zero_ref.doctor.on_rank import (
    BY_RAISE,
    Case,
    Played,
    Refused,
    added_options,
    play_on_rank,
    refusals_in,
    takes_model,
)
from zero_ref.doctor.plain import Make, Noise, Part, PlainLoop
from zero_ref.doctor.program import Loss
from zero_ref.doctor.report import Departure, NotTried, Raised, Report
from zero_ref.doctor.trials import MAX_NORM, NAMES, OWN_MAX_NORM, Trial, make_trials
from zero_ref.lab import ranks as lab_ranks
from zero_ref.lab.patience import patience

NOISY_RUNS = 6
"""Runs of the plain loop with noise, from which the bound is taken (`compare.SAFETY` says how)."""
MOST_HANGS = 2
"""Trials that may hang before the rest is not tried. Each of them waits for the whole time-out."""
PRINTED_LINES = 20
"""The report has this many lines, the last ones, of what ranks printed in a trial that raised."""


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
    fresh: bool = False,
    name: str | None = None,
) -> Report:
    """Compare a sharded optimizer, or a wrapper, with the plain loop: where it first departs, and why.

    The program runs on real ranks with different data on each. The plain loop runs in this process with the
    data of all ranks, and shards nothing. Each thing that training does is a trial of its own;
    `zero_ref.doctor.TRIALS` has their names.

    >>> def sharded(model):
    ...     ddp = DistributedDataParallel(model)
    ...     return ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=0.05), ddp
    >>> report = diagnose(sharded, from_plain=torch.optim.AdamW, options={"lr": 0.05})  # doctest: +SKIP
    >>> report.check()  # doctest: +SKIP

    Args:
        factory: makes the program; called on each rank, in a process group. It takes the doctor's model and
            returns the optimizer, (optimizer, wrapper) or a `Program`; if it returns the optimizer alone, the
            doctor averages the gradients. Or it takes nothing and returns (model, optimizer) or (model,
            optimizer, wrapper) of its own; then `batch` and `loss` are needed.
        from_plain: the class of the plain optimizer, made as `from_plain(model.parameters(), **options)`.
            Give either this or `reference`.
        options: the keyword arguments of `from_plain`.
        reference: a function that takes the plain loop's model and returns its optimizer.
        ranks: numbers of ranks; every trial is played on each of them.
        steps: the number of steps of each trial, 3 or more.
        seed: of the model's values and of the data.
        without: names of trials to leave out.
        only: names of the trials to play; None: all.
        batch: called with (rank, number), returns a batch for the program's own model: always the same one
            for the same arguments, and another one on another rank. Numbers count from 0, four for each step.
        loss: called with (wrapper or model, batch), returns the loss.
        masters: whether the plain optimizer steps 32-bit copies of 16-bit parameters.
        backend: of the process groups, "gloo" or "nccl"; None: as `zero_ref.lab.ranks.run` chooses.
        timeout: seconds for a trial, times `zero_ref.lab.patience.patience()`.
        fresh: whether each trial starts new processes, for a library that keeps its process groups. It calls
            `zero_ref.lab.ranks.shutdown`.
        name: the program's name in the report; None: the factory's.
    Returns:
        A Report; its `check()` raises if the program is not healthy.
    Raises:
        ValueError: an argument is wrong, or the plain optimizer cannot be made of it.
    Cost: seconds to start the ranks, then tenths of a second for a trial, and seconds to explain a departure.
    """
    ranks = tuple(dict.fromkeys(ranks))
    make = plain_maker(from_plain, options, reference)
    own = not takes_model(factory)
    _check(ranks, without, only, own, batch, loss)
    with one_thread(), torch.random.fork_rng(devices=[]):
        shape, optimizer = (Shape(), None) if own else shape_for(make, seed)
        trials = make_trials(steps, shape, OWN_MAX_NORM if own else MAX_NORM)
        case = Case(trials[0], factory, seed, own, batch, loss, added_options=added_options(optimizer))
        doctor = _Doctor(case, make, ranks, masters, backend, timeout, fresh)
        for trial in trials:
            if trial.name in without or (only is not None and trial.name not in only):
                doctor.not_tried.append(NotTried(trial.name, "left out", ranks))
            elif own and not trial.own:
                reason = "the program has a model of its own, and this needs the doctor's"
                doctor.not_tried.append(NotTried(trial.name, reason, ranks))
            else:
                for number in ranks:
                    doctor.examine(trial, number)
    if shape.matrices_only:
        reason = "the plain optimizer refuses parameters that are not matrices"
        doctor.not_tried.append(NotTried("biases", reason, ranks))
    return Report(
        name or str(getattr(factory, "__name__", type(factory).__name__)),
        ranks,
        tuple(doctor.tried),
        tuple(doctor.departures),
        tuple(doctor.raised),
        tuple(doctor.not_tried),
        {"steps": steps, "seed": seed, "masters": masters, "backend": backend},
        tuple(sorted(doctor.given)),
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
    """The shape of the doctor's model, and a plain optimizer of it. If the optimizer takes only matrices, the
    model has no biases.

    Raises:
        ValueError: the plain optimizer cannot be made.
    """
    problem: Exception | None = None
    for shape in (Shape(), Shape(matrices_only=True)):
        try:
            optimizer = make(Model(shape, seed))
        except Exception as error:
            problem = problem or error
            continue
        if not all(hasattr(optimizer, name) for name in ("step", "state", "param_groups")):
            raise ValueError(
                f"the plain loop's factory gave a {type(optimizer).__name__}: return its optimizer."
            )
        if needs_closure(optimizer):
            raise ValueError(
                f"{type(optimizer).__name__}.step needs a closure, and the trials call it without one."
            )
        eps = getattr(optimizer, "defaults", {}).get("eps")
        return replace(shape, quiet=quiet_scale(eps if isinstance(eps, float) else None)), optimizer
    raise ValueError(f"the plain optimizer cannot be made: {type(problem).__name__}: {problem}") from problem


def needs_closure(optimizer: Any) -> bool:
    """Whether `step()` cannot be called without an argument.

    >>> needs_closure(torch.optim.LBFGS([torch.zeros(1)])), needs_closure(torch.optim.SGD([torch.zeros(1)]))
    (True, False)
    """
    try:
        signature = inspect.signature(optimizer.step)
    except (TypeError, ValueError):  # as of some functions in C
        return False
    try:
        signature.bind()
    except TypeError:
        return True
    return False


def clips_nothing(case: Case, expected: Sequence[Part]) -> bool:
    """Whether a trial clips, and no gradient of the plain loop is so long that clipping changes it."""
    trace = [snapshot for part in expected for snapshot in part.traces[0] if snapshot.of_gradients]
    pairs = [(one.tensors, other.tensors) for one, other in pairwise(trace) if other.phase == "clip"]
    both = [(before, after[name]) for tensors, after in pairs for name, before in tensors.items()]
    changed = [one is not None and other is not None and not one.equal(other) for one, other in both]
    return bool(pairs) and not any(changed)


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
    """A context in which torch computes with one thread, as it does on the ranks."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def is_refusal(error: lab_ranks.RankError) -> bool:
    """Whether all ranks raised the same error by a `raise` statement; numbers in its text may differ."""
    if BY_RAISE not in str(error):
        return False
    begin = re.sub(r"\d+", "", f"raised {error.summary}".split("\n")[0])[:60]
    return all(re.sub(r"\d+", "", text).startswith(begin) for text in error.others.values())


def refused_alone(reasons: dict[int, str], met: lab_ranks.RankError | None = None) -> lab_ranks.RankError:
    """The error of a trial that some ranks refuse and others do not.

    Args:
        reasons: of the ranks that refuse it.
        met: what the others met meanwhile, such as a collective that never ended.
    """
    rank, reason = min(reasons.items())
    summary = f"it refuses the trial, and other ranks do not: {reason}"
    others = met.others | {met.rank: f"raised {met.summary}"} if met else {}
    text = f"rank {rank}: {summary}" + (f"\n\n{met}" if met else "")
    return lab_ranks.RankError(text, rank, summary, others)


class _Doctor:
    """The settings that all trials share, and what was found so far."""

    def __init__(
        self,
        case: Case,
        make: Make,
        ranks: tuple[int, ...],
        masters: bool,
        backend: str | None,
        timeout: float,
        fresh: bool,
    ) -> None:
        self.case, self.make, self.ranks, self.masters = case, make, ranks, masters
        self.backend, self.timeout, self.fresh, self.hangs = backend, timeout, fresh, 0
        self.tried: list[tuple[str, int]] = []
        self.departures: list[Departure] = []
        self.raised: list[Raised] = []
        self.not_tried: list[NotTried] = []
        self.given: set[str] = set()
        self.causes = Causes()

    def other(self, number: int) -> int:
        """The number of ranks on which "another world size" loads: the next in `ranks`, or one more."""
        place = self.ranks.index(number)
        after = self.ranks[(place + 1) % len(self.ranks)]
        return after if after != number else number + 1

    def examine(self, trial: Trial, number: int) -> None:
        """Play one trial on `number` ranks, and keep what it shows."""
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
        began = time.monotonic()
        try:
            played = self.play(case, number, second)
        except lab_ranks.RankError as error:
            if trial.name != "plain" and is_refusal(error):
                reason = f"all ranks refuse it: {error.summary}"
                self.not_tried.append(NotTried(trial.name, reason, (number,), refused=True))
                return
            # A collective gives up before the whole time-out is over.
            self.hangs += time.monotonic() - began >= lab_ranks.COLLECTIVE_SHARE * self.timeout * patience()
            self.tried.append((trial.name, number))
            printed = self.printed.getvalue().splitlines()[-PRINTED_LINES:]
            text = "\n".join([str(error), *(["", "printed last:", *printed] if printed else [])])
            self.raised.append(Raised(trial.name, number, error.rank, error.summary, text))
            return
        if isinstance(played, Refused):
            self.not_tried.append(NotTried(trial.name, played.reason, (number,), refused=True))
            return
        parts, model, options = played
        why_not = self.compare(case, model, (number, second), parts, options)
        if why_not is None:
            self.tried.append((trial.name, number))
        else:
            self.not_tried.append(NotTried(trial.name, why_not, (number,)))

    def play(
        self, case: Case, number: int, second: int
    ) -> Refused | tuple[list[Part], nn.Module, dict[str, Any]]:
        """Run the program on real ranks.

        Returns:
            What the ranks noted, before and after a save, the model as it was at first, and the options of
            the program's optimizer. Refused: the program cannot do the trial.
        Raises:
            RankError: a rank raised, ended or hung, or not all of them refuse the trial.
        """
        reloads = next((step.number for step in case.trial.steps if step.reloads), 0)
        with tempfile.TemporaryDirectory(prefix="zero_ref-doctor-") as folder:
            case = replace(case, folder=folder)
            calls = [(case, number)]
            if case.trial.elsewhere:
                calls = [(replace(case, last=reloads), number), (replace(case, first=reloads), second)]
            parts: list[Part] = []
            module: Any = None
            options: dict[str, Any] = {}
            for call, size in calls:
                if self.fresh:
                    lab_ranks.shutdown()
                with contextlib.redirect_stdout(self.printed), contextlib.redirect_stderr(self.printed):
                    try:
                        outcomes = lab_ranks.run(
                            play_on_rank, size, call, timeout=self.timeout, backend=self.backend
                        )
                    except lab_ranks.RankError as error:
                        if reasons := refusals_in(Path(folder)):
                            raise refused_alone(reasons, error) from error
                        raise
                if reasons := {r: one.reason for r, one in enumerate(outcomes) if isinstance(one, Refused)}:
                    if len(reasons) == size:
                        return Refused(reasons[0])
                    raise refused_alone(reasons)
                traces = []
                for outcome in outcomes:
                    assert isinstance(outcome, Played)
                    traces.append(outcome.trace)
                    self.given |= outcome.given
                    module = module or outcome.module
                    options = options or outcome.options
                parts.append(Part(traces))
        return parts, module if case.own else Model(case.trial.shape, case.seed), options

    def compare(
        self,
        case: Case,
        model: nn.Module,
        ranks: tuple[int, int],
        observed: list[Part],
        options: dict[str, Any],
    ) -> str | None:
        """Compare what the ranks noted with the plain loop, and explain what departs.

        Returns:
            The reason why nothing could be compared; None if it was.
        """

        def loop(noise: Noise | None = None) -> list[Part]:
            return PlainLoop(case, model, self.make, ranks, masters=self.masters, noise=noise).play()

        try:
            expected = loop()
        except Exception as error:
            return f"the plain loop itself raises {type(error).__name__}: {error}"
        if clips_nothing(case, expected):
            return "the gradients are shorter than the limit, so nothing would be clipped"
        exact = bounds_of(expected, [])
        if first_departure(observed, expected, exact) is None:
            return None  # nothing to be explained by noise
        if first_departure(loop(), expected, exact) is not None:
            return "the plain loop gives other values each time it is played"
        bounds = bounds_of(expected, [loop(Noise(run)) for run in range(NOISY_RUNS)])
        where: Where | None = first_departure(observed, expected, bounds)
        if where is not None:
            patient = Patient(
                case, model, self.make, ranks, self.masters, observed, expected, bounds, where, options
            )
            found = self.causes.of(patient)
            self.departures.append(
                Departure(case.trial.name, ranks[where.part], where.step, where.phase, where.places, found)
            )
        return None
