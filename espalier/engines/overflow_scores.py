"""Scores the live leaves under the beams of a call. Compiled, but for scorers that only ONNX Runtime can run.

The live leaves of a parent are its overflow list: a fold would make them its children.

Legend: B queries, K beam, P entries of live leaves, C live leaves under a query's beam, D node row, S state, F features, G distinct masks,
R handles.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from espalier.arrays import Array, Bool, Float32, Int64, read_only
from espalier.bundle import Bundle
from espalier.compiled_code import compiled
from espalier.engines.compiled.mlp import FAST, mlp_logits, packed
from espalier.engines.encoder import free_inputs
from espalier.engines.graphs import load_graph
from espalier.engines.linear.chunk_search import power_of
from espalier.engines.runtime import opened_session, ort
from espalier.engines.scorer_weights import scorer_weights
from espalier.entry_lists import BORN, DIED, NEXT, OTHER_KEY
from espalier.errors import UnsupportedGraph
from espalier.live.overlay import LiveLeaves
from espalier.manifest import Ranking
from espalier.queries import QueryBatch
from espalier.search import Frontier
from espalier.thread_scratch import ThreadScratch

LARGEST = np.finfo(np.float32).max
(FIRST,) = read_only(np.zeros(1, np.int64))


class ScoredLive(NamedTuple):
    """Live leaves that were scored: those of query b are begin_B[b] … begin_B[b + 1] − 1.

    begin_B     int64[B + 1]
    entry_C     int64: their entries
    ranks_C     float32, finite: leaves without a finite rank are left out
    finite_B    bool[B]: False where some leaf has a logit that is not finite
    """

    begin_B: Int64
    entry_C: Int64
    ranks_C: Float32
    finite_B: Bool


class GraphLeaves:
    """Scores the live leaves of a bundle. Any number of threads may call it."""

    def __init__(self, bundle: Bundle) -> None:
        ranking = bundle.manifest.ranking
        self._gamma, self._power = np.float32(ranking.gamma), power_of(ranking)
        self._session: ort.InferenceSession | None = None
        try:
            self._weights = packed(scorer_weights(bundle))
        except UnsupportedGraph:  # no form is declared, or compiled code does not support it
            model = load_graph("scorer.onnx", bundle.graph("scorer.onnx"))
            free_inputs(model)
            self._session = opened_session(model)

    def scored(
        self,
        leaves: LiveLeaves,
        queries: QueryBatch,
        frontier: Frontier,
        states_BS: Float32 | None,
        live_BR: Sequence[Bool | None],
    ) -> ScoredLive:
        """The eligible live leaves under each query's beam.

        states_BS  the queries' states on the leaf level
        live_BR    see `EligibleNodes`. Queries of one mask share an array
        """
        if leaves.rows_PD is None:
            raise ValueError("live leaves without node rows")
        if states_BS is None:
            raise ValueError("queries without states")
        beams, masks = read_only(frontier.nodes_BK, frontier.ranks_BK), masks_of(live_BR)
        if self._session is None:
            rows = read_only(leaves.rows_PD, states_BS)
            return ScoredLive(*dense_leaves(beams, leaves.entries, masks, rows, self._weights, self._gamma, self._power))
        begin_B, entry_C, inherited_C = under_beams(beams, leaves.entries, masks, self._gamma)
        rows_1CD = leaves.rows_PD[entry_C][None]
        logits_C = np.empty(len(entry_C), np.float32)
        for b, (begin, end) in enumerate(pairwise(begin_B.tolist())):
            if end > begin:
                feeds = {"query_state": states_BS[b : b + 1], "node_rows": rows_1CD[:, begin:end]}
                logits_C[begin:end] = self._session.run(None, feeds)[0][0]
        return ScoredLive(*ranked(begin_B, entry_C, logits_C, inherited_C, self._power))


class LinearLeaves:
    """Scores the live leaves of trees of `width` features. Any number of threads may call it."""

    def __init__(self, ranking: Ranking, width: int) -> None:
        self._gamma, self._power = np.float32(ranking.gamma), power_of(ranking)
        self._scratch = ThreadScratch(lambda size: np.zeros(width, np.float32))

    def scored(
        self, leaves: LiveLeaves, queries: QueryBatch, frontier: Frontier, states_BS: object, live_BR: Sequence[Bool | None]
    ) -> ScoredLive:
        """See `GraphLeaves`; linear scorers take no states."""
        pool = leaves.sparse
        if pool is None:
            raise ValueError("live leaves without weights")
        weights = read_only(pool.begin_P, pool.end_P, pool.bias_P, pool.feature, pool.weight)
        under = read_only(frontier.nodes_BK, frontier.ranks_BK), leaves.entries, masks_of(live_BR)
        with self._scratch.of() as query_F:
            return ScoredLive(*sparse_leaves(*under, queries.features.arrays, weights, query_F, self._gamma, self._power))


def masks_of(live_BR: Sequence[Bool | None]) -> tuple[Array, ...]:
    """int64[B]: the mask of each query, −1 for none; bool[G, R]: the masks."""
    if len(live_BR) == 1 and live_BR[0] is not None:
        return read_only(FIRST, live_BR[0][None])
    distinct = list({id(live_R): live_R for live_R in live_BR if live_R is not None}.values())
    mask_number = {id(live_R): g for g, live_R in enumerate(distinct)}
    mask_B = np.array([-1 if live_R is None else mask_number[id(live_R)] for live_R in live_BR], np.int64)
    if len(distinct) == 1:
        return read_only(mask_B, distinct[0][None])
    eligible_GR = np.zeros((len(distinct), max(map(len, distinct), default=0)), np.bool_)
    for eligible_R, live_R in zip(eligible_GR, distinct, strict=True):
        eligible_R[: len(live_R)] = live_R
    return read_only(mask_B, eligible_GR)


@compiled()
def under_beams(beams: Any, entries: Any, masks: Any, gamma: Any) -> tuple[Array, Array, Array]:
    """The eligible live leaves under each query's beam: begin_B and entry_C of ScoredLive, and float32[C]: γ · their parents' ranks.

    beams    nodes_BK, ranks_BK of a frontier; −1 after a query's nodes
    entries  `EntryArrays` of live leaves
    masks    of `masks_of`
    """
    nodes_BK, ranks_BK = beams
    rows, first, length, _, moment = entries
    mask_B, eligible_GR = masks
    batch, beam = nodes_BK.shape
    max_leaves = 0
    for b in range(batch):
        for k in range(beam if mask_B[b] >= 0 else 0):
            if nodes_BK[b, k] < 0:
                break
            max_leaves += length[nodes_BK[b, k]]
    begin_B, count = np.zeros(batch + 1, np.int64), 0
    entry_C, inherited_C = np.empty(max_leaves, np.int64), np.empty(max_leaves, np.float32)
    for b in range(batch):
        for k in range(beam if mask_B[b] >= 0 else 0):
            if nodes_BK[b, k] < 0:
                break
            inherited = gamma * ranks_BK[b, k] if gamma > 0 else np.float32(0)
            entry = first[nodes_BK[b, k]]
            while entry > 0:
                if rows[entry, BORN] <= moment < rows[entry, DIED]:
                    handle = rows[entry, OTHER_KEY]
                    if handle < eligible_GR.shape[1] and eligible_GR[mask_B[b], handle]:
                        entry_C[count], inherited_C[count] = entry, inherited
                        count += 1
                entry = rows[entry, NEXT]
        begin_B[b + 1] = count
    return begin_B, entry_C[:count], inherited_C[:count]


@compiled(fastmath=FAST)
def dense_logits(begin_B: Array, nodes_C: Array, rows_PD: Array, states_BS: Array, scorer: Any) -> Array:
    """float32[C]: the logits of leaves with rows at nodes_C, for their queries. scorer: of `packed`."""
    logits_C = np.empty(len(nodes_C), np.float32)
    for b in range(len(states_BS)):
        begin, end = begin_B[b], begin_B[b + 1]
        if len(scorer[0]) > 0:
            mlp_logits(nodes_C[begin:end], end - begin, rows_PD, states_BS[b], scorer, logits_C[begin:end])
            continue
        for c in range(begin, end):
            node, logit = nodes_C[c], np.float32(0)
            for d in range(rows_PD.shape[1]):
                logit += rows_PD[node, d] * states_BS[b, d]
            logits_C[c] = logit
    return logits_C


@compiled(fastmath={"reassoc", "contract"})
def _product(begin: Any, end: Any, feature: Array, weight: Array, query_F: Array) -> Any:
    """Σ weight · feature, in float64. Indices are unsigned: numba tests signed ones for whether they count from the end."""
    total = 0.0
    for e in range(np.uint64(begin), np.uint64(end)):
        total += np.float64(query_F[np.uint64(feature[e])]) * np.float64(weight[e])
    return total


@compiled()
def sparse_logits(begin_B: Array, entry_C: Array, queries: Any, weights: Any, query_F: Array) -> Array:
    """float32[C]: bias + Σ weight · feature of leaves, for their queries. As in the reference, sums are float64, then rounded to float32.

    queries  indptr, indices, values: the features
    weights  begin_P, end_P, bias_P, feature, weight of a `SparsePool`
    query_F  float32[F] of zeros, before and after: a query's features are scattered into it
    """
    indptr, indices, values = queries
    begin_P, end_P, bias_P, feature, weight = weights
    logits_C = np.empty(len(entry_C), np.float32)
    for b in range(len(begin_B) - 1):
        if begin_B[b] == begin_B[b + 1]:
            continue
        for j in range(indptr[b], indptr[b + 1]):
            query_F[indices[j]] = values[j]
        for c in range(begin_B[b], begin_B[b + 1]):
            entry = entry_C[c]
            logits_C[c] = bias_P[entry] + _product(begin_P[entry], end_P[entry], feature, weight, query_F)
        for j in range(indptr[b], indptr[b + 1]):
            query_F[indices[j]] = 0
    return logits_C


@compiled()
def ranked(begin_B: Array, entry_C: Array, logits_C: Array, inherited_C: Array, power: int) -> tuple[Array, Array, Array, Array]:
    """The fields of ScoredLive: ranks own + inherited, without leaves whose logit or rank is not finite. power: of `power_of`."""
    ranks_C, entries_C = np.empty(len(logits_C), np.float32), np.empty(len(logits_C), np.int64)
    begins_B, finite_B = np.zeros_like(begin_B), np.ones(len(begin_B) - 1, np.bool_)
    one, zero, count = np.float32(1), np.float32(0), 0
    for b in range(len(finite_B)):
        for c in range(begin_B[b], begin_B[b + 1]):
            logit = logits_C[c]
            if not abs(logit) <= LARGEST:
                finite_B[b] = False
                continue
            rank = logit
            if power == 0:
                rank = min(logit, zero) - np.log1p(np.exp(-abs(logit)))
            elif power > 0:
                short = max(one - logit, zero)
                rank = -short
                for _ in range(1, power):
                    rank *= short
            rank += inherited_C[c]
            if abs(rank) <= LARGEST:
                entries_C[count], ranks_C[count] = entry_C[c], rank
                count += 1
        begins_B[b + 1] = count
    return begins_B, entries_C[:count], ranks_C[:count], finite_B


@compiled()
def dense_leaves(beams: Any, entries: Any, masks: Any, rows: Any, scorer: Any, gamma: Any, power: int) -> Any:
    """The fields of ScoredLive. rows: rows_PD and states_BS; scorer: of `packed`; see `under_beams` for the others."""
    begin_B, entry_C, inherited_C = under_beams(beams, entries, masks, gamma)
    logits_C = dense_logits(begin_B, entry_C, rows[0], rows[1], scorer)
    fields: Any = ranked(begin_B, entry_C, logits_C, inherited_C, power)
    return fields


@compiled()
def sparse_leaves(beams: Any, entries: Any, masks: Any, queries: Any, weights: Any, query_F: Array, gamma: Any, power: int) -> Any:
    """The fields of ScoredLive. See `sparse_logits` and `under_beams` for the arguments."""
    begin_B, entry_C, inherited_C = under_beams(beams, entries, masks, gamma)
    logits_C = sparse_logits(begin_B, entry_C, queries, weights, query_F)
    fields: Any = ranked(begin_B, entry_C, logits_C, inherited_C, power)
    return fields
