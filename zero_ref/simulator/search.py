"""Which way to train a model on a cluster: every recipe, batch and checkpointing that fits, and the best.

Given the tokens of an update, a rank's share of them can be computed in one go or in several (accumulation),
under several recipes, with more or less kept for backward. `search` looks at all of these. Memory comes
first, because it takes no playing; what may fit is then timed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from zero_ref.simulator import spread
from zero_ref.simulator.activations import kinds_apart
from zero_ref.simulator.memory import Memory
from zero_ref.simulator.play import Played, play
from zero_ref.simulator.recipe import recipe
from zero_ref.simulator.scenario import Scenario
from zero_ref.simulator.schedule import Schedule

SEARCHED = ("ddp", "zero-even", "zero-2", "zero-3")
"""The strategies that are tried: `zero` and `zero-bucket` hold and send as much as `zero-even`, or more. On
one rank all are one program, and the first is tried alone."""

REMEDIES: dict[str, tuple[dict[str, Any], str]] = {
    "--fused-loss": ({"fused_loss": True}, ""),
    "--offload state": ({"offload": "state"}, ""),
    "--offload gradients": ({"offload": "gradients"}, ""),
    "--offload in-backward": ({"offload": "in_backward"}, "without clipping by the norm of all gradients"),
    "--states-8": ({"states_8": True}, "moments in 8 bits"),
    "--no-masters": ({"masters": False}, "parameters and state in 16 bits alone"),
    "--lora 16": ({"lora": 16}, "adapters alone are trained"),
    "--fused-loss --offload in-backward": (
        {"fused_loss": True, "offload": "in_backward"},
        "without clipping by the norm of all gradients",
    ),
    "--no-masters --fused-loss --offload in-backward": (
        {"masters": False, "fused_loss": True, "offload": "in_backward"},
        "in 16 bits alone, without clipping by the norm of all gradients",
    ),
}
"""What can make a run fit, by the words of a command line: the fields that say so, and what they change."""

ENOUGH = {
    "--offload gradients": ("--offload state",),
    "--fused-loss --offload in-backward": ("--fused-loss", "--offload in-backward"),
    "--no-masters --fused-loss --offload in-backward": (
        *("--fused-loss", "--offload in-backward", "--no-masters"),
        "--fused-loss --offload in-backward",
    ),
}
"""The remedies beside which another is not tried: it does the same and more."""

MOST_RANKS = 16
"""So many times as many ranks are tried, if nothing else makes a run fit."""

NEAR = 1 / 16
"""Accumulation is a whole number of batches: an update may have this share of the tokens more or less."""

VARIED = ("batch", "accumulation", "no_sync", "all_reduce_last", "checkpointing", "shard_group")
"""The fields of a scenario that a search sets."""

STEADY = 2
"""Batches of an update that are played. Each further one takes as long as the last of these."""


@dataclass(frozen=True)
class Candidate:
    """One way to train.

    Args:
        memory: of the fullest rank.
        fits: None if the interval around its memory holds the device's, or that is not known.
        update_ms: of one update; None where the memory is too small to ask.
    """

    scenario: Scenario
    strategy: str
    memory: Memory
    fits: bool | None
    update_ms: float | None

    @property
    def peak_bytes(self) -> float:
        """The most that the fullest rank's device holds at one time."""
        return self.memory.peak_bytes

    @property
    def tokens(self) -> int:
        """The tokens of an update, over all ranks."""
        return self.scenario.tokens * self.scenario.world_size

    @property
    def tokens_per_second(self) -> float:
        """The tokens a second of all ranks together.

        Raises:
            ValueError: it was not timed.
        """
        if self.update_ms is None:
            raise ValueError(f"{self.strategy} does not fit, so it was not timed.")
        return 1e3 * self.tokens / self.update_ms

    @property
    def is_unlikely(self) -> bool:
        """Whether more memory is predicted than the device has, though the interval has it in it."""
        memory_gb = self.scenario.cluster.device.memory_gb
        return self.fits is None and memory_gb is not None and self.peak_bytes > 1e9 * memory_gb

    @property
    def utilisation(self) -> float:
        """Model FLOPs utilisation, as of a `SimulatedRun`.

        Raises:
            ValueError: it was not timed.
        """
        return self.scenario.utilisation_at(1e3 * self.tokens / self.tokens_per_second)

    @property
    def memory_interval(self) -> tuple[float, float]:
        """Bytes between which the real memory is expected."""
        return spread.interval_of_memory(self.scenario.program).around(self.peak_bytes)

    @property
    def rate_interval(self) -> tuple[float, float]:
        """Tokens a second between which the real rate is expected."""
        low, high = spread.around(1.0, self.scenario.program)
        return self.tokens_per_second / high, self.tokens_per_second / low


def _rate(one: Candidate) -> float:
    """Equal speeds differ in their last digits, on each machine in others; these are left out."""
    return float(f"{one.tokens_per_second:.9g}")


@dataclass(frozen=True)
class LeftOut:
    """The candidates of a strategy that do not fit, in a few numbers.

    Args:
        count: of them.
        least: the one that needs the least memory.
        most_of_it: what takes most of that, an item of `Memory.peak_items`.
    """

    count: int
    least: Candidate
    most_of_it: str


@dataclass(frozen=True)
class Found:
    """The result of a search.

    Args:
        tokens: that were asked for.
        candidates: all whose memory was computed, in the order in which they were tried.
        larger: by strategy, how many were not looked at: the same with a smaller batch does not fit.
        impossible: strategies that cannot be, and why.
    """

    tokens: int
    candidates: Sequence[Candidate]
    larger: Mapping[str, int]
    impossible: Mapping[str, str]

    @property
    def tried(self) -> int:
        """All candidates, those included that were not looked at."""
        return len(self.candidates) + sum(self.larger.values())

    @cached_property
    def listed(self) -> list[Candidate]:
        """Candidates that fit, then those that may, the fastest first; of equally fast ones the leanest."""
        may_fit = [one for one in self.candidates if one.fits is not False]
        return sorted(may_fit, key=lambda one: (one.fits is None, -_rate(one), one.peak_bytes))

    @cached_property
    def best(self) -> list[Candidate]:
        """The Pareto list in the same order: nothing that is as fast needs as little memory."""
        kept: list[Candidate] = []
        for one in sorted(self.listed, key=lambda one: (-_rate(one), one.peak_bytes)):
            if not kept or one.peak_bytes < kept[-1].peak_bytes:
                kept.append(one)
        return sorted(kept, key=self.listed.index)

    @property
    def nearest(self) -> Candidate | None:
        """The candidate that needs the least memory; None if none was tried."""
        return min(self.candidates, key=lambda one: one.peak_bytes, default=None)

    def left_out(self, strategy: str) -> LeftOut | None:
        """The runs that do not fit under a strategy; None if none was left out."""
        too_large = [one for one in self.candidates if one.strategy == strategy and one.fits is False]
        if not too_large:
            return None
        least = min(too_large, key=lambda one: one.peak_bytes)
        items = least.memory.peak_items
        count = len(too_large) + self.larger.get(strategy, 0)
        return LeftOut(count, least, max(items, key=lambda item: items[item]))


def search(scenario: Scenario, tokens: int, strategies: Sequence[str] = SEARCHED) -> Found:
    """Try every way to compute so many tokens an update.

    >>> from zero_ref.simulator.cluster import cluster
    >>> from zero_ref.simulator.models import MODELS
    >>> found = search(Scenario(MODELS["gpt2"], cluster("h100-ib"), world_size=8), tokens=8 * 4 * 1024)
    >>> sorted({(one.scenario.batch, one.strategy) for one in found.best})[-1][0]
    4

    Args:
        scenario: the model, the cluster, the number of ranks and all that is not searched: sequence, dtypes,
            optimizer. What it has in VARIED is not looked at.
        tokens: of an update, over all ranks. A rank computes whole sequences, so an update has about so many:
            see `Candidate.tokens`.
    Raises:
        ValueError: there is no token, or no strategy of such a name.
    """
    if tokens < 1:
        raise ValueError(f"an update has at least 1 token, got {tokens}.")
    sequences = max(1, round(tokens / (scenario.tokens_of_sequence * scenario.world_size)))
    if scenario.world_size == 1:
        strategies = strategies[:1]
    candidates: list[Candidate] = []
    larger: dict[str, int] = {}
    impossible: dict[str, str] = {}
    for strategy in strategies:
        for group in groups(scenario, strategy):
            try:
                found, more = _Planned(replace(scenario, shard_group=group), strategy).candidates(sequences)
            except ValueError as error:
                impossible[strategy] = str(error)
                continue
            candidates += found
            larger[strategy] = larger.get(strategy, 0) + more
    return Found(tokens, candidates, larger, impossible)


@dataclass(frozen=True)
class Remedy:
    """A change with which a run surely fits.

    Args:
        words: that are added to the command line, or the number of ranks that replaces its own.
        best: the fastest way that then fits.
        changes: what is then trained in another way, in words; "" for the same arithmetic.
    """

    words: str
    best: Candidate
    changes: str = ""

    @property
    def tokens_per_second_of_gpu(self) -> float:
        """The tokens a second of each GPU: what a token costs is one over this."""
        return self.best.tokens_per_second / self.best.scenario.world_size


def remedies(scenario: Scenario, tokens: int) -> list[Remedy]:
    """What makes a run fit that does not: REMEDIES, and more ranks, the one with the cheapest tokens first.

    >>> from zero_ref.simulator.cluster import cluster
    >>> from zero_ref.simulator.models import MODELS
    >>> alone = Scenario(MODELS["gpt2-xl"], cluster("rtx4090-10gbe"), world_size=1)
    >>> sorted(one.words for one in remedies(alone, tokens=8192))
    ['--lora 16', '--no-masters', '--offload in-backward', '--offload state', '--ranks 2']

    Args:
        scenario, tokens: as of `search`.
    """
    found: dict[str, Remedy] = {}
    for words, (fields, changes) in REMEDIES.items():
        if any(words_before in found for words_before in ENOUGH.get(words, ())):
            continue
        try:
            changed = replace(scenario, **fields)
        except ValueError:  # the model, the optimizer or the device has no such thing
            continue
        if changed != scenario and (best := _surely_fits(changed, tokens)) is not None:
            found[words] = Remedy(words, best, changes)
    ranks = 2 * scenario.world_size
    while ranks <= MOST_RANKS * scenario.world_size:
        if (best := _surely_fits(replace(scenario, world_size=ranks), tokens)) is not None:
            found["--ranks"] = Remedy(f"--ranks {ranks}", best)
            break
        ranks *= 2
    return sorted(found.values(), key=lambda one: -one.tokens_per_second_of_gpu)


def _surely_fits(scenario: Scenario, tokens: int) -> Candidate | None:
    """The fastest way that surely fits; None if no way does."""
    return next((one for one in search(scenario, tokens).listed if one.fits), None)


def groups(scenario: Scenario, strategy: str) -> tuple[int | None, ...]:
    """The shard groups to try: all ranks, and a node's where there are several nodes.

    >>> from zero_ref.simulator.cluster import cluster
    >>> from zero_ref.simulator.models import MODELS
    >>> scenario = Scenario(MODELS["gpt2"], cluster("h100-ib"), world_size=16)
    >>> groups(scenario, "zero-2"), groups(scenario, "ddp")
    ((None, 8), (None,))
    """
    of_node, ranks = scenario.cluster.ranks_per_node, scenario.world_size
    fits = 1 < of_node < ranks and ranks % of_node == 0
    if recipe(strategy).in_groups and fits:
        return None, of_node
    return (None,)


def micro_batches(sequences: int) -> list[tuple[int, int]]:
    """Return the ways to compute so many sequences: (batch, number of batches), small batches first.

    Batches are the divisors and the powers of two. With a power of two an update may have some sequences
    more or less, up to NEAR of them.

    >>> micro_batches(6)
    [(1, 6), (2, 3), (3, 2), (6, 1)]
    >>> micro_batches(61)
    [(1, 61), (2, 30), (4, 15), (8, 8), (16, 4), (32, 2), (61, 1)]
    """
    batches = {1 << power for power in range(sequences.bit_length())} | set(_divisors(sequences))
    pairs = [(batch, round(sequences / batch)) for batch in sorted(batches)]
    return [pair for pair in pairs if abs(pair[0] * pair[1] - sequences) <= NEAR * sequences]


def _divisors(number: int) -> Iterator[int]:
    low = 1
    while low * low <= number:
        if number % low == 0:
            yield low
            yield number // low
        low += 1


_ScheduleKey = tuple[int, bool]
"""(accumulation, `no_sync`): all that a search varies and on which a schedule depends."""


@dataclass(frozen=True)
class _Planned:
    """A strategy in groups of one size: its schedules, each made once and played for every batch."""

    scenario: Scenario
    strategy: str
    schedules: dict[_ScheduleKey, Schedule] = field(default_factory=dict)
    played: dict[_ScheduleKey, Played] = field(default_factory=dict)

    def candidates(self, sequences: int) -> tuple[list[Candidate], int]:
        """Return the candidates for so many sequences a rank, and the number of those not looked at."""
        found: list[Candidate] = []
        larger = 0
        kinds: Sequence[str] = kinds_apart(self.scenario.attention)
        if self.scenario.kernels is None:
            kinds = [self.scenario.checkpointing]
        waits = (False, True) if recipe(self.strategy).in_groups else (False,)
        for checkpointing, no_sync in itertools.product(kinds, waits):
            too_large = False
            for batch, accumulation in micro_batches(sequences):
                if no_sync and accumulation == 1:
                    continue
                if too_large and accumulation > 1:  # an update in one go may do without accumulated gradients
                    larger += 1
                    continue
                one = self.scenario.like(
                    batch=batch,
                    accumulation=accumulation,
                    checkpointing=checkpointing,
                    no_sync=no_sync,
                    all_reduce_last=self.in_groups and accumulation > 1 and not no_sync,
                )
                found.append(self.candidate(one))
                too_large = found[-1].fits is False
        return found, larger

    @property
    def in_groups(self) -> bool:
        """Stage 3 in groups, which need not all-reduce in every pass: to do so once is never worse."""
        return recipe(self.strategy).stage == 3 and self.scenario.shard_group is not None

    def candidate(self, scenario: Scenario) -> Candidate:
        """Its memory, and its time if it may fit."""
        memories = scenario.memory(self.strategy, self.schedule(scenario))
        memory = max(memories, key=lambda one: one.peak_bytes)
        device = scenario.machine.device
        fits = None
        if device.memory_gb is not None:
            fits = spread.fits(memory.peak_bytes, device.memory_gb * 1e9, scenario.program)
        ms = None if fits is False else self.update_ms(scenario)
        return Candidate(scenario, self.strategy, memory, fits, ms)

    def update_ms(self, scenario: Scenario) -> float:
        """The time of an update. From STEADY on each further batch takes as long as the one before it."""
        accumulation = scenario.accumulation
        if accumulation > STEADY:
            fewer, more = (
                self.update_ms(scenario.like(accumulation=count)) for count in (STEADY - 1, STEADY)
            )
            return more + (accumulation - STEADY) * (more - fewer)
        workload = scenario.workload_of(self.strategy)
        key = accumulation, scenario.no_sync
        if key in self.played:  # the calls keep their prices
            return self.played[key].on(scenario.machine, workload).iteration_ms
        self.played[key] = play(self.schedule(scenario), scenario.machine, workload)
        return self.played[key].iteration_ms

    def schedule(self, scenario: Scenario) -> Schedule:
        """The schedule of as many batches, STEADY at most: more of them hold no more at a time."""
        count = min(scenario.accumulation, STEADY)
        key = count, scenario.no_sync
        if key not in self.schedules:
            self.schedules[key] = scenario.like(accumulation=count).schedule(self.strategy)
        return self.schedules[key]
