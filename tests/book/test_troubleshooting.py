"""The page for those who are stuck: what it quotes is said, what it names is there, what it claims is so."""

from __future__ import annotations

import ast
import importlib
import inspect
import mmap
import re
import shlex
from datetime import timedelta
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.flight_recorder.components.config_manager import JobConfig
from torch.distributed.run import get_args_parser
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import zero_ref
from zero_ref import ZeroRedundancyOptimizer, cli
from zero_ref.comm.collectives import Collectives
from zero_ref.lab import virtual

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "book" / "troubleshooting.md").read_text()
FENCED = re.compile(r"^```(\w+)\n(.*?)^```", re.M | re.S)
PROSE = FENCED.sub("", PAGE)

QUOTES = [" ".join(line[2:].split()) for line in PROSE.splitlines() if line.startswith("> ")]
"""The quoted messages of the package: lines that begin with "> ", with … for parts that vary."""

COMMANDS = [
    shlex.split(line)
    for language, block in FENCED.findall(PAGE)
    if language == "bash"
    for line in block.splitlines()
]


@cache
def sentences() -> list[str]:
    """Every text in the package's sources but docstrings, with … for the values that are put into it."""
    found = []
    for path in sorted([*(ROOT / "zero_ref").rglob("*.py"), *(ROOT / "zero_ref_course").rglob("*.py")]):
        tree = ast.parse(path.read_text())
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                parts = [str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values]
                found.append(" ".join("".join(parts).split()))
            elif (
                isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings
            ):
                found.append(" ".join(node.value.split()))
    return found


def says(sentence: str, quote: str) -> bool:
    """Whether the fixed parts of `quote` stand in `sentence`, in their order."""
    position = 0
    for part in quote.split("…"):
        found = sentence.find(part.strip(), position)
        if found < 0:
            return False
        position = found + len(part.strip())
    return True


# ---------------------------------------------------------------------------------------- what is on the page


@pytest.mark.parametrize("quote", QUOTES)
def test_the_package_says_what_the_page_quotes(quote: str) -> None:
    assert len(quote.replace("…", "")) > 20  # less would be found by chance
    assert any(says(sentence, quote) for sentence in sentences()), quote


def test_a_quote_is_found_only_where_all_its_parts_stand_in_order() -> None:
    assert says("rank …: 3 of … are gone", "rank …: 3 of … are gone")
    assert says("rank …: 3 of … are gone. Do that.", "3 of … are gone")
    assert not says("rank …: 3 of … are gone", "are gone … rank")
    assert not says("rank …: 3 of … are gone", "4 of … are gone")
    assert not any(says(sentence, "no rank ever said " + "this") for sentence in sentences())


def test_every_section_quotes_or_runs_something() -> None:
    sections = re.split(r"^## ", PAGE, flags=re.M)[1:]
    assert len(sections) == 5
    for section in sections:
        assert "\n> " in section or "```" in section, section.splitlines()[0]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_commands_and_their_options_exist(words: list[str]) -> None:
    program, *rest = words
    if program == "zero-ref":
        cli.make_parser()[0].parse_args(rest)
    elif program == "torchrun":
        launched = get_args_parser().parse_args(rest)
        importlib.import_module(launched.training_script)
        assert "zero_ref" in launched.training_script
    elif program == "torchfrtrace":
        assert JobConfig().parse_args(rest).trace_dir == "traces"
    else:
        assert program in ("export", "mkdir", "py-spy")


def test_python_on_the_page_can_be_read_and_its_imports_exist() -> None:
    blocks = [block for language, block in FENCED.findall(PAGE) if language == "python"]
    for block in blocks:
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom):
                module = importlib.import_module(str(node.module))
                assert all(hasattr(module, name.name) for name in node.names)
    assert len(blocks) >= 5


def test_names_on_the_page_exist() -> None:
    for dotted in re.findall(r"`(zero_ref(?:\.\w+)+)`", PROSE):
        module, _, name = dotted.rpartition(".")
        if dotted == "zero_ref.optimizer":  # a logger's name
            importlib.import_module(dotted)
        else:
            assert hasattr(importlib.import_module(module), name), dotted
    for name in (
        "reduce_to_owners",
        "hook_with_zero_step",
        "save_sharded",
        "load_sharded",
        "clip_grad_norm_",
    ):
        assert f"{name}`" in PROSE
        assert hasattr(zero_ref, name)
    for method in ("step", "consolidate_state_dict", "load_state_dict", "add_param_group"):
        assert f"`{method}`" in PROSE
        assert hasattr(ZeroRedundancyOptimizer, method)
    options = set(inspect.signature(ZeroRedundancyOptimizer).parameters)
    options |= set(inspect.signature(DistributedDataParallel).parameters)
    options |= set(inspect.signature(zero_ref.ShardedDataParallel).parameters)
    options |= set(inspect.signature(zero_ref.OSS).parameters)
    options |= set(inspect.signature(zero_ref.reduce_to_owners).parameters)
    # of consolidate_state_dict
    options |= {"to"}
    named = set(re.findall(r"`(\w+)=", PROSE))
    assert named <= options, named - options


# ---------------------------------------------------------------------------------- what torch is said to do


def test_torch_has_these_variables_and_this_message() -> None:
    assert "Detected mismatch between collectives on ranks" in " ".join(PAGE.split())
    named = set(re.findall(r"\bTORCH_(?:FR|NCCL)_\w+", PAGE))
    assert len(named) == 4
    folder = Path(torch.__file__).parent
    headers = folder / "include" / "torch" / "csrc" / "distributed" / "c10d"
    texts = [(headers / name).read_bytes() for name in ("FlightRecorder.hpp", "ProcessGroupNCCL.hpp")]
    missing = {name for name in named if not any(f'"{name}"'.encode() in text for text in texts)}
    # What names the files is read in a source of which only the compiled form is here.
    assert missing <= {"TORCH_FR_DUMP_TEMP_FILE"}
    library = folder / "lib" / "libtorch_cpu.so"
    if library.exists():
        with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as binary:
            assert all(binary.find(name.encode()) >= 0 for name in missing)
            assert binary.find(b"Detected mismatch between collectives on ranks") >= 0


def test_the_default_time_outs_are_those_on_the_page() -> None:
    assert "10 minutes under NCCL, after 30 under Gloo" in " ".join(PAGE.split())
    assert default_pg_timeout == timedelta(minutes=30)
    said = " ".join(str(dist.init_process_group.__doc__).split())
    assert "Default value is 10 minutes for NCCL and 30 minutes for other backends" in said


# ---------------------------------------------------------------------------- what the package is said to do


def a_step(comm: Collectives, average: bool, local_lr: float | None = None) -> tuple[float, float]:
    """A weight of 0 after a step of SGD at 0.1, with a gradient of 1 on rank 0 and of 3 on rank 1."""
    weight = torch.nn.Parameter(torch.zeros(1))
    zero = ZeroRedundancyOptimizer([weight], SGD, comm, lr=0.1)
    weight.grad = torch.full((1,), 2.0 if average else 1.0 + 2 * comm.rank)
    if local_lr is not None:
        zero.optim.param_groups[0]["lr"] = local_lr
    zero.step()
    return weight.item(), zero.optim.param_groups[0]["lr"]


def test_without_averaging_ranks_agree_on_one_batch_and_nothing_is_raised() -> None:
    averaged = [weight for weight, _ in virtual.run(a_step, 2, True)]
    not_averaged = [weight for weight, _ in virtual.run(a_step, 2, False)]
    assert averaged == [pytest.approx(-0.2)] * 2
    assert not_averaged == [pytest.approx(-0.1)] * 2  # the owner's batch, on both ranks


def test_a_learning_rate_set_on_the_local_optimizer_is_overwritten() -> None:
    assert virtual.run(a_step, 2, True, 0.5) == virtual.run(a_step, 2, True)
