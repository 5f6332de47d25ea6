"""Exhibits: gradients before the step. They are summed, averaged twice or never, accumulated, or lost."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from zero_ref.doctor.program import Program
from zero_ref_course.gallery.exhibits import exhibit
from zero_ref_course.gallery.right import LR, Sharded

# ------------------------------------------------------------------------------------- over the ranks


@exhibit(
    "https://github.com/facebookresearch/dinov3/pull/250",
    year=2025,
    trial="plain",
    phase="backward",
    says="which is the number of ranks",
)
class Summed(Sharded):
    """Gradients were summed over the ranks and not averaged.

    With Adam, small runs look the same as right ones; large runs ended in NaN.
    """

    def end_of_backward(self) -> None:
        self.sum_gradients(self.params())


@exhibit(
    "https://github.com/verl-project/verl-SpeCo/pull/29",
    "https://github.com/meta-pytorch/torchtune/pull/2172",
    year=2024,
    trial="plain",
    phase="backward",
    says="which is 1 / the number of ranks",
)
class AveragedTwice(Sharded):
    """The loss was divided by the tokens of all ranks, and then the wrapper averaged, so N ranks trained with
    lr / N.
    """

    def backward(self, loss: torch.Tensor) -> None:
        super().backward(loss / dist.get_world_size())


class Wrapped(Program):
    """Right: DistributedDataParallel and a plain AdamW."""

    def __init__(self, model: nn.Module, broadcast_buffers: bool = True) -> None:
        ddp = DistributedDataParallel(model, find_unused_parameters=True, broadcast_buffers=broadcast_buffers)
        super().__init__(torch.optim.AdamW(model.parameters(), lr=LR), model, ddp)


@exhibit(
    "https://github.com/jingyaogong/minimind/issues/853",
    year=2026,
    trial="plain",
    phase="backward",
    says="of its own data alone: it is not reduced",
    mended=Wrapped,
)
class AroundTheWrapper(Wrapped):
    """The trainer called `ddp.module`, so DDP's hooks were never armed, and each rank trained on its own data
    alone.
    """

    def loss(self, batch: Any, of_added: Any = None) -> torch.Tensor:
        wrapper, self.wrapper = self.wrapper, self.wrapper.module
        loss = super().loss(batch, of_added)
        self.wrapper = wrapper
        return loss


@exhibit(
    "https://github.com/moojink/openvla-oft/issues/160",
    year=2026,
    trial="plain",
    phase="backward",
    says="of its own data alone: it is not reduced",
)
class HeadAroundTheWrapper(Sharded):
    """One layer, the action head, was called without its wrapper.

    So the gradients of that layer alone were not averaged over the ranks.
    """

    def params(self) -> list[nn.Parameter]:
        head = set(list(self.model.children())[-1].parameters())
        return [param for param in super().params() if param not in head]


@exhibit(
    "https://github.com/hao-ai-lab/FastVideo/pull/1666",
    "https://github.com/huggingface/transformers/pull/48873",
    year=2026,
    trial="group added",
    phase="backward",
    says="of its own data alone: it is not reduced",
)
class LateParameters(Sharded):
    """An adapter was added after wrapping, so its gradients were not averaged.

    Each rank trained an adapter of its own, and rank 0's was saved.
    """

    def params(self) -> list[nn.Parameter]:
        return list(self.model.parameters())


# ------------------------------------------------------------------------------- over the micro-batches


class Buffered(Sharded):
    """Right: gradients are added to a buffer after each micro-batch, and averaged after the last one."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.buffer: dict[nn.Parameter, torch.Tensor] = {}
        self.is_last = self.finished = True

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self.is_last = False
        yield
        self.is_last = True

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()
        if self.finished:
            self.buffer.clear()
        for param in self.params():
            if param.grad is not None:
                self.flush(param, param.grad)
            param.grad = None
        self.finished = self.is_last

    def flush(self, param: nn.Parameter, grad: torch.Tensor) -> None:
        """Add a gradient of a micro-batch to the buffer, or begin with it."""
        self.buffer[param] = self.buffer[param] + grad if param in self.buffer else grad

    def end_of_backward(self) -> None:
        for param, grad in self.buffer.items():
            param.grad = grad
        super().end_of_backward()


@exhibit(
    "https://github.com/NVIDIA/Megatron-LM/pull/7186",
    "https://github.com/allenai/open-instruct/pull/1498",
    year=2026,
    trial="accumulation",
    phase="backward",
    says="only the last micro-batch",
    mended=Buffered,
)
class LastMicroBatch(Buffered):
    """`no_sync` was inherited and did nothing. So every micro-batch counted as the last of a step, and the
    next micro-batch cleared the gradients in the buffer.
    """

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        yield


@exhibit(
    "https://github.com/ServiceNow/Fast-LLM/issues/550",
    year=2026,
    trial="accumulation",
    phase="backward",
    says="only the last micro-batch",
    mended=Buffered,
)
class SharedBuffer(Buffered):
    """Layers shared a gradient buffer, which was copied over the gradients so far and not added to them.

    Only the embedding had a buffer of its own, and accumulated rightly.
    """

    def flush(self, param: nn.Parameter, grad: torch.Tensor) -> None:
        if param is next(self.model.parameters()):
            super().flush(param, grad)
        else:
            self.buffer[param] = grad


@exhibit(
    "https://github.com/lodestone-rock/RamTorch/issues/13",
    year=2026,
    trial="accumulation",
    phase="backward",
    says="other weights",
)
class ReducedAgain(Sharded):
    """Gradients that had been summed over the ranks stayed in `.grad`, and were summed again after the next
    micro-batch.
    """

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()
        self.sum_gradients(self.params())

    def end_of_backward(self) -> None:
        self.divide_gradients(dist.get_world_size())


@exhibit(
    "https://github.com/unslothai/unsloth-zoo/pull/1023",
    year=2026,
    trial="accumulation",
    phase="backward",
    says="1 / the number of micro-batches squared",
)
class DividedAgain(Sharded):
    """The loss was divided by the number of micro-batches in two places, so gradients were too small by that
    factor.
    """

    micro_batches = 0

    def backward(self, loss: torch.Tensor) -> None:
        self.micro_batches += 1
        super().backward(loss)

    def end_of_backward(self) -> None:
        super().end_of_backward()
        for _ in ("in the loop", "and in the trainer"):
            self.divide_gradients(self.micro_batches)
        self.micro_batches = 0


# ------------------------------------------------------------------------------------------- clipping


@exhibit(
    "https://github.com/sgl-project/SpecForge/pull/663",
    year=2026,
    trial="clipping",
    phase="clip",
    says="scaled by different factors",
)
class LocalNorm(Sharded):
    """Each rank clipped its share of the gradients by the norm of that share. So the ranks scaled by
    different factors, and clipped too little.
    """

    def clip(self, max_norm: float) -> None:
        share = [param for param in self.params() if self.optimizer.is_mine(param)]
        nn.utils.clip_grad_norm_(share, max_norm)


@exhibit(
    "https://github.com/mindspore-ai/hyper-parallel/issues/526",
    "https://github.com/ByteDance-Seed/VeOmni/issues/184",
    year=2025,
    trial="clipping",
    phase="clip",
    says="times the right norm",
)
class CountedOnEveryRank(Sharded):
    """The squares of parameters that every rank has in full were added up over the ranks: the norm was too
    large.
    """

    def clip(self, max_norm: float) -> None:
        square = torch.zeros(())
        for param in self.params():
            replicated = param.ndim == 1
            if param.grad is not None and (replicated or self.optimizer.is_mine(param)):
                square += param.grad.float().square().sum()
        dist.all_reduce(square)
        self.divide_gradients(max(1.0, float(square.sqrt()) / max_norm))
