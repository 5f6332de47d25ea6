"""Numbers as a label has room for them: 38.6M elements, 2.1 GB.

`zero_ref.simulator.ledger.format_bytes` is for tables, where digits line up; here trailing zeros are dropped.
GB is 1e9 bytes and kB 1,000, as in the ZeRO paper.
"""

from __future__ import annotations

from decimal import ROUND_HALF_UP, Decimal


def short(number: float) -> str:
    """Three significant digits, halves up.

    >>> [short(n) for n in (0, 0.25, 2.875, 41.25, 120, 999.6, 12_345)]
    ['0', '0.25', '2.88', '41.3', '120', '1,000', '12,345']
    """
    exact = Decimal(number)
    # adjusted() is the power of ten of the first digit. Decimal, because format() rounds halves to even.
    places = min(0, exact.adjusted() - 2) if exact else 0
    rounded = exact.quantize(Decimal(1).scaleb(places), ROUND_HALF_UP).normalize()
    return f"{rounded:,f}" if rounded else "0"


def short_count(count: float) -> str:
    """A count with a letter for thousands, millions, billions.

    >>> [short_count(n) for n in (0, 768, 12_288, 999_999, 38_597_376, 8_030_261_248)]
    ['0', '768', '12.3k', '1M', '38.6M', '8.03B']
    """
    return _scaled(count, ("", "k", "M", "B", "T"))


def short_bytes(nbytes: float) -> str:
    """Bytes in the largest unit that leaves at least 1.

    >>> [short_bytes(n) for n in (0, 512, 4096, 41_250_000_000, 120e9)]
    ['0 B', '512 B', '4.1 kB', '41.3 GB', '120 GB']
    """
    return _scaled(nbytes, (" B", " kB", " MB", " GB", " TB", " PB"))


def short_time(ms: float) -> str:
    """Milliseconds up to ten seconds, above that a unit which leaves few digits.

    >>> [short_time(ms) for ms in (0, 0.25, 1_450, 13_498, 119_362, 1.01e9)]
    ['0 ms', '0.25 ms', '1,450 ms', '13.5 s', '119 s', '11.7 days']
    """
    unit, in_ms = time_unit(ms)
    return f"{short(ms / in_ms)} {unit}"


def time_unit(ms: float) -> tuple[str, float]:
    """The unit that suits a length of time, and how many milliseconds it has.

    >>> time_unit(13_498)
    ('s', 1000.0)
    """
    units = (("ms", 1.0, 10_000), ("s", 1e3, 3_600_000), ("h", 3.6e6, 3 * 8.64e7))
    return next(((unit, in_ms) for unit, in_ms, most in units if ms < most), ("days", 8.64e7))


def _scaled(number: float, units: tuple[str, ...]) -> str:
    step = 0
    # From 999.5 on three digits would read 1,000: the next unit says it better.
    while abs(number) >= 999.5 and step < len(units) - 1:
        number /= 1000
        step += 1
    return short(number) + units[step]
