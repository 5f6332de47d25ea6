"""Agreement between ranks, so that all of them raise an error where one alone would leave the others waiting.

`stairs/owners.py` has no such check. Here each rank says what it is about to do, before the first call whose
success depends on the other ranks. If one rank is about to do something else, or cannot go on, all ranks
raise.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

from zero_ref.comm.collectives import Collectives
from zero_ref.comm.objects import gather_bytes


class RanksLostError(RuntimeError):
    """The network failed while ranks compared what they do: this rank cannot know which others went on."""


class Fact(str):
    """A line that must be the same on all ranks, with advice (`remedy`) for the user if it is not."""

    remedy: str

    def __new__(cls, line: str, remedy: str) -> Fact:
        fact = super().__new__(cls, line)
        fact.remedy = remedy
        return fact


KNOWN_TO = "known_to"
"""The attribute in which an exception lists the groups whose ranks have all raised for the same reason."""

TOLD = "told"
"""The attribute in which an exception has the error that another rank has told, as "Class: text"."""

SAME_SLICES = (
    "`replicas` are the ranks that own the same slices in other groups, as along the other dimension of a "
    "DeviceMesh."
)
REMEDY = "Pass the same parameters and options on every rank."

MAY_DIFFER = "may_differ"
"""The key, in the metadata of a dataclass's field, of the reason why ranks do not compare the field."""


def facts_of_fields(options: Any) -> list[str]:
    """A line for each field of a dataclass, so that an option which is added to it is compared.

    >>> from dataclasses import dataclass, field
    >>> @dataclass(frozen=True)
    ... class Options:
    ...     kind: type
    ...     size: int = 4
    ...     name: str = field(default="", metadata={MAY_DIFFER: "it is only printed"})
    >>> facts_of_fields(Options(float))
    ['kind=float', 'size=4']
    """
    named = (
        (field.name, getattr(options, field.name))
        for field in fields(options)
        if MAY_DIFFER not in field.metadata
    )
    return [f"{name}={value.__name__ if isinstance(value, type) else value}" for name, value in named]


class Agreement:
    """The ranks of a group, which compare what they are about to do.

    Args:
        comm: the calls to the ranks.
    """

    def __init__(self, comm: Collectives) -> None:
        self.comm = comm

    def agree(
        self,
        action: str,
        facts: Sequence[str] | Exception,
        op: str = "all_gather",
        replicas: Collectives | None = None,
    ) -> None:
        """Compare what every rank is about to do; return if all ranks agree, raise on all of them if not.

        An error found by one rank alone would leave the others waiting in their next collective. So each rank
        first checks its own situation, then passes the result here: the facts that must be equal, or its
        error.

        With `replicas`, each rank first compares with its replicas, then passes an error from that comparison
        to its own group. So an error of one rank, or a difference that only some ranks can see, reaches all
        ranks of all groups.

        Args:
            action: what comes next, in words: "construct the optimizer".
            facts: one line each, in an order that all ranks share; or the exception that this rank met. A
                `Fact` has its own advice for the user. An exception that an earlier agreement of these ranks
                has raised is raised again without communication.
            op: the name of the all-gather for observers.
            replicas: the ranks that own the same slices in other groups; None if there are no other groups.
        Raises:
            Exception: the one passed as `facts`, on the rank that passed it.
            RuntimeError: another rank failed, or does something else.
            RanksLostError: the network failed.
            ValueError: the facts differ; names the rank and the first fact that differs.
        Collective: all ranks of the group, with replicas of all groups, outside of any other call.
        Cost: one all-gather of 32 bytes; where ranks differ, one more of all the facts. As much among
            replicas.
        """
        # 1. Compare with the replicas. An error replaces the facts, so that phase 2 brings it to this group.
        if replicas is not None:
            place = Fact(f"the slices of rank {self.comm.rank} of {self.comm.world_size}", SAME_SLICES)
            with_place = facts if isinstance(facts, Exception) else [place, *facts]
            try:
                Agreement(replicas).agree(f"{action} to train replicas of a model", with_place, op)
            except Exception as error:
                facts = error

        # 2. Compare within this group. If an agreement of this group raised the exception, all its ranks have
        # raised, so no rank would answer one more comparison.
        if isinstance(facts, Exception) and self.comm in vars(facts).get(KNOWN_TO, ()):
            raise facts
        try:
            _compare(self.comm, action, facts, op)
        except Exception as error:
            vars(error).setdefault(KNOWN_TO, []).append(self.comm)
            raise

    @contextlib.contextmanager
    def preparing(
        self, action: str, op: str = "all_gather", replicas: Collectives | None = None
    ) -> Iterator[list[str]]:
        """Prepare an action, and at the end compare the preparation with that of the other ranks.

        >>> with Agreement(comm).preparing("construct the optimizer") as facts:             # doctest: +SKIP
        ...     facts += [f"{len(params)} parameters"]

        Yields:
            A list to which the block adds the facts. If the block raises, `agree` gets the exception instead.
        Args, Raises, Collective, Cost: as `agree`, at the end.
        """
        facts: list[str] = []
        try:
            yield facts
        except Exception as error:
            self.agree(action, error, op, replicas)
        else:
            self.agree(action, facts, op, replicas)


def _compare(comm: Collectives, action: str, facts: Sequence[str] | Exception, op: str) -> None:
    """Compare within one group; Args, Raises, Cost: as `Agreement.agree`."""
    # 1. Compare digests: a message of a fixed size, however many facts there are.
    failed = isinstance(facts, Exception)
    lines = [f"{type(facts).__name__}: {facts}"] if isinstance(facts, Exception) else list(facts)
    text = json.dumps([action, failed, lines]).encode()
    # 24 bytes of a hash and 8 of the text's length, so that ranks know how much to send if they differ.
    digest = hashlib.sha256(text).digest()[:24] + len(text).to_bytes(8, "big")
    try:
        digests = gather_bytes(comm, digest, op)
    except RuntimeError as error:
        raise RanksLostError(f"rank {comm.rank} was to {action} with all others: {error}") from error
    if all(other == digest for other in digests) and not failed:
        return

    # 2. Some rank differs. All ranks have the same digests, so all make this second call, for the texts.
    longest = max(int.from_bytes(other[24:], "big") for other in digests)
    texts = gather_bytes(comm, text.ljust(longest), op)
    if isinstance(facts, Exception):
        raise facts
    raise _difference(comm.rank, action, [json.loads(other) for other in texts], facts)


def _difference(
    mine: int, action: str, of_ranks: list[tuple[str, bool, list[str]]], facts: Sequence[str]
) -> Exception:
    """Give the error to raise: that a rank failed, or else that actions differ, or else that facts differ."""
    for rank, (their_action, their_failure, their_lines) in enumerate(of_ranks):
        if their_failure:
            error = RuntimeError(f"rank {mine}: rank {rank} could not {their_action}: {their_lines[0]}")
            vars(error)[TOLD] = their_lines[0]
            return error
    for rank, (their_action, _, _) in enumerate(of_ranks):
        if their_action != action:
            return RuntimeError(
                f"rank {mine} is to {action} while rank {rank} is to {their_action}. "
                "All ranks must make the same calls in the same order."
            )
    return ValueError(_disagreement(action, [lines for _, _, lines in of_ranks], facts))


def _disagreement(action: str, lines_of_rank: list[list[str]], facts: Sequence[str]) -> str:
    """Name a rank whose lines differ from the most common ones, and its first line that differs."""
    usual = list(Counter(map(tuple, lines_of_rank)).most_common(1)[0][0])
    # Facts that all ranks but one share are most likely right, so name the rank that differs from them.
    odd = next(rank for rank, lines in enumerate(lines_of_rank) if lines != usual)
    typical = lines_of_rank.index(usual)
    for number, (mine, theirs) in enumerate(zip(lines_of_rank[odd], usual, strict=False)):
        if mine != theirs:
            # Only texts were sent; the advice is that of this rank's own fact in the same place.
            remedy = getattr(facts[number], "remedy", REMEDY) if number < len(facts) else REMEDY
            return (
                f"ranks disagree, so none can {action}: rank {odd} has [{mine}] where rank {typical} has "
                f"[{theirs}]. {remedy}"
            )
    return (
        f"ranks disagree, so none can {action}: rank {odd} lists {len(lines_of_rank[odd])} facts and rank "
        f"{typical} lists {len(usual)}. {REMEDY}"
    )
