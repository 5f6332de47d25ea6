"""Tests do not depend on who starts them, and a time-out is as long as a busy machine needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from zero_ref.lab.patience import patience

INHERITED = {
    "MASTER_ADDR": "10.1.2.3",
    "RANK": "7",
    "OMP_NUM_THREADS": "64",
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
    "GLOO_SOCKET_IFNAME": "eth9",
    "MPLBACKEND": "TkAgg",
    "PYTHONWARNINGS": "error",
    "COLUMNS": "20",
    "LC_ALL": "de_DE",
    "TZ": "Asia/Kathmandu",
}
LOOK = """
import json, os, resource, signal, sys, time
if sys.argv[1] == "inherit":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    os.umask(0o077)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    os.execv(sys.executable, [sys.executable, "-c", os.environ["LOOK"], "settle"])
from surroundings import settle
settle()
looked = dict(os.environ), os.umask(0), resource.getrlimit(resource.RLIMIT_NOFILE), time.tzname[0]
print(json.dumps([*looked, [str(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])]]))
sys.stdout.flush()
signal.raise_signal(signal.SIGINT)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there are no such signals to inherit")
def test_what_was_inherited_is_put_right() -> None:
    environ = {**os.environ, **INHERITED, "LOOK": LOOK, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", LOOK, "inherit"], env=environ, capture_output=True, text=True, timeout=600
    )
    assert "KeyboardInterrupt" in done.stderr, "Ctrl-C interrupts"
    found, umask, (files, most), zone, blocked = json.loads(done.stdout)
    assert {name: found[name] for name in INHERITED if name in found} == {
        "OMP_NUM_THREADS": "1",
        "LC_ALL": "C.UTF-8",
        "TZ": "UTC",
    }
    assert (umask, zone, blocked) == (0o022, "UTC", [])
    assert files == min(4096, most) or most == -1


def test_time_outs_are_longer_where_the_variable_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert patience() == 10, "as tests/surroundings.py sets it"
    monkeypatch.setenv("ZERO_REF_PATIENCE", "2.5")
    assert patience() == 2.5
    monkeypatch.delenv("ZERO_REF_PATIENCE")
    assert patience() == 1


@pytest.mark.parametrize("value", ["", "long", "0", "-1", "inf", "nan"])
def test_patience_is_a_positive_number(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZERO_REF_PATIENCE", value)
    with pytest.raises(ValueError, match=f"ZERO_REF_PATIENCE must be a positive number.*not '{value}'"):
        patience()


def test_programs_that_tests_run_leave_the_home_folder_alone() -> None:
    import IPython.paths
    import jupyter_core.paths
    import matplotlib

    tree = Path(__file__).resolve().parents[2]
    folders = [matplotlib.get_cachedir(), matplotlib.get_configdir(), IPython.paths.get_ipython_dir()]
    folders += [
        jupyter_core.paths.jupyter_config_dir(),
        jupyter_core.paths.jupyter_data_dir(),
        jupyter_core.paths.jupyter_runtime_dir(),
    ]
    assert all(Path(folder).is_relative_to(tree) for folder in folders), folders
