"""The functions that one call passes on its way, counted by sys.setprofile on two ranks of Gloo.

A function is counted once, however often it is called; a comprehension or generator expression is one, as
Python 3.11 makes a frame for each. Counted are those of the package, on the thread that makes the call; for
torch's optimizer, those of torch.distributed.optim.

The optimizer has default options, AdamW and four parameters. The steps before the measured one are those in
which ranks compare their options (updates 1, 2 and 4).
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchsZeroRedundancyOptimizer

import zero_ref
from zero_ref import ShardedDataParallel, ZeroRedundancyOptimizer, load_sharded, save_sharded
from zero_ref.lab import ranks

STEPS_BEFORE = 4

STEP = "step"
BACKWARD = "backward under ShardedDataParallel"
SAVE = "save_sharded"
LOAD = "load_sharded"
TORCHS_STEP = "step of torch's ZeroRedundancyOptimizer"


class Road(NamedTuple):
    """The functions that a call passes, each as (file, qualified name), in the order of their first call."""

    functions: list[tuple[str, str]]

    @property
    def files(self) -> set[str]:
        """The files that have the functions."""
        return {file for file, _ in self.functions}


def road_of(call: Callable[[], object], folder: Path) -> Road:
    """Make the call, and note the functions of this folder that it passes."""
    passed: dict[tuple[str, str], None] = {}

    def note(frame: Any, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and folder in path.parents:
            passed[path.relative_to(folder).as_posix(), frame.f_code.co_qualname] = None

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return Road(list(passed))


def model_of_four() -> nn.Sequential:
    """A model with four parameters."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))


def trained(optimizer: torch.optim.Optimizer, model: nn.Module, steps: int) -> None:
    """Step the optimizer with gradients that all ranks have."""
    for _ in range(steps):
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()


def roads(saves: Path) -> dict[str, Road]:
    """Take each road on this rank, with checkpoints in the folder. Collective: all ranks."""
    ours = Path(zero_ref.__file__).parent
    found = {}

    model = model_of_four()
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
    trained(zero, model, STEPS_BEFORE)
    found[STEP] = road_of(lambda: trained(zero, model, 1), ours)

    model = model_of_four()
    torchs = TorchsZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
    trained(torchs, model, STEPS_BEFORE)
    torchs_folder = Path(sys.modules[TorchsZeroRedundancyOptimizer.__module__].__file__ or "").parent
    found[TORCHS_STEP] = road_of(lambda: trained(torchs, model, 1), torchs_folder)

    model = model_of_four()
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
    wrapped = ShardedDataParallel(model, zero)

    def loss() -> torch.Tensor:
        return wrapped(torch.ones(2, 64)).sum()

    for _ in range(STEPS_BEFORE):
        loss().backward()
        zero.step()
        zero.zero_grad()
    last = loss()
    found[BACKWARD] = road_of(last.backward, ours)
    zero.step()

    save_sharded(zero, saves)
    found[SAVE] = road_of(lambda: save_sharded(zero, saves), ours)
    found[LOAD] = road_of(lambda: load_sharded(zero, saves), ours)
    return found


def on_two_ranks() -> dict[str, Road]:
    """Take each road on two ranks. Rank 0's are given: it also does what one rank does for all."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            return ranks.run(roads, 2, Path(folder, "saves"), backend="gloo")[0]
    finally:
        ranks.shutdown()
