"""Scores live leaves with a graph's scorer: inner products and MLPs are compiled, other scorers run in ONNX Runtime.

Legend: B queries, P entries of live leaves, C live leaves under a query's beam, D node row, S state.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from espalier.bundle import Bundle
from espalier.compiled_code import compiled
from espalier.engines.compiled.mlp import FAST, mlp_logits, packed
from espalier.engines.encoder import free_inputs
from espalier.engines.graphs import load_graph
from espalier.engines.overflow import LARGEST, ScoredLive, masks_of, under_beams
from espalier.engines.runtime import opened_session, ort
from espalier.engines.scorer_weights import scorer_weights
from espalier.engines.stages import Frontier
from espalier.errors import UnsupportedGraph
from espalier.live.overlay import LiveLeaves
from espalier.queries import QueryBatch
from espalier.read_only import read_only

Array = NDArray[Any]


class GraphLeaves:
    """Scores the live leaves of a bundle. Any number of threads may call it."""

    def __init__(self, bundle: Bundle) -> None:
        ranking = bundle.manifest.ranking
        self._gamma, self._log_sigmoid = np.float32(ranking.gamma), ranking.own == "log_activation"
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
        states_BS: NDArray[np.float32] | None,
        live_BR: Sequence[NDArray[np.bool_] | None],
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
            return ScoredLive(*scored_leaves(beams, leaves.entries, masks, rows, self._weights, self._gamma, self._log_sigmoid))
        begin_B, entry_C, inherited_C = under_beams(beams, leaves.entries, masks, self._gamma)
        rows_1CD = leaves.rows_PD[entry_C][None]
        logits_C = np.empty(len(entry_C), np.float32)
        for b, (begin, end) in enumerate(pairwise(begin_B.tolist())):
            if end > begin:
                feeds = {"query_state": states_BS[b : b + 1], "node_rows": rows_1CD[:, begin:end]}
                logits_C[begin:end] = self._session.run(None, feeds)[0][0]
        return ScoredLive(*ranked(begin_B, entry_C, logits_C, inherited_C, self._log_sigmoid))


@compiled(fastmath=FAST)
def leaf_logits(begin_B: Array, nodes_C: Array, rows_PD: Array, states_BS: Array, scorer: Any) -> Array:
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


@compiled()
def ranked(begin_B: Array, entry_C: Array, logits_C: Array, inherited_C: Array, log_sigmoid: bool) -> tuple[Array, Array, Array, Array]:
    """The fields of ScoredLive: ranks own + inherited, without leaves whose logit or rank is not finite."""
    ranks_C, entries_C = np.empty(len(logits_C), np.float32), np.empty(len(logits_C), np.int64)
    begins_B, finite_B = np.zeros_like(begin_B), np.ones(len(begin_B) - 1, np.bool_)
    zero, count = np.float32(0), 0
    for b in range(len(finite_B)):
        for c in range(begin_B[b], begin_B[b + 1]):
            logit = logits_C[c]
            if not abs(logit) <= LARGEST:
                finite_B[b] = False
                continue
            rank = logit
            if log_sigmoid:
                rank = min(logit, zero) - np.log1p(np.exp(-abs(logit)))
            rank += inherited_C[c]
            if abs(rank) <= LARGEST:
                entries_C[count], ranks_C[count] = entry_C[c], rank
                count += 1
        begins_B[b + 1] = count
    return begins_B, entries_C[:count], ranks_C[:count], finite_B


@compiled()
def scored_leaves(beams: Any, entries: Any, masks: Any, rows: Any, scorer: Any, gamma: Any, log_sigmoid: bool) -> Any:
    """The fields of ScoredLive. rows: rows_PD and states_BS; scorer: of `packed`; see `under_beams` for the others."""
    begin_B, entry_C, inherited_C = under_beams(beams, entries, masks, gamma)
    logits_C = leaf_logits(begin_B, entry_C, rows[0], rows[1], scorer)
    fields: Any = ranked(begin_B, entry_C, logits_C, inherited_C, log_sigmoid)
    return fields
