"""The table of the page "How fast is it?" with a rank on each accelerator, by the device's own backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import torch

from benchmarks.gpu.budget import Budget, Found, Skipped
from benchmarks.suites import SUITES
from zero_ref.comm import devices
from zero_ref.lab import ranks


def speed(
    device: torch.device,
    budget: Budget,
    *,
    world_size: int | None = None,
    suites: Sequence[str] = ("step", "sync", "iteration"),
    sets: Sequence[str] = ("gpt", "tiny"),
    rounds: int = 9,
) -> Found:
    """Time all contenders of these suites in turns: ours, torch's, FairScale's, plain DDP and FSDP2.

    Args:
        world_size: ranks; None for one on each accelerator.
    Raises:
        Skipped: there is one accelerator.
    """
    world_size = world_size or devices.accelerator_count()
    if world_size < 2:
        raise Skipped("there is one accelerator, and a single rank shares its work with nobody.")
    found: list[Found] = []
    try:
        for set_name in sets:
            for suite in suites:
                if budget.over:
                    found.append({"suite": suite, "set": set_name, "left_out": "no time was left"})
                    continue
                seconds = max(1.0, budget.left_s)
                result = ranks.run(SUITES[suite], world_size, set_name, rounds, timeout=seconds)[0]
                found.append(asdict(result))
    finally:
        ranks.shutdown()
    return {"results": found}
