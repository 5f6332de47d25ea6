"""Optimizers as others published them for NCCL, examined on Gloo: KellerJordan/Muon and nanochat's two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from zero_ref import doctor
from zero_ref.lab.own import load_own

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.thorough,
    pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning"),
]
FOLDER = Path(__file__).parents[1] / "published"


def published(name: str) -> Any:
    # They compile their steps; what is examined here is the same code without a compiler.
    torch.compiler.set_stance("force_eager")
    return load_own(str(FOLDER / f"{name}.py"))


def groups(model: nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [
        {"params": [param for param in params if param.ndim < 2], "use_muon": False, "lr": 0.05},
        {"params": [param for param in params if param.ndim == 2], "use_muon": True, "lr": 0.02},
    ]


def muon(model: nn.Module) -> Any:
    return published("kellerjordan_muon").MuonWithAuxAdam(groups(model))


def plain_muon(model: nn.Module) -> Any:
    return published("kellerjordan_muon").SingleDeviceMuonWithAuxAdam(groups(model))


def test_kellerjordans_muon_gathers_unevenly_and_is_healthy() -> None:
    # A group of its own needs the flag "use_muon", which the doctor's groups do not have.
    without = [trial for trial in doctor.TRIALS if "group" in trial or trial == "all together"]
    report = doctor.diagnose(muon, reference=plain_muon, ranks=(2, 3), without=without, timeout=120)
    report.check()
    assert ("save and load", 3) in report.tried
    assert "all_gather of tensors of different sizes" in report.given


class Both:
    """Several optimizers as one: nanochat steps one after the other."""

    def __init__(self, *optimizers: Any) -> None:
        self.optimizers = optimizers

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for each in self.optimizers for group in each.param_groups]

    @property
    def state(self) -> dict[Any, Any]:
        return {param: state for each in self.optimizers for param, state in each.state.items()}

    def step(self) -> None:
        for each in self.optimizers:
            each.step()


class Chat(nn.Module):
    """An embedding and a head for AdamW, with rows that 2 and 3 divide, and five matrices for Muon."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed, self.head = nn.Embedding(12, 6), nn.Linear(6, 12, bias=False)
        self.up = nn.ModuleList(nn.Linear(6, 8, bias=False) for _ in range(3))
        self.down = nn.ModuleList(nn.Linear(8, 6, bias=False) for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for up, down in zip(self.up, [*self.down, self.down[0]]):
            x = x + down(up(x).relu())
        return self.head(x)

    def split(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        matrices = [*self.up.parameters(), *self.down.parameters()]
        return [self.embed.weight, self.head.weight], matrices


def tokens(rank: int, number: int) -> torch.Tensor:
    return torch.randint(12, (4, 7), generator=torch.Generator().manual_seed(100 * rank + number))


def next_token(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()) * 64


def chat() -> Any:
    model = Chat()
    embeddings, matrices = model.split()
    adamw = published("nanochat_adamw").DistAdamW(
        [{"params": embeddings}], lr=0.01, betas=(0.8, 0.95), weight_decay=0.0
    )
    return model, Both(adamw, published("nanochat_muon").DistMuon(matrices, lr=0.02))


def plain_chat(model: Any) -> Any:
    embeddings, matrices = model.split()
    adamw = torch.optim.AdamW(embeddings, lr=0.01, betas=(0.8, 0.95), weight_decay=0.0)
    return Both(adamw, published("nanochat_muon").Muon(matrices, lr=0.02))


def test_nanochats_optimizers_are_healthy_but_for_clipping_before_they_average() -> None:
    report = doctor.diagnose(
        chat, reference=plain_chat, ranks=(2, 3), batch=tokens, loss=next_token, timeout=120
    )
    trials = {one.trial for one in report.departures}
    assert "clipping" in trials
    assert all("clipping" in trial for trial in trials), str(report)
    assert "get_future() of a reduce-scatter, send or receive" in report.given
