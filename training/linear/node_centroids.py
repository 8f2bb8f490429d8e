"""Centroids of nodes: scorers are regularised towards them, and nodes that are not trained are scored by them.

A leaf's centroid is its item's. An inner node's is the largest value of each feature among the items below, not the mean: a query should
reach a node if it resembles *one* of the items there, and the mean of dissimilar items resembles none. Unnormalised, the maximum is an
upper bound of every product below, as in block-max pruning (Mallia et al. 2024). Rows of inner nodes have length 1, since those of large
nodes would be the longest.

Legend: I items, F features, N nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_array

from espalier.arrays import Float32, Int64
from espalier.stored_arrays import row_blocks
from espalier.tree import Tree

from ..data.csr import Csr, lengths, scaled, stacked


@dataclass(frozen=True, eq=False)
class Centroids:
    """Of one level.

    rows       float32 rows, not yet divided
    row_N      int64[N]: the row of each node; of the level of leaves, rows are those of items
    divisor_N  float32[N]: what the rows are divided by: 1 on the level of leaves, above the row's length, or 1 if the row is empty
    """

    rows: Csr
    row_N: Int64
    divisor_N: Float32

    def of(self, nodes: slice) -> Csr:
        """float32 rows [n, F] of some nodes of the level."""
        return scaled(self.undivided(nodes), 1 / self.divisor_N[nodes])

    def undivided(self, nodes: slice) -> Csr:
        """float32[n, F]."""
        return csr_array(self.rows[self.row_N[nodes]])


def node_centroids(centroids: Csr, tree: Tree) -> list[Centroids]:
    """The centroids of each level from 1 on; `centroids`: those of the items, rows [I, F]."""
    items = tree.item_count
    with_empty_row = csr_array(
        (centroids.data, centroids.indices, np.append(centroids.indptr, centroids.indptr[-1:])), shape=(items + 1, centroids.shape[1])
    )
    row_N = np.where(tree.leaf_item >= 0, tree.leaf_item, items).astype(np.int64)
    levels = [Centroids(with_empty_row, row_N, np.ones(tree.leaf_count, np.float32))]
    for level in range(tree.height - 1, 0, -1):
        nodes, below = tree.level(level), tree.level(level + 1)
        begins = tree.first_child[nodes.start : nodes.stop + 1] - below.start
        has_items = tree.items_below[below.start : below.stop] > 0
        rows = _largest(levels[0], begins, np.add.reduceat(has_items, begins[:-1], dtype=np.int64))
        length_N = lengths(rows)
        levels.insert(0, Centroids(rows, np.arange(len(nodes)), np.where(length_N > 0, length_N, 1)))
    return levels


def _largest(below: Centroids, begins: Int64, count_P: Int64) -> Csr:
    """float32[P, F]: the largest value of each feature of the nodes begins[p] … begins[p + 1] − 1 of the level below, of which count_P[p]
    have an item below.

    A row that lacks a feature has 0 there, which is larger than a negative value.
    """
    entries = np.append(0, np.cumsum(np.diff(below.rows.indptr)[below.row_N]))
    blocks = (
        _largest_of(below.undivided(slice(begins[first], begins[end])), begins[first : end + 1] - begins[first], count_P[first:end])
        for first, end in row_blocks(entries[begins])
    )
    return stacked(blocks, below.rows.shape[1])


def _largest_of(rows: Csr, begins: Int64, count_P: Int64) -> Csr:
    """`_largest` for one block of parents, given the rows of their children alone."""
    parents = len(begins) - 1
    children = csr_array((rows.data.copy(), rows.indices.copy(), rows.indptr[begins]), shape=(parents, rows.shape[1]))
    children.sort_indices()  # the entries of all children of a parent, by feature
    parent = np.repeat(np.arange(parents), np.diff(children.indptr))
    first = np.flatnonzero((np.diff(parent, prepend=-1) != 0) | (np.diff(children.indices, prepend=-1) != 0))
    if len(first) == 0:
        return children
    largest = np.maximum.reduceat(children.data, first)
    has_gap = np.diff(first, append=len(parent)) < count_P[parent[first]]
    is_kept = ~has_gap | (largest > 0)
    first = first[is_kept]
    return csr_array((largest[is_kept], (parent[first], children.indices[first])), shape=children.shape)
