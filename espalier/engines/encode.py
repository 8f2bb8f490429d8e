"""The first stage of a search: encode histories and vectors into query states, once and outside of the engine.

If the engine encodes on its own device, only histories with live items are encoded here. `GivenQueries` are already encoded: a router sends
them, and golden queries of a shard are stored so, because a shard lacks the rows of other shards' items.

On the leaf level a live item of a history counts by its live row; above it, by its parent and the parent's ancestors, as after a fold. A
trained item whose row was changed counts by the new row; a deleted trained item, as it was trained. A deleted live id is unknown. To frozen
queries all live ids are unknown. Unknown items are dropped, and the rest of the history moves up to its end.

Legend: B queries, T history, L levels, N nodes, C rows of a table, D node row, S state, R handles.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

import numpy as np

from espalier.arrays import Array, Bool, Float32, Int64
from espalier.bundle import Bundle
from espalier.engines.encoder import QueryEncoder, read_length
from espalier.engines.stages import GivenQueries
from espalier.entry_lists import NO_ENTRIES
from espalier.errors import MISSING, InvalidQuery, UnsupportedGraph
from espalier.live.overlay import PARENT, LiveLeaves, Overlay
from espalier.manifest import GraphScorer
from espalier.node_rows import stored_as
from espalier.queries import PADDING, HistoryKind, QueryBatch
from espalier.search import NodeMask
from espalier.tree import Tree

log = logging.getLogger(__name__)
TRIALS = 4
"""Random histories on which a table of live items' rows is compared with all node rows."""


class EncodedQueries(NamedTuple):
    """queries: histories without unknown rows · states_BLS, encoded_B: see `TreeQuery`."""

    queries: QueryBatch
    states_BLS: Float32 | None
    encoded_B: Bool | None = None


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

    def take_live_items(self) -> bool:
        """Open the encoder of histories with live items, before the first search with live items.

        Returns whether live items count in histories. If query.onnx cannot take them, they are unknown there.
        """
        manifest = self._bundle.manifest
        if not self._is_open_for_live_items and self._makes_states and isinstance(manifest.query, HistoryKind):
            encoder = self._query_encoder or QueryEncoder.open(self._bundle)
            try:
                self._live = LiveEncoder(self._bundle.tree, encoder, manifest.query.length)
            except UnsupportedGraph as error:
                log.warning("%s version %d: live items do not count in histories (%s)", manifest.name, manifest.version, error)
        self._is_open_for_live_items = True
        return self._live is not None

    def of(
        self,
        queries: QueryBatch,
        beam_size_B: Int64,
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


class LiveEncoder:
    """Encodes histories that hold live items: query.onnx runs over a small table of the rows that a history needs.

    The graph gets a table of the rows that it looks up, and node numbers that index this table. A graph that only looks rows up computes
    the same states from it. Whether it does is read from the graph and checked on random histories. Any number of threads may call it.

    encoder  over all node rows
    length   of histories
    Raises UnsupportedGraph where query.onnx does more with node rows, or with the numbers of nodes, than look rows up.
    """

    def __init__(self, tree: Tree, encoder: QueryEncoder, length: int) -> None:
        if encoder.other_use:
            raise UnsupportedGraph(encoder.other_use)
        self._tree, self._query_encoder, self.shape = tree, encoder, encoder.shape
        self._try_out(length)

    def states(self, leaves: LiveLeaves, history_BT: Int64, handle_BT: Int64) -> Float32:
        """float32[B, H + 1 or 1, S]: the states of each history, as query.onnx returns them.

        history_BT  item rows, −1 as padding
        handle_BT   the handle of an item that counts by its live leaf, which must exist; −1 for an item that counts as it was trained
        """
        states_BLS = np.empty((len(history_BT), *self.shape), np.float32)
        for b, (history_T, handle_T) in enumerate(zip(history_BT, handle_BT, strict=True)):
            if self._query_encoder.takes_any_length:
                read = slice(-read_length(np.maximum(history_T, handle_T)), None)
                history_T, handle_T = history_T[read], handle_T[read]
            states_BLS[b] = self._run(self._nodes(leaves, history_T, handle_T), leaves.rows_PD)
        return states_BLS

    def _nodes(self, leaves: LiveLeaves, history_T: Int64, handle_T: Int64) -> Int64:
        """int64[L, T]: the ancestors of a history's items (a sequence encoder: only the leaves), −1 for padding; N + p: live entry p."""
        tree = self._tree
        trained_T = np.where((history_T >= 0) & (handle_T < 0), history_T, -1)
        leaf_T = np.where(trained_T >= 0, tree.leaf_of_item[trained_T], -1)
        parent_T = np.where(leaf_T >= 0, tree.parent[leaf_T], -1)
        live = np.flatnonzero(handle_T >= 0)
        if len(live):
            entries = leaves.of_handles(handle_T[live])
            leaf_T[live], parent_T[live] = tree.node_count + entries, leaves.column(PARENT, entries)
        if self._query_encoder.reads_sequences:
            return leaf_T[None]
        path = [leaf_T, parent_T]
        for _ in range(tree.height - 1):
            path.append(np.where(path[-1] >= 0, tree.parent[path[-1]], -1))
        return np.array(path[::-1])

    def _run(self, nodes_LT: Int64, live_PD: Float32 | None) -> Array:
        """float32[H + 1 or 1, S]: the states of one history. The table begins with the root's row and ends with the last node's.

        For padding, graphs may look up row 0 or −1 and then drop its numbers, so both rows are there.
        """
        count = self._tree.node_count
        distinct, position = np.unique(np.append(nodes_LT[nodes_LT >= 0], (0, count - 1)), return_inverse=True)
        trained = distinct < count
        rows = self._query_encoder.rows
        table = np.empty((len(distinct) + 1, rows.shape[1]), rows.dtype)
        table[:-1][trained] = rows[distinct[trained]]
        table[-1] = rows[count - 1]
        if live_PD is not None:
            table[:-1][~trained] = stored_as(live_PD[distinct[~trained] - count], rows.dtype)
        compact_LT = np.full(nodes_LT.shape, -1, np.int64)
        compact_LT[nodes_LT >= 0] = position[:-2]
        return self._query_encoder.run(compact_LT if self._query_encoder.reads_sequences else compact_LT[None], table)

    def _try_out(self, length: int) -> None:
        """Raise UnsupportedGraph unless some histories have the same states with a table as with all node rows."""
        rng = np.random.default_rng(0)
        history_BT = rng.integers(0, self._tree.item_count, (TRIALS, length))
        history_BT[1:, : length // 2] = -1
        no_leaves = LiveLeaves(NO_ENTRIES, 0, None, None)
        expected = self._query_encoder.states(history_BT, [0] * TRIALS)
        try:
            from_table = self.states(no_leaves, history_BT, np.full_like(history_BT, -1))
        except Exception as error:  # ONNX Runtime's own classes derive from nothing narrower
            raise UnsupportedGraph(f"query.onnx cannot be run over a part of the node rows ({error})") from error
        if not np.allclose(from_table, expected, rtol=1e-5, atol=1e-5 * max(1.0, float(np.abs(expected).max()))):
            raise UnsupportedGraph("query.onnx gives other states over a part of the node rows: it does more with nodes than look rows up")


def histories_of(overlay: Overlay, rows_BT: Int64, frozen_B: Bool | None, countable: bool) -> tuple[Int64, Int64]:
    """Histories without unknown items. rows_BT: item rows of bundle and overlay, int64[B, T], with PADDING.

    The first array has the known item rows, with PADDING in front; the second has the handle of each item that counts by its live leaf, −1
    where an item counts as it was trained.

    frozen_B   queries that see the trained items only; None: no query does
    countable  whether live rows can count in histories; if not, live items are unknown, and changed items count as they were trained
    Raises InvalidQuery where a row is in neither bundle nor overlay.
    """
    highest = int(rows_BT.max(initial=PADDING))
    if highest >= overlay.items + overlay.handles:
        raise InvalidQuery("queries", highest, f"item rows from 0 to {overlay.items + overlay.handles - 1}, or {PADDING} as padding")
    if highest < overlay.items and not overlay.moved:
        return rows_BT, np.full_like(rows_BT, -1)
    handles_BT = overlay.handles_of(rows_BT)
    counts_BT = overlay.trees[0].of_handles(handles_BT.ravel()).reshape(handles_BT.shape) > 0
    if not countable:
        counts_BT[:] = False
    elif frozen_B is not None:
        counts_BT[frozen_B] = False
    unknown_BT = (rows_BT >= overlay.items) & ~counts_BT
    handles_BT = np.where(counts_BT, handles_BT, -1)
    rows_BT = rows_BT.copy()
    for b in np.flatnonzero(unknown_BT.any(axis=1)).tolist():
        known_T = np.flatnonzero((rows_BT[b] >= 0) & ~unknown_BT[b])
        newest = slice(len(rows_BT[b]) - len(known_T), None)
        rows_T, handles_T = rows_BT[b, known_T], handles_BT[b, known_T]
        rows_BT[b], handles_BT[b] = PADDING, -1
        rows_BT[b, newest], handles_BT[b, newest] = rows_T, handles_T
    return rows_BT, handles_BT


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
            raise InvalidQuery("states_BLS", MISSING, expected)
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
