"""DeepSpeed, stage 1, with torch's AdamW in 32 bits."""

import os

import deepspeed
import torch
import torch.distributed as dist

from zero_ref.doctor.adapters import DeepSpeed

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    # Without this line DeepSpeed 0.19 clips all gradients to a norm of 1.
    "gradient_clipping": 0.0,
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}


def sharded(model):
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    made = torch.optim.AdamW(model.parameters(), lr=0.05)
    engine, *_ = deepspeed.initialize(model=model, optimizer=made, config=CONFIG, dist_init_required=False)
    return DeepSpeed(engine)
