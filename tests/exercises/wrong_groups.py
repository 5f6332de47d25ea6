"""Chapter 14: answers that a reader may give, as changes of the solution, and what the check must say."""

from __future__ import annotations

RESULT = 'return {"state": state, "param_groups": groups}'
KNOWN = '        if number_then.get(name) in saved["state"]\n'
MOVED = """        for old, old_owner in olds:
            for new, new_owner in news:
                overlap = min(old.stop, new.stop) - max(old.start, new.start)
                if old_owner != new_owner:
                    moved += max(0, overlap)
"""
HAS_CHANGED = "step and flags != trained[step - 1]"

CHANGED = {
    "groups.carry_over": [
        ("loads_what_was_saved", {RESULT: "return saved"},
         r"number 0 is 'low', which is new, and gets .* 'top' had"),
        ("keeps_the_numbers", {"[number_then[name]]": "[number]", "number_then.get(name) in": "number in"},
         r"leave it out|go by name"),
        ("keeps_the_names", {"number: saved": "name: saved"}, r"the key 'top'. An optimizer knows numbers"),
        ("maps_backwards",
         {"number_then[name]": "names_now.index(name)", "(names_now)": "(names_then)",
          KNOWN: "if name in names_now\n"},
         r"raised KeyError"),
        ("expects_all_names", {"number_then[name]": "names_then.index(name)", KNOWN: ""},
         r"raised ValueError: 'low' is not in list"),
        ("zeros_for_new_ones",
         {"groups = []": 'zeros = {key: torch.zeros_like(old) for key, old in saved["state"][0].items()}\n'
                         "    state = dict.fromkeys(range(len(names_now)), zeros) | state\n    groups = []"},
         r"'low', which is new, and gets a state that no parameter had"),
        ("todays_options", {'"param_groups": groups': '"param_groups": fresh["param_groups"]'},
         r"lr = 0\.5, today's; it should be 0\.05.*was in group 0"),
        ("saved_groups", {'"param_groups": groups': '"param_groups": saved["param_groups"]'},
         r"there are 1 groups .* today's optimizer has 2"),
        ("options_by_place",
         {"groups = []": 'olds = iter(saved["param_groups"] + fresh["param_groups"])\n    groups = []',
          "(before or [group])[0]": "next(olds)"},
         r"'low', is new, so the group keeps the options"),
        ("first_number_as_it_is", {'number_then.get(names_now[group["params"][0]])': 'group["params"][0]'},
         r"another group's; it should be"),
        ("edits_what_it_was_given",
         {RESULT: "saved |= " + RESULT.removeprefix("return ") + "\n    return saved"},
         r"changed what it was given"),
        ("state_alone", {RESULT: "return state"}, r'two entries, "state" and "param_groups"'),
    ],
    "groups.state_to_move": [
        ("what_stays", {"old_owner != new_owner": "old_owner == new_owner"}, r"That is what keeps its owner"),
        ("negative_overlaps_too", {"max(0, overlap)": "overlap"},
         r"elements change owner, .* bytes of state.*have a negative overlap"),
        ("elements", {"8 * ": ""}, "That is elements. Adam keeps 8 bytes"),
        ("one_mean", {"8 * ": "4 * "}, "two means of 4 bytes"),
        ("sent_and_received", {"8 * ": "16 * "}, "another receives: count it once"),
        ("the_added_ones_too", {"8 * moved": "8 * (moved + sum(after.numels[len(before.numels) :]))"},
         "An added parameter has no state yet"),
        ("whole_parameters",
         {MOVED: "        if {owner for _, owner in olds} != {owner for _, owner in news}:\n"
                 "            moved += sum(old.numel for old, _ in olds)\n"},
         "that is cut, a part may keep its owner: look where"),
        ("other_slices", {MOVED: "        moved += sum(new[0].numel for new in news if new not in olds)\n"},
         "look where an old and a new slice overlap"),
        ("by_loads", {"8 * moved": "4 * sum(abs(old - new) for old, new in zip(before.loads, after.loads))"},
         "by how much the loads differ"),
        ("first_owners",
         {"olds, news in zip(before.pieces_of_param, after.pieces_of_param)":
              "numel, old, new in zip(before.numels, before.owner_of_param, after.owner_of_param)",
          MOVED: "        moved += numel * (old != new)\n"},
         "raised ValueError: parameter 1 has several owners"),
        ("what_moves",
         {"8 * moved": "sorted(set(before.slices_of_rank[0]) - set(after.slices_of_rank[0]))"},
         "must return a whole number of bytes"),
    ],
    "groups.calls_of_steps": [
        ("never_asks", {HAS_CHANGED: "False"}, "so the ranks compare it first: 32 bytes"),
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
        ("in_the_models_order",
         {"slices in partition.slices_of_rank": "pieces in partition.pieces_of_param",
          "piece in slices": "piece, _ in pieces"},
         "Owner by owner, rank 0's first"),
        ("asks_only_when_something_freezes",
         {"flags != trained[step - 1]": "any(was and not now for was, now in zip(trained[step - 1], flags))"},
         "step 3.*compare it first"),
        ("one_list_for_all", {"steps.append(calls)": "steps += calls"}, "a list for each step, of pairs"),
        ("last_step_left_out", {"return steps": "return steps[:-1]"}, "returned 3 lists for 4 steps"),
    ],
}  # fmt: skip
