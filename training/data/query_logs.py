"""Logs of query texts and the items that they led to, as texts with weighted labels.

Knows CSV and Parquet files and tables of texts. Does not know n-grams: see espalier.text.vectoriser.

Legend: B queries, I items.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from espalier.errors import InvalidData


@dataclass(frozen=True, eq=False)
class LabelledTexts:
    """B different texts with their items.

    labels_from, labels, weights  int64[B + 1], int32, float32: each text's item rows, ascending, and how much each counts
    """

    texts: list[str]
    labels_from: NDArray[np.int64]
    labels: NDArray[np.int32]
    weights: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, rows: NDArray[np.int64]) -> LabelledTexts:
        """The texts at some positions (int64)."""
        counts = np.diff(self.labels_from)[rows]
        begin = np.concatenate([[0], np.cumsum(counts)])
        entries = np.arange(begin[-1]) - np.repeat(begin[:-1], counts) + np.repeat(self.labels_from[rows], counts)
        return LabelledTexts([self.texts[b] for b in rows.tolist()], begin, self.labels[entries], self.weights[entries])


def read_log(file: Path, query: str, item: str, weight: str | None) -> pl.DataFrame:
    """Columns `query` (string), `item` (string), `weight` (float64) of a CSV, TSV or Parquet file, gzipped or not.

    Raises InvalidData where the file is not readable, lacks a column, or has a row without a query or an item, or with a weight that is
    not above 0.
    """
    frame = read_table(file, [query, item, *([weight] if weight else [])])
    given = frame.select(
        pl.col(query).cast(pl.String).alias("query"),
        pl.col(item).cast(pl.String).alias("item"),
        (pl.col(weight).cast(pl.Float64, strict=False) if weight else pl.lit(1.0)).alias("weight"),
    )
    for name, column, wrong, expected in (
        ("query", query, given["query"].is_null(), "a text"),
        ("item", item, given["item"].is_null(), "an item id"),
        ("weight", weight, ~(given["weight"].fill_null(np.nan).is_finite() & (given["weight"].fill_null(0) > 0)), "a number above 0"),
    ):
        if wrong.any():
            row = int(wrong.arg_max() or 0)
            value = frame[column][row] if column else given[name][row]
            raise InvalidData(f"{file}, row {row + 1}, {column}", value, expected)
    return given


def read_table(file: Path, columns: Sequence[str]) -> pl.DataFrame:
    """Some columns of a CSV, TSV or Parquet file. Raises InvalidData naming a column that is not there."""
    plain = file.name.removesuffix(".gz")
    try:
        if plain.endswith((".csv", ".tsv")):
            frame = pl.read_csv(file, separator="\t" if plain.endswith(".tsv") else ",", infer_schema=False)
        else:
            frame = pl.read_parquet(file)
    except (OSError, pl.exceptions.PolarsError) as error:
        raise InvalidData(str(file), str(error).splitlines()[0], "a readable .csv, .tsv or Parquet file") from error
    for column in columns:
        if column not in frame.columns:
            raise InvalidData(f"{file}, columns", frame.columns, f"a column {column!r}")
    return frame.select(list(dict.fromkeys(columns)))


def texts_of(frame: pl.DataFrame, columns: Sequence[str]) -> list[str]:
    """The values of some columns with blanks between them; what is null is left out, and a list gives all it has."""

    def text(column: str) -> pl.Expr:
        many = isinstance(frame.schema[column], pl.List)
        return pl.col(column).cast(pl.List(pl.String)).list.join(" ") if many else pl.col(column).cast(pl.String)

    parts = [text(column) for column in columns]
    return frame.select(pl.concat_str(parts, separator=" ", ignore_nulls=True))[:, 0].to_list()


def labelled(pairs: pl.DataFrame, row_of: dict[str, int]) -> LabelledTexts:
    """Texts, in the order of their first appearance, from pairs of `query`, `item` and `weight`; equal pairs are added up.

    Raises InvalidData for an item that `row_of` does not have.
    """
    items = pairs["item"].replace_strict(row_of, default=None, return_dtype=pl.Int64)
    if items.null_count():
        raise InvalidData("item", pairs["item"][int(items.is_null().arg_max() or 0)], "an id of the item table")
    known = pairs.with_columns(items.alias("label"))
    texts = known.select(pl.col("query").unique(maintain_order=True)).with_row_index("b")
    merged = known.join(texts, on="query").group_by("b", "label").agg(pl.col("weight").sum()).sort("b", "label")
    labels_from = np.searchsorted(merged["b"].to_numpy(), np.arange(len(texts) + 1)).astype(np.int64)
    return LabelledTexts(
        texts["query"].to_list(), labels_from, merged["label"].to_numpy().astype(np.int32), merged["weight"].to_numpy().astype(np.float32)
    )
