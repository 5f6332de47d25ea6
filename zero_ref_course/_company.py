"""Around a reader's code on a rank: every call that it makes to the others is made in company.

Before each call the ranks compare what they are about to do, so that ranks which would wait for each other
hear of it. What was called is written down, and whether it was waited for.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import textwrap
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from zero_ref.plan.calls import Call
from zero_ref_course import ExerciseFailed
from zero_ref_course.step import POINT_TO_POINT, Calls, RanksDiffer, Watched

MET = (
    *("broadcast", "all_reduce", "reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter"),
    *("reduce_scatter_tensor", "gather", "scatter", "all_gather_object", "gather_object", "barrier"),
    "broadcast_object_list",
)
"""Collectives that all ranks must call alike."""

RAISES = "raises: "

_gather_objects = dist.all_gather_object  # ours, while the reader's is replaced


class NotYet(Exception):
    """The reader's file has nothing of this rung."""


class OnAllRanks(ExerciseFailed):
    """All ranks say the same, so none is named."""


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


class Company:
    """What a rank runs the reader's code in.

    Attributes:
        calls: what was called, in order; `op`, bytes, and the rank at its other end if there is one.
        book: of `calls` the names, and those that nobody has waited for.
    """

    def __init__(self, file: str) -> None:
        self.file = os.path.realpath(file)
        self.calls: list[Call] = []
        self.book = Calls()

    @contextlib.contextmanager
    def running(self, what: str) -> Iterator[None]:
        """Around the reader's code. `what` says in messages what was called.

        Raises:
            OnAllRanks: it raised on some rank, or a call was not waited for.
            RanksDiffer: ranks called different things.
            NotYet: it raised NotImplementedError.
        """
        self.calls, self.book = [], Calls()
        with contextlib.ExitStack() as patches:
            for name in (*MET, *POINT_TO_POINT):
                patches.enter_context(patch.object(dist, name, self._in_company(name, getattr(dist, name))))
            try:
                yield
            except Exception as error:
                told = self._told(what, error)
                if not isinstance(told, (NotYet, OnAllRanks, RanksDiffer)):
                    self._meet(RAISES + str(told))  # so that the others hear of it where they are
                raise told from None
        self._meet("returns")
        left = gathered(list(self.book.under_way.values()))
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
                size = "" if tensor is None else f" of {tensor.numel()} elements"
                towards = {"broadcast": " from", "scatter": " from"}.get(name, " to")
                self._meet(f"calls {name}{size}" + ("" if peer is None else f"{towards} rank {peer}"))
            self.calls.append(Call(name, 0 if tensor is None else tensor.nbytes, peer))
            self.book.names.append(name)
            work = function(*args, **kwargs)
            return Watched(work, self.book) if isinstance(work, dist.Work) else work

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
                + ". Every rank makes every call, in the same order, also for what it does not own: there it "
                "receives, or helps to add up."
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
