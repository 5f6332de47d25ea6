"""`diagnose` runs a program on real ranks and compares it with the plain loop, trial by trial."""

from __future__ import annotations

import contextlib
import inspect
import io
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from zero_ref.doctor.compare import Bounds, bounds_of, first_departure
from zero_ref.doctor.model import Model, Shape
from zero_ref.doctor.on_rank import (
    BY_RAISE,
    Case,
    Played,
    added_options,
    play_on_rank,
    refusals_in,
    takes_model,
)
from zero_ref.doctor.plain import Make, Noise, Part, PlainLoop
from zero_ref.doctor.program import Loss
from zero_ref.doctor.reading import Patient, begins, read
from zero_ref.doctor.report import Departure, NotTried, Raised, Report
from zero_ref.doctor.trials import MAX_NORM, NAMES, OWN_MAX_NORM, TOGETHER, Trial, make_trials, together
from zero_ref.lab import ranks as lab_ranks
from zero_ref.lab.patience import patience

NOISY_RUNS = 6
"""Runs of the plain loop with noise, from which the bound is taken (`compare.SAFETY` says how)."""
FEW = 3
"""Where no tensor departs in more elements, each run is made again with the opposite noise: where gradients
cancel, one of the two has the other sign, and Adam makes a whole step the other way."""
MOST_HANGS = 2
"""Trials that may hang before the rest is not tried. Each of them waits for the whole time-out."""
LEFT_OUT = "left out"
"""The reason why a trial is not tried that the user left out."""
PRINTED_LINES = 20
"""The report has this many lines, the last ones, of what ranks printed in a trial that raised."""


def diagnose(
    factory: Callable[..., Any],
    *,
    from_plain: Callable[..., Any] | None = None,
    options: dict[str, Any] | None = None,
    reference: Callable[..., Any] | None = None,
    ranks: Sequence[int] = (2, 3, 4),
    steps: int = 5,
    seed: int = 0,
    without: Sequence[str] = (),
    only: Sequence[str] | None = None,
    batch: Callable[[int, int], Any] | None = None,
    loss: Loss | None = None,
    masters: bool = False,
    gradients: torch.dtype | None = None,
    accumulation: Literal["sum", "mean"] | None = None,
    backend: str | None = "gloo",
    timeout: float = 30.0,
    fresh: bool = False,
    name: str | None = None,
) -> Report:
    """Compare a sharded optimizer, or a wrapper, with the plain loop: where it first departs, and by what.

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
        only: names of the trials to play, whose things "all together" then has; None: all.
        batch: called with (rank, number), returns a batch for the program's own model: always the same one
            for the same arguments, and another one on another rank. Numbers count from 0, six for each step.
            Ranks may have batches of different sizes: right is then what one process with all data does.
        loss: called with (wrapper or model, batch), returns the loss.
        masters: whether the plain optimizer steps 32-bit copies of 16-bit parameters.
        gradients: the dtype in which gradients are meant to be computed or sent, such as torch.bfloat16:
            rounding to it is no departure then, and losses are not compared.
        accumulation: whether the gradients of micro-batches are meant to be added up ("sum") or averaged
            ("mean"). None: either is right, but the same one in all trials.
        backend: of the process groups, "gloo" or "nccl"; None: as `zero_ref.lab.ranks.run` chooses.
        timeout: seconds for a trial, times `zero_ref.lab.patience.patience()`.
        fresh: whether each trial starts new processes, for a library that keeps its process groups. It calls
            `zero_ref.lab.ranks.shutdown`.
        name: the program's name in the report; None: the factory's.
    Returns:
        A Report; its `check()` raises if the program is not healthy.
    Raises:
        ValueError: an argument is wrong, or the plain optimizer cannot be made of it.
    Cost: seconds to start the ranks, then tenths of a second for a trial.
    """
    ranks = tuple(dict.fromkeys(ranks))
    make = plain_maker(from_plain, options, reference)
    own = not takes_model(factory)
    _check(ranks, without, only, own, batch, loss)
    with one_thread(), torch.random.fork_rng(devices=[]):
        shape, optimizer = (Shape(), None) if own else shape_for(make, seed)
        max_norm = OWN_MAX_NORM if own else MAX_NORM
        trials = make_trials(steps, shape, max_norm, masters)
        case = Case(trials[0], factory, seed, own, batch, loss, added_options=added_options(optimizer))
        doctor = _Doctor(case, make, ranks, masters, gradients, accumulation, backend, timeout, fresh)
        chosen = [name for name in NAMES if name not in without and (only is None or name in only)]
        for trial in trials:
            if trial.name not in chosen:
                doctor.not_tried.append(NotTried(trial.name, LEFT_OUT, ranks))
            elif own and not trial.own:
                reason = "the program has a model of its own, and this needs the doctor's"
                doctor.not_tried.append(NotTried(trial.name, reason, ranks))
            elif not trial.needs:
                for number in ranks:
                    doctor.examine(trial, number)
        named = NAMES if chosen == [TOGETHER] else chosen
        alone = [
            one.name for one in trials if not one.needs and one.name in named and one.name not in without
        ]
        pairs = [one for one in trials if one.needs and one.name in chosen and (one.own or not own)]
        for number in ranks:
            if TOGETHER in chosen:
                names = [name for name in alone if doctor.allows(name, number)]
                doctor.examine_together(names, pairs, number, max_norm)
            else:
                doctor.not_tried.append(NotTried(TOGETHER, LEFT_OUT, (number,)))
                for pair in pairs:
                    doctor.examine(pair, number)
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
        {
            "steps": steps,
            "seed": seed,
            "masters": masters,
            "gradients": None if gradients is None else str(gradients).removeprefix("torch."),
            "accumulation": accumulation or doctor.accumulation,
            "backend": backend,
        },
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
        return replace(shape, eps=eps if isinstance(eps, float) else 0.0), optimizer
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


@dataclass
class _Doctor:
    """The settings that all trials share, as `diagnose` has them, and what was found so far."""

    case: Case
    make: Make
    ranks: tuple[int, ...]
    masters: bool = False
    gradients: torch.dtype | None = None
    accumulation: str | None = None
    backend: str | None = None
    timeout: float = 30.0
    fresh: bool = False
    hangs: int = 0
    tried: list[tuple[str, int]] = field(default_factory=list)
    departures: list[Departure] = field(default_factory=list)
    raised: list[Raised] = field(default_factory=list)
    not_tried: list[NotTried] = field(default_factory=list)
    given: set[str] = field(default_factory=set)

    def other(self, number: int) -> int:
        """The number of ranks on which "another world size" loads: the next in `ranks`, or another one.

        For an even number this is an even one too, since a mesh of two dimensions may need it.
        """
        after = self.ranks[(self.ranks.index(number) + 1) % len(self.ranks)]
        if after != number:
            return after
        if number % 2:
            return max(2, number - 1)
        return number // 2 if number > 2 else 4

    def allows(self, name: str, number: int) -> bool:
        """Whether nothing is known that keeps a trial from being a part of another one."""
        found: list[Departure | Raised] = [*self.departures, *self.raised]
        left = [one for one in self.not_tried if one.trial == name and one.reason != LEFT_OUT]
        return not any(number in one.ranks for one in left) and not any(
            one.trial == name and one.ranks == number for one in found
        )

    def why_not(self, trial: Trial, number: int) -> str | None:
        """The reason why a trial is not tried after what was found before; None if it is."""
        if trial.name != "plain" and any(one.trial == "plain" and one.ranks == number for one in self.raised):
            return "the trial 'plain' raised"
        if self.hangs >= MOST_HANGS:
            return f"{self.hangs} trials hung before it"
        for one in self.raised:
            if one.trial == trial.name != "plain":
                return f"it raised on {one.ranks} ranks"
        lacking = [name for name in trial.needs if not self.allows(name, number)]
        if lacking:
            return f"the trial {lacking[0]!r} was not played, or departs"
        return None

    def examine_together(
        self, names: Sequence[str], pairs: Sequence[Trial], number: int, max_norm: float
    ) -> None:
        """Play all things of these names in one trial. Only if that is not equal, play the pairs, which tell
        more.
        """
        make = partial(together, shape=self.case.trial.shape, max_norm=max_norm, own=self.case.own)
        found = self.result(make(names), number)
        for pair in pairs:
            if found is None and set(pair.needs) <= set(names):
                covered = f"{TOGETHER!r} has both, and is equal"
                self.not_tried.append(NotTried(pair.name, covered, (number,)))
            else:
                self.examine(pair, number)
        # Such as a group that can be added and not saved: the rest may go together.
        clash = {pair.needs[0] for pair in pairs if not self.allows(pair.name, number)}
        if found is not None and clash:
            found = self.result(make([name for name in names if name not in clash]), number)
        self.keep(TOGETHER, number, found)

    def examine(self, trial: Trial, number: int) -> None:
        """Play one trial on `number` ranks, and keep what it shows."""
        self.keep(trial.name, number, self.result(trial, number))

    def keep(self, name: str, number: int, found: Departure | Raised | NotTried | None) -> None:
        """Keep the result of a trial."""
        if isinstance(found, NotTried):
            self.not_tried.append(found)
            return
        self.tried.append((name, number))
        if isinstance(found, Departure):
            self.departures.append(found)
        elif found is not None:
            self.raised.append(found)

    def result(self, trial: Trial, number: int) -> Departure | Raised | NotTried | None:
        """Play one trial on `number` ranks. None: it is equal to the plain loop."""
        if reason := self.why_not(trial, number):
            return NotTried(trial.name, reason, (number,))
        second = self.other(number) if trial.elsewhere else number
        case = replace(self.case, trial=trial)
        self.printed = io.StringIO()
        began = time.monotonic()
        try:
            played = self.play(case, number, second)
        except lab_ranks.RankError as error:
            if trial.name != "plain" and is_refusal(error):
                reason = f"all ranks refuse it: {error.summary}"
                return NotTried(trial.name, reason, (number,), refused=True)
            # A collective gives up before the whole time-out is over.
            self.hangs += time.monotonic() - began >= lab_ranks.COLLECTIVE_SHARE * self.timeout * patience()
            printed = self.printed.getvalue().splitlines()[-PRINTED_LINES:]
            rank, summary, text = told(error)
            text = "\n".join([text, *(["", "printed last:", *printed] if printed else [])])
            return Raised(trial.name, number, rank, summary, text)
        if isinstance(played, str):
            return NotTried(trial.name, played, (number,), refused=True)
        parts, model, alike = played
        return self.compare(replace(case, added_alike=alike), model, (number, second), parts)

    def play(self, case: Case, number: int, second: int) -> str | tuple[list[Part], nn.Module, bool]:
        """Run the program on real ranks.

        Returns:
            What the ranks noted, before and after a save, the model as it was at first, and whether the
            added layer is averaged by the doctor's method. Or the reason why the program cannot do the trial.
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
            for call, size in calls:
                if self.fresh:
                    lab_ranks.shutdown()
                outcomes: list[Played | None] = []
                met: lab_ranks.RankError | None = None
                with contextlib.redirect_stdout(self.printed), contextlib.redirect_stderr(self.printed):
                    try:
                        outcomes = lab_ranks.run(
                            play_on_rank, size, call, timeout=self.timeout, backend=self.backend
                        )
                    except lab_ranks.RankError as error:
                        met = error
                reasons = refusals_in(Path(folder))
                if len(reasons) == size:
                    return reasons[0]
                if reasons:
                    raise refused_alone(reasons, met) from met
                if met is not None:
                    raise met
                played = [outcome for outcome in outcomes if isinstance(outcome, Played)]
                module = module or played[0].module
                self.given |= {call for one in played for call in one.given}
                parts.append(Part([one.trace for one in played]))
        model = module if case.own else Model(case.trial.shape, case.seed)
        return parts, model, all(one.averages_added for one in played)

    def compare(
        self, case: Case, model: nn.Module, ranks: tuple[int, int], observed: list[Part]
    ) -> Departure | NotTried | None:
        """Compare what the ranks noted with the plain loop, and read off what departs.

        Gradients of micro-batches may be added up or averaged, until the first trial that accumulates has
        shown which of the two the program does.

        Returns:
            None: they are equal. NotTried: nothing could be compared.
        """
        left = partial(NotTried, case.trial.name, ranks=(ranks[0],))
        accumulates = any(step.micro > 1 for step in case.trial.steps)
        ways = [self.accumulation] if self.accumulation or not accumulates else ["sum", "mean"]
        found: list[Departure] = []
        for way in ways:
            make: Callable[..., Any] = partial(self.loop, case, model, ranks, way == "mean")
            try:
                expected = make().play()
            except Exception as error:
                return left(f"the plain loop itself raises {type(error).__name__}: {error}")
            if clips_nothing(case, expected):
                return left("the gradients are shorter than the limit, so nothing would be clipped")
            if first_departure(observed, expected, bounds_of(expected, [])) is None:
                self.learned(way if accumulates else None)
                return None  # the last bits need no further runs
            if first_departure(make().play(), expected, bounds_of(expected, [])) is not None:
                return left("the plain loop gives other values each time it is played")
            noisy: list[list[Part]] = []
            for opposite in (False, True):
                noises = [Noise(run, self.gradients, opposite) for run in range(NOISY_RUNS)]
                noisy += [make(noise=noise).play() for noise in noises]
                bounds = bounds_of(expected, noisy)
                self.forgive(case, bounds)
                where = first_departure(observed, expected, bounds)
                if where is None or any(place.departing > FEW for place in where.places):
                    break
            if where is None:
                self.learned(way if accumulates else None)
                return None
            patient = Patient(case.trial.steps, make, observed, expected, bounds, where)
            where = begins(patient)
            departure = Departure(case.trial.name, ranks[where.part], where.step, where.phase, where.places)
            # Of departures that begin alike the report shows the first in full, and names the others.
            like = next((one for one in self.departures if one.begins == departure.begins), None)
            if like is None:
                found.append(replace(departure, hints=read(patient, where)))
            else:
                text = f"it begins where the trial {like.trial!r} does on {like.ranks} ranks"
                found.append(replace(departure, hints=(text,)))
        return max(found, key=lambda one: one.step)

    def forgive(self, case: Case, bounds: Bounds) -> None:
        """Compare no losses where a right program may have others.

        In 16 bits they are rounded more than gradients are. A loss of the program's own may weight a rank's
        batch by the tokens of all ranks, so that ranks' losses are right only together.
        """
        if self.gradients is not None or case.own:
            for (_, phase), of_snapshot in [one for part in bounds for one in part.items()]:
                if phase == "forward":
                    of_snapshot["loss"].fill_(torch.inf)

    def learned(self, accumulation: str | None) -> None:
        """Keep what a healthy trial has shown: how the program treats the gradients of micro-batches."""
        self.accumulation = accumulation or self.accumulation

    def loop(
        self,
        case: Case,
        model: nn.Module,
        ranks: tuple[int, int],
        mean: bool,
        kind: type[PlainLoop] = PlainLoop,
        noise: Noise | None = None,
    ) -> PlainLoop:
        """A plain loop of this trial."""
        return kind(case, model, self.make, ranks, masters=self.masters, mean=mean, noise=noise)


WAITED = re.compile(r"timed out|timeout|connection closed by peer", re.I)
"""What a rank says that has waited for another one in vain."""


def told(error: lab_ranks.RankError) -> tuple[int, str, str]:
    """The rank that an error is about, the error in a line, and its text.

    If the rank that reported first had waited in vain, then the one that did not come is at fault.
    """
    late = [rank for rank, became in error.others.items() if "still running" in became]
    if late and WAITED.search(error.summary):
        where = error.others[late[0]].partition(", at ")[2]
        summary = f"it hangs{f' at {where}' if where else ''}, and rank {error.rank} waited for it"
        return late[0], summary, f"rank {late[0]}: {summary}\n\n{error}"
    return error.rank, error.summary, str(error)
