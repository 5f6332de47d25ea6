"""`--dry-run`: the simulator's prediction of a training run, before anything is started."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from zero_ref.lab.config import VOCABULARY, TrainConfig
from zero_ref.lab.outcome import predict
from zero_ref.lab.simulated import print_runs
from zero_ref.simulator.cluster import Cluster
from zero_ref.simulator.models import GPT2
from zero_ref.simulator.options import words_of
from zero_ref.simulator.scenario import Scenario
from zero_ref.simulator.schedule import Schedule


@dataclass(frozen=True)
class TrainScenario(Scenario):
    """The scenario of a TrainConfig. Its schedule is that of `predict`, with which the run is compared."""

    config: TrainConfig = field(default_factory=TrainConfig, kw_only=True)

    def schedule(self, strategy: str) -> Schedule:
        """The strategy's iteration."""
        side_stream = self.cluster.backend == "nccl"
        return predict(self.config.under(strategy), self.world_size, side_stream=side_stream)


def scenario_of(config: TrainConfig, world_size: int, cluster: Cluster) -> TrainScenario:
    """Return the scenario of a training run, which `print_runs` prints.

    >>> from zero_ref.simulator.cluster import cluster
    >>> run = scenario_of(TrainConfig("zero-even"), 4, cluster("loopback")).run("zero-even")
    >>> run.schedule == predict(TrainConfig("zero-even"), 4)
    True
    """
    model = config.model
    return TrainScenario(
        GPT2(model.width, model.layers, model.heads, VOCABULARY, model.context),
        cluster,
        world_size,
        batch=config.batch_size,
        sequence=model.context,
        dtype=model.dtype,
        way=config.way,
        shard_group=config.shard_group,
        masters=config.master_dtype is not None,
        bucket_view=True,  # as `strategies.trainable` has it
        config=config,
    )


def print_prediction(
    config: TrainConfig, strategies: Sequence[str], world_size: int, cluster: Cluster
) -> None:
    """Print memory, traffic and time of an iteration under each of the strategies. Starts nothing.

    Raises:
        ModuleNotFoundError: rich is not installed.
    """
    scenario = scenario_of(config, world_size, cluster)
    print_runs(f"a GPT, {config.steps:,} steps", scenario, [scenario.run(name) for name in strategies])
    for line in _limits(cluster):
        print(line)
    words = [word for name in strategies for word in ("--strategy", name)]
    print(f"this run: {shlex.join([*words, *words_of(config, config.recipe, but=('strategy',))])}")


def _limits(cluster: Cluster) -> Iterator[str]:
    """Yield the limits of the predicted numbers, a sentence each."""
    yield "the run prints calls, payload and bytes of state beside what is predicted of them"
    yield "activations: estimated by a formula for 16 bits and dropout; the run does not measure them"
    if cluster.name == "loopback":
        yield "times: a laptop's order of magnitude"
