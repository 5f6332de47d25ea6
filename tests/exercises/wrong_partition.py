"""Chapter 3: what a reader may plausibly write, and what the check must say about it."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from zero_ref.plan.partition import Slice
from zero_ref.plan.rules import sorted_greedy

# ------------------------------------------------------------------------------------ largest first


def packed(numels: list[int], world_size: int, order: list[int]) -> list[int]:
    owners, loads = [0] * len(numels), [0] * world_size
    for param in order:
        owners[param] = loads.index(min(loads))
        loads[owners[param]] += numels[param]
    return owners


def unsorted(numels: list[int], world_size: int) -> list[int]:
    return packed(numels, world_size, list(range(len(numels))))


def smallest_first(numels: list[int], world_size: int) -> list[int]:
    return packed(numels, world_size, sorted(range(len(numels)), key=lambda i: (numels[i], -i)))


def dealt_in_turn(numels: list[int], world_size: int) -> list[int]:
    owners = [0] * len(numels)
    for turn, param in enumerate(sorted(range(len(numels)), key=lambda i: -numels[i])):
        owners[param] = turn % world_size
    return owners


def by_number_of_parameters(numels: list[int], world_size: int) -> list[int]:
    owners, counts = [0] * len(numels), [0] * world_size
    for param in sorted(range(len(numels)), key=lambda i: -numels[i]):
        owners[param] = counts.index(min(counts))
        counts[owners[param]] += 1
    return owners


def positions_lost(numels: list[int], world_size: int) -> list[int]:
    owners, loads = [], [0] * world_size
    for numel in sorted(numels, reverse=True):
        owners.append(loads.index(min(loads)))
        loads[owners[-1]] += numel
    return owners


def highest_of_equal_ranks(numels: list[int], world_size: int) -> list[int]:
    owners, loads = [0] * len(numels), [0] * world_size
    for param in sorted(range(len(numels)), key=lambda i: -numels[i]):
        owners[param] = max(rank for rank in range(world_size) if loads[rank] == min(loads))
        loads[owners[param]] += numels[param]
    return owners


def last_of_equal_sizes(numels: list[int], world_size: int) -> list[int]:
    return packed(numels, world_size, sorted(range(len(numels)), key=lambda i: numels[i])[::-1])


def sorts_the_callers_list(numels: list[int], world_size: int) -> list[int]:
    owners = list(sorted_greedy(numels, world_size).owner_of_param)
    numels.sort(reverse=True)
    return owners


def params_of_each_rank(numels: list[int], world_size: int) -> list[list[int]]:
    return [[piece.param for piece in of] for of in sorted_greedy(numels, world_size).slices_of_rank]


def all_to_rank_0(numels: list[int], world_size: int) -> list[int]:
    return [0] * len(numels)


def one_short(numels: list[int], world_size: int) -> list[int]:
    return list(sorted_greedy(numels, world_size).owner_of_param)[:-1]


def ranks_from_1(numels: list[int], world_size: int) -> list[int]:
    return [owner + 1 for owner in sorted_greedy(numels, world_size).owner_of_param]


def a_dictionary(numels: list[int], world_size: int) -> dict[int, int]:
    return dict(enumerate(sorted_greedy(numels, world_size).owner_of_param))


def no_return(numels: list[int], world_size: int) -> None:
    sorted_greedy(numels, world_size)


def too_many_ranks(numels: list[int], world_size: int) -> list[int]:
    owners = list(sorted_greedy(numels, world_size).owner_of_param)
    _ = [numels[rank] for rank in range(world_size)]  # as if there were a parameter for each rank
    return owners


# --------------------------------------------------------------------------------------- even split


def cut_at(
    numels: list[int], cuts: list[int], *, from_own_start: bool = True, make: Callable[..., Any] = Slice
) -> list[list[Any]]:
    """Rank r owns cuts[r] to cuts[r + 1] of the whole range."""
    slices: list[list[Any]] = [[] for _ in cuts[1:]]
    begin = 0
    for param, numel in enumerate(numels):
        for rank, (low, high) in enumerate(pairwise(cuts)):
            start, stop = max(begin, low), min(begin + numel, high)
            if start < stop:
                shift = begin if from_own_start else 0
                slices[rank].append(make(param, start - shift, stop - shift))
        begin += numel
    return slices


def right_cuts(numels: list[int], world_size: int) -> list[int]:
    return [rank * sum(numels) // world_size for rank in range(world_size + 1)]


def shares_rounded_up(numels: list[int], world_size: int) -> list[list[Slice]]:
    share, total = -(-sum(numels) // world_size), sum(numels)
    return cut_at(numels, [min(rank * share, total) for rank in range(world_size + 1)])


def shares_rounded_down(numels: list[int], world_size: int) -> list[list[Slice]]:
    share = sum(numels) // world_size
    return cut_at(numels, [rank * share for rank in range(world_size)] + [sum(numels)])


def rest_dropped(numels: list[int], world_size: int) -> list[list[Slice]]:
    share = sum(numels) // world_size
    return cut_at(numels, [rank * share for rank in range(world_size + 1)])


def whole_parameters(numels: list[int], world_size: int) -> list[list[Slice]]:
    return [list(of) for of in sorted_greedy(numels, world_size).slices_of_rank]


def each_parameter_cut_by_itself(numels: list[int], world_size: int) -> list[list[Slice]]:
    slices: list[list[Slice]] = [[] for _ in range(world_size)]
    for param, numel in enumerate(numels):
        cuts = [rank * numel // world_size for rank in range(world_size + 1)]
        for rank in range(world_size):
            if cuts[rank] < cuts[rank + 1]:
                slices[rank].append(Slice(param, cuts[rank], cuts[rank + 1]))
    return slices


def places_in_the_model(numels: list[int], world_size: int) -> list[list[Slice]]:
    return cut_at(numels, right_cuts(numels, world_size), from_own_start=False)


def tuples(numels: list[int], world_size: int) -> list[list[tuple[int, int, int]]]:
    return cut_at(numels, right_cuts(numels, world_size), make=lambda *slice_: slice_)


def true_division(numels: list[int], world_size: int) -> list[list[Slice]]:
    return cut_at(numels, [rank * sum(numels) / world_size for rank in range(world_size + 1)])  # type: ignore[misc]


def cuts_counted_twice(numels: list[int], world_size: int) -> list[list[Slice]]:
    slices = cut_at(numels, right_cuts(numels, world_size))
    for of_rank in slices[:-1]:  # stop taken as inclusive
        last = of_rank.pop() if of_rank else None
        if last:
            of_rank.append(last._replace(stop=min(last.stop + 1, numels[last.param])))
    return slices


def last_rank_first(numels: list[int], world_size: int) -> list[list[Slice]]:
    return cut_at(numels, right_cuts(numels, world_size))[::-1]


def slices_in_one_list(numels: list[int], world_size: int) -> list[Slice]:
    return [piece for of_rank in cut_at(numels, right_cuts(numels, world_size)) for piece in of_rank]


def empty_ranks_left_out(numels: list[int], world_size: int) -> list[list[Slice]]:
    return [of_rank for of_rank in cut_at(numels, right_cuts(numels, world_size)) if of_rank]


def in_another_process_otherwise(numels: list[int], world_size: int) -> list[list[Slice]]:
    """Even, but every rank rounds in a way of its own."""
    rounding = int(os.environ.get("RANK", 0)) * (world_size - 1)
    cuts = [(rank * sum(numels) + rounding) // world_size for rank in range(world_size)]
    return cut_at(numels, [*cuts, sum(numels)])


# ---------------------------------------------------------------------------------------- adversary


def packs_well() -> list[int]:
    return [6, 5, 4, 1]


def one_huge_tensor() -> list[int]:
    return [100, 1, 1, 1]


def bad_in_registration_order() -> list[int]:
    return [1, 1, 1, 1, 4, 4, 4]


def nearly_bad_enough() -> list[int]:
    return [4, 3, 3, 2, 2]


def too_many_parameters() -> list[int]:
    return [3, 3] + [2] * 9


def no_parameters() -> list[int]:
    return []


def not_whole() -> list[float]:
    return [1.5, 1.5, 1.0, 1.0, 1.0]


WRONG: list[tuple[str, Callable[..., Any], str]] = [
    ("partition.largest_first", unsorted, "owners in registration order.*Place the largest first"),
    ("partition.largest_first", smallest_first, "smallest parameter is placed first"),
    ("partition.largest_first", dealt_in_turn, "deals the sorted parameters out in turn"),
    ("partition.largest_first", by_number_of_parameters, "what each rank holds, in elements"),
    ("partition.largest_first", positions_lost, "right owners in the wrong places"),
    ("partition.largest_first", highest_of_equal_ranks, "takes the highest. Take the lowest"),
    ("partition.largest_first", last_of_equal_sizes, "same size this places the last first"),
    ("partition.largest_first", sorts_the_callers_list, r"\[1, 4, 5, 6\], 2\) changed the list"),
    ("partition.largest_first", params_of_each_rank, r"returned \[\[0, 3\], \[1, 2\]\], which holds lists"),
    ("partition.largest_first", all_to_rank_0, r"parameter 1 \(5 elements\) to rank 0; it belongs to rank 1"),
    ("partition.largest_first", one_short, "returned 3 owners for 4 parameters"),
    ("partition.largest_first", ranks_from_1, "to rank 2. Ranks are numbered 0 to 1"),
    ("partition.largest_first", a_dictionary, "returned a dict. It must return a list"),
    ("partition.largest_first", no_return, "returned None. Does the function end in a `return`"),
    ("partition.largest_first", too_many_ranks, r"too_many_ranks\(\[4, 7\], 5\) raised IndexError.*line \d+"),
    ("partition.even_split", shares_rounded_up, r"\(3, 3, 3, 1\) .*rounded up.* for the last rank"),
    ("partition.even_split", shares_rounded_down, r"\(2, 2, 2, 4\) .*rounded down.* the last rank gets"),
    ("partition.even_split", rest_dropped, r"elements \[8, 10\) have no owner"),
    ("partition.even_split", whole_parameters, r"\(7, 9\) elements.*No parameter is cut"),
    (
        "partition.even_split",
        each_parameter_cut_by_itself,
        r"owners are \[0, 1, 0, 1, .*cut that range, not each",
    ),
    ("partition.even_split", places_in_the_model, "count from its own first element, not from the model's"),
    ("partition.even_split", tuples, r"given \(0, 0, 6\). What it owns are slices: Slice\("),
    ("partition.even_split", true_division, "made of whole numbers: use //"),
    ("partition.even_split", cuts_counted_twice, r"elements \[2, 3\) have two owners"),
    ("partition.even_split", last_rank_first, r"the owners are \[1, 0\]. Each rank must own one run"),
    ("partition.even_split", slices_in_one_list, "one list of slices for each rank"),
    ("partition.even_split", empty_ranks_left_out, "2 lists for 4 ranks. .* an empty list"),
    (
        "partition.even_split",
        in_another_process_otherwise,
        "real optimizer on 2 ranks.*all must get the same",
    ),
    ("partition.adversary", packs_well, r"\[6, 5, 4, 1\] on 2 ranks: .* with 9, the best possible is 9 too"),
    ("partition.adversary", one_huge_tensor, "somebody has to own it"),
    ("partition.adversary", bad_in_registration_order, "order of your list does not matter"),
    ("partition.adversary", nearly_bad_enough, "with 8, the best possible is 7: 14.3% more. At least 15%"),
    ("partition.adversary", too_many_parameters, "1 to 10 parameters"),
    ("partition.adversary", no_parameters, "1 to 10 parameters"),
    ("partition.adversary", not_whole, "list of whole numbers"),
]
