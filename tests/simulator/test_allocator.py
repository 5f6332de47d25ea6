"""What PyTorch's allocator reserves beside tensors: its rules by hand, and shares that follow from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from statistics import median
from typing import Any

import pytest
import torch
from caching_allocator import KIB, MIB, CachingAllocator, reserved_by
from test_peak import Net, Step
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zero_ref.simulator.cluster import cluster
from zero_ref.simulator.models import MODELS, Llama
from zero_ref.simulator.peak import SHARES
from zero_ref.simulator.scenario import Scenario

# ------------------------------------------------------------------------------------------------- by hand


@pytest.mark.parametrize(
    ("nbytes", "segments", "expandable"),
    [(1, 2, 2), (MIB, 2, 2), (MIB + 1, 20, 20), (10 * MIB, 10, 20), (11 * MIB, 12, 20), (61 * MIB, 62, 80)],
)
def test_one_tensor_takes_a_segment(nbytes: int, segments: int, expandable: int) -> None:
    assert reserved_by([(1, nbytes)], expandable=False) == segments * MIB
    assert reserved_by([(1, nbytes)], expandable=True) == expandable * MIB


def test_a_gap_that_is_too_small_stays_unused() -> None:
    events = [(1, 40 * MIB), (2, 40 * MIB), (1, 0), (3, 60 * MIB)]
    assert reserved_by(events, expandable=False) == (40 + 40 + 60) * MIB
    assert reserved_by(events, expandable=True) == (40 + 40 + 60) * MIB
    at_the_end = [(1, 40 * MIB), (2, 40 * MIB), (2, 0), (3, 60 * MIB)]
    assert reserved_by(at_the_end, expandable=False) == (40 + 40 + 60) * MIB
    assert reserved_by(at_the_end, expandable=True) == (40 + 60) * MIB, "the segment grows"


def test_free_neighbours_are_one_block_and_a_rest_is_used() -> None:
    allocator = CachingAllocator(expandable=True)
    first, second, third = (allocator.take(20 * MIB) for _ in range(3))
    for block in (first, third, second):
        allocator.give_back(block)
    allocator.take(60 * MIB)
    assert allocator.reserved == 60 * MIB
    small = CachingAllocator(expandable=False)
    for _ in range(4):
        small.take(512 * KIB)
    assert small.reserved == 2 * MIB


def test_state_that_stays_has_no_reserve_but_what_comes_and_goes_has() -> None:
    one = Scenario(MODELS["llama3-8b"], cluster("h100-ib"), 1, sequence=1024, masters=False)
    more = replace(one, optimizer="SGD")  # without 32 GB of moments
    adam, sgd = (each.run("ddp").memory for each in (one, more))
    assert adam.moment_bytes > 30e9
    assert adam.allocator_bytes == sgd.allocator_bytes
    longer = replace(one, batch=2).run("ddp").memory
    more_bytes = longer.allocated_bytes - adam.allocated_bytes
    assert longer.allocator_bytes - adam.allocator_bytes == pytest.approx(0.12 * more_bytes, rel=1e-6)


def test_one_option_says_which_allocator_it_is() -> None:
    reserved = {}
    for name in ("expandable", "segments", "varying"):
        scenario = Scenario(MODELS["gpt2"], cluster("h100-ib"), 4, allocator=name)
        memory = scenario.run("zero").memory
        comes_and_goes = memory.allocated_bytes - memory.state_bytes
        reserved[name] = round(memory.allocator_bytes / comes_and_goes, 3)
    assert reserved == {"expandable": 0.12, **SHARES}
    with pytest.raises(ValueError, match="allocator 'paged'; choose"):
        Scenario(MODELS["gpt2"], cluster("h100-ib"), 4, allocator="paged")


def test_a_cpu_has_no_such_allocator() -> None:
    scenario = Scenario(MODELS["gpt2"], cluster("loopback"), 4, allocator="varying")
    assert scenario.run("zero").memory.allocator_bytes == 0


# ------------------------------------------------------------------------------------- tensors of real steps


class Recorded(TorchDispatchMode):
    """The storages that operations make and free, in order: (number, bytes), and (number, 0)."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[int, int]] = []
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.note_freed()
        result = func(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            if isinstance(one, torch.Tensor):
                self._note(one.untyped_storage())
        return result

    def note_freed(self) -> None:
        for at, (storage, number) in list(self._made.items()):
            if storage.expired():
                self.events.append((number, 0))
                del self._made[at]

    def _note(self, storage: torch.UntypedStorage) -> None:
        known = self._made.get(storage._cdata)
        if known is not None and known[0].expired():
            self.events.append((known[1], 0))
        if known is None or known[0].expired():
            number = 1 + len(self.events)
            self._made[storage._cdata] = StorageWeakRef(storage), number
            self.events.append((number, storage.nbytes()))


def recorded(step: Step, lengths: Sequence[int]) -> list[tuple[int, int]]:
    """The tensors of several steps, each with sequences of this length."""
    with FakeTensorMode(), Recorded() as record:
        net = Net(step)
        optimizer = torch.optim.AdamW(net.parameters(), foreach=step.foreach, fused=not step.foreach)
        for length in lengths:
            net.loss(torch.zeros(step.batch, length, dtype=torch.long)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        record.note_freed()
        return record.events


def share(step: Step, lengths: Sequence[int], *, expandable: bool) -> float:
    """What is reserved beside tensors, of what comes and goes at the peak."""
    events = recorded(step, lengths)
    nbytes_of: dict[int, int] = {}
    allocated = peak = 0
    for number, nbytes in events:
        allocated += nbytes or -nbytes_of[number]
        peak = max(peak, allocated)
        nbytes_of[number] = nbytes
    stays = step.scenario.run("ddp").memory.state_bytes
    return (reserved_by(events, expandable=expandable) - peak) / (peak - stays)


LARGE = Llama(width=4096, depth=8, hidden=14336, heads=32, key_value_heads=8, vocabulary=128_256)
FEW = replace(LARGE, vocabulary=32_000)
STEPS = (
    Step(LARGE, 1, 4096),
    Step(LARGE, 2, 4096, "full"),
    Step(FEW, 4, 2048),
    Step(replace(FEW, depth=16), 8, 2048, "full"),
    Step(LARGE, 2, 4096, norms="by-hand", repeated_kv=True, foreach=True),
    Step(LARGE, 2, 4096, "full", norms="by-hand", repeated_kv=True, foreach=True),
    Step(LARGE, 2, 4096, fused_loss=True),
)
"""Steps with and without checkpointing, with large and small heads, in many kernels and in few."""


def varying(step: Step, random: Random) -> list[int]:
    lengths = [random.randint(step.sequence // 4, step.sequence) for _ in range(6)]
    return [*lengths[:3], step.sequence, *lengths[4:]]


def test_segments_that_grow_leave_less_unused_where_lengths_vary() -> None:
    step = Step(replace(FEW, depth=2), 2, 1024)
    lengths = varying(step, Random(0))
    assert share(step, lengths, expandable=True) < share(step, lengths, expandable=False)


@pytest.mark.thorough
def test_the_shares_are_the_medians_of_steps_whose_tensors_went_through_the_allocators_rules() -> None:
    random = Random(0)
    alike = [share(step, [step.sequence] * 3, expandable=False) for step in STEPS]
    differ = [share(step, varying(step, random), expandable=False) for step in STEPS]
    assert {"segments": round(median(alike), 2), "varying": round(median(differ), 2)} == SHARES
