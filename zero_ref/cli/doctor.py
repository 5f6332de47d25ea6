"""`zero-ref doctor`: somebody's sharded optimizer on real ranks, held against the plain loop."""

from __future__ import annotations

import argparse
from typing import Any

from zero_ref.cli._common import CommandError, Subparsers, need, write_text
from zero_ref.lab._arguments import OutputFile, printable, rank_processes, seed, whole


def register_doctor(subparsers: Subparsers) -> None:
    """Add `zero-ref doctor`."""
    parser = subparsers.add_parser(
        "doctor",
        help="hold a sharded optimizer of your own against the plain loop, on real ranks",
        description="Run a factory's optimizer on real ranks, and say the first step, parameter, rank and "
        "range that departs from the plain loop, and the likely cause. Ends with code 0 if nothing departs, "
        "1 if something does, 2 if it could not be tried. The file is run with your rights.",
    )
    parser.add_argument(
        "factory", metavar="FILE.py:FACTORY", help="a function that takes a model, and returns the "
        "optimizer, (optimizer, wrapper), or a doctor.Program"
    )  # fmt: skip
    parser.add_argument("--ranks", type=rank_processes, nargs="+", default=[2, 3], metavar="N")
    parser.add_argument("--steps", type=whole(3, 1000), default=5, metavar="N", help="default: %(default)s")
    parser.add_argument("--seed", type=seed, default=0, metavar="N", help="of values and data")
    parser.add_argument("--backend", choices=["gloo", "nccl"], default="gloo", help="default: %(default)s")
    plain = parser.add_mutually_exclusive_group()
    plain.add_argument("--reference", metavar="NAME", help="the plain optimizer's factory, in the same file")
    plain.add_argument("--from-plain", metavar="CLASS", help="the plain optimizer, such as torch.optim.AdamW")
    parser.add_argument("--options", nargs="+", default=[], metavar="NAME=VALUE", help="of --from-plain")
    parser.add_argument("--without", nargs="+", default=[], metavar="TRIAL", help="leave these out")
    parser.add_argument("--only", nargs="+", metavar="TRIAL", help="try these alone")
    parser.add_argument("--masters", action="store_true", help="16-bit parameters have 32-bit masters")
    parser.add_argument("--timeout", type=whole(1, 86400), default=30, metavar="SECONDS", help="of a trial")
    parser.add_argument(
        "--fresh", action="store_true",
        help="start new processes for each trial, for a library that keeps process groups",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--junit", type=OutputFile, metavar="FILE", help="write JUnit's XML")
    parser.add_argument(
        "--picture", type=OutputFile, metavar="FILE.svg", help="draw where the first trial departs"
    )
    parser.set_defaults(run=run_doctor)


def run_doctor(arguments: argparse.Namespace) -> int:
    """Examine the program; return 1 if it departs from the plain loop."""
    doctor, files = need("zero_ref.doctor"), need("zero_ref.doctor.files")
    try:
        factory = files.InFile.of(arguments.factory)
        factory.loaded()
        report = doctor.diagnose(factory, **plain_loop(arguments, factory, files), **settings(arguments))
    except (OSError, ValueError, TypeError) as error:
        raise CommandError(printable(str(error))) from None
    except Exception as error:
        raise CommandError(printable(f"{type(error).__name__}: {error}")) from None
    if arguments.json:
        print(report.to_json())
    else:
        print("\n".join(map(printable, str(report).split("\n"))))
    if arguments.junit:
        write_text("--junit", arguments.junit, report.to_junit())
    if arguments.picture and report.departures:
        write_text("--picture", arguments.picture, report.departures[0].picture().svg())
    if not report.tried:
        raise CommandError("nothing could be tried: the report says why.")
    return 0 if report.healthy else 1


def plain_loop(arguments: argparse.Namespace, factory: Any, files: Any) -> dict[str, Any]:
    """What `diagnose` is told of the plain loop.

    Raises:
        ValueError: nothing says what it is, or options are given without a class.
    """
    if arguments.reference:
        if arguments.options:
            raise ValueError("--options belong to --from-plain; a reference has its own.")
        return {"reference": files.InFile(factory.path, arguments.reference).loaded()}
    if not arguments.from_plain:
        raise ValueError("say what the plain loop is: --from-plain torch.optim.AdamW, or --reference NAME.")
    options = files.options_from(arguments.options)
    return {"from_plain": files.imported(arguments.from_plain), "options": options}


def settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The other arguments of `diagnose`."""
    names = ("steps", "seed", "backend", "without", "only", "masters", "timeout", "fresh")
    return {name: getattr(arguments, name) for name in names} | {"ranks": tuple(arguments.ranks)}
