"""Activations: what the forward pass keeps for the backward pass, tensor by tensor.

ZeRO does not shard activations. They grow with the tokens that a rank computes in one go, whatever the number
of ranks, so a rank that holds little of the model may still run out of memory.

A GPT's are counted as published (Korthikanti et al., arXiv:2205.05198): dropout, biases, an MLP four times as
wide. Those of other models are what autograd saves in their blocks (tests/simulator/test_activations.py);
of a traced one, what it saved. Of experts, each is given as many tokens as any other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from zero_ref.simulator._checks import check_name
from zero_ref.simulator.architectures import Transformer
from zero_ref.simulator.autocast import cast_weights, kept_under_autocast
from zero_ref.simulator.layers import Kept, Layer, Matrix
from zero_ref.simulator.lora import Lora
from zero_ref.simulator.norms import NORMS, beside_of_element, kept_beside
from zero_ref.simulator.traced import Traced, TracedLayer

CHECKPOINTING: dict[str, str] = {
    "none": "nothing is computed again",
    "selective": "attention is computed again, which keeps less where it is unfused",
    "every-other-block": "every other block keeps its input only, the others everything",
    "by-operation": "results of attention and every other matrix product are kept, the rest computed again",
    "full": "only each block's input is kept; a block is computed again when backward comes to it",
}

OF_THE_PAPER = ("none", "selective", "full")
"""Kinds of checkpointing that Korthikanti et al. name. The two others are torchtitan's."""

ATTENTION: dict[str, str] = {
    "fused": "one kernel, as flash attention: no score reaches memory",
    "unfused": "scores are stored, and kept for backward unless they are computed again",
    "by-hand": "the same with a softmax of separate operations, which keeps their exponentials too",
}
"""Kinds of attention. Backward of a fused kernel computes scores again, whatever is checkpointed."""


def kinds_apart(attention: str) -> tuple[str, ...]:
    """The kinds of checkpointing that differ: with fused attention "selective" keeps as much as "none".

    >>> kinds_apart("fused")
    ('none', 'every-other-block', 'by-operation', 'full')
    """
    return tuple(kind for kind in CHECKPOINTING if kind != "selective" or attention != "fused")


def matrices(layer: Transformer | Layer) -> list[Matrix]:
    """The weights of a block's products, in the order of forward.

    >>> from zero_ref.simulator.models import TRANSFORMERS
    >>> [(one.name, one.outputs) for one in matrices(TRANSFORMERS["llama3-8b"])]
    [('query', 4096), ('key', 1024), ('value', 1024), ('out', 4096), ('gate', 14336), ('up', 14336),
     ('down', 4096)]

    Of a mixture the order is that of registration, and experts that not all tokens go to are left out.
    """
    if not isinstance(layer, Layer) and len(layer.layers) == 1:
        (layer,) = layer.layers
    if isinstance(layer, Layer) and not (layer.mixed is None and layer.mlp is None and layer.has_mlp):
        return [one for one in layer.products if one.copies == 1]
    width, hidden, kind = layer.width, layer.hidden, layer.kind
    query, key = _heads_widths(layer)
    attention = [("query, key, value", query + 2 * key)]
    if not kind.fused_qkv:
        attention = [("query", query), ("key", key), ("value", key)]
    inside = [("gate", hidden)] * kind.gated + [("up", hidden)]
    return [
        *(Matrix(name, width, outputs) for name, outputs in attention),
        Matrix("out", query, width),
        *(Matrix(name, width, outputs) for name, outputs in inside),
        Matrix("down", hidden, width),
    ]


def _heads_widths(layer: Transformer | Layer) -> tuple[int, int]:
    """The width of all query heads together, and of all key heads."""
    return layer.heads * layer.head_width, layer.key_value_heads * layer.head_width


def kept_of_block(layer: Transformer | Layer, sequence: int, attention: str = "fused") -> list[Kept]:
    """Return the values that autograd keeps of one block for each token, if nothing is computed again.

    >>> from zero_ref.simulator.models import TRANSFORMERS
    >>> kept = kept_of_block(TRANSFORMERS["llama3-8b"], 8192)
    >>> sum(one.numel * (one.nbytes or 2) for one in kept)
    168072

    Args:
        layer: of a model; or a model whose blocks are alike.
        sequence: tokens in a sequence, which scores are as wide as.
        attention: one of ATTENTION. Where it is fused, a statistic of each head is kept, and no scores.
    """
    if not isinstance(layer, Layer):
        (layer,) = layer.layers
    width, kind = layer.width, layer.kind
    kept = [Kept("input", width, "input")]
    if layer.attended:
        kept += _kept_of_mixer(layer, sequence, attention)
    if layer.attended and layer.has_mlp:
        kept.append(Kept("stream", width, "stream"))
    if layer.has_mlp:
        kept += _kept_of_mlp(layer)
    if kind.dropout:
        kept = [one for one in kept if one.role != "statistics"]  # the published formula leaves them out
    return kept


def _kept_of_mixer(layer: Layer, sequence: int, attention: str) -> list[Kept]:
    """From the first norm to the sum with the stream."""
    width, kind, heads = layer.width, layer.kind, layer.heads
    query, key = _heads_widths(layer)
    kept: list[Kept] = []
    if kind.pre_norms:
        kept += [Kept("normed", width, "operand"), Kept("norm", 1, "statistics", 4)]
    if layer.mixed is not None:
        kept += layer.mixed
    else:
        if kind.qk_norms:
            kept += [
                Kept("query and key before the norm", query + key, "product"),
                Kept("norms of heads", heads + layer.key_value_heads, "statistics", 4),
            ]
        kept += [Kept("query", query, "product"), Kept("key", key, "product"), Kept("value", key, "product")]
    if heads and attention == "fused":
        kept.append(Kept("attention", heads, "statistics", 4))
    elif kind.dropout:
        kept.append(Kept("scores, before dropout and after, and mask", 5 * heads * sequence, "scores", 1))
    elif heads:
        kept.append(Kept("scores", heads * sequence, "scores"))
        kept.append(Kept("key and value for each head", 2 * (query - key), "scores"))
    kept.append(Kept("attended", layer.attended, "attention"))
    kept += layer.after
    if kind.dropout:
        kept.append(Kept("dropout of attention", width, "mask", 1))
    if kind.post_norms:
        kept += [Kept("out", width, "product"), Kept("norm of out", 1, "statistics", 4)]
    return kept


def _kept_of_mlp(layer: Layer) -> list[Kept]:
    """From its norm to the sum with the stream."""
    width, hidden, kind = layer.width, layer.hidden, layer.kind
    kept: list[Kept] = []
    if kind.pre_norms == 2 or (kind.pre_norms and not layer.attended):
        kept += [Kept("normed for the MLP", width, "operand"), Kept("norm", 1, "statistics", 4)]
    if layer.mlp is not None:
        kept += layer.mlp
    else:
        kept += [Kept("gate", hidden, "product")] * kind.gated
        kept += [Kept("up", hidden, "product")]
        kept += [Kept("activation", hidden, "pointwise" if kind.gated else "operand")]
        kept += [Kept("gated", hidden, "operand")] * kind.gated
    if kind.post_norms:
        kept += [Kept("down", width, "product"), Kept("norm of down", 1, "statistics", 4)]
    if kind.dropout:
        kept.append(Kept("dropout of the MLP", width, "mask", 1))
    return kept


@dataclass(frozen=True)
class Activations:
    """Bytes of one rank's activations, at the moments that matter.

    Args:
        blocks: what all blocks keep from their forward to their backward.
        head: what is kept outside of them: last norm, output head, loss.
        loss: more, while the loss's backward lasts: two gradients in float32 of all logits, beside which the
            logits that forward makes are less.
        again: more, while backward is in a block: what is computed again.
        gradients: likewise the gradients of activations, about: those of the stream, and in the MLP those for
            which nothing has been freed yet.
        cached: more at the end of forward: copies of weights that autocast keeps until then, and that are not
            among what is kept for backward.
    """

    blocks: int = 0
    head: int = 0
    loss: int = 0
    again: int = 0
    gradients: int = 0
    cached: int = 0

    @property
    def kept(self) -> int:
        """Bytes of activations that are there when backward begins."""
        return self.blocks + self.head


def activations(
    architecture: Transformer | Traced,
    batch: int,
    sequence: int | None = None,
    checkpointing: str = "none",
    *,
    attention: str = "fused",
    itemsize: int = 2,
    compiled: bool = False,
    fused_loss: bool = False,
    loss_itemsize: int = 4,
    autocast: bool = False,
    lora: Lora | None = None,
    norms: str = "fused",
    repeated_kv: bool = False,
    silu_by_hand: bool = False,
) -> Activations:
    """A rank's activations under a kind of checkpointing.

    With s tokens in a sequence, b sequences, h the width and a heads, a block of a GPT keeps s*b*h*34 bytes
    if its attention is fused, and s*b*h*(34 + 5*a*s/h) if not. The second term is the attention scores, s*s
    for each head, of 5 bytes each: 2 before and 2 after dropout, and 1 for its mask. Checkpointing keeps
    less, and computes the rest again.

    >>> from zero_ref.simulator.models import TRANSFORMERS
    >>> found = activations(TRANSFORMERS["llama3-8b"], 2, 8192, "by-operation")
    >>> [round(nbytes / 1e9, 1) for nbytes in (found.blocks, found.head, found.loss, found.again)]
    [33.4, 8.7, 16.8, 1.7]

    Args:
        architecture: a preset's, from `models.from_config`, or traced.
        batch: sequences that one rank computes in one go (a micro-batch).
        sequence: tokens in each sequence, which may be more than the model has positions; None for as many.
        checkpointing: one of CHECKPOINTING. "every-other-block" and "by-operation" are torchtitan's.
        attention: one of ATTENTION. Where it is fused, scores are not even stored in a block that is computed
            again.
        itemsize: bytes of an element of the model's dtype.
        compiled: blocks are, by torch.compile. What no matrix product reads is computed again in the kernels
            that read it; and what backward does not read is not kept.
        fused_loss: the loss keeps the logits and no log-probabilities. Otherwise the logits are copied to
            float32 for it: 10 bytes each at the end of a 16-bit forward, and 12 in backward.
        loss_itemsize: bytes of an element in the loss, which is computed in float32 unless a program gives
            cross-entropy its 16-bit logits: then each keeps 2 bytes, and 6 are there in backward.
        autocast: parameters are in 32 bits and cast for each product, as `autocast` says; `itemsize` is that
            of the products.
        lora: only adapters are trained. The first block is counted as the others, though its first norm keeps
            nothing if the embedding is frozen.
        norms: how RMSNorms are computed: one of `norms.NORMS`. Compiled, all keep as much as fused ones.
        repeated_kv: keys and values are copied for every query head before fused attention, as before torch
            had grouped heads there. Unfused attention always needs the copies.
        silu_by_hand: the SiLU of a gated MLP is x * sigmoid(x), which keeps the sigmoid too.
    Raises:
        ValueError: `checkpointing`, `attention` or `norms` is unknown, or there is no sequence or no token.
    Source: Korthikanti et al. (arXiv:2205.05198), equation 1 and sections 4.3 and 5; torchtitan's
        torchtitan/distributed/activation_checkpoint.py for what its two keep. Equal to what autograd saves
        (tests/simulator/test_activations.py).
    """
    check_name("checkpointing", checkpointing, CHECKPOINTING)
    check_name("attention", attention, ATTENTION)
    check_name("norms", norms, NORMS)
    sequence = _tokens_of_sequence(architecture, batch, sequence)
    options = _BlockOptions(
        sequence,
        batch,
        attention,
        itemsize,
        compiled,
        autocast,
        norms,
        repeated_kv,
        silu_by_hand,
        lora,
    )

    if isinstance(architecture, Traced):
        blocks, outside = _traced(architecture, options, fused_loss=fused_loss)
    else:
        blocks = [_tabled(layer, options) for layer in architecture.layers]
        outside = _outside(architecture, options, fused_loss=fused_loss, loss_itemsize=loss_itemsize)
    depth = architecture.depth
    kept = sum(one.number * one.kept_under(checkpointing) for one in blocks)
    again = max([0, *(one.whole - one.kept_under(checkpointing) for one in blocks)])
    shrunk = depth if checkpointing in ("full", "by-operation") else 0
    if checkpointing == "every-other-block":
        # Of unlike blocks, every other one is on average.
        shrunk = depth // 2
        kept -= (kept - sum(one.number * one.input for one in blocks)) * shrunk // max(1, depth)
        again = max(one.whole - one.input for one in blocks) if shrunk else 0
    return Activations(
        kept,
        head=outside.kept,
        loss=outside.loss,
        again=again,
        gradients=max((one.gradients for one in blocks), default=0),
        cached=sum(one.number * one.casts for one in blocks) * shrunk // max(1, depth),
    )


class _Outside(NamedTuple):
    """Bytes of what is outside of the blocks: kept, and more while the loss's backward lasts."""

    kept: int
    loss: int


def _outside(
    architecture: Transformer, options: _BlockOptions, *, fused_loss: bool, loss_itemsize: int
) -> _Outside:
    """Count the last norm, the output head and the loss."""
    width, layers, outputs = architecture.width, architecture.layers, architecture.vocabulary
    dropout = any(layer.kind.dropout for layer in layers)
    # A norm's input, and its result where the head is trained; a mask of the embedding's, or a statistic.
    of_norm = width * (options.of_stream + options.itemsize * (options.lora is None))
    of_norm += width if dropout else 4
    if not all(layer.layer_norms for layer in layers):  # the last norm is in no block, and not compiled
        of_norm += width * beside_of_element(options.norms, options.of_stream)
    of_logit, in_loss = (options.itemsize,) * 2 if fused_loss else (loss_itemsize, 2 * loss_itemsize)
    kept = options.tokens * (of_norm + of_logit * outputs) + options.casts(width * outputs)
    return _Outside(kept, options.tokens * in_loss * outputs)


class _Block(NamedTuple):
    """Bytes of one kind of block, of which a model has `number`.

    Args:
        whole: kept, if nothing is computed again.
        without_scores, by_operation: kept under these kinds of checkpointing.
        input: of its input.
        gradients: of activations, in its backward.
        casts: of its weights' cast copies.
    """

    number: int
    whole: int
    without_scores: int
    by_operation: int
    input: int
    gradients: int
    casts: int = 0

    def kept_under(self, checkpointing: str) -> int:
        """Bytes that are kept; of every other block, of those that keep everything."""
        return {"selective": self.without_scores, "by-operation": self.by_operation, "full": self.input}.get(
            checkpointing, self.whole
        )


def _tabled(layer: Layer, options: _BlockOptions) -> _Block:
    """Count a block whose layers are spelled out."""
    # Of experts that not all tokens go to, gradients of all rows, brought there and back.
    inside = (1 + layer.kind.gated) * layer.hidden + layer.moved
    return _Block(
        layer.number,
        _kept_bytes(layer, options),
        _kept_bytes(layer, options, "scores"),
        _kept_by_operation(layer, options),
        options.tokens * layer.width * options.of_stream,
        options.tokens * (2 * layer.width * options.of_stream + inside * options.itemsize),
        options.casts(cast_weights(layer)),
    )


def _traced(model: Traced, options: _BlockOptions, *, fused_loss: bool) -> tuple[list[_Block], _Outside]:
    """Count the blocks of a traced model, and what is outside of them."""
    at, compiled = (options.batch, options.sequence), options.compiled

    def kept(layer: TracedLayer, *left_out: str) -> int:
        numel_of_token = (
            one.numel * one.nbytes
            for one in layer.kept_at(*at)
            if one.role not in left_out and not (compiled and one.role == "pointwise")
        )
        return round(options.tokens * sum(numel_of_token) + compiled * layer.sources.at(*at))

    blocks = []
    for layer in model.layers:
        whole = kept(layer)
        sizes = (layer.by_operation, layer.input, layer.gradients)
        blocks.append(_Block(layer.number, whole, whole, *(round(one.at(*at)) for one in sizes)))
    outside = _Outside(kept(model.outside), round(model.outside.gradients.at(*at)))
    if fused_loss:
        logits = options.tokens * options.itemsize * model.outputs
        outside = _Outside(kept(model.outside, "logits") + logits, logits)
    return blocks, outside


class _BlockOptions(NamedTuple):
    """The arguments of `activations` that say how blocks are computed."""

    sequence: int
    batch: int
    attention: str
    itemsize: int
    compiled: bool
    autocast: bool
    norms: str
    repeated_kv: bool
    silu_by_hand: bool
    lora: Lora | None

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence

    @property
    def of_stream(self) -> int:
        """Bytes of an element of the residual stream."""
        return 4 if self.autocast else self.itemsize

    def casts(self, numel: int) -> int:
        """Bytes of the cast copies of weights, which a compiler makes again where they are read."""
        return numel * self.itemsize if self.autocast and not self.compiled else 0


def _kept_bytes(layer: Layer, options: _BlockOptions, *left_out: str) -> int:
    """Return the bytes that a block keeps if only the roles in `left_out` are computed again."""
    kept = kept_of_block(layer, options.sequence, options.attention)
    if options.lora is not None:
        adapted = sum(map(options.lora.adapts, matrices(layer)))
        kept = [*options.lora.kept(kept), Kept("results of A", adapted * options.lora.rank, "operand")]
    if options.autocast:
        kept = kept_under_autocast(layer, kept, compiled=options.compiled)
    kept += kept_beside(
        layer,
        options.norms,
        options.repeated_kv and options.attention == "fused",
        4 if options.autocast else options.itemsize,
        silu_by_hand=options.silu_by_hand,
        exponentials=options.sequence if options.attention == "by-hand" else 0,
    )
    of_token = sum(
        one.numel * (one.nbytes or options.itemsize)
        for one in kept
        if one.role not in left_out and not (options.compiled and one.role == "pointwise")
    )
    return int(options.tokens * of_token) + options.casts(cast_weights(layer))


def _kept_by_operation(layer: Layer, options: _BlockOptions) -> int:
    """The input of a block, attention's result and those of every other product, the first one included."""
    listed = matrices(layer)[::2]
    if options.compiled and not layer.kind.post_norms:
        listed = [one for one in listed if one.name != "down"]  # nothing in backward reads it
    of_input = layer.width * (4 if options.autocast else options.itemsize)
    numel = layer.attended + sum(one.outputs for one in listed)
    if options.lora is not None:  # whose products count too: of three, the first and the last, or the second
        adapted = [options.lora.adapts(one) for one in matrices(layer)]
        numel += sum(one.outputs for one, has in zip(matrices(layer)[::2], adapted[::2]) if has)
        numel += options.lora.rank * sum(adapted[1::2])
    of_results = numel * options.itemsize
    statistics = 4 * layer.heads if options.attention == "fused" else 0
    return options.sequence * options.batch * (of_input + of_results + statistics)


def activation_bytes(
    architecture: Transformer,
    batch: int,
    sequence: int | None = None,
    checkpointing: str = "none",
    *,
    attention: str = "fused",
) -> int:
    """Bytes of 16-bit activations of all blocks at the peak of the blocks, as published.

    >>> from zero_ref.simulator.models import TRANSFORMERS
    >>> gpt2 = TRANSFORMERS["gpt2"]
    >>> [activation_bytes(gpt2, 8, None, way, attention="unfused") // 10**6 for way in OF_THE_PAPER]
    [8606, 2566, 855]
    >>> activation_bytes(gpt2, 8) // 10**6
    2566

    Args: as `activations`. "full" counts 2*s*b*h for the input of each block, as the paper does, and one
        block's other activations, which exist while the block is computed again.
    Raises:
        ValueError: as `activations`.
    """
    found = activations(architecture, batch, sequence, checkpointing, attention=attention)
    return found.blocks + found.again if checkpointing == "full" else found.blocks


def head_bytes(architecture: Transformer, batch: int, sequence: int | None = None) -> int:
    """Bytes of 16-bit activations kept outside of the blocks: embedding dropout, last norm, head and loss.

    Most of these bytes are the logits: for each token, 4 bytes for each entry of the vocabulary. The blocks
    of a large model keep far more; those of a small one may not.

    >>> from zero_ref.simulator.models import TRANSFORMERS
    >>> gpt2 = TRANSFORMERS["gpt2"]
    >>> round(head_bytes(gpt2, batch=8) / activation_bytes(gpt2, 8), 2)
    0.65

    Args: as `activations`.
    Raises:
        ValueError: as `activations`.
    Source: Korthikanti et al. (arXiv:2205.05198), section 4.3: s*b*h for the dropout mask, 2*s*b*h for the
        input of the norm and of the head each, 4*s*b*v for fp32 logits. What autograd keeps in these four
        bytes is not the logit but its log-probability.
    """
    return activations(architecture, batch, sequence).head


def _tokens_of_sequence(architecture: Transformer | Traced, batch: int, sequence: int | None) -> int:
    if batch < 1:
        raise ValueError(f"a batch has at least 1 sequence, got {batch}.")
    if sequence is None:
        return architecture.positions
    if sequence < 1:
        raise ValueError(f"a sequence has at least 1 token, got {sequence}.")
    return sequence
