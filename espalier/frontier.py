"""The beam above the leaves as `espalier.search.Frontier` has it, from what engines have of it: the same one on every engine.

Legend: B queries, K beam, S state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from espalier.masks.eligibility import NO_NODE
from espalier.search import Frontier
from espalier.tree import Tree


def without_unscored(tree: Tree, gamma: float, beam_size_B: NDArray[np.int64], frontier: Frontier) -> Frontier:
    """With γ = 0, ranks of 0 for the queries whose search begins on the leaf level: engines may have scored the level above it."""
    if gamma > 0:
        return frontier
    unscored_B = np.array([tree.start_level(size) == tree.height for size in beam_size_B.tolist()], np.bool_)
    is_unscored_BK = unscored_B[:, None] & (frontier.nodes_BK != NO_NODE)
    return replace(frontier, ranks_BK=np.where(is_unscored_BK, np.float32(0), frontier.ranks_BK)) if is_unscored_BK.any() else frontier


def restricted(frontier: Frontier, keep_BK: NDArray[np.bool_]) -> Frontier:
    """The nodes to keep, in their order, and padding behind them."""
    if keep_BK.all():
        return frontier
    order_BK = np.argsort(~keep_BK, axis=1, kind="stable")[:, : max(1, int(keep_BK.sum(1).max(initial=0)))]
    nodes_BK = np.where(keep_BK, frontier.nodes_BK, NO_NODE)
    ranks_BK = np.where(keep_BK, frontier.ranks_BK, np.float32(-np.inf))
    return replace(
        frontier, nodes_BK=np.take_along_axis(nodes_BK, order_BK, axis=1), ranks_BK=np.take_along_axis(ranks_BK, order_BK, axis=1)
    )


def between(frontier: Frontier, begin: int, end: int) -> Frontier:
    """Those of consecutive queries, as narrow as they need."""
    width = max(1, int(np.count_nonzero(frontier.nodes_BK[begin:end] != NO_NODE, axis=1).max(initial=0)))
    states_BS = None if frontier.states_BS is None else frontier.states_BS[begin:end]
    return Frontier(frontier.nodes_BK[begin:end, :width], frontier.ranks_BK[begin:end, :width], states_BS)


def joined(parts: Sequence[tuple[NDArray[np.int64], Frontier]], batch: int) -> Frontier:
    """One frontier of those of some queries each (int64 positions), which are all of `batch` together."""
    width = max((frontier.nodes_BK.shape[1] for _, frontier in parts), default=0)
    nodes_BK, ranks_BK = np.full((batch, width), NO_NODE, np.int64), np.full((batch, width), -np.inf, np.float32)
    states_BS: NDArray[np.float32] | None = None
    for members, frontier in parts:
        own = frontier.nodes_BK.shape[1]
        nodes_BK[members, :own], ranks_BK[members, :own] = frontier.nodes_BK, frontier.ranks_BK
        if frontier.states_BS is not None:
            if states_BS is None:
                states_BS = np.empty((batch, frontier.states_BS.shape[1]), np.float32)
            states_BS[members] = frontier.states_BS
    return Frontier(nodes_BK, ranks_BK, states_BS)
