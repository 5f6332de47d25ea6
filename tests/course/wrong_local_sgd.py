"""Chapter 17: answers that a reader may give, as changes of the solution, and what the check must say."""

from __future__ import annotations

REDUCE = "    comm.all_reduce(flat).wait()\n"
COPY = "param.detach().copy_(mean.view_as(param))"

CHANGED = {
    "local_sgd.equal_after": [
        ("always_from_the_warm_up", {" if from_warmup else 0": ""},
         r"has step 2. After it the ranks are not equal.*from step 0"),
        ("forgets_the_warm_up", {"step < warmup_steps or": "step >= warmup_steps and"},
         r"leaves out step 0.*belongs to the warm-up"),
        ("after_a_whole_period", {"step - origin": "step + 1 - origin"},
         r"leaves out step 0.*it ends with an average"),
        ("how_many", {"return equal": "return len(equal)"}, r"must return a list of steps"),
    ],
    "local_sgd.bytes_sent": [
        ("without_the_warm_up", {"of_gradients + ": ""}, r"2 of gradients in the warm-up"),
        ("the_payload", {"2 * (world_size - 1) / world_size * nbytes": "nbytes"}, r"2/2 of them|6/4 of them"),
        ("over_all_ranks", {" / world_size": ""}, r"All ranks together send"),
    ],
    "local_sgd.average": [
        ("forgets_to_divide", {"    flat /= comm.world_size\n": ""},
         r"the sum of all ranks', not their mean"),
        ("forgets_to_copy_back", {COPY: "pass"}, r"is what it was before"),
        ("one_call_each", {REDUCE: "", COPY: "comm.all_reduce(mean).wait()\n        " + COPY},
         r"makes 4 calls, 4 of them all-reduces"),
        ("gives_them_new_memory", {COPY: "param.data = mean.view_as(param)"}, r"other memory than before"),
        ("averages_the_gradients", {"param.detach().reshape": "param.grad.reshape"},
         r"is not the mean of all ranks'"),
    ],
}  # fmt: skip
