"""The softmax over the nodes of every level, at every position of a batch of sequences, and its columns.

    L = Σ_h d^{H−h} · mean_n ( log Z_h(n) − mean_p r_h(n, p) ),      Z_h(n) = Σ_{m of level h} e^{r_h(n, m)}
    r_h(n, m) = own_h(n, m) + γ · r_{h−1}(n, parent(m)),             own_h(n, m) = ⟨s_h ∘ z_n, row_m⟩ + b_m

p runs over the ancestors of the position's targets. It is the loss of `otm_robust`, which names its sources. Ranks are linear in z_n:
r_h(n, m) = ⟨z_n, e_m⟩ with e_m = s_h ∘ row_m + γ · e_parent(m). A level's ranks are then one matrix product, whatever γ is. Inner levels
may be trained at a share of the positions: these are many, and alike.

Small levels are whole. The sums over larger ones are estimated from negatives: one draw of leaves, with replacement, and their ancestors. A
node comes up as often as the leaves below it do, so with

    offset_n = log (times n comes up / (draws · q(n)))        q(n) the sum of the chances of the leaves below

the sum of e^{score + offset} over the columns is an unbiased estimate of Z_h (the log-q correction).

Legend: N positions, P targets of a position, M nodes of a level, S columns, U distinct targets, I items, D node row; the last entry of a
row is a bias, that of z is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from espalier.arrays import Float64

from ...deep.jtm import sum_below
from ...deep.sequence.blocked_softmax import mean_log_sum, positions_in
from ...deep.topology import Topology


@dataclass(frozen=True)
class LevelColumns:
    """The columns and targets of a batch on one level.

    nodes_M    int64[M] ascending node numbers: all of the level, or columns and targets
    parent_M   int64[M]: indices of their parents among the nodes of the level above
    target_NP  int64[N, P]: indices of the targets' ancestors among the nodes
    column_S   int64[S]: indices of the columns among the nodes; None: all of them, and Z is the sum over the level
    offset_S   float32[S]: added to the columns' scores; −inf for a node without eligible items
    own_N      int64[N]: for an estimate, the index of the first target's ancestor among the columns, −1 = not among them
    """

    nodes_M: Tensor
    parent_M: Tensor
    target_NP: Tensor
    column_S: Tensor | None
    offset_S: Tensor
    own_N: Tensor | None


class ColumnSource:
    """Draws the columns of batches, without items that are ineligible in the topology.

    share_I  float64[I]: the chances of the items in a draw, up to a factor; positive
    draws    leaves that a batch draws
    whole    a level with at most so many nodes is not estimated
    """

    def __init__(self, topology: Topology, share_I: Float64, draws: int, whole: int) -> None:
        tree = topology.tree
        share_n = np.zeros(tree.leaf_count)
        share_n[tree.leaf_of_item - tree.leaf_offset] = share_I
        share_n[topology.ineligible_N[tree.leaf_offset :].cpu().numpy()] = 0
        share_n /= share_n.sum()
        self.topology, self.draws, self.whole = topology, draws, whole
        self.share_N = torch.from_numpy(sum_below(tree, share_n, tree.height)).to(topology.device)
        self.upper_n = self.share_N[tree.leaf_offset :].cumsum(0)

    def levels(self, target_NP: Tensor, generator: torch.Generator) -> list[LevelColumns]:
        """The columns of the levels 1 … H, for targets int64[N, P] (item rows)."""
        topology, tree = self.topology, self.topology.tree
        targets_U, index_NP = torch.unique(topology.leaf_of_item_I1[target_NP], return_inverse=True)
        leaf_S, count_S = draw_counts(self.upper_n, self.draws, generator)
        negatives, targets = [(leaf_S + tree.leaf_offset, count_S)], [(targets_U, index_NP)]
        for _ in range(tree.height - 1):
            negatives.append(self._parents(*negatives[-1]))
            targets_U, parent_U = torch.unique(topology.parent_N1[targets_U], return_inverse=True)
            index_NP = parent_U[index_NP]
            targets.append((targets_U, index_NP))
        levels: list[LevelColumns] = []
        nodes_M = torch.zeros(1, dtype=torch.int64, device=topology.device)  # the root
        for h, (negative_S, count_S), (targets_U, index_NP) in zip(range(1, tree.height + 1), negatives[::-1], targets[::-1], strict=True):
            upper_nodes_M = nodes_M
            if tree.level_size(h) <= self.whole:
                nodes_M = topology.level_nodes(h)
                column_S = own_N = None
                offset_S = torch.zeros(len(nodes_M), device=topology.device).masked_fill(topology.ineligible_N[nodes_M], -torch.inf)
            else:
                nodes_M = torch.unique(torch.cat([negative_S, targets_U]))
                column_S = torch.searchsorted(nodes_M, negative_S)
                offset_S = (count_S / (self.draws * self.share_N[negative_S])).log().float()
                own_N = positions_in(targets_U, negative_S)[index_NP[:, 0]]
            parent_M = torch.searchsorted(upper_nodes_M, topology.parent_N1[nodes_M])
            levels.append(LevelColumns(nodes_M, parent_M, torch.searchsorted(nodes_M, targets_U)[index_NP], column_S, offset_S, own_N))
        return levels

    def _parents(self, nodes_S: Tensor, count_S: Tensor) -> tuple[Tensor, Tensor]:
        """The parents, and how often each came up."""
        parents_S, inverse = torch.unique(self.topology.parent_N1[nodes_S], return_inverse=True)
        return parents_S, torch.zeros_like(parents_S).index_add_(0, inverse, count_S)


def draw_counts(upper_I: Tensor, draws: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draws with replacement by the running sums of chances: int64[S] twice, distinct indices, ascending, and how often each came up."""
    point = torch.rand(draws, generator=generator, dtype=torch.float64, device=upper_I.device) * upper_I[-1]
    drawn = torch.searchsorted(upper_I, point, right=True).clamp(max=len(upper_I) - 1)
    drawn_S, count_S = torch.unique(drawn, return_counts=True)
    return drawn_S, count_S


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
