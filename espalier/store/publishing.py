"""Upload of versions: every file by its digest, then the manifests, which make the versions visible.

A file is not uploaded if the store has it in the same size. A file is hashed while it is uploaded; it becomes a blob only if it matches
the manifest. If several processes publish one version, one writes the manifest. The others compare it with theirs and raise StoreConflict
if it differs. Knows folders of bundles and a store.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from espalier.bundle import MAX_MANIFEST_BYTES, is_model_name, parse_manifest
from espalier.errors import BundleCorrupt, BundleNotFound, StoreConflict, StoreDamaged, StoreUnavailable
from espalier.manifest import FileInfo, Manifest
from espalier.store.models import BLOBS, MANIFEST, StoredManifest, blob_key, check_place, manifest_key, version_of
from espalier.store.objects import Objects

READ_BYTES = 4 << 20


class Published(NamedTuple):
    """A version in the store. new: this call made it visible. present_bytes: those that the store had before."""

    name: str
    version: int
    new: bool
    uploaded_bytes: int
    present_bytes: int


def publish(
    store: Objects, folders: Sequence[Path], again: bool = False, on_sent: Callable[[int], None] = lambda _: None
) -> list[Published]:
    """Upload versions, folders models/NAME/VERSION, to a store: first all their files, then their manifests in this order.

    again    also upload files that the store has, one of which may be damaged
    on_sent  called with the bytes of each step
    Raises BundleNotFound or BundleCorrupt if a folder is no complete bundle, StoreConflict if a version is stored with other content. Then
    no later manifest is written.
    """
    bundles = [(folder, _open(folder)) for folder in folders]
    with suppress(StoreUnavailable):  # another user's files do not matter
        store.delete_partial(BLOBS)
    published_before = [_is_published(store, stored) for _, stored in bundles]
    counts = [_send_files(store, folder, stored.manifest, again, on_sent) for folder, stored in bundles]
    return [
        Published(stored.manifest.name, stored.manifest.version, not is_published and _write_manifest(store, stored), uploaded, present)
        for (_, stored), is_published, (uploaded, present) in zip(bundles, published_before, counts, strict=True)
    ]


def check(folders: Sequence[Path]) -> None:
    """Check without a store what `publish` checks first: every file exists in its size. Raises BundleNotFound, BundleCorrupt."""
    for folder in folders:
        _open(folder)


def _open(folder: Path) -> StoredManifest:
    folder = folder.absolute()
    file = folder / MANIFEST
    name, version = folder.parent.name, version_of(folder.name)
    if not file.is_file() or version is None or not is_model_name(name):
        raise BundleNotFound(f"{folder}: no bundle; expected models/NAME/VERSION with a {MANIFEST}")
    stored = StoredManifest(file.read_bytes(), parse_manifest(file.read_bytes(), str(file)))
    try:
        check_place(stored.manifest, name, version, str(file))
    except StoreDamaged as error:
        raise BundleCorrupt(str(error)) from error
    for file_name, info in stored.manifest.files.items():
        if not (folder / file_name).is_file():
            raise BundleNotFound(f"{folder / file_name}: missing")
        if (size := (folder / file_name).stat().st_size) != info.size:
            raise BundleCorrupt(f"{folder / file_name}: {size} bytes, the manifest says {info.size}")
    return stored


def _is_published(store: Objects, local: StoredManifest) -> bool:
    """Whether the store has this version. Raises StoreConflict if it has the version with another manifest."""
    manifest = local.manifest
    stored = store.read(manifest_key(manifest.name, manifest.version), MAX_MANIFEST_BYTES)
    if stored is not None and stored.content != local.content:
        raise _conflict(store, manifest)
    return stored is not None


def _send_files(store: Objects, folder: Path, manifest: Manifest, again: bool, on_sent: Callable[[int], None]) -> tuple[int, int]:
    uploaded_bytes = present_bytes = 0
    for file_name, info in sorted(manifest.files.items()):
        stored = None if again else store.head(blob_key(info.sha256))
        if stored is not None and stored.size == info.size:
            present_bytes += info.size
        else:
            send_file(store, blob_key(info.sha256), folder / file_name, info, on_sent)
            uploaded_bytes += info.size
    return uploaded_bytes, present_bytes


def send_file(store: Objects, key: str, file: Path, info: FileInfo, on_sent: Callable[[int], None]) -> None:
    """Upload a file as an object. If it does not match `info`, nothing is written. Raises BundleNotFound or BundleCorrupt."""
    store.write(key, _verified(file, info, on_sent), info.size)


def _verified(file: Path, info: FileInfo, on_sent: Callable[[int], None]) -> Iterator[bytes]:
    """The file in pieces. Yields the last piece only if the whole file has the manifest's digest."""
    digest, last_piece, size = hashlib.sha256(), b"", 0
    try:
        with file.open("rb") as stream:
            while piece := stream.read(READ_BYTES):
                digest.update(piece)
                size += len(piece)
                on_sent(len(piece))
                if last_piece:
                    yield last_piece
                last_piece = piece
    except OSError as error:
        raise BundleNotFound(f"{file}: {error.strerror}") from error
    if size != info.size or digest.hexdigest() != info.sha256:
        raise BundleCorrupt(f"{file}: its SHA-256 is not the manifest's; the file was changed or damaged")
    yield last_piece


def _write_manifest(store: Objects, local: StoredManifest) -> bool:
    """Make a version visible. False if another publisher has written the same manifest. Raises StoreConflict."""
    key = manifest_key(local.manifest.name, local.manifest.version)
    created = store.create(key, local.content)
    stored = store.read(key, MAX_MANIFEST_BYTES)  # some stores do not keep the promise of `create` when two write at once
    if stored is None:  # S3 drops a write while another write or a deletion of the object is under way (409)
        raise StoreConflict(f"{store.url}/{key}: not written, because another process writes or deletes it; publish again")
    if stored.content != local.content:
        raise _conflict(store, local.manifest)
    return created


def _conflict(store: Objects, manifest: Manifest) -> StoreConflict:
    return StoreConflict(
        f"{store.url}: version {manifest.version} of {manifest.name!r} exists with other content, and a version is never replaced; "
        "publish this one under another number"
    )
