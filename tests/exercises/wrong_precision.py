"""Chapter 15: answers that a reader may give, each with a part of the message that must meet them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

# ---------------------------------------------------------------------------------------------- lost_below


def _power(weight: float) -> float:
    return float(2.0 ** math.floor(math.log2(abs(weight))))


def the_whole_gap(weight: float, dtype: Any) -> float:
    return _power(weight) * torch.finfo(dtype).eps


def in_proportion(weight: float, dtype: Any) -> float:
    return abs(weight) * torch.finfo(dtype).eps / 2


def that_of_1(weight: float, dtype: Any) -> float:
    return torch.finfo(dtype).eps / 2


def the_next_power(weight: float, dtype: Any) -> float:
    return 2.0 ** math.ceil(math.log2(abs(weight))) * torch.finfo(dtype).eps / 2


def logarithm_of_a_negative(weight: float, dtype: Any) -> float:
    return 2.0 ** math.floor(math.log2(weight)) * torch.finfo(dtype).eps / 2


def with_its_sign(weight: float, dtype: Any) -> float:
    return math.copysign(_power(weight), weight) * torch.finfo(dtype).eps / 2


def always_bfloat16(weight: float, dtype: Any) -> float:
    return _power(weight) * 2**-8


def a_pair(weight: float, dtype: Any) -> Any:
    return weight - 2**-8, weight + 2**-8


# --------------------------------------------------------------------------------------------- master_step


def gives_no_gradient(param: Any, master: Any, optimizer: Any) -> None:
    optimizer.step()
    with torch.no_grad():
        param.copy_(master)


def gives_16_bits(param: Any, master: Any, optimizer: Any) -> None:
    master.grad = param.grad
    optimizer.step()


def makes_it_from_the_parameter(param: Any, master: Any, optimizer: Any) -> None:
    with torch.no_grad():
        master.copy_(param)
        master.grad = param.grad.float()
        optimizer.step()
        param.copy_(master)


def rounds_the_master(param: Any, master: Any, optimizer: Any) -> None:
    master.grad = param.grad.float()
    optimizer.step()
    with torch.no_grad():
        param.copy_(master)
        master.copy_(param)


def writes_nothing_back(param: Any, master: Any, optimizer: Any) -> None:
    master.grad = param.grad.float()
    optimizer.step()
    param = master.bfloat16()


def writes_back_first(param: Any, master: Any, optimizer: Any) -> None:
    with torch.no_grad():
        param.copy_(master)
    master.grad = param.grad.float()
    optimizer.step()


def makes_the_model_float32(param: Any, master: Any, optimizer: Any) -> None:
    master.grad = param.grad.float()
    optimizer.step()
    param.data = master.detach().clone()


def adds_gradients_up(param: Any, master: Any, optimizer: Any) -> None:
    before = 0.0 if master.grad is None else master.grad
    master.grad = param.grad.float() + before
    optimizer.step()
    with torch.no_grad():
        param.copy_(master)


def keeps_the_old_gradient(param: Any, master: Any, optimizer: Any) -> None:
    if param.grad is not None:
        master.grad = param.grad.float()
    optimizer.step()
    with torch.no_grad():
        param.copy_(master)


def expects_a_gradient(param: Any, master: Any, optimizer: Any) -> None:
    master.grad = param.grad.float()
    optimizer.step()
    with torch.no_grad():
        param.copy_(master)


# ----------------------------------------------------------------------------------------- round_at_random


def the_nearer(value: float, low: float, high: float, chance: float) -> float:
    return low if value - low < high - value else high


def a_coin(value: float, low: float, high: float, chance: float) -> float:
    return low if chance < 0.5 or value == low else high


def the_farther_more_often(value: float, low: float, high: float, chance: float) -> float:
    return low if chance < (value - low) / (high - low) else high


def without_the_gap(value: float, low: float, high: float, chance: float) -> float:
    return high if chance < value - low else low


def in_between(value: float, low: float, high: float, chance: float) -> float:
    return low + chance * (high - low)


def moves_what_is_exact(value: float, low: float, high: float, chance: float) -> float:
    return high if chance <= (value - low) / (high - low) else low


def a_square(value: float, low: float, high: float, chance: float) -> float:
    return high if chance < ((value - low) / (high - low)) ** 2 else low


WRONG: list[tuple[str, Callable[..., Any], str]] = [
    ("precision.lost_below", the_whole_gap, r"That is the whole gap"),
    ("precision.lost_below", in_proportion, r"does not grow with each weight"),
    ("precision.lost_below", that_of_1, r"gap at 1\. Other weights"),
    ("precision.lost_below", the_next_power, r"power at or below the weight"),
    ("precision.lost_below", logarithm_of_a_negative, r"raised ValueError: "),
    ("precision.lost_below", with_its_sign, r"below zero has the same gaps"),
    ("precision.lost_below", always_bfloat16, r"These are bfloat16's gaps"),
    ("precision.lost_below", a_pair, r"must return one number"),
    ("precision.master_step", gives_no_gradient, r"the master has not changed"),
    ("precision.master_step", gives_16_bits, r"raised RuntimeError: "),
    ("precision.master_step", makes_it_from_the_parameter, r"made from the parameter again"),
    ("precision.master_step", rounds_the_master, r"the master has only values of bfloat16"),
    ("precision.master_step", writes_nothing_back, r"has not changed in this step: write"),
    ("precision.master_step", writes_back_first, r"has not changed in this step: write the master's new"),
    ("precision.master_step", makes_the_model_float32, r"the parameter is torch\.float32"),
    ("precision.master_step", adds_gradients_up, r"earlier steps do not add up"),
    ("precision.master_step", keeps_the_old_gradient, r"has no update in this step"),
    ("precision.master_step", expects_a_gradient, r"raised AttributeError: 'NoneType'"),
    ("precision.round_at_random", the_nearer, r"The random number must decide"),
    ("precision.round_at_random", a_coin, r"That is a coin"),
    ("precision.round_at_random", the_farther_more_often, r"nearer one must come more often"),
    ("precision.round_at_random", without_the_gap, r"divide the distance by the gap"),
    ("precision.round_at_random", in_between, r"no value between"),
    ("precision.round_at_random", moves_what_is_exact, r"has the value 1\.0 itself, so it stays"),
    ("precision.round_at_random", a_square, r"For the mean to be the value"),
]
