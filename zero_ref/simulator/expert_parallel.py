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

from zero_ref.plan.partition import ParamSpec
from zero_ref.simulator.data_parallel import step_of
from zero_ref.simulator.dispatch import SharedExperts
from zero_ref.simulator.groups import Groups, Part, SplitOwners
from zero_ref.simulator.layers import ParamShape, is_of_experts
from zero_ref.simulator.operations import (
    COMPUTE,
    Operation,
    forward_and_backward,
    passes_before,
    reduction_of,
)
from zero_ref.simulator.recipe import Recipe
from zero_ref.simulator.sharded import sending


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
            if expert_parallel > 1
            else f"expert_load={expert_load:g} is of ranks that share experts: give expert_parallel, above 1."
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


def check_combined(how: Recipe) -> None:
    """Refuse a recipe that is not combined with expert parallelism.

    Raises:
        ValueError: it averages parameters, updates in another way than after backward, or sends gradients
            from DDP's buckets to owners.
    """
    if how.averaging is not None or how.way != "plain" or (how.to_owners and not how.without_ddp):
        raise ValueError(
            f"{how.title!r} is not combined with experts that several ranks share. ddp, zero, zero-bucket, "
            "zero-even, zero-2 and zero-3 are, with updates after backward."
        )


def parts_of(
    params: Sequence[ParamSpec], world_size: int, group: int, experts: SharedExperts | None
) -> tuple[Part, ...]:
    """The parameters that all ranks of a group share, and the experts, which fewer of them share.

    >>> params = [ParamSpec(4, name="h.0.mlp.gate.weight"), ParamSpec(9, name="h.0.mlp.experts.up")]
    >>> for part in parts_of(params, 8, 8, SharedExperts(2, 1000, 4)):
    ...     print(part.numbers, part.groups)
    (0,) Groups(world_size=8, ranks=8, stride=1)
    (1,) Groups(world_size=8, ranks=4, stride=2)

    Args:
        group: so many consecutive ranks share what is sharded, all or those of a shard group.
        experts: None if each rank has all of them: then there is one part.
    Raises:
        ValueError: the ranks of a group cannot be divided into those that share the experts of a block.
    """
    everyone = Groups(world_size, group)
    if experts is None:
        return (Part(range(len(params)), everyone),)
    if group % experts.ranks:
        raise ValueError(
            f"groups of {group} ranks that share the state cannot be divided into groups of {experts.ranks} "
            f"that share the experts: give a shard_group that is a multiple of {experts.ranks}."
        )
    of_experts = tuple(number for number, param in enumerate(params) if is_of_experts(param.name))
    dense = tuple(number for number, param in enumerate(params) if not is_of_experts(param.name))
    fewer = Groups(world_size, group // experts.ranks, experts.ranks)
    return Part(dense, everyone), Part(of_experts, fewer)


def data_parallel_with_experts(
    params: Sequence[ParamSpec],
    parts: Sequence[Part],
    owners: SplitOwners | None,
    buckets: Sequence[Sequence[int]],
    *,
    flat: bool = False,
    activation_bytes: int = 0,
    muon: bool = False,
    accumulation: int = 1,
    reduced_itemsize: int | None = None,
) -> tuple[Operation, ...]:
    """DDP's operations, where each bucket of gradients is reduced by the ranks that share its parameters.

    The all-to-alls are not among them: `dispatch.with_dispatch` puts them in between.

    Args:
        parts: the parameters, by the ranks that average their gradients.
        owners: who owns what; None where every rank updates all that it has.
        buckets: as in `data_parallel`; none has parameters of two parts. Gradients of experts that a single
            rank has are not reduced.
        flat, activation_bytes, muon, accumulation, reduced_itemsize: as in `data_parallel`.
    Raises:
        ValueError: a bucket has parameters of two parts.
    """
    groups_of = {number: part.groups for part in parts for number in part.numbers}
    forward, backwards = forward_and_backward(params, buckets, activation_bytes)
    operations = [*passes_before(forward, backwards, accumulation - 1), forward]
    reduced: tuple[int, ...] = ()
    for bucket, backward in zip(buckets, backwards):
        (groups, *others) = {groups_of[number] for number in bucket}
        if others:
            raise ValueError(f"gradient bucket {backward.part} has experts beside other parameters.")
        operations.append(backward if accumulation == 1 else backward._replace(takes=0))
        if groups.ranks > 1:
            reduce = reduction_of(backward, len(operations) - 1, itemsize=reduced_itemsize)
            operations.append(groups.within(reduce))
            reduced = (len(operations) - 1,)
    trained = [number for bucket in buckets for number in bucket]
    operations.append(step_of(Operation("step", COMPUTE, None, reduced), params, owners, trained, muon))
    if owners is not None:
        after = (len(operations) - 1,)
        operations += [one._replace(after=after) for one in sending(owners, params, flat)]
    return tuple(operations)
