"""OTM made robust (`otm-robust`): the softmax over whole levels, its sums estimated from the nodes that beam search visits.

    L(θ) = − Σ_h d^{H−h} Σ_{n ∈ S_h⁺} (1 / |S_h⁺|) · log( e^{r(n)} / Z_h ),   r(n) = g_θ(x, n) + γ · r(parent(n))
    Z_h  ≈ Σ_{n ∈ B̃_h ∪ S_h⁺} e^{r(n)} + Σ_{n ∈ R_h \\ (B̃_h ∪ S_h⁺)} e^{r(n)} / E[times n is drawn]

B̃_h are the candidates of a beam search with the current parameters (OTM Eq. 3), S_h⁺ the targets' ancestors (z_n = 1, Eq. 1) and R_h the
ancestors of random items. OTM's loss (Eq. 16) leaves nodes untrained that no training beam visits, so a wider serving beam ranks some
of them too high. Here every node of a level has its weight in expectation: the estimate of Z_h is unbiased (so w_n > 0 everywhere, as
Proposition 3 requires). Beam search finds the largest terms of the sum, which keeps the variance small. The beam only serves the estimate,
so the serving beam may differ from it. A softmax over the nodes of a level is the loss of TDR and DTR too (Liu et al. 2024, arXiv
2408.11345), which estimate it otherwise.

A small level is not estimated: when logits are inner products, it is scored whole, as one matrix product. In a catalogue of some ten
thousand items that is every level, and the loss is exact.

The loss trains the rank r, by which the search orders nodes, not the logit g: with γ > 0 a logit corrects the parent's rank. The targets of
an instance share a weight of 1, as they share its recall. Higher levels count less (d, `level_decay`): the search returns leaves, and the
beam tolerates errors on the levels above.

Legend: B instances, P positives, C candidates, K beam, R random items, b children.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from espalier.tree import Tree

from ...deep.beam import best_columns
from ...deep.objectives.levels import draw_items
from ...deep.scorers.heads import ProductHead
from ...deep.scorers.model import NodeScorer
from ...deep.topology import Topology
from ...specification.deep import RobustObjective

WHOLE = 170
"""Score a level whole if it has at most this multiple of the nodes that an instance would look up: then it costs no more on a CPU."""
NEVER = -1e30
"""The rank of entries that do not count; finite, because 0 · −inf is NaN."""


def otm_robust_loss(
    model: NodeScorer, topology: Topology, query: Tensor, target_BP: Tensor, config: RobustObjective, generator: torch.Generator
) -> Tensor:
    """The loss of a batch (a scalar): query as the model takes it, target_BP int64[B, P] item rows, −1 = padding."""
    tree = topology.tree
    batch = _Batch(model, topology, query, target_BP, config, generator)
    total = torch.zeros((), device=topology.device)
    beam_BK = torch.zeros((len(target_BP), 1), dtype=torch.int64, device=topology.device)
    rank_BK = torch.zeros((len(target_BP), 1), device=topology.device)
    level: _Level | None = None
    for h in range(1, tree.height + 1):
        if level is None or beam_BK.shape[1] == tree.level_size(h - 1):  # nothing was pruned yet: the candidates are the whole level
            level = batch.whole_level(h, rank_BK)
        else:
            level = batch.estimated_level(h, beam_BK, rank_BK, level)
        total = total - config.level_decay ** (tree.height - h) * batch.log_shares(h, level).sum()
        beam_BK, rank_BK = level.nodes_BC, level.rank_BC
        if batch.whole <= h < tree.height and beam_BK.shape[1] > config.beam_size:
            column_BK = best_columns(rank_BK.detach().masked_fill(level.ineligible_BC, -torch.inf), config.beam_size).sort(1).values
            beam_BK, rank_BK = beam_BK.gather(1, column_BK), rank_BK.gather(1, column_BK)
            beam_BK = torch.where(level.ineligible_BC.gather(1, column_BK), topology.padding, beam_BK)
    return total / len(target_BP)


@dataclass(frozen=True)
class _Level:
    """Ranks on one level: of the beam's candidates, of the targets' ancestors and of the random items' ancestors.

    counted_BX  the ranks whose exponentials add up to Z, NEVER for entries that do not count
    """

    nodes_BC: Tensor
    rank_BC: Tensor
    ineligible_BC: Tensor
    counted_BX: Tensor
    positive_rank_BP: Tensor
    random_rank_BR: Tensor


class _Batch:
    """A batch on its way down the tree: query states, and on each level the ancestors of targets and of random items."""

    def __init__(
        self, model: NodeScorer, topology: Topology, query: Tensor, target_BP: Tensor, config: RobustObjective, generator: torch.Generator
    ) -> None:
        self.model, self.topology, self.gamma = model, topology, config.gamma
        self.state_BLS = model.state(query, generator)
        self.positives = topology.positives(target_BP)
        random_items_BR = draw_items(topology, len(target_BP), config.random_nodes, generator)
        self.random_nodes = topology.paths(random_items_BR)
        self.drawn_per_item = config.random_nodes / topology.tree.item_count  # expected, per instance
        self.whole = last_whole_level(model, topology.tree, config)

    def whole_level(self, h: int, rank_BK: Tensor) -> _Level:
        """All nodes of a level; rank_BK: the ranks of all nodes of the level above."""
        topology, span = self.topology, self.topology.tree.level(h)
        nodes_BC = topology.level_nodes(h).expand(len(rank_BK), -1)
        by_product = h <= self.whole
        logits = self.model.logits_of_level(self.state_BLS, h, span) if by_product else self.model.logits(self.state_BLS, nodes_BC, h)
        rank_BC = logits.float() + self.gamma * topology.inherited(rank_BK, h)
        ineligible_BC = topology.ineligible_N[nodes_BC[:1]].expand(len(rank_BK), -1)
        positive_BP = self.positives[h]
        return _Level(
            nodes_BC,
            rank_BC,
            ineligible_BC,
            counted_BX=rank_BC.masked_fill(ineligible_BC, NEVER),
            positive_rank_BP=rank_BC.gather(1, torch.where(positive_BP != topology.padding, positive_BP - span.start, 0)),
            random_rank_BR=rank_BC.gather(1, self.random_nodes[h] - span.start),
        )

    def estimated_level(self, h: int, beam_BK: Tensor, rank_BK: Tensor, above: _Level) -> _Level:
        """Three blocks of nodes: the beam's children, the targets' ancestors and the random items' ancestors."""
        topology, positive_BP, random_BR = self.topology, self.positives[h], self.random_nodes[h]
        children_BKb = topology.children(beam_BK, h - 1)
        nodes_BC = children_BKb.flatten(1)
        parent_BP = topology.find(self.positives[h - 1], topology.parent_N1[positive_BP]).position_BC
        parent_rank = [
            rank_BK.repeat_interleave(children_BKb.shape[2], 1), above.positive_rank_BP.gather(1, parent_BP), above.random_rank_BR
        ]  # fmt: skip
        blocks = torch.cat([nodes_BC, positive_BP, random_BR], 1)
        logits = self.model.logits(self.state_BLS, blocks.clamp(max=topology.padding - 1), h).float()
        widths = [nodes_BC.shape[1], positive_BP.shape[1], random_BR.shape[1]]
        rank_BC, positive_rank_BP, random_rank_BR = (logits + self.gamma * torch.cat(parent_rank, 1)).split_with_sizes(widths, 1)
        ineligible_BC = (nodes_BC == topology.padding) | topology.ineligible_N[nodes_BC.clamp(max=topology.padding - 1)]
        in_beam_BR = topology.find(beam_BK.sort(1).values, topology.parent_N1[random_BR]).is_match_BC
        already_counted_BR = in_beam_BR | topology.find(positive_BP, random_BR).is_match_BC | topology.ineligible_N[random_BR]
        counted = [  # every node once: a target in its own block
            rank_BC.masked_fill(ineligible_BC | topology.find(positive_BP, nodes_BC).is_match_BC, NEVER),
            positive_rank_BP.masked_fill(positive_BP == topology.padding, NEVER),
            (random_rank_BR - (topology.items_below_N[random_BR] * self.drawn_per_item).log()).masked_fill(already_counted_BR, NEVER),
        ]
        return _Level(nodes_BC, rank_BC, ineligible_BC, torch.cat(counted, 1), positive_rank_BP, random_rank_BR)

    def log_shares(self, h: int, level: _Level) -> Tensor:
        """[B, P]: log(e^r / Z) of the targets' ancestors, weighted equally within an instance; 0 at padding."""
        is_target_BP = self.positives[h] != self.topology.padding
        weight_BP = is_target_BP / is_target_BP.sum(1, keepdim=True).clamp(min=1)
        return weight_BP * (level.positive_rank_BP - torch.logsumexp(level.counted_BX, 1, keepdim=True))


def last_whole_level(model: NodeScorer, tree: Tree, config: RobustObjective) -> int:
    """The lowest level that is scored whole, as are all above it; 0 for heads other than inner products."""
    if not isinstance(model.head, ProductHead):
        return 0
    for h in range(1, tree.height + 1):
        if tree.level_size(h) > WHOLE * (config.beam_size * tree.max_children[h - 1] + config.random_nodes):
            return h - 1
    return tree.height
