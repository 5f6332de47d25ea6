"""`watch` on running jobs: no remark on right ones, and what is wrong, where and by how much."""

from __future__ import annotations

import os
import re
import tempfile
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from library.watched_jobs import WRONG, Job
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from zero_ref import ShardedDataParallel, ZeroRedundancyOptimizer, reduce_to_owners
from zero_ref.doctor import Program
from zero_ref.doctor.adapters import FSDP2
from zero_ref.doctor.watch import VARIABLE, watch
from zero_ref.lab import ranks

pytestmark = pytest.mark.ranks
ADAMW = torch.optim.AdamW


def run(kind: type[Job]) -> list[str]:
    return kind().run()


def findings(kind: type[Job], number: int = 2) -> list[str]:
    of_ranks = ranks.run(run, number, kind, timeout=120)
    assert all(one == of_ranks[0] for one in of_ranks), "ranks have other findings"
    return of_ranks[0]


@pytest.mark.parametrize("number", [1, 2, 3])
def test_nothing_is_said_of_a_right_job(number: int) -> None:
    assert findings(Job, number) == []


@pytest.mark.parametrize("kind", WRONG, ids=lambda kind: kind.__name__)
def test_what_is_wrong_in_a_job_is_said(kind: type[Job]) -> None:
    found = findings(kind)
    if kind.says is None:
        assert found == []
    else:
        assert re.search(kind.says, found[0]), found


def test_of_21_wrong_jobs_17_are_seen() -> None:
    assert (len(WRONG), sum(kind.says is not None for kind in WRONG)) == (21, 17)


def model_and_data() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    return model, torch.randn(4, 6, 5, generator=torch.Generator().manual_seed(dist.get_rank()))


def plain_ddp(model: nn.Module) -> tuple[Any, Any]:
    ddp = DDP(model)
    return torch.optim.AdamW(ddp.parameters(), lr=0.05), ddp


def ours(partition: str, **options: Any) -> Any:
    def make(model: nn.Module) -> tuple[Any, Any]:
        ddp = DDP(model)
        return ZeroRedundancyOptimizer(ddp.parameters(), ADAMW, partition=partition, lr=0.05, **options), ddp

    return make


def reduced_to_owners(model: nn.Module) -> tuple[Any, Any]:
    optimizer, ddp = ours("even")(model)
    ddp.register_comm_hook(None, reduce_to_owners(optimizer))
    return optimizer, ddp


def our_wrapper(model: nn.Module) -> tuple[Any, Any]:
    optimizer = ZeroRedundancyOptimizer(model.parameters(), ADAMW, partition="equal_shares", lr=0.05)
    return optimizer, ShardedDataParallel(model, optimizer, gather_in_forward=True)


def torchs(model: nn.Module) -> tuple[Any, Any]:
    from torch.distributed.optim import ZeroRedundancyOptimizer as Torchs

    ddp = DDP(model)
    return Torchs(ddp.parameters(), ADAMW, lr=0.05), ddp


def fsdp2(model: nn.Module) -> tuple[Any, Any]:
    from torch.distributed.fsdp import fully_shard

    fully_shard(model)
    return torch.optim.AdamW(model.parameters(), lr=0.05), model


OWNERS = {
    "a plain optimizer under DDP": plain_ddp,
    "ours, whole parameters": ours("sorted_greedy"),
    "ours, slices": ours("even"),
    "ours, gradients on owners": reduced_to_owners,
    "our wrapper": our_wrapper,
    "torch's": torchs,
    "FSDP2": fsdp2,
}


def trained(optimizer: Any, wrapper: Any, data: torch.Tensor, gamma: float | None = 0.9) -> None:
    # torch's functions load no group that a scheduler has written into.
    scheduler = None if gamma is None else torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma)
    for inputs in data:
        optimizer.zero_grad()
        wrapper(inputs).square().mean().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def watched(make: Any, spoils: bool = False, loads: str = "", records: bool = False) -> list[str]:
    model, data = model_and_data()
    optimizer, wrapper = make(model)
    record = None
    if loads:
        folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
        dist.broadcast_object_list(folder, 0)
        record = Path(folder[0], "notes") if records else None
        kind = FSDP2 if hasattr(model, "set_requires_gradient_sync") else Program
        with watch(optimizer, model=model, record=record):
            trained(optimizer, wrapper, data, gamma=None)
            kind(optimizer, model, wrapper).save(Path(folder[0]))
        dist.barrier()
        model, _ = model_and_data()
        optimizer, wrapper = make(model)
    if loads == "before":
        kind(optimizer, model, wrapper).load(Path(folder[0]))
    if spoils:
        step = optimizer.step

        def step_too_far(self: Any, closure: Any = None) -> None:
            step()
            param = next(model.parameters())
            with torch.no_grad():
                getattr(param, "_local_tensor", param).mul_(1.5)

        optimizer.step = types.MethodType(step_too_far, optimizer)
    seen = watch(optimizer, model=model, record=record)
    if loads == "after":
        kind(optimizer, model, wrapper).load(Path(folder[0]))
    trained(optimizer, wrapper, data)
    return [str(one) for one in seen.findings]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OWNERS)
def test_owners_that_hold_parts_are_followed(name: str) -> None:
    assert ranks.run(watched, 2, OWNERS[name], timeout=120) == [[], []]
    (first, *_), _ = ranks.run(watched, 2, OWNERS[name], True, timeout=120)
    assert re.match(r"step 0, step: parameter 0 \(0.weight\) moved .* on the ranks \[0", first)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("records", [False, True])
@pytest.mark.parametrize("loads", ["before", "after"])
@pytest.mark.parametrize("name", OWNERS)
def test_a_job_that_has_loaded_is_followed(name: str, loads: str, records: bool) -> None:
    assert ranks.run(watched, 2, OWNERS[name], False, loads, records, timeout=120) == [[], []]


class Hides(torch.optim.Optimizer):
    """It keeps the optimizer that has the state where nobody looks for it."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, options)
        self.kept = torch.optim.AdamW(self.param_groups)

    def step(self) -> None:
        self.kept.step()

    def state_dict(self) -> Any:
        return self.kept.state_dict()

    def load_state_dict(self, saved: Any) -> None:
        self.kept.load_state_dict(saved)


def loads_what_cannot_be_seen() -> list[str]:
    model, data = model_and_data()
    optimizer = Hides(model.parameters(), lr=0.05)
    ddp = DDP(model)
    trained(optimizer, ddp, data)
    saved = optimizer.state_dict()
    seen = watch(optimizer, ADAMW, model=model)
    optimizer.load_state_dict(saved)
    trained(optimizer, ddp, data)
    return [str(one) for one in seen.findings]


def test_where_loaded_state_cannot_be_seen_the_shadow_is_given_up(capfd: pytest.CaptureFixture[str]) -> None:
    assert ranks.run(loads_what_cannot_be_seen, 2, timeout=120) == [[], []]
    assert "the optimizer's state cannot be seen, so no step is compared" in capfd.readouterr().err


class Masters(torch.optim.AdamW):
    """Steps 32-bit copies of 16-bit parameters, as programs in mixed precision do."""

    rounds = False

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.own = self.param_groups[0]["params"]
        self.copies = [nn.Parameter(param.detach().to(torch.float32, copy=True)) for param in self.own]
        self.inner = torch.optim.AdamW(self.copies, **options)

    def step(self) -> None:
        for param, copy in zip(self.own, self.copies):
            if self.rounds:  # wrong: what rounding took is lost in each step
                copy.data.copy_(param.data)
            copy.grad = None if param.grad is None else param.grad.float()
        self.inner.step()
        for param, copy in zip(self.own, self.copies):
            param.data.copy_(copy.data)


def in_16_bits(make: Any, masters: bool) -> list[str]:
    model, data = model_and_data()
    model[0].to(torch.bfloat16)  # the other layer keeps its 32 bits
    optimizer = make(model.parameters())
    seen = watch(optimizer, ADAMW, model=model, masters=masters)
    for _ in range(20):
        for inputs in data:
            hidden = model[1](model[0](inputs.to(torch.bfloat16))).float()
            model[2](hidden).square().mean().backward()
            for param in model.parameters():
                dist.all_reduce(param.grad, dist.ReduceOp.AVG)
            optimizer.step()
            optimizer.zero_grad()
    return [str(one) for one in seen.findings]


def own_masters(params: Any) -> Any:
    return Masters(params, lr=1e-3)


def rounded_masters(params: Any) -> Any:
    optimizer = own_masters(params)
    optimizer.rounds = True
    return optimizer


def our_masters(params: Any) -> Any:
    return ZeroRedundancyOptimizer(params, ADAMW, lr=1e-3, partition="even", master_dtype=torch.float32)


def test_masters_of_16_bit_parameters_are_followed() -> None:
    assert ranks.run(in_16_bits, 2, own_masters, True, timeout=120) == [[], []]
    assert ranks.run(in_16_bits, 2, our_masters, False, timeout=120) == [[], []]
    (first, *_), _ = ranks.run(in_16_bits, 2, rounded_masters, True, timeout=120)
    assert re.match(r"step \d+, step: parameter 0 \(0.weight\) moved", first)


class Sparse(nn.Module):
    """An embedding with sparse gradients, and a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table = nn.Embedding(9, 4, sparse=True)
        self.empty, self.last = nn.Parameter(torch.zeros(0)), nn.Linear(4, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.last(self.table(tokens)).square().mean() + self.empty.sum()


def reduced(model: nn.Module) -> None:
    for param in model.parameters():
        grad = param.grad.to_dense() if param.grad.is_sparse else param.grad
        dist.all_reduce(grad)
        param.grad = (grad / 2).to_sparse(1) if param.grad.is_sparse else grad / 2


def is_odd(spoils: bool) -> list[str]:
    model = Sparse()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = watch(optimizer, model=model)
    for number in range(4):
        model.zero_grad()
        model(torch.arange(3) + number + dist.get_rank()).backward()
        reduced(model)
        if spoils and number == 2 and dist.get_rank() == 1:
            model.last.weight.grad[0, 1] = torch.nan
        optimizer.step()
    return [str(one) for one in seen.findings]


def test_sparse_gradients_and_empty_parameters_are_followed_and_nan_is_shown() -> None:
    assert ranks.run(is_odd, 2, False, timeout=120) == [[], []]
    (first, *_), _ = ranks.run(is_odd, 2, True, timeout=120)
    said = r"step 2, before step: gradient 2 \(last.weight\) .*: element 1 is nan on rank 1 and .*; 1 of 8"
    assert re.match(said, first), first


def has_closures(wrong: bool) -> list[str]:
    model, data = model_and_data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    ddp = DDP(model)
    seen = watch(optimizer, model=model)
    for number, inputs in enumerate([*data, *data]):
        optimizer.zero_grad()
        ddp(inputs).square().mean().backward()
        optimizer.step((lambda: torch.zeros(())) if number == 3 else None)
        if wrong and number == 5:
            optimizer.state[next(model.parameters())]["momentum_buffer"].zero_()
    return [str(one) for one in seen.findings]


def test_after_a_step_with_a_closure_the_shadow_begins_anew() -> None:
    assert ranks.run(has_closures, 2, False, timeout=120) == [[], []]
    (first, *_), _ = ranks.run(has_closures, 2, True, timeout=120)
    assert first.startswith("step 5, step: parameter 0 (0.weight) moved"), first


def of_a_stage() -> list[str]:
    stage = nn.Linear(*((4, 3), (3, 2))[dist.get_rank()])
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    seen = watch(optimizer, model=stage)
    for param in stage.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    dist.barrier()
    return [str(one) for one in seen.findings]


def test_ranks_with_other_parameters_end_the_watch_and_not_the_job() -> None:
    first, second = ranks.run(of_a_stage, 2, timeout=120)
    assert first == second
    assert "on rank 1 a parameter is weight of (2, 3), float32, and on rank 0 weight of (3, 4)" in first[0]


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.Muon])
def test_all_of_torchs_classes_are_known(kind: Any) -> None:
    assert watch(kind([nn.Parameter(torch.ones(2, 2))])).plain is kind


class MakesFolder:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


def test_a_note_that_holds_code_is_not_run(tmp_path: Path) -> None:
    torch.save({"step": MakesFolder(tmp_path / "made")}, tmp_path / "step-1.pt")
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))])
    seen = watch(optimizer, record=tmp_path)
    optimizer.step()
    assert "it ends here" in seen.findings[0].text
    assert not (tmp_path / "made").exists()


def is_late() -> tuple[list[str], float]:
    model, data = model_and_data()
    optimizer, ddp = plain_ddp(model)
    with watch(optimizer, wait=2) as seen:
        ddp(data[0]).mean().backward()
        if dist.get_rank() != 1:
            optimizer.step()  # rank 1 leaves out this step
        dist.barrier()
        seen.stop()
        found, seen.findings = seen.findings, []
    return [str(one) for one in found], next(model.parameters()).sum().item()


def test_a_rank_that_does_not_come_is_named_and_the_job_goes_on() -> None:
    (first, moved), (second, stayed), _ = ranks.run(is_late, 3, timeout=120)
    assert re.match(r"step 0, watch: it ends here: .*[Rr]anks? .*1", first[0], re.DOTALL), first
    assert second == []
    assert moved != stayed


def raises_on_one_rank() -> list[str]:
    model, data = model_and_data()
    optimizer, ddp = plain_ddp(model)
    seen = watch(optimizer, wait=30)

    def cannot() -> None:
        raise MemoryError("no room")

    for inputs in data[:2]:
        ddp(inputs).mean().backward()
        if dist.get_rank() == 1 and seen.on:
            seen.parts.add_up = cannot
        optimizer.step()
    return [str(one) for one in seen.findings]


def test_an_error_in_the_watch_is_told_on_all_ranks() -> None:
    said = "step 0, watch: it ends here: rank 1: MemoryError: no room"
    assert ranks.run(raises_on_one_rank, 2, timeout=120) == [[said], [said]]


def is_off() -> tuple[bool, list[str]]:
    model, data = model_and_data()
    optimizer, ddp = plain_ddp(model)
    before = dict(vars(optimizer))
    os.environ[VARIABLE] = "off"
    try:
        seen = watch(optimizer)
        same = vars(optimizer) == before
        if dist.get_rank():
            next(model.parameters()).data.zero_()
        ddp(data[0]).mean().backward()
        optimizer.step()
    finally:
        del os.environ[VARIABLE]
    return same, [str(one) for one in seen.findings]


def test_one_variable_turns_it_off() -> None:
    assert ranks.run(is_off, 2, timeout=60) == [(True, [])] * 2


def is_sampled(steps: int | None, every: int) -> list[int]:
    model, data = model_and_data()
    optimizer, ddp = plain_ddp(model)
    seen = watch(optimizer, every=every, steps=steps)
    found = []
    for number, inputs in enumerate(data):
        ddp(inputs).mean().backward()
        if number and dist.get_rank():
            next(model.parameters()).data.add_(0.5)
        optimizer.step()
        found.append(len(seen.findings))
        assert (seen._shadow is None) == (steps is not None and number >= steps)
    return found


def test_ranks_compare_in_sampled_steps_and_the_shadow_may_be_given_up() -> None:
    assert ranks.run(is_sampled, 2, None, 3, timeout=60) == [[0, 0, 0, 1]] * 2
    assert ranks.run(is_sampled, 2, 1, 1, timeout=60)[0][:2] == [0, 1]


def in_a_test() -> str:
    model, data = model_and_data()
    optimizer, _ = plain_ddp(model)
    try:
        with watch(optimizer):
            model(data[0]).mean().backward()
            optimizer.step()
    except AssertionError as error:
        return str(error)
    return "nothing"


def test_in_a_test_it_raises_at_the_end_and_says_its_memory_and_its_limit(
    capfd: pytest.CaptureFixture[str],
) -> None:
    found = ranks.run(in_a_test, 2)[0]
    assert re.search("the watch found:\nstep 0, before step: gradient \\d differs", found)
    said = capfd.readouterr().err
    elements = 5 * 7 + 7 + 7 * 3 + 3
    assert f"the shadow will hold {5 * 4 * elements / 1e6:.3f} MB" in said
    assert "gradients that are wrong alike on all ranks are not seen here" in said


def test_what_cannot_be_watched_is_refused() -> None:
    class Own(torch.optim.SGD):
        pass

    with pytest.raises(ValueError, match="Own may shard any class: give plain="):
        watch(Own([nn.Parameter(torch.ones(2))]))
    with pytest.raises(ValueError, match="every is 0"):
        watch(torch.optim.SGD([nn.Parameter(torch.ones(2))]), every=0)
