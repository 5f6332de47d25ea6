"""A traced model: its rules are what torch keeps and counts in a real run of the same program."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from zero_ref.lab.built import adapt, from_factory
from zero_ref.lab.tracing import lengths_of, trace
from zero_ref.simulator.activations import activations
from zero_ref.simulator.cluster import cluster
from zero_ref.simulator.kernels import kernels
from zero_ref.simulator.lora import Lora
from zero_ref.simulator.scenario import Scenario
from zero_ref.simulator.traced import Rule, Traced

WIDTH, HEADS, VOCABULARY = 48, 4, 96


class Block(nn.Module):
    """Attention and an MLP between norms, all as torch has them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.norm_1(x)).chunk(3, dim=-1)
        query, key, value = (one.unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Model(nn.Module):
    """An embedding, blocks, a head and the loss."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), tokens.flatten())


def tokens(batch: int, sequence: int) -> torch.Tensor:
    return torch.zeros(batch, sequence, dtype=torch.long)


def traced(module: Any = Model, sequence: int = 40, dtype: str = "bfloat16") -> Traced:
    return from_factory(lambda: (module(), tokens), dtype, sequence)


def kept_by_torch(module: nn.Module, given: torch.Tensor) -> int:
    """The bytes of all storages that autograd keeps in a real forward, beside the parameters'."""
    saved: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        _ = module(given)
    own = {param.untyped_storage().data_ptr() for param in module.parameters()}
    return sum(nbytes for at, nbytes in saved.items() if at not in own)


# ------------------------------------------------------------------------------------------------ rules


@given(st.lists(st.integers(0, 10**6), min_size=6, max_size=6), st.integers(2, 9), st.integers(1, 10**4))
def test_a_rule_is_found_from_six_points_and_holds_at_all_others(
    terms: list[int], batch: int, sequence: int
) -> None:
    def value(b: int, s: int) -> int:
        once, position, square, example, token, pair = terms
        return once + position * s + square * s**2 + b * (example + token * s + pair * s**2)

    rule = Rule.fit({(b, s): value(b, s) for b in (1, 2) for s in lengths_of(640)})
    assert rule.at(batch, sequence) == pytest.approx(value(batch, sequence), rel=1e-12)  # of a float's digits


# ------------------------------------------------------------------------------------- a model of one's own


@pytest.mark.parametrize(("batch", "sequence"), [(2, 40), (3, 40), (1, 17), (5, 64)])
def test_it_keeps_what_autograd_keeps_in_a_real_run(batch: int, sequence: int) -> None:
    model = traced()
    real = kept_by_torch(Model().bfloat16(), tokens(batch, sequence))
    # On a GPU a LayerNorm's mean and deviation are in 32 bits, not 16, and flash attention keeps three
    # integers of its random generator.
    statistics, generator = 3 * 2 * 2 * batch * sequence * 2, 3 * 3 * 8
    assert activations(model, batch, sequence).kept == real + statistics + generator


def test_blocks_that_do_the_same_are_one_kind() -> None:
    model = traced()
    assert [layer.number for layer in model.layers] == [3]
    assert model.depth == 3
    assert model.outputs == VOCABULARY


def test_parameters_are_the_modules() -> None:
    model, module = traced(), Model()
    assert [tuple(one) for one in model.shapes()] == [
        (name, tuple(one.shape)) for name, one in module.named_parameters()
    ]


def test_products_are_those_that_torch_counts() -> None:
    batch, sequence = 3, 24
    module = Model().bfloat16()
    with FlopCounterMode(display=False) as counter:
        module(tokens(batch, sequence)).backward()
    counted = counter.get_flop_counts()["Global"]
    products = sum(counted[op] for op in (torch.ops.aten.mm, torch.ops.aten.addmm))
    found = kernels(traced(), batch, sequence)
    assert sum(one.flops for way in (found.forward, found.backward) for one in way.products) == products
    # Two products in forward and five in backward over what the mask shows.
    shown = 2 * batch * HEADS * (sequence * (sequence + 1) / 2) * 2 * (WIDTH // HEADS) * 3
    assert found.forward.attention_flops == pytest.approx(shown)
    assert found.backward.attention_flops == pytest.approx(2.5 * shown)


class Frozen(Model):
    """All but the head is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.head.requires_grad_(True)


def test_frozen_parts_keep_nothing_and_have_no_gradients_and_no_state() -> None:
    model, whole = traced(Frozen), traced()
    scenario, other = (Scenario(one, cluster("h100-ib"), 2, sequence=40, batch=2) for one in (model, whole))
    assert scenario.numel == other.numel
    assert scenario.trained_numel == WIDTH * VOCABULARY
    assert scenario.activations.blocks == 0
    assert scenario.activations.kept == kept_by_torch(Frozen().bfloat16(), tokens(2, 40))
    head = 2 * 2 * 40 * WIDTH * VOCABULARY
    assert sum(one.flops for one in kernels(model, 2, 40).backward.products) == head  # of the weight alone
    runs = [one.run("zero-even").memory for one in (scenario, other)]
    assert runs[0].items["moments"] < runs[1].items["moments"] / 4


class HalfFrozen(Model):
    """The first blocks are not trained, and backward does not reach them."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.blocks[-1].requires_grad_(True)


def test_a_frozen_part_takes_the_same_time_under_every_strategy() -> None:
    scenario = Scenario(traced(HalfFrozen), cluster("h100-ib"), 1, sequence=40, batch=2)
    runs = {strategy: scenario.run(strategy).what_if.critical_ms for strategy in ("ddp", "zero-2", "zero-3")}
    assert runs["ddp"]["backward"] == pytest.approx(runs["zero-2"]["backward"])
    assert runs["ddp"]["backward"] == pytest.approx(runs["zero-3"]["backward"], rel=0.05)


def adapted(on: str = "all-linear") -> Model:
    module = Model().to(device="meta")
    adapt(module, Lora(4, on))
    return module


def test_adapters_are_added_and_are_all_that_is_trained() -> None:
    trained = {name: param for name, param in adapted().named_parameters() if param.requires_grad}
    assert set(trained) == {
        f"blocks.{number}.{matrix}.lora_{part}.weight"
        for number in range(3)
        for matrix in ("qkv", "out", "up", "down")
        for part in "AB"
    }
    assert trained["blocks.0.up.lora_A.weight"].shape == (4, WIDTH)
    assert trained["blocks.0.up.lora_B.weight"].shape == (4 * WIDTH, 4)
    with pytest.raises(ValueError, match="lora on attention: no block of this model has a matrix"):
        adapted("attention")  # its attention has no module of its own


def test_a_model_with_adapters_keeps_what_autograd_keeps() -> None:
    """But for the first block, whose input has no gradient: it is counted as the others."""
    module = Model().bfloat16()
    real = Model().bfloat16()
    adapt(real, Lora(4))
    for one in real.modules():
        for name in ("lora_A", "lora_B"):
            if hasattr(one, name):
                size = getattr(one, name).weight.shape
                setattr(one, name, nn.Linear(size[1], size[0], bias=False, dtype=torch.bfloat16))
    scenario = Scenario(traced(adapted), cluster("h100-ib"), 2, sequence=40, batch=2)
    assert scenario.numel - sum(param.numel() for param in module.parameters()) == scenario.trained_numel
    assert scenario.activations.kept == pytest.approx(kept_by_torch(real, tokens(2, 40)), rel=0.01)


def test_checkpointing_of_whole_blocks_keeps_their_inputs() -> None:
    found = activations(traced(), 2, 40, "full")
    assert found.blocks == 3 * 2 * 40 * WIDTH * 2
    none = activations(traced(), 2, 40)
    assert found.again == none.blocks // 3 - found.blocks // 3


class Images(nn.Module):
    """Convolutions: what is computed for an image depends on no length."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3))
        self.head = nn.Linear(8, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(
            self.head(self.layers(images).mean((2, 3))), torch.zeros_like(images[:, 0, 0, 0]).long()
        )


def test_a_model_of_images_has_one_token_for_each() -> None:
    model = from_factory(lambda: (Images(), lambda batch, _: torch.zeros(batch, 3, 12, 12)), "float32")
    assert model.positions == 1
    with FlopCounterMode(display=False) as counter:
        Images()(torch.zeros(4, 3, 12, 12)).backward()
    found = kernels(model, 4, 1, itemsize=4)
    assert found.flops == counter.get_total_flops()
    run = Scenario(model, cluster("h100-ib"), 2, batch=4, dtype="float32").run("ddp")
    assert run.utilisation == pytest.approx(counter.get_total_flops() / (run.iteration_ms * 67e9))


# --------------------------------------------------------------------------------------------- mistakes


def test_a_model_that_asks_for_values_is_refused() -> None:
    class Asks(Model):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            if tokens.sum() > 3:
                return super().forward(tokens)
            return super().forward(tokens + 1)

    with pytest.raises(
        ValueError, match="cannot be traced on the meta device, which has shapes and no values"
    ):
        traced(Asks)


@pytest.mark.parametrize("returned", [3, (Model, tokens), (1, 2, 3)])
def test_a_function_that_returns_no_module_is_refused(returned: Any) -> None:
    with pytest.raises(ValueError, match=r"must return a torch\.nn\.Module"):
        from_factory(lambda: returned, "bfloat16")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dtype": "float32"}, "was traced in bfloat16, and the dtype is float32"),
        ({"dtype": "float32", "autocast": "bfloat16"}, "was traced in bfloat16"),
        ({"lora": 8}, "build it with its adapters"),
    ],
)
def test_what_a_trace_does_not_have_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Scenario(traced(), cluster("h100-ib"), 2, **options)


def test_a_model_without_a_parameter_that_is_trained_is_refused() -> None:
    module = Model().requires_grad_(False).to("meta")
    with pytest.raises(ValueError, match="no parameter is trained"):
        trace(module, tokens, 8)
