"""`espalier journal`: upkeep of a model's live catalogue, also while the service uses it, and its backups.

Knows arguments and output. espalier/live/journal_upkeep.py, and backups.py and restoring.py of espalier/store, do the work.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from pydantic import ValidationError

from espalier.bundle import find_versions, is_model_name
from espalier.errors import MISSING, EspalierError, InvalidInput, StoreMissing
from espalier.live.journal import Journal
from espalier.live.journal_file import FILE, log_bytes
from espalier.live.journal_upkeep import backup, compact, erase_user, leave_out, versions_on_disk
from espalier.store.backups import back_up, find_backed_up, forget, prune
from espalier.store.objects import Objects
from espalier.store.restoring import choose, restore

from .settings import Settings, refusals

MAX_SEQUENCE = 2**63 - 1
"""SQLite's highest row number."""


def main(arguments: Sequence[str] | None = None, prog: str = "python -m service.journal") -> int:
    """Run the command and print its outcome as JSON. Returns the exit code."""
    options = _parser(prog).parse_args(arguments)
    try:
        models = options.models or Settings().models
        outcome = _run(options, models)
        print(json.dumps(outcome))
    except ValidationError as error:
        print(f"{options.command}: {'; '.join(refusals(error))}", file=sys.stderr)
        return 1
    except (EspalierError, OSError) as error:
        print(f"{options.command}: {error}", file=sys.stderr)
        return 1
    return 1 if outcome.get("failed") else 0


def _run(options: argparse.Namespace, models: Path) -> dict[str, object]:
    if options.command == "restore":
        return _restore(options, models)
    folder = models / options.model
    if not folder.is_dir():
        raise InvalidInput("--model", options.model, f"one of {', '.join(sorted(find_versions(models)))}")
    if options.command == "backup" and options.to is None:
        return _back_up_model(_store(options, create=True), folder)
    if options.command == "compact" and options.keep_from is not None and not 0 <= options.keep_from <= MAX_SEQUENCE:
        raise InvalidInput("--keep-from", options.keep_from, f"a sequence number from 0 to {MAX_SEQUENCE}")
    if not (folder / FILE).exists():
        raise InvalidInput("--model", options.model, f"a model with a {FILE}; nothing was ever put into this one")
    journal = Journal.open(folder / FILE)
    try:
        match options.command:
            case "backup":
                backup(journal, options.to)
                return {"written": str(options.to), "sequence": journal.last_sequence()}
            case "compact":
                bytes_before = _bytes_of(journal)
                compacted = compact(journal, versions_on_disk(folder), options.keep_from)
                bytes_after = _bytes_of(journal)
                return asdict(compacted) | {"bytes_before": bytes_before, "bytes_after": bytes_after}
            case "erase-user":
                store = None if options.store is None else Objects(options.store, create=True)  # first, so that a wrong URL ends it
                items = erase_user(journal, options.user)
                return {"items": items} if store is None else {"items": items, **_back_up_model(store, folder, replace_all=True)}
            case _:
                leave_out(journal)
                return {"sequence": journal.last_sequence()}
    finally:
        journal.close()


def _bytes_of(journal: Journal) -> int:
    """The size of a journal's file and of its write-ahead log."""
    return log_bytes(journal.file, "") + log_bytes(journal.file)


def _back_up_model(store: Objects, folder: Path, replace_all: bool = False) -> dict[str, object]:
    """Back a model up and delete old backups. replace_all: delete all other backups, and back up even if nothing has changed."""
    backup = back_up(store, folder, force=replace_all, wait=True)
    if backup is None:
        raise InvalidInput("--model", folder.name, f"a model with a {FILE}, a serving.json or a removed.json")
    if replace_all:
        return {"backup": backup.id, "deleted": forget(store, folder.name, backup.id)}
    prune(store, folder.name, Settings().backup_keep)
    return {"backup": backup.id, "written": backup.written}


def _restore(options: argparse.Namespace, models: Path) -> dict[str, object]:
    """Restore one model or all. A model's error is printed and does not keep the others from being restored."""
    if options.model is not None and not is_model_name(options.model):
        raise InvalidInput("--model", options.model, "the name of a model, without a path")
    store, until = _store(options), None if options.at is None else _time(options.at)
    versions = Settings().store if options.versions is None else options.versions
    names = [options.model] if options.model is not None else find_backed_up(store)
    if not names:
        raise StoreMissing(f"{store.url}: no backups")
    backups = [(name, choose(store, name, until)) for name in names]  # all, before anything is written
    source = store if versions is None else Objects(versions)
    restored, failed = [], []
    for name, backup_id in backups:
        try:
            restored.append(restore(store, source, models, name, backup_id, options.replace)._asdict())
        except (EspalierError, OSError) as error:
            failed.append(name)
            print(f"restore: {name}: {error}", file=sys.stderr)
    return {"restored": restored, "failed": failed}


def _store(options: argparse.Namespace, create: bool = False) -> Objects:
    url = options.store or Settings().backup
    if url is None:
        expected = "the URL of a store, or ESPALIER_BACKUP set" + (", or --to" if options.command == "backup" else "")
        raise InvalidInput("--store", MISSING, expected)
    return Objects(url, create=create)


def _time(text: str) -> float:
    with suppress(ValueError, OverflowError):  # outside the years 1 to 9999 of UTC
        time = datetime.fromisoformat(text.upper())
        if time.tzinfo is not None:
            return time.astimezone(UTC).timestamp()
    raise InvalidInput("--at", text, "a time with its offset in the years 1 to 9999 of UTC, as 2027-01-31T12:00:00Z")


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Upkeep of a live catalogue. Backup, compaction and erasure may run beside a service; stop it before the others.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("backup", "write a copy: one file, which may be put in the journal's place, or a backup in a store with removals and the default"),
        ("restore", "bring journals, removals, defaults and versions from a store into a models folder that no service uses"),
        ("compact", "drop operations that later ones of the same items have replaced, old deletes, and places in versions that are gone"),
        ("erase-user", "drop a person's events from all operations; rows that were made of them stay"),
        ("take-over", "skip sequence numbers that a lost host may have used, before this host takes the writes; stop the service first"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("--models", type=Path, help="folder of the models (ESPALIER_MODELS)")
        command.add_argument("--model", required=name != "restore", help="name of the model" + "; none: all" * (name == "restore"))
        if name == "backup":
            target = command.add_mutually_exclusive_group()
            target.add_argument("--to", type=Path, help="file to write; it must not be there")
            target.add_argument("--store", help="URL of the store that keeps backups (ESPALIER_BACKUP)")
        if name == "restore":
            command.add_argument("--store", help="URL of the store that keeps backups (ESPALIER_BACKUP)")
            command.add_argument("--versions", help="URL of the store of versions (ESPALIER_STORE; none: that of the backups)")
            command.add_argument("--at", help="take the last backup until this time, as 2027-01-31T12:00:00Z; none: the newest")
            command.add_argument("--replace", action="store_true", help="also if there is a journal: it is deleted")
        if name == "compact":
            command.add_argument("--keep-from", type=int, help="keep everything from this sequence on, for hosts that follow")
        if name == "erase-user":
            command.add_argument("--user", required=True, help="the tag that the person's events were put with (`users`)")
            command.add_argument("--store", help="URL of a store: back the model up there, and delete all its earlier backups")
    return parser


if __name__ == "__main__":
    sys.exit(main())
