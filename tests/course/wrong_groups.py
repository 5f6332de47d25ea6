"""Chapter 14: answers that a reader may give, as changes of the solution, and what the check must say."""

from __future__ import annotations

ASK = "    if differ.any():\n        return [number for number in range(len(params)) if differ[number]]\n"
HAS_CHANGED = "step and flags != trained[step - 1]"

CHANGED = {
    "groups.agreed_step": [
        ("never_asks", {ASK: ""}, r"returns \[\[\], \[\]\], rank by rank|ranks wait for each other"),
        ("steps_first", {"    local.step()\n": "", "    flags =": "    local.step()\n    flags ="},
         r"has changed, although the ranks disagree. Compare first"),
        ("sends_frozen_ones", {"        if param.requires_grad:\n    ": ""},
         r"broadcasts of \[48, 12, 24, 8\] bytes; \[48, 12, 8\] are enough.* frozen parameter does not"),
        ("asks_for_each_parameter",
         {"torch.stack(comm.all_gather(flags))":
              "torch.stack([torch.cat(comm.all_gather(one)) for one in flags.view(-1, 1)], dim=1)"},
         r"makes 4 calls to compare the flags.*make one"),
        ("never_steps", {"    local.step()\n": ""}, r"has its old values. Step `local`"),
        ("flags_of_all", {"if differ[number]]": "]"},
         r"All ranks must name the parameters that are frozen on some"),
        ("says_true", {"return []": "return True"}, r"must return a list of numbers of parameters"),
    ],
    "groups.calls_of_steps": [
        ("always_asks", {HAS_CHANGED: "True"},
         "step 0.* Nothing has changed since the optimizer was built"),
        ("compares_with_the_first", {"trained[step - 1]": "trained[0]"},
         "step 2.*what came earlier is agreed already"),
        ("asks_afterwards",
         {"append(calls)": 'append(sorted(calls, key=lambda call: call[0] == "all_gather"))'},
         "agree before anything is sent"),
        ("sends_frozen_ones", {"if flags[piece.param]": "if True"},
         "step 1.* frozen parameter does not change"),
        ("counts_elements", {"4 * piece.numel": "piece.numel"},
         "one broadcast for each parameter that is trained, with its bytes"),
        ("asks_only_when_something_freezes",
         {"flags != trained[step - 1]": "any(was and not now for was, now in zip(trained[step - 1], flags))"},
         "step 3.*compare it first"),
        ("last_step_left_out", {"return steps": "return steps[:-1]"}, "returned 3 lists for 4 steps"),
    ],
}  # fmt: skip
