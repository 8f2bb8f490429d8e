"""A shard's own item rows and node numbers, and those of the whole catalogue.

Messages speak of the whole, engines of the shard. Both count in the same order. Knows rows, numbers and masks; does not know queries.

Legend: I items and N nodes of the shard, X any number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from espalier.engines.stages import Frontier, ShardResult
from espalier.errors import InvalidMessage
from espalier.masks.eligibility import NO_NODE, forest_mask
from espalier.memory_lists import MemoryLists
from espalier.search import NO_ITEM, LevelTrace, NodeMask, SearchResult
from espalier.shard_parts import ShardParts
from espalier.shards.messages import MaskBits
from espalier.tree import Tree

Int64 = NDArray[np.int64]


class LocalShard:
    """Turns numbers of the whole into the shard's, and back.

    trees  of the shard: one, or those of a forest
    """

    def __init__(self, parts: ShardParts, trees: Sequence[Tree]) -> None:
        self.parts, self.trees = parts, trees

    @property
    def mask_bytes(self) -> int:
        """What a mask takes in memory."""
        return sum(tree.node_count for tree in self.trees)

    def rows(self, rows: Int64) -> Int64:
        """The shard's rows of items of the whole; NO_ITEM for those that it does not hold, and for NO_ITEM."""
        return _places(self.parts.items, rows, NO_ITEM)

    def nodes(self, place: int, nodes: Int64) -> Int64:
        """The shard's numbers of nodes of a whole tree (of a forest, counted from 0); NO_NODE for those that it does not hold."""
        return _places(self.parts.nodes[place], nodes, NO_NODE)

    def mask(self, bits: MaskBits) -> NodeMask:
        """The node mask of a filter. O(N). Raises InvalidMessage where it is not one of this shard."""
        items = len(self.parts.items)
        if len(bits.eligible) != (items + 7) // 8:
            raise InvalidMessage("masks", f"{len(bits.eligible)} bytes of bits", f"{(items + 7) // 8} for {items} items")
        if len(bits.open_nodes) > len(self.trees):
            raise InvalidMessage("masks", f"open nodes of {len(bits.open_nodes)} trees", f"at most {len(self.trees)}")
        mask = forest_mask(self.trees, np.unpackbits(bits.eligible, count=items).view(np.bool_))
        for place, nodes in enumerate(bits.open_nodes):
            self._open(place, mask.of_tree(place).eligible_N, nodes)
        return mask

    def _open(self, place: int, eligible_N: NDArray[np.bool_], nodes: Int64) -> None:
        """Let nodes of a whole tree that stand above leaves, and all above them, pass in a mask (changed)."""
        tree = self.trees[place]
        local = self.nodes(place, nodes)
        local = local[local != NO_NODE]
        above = tree.level(tree.height - 1)
        if len(local) and (local.min() < above.start or local.max() >= above.stop):
            raise InvalidMessage("masks", "an open node of another level", "open nodes on the level above the leaves")
        for _ in range(tree.height):
            eligible_N[local] = True
            local = np.unique(tree.parent[local])

    def memory(self, lists: MemoryLists) -> MemoryLists:
        """Lists of nodes of the whole tree in the shard's numbers, without nodes that it does not hold."""
        local = self.nodes(0, lists.nodes)
        return MemoryLists(lists.offset_B, local, lists.values).kept(local != NO_NODE)

    def whole(self, result: SearchResult) -> ShardResult:
        """A result of the shard in rows and numbers of the whole."""
        whole = replace(
            result,
            item_rows_BM=_numbers(self.parts.items, result.item_rows_BM, NO_ITEM),
            traces=tuple(self._trace(place, trace) for place, trace in enumerate(result.traces)),
        )
        frontiers = result.frontiers if isinstance(result, ShardResult) else ()
        return ShardResult.of(whole, tuple(self._frontier(place, frontier) for place, frontier in enumerate(frontiers)))

    def _trace(self, place: int, trace: Sequence[LevelTrace]) -> tuple[LevelTrace, ...]:
        own = self.parts.nodes[place]
        return tuple(
            replace(
                level,
                nodes_BK=_numbers(own, level.nodes_BK, NO_NODE),
                candidates_BC=_numbers(own, level.candidates_BC, NO_NODE),
            )
            for level in trace
        )

    def _frontier(self, place: int, frontier: Frontier) -> Frontier:
        return replace(frontier, nodes_BK=_numbers(self.parts.nodes[place], frontier.nodes_BK, NO_NODE))


def _places(numbers: Int64, wanted: Int64, missing: int) -> Int64:
    """int64: where ascending numbers have the wanted ones; `missing` for those that are not among them."""
    at = np.searchsorted(numbers, wanted)
    at[at == len(numbers)] = 0
    return np.where(numbers[at] == wanted, at, missing)


def _numbers(numbers: Int64, places: Int64, missing: int) -> Int64:
    """int64: the numbers at some places; `missing` for places below 0."""
    found = np.asarray(numbers[places])
    found[places < 0] = missing
    return found
