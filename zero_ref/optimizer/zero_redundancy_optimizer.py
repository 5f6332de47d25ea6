"""ZeroRedundancyOptimizer: every rank updates its own shard of the parameters, then broadcasts it.

Read `stairs/owners.py` first, then `step` and `make_update` here, which do the same. Here the user may also
add groups, freeze parameters, change owners and load a state. Each such change updates three objects that a
step uses: the parameters and their plan (`built.py`), the slices that this rank owns (`shard.py`), and the
facts that must be equal on all ranks (`optimizer/accord.py`).

Under data parallelism an ordinary optimizer makes the same update on all N ranks and keeps its state N times.
Here each element has one owner, and only the owner keeps its state and updates it. State per rank falls to
1/N, and each step sends the parameters once.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch._compile import _disable_dynamo
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.optim import Optimizer

from zero_ref.comm.agreement import Agreement
from zero_ref.comm.backend import as_collectives
from zero_ref.comm.collectives import Collectives, PendingCall
from zero_ref.optimizer import join, plans
from zero_ref.optimizer.accord import Accord, number_on
from zero_ref.optimizer.closure import UserClosure
from zero_ref.optimizer.during_backward import check_not_being_reduced, facts_of_gradients, in_backward
from zero_ref.optimizer.forwarded import attribute_of
from zero_ref.optimizer.own_saves import OwnSaves
from zero_ref.optimizer.registered import Options, Registered
from zero_ref.optimizer.scaled import step_by_scaler
from zero_ref.optimizer.start_values import compare_with_masters
from zero_ref.plan.choice import Choice
from zero_ref.plan.parcels import BROADCAST_NUMEL
from zero_ref.plan.partition import Partition
from zero_ref.shard.arriving import Arriving
from zero_ref.shard.buckets import Message, Parcel, finish_broadcasts, start_broadcasts
from zero_ref.shard.built import Built, places_of
from zero_ref.shard.checks import facts_of
from zero_ref.shard.gradients import SET_BY_SCALERS, WHOLE, Backward, check_no_scaler
from zero_ref.shard.groups import ids_in, options_of, replace_options
from zero_ref.shard.local_state import SliceState, StateOfParameters
from zero_ref.shard.offload import StatePlace
from zero_ref.shard.shard import Shard, log_share
from zero_ref.shard.stepper import GradientSource
from zero_ref.state.whole import WholeState


class ZeroRedundancyOptimizer(Optimizer, Joinable):
    """Shards an optimizer over the ranks of a process group. A drop-in for torch's class of that name.

    Gradients must be averaged over the ranks before `step`, as DistributedDataParallel does in its backward.
    Otherwise each owner would train on its own data only. Unlike torch's optimizers this one leaves a frozen
    parameter (`requires_grad=False`) as it is, even if it still has a gradient.

    >>> optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=1e-3)  # doctest: +SKIP

    Args:
        params: an iterable of parameters, of dicts (parameter groups) or of `named_parameters()`.
        optimizer_class: the class to shard, which must update each parameter by itself: nothing checks that a
            class which is not torch's does. For two classes, such as Muon for matrices and AdamW for the
            rest, construct two optimizers. If the class has `train` and `eval`, as a schedule-free optimizer,
            they are methods here too: all ranks call them together, and the parameters that they write are
            sent to all ranks. No other method is. Attributes that only the class has are read from, and set
            on, this rank's local optimizer: set them on all ranks, to the same values. The local optimizer,
            `optim`, is an instance of the class; this one is not.
        process_group: the ranks to shard over; None is the default group. A `Collectives` works too.
        parameters_as_bucket_view: make the parameters views of flat tensors, so that a step sends one
            message for each owner, without copies, and (without masters) steps adjacent small
            parameters as one tensor. A file of a part of the model would contain the whole flat tensors
            of which its parameters are views: save
            `{name: value.clone() for name, value in part.state_dict().items()}`.
        overlap_with_ddp: make the update during backward, by `hook_with_zero_step` or
            `hook_with_zero_step_interleaved` on the DistributedDataParallel model; see
            `backward/overlap.py`. Without a hook, or if backward did not reduce, `step` makes the update.
        partition: the owners: "sorted_greedy" (torch's rule, the default), "registration_greedy"
            (FairScale's), "even" (1/N, to within 64 elements; parameters whose optimizer uses their shape
            stay whole), "equal_shares" (1/N of each range of parameters, for ShardedDataParallel, with one
            all-gather for each range), "balanced" (as "even", but whole parameters are balanced by the
            operations of Muon's step), a function, lists of parameter numbers for each rank, or a Partition.
        elementwise: for a class that is not one of torch's own, whether it updates each element by itself,
            so that a partition may cut its parameters; False keeps them whole. None raises if the partition
            cuts. torch's own classes are known, whatever it says.
        master_dtype: torch.float32 for parameters of 16 bits: each owner keeps a copy of its slices in this
            dtype, the local optimizer steps the copy, and the new values are rounded into the parameters.
            Larger parameters have no copy. State dicts have the copies under the key "master_weight".
            torch.amp.GradScaler refuses gradients in float16, so use bfloat16 with it.
        state_device: "cpu" to keep masters, moments and the owner's values in the CPU's memory, while
            parameters are on a GPU; a `pathlib.Path` to keep them in files in that directory. The local step
            then runs on the CPU, in pieces, while other pieces are copied.
        broadcast_buffer_size: without `parameters_as_bucket_view`, small parameters of one owner, dtype and
            device travel together in buffers of at most so many elements, and are copied into the parameters
            when they arrive. The buffers are kept: as many bytes as the small parameters have, those of up to
            16,384 elements. On the CPU an elementwise class also steps the smallest, of up to 4,096 elements,
            as one tensor there, with their gradients in a buffer of their size that is kept as well. Larger
            parameters travel as they are; 0 sends, and steps, each parameter by itself.
        **defaults: passed to `optimizer_class`.

    Attributes:
        optim: the local optimizer, on this rank's slices.
        partition: the owner of each slice.
        registered: the options and groups as the user gave them.
        built: the parameters, their partition and the messages of a step.
        shard: the slices that this rank owns, and the local optimizer.
        backward: where the gradients of the last backward are, and whether hooks have made the update.
        arriving: the pending calls that send and receive new parameters, if `gather_in_forward` of
            ShardedDataParallel lets `step` return before they are complete; else None.
        scaler: the gradient scaler that makes the step which is under way, and adds up over ranks; else None.
        accord: checks that options stay equal on all ranks, and reports errors between ranks.
        whole: the state of the unsharded optimizer, to save and to load.
        saves: what is known of the optimizer's sharded saves.
        collectives: makes the calls to other ranks; append to its `observers` to see every call.
        process_group, rank, world_size, global_rank, parameters_as_bucket_view: as torch's. `rank` counts
            within the group.

    Raises:
        TypeError, ValueError: as torch's optimizers, for wrong `params` or options; also if the partition
            does not suit the optimizer, or a parameter is sharded already (DTensor, FSDP). If one rank
            raises, or ranks pass different arguments, all raise.

    Collective: all ranks of the group construct it together.
    Cost: one all-gather of 32 bytes. The values from which ranks start are compared in the first step. With
        gradients that DDP all-reduces, an iteration of Ψ parameters moves 3Ψ elements, as with torch's class,
        and 2Ψ by DDP alone. `reduce_to_owners` and `ShardedDataParallel` make it 2Ψ, as the paper counts
        stage 1 and as Megatron-LM's distributed optimizer sends.
    Source: ZeRO stage 1, "P_os" (arXiv:1910.02054, section 5.1).
    """

    _opt_called = False  # learning-rate schedulers set and read it

    make_options: Callable[..., Options] = Options
    """Makes the options of the arguments. A subclass with options of its own sets it before this constructor.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[Optimizer],
        process_group: dist.ProcessGroup | Collectives | None = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        *,
        partition: Choice = "sorted_greedy",
        elementwise: bool | None = None,
        master_dtype: torch.dtype | None = None,
        state_device: str | torch.device | os.PathLike[str] | None = None,
        broadcast_buffer_size: int = BROADCAST_NUMEL,
        **defaults: Any,
    ) -> None:
        Joinable.__init__(self)
        self._shadow: weakref.ref[join.ShadowStep] | None = None
        self.collectives = as_collectives(process_group)
        self.process_group = dist.group.WORLD if process_group is None else process_group
        self.backward = Backward()
        self.arriving: Arriving | None = None
        self.scaler: Any = None
        self.whole = WholeState(self)
        self.saves = OwnSaves()

        # 1. Plan and check, without sending parameters. If one rank cannot construct its part, all ranks
        # raise.
        number = number_on(self.process_group)
        with Agreement(self.collectives).preparing("construct the optimizer") as facts:
            options = self.make_options(
                optimizer_class=optimizer_class,
                parameters_as_bucket_view=parameters_as_bucket_view,
                overlap_with_ddp=overlap_with_ddp,
                partition=partition,
                elementwise=elementwise,
                master_dtype=master_dtype,
                state_device=StatePlace.of(state_device),
                broadcast_buffer_size=broadcast_buffer_size,
                defaults=defaults,
            )
            self.registered = Registered(options)
            Optimizer.__init__(self, params, defaults)
            self.built = plans.first_plan(self)
            # An update in backward steps only some parameters at a time, so they cannot be merged.
            self.shard = Shard(
                self.built,
                self.rank,
                self.registered.given,
                optimizer_class,
                defaults,
                merge=not overlap_with_ddp,
                master_dtype=master_dtype,
                place=options.state_device,
            )
            # From here on `defaults` are an attribute of the local optimizer: a program may replace them.
            del self.defaults
            replace_options(self.optim.param_groups, self.param_groups)
            facts += [
                f"optimizer {number} of the group",
                *options.facts,
                *facts_of(self.param_groups, self.built.specs, self.partition),
            ]

        # 2. All ranks have agreed. Prepare for errors that come later.
        self.registered.listed = ids_in(self.param_groups)
        alarm = self.collectives.open_channel(number, {param.device for param in self.built.params})
        self.accord = Accord(self.collectives, alarm, f"optimizer {number} ({optimizer_class.__name__})")
        log_share(self.built, self.shard, self.world_size)

    @property
    def rank(self) -> int:
        return self.collectives.rank

    @property
    def world_size(self) -> int:
        return self.collectives.world_size

    @property
    def optim(self) -> Optimizer:
        return self.shard.optim

    @property
    def global_rank(self) -> int:
        return dist.get_rank() if dist.is_initialized() else self.rank

    @property
    def partition(self) -> Partition:
        return self.built.partition

    @property
    def parameters_as_bucket_view(self) -> bool:
        return self.registered.options.parameters_as_bucket_view

    # ------------------------------------------------------------------------------------------- the step

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Update this rank's shard, then send every shard to all ranks.

        Returns with the same new parameters on all ranks.

        Args:
            closure: re-evaluates the model and returns the loss; the local optimizer calls it.
            **kwargs: passed to the local optimizer's `step`. FairScale's `ShardedGradScaler` passes itself as
                `grad_scaler`, which this step uses.
        Returns:
            The result of the local optimizer's `step`: the closure's loss, or None.
        Raises:
            RuntimeError: another rank stopped, or makes other calls; says for which call this rank waited.
                A hook made the step while `ShardedDataParallel` or a hook of DDP's was reducing gradients.
                Gradients that only their owners have were changed other than by `zero_ref.clip_grad_norm_`;
                names the parameter, on all ranks. The local optimizer of another rank raised: groups of up to
                8 ranks on the CPU raise in the same step, others at the next comparison. Then all ranks
                refuse to step and to save until a state is loaded.
            ValueError: options, or values that the local optimizer keeps for all parameters in its state or
                its attributes, differ between ranks; during backward also gradients. They are compared before
                updates 1, 2, 4, 8, ..., and in every other agreement; before every update if
                `ShardedDataParallel` has `replicas`.
        Collective: all ranks of the group, once each iteration, after their gradients were reduced.
        Cost: each rank receives (N-1)/N of the trainable parameters, and sends its own 1/N to the others. The
            first step after a change of `requires_grad` or a dtype, and updates 1, 2, 4, 8, ..., also make an
            all-gather of 32 bytes. So does the first step with new parameters, which reads all of them to
            compare start values. Nothing is sent if backward has made the update (`overlap_with_ddp`).
        """
        # torch.distributed.checkpoint steps what has no state; a rank that owns nothing would step alone.
        if closure is None and not torch.is_grad_enabled() and self.whole.is_to_be_made():
            return None

        # A scaler that adds up over ranks hands itself over, unscales, and calls this again without itself.
        if kwargs.get("grad_scaler") is not None:
            return step_by_scaler(self, kwargs.pop("grad_scaler"), **kwargs)

        # During backward, a hook of the program's own makes this step.
        by_hook = in_backward()
        if by_hook:
            check_not_being_reduced(self.backward.gradients, self.rank)

        # After an ordinary backward all ranks have whole gradients, and there is nothing to check. If hooks
        # have reduced the gradients, check them first; a hook may even have made the update.
        noted = None
        if closure is not None or self.backward.gradients is not WHOLE or self._shadow is not None:
            noted = self._look_at_gradients(closure)
            if self.backward.take_update(kwargs):
                return noted and noted()
            if self.joined is not None:
                join.send_to_joined(self, active=True)

        # 1. Follow what the user has changed; compare what must be equal on all ranks.
        self.begin_update(by_hook)
        return self.make_update(noted, **kwargs)

    def make_update(
        self,
        closure: UserClosure | None = None,
        gradients: Mapping[int, torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Update this rank's shard, and send every shard to all ranks, without comparing anything first.

        Args:
            gradients: gradients by parameter number, to use in place of the parameters' `.grad`.
            closure, **kwargs, Returns, Raises, Collective, Cost: as `step`.
        """
        # Let the network receive new parameters while this rank computes, unless a closure still needs the
        # old ones, or they arrive in another dtype.
        messages = self.built.to_send
        expected: Sequence[PendingCall | None] = ()
        if closure is None and self.registered.options.broadcast_dtype is None:
            expected = self.collectives.expect(messages)

        # 2. Take the gradients of what this rank owns, and step the local optimizer on it.
        try:
            if closure is None:
                source = GradientSource(gradients, self.backward.gradients.in_slices)
                loss = self.shard.step(source, **kwargs)
            else:
                loss = self.shard.step_with(closure, lambda: self.backward.gradients.in_slices, **kwargs)
        except Exception as error:
            # All ranks call the closure and meet an error in it themselves. Of one in the local step they
            # have to be told.
            if closure is None or closure.error is not error:
                self._tell_failure(error, messages, expected)
            raise

        # 3. Owners send the new parameters, others receive them.
        self.exchange(messages, expected)

        # 4. Let autograd, schedulers and hooks know of the update; raise if another rank could not make it.
        self.end_update()
        if self.accord.lost:
            self.accord.check_nothing_lost()
        return loss

    # In a compiled step, dynamo adds options to groups ("capturable"), and it cannot trace digests. The
    # public torch.compiler.disable would import dynamo with this module.
    @_disable_dynamo
    def begin_update(self, by_hook: bool = False) -> None:
        """Follow the user's changes since the last update, and compare what must be equal on all ranks.

        Args:
            by_hook: a hook of the program's own steps during backward, so gradients are compared, too.
        """
        self.whole.gathered = None  # the update makes it out of date
        if self.shard.masters_came:
            compare_with_masters(self.shard, self.rank)
        built = self.current()
        self.accord.before_update(
            built, lambda: [*self.standing_facts(), *(facts_of_gradients(built) if by_hook else ())]
        )
        replace_options(self.param_groups, self.shard.optim.param_groups)

    def exchange(
        self, messages: Sequence[Message | Parcel], expected: Sequence[PendingCall | None] = ()
    ) -> None:
        """Send what this rank owns, receive the rest, and learn which ranks could not step."""
        dtype = self.registered.options.broadcast_dtype
        works = start_broadcasts(self.collectives, messages, dtype, expected)
        # With ShardedDataParallel, its next forward may wait for the parameters instead of this step. Rounded
        # values are looked at when they have arrived, so for those this step waits.
        if self.arriving is not None and dtype is None:
            self.arriving.begin(messages, works, self.built.params, self._have_arrived)
            return
        try:
            finish_broadcasts(works, self.built.name)
        finally:
            self.accord.after_update(self.built.owners)  # alarms come before the values of their sender

    def _have_arrived(self) -> None:
        self.accord.after_update(self.built.owners)
        self.accord.check_nothing_lost()

    def _tell_failure(
        self,
        error: Exception,
        messages: Sequence[Message | Parcel],
        expected: Sequence[PendingCall | None],
    ) -> None:
        """Report an error of the local optimizer to the other ranks, and send them the old values.

        If nothing were sent now, the other ranks would take the next step's values for this step's. The class
        may have updated some tensors before it raised: of these the new values are sent.
        Errors of the network are suppressed here, since the caller raises the first error.
        """
        with suppress(RuntimeError):
            if any(message.owner == self.rank for message in self.built.messages):
                self.accord.ring(error)
            self.exchange(messages, expected)

    @_disable_dynamo
    def end_update(self) -> None:
        """Record the update in the versions of parameters, the user's groups and `backward`."""
        # Autograd does not see that a broadcast wrote into parameters, so increment their versions. Frozen
        # parameters have not changed, and a running backward may still need them.
        torch.autograd.graph.increment_version(self.built.trained)
        if self.shard.copies.slices:
            self.shard.copies.note_versions()
        replace_options(self.shard.optim.param_groups, self.param_groups)
        if self.backward.gradients is not WHOLE:
            self.backward.stepped()
        self._opt_called = True  # learning-rate schedulers warn where step() was never called

    def _look_at_gradients(self, closure: Callable[[], Any] | None) -> UserClosure | None:
        """Refuse gradients that a step cannot use; with a closure, after it has computed them.

        Returns:
            The closure in the form that checks its gradients; None if there is none.
        Raises:
            RuntimeError: a gradient scaler cannot work on these gradients; or gradients were changed after
                backward by each rank separately, or after the update that used them.
        """

        def check() -> None:
            self.backward.gradients.check_as_left(self.rank, self.built)

        if self.joined is not None:
            Join.notify_join_context(self)
        check_no_scaler(self, self.backward.gradients)
        if closure is None:
            check()
            return None
        noted = UserClosure(closure, check)
        if self.registered.options.overlap_with_ddp or self.joined is not None:
            # Call the closure now: its backward may make the update, and in a Join the ranks without data
            # repeat the collectives of its backward before those of this step.
            noted.evaluate_now()
        return noted

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset all gradients, as torch's optimizers do."""
        self.shard.drop_gradients(to_zeros=not set_to_none and self.backward.gradients.in_slices)
        super().zero_grad(set_to_none)
        self.backward.zeroed()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # If True, torch.amp.GradScaler calls step() on every rank, so that every rank raises the same error.
        return self.backward.gradients.why_no_scaler is not None and self.scaler is None

    # ---------------------------------------------------------------------------------- with uneven inputs

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Make the hook by which a rank without data continues to update its shard."""
        shadow = join.ShadowStep(self, **kwargs)
        self._shadow = weakref.ref(shadow)
        return shadow

    @property
    def joined(self) -> join.ShadowStep | None:
        """The hook that `Join` runs once this rank has no more data; None outside of a `Join`.

        torch never resets `_join_config`, so a weak reference tells whether the `Join` still exists: its hook
        is freed when the `Join` ends, also by an error.
        """
        return self._shadow() if self._join_config.enable and self._shadow is not None else None

    @property
    def join_device(self) -> torch.device:
        """The device on which `Join` counts the ranks that have data."""
        return self.collectives.control_device

    @property
    def join_process_group(self) -> Any:
        """The process group whose ranks join."""
        return self.process_group

    # ---------------------------------------------------------------------------------- what changes later

    def current(self) -> Built:
        """Return `built`, made anew if parameters were moved, cast or frozen.

        Raises:
            RuntimeError: the groups list other parameters than the plan; this rank must not continue, such as
                after a load that was cut off; the size of a parameter has changed; the local optimizer keeps
                views of parameters that have moved.
            ValueError: `requires_grad` or the dtype of a parameter differs between ranks.
        Collective: all ranks of the group, if `requires_grad` or the dtype of a parameter has changed.
        Cost: one all-gather of 32 bytes, in that case.
        """
        # 1. All new parameters must be here, and equal on all ranks.
        if self.arriving is not None:
            self.arriving.wait()
        if self.accord.uncertain:
            raise RuntimeError(self.accord.uncertain)
        # 2. Take over the user's writes into parameters, before a new plan moves them.
        self.shard.follow()
        # 3. Compare the groups and parameters with the plan.
        if places_of(self.param_groups) != self.built.places:
            self.registered.check_listed(self.param_groups, self.rank)
            plans.follow_parameters(self)
        return self.built

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as in torch's optimizers; earlier parameters keep their owners.

        Raises:
            TypeError, ValueError: as torch's optimizers.
            RuntimeError: with `parameters_as_bucket_view`, the local optimizer keeps views of its parameters.
            If one rank raises, or ranks add different groups, all raise and the optimizer is unchanged.
        Collective: all ranks of the group.
        Cost: one all-gather of 32 bytes.
        """
        if hasattr(self, "shard"):
            plans.add_group(self, param_group)
        else:
            # Optimizer.__init__ calls this for each group. The constructor plans all groups together
            # afterwards.
            self.register(param_group)

    def register(self, param_group: dict[str, Any]) -> None:
        """Check a group as torch does, and list it in `param_groups`, without owners yet."""
        given = options_of(param_group) if isinstance(param_group, dict) else {}  # torch raises below
        super().add_param_group(param_group)
        self.registered.given.append(given)

    # -------------------------------------------------------------------------------------------- its state

    @property  # type: ignore[override]
    def state(self) -> MutableMapping[Any, Any]:
        """This rank's part of the state, by parameter; it may be changed in place, or replaced.

        The state of a parameter that is cut is a `SliceState`, which has the range of its elements.
        Parameters of other ranks have no state here: on a rank that owns nothing, `state` is empty and false.
        Call `consolidate_state_dict` after a change.

        Raises:
            KeyError: this rank has no state of that parameter.
            RuntimeError: this rank has several parts of that parameter; see `parts_of_state`. All ranks
                raise.
        """
        return StateOfParameters(self.shard.states)

    @state.setter
    def state(self, state: Mapping[Any, Any]) -> None:
        if hasattr(self, "shard"):  # torch's constructor, which has none yet, sets an empty state
            self.shard.replace_state(state)
            self.whole.note_change()

    def parts_of_state(self, param: torch.Tensor) -> list[SliceState]:
        """The parts that this rank has of a parameter's state, each with the range of its elements.

        >>> for part in optimizer.parts_of_state(param):                                     # doctest: +SKIP
        ...     part["exp_avg"].mul_(mask.view(-1)[part.start : part.stop])

        Returns:
            One part if the rank owns all of the parameter, an empty list if it owns nothing of the parameter.
        Raises:
            KeyError: `param` is no parameter of this optimizer.
        """
        return self.shard.states.parts(param)

    def consolidate_state_dict(self, to: int | Literal["all"] = 0) -> None:
        """Gather the optimizer state onto one rank, or onto all; then `state_dict()` returns it there.

        Args:
            to: a rank of the group, or "all".
        Raises:
            ValueError: `to` is not a rank of the group, or ranks pass different values.
            TypeError: a value of the state is not a tensor, a number, a string or None, nor a list, tuple or
                dict of these; or it is a list, tuple or dict, and its parameter is cut.
            MemoryError: `to` lacks memory for the state. If one rank raises, all raise.
        Collective: all ranks of the group.
        Cost: `to` receives the (N-1)/N of the state that it does not own, directly into the final tensors in
            CPU memory. Other ranks allocate 256 KiB, to send small tensors together. Three all-gathers of 32
            bytes.
        """
        self.whole.gather(to)

    def state_dict(self) -> dict[str, Any]:
        """The state of the unsharded optimizer, to load into it, or into this one at any world size.

        Its tensors are copies; to change the state, write into `state`, then consolidate again. Before the
        first update or load no consolidation is needed: the state is the one that the constructor makes,
        which is empty for most classes.

        Raises:
            RuntimeError: the state was not consolidated onto this rank since the last update or load; or,
                before the first update, a class that is not torch's makes state in its constructor. So does
                torch's `set_optimizer_state_dict`, where it asks for the keys of a whole state.
        """
        self.registered.check_listed(self.param_groups, self.rank)
        for before_hook in self._optimizer_state_dict_pre_hooks.values():
            before_hook(self)
        state_dict = self.whole.as_gathered()
        for after_hook in self._optimizer_state_dict_post_hooks.values():
            state_dict = after_hook(self, state_dict) or state_dict
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any], *, copy: bool = True) -> None:
        """Load this rank's shard of a whole optimizer's state.

        Args:
            state_dict: from the plain torch optimizer or from a consolidated ZeroRedundancyOptimizer, at any
                world size and partition, or a whole one from FSDP or torch.distributed.checkpoint. If the
                dict and this optimizer have names for parameters, groups and parameters may come in any
                order. This rank's shard is copied, so later steps do not change the dict.
            copy: with False use the dict's tensors as the state, without a copy, where device and dtype fit
                and this rank owns the whole parameter. Later steps change them: do not use the dict again.
                Ranks may choose differently.
        Warns:
            UserWarning: in the next `step`, if masters were loaded and the model's own weights were not.
        Raises:
            ValueError: the dict is not for these parameters; names the first one that does not fit. If one
                rank raises, all raise and the optimizer is unchanged.
        Collective: all ranks of the group, each with the whole dict.
        Cost: one all-gather of 32 bytes.
        """
        self.current()
        with self.whole.loading("load the state dict") as facts:
            for before_hook in self._optimizer_load_state_dict_pre_hooks.values():
                state_dict = before_hook(self, state_dict) or state_dict
            facts += self.whole.load(state_dict, copy)
        for after_hook in self._optimizer_load_state_dict_post_hooks.values():
            after_hook(self)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "a ZeroRedundancyOptimizer cannot be copied or pickled: it communicates with those of the other "
            "ranks. Use consolidate_state_dict() and state_dict(). To copy a model in ShardedDataParallel, "
            "copy its `module`."
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        raise TypeError(
            "a ZeroRedundancyOptimizer takes no __setstate__(), which would give this rank the state of all. "
            "Use load_state_dict(), or assign optimizer.state."
        )

    # ------------------------------------------------------------------------------------- other ranks' view

    def standing_facts(self) -> list[str]:
        """The facts that must be equal on all ranks at any time."""
        return [
            *self.accord.facts(),
            *self.registered.options.facts,
            *self.shard.facts_of_options(self.param_groups),
        ]

    def all_facts(self) -> list[str]:
        """`standing_facts`, and the facts that the constructor has compared."""
        return [*self.standing_facts(), *facts_of(self.param_groups, self.built.specs, self.partition)]

    # ------------------------------------------------------------------------ attributes of the wrapped class

    def _is_own(self, name: str) -> bool:
        """Return whether an attribute is this optimizer's, and not one of the local optimizer."""
        has = vars(self)
        # `accord` is set last: while this optimizer is constructed, all attributes are its own.
        return "accord" not in has or name in has or hasattr(type(self), name) or name in SET_BY_SCALERS

    if not TYPE_CHECKING:  # otherwise a type checker would accept any attribute

        def __getattr__(self, name: str) -> Any:
            if "accord" in vars(self):
                return attribute_of(self, name)
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self
            )

        def __setattr__(self, name: str, value: Any) -> None:
            if self._is_own(name):
                super().__setattr__(name, value)
            else:
                setattr(self.optim, name, value)

        def __delattr__(self, name: str) -> None:
            if self._is_own(name):
                super().__delattr__(name)
            else:
                delattr(self.optim, name)


def listed(given: Any, function: str, otherwise: str = "") -> list[ZeroRedundancyOptimizer]:
    """List the optimizers in an argument that is one optimizer or a sequence of them.

    Args:
        given: the argument.
        function: the name of the function that takes it, for errors.
        otherwise: advice for a caller who passes something else.
    Raises:
        TypeError: the argument holds something other than a ZeroRedundancyOptimizer.
        ValueError: the argument is empty, or holds an optimizer twice.
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
