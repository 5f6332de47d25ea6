"""Make a Cluster of the machine at hand from measured times, with bounds on the errors of its predictions.

Each time has a cost for each call and a cost for each byte or operation: a collective has rounds and bytes,
forward and backward have tensors and floating-point operations, an optimizer step has tensors and bytes. So
`fit` serves all of them. `calibrate` fits on every other size, predicts the sizes in between, and keeps the
predicted and the measured times. These errors are the ones to trust; the interval of a parameter says how
well the times determine it. `lab.pieces` takes the times.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from zero_ref.simulator._checks import check_name
from zero_ref.simulator.cluster import Cluster, Link
from zero_ref.simulator.device import Device
from zero_ref.simulator.ledger import itemsize_of
from zero_ref.simulator.traffic import OPERATIONS, traffic

T = TypeVar("T")

ADAMW_BYTES = 28
"""For each fp32 element, AdamW reads gradient, parameter and two moments, and writes all but the gradient."""

COMPUTATIONS: dict[str, str] = {
    "train": "forward and backward, in floating-point operations",
    "update": "a local optimizer step, in bytes read and written",
}


def training_flops(numel: int, tokens: int, *, layers: int, width: int, context: int) -> float:
    """Floating-point operations of forward and backward of a transformer.

    For each token and parameter, forward takes a multiplication and an addition, and backward two of each.
    Attention adds its two products over the context. A tied token embedding counts once, as output head.

    >>> training_flops(810_496, 8 * 64, layers=4, width=128, context=64) / 1e9
    2.691170304

    Source: appendix B of PaLM (arXiv:2204.02311), which counts 6 N + 12 L H Q T for each token.
    """
    return tokens * (6.0 * numel + 12.0 * layers * width * context)


class Sample(NamedTuple):
    """One measured time, as `fit` takes it.

    Args:
        calls: rounds of messages, or tensors, each of which has a fixed cost.
        amount: bytes or floating-point operations.
    """

    calls: float
    amount: float
    ms: float


@dataclass(frozen=True)
class Measurement:
    """One collective, timed once.

    Args:
        op: one of `traffic.OPERATIONS`.
        nbytes: the payload, as `traffic` counts it.
        ms: of the slowest rank.
    Raises:
        ValueError: an unknown operation, a time or a payload that is not positive, or no two ranks.
    """

    op: str
    nbytes: int
    world_size: int
    ms: float

    def __post_init__(self) -> None:
        check_name("operation", self.op, OPERATIONS)
        if self.nbytes <= 0:
            raise ValueError(f"{self.op}: a payload to measure has at least 1 byte, got {self.nbytes}.")
        if self.world_size < 2:
            raise ValueError(
                f"{self.op}: a single rank sends nothing; measure 2 or more, not {self.world_size}."
            )
        _check_ms(self.op, self.ms)

    def sample(self, backend: str = "gloo") -> Sample:
        """The rounds and bytes that a Cluster counts: all bytes on the wire where ranks share a loopback."""
        load = traffic(self.op, self.nbytes, self.world_size, backend=backend)
        return Sample(load.rounds, load.total_bytes if backend == "gloo" else load.busiest_bytes, self.ms)


@dataclass(frozen=True)
class Computation:
    """A computation, timed once, while every rank did the same.

    Args:
        kind: one of COMPUTATIONS.
        tensors: parameter tensors that were trained or updated.
        amount: floating-point operations of "train", bytes of "update".
        ms: of the slowest rank.
    Raises:
        ValueError: an unknown kind, or a number that is not positive.
    """

    kind: str
    tensors: int
    amount: float
    ms: float

    def __post_init__(self) -> None:
        check_name("kind of work", self.kind, COMPUTATIONS)
        if self.tensors < 1 or not (math.isfinite(self.amount) and self.amount > 0):
            raise ValueError(
                f"{self.kind}: work has at least 1 tensor and an amount above 0, got {self.tensors} and "
                f"{self.amount:g}."
            )
        _check_ms(self.kind, self.ms)

    def sample(self) -> Sample:
        return Sample(self.tensors, self.amount, self.ms)


@dataclass(frozen=True)
class MeasuredProduct:
    """A matrix product, timed: (m, k) times (k, n).

    Raises:
        ValueError: a length is below 1, or the time is not positive.
    """

    m: int
    k: int
    n: int
    ms: float
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if min(self.m, self.k, self.n) < 1:
            raise ValueError(f"a product has lengths of at least 1, got {self.m}, {self.k} and {self.n}.")
        _check_ms("product", self.ms)
        itemsize_of(self.dtype)

    @property
    def flops(self) -> float:
        """A multiplication and an addition each."""
        return 2.0 * self.m * self.k * self.n

    @property
    def nbytes(self) -> float:
        """Of the two matrices and the result."""
        return float(itemsize_of(self.dtype) * (self.m * self.k + self.k * self.n + self.m * self.n))

    def sample(self) -> Sample:
        """Megabytes and operations."""
        return Sample(self.nbytes / 1e6, self.flops, self.ms)


@dataclass(frozen=True)
class NcclLog:
    """What a program of nccl-tests measured.

    Args:
        ranks, nodes: that it ran on.
    Raises:
        ValueError: the ranks cannot be divided evenly among the nodes.
    """

    measurements: tuple[Measurement, ...]
    ranks: int
    nodes: int

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.ranks % self.nodes:
            raise ValueError(f"{self.ranks} ranks cannot lie evenly on {self.nodes} nodes.")

    @property
    def cards(self) -> int:
        """The network cards that a ring's bytes leave a node through: one for each rank; 1 within a node."""
        return 1 if self.nodes == 1 else self.ranks // self.nodes


def _check_ms(what: str, ms: float) -> None:
    if not (math.isfinite(ms) and ms > 0):
        raise ValueError(f"{what}: a measured time is above 0 ms, got {ms:g}.")


def undisturbed_ms(times_ms: Sequence[float]) -> float:
    """The time that repeats agree on: their lower quartile.

    Other programs on a machine make a repeat longer, never shorter. Once they disturb half of the repeats, a
    median would move; the shortest time would be an exception.

    >>> undisturbed_ms([1.0, 1.25, 1.5, 8.0, 400.0])
    1.25
    """
    if len(times_ms) == 1:
        return times_ms[0]
    return statistics.quantiles(times_ms, n=4, method="inclusive")[0]


class Interval(NamedTuple):
    """The range of a parameter in nine of ten resamplings; `high` is infinite where nothing bounds it."""

    low: float
    high: float


@dataclass(frozen=True)
class Fit:
    """A fixed cost for each call and a rate, with their intervals.

    Args:
        what: one of `traffic.OPERATIONS` or COMPUTATIONS.
        overhead_us: microseconds for each call, or tensor.
        giga_per_s: 10^9 bytes, or floating-point operations, a second.
        errors: predicted / measured - 1 for each size that was fitted, smallest size first.
    """

    what: str
    overhead_us: float
    overhead_us_interval: Interval
    giga_per_s: float
    giga_per_s_interval: Interval
    errors: tuple[float, ...]

    @property
    def link(self) -> Link:
        """The link of a Cluster, for a collective."""
        return Link(self.overhead_us, self.giga_per_s)

    def ms(self, calls: float, amount: float) -> float:
        """The predicted time."""
        return self.link.ms(calls, amount)


class NoRateError(ValueError):
    """Larger sizes took no longer than small ones, which happens on a busy machine."""


def fit(what: str, samples: Iterable[Sample], *, resamples: int = 200, seed: int = 0) -> Fit:
    """The cost of a call and the rate that explain the times best.

    The `undisturbed_ms` of each size counts, and each size counts alike: the fit minimises the sum of
    relative errors, not of their squares, so that neither one slow size nor the largest decides. No cost is
    negative.

    >>> exact = [Sample(1, nbytes, Link(50, 2).ms(1, nbytes)) for nbytes in (1e3, 1e5, 1e7)]
    >>> fitted = fit("broadcast", exact)
    >>> round(fitted.overhead_us, 6), round(fitted.giga_per_s, 6), max(fitted.errors) < 1e-9
    (50.0, 2.0, True)

    Args:
        what: the name in the result and in errors.
        resamples: how often the bootstrap of the intervals draws repeats of each size and errors of the fit.
        seed: of the bootstrap.
    Raises:
        ValueError: there are not two sizes with different amounts for each call, or larger sizes take no
            longer, so that there is no rate.
    """
    times_of_size: dict[tuple[float, float], list[float]] = {}
    for calls, amount, ms in samples:
        times_of_size.setdefault((calls, amount), []).append(ms)
    sizes = sorted(times_of_size, key=lambda size: size[::-1])
    if len({amount / calls for calls, amount in sizes}) < 2:
        raise ValueError(
            f"{what}: {len(sizes)} size(s) cannot tell the cost of a call from that of its contents: measure "
            "at least two that differ in bytes, or operations, for each call."
        )
    repeats = [times_of_size[size] for size in sizes]
    measured = [undisturbed_ms(times) for times in repeats]
    per_call, per_unit = _least_relative_errors(sizes, measured)
    if per_unit <= 0:
        raise NoRateError(
            f"{what}: {sizes[-1][1]:g} took no longer than {sizes[0][1]:g}, so there is no rate. Measure "
            "larger sizes, more often."
        )
    predicted = [per_call * calls + per_unit * amount for calls, amount in sizes]
    misses = [ms / foreseen for ms, foreseen in zip(measured, predicted)]

    draw = random.Random(seed)
    drawn = [
        _least_relative_errors(
            sizes,
            [undisturbed_ms(draw.choices(times, k=len(times))) * draw.choice(misses) for times in repeats],
        )
        for _ in range(resamples)
    ]
    overheads_us = [1e3 * call for call, _ in drawn]
    rates = [_rate(unit) for _, unit in drawn]
    return Fit(
        what,
        1e3 * per_call,
        _interval(overheads_us, 1e3 * per_call),
        _rate(per_unit),
        _interval(rates, _rate(per_unit)),
        tuple(1 / miss - 1 for miss in misses),
    )


def _rate(ms_per_unit: float) -> float:
    return 1 / (1e6 * ms_per_unit) if ms_per_unit > 0 else math.inf


def _interval(values: Sequence[float], estimate: float) -> Interval:
    ordered = sorted([*values, estimate])
    cut = len(ordered) // 20
    return Interval(min(ordered[cut], estimate), max(ordered[-1 - cut], estimate))


def _least_relative_errors(sizes: Sequence[tuple[float, float]], ms: Sequence[float]) -> tuple[float, float]:
    """Milliseconds for each call, not negative, and for each unit, with the least sum of relative errors.

    Times that shrink as sizes grow give negative milliseconds for each unit. The method is iterated least
    squares, each size weighted by the inverse of its last error.
    """
    largest = max(amount for _, amount in sizes)  # to scale by: the squares of bytes would drown the calls
    rows = [(calls / time, amount / largest / time) for (calls, amount), time in zip(sizes, ms)]
    weights = [1.0] * len(rows)
    per_call = per_unit = 0.0
    for _ in range(40):
        cc = sum(w * c * c for w, (c, _) in zip(weights, rows))
        cu = sum(w * c * u for w, (c, u) in zip(weights, rows))
        uu = sum(w * u * u for w, (_, u) in zip(weights, rows))
        c1 = sum(w * c for w, (c, _) in zip(weights, rows))
        u1 = sum(w * u for w, (_, u) in zip(weights, rows))
        determinant = cc * uu - cu * cu
        if determinant > 0:
            per_call = (c1 * uu - u1 * cu) / determinant
            per_unit = (u1 * cc - c1 * cu) / determinant
        if determinant <= 0 or per_call < 0:
            per_call, per_unit = 0.0, u1 / uu
        # Errors below a thousandth weigh alike: a size that is met exactly must not become infinitely heavy.
        weights = [1 / max(abs(per_call * c + per_unit * u - 1), 1e-3) for c, u in rows]
    return per_call, per_unit / largest


class Prediction(NamedTuple):
    """A size that was not fitted, with its predicted and its measured time.

    Args:
        size: payload bytes of an operation; floating-point operations, or bytes, of a computation.
        measured_ms: `undisturbed_ms` of the repeats.
    """

    what: str
    size: float
    predicted_ms: float
    measured_ms: float

    @property
    def error(self) -> float:
        """Predicted / measured - 1."""
        return self.predicted_ms / self.measured_ms - 1


@dataclass(frozen=True)
class Calibration:
    """A measured machine.

    Args:
        fits: one for each operation, then one for each of COMPUTATIONS.
        held_out: predictions of the sizes that were not fitted.
    """

    cluster: Cluster
    fits: tuple[Fit, ...]
    held_out: tuple[Prediction, ...]

    def error_bound(self, what: str, share: float = 1.0) -> float:
        """The relative error that `share` of the held-out sizes stay within; by default the largest error.

        Raises:
            ValueError: no size of `what` was held out, or the share is not above 0 up to 1.
        """
        errors = sorted(abs(prediction.error) for prediction in self.held_out if prediction.what == what)
        if not errors or not 0 < share <= 1:
            raise ValueError(f"{len(errors)} sizes of {what!r} were held out, share is {share:g}.")
        return errors[math.ceil(share * len(errors)) - 1]


def fit_links(
    measurements: Iterable[Measurement], *, backend: str = "gloo", resamples: int = 200, seed: int = 0
) -> dict[str, Fit]:
    """One fit for each operation that was measured. Args, Raises: as `fit`."""
    samples_of_op: dict[str, list[Sample]] = {}
    for measurement in measurements:
        samples_of_op.setdefault(measurement.op, []).append(measurement.sample(backend))
    if not samples_of_op:
        raise ValueError("no collective was measured: there is nothing to fit.")
    return {op: fit(op, samples, resamples=resamples, seed=seed) for op, samples in samples_of_op.items()}


def fit_device(
    computations: Iterable[Computation],
    name: str = "this machine",
    *,
    resamples: int = 200,
    seed: int = 0,
) -> tuple[Device, dict[str, Fit]]:
    """The device of each rank while all ranks compute, and the fit of each of COMPUTATIONS.

    Raises:
        ValueError: as `fit`; or one of COMPUTATIONS was not measured.
    """
    samples_of_kind: dict[str, list[Sample]] = {kind: [] for kind in COMPUTATIONS}
    for computation in computations:
        samples_of_kind[computation.kind].append(computation.sample())
    for kind, samples in samples_of_kind.items():
        if not samples:
            needed = " and ".join(COMPUTATIONS)
            raise ValueError(f"no {kind!r} was measured ({COMPUTATIONS[kind]}): a device needs {needed}.")
    fits = {
        kind: fit(kind, samples, resamples=resamples, seed=seed) for kind, samples in samples_of_kind.items()
    }
    train, update = fits["train"], fits["update"]
    device = Device(
        name,
        tflops=train.giga_per_s / 1e3,
        reached=1.0,  # the measured rate is what training reached
        memory_gb=None,
        memory_gb_per_s=update.giga_per_s,
        overhead_us=train.overhead_us,
        update_overhead_us=update.overhead_us,
    )
    return device, fits


def calibrate(
    measurements: Sequence[Measurement],
    computations: Sequence[Computation],
    *,
    name: str = "this machine",
    backend: str = "gloo",
    source: str = "",
    resamples: int = 200,
    seed: int = 0,
) -> Calibration:
    """Fit on every other size, the smallest and the largest among them, and predict the others.

    Args:
        measurements, computations: at least three sizes of each operation and kind; repeats are welcome.
        name, source: of the cluster.
        backend: "gloo" for processes of one machine, which share its loopback and its cores, so that they do
            not send while they compute; else "nccl".
    Raises:
        ValueError: too few sizes, or as `fit`.
    """
    used, kept_out = _alternate([(m.op, float(m.nbytes), m) for m in measurements])
    used_computations, computations_out = _alternate([(c.kind, c.amount, c) for c in computations])
    links = fit_links(used, backend=backend, resamples=resamples, seed=seed)
    device, fits_of_kind = fit_device(used_computations, name, resamples=resamples, seed=seed)
    link = next(links[op].link for op in ("exchange", "broadcast", *links) if op in links)
    cluster = Cluster(
        name,
        device,
        ranks_per_node=4096,  # one machine was measured, so no number of ranks fills a second one
        within=link,
        between=link,
        backend=backend,
        shared=backend == "gloo",
        overlaps=backend != "gloo",
        link_of_op={op: fitted.link for op, fitted in links.items()},
        source=source,
    )
    held_out = [
        Prediction(m.op, m.nbytes, cluster.ms(m.op, m.nbytes, m.world_size), m.ms) for m in kept_out
    ] + [
        Prediction(c.kind, c.amount, fits_of_kind[c.kind].ms(c.tensors, c.amount), c.ms)
        for c in computations_out
    ]
    return Calibration(cluster, (*links.values(), *fits_of_kind.values()), _of_repeats(held_out))


def calibrate_from_logs(
    base: Cluster,
    products: Sequence[MeasuredProduct] = (),
    collectives: Sequence[NcclLog] = (),
    *,
    name: str = "measured",
    source: str = "",
    resamples: int = 200,
    seed: int = 0,
) -> Calibration:
    """A cluster with the shares of its device and the links that logs tell; the rest as `base` has it.

    Of each log every other size is fitted, and the sizes in between are predicted, as `calibrate` does. A
    matrix product takes a time for each operation and one for each byte of its matrices, so `fit` serves it:
    the first is the device's `reached`, the other its `product_passes`. A run on one node tells the links
    within, one on several those between, where `base`, or a run on one node, has to tell the others.

    Args:
        base: such as a preset: its peak, its memory, and what no log tells.
        products, collectives: as `logs` reads them.
        name, source: of the cluster.
    Raises:
        ValueError: there is no log, a log has too few sizes, its products are faster than the peak of `base`,
            or as `fit`.
    """
    if not products and not collectives:
        raise ValueError("there are no measured products and no measured collectives: give one at least.")
    how = {"resamples": resamples, "seed": seed}
    fits: list[Fit] = []
    held_out: list[Prediction] = []
    device, made = base.device, replace(base, name=name, source=source)
    if products:
        used, out = _alternate([("product", one.flops, one) for one in products])
        fitted = fit("product", [one.sample() for one in used], **how)
        device = _with_products(device, fitted)
        held_out += [
            Prediction("product", one.flops, device.product_ms(one.flops, one.nbytes), one.ms) for one in out
        ]
        fits.append(fitted)
    by_nodes = sorted(collectives, key=lambda log: log.nodes)
    for log in by_nodes:
        where = "" if log.nodes == 1 else f" on {log.nodes} nodes"
        for op in dict.fromkeys(one.op for one in log.measurements):
            of_op = [(op, float(one.nbytes), one) for one in log.measurements if one.op == op]
            timed, out_of_op = _alternate(of_op)
            fitted = fit(op + where, [_of_link(one, log) for one in timed], **how)
            made = _with_link(made, op, fitted, log)
            held_out += [
                Prediction(op + where, one.nbytes, made.ms(op, one.nbytes, one.world_size), one.ms)
                for one in out_of_op
            ]
            fits.append(fitted)
    return Calibration(replace(made, device=device), tuple(fits), _of_repeats(held_out))


def _with_products(device: Device, fitted: Fit) -> Device:
    reached = fitted.giga_per_s / 1e3 / device.tflops
    if reached > 1:
        raise ValueError(
            f"the products reach {fitted.giga_per_s / 1e3:.4g} TFLOPS, more than the {device.tflops:g} that "
            f"{device.name} has at its peak: name the cluster that they were measured on."
        )
    per_megabyte_ms = fitted.overhead_us / 1e3
    return replace(device, reached=reached, product_passes=per_megabyte_ms / device.touch_ms(1e6))


def _of_link(one: Measurement, log: NcclLog) -> Sample:
    """The rounds, and the bytes that leave a rank, or of several nodes a card, as a ring sends them."""
    load = traffic(one.op, one.nbytes, one.world_size)
    return Sample(load.rounds, load.busiest_bytes / log.cards, one.ms)


def _with_link(made: Cluster, op: str, fitted: Fit, log: NcclLog) -> Cluster:
    """The links with what one log tells. Its latency holds everything: protocols, and what a call takes."""
    made = replace(made, protocols=(), call_us=0.0)
    if log.nodes == 1:
        return replace(
            made,
            within=fitted.link,
            ranks_per_node=log.ranks,
            link_of_op={**made.link_of_op, op: fitted.link},
        )
    # Of a ring's rounds one in so many leaves a node; the others are within.
    a_node = log.ranks / log.nodes
    within = made.link_of_op.get(op, made.within).latency_us
    outside_us = max(0.0, fitted.overhead_us * a_node - within * (a_node - 1))
    return replace(made, between=Link(outside_us, fitted.giga_per_s), ranks_per_node=round(a_node))


def _alternate(named: Sequence[tuple[str, float, T]]) -> tuple[list[T], list[T]]:
    """The values to fit, and those of every other size between the smallest and the largest, by name."""
    held_out: set[tuple[str, float]] = set()
    for what in {what for what, _, _ in named}:
        sizes = sorted({size for name, size, _ in named if name == what})
        if len(sizes) < 3:
            raise ValueError(
                f"{what}: {len(sizes)} sizes; it takes 3 or more to fit some and predict others."
            )
        held_out |= {(what, size) for size in sizes[1:-1:2]}
    return (
        [value for what, size, value in named if (what, size) not in held_out],
        [value for what, size, value in named if (what, size) in held_out],
    )


def _of_repeats(predictions: Sequence[Prediction]) -> tuple[Prediction, ...]:
    """One prediction for each size, with the time that its repeats agree on."""
    times: dict[tuple[str, float, float], list[float]] = {}
    for what, size, predicted_ms, measured_ms in predictions:
        times.setdefault((what, size, predicted_ms), []).append(measured_ms)
    return tuple(Prediction(*key, undisturbed_ms(ms)) for key, ms in times.items())
