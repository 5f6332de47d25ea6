"""A strategy as one value: `schedule` prices it, and `lab.train` trains under it.

It says what is sharded and how, who gets gradients, when updates are made, and what travels. It knows no
model: that comes to it in `schedule` and `train`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from zero_ref.local_sgd.averaging import AveragingSchedule
from zero_ref.plan.rules import Choice
from zero_ref.simulator.ledger import StateRule, check_stage, state_rule
from zero_ref.simulator.operations import WAYS

LOCAL_SGD = "local-sgd"


@dataclass(frozen=True)
class Recipe:
    """A strategy.

    >>> recipe("zero", to_owners=True, way="interleaved").title
    'zero, to owners, interleaved'

    Args:
        name: what errors and tables call it.
        summary: in words.
        stage: of ZeRO: what is sharded. 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too.
        partition: at stages 1 and 2 who owns what, as the optimizer's `partition=`.
        flat: owned parameters lie in flat tensors (`parameters_as_bucket_view`), so that one message goes for
            each of these and not for each owned slice.
        to_owners: gradients are reduced to their owners only, and the rest is released.
        way: when updates are made and sent, one of `operations.WAYS`.
        averaging: of local SGD: when gradients and parameters are averaged, and over whom.
        averaged_itemsize: bytes of an element as it is averaged: 4 where the optimizer keeps 32-bit copies of
            16-bit parameters; None for the parameters' own.
        prefetch: at stage 3, how many units ahead parameters are gathered.
        native: not the calls of this package but those of a library that has NCCL's own collectives: one
            reduce for each owner of a bucket, one all-gather for all shards. At stages 1 and 2, and on paper
            only: this package does not make them.
        optimizer: what each rank runs: a name in `ledger.STATE_RULES`, or a rule.
    Raises:
        ValueError: a partition, owners, a way or an averaging is asked of a strategy that has none; the way
            or the optimizer is unknown.
    """

    name: str
    summary: str
    stage: int
    partition: Choice | None = None
    flat: bool = False
    to_owners: bool = False
    way: str = "plain"
    averaging: AveragingSchedule | None = None
    averaged_itemsize: int | None = None
    prefetch: int = 1
    native: bool = False
    optimizer: str | StateRule = field(default="AdamW", kw_only=True)

    def __post_init__(self) -> None:
        check_stage(self.stage)
        state_rule(self.optimizer)
        if self.averaging is not None and self.stage > 0:
            raise ValueError(f"averaging= is for {LOCAL_SGD!r}; strategy {self.name!r} meets in every step.")
        if self.averaging is None and self.name == LOCAL_SGD:
            raise ValueError(f"{LOCAL_SGD!r} needs an averaging=: without one it is 'ddp'.")
        if self.shards_by_parameter:
            if self.partition is None:
                raise ValueError(
                    f"strategy {self.name!r} is of stage {self.stage}, which takes a partition=."
                )
            if self.way not in WAYS:
                raise ValueError(f"unknown way {self.way!r}; choose one of {', '.join(WAYS)}.")
            return
        if self.partition is not None:
            raise ValueError(
                f"strategy {self.name!r} shards nothing by parameter, so it takes no partition=."
            )
        if self.to_owners:
            raise ValueError(f"strategy {self.name!r} has no owners to reduce gradients to.")
        if self.way != "plain":
            raise ValueError(
                f"strategy {self.name!r} updates after backward: it takes way='plain', not {self.way!r}."
            )

    @property
    def shards_by_parameter(self) -> bool:
        """Each element has an owner, by a partition: stages 1 and 2."""
        return self.stage in (1, 2)

    @property
    def title(self) -> str:
        """The name, and what is unusual in where gradients go and when updates are made."""
        usual = RECIPES.get(self.name, self)
        words = [self.name]
        if self.to_owners and not usual.to_owners:
            words.append("to owners")
        if self.way != usual.way:
            words.append(self.way.replace("_", " "))
        return ", ".join(words)


RECIPES: dict[str, Recipe] = {
    one.name: one
    for one in (
        Recipe("ddp", "every rank keeps the whole optimizer and sends no parameters", 0),
        Recipe("zero", "whole parameters to owners, one broadcast each", 1, "sorted_greedy"),
        Recipe("zero-bucket", "whole parameters to owners, one broadcast an owner", 1, "sorted_greedy", True),
        Recipe(
            "zero-even", "1/N of the elements each, to within 64, one broadcast an owner", 1, "even", True
        ),
        Recipe("zero-2", "as zero-even, gradients reduced to their owners only", 2, "even", True, True),
        Recipe("zero-3", "1/N of each parameter, gathered block by block before use", 3),
        Recipe(
            LOCAL_SGD,
            "every rank for itself, parameters averaged once a period",
            0,
            averaging=AveragingSchedule.periodic(8),
        ),
    )
}


def recipe(strategy: str | Recipe, **changes: Any) -> Recipe:
    """The recipe of a name in RECIPES, or a given one, with some fields changed.

    >>> recipe("zero-even", native=True).native
    True

    Raises:
        ValueError: there is no such name, or as `Recipe`.
        TypeError: there is no such field.
    """
    if isinstance(strategy, str):
        if strategy not in RECIPES:
            raise ValueError(f"unknown strategy {strategy!r}; choose one of {', '.join(RECIPES)}.")
        strategy = RECIPES[strategy]
    return replace(strategy, **changes) if changes else strategy
