"""Chapter 16: answers that a reader may give, as changes of the solution, and what the check must say."""

from __future__ import annotations

CHOSEN = "_, start, slope = min(lines)"
LEAST_SQUARES = (
    "from statistics import linear_regression\n\n    slope, start = linear_regression(*zip(*points))"
)
WITHOUT_THE_WORST = """
    worst = max(points, key=lambda point: abs(slope * point[0] + start - point[1]))
    slope, start = linear_regression(*zip(*(point for point in points if point != worst)))
    start = max(start, 0.001)"""
LATENCY, BANDWIDTH = "1e3 * start", "1e-6 / slope"
SEARCH = "    for power in range(8"

CHANGED = {
    "scale.fit_link": [
        ("least_squares", {CHOSEN: LEAST_SQUARES},
         r"a latency of -.* Make relative errors small|outlier decide"),
        ("least_squares_without_the_worst", {CHOSEN: LEAST_SQUARES + WITHOUT_THE_WORST},
         r"The bandwidth is right and the latency is not"),
        ("no_latency",
         {LATENCY: "0.0", BANDWIDTH: "1 / fmean(ms * 1e6 / nbytes for nbytes, ms in sorted(points)[-6:])"},
         r"A message costs time before its first byte"),
        ("two_points",
         {"combinations(points, 2)": "[(min(points), max(points))]", "slope > 0 and start >= 0": "True"},
         r"Did the outlier decide\?"),
        ("in_milliseconds", {LATENCY: "start"}, r"right in milliseconds. Return microseconds"),
        ("in_megabytes", {BANDWIDTH: "1e-3 / slope"}, r"right in MB/s. Return GB/s"),
        ("a_link",
         {f"return {LATENCY}, {BANDWIDTH}":
              f"from zero_ref.simulator.cluster import Link\n\n    return Link({LATENCY}, {BANDWIDTH})"},
         r"Return two numbers: the latency in microseconds, the bandwidth in GB/s"),
    ],
    "scale.design": [
        ("stage_1", {SEARCH: '    return Design(1024, "zero-even", "full")\n' + SEARCH},
         r"does not fit in memory. A rank needs \d,\d\d\d\.\d GB.*keep all parameters on every rank"),
        ("forgets_activations", {SEARCH: '    return Design(1024, "zero-3", "none", prefetch=0)\n' + SEARCH},
         r"it does not fit in memory.*Activations do not shrink"),
        ("fits_perhaps",
         {SEARCH: '    n = 1024 if job.model == "zero-1t" else 256\n'
                  '    return Design(n, "zero-3", "full", prefetch=2)\n' + SEARCH},
         r"whether it fits is undecided.*What is gathered ahead takes memory"),
        ("too_many_gpus",
         {SEARCH: '    return Design(job.sequences, "zero-3", "full", prefetch=1)\n' + SEARCH},
         r"costs too much. An iteration takes \d\.\d\d GPU-hours, \d+% over the 2.5 allowed"),
        ("a_rank_without_a_sequence",
         {SEARCH: '    return Design(4 * job.sequences, "zero-3", "full")\n' + SEARCH},
         r"1,024 sequences cannot be divided among 4,096 ranks"),
        ("gathers_nothing_ahead",
         {SEARCH: '    n, ahead = (1024, 1) if job.model == "zero-1t" else (256, 0)\n'
                  '    return Design(n, "zero-3", "full", ahead)\n' + SEARCH},
         r"too slow. An iteration takes 3\d\.\d s, \d\.\d s more"),
    ],
    "scale.largest_number_that_helps": [
        ("as_many_as_there_are", {"return n": "return sequences"}, r"hardly anything left to compute"),
        ("sequences_not_divided",
         {"=sequences // n": "=sequences",
          "n = 1": "return min((2**power for power in range(sequences.bit_length())), key=ms)"},
         r"Here the sequences are divided"),
        ("where_half_is_saved", {"0.9": "0.55"}, r"so adding GPUs still helps"),
    ],
}  # fmt: skip
