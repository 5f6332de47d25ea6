"""The operations of local SGD: ranks train by themselves, and average their parameters now and then."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from zero_ref.local_sgd.averaging import AveragingSchedule
from zero_ref.plan.partition import ParamSpec
from zero_ref.simulator.ledger import itemsize_of
from zero_ref.simulator.operations import (
    COMPUTE,
    NETWORK,
    Operation,
    forward_and_backward,
    passes_before,
    reduction_of,
)

AGREEMENT_BYTES = 32
"""Bytes that each rank passes in where ranks agree on what comes next: `zero_ref.comm.agreement.agree`."""


def local_sgd(
    params: Sequence[ParamSpec],
    buckets: Sequence[Sequence[int]],
    averaging: AveragingSchedule,
    world_size: int,
    steps: range | None = None,
    *,
    averaged_itemsize: int | None = None,
    activation_bytes: int = 0,
    accumulation: int = 1,
) -> tuple[Operation, ...]:
    """Steps of ranks that train by themselves, and the averages that end some of them.

    In the warm-up gradients are reduced as by DDP, and later within the gradient group or not at all. Before
    an average the ranks agree on what they are about to do. Then all trained parameters lie end to end in one
    tensor, of a dtype that holds them all, and this tensor is all-reduced. Frozen parameters are equal on all
    ranks anyway. A group of one rank makes no calls, except for DDP's in the warm-up.

    >>> averaging = AveragingSchedule.periodic(2, warmup_steps=1)
    >>> def labels(steps=None):
    ...     return " ".join(one.label for one in local_sgd([ParamSpec(4)], [[0]], averaging, 2, steps))
    >>> labels()
    'forward backward step forward backward step agree average'
    >>> labels(range(2))
    'forward backward reduce step forward backward step agree average'

    Args:
        buckets: as `data_parallel`; backward is listed bucket by bucket.
        averaging: which steps reduce gradients, which average, and over whom.
        steps: that are listed, from 0; None for `averaging.steady`, a cycle that begins with all ranks equal.
        averaged_itemsize: bytes of an element as it is averaged: 4 where the optimizer keeps 32-bit copies of
            16-bit parameters, because its next step would overwrite an average of the parameters; None for
            the parameters' own.
        accumulation: backwards in a step, of which the last one reduces, if any does.
    Raises:
        ValueError: the averaging does not fit so many ranks, or steps are none, negative, or leave some out.
    Source: post-local SGD (Lin et al., arXiv:1808.07217), as `zero_ref.local_sgd.optimizer` does it. torch's
        own makes no agreement, and otherwise the same calls: tests/simulator/test_simulated_calls.py.
    """
    averaging.check_fits(world_size)
    steps = averaging.steady if steps is None else steps
    if not steps or steps.start < 0 or steps.step != 1:
        raise ValueError(f"steps follow one another and are counted from 0, as in range(8); got {steps}.")
    forward, backwards = forward_and_backward(params, buckets, activation_bytes)
    gradient_bytes = sum(backward.takes for backward in backwards)
    trained = [params[number] for bucket in buckets for number in bucket]
    update = Operation("step", COMPUTE, numel=sum(param.numel for param in trained), tensors=len(trained))
    averaged_bytes = _end_to_end((param for param in params if param.trainable), averaged_itemsize)
    listed: list[Operation] = []
    averaged: tuple[int, ...] = ()  # the average that the next forward waits for
    for step in steps:
        local = averaging.is_local(step)
        reducing = averaging.gradient_group if local else world_size
        before = passes_before(forward, backwards, accumulation - 1)
        listed += [one._replace(after=averaged) if one is forward else one for one in [*before, forward]]
        reduced: tuple[int, ...] = ()
        for backward in backwards:
            listed.append(backward._replace(takes=0) if before else backward)
            if reducing > 1 or not local:
                ranks = None if reducing == world_size else reducing
                listed.append(reduction_of(backward, len(listed) - 1, ranks))
                reduced = (len(listed) - 1,)
        # The gradients are freed before the next forward; those of the last step are still there.
        listed.append(update._replace(after=reduced, gives=gradient_bytes if step != steps[-1] else 0))
        level = averaging.level(step)
        group_size = 1 if level is None else level.group_size or world_size
        averaged = ()
        if group_size > 1:
            listed += _average(averaged_bytes, group_size, world_size, len(listed) - 1)
            averaged = (len(listed) - 1,)
    return tuple(listed)


def _average(sizes: Sequence[int], group_size: int, world_size: int, position: int) -> list[Operation]:
    """The agreement and the all-reduces of an average, after the operation at `position`."""
    ranks = None if group_size == world_size else group_size
    agree = Operation("agree", NETWORK, op="all_gather", nbytes=AGREEMENT_BYTES * group_size)
    average = Operation("average", NETWORK, op="all_reduce")
    calls = [agree._replace(passed=AGREEMENT_BYTES), *(average._replace(nbytes=nbytes) for nbytes in sizes)]
    return [call._replace(after=(position + place,), ranks=ranks) for place, call in enumerate(calls)]


def _end_to_end(params: Iterable[ParamSpec], itemsize: int | None) -> list[int]:
    """Bytes of the tensors that hold all parameters, one tensor for each device."""
    on_device: dict[str, list[ParamSpec]] = {}
    for param in params:
        on_device.setdefault(param.device, []).append(param)
    return [
        sum(param.numel for param in there)
        * (itemsize or _promoted_itemsize({param.dtype for param in there}))
        for there in on_device.values()
    ]


def _promoted_itemsize(dtypes: Collection[str]) -> int:
    """Bytes an element of the dtype that torch promotes all of these to."""
    widest = max(map(itemsize_of, dtypes), default=0)
    return 4 if widest == 2 and len(dtypes) > 1 else widest  # float16 and bfloat16 promote to float32
