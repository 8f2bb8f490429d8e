"""Golden queries: what every engine must answer before it serves.

Knows how a result is compared with the expected one. Does not know how golden queries are chosen; training does.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from espalier.bundle import Bundle
from espalier.errors import BundleCorrupt
from espalier.queries import (
    FeaturesKind,
    HistoryKind,
    QueryBatch,
    VectorKind,
    encode_features,
    encode_histories,
    encode_texts,
    encode_vectors,
)
from espalier.search import Engine, SearchParams

MIN_MEAN_OVERLAP = 0.99
GOLDEN_COLUMNS = {
    "beam_size": pa.int64(),
    "m": pa.int64(),
    "item_rows": pa.list_(pa.int64()),
    "ranks": pa.list_(pa.float32()),
    "margin": pa.float64(),
}
"""The columns of golden.parquet beside the query's; margin is the smallest gap at a cut of the search, inf where nothing was cut."""


def encode_table(bundle: Bundle, table: pa.Table) -> QueryBatch:
    """The query column of a golden or held-out table as a batch; features are structs of `indices` and `values`."""
    kind = bundle.manifest.query
    queries = table.column(kind.kind).to_pylist()
    if isinstance(kind, HistoryKind):
        return encode_histories(kind, bundle.items, queries)[0]
    if isinstance(kind, VectorKind):
        return encode_vectors(kind, queries)
    if isinstance(kind, FeaturesKind):
        return encode_features(kind, [(query["indices"], query["values"]) for query in queries])
    return encode_texts(kind, bundle.vectoriser, queries)


def verify_golden(bundle: Bundle, engine: Engine, table: pa.Table | None = None) -> float:
    """Run the golden queries (`table` instead of the bundle's own) and return the mean overlap with the expected results.

    Where a query's smallest margin at a cut exceeds twice the engine's rounding, the sets must be equal; over the others the mean
    overlap must reach MIN_MEAN_OVERLAP. Items that were expected and came must have their ranks, and their order where ranks differ, both
    up to twice the rounding (of a query's largest rank, where that exceeds 1). Raises BundleCorrupt otherwise.
    """
    table = bundle.golden() if table is None else table
    try:
        beam_size_B, m_B, margin_B = (np.asarray(table.column(name)) for name in ("beam_size", "m", "margin"))
        expected = [np.asarray(rows, np.int64) for rows in table.column("item_rows").to_pylist()]
        expected_ranks = [np.asarray(ranks, np.float32) for ranks in table.column("ranks").to_pylist()]
        queries = encode_table(bundle, table)
    except KeyError as error:
        raise BundleCorrupt(f"{bundle.path / 'golden.parquet'}: {error}") from error
    result = engine.search(queries, SearchParams(beam_size_B.astype(np.int64), m_B.astype(np.int64)))
    overlap_B = np.array([_overlap(rows, got) for rows, got in zip(expected, result.item_rows_BM, strict=True)])
    wide = margin_B > 2 * engine.rounding
    if bool(np.any(overlap_B[wide] < 1)):
        first = int(np.flatnonzero(wide & (overlap_B < 1))[0])
        raise BundleCorrupt(f"{bundle.path}: golden query {first} gave other items on {engine.name} than when the model was trained")
    if len(overlap_B[~wide]) and float(overlap_B[~wide].mean()) < MIN_MEAN_OVERLAP:
        raise BundleCorrupt(
            f"{bundle.path}: golden queries overlap by {overlap_B[~wide].mean():.4f} on {engine.name}, at least {MIN_MEAN_OVERLAP} expected"
        )
    for b, (rows, ranks) in enumerate(zip(expected, expected_ranks, strict=True)):
        fault = _rank_fault(rows, ranks, result.item_rows_BM[b], result.ranks_BM[b], 2 * engine.rounding)
        if fault:
            raise BundleCorrupt(f"{bundle.path}: golden query {b} on {engine.name}: {fault}")
    return float(overlap_B.mean()) if len(overlap_B) else 1.0


def _rank_fault(
    expected: NDArray[np.int64],
    expected_ranks: NDArray[np.float32],
    got: NDArray[np.int64],
    got_ranks: NDArray[np.float32],
    tolerance: float,
) -> str:
    """What is wrong with the ranks or the order of the items that were expected and came; empty where nothing is."""
    if len(expected_ranks) != len(expected):
        return f"{len(expected_ranks)} ranks are stored for {len(expected)} items"
    rows, place, got_place = np.intersect1d(expected, got, return_indices=True)
    if not len(rows):
        return ""
    stored, computed = expected_ranks[place].astype(np.float64), got_ranks[got_place].astype(np.float64)
    tolerance *= max(1.0, float(np.abs(stored).max()))
    wrong = np.flatnonzero(~(np.abs(computed - stored) <= tolerance))  # also where one is NaN
    if len(wrong):
        i = wrong[0]
        return f"item row {rows[i]} has rank {computed[i]:.6g}, expected {stored[i]:.6g} ± {tolerance:.2g}"
    order = np.argsort(got_place)
    in_answer = stored[order]
    late = np.flatnonzero(in_answer[1:] > np.minimum.accumulate(in_answer)[:-1] + tolerance)
    return f"item row {rows[order[late[0] + 1]]} comes after items of lower rank" if len(late) else ""


def _overlap(expected: NDArray[np.int64], got: NDArray[np.int64]) -> float:
    got = got[got >= 0]
    return len(np.intersect1d(expected, got)) / max(len(expected), len(got), 1)
