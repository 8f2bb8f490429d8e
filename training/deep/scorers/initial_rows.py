"""Initial node rows from item embeddings: every node starts as the mean of the items below it.

A factorisation of the training users' lists already holds which items co-occur; random rows must learn that first. On dense logs this only
shortens the start of a run: random rows reach the same recall later (benchmarks/results).

Legend: N nodes, I items, D node row, K columns at a time.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from espalier.tree import Tree

Float32 = NDArray[np.float32]

COLUMNS = 16
"""Of rows that are summed at a time, in float64."""


def rows_from_embeddings(tree: Tree, embeddings_ID: Float32, std: float) -> Float32:
    """float32[N, D]: means over the items below of unit-length embeddings, scaled to root mean square `std` on each level.

    Nodes without items get zero rows.
    """
    length_I = np.linalg.norm(embeddings_ID, axis=1)
    scale_I = np.divide(1, length_I, out=np.zeros(len(length_I)), where=length_I > 0)
    rows_ND = np.empty((tree.node_count, embeddings_ID.shape[1]), np.float32)
    squares_L = np.zeros(tree.height + 1)
    for start in range(0, embeddings_ID.shape[1], COLUMNS):
        columns = slice(start, start + COLUMNS)
        means_NK = _means_below(tree, embeddings_ID[:, columns] * scale_I[:, None])
        squares_L += [np.square(means_NK[tree.level(h).start : tree.level(h).stop]).sum() for h in range(tree.height + 1)]
        rows_ND[:, columns] = means_NK
    for h in range(tree.height + 1):
        size = np.sqrt(squares_L[h] / (tree.level_size(h) * embeddings_ID.shape[1]))
        rows_ND[tree.level(h).start : tree.level(h).stop] *= std / size if size > 0 else 0
    return rows_ND


def _means_below(tree: Tree, values_IK: NDArray[np.float64]) -> NDArray[np.float64]:
    """float64[N, K]: means over the items below."""
    means_NK = np.zeros((tree.node_count, values_IK.shape[1]))
    means_NK[tree.leaf_of_item] = values_IK
    for h in range(tree.height - 1, -1, -1):
        span = tree.level(h)
        below = means_NK[: tree.level_offset[h + 2]]
        means_NK[span.start : span.stop] = np.add.reduceat(below, tree.first_child[span.start : span.stop])
    means_NK /= np.maximum(tree.items_below, 1)[:, None]
    return means_NK


def popularity_biases(tree: Tree, events_I: NDArray[np.float64], gamma: float) -> Float32:
    """float32[N]: biases with which every node ranks by the log of the events below it; one event more for every item.

    rank(n) = b(n) + γ · rank(parent(n)), so b(n) = log p(n) − γ · log p(parent(n)), p the share of all events; 0 for nodes without items.
    A softmax has to learn popularity first, and a slow learning rate takes long over it.
    """
    share_N = np.zeros(tree.node_count)
    share_N[tree.leaf_of_item] = (events_I + 1) / (events_I + 1).sum()
    for h in range(tree.height - 1, -1, -1):
        span = tree.level(h)
        share_N[span.start : span.stop] = np.add.reduceat(share_N[: tree.level_offset[h + 2]], tree.first_child[span.start : span.stop])
    rank_N = np.log(share_N, out=np.zeros_like(share_N), where=share_N > 0)
    return np.asarray(rank_N - gamma * np.where(share_N > 0, rank_N[tree.parent], 0), np.float32)
