"""Values that separate operations keep where a fused kernel keeps less: norms, repeated heads."""

from __future__ import annotations

from zero_ref.simulator.layers import Kept, Layer

NORMS: dict[str, str] = {
    "fused": "one kernel, which keeps its input",
    "by-hand": "separate operations in float32, as in transformers, which keep the input in float32 and the "
    "normed values",
    "composite": "the same with the weight in float32, as torch.nn.RMSNorm before torch 2.9",
}
"""Ways to compute an RMSNorm. A LayerNorm is one kernel in every version of torch."""

BESIDE = {"fused": 0, "by-hand": 4, "composite": 6}
"""Bytes for each element of a 16-bit norm beside the 2 of its input, which the fused kernel keeps. By hand
4 + 2 are kept in place of 2: the input in float32, and the normed values before the weight in 16 bits;
composite 4 + 4."""


def beside_of_element(norms: str, itemsize: int) -> int:
    """Bytes that an RMSNorm keeps for each element beside those of a fused kernel.

    >>> [beside_of_element(norms, 2) for norms in NORMS], [beside_of_element(norms, 4) for norms in NORMS]
    ([0, 4, 6], [0, 4, 4])

    Args:
        norms: one of NORMS.
        itemsize: bytes of an element of the model's dtype. In float32 the input is its own copy.
    """
    return BESIDE[norms] if itemsize == 2 else min(4, BESIDE[norms])


def kept_beside(
    layer: Layer,
    norms: str,
    repeated_kv: bool,
    itemsize: int = 2,
    *,
    silu_by_hand: bool = False,
    exponentials: int = 0,
) -> list[Kept]:
    """Return the values that autograd keeps beside `activations.kept_of_block`, if nothing is computed again.

    >>> from zero_ref.simulator.models import TRANSFORMERS
    >>> (layer,) = TRANSFORMERS["llama3-8b"].layers
    >>> for one in kept_beside(layer, "by-hand", True):
    ...     print(one)
    Kept(name='norms in float32', numel=8192, role='pointwise', nbytes=4)
    Kept(name='key and value for each query head', numel=6144, role='pointwise', nbytes=0)

    Args:
        norms: one of NORMS.
        repeated_kv: keys and values are copied for every query head before attention.
        itemsize: bytes of an element of the model's dtype.
        silu_by_hand: the SiLU of a gated MLP is x * sigmoid(x).
        exponentials: of scores, which a softmax by hand keeps beside its result: tokens of a sequence.
    Source: what autograd saves in such operations (tests/simulator/test_norms.py).
    """
    kept = []
    nbytes = beside_of_element(norms, itemsize)
    if nbytes and not layer.layer_norms:
        kept.append(Kept("norms in float32", _normed(layer), "pointwise", nbytes))
    more = layer.heads * (layer.head_width + layer.value_width)
    more -= layer.key_value_heads * (layer.head_width + layer.value_width)
    if repeated_kv and layer.mixed is None and more:
        kept.append(Kept("key and value for each query head", more, "pointwise"))
    if silu_by_hand and layer.kind.gated and layer.mlp is None:
        kept.append(Kept("sigmoid", layer.hidden, "pointwise"))
    if exponentials and layer.heads:
        kept.append(Kept("exponentials of scores", layer.heads * exponentials, "scores"))
    return kept


def _normed(layer: Layer) -> int:
    """Elements that the block's norms are given, for each token."""
    kind, attended = layer.kind, bool(layer.attended)
    parts = attended + layer.has_mlp  # each may have a norm before it, and one after it
    norms = min(kind.pre_norms, parts) + (parts if kind.post_norms else 0)
    of_heads = (layer.heads + layer.key_value_heads) * layer.head_width
    return layer.width * norms + (of_heads if kind.qk_norms and attended else 0)
