"""Answers that look for the answer instead of giving one: each must fail, and hear why."""

from __future__ import annotations

import inspect
from importlib.util import cache_from_source
from pathlib import Path
from typing import NamedTuple

import torch

from zero_ref.plan import rules

ORIGINAL = inspect.getfile(rules)
REPOSITORY = str(Path(ORIGINAL).parents[2])
TORCHS = str(Path(torch.__file__).parent / "distributed/optim/zero_redundancy_optimizer.py")

ASKED = "which this exercise asks you to write"
REFUSED = r"PermissionError: \[Errno (1|13)\]"


class Cheat(NamedTuple):
    """What an answer to `exercise` does; the check then says `said`, a regular expression."""

    name: str
    exercise: str
    source: str
    said: str


def largest_first(name: str, get: str, said: str = f"calls sorted_greedy, {ASKED}") -> Cheat:
    """An answer to 3.1 that gets hold of a function `rule` by these lines, and calls it."""
    lines = "".join(f"    {line}\n" for line in get.strip().splitlines())
    source = f"def largest_first(numels, n):\n{lines}    return list(rule(numels, n).owner_of_param)\n"
    return Cheat(name, "partition.largest_first", source, said)


CHEATS = [
    largest_first(
        "reload", "import importlib, zero_ref.plan.rules as m\nrule = importlib.reload(m).sorted_greedy"
    ),
    largest_first(
        "source_of_the_module",
        "import zero_ref.plan.rules as m\nnames = {'__name__': 'again'}\n"
        "exec(open(m.__file__).read(), names)\nrule = names['sorted_greedy']",
    ),
    largest_first(
        "imported_again",
        "import sys\nfor name in [*sys.modules]:\n"
        "    if name.startswith('zero_ref.'): del sys.modules[name]\n"
        "from zero_ref.plan.rules import sorted_greedy as rule",
    ),
    largest_first(
        "loader",
        "import importlib.machinery as machinery, zero_ref.plan.rules as m\n"
        "rule = machinery.SourceFileLoader('again', m.__file__).load_module().sorted_greedy",
    ),
    largest_first(
        "loader_of_the_original",
        "import importlib.machinery as machinery\n"
        f"rule = machinery.SourceFileLoader('again', {ORIGINAL!r}).load_module().sorted_greedy",
        REFUSED,
    ),
    largest_first(
        "get_data",
        "import pkgutil\nnames = {'__name__': 'again'}\n"
        "exec(pkgutil.get_data('zero_ref.plan', 'rules.py'), names)\nrule = names['sorted_greedy']",
    ),
    largest_first(
        "bytecode_of_the_copy",
        "import importlib.util as util, marshal, zero_ref.plan.rules as m\nnames = {'__name__': 'again'}\n"
        "exec(marshal.loads(open(util.cache_from_source(m.__file__), 'rb').read()[16:]), names)\n"
        "rule = names['sorted_greedy']",
        f"calls sorted_greedy, {ASKED}|No such file",
    ),
    largest_first(
        "bytecode_of_the_original",
        "import marshal\nnames = {'__name__': 'again'}\n"
        f"exec(marshal.loads(open({cache_from_source(ORIGINAL)!r}, 'rb').read()[16:]), names)\n"
        "rule = names['sorted_greedy']",
        f"{REFUSED}|No such file",
    ),
    largest_first(
        "pickled_reference",
        "import pickle\nrule = pickle.loads(b'czero_ref.plan.rules\\nsorted_greedy\\n.')",
    ),
    largest_first(
        "getsource",
        "import inspect, textwrap, zero_ref.plan.rules as m\nnames = dict(vars(m))\n"
        "exec(inspect.getsource(m.sorted_greedy), names)\nrule = names['sorted_greedy']",
    ),
    largest_first(
        "another_interpreter",
        "import subprocess, sys\n"
        "code = f'from zero_ref import sorted_greedy as r; print(r({numels}, {n}).owner_of_param)'\n"
        f"print(subprocess.check_output([sys.executable, '-c', code], cwd={REPOSITORY!r}))",
        REFUSED,
    ),
    largest_first(
        "path_of_the_repository",
        f"import sys\nsys.path.insert(0, {REPOSITORY!r})\n"
        "for name in [*sys.modules]:\n    if name.startswith('zero_ref'): del sys.modules[name]\n"
        "from zero_ref.plan.rules import sorted_greedy as rule",
        f"ModuleNotFoundError|{REFUSED}|raised Forbidden: sorted_greedy",
    ),
    largest_first(
        "editable_path",
        "import site, sys\nsite.main()\nsys.modules.pop('zero_ref_course')\n"
        "from zero_ref_course.partition import largest_first as rule",
        f"ModuleNotFoundError|ImportError|{REFUSED}|AttributeError",
    ),
    largest_first("root", f"rule = exec(open('/proc/self/root' + {ORIGINAL!r}).read())", REFUSED),
    largest_first(
        "folder_of_another_process",
        "import os\nrule = exec(open(f'/proc/{os.getppid()}/cwd/zero_ref/plan/rules.py').read())",
        f"{REFUSED}|No such file",
    ),
    largest_first("its_program", "rule = open('/proc/self/exe', 'rb').read()", f"{REFUSED}|TypeError"),
    largest_first("a_link", f"import os\nos.symlink({ORIGINAL!r}, 'x')\nrule = open('x').read()", REFUSED),
    largest_first("a_hard_link", f"import os\nos.link({ORIGINAL!r}, 'x')\nrule = open('x').read()", r"Errno"),
    largest_first(
        "the_books_solution", f"rule = open({REPOSITORY!r} + '/notebooks/03_partition.ipynb').read()", REFUSED
    ),
    largest_first(
        "c_library",
        f"import ctypes\nfile = ctypes.CDLL(None).open({ORIGINAL.encode()!r}, 0)\n"
        "assert file >= 0, 'refused'",
        "AssertionError: refused",
    ),
    largest_first(
        "objects_in_memory",
        "import gc, types\n"
        "found = [one for one in gc.get_objects() if isinstance(one, types.FunctionType)]\n"
        "[rule] = [one for one in found if one.__name__ == 'sorted_greedy']",
        f"calls sorted_greedy, {ASKED}|not enough values to unpack",  # of those frozen nothing is heard
    ),
    largest_first(
        "a_callers_frame",
        "import sys\nframe = sys._getframe()\nwhile frame:\n"
        "    for name, value in frame.f_locals.items():\n"
        "        if name in ('right', 'expected', 'plan'): return value\n"
        "    frame = frame.f_back\nraise LookupError('no grader')",
        "LookupError: no grader",
    ),
    largest_first(
        "code_of_another_function",
        "import zero_ref.plan.rules as m\nrule = lambda numels, n: m._pack("
        "m._specs(numels), sorted(range(len(numels)), key=lambda i: -numels[i]), m.elements, n, None)",
        f"calls .*, {ASKED}",
    ),
    largest_first(
        "the_same_rule_by_another_name",
        "from zero_ref.plan.rules import registration_greedy as rule",
        f"calls registration_greedy, {ASKED}",
    ),
    largest_first(
        "the_stair",
        "from zero_ref.stairs.owners import assign_owners\nreturn assign_owners(numels, n)",
        f"calls assign_owners, {ASKED}",
    ),
    largest_first(
        "the_short_name",
        "from zero_ref.minimal import assign_owners\nreturn assign_owners(numels, n)",
        f"calls assign_owners, {ASKED}",
    ),
    largest_first(
        "torchs_optimizer",
        "from torch.distributed.optim import ZeroRedundancyOptimizer as Z\n"
        "params = [torch.zeros(one) for one in numels]\nrule = Z(params, torch.optim.Adam)",
        rf"calls torch\.distributed\.optim\.\S+\.ZeroRedundancyOptimizer, {ASKED}",
    ),
    largest_first("torchs_source", f"rule = open({TORCHS!r}).read()", REFUSED),
    largest_first(
        "the_graders_own",
        "from zero_ref_course.partition import largest_first as rule",
        "ModuleNotFoundError: No module named 'zero_ref_course.partition'",
    ),
    Cheat(
        "the_graders_reference",
        "checkpoint.reads",
        "from zero_ref_course.checkpoint import _reads\n"
        "def reads(old, new, rank):\n    return _reads(old, new, rank)\n",
        "cannot import name '_reads'",
    ),
    Cheat(
        "the_stairs_step",
        "step.step_in_slices",
        "from types import SimpleNamespace\nfrom zero_ref.stairs.owners import MinimalZero as Zero\n"
        "def step(local, pieces, params, partition):\n"
        "    Zero.step(SimpleNamespace(local=local, params=pieces, owners=[0] * len(pieces), group=None))\n",
        f"calls MinimalZero.step, {ASKED}|calls step, {ASKED}",
    ),
    Cheat(
        "the_stairs_cut",
        "partition.even_split",
        "from zero_ref.plan.partition import SharedRange\ndef even_split(numels, n):\n"
        "    whole = SharedRange((0,), (0,), sum(numels))\n"
        "    return [[*whole.slices_of(rank, [sum(numels)], n)] for rank in range(n)]\n",
        f"calls slices_of, {ASKED}",
    ),
]
