"""The meta device as a GPU: it has shapes and no values, and answers here as a program meets it on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

aten = torch.ops.aten


_window = ContextVar[int | None]("window", default=None)


@contextmanager
def seeing(window: int) -> Iterator[None]:
    """Let a query of causal attention see so many keys at most, its own included, as flash attention can."""
    token = _window.set(window)
    try:
        yield
    finally:
        _window.reset(token)


def keys_seen(length: int) -> int:
    """The keys of so many that a query sees at most."""
    return min(_window.get() or length, length)


class OnMeta(TorchFunctionMode):
    """What the meta device answers otherwise than a GPU.

    Attention is fused, where torch would write out the scores. A dropout keeps a mask of a byte for each
    element. A condition has no value here, and is answered as for sequences of one text each without padding:
    `all` is true, and `any` is false.
    """

    def __init__(self) -> None:
        super().__init__()
        self._answers = dict[int, tuple[Tensor, bool]]()
        self._counts = dict[int, tuple[Tensor, int]]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            return _attend(*args, **(kwargs or {}))
        if func is torch.nn.functional.dropout:
            return _drop(*args, **(kwargs or {}))
        if func is Tensor.__bool__ and id(args[0]) in self._answers:
            return self._answers[id(args[0])][1]
        result = func(*args, **(kwargs or {}))
        if func in (Tensor.all, torch.all, Tensor.any, torch.any):
            self._answers[id(result)] = result, func in (Tensor.all, torch.all)
        elif func in (Tensor.sum, torch.sum) and args[0].dtype == torch.bool:
            self._counts[id(result)] = result, args[0].numel()
        elif func in (Tensor.eq, Tensor.__eq__) and id(args[0]) in self._counts:  # whether so many are true
            self._answers[id(result)] = result, self._counts[id(args[0])][1] == args[1]
        return result


def _drop(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return torch.native_dropout(input, p, training)[0] if training and p > 0 else input


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The kernel that torch takes on a GPU: flash attention, or the efficient one where flash cannot."""
    shape = query.shape
    query, key, value = (
        one.reshape(-1, *one.shape[-3:]) if one.dim() > 3 else one[None] for one in (query, key, value)
    )
    flash = attn_mask is None and query.shape[-1] == value.shape[-1] and query.element_size() == 2
    if flash:
        made = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal)[0]
    else:
        bias = None
        if attn_mask is not None:
            bias = attn_mask.to(query.dtype) if attn_mask.dtype != query.dtype else attn_mask
            bias = bias.expand(*query.shape[:2], query.shape[-2], key.shape[-2])
        made = aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, True, dropout_p, is_causal
        )[0]
    return made.reshape(*shape[:-1], value.shape[-1])
