"""`espalier publish | versions | set-default`: models on object storage. Knows folders and a store, not how models are made."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from espalier.bundle import is_model_name
from espalier.errors import BundleNotFound, InvalidConfig, StoreMissing
from espalier.serving import Candidate
from espalier.store.models import StoredModel, find_models, read_serving, serve_highest, set_default
from espalier.store.objects import Objects
from espalier.store.publishing import Published, check
from espalier.store.publishing import publish as publish_folders

from .shard.join import is_folder_of_shards, shards_in

log = logging.getLogger(__name__)


def publish(model: Path, version: int | None, url: str, default: bool, again: bool) -> list[Published]:
    """Put a bundle, or all shards of one, into a store. Raises as `espalier.store.publishing.publish`. A wrong folder creates no store."""
    folders, sharded = folders_of(model, version)
    if sharded and default:
        raise InvalidConfig("--default", True, "a whole model: shards serve their two highest versions, and the router's model says which")
    check(folders)  # before the store's folder is made
    store = Objects(url, create=True)
    size = sum(file.stat().st_size for folder in folders for file in folder.iterdir())
    with tqdm(total=size, unit="B", unit_scale=True, disable=None, leave=False) as bar:
        published_versions = publish_folders(store, folders, again, bar.update)
    for published in published_versions:
        action = "published" if published.new else "was there"
        log.info(
            "%s version %d %s at %s: %.1f MB sent, %.1f MB already stored",
            *(published.name, published.version, action, store.url, published.uploaded_bytes / 1e6, published.present_bytes / 1e6),
        )
    if default:
        set_default(store, published_versions[0].name, published_versions[0].version)
        log.info("%s version %d is the default", published_versions[0].name, published_versions[0].version)
    return published_versions


def folders_of(model: Path, version: int | None) -> tuple[list[Path], bool]:
    """The version folders of --model, and whether they are the shards of one bundle. Raises BundleNotFound or BundleCorrupt."""
    if is_folder_of_shards(model):
        return [shard.path for shard in shards_in(model, version, verify=False)], True  # hashed while they are sent
    if not (model / "manifest.json").is_file():
        raise BundleNotFound(f"{model}: no bundle and no folder of shards; expected models/NAME/VERSION or models/NAME-shards")
    if version is not None:
        raise InvalidConfig("--version", version, "no such option where --model is models/NAME/VERSION")
    return [model], False


def versions(url: str, model: str | None) -> list[dict[str, Any]]:
    """A row for each model of a store: its name, its versions, and which of them serve. Raises StoreError."""
    _check_name(model)
    store = Objects(url)
    rows = []
    for name, stored in find_models(store, model).items():
        serving, _ = read_serving(store, name) if stored.etag is not None else (None, None)
        row: dict[str, Any] = {"model": name, "versions": list(stored.versions), "default": None, "beside": [], "candidate": None}
        if serving is not None:
            row |= {"default": serving.default, "beside": [version for version in serving.versions if version != serving.default]}
            row["candidate"] = None if serving.candidate is None else serving.candidate.model_dump(mode="json")
        rows.append(row)
    if model is not None and not rows:
        raise StoreMissing(f"{store.url}: no model {model!r}")
    return rows


def _check_name(model: str | None) -> None:
    if model is not None and not is_model_name(model):
        raise InvalidConfig("--model", model, "the name of a model, without a path")


def print_versions(rows: Sequence[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    for row in rows:
        default = f"version {row['default']}" if row["default"] is not None else f"the highest, version {row['versions'][-1]},"
        beside_text = f", beside it {', '.join(map(str, row['beside']))}" if row["beside"] else ""
        tried_text = f", {row['candidate']['version']} is tried" if row["candidate"] else ""
        print(f"{row['model']}: versions {', '.join(map(str, row['versions']))}; {default} serves{beside_text}{tried_text}")


def change_default(url: str, model: str | None, version: int | None, beside: Sequence[int], candidate: Candidate | None = None) -> None:
    """Set the version that serves, of a model, or of all models of the store, such as a bundle's shards. version: None is the highest."""
    for option, value in (("--beside", list(beside)), ("--candidate", candidate and candidate.version)):
        if version is None and value:
            raise InvalidConfig(option, value, "no such option without --version")
    if candidate is not None and candidate.version == version:
        raise InvalidConfig("--candidate", version, "another version than --version")
    _check_name(model)
    store = Objects(url)
    models: dict[str, StoredModel] = find_models(store) if model is None else {model: StoredModel((), None)}
    for name, stored in models.items() if model is None else ():
        trial = None if candidate is None else candidate.version
        missing = [number for number in (version, *beside, trial) if number is not None and number not in stored.versions]
        if missing:  # before the first is changed
            raise StoreMissing(f"{store.url}: no version {missing[0]} of {name!r}; there: {', '.join(map(str, stored.versions))}")
    for name in models:
        if version is None:
            serve_highest(store, name)
            log.info("%s: the highest version serves", name)
        else:
            set_default(store, name, version, beside, candidate)
            log.info("%s: version %d serves%s", name, version, "" if candidate is None else f", {candidate.version} is tried")
