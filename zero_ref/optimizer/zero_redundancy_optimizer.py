"""ZeroRedundancyOptimizer: every rank updates its own shard of the parameters, then broadcasts it.

Read `minimal.py` first, then `step` and `make_update` here, which do the same. This module adds that the user
may add groups, freeze parameters, change owners and load. Such a change updates what a step uses: the
parameters and their plan (`built.py`), the slices that this rank owns (`shard.py`), and the facts that must
be equal on all ranks (`optimizer/accord.py`).

Under data parallelism an ordinary optimizer makes the same update on all N ranks and keeps its state N times.
Here each element has one owner, and only the owner keeps its state and updates it. State per rank falls to
1/N, and each step sends the parameters once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from zero_ref.comm.agreement import agree, agreement
from zero_ref.comm.backend import as_collectives
from zero_ref.comm.collectives import Collectives, PendingCall
from zero_ref.optimizer import checkpoint
from zero_ref.optimizer.accord import Accord, facts_of_options, number_on
from zero_ref.optimizer.around import TakesPartInJoin, failure_told, in_its_circumstances, noting_errors
from zero_ref.optimizer.forwarded import ForwardsMethods
from zero_ref.optimizer.repartition import Handover
from zero_ref.optimizer.start_values import compare_start_values
from zero_ref.optimizer.whole import WithWholeState
from zero_ref.plan.choice import Choice, loads_under, may_cut, plan_partition
from zero_ref.plan.partition import ParamSpec, Partition
from zero_ref.shard.arriving import Arriving
from zero_ref.shard.buckets import (
    check_can_be_flattened,
    expect_broadcasts,
    finish_broadcasts,
    start_broadcasts,
)
from zero_ref.shard.built import Built, places_of
from zero_ref.shard.checks import (
    check_can_be_sharded,
    check_is_class,
    check_updates_apart,
    facts_of,
    groups_kept_whole,
)
from zero_ref.shard.gradients import Backward
from zero_ref.shard.groups import (
    OPTIMIZER_CLASS,
    copy_options,
    difference,
    given_in,
    ids_in,
    params_of,
    replace_options,
    specs_of,
)
from zero_ref.shard.offload import StatePlace
from zero_ref.shard.rounding import Masters
from zero_ref.shard.several import SeveralOptimizers, class_of, name_classes, title, with_group
from zero_ref.shard.shard import Shard, log_share


class ZeroRedundancyOptimizer(WithWholeState, ForwardsMethods, TakesPartInJoin):
    """Shards an optimizer over the ranks of a process group. A drop-in for torch's class of that name.

    Gradients must be averaged over the ranks before `step`, as DistributedDataParallel does in its backward.
    Otherwise each owner would train on its own data only. Unlike torch's optimizers this one leaves a frozen
    parameter (`requires_grad=False`) as it is, even if it still has a gradient.

    >>> optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=1e-3)  # doctest: +SKIP

    Args:
        params: an iterable of parameters, of dicts (parameter groups) or of `named_parameters()`.
        optimizer_class: the class to shard, which must update each parameter by itself. A parameter group
            may name another one: `{"params": matrices, "optimizer_class": torch.optim.Muon, "lr": 0.02}`.
            Its other options are then the defaults of that class. Public methods that the class has beyond
            those of torch's `Optimizer`, such as `train` and `eval` of a schedule-free one, are methods here:
            all ranks call them together, and what they write is sent to all.
        process_group: the ranks to shard over; None is the default group. A `Collectives` works too.
        parameters_as_bucket_view: make the parameters views of flat tensors, so that a step sends one
            message for each owner, not one for each parameter, and (without masters) steps adjacent small
            parameters as one tensor. Save a part of the model as `zero_ref.compact(part.state_dict())`, or
            the file has the whole flat tensors of which its parameters are views.
        overlap_with_ddp: make the update during backward, by `hook_with_zero_step` or
            `hook_with_zero_step_interleaved` on the DistributedDataParallel model; see
            `backward/overlap.py`. Without a hook, or where backward did not reduce, `step` makes the update.
        partition: the owners: "sorted_greedy" (torch's rule, the default), "registration_greedy"
            (FairScale's), "even" (1/N, to within 64 elements; parameters whose optimizer uses their shape
            stay whole), "equal_shares" (1/N of each range of parameters, for ShardedDataParallel and one
            all-gather a range), "balanced" (as "even", but what stays whole by the operations of Muon's
            step), a function, lists of parameter numbers for each rank, or a Partition.
        broadcast_dtype: send new parameters in this dtype, such as torch.bfloat16, to halve the bytes sent.
            The owner keeps its unrounded values and other ranks get rounded ones, so ranks no longer hold
            equal values. With torch.float16, a step waits for the GPU to check for values beyond 65504.
        master_dtype: torch.float32 for parameters of 16 bits: each owner keeps a copy of its slices in this
            dtype, the local optimizer steps the copy, and the new values are rounded into the parameters.
            Larger parameters have no copy. State dicts have the copies under the key "master_weight".
            torch.amp.GradScaler refuses gradients in float16, so use bfloat16 with it.
        rounding: "nearest", or "stochastic": to one of the two neighbours at random, the nearer one more
            often, so that the mean is right. The result is the same at any world size and partition.
        rounding_seed: the seed of stochastic rounding.
        state_device: "cpu" to keep masters, moments and the values that they belong to in the CPU's memory,
            while parameters are on a GPU; a `pathlib.Path` to keep them in files in that directory. The local
            step then runs on the CPU, in pieces, while other pieces are copied.
        **defaults: passed to `optimizer_class`.

    Attributes:
        optim: the local optimizer, on this rank's slices. If groups name several classes, it is a
            `SeveralOptimizers`, which has one optimizer for each class.
        partition: the owner of each slice.
        built: the parameters, their partition and the messages of a step.
        shard: the slices that this rank owns, and the local optimizer.
        backward: what DDP's hooks did in the last backward.
        arriving: new parameters that are on their way, if ShardedDataParallel lets `step` return before.
        accord: checks that options stay equal on all ranks, and reports errors between ranks.
        collectives: makes the calls to other ranks; append to its `observers` to see every call.
        process_group, rank, world_size, global_rank: as torch's. `rank` counts within the group.

    Raises:
        TypeError, ValueError: as torch's optimizers on wrong `params` or options; also if the partition does
            not suit the optimizer, a parameter is sharded already (DTensor, FSDP), or the optimizer's update
            of a parameter depends on others. If one rank raises, or ranks pass different arguments, all
            raise.
    Warns:
        UserWarning: a trial has shown that the state of a class can be neither saved nor moved.

    Collective: all ranks of the group construct it together.
    Cost: one all-gather of 32 bytes. The values from which ranks start are compared in the first step.
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
        partition: Choice = "sorted_greedy",
        broadcast_dtype: torch.dtype | None = None,
        master_dtype: torch.dtype | None = None,
        rounding: str = "nearest",
        rounding_seed: int = 0,
        state_device: str | torch.device | os.PathLike[str] | None = None,
        **defaults: Any,
    ) -> None:
        TakesPartInJoin.__init__(self)
        self.collectives = as_collectives(process_group)
        self.process_group = dist.group.WORLD if process_group is None else process_group
        self.parameters_as_bucket_view = parameters_as_bucket_view
        self.overlap_with_ddp = overlap_with_ddp
        self.broadcast_dtype = broadcast_dtype
        self.backward = Backward()
        self.arriving = Arriving()
        self._choice = partition
        self._compared = 0  # parameters whose start values were compared

        # Errors are raised here, before the first message of parameters, and on all ranks.
        number = number_on(self.process_group)
        with agreement(self.collectives, "construct the optimizer") as facts:
            # Optimizer.__init__ writes every default into each group, where it would override a value that
            # the local optimizer's constructor computes. So pass on only what the user gave.
            self._given: list[dict[str, Any]] = []
            self._main = optimizer_class, defaults
            Optimizer.__init__(self, params, defaults)
            self.built = self._planned(optimizer_class)
            # An update in backward steps only some parameters at a time, so they cannot be merged.
            merge, masters = not overlap_with_ddp, Masters.of(master_dtype, rounding, rounding_seed)
            self.shard = Shard(
                self.built,
                self.rank,
                self._given,
                optimizer_class,
                defaults,
                merge=merge,
                masters=masters,
                place=StatePlace.of(state_device),
            )
            self.defaults = self.optim.defaults
            replace_options(self.optim.param_groups, self.param_groups)
            name_classes(self.param_groups, self.optim)
            facts += [f"optimizer {number} of the group", *self._facts(self.built.specs, self.partition)]
        self._listed = ids_in(self.param_groups)
        alarm = self.collectives.open_channel(number, {param.device for param in self.built.params})
        self.accord = Accord(self.collectives, alarm, f"optimizer {number} ({title(self.optim)})")
        log_share(self.built, self.shard, self.world_size)

    @property
    def global_rank(self) -> int:
        return dist.get_rank() if dist.is_initialized() else self.rank

    @property
    def partition(self) -> Partition:
        return self.built.partition

    # ------------------------------------------------------------------------------------------- the step

    @in_its_circumstances
    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Update this rank's shard, then send every shard to all ranks.

        Returns with the same new parameters on all ranks; with `broadcast_dtype`, other ranks than the owner
        have rounded values.

        Args:
            closure: re-evaluates the model and returns the loss; the local optimizer calls it.
            **kwargs: passed to the local optimizer's `step`.
        Returns:
            What the local optimizer's `step` returns: the closure's loss, or None.
        Raises:
            RuntimeError: another rank stopped, or makes other calls; says what this rank waited for. A value
                is too large for `broadcast_dtype`, or gradients that only their owners have were changed
                other than by `zero_ref.clip_grad_norm_`; names the parameter, on all ranks. The local
                optimizer of another rank raised: up to 8 ranks on the CPU raise in the same step, others at
                the next comparison. Then all ranks refuse to step and to save until a state is loaded.
            ValueError: options, or values that the local optimizer keeps for all parameters, differ between
                ranks. They are compared before updates 1, 2, 4, 8, ..., and in every other agreement; before
                every update if `ShardedDataParallel` has `replicas`.
        Collective: all ranks of the group, once each iteration, after their gradients were reduced.
        Cost: each rank receives (N-1)/N of the trainable parameters, and sends its own 1/N to the others. The
            first step after a change of `requires_grad` or a dtype, and updates 1, 2, 4, 8, ..., also make an
            all-gather of 32 bytes; so does the first one with new parameters, which reads them all, for start
            values. Nothing is sent if backward has made the update already (`overlap_with_ddp`).
        """
        self.begin_update()
        return self.make_update(closure, **kwargs)

    # Where a step is compiled, dynamo shows options that groups do not have ("capturable"), and could not
    # trace digests. The public torch.compiler.disable would import dynamo with this module.
    @_disable_dynamo
    def begin_update(self) -> None:
        """Apply the user's changes since the last update, to parameters and options."""
        self.state_changes()
        self.current()
        self.accord.before_update(self.standing_facts)
        if self._compared < len(self.built.params):
            compare_start_values(self.collectives, self.built, self._compared)
            self._compared = len(self.built.params)
        replace_options(self.param_groups, self.optim.param_groups)

    def make_update(
        self,
        closure: Callable[[], Any] | None = None,
        gradients: Mapping[int, torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> Any:
        """The update itself: each rank steps its shard, then all send what they own."""
        expected: list[PendingCall | None] = []

        def take() -> None:
            self.shard.take(gradients, self.backward.gradients.parts)

        with failure_told(self, expected) as by_closure:
            if closure is None:  # a closure still needs the old parameters to compute the gradients
                expected += expect_broadcasts(self.collectives, self.built.messages, self.broadcast_dtype)
                take()
            loss = self.shard.step(closure and noting_errors(closure, by_closure), take, **kwargs)
            self.shard.publish()
        self.exchange(expected)
        self.end_update()
        self.accord.check_nothing_lost()
        return loss

    def exchange(self, expected: Sequence[PendingCall | None]) -> None:
        """Send what this rank owns, receive the rest, and learn which ranks could not step."""
        built, comm = self.built, self.collectives
        owners = {message.owner for message in built.messages if message.slices}
        works = start_broadcasts(comm, built.messages, self.broadcast_dtype, expected)
        if self.arriving.later:

            def done() -> None:
                self.accord.after_update(owners)
                self.accord.check_nothing_lost()

            self.arriving.begin(built.messages, works, built.params, done)
            return
        try:
            finish_broadcasts(works, built.name)
        finally:
            self.accord.after_update(owners)

    @_disable_dynamo
    def end_update(self) -> None:
        """Record the update in autograd's versions, the user's groups and `backward`."""
        # Autograd does not see that a broadcast wrote into parameters, so increment their versions.
        # Frozen parameters have not changed, and a running backward may still need them.
        torch.autograd.graph.increment_version([param for param in self.built.params if param.requires_grad])
        self.shard.copies.note_versions()
        copy_options(self.optim.param_groups, self.param_groups)
        self.backward.stepped()
        self._opt_called = True  # learning-rate schedulers warn where step() was never called

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset all gradients, as torch's optimizers do."""
        if not set_to_none:
            # Gradients are to be zeros, and not gone.
            self.backward.gradients.show(self.built.params, {own.param for own in self.shard.owned})
        super().zero_grad(set_to_none)
        self.backward.zeroed()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # True makes torch.amp.GradScaler call step() on every rank, which then refuses on every rank.
        return self.backward.gradients.why_no_scaler is not None

    # --------------------------------------------------------------------------- building what step uses

    def _planned(self, optimizer_class: type[Optimizer]) -> Built:
        """The checked plan with its messages."""
        classes = [group.get(OPTIMIZER_CLASS, optimizer_class) for group in self.param_groups]
        for of_class in dict.fromkeys(classes):
            check_is_class(of_class)
        specs, params = self._specs_for(self._choice), params_of(self.param_groups)
        partition = plan_partition(self._choice, specs, self.world_size)
        check_can_be_sharded(classes, partition, params, specs)
        if self.parameters_as_bucket_view:
            check_can_be_flattened(params)
        self._check_apart()
        return Built.of(params, specs, partition, self.parameters_as_bucket_view)

    def _rebuild(self, partition: Partition) -> None:
        """Make messages and local tensors for this partition of the current parameters."""
        params, specs = params_of(self.param_groups), self._specs()
        built = Built.of(params, specs, partition, self.parameters_as_bucket_view, self.built)
        self.shard.place(built)
        self.built = built  # last: if a line above fails, the next step tries again
        log_share(self.built, self.shard, self.world_size)

    def _check_apart(self, first: int = 0) -> None:
        """Refuse classes whose update of a parameter depends on others, under the options of their groups.

        Args:
            first: the number of the first group to look at.

        Warns:
            UserWarning: the state of a class can be neither saved nor moved.
        """
        different = {repr(one): one for one in self.constructed_with[first:]}
        for of_class, options, defaults in different.values():
            check_updates_apart(of_class, options, defaults)
            checkpoint.warn_if_not_saved(of_class, options, defaults)

    def _specs(self) -> list[ParamSpec]:
        """The specs of the current parameters, with those kept whole that were planned so."""
        return specs_of(self.param_groups, {spec.group for spec in self.built.specs if spec.whole})

    def _specs_for(self, choice: Choice) -> list[ParamSpec]:
        """The specs of the current parameters, for a partition by this rule."""
        return specs_of(self.param_groups, groups_kept_whole(self._given, *self._main, tried=may_cut(choice)))

    def check_groups(self) -> None:
        """Refuse parameter groups that list other parameters than the plan, or in another order.

        Raises:
            RuntimeError: names the first difference, and what to do instead.
        """
        listed = ids_in(self.param_groups)
        if listed != self._listed:
            raise RuntimeError(
                f"rank {self.rank}: param_groups {difference(listed, self._listed)}. Ranks own parameters by "
                "their places in these lists, so nothing was computed. To stop training a parameter, leave "
                "it there and call requires_grad_(False); for new ones call add_param_group(). To take out, "
                'replace or reorder parameters, put the lists back, call consolidate_state_dict("all"), make '
                "the same change to what state_dict() returns, and load that into a new optimizer."
            )

    def current(self) -> Built:
        """`built`, made anew if parameters were moved or frozen.

        Raises:
            RuntimeError: as `check_groups`; this rank may not continue, as after a load that was cut off; the
                elements of a parameter have changed; the local optimizer keeps views of parameters that have
                moved.
            ValueError: `requires_grad` or the dtype of a parameter differs between ranks.
        Collective: all ranks of the group, if `requires_grad` or the dtype of a parameter has changed.
        Cost: one all-gather of 32 bytes, in that case.
        """
        self.arriving.wait()
        self.accord.check_certain()
        self.check_groups()
        self.shard.follow()  # before anything moves the parameters
        built = self.built
        now = places_of(built.params)
        if now == built.places:
            return built
        keeps_views: RuntimeError | None = None
        if self.parameters_as_bucket_view or self.shard.cut:
            try:
                self.shard.check_keeps_no_views("change which parameters are trained, or where they lie")
            except RuntimeError as error:
                keeps_views = error
        kinds, before = ([kind for _, *kind in places] for places in (now, built.places))
        if kinds != before:
            # Ranks that send different parameters overwrite each other's memory, or abort in Gloo.
            facts = [
                f"parameter {spec.name or i}: {kind}"
                for i, spec in enumerate(self._specs())
                for kind in (f"requires_grad={spec.trainable}", spec.dtype)
            ]
            if not self.joined:  # in a Join, a step sends the options to ranks without data
                facts += facts_of_options(self.param_groups, self.optim)
            freezes = [trained for _, trained in kinds] != [trained for _, trained in before]
            action = "change which parameters are trained" if freezes else "cast parameters"
            agree(self.collectives, action, keeps_views or facts)
        if keeps_views is not None:
            raise keeps_views
        self.shard.check_same_elements(params_of(self.param_groups))
        self._rebuild(built.partition)
        return self.built

    # -------------------------------------------------------------------------------- parameters added later

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as torch's optimizers do; earlier parameters keep their owners.

        Raises:
            TypeError, ValueError: as torch's optimizers.
            RuntimeError: with `parameters_as_bucket_view`, the local optimizer keeps views of its parameters.
            If one rank raises, or ranks add different groups, all raise and the optimizer is unchanged.
        Collective: all ranks of the group.
        Cost: one all-gather of 32 bytes.
        """
        given = given_in(param_group) if isinstance(param_group, dict) else {}  # torch raises below
        if not hasattr(self, "shard"):
            # Optimizer.__init__ calls this for one group at a time; all are planned together afterwards.
            super().add_param_group(param_group)
            self._given.append(given)
            return
        built = self.current()
        count, known, optim = len(self.param_groups), len(built.params), self.optim
        try:
            with agreement(self.collectives, "add a parameter group") as facts:
                if self.parameters_as_bucket_view:
                    self.shard.check_keeps_no_views("add a parameter group")
                check_is_class(given.get(OPTIMIZER_CLASS, torch.optim.SGD))
                super().add_param_group(param_group)
                classes = [class_of(group, optim) for group in self.param_groups]
                self._given.append(given)
                self._check_apart(first=count)
                rule = self._rule_for_later
                specs = [*built.specs, *self._specs_for(rule)[known:]]
                all_params = params_of(self.param_groups)
                loads = loads_under(rule, built.partition, specs)
                later = plan_partition(rule, specs[known:], self.world_size, loads=loads)
                partition = built.partition.joined(later)
                check_can_be_sharded(classes, partition, all_params, specs)
                owned = self.shard.own(partition, all_params, first=len(self.shard.owned))
                group = {**given, "params": [own.local for own in owned]}
                self.shard.optim = with_group(optim, group)
                replace_options(self.optim.param_groups[-1:], self.param_groups[-1:])
                name_classes(self.param_groups, self.optim)
                facts += self._facts(specs, partition, first=known)
        except Exception:
            self.shard.optim = optim
            del self.param_groups[count:], optim.param_groups[count:], self._given[count:]
            if isinstance(optim, SeveralOptimizers):
                optim.forget_unused()
            raise
        self.shard.owned = [*self.shard.owned, *owned]
        self.built = replace(
            built, params=tuple(all_params), specs=tuple(specs), partition=partition, places=()
        )
        self._consolidated, self._listed = None, ids_in(self.param_groups)
        self._rebuild(partition)

    @property
    def _rule_for_later(self) -> Choice:
        """The rule for new parameters: the user's rule, or the default after an explicit assignment."""
        return self._choice if isinstance(self._choice, str) or callable(self._choice) else "sorted_greedy"

    # ----------------------------------------------------------------------------------------- other owners

    def repartition(self, partition: Choice) -> None:
        """Change the owners of elements in the middle of training, without changing its result.

        Only the state of elements that change owner is sent, from the old owner directly to the new one;
        other slices keep their tensors. Options and a consolidated state stay.

        >>> optimizer.repartition("even")                                    # doctest: +SKIP

        Args:
            partition: as in the constructor. A rule also applies to groups that are added later.
        Raises:
            TypeError, ValueError: the partition does not fit, or does not suit this optimizer; something in
                the state cannot be moved; the parts of a parameter were not stepped together.
            RuntimeError: the last backward reduced gradients to their owners, and no step has used them yet;
                the local optimizer keeps views of its parameters; another rank stopped. If one rank raises,
                or ranks pass different partitions, all raise and the optimizer is unchanged.
        Collective: all ranks of the group.
        Cost: the state of each element that changes owner is sent once, with `broadcast_dtype` its value too;
            a table of contents from each rank to each rank that it sends to; three all-gathers of 32 bytes.
            Meanwhile the state of slices that change is in memory twice.
        """
        built = self.current()
        with agreement(self.collectives, "repartition the optimizer") as facts:
            facts += self.standing_facts()
            if self.backward.gradients.on_owners:
                raise RuntimeError(
                    f"rank {self.rank}: the last backward reduced gradients to their owners, so new owners "
                    "would not have them. Call step() or zero_grad() before repartition()."
                )
            self.shard.check_keeps_no_views("repartition it")
            specs = self._specs_for(partition)
            new = plan_partition(partition, specs, self.world_size)
            classes = [class_of(group, self.optim) for group in self.param_groups]
            check_can_be_sharded(classes, new, built.params, specs)
            handover = Handover(
                self.rank,
                built.partition,
                new,
                built.params if self.broadcast_dtype is not None else (),
                self.shard.owned,
                self.shard.own(new, built.params),
                self.shard.state,
            )
            facts += self._facts(specs, new)
        self.shard.adopt(handover.owned, handover.exchange(self.collectives))
        self.built = replace(built, specs=tuple(specs), partition=new, places=())
        self._choice = partition
        self.backward.gradients.owners_changed()
        self._rebuild(new)

    join_hook = TakesPartInJoin.join_hook  # named here, so that the API reference has it

    # ------------------------------------------------------------------------------- what ranks compare

    def standing_facts(self) -> list[str]:
        """The facts that must be equal on all ranks at any time."""
        return [*self.accord.facts(), *facts_of_options(self.param_groups, self.optim)]

    def all_facts(self) -> list[str]:
        """`standing_facts`, and those that the constructor has compared."""
        return [*self.standing_facts(), *self._facts(self.built.specs, self.partition)]

    def _facts(self, specs: Sequence[ParamSpec], partition: Partition, first: int = 0) -> list[str]:
        way = (
            f"{title(self.optim)}, parameters_as_bucket_view={self.parameters_as_bucket_view}, "
            f"overlap_with_ddp={self.overlap_with_ddp}, broadcast_dtype={self.broadcast_dtype}, "
            f"{self.shard.masters or 'no masters'}, {self.shard.place_of_state or 'state beside parameters'}"
        )
        return [way, *facts_of(self.param_groups, specs, partition, first)]


def listed(given: Any, function: str, otherwise: str = "") -> list[ZeroRedundancyOptimizer]:
    """The optimizers that a function was given: one, or several.

    Args:
        otherwise: advice to who gave something else.
    Raises:
        TypeError: something else was given.
        ValueError: none was given, or one was given twice.
    """
    optimizers = list(given) if isinstance(given, (list, tuple)) else [given]
    for one in optimizers:
        if not isinstance(one, ZeroRedundancyOptimizer):
            raise TypeError(
                f"{function} takes the ZeroRedundancyOptimizer, or a list of them, not {type(one).__name__}: "
                f"it knows which rank owns what.{otherwise}"
            )
    if not optimizers or len({id(one) for one in optimizers}) < len(optimizers):
        raise ValueError(f"{function} takes each optimizer once, and was given {len(optimizers)}.")
    return optimizers
