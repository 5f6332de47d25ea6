"""Chapter 9's graders: the tree by hand, and a choice with its numbers.

`Case`, `Choice` and `BRIEF` are for readers too: the numbers of a decision, the reader's choice, and the run
that it is made for.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from zero_ref.simulator.cluster import cluster
from zero_ref.simulator.models import MODELS
from zero_ref.simulator.scenario import Scenario
from zero_ref.simulator.tree import Advice, Node, Question, nodes_on
from zero_ref.simulator.which import (
    ALIKE,
    HIDES,
    IN_NODE,
    LEAST,
    LITTLE,
    PASSES,
    SEVERAL,
    SHORT,
    SHORT_BLOCK_MS,
    SMALL,
    STAGE_2,
    TREE,
    WHOLE,
    Compared,
    compared,
    tokens_for_short_update,
    tokens_to_hide,
    way_through,
)
from zero_ref_course import Answer, exercise, shown
from zero_ref_course._cases import Form, is_number, named
from zero_ref_course.predictions import prediction

# --------------------------------------------------------------------------------- 9.1 the tree by hand

WAYS = ("DDP", "stage 1", "stage 2", "stage 2, no_sync", "stage 3", "hybrid", "beyond ZeRO")


class Case(NamedTuple):
    """The numbers that decide the questions of the tree.

    Args:
        numel: parameters, in 16 bits beside 32-bit masters of AdamW.
        blocks: L, how many blocks have them, in equal parts.
        ranks: of all nodes together.
        ranks_of_node: of one node.
        device_gb: 10^9 bytes of a device.
        room_gb: those of them that tensors may take.
        activations_gb: 10^9 bytes of all that no stage divides: activations, gathered blocks, libraries.
        tokens: of one pass, on each rank.
        passes: of an update.
        tflops: C, 10^12 operations a second that a pass reaches.
        gb_per_s: W, 10^9 bytes a second that arrive at each rank while all ranks gather.
        gb_per_s_in_node: the bytes that arrive at each rank while the ranks of one node gather.
        memory_gb_per_s: B, 10^9 bytes a second of a device's memory.
    """

    numel: float
    blocks: int
    ranks: int
    ranks_of_node: int
    device_gb: float
    room_gb: float
    activations_gb: float
    tokens: int
    passes: int
    tflops: float
    gb_per_s: float
    gb_per_s_in_node: float
    memory_gb_per_s: float


H100 = Case(8e9, 32, 64, 8, 85.5, 70, 12, 8192, 1, 380, 298, 358, 2850)
A100 = Case(8e9, 32, 64, 8, 85.9, 70, 12, 2048, 1, 176, 38.5, 234, 1733)
SMALLER = H100._replace(numel=0.4e9, blocks=24, tokens=16384)
CASES = [
    H100,
    SMALLER,
    SMALLER._replace(tokens=10_000),
    SMALLER._replace(tokens=4096),
    # An update of several short passes is long enough.
    SMALLER._replace(tokens=2048, passes=8),
    # Below a tenth with 16 bytes a parameter, and above with 18.
    SMALLER._replace(numel=0.5e9),
    H100._replace(numel=1.5e9, blocks=48, tokens=16384),
    H100._replace(numel=1.5e9, blocks=48, tokens=4096),
    H100._replace(numel=1.5e9, blocks=48, tokens=4096, passes=4),
    H100._replace(numel=10e9, blocks=400, tokens=4096),
    H100._replace(numel=8e9, blocks=400, tokens=4096, ranks=512),
    H100._replace(passes=8, tokens=4096),
    H100._replace(numel=16e9, passes=8),
    H100._replace(numel=40e9, passes=8),
    H100._replace(numel=70e9, ranks=8),
    A100,
    A100._replace(ranks=8, gb_per_s=234),
    A100._replace(passes=8),
    A100._replace(passes=8, tokens=3000),
    A100._replace(numel=1.5e9, tokens=512),
    A100._replace(numel=1.5e9, blocks=48),
    A100._replace(ranks=60),
    A100._replace(ranks=60, numel=35e9),
    # Between C/W and C/W (N-1)/N; between what all ranks need and what a node needs.
    A100._replace(ranks=4, ranks_of_node=4, gb_per_s=38.5, tokens=3500),
    A100._replace(tokens=600),
    A100._replace(tokens=700),
    A100._replace(numel=25e9),
    A100._replace(numel=35e9),
    # Two nodes are few, and four are not.
    A100._replace(ranks=16, tokens=512),
    A100._replace(ranks=32, tokens=512, gb_per_s=39.5),
    # The shares of the gradients are there beside the whole ones.
    A100._replace(numel=5.4e9, ranks=2, ranks_of_node=2, passes=4, tokens=1000),
    # A room that is filled to the last byte; between 15 and 16 bytes a parameter.
    H100._replace(numel=10e9, ranks=8, activations_gb=10, room_gb=30),
    H100._replace(numel=10e9, ranks=8, activations_gb=10, room_gb=29.5),
    SMALLER._replace(gb_per_s=10),
    SMALLER._replace(gb_per_s=10, tokens=10_000),
    SMALLER._replace(gb_per_s=10, tokens=2048, passes=2),
    SMALLER._replace(gb_per_s=10, tokens=10_000, passes=2),
]


@exercise("which_stage.advise")
def advise(answer: Answer) -> str:
    """Check the advice of the tree, from thirteen numbers."""
    form = Form(lambda value: value in WAYS, f"It must return one of {', '.join(map(repr, WAYS))}.")
    cases = CASES + answer.drawn(_drawn_case, 40)
    for case in cases:
        theirs = form.returned_by(answer, case)
        path = way_through(TREE, answers_of(case))
        right = nodes_on(TREE, path)[-1]
        assert isinstance(right, Advice)
        if theirs != right.name:
            raise AssertionError(
                f"{answer.name}({case}) returned {theirs!r}; the tree leads to {right.name!r}. "
                f"{_where_they_part(theirs, case, path)}"
            )
    return f"{len(cases)} cases, as the tree has them"


def _drawn_case(rng: random.Random) -> Case:
    like = rng.choice((H100, A100))
    return like._replace(
        numel=rng.choice((0.2e9, 0.4e9, 1.5e9, 8e9, 13e9, 30e9, 70e9)) * rng.uniform(0.9, 1.1),
        blocks=rng.choice((12, 24, 48, 80)),
        ranks=rng.choice((4, 8, 12, 16, 64, 256)),
        activations_gb=round(rng.uniform(4, 30), 1),
        tokens=rng.choice((256, 512, 1024, 2048, 4096, 16384)),
        passes=rng.choice((1, 1, 2, 8)),
        gb_per_s=round(rng.uniform(5, 300), 1),
    )


def bytes_of(case: Case) -> dict[str, float]:
    """The 10^9 bytes that a rank needs, by the question of the tree that asks whether they fit."""
    psi, stage_2 = case.numel / 1e9, 2 + 14 / case.ranks
    each = {
        LEAST: 16 / case.ranks,
        SMALL: 18.0,
        SEVERAL: stage_2,
        SHORT: 6 + 12 / case.ranks,
        IN_NODE: 16 / case.ranks_of_node,
        WHOLE: 18.0,
        PASSES: 4 + 14 / case.ranks,
        STAGE_2: stage_2,
    }
    return {question: psi * factor + case.activations_gb for question, factor in each.items()}


def answers_of(case: Case) -> dict[str, bool]:
    """The answers to the tree's questions by its thresholds.

    >>> advice = nodes_on(TREE, way_through(TREE, answers_of(H100)))[-1]
    >>> advice.name
    'stage 3'
    """
    fits = {question: needed < case.room_gb for question, needed in bytes_of(case).items()}
    needed, several = _tokens_of_all(case), case.passes > 1
    is_short = _block_ms(case) < SHORT_BLOCK_MS
    is_long_update = case.tokens * case.passes > _tokens_of_update(case)
    little = 18 * case.numel / 1e9 < LITTLE * case.device_gb and (is_long_update or is_short)
    inside = case.tokens > _tokens_of_node(case) and not (is_short or several)
    inside = inside or (_has_few_nodes(case) and not (is_short and several))
    return {
        LEAST: fits[LEAST],
        HIDES: case.tokens > needed,
        SMALL: fits[SMALL] and little,
        SEVERAL: fits[SEVERAL] and several,
        SHORT: fits[SHORT] and is_short,
        IN_NODE: fits[IN_NODE] and _fills_nodes(case) and inside,
        WHOLE: fits[WHOLE] and (little or (is_short and not several)),
        PASSES: fits[PASSES] and several and case.tokens < needed / 2,
        STAGE_2: fits[STAGE_2],
    }


def _tokens_of_all(case: Case) -> float:
    return tokens_to_hide(case.tflops, case.gb_per_s, case.ranks)


def _tokens_of_node(case: Case) -> float:
    return tokens_to_hide(case.tflops, case.gb_per_s_in_node, case.ranks_of_node)


def _tokens_of_update(case: Case) -> float:
    return tokens_for_short_update(case.tflops, case.memory_gb_per_s)


def _block_ms(case: Case) -> float:
    return 2 * case.numel * case.tokens / case.blocks / (1e9 * case.tflops)


def _fills_nodes(case: Case) -> bool:
    return case.ranks > case.ranks_of_node and case.ranks % case.ranks_of_node == 0


def _has_few_nodes(case: Case) -> bool:
    return case.ranks / case.ranks_of_node < 2 / 3 * case.gb_per_s_in_node / case.gb_per_s


def _where_they_part(theirs: str, case: Case, path: Sequence[bool]) -> str:
    """The last question on the way to the right advice before one that leads to theirs, with its numbers."""
    parted = [_shared_length(way, path) for way in _ways_to(theirs, TREE)]
    node = nodes_on(TREE, path)[max(parted)]
    assert isinstance(node, Question)
    found = answers_of(case)[node.text]
    return f"{node.text} {'Yes' if found else 'No'}: {_numbers_of(node.text, case)}."


def _ways_to(name: str, node: Node) -> list[tuple[bool, ...]]:
    if isinstance(node, Advice):
        return [()] if node.name == name else []
    return [
        (said, *way) for said, below in ((True, node.yes), (False, node.no)) for way in _ways_to(name, below)
    ]


def _shared_length(way: Sequence[bool], path: Sequence[bool]) -> int:
    return next((place for place, (a, b) in enumerate(zip(way, path)) if a != b), min(len(way), len(path)))


def _numbers_of(question: str, case: Case) -> str:
    needed = bytes_of(case)
    gb = {one: f"{value:,.1f} GB of {case.room_gb:g}" for one, value in needed.items()}
    passes = f"{case.passes} pass{'es' * (case.passes > 1)}"
    block = f"{_block_ms(case):.2f} ms a block"
    if question in (SMALL, WHOLE):
        return (
            f"{gb[question]} for tensors; 18 Ψ are {18 * case.numel / 1e9:,.1f} GB, a tenth of the device is "
            f"{case.device_gb / 10:,.1f}; {case.tokens * case.passes:,} tokens of an update, and "
            f"{_tokens_of_update(case):,.0f} needed; {passes}; {block}"
        )
    if question in (SEVERAL, SHORT):
        return f"{passes if question == SEVERAL else block}; {gb[question]}"
    if question == PASSES:
        half = _tokens_of_all(case) / 2
        return f"{passes}; {case.tokens:,} tokens of one, and {half:,.0f} are the half; {gb[PASSES]}"
    if question == HIDES:
        return f"{case.tokens:,} tokens of a pass, and {_tokens_of_all(case):,.0f} needed"
    if question == IN_NODE:
        if not _fills_nodes(case):
            return f"{case.ranks} ranks do not fill several nodes of {case.ranks_of_node}"
        few = 2 / 3 * case.gb_per_s_in_node / case.gb_per_s
        return (
            f"{passes}; {gb[IN_NODE]}; {case.ranks // case.ranks_of_node} nodes, few are below {few:.1f}; "
            f"{case.tokens:,} tokens, and {_tokens_of_node(case):,.0f} needed inside; {block}"
        )
    return gb[question]


# ------------------------------------------------------------------------------------ 9.2 a choice in writing


@dataclass(frozen=True)
class Choice:
    """Your decision, and the numbers for it.

    Args:
        way: of `ways_of(BRIEF)`: "DDP", "stage 1", "stage 2", "stage 2, no_sync" and so on.
        memory_gb: 10^9 bytes that the fullest rank needs under this way.
        update_s: the seconds of an update under this way.
        update_s_of_stage_3: the seconds of an update under stage 3, which was proposed.
        tokens_needed: the tokens of a pass that hide the gathers of all ranks.
        because: a sentence or two for the person who has to agree.
    """

    way: str
    memory_gb: float
    update_s: float
    update_s_of_stage_3: float
    tokens_needed: float
    because: str


BRIEF = Scenario(
    MODELS["llama3-8b"],
    cluster("a100-ethernet"),
    64,
    batch=1,
    sequence=2048,
    accumulation=8,
    checkpointing="full",
)
"""Llama 3 8B on 8 nodes of 8 A100, joined by Ethernet: 8 passes an update, of 2,048 tokens on each rank."""

CLOSE = 0.1
FEWEST_WORDS = 12


@cache
def _brief() -> Compared:
    return compared(BRIEF)


@exercise("which_stage.choice", seconds=60)
def choice(answer: Answer) -> str:
    """Check the way for BRIEF and the numbers that decide; a person reads the reasons."""
    chosen, found = answer(), _brief()
    assert isinstance(chosen, Choice), f"{answer.name}() returned {shown(chosen)}. Return a Choice."
    assert chosen.way in found.runs, (
        f"{answer.name}() chooses {shown(chosen.way)}. Choose one of {', '.join(map(repr, found.runs))}."
    )
    _check_way(answer.name, chosen.way, found)
    run = found.runs[chosen.way]
    right = {
        "memory_gb": run.peak_bytes / 1e9,
        "update_s": run.iteration_ms / 1e3,
        "update_s_of_stage_3": found.runs["stage 3"].iteration_ms / 1e3,
        "tokens_needed": found.tokens_needed,
    }
    for name, value in right.items():
        _check_number(f"{answer.name}(): {name}", getattr(chosen, name), value, found)
    said = chosen.because if isinstance(chosen.because, str) else ""
    assert len(said.split()) >= FEWEST_WORDS, (
        f"{answer.name}(): because is {shown(chosen.because)}. Write a sentence of {FEWEST_WORDS} words or "
        "more that would convince whoever proposed stage 3: an instructor reads it."
    )
    assert any(sign.isdigit() for sign in said), (
        f"{answer.name}(): because has no number in it. Which one decides?"
    )
    return (
        f"{chosen.way}, {right['memory_gb']:.1f} GB, {right['update_s']:.1f} s where stage 3 takes "
        f"{right['update_s_of_stage_3']:.1f} s. For an instructor to read: {' '.join(said.split())}"
    )


def _check_way(name: str, way: str, found: Compared) -> None:
    run, fastest = found.runs[way], found.runs[found.fastest or way]
    device_gb = BRIEF.cluster.device.memory_gb or math.inf
    assert run.fits, (
        f"{name}() chooses {way}, which needs {run.peak_bytes / 1e9:.1f} GB on a rank, of {device_gb:.1f}. "
        "It does not surely fit."
    )
    if run.iteration_ms <= (1 + ALIKE) * fastest.iteration_ms:
        return
    psi = 2 * BRIEF.numel * (1 - 1 / BRIEF.world_size)
    why = "Count what is sent again in each of the 8 passes."
    if run.exposed_ms < 2 * fastest.exposed_ms:
        why = "What is exposed, and how often?"
    raise AssertionError(
        f"{name}() chooses {way}: an update takes {run.iteration_ms / 1e3:.1f} s, and there is a way that "
        f"surely fits and takes {fastest.iteration_ms / 1e3:.1f} s. A rank sends {run.sent_bytes / psi:.1f} "
        f"times what one movement of the model is, {run.exposed_ms / 1e3:.1f} s of it exposed. {why}"
    )


def _check_number(what: str, theirs: object, right: float, found: Compared) -> None:
    assert is_number(theirs), f"{what} is {shown(theirs)}. Give a number."
    value = float(theirs)  # type: ignore[arg-type]
    if math.isclose(value, right, rel_tol=CLOSE):
        return
    hint = named(
        {
            "These are bytes, and it asks for 10^9 of them.": math.isclose(value, right * 1e9, rel_tol=CLOSE),
            "These are milliseconds.": math.isclose(value, right * 1e3, rel_tol=CLOSE),
            "That is what a node's ranks need. All ranks gather over the slower links.": math.isclose(
                value, found.tokens_needed_in_node, rel_tol=CLOSE
            ),
            "That is of a pass. An update has 8.": math.isclose(8 * value, right, rel_tol=2 * CLOSE),
        },
        f"The simulator does not say so, and {CLOSE:.0%} off would do.",
    )
    raise AssertionError(f"{what} is {value:g}. {hint}")


# -------------------------------------------------------------------------------------------- predictions


@cache
def _on_8() -> Mapping[str, float]:
    found = compared(
        Scenario(MODELS["llama3-8b"], cluster("h100-ib"), 8, sequence=4096, checkpointing="full")
    )
    return {name: run.iteration_ms for name, run in found.runs.items()}


@prediction(
    "which_stage.apart",
    "Llama 3 8B on 8 H100 of one node, 4,096 tokens on each, under DDP and stages 1 to 3: the slowest takes "
    "longer than the fastest. How many times as long?",
    unit="times",
)
def apart() -> float:
    """The slowest way over the fastest: close to 1, as in a node nearly all communication hides."""
    return max(_on_8().values()) / min(_on_8().values())


@prediction(
    "which_stage.tokens",
    "C is 400 TFLOP/s, W is 50 GB/s, and there are 64 ranks: from how many tokens of a pass on does stage 3 "
    "hide what it gathers?",
    unit="tokens",
)
def tokens() -> float:
    """The tokens that hide the gathers: C/W (N-1)/N."""
    return tokens_to_hide(400, 50, 64)


@prediction(
    "which_stage.passes",
    "An update has 8 passes. In one movement a rank sends (N-1)/N of the model's parameters. How many "
    "movements does stage 3 make in this update?",
    unit="movements",
)
def passes() -> float:
    """Three movements for each pass, less the part of the root that is not gathered twice."""
    run = _brief().runs["stage 3"]
    return run.sent_bytes / (2 * BRIEF.numel * (1 - 1 / BRIEF.world_size))
