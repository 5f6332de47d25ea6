"""Chapter 6: answers that a reader may give, each with a part of the message that must meet them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import Any

from zero_ref.plan.partition import Partition, Slice
from zero_ref.plan.rules import registration_greedy, sorted_greedy

# --------------------------------------------------------------------------------------------- place


def from_nothing(numels: list[int], loads: list[int]) -> list[int]:
    return list(sorted_greedy(numels, len(loads)).owner_of_param)


def as_they_come(numels: list[int], loads: list[int]) -> list[int]:
    return list(registration_greedy(numels, len(loads), loads=loads).owner_of_param)


def all_to_the_emptiest(numels: list[int], loads: list[int]) -> list[int]:
    return [loads.index(min(loads)) for _ in numels]


def by_number_of_parameters(numels: list[int], loads: list[int]) -> list[int]:
    held, owners = list(loads), [0] * len(numels)
    for param in sorted(range(len(numels)), key=lambda param: -numels[param]):
        owners[param] = held.index(min(held))
        held[owners[param]] += 1
    return owners


def highest_of_equal_ranks(numels: list[int], loads: list[int]) -> list[int]:
    owners = sorted_greedy(numels, len(loads), loads=loads[::-1]).owner_of_param
    return [len(loads) - 1 - owner for owner in owners]


def positions_lost(numels: list[int], loads: list[int]) -> list[int]:
    return list(sorted_greedy(sorted(numels, reverse=True), len(loads), loads=loads).owner_of_param)


def dealt_in_turn(numels: list[int], loads: list[int]) -> list[int]:
    return [rank for rank, _ in zip(cycle(range(len(loads))), numels)]


def smallest_first(numels: list[int], loads: list[int]) -> list[int]:
    held, owners = list(loads), [0] * len(numels)
    for param in sorted(range(len(numels)), key=lambda param: numels[param]):
        owners[param] = held.index(min(held))
        held[owners[param]] += numels[param]
    return owners


def adds_to_the_callers_loads(numels: list[int], loads: list[int]) -> list[int]:
    owners = list(sorted_greedy(numels, len(loads), loads=loads).owner_of_param)
    for owner, numel in zip(owners, numels):
        loads[owner] += numel
    return owners


def new_loads(numels: list[int], loads: list[int]) -> list[int]:
    return [a + b for a, b in zip(loads, sorted_greedy(numels, len(loads), loads=loads).loads)]


def ranks_from_1(numels: list[int], loads: list[int]) -> list[int]:
    return [owner + 1 for owner in sorted_greedy(numels, len(loads), loads=loads).owner_of_param]


def no_return(numels: list[int], loads: list[int]) -> None:
    sorted_greedy(numels, len(loads), loads=loads)


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


WRONG: list[tuple[str, Callable[..., Any], str]] = [
    ("groups.place", from_nothing, "as if the ranks owned nothing yet. Start from `loads`"),
    ("groups.place", as_they_come, "as it comes to the emptiest rank. Place the largest first"),
    ("groups.place", all_to_the_emptiest, "What a rank was just given counts too"),
    ("groups.place", by_number_of_parameters, "counts a parameter as 1"),
    ("groups.place", highest_of_equal_ranks, "takes the highest. Take the lowest"),
    ("groups.place", positions_lost, "right owners in the wrong places"),
    (
        "groups.place",
        dealt_in_turn,
        r"\[25, 20\], \[100, 30\]\) gives parameter 0 .* to rank 0; it belongs to",
    ),
    ("groups.place", smallest_first, "When its turn comes, the ranks own"),
    (
        "groups.place",
        adds_to_the_callers_loads,
        r"changed what it was given to .* \[100, 75\]. Work on copies",
    ),
    ("groups.place", new_loads, r"returned \[100, 75\]. Ranks are numbered 0 to 1"),
    ("groups.place", ranks_from_1, "Ranks are numbered 0 to 1"),
    ("groups.place", no_return, "returned None. Does the function end in a `return`"),
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
