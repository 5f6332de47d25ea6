"""Warnings that name the line of the user's program, past all frames of this package and of torch.

A fixed `stacklevel` would name a line of torch's: dynamo, a scheduler or a gradient scaler may wrap `step`.
"""

from __future__ import annotations

import sys
import warnings
from itertools import count
from pathlib import Path
from types import FrameType

import torch

NOT_THE_USERS = tuple(f"{Path(module.__file__ or '').parent}/" for module in (torch, sys.modules["zero_ref"]))


def warn_user(message: str) -> None:
    """Warn at the innermost line that is neither of this package nor of torch."""
    frame: FrameType | None = sys._getframe()
    for level in count(1):
        if frame is None or not frame.f_code.co_filename.startswith(NOT_THE_USERS):
            warnings.warn(message, stacklevel=level)
            return
        frame = frame.f_back
