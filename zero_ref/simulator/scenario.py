"""A whole run, simulated from a model's name: memory, traffic, time.

A `Scenario` combines `memory`, `schedule` and `play` as a user of PyTorch would, and `zero-ref simulate`
prints the results. For another combination, call these three modules directly.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cache, cached_property
from typing import Annotated, Any

from zero_ref.local_sgd.averaging import AveragingSchedule
from zero_ref.plan.choice import plan_partition
from zero_ref.plan.partition import ParamSpec, Partition, check_world_size
from zero_ref.simulator.activations import CHECKPOINTING, Activations, activations
from zero_ref.simulator.cluster import Cluster
from zero_ref.simulator.decoders import Decoder
from zero_ref.simulator.dispatch import SharedExperts
from zero_ref.simulator.expert_parallel import check_experts, experts_of, on_a_rank, parts_of
from zero_ref.simulator.groups import Part, SplitOwners, owners_of, split
from zero_ref.simulator.kernels import Kernels, kernels, recomputed
from zero_ref.simulator.layers import Sharing, is_of_experts
from zero_ref.simulator.ledger import STATE_RULES, StateRule, nbytes_of, state_rule
from zero_ref.simulator.memory import Memory, MemorySettings, average_memory, memory_of_ranks, with_peak
from zero_ref.simulator.models import (
    GPT2,
    Architecture,
    Llama,
    ParamShape,
    blocks,
    matrices_whole,
    specs,
    trained,
)
from zero_ref.simulator.operations import WAYS
from zero_ref.simulator.options import Option, check_options, explained, listed, used_values
from zero_ref.simulator.play import Played, play
from zero_ref.simulator.price import Workload
from zero_ref.simulator.recipe import LOCAL_SGD, REDUCED_IN, Recipe, recipe
from zero_ref.simulator.schedule import MIB, Schedule, ddp_buckets_of_parts, schedule
from zero_ref.simulator.sensitivity import WhatIf, what_if
from zero_ref.simulator.shortfall import Shortfall, why_not_smaller
from zero_ref.simulator.spread import fits
from zero_ref.simulator.timeline import Timeline

DTYPES = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes of an element in forward and backward. Of 16-bit parameters the optimizer keeps float32 copies."""

LONGEST_SEQUENCE = 8192
"""The most tokens in a sequence unless the caller asks for more. Models with a context of 100,000 tokens were
trained on shorter sequences first."""

MOST_PASSES = 1024
"""The most passes of an update that a command line takes, since all of them are played."""


# Which strategies use an option. Functions by name: a lambda inside an annotation would not see this module.


def _buckets_by_ddp(how: Recipe, _: object) -> bool:
    return how.stage < 2


def _reduces_in_any_dtype(how: Recipe, _: object) -> bool:
    return how.reduces_in_any_dtype


def _shards_by_parameter(how: Recipe, _: object) -> bool:
    return how.shards_by_parameter


def _in_groups(how: Recipe, _: object) -> bool:
    return how.in_groups


def _gathers_ahead(how: Recipe, _: object) -> bool:
    return how.stage == 3


def _averages(how: Recipe, _: object) -> bool:
    return how.averaging is not None


def _meets_in_every_step(how: Recipe, _: object) -> bool:
    return how.averaging is None


@dataclass(frozen=True)
class Scenario:
    """A model, a cluster, and how the model is trained on it. The options say what their values mean.

    >>> from zero_ref.simulator.cluster import cluster
    >>> from zero_ref.simulator.models import MODELS
    >>> scenario = Scenario(MODELS["llama3-8b"], cluster("h100-ib"), world_size=64)
    >>> run = scenario.run("zero-3")
    >>> round(run.iteration_ms), round(run.peak_bytes / 1e9, 1), run.fits
    (1135, 71.4, True)

    Args:
        sequence: tokens in each sequence; None for the model's context, LONGEST_SEQUENCE at most.
        way: when updates are made, one of `operations.WAYS`, under strategies that have owners.
        bucket_bytes: of DDP's gradient buckets; None for DDP's default, 25 MiB after a first of 1 MiB.
        checkpointing: one of `activations.CHECKPOINTING`. Attention scores are kept under "none" only: the
            others assume flash attention, which PyTorch chooses by itself.
        prefetch: as `Recipe`.
        masters: beside 16-bit parameters the optimizer keeps 32-bit copies and state; False for state in the
            parameters' dtype and no copies.
        bucket_view: DDP's `gradient_as_bucket_view`. False, its default, keeps all gradients twice.
    Raises:
        ValueError: the batch, the sequence, the accumulation or `world_size` is below 1, a name is unknown,
            or the optimizer is offloaded and not elementwise. Methods raise as `schedule`,
            `AveragingSchedule`, `MemorySettings` and `play`.
    """

    architecture: Architecture
    cluster: Cluster
    world_size: int
    # An entry for each option, as in a table.
    # fmt: off
    batch: Annotated[int, Option(
        "sequences a rank (default: %(default)s)", metavar="B", least=1, most=10**9,
        label="sequences of a rank", steps=(1, 2, 4, 8, 16, 32, 64), after="loss_dtype",
    )] = 1
    sequence: Annotated[int | None, Option(
        "tokens in each (default: the model's, " + str(LONGEST_SEQUENCE) + " at most)", metavar="S", least=1,
        most=10**9, label="tokens in each", steps=(128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768),
    )] = None
    _: KW_ONLY
    dtype: Annotated[str, Option(
        "of parameters and gradients: " + listed(DTYPES) + ". Of 16 bits the optimizer keeps a copy in 32 "
        "(default: %(default)s)",
        metavar="DTYPE", choices=DTYPES,
    )] = "bfloat16"
    optimizer: Annotated[str, Option(
        listed(STATE_RULES) + " (default: %(default)s)", metavar="NAME", choices=STATE_RULES,
    )] = "AdamW"
    masters: Annotated[bool, Option(
        "no 32-bit copies of 16-bit parameters: state in the parameters' own dtype",
    )] = True
    compiled: Annotated[bool, Option("blocks are compiled: fewer passes over memory, less is kept")] = False
    fused_loss: Annotated[bool, Option(
        "the cross-entropy is one kernel, which keeps no copy of the logits in 32 bits",
    )] = False
    loss_dtype: Annotated[str, Option(
        "what a loss that is not fused is computed in (default: %(default)s)", metavar="DTYPE",
        choices=DTYPES,
    )] = "float32"
    checkpointing: Annotated[str, Option(
        explained(CHECKPOINTING) + " (default: %(default)s)",
        metavar="WHAT", choices=CHECKPOINTING, label="activations kept",
    )] = "selective"
    tf32: Annotated[bool, Option(
        "products of float32 are made in TF32, as torch.set_float32_matmul_precision('high') lets them be; "
        "torch's default makes them in float32",
    )] = False
    accumulation: Annotated[int, Option(
        "forwards and backwards before an update, each of --batch sequences (default: %(default)s)",
        metavar="N", least=1, most=MOST_PASSES,
    )] = 1
    way: Annotated[str, Option(
        explained(WAYS), name="overlap", metavar="WAY", choices=WAYS, used_by=Recipe.takes_way,
    )] = "plain"
    bucket_bytes: Annotated[int | None, Option(
        "of DDP's buckets (default: 25, the first 1)", name="bucket_mib", metavar="MIB", unit=MIB, above=0,
        most=2**20, used_by=_buckets_by_ddp,
    )] = None
    bucket_view: Annotated[bool, Option(
        "DDP's gradient_as_bucket_view: gradients lie in DDP's buckets, and are not kept twice",
        used_by=_buckets_by_ddp,
    )] = False
    reduce_dtype: Annotated[str | None, Option(
        "what gradients travel in: " + listed(REDUCED_IN) + " (default: --dtype)", metavar="DTYPE",
        choices=REDUCED_IN, used_by=_reduces_in_any_dtype,
    )] = None
    offload: Annotated[bool, Option(
        "masters, moments and the update are on the CPU", used_by=_shards_by_parameter,
    )] = False
    no_sync: Annotated[bool, Option(
        "of zero-2 and zero-3: accumulated gradients are whole on each rank until the last backward",
        used_by=_in_groups,
    )] = False
    shard_group: Annotated[int | None, Option(
        "of zero-2 and zero-3: so many consecutive ranks share what is sharded, as a node's (default: all)",
        metavar="N", least=1, most=2**20, used_by=_in_groups,
    )] = None
    prefetch: Annotated[int, Option(
        "of zero-3 (default: %(default)s)", metavar="UNITS", least=0, most=10**6, used_by=_gathers_ahead,
    )] = 1
    period: Annotated[int, Option(
        "of local-sgd: steps from one average of the parameters to the next (default: %(default)s)",
        metavar="H", least=1, most=10**6, used_by=_averages,
    )] = 8
    gradient_group: Annotated[int, Option(
        "of local-sgd: average gradients in every step over so many ranks, as of a node "
        "(default: %(default)s)",
        metavar="N", least=1, most=2**20, used_by=_averages,
    )] = 1
    expert_parallel: Annotated[int, Option(
        "so many consecutive ranks share the experts of each block, whole ones each (default: %(default)s)",
        metavar="N", least=1, most=2**20, used_by=_meets_in_every_step,
    )] = 1
    expert_load: Annotated[float, Option(
        "rows that the experts of the busiest rank get, over the average of the ranks that share experts "
        "(default: %(default)s)",
        metavar="X", least=1, most=10**6, used_by=_meets_in_every_step,
    )] = 1.0
    # fmt: on

    def __post_init__(self) -> None:
        if self.batch < 1 or self.tokens_of_sequence < 1:
            raise ValueError(
                f"batch and sequence must be at least 1, got {self.batch} and {self.tokens_of_sequence}."
            )
        check_options(self, but=("optimizer",))  # `state_rule` knows them
        if self.offload and state_rule(self.optimizer).of_whole is not None:
            raise ValueError(f"offload is for elementwise optimizers; {self.optimizer} multiplies matrices.")
        check_world_size(self.world_size)
        if self.expert_parallel > 1 or self.expert_load > 1:  # else shapes are not needed yet
            check_experts(self.shapes, self.expert_parallel, self.expert_load, self.world_size)
        if self.tf32 and self.dtype != "float32":
            raise ValueError(f"tf32 is how products of float32 are made; the dtype is {self.dtype}.")
        if self.tf32 and "tf32" not in self.cluster.device.peaks:
            raise ValueError(f"{self.cluster.device.name}: no peak in TF32 is known.")

    @cached_property
    def machine(self) -> Cluster:
        """The cluster with its devices' peak in the dtype of the products.

        >>> from zero_ref.simulator.cluster import cluster
        >>> from zero_ref.simulator.models import MODELS
        >>> for options in ({}, {"dtype": "float32"}, {"dtype": "float32", "tf32": True}):
        ...     Scenario(MODELS["gpt2"], cluster("h100-ib"), 2, **options).machine.device.tflops
        989
        67
        494.5
        """
        device = self.cluster.device.in_dtype("tf32" if self.tf32 else self.dtype)
        return self.cluster if device is self.cluster.device else replace(self.cluster, device=device)

    @property
    def tokens_of_sequence(self) -> int:
        if self.sequence is not None:
            return self.sequence
        return min(getattr(self.architecture, "positions", 1), LONGEST_SEQUENCE)

    @property
    def tokens(self) -> int:
        """Of one rank in one iteration. An example for a model that is no transformer counts as one token."""
        return self.accumulation * self.tokens_of_pass

    @property
    def tokens_of_pass(self) -> int:
        """Of one rank in one forward and backward; `accumulation` of them make an iteration."""
        return self.batch * self.tokens_of_sequence

    @property
    def transformer(self) -> GPT2 | Llama | Decoder | None:
        """The architecture, if it is a transformer's."""
        model = self.architecture
        return model if isinstance(model, (GPT2, Llama, Decoder)) else None

    @cached_property
    def shapes(self) -> tuple[ParamShape, ...]:
        return trained(self.architecture)

    @cached_property
    def params(self) -> list[ParamSpec]:
        """The parameters that one rank has: of experts that ranks share, its own."""
        params = specs(on_a_rank(self.shapes, self.expert_parallel), self.dtype)
        return params if state_rule(self.optimizer).of_whole is None else matrices_whole(params)

    @cached_property
    def numel(self) -> int:
        """Elements of the model, with all experts."""
        return sum(shape.numel for shape in self.shapes)

    @cached_property
    def numel_of_rank(self) -> int:
        """Elements of the parameters that one rank has."""
        return sum(param.numel for param in self.params)

    @cached_property
    def experts(self) -> SharedExperts | None:
        """The experts that ranks share; None if each rank has all of them."""
        if self.expert_parallel == 1 or (model := self.transformer) is None:
            return None
        again = recomputed(self.checkpointing)
        rows = max(layer.moved // 2 for layer in model.layers)  # there, and back
        return SharedExperts(
            self.expert_parallel,
            self.tokens_of_pass * rows * DTYPES[self.dtype],
            experts_of(self.shapes),
            self.expert_load,
            again.blocks if again.products else 0.0,
        )

    @property
    def active(self) -> int:
        """Parameters that a token goes through: of experts those that it is sent to."""
        model = self.transformer
        return model.active if isinstance(model, Decoder) else self.numel

    @property
    def computed_on(self) -> float:
        """Parameters that the busiest rank computes with, for each of its own tokens.

        A token goes through `active`. The rank's experts get `expert_load` times the average of the rows.
        """
        of_experts = sum(shape.numel for shape in self.shapes if is_of_experts(shape.name))
        return self.active + (self.active - self.numel + of_experts) * (self.expert_load - 1)

    @property
    def missing(self) -> tuple[str, ...]:
        """What of the model is not counted in activations and time, for people."""
        model = self.transformer
        return model.missing if isinstance(model, Decoder) else ()

    @cached_property
    def activations(self) -> Activations:
        """Of one rank; not counted, and so 0, for a model that is no transformer."""
        if (model := self.transformer) is None:
            return Activations()
        return activations(
            model,
            self.batch,
            self.tokens_of_sequence,
            self.checkpointing,
            flash_attention=self.checkpointing != "none",
            itemsize=DTYPES[self.dtype],
            compiled=self.compiled,
            fused_loss=self.fused_loss,
            loss_itemsize=DTYPES[self.loss_dtype],
            expert_load=self.expert_load,
        )

    @property
    def activation_bytes(self) -> int:
        """Of one rank, what forward leaves for backward."""
        return self.activations.kept

    @property
    def attention_share(self) -> float:
        """What attention adds to the operations of forward and backward, as a share of the parameters'.

        >>> from zero_ref.simulator.cluster import cluster
        >>> from zero_ref.simulator.models import MODELS
        >>> round(Scenario(MODELS["llama3-8b"], cluster("h100-ib"), 8).attention_share, 2)
        0.27

        The whole of each sequence counts, or the whole window that a block sees. Kernels that skip what a
        causal mask hides need half: `kernels`.

        Source: `calibrate.training_flops`.
        """
        if (model := self.transformer) is None:
            return 0.0
        seen = (
            layer.number * layer.heads * (layer.head_width + layer.value_width)
            * min(layer.window or self.tokens_of_sequence, self.tokens_of_sequence)
            for layer in model.layers
        )  # fmt: skip
        return sum(seen) / self.active

    @cached_property
    def kernels(self) -> Kernels | None:
        """What forward and backward of a micro-batch compute; None for a model that is no transformer."""
        if (model := self.transformer) is None:
            return None
        return kernels(
            model,
            self.batch,
            self.tokens_of_sequence,
            self.checkpointing,
            compiled=self.compiled,
            fused_loss=self.fused_loss,
            itemsize=DTYPES[self.dtype],
            sharing=Sharing(self.expert_parallel, self.expert_load),
        )

    @property
    def workload(self) -> Workload:
        """A step reads value, gradient and state, and writes value and state."""
        return Workload(
            self.tokens_of_pass,
            recompute=self.checkpointing == "full",
            step_bytes=self._state_itemsize * (3 + 2 * state_rule(self.optimizer).tensors),
            attention_share=self.attention_share,
            kernels=self.kernels,
            active_share=self.computed_on / self.numel_of_rank,
        )

    def workload_of(self, strategy: str) -> Workload:
        """The workload, with what a strategy moves through memory for the network.

        A message is read from memory and written to it, and a 16-bit gradient that is reduced in 32 bits is
        converted first. Gradients are copied into buckets, or flat tensors, before. Stage 3 gathers
        parameters in forward and again in backward.
        """
        itemsize, usual, workload = DTYPES[self.dtype], recipe(strategy), self.workload
        if self.recipe(strategy).offload:  # a gradient goes to the CPU and a parameter comes back
            workload = replace(workload, offload_bytes=(itemsize, itemsize))
        if self.world_size == 1:
            return workload
        reduced = DTYPES[self.reduce_dtype or self.dtype]
        gathered = 2 * itemsize if usual.stage == 3 else 0
        copied = 2 * itemsize + (itemsize + reduced if reduced != itemsize else 0)
        sent = (
            2 * reduced * (2 if usual.stage < 2 else 1)
        )  # an all-reduce sends, and receives, everything twice
        return replace(workload, moved_bytes=(gathered, gathered + copied + sent))

    def like(self, **changes: Any) -> Scenario:
        """The same but for the given fields, which change neither the model, the ranks nor who owns what.

        Parameters, owners and buckets are not planned again.
        """
        changed = replace(self, **changes)
        planned = ("shapes", "params", "numel", "numel_of_rank", "buckets", "_partitions")
        vars(changed).update({name: getattr(self, name) for name in planned})
        return changed

    @cached_property
    def _partitions(self) -> dict[str, Partition | SplitOwners]:
        return {}

    def partition(self, strategy: str) -> Partition | SplitOwners | None:
        """Who owns what under a strategy; None if it has no owners. Made once for schedule and memory."""
        rule = recipe(strategy).partition
        if rule is None:
            return None
        if str(rule) not in self._partitions:  # strategies share a rule
            ranks = self.recipe(strategy).group_of(self.world_size)
            self._partitions[str(rule)] = (
                plan_partition(rule, self.params, ranks)
                if self.experts is None
                else owners_of(rule, self.params, self._parts(ranks))
            )
        return self._partitions[str(rule)]

    def _parts(self, group: int) -> tuple[Part, ...]:
        """The parameters, by the ranks that share them."""
        return parts_of(self.params, self.world_size, group, self.experts)

    @cached_property
    def buckets(self) -> list[list[int]]:
        """DDP's gradient buckets."""
        return ddp_buckets_of_parts(self.params, self._parts(self.world_size), self.bucket_bytes)

    @property
    def state(self) -> StateRule:
        """The optimizer's state. Beside 16-bit parameters it is in float32, with `masters` of them."""
        rule = state_rule(self.optimizer)
        return rule.with_master() if self._mixed else rule

    @property
    def _mixed(self) -> bool:
        return self.masters and DTYPES[self.dtype] == 2

    @property
    def _state_itemsize(self) -> int:
        """Bytes of an element of the state, and of parameters as local-sgd averages them."""
        return 4 if self._mixed else DTYPES[self.dtype]

    @property
    def averaging(self) -> AveragingSchedule:
        """When local-sgd averages."""
        return AveragingSchedule.periodic(self.period, gradient_group=self.gradient_group)

    def schedule(self, strategy: str) -> Schedule:
        """The strategy's iteration."""
        owners = self.partition(strategy)
        planned = {"partition": owners} if isinstance(owners, Partition) else {}
        return schedule(
            self.recipe(strategy, **planned),
            self.params,
            self.world_size,
            ddp_buckets=self.buckets,
            side_stream=self.cluster.backend == "nccl",
            blocks=blocks(self.params),
            activation_bytes=self.activations.blocks,
            experts=None if recipe(strategy).averaging else self.experts,
            owners=owners if isinstance(owners, SplitOwners) else None,
        )

    def recipe(self, strategy: str, **changes: Any) -> Recipe:
        """The strategy's recipe, changed as the scenario says, where the strategy can be."""
        usual = recipe(strategy)
        used = used_values(self, usual)
        axes = ("way", "shard_group", "prefetch", "no_sync", "reduce_dtype", "offload")
        return recipe(
            usual,
            optimizer=self.state,
            accumulation=self.accumulation,
            averaging=usual.averaging and self.averaging,
            averaged_itemsize=self._state_itemsize,  # the 32-bit copies of 16-bit parameters
            **{name: used[name] for name in axes},
            **changes,
        )

    def settings(self, strategy: str) -> MemorySettings:
        """How the strategy keeps the model."""
        usual, how = recipe(strategy), self.recipe(strategy)
        found = self.activations
        partition = self.partition(strategy)
        buckets: Iterable[Iterable[int]] = self.buckets
        if usual.without_ddp and partition is not None:
            plans = split(partition, self.world_size).gradient_plans(self.params)
            buckets = [plan.starts for plan, _ in plans]
        bucket_bytes = [sum(nbytes_of(self.params[number]) for number in bucket) for bucket in buckets]
        return MemorySettings(
            usual.stage,
            convention="mixed-16" if self._mixed else None,
            optimizer=self.optimizer,
            gradient_as_bucket_view=self.bucket_view,
            bucket_bytes=max(bucket_bytes, default=0) * (2 if usual.without_ddp else 1),
            gathered_units=1 + self.prefetch,
            flat=usual.flat,
            activation_bytes=found.kept,
            head_bytes=found.head,
            loss_bytes=found.loss,
            block_bytes=found.again + found.gradients,
            accumulates=how.accumulation > 1,
            no_sync=how.no_sync,
            reduced_itemsize=None if how.reduce_dtype is None else DTYPES[how.reduce_dtype],
            masters_apart=self._mixed and usual.stage < 3,
            offload=how.offload,
        )

    def memory(self, strategy: str, schedule: Schedule) -> tuple[Memory, ...]:
        """What lies on each rank under a strategy, given its schedule."""
        settings, device = self.settings(strategy), self.cluster.device

        @cache  # most ranks hold as much as others
        def with_its_peak(held: Memory) -> Memory:
            return with_peak(
                held,
                self.params,
                settings,
                allocator_share=device.allocator_share,
                library_bytes=device.library_gb * 1e9,
            )

        return tuple(map(with_its_peak, self._held(strategy, schedule, settings)))

    def _held(self, strategy: str, schedule: Schedule, settings: MemorySettings) -> Iterable[Memory]:
        """Each rank's items."""
        partition = self.partition(strategy)
        if partition is not None:
            parameter_bytes = sum(nbytes_of(param) for param in self.params)
            padding_bytes = schedule.parameter_bytes[0] - parameter_bytes
            of_group = memory_of_ranks(partition, self.params, settings, padding_bytes=padding_bytes)
            return of_group * (self.world_size // partition.world_size)
        group = self.recipe(strategy).group_of(self.world_size)
        average = average_memory(self.params, group, settings)
        if strategy == LOCAL_SGD and self.world_size > 1:
            # The averager copies all that is averaged into one tensor, and sends that.
            average = replace(average, communication_bytes=self._state_itemsize * self.numel)
        if settings.stage < 3:
            return (average,) * self.world_size
        # Each parameter is cut along its first dimension, so the first ranks have more than the last.
        whole = average_memory(self.params, 1, settings)
        numel_of_rank = dict(schedule.operations[-1].shares or ())
        numels = (numel_of_rank.get(rank, 0) for rank in range(self.world_size))
        held = list(zip(schedule.parameter_bytes, schedule.gradient_bytes, numels, strict=True))
        memory_of = {  # most ranks hold as much as others
            (parameter_bytes, gradient_bytes, numel): replace(
                average,
                parameter_bytes=parameter_bytes,
                gradient_bytes=gradient_bytes,
                master_bytes=whole.master_bytes * numel / self.numel_of_rank,
                moment_bytes=whole.moment_bytes * numel / self.numel_of_rank,
                scalar_bytes=whole.scalar_bytes,  # a rank has a part, even an empty one, of each tensor
            )
            for parameter_bytes, gradient_bytes, numel in set(held)
        }
        return [memory_of[one] for one in held]

    def run(
        self,
        strategy: str,
        *,
        slow: Mapping[int, float] | None = None,
        jitter: float = 0.0,
        seed: int = 0,
    ) -> SimulatedRun:
        """Everything about one strategy. `slow`, `jitter` and `seed` are those of `play`.

        Raises:
            ValueError: as `schedule` and `play`, or the jitter leaves no rank that takes any time.
        """
        made = self.schedule(strategy)
        played = play(made, self.machine, self.workload_of(strategy), slow=slow, jitter=jitter, seed=seed)
        if not played.makespan_ms:
            raise ValueError(
                f"with a jitter of {jitter:g} and seed {seed} no rank takes any time: give a smaller jitter."
            )
        return SimulatedRun(self, strategy, played, self.memory(strategy, made))


@dataclass(frozen=True)
class SimulatedRun:
    """One strategy in a scenario; memory and timeline are the fullest rank's, which need not be rank 0."""

    scenario: Scenario
    strategy: str
    played: Played
    memories: Sequence[Memory] = field(repr=False)

    @property
    def schedule(self) -> Schedule:
        return self.played.schedule

    @cached_property
    def fullest(self) -> int:
        """The rank that holds most at one time; the lowest if several do."""
        peaks = [memory.peak_bytes for memory in self.memories]
        return peaks.index(max(peaks))

    @property
    def memory(self) -> Memory:
        return self.memories[self.fullest]

    @property
    def peak_bytes(self) -> float:
        """The most that the fullest rank's device holds at one time: tensors, allocator and libraries."""
        return self.memory.peak_bytes

    def memory_curve(self, rank: int) -> list[tuple[float, int]]:
        """Bytes in a rank's tensors over time, as `Played.memory`."""
        return [(ms, sum(of_kind.values())) for ms, of_kind in self._tensors(rank)]

    def memory_by_kind(self, rank: int | None = None) -> list[tuple[float, dict[str, float]]]:
        """Everything on a rank's device over time: (milliseconds, bytes of each kind from then on).

        The kinds are those of `held.KINDS`, and "allocator, libraries", which is taken to be the same all the
        time. The largest sum is `peak_bytes` if the peak is in the loss or in the update. If it is in the
        backward of a block, the sum has gradients that `peak_bytes` does not count there, some percent more.

        Args:
            rank: None for the fullest.
        """
        rank = self.fullest if rank is None else rank
        beside = self.memories[rank].allocator_bytes + self.memories[rank].library_bytes
        return [(ms, {"allocator, libraries": beside, **of_kind}) for ms, of_kind in self._tensors(rank)]

    def _tensors(self, rank: int) -> list[tuple[float, dict[str, int]]]:
        """Bytes in a rank's tensors over time, by kind."""
        held, settings = self.memories[rank], self.scenario.settings(self.strategy)
        stay = settings.gradients_stay
        sending = held.phase_bytes["sending"] - held.state_bytes - held.gradient_bytes
        step = held.phase_bytes["step"] - held.state_bytes - held.gradient_bytes
        return self.played.memory_by_kind(
            rank,
            {
                "parameters": round(held.parameter_bytes + held.padding_bytes),
                "optimizer state": round(held.master_bytes + held.moment_bytes + held.scalar_bytes),
                "gradients": round(held.gradient_bucket_bytes + (held.gradient_bytes if stay else 0)),
            },
            gradients_stay=stay,
            head_bytes=settings.head_bytes,
            loss_bytes=settings.loss_bytes,
            meanwhile={
                "backward": settings.block_bytes,
                "step": round(step),
                "broadcast": round(sending),
                "average": round(sending),
            },
        )

    @property
    def fits(self) -> bool | None:
        """Whether the device's memory is enough for the fullest rank; None where that is undecided.

        It is undecided where the interval around the prediction (`spread.MEMORY`) has the device's memory in
        it, and where that is not known.
        """
        device = self.scenario.cluster.device
        return None if device.memory_gb is None else fits(self.peak_bytes, device.memory_gb * 1e9)

    @property
    def shortfall(self) -> Shortfall | None:
        """Why the fullest rank holds more than 1/N of everything; None for a strategy without owners."""
        owned = self.scenario.partition(self.strategy)
        if not isinstance(owned, Partition):
            return None
        settings = self.scenario.settings(self.strategy)
        return why_not_smaller(
            owned,
            self.scenario.params,
            settings,
            rank=self.fullest % owned.world_size,
            memories=self.memories,
        )

    @property
    def sent_bytes(self) -> float:
        """Bytes on the wire in one iteration, on average over the ranks."""
        wire_bytes = self.schedule.wire_bytes(self.scenario.cluster.backend)
        return self._an_iteration(wire_bytes / self.schedule.world_size)

    @property
    def calls(self) -> float:
        """The calls that the fullest rank makes in one iteration."""
        return self._an_iteration(self.schedule.count_of_calls(self.fullest))

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
        """What the time of the iteration is spent on, and what would make it faster."""
        paces = {name: getattr(self.played.paces, name) for name in ("slow", "jitter", "seed")}
        return what_if(
            self.schedule, self.scenario.machine, self.scenario.workload_of(self.strategy), **paces
        )

    @property
    def computing_ms(self) -> dict[str, float]:
        """Milliseconds of forward and backward by what limits them: products, attention, memory.

        "moved" is what is copied for the network and by it. Empty where it is not known: for a model that is
        no transformer, and on a device whose measured rate is of whole training.
        """
        device, workload = self.scenario.machine.device, self.scenario.workload_of(self.strategy)
        if workload.kernels is None or device.memory_reached is None:
            return {}
        moved = sum(workload.moved_bytes) * self.scenario.numel_of_rank
        return {**workload.kernels.parts_ms(device), "moved": device.touch_ms(moved)}

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks together."""
        return 1e3 * self.scenario.tokens * self.schedule.world_size / self.iteration_ms

    @property
    def utilisation(self) -> float:
        """Model FLOPs utilisation: the share of the device's peak that goes into the model.

        6 operations for each parameter and token count, and attention's over whole sequences, also what a
        causal mask hides and flash attention skips. What checkpointing computes again does not count.

        Source: PaLM (arXiv:2204.02311), appendix B.
        """
        operations = 6 * self.scenario.active * self.scenario.tokens * (1 + self.scenario.attention_share)
        return operations / (self.iteration_ms * self.scenario.machine.device.tflops * 1e9)

    def _an_iteration(self, amount: float) -> float:
        return amount / self.schedule.iterations
