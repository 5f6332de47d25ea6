"""Chapter 15: answers that a reader may give, as changes of the solution, and what the check must say."""

from __future__ import annotations

EACH = "    for param, owner in zip(params, owner_of_param):\n"
RECEIVE = EACH + "        if owner == comm.rank:\n            comm.recv(param.grad, source).wait()\n"
STEP = "    local.step()\n"
SEND = EACH + "        comm.broadcast(param.detach(), owner).wait()"
DIVISOR = "len(batches) if divide_by_initial_world_size else active"

CHANGED = {
    "join.shadow_step": [
        ("steps_with_old_gradients", {RECEIVE: ""}, "receive the gradients of what it owns"),
        ("receives_after_the_step", {RECEIVE + STEP: STEP + RECEIVE}, "before the local step"),
        ("never_steps", {STEP: ""}, "local.step"),
        ("keeps_its_values", {SEND: ""}, "take part .*in every broadcast"),
        ("receives_once_more", {STEP: "    comm.recv(params[0].grad, source).wait()\n" + STEP},
         "that this rank owns, no more"),
    ],
    "join.averages": [
        ("divides_by_who_is_left", {DIVISOR: "active"}, "the others add zero"),
        ("stops_with_the_first", {"max(batches)": "min(batches)"}, "as long as any rank has data"),
        ("mixes_up_the_two_ways", {DIVISOR: "active if divide_by_initial_world_size else len(batches)"},
         "DDP's averaged gradient is.*with True of all 3"),
    ],
    "join.lent_bytes": [
        ("lends_to_those_who_stay", {"count <= iteration": "count > iteration"}, "each rank that has left"),
        ("lends_everything", {"sum(left)": "sum(loads) * bool(left)"}, "what it owns"),
        ("counts_elements", {"4 * ": ""}, "4 bytes an element"),
        ("counts_elements_of_those_who_stay", {"4 * ": "", "count <= iteration": "count > iteration"},
         "gradients of its own.*That is in elements"),
    ],
}  # fmt: skip
