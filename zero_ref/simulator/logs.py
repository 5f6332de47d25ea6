"""Logs of measurements that others' programs write: nccl-tests, and tables of matrix products.

`calibrate.calibrate_from_logs` makes a cluster from what is read here.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable
from pathlib import Path

from zero_ref.simulator._records import read_text
from zero_ref.simulator.calibrate import MeasuredProduct, Measurement, NcclLog

OP_OF_PROGRAM: dict[str, str] = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "sendrecv": "send",
    "alltoall": "exchange",
}
"""The operations of `traffic`, by the programs of nccl-tests that measure them, without `_perf`."""

_PROGRAM = re.compile(r"\b(" + "|".join(sorted(OP_OF_PROGRAM, key=len, reverse=True)) + r")_perf(?:_mpi)?\b")
_RANK = re.compile(r"#\s+Rank\s+(\d+)\b.*?\bon\s+(\S+)\s+device")
_PREFIX = re.compile(r"^\s*(?:\[[^\]]*\](?:<\w+>:?)?|\d+:)?\s?")
"""What mpirun --tag-output or srun --label put before a line."""

COLUMNS = ("m", "k", "n")
TIMES: dict[str, float] = {"ms": 1.0, "us": 1e-3, "s": 1e3}
"""Columns with a time, and the milliseconds of one."""


def nccl_tests(text: str, op: str | None = None) -> NcclLog:
    """The out-of-place times in the output of a program of nccl-tests.

    >>> log = nccl_tests('''# Collective test starting: all_gather_perf
    ... #  Rank  0 Group  0 Pid  7 on  node-1 device  0 [0000:0f:00] NVIDIA A100-SXM4-80GB
    ... #  Rank  1 Group  0 Pid  8 on  node-1 device  1 [0000:15:00] NVIDIA A100-SXM4-80GB
    ... #       size  count   type  redop root   time  algbw  busbw #wrong   time  algbw  busbw #wrong
    ...      1048576 131072  float   none   -1  25.31  41.43  20.71      0  24.9   42.11  21.06      0''')
    >>> log.ranks, log.nodes, log.measurements
    (2, 1, (Measurement(op='all_gather', nbytes=1048576, world_size=2, ms=0.02531),))

    Args:
        text: with the lines that name the ranks and, if `op` is None, the program. Each line may have a
            prefix such as mpirun and srun put there.
        op: one of `traffic.OPERATIONS`; None to find it in the text: new versions say it, and so does the
            command line.
    Raises:
        ValueError: the program, the ranks or the measurements are missing.
    Source: nccl-tests, src/common.cu. The time and three more columns stand there twice, out of place and in
        place; before them versions differ. A size is of the whole payload, as `traffic` counts it.
    """
    lines = [_PREFIX.sub("", line, count=1) for line in text.splitlines()]
    if op is None:
        named = {OP_OF_PROGRAM[found] for line in lines for found in _PROGRAM.findall(line)}
        if len(named) != 1:
            listed = ", ".join(sorted(named)) or "none"
            raise ValueError(
                f"a log of nccl-tests is of one operation, this one names {listed}. Keep the line with the "
                "command, such as `all_reduce_perf -b 8 -e 8G -f 2 -g 8`, and one program's output a log."
            )
        (op,) = named
    host_of_rank = {int(found[1]): found[2] for line in lines if (found := _RANK.match(line))}
    if len(host_of_rank) < 2:
        raise ValueError(
            f"the log names {len(host_of_rank)} ranks; it takes the lines `#  Rank  0 ... on HOST device 0`, "
            "of two ranks at least."
        )
    ranks = len(host_of_rank)
    measurements = tuple(
        Measurement(op, int(fields[0]), ranks, float(fields[-8]) / 1e3)
        for line in lines
        if (fields := line.split()) and _is_row(fields)
    )
    if not measurements:
        raise ValueError("the log has no line with a size and times: it was cut off, or every size is 0.")
    return NcclLog(measurements, ranks, len(set(host_of_rank.values())))


def _is_row(fields: list[str]) -> bool:
    """Size, elements, type, up to two more, then twice time, two bandwidths and errors; not of size 0."""
    if not 11 <= len(fields) <= 13 or not (fields[0].isdecimal() and fields[1].isdecimal()):
        return False
    return int(fields[0]) > 0 and all(map(_is_number, (fields[-8], fields[-4])))


def _is_number(text: str) -> bool:
    return re.fullmatch(r"\d+(\.\d+)?(e[+-]?\d+)?", text) is not None


def products(lines: Iterable[str]) -> list[MeasuredProduct]:
    """The matrix products in a table of comma-separated values, the names of its columns first.

    >>> products(["m,k,n,us", "8192,4096,4096,430.5"])
    [MeasuredProduct(m=8192, k=4096, n=4096, ms=0.4305, dtype='bfloat16')]

    Args:
        lines: with the columns m, k, n, a time in one of TIMES or a rate in tflops, and perhaps dtype. Other
            columns are ignored, in capitals or not.
    Raises:
        ValueError: a column is missing, or a value is no number; the message says in which line.
    """
    try:
        return _products(csv.DictReader(lines, skipinitialspace=True))
    except csv.Error as error:
        raise ValueError(f"it is no table of comma-separated values: {error}") from None


def _products(rows: csv.DictReader[str]) -> list[MeasuredProduct]:
    names = {name.strip().lower(): name for name in rows.fieldnames or () if name}
    missing = [name for name in COLUMNS if name not in names]
    timed = [name for name in (*TIMES, "tflops") if name in names]
    if missing or not timed:
        raise ValueError(
            f"the table has the columns {', '.join(names) or 'none'}; it takes m, k, n, and one of "
            f"{', '.join(TIMES)} or tflops."
        )
    found = []
    for number, row in enumerate(rows, start=2):
        values = {name: (row[column] or "").strip() for name, column in names.items()}
        try:
            found.append(_product(values, timed[0]))
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
    if not found:
        raise ValueError("the table has no line beside the names of its columns.")
    return found


def _product(values: dict[str, str], timed: str) -> MeasuredProduct:
    for name in (*COLUMNS, timed):
        if not _is_number(values[name]):
            raise ValueError(f"{name} is {values[name]!r}, and no number above 0")
    m, k, n = (int(float(values[name])) for name in COLUMNS)
    given = float(values[timed])
    ms = given * TIMES[timed] if timed in TIMES else 2.0 * m * k * n / (given * 1e9) if given else 0.0
    return MeasuredProduct(m, k, n, ms, values.get("dtype") or "bfloat16")


def read_products(path: str | Path) -> list[MeasuredProduct]:
    """The products in a file. Raises: as `products`, and an OSError where it cannot be read."""
    return products(read_text(path).splitlines())


def read_nccl_tests(path: str | Path) -> NcclLog:
    """The log in a file. Raises: as `nccl_tests`, and an OSError where it cannot be read."""
    return nccl_tests(read_text(path))
