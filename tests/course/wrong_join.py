"""Chapter 15: answers that a reader may give, as changes of the solution, and what the check must say."""

from __future__ import annotations

EACH = "    for param, owner in zip(params, owner_of_param):\n"
RECEIVE = EACH + "        if owner == comm.rank:\n            comm.recv(param.grad, source).wait()\n"
STEP = "    local.step()\n"
REDUCE = "        comm.all_reduce(pair).wait()\n"
AVERAGED = "        averages.append(total / active)"
DIVISOR = "len(batches) if divide_by_initial_world_size else active"

CHANGED = {
    "join.shadow_step": [
        ("steps_with_old_gradients", {RECEIVE: ""}, "receive the gradients of what it owns"),
        ("receives_after_the_step", {RECEIVE + STEP: STEP + RECEIVE}, "before the local step"),
        ("receives_once_more", {STEP: "    comm.recv(params[0].grad, source).wait()\n" + STEP},
         "that this rank owns, no more"),
    ],
    "join.averages": [
        ("divides_by_who_is_left", {DIVISOR: "active"}, "the others add zero"),
        ("stops_with_the_first", {"max(batches)": "min(batches)"}, "as long as any rank has data"),
        ("mixes_up_the_two_ways", {DIVISOR: "active if divide_by_initial_world_size else len(batches)"},
         "DDP's averaged gradient is.*with True of all 3"),
    ],
    "join.until_all_are_done": [
        ("stops_at_a_sum_of_zero", {"if active == 0": "if total == 0"},
         r"epoch has 3 iterations.*this is a list of 0|raised ZeroDivisionError"),
        ("never_appends", {AVERAGED: "        averages += []"},
         r"makes more than 2,000 calls\. Is there a loop that never ends"),
        ("asks_once_more", {"            return averages": "    " + REDUCE + "            return averages"},
         r"makes 5 calls; 4 are enough"),
        ("one_iteration_too_many",
         {AVERAGED: "        averages.append(total / max(active, 1))",
          "        if active == 0:\n            return averages\n": "",
          "    while True:": "    active = 1\n    while active:"},
         r"returned None"),
        ("its_own",
         {AVERAGED: "        more = gradients[len(averages) :] or [0.0]\n        averages.append(more[0])"},
         "own gradients. The average is of all ranks"),
    ],
}  # fmt: skip
