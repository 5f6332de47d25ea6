"""`python -m benchmarks gpu`: its measurements on a CPU, tiny; its report; and what it says without a GPU."""

from __future__ import annotations

import contextlib
import gc
import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import tables
from benchmarks.__main__ import main
from benchmarks.gpu import memory, model, report, speed, step
from benchmarks.gpu.budget import Budget, Skipped
from benchmarks.gpu.report import FAILED, MEASURED, SECTIONS, SKIPPED, GpuReport, Section, SectionResult
from benchmarks.rounds import WARM_UP, Case
from zero_ref.comm import devices
from zero_ref.shard.merged import MERGED_NUMEL
from zero_ref.simulator.activations import OF_THE_PAPER, activation_bytes, head_bytes
from zero_ref.simulator.models import GPT2

CPU = torch.device("cpu")
TINY = GPT2(width=32, depth=2, heads=4, vocabulary=101, positions=16)


def long() -> Budget:
    return Budget(600)


# --------------------------------------------------------------------------------------------------- the step


def test_a_step_is_set_against_a_copy_round_by_round() -> None:
    found = step.step(CPU, long(), models=(TINY.shapes(),), copied_bytes=2**12, rounds=3)
    assert [row["what"] for row in found["steps"]] == list(step.BYTES_OF_STEP)
    numel = sum(one.numel for one in TINY.shapes())
    for row in found["steps"]:
        shares = sorted(
            (row["bytes_a_parameter"] * numel / ms) / (2**12 / copy_ms)
            for ms, copy_ms in zip(row["ms"], row["copy_ms"], strict=True)
        )
        assert row["share_of_copy"][0] == pytest.approx(shares[1])
        assert len(row["host_ms"]) == 3


def test_a_model_that_does_not_fit_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "total_memory", lambda device: 10**6)
    found = step.step(CPU, long(), models=(TINY.shapes(),), copied_bytes=2**12)
    assert found == {"steps": [{"model": "28 tensors", "left_out": "too large"}]}


def test_all_take_turns_and_what_is_queued_before_a_case_is_not_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    monkeypatch.setattr(devices, "is_accelerator", lambda device: True)
    monkeypatch.setattr(devices, "timing_events", events_that_say(said))
    cases = {
        name: Case(partial(said.append, name), partial(said.append, "before"), partial(said.append, "after"))
        for name in ("one", "other")
    }
    times = step.in_turns(CPU, cases, 4, meanwhile=lambda: said.append("queued"))
    turn = re.compile(rf"before (?:queued ){{{step.QUEUED}}}begin (one|other) end after ")
    turns = turn.findall(" ".join([*said, ""]))
    assert "".join(turn.sub("", " ".join([*said, ""]))) == "", "every turn is as above"
    assert all({*turns[at : at + 2]} == {"one", "other"} for at in range(0, len(turns), 2))
    assert len(turns) == 2 * (WARM_UP + 4)
    assert [[one.device_ms for one in of] for of in times.values()] == [[7.0] * 4] * 2


def events_that_say(said: list[str]) -> Callable[[torch.device], Any]:
    @contextlib.contextmanager
    def timing_events(device: torch.device) -> Iterator[Callable[[], float]]:
        said.append("begin")
        yield lambda: 7.0
        said.append("end")

    return timing_events


# ----------------------------------------------------------------------------------------------------- memory


def test_what_the_model_keeps_for_backward_is_what_the_formula_counts() -> None:
    gpt = model.PaperGPT(TINY).to(torch.bfloat16)
    batch, sequence = 3, 16
    saved: dict[int, torch.UntypedStorage] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        gpt(torch.ones(batch, sequence + 1, dtype=torch.int64))
    of_weights = {param.untyped_storage().data_ptr() for param in gpt.parameters()}
    kept = sum(storage.nbytes() for pointer, storage in saved.items() if pointer not in of_weights)
    foreseen = activation_bytes(TINY, batch, sequence, attention="unfused")
    foreseen += head_bytes(TINY, batch, sequence)
    # Beside it: two numbers a token for each of the five norms, tokens and targets.
    assert 0 <= kept - foreseen <= batch * sequence * (5 * 2 * 4 + 2 * 8) + 64


def test_checkpointing_changes_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "DROPOUT", 0.0)  # else each call draws other masks
    tokens = torch.arange(34).reshape(2, 17)
    gradients = []
    for way in OF_THE_PAPER:
        torch.manual_seed(0)
        gpt = model.PaperGPT(TINY, way)
        gpt(tokens).backward()
        gradients.append(
            torch.cat([param.grad.flatten() for param in gpt.parameters() if param.grad is not None])
        )
    assert all(torch.equal(gradients[0], other) for other in gradients[1:])


def test_memory_without_an_allocators_count_has_what_tensors_hold() -> None:
    found = memory.memory(CPU, long(), architecture=TINY, batch_size=2)
    numel = sum(one.numel for one in TINY.shapes())
    rows = {(row["convention"], row["what"]): row for row in found["state"]}
    assert [row["predicted"] // numel for row in found["state"]] == [4, 4, 8, 0, 2, 2, 12, 4]
    for row in rows.values():
        assert row["allocated"] is None
        if row["held"] is not None:  # AdamW's step counters are no element's
            assert 0 <= row["held"] - row["predicted"] <= 4 * len(TINY.shapes())
    assert [row["checkpointing"] for row in found["activations"]] == list(OF_THE_PAPER)
    assert {row["peak"] for row in found["activations"]} == {None}


def test_what_the_allocator_counts_is_told_apart_by_what_it_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "memory_allocated", lambda device: nbytes_of_all_tensors())
    rows = memory.memory(CPU, Budget(0), architecture=TINY)["state"]
    more = [row["allocated"] - row["held"] for row in rows if row["held"] is not None]
    assert more[:2] == more[3:5] == [0, 0], "parameters and gradients"
    # Small tensors are stepped as one, with one counter, and with memory to which gradients are copied.
    small = sum(one.numel for one in TINY.shapes() if one.numel <= MERGED_NUMEL)
    for of_state in (more[2], more[5]):
        assert -4 * len(TINY.shapes()) <= of_state <= 4 * small


def nbytes_of_all_tensors() -> int:
    """As an allocator would count them; what only autograd's graph holds is not among Python's objects."""
    gc.collect()
    found = [one for one in gc.get_objects() if type(one) in (torch.Tensor, torch.nn.Parameter)]
    found = [one for one in found if one.device == CPU and one.layout == torch.strided]
    found += [one.grad for one in found if one.is_leaf and one.grad is not None]
    return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in found}.values())


# ------------------------------------------------------------------------------------------------------ speed


def test_a_single_accelerator_shares_its_work_with_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "accelerator_count", lambda: 1)
    with pytest.raises(Skipped, match="a single rank shares its work with nobody"):
        speed.speed(CPU, long())


# ------------------------------------------------------------------------------------------------- the report


def found_by(name: str) -> Section:
    """A section that finds something at once, as its tables expect it."""
    row = {"suite": "step", "set": "gpt", "left_out": "for a test"}
    return Section(name, "", 10, lambda device, budget, **options: {"results": [row]})


def failing(error: Exception) -> Section:
    def measure(device: torch.device, budget: Budget, **options: Any) -> dict[str, Any]:
        raise error

    return Section("memory", "", 10, measure)


def measured(*sections: Section, **options: Any) -> GpuReport:
    made = report.new_report(CPU)
    report.measure(CPU, made, sections=sections, **options)
    return made


def test_a_section_that_fails_is_reported_and_the_others_run() -> None:
    told: list[SectionResult] = []
    errors = RuntimeError("out of memory"), Skipped("no")
    made = measured(*map(failing, errors), found_by("speed"), tell=told.append)
    assert [one.status for one in made.sections] == [FAILED, SKIPPED, MEASURED]
    assert re.fullmatch(r"RuntimeError at test_bench_gpu\.py:\d+: out of memory", made.sections[0].why or "")
    assert made.failed == ["memory"]
    assert told == made.sections
    assert "step, gpt: for a test" in tables.gpu_text(made)


def test_what_has_no_time_left_is_skipped() -> None:
    (one,) = measured(found_by("speed"), total_s=0.0).sections
    assert (one.status, one.found) == (SKIPPED, {})
    assert "no time left" in (one.why or "")
    found = {"step": step.step(CPU, Budget(0)), "speed": speed.speed(CPU, Budget(0), world_size=2)}
    for name, of_section in found.items():
        (rows,) = of_section.values()
        assert {row["left_out"] for row in rows} == {"no time was left"}
        assert "no time was left" in "".join(tables.SECTIONS[name](of_section))


def test_every_section_quick_on_a_cpu_goes_through_json_into_a_table() -> None:
    made = report.new_report(CPU, quick=True)
    here = [one for one in SECTIONS if one.name != "speed"]
    report.measure(CPU, made, sections=[*here, found_by("speed")])
    assert made.failed == [], made.sections
    again = GpuReport.from_json(json.loads(json.dumps(made.as_json(), allow_nan=False)))
    assert again == made
    text = tables.gpu_text(again)
    assert "quick: to see that it runs" in text
    for words in ("zero_ref, bfloat16 with float32 masters", "optimizer state", "for a test"):
        assert words in text
    table_lines = [line for line in text.splitlines() if line.startswith("|")]
    assert all(line.endswith("|") for line in table_lines)


def test_every_section_has_a_table_and_all_fit_into_ten_minutes() -> None:
    assert [one.name for one in SECTIONS] == list(dict.fromkeys(one.name for one in SECTIONS))
    assert {one.name for one in SECTIONS} == set(tables.SECTIONS)
    limits = [one.seconds for one in SECTIONS]
    assert limits == sorted(limits), "from short to long"
    assert sum(limits) <= report.TOTAL_S == 600


# ------------------------------------------------------------------------------------------------ the command


def test_without_an_accelerator_it_says_so_and_what_it_would_measure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(devices, "accelerator", lambda: None)
    file = tmp_path / "gpu.json"
    assert main(["gpu", "--json", str(file)]) == 1
    said = capsys.readouterr().out
    assert said.startswith("This machine has no accelerator that torch")
    for section in SECTIONS:
        assert re.search(
            rf"^  {section.name} +{section.seconds} s  {re.escape(section.says)}$", said, re.MULTILINE
        )
    assert not file.exists(), "a report from a machine with one stays"


@pytest.fixture
def cpu_for_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "accelerator", lambda: CPU)
    monkeypatch.setattr(devices, "current_device", lambda: CPU)
    monkeypatch.setattr(devices, "accelerator_count", lambda: 1)


@pytest.mark.usefixtures("cpu_for_an_accelerator")
def test_it_writes_a_report_that_from_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(report, "SECTIONS", (failing(RuntimeError("out of memory")), found_by("speed")))
    file = tmp_path / "gpu.json"
    assert main(["gpu", "--json", str(file)]) == 1
    printed = capsys.readouterr().out
    assert "out of memory" in printed
    assert printed.endswith("\n\nfailed: memory\n")
    written = json.loads(file.read_text())
    assert [one["status"] for one in written["sections"]] == [FAILED, MEASURED]
    assert main(["--from", str(file)]) == 0
    assert capsys.readouterr().out.strip() == printed.partition("\n\nfailed:")[0].strip()
    monkeypatch.setattr(report, "SECTIONS", (found_by("speed"),))
    assert main(["gpu"]) == 0


@pytest.mark.usefixtures("cpu_for_an_accelerator")
def test_an_altered_report_hears_what_is_wrong_in_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = measured(found_by("speed")).as_json()
    file = tmp_path / "gpu.json"
    for section, answer in (
        ({"found": {}}, "'results'"),
        ({"found": {"results": 3}}, "not iterable"),
        ({"status": 3}, r"status must be text, not 3"),
        ({"name": "walk"}, "'walk'"),
    ):
        file.write_text(json.dumps({**made, "sections": [{**made["sections"][0], **section}]}))
        with pytest.raises(SystemExit, match="2"):
            main(["--from", str(file)])
        said = capsys.readouterr().err
        assert "no report that --json wrote" in said
        assert re.search(answer, said), said
