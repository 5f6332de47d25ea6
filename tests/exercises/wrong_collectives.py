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
IS_OFF = "abs(nbytes - theory) > 0.05 * theory"
PER_BYTE = " / of_one_byte.busiest_bytes"

CHANGED = {
    "collectives.ring_all_reduce": [
        ("never_gathers", {ROUNDS + GATHER: ""}, r"That is a reduce-scatter: .* go round once more"),
        ("one_send_more", {GATHER: GATHER + "\n    send(chunks[(rank + 2) % world_size])"},
         r"1\.67 times its tensor, in 5 messages\. A ring has 2\(N - 1\) = 4,"),
        ("sends_the_chunk_beside", {"send(chunks[(rank - number)": "send(chunks[(rank - number + 1)"},
         r"chunk 0 of rank 0 .*\. In the first half"),
        ("never_adds", {"+= recv()": "= recv()"}, r"\. In the first half .* to which it has just added"),
        ("a_first_half_of_n_rounds",
         {ROUNDS + ADD: MORE_ROUNDS + ADD, ROUNDS: "    for number in range(1, world_size):\n"},
         r"has the part of rank 0 more than once\. Each half has N - 1 = 2 rounds; yours have 5 together"),
        ("adds_once_too_often",
         {ROUNDS + ADD: MORE_ROUNDS + ADD, ROUNDS: "    for number in range(1, world_size - 1):\n"},
         r"The first half is right\. .* without adding"),
        ("goes_round_once_more",  # the second half happens to mend the sums
         {ROUNDS + ADD: MORE_ROUNDS + ADD}, r"sums are right, .* in 5 messages"),
        ("gathers_into_the_chunk_beside",
         {"number) % world_size] = recv": "number + 1) % world_size] = recv"},
         r"on 3 ranks, chunk \d of rank 0 .*The first half is right\."),
        ("sends_its_own_chunk_again", {"rank + 1": "rank"}, r"The first half is right\."),
        ("starts_the_second_half_too_far_on", {"rank + 1": "rank + 2"},
         r"The first half is right\. .* first sends the chunk that it has just finished"),
        ("adds_in_the_second_half", {"] = recv()": "] += recv()"},
         r"has the part of rank \d more than once.*The first half is right\. .* without adding"),
        ("without_modulo", {" % world_size": ""},
         r"^ring_all_reduce\(rank=2, world_size=3, \.\.\.\) raised IndexError.*count modulo N\.$"),
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
    "collectives.find_the_impostor": [
        ("knows_gloo", {"world_size)": 'world_size, backend="gloo")'},
         r"N - 1 payloads would do. Compare with the theory"),
        ("to_the_byte", {"0.05 * theory": "0"}, r"allow for 5%"),
        ("counts_the_busiest_rank", {"total_bytes": "busiest_bytes"},
         r"all ranks together send: `total_bytes`"),
        ("accuses_everybody", {IS_OFF: "True"}, r"'all_reduce' sends what its name promises"),
        ("always_the_reduce_scatter", {"return impostors": 'return ["reduce_scatter"]'},
         r"'reduce_scatter' sends what its name promises"),
        ("only_ever_the_reduce_scatter", {IS_OFF: IS_OFF + ' and op == "reduce_scatter"'},
         r"'all_gather' sends 2.01 times what it needs"),
        ("never_the_all_reduce", {IS_OFF: IS_OFF + ' and op != "all_reduce"'},
         r"'all_reduce' sends 2.01 times what it needs"),
        ("only_the_double", {IS_OFF: "nbytes > 1.95 * theory or nbytes < 0.6 * theory"},
         r"'all_gather' sends 1.08 times what it needs"),
        ("only_too_many", {"abs(nbytes - theory)": "nbytes - theory"},
         r"'broadcast' sends 0.50 times what it needs"),
        ("as_many_as_the_most", {IS_OFF: "nbytes >= 1.5 * (world_size - 1) * payload > 0"},
         r"'all_reduce' sends what its name promises"),
        ("divides_by_nothing", {IS_OFF: "nbytes / theory > 1.05"},
         r"ZeroDivisionError.*On one rank theory is 0"),
        ("a_sentence", {"return impostors": 'return "reduce_scatter"'}, r"must return a list of operations"),
        ("another_name", {"return impostors": 'return ["reduce_scatter_tensor"]'},
         r"'reduce_scatter_tensor' was not measured"),
    ],
    "collectives.small_or_large": [
        ("of_one_message", {"of_one_byte.rounds * ": "", PER_BYTE: ""},
         r"α times β: either one message alone"),
        ("of_all_ranks_together", {"busiest_bytes": "total_bytes"},
         r"α times β: .* together \(`total_bytes`\)"),
        ("in_gigabits", {"gb_per_s *": "gb_per_s / 8 *"}, r"factor of 8 off: `gb_per_s` counts gigabytes"),
        ("in_kilobytes", {" * 1e3": ""}, r"a power of 1,000 off"),
        ("all_rounds_of_all_bytes", {PER_BYTE: ""}, r"the busiest rank does not carry one payload"),
        ("one_for_each_other_rank", {"of_one_byte.rounds": "(n - 1)", PER_BYTE: ""},
         r"`traffic` knows the rounds"),
        ("nothing", {"latency_in_bytes" + PER_BYTE: "0"}, r"a number of bytes above 0"),
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
