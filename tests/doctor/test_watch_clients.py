"""`watch` in training loops of others, under torchrun: the files that the doctor's page shows."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ranks, pytest.mark.thorough]
ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "book" / "watch"


def launched(source: str, folder: Path, *arguments: str) -> tuple[int, str]:
    """Run a program by torchrun on two ranks; its exit code, and what it printed."""
    (folder / "program.py").write_text(source, encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "program.py",
    ]
    started = subprocess.Popen(
        [*command, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        start_new_session=True,
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "OMP_NUM_THREADS": "1",
        }
        | {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu"},
    )
    try:
        said, _ = started.communicate(timeout=900)
    finally:
        if started.poll() is None:
            os.killpg(started.pid, signal.SIGTERM)
            started.wait()
    return started.returncode, said


@pytest.mark.parametrize(
    ("name", "library", "arguments"),
    [
        ("trainer", "transformers", ()),
        ("deepspeed_loop", "deepspeed", ("1",)),
        ("deepspeed_loop", "deepspeed", ("2",)),
        ("deepspeed_loop", "deepspeed", ("3",)),
    ],
)
def test_a_right_loop_passes_and_another_plain_class_departs(
    name: str, library: str, arguments: tuple[str, ...], tmp_path: Path
) -> None:
    pytest.importorskip(library)
    source = (PROGRAMS / f"{name}.py").read_text(encoding="utf-8")
    code, said = launched(source, tmp_path, *arguments)
    assert code == 0, said
    assert "on each rank the shadow will hold" in said
    code, said = launched(
        source.replace("optimizer, model=", "optimizer, torch.optim.SGD, model="), tmp_path, *arguments
    )
    assert code == 1
    assert "step 0, step: parameter" in said, said


MADE = "watched = watch(optimizer, model=model)\n"
MISTAKES = {
    "weights that are loaded after the copies were made": (
        "model.lm_head.weight.data.mul_(1.5)",
        r"before step: parameter 0 \(transformer.wte.weight\) is not the 32-bit copy",
    ),
    "a norm of the rank's own part": (
        "optimizer.scaled_global_norm = "
        "lambda: torch.stack([one.norm() for one in optimizer.averaged_gradients[0]]).norm()",
        r"step 0, step: parameter \d+ \(.*\) moved [\d.]+ times as far as the plain step",
    ),
    "parts that are not gathered": (
        "import deepspeed.runtime.zero.stage_1_and_2 as stage; stage.all_gather_dp_groups = lambda **_: None",
        r"step 0, step: parameter 0 .* is not the 32-bit copy .* on the ranks \[1\]",
    ),
    "another rate on each rank": (
        "optimizer.param_groups[0]['lr'] *= 1 + torch.distributed.get_rank()",
        r"before step: group option lr is 0.002 on rank 1 and 0.001 on rank 0",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_what_is_wrong_under_deepspeed_is_said(name: str, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    line, says = MISTAKES[name]
    source = (PROGRAMS / "deepspeed_loop.py").read_text(encoding="utf-8")
    assert MADE in source
    code, said = launched(source.replace(MADE, f"{MADE}{line}\n"), tmp_path)
    assert code == 1
    assert re.search(says, said), said


def test_steps_that_overflow_are_left_out(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    source = (PROGRAMS / "deepspeed_loop.py").read_text(encoding="utf-8")
    in_16_bits = '"fp16": {"enabled": True, "initial_scale_power": 32, "hysteresis": 1}'
    source = source.replace('"bf16": {"enabled": True}', in_16_bits).replace("range(8)", "range(40)")
    code, said = launched(f"{source}print(engine.skipped_steps, 'left out')\n", tmp_path)
    assert code == 0, said
    assert re.search(r"\b1\d left out", said), said


def test_what_deepspeed_hides_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    source = (PROGRAMS / "deepspeed_loop.py").read_text(encoding="utf-8")
    enabled = '"bf16": {"enabled": True}'
    sums = source.replace(enabled, enabled + ', "data_types": {"grad_accum_dtype": "fp32"}')
    code, said = launched(sums, tmp_path, "1")
    assert code == 1
    assert "BF16_Optimizer: use stage 2 or 3 of zero_optimization, stage 1 without grad_accum_dtype" in said


UNDER_DEEPSPEED = (
    (
        "report_to=[],",
        """report_to=[],
    deepspeed={
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    },""",
    ),
    ("    fully_shard(block)\nfully_shard(model)\n", "    pass\n"),
    ("trainer.accelerator.prepare_model =", "unused ="),
)


def test_the_trainer_is_followed_under_deepspeed(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    pytest.importorskip("transformers")
    source = (PROGRAMS / "trainer.py").read_text(encoding="utf-8")
    for old, new in UNDER_DEEPSPEED:
        assert old in source
        source = source.replace(old, new)
    code, said = launched(source, tmp_path)
    assert code == 0, said
    assert "on each rank the shadow will hold" in said
    code, said = launched(source.replace("optimizer, model=", "optimizer, torch.optim.SGD, model="), tmp_path)
    assert code == 1
    assert "step 0, step: parameter" in said, said


LOADS = """
import sys
if "load" in sys.argv:
    engine.load_checkpoint("saves", load_optimizer_states="moments" not in sys.argv)
    for state in optimizer.optimizer.state.values() if "zeros" in sys.argv else ():
        state["exp_avg"].zero_()
"""


def test_a_resume_of_deepspeed_is_followed(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    source = (PROGRAMS / "deepspeed_loop.py").read_text(encoding="utf-8")
    noted = MADE.replace("=model", "=model, record='notes'")
    source = source.replace(MADE, noted + LOADS)
    saves = source.replace("watched.check()", 'engine.save_checkpoint("saves")')
    code, said = launched(saves, tmp_path, "2")
    assert code == 0, said
    code, said = launched(source, tmp_path, "2", "load")
    assert code == 0, said
    assert launched(source, tmp_path, "2", "load", "zeros")[1].count("state exp_avg of parameter 0") >= 1
    _, said = launched(source, tmp_path, "2", "load", "moments")
    assert "load: the parameters are those of a save, and load_state_dict was not called" in said, said


FAIRSCALE = """
import torch, torch.distributed as dist
from fairscale.nn.data_parallel import ShardedDataParallel
from fairscale.optim.oss import OSS
from torch.nn.parallel import DistributedDataParallel as DDP
from zero_ref.doctor.watch import watch
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))
optimizer = OSS(model.parameters(), torch.optim.AdamW, lr=0.05)
wrapper = ShardedDataParallel(model, optimizer)
watched = watch(optimizer, model=model)
torch.manual_seed(dist.get_rank())
for _ in range(6):
    wrapper.zero_grad()
    for _ in range(2):
        wrapper(torch.randn(6, 5)).square().mean().backward()
    optimizer.clip_grad_norm(0.1)
    optimizer.step()
watched.check()
"""


def test_fairscale_is_followed_under_both_wrappers(tmp_path: Path) -> None:
    pytest.importorskip("fairscale")
    code, said = launched(FAIRSCALE, tmp_path)
    assert code == 0, said
    under_ddp = FAIRSCALE.replace("ShardedDataParallel(model, optimizer)", "DDP(model)")
    code, said = launched(under_ddp.replace(".clip_grad_norm(0.1)", ".zero_grad"), tmp_path)
    assert code == 0, said
    without = under_ddp.replace("DDP(model)", "model").replace(".clip_grad_norm(0.1)", ".zero_grad")
    code, said = launched(without, tmp_path)
    assert code == 1
    assert re.search(r"before step: gradient \d \(.*\) differs between ranks", said), said
    lost = FAIRSCALE.replace("watched =", "optimizer._broadcast_params = lambda: None; watched =")
    code, said = launched(lost, tmp_path)
    assert code == 1
    assert re.search(r"step 0, step: parameter 0 .* moved 0.000 times .* on the ranks \[", said), said
