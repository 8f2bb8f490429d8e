"""TDM: every node an independent classifier, with the targets' ancestors as positives and random negatives on each level.

S_h = S_h⁺ ∪ S_h⁻ with z_n = 1 where a target lies below (TDM Eq. 3–4; OTM Eq. 1–2). With one target an instance it is TDM as
published; with several, the ancestors of all of them are positives and the negatives are shared. Negatives are drawn without replacement,
S_h⁻ being a set; of the nodes drawn, those that are positive do not count.

Legend: B instances, P positives, C candidates.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...deep.objectives.levels import draw_nodes, level_loss
from ...deep.scorers.model import NodeScorer
from ...deep.topology import Topology
from ...specification.deep import TdmObjective

MIN_NEGATIVES = 8


def tdm_loss(
    model: NodeScorer, topology: Topology, query: Tensor, target_BP: Tensor, config: TdmObjective, generator: torch.Generator
) -> Tensor:
    """The loss of a batch (a scalar): query as the model takes it, target_BP int64[B, P] item rows, −1 = padding."""
    height, batch = topology.tree.height, len(target_BP)
    positives = topology.positives(target_BP)
    state_BLS = model.state(query, generator)
    total = state_BLS.new_zeros(())
    for h in range(1, height + 1):
        negatives = max(MIN_NEGATIVES, round(config.negatives * config.negative_decay ** (height - h)))  # most at the leaves
        drawn_BC = draw_nodes(topology, h, batch, negatives, generator)
        hit_BC = topology.find(positives[h], drawn_BC).is_match_BC
        if drawn_BC.shape[1] == topology.tree.level_size(h):  # the whole level: its positives are among it
            nodes_BC, label_BC, counted_BC = drawn_BC, hit_BC.float(), torch.ones_like(hit_BC)
        else:
            nodes_BC = torch.cat([positives[h], drawn_BC], 1)
            present_BP = positives[h] != topology.padding
            label_BC = torch.cat([present_BP, torch.zeros_like(hit_BC)], 1).float()
            counted_BC = torch.cat([present_BP, ~hit_BC], 1)
        logits_BC = model.logits(state_BLS, nodes_BC.clamp(max=topology.padding - 1), h)
        total = total + level_loss(logits_BC, label_BC, counted_BC)
    return total / batch
