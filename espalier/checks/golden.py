"""Golden queries: what every engine must answer before it serves.

Knows what of them is stored, and how an engine is asked; `golden_answers.py` compares results. Does not know how golden queries are chosen;
training does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from espalier.bundle import Bundle
from espalier.checks.golden_answers import GoldenAnswers, check_same, check_shards
from espalier.engines.stages import StagedEngine
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
"""The columns of golden.parquet beside the query's; margin is the smallest gap at a cut of the search, inf where nothing was cut.

Where the bundle has a memory, a column `keys`, as `ranks`, says what the items are ordered by.
"""
KEYS = "keys"
CANDIDATE_ROWS, CANDIDATE_RANKS = "candidate_rows", "candidate_ranks"
"""Columns where the bundle has stacking, as `item_rows` and `ranks`: the best max(m, candidates) items of the trees, before stacking orders
them anew. Several shards may find better candidates, after which stacking gives other keys: they are checked on these."""
STACKING_ROUNDING = 1e-4
"""Of keys that stacking makes of the same candidates."""
HISTORY_ROWS, STATES = "history_rows", "states"
"""Columns of a shard of graphs, which can encode no history of items that it lacks: each history's item rows in the whole bundle, where
queries are histories, and each query's states, flattened."""


def columns_of_golden(memory: object, stacking: object = None) -> dict[str, pa.DataType]:
    """The columns beside the query's of a bundle with this memory and this stacking; None: without one."""
    more = {} if memory is None else {KEYS: GOLDEN_COLUMNS["ranks"]}
    if stacking is not None:
        more |= {CANDIDATE_ROWS: GOLDEN_COLUMNS["item_rows"], CANDIDATE_RANKS: GOLDEN_COLUMNS["ranks"]}
    return GOLDEN_COLUMNS | more


def golden_candidates(bundle: Bundle, table: pa.Table) -> GoldenAnswers:
    """The candidates of a golden table of a bundle with stacking.

    Raises BundleCorrupt where it has none, or they are no item rows and finite ranks.
    """
    file = bundle.path / "golden.parquet"
    if missing := {CANDIDATE_ROWS, CANDIDATE_RANKS} - set(table.column_names):
        raise BundleCorrupt(f"{file}: no columns {', '.join(sorted(missing))}: expected both, since the bundle has stacking")
    rows, ranks = table.column(CANDIDATE_ROWS).to_pylist(), table.column(CANDIDATE_RANKS).to_pylist()
    found = GoldenAnswers.of(rows, ranks, ranks)
    for b, (rows_C, ranks_C) in enumerate(zip(found.rows, found.ranks, strict=True)):
        is_right = len(rows_C) == len(ranks_C) and np.isfinite(ranks_C).all() and bool(np.all((rows_C >= 0) & (rows_C < len(bundle.items))))
        if not is_right:
            raise BundleCorrupt(f"{file}: golden query {b}: expected candidates from 0 to {len(bundle.items) - 1}, each with a finite rank")
    return found


def golden_ranks(table: pa.Table) -> tuple[list[list[float]], list[list[float]]]:
    """The ranks of each golden query's items, and what they are ordered by: their keys, or the ranks where there is no memory."""
    ranks = table.column("ranks").to_pylist()
    return ranks, table.column(KEYS).to_pylist() if KEYS in table.column_names else ranks


def encode_table(bundle: Bundle, table: pa.Table) -> QueryBatch:
    """The query column of a golden or held-out table as a batch; features are structs of `indices` and `values`."""
    return encode_queries(bundle, bundle.items, table.column(bundle.manifest.query.kind).to_pylist())


def golden_queries(bundle: Bundle, table: pa.Table) -> QueryBatch:
    """The queries of a golden table, for a shard of graphs with their states.

    Raises KeyError where a column is missing, BundleCorrupt where one does not hold what it should.
    """
    if bundle.manifest.shard is None or not isinstance(bundle.manifest.scorer, GraphScorer):
        return encode_table(bundle, table)
    from espalier.engines.encode import states_shape  # numba takes a while to import
    from espalier.engines.stages import GivenQueries

    file, shape = bundle.path / "golden.parquet", states_shape(bundle, len(table))
    flat = [np.asarray(row or (), np.float32) for row in table.column(STATES).to_pylist()]
    wrong = [b for b, row in enumerate(flat) if len(row) != shape[1] * shape[2] or not np.isfinite(row).all()]
    if wrong:
        raise BundleCorrupt(f"{file}: row {wrong[0]} of {STATES}: expected {shape[1] * shape[2]} finite numbers")
    states_BLS = np.concatenate([np.empty(0, np.float32), *flat]).reshape(shape)
    if not isinstance(bundle.graph_kind, HistoryKind):
        own = encode_table(bundle, table)
        return GivenQueries(own.kind, own.rows, states_BLS)
    queries = pad_histories(bundle.graph_kind, [np.asarray(row or (), np.int64) for row in table.column(HISTORY_ROWS).to_pylist()])
    if queries.array.max(initial=PADDING) >= bundle.manifest.history_items:
        raise BundleCorrupt(f"{file}: {HISTORY_ROWS} has item row {queries.array.max()}, the whole bundle {bundle.manifest.history_items}")
    return GivenQueries(queries.kind, queries.rows, states_BLS)


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
    queries. Where several shards answer (`SearchResult.coverage`), better items may have come, see MIN_SHARDED_OVERLAP; of a bundle with
    stacking, the candidates that they find are compared, and what stacking makes of the stored ones.
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
    if bundle.stacking is not None and isinstance(engine, StagedEngine):
        from espalier.engines.reorder import STRETCH, Stacker  # numba takes a while to import

        candidates = golden_candidates(bundle, table)
        stored = candidates.as_result(bundle.manifest.result_ranking, int(params.m_B.max(initial=0)))
        stacker = Stacker(bundle, bundle.stacking)
        ordered = stacker.ordered(queries, stored, params.m_B)
        check_same(bundle, "stacking of the stored candidates", expected, ordered, margin_B, STACKING_ROUNDING)
        wanted_B = stacker.candidate_counts(params.m_B, bundle.manifest.tree.items)
        found = engine.candidates(queries, SearchParams(params.beam_size_B, wanted_B))
        expected, result, rounding = candidates, found, engine.rounding / STRETCH
    return check_shards(bundle, engine.name, expected, result, rounding)


def verify_golden_together(bundle: Bundle, engine: Engine, queries: int) -> None:
    """Run the golden queries again and again in one call of at least so many: a GPU searches many by another kernel than few.

    Raises BundleCorrupt as `verify_golden` does.
    """
    table = bundle.golden()
    if len(table):
        verify_golden(bundle, engine, pa.concat_tables([table] * -(-queries // len(table))))


def _check_empty_history(bundle: Bundle, engine: Engine) -> None:
    """Raise BundleCorrupt where a sequence encoder makes numbers of a history without an item by which nothing can be ranked."""
    scorer = bundle.manifest.scorer
    if isinstance(scorer, GraphScorer) and scorer.encoder == "sequence":
        found = engine.search(blank_queries(bundle.manifest.query, 1), SearchParams.uniform(1, 1, 1))
        if not found.complete_B[0]:
            raise BundleCorrupt(
                f"{bundle.path}: query.onnx: a history without an item finds nothing on {engine.name}: expected a finite state"
            )
