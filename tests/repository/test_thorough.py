"""`make test` leaves out only further cases of tests that it has, the PDF, and the wheel by itself."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PROGRAMS_OF_OTHERS = ("test_doctor_published", "test_watch_clients")
"""Published optimizers under the doctor, and a library's loop under `watch`: each takes minutes. Programs of
our own try the same in test_nccl_on_gloo and test_watched_jobs."""
FILES = [
    path
    for path in sorted(TESTS.rglob("test_*.py"))
    if "mark.thorough" in path.read_text(encoding="utf-8")
    and path.stem not in ("test_thorough", "test_pdf", "test_wheel_alone", *PROGRAMS_OF_OTHERS)
]
"""Files with thorough tests, but those of the PDF and the wheel, which are made once a day."""


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_beside_thorough_tests_a_file_has_others(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tests = [
        node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    always = [
        test
        for test in tests
        if not any(ast.unparse(one) == "pytest.mark.thorough" for one in test.decorator_list)
    ]
    assert always
    marks = [
        ast.unparse(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    ]
    assert not any("mark.thorough" in mark for mark in marks), "that would be the whole file"
