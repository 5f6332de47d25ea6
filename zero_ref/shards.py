"""What a rank owns, as tensors: the bridge from a plan on integers to a local torch optimizer.

`specs_of` reads from parameter groups what a plan may know; `own_slices` and `local_groups` turn a rank's
slices into what the local optimizer updates, `LentGradients` into what it updates from;
`check_can_be_sharded` and `facts_of` are what is verified, on each rank and between ranks, before anything
is sent.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from zero_ref.buckets import flat_like, flat_view
from zero_ref.merged import MergedSlices
from zero_ref.partition import ParamSpec, Partition, Slice

ParamGroup = dict[str, Any]

PARAM_KEYS = ("params", "param_names")
"""The entries of a parameter group that are not options."""

ELEMENTWISE: frozenset[type[Optimizer]] = frozenset(
    {
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    }
)
"""Optimizers that treat each element by itself, so that a parameter may be cut anywhere."""


class OwnedSlice(NamedTuple):
    """A slice that this rank owns, and the tensor that the local optimizer updates in its place.

    `local` is the parameter itself where it is owned whole, else a 1-D leaf that shares its memory.
    """

    piece: Slice
    param: torch.Tensor
    local: torch.Tensor


def specs_of(param_groups: Sequence[ParamGroup]) -> list[ParamSpec]:
    """What a plan may know of the parameters, in registration order."""
    return [
        ParamSpec(
            numel=param.numel(),
            dtype=dtype_name(param.dtype),
            device=str(param.device),
            group=index,
            trainable=param.requires_grad,
            name=name,
        )
        for index, group in enumerate(param_groups)
        for param, name in zip(
            group["params"], group.get("param_names") or [""] * len(group["params"]), strict=True
        )
    ]


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """As torch prints it, without the `torch.`."""
    return str(dtype).removeprefix("torch.")


def params_of(param_groups: Sequence[ParamGroup]) -> list[torch.Tensor]:
    """The parameters in registration order: the order of the groups, then that within a group."""
    return [param for group in param_groups for param in group["params"]]


def options_of(group: ParamGroup) -> dict[str, Any]:
    """A parameter group without its parameters: learning rate, betas and so on."""
    return {key: value for key, value in group.items() if key not in PARAM_KEYS}


def copy_options(source: Sequence[ParamGroup], target: Sequence[ParamGroup]) -> None:
    """Copy learning rates and all other options from groups to groups; parameters stay."""
    for theirs, ours in zip(source, target, strict=True):
        ours.update(options_of(theirs))


def own_slices(pieces: Iterable[Slice], params: Sequence[torch.Tensor]) -> list[OwnedSlice]:
    """The tensors to update for these slices: a parameter itself if whole, else a leaf on its memory."""
    owned = []
    for piece in pieces:
        param = params[piece.param]
        local = param
        if piece.numel != param.numel():
            # detach, not .data: autograd still notices when a tensor that it saved is overwritten.
            local = flat_view(param.detach())[piece.start : piece.stop]
            local.requires_grad_(param.requires_grad)
        owned.append(OwnedSlice(piece, param, local))
    return owned


def local_groups(param_groups: Sequence[ParamGroup], owned: Sequence[OwnedSlice]) -> list[ParamGroup]:
    """A rank's parameter groups: the options of the global ones, the local tensors of the slices it owns."""
    group_of_param = [index for index, group in enumerate(param_groups) for _ in group["params"]]
    groups = [{**options_of(group), "params": []} for group in param_groups]
    for own in owned:
        groups[group_of_param[own.piece.param]]["params"].append(own.local)
    return groups


class LentGradients:
    """Gives each local tensor the gradient of its slice for the time of a step, and frozen parameters none.

    In the usual case, whole parameters that are all trained, there is nothing to do.

    Args:
        partition, params, specs: of all parameters.
        owned: this rank's slices.
        merged: those of them that are stepped as one, where each has its gradient.
    """

    def __init__(
        self,
        partition: Partition,
        owned: Sequence[OwnedSlice],
        params: Sequence[torch.Tensor],
        specs: Sequence[ParamSpec],
        merged: MergedSlices,
    ) -> None:
        self.specs, self.merged = specs, merged
        self.cut = [
            (number, param, param.stride())
            for number, param in enumerate(params)
            if len(partition.pieces_of_param[number]) > 1
        ]
        self.my_pieces = [own for own in owned if own.local is not own.param and own.param.requires_grad]
        self.my_whole = [own for own in owned if own.local is own.param and own.param.requires_grad]
        self.my_frozen = [own for own in owned if own.local is own.param and not own.param.requires_grad]
        self.withheld: list[tuple[torch.Tensor, torch.Tensor | None]] = []

    def lend(self, gradients: Mapping[int, torch.Tensor] | None = None) -> None:
        """Point the local tensors to their gradients.

        Args:
            gradients: by parameter number, each in its parameter's shape and strides. The local step then
                updates these parameters alone. None for what each parameter has in `.grad`.
        Raises:
            RuntimeError: a parameter that is split has a sparse gradient. Every rank looks at all of them, so
                that all raise alike.
        """

        def gradient_of(number: int, param: torch.Tensor) -> torch.Tensor | None:
            return param.grad if gradients is None else gradients.get(number)

        for number, param, _ in self.cut:
            grad = gradient_of(number, param)
            if grad is not None and grad.layout != torch.strided:
                raise RuntimeError(
                    f"parameter {self.specs[number].name or number} has a sparse gradient, which cannot be "
                    'cut. Use a partition of whole parameters, such as "sorted_greedy".'
                )
        for piece, param, local in self.my_pieces:
            grad = gradient_of(piece.param, param)
            local.grad = None if grad is None else flat_like(grad, param)[piece.start : piece.stop]
        for own in self.my_frozen:
            # A gradient left from before the parameter was frozen would move it on its owner alone.
            self._replace(own.param, None)
        if gradients is None:
            self.merged.lend()
        else:
            self.merged.dissolve()
            for own in self.my_whole:
                self._replace(own.param, gradients.get(own.piece.param))

    def _replace(self, param: torch.Tensor, grad: torch.Tensor | None) -> None:
        self.withheld.append((param, param.grad))
        param.grad = grad

    def take_back(self) -> None:
        """Leave all gradients as they were before `lend`."""
        self.merged.take_back()
        for _, _, local in self.my_pieces:
            local.grad = None  # else the slice would keep the whole gradient alive after zero_grad()
        for param, grad in self.withheld:
            param.grad = grad
        self.withheld.clear()

    def lent_after(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure, which computes the gradients, followed by lending them."""

        def closure_then_lend() -> Any:
            self.take_back()  # while the user's code runs, all is as it left it
            loss = closure()
            self.lend()
            return loss

        return closure_then_lend


def is_elementwise(optimizer_class: type[Optimizer]) -> bool:
    """It is one of torch's, or its author says so. A subclass of one of torch's may do anything."""
    return optimizer_class in ELEMENTWISE or bool(getattr(optimizer_class, "elementwise", False))


def check_can_be_sharded(
    optimizer_class: type[Optimizer],
    partition: Partition,
    params: Sequence[torch.Tensor],
    specs: Sequence[ParamSpec],
) -> None:
    """Refuse what would train something else than the unsharded optimizer does.

    Raises:
        TypeError: `optimizer_class` is no optimizer class.
        ValueError: the optimizer couples parameters (LBFGS) or looks at shapes and a parameter is split, or
            a parameter has gaps in memory or shares it with another.
    """
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        raise TypeError(
            f"optimizer_class takes a class such as torch.optim.AdamW, not {_kind(optimizer_class)}; "
            "its options, such as lr=1e-3, follow as keyword arguments."
        )
    if issubclass(optimizer_class, torch.optim.LBFGS):
        raise ValueError(
            "LBFGS computes one direction from all parameters together; on shards it would be another "
            "algorithm. Use an optimizer that updates each parameter by itself."
        )
    if not partition.is_whole and not is_elementwise(optimizer_class):
        raise ValueError(
            f"{optimizer_class.__name__} may look at a parameter's shape, and this partition splits "
            'parameters. Use partition="sorted_greedy", or, if it treats each element by itself, set '
            f"{optimizer_class.__name__}.elementwise = True."
        )
    names = [spec.name or str(index) for index, spec in enumerate(specs)]
    for name, param in zip(names, params, strict=True):
        try:
            param.is_contiguous() or flat_view(param.detach())
        except ValueError as error:
            raise ValueError(f"parameter {name}: {error}") from None
    _check_memory_is_apart(names, params, specs)


def _check_memory_is_apart(
    names: Sequence[str], params: Sequence[torch.Tensor], specs: Sequence[ParamSpec]
) -> None:
    # Each fills one range of memory, so of any that overlap two are neighbours in the order of their starts.
    # Tensors that have no memory ("meta") start at 0.
    ranges = sorted(
        (specs[index].device, start, param.nbytes, index)
        for index, param in enumerate(params)
        if (start := param.data_ptr())
    )
    for (device, start, nbytes, one), (other_device, other_start, _, other) in pairwise(ranges):
        if device != other_device or start + nbytes <= other_start:
            continue
        first, second = sorted((one, other))
        if params[first] is params[second]:
            raise ValueError(
                f"parameter {names[first]} is listed twice, at {first} and {second}, so two ranks would own "
                "it. List it once: it gets the gradients of all its uses."
            )
        raise ValueError(
            f"parameters {names[first]} and {names[second]} are different Parameter objects on the same "
            "memory, so two ranks would own it. Tie weights by using one Parameter in both places."
        )


def describe_options(group: ParamGroup) -> list[str]:
    """The options in words that are equal on two ranks where the options are: no addresses, no devices."""
    options = sorted(options_of(group).items())
    return [re.sub(r" at 0x[0-9a-fA-F]+", "", f"{key}={_plain(value)!r}") for key, value in options]


def facts_of(
    param_groups: Sequence[ParamGroup], specs: Sequence[ParamSpec], partition: Partition, first: int = 0
) -> list[str]:
    """What must be the same on all ranks, one line each, for the parameters from number `first` on."""
    devices: dict[str, str] = {}
    for spec in specs:  # cuda:0 on rank 0 is cuda:1 on rank 1: compare kind and order of devices
        devices.setdefault(spec.device, f"{spec.device.split(':')[0]} device {len(devices)}")
    facts = [f"{len(specs)} parameters"]
    for number, param in enumerate(params_of(param_groups)[first:], start=first):
        spec = specs[number]
        facts.append(
            f"parameter {spec.name or number}: shape {tuple(param.shape)}, {spec.dtype}, "
            f"{devices[spec.device]}, group {spec.group}, requires_grad={spec.trainable}, "
            f"strides {param.stride()}"
        )
    for index, group in enumerate(param_groups):
        facts += [f"group {index}: {option}" for option in describe_options(group)]
    plan = repr(partition.slices_of_rank).encode()
    return [*facts, f"partition {hashlib.sha256(plan).hexdigest()[:12]}"]


def _plain(value: Any) -> Any:
    """The value with the numbers of its tensors in their place: a tensor prints its device, and rounds."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value


def _kind(value: object) -> str:
    return f"the object {type(value).__name__}(...)" if isinstance(value, Optimizer) else repr(value)
