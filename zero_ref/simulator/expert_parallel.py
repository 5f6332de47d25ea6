"""Expert parallelism: ranks that share the experts of each block, each with whole experts of its own.

With 8 experts in a block and `expert_parallel` 2, rank 0 has experts 0 to 3 of each block, rank 1 has experts
4 to 7, rank 2 has 0 to 3 again, and so on. Everything else, router and attention, is on all ranks.

In forward each block with experts makes three all-to-alls among the ranks that share its experts. The first
tells each rank how many rows come for each of its experts: as many 64-bit integers as the block has experts.
The second brings a row for each token and expert that it goes to; the third brings results back, which are
weighted and added on the token's own rank. Backward makes the last two the other way round.

The ranks that have the same experts are `expert_parallel` apart. Among these alone the experts' gradients are
averaged, in buckets of their own, and the experts' optimizer state is sharded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from zero_ref.simulator.layers import ParamShape, is_of_experts


def experts_of(shapes: Iterable[ParamShape]) -> int:
    """The number of experts in a block; 0 for a model without experts.

    >>> experts_of([ParamShape("h.0.mlp.experts.up", (8, 16, 4)), ParamShape("h.0.mlp.gate.weight", (8, 4))])
    8

    Raises:
        ValueError: blocks have different numbers of experts.
    """
    numbers = sorted({param.shape[0] for param in shapes if is_of_experts(param.name)})
    if len(numbers) > 1:
        raise ValueError(f"blocks have different numbers of experts: {', '.join(map(str, numbers))}.")
    return numbers[0] if numbers else 0


def check_experts(
    shapes: Sequence[ParamShape], expert_parallel: int, expert_load: float, world_size: int
) -> None:
    """Refuse a number of ranks that cannot share the experts of each block, and a load that cannot be.

    >>> mixture = [ParamShape("h.0.mlp.experts.up", (8, 16, 4))]
    >>> check_experts(mixture, 3, 1.0, world_size=6)
    Traceback (most recent call last):
    ValueError: 3 ranks cannot share 8 experts, whole ones each: give expert_parallel a divisor of 8.

    Args:
        shapes: of all parameters of the model.
        expert_parallel: so many consecutive ranks share the experts of each block.
        expert_load: rows that the experts of the busiest of these ranks get, over the average.
    Raises:
        ValueError: the model has no experts; the ranks divide the experts or the world unevenly; or the load
            is that of no rank: one rank alone has the average, and none gets more than all rows.
    """
    if not 1 <= expert_load <= expert_parallel:
        raise ValueError(
            f"the busiest of {expert_parallel} ranks gets from 1 to {expert_parallel} times the average; got "
            f"expert_load={expert_load:g}."
        )
    if expert_parallel == 1:
        return
    experts = experts_of(shapes)
    if not experts:
        raise ValueError(
            f"expert_parallel={expert_parallel}: the model has no experts that ranks could share. "
            "Leave it out, or take a mixture of experts."
        )
    if experts % expert_parallel:
        raise ValueError(
            f"{expert_parallel} ranks cannot share {experts} experts, whole ones each: give expert_parallel "
            f"a divisor of {experts}."
        )
    if world_size % expert_parallel:
        raise ValueError(
            f"{world_size} ranks cannot be divided into groups of {expert_parallel} that share the experts: "
            f"give expert_parallel a divisor of {world_size}."
        )


def on_a_rank(shapes: Iterable[ParamShape], expert_parallel: int) -> tuple[ParamShape, ...]:
    """The parameters that one rank holds: of the experts those that it has, of everything else all.

    >>> mixture = [ParamShape("h.0.mlp.experts.up", (8, 16, 4)), ParamShape("h.0.mlp.gate.weight", (8, 4))]
    >>> [param.shape for param in on_a_rank(mixture, 2)]
    [(4, 16, 4), (8, 4)]
    """
    return tuple(
        param._replace(shape=(param.shape[0] // expert_parallel, *param.shape[1:]))
        if expert_parallel > 1 and is_of_experts(param.name)
        else param
        for param in shapes
    )
