"""Wrong programs that the doctor was never told of: small changes of right ones, written before it was.

`KINDS` are those that an earlier doctor called healthy, `FURTHER` are of kinds that the museum lacks. Each
says where it departs: `trial`, `phase`, and `words` that the report has to have.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from library.planted import OPTIONS, Hooked
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from zero_ref.doctor.program import Program, averaged, whole
from zero_ref.doctor.trials import MAX_NORM

# --------------------------------------------------------------- the kinds that were called healthy


class NormWithout(Hooked):
    """The norm leaves something out, as one that was built of a list of layers does."""

    trial, phase = "clipping", "clip"

    def counted(self, params):
        raise NotImplementedError

    def clip(self, max_norm):
        params = self.everything()
        norm = torch.cat([grad.flatten().float() for grad in self.counted(params)]).norm()
        for param in params:
            param.grad.mul_((max_norm / norm).clamp(max=1.0).to(param.dtype))


class NormWithoutLastTensor(NormWithout):
    def counted(self, params):
        return [param.grad for param in params[:-1]]


class NormWithoutLastLayer(NormWithout):
    def counted(self, params):
        return [param.grad for param in params[:-2]]


class NormWithoutTail(NormWithout):
    """The flat buffer was cut to a multiple of four, and not padded."""

    def counted(self, params):
        flat = torch.cat([param.grad.flatten().float() for param in params])
        return [flat[: (len(flat) - 1) // 4 * 4]]


class NormOfLastMicroBatch(Hooked):
    trial, phase = "accumulation and clipping", "clip"
    last: dict[Any, torch.Tensor]

    def backward(self, loss):
        before = {param: param.grad.clone() for param in self.everything()}
        super().backward(loss)
        self.last = {p: p.grad - before[p] if p in before else p.grad.clone() for p in self.everything()}

    def clip(self, max_norm):
        for grad in self.last.values():
            dist.all_reduce(grad)
        norm = nn.utils.get_total_norm([grad / dist.get_world_size() for grad in self.last.values()])
        nn.utils.clip_grads_with_norm_(self.everything(), max_norm, norm)


class RateNotLoaded(Hooked):
    trial, phase = "scheduler and load", "step"

    def load(self, folder):
        rates = [group["lr"] for group in self.optimizer.param_groups]
        super().load(folder)
        for group, rate in zip(self.optimizer.param_groups, rates):
            group["lr"] = rate


class AddedGroupNotSaved(Hooked):
    """The file has the state of the model's parameters, and the added group begins anew."""

    trial, phase = "group and load", "step"

    def load(self, folder):
        super().load(folder)
        for param in self.added.parameters():
            self.optimizer.state.pop(param, None)


class GathersLate(Hooked):
    """Right: new values are sent while the program goes on, and are waited for where parameters are read."""

    def __init__(self, model):
        super().__init__(model)
        self.sent: list[Any] = []
        model.register_forward_pre_hook(lambda *_: self.arrive())

    def step(self):
        super().step()
        for number, param in enumerate(self.everything()):
            owner = number % dist.get_world_size()
            new = param.detach().clone() if dist.get_rank() == owner else torch.empty_like(param)
            self.sent.append((param, new, dist.broadcast(new, owner, async_op=True)))
            if dist.get_rank() != owner:
                with torch.no_grad():
                    param.copy_(self.before[param])

    def end_of_backward(self):
        super().end_of_backward()
        self.before = {param: param.detach().clone() for param in self.everything()}

    @torch.no_grad()
    def arrive(self):
        for param, new, work in self.sent:
            work.wait()
            param.copy_(new)
        self.sent = []

    def values(self):
        self.arrive()
        return super().values()


class AverageBeforeGather(GathersLate):
    trial, phase = "average of weights", "average"

    def average(self):
        named = [*self.model.named_parameters(), *self.named_added()]
        self.averages = averaged(self.averages, {n: whole(p) for n, p in named})
        return self.averages


class SaveBeforeGather(GathersLate):
    trial, phase = "save and load", "load"

    def save(self, folder):
        self.arrive, arrive = lambda: None, self.arrive
        super().save(folder)
        self.arrive = arrive


class OwnWrapper(nn.Module):
    """A wrapper of one's own that averages; the right one sends rank 0's values at the start."""

    sends = True

    def __init__(self, model):
        super().__init__()
        self.module = model
        if self.sends:
            for param in model.parameters():
                dist.broadcast(param.data, 0)

    def forward(self, *inputs):
        return self.module(*inputs)


class WrapperThatSendsNothing(OwnWrapper):
    sends = False


class Wrapped(Hooked):
    kind = OwnWrapper

    def __init__(self, model):
        super().__init__(model)
        self.wrapper = self.kind(model)


class NoStartBroadcast(Wrapped):
    trial, phase = "different starts", "start"
    kind = WrapperThatSendsNothing


class Hybrid(Hooked):
    """Right: pairs of ranks share the parameters out, and each pair has all of them."""

    def __init__(self, model):
        super().__init__(model)
        ranks, size = dist.get_world_size(), 2 if dist.get_world_size() % 2 == 0 else dist.get_world_size()
        groups = [dist.new_group(range(first, first + size)) for first in range(0, ranks, size)]
        self.pair, self.place = divmod(dist.get_rank(), size)
        self.group, self.size = groups[self.pair], size

    def owner(self, number):
        return number % self.size

    def step(self):
        before = [param.detach().clone() for param in self.everything()]
        params = self.everything()
        super().step()
        with torch.no_grad():
            for number, (param, value) in enumerate(zip(params, before)):
                if number % self.size != self.place:
                    param.copy_(value)
                dist.broadcast(param.data, group=self.group, group_src=self.owner(number))


class WrongOwnerInHybrid(Hybrid):
    trial, phase = "plain", "step"

    def owner(self, number):
        return (number + self.pair) % self.size


# ------------------------------------------------------------------------ batches of different sizes


def tokens(rank, number):
    """Two rows more on each further rank, with another number of padded places in every batch."""
    generator = torch.Generator().manual_seed(1000 * rank + number)
    rows = torch.randint(11, (2 + 2 * rank, 8), generator=generator)
    rows[:, 5 + (rank + number) % 3 :] = 11
    return rows


def token_loss(model, batch):
    return nn.functional.cross_entropy(
        model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten(), ignore_index=11
    )


class OfTokens(Hooked):
    """Right: each micro-batch counts by its number of tokens, of all ranks and micro-batches of the step."""

    weighted = True

    def __init__(self):
        torch.manual_seed(3)
        super().__init__(nn.Sequential(nn.Embedding(12, 6), nn.Linear(6, 12)))
        self.count = 0.0

    def loss(self, batch, of_added=None):
        self.tokens = float((batch[:, 1:] != 11).sum())
        return super().loss(batch, of_added)

    def backward(self, loss):
        self.count += self.tokens
        super().backward(loss * self.tokens if self.weighted else loss)

    def end_of_backward(self):
        super().end_of_backward()
        total = torch.tensor(self.count)
        dist.all_reduce(total)
        for param in self.everything() if self.weighted else ():
            param.grad *= dist.get_world_size() / total
        self.count = 0.0


class MeanOfMeans(OfTokens):
    trial, phase = "plain", "backward"
    weighted = False


def by_tokens():
    return OfTokens()


def mean_of_means():
    return MeanOfMeans()


OWN = {"batch": tokens, "loss": token_loss}

KINDS = (
    NormWithoutLastTensor, NormWithoutLastLayer, NormWithoutTail, NormOfLastMicroBatch, RateNotLoaded,
    AddedGroupNotSaved, AverageBeforeGather, SaveBeforeGather, NoStartBroadcast, WrongOwnerInHybrid,
    MeanOfMeans,
)  # fmt: skip

# --------------------------------------------------------------------- further kinds, fifteen of them


class ClippedBeforeUnscaling(Hooked):
    """The loss was multiplied by 1,024 and the gradients are divided by it after they are clipped."""

    trial, phase = "clipping", "clip"

    def backward(self, loss):
        super().backward(loss * 1024)

    def end_of_backward(self):
        super().end_of_backward()
        self.clipped = False

    def gradients(self):
        scale = 1 if self.clipped else 1024
        return {n: None if g is None else g / scale for n, g in super().gradients().items()}

    def clip(self, max_norm):
        super().clip(max_norm)
        self.unscale()

    def step(self):
        if not self.clipped:
            self.unscale()
        super().step()

    def unscale(self):
        self.clipped = True
        for param in self.everything():
            param.grad /= 1024


class OneTensorSummed(Hooked):
    trial, phase, words = "plain", "backward", "times the right gradient, which is the number of ranks"

    def end_of_backward(self):
        super().end_of_backward()
        self.model.get_submodule("third").weight.grad *= dist.get_world_size()


class SkipsAlone(Hooked):
    """Only the rank that has seen the NaN leaves the step out."""

    trial, phase = "NaN step", "step"

    def loss(self, batch, of_added=None):
        return super().loss(batch, of_added)

    def skips(self, is_nan):
        if is_nan:
            for param in self.everything():
                param.grad.nan_to_num_(0.0)
        return is_nan and dist.get_rank() == dist.get_world_size() - 1


class DecaysTwice(Hooked):
    trial, phase, words = "plain", "step", "value before the step"

    def step(self):
        with torch.no_grad():
            for param in self.everything():
                param.mul_(1 - OPTIONS["lr"] * OPTIONS["weight_decay"])
        super().step()


class CountsMicroBatches(Hooked):
    """The step count that corrects Adam's bias grows with every micro-batch."""

    trial, phase = "accumulation", "step"
    micro_batches = 0

    def backward(self, loss):
        super().backward(loss)
        self.micro_batches += 1

    def step(self):
        for state in self.optimizer.state.values():
            state["step"] += self.micro_batches - 1
        self.micro_batches = 0
        super().step()


class OneStepLate(Hooked):
    """The average that a step takes is that of the step before, which was reduced meanwhile."""

    trial, phase, words = "plain", "backward", "step before"
    late: dict[Any, torch.Tensor] = {}  # noqa: RUF012

    def end_of_backward(self):
        super().end_of_backward()
        now = {param: param.grad for param in self.everything()}
        for param in now:
            param.grad = self.late.get(param, now[param]).clone()
        self.late = now


class TailNotReduced(Hooked):
    """The bucket is cut to a multiple of the ranks before it is reduced."""

    trial, phase = "plain", "backward"

    def end_of_backward(self):
        params = self.everything()
        for param in params:
            flat = param.grad.view(-1)
            size = max(len(flat) - 1, 0) // dist.get_world_size() * dist.get_world_size()
            part = flat[:size].clone()
            dist.all_reduce(part)
            flat[:size] = part / dist.get_world_size()


class OwnersDisagree(Hooked):
    """Rank 0 sorts equally large parameters in another order, and so one of them has no owner."""

    trial, phase = "plain", "step"

    def step(self):
        params, before = self.everything(), [param.detach().clone() for param in self.everything()]
        super().step()
        sizes = [param.numel() for param in params]
        with torch.no_grad():
            for number, (param, value) in enumerate(zip(params, before)):
                twins = [place for place, size in enumerate(sizes) if size == sizes[number]]
                place = twins[-1 - twins.index(number)] if dist.get_rank() == 0 else number
                if place // 2 % dist.get_world_size() != dist.get_rank():
                    param.copy_(value)
                dist.broadcast(param.data, number // 2 % dist.get_world_size())


class FrozenStateNotSaved(Hooked):
    """The state of parameters that do not train at the time of the save is left out."""

    trial, phase = "frozen and load", "step"

    def load(self, folder):
        super().load(folder)
        for param in self.model.get_submodule("later").parameters():
            if not param.requires_grad:
                self.optimizer.state.pop(param, None)


class ScheduledOnRank0(Hooked):
    trial, phase = "scheduler", "step"

    def set_lr_factor(self, factor):
        super().set_lr_factor(factor if dist.get_rank() == 0 else 1.0)


class ClipsEachMicroBatch(Hooked):
    trial, phase = "clipping", "backward"

    def backward(self, loss):
        before = {param: param.grad for param in self.everything()}
        for param in before:
            param.grad = None
        super().backward(loss)
        nn.utils.clip_grad_norm_(self.everything(), MAX_NORM)
        for param, grad in before.items():
            param.grad = grad if param.grad is None else grad + param.grad

    def clip(self, max_norm):
        pass


class LargestOfRanks(Hooked):
    trial, phase = "plain", "backward"

    def end_of_backward(self):
        for param in self.everything():
            dist.all_reduce(param.grad, dist.ReduceOp.MAX)


class NeighboursPiece(Hooked):
    """A reduce-scatter whose pieces are gathered in another order: turned by one rank."""

    trial, phase = "plain", "backward"

    def end_of_backward(self):
        super().end_of_backward()
        grad = self.model.get_submodule("third").weight.grad.view(-1)
        size = len(grad) // dist.get_world_size()
        pieces = list(grad[: size * dist.get_world_size()].clone().split(size))
        grad[: size * dist.get_world_size()] = torch.cat([*pieces[1:], pieces[0]])


class AddedGroupNotScheduled(Hooked):
    trial, phase = "group and scheduler", "step"

    def set_lr_factor(self, factor):
        groups = self.optimizer.param_groups
        self.optimizer.param_groups = groups[:1]
        super().set_lr_factor(factor)
        self.optimizer.param_groups = groups


class LoadedAsTheFirst(Hooked):
    """Of two tensors of one shape the second is loaded with the state of the first."""

    trial, phase = "save and load", "step"

    def load(self, folder):
        super().load(folder)
        first: dict[Any, Any] = {}
        for param in self.model.parameters():
            state = self.optimizer.state.get(param)
            if state and param.shape in first:
                self.optimizer.state[param] = {name: one.clone() for name, one in first[param.shape].items()}
            elif state:
                first[param.shape] = state


class ClipsAlways(Hooked):
    """It also scales up gradients whose norm is below the limit."""

    trial, phase, words = "clipping", "clip", "and their norm is below the limit"

    def clip(self, max_norm):
        norm = nn.utils.get_total_norm([param.grad for param in self.everything()])
        for param in self.everything():
            param.grad.mul_(max_norm / norm)


class BuffersNotLoaded(Program):
    trial, phase, words = "buffers", "forward", "loss"

    def __init__(self, model):
        ddp = DistributedDataParallel(model, find_unused_parameters=True)
        super().__init__(torch.optim.AdamW(ddp.parameters(), **OPTIONS), model, ddp)

    def set_values(self, values, buffers):
        super().set_values(values, dict(self.model.named_buffers()))


BY_READERS = ClipsAlways, BuffersNotLoaded
"""Mistakes that readers wrote after the doctor was built, and that it called healthy."""

FURTHER = (
    ClippedBeforeUnscaling, OneTensorSummed, SkipsAlone, DecaysTwice, CountsMicroBatches, OneStepLate,
    TailNotReduced, OwnersDisagree, FrozenStateNotSaved, ScheduledOnRank0, ClipsEachMicroBatch,
    LargestOfRanks, NeighboursPiece, AddedGroupNotScheduled, LoadedAsTheFirst,
)  # fmt: skip
