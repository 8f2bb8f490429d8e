"""Queries that a ranker learns from, out of a file of judgements: a row for each judged item of a query.

Knows the columns of the file and checks them. Does not know what a model retrieves.
"""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

from espalier.bundle import Bundle
from espalier.checks.golden import encode_table
from espalier.errors import InvalidData
from espalier.rerank.features import CallerFeatures

from ..data.ranking_set import MAX_GRADE
from ..rankers.graded_queries import GradedQueries, QuerySplit

log = logging.getLogger(__name__)

MIN_QUERIES = 10
"""With fewer, a tenth of the queries would be none."""


def from_judgements(bundle: Bundle, file: Path, seed: int) -> QuerySplit:
    """The queries of a Parquet file with a row for each judged item: `query_id`, the query as the model takes it (a column named as its
    kind), `item`, `grade` (0 to MAX_GRADE) and any columns `query.NAME` and `item.NAME`, which become features of the ranker.

    A tenth of the queries choose the weights, a tenth measure them. Items without a judgement have the grade 0. Raises InvalidData, which
    names the row.
    """
    frame, features = _read(file, bundle.manifest.query.kind)
    row_of = bundle.items.rows_of(frame["item"].fill_null("").to_list())
    if (row_of < 0).all():
        [example] = bundle.items.ids_of(np.arange(1))
        raise InvalidData(f"{file}, item", frame["item"][:3].to_list(), f"ids of the catalogue's items, such as {example!r}")
    if (row_of < 0).any():
        log.warning("%d of %d judged items are not in the catalogue", int((row_of < 0).sum()), len(row_of))
    queries = _graded_queries(bundle, file, frame.with_columns(pl.Series("row", row_of)), features)
    if len(queries) < MIN_QUERIES:
        raise InvalidData(str(file), f"{len(queries)} queries", f"at least {MIN_QUERIES}")
    order, tenth = np.random.default_rng(seed).permutation(len(queries)), len(queries) // 10
    splits = (order[2 * tenth :], order[:tenth], order[tenth : 2 * tenth])
    return QuerySplit(*(queries.take(np.sort(split)) for split in splits))


def _read(file: Path, query_column: str) -> tuple[pl.DataFrame, list[str]]:
    """The checked table, its numbers as float64, and the names of its feature columns."""
    try:
        frame = pl.read_parquet(file)
    except (OSError, pl.exceptions.PolarsError) as error:
        raise InvalidData(str(file), str(error).splitlines()[0], "a readable Parquet file") from error
    for column in ("query_id", query_column, "item", "grade"):
        if column not in frame.columns:
            raise InvalidData(f"{file}, columns", frame.columns, f"a column {column!r}")
    features = [name for name in frame.columns if name.startswith(("query.", "item."))]
    for name in ("grade", *features):
        if not (frame.schema[name].is_numeric() or frame.schema[name] == pl.Boolean):
            raise InvalidData(f"{file}, {name}", str(frame.schema[name]), "a column of numbers")
    frame = frame.with_columns(pl.col("grade", *features).cast(pl.Float64), pl.col("item").cast(pl.String))
    for name in features:
        infinite = frame[name].is_infinite().fill_null(False)
        if infinite.any():
            row = int(infinite.arg_max() or 0)
            raise InvalidData(f"{file}, row {row} (from 0), {name}", frame[name][row], "a finite number, or NaN where it is missing")
    for name in ("query_id", "item"):
        if frame[name].null_count():
            raise InvalidData(f"{file}, row {frame[name].is_null().arg_max()} (from 0), {name}", None, "a value")
    is_wrong = ~frame["grade"].is_between(0, MAX_GRADE).fill_null(False)
    if is_wrong.any():
        row = int(is_wrong.arg_max() or 0)
        raise InvalidData(f"{file}, row {row} (from 0), grade", frame["grade"][row], f"a number from 0 to {MAX_GRADE}")
    return frame, features


def _graded_queries(bundle: Bundle, file: Path, frame: pl.DataFrame, features: list[str]) -> GradedQueries:
    """One query for each `query_id`; `frame` has the item rows in a column `row`."""
    kind = bundle.manifest.query.kind
    groups = frame.group_by("query_id", maintain_order=True).agg(pl.all())
    for name in (kind, *(name for name in features if name.startswith("query."))):
        several = groups.filter(groups[name].list.n_unique() > 1)
        if len(several):
            field = f"{file}, query_id {several['query_id'][0]}, {name}"
            raise InvalidData(field, several[name][0].to_list(), "the same in all rows of a query")
    queries = encode_table(bundle, pa.table({kind: groups[kind].list.first().to_arrow()}))
    items, grades, caller_features = [], [], []
    for group in groups.iter_rows(named=True):
        rows, grade = np.array(group["row"], np.int64), np.array(group["grade"], np.float32)
        if len(np.unique(rows[rows >= 0])) != np.count_nonzero(rows >= 0):
            raise InvalidData(f"{file}, query_id {group['query_id']}", "an item twice", "each item once for a query")
        relevant = (rows >= 0) & (grade > 0)
        items.append(rows[relevant])
        grades.append(grade[relevant])
        caller_features.append(_caller_features(group, features, rows))
    return GradedQueries(queries, items, grades, None, caller_features if features else [])


def _caller_features(group: dict[str, list[float | None]], names: list[str], rows: NDArray[np.int64]) -> CallerFeatures:
    query = {name.removeprefix("query."): group[name][0] for name in names if name.startswith("query.")}
    items: dict[int, dict[str, float]] = {}
    for name in names:
        if name.startswith("item."):
            for row, value in zip(rows.tolist(), group[name], strict=True):
                if row >= 0 and value is not None:
                    items.setdefault(row, {})[name.removeprefix("item.")] = value
    return CallerFeatures({name: value for name, value in query.items() if value is not None}, items)
