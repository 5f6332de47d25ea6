"""Chapter 7: answers that a reader may give, each with a part of the message that must meet them."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from zero_ref.plan.calls import Call
from zero_ref.plan.partition import Partition


def as_ddp_does(nbytes: float, backward_ms: float, latency_ms: float, gb_per_s: float) -> float:
    return 25 * 2**20


def one_bucket(nbytes: float, backward_ms: float, latency_ms: float, gb_per_s: float) -> float:
    return nbytes


def as_small_as_can_be(nbytes: float, backward_ms: float, latency_ms: float, gb_per_s: float) -> float:
    return nbytes / 5000


def where_latency_is_half(nbytes: float, backward_ms: float, latency_ms: float, gb_per_s: float) -> float:
    return latency_ms * gb_per_s * 1e6


def how_many(nbytes: float, backward_ms: float, latency_ms: float, gb_per_s: float) -> float:
    return round((backward_ms / latency_ms / 2) ** 0.5)


def below_nothing(nbytes: float, backward_ms: float, latency_ms: float, gb_per_s: float) -> float:
    return nbytes - 1e9


def _sent(partition: Partition, bucket: list[int]) -> list[Call]:
    return [
        Call("broadcast", 4 * piece.numel, owner)
        for owner, slices in enumerate(partition.slices_of_rank)
        for piece in slices
        if piece.param in bucket
    ]


def _reduced(partition: Partition, bucket: list[int]) -> Call:
    return Call("all_reduce", 4 * sum(partition.numels[param] for param in bucket))


def all_sent_at_the_end(partition: Partition, buckets: list[list[int]]) -> list[Call]:
    calls = [_reduced(partition, bucket) for bucket in buckets]
    return calls + _sent(partition, [param for bucket in buckets for param in bucket])


def each_sent_at_once(partition: Partition, buckets: list[list[int]]) -> list[Call]:
    calls = []
    for bucket in buckets:
        calls += [_reduced(partition, bucket), *_sent(partition, bucket)]
    return calls


def without_the_last(partition: Partition, buckets: list[list[int]]) -> list[Call]:
    calls = []
    for number, bucket in enumerate(buckets):
        calls.append(_reduced(partition, bucket))
        if number:
            calls += _sent(partition, buckets[number - 1])
    return calls


def in_elements(partition: Partition, buckets: list[list[int]]) -> list[Call]:
    calls = [*without_the_last(partition, buckets), *_sent(partition, buckets[-1])]
    return [call._replace(nbytes=call.nbytes // 4) for call in calls]


def in_the_buckets_order(partition: Partition, buckets: list[list[int]]) -> list[Call]:
    def sent(bucket: list[int]) -> list[Call]:
        return [
            Call("broadcast", 4 * piece.numel, owner)
            for param in bucket
            for piece, owner in partition.pieces_of_param[param]
        ]

    calls = []
    for number, bucket in enumerate(buckets):
        calls.append(_reduced(partition, bucket))
        if number:
            calls += sent(buckets[number - 1])
    return calls + sent(buckets[-1])


def first_layers_first(partition: Partition, buckets: list[list[int]]) -> list[Call]:
    backwards = buckets[::-1]
    return [*without_the_last(partition, backwards), *_sent(partition, backwards[-1])]


def names_only(partition: Partition, buckets: list[list[int]]) -> Any:
    return ["all_reduce", "broadcast"] * len(buckets)


def _finish(bucket: Any) -> None:
    bucket.wait_for_reduction()
    bucket.step()
    bucket.start_broadcast()


def waits_at_once(so_far: list[Any], is_last: bool) -> None:
    so_far[-1].start_reduction()
    _finish(so_far[-1])
    if is_last:
        for bucket in so_far:
            bucket.wait_for_broadcast()


def forgets_the_last(so_far: list[Any], is_last: bool) -> None:
    so_far[-1].start_reduction()
    for bucket in so_far[-2:-1]:
        _finish(bucket)
    if is_last:
        for bucket in so_far[:-1]:
            bucket.wait_for_broadcast()


def never_waits_for_the_sum(so_far: list[Any], is_last: bool) -> None:
    so_far[-1].start_reduction()
    so_far[-1].step()
    so_far[-1].start_broadcast()


def sends_before_it_steps(so_far: list[Any], is_last: bool) -> None:
    so_far[-1].start_reduction()
    so_far[-1].wait_for_reduction()
    so_far[-1].start_broadcast()
    so_far[-1].step()


def all_at_the_end(so_far: list[Any], is_last: bool) -> None:
    so_far[-1].start_reduction()
    if is_last:
        for bucket in so_far:
            _finish(bucket)
        for bucket in so_far:
            bucket.wait_for_broadcast()


def leaves_before_all_is_there(so_far: list[Any], is_last: bool) -> None:
    so_far[-1].start_reduction()
    for bucket in so_far[-2:-1] + so_far[-1:] * is_last:
        _finish(bucket)


def finishes_first(so_far: list[Any], is_last: bool) -> None:
    for bucket in so_far[-2:-1]:
        _finish(bucket)
    so_far[-1].start_reduction()
    if is_last:
        _finish(so_far[-1])
        for bucket in so_far:
            bucket.wait_for_broadcast()


def waits_for_each_message(so_far: list[Any], is_last: bool) -> None:
    so_far[-1].start_reduction()
    for bucket in so_far[-2:-1] + so_far[-1:] * is_last:
        _finish(bucket)
        bucket.wait_for_broadcast()


def reduces_all_again(so_far: list[Any], is_last: bool) -> None:
    for bucket in so_far:
        bucket.start_reduction()


def forgets_rank_1(so_far: list[Any], is_last: bool) -> None:
    so_far[-1].start_reduction()
    for bucket in so_far[-2:-1] + so_far[-1:] * is_last:
        bucket.wait_for_reduction()
        if dist.is_initialized() and dist.get_rank() == 1:
            bucket.flat *= 2
        bucket.step()
        bucket.start_broadcast()
    if is_last:
        for bucket in so_far:
            bucket.wait_for_broadcast()


def one_more_broadcast(partition: Partition, buckets: list[list[int]]) -> list[Call]:
    calls = [*without_the_last(partition, buckets), *_sent(partition, buckets[-1])]
    return [*calls, calls[-1]]


WRONG = [
    ("overlap.bucket_size", as_ddp_does, r"calls pays the latency of 2 ms: the buckets are too small"),
    ("overlap.bucket_size", one_bucket, r"after backward, and nothing hides its .* too large"),
    ("overlap.bucket_size", as_small_as_can_be, r"too small"),
    ("overlap.bucket_size", where_latency_is_half, r"too small"),
    ("overlap.bucket_size", how_many, r"not the number of buckets"),
    ("overlap.bucket_size", below_nothing, r"a number of bytes above 0"),
    ("overlap.interleaved_calls", all_sent_at_the_end, r"That is hook_with_zero_step;"),
    ("overlap.interleaved_calls", each_sent_at_once, r"own reduction at once"),
    ("overlap.interleaved_calls", without_the_last, r"last bucket has to be sent too"),
    ("overlap.interleaved_calls", in_elements, r"Each has 4 bytes"),
    (
        "overlap.interleaved_calls",
        in_the_buckets_order,
        r"not in its place: within a bucket broadcasts go owner",
    ),
    ("overlap.interleaved_calls", first_layers_first, r"opposite order"),
    ("overlap.interleaved_calls", one_more_broadcast, r"should be the end, and is Call"),
    ("overlap.interleaved_calls", names_only, r"must return a list of calls"),
    ("overlap.on_bucket", waits_at_once, r"that it has just started"),
    ("overlap.on_bucket", forgets_the_last, r"bucket 5 was reduced, but never stepped. Its update is lost"),
    ("overlap.on_bucket", never_waits_for_the_sum, r"step\(\) of bucket 0 comes too early: .* half a sum"),
    ("overlap.on_bucket", sends_before_it_steps, r"old values would be sent"),
    ("overlap.on_bucket", all_at_the_end, r"No bucket is updated before the last one is ready"),
    ("overlap.on_bucket", leaves_before_all_is_there, r"Backward returns before its new values"),
    ("overlap.on_bucket", finishes_first, r"start its reduction first"),
    ("overlap.on_bucket", waits_for_each_message, r"waits for broadcasts while backward could go on"),
    ("overlap.on_bucket", reduces_all_again, r"start_reduction\(\) of bucket 0 is called a second time"),
    ("overlap.on_bucket", forgets_rank_1, r"than plain Adam after iteration 1.*the same on every rank"),
]
