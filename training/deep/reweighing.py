"""Reorders leaves that searches found by other rankings: estimates what other values of γ, memory and λ would find, without a search each.

    rank(leaf) = Σ_h γ^(H − h) · own(ancestor on level h),   key(leaf) = rank(leaf) + λ · mem(leaf)

The own scores of a leaf's path are computed once; then a ranking costs a product and a sort. The result is that of a search whose beams
keep all these leaves. The leaves come from the searches that were added.

Knows leaves, their paths and keys. Does not choose options.

Legend: B queries, C candidate leaves, H levels without the root, M results, X nodes of a query's list.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from espalier.arrays import Float32, Int64
from espalier.memory_lists import MemoryLists
from espalier.search import padded

from ..deep.searches import Searches
from ..deep.topology import Topology

NO_LEAF = -1


class CandidateLeaves:
    """The candidate leaves of some searches' queries, each once.

    leaf_BC   int64[B, C]: NO_LEAF as padding
    own_BCH   float32[B, C, H]: own scores along the path to each, the root's child first
    """

    def __init__(self, searches: Searches) -> None:
        self._searches, self._topology = searches, searches.topology
        self.leaf_BC = np.empty((len(searches.pairs), 0), np.int64)
        self.own_BCH = np.empty((len(searches.pairs), 0, self._topology.tree.height), np.float32)

    def add(self, rows_BM: Int64) -> None:
        """Add the leaves of item rows (−1: none) that are not candidates yet."""
        tree = self._topology.tree
        leaf_BM = np.where(rows_BM >= 0, tree.leaf_of_item[rows_BM], NO_LEAF)
        for leaf_M, candidate_C in zip(leaf_BM, self.leaf_BC, strict=True):
            leaf_M[np.isin(leaf_M, candidate_C)] = NO_LEAF
        self.leaf_BC = np.concatenate([self.leaf_BC, leaf_BM], 1)
        self.own_BCH = np.concatenate([self.own_BCH, self._own_scores(leaf_BM)], 1)

    @torch.no_grad()
    def _own_scores(self, leaf_BM: Int64) -> Float32:
        tree, begin = self._topology.tree, 0
        own_BMH = np.empty((*leaf_BM.shape, tree.height), np.float32)
        for block in self._searches.blocks:
            end = begin + len(block.rows)
            node_BM = np.maximum(leaf_BM[begin:end], tree.leaf_offset)
            for level in range(tree.height, 0, -1):
                logits_BM = self._searches.model.logits(block.state_BLS, torch.from_numpy(node_BM).to(self._topology.device), level).float()
                own_BM = torch.nn.functional.logsigmoid(logits_BM) if self._searches.own_score == "log_activation" else logits_BM
                own_BMH[begin:end, :, level - 1] = own_BM.cpu().numpy()
                node_BM = tree.parent[node_BM]
            begin = end
        return own_BMH

    def memory(self, lists: Iterable[MemoryLists]) -> Float32:
        """float32[B, C]: mem of the candidates, by the lists of each block of queries."""
        mem_BC = np.zeros(self.leaf_BC.shape, np.float32)
        lists_of_queries = (block.of(b) for block in lists for b in range(len(block.offset_B) - 1))
        for mem_C, leaf_C, (node_X, value_X) in zip(mem_BC, self.leaf_BC, lists_of_queries, strict=True):
            position_C = np.minimum(np.searchsorted(node_X, leaf_C), max(0, len(node_X) - 1))  # nodes ascend
            if len(node_X):
                mem_C[:] = np.where(node_X[position_C] == leaf_C, value_X[position_C], 0)
        return mem_BC

    def keys(self, gamma: float, memory_BC: Float32) -> Float32:
        """float32[B, C]: the keys of the candidates, −inf for padding. `memory_BC` is λ · mem."""
        weight_H = np.power(gamma, np.arange(self._topology.tree.height - 1, -1, -1), dtype=np.float32)
        return np.where(self.leaf_BC >= 0, self.own_BCH @ weight_H + memory_BC, np.float32(-np.inf))

    def best(self, key_BC: Float32, m: int) -> Int64:
        """int64[B, M]: the item rows with the largest keys, best first, −1 if fewer are above −inf."""
        tree = self._topology.tree
        column_BM = np.argsort(-key_BC, axis=1, kind="stable")[:, :m]
        leaf_BM = np.take_along_axis(self.leaf_BC, column_BM, 1)
        is_item_BM = np.take_along_axis(key_BC, column_BM, 1) > -np.inf
        rows_BM = np.where(is_item_BM, tree.leaf_item[np.maximum(leaf_BM - tree.leaf_offset, 0)], -1)
        return np.pad(rows_BM, ((0, 0), (0, m - rows_BM.shape[1])), constant_values=-1)


def most_remembered(lists: Iterable[MemoryLists], topology: Topology, m: int) -> Int64:
    """int64[B, ≤ M]: the item rows with the largest mem of each query, best first, −1 if fewer have any."""
    tree, rows = topology.tree, []
    for block in lists:
        for b in range(len(block.offset_B) - 1):
            node_X, value_X = block.of(b)
            begin = np.searchsorted(node_X, tree.leaf_offset)
            columns = np.argsort(-value_X[begin:], kind="stable")[:m] + begin
            rows.append(tree.leaf_item[node_X[columns] - tree.leaf_offset])
    return padded(rows)
