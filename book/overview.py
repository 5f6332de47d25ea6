"""Draws the picture of README.md and of the front page into book/pictures: `python book/overview.py`."""

from __future__ import annotations

from pathlib import Path

from zero_ref.lab import plots
from zero_ref.live.page import NARROW, WIDE
from zero_ref.simulator.stages import plays_of_equal_blocks

FOLDER = Path(__file__).parent / "pictures"


def pictures() -> dict[str, str]:
    """The picture for a wide page and for a phone, by the names of their files."""
    drawing = plots.pieces_over_time(plays_of_equal_blocks(3, world_size=4))
    return {"stages.svg": drawing.svg(WIDE), "stages-narrow.svg": drawing.svg(NARROW)}


if __name__ == "__main__":
    for name, svg in pictures().items():
        (FOLDER / name).write_text(svg, encoding="utf-8")
