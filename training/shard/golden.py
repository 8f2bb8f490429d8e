"""Golden queries of shards: those of the bundle that is cut, with what its encoder makes of them.

Legend: B queries, L levels, S state.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

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
from espalier.search import SearchParams
from training.golden import golden_answers


@dataclass(frozen=True)
class ShardGolden:
    """The golden queries of a bundle as its shards are asked them. bundle: whole, or the only shard of one."""

    bundle: Bundle

    def answered(self, shard: Bundle) -> pa.Table:
        """The golden table of a shard, with the reference engine's answers on it."""
        return self._readable(golden_answers(shard, self._queries, self._written, self._params))

    def unanswered(self) -> pa.Table:
        """The golden queries alone, as a shard has them."""
        wanted = (self.bundle.manifest.query.kind, "beam_size", "m", HISTORY_ROWS, STATES)
        return self._table.select([name for name in wanted if name in self._table.column_names])

    def _readable(self, table: pa.Table) -> pa.Table:
        """A golden table with the columns that let a shard read the queries, which only graphs need."""
        queries = self._queries
        if not isinstance(queries, GivenQueries) or queries.states_BLS is None:
            return table
        if isinstance(self.bundle.manifest.query, HistoryKind):
            rows = [row[row >= 0] for row in queries.array]
            table = table.append_column(HISTORY_ROWS, pa.array(rows, pa.list_(pa.int64())))
        flat = [states_LS.ravel() for states_LS in queries.states_BLS]
        return table.append_column(STATES, pa.array(flat, pa.list_(pa.float32())))

    @cached_property
    def _table(self) -> pa.Table:
        return self.bundle.golden()

    @property
    def _written(self) -> pa.Array:
        """The queries as clients write them."""
        return self._table.column(self.bundle.manifest.query.kind).combine_chunks()

    @cached_property
    def _queries(self) -> QueryBatch:
        """With their states, of scorers that are graphs."""
        queries = golden_queries(self.bundle, self._table)
        if isinstance(queries, GivenQueries) or not isinstance(self.bundle.manifest.scorer, GraphScorer):
            return queries
        return GivenQueries(queries.kind, queries.rows, encoded(self.bundle, queries))

    @property
    def _params(self) -> SearchParams:
        beam_size_B, m_B = (np.asarray(self._table.column(name), np.int64) for name in ("beam_size", "m"))
        return SearchParams(beam_size_B, m_B)


def encoded(bundle: Bundle, queries: QueryBatch) -> NDArray[np.float32]:
    """float32[B, L, S]: the states of queries, by ONNX Runtime over the mapped node rows where it can, as these may exceed the memory."""
    try:
        encoder = QueryEncoder.open(bundle)
    except UnsupportedGraph:
        return ReferenceEngine(bundle).states(queries)
    return encoder.states(queries.array, [0] * len(queries))
