"""The strategy of local SGD: ranks train by themselves, and average their parameters now and then."""

from __future__ import annotations

from collections.abc import Collection

from zero_ref.local_sgd.averaging import AveragingSchedule
from zero_ref.plan.partition import ParamSpec
from zero_ref.simulator.groups import Groups
from zero_ref.simulator.ledger import itemsize_of
from zero_ref.simulator.operations import (
    COMPUTE,
    NETWORK,
    Operation,
    forward_and_backward,
    passes_before,
    reduction_of,
)
from zero_ref.simulator.strategy import Strategy

AGREEMENT_BYTES = 32
"""Bytes that each rank passes in where ranks agree on what comes next: `zero_ref.comm.agreement`."""


class LocalSGD(Strategy):
    """Steps of ranks that train by themselves, and the averages that end some of them.

    In the warm-up gradients are reduced as by DDP, and later within the gradient group or not at all. Before
    an average the ranks agree on what they are about to do. Then all trained parameters lie end to end in one
    tensor, of a dtype that holds them all, and this tensor is all-reduced. Frozen parameters are equal on all
    ranks anyway. A group of one rank makes no calls, except for DDP's in the warm-up.

    Source: post-local SGD (Lin et al., arXiv:1808.07217), as `zero_ref.local_sgd.optimizer` does it. torch's
        own makes no agreement, and otherwise the same calls: tests/simulator/test_simulated_calls.py.
    """

    @property
    def _averaging(self) -> AveragingSchedule:
        assert self.how.averaging is not None, "the strategy of recipes with an averaging"
        return self.how.averaging

    @property
    def _steps(self) -> range:
        """The steps that are listed: those asked for, or a cycle that begins with all ranks equal."""
        return self._averaging.steady if self.steps is None else self.steps

    @property
    def iterations(self) -> int:
        return len(self._steps)

    def _list_operations(self) -> None:
        self._averaging.check_fits(self.world_size)
        steps = self._steps
        if not steps or steps.start < 0 or steps.step != 1:
            raise ValueError(f"steps follow one another and are counted from 0, as in range(8); got {steps}.")
        forward, backwards = forward_and_backward(self.params, self.buckets, self.activation_bytes)
        before = passes_before(forward, backwards, self.how.accumulation - 1)
        trained = [self.params[number] for bucket in self.buckets for number in bucket]
        update = Operation("step", COMPUTE, numel=sum(param.numel for param in trained), tensors=len(trained))
        gradient_bytes = sum(backward.takes for backward in backwards)
        averaged: tuple[int, ...] = ()  # the average that the next forward waits for
        for step in steps:
            listed = [one._replace(after=averaged) if one is forward else one for one in (*before, forward)]
            self._listed += listed
            is_local = self._averaging.is_local(step)
            ranks = self._averaging.gradient_group if is_local else self.world_size
            reducing = Groups(self.world_size, ranks)
            reduced: tuple[int, ...] = ()
            for backward in backwards:
                position = self._append(backward._replace(takes=0) if before else backward)
                if ranks > 1 or not is_local:
                    reduced = (self._append(reducing.within(reduction_of(backward, position))),)
            # The gradients are freed before the next forward; those of the last step are still there.
            gives = gradient_bytes if step != steps[-1] else 0
            averaged = self._average(step, self._append(update._replace(after=reduced, gives=gives)))

    def _average(self, step: int, position: int) -> tuple[int, ...]:
        """List the average after a step, which is at `position`; return where it ends, or nothing."""
        level = self._averaging.level(step)
        group = Groups(self.world_size, 1 if level is None else level.group_size or self.world_size)
        if group.ranks == 1:
            return ()
        nbytes = AGREEMENT_BYTES * group.ranks
        agree = Operation("agree", NETWORK, op="all_gather", nbytes=nbytes, passed=AGREEMENT_BYTES)
        averages = [
            Operation("average", NETWORK, op="all_reduce", nbytes=nbytes) for nbytes in self._averaged_bytes()
        ]
        for call in [agree, *averages]:
            position = self._append(group.within(call._replace(after=(position,))))
        return (position,)

    def _averaged_bytes(self) -> list[int]:
        """Bytes of the tensors that hold all trained parameters, one tensor for each device."""
        on_device: dict[str, list[ParamSpec]] = {}
        for param in self.params:
            if param.trainable:
                on_device.setdefault(param.device, []).append(param)
        return [
            sum(param.numel for param in there)
            * (self.how.averaged_itemsize or _promoted_itemsize({param.dtype for param in there}))
            for there in on_device.values()
        ]


def _promoted_itemsize(dtypes: Collection[str]) -> int:
    """Bytes an element of the dtype that torch promotes all of these to."""
    widest = max(map(itemsize_of, dtypes), default=0)
    return 4 if widest == 2 and len(dtypes) > 1 else widest  # float16 and bfloat16 promote to float32
