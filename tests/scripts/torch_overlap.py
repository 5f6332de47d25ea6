"""A user's script for torch's ZeroRedundancyOptimizer, its update overlapped with DDP's backward.

    torchrun --nproc-per-node=2 torch_overlap.py --out run

It knows nothing of zero_ref. tests/dropin/test_dropin.py runs it with the imports from zero_ref.
"""

import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))


def make_data(rank, world_size):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(96, 8, generator=generator)
    dataset = TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))
    sampler = DistributedSampler(dataset, world_size, rank, shuffle=True, seed=2)
    return DataLoader(dataset, batch_size=8, sampler=sampler), sampler


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--shard-buckets", action="store_true")
    parser.add_argument("--step", action="store_true", help="call step() in the loop, which torch ignores")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)

    model = make_model().to(device)
    ddp = DDP(model, device_ids=[rank] if on_gpu else None, bucket_cap_mb=0.01, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        ddp.parameters(), optimizer_class=torch.optim.Adam, overlap_with_ddp=True, lr=0.01
    )
    ddp.register_comm_hook(
        None, hook_with_zero_step(allreduce_hook, ddp, optimizer, shard_buckets=args.shard_buckets)
    )

    loader, sampler = make_data(rank, world_size)
    losses = []
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            ddp.zero_grad()
            loss = nn.functional.mse_loss(ddp(inputs.to(device)), targets.to(device))
            loss.backward()  # the parameters are updated in here
            if args.step:
                optimizer.step()
            losses.append(loss.item())

    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"losses{rank}.json").write_text(json.dumps(losses))
    optimizer.consolidate_state_dict(to=0)
    if rank == 0:
        checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(checkpoint, args.out / "checkpoint.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
