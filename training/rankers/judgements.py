"""Queries that a ranker learns from, out of a file of judgements: a row for each judged item of a query.

Knows the columns of the file and checks them. Does not know what a model retrieves.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa

from espalier.arrays import Int64
from espalier.bundle import Bundle
from espalier.checks.golden import encode_table
from espalier.errors import InvalidData, InvalidQuery
from espalier.rerank.features import CallerFeatures
from espalier.text.vectoriser import words_of

from ..data.ranking_set import MAX_GRADE
from ..rankers.graded_queries import GradedQueries, QuerySplit

log = logging.getLogger(__name__)

MIN_QUERIES = 10
"""With fewer, a tenth of the queries would be none."""
TYPES = {
    "query_id": (pa.large_string(), "texts or numbers"),
    "item": (pa.large_string(), "ids"),
    "history": (pa.large_list(pa.large_string()), "lists of item ids"),
    "text": (pa.large_string(), "texts"),
    "vector": (pa.large_list(pa.float64()), "lists of numbers"),
    "features": (
        pa.struct({"indices": pa.large_list(pa.int64()), "values": pa.large_list(pa.float64())}),
        "structs of two lists, indices (whole numbers) and values (numbers)",
    ),
}
"""The type of each column that is not of numbers, and what it holds."""


def from_judgements(bundle: Bundle, file: Path, seed: int) -> QuerySplit:
    """The queries of a Parquet file with a row for each judged item: `query_id`, the query as the model takes it (a column named as its
    kind), `item`, `grade` (0 to MAX_GRADE) and any columns `query.NAME` and `item.NAME`, which become features of the ranker.

    A tenth of the queries choose the weights, a tenth measure them; equal queries (texts: of equal words) with equal `query.NAME` are in
    one split. Items without a judgement have the grade 0. Raises InvalidData, which names the row or the `query_id`.
    """
    frame, features = _read(file, bundle.manifest.query.kind)
    row_of = _rows_of(bundle, f"{file}, item", frame["item"])
    queries, content_B = _graded_queries(bundle, file, frame.with_columns(pl.Series("row", row_of)), features)
    contents = int(content_B.max(initial=-1)) + 1
    if contents < MIN_QUERIES:
        raise InvalidData(str(file), f"{contents} different queries", f"at least {MIN_QUERIES}")
    order, tenth = np.random.default_rng(seed).permutation(contents), contents // 10
    splits = (order[2 * tenth :], order[:tenth], order[tenth : 2 * tenth])
    return QuerySplit(*(queries.take(np.flatnonzero(np.isin(content_B, split))) for split in splits), file=str(file))


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
    frame = frame.with_columns(pl.col("grade", *features).cast(pl.Float64))
    frame = frame.with_columns(_typed(file, frame[name], *TYPES[name]) for name in ("query_id", query_column, "item"))
    for name in features:
        infinite = frame[name].cast(pl.Float32).is_infinite().fill_null(False)
        if infinite.any():
            row = int(infinite.arg_max() or 0)
            raise InvalidData(f"{file}, row {row} (from 0), {name}", frame[name][row], "a finite 32-bit number, or NaN where it is missing")
    is_wrong = ~frame["grade"].is_between(0, MAX_GRADE).fill_null(False)
    if is_wrong.any():
        row = int(is_wrong.arg_max() or 0)
        raise InvalidData(f"{file}, row {row} (from 0), grade", frame["grade"][row], f"a number from 0 to {MAX_GRADE}")
    return frame, features


def _typed(file: Path, column: pl.Series, kind: pa.DataType, expected: str) -> pl.Series:
    """The column in a type. Raises InvalidData if it is of another one, or has a null."""
    try:
        typed = pl.Series(column.name, column.to_arrow().cast(kind))
    except pa.ArrowException as error:
        raise InvalidData(f"{file}, {column.name}", str(column.dtype), f"a column of {expected} ({str(error).splitlines()[0]})") from error
    is_null = typed.is_null()
    for part in typed.struct.unnest() if typed.dtype == pl.Struct else [typed]:
        is_null |= part.is_null()
        if part.dtype == pl.List:
            is_null |= part.list.eval(pl.element().is_null()).list.any().fill_null(False)
    if is_null.any():
        row = int(is_null.arg_max() or 0)
        [value] = column.slice(row, 1).to_list()
        raise InvalidData(f"{file}, row {row} (from 0), {column.name}", value, "a value" if value is None else f"{expected}, without null")
    return typed


def _rows_of(bundle: Bundle, field: str, ids: pl.Series) -> Int64:
    """Item rows of ids, −1 for those that the catalogue lacks: warns of some, raises InvalidData for all."""
    row_of = bundle.items.rows_of(ids.to_list())
    unknown = int((row_of < 0).sum())
    if unknown and unknown == len(row_of):
        [example] = bundle.items.ids_of(np.arange(1))
        raise InvalidData(field, ids[:3].to_list(), f"ids of the catalogue's items, such as {example!r}")
    if unknown:
        log.warning("%s: %d of %d are not in the catalogue", field, unknown, len(row_of))
    return row_of


def _graded_queries(bundle: Bundle, file: Path, frame: pl.DataFrame, features: list[str]) -> tuple[GradedQueries, Int64]:
    """One query for each `query_id`, and int64[B], a number for each different query. `frame` has the item rows in a column `row`."""
    kind = bundle.manifest.query.kind
    groups = frame.group_by("query_id", maintain_order=True).agg(pl.all())
    content = (kind, *(name for name in features if name.startswith("query.")))
    for name in content:
        several = groups.filter(groups[name].list.n_unique() > 1)
        if len(several):
            field = f"{file}, query_id {several['query_id'][0]}, {name}"
            raise InvalidData(field, several[name][0].to_list(), "the same in all rows of a query")
    first = groups[kind].list.first()
    if kind == "history":
        _rows_of(bundle, f"{file}, history", first.explode().drop_nulls())
    try:
        queries = encode_table(bundle, pa.table({kind: first.to_arrow()}))
    except InvalidQuery as error:
        field = re.sub(r"queries\[(\d+)\]\.", lambda match: f"query_id {groups['query_id'][int(match[1])]}, ", error.field)
        raise InvalidData(f"{file}, {field}", error.value, error.expected) from error
    items, grades, caller_features = [], [], []
    for group in groups.iter_rows(named=True):
        rows, grade = np.array(group["row"], np.int64), np.array(group["grade"], np.float32)
        known, counts = np.unique(rows[rows >= 0], return_counts=True)
        if (counts > 1).any():
            twice = bundle.items.ids_of(known[counts > 1][:1])[0]
            raise InvalidData(f"{file}, query_id {group['query_id']}, item", twice, "each item once for a query")
        relevant = (rows >= 0) & (grade > 0)
        items.append(rows[relevant])
        grades.append(grade[relevant])
        caller_features.append(_caller_features(group, features, rows))
    number_of: dict[int, int] = {}
    contents = groups.select(pl.col(content).list.first())
    if kind == "text":  # texts of the same words are one query to the model
        contents = contents.with_columns(pl.Series(kind, [" ".join(words_of(text)) for text in contents[kind]], dtype=pl.String))
    content_B = np.array([number_of.setdefault(hash(repr(row)), len(number_of)) for row in contents.iter_rows()], np.int64)
    return GradedQueries(queries, items, grades, None, caller_features if features else []), content_B


def _caller_features(group: dict[str, list[float | None]], names: list[str], rows: Int64) -> CallerFeatures:
    query = {name.removeprefix("query."): group[name][0] for name in names if name.startswith("query.")}
    items: dict[int, dict[str, float]] = {row: {} for row in rows.tolist() if row >= 0}
    for name in names:
        if name.startswith("item."):
            for row, value in zip(rows.tolist(), group[name], strict=True):
                if row >= 0 and value is not None:
                    items[row][name.removeprefix("item.")] = value
    return CallerFeatures({name: value for name, value in query.items() if value is not None}, items)
