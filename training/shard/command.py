"""`espalier shard`: cuts a bundle, or shards of one, into shards OUT/INDEX/VERSION.

A layout is complete when every index has its shard. Shards are written into a hidden folder, and renamed when all are verified. A killed
run leaves no shard or some of them; the next run writes the missing ones. Golden queries are those of the bundle that is cut.

Legend: B queries, L levels, S state.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow as pa

from espalier.arrays import Float32
from espalier.bundle import Bundle, find_versions, versions_in
from espalier.bundle_writer import make_folder
from espalier.checks.golden import HISTORY_ROWS, STATES, golden_queries
from espalier.durable import flush
from espalier.engines.encoder import QueryEncoder
from espalier.engines.reference import ReferenceEngine
from espalier.engines.stages import GivenQueries
from espalier.errors import BundleExists, InvalidConfig, UnsupportedGraph
from espalier.manifest import GraphScorer
from espalier.queries import HistoryKind, QueryBatch
from espalier.shards.cut import Cut

from ..golden import answered_anew
from ..publish import publish, scratch
from ..shard.join import is_folder_of_shards, joined, shards_in

log = logging.getLogger(__name__)


def shard(model: Path, count: int, out: Path, version: int | None = None) -> list[Bundle]:
    """Write out/INDEX/VERSION for every index below `count`, each verified against the reference. Existing shards stay.

    model    models/NAME/VERSION, or a folder of shards
    version  of a folder of shards: the version that is cut anew; None: its highest complete one
    Raises BundleExists if `out` has all shards, or this version in another layout. Raises InvalidConfig if the tree has too few subtrees,
    `model` is neither a bundle nor a folder of shards, or `out` holds anything but shards.
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
    bundle = publish(path, lambda folder: cut.write(folder, index), golden)
    size = sum(info.size for info in bundle.manifest.files.values())
    log.info("shard %d of %d: %d items, %.1f MB", index, cut.count, bundle.manifest.tree.items, size / 1e6)


@contextmanager
def _folder(out: Path) -> Iterator[None]:
    """Make the folder for shards. After an error, remove it if it is new and empty."""
    is_new = not out.exists()
    if not is_new and not out.is_dir():
        raise InvalidConfig("--out", str(out), "a folder for shards alone; it is a file")
    check_folder(out)
    try:
        make_folder(out)
    except OSError as error:
        raise InvalidConfig("--out", str(out), f"a folder that can be made ({error.strerror})") from None
    try:
        yield
    except BaseException:
        if is_new:
            with suppress(OSError):  # not empty: it holds shards
                out.rmdir()
        raise


def check_folder(out: Path) -> None:
    """Raise InvalidConfig if a folder cannot hold shards: it is or lies in a bundle, or holds whole bundles."""
    for folder in (out.resolve(), *out.resolve().parents):
        if folder.name.isdecimal() and (folder / "manifest.json").is_file():
            raise _unusable(out, f"{folder} is a bundle")
    if out.is_dir() and (versions := versions_in(out)):
        raise _unusable(out, f"it holds version {versions[-1]} of a model")
    for name, numbers in find_versions(out).items():
        is_index = name.isdecimal() and str(int(name)) == name
        if not is_index or Bundle.open(out / name / str(numbers[-1]), verify=False).manifest.shard is None:
            raise _unusable(out, f"it holds the model {name!r}")


def _unusable(out: Path, reason: str) -> InvalidConfig:
    return InvalidConfig("--out", str(out), f"a folder for shards alone; {reason}")


def missing_shards(out: Path, cut: Cut) -> list[int]:
    """The indices of a layout's shards that a folder lacks. The folder passed `check_folder`.

    Raises BundleExists if it has all of them, or this version in another layout.
    """
    layout, existing = cut.info(0), set[int]()
    for name, versions in find_versions(out).items():
        if layout.version not in versions:
            continue
        path, index = out / name / str(layout.version), int(name)
        info = Bundle.open(path, verify=False).manifest.shard
        if index >= cut.count or info != cut.info(index):
            shard_text = "no shard" if info is None else f"shard {info.index} of {info.count} of {info.of} ({info.digest[:12]}…)"
            raise BundleExists(
                f"{path}: {shard_text}, which is not of the layout in {cut.count} shards of {layout.of} version {layout.version} "
                f"({layout.digest[:12]}…). Choose another folder, or delete the folders of this version in all shards"
            )
        existing.add(index)
    missing = [index for index in range(cut.count) if index not in existing]
    if not missing:
        raise BundleExists(f"{out}: version {layout.version} is there already, in {cut.count} shards")
    return missing


def put(hidden: Path, out: Path, version: int, indices: list[int]) -> list[Bundle]:
    """Rename shards hidden/INDEX/VERSION to out/INDEX/VERSION, in this order. Raises BundleExists if another run wrote one first."""
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


# -- golden queries ------------------------------------------------------------------------------------------------------


def golden_of_shards(bundle: Bundle) -> Callable[[Bundle], pa.Table]:
    """A function from a shard to its golden table with the reference engine's answers. bundle: whole, or the single shard of one.

    If scorers are graphs, the table also has the queries' states, and the item rows of histories, which a shard needs to read them.
    """
    golden, kind = bundle.golden(), bundle.manifest.query
    queries = golden_queries(bundle, golden)
    if not isinstance(queries, GivenQueries) and isinstance(bundle.manifest.scorer, GraphScorer):
        queries = GivenQueries(queries.kind, queries.rows, encoded(bundle, queries))

    def answered(shard: Bundle) -> pa.Table:
        table = answered_anew(golden, shard, queries)
        if not isinstance(queries, GivenQueries) or queries.states_BLS is None:
            return table
        if isinstance(kind, HistoryKind):
            table = table.append_column(HISTORY_ROWS, pa.array([row[row >= 0] for row in queries.array], pa.list_(pa.int64())))
        flat = [states_LS.ravel() for states_LS in queries.states_BLS]
        return table.append_column(STATES, pa.array(flat, pa.list_(pa.float32())))

    return answered


def encoded(bundle: Bundle, queries: QueryBatch) -> Float32:
    """float32[B, L, S]: the states of queries, by ONNX Runtime if possible: it maps node rows, which may exceed the memory."""
    try:
        encoder = QueryEncoder.open(bundle)
    except UnsupportedGraph:
        return ReferenceEngine(bundle).states(queries)
    return encoder.states(queries.array, [0] * len(queries))
