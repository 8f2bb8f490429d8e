"""Upload of versions: every file by its digest, then the manifests, which make the versions visible.

A file that the store has in the same size is not sent again. A file is hashed while it is sent, and one whose content is not that of its
manifest never becomes a blob. Of several publishers of one version, one writes the manifest; the others find that it is theirs too, or say
that it is not. Knows folders of bundles and a store.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from espalier.bundle import MAX_MANIFEST_BYTES, is_model_name, parse_manifest
from espalier.errors import BundleCorrupt, BundleNotFound, StoreConflict, StoreDamaged
from espalier.manifest import FileInfo, Manifest
from espalier.store.models import MANIFEST, StoredManifest, blob_key, check_place, manifest_key, version_of
from espalier.store.objects import Objects

READ_BYTES = 4 << 20


class Published(NamedTuple):
    """A version in the store. new: it was not there before; sent, there: bytes that were uploaded, and that the store had."""

    name: str
    version: int
    new: bool
    sent: int
    there: int


def publish(
    store: Objects, folders: Sequence[Path], again: bool = False, on_sent: Callable[[int], None] = lambda _: None
) -> list[Published]:
    """Put versions, models/NAME/VERSION each, into a store: all their files first, then their manifests in this order.

    again    send files that the store has too: one of them may be damaged
    on_sent  called with the bytes of each step
    Raises BundleNotFound or BundleCorrupt where a folder is no whole bundle, StoreConflict where a version is there with other content;
    then no manifest of the rest is written.
    """
    opened = [(folder, _open(folder)) for folder in folders]
    known = [_is_published(store, found) for _, found in opened]
    counts = [_send_files(store, folder, found.manifest, again, on_sent) for folder, found in opened]
    return [
        Published(found.manifest.name, found.manifest.version, not was_there and _write_manifest(store, found), sent, there)
        for (_, found), was_there, (sent, there) in zip(opened, known, counts, strict=True)
    ]


def check(folders: Sequence[Path]) -> None:
    """What `publish` checks before it looks at a store: every file is there in its size. Raises BundleNotFound, BundleCorrupt."""
    for folder in folders:
        _open(folder)


def _open(folder: Path) -> StoredManifest:
    folder = folder.absolute()
    file = folder / MANIFEST
    name, version = folder.parent.name, version_of(folder.name)
    if not file.is_file() or version is None or not is_model_name(name):
        raise BundleNotFound(f"{folder}: no bundle; expected models/NAME/VERSION with a {MANIFEST}")
    found = StoredManifest(file.read_bytes(), parse_manifest(file.read_bytes(), str(file)))
    try:
        check_place(found.manifest, name, version, str(file))
    except StoreDamaged as error:
        raise BundleCorrupt(str(error)) from error
    for part, info in found.manifest.files.items():
        if not (folder / part).is_file():
            raise BundleNotFound(f"{folder / part}: missing")
        if (size := (folder / part).stat().st_size) != info.size:
            raise BundleCorrupt(f"{folder / part}: {size} bytes, the manifest says {info.size}")
    return found


def _is_published(store: Objects, found: StoredManifest) -> bool:
    """Whether the store has this very version. Raises StoreConflict where it has another one of its number."""
    manifest = found.manifest
    there = store.read(manifest_key(manifest.name, manifest.version), MAX_MANIFEST_BYTES)
    if there is not None and there.content != found.content:
        raise _conflict(store, manifest)
    return there is not None


def _send_files(store: Objects, folder: Path, manifest: Manifest, again: bool, on_sent: Callable[[int], None]) -> tuple[int, int]:
    sent = there = 0
    for part, info in sorted(manifest.files.items()):
        stored = None if again else store.head(blob_key(info.sha256))
        if stored is not None and stored.size == info.size:
            there += info.size
        else:
            send_file(store, blob_key(info.sha256), folder / part, info, on_sent)
            sent += info.size
    return sent, there


def send_file(store: Objects, key: str, file: Path, info: FileInfo, on_sent: Callable[[int], None]) -> None:
    """Write a file as an object, or nothing where it is not what `info` says. Raises BundleNotFound or BundleCorrupt then."""
    store.write(key, _verified(file, info, on_sent), info.size)


def _verified(file: Path, info: FileInfo, on_sent: Callable[[int], None]) -> Iterator[bytes]:
    """The file in pieces. The last one only comes if all together have the digest of the manifest."""
    digest, held, size = hashlib.sha256(), b"", 0
    try:
        with file.open("rb") as stream:
            while piece := stream.read(READ_BYTES):
                digest.update(piece)
                size += len(piece)
                on_sent(len(piece))
                if held:
                    yield held
                held = piece
    except OSError as error:
        raise BundleNotFound(f"{file}: {error.strerror}") from error
    if size != info.size or digest.hexdigest() != info.sha256:
        raise BundleCorrupt(f"{file}: its SHA-256 is not the manifest's; the file was changed or damaged")
    yield held


def _write_manifest(store: Objects, found: StoredManifest) -> bool:
    """Make a version visible. False where another publisher did so with the same content. Raises StoreConflict."""
    key = manifest_key(found.manifest.name, found.manifest.version)
    created = store.create(key, found.content)
    there = store.read(key, MAX_MANIFEST_BYTES)  # some stores do not keep the promise of `create` when two write at once
    if there is None or there.content != found.content:
        raise _conflict(store, found.manifest)
    return created


def _conflict(store: Objects, manifest: Manifest) -> StoreConflict:
    return StoreConflict(
        f"{store.url}: version {manifest.version} of {manifest.name!r} exists with other content, and a version is never replaced; "
        "publish this one under another number"
    )
