"""The weights of a new item's leaf in a tree of linear scorers, without training.

Chang et al. 2021 (§6, future work) propose the average of the nearest neighbours' weights. Here the item's own features are added. The
details were chosen on validation queries (benchmarks/results, cold start):

    weights   ℓ · s · x + ½ · mean over the 3 nearest items i, by their own texts, of max(0, cos(x, x_i)) · w_i, with ℓ the median length
              of the leaves' weights and s the item's own length: about what `prior` makes of an item that no query led to
    bias      the first quartile of the leaves' biases

In models that find items by their words, neighbours add only features that x lacks, as in training (`near_words.py`): otherwise a new item
would come before equal trained ones. A trained item with another text has no neighbours there, but keeps what training knew of it:

    weights   ℓ · s · (1 − c (1 − α)) · x + c · (w − α · ℓ · s₀ · x₀), with w its trained weights, x₀ and s₀ its own words in training
              and their length, c the cosine of its words now and then, and α how much of ℓ · s₀ · x₀ is in w, so that the same text has w
    bias      likewise between that of new leaves and its own

Weights below the model's smallest are dropped. In a bundle's tail the row of a new item is x, as if its text were its only training point.

Legend: P clusters (nodes of the level above the leaves), F features, K neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from espalier.arrays import Array, Float32, Int32, Int64, read_only
from espalier.chunks import Chunks
from espalier.compiled_code import compiled
from espalier.live.rows import NO_FEATURES, NO_VALUES, LiveRow
from espalier.stored_arrays import row_blocks
from espalier.tree import EMPTY_LEAF, Tree

Weights = tuple[Int32, Float32]
"""Features, ascending, and their weights."""
NO_WEIGHTS: Weights = (NO_FEATURES, NO_VALUES)

NEIGHBOURS, SHARE = 3, 0.5
"""Nearest items whose weights are averaged, and the factor of that average."""
BIAS_QUANTILE = 0.25
"""Quantile of the leaves' biases that new leaves get. A larger one makes searches find new items more often."""


class LinearRows:
    """Makes the rows of one tree's new leaves. Used by any number of threads.

    length    the median length of the leaves' weights, or another one that is given
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
        is_occupied = tree.leaf_item != EMPTY_LEAF
        self.length, self.smallest = np.float32(np.median(np.sqrt(squares[is_occupied]))), smallest
        self._bias = chunks.bias[tree.leaf_offset :]
        self.bias = float(np.quantile(self._bias[is_occupied], BIAS_QUANTILE))

    def row(
        self,
        own: Weights,
        near: Sequence[int] | Int64,
        cosine_K: Sequence[float] | Float32,
        like: Weights | None = None,
        tail: Weights = NO_WEIGHTS,
        keeps: bool = False,
        bias: float | None = None,
    ) -> LiveRow:
        """A new item's row.

        own    the weights of the item's own features, ascending, or none
        keeps  whether neighbours only add features that `own` lacks
        near   item rows of its nearest neighbours, below 0 as padding, with their cosines to it
        like   the mean weights of the items of `like`, which count as neighbours of cosine 1; if `own` is empty the row has just these
        tail   the tail row: features, ascending, and values of length 1
        bias   None: that of new leaves
        """
        summands = [own]
        neighbours: list[tuple[np.float32, Weights]] = [] if like is None else [(np.float32(SHARE if len(own[0]) else 1), like)]
        for item, cosine in zip(near, cosine_K, strict=True):
            if item >= 0 and cosine > 0:
                neighbours.append((np.float32(SHARE * cosine / NEIGHBOURS), self.weights_of(int(item))))
        for share, (feature, weight) in neighbours:
            is_added = ~np.isin(feature, own[0]) if keeps else slice(None)
            summands.append((feature[is_added], share * weight[is_added]))
        feature, weight = summands[0] if len(summands) == 1 else added(summands)
        is_large = np.abs(weight) >= self.smallest
        values, tail_feature, tail_value = self._as_stored(weight[is_large]), np.asarray(tail[0], np.int32), np.asarray(tail[1], np.float32)
        bias = self.bias if bias is None else bias
        return LiveRow(values, feature[is_large], bias, dense=False, tail_feature=tail_feature, tail_value=tail_value)

    def _as_stored(self, weights: Float32) -> Float32:
        """Weights rounded as a fold of the bundle will store them, so that it changes no answer. Too large ones stay: it stores float32."""
        with np.errstate(over="ignore"):
            stored = weights.astype(self._weight.dtype).astype(np.float32)
        return stored if np.isfinite(stored).all() else weights

    def bias_of(self, item: int) -> float:
        """The bias of a trained item's leaf."""
        return float(self._bias[self._tree.leaf_of_item[item] - self._tree.leaf_offset])

    def weights_of(self, item: int) -> Weights:
        """The weights of a trained item's leaf."""
        leaf = int(self._tree.leaf_of_item[item])
        parent = int(self._tree.parent[leaf])
        feature, entry = _entries_of(*self._arrays, parent, leaf - int(self._tree.first_child[parent]))
        return feature, self._weight[entry].astype(np.float32)


def added(sparse_rows: Sequence[Weights]) -> Weights:
    """The sum of sparse rows."""
    features = np.concatenate([feature for feature, _ in sparse_rows])
    order = np.argsort(features, kind="stable")
    distinct, first = np.unique(features[order], return_index=True)
    if not len(distinct):
        return np.empty(0, np.int32), np.empty(0, np.float32)
    sums = np.add.reduceat(np.concatenate([weight for _, weight in sparse_rows])[order], first)
    return distinct.astype(np.int32), sums.astype(np.float32)


@compiled()
def _entries_of(chunk_row: Array, row_feature: Array, row_entry: Array, entry_child: Array, parent: int, child: int) -> tuple[Array, Array]:
    """The features of a child (its number among the parent's children) and the entries with their weights. Children ascend within a row."""
    begin, end = chunk_row[parent], chunk_row[parent + 1]
    feature, entry = np.empty(end - begin, np.int32), np.empty(end - begin, np.int64)
    count = 0
    for row in range(begin, end):
        at = row_entry[row] + np.searchsorted(entry_child[row_entry[row] : row_entry[row + 1]], child)
        if at < row_entry[row + 1] and entry_child[at] == child:
            feature[count], entry[count] = row_feature[row], at
            count += 1
    return feature[:count], entry[:count]


def _leaf_entries(tree: Tree, chunks: Chunks) -> Iterator[tuple[Int64, Array]]:
    """All weights of leaves, in blocks of clusters: the leaf (counted from the first one) and the weight of each."""
    span = tree.level(tree.height - 1)
    entry_P = chunks.row_entry[chunks.chunk_row[span.start :]]  # each cluster's first entry
    for begin, end in row_blocks(entry_P):
        entries = slice(int(entry_P[begin]), int(entry_P[end]))
        first = tree.first_child[span.start + begin : span.start + end] - tree.leaf_offset
        leaf = np.repeat(first, np.diff(entry_P[begin : end + 1])) + chunks.entry_child[entries]
        yield leaf, np.asarray(chunks.entry_weight[entries])
