"""A small training with all phases that the exhibits get wrong: its loss, with and without each mistake."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from zero_ref.doctor.program import Program
from zero_ref.lab import ranks
from zero_ref_course.gallery.exhibits import Exhibit

__all__ = ["losses_of", "trained"]

RANKS = 2
MICRO_BATCHES = 2
MAX_NORM = 0.25
ROWS = 32
WIDTH = 16


class Net(nn.Module):
    """A network of three layers that learns a function of two numbers. `model(batch)` is its loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(2, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Return the mean squared error."""
        inputs, targets = batch
        hidden = self.second(self.first(inputs).tanh()).tanh()
        return (self.head(hidden) - targets).square().mean()


def batch_of(step: int, micro: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of points in a plane, and the height of a wave at each."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    inputs = torch.rand(ROWS, 2, generator=generator) * 2 - 1
    return inputs, (3 * inputs[:, :1]).sin() + 2 * inputs[:, 1:]


def trained(program_of: Callable[[nn.Module], Program], steps: int) -> list[float]:
    """The mean loss of all ranks in each step: with micro-batches, clipping, a scheduler, a save and a load.

    Collective: all ranks of the default group.
    """
    program = program_of(Net())
    losses: list[float] = []
    for step in range(steps):
        if step == steps // 2:
            program = reloaded(program, program_of)
        program.set_lr_factor(0.4 * 0.98**step)
        program.zero_grad()
        total = torch.zeros(())
        for micro in range(MICRO_BATCHES):
            total += one_batch(program, step, micro, last=micro == MICRO_BATCHES - 1)
        program.end_of_backward()
        program.clip(MAX_NORM)
        program.step()
        dist.all_reduce(total)
        losses.append(total.item() / MICRO_BATCHES / dist.get_world_size())
    return losses


def one_batch(program: Program, step: int, micro: int, last: bool) -> torch.Tensor:
    """Make forward and backward of a micro-batch, and return its loss."""
    batch = batch_of(step, micro, dist.get_rank())
    if last:
        loss = program.loss(batch)
        program.backward(loss)
    else:
        with program.no_sync():
            loss = program.loss(batch)
            program.backward(loss)
    return loss.detach()


def reloaded(program: Program, program_of: Callable[[nn.Module], Program]) -> Program:
    """Return a new program that has loaded the state of another one. Collective: all ranks."""
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, group_src=0)
    program.save(Path(folder[0]))
    dist.barrier()
    new = program_of(Net())
    new.load(Path(folder[0]))
    return new


def all_trained(programs: Sequence[Callable[[nn.Module], Program]], steps: int) -> list[list[float]]:
    """Train several programs, one after the other, and return their losses. Collective: all ranks."""
    return [trained(program_of, steps) for program_of in programs]


def losses_of(exhibits: Sequence[Exhibit], steps: int = 40) -> dict[str, tuple[list[float], list[float]]]:
    """The losses of each exhibit, with the mistake and without, on two real ranks.

    Args:
        exhibits: the exhibits whose programs train.
        steps: of each training; in the middle the program is saved and loaded.
    Cost: about a second for three trainings of 40 steps, once ranks are started.
    """
    programs = list(dict.fromkeys(one for exhibit in exhibits for one in (exhibit.program, exhibit.mended)))
    losses = ranks.run(all_trained, RANKS, programs, steps, backend="gloo", timeout=120.0)[0]
    found = dict(zip(programs, losses, strict=True))
    return {exhibit.name: (found[exhibit.program], found[exhibit.mended]) for exhibit in exhibits}
