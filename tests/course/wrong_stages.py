"""Chapter 8: answers that a reader may give, as changes of the solution, and what the check must say."""

from __future__ import annotations

PART_OF_OTHERS = "(world_size - 1) / world_size"
REDUCE_SCATTER = '2 if backend == "gloo" else 1'
TOKENS = "gather_s / token_s"

CHANGED = {
    "stages.volume": [
        ("the_second_gather_forgotten", {"3: 2 +": "3: 1 +"},
         r"\(3, .*let go after its forward. What does its backward need"),
        ("its_own_part_too", {PART_OF_OTHERS: "(world_size > 1)"}, r"has 1/8 itself, and does not send it"),
        ("as_on_nccl", {REDUCE_SCATTER: "1"}, r"'gloo'\).* a reduce-scatter is an all-reduce inside"),
        ("as_on_gloo", {REDUCE_SCATTER: "2"}, r"'nccl'\).* Only Gloo makes an all-reduce"),
        ("in_elements", {" * itemsize": ""}, r"These are elements. Each has 4 bytes"),
        ("of_all_ranks", {" / world_size": ""}, r"bytes of all ranks together"),
        ("owners_at_stage_1", {"1: 2 + 1": "1: 1 + 1"},
         r"every rank still gets all averaged gradients"),
        ("all_reduced_at_stage_2", {"2: 1 + 1": "2: 2 + 1"}, r"At stage 2 gradients are reduced to shares"),
        ("as_torch_on_gloo_at_stage_2", {"2: 1 + 1": "2: reduce_scatter + 1"},
         r"\(2, .*'gloo'\).* On Gloo too: there the package has a reduce-scatter of its own"),
        ("less_each_stage", {"movements[stage]": "(4 - stage) / 2"}, r"Yours is 1\.5 times .* how often"),
    ],
    "stages.break_even": [
        ("all_traffic_in_forward", {TOKENS: "3 * " + TOKENS}, r"one gather of each block, and nothing else"),
        ("in_thousands", {TOKENS: TOKENS + " / 1000"},
         r"too few.* hides if the block before it computes for as long"),
        ("no_tokens", {TOKENS: "0.0"}, r"number of tokens above 0"),
    ],
}  # fmt: skip
