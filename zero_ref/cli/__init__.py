"""The command line: `zero-ref plan`, and the other commands, a module and a `register` function each.

A command is a function that adds its parser to `subparsers` and sets `run`, the function that gets the parsed
arguments and returns the exit code. Only `run` imports what the command needs, so that `zero-ref --help` and
`zero-ref plan --json` work without torch and without extras. What the user did wrong is a CommandError.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable, Sequence

from zero_ref import __version__
from zero_ref.cli._common import CommandError, Subparsers
from zero_ref.cli.bench import register_bench
from zero_ref.cli.calibrate import register_calibrate
from zero_ref.cli.check import register_check
from zero_ref.cli.checkpoints import register_checkpoints
from zero_ref.cli.notebooks import register_notebooks
from zero_ref.cli.plan import register_plan
from zero_ref.cli.simulate import register_simulate
from zero_ref.cli.train import register_demo, register_train
from zero_ref.lab._arguments import Parser, complain, unwritable

COMMANDS: tuple[Callable[[Subparsers], None], ...] = (
    register_plan,
    register_simulate,
    register_train,
    register_demo,
    register_calibrate,
    register_bench,
    register_checkpoints,
    register_check,
    register_notebooks,
)


def make_parser() -> tuple[Parser, dict[str, Parser]]:
    """The parser of whole command lines, and that of each command by its name."""
    parser = Parser(prog="zero-ref", description="The Zero Redundancy Optimizer: plan a run, and run it.")
    parser.add_argument("--version", action="version", version=f"zero-ref {__version__}")
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="command", dest="command")
    for register in COMMANDS:
        register(subparsers)
    return parser, subparsers.choices


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code: 0, 1 where something is missing, 2 for a user's mistake.

    Args:
        argv: the words after `zero-ref`; None for those of this process.
    Returns:
        130 where Ctrl-C ended it.
    Raises:
        SystemExit: help was printed, or what is wrong with the arguments (code 2).
    """
    parser, _ = make_parser()
    arguments = parser.parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a name that its encoding lacks ends no command
    try:
        if problem := unwritable(arguments):
            raise CommandError(problem)
        code = int(arguments.run(arguments))
        sys.stdout.flush()
    except CommandError as error:
        if error.code == 2:
            complain(f"zero-ref {arguments.command}", str(error))
        else:  # of what went wrong on a rank, all lines
            print(f"zero-ref {arguments.command}: {error}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        print(f"zero-ref {arguments.command}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Our reader has gone (`zero-ref plan --json | head -3`). Python would complain once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
            raise
        complain(f"zero-ref {arguments.command}", f"what it printed could not be written: {error.strerror}.")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code
