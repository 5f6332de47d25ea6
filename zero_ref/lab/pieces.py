"""What collectives, forward and backward, and updates take on the ranks of this machine.

The times that `simulator.calibrate` fits. They are taken as a training step meets them: ranks arrive from
computing, gradients go one call at a time, parameters all at once. All sizes are measured in turn, again and
again, so that a busy minute of the machine touches each of them and not one alone.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from zero_ref.comm import devices
from zero_ref.comm.backend import as_collectives
from zero_ref.comm.collectives import Collectives, PendingCall
from zero_ref.lab import ranks
from zero_ref.lab.config import GPTConfig
from zero_ref.lab.model import GPT, batch, language_reference
from zero_ref.simulator.calibrate import ADAMW_BYTES, Computation, Measurement, training_flops
from zero_ref.simulator.price import Workload

KIB, MIB = 2**10, 2**20

OPS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "exchange")


class TrainingSize(NamedTuple):
    """A model and the passages of one iteration on each rank."""

    model: GPTConfig
    batch_size: int


@dataclass(frozen=True)
class Effort:
    """What to measure and how often.

    Args:
        nbytes: payloads of each collective.
        training: models to train.
        rounds: how often each is timed; one more, untimed, comes first.
    """

    nbytes: tuple[int, ...]
    training: tuple[TrainingSize, ...]
    rounds: int


def _effort(largest: int, widths: Sequence[int], rounds: int) -> Effort:
    """Few and many passages for each width; then half as many layers, to tell tensors from operations."""
    nbytes = itertools.takewhile(lambda size: size <= largest, (KIB * 4**power for power in range(20)))
    deep = [TrainingSize(GPTConfig(width=width), size) for width in widths for size in (2, 8)]
    flat = [TrainingSize(GPTConfig(layers=2, width=width), 4) for width in (96, widths[-1])]
    return Effort(tuple(nbytes), (*deep, *flat), rounds)


FULL = _effort(64 * MIB, (64, 128, 192, 256), rounds=15)
QUICK = _effort(16 * MIB, (64, 128, 192), rounds=7)


class Times(NamedTuple):
    """Everything that was timed."""

    collectives: list[Measurement]
    works: list[Computation]


def measure(world_size: int, effort: Effort = FULL, *, timeout: float = 600.0) -> Times:
    """Time everything on `world_size` ranks of this machine.

    Args:
        timeout: seconds, for collectives and training each.
    Raises:
        RankError: a rank failed.
    """
    collectives = ranks.run(time_collectives, world_size, effort.nbytes, effort.rounds, timeout=timeout)
    works = ranks.run(time_training, world_size, effort.training, effort.rounds, timeout=timeout)
    return Times(collectives[0], works[0])


# --------------------------------------------------------------------------------------------- collectives


def time_collectives(nbytes: Sequence[int], rounds: int, ops: Sequence[str] = OPS) -> list[Measurement]:
    """Time each operation at each payload, `rounds` times each.

    Collective: all ranks of the default group, with equal arguments.
    Returns:
        The same on all ranks. Of calls that were started together, each has its share of the time.
    """
    comm = as_collectives(None)
    starts = {(op, size): _starter(op, size, comm) for size in nbytes for op in ops}
    timed: list[Measurement] = []
    for number, ((op, size), start) in itertools.product(range(rounds + 1), starts.items()):
        calls = _burst(op, size)
        ms = _joint_ms(partial(_start_then_wait, start, calls)) / calls
        if number:
            timed.append(Measurement(op, size, comm.world_size, ms))
    return timed


def _burst(op: str, nbytes: int) -> int:
    """How many calls to start at once: an optimizer starts all its broadcasts before it waits for one."""
    return max(1, min(64, 4 * MIB // nbytes)) if op == "broadcast" else 1


def _starter(op: str, nbytes: int, comm: Collectives) -> Callable[[int], PendingCall]:
    """What starts one call, given how many were started before. Tensors are its own."""
    rank, world_size = comm.rank, comm.world_size
    part = -(-nbytes // (4 * world_size))
    whole = torch.ones(part * world_size, device=ranks.device())
    if op == "broadcast":
        wholes = [torch.ones_like(whole) for _ in range(_burst(op, nbytes))]
        return lambda turn: comm.broadcast(wholes[turn], turn * world_size // len(wholes))  # owner by owner
    if op == "all_reduce":
        return lambda _: comm.all_reduce(whole)
    if op == "exchange":
        mine = list(whole.chunk(world_size))
        peers = [peer for peer in range(world_size) if peer != rank]
        theirs = {peer: torch.empty_like(mine[peer]) for peer in peers}
        return lambda _: comm.exchange([(peer, mine[peer]) for peer in peers], list(theirs.items()))
    part_of_whole = torch.ones(part, device=whole.device)
    if op == "all_gather":
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return lambda _: gather(whole, part_of_whole, async_op=True)
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return lambda _: scatter(part_of_whole, whole, async_op=True)


def _start_then_wait(start: Callable[[int], PendingCall], calls: int) -> None:
    for pending in [start(turn) for turn in range(calls)]:
        pending.wait()


def _joint_ms(do: Callable[[], object]) -> float:
    """Milliseconds from when the last rank begins `do` until the last one is done. Collective: all ranks.

    Not what one rank sees: that has the wait for a late rank in it, which is not the network's. The ranks
    are processes of one machine, so they read the same clock.
    """
    device = ranks.device()
    square = torch.ones(192, 192, device=device)
    dist.barrier()
    for _ in range(8):  # a core that has just rested, or waited in a barrier, answers sooner than in training
        square @ square
    start = now()
    do()
    last = torch.tensor([start, now()], dtype=torch.float64, device=device)
    dist.all_reduce(last, op=dist.ReduceOp.MAX)
    last_start, last_end = last.tolist()
    return 1e3 * (last_end - last_start)


def now() -> float:
    """Seconds, when this rank's device has done all that it was asked to do."""
    devices.synchronize()
    return time.perf_counter()


# ----------------------------------------------------------------------------------------------- computing


def time_training(sizes: Sequence[TrainingSize], rounds: int) -> list[Computation]:
    """Time forward and backward under DDP, nothing sent; and AdamW's step. `rounds` times for each size.

    Collective: all ranks of the default group, with equal arguments: all compute at once.
    Returns:
        The same on all ranks.
    """
    timed: list[Computation] = []
    runs = [_TrainingRun(size) for size in sizes]
    for number, run in itertools.product(range(rounds + 2), runs):  # DDP builds its buckets in the first two
        run.given = passages(*run.size, seed=0, step=number, rank=dist.get_rank())
        run.optimizer.zero_grad()
        train_ms, update_ms = _joint_ms(run.forward_and_backward), _joint_ms(run.optimizer.step)
        if number > 1:
            timed.append(Computation("train", run.tensors, run.flops, train_ms))
            timed.append(Computation("update", run.tensors, run.numel * ADAMW_BYTES, update_ms))
    return timed


def passages(model: GPTConfig, batch_size: int, **drawn: int) -> tuple[torch.Tensor, ...]:
    """What `lab.model.batch` draws of the language reference, on this rank's device."""
    given = batch(language_reference().training, model, batch_size, **drawn)
    return tuple(part.to(ranks.device()) for part in given)


class _TrainingRun:
    """A model under DDP, whose gradients are handed over and stay where they are."""

    def __init__(self, size: TrainingSize) -> None:
        self.size = size
        model = GPT(size.model).to(ranks.device())
        self.ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
        self.ddp.register_comm_hook(dist.get_world_size(), send_nothing)
        self.optimizer = torch.optim.AdamW(model.parameters())
        numels = [param.numel() for param in model.parameters()]
        self.tensors, self.numel = len(numels), sum(numels)
        self.flops = flops_of(size.model, size.batch_size)
        self.given: tuple[torch.Tensor, ...] = ()

    def forward_and_backward(self) -> None:
        self.ddp(*self.given).backward()


# DDP refuses annotations other than its own classes, and typing knows no name for those.
def send_nothing(world_size, bucket):  # type: ignore[no-untyped-def]
    """A DDP communication hook that does everything but send. Its state is the number of ranks."""
    flat: torch.Tensor = bucket.buffer()
    flat.mul_(1 / world_size)  # an all-reduce for DDP does this, too
    future = devices.future(flat.device)
    future.set_result(flat)
    return future


def flops_of(config: GPTConfig, batch_size: int) -> float:
    """Floating-point operations of forward and backward of the lab's GPT on one rank.

    >>> flops_of(GPTConfig(), 8) / 1e9
    2.76430848
    """
    size = {"layers": config.layers, "width": config.width, "context": config.context}
    return training_flops(config.numel, batch_size * config.context, **size)


def workload_of(config: GPTConfig, batch_size: int) -> Workload:
    """The same for the simulator: the parameters' operations, and attention's as a share of these."""
    tokens = batch_size * config.context
    attention_share = flops_of(config, batch_size) / (6 * config.numel * tokens) - 1
    return Workload(tokens, attention_share=attention_share)


def together_ms(spans_of_ranks: Iterable[Sequence[tuple[float, float]]]) -> list[float]:
    """Milliseconds from when the last rank began until the last one was done, for each of some iterations.

    Ranks are processes of one machine, so they read the same clock.

    >>> together_ms([[(1.0, 1.5)], [(1.25, 1.75)]])
    [500.0]

    Args:
        spans_of_ranks: for each rank the seconds at which each iteration began and ended.
    """
    return [
        1e3 * (max(end for _, end in spans) - max(began for began, _ in spans))
        for spans in zip(*spans_of_ranks, strict=True)
    ]


def load_average() -> float | None:
    """How many processes wanted a core in the last minute; None where the system does not say (Windows)."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None
