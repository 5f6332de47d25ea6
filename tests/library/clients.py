"""The programs of book/clients.md and of tests/scripts, started by torchrun on two ranks on the CPU.

    torchrun --nproc-per-node=2 clients.py OPTIMIZER RESULT PROGRAM [ARGUMENT ...]

runs one on each rank with an optimizer in the place of `zero_ref.ZeroRedundancyOptimizer`: "plain", or this
class under the partition of that name. "as it is" leaves the program alone. Each rank writes what it had:
parameters before and after, learning rates, inputs.
"""

from __future__ import annotations

import faulthandler
import hashlib
import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from zero_ref.shard.groups import params_of

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "book" / "clients.md"
WORLD_SIZE = 2


def programs() -> dict[str, str]:
    """The page's programs, by the heading that each stands under."""
    sections = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.M)[1:]
    found = [
        (text.partition("\n")[0], re.search(r"^```python\n(.*?)^```", text, re.M | re.S)) for text in sections
    ]
    return {heading: program[1] for heading, program in found if program is not None}


def launch(optimizer: str, program: str, folder: Path, *arguments: object) -> tuple[int, str]:
    """Run the program, which saves in `folder`; returns torchrun's exit code and what was printed."""
    script = folder.with_suffix(".py")
    script.write_text(program)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={WORLD_SIZE}",
    ]
    command += [__file__, optimizer, str(folder.with_suffix(".pt")), str(script), str(folder)]
    environ = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    started = subprocess.Popen(
        [*command, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environ,
        cwd=folder.parent,
        start_new_session=True,
    )
    try:
        said, _ = started.communicate(timeout=600)
    finally:
        if started.poll() is None:  # torchrun ends its ranks when it is told to end
            os.killpg(started.pid, signal.SIGTERM)
            started.wait()
    return started.returncode, said


def outcome(optimizer: str, program: str, folder: Path, *arguments: object) -> list[dict[str, Any]]:
    """Return each rank's values after the program, which must succeed."""
    code, said = launch(optimizer, program, folder, *arguments)
    assert code == 0, said
    return [torch.load(f"{folder.with_suffix('.pt')}.{rank}") for rank in range(WORLD_SIZE)]


def no_callback() -> Any:
    """One that does nothing."""
    from transformers import TrainerCallback  # takes seconds, and only the Trainer's programs need it

    return TrainerCallback()


class PlainState:
    """The state of a plain optimizer, for torch.distributed.checkpoint to save and load."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: object = None) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> Any:
        return get_optimizer_state_dict(self.model, self.optimizer)

    def load_state_dict(self, state_dict: Any) -> None:
        set_optimizer_state_dict(self.model, self.optimizer, state_dict)


def on_rank(optimizer: str, result: str, script: str, *arguments: str) -> None:
    """Run the script on this rank and write what it had."""
    import zero_ref

    ours = zero_ref.ZeroRedundancyOptimizer
    made: list[torch.optim.Optimizer] = []
    watched: list[nn.Module] = []
    had: dict[str, list[Any]] = {"start": [], "inputs": []}

    class Chosen(torch.optim.Optimizer):
        def __new__(cls, params: Any, optimizer_class: Any, **options: Any) -> Any:
            if optimizer == "plain":
                made.append(optimizer_class(params, **options))
            else:
                # Each class of these programs updates every element by itself; only the user knows that.
                made.append(ours(params, optimizer_class, partition=optimizer, elementwise=True, **options))
            had["start"] = [param.detach().clone() for param in params_of(made[0].param_groups)]
            return made[0]

    def note_inputs(module: nn.Module, args: tuple[Any, ...]) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)) and module.training:
            watched[:] = watched or [module]  # the first one that runs has the data
            if module is watched[0]:
                had["inputs"].append(hashlib.sha256(args[0].numpy().tobytes()).hexdigest())

    nn.modules.module.register_module_forward_pre_hook(note_inputs)
    if optimizer != "as it is":
        zero_ref.ZeroRedundancyOptimizer = Chosen  # type: ignore[misc, assignment]
    if optimizer == "plain":  # has nothing to gather
        zero_ref.consolidation_hook = lambda *optimizers: lambda *args: None
        zero_ref.consolidation_callback = no_callback  # type: ignore[assignment]
        zero_ref.StatefulOptimizer = PlainState  # type: ignore[assignment, misc]
    sys.argv = [script, *arguments]
    names = runpy.run_path(script, run_name="__main__")
    had["params"] = [param.detach() for param in names["model"].parameters()]
    if made:
        had["params"] = [param.detach() for param in params_of(made[0].param_groups)]
        had["lr"] = [group["lr"] for group in made[0].param_groups]
    torch.save(had, f"{result}.{os.environ['RANK']}")
    # When `names` goes, so does DDP, and the destructor of its process group may wait for ever for a thread
    # that waits for Python's lock: torch 2.13, plain optimizer, 2 of 24 starts on a busy machine.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    faulthandler.dump_traceback_later(540, exit=True)  # what hangs says where, before `launch` gives up
    on_rank(*sys.argv[1:])
