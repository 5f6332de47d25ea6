"""Chapter 1: answers that a reader may give, each with a part of the message that must meet them."""

from __future__ import annotations

from typing import Any


def _parts(numel: int, stage: int, nbytes: tuple[int, int, int]) -> tuple[int, int]:
    divided = sum(part for part, since in zip(nbytes, (3, 2, 1)) if stage >= since)
    return numel * (sum(nbytes) - divided), numel * divided


def divides_everything(numel: int, room: int, stage: int, nbytes: tuple[int, int, int]) -> int:
    return -(-numel * sum(nbytes) // room)


def shares_what_is_whole_too(numel: int, room: int, stage: int, nbytes: tuple[int, int, int]) -> int | None:
    whole, divided = _parts(numel, stage, nbytes)
    if whole + divided <= room:
        return 1
    return -(-(whole + divided) // (room - whole)) if divided and whole < room else None


def mixed_precision_always(numel: int, room: int, stage: int, nbytes: tuple[int, int, int]) -> int | None:
    return rounds_up(numel, room, stage, (2, 2, 12))


def rounds_up(numel: int, room: int, stage: int, nbytes: tuple[int, int, int]) -> int | None:
    """The right one."""
    whole, divided = _parts(numel, stage, nbytes)
    if whole + divided <= room:
        return 1
    return -(-divided // (room - whole)) if divided and whole < room else None


def one_stage_late(numel: int, room: int, stage: int, nbytes: tuple[int, int, int]) -> int | None:
    return rounds_up(numel, room, max(0, stage - 1), nbytes)


def first_part_first(numel: int, room: int, stage: int, nbytes: tuple[int, int, int]) -> int | None:
    return rounds_up(numel, room, stage, (nbytes[2], nbytes[1], nbytes[0]))


def rounds_down(numel: int, room: int, stage: int, nbytes: tuple[int, int, int]) -> int | None:
    whole, divided = _parts(numel, stage, nbytes)
    if whole + divided <= room:
        return 1
    return divided // (room - whole) if divided and whole < room else None


def adds_one(numel: int, room: int, stage: int, nbytes: tuple[int, int, int]) -> int | None:
    whole, divided = _parts(numel, stage, nbytes)
    if not divided:
        return 1 if whole <= room else None
    return divided // (room - whole) + 1 if whole < room else None


def never_none(numel: int, room: int, stage: int, nbytes: tuple[int, int, int]) -> int:
    whole, divided = _parts(numel, stage, nbytes)
    return max(1, -(-divided // (room - whole))) if room != whole else 10**6


def negative_ranks(numel: int, room: int, stage: int, nbytes: tuple[int, int, int]) -> int | None:
    whole, divided = _parts(numel, stage, nbytes)
    return None if room == whole else -(-divided // (room - whole))


def looks_as_far_as_32(numel: int, room: int, stage: int, nbytes: tuple[int, int, int]) -> int | None:
    whole, divided = _parts(numel, stage, nbytes)
    return next((n for n in range(1, 33) if whole + divided / n <= room), None)


def powers_of_two(numel: int, room: int, stage: int, nbytes: tuple[int, int, int]) -> int | None:
    right = rounds_up(numel, room, stage, nbytes)
    return right and 1 << (right - 1).bit_length()


def forgets_to_return(numel: int, room: int, stage: int, nbytes: tuple[int, int, int]) -> None:
    rounds_up(numel, room, stage, nbytes)


def a_text(numel: int, room: int, stage: int, nbytes: tuple[int, int, int]) -> str:
    return "64 ranks"


def blames_the_largest_share(numels: list[int], world_size: int, held: Any) -> tuple[str, float]:
    stage_2 = held.gradients - held.gradients / world_size
    even = held.optimizer_state - 8 * sum(numels) / world_size
    return ("even partition", even) if held.optimizer_state > held.gradients else ("stage 2", stage_2)


def divides_the_shard_again(numels: list[int], world_size: int, held: Any) -> tuple[str, float]:
    stage_2 = held.gradients - held.gradients / world_size
    even = held.optimizer_state - held.optimizer_state / world_size
    return max(("stage 2", stage_2), ("even partition", even), key=lambda pair: pair[1])


def all_gradients_go(numels: list[int], world_size: int, held: Any) -> tuple[str, float]:
    even = held.optimizer_state - 8 * sum(numels) / world_size
    return max(("stage 2", held.gradients), ("even partition", even), key=lambda pair: pair[1])


def a_share_of_the_gradients_goes(numels: list[int], world_size: int, held: Any) -> tuple[str, float]:
    even = held.optimizer_state - 8 * sum(numels) / world_size
    pairs = ("stage 2", held.gradients / world_size), ("even partition", even)
    return max(pairs, key=lambda pair: pair[1])


def compares_well_and_returns_a_share(numels: list[int], world_size: int, held: Any) -> tuple[str, float]:
    even = held.optimizer_state - 8 * sum(numels) / world_size
    helps = held.gradients - held.gradients / world_size > even
    return ("stage 2", held.gradients / world_size) if helps else ("even partition", even)


def always_stage_2(numels: list[int], world_size: int, held: Any) -> tuple[str, float]:
    return "stage 2", held.gradients - held.gradients / world_size


def name_alone(numels: list[int], world_size: int, held: Any) -> str:
    return "stage 2"


def state_vanishes(numels: list[int]) -> int:
    return 8 * sum(numels)


def forgets_what_is_whole(numels: list[int]) -> int:
    return 8 * max(numels) + 4


def forgets_the_counter(numels: list[int]) -> int:
    return 8 * sum(numels) + 8 * max(numels)


def all_counters(numels: list[int]) -> int:
    return 8 * sum(numels) + 8 * max(numels) + 4 * len(numels)


def mixed_precision(numels: list[int]) -> int:
    return 4 * sum(numels) + 12 * max(numels) + 4


def only_the_largest_tensor(numels: list[int]) -> int:
    return 16 * max(numels) + 4


def divides_everything_and_rounds_down(
    numel: int, room: int, stage: int, nbytes: tuple[int, int, int]
) -> int | None:
    return 1 if numel * sum(nbytes) <= room else numel * sum(nbytes) // room


def one_stage_late_and_adds_one(
    numel: int, room: int, stage: int, nbytes: tuple[int, int, int]
) -> int | None:
    return adds_one(numel, room, max(0, stage - 1), nbytes)


WRONG = [
    ("ledger.ranks_to_fit", divides_everything, r"on every rank: subtract it from the room"),
    ("ledger.ranks_to_fit", shares_what_is_whole_too, r"and then divides all bytes"),
    ("ledger.ranks_to_fit", mixed_precision_always, r"whatever `nbytes` says"),
    ("ledger.ranks_to_fit", one_stage_late, r"one part too few"),
    ("ledger.ranks_to_fit", first_part_first, r"and this the first"),
    ("ledger.ranks_to_fit", rounds_down, r"rounded down"),
    ("ledger.ranks_to_fit", adds_one, r"do not add 1"),
    ("ledger.ranks_to_fit", never_none, r"however many there are, 30,000,000,000 bytes of it"),
    ("ledger.ranks_to_fit", negative_ranks, r"no number of ranks"),
    ("ledger.ranks_to_fit", looks_as_far_as_32, r"64 ranks have 31\.41 GB each.* not more than 31\.41"),
    ("ledger.ranks_to_fit", powers_of_two, r"It fits on 9 already"),
    ("ledger.ranks_to_fit", forgets_to_return, r"Does the function end in a `return`"),
    ("ledger.ranks_to_fit", a_text, r"a whole number of ranks, or None"),
    ("ledger.what_would_help", blames_the_largest_share, r"not what is largest now"),
    ("ledger.what_would_help", divides_the_shard_again, r"one rank's share already"),
    ("ledger.what_would_help", all_gradients_go, r"keeps the gradients of what it owns"),
    (
        "ledger.what_would_help",
        a_share_of_the_gradients_goes,
        r"Llama-3-8B on 64 ranks.*It does, but.*takes away the rest: 32,121,044,992 - 1/64 of it\.",
    ),
    (
        "ledger.what_would_help",
        compares_well_and_returns_a_share,
        r"saves 501,891,328 bytes\. Stage 2 leaves 1/N of the gradients on the rank",
    ),
    ("ledger.what_would_help", always_stage_2, r"one large tensor.* the other remedy saves"),
    ("ledger.what_would_help", name_alone, r"Return two values"),
    ("ledger.floor", state_vanishes, r"Somebody owns the largest tensor"),
    ("ledger.floor", forgets_what_is_whole, r"the state alone"),
    ("ledger.floor", forgets_the_counter, r"its step counter"),
    ("ledger.floor", all_counters, r"has one step counter"),
    ("ledger.floor", mixed_precision, r"mixed precision"),
    ("ledger.floor", only_the_largest_tensor, r"not of the largest alone"),
    (
        "ledger.ranks_to_fit",
        divides_everything_and_rounds_down,
        r"divides all of a parameter's bytes.*The quotient is rounded down",
    ),
    ("ledger.ranks_to_fit", one_stage_late_and_adds_one, r"one part too few.*do not add 1"),
    ("ledger.ranks_to_fit", never_none, r"No number is enough: return None"),
]
