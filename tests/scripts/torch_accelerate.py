"""A user's accelerate script for torch's ZeroRedundancyOptimizer: clipping, accumulation, save, resume.

    torchrun --nproc-per-node=2 torch_accelerate.py first
    torchrun --nproc-per-node=2 torch_accelerate.py second first/optimizer.pt

It knows nothing of zero_ref. tests/dropin/test_clients_ranks.py runs it as it is, and with
the import from zero_ref.
torch's class needs `device_placement=False`: `prepare` otherwise asks for a state_dict() that it refuses. It
also refuses `save_state`, which calls state_dict() on all ranks; so the script saves by itself.
"""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils.data import DataLoader, TensorDataset

folder, *checkpoint = map(Path, sys.argv[1:])
torch.manual_seed(0)
examples = TensorDataset(torch.randn(96, 8), torch.randn(96, 1))
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model, loader = accelerator.prepare(model, DataLoader(examples, batch_size=4))
optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4)
optimizer = accelerator.prepare_optimizer(optimizer, device_placement=False)
scheduler = accelerator.prepare(scheduler)

done = 0
if checkpoint:
    saved = torch.load(checkpoint[0])
    model.module.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    scheduler.load_state_dict(saved["scheduler"])
    done = 6
for number, (inputs, targets) in enumerate(accelerator.skip_first_batches(loader, done), start=done + 1):
    with accelerator.accumulate(model):
        accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    if number == 6:
        optimizer.optimizer.consolidate_state_dict(to=0)
        if accelerator.is_main_process:
            folder.mkdir()
            parts = {"model": model.module, "optimizer": optimizer, "scheduler": scheduler}
            state = {name: part.state_dict() for name, part in parts.items()}
            torch.save(state, folder / "optimizer.pt")
        accelerator.wait_for_everyone()
accelerator.end_training()
