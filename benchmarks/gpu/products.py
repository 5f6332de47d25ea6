"""Matrix products of transformers' linear layers: the rate of each shape, and the device's peak."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from benchmarks.gpu.budget import Budget, Found
from zero_ref.comm import devices
from zero_ref.lab import meter
from zero_ref.simulator.devices import DEVICES
from zero_ref.simulator.models import TRANSFORMERS, Llama, blocks, shapes

PRODUCTS = ("forward", "gradient of the input", "gradient of the weight")


class Product(NamedTuple):
    """A linear layer's matrices: (tokens, inputs) times (inputs, outputs)."""

    model: str
    tokens: int
    inputs: int
    outputs: int

    @property
    def flops(self) -> int:
        """Of each of PRODUCTS."""
        return 2 * self.tokens * self.inputs * self.outputs


def products_of(names: Sequence[str], tokens: int) -> list[Product]:
    """The linear layers of one block of each model, equal ones once.

    >>> [one[2:] for one in products_of(["gpt2"], 8192)]
    [(768, 2304), (768, 768), (768, 3072), (3072, 768)]
    """
    found: dict[Product, None] = {}
    for name in names:
        params = shapes(name)
        for number in blocks(params)[1]:  # the first unit is what lies outside the blocks
            shape = params[number].shape
            if len(shape) == 2:
                inputs, outputs = shape[::-1] if isinstance(TRANSFORMERS[name], Llama) else shape
                found[Product(name, tokens, inputs, outputs)] = None
    return list(found)


MULTIPLIED = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "llama3-8b")


def products(
    device: torch.device,
    budget: Budget,
    *,
    of: Sequence[Product] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    sample_ms: float = 10.0,
    rounds: int = 5,
) -> Found:
    """The rate of each matrix product of a block's linear layers.

    Args:
        of: the products; None for those of GPT-2's four sizes and Llama 3 8B, with 8,192 tokens.
        sample_ms: a product is repeated so often that one sample takes about as long.
    """
    devices.use(device)
    peak = peak_tflops(device)
    rows: list[Found] = []
    for product in products_of(MULTIPLIED, 8192) if of is None else of:
        if budget.over:
            rows.append({**product._asdict(), "left_out": "no time was left"})
            continue
        x = torch.randn(product.tokens, product.inputs, device=device).to(dtype)
        weight = torch.randn(product.outputs, product.inputs, device=device).to(dtype)
        grad = torch.randn(product.tokens, product.outputs, device=device).to(dtype)
        runs = (partial(torch.mm, x, weight.T), partial(torch.mm, grad, weight), partial(torch.mm, grad.T, x))
        ms_of = [_samples_ms(run, sample_ms, rounds) for run in runs]
        tflops = [product.flops / statistics.median(ms) / 1e9 for ms in ms_of]
        rows.append(
            {
                **product._asdict(),
                "ms": dict(zip(PRODUCTS, ms_of)),
                "tflops": dict(zip(PRODUCTS, tflops)),
                "share_of_peak": None if peak is None else statistics.harmonic_mean(tflops) / peak,
            }
        )
    dtype_name = str(dtype).removeprefix("torch.")
    return {"dtype": dtype_name, "peak_tflops": peak, "products": rows}


def _samples_ms(run: Callable[[], object], sample_ms: float, rounds: int) -> list[float]:
    """Milliseconds of one run in each of some samples, each of as many runs as `sample_ms` has room for."""
    run()
    first = _lasting_ms(run, 1)
    repeats = max(1, math.ceil(sample_ms / first))
    return [_lasting_ms(run, repeats) / repeats for _ in range(rounds)]


def _lasting_ms(run: Callable[[], object], repeats: int) -> float:
    took: list[float] = []
    with meter.timing(took):
        for _ in range(repeats):
            run()
    return took[0]


def peak_tflops(device: torch.device) -> float | None:
    """The peak that the simulator's presets give a device of this name; None if no preset has it."""
    preset = preset_named(devices.name_of(device))
    return None if preset is None else float(DEVICES[preset]["tflops"])


def preset_named(name: str) -> str | None:
    """The name in `devices.DEVICES` of a device, from the name that its driver gives it.

    Cards of the same chip for a PCIe slot or in a laptop have another peak, and are not in the table.

    >>> preset_named("NVIDIA H100 80GB HBM3"), preset_named("NVIDIA GeForce RTX 4090")
    ('H100 80 GB', 'RTX 4090')
    >>> preset_named("NVIDIA H100 PCIe"), preset_named("cpu")
    (None, None)
    """
    words = name.replace("-", " ").split()
    if {"PCIe", "NVL", "Laptop", "D"}.intersection(words):
        return None
    for preset in DEVICES:
        if set(preset.replace(" GB", "GB").split()) <= set(words):
            return preset
    return None
