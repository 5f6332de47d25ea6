"""Made-up results of benchmarks, for the tests of what is done with them."""

from __future__ import annotations

from benchmarks import machine, rounds
from benchmarks.contenders import OURS, TORCH, TORCH_BEST
from benchmarks.results import Report, Session, SuiteResult, Taken

ADAMW, EXCHANGE = "limit: fused AdamW of a share", "limit: exchange of shares"


def step_result(**wall_ms: list[float]) -> SuiteResult:
    """A step of `gpt` in which ours took 10, 20 and 40 ms, torch 3 times as long, its best form 0.9 times."""
    walls = {
        OURS: [10.0, 20.0, 40.0],
        TORCH: [30.0, 60.0, 120.0],
        TORCH_BEST: [9.0, 18.0, 36.0],
        ADAMW: [4.0, 8.0, 16.0],
        EXCHANGE: [6.0, 12.0, 22.0],
        **wall_ms,
    }
    taken = {name: Taken(times, [2 * ms for ms in times], 400) for name, times in walls.items()}
    return SuiteResult("step", "gpt", 2, 3, 100, taken)


def report(*results: SuiteResult) -> Report:
    session = Session("2026-01-01T00:00:00+00:00", 3, False, rounds.CONNECTIONS, (0.5, None))
    return Report(
        machine.Machine("a processor", 2, 8 * 10**9, "Linux 6", None),
        {"python": "3.12.0", "fairscale": None},
        machine.Commit("c" * 40, changed=True),
        [session],
        list(results),
    )
