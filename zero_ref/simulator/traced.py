"""A traced model: what its program keeps, multiplies and touches, by rules for any batch and any sequence.

`lab.tracing` runs the program on the meta device and makes one. Nothing here is spelled: a block has no heads
and no gate, only values that autograd keeps, matrix products, and bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from zero_ref.simulator.layers import Kept, ParamShape

Point = tuple[int, int]
"""A number of sequences, and of tokens in each."""


class Rule(NamedTuple):
    """A number that depends on b sequences of s tokens.

    >>> tokens = Rule.fit({(b, s): 7 * b * s + 3 for b in (1, 2) for s in (8, 16, 32)})
    >>> tokens.at(4, 100), tokens
    (2803.0, Rule(once=3.0, position=0.0, square=0.0, example=0.0, token=7.0, pair=0.0))

    Args:
        once: whatever the batch.
        position, square: for each token of a sequence, and for each pair of these, once for all sequences.
        example, token, pair: likewise of each sequence.
    """

    once: float = 0.0
    position: float = 0.0
    square: float = 0.0
    example: float = 0.0
    token: float = 0.0
    pair: float = 0.0

    def at(self, batch: int, sequence: int) -> float:
        """The number at this batch and this length; it is none below 0."""
        alone = self.once + sequence * (self.position + sequence * self.square)
        return max(0.0, alone + batch * (self.example + sequence * (self.token + sequence * self.pair)))

    @staticmethod
    def fit(values: Mapping[Point, float]) -> Rule:
        """The rule through the values at two batches and three lengths: exact at these six points."""
        (few, many), lengths = (sorted({point[axis] for point in values}) for axis in (0, 1))
        of_one = {s: Fraction(values[many, s] - values[few, s]) / (many - few) for s in lengths}
        alone = {s: Fraction(values[few, s]) - few * of_one[s] for s in lengths}
        return Rule(*map(float, (*_square(alone), *_square(of_one))))


def _square(values: Mapping[int, Fraction]) -> tuple[Fraction, Fraction, Fraction]:
    """The coefficients of the polynomial through three points, by Newton's differences."""
    (x, f), (y, g), (z, h) = values.items()
    slope = (g - f) / (y - x)
    bend = ((h - g) / (z - y) - slope) / (z - x)
    return f - slope * x + bend * x * y, slope - bend * (x + y), bend


class TracedKept(NamedTuple):
    """Values that autograd keeps of a block, made by one kind of operation.

    Args:
        numel: elements.
        role, nbytes: as of `layers.Kept`. Nothing has the role of scores: what is written out is kept.
    """

    name: str
    numel: Rule
    role: str
    nbytes: int


class TracedProduct(NamedTuple):
    """A matrix product (m, k) times (k, n), and how often it is made."""

    m: Rule
    k: Rule
    n: Rule
    times: Rule

    def flops_at(self, batch: int, sequence: int) -> float:
        """A multiplication and an addition each."""
        m, k, n, times = (one.at(batch, sequence) for one in self)
        return 2 * m * k * n * times


class TracedPass(NamedTuple):
    """The work of a block's forward or backward.

    Args:
        attention_flops: of fused attention, without what a causal mask lets a kernel skip.
        touched: bytes that the other operations read and write, one by one.
        touched_compiled: likewise if neighbours are one kernel.
    """

    products: tuple[TracedProduct, ...]
    attention_flops: Rule
    touched: Rule
    touched_compiled: Rule


class TracedLayer(NamedTuple):
    """One kind of block, of which a forward calls `number`; or all that lies outside of blocks.

    Args:
        kept: what autograd keeps.
        sources: bytes of what a compiler keeps in place of values that it computes again.
        input: bytes of the block's input.
        by_operation: bytes of this input, of attention's results, and of every other product's.
        gradients: bytes that are alive in backward, at the most, beside those of `kept` that still are.
        again: products of forward behind the last value that is kept, which no checkpointing makes again.
        whole_attention_flops: of fused attention in forward, over whole sequences.
        forward, backward: its work.
    """

    number: int
    kept: tuple[TracedKept, ...]
    sources: Rule
    input: Rule
    by_operation: Rule
    gradients: Rule
    last: tuple[TracedProduct, ...]
    whole_attention_flops: Rule
    forward: TracedPass
    backward: TracedPass

    @property
    def depends_on_length(self) -> bool:
        """Whether any number depends on the tokens of a sequence."""
        rules = [self.input, self.forward.touched, *(one.numel for one in self.kept)]
        return any(one.position or one.square or one.token or one.pair for one in rules)

    def kept_at(self, batch: int, sequence: int) -> list[Kept]:
        """What autograd keeps, for each token."""
        tokens = batch * sequence
        return [
            Kept(one.name, one.numel.at(batch, sequence) / tokens, one.role, one.nbytes) for one in self.kept
        ]


@dataclass(frozen=True, eq=False)
class Traced:
    """A model whose program was run on the meta device.

    Args:
        params: all parameters, in registration order.
        frozen: the names of those that are not trained.
        layers: the kinds of blocks.
        outside: what is outside of them: embedding, head, loss.
        outputs: elements of the logits for each token; 0 where no loss over classes was seen.
        dtype: of the parameters and the products when the model was traced.
        traced_with: batches and lengths at which all numbers are exact.
        positions: the length that is simulated unless another is asked for.
        inactive: parameters of experts that a token does not go through.
        tied: the output head is the embedding.
        missing: what the trace cannot see, in words for people.
    """

    params: tuple[ParamShape, ...]
    frozen: frozenset[str]
    layers: tuple[TracedLayer, ...]
    outside: TracedLayer
    outputs: int
    dtype: str
    traced_with: tuple[Point, ...]
    positions: int
    inactive: int = 0
    tied: bool = False
    missing: tuple[str, ...] = ()

    def shapes(self) -> tuple[ParamShape, ...]:
        """All parameters, in registration order."""
        return self.params

    @property
    def depth(self) -> int:
        """Calls of blocks."""
        return sum(layer.number for layer in self.layers)

    @property
    def active(self) -> int:
        """The parameters that a token goes through: of experts those it is sent to."""
        return sum(param.numel for param in self.params) - self.inactive

    def flops_of_token(self, batch: int, sequence: int) -> float:
        """The operations of products and attention in forward and backward, for each token.

        Attention counts over whole sequences, and without the product that flash attention makes again.
        """
        flops, at = 0.0, (batch, sequence)
        for layer in (*self.layers, self.outside):
            products = (*layer.forward.products, *layer.backward.products)
            of_attention = 3 if any(layer.backward.attention_flops) else 1
            made = sum(one.flops_at(*at) for one in products)
            flops += layer.number * (made + of_attention * layer.whole_attention_flops.at(*at))
        return flops / (batch * sequence)

    def attention_share(self, batch: int, sequence: int) -> float:
        """The operations that attention over whole sequences adds to those of the parameters, as a share."""
        layers = (*self.layers, self.outside)
        flops = sum(layer.number * layer.whole_attention_flops.at(batch, sequence) for layer in layers)
        return flops / (2 * batch * sequence) / self.active
