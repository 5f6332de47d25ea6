"""A run on paper, from a model's name to one number after the other: memory, traffic, time.

It puts the parts together as a user of PyTorch would: memory by `memory`, calls by `schedule`, time by
`play`. `zero-ref simulate` prints what comes out. Who needs another combination takes the parts themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from zero_ref.local_sgd.averaging import AveragingSchedule
from zero_ref.plan.partition import ParamSpec, Partition, plan_partition
from zero_ref.simulator.activations import CHECKPOINTING, activation_bytes, head_bytes
from zero_ref.simulator.cluster import Cluster
from zero_ref.simulator.ledger import StateRule, nbytes_of, state_rule
from zero_ref.simulator.memory import Memory, MemorySettings, average_memory, memory_of_ranks
from zero_ref.simulator.models import GPT2, Architecture, Llama, ParamShape, blocks, specs
from zero_ref.simulator.operations import WAYS
from zero_ref.simulator.play import Played, Work, play
from zero_ref.simulator.recipe import LOCAL_SGD, RECIPES, Recipe, recipe
from zero_ref.simulator.schedule import Schedule, ddp_buckets, schedule
from zero_ref.simulator.sensitivity import WhatIf, what_if
from zero_ref.simulator.shortfall import Shortfall, why_not_smaller
from zero_ref.simulator.timeline import Timeline

DTYPES = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes of a parameter in forward and backward. Beside 16 bits the optimizer keeps a copy in float32."""

LONGEST_SEQUENCE = 8192
"""Where no sequence is asked for: the model's context, but not more. Contexts of 100,000 tokens and more are
for models that were trained on shorter ones first."""


@dataclass(frozen=True)
class Scenario:
    """A model, a cluster, and how the one is trained on the other.

    >>> from zero_ref.simulator.cluster import cluster
    >>> from zero_ref.simulator.models import MODELS
    >>> scenario = Scenario(MODELS["llama3-8b"], cluster("h100-ib"), world_size=64)
    >>> run = scenario.run("zero-3")
    >>> round(run.iteration_ms), round(run.memory.total_bytes / 1e9, 1), run.fits
    (1278, 48.0, True)

    Args:
        batch: sequences that a rank computes in one go.
        sequence: tokens in each; None for the model's context, LONGEST_SEQUENCE at most.
        dtype: one of DTYPES.
        optimizer: a name in `ledger.STATE_RULES`.
        way: when updates are made, one of `operations.WAYS`, under strategies that have owners.
        bucket_bytes: of DDP's gradient buckets; None for 25 MiB after a first of 1 MiB, as DDP.
        checkpointing: one of `activations.CHECKPOINTING`. Attention scores are kept under "none" only: else
            attention is supposed to be flash attention, which PyTorch takes by itself.
        native: as `Recipe`; None for the calls of a library where the backend is NCCL, and for this
            package's own on Gloo.
        prefetch: as `Recipe`.
        period: of local-sgd, steps from one average to the next.
        gradient_group: of local-sgd, consecutive ranks that average their gradients in every step, such as
            those of a node; 1 for none.
    Raises:
        ValueError: the batch or sequence is below 1, or the dtype is unknown. (In methods) as `schedule`,
            `AveragingSchedule`, `MemorySettings` and `play`.
    """

    architecture: Architecture
    cluster: Cluster
    world_size: int
    batch: int = 1
    sequence: int | None = None
    dtype: str = "bfloat16"
    optimizer: str = "AdamW"
    way: str = "plain"
    bucket_bytes: int | None = None
    checkpointing: str = "selective"
    native: bool | None = None
    prefetch: int = 1
    period: int = 8
    gradient_group: int = 1

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"unknown dtype {self.dtype!r}; choose one of {', '.join(DTYPES)}.")
        if self.world_size < 1:
            raise ValueError(f"world_size must be at least 1 rank, got {self.world_size}.")
        if self.way not in WAYS:
            raise ValueError(f"unknown way {self.way!r}; choose one of {', '.join(WAYS)}.")
        if self.checkpointing not in CHECKPOINTING:
            raise ValueError(
                f"unknown checkpointing {self.checkpointing!r}; choose one of {', '.join(CHECKPOINTING)}."
            )
        if self.batch < 1 or self.tokens_of_sequence < 1:
            raise ValueError(
                f"batch and sequence must be at least 1, got {self.batch} and {self.tokens_of_sequence}."
            )

    @property
    def tokens_of_sequence(self) -> int:
        if self.sequence is not None:
            return self.sequence
        return min(getattr(self.architecture, "positions", 1), LONGEST_SEQUENCE)

    @property
    def tokens(self) -> int:
        """Of one rank in one iteration. What is no transformer has examples, of one token each."""
        return self.batch * self.tokens_of_sequence

    @cached_property
    def shapes(self) -> tuple[ParamShape, ...]:
        return self.architecture.shapes()

    @cached_property
    def params(self) -> list[ParamSpec]:
        return specs(self.shapes, self.dtype)

    @cached_property
    def numel(self) -> int:
        return sum(param.numel for param in self.params)

    @property
    def activation_bytes(self) -> int:
        """Of blocks, head and loss on one rank; 0 for what is no transformer, where they are not counted.

        The formula counts 16-bit activations; of 32 bits we count twice as many bytes.
        """
        if not isinstance(self.architecture, (GPT2, Llama)):
            return 0
        in_blocks = activation_bytes(
            self.architecture,
            self.batch,
            self.tokens_of_sequence,
            self.checkpointing,
            flash_attention=self.checkpointing != "none",
        )
        outside = head_bytes(self.architecture, self.batch, self.tokens_of_sequence)
        return in_blocks * DTYPES[self.dtype] // 2 + outside

    @property
    def attention_share(self) -> float:
        """What attention adds to the operations of forward and backward, as a share of the parameters'.

        >>> from zero_ref.simulator.cluster import cluster
        >>> from zero_ref.simulator.models import MODELS
        >>> round(Scenario(MODELS["llama3-8b"], cluster("h100-ib"), 8).attention_share, 2)
        0.27

        Source: `calibrate.training_flops`. Kernels that skip what a causal mask hides do half of it.
        """
        model = self.architecture
        if not isinstance(model, (GPT2, Llama)):
            return 0.0
        return 2 * model.depth * model.width * self.tokens_of_sequence / self.numel

    @property
    def work(self) -> Work:
        """A step reads value, gradient and state, and writes value and state, 4 bytes an element each."""
        step_bytes = 12 + 8 * state_rule(self.optimizer).tensors
        return Work(
            self.tokens,
            recompute=self.checkpointing == "full",
            step_bytes=step_bytes,
            attention_share=self.attention_share,
        )

    @property
    def library_calls(self) -> bool:
        """Whether stages 1 and 2 make a GPU library's calls, not this package's."""
        return self.cluster.backend == "nccl" if self.native is None else self.native

    @cached_property
    def _partitions(self) -> dict[str, Partition]:
        return {}

    def partition(self, strategy: str) -> Partition | None:
        """Who owns what under a strategy; None if it has no owners. Made once, for schedule and memory."""
        rule = recipe(strategy).partition
        if rule is None:
            return None
        if str(rule) not in self._partitions:  # strategies share a rule
            self._partitions[str(rule)] = plan_partition(rule, self.params, self.world_size)
        return self._partitions[str(rule)]

    @cached_property
    def buckets(self) -> list[list[int]]:
        """Of DDP's gradients."""
        return ddp_buckets(self.params, cap_bytes=self.bucket_bytes)

    @property
    def state(self) -> StateRule:
        """Of the optimizer: beside 16-bit parameters in float32, with a copy of them."""
        rule = state_rule(self.optimizer)
        mixed = DTYPES[self.dtype] == 2
        return replace(rule, tensors=rule.tensors + 1, itemsize=4) if mixed else rule

    @property
    def averaging(self) -> AveragingSchedule:
        """Of local-sgd."""
        return AveragingSchedule.periodic(self.period, gradient_group=self.gradient_group)

    def schedule(self, strategy: str) -> Schedule:
        """The strategy's iteration."""
        return schedule(
            self.recipe(strategy),
            self.params,
            self.world_size,
            ddp_buckets=self.buckets,
            side_stream=self.cluster.backend == "nccl",
            blocks=blocks(self.params),
            activation_bytes=self.activation_bytes,
        )

    def recipe(self, strategy: str) -> Recipe:
        """The strategy's, with what the scenario says of it; `way` only where it has owners."""
        usual = recipe(strategy)
        owners = usual.shards_by_parameter
        return recipe(
            usual,
            optimizer=self.state,
            partition=self.partition(strategy),
            way=self.way if owners else "plain",
            native=self.library_calls,
            prefetch=self.prefetch,
            averaging=usual.averaging and self.averaging,
            averaged_itemsize=4,  # the masters beside 16-bit parameters
        )

    def settings(self, strategy: str) -> MemorySettings:
        """How the strategy keeps the model; gradients are views of DDP's buckets."""
        plan = RECIPES[strategy]
        return MemorySettings(
            plan.stage,
            convention="mixed-16" if DTYPES[self.dtype] == 2 else None,
            optimizer=self.optimizer,
            gradient_as_bucket_view=True,
            bucket_bytes=max(
                (sum(nbytes_of(self.params[number]) for number in bucket) for bucket in self.buckets),
                default=0,
            ),
            gathered_units=1 + self.prefetch,
            flat=plan.flat,
            buckets_stay=not self.library_calls,
            activation_bytes=self.activation_bytes,
        )

    def memory(self, strategy: str, plan: Schedule) -> tuple[Memory, ...]:
        """What lies on each rank under a strategy, whose schedule this is."""
        settings = self.settings(strategy)
        partition = self.partition(strategy)
        if partition is not None:
            parameter_bytes = sum(nbytes_of(param) for param in self.params)
            padding_bytes = plan.parameter_bytes[0] - parameter_bytes
            return memory_of_ranks(partition, self.params, settings, padding_bytes=padding_bytes)
        average = average_memory(self.params, self.world_size, settings)
        if strategy == LOCAL_SGD and self.world_size > 1:
            # The averager copies all that is averaged into one tensor, and sends that.
            average = replace(average, communication_bytes=4 * self.numel)
        if settings.stage < 3:
            return (average,) * self.world_size
        # Each parameter is cut along its first dimension, so the first ranks have more than the last.
        whole = average_memory(self.params, 1, settings)
        numel_of_rank = dict(plan.operations[-1].shares or ())
        held = list(
            zip(
                plan.parameter_bytes,
                plan.gradient_bytes,
                (numel_of_rank.get(rank, 0) for rank in range(self.world_size)),
                strict=True,
            )
        )
        memory_of = {  # most ranks hold as much as others
            (parameter_bytes, gradient_bytes, numel): replace(
                average,
                parameter_bytes=parameter_bytes,
                gradient_bytes=gradient_bytes,
                master_bytes=whole.master_bytes * numel / self.numel,
                moment_bytes=whole.moment_bytes * numel / self.numel,
                scalar_bytes=whole.scalar_bytes,  # of each tensor a rank has a part, be it empty
            )
            for parameter_bytes, gradient_bytes, numel in set(held)
        }
        return tuple(memory_of[one] for one in held)

    def run(
        self,
        strategy: str,
        *,
        slow: Mapping[int, float] | None = None,
        jitter: float = 0.0,
        seed: int = 0,
    ) -> Run:
        """Everything about one strategy. `slow`, `jitter` and `seed` are those of `play`.

        Raises:
            ValueError: as `schedule` and `play`, or the jitter leaves no rank that takes any time.
        """
        plan = self.schedule(strategy)
        played = play(plan, self.cluster, self.work, slow=slow, jitter=jitter, seed=seed)
        if not played.makespan_ms:
            raise ValueError(
                f"with a jitter of {jitter:g} and seed {seed} no rank takes any time: give a smaller jitter."
            )
        return Run(self, strategy, plan, played, self.memory(strategy, plan))


@dataclass(frozen=True)
class Run:
    """One strategy in a scenario; memory and timeline are the fullest rank's, which need not be rank 0."""

    scenario: Scenario
    strategy: str
    plan: Schedule
    played: Played
    memories: Sequence[Memory] = field(repr=False)

    @cached_property
    def fullest(self) -> int:
        """The rank that holds most; of several the first."""
        totals = [memory.total_bytes for memory in self.memories]
        return totals.index(max(totals))

    @property
    def memory(self) -> Memory:
        return self.memories[self.fullest]

    def memory_curve(self, rank: int) -> list[tuple[float, int]]:
        """What a rank holds over time, as `Played.memory`. DDP keeps buckets; a library's stage 2 none."""
        held = self.memories[rank]
        stage = RECIPES[self.strategy].stage
        stay = stage < 2 or (stage == 2 and not self.scenario.library_calls)
        comes_and_goes = held.communication_bytes + held.activation_bytes
        if not stay:
            comes_and_goes += held.gradient_bytes
        return self.played.memory(rank, round(held.total_bytes - comes_and_goes), gradients_stay=stay)

    @property
    def fits(self) -> bool | None:
        """Whether the device's memory is enough for the fullest rank; None where it is not known.

        Libraries and the allocator need some of it too: a run that just fits will not.
        """
        device = self.scenario.cluster.device
        return None if device.memory_gb is None else self.memory.total_bytes <= device.memory_gb * 1e9

    @property
    def shortfall(self) -> Shortfall | None:
        """Why the fullest rank holds more than 1/N of it all; None for a strategy without owners."""
        owned = self.scenario.partition(self.strategy)
        if owned is None:
            return None
        settings = self.scenario.settings(self.strategy)
        return why_not_smaller(
            owned, self.scenario.params, settings, rank=self.fullest, memories=self.memories
        )

    @property
    def sent_bytes(self) -> float:
        """On the wire, in one iteration, a rank's average."""
        return self._an_iteration(self.plan.wire_bytes(self.scenario.cluster.backend) / self.plan.world_size)

    @property
    def calls(self) -> float:
        """That the fullest rank makes in one iteration."""
        return self._an_iteration(self.plan.count_of_calls(self.fullest))

    @property
    def iteration_ms(self) -> float:
        return self.played.iteration_ms

    @cached_property
    def timeline(self) -> Timeline:
        return self.played.timeline(self.fullest)

    @property
    def exposed_ms(self) -> float:
        return self._an_iteration(self.timeline.exposed_ms)

    @property
    def idle_ms(self) -> float:
        """How long the fullest rank computes nothing, until the last rank has done everything."""
        done_early_ms = self.played.makespan_ms - self.timeline.makespan_ms
        return self._an_iteration(self.timeline.idle_ms + done_early_ms)

    @cached_property
    def what_if(self) -> WhatIf:
        """What everything takes of the iteration, and what would make it faster."""
        played = self.played
        return what_if(
            self.plan,
            self.scenario.cluster,
            self.scenario.work,
            slow=played.slow,
            jitter=played.jitter,
            seed=played.seed,
        )

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks together."""
        return 1e3 * self.scenario.tokens * self.plan.world_size / self.iteration_ms

    @property
    def utilisation(self) -> float:
        """Model FLOPs utilisation: 6 operations for each parameter and token, and attention's, of what the
        device can do. What checkpointing computes again is no use and does not count.
        """
        operations = 6 * self.scenario.numel * self.scenario.tokens * (1 + self.scenario.attention_share)
        return operations / (self.iteration_ms * self.scenario.cluster.device.tflops * 1e9)

    def _an_iteration(self, amount: float) -> float:
        return amount / self.plan.iterations
