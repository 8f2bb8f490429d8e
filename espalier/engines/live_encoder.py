"""Encodes histories that hold live items: query.onnx runs over a small table of the rows that a history needs.

On the leaf level a live item of a history counts by its live row; above it, by its parent and the parent's ancestors, as after a fold. A
trained item whose row was changed counts by the new row; a deleted trained item, as it was trained. A deleted live id is unknown. To frozen
queries all live ids are unknown. Unknown items are dropped, and the rest of the history moves up to its end.

The graph gets a table of the rows that it looks up, and node numbers that index this table. A graph that only looks rows up computes the
same states from it. Whether it does is read from the graph and checked on random histories.

Legend: B queries, T history, L levels, N nodes, C rows of a table, D node row, S state, R handles.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
from numpy.typing import NDArray

from espalier.bundle import Bundle
from espalier.engines.encoder import QueryEncoder, read_length
from espalier.entry_lists import NO_ENTRIES
from espalier.errors import InvalidQuery, UnsupportedGraph
from espalier.live.overlay import PARENT, LiveLeaves, Overlay
from espalier.node_rows import stored_as
from espalier.queries import PADDING, HistoryKind

log = logging.getLogger(__name__)
Array = NDArray[Any]
Int64 = NDArray[np.int64]
TRIALS = 4
"""Random histories on which the small table is compared with all node rows."""


class LiveEncoder:
    """See the module. Any number of threads may call it.

    encoder  over all node rows
    Raises UnsupportedGraph where query.onnx does more with node rows, or with the numbers of nodes, than look rows up.
    """

    def __init__(self, bundle: Bundle, encoder: QueryEncoder) -> None:
        kind = bundle.graph_kind
        if not isinstance(kind, HistoryKind):
            raise UnsupportedGraph(f"{kind.kind} queries hold no items")
        if encoder.other_use:
            raise UnsupportedGraph(encoder.other_use)
        self._tree, self._query_encoder, self.shape = bundle.tree, encoder, encoder.shape
        self._try_out(kind.length)

    def states(self, leaves: LiveLeaves, history_BT: Int64, handle_BT: Int64) -> NDArray[np.float32]:
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

    def _run(self, nodes_LT: Int64, live_PD: NDArray[np.float32] | None) -> Array:
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


def histories_of(overlay: Overlay, rows_BT: Int64, frozen_B: NDArray[np.bool_] | None, countable: bool) -> tuple[Int64, Int64]:
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


def opened_encoder(bundle: Bundle, encoder: QueryEncoder) -> LiveEncoder | None:
    """The encoder of a bundle of histories. None if its query.onnx cannot take live items, which are then unknown in histories."""
    try:
        return LiveEncoder(bundle, encoder)
    except UnsupportedGraph as error:
        log.warning("%s version %d: live items do not count in histories (%s)", bundle.manifest.name, bundle.manifest.version, error)
        return None
