"""Training for the optimizer's tests: an awkward model, data that differ by rank, and a plain run to equal.

A test writes its training as a script, a generator that yields after each update:

    def script(model, optimizer, backward):
        for step in range(3):
            backward(step)
            optimizer.step()
            yield

`assert_trains_as_plain(script, ...)` runs it once with the plain torch optimizer and once on each virtual
rank with ZeroRedundancyOptimizer, and wants every parameter equal bit for bit at every yield.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from zero_ref.comm.collectives import Collectives
from zero_ref.lab import virtual
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.plan.partition import Partition, Slice
from zero_ref.plan.rules import equal_shares, even, sorted_greedy
from zero_ref.shard.buckets import flat_view
from zero_ref.shard.groups import PARAM_KEYS, options_of, replace_options
from zero_ref.shard.owned import MASTER

T = TypeVar("T")
NEVER_S = 3600.0  # longer than pytest waits: where only this ends a test it has failed
Backward = Callable[[int], None]
Script = Callable[[Any, Optimizer, Backward], Iterator[None]]
Snapshot = list[torch.Tensor]
Groups = Callable[[nn.Module], Any]

ELEMENTWISE = [
    (optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "foreach": True}),
    (optim.SGD, {"lr": 0.1, "fused": True}),
    (optim.Adam, {"amsgrad": True}),
    (optim.Adam, {"fused": True}),
    (optim.AdamW, {"maximize": True}),
    (optim.AdamW, {"fused": True, "weight_decay": 0.1}),
    (optim.AdamW, {"foreach": True}),
    (optim.AdamW, {"foreach": False}),
    (optim.AdamW, {"capturable": False, "lr": torch.tensor(0.01), "foreach": False}),
    (optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.5}),
    (optim.Adagrad, {"lr": 0.1, "fused": True}),
    (optim.RMSprop, {"centered": True, "momentum": 0.5}),
    (optim.Adadelta, {"foreach": True}),
    (optim.Adamax, {}),
    (optim.NAdam, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    (optim.RAdam, {"lr": 0.1}),
    (optim.ASGD, {"t0": 1.0}),
    (optim.Rprop, {}),
]
"""torch's optimizers that update each element by itself, with options that choose other kernels."""


def caught(function: Callable[[], Any]) -> str:
    """Return the error of `function`, as 'Type: text', or "nothing"."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def in_a_hurry(prepare: Callable[[Any], T]) -> T:
    """Return `prepare(group)`, for a group with the shortest time-out that suffices; all ranks call this.

    Half a second is enough if nothing else runs. On a busy machine longer time-outs are tried.
    """
    prepared, done = None, False
    for seconds in (0.5, 2, 8, 32, 128):
        dist.barrier()  # of the default group, which is patient
        try:
            prepared = prepare(dist.new_group(timeout=timedelta(seconds=seconds)))
            done = True
        except RuntimeError as error:
            done, failure = False, error
        all_done = [None] * dist.get_world_size()
        dist.all_gather_object(all_done, done)
        if all(all_done):
            return prepared  # type: ignore[return-value]
    raise failure


def dealt(numels: Sequence[int], world_size: int) -> list[list[int]]:
    """A user's own rule: parameter i to rank i mod N, as lists of parameter numbers."""
    return [list(range(rank, len(numels), world_size)) for rank in range(world_size)]


def cut_anywhere(numels: Sequence[int], world_size: int) -> Partition:
    """A user's own rule that returns a Partition: another alignment than the default."""
    return even(numels, world_size, alignment=128)


def finished_partition(numels: Sequence[int], world_size: int) -> Partition:
    return sorted_greedy(list(numels), world_size)


WHOLE: list[Any] = ["sorted_greedy", "registration_greedy", dealt]
PARTITIONS: list[Any] = [*WHOLE, "even", cut_anywhere, partial(equal_shares, range_numel=300)]
MODES = list(itertools.product(PARTITIONS, [False, True]))  # (partition, parameters_as_bucket_view)


Model = TypeVar("Model", bound=nn.Module)


@torch.no_grad()
def filled(model: Model, seed: int = 0) -> Model:
    """The model with random values, the same on all virtual ranks, which share the global generator."""
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        param.copy_(torch.randn(param.shape, generator=generator) * 0.3)
    return model


class Tangle(nn.Module):
    """A small language model with every kind of parameter that the optimizer must take.

    An embedding tied to the output, a channels_last convolution, a scalar, one without elements, a frozen
    one, one large enough for `even` to cut. Inputs are (batch, 16) token numbers below 13.
    """

    def __init__(self, seed: int = 0, channels_last: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 8)
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 70)
        self.down = nn.Linear(70, 8, bias=False)
        self.scale = nn.Parameter(torch.empty(()))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.shift = nn.Parameter(torch.empty(8), requires_grad=False)
        filled(self, seed)
        if channels_last:
            self.conv.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.out = nn.Linear(8, 13, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        x = x + self.conv(x.view(-1, 4, 4, 8)).reshape(x.shape) + self.shift
        x = x + self.scale * self.down(torch.tanh(self.up(self.norm(x))))
        return self.out(x[:, :-1]) + self.nothing.sum()


class Wider(Tangle):
    """One of its parameters has another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.norm.bias = nn.Parameter(torch.zeros(9))


def of_several_dtypes() -> Tangle:
    model = Tangle()
    model.up.to(torch.bfloat16)
    model.conv.to(torch.float64)
    model.down.weight.data = model.down.weight.data.to(torch.complex64)
    return model


def loss_on_own_data(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """The loss of a Tangle on tokens that no other rank and no other step sees."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(0, 13, (2, 16), generator=generator)
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens[:, 1:].flatten())


def snapshot(model: nn.Module) -> Snapshot:
    return [param.detach().clone() for param in model.parameters()]


def fill_gradients(
    params: Sequence[torch.Tensor], step: int, world_size: int, comm: Collectives | None = None
) -> None:
    """Give each trainable parameter the average of random gradients that differ by rank.

    With `comm` a rank makes its own and all-reduces them; without, those of all ranks are summed here, in the
    same order.
    """

    def of_rank(rank: int, index: int, param: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(10_000 * step + 100 * index + rank)
        values = torch.randn(param.shape, generator=generator, dtype=torch.float64).to(param.dtype)
        return torch.empty_like(param).copy_(values)

    for index, param in enumerate(params):
        if not param.requires_grad:
            continue
        with torch.no_grad():
            if comm is None:
                total = of_rank(0, index, param)
                for rank in range(1, world_size):
                    total = total + of_rank(rank, index, param)
            else:
                total = of_rank(comm.rank, index, param)
                comm.all_reduce(total).wait()
            param.grad = total / world_size


def sum_in_rank_order(group, bucket):  # type: ignore[no-untyped-def]
    """A reference for `reduce_to_owners`: everyone gets everything, and adds it up in its order."""
    mine = bucket.buffer().mul_(1 / dist.get_world_size(group))
    total, *others = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather([total, *others], mine, group=group)
    for other in others:
        total.add_(other)
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(mine.copy_(total))
    return done


def run_script(
    script: Script, model: nn.Module, optimizer: Optimizer, world_size: int, comm: Collectives | None = None
) -> list[Snapshot]:
    """The parameters after each yield of `script`."""

    def backward(step: int) -> None:
        fill_gradients(list(model.parameters()), step, world_size, comm)

    return [snapshot(model) for _ in script(model, optimizer, backward)]


def assert_same(ours: list[Snapshot], plain: list[Snapshot], label: str) -> None:
    """Equal bit for bit, parameter by parameter, at every step."""
    assert len(ours) == len(plain) > 0, f"{label}: {len(ours)} steps against {len(plain)}"
    for step, (a, b) in enumerate(zip(ours, plain, strict=True)):
        for index, (x, y) in enumerate(zip(a, b, strict=True)):
            assert x.dtype == y.dtype, f"{label}: step {step}, parameter {index}: {x.dtype}, not {y.dtype}"
            assert x.isfinite().all(), f"{label}: step {step}, parameter {index} is not finite"
            assert torch.equal(x, y), (
                f"{label}: step {step}, parameter {index} of shape {tuple(x.shape)} differs by up to "
                f"{(x - y).abs().max():.2e}"
            )


def assert_moved(model: nn.Module, before: Snapshot, after: Snapshot) -> None:
    """Every trainable parameter moved: else equality would show nothing."""
    for (name, param), old, new in zip(model.named_parameters(), before, after, strict=True):
        if param.requires_grad and param.numel():
            assert not torch.equal(old.to(new.dtype), new), f"{name} did not move"


def describe(partition: object) -> str:
    return getattr(partition, "__name__", None) or (partition if isinstance(partition, str) else "given")


def assert_trains_as_plain(
    script: Script,
    optimizer_class: type[Optimizer] = optim.AdamW,
    *,
    world_sizes: Sequence[int] = (1, 3),
    modes: Sequence[tuple[Any, bool]] = MODES,
    make_model: Callable[[], nn.Module] = Tangle,
    groups: Callable[[Any], Any] = lambda model: model.parameters(),
    check_moved: bool = True,
    elementwise: bool = True,
    **options: Any,
) -> None:
    """See the module's text. `groups(model)` gives the optimizer's `params`.

    Args:
        elementwise: what is said of a class that is not torch's.
    """
    for world_size in world_sizes:
        model = make_model()
        before = snapshot(model)
        plain = run_script(script, model, optimizer_class(groups(model), **options), world_size)
        if check_moved:
            assert_moved(model, before, plain[-1])

        for partition, as_view in modes:

            def on_rank(
                comm: Collectives, partition: Any = partition, as_view: bool = as_view
            ) -> list[Snapshot]:
                model = make_model()
                optimizer = ZeroRedundancyOptimizer(
                    groups(model),
                    optimizer_class,
                    comm,
                    parameters_as_bucket_view=as_view,
                    partition=partition,
                    elementwise=elementwise,
                    **options,
                )
                return run_script(script, model, optimizer, comm.world_size, comm)

            for rank, ours in enumerate(virtual.run(on_rank, world_size, timeout=20)):
                label = f"{optimizer_class.__name__}, {describe(partition)}, bucket view {as_view}"
                assert_same(ours, plain, f"{label}, rank {rank} of {world_size}")


def assert_state_dicts_equal(ours: dict[str, Any], plain: dict[str, Any]) -> None:
    """Key for key: values, types, dtypes, shapes, strides."""
    assert ours.keys() == plain.keys()
    assert ours["param_groups"] == plain["param_groups"], (ours["param_groups"], plain["param_groups"])
    assert list(ours["state"]) == sorted(plain["state"])
    for number, state in plain["state"].items():
        assert ours["state"][number].keys() == state.keys(), f"parameter {number}"
        for key, value in state.items():
            our_value, label = ours["state"][number][key], f"{key!r} of parameter {number}"
            assert type(our_value) is type(value), label
            if isinstance(value, torch.Tensor):
                assert (our_value.dtype, our_value.shape) == (value.dtype, value.shape), label
                assert our_value.stride() == value.stride() or not value.numel(), label
                assert our_value.device.type == "cpu", label
                assert not our_value.requires_grad, label
                assert torch.equal(our_value, value), label
            else:
                assert our_value == value, label


# ------------------------------------------------------------------------------------------- checkpoints


def owned_gradients(zero: ZeroRedundancyOptimizer) -> dict[Slice, torch.Tensor]:
    """This rank's gradients by slice, 1-D in memory order."""
    in_slices = zero.backward.gradients.in_slices
    found = {}
    for own in zero.shard.owned:
        if in_slices and not own.is_whole:
            assert own.param.grad is None or not own.param.grad.any()
            if own.leaf.grad is not None:
                found[own.piece] = own.leaf.grad.clone()
        elif own.param.grad is not None:
            found[own.piece] = flat_view(own.param.grad)[own.piece.start : own.piece.stop].clone()
    return found


def in_groups(function: Callable[..., Any], world_size: int, replicas: int) -> list[Any]:
    """Call `function(its group, the same ranks of other groups, number)` on each virtual rank."""
    groups = [virtual.World(world_size, 60.0) for _ in range(replicas)]
    across = [virtual.World(replicas, 60.0) for _ in range(world_size)]

    def on_rank(all_ranks: Collectives) -> Any:
        group, rank = divmod(all_ranks.rank, world_size)
        others = virtual.VirtualCollectives(across[rank], group)
        return function(virtual.VirtualCollectives(groups[group], rank), others, group)

    return virtual.run(on_rank, world_size * replicas)


def all_parameters(model: nn.Module) -> Any:
    return model.parameters()


def train(model: nn.Module, optimizer: Optimizer, steps: range) -> Iterator[None]:
    """The same gradients at every world size: sums over more or fewer ranks would round otherwise."""
    for step in steps:
        fill_gradients(list(model.parameters()), step, world_size=1)
        optimizer.step()
        yield


class Run:
    """A model, its optimizer and what became of them, plain or on virtual ranks."""

    def __init__(
        self,
        optimizer_class: Any = optim.AdamW,
        groups: Groups = all_parameters,
        make_model: Any = Tangle,
        **options: Any,
    ) -> None:
        self.optimizer_class, self.groups, self.make_model, self.options = (
            optimizer_class,
            groups,
            make_model,
            options,
        )

    def plain(
        self, steps: range, values: Snapshot | None = None, state: Any = None
    ) -> tuple[list[Snapshot], Any]:
        """Train without ranks, perhaps from a checkpoint: the parameters after each step, the state dict."""
        model = self.model(values)
        optimizer = self.optimizer_class(self.groups(model), **self.options)
        if state is not None:
            optimizer.load_state_dict(
                copy.deepcopy(state)
            )  # torch's loading keeps the step counters themselves
        return [snapshot(model) for _ in train(model, optimizer, steps)], copy.deepcopy(
            optimizer.state_dict()
        )

    def on_rank(
        self,
        comm: Collectives,
        steps: range,
        values: Snapshot | None = None,
        state: Any = None,
        to: Any = "all",
        **mode: Any,
    ) -> tuple[list[Snapshot], Any]:
        model = self.model(values)
        optimizer = ZeroRedundancyOptimizer(
            self.groups(model), self.optimizer_class, comm, **mode, **self.options
        )
        if state is not None:
            optimizer.load_state_dict(state)
        trained = [snapshot(model) for _ in train(model, optimizer, steps)]
        optimizer.consolidate_state_dict(to=to)
        return trained, optimizer.state_dict() if to in ("all", comm.rank) else None

    def sharded(self, world_size: int, *args: Any, **kwargs: Any) -> list[tuple[list[Snapshot], Any]]:
        """The same on each of `world_size` virtual ranks."""
        return virtual.run(self.on_rank, world_size, *args, timeout=20, **kwargs)

    def model(self, values: Snapshot | None) -> nn.Module:
        model: nn.Module = self.make_model()
        with torch.no_grad():
            for param, value in zip(model.parameters(), values or [], strict=False):
                param.copy_(value)
        return model


def ring_early(comm: Any) -> list[dict[int, str]]:
    """Return the alarms that a rank hears in updates 2, 3 and 4, if rank 1 has rung for the third."""
    alarm = comm.open_channel(0, {torch.device("cpu")})
    if comm.rank == 1:
        alarm.ring("lost", 3)
    comm.all_gather(torch.zeros(1))  # comes after the alarm
    return [alarm.heard(update) for update in (2, 3, 4)]


class CountingReads(TorchDispatchMode):
    """Counts in `reads` how often the host reads one element, waiting for it if it is on an accelerator."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.reads += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


# ------------------------------------------------------------------------------------------------ masters


class Listing(optim.SGD):
    """Keeps a list of its parameters of its own, and steps those."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.all = [param for group in self.param_groups for param in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.all:
            if param.grad is not None:
                param -= 0.25 * param.grad


class OnMasters(optim.Optimizer):
    """The reference for `master_dtype=torch.float32`: every rank keeps and steps whole copies in 32 bits."""

    def __init__(self, params: Any, optimizer_class: Any, **options: Any) -> None:
        self.used = set[int]()
        self.optim: Any = None
        super().__init__(params, {})
        groups = [
            {key: value for key, value in group.items() if key != "param_names"}
            | {"params": self.copies_of(group["params"])}
            for group in self.param_groups
        ]
        self.optim = optimizer_class(groups, **options)
        self.defaults = self.optim.defaults
        self.copy_options(self.optim.param_groups, self.param_groups)

    @property
    def pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        groups = zip(self.param_groups, self.optim.param_groups, strict=True)
        return [pair for ours, inner in groups for pair in zip(ours["params"], inner["params"], strict=True)]

    @staticmethod
    def is_copied(param: torch.Tensor) -> bool:
        return param.is_floating_point() and param.itemsize == 2

    def copies_of(self, params: Any) -> list[torch.Tensor]:
        copies = [param.detach().float() if self.is_copied(param) else param for param in params]
        return [one if one is param else one.requires_grad_() for one, param in zip(copies, params)]

    def copy_options(self, source: Any, target: Any) -> None:
        for theirs, ours in zip(source, target, strict=True):
            ours.update({key: value for key, value in theirs.items() if key not in PARAM_KEYS})

    def add_param_group(self, group: Any) -> None:
        options = options_of(group)
        super().add_param_group(group)
        if self.optim is not None:
            copies = self.copies_of(self.param_groups[-1]["params"])
            self.optim.add_param_group({**options, "params": copies})
            replace_options(self.optim.param_groups[-1:], self.param_groups[-1:])

    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure() if closure else None
        self.copy_options(self.param_groups, self.optim.param_groups)
        for number, (param, master) in enumerate(self.pairs):
            if master is not param:
                grad = param.grad if param.requires_grad else None
                master.grad = None if grad is None else grad.float()
                self.used |= {number} if grad is not None else set()
        self.optim.step()
        for param, master in self.pairs:
            if master is not param and param.requires_grad:
                self.publish(param, master)
        self.copy_options(self.optim.param_groups, self.param_groups)
        return loss

    @torch.no_grad()
    def publish(self, param: torch.Tensor, master: torch.Tensor) -> None:
        param.copy_(master)

    def state_dict(self) -> Any:
        state_dict = self.optim.state_dict()
        for number, (param, master) in enumerate(self.pairs):
            if master is not param and number in self.used:
                state_dict["state"].setdefault(number, {})[MASTER] = master.detach()
        self.copy_options(self.param_groups, state_dict["param_groups"])
        for ours, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            saved.update({key: ours[key] for key in ("param_names",) if key in ours})
        return state_dict

    @torch.no_grad()
    def load_state_dict(self, state_dict: Any) -> None:
        state = {number: dict(of_param) for number, of_param in state_dict["state"].items()}
        masters = {number: of_param.pop(MASTER, None) for number, of_param in state.items()}
        groups = [{k: v for k, v in g.items() if k != "param_names"} for g in state_dict["param_groups"]]
        self.used = {number for number, of_param in state_dict["state"].items() if MASTER in of_param}
        self.optim.load_state_dict({"state": {n: s for n, s in state.items() if s}, "param_groups": groups})
        for ours, loaded in zip(self.param_groups, self.optim.param_groups, strict=True):
            for key in ours.keys() - loaded.keys() - {"param_names"}:
                del ours[key]
        self.copy_options(self.optim.param_groups, self.param_groups)
        for number, (param, master) in enumerate(self.pairs):
            if master is not param:
                saved = masters.get(number)
                master.copy_(param if saved is None else saved)
