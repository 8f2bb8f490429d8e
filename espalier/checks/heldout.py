"""Held-out queries: what a model is measured on long after its training, by load tests and by the service's recall probe.

Knows what heldout.parquet holds. Does not know how the queries are chosen or searched; training and the service do.

Legend: B queries, T history.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

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

    place_B       int64[B]: their rows in heldout.parquet
    queries       B queries
    relevant      for each query the int64 item rows that it should find
    relevance     for each query the float32 relevance of these items, above 0; None where the bundle knows no degrees
    recall_by_m   m → float64[B], recall@m of each query at export; empty for bundles that do not say
    """

    place_B: NDArray[np.int64]
    queries: QueryBatch
    relevant: list[NDArray[np.int64]]
    relevance: list[NDArray[np.float32]] | None
    recall_by_m: Mapping[int, NDArray[np.float64]]


def read_heldout(bundle: Bundle, most: int | None = None) -> HeldOut:
    """The held-out queries of a bundle; where there are more than `most`, that many at even distances.

    Ids that the catalogue lacks are left out, and so are queries without anything relevant. Raises BundleCorrupt
    when a column is missing or does not hold what it should.
    """
    table = bundle.heldout()
    try:
        ids = table.column("relevant").to_pylist()
        ends = np.cumsum([len(own) for own in ids], dtype=np.int64)
        listed = np.split(bundle.items.rows_of([item_id for own in ids for item_id in own]), ends)[: len(ids)]
        relevance = _relevance(bundle, table, listed)
        relevant = [rows[rows >= 0] for rows in listed]
        place_B = np.flatnonzero([len(rows) > 0 for rows in relevant])
        if most is not None and len(place_B) > most:
            place_B = place_B[np.linspace(0, len(place_B) - 1, most).astype(np.int64)]
        queries = encode_table(bundle, table.take(pa.array(place_B, pa.int64())))
        prefix = RECALL_COLUMN.format("")
        recall_by_m = {
            int(name.removeprefix(prefix)): np.asarray(table.column(name), np.float64)[place_B]
            for name in table.column_names
            if name.startswith(prefix) and name.removeprefix(prefix).isdecimal()
        }
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:  # a column that is not there, or of other things
        raise BundleCorrupt(f"{bundle.path / 'heldout.parquet'}: {error}") from error
    known = None if relevance is None else [relevance[i][listed[i] >= 0] for i in place_B]
    return HeldOut(place_B, queries, [relevant[i] for i in place_B], known, recall_by_m)


def _relevance(bundle: Bundle, table: pa.Table, listed: list[NDArray[np.int64]]) -> list[NDArray[np.float32]] | None:
    """The column `relevance`, a number for each item that is listed; None where there is no such column."""
    if RELEVANCE not in table.column_names:
        return None
    values = [np.array(row or [], np.float32) for row in table.column(RELEVANCE).to_pylist()]
    for row, (own, rows) in enumerate(zip(values, listed, strict=True)):
        if len(own) != len(rows) or not (np.isfinite(own) & (own > 0)).all():
            raise BundleCorrupt(f"{bundle.path / 'heldout.parquet'}: row {row} of {RELEVANCE}: expected {len(rows)} finite numbers above 0")
    return values
