"""Ranks for the tests of the pretend device: processes of their own, since it stays registered in them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import pretend_device as device
import pretend_group
import torch
import torch.distributed as dist
from paths import PATHS, Place

from zero_ref.lab import ranks
from zero_ref.lab.config import TrainConfig
from zero_ref.lab.placement import DEVICE
from zero_ref.lab.train import train

_runs = itertools.count()


class Ranks:
    """Pools by their size. After an error a pool is replaced."""

    def __init__(self) -> None:
        self.pools: dict[int, ranks.Pool] = {}

    def run(self, function: Callable[[], Any], world_size: int = 2) -> list[Any]:
        if world_size not in self.pools:
            self.pools[world_size] = ranks.Pool(world_size, backend="gloo")
        try:
            return self.pools[world_size].run(function, timeout=240)
        except BaseException:
            self.pools.pop(world_size).close()
            raise

    def close(self) -> None:
        while self.pools:
            self.pools.popitem()[1].close()


Found = dict[str, list[str]]


def on_device(name: str, options: dict[str, Any], mixed: bool = False) -> tuple[Found, list[torch.Tensor]]:
    """Run a path on the device. Returns what was found there, and the parameters at the end."""
    place = Place(device.DEVICE, pretend_group.new_group(mixed), dist.get_rank())
    values = PATHS[name](place, **options)
    return place.found, values


def on_cpu(name: str, options: dict[str, Any]) -> list[torch.Tensor]:
    """Run a path on the CPU. Returns the parameters at the end."""
    return PATHS[name](Place(torch.device("cpu"), dist.group.WORLD, dist.get_rank()), **options)


def on_both(name: str, options: dict[str, Any], mixed: bool) -> tuple[Found, list[Any], list[Any]]:
    """Run a path on the device and on the CPU: what was found, and the parameters of both."""
    pretend_group.register()  # before the first backward, for which torch counts the devices
    expected = on_cpu(name, options)
    return *on_device(name, options, mixed), expected


def train_on_device(config: TrainConfig) -> Any:
    """The main job, with the device in the default group."""
    pretend_group.register()
    # A number for each run: the addresses of an earlier one are still in the store.
    store = dist.PrefixStore(f"pretend {next(_runs)}", dist.distributed_c10d._get_default_store())
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.barrier()  # the other ranks may still be connecting to this one
    dist.destroy_process_group()
    dist.init_process_group(
        f"{device.NAME}:{pretend_group.BACKEND}", store=store, rank=rank, world_size=world_size
    )
    os.environ[DEVICE] = str(device.DEVICE)
    try:
        return train(config)
    finally:
        del os.environ[DEVICE]
