"""Training jobs for the tests of `watch`: a right loop in which everything happens, and wrong ones.

A job is a class whose methods are the parts of its loop; a wrong one overrides one of them. `says` is what
the watch has to find; None: every rank is wrong alike before the step, which the watch does not see.
"""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zero_ref.doctor.watch import watch

SAVED, STEPS, ADDED = 4, 7, 2


class Owners(torch.optim.Optimizer):
    """A small sharded optimizer: whole parameters have owners, which step them and broadcast."""

    def __init__(self, params: Any, optimizer_class: Any, **options: Any) -> None:
        self.optim: Any = None
        self.optimizer_class, self.count = optimizer_class, 0
        super().__init__(params, options)

    def add_param_group(self, group: Any) -> None:
        super().add_param_group(group)
        mine = {**self.param_groups[-1], "params": []}
        for param in self.param_groups[-1]["params"]:
            if self.count % dist.get_world_size() == dist.get_rank():
                mine["params"].append(param)
            self.count += 1
        if self.optim is None:
            self.optim = self.optimizer_class([mine])
        else:
            self.optim.add_param_group(mine)

    def step(self) -> None:
        self.pass_on()
        self.optim.step()
        self.send()

    def pass_on(self) -> None:
        for mine, group in zip(self.optim.param_groups, self.param_groups):
            mine.update({key: value for key, value in group.items() if key != "params"})

    def send(self) -> None:
        params = [param for group in self.param_groups for param in group["params"]]
        for number, param in enumerate(params):
            dist.broadcast(param.data, number % dist.get_world_size())

    def state_dict(self) -> Any:
        return {"inner": copy.deepcopy(self.optim.state_dict()), "groups": self.bare()}

    def bare(self) -> list[dict[str, Any]]:
        return [{k: v for k, v in group.items() if k != "params"} for group in self.param_groups]

    def load_state_dict(self, saved: Any) -> None:
        self.optim.load_state_dict(saved["inner"])
        for group, options in zip(self.param_groups, saved["groups"]):
            group.update(options)


class Job:
    """A right loop: accumulation, clipping, a schedule, a group that is added, and a save that is loaded."""

    says: str | None = None
    sharded: Any = Owners
    inner: Any = torch.optim.AdamW

    def run(self) -> list[str]:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        folder = [tempfile.mkdtemp() if self.rank == 0 else None]
        dist.broadcast_object_list(folder, 0)
        self.record = Path(str(folder[0]))
        self.make()
        findings = self.train(0, SAVED)
        saved = self.optimizer.state_dict(), copy.deepcopy(self.model.state_dict()), self.extra.state_dict()
        dist.barrier()  # until rank 0 has noted the save
        self.watch.stop()
        self.make(again=True)
        self.load(*saved)
        findings += self.train(SAVED, STEPS)
        self.watch.stop()
        return [str(one) for one in findings]

    def make(self, again: bool = False) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        self.extra = nn.Linear(3, 3)
        self.start()
        self.optimizer = self.optimizer_of(self.model)
        self.watch = watch(self.optimizer, model=self.model, record=self.record, wait=30)
        if again:
            self.add()

    def start(self) -> None:
        pass

    def optimizer_of(self, model: nn.Module) -> Any:
        return self.sharded(model.parameters(), self.inner, lr=0.05, weight_decay=0.1)

    def load(self, state: Any, values: Any, extra: Any) -> None:
        self.model.load_state_dict(values)
        self.extra.load_state_dict(extra)
        self.optimizer.load_state_dict(state)

    def add(self) -> None:
        self.optimizer.add_param_group(
            {"params": list(self.extra.parameters()), "lr": 0.2, "weight_decay": 0.0}
        )

    def params(self) -> list[nn.Parameter]:
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    def train(self, first: int, last: int) -> list[Any]:
        for self.number in range(first, last):
            if self.number == ADDED:
                self.add()
            for group in self.optimizer.param_groups:
                group["lr"] *= 0.9
            for param in self.params():
                param.grad = None
            for micro in range(2):
                self.backward(micro)
            self.average()
            self.clip()
            self.step()
        return self.watch.findings

    def backward(self, micro: int) -> None:
        torch.manual_seed(100 * self.number + 10 * micro + self.rank)
        outputs = self.model(torch.randn(6, 5))
        if self.number >= ADDED:
            outputs = self.extra(outputs)
        ((outputs - torch.randn(6, 3)).square().mean() / 2).backward()

    def average(self) -> None:
        for param in self.params():
            dist.all_reduce(param.grad)
            param.grad /= self.ranks

    def clip(self) -> None:
        nn.utils.clip_grad_norm_(self.params(), 0.5)

    def step(self) -> None:
        self.optimizer.step()


class NotAveraged(Job):
    says = r"step 0, before step: gradient \d \(.*\) differs between ranks: element \d+ is .* on rank 1"

    def average(self) -> None:
        pass


class OneTensorNotAveraged(Job):
    says = r"step 0, before step: gradient 3 \(2.bias\) differs between ranks"

    def average(self) -> None:
        kept = self.params()[3].grad.clone()
        super().average()
        self.params()[3].grad = kept


class Summed(Job):
    def average(self) -> None:
        super().average()
        for param in self.params():
            param.grad *= self.ranks


class LastMicroBatch(Job):
    def backward(self, micro: int) -> None:
        for param in self.params():
            param.grad = None
        super().backward(micro)


class ClippedBeforeAveraging(Job):
    def average(self) -> None:
        super().clip()
        super().average()

    def clip(self) -> None:
        pass


class NormWithoutTheLast(Job):
    def clip(self) -> None:
        total = nn.utils.get_total_norm([param.grad for param in self.params()[:-1]])
        nn.utils.clip_grads_with_norm_(self.params(), 0.5, total)


class ClippedByLocalNorm(Job):
    says = r"step 0, before step: gradient \d \(.*\) differs between ranks"

    def clip(self) -> None:
        nn.utils.clip_grad_norm_(self.params()[self.rank :: self.ranks], 0.5)


class StartsDiffer(Job):
    says = r"step 0, before step: parameter 0 \(0.weight\) differs between ranks"

    def start(self) -> None:
        if self.rank:
            nn.init.normal_(self.model[0].weight)


class RatesDiffer(Job):
    says = r"step 0, before step: group option lr is 0.09\d* on rank 1 and 0.045\d* on rank 0, in group 0"

    def optimizer_of(self, model: nn.Module) -> Any:
        made = super().optimizer_of(model)
        made.param_groups[0]["lr"] *= 1 + self.rank
        return made


class BroadcastIsLost(Owners):
    def send(self) -> None:
        weight = self.param_groups[0]["params"][2]
        kept = weight.detach().clone()
        super().send()
        if dist.get_rank() == 1:
            weight.data.copy_(kept)


class BroadcastLost(Job):
    says, sharded = (
        r"step 0, step: parameter 2 \(2.weight\) moved 0.000 times as far .* on the ranks \[1\]",
        BroadcastIsLost,
    )


class SteppedTwice(Owners):
    def send(self) -> None:
        self.optim.step()
        super().send()


class StepsTwice(Job):
    says, sharded = (
        r"step 0, step: parameter 0 \(0.weight\) moved [12]\.\d+ times as far .* on the ranks \[0, 1\]",
        SteppedTwice,
    )


class TailNeverUpdated(Owners):
    def send(self) -> None:
        weight = self.param_groups[0]["params"][2]
        super().send()
        weight.data.view(-1)[-3:] = self.kept

    def step(self) -> None:
        self.kept = self.param_groups[0]["params"][2].detach().view(-1)[-3:].clone()
        super().step()


class TailStays(Job):
    says, sharded = (
        r"step 0, step: parameter 2 \(2.weight\) moved .* element (18|19|20) is .*, 3 of 21 elements",
        TailNeverUpdated,
    )


class Lossy(Owners):
    """It passes on all options but one."""

    lost = "lr"

    def pass_on(self) -> None:
        kept = [group[self.lost] for group in self.optim.param_groups]
        super().pass_on()
        for group, value in zip(self.optim.param_groups, kept):
            group[self.lost] = value


class SchedulerLost(Job):
    says, sharded = r"step 0, step: parameter 0 \(0.weight\) moved 1\.111 times as far", Lossy


class DecayLost(Job):
    says = r"step 0, step: parameter \d .* moved .* times as far as the plain step"

    def optimizer_of(self, model: nn.Module) -> Any:
        def inner(groups: Any) -> Any:
            return torch.optim.AdamW([{**group, "weight_decay": 0.0} for group in groups])

        made = Lossy(model.parameters(), inner, lr=0.05, weight_decay=0.1)
        made.lost = "weight_decay"
        return made


class AnotherClass(Job):
    says = r"step 0, step: parameter 0 .* moved 0\.\d+ times as far"

    def make(self, again: bool = False) -> None:
        super().make(again)
        self.watch.plain = torch.optim.AdamW

    def optimizer_of(self, model: nn.Module) -> Any:
        return Owners(model.parameters(), torch.optim.SGD, lr=0.05, weight_decay=0.1)


class AddedGroupStays(Owners):
    def add_param_group(self, group: Any) -> None:
        torch.optim.Optimizer.add_param_group(self, group) if self.optim else super().add_param_group(group)


class AddedStays(Job):
    says, sharded = r"step 2, step: parameter 4 moved 0.000 times as far", AddedGroupStays


class RoundedWhenSent(Owners):
    def send(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.data.copy_(param.data.bfloat16())
        super().send()


class Rounds(Job):
    says, sharded = r"step 0, step: parameter 0 \(0.weight\) moved", RoundedWhenSent


class MomentsReset(Job):
    says = r"step 4, load: state exp_avg of parameter 0 .* is not back on rank 0: its norm is 0 and was"

    def load(self, state: Any, values: Any, extra: Any) -> None:
        super().load(state, values, extra)
        for of_param in self.optimizer.optim.state.values():
            of_param["exp_avg"].zero_()


class CountReset(Job):
    says = r"step 4, load: state step of parameter 0 .* is not back on rank 0: its norm is 0 and was 4"

    def load(self, state: Any, values: Any, extra: Any) -> None:
        super().load(state, values, extra)
        for of_param in self.optimizer.optim.state.values():
            of_param["step"].zero_()


class RateNotRestored(Job):
    says = r"step 4, load: group option lr is 0.05 on rank 0 and 0.0328\d* when it was saved, in group 0"

    def load(self, state: Any, values: Any, extra: Any) -> None:
        super().load(state | {"groups": []}, values, extra)


class OneTensorNotRestored(Job):
    says = r"step 4, load: parameter 3 \(2.bias\) is not back on rank 0: its norm is .*; of 12 tensors, 2 are"

    def load(self, state: Any, values: Any, extra: Any) -> None:
        super().load(state, {**values, "2.bias": self.model[2].bias.data.clone()}, extra)


WRONG = [
    *(NotAveraged, OneTensorNotAveraged, Summed, LastMicroBatch, ClippedBeforeAveraging, NormWithoutTheLast),
    *(ClippedByLocalNorm, StartsDiffer, RatesDiffer, BroadcastLost, StepsTwice, TailStays, SchedulerLost),
    *(DecayLost, AnotherClass, AddedStays, Rounds, MomentsReset, CountReset, RateNotRestored),
    OneTensorNotRestored,
]
