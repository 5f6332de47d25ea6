"""Real ranks from a cell, a script or a test: what comes back, what failures tell, what is left behind."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from multiprocessing import connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from library.training import NEVER_S
from torch.distributed.distributed_c10d import _set_pg_timeout

from zero_ref.lab import _worker, ranks
from zero_ref.lab.patience import patience
from zero_ref.lab.placement import Placement
from zero_ref.lab.ranks import Pool, RankError, device, run, shutdown

pytestmark = pytest.mark.ranks

gloo = partial(run, backend="gloo")
only_linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


@pytest.fixture
def short_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp())  # pytest's own path may be too long for the fork server's socket
    yield folder
    shutil.rmtree(folder)


def error_of(fn: Callable[[], object], world_size: int = 2) -> RankError:
    with pytest.raises(RankError) as caught:
        gloo(fn, world_size, timeout=NEVER_S)
    assert gloo(dist.get_rank, world_size) == list(range(world_size)), "the next call works"
    return caught.value


def all_gone(pids: list[int], seconds: float = 300.0) -> bool:
    def alive(pid: int) -> bool:
        with contextlib.suppress(FileNotFoundError):  # a zombie has ended once all its threads have
            return (
                ") Z " not in Path(f"/proc/{pid}/stat").read_text()
                or len(os.listdir(f"/proc/{pid}/task")) > 1
            )
        return False

    deadline = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(alive, pids))


def module_level(x: int) -> int:
    return x + dist.get_rank()


# ------------------------------------------------------------------------------------ what goes in and out


def test_values_come_back_in_rank_order() -> None:
    def total(scale: float, *, shift: float) -> tuple[int, int, torch.Tensor]:
        mine = torch.arange(3.0) * scale + shift + dist.get_rank()
        dist.all_reduce(mine)
        return dist.get_rank(), dist.get_world_size(), mine

    for world_size in (1, 4):
        shift_total = world_size * 0.5 + sum(range(world_size))
        for rank, value in enumerate(gloo(total, world_size, 2.0, shift=0.5)):
            assert value[:2] == (rank, world_size)
            assert torch.equal(value[2], torch.arange(3.0) * 2.0 * world_size + shift_total)


def test_functions_of_cells_and_of_modules_both_work() -> None:
    bound = torch.tensor([1.0, 2.0])
    assert gloo(lambda: (bound * dist.get_rank()).tolist(), 2) == [[0.0, 0.0], [1.0, 2.0]]
    assert gloo(module_level, 2, 5) == [5, 6]


def test_a_function_may_name_modules_of_classes_of_their_own() -> None:
    # In a notebook: cloudpickle looks for torch.distributed.config where a function uses `dist` and `config`.
    cell = {"__name__": "__main__", "dist": dist, "config": 40}
    exec("def plus_rank(): return config + dist.get_rank()", cell)
    assert gloo(cell["plus_rank"], 2) == [40, 41]

    def summed() -> list[float]:
        ops = torch.ops._c10d_functional
        return ops.wait_tensor(ops.all_reduce(torch.ones(2), "sum", dist.group.WORLD.group_name)).tolist()

    assert gloo(summed, 2) == [[2, 2]] * 2


def test_views_of_one_tensor_come_back_as_views_of_one_tensor() -> None:
    def views() -> list[torch.Tensor]:
        flat = torch.zeros(100)
        return [flat[:50], flat[50:]]

    first, second = gloo(views, 1)[0]
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


def test_a_rank_that_returns_early_does_not_cut_off_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "GRACE_SECONDS", 0.1)  # time for the others after a failure, and only then

    def receive_late() -> float:
        if dist.get_rank() == 0:
            time.sleep(0.3)
        tensor = torch.full((1_000_000,), float(dist.get_rank()))
        dist.broadcast(tensor, src=1)
        if dist.get_rank() == 0:
            time.sleep(0.3)
            dist.send(tensor[:1], dst=2)
        elif dist.get_rank() == 2:
            dist.recv(tensor[:1], src=0)
        return tensor.sum().item()

    assert gloo(receive_late, 3) == [1e6] * 3


def test_later_calls_start_no_process() -> None:
    first, *later = (gloo(os.getpid, 2) for _ in range(3))
    assert later == [first] * 2


# --------------------------------------------------------------------------------------- output by rank


def test_output_is_labelled_by_rank_and_in_rank_order(capfd: pytest.CaptureFixture[str]) -> None:
    def talk() -> None:
        if dist.get_rank() == 0:
            time.sleep(0.2)  # the slower rank still comes first
        print("hello\n\nworld")
        print("careful", file=sys.stderr)
        print("10%\r50%\r100%", file=sys.stderr)
        os.system("echo from C")

    gloo(talk, 2)
    shown = capfd.readouterr()
    lines = ["hello", "", "world", "from C"]
    assert shown.out.splitlines() == [f"[rank {rank}] {line}" for rank in (0, 1) for line in lines]
    assert shown.err.splitlines() == [
        f"[rank {rank}] {line}" for rank in (0, 1) for line in ("careful", "100%")
    ]
    gloo(talk, 2)
    assert capfd.readouterr().out == shown.out, "a call shows its own output only"


@pytest.mark.parametrize("how", ["raise ValueError", "os.kill(os.getpid(), 9)", "time.sleep(3600)"])
@pytest.mark.usefixtures("all_may_report")
def test_output_is_shown_when_the_call_fails(
    how: str, capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        print("before")
        (tmp_path / str(dist.get_rank())).touch()
        dist.barrier()  # a rank that ends before all have met keeps the others from beginning
        exec(how, {"os": os, "time": time})

    gloo(dist.get_rank, 2)
    capfd.readouterr()
    if "sleep" in how:
        expire_when(monkeypatch, lambda: len(list(tmp_path.iterdir())) == 2)
    with pytest.raises(RankError):
        gloo(fail, 2, timeout=NEVER_S)
    assert capfd.readouterr().out == "[rank 0] before\n[rank 1] before\n"


def test_warnings_obey_the_filters_of_the_caller(capfd: pytest.CaptureFixture[str]) -> None:
    def warn() -> None:
        warnings.warn("mind the gap", UserWarning, stacklevel=1)

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        gloo(warn, 1)
        assert re.fullmatch(
            r"\[rank 0\] .*UserWarning: mind the gap\n(\[rank 0\] .*\n)?", capfd.readouterr().err
        )
        warnings.simplefilter("ignore")
        gloo(warn, 1)
        assert capfd.readouterr().err == ""
        warnings.simplefilter("error")
        with pytest.raises(RankError, match="mind the gap"):
            gloo(warn, 1)


# ------------------------------------------------------------------------------------------------ failures


def test_the_rank_that_raised_is_told_first_with_its_source_line() -> None:
    def fail() -> None:
        if dist.get_rank() == 1:
            raise ValueError("boom")  # the line to see
        dist.barrier()

    error = error_of(fail, 3)
    assert (error.rank, error.summary) == (1, "ValueError: boom")
    assert isinstance(error.__cause__, ValueError)
    message = str(error)
    assert message.startswith("rank 1 raised ValueError: boom\n\nTraceback (most recent call last):")
    assert 'raise ValueError("boom")  # the line to see' in message
    assert "_worker.py" not in message
    assert list(error.others) == [0, 2]
    assert all("still running" in line and line.endswith("dist.barrier()") for line in error.others.values())


@pytest.mark.usefixtures("all_may_report")
def test_when_all_raise_alike_the_lowest_rank_is_told() -> None:
    def fail() -> None:
        time.sleep(0.1 * (1 - dist.get_rank()))
        raise KeyError("same on all")

    error = error_of(fail)
    assert error.rank == 0
    assert error.others[1].startswith("raised KeyError: 'same on all', at ")


@pytest.mark.usefixtures("all_may_report")
def test_what_follows_from_a_failure_is_told_second() -> None:
    def fail() -> None:
        if dist.get_rank() == 0:
            raise RuntimeError("Connection closed by peer [127.0.0.1]:1234")
        time.sleep(0.3)
        raise ValueError("the cause")

    error = error_of(fail)
    assert (error.rank, error.summary) == (1, "ValueError: the cause")
    assert error.others[0].startswith("raised RuntimeError: Connection closed by peer")


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("os.kill(os.getpid(), 9)", r"rank 1 was killed by signal 9 \(SIGKILL\)"),
        ("os._exit(3)", "rank 1 ended with exit code 3"),
        ("sys.exit(4)", "rank 1 raised SystemExit: 4"),
    ],
)
def test_a_rank_that_ends_is_named(how: str, told: str) -> None:
    def end() -> None:
        if dist.get_rank() == 1:
            exec(how, {"os": os, "sys": sys})
        dist.all_reduce(torch.ones(1))

    error = error_of(end)
    assert re.match(told, str(error))
    assert error.rank == 1
    assert list(error.others) == [0]


def expire_when(monkeypatch: pytest.MonkeyPatch, is_time: Callable[[], bool]) -> None:
    """A call's time-out passes then and not before, however busy the machine is."""
    wait = connection.wait

    def expiring(sources: Any, timeout: float) -> list[Any]:
        while not (ready := wait(sources, min(timeout, 0.05))):
            if is_time():
                monkeypatch.setattr(ranks, "connection", connection)  # the next call waits as usual
                break
        return ready

    monkeypatch.setattr(ranks, "connection", SimpleNamespace(wait=expiring))


def test_a_time_out_tells_where_the_running_ranks_stand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait_here() -> None:
        threading.Event().wait()

    def report_when_waiting(rank: int) -> None:
        main = threading.main_thread().ident or 0
        while sys._current_frames()[main].f_code.co_filename != threading.__file__:
            time.sleep(0.01)
        (tmp_path / str(rank)).touch()

    def stuck() -> None:
        if dist.get_rank() != 1:
            threading.Thread(target=report_when_waiting, args=[dist.get_rank()], daemon=True).start()
            wait_here()

    expire_when(monkeypatch, lambda: len(list(tmp_path.iterdir())) == 2)
    error = error_of(stuck, 3)
    message = str(error)
    headline = f"timed out after {NEVER_S * patience():g} s; still running: rank 0, rank 2"
    assert message.startswith(f"{headline}\n\nrank 0 stood here:\n")
    assert (error.rank, error.summary, error.others) == (0, "timed out", {1: "had returned"})
    stack = r"in stuck\n    wait_here\(\)\n  File .*, in wait_here\n    threading.Event\(\).wait\(\)\n"
    assert len(re.findall(stack, message)) == 2
    assert "_worker.py" not in message


@pytest.mark.usefixtures("impatient")
def test_a_call_ends_when_its_time_is_over() -> None:
    with pytest.raises(RankError):  # on a busy machine it may be over before the ranks have met
        gloo(lambda: threading.Event().wait(), 2, timeout=1)


def test_a_collective_that_one_rank_does_not_call_is_told_with_its_line() -> None:
    def mismatch() -> None:
        timeout = dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout
        assert timeout == timedelta(seconds=0.8 * NEVER_S * patience()), "before the call is ended"
        dist.barrier()
        _set_pg_timeout(timedelta(seconds=0.5), dist.group.WORLD)  # so that the test need not wait
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(1))  # rank 1 does not

    error = error_of(mismatch)
    assert error.rank == 0
    assert "Timed out" in error.summary
    assert "dist.all_reduce(torch.ones(1))  # rank 1 does not" in str(error)
    assert error.others == {1: "had returned"}


class Awkward(Exception):
    """Pickled by its args, it cannot be made again: there is one argument, and two are wanted."""

    def __init__(self, left: int, right: int) -> None:
        super().__init__(f"{left} and {right}")


def test_an_exception_that_cannot_be_sent_is_told_in_words() -> None:
    def with_a_lock() -> None:
        raise ValueError("has a lock", threading.Lock())

    def awkward() -> None:
        raise Awkward(1, 2)

    for fail, summary in ((with_a_lock, "ValueError: ('has a lock'"), (awkward, "Awkward: 1 and 2")):
        error = error_of(fail)
        assert error.summary.startswith(summary)
        assert error.__cause__ is None


class FailsToLoad:
    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("not a number",)


def test_a_value_that_cannot_be_sent_is_told_in_words() -> None:
    error = error_of(threading.Lock)
    assert "the function returned a lock that cannot be sent back" in str(error)
    error = error_of(FailsToLoad)
    assert "rank 0 returned a value that cannot be read here: ValueError" in str(error)


def test_an_argument_that_cannot_be_sent_is_refused_and_harms_nothing() -> None:
    before = gloo(os.getpid, 2)
    with pytest.raises(TypeError, match=r"cannot be sent to the ranks.*lock"):
        gloo(print, 2, threading.Lock())
    assert gloo(os.getpid, 2) == before


@pytest.mark.parametrize(
    ("arguments", "error", "told"),
    [
        ((print, 0), ValueError, "world_size must be 1 or more, not 0"),
        ((print, "2"), TypeError, "str"),
        (("print", 2), TypeError, "fn must be a function"),
        ((print, 2, {"timeout": 0}), ValueError, "timeout must be a positive number"),
        ((print, 2, {"timeout": float("inf")}), ValueError, "timeout must be a positive number"),
        (
            (print, 2, {"backend": "mpi"}),
            ValueError,
            """backend must be "nccl", "gloo" or left out, not 'mpi'""",
        ),
        ((print, 4096, {"backend": "nccl"}), ValueError, "an accelerator of its own for each of 4096 ranks"),
    ],
)
def test_mistakes_are_told_at_once(
    arguments: tuple[Any, ...], error: type[Exception], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = arguments[2] if len(arguments) == 3 else {}
    monkeypatch.setattr(ranks, "Pool", None)  # nothing is started
    with pytest.raises(error, match=told):
        run(*arguments[:2], **options)


def never_ready(seat: object, pipe: object) -> None:
    time.sleep(600)


@pytest.mark.usefixtures("impatient")
def test_ranks_that_do_not_start_in_time_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_worker, "main", never_ready)
    with pytest.raises(RankError, match=r"no start within 0\.001 s"):
        Pool(2, "gloo", start_timeout=0.001)


# ---------------------------------------------------------------------- one call does not disturb the next


def leaves_without_group() -> None:
    dist.barrier()  # Gloo fails to make a group on a rank if another has left it already
    dist.destroy_process_group()


def leaves_subgroups() -> None:
    dist.new_group([0])
    dist.new_group([0, 1])


def leaves_a_message_unread() -> None:
    if dist.get_rank() == 0:
        dist.isend(torch.ones(1), dst=1)


def leaves_collectives_unfinished() -> None:
    ours, theirs = dist.new_group(), dist.new_group()
    dist.all_reduce(torch.ones(1), group=ours if dist.get_rank() == 0 else theirs, async_op=True)


@pytest.mark.parametrize(
    "disturb",
    [leaves_without_group, leaves_subgroups, leaves_a_message_unread, leaves_collectives_unfinished],
    ids=lambda fn: fn.__name__,
)
def test_what_a_call_leaves_behind_does_not_reach_the_next(disturb: Callable[[], None]) -> None:
    def total() -> float:
        ones = torch.full((1,), 3.0)
        dist.all_reduce(ones, group=dist.new_group())
        return ones.item()

    before = gloo(os.getpid, 2)
    gloo(disturb, 2)
    assert gloo(total, 2) == [6.0, 6.0]
    assert gloo(os.getpid, 2) == before


def test_ranks_that_cannot_leave_their_group_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    def block() -> str:
        dist.destroy_process_group = lambda: time.sleep(3600)
        return "value"

    monkeypatch.setattr(ranks, "LEAVE_SECONDS", 0.05)
    assert gloo(block, 2) == ["value"] * 2
    monkeypatch.undo()
    assert gloo(dist.get_rank, 2) == [0, 1]


def test_a_rank_that_died_between_calls_is_replaced() -> None:
    before = gloo(os.getpid, 2)
    os.kill(before[1], signal.SIGKILL)
    assert all_gone(before[1:])
    after = gloo(os.getpid, 2)
    assert not set(before) & set(after)


def test_each_call_has_the_surroundings_of_its_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look() -> tuple[str | None, str, int]:
        import beside_the_notebook  # type: ignore[import-not-found]

        return os.environ.get("ZERO_REF_TEST"), os.getcwd(), beside_the_notebook.answer

    gloo(dist.get_rank, 2)  # the ranks are there before any of this
    (tmp_path / "beside_the_notebook.py").write_text("answer = 42")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ZERO_REF_TEST", "on")
    assert gloo(look, 2) == [("on", str(tmp_path), 42)] * 2
    monkeypatch.delenv("ZERO_REF_TEST")
    assert gloo(look, 2)[0][0] is None


def test_a_rank_has_torchruns_variables_and_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def look() -> tuple[list[str], int, str, torch.device]:
        names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"]
        assert "MASTER_PORT" not in os.environ, "there is none"
        return [os.environ[name] for name in names], torch.get_num_threads(), dist.get_backend(), device()

    monkeypatch.setenv("MASTER_PORT", "29500")  # of the launcher that started the caller
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "another0")  # would not do: there is no such interface
    gloo(lambda: torch.set_num_threads(2), 2)
    expected = (1, "gloo", torch.device("cpu"))
    assert gloo(look, 2) == [([rank, rank, "2", "2"], *expected) for rank in ("0", "1")]


def test_a_rank_knows_its_own_device_and_a_subprocess_of_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def look() -> tuple[str | None, torch.device]:
        return os.environ.get("ZERO_REF_DEVICE"), device()

    for named in ("", "cpu"):
        monkeypatch.setenv("ZERO_REF_DEVICE", named)
        assert run(look, 2) == [("cpu", torch.device("cpu"))] * 2
    assert device() == torch.device("cpu"), "the caller is no rank"


@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        ("ZERO_REF_DEVICE", "abacus", "'abacus', which torch does not know"),
        ("ZERO_REF_DEVICE", "cuda:4095", "'cuda:4095', and torch .* finds .* on this machine"),
        ("ZERO_REF_BACKEND", "mpi", "ZERO_REF_BACKEND must be"),
    ],
)
def test_a_variable_that_names_what_is_not_there_is_told_before_a_process_starts(
    variable: str, value: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    monkeypatch.setattr(ranks, "RankProcess", None)
    for start in (lambda: run(print, 2), lambda: gloo(print, 2), lambda: Pool(2)):
        with pytest.raises(ValueError, match=told):
            start()


def test_a_default_device_has_what_names_none_and_what_a_call_brings_along(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # "meta" stands for an accelerator: tensors have a device there, and no numbers.
    brought = torch.ones(3)

    def where() -> list[str]:
        return [str(tensor.device) for tensor in (brought, torch.zeros(2))]

    placement = Placement("gloo", ("meta", "meta"), is_default=True)
    monkeypatch.setattr(ranks, "place_ranks", lambda *_, **__: placement)
    with Pool(2) as pool:
        assert pool.run(where) == [["meta"] * 2] * 2
    monkeypatch.setattr(ranks, "place_ranks", lambda *_, **__: placement._replace(is_default=False))
    with Pool(2) as pool:
        assert pool.run(where) == [["cpu"] * 2] * 2


# ----------------------------------------------------------------------------------- what is left behind


def listening_addresses() -> set[str]:
    """Return the addresses on which this process listens, as /proc/net writes them."""
    descriptors = Path("/proc/self/fd")
    inodes = set()
    for fd in os.listdir(descriptors):
        with contextlib.suppress(OSError):
            inodes.update(re.findall(r"socket:\[(\d+)\]", os.readlink(descriptors / fd)))
    addresses = set()
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        rows = [line.split() for line in Path(table).read_text().splitlines()[1:]]
        addresses |= {row[1].split(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes}
    return addresses


def test_starting_ranks_leaves_the_caller_as_it_was() -> None:
    def looked_at() -> tuple[Any, ...]:
        return sys.modules["__main__"], list(sys.warnoptions), list(sys.path), dict(os.environ), os.getcwd()

    before = looked_at()
    Pool(1, "gloo").close()
    assert looked_at() == before


@only_linux
def test_no_port_is_open_to_other_machines_and_none_for_ranks_to_find_each_other() -> None:
    on_ranks = gloo(listening_addresses, 2)
    loopback = {"0100007F", "0000000000000000FFFF00000100007F"}
    assert all(on_ranks), "Gloo listens"
    assert set().union(*on_ranks) <= loopback
    assert not listening_addresses(), "ranks find each other in a file"


@only_linux
def test_ranks_find_each_other_where_only_their_user_can_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    old_umask = os.umask(0)
    try:
        with Pool(2, "gloo") as pool:
            assert pool.run(dist.get_rank) == [0, 1]
            (folder,) = tmp_path.glob("zero_ref-ranks-*")
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            assert (folder / _worker.STORE).stat().st_size > 0
    finally:
        os.umask(old_umask)


@only_linux
def test_a_pool_whose_folder_was_cleared_away_is_replaced() -> None:
    gloo(dist.get_rank, 2)
    key = os.getpid(), ranks.place_ranks(2, "gloo"), False
    pool = ranks._kept_pools[key]
    Path(pool._folder.name, _worker.STORE).unlink()
    assert not pool.usable
    assert gloo(dist.get_rank, 2) == [0, 1]
    assert pool.closed


@only_linux
def test_pools_give_back_processes_files_and_folders(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = []  # kept, so that what they give back is not the garbage collector's doing

    def use_two_pools() -> list[int]:
        with Pool(2, "gloo") as pool:
            pids = pool.run(os.getpid)
        broken.append(Pool(2, "gloo"))
        with pytest.raises(RankError):
            broken[-1].run(os._exit, 1)
        return pids

    gloo(dist.get_rank, 1)  # what lives longer than a pool is there now
    monkeypatch.setattr("tempfile.tempdir", str(short_folder))
    use_two_pools()
    open_before = len(os.listdir("/proc/self/fd"))
    assert all_gone(use_two_pools())
    assert len(os.listdir("/proc/self/fd")) <= open_before
    assert os.listdir(short_folder) == []


def test_a_closed_pool_refuses_calls() -> None:
    pool = Pool(1, "gloo")
    pool.close()
    with pytest.raises(RuntimeError, match="this pool is closed"):
        pool.run(dist.get_rank)


@only_linux
def test_shutdown_ends_every_rank_and_run_starts_again() -> None:
    pids = gloo(os.getpid, 2) + gloo(os.getpid, 1)
    shutdown()
    assert all_gone(pids)
    assert gloo(dist.get_rank, 2) == [0, 1]


# ------------------------------------------------------------------------------- scripts and notebooks


@pytest.fixture
def start_script(tmp_path: Path, short_folder: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def start(source: str, temporary_folder: Path = short_folder) -> subprocess.Popen[str]:
        path = tmp_path / "script.py"
        path.write_text(
            "import os, sys, time, torch\nimport torch.distributed as dist\n" + textwrap.dedent(source)
        )
        root = Path(ranks.__file__).parents[2]
        started.append(
            subprocess.Popen(
                [sys.executable, str(path)],
                env={**os.environ, "PYTHONPATH": f"{tmp_path}:{root}", "TMPDIR": str(temporary_folder)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        )
        return started[-1]

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=600)


def test_a_script_needs_no_main_guard_and_its_classes_come_back_whatever_the_temporary_folder(
    start_script: Any, short_folder: Path, tmp_path: Path
) -> None:
    # The fork server is called by a socket file there, whose path must not be long: then do without it.
    temporary_folder = short_folder / ("x" * 100)
    temporary_folder.mkdir()
    # Stands for what libraries say when imported: the script says it itself, the ranks do not repeat it.
    (tmp_path / "sitecustomize.py").write_text("import warnings; warnings.warn('on import', FutureWarning)")
    process = start_script(
        """
        from zero_ref.lab.ranks import run

        class Point:
            def __init__(self, x): self.x = x

        class Wrong(Exception): pass

        def make(point):
            if point is None:
                raise Wrong("no point")
            return Point(point.x + dist.get_rank())

        points = run(make, 2, Point(10), backend="gloo")
        assert all(isinstance(point, Point) for point in points)
        try:
            run(make, 2, None, backend="gloo")
        except RuntimeError as error:
            assert isinstance(error.__cause__, Wrong)
        print([point.x for point in points])
        """,
        temporary_folder,
    )
    out, err = process.communicate(timeout=600)  # returns when the last process that holds the pipe has ended
    assert (out, process.returncode) == ("[10, 11]\n", 0)
    assert re.fullmatch(r".*FutureWarning: on import\n.*\n", err)


def test_ranks_leave_ctrl_c_to_the_caller() -> None:
    assert gloo(lambda: signal.raise_signal(signal.SIGINT), 2) == [None, None]


def test_ctrl_c_ends_the_call_and_the_next_one_works(start_script: Any, tmp_path: Path) -> None:
    process = start_script(
        """
        from zero_ref.lab.ranks import run

        def wait():
            print("is waiting")
            open(f"here{dist.get_rank()}", "w").close()
            time.sleep(600)

        os.chdir(os.path.dirname(__file__))
        try:
            run(wait, 2, timeout=500, backend="gloo")
        except KeyboardInterrupt:
            print("interrupted")
        print(run(dist.get_rank, 2, backend="gloo"))
        """
    )
    deadline = time.monotonic() + 600
    while (
        not ((tmp_path / "here0").exists() and (tmp_path / "here1").exists()) and time.monotonic() < deadline
    ):
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the ranks too
    out, err = process.communicate(timeout=600)
    assert (out, err) == ("[rank 0] is waiting\n[rank 1] is waiting\ninterrupted\n[0, 1]\n", "")


@only_linux
def test_ranks_end_and_clean_up_when_all_processes_of_their_parents_group_are_killed(
    start_script: Any, short_folder: Path
) -> None:
    process = start_script(
        """
        from zero_ref.lab.ranks import run

        def pids():
            return os.getpid(), os.getppid()

        def stuck():
            if dist.get_rank() == 0:
                time.sleep(600)
            dist.all_reduce(torch.ones(1))

        print(*sum(run(pids, 2, backend="gloo"), ()), *sum(run(pids, 1, backend="gloo"), ()), flush=True)
        run(stuck, 2, timeout=500, backend="gloo")
        """
    )
    pids = [int(pid) for pid in process.stdout.readline().split()]
    time.sleep(0.5)  # one rank sleeps, one is in a collective, one is idle
    assert not all_gone(pids, seconds=0)
    os.killpg(process.pid, signal.SIGKILL)  # as who ends a notebook's kernel does
    assert len(set(pids)) == 4, "three ranks and the server that forked them"
    assert all_gone(pids)
    assert [path.name for path in short_folder.iterdir() if not path.name.startswith("torchinductor")] == []


def test_in_a_notebook_a_failed_cell_shows_its_source_and_the_next_one_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    cells = [
        "import torch, torch.distributed as dist\nfrom zero_ref.lab.ranks import run",
        "def step():\n"
        "    print('working')\n"
        "    if dist.get_rank() == 1:\n"
        "        raise ValueError('boom')  # in the cell\n"
        "    dist.barrier()\n"
        "run(step, 2, backend='gloo')",
        "run(lambda: dist.get_rank() * 10, 2, backend='gloo')",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
    monkeypatch.setenv("PYTHONPATH", str(Path(ranks.__file__).parents[2]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Jupyter's own
        nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3", allow_errors=True).execute()
    imported, failed, worked = (cell.outputs for cell in notebook.cells)
    assert imported == []
    assert [output.text for output in failed if output.output_type == "stream"] == [
        "[rank 0] working\n[rank 1] working\n"
    ]
    error = next(output for output in failed if output.output_type == "error")
    assert error.ename == "RankError"
    assert error.evalue.startswith("rank 1 raised ValueError: boom\n\nTraceback (most recent call last):\n")
    assert "raise ValueError('boom')  # in the cell" in error.evalue
    assert error.evalue.endswith("in step: dist.barrier()")
    assert "_collect" not in "\n".join(error.traceback), "the frames in between are left out"
    assert [output.data["text/plain"] for output in worked] == ["[0, 10]"]
