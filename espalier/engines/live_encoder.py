"""Histories that hold live items: which items they know, and their states by query.onnx over the few rows that a history needs.

A live item of a history counts by its live row on the leaf level, and above it by its parent and that one's ancestors, as in a fold. A
trained item whose row was changed counts by that row, and a deleted one as it was trained. A deleted live id is unknown, as are all live
ids to frozen queries: histories are aligned anew without them.

In place of all node rows, the graph is given a table of the rows that it looks up and node numbers that
point into it, which is the same to a graph that uses them for nothing else: it is read, and tried out, before it is trusted.

Legend: B queries, T history, L levels, N nodes, C rows of a table, D node row, S state, R handles.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
from numpy.typing import NDArray

from espalier.bundle import Bundle
from espalier.engines.encoder import QueryEncoder, places
from espalier.entry_lists import NO_ENTRIES
from espalier.errors import InvalidQuery, UnsupportedGraph
from espalier.live.overlay import PARENT, LiveLeaves, Overlay
from espalier.node_rows import stored_as
from espalier.queries import PADDING, HistoryKind

log = logging.getLogger(__name__)
Array = NDArray[Any]
Int64 = NDArray[np.int64]
TRIED = 4
"""Random histories that the table is compared on with all node rows."""


class LiveEncoder:
    """See the module. Any number of threads may call it.

    whole  the encoder over all node rows
    Raises UnsupportedGraph where query.onnx does more with node rows, or with the numbers of nodes, than look rows up.
    """

    def __init__(self, bundle: Bundle, whole: QueryEncoder) -> None:
        kind = bundle.graph_kind
        if not isinstance(kind, HistoryKind):
            raise UnsupportedGraph(f"{kind.kind} queries hold no items")
        if whole.other_use:
            raise UnsupportedGraph(whole.other_use)
        self._tree, self._whole, self.shape = bundle.tree, whole, whole.shape
        self._try_out(kind.length)

    def states(self, leaves: LiveLeaves, history_BT: Int64, handle_BT: Int64) -> NDArray[np.float32]:
        """float32[B, H + 1 or 1, S]: the states of each history, as query.onnx gives them.

        history_BT  item rows, −1 as padding
        handle_BT   the handle by whose live leaf, which must be there, an item counts; −1 where it counts as it was trained
        """
        states_BLS = np.empty((len(history_BT), *self.shape), np.float32)
        for b, (history_T, handle_T) in enumerate(zip(history_BT, handle_BT, strict=True)):
            if self._whole.has_own_length:
                read = slice(-places(np.maximum(history_T, handle_T)), None)
                history_T, handle_T = history_T[read], handle_T[read]
            states_BLS[b] = self._run(self._nodes(leaves, history_T, handle_T), leaves.rows_PD)
        return states_BLS

    def _nodes(self, leaves: LiveLeaves, history_T: Int64, handle_T: Int64) -> Int64:
        """int64[L, T]: the ancestors of a history's items (only its leaves for a sequence), −1 for padding. N + p is the row of entry p."""
        tree = self._tree
        trained_T = np.where((history_T >= 0) & (handle_T < 0), history_T, -1)
        leaf_T = np.where(trained_T >= 0, tree.leaf_of_item[trained_T], -1)
        above_T = np.where(leaf_T >= 0, tree.parent[leaf_T], -1)
        live = np.flatnonzero(handle_T >= 0)
        if len(live):
            entries = leaves.of_handles(handle_T[live])
            leaf_T[live], above_T[live] = tree.node_count + entries, leaves.column(PARENT, entries)
        if self._whole.reads_sequences:
            return leaf_T[None]
        path = [leaf_T, above_T]
        for _ in range(tree.height - 1):
            path.append(np.where(path[-1] >= 0, tree.parent[path[-1]], -1))
        return np.array(path[::-1])

    def _run(self, nodes_LT: Int64, live_PD: NDArray[np.float32] | None) -> Array:
        """float32[H + 1 or 1, S]: the states of one history. The table begins with the root's row and ends with the last node's.

        Graphs may look up these two for padding, as row 0 or −1, whose numbers they then drop.
        """
        count = self._tree.node_count
        distinct, place_LT = np.unique(np.append(nodes_LT[nodes_LT >= 0], (0, count - 1)), return_inverse=True)
        trained = distinct < count
        rows = self._whole.rows
        table = np.empty((len(distinct) + 1, rows.shape[1]), rows.dtype)
        table[:-1][trained] = rows[distinct[trained]]
        table[-1] = rows[count - 1]
        if live_PD is not None:
            table[:-1][~trained] = stored_as(live_PD[distinct[~trained] - count], rows.dtype)
        compact_LT = np.full(nodes_LT.shape, -1, np.int64)
        compact_LT[nodes_LT >= 0] = place_LT[:-2]
        return self._whole.run(compact_LT if self._whole.reads_sequences else compact_LT[None], table)

    def _try_out(self, length: int) -> None:
        """Raise UnsupportedGraph unless some histories have the same states with a table as with all node rows."""
        rng = np.random.default_rng(0)
        history_BT = rng.integers(0, self._tree.item_count, (TRIED, length))
        history_BT[1:, : length // 2] = -1
        none = LiveLeaves(NO_ENTRIES, 0, None, None)
        whole = self._whole.states(history_BT, [0] * TRIED)
        try:
            small = self.states(none, history_BT, np.full_like(history_BT, -1))
        except Exception as error:  # ONNX Runtime's own classes derive from nothing narrower
            raise UnsupportedGraph(f"query.onnx cannot be run over a part of the node rows ({error})") from error
        if not np.allclose(small, whole, rtol=1e-5, atol=1e-5 * max(1.0, float(np.abs(whole).max()))):
            raise UnsupportedGraph("query.onnx gives other states over a part of the node rows: it does more with nodes than look rows up")


def histories_of(overlay: Overlay, rows_BT: Int64, frozen_B: NDArray[np.bool_] | None, countable: bool) -> tuple[Int64, Int64]:
    """The histories of item rows of bundle and overlay (int64[B, T], PADDING where there is none), as a search knows them.

    The first array has item rows, PADDING in front where something was unknown; the second the handles by whose live leaves items count,
    −1 where an item counts as it was trained.

    frozen_B   queries that see the bundle alone; None: none does
    countable  whether live rows can count in histories; if not, live items are unknown, and changed ones count as they were trained
    Raises InvalidQuery where one has a row that neither has.
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
        place_T = slice(len(rows_BT[b]) - len(known_T), None)
        rows_T, handles_T = rows_BT[b, known_T], handles_BT[b, known_T]
        rows_BT[b], handles_BT[b] = PADDING, -1
        rows_BT[b, place_T], handles_BT[b, place_T] = rows_T, handles_T
    return rows_BT, handles_BT


def opened_encoder(bundle: Bundle, whole: QueryEncoder) -> LiveEncoder | None:
    """That of a bundle of histories; None where its query.onnx cannot take live items, which are then unknown in histories."""
    try:
        return LiveEncoder(bundle, whole)
    except UnsupportedGraph as error:
        log.warning("%s version %d: live items do not count in histories (%s)", bundle.manifest.name, bundle.manifest.version, error)
        return None
