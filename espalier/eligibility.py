"""Which nodes a query may visit: those with an eligible item below them.

Turns the item rows that a query excludes into nodes: the excluded leaves, and the inner nodes whose every item is excluded. Masking
those inside the search (instead of dropping items afterwards) is what makes min(m, eligible) results come back.

Legend: B queries, E excluded items, X excluded nodes, N nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from espalier.search import NO_ITEM
from espalier.tree import Tree

NO_NODE = -1


@dataclass(frozen=True)
class ExcludedNodes:
    """Nodes that each query must not visit, NO_NODE as padding.

    leaves_BX  int64[B, X]   excluded leaves
    inner_BX   int64[B, X]   inner nodes whose items are all excluded (another X)
    count_B    int64[B]      distinct excluded items
    """

    leaves_BX: NDArray[np.int64]
    inner_BX: NDArray[np.int64]
    count_B: NDArray[np.int64]

    def take(self, queries: NDArray[np.int64]) -> ExcludedNodes:
        """Those of some queries (int64 positions)."""
        return ExcludedNodes(self.leaves_BX[queries], self.inner_BX[queries], self.count_B[queries])


def excluded_nodes(tree: Tree, exclude_BE: NDArray[np.int64]) -> ExcludedNodes:
    """The nodes that lists of item rows (int64[B, E], NO_ITEM as padding, repeats allowed) close. O(E · closed levels)."""
    batch, nodes = len(exclude_BE), tree.node_count
    query, slot = np.nonzero(exclude_BE != NO_ITEM)
    key = np.unique(query * nodes + tree.leaf_of_item[exclude_BE[query, slot]])  # (query, node) pairs as one sorted number
    leaves_BX = _pad(batch, nodes, key)
    closed: list[NDArray[np.int64]] = []
    while len(key):  # a node is closed when as many items are excluded below it as it holds
        query, node = np.divmod(key, nodes)
        up, first = np.unique(query * nodes + tree.parent[node], return_index=True)
        below = np.add.reduceat(tree.items_below[node], first)
        key = up[below == tree.items_below[up % nodes]]
        key = key[key % nodes > 0]  # the root is never scored
        closed.append(key)
    inner_BX = _pad(batch, nodes, np.sort(np.concatenate(closed))) if closed else _pad(batch, nodes, np.empty(0, np.int64))
    return ExcludedNodes(leaves_BX, inner_BX, np.count_nonzero(leaves_BX != NO_NODE, axis=1))


def _pad(batch: int, nodes: int, key: NDArray[np.int64]) -> NDArray[np.int64]:
    """int64[B, X] from sorted (query, node) keys; X ≥ 1."""
    query = key // nodes
    count = np.bincount(query, minlength=batch)
    padded = np.full((batch, max(1, int(count.max(initial=0)))), NO_NODE, np.int64)
    slot = np.arange(len(key)) - np.repeat(np.cumsum(count) - count, count)
    padded[query, slot] = key % nodes
    return padded
