"""The settings of a training as plain values, which a command line gives and a checkpoint keeps. No torch."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from zero_ref.files.saves import saves_in
from zero_ref.lab._arguments import (
    LARGEST_SEED,
    OutputFile,
    OutputFolder,
    Parser,
    ReplacedFile,
    add_options,
)
from zero_ref.simulator.cluster import CLUSTERS
from zero_ref.simulator.ledger import MIXED_ADAMW, format_bytes, itemsize_of, state_rule
from zero_ref.simulator.operations import WAYS
from zero_ref.simulator.options import (
    Option,
    check_options,
    explained,
    from_options,
    listed,
    options_of,
    used_values,
)
from zero_ref.simulator.recipe import TRAINED, Recipe, recipe

VOCABULARY = 256
"""One token for each byte."""

LONGEST_CONTEXT = 32_768
"""The longest context of a GPT, because the held-out tenth of the text has only some 50,000 bytes."""

COMPARED = ("ddp", "zero", "zero-bucket", "zero-even")
"""Strategies that do the same arithmetic in the same order, and differ in who does it and what is sent."""

OF_OWN = "zero"
"""The strategy whose prediction says what the reader's own optimizer holds as state: whole parameters."""

DTYPES = ("float32", "bfloat16")
"""Dtypes of parameters. float16 is not among them: small gradients become 0 unless the loss is scaled."""

_SIZE = Option(least=1, most=2**20, why="this is for small models")


def _without_ddp(how: Recipe, _: object) -> bool:
    return how.without_ddp


@dataclass(frozen=True)
class GPTConfig:
    """The size of a GPT, and the dtype of its parameters.

    The default has 0.8 million parameters: enough to learn from, quick on a CPU.
    """

    layers: Annotated[int, _SIZE] = 4
    heads: Annotated[int, _SIZE] = 4
    width: Annotated[int, _SIZE] = 128
    context: Annotated[int, replace(_SIZE, help="positions that a passage has")] = 64
    # An entry for each option, as in a table.
    # fmt: off
    dtype: Annotated[str, Option(
        "of parameters and gradients: " + listed(DTYPES) + " (default: %(default)s)", metavar="DTYPE",
        choices=DTYPES, after="shard_group",
    )] = field(default="float32", kw_only=True)
    # fmt: on

    def __post_init__(self) -> None:
        check_options(self)
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}.")
        if self.context > LONGEST_CONTEXT:
            raise ValueError(
                f"context must be at most {LONGEST_CONTEXT:,}, got {self.context:,}: the held-out text has "
                "little more."
            )

    @property
    def numel(self) -> int:
        """Elements of all parameters.

        >>> GPTConfig().numel
        834304
        """
        # Attention and norms; then a two-layer network with biases.
        block = (4 * self.width**2 + 8 * self.width) + (8 * self.width**2 + 5 * self.width)
        return (VOCABULARY + self.context + 2) * self.width + self.layers * block


@dataclass(frozen=True)
class TrainConfig:
    """The settings of a training run.

    Args:
        strategy: one of `simulator.recipe.TRAINED`, or the name of the file `own`.
        steps: iterations in all, those before a resumed checkpoint included.
        way: when updates are made, one of `simulator.operations.WAYS`, under strategies that have owners.
        master_dtype: "float32" to keep 32-bit masters of a 16-bit model, with their moments in 32 bits too;
            None for state in the parameters' own dtype. Not under zero-3, zero-3-stair and local-sgd.
        warmup_steps: over these the learning rate rises from 0.
        checkpoint: a file to write when done, and every `checkpoint_every` steps if that is not 0. Not under
            zero-3-stair and local-sgd.
        checkpoint_dir: in its place a directory for sharded saves, made as often. Only under strategies that
            shard the state among all ranks by a ZeroRedundancyOptimizer.
        resume: go on from `checkpoint`, or from the newest intact save in `checkpoint_dir` if there is one.
            Another strategy and number of ranks may have written either.
        own: the reader's file with the class `MyZero`, which is trained where `strategy` names the file.
    """

    # An entry for each option, as in a table.
    # fmt: off
    strategy: Annotated[str, Option(
        "give it several times to compare (default: %(default)s)", choices=TRAINED, several=True,
    )] = "zero-bucket"
    own: Annotated[str | None, Option(
        "train the class MyZero of this file, which the book has you write, beside --strategy "
        "(then: ddp)",
        name="optimizer", metavar="FILE",
    )] = field(default=None, kw_only=True)
    steps: Annotated[int, Option(least=1, most=10**7, why="the losses of all steps are kept")] = 200
    way: Annotated[str, Option(
        "under strategies that have owners: " + explained(WAYS), name="overlap", metavar="WAY", choices=WAYS,
        used_by=Recipe.takes_way,
    )] = field(default="plain", kw_only=True)
    shard_group: Annotated[int | None, Option(
        "under zero-2: so many consecutive ranks share the state; default: all", metavar="N", least=1,
        most=2**20, used_by=_without_ddp,
    )] = field(default=None, kw_only=True)
    master_dtype: Annotated[str | None, Option(
        "float32: keep 32-bit masters and moments of 16-bit parameters (default: moments in --dtype, no "
        "masters)",
        metavar="DTYPE", choices=("float32",),
    )] = field(default=None, kw_only=True)
    batch_size: Annotated[int, replace(_SIZE, help="passages on each rank")] = 8
    learning_rate: Annotated[float, Option(above=0, most=1000, why="no training survives such steps")] = 2e-3
    warmup_steps: int = 20
    seed: Annotated[int, Option(least=0, most=LARGEST_SEED)] = 0
    model: Annotated[GPTConfig, Option()] = field(default_factory=GPTConfig)
    checkpoint: Annotated[str | None, Option(
        "write model and optimizer here when done", metavar="FILE", kind=ReplacedFile,
    )] = None
    checkpoint_dir: Annotated[str | None, Option(
        "in place of --checkpoint: save here in shards, each rank what it owns", metavar="DIR",
        kind=OutputFolder,
    )] = field(default=None, kw_only=True)
    checkpoint_every: Annotated[int, Option(
        "save on the way too (default: only when done)", metavar="STEPS", least=0, most=10**7,
    )] = 0
    resume: Annotated[bool, Option("go on from the checkpoint")] = False
    # fmt: on

    def __post_init__(self) -> None:
        check_options(self, but=("strategy",) if self.is_own else ())
        if self.own and (self.checkpoint or self.checkpoint_dir):
            raise ValueError(
                f"{self.own} is trained without checkpoints here: `zero-ref check` tries its state_dict. "
                "Leave checkpoint and checkpoint_dir out."
            )
        if self.master_dtype and itemsize_of(self.model.dtype) >= itemsize_of(self.master_dtype):
            raise ValueError(
                f"master_dtype {self.master_dtype!r} is for a model in fewer bits, and this one is in "
                f"{self.model.dtype}: choose the dtype bfloat16, or leave master_dtype out."
            )
        keeps_masters(self.recipe)  # or say why it cannot
        averaging = self.recipe.averaging
        if averaging is not None and self.checkpoint:
            raise ValueError(
                f"strategy {self.strategy!r} trains another model on each rank between two averages, and a "
                "checkpoint holds one: leave it out."
            )
        if self.recipe.is_stair and self.checkpoint:
            raise ValueError(
                f"strategy {self.strategy!r} is a short program to be read, which writes no checkpoint: "
                "leave it out, or choose zero-3."
            )
        if self.warmup_steps < 1:
            raise ValueError(f"warmup_steps must be at least 1, got {self.warmup_steps}.")
        if self.seed > LARGEST_SEED:
            raise ValueError(f"seed must be 0 to {LARGEST_SEED}, got {self.seed}.")
        if (self.resume or self.checkpoint_every) and not (self.checkpoint or self.checkpoint_dir):
            raise ValueError(
                "resume and checkpoint_every need the name of a checkpoint file, or of a checkpoint_dir."
            )
        if self.checkpoint and self.checkpoint_dir:
            raise ValueError("checkpoint and checkpoint_dir are two places for one state: leave one out.")
        if self.checkpoint_dir:
            shard_saves(self.recipe)  # or say why it cannot

    def check_ranks(self, world_size: int) -> None:
        """Raise a ValueError if so many ranks cannot be divided into the groups that the config asks for."""
        self.recipe.group_of(world_size)

    def saves_after(self, step: int) -> bool:
        """Whether a save is due when so many steps are done, the last of all not among them.

        None is made when only one step is left: DDP builds its buckets in the first step of whoever goes on
        from there, so that no prediction would hold.
        """
        every = self.checkpoint_every
        return bool(every) and step % every == 0 and step + 2 <= self.steps

    @property
    def recipe(self) -> Recipe:
        """The strategy, with updates made in this way, and with masters if they are kept.

        >>> TrainConfig("zero-2", way="in_forward").recipe.title
        'zero-2, in forward'
        """
        return recipe(
            OF_OWN if self.is_own else self.strategy,
            way=self.way,
            shard_group=self.shard_group,
            optimizer=MIXED_ADAMW if self.master_dtype else "AdamW",
        )

    @property
    def is_own(self) -> bool:
        """Whether the reader's own optimizer is trained."""
        return self.own is not None and self.strategy == os.path.basename(self.own)

    @property
    def title(self) -> str:
        """The recipe's, or the name of the reader's file.

        >>> TrainConfig("my_zero.py", own="/home/reader/my_zero.py").title
        'my_zero.py'
        """
        return self.strategy if self.is_own else self.recipe.title

    def under(self, strategy: str) -> TrainConfig:
        """The same under another strategy, to compare with; `way` and `shard_group` only where they fit it.

        >>> TrainConfig("zero-2", way="in_forward").under("ddp").recipe.title
        'ddp'

        Raises:
            ValueError: the strategy cannot do the rest.
        """
        other = recipe(OF_OWN if self.own and strategy == os.path.basename(self.own) else strategy)
        return replace(self, **used_values(self, other) | {"strategy": strategy})

    @property
    def precision(self) -> str:
        """The dtypes in words.

        >>> TrainConfig(model=GPTConfig(dtype="bfloat16"), master_dtype="float32").precision
        'bfloat16 parameters with float32 masters'
        """
        masters = f" with {self.master_dtype} masters" if self.master_dtype else ""
        return f"{self.model.dtype} parameters{masters}"

    @property
    def recorded_steps(self) -> range:
        """The last one, and of local SGD the last cycle; not step 0, in which DDP builds its buckets."""
        averaging = self.recipe.averaging
        cycle = 1 if averaging is None else len(averaging.steady)
        return range(max(1, self.steps - cycle), self.steps)


def keeps_masters(how: Recipe) -> bool:
    """Whether an optimizer that is trained under this recipe keeps 32-bit masters.

    Raises:
        ValueError: it would have to, and cannot.
    """
    if how.optimizer != MIXED_ADAMW:
        return False
    if how.stage == 3:
        raise ValueError(
            f"strategy {how.name!r} keeps no masters here: PyTorch's fully_shard shards the parameters "
            "themselves, and its optimizer steps these. Leave master_dtype out, or choose another strategy."
        )
    if how.averaging is not None:
        raise ValueError(
            f"strategy {how.name!r} averages the parameters and not their masters, so the next step would "
            "undo part of each average. Leave master_dtype out, or choose another strategy."
        )
    return True


def shard_saves(how: Recipe) -> None:
    """Return if the state under this recipe can be saved in shards, each rank what it owns.

    Raises:
        ValueError: it cannot; says why, and what to use.
    """
    reason = ""
    if how.averaging is not None:
        reason = "trains another model on each rank between two averages, and a save holds one"
    elif how.stage == 3:
        reason = (
            "is PyTorch's fully_shard with its own AdamW, and save_sharded writes a ZeroRedundancyOptimizer's"
        )
    elif how.partition is None:
        reason = "keeps the whole state on every rank, so there are no shards"
    elif how.shard_group is not None:
        reason = "with shard_group has several groups of ranks, each with the whole state, for one directory"
    if reason:
        instead = "" if how.averaging is not None else ", or checkpoint, one file, in place of checkpoint_dir"
        raise ValueError(
            f"strategy {how.name!r} {reason}: choose zero, zero-bucket, zero-even or zero-2{instead}."
        )


def least_bytes(config: TrainConfig, ranks: int) -> int:
    """Return the least bytes that a run needs on all ranks of a machine; it may need some times as many.

    Parameters on every rank, which each makes before they are sharded, and gradients where the strategy
    leaves them whole; AdamW's state at least once; of the activations eight tensors for each block and the
    logits, in the parameters' dtype.
    """
    model, itemsize = config.model, itemsize_of(config.model.dtype)
    activations = config.batch_size * model.context * (8 * model.layers * model.width + VOCABULARY)
    whole = 2 if config.recipe.stage < 2 else 1
    state = state_rule(config.recipe.optimizer).nbytes(model.numel, itemsize)
    return itemsize * ranks * (whole * model.numel + activations) + state


def check_memory(config: TrainConfig, ranks: int) -> None:
    """Refuse a run that this machine's memory cannot hold, where the ranks compute in it.

    Raises:
        ValueError: the ranks need more than there is; not where the system does not say how much there is.
    """
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return
    if (needed := least_bytes(config, ranks)) > memory:
        raise ValueError(
            f"{ranks} ranks with a model of {config.model.numel:,} parameters and {config.batch_size:,} "
            f"passages of {config.model.context:,} bytes each need at least {format_bytes(needed)}, and this "
            f"machine has {format_bytes(memory)}: make them smaller."
        )


EXIT_CODES = (
    "exit codes: 0 where all went well; 1 for a run that failed, or whose losses or predictions are wrong, "
    "and for a package that is not installed; 2 for a mistake in the options; 130 after Ctrl-C. torchrun "
    "names the code of a rank that failed, and ends with 1 itself"
)


def add_run_arguments(parser: Parser) -> None:
    """All options that `zero-ref train` and torchrun share, and what they say of exit codes."""
    add = parser.add_argument
    add_options(parser, options_of(TrainConfig))
    add("--json", type=OutputFile, metavar="FILE", help="write what was predicted and measured here")
    settings = "settings in TOML, or JSON, by the names of these options; the command line wins"
    add("--config", metavar="FILE", help=settings)
    add("--show-config", action="store_true", help="print the settings as --config reads them, and end")
    predict = "print the simulator's prediction of the run, start nothing, and end"
    add("--dry-run", action="store_true", help=predict)
    clusters = ", ".join(CLUSTERS) + ", or a file with a cluster in JSON (default: %(default)s)"
    add("--cluster", default="loopback", metavar="NAME|FILE", help=f"for the times of --dry-run: {clusters}")
    parser.reads_settings = True
    parser.epilog = EXIT_CODES


def add_demo_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of a run without those that not all strategies take: `zero-ref demo` tries all."""
    left_out = ("strategy", "own")
    add_options(parser, (one for one in options_of(TrainConfig) if one.path[0] not in left_out))


def strategies_of(args: argparse.Namespace) -> list[str]:
    """The strategies that the options name, each once.

    Raises:
        ValueError: several would write one checkpoint; a dry run of the reader's own optimizer.
    """
    own = [os.path.basename(args.optimizer)] if args.optimizer else []
    strategies = list(dict.fromkeys((args.strategy or ["ddp" if own else TrainConfig().strategy]) + own))
    if own and args.dry_run:
        raise ValueError(f"--dry-run predicts strategies, and {own[0]} is none: leave --optimizer out.")
    if len(strategies) > 1 and (args.checkpoint or args.checkpoint_dir):
        raise ValueError("--checkpoint and --checkpoint-dir hold one model: give one --strategy with them.")
    return strategies


def config_for(args: argparse.Namespace, strategies: Sequence[str], world_size: int) -> TrainConfig:
    """A TrainConfig that can be trained `under` each strategy; `--overlap` and `--shard-group` must fit one.

    Raises:
        ValueError: as `config_from`; a strategy cannot do the rest, or an option fits none of them; the
            ranks cannot be divided into groups.
    """
    for_some = [
        (one, one.kept(given))
        for one in options_of(TrainConfig)
        if one.option.used_by is not None and (given := getattr(args, one.word)) is not None
    ]
    able = [
        name
        for name in strategies
        if name in TRAINED and all(one.is_used(TRAINED[name], value) for one, value in for_some)
    ]
    config = config_from(args, (able or strategies)[0])
    config.check_ranks(world_size)
    for strategy in strategies:
        config.under(strategy)
    return config


def config_from(args: argparse.Namespace, strategy: str) -> TrainConfig:
    """The TrainConfig that the options describe.

    Raises:
        ValueError: as `TrainConfig` and `GPTConfig`; there is no checkpoint to resume, or one that would be
            overwritten; only one step is asked for, in which DDP builds its buckets, so no prediction holds.
    """
    if args.steps < 2:
        raise ValueError(f"--steps must be at least 2, got {args.steps}: the first builds DDP's buckets.")
    own = getattr(args, "optimizer", None)  # the demo has none
    if own is not None and not os.path.isfile(own):
        raise ValueError(f"--optimizer: there is no file {own}.")
    if args.resume and args.checkpoint and not os.path.isfile(args.checkpoint):
        raise ValueError(
            f"--resume: there is no file {args.checkpoint} yet; leave --resume out the first time."
        )
    # A launcher starts the same command again, so --resume with a directory also begins a run.
    begins_anew = args.checkpoint_dir and not args.resume
    if begins_anew and any(save.is_complete for save in saves_in(Path(args.checkpoint_dir))):
        raise ValueError(
            f"--checkpoint-dir {args.checkpoint_dir} has saves of a run: add --resume to go on from "
            "the newest, or name another directory."
        )
    return from_options(TrainConfig, vars(args), strategy=strategy)
