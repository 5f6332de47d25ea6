"""The command line: `zero-ref plan`, and the other commands, a module and a `register` function each.

A command is a function that adds its parser to `subparsers` and sets `run`, the function that gets the parsed
arguments and returns the exit code. Only `run` imports what the command needs, so that `zero-ref --help` and
`zero-ref plan --json` work without torch and without extras. What the user did wrong is a CommandError.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from zero_ref import __version__
from zero_ref.cli._common import CommandError, Subparsers
from zero_ref.cli.bench import register_bench
from zero_ref.cli.calibrate import register_calibrate
from zero_ref.cli.check import register_check
from zero_ref.cli.notebooks import register_notebooks
from zero_ref.cli.plan import register_plan
from zero_ref.cli.simulate import register_simulate
from zero_ref.cli.train import register_demo, register_train

COMMANDS: tuple[Callable[[Subparsers], None], ...] = (
    register_plan,
    register_simulate,
    register_train,
    register_demo,
    register_calibrate,
    register_bench,
    register_check,
    register_notebooks,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code: 0, 1 where something is missing, 2 for a user's mistake.

    Args:
        argv: the words after `zero-ref`; None for those of this process.
    Raises:
        SystemExit: argparse prints help, or what is wrong with the arguments (code 2).
    """
    parser = argparse.ArgumentParser(
        prog="zero-ref", description="The Zero Redundancy Optimizer: plan a run, and run it."
    )
    parser.add_argument("--version", action="version", version=f"zero-ref {__version__}")
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="command")
    for register in COMMANDS:
        register(subparsers)
    arguments = parser.parse_args(argv)
    try:
        code = int(arguments.run(arguments))
        sys.stdout.flush()
    except CommandError as error:
        print(f"zero-ref: {error}", file=sys.stderr)
        return error.code
    except BrokenPipeError:
        # Our reader has gone (`zero-ref plan --json | head -3`). Python would complain once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code
