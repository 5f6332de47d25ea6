"""A user's script for FairScale's OSS: fine-tuning with a schedule, clipping, checkpoints and resuming.

    torchrun --nproc-per-node=2 fairscale_oss.py --epochs 3 --out run
    torchrun --nproc-per-node=2 fairscale_oss.py --epochs 5 --resume run/checkpoint.pt --out longer

It knows nothing of zero_ref. tests/dropin/test_oss_ranks.py runs it with the import from zero_ref, and, where
FairScale is installed, as it is.
"""

import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist
from fairscale.optim import OSS
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH = 8
UNFREEZE_IN_EPOCH = 1


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU())
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 4)

    def forward(self, images):
        return self.head(self.norm(self.backbone(images).amax(dim=(2, 3))))


def param_groups(model, weight_decay):
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]


def make_loader(rank, world_size):
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(96, 1, 8, 8, generator=generator)
    corners = torch.stack(
        [images[..., :4, :4], images[..., :4, 4:], images[..., 4:, :4], images[..., 4:, 4:]]
    )
    labels = corners.flatten(2).amax(2).argmax(0)
    dataset = TensorDataset(images, labels)
    sampler = DistributedSampler(dataset, world_size, rank, seed=2)
    return DataLoader(dataset, batch_size=BATCH, sampler=sampler), sampler


def train_one_epoch(ddp, optimizer, scheduler, loader, max_norm, history):
    for images, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(ddp(images), labels)
        loss.backward()
        norm = optimizer.clip_grad_norm(max_norm) if max_norm else torch.tensor(0.0)
        optimizer.step()
        scheduler.step()
        history.append([loss.item(), norm.item(), scheduler.get_last_lr()[0]])


def save_checkpoint(path, epoch, model, optimizer, scheduler):
    optimizer.consolidate_state_dict(recipient_rank=0)
    if dist.get_rank() == 0:
        torch.save(
            {
                "epoch": epoch,
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
            },
            path,
        )
    dist.barrier()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--weight-decay", type=float, default=0.05)
    parser.add_argument("--max-norm", type=float, default=0.0)
    parser.add_argument("--fp16-broadcast", action="store_true")
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    args.out.mkdir(exist_ok=True)

    torch.manual_seed(0)
    model = Classifier()
    model.backbone.requires_grad_(False)
    ddp = DDP(model)
    optimizer = OSS(
        params=param_groups(model, args.weight_decay),
        optim=torch.optim.AdamW,
        broadcast_fp16=args.fp16_broadcast,
        lr=args.lr,
        betas=(0.9, 0.99),
    )
    scheduler = OneCycleLR(optimizer, max_lr=args.lr, total_steps=100)

    start = 0
    if args.resume:
        checkpoint = torch.load(args.resume, map_location="cpu")
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        start = checkpoint["epoch"]

    loader, sampler = make_loader(rank, world_size)
    history = []
    for epoch in range(start, args.epochs):
        if epoch >= UNFREEZE_IN_EPOCH and not model.backbone[0].weight.requires_grad:
            model.backbone.requires_grad_(True)
            optimizer.refresh_trainable()
            ddp = DDP(model)
        sampler.set_epoch(epoch)
        train_one_epoch(ddp, optimizer, scheduler, loader, args.max_norm, history)
        save_checkpoint(args.out / "checkpoint.pt", epoch + 1, model, optimizer, scheduler)
    (args.out / f"history{rank}.json").write_text(json.dumps(history))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
