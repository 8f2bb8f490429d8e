"""`python -m training shard`: a bundle, or the shards that one was cut into, as so many shards."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from espalier.bundle import Bundle
from espalier.bundle_writer import make_folder
from espalier.errors import InvalidConfig
from espalier.shards.cut import Cut
from training.publish import publish, scratch
from training.shard.golden import ShardGolden
from training.shard.join import check_version_option, is_folder_of_shards, joined, shards_in
from training.shard.layout import check_place, missing_shards, put

log = logging.getLogger(__name__)


def shard(model: Path, count: int, out: Path, version: int | None = None) -> list[Bundle]:
    """Write out/INDEX/VERSION for every index below `count`, each verified against the reference; those that are there already stay.

    model    models/NAME/VERSION, or a folder of shards, of which `version` is cut anew; None: its highest complete one
    Raises BundleExists where the folder has all of them, or the version in another layout, and InvalidConfig where the tree has not enough
    subtrees, `model` is no such thing or `out` no folder for shards alone.
    """
    check_version_option(model, version)
    with _folder(out), scratch(out) as folder, _whole(model, version, folder / "whole") as bundle:
        cut, golden = Cut(bundle, count), ShardGolden(bundle)
        missing, number = missing_shards(out, cut), cut.info(0).version
        for index in missing:
            _publish(cut, index, folder / "shards" / str(index) / str(number), golden)
        return put(folder / "shards", out, number, missing)


def _publish(cut: Cut, index: int, path: Path, golden: ShardGolden) -> None:
    found = publish(path, lambda bare: cut.write(bare, index), golden.answered)
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


@contextmanager
def _whole(model: Path, version: int | None, folder: Path) -> Iterator[Bundle]:
    """The bundle to cut; shards are joined in `folder` first."""
    if is_folder_of_shards(model):
        yield joined(shards_in(model, version), folder)
    else:
        yield Bundle.open(model)
