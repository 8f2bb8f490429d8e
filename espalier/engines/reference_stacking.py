"""Stacking in NumPy, for the `reference` engine: dense vectors, one formula a line, sharing no code with the compiled stacking.

Live items have rows past the end of the tables: their count and votes are 0, no item is beside them, and their weight is 1.

Legend: I items, F features of queries, P points, C candidates, X features of candidates.
"""

from __future__ import annotations

import numpy as np

from espalier.arrays import Array, Float32, Float64, Int32, Int64
from espalier.stacking import BESIDE_OF, FARTHEST, FLOOR, LOWEST, NEAREST, VOTES, Stacking, StackingTables


def stacked(stacking: Stacking, features: Int32, values: Float32, rows: Int64, ranks: Float32) -> tuple[Int64, Float32]:
    """All items that a search scored, in the order of stacking, best first, and their keys (float32)."""
    depth = min(stacking.info.candidates, len(rows))
    if depth == 0:
        return rows, ranks
    features_CX = candidate_features(stacking.tables, features, values, rows[:depth], ranks[:depth].astype(np.float64))
    log_weight = _of_items(stacking.tables.log_weight, rows[:depth])
    wide = _log_estimates(stacking, features_CX) + stacking.info.power * log_weight
    keys = np.maximum(wide, LOWEST).astype(np.float32)
    order = np.argsort(-keys, kind="stable")
    unstacked_ranks = ranks[depth:].astype(np.float64)
    below = np.maximum(float(keys.min()) + unstacked_ranks - unstacked_ranks[:1], LOWEST).astype(np.float32)
    return np.concatenate([rows[:depth][order], rows[depth:]]), np.concatenate([keys[order], below])


def _of_items(array_I: Array, rows: Int64) -> Array:
    """The entries of item rows in an array; 0 for live items."""
    return np.where(rows < len(array_I), array_I[np.minimum(rows, len(array_I) - 1)], 0)


def candidate_features(tables: StackingTables, features: Int32, values: Float32, rows: Int64, ranks: Float64) -> Float64:
    """float64[C, X]: `espalier.stacking.FEATURES`."""
    log_C = np.clip(ranks, np.log(FLOOR), 0)
    score_C = np.exp(log_C)
    capped_C = np.minimum(score_C, 1 - FLOOR)
    vote_CV, nearest, last = _votes(tables, features, values, rows)
    beside_C = np.zeros(len(rows))
    for j in range(min(BESIDE_OF, len(rows))):
        if rows[j] >= len(tables.log_count):
            continue
        span = slice(tables.beside_begin[rows[j]], tables.beside_begin[rows[j] + 1])
        share_I = np.zeros(len(tables.log_count))
        share_I[tables.beside[span]] = tables.beside_share[span]
        share_I[rows[j]] = 0
        beside_C += score_C[j] * _of_items(share_I, rows)
    columns = [log_C, log_C - log_C[0], np.log(capped_C) - np.log1p(-capped_C), log_C[0], score_C.sum(), _of_items(tables.log_count, rows)]
    columns += [*vote_CV.T, nearest, last, beside_C, beside_C / beside_C.max() if beside_C.any() else 0.0, np.log1p(len(features))]
    return np.stack([np.broadcast_to(np.asarray(column, np.float64), len(rows)) for column in columns], axis=1)


def _votes(tables: StackingTables, features: Int32, values: Float32, rows: Int64) -> tuple[Float64, float, float]:
    """float64[C, 3]: the votes; the cosines of the nearest point and of the 20th or last."""
    vote_CV = np.zeros((len(rows), len(VOTES)))
    weighed = values.astype(np.float64) * tables.feature_weight[features]
    length = float(np.sqrt((weighed**2).sum()))
    if length == 0 or tables.points == 0:
        return vote_CV, 0.0, 0.0
    cosine_P = np.zeros(tables.points)
    for feature, value in zip(features.tolist(), weighed.tolist(), strict=True):
        span = slice(tables.posting_begin[feature], tables.posting_begin[feature + 1])
        cosine_P[tables.posting_point[span]] += value * tables.posting_value[span].astype(np.float64)
    near_P = (cosine_P / length).astype(np.float32)
    order = np.argsort(-near_P, kind="stable")[:NEAREST]
    near = near_P[order].astype(np.float64)
    if near[0] > 0:
        share = np.maximum(near, 0) / near[0]
        label_NI = np.zeros((len(order), len(tables.log_count)))
        for n, point in enumerate(order.tolist()):
            span = slice(tables.label_begin[point], tables.label_begin[point + 1])
            label_NI[n, tables.label[span]] = tables.label_value[span]
        for v, (count, power) in enumerate(VOTES):
            weight = share[:count] ** power
            vote_CV[:, v] = _of_items(weight @ label_NI[:count], rows) / weight.sum()
    return vote_CV, float(near[0]), float(near[min(VOTES[1][0], len(near)) - 1])


def _log_estimates(stacking: Stacking, features_CX: Float64) -> Float64:
    """float64[C]: log σ(network)."""
    net = stacking.network
    z = np.clip((features_CX - net.mean) * net.scale, -FARTHEST, FARTHEST)
    hidden = np.maximum(z @ net.weight_1.astype(np.float64) + net.bias_1, 0)
    hidden = np.maximum(hidden @ net.weight_2.astype(np.float64) + net.bias_2, 0)
    logit = hidden @ net.weight_3.astype(np.float64) + net.bias_3[0]
    return np.asarray(np.minimum(logit, 0) - np.log1p(np.exp(-np.abs(logit))), np.float64)
