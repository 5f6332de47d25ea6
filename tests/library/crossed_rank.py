"""One rank of a program that `crossed.py` has drawn: by the wrapper, beside the unsharded loop."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import itertools
import math
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from library.crossed_loop import CLASSES, Data, Loop, Model, Passed, draw_block
from library.crossed_options import CUTS, LISTS, OVERLAPPED, Values
from library.halved import Halved
from library.training import assert_state_dicts_equal, snapshot
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_, get_total_norm
from torch.optim import lr_scheduler

from zero_ref import ShardedDataParallel
from zero_ref.backward.overlap import hook_with_zero_step, hook_with_zero_step_interleaved
from zero_ref.backward.reduction import reduce_to_owners
from zero_ref.clip import grad_norm
from zero_ref.comm.backend import as_collectives
from zero_ref.files.sharded import load_sharded, save_sharded
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.plan.partition import Slice
from zero_ref.plan.rules import equal_shares
from zero_ref.shard import offload
from zero_ref.shard.buckets import flat_like, flat_view
from zero_ref.shard.stepper import GradientSource

offload.PIECE_NBYTES, offload.SMALL_NBYTES = 2**10, 2**8  # so that these small shards have several pieces


def draw_partition(rng: Random, choice: str, numels: Sequence[int], world_size: int) -> Any:
    """Draw an argument for `partition`."""
    if choice == "equal_shares":
        return functools.partial(equal_shares, range_numel=rng.choice([64, 1000, 2**20]))
    if choice not in (LISTS, CUTS):
        return choice
    seed = rng.random()

    def by_chance(numels: Sequence[int], world_size: int) -> list[list[Slice]]:
        rng = Random(seed)
        owned: list[list[Slice]] = [[] for _ in range(world_size)]
        for number, numel in enumerate(numels):
            # Beside a cut at no multiple of 64, vectorized kernels would round otherwise.
            inner = range(64, numel, 64) if choice == CUTS else range(0)
            cuts = sorted(rng.sample(inner, k=min(len(inner), rng.randint(1, 3))))
            for start, stop in itertools.pairwise([0, *cuts, numel]):
                rng.choice(owned).append(Slice(number, start, stop))
        return owned

    if choice == LISTS and rng.random() < 0.5:
        return [[piece.param for piece in slices] for slices in by_chance(numels, world_size)]
    return by_chance


def opened(state_dict: Any) -> Any:
    """A state dict with low-bit tensors as the tensors that they consist of."""
    state = {}
    for number, of_param in state_dict["state"].items():
        parts = {key: value for key, value in of_param.items() if not isinstance(value, Halved)}
        for key, value in of_param.items():
            if isinstance(value, Halved):
                parts |= {f"{key}.codes": value.codes, f"{key}.scale": value.scale}
        state[number] = parts
    return {**state_dict, "state": state}


class Rank:
    """One rank's model in a ShardedDataParallel, from one move to the next, and the unsharded loop beside it.

    Args:
        group: the optimizer's ranks.
        replicas: the ranks that own the same in other groups; None for one group.
        rank: of all ranks.
    """

    def __init__(
        self, chosen: Values, passed: Passed, group: Any, replicas: Any, rank: int, rng: Random, folder: Path
    ) -> None:
        self.chosen, self.group, self.rank, self.folder = chosen, group, rank, folder
        self.comm = as_collectives(group)
        count = 1 if replicas is None else as_collectives(replicas).world_size
        self.loop = Loop(chosen, passed, self.comm.world_size * count)
        self.model = copy.deepcopy(self.loop.model)
        self.model.seen, self.model.batches = (value.clone() for value in passed.buffers)
        self.optimizer_options = {
            "elementwise": False,  # of `LowBit`; torch's own classes are known
            "state_device": folder.parent if chosen["place"] == "files" else chosen["place"],
            "master_dtype": torch.float32 if chosen["masters"] else None,
        }
        partition = chosen["partition"]
        if partition == CUTS and chosen["classes"] in ("muon", "low_bit"):
            self.refused(lambda: self.optimizer(rng, CUTS), ValueError, "may look at a parameter's shape")
            partition = "even"
        self.zero = self.optimizer(rng, partition)
        self.zero.defaults.setdefault("differentiable", False)
        self.gathers = chosen["gather_in_forward"]
        self.replicas, self.wrapped = replicas, self.model
        self.wrap(rng)
        scales = chosen["scaled"] and chosen["update"] != "closure" and chosen["dtype"] != "float16"
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=scales)
        if passed.state is not None and rng.random() < 0.5:
            self.zero.load_state_dict(copy.deepcopy(passed.state))
        elif passed.state is not None:
            load_sharded(self.zero, folder / "move0", parameters=rng.random() < 0.7)

    def optimizer(self, rng: Random, partition: str) -> ZeroRedundancyOptimizer:
        """The sharded optimizer, with the chosen options."""
        numels = [param.numel() for param in self.model.parameters()]
        optimizer_class, defaults = CLASSES[self.chosen["classes"]]
        return ZeroRedundancyOptimizer(
            self.loop.groups(self.model), optimizer_class, self.group, self.chosen["views"],
            self.chosen["wrapper"] in OVERLAPPED,
            partition=draw_partition(rng, partition, numels, self.comm.world_size),
            broadcast_buffer_size=self.chosen["buffer"],
            **self.optimizer_options, **defaults,
        )  # fmt: skip

    def wrap(self, rng: Random) -> None:
        chosen, dtype = self.chosen, self.chosen["reduce_dtype"]
        as_fp16 = dtype == "float16" and rng.random() < 0.5
        make = functools.partial(
            ShardedDataParallel, self.model, self.zero, reduce_buffer_size=chosen["bucket"],
            broadcast_buffers=chosen["broadcast_buffers"], reduce_fp16=as_fp16,
            reduce_dtype=getattr(torch, dtype) if dtype and not as_fp16 else None, replicas=self.replicas,
            **{name: chosen[name] for name in ("scaled", "may_change")},
        )  # fmt: skip
        self.wrapped = make(gather_in_forward=self.gathers)

    syncs_once = False
    """An update has one backward that is reduced; others are under no_sync."""

    def params_changed(self, rng: Random) -> None:
        """Parameters have come, or others are trained: the wrapper sees it by itself."""

    def buffers_are_sent(self, sync: bool) -> bool:
        """Whether a forward begins with rank 0's buffers."""
        return sync and bool(self.chosen["broadcast_buffers"])

    def no_sync(self) -> Any:
        return self.wrapped.no_sync()

    def refused(self, action: Callable[[], Any], kind: type[Exception], text: str) -> None:
        """All ranks raise the error that is documented for it."""
        message = "nothing was raised"
        try:
            action()
        except kind as error:
            message = str(error)
        raised = torch.cat(self.comm.all_gather(torch.tensor([message != "nothing was raised"]))).tolist()
        assert all(raised), f"ranks that raised: {raised}; this one: {message}"
        assert text in message, message

    # ------------------------------------------------------------------------------------- what is compared

    def check(self) -> None:
        """Parameters and buffers are those of the unsharded loop."""
        if self.gathers:
            self.wrapped.wait_for_parameters()
        params = list(self.loop.model.parameters())
        for number, (ours, plain) in enumerate(zip(self.model.parameters(), params, strict=True)):
            assert plain.isfinite().all(), f"torch's own values of parameter {number} are not finite"
            assert torch.equal(ours, plain), (
                f"parameter {number} of shape {tuple(ours.shape)}: {self.describe(ours, plain)}"
            )
        for piece, param, *_ in self.zero.shard.owned:
            plain = torch.empty_like(param).copy_(params[piece.param])
            ours, plain = (flat_view(p.detach())[piece.start : piece.stop] for p in (param, plain))
            assert torch.equal(ours, plain), f"{piece} on its owner: {self.describe(ours, plain)}"
        for ours, plain in zip(self.model.buffers(), self.loop.buffers[self.rank], strict=True):
            assert torch.equal(ours, plain), f"buffers: {ours} and not {plain}"

    @staticmethod
    def describe(ours: torch.Tensor, plain: torch.Tensor) -> str:
        differ = (ours != plain).flatten()
        return (
            f"{int(differ.sum())} elements differ, such as {ours.flatten()[differ][:3].tolist()} and not "
            f"{plain.flatten()[differ][:3].tolist()}"
        )

    def check_gradients(self) -> None:
        """Owners have the gradients of the unsharded loop; without gradients to owners, all ranks have."""
        source = GradientSource(in_slices=self.zero.backward.gradients.in_slices)
        for own in self.zero.shard.owned:
            piece, param = own.piece, own.param
            plain, ours = self.loop.gradients[piece.param], source.of_slice(own)
            assert (ours is None) == (plain is None), f"gradient of {piece}: {ours} and not {plain}"
            if ours is not None and plain is not None:
                assert ours.dtype == plain.dtype
                plain, ours = flat_like(plain, param)[piece.start : piece.stop], flat_like(ours, own.leaf)
                assert torch.equal(ours, plain), f"gradient of {piece}: {self.describe(ours, plain)}"

    def check_state(self) -> Any:
        self.zero.consolidate_state_dict(to="all")
        ours = self.zero.state_dict()
        assert_state_dicts_equal(opened(ours), opened(self.loop.optimizer.state_dict()))
        return copy.deepcopy(ours)

    # --------------------------------------------------------------------------------------------- an update

    def update(self, rng: Random) -> None:
        """Backwards, perhaps clipping, and a step."""
        how, optimizers = self.chosen["update"], (self.zero, self.loop.optimizer)
        if how == "closure":
            assert self.zero.step(lambda: self.backward(rng) or 7.0) == 7.0
            self.loop.optimizer.step()
            return
        schedulers = [
            lr_scheduler.LambdaLR(one, lambda step: 0.5**step) for one in optimizers if how == "schedule"
        ]
        bad = self.backward(rng)
        self.scaler.step(self.zero)
        self.scaler.update()
        if bad:
            self.zero_grad("none")  # or the infinite one would stay
        else:
            self.loop.optimizer.step()
            for scheduler in schedulers:
                scheduler.step()
        if not self.gathers or rng.random() < 0.5:
            self.check()

    def backward(self, rng: Random) -> bool:
        """All batches of an update; returns whether a gradient is infinite, which a scaler must find."""
        how, seed = self.chosen["batches"], f"{rng.random()}"
        several = rng.randint(1, 2)
        if self.syncs_once:
            how = {"reduced": "one", "both": "no_sync"}.get(how, how)
        syncs = {"one": [True], "no_sync": [False] * several + [True], "reduced": [True] * (several + 1)}
        self.zero_grad(self.chosen["zero_grad"], rng)
        left = any(grad is not None for grad in self.loop.gradients)
        self.begin()
        bad, added = self.scaler.is_enabled() and rng.random() < 0.2, list[list[Data]]()
        for number, sync in enumerate(chosen := syncs.get(how, [False, True, True])):
            batch = [self.loop.data(f"{seed}.{number}", rank) for rank in range(self.loop.total)]
            if bad and number == len(chosen) - 1:
                batch[rng.randrange(len(batch))][0].flatten()[3] = math.inf
            if left and not sync and self.chosen["zero_grad"] == "seldom":
                self.add_to_left(batch)
                left = False
            self.one_backward(batch, sync)
            added.append(batch)
            if sync:  # what was added up on each rank is added to the gradients that are there
                self.loop.backward(added)
                added = []
        self.end()
        self.scaler.unscale_(self.zero)
        if bad:
            return True
        self.check_gradients()
        self.clip(rng)
        if self.chosen["may_change"] and rng.random() < 0.5:
            for model in (self.model, self.loop.model):
                clip_grad_value_(list(model.parameters()), 3.0)
        return False

    def begin(self) -> None:
        """Before the batches of an update."""

    def end(self) -> None:
        """After the batches of an update."""

    def add_to_left(self, batch: Sequence[Data]) -> None:
        """Averages are left, to which gradients of this rank cannot be added."""
        with self.no_sync():
            loss = self.wrapped(batch[self.rank])
            self.refused(loss.backward, RuntimeError, "under no_sync() would add")
        self.loop.forward(batch, self.rank, False)
        self.zero_grad("wrapper")

    def one_backward(self, batch: Sequence[Data], sync: bool) -> None:
        plain = self.loop.forward(batch, self.rank, self.buffers_are_sent(sync))
        with contextlib.nullcontext() if sync else self.no_sync():
            loss = self.wrapped(batch[self.rank])
            torch.testing.assert_close(loss.detach(), plain, rtol=0, atol=0, equal_nan=True)
            self.scaler.scale(loss).backward()

    def clip(self, rng: Random) -> None:
        norm_type = self.chosen["clip"]
        gradients = [grad for grad in self.loop.gradients if grad is not None]
        if norm_type is None or (norm_type > 3 and not all(grad.numel() for grad in gradients)):
            return  # torch knows no greatest of nothing
        max_norm = rng.choice([1.0, 16.0, 2.0**20])
        found = not self.zero.built.cut or not self.zero.backward.gradients.in_slices
        if rng.random() < 0.3 and found:
            ours = grad_norm.get_total_norm(self.zero, norm_type)
            clip_grads_with_norm_(self.model.parameters(), max_norm, ours)
        else:
            ours = grad_norm.clip_grad_norm_(self.zero, max_norm, norm_type)
        plain = get_total_norm(gradients, norm_type)
        # The norm of a split parameter is a sum in another order: see clip_grad_norm_ for how far that goes.
        low = any(grad.itemsize == 2 for grad in gradients)
        rtol = 0.0 if self.zero.partition.is_whole or norm_type > 3 else 2**-7 if low else 1e-6
        torch.testing.assert_close(ours, plain, rtol=rtol, atol=0)
        # From the same norm, so that all that follows is equal bit for bit.
        clip_grads_with_norm_(self.loop.model.parameters(), max_norm, ours)

    def zero_grad(self, how: str, rng: Random | None = None) -> None:
        if how == "seldom" and rng is not None and rng.random() < 0.5:
            return
        to_none = how != "zeros"
        (self.wrapped if how == "wrapper" else self.zero).zero_grad(to_none)
        self.loop.optimizer.zero_grad(to_none)

    # --------------------------------------------------------------------------------------- the operations

    def freeze(self, rng: Random) -> None:
        """Or train again."""
        params = list(zip(self.model.parameters(), self.loop.model.parameters(), strict=True))[1:]
        for both in rng.sample(params, k=min(len(params), rng.randint(1, 3))):
            for param in both:
                param.requires_grad_(not param.requires_grad)
        self.params_changed(rng)

    def add_group(self, rng: Random) -> None:
        known = len(self.loop.model.blocks)
        self.loop.grow(*draw_block(rng, self.chosen))
        self.model.blocks.extend(copy.deepcopy(self.loop.model.blocks[known:]))
        for model, optimizer in ((self.model, self.zero), (self.loop.model, self.loop.optimizer)):
            optimizer.add_param_group(self.loop.groups(model)[-1])
        if self.gathers:
            self.zero.arriving.watch(self.model.blocks[-1])
        self.params_changed(rng)

    def whole_state(self, rng: Random) -> None:
        """Gather the state, train on, and go back."""
        state, values = self.check_state(), snapshot(self.loop.model)
        self.update(rng)
        for model in (self.model, self.loop.model):
            self.write(model, values)
        for optimizer in (self.zero, self.loop.optimizer):
            optimizer.load_state_dict(copy.deepcopy(state))

    def save_sharded(self, rng: Random) -> None:
        """Save, train on, and go back."""
        self.sharded_save("here")
        values = snapshot(self.loop.model)
        state = copy.deepcopy(self.loop.optimizer.state_dict())
        self.update(rng)
        load_sharded(self.zero, self.directory("here"))
        self.write(self.loop.model, values)  # first: masters not in a state are made from the parameters
        self.loop.optimizer.load_state_dict(state)

    def directory(self, name: str) -> Path:
        return self.folder / f"{name}{self.rank // self.comm.world_size}"

    def sharded_save(self, name: str) -> None:
        if self.gathers:
            self.wrapped.wait_for_parameters()
        save_sharded(self.zero, self.directory(name))

    @torch.no_grad()
    def write(self, model: Model, values: Sequence[torch.Tensor]) -> None:
        if self.gathers:
            self.wrapped.wait_for_parameters()
        for param, value in zip(model.parameters(), values, strict=True):
            param.copy_(value)

    def join(self, rng: Random) -> None:
        """Refused: a rank without data could not take part in the others' backwards."""

        def forward() -> None:
            with Join([self.zero]):
                self.wrapped(self.loop.data("join", self.rank))

        self.refused(forward, RuntimeError, "has no hooks for a Join")
        if self.chosen["broadcast_buffers"]:
            self.loop.send_buffers()

    def leave(self) -> Passed:
        """The end: all is as in the unsharded loop."""
        self.check()
        self.sharded_save("move")
        blocks = [
            (snapshot(block), [param.requires_grad for param in block.parameters()], options)
            for block, options in zip(self.loop.model.blocks, self.loop.options, strict=True)
        ]
        return Passed(blocks, self.loop.buffers[0], self.check_state())


class Averaging(Rank):
    """A program without a wrapper, which averages gradients itself."""

    def wrap(self, rng: Random) -> None: ...

    def buffers_are_sent(self, sync: bool) -> bool:
        return False

    def no_sync(self) -> Any:
        return contextlib.nullcontext()

    def begin(self) -> None:
        self.before = [param.grad for param in self.model.parameters()]
        for param in self.model.parameters():
            param.grad = None

    def end(self) -> None:
        for param, before in zip(self.model.parameters(), self.before, strict=True):
            param.grad = before

    def add_to_left(self, batch: Sequence[Data]) -> None:
        """Gradients of this rank are apart from the averages that are left."""

    def one_backward(self, batch: Sequence[Data], sync: bool) -> None:
        super().one_backward(batch, sync)
        if sync:
            self.average()

    @torch.no_grad()
    def average(self) -> None:
        """Add the average of all ranks' gradients to `before`."""
        params = list(self.model.parameters())
        had = torch.tensor([int(param.grad is not None) for param in params])
        self.comm.all_reduce(had).wait()
        for number, param in enumerate(params):
            if had[number]:
                grad = torch.zeros_like(param) if param.grad is None else param.grad
                total = grad.double().contiguous()
                self.comm.all_reduce(total).wait()
                average, before = grad.copy_(total / self.comm.world_size), self.before[number]
                self.before[number] = average if before is None else before + average
            param.grad = None


class UnderDDP(Rank):
    """DistributedDataParallel with one of its hooks, on processes."""

    def wrap(self, rng: Random) -> None:
        gc.collect()  # a DDP that lives listens to the parameters
        chosen, name = self.chosen, self.chosen["wrapper"]
        self.overlaps, self.sends_buffers, self.loop.source = name in OVERLAPPED, True, 0
        self.on_owners = name == "to_owners" or (self.overlaps and rng.random() < 0.5)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 renames broadcast_buffers
            self.wrapped = DDP(
                self.model, process_group=self.group, init_sync=False,
                find_unused_parameters=chosen["unused"],
                broadcast_buffers=chosen["broadcast_buffers"], bucket_cap_mb=rng.choice([0.0003, 0.001, 25]),
                gradient_as_bucket_view=rng.random() < 0.5 and chosen["batches"] in ("one", "no_sync"),
            )  # fmt: skip
        hook: Any = allreduce_hook
        if self.on_owners:
            hook = reduce_to_owners(self.zero, scaled=chosen["scaled"], may_change=chosen["may_change"])
        if self.overlaps:
            of_step = hook_with_zero_step if name == "overlap" else hook_with_zero_step_interleaved
            cuts = chosen["classes"] not in ("muon", "low_bit")
            hook = of_step(hook, self.wrapped, self.zero, rng.choice([None, False, cuts]))
        if name != "ddp":
            self.wrapped.register_comm_hook(self.group, hook)

    def params_changed(self, rng: Random) -> None:
        self.wrap(rng)

    def buffers_are_sent(self, sync: bool) -> bool:
        """DDP sends them after a backward that was reduced."""
        sent, self.sends_buffers = self.sends_buffers, sync
        return sent and bool(self.chosen["broadcast_buffers"])

    @property
    def syncs_once(self) -> bool:
        return self.overlaps or self.on_owners

    def check_gradients(self) -> None:
        if not self.overlaps:
            super().check_gradients()

    def clip(self, rng: Random) -> None:
        if not self.overlaps:
            super().clip(rng)
        elif self.chosen["clip"] is not None:
            self.refused(
                lambda: grad_norm.clip_grad_norm_(self.zero, 1.0), RuntimeError, "overlap_with_ddp=True"
            )

    def update(self, rng: Random) -> None:
        super().update(rng)
        if self.on_owners and not self.overlaps and self.chosen["batches"] in ("reduced", "both"):
            self.zero_grad_was_forgotten(rng)
        if self.on_owners and self.overlaps:
            self.loop.optimizer.zero_grad()  # as the hook does

    def zero_grad_was_forgotten(self, rng: Random) -> None:
        """A backward that adds to gradients on their owners is refused; after it DDP is made anew."""
        if all(grad is None for grad in self.loop.gradients):
            return  # a scaler has skipped the step
        seed = rng.random()
        batch = [self.loop.data(f"{seed}", rank) for rank in range(self.loop.total)]
        self.loop.forward(batch, self.rank, self.buffers_are_sent(True))
        loss = self.wrapped(batch[self.rank])
        self.refused(loss.backward, RuntimeError, "averaged over ranks of which most have none")
        self.zero_grad("none")
        self.wrap(rng)

    def join(self, rng: Random) -> None:
        """Each rank has another number of batches."""
        counts = [rng.choice([0, 1, 2]) for _ in range(self.loop.total)]
        counts[rng.randrange(len(counts))] = 3
        by_initial, seed = self.overlaps or rng.random() < 0.5, rng.random()
        self.loop.factor, factor = 12, self.loop.factor  # all numbers of ranks up to 4 divide it
        with Join([self.wrapped, self.zero], divide_by_initial_world_size=by_initial):
            for step in range(counts[self.rank]):
                self.zero.zero_grad()
                self.wrapped(self.loop.data(f"{seed}.{step}", self.rank)).backward()
                self.zero.step()
        self.zero.zero_grad()
        for step in range(max(counts)):
            there = [rank for rank, count in enumerate(counts) if count > step]
            batch = [self.loop.data(f"{seed}.{step}", rank) for rank in there]
            self.loop.backward([batch], None if by_initial else len(there))
            self.loop.optimizer.step()
            self.loop.optimizer.zero_grad()
        # torch leaves Join's mark on DDP, which then takes the last rank for the one that has data.
        self.loop.factor, self.sends_buffers, self.loop.source = factor, True, self.loop.total - 1
        buffers: list[Any] = [None] * len(counts)
        dist.all_gather_object(buffers, [buffer.clone() for buffer in self.model.buffers()], self.group)
        self.loop.buffers = buffers


KINDS: dict[str, type[Rank]] = {"averaged": Averaging, "sharded": Rank}  # others: UnderDDP
