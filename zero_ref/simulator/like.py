"""How programs train: the options of a scenario that suit them, by the program's name.

`Scenario(model, cluster, ranks, **LIKE["transformers"])` is one of these, and `zero-ref simulate --like
transformers` is the same. Each says which kind of program it is (`spread.KINDS`), so predictions have the
interval of that kind. An option that is said goes before the program's.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

LIKE: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "plain": {},
        "torchtitan": {"reduce_dtype": "float32"},
        "transformers": {"norms": "by-hand", "kept_logits": True},
        "nanogpt": {
            "dtype": "float32",
            "autocast": "bfloat16",
            "compiled": True,
            "fused_loss": True,
            "program": "compiled",
        },
        "megatron": {
            "gradient_dtype": "float32",
            "without_ddp": True,
            "fused_loss": True,
            "vendor_kernels": True,
            "attention_kernel": "cudnn",
            "program": "vendor",
        },
        "deepspeed": {
            "norms": "by-hand",
            "kept_logits": True,
            "live_parameters": 10**9,
            "gather_modules": True,
            "program": "deepspeed",
        },
    }
)
"""The default is "plain": 16-bit parameters and gradients beside 32-bit masters, and fused kernels.

Source: torchtitan's MixedPrecisionPolicy, which reduces in float32; transformers' models, whose norms are
separate operations and which return their logits; nanoGPT's train.py, which compiles the whole model, with
its loss, under autocast; Megatron-LM's main_grad, its own buffers, its fused cross-entropy and the kernels of
Transformer Engine; DeepSpeed with a model of transformers, its default stage3_max_live_parameters, and
its gathers of single modules.
"""
