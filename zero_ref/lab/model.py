"""A small GPT that reads bytes, and a text that every Python carries.

The model is an ordinary PyTorch module: nothing in it knows of ranks. The text is Python's own language
reference, which `pydoc_data.topics` holds for `help()`, so that nothing has to be downloaded.

The architecture is that of GPT-2 (Radford et al., 2019): learned positions, layer norm before each part,
one matrix for reading and writing tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from zero_ref.lab import ranks
from zero_ref.lab.config import VOCABULARY, GPTConfig


class Attention(nn.Module):
    """Each position reads from those before it. Input and output: (batch, positions, width)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.queries_keys_values = nn.Linear(config.width, 3 * config.width)
        self.project = nn.Linear(config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.queries_keys_values(x).chunk(3, dim=-1)
        queries, keys, values = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        read = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        out: torch.Tensor = self.project(read.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """Attention, then a two-layer network on each position, each added to what came in."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm_2 = nn.LayerNorm(config.width)
        self.expand = nn.Linear(config.width, 4 * config.width)
        self.contract = nn.Linear(4 * config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm_1(x))
        result: torch.Tensor = self.contract(functional.gelu(self.expand(self.norm_2(x))))
        return x + result


class GPT(nn.Module):
    """Predicts the next byte at every position.

    Args:
        config: its size and dtype.
        seed: of its first weights; the same seed gives the same weights on every rank and machine.
    """

    def __init__(self, config: GPTConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(VOCABULARY, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        generator = torch.Generator().manual_seed(seed)
        for name, param in self.named_parameters():
            if param.ndim >= 2:
                # GPT-2's choice: what is added to the stream is smaller, the more layers add to it.
                added = name.endswith(("project.weight", "contract.weight"))
                deviation = 0.02 / (2 * config.layers) ** 0.5 if added else 0.02
                # Drawn where the generator is, whatever the default device: everywhere the same numbers.
                drawn = torch.empty(param.shape, device=generator.device)
                param.detach().copy_(nn.init.normal_(drawn, std=deviation, generator=generator))
            elif name.endswith("bias"):
                nn.init.zeros_(param)
        self.to(getattr(torch, config.dtype))  # the same weights in every dtype, but for rounding

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy, in nats a byte. `tokens`, `targets`: (batch, positions), int64."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = functional.linear(self.norm(x), self.tokens.weight)
        # In 16 bits a mean over positions would have two or three digits.
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Text(NamedTuple):
    """Two texts as (bytes,) uint8 tensors: one to learn from, one to be tested on."""

    training: torch.Tensor
    held_out: torch.Tensor


def language_reference(held_out: float = 0.1) -> Text:
    """Python's language reference, its last topics held out. Its length depends on the Python version."""
    from pydoc_data.topics import topics

    data = "\n".join(topics[name] for name in sorted(topics)).encode()
    tokens = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    cut = int(len(tokens) * (1 - held_out))
    return Text(tokens[:cut], tokens[cut:])


def batch(
    text: torch.Tensor, config: GPTConfig, size: int, *, seed: int, step: int, rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random passages and the same moved on by one byte, each (size, context) int64, on the default device.

    A function of seed, step and rank alone: every rank reads its own passages, and a run that is resumed at
    a step reads what it would have read.
    """
    generator = torch.Generator().manual_seed((seed * 1_000_003 + step) * 4_099 + rank)
    # Drawn where the generator and the text are, whatever the default device: everywhere the same passages.
    cpu = generator.device
    starts = torch.randint(len(text) - config.context, (size, 1), generator=generator, device=cpu)
    passages = text[starts + torch.arange(config.context + 1, device=cpu)].long()
    passages = passages.to(torch.get_default_device())
    return passages[:, :-1], passages[:, 1:]


def passages(config: GPTConfig, size: int, *, seed: int, step: int, rank: int) -> tuple[torch.Tensor, ...]:
    """Draw a `batch` of the language reference, and put it on this rank's device."""
    given = batch(language_reference().training, config, size, seed=seed, step=step, rank=rank)
    return tuple(part.to(ranks.device()) for part in given)
