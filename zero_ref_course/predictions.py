"""The questions whose answers a reader predicts, and their points.

A chapter's module has its questions, beside its exercises:

    @prediction("partition.crossover", "On how many ranks ...?", unit="ranks")
    def crossover() -> float:
        return ...

The answer is computed, from the plan or the simulator, and is the same on every machine. `predict` shows a
question to a reader.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple

from zero_ref_course import CHAPTERS

Value = float | str


class Prediction(NamedTuple):
    """A question that has one answer on every machine.

    Args:
        name: chapter first, "partition.crossover".
        question: one sentence of plain text.
        unit: the unit of an answer that is a number.
        choices: the possible answers, if they are no numbers.
        close: the relative error up to which a number counts as right.
        answer: computes the answer.
    """

    name: str
    question: str
    unit: str
    choices: tuple[str, ...]
    close: float
    answer: Callable[[], Value]

    def value(self, said: object) -> Value:
        """Return a prediction as a number or as one of the choices.

        Raises:
            ValueError: the prediction is neither.
        """
        if self.choices:
            if said not in self.choices:
                raise ValueError(
                    f"{said!r} is none of the answers to {self.name}: {', '.join(self.choices)}."
                )
            return str(said)
        if isinstance(said, bool) or not isinstance(said, (int, float)) or not math.isfinite(said):
            raise ValueError(f"{said!r} is no number. {self.name} asks for one{self._in_unit}.")
        return float(said)

    @property
    def _in_unit(self) -> str:
        return f", in {self.unit}" if self.unit else ""

    def points(self, said: Value) -> float:
        """The points of a prediction: 1 if it is right, 0.5 for a number within a factor of two, else 0.

        >>> one = Prediction("x.y", "How many?", "MB", (), 0.1, lambda: 100.0)
        >>> one.points(95), one.points(60), one.points(20)
        (1.0, 0.5, 0.0)
        """
        answer = self.answer()
        if self.choices or answer == 0:
            return float(said == answer)
        ratio = float(said) / float(answer)
        return 1.0 if abs(ratio - 1) <= self.close + 1e-9 else 0.5 if 0.5 <= ratio <= 2 else 0.0

    def written(self, value: Value) -> str:
        """A value with its unit.

        >>> Prediction("x.y", "How many?", "MB", (), 0.1, lambda: 0.0).written(1234.5678)
        '1,235 MB'
        """
        if isinstance(value, str):
            return value
        number = f"{value:,.0f}" if value == int(value) or abs(value) >= 1000 else f"{value:.4g}"
        return f"{number} {self.unit}".strip()

    def compared(self, said: Value) -> str:
        """Describe a prediction in words: its value, its error, its points.

        >>> Prediction("x.y", "How many?", "MB", (), 0.1, lambda: 100.0).compared(60.0)
        'You predicted 60 MB: 40% too low. Half a point.'
        """
        points = {1.0: "One point", 0.5: "Half a point", 0.0: "No point"}[self.points(said)]
        answer = self.answer()
        if self.choices or said == answer:
            how = "right" if said == answer else "not so"
        elif answer == 0:
            how = "too high" if float(said) > 0 else "too low"
        else:
            off = float(said) / float(answer) - 1
            percent = f"{float(f'{100 * abs(off):.2g}'):g}" if abs(off) < 10 else f"{100 * abs(off):,.0f}"
            how = f"{percent}% too {'high' if off > 0 else 'low'}"
        return f"You predicted {self.written(said)}: {how}. {points}."


_registered: dict[str, Prediction] = {}


def prediction(
    name: str, question: str, *, unit: str = "", choices: tuple[str, ...] = (), close: float = 0.1
) -> Callable[[Callable[[], Value]], Callable[[], Value]]:
    """Register a question; the function below computes its answer."""

    def register(answer: Callable[[], Value]) -> Callable[[], Value]:
        _registered[name] = Prediction(name, question, unit, choices, close, answer)
        return answer

    return register


def predictions(chapter: str = "") -> list[Prediction]:
    """The questions of a chapter, or of all chapters, in order."""
    for one in [chapter] if chapter else CHAPTERS:
        import_module(f"zero_ref_course.{one}")
    return [one for one in _registered.values() if not chapter or one.name.startswith(f"{chapter}.")]


def prediction_named(name: str) -> Prediction:
    """A question by its name.

    Raises:
        ValueError: there is no question of that name.
    """
    chapter = name.partition(".")[0]
    if chapter in CHAPTERS:
        import_module(f"zero_ref_course.{chapter}")
    if name not in _registered:
        raise ValueError(
            f"there is no prediction {name!r}; there are {', '.join(p.name for p in predictions())}."
        )
    return _registered[name]
