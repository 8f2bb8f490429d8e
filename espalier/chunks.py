"""Linear node scorers as they are stored and searched: for each inner node, the weights of its children by feature.

The logits of all children of a node need one pass over the features that the node and the query share (MSCM; Etter et al. 2021, §4).

Legend: P inner nodes, N nodes, R rows, F features.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from espalier.errors import BundleCorrupt, InvalidQuery
from espalier.manifest import Ranking
from espalier.text.sparse_rows import SparseRows, ascends_in_rows, rises, row_blocks
from espalier.tree import Tree

MAX_CHILDREN = 1 << 16
"""Most children of a node: `entry_child` has 16 bits."""
LARGEST_RANK = float(np.finfo(np.float32).max) / 4
"""Largest bound of a rank that a query may have; the rest of float32's range is for rounding."""

ARRAYS: Mapping[str, type[np.generic]] = {
    "chunk_row": np.int64,
    "row_feature": np.int32,
    "row_entry": np.int64,
    "entry_child": np.uint16,
    "entry_weight": np.float32,
    "bias": np.float32,
}
"""The arrays of Chunks with weights in float32, as bundles name and type them; for float16 see `packed_chunks`."""
IN_FLOAT16: Mapping[str, tuple[type[np.generic], ...]] = {"entry_child": (np.uint8, np.uint16), "entry_weight": (np.float16,)}
"""Which arrays of Chunks have other types where weights are float16."""


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

    chunk_row: NDArray[np.int64]
    row_feature: NDArray[np.int32]
    row_entry: NDArray[np.int64]
    entry_child: NDArray[np.uint16] | NDArray[np.uint8]
    entry_weight: NDArray[np.float32] | NDArray[np.float16]
    bias: NDArray[np.float32]
    width: int

    def check(self, tree: Tree) -> None:
        """Raise BundleCorrupt unless the arrays are scorers of `tree`. Compiled searches do not check again."""
        narrow = IN_FLOAT16 if self.entry_weight.dtype == np.float16 else {}
        for name, dtype in ARRAYS.items():
            array = getattr(self, name)
            if array.ndim != 1 or array.dtype not in [np.dtype(one) for one in narrow.get(name, (dtype,))]:
                raise BundleCorrupt(f"chunks: {name} is {array.dtype}{list(array.shape)}, expected one-dimensional {np.dtype(dtype)}")
        if max(tree.max_children) > MAX_CHILDREN:
            raise BundleCorrupt(f"chunks: a node of {max(tree.max_children)} children, at most {MAX_CHILDREN} can be numbered")
        inner = tree.leaf_offset
        for name, count, end in (
            ("chunk_row", inner + 1, len(self.row_feature)),
            ("row_entry", len(self.row_feature) + 1, len(self.entry_child)),
        ):
            array = getattr(self, name)
            if not rises(array, count - 1, end):
                raise BundleCorrupt(f"chunks: {name} has {len(array)} entries, expected {count} from 0 to {end} that never decrease")
        if len(self.entry_weight) != len(self.entry_child) or len(self.bias) != tree.node_count:
            raise BundleCorrupt(
                f"chunks: {len(self.entry_weight)} weights and {len(self.bias)} biases, expected {len(self.entry_child)} and "
                f"{tree.node_count}"
            )
        if len(self.row_feature) and (self.row_feature.min() < 0 or self.row_feature.max() >= self.width):
            raise BundleCorrupt(f"chunks: row_feature has feature numbers outside 0 … {self.width - 1}")
        for first, end in row_blocks(self.chunk_row):
            self._check_nodes(first, end, np.diff(tree.first_child[first : end + 1]))
        if not np.isfinite(self.largest).all():
            raise BundleCorrupt("chunks: weights and biases must be finite")

    def _check_nodes(self, first: int, end: int, children_P: NDArray[np.int64]) -> None:
        """What `check` asks of the rows of some inner nodes, which have so many children."""
        begin_P = self.chunk_row[first : end + 1]
        rows = slice(int(begin_P[0]), int(begin_P[-1]))
        if not ascends_in_rows(self.row_feature[rows], begin_P - begin_P[0]):
            raise BundleCorrupt("chunks: row_feature is not strictly ascending within a node")
        begin_R = self.row_entry[rows.start : rows.stop + 1]
        child, begin_R = self.entry_child[begin_R[0] : begin_R[-1]], begin_R - begin_R[0]
        used_R, children_R = np.diff(begin_R) > 0, np.repeat(children_P, np.diff(begin_P))
        if len(child) and np.any(np.maximum.reduceat(child, begin_R[:-1][used_R]) >= children_R[used_R]):
            raise BundleCorrupt("chunks: entry_child has numbers of children that a node does not have")
        if not ascends_in_rows(child, begin_R):
            raise BundleCorrupt("chunks: entry_child is not strictly ascending within a row")

    def weights_of(self, tree: Tree, node: int, features: NDArray[np.int32]) -> NDArray[np.float32]:
        """float32: a node's weights for some features (ascending), 0 where it has none."""
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

    @cached_property
    def largest(self) -> tuple[float, float]:
        """The largest absolute weight and the largest absolute bias."""
        return _largest_absolute(self.entry_weight), _largest_absolute(self.bias)

    def check_sizes(self, queries: SparseRows, ranking: Ranking, height: int) -> None:
        """Raise InvalidQuery (field `queries[i].features.values`) where values are so large that a rank could overflow float32.

        Compares bounds: |logit| ≤ bias + weight · Σ|value|, a hinge's loss ≤ (1 + |logit|)^p, a rank ≤ Σ_h γ^h of these. So every engine
        refuses the same queries, before it searches.
        """
        weight, bias = self.largest
        sizes = np.abs(np.append(queries.values, np.float32(0)).astype(np.float64))
        logit_B = bias + weight * (np.add.reduceat(sizes, queries.indptr[:-1]) * (np.diff(queries.indptr) > 0))
        hinge = ranking.own == "log_activation" and ranking.activation != "sigmoid"
        with np.errstate(over="ignore"):
            own_B = (1 + logit_B) ** int(ranking.activation[1]) if hinge else 1 + logit_B
            rank_B = own_B * sum(ranking.gamma**h for h in range(height))
        wrong = np.flatnonzero(~(rank_B <= LARGEST_RANK))
        if len(wrong):
            b = int(wrong[0])
            own = queries.values[queries.indptr[b] : queries.indptr[b + 1]]
            largest = float(own[np.argmax(np.abs(own))]) if len(own) else 0.0
            raise InvalidQuery(
                f"queries[{b}].features.values", largest, "smaller values: this model's scores of these could overflow 32-bit numbers"
            )

    @property
    def nbytes(self) -> int:
        return sum(getattr(self, name).nbytes for name in ARRAYS)


class TreeChunks(NamedTuple):
    """A tree with the weights of its nodes: a bundle of linear scorers has one, a forest several over the same items."""

    tree: Tree
    chunks: Chunks


def _largest_absolute(array: NDArray[np.float32] | NDArray[np.float16]) -> float:
    """0 for an empty array, NaN if a number is NaN."""
    return float(np.maximum(array.max(), -array.min())) if len(array) else 0.0
