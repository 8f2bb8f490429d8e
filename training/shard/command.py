"""`espalier shard`: a bundle, or the shards that one was cut into, as so many shards OUT/INDEX/VERSION.

A layout is complete when every index has its shard. Shards are written hidden and renamed when all of them are verified, so a run that is
killed leaves either nothing or some of the shards, which the next run completes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow as pa

from espalier.bundle import Bundle, find_versions, versions_in
from espalier.bundle_writer import make_folder
from espalier.durable import flush
from espalier.errors import BundleExists, InvalidConfig
from espalier.shards.cut import Cut

from ..publish import publish, scratch
from ..shard.golden import golden_of_shards
from ..shard.join import is_folder_of_shards, joined, shards_in

log = logging.getLogger(__name__)


def shard(model: Path, count: int, out: Path, version: int | None = None) -> list[Bundle]:
    """Write out/INDEX/VERSION for every index below `count`, each verified against the reference; those that are there already stay.

    model    models/NAME/VERSION, or a folder of shards, of which `version` is cut anew; None: its highest complete one
    Raises BundleExists where the folder has all of them, or the version in another layout, and InvalidConfig where the tree has not enough
    subtrees, `model` is no such thing or `out` no folder for shards alone.
    """
    is_in_shards = is_folder_of_shards(model)
    if version is not None and not is_in_shards:
        raise InvalidConfig("--version", version, f"none: {model} is no folder of shards")
    with _folder(out), scratch(out) as folder:
        bundle = joined(shards_in(model, version), folder / "whole") if is_in_shards else Bundle.open(model)
        cut = Cut(bundle, count)
        missing, number, golden = missing_shards(out, cut), cut.info(0).version, golden_of_shards(bundle)
        for index in missing:
            _publish(cut, index, folder / "shards" / str(index) / str(number), golden)
        return put(folder / "shards", out, number, missing)


def _publish(cut: Cut, index: int, path: Path, golden: Callable[[Bundle], pa.Table]) -> None:
    found = publish(path, lambda bare: cut.write(bare, index), golden)
    size = sum(info.size for info in found.manifest.files.values())
    log.info("shard %d of %d: %d items, %.1f MB", index, cut.count, found.manifest.tree.items, size / 1e6)


@contextmanager
def _folder(out: Path) -> Iterator[None]:
    """The folder for shards; after an error not the empty one that was made for them."""
    is_new = not out.exists()
    if not is_new and not out.is_dir():
        raise InvalidConfig("--out", str(out), "a folder for shards alone; it is a file")
    check_place(out)
    try:
        make_folder(out)
    except OSError as error:
        raise InvalidConfig("--out", str(out), f"a folder that can be made ({error.strerror})") from None
    try:
        yield
    except BaseException:
        if is_new:
            with suppress(OSError):  # it holds shards
                out.rmdir()
        raise


def check_place(out: Path) -> None:
    """Raise InvalidConfig where a folder is no place for shards: it is or lies in a bundle, or holds bundles that are no shards."""
    for folder in (out.resolve(), *out.resolve().parents):
        if folder.name.isdecimal() and (folder / "manifest.json").is_file():
            raise _no_place(out, f"{folder} is a bundle")
    if out.is_dir() and (versions := versions_in(out)):
        raise _no_place(out, f"it holds version {versions[-1]} of a model")
    for name, numbers in find_versions(out).items():
        is_index = name.isdecimal() and str(int(name)) == name
        if not is_index or Bundle.open(out / name / str(numbers[-1]), verify=False).manifest.shard is None:
            raise _no_place(out, f"it holds the model {name!r}")


def _no_place(out: Path, what: str) -> InvalidConfig:
    return InvalidConfig("--out", str(out), f"a folder for shards alone; {what}")


def missing_shards(out: Path, cut: Cut) -> list[int]:
    """Which shards of a layout a folder lacks.

    out  as `check_place` lets it pass
    Raises BundleExists where it has all of them, or this version in another layout.
    """
    whole, there = cut.info(0), set[int]()
    for name, versions in find_versions(out).items():
        if whole.version not in versions:
            continue
        path, index = out / name / str(whole.version), int(name)
        found = Bundle.open(path, verify=False).manifest.shard
        if index >= cut.count or found != cut.info(index):
            what = "no shard" if found is None else f"shard {found.index} of {found.count} of {found.of} ({found.digest[:12]}…)"
            raise BundleExists(
                f"{path}: {what}, which is not of the layout in {cut.count} shards of {whole.of} version {whole.version} "
                f"({whole.digest[:12]}…). Choose another folder, or delete the folders of this version in all shards"
            )
        there.add(index)
    missing = [index for index in range(cut.count) if index not in there]
    if not missing:
        raise BundleExists(f"{out}: version {whole.version} is there already, in {cut.count} shards")
    return missing


def put(hidden: Path, out: Path, version: int, indices: list[int]) -> list[Bundle]:
    """Rename shards hidden/INDEX/VERSION to out/INDEX/VERSION, in this order. Raises BundleExists where another run was quicker."""
    bundles = []
    for index in indices:
        path = out / str(index) / str(version)
        make_folder(path.parent)
        try:
            (hidden / str(index) / str(version)).rename(path)
        except OSError as error:
            raise BundleExists(f"{path}: appeared while the shards were being written") from error
        flush(path.parent)
        bundles.append(Bundle.open(path, verify=False))
    return bundles
