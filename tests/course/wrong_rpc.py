"""Chapter 18: answers that a reader may give, as changes of the solution, and what the check must say."""

from __future__ import annotations

OF_WORKERS = "(2 + 4) * len(set(remote))"
IN_ALL = "of_layers + " + OF_WORKERS
PUT_BACK = "    for param, grad in zip(params, before):\n        param.grad = grad"
STEP = "    optimizer.step()\n"
WANTED = "sorted({row for row in ids if row % workers == worker})"
ROWS = "[found[row] for row in ids]"

CHANGED = {
    "rpc.messages": [
        ("both_ends", {IN_ALL: f"2 * ({IN_ALL})"}, r"both where it is sent and where it is received"),
        ("neighbours_are_one_call",
         {"remote =": "owners = [of for last, of in zip([-1, *owners], owners) if of != last]\n    remote ="},
         r"neighbours on one worker are still two calls"),
        ("some_number", {IN_ALL: "12.5"}, r"nobody to ask"),
    ],
    "rpc.local_step": [
        ("keeps_stale_gradients", {"get(param)": "get(param, param.grad)"},
         r"parameter 0 has no gradient.* stepped with what was in \.grad before.*an earlier step left"),
        ("zeros_for_none", {"get(param)": "get(param, torch.zeros_like(param))"},
         r"parameter 1 has no gradient in this context, and moved. It was stepped with zeros"),
        ("adds_to_what_is_there",
         {"gradients.get(param)": "None if param not in gradients else "
                                  "gradients[param] + (0 if param.grad is None else param.grad)"},
         r"added to what was in \.grad before"),
        ("leaves_its_gradients", {PUT_BACK: ""}, r"\.grad of parameter 0 is not what it was"),
        ("never_steps", {STEP: ""}, r"parameter 0 has not moved"),
        ("plain_descent", {"optimizer.step()": "SGD(params, lr=0.1).step()"},
         r"not where the plain optimizer moves it.*This is plain descent"),
        ("steps_whatever_has_one",
         {STEP: STEP + "    for param in gradients.keys() - set(params):\n"
                      "        param.detach().sub_(0.1 * gradients[param])\n"},
         r"is not in `params` has changed"),
    ],
    "rpc.look_up": [
        ("one_message_for_each_row",
         {"found = {}": "return torch.cat([ask(row % workers, [row // workers]) for row in ids])"},
         r"has asked worker 0 before"),
        ("asks_twice_for_a_row", {WANTED: "[row for row in ids if row % workers == worker]"},
         r"looked up twice is sent twice"),
        ("by_the_tables_numbers", {"[row // workers for row in wanted]": "wanted"},
         r"A worker counts its own rows: row \d of the table is its row"),
        ("in_blocks",
         {"found = {}": "found, size = {}, -(-(max(ids) + 1) // workers)",
          "row % workers == worker": "row // size == worker", "row // workers for": "row % size for"},
         r"worker 1 has row 3 of the table, its own 1"),
        ("worker_by_worker", {ROWS: "list(found.values())"}, r"in the order of `ids`"),
        ("each_row_once", {ROWS: "[found[row] for row in dict.fromkeys(ids)]"},
         r"looked up twice has two places"),
    ],
}  # fmt: skip
