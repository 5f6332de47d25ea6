"""Gradients without DDP: each goes to a flat bucket, and a full bucket goes to the owners of its elements.

`minimal.py` leaves gradients to DDP, which keeps all of them on every rank. `reduce_to_owners` sends them to
their owners only, but DDP keeps its buckets, as large as all gradients together. `ShardedDataParallel` stands
in DDP's place: a hook on each parameter copies its gradient to a bucket and releases it. Buckets are reduced
in one order on all ranks, and after backward a rank has the gradients of what it owns, and nothing else.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zero_ref.backward.gradient_buckets import GradientBucket, Memory
from zero_ref.backward.reduction import gradients_to_watch, share_infinities
from zero_ref.comm.agreement import agree
from zero_ref.comm.backend import as_collectives
from zero_ref.comm.collectives import Collectives, PendingCall
from zero_ref.comm.process_group import BACKWARD_TAG, ProcessGroupCollectives, global_ranks
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.plan.gradients import BUCKET_NUMEL, GradientPlan, gradient_plans
from zero_ref.plan.partition import Slice
from zero_ref.shard.buckets import flat_like


class ShardReduction:
    """The buckets of one optimizer's parameters, from one backward to the next.

    Args:
        zero: the optimizer.
        cap: elements of a bucket, about; a larger parameter has a bucket to itself. Where ranks own equal
            shares of a range, that is a bucket.
        dtype: of what is sent; None for the parameters' own.
        scaled, may_change: as `reduce_to_owners`.
        replicas, keep_memory: as `ShardedDataParallel`.
    """

    def __init__(
        self,
        zero: ZeroRedundancyOptimizer,
        cap: int,
        dtype: torch.dtype | None,
        scaled: bool,
        may_change: bool,
        replicas: Collectives | None,
        keep_memory: bool,
    ) -> None:
        self.zero, self.cap, self.dtype, self.replicas = zero, max(cap, 1), dtype, replicas
        self.comm = _apart_from(zero.collectives)
        self.scaled, self.may_change = scaled, may_change
        self.buckets: list[GradientBucket] = []
        self.bucket_of: dict[int, GradientBucket] = {}
        self._memory = Memory(keep_memory)
        self._before: set[Slice] = set()
        self._of_frozen: dict[Slice, torch.Tensor] = {}  # gradients that stay as they are
        self._unused: set[int] = set()
        self._open = False
        self._planned_for: object = None
        self._under_way: list[GradientBucket] = []
        self._averaged: list[GradientBucket] = []
        self._counting: tuple[torch.Tensor, PendingCall] | None = None

    def _plan(self) -> None:
        """Make the buckets for the current owners and for the parameters that are trained now.

        Raises:
            ValueError, RuntimeError: as `ZeroRedundancyOptimizer.current`; ranks differ, or one is to do
                something else, such as a step that this rank has left out.
        """
        zero = self.zero
        zero.accord.compare("run a backward for", lambda: zero.current().facts)
        built = zero.current()
        if built is self._planned_for:
            return
        self._planned_for = built
        self._memory = Memory(self._memory.keeps)  # other buckets need other sizes
        plans = gradient_plans(built.partition, built.specs, self.cap)
        self.buckets = [self._bucket(plan) for plan in plans]
        self.bucket_of = {number: bucket for bucket in self.buckets for number in bucket.params}

    def _bucket(self, plan: GradientPlan) -> GradientBucket:
        params = {number: self.zero.built.params[number] for number in plan.starts}
        dtype = self.dtype or next(iter(params.values())).dtype
        return GradientBucket(params, plan, dtype, self.comm, self.replicas, self._memory)

    def begin(self) -> None:
        """A backward has begun: put the gradients of earlier ones aside, to which it will add.

        Raises:
            RuntimeError: they are no longer on their owners, or were lost with a backward that raised.
        """
        zero = self.zero
        lost, self._open = self._open and bool(self._before), False
        if lost:
            raise RuntimeError(
                f"rank {zero.rank}: the last backward did not come to its end, and the gradients to which it "
                "was to add are lost. Call zero_grad() and begin the accumulation again."
            )
        gradients = zero.backward.gradients
        has_gradients = any(param.grad is not None for param in zero.built.params)
        if gradients.why_no_clipping is not None and has_gradients:
            raise RuntimeError(f"rank {zero.rank}: {gradients.why_no_clipping}")
        self._plan()
        self._open = True
        zero.backward.begin(adds=True)  # waits for what a backward that raised has left
        self._before, self._unused, self._under_way, self._averaged = set(), set(), [], []
        hidden = gradients.parts  # None where `.grad` has all
        self._of_frozen = {
            piece: part for piece, part in (hidden or {}).items() if piece.param not in self.bucket_of
        }
        for bucket in self.buckets:
            bucket.begin()
            if gradients.versions is not None:
                self._put_aside(bucket, hidden, gradients.flats.get(bucket))

    def _put_aside(
        self, bucket: GradientBucket, hidden: Mapping[Slice, torch.Tensor] | None, flat: torch.Tensor | None
    ) -> None:
        """Take what earlier backwards have left of a bucket: it lies in `flat`, if that has the same plan."""
        left: dict[Slice, torch.Tensor] = {}
        for piece, _ in bucket.own:
            param = bucket.params[piece.param]
            if hidden is not None and piece.numel != param.numel():
                if piece in hidden:
                    left[piece] = hidden[piece]
            elif param.grad is not None:
                left[piece] = flat_like(param.grad, param)[piece.start : piece.stop]
        for param in bucket.params.values():
            param.grad = None
        if not left:
            return
        bucket.gradient = bucket.new_gradient().zero_() if flat is None else flat
        for piece, window in bucket.parts():
            if piece not in left:
                window.zero_()
            elif window.data_ptr() != left[piece].data_ptr():
                window.copy_(left[piece])
        self._before |= left.keys()

    @property
    def _is_shown(self) -> bool:
        """Gradients of parameters that are cut are in `.grad`, with zeros where other ranks own them."""
        return self.scaled or self.may_change

    def take(self, number: int, param: torch.Tensor) -> None:
        """Copy a complete gradient to its bucket, and release it."""
        bucket, grad = self.bucket_of[number], param.grad
        assert grad is not None
        if bucket.sent or number not in bucket.missing:
            raise RuntimeError(
                f"{self._title(number)} got a second gradient in one backward. Reentrant activation "
                "checkpointing does this: pass use_reentrant=False."
            )
        if grad.layout != torch.strided:
            raise ValueError(
                f"{self._title(number)} has a sparse gradient, which has no place in a flat bucket. "
                "Construct its layer with sparse=False, or use DistributedDataParallel."
            )
        check_no_graph(grad)
        bucket.take(number, grad)
        param.grad = None

    def _title(self, number: int) -> str:
        return f"rank {self.zero.rank}: parameter {self.zero.built.name(number)}"

    @torch.no_grad()
    def reduce(self, bucket: GradientBucket) -> None:
        """Start to reduce a bucket, and complete the one before it, which has had time to arrive."""
        for number in sorted(bucket.missing):
            param = bucket.params[number]
            if param.grad is not None:  # of earlier backwards under no_sync, and not used in this one
                bucket.take(number, param.grad)
                param.grad = None
        self._unused |= bucket.missing
        bucket.reduce()
        self.zero.backward.under_way.append(bucket)
        self._under_way.append(bucket)
        self._complete(leave=1)

    def count(self) -> None:
        """All buckets are on their way: start to count on how many ranks each parameter had a gradient."""
        comm = self.comm
        if comm.world_size > 1 or self.replicas is not None:
            had = torch.ones(len(self.bucket_of), dtype=torch.int32, device=comm.control_device)
            for place, number in enumerate(self.bucket_of):
                if number in self._unused:
                    had[place] = 0  # by a kernel: to copy a list to an accelerator would wait for it
            self._counting = had, comm.all_reduce(had)

    def _complete(self, leave: int = 0) -> None:
        while len(self._under_way) > leave:
            bucket = self._under_way.pop(0)
            bucket.average()
            self._averaged.append(bucket)
        while len(self._averaged) > leave * (self.replicas is not None):
            bucket = self._averaged.pop(0)
            bucket.add_up()
            self.zero.backward.under_way.remove(bucket)

    @torch.no_grad()
    def end(self) -> None:
        """Wait for all buckets, and give owners their gradients."""
        zero = self.zero
        self._complete()
        nowhere = self._used_nowhere()
        hidden = dict(self._of_frozen)
        flats = {bucket: flat for bucket in self.buckets if (flat := bucket.gradient) is not None}
        watched: dict[torch.Tensor, None] = {}
        used = set()
        for bucket in flats:
            for piece, part in bucket.parts():
                if piece.param in nowhere and piece not in self._before:
                    continue
                param = bucket.params[piece.param]
                used.add(piece.param)
                if piece.numel == param.numel():
                    param.grad = part.as_strided(param.size(), param.stride(), part.storage_offset())
                elif not self._is_shown:
                    hidden[piece] = part
                    continue
                else:
                    if param.grad is None:
                        param.grad = torch.zeros_like(param, requires_grad=False)
                    flat_like(param.grad, param)[piece.start : piece.stop] = part
                watched[param] = None
        own = gradients_to_watch(zero, watched, parts_apart=not self._is_shown)
        if self.scaled:
            share_infinities(self.comm, own)
        self.drop()
        parts = None if self._is_shown else hidden
        zero.backward.end_on_owners(watched, frozenset(used), self.scaled, self.may_change, parts, flats)

    def _used_nowhere(self) -> set[int]:
        """The numbers of the parameters that had a gradient on no rank."""
        if self._counting is None:
            return self._unused
        had, work = self._counting
        work.wait()
        if self.replicas is not None:
            had = had.to(self.replicas.control_device)
            self.replicas.all_reduce(had).wait()
        counts = had.tolist() if self._unused else []
        return {number for number, count in zip(self.bucket_of, counts) if not count}

    def drop(self) -> None:
        """Free what a backward holds; one that did not come to its end is forgotten."""
        self._before, self._unused, self._open, self._counting = set(), set(), False, None
        self._of_frozen = {}
        self._memory.release()
        for bucket in self.buckets:
            bucket.drop()


def check_no_graph(grad: torch.Tensor | None) -> None:
    """Refuse gradients of which autograd keeps a graph, since a bucket has none.

    Raises:
        RuntimeError: the gradient requires a gradient.
    """
    if grad is not None and grad.requires_grad:
        raise RuntimeError(
            "a gradient requires a gradient itself, as backward(create_graph=True) makes it, and its average "
            "could not. Use torch.autograd.grad for gradients of gradients, and call zero_grad() here."
        )


class ShardedDataParallel(nn.Module):
    """A model whose gradients are averaged and kept in shards. A drop-in for FairScale's class of that name.

    >>> model = ShardedDataParallel(model, optimizer)                                # doctest: +SKIP
    >>> model(batch).sum().backward()                                                # doctest: +SKIP
    >>> optimizer.step()                                                             # doctest: +SKIP

    It takes DDP's place around the module. After backward each rank has the averaged gradients of what it
    owns, in `.grad`; `.grad` is None for other parameters. The gradient of a part of a parameter is kept
    beside it, or, with `scaled` or `may_change`, in `.grad` with zeros where other ranks own the rest.
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
        process_group: must be the optimizers' group, or None.
        broadcast_buffers: before each forward in training, rank 0 sends its buffers to all ranks.
        sync_models_at_startup: rank 0 sends its parameters and buffers to all ranks.
        reduce_buffer_size: elements of a bucket.
        auto_refresh_trainable, warn_on_trainable_params_changed: accepted and not used: a change of
            `requires_grad` is seen by itself.
        reduce_fp16: send gradients as float16.
        reduce_dtype: send gradients in this dtype.
        scaled, may_change: as `reduce_to_owners`.
        keep_memory: keep the memory of this rank's gradients, and of two buckets, from one backward to the
            next. On a CPU new memory for them takes longer than the update. After `zero_grad`, a gradient
            that you hold is then overwritten, as under DDP's `gradient_as_bucket_view`.
        replicas: the ranks that own the same slices in other groups, if the optimizers' group is one of
            several that train together (hybrid sharding): a process group, or a DeviceMesh of one dimension.
            Shares are averaged over it, so that gradients travel whole within a group, and a share between.
            All groups have the same partition and options, which is compared for every update.
        gather_in_forward: `optimizer.step` returns while new parameters are on their way, and each module
            waits for its own before its forward, its `state_dict` and its `load_state_dict`. Before you read
            a parameter yourself, or compute with one of a module that you do not call, call
            `wait_for_parameters`. An error in another rank's step is raised where this rank waits.
    Raises:
        TypeError: an optimizer is not a ZeroRedundancyOptimizer.
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
        broadcast_buffers: bool = True,
        sync_models_at_startup: bool = True,
        reduce_buffer_size: int = BUCKET_NUMEL,
        auto_refresh_trainable: bool = True,
        reduce_fp16: bool = False,
        warn_on_trainable_params_changed: bool = True,
        *,
        scaled: bool = False,
        may_change: bool = False,
        gather_in_forward: bool = False,
        keep_memory: bool = False,
        replicas: dist.ProcessGroup | DeviceMesh | Collectives | None = None,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        given = sharded_optimizer
        self.sharded_optimizers = (
            [given]
            if isinstance(given, torch.optim.Optimizer) or not isinstance(given, Iterable)
            else list(given)
        )
        self.broadcast_buffers, self.require_backward_grad_sync = broadcast_buffers, True
        self.replicas: Collectives | None = None
        self._task, self._in_backward, self._syncing = -1, False, True
        self._sent_in = torch.float16 if reduce_fp16 else reduce_dtype
        self._ordered: list[tuple[ShardReduction, GradientBucket]] = []
        self._waiting: list[tuple[ShardReduction, GradientBucket]] = []  # in the order of their reductions
        self._hooked: dict[torch.Tensor, tuple[Any, Any]] = {}  # the node that accumulates, and a handle
        self._place_of: dict[torch.Tensor, tuple[ShardReduction, int]] = {}
        self._reductions: list[ShardReduction] = []
        self._sent_kinds: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        options = {
            "reduce_fp16": reduce_fp16,
            "reduce_dtype": reduce_dtype,
            "reduce_buffer_size": reduce_buffer_size,
            "broadcast_buffers": broadcast_buffers,
            "sync_models_at_startup": sync_models_at_startup,
            "scaled": scaled,
            "may_change": may_change,
            "gather_in_forward": gather_in_forward,
            "replicas": None if replicas is None else "given",
        }

        # Until all ranks agree, nothing in the module or the optimizers is changed or sent.
        facts: list[str] | Exception
        try:
            if replicas is not None:  # first: from now on an error reaches their groups, too
                self.replicas = _replicas_of(self.sharded_optimizers, replicas)
            _check_dtype(self._sent_in)
            _check_optimizers(self.sharded_optimizers, process_group, gather_in_forward)
            self._reductions = [
                ShardReduction(
                    zero, reduce_buffer_size, self._sent_in, scaled, may_change, self.replicas, keep_memory
                )
                for zero in self.sharded_optimizers
            ]
            self._without_hooks()
            facts = self._facts(options)
        except Exception as error:
            facts = error
        for comm in _groups_of(self.sharded_optimizers, process_group):
            try:
                agree(comm, "construct ShardedDataParallel", facts, replicas=self.replicas)
            except Exception as error:
                facts = error
        if isinstance(facts, Exception):
            raise facts

        self.refresh_trainable()
        for zero in self.sharded_optimizers:
            zero.accord.replicas = self.replicas
            if gather_in_forward:
                zero.arriving.watch(module)
        if sync_models_at_startup:
            self._broadcast([*module.parameters(), *module.buffers()])

    # What programs read of DistributedDataParallel.
    find_unused_parameters = True

    @property
    def process_group(self) -> Any:
        """The group of the first optimizer."""
        return self.sharded_optimizers[0].process_group

    @property
    def device(self) -> torch.device:
        """Where the first parameter is."""
        return next(self.module.parameters()).device

    @property
    def device_type(self) -> str:
        """As FairScale's: the kind of `device`."""
        return self.device.type

    @property
    def is_multi_device_module(self) -> bool:
        """As FairScale's: parameters are on several devices."""
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
            for param in self._hooked:
                check_no_graph(param.grad)
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
        self._begin()
        self._end()

    def wait_for_parameters(self) -> None:
        """Wait until the new parameters of the last step are here: with `gather_in_forward`."""
        for zero in self.sharded_optimizers:
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
        """As FairScale's: what the wrapper does not have is the module's."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def refresh_trainable(self) -> None:
        """Note which parameters are trained now, and which were cast. Each forward does this by itself.

        Raises:
            ValueError, RuntimeError: as the constructor.
        """
        for param in self._without_hooks():
            self._hook(param)

    @torch.enable_grad()
    def _without_hooks(self) -> list[nn.Parameter]:
        """The trained parameters that have no hooks yet, or lost them: a cast gives a parameter a new node.

        Raises:
            ValueError: one of them has no owner, or several.
        """
        if len(self._place_of) != sum(len(zero.built.params) for zero in self.sharded_optimizers):
            self._place_of = {}
            for reduction in self._reductions:
                for number, param in enumerate(reduction.zero.built.params):
                    if param in self._place_of:
                        raise ValueError(
                            f"parameter {reduction.zero.built.name(number)} is in two of the optimizers."
                        )
                    self._place_of[param] = reduction, number
            inside = set(self.module.parameters())
            for param, (reduction, number) in self._place_of.items():
                if param.requires_grad and param not in inside:
                    raise ValueError(
                        f"parameter {reduction.zero.built.name(number)} of the optimizer is not in the "
                        "module, so its gradients would not be averaged. Give it an optimizer of its own."
                    )
        found = []
        for name, param in self.module.named_parameters():
            if param.requires_grad and self._hooked.get(param, (None, None))[0] is not _accumulator(param):
                if param not in self._place_of:
                    raise ValueError(
                        f"parameter {name} is trained, and no optimizer has it, so it has no owner. Give the "
                        "optimizer all parameters of the model, or set its requires_grad to False."
                    )
                if self._sent_in is not None and not self._sent_in.is_complex and param.is_complex():
                    option = "reduce_fp16=True" if self._sent_in == torch.float16 else "reduce_dtype="
                    raise ValueError(f"parameter {name} is complex, and {option} would drop a part of it.")
                if getattr(param, "_sharded_by", lambda: None)() not in (None, self):
                    raise ValueError(
                        f"parameter {name} is in another ShardedDataParallel. Use that one, or delete it "
                        "first."
                    )
                found.append(param)
        return found

    def _facts(self, options: Mapping[str, Any]) -> list[str]:
        """What must be equal on all ranks, also of other groups: options, the module, the optimizers."""
        facts = [f"{name}={value}" for name, value in options.items()]
        for name, param in self.module.named_parameters():
            facts.append(
                f"parameter {name} of the module: shape {tuple(param.shape)}, {param.dtype}, "
                f"requires_grad={param.requires_grad}"
            )
        if options["broadcast_buffers"] or options["sync_models_at_startup"]:
            for name, buffer in self.module.named_buffers():
                facts.append(f"buffer {name}: shape {tuple(buffer.shape)}, {buffer.dtype}")
        facts.append(f"optimizers: {', '.join(zero.accord.what for zero in self.sharded_optimizers)}")
        for zero in self.sharded_optimizers:
            facts += zero.all_facts()
        return facts

    @torch.enable_grad()
    def _hook(self, param: nn.Parameter) -> None:
        """Be called before and after a gradient is added to the parameter's. The hooks do not keep `self`."""
        param._sharded_by = this = weakref.ref(self)  # type: ignore[attr-defined]

        def before(*_: Any) -> None:
            if (alive := this()) is not None:
                alive._before_gradient()

        def after(param: torch.Tensor) -> None:
            if (alive := this()) is not None:
                alive._after_gradient(param)

        _, earlier = self._hooked.get(param, (None, None))
        if earlier is not None:
            earlier.remove()
        # A hook on the tensor would be called by torch.autograd.grad, too.
        node = _accumulator(param)
        node.register_prehook(before)
        self._hooked[param] = node, param.register_post_accumulate_grad_hook(after)

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

    def _before_gradient(self) -> None:
        """Called before each gradient is added to a parameter's: before the first, begin."""
        task = torch._C._current_graph_task_id()
        if self._in_backward and task == self._task:
            return
        if self._in_backward or task < self._task:
            raise RuntimeError(
                "a backward came within another one, or the last one did not come to its end. Reentrant "
                "activation checkpointing makes one within another: pass use_reentrant=False. After an error "
                "call zero_grad() of this ShardedDataParallel."
            )
        self._task, self._in_backward = task, True
        torch.autograd.Variable._execution_engine.queue_callback(self._end)
        if self.require_backward_grad_sync:
            self._begin()
            return
        self._syncing = False
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

    def _begin(self) -> None:
        self._syncing = True
        for reduction in self._reductions:
            reduction.begin()
        self._waiting = self._in_order()

    def _after_gradient(self, param: torch.Tensor) -> None:
        if self._syncing:
            reduction, number = self._place_of[param]
            reduction.take(number, param)
            while self._waiting and not self._waiting[0][1].missing:
                self._reduce_next()

    def _reduce_next(self) -> None:
        reduction, bucket = self._waiting.pop(0)
        reduction.reduce(bucket)

    def _end(self) -> None:
        self._in_backward = False
        if self._syncing:
            while self._waiting:
                self._reduce_next()
            for reduction in self._reductions:
                reduction.count()
            for reduction in self._reductions:
                reduction.end()

    def _in_order(self) -> list[tuple[ShardReduction, GradientBucket]]:
        """The buckets of all optimizers, those of the last parameters first: the same on all ranks."""
        buckets = [(reduction, bucket) for reduction in self._reductions for bucket in reduction.buckets]
        if {bucket for _, bucket in buckets} != {bucket for _, bucket in self._ordered}:
            params = enumerate(self.module.parameters())
            places: dict[torch.Tensor, int] = {param: place for place, param in params}
            self._ordered = sorted(
                buckets, key=lambda one: -min(places.get(param, 0) for param in one[1].params.values())
            )
        return list(self._ordered)


def _accumulator(param: torch.Tensor) -> Any:
    """Autograd's node that adds to the parameter's gradient. It keeps its hooks as long as it is kept."""
    return param.view_as(param).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


def _apart_from(comm: Collectives) -> Collectives:
    """The same calls, and the same observers, by messages that never meet those of a step."""
    other = copy.copy(comm)
    if isinstance(other, ProcessGroupCollectives):
        other.tag += BACKWARD_TAG
    return other


def _groups_of(
    optimizers: Iterable[Any], process_group: dist.ProcessGroup | Collectives | None
) -> list[Collectives]:
    """The groups of the optimizers, each once; if there is no optimizer, the group that was passed in."""
    groups = {
        getattr(zero.collectives, "group", zero.collectives): zero.collectives
        for zero in optimizers
        if isinstance(zero, ZeroRedundancyOptimizer)
    }
    if not groups:
        with contextlib.suppress(Exception):
            return [as_collectives(process_group)]
    return [*groups.values()]


def _replicas_of(
    optimizers: Sequence[Any], replicas: dist.ProcessGroup | DeviceMesh | Collectives
) -> Collectives:
    """The calls to the replicas.

    Raises:
        ValueError: they have more ranks of the optimizers' group than this one.
    """
    comm = as_collectives(replicas)
    for zero in optimizers:
        own = getattr(zero, "collectives", None)
        if not isinstance(own, ProcessGroupCollectives) or not isinstance(comm, ProcessGroupCollectives):
            continue  # of other networks the place in the group tells
        ours, theirs = global_ranks(own), global_ranks(comm)
        is_same = own.group is comm.group and dist.get_world_size() > 1
        if is_same or len(set(ours) & set(theirs)) > 1:
            raise ValueError(
                f"replicas is the group of ranks {theirs}, and the optimizer shards over {ours}: only this "
                "rank may be in both. Pass the ranks that own the same slices in other groups, such as "
                'mesh["replicas"] beside mesh["shard"].'
            )
    return comm


def _check_dtype(dtype: Any) -> None:
    is_fit = isinstance(dtype, torch.dtype) and (dtype.is_floating_point or dtype.is_complex)
    if dtype is not None and not is_fit:
        raise ValueError(
            f"reduce_dtype takes a floating-point dtype such as torch.bfloat16, not {dtype!r}, which has no "
            "fractions for an average."
        )


def _check_optimizers(
    optimizers: Sequence[Any],
    process_group: dist.ProcessGroup | Collectives | None,
    gather_in_forward: bool,
) -> None:
    for optimizer in optimizers:
        if not isinstance(optimizer, ZeroRedundancyOptimizer):
            raise TypeError(
                f"sharded_optimizer takes a ZeroRedundancyOptimizer, or a list of them, not "
                f"{type(optimizer).__name__}: gradients go to the owners that it has."
            )
        if process_group is not None and process_group is not optimizer.process_group:
            raise ValueError(
                "process_group is another group than the optimizer's, whose ranks own the gradients. Leave "
                "it out, or construct the optimizer on that group."
            )
        if optimizer.overlap_with_ddp:
            raise ValueError(
                "an optimizer with overlap_with_ddp=True is stepped by hooks of DistributedDataParallel. "
                "Construct it without."
            )
        if gather_in_forward and optimizer.broadcast_dtype is not None:
            raise ValueError(
                "gather_in_forward=True receives new parameters in their own place, and with "
                f"broadcast_dtype={optimizer.broadcast_dtype} they are received elsewhere and rounded. Leave "
                "out one of the two."
            )
    if not optimizers:
        raise ValueError("sharded_optimizer is an empty list: gradients need an owner.")
