"""Whether the host waits for the device in an iteration, in each way to train."""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

import zero_ref
from benchmarks import contenders, training
from benchmarks.gpu.budget import Budget, Found, alone
from benchmarks.training import Way
from zero_ref.clip.grad_norm import clip_grad_norm_
from zero_ref.comm import devices
from zero_ref.lab.config import GPTConfig
from zero_ref.lab.model import GPT, batch, language_reference
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer


class _Training(NamedTuple):
    """What takes part: how a model is wrapped, its dtype, and what happens between backward and step."""

    way: Way
    dtype: str = "float32"
    clips: bool = False


def _trainings() -> dict[str, _Training]:
    def with_options(**options: Any) -> Way:
        return Way(lambda params: ZeroRedundancyOptimizer(params, AdamW, **contenders.BEST, **options))

    ours = {name: way for name, way in training.ways().items() if name.startswith("zero_ref")}
    masters = {"master_dtype": torch.float32}
    return {
        contenders.REFERENCE: _Training(training.ways()[contenders.REFERENCE]),
        **{name: _Training(way) for name, way in ours.items()},
        contenders.MASTERS: _Training(with_options(**masters), "bfloat16"),
        f"{contenders.MASTERS}, stochastic rounding": _Training(
            with_options(rounding="stochastic", **masters), "bfloat16"
        ),
        "zero_ref, sent in 16 bits": _Training(with_options(broadcast_dtype=torch.bfloat16)),
        "zero_ref, clipped": _Training(with_options(), clips=True),
        "zero_ref, state on the CPU": _Training(with_options(state_device="cpu")),
    }


CHECKED_STEPS = 9
"""Steps 1, 2, 4 and 8 compare ranks, and the first ones build buckets: the next step is an ordinary one."""


def synchronisations(
    device: torch.device,
    budget: Budget,
    *,
    config: GPTConfig | None = None,
    only: Sequence[str] | None = None,
) -> Found:
    """Whether the host waits for the device in an iteration, for each way to train and each option.

    The parts of an iteration run one after the other while the device raises an error at each wait.

    Args:
        config: of the model; None for the lab's own.
        only: names of the ways to try; None for all.
    Returns:
        `checked`, whether the device can tell; and for each way the text of the error in each part, None
        where the host waits for nothing. What comes after a wait is not tried.
    """
    rows: list[Found] = []
    checked = False
    with alone(device):
        trainings = _trainings()
        for name in trainings if only is None else only:
            if budget.over:
                rows.append({"way": name, "left_out": "no time was left"})
                continue
            try:
                checked, parts = _waits(device, config or GPTConfig(), trainings[name])
                rows.append({"way": name, "parts": parts})
            except Exception as error:
                rows.append({"way": name, "error": f"{type(error).__name__}: {error}"})
    failed = [row for row in rows if "error" in row]
    if rows and len(failed) == len(rows):
        raise RuntimeError(f"no way could be trained; {failed[0]['way']}: {failed[0]['error']}")
    return {"checked": checked, "ways": rows}


def _waits(device: torch.device, config: GPTConfig, how: _Training) -> tuple[bool, dict[str, str | None]]:
    torch.manual_seed(0)
    config = GPTConfig(config.layers, config.heads, config.width, config.context, dtype=how.dtype)
    model, optimizer = training.wrapped(GPT(config).to(device), how.way)
    given = [
        part.to(device) for part in batch(language_reference().training, config, 2, seed=0, step=0, rank=0)
    ]
    parts = _parts_of_iteration(model, optimizer, given, how.clips)
    for _, part in itertools.product(range(CHECKED_STEPS), parts.values()):
        part()
    said: dict[str, str | None] = {}
    checked = False
    for name, part in parts.items():
        devices.synchronize()
        try:
            with devices.error_on_synchronization(device) as checked:
                part()
            said[name] = None
        except RuntimeError as error:
            said[name] = f"{str(error).splitlines()[0]} at {_our_line(error)}"
            break  # what comes after would build on a part that was not finished
    return checked, said


def _parts_of_iteration(
    model: nn.Module, optimizer: Optimizer, given: Sequence[torch.Tensor], clips: bool
) -> dict[str, Callable[[], object]]:
    parts: dict[str, Callable[[], object]] = {
        "forward": lambda: losses.append(model(*given)),
        "backward": lambda: losses.pop().backward(),
    }
    losses: list[torch.Tensor] = []
    if clips:
        assert isinstance(optimizer, ZeroRedundancyOptimizer)
        parts["clipping"] = partial(clip_grad_norm_, optimizer, 1.0)
    return {**parts, "step": optimizer.step, "zero_grad": optimizer.zero_grad}


def _our_line(error: BaseException) -> str:
    """The last line of this package that an error came through, as "shard/shard.py:100"."""
    frames = traceback.extract_tb(error.__traceback__)
    package = Path(zero_ref.__file__).parent
    ours = [frame for frame in frames if package in Path(frame.filename).parents]
    if not ours:
        return "torch's own code"
    return f"{Path(ours[-1].filename).relative_to(package).as_posix()}:{ours[-1].lineno}"
