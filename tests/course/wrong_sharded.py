"""Chapter 7: answers that a reader may give, as changes of the solution, and what the check must say."""

from __future__ import annotations

REST = "list(range(next_one, count))"
IN_ORDER = "while next_one in full"
WEIGHED = "sum(gradient * tokens for gradient, tokens in passes)"
COUNTED = "    comm.all_reduce(count).wait()\n"

CHANGED = {
    "sharded.reduce_in_order": [
        ("as_they_come",
         {"*started": "*([bucket] for bucket in ready)",
          REST: "[bucket for bucket in range(count) if bucket not in ready]"},
         r"another order would start others"),
        ("only_the_one_that_came", {IN_ORDER: "if next_one == bucket"},
         r"may start earlier.* may let several start"),
        ("nothing_at_the_end", {", " + REST: ""}, r"a moment more: when backward ends"),
        ("unused_never", {REST: "[bucket for bucket in range(next_one, count) if bucket in ready]"},
         r"Bucket 2 is never reduced.* reduced with zeros"),
        ("all_up_to_it", {IN_ORDER: "while next_one <= bucket"},
         r"Bucket 0 is reduced when bucket 1 becomes full, and it is not"),
        ("again_at_the_end", {REST: "list(range(count))"}, r"Bucket 0 is reduced twice"),
    ],
    "sharded.token_mean": [
        ("takes_passes_as_equal",
         {WEIGHED: "sum(gradient for gradient, _ in passes)",
          "float(sum(tokens for _, tokens in passes))": "float(len(passes))"},
         r"returned .* as if each had as many tokens"),
        ("takes_ranks_as_equal",
         {WEIGHED: WEIGHED + " / sum(tokens for _, tokens in passes)",
          COUNTED: "    count = torch.tensor([float(comm.world_size)])\n"},
         r"then takes the ranks as equal"),
        ("divides_by_its_own_tokens", {COUNTED: ""}, r"divides by this rank's own tokens"),
        ("never_divides", {"share / count": "share"}, r"the sum over all tokens"),
        ("all_reduces", {"    share = torch.empty(total.numel() // comm.world_size)\n"
                         "    comm.reduce_shares(total, share).wait()\n":
                         "    comm.all_reduce(total).wait()\n"
                         "    share = total.view(comm.world_size, -1)[comm.rank]\n"},
         r"sent whole gradients by all_reduce\. One comm\.reduce_shares"),
        ("whole", {"return share / count": "return total / count"}, r"must return a tensor of 4 elements"),
    ],
}  # fmt: skip
