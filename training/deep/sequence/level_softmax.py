"""The softmax over the nodes of every level, at every position of a batch of sequences.

    L = Σ_h d^{H−h} · mean_n ( log Z_h(n) − mean_p r_h(n, p) ),      Z_h(n) = Σ_{m of level h} e^{r_h(n, m)}
    r_h(n, m) = own_h(n, m) + γ · r_{h−1}(n, parent(m)),             own_h(n, m) = ⟨s_h ∘ z_n, row_m⟩ + b_m

p runs over the ancestors of the position's targets. It is the loss of `otm_robust`, which names its sources. Ranks are linear in z_n:
r_h(n, m) = ⟨z_n, e_m⟩ with e_m = s_h ∘ row_m + γ · e_parent(m). A level's ranks are then one matrix product, whatever γ is. Large levels
are estimated (columns.py). Inner levels may be trained at a share of the positions: these are many, and alike.

Legend: N positions, P targets of a position, M nodes of a level, S columns, D node row; the last entry of a row is a bias, that of z is 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...deep.sequence.blocked_softmax import mean_log_sum
from ...deep.sequence.columns import LevelColumns


def level_softmax_loss(
    state_ND: Tensor,
    rows: Sequence[Tensor],
    scale_LD: Tensor,
    levels: Sequence[LevelColumns],
    inner_N: Tensor,
    gamma: float,
    level_decay: float,
    shares: tuple[float, float] = (1.0, 1.0),
) -> Tensor:
    """The loss (a scalar).

    state_ND  float32 or bfloat16[N, D]: z, whose last entry is not read
    rows      float32[M, D] of each level: the rows of its nodes, or columns of them, the last of which is a bias
    scale_LD  float32[L, D − 1]: s, for each level from the root on
    levels    the columns of levels 1 … H, with the targets of every position
    inner_N   int64: the positions at which levels above the leaves are trained
    shares    the weight of the leaves' mean over these positions, and of the mean of each level above
    """
    state_ND = torch.cat([state_ND[:, :-1], torch.zeros_like(state_ND[:, -1:])], 1)
    ones_L1 = torch.ones_like(scale_LD[:, :1])
    scale_LD = torch.cat([scale_LD, ones_L1], 1)
    total = rows[0].new_zeros(())
    node_MD: Tensor | None = None
    for h, (level, row_MD) in enumerate(zip(levels, rows, strict=True), 1):
        above_MD, node_MD = node_MD, row_MD * scale_LD[h]
        if gamma and above_MD is not None:
            node_MD = node_MD + gamma * torch.nn.functional.embedding(level.parent_M, above_MD)
        positions, share = (None, shares[0]) if h == len(levels) else (inner_N, shares[1])
        total = total + share * level_decay ** (len(levels) - h) * _loss_of_level(state_ND, node_MD, level, positions)
    return total


def _loss_of_level(state_ND: Tensor, node_MD: Tensor, level: LevelColumns, positions: Tensor | None) -> Tensor:
    """mean_n (log Z − mean of the targets' ranks), over all positions or some; 0 without any."""
    target_NP, own_N = level.target_NP, level.own_N
    if positions is not None:
        state_ND, target_NP = state_ND[positions], target_NP[positions]
        own_N = None if own_N is None else own_N[positions]
    column_SD = node_MD if level.column_S is None else torch.nn.functional.embedding(level.column_S, node_MD)
    own_score_N = None if own_N is None else _scores(state_ND, node_MD[target_NP[:, 0]])
    target_score_N = own_score_N if own_score_N is not None and target_NP.shape[1] == 1 else _scores(state_ND, _means(node_MD, target_NP))
    return mean_log_sum(state_ND, column_SD, level.offset_S + column_SD[:, -1], own_score_N, own_N) - target_score_N.sum() / max(
        1, len(target_score_N)
    )


def _scores(state_ND: Tensor, node_ND: Tensor) -> Tensor:
    return (state_ND.float() * node_ND).sum(1) + node_ND[:, -1]


def _means(node_MD: Tensor, target_NP: Tensor) -> Tensor:
    """float32[N, D]: the mean row of each position's targets."""
    if target_NP.shape[1] == 1:
        return node_MD[target_NP[:, 0]]
    return torch.nn.functional.embedding_bag(target_NP, node_MD, mode="mean")
