"""Which nodes of a trained tree and which live items the queries of a call may get.

What a query excludes becomes what the wrapped engine closes by itself, as a fold would; where it would not close the same parents, it
becomes a mask of the query's own (`exclusions.py`).

Legend: B queries, E excluded items, R handles.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from espalier.engines.live.exclusions import Exclusions
from espalier.live.masks import without_items
from espalier.live.overlay import Overlay
from espalier.masks.eligibility import every_item
from espalier.search import NO_ITEM, NodeMask, SearchParams
from espalier.tree import Tree

Int64 = NDArray[np.int64]
NO_HANDLES = np.zeros(0, np.bool_)


class Visible(NamedTuple):
    """What the queries of a call may get.

    mask_B      masks of the trained tree, None where no query needs one
    live_BR     bool[R] of each query: its eligible handles, later ones are not; None: no live item
    eligible_B  int64[B]: eligible items, live ones included
    exclude_BE  what the wrapped engine excludes
    """

    mask_B: tuple[NodeMask | None, ...] | None
    live_BR: list[NDArray[np.bool_] | None]
    eligible_B: Int64
    exclude_BE: Int64 | None


def masks_of(overlay: Overlay, params: SearchParams) -> SearchParams:
    """Parameters with masks of the overlay that is searched: a request's masks are of the one with which it came, which may be older.

    An item that moved in between has left its old place, and an older mask does not open its new one.
    """
    if params.mask_B is None:
        return params
    found = {id(mask): None if mask is None or mask.at is None else mask.at(overlay) for mask in params.mask_B}
    if not any(found.values()):
        return params
    return replace(params, mask_B=tuple(found[id(mask)] or mask for mask in params.mask_B))


class Visibility:
    """For one tree, the only one or a forest's, counted from 0; the overlay may change from call to call."""

    def __init__(self, tree: Tree, place: int) -> None:
        self._tree, self._place = tree, place
        self._exclusions = Exclusions(tree)

    def of(self, overlay: Overlay, params: SearchParams) -> Visible:
        """What the queries may get.

        params  checked, those of that tree (`SearchParams.of_tree`)
        """
        batch, tree = len(params.m_B), self._tree
        given = params.mask_B or (None,) * batch
        standing = None if overlay.standing is None else overlay.standing.of_tree(self._place)
        masks: list[NodeMask | None] = []
        live_BR: list[NDArray[np.bool_] | None] = []
        eligible_B = np.empty(batch, np.int64)
        exclude_BE = None if params.exclude_BE is None else params.exclude_BE.copy()
        for b, mask in enumerate(given):
            live_R: NDArray[np.bool_] | None = None
            if params.frozen_B is None or not params.frozen_B[b]:
                if mask is None:
                    mask, live_R = standing, overlay.eligible_R
                else:
                    live_R = NO_HANDLES if mask.live_R is None else mask.live_R
                    if mask.live_R is None and overlay.memory is not None:  # a memory takes no live_R as one that forbids nothing
                        mask = replace(mask, live_R=NO_HANDLES)
            eligible = overlay.eligible if live_R is not None and mask is None else tree.item_count if mask is None else mask.items
            if exclude_BE is not None:
                mask, live_R, eligible = self._excluding(overlay, (mask, live_R, eligible), exclude_BE[b])
            masks.append(mask)
            live_BR.append(live_R)
            eligible_B[b] = eligible
        return Visible(None if all(mask is None for mask in masks) else tuple(masks), live_BR, eligible_B, exclude_BE)

    def _excluding(
        self, overlay: Overlay, before: tuple[NodeMask | None, NDArray[np.bool_] | None, int], exclude_E: Int64
    ) -> tuple[NodeMask | None, NDArray[np.bool_] | None, int]:
        """A query's mask, eligible handles and number of eligible items without those that it excludes.

        before  the three without exclusions
        What the wrapped engine is to exclude stays in `exclude_E`: trained items. Where it would close other parents by them than a fold,
        all that the query excludes goes into a mask of its own, and `exclude_E` is emptied.
        """
        (mask, live_R, eligible), leaves = before, overlay.trees[self._place]
        eligible_N = None if mask is None else mask.eligible_N
        found = self._exclusions.of(overlay, leaves, exclude_E, eligible_N, live_R)
        exclude_E[:] = NO_ITEM
        # A memory looks at live items that a query may get, too.
        if live_R is not None and (found.needs_mask or (len(found.handles) and overlay.memory is not None)):
            whole = mask or replace(every_item(self._tree), items=eligible)
            own = without_items(self._tree, leaves, replace(whole, live_R=live_R), found.trained, found.handles)
            return own, own.live_R, own.items
        exclude_E[: len(found.trained)] = found.trained
        if live_R is not None and len(found.handles):
            live_R = live_R.copy()
            live_R[found.handles] = False
        return mask, live_R, eligible - found.held - len(found.handles)
