"""OTM: the nodes that beam search visits, labelled by the target that beam search should reach through them (Zhuo et al. 2020, Alg. 1).

    L_{θt}(θ) = Σ_h Σ_{n ∈ B̃_h(x; θt)} BCE(ẑ_n(x; θt), g_θ(x, n))                                        (Eq. 16)
    ẑ_n = ẑ_{n'}, n' = argmax_{n' ∈ C(n)} p_{θt}(z_{n'} = 1 | x);  ẑ = y at the leaves                      (Eq. 15)

B̃_h are the candidates of a beam search with the current parameters θt (Eq. 3); labels and beams carry no gradient. Above the first
level with more nodes than the beam nothing is pruned, so those levels are trained whole. ẑ needs no walk below unvisited nodes: it is 0
wherever no target lies below, so only the targets' ancestors and their siblings are scored, bottom-up.

Options: a discount γ in the beam's ranks; Proposition 3's w_n > 0 everywhere, by random nodes added on each level.
The paper's ablations: `otm-no-optest` takes z_n of Eq. 1 as labels, `otm-no-bs` takes 2k random nodes of each level instead of the
beam's candidates; targets are not forced among them, as in the authors' code.

Legend: B instances, P positives, C candidates, K beam.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ...deep.beam import keep_best
from ...deep.objectives.levels import draw_nodes, level_loss
from ...deep.scorers.model import NodeScorer
from ...deep.topology import Topology
from ...specification.deep import OtmObjective, SampledObjective


def otm_loss(
    model: NodeScorer,
    topology: Topology,
    query: Tensor,
    target_BP: Tensor,
    config: OtmObjective,
    generator: torch.Generator,
    optimal_test: bool = True,
) -> Tensor:
    """The loss of a batch (a scalar): query as the model takes it, target_BP int64[B, P] item rows, −1 = padding.

    optimal_test  whether labels are ẑ; else they are z
    """
    tree, batch = topology.tree, len(target_BP)
    state_BLS = model.state(query, generator)
    positives = topology.positives(target_BP)
    if optimal_test:
        labels = pseudo_targets(model, topology, state_BLS.detach(), positives)
    else:
        labels = [(level != topology.padding).float() for level in positives]
    total = state_BLS.new_zeros(())
    beam_BK = torch.zeros((batch, 1), dtype=torch.int64, device=topology.device)
    rank_BK = torch.zeros((batch, 1), device=topology.device)
    is_pruned = False
    for h in range(1, tree.height + 1):
        children_BKb = topology.children(beam_BK, h - 1)
        nodes_BC = children_BKb.flatten(1)
        eligible_BC = (nodes_BC != topology.padding) & ~topology.ineligible_N[nodes_BC.clamp(max=topology.padding - 1)]
        # Until something is pruned the candidates are the whole level.
        extra_BC = draw_nodes(topology, h, batch, config.random_nodes, generator) if is_pruned and config.random_nodes else nodes_BC[:, :0]
        all_BC = torch.cat([nodes_BC, extra_BC], 1)
        logits_BC = model.logits(state_BLS, all_BC.clamp(max=topology.padding - 1), h)
        position_BC, hit_BC = topology.find(positives[h], all_BC)
        label_BC = labels[h].gather(1, position_BC) * hit_BC
        counted_BC = torch.cat([eligible_BC, ~topology.ineligible_N[extra_BC.clamp(max=topology.padding - 1)]], 1)
        total = total + level_loss(logits_BC, label_BC, counted_BC)
        if h < tree.height:
            is_pruned = is_pruned or nodes_BC.shape[1] > config.beam_size
            own_BC = logits_BC.detach()[:, : nodes_BC.shape[1]].float()
            rank_BC = own_BC + config.gamma * rank_BK.repeat_interleave(children_BKb.shape[2], 1)
            beam_BK, rank_BK = keep_best(topology, nodes_BC, rank_BC.masked_fill(~eligible_BC, -torch.inf), config.beam_size)
    return total / batch


otm_no_optest_loss = partial(otm_loss, optimal_test=False)
"""OTM (−OptEst): with z_n of Eq. 1 as labels."""


def otm_no_bs_loss(
    model: NodeScorer, topology: Topology, query: Tensor, target_BP: Tensor, config: SampledObjective, generator: torch.Generator
) -> Tensor:
    """OTM (−BS): ẑ on 2k random nodes of each level, or on the whole of it; arguments and result as of `otm_loss`."""
    state_BLS = model.state(query, generator)
    positives = topology.positives(target_BP)
    labels = pseudo_targets(model, topology, state_BLS.detach(), positives)
    total = state_BLS.new_zeros(())
    for h in range(1, topology.tree.height + 1):
        nodes_BC = draw_nodes(topology, h, len(target_BP), 2 * config.beam_size, generator)
        position_BC, hit_BC = topology.find(positives[h], nodes_BC)
        logits_BC = model.logits(state_BLS, nodes_BC, h)
        total = total + level_loss(logits_BC, labels[h].gather(1, position_BC) * hit_BC, ~topology.ineligible_N[nodes_BC])
    return total / len(target_BP)


@torch.no_grad()
def pseudo_targets(model: NodeScorer, topology: Topology, state_BLS: Tensor, positives: list[Tensor]) -> list[Tensor]:
    """ẑ of the positives on each level: for each entry of `positives` a float32[B, P_h] of 0 and 1 (0 at padding). Eq. 15.

    A node takes the label of its best child; where a child with label 1 ties for the best, the label is 1. Costs a scorer call for
    every child of a positive node: at most b · |I_x| a level.
    """
    tree = topology.tree
    labels = [(positives[tree.height] != topology.padding).float()]
    for h in range(tree.height - 1, -1, -1):
        children_BPb = topology.children(positives[h], h)
        flat_BC = children_BPb.flatten(1)
        logits_BC = model.logits(state_BLS, flat_BC.clamp(max=topology.padding - 1), h + 1).float()
        # A leaf without an item has η = 0, so it is never the best; the same for subtrees of such leaves.
        ineligible_BC = (flat_BC == topology.padding) | topology.ineligible_N[flat_BC.clamp(max=topology.padding - 1)]
        logits_BPb = logits_BC.masked_fill(ineligible_BC, -torch.inf).view(children_BPb.shape)
        position_BC, hit_BC = topology.find(positives[h + 1], flat_BC)
        label_BPb = (labels[-1].gather(1, position_BC) * hit_BC).view(children_BPb.shape)
        best_BPb = logits_BPb >= logits_BPb.amax(-1, keepdim=True)
        labels.append((best_BPb * label_BPb).amax(-1))
    return labels[::-1]
