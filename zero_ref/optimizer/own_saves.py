"""The facts about sharded saves of an optimizer that one save or load leaves the next.

`stairs/owners.py` saves nothing. Here a save may go on in the background, and a load may find that a save is
damaged. The optimizer holds both facts, since they end with it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol


class SaveInBackground(Protocol):
    """A save that is complete when `wait` has returned on all ranks."""

    def wait(self) -> None: ...


class OwnSaves:
    """The sharded saves of one optimizer.

    Attributes:
        damaged: the folders of saves that a load has skipped. They do not count as saves to keep.
    """

    def __init__(self) -> None:
        self.damaged: set[Path] = set()
        self._in_background: SaveInBackground | None = None

    def begin(self, save: SaveInBackground) -> None:
        """Remember a save that goes on in the background."""
        self._in_background = save

    def finish(self) -> None:
        """Complete the save in the background, if there is one; raise what went wrong in it. Collective."""
        save, self._in_background = self._in_background, None
        if save is not None:
            save.wait()
