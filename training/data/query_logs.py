"""Reads logs of query texts with the items that they led to, as texts with weighted labels.

Knows CSV and Parquet files and tables of texts. Does not know n-grams: see espalier.text.vectoriser.

Legend: B queries, I items.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import polars as pl
from scipy.sparse import csr_array

from espalier.arrays import Bool
from espalier.errors import InvalidData
from espalier.logs.log_columns import position_of
from espalier.logs.log_values import BadRows, RowSource, table_row, warn_of_float_ids
from espalier.logs.parquet_logs import is_parquet
from espalier.logs.text_files import whole_table

from ..data.csr import Csr
from ..data.relevance import LARGEST, WEIGHTS, Smoothing, are_weights
from ..specification.log_format import TextTable


@dataclass(frozen=True, eq=False)
class LabelledTexts:
    """B different texts with their items.

    labels  float32[B, I]: the weight of each item that a text led to, above 0
    """

    texts: list[str]
    labels: Csr

    def __len__(self) -> int:
        return len(self.texts)


class KnownIds(NamedTuple):
    """The ids that a column may have (strings), and in words what such an id is."""

    ids: pl.Series
    expected: str


def read_log(
    file: Path,
    query: str,
    item: str,
    numbers: Mapping[str, str],
    form: TextTable,
    bad_rows: BadRows,
    known_ids: Mapping[str, KnownIds] = MappingProxyType({}),
) -> pl.DataFrame:
    """Columns `query` and `item` (strings), and `weight`, or `views` and `clicks` (float64), of a CSV, TSV or Parquet file, gzipped or not.

    numbers    the file's columns of `weight`, or of `views` and `clicks`; empty: every row has the weight 1
    form       format of a text file
    bad_rows   refuses or counts unreadable rows
    known_ids  the ids of `item`, if not all are allowed, and of `query`, if it has ids
    Raises InvalidData if the file is unreadable or lacks a column, if items are no ids, or for a row without a query or an item (null or
    empty), with an unknown id, or with an invalid number.
    """
    frame, source = _read(file, {"query": query, "item": item, **numbers}, form, bad_rows)
    typed = frame.select(
        ids_of(source, "query", frame["query"]) if "query" in known_ids else _cast(file, frame["query"], pl.String),
        ids_of(source, "item", frame["item"]),
        *(_cast(file, _with_point(frame[name], form), pl.Float64).fill_null(np.nan) for name in numbers),
        *([] if numbers else [pl.lit(1.0).alias("weight")]),
    )
    right_B = np.ones(len(frame), bool)

    def check(role: str, right: Bool, expected: str, problem: str = "wrong") -> None:
        wrong = np.flatnonzero(right_B & ~right)
        bad_rows.add(f"{problem} {role}", wrong, lambda row: source.problem(role, row, frame[role][row], expected))
        right_B[wrong] = False

    for role, expected in (("query", "a text"), ("item", "an item id")):
        check(role, typed.select(pl.col(role).fill_null("") != "").to_series().to_numpy(), expected)
    for role, known in known_ids.items():
        is_known = typed[role].is_in(known.ids.implode()).fill_null(False)
        check(role, is_known.to_numpy(), known.expected, "unknown")
    for name in numbers:
        values = typed[name].to_numpy()
        right, expected = are_weights(values), WEIGHTS
        if name == "views":
            right, expected = right & (values > 0), f"a number above 0, at most {LARGEST:g}"
        if name == "clicks":
            right, expected = right & (values <= typed["views"].to_numpy()), "a number from 0 to that of the views"
        check(name, right, expected)
    bad_rows.rows_read += int(right_B.sum())
    bad_rows.finish()
    if not right_B.any():
        raise InvalidData(file.name, "no rows", "at least one query with its item")
    pairs = typed.filter(right_B)
    warn_of_float_ids(file.name, item, pairs["item"].to_arrow())
    return pairs


def ids_of(source: RowSource, role: str, values: pl.Series) -> pl.Series:
    """A column of ids as strings. Raises InvalidData for a column of other values than strings and whole numbers."""
    if values.dtype == pl.String:
        return values
    return pl.Series(values.name, pl.from_arrow(source.strings(role, values.to_arrow())), pl.String)


def _with_point(values: pl.Series, form: TextTable) -> pl.Series:
    """Numbers in text, with a decimal point."""
    return values.str.replace(form.decimal, ".", literal=True) if form.decimal != "." and values.dtype == pl.String else values


def _cast(file: Path, column: pl.Series, dtype: type[pl.DataType]) -> pl.Series:
    """The column with another type, null for values that cannot be cast. Raises InvalidData for lists and other types without casts."""
    try:
        return column.cast(dtype, strict=False)
    except pl.exceptions.PolarsError as error:
        raise InvalidData(
            f"{file.name}: column {column.name}", f"a column of {column.dtype}", f"a column that can be read as {dtype()}"
        ) from error


def read_columns(file: Path, columns: Sequence[str], form: TextTable) -> pl.DataFrame:
    """Some columns of a CSV, TSV or Parquet file. Raises InvalidData, which names a missing column. form: format of a text file."""
    bad_rows = BadRows(form.bad_rows, form.SECTION)
    frame, _ = _read(file, {column: column for column in columns}, form, bad_rows)
    bad_rows.rows_read += len(frame)
    bad_rows.finish()
    return frame


def _read(file: Path, columns: Mapping[str, str], form: TextTable, bad_rows: BadRows) -> tuple[pl.DataFrame, RowSource]:
    """A column for each role, and their source."""
    try:
        if not is_parquet(file):
            table, source = whole_table(form.file(file), columns, bad_rows)
            return pl.DataFrame(pl.from_arrow(table)), source
        frame = pl.read_parquet(file)
    except (OSError, pl.exceptions.PolarsError) as error:
        raise InvalidData(str(file), str(error).splitlines()[0], "a readable Parquet file") from error
    positions = {role: position_of(frame.columns, column) for role, column in columns.items()}
    for role, position in positions.items():
        if position is None:
            raise InvalidData(f"{file.name}: column {role}", columns[role], f"one of {frame.columns}, once")
    series = [frame.to_series(position).alias(role) for role, position in positions.items() if position is not None]
    return pl.DataFrame(series), RowSource(file.name, columns, table_row)


def texts_of(frame: pl.DataFrame, columns: Sequence[str]) -> list[str]:
    """The values of some columns, joined by spaces; so are the entries of a list. Nulls are left out.

    Raises InvalidData for a column whose values cannot be written as texts.
    """

    def text(column: str) -> pl.Expr:
        is_list = isinstance(frame.schema[column], pl.List | pl.Array)
        return pl.col(column).cast(pl.List(pl.String)).list.join(" ") if is_list else pl.col(column).cast(pl.String)

    series: list[pl.Series] = []
    for column in columns:
        try:
            series.append(frame.select(text(column).alias(f"{len(series)}")).to_series())
        except pl.exceptions.PolarsError as error:
            raise InvalidData(f"column {column}", f"values of {frame.schema[column]}", "texts, numbers, or lists of them") from error
    return pl.DataFrame(series).select(pl.concat_str(pl.all(), separator=" ", ignore_nulls=True))[:, 0].to_list()


def labelled(pairs: pl.DataFrame, row_of: dict[str, int], smoothing: Smoothing | None = None) -> LabelledTexts:
    """Texts with labels, in the order of first appearance, from pairs of `query`, `item` and numbers. Numbers of equal pairs are summed.

    smoothing  turns `views` and `clicks` into weights; None: pairs have a `weight`. Labels of weight 0 are left out, texts are not
    row_of     the row of every item of the pairs
    """
    labelled_pairs = pairs.with_columns(pl.col("item").replace_strict(row_of, return_dtype=pl.Int64).alias("label"))
    texts = labelled_pairs.select(pl.col("query").unique(maintain_order=True)).with_row_index("b")
    numbers = ["weight"] if smoothing is None else ["views", "clicks"]
    merged = labelled_pairs.join(texts, on="query").group_by("b", "label").agg(pl.col(numbers).sum()).sort("b", "label")
    sums = [merged[name].to_numpy() for name in numbers]
    weights = (sums[0] if smoothing is None else smoothing.rates(*sums)).astype(np.float32)
    labels = csr_array((weights, (merged["b"].to_numpy(), merged["label"].to_numpy())), shape=(len(texts), len(row_of)))
    labels.eliminate_zeros()
    return LabelledTexts(texts["query"].to_list(), labels)
