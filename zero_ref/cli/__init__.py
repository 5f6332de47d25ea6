"""The command line `zero-ref`: each command is a module with a `register` function.

Other distributions add commands as entry points of the group `zero_ref.commands`: so the course adds `check`,
`grade` and `notebooks`.

`register` adds the command's parser to `subparsers` and sets `run`, the function that is called with the
parsed arguments and returns the exit code. Only `run` imports what the command needs, so that
`zero-ref --help` and `zero-ref plan --json` work without torch and without extras. A user's mistake is a
CommandError.
"""

from __future__ import annotations

import argparse
import errno
import io
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points

from zero_ref import __version__
from zero_ref.cli._common import CommandError, Subparsers
from zero_ref.cli.checkpoints import register_checkpoints
from zero_ref.cli.doctor import register_doctor
from zero_ref.cli.plan import register_plan
from zero_ref.cli.search import register_search
from zero_ref.cli.simulate import register_simulate
from zero_ref.cli.train import register_demo, register_train
from zero_ref.cli.which import register_which
from zero_ref.lab._arguments import Parser, complain, printable, unwritable

COMMANDS: tuple[Callable[[Subparsers], None], ...] = (
    register_which,
    register_plan,
    register_simulate,
    register_search,
    register_train,
    register_demo,
    register_checkpoints,
    register_doctor,
)

WHERE_BENCHMARKS_ARE = "in a clone of the repository run `python -m benchmarks --help`."
OF_THE_COURSE = ("check", "grade", "notebooks")
"""The commands of zero_ref_course. Without it they say how to get it."""


def make_parser() -> tuple[Parser, dict[str, Parser]]:
    """The parser of whole command lines, and the parsers of the commands by name."""
    parser = Parser(prog="zero-ref", description="The Zero Redundancy Optimizer: plan a run, and run it.")
    parser.add_argument("--version", action="version", version=f"zero-ref {__version__}")
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="command", dest="command")
    for register in COMMANDS:
        register(subparsers)
    for added in entry_points(group="zero_ref.commands"):
        added.load()(subparsers)
    for name in OF_THE_COURSE:
        if name not in subparsers.choices:
            _register_absent(subparsers, name)
    return parser, subparsers.choices


def _register_absent(subparsers: Subparsers, name: str) -> None:
    """Add a command that takes any words, and says where it is."""
    # No word begins with the prefix "\0", so options too are taken as words.
    parser = subparsers.add_parser(
        name, help="comes with the course, which is not installed", add_help=False, prefix_chars="\0"
    )
    parser.add_argument("words", nargs="*")
    parser.set_defaults(run=_run_absent)


def _run_absent(_: argparse.Namespace) -> int:
    raise CommandError(
        "it comes with the course. In a clone of the repository: pip install ./zero_ref_course"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code: 0, 1 where something is missing, 2 for a user's mistake.

    Args:
        argv: the words after `zero-ref`; None for those of this process.
    Returns:
        The exit code; 130 after Ctrl-C.
    Raises:
        SystemExit: the parser printed help, or an error in the arguments (code 2).
    """
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["bench"]:
        complain("zero-ref bench", f"the benchmarks are no part of the package: {WHERE_BENCHMARKS_ARE}")
        return 2
    parser, _ = make_parser()
    arguments = parser.parse_args(words)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for names outside the encoding
    try:
        if problem := unwritable(arguments):
            raise CommandError(problem)
        code = int(arguments.run(arguments))
        sys.stdout.flush()
    except CommandError as error:
        if error.code == 2:
            complain(f"zero-ref {arguments.command}", str(error))
        else:  # all lines of what went wrong on a rank
            lines = "\n".join(map(printable, str(error).split("\n")))
            print(f"zero-ref {arguments.command}: {lines}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        print(f"zero-ref {arguments.command}: interrupted", file=sys.stderr)
        return 130
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
            problem = f"what it printed could not be written: {error.strerror}."
            complain(f"zero-ref {arguments.command}", problem)
        elif not isinstance(error, BrokenPipeError):  # the reader closed the pipe, as in `... | head -3`
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python prints an error at exit
        return 1
    return code
