"""The script that lists numbers in the prose which nothing asserts: what it finds, what it lets pass."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


sys.path.insert(0, str(ROOT / "book"))
unasserted = importlib.import_module("unasserted")
sys.path.pop(0)


def left(markdown: str, *cells: str, place: str = "page.md") -> list[str]:
    """The numbers of a text that cells do not assert."""
    found = unasserted.judge(place, markdown, unasserted.asserted(cells)).left
    return [line.removeprefix(f"{place}: ").partition(", in: ")[0] for line in found]


# ------------------------------------------------------------------------------------------- a wrong number


@pytest.mark.parametrize(
    ("page", "right", "wrong"),
    [
        ("notebooks/01_ledger.ipynb", "5,156 bytes more than", "5,157 bytes more than"),
        ("notebooks/01_ledger.ipynb", "2 + 2 + 12 = 16$ bytes", "2 + 2 + 12 = 17$ bytes"),
        ("README.md", "1.5 times what DDP sends", "1.6 times what DDP sends"),
    ],
)
def test_a_number_that_was_changed_is_found(
    page: str, right: str, wrong: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = ROOT / page
    copy = tmp_path / source.name
    shutil.copy(source, copy)
    assert unasserted.main([str(copy)]) == 0
    text = copy.read_text(encoding="utf-8")
    assert text.count(right) == 1, "the sentence is another: choose one for this test"
    copy.write_text(text.replace(right, wrong), encoding="utf-8")
    capsys.readouterr()
    assert unasserted.main([str(copy)]) == 1
    assert "1 numbers in the prose are asserted by nothing" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------ what is a number


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("It takes 1,024 bytes and 4.2 GB.", ["1,024 bytes", "4.2 GB"]),
        ("26% more, and 3 times as long", ["26%", "3 times"]),
        ("Twenty-four messages, three times", ["Twenty-four messages", "three times"]),
        ("It moves $3\\Psi$ where others move $2\\Psi$.", ["3 Ψ", "2 Ψ"]),
        ("| 1 | 64 ranks |\n|---|---|\n| 2 | 65 ranks |", ["64", "65"]),
        ("two ranks, 3 steps, chapter 12, stage 3, ranks 10 and 11", []),
        ("16 bits, a 32-bit copy, GPT-2, Llama 3 8B, torch 2.13, $10^9$", []),
        ("`width=128`, {term}`rank`, [a page](https://example.org/123)", []),
        ("[Graham (1969)](https://doi.org/10.1137), [Graham, 1969](https://doi.org/10.1137)", []),
        ("[Fig. 2.11](02_ring.ipynb#fig-ring), [chapter 12](12_rpc.ipynb)", []),
        ("```python\nx = 77\n```\n", []),
    ],
)
def test_what_counts(text: str, found: list[str]) -> None:
    assert left(text) == found


# ------------------------------------------------------------------------------------------- what is enough


@pytest.mark.parametrize(
    ("text", "cell"),
    [
        ("1,024 bytes", "assert held == 1024"),
        ("4.2 GB", "assert held == 4_195_000_000"),
        ("4.2 GB", 'assert format_bytes(held) == "4.20 GB"'),
        ("26%", "assert round(share, 2) == 0.26"),
        ("10% more", "assert longer < 1.1 * before"),
        ("5 ms", "expected = [5, 7]\nassert found == expected"),
        ("1.06 times", "for n, expected in ((2, 1.06), (8, 1.43)):\n    assert found[n] == expected"),
        ("120 steps", "last = train(120)\nassert last < 0.5"),
        ("10 µs", "link = Link(latency_us=10)"),
        ("10 µs", 'options = {"latency_us": 10}'),
        ("384 elements", "assert sent == 8 * 48"),
        ("$65{,}536 \\cdot 8 + 4 = 524{,}292$ bytes", ""),
        ("$\\frac{4}{3} - \\frac{1}{6} = \\frac{7}{6}$, $2^{-7} \\approx 0.008$", ""),
        ("[80 GB](../book/numbers.md)", ""),
        ("`benchmarks/NOTES.md` has it: within 25%.", ""),
        ("port 29500 <!-- number: 29500, the default of torchrun -->", ""),
    ],
)
def test_what_is_enough(text: str, cell: str) -> None:
    assert left(text, cell) == []


@pytest.mark.parametrize(
    ("text", "cell"),
    [
        ("1,025 bytes", "assert held == 1024"),
        ("4.2 GB", "assert held == 4_250_000_001"),
        ("26%", "share = 0.26"),
        ("5 ms", "run(5)\nassert found"),
        ("3 times", "took = run(3)\nassert took"),
        ("120 steps", "train(120)\nassert found"),
        ("120 steps", "assert found, 120"),
        ("$65{,}536 \\cdot 8 = 524{,}292$ bytes", ""),
        ("$2^{-7} \\approx 0.009$", ""),
        ("[81 GB](../book/numbers.md)", ""),
        ("an H100 has 80 GB ([Sheet, 2022](https://example.org/81)), and so on", ""),
        ("[the numbers](../book/numbers.md) have 80 GB", ""),
        ("`benchmarks/NOTES.md` has others.\n\nHere it is 25%.", ""),
    ],
)
def test_what_is_not_enough(text: str, cell: str) -> None:
    assert len(left(text, cell)) == 1


def test_captions_and_alternative_texts_are_read(tmp_path: Path) -> None:
    cell = {
        "cell_type": "code",
        "id": "drawn",
        "metadata": {
            "mystnb": {"figure": {"caption": "It falls to 31 GB."}, "image": {"alt": "A bar of 32 GB."}}
        },
        "source": ["draw()"],
    }
    (notebook := tmp_path / "one.ipynb").write_text(json.dumps({"cells": [cell]}), encoding="utf-8")
    (reading,) = unasserted.of_notebook(notebook)
    assert [line.partition(", in: ")[0] for line in reading.left] == [
        "one.ipynb:drawn: 31 GB",
        "one.ipynb:drawn: 32 GB",
    ]


def test_an_exercise_may_say_what_its_stub_solution_or_grader_has(tmp_path: Path) -> None:
    def cell(name: str, kind: str, source: str, *tags: str) -> dict[str, Any]:
        return {"cell_type": kind, "id": name, "metadata": {"tags": list(tags)}, "source": [source]}

    cells = [
        cell("sum-task", "markdown", "Add 40 and 41. It is $40 + 41 = 81$; no less than 15% more, nor 83."),
        cell("sum-stub", "code", 'def add():\n    """add(40, 41)"""', "exercise"),
        cell("sum-check", "code", 'check("partition.adversary", add)', "check"),
        cell("sum-solution", "code", "def add():\n    assert 83\n    return 81", "solution"),
        cell("text", "markdown", "It is 81."),
    ]
    (notebook := tmp_path / "one.ipynb").write_text(json.dumps({"cells": cells}), encoding="utf-8")
    lines = [line for reading in unasserted.of_notebook(notebook) for line in reading.left]
    assert lines == ["one.ipynb:text: 81, in: It is 81."]
