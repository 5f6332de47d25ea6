"""Tracing a model: its program runs on the meta device at several lengths and batches, and rules are found.

`noted_run` notes a run: what each block computes, reads, writes and keeps. `simulator.traced` has the rules
that come out.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence

from torch import nn

from zero_ref.lab.noted_run import OUTSIDE, Inputs, Product, Summary, Work, note
from zero_ref.simulator.layers import ParamShape
from zero_ref.simulator.models import from_module
from zero_ref.simulator.traced import Point, Rule, Traced, TracedKept, TracedLayer, TracedPass, TracedProduct


def trace(
    module: nn.Module, inputs: Inputs, sequence: int, *, tied: bool = False, positions: int | None = None
) -> Traced:
    """Run forward and backward of a module at two batches and three lengths, and find the rules.

    Args:
        module: on the meta device, with the parameters' dtype and `requires_grad` as it is trained.
        inputs: makes what it is called with; meta is the default device while it does.
        sequence: the longest of the three lengths. At this one, whatever the batch, all numbers are exact.
        tied: the output head is the embedding.
        positions: the length that is simulated unless another is asked for; None for `sequence`.
    Raises:
        ValueError: the program cannot be run without values, has no parameter that is trained, or has other
            products at other lengths.
    """
    lengths = lengths_of(sequence)
    points = [(batch, length) for batch in (2, 1) for length in reversed(lengths)]
    # All blocks run at the first point. Of those that do the same, one runs at each further point, and the
    # others pass values on.
    notes = note(module, inputs, points[0])
    first = notes.summaries()
    summary_outside = first.pop(OUTSIDE)
    kinds = list(dict.fromkeys(first.values()))
    kind_of_call = [kinds.index(one) for one in first.values()]
    found = {points[0]: (*kinds, summary_outside)}
    for point in points[1:]:
        again = note(module, inputs, point, kind_of_call)
        summaries = again.summaries()
        of_kind = {kind: summaries[call] for call, kind in enumerate(again.kinds)}
        found[point] = (*(of_kind[kind] for kind in range(len(kinds))), summaries[OUTSIDE])
    layers = [
        _layer({point: one[kind] for point, one in found.items()})._replace(number=kind_of_call.count(kind))
        for kind in range(len(kinds))
    ]
    params = from_module(module)
    dtypes = Counter({param.dtype: 0 for param in params})
    for param in params:
        dtypes[param.dtype] += param.numel
    outside = _layer({point: one[-1] for point, one in found.items()})
    if not any(layer.depends_on_length for layer in (*layers, outside)):
        positions = 1  # of an image, say
    return Traced(
        params=tuple(ParamShape(param.name, param.shape) for param in params),
        frozen=frozenset(param.name for param in params if not param.trainable),
        layers=tuple(layers),
        outside=outside,
        outputs=notes.outputs,
        dtype=dtypes.most_common(1)[0][0],
        traced_with=tuple(points),
        positions=positions or sequence,
        inactive=notes.inactive,
        tied=tied,
        missing=tuple(notes.missing),
    )


def lengths_of(sequence: int) -> tuple[int, int, int]:
    """Three lengths, of which this is the longest; long ones in steps of 64, in which linear attention works.

    >>> lengths_of(8192), lengths_of(200), lengths_of(1)
    ((8064, 8128, 8192), (50, 100, 200), (1, 2, 3))
    """
    if sequence < 4:
        return 1, 2, 3
    if sequence >= 256:
        return sequence - 128, sequence - 64, sequence
    quarter = sequence // 4
    return quarter, 2 * quarter, sequence


# ---------------------------------------------------------------------------------------- the rules


def _layer(summaries: Mapping[Point, Summary]) -> TracedLayer:
    """The rules of a block, from what it has at several batches and lengths."""

    def rule(of: Callable[[Summary], float]) -> Rule:
        return Rule.fit({point: of(one) for point, one in summaries.items()})

    elements = {point: dict(one.kept) for point, one in summaries.items()}
    keys = {key: None for one in elements.values() for key in one}
    kept = tuple(
        TracedKept(
            name,
            Rule.fit({point: one.get((name, role, nbytes), 0) for point, one in elements.items()}),
            role,
            nbytes,
        )
        for name, role, nbytes in keys
    )
    return TracedLayer(
        1,
        kept,
        rule(lambda one: one.sources),
        rule(lambda one: one.input),
        rule(lambda one: one.by_operation),
        rule(lambda one: one.gradients),
        _rules_of_products({point: one.last for point, one in summaries.items()}),
        rule(lambda one: one.whole),
        _pass({point: one.forward for point, one in summaries.items()}),
        _pass({point: one.backward for point, one in summaries.items()}),
    )


def _pass(works: Mapping[Point, Work]) -> TracedPass:
    return TracedPass(
        _rules_of_products({point: one.products for point, one in works.items()}),
        Rule.fit({point: one.seen for point, one in works.items()}),
        Rule.fit({point: one.touched for point, one in works.items()}),
        Rule.fit({point: one.compiled for point, one in works.items()}),
    )


def _rules_of_products(found: Mapping[Point, Sequence[Product]]) -> tuple[TracedProduct, ...]:
    """A rule for each product. Runs make the same ones in order, or some more often where they are longer."""
    if len({len(one) for one in found.values()}) > 1:
        found = {point: _merged(one) for point, one in found.items()}
    if len({len(one) for one in found.values()}) > 1:
        raise ValueError("the model makes other products at other lengths.")
    times = defaultdict[tuple[Rule, Rule, Rule], list[Rule]](list)
    for at in range(len(next(iter(found.values())))):
        m, k, n, each = (
            Rule.fit({point: one[at][axis] for point, one in found.items()})  # type: ignore[misc]
            for axis in range(1, 5)
        )
        times[m, k, n].append(each)
    return tuple(TracedProduct(m, k, n, Rule(*map(sum, zip(*each)))) for (m, k, n), each in times.items())


def _merged(products: Sequence[Product]) -> list[Product]:
    """Products of equal lengths as one, which is made more often."""
    times = defaultdict[tuple[str, float, float, float], float](float)
    for tag, m, k, n, each in products:
        times[tag, m, k, n] += each
    return [(*product, each) for product, each in times.items()]
