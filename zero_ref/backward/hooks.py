"""The hooks that autograd calls before and after it adds a gradient to a parameter's.

`stairs/owners.py` needs no hooks of its own, as DDP has them. `ShardedDataParallel` stands in DDP's place.
The hook before the first gradient begins a backward, when earlier averages are still apart from what will be
added to them. The hook after a gradient moves it to its bucket.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from zero_ref.backward.shard_reduction import ShardReduction, has_graph


class GradientHooks:
    """The hooks of one ShardedDataParallel on the trained parameters of its module.

    Args:
        wrapper: the ShardedDataParallel, which the hooks do not keep alive.
        reductions: those of its optimizers.
        dtype: the dtype in which gradients are sent; None for the parameters' own.
        before: called before a gradient is added, with arguments that have no meaning here.
        after: called with the parameter when its gradient is complete.

    Attributes:
        place_of: the optimizer's reduction and the number there of each parameter.
    """

    def __init__(
        self,
        wrapper: weakref.ref[Any],
        reductions: Sequence[ShardReduction],
        dtype: torch.dtype | None,
        before: Callable[..., None],
        after: Callable[[torch.Tensor], None],
    ) -> None:
        self._wrapper, self._reductions, self._dtype = wrapper, reductions, dtype
        self._before, self._after = before, after
        self.place_of: dict[torch.Tensor, tuple[ShardReduction, int]] = {}
        self._node_of: dict[torch.Tensor, Any] = {}  # a node keeps its hooks as long as it is kept

    def attach(self, module: nn.Module) -> None:
        """Put hooks on the trained parameters that have none yet, or have lost one.

        Raises:
            ValueError: as `lacking`.
        """
        for param, node in self.lacking(module):
            param._sharded_by = self._wrapper  # type: ignore[attr-defined]
            node.register_prehook(self._before)  # a hook on the tensor is called by torch.autograd.grad, too
            if param not in self._node_of:
                param.register_post_accumulate_grad_hook(self._after)
            self._node_of[param] = node

    def lacking(self, module: nn.Module) -> list[tuple[nn.Parameter, Any]]:
        """The trained parameters without hooks, and their nodes: a cast gives a parameter a new node.

        Raises:
            ValueError: a parameter has no owner or several, is in another wrapper, cannot be sent, or has
                gradients of another dtype.
        """
        self._find_places(module)
        trained: dict[nn.Parameter, None] = {}
        for one in module.modules():  # takes a third of the time of named_parameters
            for param in one._parameters.values():
                if param is not None and param.requires_grad:
                    trained[param] = None
        found = []
        for param, node in zip(trained, accumulators([*trained]), strict=True):
            if self._node_of.get(param) is not node:
                found.append((param, node))
        if found:
            lacking = {param for param, _ in found}
            for name, param in module.named_parameters():
                if param in lacking:
                    self._check_can_be_hooked(name, param)
        return found

    def check_no_graph(self) -> None:
        """Refuse gradients of which autograd keeps a graph.

        Raises:
            RuntimeError: a gradient requires a gradient.
        """
        for param in self._node_of:
            if (grad := param.grad) is not None and grad.requires_grad:
                raise has_graph()

    def _find_places(self, module: nn.Module) -> None:
        if len(self.place_of) == sum(len(reduction.zero.built.params) for reduction in self._reductions):
            return
        self.place_of = {}
        for reduction in self._reductions:
            for number, param in enumerate(reduction.zero.built.params):
                if param in self.place_of:
                    raise ValueError(
                        f"parameter {reduction.zero.built.name(number)} is in two of the optimizers."
                    )
                self.place_of[param] = reduction, number
        inside = set(module.parameters())
        for param, (reduction, number) in self.place_of.items():
            if param.requires_grad and param not in inside:
                raise ValueError(
                    f"parameter {reduction.zero.built.name(number)} of the optimizer is not in the "
                    "module, so its gradients would not be averaged. Give it an optimizer of its own."
                )

    def _check_can_be_hooked(self, name: str, param: nn.Parameter) -> None:
        if param not in self.place_of:
            raise ValueError(
                f"parameter {name} is trained, and no optimizer has it, so it has no owner. Give the "
                "optimizer all parameters of the model, or set its requires_grad to False."
            )
        if self._dtype is not None and not self._dtype.is_complex and param.is_complex():
            option = "reduce_fp16=True" if self._dtype == torch.float16 else "reduce_dtype="
            raise ValueError(f"parameter {name} is complex, and {option} would drop a part of it.")
        kept = param.grad_dtype  # None for any dtype
        if kept not in (None, param.dtype):
            raise ValueError(
                f"parameter {name} is {param.dtype} and has grad_dtype={kept}, but averages have the "
                f"parameter's dtype. Set grad_dtype to that; reduce_dtype={kept} sends gradients in {kept}."
            )
        # Not in a variable: the traceback of the error would keep the other wrapper alive.
        if getattr(param, "_sharded_by", lambda: None)() not in (None, self._wrapper()):
            raise ValueError(
                f"parameter {name} is in another ShardedDataParallel. Use that one, or delete it first."
            )


class _Inputs(torch.autograd.Function):
    """A function of many parameters, made only for its links to their nodes."""

    @staticmethod
    def forward(ctx: Any, *params: torch.Tensor) -> torch.Tensor:
        return params[0].new_empty(0)


@torch.enable_grad()
def accumulators(params: Sequence[torch.Tensor]) -> list[Any]:
    """Autograd's nodes that add to the parameters' gradients, found by one call, as models have thousands."""
    if not params:
        return []
    out: Any = _Inputs.apply(*params)  # type: ignore[no-untyped-call]
    return [node for node, _ in out.grad_fn.next_functions]
