"""The page of published figures: each is what its expression gives, and all that it names is there."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator
from decimal import ROUND_DOWN, ROUND_HALF_UP, Context, Decimal
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, strategies as st

from zero_ref.plan.rules import sorted_greedy
from zero_ref.simulator.ledger import ledger
from zero_ref.simulator.models import shapes

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "book" / "numbers.md"
TEXT = PAGE.read_text(encoding="utf-8")

REPRODUCED = ("what", "published", "source", "computed by")
TAKEN_OVER = ("what", "published", "source", "taken as")

LETTERS = [
    {"N": 2, "L": 10, "h": 8, "a": 2, "V": 7, "s": 4, "b": 3},
    {"N": 7, "L": 1, "h": 16, "a": 1, "V": 100, "s": 6, "b": 1},
    {"N": 1024, "L": 96, "h": 12288, "a": 96, "V": 51200, "s": 2048, "b": 8},
]
"""Values for checking a formula: small and odd, so that terms do not cancel, and as large as in the book."""


class Row(NamedTuple):
    """A row of one of the page's tables, by column, and the heading above it."""

    section: str
    cells: dict[str, str]

    @property
    def reproduced(self) -> bool:
        return "computed by" in self.cells


def rows_of(text: str) -> Iterator[Row]:
    """Every row of every table. What is no table of the two known kinds is an error, not skipped."""
    section = ""
    header: tuple[str, ...] = ()
    for line in text.splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        if not line.startswith("|"):
            header = ()
            continue
        cells = tuple(cell.strip() for cell in line.strip("|").split("|"))
        if not header:
            assert cells in (REPRODUCED, TAKEN_OVER), f"a table with the columns {cells}"
            header = cells
        elif not set(line) <= set("|-"):
            yield Row(section, dict(zip(header, cells, strict=True)))


def code_of(cell: str) -> list[str]:
    """Return the texts in backticks, but for roles such as cite."""
    return re.findall(r"(?<!\})`([^`]+)`", cell)


def names_of_the_page() -> dict[str, Any]:
    """Return the names that the page's own import lines define."""
    (imports,) = re.findall(r"```python\n(.*?)```", TEXT, flags=re.S)
    names: dict[str, Any] = {}
    exec(imports, names)
    return names


ROWS = list(rows_of(TEXT))
NAMES = names_of_the_page()

NUMBER = r"\d+(?:,\d{3})*(?:\.\d+)?(?:e\d+)?"


def is_as_printed(value: float, printed: str, rounding: str) -> bool:
    """Whether a value, to the printed number's last digit, is that number.

    `repr` gives the decimal that a float stands for: 41.25 is rounded up to 41.3, as on paper.
    """
    number = Decimal(printed.replace(",", ""))
    last_digit = Decimal((0, (1,), int(number.as_tuple().exponent)))
    return Decimal(repr(value)).quantize(last_digit, rounding, Context(prec=40)) == number


def disagreement(published: str, expression: str) -> str:
    """Return the error in a row; empty if its expression has the printed value."""
    formula = code_of(published)
    if formula:
        for letters in LETTERS:
            ours, theirs = (eval(text, NAMES | letters) for text in (expression, formula[0]))
            if not math.isclose(ours, theirs, rel_tol=1e-12):  # floats, multiplied in another order
                return f"at {letters} it is {ours}, and {formula[0]} is {theirs}"
        return ""
    value = eval(expression, dict(NAMES))
    if between := re.match(rf"({NUMBER}) to ({NUMBER})", published):
        lowest, highest = map(float, between.groups())
        return "" if lowest <= value <= highest else f"{value} is not within {published}"
    if over := re.match(rf"over ({NUMBER})", published):
        return "" if value > float(over[1]) else f"{value} is not {published}"
    numbers = re.match(rf"{NUMBER}(?:, {NUMBER})*", published)
    assert numbers, f"no number in {published!r}"
    printed, values = numbers[0].split(", "), value if isinstance(value, list) else [value]
    rounding = ROUND_DOWN if "cut off" in published else ROUND_HALF_UP
    same = len(printed) == len(values) and all(map(is_as_printed, values, printed, [rounding] * len(values)))
    return "" if same else f"{values} is not {published}"


# ---------------------------------------------------------------------------------------------- the page


@cache
def functions_in(file: str) -> set[str]:
    """Names of the tests in a file of the repository."""
    functions = ast.parse((ROOT / file).read_text(encoding="utf-8")).body
    return {each.name for each in functions if isinstance(each, ast.FunctionDef) and each.name[:5] == "test_"}


def name_of(row: Row) -> str:
    return f"{row.section}: {row.cells['what']}"


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_each_expression_gives_what_is_published(row: Row) -> None:
    (expression,) = code_of(row.cells["computed by" if row.reproduced else "taken as"])
    assert disagreement(row.cells["published"], expression) == ""


def test_the_tests_that_the_page_names_are_there() -> None:
    for file, function in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", TEXT):
        assert functions_in(file) >= {function} - {""}, (file, function)


def test_the_sentences_between_the_tables_have_these_figures() -> None:
    assert ledger(7_500_000_000, 4, 2).total_bytes / 1e9 == 41.25
    assert ledger(10**12, 64, 1).total_bytes / 1e9 == 4187.5
    assert round(sum(shape.numel for shape in shapes("zero-128b")), -9) == 128 * 10**9


def test_every_source_can_be_looked_up() -> None:
    keys = set(re.findall(r"^@\w+\{(\w+),", (ROOT / "book/references.bib").read_text(encoding="utf-8"), re.M))
    assert set(re.findall(r"\{cite:\w\}`([^`]+)`", TEXT)) <= keys
    for row in ROWS:
        assert row.cells["source"]
        assert not row.reproduced or re.search(r"\{cite:t\}`|\]\(https://", row.cells["source"]), row


# ------------------------------------------------------------------------------------- how a row is read


@pytest.mark.parametrize(
    ("published", "right", "wrong"),
    [
        ("41.3 GB", "41.25", "41.2"),
        ("4187 GB (cut off)", "4187.9", "4188.0"),
        ("4187 GB (cut off)", "4187", "4186.9"),
        ("1,558 million", "1557.6", "1557.4"),
        ("52.5, 30 GB", "[52.5, 30.2]", "[52.5]"),
        ("52.5, 30 GB", "[52.5, 30.2]", "[52.5, 30.6]"),
        ("3.14e23 operations", "3.1428e23", "3.15e23"),
        ("38 to 43 %", "40", "44"),
        ("over 30 %", "35", "30"),
        ("`2 * (N - 1)`", "N + N - 2", "2 * N"),
        ("`5 * a * s / h`", "s * a / h * 5", "5 * a * s"),
    ],
)
def test_a_row_holds_to_its_digits_and_no_further(published: str, right: str, wrong: str) -> None:
    assert disagreement(published, right) == ""
    assert disagreement(published, wrong) != ""


# -------------------------------------------------------------------------------------------------- Graham


def best_of(numels: list[int], world_size: int) -> int:
    """The fullest rank of the best partition of whole parameters: all of them tried."""
    return min(
        max(
            sum(numel for numel, owner in zip(numels, owners, strict=True) if owner == rank)
            for rank in range(world_size)
        )
        for owners in product(range(world_size), repeat=len(numels))
    )


@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(1, 3))
def test_largest_first_keeps_within_grahams_bound(numels: list[int], world_size: int) -> None:
    fullest = max(sorted_greedy(numels, world_size).loads)
    # 4/3 - 1/(3N), in integers.
    assert 3 * world_size * fullest <= (4 * world_size - 1) * best_of(numels, world_size)


@pytest.mark.parametrize("world_size", [2, 3])
def test_grahams_example_reaches_it(world_size: int) -> None:
    numels = [*range(world_size, 2 * world_size)] * 2 + [world_size]
    assert best_of(numels, world_size) == 3 * world_size
    assert max(sorted_greedy(numels, world_size).loads) == 4 * world_size - 1
