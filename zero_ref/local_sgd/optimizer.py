"""Local SGD: ranks train by themselves and average their parameters after some steps.

    averager = PeriodicModelAverager(period=4, warmup_steps=100)
    ddp.register_comm_hook(PostLocalSGDState.following(averager), post_localSGD_hook)
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1), averager)
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss_function(ddp(inputs), targets).backward()
        optimizer.step()        # also averages: do not call averager.average_parameters

`stairs/owners.py` sends new parameters in every step; here each rank updates all parameters by itself. Three
objects share one `AveragingSchedule` and one count of steps. The hook averages gradients over all ranks
during the warm-up, then within a group or not at all. The optimizer takes its local step. The averager then
averages the parameters, at the steps of the schedule. Each object also works with torch's form of the others.
"""

from __future__ import annotations

import socket
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.optim import Optimizer

from zero_ref.comm import devices
from zero_ref.comm.backend import as_collectives
from zero_ref.comm.objects import gather_texts
from zero_ref.comm.process_group import ProcessGroupCollectives
from zero_ref.local_sgd.averagers import ModelAverager, group_among
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.shard.gradients import check_no_scaler
from zero_ref.shard.groups import params_of

# ------------------------------------------------------------------------------------------------- the hook


class PostLocalSGDState:
    """The groups and the warm-up of `post_localSGD_hook`. A drop-in for torch's PostLocalSGDState.

    `PostLocalSGDState.following(averager)` takes both from the averager's schedule, and the step from its
    count. If you pass numbers instead, keep them equal to the averager's. After a restart this object counts
    from 0, so its warm-up begins anew.

    Args:
        process_group: all ranks; None is the default group.
        subgroup: this rank's group after the warm-up, if gradients are averaged then. None for the ranks of
            this machine: the hook makes the group when it first needs it, and sets it here.
        start_localSGD_iter: the number of steps of the warm-up.
        post_local_gradient_allreduce: whether gradients are averaged after the warm-up, within `subgroup`.
    Raises:
        ValueError: `start_localSGD_iter` is below 0.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        subgroup: dist.ProcessGroup | None,
        start_localSGD_iter: int,
        post_local_gradient_allreduce: bool = True,
    ) -> None:
        if start_localSGD_iter < 0:
            raise ValueError(f"start_localSGD_iter must be at least 0, got {start_localSGD_iter}.")
        self.process_group = process_group
        self.subgroup = subgroup
        self.start_localSGD_iter = start_localSGD_iter
        self.post_local_gradient_allreduce = post_local_gradient_allreduce
        self._averager: ModelAverager | None = None
        self._iter = 0

    @classmethod
    def following(cls, averager: ModelAverager) -> PostLocalSGDState:
        """The state with an averager's ranks, groups, warm-up and count of steps.

        Raises:
            TypeError: the averager is not from this package, so it has no schedule; or it does not average
                over a process group.
        """
        if not isinstance(averager, ModelAverager):
            raise TypeError(
                f"a {type(averager).__name__} has no schedule to follow. Use zero_ref's averagers, or give "
                "PostLocalSGDState the numbers that you gave this averager."
            )
        size = averager.schedule.gradient_group
        all_ranks, subgroup = averager.collectives, None
        if not isinstance(all_ranks, ProcessGroupCollectives):
            raise TypeError(
                f"DDP reduces over a process group, and this averager averages over {all_ranks!r}. "
                "Construct it with a process group."
            )
        if size > 1:
            within = averager.group_of[size]
            assert isinstance(within, ProcessGroupCollectives)
            subgroup = within.group or dist.group.WORLD
        state = cls(all_ranks.group, subgroup, averager.warmup_steps, post_local_gradient_allreduce=size > 1)
        state._averager = averager
        return state

    @property
    def iter(self) -> int:
        """The number of steps so far. The number of an averager that the state follows is read-only."""
        return self._iter if self._averager is None else self._averager.step

    @iter.setter
    def iter(self, steps: int) -> None:
        if self._averager is not None:
            raise AttributeError("this state follows an averager's count: set averager.step.")
        self._iter = steps

    def maybe_increase_iter(self, bucket: Any) -> None:
        """Count a step at the last bucket of its backward. This does not change an averager's count."""
        if bucket.is_last():
            self._iter += 1


# DDP refuses annotations other than its own classes, for which torch has no types.
def post_localSGD_hook(state, bucket):  # type: ignore[no-untyped-def]
    """A DDP communication hook: averages over all ranks in the warm-up, then over the subgroup or not at all.

    >>> ddp.register_comm_hook(PostLocalSGDState.following(averager), post_localSGD_hook)  # doctest: +SKIP

    Args:
        state: a PostLocalSGDState, this package's or torch's.
    Collective: all ranks of the group that averages, in backward.
    Cost: an all-reduce of the bucket, or nothing. If the state has no subgroup, all ranks once make a group
        for each machine: two all-gathers, of 8 bytes and of the names of the machines.
    """
    # 1. The warm-up: average over all ranks.
    if state.iter < state.start_localSGD_iter:
        state.maybe_increase_iter(bucket)
        return allreduce_hook(state.process_group, bucket)
    # 2. Later: average within the subgroup.
    if state.post_local_gradient_allreduce:
        if state.subgroup is None:
            state.subgroup = _ranks_of_this_machine(state.process_group)
        return allreduce_hook(state.subgroup, bucket)
    # 3. Or give DDP the gradients of this rank.
    unchanged = devices.future(bucket.buffer().device)
    unchanged.set_result(bucket.buffer())
    return unchanged


def _ranks_of_this_machine(process_group: dist.ProcessGroup | None) -> Any:
    """Make a group of the ranks whose machine has the same host name as this one. Collective."""
    comm = ProcessGroupCollectives(process_group)
    machines: dict[str, list[int]] = {}
    for rank, name in enumerate(gather_texts(comm, socket.gethostname())):
        machines.setdefault(name, []).append(rank)
    if len(machines) == 1:
        return process_group or dist.group.WORLD
    return group_among(comm, [*machines.values()])


# -------------------------------------------------------------------------------------------- the optimizer


class Averager(Protocol):
    """The part of an averager that PostLocalSGDOptimizer uses; torch's averagers have it, too."""

    step: int

    def average_parameters(self, params: Any) -> None:
        """Count a step, and average if that is due; called once after each step."""


class PostLocalSGDOptimizer(Optimizer, Joinable):
    """Takes a local step, then lets the averager average the parameters. A drop-in for torch's class.

    The hook of DDP reduces gradients, and the averager decides when to average. `param_groups` and `state`
    are the local optimizer's.

    >>> optimizer = PostLocalSGDOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1), averager)
    ... # doctest: +SKIP

    The local optimizers of different ranks come to have different state, such as momentum, and a checkpoint
    has the state of the rank that writes it. If you save after an average of all ranks, the saved parameters
    are equal to those of every rank.

    The optimizer must update the parameters themselves. If it keeps 32-bit copies, its next step undoes an
    average of the parameters.

    In `Join`, list DDP first. All ranks then communicate in every step, in small all-reduces that count the
    ranks with data. Fewer bytes are sent, but ranks wait for each other as often. A rank without data updates
    nothing, not even in the warm-up. It takes part in averages of parameters with its own parameters, and in
    averages of gradients with zeros. When all ranks have left, DDP gives them the parameters of a rank that
    stayed longest: the updates of other ranks since the last average of all ranks are lost.

    Args:
        optim: the local optimizer. The ranks of a ZeroRedundancyOptimizer share updates, so they must have
            the same gradients after the warm-up too: its group must be the hook's subgroup.
        averager: of this package or of torch.
    Raises:
        TypeError: an argument is something else.
        ValueError: `optim` is a ZeroRedundancyOptimizer over all ranks that the averager averages.
    Source: post-local SGD (Lin et al., arXiv:1808.07217).
    """

    def __init__(self, optim: Optimizer, averager: Averager) -> None:
        Joinable.__init__(self)
        if not isinstance(optim, Optimizer):
            raise TypeError(f"optim must be an optimizer, not {optim!r}.")
        if not callable(getattr(averager, "average_parameters", None)) or not hasattr(averager, "step"):
            raise TypeError(f"averager must be one of zero_ref or torch, not {averager!r}.")
        # Set what an Optimizer has besides state and groups, such as hooks. The constructor would make both
        # anew.
        Optimizer.__setstate__(self, {"defaults": dict(optim.defaults)})
        self.optim = optim
        self.averager = averager
        self._zero = optim if isinstance(optim, ZeroRedundancyOptimizer) else None
        self._gradients_checked = False
        if self._zero is not None:
            averaged = as_collectives(getattr(averager, "process_group", None)).world_size
            if 1 < averaged <= self._zero.world_size:
                raise ValueError(
                    "this ZeroRedundancyOptimizer sends the parameters of their owners to all "
                    f"{self._zero.world_size} ranks after every step, and the averager is to average "
                    f"{averaged} of these ranks: no rank would train by itself. Shard over a group of fewer "
                    "ranks, such as those of a machine, and average gradients within it."
                )

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The local optimizer's parameter groups."""
        return self.optim.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The local optimizer's state."""
        return self.optim.state

    def __repr__(self) -> str:
        return f"PostLocalSGDOptimizer({self.optim!r}, step {self.averager.step})"

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take the local step, then average the parameters if that is due.

        Returns:
            The result of the local optimizer's `step`.
        Raises:
            RuntimeError, ValueError: as the averager; or the ranks of a ZeroRedundancyOptimizer have
                different gradients in the first step after the warm-up, or gradients only on their owners
                in the warm-up.
        Collective: as the averager: all ranks of the group, at the same steps.
        Cost: as the averager. A ZeroRedundancyOptimizer adds the cost of its `step`, and once an all-gather
            of 32 bytes.
        """
        # 1. Ranks that share updates must have the same gradients.
        Join.notify_join_context(self)
        if self._zero is not None:
            check_no_scaler(self, self._zero.backward.gradients)
            if closure is None:  # a closure computes gradients later, in the local step
                self._check_gradients(self._zero)
        # 2. The update of this rank, or of the ranks of the ZeroRedundancyOptimizer.
        loss = self._step_local(closure)
        # 3. The averager counts the step, and averages if that is due.
        self.averager.average_parameters(self.param_groups)
        return loss

    def _step_local(self, closure: Callable[[], Any] | None) -> Any:
        """Step the local optimizer, and unscale gradients before if a gradient scaler has scaled them."""
        # With `_step_supports_amp_scaling` a torch.amp.GradScaler sets these attributes and leaves the rest
        # to us.
        found_inf, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        if found_inf:
            return None
        if scale is not None:
            if self._zero is not None:
                self._zero.backward.gradients.check_as_left(self._zero.rank, self._zero.built)
            inverse = (
                scale.double().reciprocal().float()
            )  # equal to the scaler's own unscale_, to the last bit
            for param in params_of(self.param_groups):
                if param.grad is not None:
                    param.grad.mul_(inverse.to(param.grad.device))
            if self._zero is not None:
                self._zero.backward.gradients.note_change()
        return self.optim.step(closure) if closure is not None else self.optim.step()

    # If True, torch.amp.GradScaler calls step() even if gradients are infinite. Such a rank makes no update,
    # but it must take part in the average, or the other ranks would wait for it.
    _step_supports_amp_scaling = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, as the local optimizer does."""
        self.optim.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the local optimizer. The next average includes the new parameters."""
        self.optim.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The local optimizer's state dict, and the averager's count of steps under "step".

        Consolidate a ZeroRedundancyOptimizer first: `optimizer.optim.consolidate_state_dict()`.
        """
        for before_hook in self._optimizer_state_dict_pre_hooks.values():
            before_hook(self)
        state_dict = {**self.optim.state_dict(), "step": self.averager.step}
        for after_hook in self._optimizer_state_dict_post_hooks.values():
            state_dict = after_hook(self, state_dict) or state_dict
        return state_dict

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the local optimizer's state and the averager's count of steps.

        A hook that follows the averager reads the same count. The state dict of a local optimizer has no
        count: this warns and starts at 0. As torch's optimizers do, the local one may keep and change the
        tensors of `state_dict`.

        Collective: as the local optimizer's; all ranks must load the same count.
        """
        loaded = dict(state_dict)
        for before_hook in self._optimizer_load_state_dict_pre_hooks.values():
            loaded = before_hook(self, loaded) or loaded
        step = loaded.pop("step", None)
        self.optim.load_state_dict(loaded)
        if step is None:
            # This is torch's text, which its tests, and scripts that filter the warning, match.
            warnings.warn(
                "Loaded state dict does not contain a step counter for an averager. "
                "Setting step counter to 0.",
                stacklevel=2,
            )
        self.averager.step = step or 0
        for after_hook in self._optimizer_load_state_dict_post_hooks.values():
            after_hook(self)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "a PostLocalSGDOptimizer cannot be copied or pickled: its averager communicates with those of "
            "the other ranks. Use state_dict()."
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Make the hook by which a rank without data takes part in averages, for torch's `Join`.

        Raises:
            ValueError: the local optimizer is a ZeroRedundancyOptimizer, whose updates need every rank.
        """
        if self._zero is not None:
            raise ValueError(
                "PostLocalSGDOptimizer cannot join around a ZeroRedundancyOptimizer, whose ranks must all "
                "make every update. Give all ranks equally many batches."
            )
        return _ShadowAverage(self)

    @property
    def join_device(self) -> torch.device:
        """The device on which `Join` counts the ranks that have data."""
        return params_of(self.param_groups)[0].device

    @property
    def join_process_group(self) -> Any:
        """The process group whose ranks join."""
        return getattr(self.averager, "process_group", None) or dist.group.WORLD

    def _check_gradients(self, zero: ZeroRedundancyOptimizer) -> None:
        """Refuse gradients that differ between the ranks of a ZeroRedundancyOptimizer.

        Raises:
            RuntimeError: in the warm-up, gradients are only on their owners.
            ValueError: in the first step after the warm-up, gradients differ.
        Collective: in that step, all ranks of the ZeroRedundancyOptimizer.
        """
        if self.averager.step < getattr(self.averager, "warmup_steps", 0):
            if zero.backward.gradients.on_owners:
                raise RuntimeError(
                    f"rank {zero.rank}: reduce_to_owners has averaged gradients over the {zero.world_size} "
                    "ranks of this ZeroRedundancyOptimizer, and in the warm-up all ranks are to have the "
                    "same. Use post_localSGD_hook, or an averager with warmup_steps=0."
                )
            return
        if self._gradients_checked or zero.backward.gradients.on_owners:
            return
        trained = [param for param in zero.built.params if param.requires_grad]
        # Comparing sums is enough to find ranks that were trained on different data.
        sums = [None if param.grad is None else param.grad.double().sum().item() for param in trained]
        facts = [f"gradient of parameter {number}: sum {total}" for number, total in enumerate(sums)]
        try:
            zero.accord.agree("share the update of the same gradients", facts)
        except ValueError as error:
            raise ValueError(
                f"rank {zero.rank}: after the warm-up the {zero.world_size} ranks of this "
                "ZeroRedundancyOptimizer have different gradients, so each parameter would be trained on its "
                "owner's data alone. Average gradients over these ranks: with a schedule of "
                f"gradient_group={zero.world_size}, or this group as the hook's subgroup."
            ) from error
        self._gradients_checked = True


class _ShadowAverage(JoinHook):
    """A step of a rank without data: it makes no update, and takes part in the average."""

    def __init__(self, optimizer: PostLocalSGDOptimizer) -> None:
        self.optimizer = optimizer

    def main_hook(self) -> None:
        self.optimizer.averager.average_parameters(self.optimizer.param_groups)
