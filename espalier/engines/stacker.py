"""Stacking reorders the best candidates of a search. See espalier.stacking for the formulas; the keys are compiled.

Knows candidates. Does not know how or where trees are searched: with shards, the candidates are the best of all shards.

Legend: B queries, M results, I items, F features of queries, P points, C candidates, X features of candidates, H units.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from espalier.arrays import Array, Int64, read_only
from espalier.bundle import Bundle
from espalier.compiled_code import compiled
from espalier.engines.best_nodes import best_first, best_positions
from espalier.queries import QueryBatch
from espalier.scores import scores_of_ranks
from espalier.search import NO_ITEM, SearchResult
from espalier.stacking import BESIDE_OF, FARTHEST, FEATURES, FLOOR, LOWEST, NEAREST, NETWORK, VOTES, Stacking, StackingTables
from espalier.stored_numbers import number, stored
from espalier.thread_scratch import ThreadScratch

STRETCH = 20
"""The network may make differences of ranks so many times larger: logits of scores near 1 are steep."""
KNOWN = len(FEATURES)
LOG_FLOOR = float(np.log(FLOOR))
SCORE, COUNT, VOTE, NEAR, BESIDE, LENGTH = map(FEATURES.index, ("score.log", "item.count", "vote.5", "near.1", "beside", "query.length"))
"""The columns where groups of features begin."""
(FEW, STEEP), (SOME, BENT), (_, _) = VOTES


class Scratch(NamedTuple):
    """Buffers of a search. position_I: int32, for all items, also live ones, −1 before and after a call. The others hold any values."""

    position_I: Array
    cosine_P: Array
    rounded_P: Array
    ordered_P: Array

    @staticmethod
    def of(items: int, points: int) -> Scratch:
        return Scratch(np.full(items, -1, np.int32), np.empty(points), np.empty(points, np.float32), np.empty(points, np.int32))


def table_arrays(tables: StackingTables) -> StackingTables:
    """Tables as compiled code reads them."""
    return StackingTables(*read_only(*(stored(np.ascontiguousarray(table)) for table in tables)))


class Stacker:
    """Reorders candidates. Any number of threads may call it. stacking: the bundle's."""

    def __init__(self, bundle: Bundle, stacking: Stacking) -> None:
        self._info, self._ranking, self._items = stacking.info, bundle.manifest.result_ranking, bundle.manifest.tree.items
        self._tables = table_arrays(stacking.tables)
        self._network: tuple[Array, ...] = read_only(*(np.ascontiguousarray(getattr(stacking.network, name)) for name in NETWORK))
        items, points = self._items, stacking.tables.points
        self._scratch = ThreadScratch(lambda handles: Scratch.of(items + handles, points))

    def candidate_counts(self, m_B: Int64, items: int) -> Int64:
        """int64[B]: how many candidates a query needs to get m results from a catalogue of `items` items."""
        return np.maximum(m_B, min(self._info.candidates, items))

    def ordered(self, queries: QueryBatch, candidates: SearchResult, m_B: Int64) -> SearchResult:
        """The best m candidates, in the order of stacking.

        candidates  the best max(m, stacking.candidates) items by the trees' keys, or all items if there are fewer; live items have rows
                    from I on
        """
        rows_BM, keys_BM = np.full_like(candidates.item_rows_BM, NO_ITEM), np.full_like(candidates.ranks_BM, -np.inf)
        features, handles = queries.features, max(int(candidates.item_rows_BM.max(initial=0)) + 1 - self._items, 0)
        with self._scratch.of(handles) as scratch:
            stack(
                candidates.item_rows_BM,
                candidates.keys_BM,
                candidates.count_B,
                (features.indptr, features.indices, features.values),
                self._info.candidates,
                self._info.power,
                self._tables,
                self._network,
                scratch,
                (rows_BM, keys_BM),
            )
        width = int(m_B.max(initial=0))
        rows_BM, keys_BM = rows_BM[:, :width].copy(), keys_BM[:, :width].copy()
        count_B = np.minimum(candidates.count_B, m_B)
        beyond_BM = np.arange(width) >= count_B[:, None]
        rows_BM[beyond_BM], keys_BM[beyond_BM] = NO_ITEM, -np.inf
        return replace(
            candidates,
            item_rows_BM=rows_BM,
            scores_BM=scores_of_ranks(self._ranking, keys_BM),
            ranks_BM=keys_BM,
            keys_BM=keys_BM,
            count_B=count_B,
            complete_B=candidates.complete_B | (candidates.count_B >= m_B),
        )


@compiled()
def _of_item(array_I: Array, item: Any) -> Any:
    """An item's number; 0 for a live item, which the tables do not have."""
    return array_I[item] if item < len(array_I) else np.float32(0)


@compiled()
def candidate_features(
    items: Array, ranks: Array, count: int, features: Array, values: Array, tables: Any, scratch: Any, out_CX: Array
) -> None:
    """Write the features of the first `count` candidates of a query, best first.

    items, ranks      int64[C], float32[C]: logs of the trees' scores. Live items are in no table: their count and votes are 0, and no item
                      is beside them
    features, values  int32, float32: the query's
    out_CX            float64[C, X]
    """
    position_I = scratch.position_I
    for c in range(count):
        position_I[items[c]] = c
        for x in range(KNOWN):
            out_CX[c, x] = 0.0
        out_CX[c, LENGTH] = np.log1p(np.float64(len(features)))
    _score_columns(items, ranks, count, tables, out_CX)
    nearest, cosines = _nearest_points(features, values, tables, scratch)
    _vote_columns(nearest, cosines, count, tables, position_I, out_CX)
    _beside_columns(items, count, tables, position_I, out_CX)
    for c in range(count):
        position_I[items[c]] = -1


@compiled()
def _score_columns(items: Array, ranks: Array, count: int, tables: Any, out_CX: Array) -> None:
    """The columns from SCORE on, and the counts of items."""
    best, total = min(max(np.float64(ranks[0]), LOG_FLOOR), 0.0), 0.0
    for c in range(count):
        log = min(max(np.float64(ranks[c]), LOG_FLOOR), 0.0)
        score = np.exp(log)
        total += score
        capped = min(score, 1 - FLOOR)
        out_CX[c, SCORE], out_CX[c, SCORE + 1], out_CX[c, SCORE + 2] = log, log - best, np.log(capped) - np.log1p(-capped)
    for c in range(count):
        out_CX[c, SCORE + 3], out_CX[c, SCORE + 4], out_CX[c, COUNT] = best, total, _of_item(tables.log_count, items[c])


@compiled()
def _nearest_points(features: Array, values: Array, tables: Any, scratch: Any) -> tuple[Array, Array]:
    """The points nearest to a query, best first, ties by number, and their cosines: int64, float32; none if it has no features."""
    posting_begin, posting_point, posting_value = tables.posting_begin, tables.posting_point, tables.posting_value
    cosine_P, rounded_P = scratch.cosine_P, scratch.rounded_P
    points, length = len(cosine_P), 0.0
    for p in range(points):
        cosine_P[p] = 0.0
    for j in range(len(features)):
        f = features[j]
        weighed = np.float64(values[j]) * tables.feature_weight[f]
        length += weighed * weighed
        for e in range(posting_begin[f], posting_begin[f + 1]):
            cosine_P[posting_point[e]] += weighed * number(posting_value[e])
    nearest_in_order = np.empty(NEAREST, np.int64)
    reached = 0
    if length > 0 and points > 0:
        length = np.sqrt(length)
        for p in range(points):
            rounded_P[p] = cosine_P[p] / length
        reached = best_positions(rounded_P, points, NEAREST, scratch.ordered_P, nearest_in_order)
    unordered = np.empty(reached, np.float32)
    for n in range(reached):
        unordered[n] = rounded_P[nearest_in_order[n]]
    order = best_first(unordered, reached)
    nearest, cosines = np.empty(reached, np.int64), np.empty(reached, np.float32)
    for n in range(reached):
        nearest[n], cosines[n] = nearest_in_order[order[n]], unordered[order[n]]
    return nearest, cosines


@compiled()
def _vote_columns(nearest: Array, cosines: Array, count: int, tables: Any, position_I: Array, out_CX: Array) -> None:
    """The columns from VOTE on, and those from NEAR on."""
    label_begin, label, label_value = tables.label_begin, tables.label, tables.label_value
    reached, totals = len(nearest), np.zeros(3)
    if reached == 0:
        return
    best = np.float64(cosines[0])
    for n in range(reached):
        if cosines[n] <= 0:
            break
        share = cosines[n] / best
        bent = share**BENT if n < SOME else 0.0
        steep = share**STEEP if n < FEW else 0.0
        totals[0] += steep
        totals[1] += bent
        totals[2] += share
        for e in range(label_begin[nearest[n]], label_begin[nearest[n] + 1]):
            c = position_I[label[e]]
            if c >= 0:
                out_CX[c, VOTE] += steep * label_value[e]
                out_CX[c, VOTE + 1] += bent * label_value[e]
                out_CX[c, VOTE + 2] += share * label_value[e]
    last = np.float64(cosines[min(SOME, reached) - 1])
    for c in range(count):
        for q in range(3):
            if totals[q] > 0:
                out_CX[c, VOTE + q] /= totals[q]
        out_CX[c, NEAR], out_CX[c, NEAR + 1] = best, last


@compiled()
def _beside_columns(items: Array, count: int, tables: Any, position_I: Array, out_CX: Array) -> None:
    """The columns from BESIDE on; the logs of scores are already written."""
    beside_begin, beside, beside_share = tables.beside_begin, tables.beside, tables.beside_share
    for j in range(min(count, BESIDE_OF)):
        if items[j] >= len(beside_begin) - 1:
            continue
        score = np.exp(out_CX[j, SCORE])
        for e in range(beside_begin[items[j]], beside_begin[items[j] + 1]):
            c = position_I[beside[e]]
            if c >= 0 and c != j:
                out_CX[c, BESIDE] += score * beside_share[e]
    largest = 0.0
    for c in range(count):
        largest = max(largest, out_CX[c, BESIDE])
    if largest > 0:
        for c in range(count):
            out_CX[c, BESIDE + 1] = out_CX[c, BESIDE] / largest


@compiled()
def log_estimates(features_CX: Array, count: int, network: Any, out_C: Array) -> None:
    """Write log σ(network) of the first `count` candidates: float64[C]."""
    mean, scale, weight_1, bias_1, weight_2, bias_2, weight_3, bias_3 = network
    first, second = len(bias_1), len(bias_2)
    hidden_1, hidden_2 = np.empty(first), np.empty(second)
    for c in range(count):
        hidden_1[:] = bias_1
        for x in range(KNOWN):
            z = min(max((features_CX[c, x] - mean[x]) * scale[x], -FARTHEST), FARTHEST)
            for h in range(first):
                hidden_1[h] += z * weight_1[x, h]
        hidden_2[:] = bias_2
        for h in range(first):
            unit = hidden_1[h]
            if unit > 0:
                for g in range(second):
                    hidden_2[g] += unit * weight_2[h, g]
        logit = np.float64(bias_3[0])
        for g in range(second):
            logit += max(hidden_2[g], 0.0) * weight_3[g]
        out_C[c] = min(logit, 0.0) - np.log1p(np.exp(-abs(logit)))


@compiled()
def stack(
    rows_BM: Array,
    ranks_BM: Array,
    count_B: Array,
    queries: Any,
    depth: int,
    power: float,
    tables: Any,
    network: Any,
    scratch: Any,
    out: Any,
) -> None:
    """Reorder the first `depth` items of each query; write rows int64[B, M] and keys float32[B, M], best first, ties in the old order.

    queries  indptr, indices and values of their features
    out      rows and keys
    """
    indptr, indices, values = queries
    out_rows_BM, out_keys_BM = out
    features_CX, estimates_C, keys_C = np.empty((depth, KNOWN)), np.empty(depth), np.empty(depth, np.float32)
    for b in range(len(count_B)):
        count = min(count_B[b], depth)
        if count == 0:
            continue
        span = slice(indptr[b], indptr[b + 1])
        candidate_features(rows_BM[b], ranks_BM[b], count, indices[span], values[span], tables, scratch, features_CX)
        log_estimates(features_CX, count, network, estimates_C)
        for c in range(count):
            keys_C[c] = max(estimates_C[c] + power * np.float64(_of_item(tables.log_weight, rows_BM[b, c])), LOWEST)
        order = best_first(keys_C, count)
        for c in range(count):
            out_rows_BM[b, c], out_keys_BM[b, c] = rows_BM[b, order[c]], keys_C[order[c]]
        for c in range(count, count_B[b]):
            below = np.float64(ranks_BM[b, c]) - np.float64(ranks_BM[b, count])
            out_rows_BM[b, c], out_keys_BM[b, c] = rows_BM[b, c], max(np.float64(out_keys_BM[b, count - 1]) + below, LOWEST)
