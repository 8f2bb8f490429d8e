"""Which items and nodes of a bundle a shard holds: shard.safetensors.

    items            int64[I_s]: the whole bundle's row of each item of the shard
    nodes, nodes-2 … int64[N_s]: the whole tree's number of each node of the shard; one array for each tree of a forest

All arrays ascend. So rows and numbers have the same order in the shard as in the whole bundle, and ties break alike in both.

Legend: I_s items and N_s nodes of the shard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from espalier.arrays import Array, Int64
from espalier.errors import BundleCorrupt
from espalier.manifest import ShardInfo, TreeInfo
from espalier.stored_arrays import check_arrays, check_length, check_rows

ITEMS = "items"
LARGEST = np.iinfo(np.int64).max
"""Bound for nodes of a forest's trees after the first: the manifest does not say how many nodes the whole trees have."""


@dataclass(frozen=True, eq=False)
class ShardParts:
    """items: int64[I_s] · nodes: int64[N_s] of each tree. See the module: by a shard's row or number, that of the whole bundle."""

    items: Int64
    nodes: tuple[Int64, ...]

    @staticmethod
    def of_arrays(arrays: Mapping[str, Array], info: ShardInfo, trees: Sequence[TreeInfo]) -> ShardParts:
        """Items and nodes from a file's arrays, checked. trees: of the shard. Raises BundleCorrupt if they do not fit the manifest."""
        names = [nodes_name(tree_index) for tree_index in range(len(trees))]
        check_arrays(arrays, dict.fromkeys([ITEMS, *names], np.int64))
        sizes = [(trees[0].items, info.items), (trees[0].nodes, info.nodes), *((tree.nodes, LARGEST) for tree in trees[1:])]
        for name, (count, whole) in zip([ITEMS, *names], sizes, strict=True):
            check_length(name, arrays[name], count)
            check_rows(name, arrays[name], np.array([0, count]), 1, whole)
            if name != ITEMS and arrays[name][0] != 0:
                raise BundleCorrupt(f"{name} begins with node {arrays[name][0]}, expected the root, 0")
        return ShardParts(arrays[ITEMS], tuple(arrays[name] for name in names))

    def arrays(self) -> dict[str, Int64]:
        """By their names in shard.safetensors."""
        return {ITEMS: self.items} | {nodes_name(tree_index): nodes for tree_index, nodes in enumerate(self.nodes)}


def nodes_name(tree_index: int) -> str:
    """The array's name for the nodes of a forest's tree (from 0)."""
    return f"nodes-{tree_index + 1}" if tree_index else "nodes"
