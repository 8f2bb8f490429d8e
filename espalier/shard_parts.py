"""Which items and nodes of a bundle a shard holds: shard.safetensors.

    items            int64[I_s]: the rows in the whole bundle of the shard's items
    nodes, nodes-2 … int64[N_s]: the numbers in the whole tree of the shard's nodes, of a forest for every tree

All ascending, so that a shard's own rows and numbers have the order of the whole's, and ties break alike in both.

Legend: I_s items and N_s nodes of the shard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from espalier.errors import BundleCorrupt
from espalier.manifest import ShardInfo, TreeInfo
from espalier.stored_arrays import check_arrays, check_length, check_rows

ITEMS = "items"
LARGEST = np.iinfo(np.int64).max
"""A bound for nodes of a forest's other trees, whose number in the whole the manifest does not say."""


@dataclass(frozen=True, eq=False)
class ShardParts:
    """items int64[I_s] · nodes: int64[N_s] of each tree. Both are where the shard's rows and numbers are in the whole."""

    items: NDArray[np.int64]
    nodes: tuple[NDArray[np.int64], ...]

    @staticmethod
    def of_arrays(arrays: Mapping[str, NDArray[Any]], info: ShardInfo, trees: Sequence[TreeInfo]) -> ShardParts:
        """The parts of a file's arrays, checked. trees: of the shard. Raises BundleCorrupt where they do not fit the manifest."""
        names = [nodes_name(place) for place in range(len(trees))]
        check_arrays(arrays, dict.fromkeys([ITEMS, *names], np.int64))
        sizes = [(trees[0].items, info.items), (trees[0].nodes, info.nodes), *((tree.nodes, LARGEST) for tree in trees[1:])]
        for name, (count, whole) in zip([ITEMS, *names], sizes, strict=True):
            check_length(name, arrays[name], count)
            check_rows(name, arrays[name], np.array([0, count]), 1, whole)
            if name != ITEMS and arrays[name][0] != 0:
                raise BundleCorrupt(f"{name} begins with node {arrays[name][0]}, expected the root, 0")
        return ShardParts(arrays[ITEMS], tuple(arrays[name] for name in names))

    def arrays(self) -> dict[str, NDArray[np.int64]]:
        """By their names in shard.safetensors."""
        return {ITEMS: self.items} | {nodes_name(place): nodes for place, nodes in enumerate(self.nodes)}


def nodes_name(place: int) -> str:
    """The name of the nodes of a forest's tree, counted from 0."""
    return f"nodes-{place + 1}" if place else "nodes"
