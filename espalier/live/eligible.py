"""Which nodes and live items a query may visit where items are live: masks/eligibility.py, with the live leaves beside the trained ones.

Legend: B queries, X excluded handles, R handles of live items.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from espalier.live.overlay import Overlay
from espalier.masks.eligibility import EligibleNodes, excluded_nodes, masks_of
from espalier.search import NodeMask, SearchParams
from espalier.tree import Tree


def eligible_with_live_items(
    tree: Tree, params: SearchParams, unrestricted: NodeMask | None, place: int, overlay: Overlay
) -> EligibleNodes:
    """What the queries of a search may visit of a tree and of its live leaves; arguments and errors as `eligible_nodes` has them."""
    every = unrestricted if overlay.standing is None else overlay.standing.of_tree(place)
    items_B, mask_B = masks_of(tree, params, every, place, overlay.eligible)
    masks: Sequence[NodeMask | None] = params.mask_B or (None,) * len(params.m_B)
    live_BR = tuple(overlay.shown_R if mask is None else mask.live_R for mask in masks)
    if params.exclude_BE is None or not params.exclude_BE.size:
        return EligibleNodes(items_B, mask_B, None, live_BR)
    leaves = overlay.trees[place].entries, overlay.handle_I
    excluded = excluded_nodes(tree, params.exclude_BE, mask_B, leaves, live_BR)
    live_BR = tuple(_without(live_R, handle_X) for live_R, handle_X in zip(live_BR, excluded.handle_B, strict=True))
    return EligibleNodes(items_B - excluded.count_B, mask_B, excluded, live_BR)


def _without(live_R: NDArray[np.bool_] | None, handle_X: NDArray[np.int64]) -> NDArray[np.bool_] | None:
    """The same array where no handle is taken out of it."""
    if live_R is None or not len(handle_X):
        return live_R
    live_R = live_R.copy()
    live_R[handle_X] = False
    return live_R
