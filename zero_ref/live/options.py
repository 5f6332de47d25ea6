"""What several explorers let a reader choose from."""

from __future__ import annotations

from functools import lru_cache

from zero_ref.plan.partition import ParamSpec
from zero_ref.simulator.models import shapes, specs

RANKS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Numbers of ranks: all of a node's, then in steps of a half and a third."""


@lru_cache(maxsize=4)
def params_of(model: str) -> tuple[ParamSpec, ...]:
    """The parameters of a preset, in 16 bits."""
    return tuple(specs(shapes(model), "bfloat16"))
