"""A schedule of a recipe and of facts of the model, told apart by their names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from zero_ref.plan.partition import ParamSpec
from zero_ref.simulator.recipe import Recipe, recipe
from zero_ref.simulator.schedule import Schedule, schedule

OF_A_RECIPE = {one.name for one in fields(Recipe)}


def scheduled(strategy: str, params: Sequence[ParamSpec], world_size: int, **options: Any) -> Schedule:
    """The strategy with some fields of its recipe, and some facts of the model, other than usual."""
    changes = {name: options.pop(name) for name in OF_A_RECIPE & options.keys()}
    return schedule(recipe(strategy, **changes), params, world_size, **options)
