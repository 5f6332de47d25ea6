"""The reader's own optimizer, rung by rung: `zero-ref check my_zero.py` prints which rungs hold.

From chapter 3 on the reader builds one file, `my_zero.py`. Each rung adds one idea to it, as the stairs in
`zero_ref/stairs/` do, and is compared with the package on real ranks. Every rank runs the file in a process
of its own, with a time-out, so the check ends whatever the file does.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch.optim import Adam

from zero_ref.lab.own import FILE
from zero_ref.lab.ranks import RankError
from zero_ref_course import (
    _rungs_of_blocks as blocks,
    _rungs_of_hooks as hooks,
    _rungs_of_state as states,
    _rungs_of_steps as steps,
)
from zero_ref_course._company import NotYet, OnAllRanks, on_ranks

__all__ = ["check_my_zero", "check_rungs", "check_rung", "RungResult", "RUNGS"]

T = TypeVar("T")

SMALL = [(4, 3), (3,), (3, 2), (2,)]
MANY = [(5, 7), (4,), (7, 3), (3,), (6, 6), (1,), (9,), (2, 2)]
FEW = [(6, 5), (5,)]
ONE_LARGE = [(4,), (61,), (4,)]
EVEN = [(4, 5), (7,), (5, 4), (3, 3), (20,), (5,), (2, 9), (20,), (11,), (4, 5), (8,), (5, 3)]
"""Shapes of parameters. With FEW, one of three ranks owns nothing. In EVEN, no parameter is large beside a
share. The elements of the last two do not divide evenly among two ranks, nor those of EVEN among three."""


def run(function: Callable[..., T], world_size: int, *args: Any, **kwargs: Any) -> T:
    """Return the function's value on rank 0. An error that all ranks raise alike is raised here."""
    return on_ranks(function, world_size, *args, **kwargs)[0]


class Rung(NamedTuple):
    """A rung: its chapter, and its grader, which takes the file and returns the line to print."""

    chapter: int
    grader: Callable[[str], str]


class RungResult(NamedTuple):
    """The result of one rung of the file.

    Args:
        rung: its name, one of `RUNGS`.
        state: "not yet": the file does not have this rung.
        message: what was tried, what is wrong, or what is missing.
    """

    rung: str
    state: Literal["holds", "FAILED", "not yet"]
    message: str


def _owners(path: str) -> str:
    return run(steps.owners, 2, path)


def _step(path: str) -> str:
    for world_size, shapes in ((2, SMALL), (3, FEW)):
        run(steps.step, world_size, path, shapes)
    return "3 steps on 2 and 3 real ranks are the package's, bit for bit; state only on owners"


def _buckets(path: str) -> str:
    sent, params = run(steps.buckets, 2, path, MANY)
    run(steps.buckets, 3, path, FEW)
    return f"{sent} messages for {params} parameters, no copies, the package's values"


def _options(path: str) -> str:
    run(steps.options, 2, path, MANY)
    run(steps.options, 3, path, FEW)
    return "a changed learning rate, frozen parameters and zero_grad, as the package's"


def _to_owners(path: str) -> str:
    run(hooks.to_owners, 2, path, MANY)
    run(hooks.to_owners, 3, path, FEW)
    return "owners have the averages of 2 and 3 real ranks, and no other gradients are kept"


def _in_backward(path: str) -> str:
    try:
        run(hooks.in_backward, 3, path, MANY)
    except hooks.ReducesMeanwhile as left_to_step:
        # The rung shards takes the update out of backward again: who has climbed it keeps this one.
        try:
            run(hooks.shards, 3, path, EVEN)
        except (NotYet, OnAllRanks):
            raise left_to_step from None
        return "gradients are reduced while backward goes on; the rung shards leaves the update to step()"
    count = run(hooks.in_backward, 2, path, MANY)
    return f"updates made in backward, one parameter after the other ({count}), are the package's"


def _shards(path: str) -> str:
    run(hooks.shards, 2, path, ONE_LARGE)
    run(hooks.shards, 2, path, EVEN)
    held, of_all = run(hooks.shards, 3, path, EVEN)
    return (
        f"{hooks.BACKWARDS} backwards add up; after one a rank of 3 holds {held:,} of {of_all:,} bytes of "
        "gradients, and the updates are the package's"
    )


def _stage_3(path: str) -> str:
    run(blocks.stage_3, 3, path)
    held = run(blocks.stage_3, 2, path)
    said = f"blocks are gathered, used and freed; a rank of 2 keeps {held:,} bytes of parameters, and the"
    try:
        run(blocks.stage_3, 2, path, torch.bfloat16, master_dtype=torch.float32)
    except NotYet:
        return f"{said} updates are the package's"
    return f"{said} updates are the package's, in 16 bits too"


def _checkpoint(path: str) -> str:
    state, params = run(states.saved, 3, path, MANY)
    run(states.resumed, 2, path, MANY, state, params)
    plain = [torch.nn.Parameter(param.clone()) for param in params]
    try:
        Adam(plain, lr=1.0).load_state_dict(state)
    except (ValueError, KeyError) as error:
        raise OnAllRanks(f"plain Adam does not load what state_dict() gives: {error}") from None
    return "saved by 3 ranks, in plain Adam's form, loaded by 2, which go on as if nothing had happened"


def _masters(path: str) -> str:
    run(states.masters, 3, path, FEW)
    run(states.masters, 2, path, MANY)
    options: dict[str, Any] = {"master_dtype": torch.float32}
    try:
        state, params = run(states.saved, 3, path, MANY, **options)
    except NotYet:
        return "16-bit parameters follow 32-bit masters on their owners, as the package's"
    run(states.resumed, 2, path, MANY, state, params, **options)
    return "16-bit parameters follow 32-bit masters on their owners, which are saved and loaded"


RUNGS: dict[str, Rung] = {
    "owners": Rung(3, _owners),
    "step": Rung(4, _step),
    "buckets": Rung(5, _buckets),
    "in_backward": Rung(6, _in_backward),
    "to_owners": Rung(7, _to_owners),
    "shards": Rung(7, _shards),
    "stage_3": Rung(8, _stage_3),
    "checkpoint": Rung(10, _checkpoint),
    "masters": Rung(12, _masters),
    "options": Rung(14, _options),
}
"""All rungs by name, in the order in which the book builds them."""

FOUNDATION = ("owners", "step")
"""The rungs on which all others stand: if one of them does not hold, the others are not checked."""


def rung_named(name: str) -> str:
    """Return the name in `RUNGS` of a rung that is named so, or as it is printed.

    >>> rung_named("to owners"), rung_named("to_owners")
    ('to_owners', 'to_owners')

    Raises:
        ValueError: there is no such rung.
    """
    rung = name.replace(" ", "_")
    if rung not in RUNGS:
        raise ValueError(f"there is no rung {name!r}; there are {', '.join(RUNGS)}.")
    return rung


def check_rungs(path: str | os.PathLike[str], upto: str | None = None) -> Iterator[RungResult]:
    """Check the rungs of the reader's file, one after the other, and yield their results.

    >>> [result.state for result in check_rungs("my_zero.py", upto="step")]     # doctest: +SKIP
    ['holds', 'not yet']

    Args:
        upto: the last rung to check, by its name here or as it is printed; None for all.
    Raises:
        OSError: the file cannot be read.
        ValueError: there is no such rung.
    Cost:
        Some seconds: each rung runs on two and on three real ranks.
    """
    upto = None if upto is None else rung_named(upto)
    file = os.path.realpath(path)
    Path(file).read_bytes()
    for name in RUNGS:
        result = check_rung(name, file)
        yield result
        if name == upto or (name in FOUNDATION and result.state != "holds"):
            return


def check_my_zero(rung: str, path: str | os.PathLike[str] = FILE) -> None:
    """In a notebook: print the results of the reader's file up to this rung; without a file, how to begin.

    >>> check_my_zero("step", "no/such/my_zero.py")
    There is no no/such/my_zero.py yet. ...

    Raises:
        ValueError: there is no such rung.
    """
    rung = rung_named(rung)
    if not os.path.exists(path):
        print(
            f"There is no {path} yet. Write it in any editor, beside this notebook, and run this cell again; "
            "or skip this: nothing else in the book needs it."
        )
        return
    for result in check_rungs(path, upto=rung):
        print(line(result))


def line(result: RungResult) -> str:
    """The printed line of a result."""
    name = result.rung.replace("_", " ")
    return f"{result.state:<7}  {name:<11}  chapter {RUNGS[result.rung].chapter:<2}  {result.message}"


def check_rung(name: str, path: str | os.PathLike[str]) -> RungResult:
    """Check one rung, whether the others hold or not."""
    return outcome(name, RUNGS[name].grader, path)


def outcome(name: str, grader: Callable[[str], str], path: str | os.PathLike[str]) -> RungResult:
    """Run a grader, which runs a file on ranks, and return its result; errors quote lines of the file."""
    file = os.path.realpath(path)
    try:
        return RungResult(name, "holds", grader(file))
    except NotYet as missing:
        return RungResult(name, "not yet", str(missing))
    except AssertionError as failure:
        return RungResult(name, "FAILED", str(failure))
    except RankError as error:
        if re.search("(?i)timed out|timeout", error.summary):
            return RungResult(name, "FAILED", _where_it_hangs(error, file))
        if isinstance(cause := error.__cause__, AssertionError):
            return RungResult(name, "FAILED", f"on rank {error.rank}: {cause}")
        return RungResult(name, "FAILED", f"on rank {error.rank}: {error.summary.splitlines()[0]}")


def _where_it_hangs(error: RankError, file: str) -> str:
    """Describe the lines of the reader's file at which the ranks were when their time was over."""
    stacks = dict(re.findall(r"rank (\d+) stood here:\n((?:  .*\n?)*)", str(error)))
    stacks |= {str(rank): line for rank, line in error.others.items() if "was still running" in line}
    where = []
    for rank, stack in sorted(stacks.items()):
        if lines := re.findall(rf'{re.escape(file)}"?, line (\d+), in (\w+)', stack):
            where.append(f"rank {rank} stood in {lines[-1][1]}, line {lines[-1][0]}")
    stood = "; ".join(where) or "outside of your file"
    return (
        f"the ranks did not come to an end, and were stopped: {stood}. A loop that never ends looks so, and "
        "so does a call that other ranks do not make."
    )
