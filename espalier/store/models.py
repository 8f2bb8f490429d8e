"""Which models and versions a store holds, and which versions should serve.

Knows keys, manifests and serving.json. Does not know how files are uploaded or fetched. Anybody may have written names and numbers in a
store: keys without a valid model name and version are ignored, and their number is limited.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from pydantic import ValidationError

from espalier.bundle import MAX_MANIFEST_BYTES, is_model_name, parse_manifest
from espalier.errors import BundleCorrupt, StoreConflict, StoreDamaged, StoreMissing, UnsupportedSchema, first_of
from espalier.manifest import Manifest
from espalier.serving import MAX_SERVED, SERVING, Candidate, Serving
from espalier.store.objects import Objects

MANIFEST = "manifest.json"
MODELS, BLOBS = "models", "blobs/sha256"
MAX_LISTED = 100_000
"""Manifests and serving.json files in one store."""
MAX_SERVING_BYTES = 1 << 16
MAX_FILES = 128
"""Most files of a bundle; a forest of 16 trees has about 40."""
MAX_VERSION = 10**12
CHANGES = 8
"""Attempts to change serving.json while others change it."""


@dataclass(frozen=True)
class StoredModel:
    """A model of a store.

    versions  the versions with a manifest, ascending
    etag      entity tag of serving.json; None if there is none
    etags     entity tag of each version's manifest
    """

    versions: tuple[int, ...]
    etag: str | None
    etags: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class StoredManifest:
    """A version's manifest, as bytes and parsed."""

    content: bytes
    manifest: Manifest

    @property
    def size(self) -> int:
        """Bytes of all files of the version."""
        return sum(info.size for info in self.manifest.files.values())


def manifest_key(name: str, version: int) -> str:
    return f"{MODELS}/{name}/{version}/{MANIFEST}"


def serving_key(name: str) -> str:
    return f"{MODELS}/{name}/{SERVING}"


def blob_key(digest: str) -> str:
    return f"{BLOBS}/{digest[:2]}/{digest}"


def find_models(store: Objects, name: str | None = None) -> dict[str, StoredModel]:
    """The models of a store by name, or one of them. Raises StoreDamaged if there are more than MAX_LISTED objects."""
    versions: dict[str, dict[int, str]] = {}
    etags: dict[str, str] = {}
    for stored in store.list(MODELS if name is None else f"{MODELS}/{name}", MAX_LISTED):
        etag = stored.etag or f"{stored.size} {stored.modified}"
        match PurePosixPath(stored.key).parts[1:]:
            case (model, number, file) if file == MANIFEST and is_model_name(model) and (version := version_of(number)) is not None:
                versions.setdefault(model, {})[version] = etag
            case (model, file) if file == SERVING and is_model_name(model):
                etags[model] = etag
    return {model: StoredModel(tuple(sorted(found)), etags.get(model), found) for model, found in sorted(versions.items())}


def version_of(text: str) -> int | None:
    """The version number in a folder's name; None if the name is not a version."""
    return int(text) if re.fullmatch(r"[1-9][0-9]{0,11}", text) and int(text) < MAX_VERSION else None


def read_manifest(store: Objects, name: str, version: int) -> StoredManifest | None:
    """A version's manifest; None if there is none. Raises StoreDamaged if it is invalid or of another version."""
    key = manifest_key(name, version)
    stored = store.read(key, MAX_MANIFEST_BYTES)
    if stored is None:
        return None
    source = f"{store.url}/{key}"
    try:
        manifest = parse_manifest(stored.content, source)
    except (BundleCorrupt, UnsupportedSchema) as error:
        raise StoreDamaged(str(error)) from error
    check_place(manifest, name, version, source)
    return StoredManifest(stored.content, manifest)


def check_place(manifest: Manifest, name: str, version: int, source: str) -> None:
    """Raise StoreDamaged if a manifest is of another model or version, or lists files that no bundle has."""
    if (manifest.name, manifest.version) != (name, version):
        raise StoreDamaged(f"{source}: it says {manifest.name} version {manifest.version}, expected {name} version {version}")
    if len(manifest.files) > MAX_FILES or MANIFEST in manifest.files:
        raise StoreDamaged(f"{source}: it lists {len(manifest.files)} files, expected at most {MAX_FILES} and no {MANIFEST}")


def read_serving(store: Objects, name: str) -> tuple[Serving | None, str | None]:
    """A model's serving.json and its entity tag; None, None if there is none. Raises StoreDamaged."""
    key = serving_key(name)
    stored = store.read(key, MAX_SERVING_BYTES)
    if stored is None:
        return None, None
    try:
        serving = Serving.model_validate_json(stored.content)
    except ValidationError as error:
        raise StoreDamaged(f"{store.url}/{key}: {first_of(error)}") from error
    if len(serving.versions) > MAX_SERVED:
        raise StoreDamaged(f"{store.url}/{key}: {len(serving.versions)} versions, expected at most {MAX_SERVED}")
    return serving, stored.etag


def set_default(store: Objects, name: str, version: int, beside: Sequence[int] = (), candidate: Candidate | None = None) -> Serving:
    """Make a version the default of every service that follows the store. They also load `beside`, and try the candidate on some requests.

    Raises StoreMissing if a version is not stored, StoreConflict if other processes keep changing the same file.
    """
    versions = tuple(sorted({version, *beside, *([] if candidate is None else [candidate.version])}))
    if len(versions) > MAX_SERVED:
        raise StoreConflict(f"{store.url}: {len(versions)} versions of {name!r} at once, expected at most {MAX_SERVED}")
    for number in versions:
        if store.head(manifest_key(name, number)) is None:
            stored_versions = find_models(store, name).get(name, StoredModel((), None)).versions
            raise StoreMissing(f"{store.url}: no version {number} of {name!r}; there: {', '.join(map(str, stored_versions)) or 'none'}")
    for _ in range(CHANGES):
        before, etag = read_serving(store, name)
        after = Serving(
            generation=before.generation + 1 if before is not None else 1, versions=versions, default=version, candidate=candidate
        )
        content = after.model_dump_json(exclude_none=True).encode() + b"\n"
        if before is None or etag is None:
            written = store.create(serving_key(name), content)
        else:
            written = store.replace(serving_key(name), content, etag)
        if written:
            return after
    raise StoreConflict(f"{store.url}/{serving_key(name)}: changed by others {CHANGES} times in a row; try again")


def serve_highest(store: Objects, name: str) -> None:
    """Delete serving.json: the highest version serves from now on. Raises StoreMissing if the model is not stored."""
    if name not in find_models(store, name):
        raise StoreMissing(f"{store.url}: no model {name!r}")
    store.delete(serving_key(name))
