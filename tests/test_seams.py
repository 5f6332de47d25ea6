"""What other modules may know of an optimizer: its public attributes, none that begins with an underscore."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "zero_ref"
HOLDERS = {"zero", "optimizer"}
"""What the package calls a ZeroRedundancyOptimizer, as a variable or an attribute."""


def uses(source: str) -> list[str]:
    """The underscore names that are read or set of an optimizer."""
    return [
        node.attr
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and (
            (isinstance(node.value, ast.Name) and node.value.id in HOLDERS)
            or (isinstance(node.value, ast.Attribute) and node.value.attr in HOLDERS)
        )
    ]


def test_a_use_is_found_wherever_the_optimizer_is_held():
    assert uses(
        "def f(zero): return zero._one, self.zero._two, self.optimizer._three, zero.four, zero.__dict__"
    ) == ["_one", "_two", "_three"]


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_no_module_reaches_into_an_optimizer(path):
    assert uses(path.read_text(encoding="utf-8")) == []
