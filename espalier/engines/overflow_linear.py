"""Live leaves of linear scorers under the beams of a call, compiled: bias + Σ weight · feature, and from these ranks.

A query's features are scattered into a dense row, and each leaf's weights gathered from it. Sums are float64, then rounded to float32, as
the reference makes them; activations and ranks are float32.

Legend: B queries, K beam, X live leaves, Y parents of live leaves, P places of a pool, C live leaves under a query's beam, F features,
G distinct masks, R handles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from espalier.compiled_code import compiled
from espalier.engines.linear.chunk_search import POWERS
from espalier.engines.overflow import LARGEST, ScoredLive, masks_of, parents_of
from espalier.engines.stages import Frontier, TreeQuery
from espalier.live.overlay import LiveLeaves
from espalier.manifest import Ranking
from espalier.read_only import read_only
from espalier.thread_scratch import ThreadScratch

Array = NDArray[Any]


class LinearLeaves:
    """Scores the live leaves of one tree of `width` features. Any number of threads may call it."""

    def __init__(self, ranking: Ranking, width: int) -> None:
        power = POWERS[ranking.activation] if ranking.own == "log_activation" else -1
        self._ranker = np.float32(ranking.gamma), power
        self._scratch = ThreadScratch(lambda size: np.zeros(width, np.float32))
        self._known: tuple[LiveLeaves, tuple[Array, ...]] | None = None

    def scored(
        self, leaves: LiveLeaves, query: TreeQuery, frontier: Frontier, states_BS: object, live_BR: Sequence[NDArray[np.bool_] | None]
    ) -> ScoredLive:
        """See `LeafScorer`; linear scorers take no states."""
        known = self._known  # read once: another thread may put those of other leaves there
        if known is None or known[0] is not leaves:
            known = self._known = leaves, arrays_of(leaves)
        beams = read_only(frontier.nodes_BK, frontier.ranks_BK)
        with self._scratch.of() as query_F:
            return ScoredLive(*score(query.queries.features.arrays, beams, known[1], masks_of(live_BR), self._ranker, query_F))


def arrays_of(leaves: LiveLeaves) -> tuple[Array, ...]:
    """Live leaves as compiled code takes them."""
    pool = leaves.sparse
    if pool is None:
        raise ValueError("live leaves without weights")
    of_pool = pool.begin_P, pool.end_P, pool.bias_P, pool.feature, pool.weight
    return read_only(leaves.parent_Y, leaves.begin_Y, leaves.handle_X, leaves.place_X, *of_pool)


@compiled(fastmath={"reassoc", "contract"})
def _product(begin: Any, end: Any, feature: Array, weight: Array, query_F: Array) -> Any:
    """Σ weight · feature, in float64. Indices are unsigned: numba tests signed ones for whether they count from the end."""
    total = 0.0
    for e in range(np.uint64(begin), np.uint64(end)):
        total += np.float64(query_F[np.uint64(feature[e])]) * np.float64(weight[e])
    return total


@compiled()
def _rank(logit: Any, above: Any, power: int) -> Any:
    """A leaf's rank: own + above, NaN where the logit is not finite; `power` as Ranker has it."""
    one, zero = np.float32(1), np.float32(0)
    if not abs(logit) <= LARGEST:
        return np.float32(np.nan)
    if power < 0:
        return logit + above
    if power == 0:
        return above + (min(logit, zero) - np.log1p(np.exp(-abs(logit))))
    short = max(one - logit, zero)
    loss = short
    for _ in range(1, power):
        loss *= short
    return above - loss


@compiled()
def score(queries: Any, beams: Any, leaves: Any, masks: Any, ranker: Any, query_F: Array) -> tuple[Array, Array, Array]:
    """The fields of ScoredLive. query_F: float32[F] of zeros, before and after."""
    indptr, indices, values = queries
    nodes_BK, ranks_BK = beams
    parent_Y, begin_Y, handle_X, place_X, begin_P, end_P, bias_P, feature, weight = leaves
    mask_B, eligible_GR = masks
    gamma, power = ranker
    batch = len(mask_B)
    begin_B, at_BK, most = np.zeros(batch + 1, np.int64), np.empty(nodes_BK.shape, np.int64), 0
    for b in range(batch):
        if mask_B[b] >= 0:
            parents_of(nodes_BK[b], parent_Y, at_BK[b])
            for at in at_BK[b]:
                if at >= 0:
                    most += begin_Y[at + 1] - begin_Y[at]
    position_C, ranks_C, count = np.empty(most, np.int64), np.empty(most, np.float32), 0
    for b in range(batch):
        if mask_B[b] >= 0 and most > 0:
            for j in range(indptr[b], indptr[b + 1]):
                query_F[indices[j]] = values[j]
            for k in range(nodes_BK.shape[1]):
                if at_BK[b, k] < 0:
                    continue
                above = gamma * ranks_BK[b, k]
                for x in range(begin_Y[at_BK[b, k]], begin_Y[at_BK[b, k] + 1]):
                    handle, place = handle_X[x], place_X[x]
                    if handle >= eligible_GR.shape[1] or not eligible_GR[mask_B[b], handle]:
                        continue
                    logit = bias_P[place] + _product(begin_P[place], end_P[place], feature, weight, query_F)
                    rank = _rank(np.float32(logit), above, power)
                    if abs(rank) <= LARGEST:
                        position_C[count], ranks_C[count] = x, rank
                        count += 1
            for j in range(indptr[b], indptr[b + 1]):
                query_F[indices[j]] = 0
        begin_B[b + 1] = count
    return begin_B, position_C[:count], ranks_C[:count]
