"""Configurations as published: each is counted as the model's checkpoint says, or transformers has it not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks import counts
from zero_ref.simulator.configuration import quantized

FILES = sorted(path.name for path in counts.KEPT.glob("*.json"))

NOT_IN_TRANSFORMERS = ["moonshotai__Kimi-K3.json", "nvidia__Llama-3_3-Nemotron-Super-49B-v1.json"]
"""Those whose code transformers 5.24 has not."""


def config_of(file: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((counts.KEPT / file).read_text())
    return found


@pytest.fixture(scope="module")
def table() -> dict[str, counts.Row]:
    return {row.file: row for row in counts.rows()}


@pytest.mark.thorough
def test_all_are_counted_that_transformers_knows(table: dict[str, counts.Row]) -> None:
    assert len(table) == len(FILES) == 46
    refused = {file: row.refused for file, row in table.items() if row.refused}
    assert list(refused) == NOT_IN_TRANSFORMERS
    assert all("is not known to transformers 5." in said for said in refused.values())


@pytest.mark.thorough
def test_every_published_number_is_counted_or_what_it_counts_more_is_named(
    table: dict[str, counts.Row],
) -> None:
    differences = {file: row.difference for file, row in table.items() if row.published is not None}
    assert len(differences) == 41
    assert set(differences.values()) == {0}
    for row in table.values():
        if not row.refused:
            assert row.source.startswith("https://") is (row.published is not None)
    assert {name for row in table.values() for name in row.named} == set(counts.DIFFERENCES)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("file", "active"),
    [
        # As names and papers say: 3B, 35B, 17B, 37B (arXiv:2412.19437), 3.6B, 13B, 3.6B and 12.9B.
        ("Qwen__Qwen3-30B-A3B.json", 3.4e9),
        ("Qwen__Qwen3-Coder-480B-A35B-Instruct.json", 35.5e9),
        ("Qwen__Qwen3.5-397B-A17B.json", 17.8e9),  # with the vision tower
        ("deepseek-ai__DeepSeek-V3.json", 37.6e9),
        ("openai__gpt-oss-20b.json", 4.2e9),  # 3.6B without the embedding
        ("deepseek-ai__DeepSeek-V4-Flash.json", 13.8e9),
        ("nvidia__NVIDIA-Nemotron-3-Nano-30B-A3B-BF16.json", 3.6e9),
        ("mistralai__Mixtral-8x7B-v0.1.json", 12.9e9),
    ],
)
def test_a_token_goes_through_the_active_parameters(
    table: dict[str, counts.Row], file: str, active: float
) -> None:
    assert round(table[file].active / 1e8) * 1e8 == active


def test_a_file_of_ones_own_is_counted_and_one_that_is_not_known_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = ["HuggingFaceTB__SmolLM2-135M.json", "moonshotai__Kimi-K3.json"]
    monkeypatch.setattr("sys.argv", ["counts", *(str(counts.KEPT / file) for file in files)])
    counts.main()
    printed = capsys.readouterr().out
    assert "counted            134,515,008" in printed
    assert "refused: model_type 'kimi_k3' is not known to transformers 5." in printed
    assert "1 of 2 read, 1 of them with a published number, 1 without a difference" in printed


def test_weights_that_are_stored_in_few_bits_are_said() -> None:
    stored = {file: quantized(config_of(file)) for file in FILES}
    assert stored["openai__gpt-oss-20b.json"] == "quantization_config (quant_method 'mxfp4')"
    assert sum(map(bool, stored.values())) == 6
