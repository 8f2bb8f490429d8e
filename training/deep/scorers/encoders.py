"""Query encoders: query arrays → query features, one row per level.

`WindowEncoder` is the papers' history encoder (TDM §5.1, with JTM's per-level ancestors): each behaviour is replaced by its ancestor
on the level at hand, the node rows are averaged inside time windows, the windows are concatenated. `VectorEncoder` passes a dense
vector on, shifted and scaled.

Legend: B queries, T history, R behaviours without padding, L levels, W windows, D node row, F features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ...deep.scorers.row_table import Rows, lookup


class WindowEncoder(nn.Module):
    """history_nodes int64[B, L, T] (−1 = padding), node_rows float32[N, D] → features float32[B, L, W·D].

    A window's mean is over its behaviours, padding left out; an empty window is 0. Levels are independent of each other, but padding is
    padding on all of them.
    (The authors' code adds the padding's row into the sum. We take that for a slip.)
    """

    def __init__(self, windows: Sequence[int], node_dim: int) -> None:
        super().__init__()
        self.features = len(windows) * node_dim
        member_WT = torch.zeros(len(windows), sum(windows))
        start = 0
        for w, length in enumerate(windows):
            member_WT[w, start : start + length] = 1
            start += length
        self.register_buffer("member_WT", member_WT, persistent=False)
        self.member_WT: Tensor

    def forward(self, history_nodes: Tensor, node_rows: Rows) -> Tensor:
        if node_rows.device.type == "cpu" and not torch.compiler.is_exporting():
            # Histories are mostly padding. A GPU would add rows up in no fixed order.
            return self._without_padding(history_nodes, node_rows)
        present_B1T = (history_nodes[:, :1] >= 0).to(node_rows.dtype)  # padding is the same on every level
        member_WT = self.member_WT[:, self.member_WT.shape[1] - history_nodes.shape[2] :]  # a shorter history lacks the oldest positions
        weight_B1WT = member_WT * present_B1T.unsqueeze(2)
        weight_B1WT = weight_B1WT / weight_B1WT.sum(-1, keepdim=True).clamp(min=1)
        rows_BLTD = lookup(history_nodes.clamp(min=0), node_rows)
        return (weight_B1WT @ rows_BLTD).flatten(2)

    def _without_padding(self, history_nodes: Tensor, node_rows: Rows) -> Tensor:
        """The same sums, gathering only the rows of behaviours that are not padding."""
        batch, levels, _ = history_nodes.shape
        present_BT = history_nodes[:, 0] >= 0
        count_BW = present_BT.to(node_rows.dtype) @ self.member_WT.T
        query_R, position_R = torch.nonzero(present_BT, as_tuple=True)
        window_R = self.member_WT.argmax(0)[position_R]
        rows_RLD = lookup(history_nodes[query_R, :, position_R], node_rows) / count_BW[query_R, window_R, None, None]
        sums = rows_RLD.new_zeros((batch * len(self.member_WT), levels, node_rows.shape[1]))
        sums = sums.index_add(0, query_R * len(self.member_WT) + window_R, rows_RLD)
        return sums.view(batch, -1, levels, node_rows.shape[1]).transpose(1, 2).flatten(2)


class VectorEncoder(nn.Module):
    """vector float32[B, F] → features float32[B, 1, F]: (vector − mean) · scale, the same on every level."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.features = width
        self.register_buffer("mean_F", torch.zeros(width))
        self.register_buffer("scale", torch.ones(1))
        self.mean_F: Tensor
        self.scale: Tensor

    def forward(self, vector: Tensor, node_rows: Rows) -> Tensor:
        return ((vector - self.mean_F) * self.scale).unsqueeze(1)
