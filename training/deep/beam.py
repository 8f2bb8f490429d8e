"""Beam search in torch, batched over queries, for validation where the compiled engine cannot search (`validation.py`): on a GPU, with
attention, where processes share the rows.

It has the engines' ranking (rank(n) = own(n) + γ · rank(parent), rank(root) = 0), keys with a memory, tie rule and exclusions. So options
that are chosen with it are right for the engines.

Legend: B queries, L levels, S state, C candidates, K beam, M results, E excluded items, X nodes of a query's list.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, pad

from espalier.masks.eligibility import NO_NODE, ExcludedNodes
from espalier.memory_lists import MemoryLists

from ..deep.scorers.model import NodeScorer
from ..deep.topology import Topology

OwnScore = Literal["logit", "log_activation"]


def keep_best(topology: Topology, nodes_BC: Tensor, rank_BC: Tensor, beam_size: int, key_BC: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The best `beam_size` candidates in ascending node order (int64[B, K]) and their ranks; padding stays padding.

    key_BC  keys to choose by; None: the ranks
    """
    if rank_BC.shape[1] <= beam_size:
        return nodes_BC, rank_BC
    column_BK = best_columns(rank_BC if key_BC is None else key_BC, beam_size).sort(1).values
    beam_BK, kept_rank_BK = nodes_BC.gather(1, column_BK), rank_BC.gather(1, column_BK)
    return torch.where(kept_rank_BK == -torch.inf, topology.padding, beam_BK), kept_rank_BK


@torch.no_grad()
def search_states(
    model: NodeScorer,
    topology: Topology,
    state_BLS: Tensor,
    beam_size: int,
    m: int,
    gamma: float,
    own_score: OwnScore = "logit",
    excluded_BX: Tensor | None = None,
    memory_scores: MemoryScores | None = None,
) -> tuple[Tensor, Tensor]:
    """int64[B, M] item rows, best first, −1 = none, and float32[B, M] their keys (−inf where none); without a memory these are ranks.

    excluded_BX  int64[B, X]: `sorted_excluded_nodes`, of items that must not be returned; an inner node with only such items
                 is in no beam, as in the engines
    memory_scores  λ · mem of nodes; None: no memory
    """
    batch = len(state_BLS)
    beam_BK = torch.zeros((batch, 1), dtype=torch.int64, device=topology.device)
    rank_BK = torch.zeros((batch, 1), device=topology.device)
    for h in range(1, topology.tree.height + 1):
        children_BKb = topology.children(beam_BK, h - 1)
        nodes_BC = children_BKb.flatten(1)
        safe_BC = nodes_BC.clamp(max=topology.padding - 1)
        logits_BC = model.logits(state_BLS, safe_BC, h).float()
        own_BC = logsigmoid(logits_BC) if own_score == "log_activation" else logits_BC
        inherited_BC = gamma * rank_BK.repeat_interleave(children_BKb.shape[2], 1) if gamma else 0
        ineligible_BC = (nodes_BC == topology.padding) | topology.ineligible_N[safe_BC]
        if excluded_BX is not None:
            ineligible_BC |= topology.find(excluded_BX, nodes_BC).is_match_BC
        rank_BC = (own_BC + inherited_BC).masked_fill(ineligible_BC, -torch.inf)
        key_BC = rank_BC if memory_scores is None else rank_BC + memory_scores.of_candidates(topology, nodes_BC)
        if h < topology.tree.height:
            beam_BK, rank_BK = keep_best(topology, nodes_BC, rank_BC, beam_size, key_BC)
    best_BM = best_columns(key_BC, m)
    leaf_BM = nodes_BC.gather(1, best_BM).clamp(max=topology.padding - 1) - topology.tree.leaf_offset
    key_BM, missing = key_BC.gather(1, best_BM), (0, m - best_BM.shape[1])
    rows_BM = torch.where(key_BM > -torch.inf, topology.leaf_item[leaf_BM], -1)
    return pad(rows_BM, missing, value=-1), pad(key_BM, missing, value=-torch.inf)


@dataclass(frozen=True)
class MemoryScores:
    """λ · mem of the nodes that have memory. It counts where beams are cut and leaves ordered, and is not inherited.

    position_X  int64[X], ascending: b · (N + 1) + node, for query b
    values_X  float32[X]
    """

    position_X: Tensor
    values_X: Tensor

    @classmethod
    def of(cls, lists: MemoryLists, weight: float, topology: Topology) -> MemoryScores:
        """weight · mem of some queries' nodes."""
        query_X = np.repeat(np.arange(len(lists.offset_B) - 1), np.diff(lists.offset_B))
        position_X = torch.from_numpy(query_X * (topology.padding + 1) + lists.nodes)
        return cls(position_X.to(topology.device), torch.from_numpy(lists.values * np.float32(weight)).to(topology.device))

    def of_candidates(self, topology: Topology, nodes_BC: Tensor) -> Tensor:
        """float32[B, C]: λ · mem of each candidate."""
        if not len(self.position_X):
            return torch.zeros_like(nodes_BC, dtype=torch.float32)
        query_B1 = torch.arange(len(nodes_BC), device=nodes_BC.device).unsqueeze(1)
        position_BC = query_B1 * (topology.padding + 1) + nodes_BC
        index_BC = torch.searchsorted(self.position_X, position_BC).clamp(max=len(self.position_X) - 1)
        return torch.where(self.position_X[index_BC] == position_BC, self.values_X[index_BC], 0.0)


def sorted_excluded_nodes(topology: Topology, excluded: ExcludedNodes) -> Tensor:
    """int64[B, X]: the leaves of excluded items, and the inner nodes with no other items below, ascending, N as padding."""
    excluded_BX = torch.from_numpy(np.concatenate([excluded.inner_BX, excluded.leaves_BX], axis=1)).to(topology.device)
    return torch.where(excluded_BX == NO_NODE, topology.padding, excluded_BX).sort(1).values


def best_columns(rank_BC: Tensor, count: int) -> Tensor:
    """int64[B, ≤ count]: columns by falling rank, the lower one first at a tie (topk has no such rule)."""
    return rank_BC.sort(dim=1, descending=True, stable=True).indices[:, :count]
