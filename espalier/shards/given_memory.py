"""Memory that comes with queries, in place of what a shard would add up for their histories.

A router knows what live items say of a history, and what is said of live items; a shard does not. Knows lists of nodes. Does not know how
they were made.

Legend: B queries, T history, X nodes with memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from espalier.memory_lists import MemoryLists
from espalier.tree import Tree


class GivenMemory:
    """A `MemoryLookup` of lists that are known. A history stands for the query whose number is its last item, see `numbers`."""

    def __init__(self, lists: MemoryLists) -> None:
        self._lists = lists

    @property
    def item_count(self) -> int:
        return len(self._lists.offset_B) - 1

    def lists(self, history_BT: NDArray[Any], eligible: object) -> MemoryLists:
        """The lists of the queries whose numbers the histories end with. Whoever made them looked at what is eligible."""
        return self._lists.take(np.asarray(history_BT[:, -1], np.int64))


def numbers(batch: int, length: int) -> NDArray[np.int64]:
    """int64[B, T]: histories that end with 0, 1, 2 …, and hold nothing else."""
    history_BT = np.full((batch, length), -1, np.int64)
    history_BT[:, -1] = np.arange(batch)
    return history_BT


def with_levels_above(tree: Tree, lists: MemoryLists) -> MemoryLists:
    """The whole lists of those that know leaves and nodes above leaves alone: a node has the largest mem below it.

    Nodes of other levels, and mem of 0, are dropped.
    """
    batch, nodes = len(lists.offset_B) - 1, tree.node_count
    key_X = np.repeat(np.arange(batch), np.diff(lists.offset_B)) * nodes + lists.nodes  # (query, node) as one number
    known = lists.values > 0
    levels: list[tuple[NDArray[np.int64], NDArray[np.float32]]] = []
    below: tuple[NDArray[np.int64], NDArray[np.float32]] = np.empty(0, np.int64), np.empty(0, np.float32)
    for h in range(tree.height, 0, -1):
        own = known & (lists.nodes >= tree.level(h).start) & (lists.nodes < tree.level(h).stop) & (h >= tree.height - 1)
        query, node = np.divmod(below[0], nodes)
        keys, values = np.append(key_X[own], query * nodes + tree.parent[node]), np.append(lists.values[own], below[1])
        keys, place = np.unique(keys, return_inverse=True)
        most = np.zeros(len(keys), np.float32)
        np.maximum.at(most, place, values)
        below = keys, most
        levels.append(below)
    key = np.concatenate([keys for keys, _ in levels])
    order = np.argsort(key)
    query, node = np.divmod(key[order], nodes)
    offset_B = np.append(0, np.cumsum(np.bincount(query, minlength=batch))).astype(np.int64)
    return MemoryLists(offset_B, node, np.concatenate([values for _, values in levels])[order])
