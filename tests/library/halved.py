"""A tensor subclass that keeps 16-bit integers and a scale, as low-bit states do, and a wrapper around it."""

from __future__ import annotations

from typing import Any

import torch


class Halved(torch.Tensor):
    """Shows float32, keeps 16-bit integers and a scale, and can do as little as torchao's low-bit state."""

    codes: torch.Tensor
    scale: torch.Tensor
    context: Any

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, context: Any) -> Halved:
        made: Halved = torch.Tensor._make_wrapper_subclass(
            cls, codes.shape, strides=codes.stride(), device=codes.device, dtype=torch.float32
        )
        made.codes, made.scale, made.context = codes, scale, context
        return made

    @classmethod
    def of(cls, values: torch.Tensor) -> Halved:
        scale = values.abs().max() / 2**15
        context = {"signed": True, "shape": values.shape, "of": (torch.float32, [1, None], values.device)}
        return cls((values / scale).to(torch.int16).contiguous(), scale, context)

    def values(self) -> torch.Tensor:
        return self.codes.float() * self.scale

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], self.context

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Any], context: Any, size: Any, stride: Any) -> Halved:
        made = cls(inner["codes"], inner["scale"], context)
        assert (made.size(), made.stride()) == (size, stride)
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale, args[0].context)
        raise NotImplementedError(f"{func} is not there for {cls.__name__}")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Halved({self.codes.tolist()} * {self.scale.item()})"


class Around(Halved):
    """A wrapper around a wrapper."""

    @classmethod
    def around(cls, inner: Halved) -> Around:
        made = cls(inner.codes, inner.scale, inner.context)
        made.inner = inner  # type: ignore[attr-defined]
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["inner"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Any], context: Any, size: Any, stride: Any) -> Around:
        return cls.around(inner["inner"])
