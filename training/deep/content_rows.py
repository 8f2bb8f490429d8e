"""Leaf rows that are the sum of an own part and a part from content: row(leaf of i) = e(i) + Σ_f c(i, f) · W_f, c(i) its features.

In training `node_rows` of a model hold the own parts e, and every lookup adds c · W (`RowTable.compose`). Before and after, they hold the
sums: the search and the export see one table. In each step e counts as 0 for a random share of the items, and always for items that no
training user touched: their gradients go to W alone (dropout of the id, Volkovs et al. 2017, DropoutNet). So the row of an untouched item
is its content's.

Ridge regression learns the first W, and predicts embeddings of items without events before training.

Knows rows and features. Does not know how features are made of fields: see `training.data.item_content`.

Legend: I items, F features, D node row, U nodes of a lookup, E entries of their features.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from espalier.arrays import Bool, Float32
from espalier.text.sparse_rows import SparseRows
from espalier.tree import Tree

from ..data.csr import as_matrix
from ..deep.parallel import process, processes
from ..deep.scorers.model import NodeScorer
from ..deep.topology import Topology
from ..onnx_graphs import onnx_bytes

BLOCK = 1 << 12
"""Rows that are split or joined at a time."""
PENALTY = 3.0
"""Among 0.1 to 10, the best predictor of unit embeddings of left-out items of MovieLens 1M and the sample. An item's values have length 1,
and so have its words."""
ITERATIONS = 40
"""Conjugate-gradient steps, at most."""


class ContentRows:
    """The features of a catalogue at the leaves of a tree, on its device.

    seen_I  bool[I]: items that a training user touched
    drop    share of the seen items whose own part counts as 0 in a step
    """

    def __init__(self, rows: SparseRows, topology: Topology, seen_I: Bool, drop: float) -> None:
        device = topology.device
        self._topology, self._drop = topology, drop
        self._start_I1, self._feature_E, self._value_E = (
            torch.from_numpy(np.ascontiguousarray(array)).to(device) for array in (rows.indptr, rows.indices.astype(np.int64), rows.values)
        )
        self._unseen_I = torch.from_numpy(~seen_I)
        self._is_dropped_I = self._unseen_I.to(device)

    def draw(self, seed: int) -> None:
        """Draw the items whose own part counts as 0 from now on; the same on all processes."""
        draw_I = torch.rand(len(self._unseen_I), generator=torch.Generator().manual_seed(seed))
        self._is_dropped_I = ((draw_I < self._drop) | self._unseen_I).to(self._topology.device)

    def sums(self, table_FD: Tensor, nodes_U: Tensor) -> Tensor:
        """float32[U, D]: c · W of nodes; 0 where no item lies."""
        item_U = self._items(nodes_U)
        start_U = self._start_I1[item_U.clamp(min=0)]
        count_U = torch.where(item_U >= 0, self._start_I1[item_U + 1] - start_U, 0)
        begin_U = count_U.cumsum(0) - count_U
        entry_E = torch.arange(int(count_U.sum()), device=nodes_U.device) + (start_U - begin_U).repeat_interleave(count_U)
        return nn.functional.embedding_bag(
            self._feature_E[entry_E], table_FD, begin_U, mode="sum", per_sample_weights=self._value_E[entry_E]
        )

    def compose(self, model: NodeScorer, dropping: bool) -> Callable[[Tensor, Tensor], Tensor]:
        """The function by which lookups turn own parts into sums; if `dropping`, without the own parts of the drawn items."""
        return partial(self._compose, _table(model), dropping)

    @torch.no_grad()
    def split_rows(self, model: NodeScorer) -> None:
        """Turn the node rows of a model from sums into own parts."""
        for own_part_RD, nodes_R in self._blocks_with_leaves(model):
            own_part_RD -= self.sums(_table(model), nodes_R)
            item_R = self._items(nodes_R)
            own_part_RD[(item_R >= 0) & self._unseen_I.to(item_R.device)[item_R]] = 0

    @torch.no_grad()
    def join_rows(self, model: NodeScorer) -> None:
        """Turn the node rows of a model from own parts into sums."""
        for own_part_RD, nodes_R in self._blocks_with_leaves(model):
            own_part_RD += self.sums(_table(model), nodes_R)

    def _compose(self, table_FD: Tensor, dropping: bool, nodes_U: Tensor, own_part_UD: Tensor) -> Tensor:
        if dropping:
            item_U = self._items(nodes_U)
            own_part_UD = own_part_UD.masked_fill(((item_U >= 0) & self._is_dropped_I[item_U]).unsqueeze(1), 0)
        return own_part_UD + self.sums(table_FD, nodes_U)

    def _items(self, nodes_U: Tensor) -> Tensor:
        """int64[U]: the items at nodes, −1 for none."""
        first = self._topology.tree.leaf_offset
        return torch.where(nodes_U >= first, self._topology.leaf_item[(nodes_U - first).clamp(min=0)], -1)

    def _blocks_with_leaves(self, model: NodeScorer) -> list[tuple[Tensor, Tensor]]:
        """The node rows that this process holds, in blocks, and their nodes; without blocks of inner nodes only."""
        rows_nD = model.node_rows.detach()
        first = self._topology.tree.leaf_offset // processes()
        positions = torch.arange(first, len(rows_nD), device=rows_nD.device)
        return [(rows_nD[block[0] : block[-1] + 1], block * processes() + process()) for block in positions.split(BLOCK) if len(block)]


def add_content(model: NodeScorer, features: SparseRows, tree: Tree, seen_I: Bool, fitted: bool) -> None:
    """Give a model its W, and set the rows of items that no training user touched to c · W.

    fitted  whether W is fitted to the first rows of the touched items; otherwise it is 0
    """
    leaf_I = torch.from_numpy(tree.leaf_of_item)
    rows_ID = model.node_rows.detach()[leaf_I].numpy()
    table_FD = ridge(features, rows_ID, seen_I) if fitted else np.zeros((features.width, rows_ID.shape[1]), np.float32)
    model.content_table = nn.Parameter(torch.from_numpy(table_FD))
    unseen = np.flatnonzero(~seen_I)
    model.node_rows.data[leaf_I[unseen]] = torch.from_numpy(as_matrix(features.take(unseen)) @ table_FD)


class ContentGraph(nn.Module):
    """content.onnx: (features int64[I, X], values float32[I, X]) → rows float32[I, D]."""

    def __init__(self, table_FD: Tensor) -> None:
        super().__init__()
        self.register_buffer("table_FD", table_FD)
        self.table_FD: Tensor

    def forward(self, features: Tensor, values: Tensor) -> Tensor:
        return torch.bmm(values.unsqueeze(1), nn.functional.embedding(features, self.table_FD)).squeeze(1)


def content_graph(table_FD: Tensor, entries: int) -> bytes:
    """The bytes of content.onnx, for items with `entries` features."""
    features = torch.arange(2 * entries).view(2, entries) % len(table_FD)
    items = {0: torch.export.Dim.DYNAMIC}
    arguments = features, torch.ones(2, entries)
    return onnx_bytes(ContentGraph(table_FD.detach().cpu()), arguments, ["features", "values"], "rows", [items, items])


def _table(model: NodeScorer) -> nn.Parameter:
    if model.content_table is None:
        raise ValueError("a model without content")
    return model.content_table


def predict_vectors(features: SparseRows, vectors_ID: Float32, known_I: Bool) -> Float32:
    """float32[I, D]: the vector of each item as its content predicts it, learned from the items in known_I."""
    return np.asarray(as_matrix(features) @ ridge(features, vectors_ID, known_I), np.float32)


def ridge(features: SparseRows, targets_ID: Float32, known_I: Bool) -> Float32:
    """float32[F, D]: argmin Σ_{i known} ‖c(i) · W − t(i)‖² + PENALTY · ‖W‖², by conjugate gradients, all columns at once."""
    matrix = as_matrix(features.take(np.flatnonzero(known_I))).astype(np.float64)
    transposed = matrix.T.tocsr()
    solution_FD = np.zeros((features.width, targets_ID.shape[1]))
    residual_FD = transposed @ targets_ID[known_I].astype(np.float64)
    direction_FD, size_D = residual_FD.copy(), (residual_FD**2).sum(0)
    tolerance_D = 1e-12 * size_D
    for _ in range(ITERATIONS):
        if (size_D <= tolerance_D).all():
            break
        image_FD = transposed @ (matrix @ direction_FD) + PENALTY * direction_FD
        curvature_D = (direction_FD * image_FD).sum(0)
        step_D = np.divide(size_D, curvature_D, out=np.zeros_like(size_D), where=curvature_D > 0)
        solution_FD += step_D * direction_FD
        residual_FD -= step_D * image_FD
        next_D = (residual_FD**2).sum(0)
        direction_FD = residual_FD + np.divide(next_D, size_D, out=np.zeros_like(size_D), where=size_D > 0) * direction_FD
        size_D = next_D
    return solution_FD.astype(np.float32)
