"""Chapter 7: answers that a reader may give, as changes of the solution, and what the check must say."""

from __future__ import annotations

REST = "list(range(next_one, count))"
IN_ORDER = "while next_one in full"
REDUCED = "comm.reduce_shares(flat, share).wait()"
TOTAL = "total / (len(micro_batches) * comm.world_size)"
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
        ("all_at_the_end", {IN_ORDER: "while False"}, r"may start earlier"),
        ("again_at_the_end", {REST: "list(range(count))"}, r"Bucket 0 is reduced twice"),
        ("one_list", {f"[*started, {REST}]": "list(range(count))"}, r"must return a list of lists"),
    ],
    "sharded.accumulate": [
        ("reduces_once",
         {"        share =": "        total = total + flat\n    if 1:\n        flat = total\n        share =",
          "total = total + share\n": "total = share\n"},
         r"reduces once, after the last micro-batch.* as stage 1 does"),
        ("all_backwards_first",
         {"for run in micro_batches:\n        flat = run()": "for flat in [run() for run in micro_batches]:"},
         r"runs the next backward before the gradients of the last one are reduced"),
        ("adds_up", {TOTAL: "total"}, r"sum over ranks and micro-batches. Divide by both"),
        ("divides_by_micro_batches", {TOTAL: "total / len(micro_batches)"}, r"not divided by the 2 ranks"),
        ("divides_by_ranks", {TOTAL: "total / comm.world_size"}, r"not divided by the 3 micro-batches"),
        ("the_last_alone", {"total = total + share": "total = share"}, r"has the last micro-batch alone"),
        ("all_reduces",
         {REDUCED: "comm.all_reduce(flat).wait()\n        share = flat.chunk(comm.world_size)[comm.rank]"},
         r"called all_reduce. Reduce to shares"),
        ("whole_gradients", {"return total": "return torch.cat([total] * comm.world_size)"},
         r"must return this rank's share, 6 of 12 elements"),
        ("rank_0_reduces_more",
         {"    return total": f"    if comm.rank == 0:\n        {REDUCED}\n    return total"},
         r"ranks wait for each other.* reduces after each micro-batch"),
        ("runs_twice", {"flat = run()": "run()\n        flat = run()"},
         r"ran 6 backwards. Each micro-batch is run once"),
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
        ("in_all", {"within, 2": "within + 2"}, r"must return two numbers"),
    ],
}  # fmt: skip
