"""Local SGD: ranks train by themselves and average their parameters once in a while.

    averager = PeriodicModelAverager(period=4, warmup_steps=100)
    ddp.register_comm_hook(PostLocalSGDState.following(averager), post_localSGD_hook)
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1), averager)
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss_function(ddp(inputs), targets).backward()
        optimizer.step()        # averages too: do not call averager.average_parameters besides

`minimal.py` sends new parameters in every step; here each rank updates all parameters by itself. Three parts
share one `AveragingSchedule` and one count of steps. The hook averages gradients over all ranks during the
warm-up, then within a group or not at all. The optimizer takes its local step. The averager then averages the
parameters, at the steps of the schedule. Each part also works with torch's other parts.
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
from zero_ref.comm.agreement import agree
from zero_ref.comm.backend import as_collectives
from zero_ref.comm.objects import gather_texts
from zero_ref.comm.process_group import ProcessGroupCollectives
from zero_ref.local_sgd.averagers import ModelAverager, group_among
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.shard.gradients import check_no_scaler
from zero_ref.shard.groups import params_of

# ------------------------------------------------------------------------------------------------- the hook


class PostLocalSGDState:
    """Over which ranks `post_localSGD_hook` averages gradients, and until when. As torch's PostLocalSGDState.

    `PostLocalSGDState.following(averager)` takes both from the averager's schedule and the step from its
    count. If you pass numbers instead, keep them equal to the averager's, also after a restart: this count,
    and with it the warm-up, then begins at 0.

    Args:
        process_group: all ranks; None is the default group.
        subgroup: this rank's group after the warm-up, if gradients are averaged then. None for the ranks of
            this machine; the hook makes the group when it is first needed, and sets it here.
        start_localSGD_iter: steps of the warm-up.
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
            TypeError: the averager is not one of this package's, the only ones with a schedule, or does not
                average over a process group.
        """
        if not isinstance(averager, ModelAverager):
            raise TypeError(
                f"a {type(averager).__name__} has no schedule to follow. Use zero_ref's averagers, or give "
                "PostLocalSGDState the numbers that you gave this one."
            )
        size = averager.schedule.gradient_group
        everybody, subgroup = averager.collectives, None
        if not isinstance(everybody, ProcessGroupCollectives):
            raise TypeError(f"DDP reduces over a process group, and this averager is of {everybody!r}.")
        if size > 1:
            within = averager.group_of[size]
            assert isinstance(within, ProcessGroupCollectives)
            subgroup = within.group or dist.group.WORLD
        state = cls(everybody.group, subgroup, averager.warmup_steps, post_local_gradient_allreduce=size > 1)
        state._averager = averager
        return state

    @property
    def iter(self) -> int:
        """Steps so far. If the state follows an averager, its steps, which cannot be set here."""
        return self._iter if self._averager is None else self._averager.step

    @iter.setter
    def iter(self, steps: int) -> None:
        if self._averager is not None:
            raise AttributeError("this state follows an averager's count: set averager.step.")
        self._iter = steps

    def maybe_increase_iter(self, bucket: Any) -> None:
        """Count a step at the last bucket of its backward. The count of an averager does not change."""
        if bucket.is_last():
            self._iter += 1


# DDP refuses annotations other than its own classes, and typing knows no name for those.
def post_localSGD_hook(state, bucket):  # type: ignore[no-untyped-def]
    """A DDP communication hook: averages over all ranks in the warm-up, then over the subgroup or not at all.

    >>> ddp.register_comm_hook(PostLocalSGDState.following(averager), post_localSGD_hook)  # doctest: +SKIP

    Args:
        state: a PostLocalSGDState, this package's or torch's.
    Collective: all ranks of the group that averages, in backward.
    Cost: an all-reduce of the bucket, or nothing. If the state has no subgroup, all ranks make the groups of
        machines once: two all-gathers, of 8 bytes and of the names of the machines.
    """
    if state.iter < state.start_localSGD_iter:
        state.maybe_increase_iter(bucket)
        return allreduce_hook(state.process_group, bucket)
    if state.post_local_gradient_allreduce:
        if state.subgroup is None:
            state.subgroup = _ranks_of_this_machine(state.process_group)
        return allreduce_hook(state.subgroup, bucket)
    unchanged = devices.future(bucket.buffer().device)
    unchanged.set_result(bucket.buffer())
    return unchanged


def _ranks_of_this_machine(process_group: dist.ProcessGroup | None) -> Any:
    """The ranks of the group that are on this machine, as its name in the network tells. Collective."""
    comm = ProcessGroupCollectives(process_group)
    machines: dict[str, list[int]] = {}
    for rank, name in enumerate(gather_texts(comm, socket.gethostname())):
        machines.setdefault(name, []).append(rank)
    if len(machines) == 1:
        return process_group or dist.group.WORLD
    return group_among(comm, [*machines.values()])


# -------------------------------------------------------------------------------------------- the optimizer


class Averager(Protocol):
    """What PostLocalSGDOptimizer uses of an averager. torch's averagers have it too."""

    step: int

    def average_parameters(self, params: Any) -> None:
        """Called once after each step."""


class PostLocalSGDOptimizer(Optimizer, Joinable):
    """Takes a local step, then lets the averager average the parameters. A drop-in for torch's class.

    The hook of DDP reduces gradients, and the averager decides when to average. Groups and state are the
    local optimizer's own.

    >>> optimizer = PostLocalSGDOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1), averager)
    ... # doctest: +SKIP

    The local optimizers of different ranks come to hold different state, such as momentum, and a checkpoint
    has the state of the rank that writes it. If you save after an average of all ranks, its parameters are
    those of all ranks.

    The optimizer must update the parameters themselves. If it keeps 32-bit copies of its own, its next step
    undoes an average of the parameters.

    In `Join`, list DDP first. All ranks then meet in every step, in small all-reduces that count the ranks
    with data: bytes are saved, waits are not. A rank without data updates nothing, not even in the warm-up.
    It takes part in averages of parameters with those it has, and in averages of gradients with zeros. When
    all ranks have left, DDP gives them the parameters of one that stayed longest: what other ranks have
    learned since the last average of all ranks is lost.

    Args:
        optim: the local optimizer. The ranks of a ZeroRedundancyOptimizer share updates, so they must have
            the same gradients after the warm-up too: its group must be the hook's subgroup.
        averager: of this package or of torch.
    Raises:
        TypeError: either is something else.
        ValueError: the averager averages no other ranks than those of a ZeroRedundancyOptimizer.
    Source: post-local SGD (Lin et al., arXiv:1808.07217).
    """

    def __init__(self, optim: Optimizer, averager: Averager) -> None:
        Joinable.__init__(self)
        if not isinstance(optim, Optimizer):
            raise TypeError(f"optim must be an optimizer, not {optim!r}.")
        if not callable(getattr(averager, "average_parameters", None)) or not hasattr(averager, "step"):
            raise TypeError(f"averager must be one of zero_ref or torch, not {averager!r}.")
        # What an Optimizer has besides state and groups, which stay the local optimizer's.
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
                    f"{self._zero.world_size} ranks after every step, and the averager is to average these "
                    f"{averaged}: none would train by itself. Shard over a group of fewer ranks, such as "
                    "those of a machine, and average gradients within it."
                )

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Those of the local optimizer."""
        return self.optim.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """That of the local optimizer."""
        return self.optim.state

    def __repr__(self) -> str:
        return f"PostLocalSGDOptimizer({self.optim!r}, step {self.averager.step})"

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take the local step, then average the parameters if that is due.

        Returns:
            What the local optimizer's `step` returns.
        Raises:
            RuntimeError, ValueError: as the averager; or the ranks of a ZeroRedundancyOptimizer have
                different gradients in the first step after the warm-up, or gradients only on their owners
                before it.
        Collective: as the averager: all ranks of the group, at the same steps.
        Cost: as the averager. A ZeroRedundancyOptimizer adds that of its `step`, and once 32 bytes.
        """
        Join.notify_join_context(self)
        if self._zero is not None:
            check_no_scaler(self, self._zero.backward.gradients)
            if closure is None:  # a closure would compute them later
                self._check_gradients(self._zero)
        loss = self._step_local(closure)
        self.averager.average_parameters(self.param_groups)
        return loss

    def _step_local(self, closure: Callable[[], Any] | None) -> Any:
        # With `_step_supports_amp_scaling` a torch.amp.GradScaler sets these.
        found_inf, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        if found_inf:
            return None
        if scale is not None:
            if self._zero is not None:
                self._zero.backward.gradients.check_as_left(self._zero.rank, self._zero.built)
            inverse = scale.double().reciprocal().float()  # as the scaler's own unscale_, to the last bit
            for param in params_of(self.param_groups):
                if param.grad is not None:
                    param.grad.mul_(inverse.to(param.grad.device))
            if self._zero is not None:
                self._zero.backward.gradients.note_change()
        return self.optim.step(closure) if closure is not None else self.optim.step()

    # True makes a torch.amp.GradScaler call step() even if gradients are infinite: a rank that leaves out its
    # update must still take part in the average, or the other ranks would wait for it.
    _step_supports_amp_scaling = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the local optimizer."""
        self.optim.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the local optimizer. The next average includes the new parameters."""
        self.optim.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """That of the local optimizer, and the averager's count of steps under "step".

        Consolidate a ZeroRedundancyOptimizer first: `optimizer.optim.consolidate_state_dict()`.
        """
        for before_hook in self._optimizer_state_dict_pre_hooks.values():
            before_hook(self)
        state_dict = {**self.optim.state_dict(), "step": self.averager.step}
        for after_hook in self._optimizer_state_dict_post_hooks.values():
            state_dict = after_hook(self, state_dict) or state_dict
        return state_dict

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the local optimizer's state and the averager's count, which a hook that follows it reads too.

        Without a count, as in the state of a local optimizer, it warns and starts at 0. As with torch's
        optimizers, the local one may keep and change the tensors of `state_dict`.

        Collective: as the local optimizer's; all ranks must load the same count.
        """
        loaded = dict(state_dict)
        for before_hook in self._optimizer_load_state_dict_pre_hooks.values():
            loaded = before_hook(self, loaded) or loaded
        step = loaded.pop("step", None)
        self.optim.load_state_dict(loaded)
        if step is None:
            # torch's words: its tests, and scripts that filter the warning, match them.
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
            "a PostLocalSGDOptimizer cannot be copied or pickled: its averager is tied to those of the other "
            "ranks. Use state_dict()."
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """For torch.distributed.algorithms.join.Join: a rank without data still takes part in averages.

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
        """Where Join counts the ranks that have data."""
        return params_of(self.param_groups)[0].device

    @property
    def join_process_group(self) -> Any:
        """The group whose ranks join."""
        return getattr(self.averager, "process_group", None) or dist.group.WORLD

    def _check_gradients(self, zero: ZeroRedundancyOptimizer) -> None:
        """Refuse gradients that differ on ranks that share updates; compared once, after the warm-up."""
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
        sums = [None if param.grad is None else param.grad.double().sum().item() for param in trained]
        facts = [f"gradient of parameter {number}: sum {total}" for number, total in enumerate(sums)]
        try:
            agree(zero.collectives, "share the update of the same gradients", facts)
        except ValueError as error:
            raise ValueError(
                f"rank {zero.rank}: after the warm-up the {zero.world_size} ranks of this "
                "ZeroRedundancyOptimizer have different gradients, so each parameter would be trained on its "
                "owner's data alone. Average gradients over these ranks: with a schedule of "
                f"gradient_group={zero.world_size}, or this group as the hook's subgroup."
            ) from error
        self._gradients_checked = True


class _ShadowAverage(JoinHook):
    def __init__(self, optimizer: PostLocalSGDOptimizer) -> None:
        self.optimizer = optimizer

    def main_hook(self) -> None:
        self.optimizer.averager.average_parameters(self.optimizer.param_groups)
