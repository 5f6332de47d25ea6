"""A step that a hook of the program's own makes during backward, as with an optimizer for each parameter.

`stairs/owners.py` is stepped after backward. A hook by `register_post_accumulate_grad_hook` runs as soon as
this rank has a gradient. DistributedDataParallel and ShardedDataParallel reduce the gradient only afterwards,
so the step would use another gradient on each rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zero_ref.comm.agreement import Fact
from zero_ref.shard.built import Built
from zero_ref.shard.digests import digests
from zero_ref.shard.gradients import WHOLE, Gradients

HOOK = (
    "step() was called during backward, as in a hook by register_post_accumulate_grad_hook: such a hook runs "
    "before DistributedDataParallel or ShardedDataParallel has reduced the gradient. Call step() after "
    "backward(). To update during backward, construct one optimizer with overlap_with_ddp=True and use "
    "hook_with_zero_step; without a wrapper, average the gradient in the hook, by all_reduce, before step()."
)


def in_backward() -> bool:
    """Return whether autograd runs a backward in this thread."""
    return torch._C._current_graph_task_id() != -1


def check_not_being_reduced(gradients: Gradients, rank: int) -> None:
    """Refuse a step during a backward that reduces gradients by itself.

    Raises:
        RuntimeError: names the hook.
    """
    if gradients is not WHOLE:
        raise RuntimeError(f"rank {rank}: {HOOK}")


def facts_of_gradients(built: Built) -> Sequence[str]:
    """The facts that all ranks have the same gradients, which nothing has averaged yet during backward."""
    grads = [param.grad for param in built.params]
    is_read = [grad is not None and grad.layout == torch.strided for grad in grads]
    found = iter(digests(grad for grad, read in zip(grads, is_read) if read and grad is not None))
    return [
        Fact(f"gradient of parameter {built.name(number)}: {next(found) if read else grad is not None}", HOOK)
        for number, (grad, read) in enumerate(zip(grads, is_read))
    ]
