"""`make test`: one part that fails keeps no other from running, and the table says which it was."""

from __future__ import annotations

import sys
from pathlib import Path

import parts
import pytest

MAKE = """#!{python}
import sys
print("making", sys.argv[-1])
if sys.argv[-1] == "ranks":
    print("FAILED tests/test_a.py::test_b[1 - 2] - assert 1 == 2")
    print("ERROR tests/test_c.py")
if sys.argv[-1] == "browser":
    print("The pages were NOT checked in a browser: install Chromium")
sys.exit(sys.argv[-1] in {failing})
"""


@pytest.fixture
def make(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    program = tmp_path / "make"
    program.write_text(MAKE.format(python=sys.executable, failing=request.param))
    program.chmod(0o755)
    return str(program)


pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs a script that can be started")


@pytest.mark.parametrize("make", [["ranks"]], indirect=True)
def test_what_comes_after_a_part_that_failed_is_run_too(make: str, capfd: pytest.CaptureFixture[str]) -> None:
    outcomes = parts.run_all(make)
    names = [outcome.part for outcome in outcomes]
    assert names == ["notebooks", "ranks", "types", "lint", "imports", "book", "browser", "unit"]
    assert {o.part: o.status for o in outcomes if o.status != "passed"} == {
        "ranks": "FAILED",
        "browser": "not checked",
    }
    lines = capfd.readouterr().out.splitlines()
    assert sorted(line for line in lines if "making" in line) == sorted(f"making {name}" for name in names)
    chain = [line for line in lines if line in ("making notebooks", "making book", "making browser")]
    assert chain == ["making notebooks", "making book", "making browser"], "each reads what the last wrote"
    assert lines[lines.index("making ranks") + 1].startswith("FAILED"), "one part's lines stay together"
    said = parts.table(outcomes, 60)
    assert "FAILED: make ranks\n                tests/test_a.py::test_b[1 - 2]\n" in said
    assert "                tests/test_c.py\n" in said
    assert said.endswith("FAILED: ranks")


@pytest.mark.parametrize(("failing", "status"), [("[]", 0), ("['types']", 1)])
def test_the_exit_status_says_whether_a_part_failed(
    failing: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "make"
    program.write_text(MAKE.format(python=sys.executable, failing=failing))
    program.chmod(0o755)
    monkeypatch.setattr(sys, "argv", ["parts.py", str(program)])
    monkeypatch.setattr(parts, "settle", lambda: None)
    monkeypatch.setenv("ZERO_REF_EXECUTED", "")
    assert parts.main() == status


def test_every_part_is_a_target_of_the_makefile() -> None:
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    assert [part for part in parts.PARTS if f"\n{part}: $(STAMP)" not in makefile] == []


def test_one_part_is_shown_as_it_comes_and_the_others_when_they_have_ended(
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    screen = parts.Screen()

    def shown() -> bytes:
        return capfdbinary.readouterr().out

    screen.add("unit", b"u1 ")
    screen.add("ranks", b"r1 ")
    screen.add("lint", b"l1 ")
    assert shown() == b"u1 "
    screen.end("lint")
    screen.add("ranks", b"r2 ")
    assert shown() == b"", "unit is being shown"
    screen.end("unit")
    assert shown() == b"l1 "
    screen.add("ranks", b"r3 ")
    assert shown() == b"r1 r2 r3 "
    screen.end("ranks")
    screen.add("types", b"t1 ")
    screen.end("types")
    assert shown() == b"t1 "
