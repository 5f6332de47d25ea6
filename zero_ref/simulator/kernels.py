"""The computations of a transformer for a micro-batch: matrix products, attention, passes over memory.

`price` asks a device how long these take, and gives the time to the operations of a schedule. A matrix
product is limited by arithmetic, a norm or an activation function by what it reads and writes. So a share of
the peak that holds for one of them does not hold for a whole model: it depends on the width, the vocabulary
and the length of the sequences.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from zero_ref.simulator._checks import check_name
from zero_ref.simulator.activations import ATTENTION, matrices as matrices_of
from zero_ref.simulator.architectures import Transformer
from zero_ref.simulator.autocast import cast_weights, reads_of_norms
from zero_ref.simulator.costs import (
    BACKWARD_OF_FLASH,
    CAST,
    COMPILED,
    EAGER,
    VENDOR,
    Costs,
    Touched,
    recomputed,
)
from zero_ref.simulator.device import Device
from zero_ref.simulator.layers import Layer, Matrix
from zero_ref.simulator.lora import Lora, with_adapters
from zero_ref.simulator.traced import Traced, TracedPass, TracedProduct


class Product(NamedTuple):
    """A matrix product that is made `times` times: (m, k) times (k, n).

    >>> one = Product(8192, 4096, 14336)
    >>> one.flops / 1e9, one.nbytes(itemsize=2) / 1e6
    (962.072674304, 419.4304)

    Args:
        fp8: both matrices are of 8 bits, and the result is not.
    """

    m: float
    k: float
    n: float
    times: float = 1.0
    fp8: bool = False

    @property
    def flops(self) -> float:
        """A multiplication and an addition each."""
        return 2.0 * self.m * self.k * self.n * self.times

    def nbytes(self, itemsize: int) -> float:
        """Read and written at the least: both matrices and the result, once."""
        operands = (1 if self.fp8 else itemsize) * (self.m * self.k + self.k * self.n)
        return float(operands + itemsize * self.m * self.n) * self.times


@dataclass(frozen=True)
class Pass:
    """The work of forward or backward of the whole model.

    Args:
        products: of weights. Their gradients are products of the same three lengths, in another order, which
            take as long.
        attention_flops: of the two products over the sequence, where no score reaches memory.
        touched_bytes: read and written by everything else.
        itemsize: bytes of an element of the matrices.
    """

    products: tuple[Product, ...]
    attention_flops: float
    touched_bytes: float
    itemsize: int = 2

    @property
    def flops(self) -> float:
        """The floating-point operations of products and attention."""
        return sum(one.flops for one in self.products) + self.attention_flops

    def ms(self, device: Device) -> float:
        """The milliseconds that a device takes, one kernel after another.

        >>> from zero_ref.simulator.cluster import cluster
        >>> a_product = Pass((Product(8192, 4096, 14336),), attention_flops=0, touched_bytes=0)
        >>> a_norm = Pass((), attention_flops=0, touched_bytes=36 * 8192 * 4096)
        >>> h100 = cluster("h100-ib").device
        >>> round(a_product.ms(h100), 2), round(a_norm.ms(h100), 2)
        (1.84, 0.42)
        """
        return sum(self.parts_ms(device).values())

    def parts_ms(self, device: Device) -> dict[str, float]:
        """The same, by what limits the kernels."""
        in_8_bits = device.in_dtype("fp8")
        products = (
            (in_8_bits if one.fp8 else device).product_ms(one.flops, one.nbytes(self.itemsize))
            for one in self.products
        )
        return {
            "matrix products": sum(products),
            "attention": device.attention_ms(self.attention_flops),
            "memory": device.touch_ms(self.touched_bytes),
        }

    def times(self, share: float, *, attention: float | None = None, touched: float | None = None) -> Pass:
        """So many times the kernels; other shares of attention and of what is touched if they are given."""
        return Pass(
            tuple(one._replace(times=one.times * share) for one in self.products if share),
            self.attention_flops * (share if attention is None else attention),
            self.touched_bytes * (share if touched is None else touched),
            self.itemsize,
        )

    def touching(self, nbytes: float) -> Pass:
        """The same, with so many bytes more."""
        return self.plus(Pass((), 0.0, nbytes, self.itemsize))

    def plus(self, other: Pass) -> Pass:
        """Both, one after the other."""
        counts = defaultdict[Product, float](float)
        for one in (*self.products, *other.products):
            counts[one._replace(times=1.0)] += one.times
        return Pass(
            tuple(one._replace(times=times) for one, times in counts.items()),
            self.attention_flops + other.attention_flops,
            self.touched_bytes + other.touched_bytes,
            self.itemsize,
        )


def touched_by_token(architecture: Transformer, costs: Costs, *, autocast: bool = False) -> Touched:
    """Bytes that a block's kernels read and write for each token, beside products and attention.

    >>> from zero_ref.simulator.models import TRANSFORMERS
    >>> touched_by_token(TRANSFORMERS["llama3-8b"], EAGER)
    Touched(forward=606208.0, backward=1089536.0)

    Args:
        autocast: the stream is in 32 bits, and cast where a product reads it.
    """
    layers = [(layer.number, _touched_in(layer, costs, autocast)) for layer in architecture.layers]
    depth = architecture.depth
    forward, backward = (sum(count * of_block[way] for count, of_block in layers) / depth for way in (0, 1))
    return Touched(forward, backward)


def _touched_in(layer: Layer, costs: Costs, autocast: bool) -> Touched:
    """The same of one kind of block."""
    moved, hidden = layer.moved, layer.hidden
    kind, width, of_stream = layer.kind, layer.width, 2 if autocast else 1
    norm = costs.layer_norm if layer.layer_norms else costs.rms_norm
    if norm is not EAGER.rms_norm:  # which is in 32 bits in any case
        norm = (of_stream * norm[0], of_stream * norm[1])
    reads = reads_of_norms(layer, compiled=costs is COMPILED)
    casts = autocast * (reads["normed"] * (layer.attended > 0) + reads["normed for the MLP"] * layer.has_mlp)
    function = costs.gate if kind.gated else costs.activation
    halves = (layer.attended > 0) + layer.has_mlp
    norms = min(kind.pre_norms, halves) + kind.post_norms if halves else 0
    # Of products that are one, gradients are put together as they are, and else added in the stream's dtype.
    uses = 2 * (layer.attended > 0) * (1 if kind.fused_qkv else of_stream)
    uses += kind.gated * layer.has_mlp * of_stream
    normed = layer.heads * layer.head_width + layer.key_value_heads * layer.head_width
    return Touched(
        *(
            width * (norms * norm[way] + of_stream * halves * costs.add[way] + uses * costs.again[way])
            + width * casts * CAST
            + halves * width * kind.dropout * costs.dropout[way]
            + layer.biased * costs.bias[way]
            + (layer.attended + moved) * costs.layout[way]
            + layer.rotated * kind.rotary * costs.rotary[way]
            + normed * kind.qk_norms * norm[way]
            + hidden * float(function[way])
            for way in (0, 1)
        )
    )


@dataclass(frozen=True)
class Kernels:
    """Forward and backward of a model on one micro-batch.

    Args:
        numel: elements of the model, to give each operation of a schedule its part.
        backward_numel: those of backward's operations, where they are not of all; None for as many.
    """

    forward: Pass
    backward: Pass
    numel: int
    backward_numel: int | None = None

    @property
    def flops(self) -> float:
        """Floating-point operations of products and attention, including those that are computed again."""
        return self.forward.flops + self.backward.flops

    def parts_ms(self, device: Device) -> dict[str, float]:
        """Milliseconds of forward and backward by what limits the kernels.

        >>> from zero_ref.simulator.cluster import cluster
        >>> from zero_ref.simulator.models import TRANSFORMERS
        >>> llama = kernels(TRANSFORMERS["llama3-8b"], batch=1, sequence=8192)
        >>> {name: round(ms) for name, ms in llama.parts_ms(cluster("h100-ib").device).items()}
        {'matrix products': 723, 'attention': 183, 'memory': 169}
        """
        forward, backward = self.forward.parts_ms(device), self.backward.parts_ms(device)
        return {name: ms + backward[name] for name, ms in forward.items()}


@lru_cache(maxsize=256)
def kernels(
    architecture: Transformer | Traced,
    batch: int,
    sequence: int,
    checkpointing: str = "none",
    *,
    attention: str = "fused",
    compiled: bool = False,
    vendor: bool = False,
    fused_loss: bool = False,
    itemsize: int = 2,
    autocast: bool = False,
    fp8: bool = False,
    lora: Lora | None = None,
) -> Kernels:
    """The kernels of forward and backward on `batch` sequences.

    >>> from zero_ref.simulator.models import TRANSFORMERS
    >>> llama = kernels(TRANSFORMERS["llama3-8b"], batch=1, sequence=8192)
    >>> llama.numel, len(llama.forward.products)
    (8030261248, 4)
    >>> round(llama.flops / 1e12), round(llama.backward.flops / llama.forward.flops, 2)
    (430, 2.06)
    >>> fused = kernels(TRANSFORMERS["llama3-8b"], batch=1, sequence=8192, compiled=True, fused_loss=True)
    >>> round(llama.forward.touched_bytes / fused.forward.touched_bytes, 1)
    3.6

    Args:
        checkpointing: one of `activations.CHECKPOINTING`: what backward computes again.
        attention: one of `activations.ATTENTION`. Unfused, it reads and writes every score several times.
        compiled: neighbouring kernels of blocks are fused.
        vendor: what is fused is what `VENDOR` says, unless blocks are compiled or the model is traced.
        fused_loss: those of the loss are.
        itemsize: bytes of an element.
        autocast: parameters and stream are in 32 bits, and cast for each product; gradients are cast back.
        fp8: products of blocks are of FP8, to which each casts both of its operands. The head is not.
        lora: only adapters are trained: no gradients of other weights are made.
    Raises:
        ValueError: `checkpointing` or `attention` is unknown.
    """
    check_name("attention", attention, ATTENTION)
    again, costs = recomputed(checkpointing), COMPILED if compiled else VENDOR if vendor else EAGER
    fused = attention == "fused" or isinstance(architecture, Traced)
    if isinstance(architecture, Traced):
        work = _traced(architecture, batch, sequence, itemsize, fp8=fp8, compiled=compiled)
    else:
        work = _tabled(
            *(architecture, batch, sequence, itemsize, costs),
            fused=fused,
            fused_loss=fused_loss,
            autocast=autocast,
            fp8=fp8,
            lora=lora,
        )
    others, back = work.forward, work.backward.plus(work.attention_backward)
    computed_again = others.times(again.products, touched=again.touched)
    computed_again = computed_again.plus(work.attention.times(again.attention if fused else again.scores))
    computed_again = computed_again.plus(work.last.times(-again.products))
    if checkpointing == "by-operation":  # which keeps no results of experts
        computed_again = computed_again.plus(work.of_experts.times(1 - again.products))
    back = back.plus(computed_again.times(again.blocks))
    if fp8:
        back = back.touching(work.casts_to_fp8 * again.products * again.blocks)
    forward = others.touching(work.casts_to_fp8).plus(work.attention).plus(work.head)
    shapes = architecture.shapes() if lora is None else with_adapters(architecture.shapes(), lora)
    numel = sum(param.numel for param in shapes)
    return Kernels(forward, back.plus(work.head_backward), numel)


class _Work(NamedTuple):
    """The work of all blocks and of what is outside of them, if nothing is computed again.

    Args:
        forward: of blocks, without attention over the sequence and without casts to FP8.
        last: of these, products whose results nothing in backward needs.
        of_experts: of these, products of experts that are not the last.
        backward, attention_backward: all of it.
        casts_to_fp8: bytes that are touched in forward.
    """

    forward: Pass
    attention: Pass
    last: Pass
    of_experts: Pass
    backward: Pass
    attention_backward: Pass
    head: Pass
    head_backward: Pass
    casts_to_fp8: float = 0.0


def _tabled(
    architecture: Transformer,
    batch: int,
    sequence: int,
    itemsize: int,
    costs: Costs,
    *,
    fused: bool,
    fused_loss: bool,
    autocast: bool,
    fp8: bool,
    lora: Lora | None,
) -> _Work:
    """Count the work of a model whose layers are spelled out."""
    tokens, depth, outputs = batch * sequence, architecture.depth, architecture.vocabulary
    of_block = touched_by_token(architecture, costs, autocast=autocast)
    scale = itemsize / 2

    def products(of: Callable[[Layer], Iterable[Matrix]]) -> Pass:
        made = _products(architecture, tokens, of)
        return Pass(tuple(one._replace(fp8=fp8) for one in made), 0.0, 0.0, itemsize)

    matrices = products(lambda layer: layer.products)
    attended, attended_back = _attention(architecture, batch, sequence, costs.scores, itemsize, fused)
    casts = CAST * autocast * sum(layer.number * cast_weights(layer) for layer in architecture.layers)
    others = matrices.touching(scale * tokens * depth * of_block.forward + casts)
    # The mask of a dropout behind the last product is made from its result.
    last = products(lambda layer: () if architecture.kind.dropout else layer.last)
    of_experts = products(
        lambda layer: (one for one in layer.products if one.copies > 1 and one not in layer.last)
    )
    gradients = 1 if lora else 2  # of a product's operand, and of its weight
    back = matrices.times(gradients)
    back = back.touching(scale * tokens * depth * of_block.backward + casts)
    if lora:
        adapters = _adapters(architecture, tokens, lora, costs, scale)
        others, back = others.plus(adapters.forward), back.plus(adapters.backward)
    forward_casts, backward_casts = _casts_to_fp8(architecture, tokens, costs) if fp8 else (0.0, 0.0)
    product = Product(tokens, architecture.width, outputs, float(outputs > 0))
    in_head, of_loss = (
        scale * tokens * outputs * nbytes for nbytes in (COMPILED if fused_loss else EAGER).logits
    )
    casts = CAST * autocast * architecture.width * outputs
    of_head = product._replace(times=gradients * product.times)
    return _Work(
        others,
        attended,
        last,
        of_experts,
        back.touching(backward_casts),
        attended_back,
        Pass((product,), 0.0, in_head + casts, itemsize),
        Pass((of_head,), 0.0, of_loss + casts, itemsize),
        forward_casts,
    )


def _traced(model: Traced, batch: int, sequence: int, itemsize: int, *, fp8: bool, compiled: bool) -> _Work:
    """Evaluate the rules of a traced model."""
    at, nothing = (batch, sequence), Pass((), 0.0, 0.0, itemsize)

    def products(listed: Iterable[TracedProduct], *, of_block: bool = True) -> Pass:
        made = (
            Product(one.m.at(*at), one.k.at(*at), one.n.at(*at), one.times.at(*at), fp8 and of_block)
            for one in listed
        )
        return Pass(tuple(made), 0.0, 0.0, itemsize)

    def work(one: TracedPass, *, of_block: bool = True) -> tuple[Pass, Pass]:
        touched = (one.touched_compiled if compiled and of_block else one.touched).at(*at)
        return (
            products(one.products, of_block=of_block).touching(touched),
            Pass((), one.attention_flops.at(*at), 0.0, itemsize),
        )

    forward = attention = backward = attention_backward = last = nothing
    for layer in model.layers:
        one, attended = work(layer.forward)
        back, attended_back = work(layer.backward)
        forward = forward.plus(one.times(layer.number))
        attention = attention.plus(attended.times(layer.number))
        backward = backward.plus(back.times(layer.number))
        attention_backward = attention_backward.plus(attended_back.times(layer.number))
        last = last.plus(products(layer.last).times(layer.number))
    head, head_backward = (
        one.plus(attended)
        for one, attended in (
            work(way, of_block=False) for way in (model.outside.forward, model.outside.backward)
        )
    )
    # A cast to FP8 reads an operand for its largest element and again to write it, as `_casts_to_fp8` counts.
    casts, casts_back = (
        fp8
        * (3 if compiled else 5)
        * sum(one.times * (one.m * one.k + one.k * one.n) for one in way.products)
        for way in (forward, backward)
    )
    return _Work(
        forward, attention, last, nothing, backward.touching(casts_back), attention_backward, head,
        head_backward, casts,
    )  # fmt: skip


class _Adapters(NamedTuple):
    """The work that adapters add to forward and backward of all blocks."""

    forward: Pass
    backward: Pass


def _adapters(architecture: Transformer, tokens: int, lora: Lora, costs: Costs, scale: float) -> _Adapters:
    """Two small products for each adapted weight, whose result is added to that weight's.

    Args:
        scale: bytes of an element, as a multiple of the two that `costs` counts with.
    """
    products: list[Product] = []
    forward = backward = 0.0
    for layer in architecture.layers:
        for one in filter(lora.adapts, matrices_of(layer)):
            products.append(Product(tokens, one.inputs, lora.rank, float(layer.number)))
            products.append(Product(tokens, lora.rank, one.outputs, float(layer.number)))
            forward += scale * layer.number * tokens * one.outputs * costs.add[0]
            backward += scale * layer.number * tokens * one.inputs * costs.add[1]
    made = Pass(tuple(products), 0.0, forward)
    return _Adapters(made, made.times(2, touched=0).touching(backward))


def _casts_to_fp8(architecture: Transformer, tokens: int, costs: Costs) -> tuple[float, float]:
    """Bytes that casts to FP8 read and write in forward and in backward of all blocks.

    Each of the three products of a weight casts its two operands: input and weight; gradient and weight;
    gradient and input. A cast reads an operand for its largest element, which a compiler does where the
    operand is made, and again to write it. Vendors' kernels cast an input where it is made, and a gradient
    after it, and write both twice, once transposed. They cast a weight once for all passes of an update.

    Source: torchao's float8 with dynamic scales (torchao/float8/float8_linear.py), which keeps operands as
    they are and casts them anew in backward; Transformer Engine's `Linear` and `LayerNormLinear`.
    """
    forward = backward = 0
    for layer in architecture.layers:
        for one in layer.products:
            rows, times = _rows(one, tokens), one.copies * layer.number
            inputs, outputs, weight = rows * one.inputs, rows * one.outputs, one.inputs * one.outputs
            if costs is VENDOR:
                forward, backward = forward + 2 * times * inputs, backward + 4 * times * outputs
            else:
                of_operand = times * (3 if costs is COMPILED else 5)
                forward += of_operand * (inputs + weight)
                backward += of_operand * (inputs + 2 * outputs + weight)
    return forward, backward


def _products(
    architecture: Transformer, tokens: int, of: Callable[[Layer], Iterable[Matrix]]
) -> tuple[Product, ...]:
    """The products of some weights of all blocks."""
    times = Counter[tuple[int, int, int]]()
    for layer in architecture.layers:
        for one in of(layer):
            short, long = sorted((one.inputs, one.outputs))
            times[_rows(one, tokens), short, long] += one.copies * layer.number
    return tuple(Product(*lengths, count) for lengths, count in times.items())


def _rows(one: Matrix, tokens: int) -> int:
    """The rows that a weight is multiplied with: an expert has its share of the tokens."""
    return max(1, round(one.share * tokens))


def _attention(
    architecture: Transformer,
    batch: int,
    sequence: int,
    scores: tuple[float, float],
    itemsize: int,
    fused: bool,
) -> tuple[Pass, Pass]:
    """The two products over the sequence, of all blocks, and what becomes of them in backward.

    Fused attention skips what the causal mask hides. Else whole squares are multiplied, and every score is
    read and written several times.
    """
    forward, backward = Pass((), 0.0, 0.0, itemsize), Pass((), 0.0, 0.0, itemsize)
    for layer in architecture.layers:
        heads, widths = batch * layer.heads * layer.number, layer.head_width + layer.value_width
        if fused:
            flops = 2.0 * heads * widths * layer.pairs(sequence)
            forward = forward.plus(Pass((), flops, 0.0, itemsize))
            backward = backward.plus(Pass((), BACKWARD_OF_FLASH * flops, 0.0, itemsize))
        elif heads:
            for width in (layer.head_width, layer.value_width):
                square = Product(sequence, width, sequence, float(heads))
                forward = forward.plus(Pass((square,), 0.0, 0.0, itemsize))
                backward = backward.plus(Pass((square._replace(times=2.0 * heads),), 0.0, 0.0, itemsize))
            touched = (itemsize / 2 * nbytes * heads * sequence**2 for nbytes in scores)
            forward, backward = (one.touching(more) for one, more in zip((forward, backward), touched))
    return forward, backward
