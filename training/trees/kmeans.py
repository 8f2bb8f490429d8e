"""Balanced recursive k-means over item embeddings: TDM's learned tree (§3.4), PECOS' hierarchical k-means, for any branching.

A node's items are divided among its b children by binary splits, b → ⌊b/2⌋ + ⌈b/2⌉ → … → 1. A split is spherical 2-means with the sizes
given: items are sorted by ⟨x, c_right − c_left⟩ and cut where the balanced tree wants it; the centres are recomputed until no item
changes side. All splits of a round are made together, so the cost is about log₂(I) passes over the embeddings per iteration. By hand:
scikit-learn's k-means does not balance its clusters.

Legend: I items, D embedding width, R rows at work, G groups being split.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from espalier.errors import InvalidConfig, InvalidData
from espalier.tree import Tree
from training.trees.balanced import balanced_tree, level_edges, tree_height

Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]


def kmeans_tree(embeddings_ID: Float32, branching: int, *, seed: int, max_iterations: int = 20) -> Tree:
    """A tree in which similar items share subtrees; exactly as balanced as `balanced_tree`.

    embeddings_ID    float32[I, D], finite; only directions count. Zero rows are similar to nothing: see `embeddings.spread_unseen`.
    max_iterations   of each split, as long as some item still changes side

    The same seed gives the same tree. Raises InvalidData for another shape or numbers that are not finite.
    """
    if embeddings_ID.ndim != 2 or 0 in embeddings_ID.shape or not np.isfinite(embeddings_ID).all():
        raise InvalidData("embeddings_ID", f"{embeddings_ID.dtype}{list(embeddings_ID.shape)}", "finite float32[I, D], neither of them 0")
    if max_iterations < 1:
        raise InvalidConfig("max_iterations", max_iterations, "at least 1")
    items = len(embeddings_ID)
    rng = np.random.default_rng(seed)
    x_ID = _unit_rows(embeddings_ID.astype(np.float32))
    order = rng.permutation(items).astype(np.int64)  # ties are broken by a random order: item rows may be sorted by a property of the items
    for h in range(1, tree_height(items, branching)):
        edges = level_edges(items, branching**h)
        first_G = np.arange(branching ** (h - 1)) * branching
        nodes_G = np.full(len(first_G), branching, np.int64)
        while len(first_G):
            half_G = nodes_G // 2
            start_G, cut_G, stop_G = edges[first_G], edges[first_G + half_G], edges[first_G + nodes_G]
            slots = _ranges(start_G, stop_G)
            rows = order[slots]
            order[slots] = rows[_split_all(x_ID[rows], stop_G - start_G, cut_G - start_G, rng, max_iterations)]
            first_G = np.stack([first_G, first_G + half_G], axis=1).ravel()
            nodes_G = np.stack([half_G, nodes_G - half_G], axis=1).ravel()
            first_G, nodes_G = first_G[nodes_G > 1], nodes_G[nodes_G > 1]
    return balanced_tree(order, branching)


def _split_all(x_RD: Float32, size_G: Int64, left_G: Int64, rng: np.random.Generator, max_iterations: int) -> Int64:
    """int64[R]: a permutation that puts the left part of every group first; groups are consecutive rows, of at least two each."""
    start_G = np.cumsum(size_G) - size_G
    one_G = rng.integers(size_G)
    other_G = (one_G + 1 + rng.integers(size_G - 1)) % size_G  # another member
    axis_GD = x_RD[start_G + other_G] - x_RD[start_G + one_G]
    permutation = np.arange(len(x_RD))
    is_left_R = np.zeros(len(x_RD), np.bool_)
    slots = permutation.copy()  # rows of the groups that still move
    for _ in range(max_iterations):
        group_R = np.repeat(np.arange(len(size_G)), size_G)
        score_R = np.einsum("rd,rd->r", x_RD, axis_GD[group_R])
        by_score = np.lexsort((score_R, group_R))
        place_R = np.arange(len(by_score)) - np.repeat(start_G, size_G)
        now_left_R = np.empty(len(by_score), np.bool_)
        now_left_R[by_score] = place_R < left_G[group_R]
        permutation[slots] = slots[by_score]
        moved_G = np.logical_or.reduceat(now_left_R != is_left_R, start_G)
        if not moved_G.any():
            break
        if not moved_G.all():
            kept_R = moved_G[group_R]
            x_RD, slots, now_left_R = x_RD[kept_R], slots[kept_R], now_left_R[kept_R]
            size_G, left_G = size_G[moved_G], left_G[moved_G]
            start_G = np.cumsum(size_G) - size_G
        is_left_R = now_left_R
        sum_GD = np.add.reduceat(x_RD, start_G)
        left_sum_GD = np.add.reduceat(np.where(is_left_R[:, None], x_RD, np.float32(0)), start_G)
        axis_GD = _unit_rows(sum_GD - left_sum_GD) - _unit_rows(left_sum_GD)
    return permutation


def _unit_rows(x: Float32) -> Float32:
    """Rows of length 1; a zero row (an unseen item, or members that cancel out) stays zero instead of becoming NaN."""
    norm = np.linalg.norm(x, axis=1, keepdims=True)
    unit: Float32 = np.divide(x, norm, out=np.zeros_like(x), where=norm > 0)
    return unit


def _ranges(start_G: Int64, stop_G: Int64) -> Int64:
    """The numbers start … stop − 1 of every group, one after the other."""
    size_G = stop_G - start_G
    ranges: Int64 = np.arange(size_G.sum()) + np.repeat(start_G - (np.cumsum(size_G) - size_G), size_G)
    return ranges
