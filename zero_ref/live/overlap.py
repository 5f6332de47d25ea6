"""The overlap explorer: one iteration under a strategy and under plain DDP, on links that can be changed."""

from __future__ import annotations

from functools import lru_cache

from zero_ref.live.explorer import RANKS, Answer, Control, Explorer, params_of
from zero_ref.live.lanes import lanes
from zero_ref.live.numbers import short, short_time
from zero_ref.live.svg import MARGIN, picture
from zero_ref.simulator.cluster import CLUSTERS, Cluster, Link
from zero_ref.simulator.models import MODELS, blocks
from zero_ref.simulator.operations import WAYS
from zero_ref.simulator.play import play
from zero_ref.simulator.price import Workload
from zero_ref.simulator.recipe import RECIPES, recipe
from zero_ref.simulator.scenario import Scenario
from zero_ref.simulator.schedule import MIB, Schedule, ddp_buckets, schedule
from zero_ref.simulator.training import LONGEST_SEQUENCE

FACTORS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0)


def _draw(
    width: float, model: str, cluster: str, strategy: str, way: str, bucket_mb: int, latency: float,
    bandwidth: float, ranks: int, tokens: int,
) -> Answer:  # fmt: skip
    links = CLUSTERS[cluster].with_links(latency=latency, bandwidth=bandwidth)
    how = RECIPES[strategy]
    plans = {"ddp": _plan(model, "ddp", ranks, bucket_mb)}
    options = (way if way in how.ways else "plain", links.backend == "nccl") if how.partition else ()
    plans[strategy] = _plan(model, strategy, ranks, bucket_mb, *options)
    played = {
        name: play(plan, links, _workload(model, links, name, ranks, tokens)) for name, plan in plans.items()
    }
    critical = played[strategy].critical_ms()
    timelines = {name: one.timeline() for name, one in played.items()}
    numbers: dict[str, float] = {}
    rows = [["", "iteration, ms", "exposed, ms", "computing nothing, ms"]]
    for name, one in timelines.items():
        iterations = played[name].schedule.iterations
        found = {
            "iteration": played[name].iteration_ms,
            "exposed": one.exposed_ms / iterations,
            "idle": one.idle_ms / iterations,
        }
        rows.append([name, *(short(ms) for ms in found.values())])
        numbers |= {f"{name}, {what}, ms": ms for what, ms in found.items()}
    numbers |= {f"{strategy}, critical path, {label}, ms": ms for label, ms in critical.items()}
    rows.append(["critical path:", "ms", "", ""])
    rows += [[label, short(ms), "", ""] for label, ms in critical.items()]
    took = [f"{short_time(numbers[f'{name}, iteration, ms'])} under {name}" for name in timelines]
    words = (
        f"{model} on {ranks:,} rank{'s' if ranks > 1 else ''} of {cluster}: an iteration takes "
        f"{' and '.join(took)}, of which {short_time(numbers[f'{strategy}, exposed, ms'])} are exposed "
        f"communication. A link between nodes has {_written(links.between)}, one inside a node "
        f"{_written(links.within)}."
    )
    parts, bottom = lanes(timelines, MARGIN, 14.0, width - 2 * MARGIN)
    idle = {} if len(how.ways) > 1 else {"way": f"{strategy} has one way to update"}
    if how.stage == 3:
        idle["bucket_mb"] = f"{strategy} reduces block by block"
    elif how.without_ddp:
        idle["bucket_mb"] = f"{strategy} runs without DDP, whose buckets these are"
    return Answer(picture(width, bottom, words, parts), words, rows, numbers, idle)


def _written(link: Link) -> str:
    return f"{short(link.latency_us)} µs and {short(link.gb_per_s)} GB/s"


def _workload(model: str, links: Cluster, strategy: str, ranks: int, tokens: int) -> Workload:
    """Return a strategy's work on so many tokens, in one sequence, or in sequences of the longest length."""
    architecture = MODELS[model]
    sequence = min(tokens, getattr(architecture, "positions", tokens), LONGEST_SEQUENCE)
    scenario = Scenario(architecture, links, ranks, batch=tokens // sequence, sequence=sequence)
    return scenario.workload_of(strategy)


@lru_cache(maxsize=8)
def _plan(
    model: str, strategy: str, ranks: int, bucket_mb: int, way: str = "plain", side_stream: bool = False,
) -> Schedule:  # fmt: skip
    """A schedule knows no clock: other links, devices and batches play the same one."""
    params = params_of(model)
    stage_3 = RECIPES[strategy].stage == 3
    return schedule(
        recipe(strategy, way=way),
        params,
        ranks,
        ddp_buckets=ddp_buckets(params, cap_bytes=bucket_mb * MIB),
        blocks=blocks(params) if stage_3 else None,
        side_stream=side_stream,
    )


OVERLAP = Explorer(
    "overlap",
    "Overlap explorer",
    (
        Control("model", "model", "llama3-8b", tuple(MODELS)),
        Control("cluster", "cluster", "a100-ethernet", tuple(CLUSTERS)),
        Control("strategy", "strategy", "zero-2", tuple(RECIPES)),
        Control("way", "update", "in_forward", tuple(WAYS), {way: way.replace("_", " ") for way in WAYS}),
        Control("bucket_mb", "bucket, MiB", 25, (1, 2, 4, 8, 16, 25, 32, 64, 128, 256, 512, 1024)),
        Control("latency", "latency, times the cluster's", 1.0, FACTORS),
        Control("bandwidth", "bandwidth, times the cluster's", 1.0, FACTORS),
        Control("ranks", "ranks", 64, RANKS),
        Control("tokens", "tokens on each rank", 4096, tuple(2**power for power in range(7, 18))),
    ),
    _draw,
)
