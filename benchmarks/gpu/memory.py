"""Memory of a training step of GPT-2: what the simulator foresees beside what the allocator counts."""

from __future__ import annotations

import gc

import torch
from torch.optim import AdamW

from benchmarks import contenders
from benchmarks.gpu.budget import Budget, Found, alone
from benchmarks.gpu.model import PaperGPT
from zero_ref.comm import devices
from zero_ref.lab import meter
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.simulator.activations import OF_THE_PAPER, activation_bytes, head_bytes
from zero_ref.simulator.ledger import ledger
from zero_ref.simulator.models import TRANSFORMERS, Transformer


def memory(
    device: torch.device,
    budget: Budget,
    *,
    architecture: Transformer = TRANSFORMERS["gpt2"],
    batch_size: int = 8,
    sequence: int | None = None,
) -> Found:
    """GPT-2's state and activations: as the simulator predicts, as tensors add up, as the allocator counts.

    The state is that of float32, and of bfloat16 with float32 masters, on one rank. Activations are those of
    each kind of checkpointing, in bfloat16: when backward begins, which is what the formula counts but for
    "full", and at the peak of forward and backward.
    """
    with alone(device):
        _warm_up(device)
        state = [row for convention in DTYPE_OF for row in _state(device, convention, architecture)]
        activations: list[Found] = []
        for way in OF_THE_PAPER:
            if budget.over:
                activations.append({"checkpointing": way, "left_out": "no time was left"})
                continue
            gc.collect()
            activations.append(_activations(device, way, architecture, batch_size, sequence))
    return {"state": state, "activations": activations}


DTYPE_OF = {"fp32-16": torch.float32, "mixed-16": torch.bfloat16}


def _warm_up(device: torch.device) -> None:
    """Let the library of matrix products take its own memory, of forward's thread and of backward's."""
    for dtype in DTYPE_OF.values():
        x = torch.ones(64, 64, dtype=dtype, device=device, requires_grad=True)
        (x @ x).sum().backward()


class _Gauge:
    """The bytes by which the allocator's count has grown; None on a device that does not count."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.mark()

    def mark(self) -> None:
        self.before = devices.memory_allocated(self.device)
        devices.reset_peak_memory(self.device)

    def grown(self) -> int | None:
        now = devices.memory_allocated(self.device)
        return None if now is None or self.before is None else now - self.before

    def peak(self) -> int | None:
        peak = devices.peak_memory_allocated(self.device)
        return None if peak is None or self.before is None else peak - self.before


def _tokens(architecture: Transformer, batch_size: int, sequence: int, device: torch.device) -> torch.Tensor:
    drawn = torch.Generator().manual_seed(0)
    return torch.randint(architecture.vocabulary, (batch_size, sequence + 1), generator=drawn).to(device)


def _state(device: torch.device, convention: str, architecture: Transformer) -> list[Found]:
    dtype = DTYPE_OF[convention]
    gc.collect()  # what is left of the model before must not be freed between two counts
    gauge = _Gauge(device)
    model = PaperGPT(architecture, "full").to(device, dtype)
    of_params = gauge.grown()
    gauge.mark()
    master = torch.float32 if dtype != torch.float32 else None
    zero = ZeroRedundancyOptimizer(model.parameters(), AdamW, master_dtype=master, **contenders.BEST)
    of_masters = gauge.grown()
    tokens = _tokens(architecture, 1, 8, device)
    gauge.mark()
    model(tokens).backward()
    of_gradients = gauge.grown()
    gauge.mark()
    zero.step()
    of_moments, in_step = gauge.grown(), gauge.peak()
    numel = sum(param.numel() for param in model.parameters())
    books, held = ledger(numel, 1, 1, convention), meter.held_bytes(model.parameters(), zero)
    of_state = None if of_masters is None or of_moments is None else of_masters + of_moments
    # Masters are stepped with gradients that are cast for the step and freed after it.
    casts = 4 * numel if master is not None else 0
    beside_state = None if in_step is None or of_moments is None else in_step - of_moments
    return [
        {"convention": convention, "what": what, "predicted": predicted, "held": counted, "allocated": found}
        for what, predicted, counted, found in (
            ("parameters", books.parameter_bytes, held.parameters, of_params),
            ("gradients", books.gradient_bytes, held.gradients, of_gradients),
            ("optimizer state", books.optimizer_bytes, held.optimizer_state, of_state),
            ("more while the step lasts", float(casts), None, beside_state),
        )
    ]


def _activations(
    device: torch.device, way: str, architecture: Transformer, batch_size: int, sequence: int | None
) -> Found:
    sequence = sequence or architecture.positions
    model = PaperGPT(architecture, way).to(device, torch.bfloat16)
    tokens = _tokens(architecture, batch_size, sequence, device)
    model(tokens[:1, :9]).backward()  # gradients are there before, so that what grows is activations
    gauge = _Gauge(device)
    loss = model(tokens)
    when_backward_begins = gauge.grown()
    loss.backward()
    of_blocks = activation_bytes(architecture, batch_size, sequence, way, attention="unfused")
    return {
        "checkpointing": way,
        "batch": batch_size,
        "sequence": sequence,
        "predicted_blocks": of_blocks,
        "predicted": of_blocks + head_bytes(architecture, batch_size, sequence),
        "when_backward_begins": when_backward_begins,
        "peak": gauge.peak(),
    }
