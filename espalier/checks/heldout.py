"""Held-out queries: load tests and the service's recall probe measure a model on them, long after its training.

Knows the columns of heldout.parquet. Does not know how the queries are chosen or searched; training and the service do.

Legend: B queries, T history.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from espalier.arrays import Array, Float32, Float64, Int64
from espalier.bundle import Bundle
from espalier.checks.golden import encode_table
from espalier.errors import BundleCorrupt
from espalier.queries import QueryBatch

RELEVANCE = "relevance"
"""Name of a column: how relevant each relevant item is. Bundles without degrees have none."""
RECALL_COLUMN = "recall@{}"
"""Name of a column: recall@m of each query at export, searched with the default beam and the largest of these m, nothing excluded."""


@dataclass(frozen=True)
class HeldOut:
    """Held-out queries that have a relevant item.

    table_row_B   int64[B]: their rows in heldout.parquet
    queries       B queries
    relevant      for each query its relevant item rows, int64
    relevance     for each query the relevance of these items, float32, above 0; None if the bundle has no degrees
    recall_by_m   m → float64[B], recall@m of each query at export; empty if the bundle has no such columns
    """

    table_row_B: Int64
    queries: QueryBatch
    relevant: list[Int64]
    relevance: list[Float32] | None
    recall_by_m: Mapping[int, Float64]


@dataclass(frozen=True)
class Unknown:
    """What is left out of a log's test queries because a bundle lacks items: relevant items, each once a query, and whole queries."""

    relevant: int
    of_relevant: int
    queries: int
    of_queries: int

    @staticmethod
    def of(relevant: Sequence[tuple[Array, Int64]], measured: int) -> Unknown:
        """relevant: for each query its relevant items, and their rows, −1 for none · measured: how many queries stay"""
        items = sum(len(np.unique(ids)) for ids, _ in relevant)
        unknown = sum(len(np.unique(ids[rows < 0])) for ids, rows in relevant)
        return Unknown(unknown, items, len(relevant) - measured, len(relevant))

    @property
    def share(self) -> float:
        """Of the relevant items."""
        return self.relevant / max(1, self.of_relevant)

    def __str__(self) -> str:
        items = f"{self.relevant:,} of {self.of_relevant:,} relevant items ({self.share:.1%})"
        return f"{items} and {self.queries:,} of {self.of_queries:,} test queries of the log are left out: the model lacks items"


def read_heldout(bundle: Bundle, limit: int | None = None) -> HeldOut:
    """The held-out queries of a bundle; if there are more than `limit`, that many at even distances.

    Ids that the catalogue lacks are left out, and so are queries without a relevant item. Raises BundleCorrupt if a column is missing or
    has wrong values.
    """
    table = bundle.heldout()
    try:
        ids = table.column("relevant").to_pylist()
        ends = np.cumsum([len(query_ids) for query_ids in ids], dtype=np.int64)
        rows_of_queries = np.split(bundle.items.rows_of([item_id for query_ids in ids for item_id in query_ids]), ends)[: len(ids)]
        relevance = _relevance(bundle, table, rows_of_queries)
        relevant = [rows[rows >= 0] for rows in rows_of_queries]
        table_row_B = np.flatnonzero([len(rows) > 0 for rows in relevant])
        if limit is not None and len(table_row_B) > limit:
            table_row_B = table_row_B[np.linspace(0, len(table_row_B) - 1, limit).astype(np.int64)]
        queries = encode_table(bundle, table.take(pa.array(table_row_B, pa.int64())))
        prefix = RECALL_COLUMN.format("")
        recall_by_m = {
            int(name.removeprefix(prefix)): np.asarray(table.column(name), np.float64)[table_row_B]
            for name in table.column_names
            if name.startswith(prefix) and name.removeprefix(prefix).isdecimal()
        }
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:  # a column is missing, or has other types
        raise BundleCorrupt(f"{bundle.path / 'heldout.parquet'}: {error}") from error
    known_relevance = None if relevance is None else [relevance[i][rows_of_queries[i] >= 0] for i in table_row_B]
    return HeldOut(table_row_B, queries, [relevant[i] for i in table_row_B], known_relevance, recall_by_m)


def whole_histories(bundle: Bundle, held_out: HeldOut) -> list[list[str]]:
    """The item ids of held-out histories, with items that are older than the model reads."""
    ids: list[list[str]] = bundle.heldout().column("history").take(pa.array(held_out.table_row_B)).to_pylist()
    return ids


def _relevance(bundle: Bundle, table: pa.Table, rows_of_queries: list[Int64]) -> list[Float32] | None:
    """The column `relevance`, a number for each id of `relevant`; None if there is no such column."""
    if RELEVANCE not in table.column_names:
        return None
    values = [np.array(row or [], np.float32) for row in table.column(RELEVANCE).to_pylist()]
    for row, (grades, rows) in enumerate(zip(values, rows_of_queries, strict=True)):
        if len(grades) != len(rows) or not (np.isfinite(grades) & (grades > 0)).all():
            raise BundleCorrupt(f"{bundle.path / 'heldout.parquet'}: row {row} of {RELEVANCE}: expected {len(rows)} finite numbers above 0")
    return values
