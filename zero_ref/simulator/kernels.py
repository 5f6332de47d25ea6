"""What a transformer computes for a micro-batch: matrix products, attention, and passes over memory.

`price` asks a device how long these take, and gives the time to the operations of a schedule. A matrix
product is limited by arithmetic, a norm or an activation function by what it reads and writes. So a share of
the peak that holds for one of them does not hold for a whole model: it depends on the width, the vocabulary
and the length of the sequences.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from zero_ref.simulator.cluster import Device
from zero_ref.simulator.models import GPT2, ParamShape, Transformer, blocks


class Product(NamedTuple):
    """A matrix product that is made `count` times: (m, k) times (k, n).

    >>> one = Product(8192, 4096, 14336)
    >>> one.flops / 1e9, one.nbytes(itemsize=2) / 1e6
    (962.072674304, 419.4304)
    """

    m: int
    k: int
    n: int
    count: float = 1.0

    @property
    def flops(self) -> float:
        """A multiplication and an addition each."""
        return 2.0 * self.m * self.k * self.n * self.count

    def nbytes(self, itemsize: int) -> float:
        """Read and written at the least: both matrices and the result, once."""
        return float(itemsize) * (self.m * self.k + self.k * self.n + self.m * self.n) * self.count


@dataclass(frozen=True)
class Pass:
    """What forward or backward of the whole model computes.

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
        """Of products and attention."""
        return sum(one.flops for one in self.products) + self.attention_flops

    def ms(self, device: Device) -> float:
        """How long a device takes, one kernel after another.

        >>> from zero_ref.simulator.cluster import cluster
        >>> a_product = Pass((Product(8192, 4096, 14336),), attention_flops=0, touched_bytes=0)
        >>> a_norm = Pass((), attention_flops=0, touched_bytes=36 * 8192 * 4096)
        >>> h100 = cluster("h100-ib").device
        >>> round(a_product.ms(h100), 2), round(a_norm.ms(h100), 2)
        (1.5, 0.45)
        """
        return (
            sum(device.product_ms(one.flops, one.nbytes(self.itemsize)) for one in self.products)
            + device.attention_ms(self.attention_flops)
            + device.touch_ms(self.touched_bytes)
        )

    def times(self, share: float, *, attention: float | None = None, touched: float | None = None) -> Pass:
        """So many times the kernels; other shares of attention and of what is touched if they are given."""
        return Pass(
            tuple(one._replace(count=one.count * share) for one in self.products if share),
            self.attention_flops * (share if attention is None else attention),
            self.touched_bytes * (share if touched is None else touched),
            self.itemsize,
        )

    def plus(self, other: Pass) -> Pass:
        """Both, one after the other."""
        counts: Counter[tuple[int, int, int]] = Counter()
        for m, k, n, count in (*self.products, *other.products):
            counts[m, k, n] += count  # type: ignore[assignment]
        return Pass(
            tuple(Product(*lengths, count) for lengths, count in counts.items()),
            self.attention_flops + other.attention_flops,
            self.touched_bytes + other.touched_bytes,
            self.itemsize,
        )


class Recomputed(NamedTuple):
    """The shares of a block's forward that backward computes again."""

    products: float
    attention: float
    touched: float


RECOMPUTED: dict[str, Recomputed] = {
    "none": Recomputed(0, 0, 0),
    "selective": Recomputed(0, 0, 0),
    "full": Recomputed(1, 1, 1),
}
"""By the names of `activations.CHECKPOINTING`. Flash attention computes its scores again in any case, which
BACKWARD_OF_FLASH counts."""

BACKWARD_OF_FLASH = 2.5
"""Backward of flash attention makes five products where forward makes two.
Source: FlashAttention-2 (arXiv:2307.08691), section 4.1."""


class Touched(NamedTuple):
    """Bytes that kernels limited by memory read and write, for each token and element, by what they are for.

    Args:
        of_width: of a hidden state, in a block.
        of_rotary: of queries and keys, where positions are rotated.
        of_hidden: of the width of the MLP.
        of_logit: of an entry of the vocabulary, over forward and backward together.
    """

    of_width: float
    of_rotary: float
    of_hidden: float
    of_logit: float


class Kinds(NamedTuple):
    """What forward and backward of a block touch."""

    forward: Touched
    backward: Touched


# Counted kernel by kernel as PyTorch runs them one by one, for 2-byte elements: what is read and written.
# A LayerNorm is one kernel (2 + 2 bytes forward, 2 + 2 + 2 backward). An RMSNorm goes to 32 bits, squares,
# averages, multiplies and comes back, 36 bytes, and twice that in backward. Rotation goes to 32 bits and comes
# back, 20 bytes each way. Dropout reads, writes and keeps a byte (5 bytes each way), an addition takes 6, and
# so does adding gradients where a value was used twice. GELU takes 4 bytes and 6 in backward, SwiGLU 10
# and 18. Cross-entropy goes to 32 bits (6), reads twice and writes (12), picks, and in backward makes
# gradients in 32 bits (12) and brings them to 16 (6).
_EAGER = {
    "gpt": Kinds(Touched(2 * 4 + 2 * 5 + 2 * 6, 0, 4, 18), Touched(2 * 6 + 2 * 5 + 2 * 6 + 10, 0, 8, 18)),
    "llama": Kinds(Touched(2 * 36 + 2 * 6 + 8, 20, 10, 18), Touched(2 * 72 + 2 * 6 + 18 + 8, 20, 18, 18)),
}
# A compiler fuses neighbours: a norm with the addition before it (8 bytes), rotation (4), SwiGLU (6 and 10),
# dropout with its addition, cross-entropy to two readings forward, and a reading and a writing backward.
_COMPILED = {
    "gpt": Kinds(Touched(2 * 9, 0, 4, 4), Touched(2 * 9 + 10, 0, 6, 4)),
    "llama": Kinds(Touched(2 * 8, 4, 6, 4), Touched(2 * 8 + 8, 4, 10, 4)),
}


class Shape(NamedTuple):
    """The lengths that kernels have beside their weights' shapes."""

    hidden: int
    query: int
    key: int
    family: str


def shape_of(architecture: Transformer) -> Shape:
    """The lengths of a block: of the MLP, and of all query heads and all key heads together.

    >>> from zero_ref.simulator.models import TRANSFORMERS
    >>> shape_of(TRANSFORMERS["llama3-8b"])
    Shape(hidden=14336, query=4096, key=1024, family='llama')
    """
    heads = architecture.heads
    head_dim = getattr(architecture, "head_dim", 0) or architecture.width // heads
    return Shape(
        hidden=getattr(architecture, "hidden", 4 * architecture.width),
        query=head_dim * heads,
        key=head_dim * getattr(architecture, "key_value_heads", heads),
        family="gpt" if isinstance(architecture, GPT2) else "llama",
    )


@dataclass(frozen=True)
class Kernels:
    """Forward and backward of a model on one micro-batch.

    Args:
        numel: elements of the model, to give each operation of a schedule its part.
    """

    forward: Pass
    backward: Pass
    numel: int

    @property
    def flops(self) -> float:
        """Of products and attention, computed again or not."""
        return self.forward.flops + self.backward.flops


@lru_cache(maxsize=64)
def kernels(
    architecture: Transformer,
    batch: int,
    sequence: int,
    checkpointing: str = "selective",
    *,
    compiled: bool = False,
    itemsize: int = 2,
) -> Kernels:
    """The kernels of forward and backward on `batch` sequences.

    >>> from zero_ref.simulator.models import TRANSFORMERS
    >>> llama = kernels(TRANSFORMERS["llama3-8b"], batch=1, sequence=8192)
    >>> llama.numel, len(llama.forward.products)
    (8030261248, 5)
    >>> round(llama.flops / 1e12), round(llama.backward.flops / llama.forward.flops, 2)
    (430, 2.06)
    >>> fused = kernels(TRANSFORMERS["llama3-8b"], batch=1, sequence=8192, compiled=True)
    >>> round(llama.forward.touched_bytes / fused.forward.touched_bytes, 1)
    3.1

    Args:
        checkpointing: one of `activations.CHECKPOINTING`: what backward computes again.
        compiled: neighbouring kernels are fused.
        itemsize: bytes of an element.
    Raises:
        ValueError: `checkpointing` is unknown.
    """
    again = recomputed(checkpointing)
    shape, tokens = shape_of(architecture), batch * sequence
    shapes = architecture.shapes()
    kinds = (_COMPILED if compiled else _EAGER)[shape.family]
    in_blocks = Counter(_products_of(shapes))
    causal_scores = sequence * (sequence + 1) / 2
    attention = 4.0 * batch * causal_scores * shape.query * architecture.depth
    scale = itemsize / 2

    def touched(kind: Touched) -> float:
        of_token = kind.of_width * architecture.width + kind.of_hidden * shape.hidden
        of_token += kind.of_rotary * (shape.query + shape.key)
        return scale * tokens * architecture.depth * of_token

    def head(kind: Touched) -> Pass:
        product = Product(tokens, architecture.width, architecture.vocabulary)
        return Pass((product,), 0.0, scale * tokens * architecture.vocabulary * kind.of_logit, itemsize)

    products = tuple(Product(tokens, k, n, count) for (k, n), count in in_blocks.items())
    body = Pass(products, attention, touched(kinds.forward), itemsize)
    back = body.times(2, attention=BACKWARD_OF_FLASH, touched=0)
    back = back.plus(Pass((), 0.0, touched(kinds.backward), itemsize))
    back = back.plus(body.times(again.products, attention=again.attention, touched=again.touched))
    forward, back_of_head = head(kinds.forward), head(kinds.backward).times(2, touched=1)
    return Kernels(body.plus(forward), back.plus(back_of_head), sum(param.numel for param in shapes))


def recomputed(checkpointing: str) -> Recomputed:
    """The shares of a block's forward that backward computes again.

    Raises:
        ValueError: the name is unknown.
    """
    if checkpointing not in RECOMPUTED:
        raise ValueError(f"unknown checkpointing {checkpointing!r}; choose one of {', '.join(RECOMPUTED)}.")
    return RECOMPUTED[checkpointing]


def _products_of(shapes: Iterable[ParamShape]) -> Iterable[tuple[int, int]]:
    """The lengths of the matrices in all blocks, the shorter one first."""
    listed = tuple(shapes)
    for unit in blocks(listed)[1:]:
        for number in unit:
            if len(listed[number].shape) == 2:
                short, long = sorted(listed[number].shape)
                yield short, long
