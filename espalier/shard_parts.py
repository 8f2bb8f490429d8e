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

ITEMS = "items"
BLOCK = 1 << 20
"""Numbers that are checked at once: a mapped array need not fit into memory."""
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
        names = [ITEMS, *(nodes_name(place) for place in range(len(trees)))]
        if set(arrays) != set(names):
            raise BundleCorrupt(f"arrays {sorted(arrays)}, expected {sorted(names)}")
        parts = ShardParts(arrays[ITEMS], tuple(arrays[name] for name in names[1:]))
        parts.check(info, trees)
        return parts

    def arrays(self) -> dict[str, NDArray[np.int64]]:
        """By their names in shard.safetensors."""
        return {ITEMS: self.items} | {nodes_name(place): nodes for place, nodes in enumerate(self.nodes)}

    def check(self, info: ShardInfo, trees: Sequence[TreeInfo]) -> None:
        """Raise BundleCorrupt unless these are the items and nodes of a shard with such trees."""
        if len(self.nodes) != len(trees):
            raise BundleCorrupt(f"nodes of {len(self.nodes)} trees, the manifest describes {len(trees)}")
        _check_rising(ITEMS, self.items, trees[0].items, info.items)
        for place, (nodes, tree) in enumerate(zip(self.nodes, trees, strict=True)):
            name = nodes_name(place)
            _check_rising(name, nodes, tree.nodes, LARGEST if place else info.nodes)
            if nodes[0] != 0:
                raise BundleCorrupt(f"{name}: begins with node {nodes[0]}, expected the root, 0")


def nodes_name(place: int) -> str:
    """The name of the nodes of a forest's tree, counted from 0."""
    return f"nodes-{place + 1}" if place else "nodes"


def _check_rising(name: str, numbers: NDArray[Any], count: int, below: int) -> None:
    """Raise BundleCorrupt unless these are `count` numbers from 0 to below `below`, ascending and distinct."""
    if numbers.dtype != np.int64 or numbers.shape != (count,):
        raise BundleCorrupt(f"{name}: {numbers.dtype}{list(numbers.shape)}, expected int64[{count}]")
    for begin in range(0, count, BLOCK):
        block = numbers[begin : begin + BLOCK + 1]  # and its successor
        if np.any(block[1:] <= block[:-1]):  # differences could wrap
            raise BundleCorrupt(f"{name}: expected ascending and distinct numbers")
    if numbers[0] < 0 or numbers[-1] >= below:
        raise BundleCorrupt(f"{name}: from {numbers[0]} to {numbers[-1]}, expected numbers from 0 to {below - 1}")
