"""The place of the gradients after a backward, and the permitted uses of them: without any ranks."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import nn, optim

from zero_ref.shard.built import Built
from zero_ref.shard.gradients import Backward, check_no_scaler


def trained() -> tuple[nn.Linear, optim.SGD]:
    """A model with gradients, from which an update is said to have been made in backward."""
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    return model, optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def updated(**options: Any) -> tuple[Backward, nn.Linear, optim.SGD]:
    model, optimizer = trained()
    optimizer.param_groups[0].update(options)
    state = Backward()
    state.begin()
    state.end_updated(model.parameters(), optimizer.param_groups)
    return state, model, optimizer


def end_on_owners(state: Backward, params: list[nn.Parameter], scaled: bool = False) -> None:
    state.end_on_owners(params, scaled=scaled, may_change=False)


def test_an_update_counts_for_one_step() -> None:
    state, *_ = updated()
    assert state.take_update({})
    assert not state.take_update({})
    assert not Backward().take_update({})


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
    state = Backward()
    state.begin()
    with pytest.raises(RuntimeError, match="did not come to its end"):
        state.take_update({})
    assert not state.take_update({})
    state.begin()
    end_on_owners(state, [])
    assert not state.take_update({})


class Exchange:
    def __init__(self) -> None:
        self.waited = 0

    def wait(self) -> None:
        self.waited += 1


def test_exchanges_of_a_backward_that_did_not_end_are_waited_for_by_the_next() -> None:
    state, exchange = Backward(), Exchange()
    state.begin()
    state.under_way.append(exchange)
    state.begin()
    assert exchange.waited == 1
    state.begin()
    assert exchange.waited == 1
    state.under_way.append(exchange)
    end_on_owners(state, [])
    state.begin()
    assert exchange.waited == 1, "those of one that did end are done"


def dead(second: float) -> tuple[nn.Linear, Callable[[], None]]:
    """A model whose weight has a gradient of zero, as a dead unit's, and its backward."""
    model = nn.Linear(2, 2)
    return model, lambda: (0 * model.weight.sum() + second * model.bias.sum()).backward()


class Told:
    """A `Backward` that is told of a model's backwards, and what it refuses."""

    def __init__(self, model: nn.Linear, run: Callable[[], None], kind: str, are_views: bool) -> None:
        self.model, self.run, self.kind, self.are_views = model, run, kind, are_views
        self.state, self.refused = Backward(), 0

    def backward(self, first: int) -> None:
        params = list(self.model.parameters())

        def on_bucket(_: Any) -> None:
            try:
                self.state.begin([params[first]], self.are_views)
            except RuntimeError as error:
                self.refused += "to accumulate, run all but the last backward under" in str(error)

        hook = params[first].register_post_accumulate_grad_hook(on_bucket)
        self.run()
        hook.remove()
        if self.kind == "on owners":
            end_on_owners(self.state, params)
        else:
            self.state.end_updated(params, [])


def in_all_ways() -> Iterator[tuple[str, bool, int, int, float]]:
    """Kind of backward, whether gradients are views, first parameter, earlier backwards, second gradient."""
    return itertools.product(["on owners", "updated"], [False, True], [0, 1], [0, 2], [0.0, 1.0])


@pytest.mark.parametrize("between", ["nothing", "a step", "the last gradient dropped"])
def test_a_backward_on_top_is_refused_whatever_is_in_the_gradients(between: str) -> None:
    for way in in_all_ways():
        kind, are_views, first, earlier, second = way
        told = Told(*dead(second), kind, are_views)
        for _ in range(earlier):
            told.backward(first)
            told.model.zero_grad()
        told.backward(first)
        assert told.refused == 0, way
        if between == "a step" and kind == "on owners":
            told.state.stepped()
        if between == "the last gradient dropped" and not are_views:
            told.model.bias.grad = None
        told.backward(first)
        assert told.refused == 1, way


@pytest.mark.parametrize("under_no_sync", [False, True])
@pytest.mark.parametrize("by_optimizer", [False, True])
def test_gradients_that_were_dropped_or_zeroed_may_be_added_to(
    by_optimizer: bool, under_no_sync: bool
) -> None:
    for way in in_all_ways():
        kind, are_views, first, earlier, second = way
        told = Told(*dead(second), kind, are_views)
        for set_to_none in [True] * earlier + [True, True, False, False]:
            told.backward(first)
            if by_optimizer:
                told.state.zeroed()  # as its zero_grad does
            else:
                set_to_none |= kind == "on owners" and not are_views
            told.model.zero_grad(set_to_none=set_to_none)
            if under_no_sync and set_to_none:
                told.run()
        assert told.refused == 0, way


def test_under_no_sync_too_nothing_is_added_to_what_owners_have() -> None:
    told = Told(*dead(0.0), "on owners", are_views=False)
    told.backward(0)
    told.state.stepped()
    told.run()
    told.backward(0)
    assert told.refused == 1


def test_after_a_refusal_gradients_still_count_as_changed() -> None:
    told = Told(*dead(1.0), "on owners", are_views=False)
    told.backward(0)
    told.run()
    with pytest.raises(RuntimeError, match="this backward adds to gradients"):
        told.state.gradients.check_may_be_added_to([told.model.weight], are_views=False)
    with pytest.raises(RuntimeError, match="was changed after backward"):
        told.state.gradients.check_as_left(0, cast(Built, Named(tuple(told.model.parameters()))))


class Named(NamedTuple):
    params: tuple[nn.Parameter, ...]

    def name(self, number: int) -> str:
        return f"{number}"


def test_a_parameter_that_was_frozen_is_not_watched() -> None:
    told = Told(*dead(1.0), "on owners", are_views=True)
    told.backward(0)
    told.model.weight.requires_grad_(False)
    told.state.stepped()
    assert not told.model.weight._backward_hooks


def test_nothing_is_watched_when_gradients_are_zeroed() -> None:
    for kind in ("on owners", "updated"):
        told = Told(*dead(1.0), kind, are_views=True)
        told.backward(0)
        assert told.model.weight._backward_hooks
        told.state.zeroed()
        assert not any(param._backward_hooks for param in told.model.parameters())


def test_after_the_step_gradients_that_all_ranks_have_may_be_added_to() -> None:
    state, model, _ = updated()
    assert state.take_update({})
    model(torch.ones(1, 2)).sum().backward()
    state.begin([model.weight])


def test_a_gradient_that_the_loop_has_replaced_may_be_added_to() -> None:
    state, model, _ = updated()
    for param in model.parameters():
        replaced(param)
    state.gradients.check_may_be_added_to([], are_views=False)


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
    assert "were updated during backward" in (state.gradients.why_no_scaler or "")
    end_on_owners(state, [])
    assert "scaled=True" in (state.gradients.why_no_scaler or "")
    end_on_owners(state, [], scaled=True)
    assert state.gradients.why_no_scaler is None
    assert Backward().gradients.why_no_scaler is None


def test_a_refused_scaler_leaves_the_optimizer_as_it_found_it() -> None:
    state, optimizer = Backward(), lent_by_scaler()
    end_on_owners(state, [])
    with pytest.raises(RuntimeError, match=r"GradScaler looks for infinite gradients"):
        check_no_scaler(optimizer, state.gradients)
    assert not hasattr(optimizer, "found_inf")
    assert not hasattr(optimizer, "grad_scale")
    check_no_scaler(optimizer, state.gradients)


def test_a_scaler_that_can_work_keeps_what_it_lent() -> None:
    state, optimizer = Backward(), lent_by_scaler()
    check_no_scaler(optimizer, state.gradients)
    assert hasattr(optimizer, "found_inf")
    end_on_owners(state, [])
    check_no_scaler(trained()[1], state.gradients)
