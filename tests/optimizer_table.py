"""Other people's optimizers under ZeroRedundancyOptimizer: each class, under each partition, against itself.

    python tests/optimizer_table.py            # all that are installed, into the results
    python tests/optimizer_table.py Lion SAM   # prints the rows of these

Each class makes 10 updates by itself, with all parameters, and then sharded over 3 virtual ranks. A verdict
is "equal" (bit for bit, on all ranks, after every update), "refused" with the reason, or "different" with the
largest difference. book/optimizers.md shows the table.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import io
import itertools
import json
import logging
import platform
import re
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zero_ref.comm.collectives import Collectives
from zero_ref.files.sharded import load_sharded, save_sharded
from zero_ref.lab import virtual
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer

FILE = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "optimizers.json"
PACKAGES = ["torch", "torchao", "bitsandbytes", "pytorch_optimizer"]
STEPS, RANKS, FEWER_RANKS = 10, 3, 2
PARTITIONS = ["sorted_greedy", "registration_greedy", "even"]

SHAPES = [(160, 128), (32, 16, 3, 3), (64,), (96, 64), (10, 7), (128,)]
"""The first is large enough for low-bit state and for factors of rows and columns."""

MATRICES = [shape for shape in SHAPES if len(shape) == 2]
Snapshot = list[torch.Tensor]

RANDOM = "It draws random numbers, and a rank draws other ones for its shard than one process for all."
TOGETHER = (
    "It computes something from all parameters together: in one process too, an optimizer for each parameter "
    "gives other values than one for all."
)


# ------------------------------------------------------------------------------------------------ the classes


@dataclass(frozen=True)
class Case:
    """A class, and what it needs to run.

    Args:
        options: for its constructor.
        closure: pass the closure to `step`.
        graph: backward makes a graph of the gradients, for second derivatives.
        sparse: gradients are sparse.
        use_muon: matrices are in a group with `use_muon=True`, the other parameters in one without.
    """

    package: str
    name: str
    optimizer_class: type[Optimizer]
    options: dict[str, Any] = field(default_factory=dict)
    shapes: Sequence[tuple[int, ...]] = tuple(SHAPES)
    closure: bool = False
    graph: bool = False
    sparse: bool = False
    use_muon: bool = False

    def params(self, values: Snapshot | None = None) -> list[nn.Parameter]:
        """The parameters, at the start or with these values."""
        generator = torch.Generator().manual_seed(0)
        start = [0.3 * torch.randn(shape, generator=generator) for shape in self.shapes]
        return [nn.Parameter(value.clone()) for value in values or start]

    def groups(self, params: Sequence[nn.Parameter]) -> Any:
        """The parameters, as the constructor takes them."""
        if not self.use_muon:
            return params
        by_use = {use: [param for param in params if (param.ndim > 1) == use] for use in (True, False)}
        return [{"params": members, "use_muon": use} for use, members in by_use.items() if members]


AROUND = ["Lookahead", "OrthoGrad", "ScheduleFreeWrapper", "TRAC"]
"""Classes of pytorch_optimizer that take an optimizer, here AdamW."""

ON_BASE = ["SAM", "LookSAM", "FriendlySAM"]
"""Classes of pytorch_optimizer that take the class of another optimizer, here AdamW."""

SAME = re.compile("^_|Paged|32bit|Offload")
"""In the names of classes that do the same on a CPU as those without."""

NEEDS: dict[str, dict[str, Any]] = {
    "torch.LBFGS": {"closure": True},
    "torch.Muon": {"shapes": MATRICES},
    "torch.SparseAdam": {"shapes": MATRICES, "sparse": True},
    "bitsandbytes.LARS": {"options": {"lr": 0.1, "momentum": 0.9}},
    "bitsandbytes.LARS8bit": {"options": {"lr": 0.1, "momentum": 0.9}},
    "bitsandbytes.SGD": {"options": {"lr": 0.1, "momentum": 0.9}},
    "bitsandbytes.SGD8bit": {"options": {"lr": 0.1, "momentum": 0.9}},
    "bitsandbytes.PytorchLARS": {"options": {"momentum": 0.9}},
    "pytorch_optimizer.AdaGO": {"use_muon": True},
    "pytorch_optimizer.AdaHessian": {"graph": True},
    "pytorch_optimizer.AdaMuon": {"use_muon": True},
    "pytorch_optimizer.AdaShift": {"options": {"keep_num": 3}},
    "pytorch_optimizer.AliG": {"closure": True},
    "pytorch_optimizer.BSAM": {"closure": True, "options": {"num_data": 100}},
    "pytorch_optimizer.DistributedMuon": {"use_muon": True},
    "pytorch_optimizer.Kron": {
        "shapes": [(24, 16), (8, 8), (64,)]
    },  # takes minutes for larger ones, as Shampoo does
    "pytorch_optimizer.Muon": {"use_muon": True},
    "pytorch_optimizer.MuonClip": {"use_muon": True},
    "pytorch_optimizer.NorMuon": {"use_muon": True},
    "pytorch_optimizer.Ranger21": {"options": {"num_iterations": 100}},
    "pytorch_optimizer.Shampoo": {"shapes": [(24, 16), (8, 8), (64,)]},
    "pytorch_optimizer.SophiaH": {"graph": True},
    "pytorch_optimizer.SpectralSphere": {"shapes": MATRICES},
    "pytorch_optimizer.TRAC": {"options": {"s_prev": 0.1}},  # else it moves nothing in 10 updates
}
NEEDS |= {
    f"pytorch_optimizer.{name}": {"closure": True, "options": {"base_optimizer": torch.optim.AdamW}}
    for name in ON_BASE
}


def cases_of(package: str) -> Iterator[Case]:
    """Every optimizer class of a package, in the order of names.

    Raises:
        ImportError: it is not installed.
    """
    for name, found in sorted(_classes(package)):
        yield Case(package, name, found, **NEEDS.get(f"{package}.{name}", {}))


def _classes(package: str) -> set[tuple[str, type[Optimizer]]]:
    folder = importlib.import_module(package if package == "pytorch_optimizer" else f"{package}.optim")
    if package == "pytorch_optimizer":
        listed = [folder.load_optimizer(name) for name in folder.get_supported_optimizers()]
        listed += [getattr(folder, name) for name in ON_BASE]
        listed += [_around_adamw(getattr(folder, name)) for name in AROUND]
        return {(one.__name__, one) for one in listed if one.__module__.startswith((package, __name__))}
    found = {(name, one) for name, one in vars(folder).items() if isinstance(one, type)}
    return {
        (name, one)
        for name, one in found
        if issubclass(one, Optimizer) and one is not Optimizer and not SAME.search(name)
    }


def _around_adamw(wrapper: Any) -> type[Optimizer]:
    """The wrapper as a class that takes parameters."""

    def construct(self: Any, params: Any, **options: Any) -> None:
        wrapper.__init__(self, torch.optim.AdamW(params), **options)
        getattr(self, "train", lambda: None)()

    return type(wrapper.__name__, (wrapper,), {"__init__": construct, "__module__": __name__})


# --------------------------------------------------------------------------------------------------- the runs


@functools.cache
def _inputs(number: int, shape: tuple[int, ...], step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + number)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator) * 0.3**number


def train(case: Case, optimizer: Any, params: Sequence[nn.Parameter], steps: range) -> list[Snapshot]:
    """The parameters after each update.

    All ranks compute the same gradients, as they would have them after an all-reduce. The loss is no sum over
    elements, so second derivatives mix the elements of a parameter.
    """

    def closure(step: int) -> torch.Tensor:
        for param in params:
            param.grad = None
        with torch.enable_grad():
            loss = torch.zeros(())
            for number, param in enumerate(params):
                x, y = _inputs(number, tuple(param.shape), step)
                loss = loss + ((param * x).sin() * y).sum() + (param * x).sum() ** 2 / param.numel()
            loss.backward(create_graph=case.graph)
        for param in params if case.sparse else ():
            assert param.grad is not None
            param.grad = param.grad.to_sparse(1)
        return loss

    after = []
    for step in steps:
        closure(step)
        optimizer.step(*[functools.partial(closure, step)] * case.closure)
        after.append([param.detach().clone() for param in params])
    for param in params:
        param.grad = None  # a graph would keep itself alive through it
    return after


def plain(case: Case, values: Snapshot | None = None) -> tuple[list[nn.Parameter], Optimizer]:
    """Parameters, and the optimizer by itself."""
    torch.manual_seed(0)
    params = case.params(values)
    return params, case.optimizer_class(case.groups(params), **case.options)


def sharded(
    case: Case, comm: Collectives, values: Snapshot | None = None, **mode: Any
) -> tuple[list[nn.Parameter], ZeroRedundancyOptimizer]:
    """Parameters, and the optimizer on the shard of a virtual rank.

    The local optimizers step one at a time, because these libraries do not expect threads (bitsandbytes'
    quantization has races), and each has a random generator of its own, as processes have.
    """
    params = case.params(values)
    optimizer = ZeroRedundancyOptimizer(
        case.groups(params), case.optimizer_class, comm, **mode, **case.options
    )
    local_step = optimizer.optim.step
    random_state = torch.Generator().manual_seed(0).get_state()

    def step(*args: Any, **kwargs: Any) -> Any:
        nonlocal random_state
        with _ONE_STEPS, torch.random.fork_rng(devices=[]):
            torch.set_rng_state(random_state)
            try:
                return local_step(*args, **kwargs)
            finally:
                random_state = torch.get_rng_state()

    optimizer.optim.step = step  # type: ignore[method-assign]
    return params, optimizer


_ONE_STEPS = threading.Lock()


def verdict(run: Callable[[], list[list[Snapshot]]], expected: list[Snapshot]) -> str:
    """Judge a run, which returns the parameters on each rank after each update."""
    try:
        runs = run()
    except Exception as error:
        return f"refused: {reason(error)}"
    worst, first = 0.0, 0
    for ours in runs:
        for step, (ours_then, theirs_then) in enumerate(zip(ours, expected, strict=True), start=1):
            for one, other in zip(ours_then, theirs_then, strict=True):
                if not torch.equal(one, other):
                    worst = max(worst, float((one - other).abs().max()))
                    first = min(first, step) if first else step
    return f"different: by up to {worst:.0e}, from update {first} on" if first else "equal"


def reason(error: BaseException) -> str:
    """The first statement of an error, of which a virtual rank's is the cause."""
    text = str(error.__cause__ or error)
    # Where one rank fails, whichever notices first tells: the rank itself, or another of that rank's error.
    text = re.sub(r"^(rank \d+: )?(rank \d+ could not [^:]*: \w+: )?(rank \d+: )?", "", text)
    # Several ranks may fail, and whichever is first names its own.
    text = re.sub(r"\b(parameter|rank) \d+", r"a \1", text)
    first = re.split(r"[.:;](?:\s|$)", text, maxsplit=1)[0]
    return f"it lacks {first}" if isinstance(error.__cause__ or error, KeyError) else first


# -------------------------------------------------------------------------------------------------- the table


@dataclass
class Row:
    """The results of a class.

    Args:
        partitions: a verdict for each partition, without and with `parameters_as_bucket_view`.
        checkpoint: a verdict for each way in which state changes hands in the middle of a run.
        cut: "even" cut parameters: the class is one of torch's that are elementwise, or `elementwise=True`
            said so of another class. Then a verdict of "different" means that it is not.
        why: why a verdict on whole parameters is "different".
    """

    package: str
    name: str
    partitions: dict[str, list[str]] = field(default_factory=dict)
    checkpoint: dict[str, str] = field(default_factory=dict)
    cut: bool = False
    why: str = ""

    @property
    def on_whole_parameters(self) -> list[str]:
        """The verdicts of all runs that cut no parameter."""
        cut = ["even"] if self.cut else []
        of_partitions = [verdicts for name, verdicts in self.partitions.items() if name not in cut]
        return [*itertools.chain(*of_partitions), *self.checkpoint.values()]


def row_of(case: Case) -> Row:
    """Run a class.

    Raises:
        Exception: whatever it raises by itself; ValueError if it moves no parameter, or to what is no number.
    """
    params, optimizer = plain(case)
    before = [param.detach().clone() for param in params]
    state_before = torch.get_rng_state()
    expected = train(case, optimizer, params, range(STEPS))
    random = not torch.equal(state_before, torch.get_rng_state())
    row = Row(case.package, case.name)
    if not all(value.isfinite().all() for value in expected[-1]):
        raise ValueError("it diverges on these gradients.")
    if all(map(torch.equal, before, expected[-1])):
        raise ValueError(f"it moves nothing in {STEPS} updates.")

    def on_rank(comm: Collectives, **mode: Any) -> list[Snapshot]:
        params, optimizer = sharded(case, comm, elementwise=True, **mode)
        row.cut |= not optimizer.partition.is_whole
        return train(case, optimizer, params, range(STEPS))

    for partition in PARTITIONS:
        runs = [
            functools.partial(
                virtual.run, on_rank, RANKS, partition=partition, parameters_as_bucket_view=views, timeout=600
            )
            for views in (False, True)
        ]
        row.partitions[partition] = [verdict(run, expected) for run in runs]
    if row.partitions[PARTITIONS[0]][0] == "equal":
        row.checkpoint = dict(_handed_on(case, expected))
    if any(one.startswith("different") for one in row.on_whole_parameters):
        apart = verdict(lambda: [_train_apart(case)], expected)
        row.why = RANDOM if random else "" if apart == "equal" else TOGETHER
    return row


def _train_apart(case: Case) -> list[Snapshot]:
    """The parameters after each update by an optimizer for each of them, in one process."""
    torch.manual_seed(0)
    params = case.params()
    optimizers = [case.optimizer_class(case.groups([param]), **case.options) for param in params]

    class All:
        def step(self, *closure: Any) -> None:
            for optimizer in optimizers:
                optimizer.step(*closure)

    return train(case, All(), params, range(STEPS))


def _handed_on(case: Case, uninterrupted: list[Snapshot]) -> Iterator[tuple[str, str]]:
    """After half of the updates, 3 ranks hand their state on: a verdict for each way."""
    first, rest = range(STEPS // 2), range(STEPS // 2, STEPS)
    values = uninterrupted[len(first) - 1]

    def resume(state_dict: Any) -> list[Snapshot]:
        params, optimizer = plain(case, values)
        optimizer.load_state_dict(state_dict)
        return train(case, optimizer, params, rest)

    # Some classes do not resume exactly from their own state, so this is what others are compared with.
    params, optimizer = plain(case)
    train(case, optimizer, params, first)
    expected = resume(optimizer.state_dict())

    with tempfile.TemporaryDirectory() as folder:

        def save(comm: Collectives) -> Any:
            params, optimizer = sharded(case, comm)
            train(case, optimizer, params, first)
            optimizer.consolidate_state_dict("all")
            save_sharded(optimizer, folder)
            return optimizer.state_dict()

        def load(comm: Collectives, state_dict: Any) -> list[Snapshot]:
            params, optimizer = sharded(case, comm, values)
            optimizer.load_state_dict(state_dict)
            return train(case, optimizer, params, rest)

        def load_files(comm: Collectives) -> list[Snapshot]:
            params, optimizer = sharded(case, comm)
            load_sharded(optimizer, folder)
            return train(case, optimizer, params, rest)

        try:
            state_dicts = virtual.run(save, RANKS, timeout=600)
        except RuntimeError as error:
            yield "saved", f"refused: {reason(error)}"
            return
        ways: dict[str, Callable[[], list[list[Snapshot]]]] = {
            "at 2 ranks": lambda: virtual.run(load, FEWER_RANKS, state_dicts[0], timeout=600),
            "unsharded": lambda: [resume(state_dicts[1])],
            "files at 2 ranks": lambda: virtual.run(load_files, FEWER_RANKS, timeout=600),
        }
        for way, run in ways.items():
            yield way, verdict(run, expected)


def made_with() -> dict[str, str]:
    """The versions of all packages that are installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package).partition("+")[0]
    return found


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Without what the packages print and warn of; one thread, so that nothing is summed in another order."""
    threads, level = torch.get_num_threads(), logging.root.manager.disable
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            logging.disable(level)


def table_of(package: str, names: Sequence[str] = ()) -> tuple[list[Row], dict[str, str]]:
    """A row for each class that runs by itself; the others with the reason."""
    rows, left_out = [], {}
    for case in cases_of(package):
        if not names or case.name in names:
            with undisturbed():
                try:
                    rows.append(row_of(case))
                except Exception as error:
                    left_out[case.name] = reason(error)
            print(package, case.name, left_out.get(case.name) or "", flush=True)
    return rows, left_out


def main(names: Sequence[str]) -> None:
    """Write the table, or print these rows."""
    tables = {package: table_of(package, names) for package in PACKAGES}
    rows = [row for found, _ in tables.values() for row in found]
    if names:
        print(*rows, sep="\n")
        return
    content = {
        "made_with": made_with(),
        "rows": [asdict(row) for row in rows],
        "left_out": {package: left_out for package, (_, left_out) in tables.items() if left_out},
    }
    FILE.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
