"""Leaf rows with a part from content: row(leaf of i) = e(i) + Σ_f c(i, f) · W_f, c(i) the features of item i.

`node_rows` of a model hold the sums, always: the encoder, the heads, the search and the export see one table. Adam updates e and W by their
own gradients; since its steps do not depend on values, e needs no table of its own: it is the sum less c · W. Weight decay does depend on
values, but it is linear, so the sums take it in (`followed`). In each step a random share of the items is without e, as all items are that
no training user touched: their gradients go to W alone (dropout of the id, Volkovs et al. 2017, DropoutNet). An item's e that never moved
is 0, so untouched items have their content's row exactly.

Knows rows and features. Does not know how features are made of fields: see `training.data.item_content`.

Legend: I items, F features, D node row, R items of a step without their own part.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from espalier.text.sparse_rows import SparseRows
from espalier.tree import Tree
from training.data.csr import as_matrix, as_rows
from training.deep.content_ridge import ridge
from training.deep.parallel import process, processes
from training.deep.scorers.model import NodeScorer
from training.onnx_graphs import onnx_bytes

Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]


class ContentRows:
    """The features of a catalogue at the leaves of a tree, on a device.

    seen_I  bool[I]: items that a training user touched
    drop    share of those that are without their own part in a step
    shared  whether processes share the node rows: then I are the items whose leaves this one holds
    """

    def __init__(
        self, rows: SparseRows, tree: Tree, seen_I: NDArray[np.bool_], drop: float, device: torch.device, shared: bool = False
    ) -> None:
        self._items, leaf_I = tree.item_count, tree.leaf_of_item
        self._own_I = np.flatnonzero(leaf_I % processes() == process()) if shared else np.arange(len(leaf_I))
        rows, leaf_I = rows.take(self._own_I), leaf_I[self._own_I] // (processes() if shared else 1)
        self._by_item = _Bags(rows, device)
        self._by_feature = _Bags(_transposed(rows), device)
        self._leaf_I = torch.from_numpy(leaf_I).to(device)
        self._unseen_I = torch.from_numpy(~seen_I[self._own_I])
        self._drop = drop
        self._device = device
        self._shared = shared

    def of(self, table_FD: Tensor) -> Tensor:
        """float32[I, D]: c · W."""
        return self._by_item.sums(table_FD)

    @contextmanager
    def dropped(self, model: NodeScorer, seed: int) -> Iterator[None]:
        """Inside, some items are without their own part. Afterwards W has its gradient, and those items' own parts have none.

        The gradient of the node rows is to be the mean over the processes when the inside ends.

        seed  of the draw, the same on all processes
        """
        table = _table(model)
        draw_I = torch.rand(self._items, generator=torch.Generator().manual_seed(seed))[torch.from_numpy(self._own_I)]
        items_R = torch.nonzero((draw_I < self._drop) | self._unseen_I).squeeze(1)
        leaf_R = self._leaf_I[items_R.to(self._device)]
        with torch.no_grad():
            whole_RD = model.node_rows[leaf_R]
            model.node_rows[leaf_R] = self._by_item.sums(table, items_R)
        try:
            yield
        finally:
            with torch.no_grad():
                model.node_rows[leaf_R] = whole_RD
        gradient_ND = model.node_rows.grad
        if gradient_ND is not None:
            table.grad = self._by_feature.sums(gradient_ND[self._leaf_I])
            if self._shared:
                dist.all_reduce(table.grad)
            gradient_ND[leaf_R] = 0

    @contextmanager
    def followed(self, model: NodeScorer, kept: float = 1.0) -> Iterator[None]:
        """Inside, an update changes W and the sums, as if they were own parts; afterwards the sums have changed with W, too.

        kept  what the update multiplies all weights by before its step: 1 − learning rate · weight decay. A sum holds c · W, so it has
              already taken that in
        """
        table = _table(model)
        before_FD = kept * table.detach()
        yield
        with torch.no_grad():
            model.node_rows[self._leaf_I] += self._by_item.sums(table - before_FD)
            self.reset_unseen(model)

    @torch.no_grad()
    def reset_unseen(self, model: NodeScorer) -> None:
        """Items that no training user touched get exactly their content's row."""
        unseen = torch.nonzero(self._unseen_I).squeeze(1)
        model.node_rows[self._leaf_I[unseen.to(self._device)]] = self._by_item.sums(_table(model), unseen)


def add_content(model: NodeScorer, features: SparseRows, tree: Tree, seen_I: NDArray[np.bool_], fitted: bool) -> None:
    """Give a model its W, and items that no training user touched the rows that follow from it.

    fitted  W that predicts the first rows of the touched items best; else 0
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
    """The bytes of content.onnx, for items of so many features."""
    features = torch.arange(2 * entries).view(2, entries) % len(table_FD)
    items = {0: torch.export.Dim.DYNAMIC}
    arguments = features, torch.ones(2, entries)
    return onnx_bytes(ContentGraph(table_FD.detach().cpu()), arguments, ["features", "values"], "rows", [items, items])


class _Bags:
    """A sparse matrix [A, B] that is multiplied with dense ones, row by row in a fixed order on every device."""

    def __init__(self, rows: SparseRows, device: torch.device) -> None:
        self._rows, self._device = rows, device
        self._whole = self._on_device(rows)

    def sums(self, dense_BD: Tensor, rows: Tensor | None = None) -> Tensor:
        """float32[A, D] = matrix · dense, or some rows of it (int64, on the CPU)."""
        indices, offsets, values = self._whole if rows is None else self._on_device(self._rows.take(rows.numpy()))
        return nn.functional.embedding_bag(
            indices, dense_BD.detach(), offsets, mode="sum", per_sample_weights=values, include_last_offset=True
        )

    def _on_device(self, rows: SparseRows) -> tuple[Tensor, Tensor, Tensor]:
        parts = (rows.indices.astype(np.int64), rows.indptr, rows.values)
        indices, offsets, values = (torch.from_numpy(np.ascontiguousarray(part)).to(self._device) for part in parts)
        return indices, offsets, values


def _transposed(rows: SparseRows) -> SparseRows:
    return as_rows(as_matrix(rows).T.tocsr())


def _table(model: NodeScorer) -> nn.Parameter:
    if model.content_table is None:
        raise ValueError("a model without content")
    return model.content_table
