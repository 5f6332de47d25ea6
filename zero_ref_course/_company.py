"""Around a reader's code on real ranks: every call that it makes to the others is made in company.

Before each call the ranks compare what they are about to do, so that ranks which would wait for each other
hear of it. What was called is written down, and whether it was waited for.

    def on_each_rank(answer):
        company = Company()
        with company.watching():
            answer()
        return company.calls

    of_ranks = on_ranks(on_each_rank, 2, answer)

An answer that is given a `comm` in place of torch.distributed goes through `outcomes_of`, first on virtual
ranks, which hear at once of ranks that would wait for each other.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import linecache
import os
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist

from zero_ref.comm.backend import as_collectives
from zero_ref.comm.collectives import Collectives
from zero_ref.lab import ranks, virtual
from zero_ref.lab.meter import recording
from zero_ref.plan.calls import Call
from zero_ref_course import Answer, ExerciseFailed, StillTheStub

T = TypeVar("T")

SECONDS = 40.0
"""For each call on ranks, times `patience()`."""

MOST_CALLS = 2_000
"""Of an answer on one virtual rank; none of the tasks needs a tenth of them."""

POINT_TO_POINT = ("send", "recv", "isend", "irecv")
"""They pair two ranks, so ranks need not make them alike."""

MET = (
    *("broadcast", "all_reduce", "reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter"),
    *("reduce_scatter_tensor", "gather", "scatter", "all_gather_object", "gather_object", "barrier"),
    "broadcast_object_list",
)
"""Collectives that all ranks must call alike."""

RAISES = "raises: "

EVERY_RANK = (
    "Every rank makes every call, in the same order, also for what it does not own: there it receives, or "
    "helps to add up."
)

_gather_objects = dist.all_gather_object  # ours, while the reader's is replaced


class NotYet(Exception):
    """The reader's file has nothing of this rung."""


class OnAllRanks(ExerciseFailed):
    """All ranks say the same, so none is named."""


class RanksDiffer(OnAllRanks):
    """Ranks are about to make different calls, and would wait for each other."""


def on_ranks(function: Callable[..., T], world_size: int, *args: Any, **kwargs: Any) -> list[T]:
    """What a function returns on each rank. What all ranks raise alike is raised here; the ranks live on."""
    # Gloo even where there are GPUs: its time-out is an error, NCCL's ends the process.
    values = ranks.run(_caught, world_size, function, *args, timeout=SECONDS, backend="gloo", **kwargs)
    for value in values:
        if isinstance(value, Exception):
            raise value
    return [value for value in values if not isinstance(value, Exception)]


def on_virtual_ranks(
    function: Callable[..., T], world_size: int, *args: Any, waiting: Callable[[str], str]
) -> list[T]:
    """What a function that calls an answer returns on each virtual rank, where every message is seen.

    Args:
        waiting: what to say when ranks wait for each other, made of what the first of them raised.
    Raises:
        ExerciseFailed, StillTheStub: the answer raised it on a rank, or ranks wait for each other.
    """

    def bounded(comm: Collectives, *args: Any) -> T:
        with _not_for_ever(comm):
            return function(comm, *args)

    try:
        return virtual.run(bounded, world_size, *args, timeout=3.0)
    except RuntimeError as error:
        cause = error.__cause__
        if cause is None or isinstance(cause, StillTheStub):
            raise (cause or error) from None
        # A wait in vain ends in the answer or beside it, whichever rank's time is up first.
        if "did not complete" in str(cause) or "but the ranks call" in str(cause):
            raise ExerciseFailed(waiting(str(cause))) from None
        raise cause from None


@contextlib.contextmanager
def _not_for_ever(comm: Collectives) -> Iterator[None]:
    """End a loop of calls that never ends: a virtual rank is a thread, which no alarm reaches."""
    count = itertools.count(1)

    def observer(_: Call) -> None:
        if next(count) > MOST_CALLS:
            raise ExerciseFailed(
                f"rank {comm.rank} of {comm.world_size} makes more than {MOST_CALLS:,} calls. Is there a "
                "loop that never ends?"
            )

    comm.observers.append(observer)
    try:
        yield
    finally:
        comm.observers.remove(observer)


class Outcome(NamedTuple):
    """What an answer did on one rank.

    Args:
        value: what it returned.
        calls: what it called, in order.
        arguments: those that it was given there, as it left them.
    """

    value: Any
    calls: list[Call]
    arguments: tuple[Any, ...]


def outcomes_of(
    answer: Answer, of_ranks: Sequence[tuple[Any, ...]], given: str, advice: str, *, real: bool = False
) -> list[Outcome]:
    """What an answer does on each rank, called with that rank's arguments and its `comm` as the last one.

    Args:
        of_ranks: the arguments of each rank. The answer gets copies.
        given: says them in words, for messages.
        advice: what to say to ranks that wait for each other.
        real: on processes instead of threads.
    """
    if real:
        return on_ranks(_outcome_here, len(of_ranks), answer, of_ranks)
    return on_virtual_ranks(
        _outcome,
        len(of_ranks),
        answer,
        of_ranks,
        waiting=lambda why: (
            f"with {given}, the ranks do not make the same calls, and wait for each other: {why} {advice}"
        ),
    )


def _outcome_here(answer: Answer, of_ranks: Sequence[tuple[Any, ...]]) -> Outcome:
    return _outcome(as_collectives(None), answer, of_ranks)


def _outcome(comm: Collectives, answer: Answer, of_ranks: Sequence[tuple[Any, ...]]) -> Outcome:
    own = copy.deepcopy(of_ranks[comm.rank])
    with recording(comm) as calls:
        value = answer(*own, comm)
    return Outcome(value, calls, own)


def _caught(function: Callable[..., T], *args: Any, **kwargs: Any) -> T | Exception:
    try:
        return function(*args, **kwargs)
    except (NotYet, OnAllRanks) as alike:
        return alike


def gathered(value: Any) -> list[Any]:
    """A value of every rank. Collective: all ranks."""
    of_ranks: list[Any] = [None] * dist.get_world_size()
    _gather_objects(of_ranks, value)
    return of_ranks


@contextlib.contextmanager
def alike() -> Iterator[None]:
    """Around asserts on what all ranks know: whatever fails, fails on all of them."""
    try:
        yield
    except AssertionError as error:
        raise OnAllRanks(str(error)) from None


class UnderWay:
    """A call that was started with async_op=True, until somebody waits for it, in whichever way."""

    def __init__(self, work: Any, number: int, under_way: dict[int, str]) -> None:
        self._work, self._number, self._under_way = work, number, under_way

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def wait(self, *args: Any) -> Any:
        self._under_way.pop(self._number, None)
        return self._work.wait(*args)

    def get_future(self) -> Any:
        self._under_way.pop(self._number, None)
        return self._work.get_future()

    def is_completed(self) -> bool:
        done = bool(self._work.is_completed())
        if done:
            self._under_way.pop(self._number, None)
        return done


def call_with_size(name: str, tensor: torch.Tensor | None, peer: int | None) -> str:
    """A collective as a rank says it to the others: ranks whose texts differ make different calls."""
    size = "" if tensor is None else f" of {tensor.numel()} elements"
    towards = {"broadcast": " from", "scatter": " from"}.get(name, " to")
    return f"calls {name}{size}" + ("" if peer is None else f"{towards} rank {peer}")


def call_by_name(name: str, _: torch.Tensor | None, peer: int | None) -> str:
    """The same for an exercise in which all tensors of a call have the same size."""
    return f"calls {name}" + (f" from rank {peer}" if name == "broadcast" else "")


class Company:
    """What a rank runs a reader's code in.

    Args:
        file: the reader's, if the code is in one; messages quote its lines.
        says: the text for a collective that the ranks compare, made of its name, tensor and other rank.
        advice: ends the message to ranks that make different calls.

    Attributes:
        calls: what was called, in order; `op`, bytes, and the rank at its other end if there is one.
        under_way: those that nobody has waited for, by their place in `calls`: "broadcast 0", with its number
            among the calls of that name.
    """

    def __init__(
        self,
        file: str = "",
        says: Callable[[str, torch.Tensor | None, int | None], str] = call_with_size,
        advice: str = EVERY_RANK,
    ) -> None:
        self.file = os.path.realpath(file)
        self.says, self.advice = says, advice
        self.calls: list[Call] = []
        self.under_way: dict[int, str] = {}

    @property
    def names(self) -> list[str]:
        """What was called, in order, by its name."""
        return [call.op for call in self.calls]

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Around the reader's code, from its first call to its return.

        Raises:
            OnAllRanks: it raised on some rank.
            RanksDiffer: ranks called different things.
        """
        self.calls, self.under_way = [], {}
        with contextlib.ExitStack() as patches:
            for name in (*MET, *POINT_TO_POINT):
                patches.enter_context(patch.object(dist, name, self._in_company(name, getattr(dist, name))))
            try:
                yield
            except (NotYet, StillTheStub, OnAllRanks):
                raise
            except Exception as error:
                self._meet(
                    RAISES + str(error)
                )  # raises on all ranks, so the others hear of it where they are
        self._meet("returns")

    @contextlib.contextmanager
    def running(self, what: str) -> Iterator[None]:
        """Around code of the reader's file. `what` says in messages what was called.

        Raises:
            OnAllRanks: it raised on some rank, or a call was not waited for.
            RanksDiffer: ranks called different things.
            NotYet: it raised NotImplementedError.
        """
        with self.watching():
            try:
                yield
            except Exception as error:
                raise self._told(what, error) from None
        left = gathered(list(self.under_way.values()))
        with alike():
            started = next((each for of_rank in left for each in of_rank), "")
            assert not started, (
                f"{what} returned while {started} (counted from 0) was under way: it was started with "
                "async_op=True and nobody waited for it, so on a slower network its values would not have "
                f"arrived. Call .wait() on what dist.{started.split()[0]} returned."
            )

    def _in_company(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def in_company(*args: Any, **kwargs: Any) -> Any:
            tensor = next(
                (each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)), None
            )
            peer = _peer(name, args, kwargs)
            if name in MET:
                self._meet(self.says(name, tensor, peer))
            number = len(self.calls)
            started = f"{name} {self.names.count(name)}"
            self.calls.append(Call(name, 0 if tensor is None else tensor.nbytes, peer))
            work = function(*args, **kwargs)
            if not isinstance(work, dist.Work):
                return work
            self.under_way[number] = started
            return UnderWay(work, number, self.under_way)

        return in_company

    def _meet(self, about_to: str) -> None:
        of_ranks = gathered(about_to)
        for rank, does in enumerate(of_ranks):
            if does.startswith(RAISES):
                everywhere = len(set(of_ranks)) == 1
                raise OnAllRanks(("" if everywhere else f"on rank {rank}: ") + does.removeprefix(RAISES))
        if len(set(of_ranks)) > 1:
            raise RanksDiffer(
                "the ranks make different calls, so some would wait for ever: "
                + ", ".join(f"rank {rank} {does}" for rank, does in enumerate(of_ranks))
                + f". {self.advice}"
            )

    def _told(self, what: str, error: BaseException) -> Exception:
        """The error as a reader should hear of it."""
        if isinstance(error, (ExerciseFailed, NotYet)):
            return error
        if isinstance(error, NotImplementedError):
            return NotYet(f"{what} raises NotImplementedError: it is still to be written.")
        said = textwrap.shorten(str(error), 300, placeholder=" ...")
        text = f"{what} raised {type(error).__name__}" + (f": {said}" if said else "")
        line, trace = 0, error.__traceback__
        while trace:
            if trace.tb_frame.f_code.co_filename == self.file:
                line = trace.tb_lineno
            trace = trace.tb_next
        source = linecache.getline(self.file, line).strip() if line else ""
        place = f" ({os.path.basename(self.file)}, line {line}: {source})" if source else ""
        return ExerciseFailed(f"{text.rstrip('.')}{place}.{_advice(str(error))}")


def _peer(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    if name not in ("broadcast", "reduce", "gather", "scatter", "send", "recv", "isend", "irecv"):
        return None
    for key in ("group_src", "group_dst", "src", "dst"):
        if kwargs.get(key) is not None:
            return int(kwargs[key])
    return int(args[1]) if len(args) > 1 and isinstance(args[1], int) else None


def _advice(error: str) -> str:
    if "empty parameter list" in error:
        return (
            " A rank may own nothing, and torch refuses an empty list of parameters, but not an empty group: "
            'optimizer_class([{"params": [...]}], **defaults).'
        )
    if "a leaf Variable that requires grad" in error:
        return " Put @torch.no_grad() above the method: autograd has no part in it."
    if "must match the size of tensor" in error or "doesn't match the broadcast shape" in error:
        return (
            " A tensor of the state is another parameter's, or another piece's: give what self.local steps "
            "the state of the same elements. self.local counts its own parameters from 0."
        )
    if "unexpected keyword argument" in error:
        return " The arguments are those of the text: MyZero(params, optimizer_class, **defaults)."
    return ""
