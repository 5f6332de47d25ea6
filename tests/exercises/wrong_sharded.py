"""Chapter 7: answers that a reader may give, as changes of the solution, and what the check must say."""

from __future__ import annotations

REST = "list(range(next_one, count))"
IN_ORDER = "while next_one in full"
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
    "sharded.ring": [
        ("begins_with_its_own",
         {"range(1, size)": "range(size - 1)", "return shares[rank]": "return shares[after]"},
         r"sum of share 1, which rank 1 is to have.*must a rank send first"),
        ("begins_with_its_own_and_returns_its_own", {"range(1, size)": "range(size - 1)"},
         r"It sends share 0 first\. .* here rank 2, which is to have share 2"),
        ("begins_one_further", {"rank - distance": "rank - distance - 1"},
         r"It sends share 1 first\. .* which is to have share 2"),
        ("passes_on_without_adding", {"+= received": "= received.clone()"},
         r"sum of 1 of 3 parts.*Add what arrives to this rank's part"),
        ("to_each_owner",
         {"sent =": "after, before = (rank - distance) % size, (rank + distance) % size\n        sent =",
          "shares[(rank - distance - 1) % size]": "shares[rank]"},
         r"sent to rank 2. In a ring a rank sends to the next one only"),
        ("one_round_more", {"range(1, size)": "range(1, size + 1)"}, r"sent 3 messages.*so a rank sends 2"),
        ("everything_each_round",
         {"torch.empty_like(shares[rank])": "torch.empty_like(torch.stack(shares))",
          "sent = shares[(rank - distance) % size]": "sent = torch.stack(shares)",
          "shares[(rank - distance - 1) % size] += received": "shares[rank] += received[rank]"},
         r"sent a message of 72 bytes. A share has 24"),
        ("asks_for_an_all_reduce",
         {"    received": "    comm.all_reduce(shares[rank]).wait()\n    return shares[rank]\n    received"},
         r"called all_reduce. Write it from messages"),
        ("all_shares", {"return shares[rank]": "return shares"}, r"must return a tensor as large as a share"),
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
