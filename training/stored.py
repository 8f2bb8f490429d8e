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
    """Put a bundle, or all shards of one, into a store. Raises as `espalier.store.publishing.publish`; a wrong folder makes no store."""
    folders, sharded = folders_of(model, version)
    if sharded and default:
        raise InvalidConfig("--default", True, "a whole model: shards serve their two highest versions, and the router's model says which")
    check(folders)  # before a folder is made for the store
    store = Objects(url, create=True)
    size = sum(file.stat().st_size for folder in folders for file in folder.iterdir())
    with tqdm(total=size, unit="B", unit_scale=True, disable=None, leave=False) as bar:
        done = publish_folders(store, folders, again, bar.update)
    for found in done:
        what = "published" if found.new else "was there"
        log.info(
            "%s version %d %s at %s: %.1f MB sent, %.1f MB already stored",
            *(found.name, found.version, what, store.url, found.uploaded_bytes / 1e6, found.present_bytes / 1e6),
        )
    if default:
        set_default(store, done[0].name, done[0].version)
        log.info("%s version %d is the default", done[0].name, done[0].version)
    return done


def folders_of(model: Path, version: int | None) -> tuple[list[Path], bool]:
    """The version folders that --model means, and whether they are the shards of one bundle. Raises BundleNotFound or BundleCorrupt."""
    if is_folder_of_shards(model):
        return [shard.path for shard in shards_in(model, version, verify=False)], True  # hashed while they are sent
    if not (model / "manifest.json").is_file():
        raise BundleNotFound(f"{model}: no bundle and no folder of shards; expected models/NAME/VERSION or models/NAME-shards")
    if version is not None:
        raise InvalidConfig("--version", version, "no such option where --model is models/NAME/VERSION")
    return [model], False


def versions(url: str, model: str | None) -> list[dict[str, Any]]:
    """What a store holds, a row a model: its name, versions, and what serves of them. Raises StoreError."""
    _check_name(model)
    store = Objects(url)
    rows = []
    for name, found in find_models(store, model).items():
        serving, _ = read_serving(store, name) if found.etag is not None else (None, None)
        row: dict[str, Any] = {"model": name, "versions": list(found.versions), "default": None, "beside": [], "candidate": None}
        if serving is not None:
            row |= {"default": serving.default, "beside": [version for version in serving.versions if version != serving.default]}
            row["candidate"] = None if serving.candidate is None else serving.candidate.model_dump(mode="json")
        rows.append(row)
    return rows


def _check_name(model: str | None) -> None:
    if model is not None and not is_model_name(model):
        raise InvalidConfig("--model", model, "the name of a model, without a path")


def print_versions(rows: Sequence[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    for row in rows:
        served = f"version {row['default']} serves" if row["default"] is not None else f"the highest, version {row['versions'][-1]}, serves"
        beside = f", beside it {', '.join(map(str, row['beside']))}" if row["beside"] else ""
        tried = f", {row['candidate']['version']} is tried" if row["candidate"] else ""
        print(f"{row['model']}: versions {', '.join(map(str, row['versions']))}; {served}{beside}{tried}")


def change_default(url: str, model: str | None, version: int | None, beside: Sequence[int], candidate: Candidate | None = None) -> None:
    """Say which version of a model serves, or of all models of the store, as of all shards of a bundle. version: None is the highest."""
    for option, value in (("--beside", list(beside)), ("--candidate", candidate and candidate.version)):
        if version is None and value:
            raise InvalidConfig(option, value, "no such option without --version")
    if candidate is not None and candidate.version == version:
        raise InvalidConfig("--candidate", version, "another version than --version")
    _check_name(model)
    store = Objects(url)
    found: dict[str, StoredModel] = find_models(store) if model is None else {model: StoredModel((), None)}
    for name, stored in found.items() if model is None else ():
        tried = None if candidate is None else candidate.version
        lacking = [wanted for wanted in (version, *beside, tried) if wanted is not None and wanted not in stored.versions]
        if lacking:  # before the first is changed
            raise StoreMissing(f"{store.url}: no version {lacking[0]} of {name!r}; there: {', '.join(map(str, stored.versions))}")
    for name in found:
        if version is None:
            serve_highest(store, name)
            log.info("%s: the highest version serves", name)
        else:
            set_default(store, name, version, beside, candidate)
            log.info("%s: version %d serves%s", name, version, "" if candidate is None else f", {candidate.version} is tried")
