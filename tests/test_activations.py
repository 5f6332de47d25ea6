"""Activations: the published formula, and what autograd saves in a block like the paper's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st

from zero_ref.simulator.activations import CHECKPOINTING, activation_bytes, head_bytes
from zero_ref.simulator.models import GPT2, TRANSFORMERS, from_config

# ----------------------------------------------------------------------------------------------- example


def test_the_formula_by_hand() -> None:
    # s = 4, b = 3, h = 8, a = 2: s*b*h = 96; the scores' 5*a*s/h = 5.
    model = GPT2(width=8, depth=10, heads=2, vocabulary=7, positions=4)
    assert activation_bytes(model, batch=3) == 10 * 96 * (34 + 5)
    assert activation_bytes(model, 3, checkpointing="selective") == 10 * 96 * 34
    assert activation_bytes(model, 3, flash_attention=True) == 10 * 96 * 34
    # Ten inputs, and the other activations of the block that is computed again.
    assert activation_bytes(model, 3, checkpointing="full") == 10 * 96 * 2 + 96 * (34 + 5 - 2)
    assert activation_bytes(model, 3, checkpointing="full", flash_attention=True) == 10 * 96 * 2 + 96 * 32
    assert activation_bytes(model, 3, sequence=2) == 10 * 48 * 34 + 10 * 5 * 2 * 2 * 2 * 3
    assert head_bytes(model, 3) == 96 * 5 + 4 * 3 * 4 * 7


def test_scores_are_the_published_multiple_of_the_rest() -> None:
    # Korthikanti et al., section 5: for GPT-3 (h 12288, a 96, s 2048), 5*a*s/h = 80, more than 34, so that
    # selective recomputation saves 70% of the activations.
    everything, without_scores = (
        activation_bytes(TRANSFORMERS["gpt3-175b"], 1, checkpointing=way) for way in ("none", "selective")
    )
    assert everything / without_scores == (34 + 80) / 34
    assert round(1 - without_scores / everything, 2) == 0.70


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_every_preset_has_activations(name: str) -> None:
    model = TRANSFORMERS[name]
    assert activation_bytes(model, 1) == activation_bytes(model, 1, model.positions) > 0


def test_a_configuration_has_activations() -> None:
    config = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}
    model = from_config(config | {"n_positions": 1024})
    assert activation_bytes(model, 2) == activation_bytes(TRANSFORMERS["gpt2"], 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch": -1}, "at least 1 sequence, got -1"),
        ({"batch": 0}, "at least 1 sequence, got 0"),
        ({"batch": 1, "sequence": 0}, "at least 1 token, got 0"),
        (
            {"batch": 1, "checkpointing": "some"},
            "unknown checkpointing 'some'; choose one of none, selective, full",
        ),
    ],
)
def test_mistakes_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        activation_bytes(TRANSFORMERS["gpt2"], **arguments)


# ---------------------------------------------------------------------------------------------- property

models = st.builds(
    GPT2, st.integers(1, 64).map(lambda n: n * 8), st.integers(1, 50), st.sampled_from([1, 2, 4, 8])
)


@given(models, st.integers(1, 64), st.integers(1, 4096))
def test_checkpointing_more_keeps_no_more(model: GPT2, batch: int, sequence: int) -> None:
    none, selective, full = (activation_bytes(model, batch, sequence, way) for way in CHECKPOINTING)
    assert selective < none
    assert full <= none
    assert (full == none) == (model.depth == 1)  # the one block is computed again, and is there whole
    assert activation_bytes(model, batch, sequence, "full", flash_attention=True) <= selective


@given(models, st.integers(1, 64), st.integers(1, 4096), st.sampled_from(list(CHECKPOINTING)))
def test_activations_grow_with_the_batch(model: GPT2, batch: int, sequence: int, way: str) -> None:
    one = activation_bytes(model, 1, sequence, way)
    assert activation_bytes(model, batch, sequence, way) == batch * one


# ------------------------------------------------------------------------------------------------ parity


def test_the_formula_is_what_autograd_saves_in_a_block() -> None:
    s, b, h, a = 6, 3, 16, 4
    weights = {
        name: torch.randn(shape, dtype=torch.bfloat16, requires_grad=True)
        for name, shape in {
            "norm1": (h,),
            "query": (h, h),
            "key": (h, h),
            "value": (h, h),
            "out": (h, h),
            "norm2": (h,),
            "up": (4 * h, h),
            "down": (h, 4 * h),
        }.items()
    }

    def dropout(x: torch.Tensor) -> torch.Tensor:
        return torch.native_dropout(x, 0.1, True)[0]  # its mask has a byte an element, as the paper counts

    def of_heads(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weight).view(s, b * a, h // a).transpose(0, 1)

    def block(x: torch.Tensor) -> torch.Tensor:
        normed = F.layer_norm(x, (h,), weights["norm1"])
        query, key, value = (of_heads(normed, weights[name]) for name in ("query", "key", "value"))
        scores = dropout(torch.softmax(query @ key.transpose(1, 2) * (h // a) ** -0.5, dim=-1))
        mixed = (scores @ value).transpose(0, 1).reshape(s, b, h)
        x = x + dropout(F.linear(mixed, weights["out"]))
        raised = F.linear(F.layer_norm(x, (h,), weights["norm2"]), weights["up"])
        return x + dropout(F.linear(F.gelu(raised), weights["down"]))

    saved: dict[int, torch.UntypedStorage] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = block(torch.randn(s, b, h, dtype=torch.bfloat16, requires_grad=True))
    of_weights = {weight.untyped_storage().data_ptr() for weight in weights.values()}
    kept = [storage.nbytes() for pointer, storage in saved.items() if pointer not in of_weights]
    # Each norm keeps a mean and a deviation a token, which the paper leaves out.
    statistics = [nbytes for nbytes in kept if nbytes in (2 * s * b, 4 * s * b)]
    assert result.shape == (s, b, h)
    assert len(statistics) == 4
    model = GPT2(width=h, depth=1, heads=a, vocabulary=1, positions=s)
    assert sum(kept) - sum(statistics) == activation_bytes(model, b)
