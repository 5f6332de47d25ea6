"""Chapter 6: answers that a reader may give, as changes of the solution, and what the check must say."""

from __future__ import annotations

START_ALL = "        under_way.append(comm.all_reduce(gradient))\n"
WAIT_ALL = "    for call in under_way:\n        call.wait()\n"
START = "    so_far[-1].start_reduction()\n"
READY = "so_far[-2:] if is_last else so_far[-2:-1]"
FINISH = "        bucket.wait_for_reduction()\n        bucket.step()\n        bucket.start_broadcast()\n"
WAIT = "    if is_last:\n        for bucket in so_far:\n            bucket.wait_for_broadcast()"

CHANGED = {
    "overlap.reduce_as_ready": [
        ("waits_at_once", {START_ALL: "        under_way.append(comm.all_reduce(gradient))\n"
                                      "        under_way[-1].wait()\n"},
         r"waits for a reduction before it computes the next layer.* wait at the end"),
        ("waits_for_the_last_only", {WAIT_ALL: "    call = under_way[-1]\n    call.wait()\n"},
         r"returns while the reduction of gradient 0 is under way"),
        ("sums", {"layer() / comm.world_size": "layer()"}, r"It is the sum over the 2 ranks"),
        ("one_reduction_for_all",
         {START_ALL: "", WAIT_ALL: "    flat = torch.cat(gradients)\n    comm.all_reduce(flat).wait()\n"
                                   "    gradients = list(flat.chunk(len(gradients)))\n"},
         r"starts 1 reductions. Start one for each layer"),
        ("gathers",
         {START_ALL: "        gradient = sum(comm.all_gather(gradient))\n", WAIT_ALL: ""},
         r"calls all_gather. Use all_reduce"),
        ("one_tensor", {"return gradients": "return torch.stack(gradients)"}, r"must return a list"),
    ],
    "overlap.on_bucket": [
        ("waits_at_once", {READY: "so_far[-1:]"}, r"that it has just started"),
        ("never_waits_for_the_sum", {READY: "so_far[-1:]", "        bucket.wait_for_reduction()\n": ""},
         r"step\(\) of bucket 0 comes too early: .* half a sum"),
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
