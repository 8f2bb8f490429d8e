"""Backups in a store of the files that exist only on one host: a model's journal, serving.json and removed.json.

    backups/<name>/<id>/live.db, serving.json, removed.json   copies; files that the model lacks are left out
    backups/<name>/<id>/manifest.json                         their digests, written last: without it there is no backup

An id is <UTC time>-<sequence>-<random>, so ids sort by time. Backups do not lie below models/, which followers of the store list every few
seconds. Unlike blobs, which versions share, their files belong to one backup, so an old one can be deleted.

Knows a model's folder and a store. Does not know schedules (service/models/backups.py) or restores (restoring.py).
"""

from __future__ import annotations

import logging
import re
import secrets
import shutil
import time
from collections.abc import Callable
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
from espalier.serving import FORMER, REMOVED, SERVING, Former, Serving, as_file
from espalier.store.fetching import check_room
from espalier.store.models import MANIFEST, MAX_LISTED
from espalier.store.objects import UNFINISHED_S, Objects
from espalier.store.publishing import send_file

log = logging.getLogger(__name__)

BACKUPS = "backups"
FILES = (REMOVED, SERVING, FILE)
WORK, LOCK = ".backup", ".backup.lock"
"""In a model's folder: the copies that are being uploaded, and the lock of the process that makes them."""
KEEP, KEEP_DAYS = 24, 7
"""Number of newest backups that are kept, and of days whose last backup is kept."""
MAX_MANIFEST_BYTES = 1 << 16
_TIME = "%Y%m%dT%H%M%S.%fZ"
_ID = re.compile(r"\d{8}T\d{6}\.\d{6}Z-\d{1,19}-[0-9a-f]{8}")


class BackupManifest(BaseModel):
    """The manifest of a backup.

    journal    identity of the journal; None if there is none
    sequence   of the last operation in the backup
    erasures   number of erasures of persons' events in the journal, up to then
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    schema_version: Literal[1]
    model: str
    journal: str | None
    sequence: int
    erasures: int
    files: dict[Annotated[str, StringConstraints(pattern=r"^(live\.db|serving\.json|removed\.json)$")], FileInfo]


class Backup(NamedTuple):
    """A backup in a store. written: this call made it; False: nothing has changed since it was made."""

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


def made_at(store: Objects, name: str, backup_id: str) -> float:
    """When a backup was made, in Unix seconds: by its id, or by the store's clock if the clock that named it was ahead."""
    stored = store.head(backup_key(name, backup_id, MANIFEST))
    return min(time_of(backup_id), stored.modified.timestamp()) if stored is not None else time_of(backup_id)


def find_backups(store: Objects, name: str) -> list[str]:
    """The ids of a model's backups, oldest first."""
    return [backup_id for backup_id, keys in _keys_by_backup(store, name).items() if backup_key(name, backup_id, MANIFEST) in keys]


def find_backed_up(store: Objects) -> list[str]:
    """The models that have backups."""
    names = set()
    for stored in store.list(BACKUPS, MAX_LISTED):
        match PurePosixPath(stored.key).parts[1:]:
            case (name, backup_id, file) if file == MANIFEST and is_model_name(name) and _ID.fullmatch(backup_id):
                names.add(name)
    return sorted(names)


def read_backup(store: Objects, name: str, backup_id: str) -> BackupManifest | None:
    """The manifest of a backup; None if the backup is gone. Raises StoreDamaged."""
    key = backup_key(name, backup_id, MANIFEST)
    stored = store.read(key, MAX_MANIFEST_BYTES)
    if stored is None:
        return None
    try:
        manifest = BackupManifest.model_validate_json(stored.content)
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
    """Copy a model's journal, serving.json and removed.json into a store. None if the model has none of them.

    force     make a backup even if the newest one holds the same
    wait      wait for another process that backs the model up; False: raise BeingBackedUp
    on_bytes  called with the bytes of each step; if it raises, the backup ends and never becomes visible
    Raises StoreError, JournalError, CacheFull if the disk has no room for a copy of the journal, and OSError.
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
        # The journal's state is read before its copy is made: the copy may have later operations, never fewer.
        journal, sequence, erasures = live.identity(), live.last_sequence(), live.erasures()
        copies = _copied(folder, work)
        draft = BackupManifest(schema_version=1, model=name, journal=journal, sequence=sequence, erasures=erasures, files=copies)
        if not copies and journal is None:
            return None
        ids = [] if force else find_backups(store, name)[-1:]
        if ids and _is_held(store, ids[0], draft):
            return Backup(ids[0], written=False)
        if journal is not None:
            check_room(folder, log_bytes(folder / FILE, "") + log_bytes(folder / FILE), f"a copy of {FILE}")
            backup(live, work / FILE)
    finally:
        live.close()
    backup_id = f"{_time_after(find_backups(store, name)):{_TIME}}-{sequence}-{secrets.token_hex(4)}"
    files = {file: FileInfo.of(work / file) for file in FILES if (work / file).exists()}
    for file, info in files.items():
        send_file(store, backup_key(name, backup_id, file), work / file, info, on_bytes)
    manifest = draft.model_copy(update={"files": files})
    store.create(backup_key(name, backup_id, MANIFEST), manifest.model_dump_json().encode())
    return Backup(backup_id, written=True)


def _time_after(ids: list[str]) -> datetime:
    """The time of the next backup: now, or just after the newest backup, if a clock that was ahead made that."""
    now = datetime.now(UTC)
    if not ids or time_of(ids[-1]) < now.timestamp():
        return now
    log.warning(
        "the newest backup, %s, is of a time to come: a clock was ahead, or is behind. The next one is named to be after it", ids[-1]
    )
    return datetime.fromtimestamp(time_of(ids[-1]), UTC) + timedelta(microseconds=1)


def prune(store: Objects, name: str, keep: int = KEEP) -> None:
    """Delete a model's old backups. Keeps the newest `keep`, and the last one of each of the newest KEEP_DAYS days with backups."""
    ids = find_backups(store, name)
    last_of_day = {backup_id[:8]: backup_id for backup_id in ids}  # the last one wins
    _delete(store, name, {*ids[-keep:], *[*last_of_day.values()][-KEEP_DAYS:]})


def forget(store: Objects, name: str, but: str) -> list[str]:
    """Delete all backups of a model but one, and files without a manifest. Returns the ids of the deleted backups."""
    ids = [backup_id for backup_id in find_backups(store, name) if backup_id != but]
    _delete(store, name, {but}, unfinished_s=0)
    return ids


def _delete(store: Objects, name: str, kept_ids: set[str], unfinished_s: float = UNFINISHED_S) -> None:
    """Delete all backups but some, and files without a manifest that are `unfinished_s` old."""
    store.delete_partial(f"{BACKUPS}/{name}", unfinished_s)
    for backup_id, keys in _keys_by_backup(store, name).items():
        manifest = backup_key(name, backup_id, MANIFEST)
        if backup_id in kept_ids or (manifest not in keys and time.time() - time_of(backup_id) < unfinished_s):
            continue
        for key in sorted(keys, key=lambda key: key != manifest):  # the manifest first: nobody sees half a backup
            store.delete(key)


def _keys_by_backup(store: Objects, name: str) -> dict[str, list[str]]:
    """The keys of each backup of a model by id, oldest first, including backups without a manifest."""
    keys_of_backup: dict[str, list[str]] = {}
    for key in sorted(stored.key for stored in store.list(f"{BACKUPS}/{name}", MAX_LISTED)):
        names = PurePosixPath(key).parts
        if len(names) == 4 and _ID.fullmatch(names[2]):
            keys_of_backup.setdefault(names[2], []).append(key)
    return keys_of_backup


def _is_held(store: Objects, backup_id: str, draft: BackupManifest) -> bool:
    """Whether a backup holds the present state: a manifest without the journal's file. A damaged backup holds nothing."""
    try:
        manifest = read_backup(store, draft.model, backup_id)
    except StoreDamaged:
        return False
    if manifest is None:
        return False
    return manifest.model_copy(update={"files": {name: info for name, info in manifest.files.items() if name != FILE}}) == draft


def _copied(folder: Path, work: Path) -> dict[str, FileInfo]:
    """Copy removed.json and serving.json. Writers replace these files as a whole, so a copy is consistent."""
    for name, content in ((REMOVED, _content(folder / REMOVED)), (SERVING, _serving(folder))):
        if content is not None:
            (work / name).write_bytes(content)
    return {name: FileInfo.of(work / name) for name in (REMOVED, SERVING) if (work / name).exists()}


def _serving(folder: Path) -> bytes | None:
    """The content of serving.json, if there is one. While a change of versions is under way, which may be taken back: that before it."""
    while True:
        before, now = _content(folder / FORMER), _content(folder / SERVING)
        if before == _content(folder / FORMER):  # else a change has begun or ended meanwhile
            break
    if before is not None and now is not None:
        with suppress(ValidationError):  # one of the files was written by hand
            former = Former.model_validate_json(before)
            if Serving.model_validate_json(now).generation == former.generation:
                return None if former.serving is None else as_file(former.serving).encode()
    return now


def _content(file: Path) -> bytes | None:
    try:
        return file.read_bytes()
    except FileNotFoundError:
        return None


def backup_key(name: str, backup_id: str, file: str) -> str:
    return f"{BACKUPS}/{name}/{backup_id}/{file}"
