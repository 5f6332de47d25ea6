"""Bytes that a step puts on the wire under each strategy, from the kernel's counters. Linux, as root:

    unshare --net .venv/bin/python bench/wire.py

In a network namespace of its own, loopback carries nothing but the ranks' traffic.
"""

from __future__ import annotations

import fcntl
import socket
import statistics
import struct

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from zero_ref.lab import meter, ranks
from zero_ref.lab.config import TrainConfig
from zero_ref.lab.model import GPT, batch, language_reference
from zero_ref.lab.train import make_optimizer
from zero_ref.simulator.schedule import STRATEGIES

SIOCSIFFLAGS, IFF_UP_AND_RUNNING = 0x8914, 0x41


def raise_loopback() -> None:
    """A new network namespace has a loopback device, but it is down."""
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh", b"lo", IFF_UP_AND_RUNNING))


def bytes_of_a_step(strategy: str, steps: int = 8) -> tuple[float, int]:
    """Median over steps of what all ranks together sent, and the bytes of the parameters."""
    config = TrainConfig(strategy=strategy)
    model = GPT(config.model)
    ddp = DistributedDataParallel(model)
    optimizer = make_optimizer(config, model)
    text = language_reference().training
    sent = []
    for step in range(steps):
        tokens, targets = batch(text, config.model, 2, seed=0, step=step, rank=dist.get_rank())
        dist.barrier()
        before = meter.wire_bytes() or 0
        dist.barrier()
        optimizer.zero_grad()
        ddp(tokens, targets).backward()
        optimizer.step()
        dist.barrier()
        sent.append((meter.wire_bytes() or 0) - before)
    return statistics.median(sent), sum(param.nbytes for param in model.parameters())


def main() -> None:
    """One line for each number of ranks and strategy: bytes, in parameters' bytes, and against DDP."""
    raise_loopback()
    for world_size in (2, 4):
        ddp = 0.0
        for strategy in STRATEGIES:
            sent, parameters = ranks.run(bytes_of_a_step, world_size, strategy)[0]
            ddp = ddp or sent
            print(
                f"{world_size} ranks  {strategy:<12} {sent:>12,.0f} B  {sent / parameters:6.3f} Ψ  "
                f"{sent / ddp:.3f} x ddp"
            )


if __name__ == "__main__":
    main()
