"""Linear node scorers as they are stored and searched: for each inner node, the weights of its children by feature.

A query's products with all children of a node are made in one pass over the features that both have (MSCM; Etter et al. 2021, §4).

Legend: P inner nodes, N nodes, R rows, F features.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from espalier.errors import BundleCorrupt
from espalier.tree import Tree

MAX_CHILDREN = 1 << 16
"""Of a node: `entry_child` numbers them in 16 bits."""


ARRAYS = {
    "chunk_row": np.int64,
    "row_feature": np.int32,
    "row_entry": np.int64,
    "entry_child": np.uint16,
    "entry_weight": np.float32,
    "bias": np.float32,
}
"""The arrays of Chunks, as bundles name and type them."""


@dataclass(frozen=True, eq=False)
class Chunks:
    """logit(node) = bias + Σ_f weight(f) · x_f. A row holds the weights of one feature for the children of one inner node that have any.

    chunk_row     int64[P + 1]    where each inner node's rows begin
    row_feature   int32[R]        their features, ascending within a node
    row_entry     int64[R + 1]    where each row's entries begin
    entry_child   uint16[entries] which child, counted from the node's first one; ascending within a row
    entry_weight  float32[entries]
    bias          float32[N]      of every node; the root's is not used
    width         F
    """

    chunk_row: NDArray[np.int64]
    row_feature: NDArray[np.int32]
    row_entry: NDArray[np.int64]
    entry_child: NDArray[np.uint16]
    entry_weight: NDArray[np.float32]
    bias: NDArray[np.float32]
    width: int

    def check(self, tree: Tree) -> None:
        """Raise BundleCorrupt unless the arrays are the scorers of `tree`: a search trusts them."""
        for name, dtype in ARRAYS.items():
            array = getattr(self, name)
            if array.ndim != 1 or array.dtype != dtype:
                raise BundleCorrupt(f"chunks: {name} is {array.dtype}{list(array.shape)}, expected one-dimensional {np.dtype(dtype)}")
        inner = tree.leaf_offset
        for name, count, end in (
            ("chunk_row", inner + 1, len(self.row_feature)),
            ("row_entry", len(self.row_feature) + 1, len(self.entry_child)),
        ):
            array = getattr(self, name)
            if len(array) != count or array[0] != 0 or array[-1] != end or np.any(np.diff(array) < 0):
                raise BundleCorrupt(f"chunks: {name} has {len(array)} entries, expected {count} from 0 to {end}, never falling")
        if len(self.entry_weight) != len(self.entry_child) or len(self.bias) != tree.node_count:
            raise BundleCorrupt(
                f"chunks: {len(self.entry_weight)} weights and {len(self.bias)} biases, expected {len(self.entry_child)} and "
                f"{tree.node_count}"
            )
        if len(self.row_feature) and (self.row_feature.min() < 0 or self.row_feature.max() >= self.width):
            raise BundleCorrupt(f"chunks: row_feature has numbers outside 0 … {self.width - 1}")
        rows = np.diff(self.chunk_row)
        node_of_row = np.repeat(np.arange(inner), rows)
        same = node_of_row[1:] == node_of_row[:-1]
        if np.any(same & (np.diff(self.row_feature) <= 0)):
            raise BundleCorrupt("chunks: row_feature does not rise within a node")
        children = np.diff(tree.first_child)[np.repeat(node_of_row, np.diff(self.row_entry))]
        if np.any(self.entry_child >= children):
            raise BundleCorrupt("chunks: entry_child has numbers that a node has no child for")
        if not (np.isfinite(self.entry_weight).all() and np.isfinite(self.bias).all()):
            raise BundleCorrupt("chunks: weights and biases must be finite")

    def weights_of(self, tree: Tree, node: int, features: NDArray[np.int32]) -> NDArray[np.float32]:
        """A node's weights for some features (ascending): float32, 0 where it has none."""
        parent = int(tree.parent[node])
        begin, end = int(self.chunk_row[parent]), int(self.chunk_row[parent + 1])
        weights = np.zeros(len(features), np.float32)
        at = begin + np.searchsorted(self.row_feature[begin:end], features)
        for i, row in enumerate(at.tolist()):
            if row < end and self.row_feature[row] == features[i]:
                entries = slice(int(self.row_entry[row]), int(self.row_entry[row + 1]))
                mine = np.flatnonzero(self.entry_child[entries] == node - tree.first_child[parent])
                if len(mine):
                    weights[i] = self.entry_weight[entries][mine[0]]
        return weights

    @property
    def nbytes(self) -> int:
        return sum(getattr(self, name).nbytes for name in ARRAYS)
