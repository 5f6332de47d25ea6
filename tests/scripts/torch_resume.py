"""A user's script for torch's ZeroRedundancyOptimizer: bucket views, a scheduler, Join, and resuming.

    torchrun --nproc-per-node=2 torch_resume.py --batches 4 4 --out first.pt
    torchrun --nproc-per-node=2 torch_resume.py --batches 3 3 --resume first.pt --out second.pt

It knows nothing of zero_ref. tests/dropin/test_dropin.py runs it as it is, and with
the import from zero_ref.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 20))


def loss_of(model, rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(0, 20, (8, 2), generator=generator)
    return nn.functional.cross_entropy(model(tokens[:, 0]), tokens[:, 1])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batches", type=int, nargs="+", help="for each rank")
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    ddp = DDP(make_model())
    embedding, *others = ddp.parameters()
    optimizer = ZeroRedundancyOptimizer(
        [{"params": [embedding], "lr": 0.02}, {"params": others}],
        optimizer_class=torch.optim.AdamW,
        parameters_as_bucket_view=True,
        lr=0.01,
        weight_decay=0.1,
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    start = 0
    if args.resume:
        checkpoint = torch.load(args.resume, map_location="cpu")
        ddp.module.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        start = checkpoint["step"]

    with Join([ddp, optimizer]):
        for step in range(start, start + args.batches[rank]):
            optimizer.zero_grad()
            loss_of(ddp, rank, step).backward()
            optimizer.step()
            scheduler.step()

    last = args.batches.index(max(args.batches))
    optimizer.consolidate_state_dict(to=last)
    if rank == last:
        checkpoint = {
            "model": ddp.module.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "step": start + args.batches[rank],
        }
        torch.save(checkpoint, args.out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
