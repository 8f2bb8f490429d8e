"""The tree as torch tensors, with the batched walks that training needs. No Python loop over queries or nodes.

Legend: B queries, T history, P positives of a query, C candidates, K beam, N nodes, I items, L levels = H + 1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from espalier.arrays import Array, Bool
from espalier.masks.eligibility import node_mask
from espalier.tree import Tree


class Matches(NamedTuple):
    """position_BC: int64[B, C], where each node is or would be in its list (clamped); is_match_BC: bool[B, C], whether it is there."""

    position_BC: Tensor
    is_match_BC: Tensor


class Topology:
    """A tree on a device. Node numbers are int64; N marks padding in lists of nodes, so that it sorts last.

    eligible_I  bool[I]: the items that a search may return; None: all
    """

    def __init__(self, tree: Tree, device: torch.device, eligible_I: Bool | None = None) -> None:
        self.tree, self.device = tree, device
        self.padding = tree.node_count
        self.parent_N1 = torch.cat([torch.from_numpy(tree.parent).to(device), torch.tensor([self.padding], device=device)])
        self.first_child_N1 = torch.from_numpy(tree.first_child).to(device)
        # The last entry is that of item row −1.
        self.leaf_of_item_I1 = torch.cat([torch.from_numpy(tree.leaf_of_item).to(device), torch.tensor([-1], device=device)])
        self.items_below_N = torch.from_numpy(tree.items_below).to(device)
        eligible_N = tree.items_below > 0 if eligible_I is None else node_mask(tree, eligible_I).eligible_N
        self.ineligible_N = torch.from_numpy(~eligible_N).to(device)
        self.leaf_item = torch.from_numpy(tree.leaf_item).to(device)

    def history_nodes(self, history_BT: Tensor) -> Tensor:
        """int64[B, L, T]: the ancestors of item rows on every level, −1 for padding."""
        return torch.stack(self.paths(history_BT), 1)

    def paths(self, items_BT: Tensor) -> list[Tensor]:
        """For each level 0 … H int64[B, T]: the ancestors of item rows on it, −1 for padding."""
        node = self.leaf_of_item_I1[items_BT]
        path = [node]
        for _ in range(self.tree.height):
            node = torch.where(node > 0, self.parent_N1[node.clamp(min=0)], node)  # the root and the padding stay
            path.append(node)
        return path[::-1]

    def positives(self, target_BP: Tensor) -> list[Tensor]:
        """For each level 0 … H int64[B, P_h]: the distinct ancestors of the targets, ascending, padded with N."""
        leaves = self.leaf_of_item_I1[target_BP]
        nodes = _distinct(torch.where(leaves >= 0, leaves, self.padding), self.padding)
        levels = [nodes]
        for h in range(self.tree.height - 1, -1, -1):
            nodes = _distinct(self.parent_N1[nodes], self.padding)[:, : self.tree.level_size(h)].contiguous()
            levels.append(nodes)
        return levels[::-1]

    def level_nodes(self, h: int) -> Tensor:
        """int64[n_h]: the nodes of a level."""
        span = self.tree.level(h)
        return torch.arange(span.start, span.stop, device=self.device)

    def inherited(self, values_BC: Tensor, h: int) -> Tensor:
        """float[B, n_h]: for every node of level h the value of its parent; values_BC is of all nodes of level h − 1."""
        tree = self.tree
        if tree.is_uniform(h - 1):  # a repeat, whose gradient is a sum over neighbours
            return values_BC.repeat_interleave(tree.max_children[h - 1], 1)
        span = tree.level(h)
        return values_BC.index_select(1, self.parent_N1[span.start : span.stop] - tree.level(h - 1).start)

    def children(self, nodes_BK: Tensor, h: int) -> Tensor:
        """int64[B, K, b]: the children of level-h nodes, N where there is none (or where the node is N)."""
        most = self.tree.max_children[h]
        safe = nodes_BK.clamp(max=self.padding - 1)
        first, end = self.first_child_N1[safe], self.first_child_N1[safe + 1]
        end = torch.where(nodes_BK == self.padding, first, end)
        children = first.unsqueeze(-1) + torch.arange(most, device=self.device)
        return torch.where(children < end.unsqueeze(-1), children, self.padding)

    def find(self, sorted_BP: Tensor, nodes_BC: Tensor) -> Matches:
        """Look nodes up in ascending lists."""
        position_BC = torch.searchsorted(sorted_BP, nodes_BC.contiguous()).clamp(max=sorted_BP.shape[1] - 1)
        return Matches(position_BC, (sorted_BP.gather(1, position_BC) == nodes_BC) & (nodes_BC != self.padding))


def _distinct(nodes: Tensor, padding: int) -> Tensor:
    """Rows sorted, repeats replaced by padding at the end."""
    nodes = nodes.sort(1).values
    repeat = torch.zeros_like(nodes, dtype=torch.bool)
    repeat[:, 1:] = nodes[:, 1:] == nodes[:, :-1]
    return torch.where(repeat, padding, nodes).sort(1).values


def on_device(array: Array, device: torch.device) -> Tensor:
    """The array as a tensor on the device. A GPU copies it from pinned memory, so that the copy does not wait for the previous one."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
