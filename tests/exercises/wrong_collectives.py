"""Chapter 2: answers that a reader may give, each with a part of the message that must meet them."""

from __future__ import annotations

from typing import Any

from zero_ref.simulator.traffic import traffic

# ---------------------------------------------------------------------------------------- ring_all_reduce


def _reduce(rank: int, n: int, chunks: Any, send: Any, recv: Any, shift: int = 0) -> None:
    for number in range(n - 1):
        send(chunks[(rank - number + shift) % n])
        chunks[(rank - number - 1) % n] += recv()


def _gather(rank: int, n: int, chunks: Any, send: Any, recv: Any, shift: int = 0, start: int = 1) -> None:
    for number in range(n - 1):
        send(chunks[(rank + start - number) % n])
        chunks[(rank - number + shift) % n] = recv()


def never_gathers(rank: int, n: int, chunks: Any, send: Any, recv: Any) -> None:
    _reduce(rank, n, chunks, send, recv)


def sends_the_whole_tensor(rank: int, n: int, chunks: Any, send: Any, recv: Any) -> None:
    passing = [chunk.clone() for chunk in chunks]
    for _ in range(n - 1):
        for chunk in passing:
            send(chunk)
        passing = [recv() for _ in passing]
        for chunk, received in zip(chunks, passing):
            chunk += received


def sends_the_chunk_beside(rank: int, n: int, chunks: Any, send: Any, recv: Any) -> None:
    _reduce(rank, n, chunks, send, recv, shift=1)
    _gather(rank, n, chunks, send, recv)


def gathers_into_the_chunk_beside(rank: int, n: int, chunks: Any, send: Any, recv: Any) -> None:
    _reduce(rank, n, chunks, send, recv)
    _gather(rank, n, chunks, send, recv, shift=1)


def sends_its_own_chunk_again(rank: int, n: int, chunks: Any, send: Any, recv: Any) -> None:
    _reduce(rank, n, chunks, send, recv)
    _gather(rank, n, chunks, send, recv, start=0)


def starts_the_second_half_too_far_on(rank: int, n: int, chunks: Any, send: Any, recv: Any) -> None:
    _reduce(rank, n, chunks, send, recv)
    _gather(rank, n, chunks, send, recv, start=2)


def adds_in_the_second_half(rank: int, n: int, chunks: Any, send: Any, recv: Any) -> None:
    _reduce(rank, n, chunks, send, recv)
    for number in range(n - 1):
        send(chunks[(rank + 1 - number) % n])
        chunks[(rank - number) % n] += recv()


def never_adds(rank: int, n: int, chunks: Any, send: Any, recv: Any) -> None:
    for number in range(2 * (n - 1)):
        send(chunks[(rank - number) % n])
        chunks[(rank - number - 1) % n] = recv()


def a_first_half_of_n_rounds(rank: int, n: int, chunks: Any, send: Any, recv: Any) -> None:
    _all_in_one_loop(rank, n, chunks, send, recv, rounds=2 * n - 1)


def adds_once_too_often(rank: int, n: int, chunks: Any, send: Any, recv: Any) -> None:
    _all_in_one_loop(rank, n, chunks, send, recv, rounds=2 * n - 2)


def _all_in_one_loop(rank: int, n: int, chunks: Any, send: Any, recv: Any, rounds: int) -> None:
    for number in range(rounds):
        send(chunks[(rank - number) % n])
        at = (rank - number - 1) % n
        chunks[at] = recv() + (chunks[at] if number < n else 0)


def goes_round_once_more(rank: int, n: int, chunks: Any, send: Any, recv: Any) -> None:
    for number in range(n):
        send(chunks[(rank - number) % n])
        chunks[(rank - number - 1) % n] += recv()
    _gather(rank, n, chunks, send, recv)  # which happens to mend the sums


def one_send_more(rank: int, n: int, chunks: Any, send: Any, recv: Any) -> None:
    _reduce(rank, n, chunks, send, recv)
    _gather(rank, n, chunks, send, recv)
    send(chunks[(rank + 2) % n])


def without_modulo(rank: int, n: int, chunks: Any, send: Any, recv: Any) -> None:
    for number in range(n - 1):
        send(chunks[rank - number])
        chunks[rank - number - 1] += recv()
    for number in range(n - 1):
        send(chunks[rank + 1 - number])
        chunks[rank - number] = recv()


def goes_on_adding(rank: int, n: int, chunks: Any, send: Any, recv: Any) -> None:
    for number in range(2 * (n - 1)):
        send(chunks[(rank - number) % n])
        chunks[(rank - number - 1) % n] += recv()


def one_round_too_few(rank: int, n: int, chunks: Any, send: Any, recv: Any) -> None:
    for number in range(n - 2):
        send(chunks[(rank - number) % n])
        chunks[(rank - number - 1) % n] += recv()


def receives_once_too_often(rank: int, n: int, chunks: Any, send: Any, recv: Any) -> None:
    _reduce(rank, n, chunks, send, recv)
    _gather(rank, n, chunks, send, recv)
    recv()


def adds_into_a_new_tensor(rank: int, n: int, chunks: Any, send: Any, recv: Any) -> None:
    total = list(chunks)
    _reduce(rank, n, [chunk.clone() for chunk in total], send, recv)


def drops_chunks(rank: int, n: int, chunks: Any, send: Any, recv: Any) -> None:
    _reduce(rank, n, chunks, send, recv)
    del chunks[rank]


def sends_a_number(rank: int, n: int, chunks: Any, send: Any, recv: Any) -> None:
    send(rank)


# --------------------------------------------------------------------------------------- find_the_impostor


def _off(payload: int, n: int, sent: dict[str, int], backend: str = "nccl", by: float = 0.05) -> list[str]:
    theory = {op: traffic(op, payload, n, backend=backend).total_bytes for op in sent}
    return [op for op in sent if abs(sent[op] - theory[op]) > by * theory[op]]


def counts_the_busiest_rank(payload: int, n: int, sent: dict[str, int]) -> list[str]:
    theory = {op: traffic(op, payload, n).busiest_bytes for op in sent}
    return [op for op in sent if abs(sent[op] - theory[op]) > 0.05 * theory[op]]


def accuses_everybody(payload: int, n: int, sent: dict[str, int]) -> list[str]:
    return list(sent)


def knows_gloo(payload: int, n: int, sent: dict[str, int]) -> list[str]:
    return _off(payload, n, sent, backend="gloo")


def to_the_byte(payload: int, n: int, sent: dict[str, int]) -> list[str]:
    return _off(payload, n, sent, by=0)


def always_the_reduce_scatter(payload: int, n: int, sent: dict[str, int]) -> list[str]:
    return ["reduce_scatter"]


def only_ever_the_reduce_scatter(payload: int, n: int, sent: dict[str, int]) -> list[str]:
    return [op for op in _off(payload, n, sent) if op == "reduce_scatter"]


def as_many_as_the_most(payload: int, n: int, sent: dict[str, int]) -> list[str]:
    return [op for op in sent if sent[op] >= 1.5 * (n - 1) * payload and n > 1]


def never_the_all_reduce(payload: int, n: int, sent: dict[str, int]) -> list[str]:
    return [op for op in _off(payload, n, sent) if op != "all_reduce"]


def only_the_double(payload: int, n: int, sent: dict[str, int]) -> list[str]:
    theory = {op: traffic(op, payload, n).total_bytes for op in sent}
    return [op for op in sent if sent[op] > 1.95 * theory[op] or sent[op] < 0.6 * theory[op]]


def only_too_many(payload: int, n: int, sent: dict[str, int]) -> list[str]:
    return [op for op in sent if sent[op] > 1.05 * traffic(op, payload, n).total_bytes]


def divides_by_nothing(payload: int, n: int, sent: dict[str, int]) -> list[str]:
    return [op for op in sent if sent[op] / traffic(op, payload, n).total_bytes > 1.05]


def a_sentence(payload: int, n: int, sent: dict[str, int]) -> str:
    return "reduce_scatter"


def another_name(payload: int, n: int, sent: dict[str, int]) -> list[str]:
    return ["reduce_scatter_tensor"]


# ------------------------------------------------------------------------------------------ small_or_large


def of_one_message(op: str, world_size: int, latency_us: float, gb_per_s: float) -> float:
    return latency_us * gb_per_s * 1e3


def of_all_ranks_together(op: str, world_size: int, latency_us: float, gb_per_s: float) -> float:
    load = traffic(op, 1, world_size)
    return load.rounds * latency_us * gb_per_s * 1e3 / load.total_bytes


def in_gigabits(op: str, world_size: int, latency_us: float, gb_per_s: float) -> float:
    load = traffic(op, 1, world_size)
    return load.rounds * latency_us * gb_per_s / 8 * 1e3 / load.busiest_bytes


def in_kilobytes(op: str, world_size: int, latency_us: float, gb_per_s: float) -> float:
    load = traffic(op, 1, world_size)
    return load.rounds * latency_us * gb_per_s / load.busiest_bytes


def all_rounds_of_all_bytes(op: str, world_size: int, latency_us: float, gb_per_s: float) -> float:
    return traffic(op, 1, world_size).rounds * latency_us * gb_per_s * 1e3


def one_for_each_other_rank(op: str, world_size: int, latency_us: float, gb_per_s: float) -> float:
    return (world_size - 1) * latency_us * gb_per_s * 1e3


def nothing(op: str, world_size: int, latency_us: float, gb_per_s: float) -> float:
    return 0


WRONG = [
    ("collectives.ring_all_reduce", never_gathers, r"That is a reduce-scatter: .* go round once more"),
    (
        "collectives.ring_all_reduce",
        sends_the_whole_tensor,
        r"sums are right, but on 3 ranks .* 2\.00 times its tensor.* one chunk each: 1\.33 times the tensor",
    ),
    (
        "collectives.ring_all_reduce",
        one_send_more,
        r"1\.67 times its tensor, in 5 messages\. A ring has 2\(N - 1\) = 4,",
    ),
    ("collectives.ring_all_reduce", sends_the_chunk_beside, r"chunk 0 of rank 0 .*\. In the first half"),
    ("collectives.ring_all_reduce", never_adds, r"\. In the first half .* to which it has just added"),
    (
        "collectives.ring_all_reduce",
        a_first_half_of_n_rounds,
        r"has the part of rank 0 more than once\. Each half has N - 1 = 2 rounds; yours have 5 together",
    ),
    ("collectives.ring_all_reduce", adds_once_too_often, r"The first half is right\. .* without adding"),
    ("collectives.ring_all_reduce", goes_round_once_more, r"sums are right, .* in 5 messages"),
    (
        "collectives.ring_all_reduce",
        gathers_into_the_chunk_beside,
        r"on 3 ranks, chunk \d of rank 0 .*The first half is right\.",
    ),
    ("collectives.ring_all_reduce", sends_its_own_chunk_again, r"The first half is right\."),
    (
        "collectives.ring_all_reduce",
        starts_the_second_half_too_far_on,
        r"The first half is right\. .* first sends the chunk that it has just finished",
    ),
    ("collectives.ring_all_reduce", adds_in_the_second_half, r"The first half is right\. .* without adding"),
    (
        "collectives.ring_all_reduce",
        goes_on_adding,
        r"has the part of rank \d more than once.*The first half is right\.",
    ),
    (
        "collectives.ring_all_reduce",
        without_modulo,
        r"^without_modulo\(rank=2, world_size=3, \.\.\.\) raised IndexError.*count modulo N\.$",
    ),
    ("collectives.ring_all_reduce", one_round_too_few, r"lacks the part of rank 1"),
    (
        "collectives.ring_all_reduce",
        receives_once_too_often,
        r"waits in recv\(\) for a message that nobody sends",
    ),
    ("collectives.ring_all_reduce", adds_into_a_new_tensor, r"lacks the part of rank 1.*list is as it was"),
    ("collectives.ring_all_reduce", drops_chunks, r"Put each sum into its chunk"),
    ("collectives.ring_all_reduce", sends_a_number, r"send takes a tensor, not"),
    ("collectives.find_the_impostor", knows_gloo, r"N - 1 payloads would do. Compare with the theory"),
    ("collectives.find_the_impostor", to_the_byte, r"allow for 5%"),
    ("collectives.find_the_impostor", counts_the_busiest_rank, r"all ranks together send: `total_bytes`"),
    ("collectives.find_the_impostor", accuses_everybody, r"'all_reduce' sends what its name promises"),
    (
        "collectives.find_the_impostor",
        always_the_reduce_scatter,
        r"'reduce_scatter' sends what its name promises",
    ),
    (
        "collectives.find_the_impostor",
        only_ever_the_reduce_scatter,
        r"'all_gather' sends 2.01 times what it needs",
    ),
    (
        "collectives.find_the_impostor",
        never_the_all_reduce,
        r"'all_reduce' sends 2.01 times what it needs",
    ),
    ("collectives.find_the_impostor", only_the_double, r"'all_gather' sends 1.08 times what it needs"),
    ("collectives.find_the_impostor", only_too_many, r"'broadcast' sends 0.50 times what it needs"),
    ("collectives.find_the_impostor", as_many_as_the_most, r"'all_reduce' sends what its name promises"),
    ("collectives.find_the_impostor", divides_by_nothing, r"ZeroDivisionError.*On one rank theory is 0"),
    ("collectives.find_the_impostor", a_sentence, r"must return a list of operations"),
    ("collectives.find_the_impostor", another_name, r"'reduce_scatter_tensor' was not measured"),
    ("collectives.small_or_large", of_one_message, r"α times β: either one message alone"),
    ("collectives.small_or_large", of_all_ranks_together, r"α times β: .* together \(`total_bytes`\)"),
    ("collectives.small_or_large", in_gigabits, r"factor of 8 off: `gb_per_s` counts gigabytes"),
    ("collectives.small_or_large", in_kilobytes, r"a power of 1,000 off"),
    ("collectives.small_or_large", all_rounds_of_all_bytes, r"the busiest rank does not carry one payload"),
    ("collectives.small_or_large", one_for_each_other_rank, r"`traffic` knows the rounds"),
    ("collectives.small_or_large", nothing, r"a number of bytes above 0"),
]
