"""A decision tree as a value: questions that are answered by yes or no, and an advice at each end."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Advice(NamedTuple):
    """An end of the tree: what to do.

    Args:
        name: a few words, at most some 16 letters: "stage 3".
        because: a short sentence with the reason; empty for none.
    """

    name: str
    because: str = ""


class Question(NamedTuple):
    """A question, and what follows each of its two answers.

    Args:
        text: a sentence that can be answered by yes or no.
        yes, no: the question or the advice that follows the answer.
        threshold: the formula or the number that decides; empty for none.
        answered: for one model, the numbers that decided: "81 GB of 85.5 GB"; empty for none.
    """

    text: str
    yes: Question | Advice
    no: Question | Advice
    threshold: str = ""
    answered: str = ""


Node = Question | Advice


def nodes_on(root: Node, path: Iterable[bool]) -> list[Node]:
    """Follow answers down a tree: the nodes that are met, from the root on.

    >>> small = Question("Does it fit?", yes=Advice("DDP"), no=Advice("stage 1"))
    >>> [type(node).__name__ for node in nodes_on(small, [False])], nodes_on(small, [False])[-1].name
    (['Question', 'Advice'], 'stage 1')

    Args:
        path: the answers, True for yes; it may end before an advice is reached.
    Raises:
        ValueError: an answer is left when an advice has been reached.
    """
    nodes = [root]
    for answer in path:
        node = nodes[-1]
        if not isinstance(node, Question):
            raise ValueError(f"the advice {node.name!r} has been reached, and asks no question to answer.")
        nodes.append(node.yes if answer else node.no)
    return nodes


def words_of(node: Node) -> str:
    """Write a tree out as a text, each answer with what follows it.

    >>> words_of(Question("Does it fit?", yes=Advice("DDP", "It sends least."), no=Advice("stage 1")))
    'Does it fit? Yes: DDP (It sends least.). No: stage 1.'
    """
    if isinstance(node, Advice):
        return f"{node.name} ({node.because})." if node.because else f"{node.name}."
    decides = f" ({node.threshold})" if node.threshold else ""
    return f"{node.text}{decides} Yes: {words_of(node.yes)} No: {words_of(node.no)}"
