"""Chapter 3: answers that a reader may give, as changes of the solution, and what the check must say."""

from __future__ import annotations

LARGEST_FIRST = "sorted(range(len(numels)), key=lambda param: -numels[param])"
BAD = "[3, 3, 2, 2, 2]"

CHANGED = {
    "partition.largest_first": [
        ("unsorted", {LARGEST_FIRST: "range(len(numels))"},
         "owners in registration order.*Place the largest first"),
        ("sorts_the_callers_list", {"    return": "    numels.sort(reverse=True)\n    return"},
         r"\[1, 4, 5, 6\], 2\) changed the list"),
        ("params_of_each_rank",
         {"return owners": "return [[i for i, o in enumerate(owners) if o == r] for r in range(world_size)]"},
         r"returned \[\[0, 3\], \[1, 2\]\], which holds lists"),
        ("all_to_rank_0", {"= emptiest": "= 0"},
         r"parameter 1 \(5 elements\) to rank 0; it belongs to rank 1"),
        ("one_short", {"return owners": "return owners[:-1]"}, "returned 3 owners for 4 parameters"),
        ("ranks_from_1", {"= emptiest": "= emptiest + 1"}, "to rank 2. Ranks are numbered 0 to 1"),
        ("a_dictionary", {"return owners": "return dict(enumerate(owners))"},
         "returned a dict. It must return a list"),
    ],
    "partition.even_split": [
        ("shares_rounded_up", {"total // world_size": "-(-total // world_size)"},
         r"\(3, 3, 3, 1\) .*rounded up.* for the last rank"),
        ("shares_rounded_down",
         {"total // world_size": "(total // world_size)",
          "(rank + 1) *": "total if rank == world_size - 1 else (rank + 1) *"},
         r"\(2, 2, 2, 4\) .*rounded down.* the last rank gets"),
        ("whole_parameters",
         {"total = sum(numels)": "return list(map(list, sorted_greedy(numels, world_size).slices_of_rank))"},
         r"\(7, 9\) elements.*No parameter is cut"),
        ("each_parameter_cut_by_itself",
         {"rank * total": "begin + rank * numel", "(rank + 1) * total": "begin + (rank + 1) * numel"},
         r"owners are \[0, 1, 0, 1, .*cut that range, not each"),
        ("places_in_the_model", {" - begin": ""}, "count from its own first element, not from the model's"),
        ("tuples", {"Slice(param": "(param"}, r"given \(0, 0, 6\). What it owns are slices: Slice\("),
        ("true_division", {"//": "/"}, "made of whole numbers: use //"),
        ("cuts_counted_twice", {"stop - begin)": "min(stop - begin + 1, numel))"},
         r"elements \[2, 3\) have two owners"),
        ("slices_in_one_list", {"return slices_of_rank": "return sum(slices_of_rank, [])"},
         "one list of slices for each rank"),
        ("empty_ranks_left_out", {"return slices_of_rank": "return list(filter(None, slices_of_rank))"},
         "2 lists for 4 ranks. .* an empty list"),
        ("in_another_process_otherwise",  # even, but every rank rounds in a way of its own
         {"    total": "    import os\n\n"
                       '    odd = int(os.environ.get("RANK", 0)) * (world_size - 1)\n    total',
          "rank * total": "(odd + rank * total)", "(rank + 1) * total": "(odd + (rank + 1) * total)"},
         "real optimizer on 2 ranks.*all must get the same"),
    ],
    "partition.adversary": [
        ("one_huge_tensor", {BAD: "[100, 1, 1, 1]"}, "somebody has to own it"),
        ("bad_in_registration_order", {BAD: "[1, 1, 1, 1, 4, 4, 4]"}, "order of your list does not matter"),
        ("nearly_bad_enough", {BAD: "[4, 3, 3, 2, 2]"},
         "with 8, the best possible is 7: 14.3% more. At least 15%"),
        ("no_parameters", {BAD: "[]"}, "1 to 10 parameters"),
    ],
}  # fmt: skip
