"""Bytes that a rank holds: on average by ZeRO stage and convention, and exactly for a partition.

`ledger` is the formula of the ZeRO paper: every part that a stage shards is divided by the number of ranks.
`state_bytes_of_rank` counts the optimizer state on each rank of a partition; the difference between the two
is what the partition loses. `format_bytes` prints both. `activations` and `memory` count everything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_DOWN, ROUND_HALF_UP, Decimal
from math import ceil

from zero_ref.plan.layout import ITEMSIZE
from zero_ref.plan.partition import ParamSpec, Partition, check_world_size
from zero_ref.simulator._checks import check_name


@dataclass(frozen=True)
class Convention:
    """A way to count the bytes that each parameter of the model costs.

    >>> MIXED_16.total, MIXED_16.summary
    (16, 'fp16 or bf16 parameters and gradients; fp32 copy, momentum and variance')
    >>> MIXED_16.master, FP32_16.master
    (4, 0)

    Args:
        params, grads: bytes of the copies that the forward and backward passes use.
        optimizer: bytes of everything that only the optimizer needs, which stage 1 shards. The optimizer is
            Adam, with its two moments.
        summary: in words.
        moment: bytes of each of the two moments.
    """

    params: int
    grads: int
    optimizer: int
    summary: str = ""
    moment: int = 4

    @property
    def total(self) -> int:
        return self.params + self.grads + self.optimizer

    @property
    def master(self) -> int:
        """The bytes of `optimizer` that are copies of parameters and gradients: all but the two moments.

        Raises:
            ValueError: the two moments are more than `optimizer`.
        """
        if self.optimizer < 2 * self.moment:
            raise ValueError(
                f"{self.optimizer} bytes for the optimizer leave no room for Adam's two moments of "
                f"{self.moment} bytes each: count them in `optimizer`, or pass a smaller `moment`."
            )
        return self.optimizer - 2 * self.moment


MIXED_16 = Convention(2, 2, 12, "fp16 or bf16 parameters and gradients; fp32 copy, momentum and variance")
"""2+2+12: the ZeRO paper's count of mixed-precision Adam (section 3.1), and of its Table 1."""

FP32_16 = Convention(4, 4, 8, "fp32 parameters and gradients; fp32 momentum and variance")
"""4+4+8: plain Adam in fp32. 16 bytes too, but only 8 of them are the optimizer's, so stage 1 saves less."""

FP32_GRADS_18 = Convention(2, 4, 12, "bf16 parameters; fp32 gradients; fp32 copy, momentum and variance")
"""2+4+12: gradients summed in fp32 (Megatron-LM: 18 for one rank, 6+12/d for d ranks)."""

BOTH_GRADS_20 = Convention(2, 2, 16, "fp16 parameters, gradients; fp32 copy, gradients, momentum, variance")
"""2+2+16: fp16 gradients, and their fp32 copy for the step (Megatron-LM: 20 for one rank, 4+16/d)."""

CONVENTIONS = {
    "mixed-16": MIXED_16,
    "fp32-16": FP32_16,
    "fp32-grads-18": FP32_GRADS_18,
    "both-grads-20": BOTH_GRADS_20,
}
"""The conventions in use. A table of bytes cannot be checked unless it says which one it uses."""


def convention_named(convention: str | Convention) -> Convention:
    """A convention by its name in CONVENTIONS.

    >>> convention_named("both-grads-20").total
    20

    Raises:
        ValueError: the name is unknown.
    """
    if isinstance(convention, Convention):
        return convention
    if convention not in CONVENTIONS:
        raise ValueError(
            f"unknown convention {convention!r}; choose {', '.join(CONVENTIONS)}, or pass a Convention."
        )
    return CONVENTIONS[convention]


@dataclass(frozen=True)
class Ledger:
    """Bytes on one rank, on average over the ranks."""

    parameter_bytes: float
    gradient_bytes: float
    optimizer_bytes: float

    @property
    def total_bytes(self) -> float:
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes


def ledger(numel: int, world_size: int, stage: int, convention: str | Convention = MIXED_16) -> Ledger:
    """Count the memory of one of `world_size` ranks at a ZeRO stage, if the sharded parts divide evenly.

    Stage 0 is plain data parallelism: everything is on every rank. Stage 1 divides the optimizer's bytes by
    the number of ranks, stage 2 the gradients' too, stage 3 the parameters' too. Activations, communication
    buffers and fragmentation are not counted (`memory` counts the first two).

    >>> books = ledger(7_500_000_000, world_size=64, stage=1)
    >>> format_bytes(books.total_bytes, "GB", digits=1), format_bytes(books.optimizer_bytes, "GB", digits=1)
    ('31.4 GB', '1.4 GB')

    Args:
        numel: parameters of the model.
        convention: the name of one of CONVENTIONS, or a Convention.
    Raises:
        ValueError: `numel` is negative, `world_size` is below 1, `stage` is not 0 to 3, or the convention is
            unknown.
    Source:
        ZeRO (arXiv:1910.02054), sections 3.1 and 5, figure 1 and table 1: with K the optimizer's bytes,
        P_os = 4 + K/N, P_os+g = 2 + (2+K)/N, P_os+g+p = (4+K)/N bytes a parameter.
    """
    if numel < 0:
        raise ValueError(f"a model has at least 0 parameters, got {numel}.")
    check_world_size(world_size)
    check_stage(stage)
    convention = convention_named(convention)
    return Ledger(
        parameter_bytes=numel * convention.params / (world_size if stage >= 3 else 1),
        gradient_bytes=numel * convention.grads / (world_size if stage >= 2 else 1),
        optimizer_bytes=numel * convention.optimizer / (world_size if stage >= 1 else 1),
    )


def check_stage(stage: int) -> None:
    """Raise a ValueError if a stage is not one of ZeRO's."""
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"a ZeRO stage is 0 (nothing sharded), 1, 2 or 3; got {stage!r}.")


EIGHT_BIT_BLOCK = 256
"""Elements of a moment in 8 bits that share a float32 scale, by which their codes are multiplied.

Source: `absmax1` and `absmax2` in bitsandbytes/optim/optimizer.py, at 51294d9 (early versions had blocks of
    2,048), and `block_size` of AdamW8bit in torchao/optim/adam.py, at 0372e5f; both after arXiv:2110.02861.
    Tensors of fewer than 4,096 elements keep their dtype in both, which is not counted.
"""

EIGHT_BIT_BYTES = 1 + 4 / EIGHT_BIT_BLOCK
"""Bytes of an element of such a moment: its code, and its part of the scale."""


@dataclass(frozen=True)
class StateRule:
    """The state that an optimizer keeps for each tensor that it updates.

    >>> StateRule(tensors=2, scalar_bytes=4).nbytes(numel=10, itemsize=2)      # Adam on ten bfloat16 elements
    44
    >>> StateRule(tensors=2, scalar_bytes=4).in_8_bits().with_master().nbytes(numel=512, itemsize=2)
    3092

    The last number is 4 bytes an element for the copy, 2 for the moments, 4 for each of their 4 blocks, and 4
    for `step`.

    Args:
        tensors: the number of tensors of the parameter's size and dtype.
        scalar_bytes: of the zero-dimensional tensors beside them, such as `step`; float32 each.
        for_frozen: the optimizer keeps state for frozen parameters too, which it never updates.
        itemsize: bytes of an element of the tensors; None for the parameter's own dtype, as torch.optim.
        of_whole: the rule for parameters that are `whole`, if another optimizer class steps them, as Muon
            beside AdamW; None for the same rule.
        eight_bit: so many of the tensors have 8 bits, and a scale for each EIGHT_BIT_BLOCK elements.
    """

    tensors: int
    scalar_bytes: int
    for_frozen: bool = False
    itemsize: int | None = None
    of_whole: StateRule | None = None
    eight_bit: int = 0

    def of(self, param: ParamSpec) -> StateRule:
        """The rule for this parameter."""
        return self.of_whole if self.of_whole is not None and param.whole else self

    def with_master(self, itemsize: int = 4) -> StateRule:
        """The rule beside 16-bit parameters: one more tensor, the copy, and this size of element.

        Tensors of 8 bits stay so.
        """
        of_whole = self.of_whole and self.of_whole.with_master(itemsize)
        return replace(self, tensors=self.tensors + 1, itemsize=itemsize, of_whole=of_whole)

    def in_8_bits(self) -> StateRule:
        """The rule with all tensors in 8 bits."""
        return replace(self, eight_bit=self.tensors)

    def element_bytes(self, itemsize: int) -> float:
        """Bytes of one element of all tensors, whole unless some have scales."""
        wide = (self.tensors - self.eight_bit) * (self.itemsize or itemsize)
        return wide + self.eight_bit * EIGHT_BIT_BYTES

    def nbytes(self, numel: int, itemsize: int) -> int:
        """Bytes of so many elements. Of scales they have their part, and the sum is rounded up."""
        return ceil(numel * self.element_bytes(itemsize)) + self.scalar_bytes


STATE_RULES: dict[str, StateRule] = {
    "SGD": StateRule(0, 0),
    "SGD+momentum": StateRule(1, 0),
    "Adam": StateRule(2, 4),
    "Adam+amsgrad": StateRule(3, 4),
    "AdamW": StateRule(2, 4),
    "AdamW+amsgrad": StateRule(3, 4),
    "NAdam": StateRule(2, 8),
    "RAdam": StateRule(2, 4),
    "Adamax": StateRule(2, 4),
    "Adadelta": StateRule(2, 4),
    "Adagrad": StateRule(1, 4, for_frozen=True),  # made in its constructor, not in the first step
    "RMSprop": StateRule(1, 4),
    "RMSprop+momentum": StateRule(2, 4),
    "RMSprop+centered": StateRule(2, 4),
    "Rprop": StateRule(2, 4),
    "ASGD": StateRule(1, 12),
    "Muon+AdamW": StateRule(2, 4, of_whole=StateRule(1, 0)),
}
"""The elementwise optimizers of torch.optim, with the options that add state; and Muon for parameters that
are `whole`, with AdamW for the others.

Counted from torch's own optimizers after a step (tests/simulator/test_ledger.py). The scalars are
float32 unless torch's default dtype is float64. For an optimizer of your own pass a `StateRule` wherever a
name is taken.
"""

MIXED_ADAMW = StateRule(3, 4, itemsize=4)
"""Adam beside 16-bit parameters: an fp32 copy of the parameter, momentum and variance, as MIXED_16 counts."""

_ITEMSIZE = ITEMSIZE | {"bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8}
# Integers cannot be trained, but a frozen parameter may hold them (quantised weights).


def nbytes_of(param: ParamSpec) -> int:
    """Bytes of one parameter.

    >>> nbytes_of(ParamSpec(10, dtype="bfloat16"))
    20

    Raises:
        ValueError: its dtype is unknown.
    """
    return param.numel * itemsize_of(param.dtype)


def itemsize_of(dtype: str) -> int:
    """Bytes an element, by the name of the dtype.

    Raises:
        ValueError: the name is unknown.
    """
    if dtype not in _ITEMSIZE:
        raise ValueError(f"unknown dtype {dtype!r}; known are {', '.join(_ITEMSIZE)}.")
    return _ITEMSIZE[dtype]


def state_rule(optimizer: str | StateRule) -> StateRule:
    """The rule of an optimizer, by its name in STATE_RULES.

    Raises:
        ValueError: the name is unknown.
    """
    if isinstance(optimizer, StateRule):
        return optimizer
    check_name("optimizer", optimizer, STATE_RULES, ", or pass a StateRule")
    return STATE_RULES[optimizer]


def check_fits(partition: Partition, params: Sequence[ParamSpec]) -> None:
    """Raise a ValueError if the partition was made for other parameters."""
    if tuple(param.numel for param in params) != partition.numels:
        raise ValueError(
            f"the partition is for {len(partition.numels)} parameters of {sum(partition.numels):,} elements; "
            f"got {len(params)} of {sum(param.numel for param in params):,}."
        )


def state_bytes_of_rank(
    partition: Partition, params: Sequence[ParamSpec], optimizer: str | StateRule = "AdamW"
) -> tuple[int, ...]:
    """Bytes of optimizer state on each rank, after its first step.

    Unlike the average of `ledger`, this counts the slices that each rank owns, and the scalars of each slice.
    Frozen parameters have no state, except under Adagrad.

    >>> from zero_ref.plan.rules import even, sorted_greedy
    >>> params = [ParamSpec(1000), ParamSpec(24)]
    >>> state_bytes_of_rank(sorted_greedy([1000, 24], 2), params)        # 2 tensors x 4 bytes, and `step`
    (8004, 196)
    >>> state_bytes_of_rank(even([1000, 24], 2), params)                 # rank 1 owns two slices: two `step`s
    (4100, 4104)

    Args:
        partition: who owns what.
        params: in registration order, the ones that `partition` was made for.
        optimizer: a name in STATE_RULES, or a rule.
    Raises:
        ValueError: the optimizer is unknown, or `params` is not what `partition` was made for.
    """
    rule = state_rule(optimizer)
    check_fits(partition, params)
    rules = [rule.of(param) for param in params]
    has_state = [param.trainable or its.for_frozen for param, its in zip(params, rules)]
    of_piece: list[float] = [its.scalar_bytes if has else 0 for its, has in zip(rules, has_state)]
    of_element = [
        its.element_bytes(itemsize_of(param.dtype)) if has else 0
        for param, its, has in zip(params, rules, has_state)
    ]
    return tuple(map(ceil, partition.totals(of_element, of_piece)))


UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12} | {
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
"""Bytes in each unit. A GiB is 7% more than a GB: 80 GiB of memory hold 85.9 GB."""


def format_bytes(nbytes: float, unit: str = "auto", *, digits: int = 2, truncate: bool = False) -> str:
    """Bytes in a unit, with the unit's name.

    >>> format_bytes(85_899_345_920, "GB"), format_bytes(85_899_345_920, "GiB", digits=0)
    ('85.90 GB', '80 GiB')
    >>> format_bytes(41.25e9, "GB", digits=1), format_bytes(41.25e9, "GB", digits=1, truncate=True)
    ('41.3 GB', '41.2 GB')

    Args:
        unit: a name in UNITS, or "auto" for the largest of B, kB, MB, GB and TB in which it is 1 or more.
        digits: after the point; bytes ("B") get none.
        truncate: drop further digits instead of rounding half up.
    Raises:
        ValueError: the unit is unknown.
    """
    if unit == "auto":
        unit = next((name for name in ("TB", "GB", "MB", "kB") if abs(nbytes) >= UNITS[name]), "B")
    if unit not in UNITS:
        raise ValueError(f"unknown unit {unit!r}; choose one of auto, {', '.join(UNITS)}.")
    # Decimal, because round() rounds halves to even: 41.25 would become 41.2.
    smallest = Decimal(1).scaleb(0 if unit == "B" else -digits)
    rounded = (Decimal(nbytes) / UNITS[unit]).quantize(smallest, ROUND_DOWN if truncate else ROUND_HALF_UP)
    return f"{rounded:,} {unit}"
