"""Random training programs that cross all options of the optimizer and of the wrapper with each other.

A program is drawn from its seed: a value for each option in `OPTIONS`, the operations among them, and from
these a model, data and a few updates. Beside every rank runs an unsharded loop, which adds up the gradients
of all ranks' data by itself. Data are small integers that all ranks together can divide, so sums are exact in
any order and in 16 bits: gradients must be equal, and so must parameters, losses, buffers and state. A sum
that is wrong, or a batch that counts twice, cannot hide in rounding.

Each pair of values of two options that is not in `IMPOSSIBLE` is drawn at least 20 times in 2,000 programs.
Where the package refuses a pair, all ranks must raise the documented error, and the program goes on without.

    python tests/crossed.py --sequences 2000                 # virtual ranks, from seed 0 on
    python tests/crossed.py --sequences 200 --real           # processes over Gloo, with DDP and its hooks too
    python tests/crossed.py --sequences 2000 --pairs FILE    # writes how often each pair of values was drawn

Of each failure it prints the command that repeats it, with as many options as possible at their defaults.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import gc
import itertools
import math
import statistics
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from test_subclasses import Halved
from torch import nn, optim
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_, get_total_norm
from torch.optim import lr_scheduler
from training import OnMasters, assert_state_dicts_equal, snapshot

from zero_ref import ShardedDataParallel, clip
from zero_ref.backward.overlap import hook_with_zero_step, hook_with_zero_step_interleaved
from zero_ref.backward.reduction import reduce_to_owners
from zero_ref.comm.collectives import as_collectives
from zero_ref.lab import ranks, virtual
from zero_ref.optimizer import offload
from zero_ref.optimizer.buckets import flat_like, flat_view
from zero_ref.optimizer.several import SeveralOptimizers
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.plan.partition import Slice
from zero_ref.plan.rules import equal_shares
from zero_ref.state.sharded import load_sharded, save_sharded

Values = Mapping[str, Any]

LISTS, CUTS = "lists", "cuts"  # whole parameters, or pieces of them, to ranks by chance

OPTIONS: dict[str, Sequence[Any]] = {
    # The wrapper, "averaged" for none: the program itself averages gradients. On virtual ranks the first two.
    "wrapper": ("averaged", "sharded", "ddp", "to_owners", "overlap", "interleaved"),
    "ranks": (2, 3, 4, 1),
    "replicas": (1, 2),
    # Of the optimizer.
    "partition": ("sorted_greedy", "registration_greedy", "even", "equal_shares", "balanced", LISTS, CUTS),
    "views": (False, True),
    "dtype": ("float32", "bfloat16", "float16", "mixed"),
    "masters": (None, "nearest", "stochastic"),
    "classes": ("sgd", "momentum", "adamw", "muon", "low_bit"),
    "place": (None, "cpu", "files"),
    "broadcast_dtype": (None, "bfloat16", "float16"),
    # Of the wrapper.
    "reduce_dtype": (None, "float32", "bfloat16", "float16"),
    "keep_memory": (False, True),
    "scaled": (False, True),
    "may_change": (False, True),
    "gather_in_forward": (False, True),
    "broadcast_buffers": (True, False),
    "bucket": (2**23, 300, 1),
    # Of the loop: what an update is made of, and how.
    "batches": ("one", "no_sync", "reduced", "both"),
    "zero_grad": ("none", "zeros", "wrapper", "seldom"),
    "clip": (None, 1.0, 2.0, math.inf),
    "unused": (False, True),
    "update": ("step", "closure", "schedule"),
    # Operations between updates: whether there are any.
    "freeze": (False, True),
    "add_group": (False, True),
    "repartition": (False, True),
    "whole_state": (False, True),
    "save_sharded": (False, True),
    "join": (False, True),
    "move": (False, True),
}
OPERATIONS = ("freeze", "add_group", "repartition", "whole_state", "save_sharded", "join")
DDP_WITH = ("ddp", "to_owners", "overlap", "interleaved")
OVERLAPPED = DDP_WITH[2:]
ON_THREADS = {"wrapper": 2, "join": 1}
"""How many values of an option virtual ranks have; DDP needs processes."""
WEIGHTS = {
    ("wrapper", "sharded"): 4,
    ("replicas", 1): 2,
    ("classes", "momentum"): 4,  # for those that are possible with fewer others
    ("zero_grad", "seldom"): 2,
}
"""How often a value is drawn, against 1 for the others."""

IMPOSSIBLE: list[tuple[str, Sequence[Any], str, Sequence[Any], str]] = [
    *(
        ("wrapper", ("averaged", *DDP_WITH), name, OPTIONS[name][1:], "only ShardedDataParallel has it")
        for name in ("replicas", "reduce_dtype", "keep_memory", "gather_in_forward", "bucket")
    ),
    *(
        ("wrapper", ("averaged", "ddp", *OVERLAPPED), name, (True,), "only gradients on owners have it")
        for name in ("scaled", "may_change")
    ),
    ("wrapper", DDP_WITH, "zero_grad", ("seldom",), "DDP averages once more what is left; or refuses it"),
    ("wrapper", OVERLAPPED, "update", ("closure",), "backward makes the update"),
    ("wrapper", ("averaged",), "join", (True,), "nothing shadows the averages of a program"),
    ("unused", (True,), "join", (True,), "DDP takes for used what the batch before a rank left did not use"),
    ("broadcast_dtype", OPTIONS["broadcast_dtype"][1:], "join", (True,), "DDP sends one rank's values"),
    ("scaled", (True,), "zero_grad", ("seldom",), "what is left is unscaled, what is added is not"),
    ("dtype", OPTIONS["dtype"][1:], "classes", ("momentum",), "SGD's kernels of torch 2.13 differ by group"),
]
"""Pairs that are not drawn, with the reason."""

EXCLUDED = {
    frozenset({(first, value), (second, other)})
    for first, values, second, others, _ in IMPOSSIBLE
    for value in values
    for other in others
}

UPDATES = 5
PROCESSES = 4
BOUND = 2  # of the absolute value of an integer in the data, before it is made divisible
SHAPES = [(), (0,), (7,), (64,), (128,), (1000,), (4, 3, 3, 3), (8, 16), (300, 3), (5, 13)]
MATRICES = [(8, 16), (5, 13), (3, 64)]
TIMEOUT = 120.0  # seconds, against hanging; the machine may be busy
offload.PIECE_NBYTES, offload.SMALL_NBYTES = 2**10, 2**8  # so that these small shards have several pieces


@dataclass(frozen=True)
class Trial:
    """The program that `seed` stands for, with the options in `plain` at their defaults."""

    seed: int
    real: bool = False
    plain: tuple[str, ...] = ()

    def random(self, what: object) -> Random:
        """The source of all that is drawn for `what`: the same on every rank, whatever else is drawn."""
        return Random(f"{self.seed}.{what}")

    def choices_of(self, option: str) -> Sequence[Any]:
        return OPTIONS[option] if self.real else OPTIONS[option][: ON_THREADS.get(option)]

    @property
    def values(self) -> dict[str, Any]:
        """The value of each option."""
        drawn: dict[str, Any] = {}
        for name in OPTIONS:
            values = self.choices_of(name)
            fitting = [
                v for v in values if not any(frozenset({one, (name, v)}) in EXCLUDED for one in drawn.items())
            ]
            weights = [WEIGHTS.get((name, value), 1) for value in fitting]
            drawn[name] = self.random(name).choices(fitting, weights)[0]
            if name in self.plain and values[0] in fitting:
                drawn[name] = values[0]
        return drawn

    @property
    def command(self) -> str:
        plain = f" --plain {','.join(self.plain)}" if self.plain else ""
        return f"python tests/crossed.py --sequences 1 --seed {self.seed}{' --real' * self.real}{plain}"


Pair = tuple[tuple[str, Any], tuple[str, Any]]


def pairs_of(trials: Sequence[Trial]) -> dict[Pair, int]:
    """How often each pair of values of two options is drawn, those never drawn included."""
    known = [(name, value) for name in OPTIONS for value in trials[0].choices_of(name)]
    possible = [
        pair
        for pair in itertools.combinations(known, 2)
        if pair[0][0] != pair[1][0] and frozenset(pair) not in EXCLUDED
    ]
    drawn = Counter(pair for trial in trials for pair in itertools.combinations(trial.values.items(), 2))
    return {pair: drawn[pair] for pair in possible}


# --------------------------------------------------------------------------------------- what is trained


class Coded(Halved):
    """`Halved` that can be copied and pickled."""

    def __reduce_ex__(self, _: Any) -> Any:
        return Coded, (self.codes, self.scale, self.context)

    def __deepcopy__(self, memo: Any) -> Coded:
        return Coded(self.codes.clone(), self.scale.clone(), self.context)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default:  # when torch loads it for a parameter of 16 bits
            return copy.deepcopy(args[0])
        return super().__torch_dispatch__(func, types, args, kwargs)


class LowBit(optim.Optimizer):
    """SGD with a momentum of 16-bit integers and one scale, as low-bit classes keep it."""

    def __init__(self, params: Any, lr: float = 2**-6) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = torch.enable_grad()(closure)() if closure else None
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                before = self.state[param].get("momentum", torch.zeros_like(param))
                before = before.values() if isinstance(before, Halved) else before
                momentum = param.grad.float() + 0.5 * before
                param.sub_(group["lr"] * momentum)
                self.state[param]["momentum"] = Coded.of(momentum) if param.numel() > 4 else momentum
        return loss


def several(groups: Any, **options: Any) -> optim.Optimizer:
    return SeveralOptimizers(groups, optim.AdamW, **options)


# By the option "classes": the class, the unsharded one if that is another, the options.
CLASSES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "sgd": (optim.SGD, optim.SGD, {"lr": 2**-6, "weight_decay": 0.1}),
    "momentum": (optim.SGD, optim.SGD, {"lr": 2**-6, "momentum": 0.5}),
    "adamw": (optim.AdamW, optim.AdamW, {"lr": 2**-6, "eps": 2**-10, "amsgrad": True}),
    "muon": (optim.AdamW, several, {"lr": 2**-6, "eps": 2**-10}),
    "low_bit": (LowBit, LowBit, {"lr": 2**-6}),
}

Data = dict[int, torch.Tensor]
"""By parameter number its gradient in one batch; parameters that are missing are not used."""


class Block(nn.Module):
    """The parameters of one group, by their numbers."""

    def __init__(self, first: int, values: Sequence[torch.Tensor]) -> None:
        super().__init__()
        for number, value in enumerate(values, start=first):
            self.register_parameter(f"p{number}", nn.Parameter(value))

    def forward(self, data: Data) -> torch.Tensor:
        # The parameter is used twice.
        of_each = [
            (param.double() * (grad - 1)).sum() + param.double().sum()
            for name, param in self.named_parameters()
            if (grad := data.get(int(name[1:]))) is not None
        ]
        return torch.stack([torch.zeros((), dtype=torch.float64), *of_each]).sum()


class Model(nn.Module):
    """The gradient of a parameter is what the data have for it. Buffers count and add up the batches."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("batches", torch.tensor(0))

    def forward(self, data: Data) -> torch.Tensor:
        self.see(data)
        return torch.stack([block(data) for block in self.blocks]).sum() + self.seen.double().sum()

    @torch.no_grad()
    def see(self, data: Data) -> None:
        self.seen.add_(data[0].flatten()[:2])
        self.batches.add_(1)


@dataclass
class Passed:
    """What passes from one number of ranks to the next.

    Attributes:
        blocks: the values of each block's parameters, whether each is trained, and the group's options.
        buffers: of the model on rank 0.
        state: of the whole optimizer; None before the first update.
    """

    blocks: list[tuple[list[torch.Tensor], list[bool], dict[str, Any]]]
    buffers: list[torch.Tensor]
    state: Any = None


def draw_block(rng: Random, chosen: Values, muon: bool) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """The values of a group's parameters, and its options."""
    values = []
    for number in range(rng.randint(2, 4)):
        shape = rng.choice(MATRICES if muon or not number else SHAPES)
        mixed = rng.choice(["float32", "bfloat16"])
        dtype = getattr(torch, mixed if chosen["dtype"] == "mixed" else chosen["dtype"])
        generator = torch.Generator().manual_seed(rng.getrandbits(40))
        value = torch.randint(-64, 65, shape, generator=generator).to(dtype) / 64
        layout = torch.channels_last if len(shape) == 4 else torch.contiguous_format
        values.append(value.contiguous(memory_format=layout))
    options: dict[str, Any] = {"optimizer_class": optim.Muon} if muon else {}
    return values, options | {"lr": rng.choice([2**-4, 2**-6, 2**-8])}


class Loop:
    """The unsharded loop. It has what all ranks must have, and each rank runs one beside it.

    Attributes:
        total: the ranks whose data it adds up.
        factor: of all data.
        options: of each parameter group.
        buffers: those of each rank's model.
        source: the rank whose buffers are sent.
    """

    def __init__(self, chosen: Values, passed: Passed, total: int) -> None:
        self.chosen, self.total, self.buffers, self.source = chosen, total, [passed.buffers], 0
        # An average to which DDP adds before it averages again must be divisible, too.
        self.factor = total**2 if chosen["wrapper"] in DDP_WITH else total
        self.model, self.options = Model(), list[dict[str, Any]]()
        for values, trained, options in passed.blocks:
            self.grow(values, options)
            for param, is_trained in zip(self.model.blocks[-1].parameters(), trained, strict=True):
                param.requires_grad_(is_trained)
        self.send_buffers()
        _, plain, defaults = CLASSES[chosen["classes"]]
        if chosen["masters"]:
            self.optimizer: Any = OnMasters(self.groups(self.model), plain, chosen["masters"], **defaults)
        else:
            self.optimizer = plain(self.groups(self.model), **defaults)
        self.optimizer.defaults.setdefault("differentiable", False)  # as torch does when it loads
        if passed.state is not None:
            self.optimizer.load_state_dict(copy.deepcopy(passed.state))

    def grow(self, values: Sequence[torch.Tensor], options: dict[str, Any]) -> None:
        """One more block, a parameter group with options of its own."""
        first = len(list(self.model.parameters()))
        self.model.blocks.append(Block(first, [value.clone() for value in values]))
        self.options.append(options)

    def groups(self, model: Model) -> list[dict[str, Any]]:
        return [{"params": [*b.parameters()], **o} for b, o in zip(model.blocks, self.options, strict=True)]

    def data(self, seed: str, rank: int) -> Data:
        """The batch of one rank: integers that all ranks together can divide."""
        rng = Random(f"{seed}.{rank}")
        generator = torch.Generator().manual_seed(rng.getrandbits(40))
        unused = 0.4 if self.chosen["unused"] else 0.0
        return {
            number: torch.randint(-BOUND, BOUND + 1, param.shape, generator=generator).double() * self.factor
            for number, param in enumerate(self.model.parameters())
            if number == 0 or rng.random() >= unused
        }

    @torch.no_grad()
    def backward(self, batches: Sequence[Sequence[Data]], divisor: int | None = None) -> None:
        """Add the average of these batches' gradients: (batches, ranks)."""
        for number, param in enumerate(self.model.parameters()):
            used = [data[number] for batch in batches for data in batch if number in data]
            if param.requires_grad and used:
                average = sum(used[1:], used[0]) / (divisor or self.total)
                grad = torch.empty_like(param).copy_(average)
                param.grad = grad if param.grad is None else param.grad + grad

    def forward(self, batch: Sequence[Data], rank: int, buffers_are_sent: bool) -> torch.Tensor:
        """The loss of this rank on its data. Buffers of all ranks follow."""
        loss = torch.tensor(0.0)
        if buffers_are_sent:
            self.send_buffers()
        for of_rank, data in enumerate(batch):
            self.model.seen, self.model.batches = self.buffers[of_rank]
            if of_rank == rank:
                loss = self.model(data).detach()
            else:
                self.model.see(data)
        return loss

    def send_buffers(self) -> None:
        self.buffers = [[value.clone() for value in self.buffers[self.source]] for _ in range(self.total)]

    @property
    def gradients(self) -> list[torch.Tensor | None]:
        return [param.grad for param in self.model.parameters()]


# ------------------------------------------------------------------------------------------- beside it


def draw_partition(rng: Random, choice: str, numels: Sequence[int], world_size: int) -> Any:
    """What a user passes as `partition`."""
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
        rounded = chosen["broadcast_dtype"]
        self.rounded = getattr(torch, rounded) if rounded else None
        masters = {"master_dtype": torch.float32, "rounding": chosen["masters"], "rounding_seed": 7}
        self.optimizer_options = {
            "broadcast_dtype": self.rounded,
            "state_device": folder.parent if chosen["place"] == "files" else chosen["place"],
            **(masters if chosen["masters"] else {}),
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
        optimizer_class, _, defaults = CLASSES[self.chosen["classes"]]
        return ZeroRedundancyOptimizer(
            self.loop.groups(self.model), optimizer_class, self.group, self.chosen["views"],
            self.chosen["wrapper"] in OVERLAPPED,
            partition=draw_partition(rng, partition, numels, self.comm.world_size),
            **self.optimizer_options, **defaults,
        )  # fmt: skip

    def wrap(self, rng: Random) -> None:
        chosen, dtype = self.chosen, self.chosen["reduce_dtype"]
        as_fp16 = dtype == "float16" and rng.random() < 0.5
        make = functools.partial(
            ShardedDataParallel, self.model, self.zero, reduce_buffer_size=chosen["bucket"],
            broadcast_buffers=chosen["broadcast_buffers"], reduce_fp16=as_fp16,
            reduce_dtype=getattr(torch, dtype) if dtype and not as_fp16 else None, replicas=self.replicas,
            **{name: chosen[name] for name in ("keep_memory", "scaled", "may_change")},
        )  # fmt: skip
        if self.gathers and self.rounded:
            self.refused(lambda: make(gather_in_forward=True), ValueError, "Leave out one of the two")
            self.gathers = False
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
            same = ours == plain
            if self.rounded:
                same |= ours == plain.to(self.rounded).to(plain.dtype)
            assert same.all(), (
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
        parts = self.zero.backward.gradients.parts
        for piece, param, *_ in self.zero.shard.owned:
            plain = self.loop.gradients[piece.param]
            is_whole = piece.numel == param.numel()
            ours = param.grad if parts is None or is_whole else parts.get(piece)
            assert (ours is None) == (plain is None), f"gradient of {piece}: {ours} and not {plain}"
            if ours is not None and plain is not None:
                assert ours.dtype == plain.dtype
                plain = flat_like(plain, param)[piece.start : piece.stop]
                if parts is None or is_whole:
                    ours = flat_like(ours, param)[piece.start : piece.stop]
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
            if not self.rounded:
                torch.testing.assert_close(loss.detach(), plain, rtol=0, atol=0, equal_nan=True)
            self.scaler.scale(loss).backward()

    def clip(self, rng: Random) -> None:
        norm_type = self.chosen["clip"]
        gradients = [grad for grad in self.loop.gradients if grad is not None]
        if norm_type is None or (norm_type > 3 and not all(grad.numel() for grad in gradients)):
            return  # torch knows no greatest of nothing
        max_norm = rng.choice([1.0, 16.0, 2.0**20])
        if rng.random() < 0.3:
            ours = clip.get_total_norm(self.zero, norm_type)
            clip_grads_with_norm_(self.model.parameters(), max_norm, ours)
        else:
            ours = clip.clip_grad_norm_(self.zero, max_norm, norm_type)
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
        muon = self.chosen["classes"] == "muon" and rng.random() < 0.5
        self.loop.grow(*draw_block(rng, self.chosen, muon))
        self.model.blocks.extend(copy.deepcopy(self.loop.model.blocks[known:]))
        for model, optimizer in ((self.model, self.zero), (self.loop.model, self.loop.optimizer)):
            optimizer.add_param_group(self.loop.groups(model)[-1])
        if self.gathers:
            self.zero.arriving.watch(self.model.blocks[-1])
        self.params_changed(rng)

    def repartition(self, rng: Random) -> None:
        numels, names = list(self.zero.partition.numels), list(OPTIONS["partition"])
        if self.chosen["classes"] in ("muon", "low_bit"):
            names.remove(CUTS)
        self.zero.repartition(draw_partition(rng, rng.choice(names), numels, self.comm.world_size))

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
            self.refused(lambda: clip.clip_grad_norm_(self.zero, 1.0), RuntimeError, "overlap_with_ddp=True")

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


# ------------------------------------------------------------------------------------------- whole programs


@dataclass(frozen=True)
class Part:
    """What happens on one number of ranks: its first update, and the operations before each update."""

    number: int
    size: int
    updates: tuple[tuple[int, tuple[str, ...]], ...]


def parts_of(trial: Trial) -> list[Part]:
    """A move ends one part and begins the next, perhaps on another number of ranks."""
    values, rng = trial.values, trial.random("parts")
    before: dict[int, tuple[str, ...]] = dict.fromkeys(range(UPDATES), ())
    for name in OPERATIONS:
        places = trial.random(f"places {name}").sample(range(UPDATES), k=2)
        for place in places if values[name] else ():
            before[place] += (name,)
    moves = rng.randint(1, UPDATES - 1)
    updates = tuple((number, tuple(rng.sample(names, len(names)))) for number, names in before.items())
    most = PROCESSES // values["replicas"] if trial.real else 4
    first, second = min(values["ranks"], most), rng.randint(1, most)
    if not values["move"]:
        return [Part(0, first, updates)]
    return [Part(0, first, updates[:moves]), Part(1, second, updates[moves:])]


def on_rank(
    group: Any, replicas: Any, rank: int, trial: Trial, part: Part, passed: Passed, folder: Path
) -> Passed:
    """One part of a program, on one rank."""
    doing = "construction"
    try:
        rng = trial.random(f"construction {part.number}")
        me = KINDS.get(trial.values["wrapper"], UnderDDP)(
            trial.values, passed, group, replicas, rank, rng, folder
        )
        for number, operations in part.updates:
            for name in operations:
                doing = f"{name} before update {number}"
                me.zero_grad("none")
                if me.gathers:
                    me.wrapped.wait_for_parameters()
                getattr(me, name)(trial.random(f"{name} {number}"))
                me.check()
            doing = f"update {number}"
            me.update(trial.random(f"update {number}"))
        doing = "the end"
        return me.leave()
    except Exception as error:
        text = f"seed {trial.seed}, {part.size} ranks, {doing}: {type(error).__name__}: {error}"
        raise AssertionError(text) from error


def on_virtual_rank(comm: Any, worlds: Any, first: list[Exception], *args: Any) -> Passed:
    """With `replicas`: ranks of two groups, and of one group for each of their ranks."""
    within, between = worlds
    group, place = divmod(comm.rank, len(between))
    try:
        return on_rank(
            virtual.VirtualCollectives(within[group], place),
            virtual.VirtualCollectives(between[place], group),
            comm.rank,
            *args,
        )
    except Exception as error:
        first.append(error)
        for world in (*within, *between):
            world.barrier.abort()  # the others wait for a rank that will not come
        raise first[0] from None


def on_virtual_ranks(size: int, replicas: int, *args: Any) -> Passed:
    """A part on threads; what rank 0 passes on."""
    if replicas == 1:
        alone = lambda comm: on_rank(comm, None, comm.rank, *args)  # noqa: E731
        return virtual.run(alone, size, timeout=TIMEOUT)[0]
    worlds = [
        [virtual._World(one, TIMEOUT) for _ in range(many)]
        for one, many in ((size, replicas), (replicas, size))
    ]
    return virtual.run(on_virtual_rank, size * replicas, worlds, [], *args, timeout=TIMEOUT)[0]


def on_processes(size: int, replicas: int, members: Sequence[int], *args: Any) -> Passed:
    """A part on these of the processes; each of them calls it, and gets what the first passes on."""
    within = [dist.new_group(list(members[one * size :][:size])) for one in range(replicas)]
    between = [dist.new_group(list(members[place::size])) for place in range(size)]
    given: list[Any] = [None]
    if dist.get_rank() in members:
        rank = members.index(dist.get_rank())
        group, place = divmod(rank, size)
        given = [on_rank(within[group], between[place] if replicas > 1 else None, rank, *args)]
    gc.collect()  # an optimizer that lives holds the directory that it saved to
    dist.broadcast_object_list(given, src=members[0])
    return given[0]  # type: ignore[no-any-return]


def play(trial: Trial, folder: str) -> None:
    """A whole program. Where ranks are processes, each of them calls it."""
    values, rng = trial.values, trial.random("loop")
    muon = [False, True, False] if values["classes"] == "muon" else [False, False]
    blocks = [draw_block(rng, values, of_muon) for of_muon in muon]
    started = [(params, [True] * len(params), options) for params, options in blocks]
    passed = Passed(started, [torch.zeros(2), torch.tensor(0)])
    replicas, here = values["replicas"], Path(folder, f"{trial.seed}")
    for part in parts_of(trial):
        if trial.real:
            members = sorted(rng.sample(range(PROCESSES), k=part.size * replicas))
            passed = on_processes(part.size, replicas, members, trial, part, passed, here)
        else:
            passed = on_virtual_ranks(part.size, replicas, trial, part, passed, here)


# ------------------------------------------------------------------------------------------ the search


def failure(trial: Trial) -> str | None:
    """What goes wrong, if anything does."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            if trial.real:
                ranks.run(play, PROCESSES, trial, folder, timeout=TIMEOUT)
            else:
                play(trial, folder)
        except (RuntimeError, ranks.RankError) as error:
            return str(error)
    return None


def search(trials: Sequence[Trial]) -> Iterator[str]:
    """Play them, and explain each that fails."""
    for trial in trials:
        if failure(trial):
            yield explained(trial)


def explained(trial: Trial) -> str:
    """What fails, with as many options as possible at their defaults."""
    for name in reversed(OPTIONS):
        simpler = replace(trial, plain=(*trial.plain, name))
        if simpler.values != trial.values and failure(simpler):
            trial = simpler
    needed = {name: value for name, value in trial.values.items() if value != OPTIONS[name][0]}
    return f"{failure(trial)}\n\nIt needs {needed}:\n{trial.command}"


def table(trials: Sequence[Trial]) -> str:
    """Each pair of values, and how often it was drawn, rarest first."""
    counts = sorted(pairs_of(trials).items(), key=lambda one: one[1])
    return "\n".join(f"{count:5} {a}={x} {b}={y}" for ((a, x), (b, y)), count in counts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--real", action="store_true", help="processes over Gloo, with DDP")
    parser.add_argument("--sequences", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the first; the next one has the next")
    parser.add_argument("--plain", default="", help="options at their defaults: a,b,c")
    parser.add_argument("--pairs", type=Path, help="a file for the table of pairs")
    args = parser.parse_args()
    torch.set_num_threads(1)
    plain = tuple(filter(None, args.plain.split(",")))
    trials = [Trial(args.seed + i, args.real, plain) for i in range(args.sequences)]
    failed = 0
    for explanation in search(trials):
        failed += 1
        print(explanation, "\n", flush=True)
    counts = pairs_of(trials).values()
    if args.pairs:
        args.pairs.write_text(table(trials) + "\n")
    print(
        f"{len(trials)} programs, {failed} failed; {len(counts)} pairs of values, each drawn "
        f"{min(counts)} to {max(counts)} times, median {statistics.median(counts):.0f}"
    )
    sys.exit(failed > 0)


if __name__ == "__main__":
    from crossed import main as importable  # so that ranks find by name what they are to call

    importable()
