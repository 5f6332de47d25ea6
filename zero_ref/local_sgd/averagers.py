"""Averagers: after the steps that a schedule names, they give ranks the mean of their parameters.

In `stairs/owners.py` ranks have the same parameters after every step. Here each rank updates all parameters
by itself. `AveragingSchedule` says after which steps and over which ranks to average; `ModelAverager` counts
the steps and averages. The other two classes have torch's names and arguments.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from zero_ref.comm.agreement import Agreement
from zero_ref.comm.backend import as_collectives
from zero_ref.comm.collectives import Collectives
from zero_ref.comm.process_group import ProcessGroupCollectives, global_ranks
from zero_ref.local_sgd.averaging import AveragingSchedule


class ModelAverager:
    """Averages the parameters of all ranks, or of groups of them, at the steps that a schedule names.

    >>> averager = ModelAverager(AveragingSchedule.periodic(4, gradient_group=8))         # doctest: +SKIP
    >>> averager.average_parameters(model.parameters())     # after each step             # doctest: +SKIP

    Args:
        schedule: at which steps, and over which ranks.
        process_group: the ranks that train together; None is the default group. `Collectives` work too, if
            the schedule has no smaller groups.
        timeout: the time-out of calls in the smaller groups, which are made here; None for torch's default,
            which may differ from the time-out of `process_group`.

    Attributes:
        step: the number of steps so far; the hook reads it too.
        collectives: the calls to all ranks; append to its `observers` to see every call.
        group_of: the calls within groups, by group size; None is all ranks.

    Raises:
        ValueError: the schedule does not fit the number of ranks, or ranks pass different schedules. All
            ranks raise.

    Collective: all ranks of the group construct it together.
    Cost: one all-gather of 32 bytes, and a new group for each size that the schedule names.
    """

    def __init__(
        self,
        schedule: AveragingSchedule,
        process_group: dist.ProcessGroup | Collectives | None = None,
        *,
        timeout: timedelta | None = None,
    ) -> None:
        self.schedule = schedule
        self.step = 0
        self.collectives = as_collectives(process_group)
        self.process_group = dist.group.WORLD if process_group is None else process_group
        world_size = self.collectives.world_size
        # A level of the schedule may name all ranks by their number, or by None.
        self.group_of: dict[int | None, Collectives] = {None: self.collectives, world_size: self.collectives}
        smaller = [size for size in schedule.group_sizes if size < world_size]
        with Agreement(self.collectives).preparing("construct the averager") as facts:
            facts.append(repr(schedule))
            schedule.check_fits(world_size)
            if smaller and not isinstance(self.collectives, ProcessGroupCollectives):
                raise TypeError(
                    f"groups of {smaller[0]} ranks are made of a process group, not of {process_group!r}. "
                    "Average over all ranks, or pass a process group."
                )
        # Groups of consecutive ranks: 0 to size-1, size to 2*size-1, and so on.
        for size in smaller:
            assert isinstance(self.collectives, ProcessGroupCollectives)
            parts = [range(first, first + size) for first in range(0, world_size, size)]
            self.group_of[size] = as_collectives(group_among(self.collectives, parts, timeout))

    @property
    def period(self) -> int:
        """The largest number of steps from one average of all ranks to the next."""
        return self.schedule.levels[-1].period

    @property
    def warmup_steps(self) -> int:
        """The number of steps at the beginning that average gradients over all ranks, and no parameters."""
        return self.schedule.warmup_steps

    def average_parameters(self, params: Iterable[Any]) -> None:
        """Count a step. If an average is due, give every rank of the group the mean of their parameters.

        Frozen parameters have not changed and are not averaged. Buffers are not averaged either: DDP
        broadcasts rank 0's in every forward, unless it has `forward_sync_buffers=False` (in older torch
        `broadcast_buffers=False`).

        Args:
            params: the model's parameters, in an order that all ranks share, or the groups of an optimizer.
                They must be the tensors that the optimizer updates: if it keeps 32-bit copies, pass the
                copies, or its next step undoes the average.
        Raises:
            TypeError: `params` holds something else. If one rank raises, all raise.
            ValueError: ranks average different parameters. All raise.
            RuntimeError: ranks meet after different numbers of steps (each rank names its own number), or
                another rank stopped or did not call.
        Collective: all ranks of a group at the steps of the schedule; none at other steps.
        Cost: for each device, one all-reduce of the parameters there, in the dtype to which they promote, and
            memory for a copy of them. One all-gather of 32 bytes.
        """
        level = self.schedule.level(self.step)
        if level is not None and level.group_size != 1:
            _average(self.group_of[level.group_size], params, self.step)
        self.step += 1


class PeriodicModelAverager(ModelAverager):
    """Averages over all ranks every `period` steps. A drop-in for torch's class of that name.

    >>> PeriodicModelAverager(period=4, warmup_steps=100)                                 # doctest: +SKIP

    Args:
        period: steps from one average to the next, H. With 1, as many bytes are sent as by DDP, which sends
            them during backward.
        warmup_steps: the number of steps at the beginning that average gradients.
        process_group, timeout: as ModelAverager.
        gradient_group: as AveragingSchedule.
    Raises, Collective, Cost: as ModelAverager.
    """

    def __init__(
        self,
        period: int,
        warmup_steps: int = 0,
        process_group: dist.ProcessGroup | Collectives | None = None,
        *,
        gradient_group: int = 1,
        timeout: timedelta | None = None,
    ) -> None:
        schedule = _make_schedule(
            process_group, AveragingSchedule.periodic, period, warmup_steps, gradient_group
        )
        super().__init__(schedule, process_group, timeout=timeout)


class HierarchicalModelAverager(ModelAverager):
    """Averages within groups of several sizes, large groups less often. A drop-in for torch's class.

    >>> HierarchicalModelAverager({4: 8, 16: 64}, warmup_steps=100)                       # doctest: +SKIP

    Args:
        period_group_size_dict: {period: ranks in a group}, from small groups, averaged often, to all ranks.
            Periods are counted from step 0, not from the end of the warm-up. If several are due, the last one
            in the dict is taken.
        warmup_steps, process_group, timeout: as PeriodicModelAverager.
        gradient_group: as AveragingSchedule.
    Raises, Collective, Cost: as ModelAverager.
    """

    def __init__(
        self,
        period_group_size_dict: Mapping[int, int] | None = None,
        warmup_steps: int = 0,
        process_group: dist.ProcessGroup | None = None,
        *,
        gradient_group: int = 1,
        timeout: timedelta | None = None,
    ) -> None:
        rule, periods = AveragingSchedule.hierarchical, period_group_size_dict or {}
        schedule = _make_schedule(process_group, rule, periods, warmup_steps, gradient_group)
        super().__init__(schedule, process_group, timeout=timeout)

    @property
    def period_process_group_dict(self) -> dict[int, Any]:
        """The process group of each period, as in torch's averager."""
        groups = {level.period: self.group_of[level.group_size] for level in self.schedule.levels}
        return {period: getattr(comm, "group", None) or self.process_group for period, comm in groups.items()}


def _make_schedule(
    process_group: dist.ProcessGroup | Collectives | None,
    rule: Callable[..., AveragingSchedule],
    periods: int | Mapping[int, int],
    warmup_steps: int,
    gradient_group: int,
) -> AveragingSchedule:
    """Make the schedule, and warn of useless periods; if one rank's arguments are wrong, all ranks raise."""
    try:
        schedule = rule(periods, warmup_steps=warmup_steps, gradient_group=gradient_group)
    except (TypeError, ValueError) as error:
        # The other ranks wait in the agreement of ModelAverager's constructor. This one is its counterpart.
        Agreement(as_collectives(process_group)).agree("construct the averager", error)
        raise
    if schedule.levels[-1].period == 1:
        warnings.warn(
            "with a period of 1 all parameters are averaged after every step: as much is sent as by "
            "DistributedDataParallel, which sends during backward. Use that alone, or a longer period.",
            stacklevel=3,
        )
    for level in schedule.never_taken:
        warnings.warn(
            f"{level} is never taken: at each of its steps one that comes later in the dict is due too. List "
            "periods from short ones of small groups to long ones of wide groups.",
            stacklevel=3,
        )
    return schedule


def group_among(
    world: ProcessGroupCollectives, parts: Sequence[Sequence[int]], timeout: timedelta | None = None
) -> Any:
    """Make a process group of each part of the ranks of `world`; return the group with this rank.

    Collective: all ranks of `world`.
    """
    members = global_ranks(world)
    of_each = [[members[rank] for rank in part] for part in parts]
    if len(members) == dist.get_world_size():
        return dist.new_subgroups_by_enumeration(of_each, timeout=timeout)[0]
    # torch's function needs all processes, but those outside of `world` do not call this. So only the members
    # of a group make it.
    mine = next(ranks for ranks in of_each if dist.get_rank() in ranks)
    return dist.new_group(mine, timeout=timeout, use_local_synchronization=True)


def _trainable(params: Iterable[Any]) -> list[torch.Tensor]:
    """List the trained parameters in `params`, which may hold parameters or parameter groups."""
    listed = [p for entry in params for p in (entry["params"] if isinstance(entry, dict) else [entry])]
    for param in listed:
        if not isinstance(param, torch.Tensor):
            raise TypeError(
                "an averager takes parameters, as of model.parameters(), or the param_groups of an "
                f"optimizer, and was given a {type(param).__name__}."
            )
    return [param for param in listed if param.requires_grad]


@torch.no_grad()
def _average(comm: Collectives, params: Iterable[Any], step: int) -> None:
    """Overwrite the trained parameters with their mean over the ranks of `comm`."""
    if comm.world_size == 1:
        return
    # 1. Agree: an all-reduce of different tensors would hang or mix them.
    with Agreement(comm).preparing(f"average the parameters after its step {step}") as facts:
        trainable = _trainable(params)
        facts += [f"parameter {number}: {tuple(p.shape)} {p.dtype}" for number, p in enumerate(trainable)]
    # 2. Average the parameters of each device as one flat tensor: one call, however many parameters.
    for device in dict.fromkeys(param.device for param in trainable):
        here = [param for param in trainable if param.device == device]
        flat = torch.cat([param.reshape(-1) for param in here])
        # Divide before the sum, which could overflow in 16 bits.
        flat /= comm.world_size
        comm.all_reduce(flat).wait()
        for param, mean in zip(here, flat.split([param.numel() for param in here]), strict=True):
            param.copy_(mean.view_as(param))  # in place: the parameter may be a view of a flat bucket
