"""What the items below each node look like: where the weights of its scorer begin, and what a node that is not trained is scored by.

A leaf's centroid is its item's. An inner node's is the largest value of each feature below it, not the mean: a query is to be brought to
a node if it is like *one* of the items there, and the mean of items that share little is like none of them. Unnormalised the maximum would
bound every product below from above, as the blocks of Mallia et al. 2024 (block-max pruning) do; of length 1 it compares with the leaves.

Legend: I items, F features, N nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from espalier.text.sparse_rows import SparseRows
from espalier.tree import Tree

Int64 = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Centroids:
    """Nodes of one level: float32 rows [N, F] of length 1, and float32[N], by what each row was divided."""

    rows: SparseRows
    length_N: NDArray[np.float32]


def node_centroids(centroids: SparseRows, tree: Tree) -> list[Centroids]:
    """Those of each level from 1 on; `centroids`: the items', rows [I, F] of length 1."""
    items = csr_array((centroids.values, centroids.indices, centroids.indptr), shape=(len(centroids), centroids.width))
    leaf = tree.leaf_of_item - tree.leaf_offset
    placed = csr_array((np.ones(len(leaf), np.float32), (leaf, np.arange(len(leaf)))), shape=(tree.leaf_count, len(leaf))) @ items
    placed.sort_indices()
    rows = SparseRows(placed.indptr.astype(np.int64), placed.indices.astype(np.int32), placed.data.astype(np.float32), centroids.width)
    levels = [rows]
    for level in range(tree.height - 1, 0, -1):
        nodes, below = tree.level(level), tree.level(level + 1)
        rows = _largest(rows, tree.first_child[nodes.start : nodes.stop + 1] - below.start, tree.items_below[below.start : below.stop] > 0)
        levels.insert(0, rows)
    return [Centroids(rows.normalised(), _lengths(rows)) for rows in levels]


def _lengths(rows: SparseRows) -> NDArray[np.float32]:
    node = np.repeat(np.arange(len(rows)), np.diff(rows.indptr))
    return np.sqrt(np.bincount(node, rows.values.astype(np.float64) ** 2, minlength=len(rows))).astype(np.float32)


def rows_of(rows: SparseRows, begin: int, end: int) -> SparseRows:
    """Some rows in a row."""
    entries = slice(int(rows.indptr[begin]), int(rows.indptr[end]))
    return SparseRows(rows.indptr[begin : end + 1] - rows.indptr[begin], rows.indices[entries], rows.values[entries], rows.width)


def _largest(rows: SparseRows, begins: Int64, counts_N: NDArray[np.bool_]) -> SparseRows:
    """The largest value of each feature in rows begins[k] … begins[k + 1] − 1, for each k.

    A row that lacks a feature has 0 there, which is more than what is negative. counts_N: the rows that have an item below.
    """
    indices, values = [np.empty(0, np.int32)], [np.empty(0, np.float32)]
    for begin, end in zip(begins[:-1].tolist(), begins[1:].tolist(), strict=True):
        entries = slice(int(rows.indptr[begin]), int(rows.indptr[end]))
        features, own = rows.indices[entries], rows.values[entries]
        order = np.argsort(features, kind="stable")
        first = np.flatnonzero(np.diff(features[order], prepend=-1))
        largest = np.maximum.reduceat(own[order], first) if len(first) else own
        lacking = np.diff(first, append=len(features)) < np.count_nonzero(counts_N[begin:end])
        kept = ~lacking | (largest > 0)
        indices.append(features[order][first][kept])
        values.append(largest[kept])
    indptr = np.cumsum([len(own) for own in indices])
    return SparseRows(indptr, np.concatenate(indices), np.concatenate(values), rows.width)
