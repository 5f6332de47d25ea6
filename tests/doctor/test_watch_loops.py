"""`watch` says nothing of right loops: what loops of today do, each for 30 steps on two ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

from zero_ref import ZeroRedundancyOptimizer
from zero_ref.doctor.watch import watch
from zero_ref.lab import ranks

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore")]
STEPS = 30


class Net(nn.Module):
    def __init__(self, checkpoints: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.checkpoints = checkpoints
        self.first, self.norm = nn.Linear(8, 16), nn.LayerNorm(16)
        self.middle, self.last = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(torch.tanh(self.first(inputs)))
        if self.checkpoints:
            return self.last(checkpoint(self.middle, hidden, use_reentrant=False))
        return self.last(self.middle(hidden))


class Loop:
    """A loop under DDP with this package's optimizer; each other one changes a part."""

    passes = 1

    def __init__(self) -> None:
        self.make()
        self.watch = watch(self.optimizer, model=self.model, wait=60)
        self.prepare()
        generator = torch.Generator().manual_seed(dist.get_rank())
        for number in range(STEPS):
            self.before(number)
            for micro in range(self.passes):
                with self.sync(micro == self.passes - 1):
                    loss = self.wrapper(torch.randn(6, 8, generator=generator)).float().square().mean()
                    self.backward(loss / self.passes, number)
            self.step()
            self.optimizer.zero_grad()

    def make(self) -> None:
        self.model = Net()
        self.wrapper: Any = DDP(self.model)
        self.optimizer = self.made()

    def made(self) -> Any:
        return ZeroRedundancyOptimizer(self.model.parameters(), torch.optim.AdamW, lr=0.01)

    def prepare(self) -> None:
        pass

    def before(self, number: int) -> None:
        pass

    def sync(self, last: bool) -> Any:
        return contextlib.nullcontext() if last else self.wrapper.no_sync()

    def backward(self, loss: torch.Tensor, number: int) -> None:
        loss.backward()

    def clip(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)

    def step(self) -> None:
        self.optimizer.step()


class AccumulatesAndClips(Loop):
    passes = 4

    def step(self) -> None:
        self.clip()
        super().step()


class Scales(Loop):
    """GradScaler's; the loss of step 7 is infinite, so that step is left out."""

    def prepare(self) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=5)

    def backward(self, loss: torch.Tensor, number: int) -> None:
        self.scaler.scale(loss * float("inf") if number == 7 else loss).backward()

    def step(self) -> None:
        self.scaler.unscale_(self.optimizer)
        self.clip()
        self.scaler.step(self.optimizer)
        self.scaler.update()


class Schedules(Loop):
    def prepare(self) -> None:
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.01, total_steps=STEPS + 1)

    def step(self) -> None:
        super().step()
        self.scheduler.step()


class Freezes(Loop):
    def make(self) -> None:
        super().make()
        self.wrapper = DDP(self.model, find_unused_parameters=True)

    def before(self, number: int) -> None:
        if number in (10, 20):
            self.model.middle.requires_grad_(number == 20)


class Checkpoints(Loop):
    def make(self) -> None:
        super().make()
        self.model.checkpoints = True


class CompiledModel(Loop):
    def make(self) -> None:
        super().make()
        self.wrapper = torch.compile(self.wrapper, backend="eager")


class CompiledStep(Loop):
    def made(self) -> Any:
        return torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def prepare(self) -> None:
        self.compiled = torch.compile(lambda: self.optimizer.step(), backend="eager")

    def step(self) -> None:
        self.compiled()


class MixedFSDP2(AccumulatesAndClips):
    passes = 2

    def make(self) -> None:
        self.model = self.wrapper = Net()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in (self.model.first, self.model.middle, self.model):
            fully_shard(layer, mp_policy=policy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def sync(self, last: bool) -> Any:
        self.model.set_requires_gradient_sync(last)
        return contextlib.nullcontext()


LOOPS = (
    AccumulatesAndClips,
    Scales,
    Schedules,
    Freezes,
    Checkpoints,
    CompiledModel,
    CompiledStep,
    MixedFSDP2,
)


def run(kind: Callable[[], Loop]) -> tuple[int, list[str]]:
    loop = kind()
    return loop.watch._step, [str(one) for one in loop.watch.findings]


@pytest.mark.parametrize("kind", LOOPS, ids=lambda kind: kind.__name__)
def test_nothing_is_said_of_a_right_loop(kind: type[Loop]) -> None:
    assert ranks.run(run, 2, kind, timeout=300) == [(STEPS - (kind is Scales), [])] * 2


class ClipsLate(Scales):
    """Wrong: another rank's factor of clipping, as a norm of its own gradients gives it."""

    def clip(self) -> None:
        super().clip()
        for param in self.model.parameters():
            param.grad.mul_(1.0 - 0.1 * dist.get_rank())


def test_ranks_that_clip_by_other_norms_are_told() -> None:
    (_, (first, *_)), _ = ranks.run(run, 2, ClipsLate, timeout=300)
    assert first.startswith("step 0, before step: gradient"), first
