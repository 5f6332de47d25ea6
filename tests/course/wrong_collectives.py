"""Chapter 2: answers that a reader may give, as changes of the solution, and what the check must say."""

from __future__ import annotations

from typing import Any

ROUNDS = "    for number in range(world_size - 1):\n"
MORE_ROUNDS = "    for number in range(world_size):\n"
ADD = (
    "        send(chunks[(rank - number) % world_size])\n"
    "        chunks[(rank - number - 1) % world_size] += recv()\n"
)
GATHER = (
    "        send(chunks[(rank + 1 - number) % world_size])\n"
    "        chunks[(rank - number) % world_size] = recv()"
)
PER_BYTE = " / of_one_byte.busiest_bytes"

CHANGED = {
    "collectives.ring_all_reduce": [
        ("never_gathers", {ROUNDS + GATHER: ""}, r"That is a reduce-scatter: .* go round once more"),
        ("a_first_half_of_n_rounds",
         {ROUNDS + ADD: MORE_ROUNDS + ADD, ROUNDS: "    for number in range(1, world_size):\n"},
         r"has the part of rank 0 more than once\. Each half has N - 1 = 2 rounds; yours have 5 together"),
        ("gathers_into_the_chunk_beside",
         {"number) % world_size] = recv": "number + 1) % world_size] = recv"},
         r"on 3 ranks, chunk \d of rank 0 .*The first half is right\."),
        ("one_round_too_few", {ROUNDS + GATHER: "", "world_size - 1": "world_size - 2"},
         r"lacks the part of rank 1"),
        ("receives_once_too_often", {GATHER: GATHER + "\n    recv()"},
         r"waits in recv\(\) for a message that nobody sends"),
        ("adds_into_a_new_tensor",
         {ROUNDS + GATHER: "", ROUNDS: "    chunks = [chunk.clone() for chunk in chunks]\n" + ROUNDS},
         r"lacks the part of rank 1.*list is as it was"),
        ("drops_chunks", {ROUNDS + GATHER: "    del chunks[rank]"}, r"Put each sum into its chunk"),
        ("sends_a_number", {"chunks[(rank - number) % world_size])": "rank)"}, r"send takes a tensor, not"),
    ],
    "collectives.small_or_large": [
        ("of_one_message", {"of_one_byte.rounds * ": "", PER_BYTE: ""},
         r"α times β: either one message alone"),
        ("in_gigabits", {"gb_per_s *": "gb_per_s / 8 *"}, r"factor of 8 off: `gb_per_s` counts gigabytes"),
        ("in_kilobytes", {" * 1e3": ""}, r"a power of 1,000 off"),
        ("all_rounds_of_all_bytes", {PER_BYTE: ""}, r"the busiest rank does not carry one payload"),
        ("one_for_each_other_rank", {"of_one_byte.rounds": "(n - 1)", PER_BYTE: ""},
         r"`traffic` knows the rounds"),
    ],
}  # fmt: skip


def sends_the_whole_tensor(rank: int, n: int, chunks: Any, send: Any, recv: Any) -> None:
    passing = [chunk.clone() for chunk in chunks]
    for _ in range(n - 1):
        for chunk in passing:
            send(chunk)
        passing = [recv() for _ in passing]
        for chunk, received in zip(chunks, passing):
            chunk += received


WRONG = [
    (
        "collectives.ring_all_reduce",
        sends_the_whole_tensor,
        r"sums are right, but on 3 ranks .* 2\.00 times its tensor.* one chunk each: 1\.33 times the tensor",
    ),
]
