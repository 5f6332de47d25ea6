"""Activations: what the forward pass keeps for the backward pass, by the published formula.

ZeRO does not shard activations. They grow with the tokens that a rank computes in one go, whatever the number
of ranks, so a rank that holds little of the model may still run out of memory.
"""

from __future__ import annotations

from zero_ref.simulator._checks import check_name
from zero_ref.simulator.models import Transformer

CHECKPOINTING: dict[str, str] = {
    "none": "everything is kept",
    "selective": "attention scores are computed again, the rest is kept; flash attention keeps as much",
    "full": "only each block's input is kept; a block is computed again when backward comes to it",
}


def activation_bytes(
    architecture: Transformer,
    batch: int,
    sequence: int | None = None,
    checkpointing: str = "none",
    *,
    flash_attention: bool = False,
) -> int:
    """Bytes of 16-bit activations of all blocks at the peak, which is when backward begins.

    With s tokens in a sequence, b sequences, h the width and a heads, a block keeps s*b*h*(34 + 5*a*s/h)
    bytes. The second term is the attention scores, s*s for each head, of 5 bytes each: 2 before and 2 after
    dropout, and 1 for its mask. Checkpointing keeps less, and computes the rest again.

    >>> from zero_ref.simulator.models import TRANSFORMERS
    >>> [activation_bytes(TRANSFORMERS["gpt2"], 8, checkpointing=way) // 10**6 for way in CHECKPOINTING]
    [8606, 2566, 855]

    Args:
        architecture: a preset's, or from `models.from_config`. The formula is for a GPT block with dropout,
            biases and an MLP four times as wide. For Llama it is an estimate.
        batch: sequences that one rank computes in one go (a micro-batch).
        sequence: tokens in each sequence, which may be more than the model has positions; None for as many.
        checkpointing: one of CHECKPOINTING. "full" counts 2*s*b*h for the input of each block, as the paper
            does, and one block's other activations, which exist while the block is computed again.
        flash_attention: scores are never stored, not even in the block that is computed again.
    Raises:
        ValueError: `checkpointing` is unknown, or there is no sequence or no token.
    Source: Korthikanti et al. (arXiv:2205.05198), equation 1 and section 5, without tensor parallelism. Equal
        to what autograd saves in such a block, except for the statistics of its two norms
        (tests/test_activations.py).
    """
    check_name("checkpointing", checkpointing, CHECKPOINTING)
    sequence = _tokens_of_sequence(architecture, batch, sequence)
    stored_scores = 0 if flash_attention or checkpointing == "selective" else sequence
    input_of_block = 2 * sequence * batch * architecture.width
    block = sequence * batch * (34 * architecture.width + 5 * architecture.heads * stored_scores)
    if checkpointing == "full":
        return architecture.depth * input_of_block + (block - input_of_block)
    return architecture.depth * block


def head_bytes(architecture: Transformer, batch: int, sequence: int | None = None) -> int:
    """Bytes of the activations outside the blocks: embedding dropout, last norm, output head and loss.

    Most of these bytes are the logits: for each token, 4 bytes for each entry of the vocabulary. The blocks
    of a large model keep far more; those of a small one may not.

    >>> from zero_ref.simulator.models import TRANSFORMERS
    >>> gpt2 = TRANSFORMERS["gpt2"]
    >>> round(head_bytes(gpt2, batch=8) / activation_bytes(gpt2, 8, checkpointing="selective"), 2)
    0.65

    Args: as `activation_bytes`.
    Raises:
        ValueError: as `activation_bytes`.
    Source: Korthikanti et al. (arXiv:2205.05198), section 4.3: s*b*h for the dropout mask, 2*s*b*h for the
        input of the norm and of the head each, 4*s*b*v for fp32 logits.
    """
    sequence = _tokens_of_sequence(architecture, batch, sequence)
    return sequence * batch * (5 * architecture.width + 4 * architecture.vocabulary)


def _tokens_of_sequence(architecture: Transformer, batch: int, sequence: int | None) -> int:
    if batch < 1:
        raise ValueError(f"a batch has at least 1 sequence, got {batch}.")
    if sequence is None:
        return architecture.positions
    if sequence < 1:
        raise ValueError(f"a sequence has at least 1 token, got {sequence}.")
    return sequence
