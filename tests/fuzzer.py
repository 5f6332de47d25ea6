"""Random sequences of operations on the sharded optimizer, each held against the unsharded one.

A sequence is drawn from its seed: a model, an optimizer class with its options, the operations. Every rank
has two copies of the model, one trained by ZeroRedundancyOptimizer and one by torch's optimizer, and drives
both through the same operations. After each of them the parameters must be equal bit for bit, here and on
the other ranks; at the end the state dicts must be. "move" ends the optimizers and goes on with new ones, on
another number of ranks. "mistake" makes one that must raise on all ranks and change nothing.

    python tests/fuzzer.py --ranks 4 --sequences 2000                   # virtual ranks, from seed 0 on
    python tests/fuzzer.py --ranks 2 --real --sequences 200 --seed 7    # processes over Gloo, with DDP

Of each failure it prints the command that repeats it, with no more of the operations than it needs.
"""

from __future__ import annotations

import argparse
import copy
import functools
import gc
import hashlib
import itertools
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from library.training import OnMasters, Snapshot, assert_state_dicts_equal, snapshot, sum_in_rank_order
from torch import nn, optim
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import lr_scheduler

from zero_ref.backward.overlap import hook_with_zero_step, hook_with_zero_step_interleaved
from zero_ref.backward.reduction import reduce_to_owners
from zero_ref.clip.grad_norm import clip_grad_norm_
from zero_ref.comm.backend import as_collectives
from zero_ref.files.sharded import load_sharded, save_sharded, save_sharded_async
from zero_ref.lab import ranks, virtual
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.plan.partition import Slice
from zero_ref.plan.rules import equal_shares
from zero_ref.shard import offload
from zero_ref.shard.buckets import flat_view

Options = dict[str, Any]
KERNELS: tuple[Options, ...] = ({}, {"foreach": True}, {"foreach": False})
FUSED: tuple[Options, ...] = (*KERNELS, {"fused": True})
DECAY: tuple[Options, ...] = ({}, {"weight_decay": 0.1})
ADAM = (*DECAY, {"betas": (0.5, 0.9)}, {"amsgrad": True}, {"maximize": True})
MOMENTUM: tuple[Options, ...] = (
    {"momentum": 0.0, "nesterov": False},
    {"momentum": 0.9, "nesterov": False},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    {"momentum": 0.5, "nesterov": False, "dampening": 0.1, "maximize": True},
)
# The class, a group's options, the kernels. What is missing is wrong in torch 2.13, or makes an update depend
# on the other parameters of its group.
OPTIMIZERS: list[tuple[Any, Sequence[Options], Sequence[Options]]] = [
    (optim.SGD, MOMENTUM, KERNELS),
    (optim.SGD, DECAY, FUSED),  # with momentum: wrong in bfloat16, and an error if one gradient came later
    (optim.Adam, ADAM, FUSED),
    (optim.AdamW, ADAM, FUSED),
    (optim.Adagrad, (*DECAY, {"lr_decay": 0.1, "initial_accumulator_value": 0.1}), FUSED),
    (optim.RMSprop, (*DECAY, {"momentum": 0.5}, {"centered": True}), KERNELS),
    (optim.ASGD, (*DECAY, {"t0": 2.0, "lambd": 0.01}), KERNELS),
    (optim.NAdam, (*DECAY, {"decoupled_weight_decay": True, "weight_decay": 0.1}), KERNELS),
    (optim.RAdam, DECAY, KERNELS),
    (optim.Adamax, DECAY, KERNELS),
    (optim.Adadelta, (*DECAY, {"rho": 0.5}), KERNELS),
    (optim.Rprop, ({}, {"etas": (0.4, 1.3)}), KERNELS),
    (
        optim.Adafactor,
        ({"eps": (1e-6, 1e-3)}, {"eps": (1e-4, 1e-2), "d": 2.0}),
        KERNELS,
    ),
    (optim.Muon, ({"nesterov": False}, {"ns_steps": 2}), ({},)),
]
WHOLE_ONLY = (optim.Adafactor, optim.Muon)  # they look at a parameter's shape
RATES = (0.003, 0.01, 0.1)
MATRICES = [(1, 1), (5, 13), (8, 16), (3, 64), (300, 3)]
SHAPES = [(), (0,), (0, 3), (1,), (7,), (64,), (128,), (192,), (1000,), (4, 3, 3, 3), (8, 4, 2, 2), *MATRICES]
MERGED = [(64,), (8, 16), (3, 64)]  # all of a multiple of 64 elements: stepped as one, in a bucket
DTYPES = [torch.float32] * 8 + [torch.float64, torch.bfloat16, torch.complex64]
HOOKS = [None, None, hook_with_zero_step, hook_with_zero_step_interleaved]
OFTEN = ["step"] * 4 + ["mistake", "move"]
SELDOM = ["backward", "zero_grad", "clip", "options", "schedule", "freeze", "add_group", "consolidate"]
SELDOM += ["save", "save", "restore", "restore"]
offload.PIECE_NBYTES, offload.SMALL_NBYTES = 2**10, 2**8  # so that these small shards have several pieces
TIMEOUT = 300.0  # seconds, against hanging; the machine may be busy

Operation = tuple[int, str]


@dataclass(frozen=True)
class Trial:
    """The sequence that `seed` stands for, or those of its operations whose numbers are in `keep`."""

    seed: int
    ranks: int
    real: bool = False
    keep: tuple[int, ...] | None = None

    def random(self, what: object) -> Random:
        """The source of all that is drawn for `what`: the same on every rank, whatever else is left out."""
        return Random(f"{self.seed}.{what}")

    @property
    def operations(self) -> list[Operation]:
        rng = self.random("operations")
        names = [*OFTEN, *OFTEN, *SELDOM, *(["join", "join"] if self.real else [])]
        drawn = enumerate(rng.choices(names, k=rng.randint(5, 14)))
        return [(number, name) for number, name in drawn if self.keep is None or number in self.keep]

    @property
    def command(self) -> str:
        real = " --real" * self.real
        keep = f" --keep {','.join(map(str, self.keep))}" if self.keep else ""
        return f"python tests/fuzzer.py --ranks {self.ranks}{real} --sequences 1 --seed {self.seed}{keep}"


@dataclass
class Job:
    """The training, and the values that pass from the optimizers before a move to those after it.

    Attributes:
        missing: the share of the parameters without a gradient, on virtual ranks.
        groups: for each parameter group the numbers of its parameters, and the options that it names.
        state: of the whole optimizer; None before the first move.
        masters: the optimizer's arguments for 32-bit copies of 16-bit parameters, if it keeps any.
        saves: by directory what the sharded checkpoint in it holds: parameters, state.
    """

    optimizer_class: Any
    choices: Sequence[Options]
    options: Options
    named: bool
    real: bool
    shapes: Sequence[Any]
    missing: float
    masters: Options = field(default_factory=dict)
    values: Snapshot = field(default_factory=list)
    trained: list[bool] = field(default_factory=list)
    groups: list[tuple[list[int], Options]] = field(default_factory=list)
    state: Any = None
    saves: dict[str, tuple[Snapshot, Any]] = field(default_factory=dict)

    @staticmethod
    def drawn(trial: Trial) -> Job:
        rng = trial.random("job")
        optimizer_class, choices, kernels = rng.choice(OPTIMIZERS)
        options = {"lr": rng.choice(RATES), **rng.choice(choices), **rng.choice(kernels)}
        shapes = MATRICES if optimizer_class in WHOLE_ONLY else rng.choice([SHAPES, SHAPES, MERGED])
        named, missing = rng.random() < 0.3, rng.choice([0.0, 0.2])
        masters = {"master_dtype": torch.float32}
        if rng.random() > 0.3:
            masters = {}
        job = Job(optimizer_class, choices, options, named, trial.real, shapes, missing, masters)
        job.draw_group(rng, {})
        for _ in range(rng.choice([0, 0, 1, 2])):
            job.draw_group(rng)
        return job

    def draw_group(self, rng: Random, options: Options | None = None) -> None:
        """One more group of new parameters; None to draw its options, too."""
        if options is None:
            options = {"lr": rng.choice(RATES), **rng.choice(self.choices)}
        self.groups.append(([], options))
        for _ in range(rng.randint(1, 6)):
            dtype, shape = rng.choice(DTYPES), rng.choice(self.shapes)
            if self.masters:
                dtype = rng.choice([torch.float16, torch.bfloat16, torch.bfloat16, torch.float32])
            # In bfloat16 SGD multiplies its momentum by another kernel if another parameter has none yet.
            low_sgd = dtype == torch.bfloat16 and self.optimizer_class is optim.SGD
            if low_sgd or (dtype.is_complex and (self.real or self.whole_only or "fused" in self.options)):
                dtype = torch.float32
            value = torch.randn(shape, generator=torch.Generator().manual_seed(rng.getrandbits(40))).to(dtype)
            if rng.random() < 0.3 and len(shape) == 4:
                value = value.contiguous(memory_format=torch.channels_last)
            elif rng.random() < 0.3 and len(shape) == 2:
                value = value.t().contiguous().t()
            trained = rng.random() > 0.15
            if self.real and not self.values:  # DDP wants one to reduce, and the loss one to depend on
                value, trained = torch.full((8, 8), 0.5), True
            self.groups[-1][0].append(len(self.values))
            self.values.append(value)
            self.trained.append(trained)

    @property
    def whole_only(self) -> bool:
        return self.optimizer_class in WHOLE_ONLY

    def draw_partition(self, rng: Random) -> Any:
        """A name, or a function as a user may write it: parameters, or pieces of them, to ranks by chance."""
        names = [
            "sorted_greedy",
            "registration_greedy",
            "whole",
            "even",
            "equal_shares",
            "balanced",
            *([] if self.whole_only else ["cut"]),
        ]
        name, seed = rng.choice(names), rng.random()
        if name == "equal_shares":
            return functools.partial(equal_shares, range_numel=rng.choice([100, 1000, 2**20]))

        def by_chance(numels: Sequence[int], world_size: int) -> list[list[Slice]]:
            rng = Random(seed)
            owned: list[list[Slice]] = [[] for _ in range(world_size)]
            for number, numel in enumerate(numels):
                # Beside a cut at no multiple of 64, vectorized kernels would round otherwise.
                inner = range(64, numel, 64) if name == "cut" else range(0)
                cuts = sorted(rng.sample(inner, k=min(len(inner), rng.randint(0, 3))))
                for start, stop in itertools.pairwise([0, *cuts, numel]):
                    rng.choice(owned).append(Slice(number, start, stop))
            return owned

        return by_chance if name in ("whole", "cut") else name


class Model(nn.Module):
    """Each rank's loss has other gradients. A forward leaves out a share `unused` of the parameters."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.grow(job)

    def grow(self, job: Job) -> None:
        """Add the parameters that the job has more of."""
        for number in range(len(self._parameters), len(job.values)):
            param = nn.Parameter(job.values[number].clone(), requires_grad=job.trained[number])
            self.register_parameter(f"p{number}", param)

    def params_of(self, job: Job, group: int) -> Options:
        """A parameter group, as optimizers take it."""
        numbers, options = job.groups[group]
        params = list(self.named_parameters() if job.named else self.parameters())
        return {"params": [params[number] for number in numbers], **options}

    def forward(self, seed: str, unused: float) -> torch.Tensor:
        rng = Random(seed)
        generator = torch.Generator().manual_seed(rng.getrandbits(40))
        first, *others = self.parameters()
        terms = [first, first, *(param for param in others if rng.random() >= unused)]  # the first is tied
        factors = [torch.randn(param.shape, generator=generator) for param in terms]
        return torch.stack([(torch.sin(p.double()) * f).sum() for p, f in zip(terms, factors)]).sum()

    def fill_gradients(self, seed: object, missing: float) -> None:
        """Add gradients to most parameters: the same on all ranks, as if they were averaged."""
        rng = Random(f"{seed}")
        generator = torch.Generator().manual_seed(rng.getrandbits(40))
        for param in self.parameters():
            wide = torch.complex128 if param.is_complex() else torch.float64
            grad = torch.empty_like(param).copy_(torch.randn(param.shape, generator=generator, dtype=wide))
            if param.requires_grad and rng.random() >= missing:
                param.grad = grad if param.grad is None else param.grad + grad


class Twins:
    """One rank's two models and their optimizers, from one move to the next. Its methods are the operations.

    Each takes a source of random numbers of its own, so that it does the same if others are left out.

    Args:
        group: a process group, or virtual ranks' Collectives.
        rng: for what the user chooses in constructing them.
    """

    def __init__(self, job: Job, group: Any, rng: Random, folder: Path) -> None:
        self.job, self.group, self.real, self.folder = job, group, job.real, folder
        self.comm = as_collectives(group)
        self.pending: list[Any] = []
        self.hook = rng.choice(HOOKS) if self.real else None
        self.to_owners, self.shard_buckets = rng.random() < 0.5, rng.choice([None, None, False, True])
        self.unused = rng.choice([0.0, 0.0, 0.3])
        self.ddp_options = {"find_unused_parameters": True} if self.unused else {}
        self.ddp_options |= {"gradient_as_bucket_view": rng.random() < 0.5}
        self.ddp_options |= {"bucket_cap_mb": rng.choice([0.0003, 0.001, 25])}
        in_files = folder.parent if rng.random() < 0.2 else None
        self.models = [Model(job), Model(job)]
        ours, plain = [[model.params_of(job, g) for g in range(len(job.groups))] for model in self.models]
        self.zero = ZeroRedundancyOptimizer(
            ours, job.optimizer_class, group, rng.random() < 0.5, self.hook is not None,
            partition=job.draw_partition(rng), state_device=in_files,
            **job.masters, **job.options,
        )  # fmt: skip
        self.plain: Any = job.optimizer_class(plain, **job.options)
        if job.masters:
            self.plain = OnMasters(plain, job.optimizer_class, **job.options)
        self.both: list[tuple[Model, Any]] = list(zip(self.models, (self.zero, self.plain)))
        for _, optimizer in self.both:
            optimizer.defaults.setdefault("differentiable", False)  # as torch does when it loads
        if job.state is not None:
            self.plain.load_state_dict(copy.deepcopy(job.state))
            if rng.random() < 0.5:
                self.zero.load_state_dict(job.state)
            else:
                load_sharded(self.zero, folder / "move", parameters=rng.random() < 0.7)
        self.wrap()

    def wrap(self) -> None:
        """On real ranks, DDP on both models: made anew where parameters have come, or are trained or not."""
        self.ddp: list[Any] = []
        if not self.real:
            return
        gc.collect()  # a DDP that lives listens to the parameters
        for model, optimizer in self.both:
            optimizer.zero_grad()
            ddp = DDP(model, process_group=self.group, **self.ddp_options)
            hook: Any = sum_in_rank_order if self.to_owners else allreduce_hook if self.hook else None
            if optimizer is self.zero:
                hook = reduce_to_owners(self.zero) if self.to_owners else hook
                hook = self.hook(hook, ddp, self.zero, self.shard_buckets) if self.hook else hook
            if hook is not None:
                ddp.register_comm_hook(self.group, hook)
            self.ddp.append(ddp)

    # ------------------------------------------------------------------------------------- what is compared

    def check(self) -> None:
        """Both models are equal, on this rank and on all others."""
        params = [list(model.parameters()) for model in self.models]
        for number, (ours, plain) in enumerate(zip(*params)):
            assert plain.isfinite().all(), f"torch's own values of parameter {number} are not finite"
            torch.testing.assert_close(
                ours, plain, rtol=0, atol=0, msg=lambda text, n=number: f"parameter {n}: {text}"
            )
        for piece, param, *_ in self.zero.shard.owned:
            plain = torch.empty_like(param).copy_(params[1][piece.param])
            ours, plain = (flat_view(p.detach())[piece.start : piece.stop] for p in (param, plain))
            assert torch.equal(ours, plain), f"{piece} differs on its owner"
        flat = torch.cat([param.detach().reshape(-1).to(torch.complex128) for param in params[0]])
        digest = int.from_bytes(hashlib.sha256(flat.numpy().tobytes()).digest()[:6])
        assert self.of_all(digest) == [digest] * self.comm.world_size, "ranks hold different parameters"

    def of_all(self, number: int) -> list[int]:
        return torch.cat(self.comm.all_gather(torch.tensor([number]))).tolist()

    def whole_state(self, to: Any = "all") -> Any:
        """Ours, consolidated, and equal to the plain optimizer's; None on ranks that do not get it."""
        self.zero.consolidate_state_dict(to=to)
        if to not in ("all", self.comm.rank):
            return None
        assert_state_dicts_equal(self.zero.state_dict(), self.plain.state_dict())
        return copy.deepcopy(self.zero.state_dict())

    def end(self) -> Job:
        """Finish, and return the job from which the next optimizers start."""
        for pending in filter(None, self.pending):
            pending.wait()
        save_sharded(self.zero, self.folder / "move")
        return replace(self.job, values=snapshot(self.models[1]), state=self.whole_state())

    def refused(self, action: Callable[[], Any]) -> None:
        """All ranks raise an error that is meant for the user."""
        message = "nothing"
        try:
            action()
        except (TypeError, ValueError, RuntimeError, OSError) as error:
            message = f"{type(error).__name__}: {error}"
        raised = self.of_all(message != "nothing")
        assert all(raised), f"ranks that raised: {raised}; this one raised {message}"

    # --------------------------------------------------------------------------------------- the operations

    def backward(self, rng: Random) -> None:
        if self.real:
            return self.step(rng)  # where a hook makes the update, backward and step are one
        seed = rng.random()
        for model in self.models:
            model.fill_gradients(seed, self.job.missing)
        return None

    def step(self, rng: Random) -> None:
        if self.real:
            self.backward_of_ddp(rng)
        elif rng.random() < 0.2:
            return self.step_with_closure(rng)
        elif rng.random() < 0.9:
            self.backward(rng)
        only_owners = not self.real and rng.random() < 0.2
        if only_owners:
            for param in set(self.models[0].parameters()) - {own.param for own in self.zero.shard.owned}:
                param.grad = None
        if rng.random() < 0.3:
            self.clip(rng)
        for _, optimizer in self.both:
            optimizer.step()
        return self.zero_grad(rng, only_owners) if only_owners or rng.random() < 0.5 else None

    def step_with_closure(self, rng: Random) -> None:
        seed = rng.random()
        for model, optimizer in self.both:

            def closure(model: Model = model, optimizer: Any = optimizer) -> float:
                optimizer.zero_grad()
                model.fill_gradients(seed, self.job.missing)
                return seed

            assert optimizer.step(closure) == seed

    def backward_of_ddp(self, rng: Random) -> None:
        """From the data of this rank; perhaps of several batches, of which only the last is reduced."""
        seed, before = f"{rng.random()}.{self.comm.rank}", rng.choice([0, 0, 1, 2])
        for ddp, (_, optimizer) in zip(self.ddp, self.both):
            optimizer.zero_grad()
            with ddp.no_sync():
                for batch in range(before):
                    ddp(f"{seed}.{batch}", self.unused).backward()
            ddp(seed, self.unused).backward()

    def zero_grad(self, rng: Random, set_to_none: bool = False) -> None:
        set_to_none = set_to_none or self.real or rng.random() < 0.7
        for _, optimizer in self.both:
            optimizer.zero_grad(set_to_none)

    def clip(self, rng: Random) -> None:
        norm_type, foreach = rng.choice([2.0, 1.0, 3.0, float("inf")]), rng.choice([None, False, True])
        max_norm = rng.choice([0.1, 1.0, 100.0])
        gradients = [param.grad for param in self.models[1].parameters() if param.grad is not None]
        if self.zero.backward.gradients.why_no_clipping is not None:
            self.refused(lambda: clip_grad_norm_(self.zero, max_norm))
            return
        if self.hook is not None or (norm_type > 3 and not all(grad.numel() for grad in gradients)):
            return  # an update made in backward; torch knows no greatest of nothing
        ours = clip_grad_norm_(self.zero, max_norm, norm_type, foreach=foreach)
        # The norm of a split parameter is a sum in another order: see clip_grad_norm_ for how far that goes.
        low = any(grad.dtype == torch.bfloat16 for grad in gradients)
        rtol = 0.0 if self.zero.partition.is_whole else 2**-7 if low else 1e-6
        plain = get_total_norm(gradients, norm_type, foreach=foreach)
        torch.testing.assert_close(ours, plain, rtol=rtol, atol=0)
        # From the same norm, so that all that follows is equal bit for bit.
        clip_grads_with_norm_(self.models[1].parameters(), max_norm, ours, foreach)

    def options(self, rng: Random) -> None:
        number, key, value = (
            rng.randrange(len(self.job.groups)),
            rng.choice(["lr", "weight_decay"]),
            rng.choice(RATES),
        )
        for _, optimizer in self.both:
            optimizer.param_groups[number][key] = value

    def schedule(self, rng: Random) -> None:
        rate = rng.choice([0.5, 2.0])
        schedulers = [lr_scheduler.LambdaLR(optimizer, lambda step: rate**step) for _, optimizer in self.both]
        self.step(rng)
        for scheduler in schedulers:
            scheduler.step()

    def freeze(self, rng: Random) -> None:
        """Or train again. A gradient left from before moves torch's frozen parameter, and not ours."""
        numbers = range(1 if self.real else 0, len(self.job.trained))  # DDP wants one to reduce
        for number in rng.sample(numbers, k=min(len(numbers), rng.randint(1, 3))):
            self.job.trained[number] ^= True
            for model, optimizer in self.both:
                param = model.get_parameter(f"p{number}").requires_grad_(self.job.trained[number])
                param.grad = param.grad if optimizer is self.zero else None
        for _, optimizer in self.both if not self.real else []:
            optimizer.step()
        self.zero_grad(rng, set_to_none=True)
        self.wrap()

    def add_group(self, rng: Random) -> None:
        self.job.draw_group(rng)
        for model, optimizer in self.both:
            model.grow(self.job)
            optimizer.add_param_group(model.params_of(self.job, -1))
        self.wrap()

    def consolidate(self, rng: Random) -> None:
        to = rng.choice(["all", "all", rng.randrange(self.comm.world_size)])
        state = self.whole_state(to)
        if to == "all" and rng.random() < 0.5:
            for _, optimizer in self.both:
                optimizer.load_state_dict(copy.deepcopy(state))

    def save(self, rng: Random) -> None:
        name, parameters = rng.choice("ab"), rng.random() < 0.8
        save = rng.choice([save_sharded, save_sharded_async])
        self.pending.append(save(self.zero, self.folder / name, parameters=parameters, notes={"name": name}))
        values = snapshot(self.models[1]) if parameters else []
        self.job.saves[name] = values, copy.deepcopy(self.plain.state_dict())

    def restore(self, rng: Random) -> None:
        """Load a save, perhaps from before a move; a save of other groups must be refused."""
        if not self.job.saves:
            self.save(rng)
            return
        name, parameters = rng.choice(sorted(self.job.saves)), rng.random() < 0.7
        values, state = self.job.saves[name]

        def load() -> Any:
            if values and not parameters and rng.random() < 0.5:
                return self.zero.load_state_dict(state) or {"name": name}
            return load_sharded(self.zero, self.folder / name, parameters=parameters)

        of_groups = [len(group["params"]) for group in state["param_groups"]]
        if of_groups != [len(numbers) for numbers, _ in self.job.groups] or (parameters and not values):
            self.refused(load)
            return
        assert load() == {"name": name}
        with torch.no_grad():  # first: masters that are not in a state are made from the parameters
            for param, value in zip(self.models[1].parameters(), values if parameters else []):
                param.copy_(value)
        self.plain.load_state_dict(copy.deepcopy(state))

    def join(self, rng: Random) -> None:
        """On real ranks: each has another number of batches."""
        if self.unused:  # once a rank has left, DDP takes for used what the batch before did not use
            return
        batches = [rng.choice([0, 1, 2, 4]) for _ in range(self.comm.world_size)]
        batches[rng.randrange(len(batches))] = 3
        by_initial = self.to_owners or self.hook is not None or rng.random() < 0.5
        seed = f"{rng.random()}.{self.comm.rank}"
        for ddp, (_, optimizer) in zip(self.ddp, self.both):
            joined = [ddp, self.zero] if optimizer is self.zero else [ddp]
            with Join(joined, divide_by_initial_world_size=by_initial):
                for batch in range(batches[self.comm.rank]):
                    optimizer.zero_grad()
                    ddp(f"{seed}.{batch}", 0.0).backward()
                    optimizer.step()
            optimizer.zero_grad()
        # DDP brings all ranks the parameters of one that had data to the end. The plain state is left to us.
        states: list[Any] = [None] * len(batches)
        dist.all_gather_object(states, self.plain.state_dict()["state"], group=self.group)
        state = states[batches.index(max(batches))]
        if self.job.masters:
            self.plain.load_state_dict({**self.plain.state_dict(), "state": state})
        params = [param for group in self.plain.param_groups for param in group["params"]]
        self.plain.state.update({params[number]: of_param for number, of_param in state.items()})

    def mistake(self, rng: Random) -> None:
        """One of the user's, on one rank or on all. Every rank must raise, and nothing may have changed."""
        zero, world_size = self.zero, self.comm.world_size
        bad = rng.randrange(world_size) == self.comm.rank
        state = self.plain.state_dict()
        torn = {"state": state["state"], "param_groups": state["param_groups"][1:]}
        first = next(self.models[0].parameters())
        new = {"params": [("new", nn.Parameter(torch.zeros(3 if bad else 2)))]}
        mistakes: list[Callable[[], Any]] = [
            lambda: zero.consolidate_state_dict(to=world_size if bad else 0),
            lambda: zero.load_state_dict(torn if bad else state),
            lambda: zero.load_state_dict(state | {"state": 7} if bad else state),
            lambda: zero.add_param_group({"params": [("again", first)] if self.job.named else [first]}),
            lambda: clip_grad_norm_(zero, "much" if bad else 1.0),  # type: ignore[arg-type]
            lambda: load_sharded(zero, self.folder / "nowhere"),
            lambda: save_sharded(zero, self.folder / "c", notes={"odd": object()} if bad else {}),
        ]
        if world_size > 1:
            mistakes += [
                lambda: zero.consolidate_state_dict(to=0 if bad else "all"),
                lambda: zero.add_param_group(new),
                lambda: clip_grad_norm_(zero, 2.0 if bad else 1.0),
                lambda: save_sharded(zero, self.folder / "c", parameters=bad),
                lambda: load_sharded(zero, self.folder / ("a" if bad else "b")),
            ]
        self.refused(rng.choice(mistakes))


# ------------------------------------------------------------------------------------------- whole sequences


def on_rank(group: Any, trial: Trial, job: Job, start: int, operations: list[Operation], folder: Path) -> Job:
    """From one move to the next; `start` is the number of the first."""
    doing = f"construction after operation {start}"
    try:
        twins = Twins(copy.deepcopy(job), group, trial.random(f"construction {start}"), folder)
        for number, name in operations:
            doing = f"operation {number}, {name}"
            getattr(twins, name)(trial.random(number))
            twins.check()
        doing = "the end"
        return twins.end()
    except Exception as error:
        raise AssertionError(f"seed {trial.seed}, {doing}: {type(error).__name__}: {error}") from error


def play(trials: Sequence[Trial], folder: str) -> None:
    """One after the other. Where ranks are processes, each of them calls it."""
    for trial in trials:
        job = Job.drawn(trial)
        parts: list[tuple[int, list[Operation]]] = [(-1, [])]
        for number, name in trial.operations:
            parts += [(number, [])] if name == "move" else []
            parts[-1][1].extend([] if name == "move" else [(number, name)])
        for start, operations in parts:
            rng = trial.random(f"ranks {start}")
            size = max(rng.randint(1, trial.ranks), rng.randint(1, trial.ranks))
            args = trial, job, start, operations, Path(folder, f"{trial.seed}")
            if not trial.real:
                job = virtual.run(on_rank, size, *args, timeout=TIMEOUT)[0]
                continue
            members = sorted(rng.sample(range(trial.ranks), k=size))
            group = dist.new_group(members)
            given = [on_rank(group, *args) if dist.get_rank() in members else None]
            gc.collect()  # an optimizer that lives holds the directory that it saved to
            dist.broadcast_object_list(given, src=members[0])
            job = given[0]  # type: ignore[assignment]


def failure(*trials: Trial) -> str | None:
    """Play trials, and return their error; None if they have none."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            if trials[0].real:
                ranks.run(play, trials[0].ranks, trials, folder, timeout=TIMEOUT)
            else:
                play(trials, folder)
        except (RuntimeError, ranks.RankError) as error:
            return str(error)
    return None


def search(trials: Sequence[Trial]) -> Iterator[str]:
    """Play them, and explain each that fails."""
    if failure(*trials):
        alone = [explained(trial) for trial in trials if failure(trial)]
        yield from alone or [f"{failure(*trials)}\n\nEach alone does not fail: {trials}"]


def explained(trial: Trial) -> str:
    """Return the error of a failing trial without the operations that it does not need, last ones first."""
    for number, _ in reversed(trial.operations):
        shorter = replace(trial, keep=tuple(n for n, _ in trial.operations if n != number))
        trial = shorter if shorter.keep and failure(shorter) else trial
    return f"{failure(trial)}\n\nIt needs {[name for _, name in trial.operations]}:\n{trial.command}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4, help="at most; after each move it is another number")
    parser.add_argument(
        "--real", action="store_true", help="processes over Gloo, with DistributedDataParallel"
    )
    parser.add_argument("--sequences", type=int, default=100)
    parser.add_argument(
        "--seed", type=int, default=0, help="of the first sequence; the next one has the next"
    )
    parser.add_argument(
        "--keep", type=lambda text: tuple(map(int, text.split(","))), help="operations, by number"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    trials = [Trial(args.seed + i, args.ranks, args.real, args.keep) for i in range(args.sequences)]
    failed = 0
    for first in range(0, len(trials), 20):  # a call on real ranks takes longer to begin than a sequence
        for explanation in search(trials[first : first + 20]):
            failed += 1
            print(explanation, "\n", flush=True)
    made = Counter(name for trial in trials for _, name in trial.operations)
    print(f"{len(trials)} sequences, {failed} failed; {made.total()} operations: {dict(made)}")
    sys.exit(failed > 0)


if __name__ == "__main__":
    from fuzzer import main as importable  # so that ranks find by name what they are to call

    importable()
