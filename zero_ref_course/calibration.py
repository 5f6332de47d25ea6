"""A cluster from times measured on this machine, and whole iterations to test it with: chapter 16's tools.

Each piece of an iteration has a cost for each call and a cost for each byte or operation: a collective has
rounds and bytes, forward and backward have tensors and floating-point operations, an update has tensors and
bytes. `fit` serves all of them. `calibrate` fits on every other size and predicts the sizes in between. It
never sees an iteration: `take_turns` times these beside the pieces, so that a busy minute of the machine
touches both alike, and `compare_steps` holds them against `predict_step`.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from zero_ref.comm import devices
from zero_ref.comm.backend import as_collectives
from zero_ref.comm.collectives import Collectives, PendingCall
from zero_ref.lab import meter, ranks
from zero_ref.lab.config import GPTConfig, TrainConfig
from zero_ref.lab.model import GPT, passages
from zero_ref.lab.outcome import predict
from zero_ref.lab.strategies import trainable
from zero_ref.plan.calls import Call
from zero_ref.simulator.cluster import Cluster, Link
from zero_ref.simulator.device import Device
from zero_ref.simulator.play import Played, play
from zero_ref.simulator.price import Workload
from zero_ref.simulator.schedule import Schedule
from zero_ref.simulator.traffic import traffic

OPS = ("all_reduce", "broadcast")
"""The collectives of the strategies of `config.COMPARED`."""

ADAMW_BYTES = 28
"""For each fp32 element, AdamW reads gradient, parameter and two moments, and writes all but the gradient."""

# ---------------------------------------------------------------------------------------------- fitting


class Piece(NamedTuple):
    """A part of an iteration, timed once.

    Args:
        what: one of OPS; "train" for forward and backward; "update" for an optimizer's step.
        calls: rounds of messages, or tensors, each of which has a fixed cost.
        amount: bytes or floating-point operations.
        ms: the time of the slowest rank.
    """

    what: str
    calls: float
    amount: float
    ms: float


@dataclass(frozen=True)
class Fit:
    """A fixed cost for each call, or tensor, and 10^9 bytes, or operations, a second."""

    what: str
    overhead_us: float
    giga_per_s: float

    @property
    def link(self) -> Link:
        """The link of a Cluster, for a collective."""
        return Link(self.overhead_us, self.giga_per_s)


class NoRateError(ValueError):
    """Larger sizes took no longer than small ones, which happens on a busy machine."""


def undisturbed_ms(times_ms: Sequence[float]) -> float:
    """The time that repeats agree on: their lower quartile.

    Other programs on a machine make a repeat longer, never shorter. Once they disturb half of the repeats, a
    median would move; the shortest time would be an exception.

    >>> undisturbed_ms([1.0, 1.25, 1.5, 8.0, 400.0])
    1.25
    """
    if len(times_ms) == 1:
        return times_ms[0]
    return statistics.quantiles(times_ms, n=4, method="inclusive")[0]


def fit(pieces: Iterable[Piece]) -> Fit:
    """The cost of a call and the rate that explain the times of one kind of piece best.

    The `undisturbed_ms` of each size counts, and each size counts alike: the fit minimises the sum of
    relative errors, not of their squares, so that neither one slow size nor the largest decides. No cost is
    negative.

    >>> exact = [Piece("broadcast", 1, nbytes, Link(50, 2).ms(1, nbytes)) for nbytes in (1e3, 1e5, 1e7)]
    >>> fitted = fit(exact)
    >>> round(fitted.overhead_us, 6), round(fitted.giga_per_s, 6)
    (50.0, 2.0)

    Raises:
        ValueError: there are not two sizes with different amounts for each call.
        NoRateError: larger sizes take no longer.
    """
    measured = _by_size(pieces)
    what = next((what for what, _, _ in measured), "nothing")
    sizes = [(calls, amount) for _, calls, amount in measured]
    if len({amount / calls for calls, amount in sizes}) < 2:
        raise ValueError(
            f"{what}: {len(sizes)} size(s) cannot tell the cost of a call from that of its contents: measure "
            "at least two that differ in bytes, or operations, for each call."
        )
    per_call, per_unit = _least_relative_errors(sizes, list(measured.values()))
    if per_unit <= 0:
        raise NoRateError(
            f"{what}: larger sizes took no longer than small ones, so there is no rate. Measure larger "
            "sizes, more often."
        )
    return Fit(what, 1e3 * per_call, 1 / (1e6 * per_unit))


def _by_size(pieces: Iterable[Piece]) -> dict[tuple[str, float, float], float]:
    """The `undisturbed_ms` of each size, by its `what`, `calls` and `amount`."""
    times: dict[tuple[str, float, float], list[float]] = {}
    for what, calls, amount, ms in pieces:
        times.setdefault((what, calls, amount), []).append(ms)
    return {size: undisturbed_ms(ms) for size, ms in times.items()}


def _least_relative_errors(sizes: Sequence[tuple[float, float]], ms: Sequence[float]) -> tuple[float, float]:
    """Milliseconds for each call, not negative, and for each unit, with the least sum of relative errors.

    Times that shrink as sizes grow give negative milliseconds for each unit. The method is iterated least
    squares, each size weighted by the inverse of its last error.
    """
    largest = max(amount for _, amount in sizes)  # to scale by: the squares of bytes would drown the calls
    rows = [(calls / time, amount / largest / time) for (calls, amount), time in zip(sizes, ms)]
    weights = [1.0] * len(rows)
    per_call = per_unit = 0.0
    for _ in range(40):
        cc = sum(w * c * c for w, (c, _) in zip(weights, rows))
        cu = sum(w * c * u for w, (c, u) in zip(weights, rows))
        uu = sum(w * u * u for w, (_, u) in zip(weights, rows))
        c1 = sum(w * c for w, (c, _) in zip(weights, rows))
        u1 = sum(w * u for w, (_, u) in zip(weights, rows))
        determinant = cc * uu - cu * cu
        if determinant > 0:
            per_call = (c1 * uu - u1 * cu) / determinant
            per_unit = (u1 * cc - c1 * cu) / determinant
        if determinant <= 0 or per_call < 0:
            per_call, per_unit = 0.0, u1 / uu
        # Errors below a thousandth weigh alike: a size that is met exactly must not become infinitely heavy.
        weights = [1 / max(abs(per_call * c + per_unit * u - 1), 1e-3) for c, u in rows]
    return per_call, per_unit / largest


@dataclass(frozen=True)
class Calibration:
    """A measured machine.

    Args:
        fits: one for each kind of piece.
        held_out: by kind, predicted / measured - 1 for each size that was not fitted.
    """

    cluster: Cluster
    fits: tuple[Fit, ...]
    held_out: dict[str, list[float]]

    def worst_error(self, what: str) -> float:
        """The largest relative error among the sizes of `what` that were not fitted."""
        return max(map(abs, self.held_out[what]))


def calibrate(pieces: Sequence[Piece]) -> Calibration:
    """Fit on every other size, the smallest and the largest among them, and predict the others.

    The ranks of the cluster are processes of one machine, which share its loopback and its cores, so that
    they do not send while they compute.

    Args:
        pieces: at least three sizes of each of OPS, of "train" and of "update"; repeats are welcome.
    Raises:
        ValueError: there are too few sizes, or `fit` raised it.
    """
    fits, held_out = {}, {}
    for what in dict.fromkeys(piece.what for piece in pieces):
        of_kind = [piece for piece in pieces if piece.what == what]
        amounts = sorted({piece.amount for piece in of_kind})
        if len(amounts) < 3:
            raise ValueError(
                f"{what}: {len(amounts)} sizes; give 3 or more, so that some are fitted and others predicted."
            )
        kept_out = amounts[1:-1:2]
        fits[what] = fit(piece for piece in of_kind if piece.amount not in kept_out)
        measured = _by_size(piece for piece in of_kind if piece.amount in kept_out)
        held_out[what] = [
            fits[what].link.ms(calls, amount) / ms - 1 for (_, calls, amount), ms in measured.items()
        ]
    train, update = fits["train"], fits["update"]
    device = Device(
        "this machine",
        tflops=train.giga_per_s / 1e3,
        reached=1.0,  # the measured rate is what training reached
        memory_gb=None,
        memory_gb_per_s=update.giga_per_s,
        overhead_us=train.overhead_us,
        update_overhead_us=update.overhead_us,
    )
    links = {op: fits[op].link for op in OPS}
    cluster = Cluster(
        "this machine",
        device,
        ranks_per_node=4096,  # one machine was measured, so no number of ranks fills a second one
        within=links["broadcast"],
        between=links["broadcast"],
        backend="gloo",
        shared=True,
        overlaps=False,
        link_of_op=links,
    )
    return Calibration(cluster, tuple(fits.values()), held_out)


# ---------------------------------------------------------------------------------------------- measuring


class TrainingSize(NamedTuple):
    """A model and the passages of one iteration on each rank."""

    model: GPTConfig
    batch_size: int


@dataclass(frozen=True)
class Effort:
    """The pieces to measure, and how often.

    Args:
        nbytes: payloads of each collective.
        training: models to train.
        rounds: how often each is timed.
    """

    nbytes: tuple[int, ...]
    training: tuple[TrainingSize, ...]
    rounds: int


def time_collectives(nbytes: Sequence[int], rounds: int, ops: Sequence[str] = OPS) -> list[Piece]:
    """Time each operation at each payload, `rounds` times each.

    Collective: all ranks of the default group, with equal arguments.
    Returns:
        The same pieces on all ranks. Each call that was started together with others has its share of the
        time. The amount is all bytes on the wire, as ranks share a loopback.
    """
    comm = as_collectives(None)
    starts = {(op, size): _starter(op, size, comm) for size in nbytes for op in ops}
    timed: list[Piece] = []
    for number, ((op, size), start) in itertools.product(range(rounds + 1), starts.items()):
        calls = _burst(op, size)
        ms = _joint_ms(partial(_start_then_wait, start, calls)) / calls
        if number:
            load = traffic(op, size, comm.world_size, backend="gloo")
            timed.append(Piece(op, load.rounds, load.total_bytes, ms))
    return timed


def _burst(op: str, nbytes: int) -> int:
    """The number of calls to start at once: an optimizer starts all broadcasts before it waits for one."""
    return max(1, min(64, 2**22 // nbytes)) if op == "broadcast" else 1


def _starter(op: str, nbytes: int, comm: Collectives) -> Callable[[int], PendingCall]:
    """Make tensors, and a function that starts one call, given how many were started before."""
    whole = torch.ones(-(-nbytes // 4), device=ranks.device())
    if op == "all_reduce":
        return lambda _: comm.all_reduce(whole)
    wholes = [torch.ones_like(whole) for _ in range(_burst(op, nbytes))]
    return lambda turn: comm.broadcast(wholes[turn], turn * comm.world_size // len(wholes))  # owner by owner


def _start_then_wait(start: Callable[[int], PendingCall], calls: int) -> None:
    for pending in [start(turn) for turn in range(calls)]:
        pending.wait()


def _joint_ms(do: Callable[[], object]) -> float:
    """Milliseconds from when the last rank begins `do` until the last one is done. Collective: all ranks.

    The time on one rank would include the wait for a late rank, which is not the network's. The ranks are
    processes of one machine, so they read the same clock.
    """
    device = ranks.device()
    square = torch.ones(192, 192, device=device)
    dist.barrier()
    for _ in range(8):  # a core that has just rested, or waited in a barrier, answers sooner than in training
        square @ square
    start = _now()
    do()
    last = torch.tensor([start, _now()], dtype=torch.float64, device=device)
    dist.all_reduce(last, op=dist.ReduceOp.MAX)
    last_start, last_end = last.tolist()
    return 1e3 * (last_end - last_start)


def _now() -> float:
    """Wait until this rank's device has done all its work, and return the time in seconds."""
    devices.synchronize()
    return time.perf_counter()


def time_training(sizes: Sequence[TrainingSize]) -> list[Piece]:
    """Time forward and backward under DDP, with nothing sent, and AdamW's step, once for each size.

    Collective: all ranks of the default group, with equal arguments: all compute at once.
    Returns:
        The same pieces on all ranks.
    """
    timed: list[Piece] = []
    for size in sizes:
        model = GPT(size.model).to(ranks.device())
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
        ddp.register_comm_hook(dist.get_world_size(), _send_nothing)
        optimizer = torch.optim.AdamW(model.parameters())
        numels = [param.numel() for param in model.parameters()]
        for number in range(3):  # DDP builds its buckets in the first two
            given = passages(*size, seed=0, step=number, rank=dist.get_rank())
            optimizer.zero_grad()
            train_ms = _joint_ms(lambda: ddp(*given).backward())  # noqa: B023  # called at once
            update_ms = _joint_ms(optimizer.step)
        timed.append(Piece("train", len(numels), flops_of(*size), train_ms))
        timed.append(Piece("update", len(numels), ADAMW_BYTES * sum(numels), update_ms))
    return timed


# DDP refuses annotations other than its own classes, and typing knows no name for those.
def _send_nothing(world_size, bucket):  # type: ignore[no-untyped-def]
    """A DDP communication hook that does everything but send. Its state is the number of ranks."""
    flat: torch.Tensor = bucket.buffer()
    flat.mul_(1 / world_size)  # an all-reduce for DDP does this, too
    future = devices.future(flat.device)
    future.set_result(flat)
    return future


def training_flops(numel: int, tokens: int, *, layers: int, width: int, context: int) -> float:
    """Floating-point operations of forward and backward of a transformer.

    For each token and parameter, forward takes a multiplication and an addition, and backward two of each.
    Attention adds its two products over the context. A tied token embedding counts once, as output head.

    >>> training_flops(810_496, 8 * 64, layers=4, width=128, context=64) / 1e9
    2.691170304

    Source: appendix B of PaLM (arXiv:2204.02311), which counts 6 N + 12 L H Q T for each token.
    """
    return tokens * (6.0 * numel + 12.0 * layers * width * context)


def flops_of(config: GPTConfig, batch_size: int) -> float:
    """Floating-point operations of forward and backward of the lab's GPT on one rank.

    >>> flops_of(GPTConfig(), 8) / 1e9
    2.76430848
    """
    size = {"layers": config.layers, "width": config.width, "context": config.context}
    return training_flops(config.numel, batch_size * config.context, **size)


# ------------------------------------------------------------------------------------- whole iterations


class Predicted(NamedTuple):
    """An iteration before it is made: its schedule, and that schedule played on a cluster."""

    plan: Schedule
    played: Played

    @property
    def ms(self) -> float:
        """Milliseconds of the whole iteration."""
        return self.played.iteration_ms


def predict_step(config: TrainConfig, cluster: Cluster, world_size: int) -> Predicted:
    """Predict what an iteration of the main job will send, hold and take.

    >>> from zero_ref.simulator.cluster import cluster
    >>> small = predict_step(TrainConfig("zero-even", batch_size=2), cluster("loopback"), world_size=2)
    >>> large = predict_step(TrainConfig("zero-even", batch_size=8), cluster("loopback"), world_size=2)
    >>> small.plan.payload_bytes == large.plan.payload_bytes, small.ms < large.ms
    (True, True)

    Args:
        config: strategy, model and batch size count.
        cluster: a preset, or that of a `Calibration`.
    """
    plan = _plan(replace(config, batch_size=1), world_size)
    model, tokens = config.model, config.batch_size * config.model.context
    attention_share = flops_of(model, config.batch_size) / (6 * model.numel * tokens) - 1
    return Predicted(plan, play(plan, cluster, Workload(tokens, attention_share=attention_share)))


@lru_cache(maxsize=64)
def _plan(config: TrainConfig, world_size: int) -> Schedule:
    """The schedule of an iteration. It is cached: to find the order of gradients takes a backward pass."""
    return predict(config, world_size)


FIRST_ITERATIONS = 3
"""Iterations that are not timed: in the first, DDP builds its buckets and the optimizer makes its state."""


class Iterations(NamedTuple):
    """The timed iterations of one configuration on one rank.

    Args:
        calls: the calls of the last iteration.
        held: the bytes kept after the last iteration.
        spans: seconds at which each timed iteration began and ended, from clearing gradients to new
            parameters; making the batch is left out.
    """

    calls: list[Call]
    held: meter.HeldBytes
    spans: list[tuple[float, float]]


class Trial(NamedTuple):
    """Pieces, the same on all ranks, and whole iterations of each configuration, timed in turns."""

    pieces: list[Piece]
    iterations: list[Iterations]


def take_turns(configs: Sequence[TrainConfig], effort: Effort) -> Trial:
    """Time each piece that a calibration needs once, then an iteration of each configuration, and again.

    They take turns because other programs slow a machine down for a while, which then affects both alike.

    Collective: all ranks of the default group, with equal arguments.
    Args:
        configs: the configurations to train, under strategies of one iteration: not local-sgd. Choose other
            models for the pieces.
        effort: the pieces; `rounds` is the number of turns.
    """
    runs = [_Loop(config) for config in configs]
    pieces: list[Piece] = []
    for number in range(FIRST_ITERATIONS + effort.rounds):
        timed = number >= FIRST_ITERATIONS
        if timed:
            pieces += time_collectives(effort.nbytes, 1) + time_training(effort.training)
        for run in runs:
            if timed:  # a training loop's own memory is warm, and here another model was just trained
                run.iterate(number, timed=False)
            run.iterate(number, timed=timed)
    return Trial(pieces, [Iterations(run.made.calls, run.made.held(), run.spans) for run in runs])


class _Loop:
    """A training loop that can be left after any iteration, and taken up again."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.made = trainable(config.recipe, GPT(config.model, config.seed).to(ranks.device()))
        self.spans: list[tuple[float, float]] = []

    def iterate(self, number: int, *, timed: bool) -> None:
        """Make one iteration, with the passages of this step."""
        made, config = self.made, self.config
        given = passages(config.model, config.batch_size, seed=config.seed, step=number, rank=dist.get_rank())
        made.calls.clear()
        dist.barrier()
        begun = _now()
        with made.recording():
            made.optimizer.zero_grad()
            made.model(*given).backward()
            made.optimizer.step()
        if timed:
            self.spans.append((begun, _now()))


def calibrate_in_turns(
    configs: Sequence[TrainConfig], effort: Effort, world_size: int, *, attempts: int = 3
) -> tuple[list[Trial], Calibration]:
    """Run `take_turns` on `world_size` ranks of this machine, and calibrate with its pieces.

    Args:
        attempts: the most times that everything is measured, each time with twice the rounds: if other
            programs run, larger sizes may take no longer than small ones.
    Raises:
        RankError: a rank failed.
        ValueError: `calibrate` raised it in the last attempt.
    """
    trials: list[Trial] = ranks.run(take_turns, world_size, configs, effort, timeout=100.0 * effort.rounds)
    try:
        return trials, calibrate(trials[0].pieces)
    except NoRateError:
        if attempts <= 1:
            raise
    more = replace(effort, rounds=2 * effort.rounds)
    return calibrate_in_turns(configs, more, world_size, attempts=attempts - 1)


@dataclass(frozen=True)
class StepTime:
    """An iteration as predicted and as measured.

    Args:
        predicted_ms, measured_ms: measured is `undisturbed_ms` of the repeats, as in the calibration.
        as_planned: on every rank the calls, in their order and with their bytes, and the bytes that it holds
            are those of the schedule.
    """

    config: TrainConfig
    predicted_ms: float
    measured_ms: float
    as_planned: bool

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted_ms / self.measured_ms - 1


def compare_steps(
    configs: Sequence[TrainConfig], cluster: Cluster, trials: Sequence[Trial]
) -> list[StepTime]:
    """Compare the predictions of `predict_step` with the measured iterations.

    Args:
        trials: the results of `take_turns(configs, ...)`, one from each rank.
    """
    compared = []
    for config, of_ranks in zip(configs, zip(*(trial.iterations for trial in trials)), strict=True):
        plan, played = predict_step(config, cluster, len(trials))
        repeats_ms = together_ms(rank.spans for rank in of_ranks)
        as_planned = all(_as_planned(plan, rank, seen) for rank, seen in enumerate(of_ranks))
        compared.append(StepTime(config, played.iteration_ms, undisturbed_ms(repeats_ms), as_planned))
    return compared


def together_ms(spans_of_ranks: Iterable[Sequence[tuple[float, float]]]) -> list[float]:
    """Milliseconds from when the last rank began until the last one was done, for each of some iterations.

    >>> together_ms([[(1.0, 1.5)], [(1.25, 1.75)]])
    [500.0]

    Args:
        spans_of_ranks: for each rank the seconds at which each iteration began and ended.
    """
    return [
        1e3 * (max(end for _, end in spans) - max(began for began, _ in spans))
        for spans in zip(*spans_of_ranks, strict=True)
    ]


def _as_planned(plan: Schedule, rank: int, seen: Iterations) -> bool:
    held = plan.parameter_bytes[rank], plan.left_gradient_bytes[rank], plan.state_bytes[rank]
    return tuple(seen.calls) == plan.calls_of(rank) and seen.held == meter.HeldBytes(*held)
