"""Training programs with a mistake in each, for the doctor's tests, and where each has to depart.

Those in `PLANTED` say so by `trial` and `phase`; `words`, if there are any, have to be in the report.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.nn.parallel import DistributedDataParallel as DDP

from zero_ref import doctor

LR, DECAY = 0.05, 0.125
OPTIONS = {"lr": LR, "weight_decay": DECAY}


def adamw(model, **options):
    return torch.optim.AdamW(model.parameters(), **OPTIONS | options)


def plain_ddp(model):
    ddp = DDP(model, find_unused_parameters=True)
    return adamw(ddp), ddp


def give_up_soon():
    """From here on a collective that not all ranks call ends after half a second. All ranks call this."""
    dist.barrier()
    _set_pg_timeout(timedelta(seconds=0.5), dist.group.WORLD)


class Hooked(doctor.Program):
    """Right but for what a subclass changes: gradients are averaged in `end_of_backward`."""

    options = OPTIONS
    words = ""

    def __init__(self, model):
        super().__init__(torch.optim.AdamW(model.parameters(), **self.options), model, averaged_by="doctor")

    def everything(self):
        return [
            param for param in [*self.model.parameters(), *self.added.parameters()] if param.grad is not None
        ]

    def refuses(self, trial):
        return super().refuses(trial) or ("no buffers are sent" if trial == "buffers" else None)


class RankZeros(Hooked):
    trial, phase, words = "plain", "backward", "the gradient of rank 0 alone"

    def end_of_backward(self):
        for param in self.everything():
            dist.broadcast(param.grad, 0)


class FirstStaysLocal(Hooked):
    trial, phase, words = "accumulation", "backward", "ranks have different gradients"
    kept = None

    def backward(self, loss):
        self.kept = {param: param.grad.clone() for param in self.everything()}
        super().backward(loss)

    def end_of_backward(self):
        for param, grad in self.kept.items():
            param.grad -= grad
        super().end_of_backward()
        for param, grad in self.kept.items():
            param.grad += grad

    def zero_grad(self, set_to_none=True):
        super().zero_grad(set_to_none)
        self.kept = {}


class NoClip(Hooked):
    trial, phase, words = "clipping", "clip", "not scaled"

    def clip(self, max_norm):
        pass


class BroadcastLost(Hooked):
    trial, phase, words = "plain", "step", "they did not move"

    def step(self):
        weight = self.model.get_submodule("second").weight
        before = weight.detach().clone()
        super().step()
        if dist.get_rank() == 1:
            with torch.no_grad():
                weight.copy_(before)


class TailNeverUpdated(Hooked):
    trial, phase, words = "plain", "step", "they did not move"

    def step(self):
        weight = self.model.get_submodule("second").weight
        before = weight.detach().clone()
        super().step()
        with torch.no_grad():
            weight.view(-1)[-3:] = before.view(-1)[-3:]


class NotZeroed(Hooked):
    trial, phase = "plain", "backward"

    def zero_grad(self, set_to_none=True):
        pass

    def end_of_backward(self):
        before = getattr(self, "before", {})
        now = {param: param.grad.clone() for param in self.everything()}
        for param in self.everything():
            if param in before:
                param.grad -= before[param]
        super().end_of_backward()
        for param, grad in before.items():
            param.grad = grad.clone() if param.grad is None else param.grad + grad
        del now
        self.before = {param: param.grad.clone() for param in self.everything()}


class DividedByUsers(Hooked):
    trial, phase, words = "unused on a rank", "backward", "times the right gradient"

    def end_of_backward(self):
        users = {}
        for param in self.model.parameters():
            count = torch.tensor(float(param.grad is not None))
            dist.all_reduce(count)
            users[param] = count.item()
        super().end_of_backward()
        for param in self.everything():
            param.grad *= dist.get_world_size() / users[param]


class SchedulerLate(Hooked):
    trial, phase, words = "scheduler", "step", "has lr="
    factor = 1.0

    def set_lr_factor(self, factor):
        super().set_lr_factor(self.factor)
        self.factor = factor


class ExceptionCounts(Hooked):
    trial, phase = "exception", "backward"

    def loss(self, batch, of_added=None):
        before, self.last = getattr(self, "last", None), super().loss(batch, of_added)
        self.interrupted = before if before is not None and not self.went else None
        self.went = False
        return self.last

    def backward(self, loss):
        self.went = True
        super().backward(loss)
        if self.interrupted is not None:
            self.interrupted.backward()


PLANTED = tuple(kind for kind in Hooked.__subclasses__() if hasattr(kind, "trial"))
