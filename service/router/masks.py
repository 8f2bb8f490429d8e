"""What queries may visit, as shards take it: a bit for each item of a shard, the nodes that a live item alone keeps open, excluded items.

The bits of a mask are made once for all shards, and kept as long as the mask itself is.

Legend: B queries, E excluded items, N nodes, I items, P nodes of the level above the leaves, S shards.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from espalier.masks.eligibility import NO_NODE, EligibleNodes, every_item, excluded_nodes
from espalier.search import NO_ITEM, NodeMask
from espalier.shards.layout import node_shards, shard_items
from espalier.shards.messages import MaskBits
from espalier.tree import Tree

Masks = tuple[NodeMask | None, ...]
"""A query's mask in every tree of a bundle, None where every node is eligible."""


class Restrictions(NamedTuple):
    """Of a batch of queries.

    bits_B       each query's mask for each shard, None where all items are eligible
    excluded_S   for each shard the item rows that queries exclude of its own (int64[B, E], NO_ITEM as padding); None where there are none
    """

    bits_B: list[tuple[MaskBits, ...] | None]
    excluded_S: list[NDArray[np.int64] | None]


class _Kept(NamedTuple):
    others: tuple[weakref.ref[NodeMask] | None, ...]
    bits: tuple[MaskBits, ...] | None


class Layout:
    """Which shard of `count` holds which item. Used by any number of threads.

    items    int64 of each shard: its item rows, ascending
    shard_I  int32[I]: the shard of each item
    """

    def __init__(self, trees: Sequence[Tree], count: int) -> None:
        self.trees, self.count = tuple(trees), count
        self.items = shard_items(self.trees[0], count)
        self._shard_N = node_shards(self.trees[0], count)
        self.shard_I = self._shard_N[self.trees[0].leaf_of_item]
        self.sizes_S = np.array([len(items) for items in self.items], np.int64)
        self._every_item = [every_item(tree).eligible_N for tree in self.trees]
        self._kept: weakref.WeakKeyDictionary[NodeMask, _Kept] = weakref.WeakKeyDictionary()

    def restrictions(self, eligible_T: Sequence[EligibleNodes]) -> Restrictions:
        """What queries may visit of each tree, as shards take it.

        A shard closes the nodes above excluded items by itself. Where live items keep other nodes open, or were the last ones below a node
        and are excluded, the query has a mask of its own instead of exclusions.
        """
        bits_B = [self.bits(masks) for masks in zip(*(eligible.mask_B for eligible in eligible_T), strict=True)]
        excluded = eligible_T[0].excluded
        if excluded is None:
            return Restrictions(bits_B, [None] * self.count)
        leaves_BE = np.maximum(excluded.leaves_BX, self.trees[0].leaf_offset)
        exclude_BE = np.where(excluded.leaves_BX == NO_NODE, NO_ITEM, self.trees[0].leaf_item[leaves_BE - self.trees[0].leaf_offset])
        for b in self._closed_otherwise(eligible_T, exclude_BE).tolist():
            bits_B[b], exclude_BE[b] = self._made([self._left(place, eligible, b) for place, eligible in enumerate(eligible_T)]), NO_ITEM
        return Restrictions(bits_B, self._exclusions(exclude_BE))

    def bits(self, masks: Masks) -> tuple[MaskBits, ...] | None:
        """A query's mask for each shard; None where all items are eligible. O(I + N) for a mask that was not seen before."""
        known = next((mask for mask in masks if mask is not None), None)
        if known is None:
            return None
        kept = self._kept.get(known)
        if kept is None or any((other and other()) is not mask for other, mask in zip(kept.others, masks, strict=True)):
            others = tuple(None if mask is None else weakref.ref(mask) for mask in masks)
            eligible = [every_N if mask is None else mask.eligible_N for mask, every_N in zip(masks, self._every_item, strict=True)]
            kept = self._kept[known] = _Kept(others, self._made(eligible))
        return kept.bits

    def _closed_otherwise(self, eligible_T: Sequence[EligibleNodes], exclude_BE: NDArray[np.int64]) -> NDArray[np.int64]:
        """int64: the queries of which a shard would close other inner nodes, because of live items, than are closed."""
        differs_B = np.zeros(len(exclude_BE), np.bool_)
        for tree, eligible in zip(self.trees, eligible_T, strict=True):
            if eligible.live_BR and eligible.excluded is not None:
                closed = eligible.excluded.inner_BX, excluded_nodes(tree, exclude_BE, eligible.mask_B).inner_BX
                width = max(nodes_BX.shape[1] for nodes_BX in closed)
                one_BX, other_BX = (
                    np.pad(nodes_BX, ((0, 0), (0, width - nodes_BX.shape[1])), constant_values=NO_NODE) for nodes_BX in closed
                )
                differs_B |= (one_BX != other_BX).any(axis=1)
        return np.flatnonzero(differs_B)

    def _left(self, place: int, eligible: EligibleNodes, b: int) -> NDArray[np.bool_]:
        """bool[N]: the nodes of a tree that query b may visit."""
        mask, excluded = eligible.mask_B[b], eligible.excluded
        left_N = (self._every_item[place] if mask is None else mask.eligible_N).copy()
        if excluded is not None:
            for nodes_X in (excluded.leaves_BX[b], excluded.inner_BX[b]):
                left_N[nodes_X[nodes_X != NO_NODE]] = False
        return left_N

    def _made(self, eligible: Sequence[NDArray[np.bool_]]) -> tuple[MaskBits, ...] | None:
        """The bits of the nodes that are eligible in each tree (bool[N]); None where all items are, and nothing else."""
        eligible_I = np.ones(self.trees[0].item_count, np.bool_)
        opened = []
        for tree, eligible_N in zip(self.trees, eligible, strict=True):
            eligible_I &= eligible_N[tree.leaf_of_item]
            opened.append(_opened(tree, eligible_N))
        if eligible_I.all() and not any(map(len, opened)):
            return None
        bits = []
        for shard, items in enumerate(self.items):
            first = opened[0][self._shard_N[opened[0]] == shard]
            open_nodes = (first, *opened[1:])
            bits.append(MaskBits(np.packbits(eligible_I[items]), open_nodes if any(map(len, open_nodes)) else ()))
        return tuple(bits)

    def _exclusions(self, exclude_BE: NDArray[np.int64]) -> list[NDArray[np.int64] | None]:
        """`excluded_S` of item rows of all shards, NO_ITEM as padding."""
        shard_BE = np.where(exclude_BE >= 0, self.shard_I[exclude_BE], -1)
        found: list[NDArray[np.int64] | None] = []
        for shard in range(self.count):
            own_BE = shard_BE == shard
            width = int(own_BE.sum(axis=1).max(initial=0))
            order_BE = np.argsort(~own_BE, axis=1, kind="stable")[:, :width]
            found.append(np.take_along_axis(np.where(own_BE, exclude_BE, -1), order_BE, axis=1) if width else None)
        return found


def _opened(tree: Tree, eligible_N: NDArray[np.bool_]) -> NDArray[np.int64]:
    """int64, ascending: the nodes above leaves that are eligible although no leaf below them is."""
    parents = tree.level(tree.height - 1)
    first = tree.first_child[parents.start : parents.stop] - tree.leaf_offset
    below_P = np.logical_or.reduceat(eligible_N[tree.leaf_offset :], first)
    return np.flatnonzero(eligible_N[parents.start : parents.stop] & ~below_P).astype(np.int64) + parents.start
