"""The frontier of a search, from the beams that an engine kept above the leaves.

Legend: B queries, K beam, X excluded nodes, S state.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from espalier.masks.eligibility import NO_NODE, EligibleNodes
from espalier.search import Frontier
from espalier.tree import Tree

Int64 = NDArray[np.int64]


def beam_is_frontier(tree: Tree, beam_size_B: Int64, ranks_BK: NDArray[np.float32]) -> bool:
    """Whether what an engine kept above the leaves is the frontier as it is: no search starts on the leaves, and no place is empty."""
    is_cut = int(beam_size_B.max(initial=1)) < tree.level_size(tree.height - 1)
    return is_cut and ranks_BK.shape[1] > 0 and bool(np.isfinite(ranks_BK).all())


def frontier_of(
    tree: Tree,
    gamma: float,
    beam_size_B: Int64,
    eligible: EligibleNodes,
    nodes_BK: Int64,
    ranks_BK: NDArray[np.float32],
    states_BS: NDArray[np.float32] | None,
) -> Frontier:
    """The frontier in a tree.

    nodes_BK, ranks_BK  what an engine kept above the leaves, in ascending order, with ranks that are not finite where there is no node;
                        where the search starts on the leaves, all nodes above them, eligible or not. Not read where those were not scored
    """
    kept_BK = np.isfinite(ranks_BK)
    start_B = np.array([tree.start_level(size) for size in beam_size_B.tolist()], np.int64)
    whole = {}
    for b in np.flatnonzero(start_B == tree.height).tolist():
        above = _eligible_above(tree, eligible, b)
        if gamma == 0 or tree.height == 1:
            whole[b], kept_BK[b] = above, False
        else:
            kept_BK[b] &= np.isin(nodes_BK[b], above)
    width = max(int(kept_BK.sum(1).max(initial=0)), max(map(len, whole.values()), default=0))
    shape = len(beam_size_B), width
    nodes, ranks = np.full(shape, NO_NODE, np.int64), np.full(shape, -np.inf, np.float32)
    query, slot = np.nonzero(kept_BK)
    to = slot if kept_BK[:, :width].all() else (np.cumsum(kept_BK, axis=1) - 1)[query, slot]
    nodes[query, to], ranks[query, to] = nodes_BK[query, slot], ranks_BK[query, slot]
    for b, above in whole.items():
        nodes[b, : len(above)], ranks[b, : len(above)] = above, 0
    return Frontier(nodes, ranks, states_BS)


def _eligible_above(tree: Tree, eligible: EligibleNodes, b: int) -> Int64:
    """The nodes of the level above the leaves that query b may visit; the root in any case."""
    level = tree.level(tree.height - 1)
    nodes, mask = np.arange(level.start, level.stop), eligible.mask_B[b]
    if tree.height == 1:
        return nodes
    if mask is not None:
        nodes = nodes[mask.eligible_N[level.start : level.stop]]
    return nodes if eligible.excluded is None else nodes[~np.isin(nodes, eligible.excluded.inner_BX[b])]
