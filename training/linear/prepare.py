"""Read the data of a linear model's configuration: points with their labels, items, and the vectoriser of texts.

Legend: B points, I items, F features.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa

from espalier.arrays import Int64
from espalier.bundle import Bundle
from espalier.checks.heldout import RELEVANCE
from espalier.errors import MISSING, BundleCorrupt, InvalidConfig, InvalidData
from espalier.items import ItemTable
from espalier.logs.log_values import BadRows, RowSource, table_row
from espalier.queries import FeaturesKind, QueryBatch, TextKind
from espalier.text.sparse_rows import MAX_FEATURES, SparseRows
from espalier.text.vectoriser import Vectoriser, words_of

from ..data.csr import Csr, as_matrix, as_rows, normalised, read_by_rows
from ..data.draws import numbers_of
from ..data.item_tables import item_table
from ..data.query_logs import KnownIds, LabelledTexts, ids_of, labelled, read_columns, read_log, texts_of
from ..data.relevance import LabelRelevance, Smoothing, checked, is_graded
from ..data.xmc import LabelledPoints, read_xmc
from ..evaluate import LabelledQueries
from ..graded import grades_of
from ..linear.own_choices import DEFAULT_QUERIES, chosen_queries, chosen_weights
from ..linear.own_texts import OwnTexts, made_queries
from ..live.joined_points import (
    joined_items,
    joined_points,
    live_pairs,
    new_ids,
    with_likes,
    with_live_points,
    with_live_texts,
    without_gone,
)
from ..live.run_journal import RunJournal
from ..specification.linear import LinearConfig, LogData, NpzData, XmcData
from ..specification.log_format import TextTable
from ..specification.models import config_of

log = logging.getLogger(__name__)
OF_TEST, OF_TRAINING, OF_LOG = "of data.test", "training points held out", "queries of the log, held out"
OF_ITEMS = "made of words of the items"
"""Sources of test queries."""
PAIRS: dict[str, type[pl.DataType]] = {"query": pl.String, "item": pl.String, "weight": pl.Float64}
MAX_LABELS = 1 << 26
"""Every label is an item, even if no point has it: the number in a file's first line decides how much memory is used."""


@dataclass(frozen=True, eq=False)
class Prepared:
    """The training and test data of a linear model.

    own_texts        the part of labels' features from their own texts; None: no such part
    written_queries  the test queries as clients write them: an Arrow array of texts, or of structs of `indices` and `values`
    test_source      where `test` comes from: OF_TEST, OF_TRAINING, OF_LOG or OF_ITEMS
    relevance        turns weights into the relevance in `train.labels` and `test.labels`
    smoothing        turns clicks and views into weights; None: the file has weights
    people_queries   training queries that people made; None: queries are not texts
    columns          the texts of all items, by column of `data.own_texts`
    run_journal      the journal with live items; None: no journal
    bad_rows         reason → how many unreadable rows of the training log were left out
    """

    train: LabelledPoints
    test: LabelledPoints
    written_queries: pa.Array
    items: ItemTable
    own_texts: OwnTexts | None
    kind: FeaturesKind | TextKind
    vectoriser: Vectoriser | None
    test_source: str
    fingerprint: str
    relevance: LabelRelevance
    smoothing: Smoothing | None = None
    people_queries: LabelledTexts | None = None
    columns: Sequence[Sequence[str]] = ()
    run_journal: RunJournal | None = None
    bad_rows: Mapping[str, int] = field(default_factory=dict)


def prepare(config: LinearConfig, run_journal: RunJournal | None = None, vectoriser: Vectoriser | None = None) -> Prepared:
    """Read the data of a configuration, with the items of a journal. Raises InvalidData or InvalidConfig.

    vectoriser  to use instead of one fitted to the training texts
    """
    if isinstance(config.data, LogData):
        return _from_texts(config, config.data, run_journal, vectoriser)
    return _from_points(config, config.data, run_journal)


def read_points(data: XmcData | NpzData, test: bool = False, graded: bool = False) -> LabelledPoints:
    """The training points, or the test points, as the files have them.

    graded  whether training labels have weights; then the test file must have them too
    """
    if isinstance(data, XmcData):
        return read_xmc(_existing(data.test) if test else data.train, _label_weights(data, graded))
    files = (data.test, data.test_labels) if test else (data.train, data.train_labels)
    points, labels = (read_by_rows(_existing(file)) for file in files)
    if points.shape[0] != labels.shape[0]:
        raise InvalidData(str(files[1]), f"{labels.shape[0]} rows", f"{points.shape[0]}, one per point of {files[0]}")
    return LabelledPoints(points, checked(str(files[1]), labels))


def read_queries(bundle: Bundle, file: Path) -> LabelledQueries:
    """The queries of a file, in the format of the data that a bundle was trained on, that have a relevant item.

    Raises InvalidConfig if the bundle was not trained here; InvalidData if its format has no such file, or the file's features or labels
    are not the bundle's.
    """
    config = config_of(bundle.manifest, LinearConfig)
    kind, items = bundle.manifest.query, bundle.items
    if isinstance(config.data, LogData) and isinstance(kind, TextKind):
        smoothing, bad_rows = _smoothing_of(bundle, config.data), BadRows(config.data.bad_rows, config.data.SECTION)
        known_items = _known_items(items, None, "the model's item table")
        texts = labelled(_read_pairs(config.data, file, bad_rows, known_items), _rows_of(items), smoothing)
        points = _vectorised(bundle.vectoriser, texts)
    elif isinstance(config.data, XmcData) and isinstance(kind, FeaturesKind):
        graded = config.relevance.source == "weights" and RELEVANCE in bundle.manifest.data
        points = read_xmc(file, _label_weights(config.data, graded))
        shapes = points.points.shape[1], points.labels.shape[1]
        if shapes != (kind.width, len(items)):
            raise InvalidData(str(file), f"{shapes[0]} features and {shapes[1]} labels", f"{kind.width} features and {len(items)} labels")
        points = _unit(points) if kind.unit else points
    else:
        raise InvalidData(
            "--data", str(file), f"data of format xmc or log, not {config.data.format}: without a file the held-out queries are taken"
        )
    counts = bundle.label_counts()
    if counts is not None:
        points = LabelledPoints(points.points, LabelRelevance(config.relevance, counts).of(points.labels))
    points = points.take(np.flatnonzero(np.diff(points.labels.indptr)))
    positions = range(len(points))
    grades = grades_of(bundle, [points.weights_of(b) for b in positions])
    return LabelledQueries(QueryBatch(kind, as_rows(points.points)), [points.labels_of(b) for b in positions], grades=grades)


def _label_weights(data: XmcData, graded: bool) -> bool | None:
    """Whether a file's labels have weights. A file that could be either is read like the training file."""
    return True if data.label_weights is None and graded else data.label_weights


def _smoothing_of(bundle: Bundle, data: LogData) -> Smoothing | None:
    """The smoothing of a bundle's training log. Raises BundleCorrupt if the manifest lacks it."""
    if data.views is None:
        return None
    prior = bundle.manifest.data.get("prior")
    if not isinstance(prior, float) or not 0 <= prior <= 1:
        raise BundleCorrupt(f"{bundle.path}: data.prior of the manifest is {prior!r}, expected a rate from 0 to 1")
    return Smoothing(prior, data.smoothing)


def written_features(points: SparseRows) -> pa.Array:
    """Points as queries of features in a table: structs of `indices` and `values`."""
    indices = pa.ListArray.from_arrays(pa.array(points.indptr, pa.int32()), pa.array(points.indices.astype(np.int64)))
    values = pa.ListArray.from_arrays(pa.array(points.indptr, pa.int32()), pa.array(points.values))
    return pa.StructArray.from_arrays([indices, values], ["indices", "values"])


def _from_points(config: LinearConfig, data: XmcData | NpzData, run_journal: RunJournal | None) -> Prepared:
    train = read_points(data)
    _check_size(data, train)
    if data.test is not None:
        test = read_points(data, test=True, graded=is_graded(train.labels))
        for name, count, expected in (
            ("features", test.points.shape[1], train.points.shape[1]),
            ("labels", test.labels.shape[1], train.labels.shape[1]),
        ):
            if count != expected:
                raise InvalidData(str(data.test), f"{count} {name}", f"{expected}, as in {data.train}")
    else:
        held_out, training = _split(_contents(train.points), data.test_share, config.seed)
        train, test = train.take(training), train.take(held_out)
    labels = train.labels.shape[1]
    ids = pa.array(np.arange(labels)).cast(pa.large_string())
    items = ItemTable.build(pa.table({"id": ids})) if data.items is None else _table(data.items, data)
    if len(items) != labels:
        raise InvalidData(str(data.items), f"{len(items)} items", f"{labels}, one per label, in their order")
    if run_journal is not None:
        old_items, items = items, joined_items(items, run_journal.items, run_journal.held_through)
        train, test = (joined_points(points, old_items, items) for points in (train, test))
        new_items = new_ids(old_items, items)
        train = with_live_points(train, new_items, run_journal.items, items)
        train = LabelledPoints(train.points, with_likes(train.labels, new_items, run_journal.items, items))
    written_queries = written_features(as_rows(test.points))
    if data.unit:
        train, test = _unit(train), _unit(test)
    relevance = LabelRelevance.of_training(config.relevance, train.labels)
    train, test = (LabelledPoints(points.points, relevance.of(points.labels)) for points in (train, test))
    _check_something_is_left(config, train.labels)
    kind = FeaturesKind(width=train.points.shape[1], unit=data.unit)
    test_source = OF_TRAINING if data.test is None else OF_TEST
    common = _fingerprint(config), relevance
    return Prepared(train, test, written_queries, items, None, kind, None, test_source, *common, run_journal=run_journal)


def _check_size(data: XmcData | NpzData, train: LabelledPoints) -> None:
    """Raise InvalidData without features, or with so many features or labels that their number alone would fill the memory."""
    for name, count, least, most in (
        ("features", train.points.shape[1], 1, MAX_FEATURES),
        ("labels", train.labels.shape[1], 0, MAX_LABELS),
    ):
        if not least <= count <= most:
            raise InvalidData(str(data.train), f"{count} {name}", f"at least {least}" if count < least else f"at most {most}")


def _from_texts(config: LinearConfig, data: LogData, run_journal: RunJournal | None, vectoriser: Vectoriser | None) -> Prepared:
    bad_rows = BadRows(data.bad_rows, data.SECTION)
    items = None if data.items is None else _table(data.items, data)
    known_items = None if items is None else _known_items(items, run_journal, "the item table")
    pairs = pl.DataFrame(schema=PAIRS) if data.train is None else _with_one_text_each(_read_pairs(data, data.train, bad_rows, known_items))
    if items is None:
        items = ItemTable.build(pa.table({"id": pairs["item"].unique(maintain_order=True).to_arrow()}))
        known_items = _known_items(items, run_journal, "the training log")
    for name in data.own_texts:
        if name not in items.fields:  # files ignore case, but fields of live items have these names
            raise InvalidConfig("data.own_texts", name, f"some of the item table's columns: {', '.join(items.fields)}")
    columns = _own_texts(data) if data.own_texts else []
    queries = _other_queries(pairs.select(pl.col("query").unique(maintain_order=True)), columns)
    if data.test is not None:
        test_pairs, test_source = _read_pairs(data, data.test, BadRows(data.bad_rows, data.SECTION), known_items), OF_TEST
        _warn_of_learned(data.test, test_pairs["query"].unique(), pairs["query"].unique())
    elif not data.own_texts or round(data.test_share * len(queries)):
        held_out, test_source = queries[_split(_words_of(queries["query"]).to_list(), data.test_share, config.seed)[0]], OF_LOG
        test_pairs, pairs = (pairs.join(held_out, on="query", how=how, maintain_order="left") for how in ("semi", "anti"))
    else:
        test_pairs, test_source = made_queries(items.column("id").to_pylist(), columns, data.test_share, config.seed), OF_ITEMS
    new_items: list[str] = []
    if run_journal is not None:
        old_items, items = items, joined_items(items, run_journal.items, run_journal.held_through)
        new_items = new_ids(old_items, items)
        test_pairs, pairs = (without_gone(part, run_journal.items) for part in (test_pairs, pairs))
        pairs = pl.concat([pairs, live_pairs(new_items, run_journal.items, pairs.columns)])
        frame = pl.DataFrame({name: pl.Series(name, items.column(name)) for name in dict.fromkeys(data.own_texts)})
        columns = with_live_texts(_columns(frame), new_items, run_journal.items, items)
    people_texts = pairs["query"].unique()
    pairs = pl.concat([pairs, *(_text_pairs(items, texts, people_texts) for texts in columns)])
    smoothing = None
    if data.views is not None:
        smoothing = Smoothing.of(pairs["views"].to_numpy(), pairs["clicks"].to_numpy(), data.smoothing)
    train_texts, test_texts = (labelled(part, _rows_of(items), smoothing) for part in (pairs, test_pairs))
    if run_journal is not None:
        train_texts = LabelledTexts(train_texts.texts, with_likes(train_texts.labels, new_items, run_journal.items, items))
    log.info("%d queries to learn from, %d items; %d queries to measure on: %s", len(train_texts), len(items), len(test_texts), test_source)
    if test_source == OF_ITEMS:
        log.warning("figures will be of queries %s: people's find less. Give some in data.test or data.train", test_source)
    relevance = LabelRelevance.of_training(config.relevance, train_texts.labels)
    train_texts, test_texts = (LabelledTexts(part.texts, relevance.of(part.labels)) for part in (train_texts, test_texts))
    _check_something_is_left(config, train_texts.labels)
    vectoriser = vectoriser or Vectoriser.fit(train_texts.texts, config.blocks)
    if columns and not len(people_texts) and config.linear.prior > 0 and config.linear.min_positives > 0 and config.tail.form == "none":
        train_texts = LabelledTexts([], train_texts.labels[:0])  # neither nodes (`fit_linear`) nor a tail would learn anything from it
    train = _vectorised(vectoriser, train_texts)
    if columns:
        texts = pl.Series(train_texts.texts, dtype=pl.String)
        seen_B, own_B = (~texts.is_in(others.implode()).to_numpy() for others in (queries["query"], people_texts))
        train = LabelledPoints(train.points, train.labels, seen_B, own_B)
    own_texts, weights = None, list(data.own_weights)
    if columns:
        weights = weights or chosen_weights(vectoriser, columns, train)
        own_texts = OwnTexts.of(vectoriser, columns, weights, data.near_items, DEFAULT_QUERIES)
        if len(people_texts):
            own_texts = replace(own_texts, queries=chosen_queries(train, own_texts.rows, config.linear))
    kind = TextKind(width=vectoriser.width, blocks=config.blocks)
    test, written_queries = _vectorised(vectoriser, test_texts), pa.array(test_texts.texts, pa.string())
    people_rows = train.asked
    people_queries = LabelledTexts([train_texts.texts[row] for row in people_rows.tolist()], train_texts.labels[people_rows])
    common = _fingerprint(config), relevance, smoothing, people_queries, columns, run_journal, bad_rows.counts
    return Prepared(train, test, written_queries, items, own_texts, kind, vectoriser, test_source, *common)


def _own_texts(data: LogData) -> list[list[str]]:
    names = [data.items_id if name == "id" else name for name in data.own_texts]
    return _columns(read_columns(_existing(data.items), names, data.items_format))


def _columns(frame: pl.DataFrame) -> list[list[str]]:
    return [texts_of(frame, [column]) for column in frame.columns]


def _text_pairs(items: ItemTable, texts: Sequence[str], people_texts: pl.Series) -> pl.DataFrame:
    """Pairs of the texts of a column and their items, without texts that are people's queries: for these the log has the items."""
    pairs = pl.DataFrame({"query": texts, "item": items.column("id").to_pylist(), "weight": 1.0}, schema=PAIRS)
    return pairs.filter((pl.col("query") != "") & ~pl.col("query").is_in(people_texts.implode()))


def _with_one_text_each(pairs: pl.DataFrame) -> pl.DataFrame:
    """The log with one text, the first, for queries of the same words. They are one query to the model: one may not be learned from and the
    other be held out.
    """
    queries = pairs.select(pl.col("query").unique(maintain_order=True))
    text = pl.col("query").first().over(_words_of(queries["query"]))
    return pairs.join(queries.with_columns(text.alias("text")), on="query", maintain_order="left").select(
        pl.col("text").alias("query"), pl.exclude("query", "text")
    )


def _other_queries(queries: pl.DataFrame, columns: Sequence[Sequence[str]]) -> pl.DataFrame:
    """The queries (a column of distinct texts) whose words are not those of an item's text, or of all its texts together."""
    if not columns or not len(queries):
        return queries
    joined_texts = [" ".join(filter(None, texts)) for texts in zip(*columns, strict=True)]
    texts = _words_of(pl.Series([text for column in (*columns, joined_texts) for text in column], dtype=pl.String))
    return queries.filter(~_words_of(queries["query"]).is_in(texts.implode()))


def _warn_of_learned(file: Path, test_queries: pl.Series, queries: pl.Series) -> None:
    """Warn of test queries with the same words as a query of the log: the model has learned their answers."""
    learned = _words_of(test_queries).is_in(_words_of(queries).implode()).sum()
    if learned:
        advice = "If these are the same searches, leave them out of the log"
        log.warning("%s: %d of %d test queries are in the log, too. %s", file, learned, len(test_queries), advice)


def _words_of(texts: pl.Series) -> pl.Series:
    """The words of each text, as the model reads them, with blanks between them."""
    return pl.Series([" ".join(words_of(text)) for text in texts], dtype=pl.String)


def _check_something_is_left(config: LinearConfig, labels: Csr) -> None:
    if labels.nnz:
        return
    if config.relevance.threshold > 0:
        raise InvalidConfig("relevance.threshold", config.relevance.threshold, "a number that some training label reaches")
    raise InvalidData("data", f"{labels.shape[0]} training points without a label of a weight above 0", "labels to learn from")


def _vectorised(vectoriser: Vectoriser, texts: LabelledTexts) -> LabelledPoints:
    return LabelledPoints(as_matrix(vectoriser.transform(texts.texts)), texts.labels)


def _unit(data: LabelledPoints) -> LabelledPoints:
    return LabelledPoints(normalised(data.points), data.labels)


def _split(names: Sequence[str], share: float, seed: int) -> tuple[Int64, Int64]:
    """The held-out positions of some queries, by their names, and the other positions, both ascending. Those of equal names stay together:
    of these groups, in random order, each that the share has room for is held out.
    """
    numbers, room = numbers_of(names, seed, "queries"), round(share * len(names))
    if room == len(names):
        raise InvalidData("data", f"{len(names)} queries", "enough of them to learn from")
    order = np.argsort(numbers, kind="stable")
    begins = np.flatnonzero(np.diff(numbers[order], prepend=~numbers[order[:1]]))
    is_held_out = np.zeros(len(names), np.bool_)
    for begin, size in zip(begins.tolist(), np.diff(begins, append=len(names)).tolist(), strict=True):
        if size <= room:
            is_held_out[order[begin : begin + size]] = True
            room -= size
        if not room:
            break
    return np.flatnonzero(is_held_out), np.flatnonzero(~is_held_out)


def _contents(points: Csr) -> list[str]:
    """A name of each point: equal points have the same, and others different ones."""
    rows = as_rows(points)
    return [hashlib.sha256(b"".join(array.tobytes() for array in rows.row(b))).hexdigest() for b in range(len(rows))]


def _read_pairs(data: LogData, file: Path, bad_rows: BadRows, known_items: KnownIds | None) -> pl.DataFrame:
    """The rows of a log; queries that are ids are replaced by their texts. known_items: None: all are"""
    known_ids = {} if known_items is None else {"item": known_items}
    if data.texts is None:
        return read_log(file, data.query, data.item, data.numbers, data, bad_rows, known_ids)
    texts = _texts_by_id(data.texts, data.text_columns, data.items_format)
    known_ids["query"] = KnownIds(texts["query"], f"an id of {data.texts}")
    pairs = read_log(file, data.query, data.item, data.numbers, data, bad_rows, known_ids)
    joined = pairs.join(texts, on="query", how="left", maintain_order="left")
    return joined.select(pl.col("text").alias("query"), pl.exclude("query", "text"))


def _known_items(items: ItemTable, run_journal: RunJournal | None, table: str) -> KnownIds:
    """The ids of a table and of a journal."""
    live_ids = [] if run_journal is None else [*run_journal.items.put, *run_journal.items.gone]
    return KnownIds(pl.Series([*items.ids_of(np.arange(len(items))), *live_ids], dtype=pl.String), f"an id of {table}")


def _texts_by_id(file: Path, columns: tuple[str, ...], form: TextTable) -> pl.DataFrame:
    """Columns `query`, the ids of a table, and `text`. Raises InvalidData for an id of two rows."""
    frame = read_columns(file, ["id", *columns], form)
    texts = pl.DataFrame({"query": _ids(file, frame), "text": texts_of(frame, columns)}).drop_nulls("query")
    repeated_ids = texts["query"].filter(texts["query"].is_duplicated())
    if len(repeated_ids):
        raise InvalidData(f"{file.name}: column id", repeated_ids[0], "each id once")
    return texts


def _table(file: Path, data: XmcData | NpzData | LogData) -> ItemTable:
    return item_table(file, None, data.items_format, data.items_id)


def _ids(file: Path, frame: pl.DataFrame) -> pl.Series:
    """The column `id` as strings."""
    return ids_of(RowSource(file.name, {"id": "id"}, table_row), "id", frame["id"])


def _rows_of(items: ItemTable) -> dict[str, int]:
    ids = items.ids_of(np.arange(len(items)))
    return {item_id: row for row, item_id in enumerate(ids)}


def _existing(file: Path | None) -> Path:
    if file is None:
        raise InvalidConfig("data.test", MISSING, "a file")
    return file


def _fingerprint(config: LinearConfig) -> str:
    """SHA-256 of the data files, in the order of the configuration's keys."""
    digest = hashlib.sha256()
    for name, value in sorted(config.data.model_dump().items()):
        if isinstance(value, Path):
            with value.open("rb") as stream:
                digest.update(json.dumps(name).encode() + hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()
