"""DeepSpeed's engine, watched: `torchrun --nproc-per-node=2 deepspeed_engine.py STAGE`, on a CPU."""

import sys

import deepspeed
import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel

from zero_ref.doctor.watch import watch

dist.init_process_group("gloo")
torch.manual_seed(0)
config = {"vocab_size": 64, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
model = GPT2LMHeadModel(GPT2Config(**config, bos_token_id=None, eos_token_id=None))
engine, *_ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
    config={
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.1,
        "zero_optimization": {"stage": int(sys.argv[1])},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    },
    dist_init_required=False,
)
watched = watch(engine.optimizer, model=engine.module)
for number in range(8):
    seed = torch.Generator().manual_seed(10 * number + dist.get_rank())
    tokens = torch.randint(64, (2, 16), generator=seed)
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
watched.check()
