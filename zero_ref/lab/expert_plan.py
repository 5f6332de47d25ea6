"""What is predicted of experts that several ranks share: who has what, and who sends what to whom."""

from __future__ import annotations

from collections.abc import Sequence

from zero_ref.lab.config import TrainConfig
from zero_ref.plan.calls import Call
from zero_ref.plan.partition import ParamSpec
from zero_ref.simulator.dispatch import SharedExperts
from zero_ref.simulator.expert_parallel import on_a_rank
from zero_ref.simulator.layers import ParamShape, is_of_experts
from zero_ref.simulator.ledger import itemsize_of
from zero_ref.simulator.operations import Operation
from zero_ref.simulator.schedule import Schedule, ddp_buckets


def shared_experts(config: TrainConfig) -> SharedExperts | None:
    """The experts that ranks share, and the rows that travel; None if every rank has all."""
    model = config.model
    if config.expert_parallel == 1:
        return None
    rows = config.batch_size * model.context * model.active_experts
    return SharedExperts(config.expert_parallel, rows * model.width * itemsize_of(model.dtype), model.experts)


def params_of_rank(params: Sequence[ParamSpec], expert_parallel: int) -> list[ParamSpec]:
    """The parameters with as many experts as one rank has.

    >>> params_of_rank([ParamSpec(12, name="0.experts.up", shape=(4, 3))], 2)[0].shape
    (2, 3)
    """
    shapes = on_a_rank([ParamShape(param.name, param.shape) for param in params], expert_parallel)
    return [param._replace(numel=of.numel, shape=of.shape) for param, of in zip(params, shapes, strict=True)]


def buckets_of_rank(params: Sequence[ParamSpec], order: Sequence[int]) -> list[list[int]]:
    """DDP's buckets of all parameters but experts, and each experts' gradient by itself.

    They are in the order in which backward completes them, as `AveragedGradients` and DDP reduce them.

    Args:
        order: the parameters in the order in which backward completes their gradients.
    """
    dense = [number for number, param in enumerate(params) if not is_of_experts(param.name)]
    among_dense = {number: place for place, number in enumerate(dense)}
    found = ddp_buckets(
        [params[number] for number in dense],
        [among_dense[number] for number in order if number in among_dense],
    )
    buckets = [[dense[place] for place in bucket] for bucket in found]
    buckets += [[number] for number in order if number not in among_dense]
    when = {number: place for place, number in enumerate(order)}
    return sorted(buckets, key=lambda bucket: max(when[number] for number in bucket))


def calls_by_group(plan: Schedule, rank: int) -> list[Call]:
    """The calls of one rank as `Spread.recording` lists them: group by group.

    First those of the ranks that share experts, then those of all ranks, then those of the ranks that have
    the same experts. Within a group they are in the order of the plan.
    """

    def group_of(one: Operation) -> int:
        return 0 if one.op == "all_to_all" else 1 if one.stride == 1 else 2

    return [
        call
        for one in sorted((one for one in plan.operations if one.op), key=group_of)
        for call in one.calls_of(rank, plan.world_size)
    ]
