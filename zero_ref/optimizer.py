"""ZeroRedundancyOptimizer: every rank updates its own shard of the parameters, then all share the results.

Under data parallelism every rank holds all parameters and, after the gradients are reduced, the same
gradients. An ordinary optimizer then does the same update N times and keeps its state N times. Here each
element has one owner, which alone keeps its optimizer state and updates it; a broadcast brings the new
values to the others. State per rank falls to 1/N, and what travels is the parameters, once.

Read `step` first. The rest builds what it uses: the partition (`partition.py`), the messages
(`layout.py`, `buckets.py`), the local optimizer on the owned slices.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.optim import Optimizer

from zero_ref import checkpoint, join
from zero_ref.buckets import (
    Message,
    broadcast_messages,
    check_can_be_flattened,
    expect_broadcasts,
    flatten_parameters,
    messages_by_parameter,
)
from zero_ref.collectives import Collectives, Work, agree, agreement, as_collectives
from zero_ref.hooks import InBackward
from zero_ref.layout import lay_out
from zero_ref.merged import MergedSlices
from zero_ref.partition import ParamSpec, Partition, Strategy, plan_partition
from zero_ref.repartition import Handover
from zero_ref.shards import (
    LentGradients,
    check_can_be_sharded,
    copy_options,
    facts_of,
    is_elementwise,
    local_groups,
    options_of,
    own_slices,
    params_of,
    specs_of,
)

logger = logging.getLogger(__name__)


class ZeroRedundancyOptimizer(Optimizer, Joinable):
    """Shards an optimizer over the ranks of a process group. A drop-in for torch's class of that name.

    It shares the updates, not the gradients: they must be averaged over the ranks before `step`, as
    DistributedDataParallel does in its backward. Without that each owner would train on its own data alone.

    >>> optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=1e-3)  # doctest: +SKIP

    Args:
        params: an iterable of parameters, of dicts (parameter groups) or of `named_parameters()`.
        optimizer_class: the optimizer to shard: any that updates each parameter by itself.
        process_group: the ranks to shard over; None is the default group. A `Collectives` works too.
        parameters_as_bucket_view: make the parameters views of flat tensors, so that a step sends one
            message for each owner, not one for each parameter, and steps small neighbours as one tensor.
        overlap_with_ddp: the update is made during backward, by `hook_with_zero_step` or
            `hook_with_zero_step_interleaved` on the DistributedDataParallel model; see `overlap.py`. Without
            a hook, and where backward did not reduce, `step` makes it as ever.
        partition: who owns what: "sorted_greedy" (torch's rule, the default), "registration_greedy"
            (FairScale's), "even" (1/N, to within 64 elements; for elementwise optimizers), a function, lists
            of parameter numbers for each rank, or a Partition.
        broadcast_dtype: send new parameters in this dtype, such as torch.bfloat16, to halve what travels. The
            owner keeps its values in full; the others get rounded ones, so ranks no longer hold the same.
        **defaults: passed to `optimizer_class`.

    Attributes:
        optim: the local optimizer, on this rank's slices.
        partition: who owns what.
        collectives: the way to the other ranks; append to its `observers` to see every call.
        process_group, rank, world_size, global_rank: as torch's. `rank` counts within the group.

    Raises:
        TypeError, ValueError: as torch's optimizers on wrong `params` or options, and where the partition
            cannot work for this optimizer. If one rank raises, or ranks pass different things, all raise.

    Collective: all ranks of the group construct it together.
    Cost: one all-gather of 32 bytes.
    Source: ZeRO stage 1, "P_os" (arXiv:1910.02054, section 5.1).
    """

    _opt_called: bool  # learning-rate schedulers set and read it

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[Optimizer],
        process_group: dist.ProcessGroup | Collectives | None = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        *,
        partition: Strategy = "sorted_greedy",
        broadcast_dtype: torch.dtype | None = None,
        **defaults: Any,
    ) -> None:
        Joinable.__init__(self)
        self.collectives = as_collectives(process_group)
        self.process_group = dist.group.WORLD if process_group is None else process_group
        self.rank = self.collectives.rank
        self.world_size = self.collectives.world_size
        self.global_rank = dist.get_rank() if dist.is_initialized() else self.rank
        self.parameters_as_bucket_view = parameters_as_bucket_view
        self.overlap_with_ddp = overlap_with_ddp
        self.broadcast_dtype = broadcast_dtype
        self._backward = InBackward()
        self._strategy = partition
        self._consolidated: checkpoint.State | None = None
        self._messages: list[Message] = []

        # Whatever can go wrong by itself goes wrong before the first message, and then on all ranks alike.
        with agreement(self.collectives, "construct the optimizer") as facts:
            Optimizer.__init__(self, params, defaults)
            specs = self._specs()
            self.partition = plan_partition(partition, specs, self.world_size)
            check_can_be_sharded(optimizer_class, self.partition, self._params, specs)
            if parameters_as_bucket_view:
                check_can_be_flattened(self._params)
            self._owned = own_slices(self.partition.slices_of_rank[self.rank], self._params)
            self.optim: Optimizer = optimizer_class(local_groups(self.param_groups, self._owned), **defaults)
            self._merged = MergedSlices(self.optim, [], [])
            self.defaults = self.optim.defaults
            copy_options(self.optim.param_groups, self.param_groups)
            facts += self._facts(specs, self.partition)
        self._build(specs)

    # ------------------------------------------------------------------------------------------- the step

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Update this rank's shard, then bring every shard to every rank.

        Returns with the same new parameters on all ranks.

        Args:
            closure: re-evaluates the model and returns the loss; called as the local optimizer calls it.
            **kwargs: passed to the local optimizer's `step`.
        Returns:
            What the local optimizer's `step` returns: the closure's loss, or None.
        Raises:
            RuntimeError: another rank stopped, or makes other calls; says what this one waited for.
        Collective: all ranks of the group, once each iteration, after their gradients were reduced.
        Cost: each rank receives (N-1)/N of the trainable parameters, and sends its own 1/N to the others. The
            first step after a change of `requires_grad` also makes one all-gather of 32 bytes. Nothing where
            backward has made the update already (`overlap_with_ddp`).
        """
        Join.notify_join_context(self)
        self._backward.check_no_scaler(self)
        if closure is not None and (self.overlap_with_ddp or self._join_config.enable):
            # Its backward makes the update, or ranks without data shadow it.
            closure = _evaluated(closure)
        if self._backward.take_update(kwargs):
            return closure and closure()
        if self._join_config.enable:
            join.lend_to_joined(self, active=True)
        self._begin_update()
        return self._make_update(closure, **kwargs)

    def _begin_update(self) -> None:
        """Take over what has changed since the last update: parameters, options."""
        self._consolidated = None
        self._rebuild_if_changed()
        copy_options(self.param_groups, self.optim.param_groups)

    def _make_update(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """The update itself: each rank steps its shard, then all send what they own."""
        with self._expecting(closure) as expected:
            loss = self._step_local(closure, **kwargs)
        broadcast_messages(self.collectives, self._messages, self.broadcast_dtype, expected)
        self._end_update()
        return loss

    @contextlib.contextmanager
    def _expecting(self, closure: Callable[[], Any] | None) -> Iterator[list[Work | None]]:
        """What others send may arrive. It does so after an error, too, or the next step would get it."""
        # What is to be rounded has another place to arrive in, and a closure runs the model as it is.
        early = closure is None and self.broadcast_dtype is None
        expected = expect_broadcasts(self.collectives, self._messages) if early else []
        try:
            yield expected
        except Exception:
            if any(expected):
                with contextlib.suppress(RuntimeError):
                    broadcast_messages(self.collectives, self._messages, expected=expected)
            raise

    def _step_local(
        self,
        closure: Callable[[], Any] | None = None,
        gradients: Mapping[int, torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> Any:
        if closure is None:
            self._gradients.lend(gradients)
        else:
            kwargs["closure"] = self._gradients.lent_after(closure)
        try:
            return self.optim.step(**kwargs)
        finally:
            self._gradients.take_back()

    def _end_update(self) -> None:
        """Tell autograd and the user's groups."""
        # The network writes behind autograd's back: tell it, on every rank as on the owner.
        # Frozen parameters have not changed, and a backward under way may still need them.
        torch.autograd.graph.increment_version([param for param in self._params if param.requires_grad])
        copy_options(self.optim.param_groups, self.param_groups)
        self._backward.take_gradients()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's optimizers: forget all gradients."""
        super().zero_grad(set_to_none)
        self._backward.forget_gradients()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # True makes torch.amp.GradScaler call step() on every rank, which then refuses on every rank.
        return self._backward.refuses_scaler is not None

    # --------------------------------------------------------------------------- building what step uses

    @torch.no_grad()
    def _build(self, specs: Sequence[ParamSpec]) -> None:
        """Lay out the messages and the local tensors for the parameters as they are now."""
        params = self._params
        if self.parameters_as_bucket_view:
            self._free_frozen_windows()
            self._messages = flatten_parameters(lay_out(self.partition, specs), params)
        else:
            self._messages = messages_by_parameter(self.partition, params)
        before, self._owned = self._owned, own_slices(self.partition.slices_of_rank[self.rank], params)
        for old, new in zip(before, self._owned, strict=True):
            if old.local is not new.local and old.local in self.optim.state:
                self.optim.state[new.local] = self.optim.state.pop(old.local)
        for group, local in zip(
            self.optim.param_groups, local_groups(self.param_groups, self._owned), strict=True
        ):
            group["params"] = local["params"]
        self.state = self.optim.state
        # An update in backward steps some parameters at a time, so there each is stepped by itself.
        may_merge = is_elementwise(type(self.optim)) and not self.overlap_with_ddp
        mine = [message for message in self._messages if may_merge and message.owner == self.rank]
        self._merged.dissolve()
        self._merged = MergedSlices(self.optim, mine, params)
        self._gradients = LentGradients(self.partition, self._owned, params, specs, self._merged)
        self._built_for = self._fingerprint()
        self._log()

    def _rebuild_if_changed(self) -> None:
        now = self._fingerprint()
        if now == self._built_for:
            return
        if [trainable for _, trainable in now] != [trainable for _, trainable in self._built_for]:
            # Ranks that send different parameters overwrite each other's memory, or abort in Gloo.
            facts = [
                f"parameter {spec.name or i}: requires_grad={spec.trainable}"
                for i, spec in enumerate(self._specs())
            ]
            agree(self.collectives, "change which parameters are trained", facts)
        for number, param in enumerate(self._params):
            if param.numel() != self.partition.numels[number]:
                raise RuntimeError(
                    f"rank {self.rank}: parameter {self._name(number)} had {self.partition.numels[number]} "
                    f"elements and now has {param.numel()}. Build a new optimizer for a model of other sizes."
                )
        for number, param, strides in self._gradients.cut:
            if param.stride() != strides:
                raise RuntimeError(
                    f"rank {self.rank}: parameter {self._name(number)} is split between ranks along its "
                    f"memory, and its strides changed from {strides} to {param.stride()}: its state would "
                    "belong to other elements. Change the memory format before constructing the optimizer, "
                    'or use a partition of whole parameters, such as "sorted_greedy".'
                )
        self._build(self._specs())

    def _fingerprint(self) -> list[tuple[int, bool]]:
        """What `_build` depends on and a user may change: where the parameters lie, and which are trained."""
        return [
            (param.data_ptr(), param.requires_grad)
            for group in self.param_groups
            for param in group["params"]
        ]

    def _free_frozen_windows(self) -> None:
        """Take newly frozen parameters out of the flat tensors, which they would keep alive."""
        flats = {message.tensor.untyped_storage().data_ptr() for message in self._messages}
        for param in self._params:
            if not param.requires_grad and param.untyped_storage().data_ptr() in flats:
                param.data = param.data.clone()

    @property
    def _params(self) -> list[torch.Tensor]:
        return params_of(self.param_groups)

    def _specs(self) -> list[ParamSpec]:
        return specs_of(self.param_groups)

    def _name(self, param: int) -> str:
        return self._specs()[param].name or str(param)

    # -------------------------------------------------------------------------------- parameters added later

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as torch's optimizers do; what is already placed stays where it is.

        Raises:
            TypeError, ValueError: as torch's optimizers. If one rank raises, or ranks add different groups,
                all raise and the optimizer is as it was.
        Collective: all ranks of the group.
        Cost: one all-gather of 32 bytes.
        """
        if not hasattr(self, "optim"):
            # Optimizer.__init__ hands over one group at a time; all are planned together when it is done.
            super().add_param_group(param_group)
            return
        self._rebuild_if_changed()
        count = len(self.param_groups)
        known = len(self._params)
        try:
            with agreement(self.collectives, "add a parameter group") as facts:
                super().add_param_group(param_group)
                specs = self._specs()
                loads = self.partition.loads
                later = plan_partition(self._strategy_for_later, specs[known:], self.world_size, loads=loads)
                partition = self.partition.joined(later)
                check_can_be_sharded(type(self.optim), partition, self._params, specs)
                owned = own_slices(partition.slices_of_rank[self.rank], self._params)[len(self._owned) :]
                options = options_of(self.param_groups[-1])
                self.optim.add_param_group({**options, "params": [own.local for own in owned]})
                facts += self._facts(specs, partition, first=known)
        except Exception:
            del self.param_groups[count:], self.optim.param_groups[count:]
            raise
        self.partition = partition
        self._owned = [*self._owned, *owned]
        self._consolidated = None
        self._build(specs)

    @property
    def _strategy_for_later(self) -> Strategy:
        """A rule is applied again; an explicit assignment says nothing of new parameters: the default."""
        rule = self._strategy
        return rule if isinstance(rule, str) or callable(rule) else "sorted_greedy"

    # ---------------------------------------------------------------------------------------- checkpoints

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "a ZeroRedundancyOptimizer cannot be copied or pickled: it is tied to those of the other ranks. "
            "Use consolidate_state_dict() and state_dict()."
        )

    def repartition(self, partition: Strategy) -> None:
        """Give elements to other owners in the middle of training, which goes on as if nothing had happened.

        Only the state of what changes owner moves, from its old owner straight to the new one; slices that do
        not change keep their very tensors. Options stay, and so does a state that was consolidated.

        >>> optimizer.repartition("even")                                    # doctest: +SKIP

        Args:
            partition: as in the constructor. A rule also places the groups that are added later.
        Raises:
            TypeError, ValueError: the partition does not fit, or cannot work for this optimizer; something in
                the state cannot be moved; the parts of a parameter were not stepped together.
            RuntimeError: the last backward reduced gradients to their owners, and no step has used them yet;
                another rank stopped. If one rank raises, or ranks pass different partitions, all raise and
                the optimizer is as it was.
        Collective: all ranks of the group.
        Cost: each element that changes owner is sent once, with its state, and with its value where there is
            a `broadcast_dtype`; a table of contents from each rank to each that it sends to; two all-gathers
            of 32 bytes. While it lasts, the state of slices that change is held twice.
        """
        self._rebuild_if_changed()
        with agreement(self.collectives, "repartition the optimizer") as facts:
            if self._backward.owner_only:
                raise RuntimeError(
                    f"rank {self.rank}: the last backward reduced gradients to their owners, so new owners "
                    "would not have them. Call step() or zero_grad() before repartition()."
                )
            specs = self._specs()
            new = plan_partition(partition, specs, self.world_size)
            check_can_be_sharded(type(self.optim), new, self._params, specs)
            handover = Handover(
                self.rank,
                self.partition,
                new,
                self._params,
                self._owned,
                self.optim.state,
                values=self.broadcast_dtype is not None,
            )
            facts += self._facts(specs, new)
        state = handover.exchange(self.collectives)
        self.optim.state.clear()
        self.optim.state.update(state)
        self.partition, self._strategy, self._owned = new, partition, handover.owned
        self._build(specs)

    def consolidate_state_dict(self, to: int | Literal["all"] = 0) -> None:
        """Gather the optimizer state onto one rank, or onto all; then `state_dict()` returns it there.

        Args:
            to: a rank of the group, or "all".
        Raises:
            ValueError: there is no such rank, or ranks pass different ones.
            TypeError: the state holds something that is neither a tensor, a number, a text nor None. If one
                rank raises, all raise.
        Collective: all ranks of the group.
        Cost: `to` receives the (N-1)/N of the state that it does not own, into its final place in CPU
            memory. The others allocate 256 KiB at a time, for small tensors that travel together.
        """
        self._rebuild_if_changed()
        with agreement(self.collectives, "consolidate the optimizer state") as facts:
            facts.append(f"to={to}")
            if to != "all" and not (isinstance(to, int) and 0 <= to < self.world_size):
                raise ValueError(
                    f"rank {self.rank}: to={to!r} is no rank of a group of {self.world_size}, nor 'all'."
                )
            packed = checkpoint.pack(self._owned, self.optim.state)
        self._consolidated = checkpoint.consolidate(self.collectives, to, self._params, packed)

    def state_dict(self) -> dict[str, Any]:
        """The state that the unsharded optimizer would have, in its form: it loads there, and anywhere here.

        Raises:
            RuntimeError: it was not consolidated onto this rank since the last step.
        """
        for before_hook in self._optimizer_state_dict_pre_hooks.values():
            before_hook(self)
        if self._consolidated is None:
            raise RuntimeError(
                f"rank {self.rank}: the optimizer state is spread over {self.world_size} ranks and has not "
                "been gathered on this one since the last step. Call "
                f"consolidate_state_dict({self.rank}) on all ranks, or state_dict() only on the rank that "
                "the state was gathered to."
            )
        state_dict: dict[str, Any] = {
            "state": {param: dict(state) for param, state in self._consolidated.items()},
            "param_groups": checkpoint.packed_groups(self.param_groups),
        }
        for after_hook in self._optimizer_state_dict_post_hooks.values():
            state_dict = after_hook(self, state_dict) or state_dict
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take this rank's shard of a whole optimizer's state.

        Args:
            state_dict: of the plain torch optimizer or of a consolidated ZeroRedundancyOptimizer, at any
                world size and partition. It is not changed, now or by later steps: this rank's part of it is
                copied.
        Raises:
            ValueError: it is not of these parameters; names the first that does not fit. If it fits on one
                rank and not on another, all raise and the optimizer is as it was.
        Collective: all ranks of the group, each with the whole dict.
        Cost: one all-gather of 32 bytes.
        """
        self._rebuild_if_changed()
        with self._loading("load the state dict") as facts:
            for before_hook in self._optimizer_load_state_dict_pre_hooks.values():
                state_dict = before_hook(self, state_dict) or state_dict
            facts += checkpoint.check_fits(state_dict, self.param_groups, is_elementwise(type(self.optim)))
            self._load_shard(state_dict)
        for after_hook in self._optimizer_load_state_dict_post_hooks.values():
            after_hook(self)

    @contextlib.contextmanager
    def _loading(self, action: str) -> Iterator[list[str]]:
        """As `agreement`, on what loads the local optimizer, which stays as it was if a rank raises."""
        before = {"state": self.optim.state, "param_groups": self.optim.param_groups}
        try:
            with agreement(self.collectives, action) as facts:
                yield facts
        except Exception:
            self.optim.__setstate__(before)
            raise
        finally:
            self.state = self.optim.state
        copy_options(self.optim.param_groups, self.param_groups)
        self._consolidated = None

    def _load_shard(self, state_dict: dict[str, Any]) -> None:
        """Load this rank's part into the local optimizer, which puts it on the device and dtype it wants."""
        ids = checkpoint.saved_ids(state_dict, self.param_groups)
        ends = [0, *accumulate(len(group["params"]) for group in self.optim.param_groups)]
        # Ranges: torch looks for each entry of the state in them, which in lists takes quadratic time.
        groups = [
            {**options_of(ours), **options_of(saved), "params": range(*of_group)}
            for ours, saved, of_group in zip(
                self.optim.param_groups, state_dict["param_groups"], pairwise(ends), strict=True
            )
        ]
        shard = checkpoint.shard_of(state_dict["state"], ids, self._owned)
        self.optim.load_state_dict({"state": shard, "param_groups": groups})

    # ------------------------------------------------------------------------------------- uneven inputs

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """For torch.distributed.algorithms.join.Join: a rank without data goes on updating its shard."""
        return join.ShadowStep(self)

    @property
    def join_device(self) -> torch.device:
        """Where Join counts the ranks that have data."""
        return self.collectives.wire_device

    @property
    def join_process_group(self) -> Any:
        """The group whose ranks join."""
        return self.process_group

    # ----------------------------------------------------------------------------------- checks and logging

    def _facts(self, specs: Sequence[ParamSpec], partition: Partition, first: int = 0) -> list[str]:
        way = (
            f"{type(self.optim).__name__}, parameters_as_bucket_view={self.parameters_as_bucket_view}, "
            f"overlap_with_ddp={self.overlap_with_ddp}, broadcast_dtype={self.broadcast_dtype}"
        )
        return [way, *facts_of(self.param_groups, specs, partition, first)]

    def _log(self) -> None:
        """Partition and message figures, at TORCH_DISTRIBUTED_DEBUG=INFO; every owned slice at DETAIL."""
        level = dist.get_debug_level()  # type: ignore[attr-defined]
        if level == dist.DebugLevel.OFF:  # type: ignore[attr-defined]
            return
        total = sum(self.partition.numels)
        logger.info(
            "rank %d of %d owns %d of %d elements (%.1f%%) in %d slices; a step sends %d messages, %d bytes",
            self.rank,
            self.world_size,
            self.partition.loads[self.rank],
            total,
            100 * self.partition.loads[self.rank] / max(total, 1),
            len(self._owned),
            len(self._messages),
            sum(message.tensor.nbytes for message in self._messages),
        )
        if level == dist.DebugLevel.DETAIL:  # type: ignore[attr-defined]
            for own in self._owned:
                logger.info(
                    "rank %d owns %s of parameter %s", self.rank, own.piece, self._name(own.piece.param)
                )


def _evaluated(closure: Callable[[], Any]) -> Callable[[], Any]:
    """The closure's loss, computed now and once, in the form of a closure."""
    with torch.enable_grad():
        loss = closure()
    return lambda: loss
