"""The price of training on so many tokens: days, GPU-hours and money, from the rate of a simulated run."""

from __future__ import annotations

from dataclasses import dataclass

from zero_ref.simulator import spread
from zero_ref.simulator._checks import check_number


@dataclass(frozen=True)
class Bill:
    """A training run as a whole.

    >>> bill = Bill(15e12, price=2.5)
    >>> f"{bill.days(1e6):,.0f} days, {bill.gpu_hours(1e6, 64):,.0f} GPU-hours, {bill.cost(1e6, 64):,.0f}"
    '174 days, 266,667 GPU-hours, 666,667'

    Args:
        tokens: to train on, in all updates together.
        price: of an hour of one GPU, in any currency; None where it is not known.
    Raises:
        ValueError: there is no token, or the price is negative.
    """

    tokens: float
    price: float | None = None

    def __post_init__(self) -> None:
        check_number("train_tokens", self.tokens, above=True)
        if self.price is not None:
            check_number("price", self.price)

    def days(self, tokens_per_second: float) -> float:
        """The days at a rate of all ranks together, without restarts and evaluations."""
        return self.tokens / tokens_per_second / 86_400

    def gpu_hours(self, tokens_per_second: float, ranks: int) -> float:
        """The hours of all ranks together."""
        return 24 * ranks * self.days(tokens_per_second)

    def cost(self, tokens_per_second: float, ranks: int) -> float | None:
        """The price of these hours; None where that of an hour is not known."""
        return None if self.price is None else self.price * self.gpu_hours(tokens_per_second, ranks)

    def values(
        self, tokens_per_second: float, ranks: int, kind: str
    ) -> dict[str, float | list[float] | None]:
        """The same as values for JSON, the hours with the interval of a predicted time.

        Args:
            kind: of the program, one of `spread.KINDS`.
        """
        hours = self.gpu_hours(tokens_per_second, ranks)
        return {
            "train_tokens": self.tokens,
            "days": self.days(tokens_per_second),
            "gpu_hours": hours,
            "gpu_hours_interval": list(spread.around(hours, kind)),
            "cost": self.cost(tokens_per_second, ranks),
        }

    def in_words(self, tokens_per_second: float, ranks: int, kind: str) -> str:
        """The same in a sentence, the hours with their interval.

        >>> Bill(2e12).in_words(5e5, 16, "pytorch")
        '2T tokens take 46.3 days, 17,778 GPU-hours (16,711 to 32,782)'
        """
        hours, cost = self.gpu_hours(tokens_per_second, ranks), self.cost(tokens_per_second, ranks)
        low, high = spread.around(hours, kind)
        paid = "" if cost is None else f", which cost {_short(cost)}"
        return (
            f"{_counted(self.tokens)} tokens take {_short(self.days(tokens_per_second))} days, "
            f"{_short(hours)} GPU-hours ({_short(low)} to {_short(high)}){paid}"
        )


def _short(amount: float) -> str:
    return f"{amount:,.0f}" if amount >= 100 else f"{amount:.3g}"


def _counted(tokens: float) -> str:
    for letter, many in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if tokens >= many:
            return f"{tokens / many:g}{letter}"
    return f"{tokens:,.0f}"
