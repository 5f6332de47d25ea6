"""LoRA: the model is frozen, and beside some of its matrices two small ones are trained.

A weight W of (outputs, inputs) gets adapters A of (rank, inputs) and B of (outputs, rank), and computes
W x + B (A x). Frozen parameters have no gradients and no state. Backward still goes through all blocks, to
reach the adapters below. It makes no gradients of frozen weights, so the operands of products without
adapters are not kept.

Source: LoRA (arXiv:2106.09685), section 4.1. Adapters without dropout, in the parameters' dtype.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from zero_ref.simulator.layers import Kept, Matrix, ParamShape

LORA_ON: dict[str, str] = {
    "all-linear": "every matrix of a block",
    "attention": "the matrices of attention",
}
"""The weights that have adapters."""

OF_ATTENTION = ("query, key, value", "query", "key", "value", "out")
"""The matrices of attention, as `activations.matrices` calls them."""

OPERANDS_OF_MLP = ("normed for the MLP", "activation", "gated")
"""Values that an MLP keeps only for the gradients of its weights, by the names of `Kept`."""


class Lora(NamedTuple):
    """Adapters.

    Args:
        rank: rows of A, and columns of B.
        on: one of LORA_ON.
    """

    rank: int
    on: str = "all-linear"

    def adapts(self, matrix: Matrix) -> bool:
        """Whether a matrix of `activations.matrices` has adapters."""
        return self.on == "all-linear" or matrix.name in OF_ATTENTION

    def kept(self, kept: Iterable[Kept]) -> list[Kept]:
        """Return the values that autograd keeps of a block, from those that it keeps for all weights.

        The results of A come on top, see `activations`.
        """
        if self.on == "all-linear":
            return list(kept)
        return [one for one in kept if not (one.role == "operand" and one.name in OPERANDS_OF_MLP)]


def with_adapters(shapes: Iterable[ParamShape], lora: Lora) -> tuple[ParamShape, ...]:
    """A model's parameters with the adapters, each pair behind its weight.

    >>> weight = ParamShape("layers.0.self_attn.q_proj.weight", (8, 4))
    >>> for one in with_adapters([ParamShape("embed.weight", (9, 4)), weight], Lora(2)):
    ...     print(*one)
    embed.weight (9, 4)
    layers.0.self_attn.q_proj.weight (8, 4)
    layers.0.self_attn.q_proj.lora_A.weight (2, 4)
    layers.0.self_attn.q_proj.lora_B.weight (8, 2)
    """
    found: list[ParamShape] = []
    for name, shape in shapes:
        found.append(ParamShape(name, shape))
        in_block = any(part.isdecimal() for part in name.split("."))
        if in_block and len(shape) == 2 and (lora.on == "all-linear" or "att" in name):
            stem = name.removesuffix(".weight")
            found.append(ParamShape(f"{stem}.lora_A.weight", (lora.rank, shape[1])))
            found.append(ParamShape(f"{stem}.lora_B.weight", (shape[0], lora.rank)))
    return tuple(found)


def is_adapter(name: str) -> bool:
    """Whether a parameter is one of `with_adapters`.

    >>> is_adapter("h.0.attn.c_attn.lora_A.weight"), is_adapter("h.0.attn.c_attn.weight")
    (True, False)
    """
    return ".lora_A." in name or ".lora_B." in name
