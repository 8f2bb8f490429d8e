"""Backups of what only a host has: a model's journal, serving.json and removed.json, in a store.

    backups/<name>/<id>/live.db, serving.json, removed.json   copies; what the model does not have is left out
    backups/<name>/<id>/manifest.json                         their digests, written last: without it there is no backup

An id is <UTC time>-<sequence>-<random>, so ids sort by time. Backups do not lie below models/, which followers of the store list every few
seconds. Unlike blobs, which versions share, their files belong to one backup, so an old one can be deleted.

Knows a model's folder and a store. Does not know schedules (service/models/backups.py) or what puts a backup back (restoring.py).
"""

from __future__ import annotations

import logging
import re
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, StringConstraints, ValidationError

from espalier.bundle import is_model_name
from espalier.errors import StoreConflict, StoreDamaged, first_of
from espalier.file_lock import file_lock
from espalier.live.journal import Journal
from espalier.live.journal_file import FILE, log_bytes
from espalier.live.journal_upkeep import backup
from espalier.manifest import FileInfo
from espalier.serving import REMOVED, SERVING
from espalier.store.fetching import check_room
from espalier.store.models import MANIFEST, MAX_LISTED
from espalier.store.objects import Objects
from espalier.store.publishing import send_file

log = logging.getLogger(__name__)

BACKUPS = "backups"
FILES = (REMOVED, SERVING, FILE)
WORK, LOCK = ".backup", ".backup.lock"
"""In a model's folder: copies that are being sent, and the lock of the process that makes them."""
KEEP, KEEP_DAYS = 24, 7
"""Newest backups that stay, and days whose last backup stays."""
UNFINISHED_S = 86_400
"""Files without a manifest are deleted when they are so old: their process was killed."""
MAX_MANIFEST_BYTES = 1 << 16
_TIME = "%Y%m%dT%H%M%S.%fZ"
_ID = re.compile(r"\d{8}T\d{6}\.\d{6}Z-\d{1,19}-[0-9a-f]{8}")


class BackupManifest(BaseModel):
    """What a backup holds.

    journal    identity of the journal; None where there is none
    sequence   it holds every operation up to this one
    erasures   of persons' events in that journal, until then
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    schema_version: Literal[1]
    model: str
    journal: str | None
    sequence: int
    erasures: int
    files: dict[Annotated[str, StringConstraints(pattern=r"^(live\.db|serving\.json|removed\.json)$")], FileInfo]


class Backup(NamedTuple):
    """A backup in a store. written: it was made now; else nothing had changed since it was made."""

    id: str
    written: bool

    @property
    def at(self) -> float:
        """When it was made, in Unix seconds."""
        return time_of(self.id)


class BeingBackedUp(StoreConflict):
    """Another process backs the model up."""


def time_of(backup_id: str) -> float:
    return datetime.strptime(backup_id.partition("-")[0], _TIME).replace(tzinfo=UTC).timestamp()


def find_backups(store: Objects, name: str) -> list[str]:
    """The ids of a model's backups, oldest first."""
    return [found for found, keys in _listed(store, name).items() if backup_key(name, found, MANIFEST) in keys]


def find_backed_up(store: Objects) -> list[str]:
    """The models that have backups."""
    names = set()
    for found in store.list(BACKUPS, MAX_LISTED):
        match PurePosixPath(found.key).parts[1:]:
            case (name, backup_id, file) if file == MANIFEST and is_model_name(name) and _ID.fullmatch(backup_id):
                names.add(name)
    return sorted(names)


def read_backup(store: Objects, name: str, backup_id: str) -> BackupManifest | None:
    """What a backup holds; None where it is gone. Raises StoreDamaged."""
    key = backup_key(name, backup_id, MANIFEST)
    found = store.read(key, MAX_MANIFEST_BYTES)
    if found is None:
        return None
    try:
        manifest = BackupManifest.model_validate_json(found.content)
    except ValidationError as error:
        raise StoreDamaged(f"{store.url}/{key}: {first_of(error)}") from error
    if manifest.model != name:
        raise StoreDamaged(f"{store.url}/{key}: model: got {manifest.model!r:.100}, expected {name!r}")
    return manifest


def models_with_state(models: Path) -> list[str]:
    """The models of a folder that have something to back up."""
    names = sorted(folder.name for folder in models.iterdir() if is_model_name(folder.name)) if models.is_dir() else []
    return [name for name in names if any((models / name / file).is_file() for file in FILES)]


def back_up(
    store: Objects, folder: Path, force: bool = False, wait: bool = False, on_bytes: Callable[[int], None] = lambda _: None
) -> Backup | None:
    """Copy a model's journal, serving.json and removed.json into a store. None where there is none of them.

    force     also where the newest backup holds the same
    wait      for another process that backs the model up; else raise BeingBackedUp
    on_bytes  called with the bytes that are sent; what it raises ends the backup, which nobody then sees
    Raises StoreError, JournalError, CacheFull where the disk has no room for a copy of the journal, and OSError.
    """
    with file_lock(folder / LOCK, None if wait else BeingBackedUp(f"{folder.name}: another process backs it up")):
        work = folder / WORK
        shutil.rmtree(work, ignore_errors=True)  # of a process that was killed
        try:
            work.mkdir(mode=0o700)
            return _back_up(store, folder, work, force, on_bytes)
        finally:
            shutil.rmtree(work, ignore_errors=True)


def _back_up(store: Objects, folder: Path, work: Path, force: bool, on_bytes: Callable[[int], None]) -> Backup | None:
    name, live = folder.name, Journal(folder / FILE, "read")
    try:
        state = live.identity(), live.last_sequence(), live.erasures()  # first: what comes meanwhile is in the copy, too
        files = _copied(folder, work)
        if not files and state[0] is None:
            return None
        newest = None if force else _newest(store, name)
        if newest is not None and _is_held(newest[1], state, files):
            return Backup(newest[0], written=False)
        if state[0] is not None:
            check_room(folder, log_bytes(folder / FILE, "") + log_bytes(folder / FILE), f"a copy of {FILE}")
            backup(live, work / FILE)
    finally:
        live.close()
    backup_id = f"{_time_after(find_backups(store, name)):{_TIME}}-{state[1]}-{secrets.token_hex(4)}"
    sent = {file: FileInfo.of(work / file) for file in FILES if (work / file).exists()}
    for file, info in sent.items():
        send_file(store, backup_key(name, backup_id, file), work / file, info, on_bytes)
    manifest = BackupManifest(schema_version=1, model=name, journal=state[0], sequence=state[1], erasures=state[2], files=sent)
    store.create(backup_key(name, backup_id, MANIFEST), manifest.model_dump_json().encode())
    return Backup(backup_id, written=True)


def _time_after(ids: list[str]) -> datetime:
    """The time of another backup: now, but after those that there are, of which a clock that was ahead may have made some."""
    now = datetime.now(UTC)
    if not ids or time_of(ids[-1]) < now.timestamp():
        return now
    log.warning(
        "the newest backup, %s, is of a time to come: a clock was ahead, or is behind. The next one is named to be after it", ids[-1]
    )
    return datetime.fromtimestamp(time_of(ids[-1]), UTC) + timedelta(microseconds=1)


def prune(store: Objects, name: str, keep: int = KEEP) -> None:
    """Delete a model's old backups: all but the newest `keep`, and the last of each of the newest KEEP_DAYS days that have one."""
    ids = find_backups(store, name)
    of_day = {found[:8]: found for found in ids}  # the last one wins
    _delete(store, name, {*ids[-keep:], *[*of_day.values()][-KEEP_DAYS:]})


def forget(store: Objects, name: str, but: str) -> list[str]:
    """Delete all backups of a model but one, and files without a manifest. Returns the ids of the former."""
    ids = [found for found in find_backups(store, name) if found != but]
    _delete(store, name, {but}, unfinished_s=0)
    return ids


def _delete(store: Objects, name: str, kept: set[str], unfinished_s: float = UNFINISHED_S) -> None:
    for found, keys in _listed(store, name).items():
        manifest = backup_key(name, found, MANIFEST)
        if found in kept or (manifest not in keys and time.time() - time_of(found) < unfinished_s):
            continue
        for key in sorted(keys, key=lambda key: key != manifest):  # the manifest first: nobody sees half a backup
            store.delete(key)


def _listed(store: Objects, name: str) -> dict[str, list[str]]:
    """The keys of each backup of a model by id, oldest first; also of those without a manifest."""
    found: dict[str, list[str]] = {}
    for key in sorted(stored.key for stored in store.list(f"{BACKUPS}/{name}", MAX_LISTED)):
        parts = PurePosixPath(key).parts
        if len(parts) == 4 and _ID.fullmatch(parts[2]):
            found.setdefault(parts[2], []).append(key)
    return found


def _newest(store: Objects, name: str) -> tuple[str, BackupManifest] | None:
    """The newest backup, unless it is damaged: then another one is due."""
    ids = find_backups(store, name)
    try:
        manifest = read_backup(store, name, ids[-1]) if ids else None
    except StoreDamaged:
        return None
    return None if manifest is None else (ids[-1], manifest)


def _is_held(newest: BackupManifest, state: tuple[str | None, int, int], files: Mapping[str, FileInfo]) -> bool:
    """Whether a backup holds what there is. files: serving.json and removed.json."""
    others = {name: info for name, info in newest.files.items() if name != FILE}
    return (newest.journal, newest.sequence, newest.erasures) == state and others == files


def _copied(folder: Path, work: Path) -> dict[str, FileInfo]:
    """Copy removed.json and serving.json, which are replaced and never written into."""
    copies = {}
    for name in (REMOVED, SERVING):
        with suppress(FileNotFoundError):
            shutil.copyfile(folder / name, work / name)
            copies[name] = FileInfo.of(work / name)
    return copies


def backup_key(name: str, backup_id: str, file: str) -> str:
    return f"{BACKUPS}/{name}/{backup_id}/{file}"
