"""Explorers: controls, and an answer to each of their settings.

An explorer knows neither who shows its controls nor where: a page of the book does, with Python running in
the browser, and so does a notebook (`zero_ref.lab.widgets`). Both get the same picture and the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any, Literal

from zero_ref.plan.partition import ParamSpec
from zero_ref.simulator._checks import nearest
from zero_ref.simulator.models import shapes, specs
from zero_ref.simulator.options import options_of

Value = str | int | float | bool

RANKS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Numbers of ranks to choose from: all of a node's, then in steps of a half and a third."""


@lru_cache(maxsize=4)
def params_of(model: str) -> tuple[ParamSpec, ...]:
    """The parameters of a preset, in 16 bits."""
    return tuple(specs(shapes(model), "bfloat16"))


@dataclass(frozen=True)
class Control:
    """Something that a reader can set.

    >>> Control("stage", "ZeRO stage", 1, range(4)).kind
    'slider'
    >>> Control("fullest_first", "fullest rank first", True).kind
    'tick'

    Args:
        name: of the keyword that the explorer's function takes.
        label: what a reader sees beside it.
        value: at the start.
        options: all that it can be set to, in order: names for a list to choose from, numbers for a slider,
            False and True for a tick.
        words: how an option is written, where it is not written as it is.
    Raises:
        ValueError: the value is not one of the options.
    """

    name: str
    label: str
    value: Value
    options: Sequence[Value] = (False, True)
    words: Mapping[Any, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.check(self.value)

    @property
    def kind(self) -> Literal["choice", "slider", "tick"]:
        first = self.options[0]
        return "tick" if isinstance(first, bool) else "choice" if isinstance(first, str) else "slider"

    def written(self, value: Value) -> str:
        """Return the text of an option."""
        if value in self.words:
            return self.words[value]
        return value if isinstance(value, str) else f"{value:,}"

    def check(self, value: Value) -> None:
        """Refuse what is not an option."""
        if value not in self.options:
            known = [self.written(one) for one in self.options]
            listed = ", ".join(known) if len(known) <= 24 else f"{', '.join(known[:8])}, ..., {known[-1]}"
            raise ValueError(f"{self.name} must be one of {listed}; got {value!r}.")

    def as_dict(self) -> dict[str, Any]:
        """For a page: JSON."""
        options = {"options": list(self.options), "words": [self.written(one) for one in self.options]}
        return {**asdict(self), "kind": self.kind, **options}


def controls_of(of: type, names: Sequence[str], **starts: Value) -> tuple[Control, ...]:
    """Return a control for each of these options of a dataclass.

    >>> from zero_ref.simulator.scenario import Scenario
    >>> [(one.label, one.value) for one in controls_of(Scenario, ["batch", "checkpointing"])]
    [('sequences of a rank', 1), ('computed again', 'none')]

    Args:
        names: the fields, in this order. Each has a label.
        starts: where controls stand at the start, by the field, if not at the field's default.
    """
    found = {one.path[-1]: one for one in options_of(of)}
    return tuple(
        Control(
            field,
            option.label,
            start,
            tuple(option.offered or option.choices or option.steps or (False, True)),
            {name: name.replace("_", " ") for name in option.choices},
        )
        for field in names
        for option, start in [(found[field].option, starts.get(field, found[field].default))]
    )


@dataclass(frozen=True)
class Answer:
    """The answer to one setting.

    Args:
        svg: the picture.
        words: describe the picture in a sentence or two, for readers who cannot see it.
        table: the numbers for reading, a heading first.
        numbers: these numbers and more, unrounded.
        idle: the reason why a control changes nothing at this setting, for each such control.
    """

    svg: str
    words: str
    table: Sequence[Sequence[str]]
    numbers: Mapping[str, float]
    idle: Mapping[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """For a page: JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Explorer:
    """Controls and the function that answers them.

    Args:
        name: what a page calls it.
        title: its heading.
        controls: in the order in which they are shown.
        draw: given the width of the picture in pixels and each control's value by its name.
        along: the control whose pictures a page has with it, so that it moves without Python.
    """

    name: str
    title: str
    controls: tuple[Control, ...]
    draw: Callable[..., Answer]
    along: str = ""

    @property
    def values(self) -> dict[str, Value]:
        """Return the first value of each control."""
        return {control.name: control.value for control in self.controls}

    def answer(self, width: float = 640.0, /, **values: Value) -> Answer:
        """The answer to a setting; controls that are not named stand where they start.

        Args:
            width: of the picture, in CSS pixels.
        Raises:
            ValueError: there is no such control, it has no such option, or the picture would be too narrow.
        """
        known = {control.name: control for control in self.controls}
        for name, value in values.items():
            if name not in known:
                close = nearest(name, known)
                meant = f" Did you mean {close!r}?" if close else ""
                raise ValueError(f"{self.name} has no control {name!r}; it has {', '.join(known)}.{meant}")
            known[name].check(value)
        if not 240 <= width <= 4000:
            raise ValueError(f"a picture is 240 to 4,000 pixels wide, got {width:g}.")
        return self.draw(width, **{**self.values, **values})
