"""Parameter shapes: of published models by name, of a configuration, or of a module at hand.

A model's memory and messages follow from its parameters' shapes, in registration order; no weights are
needed. To add a preset, add a line to TRANSFORMERS. Architectures are in `architectures`, and what a
configuration of Hugging Face describes is read by `configuration`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

from zero_ref.plan.partition import ParamSpec
from zero_ref.simulator._checks import check_name
from zero_ref.simulator.architectures import (
    GPT2 as GPT2,
    MLP as MLP,
    Architecture as Architecture,
    Llama as Llama,
    Mixture as Mixture,
    Transformer as Transformer,
)
from zero_ref.simulator.configuration import from_config as from_config
from zero_ref.simulator.layers import ParamShape as ParamShape

QWEN_3 = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
}

DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
}
"""The fields of a configuration on which the number of parameters depends."""

TRANSFORMERS: dict[str, Transformer] = {
    "gpt2": GPT2(width=768, depth=12, heads=12),
    "gpt2-medium": GPT2(width=1024, depth=24, heads=16),
    "gpt2-large": GPT2(width=1280, depth=36, heads=20),
    "gpt2-xl": GPT2(width=1600, depth=48, heads=25),
    "llama3-8b": Llama(width=4096, depth=32, hidden=14336, heads=32, key_value_heads=8, vocabulary=128256),
    "llama3-70b": Llama(width=8192, depth=80, hidden=28672, heads=64, key_value_heads=8, vocabulary=128256),
    "llama3-405b": Llama(
        width=16384, depth=126, hidden=53248, heads=128, key_value_heads=8, vocabulary=128256
    ),
    "qwen3-30b-a3b": from_config(QWEN_3),
    "qwen3-235b-a22b": from_config(
        QWEN_3
        | {
            "hidden_size": 4096,
            "num_hidden_layers": 94,
            "moe_intermediate_size": 1536,
            "num_attention_heads": 64,
        }
    ),
    "deepseek-v3": from_config(DEEPSEEK_V3),
    "kimi-k2": from_config(
        DEEPSEEK_V3
        | {
            "model_type": "kimi_k2",
            "n_routed_experts": 384,
            "first_k_dense_replace": 1,
            "num_attention_heads": 64,
            "num_key_value_heads": 64,
            "vocab_size": 163840,
            "max_position_embeddings": 131072,
        }
    ),
    "gpt3-175b": GPT2(width=12288, depth=96, heads=96, positions=2048),
    "zero-7.5b": GPT2(width=4096, depth=36, heads=32, vocabulary=51200, positions=2048),
    "zero-128b": GPT2(width=8192, depth=158, heads=64, vocabulary=51200, positions=2048),
    "zero-1t": GPT2(width=25600, depth=128, heads=160, vocabulary=51200, positions=2048),
}
"""The presets whose activations can be counted too.

Three mixtures have the dimensions of their configurations: Qwen/Qwen3-30B-A3B; deepseek-ai/DeepSeek-V3,
without its module of multi-token prediction; and moonshotai/Kimi-K2-Instruct, which is built like it. GPT-3's
dimensions are those of Brown et al. (arXiv:2005.14165, table 2.1). `zero-*` are the three sizes of the ZeRO
paper's Table 1 (arXiv:1910.02054), which gives numbers of parameters and no shapes. 7.5B and 1T have the
shapes of Megatron-LM's models of these sizes (arXiv:2104.04473, table 1). No published model has 128B: ours
is 8,192 wide, the width of the ZeRO paper's runs of 100B and more, and as deep as comes nearest to 128B.
"""

MODELS: dict[str, Architecture] = {**TRANSFORMERS, "mlp-tiny": MLP((64, 256, 256, 10))}
"""All presets: those of TRANSFORMERS, and an MLP of 85,002 parameters to try things on."""


def shapes(name: str) -> tuple[ParamShape, ...]:
    """The parameters of a published model, in registration order.

    >>> gpt2 = shapes("gpt2")
    >>> len(gpt2), sum(param.numel for param in gpt2), gpt2[0]
    (148, 124439808, ParamShape(name='transformer.wte.weight', shape=(50257, 768)))

    Raises:
        ValueError: the name is not in MODELS.
    """
    check_name("model", name, MODELS)
    return MODELS[name].shapes()


def specs(shapes: Iterable[ParamShape], dtype: str = "float32") -> list[ParamSpec]:
    """Shapes as the parameters of one trainable group, which is what partitions and schedules take.

    >>> specs([ParamShape("weight", (2, 3))], dtype="bfloat16")
    [ParamSpec(numel=6, dtype='bfloat16', device='cpu', group=0, trainable=True, name='weight', shape=(2, 3),
     whole=False)]
    """
    return [ParamSpec(param.numel, dtype, name=param.name, shape=param.shape) for param in shapes]


def blocks(params: Iterable[ParamShape | ParamSpec]) -> list[list[int]]:
    """The units in which stage 3 gathers parameters: what lies outside every block, then block by block.

    A block is what has a number in its name: `transformer.h.3.mlp.c_fc.weight` belongs to `transformer.h.3`,
    and the first number counts. Embeddings, the last norm and the head have none; they make the root unit.

    >>> units = blocks(shapes("gpt2"))
    >>> len(units), units[0], units[1][:3], units[12][-1]
    (13, [0, 1, 146, 147], [2, 3, 4], 145)

    Args:
        params: in registration order.
    Returns:
        Numbers of parameters. The first list is the root's, which is empty if every name has a number; if
        none has, all are in it.
    Source: the groups of torch.distributed.fsdp.fully_shard, called on each block and last on the model.
    """
    return [list(unit) for unit in _blocks(tuple(param.name for param in params))]


@lru_cache(maxsize=16)
def _blocks(names: tuple[str, ...]) -> list[list[int]]:
    root: list[int] = []
    units: dict[tuple[str, ...], list[int]] = {}
    for index, name in enumerate(names):
        path = name.split(".")
        number = next((place for place, part in enumerate(path) if part.isdecimal()), None)
        unit = root if number is None else units.setdefault(tuple(path[: number + 1]), [])
        unit.append(index)
    return [root, *units.values()]


REDUCED_TOGETHER = 500_000_000
"""Elements of the gradients that DeepSpeed reduces together: its default `reduce_bucket_size`."""

PREFETCHED = 50_000_000
"""Elements that DeepSpeed gathers ahead: its default `stage3_prefetch_bucket_size`."""

LEFT_WHOLE = 100_000
"""Elements below which DeepSpeed leaves a parameter whole on each rank: its default
`stage3_param_persistence_threshold`."""


def modules(params: Iterable[ParamShape | ParamSpec]) -> list[list[int]]:
    """The units in which DeepSpeed's stage 3 gathers: of each block a matrix with its bias.

    What it leaves whole is with the root.

    >>> units = modules(shapes("gpt2"))
    >>> len(units), units[0][:6], units[1:3]
    (49, [0, 1, 2, 3, 8, 9], [[4, 5], [6, 7]])

    Args:
        params: in registration order.
    Returns:
        As `blocks`, with each block divided.
    Source: DeepSpeed fetches the parameters of a module when its forward or backward begins
        (deepspeed/runtime/zero/parameter_offload.py, `pre_sub_module_forward_function`).
    """
    listed = list(params)
    root, *others = _blocks(tuple(param.name for param in listed))
    units: dict[str, list[int]] = {}
    for index in (one for unit in others for one in unit):
        units.setdefault(listed[index].name.rpartition(".")[0], []).append(index)
    small = [unit for unit in units.values() if max(listed[one].numel for one in unit) < LEFT_WHOLE]
    whole = sorted([*root, *(one for unit in small for one in unit)])
    return [whole, *(unit for unit in units.values() if unit not in small)]


def matrices_whole(params: Sequence[ParamSpec]) -> list[ParamSpec]:
    """The matrices of the blocks marked `whole`, which Muon orthogonalizes, and in a group of their own.

    >>> sum(param.whole for param in matrices_whole(specs(shapes("gpt2"))))                # 4 in each block
    48

    Source: torch.optim.Muon's advice: hidden layers; AdamW for embeddings, head, norms and biases.
    """
    units = blocks(params)[1:]
    hidden = {number for unit in units for number in unit if len(params[number].shape) == 2}
    return [
        param._replace(whole=number in hidden, group=int(number in hidden))
        for number, param in enumerate(params)
    ]


# ------------------------------------------------------------------------------------- a module at hand


def from_module(module: Any) -> list[ParamSpec]:
    """The parameters of a module, with their dtype, device, name and `requires_grad`.

    Any object with torch's `named_parameters()` will do, so torch is not imported here. A module built under
    `torch.device("meta")` has shapes but takes no memory: a model too large for this machine can be planned.

    >>> import torch
    >>> from_module(torch.nn.Linear(3, 2, device="meta", dtype=torch.bfloat16))[0]
    ParamSpec(numel=6, dtype='bfloat16', device='meta', group=0, trainable=True, name='weight', shape=(2, 3),
     whole=False)
    """
    return [
        ParamSpec(
            numel=param.numel(),
            dtype=str(param.dtype).removeprefix("torch."),
            device=str(param.device),
            trainable=param.requires_grad,
            name=name,
            shape=tuple(param.shape),
        )
        for name, param in module.named_parameters()
    ]


def ready_order(module: Any, backward: Callable[[], object]) -> list[int]:
    """The order in which a backward pass completes the gradients: what DDP sorts its buckets by.

    Nearly the reverse of registration, but not quite. A linear layer's bias comes before its weight, which
    is the reverse; a normalisation or convolution hands out both at once, weight first, which is not. A tied
    weight is complete at its last use on the way back, so an embedding that is also the head comes last.

    Args:
        module: anything with torch's `named_parameters()`.
        backward: runs forward and backward once, on any input. It leaves gradients behind: clear them.
    Returns:
        Positions in `named_parameters()`; parameters that got no gradient are absent.
    """
    order: list[int] = []

    def note(index: int) -> Callable[[Any], None]:
        return lambda param: order.append(index)

    hooks = [
        param.register_post_accumulate_grad_hook(note(index))
        for index, (_, param) in enumerate(module.named_parameters())
        if param.requires_grad
    ]
    try:
        backward()
    finally:
        for hook in hooks:
            hook.remove()
    return order
