"""Fixed surroundings for tests, which would inherit others: variables, signals, umask, limits, settings.

    python tests/surroundings.py COMMAND...     # with the same surroundings

A shell hands on SIGINT as ignored to what it starts in the background, as do some CI systems. On a cluster
MASTER_ADDR is set, in a colleague's terminal LC_ALL. The same tests have to pass there.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

REMOVED = {
    "RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE",  # torchrun's
    "COLUMNS", "LINES", "COLORTERM", "NO_COLOR", "FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE", "PY_COLORS",
    "LANG", "LANGUAGE", "DISPLAY", "WAYLAND_DISPLAY", "CDPATH", "BASH_ENV", "POSIXLY_CORRECT",
}  # fmt: skip
REMOVED_PREFIXES = (
    *("MASTER_", "TORCH", "PYTORCH_", "GLOO_", "NCCL_", "TP_", "C10_"),
    *("OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_"),
    *("PYTHON", "IPYTHON", "JUPYTER_", "MPLBACKEND", "HYPOTHESIS_", "LC_", "TTY_", "ZERO_REF_PATIENCE"),
)
KEPT = {"PYTHONPATH", "PYTHONHOME", "PYTHONNOUSERSITE", "PYTHONPYCACHEPREFIX"}
SET = {
    "LC_ALL": "C.UTF-8",
    "TZ": "UTC",
    "TERM": "dumb",
    "no_proxy": "localhost,127.0.0.1,::1",  # a test's own server is not behind anybody's proxy
    "NO_PROXY": "localhost,127.0.0.1,::1",
    # A time-out is there in case something hangs. On a busy machine all takes long, and nothing hangs.
    "ZERO_REF_PATIENCE": "10",
    # Tensors here are small: threads of torch would spin between two of its calls, beside other tests.
    "OMP_NUM_THREADS": "1",
}
# Programs neither write to the home folder nor read settings there. Jupyter's runtime folder is in its data
# folder.
OURS = Path(__file__).resolve().parents[1] / ".cache"
SET |= {"MPLCONFIGDIR": str(OURS / "matplotlib"), "IPYTHONDIR": str(OURS / "ipython")}
SET |= {"JUPYTER_CONFIG_DIR": str(OURS / "jupyter"), "JUPYTER_DATA_DIR": str(OURS / "jupyter")}
OPEN_FILES = 4096


def settle() -> None:
    """Give this process, and all that it will start, the surroundings that tests expect."""
    for name in set(os.environ) - KEPT:
        if name in REMOVED or name.startswith(REMOVED_PREFIXES):
            del os.environ[name]
    os.environ.update(SET)
    os.umask(0o022)
    if sys.platform == "win32":
        return
    time.tzset()
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGUSR1, signal.SIGALRM):
        if signal.getsignal(number) == signal.SIG_IGN:
            default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, default)
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError):  # macOS says "no limit" and has one
        enough = OPEN_FILES if most == resource.RLIM_INFINITY else min(OPEN_FILES, most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (enough, most))
    # Ranks are killed on purpose, and their memory is not to lie about in files.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


if __name__ == "__main__":
    settle()
    sys.exit(subprocess.run(sys.argv[1:]).returncode)
