"""The saves in a directory, as tests look for them."""

from __future__ import annotations

from pathlib import Path

from zero_ref.files.saves import Save, saves_in


def newest_complete(directory: Path) -> Save:
    """The newest save of which all tables are there."""
    complete = [save for save in saves_in(directory) if save.is_complete]
    if not complete:
        raise FileNotFoundError(directory)
    return complete[-1]
