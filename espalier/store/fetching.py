"""Download of a version into a models folder: resumable, verified while it comes, visible only as a whole.

    models/<name>/.fetch-<version>/   what has come so far; it is renamed to <version> when all of it is verified and on disk
    models/<name>/.fetched-<version>  left beside: the version came from a store, and may be deleted when nobody needs it
    models/<name>/.fetch.lock         held by the process that downloads a version of this model

A large file comes in ranges, a few at a time, and is written and hashed in order, so a part of it on disk is always its beginning. A
download that was cut goes on from there, and hashes what is there again. Knows a store and folders. Does not know what should serve.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import NamedTuple

from espalier.bundle_writer import FILE_MODE, FOLDER_MODE, make_folder
from espalier.durable import flush
from espalier.errors import CacheFull, StoreConflict, StoreDamaged, StoreMissing
from espalier.file_lock import file_lock
from espalier.manifest import FileInfo
from espalier.store.models import MANIFEST, StoredManifest, blob_key, read_manifest
from espalier.store.objects import Objects

RANGE_BYTES, RANGES = 8 << 20, 4
"""Bytes of one range, and ranges that are under way together: their product is the memory that a download takes."""
FETCH, FETCHED, LOCK = ".fetch-", ".fetched-", ".fetch.lock"
SPARE_BYTES = 16 << 20
"""Left free on the disk: a live catalogue's journal beside the versions must be able to grow."""


class BeingFetched(StoreConflict):
    """Another process downloads a version of this model."""


class Progress(NamedTuple):
    """Of one version. came: bytes on disk of all its files; size: of all."""

    came: int
    size: int


def fetch(store: Objects, name: str, version: int, models: Path, on_progress: Callable[[Progress, int], None] = lambda *_: None) -> int:
    """Bring a version into models/<name>/<version>, unless it is there. Returns the bytes that were downloaded.

    on_progress  called with the progress and the bytes that just came; what it raises ends the download, which can be resumed
    Raises BeingFetched, StoreMissing, StoreDamaged, StoreUnavailable, CacheFull, and OSError where the folder cannot be written to.
    """
    folder = models / name
    target, work = folder / str(version), folder / f"{FETCH}{version}"
    if (target / MANIFEST).is_file():
        return 0
    stored = read_manifest(store, name, version)
    if stored is None:
        raise StoreMissing(f"{store.url}: no version {version} of {name!r}")
    make_folder(folder)
    with _locked(folder):
        if (target / MANIFEST).is_file():
            return 0
        if target.exists():
            raise StoreConflict(f"{target}: there without a {MANIFEST}; remove it, so that the version can come from the store")
        work.mkdir(exist_ok=True)
        try:
            came = _fetch_files(store, stored, work, on_progress)
            _finish(stored, work)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            shutil.rmtree(work, ignore_errors=True)  # its room is needed by others
            raise CacheFull(f"{folder}: no room for version {version} of {stored.size} bytes ({error.strerror})") from error
        (folder / f"{FETCHED}{version}").touch(FILE_MODE)
        work.rename(target)
        flush(folder)
    return came


def drop(folder: Path, version: int) -> bool:
    """Delete a version that came from a store. False where it did not, or a download is under way."""
    marker = folder / f"{FETCHED}{version}"
    if not marker.exists():
        return False
    try:
        with _locked(folder):
            hidden = folder / f"{FETCH}{version}"
            shutil.rmtree(hidden, ignore_errors=True)
            if (folder / str(version)).exists():
                (folder / str(version)).rename(hidden)  # never half a version visible
            shutil.rmtree(hidden, ignore_errors=True)
            marker.unlink(missing_ok=True)
    except BeingFetched:
        return False
    return True


def drop_unfinished(folder: Path, keep: set[int]) -> None:
    """Delete what is left of downloads of other versions, unless one is under way."""
    begun = {path for path in folder.glob(f"{FETCH}*") if path.is_dir()} - {folder / f"{FETCH}{version}" for version in keep}
    if begun:
        with suppress(BeingFetched), _locked(folder):
            for path in begun:
                shutil.rmtree(path, ignore_errors=True)


def _fetch_files(store: Objects, stored: StoredManifest, work: Path, on_progress: Callable[[Progress, int], None]) -> int:
    files, downloaded = stored.manifest.files, 0
    for path in work.iterdir():
        if path.name not in files:
            path.unlink()
    try:
        check_room(work.parent, stored.size - _bytes_in(work), f"version {stored.manifest.version}")
    except CacheFull:
        shutil.rmtree(work, ignore_errors=True)
        raise

    def on_bytes(count: int) -> None:
        nonlocal downloaded
        downloaded += count
        on_progress(Progress(_bytes_in(work), stored.size), count)

    for part, info in sorted(files.items()):
        fetch_file(store, blob_key(info.sha256), info, work / part, "Publish the version anew, with --again", on_bytes)
    return downloaded


def check_room(folder: Path, needed: int, content: str) -> None:
    """Raise CacheFull unless so many bytes of some content fit beside what must be able to grow."""
    free = shutil.disk_usage(folder).free
    if needed + SPARE_BYTES > free:
        raise CacheFull(f"{folder}: {content} needs {needed} more bytes, and {SPARE_BYTES} to spare; {free} are free")


def fetch_file(store: Objects, key: str, info: FileInfo, file: Path, remedy: str, on_bytes: Callable[[int], None] = lambda _: None) -> None:
    """Bring an object into a file, whose beginning may be there.

    Raises StoreMissing or StoreDamaged, with the remedy, where the store has no such object, or one of another size or content.
    """
    begin = _size(file)
    if begin <= info.size and _append(store, key, info, file, remedy, on_bytes) == info.sha256:
        return
    file.unlink()
    if begin:  # what was there may be what was damaged
        fetch_file(store, key, info, file, remedy, on_bytes)
        return
    raise StoreDamaged(f"{store.url}/{key}: damaged: its SHA-256 is not the one that a manifest lists. {remedy}")


def _append(store: Objects, key: str, info: FileInfo, file: Path, remedy: str, on_bytes: Callable[[int], None]) -> str:
    """Download what a file lacks. Returns the SHA-256 of the whole."""
    with file.open("a+b") as stream:
        stream.seek(0)
        digest = hashlib.file_digest(stream, "sha256")
        begin = stream.tell()
        if begin < info.size:
            stored = store.head(key)
            if stored is None:
                raise StoreMissing(f"{store.url}/{key}: missing, although a manifest lists it. {remedy}")
            if stored.size != info.size:
                raise StoreDamaged(f"{store.url}/{key}: {stored.size} bytes, the manifest says {info.size}. {remedy}")
        for content in _ranges(store, key, begin, info.size):
            stream.write(content)
            stream.flush()  # what is told to have come is in the file
            digest.update(content)
            on_bytes(len(content))
        os.fchmod(stream.fileno(), FILE_MODE)
        os.fsync(stream.fileno())
    return digest.hexdigest()


def _ranges(store: Objects, key: str, begin: int, end: int) -> Iterator[memoryview]:
    """The bytes from `begin` to `end`, in order."""
    starts = iter(range(begin, end, RANGE_BYTES))
    waiting: deque[Future[memoryview]] = deque()
    while True:
        while len(waiting) < RANGES and (start := next(starts, None)) is not None:
            waiting.append(_begin(store, key, start, min(start + RANGE_BYTES, end)))
        if not waiting:
            return
        yield waiting.popleft().result()


def _begin(store: Objects, key: str, start: int, end: int) -> Future[memoryview]:
    """Read a range in a thread. (Threads of an executor would keep the process from ending while a store is silent.)"""
    future: Future[memoryview] = Future()

    def read() -> None:
        try:
            future.set_result(store.read_range(key, start, end))
        except BaseException as error:  # whoever takes the range raises it
            future.set_exception(error)

    threading.Thread(target=read, name="range", daemon=True).start()
    return future


def _finish(stored: StoredManifest, work: Path) -> None:
    """The manifest beside the files, all of it on disk."""
    file = work / MANIFEST
    file.write_bytes(stored.content)
    file.chmod(FILE_MODE)
    flush(file)
    work.chmod(FOLDER_MODE)
    flush(work)


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0


def _bytes_in(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def _locked(folder: Path) -> AbstractContextManager[None]:
    """Held by the process that downloads a version into a model's folder. Raises BeingFetched."""
    return file_lock(folder / LOCK, BeingFetched(f"{folder.name}: another process downloads a version of it"))
