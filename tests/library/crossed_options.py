"""The options that `crossed.py` draws a program from, and which pairs of them there are."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

Values = Mapping[str, Any]

LISTS, CUTS = "lists", "cuts"  # whole parameters, or pieces of them, to ranks by chance

OPTIONS: dict[str, Sequence[Any]] = {
    # The wrapper, "averaged" for none: the program itself averages gradients. On virtual ranks the first two.
    "wrapper": ("averaged", "sharded", "ddp", "to_owners", "overlap", "interleaved"),
    "ranks": (2, 3, 4, 1),
    "replicas": (1, 2),
    # Of the optimizer.
    "partition": ("sorted_greedy", "registration_greedy", "even", "equal_shares", "balanced", LISTS, CUTS),
    "views": (False, True),
    "buffer": (2**18, 0, 40),
    "dtype": ("float32", "bfloat16", "float16", "mixed"),
    "masters": (False, True),
    "classes": ("sgd", "momentum", "adamw", "muon", "low_bit"),
    "place": (None, "cpu", "files"),
    # Of the wrapper.
    "reduce_dtype": (None, "float32", "bfloat16", "float16"),
    "scaled": (False, True),
    "may_change": (False, True),
    "gather_in_forward": (False, True),
    "broadcast_buffers": (True, False),
    "bucket": (2**23, 300, 1),
    # Of the loop: what an update is made of, and how.
    "batches": ("one", "no_sync", "reduced", "both"),
    "zero_grad": ("none", "zeros", "wrapper", "seldom"),
    "clip": (None, 1.0, 2.0, math.inf),
    "unused": (False, True),
    "update": ("step", "closure", "schedule"),
    # Operations between updates: whether there are any.
    "freeze": (False, True),
    "add_group": (False, True),
    "whole_state": (False, True),
    "save_sharded": (False, True),
    "join": (False, True),
    "move": (False, True),
}
OPERATIONS = ("freeze", "add_group", "whole_state", "save_sharded", "join")
DDP_WITH = ("ddp", "to_owners", "overlap", "interleaved")
OVERLAPPED = DDP_WITH[2:]
ON_THREADS = {"wrapper": 2, "join": 1}
"""The number of an option's values that virtual ranks can have; DDP needs processes."""
WEIGHTS = {
    ("wrapper", "sharded"): 4,
    ("replicas", 1): 2,
    ("classes", "momentum"): 4,  # for those that are possible with fewer others
    ("zero_grad", "seldom"): 2,
}
"""The weight with which a value is drawn, against 1 for the others."""

IMPOSSIBLE: list[tuple[str, Sequence[Any], str, Sequence[Any], str]] = [
    *(
        ("wrapper", ("averaged", *DDP_WITH), name, OPTIONS[name][1:], "only ShardedDataParallel has it")
        for name in ("replicas", "reduce_dtype", "gather_in_forward", "bucket")
    ),
    *(
        ("wrapper", ("averaged", "ddp", *OVERLAPPED), name, (True,), "only gradients on owners have it")
        for name in ("scaled", "may_change")
    ),
    ("wrapper", DDP_WITH, "zero_grad", ("seldom",), "DDP averages once more what is left; or refuses it"),
    ("wrapper", OVERLAPPED, "update", ("closure",), "backward makes the update"),
    ("wrapper", ("averaged",), "join", (True,), "nothing shadows the averages of a program"),
    ("unused", (True,), "join", (True,), "DDP takes for used what the batch before a rank left did not use"),
    ("scaled", (True,), "zero_grad", ("seldom",), "what is left is unscaled, what is added is not"),
    ("dtype", OPTIONS["dtype"][1:], "classes", ("momentum",), "SGD's kernels of torch 2.13 differ by group"),
]
"""Pairs that are not drawn, with the reason."""

EXCLUDED = {
    frozenset({(first, value), (second, other)})
    for first, values, second, others, _ in IMPOSSIBLE
    for value in values
    for other in others
}


@dataclass(frozen=True)
class Trial:
    """The program that `seed` stands for, with the options in `plain` at their defaults."""

    seed: int
    real: bool = False
    plain: tuple[str, ...] = ()

    def random(self, what: object) -> Random:
        """The source of all that is drawn for `what`: the same on every rank, whatever else is drawn."""
        return Random(f"{self.seed}.{what}")

    def choices_of(self, option: str) -> Sequence[Any]:
        return OPTIONS[option] if self.real else OPTIONS[option][: ON_THREADS.get(option)]

    @property
    def values(self) -> dict[str, Any]:
        """The value of each option."""
        drawn: dict[str, Any] = {}
        for name in OPTIONS:
            values = self.choices_of(name)
            fitting = [
                v for v in values if not any(frozenset({one, (name, v)}) in EXCLUDED for one in drawn.items())
            ]
            weights = [WEIGHTS.get((name, value), 1) for value in fitting]
            drawn[name] = self.random(name).choices(fitting, weights)[0]
            if name in self.plain and values[0] in fitting:
                drawn[name] = values[0]
        return drawn

    @property
    def command(self) -> str:
        plain = f" --plain {','.join(self.plain)}" if self.plain else ""
        return f"python tests/crossed.py --sequences 1 --seed {self.seed}{' --real' * self.real}{plain}"


Pair = tuple[tuple[str, Any], tuple[str, Any]]


def pairs_of(trials: Sequence[Trial]) -> dict[Pair, int]:
    """Count the draws of each pair of values of two options, pairs that are never drawn included."""
    known = [(name, value) for name in OPTIONS for value in trials[0].choices_of(name)]
    possible = [
        pair
        for pair in itertools.combinations(known, 2)
        if pair[0][0] != pair[1][0] and frozenset(pair) not in EXCLUDED
    ]
    drawn = Counter(pair for trial in trials for pair in itertools.combinations(trial.values.items(), 2))
    return {pair: drawn[pair] for pair in possible}
