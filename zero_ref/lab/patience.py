"""Time-outs on a machine that is slow, or busy with other things."""

from __future__ import annotations

import math
import os

VARIABLE = "ZERO_REF_PATIENCE"


def patience() -> float:
    """Return the factor of every time-out of ranks, virtual ranks and graders: ZERO_REF_PATIENCE, or 1.

    A time-out is there in case something hangs. Where eight processes share a core all takes eight times as
    long, and nothing hangs: `export ZERO_REF_PATIENCE=10` before Jupyter or `zero-ref check` starts.

    >>> 60 * patience() >= 60
    True

    Raises:
        ValueError: the variable is no positive number.
    """
    value = os.environ.get(VARIABLE, "1")
    try:
        factor = float(value)
    except ValueError:
        factor = math.nan
    if not (0 < factor < math.inf):
        raise ValueError(f"{VARIABLE} must be a positive number, such as 10, not {value!r}")
    return factor
