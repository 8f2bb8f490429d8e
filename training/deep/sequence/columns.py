"""The columns of the softmax on each level: whole levels, and on larger levels the ancestors of leaves that a batch draws as negatives.

Knows trees and chances of items. Does not know models. Small levels are whole. The negatives of the others are one draw of leaves,
with replacement, and their ancestors. A node comes up as often as the leaves below it do, so with

    offset_n = log (times n comes up / (draws · q(n)))        q(n) the sum of the chances of the leaves below

the sum of e^{score + offset} over the columns is an unbiased estimate of the sum over the level (the log-q correction).

Legend: N positions, P targets of a position, S columns, M nodes, U distinct targets, I items.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...deep.jtm import sum_below
from ...deep.sequence.blocked_softmax import positions_in
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

    def __init__(self, topology: Topology, share_I: NDArray[np.float64], draws: int, whole: int) -> None:
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
        negatives, targets = [self._draw(generator)], [(targets_U, index_NP)]
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

    def _draw(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Distinct leaves, ascending, and how often each was drawn."""
        point = torch.rand(self.draws, generator=generator, dtype=torch.float64, device=self.topology.device) * self.upper_n[-1]
        leaf = torch.searchsorted(self.upper_n, point, right=True).clamp(max=len(self.upper_n) - 1)
        nodes_S, count_S = torch.unique(leaf + self.topology.tree.leaf_offset, return_counts=True)
        return nodes_S, count_S

    def _parents(self, nodes_S: Tensor, count_S: Tensor) -> tuple[Tensor, Tensor]:
        """The parents, and how often each came up."""
        parents_S, inverse = torch.unique(self.topology.parent_N1[nodes_S], return_inverse=True)
        return parents_S, torch.zeros_like(parents_S).index_add_(0, inverse, count_S)
