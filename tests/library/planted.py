"""Training programs with a mistake in each, for the doctor's tests: factories, and what has to be said."""

import copy
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.nn.parallel import DistributedDataParallel as DDP

from zero_ref import ZeroRedundancyOptimizer, doctor
from zero_ref.doctor.trials import MAX_NORM

LR, DECAY, EPS = 0.05, 0.125, 2.0**-20
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

    def __init__(self, model):
        super().__init__(torch.optim.AdamW(model.parameters(), **self.options), model, averaged_by="doctor")

    def everything(self):
        return [
            param for param in [*self.model.parameters(), *self.added.parameters()] if param.grad is not None
        ]

    def refuses(self, trial):
        return "no buffers are sent" if trial == "buffers" else None


class Summed(Hooked):
    says = "summed over the ranks, and not averaged"

    def end_of_backward(self):
        super().end_of_backward()
        for param in self.everything():
            param.grad *= dist.get_world_size()


class AveragedTwice(Hooked):
    says = "averaged twice"

    def end_of_backward(self):
        super().end_of_backward()
        for param in self.everything():
            param.grad /= dist.get_world_size()


class Local(Hooked):
    says = "those of its own data alone"

    def end_of_backward(self):
        pass


class RankZeros(Hooked):
    says = "the gradients of rank 0 alone"

    def end_of_backward(self):
        for param in self.everything():
            dist.broadcast(param.grad, 0)


class LastMicroBatch(Hooked):
    says = "only the last micro-batch"
    trials = ("accumulation",)

    def backward(self, loss):
        for param in self.everything():
            param.grad = None
        super().backward(loss)


class FirstStaysLocal(Hooked):
    says = "only the last micro-batch is reduced"
    trials = ("accumulation",)
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


class LocalNorm(Hooked):
    says = "local norm"
    trials = ("clipping",)

    def clip(self, max_norm):
        params = self.everything()
        for rank in range(dist.get_world_size()):
            torch.nn.utils.clip_grad_norm_(params[rank :: dist.get_world_size()], max_norm)


class NoClip(Hooked):
    says = "not clipped"
    trials = ("clipping",)

    def clip(self, max_norm):
        pass


class ClipBeforeAverage(Hooked):
    says = "each rank clips its own gradients, before they are averaged"
    trials = ("clipping",)

    def end_of_backward(self):
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        super().end_of_backward()

    def clip(self, max_norm):
        pass


class BroadcastLost(Hooked):
    says = "stale values on rank 1"

    def step(self):
        weight = self.model.get_submodule("second").weight
        before = weight.detach().clone()
        super().step()
        if dist.get_rank() == 1:
            with torch.no_grad():
                weight.copy_(before)


class TailNeverUpdated(Hooked):
    says = "no rank has updated elements 42 to 44 of second.weight"

    def step(self):
        weight = self.model.get_submodule("second").weight
        before = weight.detach().clone()
        super().step()
        with torch.no_grad():
            weight.view(-1)[-3:] = before.view(-1)[-3:]


class GroupStale(Hooked):
    says = "the group that was added is stale"
    trials = ("group added",)

    def step(self):
        before = [param.detach().clone() for param in self.added.parameters()]
        super().step()
        with torch.no_grad():
            for param, value in zip(self.added.parameters(), before):
                param.copy_(value)


class GroupOptionsLost(Hooked):
    says = "of the group that was added"
    trials = ("group added",)

    def add_group(self, layer, **options):
        super().add_group(layer)


class DecayLost(Hooked):
    says = "weight_decay is not passed on"
    options = {"lr": LR}  # noqa: RUF012


class RateLost(Hooked):
    says = "lr is not passed on"
    options = {"weight_decay": DECAY}  # noqa: RUF012


class SilentlySGD(Hooked):
    says = "SGD steps in place of AdamW"

    def __init__(self, model):
        super().__init__(model)
        self.optimizer = torch.optim.SGD(model.parameters(), **OPTIONS)


class SilentlyAdam(SilentlySGD):
    says = "Adam steps in place of AdamW"

    def __init__(self, model):
        super().__init__(model)
        self.optimizer = torch.optim.Adam(model.parameters(), **OPTIONS)


class MomentsReset(Hooked):
    says = "its moments, is reset by loading"
    trials = ("save and load", "another world size")

    def load(self, folder):
        super().load(folder)
        self.optimizer.state.clear()


class CountReset(Hooked):
    says = "step count is reset by loading"
    trials = ("save and load", "another world size")

    def load(self, folder):
        super().load(folder)
        for state in self.optimizer.state.values():
            state["step"].zero_()


class ValuesNotLoaded(Hooked):
    says = "parameters are not loaded"
    trials = ("save and load", "another world size")

    def set_values(self, values, buffers):
        pass


class NotZeroed(Hooked):
    says = "not zeroed"

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


class FrozenMoves(Hooked):
    says = "as if its gradient were 0"
    trials = ("frozen layer", "unused parameters")

    def end_of_backward(self):
        super().end_of_backward()
        for param in self.model.parameters():
            if param.grad is None:
                param.grad = torch.zeros_like(param)


class FrozenTrains(Hooked):
    says = "the frozen layer is trained on"
    trials = ("frozen layer",)

    def freeze(self, layer, frozen):
        pass


class DividedByUsers(Hooked):
    says = "divided by the number of ranks that used the parameter"
    trials = ("unused on a rank",)

    def end_of_backward(self):
        users = {}
        for param in self.model.parameters():
            count = torch.tensor(float(param.grad is not None))
            dist.all_reduce(count)
            users[param] = count.item()
        super().end_of_backward()
        for param in self.everything():
            param.grad *= dist.get_world_size() / users[param]


class TiedOnce(Hooked):
    says = "the gradient of tied weights counts twice"
    trials = ("tied weights",)

    def end_of_backward(self):
        super().end_of_backward()
        if hasattr(self.model, "head"):
            self.model.head.weight.grad *= 2


class SchedulerLost(Hooked):
    says = "does not reach the update"
    trials = ("scheduler",)

    def set_lr_factor(self, factor):
        self.unused = copy.deepcopy(self.optimizer.param_groups)


class SchedulerLate(Hooked):
    says = "reaches the update a step late"
    trials = ("scheduler",)
    factor = 1.0

    def set_lr_factor(self, factor):
        super().set_lr_factor(self.factor)
        self.factor = factor


class ExceptionCounts(Hooked):
    says = "ended with an exception counts"
    trials = ("exception",)

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


class RoundedWhenSent(Hooked):
    says = "rounded to bfloat16"

    def step(self):
        super().step()
        with torch.no_grad():
            for param in [*self.model.parameters(), *self.added.parameters()]:
                param.copy_(param.bfloat16())


class TwiceStepped(Hooked):
    says = "made twice in a step"

    def step(self):
        super().step()
        super().step()


PLANTED = [kind for kind in Hooked.__subclasses__() if hasattr(kind, "says")] + [SilentlyAdam]


def ddp_buffers_apart(model):
    ddp = DDP(model, find_unused_parameters=True, broadcast_buffers=False)
    return adamw(ddp), ddp


def zero(model):
    ddp = DDP(model, find_unused_parameters=True)
    return ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, **OPTIONS), ddp
