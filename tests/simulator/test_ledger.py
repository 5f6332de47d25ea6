"""The ledger: the paper's table, and state bytes counted from torch's own optimizers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from zero_ref.plan.choice import plan_partition
from zero_ref.plan.partition import ParamSpec
from zero_ref.plan.rules import even, sorted_greedy
from zero_ref.simulator.ledger import (
    BOTH_GRADS_20,
    FP32_16,
    FP32_GRADS_18,
    MIXED_16,
    MIXED_ADAMW,
    STATE_RULES,
    Convention,
    Ledger,
    StateRule,
    format_bytes,
    ledger,
    nbytes_of,
    state_bytes_of_rank,
)

# ----------------------------------------------------------------------------------------------- example

# ZeRO, arXiv:1910.02054, table 1: GB for each device at stages 1, 2 and 3, as printed.
TABLE_1 = {
    7_500_000_000: {
        1: ("120", "120", "120"),
        4: ("52.5", "41.3", "30"),
        16: ("35.6", "21.6", "7.5"),
        64: ("31.4", "16.6", "1.88"),
        256: ("30.4", "15.4", "0.47"),
        1024: ("30.1", "15.1", "0.12"),
    },
    128_000_000_000: {
        1: ("2048", "2048", "2048"),
        4: ("896", "704", "512"),
        16: ("608", "368", "128"),
        64: ("536", "284", "32"),
        256: ("518", "263", "8"),
        1024: ("513", "257", "2"),
    },
    1_000_000_000_000: {
        1: ("16000", "16000", "16000"),
        4: ("7000", "5500", "4000"),
        16: ("4750", "2875", "1000"),
        64: ("4187", "2218", "250"),
        256: ("4046", "2054", "62.5"),
        1024: ("4011", "2013", "15.6"),
    },
}
CELLS = [
    (numel, world_size, stage, printed)
    for numel, rows in TABLE_1.items()
    for world_size, row in rows.items()
    for stage, printed in enumerate(row, start=1)
]


@pytest.mark.parametrize(("numel", "world_size", "stage", "printed"), CELLS)
def test_every_cell_of_table_1_of_the_zero_paper(
    numel: int, world_size: int, stage: int, printed: str
) -> None:
    digits = len(printed.partition(".")[2])
    truncated = numel > 7_500_000_000  # the 7.5B cells are rounded, the others cut off
    total_bytes = ledger(numel, world_size, stage).total_bytes
    ours = format_bytes(total_bytes, "GB", digits=digits, truncate=truncated)
    assert ours.replace(",", "") == f"{printed} GB"


def test_table_1_needs_both_ways_of_rounding() -> None:
    # 41.25 is printed as 41.3, 4187.5 as 4187: no single rule gives both.
    assert format_bytes(ledger(7_500_000_000, 4, 2).total_bytes, "GB", digits=1, truncate=True) == "41.2 GB"
    assert format_bytes(ledger(10**12, 64, 1).total_bytes, "GB", digits=0) == "4,188 GB"


def test_each_stage_shards_one_part_more() -> None:
    numel = 1000
    assert ledger(numel, 4, 0) == Ledger(2000, 2000, 12000)
    assert ledger(numel, 4, 1) == Ledger(2000, 2000, 3000)
    assert ledger(numel, 4, 2) == Ledger(2000, 500, 3000)
    assert ledger(numel, 4, 3) == Ledger(500, 500, 3000)


def test_sixteen_bytes_are_not_always_the_same_sixteen() -> None:
    assert MIXED_16.total == FP32_16.total == 16
    # Stage 1 divides only what is the optimizer's: 12 bytes of one, 8 of the other.
    assert ledger(100, 4, 1, MIXED_16).total_bytes == 100 * (4 + 12 / 4)
    assert ledger(100, 4, 1, FP32_16).total_bytes == 100 * (8 + 8 / 4)


def test_the_other_conventions_are_those_of_megatron() -> None:
    # Its distributed optimizer shards the optimizer's bytes: 18 become 6+12/d, and 20 become 4+16/d.
    assert ledger(100, 8, 0, FP32_GRADS_18).total_bytes == 1800
    assert ledger(100, 8, 1, FP32_GRADS_18).total_bytes == 100 * (6 + 12 / 8)
    assert ledger(100, 8, 0, BOTH_GRADS_20).total_bytes == 2000
    assert ledger(100, 8, 1, BOTH_GRADS_20).total_bytes == 100 * (4 + 16 / 8)


@pytest.mark.parametrize(
    ("nbytes", "options", "printed"),
    [
        (0, {}, "0 B"),
        (999, {}, "999 B"),
        (1000, {}, "1.00 kB"),
        (643_289_612, {}, "643.29 MB"),
        (10**9, {}, "1.00 GB"),
        (2 * 10**15, {}, "2,000.00 TB"),
        (85_899_345_920, {"unit": "GB"}, "85.90 GB"),
        (85_899_345_920, {"unit": "GiB"}, "80.00 GiB"),
        (2**20, {"unit": "KiB", "digits": 0}, "1,024 KiB"),
        (41_250_000_000, {"unit": "GB", "digits": 1}, "41.3 GB"),
        (41_250_000_000, {"unit": "GB", "digits": 1, "truncate": True}, "41.2 GB"),
        (2.5, {"unit": "B"}, "3 B"),
    ],
)
def test_bytes_in_print(nbytes: float, options: dict[str, Any], printed: str) -> None:
    assert format_bytes(nbytes, **options) == printed


def test_a_rule_may_keep_its_tensors_in_a_dtype_of_its_own() -> None:
    assert StateRule(2, 4).nbytes(10, itemsize=2) == 2 * 10 * 2 + 4
    assert StateRule(2, 4, itemsize=4).nbytes(10, itemsize=2) == 2 * 10 * 4 + 4
    assert MIXED_ADAMW.nbytes(10, itemsize=2) == 10 * MIXED_16.optimizer + 4


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ledger(-1, 1, 0), "at least 0 parameters, got -1"),
        (lambda: ledger(1, 0, 0), "world_size must be at least 1 rank, got 0"),
        (lambda: ledger(1, 1, 4), "a ZeRO stage is 0 .* got 4"),
        (lambda: ledger(1, 1, 1, "16"), "unknown convention '16'; choose mixed-16, .* or pass a Convention"),
        (
            lambda: Convention(2, 2, 4).master,
            "4 bytes for the optimizer leave no room for Adam's two moments",
        ),
        (lambda: format_bytes(1, "Gb"), "unknown unit 'Gb'; choose one of auto, B, kB"),
        (lambda: nbytes_of(ParamSpec(1, "float31")), "unknown dtype 'float31'; known are"),
        (
            lambda: state_bytes_of_rank(sorted_greedy([1], 1), [ParamSpec(1)], "adam"),
            "unknown optimizer 'adam'; choose one of SGD, .* or pass a StateRule",
        ),
        (
            lambda: state_bytes_of_rank(sorted_greedy([1], 1), [ParamSpec(2)]),
            "for 1 parameters of 1 elements; got 1 of 2",
        ),
    ],
)
def test_mistakes_are_named(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


# ---------------------------------------------------------------------------------------------- property


@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.booleans()), max_size=20),
    st.integers(1, 16),
    st.sampled_from(list(STATE_RULES)),
)
def test_sharding_loses_no_state_and_a_cut_costs_one_set_of_scalars(
    sizes: list[tuple[int, bool]], world_size: int, optimizer: str
) -> None:
    params = [ParamSpec(numel, trainable=trainable) for numel, trainable in sizes]
    rule = STATE_RULES[optimizer]
    stateful = [i for i, param in enumerate(params) if param.trainable or optimizer == "Adagrad"]
    unsharded = sum(rule.tensors * 4 * params[i].numel + rule.scalar_bytes for i in stateful)
    numels = [param.numel for param in params]
    whole = state_bytes_of_rank(sorted_greedy(numels, world_size), params, optimizer)
    assert sum(whole) == unsharded
    cut = even(numels, world_size)
    extra = sum(len(cut.pieces_of_param[i]) - 1 for i in stateful) * rule.scalar_bytes
    assert sum(state_bytes_of_rank(cut, params, optimizer)) == unsharded + extra


# ------------------------------------------------------------------------------------------------ parity

OPTIONS: dict[str, dict[str, Any]] = {
    "momentum": {"momentum": 0.9},
    "amsgrad": {"amsgrad": True},
    "centered": {"centered": True},
}


@pytest.mark.parametrize("name", STATE_RULES)
def test_state_is_what_torchs_optimizer_keeps_after_a_step(name: str) -> None:
    params = [
        torch.nn.Parameter(torch.randn(shape, dtype=dtype), requires_grad=trainable)
        for shape, dtype, trainable in [
            ((3, 4), torch.float32, True),
            ((5,), torch.bfloat16, True),
            ((), torch.float64, True),
            ((0, 2), torch.float32, True),
            ((6,), torch.float32, False),
        ]
    ]
    optimizer_class, *options = name.split("+")
    chosen = {key: value for option in options for key, value in OPTIONS.get(option, {}).items()}
    if name == "Muon+AdamW":
        optimizers = [torch.optim.Muon(params[:1]), torch.optim.AdamW(params[1:])]
    else:
        optimizers = [getattr(torch.optim, optimizer_class)(params, lr=0.01, **chosen)]
    for param in params:
        if param.requires_grad:
            param.grad = torch.ones_like(param)
    for optimizer in optimizers:
        optimizer.step()
    kept = sum(
        value.nbytes
        for optimizer in optimizers
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )
    specs = [
        ParamSpec(
            param.numel(),
            str(param.dtype).removeprefix("torch."),
            trainable=param.requires_grad,
            whole=number == 0,
        )
        for number, param in enumerate(params)
    ]
    assert sum(state_bytes_of_rank(plan_partition("sorted_greedy", specs, 3), specs, name)) == kept
