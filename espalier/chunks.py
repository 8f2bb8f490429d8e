"""Linear node scorers as they are stored and searched: for each inner node, the weights of its children by feature.

The logits of all children of a node need one pass over the features that the node and the query share (MSCM; Etter et al. 2021, §4).

Legend: P inner nodes, N nodes, R rows, F features.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from espalier.arrays import Array, Float32, Int32, Int64
from espalier.errors import BundleCorrupt, InvalidQuery
from espalier.manifest import Ranking
from espalier.stored_arrays import Dtypes, check_arrays, check_length, check_rows, row_blocks
from espalier.text.sparse_rows import SparseRows
from espalier.tree import Tree

MAX_CHILDREN = 1 << 16
"""Most children of a node: `entry_child` has 16 bits."""
LARGEST_RANK = float(np.finfo(np.float32).max) / 4
"""Largest bound of a rank that a query may have; the rest of float32's range is for rounding."""

ARRAYS: Dtypes = {
    "chunk_row": np.int64,
    "row_feature": np.int32,
    "row_entry": np.int64,
    "entry_child": np.uint16,
    "entry_weight": np.float32,
    "bias": np.float32,
}
"""The arrays of Chunks with weights in float32, as bundles name and type them; for float16 see `packed_chunks`."""
IN_FLOAT16: Dtypes = {**ARRAYS, "entry_child": (np.uint8, np.uint16), "entry_weight": np.float16}
"""The arrays if weights are float16."""


@dataclass(frozen=True, eq=False)
class Chunks:
    """logit(node) = bias + Σ_f weight(f) · x_f. A row holds one feature's non-zero weights for the children of one inner node.

    chunk_row     int64[P + 1]    where each inner node's rows begin
    row_feature   int32[R]        their features, ascending within a node
    row_entry     int64[R + 1]    where each row's entries begin
    entry_child   uint16[entries] which child, counted from the node's first one; ascending within a row. With float16 perhaps uint8
    entry_weight  float32[entries] or float16[entries]
    bias          float32[N]      the root's is not used
    width         F
    """

    chunk_row: Int64
    row_feature: Int32
    row_entry: Int64
    entry_child: NDArray[np.uint16] | NDArray[np.uint8]
    entry_weight: Float32 | NDArray[np.float16]
    bias: Float32
    width: int

    def check(self, tree: Tree) -> None:
        """Raise BundleCorrupt unless the arrays are scorers of `tree`. Compiled searches do not check again."""
        check_arrays(self.arrays(), IN_FLOAT16 if self.entry_weight.dtype == np.float16 else ARRAYS)
        most = max(tree.max_children)
        if most > MAX_CHILDREN:
            raise BundleCorrupt(f"a node of {most} children, at most {MAX_CHILDREN} can be numbered")
        check_rows("row_feature", self.row_feature, self.chunk_row, tree.leaf_offset, self.width)
        check_rows("entry_child", self.entry_child, self.row_entry, len(self.row_feature), MAX_CHILDREN)
        check_length("entry_weight", self.entry_weight, len(self.entry_child))
        check_length("bias", self.bias, tree.node_count)
        for first, end in row_blocks(self.chunk_row):
            self._check_children(first, end, np.diff(tree.first_child[first : end + 1]))
        if not np.isfinite(self.largest).all():
            raise BundleCorrupt("weights and biases must be finite")

    def _check_children(self, first: int, end: int, children_P: Int64) -> None:
        """Raise BundleCorrupt if inner nodes first … end − 1, with so many children, have rows with larger child numbers."""
        begin_P = self.chunk_row[first : end + 1]
        last_R = self.row_entry[begin_P[0] + 1 : begin_P[-1] + 1] - 1  # children ascend, so the last entry has the largest
        used_R = last_R >= self.row_entry[begin_P[0] : begin_P[-1]]
        if np.any(self.entry_child[last_R[used_R]] >= np.repeat(children_P, np.diff(begin_P))[used_R]):
            raise BundleCorrupt("entry_child has numbers of children that a node does not have")

    def arrays(self) -> dict[str, Array]:
        """By their names in ARRAYS."""
        return {name: getattr(self, name) for name in ARRAYS}

    def weights_of(self, tree: Tree, node: int, features: Int32) -> Float32:
        """float32: a node's weights for some features (ascending); 0 for features without a weight."""
        parent = int(tree.parent[node])
        begin, end = int(self.chunk_row[parent]), int(self.chunk_row[parent + 1])
        weights = np.zeros(len(features), np.float32)
        rows = begin + np.searchsorted(self.row_feature[begin:end], features)
        for i, row in enumerate(rows.tolist()):
            if row < end and self.row_feature[row] == features[i]:
                entries = slice(int(self.row_entry[row]), int(self.row_entry[row + 1]))
                entry = np.flatnonzero(self.entry_child[entries] == node - tree.first_child[parent])
                if len(entry):
                    weights[i] = self.entry_weight[entries][entry[0]]
        return weights

    @cached_property
    def largest(self) -> tuple[float, float]:
        """The largest absolute weight and the largest absolute bias."""
        return _largest_absolute(self.entry_weight), _largest_absolute(self.bias)

    def check_sizes(self, queries: SparseRows, ranking: Ranking, height: int) -> None:
        """Raise InvalidQuery (field `queries[i].features.values`) if values are so large that a rank could overflow float32.

        Compares bounds: |logit| ≤ bias + weight · Σ|value|, a hinge's loss ≤ (1 + |logit|)^p, and a rank ≤ Σ_h γ^h times that. So every
        engine refuses the same queries, before it searches.
        """
        weight, bias = self.largest
        sizes = np.abs(np.append(queries.values, np.float32(0)).astype(np.float64))
        logit_B = bias + weight * (np.add.reduceat(sizes, queries.indptr[:-1]) * (np.diff(queries.indptr) > 0))
        hinge = ranking.own == "log_activation" and ranking.activation != "sigmoid"
        with np.errstate(over="ignore"):
            level_B = (1 + logit_B) ** int(ranking.activation[1]) if hinge else 1 + logit_B
            rank_B = level_B * sum(ranking.gamma**h for h in range(height))
        wrong_queries = np.flatnonzero(~(rank_B <= LARGEST_RANK))
        if len(wrong_queries):
            b = int(wrong_queries[0])
            _, values = queries.row(b)
            largest = float(values[np.argmax(np.abs(values))]) if len(values) else 0.0
            raise InvalidQuery(
                f"queries[{b}].features.values", largest, "smaller values: this model's scores of these could overflow 32-bit numbers"
            )

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays().values())


class TreeChunks(NamedTuple):
    """A tree with the weights of its nodes: a bundle of linear scorers has one, a forest several over the same items."""

    tree: Tree
    chunks: Chunks


def _largest_absolute(array: Float32 | NDArray[np.float16]) -> float:
    """0 for an empty array, NaN if a number is NaN."""
    return float(np.maximum(array.max(), -array.min())) if len(array) else 0.0
