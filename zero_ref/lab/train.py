"""The main job: train a small GPT on real ranks under a chosen strategy, and measure what it cost.

    zero-ref train --ranks 4 --strategy zero-bucket            # on this machine, ranks started for you
    torchrun --nproc-per-node=8 -m zero_ref.lab.train          # one rank a GPU; --nnodes for more machines

`train` is an ordinary data-parallel training loop: a user's own looks the same. `predict` says beforehand
what an iteration will send and what each rank will hold; `Outcome` sets the two side by side.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from zero_ref.lab import elastic, meter
from zero_ref.lab._arguments import Parser, complain, json_text, unwritable
from zero_ref.lab.checkpoints import NothingLeftError, Stretch, checkpoints_for, in_words, stretches
from zero_ref.lab.config import COMPARED, TrainConfig, add_training_arguments, config_from
from zero_ref.lab.model import GPT, batch, language_reference
from zero_ref.lab.placement import own_device, place_ranks, settle
from zero_ref.lab.ranks import device
from zero_ref.lab.strategies import trainable
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.plan.calls import Call
from zero_ref.simulator import models
from zero_ref.simulator.ledger import MIXED_16, Convention, itemsize_of, ledger
from zero_ref.simulator.recipe import RECIPES
from zero_ref.simulator.schedule import Schedule, ddp_buckets, schedule

Progress = Callable[[int, float], None]
"""Called with the number of steps done and the last training loss."""


class Measured(NamedTuple):
    """What one rank saw.

    Args:
        calls: of `TrainConfig.recorded_steps`.
        held: bytes kept after the last step.
        losses: training loss of each step done, the mean over ranks; those of earlier runs included where a
            sharded save held them.
        held_out_loss: after the last step, on text that was not trained on; on rank 0 at least.
        step_ms: of each step done in this run.
    """

    calls: list[Call]
    held: meter.HeldBytes
    losses: list[float]
    held_out_loss: float | None
    step_ms: list[float]


def train(config: TrainConfig, progress: Progress | None = None) -> Measured:
    """Train on the ranks of the default process group.

    Collective: all ranks, with equal arguments (`progress` is called on rank 0).
    Raises:
        RuntimeError, ValueError: a checkpoint that cannot be read or is of another model, on all ranks alike.
        NothingLeftError: all steps were done before.
    """
    rank, text = dist.get_rank(), language_reference()
    model = GPT(config.model, config.seed).to(device())
    made = trainable(config.recipe, model, config.learning_rate)
    optimizer = made.optimizer
    checkpoints = checkpoints_for(config, model, optimizer)
    first_step, losses = checkpoints.load()

    calls: list[Call] = []
    step_ms: list[float] = []
    for step in range(first_step, config.steps):
        with made.recording(), meter.timing(step_ms):
            tokens, targets = batch(
                text.training, config.model, config.batch_size, seed=config.seed, step=step, rank=rank
            )
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(config, step)
            optimizer.zero_grad()
            loss = made.model(tokens.to(device()), targets.to(device()))
            loss.backward()
            optimizer.step()
        if step in config.recorded_steps:
            calls += made.calls
        made.calls.clear()
        losses.add(loss)
        checkpoints.reached(step + 1)
        if progress and rank == 0:
            progress(step + 1, loss.item())
        if config.saves_after(step + 1):
            checkpoints.save(step + 1, losses)
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        optimizer.arriving.wait()  # nothing more is trained that would
    held = made.held()
    checkpoints.save(config.steps, losses)

    # At stage 3 all ranks compute it together.
    loss_held_out = held_out_loss(model, config) if rank == 0 or config.recipe.stage == 3 else None
    return Measured(calls, held, losses.means(), loss_held_out, step_ms)


def learning_rate(config: TrainConfig, step: int) -> float:
    """Rising over the first steps, while AdamW averages only a few gradients, then constant."""
    return config.learning_rate * min(1.0, (step + 1) / config.warmup_steps)


@torch.no_grad()
def held_out_loss(model: GPT, config: TrainConfig, batches: int = 8) -> float:
    """Mean loss on passages that were not trained on, the same for every strategy."""
    text = language_reference().held_out
    total = 0.0
    for step in range(batches):
        tokens, targets = batch(text, config.model, 16, seed=config.seed, step=step, rank=0)
        total += model(tokens.to(device()), targets.to(device())).item()
    return total / batches


# --------------------------------------------------------------------------------- prediction | measurement


def predict(config: TrainConfig, world_size: int) -> Schedule:
    """What an iteration will send and what each rank will hold, before anything is started.

    Only the order in which gradients become ready is tried out, by one backward pass in this process: it
    decides which of them share one of DDP's buckets.
    """
    model = GPT(config.model, config.seed)
    tokens, targets = batch(language_reference().training, config.model, 1, seed=0, step=0, rank=0)
    params = models.from_module(model)
    order = models.ready_order(model, lambda: model(tokens, targets).backward())
    return schedule(
        config.recipe,
        params,
        world_size,
        ddp_buckets=ddp_buckets(params, order),
        blocks=models.blocks(params),
        steps=config.recorded_steps if config.recipe.averaging else None,
    )


class Pair(NamedTuple):
    """A quantity as predicted and as measured."""

    predicted: int
    measured: int


@dataclass(frozen=True)
class Outcome:
    """One strategy's run, prediction beside measurement. Bytes and calls are those of the rank that has most.

    Args:
        collectives, payload_bytes: of the last step; under local SGD of the steps of its last cycle.
        calls_equal: these calls are, on every rank, those predicted: same operations, order and bytes.
        step_ms: median over steps of the slowest rank's time; the first steps, which build DDP's buckets,
            are left out.
        dtype, master_dtype: of the parameters, and of the masters if there are any.
        numel: elements of all parameters.
        held_bytes: parameters, gradients and optimizer state together, on each rank.
        ledger_bytes: the same by `simulator.ledger.ledger`, on average over the ranks.
        loss_tolerance: relative, between this loss and that of DDP; None where another model is trained.
        ran: of a directory of saves: which steps were trained on how many ranks, repeated ones too.
    """

    strategy: str
    ranks: int
    steps: int
    state_bytes_max: Pair
    parameter_bytes_max: Pair
    gradient_bytes_max: Pair
    collectives: Pair
    payload_bytes: Pair
    calls_equal: bool
    step_ms: float
    final_loss: float
    losses: list[float]
    dtype: str
    master_dtype: str | None
    numel: int
    held_bytes: list[Pair]
    ledger_bytes: float
    loss_tolerance: float | None = 1e-6
    ran: list[Stretch] = field(default_factory=list)

    QUANTITIES = (
        "state_bytes_max",
        "parameter_bytes_max",
        "gradient_bytes_max",
        "collectives",
        "payload_bytes",
    )

    def pairs(self) -> dict[str, Pair]:
        """What was both predicted and measured, by name."""
        return {name: getattr(self, name) for name in self.QUANTITIES}

    @property
    def as_predicted(self) -> bool:
        """Every quantity and every call is as predicted."""
        pairs = [*self.pairs().values(), *self.held_bytes]
        return self.calls_equal and all(pair.predicted == pair.measured for pair in pairs)

    def as_json(self) -> dict[str, Any]:
        """Plain values, the pairs as {"predicted": ..., "measured": ...}."""
        pairs = {name: pair._asdict() for name, pair in self.pairs().items()}
        held, ran = ([each._asdict() for each in several] for several in (self.held_bytes, self.ran))
        return {**asdict(self), **pairs, "held_bytes": held, "ran": ran}


def outcome(config: TrainConfig, plan: Schedule, measured: Sequence[Measured]) -> Outcome:
    """Set a prediction beside what each rank measured."""
    times = [max(at_step) for at_step in zip(*(rank.step_ms for rank in measured), strict=True)]
    first = measured[0]
    planned = [plan.calls_of(rank) for rank in range(len(measured))]
    planned_bytes = map(sum, zip(plan.parameter_bytes, plan.left_gradient_bytes, plan.state_bytes))
    numel = config.model.numel
    assert first.held_out_loss is not None
    return Outcome(
        strategy=config.recipe.title,
        ranks=len(measured),
        steps=config.steps,
        state_bytes_max=Pair(plan.state_bytes_max, max(rank.held.optimizer_state for rank in measured)),
        parameter_bytes_max=Pair(plan.parameter_bytes_max, max(rank.held.parameters for rank in measured)),
        gradient_bytes_max=Pair(plan.gradient_bytes_max, max(rank.held.gradients for rank in measured)),
        collectives=Pair(max(map(len, planned)), max(len(rank.calls) for rank in measured)),
        payload_bytes=Pair(max(map(_payload, planned)), max(_payload(rank.calls) for rank in measured)),
        calls_equal=all(tuple(rank.calls) == of_rank for rank, of_rank in zip(measured, planned)),
        step_ms=statistics.median(times[min(3, len(times) // 2) :] or [float("nan")]),
        final_loss=first.held_out_loss,
        losses=first.losses,
        dtype=config.model.dtype,
        master_dtype=config.master_dtype,
        numel=numel,
        held_bytes=[Pair(held, sum(rank.held)) for held, rank in zip(planned_bytes, measured, strict=True)],
        ledger_bytes=ledger(
            numel, config.recipe.group_of(len(measured)), config.recipe.stage, _convention(config)
        ).total_bytes,
        loss_tolerance=_loss_tolerance(config),
        ran=stretches(config.checkpoint_dir) if config.checkpoint_dir else [],
    )


def _convention(config: TrainConfig) -> Convention:
    """Bytes of an element of parameters, gradients and state."""
    if config.master_dtype is not None:
        return MIXED_16
    itemsize = itemsize_of(config.model.dtype)
    return Convention(itemsize, itemsize, 2 * itemsize, moment=itemsize)


def _payload(calls: Sequence[Call]) -> int:
    return sum(call.nbytes for call in calls)


def _loss_tolerance(config: TrainConfig) -> float | None:
    if config.recipe.averaging is not None:
        return None  # trains another model
    # The same arithmetic on the same numbers, bit for bit on Gloo; NCCL may add gradients in another order
    # from run to run. Owners and `fully_shard` add those of three ranks and more in another order than an
    # all-reduce, and each step makes more of the difference: 5e-7 after the demo's 120. In 16 bits a sum in
    # another order is another gradient: up to 0.03 after 200 steps.
    if config.strategy in COMPARED:
        return 1e-6
    return 1e-3 if config.model.dtype == "float32" else 0.1


# ------------------------------------------------------------------------------------------ under torchrun


def main(argv: Sequence[str] | None = None) -> int:
    """Train on the ranks that torchrun started; rank 0 prints the outcome as JSON."""
    name = "torchrun -m zero_ref.lab.train"
    parser = Parser(prog=name, description=__doc__.split("\n")[0])
    add_training_arguments(parser)
    parser.add_argument("--strategy", default="zero-bucket", choices=list(RECIPES))
    args = parser.parse_args(argv)
    if "RANK" not in os.environ:
        complain(name, "start this with torchrun, or use `zero-ref train --ranks N`, which starts ranks.")
        return 2
    try:
        config = config_from(args, args.strategy)
    except ValueError as error:
        complain(name, str(error))
        return 2
    if problem := elastic.complaint(config):
        complain(name, problem)
        return 2
    # Rank 0 writes. If it cannot, it ends with an error, and torchrun ends the others.
    if os.environ["RANK"] == "0" and (problem := unwritable(args)):
        complain(name, problem)
        return 2
    try:
        placement = place_ranks(int(os.environ["LOCAL_WORLD_SIZE"]))
    except ValueError as error:
        complain(name, str(error))
        return 2
    of_this_rank = placement.devices[int(os.environ["LOCAL_RANK"])]
    settle(of_this_rank, placement.is_default)
    if os.environ["RANK"] == "0":
        print(f"{placement.describe()}", file=sys.stderr, flush=True)
    try:
        with elastic.as_elastic_rank(config):
            dist.init_process_group(
                placement.backend,
                timeout=elastic.time_out(config),
                device_id=own_device(placement.backend, of_this_rank),
            )
            return _train_as_rank(config)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _train_as_rank(config: TrainConfig) -> int:
    """Train, and print the outcome on rank 0; the exit code. Collective: all ranks of the default group."""
    is_first, world_size = dist.get_rank() == 0, dist.get_world_size()
    if is_first and config.elastic:
        print(elastic.what_begins(config, world_size), file=sys.stderr, flush=True)
    try:
        measured = meter.gather_from_ranks(train(config, print_progress))
    except NothingLeftError as nothing:
        if is_first:
            print(nothing, file=sys.stderr)
        return 0
    if is_first:
        result = outcome(config, predict(config, world_size), measured)
        if result.ran:
            print(in_words(result.ran), file=sys.stderr)
        print(json_text({key: value for key, value in result.as_json().items() if key != "losses"}))
    return 0


def print_progress(step: int, loss: float) -> None:
    """One line now and then: what a log file of a cluster job can take."""
    if step == 1 or step % 20 == 0:
        print(f"step {step}: training loss {loss:.3f}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
