"""Watch a training job while it runs: two lines in the user's own script, under `torchrun`.

    from zero_ref.doctor.watch import watch
    watch(optimizer, model=model)

Before each step the ranks compare what must be equal on all of them: parameters, gradients and options. Then
a **shadow**, the plain optimizer with whole state on every rank, is given the job's own parameters, gradients
and options, and makes the step that the job ought to make. After the step the two are compared. The shadow
begins with the state that the job's optimizer has. With `record=` each save is noted, and after a resume the
watch says what is not back.

Gradients that are wrong alike on all ranks, such as sums in place of averages, are not seen: `zero-ref
doctor` compares them with one process that has all the data.

Messages between ranks go through a Gloo group of the watch's own. An error in the watch, or a rank that does
not come in time, ends the watch on all ranks with a message. The job goes on.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from zero_ref.doctor.shadow import Shadow
from zero_ref.doctor.watched import Facts, Tensors, fingerprint, kept_state, parts_of, plain_class, unwrapped
from zero_ref.lab.patience import patience

__all__ = ["watch", "Watch", "Finding", "VARIABLE"]

T = TypeVar("T")

VARIABLE = "ZERO_REF_WATCH"
"""With this environment variable set to "off" on all ranks, nothing is watched."""
SHOWN = 3
"""So many of the tensors that differ between ranks are sent and looked into; the others are counted."""
COMPARED = 56
"""Bytes an element while a tensor is compared with the shadow's: seven numbers of 64 bits."""
ROUNDED = 1e-6
"""Gradients may differ by this share of the largest element: sums in another order on another rank."""


class Finding(NamedTuple):
    """Something that is wrong in a running job; every rank has the same, but for one that left the others.

    Attributes:
        step: counted from 0; after a resume, from the save.
        phase: "before step", "step", "load", or "watch" if the watch itself ended.
        text: whose value, what was expected and seen, and on which ranks.
    """

    step: int
    phase: str
    text: str

    def __str__(self) -> str:
        return f"step {self.step}, {self.phase}: {self.text}"


class Watch:
    """Watches every step of an optimizer from now on; rank 0 prints what is found, at once.

    In a test it is a context manager, which raises an AssertionError at its end if anything was found:

    >>> with watch(optimizer, model=model):                                              # doctest: +SKIP
    ...     train(model, optimizer)

    Args:
        optimizer: its `step()` is watched. A sharded optimizer that lists all parameters in its groups (this
            package's, torch's), or a plain one of parameters that are equal on all ranks or are
            DTensors (FSDP2).
        plain: makes the plain optimizer of parameter groups; None: the class that `optimizer` shards or is.
        model: gives parameters their names in messages.
        every: ranks compare with each other and with the shadow in every so-many-th step. The shadow makes
            all steps, because its state is made by all of them.
        steps: the shadow is given up after so many steps; None: never.
        record: a folder where rank 0 notes each save, which is when `optimizer.state_dict()` is called. All
            ranks read it after a resume.
        masters: the plain optimizer steps 32-bit copies of 16-bit parameters. It need not be said of this
            package's `master_dtype`, nor of DeepSpeed.
        tolerance: the share of the plain step by which an element may differ. Sums in float32 round by about
            1e-6 of a step; the matrix products of Muon in bfloat16 may need 0.05.
        group: the ranks on which parameters are equal; None: all.
        wait: seconds, times `zero_ref.lab.patience.patience()`, for which ranks wait for the last one.
    Attributes:
        findings: what was found, each kind of thing once for each tensor.
    Raises:
        ValueError: `every` is below 1, or this optimizer cannot be watched.
    Collective: all ranks of `group` make it together, and make each step together.
    Cost: rank 0 says the shadow's memory before the first step. DTensors are gathered in each step. A
        comparison sends some tens of bytes for each tensor.
    """

    def __init__(
        self,
        optimizer: Any,
        plain: Callable[..., Any] | None = None,
        *,
        model: nn.Module | None = None,
        every: int = 1,
        steps: int | None = None,
        record: str | os.PathLike[str] | None = None,
        masters: bool = False,
        tolerance: float = 1e-3,
        group: dist.ProcessGroup | None = None,
        wait: float = 120.0,
    ) -> None:
        if every < 1:
            raise ValueError(f"every is {every}: give 1 to compare in each step, 2 in every second one.")
        self.on, optimizer = os.environ.get(VARIABLE) != "off", unwrapped(optimizer)
        self.plain: Callable[..., Any] = plain or (plain_class(optimizer) if self.on else torch.optim.SGD)
        self.parts = parts_of(optimizer) if self.on else Tensors(optimizer)
        self.every, self.steps, self.record = every, steps, None if record is None else Path(record)
        self.masters, self.tolerance = masters or self.parts.masters(), tolerance
        self.findings: list[Finding] = []
        self._model, self._names = model, dict[int, str]()
        self._told: set[tuple[str, str]] = set()
        self._step, self._begins = 0, True
        self._params: list[Any] = []
        self._shadow: Shadow | None = None
        self._saved_shadow: Any = None
        self._values: list[tuple[int, float]] = []  # of each parameter after a step: fingerprint, norm
        self._loaded: list[Facts] | None = None  # the options right after a load
        self._has_state, self._differ = False, False
        self._own: dict[str, Callable[..., Any]] = {}
        self._rank, self._size, self._group = 0, 1, None
        # A job may compile its step. What the watch does in it is left out of the compiled graph.
        self._phase: Callable[[Callable[[], None]], None] = torch.compiler.disable(self._guarded)
        self._only_makes_state: Callable[[], bool] = torch.compiler.disable(self.parts.only_make_state)
        self._wait = timedelta(seconds=wait * patience())
        if self.on and dist.is_initialized():
            ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
            try:
                self._group = dist.new_group(ranks, self._wait, "gloo", use_local_synchronization=True)
            except RuntimeError as error:
                self._end(f"not all of the ranks {ranks} made the watch within {self._wait}: {error}")
            else:
                self._rank, self._size = dist.get_rank(self._group), len(ranks)
        if not self.on:
            return
        for name, call in (
            ("step", self._steps), ("state_dict", self._saves),
            ("load_state_dict", partial(self._loads, "load_state_dict")),
            ("load_sharded", partial(self._loads, "load_sharded")),
        ):  # fmt: skip
            if hasattr(optimizer, name):
                self._own[name] = getattr(optimizer, name)
                setattr(optimizer, name, _method(call, optimizer))
        self.say("gradients that are wrong alike on all ranks are not seen here; zero-ref doctor sees them")

    def check(self) -> None:
        """Raise an AssertionError that lists the findings, if there are any."""
        if self.findings:
            raise AssertionError("\n".join(["the watch found:", *map(str, self.findings)]))

    def stop(self) -> None:
        """Watch no longer, and free the shadow. The methods in the optimizer's place now only pass on."""
        self.on, self._shadow = False, None

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.stop()
        if kind is None:
            self.check()

    def say(self, text: str, once: str = "") -> None:
        """Print on rank 0; with `once`, only the first time that it is given."""
        if self._rank == 0 and ("", once) not in self._told:
            print(f"watch: {text}", file=sys.stderr, flush=True)
        self._told |= {("", once)} if once else set()

    # -------------------------------------------------------------------- in the place of the optimizer's own

    def _steps(self, *args: Any, **kwargs: Any) -> Any:
        if self.on and (args[0] if args else kwargs.get("closure")) is not None:
            self.say("a step with a closure is not watched: its gradients come inside", once="closure")
            self._shadow, self._has_state = None, True  # it begins anew after this step
            return self._own["step"](*args, **kwargs)
        if self.on and self._only_makes_state():
            return self._own["step"](*args, **kwargs)
        self._phase(self._before)
        result = self._own["step"](*args, **kwargs)
        self._phase(self._after)
        return result

    def _saves(self, *args: Any, **kwargs: Any) -> Any:
        saved = self._own["state_dict"](*args, **kwargs)
        if self.on and self.record is not None and self._rank == 0 and self._values:
            self.record.mkdir(parents=True, exist_ok=True)
            note = {"step": self._step, "values": self._values, "options": self._options()}
            note["shadow"] = None if self._shadow is None else self._shadow.optimizer.state_dict()
            torch.save(note, self.record / f"step-{self._step}.pt")
        return saved

    def _loads(self, name: str, *args: Any, **kwargs: Any) -> Any:
        result = self._own[name](*args, **kwargs)
        self._loaded, self._begins = self._options(), True
        return result

    def _guarded(self, phase: Callable[[], None]) -> None:
        if self.on:
            try:
                with torch.no_grad():
                    phase()
            except Exception as error:
                self._end(str(error))

    def _end(self, why: str) -> None:
        """Stop, with a finding. The job goes on."""
        self.findings.append(Finding(self._step, "watch", f"it ends here: {why}"))
        print(f"watch, rank {self._rank}: {self.findings[-1]}", file=sys.stderr, flush=True)
        self.stop()

    # --------------------------------------------------------------------------------------- between ranks

    def _gathered(self, make: Callable[[], T]) -> list[T]:
        """Every rank's value. An error on one rank is raised on all. Collective: all ranks."""
        try:
            mine: tuple[str | None, Any] = (None, make())
        except Exception as error:
            mine = (f"rank {self._rank}: {type(error).__name__}: {error}", None)
        of_ranks = [mine] * self._size
        if self._group is not None:
            try:
                # It says which ranks do not come, where a gather would only say that its time is up.
                dist.monitored_barrier(self._group, self._wait, wait_all_ranks=True)
                dist.all_gather_object(of_ranks, mine, group=self._group)
            except RuntimeError as error:
                text = f"not all ranks came to step {self._step} within {self._wait.total_seconds():g} s"
                raise RuntimeError(f"{text} ({str(error).splitlines()[0]})") from error
        for problem, _ in of_ranks:
            if problem is not None:
                raise RuntimeError(problem)
        return [value for _, value in of_ranks]

    def _find(self, phase: str, kind: str, text: str) -> None:
        """Note and say what was found, the first time that this kind is."""
        if phase == "before step" and not kind.startswith(("parameter", "further parameter", "copy")):
            self._differ = True
        if (phase, kind) not in self._told:
            self._told.add((phase, kind))
            self.findings.append(Finding(self._step, phase, text))
            self.say(str(self.findings[-1]))

    def _named(self, number: int) -> str:
        name = self._identity(self._params[number])[-1]
        return f"{number} ({name})" if name else f"{number}"

    def _identity(self, param: Any) -> tuple[Any, ...]:
        """A parameter's shape, dtype and name, by which ranks see that they speak of the same one."""
        if id(param) not in self._names:
            named = () if self._model is None else self._model.named_parameters()
            self._names |= {id(param): ""} | {id(one): name for name, one in named}
        return tuple(param.shape), str(param.dtype), self._names[id(param)]

    def _options(self) -> list[Facts]:
        # A save may turn a tuple into a list.
        return [
            {key: str(tuple(value) if isinstance(value, list) else value) for key, value in options.items()}
            for options, _ in self.parts.groups()
        ]

    # ----------------------------------------------------------------------------------------- before a step

    def _before(self) -> None:
        """Compare what must be equal on all ranks, and let the shadow make the step."""
        self._params = [param for _, of_group in self.parts.groups() for param in of_group]
        if self._begins:
            self._resume()
        compares = self._step % self.every == 0
        looks = self._gathered(lambda: self._look(compares))
        self._check_alike([look["alike"] for look in looks])
        for rank, look in enumerate(looks):
            self._differing(
                "before step", look["options"], looks[0]["options"], f" on rank {rank}", " on rank 0"
            )
        has = [
            [rank for rank, one in enumerate(of_ranks) if one is not None]
            for of_ranks in zip(*(look["grads"] for look in looks))
        ]
        used = [ranks for ranks in has if ranks]
        # With owners' gradients (ZeRO-2) each lies on one rank alone, or every rank has parts that add up.
        alone = self._size > 1 and bool(used) and all(len(ranks) == 1 for ranks in used)
        add_up = alone or any(look["add_up"] for look in looks)
        if compares:
            self._compare("parameter", self.parts.value, [look["values"] for look in looks])
        for rank, look in enumerate(looks):
            for number, text in look["apart"].items():
                self._find(
                    "before step", f"copy {number}", f"parameter {self._named(number)} {text}, on rank {rank}"
                )
        if compares and not add_up:
            self._compare("gradient", self.parts.grad, [look["grads"] for look in looks])
            for number, ranks in enumerate(has):
                if 0 < len(ranks) < self._size:
                    text = f"gradient {self._named(number)} is on the ranks {ranks} alone"
                    self._find("before step", f"gradient {number}", text)
        if not used:
            self.say("no rank has a gradient in .grad in a step, so that step is not compared", once="none")
        elif self.steps is None or self._step < self.steps:
            self._follow([bool(ranks) for ranks in has], add_up)
        else:
            self._shadow = None

    def _look(self, compares: bool) -> Facts:
        values = [_print(self.parts.value(param)) for param in self._params] if compares else []
        grads = [self.parts.grad(param) for param in self._params]
        prints = [None if grad is None else _print(grad) if compares else (0, 0.0) for grad in grads]
        return {
            "values": values, "grads": prints, "options": self._options(), "add_up": self.parts.add_up(),
            "apart": self._apart() if compares else {}, "alike": list(map(self._identity, self._params)),
        }  # fmt: skip

    def _check_alike(self, of_ranks: Sequence[Sequence[tuple[Any, ...]]]) -> None:
        """Refuse parameters of other numbers, shapes or names on other ranks: none could be compared."""
        for rank, theirs in enumerate(of_ranks):
            if len(theirs) != len(of_ranks[0]):
                text = f"rank {rank} has {len(theirs)} parameters, and rank 0 {len(of_ranks[0])}"
            elif theirs != of_ranks[0]:
                here, there = next(pair for pair in zip(theirs, of_ranks[0]) if pair[0] != pair[1])
                text = f"on rank {rank} a parameter is {_shown(*here)}, and on rank 0 {_shown(*there)}"
            else:
                continue
            raise RuntimeError(f"{text}. If only some ranks have the same parameters, give these as group=.")

    def _apart(self) -> dict[int, str]:
        """The parameters, by number, that differ from the copies that the optimizer steps."""
        texts = map(self.parts.apart, self._params)
        return {number: text for number, text in enumerate(texts) if text is not None}

    def _differing(
        self, phase: str, seen: Sequence[Facts], expected: Sequence[Facts], here: str, there: str
    ) -> None:
        """Find groups and options that are not as expected."""
        if len(seen) < len(expected):
            self._find(phase, "groups", f"there are {len(seen)} groups{here}, and {len(expected)}{there}")
        for number, (mine, right) in enumerate(zip(seen, expected)):
            for key, value in right.items():
                if mine.get(key) != value:
                    text = (
                        f"group option {key} is {mine.get(key)}{here} and {value}{there}, in group {number}"
                    )
                    self._find(phase, f"option {number} {key}", text)

    def _compare(self, what: str, get: Callable[[Any], Any], prints: Sequence[Sequence[Any]]) -> None:
        """Find tensors that differ between ranks. Every rank has all prints, so all make the same calls."""
        of_tensors = list(zip(*prints))
        # By fingerprints alone: a norm that is not a number differs from itself.
        differ = [
            n for n, each in enumerate(of_tensors) if None not in each and len({one for one, _ in each}) > 1
        ]
        # Those first whose norms differ most: where one gradient was not reduced, clipping changes all.
        norms = {number: [norm for _, norm in of_tensors[number]] for number in differ}
        differ.sort(key=lambda number: min(norms[number]) / (max(norms[number]) or 1.0))
        for number in differ[:SHOWN]:
            mine = _dense(get(self._params[number])).cpu().flatten()
            first = mine.clone()
            dist.broadcast(first, group_src=0, group=self._group)
            same = (mine == first) | (mine.isnan() & first.isnan())
            off = (mine.double() - first.double()).abs().nan_to_num(torch.inf).masked_fill(same, 0.0)
            at = int(off.argmax())
            seen = (off[at].item(), at, mine[at].item(), first[at].item(), int(off.count_nonzero()))
            of_ranks = self._gathered(lambda seen=seen: seen)  # type: ignore[misc]
            rank = max(range(self._size), key=lambda one: of_ranks[one][0])
            most, at, here, there, count = of_ranks[rank]
            least = (
                0.0 if what == "parameter" else ROUNDED * first.abs().nan_to_num(0.0, 0.0, 0.0).max().item()
            )
            if most > least:
                self._find(
                    "before step", f"{what} {number}",
                    f"{what} {self._named(number)} differs between ranks: element {at} is {here:.6g} on rank "
                    f"{rank} and {there:.6g} on rank 0; {count} of {off.numel()} elements differ",
                )  # fmt: skip
        if new := [n for n in differ[SHOWN:] if ("before step", f"{what} {n}") not in self._told]:
            text = f"{len(new)} further {what}s differ between ranks"
            self._find("before step", f"further {what}s", text)
            self._told |= {("before step", f"{what} {number}") for number in new}

    def _follow(self, used: Sequence[bool], add_up: bool) -> None:
        shadow = self._shadow
        if shadow is None:
            keys = kept_state(self.plain, self.parts.groups()[0][0])
            kept = sum(keys.values())
            sizes = [self.parts.numel(param) for param in self._params]
            least = 4 if self.masters else 0
            whole = sum(max(least, param.element_size()) * n for param, n in zip(self._params, sizes)) / 1e6
            self.say(
                f"on each rank the shadow will hold {(3 + kept) * whole:.3f} MB: whole parameters, "
                f"their last values and gradients, {kept} tensors of state for each, {whole:.3f} MB each; "
                f"and {COMPARED * max(sizes) / 1e6:.3f} MB more for a moment, while the largest is compared"
            )
            self._shadow = shadow = Shadow(self.plain, self.parts, self.masters, self.tolerance)
            if self._saved_shadow is not None:
                shadow.optimizer.load_state_dict(self._saved_shadow)
                of_ranks = self._gathered(lambda: shadow.lost_state(self._params))
                shown = set().union(*(shown for _, shown in of_ranks))
                for number, twin in enumerate(shadow.twins if shown else ()):
                    if not all((number, key) in shown for key in shadow.optimizer.state[twin]):
                        text = f"no rank has the whole state of parameter {self._named(number)}"
                        self._find("load", f"state of {number}", text)
                for rank, (lost, _) in enumerate(of_ranks):
                    for key, (number, norms) in lost.items():
                        text = f"state {key} of parameter {self._named(number)} is not back on rank {rank}"
                        self._find("load", f"state {key}", f"{text}: {norms}")
            elif not shadow.take_state(self._params, list(keys), self._group) and keys and self._has_state:
                self.say("the optimizer's state cannot be seen, so no step is compared from here on")
                self.steps, self._shadow = self._step, None
                return
        if shadow.follow(used, add_up, self._group):
            self._gathered(shadow.step)

    # ------------------------------------------------------------------------------------------ after a step

    def _after(self) -> None:
        """Compare the job's step with the shadow's."""
        if self._differ:  # each rank's shadow has made a step of its own, which says nothing new
            self._shadow, self._has_state, self._differ = None, True, False
        if self.record is not None or (self._shadow is not None and self._step % self.every == 0):
            wrong = self._gathered(self._departures)
            for number in sorted({number for of_rank in wrong for number in of_rank}):
                ranks = [rank for rank, of_rank in enumerate(wrong) if number in of_rank]
                text = f"parameter {self._named(number)} {wrong[ranks[0]][number]}, on the ranks {ranks}"
                self._find("step", f"moved {number}", text)
        self._step += 1

    def _departures(self) -> dict[int, str]:
        """How this rank's parameters differ from the shadow's, by number. Notes their values for a save."""
        wrong, values = dict[int, str](), [self.parts.value(param) for param in self._params]
        if self.record is not None:
            self._values = list(map(_print, values))
        if self._shadow is not None and self._step % self.every == 0:
            wrong = self._apart()
            for number, param in enumerate(self._params):
                if (text := self._shadow.departure(number, self.parts.stepped(param))) is not None:
                    wrong[number] = text
        return wrong

    # ---------------------------------------------------------------------------------------- after a resume

    def _resume(self) -> None:
        """Find the save from which the job goes on, and what of it is not back."""
        self._begins, loaded, self._loaded, self._saved_shadow = False, self._loaded, None, None
        notes: list[Facts] = []

        def now() -> tuple[bool, list[Facts], list[tuple[int, float]], bool]:
            files = sorted(self.record.glob("step-*.pt")) if self.record is not None else ()
            notes.extend(torch.load(file, weights_only=True) for file in files)
            return (
                loaded is not None,
                loaded or self._options(),
                list(map(_print, map(self.parts.value, self._params))),
                bool(self.parts.parts_of_state(self._params[0], ())),
            )

        of_ranks = self._gathered(now)
        # For each save what is not back: a rank, and the number of a parameter.
        lost_of = []
        for note in notes:
            pairs = [
                (rank, list(zip(note["values"], values))) for rank, (_, _, values, _) in enumerate(of_ranks)
            ]
            lost_of.append(
                [(r, n) for r, each in pairs for n, (was, is_now) in enumerate(each) if was != is_now]
            )
        loads, tensors = all(one[0] for one in of_ranks), len(self._params) * self._size
        self._has_state = any(one[0] for one in of_ranks)
        if self._has_state:
            self._shadow = None  # it begins anew
        if not notes or (not loads and min(map(len, lost_of)) == tensors):
            return  # the job starts afresh
        best = min(range(len(notes)), key=lambda number: (len(lost_of[number]), -notes[number]["step"]))
        lost, note = lost_of[best], notes[best]
        self._shadow, self._step, self._saved_shadow = None, note["step"], note["shadow"]
        if not loads and not any(has_state for *_, has_state in of_ranks):
            self._find(
                "load", "none", "the parameters are those of a save, and load_state_dict was not called"
            )
        for rank, number in lost[:1]:
            norms = f"its norm is {of_ranks[rank][2][number][1]:.6g} and was {note['values'][number][1]:.6g}"
            others = f"; of {tensors} tensors, {len(lost)} are not back"
            self._find(
                "load",
                "values",
                f"parameter {self._named(number)} is not back on rank {rank}: {norms}{others}",
            )
        for rank, (_, options, *_) in enumerate(of_ranks):
            self._differing("load", options, note["options"], f" on rank {rank}", " when it was saved")


watch = Watch


def _method(call: Callable[..., Any], optimizer: Any) -> Any:
    """A method of this optimizer alone. Schedulers wrap the function of a bound method, so it is one."""
    return types.MethodType(lambda _, *args, **kwargs: call(*args, **kwargs), optimizer)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def _print(tensor: torch.Tensor) -> tuple[int, float]:
    """A tensor's fingerprint and norm."""
    tensor = _dense(tensor)
    return fingerprint(tensor), tensor.double().norm().item()


def _shown(shape: Sequence[int], dtype: str, name: str) -> str:
    return f"{name or 'one'} of {tuple(shape)}, {dtype.removeprefix('torch.')}"
