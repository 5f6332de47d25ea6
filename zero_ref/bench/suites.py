"""What is timed. Each suite is called on every rank of a process group and returns the same on all."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from zero_ref.bench import contenders, limits, state, training
from zero_ref.bench.results import SuiteResult
from zero_ref.bench.rounds import Case, take_turns, total_numel
from zero_ref.bench.sets import SETS, give_gradients, result
from zero_ref.simulator.calibrate import ADAMW_BYTES


def step(set_name: str, rounds: int) -> SuiteResult:
    """The step of an optimizer whose gradients are there: the local update, and new parameters to all."""
    torch.set_num_threads(1)
    cases: dict[str, Case] = {}
    for name, make in contenders.sharded().items():
        params = list(SETS[set_name].make().parameters())
        give_gradients(params)
        cases[name] = Case(make(params).step)
    numel = limits.share(total_numel(params), dist.get_world_size())
    update, exchange = limits.fused_update(numel), limits.exchange(numel)
    cases["limit: fused AdamW of a share"] = Case(update)
    cases["limit: copy of as many bytes"] = Case(limits.copy(ADAMW_BYTES * numel))
    cases["limit: exchange of shares"] = Case(exchange)
    cases["limit: both, one after the other"] = Case(lambda: (update(), exchange()))
    return result("step", set_name, take_turns(cases, rounds))


SUITES: dict[str, Callable[[str, int], SuiteResult]] = {
    "step": step,
    "sync": training.sync,
    "iteration": training.iteration,
    "checkpoint": state.checkpoint,
    "memory": state.memory,
    "construction": state.construction,
}
"""By name."""
