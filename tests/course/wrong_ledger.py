"""Chapter 1: answers that a reader may give, as changes of the solution, and what the check must say."""

from __future__ import annotations

FITS_NEVER = "divided == 0 or whole >= room"
ROUNDED_UP = "-(-divided // (room - whole))"

CHANGED = {
    "ledger.ranks_to_fit": [
        ("never_none", {"None\n": "10**6\n"},
         r"however many there are, 30,000,000,000 bytes of it.*No number is enough: return None"),
        ("negative_ranks", {FITS_NEVER: "room == whole"}, r"no number of ranks"),
        ("looks_as_far_as_32", {FITS_NEVER: FITS_NEVER + " or divided > 32 * (room - whole)"},
         r"64 ranks have 31\.41 GB each.* not more than 31\.41"),
        ("powers_of_two", {ROUNDED_UP: "1 << ((divided - 1) // (room - whole)).bit_length()"},
         r"It fits on 9 already"),
        ("forgets_to_return", {"return 1": "1", "return -": "-"}, r"Does the function end in a `return`"),
    ],
    "ledger.floor": [
        ("forgets_what_is_whole", {"return parameters_and_gradients +": "return"}, r"the state alone"),
        ("forgets_the_counter", {"max(numels) + 4": "max(numels)"}, r"its step counter"),
        ("all_counters", {"max(numels) + 4": "max(numels) + 4 * len(numels)"}, r"has one step counter"),
    ],
}  # fmt: skip
