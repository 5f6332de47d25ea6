"""Chapter 13: answers that a reader may give, each with a part of the message that must meet them."""

from __future__ import annotations

from typing import Any

from zero_ref.plan.calls import Call


def _times(stage: int, backend: str) -> int:
    if stage == 3:
        return 4 if backend == "gloo" else 3
    return 3 if stage == 1 else 2


def the_second_gather_forgotten(
    stage: int, numel: int, itemsize: int, world_size: int, backend: str
) -> float:
    times = _times(stage, backend) - (stage == 3)
    return times * numel * itemsize * (world_size - 1) / world_size


def its_own_part_too(stage: int, numel: int, itemsize: int, world_size: int, backend: str) -> float:
    return _times(stage, backend) * numel * itemsize * (world_size > 1)


def on_one_rank_too(stage: int, numel: int, itemsize: int, world_size: int, backend: str) -> float:
    return float(_times(stage, backend) * numel * itemsize)


def as_on_nccl(stage: int, numel: int, itemsize: int, world_size: int, backend: str) -> float:
    return _times(stage, "nccl") * numel * itemsize * (world_size - 1) / world_size


def as_on_gloo(stage: int, numel: int, itemsize: int, world_size: int, backend: str) -> float:
    return _times(stage, "gloo") * numel * itemsize * (world_size - 1) / world_size


def in_elements(stage: int, numel: int, itemsize: int, world_size: int, backend: str) -> float:
    return _times(stage, backend) * numel * (world_size - 1) / world_size


def of_all_ranks(stage: int, numel: int, itemsize: int, world_size: int, backend: str) -> float:
    return float(_times(stage, backend) * numel * itemsize * (world_size - 1))


def owners_at_stage_1(stage: int, numel: int, itemsize: int, world_size: int, backend: str) -> float:
    times = 2 if stage == 1 else _times(stage, backend)
    return times * numel * itemsize * (world_size - 1) / world_size


def all_reduced_at_stage_2(stage: int, numel: int, itemsize: int, world_size: int, backend: str) -> float:
    times = 3 if stage == 2 else _times(stage, backend)
    return times * numel * itemsize * (world_size - 1) / world_size


def less_each_stage(stage: int, numel: int, itemsize: int, world_size: int, backend: str) -> float:
    return (4 - stage) / 2 * numel * itemsize * (world_size - 1) / world_size


def in_words(stage: int, numel: int, itemsize: int, world_size: int, backend: str) -> str:
    return "2 psi"


def _balance(
    tflops: float,
    gb_per_s: float,
    latency_us: float,
    numel: int,
    world_size: int,
    *,
    flops: float = 2,
    itemsize: float = 2,
) -> float:
    sent = itemsize * numel * (world_size - 1) / world_size
    gather_s = (world_size - 1) * latency_us / 1e6 + sent / (gb_per_s * 1e9)
    return gather_s * tflops * 1e12 / (flops * numel)


def without_latency(tflops: float, gb_per_s: float, latency_us: float, numel: int, world_size: int) -> float:
    return _balance(tflops, gb_per_s, 0, numel, world_size)


def one_latency(tflops: float, gb_per_s: float, latency_us: float, numel: int, world_size: int) -> float:
    return _balance(tflops, gb_per_s, latency_us / (world_size - 1), numel, world_size)


def all_of_it_arrives(
    tflops: float, gb_per_s: float, latency_us: float, numel: int, world_size: int
) -> float:
    return tflops * 1e3 / gb_per_s + _balance(tflops, 1e30, latency_us, numel, world_size)


def backward_beside_one_gather(
    tflops: float, gb_per_s: float, latency_us: float, numel: int, world_size: int
) -> float:
    return _balance(tflops, gb_per_s, latency_us, numel, world_size, flops=4)


def in_float32(tflops: float, gb_per_s: float, latency_us: float, numel: int, world_size: int) -> float:
    return _balance(tflops, gb_per_s, latency_us, numel, world_size, itemsize=4)


def all_traffic_in_forward(
    tflops: float, gb_per_s: float, latency_us: float, numel: int, world_size: int
) -> float:
    return 3 * _balance(tflops, gb_per_s, latency_us, numel, world_size)


def in_thousands(tflops: float, gb_per_s: float, latency_us: float, numel: int, world_size: int) -> float:
    return _balance(tflops, gb_per_s, latency_us, numel, world_size) / 1000


def no_tokens(tflops: float, gb_per_s: float, latency_us: float, numel: int, world_size: int) -> float:
    return 0.0


def _gather(size: int) -> Call:
    return Call("all_gather", size)


def _reduce(size: int) -> Call:
    return Call("reduce_scatter", size)


def no_second_gather(sizes: list[int]) -> list[Call]:
    return [_gather(size) for size in sizes] + [_reduce(size) for size in reversed(sizes)]


def the_root_again(sizes: list[int]) -> list[Call]:
    calls = [_gather(size) for size in sizes]
    for size in reversed(sizes):
        calls += [_gather(size), _reduce(size)]
    return calls


def nothing_ahead(sizes: list[int]) -> list[Call]:
    calls = [_gather(size) for size in sizes]
    for size in reversed(sizes[1:]):
        calls += [_gather(size), _reduce(size)]
    return [*calls, _reduce(sizes[0])]


def backward_in_forwards_order(sizes: list[int]) -> list[Call]:
    calls = [_gather(size) for size in sizes]
    for size in sizes[1:]:
        calls += [_gather(size), _reduce(size)]
    return [*calls, _reduce(sizes[0])]


def the_root_reduced_first(sizes: list[int]) -> list[Call]:
    blocks = sizes[:0:-1]
    return [
        *(_gather(size) for size in sizes + blocks),
        *(_reduce(size) for size in [sizes[0], *blocks]),
    ]


def the_root_not_reduced(sizes: list[int]) -> list[Call]:
    return nothing_ahead(sizes)[:-1]


def all_reduced(sizes: list[int]) -> list[Call]:
    return [Call("all_reduce", size) for size in reversed(sizes)]


def sizes_only(sizes: list[int]) -> Any:
    return sizes


WRONG = [
    (
        "stages.volume",
        the_second_gather_forgotten,
        r"\(3, .*let go after its forward. What does its backward need",
    ),
    ("stages.volume", its_own_part_too, r"has 1/8 itself, and does not send it"),
    ("stages.volume", on_one_rank_too, r"has 1/8 itself"),
    ("stages.volume", as_on_nccl, r"'gloo'\).* a reduce-scatter is an all-reduce inside"),
    ("stages.volume", as_on_gloo, r"'nccl'\).* Only Gloo makes an all-reduce"),
    ("stages.volume", in_elements, r"These are elements. Each has 4 bytes"),
    ("stages.volume", of_all_ranks, r"bytes of all ranks together"),
    ("stages.volume", owners_at_stage_1, r"At stage 1 every rank still gets all averaged gradients"),
    ("stages.volume", all_reduced_at_stage_2, r"At stage 2 gradients are reduced to shares"),
    ("stages.volume", less_each_stage, r"Yours is 1\.5 times .* how often"),
    ("stages.volume", in_words, r"must return a number of bytes"),
    ("stages.break_even", without_latency, r"too few.* each of them waits for a latency"),
    ("stages.break_even", one_latency, r"too few.* N - 1 rounds"),
    ("stages.break_even", all_of_it_arrives, r"more than needed.* \(N-1\)/N of it arrive"),
    ("stages.break_even", backward_beside_one_gather, r"too few.* compare it with 1 gather"),
    ("stages.break_even", in_float32, r"more than needed.* bfloat16 has 2 bytes"),
    ("stages.break_even", all_traffic_in_forward, r"one gather of each block, and nothing else"),
    ("stages.break_even", in_thousands, r"too few.* hides if the block before it computes for as long"),
    ("stages.break_even", no_tokens, r"number of tokens above 0"),
    ("stages.order", no_second_gather, r"let go after their forward. Their backward needs them again"),
    ("stages.order", the_root_again, r"The root is not let go"),
    ("stages.order", nothing_ahead, r"the next block is asked for before this one computes"),
    ("stages.order", backward_in_forwards_order, r"should be gathered in the order \[24, 40, 48, 56, 56, 48"),
    ("stages.order", the_root_reduced_first, r"the last block first, the root at the end"),
    ("stages.order", the_root_not_reduced, r"root's too, are reduced once"),
    ("stages.order", all_reduced, r"makes two kinds of calls"),
    ("stages.order", sizes_only, r"must return a list of calls"),
]
