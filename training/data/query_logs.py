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
from scipy.sparse import csr_array

from espalier.errors import InvalidData
from training.data.csr import Csr


@dataclass(frozen=True, eq=False)
class LabelledTexts:
    """B different texts with their items.

    labels  float32[B, I]: the weight of each item that a text led to, above 0
    """

    texts: list[str]
    labels: Csr

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, rows: NDArray[np.int64]) -> LabelledTexts:
        """The texts at some positions (int64)."""
        return LabelledTexts([self.texts[b] for b in rows.tolist()], self.labels[rows])


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
    """The values of some columns, joined by spaces; nulls are left out, the entries of a list are joined too."""

    def text(column: str) -> pl.Expr:
        many = isinstance(frame.schema[column], pl.List)
        return pl.col(column).cast(pl.List(pl.String)).list.join(" ") if many else pl.col(column).cast(pl.String)

    parts = [text(column) for column in columns]
    return frame.select(pl.concat_str(parts, separator=" ", ignore_nulls=True))[:, 0].to_list()


def labelled(pairs: pl.DataFrame, row_of: dict[str, int]) -> LabelledTexts:
    """Texts, in the order of their first appearance, from pairs of `query`, `item` and `weight`; weights of equal pairs are summed.

    Raises InvalidData for an item that `row_of` does not have.
    """
    items = pairs["item"].replace_strict(row_of, default=None, return_dtype=pl.Int64)
    if items.null_count():
        raise InvalidData("item", pairs["item"][int(items.is_null().arg_max() or 0)], "an id of the item table")
    known = pairs.with_columns(items.alias("label"))
    texts = known.select(pl.col("query").unique(maintain_order=True)).with_row_index("b")
    merged = known.join(texts, on="query").group_by("b", "label").agg(pl.col("weight").sum()).sort("b", "label")
    weights, pairs_of_rows = merged["weight"].to_numpy().astype(np.float32), (merged["b"].to_numpy(), merged["label"].to_numpy())
    return LabelledTexts(texts["query"].to_list(), csr_array((weights, pairs_of_rows), shape=(len(texts), len(row_of))))
