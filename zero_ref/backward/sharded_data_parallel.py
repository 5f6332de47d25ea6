"""Gradients without DDP: each goes to its owner, and no other rank keeps it. This is stage 2 of ZeRO.

`stairs/owners.py` leaves gradients to DDP, which keeps all of them on every rank. `reduce_to_owners` sends
them to their owners only, but DDP keeps its buckets, as large as all gradients together. The class of this
module stands in DDP's place. It collects gradients in buckets, reduces these while backward goes on, in one
order on all ranks, and takes any partition. `stairs/shards.py` shows the idea in one hook.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zero_ref.backward.arguments import (
    WrapperOptions,
    check_names,
    check_optimizers,
    groups_of,
    listed_optimizers,
    replicas_of,
)
from zero_ref.backward.gradient_buckets import GradientBucket
from zero_ref.backward.hooks import GradientHooks
from zero_ref.backward.shard_reduction import ShardReduction
from zero_ref.comm.agreement import Agreement, facts_of_fields
from zero_ref.comm.collectives import Collectives
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.plan.gradients import BUCKET_NUMEL
from zero_ref.shard.arriving import Arriving


class ShardedDataParallel(nn.Module):
    """A model whose gradients are averaged and kept in shards. A drop-in for FairScale's class of that name.

    >>> model = ShardedDataParallel(model, optimizer)                                # doctest: +SKIP
    >>> model(batch).sum().backward()                                                # doctest: +SKIP
    >>> optimizer.step()                                                             # doctest: +SKIP

    It takes DDP's place around the module. After backward each rank has the averaged gradients of what it
    owns, in `.grad`; `.grad` is None for other parameters. A slice of a parameter has a `.grad` of its own;
    with `scaled` or `may_change` it is in the parameter's, with zeros where other ranks own the rest.
    Several backwards without `optimizer.zero_grad()` add up in the shard. Under `no_sync` they add up on each
    rank, as under DDP, and the next backward outside of it, or `reduce`, reduces the sum.

    A parameter that no rank has used in a backward has no gradient. Every backward reduces all buckets, so
    all ranks must make equally many backwards, and freeze, unfreeze and cast alike. A cast of the module, as
    by `module.to(dtype)`, belongs between a step and the next forward. Not for reentrant activation
    checkpointing, a `Join`, sparse gradients, gradients of gradients, or two wrapped models in one backward.

    The constructor compares options, module and optimizers between all ranks, before anything is sent. Where
    ranks differ, or one raises, all raise; with `replicas` those of all groups.

    Args:
        module: the model. Its trained parameters must all be in the optimizers.
        sharded_optimizer: a ZeroRedundancyOptimizer or OSS, or a list of them.
        process_group: None, or the optimizers' group, which programs written for FairScale pass.
        broadcast_buffers: before each forward in training, rank 0 sends its buffers to all ranks.
        sync_models_at_startup: rank 0 sends its parameters and buffers to all ranks.
        reduce_buffer_size: elements of a bucket, about; a larger parameter has a bucket to itself. Where
            ranks own equal shares of a range, the range is a bucket.
        reduce_dtype: send gradients in this dtype; None for the parameters' own.
        scaled, may_change: as `reduce_to_owners`.
        replicas: the ranks that own the same slices in other groups, if the optimizers' group is one of
            several that train together (hybrid sharding): a process group, or a DeviceMesh of one dimension.
            Shares are averaged over it, so that gradients travel whole within a group, and a share between.
            All groups have the same partition and options, which is compared for every update.
        gather_in_forward: `optimizer.step` returns while new parameters are on their way, and each module
            waits for its own before its forward, its `state_dict` and its `load_state_dict`. Before you read
            a parameter yourself, or compute with one of a module that you do not call, call
            `wait_for_parameters`. Call it before a profile ends too: torch 2.13 may crash if a message of
            Gloo ends under a later profile. An error in another rank's step is raised where this rank waits.
        **fairscale: FairScale's other options. `reduce_fp16=True` is `reduce_dtype=torch.float16`.
            `auto_refresh_trainable` and `warn_on_trainable_params_changed` have no effect: a change of
            `requires_grad` is always noticed, and is no reason for a warning.
    Raises:
        TypeError: an optimizer is not a ZeroRedundancyOptimizer; an option is unknown.
        ValueError: a trained parameter is in none of the optimizers, in two, or in another wrapper; an
            optimizer has one that is not in the module; `replicas` has more ranks of the optimizers' group
            than this one; ranks differ, in the constructor or, with `replicas`, later.
        RuntimeError: another rank could not construct it; (in forward) inside a `Join`, or a gradient
            requires a gradient; (in backward) gradients cannot be added to those that are there, or came
            twice; (in both) another rank is elsewhere, such as in a step that this rank has left out. Ranks
            find that out for updates 1, 2, 4, 8, ...; in between they wait for each other.
    Collective: all ranks of the group construct it together, and run forward and backward together; with
        `replicas` those of all groups.
    Cost: in a backward each rank sends (N-1)/N of its gradients, and four bytes for each parameter; with R
        `replicas` also 2(R-1)/R of its share. An all-gather of 32 bytes when it is constructed, and for
        updates 1, 2, 4, 8, ... in each backward and in each forward that sends buffers. With `replicas` each
        of these comparisons also goes over them, and is made for every update, though in forward and
        backward only if control messages are on the CPU. A rank holds its own gradients, and up to two
        buckets with their messages: of a bucket the owner of a part receives N-1 copies of it. Buckets that
        are full before their turn are held as well.
    Source: the interface of fairscale.nn.data_parallel.ShardedDataParallel 0.4.13.
    """

    def __init__(
        self,
        module: nn.Module,
        sharded_optimizer: ZeroRedundancyOptimizer | Sequence[ZeroRedundancyOptimizer],
        process_group: dist.ProcessGroup | Collectives | None = None,
        *,
        broadcast_buffers: bool = True,
        sync_models_at_startup: bool = True,
        reduce_buffer_size: int = BUCKET_NUMEL,
        reduce_dtype: torch.dtype | None = None,
        scaled: bool = False,
        may_change: bool = False,
        replicas: dist.ProcessGroup | DeviceMesh | Collectives | None = None,
        gather_in_forward: bool = False,
        **fairscale: bool,
    ) -> None:
        super().__init__()
        self.module = module
        self.sharded_optimizers = listed_optimizers(sharded_optimizer)
        self.broadcast_buffers, self.require_backward_grad_sync = broadcast_buffers, True
        self.replicas: Collectives | None = None
        self._reductions: list[ShardReduction] = []
        # The buckets of each optimizer; all of them, in the order in which all ranks reduce them.
        self._ordered: tuple[list[list[GradientBucket]], list[tuple[ShardReduction, GradientBucket]]]
        self._ordered = [], []
        # The buckets of the running backward that are not reduced yet, in order; None under no_sync.
        self._waiting: list[tuple[ShardReduction, GradientBucket]] | None = None
        self._task, self._in_backward = -1, False
        self._sent_kinds: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}

        # 1. Check the arguments. Until all ranks agree, nothing in the module or the optimizers is changed or
        # sent, so an error of this rank waits for the agreement.
        facts: list[str] | Exception
        try:
            if replicas is not None:  # first: from now on an error reaches their groups, too
                self.replicas = replicas_of(self.sharded_optimizers, replicas)
            check_names(fairscale)
            options = WrapperOptions(
                broadcast_buffers=broadcast_buffers,
                sync_models_at_startup=sync_models_at_startup,
                reduce_buffer_size=reduce_buffer_size,
                reduce_dtype=reduce_dtype,
                scaled=scaled,
                may_change=may_change,
                gather_in_forward=gather_in_forward,
                replicas=replicas is not None,
                **fairscale,
            )
            check_optimizers(self.sharded_optimizers, process_group)
            self._reductions = [
                ShardReduction(zero, options, self.replicas) for zero in self.sharded_optimizers
            ]
            self._hooks = GradientHooks(
                weakref.ref(self), self._reductions, options.dtype, *_callbacks(weakref.ref(self))
            )
            self._hooks.lacking(module)
            facts = self._facts(options)
        except Exception as error:
            facts = error
        # 2. Agree with all ranks of all groups.
        self._agree(facts, process_group)
        # 3. Put hooks on the parameters, and start from rank 0's values.
        self.refresh_trainable()
        for zero in self.sharded_optimizers:
            zero.accord.replicas = self.replicas
            if gather_in_forward:
                zero.arriving = zero.arriving or Arriving()
                zero.arriving.watch(module)
        if sync_models_at_startup:
            self._broadcast([*module.parameters(), *module.buffers()])

    # Programs read these attributes of DistributedDataParallel and of FairScale's class.
    find_unused_parameters = True

    @property
    def process_group(self) -> Any:
        """The group of the first optimizer."""
        return self.sharded_optimizers[0].process_group

    @property
    def device(self) -> torch.device:
        """The device of the first parameter."""
        return next(self.module.parameters()).device

    @property
    def device_type(self) -> str:
        """The type of `device`, as in FairScale."""
        return self.device.type

    @property
    def is_multi_device_module(self) -> bool:
        """Whether parameters are on several devices, as in FairScale."""
        return len({param.device for param in self.module.parameters()}) > 1

    # ---------------------------------------------------------------------------------------------- the model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, after buffers were sent."""
        if self.broadcast_buffers and self.training and self.require_backward_grad_sync:
            self._send_buffers()
        if torch.is_grad_enabled():
            if any(zero.joined for zero in self.sharded_optimizers):
                raise RuntimeError(
                    "ShardedDataParallel has no hooks for a Join, so a rank without data would leave the "
                    "others waiting in backward. Give all ranks as many batches, or use "
                    "DistributedDataParallel."
                )
            self.refresh_trainable()
            self._hooks.check_no_graph()
            if torch._C._current_graph_task_id() == -1:  # else it is computed again, in a backward
                self._in_backward = False  # the last one may have been cut off by an error
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context in which backwards add up on each rank and nothing is sent."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def reduce(self) -> None:
        """Average the gradients that backwards under `no_sync` have added up, without a further backward.

        Raises: as a backward.
        Collective: all ranks of the group.
        """
        self._begin_reductions()
        self._end_backward()

    def wait_for_parameters(self) -> None:
        """Wait for the new parameters of the last step, which `gather_in_forward` leaves on their way."""
        for zero in self.sharded_optimizers:
            if zero.arriving is not None:
                zero.arriving.wait()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of the model, by its optimizers."""
        self._in_backward = False
        super().zero_grad(set_to_none)
        for reduction in self._reductions:
            reduction.drop()
            reduction.zero.zero_grad(set_to_none)

    def sync_buffers(self, blocking: bool = False) -> None:
        """Rank 0 sends its buffers to all ranks. Collective: all ranks of the group."""
        self._broadcast(self.module.buffers())

    def __getattr__(self, name: str) -> Any:
        """Attributes that the wrapper does not have are the module's, as in FairScale."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def refresh_trainable(self) -> None:
        """Put hooks on parameters that are trained now, or were cast. Each forward does this by itself.

        Raises:
            ValueError, RuntimeError: as the constructor.
        """
        self._hooks.attach(self.module)

    def _facts(self, options: WrapperOptions) -> list[str]:
        """The lines that must be equal on all ranks of all groups: options, the module, the optimizers."""
        facts = facts_of_fields(options)
        for name, param in self.module.named_parameters():
            facts.append(
                f"parameter {name} of the module: shape {tuple(param.shape)}, {param.dtype}, "
                f"requires_grad={param.requires_grad}"
            )
        if options.broadcast_buffers or options.sync_models_at_startup:
            for name, buffer in self.module.named_buffers():
                facts.append(f"buffer {name}: shape {tuple(buffer.shape)}, {buffer.dtype}")
        facts.append(f"optimizers: {', '.join(zero.accord.what for zero in self.sharded_optimizers)}")
        for zero in self.sharded_optimizers:
            facts += zero.all_facts()
        return facts

    def _agree(
        self, facts: list[str] | Exception, process_group: dist.ProcessGroup | Collectives | None
    ) -> None:
        """Compare the facts between all ranks of all groups. If one rank has an error, all ranks raise."""
        for comm in groups_of(self.sharded_optimizers, process_group):
            try:
                Agreement(comm).agree("construct ShardedDataParallel", facts, replicas=self.replicas)
            except Exception as error:
                facts = error  # the next groups hear of it
        if isinstance(facts, Exception):
            raise facts

    def _send_buffers(self) -> None:
        buffers = dict(self.module.named_buffers())
        kinds = {name: (one.dtype, tuple(one.shape)) for name, one in buffers.items()}
        if buffers:
            self.sharded_optimizers[0].accord.compare(
                "run a forward for",
                lambda: [f"buffer {name}: {dtype}, shape {shape}" for name, (dtype, shape) in kinds.items()],
                anyway=kinds != self._sent_kinds,
            )
        self._sent_kinds = kinds
        self._broadcast(buffers.values())

    @torch.no_grad()
    def _broadcast(self, tensors: Iterable[torch.Tensor]) -> None:
        sent = []
        for tensor in tensors:
            sent.append((tensor, tensor.detach() if tensor.is_contiguous() else tensor.detach().clone()))
        for comm in (self.replicas, self._reductions[0].comm):  # to other groups, then within
            for work in [comm.broadcast(flat, 0) for _, flat in sent] if comm is not None else ():
                work.wait()
        for tensor, flat in sent:
            if flat.data_ptr() != tensor.data_ptr():
                tensor.copy_(flat)
            torch.autograd.graph.increment_version(tensor)  # Gloo does not

    # ------------------------------------------------------------------------------------------ a backward

    def _begin_backward(self, task: int) -> None:
        """Begin a backward, before its first gradient is added to a parameter's.

        Args:
            task: autograd's number of the backward.
        """
        if self._in_backward or task < self._task:
            raise RuntimeError(
                "a backward came within another one, or the last one did not come to its end. Reentrant "
                "activation checkpointing makes one within another: pass use_reentrant=False. After an error "
                "call zero_grad() of this ShardedDataParallel."
            )
        self._task, self._in_backward, self._waiting = task, True, None
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        if self.require_backward_grad_sync:
            self._begin_reductions()
        else:
            self._check_none_averaged()

    def _check_none_averaged(self) -> None:
        """Refuse a backward under `no_sync` where averages are, which are not this rank's own gradients."""
        for zero in self.sharded_optimizers:
            if zero.backward.gradients.versions is None:
                continue
            if all(param.grad is None for param in zero.built.params):
                zero.backward.zeroed()
                continue
            raise RuntimeError(
                "a backward under no_sync() would add this rank's own gradients to averaged ones that are "
                "still there. Call optimizer.zero_grad() before it, or run it outside of no_sync()."
            )

    def _begin_reductions(self) -> None:
        """Compare with other ranks what changed, and expect gradients in all buckets."""
        buckets = []
        for reduction in self._reductions:
            reduction.begin()
            buckets.append(reduction.buckets)
        if buckets != self._ordered[0]:
            self._ordered = buckets, self._in_order()
        self._waiting = list(self._ordered[1])

    def _end_backward(self) -> None:
        """Reduce the buckets that are left, and give this rank the gradients of what it owns."""
        self._in_backward = False
        if self._waiting is None:
            return
        # Also the buckets that lack a gradient, since other ranks may have it.
        while self._waiting:
            reduction, bucket = self._waiting.pop(0)
            reduction.reduce(bucket)
        for reduction in self._reductions:
            reduction.count()
        for reduction in self._reductions:
            reduction.end()
        self._waiting = None

    def _in_order(self) -> list[tuple[ShardReduction, GradientBucket]]:
        """The buckets of all optimizers, those of the last parameters first: the same on all ranks."""
        buckets = [(reduction, bucket) for reduction in self._reductions for bucket in reduction.buckets]
        params = enumerate(self.module.parameters())
        places: dict[torch.Tensor, int] = {param: place for place, param in params}
        return sorted(buckets, key=lambda one: -min(places.get(param, 0) for param in one[1].params.values()))


def _callbacks(
    this: weakref.ref[ShardedDataParallel],
) -> tuple[Callable[..., None], Callable[[torch.Tensor], None]]:
    """The hooks before and after a gradient is added. They run for every parameter, and so do little."""
    task_now = torch._C._current_graph_task_id

    def before(*_: Any) -> None:
        wrapper = this()
        if wrapper is not None and wrapper._task != (task := task_now()):
            wrapper._begin_backward(task)

    def after(param: torch.Tensor) -> None:
        wrapper = this()
        if wrapper is None:
            return
        if wrapper._task != task_now():  # a cast has removed the hook that runs before
            raise RuntimeError(
                "parameters were cast, and their ShardedDataParallel has not run a forward since, so it has "
                "not begun this backward. Compute the loss by it, or call refresh_trainable() after a cast."
            )
        waiting = wrapper._waiting
        if waiting is None:  # under no_sync
            return
        # Move the gradient to its bucket, and reduce the buckets whose turn has come.
        reduction, number = wrapper._hooks.place_of[param]
        reduction.take(number, param)
        while waiting and not waiting[0][1].missing:
            reduction, bucket = waiting.pop(0)
            reduction.reduce(bucket)

    return before, after
