"""Shapes: published counts, and modules read without importing torch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zero_ref.partition import ParamSpec, plan_partition
from zero_ref.simulator.models import MODELS, ParamShape, from_module, ready_order, shapes, specs

# ----------------------------------------------------------------------------------------------- example


@pytest.mark.parametrize(
    ("name", "elements", "tensors", "largest"),
    [
        # The GPT-2 counts are those of the released checkpoints; a block has 12 tensors, and 4 are outside.
        ("gpt2", 124_439_808, 12 * 12 + 4, 50257 * 768),
        ("gpt2-medium", 354_823_168, 24 * 12 + 4, 50257 * 1024),
        ("gpt2-large", 774_030_080, 36 * 12 + 4, 50257 * 1280),
        ("gpt2-xl", 1_557_611_200, 48 * 12 + 4, 50257 * 1600),
        ("llama3-8b", 8_030_261_248, 291, 525_336_576),
    ],
)
def test_published_counts(name: str, elements: int, tensors: int, largest: int) -> None:
    listed = shapes(name)
    assert sum(param.numel for param in listed) == elements
    assert len(listed) == tensors
    assert max(param.numel for param in listed) == largest


@pytest.mark.parametrize("name", MODELS)
def test_names_are_unique_and_shapes_are_positive(name: str) -> None:
    listed = shapes(name)
    assert len({param.name for param in listed}) == len(listed)
    assert all(size >= 1 for param in listed for size in param.shape)


def test_parameters_come_in_registration_order() -> None:
    gpt2 = [param.name for param in shapes("gpt2")]
    assert gpt2[:3] == ["transformer.wte.weight", "transformer.wpe.weight", "transformer.h.0.ln_1.weight"]
    assert gpt2[-1] == "transformer.ln_f.bias"
    llama = shapes("llama3-8b")
    assert llama[2] == ParamShape("model.layers.0.self_attn.k_proj.weight", (1024, 4096))
    assert llama[-1].name == "lm_head.weight"


def test_an_unknown_model_is_answered_with_the_choices() -> None:
    with pytest.raises(ValueError, match="unknown model 'gpt5'; choose one of gpt2, gpt2-medium"):
        shapes("gpt5")


def test_llama_on_1024_ranks_meets_the_floor_of_its_largest_tensor() -> None:
    partition = plan_partition("sorted_greedy", specs(shapes("llama3-8b")), 1024)
    assert partition.loads.count(0) == 733
    assert max(partition.loads) == 525_336_576
    assert max(partition.loads) / (sum(partition.loads) / 1024) == pytest.approx(67, abs=0.1)


def test_specs_are_trainable_parameters_of_one_group() -> None:
    assert specs([ParamShape("w", (2, 3)), ParamShape("scale", ())], "bfloat16") == [
        ParamSpec(6, "bfloat16", "cpu", 0, True, "w"),
        ParamSpec(1, "bfloat16", "cpu", 0, True, "scale"),
    ]


# ------------------------------------------------------------------------------------------------ parity


def test_a_module_is_read_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2, bias=False, dtype=torch.bfloat16))
    model[0].bias.requires_grad_(False)
    assert from_module(model) == [
        ParamSpec(6, name="0.weight"),
        ParamSpec(2, trainable=False, name="0.bias"),
        ParamSpec(4, "bfloat16", name="1.weight"),
    ]


def test_a_module_on_the_meta_device_takes_no_memory() -> None:
    with torch.device("meta"):
        model = nn.Linear(10**6, 10**6)  # 4 TB
    assert from_module(model)[0] == ParamSpec(10**12, device="meta", name="weight")


def test_a_tied_weight_is_listed_once() -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(5, 2), "head": nn.Linear(2, 5, bias=False)})
    model["head"].weight = model["embedding"].weight
    assert [param.name for param in from_module(model)] == ["embedding.weight"]


def test_gradients_become_ready_nearly_in_reverse() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 2))
    order = ready_order(model, lambda: model(torch.randn(3, 2)).sum().backward())
    # The last linear layer's bias then weight, the norm's weight then bias, the first layer's bias, weight.
    assert order == [5, 4, 2, 3, 1, 0]


def test_a_tied_embedding_is_ready_last_and_frozen_parameters_never() -> None:
    embedding, norm, head = nn.Embedding(5, 2), nn.LayerNorm(2), nn.Linear(2, 5)
    head.weight = embedding.weight
    norm.bias.requires_grad_(False)
    model = nn.Sequential(embedding, norm, head)  # embedding.weight, norm.weight, norm.bias, head.bias
    order = ready_order(model, lambda: model(torch.tensor([1, 2])).sum().backward())
    assert order == [3, 1, 0]


def test_reading_the_order_leaves_no_hooks_behind() -> None:
    model = nn.Linear(2, 2)

    def backward() -> None:
        model(torch.randn(3, 2)).sum().backward()

    order = ready_order(model, backward)
    backward()
    assert order == [1, 0]
    with pytest.raises(ZeroDivisionError):
        ready_order(model, lambda: 1 / 0)
    assert not model.weight._post_accumulate_grad_hooks
