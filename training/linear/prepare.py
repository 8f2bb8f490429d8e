"""Read the data of a linear model's configuration: points with their labels, items, and the vectoriser of texts.

Legend: B points, I items, F features.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray
from scipy.sparse import csr_array, hstack, load_npz

from espalier.bundle import Bundle
from espalier.errors import InvalidConfig, InvalidData
from espalier.items import ItemTable
from espalier.queries import FeaturesKind, QueryBatch, TextKind
from espalier.text.sparse_rows import SparseRows
from espalier.text.vectoriser import Vectoriser
from training.data.csr import Csr, as_matrix, as_rows, normalised
from training.data.item_tables import item_table
from training.data.query_logs import LabelledTexts, labelled, read_log, read_table, texts_of
from training.data.xmc import LabelledPoints, read_xmc
from training.linear.label_features import pifa, weighted_sums
from training.specification.linear import LinearConfig, LinearOptions, LogData, NpzData, TextLabels, XmcData
from training.specification.models import config_of

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class OwnFeatures:
    """Of labels that have texts of their own: rows [I, F] of length 1, and whether training points count besides."""

    rows: Csr
    both: bool


@dataclass(frozen=True, eq=False)
class Prepared:
    """What a linear model is trained and measured on.

    labels     rows [I, …] of length 1: the features of labels that the tree is built from
    centroids  rows [I, F] of length 1: the same in the features of queries
    own        what of labels' features comes from their own texts; None: nothing
    written    the test queries as clients write them: an Arrow array of texts, or of structs of `indices` and `values`
    """

    train: LabelledPoints
    test: LabelledPoints
    written: pa.Array
    items: ItemTable
    labels: Csr
    centroids: Csr
    own: OwnFeatures | None
    kind: FeaturesKind | TextKind
    vectoriser: Vectoriser | None
    fingerprint: str


def prepare(config: LinearConfig) -> Prepared:
    """Read the data of a configuration. Raises InvalidData or InvalidConfig."""
    return _from_texts(config, config.data) if isinstance(config.data, LogData) else _from_points(config, config.data)


def label_features(train: LabelledPoints, own: OwnFeatures | None, options: LinearOptions) -> tuple[Csr, Csr]:
    """The features of labels from training points and their own texts: `labels` and `centroids` of Prepared."""
    if own is not None and not own.both:
        return own.rows, own.rows
    rows = weighted_sums(train) if options.loss == "relevance" else pifa(train)
    return (rows, rows) if own is None else (normalised(hstack([rows, own.rows], format="csr")), normalised(rows + own.rows))


def read_points(data: XmcData | NpzData, test: bool = False) -> LabelledPoints:
    """The training points, or the test points, as the files have them."""
    if isinstance(data, XmcData):
        return read_xmc(_named(data.test) if test else data.train)
    files = (data.test, data.test_labels) if test else (data.train, data.train_labels)
    points, labels = (_matrix(_named(file)) for file in files)
    if points.shape[0] != labels.shape[0]:
        raise InvalidData(str(files[1]), f"{labels.shape[0]} rows", f"{points.shape[0]}, one per point of {files[0]}")
    if labels.nnz and labels.data.min() <= 0:
        raise InvalidData(str(files[1]), float(labels.data.min()), "weights above 0")
    return LabelledPoints(points, labels)


def read_texts(data: LogData, file: Path, items: ItemTable) -> LabelledTexts:
    """The queries of a log over known items."""
    pairs = read_log(file, data.query, data.item, data.weight)
    if data.texts is not None:
        pairs = _looked_up(pairs, data.texts, data.text_columns)
    return labelled(pairs, _rows_of(items))


def read_queries(bundle: Bundle, file: Path) -> tuple[QueryBatch, list[NDArray[np.int64]]]:
    """The queries of a file, in the format of the data that a bundle was trained on, that have a relevant item, and its item rows.

    Raises InvalidConfig where the bundle was not trained here; InvalidData where its format cannot be read so, or the file's features or
    labels are not the bundle's.
    """
    config = config_of(bundle.manifest, LinearConfig)
    kind, items = bundle.manifest.query, bundle.items
    if isinstance(config.data, LogData) and isinstance(kind, TextKind):
        texts = read_texts(config.data, file, items)
        found = _vectorised(bundle.vectoriser, texts)
    elif isinstance(config.data, XmcData) and isinstance(kind, FeaturesKind):
        found = read_xmc(file)
        shapes = found.points.shape[1], found.labels.shape[1]
        if shapes != (kind.width, len(items)):
            raise InvalidData(str(file), f"{shapes[0]} features and {shapes[1]} labels", f"{kind.width} features and {len(items)} labels")
        found = _unit(found) if kind.unit else found
    else:
        raise InvalidData(
            "--data", str(file), f"data of format xmc or log, not {config.data.format}: without a file the held-out queries are taken"
        )
    known = np.flatnonzero(np.diff(found.labels.indptr))
    return QueryBatch(kind, as_rows(found.points[known])), [found.labels_of(b) for b in known.tolist()]


def written_features(points: SparseRows) -> pa.Array:
    """Points as queries of features in a table: structs of `indices` and `values`."""
    indices = pa.ListArray.from_arrays(pa.array(points.indptr, pa.int32()), pa.array(points.indices.astype(np.int64)))
    values = pa.ListArray.from_arrays(pa.array(points.indptr, pa.int32()), pa.array(points.values))
    return pa.StructArray.from_arrays([indices, values], ["indices", "values"])


def _from_points(config: LinearConfig, data: XmcData | NpzData) -> Prepared:
    train = read_points(data)
    if data.test is not None:
        test = read_points(data, test=True)
        for name, found, wanted in (
            ("features", test.points.shape[1], train.points.shape[1]),
            ("labels", test.labels.shape[1], train.labels.shape[1]),
        ):
            if found != wanted:
                raise InvalidData(str(data.test), f"{found} {name}", f"{wanted}, as in {data.train}")
    else:
        held, kept = _split(len(train), data.test_share, config.seed)
        train, test = train.take(kept), train.take(held)
    labels = train.labels.shape[1]
    ids = pa.array([str(label) for label in range(labels)], pa.large_string())
    items = ItemTable.build(pa.table({"id": ids})) if data.items is None else _table(data.items)
    if len(items) != labels:
        raise InvalidData(str(data.items), f"{len(items)} items", f"{labels}, one per label, in their order")
    written = written_features(as_rows(test.points))
    if data.unit:
        train, test = _unit(train), _unit(test)
    kind = FeaturesKind(width=train.points.shape[1], unit=data.unit)
    centroids, _ = label_features(train, None, config.linear)
    return Prepared(train, test, written, items, centroids, centroids, None, kind, None, _fingerprint(config))


def _from_texts(config: LinearConfig, data: LogData) -> Prepared:
    parts = []
    table = None if data.items is None else pl.read_parquet(data.items)
    if data.train is not None:
        pairs = read_log(data.train, data.query, data.item, data.weight)
        parts.append(pairs if data.texts is None else _looked_up(pairs, data.texts, data.text_columns))
    for columns in data.own_texts:
        frame = read_table(_named(data.items), ["id", *columns])
        parts.append(pl.DataFrame({"query": texts_of(frame, columns), "item": frame["id"].cast(pl.String), "weight": 1.0}))
    pairs = pl.concat(parts)
    if table is None:
        items = ItemTable.build(pa.table({"id": pairs["item"].unique(maintain_order=True).to_arrow()}))
    else:
        items = _table(_named(data.items))
    texts = labelled(pairs, _rows_of(items))
    if data.test is not None:
        training, testing = texts, read_texts(data, data.test, items)
    else:
        held, kept = _split(len(texts), data.test_share, config.seed)
        training, testing = texts.take(kept), texts.take(held)
    log.info("%d queries to learn from, %d to measure on, %d items", len(training), len(testing), len(items))
    vectoriser = Vectoriser.fit(training.texts, config.blocks)
    train = _vectorised(vectoriser, training)
    own = None
    if isinstance(config.labels, TextLabels):
        texts_of_items = texts_of(read_table(_named(data.items), config.labels.columns), config.labels.columns)
        own = OwnFeatures(as_matrix(vectoriser.transform(texts_of_items)), config.labels.kind == "both")
    rows, centroids = label_features(train, own, config.linear)
    kind = TextKind(width=vectoriser.width, blocks=config.blocks)
    test = _vectorised(vectoriser, testing)
    return Prepared(train, test, pa.array(testing.texts, pa.string()), items, rows, centroids, own, kind, vectoriser, _fingerprint(config))


def _vectorised(vectoriser: Vectoriser, texts: LabelledTexts) -> LabelledPoints:
    return LabelledPoints(as_matrix(vectoriser.transform(texts.texts)), texts.labels)


def _unit(data: LabelledPoints) -> LabelledPoints:
    return LabelledPoints(normalised(data.points), data.labels)


def _split(count: int, share: float, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The positions that are held out and the other positions, both ascending."""
    order = np.random.default_rng([seed, 0x5EED]).permutation(count)
    held = round(share * count)
    if held == count:
        raise InvalidData("data", f"{count} queries", "enough of them to learn from")
    return np.sort(order[:held]), np.sort(order[held:])


def _looked_up(pairs: pl.DataFrame, file: Path, columns: tuple[str, ...]) -> pl.DataFrame:
    """The texts of a log whose queries are ids of a table."""
    frame = read_table(file, ["id", *columns])
    texts = pl.DataFrame({"query": frame["id"].cast(pl.String), "text": texts_of(frame, columns)})
    found = pairs.join(texts, on="query", how="left", maintain_order="left")
    if found["text"].null_count():
        raise InvalidData("query", found["query"][int(found["text"].is_null().arg_max() or 0)], f"an id of {file}")
    return found.select(pl.col("text").alias("query"), "item", "weight")


def _table(file: Path) -> ItemTable:
    ids = read_table(file, ["id"])["id"].cast(pl.String).to_arrow()
    return item_table(file, ids)


def _rows_of(items: ItemTable) -> dict[str, int]:
    ids = items.ids_of(np.arange(len(items)))
    return {item_id: row for row, item_id in enumerate(ids)}


def _matrix(file: Path) -> Csr:
    """A sparse float32 matrix by rows, its columns ascending and none twice. Raises InvalidData."""
    try:
        matrix = csr_array(load_npz(file))
    except (OSError, ValueError, KeyError, EOFError) as error:
        raise InvalidData(str(file), str(error), "a sparse matrix written by scipy.sparse.save_npz") from error
    matrix.sum_duplicates()
    matrix.eliminate_zeros()
    if not np.isfinite(matrix.data).all():
        raise InvalidData(str(file), "numbers that are not finite", "finite numbers")
    return matrix.astype(np.float32)


def _named(file: Path | None) -> Path:
    if file is None:
        raise InvalidConfig("data.test", None, "a file")
    return file


def _fingerprint(config: LinearConfig) -> str:
    """SHA-256 of the data files, in the order of the configuration's keys."""
    digest = hashlib.sha256()
    for name, value in sorted(config.data.model_dump().items()):
        if isinstance(value, Path):
            with value.open("rb") as stream:
                digest.update(json.dumps(name).encode() + hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()
