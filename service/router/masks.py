"""Masks and exclusions of queries in the form that shards take: a bit for each item, the nodes that only live items open, excluded items.

The bits of a mask are computed once for all shards, and cached as long as the mask exists.

Legend: B queries, E excluded items, N nodes, I items, P nodes of the level above the leaves, S shards.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from espalier.arrays import Bool, Int64
from espalier.masks.eligibility import NO_NODE, EligibleNodes, every_item, excluded_nodes
from espalier.search import NO_ITEM, NodeMask
from espalier.shards.layout import node_shards, shard_items
from espalier.shards.messages import MaskBits
from espalier.tree import Tree

Masks = tuple[NodeMask | None, ...]
"""A query's mask in every tree of a bundle. None makes every node eligible."""


class Restrictions(NamedTuple):
    """The restrictions of a batch of queries.

    bits_B       each query's mask for each shard; None makes all items eligible
    excluded_S   for each shard, the excluded item rows that it holds (int64[B, E], padded with NO_ITEM); None without any
    """

    bits_B: list[tuple[MaskBits, ...] | None]
    excluded_S: list[Int64 | None]


class _CachedBits(NamedTuple):
    masks: tuple[weakref.ref[NodeMask] | None, ...]  # of each tree
    bits: tuple[MaskBits, ...] | None


class Layout:
    """Which shard of `count` holds which item. Any number of threads may use it.

    items    for each shard, its item rows (int64), ascending
    shard_I  int32[I]: the shard of each item
    """

    def __init__(self, trees: Sequence[Tree], count: int) -> None:
        self.trees, self.count = tuple(trees), count
        self.items = shard_items(self.trees[0], count)
        self._shard_N = node_shards(self.trees[0], count)
        self.shard_I = self._shard_N[self.trees[0].leaf_of_item]
        self.sizes_S = np.array([len(items) for items in self.items], np.int64)
        self._every_item = [every_item(tree).eligible_N for tree in self.trees]
        self._cache: weakref.WeakKeyDictionary[NodeMask, _CachedBits] = weakref.WeakKeyDictionary()  # by a query's first mask

    def restrictions(self, eligible_T: Sequence[EligibleNodes]) -> Restrictions:
        """The eligible nodes of each tree in the form that shards take.

        A shard closes the nodes above excluded items by itself. Live items may keep such a node open; an excluded live item may have been
        the last one below a node. In these cases the query gets a mask of its own instead of exclusions.
        """
        bits_B = [self.bits(masks) for masks in zip(*(eligible.mask_B for eligible in eligible_T), strict=True)]
        excluded = eligible_T[0].excluded
        if excluded is None:
            return Restrictions(bits_B, [None] * self.count)
        leaves_BE = np.maximum(excluded.leaves_BX, self.trees[0].leaf_offset)
        exclude_BE = np.where(excluded.leaves_BX == NO_NODE, NO_ITEM, self.trees[0].leaf_item[leaves_BE - self.trees[0].leaf_offset])
        for b in self._differing_queries(eligible_T, exclude_BE).tolist():
            bits_B[b] = self._bits_of_nodes([eligible.nodes_of(tree, b) for tree, eligible in zip(self.trees, eligible_T, strict=True)])
            exclude_BE[b] = NO_ITEM
        return Restrictions(bits_B, self._exclusions(exclude_BE))

    def bits(self, masks: Masks) -> tuple[MaskBits, ...] | None:
        """A query's mask for each shard; None if all items are eligible. O(I + N) for a mask that is not cached."""
        first_mask = next((mask for mask in masks if mask is not None), None)
        if first_mask is None:
            return None
        cached = self._cache.get(first_mask)
        if cached is None or any((handle and handle()) is not mask for handle, mask in zip(cached.masks, masks, strict=True)):
            handles = tuple(None if mask is None else weakref.ref(mask) for mask in masks)
            eligible = [every_N if mask is None else mask.eligible_N for mask, every_N in zip(masks, self._every_item, strict=True)]
            cached = self._cache[first_mask] = _CachedBits(handles, self._bits_of_nodes(eligible))
        return cached.bits

    def _differing_queries(self, eligible_T: Sequence[EligibleNodes], exclude_BE: Int64) -> Int64:
        """int64: the queries for which a shard, which has no live items, would close other inner nodes than the router does."""
        differs_B = np.zeros(len(exclude_BE), np.bool_)
        for tree, eligible in zip(self.trees, eligible_T, strict=True):
            if eligible.live_BR and eligible.excluded is not None:
                closed = eligible.excluded.inner_BX, excluded_nodes(tree, exclude_BE, eligible.mask_B).inner_BX
                width = max(nodes_BX.shape[1] for nodes_BX in closed)
                router_BX, shard_BX = (
                    np.pad(nodes_BX, ((0, 0), (0, width - nodes_BX.shape[1])), constant_values=NO_NODE) for nodes_BX in closed
                )
                differs_B |= (router_BX != shard_BX).any(axis=1)
        return np.flatnonzero(differs_B)

    def _bits_of_nodes(self, eligible: Sequence[Bool]) -> tuple[MaskBits, ...] | None:
        """For each shard, the bits of the eligible nodes (bool[N] a tree). None if all items are eligible and live items open no nodes."""
        eligible_I = np.ones(self.trees[0].item_count, np.bool_)
        open_nodes = []
        for tree, eligible_N in zip(self.trees, eligible, strict=True):
            eligible_I &= eligible_N[tree.leaf_of_item]
            open_nodes.append(_open_nodes(tree, eligible_N))
        if eligible_I.all() and not any(map(len, open_nodes)):
            return None
        bits = []
        for shard, items in enumerate(self.items):
            in_first_tree = open_nodes[0][self._shard_N[open_nodes[0]] == shard]
            in_trees = (in_first_tree, *open_nodes[1:])
            bits.append(MaskBits(np.packbits(eligible_I[items]), in_trees if any(map(len, in_trees)) else ()))
        return tuple(bits)

    def _exclusions(self, exclude_BE: Int64) -> list[Int64 | None]:
        """`excluded_S` of the item rows that queries exclude, padded with NO_ITEM."""
        shard_BE = np.where(exclude_BE >= 0, self.shard_I[exclude_BE], -1)
        excluded_S: list[Int64 | None] = []
        for shard in range(self.count):
            in_shard_BE = shard_BE == shard
            width = int(in_shard_BE.sum(axis=1).max(initial=0))
            order_BE = np.argsort(~in_shard_BE, axis=1, kind="stable")[:, :width]
            excluded_S.append(np.take_along_axis(np.where(in_shard_BE, exclude_BE, -1), order_BE, axis=1) if width else None)
        return excluded_S


def _open_nodes(tree: Tree, eligible_N: Bool) -> Int64:
    """int64, ascending: nodes on the level above the leaves that are eligible although no leaf below them is: live items open them."""
    parents = tree.level(tree.height - 1)
    first = tree.first_child[parents.start : parents.stop] - tree.leaf_offset
    below_P = np.logical_or.reduceat(eligible_N[tree.leaf_offset :], first)
    return np.flatnonzero(eligible_N[parents.start : parents.stop] & ~below_P).astype(np.int64) + parents.start
