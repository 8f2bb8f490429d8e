"""Converts a shard's local item rows and node numbers to global ones, those of the whole bundle, and back.

Messages have global numbers, engines local ones. Both have the same order. Knows rows, numbers and masks; does not know queries.

Legend: I items and N nodes of the shard, X any number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from espalier.arrays import Bool, Int64
from espalier.errors import InvalidMessage
from espalier.masks.eligibility import NO_NODE, forest_mask
from espalier.memory_lists import MemoryLists
from espalier.search import NO_ITEM, Frontier, LevelTrace, NodeMask, SearchResult
from espalier.shard_parts import ShardParts
from espalier.shards.messages import MaskBits
from espalier.tree import Tree


class LocalShard:
    """Converts between global and local numbers.

    parts  global item rows and node numbers, by local ones
    trees  of the shard: one, or those of a forest
    """

    def __init__(self, parts: ShardParts, trees: Sequence[Tree]) -> None:
        self.parts, self.trees = parts, trees

    @property
    def mask_bytes(self) -> int:
        """Bytes of a mask in memory."""
        return sum(tree.node_count for tree in self.trees)

    def rows(self, rows: Int64) -> Int64:
        """Local rows of global ones; NO_ITEM for items that the shard does not hold, and for NO_ITEM."""
        return _positions(self.parts.items, rows, NO_ITEM)

    def nodes(self, tree_index: int, nodes: Int64) -> Int64:
        """Local numbers of a tree's global nodes; NO_NODE for nodes that the shard does not hold. tree_index: of a forest, from 0."""
        return _positions(self.parts.nodes[tree_index], nodes, NO_NODE)

    def mask(self, bits: MaskBits) -> NodeMask:
        """The node mask of a filter's bits. O(N). Raises InvalidMessage if they do not fit this shard."""
        items = len(self.parts.items)
        if len(bits.eligible) != (items + 7) // 8:
            raise InvalidMessage("masks", f"{len(bits.eligible)} bytes of bits", f"{(items + 7) // 8} for {items} items")
        if len(bits.open_nodes) > len(self.trees):
            raise InvalidMessage("masks", f"open nodes of {len(bits.open_nodes)} trees", f"at most {len(self.trees)}")
        mask = forest_mask(self.trees, np.unpackbits(bits.eligible, count=items).view(np.bool_))
        for tree_index, nodes in enumerate(bits.open_nodes):
            self._open(tree_index, mask.of_tree(tree_index).eligible_N, nodes)
        return mask

    def _open(self, tree_index: int, eligible_N: Bool, nodes: Int64) -> None:
        """Make global nodes on the level above the leaves, and their ancestors, eligible in a mask (changed)."""
        tree = self.trees[tree_index]
        local = self.nodes(tree_index, nodes)
        local = local[local != NO_NODE]
        above = tree.level(tree.height - 1)
        if len(local) and (local.min() < above.start or local.max() >= above.stop):
            raise InvalidMessage("masks", "an open node of another level", "open nodes on the level above the leaves")
        for _ in range(tree.height):
            eligible_N[local] = True
            local = np.unique(tree.parent[local])

    def memory(self, lists: MemoryLists) -> MemoryLists:
        """Memory lists with global nodes, as lists with local ones. Drops nodes that the shard does not hold."""
        local = self.nodes(0, lists.nodes)
        return MemoryLists(lists.offset_B, local, lists.values).select(local != NO_NODE)

    def whole(self, result: SearchResult) -> SearchResult:
        """A result with global item rows and node numbers."""
        return replace(
            result,
            item_rows_BM=_numbers(self.parts.items, result.item_rows_BM, NO_ITEM),
            traces=tuple(self._trace(tree_index, trace) for tree_index, trace in enumerate(result.traces)),
            frontiers=tuple(self._frontier(tree_index, frontier) for tree_index, frontier in enumerate(result.frontiers)),
        )

    def _trace(self, tree_index: int, trace: Sequence[LevelTrace]) -> tuple[LevelTrace, ...]:
        global_nodes = self.parts.nodes[tree_index]
        return tuple(
            replace(
                level,
                nodes_BK=_numbers(global_nodes, level.nodes_BK, NO_NODE),
                candidates_BC=_numbers(global_nodes, level.candidates_BC, NO_NODE),
            )
            for level in trace
        )

    def _frontier(self, tree_index: int, frontier: Frontier) -> Frontier:
        return replace(frontier, nodes_BK=_numbers(self.parts.nodes[tree_index], frontier.nodes_BK, NO_NODE))


def _positions(numbers: Int64, wanted: Int64, missing: int) -> Int64:
    """int64: the positions of the wanted numbers among ascending numbers; `missing` for those that are not among them."""
    positions = np.searchsorted(numbers, wanted)
    positions[positions == len(numbers)] = 0
    return np.where(numbers[positions] == wanted, positions, missing)


def _numbers(numbers: Int64, positions: Int64, missing: int) -> Int64:
    """int64: the numbers at some positions; `missing` for positions below 0."""
    numbers_at = np.asarray(numbers[positions])
    numbers_at[positions < 0] = missing
    return numbers_at
