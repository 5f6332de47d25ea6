"""Chapter 1: answers that a reader may give, as changes of the solution, and what the check must say."""

from __future__ import annotations

FITS_NEVER = "divided == 0 or whole >= room"
ROUNDED_UP = "-(-divided // (room - whole))"

CHANGED = {
    "ledger.ranks_to_fit": [
        ("divides_everything", {"whole += part": "divided += part"},
         r"on every rank: subtract it from the room"),
        ("shares_what_is_whole_too", {"-(-divided": "-(-(whole + divided)"}, r"and then divides all bytes"),
        ("mixed_precision_always", {"zip(nbytes": "zip((2, 2, 12)"}, r"whatever `nbytes` says"),
        ("one_stage_late", {"stage >= divided_from": "stage > divided_from"}, r"one part too few"),
        ("first_part_first", {"zip(nbytes": "zip(nbytes[::-1]"}, r"and this the first"),
        ("rounds_down", {ROUNDED_UP: "divided // (room - whole)"}, r"rounded down"),
        ("adds_one", {ROUNDED_UP: "divided // (room - whole) + 1"}, r"do not add 1"),
        ("never_none", {"None\n": "10**6\n"},
         r"however many there are, 30,000,000,000 bytes of it.*No number is enough: return None"),
        ("negative_ranks", {FITS_NEVER: "room == whole"}, r"no number of ranks"),
        ("looks_as_far_as_32", {FITS_NEVER: FITS_NEVER + " or divided > 32 * (room - whole)"},
         r"64 ranks have 31\.41 GB each.* not more than 31\.41"),
        ("powers_of_two", {ROUNDED_UP: "1 << ((divided - 1) // (room - whole)).bit_length()"},
         r"It fits on 9 already"),
        ("forgets_to_return", {"return 1": "1", "return -": "-"}, r"Does the function end in a `return`"),
        ("divides_everything_and_rounds_down",
         {"whole += part": "divided += part", ROUNDED_UP: "divided // (room - whole)"},
         r"divides all of a parameter's bytes.*The quotient is rounded down"),
        ("one_stage_late_and_adds_one",
         {"stage >= divided_from": "stage > divided_from", ROUNDED_UP: "divided // (room - whole) + 1"},
         r"one part too few.*do not add 1"),
        ("a_text", {"whole = divided = 0": 'return "64 ranks"'}, r"a whole number of ranks, or None"),
    ],
    "ledger.what_would_help": [
        ("blames_the_largest_share",
         {"by_stage_2 > by_even_partition": "held.gradients >= held.optimizer_state"},
         r"not what is largest now"),
        ("divides_the_shard_again", {"8 * sum(numels)": "held.optimizer_state"}, r"one rank's share already"),
        ("all_gradients_go", {" - held.gradients / world_size": ""}, r"keeps the gradients of what it owns"),
        ("a_share_of_the_gradients_goes", {"held.gradients - ": ""},
         r"Llama-3-8B on 64 ranks.*It does, but.*takes away the rest: 32,121,044,992 - 1/64 of it\."),
        ("compares_well_and_returns_a_share",
         {'"stage 2", by_stage_2': '"stage 2", held.gradients / world_size'},
         r"saves 501,891,328 bytes\. Stage 2 leaves 1/N of the gradients on the rank"),
        ("always_stage_2", {"by_stage_2 > by_even_partition": "True"},
         r"one large tensor.* the other remedy saves"),
        ("name_alone", {", by_stage_2": "", ", by_even_partition": ""}, r"Return two values"),
    ],
    "ledger.floor": [
        ("state_vanishes", {" + state_of_the_largest": ""}, r"Somebody owns the largest tensor"),
        ("forgets_what_is_whole", {"return parameters_and_gradients +": "return"}, r"the state alone"),
        ("forgets_the_counter", {"max(numels) + 4": "max(numels)"}, r"its step counter"),
        ("all_counters", {"max(numels) + 4": "max(numels) + 4 * len(numels)"}, r"has one step counter"),
        ("mixed_precision", {"(4 + 4)": "(2 + 2)", "8 * max": "12 * max"}, r"mixed precision"),
        ("only_the_largest_tensor", {"sum(numels)": "max(numels)"}, r"not of the largest alone"),
    ],
}  # fmt: skip
