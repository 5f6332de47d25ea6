"""The saves in a directory, as tests look for them."""

from __future__ import annotations

from pathlib import Path

from zero_ref.state.saves import Save, nothing_in, saves_in


def newest_complete(directory: Path) -> Save:
    """The newest save of which all tables are there; the package's FileNotFoundError where there is none."""
    saves = saves_in(directory)
    complete = [save for save in saves if save.is_complete]
    if not complete:
        raise nothing_in(directory, saves)
    return complete[-1]
