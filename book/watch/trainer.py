"""Hugging Face's Trainer with FSDP2, watched: `torchrun --nproc-per-node=2 trainer.py`, on a CPU."""

import torch
from torch.distributed.fsdp import fully_shard
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from zero_ref.doctor.watch import watch


class Watched(TrainerCallback):
    def on_train_begin(self, args, state, control, optimizer=None, model=None, **kwargs):
        self.watch = watch(optimizer, model=model)


def example(number):
    tokens = torch.randint(64, (16,), generator=torch.Generator().manual_seed(number))
    return {"input_ids": tokens, "labels": tokens}


arguments = TrainingArguments(
    "saves",
    use_cpu=True,
    max_steps=4,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    max_grad_norm=0.1,
    save_strategy="no",
    report_to=[],
)
torch.manual_seed(0)
config = {"vocab_size": 64, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
model = GPT2LMHeadModel(GPT2Config(**config, bos_token_id=None, eos_token_id=None))
for block in model.transformer.h:
    fully_shard(block)
fully_shard(model)
watched = Watched()
trainer = Trainer(model, arguments, train_dataset=[example(n) for n in range(64)], callbacks=[watched])
# On a CPU accelerate has no FSDP, and would wrap the sharded model in DDP. On GPUs leave this line out, and
# `fully_shard` to the Trainer's `fsdp_config`.
trainer.accelerator.prepare_model = lambda model, *args, **kwargs: model
trainer.train()
watched.watch.check()
