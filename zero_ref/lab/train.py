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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from zero_ref.comm.agreement import agree
from zero_ref.comm.collectives import as_collectives
from zero_ref.lab import meter, stage_3
from zero_ref.lab._arguments import Parser, complain, json_text, unwritable
from zero_ref.lab.config import COMPARED, GPTConfig, TrainConfig, add_training_arguments, config_from
from zero_ref.lab.model import GPT, batch, language_reference
from zero_ref.lab.placement import own_device, place_ranks, settle
from zero_ref.lab.ranks import device
from zero_ref.lab.strategies import trainable
from zero_ref.optimizer.shard import MASTER
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.plan.calls import Call
from zero_ref.simulator import models
from zero_ref.simulator.ledger import MIXED_16, Convention, itemsize_of, ledger
from zero_ref.simulator.recipe import RECIPES
from zero_ref.simulator.schedule import Schedule, ddp_buckets, schedule
from zero_ref.state.durable import make_directory, replacing

Progress = Callable[[int, float], None]
"""Called with the number of steps done and the last training loss."""


class Measured(NamedTuple):
    """What one rank saw.

    Args:
        calls: of `TrainConfig.recorded_steps`.
        held: bytes kept after the last step.
        losses: training loss of each step done, the mean over ranks.
        held_out_loss: after the last step, on text that was not trained on; on rank 0 at least.
        step_ms: of each step done.
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
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    text = language_reference()
    model = GPT(config.model, config.seed).to(device())
    made = trainable(config.recipe, model, config.learning_rate)
    optimizer = made.optimizer
    first_step = load_checkpoint(config, model, optimizer) if config.resume else 0

    calls: list[Call] = []
    losses: list[torch.Tensor] = []
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
        losses.append(loss.detach())
        if progress and rank == 0:
            progress(step + 1, losses[-1].item())
        if config.checkpoint_every and (step + 1) % config.checkpoint_every == 0:
            save_checkpoint(config, model, optimizer, step + 1)
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        optimizer.arriving.wait()  # nothing more is trained that would
    held = made.held()
    if config.checkpoint:
        save_checkpoint(config, model, optimizer, config.steps)

    mean_losses = torch.stack(losses) if losses else torch.zeros(0, device=device())
    dist.all_reduce(mean_losses)
    # At stage 3 all ranks compute it together.
    loss_held_out = held_out_loss(model, config) if rank == 0 or config.recipe.stage == 3 else None
    return Measured(calls, held, (mean_losses / world_size).tolist(), loss_held_out, step_ms)


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


# ---------------------------------------------------------------------------------------------- checkpoints


def save_checkpoint(config: TrainConfig, model: GPT, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Write model and optimizer as if they had never been sharded; an interrupted write leaves the old file.

    Collective: all ranks. Rank 0 writes; all go on when the file is complete.
    """
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        optimizer.consolidate_state_dict(to=0)
    of_model, of_optimizer = model.state_dict(), {}
    if dist.get_rank() == 0 or config.recipe.stage == 3:
        of_optimizer = optimizer.state_dict()
    if config.recipe.stage == 3:
        of_model, of_optimizer = (
            stage_3.whole(state, keep=dist.get_rank() == 0) for state in (of_model, of_optimizer)
        )
    failure: Exception | None = None
    if dist.get_rank() == 0:
        path = Path(str(config.checkpoint))
        try:
            make_directory(path.parent)
            with replacing(path) as file:
                torch.save(
                    {
                        "step": step,
                        "config": asdict(config.model),
                        "model": of_model,
                        "optimizer": of_optimizer,
                    },
                    file,
                )
        except Exception as error:  # torch.save raises RuntimeError where the disk is full
            failure = error
    agree(as_collectives(None), "write the checkpoint", failure or [])


def load_checkpoint(config: TrainConfig, model: GPT, optimizer: torch.optim.Optimizer) -> int:
    """Fill model and optimizer from a file, on every rank; return the number of steps it was trained for.

    Collective: all ranks. A file that one rank cannot read is an error on all.
    """
    path = str(config.checkpoint)
    saved: dict[str, Any] = {}
    facts: Sequence[str] | Exception
    try:
        saved = read_checkpoint(path)
        if GPTConfig(**saved["config"]) != config.model:  # the first checkpoints name no dtype
            raise ValueError(f"{path} holds a model of {saved['config']}, not of {asdict(config.model)}.")
        has_masters = any(MASTER in of_param for of_param in saved["optimizer"]["state"].values())
        if has_masters != (config.master_dtype is not None):
            raise ValueError(
                f"{path} was written {'with' if has_masters else 'without'} masters: go on with "
                f"master_dtype {'float32' if has_masters else 'left out'}."
            )
        if saved["step"] + 2 > config.steps:
            raise ValueError(
                f"{path} was trained for {saved['step']} steps; {config.steps} were asked for. Steps count "
                f"from the beginning: ask for {saved['step'] + 2} or more, since DDP builds its buckets in "
                "the first."
            )
        facts = [f"step {saved['step']}"]
    except Exception as error:
        facts = error
    agree(as_collectives(None), "read the checkpoint", facts)
    if config.recipe.stage == 3:
        stage_3.load_whole(model, optimizer, saved["model"], saved["optimizer"])
    else:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    return int(saved["step"])


def read_checkpoint(path: str) -> dict[str, Any]:
    """The contents of a file that `save_checkpoint` wrote. Runs no code that is in it.

    Raises:
        OSError: there is no such file, or it may not be read.
        ValueError: it is damaged, or something else.
    """
    with open(path, "rb") as file:
        try:
            saved = torch.load(file, map_location="cpu", weights_only=True)
            if {"step", "config", "model", "optimizer"} <= set(saved):
                return dict(saved)
            problem = f"it holds {type(saved).__name__} {sorted(saved)}"
        except Exception as error:  # a damaged file meets torch.load in many ways
            problem = f"{type(error).__name__}: {error}"
    raise ValueError(f"{path} is no checkpoint of this program, or damaged: {problem}")


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
        return {**asdict(self), **pairs, "held_bytes": [pair._asdict() for pair in self.held_bytes]}


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
    dist.init_process_group(placement.backend, device_id=own_device(placement.backend, of_this_rank))
    try:
        measured = meter.gather_from_ranks(train(config, print_progress))
        if dist.get_rank() == 0:
            result = outcome(config, predict(config, dist.get_world_size()), measured)
            print(json_text({key: value for key, value in result.as_json().items() if key != "losses"}))
    finally:
        dist.destroy_process_group()
    return 0


def print_progress(step: int, loss: float) -> None:
    """One line now and then: what a log file of a cluster job can take."""
    if step == 1 or step % 20 == 0:
        print(f"step {step}: training loss {loss:.3f}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
