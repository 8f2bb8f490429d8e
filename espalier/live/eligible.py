"""Which nodes and live items a query may visit where items are live: masks/eligibility.py, with the live leaves beside the trained ones.

Legend: B queries, E excluded items, R handles of live items, N nodes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from espalier.live.overlay import HANDLE, PARENT, Overlay
from espalier.masks.eligibility import (
    EligibleNodes,
    ExcludedNodes,
    closed_nodes,
    eligible_leaves,
    masks_of,
    padded_nodes,
    parents_of,
)
from espalier.search import NO_ITEM, NodeMask, SearchParams
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
    excluded, live_BR = _excluded(tree, params.exclude_BE, mask_B, overlay, place, live_BR)
    return EligibleNodes(items_B - excluded.count_B, mask_B, excluded, live_BR)


def _excluded(
    tree: Tree,
    exclude_BE: NDArray[np.int64],
    mask_B: Sequence[NodeMask | None],
    overlay: Overlay,
    place: int,
    live_BR: tuple[NDArray[np.bool_] | None, ...],
) -> tuple[ExcludedNodes, tuple[NDArray[np.bool_] | None, ...]]:
    """What lists of item rows exclude: a parent when its eligible children and live leaves are. And `live_BR` without them."""
    batch, nodes, leaves = len(exclude_BE), tree.node_count, overlay.trees[place]
    query, slot = np.nonzero(exclude_BE != NO_ITEM)
    rows = exclude_BE[query, slot]
    handles = overlay.handles_of(rows)
    trained = rows < overlay.items
    key = eligible_leaves(tree, query[trained], rows[trained], mask_B)
    pair = np.unique(query[handles >= 0] * overlay.handles + handles[handles >= 0])
    live_query, handle = np.divmod(pair, max(overlay.handles, 1))
    entry = leaves.of_handles(handle)
    there = (entry > 0) & _live_eligible(live_BR, live_query, handle)
    live_query, handle, parent = live_query[there], handle[there], leaves.column(PARENT, entry[there])
    count_B = np.bincount(key // nodes, minlength=batch) + np.bincount(live_query, minlength=batch)
    up, excluded = parents_of(tree, key)
    up, of = np.unique(np.concatenate([up, live_query * nodes + parent]), return_inverse=True)
    excluded = np.bincount(of, np.append(excluded, np.ones(len(parent), np.int64)), minlength=len(up)).astype(np.int64)
    above_query, above = np.divmod(up, nodes)
    entry, of = leaves.under(above)
    still = np.bincount(of[_live_eligible(live_BR, above_query[of], leaves.column(HANDLE, entry))], minlength=len(up))
    inner = closed_nodes(tree, mask_B, up, excluded, still)
    without = list(live_BR)
    for b in np.unique(live_query).tolist():
        live_R = live_BR[b]
        if live_R is not None:
            without[b] = live_R = live_R.copy()
            live_R[handle[live_query == b]] = False
    return ExcludedNodes(padded_nodes(batch, nodes, key), padded_nodes(batch, nodes, inner), count_B), tuple(without)


def _live_eligible(live_BR: Sequence[NDArray[np.bool_] | None], query: NDArray[np.int64], handle: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether each (query, handle) pair is eligible before exclusions."""
    eligible = np.zeros(len(query), np.bool_)
    for live_R in {id(live_R): live_R for live_R in live_BR if live_R is not None}.values():
        of_mask = np.array([other is live_R for other in live_BR])[query]
        mine = np.flatnonzero(of_mask & (handle < len(live_R)))
        eligible[mine] = live_R[handle[mine]]
    return eligible
