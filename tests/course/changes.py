"""Mistakes are kept as changes of a right answer."""

from __future__ import annotations


def changed(source: str, changes: dict[str, str]) -> str:
    """The source with every occurrence of each key replaced by its value, one key after the other."""
    for old, new in changes.items():
        assert old in source, f"the right answer has no {old!r}"
        source = source.replace(old, new)
    return source
