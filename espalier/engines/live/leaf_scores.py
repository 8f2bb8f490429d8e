"""The logits of live leaves for one query, by the bundle's own scorer.

Knows rows and scorers. Does not know parents, ranks or beams.

Legend: C leaves, D node row, S state, F features.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator

from espalier.bundle import Bundle
from espalier.engines.onnx.graphs import read_graph
from espalier.live.overlay import LiveLeaves
from espalier.manifest import LinearScorer
from espalier.queries import QueryBatch

Float32 = NDArray[np.float32]


class LeafScorer(Protocol):
    """Scores live leaves."""

    def logits(self, leaves: LiveLeaves, positions_C: NDArray[np.int64], queries: QueryBatch, b: int, state_S: Float32 | None) -> Float32:
        """float32[C]: the logits of the leaves at some positions for query b.

        state_S  the query's state on the leaf level; None for linear scorers
        """
        ...


class GraphScores:
    """scorer.onnx, by ONNX's own evaluator."""

    def __init__(self, bundle: Bundle) -> None:
        self._scorer = ReferenceEvaluator(read_graph("scorer.onnx", bundle.graph("scorer.onnx")))

    def logits(self, leaves: LiveLeaves, positions_C: NDArray[np.int64], queries: QueryBatch, b: int, state_S: Float32 | None) -> Float32:
        if leaves.rows_PD is None or state_S is None:
            raise ValueError("live leaves without node rows, or a query without a state")
        inputs: dict[str, NDArray[Any]] = {"query_state": state_S[None], "node_rows": leaves.rows_PD[leaves.place_X[positions_C]][None]}
        with np.errstate(over="ignore", invalid="ignore"):
            logits_BC = np.asarray(next(iter(self._scorer.run(None, inputs))), np.float32)
        return np.asarray(logits_BC[0])


class LinearScores:
    """bias + Σ weight · feature, in float64."""

    def logits(self, leaves: LiveLeaves, positions_C: NDArray[np.int64], queries: QueryBatch, b: int, state_S: Float32 | None) -> Float32:
        if leaves.sparse is None:
            raise ValueError("live leaves without weights")
        pool, rows = leaves.sparse, queries.features
        query_F = np.zeros(rows.width)
        own = slice(int(rows.indptr[b]), int(rows.indptr[b + 1]))
        query_F[rows.indices[own]] = rows.values[own]
        place_C = leaves.place_X[positions_C]
        logits_C = pool.bias_P[place_C].astype(np.float64)
        for c, place in enumerate(place_C.tolist()):
            entries = slice(int(pool.begin_P[place]), int(pool.end_P[place]))
            logits_C[c] += query_F[pool.feature[entries]] @ pool.weight[entries]
        with np.errstate(over="ignore"):
            return logits_C.astype(np.float32)


def leaf_scorer(bundle: Bundle) -> LeafScorer:
    """What scores the live leaves of a bundle."""
    return LinearScores() if isinstance(bundle.manifest.scorer, LinearScorer) else GraphScores(bundle)
