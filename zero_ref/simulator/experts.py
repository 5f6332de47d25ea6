"""Tables of the MLPs that compute with each token alone: a dense MLP, or experts, a few for each token."""

from __future__ import annotations

from zero_ref.simulator.dense import (
    GATED_PLAIN,
)
from zero_ref.simulator.families import Mlp

NO_MLP = Mlp("", kept="", width="0")
DENSE_MLP = Mlp(GATED_PLAIN)

_KEPT_OF_EXPERTS = (
    "rows(c*d):operand gate_and_up(2*c*m):product activation(c*m):pointwise gated(c*m):operand "
    "results(c*d):product weights(c):operand "
)
KEPT_ROUTED = _KEPT_OF_EXPERTS + "scores(x):statistics4 chosen(c+1):statistics4 places(4*c):statistics8"
"""Values that experts keep for backward if `grouped_mm` of transformers computes all in one product."""

_KEPT_ROUTED_BY_DEEPSEEK = (
    _KEPT_OF_EXPERTS.replace("weights(c):operand", "weights(c):statistics4")
    + "input_in_32_bits(d):statistics4 scores(x):statistics4 chosen(c+1):statistics4 "
    "places(5*c+1):statistics8 left_out(x):statistics1"
)
"""The same behind a router that computes in 32 bits, and chooses groups of experts first."""

KEPT_SHARED = (
    " shared_gate(s):product shared_up(s):product shared_activation(s):pointwise shared_gated(s):operand"
)


def experts(
    tensors: str, *, shared: bool = False, m: str = "m", weighted: bool = False, routed: str = KEPT_ROUTED
) -> Mlp:
    """An MLP of experts: each token is brought to `c` of them, and to a shared one that all tokens go to.

    Args:
        m: the symbol of the width of an expert.
        weighted: the shared expert's result is multiplied by a gate.
        routed: what is kept of the experts that not all tokens go to, and of their router.
    """
    kept = (routed + KEPT_SHARED * shared + " shared_result(d):product weight(1):operand" * weighted).replace(
        "*m)", f"*{m})"
    )
    return Mlp(tensors, kept, width=f"c*{m}" + "+s" * shared, moved="2*c*d")


def stacked(name: str, m: str = "m") -> str:
    """The tensors of all experts of a block."""
    return f"{name}.gate_up_proj[x,2*{m},d] {name}.down_proj[x,d,{m}] "


def one_of(name: str) -> str:
    """The tensors of an expert that all tokens go to."""
    return f"{name}.gate_proj(s,d) {name}.up_proj(s,d) {name}.down_proj(d,s) "


ROUTED_OF_MLP_WIDTH = experts("mlp.gate(x,d) " + stacked("mlp.experts", "h"), m="h")
ROUTED_LAST = experts(stacked("mlp.experts") + "mlp.gate(x,d) ")
QWEN_SHARED = experts(
    "mlp.gate(x,d) " + stacked("mlp.experts") + one_of("mlp.shared_expert") + "mlp.shared_expert_gate(1,d) ",
    shared=True,
    weighted=True,
)
DEEPSEEK_SHARED = experts(
    stacked("mlp.experts") + "mlp.gate(x,d) " + one_of("mlp.shared_experts"),
    shared=True,
    routed=_KEPT_ROUTED_BY_DEEPSEEK,
)
