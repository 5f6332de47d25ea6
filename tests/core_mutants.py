"""Mistakes put into the core on purpose, each with the tests that have to find it.

    python tests/core_mutants.py                  # all of them, about ten minutes where nothing else runs
    python tests/core_mutants.py --only alarm     # those whose name has this text
    python tests/core_mutants.py --list           # their names; nothing is run

A mutant is one wrong line in a copy of the tree, of a kind that has been made here or elsewhere: a wrong
divisor, a wait left out, a cut at a wrong place, one rank's view of what all must share, a check left out
before a call. It is killed if a test fails or does not end, and has survived if all pass; then a test is
missing. Each selection of tests first runs on the copy as it is, where it has to pass.

Add an entry to MUTANTS for each mistake that was made and found. `tests/optimizer/test_core_mutants.py`
asserts that each `old` text occurs once in its file, so a change of the core keeps the table right.
(`tests/mutants.py` is about something else: what graders say of wrong solutions.)
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("zero_ref", "zero_ref_course", "tests", "benchmarks", "conftest.py", "pyproject.toml")
TIMEOUT_S = 300
"""A selection of tests takes some seconds; one that takes this long waits for what will not come."""
TIMES = 10
"""On a busy machine a selection may take longer: this many times as long as it took without a mistake."""


class Mutant(NamedTuple):
    """One mistake.

    Args:
        name: what is wrong.
        file: of the package.
        old, new: `old` occurs once in the file, and becomes `new`.
        tests: what pytest is to run: files, then perhaps "-k" and a selection.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


PARTITION = ("tests/plan/test_partition.py",)
LAYOUT = ("tests/plan/test_layout.py",)
GRADIENT_PLANS = ("tests/plan/test_gradient_plans.py",)
MOVES = ("tests/plan/test_moves.py",)
AGREE = ("tests/comm/test_collectives.py",)
SHARES = ("tests/comm/test_equal_shares.py", "-k", "every_way")
CHECKPOINT = (
    "tests/state/test_checkpoint.py",
    "-k",
    "parcels or stepped_together or loads_again or by_name_in_whatever",
)
CLIP = ("tests/clip/test_clip.py", "-k", "norms_of_3_4_and_12 or several_optimizers_raise")
AVERAGING = ("tests/local_sgd/test_averaging.py",)
LOCAL_SGD = (
    "tests/local_sgd/test_local_sgd.py",
    "-k",
    "equals_torch or virtual_ranks or was_stopped or differ or needs_no_call",
)
JOIN = ("tests/optimizer/test_join.py", "-k", "that_have_data or drifted or two_groups or sparse")
ROUNDING = ("tests/shard/test_rounding.py",)
ACCORD = ("tests/optimizer/test_accord.py",)
BUCKETS = ("tests/shard/test_buckets.py",)


def faults(selection: str) -> tuple[str, ...]:
    """Some tests of what happens on real ranks when one of them fails."""
    return ("tests/comm/test_faults.py", "-k", selection)


MUTANTS = [
    # ------------------------------------------------------------------------------------------------- plan
    Mutant(
        "a share reaches beyond the end of a parameter",
        "plan/partition.py",
        "stop = min((rank + 1) * share - begin, numels[param])",
        "stop = (rank + 1) * share - begin",
        PARTITION,
    ),
    Mutant(
        "elements without an owner are accepted",
        "plan/partition.py",
        "if covered != numel or not pieces:",
        "if covered > numel or not pieces:",
        PARTITION,
    ),
    Mutant(
        "the range's end is no multiple of the ranks",
        "plan/partition.py",
        "round_up(end, world_size * ALIGNMENT)",
        "round_up(end, ALIGNMENT)",
        PARTITION,
    ),
    Mutant(
        "the smallest parameter is packed first",
        "plan/rules.py",
        "key=lambda i: (specs[i].group, -specs[i].numel)",
        "key=lambda i: (specs[i].group, specs[i].numel)",
        PARTITION,
    ),
    Mutant(
        "an owner's run begins at any offset",
        "plan/layout.py",
        "start = end = round_up(end, alignment) if slices[0].start == 0 else end",
        "start = end",
        LAYOUT,
    ),
    Mutant(
        "runs with a gap between them are sent as one",
        "plan/layout.py",
        "            if start != end:\n",
        "            if not found:\n",
        (*LAYOUT, *BUCKETS),
    ),
    Mutant(
        "buckets of gradients in the order of registration",
        "plan/gradients.py",
        "key=lambda plan: -min(plan.starts)",
        "key=lambda plan: min(plan.starts)",
        GRADIENT_PLANS,
    ),
    Mutant(
        "an owner's second run lands on its first",
        "plan/gradients.py",
        "            end += len(run)\n",
        "",
        GRADIENT_PLANS,
    ),
    Mutant(
        "a share takes what lies before it",
        "plan/gradients.py",
        "start = max(share.start - begin, 0)",
        "start = 0",
        GRADIENT_PLANS,
    ),
    Mutant(
        "a move begins where the new slice does not",
        "plan/moves.py",
        "max(had.start, has.start)",
        "had.start",
        MOVES,
    ),
    # ------------------------------------------------------------------------------------------------- comm
    Mutant(
        "ranks compare what they do, and not the facts",
        "comm/agreement.py",
        "digest = hashlib.sha256(text)",
        "digest = hashlib.sha256(action.encode())",
        AGREE,
    ),
    Mutant(
        "ranks that all fail alike go on",
        "comm/agreement.py",
        "if all(other == digest for other in digests) and not failed:",
        "if all(other == digest for other in digests):",
        AGREE,
    ),
    Mutant(
        "replicas do not bring what they found into the group",
        "comm/agreement.py",
        "            except Exception as error:\n                facts = error\n",
        "            except Exception as error:\n                raise error\n",
        ("tests/backward/test_sharded_data_parallel.py", "-k", "rate_that_later_differs_between_groups"),
    ),
    Mutant(
        "one tag for the messages of all optimizers",
        "comm/process_group.py",
        "self.tag = TAG + number",
        "self.tag = TAG",
        faults("stepped_in_another_order"),
    ),
    Mutant(
        "one call of several is waited for",
        "comm/collectives.py",
        "for call in self.calls:",
        "for call in self.calls[:1]:",
        SHARES,
    ),
    Mutant(
        "what is to follow a call is left out",
        "comm/collectives.py",
        "        self.call.wait()\n        self.action()\n",
        "        self.call.wait()\n",
        SHARES,
    ),
    Mutant(
        "the ring adds to the share that it has just sent",
        "comm/pairwise.py",
        "self.shares[(rank - distance - 1) % size].add_(self.received)",
        "self.shares[(rank - distance) % size].add_(self.received)",
        SHARES,
    ),
    Mutant(
        "a rank's own part is counted in place of rank 0's",
        "comm/pairwise.py",
        "share.copy_(parts[0])",
        "share.copy_(parts[self.rank])",
        SHARES,
    ),
    Mutant(
        "an alarm about a later update is heard at once",
        "comm/pairwise.py",
        'if message[-1] and int.from_bytes(message[-9:-1], "big") <= update:',
        "if message[-1]:",
        faults("of_a_later_update"),
    ),
    Mutant(
        "an alarm is heard once and never again",
        "comm/pairwise.py",
        "                self._start_receive(peer)\n        return texts\n",
        "        return texts\n",
        faults("of_a_later_update or until_a_state_is_loaded"),
    ),
    # ------------------------------------------------------------------------------------------------ shard
    Mutant(
        "the owner takes its values back from the rounded message",
        "shard/buckets.py",
        "if self.message.owner == self.rank:",
        "if self.message.owner == -1:",
        (*BUCKETS, *ROUNDING),
    ),
    Mutant(
        "an element's rounding depends on where its slice begins",
        "shard/rounding.py",
        "word.add_(first & 0x7FFFFFFF).mul_",
        "word.mul_",
        ROUNDING,
    ),
    # -------------------------------------------------------------------------------------------- optimizer
    Mutant(
        "parts that were not stepped together are saved",
        "state/gather.py",
        "if numel != params[param].numel():",
        "if numel > params[param].numel():",
        CHECKPOINT,
    ),
    Mutant(
        "the loaded state is the caller's memory",
        "state/checkpoint.py",
        "[own.piece.start : own.piece.stop].clone()",
        "[own.piece.start : own.piece.stop]",
        CHECKPOINT,
    ),
    Mutant(
        "a checkpoint's parameters are taken in its own order",
        "state/checkpoint.py",
        '"params": [place[name][1] for name in names]}',
        '"params": saved_groups[source]["params"]}',
        CHECKPOINT,
    ),
    Mutant(
        "a parcel is larger than its limit",
        "plan/parcels.py",
        "        left[kind] -= size\n",
        "",
        CHECKPOINT,
    ),
    Mutant(
        "only the first update is compared",
        "optimizer/accord.py",
        "update & self.updates == 0)",
        "update == 1)",
        ACCORD,
    ),
    Mutant(
        "an update lost on one rank is taken for one lost on all",
        "optimizer/accord.py",
        "if self.lost and self.lost.keys() >= set(owners):",
        "if self.lost:",
        faults("until_a_state_is_loaded"),
    ),
    Mutant(
        "after ranks that started apart, the trained parameters are sent",
        "optimizer/start_values.py",
        "frozen=True",
        "frozen=False",
        (*ACCORD, "tests/optimizer/test_optimizer.py", "-k", "start or values"),
    ),
    # ------------------------------------------------------------------------------------------------- join
    Mutant(
        "different options of ranks with data are not told",
        "optimizer/join.py",
        "if words[rank] != words[staying[0]]:",
        "if words[rank] % 2 != words[staying[0]] % 2:",
        JOIN,
    ),
    Mutant(
        "gradients are divided by all ranks when some have left",
        "optimizer/join.py",
        "return int(count.item())",
        "return zero.collectives.world_size",
        JOIN,
    ),
    Mutant(
        "rank 0 lends the gradients, whether it has data or not",
        "optimizer/join.py",
        "source = has_data.index(True)",
        "source = 0",
        JOIN,
    ),
    # ------------------------------------------------------------------------------------------------- clip
    Mutant(
        "each rank's norms are written over those of rank 0",
        "clip/among_ranks.py",
        "before, count = sum(counts[: comm.rank]), sum(counts)",
        "before, count = 0, sum(counts)",
        CLIP,
    ),
    Mutant(
        "ranks that clip other parameters are not told",
        "clip/among_ranks.py",
        "if FAILED in digests or len(digests) > 1:",
        "if FAILED in digests:",
        CLIP,
    ),
    Mutant(
        "only whole parameters are scaled",
        "clip/grad_norm.py",
        "for own in zero.shard.parts if own.piece.param in of_zero)",
        "for own in zero.shard.parts if False)",
        ("tests/backward/test_sharded_data_parallel.py", "tests/clip/test_clip.py", "-k", "clip"),
    ),
    # ------------------------------------------------------------------------------------- backward and state
    Mutant(
        "DDP's sum is divided by the number of ranks that have left, too",
        "backward/reduction.py",
        "flat.mul_(1 / (divisor or comm.world_size))",
        "flat.mul_(1 / comm.world_size)",
        JOIN,
    ),
    Mutant(
        "a checksum is computed and not compared",
        "files/shard_files.py",
        "if hashlib.sha256(block).hexdigest() != expected:",
        "if not hashlib.sha256(block).hexdigest():",
        (
            "tests/files/test_shard_files.py",
            "tests/files/test_sharded.py",
            "-k",
            "damage or flip or byte or bit",
        ),
    ),
    # -------------------------------------------------------------------------------------------- local SGD
    Mutant(
        "of two levels that are due the first is taken",
        "local_sgd/averaging.py",
        "return due[-1] if due else None",
        "return due[0] if due else None",
        AVERAGING,
    ),
    Mutant(
        "the warm-up is a step longer",
        "local_sgd/averaging.py",
        "return step >= self.warmup_steps",
        "return step > self.warmup_steps",
        AVERAGING,
    ),
    Mutant(
        "parameters are added up and not divided",
        "local_sgd/averagers.py",
        "        flat /= comm.world_size\n",
        "",
        LOCAL_SGD,
    ),
    Mutant(
        "the averager's count starts anew after loading",
        "local_sgd/optimizer.py",
        "self.averager.step = step or 0",
        "self.averager.step = 0",
        LOCAL_SGD,
    ),
    Mutant(
        "groups of ranks that are not neighbours",
        "local_sgd/averagers.py",
        "range(first, first + size) for first in range(0, world_size, size)",
        "range(first, world_size, world_size // size) for first in range(world_size // size)",
        LOCAL_SGD,
    ),
]


def mutated(text: str, mutant: Mutant) -> str:
    """Put the mistake into the text of its file."""
    count = text.count(mutant.old)
    if count != 1:
        raise ValueError(f"{mutant.name}: {mutant.old!r} occurs {count} times in zero_ref/{mutant.file}.")
    return text.replace(mutant.old, mutant.new)


@contextmanager
def copy_of_the_tree() -> Iterator[Path]:
    """A copy to put mistakes into, which is removed afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, Path(folder, name), ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, Path(folder, name))
        yield Path(folder)


def tests_pass(tree: Path, tests: tuple[str, ...], timeout_s: float | None) -> tuple[bool, str]:
    """Run tests in a copy: whether all pass, and the first failure in words."""
    # Bytecode would be taken for that of the changed file: it may be as long, and of the same second.
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    options = ("-q", "-x", "-n", "0", "-p", "no:cacheprovider", "--no-header", "-m", "not thorough")
    command = [sys.executable, "-m", "pytest", *options, *tests]
    try:
        ran = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return False, f"no end after {timeout_s:.0f} s"
    failed = [line for line in ran.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if ran.returncode and not failed:  # such as a selection of no test
        raise RuntimeError(f"pytest {' '.join(tests)} ended with {ran.returncode}:\n{ran.stdout[-2000:]}")
    return ran.returncode == 0, failed[0].partition(" ")[2].partition(" - ")[0] if failed else ""


def main() -> None:
    """Run the mutants, and print which survived; the exit status is 1 if any did."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="those whose name has this text")
    parser.add_argument("--list", action="store_true", help="print their names, and run nothing")
    arguments = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if arguments.only in mutant.name]
    if arguments.list:
        print(*(f"{mutant.file}: {mutant.name}" for mutant in chosen), sep="\n")
        return
    survived = 0
    took_s: dict[tuple[str, ...], float] = {}
    with copy_of_the_tree() as tree:
        for mutant in chosen:
            began = time.monotonic()
            if mutant.tests not in took_s:
                passes, failure = tests_pass(tree, mutant.tests, None)
                if not passes:
                    raise SystemExit(f"without any mistake {failure} fails: mend that first.")
                took_s[mutant.tests] = time.monotonic() - began
            file = tree / "zero_ref" / mutant.file
            text = file.read_text()
            file.write_text(mutated(text, mutant))
            try:
                passes, failure = tests_pass(tree, mutant.tests, max(TIMEOUT_S, TIMES * took_s[mutant.tests]))
            finally:
                file.write_text(text)
            survived += passes
            word = "SURVIVED" if passes else "killed"
            took = f"{time.monotonic() - began:.0f} s"
            print(
                f"{word:8} {mutant.file}: {mutant.name} ({failure or 'all tests pass'}; {took})", flush=True
            )
    print(f"{len(chosen) - survived} of {len(chosen)} killed")
    raise SystemExit(survived > 0)


if __name__ == "__main__":
    main()
