"""Node masks of trained trees with live leaves under them.

A node is eligible if an eligible item lies below it, live ones included: so a parent whose own leaves are all gone stays open for the live
leaf under it, and its ancestors too. Knows trees and overlays. Does not know filters.

Legend: N nodes, R handles, P parents (nodes of the level above the leaves).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from espalier.live.overlay import LiveLeaves, Overlay
from espalier.masks.eligibility import every_item
from espalier.search import NodeMask
from espalier.tree import Tree

Int64 = NDArray[np.int64]
Bool = NDArray[np.bool_]


def recompute(tree: Tree, eligible_N: Bool, touched_P: Int64, open_P: Int64) -> None:
    """Set, in place, whether some parents and the nodes above them are eligible; `eligible_N` is right of their leaves.

    touched_P  int64, ascending, each once: the parents whose leaves, trained or live, may have changed
    open_P     int64, ascending: parents with an eligible live leaf, at least those of `touched_P`
    """
    nodes = touched_P
    live = np.isin(nodes, open_P, assume_unique=True)
    for level in range(tree.height - 1, -1, -1):
        if not len(nodes):
            return
        children, of = tree.children(nodes)
        found = np.bincount(of[eligible_N[children]], minlength=len(nodes)) > 0
        eligible_N[nodes] = found | live if level == tree.height - 1 else found
        nodes = np.unique(tree.parent[nodes]) if level else nodes[:0]


def open_parents(leaves: LiveLeaves, eligible_R: Bool) -> Int64:
    """int64, ascending, each once: the parents of live leaves of eligible handles (later handles are not)."""
    return np.unique(leaves.parent_X[of_handles(eligible_R, leaves.handle_X)])


def of_handles(eligible_R: Bool, handle_X: Int64) -> Bool:
    """bool[X]: whether handles are eligible; those past the end of `eligible_R` are not."""
    known_X = handle_X < len(eligible_R)
    if known_X.all():
        return np.asarray(eligible_R[handle_X])
    eligible_X = np.zeros(len(handle_X), np.bool_)
    eligible_X[known_X] = eligible_R[handle_X[known_X]]
    return eligible_X


def live_mask(trees: Sequence[Tree], overlay: Overlay, trained: NodeMask | None, passing_R: Bool) -> NodeMask:
    """The mask of a query whose filter lets some items pass.

    trained    the mask of the trained items that pass and are not removed, by the fields that they were trained with; None: all
    passing_R  bool[R]: the handles whose items pass by the fields that they have now and are not removed
    O(N) for a copy, and O(live items and changed ones · children · levels).
    """
    passing_R = passing_R[: overlay.handles]
    live_R = overlay.eligible_R[: len(passing_R)] & passing_R
    handle_C, row_C = overlay.changed
    passes_C = of_handles(passing_R, handle_C)
    masks = []
    for place, tree in enumerate(trees):
        mask = every_item(tree) if trained is None else trained.of_tree(place)
        eligible_N = mask.eligible_N.copy()
        leaf_T = tree.leaf_of_item[np.concatenate([overlay.hidden, row_C])]
        before = int(np.count_nonzero(eligible_N[leaf_T]))
        eligible_N[leaf_T] = np.concatenate([np.zeros(len(overlay.hidden), np.bool_), passes_C])
        opened_P = open_parents(overlay.trees[place], live_R)
        recompute(tree, eligible_N, np.union1d(tree.parent[leaf_T], opened_P), opened_P)
        items = mask.items - before + int(np.count_nonzero(passes_C)) + int(np.count_nonzero(live_R))
        masks.append(NodeMask(eligible_N, items, (), live_R))
    return replace(masks[0], others=tuple(masks[1:]))


def eligible_rows(tree: Tree, overlay: Overlay, rows: Int64) -> Bool:
    """bool[len(rows)]: which item rows (at least 0) a query without a filter may get. tree: the version's first."""
    handles = overlay.handles_of(rows)
    is_live = handles >= 0
    eligible = np.empty(len(rows), np.bool_)
    eligible[is_live] = of_handles(overlay.eligible_R, handles[is_live])
    own = rows[~is_live]
    standing = overlay.standing
    eligible[~is_live] = ~np.isin(own, overlay.hidden) & (standing is None or standing.eligible_N[tree.leaf_of_item[own]])
    return eligible


def without_items(tree: Tree, leaves: LiveLeaves, mask: NodeMask, rows: Int64, handles: Int64) -> NodeMask:
    """A mask of one tree without some trained items and some live ones (their handles), each given once at most.

    mask  its `live_R` is not None
    """
    live_R = np.zeros(0, np.bool_) if mask.live_R is None else mask.live_R.copy()
    handles = handles[handles < len(live_R)]
    gone = int(np.count_nonzero(live_R[handles]))
    live_R[handles] = False
    leaf_E = tree.leaf_of_item[rows]
    eligible_N = mask.eligible_N.copy()
    gone += int(np.count_nonzero(eligible_N[leaf_E]))
    eligible_N[leaf_E] = False
    parent_E = leaves.parent_X[np.isin(leaves.handle_X, handles)]
    recompute(tree, eligible_N, np.union1d(tree.parent[leaf_E], parent_E), open_parents(leaves, live_R))
    return NodeMask(eligible_N, mask.items - gone, (), live_R)
