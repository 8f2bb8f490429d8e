"""TDM's attention unit (TDM §5.1, figure 2): the weight of a behaviour for a node comes from a small network of both.

    a_t(n) = v · φ(U [i_t; i_t ⊙ n; n] + c) + d                 one weight per behaviour and node, no softmax
    p_w(n) = Σ_{t ∈ window w} a_t(n) · i_t / (number of behaviours in w)
    g(n)   = MLP([p_1(n); …; p_W(n); n])                         the 128–64–24 network of `heads.py`

i_t is the row of behaviour t's ancestor on the level at hand (JTM's history), n the node's row; φ = PReLU with one slope. As in the other
encoders, padding counts neither in the sum nor in the number.

Nothing of width 3D is ever made, by exact algebra:

- U [i; i ⊙ n; n] + c = K_t [n; 1] with K_t = [U₂ diag(i_t) + U₃ | U₁ i_t + c]: behaviours become matrices, once per query and level, and
  all hidden units of all behaviours are one matrix product with the candidates.
- The first dense layer is linear in the windows, hence in the weights: it sees Σ_t a_t(n) · (its window's block · i_t / number). These
  projections are the query graph's part.

A candidate costs T · (A · (D + 1) + A + S) multiplications, 73,000 at the papers' sizes, beside 13,000 of the network: several times the
time of `mlp` to serve and more to train (docs/train.md). The hidden units lie candidates-last, [B, T·A, C]: the sum over A is then a row
times a matrix, which ONNX Runtime computes several times faster than the same sum over the last axis.

The state is the rows and their projections, T · (D + S) numbers per level. The matrices K_t, six times as many, are made of it by the
scorer: that costs as much as one candidate.

Legend: B queries, L levels, T history, W windows, C candidates, D node row, A attention units, S first dense layer, F features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ...deep.scorers.heads import MlpHead, SharedPReLU
from ...deep.scorers.row_table import Rows, lookup

BLOCK_BYTES = {"cpu": 1 << 23, "cuda": 1 << 30}
"""Bytes of hidden attention units in memory at a time in training: what fits a CPU's cache, and what keeps a GPU busy."""


class BehaviourEncoder(nn.Module):
    """history_nodes int64[B, L, T] (−1 = padding), node_rows float32[N, D] → features float32[B, L, T·D + T].

    The rows of the behaviours' ancestors, then each behaviour's share of its window, 1 / (number of behaviours in it); both 0 at padding.
    Levels are independent of each other, but padding is padding on all of them.
    """

    def __init__(self, windows: Sequence[int], node_dim: int) -> None:
        super().__init__()
        self.features = sum(windows) * (node_dim + 1)
        member_TW = torch.repeat_interleave(torch.eye(len(windows)), torch.tensor(windows), 0)
        self.register_buffer("member_TW", member_TW, persistent=False)
        self.member_TW: Tensor

    def forward(self, history_nodes: Tensor, node_rows: Rows) -> Tensor:
        present_BLT = (history_nodes >= 0).to(node_rows.dtype)
        count_BLT = present_BLT @ (self.member_TW @ self.member_TW.T)  # the number of behaviours in each behaviour's window
        share_BLT = present_BLT / count_BLT.clamp(min=1)
        rows_BLTD = lookup(history_nodes.clamp(min=0), node_rows) * present_BLT.unsqueeze(3)
        return torch.cat([rows_BLTD.flatten(2), share_BLT], 2)


class AttentionHead(nn.Module):
    """See the module; the features are those of `BehaviourEncoder`.

    windows  lengths of the history windows, old to recent
    units    A
    hidden   the network's layers
    """

    def __init__(self, windows: Sequence[int], node_dim: int, units: int, hidden: Sequence[int]) -> None:
        super().__init__()
        self.windows, self.length, self.units = list(windows), sum(windows), units
        self.state_dim = self.length * (node_dim + hidden[0])
        self.behaviour_part = nn.Linear(node_dim, units)  # U₁ and c
        self.product_part = nn.Linear(node_dim, units, bias=False)  # U₂
        self.node_part = nn.Linear(node_dim, units, bias=False)  # U₃
        self.slope = SharedPReLU()
        self.out = nn.Linear(units, 1)
        bound = (6 / (3 * node_dim + units)) ** 0.5
        for part in (self.behaviour_part, self.product_part, self.node_part):
            nn.init.uniform_(part.weight, -bound, bound)
        nn.init.ones_(self.out.bias)  # a start near the plain window means
        self.network = MlpHead(len(windows) * node_dim, node_dim, hidden)

    def state(self, features_BLF: Tensor) -> Tensor:
        """The rows, and their projections by their windows' blocks of the first dense layer: [B, L, T·D + T·S]."""
        rows_BLF, share_BLT = features_BLF[..., : -self.length], features_BLF[..., -self.length :]
        part_BLTD = rows_BLF.view(*share_BLT.shape, -1) * share_BLT.unsqueeze(3)
        blocks = torch.split(self.network.query_part.weight, part_BLTD.shape[3], 1)
        projected = [rows @ block.T for rows, block in zip(torch.split(part_BLTD, self.windows, 2), blocks, strict=True)]
        return torch.cat([rows_BLF, torch.cat(projected, 2).flatten(2)], 2)

    def forward(self, query_state: Tensor, node_rows: Tensor) -> Tensor:
        """query_state [B, T·D + T·S], node_rows [B, C, D] → logits [B, C].

        Outside of an export, queries are scored in blocks, and each block is computed again for the gradient, so that memory does not grow
        with B · C · T · A.
        """
        if torch.compiler.is_exporting():
            return self.score(query_state, node_rows)
        unit_bytes = 4 * self.length * self.units * max(1, node_rows.shape[1])
        block = max(1, BLOCK_BYTES["cuda" if node_rows.is_cuda else "cpu"] // unit_bytes)
        parts = zip(torch.split(query_state, block), torch.split(node_rows, block), strict=True)
        return torch.cat([checkpoint(self.score, *part, use_reentrant=False, preserve_rng_state=False) for part in parts])

    def score(self, query_state: Tensor, node_rows: Tensor) -> Tensor:
        """The logits [B, C] of whole blocks at once."""
        split = self.length * node_rows.shape[2]
        rows_BTD = query_state[:, :split].view(-1, self.length, node_rows.shape[2])
        projected_BTS = query_state[:, split:].view(-1, self.length, self.network.state_dim)
        weight_BTC = self.weights(rows_BTD, node_rows)
        node_part_BCS = torch.nn.functional.linear(node_rows, self.network.node_part.weight, self.network.query_part.bias)
        sums_BCS = weight_BTC.transpose(1, 2) @ projected_BTS + node_part_BCS
        return self.network.from_first_layer(sums_BCS)

    def scorer_weights(self) -> None:
        """Only ONNX Runtime runs this scorer."""

    def weights(self, rows_BTD: Tensor, node_rows: Tensor) -> Tensor:
        """a_t(n) [B, T, C] of behaviours' rows and node_rows [B, C, D]."""
        slope_BTAD = rows_BTD.unsqueeze(2) * self.product_part.weight + self.node_part.weight
        keys_BTAE = torch.cat([slope_BTAD, self.behaviour_part(rows_BTD).unsqueeze(3)], 3)  # E = D + 1
        nodes_BEC = torch.cat([node_rows, torch.ones_like(node_rows[:, :, :1])], 2).transpose(1, 2)
        hidden_BTAC = self.slope(keys_BTAE.flatten(1, 2) @ nodes_BEC).view(-1, self.length, self.units, node_rows.shape[1])
        weight_BTC: Tensor = (self.out.weight @ hidden_BTAC).squeeze(2) + self.out.bias
        return weight_BTC
