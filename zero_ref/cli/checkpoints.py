"""`zero-ref checkpoints`: the sharded checkpoints in a directory, and whether they are intact."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from zero_ref.cli._common import CommandError, Subparsers
from zero_ref.lab._arguments import printable


def register_checkpoints(subparsers: Subparsers) -> None:
    """Add `zero-ref checkpoints`."""
    parser = subparsers.add_parser(
        "checkpoints",
        help="list the sharded checkpoints in a directory, and verify them",
        description="List what save_sharded has written into a directory, the newest last. Ends with code 1 "
        "if one is damaged, or none is complete. An incomplete one, of an interrupted save, is no damage.",
    )
    parser.add_argument("folder", metavar="FOLDER", help="what was passed to save_sharded")
    parser.add_argument("--verify", action="store_true", help="read every byte, and check the checksums")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run_checkpoints)


def run_checkpoints(arguments: argparse.Namespace) -> int:
    """Print a line for each save; return 1 if one is damaged or none is complete."""
    directory = Path(arguments.folder)
    if not os.path.isdir(directory):  # is_dir() raises for an impossible name
        raise CommandError(f"{directory} is no folder.")
    try:
        saves = listed(directory, verify=arguments.verify)
    except OSError as error:
        raise CommandError(str(error), code=1) from None
    if arguments.json:
        print(json.dumps(saves, indent=2))
    else:
        for save in saves:
            print(printable(_line(save)))
            for problem in save["problems"]:
                print(f"    {printable(problem)}")
        if not saves:
            print(printable(f"{directory} holds no sharded checkpoint."))
    complete = [save for save in saves if save["state"] in ("complete", "verified")]
    return 0 if complete and not any(save["problems"] for save in saves) else 1


def listed(directory: Path, verify: bool = False) -> list[dict[str, Any]]:
    """A description of each save, the newest last.

    Args:
        verify: read the data too, not only the tables.
    """
    from zero_ref.files import saves, shard_files

    found = []
    for save in saves.saves_in(directory):
        entry: dict[str, Any] = {
            "save": save.path.name,
            "began": save.mark.began if save.mark else None,
            "ranks": save.mark.ranks if save.mark else None,
            "nbytes": sum((save.path / name).lstat().st_size for name in save.names),
            "state": "verified" if verify else "complete",
            "notes": None,
            "problems": [],
        }
        if save.mark and save.lacks:
            entry["state"] = f"incomplete: lacks {save.lacks}"
        else:
            try:
                entry["notes"] = shard_files.read_tables(save)[0]["contents"]["notes"]
                entry["problems"] = shard_files.verify(save) if verify else []
            except (saves.DamagedError, KeyError, TypeError) as error:
                entry["problems"] = [str(error)]
            if entry["problems"]:
                entry["state"] = "DAMAGED"
        found.append(entry)
    return found


def _line(save: dict[str, Any]) -> str:
    ranks = f"{save['ranks']} rank{'s' * (save['ranks'] != 1)}" if save["ranks"] else ""
    notes = json.dumps(save["notes"]) if save["notes"] else ""
    notes = notes if len(notes) <= 60 else f"{notes[:59]}…"
    began = save["began"] or ""
    words = f"{save['save']}  {began:<25}  {ranks:>9}  {save['nbytes'] / 1e6:>10,.1f} MB  {save['state']}"
    return f"{words}  {notes}".rstrip()
