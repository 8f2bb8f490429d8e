"""Logs of query texts and the items that they led to, as texts with weighted labels.

Knows CSV and Parquet files and tables of texts. Does not know n-grams: see espalier.text.vectoriser.

Legend: B queries, I items.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray
from scipy.sparse import csr_array

from espalier.errors import InvalidData
from training.data.csr import Csr
from training.data.item_tables import is_text, separator_of
from training.data.log_files import line_of, open_text
from training.data.relevance import LARGEST, WEIGHTS, Smoothing, are_weights

SEPARATORS = (";", "\t", "|", ",")
"""Of fields, the surest first: texts have commas in them."""


@dataclass(frozen=True, eq=False)
class LabelledTexts:
    """B different texts with their items.

    labels  float32[B, I]: the weight of each item that a text led to, above 0
    """

    texts: list[str]
    labels: Csr

    def __len__(self) -> int:
        return len(self.texts)


def read_log(file: Path, query: str, item: str, numbers: Mapping[str, str], separator: str | None = None) -> pl.DataFrame:
    """Columns `query` and `item` (strings), and `weight`, or `views` and `clicks` (float64), of a CSV, TSV or Parquet file, gzipped or not.

    numbers    the file's columns of `weight`, or of `views` and `clicks`; empty: every row has the weight 1
    separator  as in `read_table`
    Raises InvalidData where the file is not readable, lacks a column, or has a row without a query or an item, or with a number that
    cannot be.
    """
    frame = read_table(file, [query, item, *numbers.values()], separator)
    given = pl.DataFrame(
        [
            _cast(file, frame[query], pl.String).alias("query"),
            _cast(file, frame[item], pl.String).alias("item"),
            *(_cast(file, frame[column], pl.Float64).fill_null(np.nan).alias(name) for name, column in numbers.items()),
            *([] if numbers else [pl.repeat(1.0, len(frame), eager=True).alias("weight")]),
        ]
    )
    _refuse(file, query, frame[query], given["query"].is_null().to_numpy(), "a text")
    _refuse(file, item, frame[item], given["item"].is_null().to_numpy(), "an item id")
    for name, column in numbers.items():
        values = given[name].to_numpy()
        right, expected = are_weights(values), WEIGHTS
        if name == "views":
            right, expected = right & (values > 0), f"a number above 0, at most {LARGEST:g}"
        if name == "clicks":
            right, expected = right & (values <= given["views"].to_numpy()), "a number from 0 to that of the views"
        _refuse(file, column, frame[column], ~right, expected)
    return given


def _cast(file: Path, column: pl.Series, dtype: type[pl.DataType]) -> pl.Series:
    """Null where a value cannot be cast. Raises InvalidData for lists and whatever else has no such values."""
    try:
        return column.cast(dtype, strict=False)
    except pl.exceptions.PolarsError as error:
        raise InvalidData(f"{file}, {column.name}", f"a column of {column.dtype}", f"a column that can be read as {dtype()}") from error


def _refuse(file: Path, column: str, values: pl.Series, wrong: NDArray[np.bool_], expected: str) -> None:
    if wrong.any():
        row = int(wrong.argmax())
        where = f"line {line_of(file, row + 1, empty=True)}" if is_text(file) else f"row {row + 1}"
        raise InvalidData(f"{file}, {where}, {column}", values[row], expected)


def read_table(file: Path, columns: Sequence[str], separator: str | None = None) -> pl.DataFrame:
    """Some columns of a CSV, TSV or Parquet file. Raises InvalidData naming a column that is not there.

    separator  of fields of text; None: the one that the file's name says
    """
    mark = separator or separator_of(file)
    try:
        frame = pl.read_csv(file, separator=mark, infer_schema=False) if is_text(file) else pl.read_parquet(file)
    except (OSError, pl.exceptions.PolarsError) as error:
        expected = f"a readable .csv, .tsv or Parquet file{_with_separator(file, mark)}"
        raise InvalidData(str(file), str(error).splitlines()[0], expected) from error
    for column in columns:
        if column not in frame.columns:
            raise InvalidData(f"{file}, columns", frame.columns, f"a column {column!r}{_with_separator(file, mark)}")
    return frame.select(list(dict.fromkeys(columns)))


def _with_separator(file: Path, separator: str) -> str:
    """What mends a text whose first line has other separators than the one that it was read with; empty where none looks like it."""
    if not is_text(file) or not file.is_file():
        return ""
    with open_text(file, None) as lines:
        header = lines.readline().decode("utf-8", "replace")
    other = next((mark for mark in SEPARATORS if mark in header), None)
    if other is None or separator in header:
        return ""
    return f"; its first line has {other!r} between fields: say so with data.separator, or, of other tables than the log, use ','"


def texts_of(frame: pl.DataFrame, columns: Sequence[str]) -> list[str]:
    """The values of some columns, joined by spaces; nulls are left out, the entries of a list are joined too."""

    def text(column: str) -> pl.Expr:
        many = isinstance(frame.schema[column], pl.List)
        return pl.col(column).cast(pl.List(pl.String)).list.join(" ") if many else pl.col(column).cast(pl.String)

    parts = [text(column) for column in columns]
    return frame.select(pl.concat_str(parts, separator=" ", ignore_nulls=True))[:, 0].to_list()


def labelled(pairs: pl.DataFrame, row_of: dict[str, int], smoothing: Smoothing | None = None) -> LabelledTexts:
    """Texts, in the order of their first appearance, from pairs of `query`, `item` and numbers; numbers of equal pairs are summed.

    smoothing  makes weights of `views` and `clicks`; None: pairs have a `weight`. Pairs of weight 0 are left out, texts are not
    Raises InvalidData for an item that `row_of` does not have.
    """
    items = pairs["item"].replace_strict(row_of, default=None, return_dtype=pl.Int64)
    if items.null_count():
        raise InvalidData("item", pairs["item"][int(items.is_null().arg_max() or 0)], "an id of the item table")
    known = pairs.with_columns(items.alias("label"))
    texts = known.select(pl.col("query").unique(maintain_order=True)).with_row_index("b")
    numbers = ["weight"] if smoothing is None else ["views", "clicks"]
    merged = known.join(texts, on="query").group_by("b", "label").agg(pl.col(numbers).sum()).sort("b", "label")
    sums = [merged[name].to_numpy() for name in numbers]
    weights = (sums[0] if smoothing is None else smoothing.rates(*sums)).astype(np.float32)
    labels = csr_array((weights, (merged["b"].to_numpy(), merged["label"].to_numpy())), shape=(len(texts), len(row_of)))
    labels.eliminate_zeros()
    return LabelledTexts(texts["query"].to_list(), labels)
