"""Chapter 6: answers that a reader may give, each with a part of the message that must meet them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zero_ref.plan.partition import Partition, Slice

# -------------------------------------------------------------------------------------- carry_over

StateDict = dict[str, Any]


def _state(saved: StateDict, then: list[str], now: list[str]) -> dict[int, Any]:
    numbers = {name: number for number, name in enumerate(then)}
    return {
        number: saved["state"][numbers[name]]
        for number, name in enumerate(now)
        if numbers.get(name) in saved["state"]
    }


def loads_what_was_saved(saved: StateDict, then: list[str], fresh: StateDict, now: list[str]) -> StateDict:
    return saved


def keeps_the_numbers(saved: StateDict, then: list[str], fresh: StateDict, now: list[str]) -> StateDict:
    state = {number: value for number, value in saved["state"].items() if number < len(now)}
    return {"state": state, "param_groups": fresh["param_groups"]}


def keeps_the_names(saved: StateDict, then: list[str], fresh: StateDict, now: list[str]) -> StateDict:
    state = {then[number]: value for number, value in saved["state"].items()}
    return {"state": state, "param_groups": fresh["param_groups"]}


def maps_backwards(saved: StateDict, then: list[str], fresh: StateDict, now: list[str]) -> StateDict:
    state = {number: saved["state"][now.index(name)] for number, name in enumerate(then) if name in now}
    return {"state": state, "param_groups": fresh["param_groups"]}


def expects_all_names(saved: StateDict, then: list[str], fresh: StateDict, now: list[str]) -> StateDict:
    state = {number: saved["state"][then.index(name)] for number, name in enumerate(now)}
    return {"state": state, "param_groups": saved["param_groups"]}


def zeros_for_new_ones(saved: StateDict, then: list[str], fresh: StateDict, now: list[str]) -> StateDict:
    state = _state(saved, then, now)
    for number in range(len(now)):
        if number not in state:
            zeros = {key: torch.zeros_like(value) for key, value in saved["state"][0].items()}
            state[number] = zeros
    good = carried(saved, then, fresh, now)
    return {"state": state, "param_groups": good["param_groups"]}


def todays_options(saved: StateDict, then: list[str], fresh: StateDict, now: list[str]) -> StateDict:
    return {"state": _state(saved, then, now), "param_groups": fresh["param_groups"]}


def saved_groups(saved: StateDict, then: list[str], fresh: StateDict, now: list[str]) -> StateDict:
    return {"state": _state(saved, then, now), "param_groups": saved["param_groups"]}


def options_by_place(saved: StateDict, then: list[str], fresh: StateDict, now: list[str]) -> StateDict:
    olds = saved["param_groups"] + fresh["param_groups"]
    groups = [{**old, "params": group["params"]} for old, group in zip(olds, fresh["param_groups"])]
    return {"state": _state(saved, then, now), "param_groups": groups}


def first_number_as_it_is(saved: StateDict, then: list[str], fresh: StateDict, now: list[str]) -> StateDict:
    groups = []
    for group in fresh["param_groups"]:
        before = [old for old in saved["param_groups"] if group["params"][0] in old["params"]]
        groups.append({**(before or [group])[0], "params": group["params"]})
    return {"state": _state(saved, then, now), "param_groups": groups}


def carried(saved: StateDict, then: list[str], fresh: StateDict, now: list[str]) -> StateDict:
    """The right one."""
    groups = []
    for group in fresh["param_groups"]:
        name = now[group["params"][0]]
        before = [old for old in saved["param_groups"] if name in then and then.index(name) in old["params"]]
        groups.append({**(before or [group])[0], "params": group["params"]})
    return {"state": _state(saved, then, now), "param_groups": groups}


def edits_what_it_was_given(saved: StateDict, then: list[str], fresh: StateDict, now: list[str]) -> StateDict:
    good = carried(saved, then, fresh, now)
    saved["state"] = good["state"]
    saved["param_groups"] = good["param_groups"]
    return saved


def state_alone(saved: StateDict, then: list[str], fresh: StateDict, now: list[str]) -> StateDict:
    return _state(saved, then, now)


# -------------------------------------------------------------------------------------- state to move


def elements_moved(before: Partition, after: Partition) -> int:
    moved = 0
    for olds, news in zip(before.pieces_of_param, after.pieces_of_param):
        for old, old_owner in olds:
            for new, new_owner in news:
                overlap = min(old.stop, new.stop) - max(old.start, new.start)
                moved += max(0, overlap) * (old_owner != new_owner)
    return moved


def elements(before: Partition, after: Partition) -> int:
    return elements_moved(before, after)


def one_mean(before: Partition, after: Partition) -> int:
    return 4 * elements_moved(before, after)


def sent_and_received(before: Partition, after: Partition) -> int:
    return 16 * elements_moved(before, after)


def the_added_ones_too(before: Partition, after: Partition) -> int:
    return 8 * (elements_moved(before, after) + sum(after.numels[len(before.numels) :]))


def whole_parameters(before: Partition, after: Partition) -> int:
    owners = [[{rank for _, rank in pieces} for pieces in each.pieces_of_param] for each in (before, after)]
    return 8 * sum(numel for numel, old, new in zip(before.numels, *owners) if old != new)


def other_slices(before: Partition, after: Partition) -> int:
    moved = 0
    for rank, slices in enumerate(after.slices_of_rank):
        for piece in slices:
            if piece.param < len(before.numels) and piece not in before.slices_of_rank[rank]:
                moved += piece.numel
    return 8 * moved


def by_loads(before: Partition, after: Partition) -> int:
    return 8 * sum(abs(old - new) for old, new in zip(before.loads, after.loads)) // 2


def first_owners(before: Partition, after: Partition) -> int:
    pairs = zip(before.numels, before.owner_of_param, after.owner_of_param)
    return 8 * sum(numel for numel, old, new in pairs if old != new)


def negative_overlaps(before: Partition, after: Partition) -> int:
    moved = 0
    for olds, news in zip(before.pieces_of_param, after.pieces_of_param):
        for old, old_owner in olds:
            for new, new_owner in news:
                if old_owner != new_owner:
                    moved += min(old.stop, new.stop) - max(old.start, new.start)
    return 8 * moved


def what_moves(before: Partition, after: Partition) -> list[Slice]:
    return [piece for piece in before.slices_of_rank[0] if piece not in after.slices_of_rank[0]]


# ------------------------------------------------------------------------------------- calls of steps


def steps(
    partition: Partition,
    trained: list[list[bool]],
    changed: Callable[[int], bool],
    *,
    ask_first: bool = True,
    frozen_too: bool = False,
    itemsize: int = 4,
) -> list[list[tuple[str, int]]]:
    listed = []
    for step, flags in enumerate(trained):
        ask = [("all_gather", 32)] if changed(step) else []
        sent = [
            ("broadcast", itemsize * piece.numel)
            for slices in partition.slices_of_rank
            for piece in slices
            if frozen_too or flags[piece.param]
        ]
        listed.append([*ask, *sent] if ask_first else [*sent, *ask])
    return listed


def differs_from_the_step_before(trained: list[list[bool]]) -> Callable[[int], bool]:
    return lambda step: step > 0 and trained[step] != trained[step - 1]


def never_asks(partition: Partition, trained: list[list[bool]]) -> Any:
    return steps(partition, trained, lambda step: False)


def always_asks(partition: Partition, trained: list[list[bool]]) -> Any:
    return steps(partition, trained, lambda step: True)


def compares_with_the_first(partition: Partition, trained: list[list[bool]]) -> Any:
    return steps(partition, trained, lambda step: trained[step] != trained[0])


def asks_afterwards(partition: Partition, trained: list[list[bool]]) -> Any:
    return steps(partition, trained, differs_from_the_step_before(trained), ask_first=False)


def sends_frozen_ones(partition: Partition, trained: list[list[bool]]) -> Any:
    return steps(partition, trained, differs_from_the_step_before(trained), frozen_too=True)


def counts_elements(partition: Partition, trained: list[list[bool]]) -> Any:
    return steps(partition, trained, differs_from_the_step_before(trained), itemsize=1)


def in_the_models_order(partition: Partition, trained: list[list[bool]]) -> Any:
    asked = steps(partition, trained, differs_from_the_step_before(trained))
    return [
        [call for call in calls if call[0] == "all_gather"]
        + [("broadcast", 4 * numel) for numel, is_trained in zip(partition.numels, flags) if is_trained]
        for calls, flags in zip(asked, trained)
    ]


def asks_only_when_something_freezes(partition: Partition, trained: list[list[bool]]) -> Any:
    def frozen_now(step: int) -> bool:
        return step > 0 and any(was and not now for was, now in zip(trained[step - 1], trained[step]))

    return steps(partition, trained, frozen_now)


def one_list_for_all(partition: Partition, trained: list[list[bool]]) -> Any:
    return [call for calls in always_asks(partition, trained) for call in calls]


def last_step_left_out(partition: Partition, trained: list[list[bool]]) -> Any:
    return steps(partition, trained, differs_from_the_step_before(trained))[:-1]


def what_stays(before: Partition, after: Partition) -> int:
    same = 0
    for olds, news in zip(before.pieces_of_param, after.pieces_of_param):
        for old, old_owner in olds:
            for new, new_owner in news:
                overlap = min(old.stop, new.stop) - max(old.start, new.start)
                same += max(0, overlap) * (old_owner == new_owner)
    return 8 * same


def negative_overlaps_too(before: Partition, after: Partition) -> int:
    moved = 0
    for olds, news in zip(before.pieces_of_param, after.pieces_of_param):
        for old, old_owner in olds:
            for new, new_owner in news:
                overlap = min(old.stop, new.stop) - max(old.start, new.start)
                moved += overlap * (old_owner != new_owner)
    return 8 * moved


WRONG: list[tuple[str, Callable[..., Any], str]] = [
    ("groups.carry_over", loads_what_was_saved, r"number 0 is 'low', which is new, and gets .* 'top' had"),
    ("groups.carry_over", keeps_the_numbers, r"leave it out|go by name"),
    ("groups.carry_over", keeps_the_names, r"the key 'top'. An optimizer knows numbers"),
    ("groups.carry_over", maps_backwards, r"raised KeyError"),
    ("groups.carry_over", expects_all_names, r"raised ValueError: 'low' is not in list"),
    ("groups.carry_over", zeros_for_new_ones, r"'low', which is new, and gets a state that no parameter had"),
    ("groups.carry_over", todays_options, r"lr = 0\.5, today's; it should be 0\.05.*was in group 0"),
    ("groups.carry_over", saved_groups, r"there are 1 groups .* today's optimizer has 2"),
    ("groups.carry_over", options_by_place, r"'low', is new, so the group keeps the options"),
    ("groups.carry_over", first_number_as_it_is, r"another group's; it should be"),
    ("groups.carry_over", edits_what_it_was_given, r"changed what it was given"),
    ("groups.carry_over", state_alone, r'two entries, "state" and "param_groups"'),
    ("groups.state_to_move", what_stays, r"That is what keeps its owner"),
    ("groups.state_to_move", negative_overlaps_too, r"have a negative overlap"),
    ("groups.state_to_move", elements, "That is elements. Adam keeps 8 bytes"),
    ("groups.state_to_move", one_mean, "two means of 4 bytes"),
    ("groups.state_to_move", sent_and_received, "another receives: count it once"),
    ("groups.state_to_move", the_added_ones_too, "An added parameter has no state yet"),
    ("groups.state_to_move", whole_parameters, "that is cut, a part may keep its owner: look where"),
    ("groups.state_to_move", other_slices, "look where an old and a new slice overlap"),
    ("groups.state_to_move", by_loads, "by how much the loads differ"),
    ("groups.state_to_move", first_owners, "raised ValueError: parameter 1 has several owners"),
    ("groups.state_to_move", negative_overlaps, "elements change owner, .* bytes of state"),
    ("groups.state_to_move", what_moves, "must return a whole number of bytes"),
    ("groups.calls_of_steps", never_asks, "so the ranks compare it first: 32 bytes"),
    ("groups.calls_of_steps", always_asks, "step 0.* Nothing has changed since the optimizer was built"),
    ("groups.calls_of_steps", compares_with_the_first, "step 2.*what came earlier is agreed already"),
    ("groups.calls_of_steps", asks_afterwards, "agree before anything is sent"),
    ("groups.calls_of_steps", sends_frozen_ones, "step 1.* frozen parameter does not change"),
    (
        "groups.calls_of_steps",
        counts_elements,
        "one broadcast for each parameter that is trained, with its bytes",
    ),
    ("groups.calls_of_steps", in_the_models_order, "Owner by owner, rank 0's first"),
    ("groups.calls_of_steps", asks_only_when_something_freezes, "step 3.*compare it first"),
    ("groups.calls_of_steps", one_list_for_all, "a list for each step, of pairs"),
    ("groups.calls_of_steps", last_step_left_out, "returned 3 lists for 4 steps"),
]
