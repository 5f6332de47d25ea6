"""Decoders of Hugging Face: the parameters of a model of one of the families, and what its layers are.

`configuration.from_config` makes one from a configuration. The tables of the families are in `families`.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from zero_ref.simulator.dense import DENSE
from zero_ref.simulator.families import Family
from zero_ref.simulator.layers import BlockKind, Kept, Layer, ParamShape, is_of_experts, weights_of
from zero_ref.simulator.mixtures import MIXTURES
from zero_ref.simulator.towers import TOWERS

FAMILIES: dict[str, Family] = {**DENSE, **MIXTURES}
"""The families that are known, by the `model_type` of their configurations, beside gpt2.

Source: the modules of transformers 5.24 (tests/simulator/test_decoders.py builds each, and compares names and
shapes).
"""


class Head(NamedTuple):
    """The output head of a model, where it is not over the vocabulary.

    >>> REWARD = Head("score", 1)
    >>> REWARD.behind([ParamShape("model.norm.weight", (8,))], width=8)[1]
    ParamShape(name='score.weight', shape=(1, 8))
    >>> Head().behind([ParamShape("model.norm.weight", (8,))], width=8)
    (ParamShape(name='norm.weight', shape=(8,)),)

    Args:
        name: of the layer; empty where there is none, and names do not begin with the body's either.
        outputs: of the layer, for each token.
        bias: the layer has one.
    """

    name: str = ""
    outputs: int = 0
    bias: bool = False

    def behind(self, body: Iterable[ParamShape], width: int) -> tuple[ParamShape, ...]:
        """The parameters of the body and of this head."""
        if not self.name:
            return tuple(param._replace(name=param.name.partition(".")[2]) for param in body)
        layer = [ParamShape(f"{self.name}.weight", (self.outputs, width))]
        layer += [ParamShape(f"{self.name}.bias", (self.outputs,))] * self.bias
        return (*body, *layer)


class Block(NamedTuple):
    """One block of a model: the names of its mixer and its MLP in the family's tables.

    Args:
        sizes: (symbol, size) of what is another size in this block than in the model.
    """

    mixer: str = ""
    mlp: str = ""
    sizes: tuple[tuple[str, int], ...] = ()


class Tower(NamedTuple):
    """The part of a model that brings images into it.

    Args:
        kind: a name in `towers.TOWERS`; one that is not there has parameters that are not known.
        sizes: (symbol, size) for the symbols in its table.
        options: those that are true.
    """

    kind: str
    sizes: tuple[tuple[str, int], ...] = ()
    options: tuple[str, ...] = ()

    @property
    def before(self) -> tuple[ParamShape, ...]:
        """The parameters that are registered before the language model's."""
        return tuple(self._of(TOWERS[self.kind].before)) if self.kind in TOWERS else ()

    @property
    def behind(self) -> tuple[ParamShape, ...]:
        """The parameters that are registered after the language model's."""
        return tuple(self._of(TOWERS[self.kind].behind)) if self.kind in TOWERS else ()

    def _of(self, parts: Iterable[tuple[str, str, str]]) -> Iterator[ParamShape]:
        sizes = dict(self.sizes)
        for name, count, written in parts:
            tensors = list(tensors_of(written, sizes, self.options))
            for number in range(sizes[count]) if count else [None]:
                prefix = name if number is None else f"{name}.{number}"
                yield from (ParamShape(f"{prefix}.{one.name}", one.shape) for one in tensors)


_TENSOR = re.compile(r"^(.+?)(\((.+)\)(\+?)(\w*)|\[(.+)\])$")


def tensors_of(written: str, sizes: Mapping[str, int], options: Iterable[str] = ()) -> Iterator[ParamShape]:
    """The parameters that a table of `families` writes.

    >>> list(tensors_of("proj(2*h,d)+ experts.up[x,h,d]", {"d": 8, "h": 3, "x": 4}))
    [ParamShape(name='proj.weight', shape=(6, 8)), ParamShape(name='proj.bias', shape=(6,)),
     ParamShape(name='experts.up', shape=(4, 3, 8))]

    Args:
        sizes: by symbol.
        options: those that are true.
    """
    for line in written.split():
        name, _, dims, has_bias, option, bare = _TENSOR.findall(line)[0]
        shape = tuple(value_of(size, sizes) for size in (dims or bare).split(","))
        yield ParamShape(name if bare else f"{name}.weight", shape)
        if has_bias and (not option or option in options):
            yield ParamShape(f"{name}.bias", shape[:1])


def value_of(written: str, sizes: Mapping[str, int]) -> int:
    """A size: a number, a symbol, or a sum of products of these.

    >>> value_of("2*q+g", {"q": 8, "g": 3})
    19
    """
    total = 0
    for product in written.split("+"):
        factors = product.split("*")
        total += math.prod(int(one) if one.isdecimal() else sizes[one] for one in factors)
    return total


_DIMS = re.compile(r"[(\[]([^()\[\]]*)[)\]]")
_SYMBOL = re.compile(r"[a-z_]\w*")

_KEPT = re.compile(r"^(.+)\((.+)\):(\w+?)(\d?)$")


def _kept(written: str, sizes: Mapping[str, int]) -> tuple[Kept, ...]:
    """Read the values that autograd keeps from a table of `families`; an underscore in a name is a space."""
    found = (_KEPT.findall(line)[0] for line in written.split())
    return tuple(
        Kept(name.replace("_", " "), value_of(numel, sizes), role, int(nbytes or 0))
        for name, numel, role, nbytes in found
    )


@dataclass(frozen=True)
class Decoder:
    """A decoder of one of the families.

    >>> Decoder("qwen2", width=8, depth=1, hidden=16, heads=2, key_value_heads=1, vocabulary=10).shapes()[1:3]
    (ParamShape(name='model.layers.0.self_attn.q_proj.weight', shape=(8, 8)),
     ParamShape(name='model.layers.0.self_attn.q_proj.bias', shape=(8,)))

    Args:
        family: a name in `families.FAMILIES`.
        hidden: width of the MLP; where all blocks have experts, of one of these.
        head_dim: elements of a head; 0 for `width / heads`.
        tied: the output head is the embedding.
        options: of the family's, those that are true.
        head: in place of the output head over the vocabulary.
        sizes: (symbol, size) of the family's further sizes.
        blocks: what each block is; empty where the family has one kind of block only.
        base: what the names of the body begin with; empty for the family's own.
        tower: what brings images into the model. It is counted, and takes no part in training on text.
        predicting_ahead: modules of multi-token prediction that a checkpoint has beside the model.
            transformers builds none of them.
    """

    family: str
    width: int
    depth: int
    hidden: int
    heads: int
    key_value_heads: int
    vocabulary: int
    positions: int = 4096
    head_dim: int = 0
    tied: bool = False
    options: tuple[str, ...] = ()
    head: Head | None = None
    sizes: tuple[tuple[str, int], ...] = ()
    blocks: tuple[Block, ...] = ()
    base: str = ""
    tower: Tower | None = None
    predicting_ahead: int = 0

    @property
    def head_width(self) -> int:
        """Elements of a head."""
        return self.head_dim or self.width // self.heads

    @property
    def kind(self) -> BlockKind:
        """The structure of a block."""
        return self._family.kind

    @property
    def _family(self) -> Family:
        return FAMILIES[self.family]

    @property
    def _blocks(self) -> tuple[Block, ...]:
        return self.blocks or (Block(),) * self.depth

    def shapes(self) -> tuple[ParamShape, ...]:
        """All parameters, in registration order."""
        if self.tower is None:
            return self._language
        return (*self.tower.before, *self._language, *self.tower.behind)

    def language(self) -> tuple[ParamShape, ...]:
        """Return the parameters of the language model, without a tower's."""
        return self._language

    @cached_property
    def _language(self) -> tuple[ParamShape, ...]:
        family, base = self._family, self.base or self._family.base
        of_block = {block: self.tensors_of_block(block) for block in dict.fromkeys(self._blocks)}
        body = (
            *(ParamShape(f"{base}.{name}", shape) for name, shape in self._tensors(family.embedding)),
            *(
                ParamShape(f"{base}.{family.layers}.{number}.{name}", shape)
                for number, block in enumerate(self._blocks)
                for name, shape in of_block[block]
            ),
            *(ParamShape(f"{base}.{name}", shape) for name, shape in self._tensors(family.last)),
        )
        if self.head is not None:
            return self.head.behind(body, self.width)
        head = list(self._tensors(f"{self._head_name}(v,d){family.head_bias}"))
        return (*body, *head[self.tied :])

    @property
    def _head_name(self) -> str:
        known = self.tower is not None and self.tower.kind in TOWERS
        return TOWERS[self.tower.kind].head if self.tower is not None and known else "lm_head"

    def symbols(self) -> set[str]:
        """The further sizes that the tables of this model name, and that no block has of its own."""
        family, needed = self._family, set[str]()
        known = set(self._sizes_in())
        tables: list[tuple[Block | None, str]] = [(None, family.embedding), (None, family.last)]
        for block in dict.fromkeys(self._blocks):
            mixer, mlp = family.mixers[block.mixer], family.mlps[block.mlp]
            kept = (mixer.kept or "", mixer.after, mlp.kept or "")
            sums = (*mixer.scores, mixer.attended, mixer.rotated, mlp.width, mlp.moved)
            written = (family.block, mixer.tensors, mlp.tensors, *kept, *(f"({one})" for one in sums))
            tables += [(block, table) for table in written]
        for of_block, table in tables:
            inside = set(_SYMBOL.findall(" ".join(_DIMS.findall(table))))
            needed |= inside - known - {symbol for symbol, _ in (of_block.sizes if of_block else ())}
        return needed

    def tensors_of_block(self, block: Block) -> tuple[ParamShape, ...]:
        """The parameters of a block, without the names of what it is in."""
        family = self._family
        mixer, mlp = family.mixers[block.mixer], family.mlps[block.mlp]
        written = family.block.format(mixer=mixer.tensors, mlp=mlp.tensors)
        return tuple(self._tensors(written, block))

    def _tensors(self, written: str, block: Block | None = None) -> Iterator[ParamShape]:
        return tensors_of(written, self._sizes_in(block), self.options)

    def _sizes_in(self, block: Block | None = None) -> dict[str, int]:
        """All sizes by symbol, in a block."""
        sizes = {"d": self.width, "h": self.hidden, "v": self.vocabulary, "n": self.depth}
        sizes |= {"a": self.heads, "g": self.key_value_heads, "e": self.head_width, "window": 0}
        sizes |= dict(self.sizes) | dict(block.sizes if block else ())
        query, key = sizes["a"] * sizes["e"], sizes["g"] * sizes["e"]
        return {"q": query, "k": key, "qkv": query + 2 * key, "hh": 2 * sizes["h"]} | sizes

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """The kinds of blocks, and how many there are of each."""
        return tuple(self._layer(block, count) for block, count in Counter(self._blocks).items())

    def _layer(self, block: Block, count: int) -> Layer:
        family, sizes = self._family, self._sizes_in(block)
        mixer, mlp = family.mixers[block.mixer], family.mlps[block.mlp]
        heads, head_width, value_width = (value_of(size, sizes) for size in mixer.scores or ("0",) * 3)
        share = sizes["c"] / sizes["x"] if "x" in sizes else 1.0
        products, last, biased, layer_norms = weights_of(self.tensors_of_block(block), share)
        return Layer(
            self.width,
            count,
            family.kind,
            value_of(mlp.width, sizes),
            heads,
            sizes["g"],
            head_width,
            value_width,
            sizes["window"],
            mixed=None if mixer.kept is None else _kept(mixer.kept, sizes),
            attended=value_of(mixer.attended, sizes),
            after=_kept(mixer.after, sizes),
            rotated=value_of(mixer.rotated, sizes) if family.kind.rotary else 0,
            mlp=None if mlp.kept is None else _kept(mlp.kept, sizes),
            moved=value_of(mlp.moved, sizes),
            products=products,
            last=last,
            biased=biased,
            layer_norms=layer_norms,
            missing=tuple(words for words in (mixer.missing, mlp.missing) if words),
        )

    @property
    def missing(self) -> tuple[str, ...]:
        """Parts that the activations and the time of training on text do not count, in words for people."""
        listed = (words for layer in self.layers for words in layer.missing)
        return tuple(dict.fromkeys(listed))

    @cached_property
    def active(self) -> int:
        """The parameters of the language model that a token goes through: of experts those it is sent to.

        The embedding counts whole, of which a token takes one row.
        """
        sizes = self._sizes_in()
        inside = sum(param.numel for param in self._language if is_of_experts(param.name))
        outside = sum(param.numel for param in self._language) - inside
        return outside + (inside * sizes["c"] // sizes["x"] if inside else 0)

    def parts(self) -> dict[str, int | None]:
        """Parameters by what they are part of; None where their number is not known.

        >>> sizes = {"width": 8, "depth": 1, "hidden": 16, "heads": 2, "key_value_heads": 1, "vocabulary": 10}
        >>> Decoder("mimo", **sizes, predicting_ahead=1).parts()
        {'language model': 776, 'multi-token prediction': 760}

        Modules of multi-token prediction are in checkpoints only: transformers does not build them.
        """
        found: dict[str, int | None] = {"language model": sum(param.numel for param in self._language)}
        if self.tower is not None:
            of_tower = (*self.tower.before, *self.tower.behind)
            known = self.tower.kind in TOWERS
            found["vision tower"] = sum(one.numel for one in of_tower) if known else None
        if self.predicting_ahead:
            found["multi-token prediction"] = self.ahead(self.predicting_ahead)
        return found

    def ahead(self, modules: int = 1) -> int | None:
        """The parameters of modules of multi-token prediction; None where the family's are not known.

        Embedding and output head are the model's own.
        """
        if self._family.ahead is None:
            return None
        beside, mixer, mlp = self._family.ahead
        # Its block is as the last one of the model that is made of these.
        alike = [block for block in self._blocks if block.mlp == mlp and mixer in ("", block.mixer)]
        if not alike:
            return None
        own = (*self._tensors(beside), *self.tensors_of_block(alike[-1]))
        return modules * sum(param.numel for param in own)
