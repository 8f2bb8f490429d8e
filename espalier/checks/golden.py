"""Golden queries: every engine must answer them as expected before it serves.

Knows how golden queries are stored, and runs them on an engine; `golden_answers.py` compares results. Does not know how golden queries are
chosen; training does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from espalier.bundle import Bundle
from espalier.checks.golden_answers import GoldenAnswers, check_same, check_shards
from espalier.engines.stacker import STRETCH, Stacker
from espalier.engines.stages import GivenQueries
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

GOLDEN_COLUMNS = {
    "beam_size": pa.int64(),
    "m": pa.int64(),
    "item_rows": pa.list_(pa.int64()),
    "ranks": pa.list_(pa.float32()),
    "margin": pa.float64(),
}
"""The columns of golden.parquet beside the query's. margin: the smallest gap at a cut of the search, inf if nothing was cut.

If the bundle has a memory, a column `keys`, of the type of `ranks`, has the items' keys.
"""
KEYS = "keys"
CANDIDATE_ROWS, CANDIDATE_RANKS = "candidate_rows", "candidate_ranks"
"""Columns of a bundle with stacking, of the types of `item_rows` and `ranks`: the best max(m, candidates) items of the trees, before
stacking reorders them. Several shards may find better candidates, for which stacking gives other keys: shards are checked on these columns.
"""
STACKING_ROUNDING = 1e-4
"""Rounding of keys that stacking computes for the same candidates."""
HISTORY_ROWS, STATES = "history_rows", "states"
"""Columns of a shard of graphs, which cannot encode histories with items of other shards: for history queries, each history's item rows in
the whole bundle; and each query's states, flattened."""


def columns_of_golden(memory: object, stacking: object = None) -> dict[str, pa.DataType]:
    """The columns beside the query's, for a bundle with this memory and stacking; None: without."""
    columns = {} if memory is None else {KEYS: GOLDEN_COLUMNS["ranks"]}
    if stacking is not None:
        columns |= {CANDIDATE_ROWS: GOLDEN_COLUMNS["item_rows"], CANDIDATE_RANKS: GOLDEN_COLUMNS["ranks"]}
    return GOLDEN_COLUMNS | columns


def golden_candidates(bundle: Bundle, table: pa.Table) -> GoldenAnswers:
    """The candidates of a golden table of a bundle with stacking.

    Raises BundleCorrupt if the columns are missing, or have anything but item rows and finite ranks.
    """
    file = bundle.path / "golden.parquet"
    if missing := {CANDIDATE_ROWS, CANDIDATE_RANKS} - set(table.column_names):
        raise BundleCorrupt(f"{file}: no columns {', '.join(sorted(missing))}: expected both, since the bundle has stacking")
    rows, ranks = table.column(CANDIDATE_ROWS).to_pylist(), table.column(CANDIDATE_RANKS).to_pylist()
    candidates = GoldenAnswers.of(rows, ranks, ranks)
    for b, (rows_C, ranks_C) in enumerate(zip(candidates.rows, candidates.ranks, strict=True)):
        is_right = len(rows_C) == len(ranks_C) and np.isfinite(ranks_C).all() and bool(np.all((rows_C >= 0) & (rows_C < len(bundle.items))))
        if not is_right:
            raise BundleCorrupt(f"{file}: golden query {b}: expected candidates from 0 to {len(bundle.items) - 1}, each with a finite rank")
    return candidates


def golden_ranks(table: pa.Table) -> tuple[list[list[float]], list[list[float]]]:
    """The ranks and the keys of each golden query's items. Without a memory, the keys are the ranks."""
    ranks = table.column("ranks").to_pylist()
    return ranks, table.column(KEYS).to_pylist() if KEYS in table.column_names else ranks


def encode_table(bundle: Bundle, table: pa.Table) -> QueryBatch:
    """The query column of a golden or held-out table as a batch; features are structs of `indices` and `values`."""
    return encode_queries(bundle, bundle.items, table.column(bundle.manifest.query.kind).to_pylist())


def golden_queries(bundle: Bundle, table: pa.Table) -> QueryBatch:
    """The queries of a golden table; for a shard of graphs, with their states.

    Raises KeyError if a column is missing, BundleCorrupt if one has wrong values.
    """
    if bundle.manifest.shard is None or not isinstance(bundle.manifest.scorer, GraphScorer):
        return encode_table(bundle, table)
    from espalier.engines.encode import states_shape  # it imports ONNX Runtime, which is an extra

    file, shape = bundle.path / "golden.parquet", states_shape(bundle, len(table))
    flat = [np.asarray(row or (), np.float32) for row in table.column(STATES).to_pylist()]
    wrong_rows = [b for b, row in enumerate(flat) if len(row) != shape[1] * shape[2] or not np.isfinite(row).all()]
    if wrong_rows:
        raise BundleCorrupt(f"{file}: row {wrong_rows[0]} of {STATES}: expected {shape[1] * shape[2]} finite numbers")
    states_BLS = np.concatenate([np.empty(0, np.float32), *flat]).reshape(shape)
    if not isinstance(bundle.graph_kind, HistoryKind):
        batch = encode_table(bundle, table)
        return GivenQueries(batch.kind, batch.rows, states_BLS)
    queries = pad_histories(bundle.graph_kind, [np.asarray(row or (), np.int64) for row in table.column(HISTORY_ROWS).to_pylist()])
    if queries.array.max(initial=PADDING) >= bundle.manifest.history_items:
        raise BundleCorrupt(f"{file}: {HISTORY_ROWS} has item row {queries.array.max()}, the whole bundle {bundle.manifest.history_items}")
    return GivenQueries(queries.kind, queries.rows, states_BLS)


def encode_queries(bundle: Bundle, items: Items, queries: Sequence[Any]) -> QueryBatch:
    """A batch from queries in JSON's types: lists of ids in `items`, lists of numbers, texts, or objects of `indices` and `values`."""
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

    If a query's smallest margin at a cut exceeds twice the engine's rounding, its set of items must be the expected one. The mean overlap
    over all queries must reach MIN_MEAN_OVERLAP. (A mean over only the queries with smaller margins would fail for one tie, if there is one
    such query.) Items that were expected and came must have the expected ranks, and their order if ranks differ, both up to twice the
    rounding (times the query's largest rank, if that exceeds 1). A sequence encoder must also give a finite state for an empty history,
    even if no golden query is empty. If several shards answer (`SearchResult.coverage`), better items may come: see MIN_SHARDED_OVERLAP.
    For a bundle with stacking, the shards' candidates are compared, and the stacker is checked on the stored candidates.
    Raises BundleCorrupt otherwise.
    """
    _check_empty_history(bundle, engine)
    table = bundle.golden() if table is None else table
    try:
        beam_size_B, m_B, margin_B = (np.asarray(table.column(name)) for name in ("beam_size", "m", "margin"))
        if bundle.manifest.memory is not None:
            table.column(KEYS)
        expected = GoldenAnswers.of(table.column("item_rows").to_pylist(), *golden_ranks(table))
        queries = golden_queries(bundle, table)
    except KeyError as error:
        raise BundleCorrupt(f"{bundle.path / 'golden.parquet'}: {error}") from error
    params = SearchParams(beam_size_B.astype(np.int64), m_B.astype(np.int64))
    result, rounding = engine.search(queries, params), engine.rounding
    if result.coverage is None or len(result.coverage.items_S) == 1:
        return check_same(bundle, engine.name, expected, result, margin_B, rounding)
    from espalier.engines.pipeline import Pipeline  # loads ONNX Runtime

    if bundle.stacking is not None and isinstance(engine, Pipeline):
        candidates = golden_candidates(bundle, table)
        stored_result = candidates.as_result(bundle.manifest.result_ranking, int(params.m_B.max(initial=0)))
        stacker = Stacker(bundle, bundle.stacking)
        ordered = stacker.ordered(queries, stored_result, params.m_B)
        check_same(bundle, "stacking of the stored candidates", expected, ordered, margin_B, STACKING_ROUNDING)
        wanted_B = stacker.candidate_counts(params.m_B, bundle.manifest.tree.items)
        candidates_found = engine.candidates(queries, SearchParams(params.beam_size_B, wanted_B))
        expected, result, rounding = candidates, candidates_found, engine.rounding / STRETCH
    return check_shards(bundle, engine.name, expected, result, rounding)


def verify_golden_together(bundle: Bundle, engine: Engine, queries: int) -> None:
    """Run the golden queries, repeated, in one call of at least `queries`: a GPU uses another kernel for large batches.

    Raises BundleCorrupt as `verify_golden` does.
    """
    table = bundle.golden()
    if len(table):
        verify_golden(bundle, engine, pa.concat_tables([table] * -(-queries // len(table))))


def _check_empty_history(bundle: Bundle, engine: Engine) -> None:
    """Raise BundleCorrupt if a sequence encoder's state for an empty history is not finite: then no item comes back."""
    scorer = bundle.manifest.scorer
    if isinstance(scorer, GraphScorer) and scorer.encoder == "sequence":
        result = engine.search(blank_queries(bundle.manifest.query, 1), SearchParams.uniform(1, 1, 1))
        if not result.complete_B[0]:
            raise BundleCorrupt(
                f"{bundle.path}: query.onnx: a history without an item finds nothing on {engine.name}: expected a finite state"
            )
