"""A memory with the entries of live items: rows of live items, columns of live items in trained rows, and entries of changed items.

    S[a, b] = the larger of the trained entry and the live one, 0 where there is neither

Sums are made as those of the trained memory, place by place of a history and in float64, so a live leaf has the mem that it has in a fold.
An inner node's mem is the largest of the eligible leaves below it, live ones included. Knows no ranks.

Legend: B queries, T history, P places of a history that count, E live entries, L leaves, R handles, X live leaves, C candidates.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from espalier.compiled_code import compiled
from espalier.live.masks import of_handles
from espalier.live.overlay import Overlay
from espalier.masks.eligibility import EligibleNodes
from espalier.memory import Memory
from espalier.memory_lists import EVERY_NODE, NO_NODES, NO_VALUES, MemoryLists, levels_above
from espalier.read_only import read_only
from espalier.tree import Tree

Array = NDArray[Any]
Int64 = NDArray[np.int64]


class LiveMemoryTree:
    """A memory on its tree with an overlay: what `MemoryTree` is without one. Used by any number of threads."""

    def __init__(self, memory: Memory, tree: Tree, overlay: Overlay) -> None:
        self._overlay, leaves = overlay, overlay.trees[0]
        self._entries = read_only(memory.offset, memory.item, memory.value, memory.weight)
        self._tree, self._places = tree, len(memory.weight)
        self._leaf_of_item, self._leaf_item = read_only(tree.leaf_of_item, tree.leaf_item)
        self._above = read_only(tree.parent)[0], tree.leaf_offset, tree.height
        self._sizes = np.diff(tree.level_offset)[1:]
        self._parent_R = np.full(overlay.handles, -1, np.int64)
        self._parent_R[leaves.handle_X] = leaves.parent_X
        self._moved = read_only(overlay.row_W, overlay.handle_W)
        self._own = threading.local()  # float64[#leaves] and [R], all 0 between calls

    @property
    def item_count(self) -> int:
        """I + R."""
        return self._overlay.items + self._overlay.handles

    def lists(self, history_BT: Array, eligible: EligibleNodes) -> MemoryLists:
        """The nodes with memory, as those of `MemoryTree`; live leaves are no nodes.

        Queries without a mask, or with one that does not say which live items pass, may get all that need no filter.
        """
        sum_L, sum_R = self._sums
        nodes, values, offset_B = [NO_NODES], [NO_VALUES], np.zeros(len(history_BT) + 1, np.int64)
        for b, history_T in enumerate(history_BT):
            leaves, touched = self._add_up(history_T)
            mask = eligible.mask_B[b]
            eligible_R = self._overlay.eligible_R if mask is None or mask.live_R is None else mask.live_R
            others, others_mem = read_only(*self._above_live_leaves(leaves, touched, eligible_R))
            sum_R[touched] = 0
            leaves.sort()
            excluded_X = NO_NODES if eligible.excluded is None else read_only(eligible.excluded.leaves_BX[b])[0]
            eligible_N = EVERY_NODE if mask is None else read_only(mask.eligible_N)[0]
            room = len(leaves) + int(np.minimum(len(leaves) + len(others), self._sizes[:-1]).sum())
            own, mem = levels_above(leaves, sum_L, eligible_N, excluded_X, others, others_mem, self._above, room)
            nodes.append(own)
            values.append(mem)
            offset_B[b + 1] = offset_B[b] + len(own)
        return MemoryLists(offset_B, np.concatenate(nodes), np.concatenate(values))

    def of_live_leaves(self, history_T: Array, handle_C: Int64) -> NDArray[np.float32]:
        """float32[C]: mem of live leaves, by their handles, for one history."""
        sum_L, sum_R = self._sums
        leaves, touched = self._add_up(history_T)
        row_C = self._overlay.item_R[handle_C]
        trained_C = row_C < self._overlay.items
        mem_C = sum_R[handle_C]
        mem_C[trained_C] = sum_L[self._leaf_of_item[row_C[trained_C]] - self._tree.leaf_offset]
        sum_L[leaves - self._tree.leaf_offset] = 0
        sum_R[touched] = 0
        return mem_C.astype(np.float32)

    @property
    def _sums(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """This thread's arrays of sums."""
        sums: tuple[NDArray[np.float64], NDArray[np.float64]] | None = getattr(self._own, "sums", None)
        if sums is None:
            sums = self._own.sums = np.zeros(self._tree.leaf_count), np.zeros(self._overlay.handles)
        return sums

    def _add_up(self, history_T: Array) -> tuple[Int64, Int64]:
        """int64 and int64: leaves and handles with memory, in no order; mem is added up in this thread's sums."""
        known_P = np.asarray(history_T)[history_T >= 0][::-1][: self._places]
        targets: list[Array] = [NO_NODES]
        entry_values: list[Array] = [NO_VALUES]
        count_P = np.zeros(len(known_P) + 1, np.int64)
        for place, source in enumerate(known_P.tolist()):
            entries = self._entries_of(source)
            if entries is not None:
                targets.append(entries[0])
                entry_values.append(entries[1])
                count_P[place + 1] = len(entries[0])
        begin_P = np.cumsum(count_P)
        joined = read_only(begin_P, np.concatenate(targets), np.concatenate(entry_values))
        leaf_offset = self._tree.leaf_offset
        leaves, touched = live_sums(*read_only(known_P), joined, self._entries, self._leaf_of_item, leaf_offset, *self._sums)
        return leaves, touched

    def _entries_of(self, source: int) -> tuple[Int64, NDArray[np.float32]] | None:
        return None if self._overlay.memory is None else self._overlay.memory.of(source)

    def _above_live_leaves(self, leaves: Int64, touched: Int64, eligible_R: NDArray[np.bool_]) -> tuple[Int64, NDArray[np.float32]]:
        """int64 and float32: the parents of eligible live leaves with memory, ascending, and the mem of these."""
        sum_L, sum_R = self._sums
        handles, mem = touched, sum_R[touched]
        row_W, handle_W = self._moved
        if len(row_W) and len(leaves):
            items = self._leaf_item[leaves - self._tree.leaf_offset]
            at = np.minimum(np.searchsorted(row_W, items), len(row_W) - 1)
            is_moved = row_W[at] == items
            handles = np.concatenate([handles, handle_W[at[is_moved]]])
            mem = np.concatenate([mem, sum_L[leaves[is_moved] - self._tree.leaf_offset]])
        lifts = of_handles(eligible_R, handles) & (mem > 0)
        parents, narrow = self._parent_R[handles[lifts]], mem[lifts].astype(np.float32)
        order = np.argsort(parents)
        return parents[order], narrow[order]


@compiled()
def live_sums(
    known_P: Array, live: tuple[Array, ...], trained: tuple[Array, ...], leaf_of_item: Array, leaf_offset: int, sum_L: Array, sum_R: Array
) -> tuple[Array, Array]:
    """int64 and int64: the leaves and the handles with memory, in no order; mem is added up in `sum_L` and `sum_R` (0 before).

    known_P  int64: item rows, I + handle for live ones, the last of the history first
    live     begin_P int64[P + 1], target int64[E], ascending for each place, value float32[E]: the live entries of each of them
    trained  offset, item, value, weight of the memory; an entry that both have counts by the larger value
    """
    begin_P, live_target, live_value = live
    offset, item, value, weight = trained
    items = len(leaf_of_item)
    total = begin_P[len(known_P)]
    for d in range(len(known_P)):
        if known_P[d] < items:
            total += offset[known_P[d] + 1] - offset[known_P[d]]
    leaves, handles = np.empty(min(total, len(sum_L)), np.int64), np.empty(min(begin_P[len(known_P)], len(sum_R)), np.int64)
    leaf_count, handle_count = 0, 0
    for d in range(len(known_P)):
        a = known_P[d]
        e = offset[a] if a < items else np.int64(0)
        end = offset[a + 1] if a < items else np.int64(0)
        x, end_x = begin_P[d], begin_P[d + 1]
        while e < end or x < end_x:
            if x == end_x or (e < end and item[e] < live_target[x]):
                target, entry = np.int64(item[e]), value[e]
                e += 1
            else:
                target, entry = live_target[x], live_value[x]
                x += 1
                if e < end and item[e] == target:
                    entry = max(entry, value[e])
                    e += 1
            part = np.float64(weight[d]) * np.float64(entry)
            if not part > 0:
                continue
            if target >= items:
                if sum_R[target - items] == 0:
                    handles[handle_count] = target - items
                    handle_count += 1
                sum_R[target - items] += part
            else:
                leaf = leaf_of_item[target]
                if sum_L[leaf - leaf_offset] == 0:
                    leaves[leaf_count] = leaf
                    leaf_count += 1
                sum_L[leaf - leaf_offset] += part
    return leaves[:leaf_count], handles[:handle_count]
