"""The Zero Redundancy Optimizer, complete and readable.

Names are loaded when first used (PEP 562): `import zero_ref` pulls in no torch, so the plan and the
simulator also run where torch is not installed. Listed in reading order.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zero_ref.backward.overlap import hook_with_zero_step, hook_with_zero_step_interleaved
    from zero_ref.backward.reduction import reduce_to_owners
    from zero_ref.backward.sharded_data_parallel import ShardedDataParallel
    from zero_ref.clip.grad_norm import clip_grad_norm_, get_total_norm
    from zero_ref.dropin.clients import consolidation_callback, consolidation_hook
    from zero_ref.dropin.oss import OSS
    from zero_ref.dropin.rpc_optimizer import DistributedOptimizer
    from zero_ref.files.dcp import OptimizerToLoad, StatefulOptimizer
    from zero_ref.files.sharded import PendingSave, load_sharded, save_sharded, save_sharded_async
    from zero_ref.local_sgd.averagers import HierarchicalModelAverager, ModelAverager, PeriodicModelAverager
    from zero_ref.local_sgd.averaging import AveragingSchedule
    from zero_ref.local_sgd.optimizer import PostLocalSGDOptimizer, PostLocalSGDState, post_localSGD_hook
    from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
    from zero_ref.plan.partition import ParamSpec, Partition, Slice
    from zero_ref.plan.rules import (
        balanced,
        equal_shares,
        even,
        newton_schulz_operations,
        registration_greedy,
        sorted_greedy,
    )

__version__ = "0.1.0"

__all__ = [
    "ParamSpec",
    "Slice",
    "Partition",
    "sorted_greedy",
    "registration_greedy",
    "even",
    "equal_shares",
    "balanced",
    "newton_schulz_operations",
    "ZeroRedundancyOptimizer",
    "reduce_to_owners",
    "ShardedDataParallel",
    "hook_with_zero_step",
    "hook_with_zero_step_interleaved",
    "save_sharded",
    "save_sharded_async",
    "PendingSave",
    "load_sharded",
    "StatefulOptimizer",
    "OptimizerToLoad",
    "clip_grad_norm_",
    "get_total_norm",
    "OSS",
    "AveragingSchedule",
    "ModelAverager",
    "PeriodicModelAverager",
    "HierarchicalModelAverager",
    "PostLocalSGDState",
    "post_localSGD_hook",
    "PostLocalSGDOptimizer",
    "DistributedOptimizer",
    "consolidation_hook",
    "consolidation_callback",
]

_MODULE_OF_NAME = dict.fromkeys(__all__, "zero_ref.plan.rules") | {
    "ParamSpec": "zero_ref.plan.partition",
    "Slice": "zero_ref.plan.partition",
    "Partition": "zero_ref.plan.partition",
    "ZeroRedundancyOptimizer": "zero_ref.optimizer.zero_redundancy_optimizer",
    "reduce_to_owners": "zero_ref.backward.reduction",
    "ShardedDataParallel": "zero_ref.backward.sharded_data_parallel",
    "hook_with_zero_step": "zero_ref.backward.overlap",
    "hook_with_zero_step_interleaved": "zero_ref.backward.overlap",
    "save_sharded": "zero_ref.files.sharded",
    "save_sharded_async": "zero_ref.files.sharded",
    "PendingSave": "zero_ref.files.sharded",
    "load_sharded": "zero_ref.files.sharded",
    "StatefulOptimizer": "zero_ref.files.dcp",
    "OptimizerToLoad": "zero_ref.files.dcp",
    "clip_grad_norm_": "zero_ref.clip.grad_norm",
    "get_total_norm": "zero_ref.clip.grad_norm",
    "OSS": "zero_ref.dropin.oss",
    "AveragingSchedule": "zero_ref.local_sgd.averaging",
    "ModelAverager": "zero_ref.local_sgd.averagers",
    "PeriodicModelAverager": "zero_ref.local_sgd.averagers",
    "HierarchicalModelAverager": "zero_ref.local_sgd.averagers",
    "PostLocalSGDState": "zero_ref.local_sgd.optimizer",
    "post_localSGD_hook": "zero_ref.local_sgd.optimizer",
    "PostLocalSGDOptimizer": "zero_ref.local_sgd.optimizer",
    "DistributedOptimizer": "zero_ref.dropin.rpc_optimizer",
    "consolidation_hook": "zero_ref.dropin.clients",
    "consolidation_callback": "zero_ref.dropin.clients",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF_NAME:
        raise AttributeError(f"module 'zero_ref' has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF_NAME[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
