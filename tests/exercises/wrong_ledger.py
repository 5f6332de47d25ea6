"""Chapter 1: answers that a reader may give, each with a part of the message that must meet them."""

from __future__ import annotations

from typing import Any


def everything_is_divided_at_every_stage(numel: int, world_size: int, stage: int) -> float:
    return 16 * numel / (world_size if stage else 1)


def each_stage_divides_one_part_alone(numel: int, world_size: int, stage: int) -> float:
    divisors = [world_size if stage == at else 1 for at in (3, 2, 1)]
    return sum(nbytes * numel / divisor for nbytes, divisor in zip((2, 2, 12), divisors))


def fp32_split(numel: int, world_size: int, stage: int) -> float:
    divisors = [world_size if stage >= at else 1 for at in (3, 2, 1)]
    return sum(nbytes * numel / divisor for nbytes, divisor in zip((4, 4, 8), divisors))


def stage_2_only_from_stage_3_on(numel: int, world_size: int, stage: int) -> float:
    divisors = [world_size if stage > at else 1 for at in (3, 2, 1)]
    return sum(nbytes * numel / divisor for nbytes, divisor in zip((2, 2, 12), divisors))


def whole_numbers(numel: int, world_size: int, stage: int) -> float:
    divisors = [world_size if stage >= at else 1 for at in (3, 2, 1)]
    return sum(nbytes * numel // divisor for nbytes, divisor in zip((2, 2, 12), divisors))


def gigabytes(numel: int, world_size: int, stage: int) -> float:
    divisors = [world_size if stage >= at else 1 for at in (3, 2, 1)]
    return sum(nbytes * numel / divisor for nbytes, divisor in zip((2, 2, 12), divisors)) / 1e9


def a_text(numel: int, world_size: int, stage: int) -> str:
    return "31.4 GB"


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


WRONG = [
    ("ledger.table_1", everything_is_divided_at_every_stage, r"52\.50 GB. All 16 bytes are divided"),
    ("ledger.table_1", each_stage_divides_one_part_alone, r"one part alone"),
    ("ledger.table_1", fp32_split, r"fp32 training, 4 \+ 4 \+ 8"),
    ("ledger.table_1", stage_2_only_from_stage_3_on, r"one part too few"),
    (
        "ledger.table_1",
        whole_numbers,
        r"499 bytes; it should be 117,187,500 bytes.*with /, not //",
    ),
    ("ledger.table_1", gigabytes, r"in gigabytes. Return bytes"),
    ("ledger.table_1", a_text, r"must return a number of bytes"),
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
]
