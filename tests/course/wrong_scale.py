"""Chapter 16: answers that a reader may give, as changes of the solution, and what the check must say."""

from __future__ import annotations

SEARCH = "    for power in range(8"

CHANGED = {
    "scale.design": [
        ("stage_1", {SEARCH: '    return Design(1024, "zero-even", "full")\n' + SEARCH},
         r"does not fit in memory. A rank needs \d,\d\d\d\.\d GB.*keep all parameters on every rank"),
        ("forgets_activations", {SEARCH: '    return Design(1024, "zero-3", "none", prefetch=0)\n' + SEARCH},
         r"it does not fit in memory.*Activations do not shrink"),
        ("fits_perhaps",
         {SEARCH: '    return Design(512, "zero-3", "full", prefetch=1)\n' + SEARCH},
         r"whether it fits is undecided.*More ranks hold less each"),
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
