"""Chapter 4: answers that a reader may give, as changes of the solution, and what the check must say."""

from __future__ import annotations

STEP = "    local.step()\n"
EACH = "    for owner, slices in enumerate(partition.slices_of_rank):\n        for cut in slices:\n"
SEND = "            dist.broadcast(window(params[cut.param], cut), group_src=owner)"
# The call after it stands four spaces further in.
IF_NOT_OWNER = "            if owner != dist.get_rank():\n    "
SENT = "    owner, param = broadcasts[lost]\n"
IN_REGISTRATION_ORDER = {SENT: "    broadcasts.sort(key=lambda sent: sent[1])\n" + SENT}
STALE_RANKS = "range(partition.world_size)"

CHANGED = {
    "step.step_in_slices": [
        ("never_steps", {STEP: ""}, r"Was local\.step\(\) called"),
        ("sends_before_it_steps", {STEP + EACH + SEND: EACH + SEND + "\n" + STEP},
         r"sent before it was updated"),
        ("rank_0_sends_all", {"group_src=owner": "group_src=0"}, r"sent by its own owner"),
        ("whole_parameters", {"window(params[cut.param], cut), g": "params[cut.param].detach(), g"},
         r"a whole parameter that has several owners"),
        ("averages",
         {SEND: "            new = window(params[cut.param], cut)\n            dist.all_reduce(new)\n"
                "            new.div_(dist.get_world_size())"},
         r"was added to the others' or averaged with them"),
        ("adds_up_what_is_zero_but_on_the_owner",
         {SEND: "            new = window(params[cut.param], cut)\n" + IF_NOT_OWNER
                + "            new.zero_()\n"
                "            dist.all_reduce(new)"},
         r"values are right, but they came by all_reduce, which moves each value twice as often"),
        ("averages_gradients_again",
         {STEP: "    for param in params:\n        dist.all_reduce(param.grad)\n"
                "        param.grad /= dist.get_world_size()\n" + STEP},
         r"besides broadcast .* all_reduce.* averaged already"),
        ("waits_for_the_last_only",
         {"dist.broadcast": "work = dist.broadcast", "=owner)": "=owner, async_op=True)\n    work.wait()"},
         r"Call \.wait\(\) on what broadcast returned"),
        ("sends_gradients", {"window(params[cut.param], cut), g": "window(params[cut.param].grad, cut), g"},
         r"did not arrive.* Pass param\.detach\(\)\.view\(-1\)\[start:stop\]"),
    ],
    "step.stale": [
        ("everybody_is_stale_in_registration_order",
         IN_REGISTRATION_ORDER | {"[] if rank == owner else [param]": "[param]"},
         r"owner by owner.*it needs no broadcast"),
        ("the_owner_is_stale_in_registration_order",
         IN_REGISTRATION_ORDER | {"rank == owner": "rank != owner"},
         r"owner by owner.*Old are those that waited"),
        ("only_ranks_that_own_something", {STALE_RANKS: STALE_RANKS + " if partition.slices_of_rank[rank]"},
         r"owns nothing receives too"),
        ("all_that_this_owner_sends", {"[param]": "sorted({sent for by, sent in broadcasts if by == owner})"},
         r"one slice"),
    ],
}  # fmt: skip
