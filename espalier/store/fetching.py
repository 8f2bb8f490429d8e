"""Download of a version into a models folder: resumable, verified while it is written, visible only as a whole.

    models/<name>/.fetch-<version>/   an unfinished download; renamed to <version> when all files are verified and on disk
    models/<name>/.fetched-<version>  marks a version that came from a store: it may be deleted when nobody needs it
    models/<name>/.fetch.lock         held by the process that downloads a version of this model

A large file is downloaded in ranges, a few at a time, and is written and hashed in order. So a partial file is always the beginning of the
file: a later download hashes it again and continues from there. Knows a store and folders. Does not know which versions should serve.
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
"""Bytes of one range, and ranges that are downloaded at once. Their product is the memory of a download."""
FETCH, FETCHED, LOCK = ".fetch-", ".fetched-", ".fetch.lock"
SPARE_BYTES = 16 << 20
"""Free space that a download leaves on the disk: the journal of a live catalogue must be able to grow."""


class BeingFetched(StoreConflict):
    """Another process downloads a version of this model."""


class Progress(NamedTuple):
    """The download of one version. bytes_on_disk: so far; size: bytes of all its files."""

    bytes_on_disk: int
    size: int


def fetch(store: Objects, name: str, version: int, models: Path, on_progress: Callable[[Progress, int], None] = lambda *_: None) -> int:
    """Download a version to models/<name>/<version>, unless it is there. Returns the number of bytes downloaded.

    A version that came from a store with another manifest is replaced. Processes that have opened its files keep them.

    on_progress  called with the progress and the bytes of each step; if it raises, the download ends and can be resumed
    Raises BeingFetched, StoreMissing, StoreDamaged, StoreUnavailable, CacheFull, StoreConflict if another version is there that did not
    come from a store, and OSError if the folder cannot be written to.
    """
    folder = models / name
    target, work, replaced = folder / str(version), folder / f"{FETCH}{version}", folder / f"{FETCH}{version}.replaced"
    stored = read_manifest(store, name, version)
    if stored is None:
        raise StoreMissing(f"{store.url}: no version {version} of {name!r}")
    if holds(target, stored):
        return 0
    make_folder(folder)
    with _locked(folder):
        if holds(target, stored):
            return 0
        if target.exists() and not (folder / f"{FETCHED}{version}").exists():
            difference = "with another content than the store's" if (target / MANIFEST).is_file() else f"without a {MANIFEST}"
            raise StoreConflict(f"{target}: there {difference}; remove it, so that the version can come from the store")
        work.mkdir(exist_ok=True)
        try:
            downloaded = _fetch_files(store, stored, work, on_progress)
            _finish(stored, work)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            shutil.rmtree(work, ignore_errors=True)  # others need its room
            raise CacheFull(f"{folder}: no room for version {version} of {stored.size} bytes ({error.strerror})") from error
        (folder / f"{FETCHED}{version}").touch(FILE_MODE)
        if target.exists():
            shutil.rmtree(replaced, ignore_errors=True)  # of a process that was killed
            target.rename(replaced)
        try:
            work.rename(target)
        except OSError:
            replaced.rename(target)
            raise
        flush(folder)
        shutil.rmtree(replaced, ignore_errors=True)
    return downloaded


def put_back(models: Path) -> None:
    """Put back versions that a process was about to replace when it was killed."""
    for replaced in models.glob(f"*/{FETCH}*.replaced"):
        target = replaced.with_name(replaced.name.removeprefix(FETCH).removesuffix(".replaced"))
        with suppress(BeingFetched, OSError), _locked(replaced.parent):
            if not target.exists():
                replaced.rename(target)


def holds(folder: Path, stored: StoredManifest) -> bool:
    """Whether a version's folder has the version that a store has, by its manifest."""
    file = folder / MANIFEST
    return file.is_file() and file.read_bytes() == stored.content


def drop(folder: Path, version: int) -> bool:
    """Delete a version that came from a store. False if it did not, or if a download of the model is running."""
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
    """Delete unfinished downloads of all versions but `keep`, unless a download is running."""
    unfinished = {path for path in folder.glob(f"{FETCH}*") if path.is_dir()} - {folder / f"{FETCH}{version}" for version in keep}
    if unfinished:
        with suppress(BeingFetched), _locked(folder):
            for path in unfinished:
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

    for file_name, info in sorted(files.items()):
        fetch_file(store, blob_key(info.sha256), info, work / file_name, "Publish the version anew, with --again", on_bytes)
    return downloaded


def check_room(folder: Path, needed: int, content: str) -> None:
    """Raise CacheFull unless `needed` more bytes fit on the disk with SPARE_BYTES to spare. content: its name in the message."""
    free = shutil.disk_usage(folder).free
    if needed + SPARE_BYTES > free:
        raise CacheFull(f"{folder}: {content} needs {needed} more bytes, and {SPARE_BYTES} to spare; {free} are free")


def fetch_file(store: Objects, key: str, info: FileInfo, file: Path, remedy: str, on_bytes: Callable[[int], None] = lambda _: None) -> None:
    """Download an object to a file, whose beginning may exist.

    Raises StoreMissing or StoreDamaged, with the remedy, if the store lacks the object or has it with another size or content.
    """
    begin = file.stat().st_size if file.exists() else 0
    if begin <= info.size and _append(store, key, info, file, remedy, on_bytes) == info.sha256:
        return
    file.unlink()
    if begin:  # the part that existed may be damaged
        fetch_file(store, key, info, file, remedy, on_bytes)
        return
    raise StoreDamaged(f"{store.url}/{key}: damaged: its SHA-256 is not the one that a manifest lists. {remedy}")


def _append(store: Objects, key: str, info: FileInfo, file: Path, remedy: str, on_bytes: Callable[[int], None]) -> str:
    """Download the missing end of a file. Returns the SHA-256 of the whole file."""
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
            stream.flush()  # before `on_bytes` reports it
            digest.update(content)
            on_bytes(len(content))
        os.fchmod(stream.fileno(), FILE_MODE)
        os.fsync(stream.fileno())
    return digest.hexdigest()


def _ranges(store: Objects, key: str, begin: int, end: int) -> Iterator[memoryview]:
    """The bytes from `begin` to `end`, in order."""
    starts = iter(range(begin, end, RANGE_BYTES))
    ranges: deque[Future[memoryview]] = deque()
    while True:
        while len(ranges) < RANGES and (start := next(starts, None)) is not None:
            ranges.append(_begin(store, key, start, min(start + RANGE_BYTES, end)))
        if not ranges:
            return
        yield ranges.popleft().result()


def _begin(store: Objects, key: str, start: int, end: int) -> Future[memoryview]:
    """Read a range in a thread. (Threads of an executor would keep the process from ending while a store is silent.)"""
    future: Future[memoryview] = Future()

    def read() -> None:
        try:
            future.set_result(store.read_range(key, start, end))
        except BaseException as error:  # `result` raises it in the caller's thread
            future.set_exception(error)

    threading.Thread(target=read, name="range", daemon=True).start()
    return future


def _finish(stored: StoredManifest, work: Path) -> None:
    """Write the manifest and flush it and the folder to disk."""
    file = work / MANIFEST
    file.write_bytes(stored.content)
    file.chmod(FILE_MODE)
    flush(file)
    work.chmod(FOLDER_MODE)
    flush(work)


def _bytes_in(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def _locked(folder: Path) -> AbstractContextManager[None]:
    """The lock of the process that downloads a version into a model's folder. Raises BeingFetched."""
    return file_lock(folder / LOCK, BeingFetched(f"{folder.name}: another process downloads a version of it"))
