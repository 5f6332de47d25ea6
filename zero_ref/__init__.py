"""The Zero Redundancy Optimizer, complete and readable.

Names are loaded when first used (PEP 562): `import zero_ref` pulls in no torch, so the plan and the
simulator also run where torch is not installed. Listed in reading order.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zero_ref.optimizer import ZeroRedundancyOptimizer as ZeroRedundancyOptimizer
    from zero_ref.partition import (
        ParamSpec as ParamSpec,
        Partition as Partition,
        Slice as Slice,
        even as even,
        registration_greedy as registration_greedy,
        sorted_greedy as sorted_greedy,
    )

__version__ = "0.1.0"

_MODULE_OF_NAME = {
    "ParamSpec": "zero_ref.partition",
    "Slice": "zero_ref.partition",
    "Partition": "zero_ref.partition",
    "sorted_greedy": "zero_ref.partition",
    "registration_greedy": "zero_ref.partition",
    "even": "zero_ref.partition",
    "ZeroRedundancyOptimizer": "zero_ref.optimizer",
}

__all__ = ["__version__", *_MODULE_OF_NAME]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF_NAME:
        raise AttributeError(f"module 'zero_ref' has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF_NAME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
