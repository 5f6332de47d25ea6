"""The buckets explorer: what a step's messages take, if each owner packs its parameters into buckets."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from zero_ref.live.explorer import Answer, Control, Explorer, params_of
from zero_ref.live.numbers import short, short_time
from zero_ref.live.palette import MUTED, SERIES_COLOURS, tint
from zero_ref.live.svg import LINE, MARGIN, bar, key, line, picture, text, ticks
from zero_ref.plan.rules import sorted_greedy
from zero_ref.simulator.cluster import CLUSTERS
from zero_ref.simulator.ledger import nbytes_of
from zero_ref.simulator.models import MODELS
from zero_ref.simulator.schedule import ddp_buckets

RANKS = 4
SIZES = tuple(4**power * 1024 for power in range(10))
"""Bytes at which a bucket is closed, 1 KiB to 256 MiB. A parameter alone is never cut."""

KINDS = ("before a byte has moved", "the bytes")


def _draw(width: float, model: str, cluster: str, bucket: int) -> Answer:
    links, packed = CLUSTERS[cluster], {size: _messages(model, size) for size in SIZES}
    # A byte takes next to no time: what one message of it costs is what every message costs.
    fixed = links.ms("broadcast", 1, RANKS)
    times = {
        size: (fixed * len(sent), sum(links.ms("broadcast", nbytes, RANKS) - fixed for nbytes in sent))
        for size, sent in packed.items()
    }
    before, moving = times[bucket]
    words = (
        f"{model} on {RANKS} ranks of {cluster}, buckets of {_written(bucket)}: a step sends "
        f"{len(packed[bucket]):,} messages. They take {short_time(before + moving)}: {short_time(before)} "
        f"before a byte has moved, {short_time(moving)} for the bytes."
    )
    rows = [["bucket", "messages", "before a byte, ms", "bytes, ms"]]
    rows += [
        [_written(size), f"{len(packed[size]):,}", short(one), short(two)]
        for size, (one, two) in times.items()
    ]
    numbers = {"messages": float(len(packed[bucket])), "fixed, ms": before, "bytes, ms": moving}
    return Answer(_picture(width, times, bucket, words), words, rows, numbers)


@lru_cache(maxsize=64)
def _messages(model: str, bucket: int) -> tuple[int, ...]:
    """The bytes of each message of a step."""
    params, sent = params_of(model), list[int]()
    for owned in sorted_greedy([param.numel for param in params], RANKS).slices_of_rank:
        specs = [params[piece.param] for piece in owned]
        for numbers in ddp_buckets(specs, cap_bytes=bucket, first_cap_bytes=bucket):
            sent.append(sum(nbytes_of(specs[number]) for number in numbers))
    return tuple(sent)


def _written(size: int) -> str:
    return f"{size >> 20:,} MiB" if size >= 1 << 20 else f"{size >> 10:,} KiB"


def _picture(width: float, times: dict[int, tuple[float, float]], bucket: int, words: str) -> str:
    left, top, high = MARGIN + 46, 14.0, 170.0
    most = max(map(sum, times.values()))
    each = (width - MARGIN - left) / len(times)
    parts: list[str] = []
    for tick in ticks(most, 4):
        at = top + high * (1 - tick / most)
        parts += [
            line(left, at, width - MARGIN, at),
            text(left - 6, at + 4, short_time(tick), fill=MUTED, anchor="end"),
        ]
    for place, (size, parts_ms) in enumerate(times.items()):
        x, y = left + place * each, top + high
        for colour, ms in zip(_colours(size == bucket), parts_ms):
            y -= high * ms / most
            parts.append(bar(x + 3, y, each - 6, high * ms / most, colour))
        if size == bucket or (width > 480 and place % 3 == 0):
            parts.append(
                text(
                    x + each / 2,
                    top + high + 17,
                    _written(size),
                    anchor="middle",
                    bold=size == bucket,
                    fill=MUTED if size != bucket else "#000000",
                )
            )
    names, bottom = key(dict(zip(KINDS, _colours(True))), left, top + high + LINE + 14, width - left - MARGIN)
    return picture(width, bottom + 2, words, parts + names)


def _colours(here: bool) -> Sequence[str]:
    return [colour if here else tint(colour, 0.35) for colour in (SERIES_COLOURS[1], SERIES_COLOURS[0])]


BUCKETS = Explorer(
    "buckets",
    "Buckets explorer",
    (
        Control("model", "model", "gpt2", tuple(MODELS)),
        Control("cluster", "cluster", "h100-ib", tuple(CLUSTERS)),
        Control("bucket", "a bucket is closed at", SIZES[0], SIZES, {size: _written(size) for size in SIZES}),
    ),
    _draw,
    along="bucket",
)
