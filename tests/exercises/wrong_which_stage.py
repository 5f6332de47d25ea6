"""Chapter 9: answers that a reader may give, as changes of the solution, and what the check must say."""

from __future__ import annotations

ROOM = "        passes = [sum(passes)]\n"
WAY = 'way="stage 2, no_sync"'

CHANGED = {
    "which_stage.update_share": [
        ("reduces_each_pass", {ROOM: "        pass\n"},
         r"5 passes and room for 12 .* made 5 reductions, .*5 times as many bytes"),
        ("always_whole", {"room >= numel": "True"},
         r"room for 11 elements.* made 1 reduction of 5 passes: a whole gradient was kept"),
        ("not_averaged", {" / (size * count)": ""}, r"the sum over ranks and passes"),
        ("averaged_over_ranks_only", {"size * count": "size"}, r"mean over ranks, and the sum over passes"),
        ("averaged_over_passes_only", {"size * count": "count"}, r"mean over passes, and the sum over ranks"),
        ("the_last_pass", {"total += share": "total = share * len(passes)"}, r"the mean of one pass alone"),
        ("all_reduced",
         {"comm.reduce_shares(gradient, share).wait()":
              "comm.all_reduce(gradient).wait()\n        mine = slice(comm.rank * numel // size, None)\n"
              "        share.copy_(gradient[mine][: numel // size])"},
         r"called all_reduce. An all-reduce moves everything twice"),
        ("all_of_it", {"return total": "return sum(passes)"}, r"return a tensor of 4 elements"),
    ],
    "which_stage.advise": [
        ("without_buckets", {"18 *": "16 *"}, r"fit whole.*No: 73.2 GB of 70"),
        ("all_of_a_gather_arrives", {"(c.ranks - 1) / c.ranks": "1"},
         r"Does a pass hide what all ranks gather\? Yes: 3,500 tokens of a pass, and 3,429 needed"),
        ("in_millions_of_tokens", {"1e3 * c.tflops / c.gb_per_s *": "c.tflops / c.gb_per_s *"},
         r"Does a pass hide what all ranks gather\? No: 2,048 tokens of a pass, and 4,500 needed"),
        ("tokens_of_a_pass_for_the_update", {"c.tokens * c.passes": "c.tokens"},
         r"16,384 tokens of an update, and 11,822 needed"),
        ("any_number_of_passes", {"c.passes > 1 and ": ""}, r"several passes.*No: 1 pass;"),
        ("forgets_shares_of_gradients", {"4 + 14 / c.ranks": "4 + 12 / c.ranks"},
         r"whole gradients fit\? No: 4 passes; 71.4 GB of 70"),
        ("a_node_is_enough_for_a_hybrid", {"several and ": ""},
         r"hybrid.*(do not fill several nodes|tree leads to 'stage 3')"),
        ("always_fsdp", {'"beyond ZeRO"\n': '"beyond ZeRO"\n    return "stage 3"\n'},
         r"returned 'stage 3'; the tree leads to 'DDP'. Does it fit whole, and is the step short\? Yes"),
        ("in_other_words", {'return "stage 3"': 'return "FSDP"'}, r"must return one of 'DDP'"),
    ],
    "which_stage.choice": [
        ("ddp", {WAY: 'way="DDP"'}, r"DDP, which needs 195.4 GB on a rank, of 85.9. It does not surely fit"),
        ("as_proposed", {WAY: 'way="stage 3"'},
         r"takes 10.1 s, and there is a way .* takes 6.4 s.* sends 23.0 times.* sent again in each of the 8"),
        ("no_way", {WAY: 'way="FSDP"'}, r"chooses 'FSDP'. Choose one of 'DDP', 'stage 1'"),
        ("in_bytes", {"memory_gb=42.2": "memory_gb=42.2e9"}, r"memory_gb is 4.22e\+10. These are bytes"),
        ("in_milliseconds", {"update_s=6.4": "update_s=6447"}, r"update_s is 6447. These are milliseconds"),
        ("of_one_pass", {"update_s=6.4": "update_s=0.8"}, r"update_s is 0.8. That is of a pass"),
        ("tokens_in_a_node", {"tokens_needed=4515": "tokens_needed=673"}, r"what a node's ranks need"),
        ("guessed", {"update_s_of_stage_3=10.1": "update_s_of_stage_3=7.5"},
         r"update_s_of_stage_3 is 7.5. The simulator does not say so"),
        ("without_a_reason", {"because=": 'because="It is better." or '}, r"Write a sentence of 12 words"),
        ("without_a_number",
         {"because=": 'because="Everybody says that it is the best way to train, and so we all agree." or '},
         r"has no number in it. Which one decides"),
        ("a_word", {"return Choice(": 'return "stage 2, no_sync" or Choice('}, r"Return a Choice"),
    ],
}  # fmt: skip
