"""`espalier journal`: upkeep of a model's live catalogue, beside the service that uses it.

Knows arguments and what to print. What is done is in espalier/live/journal_upkeep.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from pydantic import ValidationError

from espalier.bundle import find_versions
from espalier.errors import EspalierError, InvalidInput
from espalier.live.journal import Journal
from espalier.live.journal_file import FILE
from espalier.live.journal_upkeep import backup, compact, erase_user, leave_out, versions_on_disk

from .settings import Settings, refusals


def main(arguments: Sequence[str] | None = None, prog: str = "python -m service.journal") -> int:
    """Do what is asked and print the outcome as JSON. Returns the exit code."""
    given = _parser(prog).parse_args(arguments)
    try:
        models = given.models or Settings().models
        print(json.dumps(_run(given, models)))
    except ValidationError as error:
        print(f"{given.command}: {'; '.join(refusals(error))}", file=sys.stderr)
        return 1
    except (EspalierError, OSError) as error:
        print(f"{given.command}: {error}", file=sys.stderr)
        return 1
    return 0


def _run(given: argparse.Namespace, models: Path) -> dict[str, object]:
    folder = models / given.model
    if not folder.is_dir():
        raise InvalidInput("--model", given.model, f"one of {', '.join(sorted(find_versions(models)))}")
    if not (folder / FILE).exists():
        raise InvalidInput("--model", given.model, f"a model with a {FILE}; nothing was ever put into this one")
    journal = Journal.open(folder / FILE)
    try:
        match given.command:
            case "backup":
                backup(journal, given.to)
                return {"written": str(given.to), "sequence": journal.last_sequence()}
            case "compact":
                before = journal.file.stat().st_size
                found = compact(journal, versions_on_disk(folder), given.keep_from)
                after = journal.file.stat().st_size
                return asdict(found) | {"bytes_before": before, "bytes_after": after}
            case "erase-user":
                return {"items": erase_user(journal, given.user)}
            case _:
                leave_out(journal)
                return {"sequence": journal.last_sequence()}
    finally:
        journal.close()


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=prog, description="Upkeep of a live catalogue. Safe beside a running service.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("backup", "write a copy, one file, which may be put in the journal's place while no service runs"),
        ("compact", "drop operations that later ones of the same items have replaced, old deletes, and places in versions that are gone"),
        ("erase-user", "drop a person's events from all operations; rows that were made of them stay"),
        ("take-over", "leave sequence numbers out, before a copy of a lost host's journal takes writes"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("--models", type=Path, help="folder of the models (ESPALIER_MODELS)")
        command.add_argument("--model", required=True, help="name of the model")
        if name == "backup":
            command.add_argument("--to", type=Path, required=True, help="file to write; it must not be there")
        if name == "compact":
            command.add_argument("--keep-from", type=int, help="keep everything from this sequence on, for hosts that follow")
        if name == "erase-user":
            command.add_argument("--user", required=True, help="the tag that the person's events were put with (`users`)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
