"""A user's Lightning script for torch's ZeroRedundancyOptimizer: clipping, accumulation, save, resume.

    torchrun --nproc-per-node=2 torch_lightning.py first
    torchrun --nproc-per-node=2 torch_lightning.py second first/epoch=0.ckpt

It knows nothing of zero_ref. tests/dropin/test_clients_ranks.py runs it as it is, and with
the import from zero_ref.
The scheduler is StepLR: torch's class has no `defaults` of Adam, which OneCycleLR asks for.
"""

import sys

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils.data import DataLoader, TensorDataset


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def training_step(self, batch):
        inputs, targets = batch
        return nn.functional.mse_loss(self.layers(inputs), targets)

    def configure_optimizers(self):
        optimizer = ZeroRedundancyOptimizer(self.parameters(), optimizer_class=torch.optim.AdamW, lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)]


folder, *checkpoint = sys.argv[1:]
lightning.seed_everything(0)
examples = TensorDataset(torch.randn(48, 8), torch.randn(48, 1))
model = Regression()
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=2,
    strategy="ddp",
    max_epochs=2,
    accumulate_grad_batches=2,
    gradient_clip_val=0.5,
    callbacks=[ModelCheckpoint(folder, "{epoch}", save_top_k=-1)],
    logger=False,
)
trainer.fit(model, DataLoader(examples, batch_size=4), ckpt_path=checkpoint[0] if checkpoint else None)
