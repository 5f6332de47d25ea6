"""Every path of the package on the pretend device: no wait, no race, no use after free, NCCL's rules, right values."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from paths import PATHS, Place

from zero_ref.lab import ranks

VIEWS = {"parameters_as_bucket_view": True}
STEPS_BY = {
    "each": {},
    "views": VIEWS,
    "even": {"partition": "even"},
    "even views": {**VIEWS, "partition": "even"},
    "shares": {"partition": "equal_shares"},
    "shares views": {**VIEWS, "partition": "equal_shares"},
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {}
for name, how in STEPS_BY.items():
    CASES[f"step, {name}"] = ("step", how)
    CASES[f"step, {name}, fused"] = ("step", {**how, "fused": True})
    CASES[f"step, {name}, 16 bits sent"] = ("step", {**how, "broadcast_dtype": torch.bfloat16})
for name in ("views", "even views"):
    how = STEPS_BY[name]
    CASES[f"DDP, {name}"] = ("after_ddp", how)
    for hook in ("none", "owners", "scaled"):
        CASES[f"DDP, {name}, {hook}, clip"] = ("after_ddp", {**how, "hook": hook, "clip": True})
    CASES[f"DDP, {name}, to owners"] = ("after_ddp", {**how, "hook": "owners"})
    for interleaved in (False, True):
        for owners in (False, True):
            place = f"in backward, {name}{', interleaved' * interleaved}{', to owners' * owners}"
            CASES[place] = ("in_backward", {**how, "interleaved": interleaved, "owners": owners})
    CASES[f"offload, {name}"] = ("offload", how)
    CASES[f"state, {name}"] = ("state", how)
    CASES[f"Join, {name}"] = ("uneven", how)
for name in ("even views", "shares", "shares views"):
    how = STEPS_BY[name]
    CASES[f"sharded, {name}"] = ("sharded", how)
    CASES[f"sharded, {name}, two backwards"] = ("sharded", {**how, "backwards": 2})
    CASES[f"sharded, {name}, no_sync"] = ("sharded", {**how, "backwards": 4})
    CASES[f"sharded, {name}, in forward"] = ("sharded", {**how, "in_forward": True})
    for rounding in ("nearest", "stochastic"):
        CASES[f"masters, {name}, {rounding}"] = ("masters", {**how, "rounding": rounding})
CASES["local SGD"] = ("averaged", {})


class Ranks:
    """Ranks that know the pretend device. After an error they are replaced."""

    def __init__(self) -> None:
        self.pools: dict[int, ranks.Pool] = {}

    def run(self, function: Callable[[], Any], world_size: int = 2) -> list[Any]:
        if world_size not in self.pools:
            self.pools[world_size] = ranks.Pool(world_size, backend="gloo")
        try:
            return self.pools[world_size].run(function, timeout=120)
        except BaseException:
            self.pools.pop(world_size).close()
            raise

    def close(self) -> None:
        for pool in self.pools.values():
            pool.close()


@pytest.fixture(scope="module")
def pool() -> Iterator[Ranks]:
    pool = Ranks()
    yield pool
    pool.close()


def on_rank(name: str, options: dict[str, Any], mixed: bool) -> tuple[dict[str, list[str]], list[Any], list[Any], list[Any]]:
    """What was found on the device; its values and the CPU's; the calls of the last iteration there."""
    import pretend_device
    import pretend_group

    pretend_group.register()  # before the first backward: it counts the devices
    expected = PATHS[name](Place(torch.device("cpu"), dist.group.WORLD, dist.get_rank()), **options)
    group = pretend_group.new_group(mixed)
    place = Place(pretend_device.DEVICE, group, dist.get_rank())
    values = PATHS[name](place, **options)
    gc.collect()
    return place.found, values, expected, place.calls


@pytest.mark.parametrize("mixed", [False, True], ids=["nccl", "gloo and nccl"])
@pytest.mark.parametrize("case", CASES)
def test_nothing_goes_wrong_on_the_device(pool: Ranks, case: str, mixed: bool) -> None:
    name, options = CASES[case]
    for found, values, expected, _ in pool.run(functools.partial(on_rank, name, options, mixed)):
        assert found == {}
        for value, wanted in zip(values, expected, strict=True):
            # Sums are in another order, and 16 bits may round to the other neighbour.
            torch.testing.assert_close(value, wanted, rtol=1e-2 if name == "masters" else 1e-5, atol=1e-5)
