"""The exhibits of the museum: a program with one mistake, the reports of it, and how the doctor finds it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from zero_ref.doctor import Report, diagnose
from zero_ref_course.gallery.right import LR, Sharded

__all__ = ["Exhibit", "exhibit", "gallery"]

P = TypeVar("P", bound=Callable[..., Any])


@dataclass(frozen=True)
class Exhibit:
    """A real mistake, re-created.

    Attributes:
        name: of the class that has the mistake.
        program: a factory for the doctor, with the mistake.
        mended: the factory without the mistake.
        reports: addresses, the one that tells most first.
        year: of the first report.
        trial: the doctor's first trial that shows the mistake.
        phase: the part of a step in which the mistake begins: backward, clip, step, load or forward.
        says: words of what the doctor reads off the numbers; "" if it shows them alone.
        plain: the doctor's arguments for the plain loop: `from_plain` and `options`, or `reference`.
    """

    name: str
    program: Callable[..., Any]
    mended: Callable[..., Any]
    reports: tuple[str, ...]
    year: int
    trial: str
    phase: str
    says: str
    plain: dict[str, Any] = field(default_factory=dict)

    @property
    def story(self) -> str:
        """The story of the mistake in one paragraph, which is the docstring of the program."""
        return inspect.getdoc(self.program) or ""

    def diagnose(self, mended: bool = False, **arguments: Any) -> Report:
        """The doctor's report of the program.

        Args:
            mended: diagnose the program without the mistake.
            **arguments: of `doctor.diagnose`; by default all trials are played.
        """
        name = self.name + (", mended" if mended else "")
        return diagnose(self.mended if mended else self.program, name=name, **{**self.plain, **arguments})


gallery: list[Exhibit] = []
"""All exhibits, in the order in which the modules of the museum define them."""

ADAMW: dict[str, Any] = {"from_plain": torch.optim.AdamW, "options": {"lr": LR}}


def exhibit(
    *reports: str,
    year: int,
    trial: str,
    phase: str,
    says: str,
    mended: Callable[..., Any] = Sharded,
    plain: dict[str, Any] | None = None,
) -> Callable[[P], P]:
    """Put a program into the museum."""

    def register(program: P) -> P:
        name = getattr(program, "__name__", "")
        gallery.append(Exhibit(name, program, mended, reports, year, trial, phase, says, plain or ADAMW))
        return program

    return register
