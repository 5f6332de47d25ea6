"""The programs of book/clients.md in Lightning, accelerate and transformers, on two ranks each.

Programs for torch's ZeroRedundancyOptimizer, in tests/scripts, run with the import from zero_ref.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from library.clients import launch, outcome, programs
from library.training import assert_state_dicts_equal
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

pytestmark = pytest.mark.ranks

SCRIPTS = Path(__file__).parent.parent / "scripts"
LIGHTNING, ACCELERATE, TRAINER = "Lightning", "accelerate", "transformers' Trainer"
DCP = "torch.distributed.checkpoint"
HALF = {LIGHTNING: "epoch=0.ckpt", ACCELERATE: "batch-6", TRAINER: "checkpoint-3", DCP: "batch-6"}
END = {
    LIGHTNING: "epoch=1.ckpt",
    ACCELERATE: "batch-12/optimizer.bin",
    TRAINER: "checkpoint-6/optimizer.pt",
    DCP: "batch-12",
}


def saved_state(client: str, folder: Path) -> dict[str, Any]:
    """The optimizer's state in the last save."""
    if client == DCP:
        dcp_to_torch_save(folder / END[client], whole := folder / "whole.pt")
        saved = torch.load(whole)["optim"]
        return {**saved, "state": dict(sorted(saved["state"].items()))}
    saved = torch.load(folder / END[client], weights_only=client != LIGHTNING)
    return saved["optimizer_states"][0] if client == LIGHTNING else saved


def assert_equal(ranks: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for rank, (had, other) in enumerate(zip(ranks, expected, strict=True)):
        assert had.get("lr") == other.get("lr")
        for number, (param, its) in enumerate(zip(had["params"], other["params"], strict=True)):
            assert torch.equal(param, its), (rank, number)


def changed(program: str, *changes: tuple[str, str]) -> str:
    for old, new in changes:
        assert program.count(old) == 1, old
        program = program.replace(old, new)
    return program


@pytest.mark.parametrize(
    "client", [pytest.param(one, marks=() if one == DCP else pytest.mark.thorough) for one in programs()]
)
def test_the_pages_program_trains_saves_and_resumes_as_with_the_plain_optimizer(
    client: str, tmp_path: Path
) -> None:
    program = programs()[client]
    plain = outcome("plain", program, tmp_path / "plain")
    for rank, had in enumerate(plain):
        assert not any(map(torch.equal, had["start"], had["params"])), "all have moved"
        assert set(had["inputs"]).isdisjoint(plain[1 - rank]["inputs"]), "each rank has its own data"
    whole = outcome("sorted_greedy", program, tmp_path / "whole")
    half = tmp_path / "whole" / HALF[client]
    resumed = outcome("even", program, tmp_path / "resumed", half)
    for ranks in (whole, resumed):
        assert_equal(ranks, plain)
    assert [had["inputs"] for had in whole] == [had["inputs"] for had in plain]
    for had, other in zip(resumed, whole, strict=True):
        assert 0 < len(had["inputs"]) <= len(other["inputs"]) / 2, "the second half alone"
    expected = saved_state(client, tmp_path / "plain")
    for folder in ("whole", "resumed"):
        assert_state_dicts_equal(saved_state(client, tmp_path / folder), expected)


@pytest.mark.thorough
def test_accelerate_prepares_all_in_one_call_where_all_ranks_make_the_same_model(tmp_path: Path) -> None:
    program = programs()[ACCELERATE]
    prepared = "model, optimizer, loader, scheduler"
    at_once = changed(
        program,
        ("model, loader = accelerator.prepare(model, DataLoader(", "loader = (DataLoader("),
        ("total_steps=len(loader)", "total_steps=len(loader) // 2"),
        (
            "optimizer, scheduler = accelerator.prepare(optimizer, scheduler)",
            f"{prepared} = accelerator.prepare({prepared})",
        ),
    )
    assert_equal(
        outcome("sorted_greedy", at_once, tmp_path / "at_once"),
        outcome("sorted_greedy", program, tmp_path / "page"),
    )


@pytest.mark.thorough
def test_the_trainer_saves_the_gathered_state_of_the_best_model(tmp_path: Path) -> None:
    best = 'save_strategy="best", metric_for_best_model="loss", eval_strategy="steps", eval_steps=4,'
    program = changed(
        programs()[TRAINER],
        ("    save_steps=3,", f"    {best}"),
        ("train_dataset=examples,", "train_dataset=examples, eval_dataset=examples[:8],"),
    )
    states = []
    for optimizer in ("plain", "sorted_greedy"):
        outcome(optimizer, program, tmp_path / optimizer)
        states.append(torch.load(tmp_path / optimizer / "checkpoint-4" / "optimizer.pt"))
    expected, state = states
    assert state["state"]
    assert_state_dicts_equal(state, expected)


@pytest.mark.thorough
def test_without_the_callback_the_first_save_says_what_to_call(tmp_path: Path) -> None:
    program = changed(programs()[TRAINER], ("[consolidation_callback()]", "[]"))
    code, said = launch("sorted_greedy", program, tmp_path / "without")
    assert code != 0
    assert "Call consolidate_state_dict(0) on all ranks" in said


# ------------------------------------------------------------------------------------------- schedule-free

FREE = ("torch.optim.AdamW", "schedulefree.AdamWScheduleFree")
IMPORT = ("import sys\n", "import sys\n\nimport schedulefree\n")
RISING = "torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=4)"


def schedule_free(client: str) -> str:
    """The page's program with a schedule-free optimizer, which is evaluated before each save."""
    program = changed(programs()[client], FREE, IMPORT)
    if client == ACCELERATE:
        onecycle = "torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=len(loader))"
        return changed(
            program,
            (onecycle, RISING),
            (
                "    with accelerator.accumulate(model):",
                "    optimizer.train()\n    with accelerator.accumulate(model):",
            ),
            ("    if batch % 6 == 0:\n", "    if batch % 6 == 0:\n        optimizer.eval()\n"),
        )
    return changed(
        program,
        ("save_steps=3,", 'save_steps=3, eval_strategy="steps", eval_steps=3,'),
        ("train_dataset=examples,", "train_dataset=examples, eval_dataset=examples[:8],"),
    )


@pytest.mark.thorough
@pytest.mark.parametrize("client", [ACCELERATE, TRAINER])
def test_a_schedule_free_optimizer_trains_evaluates_saves_and_resumes_as_the_plain_one(
    client: str, tmp_path: Path
) -> None:
    program = schedule_free(client)
    plain = outcome("plain", program, tmp_path / "plain")
    assert not any(map(torch.equal, plain[0]["start"], plain[0]["params"])), "all have moved"
    whole = outcome("sorted_greedy", program, tmp_path / "whole")
    half = tmp_path / "whole" / HALF[client]
    resumed = outcome("even", program, tmp_path / "resumed", half)
    for ranks in (whole, resumed):
        assert_equal(ranks, plain)
    expected = saved_state(client, tmp_path / "plain")
    assert [group["train_mode"] for group in expected["param_groups"]].count(False) > 0
    for folder in ("whole", "resumed"):
        assert_state_dicts_equal(saved_state(client, tmp_path / folder), expected)
        # The models in the saves have the averaged weights.
        saves = (Path(END[client]).parent, *([Path(HALF[client])] if folder == "whole" else []))
        for save in saves:
            ours, theirs = (
                load_file(tmp_path / one / save / "model.safetensors") for one in (folder, "plain")
            )
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(ours[name], theirs[name]) for name in ours)


# ------------------------------------------------------------------------------- only the import is changed

TORCHS = "from torch.distributed.optim import ZeroRedundancyOptimizer"
OURS = "from zero_ref import ZeroRedundancyOptimizer"


@pytest.mark.thorough
@pytest.mark.parametrize(("client", "save"), [("lightning", "epoch=0.ckpt"), ("accelerate", "optimizer.pt")])
def test_a_program_for_torchs_class_gives_equal_results_with_only_the_import_changed(
    client: str, save: str, tmp_path: Path
) -> None:
    theirs = (SCRIPTS / f"torch_{client}.py").read_text()
    ours = changed(theirs, (TORCHS, OURS))
    expected = outcome("as it is", theirs, tmp_path / "theirs")
    assert set(expected[0]["inputs"]).isdisjoint(expected[1]["inputs"]), "each rank has its own data"
    assert_equal(outcome("as it is", ours, tmp_path / "ours"), expected)
    # Each reads the other's save.
    for program, saved in ((theirs, "ours"), (ours, "theirs")):
        folder = tmp_path / f"from_{saved}"
        resumed = outcome("as it is", program, folder, tmp_path / saved / save)
        assert_equal(resumed, expected)
        assert len(resumed[0]["inputs"]) == len(expected[0]["inputs"]) / 2


def with_torchs_class(program: str) -> str:
    """One of the page's programs, without what it imports from zero_ref."""
    program = program.replace("from zero_ref import ZeroRedundancyOptimizer", TORCHS)
    for extra in (", consolidation_hook", ", consolidation_callback"):
        program = program.replace(f"{TORCHS}{extra}", TORCHS)
    return program.replace("consolidation_callback()", "")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("program", "error"),
    [
        (with_torchs_class(programs()[LIGHTNING]), "ValueError: optimizer must support momentum or beta1"),
        (with_torchs_class(programs()[TRAINER]), "RuntimeError: Optimizer state has not been consolidated"),
        (
            changed((SCRIPTS / "torch_accelerate.py").read_text(), (", device_placement=False", "")),
            "RuntimeError: Optimizer state has not been consolidated",
        ),
        (
            changed(
                (SCRIPTS / "torch_accelerate.py").read_text(),
                ("accelerator.wait_for_everyone()", 'accelerator.save_state(folder / "state")'),
            ),
            "RuntimeError: Optimizer state has not been consolidated",
        ),
    ],
    ids=["OneCycleLR", "the Trainer", "prepare", "save_state"],
)
def test_where_torchs_class_fails_as_the_page_says(program: str, error: str, tmp_path: Path) -> None:
    code, said = launch("as it is", program, tmp_path / "theirs")
    assert code != 0
    assert error in said
