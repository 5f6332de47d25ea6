"""Autocast over 32-bit parameters, as torch.autocast: what of a block is cast, and what autograd then keeps.

Products are computed in 16 bits, norms and the residual stream in 32. Each weight is cast once in a forward,
and autograd keeps the cast copy for backward. A norm's result is cast anew for each product that it goes
into, and each of these copies is kept.

torch.autocast itself keeps the cast weights until its block of code ends, even those of blocks that are
checkpointed. No stage of ZeRO divides or frees these copies.
"""

from __future__ import annotations

from collections.abc import Iterable

from zero_ref.simulator.layers import Kept, Layer

AUTOCAST = ("bfloat16", "float16")
"""The dtypes to which operands are cast. Of float16 the losses' scale is not simulated."""

IN_32_BITS = ("query and key before the norm", "out", "down")
"""Results of products that a norm casts to 32 bits, and keeps so.

Source: ATen/autocast_mode.h of torch, where `layer_norm` and `rms_norm` run in float32 on GPUs."""


def reads_of_norms(layer: Layer, compiled: bool = False) -> dict[str, int]:
    """Return the number of cast copies of each result of a block's norms, by the name of its `Kept`.

    Queries, keys and values may be one product. A compiler casts once.
    """
    kind = layer.kind
    return {
        "normed": 1 if kind.fused_qkv or compiled else 3,
        "normed for the MLP": 1 if compiled else 1 + kind.gated,
    }


def kept_under_autocast(layer: Layer, kept: Iterable[Kept], *, compiled: bool = False) -> list[Kept]:
    """Return the values that autograd keeps of a block under autocast, from those that it keeps without.

    >>> from zero_ref.simulator.layers import BlockKind, alike
    >>> block = alike(16, 1, BlockKind(), 32, 2, 2, 8)
    >>> for one in kept_under_autocast(block, [Kept("input", 16, "input"), Kept("normed", 16, "operand")]):
    ...     print(one)
    Kept(name='input', numel=16, role='input', nbytes=4)
    Kept(name='normed', numel=48, role='operand', nbytes=0)

    Mixers and experts that have tables of their own keep one copy.

    Args:
        compiled: the block is.
    """
    reads = reads_of_norms(layer, compiled)
    if layer.mixed is not None:
        reads["normed"] = 1
    if layer.mlp is not None:
        reads["normed for the MLP"] = 1
    return [
        one._replace(nbytes=4)
        if one.role in ("input", "stream") or one.name in IN_32_BITS
        else one._replace(numel=one.numel * reads.get(one.name, 1))
        for one in kept
    ]


def cast_weights(layer: Layer) -> int:
    """Elements of a block's weights that are cast. Biases, which autograd does not keep, are not counted.

    >>> from zero_ref.simulator.models import TRANSFORMERS
    >>> (block,) = TRANSFORMERS["gpt2"].layers
    >>> cast_weights(block) == 12 * 768 * 768
    True
    """
    return sum(one.inputs * one.outputs * one.copies for one in layer.products)
