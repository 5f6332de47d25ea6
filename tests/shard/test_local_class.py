"""Local optimizers of a class that is not torch's: what they keep, draw or couple, and are refused for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from library.training import caught, fill_gradients
from torch import nn, optim

from zero_ref.comm.collectives import Collectives
from zero_ref.files.sharded import save_sharded
from zero_ref.lab import virtual
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.plan.rules import even


def start() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(shape)) for shape in ((64, 32), (8, 48), (16, 16))]


class Averaging(optim.SGD):
    """Keeps something that belongs to no parameter."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "average": 1.0}


def test_state_beside_that_of_parameters_is_refused_where_it_would_be_lost(tmp_path: Path) -> None:
    def on_rank(comm: Collectives) -> None:
        params = start()
        optimizer = ZeroRedundancyOptimizer(params, Averaging, comm, lr=0.1)
        fill_gradients(params, 0, world_size=1)
        optimizer.step()
        values = [param.detach().clone() for param in params]
        lost: list[Any] = [
            optimizer.consolidate_state_dict,
            lambda: save_sharded(optimizer, tmp_path),
        ]
        for action in lost:
            with pytest.raises(TypeError, match=r"Averaging keeps \['average'\] in its state_dict"):
                action()
        assert all(map(torch.equal, values, params))
        optimizer.step()

    virtual.run(on_rank, 2, timeout=180)


class DecaysMatrices(optim.AdamW):
    """Makes groups of its own: matrices, which decay, and the rest, which does not."""

    def __init__(self, params: Any, weight_decay: float = 0.1, **options: Any) -> None:
        params = [*params]
        groups = params if isinstance(params[0], dict) else [{"params": params}]
        split = [
            {
                **group,
                "params": [p for p in group["params"] if (p.ndim > 1) is matrices],
                "weight_decay": weight_decay * matrices,
            }
            for group in groups
            for matrices in (True, False)
        ]
        super().__init__([group for group in split if group["params"]], **options)


def test_a_class_that_makes_its_own_groups_is_refused_with_the_reason_on_all_ranks() -> None:
    shapes = ((4, 4), (4,), (4, 4), (4,))

    def on_rank(comm: Collectives) -> str:
        params = [nn.Parameter(torch.ones(shape)) for shape in shapes]
        return caught(lambda: ZeroRedundancyOptimizer(params, DecaysMatrices, comm, lr=0.1))

    for ranks in (1, 2, 5):  # with two ranks, each would have one group; some of five would have none
        for message in virtual.run(on_rank, ranks):
            assert (
                "ValueError: DecaysMatrices makes parameter groups of its own: from groups of [4]" in message
            )
            assert "it makes groups of [2, 2]" in message


# --------------------------------------------------------------------------------- users' odd, legal programs


def test_an_error_names_the_class_whose_parameters_are_cut() -> None:
    def on_rank(comm: Collectives) -> None:
        first, second, third = start()
        optimizer = ZeroRedundancyOptimizer([first, second], optim.Adafactor, comm, partition=cut_later)
        with pytest.raises(ValueError, match="Adafactor may look at a parameter's shape"):
            optimizer.add_param_group({"params": [third]})

    def cut_later(numels: Sequence[int], world_size: int) -> Any:
        return [[0], [1]] if len(numels) == 2 else even(numels, world_size)

    virtual.run(on_rank, 2, timeout=180)
