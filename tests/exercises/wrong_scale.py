"""Chapter 14: answers that a reader may give, each with a part of the message that must meet them."""

from __future__ import annotations

from statistics import median
from typing import Any

from zero_ref.simulator.calibrate import Sample, fit
from zero_ref.simulator.scenario import Scenario
from zero_ref_course.scale import Design, Job, step_ms

Points = list[tuple[float, float]]


def _as_link(slope: float, start: float) -> tuple[float, float]:
    return 1e3 * start, 1e-6 / slope


def _line(points: Points) -> tuple[float, float]:
    """Least squares: milliseconds a byte, and milliseconds of a message without bytes."""
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points))
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    return slope, mean_y - slope * mean_x


def least_squares(points: Points) -> tuple[float, float]:
    return _as_link(*_line(points))


def least_squares_without_the_worst(points: Points) -> tuple[float, float]:
    slope, start = _line(points)
    worst = max(points, key=lambda point: abs(slope * point[0] + start - point[1]))
    slope, start = _line([point for point in points if point != worst])
    return _as_link(slope, max(start, 0.001))


def no_latency(points: Points) -> tuple[float, float]:
    return 0.0, 1 / median(ms * 1e6 / nbytes for nbytes, ms in sorted(points)[-6:])


def two_points(points: Points) -> tuple[float, float]:
    (small, first), *_, (large, last) = sorted(points)
    slope = (last - first) / (large - small)
    return _as_link(slope, first - slope * small)


def in_milliseconds(points: Points) -> tuple[float, float]:
    link = fit("link", [Sample(1, *point) for point in points], resamples=0).link
    return link.latency_us / 1e3, link.gb_per_s


def in_megabytes(points: Points) -> tuple[float, float]:
    link = fit("link", [Sample(1, *point) for point in points], resamples=0).link
    return link.latency_us, 1e3 * link.gb_per_s


def a_link(points: Points) -> Any:
    return fit("link", [Sample(1, *point) for point in points], resamples=0).link


def stage_1(job: Job) -> Design:
    return Design(1024, "zero-even", "full")


def forgets_activations(job: Job) -> Design:
    return Design(2048, "zero-3", "none", prefetch=0)


def fits_perhaps(job: Job) -> Design:
    return Design(2048 if job.model == "zero-1t" else 256, "zero-3", "full", prefetch=1)


def too_many_gpus(job: Job) -> Design:
    return Design(job.sequences, "zero-3", "full", prefetch=0)


def a_rank_without_a_sequence(job: Job) -> Design:
    return Design(4 * job.sequences, "zero-3", "full")


def too_few_gpus(job: Job) -> Design:
    return Design(2048 if job.model == "zero-1t" else 128, "zero-3", "full", prefetch=0)


def only_the_ranks(job: Job) -> Any:
    return job.sequences


def as_many_as_there_are(scenario: Scenario, sequences: int) -> int:
    return sequences


def sequences_not_divided(scenario: Scenario, sequences: int) -> int:
    return min(
        (2**power for power in range(sequences.bit_length())), key=lambda n: step_ms(scenario, n, sequences)
    )


def where_half_is_saved(scenario: Scenario, sequences: int) -> int:
    n = 1
    while n < sequences and step_ms(scenario, 2 * n, sequences // (2 * n)) <= 0.55 * step_ms(
        scenario, n, sequences // n
    ):
        n *= 2
    return n


WRONG = [
    ("scale.fit_link", least_squares, r"a latency of -.* Make relative errors small|outlier decide"),
    ("scale.fit_link", least_squares_without_the_worst, r"The bandwidth is right and the latency is not"),
    ("scale.fit_link", no_latency, r"A message costs time before its first byte"),
    ("scale.fit_link", two_points, r"Did the outlier decide\?"),
    ("scale.fit_link", in_milliseconds, r"right in milliseconds. Return microseconds"),
    ("scale.fit_link", in_megabytes, r"right in MB/s. Return GB/s"),
    ("scale.fit_link", a_link, r"Return two numbers: the latency in microseconds, the bandwidth in GB/s"),
    (
        "scale.design",
        stage_1,
        r"does not fit in memory. A rank needs \d,\d\d\d\.\d GB.*keep all parameters on every rank",
    ),
    ("scale.design", forgets_activations, r"it does not fit in memory.*Activations do not shrink"),
    (
        "scale.design",
        fits_perhaps,
        r"whether it fits is undecided.*What is gathered ahead takes memory",
    ),
    (
        "scale.design",
        too_many_gpus,
        r"costs too much. An iteration takes \d\.\d\d GPU-hours, \d+% over the 2.5 allowed",
    ),
    ("scale.design", a_rank_without_a_sequence, r"2,048 sequences cannot be divided among 8,192 ranks"),
    ("scale.design", too_few_gpus, r"too slow. An iteration takes 5\d\.\d s, 1\d\.\d s more"),
    ("scale.design", only_the_ranks, r"Return a Design"),
    ("scale.largest_number_that_helps", as_many_as_there_are, r"hardly anything left to compute"),
    ("scale.largest_number_that_helps", sequences_not_divided, r"Here the sequences are divided"),
    ("scale.largest_number_that_helps", where_half_is_saved, r"so adding GPUs still helps"),
]
