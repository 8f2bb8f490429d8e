"""Balanced recursive k-means over item embeddings: TDM's learned tree (§3.4), PECOS' hierarchical k-means, for any branching.

A node's items are divided among its b children by binary splits, b → ⌊b/2⌋ + ⌈b/2⌉ → … → 1. A split is spherical 2-means with fixed
sizes: items are sorted by ⟨x, c_right − c_left⟩ and cut at the size that the balanced tree needs; the centres are recomputed until no item
changes side. The cost is about log₂(I) passes over the embeddings per iteration, and no copy of them is made. Compiled by numba. By hand:
scikit-learn's k-means does not balance its clusters.

Legend: I items, D embedding width, R rows of a group, G groups being split.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch

from espalier.arrays import Array, Float32, Int64
from espalier.compiled_code import compiled
from espalier.stored_arrays import spans
from espalier.tree import Tree

from ..trees.balanced import balanced_tree, level_edges, tree_height

ITERATIONS = 20
"""Most iterations of a split; it ends earlier if no item changes side."""


class Groups(NamedTuple):
    """int64[G] each: group g has the positions start_G[g] … stop_G[g] − 1 of the order; the right half begins at cut_G[g]."""

    start_G: Int64
    cut_G: Int64
    stop_G: Int64


def kmeans_tree(embeddings_ID: Float32, branching: int, *, seed: int) -> Tree:
    """A tree in which similar items share subtrees, as balanced as `balanced_tree`.

    embeddings_ID  float32[I, D], finite; only directions count. Zero rows are similar to nothing: see `embeddings.spread_unseen`.

    The same seed gives the same tree.
    """
    items, threads = len(embeddings_ID), torch.get_num_threads()
    rng = np.random.default_rng(seed)
    x_ID = unit_rows(embeddings_ID.astype(np.float32, copy=False))
    order = rng.permutation(items).astype(np.int64)  # ties are broken by a random order: item rows may be sorted by a property of the items
    with ThreadPoolExecutor(threads) as pool:
        for h in range(1, tree_height(items, branching)):
            edges = level_edges(items, branching**h)
            first_G = np.arange(branching ** (h - 1)) * branching
            nodes_G = np.full(len(first_G), branching, np.int64)
            while len(first_G):
                half_G = nodes_G // 2
                start_G, cut_G, stop_G = edges[first_G], edges[first_G + half_G], edges[first_G + nodes_G]
                _split_all(pool, threads, x_ID, order, Groups(start_G, cut_G, stop_G), rng)
                first_G = np.stack([first_G, first_G + half_G], axis=1).ravel()
                nodes_G = np.stack([half_G, nodes_G - half_G], axis=1).ravel()
                first_G, nodes_G = first_G[nodes_G > 1], nodes_G[nodes_G > 1]
    return balanced_tree(order, branching)


def _split_all(pool: ThreadPoolExecutor, threads: int, x_ID: Float32, order: Int64, groups: Groups, rng: np.random.Generator) -> None:
    """Reorders positions start … stop − 1 of each group in `order` so that its left half, up to the cut, comes first.

    groups  of at least two items each
    """
    size_G = groups.stop_G - groups.start_G
    one_G = rng.integers(size_G)
    other_G = (one_G + 1 + rng.integers(size_G - 1)) % size_G  # another member
    score_I = np.empty(len(order), np.float32)
    # Groups do not depend on each other: the number of threads changes only the time.
    cuts = np.searchsorted(np.cumsum(size_G), np.linspace(0, size_G.sum(), 4 * threads + 1)[1:-1]).tolist()

    def split_part(first: int, last: int) -> None:
        _split_groups(x_ID, order, *groups, one_G, other_G, first, last, ITERATIONS, score_I)

    list(pool.map(split_part, [0, *cuts], [*cuts, len(size_G)]))
    slots = spans(groups.start_G, groups.stop_G)
    order[slots] = order[slots][np.lexsort((score_I[slots], np.repeat(np.arange(len(size_G)), size_G)))]


@compiled(fastmath={"reassoc", "contract"})
def _split_groups(
    x_ID: Array,
    order: Array,
    start_G: Array,
    cut_G: Array,
    stop_G: Array,
    one_G: Array,
    other_G: Array,
    first: int,
    last: int,
    max_iterations: int,
    score_I: Array,
) -> None:
    """For groups first … last − 1, writes the score of each place by which its group is sorted in the end."""
    width = x_ID.shape[1]
    axis = np.empty(width, np.float32)
    sums = np.empty((2, width), np.float64)
    for group in range(first, last):
        start, stop, left = start_G[group], stop_G[group], cut_G[group] - start_G[group]
        is_left = np.zeros(stop - start, np.bool_)
        one, other = order[start + one_G[group]], order[start + other_G[group]]
        for d in range(width):
            axis[d] = x_ID[other, d] - x_ID[one, d]
        for _ in range(max_iterations):
            for place in range(start, stop):
                item, score = order[place], np.float32(0)
                for d in range(width):
                    score += x_ID[item, d] * axis[d]
                score_I[place] = score
            if not move_sides(score_I[start:stop], left, is_left):
                break
            sums[:] = 0
            for place in range(start, stop):
                item, side = order[place], 0 if is_left[place - start] else 1
                for d in range(width):
                    sums[side, d] += x_ID[item, d]
            lengths = np.sqrt((sums * sums).sum(axis=1))
            for d in range(width):
                right = sums[1, d] / lengths[1] if lengths[1] > 0 else 0.0
                axis[d] = right - (sums[0, d] / lengths[0] if lengths[0] > 0 else 0.0)


@compiled()
def move_sides(score_R: Array, left: int, is_left_R: Array) -> bool:
    """Puts the `left` lowest scores on the left, of equal ones the first; returns whether one changed side."""
    border, equal, moved = nth_smallest(score_R.copy(), left), left, False
    for row in range(len(score_R)):
        equal -= score_R[row] < border
    for row in range(len(score_R)):
        now_left = score_R[row] < border or (score_R[row] == border and equal > 0)
        equal -= score_R[row] == border
        moved |= is_left_R[row] != now_left
        is_left_R[row] = now_left
    return moved


def unit_rows(x: Float32) -> Float32:
    """Rows of length 1; a zero row (an unseen item, or members that cancel out) stays zero instead of becoming NaN."""
    norm = np.linalg.norm(x, axis=1, keepdims=True)
    unit: Float32 = np.divide(x, norm, out=np.zeros_like(x), where=norm > 0)
    return unit


@compiled()
def nth_smallest(values: Array, n: int) -> Any:
    """The n-th smallest number, from 0, by quickselect (Hoare 1961). Reorders `values`.

    Written here, because numba needs five seconds to compile `np.partition`.
    """
    low, high = 0, len(values) - 1
    while low < high:
        pivot = values[(low + high) // 2]
        i, j = low, high
        while i <= j:
            while values[i] < pivot:
                i += 1
            while values[j] > pivot:
                j -= 1
            if i <= j:
                values[i], values[j] = values[j], values[i]
                i += 1
                j -= 1
        if n <= j:
            high = j
        elif n >= i:
            low = i
        else:
            break
    return values[n]
