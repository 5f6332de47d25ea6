"""Run a reader's code on real ranks, and watch every call that it makes to other ranks.

Before each call the ranks compare what they are about to do: if they would wait for each other, all raise an
error instead. A `Company` records each call, and whether it was waited for.

    def on_each_rank(answer):
        company = Company()
        with company.watching():
            answer()
        return company.calls

    of_ranks = on_ranks(on_each_rank, 2, answer)

An answer that takes a `comm` in place of torch.distributed goes through `outcomes_of`, first on virtual
ranks, where ranks that wait for each other are found at once.
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
"""The time-out of each call on ranks, times `patience()`."""

MOST_CALLS = 2_000
"""The most calls of an answer on one virtual rank; no exercise needs a tenth of them."""

POINT_TO_POINT = ("send", "recv", "isend", "irecv")
"""Operations between two ranks, which the other ranks need not call."""

MET = (
    *("broadcast", "all_reduce", "reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter"),
    *("reduce_scatter_tensor", "gather", "scatter", "all_gather_object", "gather_object", "barrier"),
    *("broadcast_object_list", "all_gather_single", "reduce_scatter_single"),
)
"""Collectives that all ranks must call alike."""

RAISES = "raises: "

EVERY_RANK = (
    "Every rank makes every call, in the same order, also for what it does not own: there it receives, or "
    "helps to add up."
)

_gather_objects = dist.all_gather_object  # ours, while the reader's is replaced


class NotYet(Exception):
    """The reader's file does not have this rung yet."""


class OnAllRanks(ExerciseFailed):
    """All ranks raise the same error, so its message names no rank."""


class RanksDiffer(OnAllRanks):
    """Ranks are about to make different calls, and would wait for each other."""


def on_ranks(function: Callable[..., T], world_size: int, *args: Any, **kwargs: Any) -> list[T]:
    """Return a function's value on each rank. An error that all ranks raise alike does not end the ranks."""
    # Gloo even where there are GPUs: its time-out is an error, NCCL's ends the process.
    values = ranks.run(_caught, world_size, function, *args, timeout=SECONDS, backend="gloo", **kwargs)
    for value in values:
        if isinstance(value, Exception):
            raise value
    return [value for value in values if not isinstance(value, Exception)]


def on_virtual_ranks(
    function: Callable[..., T], world_size: int, *args: Any, waiting: Callable[[str], str]
) -> list[T]:
    """Call a function, which calls an answer, on virtual ranks, and return its value on each rank.

    Args:
        waiting: makes the message for ranks that wait for each other, from the first rank's error.
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
    """The result of an answer on one rank.

    Args:
        value: the value that the answer returned.
        calls: its calls to other ranks, in order.
        arguments: its arguments on this rank, as it left them.
    """

    value: Any
    calls: list[Call]
    arguments: tuple[Any, ...]


def outcomes_of(
    answer: Answer, of_ranks: Sequence[tuple[Any, ...]], given: str, advice: str, *, real: bool = False
) -> list[Outcome]:
    """Call an answer on each rank, with copies of that rank's arguments and with its `comm` as the last one.

    Args:
        of_ranks: the arguments of each rank.
        given: describes the arguments in messages.
        advice: ends the message if ranks wait for each other.
        real: the ranks are processes instead of threads.
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
    """Return the value of every rank. Collective: all ranks."""
    of_ranks: list[Any] = [None] * dist.get_world_size()
    _gather_objects(of_ranks, value)
    return of_ranks


@contextlib.contextmanager
def alike() -> Iterator[None]:
    """A context for asserts on values that are the same on all ranks: they fail on all ranks or on none."""
    try:
        yield
    except AssertionError as error:
        raise OnAllRanks(str(error)) from None


class UnderWay:
    """A call that was started with async_op=True, and that nobody has waited for yet."""

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
    """Describe a collective for the comparison between ranks: by its name and the size of its tensor."""
    size = "" if tensor is None else f" of {tensor.numel()} elements"
    towards = {"broadcast": " from", "scatter": " from"}.get(name, " to")
    return f"calls {name}{size}" + ("" if peer is None else f"{towards} rank {peer}")


class Company:
    """Watches the calls of a reader's code on one rank.

    Args:
        file: the reader's file, if the code is in one; messages quote its lines.
        advice: ends the message if ranks make different calls.

    Attributes:
        calls: the calls in order: `op`, bytes, and the peer if there is one.
        under_way: names of the calls that nobody has waited for, by their place in `calls`; "broadcast 0" is
            the first broadcast.
    """

    def __init__(
        self,
        file: str = "",
        advice: str = EVERY_RANK,
    ) -> None:
        self.file = os.path.realpath(file)
        self.advice = advice
        self.calls: list[Call] = []
        self.under_way: dict[int, str] = {}

    @property
    def names(self) -> list[str]:
        """The names of the calls, in order."""
        return [call.op for call in self.calls]

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """A context for the reader's code, from its first call to its return.

        Raises:
            OnAllRanks: the code raised on some rank.
            RanksDiffer: ranks made different calls.
        """
        self.calls, self.under_way = [], {}
        with contextlib.ExitStack() as patches:
            for name in filter(dist.__dict__.__contains__, (*MET, *POINT_TO_POINT)):  # newer torch has more
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
        """A context for code of the reader's file, which messages call `what`.

        Raises:
            OnAllRanks: the code raised on some rank, or did not wait for a call.
            RanksDiffer: ranks made different calls.
            NotYet: the code raised NotImplementedError.
        """
        with self.watching():
            try:
                yield
            except Exception as error:
                raise self.told(what, error) from None
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
            given = [*args, *kwargs.values()]
            tensor = next((each for each in given if isinstance(each, torch.Tensor)), None)
            if any(map(_is_freed, given)):
                raise ExerciseFailed(f"dist.{name} was given a tensor whose memory was freed by resize_.")
            peer = _peer(name, args, kwargs)
            if name in MET:
                self._meet(call_with_size(name, tensor, peer))
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

    def told(self, what: str, error: BaseException, advice: str = "") -> Exception:
        """Return the exception for the reader: `what` was called, its error, and what to do about it."""
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
        return ExerciseFailed(f"{text.rstrip('.')}{place}.{advice or _advice(str(error))}")


def _is_freed(given: Any) -> bool:
    """Whether this is a tensor without its memory, which a call would read or write nevertheless."""
    if isinstance(given, (list, tuple)):
        return any(map(_is_freed, given))
    return isinstance(given, torch.Tensor) and given.numel() > 0 and not given.untyped_storage().nbytes()


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
