"""Compiled: scores live leaves with linear scorers. A logit is bias + Σ weight · feature; ranks follow from it.

A query's features are scattered into a dense row, in which each leaf's features are looked up. As in the reference, sums are float64, then
rounded to float32; activations and ranks are float32.

Legend: B queries, P entries of live leaves, C live leaves under a query's beam, F features, G distinct masks, R handles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from espalier.compiled_code import compiled
from espalier.engines.linear.chunk_search import power_of
from espalier.engines.overflow import LARGEST, ScoredLive, masks_of, under_beams
from espalier.engines.stages import Frontier
from espalier.live.overlay import LiveLeaves
from espalier.manifest import Ranking
from espalier.queries import QueryBatch
from espalier.read_only import read_only
from espalier.thread_scratch import ThreadScratch

Array = NDArray[Any]


class LinearLeaves:
    """Scores the live leaves of trees of `width` features. Any number of threads may call it."""

    def __init__(self, ranking: Ranking, width: int) -> None:
        self._ranker = np.float32(ranking.gamma), power_of(ranking)
        self._scratch = ThreadScratch(lambda size: np.zeros(width, np.float32))

    def scored(
        self, leaves: LiveLeaves, queries: QueryBatch, frontier: Frontier, states_BS: object, live_BR: Sequence[NDArray[np.bool_] | None]
    ) -> ScoredLive:
        """See `GraphLeaves`; linear scorers take no states."""
        beams, weights = read_only(frontier.nodes_BK, frontier.ranks_BK), weights_of(leaves)
        with self._scratch.of() as query_F:
            scored = score(queries.features.arrays, beams, leaves.entries, masks_of(live_BR), weights, self._ranker, query_F)
        return ScoredLive(*scored)


def weights_of(leaves: LiveLeaves) -> tuple[Array, ...]:
    """The weights of live leaves as compiled code reads them."""
    pool = leaves.sparse
    if pool is None:
        raise ValueError("live leaves without weights")
    return read_only(pool.begin_P, pool.end_P, pool.bias_P, pool.feature, pool.weight)


@compiled(fastmath={"reassoc", "contract"})
def _product(begin: Any, end: Any, feature: Array, weight: Array, query_F: Array) -> Any:
    """Σ weight · feature, in float64. Indices are unsigned: numba tests signed ones for whether they count from the end."""
    total = 0.0
    for e in range(np.uint64(begin), np.uint64(end)):
        total += np.float64(query_F[np.uint64(feature[e])]) * np.float64(weight[e])
    return total


@compiled()
def _rank(logit: Any, inherited: Any, power: int) -> Any:
    """A leaf's rank: own + inherited, NaN where the logit is not finite; `power` as in `search_queries`."""
    one, zero = np.float32(1), np.float32(0)
    if not abs(logit) <= LARGEST:
        return np.float32(np.nan)
    if power < 0:
        return logit + inherited
    if power == 0:
        return inherited + (min(logit, zero) - np.log1p(np.exp(-abs(logit))))
    short = max(one - logit, zero)
    loss = short
    for _ in range(1, power):
        loss *= short
    return inherited - loss


@compiled()
def score(queries: Any, beams: Any, entries: Any, masks: Any, weights: Any, ranker: Any, query_F: Array) -> tuple[Array, Array, Array]:
    """The fields of ScoredLive. weights: of `weights_of`; query_F: float32[F] of zeros, before and after."""
    indptr, indices, values = queries
    begin_P, end_P, bias_P, feature, weight = weights
    gamma, power = ranker
    begin_B, entry_C, inherited_C = under_beams(beams, entries, masks, gamma)
    out_begin_B, out_entry_C, ranks_C, count = np.zeros_like(begin_B), np.empty_like(entry_C), np.empty_like(inherited_C), 0
    for b in range(len(begin_B) - 1):
        begin, end = begin_B[b], begin_B[b + 1]
        if begin < end:
            for j in range(indptr[b], indptr[b + 1]):
                query_F[indices[j]] = values[j]
            for c in range(begin, end):
                entry = entry_C[c]
                logit = bias_P[entry] + _product(begin_P[entry], end_P[entry], feature, weight, query_F)
                rank = _rank(np.float32(logit), inherited_C[c], power)
                if abs(rank) <= LARGEST:
                    out_entry_C[count], ranks_C[count] = entry, rank
                    count += 1
            for j in range(indptr[b], indptr[b + 1]):
                query_F[indices[j]] = 0
        out_begin_B[b + 1] = count
    return out_begin_B, out_entry_C[:count], ranks_C[:count]
