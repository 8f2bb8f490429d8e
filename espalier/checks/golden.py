"""Golden queries: what every engine must answer before it serves.

Knows how a result is compared with the expected one. Does not know how golden queries are chosen; training does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from espalier.bundle import Bundle
from espalier.engines.given_states import states_shape
from espalier.errors import BundleCorrupt
from espalier.items import Items
from espalier.manifest import GraphScorer
from espalier.queries import (
    PADDING,
    FeaturesKind,
    HistoryKind,
    QueryBatch,
    VectorKind,
    blank_queries,
    encode_features,
    encode_histories,
    encode_texts,
    encode_vectors,
    pad_histories,
)
from espalier.search import Engine, SearchParams

MIN_MEAN_OVERLAP = 0.99
MIN_SHARDED_OVERLAP = 0.95
"""The same where several shards answer. Each keeps a whole beam, so that together they find better items than were expected: an expected
item may be missing where all that came have at least its key."""
GOLDEN_COLUMNS = {
    "beam_size": pa.int64(),
    "m": pa.int64(),
    "item_rows": pa.list_(pa.int64()),
    "ranks": pa.list_(pa.float32()),
    "margin": pa.float64(),
}
"""The columns of golden.parquet beside the query's; margin is the smallest gap at a cut of the search, inf where nothing was cut.

Where the bundle has a memory, a column `keys`, as `ranks`, says what the items are ordered by.
"""
KEYS = "keys"
HISTORY_ROWS, STATES = "history_rows", "states"
"""Columns of a shard of graphs, which can encode no history of items that it lacks: each history's item rows in the whole bundle, where
queries are histories, and each query's states, flattened."""


def columns_of_golden(memory: object) -> dict[str, pa.DataType]:
    """The columns beside the query's of a bundle with this memory; None: without one."""
    return GOLDEN_COLUMNS if memory is None else GOLDEN_COLUMNS | {KEYS: GOLDEN_COLUMNS["ranks"]}


def golden_ranks(table: pa.Table) -> tuple[list[list[float]], list[list[float]]]:
    """The ranks of each golden query's items, and what they are ordered by: their keys, or the ranks where there is no memory."""
    ranks = table.column("ranks").to_pylist()
    return ranks, table.column(KEYS).to_pylist() if KEYS in table.column_names else ranks


def encode_table(bundle: Bundle, table: pa.Table) -> QueryBatch:
    """The query column of a golden or held-out table as a batch; features are structs of `indices` and `values`."""
    return encode_queries(bundle, bundle.items, table.column(bundle.manifest.query.kind).to_pylist())


def golden_queries(bundle: Bundle, table: pa.Table) -> tuple[QueryBatch, NDArray[np.float32] | None]:
    """The queries of a golden table, and for a shard of graphs their states (float32[B, L, S]).

    Raises KeyError where a column is missing, BundleCorrupt where one does not hold what it should.
    """
    if bundle.manifest.shard is None or not isinstance(bundle.manifest.scorer, GraphScorer):
        return encode_table(bundle, table), None
    file, shape = bundle.path / "golden.parquet", states_shape(bundle, len(table))
    flat = [np.asarray(row or (), np.float32) for row in table.column(STATES).to_pylist()]
    wrong = [b for b, row in enumerate(flat) if len(row) != shape[1] * shape[2] or not np.isfinite(row).all()]
    if wrong:
        raise BundleCorrupt(f"{file}: row {wrong[0]} of {STATES}: expected {shape[1] * shape[2]} finite numbers")
    states_BLS = np.concatenate([np.empty(0, np.float32), *flat]).reshape(shape)
    if not isinstance(bundle.graph_kind, HistoryKind):
        return encode_table(bundle, table), states_BLS
    queries = pad_histories(bundle.graph_kind, [np.asarray(row or (), np.int64) for row in table.column(HISTORY_ROWS).to_pylist()])
    if queries.array.max(initial=PADDING) >= bundle.manifest.history_items:
        raise BundleCorrupt(f"{file}: {HISTORY_ROWS} has item row {queries.array.max()}, the whole bundle {bundle.manifest.history_items}")
    return queries, states_BLS


def encode_queries(bundle: Bundle, items: Items, queries: Sequence[Any]) -> QueryBatch:
    """Queries as JSON has them as a batch: lists of ids in `items`, lists of numbers, texts, or objects of `indices` and `values`."""
    kind = bundle.manifest.query
    if isinstance(kind, HistoryKind):
        return encode_histories(kind, items, queries)[0]
    if isinstance(kind, VectorKind):
        return encode_vectors(kind, queries)
    if isinstance(kind, FeaturesKind):
        return encode_features(kind, [(query["indices"], query["values"]) for query in queries])
    return encode_texts(kind, bundle.vectoriser, queries)


def verify_golden(bundle: Bundle, engine: Engine, table: pa.Table | None = None) -> float:
    """Run the golden queries (`table` instead of the bundle's own) and return the mean overlap with the expected results.

    Where a query's smallest margin at a cut exceeds twice the engine's rounding, the sets must be equal. The mean overlap over all queries
    must reach MIN_MEAN_OVERLAP; over those with smaller margins alone, a tie in the only one of them would be a fault. Items that were
    expected and came must have their ranks, and their order where ranks differ, both up to twice the rounding (of a query's largest rank,
    where that exceeds 1). A sequence encoder must have a state for a history without an item, too, which need not be among the golden
    queries. Where several shards answer (`SearchResult.coverage`), better items may have come, see MIN_SHARDED_OVERLAP.
    Raises BundleCorrupt otherwise.
    """
    _check_empty_history(bundle, engine)
    table = bundle.golden() if table is None else table
    try:
        beam_size_B, m_B, margin_B = (np.asarray(table.column(name)) for name in ("beam_size", "m", "margin"))
        expected = [np.asarray(rows, np.int64) for rows in table.column("item_rows").to_pylist()]
        if bundle.manifest.memory is not None:
            table.column(KEYS)
        expected_ranks, expected_keys = ([np.asarray(row, np.float32) for row in column] for column in golden_ranks(table))
        queries, states_BLS = golden_queries(bundle, table)
    except KeyError as error:
        raise BundleCorrupt(f"{bundle.path / 'golden.parquet'}: {error}") from error
    result = engine.search(queries, SearchParams(beam_size_B.astype(np.int64), m_B.astype(np.int64), states_BLS=states_BLS))
    is_sharded = result.coverage is not None and len(result.coverage.items_S) > 1
    wide, least = margin_B > 2 * engine.rounding, MIN_SHARDED_OVERLAP if is_sharded else MIN_MEAN_OVERLAP
    if is_sharded:
        kept = zip(expected, expected_keys, result.item_rows_BM, result.keys_BM, strict=True)
        overlap_B = np.array([_kept(*of_query, 2 * engine.rounding) for of_query in kept])
    else:
        overlap_B = np.array([_overlap(rows, got) for rows, got in zip(expected, result.item_rows_BM, strict=True)])
    if not is_sharded and bool(np.any(overlap_B[wide] < 1)):
        first = int(np.flatnonzero(wide & (overlap_B < 1))[0])
        raise BundleCorrupt(f"{bundle.path}: golden query {first} gave other items on {engine.name} than when the model was trained")
    overlap = float(overlap_B.mean()) if len(overlap_B) else 1.0
    if overlap < least:
        raise BundleCorrupt(f"{bundle.path}: golden queries overlap by {overlap:.4f} on {engine.name}, at least {least} expected")
    for b, (rows, ranks, keys) in enumerate(zip(expected, expected_ranks, expected_keys, strict=True)):
        got_rows, tolerance = result.item_rows_BM[b], 2 * engine.rounding
        fault = _rank_fault("rank", rows, ranks, got_rows, result.ranks_BM[b], tolerance)
        fault = (
            fault or _rank_fault("key", rows, keys, got_rows, result.keys_BM[b], tolerance) or _order_fault(rows, keys, got_rows, tolerance)
        )
        if fault:
            raise BundleCorrupt(f"{bundle.path}: golden query {b} on {engine.name}: {fault}")
    return overlap


def _check_empty_history(bundle: Bundle, engine: Engine) -> None:
    """Raise BundleCorrupt where a sequence encoder makes numbers of a history without an item by which nothing can be ranked."""
    scorer = bundle.manifest.scorer
    if isinstance(scorer, GraphScorer) and scorer.encoder == "sequence":
        found = engine.search(blank_queries(bundle.manifest.query, 1), SearchParams.uniform(1, 1, 1))
        if not found.complete_B[0]:
            raise BundleCorrupt(
                f"{bundle.path}: query.onnx: a history without an item finds nothing on {engine.name}: expected a finite state"
            )


def _rank_fault(
    name: str,
    expected: NDArray[np.int64],
    expected_ranks: NDArray[np.float32],
    got: NDArray[np.int64],
    got_ranks: NDArray[np.float32],
    tolerance: float,
) -> str:
    """What is wrong with the ranks, or keys, of the items that were expected and came; empty where nothing is."""
    if len(expected_ranks) != len(expected):
        return f"{len(expected_ranks)} {name}s are stored for {len(expected)} items"
    rows, place, got_place = np.intersect1d(expected, got, return_indices=True)
    stored, computed = expected_ranks[place].astype(np.float64), got_ranks[got_place].astype(np.float64)
    tolerance *= _scale(stored)
    wrong = np.flatnonzero(~(np.abs(computed - stored) <= tolerance))  # also where one is NaN
    if not len(wrong):
        return ""
    i = wrong[0]
    return f"item row {rows[i]} has {name} {computed[i]:.6g}, expected {stored[i]:.6g} ± {tolerance:.2g}"


def _order_fault(expected: NDArray[np.int64], expected_keys: NDArray[np.float32], got: NDArray[np.int64], tolerance: float) -> str:
    """What is wrong with the order of the items that were expected and came; empty where nothing is."""
    rows, place, got_place = np.intersect1d(expected, got, return_indices=True)
    order = np.argsort(got_place)
    in_answer = expected_keys[place][order].astype(np.float64)
    late = np.flatnonzero(in_answer[1:] > np.minimum.accumulate(in_answer)[:-1] + tolerance * _scale(in_answer))
    return f"item row {rows[order[late[0] + 1]]} comes after items of lower rank" if len(late) else ""


def _scale(ranks: NDArray[np.float64]) -> float:
    """What a tolerance is multiplied by: the largest rank, where it exceeds 1."""
    return max(1.0, float(np.abs(ranks).max(initial=0)))


def _overlap(expected: NDArray[np.int64], got: NDArray[np.int64]) -> float:
    got = got[got >= 0]
    return len(np.intersect1d(expected, got)) / max(len(expected), len(got), 1)


def _kept(
    expected: NDArray[np.int64],
    expected_keys: NDArray[np.float32],
    got: NDArray[np.int64],
    got_keys: NDArray[np.float32],
    tolerance: float,
) -> float:
    """The share of the expected items that came, or are missing where all that came are at least as good."""
    if not len(expected) or len(expected_keys) != len(expected):  # the latter is told as a fault of the keys
        return 1.0
    full = len(got[got >= 0]) >= len(expected)
    worst = float(got_keys[got >= 0].min()) if full else np.inf
    displaced = expected_keys.astype(np.float64) <= worst + tolerance * _scale(expected_keys.astype(np.float64))
    return float(np.mean(np.isin(expected, got) | displaced))
