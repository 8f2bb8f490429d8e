"""What a new item weighs in a tree of linear scorers, without training.

As in the future work of Chang et al. 2021 (§6), it has the average of its nearest neighbours' weights, and more. The details were chosen on
validation queries (benchmarks/results, cold start):

    weights   ℓ · x + ½ · mean over the 3 nearest items i, by their own texts, of max(0, cos(x, x_i)) · w_i, with ℓ the median length of the
              leaves' weights: about what `prior` makes of an item that no query led to
    bias      the first quartile of the leaves' biases

Weights below the model's smallest are left out. In a bundle's tail the row of a new item is x, as if its text were its only training point.

Legend: P clusters (nodes of the level above the leaves), F features, K neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from espalier.chunks import Chunks
from espalier.compiled_code import compiled
from espalier.live.rows import NO_FEATURES, NO_VALUES, LiveRow
from espalier.read_only import read_only
from espalier.tree import EMPTY_LEAF, Tree

Array = NDArray[Any]
Int64 = NDArray[np.int64]

BLOCK = 1 << 22
"""Weights that are processed at once: this bounds the memory beside that of the model."""
Weights = tuple[NDArray[np.int32], NDArray[np.float32]]
"""Features, ascending, and their weights."""

NEIGHBOURS, SHARE = 3, 0.5
"""Nearest items whose weights are averaged, and the factor of that average."""
BIAS_QUANTILE = 0.25
"""Of the leaves' biases; the larger, the more often new items are found."""


class LinearRows:
    """Makes the rows of one tree's new leaves. Used by any number of threads.

    length    the median length of the leaves' weights
    smallest  the model's smallest weight, in absolute value
    bias      of all new leaves
    """

    def __init__(self, tree: Tree, chunks: Chunks) -> None:
        self._tree = tree
        self._arrays = read_only(chunks.chunk_row, chunks.row_feature, chunks.row_entry, chunks.entry_child)
        self._weight = chunks.entry_weight
        squares, smallest = np.zeros(tree.leaf_count), np.inf
        for leaf, weight in _leaf_entries(tree, chunks):
            squares += np.bincount(leaf, weight.astype(np.float64) ** 2, tree.leaf_count)
            smallest = min(smallest, float(np.abs(weight).min(initial=np.inf)))
        held = tree.leaf_item != EMPTY_LEAF
        self.length, self.smallest = np.float32(np.median(np.sqrt(squares[held]))), smallest
        self.bias = float(np.quantile(chunks.bias[tree.leaf_offset :][held], BIAS_QUANTILE))

    def row(
        self,
        own: Weights,
        near: Sequence[int] | Int64,
        cosine_K: Sequence[float] | NDArray[np.float32],
        like: Weights | None = None,
        in_tail: bool = False,
    ) -> LiveRow:
        """A new item's row.

        own      its features, ascending, of length 1, or none; of a model that finds items by their words, those of a document
        near     item rows of its nearest neighbours, below 0 as padding, with their cosines to it
        like     the mean weights of items that it is known to resemble: neighbours of cosine 1; without features of its own its weights
        in_tail  the row has a tail row, too: its features
        """
        parts = [(own[0], self.length * own[1])]
        if like is not None:
            parts.append((like[0], np.float32(SHARE if len(own[0]) else 1) * like[1]))
        for item, cosine in zip(near, cosine_K, strict=True):
            if item >= 0 and cosine > 0:
                feature, weight = self.weights_of(int(item))
                parts.append((feature, np.float32(SHARE * cosine / NEIGHBOURS) * weight))
        feature, weight = parts[0] if len(parts) == 1 else added(parts)
        kept = np.abs(weight) >= self.smallest
        tail = (np.asarray(own[0], np.int32), np.asarray(own[1], np.float32)) if in_tail else (NO_FEATURES, NO_VALUES)
        return LiveRow(weight[kept], feature[kept], self.bias, dense=False, tail_feature=tail[0], tail_value=tail[1])

    def weights_of(self, item: int) -> Weights:
        """The weights of a trained item's leaf."""
        leaf = int(self._tree.leaf_of_item[item])
        parent = int(self._tree.parent[leaf])
        feature, entry = _entries_of(*self._arrays, parent, leaf - int(self._tree.first_child[parent]))
        return feature, self._weight[entry].astype(np.float32)


def added(parts: Sequence[Weights]) -> Weights:
    """The sum of sparse rows."""
    features = np.concatenate([feature for feature, _ in parts])
    order = np.argsort(features, kind="stable")
    distinct, first = np.unique(features[order], return_index=True)
    if not len(distinct):
        return np.empty(0, np.int32), np.empty(0, np.float32)
    sums = np.add.reduceat(np.concatenate([weight for _, weight in parts])[order], first)
    return distinct.astype(np.int32), sums.astype(np.float32)


@compiled()
def _entries_of(chunk_row: Array, row_feature: Array, row_entry: Array, entry_child: Array, parent: int, child: int) -> tuple[Array, Array]:
    """The features of a child, counted from the first one, and the entries that hold their weights; children ascend within a row."""
    begin, end = chunk_row[parent], chunk_row[parent + 1]
    feature, entry = np.empty(end - begin, np.int32), np.empty(end - begin, np.int64)
    count = 0
    for row in range(begin, end):
        place = row_entry[row] + np.searchsorted(entry_child[row_entry[row] : row_entry[row + 1]], child)
        if place < row_entry[row + 1] and entry_child[place] == child:
            feature[count], entry[count] = row_feature[row], place
            count += 1
    return feature[:count], entry[:count]


def _leaf_entries(tree: Tree, chunks: Chunks) -> Iterator[tuple[Int64, Array]]:
    """All weights of leaves, about BLOCK at a time: the leaf (counted from the first one) and the weight of each."""
    span = tree.level(tree.height - 1)
    entry_P = chunks.row_entry[chunks.chunk_row[span.start :]]  # where each cluster's entries begin
    begin = 0
    while begin < len(span):
        end = max(begin + 1, int(np.searchsorted(entry_P, entry_P[begin] + BLOCK, side="right")) - 1)
        entries = slice(int(entry_P[begin]), int(entry_P[end]))
        first = tree.first_child[span.start + begin : span.start + end] - tree.leaf_offset
        leaf = np.repeat(first, np.diff(entry_P[begin : end + 1])) + chunks.entry_child[entries]
        yield leaf, np.asarray(chunks.entry_weight[entries])
        begin = end
