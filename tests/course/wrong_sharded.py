"""Chapter 7: answers that a reader may give, as changes of the solution, and what the check must say."""

from __future__ import annotations

REST = "list(range(next_one, count))"
IN_ORDER = "while next_one in full"
WITHIN = "    within.reduce_shares(flat, share).wait()\n"
BETWEEN = "    between.all_reduce(share).wait()\n"
FOR_OWNERS = "2 * nbytes / shard_group * (groups - 1) / groups"

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
    "sharded.reduce_in_groups": [
        ("all_gradients_between",
         {BETWEEN: "", "    share = torch": "    between.all_reduce(flat).wait()\n    share = torch"},
         r"sends 48 bytes between groups; 24 are enough, one share"),
        ("all_reduces_within",
         {WITHIN: "    within.all_reduce(flat).wait()\n"
                  "    share = flat.chunk(within.world_size)[within.rank]\n"},
         r"calls all_reduce within the group.* half as many bytes as an all-reduce"),
        ("whole_gradients", {"return share": "return torch.cat([share] * within.world_size)"},
         r"must return this rank's share, 6 of 12 elements"),
        ("only_the_first_group_calls", {BETWEEN: "    if within.rank == 0:\n    " + BETWEEN},
         r"mean over this rank's group alone|returns other values"),
        ("one_of_a_place_calls", {BETWEEN: "    if between.rank == 0:\n    " + BETWEEN},
         r"ranks wait for each other.*Every rank makes the same calls"),
    ],
    "sharded.hybrid_bytes": [
        ("only_the_reduction", {"within = 2 * nbytes": "within = nbytes"},
         r"new parameters are gathered too"),
        ("all_gradients_between", {"nbytes / shard_group *": "nbytes *"}, r"only this rank's share travels"),
        ("one_way_between", {"within, 2 * nbytes": "within, nbytes"}, r"so it moves twice"),
        ("among_all_ranks", {"(shard_group - 1) / shard_group": "(world_size - 1) / world_size"},
         r"go around the ranks of the group, and not around all"),
        ("all_ranks_between", {"(groups - 1) / groups": "(world_size - 1) / world_size"},
         r"as there are groups, not all ranks"),
        ("its_own_part_between", {" * (groups - 1) / groups": ""},
         r"does not send its own part of the ring's"),
        ("the_other_way_round", {f"within, {FOR_OWNERS}": f"{FOR_OWNERS}, within"}, r"in the other order"),
    ],
}  # fmt: skip
