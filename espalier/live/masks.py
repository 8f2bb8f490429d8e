"""Node masks of trained trees with live leaves under them.

A node is eligible if an eligible item, trained or live, lies below it. So a parent whose trained leaves are all gone stays eligible while
it has an eligible live leaf, and so do its ancestors. A mask is made when the first query needs it, not when an item is put. From one
snapshot to the next it is updated, in O(changes) and a copy of N bytes. Knows trees and overlays. Does not know filters.

Legend: B queries, N nodes, R handles, P parents (nodes of the level above the leaves), C trained leaves, K keys.
"""

from __future__ import annotations

import threading
import weakref
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from espalier.arrays import Bool, Int64
from espalier.live.overlay import HANDLE, PARENT, LiveLeaves, Overlay
from espalier.masks.eligibility import NO_NODE, EligibleNodes, LiveExclusions, every_item, excluded_nodes, masks_of
from espalier.search import NodeMask, SearchParams
from espalier.tree import Tree

LONGEST = 1 << 18
"""Most changes in the log. A full log is forgotten, and masks are rebuilt."""


def recompute(tree: Tree, eligible_N: Bool, touched_P: Int64, has_live_P: Bool) -> None:
    """Set, in place, whether some parents and the nodes above them are eligible. `eligible_N` must be right for their leaves.

    touched_P   int64, ascending, distinct: the parents whose leaves, trained or live, may have changed
    has_live_P  bool by node: parents with an eligible live leaf; must be right for those of `touched_P`
    """
    nodes = touched_P
    for level in range(tree.height - 1, -1, -1):
        if not len(nodes):
            return
        children, of = tree.children(nodes)
        has_eligible = np.bincount(of[eligible_N[children]], minlength=len(nodes)) > 0
        eligible_N[nodes] = has_eligible | has_live_P[nodes] if level == tree.height - 1 else has_eligible
        above = tree.parent[nodes]  # ascending, as nodes are
        nodes = above[np.append(True, above[1:] != above[:-1])]


def parents_of(tree: Tree, leaves: LiveLeaves, entries: Int64, eligible_R: Bool) -> Bool:
    """bool by node: the parents of the leaves, among some entries, whose handles are eligible."""
    has_live_P = np.zeros(tree.leaf_offset, np.bool_)
    has_live_P[leaves.column(PARENT, entries[of_handles(eligible_R, leaves.column(HANDLE, entries))])] = True
    return has_live_P


def of_handles(eligible_R: Bool, handle_X: Int64) -> Bool:
    """bool[X]: whether handles are eligible; later handles, past the end of `eligible_R`, are not."""
    is_within_X = handle_X < len(eligible_R)
    if is_within_X.all():
        return np.asarray(eligible_R[handle_X])
    eligible_X = np.zeros(len(handle_X), np.bool_)
    eligible_X[is_within_X] = eligible_R[handle_X[is_within_X]]
    return eligible_X


def live_mask(
    trees: Sequence[Tree],
    overlay: Overlay,
    trained: NodeMask | None,
    passing_R: Bool,
    earlier: NodeMask | None = None,
    touched: Sequence[Int64] = (),
) -> NodeMask:
    """The mask of a query whose filter lets some items pass.

    trained    the mask of the trained items that pass, by the fields that they were trained with, and are not removed; None: all
    passing_R  bool[R]: the handles whose items pass, by their present fields, and are not removed
    earlier    the mask of another snapshot, to update; None: build the mask
    touched    of each tree, all parents (int64[P]) below which that snapshot differs
    Takes O(N) for a copy, and O(n · levels), where n is the number of live and changed items, or of items below `touched`.
    """
    passing_R = passing_R[: overlay.handles]
    live_R = overlay.eligible_R[: len(passing_R)] & passing_R
    masks = []
    for t, tree in enumerate(trees):
        base, leaves = every_item(tree) if trained is None else trained.of_tree(t), overlay.trees[t]
        if earlier is None:
            start, items = base, base.items
            leaf_T, entries = tree.leaf_of_item[np.concatenate([overlay.hidden, overlay.changed[1]])], leaves.open
            is_touched_P = np.zeros(tree.leaf_offset, np.bool_)
            is_touched_P[tree.parent[leaf_T]] = is_touched_P[leaves.column(PARENT, entries)] = True
            touched_P = np.flatnonzero(is_touched_P)
        else:
            start, touched_P = earlier.of_tree(t), touched[t]
            entries, _ = leaves.under(touched_P)
            items = start.items - (0 if start.live_R is None else int(np.count_nonzero(start.live_R)))
        children, _ = tree.children(touched_P)
        eligible_C = _eligible_trained_leaves(tree, overlay, base, passing_R, children)
        items += int(np.count_nonzero(eligible_C)) - int(np.count_nonzero(start.eligible_N[children]))
        eligible_N = start.eligible_N.copy()
        eligible_N[children] = eligible_C
        recompute(tree, eligible_N, touched_P, parents_of(tree, leaves, entries, live_R))
        masks.append(NodeMask(eligible_N, items + int(np.count_nonzero(live_R)), (), live_R))
    return replace(masks[0], others=tuple(masks[1:]))


def _eligible_trained_leaves(tree: Tree, overlay: Overlay, base: NodeMask, passing_R: Bool, leaves_C: Int64) -> Bool:
    """bool[C]: which trained leaves (node numbers) are eligible. base: the mask as if no item had changed."""
    row_C = tree.leaf_item[leaves_C - tree.leaf_offset]
    eligible_C = base.eligible_N[leaves_C] & ~_lookup(overlay.hidden, row_C)[0]
    handle_K, row_K = overlay.changed
    changed_C, at_C = _lookup(row_K, row_C)
    eligible_C[changed_C] = of_handles(passing_R, handle_K[at_C[changed_C]])
    return eligible_C


def _lookup(sorted_K: Int64, value_C: Int64) -> tuple[Bool, Int64]:
    """bool[C] and int64[C]: whether each value is in an ascending array, and its position there."""
    if not len(sorted_K):
        return np.zeros(len(value_C), np.bool_), np.zeros(len(value_C), np.int64)
    at_C = np.minimum(np.searchsorted(sorted_K, value_C), len(sorted_K) - 1)
    return sorted_K[at_C] == value_C, at_C


def eligible_rows(tree: Tree, overlay: Overlay, rows: Int64) -> Bool:
    """bool[len(rows)]: which item rows (at least 0) a query without a filter may get. tree: the version's first."""
    handles = overlay.handles_of(rows)
    is_live = handles >= 0
    eligible = np.empty(len(rows), np.bool_)
    eligible[is_live] = of_handles(overlay.eligible_R, handles[is_live])
    trained_rows = rows[~is_live]
    standing = overlay.standing
    eligible[~is_live] = ~np.isin(trained_rows, overlay.hidden) & (standing is None or standing.eligible_N[tree.leaf_of_item[trained_rows]])
    return eligible


def eligible_with_live_items(tree: Tree, params: SearchParams, unrestricted: NodeMask | None, t: int, overlay: Overlay) -> EligibleNodes:
    """The nodes and live leaves of tree number t that the queries of a search may visit; arguments and errors as in `eligible_nodes`."""
    standing = unrestricted if overlay.standing is None else overlay.standing.of_tree(t)
    items_B, mask_B = masks_of(tree, params, standing, t, overlay.eligible)
    masks: Sequence[NodeMask | None] = params.mask_B or (None,) * len(params.m_B)
    live_BR = [overlay.shown_R if mask is None else mask.live_R for mask in masks]
    if params.exclude_BE is None or not params.exclude_BE.size:
        return EligibleNodes(items_B, mask_B, None, tuple(live_BR))
    live = LiveExclusions(overlay.items, overlay.handle_I, overlay.trees[t].entries)
    excluded = excluded_nodes(tree, params.exclude_BE, mask_B, live, live_BR)
    for b in np.flatnonzero(excluded.handles_BX[:, 0] != NO_NODE).tolist():
        live_R, handles = live_BR[b], excluded.handles_BX[b]
        if live_R is not None:
            live_BR[b] = live_R = live_R.copy()
            live_R[handles[handles != NO_NODE]] = False
    return EligibleNodes(items_B - excluded.count_B, mask_B, excluded, tuple(live_BR))


# -- from one snapshot to the next --------------------------------------------------------------------------------------------


class TouchedParents:
    """A log of the parents under which a leaf changed, in order, so that masks can be updated from one snapshot to a later one.

    A moment is the number of changes so far. Written by one thread, read by any.

    trees  number of trees of the version
    """

    def __init__(self, trees: int) -> None:
        self._trees = trees
        self._log = 0, array("q")  # number of forgotten changes; parent · trees + tree of each later one. Replaced as a whole

    def touch(self, tree: int, parent: int) -> None:
        """Log that a leaf under a parent, trained or live, has changed, or the fields of its item."""
        forgotten, log = self._log
        if len(log) >= LONGEST:
            forgotten, log = self._log = forgotten + len(log), array("q")
        log.append(parent * self._trees + tree)

    @property
    def now(self) -> int:
        """The present moment."""
        forgotten, log = self._log
        return forgotten + len(log)

    def since(self, moment: int) -> list[Int64] | None:
        """int64[P] of each tree, ascending, distinct: the parents that were touched after a moment; None if some were forgotten."""
        forgotten, log = self._log
        if moment < forgotten:
            return None
        touched = np.unique(np.array(log[moment - forgotten :], np.int64))
        return [touched[touched % self._trees == tree] // self._trees for tree in range(self._trees)]


@dataclass(frozen=True, eq=False)
class SnapshotMask:
    """The mask of one snapshot for one filter. The mask of a later snapshot is made from it.

    overlay  weak, so that masks do not keep old overlays in memory
    """

    mask: NodeMask
    overlay: weakref.ref[Overlay]
    removed: NodeMask | None
    shown_R: Bool
    touched: int

    @staticmethod
    def of(
        trees: Sequence[Tree],
        overlay: Overlay,
        trained: NodeMask | None,
        passing_R: Bool,
        touched: TouchedParents,
        last: SnapshotMask | None,
    ) -> SnapshotMask:
        """See `live_mask`. The last mask is updated, unless it was made with another list of removed items."""
        parents = None
        if last is not None and last.removed is overlay.removed and last.shown_R is overlay.shown_R:
            parents = touched.since(min(last.touched, overlay.touched))  # includes changes after the overlay
        earlier = None if last is None or parents is None else last.mask
        mask = live_mask(trees, overlay, trained, passing_R, earlier, parents or ())
        return SnapshotMask(mask, weakref.ref(overlay), overlay.removed, overlay.shown_R, overlay.touched)


class Standing:
    """The masks of queries without a filter, for the snapshots of one version. Any thread may ask for one.

    Snapshots refer to it, so it must not refer to the version's state.
    """

    def __init__(self, trees: Sequence[Tree], touched: TouchedParents) -> None:
        self._trees, self._touched = tuple(trees), touched
        self._last: SnapshotMask | None = None
        self._lock = threading.Lock()

    def mask(self, overlay: Overlay) -> NodeMask:
        """The mask of a query without a filter."""
        with self._lock:
            self._last = SnapshotMask.of(self._trees, overlay, overlay.removed, overlay.shown_R, self._touched, self._last)
            return self._last.mask
