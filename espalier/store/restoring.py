"""Restores a backup of backups.py into a models folder, and the versions that should serve.

For each model: first removed.json, which keeps items out of answers, then serving.json, then the versions, and last the journal, by one
rename. Without the journal the restore can be repeated; with it the restore is complete. `.restored` names the backup and the digest of the
journal that was made of it: while both are the same, a repeated restore leaves the journal in place. No partial file ever has its final
name. Knows folders and stores. Does not know services.
"""

from __future__ import annotations

import shutil
import time
from contextlib import AbstractContextManager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from espalier.bundle import versions_in
from espalier.bundle_writer import FILE_MODE, make_folder
from espalier.durable import flush
from espalier.errors import InvalidInput, StoreConflict, StoreMissing
from espalier.file_lock import file_lock
from espalier.live.journal_file import FILE, locked, log_bytes
from espalier.live.journal_upkeep import put_in_place
from espalier.manifest import FileInfo
from espalier.serving import REMOVED, SERVING, Serving
from espalier.store.backups import LOCK, BackupManifest, backup_key, find_backups, read_backup, time_of
from espalier.store.fetching import check_room, fetch, fetch_file
from espalier.store.models import StoredModel, find_models
from espalier.store.objects import Objects

WORK = ".restore"
"""Folder in a model's folder for the files of an unfinished restore."""
RESTORED = ".restored"
"""File in a model's folder: the backup that its journal came from, and the journal's SHA-256 then."""
JOURNAL_MODE = 0o640


class Restored(NamedTuple):
    """A model's restore. sequence: of the last restored operation; came: versions fetched; missing: versions that no store has."""

    model: str
    backup: str
    sequence: int
    files: list[str]
    came: list[int]
    missing: list[int]


def choose(store: Objects, name: str, at: float | None = None) -> str:
    """The newest backup of a model, or the newest that existed at a time. Raises StoreMissing, or InvalidInput if the time is too early."""
    ids = find_backups(store, name)
    if not ids:
        raise StoreMissing(f"{store.url}: no backup of {name!r}")
    if at is None:
        return ids[-1]
    candidates = [backup_id for backup_id in ids if time_of(backup_id) <= at]
    if not candidates:
        time_text = f"{datetime.fromtimestamp(at, UTC):%Y-%m-%dT%H:%M:%SZ}"
        raise InvalidInput("--at", time_text, f"a time from the oldest backup of {name!r} on, {ids[0].partition('-')[0]}")
    return candidates[-1]


def restore(store: Objects, versions: Objects | None, models: Path, name: str, backup_id: str, replace: bool = False) -> Restored:
    """Restore a backup into models/<name>, and fetch from `versions` those versions that should serve and are missing.

    replace  replace a journal, serving.json or removed.json that exists; what the backup lacks is deleted
    Raises StoreError, JournalError, OSError, and InvalidInput if such a file exists. Repeat it after a failure or a kill: a journal of this
    backup that nothing was written to since stays.
    """
    manifest = read_backup(store, name, backup_id)
    if manifest is None:
        raise StoreMissing(f"{store.url}: backup {backup_id} of {name!r} is gone")
    make_folder(models)
    with host_lock(models):
        folder, work = models / name, models / name / WORK
        make_folder(folder)
        is_restored = not replace and _is_restored(folder, backup_id)
        if not replace:
            _check_free(folder, manifest, is_restored)
        shutil.rmtree(work, ignore_errors=True)
        try:
            work.mkdir(mode=0o700)
            missing_files = {file: info for file, info in manifest.files.items() if file != FILE or not is_restored}
            check_room(folder, sum(info.size for info in missing_files.values()), "the backup")
            for file, info in missing_files.items():
                fetch_file(store, backup_key(name, backup_id, file), info, work / file, "Take an earlier backup (--at)")
            if FILE in missing_files:
                put_in_place(work / FILE, time.time())
                (work / FILE).chmod(JOURNAL_MODE)
            for file in (REMOVED, SERVING):
                if file in manifest.files:
                    (work / file).chmod(FILE_MODE)
                    (work / file).rename(folder / file)
                else:
                    (folder / file).unlink(missing_ok=True)
                flush(folder)
            came, missing = _bring_versions(versions, models, name)
            if not is_restored and (FILE in manifest.files or (folder / FILE).exists()):
                _place_journal(folder, work / FILE if FILE in manifest.files else None, backup_id, replace)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return Restored(name, backup_id, manifest.sequence, sorted(manifest.files), came, missing)


def host_lock(models: Path) -> AbstractContextManager[None]:
    """Keeps services from backing the folder up meanwhile. Raises StoreConflict if one does."""
    return file_lock(
        models / LOCK, StoreConflict(f"{models}: a service with ESPALIER_BACKUP, or another restore, uses it; stop that first")
    )


def _is_restored(folder: Path, backup_id: str) -> bool:
    """Whether the journal is the one that an earlier restore of this backup put there."""
    file, mark = folder / FILE, folder / RESTORED
    if not (file.exists() and mark.exists()) or log_bytes(file):
        return False
    return mark.read_text(errors="replace") == f"{backup_id} {FileInfo.of(file).sha256}"


def _check_free(folder: Path, manifest: BackupManifest, is_restored: bool) -> None:
    """Raise InvalidInput if a restore would replace or delete a file. Files of an earlier restore of this backup are allowed."""
    if (folder / FILE).exists() and not is_restored:
        raise InvalidInput("--models", str(folder / FILE), "no journal there; --replace deletes it, and what was written since")
    for name in (REMOVED, SERVING):
        info, file = manifest.files.get(name), folder / name
        if file.exists() and (info is None or FileInfo.of(file) != info):
            raise InvalidInput("--models", str(file), "no such file, or the one of the backup; --replace replaces or deletes it")


def _bring_versions(store: Objects | None, models: Path, name: str) -> tuple[list[int], list[int]]:
    """Fetch the versions that serving.json names, or else the highest stored one. Returns the fetched and the missing versions."""
    present, file = versions_in(models / name), models / name / SERVING
    stored = () if store is None else find_models(store, name).get(name, StoredModel((), None)).versions
    serving = None
    if file.exists():
        with suppress(ValidationError):  # the service will report the error
            serving = Serving.model_validate_json(file.read_bytes())
    needed = serving.versions if serving is not None else stored[-1:]
    absent = [version for version in needed if version not in present]
    fetched = [version for version in absent if version in stored]
    for version in fetched:
        if store is not None:
            fetch(store, name, version, models)
    return fetched, [version for version in absent if version not in fetched]


def _place_journal(folder: Path, copy: Path | None, backup_id: str, replace: bool) -> None:
    """Replace the journal, or delete it. Deletes the old journal's log first: SQLite would apply it to the new one. Raises InvalidInput."""
    with locked(folder / FILE):
        if (folder / FILE).exists() and not replace:
            raise InvalidInput("--replace", False, f"no {FILE} in {folder}: one has come since the restore began. Does a service run?")
        for ending in ("", "-wal", "-shm", "-journal"):
            with suppress(FileNotFoundError):
                (folder / f"{FILE}{ending}").unlink()
        flush(folder)
        if copy is not None:
            (folder / RESTORED).write_text(f"{backup_id} {FileInfo.of(copy).sha256}")
            copy.rename(folder / FILE)
            flush(folder)
