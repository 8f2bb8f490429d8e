"""PLT: each node conditional on its parent; only the children of positive nodes are trained (Jasinska et al. 2016; OTM §3.2.1).

S_h = {n : z_parent(n) = 1}, p(z_n | x) = the product of sigmoids along the path, by which the search ranks, too. With one target
an instance it is HSM.

Legend: B instances, P positives, C candidates.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...deep.objectives.levels import level_loss
from ...deep.scorers.model import NodeScorer
from ...deep.topology import Topology
from ...specification.deep import PathObjective


def plt_loss(
    model: NodeScorer, topology: Topology, query: Tensor, target_BP: Tensor, config: PathObjective, generator: torch.Generator
) -> Tensor:
    """The loss of a batch (a scalar): query as the model takes it, target_BP int64[B, P] item rows, −1 = padding."""
    positives = topology.positives(target_BP)
    state_BLS = model.state(query, generator)
    total = state_BLS.new_zeros(())
    for h in range(1, topology.tree.height + 1):
        nodes_BC = topology.children(positives[h - 1], h - 1).flatten(1)
        hit_BC = topology.find(positives[h], nodes_BC).is_match_BC
        logits_BC = model.logits(state_BLS, nodes_BC.clamp(max=topology.padding - 1), h)
        total = total + level_loss(logits_BC, hit_BC.float(), nodes_BC != topology.padding)
    return total / len(target_BP)


def hsm_loss(
    model: NodeScorer, topology: Topology, query: Tensor, target_BP: Tensor, config: PathObjective, generator: torch.Generator
) -> Tensor:
    """PLT's with one target an instance, the first: the hierarchical softmax of OTM's tables (their |I_x| = 1); arguments as there."""
    return plt_loss(model, topology, query, target_BP[:, :1], config, generator)
