"""What `fully_shard` does is listed as two ranks do it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from zero_ref.lab.ranks import run
from zero_ref.lab.stage_3 import Done, Watch

WIDTH = 8
WHOLE = 4 * WIDTH * WIDTH


def watched() -> list[Done]:
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)))
    for unit in (*model, model):
        fully_shard(unit, mesh=mesh)
    inputs = torch.ones(1, WIDTH)
    model(inputs).sum().backward()
    with Watch(model) as watch:
        model(inputs).sum().backward()
    return watch.done


@pytest.mark.ranks
def test_a_watch_lists_calls_copies_and_computing_with_their_streams() -> None:
    def gather(inputs: int) -> list[Done]:
        copy = Done("copy in", WHOLE, "all_gather_copy_in", inputs)
        return [copy, Done("all-gather", WHOLE, "all_gather", inputs)]

    def here(what: str, inputs: int = 0) -> Done:
        return Done(what, WHOLE, "compute", inputs)

    forward = [*gather(0), here("copy out"), here("forward")]
    reduce = [here("copy in"), Done("reduce-scatter", WHOLE, "reduce_scatter", 1)]
    ahead = [*gather(0), here("copy out"), *gather(0), here("backward")]
    done = run(watched, 2, backend="gloo")
    assert done[0] == done[1] == [
        *forward, *forward, *ahead, *reduce, here("copy out", 1), here("backward", 1), *reduce
    ]  # fmt: skip
