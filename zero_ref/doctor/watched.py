"""Where the optimizers that `watch` knows have their parameters and gradients, and what they shard."""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.shard.gradients import WHOLE
from zero_ref.shard.stepper import GradientSource

Facts = dict[str, Any]


class Tensors:
    """Parameters in the optimizer's groups, with gradients in `.grad`. DTensors are gathered whole."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.inner = optimizer, getattr(optimizer, "optim", optimizer)

    def groups(self) -> list[tuple[Facts, list[Any]]]:
        """The options and the parameters of each group."""
        groups = self.optimizer.param_groups
        other = ("params", "param_names")
        return [({k: v for k, v in group.items() if k not in other}, group["params"]) for group in groups]

    def value(self, tensor: Any) -> torch.Tensor:
        """The whole tensor. Collective: all ranks, if it is a DTensor."""
        full = getattr(tensor, "full_tensor", None)
        return (full() if callable(full) else tensor).detach()

    def grad(self, param: Any) -> torch.Tensor | None:
        """The whole gradient; None if there is none. Collective: all ranks, if it is a DTensor."""
        return None if param.grad is None else self.value(param.grad)

    def only_make_state(self) -> bool:
        """Whether a step now would only make state: all rates are 0, and so is every gradient.

        torch.distributed.checkpoint.state_dict makes such a step before it loads an optimizer's state.
        """
        groups = self.groups()
        if not all(float(options.get("lr", 1.0)) == 0.0 for options, _ in groups):
            return False
        grads = [param.grad for _, params in groups for param in params if param.grad is not None]
        return bool(grads) and not any(getattr(grad, "_local_tensor", grad).any() for grad in grads)

    def add_up(self) -> bool:
        """Whether each rank has other parts of gradients, and zeros or nothing elsewhere."""
        return False

    def factor(self, grads: Sequence[torch.Tensor]) -> float | None:
        """What the optimizer multiplies all gradients by inside its step; None if it leaves out this step."""
        return 1.0

    def stepped(self, param: Any) -> torch.Tensor:
        """The whole tensor that the optimizer steps: the parameter, or its 32-bit copy."""
        return self.value(param)

    def apart(self, param: Any) -> str | None:
        """How a parameter differs from the copy that the optimizer steps; None if it does not."""
        return None

    def state(self, param: Any, keys: Sequence[str]) -> Facts:
        """The optimizer's state of a parameter on this rank, as far as it is there."""
        return dict(getattr(self.inner, "state", {}).get(param, {}))

    def parts_of_state(self, param: Any, keys: Sequence[str]) -> list[tuple[int, int, Facts]]:
        """What this rank has of a parameter's state: the range of elements, and their state.

        Collective: all ranks, if it is of DTensors.
        """
        state = self.state(param, keys)
        whole = {k: self.value(v) if isinstance(v, torch.Tensor) else v for k, v in state.items()}
        return [(0, self.numel(param), whole)] if whole else []

    def masters(self) -> bool:
        """Whether the optimizer steps 32-bit copies of parameters of 16 bits."""
        return False

    def numel(self, param: Any) -> int:
        """The number of elements of the whole tensor."""
        return int(param.numel())


class Slices(Tensors):
    """This package's optimizer, whose gradients may lie in the slices that a rank owns."""

    def masters(self) -> bool:
        """Whether it was made with `master_dtype`."""
        return self.optimizer.registered.options.master_dtype is not None

    def add_up(self) -> bool:
        """Whether its backward reduced gradients to their owners."""
        return self.optimizer.backward.gradients is not WHOLE

    def parts_of_state(self, param: Any, keys: Sequence[str]) -> list[tuple[int, int, Facts]]:
        """Those of the slices that this rank owns."""
        return [(one.start, one.stop, dict(one)) for one in self.optimizer.parts_of_state(param) if one]

    def value(self, tensor: Any) -> torch.Tensor:
        """The whole tensor, after the new parameters have arrived."""
        if self.optimizer.arriving is not None:
            self.optimizer.arriving.wait()
        return super().value(tensor)

    def grad(self, param: Any) -> torch.Tensor | None:
        """The gradient; after a reduction to owners, with zeros where this rank owns nothing."""
        if not self.add_up():
            return super().grad(param)
        source, whole = GradientSource(None, self.optimizer.backward.gradients.in_slices), None
        for own in self.optimizer.shard.owned:
            part = source.of_slice(own) if own.param is param else None
            if part is not None:
                whole = torch.zeros_like(param) if whole is None else whole
                own.part_of(whole).copy_(part)
        return whole


class OfOwners(Tensors):
    """FairScale's OSS. Under ShardedDataParallel the owner of a parameter alone has its averaged gradient."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        self._reduced: bool | None = None

    def grad(self, param: Any) -> torch.Tensor | None:
        """The gradient; None where another rank owns it, as `.grad` has this rank's own gradient there."""
        if self._reduced is None:
            # The optimizer does not know the wrapper, and the wrapper replaces no gradient, so it is looked
            # for among all objects, once.
            module = sys.modules.get("fairscale.nn.data_parallel.sharded_ddp")
            kind = () if module is None else module.ShardedDataParallel
            self._reduced = any(
                isinstance(one, kind) and any(own is self.optimizer for own in one._sharded_optimizers)
                for one in gc.get_objects()
            )
        owned = self.optimizer._param_to_rank[param] == self.optimizer.rank
        return super().grad(param) if owned or not self._reduced else None


class OfDeepSpeed(Tensors):
    """DeepSpeed's optimizer of stage 1, 2 or 3: whole tensors by its public `safe_get_full_...` functions."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        from deepspeed import utils, zero

        self._utils, self._zero, self._third = utils, zero, hasattr(optimizer, "sub_group_to_group_id")

    def groups(self) -> list[tuple[Facts, list[Any]]]:
        """The options of the groups, which hold flat buffers, and the model's own parameters."""
        made = [
            ({k: v for k, v in group.items() if k != "params"}, list[Any]())
            for group in self.optimizer.optimizer.param_groups
        ]
        of_groups = self.optimizer.fp16_groups if self._third else self.optimizer.bit16_groups
        for number, params in enumerate(of_groups):
            made[self.optimizer.sub_group_to_group_id[number] if self._third else number][1].extend(params)
        return made

    def masters(self) -> bool:
        """It does so, of parameters of 32 bits too."""
        return True

    def value(self, tensor: Any) -> torch.Tensor:
        """The parameter with which the model computes. Collective: all ranks, if it is of stage 3."""
        if not hasattr(tensor, "ds_id"):
            return super().value(tensor)
        with self._zero.GatheredParameters([tensor]):
            return tensor.detach().clone()

    def stepped(self, param: Any) -> torch.Tensor:
        """The 32-bit copy, which lies in flat buffers. Collective: all ranks."""
        return self._utils.safe_get_full_fp32_param(param).detach()

    def apart(self, param: Any) -> str | None:
        """How the parameter is not its copy, rounded. Collective: all ranks."""
        value, copy = self.value(param), self.stepped(param)
        off = (value != copy.to(value.dtype)) & ~copy.isnan()
        if not off.any():
            return None
        place = int(off.flatten().int().argmax())
        return (
            "is not the 32-bit copy that DeepSpeed steps: element "
            f"{place} is {value.flatten()[place]:.6g} and "
            f"{copy.flatten()[place]:.6g} in the copy, {int(off.sum())} of {off.numel()} elements differ"
        )

    def grad(self, param: Any) -> torch.Tensor | None:
        """The averaged gradient, without the scale of the loss. Collective: all ranks."""
        grad = self._utils.safe_get_full_grad(param)
        return None if grad is None else grad.detach() / self.optimizer.loss_scale

    def factor(self, grads: Sequence[torch.Tensor]) -> float | None:
        """DeepSpeed clips inside its step, and leaves out a step whose gradients are not finite."""
        norm = math.sqrt(sum(grad.double().square().sum().item() for grad in grads))
        limit = self.optimizer.clip_grad
        if not math.isfinite(norm):
            checks = getattr(self.optimizer, "check_grad_overflow", True)
            return None if checks or self.optimizer.dtype != torch.bfloat16 else math.nan
        return min(1.0, limit / (norm + 1e-6)) if limit else 1.0

    def state(self, param: Any, keys: Sequence[str]) -> Facts:
        """The whole state, as far as all ranks have it. Collective: all ranks."""
        kept: Facts = next(iter(self.optimizer.optimizer.state.values()), {})
        mine = {
            key: isinstance(kept[key], torch.Tensor) and kept[key].numel() > 1 for key in keys if key in kept
        }
        of_ranks: list[dict[str, bool]] = [{}] * dist.get_world_size()
        dist.all_gather_object(of_ranks, mine)
        if not all(of_ranks):
            return {}
        if not self._third:
            # DeepSpeed does so in a step, and could not give the state between a load and the first one.
            self.optimizer._lazy_init_hp_params_optimizer_state()
        full = self._utils.safe_get_full_optimizer_state
        large = {key: full(param, key) for key in keys if all(one.get(key) for one in of_ranks)}
        return {key: kept[key] for key, is_large in mine.items() if not is_large} | large

    def numel(self, param: Any) -> int:
        """The number of elements of the whole parameter."""
        return int(getattr(param, "ds_numel", param.numel()))


def unwrapped(optimizer: Any) -> Any:
    """The optimizer whose `step` makes each update: inside accelerate's wrapper, or in DeepSpeed's engine."""
    if type(optimizer).__module__.startswith("accelerate."):
        optimizer = optimizer.optimizer  # the wrapper's step makes none while it accumulates
    if isinstance(optimizer, nn.Module) and type(optimizer).__module__.startswith("deepspeed."):
        optimizer = optimizer.optimizer
    return optimizer


def parts_of(optimizer: Any) -> Tensors:
    """The way to an optimizer's whole parameters and gradients.

    Raises:
        ValueError: it is an optimizer of DeepSpeed that is not of stage 1, 2 or 3, or it makes its update
            during backward.
    """
    kind = type(optimizer).__name__
    if type(optimizer).__module__.startswith("deepspeed.runtime."):
        if kind not in ("DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3"):
            raise ValueError(
                f"the watch does not know the gradients of DeepSpeed's {kind}: use stage 2 or 3 of "
                "zero_optimization, stage 1 without grad_accum_dtype, or stage 0 in 32 bits."
            )
        return OfDeepSpeed(optimizer)
    if type(optimizer).__module__.startswith("fairscale.optim.oss"):
        return OfOwners(optimizer)
    ours = isinstance(optimizer, ZeroRedundancyOptimizer)
    options, name = (optimizer.registered.options, "") if ours else (optimizer, "_")
    if getattr(options, f"{name}overlap_with_ddp", False):
        raise ValueError("with overlap_with_ddp the update is made during backward, where no step is seen.")
    return Slices(optimizer) if ours else Tensors(optimizer)


def plain_class(optimizer: Any) -> Callable[..., Any]:
    """The class of plain optimizer that this one shards, or is.

    >>> plain_class(torch.optim.SGD([torch.zeros(1)])).__name__
    'SGD'

    Raises:
        ValueError: it cannot be told.
    """
    inner = getattr(optimizer, "optim", None) or getattr(optimizer, "optimizer", None) or optimizer
    kind, module = type(inner).__name__, type(inner).__module__
    if module.startswith("deepspeed.ops.") and hasattr(inner, "adam_w_mode"):
        return torch.optim.AdamW if inner.adam_w_mode else torch.optim.Adam
    own = inner is optimizer and not f"{module}.".startswith("torch.optim.")
    if own or module.startswith("deepspeed."):
        raise ValueError(f"{kind} may shard any class: give plain=, which makes the plain optimizer.")
    return type(inner)


def kept_state(plain: Callable[..., Any], options: Facts) -> dict[str, bool]:
    """What the plain optimizer keeps of a parameter, by key: whether it is a tensor as large as that.

    >>> kept_state(torch.optim.AdamW, {})
    {'step': False, 'exp_avg': True, 'exp_avg_sq': True}
    """
    param = nn.Parameter(torch.zeros(3, 2))
    param.grad = torch.ones(3, 2)
    made = plain([options | {"params": [param]}])
    with torch.enable_grad():
        made.step()
    state = made.state[param].items()
    return {key: isinstance(one, torch.Tensor) and one.numel() == param.numel() for key, one in state}


def fingerprint(tensor: torch.Tensor) -> int:
    """A number of 64 bits that differs where a bit of the tensor does, to compare tensors by 8 bytes.

    >>> fingerprint(torch.tensor([1.0, 2.0])) == fingerprint(torch.tensor([2.0, 1.0]))
    False
    """
    total, first = 0, 1
    for piece in tensor.detach().contiguous().reshape(-1).view(torch.uint8).split(1 << 23):
        words = nn.functional.pad(piece, (0, -piece.numel() % 8)).view(torch.int64)
        # Each word counts times an odd number of its own, so a changed word changes the sum modulo 2**64.
        weights = torch.arange(first, first + 2 * words.numel(), 2, device=words.device)
        total, first = total + int((words * weights).sum()), first + 2 * words.numel()
    return total % (1 << 64)
