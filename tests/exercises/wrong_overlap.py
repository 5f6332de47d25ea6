"""Chapter 6: answers that a reader may give, as changes of the solution, and what the check must say."""

from __future__ import annotations

SIZE = "nbytes / min(range(1, 200), key=iteration_ms)"
SEND_BEFORE = "        if number > 0:\n            calls += sent(buckets[number - 1])\n"
SEND_LAST = " + sent(buckets[-1])"
IN_ORDER_OF_OWNERS = """            for owner, slices in enumerate(partition.slices_of_rank)
            for piece in slices
            if piece.param in bucket
"""
START = "    so_far[-1].start_reduction()\n"
READY = "so_far[-2:] if is_last else so_far[-2:-1]"
FINISH = "        bucket.wait_for_reduction()\n        bucket.step()\n        bucket.start_broadcast()\n"
WAIT = "    if is_last:\n        for bucket in so_far:\n            bucket.wait_for_broadcast()"

CHANGED = {
    "overlap.bucket_size": [
        ("as_ddp_does", {SIZE: "25 * 2**20"}, r"calls pays the latency of 2 ms: the buckets are too small"),
        ("one_bucket", {SIZE: "nbytes"}, r"after backward, and nothing hides its .* too large"),
        ("as_small_as_can_be", {SIZE: "nbytes / 5000"}, r"too small"),
        ("where_latency_is_half", {SIZE: "latency_ms * gb_per_s * 1e6"}, r"too small"),
        ("how_many", {SIZE: "round((backward_ms / latency_ms / 2) ** 0.5)"}, r"not the number of buckets"),
        ("below_nothing", {SIZE: "nbytes - 1e9"}, r"a number of bytes above 0"),
    ],
    "overlap.interleaved_calls": [
        ("all_sent_at_the_end", {SEND_BEFORE: "", SEND_LAST: " + sent(sum(buckets, []))"},
         r"That is hook_with_zero_step;"),
        ("each_sent_at_once", {SEND_BEFORE: "        calls += sent(bucket)\n", SEND_LAST: ""},
         r"own reduction at once"),
        ("without_the_last", {SEND_LAST: ""}, r"last bucket has to be sent too"),
        ("in_elements", {"4 * ": ""}, r"Each has 4 bytes"),
        ("in_the_buckets_order",
         {IN_ORDER_OF_OWNERS: "for param in bucket for piece, owner in partition.pieces_of_param[param]\n"},
         r"not in its place: within a bucket broadcasts go owner"),
        ("first_layers_first", {"    calls = []": "    buckets = buckets[::-1]\n    calls = []"},
         r"opposite order"),
        ("one_more_broadcast", {SEND_LAST: SEND_LAST + SEND_LAST + "[-1:]"},
         r"should be the end, and is Call"),
        ("names_only", {"return calls" + SEND_LAST: 'return ["all_reduce", "broadcast"] * len(buckets)'},
         r"must return a list of calls"),
    ],
    "overlap.on_bucket": [
        ("waits_at_once", {READY: "so_far[-1:]"}, r"that it has just started"),
        ("forgets_the_last", {READY: "so_far[-2:-1]", "in so_far:": "in so_far[:-1]:"},
         r"bucket 5 was reduced, but never stepped. Its update is lost"),
        ("never_waits_for_the_sum", {READY: "so_far[-1:]", "        bucket.wait_for_reduction()\n": ""},
         r"step\(\) of bucket 0 comes too early: .* half a sum"),
        ("sends_before_it_steps",
         {"step()\n        bucket.start_broadcast()": "start_broadcast()\n        bucket.step()"},
         r"old values would be sent"),
        ("all_at_the_end", {READY: "so_far if is_last else []"},
         r"No bucket is updated before the last one is ready"),
        ("leaves_before_all_is_there", {WAIT: ""}, r"Backward returns before its new values"),
        ("finishes_first",
         {START: "    for bucket in so_far[-2:-1]:\n" + FINISH + START,
          READY: "so_far[-1:] if is_last else []"},
         r"start its reduction first"),
        ("waits_for_each_message", {FINISH: FINISH + "        bucket.wait_for_broadcast()\n", WAIT: ""},
         r"waits for broadcasts while backward could go on"),
        ("reduces_all_again", {START: "    for bucket in so_far:\n        bucket.start_reduction()\n"},
         r"start_reduction\(\) of bucket 0 is called a second time"),
        ("forgets_rank_1",
         {"        bucket.step()": "        if dist.is_initialized() and dist.get_rank() == 1:\n"
                                 "            bucket.flat *= 2\n        bucket.step()"},
         r"than plain Adam after iteration 1.*the same on every rank"),
    ],
}  # fmt: skip
