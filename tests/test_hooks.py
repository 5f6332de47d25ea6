"""What passes between a backward and the step after it, without any ranks."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim

from zero_ref.hooks import InBackward


def trained() -> tuple[nn.Linear, optim.SGD]:
    """A model with gradients, from which an update is said to have been made in backward."""
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    return model, optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def updated(**options: Any) -> tuple[InBackward, nn.Linear, optim.SGD]:
    model, optimizer = trained()
    optimizer.param_groups[0].update(options)
    state = InBackward()
    state.begin()
    state.remember(model.parameters(), optimizer.param_groups)
    return state, model, optimizer


def test_an_update_counts_for_one_step() -> None:
    state, *_ = updated()
    assert state.take_update({})
    assert not state.take_update({})
    assert not InBackward().take_update({})


def test_options_are_refused_as_long_as_the_update_is_there() -> None:
    state, *_ = updated()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"step\(\) got \['a', 'b'\].*already made during backward"):
            state.take_update({"b": 1, "a": 2})
    assert state.take_update({}), "a step without them is done"
    assert not state.take_update({"a": 2}), "without an update they are for the local step"


def in_place(param: torch.Tensor) -> None:
    assert param.grad is not None
    param.grad.mul_(1.0)


def replaced(param: torch.Tensor) -> None:
    assert param.grad is not None
    param.grad = param.grad.clone()


@pytest.mark.parametrize("change", [in_place, replaced])
def test_changed_gradients_are_refused_until_they_are_gone(change: Callable[[torch.Tensor], None]) -> None:
    state, model, _ = updated()
    change(model.weight)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="gradients were changed between backward"):
            state.take_update({})
    model.zero_grad()
    assert state.take_update({})


def test_gradients_that_are_gone_are_no_change() -> None:
    state, model, _ = updated()
    model.weight.grad = None
    assert state.take_update({})


def test_gradients_changed_where_no_update_was_made_are_not_looked_at() -> None:
    state, model, _ = updated()
    assert state.take_update({})
    in_place(model.weight)
    assert not state.take_update({})


@pytest.mark.parametrize(
    ("option", "value"), [("lr", 0.2), ("momentum", 0.8), ("nesterov", True), ("lr", torch.tensor(0.2))]
)
def test_an_option_changed_after_the_update_is_named(option: str, value: Any) -> None:
    state, _, optimizer = updated()
    optimizer.param_groups[0][option] = value
    with pytest.raises(RuntimeError, match=f"{option} was changed from .* between backward"):
        state.take_update({})


def test_an_option_set_to_what_it_was_is_no_change() -> None:
    state, _, optimizer = updated(betas=(0.9, 0.99))
    optimizer.param_groups[0].update(
        lr=float("0.1"), betas=tuple(float(beta) for beta in ("0.9", "0.99")), initial_lr=0.1
    )
    assert state.take_update({})


def test_parameters_added_after_the_update_are_no_option() -> None:
    state, _, optimizer = updated()
    optimizer.param_groups[0]["params"] = [nn.Parameter(torch.ones(2))]
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert state.take_update({})


# ----------------------------------------------------------------------------------------- unfinished, twice


def test_a_backward_that_did_not_end_is_told_once() -> None:
    state = InBackward()
    state.begin()
    with pytest.raises(RuntimeError, match="did not come to its end"):
        state.take_update({})
    assert not state.take_update({})
    state.begin()
    state.end()
    assert not state.take_update({})


class Exchange:
    def __init__(self) -> None:
        self.waited = 0

    def wait(self) -> None:
        self.waited += 1


def test_exchanges_of_a_backward_that_did_not_end_are_waited_for_by_the_next() -> None:
    state, exchange = InBackward(), Exchange()
    state.begin()
    state.under_way.append(exchange)
    state.begin()
    assert exchange.waited == 1
    state.begin()
    assert exchange.waited == 1
    state.under_way.append(exchange)
    state.end()
    state.begin()
    assert exchange.waited == 1, "those of one that did end are done"


def test_a_second_backward_on_top_is_noticed_from_either_kind_of_parameter() -> None:
    for in_first_bucket in (True, False):
        state, model, _ = updated()
        if in_first_bucket:
            model.bias.grad = None
            in_place(model.weight)  # backward has added to it
        first_bucket = [model.weight] if in_first_bucket else [model.bias]
        with pytest.raises(RuntimeError, match="a second backward has added to gradients"):
            state.check_not_accumulated(first_bucket, are_views=False)


def test_gradients_that_were_zeroed_or_dropped_may_be_added_to() -> None:
    state, model, _ = updated()
    model.zero_grad(set_to_none=False)
    in_place(model.weight)
    state.check_not_accumulated([model.weight], are_views=False)

    state, model, _ = updated()
    model.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    state.check_not_accumulated([model.weight, model.bias], are_views=False)

    state, model, _ = updated()
    assert state.take_update({})
    in_place(model.weight)
    in_place(model.bias)
    state.check_not_accumulated([model.weight, model.bias], are_views=False)


def test_a_window_of_the_first_bucket_tells_nothing() -> None:
    # After zero_grad(), too, DDP takes the same window, and writes into it once.
    state, model, _ = updated()
    in_place(model.weight)
    model.bias.grad = None
    state.check_not_accumulated([model.weight], are_views=True)


def test_gradients_are_not_kept_alive() -> None:
    state, model, _ = updated()
    gradient = weakref.ref(model.weight.grad)
    model.zero_grad()
    gc.collect()
    assert gradient() is None
    assert state.take_update({})


# ------------------------------------------------------------------------------------------ GradScaler


def lent_by_scaler() -> Any:
    optimizer = trained()[1]
    optimizer.found_inf = optimizer.grad_scale = torch.zeros(())  # type: ignore[attr-defined]
    return optimizer


def test_a_scaler_is_refused_after_an_update_and_where_only_owners_have_gradients() -> None:
    state, *_ = updated()
    assert "were updated during backward" in (state.refuses_scaler or "")
    state = InBackward(owner_only=True)
    assert "scaled=True" in (state.refuses_scaler or "")
    state.shows_infinities = True
    assert state.refuses_scaler is None
    assert InBackward().refuses_scaler is None
    assert InBackward(shows_infinities=True).refuses_scaler is None


def test_a_refused_scaler_leaves_the_optimizer_as_it_found_it() -> None:
    state, optimizer = InBackward(owner_only=True), lent_by_scaler()
    with pytest.raises(RuntimeError, match=r"GradScaler looks for infinite gradients"):
        state.check_no_scaler(optimizer)
    assert not hasattr(optimizer, "found_inf")
    assert not hasattr(optimizer, "grad_scale")
    state.check_no_scaler(optimizer)


def test_a_scaler_that_can_work_keeps_what_it_lent() -> None:
    optimizer = lent_by_scaler()
    InBackward().check_no_scaler(optimizer)
    assert hasattr(optimizer, "found_inf")
    InBackward(owner_only=True).check_no_scaler(trained()[1])
