"""GPT-2 as the formula of activations has it, under each kind of checkpointing, to hold memory against paper.

The lab's GPT reads bytes and has no dropout. This one has what `simulator.activations` counts: GPT-2's
vocabulary, dropout in three places, and attention whose scores are stored. Its memory is measured, and it is
not trained.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from zero_ref.simulator._checks import check_name
from zero_ref.simulator.activations import OF_THE_PAPER
from zero_ref.simulator.models import Transformer

DROPOUT = 0.1


def _dropped(x: torch.Tensor) -> torch.Tensor:
    """Dropout with a mask of one byte an element on every device, as the formula counts it."""
    kept: torch.Tensor = torch.native_dropout(x, DROPOUT, True)[0]
    return kept


def _again(function: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
    """Call a function of which only the arguments are kept; backward calls it again.

    The second call draws another dropout mask, because no generator's state is kept: only memory counts here.
    """
    result: torch.Tensor = checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
    return result


class PaperBlock(nn.Module):
    """A block of GPT-2. Input and output: (batch, positions, width).

    Args:
        checkpointing: one of `activations.OF_THE_PAPER`. Under "full" the model calls blocks again.
    """

    def __init__(self, width: int, heads: int, checkpointing: str) -> None:
        super().__init__()
        self.heads, self.selective = heads, checkpointing == "selective"
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def attention(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Causal attention that stores its scores. Arguments: (batch, heads, positions, width of a head)."""
        positions = queries.shape[-2]
        later = torch.full(
            (positions, positions), -torch.inf, dtype=queries.dtype, device=queries.device
        ).triu(1)
        scores = (queries * queries.shape[-1] ** -0.5) @ keys.transpose(-2, -1) + later
        return _dropped(scores.softmax(-1)) @ values

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.queries_keys_values(self.norm_1(x)).chunk(3, dim=-1)
        by_head = [part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts]
        read = _again(self.attention, *by_head) if self.selective else self.attention(*by_head)
        x = x + _dropped(self.project(read.transpose(1, 2).flatten(2)))
        hidden = functional.gelu(self.expand(self.norm_2(x)))
        out: torch.Tensor = x + _dropped(self.contract(hidden))
        return out


class PaperGPT(nn.Module):
    """GPT-2 of an architecture's dimensions, with as many parameters as `simulator.models` gives it.

    Args:
        checkpointing: one of `activations.OF_THE_PAPER`.
    Raises:
        ValueError: `checkpointing` is unknown.
    """

    def __init__(self, architecture: Transformer, checkpointing: str = "none") -> None:
        super().__init__()
        check_name("checkpointing", checkpointing, OF_THE_PAPER)
        width = architecture.width
        self.full = checkpointing == "full"
        self.tokens = nn.Embedding(architecture.vocabulary, width)
        self.positions = nn.Embedding(architecture.positions, width)
        self.blocks = nn.ModuleList(
            PaperBlock(width, architecture.heads, checkpointing) for _ in range(architecture.depth)
        )
        self.norm = nn.LayerNorm(width)
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=0.02)  # else logits are so large that the loss overflows

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy of the next token. `tokens`: (batch, positions + 1), int64."""
        given, targets = tokens[:, :-1], tokens[:, 1:]
        x = _dropped(self.tokens(given) + self.positions.weight[: given.shape[1]])
        for block in self.blocks:
            x = _again(block, x) if self.full else block(x)
        logits = functional.linear(self.norm(x), self.tokens.weight)
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
