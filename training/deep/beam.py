"""Beam search in torch, batched over queries: what training uses to follow the search and to choose γ.

Serving uses the engines. This search has the same ranking (rank(n) = own(n) + γ · rank(parent), rank(root) = 0), tie rule and exclusions,
so a γ and a calibration chosen with it are right for them.

Legend: B queries, C candidates, K beam, M results, E excluded items, X excluded nodes.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from espalier.masks.eligibility import NO_NODE, excluded_nodes
from training.deep.scorers.model import NodeScorer
from training.deep.topology import Topology


def keep_best(topology: Topology, nodes_BC: Tensor, rank_BC: Tensor, beam_size: int) -> tuple[Tensor, Tensor]:
    """The best `beam_size` candidates in ascending node order (int64[B, K]) and their ranks; padding stays padding."""
    if rank_BC.shape[1] <= beam_size:
        return nodes_BC, rank_BC
    place_BK = best_places(rank_BC, beam_size).sort(1).values
    beam_BK, kept_BK = nodes_BC.gather(1, place_BK), rank_BC.gather(1, place_BK)
    return torch.where(kept_BK == -torch.inf, topology.padding, beam_BK), kept_BK


@torch.no_grad()
def search(
    model: NodeScorer,
    topology: Topology,
    query: Tensor,
    beam_size: int,
    m: int,
    gamma: float,
    own: Literal["logit", "log_activation"] = "logit",
    exclude_BE: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """int64[B, M] item rows, best first, −1 = none, and float32[B, M] their ranks (−inf where none).

    exclude_BE  int64[B, E] item rows that must not come back (−1 = padding); inner nodes all of whose items they are take no place in a
                beam, as in the engines.
    """
    excluded_BX = None if exclude_BE is None else sorted_excluded_nodes(topology, exclude_BE)
    state_BLS = model.state(query)
    batch = len(state_BLS)
    beam_BK = torch.zeros((batch, 1), dtype=torch.int64, device=topology.device)
    rank_BK = torch.zeros((batch, 1), device=topology.device)
    for h in range(1, topology.tree.height + 1):
        children_BKb = topology.children(beam_BK, h - 1)
        nodes_BC = children_BKb.flatten(1)
        safe_BC = nodes_BC.clamp(max=topology.padding - 1)
        logits_BC = model.logits(state_BLS, safe_BC, h).float()
        own_BC = torch.nn.functional.logsigmoid(logits_BC) if own == "log_activation" else logits_BC
        inherited_BC = gamma * rank_BK.repeat_interleave(children_BKb.shape[2], 1) if gamma else 0
        ineligible_BC = (nodes_BC == topology.padding) | topology.ineligible_N[safe_BC]
        if excluded_BX is not None:
            ineligible_BC |= topology.find(excluded_BX, nodes_BC)[1]
        rank_BC = (own_BC + inherited_BC).masked_fill(ineligible_BC, -torch.inf)
        if h < topology.tree.height:
            beam_BK, rank_BK = keep_best(topology, nodes_BC, rank_BC, beam_size)
    best_BM = best_places(rank_BC, m)
    leaf_BM = nodes_BC.gather(1, best_BM).clamp(max=topology.padding - 1) - topology.tree.leaf_offset
    rank_BM = rank_BC.gather(1, best_BM)
    return torch.where(rank_BM > -torch.inf, topology.leaf_item[leaf_BM], -1), rank_BM


def sorted_excluded_nodes(topology: Topology, exclude_BE: Tensor) -> Tensor:
    """int64[B, X]: the leaves of excluded items, and the inner nodes below which nothing else is, ascending, N as padding."""
    excluded = excluded_nodes(topology.tree, exclude_BE.cpu().numpy())
    excluded_BX = torch.from_numpy(np.concatenate([excluded.inner_BX, excluded.leaves_BX], axis=1)).to(topology.device)
    return torch.where(excluded_BX == NO_NODE, topology.padding, excluded_BX).sort(1).values


def best_places(rank_BC: Tensor, count: int) -> Tensor:
    """int64[B, ≤ count]: columns by falling rank, the lower one first at a tie (topk has no such rule)."""
    return rank_BC.sort(dim=1, descending=True, stable=True).indices[:, :count]
