"""Filters as shards take them: a bit for each item of a shard, and the nodes that a live item alone keeps open.

The bits of a mask are made once for all shards, and kept as long as the mask itself is.

Legend: N nodes, I items, P nodes of the level above the leaves.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from espalier.masks.eligibility import every_item
from espalier.search import NodeMask
from espalier.shards.layout import node_shards, shard_items
from espalier.shards.messages import MaskBits
from espalier.tree import Tree

Masks = tuple[NodeMask | None, ...]
"""A query's mask in every tree of a bundle, None where all items are eligible."""


class _Kept(NamedTuple):
    others: tuple[weakref.ref[NodeMask] | None, ...]
    bits: tuple[MaskBits, ...]


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
        self._every_item = [every_item(tree) for tree in self.trees]
        self._kept: weakref.WeakKeyDictionary[NodeMask, _Kept] = weakref.WeakKeyDictionary()

    def bits(self, masks: Masks) -> tuple[MaskBits, ...] | None:
        """A query's mask for each shard; None where all items are eligible. O(I + N) for a mask that was not seen before."""
        known = next((mask for mask in masks if mask is not None), None)
        if known is None:
            return None
        kept = self._kept.get(known)
        if kept is None or any((other and other()) is not mask for other, mask in zip(kept.others, masks, strict=True)):
            others = tuple(None if mask is None else weakref.ref(mask) for mask in masks)
            kept = self._kept[known] = _Kept(others, self._made(masks))
        return kept.bits

    def _made(self, masks: Masks) -> tuple[MaskBits, ...]:
        eligible_I = np.ones(self.trees[0].item_count, np.bool_)
        opened = []
        for tree, mask, every in zip(self.trees, masks, self._every_item, strict=True):
            eligible_N = (mask or every).eligible_N
            eligible_I &= eligible_N[tree.leaf_of_item]
            opened.append(_opened(tree, eligible_N))
        bits = []
        for shard, items in enumerate(self.items):
            first = opened[0][self._shard_N[opened[0]] == shard]
            open_nodes = (first, *opened[1:])
            bits.append(MaskBits(np.packbits(eligible_I[items]), open_nodes if any(map(len, open_nodes)) else ()))
        return tuple(bits)

    def exclusions(self, exclude_BE: NDArray[np.int64] | None) -> list[NDArray[np.int64] | None]:
        """For each shard the item rows that queries exclude of its own, −1 as padding; None where there are none."""
        if exclude_BE is None:
            return [None] * self.count
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
