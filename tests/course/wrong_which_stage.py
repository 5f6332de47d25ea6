"""Chapter 9: answers that a reader may give, as changes of the solution, and what the check must say."""

from __future__ import annotations

WAY = 'way="stage 2, no_sync"'

CHANGED = {
    "which_stage.advise": [
        ("in_millions_of_tokens",
         {"needed = tokens_to_hide(c.tflops, c.gb_per_s, n)": "needed = c.tflops / c.gb_per_s * (n - 1) / n"},
         r"returned 'stage 3'; the tree leads to 'hybrid'. .*inside a node pay\? Yes: 1 pass; 28.0 GB of 70"),
        ("any_number_of_passes", {"c.passes > 1 and fits": "fits"}, r"several passes.*No: 1 pass;"),
        ("a_node_is_enough_for_a_hybrid", {"several_nodes and ": ""},
         r"inside a node pay.*No: (\d+ ranks do not fill several nodes)"),
        ("always_fsdp", {'"beyond ZeRO"\n': '"beyond ZeRO"\n    return "stage 3"\n'},
         r"returned 'stage 3'; the tree leads to 'DDP'. .* to gain by dividing\? Yes: 19.2 GB of 70"),
    ],
    "which_stage.choice": [
        ("ddp", {WAY: 'way="DDP"'}, r"DDP, which needs 183.5 GB on a rank, of 85.9. It does not surely fit"),
        ("as_proposed", {WAY: 'way="stage 3"'},
         r"takes 10.1 s, and there is a way .* takes 6.4 s.* sends 23.0 times.* sent again in each of the 8"),
        ("no_way", {WAY: 'way="FSDP"'}, r"chooses 'FSDP'. Choose one of 'DDP', 'stage 1'"),
        ("of_one_pass", {"update_s=6.4": "update_s=0.8"}, r"update_s is 0.8. That is of a pass"),
        ("without_a_reason", {"because=": 'because="It is better." or '}, r"Write a sentence of 12 words"),
        ("without_a_number",
         {"because=": 'because="Everybody says that it is the best way to train, and so we all agree." or '},
         r"has no number in it. Which one decides"),
    ],
}  # fmt: skip
