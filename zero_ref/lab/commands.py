"""A way to train as what a user types: a command of the simulator, one of the lab, lines of a program.

Only what runs is written: a way that `lab.train` or the package's classes do not offer has no such lines.
"""

from __future__ import annotations

from collections.abc import Sequence

from zero_ref.lab.config import GPTConfig, TrainConfig
from zero_ref.simulator.ledger import STATE_RULES
from zero_ref.simulator.models import GPT2
from zero_ref.simulator.options import words_of
from zero_ref.simulator.recipe import recipe
from zero_ref.simulator.scenario import Scenario
from zero_ref.simulator.training import DTYPES, MOST_PASSES

MOST_OPERATIONS = 2**20
"""`zero-ref simulate` plays all passes of an update, and plays so many operations in ten seconds."""

ALONE = "dist.new_subgroups(1)[0]"
"""The group in which a rank shares its state with nobody: torch's own AdamW keeps no 32-bit copies."""


def simulate_command(
    scenario: Scenario, strategy: str, model: Sequence[str], cluster: str
) -> list[str] | None:
    """The words of the `zero-ref simulate` that gives the same numbers; None if it has too much to play.

    >>> from zero_ref.simulator.cluster import cluster
    >>> from zero_ref.simulator.models import MODELS
    >>> scenario = Scenario(MODELS["gpt2"], cluster("a100-ib"), 16, batch=4, shard_group=8)
    >>> " ".join(simulate_command(scenario, "zero-2", ["--model", "gpt2"], "a100-ib"))
    'zero-ref simulate --model gpt2 --cluster a100-ib --ranks 16 --strategy zero-2 --batch 4 --shard-group 8'

    Args:
        model: the option that names the model, and its value.
        cluster: its name, or the file that it was read from.
    """
    a_pass = 4 * len(scenario.params) if recipe(strategy).in_groups else 1
    if scenario.accumulation > min(MOST_PASSES, MOST_OPERATIONS // a_pass):
        return None
    words = ["zero-ref", "simulate", *model, "--cluster", cluster, "--ranks", str(scenario.world_size)]
    return [*words, "--strategy", strategy, *words_of(scenario, recipe(strategy))]


def train_command(scenario: Scenario, strategy: str) -> list[str] | None:
    """The words that train the lab's GPT of these dimensions, on bytes, in this way; None if there are none.

    >>> from zero_ref.simulator.cluster import cluster
    >>> from zero_ref.simulator.models import MODELS
    >>> scenario = Scenario(MODELS["gpt2"], cluster("a100-ib"), 8, dtype="float32")
    >>> " ".join(train_command(scenario, "zero-3"))
    'torchrun --nproc-per-node=8 -m zero_ref.lab.train --strategy zero-3 --batch-size 1 --layers 12 --heads 12
     --width 768 --context 1024'
    """
    if (config := _trained(scenario, strategy)) is None:
        return None
    words = ["torchrun", *_machines(scenario), "-m", "zero_ref.lab.train", "--strategy", strategy]
    return [*words, *words_of(config, recipe(strategy), but=("strategy",))]


def _trained(scenario: Scenario, strategy: str) -> TrainConfig | None:
    """The run of the lab that trains in this way; None if there is none."""
    model, of_node = scenario.architecture, scenario.cluster.ranks_per_node
    as_the_lab_does = (
        scenario.optimizer == "AdamW"
        and scenario.checkpointing in ("none", "selective")
        and scenario.attention == "fused"
        and scenario.autocast is None
        and not scenario.fp8
        and scenario.lora is None
        and scenario.gradient_dtype in (None, scenario.dtype)
        and scenario.accumulation == 1
        and scenario.offload is None
        and not (scenario.masters_16 or scenario.states_8)
        and (scenario.shard_group is None or recipe(strategy).without_ddp)
        and (scenario.world_size <= of_node or scenario.world_size % of_node == 0)
    )
    if not isinstance(model, GPT2) or not as_the_lab_does:
        return None
    try:
        return TrainConfig(
            strategy,
            way=scenario.way,
            shard_group=scenario.shard_group,
            master_dtype="float32" if _mixed(scenario) else None,
            batch_size=scenario.batch,
            model=GPTConfig(
                model.depth, model.heads, model.width, scenario.tokens_of_sequence, dtype=scenario.dtype
            ),
        )
    except ValueError:  # says why the lab cannot
        return None


def program(scenario: Scenario, strategy: str) -> list[str] | None:
    """Lines that wrap a `model` and make its optimizer, for a program of one's own; None if there are none.

    The model is in the scenario's dtype, on its device; under stage 3 with 32-bit masters it is in float32,
    and `blocks` are its blocks. What is checkpointed is up to the model.

    >>> from zero_ref.simulator.cluster import cluster
    >>> from zero_ref.simulator.models import MODELS
    >>> scenario = Scenario(MODELS["gpt2"], cluster("a100-ib"), 8, dtype="float32")
    >>> print(*program(scenario, "ddp"), sep="\\n")
    import torch
    from torch.nn.parallel import DistributedDataParallel
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    """
    runs = scenario.optimizer in STATE_RULES and "+" not in scenario.optimizer
    offloads = scenario.offload is None or (
        scenario.offload == "state" and scenario.offload_fraction == 1 and recipe(strategy).stage < 3
    )
    narrow = scenario.masters_16 or scenario.states_8  # no optimizer of torch or of this package
    if not (runs and offloads) or narrow or strategy not in _LINES:
        return None
    lines = ["import torch", *_LINES[strategy](scenario), *_accumulating(scenario, strategy)]
    if scenario.gradient_dtype not in (None, scenario.dtype):
        lines.append(f"# the loop adds gradients up in torch.{scenario.gradient_dtype}")
    if scenario.lora is not None:
        lines.append(f"# before it is wrapped: LoRA of rank {scenario.lora}, {scenario.lora_on}, as peft's")
    if scenario.fp8:
        lines.append("# before it is wrapped: torchao.float8.convert_to_float8_training(model)")
    if scenario.autocast:
        lines.append(f'# model and loss: with torch.autocast("cuda", torch.{scenario.autocast})')
    return lines


def _ddp(scenario: Scenario) -> list[str]:
    wrapped = ["from torch.nn.parallel import DistributedDataParallel", _wrapped_in_ddp(scenario)]
    if _mixed(scenario) or scenario.offload:
        made = _sharded(scenario, "sorted_greedy", ALONE)
        return ["import torch.distributed as dist", *wrapped, *made]
    return [*wrapped, f"optimizer = torch.optim.{scenario.optimizer}(model.parameters())"]


def _zero_even(scenario: Scenario) -> list[str]:
    wrapped = ["from torch.nn.parallel import DistributedDataParallel", _wrapped_in_ddp(scenario)]
    return [*wrapped, *_sharded(scenario, "even")]


def _zero_2(scenario: Scenario) -> list[str]:
    lines, group, replicas = ["from zero_ref import ShardedDataParallel"], "", ""
    if _in_groups(scenario):
        lines += _mesh(scenario)
        group, replicas = 'mesh["shard"].get_group()', ', replicas=mesh["replicas"]'
    made = _sharded(scenario, "equal_shares", group)
    return [*lines, *made, f"model = ShardedDataParallel(model, optimizer{replicas})"]


def _zero_3(scenario: Scenario) -> list[str]:
    lines = ["from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard"]
    options = []
    if _in_groups(scenario):
        lines += _mesh(scenario)
        options.append("mesh=mesh")
    if _mixed(scenario):
        reduced = scenario.reduce_dtype or scenario.dtype
        options.append(f"mp_policy=MixedPrecisionPolicy(torch.{scenario.dtype}, torch.{reduced})")
    listed = "".join(f", {option}" for option in options)
    lines += [f"for block in blocks: fully_shard(block{listed})", f"fully_shard(model{listed})"]
    return [*lines, f"optimizer = torch.optim.{scenario.optimizer}(model.parameters())"]


def _accumulating(scenario: Scenario, strategy: str) -> list[str]:
    """A remark on the loop."""
    if scenario.accumulation == 1:
        return []
    said = f"# an update: {scenario.accumulation:,} backwards, then optimizer.step()"
    if scenario.all_reduce_last and not scenario.no_sync:
        return [f"{said}; before the first model.set_requires_all_reduce(False), before the last True"]
    if recipe(strategy).in_groups and not scenario.no_sync:
        return [said]
    if strategy == "zero-3":
        return [f"{said}; before the first model.set_requires_gradient_sync(False), before the last True"]
    return [f"{said}; all backwards but the last under model.no_sync()"]


_LINES = {"ddp": _ddp, "zero-even": _zero_even, "zero-2": _zero_2, "zero-3": _zero_3}


def _mixed(scenario: Scenario) -> bool:
    return scenario.masters and DTYPES[scenario.dtype] == 2


def _in_groups(scenario: Scenario) -> bool:
    return scenario.shard_group not in (None, scenario.world_size)


def _wrapped_in_ddp(scenario: Scenario) -> str:
    view = ", gradient_as_bucket_view=True" if scenario.bucket_view else ""
    return f"model = DistributedDataParallel(model{view})"


def _sharded(scenario: Scenario, partition: str, group: str = "") -> list[str]:
    words = ["model.parameters()", f"torch.optim.{scenario.optimizer}", *([group] if group else [])]
    lines, choice = ["from zero_ref import ZeroRedundancyOptimizer"], f'"{partition}"'
    if partition == "equal_shares" and scenario.range_numel is not None:
        lines = [
            "from functools import partial",
            "from zero_ref import ZeroRedundancyOptimizer, equal_shares",
        ]
        choice = f"partial(equal_shares, range_numel={scenario.range_numel})"
    words.append(f"partition={choice}")
    if group != ALONE:
        words.append("parameters_as_bucket_view=True")
    if _mixed(scenario):
        words.append("master_dtype=torch.float32")
    if scenario.offload:
        words.append('state_device="cpu"')
    return [*lines, f"optimizer = ZeroRedundancyOptimizer({', '.join(words)})"]


def _mesh(scenario: Scenario) -> list[str]:
    group = scenario.shard_group or scenario.world_size
    shape = f"({scenario.world_size // group}, {group})"
    device = "cuda" if scenario.cluster.backend == "nccl" else "cpu"
    return [
        "from torch.distributed.device_mesh import init_device_mesh",
        f'mesh = init_device_mesh("{device}", {shape}, mesh_dim_names=("replicas", "shard"))',
    ]


def _machines(scenario: Scenario) -> list[str]:
    """Return torchrun's options; on several machines HOST stands for the first one's address."""
    ranks, of_node = scenario.world_size, scenario.cluster.ranks_per_node
    if ranks <= of_node:
        return [f"--nproc-per-node={ranks}"]
    endpoint = ["--rdzv-backend=c10d", "--rdzv-endpoint=HOST:29500"]
    return [f"--nnodes={ranks // of_node}", f"--nproc-per-node={of_node}", *endpoint]
