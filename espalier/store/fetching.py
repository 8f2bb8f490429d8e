"""Download of a version into a models folder: resumable, verified while it comes, visible only as a whole.

    models/<name>/.fetch-<version>/   what has come so far; it is renamed to <version> when all of it is verified and on disk
    models/<name>/.fetched-<version>  left beside: the version came from a store, and may be deleted when nobody needs it
    models/<name>/.fetch.lock         held by the process that downloads a version of this model

A large file comes in ranges, a few at a time, and is written and hashed in order, so a part of it on disk is always its beginning. A
download that was cut goes on from there, and hashes what is there again. Knows a store and folders. Does not know what should serve.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from espalier.bundle_writer import FILE_MODE, FOLDER_MODE, make_folder
from espalier.durable import flush
from espalier.errors import CacheFull, StoreConflict, StoreDamaged, StoreMissing
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
    found = read_manifest(store, name, version)
    if found is None:
        raise StoreMissing(f"{store.url}: no version {version} of {name!r}")
    make_folder(folder)
    with _locked(folder, name):
        if (target / MANIFEST).is_file():
            return 0
        if target.exists():
            raise StoreConflict(f"{target}: there without a {MANIFEST}; remove it, so that the version can come from the store")
        work.mkdir(exist_ok=True)
        try:
            came = _fetch_files(store, found, work, on_progress)
            _finish(found, work)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            shutil.rmtree(work, ignore_errors=True)  # its room is needed by others
            raise CacheFull(f"{folder}: no room for version {version} of {found.size} bytes ({error.strerror})") from error
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
        with _locked(folder, folder.name):
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
    begun = [path for path in folder.glob(f"{FETCH}*") if path.is_dir() and path.name.removeprefix(FETCH) not in {str(v) for v in keep}]
    if not begun:
        return
    try:
        with _locked(folder, folder.name):
            for path in begun:
                shutil.rmtree(path, ignore_errors=True)
    except BeingFetched:
        return


def _fetch_files(store: Objects, found: StoredManifest, work: Path, on_progress: Callable[[Progress, int], None]) -> int:
    files = found.manifest.files
    for path in work.iterdir():
        if path.name not in files:
            path.unlink()
    there = {part: _size(work / part) for part in files}
    needed, free = found.size - sum(there.values()), shutil.disk_usage(work).free
    if needed + SPARE_BYTES > free:
        shutil.rmtree(work, ignore_errors=True)
        raise CacheFull(
            f"{work.parent}: version {found.manifest.version} needs {needed} more bytes, and {SPARE_BYTES} to spare; {free} are free"
        )
    downloaded = 0
    for part, info in sorted(files.items()):

        def on_bytes(count: int, part: str = part) -> None:
            nonlocal downloaded
            downloaded += count
            there[part] = there[part] + count
            on_progress(Progress(sum(there.values()), found.size), count)

        def anew(part: str = part) -> None:
            there[part] = 0

        _fetch_file(store, info, work / part, on_bytes, anew)
    return downloaded


def _fetch_file(store: Objects, info: FileInfo, file: Path, on_bytes: Callable[[int], None], anew: Callable[[], None]) -> None:
    """One file as a whole, whose beginning may be there. Raises StoreDamaged where its content is not that of its digest."""
    if _size(file) > info.size:
        file.unlink()
        anew()
    begin = _size(file)
    if _append(store, info, file, on_bytes) == info.sha256:
        return
    file.unlink()
    anew()
    if begin:  # what was there may be what was damaged
        _fetch_file(store, info, file, on_bytes, anew)
        return
    raise StoreDamaged(f"{store.url}/{blob_key(info.sha256)}: damaged: its SHA-256 is not its name. Publish the version anew, with --again")


def _append(store: Objects, info: FileInfo, file: Path, on_bytes: Callable[[int], None]) -> str:
    """Download what a file lacks. Returns the SHA-256 of the whole."""
    key = blob_key(info.sha256)
    with file.open("a+b") as stream:
        stream.seek(0)
        digest = hashlib.file_digest(stream, "sha256")
        begin = stream.tell()
        if begin < info.size:
            stored = store.head(key)
            if stored is None:
                raise StoreMissing(f"{store.url}/{key}: missing, although a manifest lists it")
            if stored.size != info.size:
                raise StoreDamaged(f"{store.url}/{key}: {stored.size} bytes, the manifest says {info.size}. Publish the version anew")
        for content in ranges(store, key, begin, info.size):
            stream.write(content)
            digest.update(content)
            on_bytes(len(content))
        stream.flush()
        os.fchmod(stream.fileno(), FILE_MODE)
        os.fsync(stream.fileno())
    return digest.hexdigest()


def ranges(store: Objects, key: str, begin: int, end: int) -> Iterator[memoryview]:
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


def _finish(found: StoredManifest, work: Path) -> None:
    """The manifest beside the files, all of it on disk."""
    with (work / MANIFEST).open("wb") as stream:
        stream.write(found.content)
        stream.flush()
        os.fchmod(stream.fileno(), FILE_MODE)
        os.fsync(stream.fileno())
    work.chmod(FOLDER_MODE)
    flush(work)


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0


@contextmanager
def _locked(folder: Path, name: str) -> Iterator[None]:
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BeingFetched(f"{name}: another process downloads a version of it") from error
        yield
    finally:
        os.close(descriptor)
