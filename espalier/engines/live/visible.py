"""Which nodes of a trained tree and which live items the queries of a call may get.

What a query excludes becomes what the wrapped engine closes by itself, as a fold would; where live leaves are involved it becomes a mask of
the query's own, because an exclusion must not close a parent that has an eligible live child.

Legend: B queries, E excluded items, R handles.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from espalier.live.masks import without_items
from espalier.live.overlay import LiveLeaves, Overlay
from espalier.masks.eligibility import every_item
from espalier.search import NO_ITEM, NodeMask, SearchParams
from espalier.tree import Tree

Int64 = NDArray[np.int64]
NO_HANDLES = np.zeros(0, np.bool_)


class Visible(NamedTuple):
    """What the queries of a call may get.

    mask_B      masks of the trained tree, None where no query needs one
    live_BR     bool[R] of each query: its eligible handles; None: no live item
    eligible_B  int64[B]: eligible items, live ones included
    exclude_BE  what the wrapped engine excludes
    """

    mask_B: tuple[NodeMask | None, ...] | None
    live_BR: list[NDArray[np.bool_] | None]
    eligible_B: Int64
    exclude_BE: Int64 | None


def visible(tree: Tree, place: int, overlay: Overlay, params: SearchParams) -> Visible:
    """What the queries may get of one tree, the only one or a forest's, counted from 0.

    params  checked, those of that tree (`SearchParams.of_tree`)
    """
    batch = len(params.m_B)
    given = params.mask_B or (None,) * batch
    frozen = np.zeros(batch, np.bool_) if params.frozen_B is None else params.frozen_B
    standing = None if overlay.standing is None else overlay.standing.of_tree(place)
    masks: list[NodeMask | None] = []
    live_BR: list[NDArray[np.bool_] | None] = []
    eligible_B = np.empty(batch, np.int64)
    exclude_BE = None if params.exclude_BE is None else params.exclude_BE.copy()
    for b, mask in enumerate(given):
        if frozen[b]:
            live_R = None
        elif mask is None:
            mask, live_R = standing, overlay.eligible_R
        else:
            if mask.live_R is None and overlay.memory is not None:  # a memory takes no live_R as one that forbids nothing
                mask = replace(mask, live_R=NO_HANDLES)
            live_R = mask.live_R
        eligible = overlay.eligible if live_R is not None and mask is None else tree.item_count if mask is None else mask.items
        if exclude_BE is not None:
            mask, live_R, eligible = _excluding(tree, overlay, overlay.trees[place], (mask, live_R, eligible), exclude_BE[b])
        masks.append(mask)
        live_BR.append(live_R)
        eligible_B[b] = eligible
    if exclude_BE is not None and not (exclude_BE != NO_ITEM).any():
        exclude_BE = None
    return Visible(None if all(mask is None for mask in masks) else tuple(masks), live_BR, eligible_B, exclude_BE)


def _excluding(
    tree: Tree, overlay: Overlay, leaves: LiveLeaves, before: tuple[NodeMask | None, NDArray[np.bool_] | None, int], exclude_E: Int64
) -> tuple[NodeMask | None, NDArray[np.bool_] | None, int]:
    """A query's mask, eligible handles and number of eligible items without those that it excludes.

    before  the three without exclusions
    Trained items stay in `exclude_E` where the wrapped engine closes the same nodes by them as a fold would. Where a parent has live leaves
    all that the query excludes goes into a mask of its own, and `exclude_E` is emptied.
    """
    mask, live_R, eligible = before
    rows = np.unique(exclude_E[exclude_E != NO_ITEM])
    handles = overlay.handles_of(rows)
    trained = rows[(rows < overlay.items) & ((handles < 0) | (live_R is None))]
    handles = handles[handles >= 0]
    exclude_E[(exclude_E != NO_ITEM) & ~np.isin(exclude_E, trained)] = NO_ITEM
    leaf = tree.leaf_of_item[trained]
    held = np.count_nonzero(tree.items_below[leaf] > 0 if mask is None else mask.eligible_N[leaf])
    if live_R is None or not (len(handles) or np.isin(tree.parent[leaf], leaves.parent_Y).any()):
        return mask, live_R, eligible - int(held)
    whole = mask or replace(every_item(tree), items=eligible)
    own = without_items(tree, leaves, replace(whole, live_R=live_R), trained, handles)
    exclude_E[:] = NO_ITEM
    return own, own.live_R, own.items
