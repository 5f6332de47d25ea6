"""A loop with DeepSpeed, watched.

DS_ACCELERATOR=cpu torchrun --nproc-per-node=2 deepspeed_loop.py
"""

import sys

import deepspeed
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from zero_ref.doctor.watch import watch

deepspeed.init_distributed(dist_backend="gloo")
torch.manual_seed(0)
config = {"vocab_size": 64, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
model = GPT2LMHeadModel(GPT2Config(**config, bos_token_id=None, eos_token_id=None))
options = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.1,
    "bf16": {"enabled": True},
    # torch's AdamW. DeepSpeed's own compiles for minutes when it is first used.
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001, "torch_adam": True}},
    "zero_optimization": {"stage": int(sys.argv[1]) if len(sys.argv) > 1 else 2},
}
engine, optimizer, _, _ = deepspeed.initialize(
    model=model, model_parameters=model.parameters(), config=options
)
watched = watch(optimizer, model=model)
generator = torch.Generator().manual_seed(torch.distributed.get_rank())
for _ in range(8):
    tokens = torch.randint(64, (4, 16), generator=generator)
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
watched.check()
