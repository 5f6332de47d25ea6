"""New parameters that are still on their way when `step` has returned: who waits for them, and when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from zero_ref.plan.partition import Slice
from zero_ref.plan.rules import from_lists
from zero_ref.shard.arriving import Arriving
from zero_ref.shard.buckets import messages_by_parameter


class Sent:
    """A broadcast under way: its values are here when somebody has waited."""

    def __init__(self, param: torch.Tensor, value: float, waited: list[float]) -> None:
        self.param, self.value, self.waited = param, value, waited

    def wait(self) -> None:
        self.waited.append(self.value)
        if self.value < 0:
            raise RuntimeError("another rank stopped")
        with torch.no_grad():
            self.param.fill_(self.value)


def on_the_way(*values: float) -> tuple[nn.Sequential, Arriving, list[float], list[str]]:
    """Layers of a weight each, which is to become one of `values`."""
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in values))
    params, arriving = list(model.parameters()), Arriving()
    owned = [[Slice(number, 0, 4) for number in range(len(values))], []]
    messages = messages_by_parameter(from_lists([4] * len(values), owned), params)
    waited: list[float] = []
    done: list[str] = []
    arriving.watch(model)
    works = [Sent(param, value, waited) for param, value in zip(params, values, strict=True)]
    arriving.begin(messages, works, params, lambda: done.append("all are here"))
    return model, arriving, waited, done


def test_a_module_waits_for_its_own_parameters_before_its_forward() -> None:
    model, _, waited, done = on_the_way(1.0, 2.0, 3.0)
    model[1](torch.ones(1, 2))
    assert waited == [2.0]
    assert not done
    assert model(torch.ones(1, 2)).tolist() == [[48.0, 48.0]]
    assert waited == [2.0, 1.0, 3.0]
    assert done == ["all are here"]
    model(torch.ones(1, 2))
    assert waited == [2.0, 1.0, 3.0], "each is waited for once"
    assert done == ["all are here"]


def saved(model: nn.Module) -> Any:
    return [value.flatten().tolist() for value in model.state_dict().values()]


def saved_in_part(model: nn.Sequential) -> Any:
    return [saved(model[0])[0], saved(model[1])[0]]


def loaded(model: nn.Module) -> Any:
    """Load a state while values are still arriving, which would overwrite it; return the parameters."""
    state = {name: torch.full((2, 2), 5.0) for name, _ in model.named_parameters()}
    model.load_state_dict(state)
    model(torch.ones(1, 2))
    return [value.flatten().tolist() for value in model.parameters()]


@pytest.mark.parametrize(
    ("use", "values"), [(saved, (1.0, 2.0)), (saved_in_part, (1.0, 2.0)), (loaded, (5.0, 5.0))]
)
def test_it_waits_before_it_saves_or_loads(use: Callable[[Any], Any], values: tuple[float, float]) -> None:
    model, _, waited, done = on_the_way(1.0, 2.0)
    assert use(model) == [[value] * 4 for value in values]
    assert waited == [1.0, 2.0]
    assert done == ["all are here"]


def test_after_an_error_nothing_is_waited_for_any_more() -> None:
    model, arriving, waited, done = on_the_way(1.0, -1.0, 3.0)
    with pytest.raises(RuntimeError, match="another rank stopped"):
        arriving.wait()
    arriving.wait()
    model(torch.ones(1, 2))
    assert waited == [1.0, -1.0]
    assert not done
