"""A whole run, simulated from a model's name: memory, traffic, time.

A `Scenario` combines `memory`, `schedule` and `play` as a user of PyTorch would, and `zero-ref simulate`
prints the results. For another combination, call these three modules directly.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import Any

from zero_ref.local_sgd.averaging import AveragingSchedule
from zero_ref.plan.choice import Choice, plan_partition
from zero_ref.plan.gradients import gradient_plans
from zero_ref.plan.partition import Partition
from zero_ref.plan.rules import equal_shares
from zero_ref.simulator.ledger import Convention, nbytes_of
from zero_ref.simulator.memory import Memory, MemorySettings, average_memory, memory_of_ranks, offloaded
from zero_ref.simulator.models import PREFETCHED, REDUCED_TOGETHER, blocks, modules
from zero_ref.simulator.offload import Offload, gradients_leave
from zero_ref.simulator.operations import HOST, NETWORK
from zero_ref.simulator.options import used_values
from zero_ref.simulator.peak import share_reserved, with_peak
from zero_ref.simulator.play import Played, play
from zero_ref.simulator.price import Workload
from zero_ref.simulator.rank_work import RankWork
from zero_ref.simulator.recipe import LOCAL_SGD, RECIPES, Recipe, recipe
from zero_ref.simulator.schedule import Schedule, ddp_buckets, schedule
from zero_ref.simulator.sensitivity import WhatIf, what_if
from zero_ref.simulator.spread import around, fits, interval_of_memory
from zero_ref.simulator.timeline import Timeline, covered_ms
from zero_ref.simulator.training import DTYPES


@dataclass(frozen=True)
class Scenario(RankWork):
    """A model, a cluster, and how the model is trained on it. The options say what their values mean.

    >>> from zero_ref.simulator.cluster import cluster
    >>> from zero_ref.simulator.models import MODELS
    >>> scenario = Scenario(MODELS["llama3-8b"], cluster("h100-ib"), world_size=64, sequence=4096)
    >>> run = scenario.run("zero-3")
    >>> round(run.iteration_ms), round(run.peak_bytes / 1e9, 1), run.fits
    (573, 40.6, True)

    Args:
        sequence: tokens in each sequence; None for the model's context, LONGEST_SEQUENCE at most.
        way: when updates are made, one of `operations.WAYS`, under strategies that have owners.
        bucket_bytes: of DDP's gradient buckets; None for DDP's default, 25 MiB after a first of 1 MiB. Of
            zero-2's ranges; None for the default of `equal_shares`.
        offload: one of `offload.OFFLOADS`. `run` refuses it for local SGD, and gradients in DDP's buckets.
        offload_fraction: the part of the elements whose state is on the CPU.
        checkpointing: one of `activations.CHECKPOINTING`.
        attention: one of `activations.ATTENTION`. PyTorch's `scaled_dot_product_attention` is fused.
        prefetch: as `Recipe`.
        masters: beside 16-bit parameters the optimizer keeps 32-bit copies and state; False for state in the
            parameters' dtype and no copies.
        update: one of `updates.UPDATES`. torch.optim on a GPU is "foreach" unless it is given fused=True.
        bucket_view: DDP's `gradient_as_bucket_view`. False, its default, keeps all gradients twice.
    Raises:
        ValueError: the batch, the sequence, the accumulation or `world_size` is below 1, a name is unknown,
            or the optimizer is offloaded and not elementwise. Methods raise as `schedule`,
            `AveragingSchedule`, `MemorySettings` and `play`.
    """

    def like(self, **changes: Any) -> Scenario:
        """The same but for the given fields, which change neither the model, the ranks nor who owns what.

        Parameters, owners and buckets are not planned again.
        """
        changed = replace(self, **changes)
        planned = ("shapes", "params", "numel", "trained_numel", "buckets", "_partitions")
        vars(changed).update({name: getattr(self, name) for name in planned})
        return changed

    @cached_property
    def _partitions(self) -> dict[str, Partition]:
        return {}

    def partition(self, strategy: str) -> Partition | None:
        """Return the partition of a strategy, made once; None if the strategy has no owners."""
        rule = recipe(strategy).partition
        if rule is None:
            return None
        if str(rule) not in self._partitions:  # strategies share a rule
            ranks = self.recipe(strategy).group_of(self.world_size)
            made: Choice = rule
            if rule == "equal_shares" and self.range_numel is not None:
                made = partial(equal_shares, range_numel=self.range_numel)
            self._partitions[str(rule)] = plan_partition(made, self.params, ranks)
        return self._partitions[str(rule)]

    @property
    def range_numel(self) -> int | None:
        """Elements of a range of zero-2; None for the default of `equal_shares`."""
        return None if self.bucket_bytes is None else max(1, int(self.bucket_bytes) // DTYPES[self.dtype])

    @cached_property
    def buckets(self) -> list[list[int]]:
        """DDP's gradient buckets."""
        return ddp_buckets(self.params, cap_bytes=self.bucket_bytes)

    def workload_of(self, strategy: str) -> Workload:
        """The workload, with what a strategy moves through memory for the network.

        A message is read from memory and written to it, and a 16-bit gradient that is reduced in 32 bits is
        converted first. Gradients are copied into buckets, or flat tensors, before. Stage 3 gathers
        parameters in forward and again in backward.
        """
        itemsize, usual = DTYPES[self.dtype], recipe(strategy)
        of_gradient = self.gradient_itemsize(strategy)
        workload = replace(self.workload, step_bytes=self.step_bytes(of_gradient))
        share = 1.0
        if self.trained_numel < self.numel and workload.kernels is not None:
            # Without stage 3, the operations of backward are of parameters that have gradients.
            of_all = usual.stage == 3
            share = self.trained_numel / self.numel if of_all else 1.0
            backward_numel = self.numel if of_all else self.trained_numel
            workload = replace(workload, kernels=replace(workload.kernels, backward_numel=backward_numel))
        if self.offload is not None:
            workload = replace(workload, offload=self._offload(strategy))
        # A gradient is copied to its bucket, or added to what is kept in 32 bits, which is read and written.
        copied = 2 * itemsize if of_gradient == itemsize else itemsize + 2 * of_gradient
        if self.world_size == 1:
            return workload if of_gradient == itemsize else replace(workload, moved_bytes=(0, copied))
        reduced = DTYPES[self.reduce_dtype] if self.reduce_dtype else of_gradient
        gathered = 2 * itemsize if usual.stage == 3 else 0
        copied += of_gradient + reduced if reduced != of_gradient else 0
        sent = (
            2 * reduced * (2 if usual.stage < 2 else 1)
        )  # an all-reduce sends, and receives, everything twice
        return replace(workload, moved_bytes=(gathered, gathered + share * (copied + sent)))

    def _offload(self, strategy: str) -> Offload:
        """Bytes of each element that the CPU updates. Gradients of several passes add up there in 32 bits."""
        assert self.offload is not None
        of_gradient, how = self.gradient_itemsize(strategy), self.recipe(strategy)
        adds = self.accumulation > 1 and how.stage > 1 and not how.no_sync
        return Offload(
            self.offload,
            self.offload_fraction,
            gradient=of_gradient,
            parameter=DTYPES[self.dtype],
            touched=self.step_bytes(of_gradient, "fused"),
            added=of_gradient + 8 if adds else 0,
        )

    def gradient_itemsize(self, strategy: str) -> int:
        """Bytes of an element of the gradients that a strategy keeps."""
        return DTYPES[used_values(self, recipe(strategy))["gradient_dtype"] or self.dtype]

    @property
    def averaging(self) -> AveragingSchedule:
        """When local-sgd averages."""
        return AveragingSchedule.periodic(self.period, gradient_group=self.gradient_group)

    def schedule(self, strategy: str) -> Schedule:
        """The strategy's iteration."""
        owners = self.partition(strategy)
        planned = {} if owners is None else {"partition": owners}
        return schedule(
            self.recipe(strategy, **planned),
            self.params,
            self.world_size,
            ddp_buckets=self.buckets,
            side_stream=self.cluster.backend == "nccl",
            blocks=modules(self.params) if self.gather_modules else blocks(self.params),
            activation_bytes=self.activations.blocks,
        )

    def recipe(self, strategy: str, **changes: Any) -> Recipe:
        """The strategy's recipe, changed as the scenario says, where the strategy can be."""
        usual = recipe(strategy)
        used = used_values(self, usual)
        if self.offload and not used["offload"]:
            offloaded = [name for name, how in RECIPES.items() if how.offloads]
            raise ValueError(
                f"offload means nothing to {usual.name}; it is for {', '.join(offloaded)}. Simulate "
                f"{usual.name} by itself, without it."
            )
        with_ddp = usual.stage < 2 and not self.without_ddp and self.world_size > 1
        if gradients_leave(self.offload) and with_ddp:
            raise ValueError(
                f"offload {self.offload}: the gradients of {usual.name} lie in DDP's buckets and stay there. "
                "Offload the state alone, or choose zero-2, zero-3 or a single rank."
            )
        used["reduce_dtype"] = used["reduce_dtype"] or used["gradient_dtype"]
        if usual.is_stair:
            used["prefetch"] = usual.prefetch
        if used["gather_modules"]:
            changes = {"prefetch_numel": PREFETCHED, "reduce_numel": REDUCED_TOGETHER, **changes}
        axes = ("way", "shard_group", "prefetch", "no_sync", "all_reduce_last", "reduce_dtype")
        return recipe(
            usual,
            optimizer=self.state,
            accumulation=self.accumulation,
            averaging=usual.averaging and self.averaging,
            averaged_itemsize=self._state_itemsize,  # the 32-bit copies of 16-bit parameters
            offload=used["offload"],
            offload_fraction=used["offload_fraction"],
            **{name: used[name] for name in axes},
            **changes,
        )

    def settings(self, strategy: str) -> MemorySettings:
        """Return the settings on which the memory of a strategy depends."""
        usual, how = recipe(strategy), self.recipe(strategy)
        found = self.activations
        partition = self.partition(strategy)
        buckets: Iterable[Iterable[int]] = self.buckets
        if usual.without_ddp and partition is not None:
            buckets = [plan.starts for plan in gradient_plans(partition, self.params)]
        bucket_bytes = [sum(nbytes_of(self.params[number]) for number in bucket) for bucket in buckets]
        itemsize, of_gradient = DTYPES[self.dtype], self.gradient_itemsize(strategy)
        if usual.without_ddp:  # two of gradients
            bucket_bytes = [2 * nbytes * of_gradient // itemsize for nbytes in bucket_bytes]
        reduced = of_gradient if how.reduce_dtype is None else DTYPES[how.reduce_dtype]
        return MemorySettings(
            usual.stage,
            convention=self._convention(of_gradient),
            optimizer=self.optimizer,
            update=self.update,
            gradient_as_bucket_view=self.bucket_view,
            bucket_bytes=max(bucket_bytes, default=0),
            gathered_units=1 + how.prefetch,
            flat=usual.flat and usual.stage < 3,
            activation_bytes=found.kept,
            head_bytes=found.head,
            loss_bytes=found.loss,
            output_bytes=self.output_bytes,
            live_numel=(how.stage == 3 and self.live_parameters) or 0,
            forward_bytes=found.cached,
            block_bytes=found.again + found.gradients,
            last_block_bytes=found.blocks // max(1, getattr(self.transformer, "depth", 1)),
            ddp=self.world_size > 1 and not self.without_ddp,
            tied=self._tied,
            accumulates=how.accumulation > 1,
            no_sync=how.no_sync,
            reduced_itemsize=None if reduced == of_gradient else reduced,
            masters_apart=self._state_itemsize > itemsize == of_gradient and usual.stage < 3,
            offload=how.offload,
            offload_fraction=how.offload_fraction,
            scales=self.states_8,
        )

    def _convention(self, gradient_itemsize: int) -> str | Convention | None:
        """Bytes of an element of each part of the state; None for those of the parameters' dtype."""
        if self.masters_16:
            return Convention(2, gradient_itemsize, 6, moment=2)
        itemsize = DTYPES[self.dtype]
        if self.states_8:
            return Convention(itemsize, gradient_itemsize, 4 * self._mixed + 2, moment=1)
        if self._mixed:
            return "mixed-16" if gradient_itemsize == 2 else "fp32-grads-18"
        if gradient_itemsize == itemsize:
            return None
        return Convention(itemsize, gradient_itemsize, 2 * itemsize, moment=itemsize)

    def memory(self, strategy: str, schedule: Schedule) -> tuple[Memory, ...]:
        """Return the memory of each rank under a strategy with this schedule."""
        settings, device = self.settings(strategy), self.cluster.device

        @cache  # most ranks hold as much as others
        def with_its_peak(held: Memory) -> Memory:
            return with_peak(
                held,
                self.params,
                settings,
                allocator_share=share_reserved(self.allocator, device),
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
        here = settings if settings.stage < 3 else replace(settings, offload=None)
        average = average_memory(self.params, group, here)
        if strategy == LOCAL_SGD and self.world_size > 1:
            # The averager copies all that is averaged into one tensor, and sends that.
            average = replace(average, communication_bytes=self._state_itemsize * self.trained_numel)
        if settings.stage < 3:
            return (average,) * self.world_size
        # Each parameter is cut along its first dimension, so the first ranks have more than the last.
        whole = average_memory(self.params, 1, here)
        numels, steps = [0] * self.world_size, (one for one in schedule.operations if one.label == "step")
        for rank, numel in itertools.chain.from_iterable(one.shares or () for one in steps):
            numels[rank] += numel
        wider = self.gradient_itemsize(strategy) // DTYPES[self.dtype]
        gradient_bytes_of_rank = (wider * nbytes for nbytes in schedule.gradient_bytes)
        held = list(zip(schedule.parameter_bytes, gradient_bytes_of_rank, numels, strict=True))
        memory_of = {  # most ranks hold as much as others
            (parameter_bytes, gradient_bytes, numel): offloaded(
                replace(
                    average,
                    parameter_bytes=parameter_bytes,
                    gradient_bytes=gradient_bytes,
                    master_bytes=whole.master_bytes * numel / max(1, self.trained_numel),
                    moment_bytes=whole.moment_bytes * numel / max(1, self.trained_numel),
                    scalar_bytes=whole.scalar_bytes,  # a rank has a part, even an empty one, of each tensor
                ),
                settings,
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
        backward of a block, the two differ by some percent: `peak_bytes` has the buffers of the largest block
        there, and the sum those of each block.

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
        in_buckets = round(held.gradient_bucket_bytes + (held.gradient_bytes if stay else 0))
        # Operations make gradients in the parameters' dtype.
        wider = self.scenario.gradient_itemsize(self.strategy) // DTYPES[self.scenario.dtype]
        curve = self.played.memory_by_kind(
            rank,
            {
                "parameters": round(held.parameter_bytes + held.padding_bytes),
                "optimizer state": round(held.master_bytes + held.moment_bytes + held.scalar_bytes),
                "gradients": in_buckets,
            },
            gradients_stay=stay,
            head_bytes=settings.head_bytes,
            loss_bytes=settings.loss_bytes + settings.output_bytes,
            meanwhile={
                "backward": settings.block_bytes + settings.output_bytes,
                "step": round(step),
                "broadcast": round(sending),
                "average": round(sending),
            },
        )
        if wider == 1:
            return curve
        return [
            (ms, of_kind | {"gradients": in_buckets + wider * (of_kind.get("gradients", 0) - in_buckets)})
            for ms, of_kind in curve
        ]

    @property
    def fits(self) -> bool | None:
        """Whether the device's memory is enough for the fullest rank; None where that is undecided.

        It is undecided where `memory_interval` has the device's memory in it, and where that is not known.
        """
        memory_gb, kind = self.scenario.cluster.device.memory_gb, self.scenario.program
        return None if memory_gb is None else fits(self.peak_bytes, memory_gb * 1e9, kind)

    @property
    def is_unlikely(self) -> bool:
        """Whether more memory is predicted than the device has, though the interval has less too."""
        memory_gb = self.scenario.cluster.device.memory_gb
        return self.fits is None and memory_gb is not None and self.peak_bytes > 1e9 * memory_gb

    @property
    def memory_interval(self) -> tuple[float, float]:
        """Bytes between which the real peak of four of five programs is expected."""
        return interval_of_memory(self.scenario.program).around(self.peak_bytes)

    @property
    def time_interval(self) -> tuple[float, float]:
        """Milliseconds between which the real iteration of four of five programs is expected."""
        return around(self.iteration_ms, self.scenario.program)

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
        """Milliseconds in which the fullest rank computes nothing, until the last rank ends."""
        done_early_ms = self.played.makespan_ms - self.timeline.makespan_ms
        return self._an_iteration(self.timeline.idle_ms + done_early_ms)

    @cached_property
    def busy_ms(self) -> dict[str, float]:
        """Milliseconds of an iteration in which each resource works, be it hidden behind another or not.

        "computing" is of the fullest rank, and "step" the part of it that updates. "network" is what all
        calls take. "within nodes" and "between nodes" are what they would take if only these links took any
        time. "beside it, the CPU" is there where gradients are offloaded. The resource that works nearly all
        of the time decides how long an iteration is.
        """
        steps = (one for one in self.timeline.events if one.label == "step" and one.lane != HOST)
        found = {
            "computing": self.timeline.computing_ms,
            "step": covered_ms(steps),
            "network": covered_ms(self.timeline.on(NETWORK)),
            "within nodes": self.played.link_ms("within"),
            "between nodes": self.played.link_ms("between"),
        }
        if on_host := self.timeline.on(HOST):
            found["beside it, the CPU"] = covered_ms(on_host)
        return {name: self._an_iteration(ms) for name, ms in found.items()}

    @cached_property
    def what_if(self) -> WhatIf:
        """The parts of the iteration's time, and its time with each part improved."""
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
        numel = self.scenario.numel
        forward, backward = workload.moved_bytes
        moved = forward * numel + backward * (workload.kernels.backward_numel or numel)
        return {**workload.kernels.parts_ms(device), "moved": device.touch_ms(moved)}

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second of all ranks together."""
        return 1e3 * self.scenario.tokens * self.schedule.world_size / self.iteration_ms

    @property
    def utilisation(self) -> float:
        """Model FLOPs utilisation: the share of the device's peak that goes into the model.

        6 operations for each parameter and token count, and attention's over whole sequences, also what a
        causal mask hides and flash attention skips. Of a traced model its products count in place of the
        parameters, which a convolution uses many times. What checkpointing computes again does not count.

        Source: PaLM (arXiv:2204.02311), appendix B.
        """
        return self.scenario.utilisation_at(self.iteration_ms)

    def _an_iteration(self, amount: float) -> float:
        return amount / self.schedule.iterations
