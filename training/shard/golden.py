"""Golden queries of shards: the golden queries of the bundle that is cut, with their query states.

Legend: B queries, L levels, S state.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from espalier.bundle import Bundle
from espalier.checks.golden import HISTORY_ROWS, STATES, golden_queries
from espalier.engines.encoder import QueryEncoder
from espalier.engines.reference import ReferenceEngine
from espalier.engines.stages import GivenQueries
from espalier.errors import UnsupportedGraph
from espalier.manifest import GraphScorer
from espalier.queries import HistoryKind, QueryBatch

from ..golden import answered_anew


def golden_of_shards(bundle: Bundle) -> Callable[[Bundle], pa.Table]:
    """A function from a shard to its golden table with the reference engine's answers. bundle: whole, or the single shard of one.

    If scorers are graphs, the table also has the queries' states, and the item rows of histories, which a shard needs to read them.
    """
    golden, kind = bundle.golden(), bundle.manifest.query
    queries = golden_queries(bundle, golden)
    if not isinstance(queries, GivenQueries) and isinstance(bundle.manifest.scorer, GraphScorer):
        queries = GivenQueries(queries.kind, queries.rows, encoded(bundle, queries))

    def answered(shard: Bundle) -> pa.Table:
        table = answered_anew(golden, shard, queries)
        if not isinstance(queries, GivenQueries) or queries.states_BLS is None:
            return table
        if isinstance(kind, HistoryKind):
            table = table.append_column(HISTORY_ROWS, pa.array([row[row >= 0] for row in queries.array], pa.list_(pa.int64())))
        flat = [states_LS.ravel() for states_LS in queries.states_BLS]
        return table.append_column(STATES, pa.array(flat, pa.list_(pa.float32())))

    return answered


def unanswered_golden(bundle: Bundle) -> pa.Table:
    """The golden queries of a shard without their answers."""
    golden = bundle.golden()
    columns = (bundle.manifest.query.kind, "beam_size", "m", HISTORY_ROWS, STATES)
    return golden.select([name for name in columns if name in golden.column_names])


def encoded(bundle: Bundle, queries: QueryBatch) -> NDArray[np.float32]:
    """float32[B, L, S]: the states of queries, by ONNX Runtime if possible: it maps node rows, which may exceed the memory."""
    try:
        encoder = QueryEncoder.open(bundle)
    except UnsupportedGraph:
        return ReferenceEngine(bundle).states(queries)
    return encoder.states(queries.array, [0] * len(queries))
