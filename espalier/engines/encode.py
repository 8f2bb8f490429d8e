"""The first stage of a search: encode histories and vectors into query states, once and outside of the engine.

If the engine encodes on its own device, only histories with live items are encoded here. `GivenQueries` are already encoded: a router sends
them, and golden queries of a shard are stored so, because a shard lacks the rows of other shards' items.

Legend: B queries, T history, L levels, S state.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from espalier.bundle import Bundle
from espalier.engines.encoder import QueryEncoder
from espalier.engines.live_encoder import LiveEncoder, histories_of, opened_encoder
from espalier.engines.stages import GivenQueries
from espalier.errors import InvalidQuery
from espalier.live.overlay import Overlay
from espalier.manifest import GraphScorer
from espalier.queries import PADDING, HistoryKind, QueryBatch
from espalier.search import NodeMask

Floats = NDArray[np.float32]


class EncodedQueries(NamedTuple):
    """queries: histories without unknown rows · states_BLS, encoded_B: see `TreeQuery`."""

    queries: QueryBatch
    states_BLS: Floats | None
    encoded_B: NDArray[np.bool_] | None = None


class Encoder:
    """Encodes the queries of a bundle. Any number of threads may call it.

    engine_encodes  the engine encodes queries without live items itself
    Raises UnsupportedGraph or BundleCorrupt where query.onnx cannot be run.
    """

    def __init__(self, bundle: Bundle, engine_encodes: bool) -> None:
        scorer = bundle.manifest.scorer
        self._bundle, self._tree = bundle, bundle.tree
        self._makes_states = isinstance(scorer, GraphScorer)
        self._query_encoder: QueryEncoder | None = None
        if self._makes_states and not engine_encodes:
            self._query_encoder = QueryEncoder.open(bundle)
        self._live: LiveEncoder | None = None
        self._is_open_for_live_items = False

    def take_live_items(self) -> None:
        """Open the encoder of histories with live items, before the first search with live items."""
        if not self._is_open_for_live_items and self._makes_states and isinstance(self._bundle.manifest.query, HistoryKind):
            self._live = opened_encoder(self._bundle, self._query_encoder or QueryEncoder.open(self._bundle))
        self._is_open_for_live_items = True

    def of(
        self,
        queries: QueryBatch,
        beam_size_B: NDArray[np.int64],
        every_level: bool,
        overlay: Overlay | None,
        mask_B: tuple[NodeMask | None, ...] | None,
    ) -> EncodedQueries:
        """Encode the queries.

        every_level  compute the states of all levels, not only of the levels that need pruning
        mask_B       a query whose mask has no live items sees the trained items only
        """
        if isinstance(queries, GivenQueries):
            return EncodedQueries(queries, queries.states_BLS)
        if not self._makes_states:
            return EncodedQueries(queries, None)
        first_B = [1] * len(queries)
        if not every_level and self._bundle.manifest.ranking.gamma == 0:
            first_B = self._tree.start_levels(beam_size_B).tolist()
        live_B = np.zeros(len(queries), np.bool_)
        if overlay is not None and isinstance(queries.kind, HistoryKind):
            frozen_B = None if mask_B is None else np.array([mask is not None and mask.live_R is None for mask in mask_B])
            rows_BT, handles_BT = histories_of(overlay, np.asarray(queries.array, np.int64), frozen_B, self._live is not None)
            queries, live_B = QueryBatch(queries.kind, rows_BT), np.any(handles_BT >= 0, axis=1)
        if overlay is None or self._live is None or not live_B.any():
            return EncodedQueries(queries, None if self._query_encoder is None else self._query_encoder.states(queries.array, first_B))
        live, trained_only = np.flatnonzero(live_B), np.flatnonzero(~live_B)
        states_BLS = np.zeros((len(queries), *self._live.shape), np.float32)
        states_BLS[live] = self._live.states(overlay.trees[0], rows_BT[live], handles_BT[live])
        if self._query_encoder is not None and len(trained_only):
            states_BLS[trained_only] = self._query_encoder.states(queries.array[trained_only], [first_B[b] for b in trained_only.tolist()])
        return EncodedQueries(queries, states_BLS, live_B if self._query_encoder is None else None)


def states_shape(bundle: Bundle, batch: int) -> tuple[int, int, int]:
    """B, L, S: the shape of query states."""
    scorer = bundle.graph_scorer
    return batch, bundle.manifest.tree.levels if scorer.state_levels > 1 else 1, scorer.state_dim


def check_queries(bundle: Bundle, queries: QueryBatch, handles: int = 0) -> None:
    """Raise InvalidQuery where queries, or the states that come with them, do not fit a bundle. handles: R, of live items."""
    kind, shard = bundle.manifest.query, bundle.manifest.shard
    if queries.kind is not kind and queries.kind != kind:
        raise InvalidQuery("queries", queries.kind, str(kind))
    if not isinstance(queries, GivenQueries):
        is_history = isinstance(kind, HistoryKind)
        if shard is not None and is_history and np.any(queries.array != PADDING):
            expected = f"the queries' states: shard {shard.index} of {shard.count} of {shard.of} has not the rows of all items"
            raise InvalidQuery("states_BLS", None, expected)
        if is_history or isinstance(bundle.manifest.scorer, GraphScorer):
            queries.check(bundle.manifest.tree.items + handles)
        return
    scorer, states_BLS = bundle.manifest.scorer, queries.states_BLS
    if not isinstance(scorer, GraphScorer):
        if states_BLS is not None:
            raise InvalidQuery("states_BLS", "states", f"None, as {scorer.kind} scorers have none")
        return
    shape = states_shape(bundle, len(queries))
    if states_BLS is None or states_BLS.shape != shape or states_BLS.dtype != np.float32:
        got = "none" if states_BLS is None else f"{states_BLS.dtype}{list(states_BLS.shape)}"
        raise InvalidQuery("states_BLS", got, f"float32{list(shape)}")
    if bundle.manifest.memory is not None and queries.memory is None:
        queries.check(bundle.manifest.history_items)
