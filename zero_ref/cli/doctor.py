"""`zero-ref doctor` runs a sharded optimizer on real ranks and compares it with the plain loop."""

from __future__ import annotations

import argparse
from typing import Any

from zero_ref.cli._common import CommandError, Subparsers, need, write_text
from zero_ref.lab._arguments import OutputFile, json_text, printable, rank_processes, seed, whole


def register_doctor(subparsers: Subparsers) -> None:
    """Add `zero-ref doctor`."""
    parser = subparsers.add_parser(
        "doctor",
        help="compare a sharded optimizer of your own with the plain loop, on real ranks",
        usage="zero-ref doctor FILE.py:FACTORY (--reference NAME | --from-plain CLASS) [option ...]\n"
        "       zero-ref doctor --class FILE.py:NAME [--ranks N ...] [--timeout SECONDS] [--json]",
        description="Run a factory's optimizer on real ranks, and compare it with the plain loop: one "
        "process with the data of all ranks. Say the first step, phase, parameter, rank and elements that "
        "depart, and what can be read off the numbers. Ends with code 0 if nothing departs, 1 if something "
        "departs or the program raises or hangs, 2 if nothing could be tried or an argument is wrong. The "
        "file is run with your rights.",
        epilog="Trials: plain, accumulation, clipping, scheduler, group added, frozen layer, save and load, "
        "another world size, unused parameters, unused on a rank, mixed dtypes, tied weights, zero_grad, "
        "NaN step, exception, buffers, different starts, average of weights, accumulation and clipping, "
        "scheduler and load, group and load, group and scheduler, frozen and load, all together. A name of "
        "several words needs quotation marks. FILE.py:FACTORY comes first. book/doctor.md says what each "
        "trial does.",
    )
    examined = parser.add_mutually_exclusive_group(required=True)
    examined.add_argument(
        "factory", metavar="FILE.py:FACTORY", nargs="?", help="a function that takes a model, and returns "
        "the optimizer, (optimizer, wrapper), or a doctor.Program"
    )  # fmt: skip
    examined.add_argument(
        "--class", dest="interface", metavar="FILE.py:NAME", help="check a sharded optimizer, a DDP or an "
        "FSDP by its interface alone: NAME(params, optimizer_class, **options), NAME(module), or "
        "NAME(module, compute_dtype=None)",
    )  # fmt: skip
    parser.add_argument(
        "--ranks", type=rank_processes, nargs="+", default=[2, 3, 4], metavar="N",
        help="numbers of ranks; every trial is played on each (default: 2 3 4)",
    )  # fmt: skip
    parser.add_argument(
        "--steps", type=whole(3, 1000), default=5, metavar="N",
        help="steps of each trial, 3 or more (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--seed", type=seed, default=0, metavar="N",
        help="of the model's values and the data (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--backend", choices=["gloo", "nccl"], default="gloo",
        help="of the process groups (default: %(default)s)",
    )  # fmt: skip
    plain = parser.add_mutually_exclusive_group()
    plain.add_argument(
        "--reference", metavar="NAME", help="a factory in the same file that gives the plain optimizer"
    )
    plain.add_argument(
        "--from-plain", metavar="CLASS", help="the plain optimizer's class, such as torch.optim.AdamW"
    )
    parser.add_argument(
        "--options",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="for the class of --from-plain, such as lr=0.05",
    )
    parser.add_argument("--without", nargs="+", default=[], metavar="TRIAL", help="leave out these trials")
    parser.add_argument("--only", nargs="+", metavar="TRIAL", help="try only these trials")
    parser.add_argument(
        "--strict", action="store_true", help="end with code 1 also if the program refuses a trial"
    )
    parser.add_argument(
        "--masters", action="store_true", help="the plain optimizer steps 32-bit copies of 16-bit parameters"
    )
    parser.add_argument(
        "--gradients", choices=["bfloat16", "float16"],
        help="the dtype in which gradients are meant to be computed or sent: rounding to it is right then",
    )  # fmt: skip
    parser.add_argument(
        "--accumulation", choices=["sum", "mean"],
        help="of the gradients of micro-batches (default: either, but the same in all trials)",
    )  # fmt: skip
    parser.add_argument(
        "--timeout",
        type=whole(1, 86400),
        default=30,
        metavar="SECONDS",
        help="for each trial (default: %(default)s)",
    )
    parser.add_argument(
        "--fresh", action="store_true",
        help="start new processes for each trial, for a library that keeps process groups",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--markdown", type=OutputFile, metavar="FILE", help="write the report as Markdown")
    parser.add_argument("--junit", type=OutputFile, metavar="FILE", help="write the report as JUnit's XML")
    parser.set_defaults(run=run_doctor)


def run_doctor(arguments: argparse.Namespace) -> int:
    """Examine the program; return 1 if it departs from the plain loop."""
    doctor, files = need("zero_ref.doctor", code=2), need("zero_ref.doctor.files", code=2)
    if arguments.interface is not None:
        return run_class(arguments, files)
    if not (arguments.reference or arguments.from_plain):
        raise CommandError("give --reference NAME or --from-plain CLASS: one of them is the plain loop.")
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
    if arguments.markdown:
        write_text("--markdown", arguments.markdown, report.to_markdown())
    if arguments.junit:
        write_text("--junit", arguments.junit, report.to_junit())
    if not report.tried:
        raise CommandError("nothing could be tried: the report says why.")
    if report.healthy and arguments.strict and report.refused:
        raise CommandError(report.refusals, code=1)
    return 0 if report.healthy else 1


def run_class(arguments: argparse.Namespace, files: Any) -> int:
    """Check a class by its interface; return 1 if a check fails."""
    interface, found = need("zero_ref.doctor.interface", code=2), []
    try:
        target = files.InFile.of(arguments.interface)
        for one in interface.check_class(target, arguments.ranks, arguments.timeout):
            found.append(one)
            if not arguments.json:
                lines = printable(one.text).splitlines() or [""]
                print(f"{'holds' if one.holds else 'FAILED':<7} {one.check:<14} {lines[0]}", flush=True)
                print(*(f"        {line}" for line in lines[1:]), sep="\n", end="\n" if lines[1:] else "")
    except (OSError, ValueError, TypeError) as error:
        raise CommandError(printable(str(error))) from None
    if arguments.json:
        print(json_text({"checks": [one._asdict() for one in found]}))
    return 0 if all(one.holds for one in found) else 1


def plain_loop(arguments: argparse.Namespace, factory: Any, files: Any) -> dict[str, Any]:
    """Return the arguments of `diagnose` that describe the plain loop.

    Raises:
        ValueError: options are given without a class.
    """
    if arguments.reference:
        if arguments.options:
            raise ValueError("--options belong to --from-plain; a reference has its own.")
        return {"reference": files.InFile(factory.path, arguments.reference).loaded()}
    options = files.options_from(arguments.options)
    return {"from_plain": files.imported(arguments.from_plain), "options": options}


def settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The other arguments of `diagnose`."""
    names = ("steps", "seed", "backend", "without", "only", "masters", "accumulation", "timeout", "fresh")
    dtype = arguments.gradients and getattr(need("torch", code=2), arguments.gradients)
    same = {name: getattr(arguments, name) for name in names}
    return same | {"ranks": tuple(arguments.ranks), "gradients": dtype}
