"""The Zero Redundancy Optimizer, complete and readable.

Names are loaded when first used (PEP 562): `import zero_ref` pulls in no torch, so the plan and the
simulator also run where torch is not installed. Listed in reading order.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zero_ref.optimizer import ZeroRedundancyOptimizer
    from zero_ref.partition import ParamSpec, Partition, Slice, even, registration_greedy, sorted_greedy

__version__ = "0.1.0"

__all__ = [
    "ParamSpec",
    "Slice",
    "Partition",
    "sorted_greedy",
    "registration_greedy",
    "even",
    "ZeroRedundancyOptimizer",
]

_MODULE_OF_NAME = dict.fromkeys(__all__, "zero_ref.partition") | {
    "ZeroRedundancyOptimizer": "zero_ref.optimizer"
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF_NAME:
        raise AttributeError(f"module 'zero_ref' has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF_NAME[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
