"""Answers that cheat: in a process of its own an answer can do what it likes to itself, and gains nothing."""

from __future__ import annotations

import ast
import inspect
import os
import pkgutil
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cheats import CHEATS, Cheat

from zero_ref.lab import ranks
from zero_ref_course import _stage, exercises, forbidden_in, grade, stubs
from zero_ref_course.apart.confine import protections
from zero_ref_course.grading import answer_in, assigned_in, cells_of_own, judge, modules_of
from zero_ref_course.isolated import Cells, IsolatedAnswer, Nursery
from zero_ref_course.notebook import exercises_in, read_notebook

pytestmark = [
    pytest.mark.ranks,  # processes
    pytest.mark.skipif(not hasattr(os, "fork"), reason="answers are graded where there is fork"),
]
NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
ASSIGNED = {one.exercise: one for one in assigned_in(NOTEBOOKS)}
SOLUTIONS = {
    cells.exercise: cells.solution
    for path in sorted(NOTEBOOKS.glob("*.ipynb"))
    for cells in exercises_in(path)
}
SEED = 2026
whole = pytest.mark.skipif(not all(protections().values()), reason="needs Landlock, and seccomp on x86-64")


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery(modules_of(ASSIGNED.values())) as nursery:
        yield nursery
    ranks.shutdown()


def cells_of(exercise: str, source: str) -> Cells:
    wanted = ASSIGNED[exercise]
    return Cells((wanted.setup,), source, wanted.function, forbidden_in(exercise))


def message(nursery: Nursery, exercise: str, source: str, seed: int = 0) -> str:
    """What a cheat hears."""
    status, said = judge(nursery, exercise, cells_of(exercise, source), seed)
    assert status != "passed", said
    return said


# ------------------------------------------------------------------------- honest answers, as before


@pytest.mark.thorough
@pytest.mark.parametrize("exercise", ASSIGNED)
def test_a_solution_passes_also_in_hidden_cases(nursery: Nursery, exercise: str) -> None:
    assert judge(nursery, exercise, cells_of(exercise, SOLUTIONS[exercise]), SEED).status == "passed"


def test_a_stub_is_not_started(nursery: Nursery) -> None:
    [stub] = [
        one.stub for one in exercises_in(NOTEBOOKS / "03_partition.ipynb") if "adversary" in one.exercise
    ]
    assert judge(nursery, "partition.adversary", cells_of("partition.adversary", stub), 0) == (
        "not started",
        "adversary is still the stub: write its body, run its cell, then check again.",
    )


def test_an_answer_that_raises_is_told_with_its_call_and_its_line(nursery: Nursery) -> None:
    said = message(nursery, "ledger.floor", "def floor(numels):\n    return numels[99]\n")
    assert said.startswith(
        "floor([60000, 2000, 2000, 1000, 500]) raised IndexError: list index out of range (line 2"
    )
    assert said.endswith(": return numels[99])")


# ------------------------------------------------------------------------- the six of those who asked


def test_leaving_after_writing_a_result_file_fails(nursery: Nursery) -> None:
    writes = """
import glob, json, os, sys
def adversary():
    for place in [*sys.argv, "result.json", *glob.glob("*")]:
        open(place if place.endswith("json") else "result.json", "w").write(json.dumps([True, "fine"]))
    os._exit(0)
"""
    assert message(nursery, "partition.adversary", writes) == (
        "the answer's process ended in the call adversary(). Did it exit, or use too much memory?"
    )


def test_replacing_the_registered_exercise_fails(nursery: Nursery) -> None:
    replaces = """
import zero_ref_course as course
course.exercises()
for name, found in course._registered.items():
    course._registered[name] = found._replace(grader=lambda answer: "fine")
course.grade = course.check = lambda *_: "fine"
def adversary():
    return [1]
"""
    assert message(nursery, "partition.adversary", replaces).startswith("its cell raises AttributeError")


@pytest.mark.parametrize("do", ["renamed", "deleted", "untagged"])
def test_what_becomes_of_check_cells_changes_nothing(nursery: Nursery, do: str) -> None:
    """Renaming a check; deleting two of three checks."""
    notebook = read_notebook(NOTEBOOKS / "03_partition.ipynb")
    checks = [cell for cell in notebook["cells"] if "check" in cell["metadata"].get("tags", [])]
    for cell in checks[1:]:
        if do == "renamed":
            cell["source"] = ['check("partition.other", adversary)']
        elif do == "untagged":
            cell["metadata"]["tags"] = []
        else:
            notebook["cells"].remove(cell)
    for cell in notebook["cells"]:
        if "solution" in cell["metadata"].get("tags", []):
            cell["source"], cell["metadata"]["tags"] = ["pass"], []
    wanted = assigned_in(NOTEBOOKS, ["partition"])
    assert [one.exercise for one in wanted] == [
        "partition.largest_first", "partition.even_split", "partition.adversary",
    ]  # fmt: skip
    for one in wanted:
        cells = answer_in(notebook, one)
        assert cells is not None
        assert judge(nursery, one.exercise, cells, 0).status == "not started"


def test_reading_the_truth_from_the_callers_frame_fails(nursery: Nursery) -> None:
    reads = """
import gc, sys
def floor(numels):
    frame = sys._getframe()
    while frame:
        for name in ("right", "truth", "measured", "expected"):
            if name in frame.f_locals:
                return frame.f_locals[name]
        frame = frame.f_back
    return 0
"""
    assert "and floor says 0." in message(nursery, "ledger.floor", reads)


@pytest.mark.parametrize(
    "body",
    [
        "return list(sorted_greedy(numels, n).owner_of_param)",
        "return list(plan_partition('sorted_greedy', [ParamSpec(one) for one in numels], n).owner_of_param)",
        "import zero_ref.plan.rules as rules; return list(rules.sorted_greedy(numels, n).owner_of_param)",
        "import zero_ref; return list(zero_ref.sorted_greedy(numels, n).owner_of_param)",
        "\n    try: return list(sorted_greedy(numels, n).owner_of_param)\n    except Exception: return [0]",
    ],
)
def test_calling_the_function_that_the_task_asks_for_fails(nursery: Nursery, body: str) -> None:
    calls = f"from zero_ref.plan.partition import ParamSpec\ndef largest_first(numels, n):\n    {body}\n"
    said = message(nursery, "partition.largest_first", calls)
    assert said.endswith(" calls sorted_greedy, which this exercise asks you to write.")


# ------------------------------------------------------------------------- more of them


def test_a_table_of_the_known_cases_fails_in_hidden_ones(nursery: Nursery) -> None:
    known: list[Any] = []

    class Notes(IsolatedAnswer):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            known.append((args, value := super().__call__(*args, **kwargs)))
            return value

    cells = cells_of("checkpoint.reads", SOLUTIONS["checkpoint.reads"])
    grade("checkpoint.reads", Notes(nursery.answer(cells).path, cells))
    table = {repr(args): value for args, value in known}
    recalls = f"table = {table!r}\ndef reads(old, new, rank):\n    return table[repr((old, new, rank))]\n"
    status, said = judge(nursery, "checkpoint.reads", cells_of("checkpoint.reads", recalls), SEED)
    assert status == "hidden cases failed"
    assert "raised KeyError" in said


def test_what_is_equal_to_everything_is_not_right(nursery: Nursery) -> None:
    agrees = """
class Right(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
class Both(list):
    def __eq__(self, other): return True
def floor(numels):
    return Right(7)
"""
    assert "floor says 7" in message(nursery, "ledger.floor", agrees)


def test_changing_torch_and_builtins_changes_the_answers_process_only(nursery: Nursery) -> None:
    changes = """
torch.equal = torch.allclose = lambda *_, **__: True
math = type("math", (), {"isclose": lambda *_, **__: True})
def master_step(param, master, optimizer):
    pass
"""
    assert "the master has not changed" in message(nursery, "precision.master_step", changes)
    assert not torch.equal(torch.zeros(1), torch.ones(1))


FORGES = """
import base64, pickle, sys
class Run:
    def __reduce__(self):
        return open, ({marker!r}, "w")
def link():
    frame = sys._getframe()
    while "link" not in frame.f_locals:
        frame = frame.f_back
    return frame.f_locals["link"]
def adversary():
    pickled = base64.b64encode(pickle.dumps(Run())).decode()
    link().send({message})
    link().receive()
"""


@pytest.mark.parametrize(
    ("forged", "said"),
    [
        ('{"value": ["pickle", pickled]}', "an answer may not send a pickle"),
        ('{"value": ["optimizer", -1, pickled, [[[], []]], []]}', "an optimizer of the answer's own"),
        ('{"value": ["value", "os", "system", [["command", "true"]]]}', "os.system is no type of values"),
        (
            '{"value": ["value", "zero_ref_course.grading", "Path", []]}',
            "Path is no type of values",
        ),
        ('{"callback": [7, "write", ["list", -1, []], ["dict", -2, []]]}', "asks for what it was not lent"),
        ('{"callback": [0, "destroy_process_group", ["list", -1, []], ["dict", -2, []]]}', "was not lent"),
        ('{"value": ["known", 0]}', "cannot be read: KeyError"),
        ('{"value": ["tensor", -1, -2, "AAAA", "float32", [[9**9], [0], 0], False, None]}', "is too large"),
        (
            '{"value": ["tensor", -1, -2, "AAAA", "float32", [[9], [1], 0], False, None]}',
            "does not lie in its memory",
        ),
        (
            '{"value": ["tensor", -1, -2, "AAAA", "float32", [[1], [1], -4], False, None]}',
            "strides [1] at -4",
        ),
        ('{"raised": {"name": "Killed", "token": 5}}', "what it raised"),
        ('{"status": "passed", "nonce": 1}', "it neither returned nor raised"),
        ('[True, "fine"]', "it is no message of an answer"),
    ],
)
def test_a_forged_message_is_read_as_data_or_not_at_all(
    nursery: Nursery, tmp_path: Path, forged: str, said: str
) -> None:
    marker = tmp_path / "run"
    forges = FORGES.replace("{marker!r}", repr(str(marker))).replace("{message}", forged)
    assert said in message(nursery, "partition.adversary", forges)
    assert not marker.exists()


@whole
def test_an_answer_sees_no_file_and_no_variable_of_the_grader_and_starts_and_signals_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_THE_GRADER", "hidden")
    other = tmp_path / "another-student.ipynb"
    other.write_text("[3, 3, 2, 2, 2]")
    tries = f"""
import os, subprocess, socket, signal, pathlib, ctypes
def adversary():
    found = []
    for name, attempt in {{
        "a file": lambda: open({str(other)!r}).read(),
        "a folder": lambda: os.listdir({str(tmp_path)!r}),
        "writing": lambda: open({str(tmp_path / "new")!r}, "w"),
        "chmod": lambda: os.chmod({str(other)!r}, 0),
        "environ": lambda: open("/proc/{os.getpid()}/environ").read(),
        "memory": lambda: open("/proc/{os.getpid()}/mem").read(),
        "home": lambda: os.listdir(os.path.expanduser("~root")),
        "siblings": lambda: [os.listdir(".."), os.listdir("/tmp")],
        "fork": os.fork,
        "a program": lambda: subprocess.run(["true"]),
        "a socket": lambda: socket.socket(),
        "udp": lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
        "unix": lambda: socket.socket(socket.AF_UNIX),
        "kill": lambda: os.kill({os.getpid()}, 0),
    }}.items():
        try:
            found.append((name, repr(attempt())[:60]))
        except OSError:
            pass
    found += [(key, value) for key, value in os.environ.items() if "SECRET" in key]
    return found
"""
    with Nursery() as nursery:
        assert nursery.answer(Cells((), tries, "adversary"))() == []
    assert not (tmp_path / "new").exists()


def test_nothing_is_left_of_an_answer(nursery: Nursery) -> None:
    leaves = """
import os
def adversary():
    open("notes", "w").write("seen")
    return os.path.abspath("notes"), os.getpid()
"""
    answer = nursery.answer(cells_of("partition.adversary", leaves))
    notes, process = answer()
    assert Path(notes).exists()
    again = nursery.answer(
        cells_of("partition.adversary", "import os\ndef adversary():\n    return os.listdir('.')\n")
    )
    assert again() == []
    answer.end()
    again.end()
    for _ in range(6000):
        if not Path(notes).exists():
            break
        time.sleep(0.1)
    assert not Path(notes).exists()
    assert not Path(f"/proc/{process}").exists()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return [bytearray(2**30) for _ in range(8)]", "raised MemoryError"),
        ("open('large', 'wb').write(bytes(2**25))", "raised OSError: [Errno 27] File too large"),
        ("return ['x' * 2**26]", "may be sent at once"),
        ("return torch.ones(1).expand(10**12)", "is too large"),
        ("return torch.ones(2, 2).to_sparse()", "layout torch.sparse_coo on cpu cannot be sent"),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are Linux's")
def test_an_answer_that_takes_too_much_fails_alone(nursery: Nursery, body: str, said: str) -> None:
    takes = f"import signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\ndef adversary():\n    {body}\n"
    assert said in message(nursery, "partition.adversary", takes)


@pytest.mark.usefixtures("impatient")
def test_an_answer_that_does_not_end_is_ended(nursery: Nursery) -> None:
    hangs = "def adversary():\n    while True:\n        pass\n"
    assert message(nursery, "partition.adversary", hangs) == (
        "adversary() did not return within 5 s. Is there a loop that never ends?"
    )


def test_ranks_that_send_nothing_fail_although_their_values_are_right(nursery: Nursery) -> None:
    steps_all = """
import weakref
plains = []
def step(local, pieces, params, partition):
    if not plains:
        plains.append(torch.optim.Adam(params, lr=0.1))
    plains[0].step()
"""
    assert "no rank has sent any" in message(nursery, "step.step_in_slices", steps_all)


def test_values_that_a_rank_could_compute_for_all_are_hidden(nursery: Nursery) -> None:
    computes = """
def ring_all_reduce(rank, world_size, chunks, send, recv):
    for chunk, mine in enumerate(chunks):
        mine[0] = sum(10.0**other for other in range(world_size))
        mine[1:] = sum(100.0 * (chunk + 1) + other for other in range(world_size))
"""
    exercise = "collectives.ring_all_reduce"
    said = judge(nursery, exercise, cells_of(exercise, computes), SEED)
    assert said.status != "passed"


# ------------------------------------------------------------------------- the reader's own optimizer

STAIR_OF = {
    "owners": "owners", "step": "owners", "buckets": "buckets", "in_backward": "overlap",
    "to_owners": "shards", "shards": "shards", "checkpoint": "checkpoint", "masters": "checkpoint",
    "options": "checkpoint",
}  # fmt: skip


@pytest.mark.parametrize(
    "rung",
    [
        rung if rung in ("owners", "in_backward") else pytest.param(rung, marks=pytest.mark.thorough)
        for rung in STAIR_OF
    ],
)
def test_a_rung_holds_apart_as_it_does_beside_the_check(nursery: Nursery, rung: str) -> None:
    cells = cells_of_own(stubs.answer(STAIR_OF[rung]))
    assert judge(nursery, f"my_zero.{rung}", cells, SEED).status == "passed"


@pytest.mark.parametrize(
    ("source", "status", "said"),
    [
        (
            "from torch.distributed.optim import ZeroRedundancyOptimizer as MyZero\n",
            "failed",
            r"MyZero\(params, Adam, lr=0.1\) calls torch\.\S*\.ZeroRedundancyOptimizer, so it wraps",
        ),
        (
            "from torch.distributed.optim import ZeroRedundancyOptimizer\n"
            "class MyZero(ZeroRedundancyOptimizer):\n    local = property(lambda self: self.optim)\n",
            "failed",
            "so it wraps an optimizer of others",
        ),
        (
            "def made(*args, **options):\n    from zero_ref import ZeroRedundancyOptimizer\n"
            "    return ZeroRedundancyOptimizer(*args, **options)\n"
            "class MyZero:\n    def __init__(self, *args, **options):\n"
            "        self.zero = made(*args, **options)\n",
            "failed",
            "calls zero_ref, so it wraps an optimizer of others",
        ),
        (
            "import torch\ntorch.equal = lambda *_: True\nclass MyZero:\n"
            "    def __init__(self, params, optimizer_class, **options):\n"
            "        self.local = optimizer_class(params, **options)\n"
            "    def step(self):\n        pass\n",
            "failed",
            r"after step \d on 2 ranks",
        ),
        (
            "import gc, torch\nclass MyZero:\n    def __init__(self, params, optimizer_class, **options):\n"
            "        self.local = optimizer_class(params, **options)\n"
            "    def step(self):\n        [self.package] = [one for one in gc.get_objects()\n"
            "            if 'ZeroRedundancyOptimizer' in type(one).__name__]\n",
            "failed",
            r"MyZero\.step\(\) raised ValueError: not enough values to unpack",
        ),
        ("print('hello')\n", "not started", "the file has no class MyZero"),
        ("class MyZero:\n    def __init__(self, *_, **__):\n        raise NotImplementedError\n",
         "not started", "raises NotImplementedError: it is still to be written"),
    ],
)  # fmt: skip
def test_what_is_no_optimizer_of_ones_own_is_named(
    nursery: Nursery, source: str, status: str, said: str
) -> None:
    verdict = judge(nursery, "my_zero.step", cells_of_own(source), SEED)
    assert verdict.status == status, verdict
    assert re.search(said, verdict.message), verdict


# ------------------------------------------------------------------------- the boundary itself


def test_what_is_forbidden_is_in_no_file_of_the_copy(tmp_path: Path) -> None:
    names = sorted({name for exercise in exercises() for name in forbidden_in(exercise)})
    assert len(names) > 15
    _stage.write_package(tmp_path, names)
    files = {path.relative_to(tmp_path): path for path in (tmp_path / "zero_ref").rglob("*")}
    assert not [path for path in files if path.suffix == ".pyc" or path.name == "__pycache__"]
    sources = [path.read_text() for path in files.values() if path.suffix == ".py"]
    copied = "\n".join(ast.unparse(ast.parse(source)) for source in sources)
    unindented = "\n".join(map(str.strip, copied.splitlines()))
    others = [other for name in names for other in _stage.OTHER_FORMS.get(name, ())]
    for full in (*names, *others):
        found: Any = pkgutil.resolve_name(full)
        function = inspect.unwrap(found.fget if isinstance(found, property) else found)
        [node] = ast.parse(textwrap.dedent(inspect.getsource(function))).body
        assert isinstance(node, ast.FunctionDef)
        assert f"refuse('{node.name}')" in copied, full
        body = "\n".join(map(str.strip, ast.unparse(node.body[1:] or node.body).splitlines()))
        assert body not in unindented, full


def test_the_course_of_an_answer_knows_no_answer(tmp_path: Path) -> None:
    _stage.write_course(tmp_path)
    course = tmp_path / "zero_ref_course"
    there = {path.relative_to(course).with_suffix("").as_posix() for path in course.rglob("*.py")}
    of_course = {name for name in there if not name.startswith("apart/")}
    assert of_course == {*_stage.GIVEN, *_stage.WITHOUT_EFFECT}
    for path in course.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                assert "exercise(" not in ast.unparse(node), node.name


@whole
def test_no_original_can_be_read(nursery: Nursery, monkeypatch: pytest.MonkeyPatch) -> None:
    originals = _stage.originals()
    assert {"zero_ref", "zero_ref_course", "notebooks"} <= {path.name for path in originals}
    assert nursery.readable_originals() == []
    monkeypatch.setattr(_stage, "originals", lambda: [*originals, Path(sys.executable)])
    assert nursery.readable_originals() == [sys.executable]


@whole
@pytest.mark.parametrize("cheat", CHEATS, ids=lambda cheat: cheat.name)
def test_an_answer_that_looks_for_the_answer_fails(nursery: Nursery, cheat: Cheat) -> None:
    assert re.search(cheat.said, message(nursery, cheat.exercise, cheat.source))


def test_an_answer_that_returns_no_plain_value_is_judged_by_its_type(nursery: Nursery) -> None:
    cells = Cells(("import torch, numpy\n",), "def f(what):\n    return eval(what)\n", "f")
    answer = nursery.answer(cells)
    for text in (
        "1",
        "1.5",
        "'x'",
        "None or [1, (2, {3: {4}})]",
        "float('inf')",
        "2**200",
        "1j",
        "torch.bfloat16",
    ):
        assert answer(text) == eval(text)
    assert list(answer("(n for n in range(3))")) == [0, 1, 2]
    assert repr(answer("object")) == "<class 'object'>"
    assert type(answer("numpy.float64(2)")).__name__ == "float64"
    assert answer("numpy.arange(3)").tolist() == [0, 1, 2]
    assert torch.equal(answer("torch.arange(6).view(2, 3).t()"), torch.arange(6).view(2, 3).t())


def test_a_list_that_the_answer_changes_is_changed_here(nursery: Nursery) -> None:
    answer = nursery.answer(
        Cells((), "def f(numbers, table):\n    numbers.sort()\n    table[1] = numbers\n    return 1\n", "f")
    )
    numbers, table = [3, 1, 2], {}
    answer(numbers, table)
    assert numbers == [1, 2, 3]
    assert table[1] is numbers


# ------------------------------------------------------------------------- what a container has to add


def test_the_disk_as_a_whole_is_the_containers(nursery: Nursery) -> None:
    """One file has a limit, and their number has none."""
    fills = """
import os
def adversary():
    for number in range(40):
        open(f"file-{number}", "wb").write(bytes(2**20))
    return [len(os.listdir("."))] * 11
"""
    assert "returned [40, 40, 40" in message(nursery, "partition.adversary", fills)


@pytest.mark.parametrize("missing", ["files", "network and processes"])
@whole
def test_what_a_machine_does_not_have_is_the_containers(tmp_path: Path, missing: str) -> None:
    """With the protection it is refused, and without it, as on another system, it is not."""
    (tmp_path / "other").write_text("another student's answer")
    script = f"""
import os, pathlib, socket, sys
from zero_ref_course.apart import confine as _confine
if sys.argv[1] == "without":
    has = _confine.protections()
    _confine.protections = lambda: has | {{{missing!r}: False}}
    _confine.resource.RLIMIT_NPROC = _confine.resource.RLIMIT_CORE
scratch = pathlib.Path({str(tmp_path)!r}, "scratch")
scratch.mkdir(exist_ok=True)
readable = _confine.readable(map(pathlib.Path, [sys.prefix, sys.base_prefix, "/usr", "/lib", "/lib64"]), [])
_confine.confine(scratch, _confine.Limits(), readable)
try:
    open({str(tmp_path / "other")!r}).close() if {missing!r} == "files" else socket.socket().close()
except OSError as error:
    sys.exit(f"refused: {{error}}")
"""
    for how, refused in (("with", True), ("without", False)):
        done = subprocess.run(
            [sys.executable, "-c", script, how], capture_output=True, text=True, timeout=600, check=False
        )
        assert ("refused: " in done.stderr) is refused, done.stderr
        assert done.returncode == refused, done.stderr
