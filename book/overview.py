"""Draws the picture of README.md into book/pictures: `python book/overview.py`."""

from __future__ import annotations

from pathlib import Path

from zero_ref.lab import plots
from zero_ref.simulator.models import shapes, specs
from zero_ref.simulator.schedule import schedule

FOLDER = Path(__file__).parent / "pictures"
RANKS = 4


def draw() -> None:
    """GPT-2 (124 million parameters, fp32, AdamW) on four ranks: what each holds."""
    params = specs(shapes("gpt2"))
    held = {}
    for strategy in ("ddp", "zero", "zero-even"):
        plan = schedule(strategy, params, RANKS)
        held[strategy] = list(zip(plan.parameter_bytes, plan.gradient_bytes, plan.state_bytes, strict=True))
    figure, ax = plots.figure(7, 3)
    plots.memory_by_rank(held, ax)
    plots.save(figure, FOLDER / "overview-memory.svg")


if __name__ == "__main__":
    draw()
