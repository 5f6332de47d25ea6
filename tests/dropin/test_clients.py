"""The hook and the callback for clients."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from zero_ref import ZeroRedundancyOptimizer, consolidation_callback, consolidation_hook
from zero_ref.comm.collectives import Collectives
from zero_ref.lab import virtual


def stepped(comm: Collectives) -> ZeroRedundancyOptimizer:
    model = nn.Linear(4, 4)
    nn.init.ones_(model.weight)
    nn.init.ones_(model.bias)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, comm)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return optimizer


def has_state(optimizer: ZeroRedundancyOptimizer) -> bool:
    try:
        return len(optimizer.state_dict()["state"]) == 2
    except RuntimeError:
        return False


def test_the_hook_gathers_on_all_ranks_also_what_accelerate_has_wrapped() -> None:
    def on_rank(comm: Collectives) -> None:
        optimizers = [stepped(comm), stepped(comm)]
        hook = consolidation_hook(optimizers[0], SimpleNamespace(optimizer=optimizers[1]))
        assert not any(map(has_state, optimizers))
        hook([], [], "folder")
        assert all(map(has_state, optimizers))

    virtual.run(on_rank, 2, timeout=60)


ARGUMENTS = {"save_only_model": False, "save_on_each_node": False, "save_strategy": "steps"}


@pytest.mark.parametrize(
    ("event", "should_save", "changed", "ranks"),
    [
        ("on_step_end", True, {}, {0}),
        ("on_epoch_end", True, {}, {0}),
        ("on_step_end", False, {}, set()),
        ("on_step_end", True, {"save_on_each_node": True}, {0, 1}),
        ("on_step_end", True, {"save_only_model": True}, set()),
        ("on_evaluate", False, {}, set()),
        ("on_evaluate", False, {"save_strategy": "best"}, {0}),
        ("on_evaluate", False, {"save_strategy": "best", "save_only_model": True}, set()),
    ],
)
def test_the_callback_gathers_where_the_trainer_will_ask(
    event: str, should_save: bool, changed: dict[str, Any], ranks: set[int]
) -> None:
    callback = consolidation_callback()  # here, since two threads must not import transformers at once

    def on_rank(comm: Collectives) -> bool:
        optimizer = stepped(comm)
        arguments, control = SimpleNamespace(**ARGUMENTS | changed), SimpleNamespace(should_save=should_save)
        getattr(callback, event)(arguments, None, control, optimizer=optimizer)
        return has_state(optimizer)

    assert virtual.run(on_rank, 2, timeout=60) == [rank in ranks for rank in range(2)]


def test_the_callback_has_nothing_to_gather_before_training() -> None:
    arguments = SimpleNamespace(**ARGUMENTS | {"save_strategy": "best"})
    consolidation_callback().on_evaluate(arguments, None, None, optimizer=None)  # type: ignore[arg-type]


def test_a_plain_optimizer_is_refused_before_anything_is_saved() -> None:
    plain = torch.optim.SGD(nn.Linear(2, 2).parameters())
    with pytest.raises(TypeError, match="SGD is not a ZeroRedundancyOptimizer"):
        consolidation_hook(plain)
    with pytest.raises(TypeError, match="SGD is not a ZeroRedundancyOptimizer"):
        consolidation_callback().on_train_begin(None, None, None, optimizer=plain)  # type: ignore[arg-type]
