"""Bytes that kernels read and write beside matrix products, and what backward computes again, as tables.

`kernels` multiplies these with the sizes of a model's layers.
"""

from __future__ import annotations

from typing import NamedTuple

from zero_ref.simulator._checks import check_name


class Recomputed(NamedTuple):
    """The shares of the blocks' forward that backward computes again.

    Args:
        blocks: how many of the blocks.
        products: of their matrix products, beside the last one of each, whose result nothing waits for.
        attention, touched: of fused attention, and of everything else.
        scores: of unfused attention.
    """

    blocks: float
    products: float
    attention: float
    touched: float
    scores: float


RECOMPUTED: dict[str, Recomputed] = {
    "none": Recomputed(0, 0, 0, 0, 0),
    "selective": Recomputed(1, 0, 0, 0, 1),
    "full": Recomputed(1, 1, 1, 1, 1),
    "by-operation": Recomputed(1, 0.5, 0, 1, 1),
    "every-other-block": Recomputed(0.5, 1, 1, 1, 1),
}
"""By the names of `activations.CHECKPOINTING`. Fused attention computes its scores again in any case, which
BACKWARD_OF_FLASH counts.

Source: Korthikanti et al. (arXiv:2205.05198), section 5, for "selective": both products of attention are made
again. torch.utils.checkpoint stops as soon as it has computed all that was saved (`early_stop`), and
backward needs no result of a block's last product, where no dropout follows. By operation, torchtitan keeps
attention's result and every second product's.
"""

BACKWARD_OF_FLASH = 2.5
"""Backward of flash attention makes five products where forward makes two.
Source: FlashAttention-2 (arXiv:2307.08691), section 4.1."""


CAST = 6
"""Bytes that a cast between 32 and 16 bits reads and writes for each element."""


class Touched(NamedTuple):
    """Bytes that kernels limited by memory read and write for each token."""

    forward: float
    backward: float


class Costs(NamedTuple):
    """Bytes that such kernels read and write for each element, of 2 bytes: (forward, backward).

    Args:
        layer_norm, rms_norm, add, dropout: of the hidden state.
        again: of the hidden state, for each product beyond the first that a norm's result goes into.
        bias: of a linear layer's result, where it has a bias.
        layout: of attention's result, whose heads are brought together.
        rotary: of queries and keys.
        activation, gate: of the width of the MLP, without a gate and with one.
        scores: of unfused attention, of every score and head.
        logits: of an entry of the vocabulary.
    """

    layer_norm: tuple[float, float]
    rms_norm: tuple[float, float]
    add: tuple[float, float]
    dropout: tuple[float, float]
    again: tuple[float, float]
    bias: tuple[float, float]
    layout: tuple[float, float]
    rotary: tuple[float, float]
    activation: tuple[float, float]
    gate: tuple[float, float]
    scores: tuple[float, float]
    logits: tuple[float, float]


EAGER = Costs(
    layer_norm=(4, 6),  # one kernel: reads and writes; backward reads two
    rms_norm=(36, 72),  # to 32 bits, squared, averaged, multiplied, and back, kernel by kernel
    add=(6, 6),  # in backward, gradients of a value that was used twice are added
    dropout=(5, 5),  # with a byte for the mask
    again=(0, 6),  # gradients are added; of queries, keys and values in one matrix, put together
    bias=(0, 2),  # its gradient is a sum of the result's
    layout=(4, 4),
    rotary=(20, 20),  # to 32 bits, multiplied, and back
    activation=(4, 6),
    gate=(10, 18),  # a function, then a product
    scores=(13, 15),  # masked (4), softmax (4), dropout (5); and back (5, 6, 4)
    logits=(18, 18),  # to 32 bits (6), softmax (12); a gradient in 32 bits (12), and back (6)
)
"""As PyTorch runs kernels one by one, each reading and writing memory."""

COMPILED = Costs(
    layer_norm=(4, 6),
    rms_norm=(4, 6),
    add=(4, 2),  # in one kernel with the norm that follows
    dropout=(1, 1),  # likewise: only the mask comes on top
    again=(0, 2),
    bias=(0, 2),
    layout=(0, 0),
    rotary=(4, 4),
    activation=(4, 6),
    gate=(6, 10),
    scores=(5, 7),
    logits=(4, 4),  # read twice; read and written
)
"""As a compiler fuses them: neighbours read once and write once."""


VENDOR = EAGER._replace(
    rms_norm=(4, 6),
    rotary=(4, 4),
    gate=(6, 10),
)
"""As Megatron-LM and Transformer Engine run them: RMSNorm, rotary positions, and a gate with its product are
one kernel each, which reads and writes once.

Source: Megatron-LM's options `apply_rope_fusion` and `bias_activation_fusion`; Transformer Engine's RMSNorm.
"""


def recomputed(checkpointing: str) -> Recomputed:
    """The shares of a block's forward that backward computes again.

    Raises:
        ValueError: the name is unknown.
    """
    check_name("checkpointing", checkpointing, RECOMPUTED)
    return RECOMPUTED[checkpointing]
