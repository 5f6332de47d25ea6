"""What to train and how, as plain values: what a command line says and a checkpoint remembers. No torch."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field

from zero_ref.simulator.schedule import STRATEGIES

TRAINED = ("ddp", "zero", "zero-bucket", "zero-even")
"""The strategies of `simulator.schedule.STRATEGIES` that the main job can be trained under."""


@dataclass(frozen=True)
class GPTConfig:
    """The size of a GPT. The default has 0.8 million parameters: enough to learn from, quick on a CPU."""

    layers: int = 4
    heads: int = 4
    width: int = 128
    context: int = 64

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}.")


@dataclass(frozen=True)
class TrainConfig:
    """What to train and how.

    Args:
        strategy: one of TRAINED.
        steps: iterations in all, those before a resumed checkpoint included.
        batch_size: passages on each rank.
        warmup_steps: over these the learning rate rises from 0.
        checkpoint: a file to write when done, and every `checkpoint_every` steps if that is not 0.
        resume: go on from `checkpoint`, written under any strategy and number of ranks.
    """

    strategy: str = "zero-bucket"
    steps: int = 200
    batch_size: int = 8
    learning_rate: float = 2e-3
    warmup_steps: int = 20
    seed: int = 0
    model: GPTConfig = field(default_factory=GPTConfig)
    checkpoint: str | None = None
    checkpoint_every: int = 0
    resume: bool = False

    def __post_init__(self) -> None:
        if self.strategy not in TRAINED:
            only = " is simulated only" if self.strategy in STRATEGIES else ""
            raise ValueError(
                f"cannot train under {self.strategy!r}{only}; choose one of {', '.join(TRAINED)}."
            )
        for name in ("steps", "batch_size", "warmup_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if (self.resume or self.checkpoint_every) and not self.checkpoint:
            raise ValueError("resume and checkpoint_every need the name of a checkpoint file.")


def add_training_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that `zero-ref train` and torchrun share."""
    default, size = TrainConfig(), GPTConfig()
    parser.add_argument("--steps", type=int, default=default.steps)
    parser.add_argument("--batch-size", type=int, default=default.batch_size, help="passages on each rank")
    parser.add_argument("--learning-rate", type=float, default=default.learning_rate)
    parser.add_argument("--seed", type=int, default=default.seed)
    parser.add_argument("--layers", type=int, default=size.layers)
    parser.add_argument("--heads", type=int, default=size.heads)
    parser.add_argument("--width", type=int, default=size.width)
    parser.add_argument("--context", type=int, default=size.context, help="positions that a passage has")
    parser.add_argument("--checkpoint", metavar="FILE", help="write model and optimizer here when done")
    parser.add_argument("--checkpoint-every", type=int, default=0, metavar="STEPS")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")


def config_from(args: argparse.Namespace, strategy: str) -> TrainConfig:
    """The TrainConfig that the options describe."""
    return TrainConfig(
        strategy=strategy,
        steps=args.steps,
        batch_size=args.batch_size,
        learning_rate=args.learning_rate,
        seed=args.seed,
        model=GPTConfig(args.layers, args.heads, args.width, args.context),
        checkpoint=args.checkpoint,
        checkpoint_every=args.checkpoint_every,
        resume=args.resume,
    )
