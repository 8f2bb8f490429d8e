"""The query encoder that reads a history as a sequence, once for all levels of the tree.

    x_0 = start,  x_t = row(leaf of the t-th item) without its bias          t = 1 … the newest item
    z   = transformer(x)_newest                                              (transformer.py)
    state_h = (s_h ∘ z, 1)                                                   s_h a scale per level, 1 at the start

Every sequence begins with a learned start, so an empty history has a state too. The last entry of a node row is its bias, which is no
input: the transformer is as wide as a row, and reads 0 in its place, before positions are added. A linear map of z for each level would say
no more than s_h does: inner nodes have rows of their own, which take such a map in.

Legend: B queries, T places of a history, X = T + 1, L levels, D node row, N nodes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from training.deep.scorers.lookup import lookup
from training.deep.scorers.transformer import Dropout, SequenceEncoder


class SequenceQuery(nn.Module):
    """history_leaves int64[B, T] (leaf nodes, newest last, −1 = padding), node_rows float32[N, D] → features float32[B, L, D − 1].

    length  T, the most places of a history
    """

    def __init__(self, node_dim: int, layers: int, heads: int, length: int, levels: int) -> None:
        super().__init__()
        self.length = length
        self.start_D = nn.Parameter(torch.randn(node_dim) * 0.02)
        self.scale_LD = nn.Parameter(torch.ones(levels, node_dim - 1))
        self.transformer = SequenceEncoder(node_dim, layers, heads, length + 1)

    def forward(self, history_leaves: Tensor, node_rows: Tensor) -> Tensor:
        present_BX = torch.cat([torch.zeros_like(history_leaves[:, :1]), history_leaves], 1) >= 0
        state_BD = self.transformer.last(self._inputs(history_leaves, node_rows), present_BX)
        return self.scale_LD * state_BD[:, None, :-1]

    def states(self, leaves_BT: Tensor, node_rows: Tensor, dropout: Dropout | None) -> Tensor:
        """[B, X, D]: z before the first item and after each; oldest first, −1 behind the newest."""
        state_BXD: Tensor = self.transformer(self._inputs(leaves_BT, node_rows), dropout)
        return state_BXD

    def _inputs(self, leaves_BT: Tensor, node_rows: Tensor) -> Tensor:
        rows_BTD = lookup(leaves_BT.clamp(min=0), node_rows)
        rows_BTD = torch.cat([rows_BTD[..., :-1], torch.zeros_like(rows_BTD[..., -1:])], -1)
        return torch.cat([self.start_D.expand(len(leaves_BT), 1, -1), rows_BTD], 1)
