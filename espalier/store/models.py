"""Which models and versions a store holds, and what should serve of them.

Knows keys, manifests and serving.json. Does not know how files come and go. Names and numbers in a store come from strangers: what is no
model's name or version is ignored, and there are limits to how many there may be.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
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
"""Of a bundle; a forest of 16 trees has about 40."""
MAX_VERSION = 10**12
CHANGES = 8
"""Attempts to change serving.json while others change it."""


@dataclass(frozen=True)
class StoredModel:
    """A model of a store.

    versions  those with a manifest, ascending
    etag      of its serving.json; None where there is none
    """

    versions: tuple[int, ...]
    etag: str | None


@dataclass(frozen=True)
class StoredManifest:
    """A version's manifest: its bytes as written, and what they say."""

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


def find_models(store: Objects, name: str | None = None, most: int = MAX_LISTED) -> dict[str, StoredModel]:
    """The models of a store by name, or one of them. Raises StoreDamaged where there are more than `most` objects."""
    versions: dict[str, list[int]] = {}
    etags: dict[str, str | None] = {}
    for found in store.list(MODELS if name is None else f"{MODELS}/{name}", most):
        match PurePosixPath(found.key).parts[1:]:
            case (model, number, file) if file == MANIFEST and is_model_name(model) and (version := version_of(number)) is not None:
                versions.setdefault(model, []).append(version)
            case (model, file) if file == SERVING and is_model_name(model):
                etags[model] = found.etag or f"{found.size} {found.modified}"
    return {model: StoredModel(tuple(sorted(numbers)), etags.get(model)) for model, numbers in sorted(versions.items())}


def version_of(text: str) -> int | None:
    """The version that a folder's name is; None where it is none."""
    return int(text) if re.fullmatch(r"[1-9][0-9]{0,11}", text) and int(text) < MAX_VERSION else None


def read_manifest(store: Objects, name: str, version: int) -> StoredManifest | None:
    """A version's manifest; None where there is none. Raises StoreDamaged where it is none of this version."""
    key = manifest_key(name, version)
    found = store.read(key, MAX_MANIFEST_BYTES)
    if found is None:
        return None
    where = f"{store.url}/{key}"
    try:
        manifest = parse_manifest(found.content, where)
    except (BundleCorrupt, UnsupportedSchema) as error:
        raise StoreDamaged(str(error)) from error
    check_place(manifest, name, version, where)
    return StoredManifest(found.content, manifest)


def check_place(manifest: Manifest, name: str, version: int, where: str) -> None:
    """Raise StoreDamaged where a manifest belongs elsewhere or lists what no bundle has."""
    if (manifest.name, manifest.version) != (name, version):
        raise StoreDamaged(f"{where}: it says {manifest.name} version {manifest.version}, expected {name} version {version}")
    if len(manifest.files) > MAX_FILES or MANIFEST in manifest.files:
        raise StoreDamaged(f"{where}: it lists {len(manifest.files)} files, expected at most {MAX_FILES} and no {MANIFEST}")


def read_serving(store: Objects, name: str) -> tuple[Serving | None, str | None]:
    """What a model's serving.json says and its entity tag; None, None where there is none. Raises StoreDamaged."""
    key = serving_key(name)
    found = store.read(key, MAX_SERVING_BYTES)
    if found is None:
        return None, None
    try:
        serving = Serving.model_validate_json(found.content)
    except ValidationError as error:
        raise StoreDamaged(f"{store.url}/{key}: {first_of(error)}") from error
    if len(serving.versions) > MAX_SERVED:
        raise StoreDamaged(f"{store.url}/{key}: {len(serving.versions)} versions, expected at most {MAX_SERVED}")
    return serving, found.etag


def set_default(store: Objects, name: str, version: int, beside: Sequence[int] = (), candidate: Candidate | None = None) -> Serving:
    """Have every service that follows the store answer from this version, load those beside it, and try the candidate on some requests.

    Raises StoreMissing where one of them is not stored, StoreConflict when others change the same file again and again.
    """
    versions = tuple(sorted({version, *beside, *([] if candidate is None else [candidate.version])}))
    if len(versions) > MAX_SERVED:
        raise StoreConflict(f"{store.url}: {len(versions)} versions of {name!r} at once, expected at most {MAX_SERVED}")
    for number in versions:
        if store.head(manifest_key(name, number)) is None:
            there = find_models(store, name).get(name, StoredModel((), None)).versions
            raise StoreMissing(f"{store.url}: no version {number} of {name!r}; there: {', '.join(map(str, there)) or 'none'}")
    for _ in range(CHANGES):
        before, etag = read_serving(store, name)
        after = Serving(
            generation=before.generation + 1 if before is not None else 1, versions=versions, default=version, candidate=candidate
        )
        content = after.model_dump_json(exclude_none=True).encode() + b"\n"
        if before is None or etag is None:
            done = store.create(serving_key(name), content)
        else:
            done = store.replace(serving_key(name), content, etag)
        if done:
            return after
    raise StoreConflict(f"{store.url}/{serving_key(name)}: changed by others {CHANGES} times in a row; try again")


def serve_highest(store: Objects, name: str) -> None:
    """Delete serving.json: the highest version serves from now on. Raises StoreMissing where the model is not stored."""
    if name not in find_models(store, name):
        raise StoreMissing(f"{store.url}: no model {name!r}")
    store.delete(serving_key(name))
