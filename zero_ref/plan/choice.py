"""The values that a user may pass as `partition=`, and the `Partition` that each stands for.

A choice is a rule or its name, a function of the user's own, an assignment, or a Partition.
`stairs/owners.py` has a single rule, `assign_owners`. Here the result of any rule is checked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from zero_ref.plan.partition import ParamSpec, Partition, Slice
from zero_ref.plan.rules import (
    balanced,
    elements,
    equal_shares,
    even,
    from_lists,
    newton_schulz_operations,
    registration_greedy,
    sorted_greedy,
)

Choice = str | Partition | Callable[..., "Partition | Sequence[Sequence[int]]"] | Sequence[Sequence[int]]
"""A choice of owners: a name in `RULES`, such as "even"; a `Partition`; a list of parameter numbers for each
rank; a function `(numels, world_size)` that returns a `Partition` or such lists; or a rule marked by
`partition_rule`."""

# Add a rule here, and its name works in the optimizer, the simulator and `zero-ref plan`. A rule must be
# deterministic, since each rank calls it by itself, and must give every element one owner. One that is marked
# by `partition_rule` gets ParamSpecs and `loads`: it has to leave parameters whole that are marked `whole`,
# and to continue from the loads. Cuts at multiples of ALIGNMENT keep updates equal bit for bit.
RULES: dict[str, Callable[..., Partition]] = {
    "sorted_greedy": sorted_greedy,
    "registration_greedy": registration_greedy,
    "even": even,
    "equal_shares": equal_shares,
    "balanced": balanced(newton_schulz_operations),
}


def rule_named(choice: Choice) -> Choice:
    """Look up a rule by its name; return a choice that is not a name unchanged.

    Raises:
        ValueError: no rule has this name.
    """
    if not isinstance(choice, str):
        return choice
    name = choice.replace("-", "_")
    if name not in RULES:
        raise ValueError(f"unknown partition {choice!r}; choose one of {', '.join(RULES)}.")
    return RULES[name]


def plan_partition(
    choice: Choice,
    params: Sequence[ParamSpec],
    world_size: int,
    *,
    loads: Sequence[float] | None = None,
) -> Partition:
    """Make a Partition of these parameters from what a user passed as `partition=`.

    >>> plan_partition("even", [ParamSpec(640), ParamSpec(128)], world_size=2).loads
    (384, 384)

    Args:
        choice: a name in RULES ("sorted_greedy" or "sorted-greedy"), a function `(numels, world_size)` that
            returns a Partition or one list of parameter numbers for each rank, a rule marked by
            `partition_rule`, such lists, or a Partition.
        params: in registration order.
        loads: each rank's load so far (`loads_under`), when parameters are added to an optimizer.
    Raises:
        ValueError: the name is unknown, or the result does not fit these parameters and this world size.
        TypeError: `choice` is none of the above.
    """
    # 1. Call the rule, if the choice is one. Only marked rules know ParamSpecs.
    numels = [param.numel for param in params]
    rule = rule_named(choice)
    made: object = rule
    if callable(rule):
        takes_specs = _weight_of(rule) is not None
        made = rule(params, world_size, loads=loads) if takes_specs else rule(numels, world_size)
    # 2. Make a Partition of lists.
    if not isinstance(made, Partition):
        if not isinstance(made, Sequence):
            raise TypeError(
                f"partition= takes a name, a function, lists of parameter numbers or a Partition, "
                f"not {type(made).__name__}."
            )
        made = from_lists(numels, made)
    # 3. Check that it is for these parameters: a user may pass one that was made for others.
    if made.world_size != world_size or made.numels != tuple(numels):
        raise ValueError(
            f"the partition is for {len(made.numels)} parameters ({sum(made.numels):,} elements) on "
            f"{made.world_size} ranks; these are {len(numels)} parameters ({sum(numels):,} elements) "
            f"on {world_size} ranks."
        )
    return made


def _weight_of(rule: Choice) -> Callable[[ParamSpec], float] | None:
    """Return the weight that `partition_rule` has set on a rule; None if the rule is not marked."""
    return getattr(_inner(rule), "partition_weight", None)


def _inner(rule: Choice) -> Choice:
    """Return the function inside of functools.partial, which has the marks."""
    while isinstance(rule, partial):
        rule = rule.func
    return rule


def may_cut(choice: Choice) -> bool:
    """Return whether the choice is a rule that cuts parameters.

    >>> may_cut("even"), may_cut("sorted_greedy")
    (True, False)
    """
    return getattr(_inner(rule_named(choice)), "partition_cuts", False)


def loads_under(choice: Choice, partition: Partition, params: Sequence[ParamSpec]) -> tuple[float, ...]:
    """Compute each rank's load, in the weights of the chosen rule.

    >>> frozen = [ParamSpec(6), ParamSpec(9, trainable=False)]
    >>> loads_under("registration_greedy", from_lists([6, 9], [[0], [1]]), frozen)
    (6, 1)

    Args:
        params: the parameters of the partition; more may follow.
    """
    weight = _weight_of(rule_named(choice)) or elements

    def load(piece: Slice) -> float:
        # A slice has its part of the parameter's weight.
        whole, numel = weight(params[piece.param]), partition.numels[piece.param]
        return whole if piece.numel == numel else whole * piece.numel / numel

    return tuple(sum(map(load, slices)) for slices in partition.slices_of_rank)
