"""torch's own tests of post-local SGD, with our averagers, state, hook and optimizer in place of torch's.

They are in the torch package and want GPUs. Here they run on CPUs: `.cuda()` does nothing.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
import unittest
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from zero_ref.lab.ranks import run, shutdown
from zero_ref.local_sgd import averagers, optimizer

pytestmark = pytest.mark.ranks

TESTS = [
    "test_periodic_model_averager",
    "test_periodic_model_averager_param_group",
    "test_1_level_hierarchical_model_averager_equivalent_to_periodic_model_averager",
    "test_3_level_hierarchical_model_averager",
    "test_ddp_hook_parity_post_localSGD",
    "test_post_localSGD_optimizer_parity",
    "test_post_localSGD_optimizer_parity_grad_is_view",
    "test_post_localSGD_optimizer_parity_with_hierarchical_sgd",
    "test_post_localSGD_optimizer_parity_with_hierarchical_sgd_grad_is_view",
    "test_post_localSGD_optimizer_step_reload",
]


def undecorated(test: Any) -> Callable[[Any], None]:
    """The test without what skips it where there are no GPUs."""
    while hasattr(test, "__wrapped__"):
        test = test.__wrapped__
    return test  # type: ignore[no-any-return]


def on_cpu(made: Any, *_: Any, **__: Any) -> Any:
    return made


def run_torchs_test(name: str, rank: int, world_size: int) -> str:
    """On one rank. Returns the name."""
    with ExitStack() as stack:
        patched = stack.enter_context
        patched(
            mock.patch.dict(
                os.environ, BACKEND="gloo", WORLD_SIZE=str(world_size), TEMP_DIR=tempfile.gettempdir()
            )
        )
        if importlib.util.find_spec("expecttest") is None:  # of which these tests use nothing else
            stub = SimpleNamespace(TestCase=unittest.TestCase)
            patched(mock.patch.dict(sys.modules, expecttest=stub))
        module: Any = importlib.import_module("torch.testing._internal.distributed.distributed_test")
        ddp = SimpleNamespace(
            DistributedDataParallel=lambda model, device_ids=None, **options: DDP(model, **options)
        )
        for owner, attribute, new in [
            (module, "averagers", averagers),
            (module, "hierarchicalSGD", averagers),
            (module, "post_localSGD", optimizer),
            (module, "post_localSGD_optimizer", optimizer),
            (module, "init_multigpu_helper", lambda count, backend: {place: [0] for place in range(count)}),
            (torch.nn, "parallel", ddp),
            (torch.cuda, "set_device", lambda device: None),
            (torch.Tensor, "cuda", on_cpu),
            (nn.Module, "cuda", on_cpu),
            (nn.Module, "to", on_cpu),
        ]:
            patched(mock.patch.object(owner, attribute, new))
        base = module.DistributedTest._DistTestBase
        test_case = sys.modules["torch.testing._internal.common_utils"].TestCase
        case = type("Case", (base, test_case), {"rank": rank, "world_size": world_size, "runTest": None})()
        undecorated(getattr(base, name))(case)
    return name


def on_rank(name: str) -> str:
    return run_torchs_test(name, torch.distributed.get_rank(), torch.distributed.get_world_size())


@pytest.mark.parametrize(
    "name",
    [TESTS[-2], *(pytest.param(name, marks=pytest.mark.thorough) for name in TESTS if name != TESTS[-2])],
)
def test_torchs_test_passes(name: str) -> None:
    shutdown()  # the tests count process groups
    assert run(on_rank, 4, name, backend="gloo", timeout=120) == [name] * 4
