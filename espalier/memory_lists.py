"""The nodes with memory for a history: at a leaf, mem sums over the history's items; at an inner node, it is the largest mem below.

All engines use this but the reference, which shares no code. Knows nothing of ranks or beams.

Legend: B queries, T history, L leaves, N nodes, H levels below the root, I trained items, R handles of live items, X excluded leaves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from espalier.arrays import Array, Bool, Float32, Int64, read_only
from espalier.compiled_code import compiled
from espalier.entry_lists import KEY, NO_ENTRIES, EntryArrays, entry_of
from espalier.masks.eligibility import EligibleNodes
from espalier.memory import Memory
from espalier.memory_sums import add_up, in_order, left_out_rows
from espalier.search import NodeMask
from espalier.stored_numbers import stored
from espalier.thread_scratch import ThreadScratch
from espalier.tree import Tree

EVERY_NODE, NO_NODES, NO_VALUES = read_only(np.empty(0, np.bool_), np.empty(0, np.int64), np.empty(0, np.float32))
"""Empty arrays, which mean no mask and no entries to compiled code."""
INDEX_BITS, LAST_INDEX = 32, (1 << 32) - 1
"""Low bits of a sort key that hold an index, and their mask: sorting nodes with their indices gives an order."""


class LiveEntries(NamedTuple):
    """The live items that a memory adds to. All arrays are read-only.

    handles   R
    memory    the memory entries of live items, `live` in `memory_sums.py`
    leaves    live leaves, by parent and by handle
    handle_I  int32[I]: the handle of each trained item that was put or deleted; −1 for others
    """

    handles: int
    memory: tuple[EntryArrays, Array]
    leaves: EntryArrays
    handle_I: Array


NO_LIVE_ITEMS = LiveEntries(0, (NO_ENTRIES, NO_VALUES), NO_ENTRIES, *read_only(np.empty(0, np.int32)))


@dataclass(frozen=True, eq=False)
class MemoryLists:
    """The nodes on levels 1 … H with memory, for each query of a batch. All other nodes have mem 0.

    offset_B  int64[B + 1]: query b's nodes are offset_B[b] … offset_B[b + 1] − 1
    nodes     int64, ascending for each query
    values    float32: their mem, above 0
    """

    offset_B: Int64
    nodes: Int64
    values: Float32

    def take(self, queries: Int64) -> MemoryLists:
        """The lists of the queries at some positions (int64)."""
        if len(self.offset_B) == 2 and len(queries) == 1:
            return self
        lists_of_queries = [self.of(b) for b in queries.tolist()]
        offset_B = np.append(0, np.cumsum([len(nodes) for nodes, _ in lists_of_queries])).astype(np.int64)
        nodes, values = zip((NO_NODES, np.empty(0, np.float32)), *lists_of_queries, strict=True)
        return MemoryLists(offset_B, np.concatenate(nodes), np.concatenate(values))

    def select(self, keep: Bool) -> MemoryLists:
        """The lists with only some nodes. keep: a bool for each entry of `nodes`."""
        return MemoryLists(np.append(0, np.cumsum(keep))[self.offset_B].astype(np.int64), self.nodes[keep], self.values[keep])

    @staticmethod
    def joined(batches: Sequence[MemoryLists]) -> MemoryLists:
        """The lists of several batches, one batch after the other."""
        if len(batches) == 1:
            return batches[0]
        offset_B = np.append(0, np.cumsum(np.concatenate([NO_NODES, *(np.diff(batch.offset_B) for batch in batches)])))
        nodes, values = [NO_NODES, *(batch.nodes for batch in batches)], [NO_VALUES, *(batch.values for batch in batches)]
        return MemoryLists(offset_B, np.concatenate(nodes), np.concatenate(values))

    def of(self, b: int) -> tuple[Int64, Float32]:
        """The nodes and values of query b."""
        entries = slice(int(self.offset_B[b]), int(self.offset_B[b + 1]))
        return self.nodes[entries], self.values[entries]


class MemoryTree:
    """A memory with its tree. Computes the memory lists of histories. Any number of threads may use it.

    global_rows  for a shard, int64: the whole bundle's row of each item of the tree, ascending; None: the tree is whole
    """

    def __init__(self, memory: Memory, tree: Tree, global_rows: Array | None = None) -> None:
        local_I = np.full(0 if global_rows is None else len(memory.offset) - 1, -1)
        if global_rows is not None:
            local_I[global_rows] = np.arange(len(global_rows))
        self.trained = read_only(memory.offset, memory.item, stored(memory.value), memory.weight, memory.repeat, local_I)
        self._left_out = read_only(memory.left_out) if memory.left_out.any() else None
        arrays = read_only(tree.leaf_of_item, tree.leaf_item, tree.parent, np.diff(tree.level_offset)[1:])
        self._tree = *arrays, tree.leaf_offset, tree.height
        self.sums = ThreadScratch(lambda handles: (np.zeros(tree.leaf_count), np.zeros(handles)))
        """Two float64 arrays of zeros: [#leaves], and at least [handles]."""

    def left_out(self, history_BT: Array) -> Array | None:
        """int64[B, E]: the items of each history that are excluded, −1 as padding; None if the memory excludes none."""
        return None if self._left_out is None else left_out_rows(*read_only(history_BT), *self._left_out, self.trained[-1])

    def lists(self, history_BT: Array, eligible: EligibleNodes, live: LiveEntries | None = None) -> MemoryLists:
        """The nodes with memory for histories of item rows (int64[B, T], −1: no item, the last item last).

        eligible  the nodes that each query may visit. Only eligible leaves get memory
        live      the live items; None: there are none
        """
        batches = []
        for begin, end, mask, live_R in _runs(eligible):
            excluded_BX = np.empty((end - begin, 0), np.int64) if eligible.excluded is None else eligible.excluded.leaves_BX[begin:end]
            arrays = read_only(history_BT[begin:end], EVERY_NODE if mask is None else mask.eligible_N, excluded_BX)
            entries, eligible_R = NO_LIVE_ITEMS, EVERY_NODE
            if live is not None and live_R is not None:
                entries, (eligible_R,) = live, read_only(live_R)
            leaves = entries.leaves, eligible_R, entries.handle_I
            with self.sums.of(entries.handles) as sums:
                batches.append(MemoryLists(*memory_lists(*arrays, self.trained, entries.memory, leaves, self._tree, *sums)))
        return MemoryLists.joined(batches)


def _runs(eligible: EligibleNodes) -> Iterator[tuple[int, int, NodeMask | None, Bool | None]]:
    """Runs of queries with the same mask and the same live items: (begin, end, mask, live items)."""
    masks = eligible.mask_B
    lives = eligible.live_BR or (None,) * len(masks)
    begin = 0
    for b in range(1, len(masks) + 1):
        if b == len(masks) or masks[b] is not masks[begin] or lives[b] is not lives[begin]:
            yield begin, b, masks[begin], lives[begin]
            begin = b


@compiled()
def memory_lists(
    history_BT: Array, eligible_N: Array, excluded_BX: Array, trained: Any, live: Any, leaves: Any, tree: Any, sum_L: Array, sum_R: Array
) -> tuple[Array, Array, Array]:
    """offset_B, nodes and values of `MemoryLists`, for queries of one mask.

    eligible_N   bool[N], or empty: all nodes are eligible
    excluded_BX  more leaves that are not eligible, ascending, padded at the end with −1
    trained      see `memory_sums.py`
    live         the memory entries of live items, see `memory_sums.py`
    leaves       live leaves by parent and by handle; eligible_R bool, later handles are not eligible; handle_I of `LiveEntries`
    tree         leaf_of_item, leaf_item, parent, the sizes of the levels 1 … H, leaf_offset, height
    sum_L sum_R  float64, 0 before and afterwards
    """
    leaf_of_item, leaf_item, parent, sizes, leaf_offset, height = tree
    offset_B = np.zeros(len(history_BT) + 1, np.int64)
    nodes, values = np.empty(0, np.int64), np.empty(0, np.float32)
    for b in range(len(history_BT)):
        mem_leaves, handles = add_up(history_BT[b], trained, live, leaf_of_item, leaf_offset, sum_L, sum_R)
        mem_leaves = in_order(mem_leaves, leaf_offset + len(leaf_item) - 1)
        live_parents, live_mem = above_live_leaves(mem_leaves, handles, leaves, leaf_item, leaf_offset, sum_L, sum_R)
        room = len(mem_leaves)
        for level in range(height - 1):
            room += min(len(mem_leaves) + len(live_parents), sizes[level])
        query_nodes, query_mem = levels_above(
            mem_leaves, sum_L, eligible_N, excluded_BX[b], live_parents, live_mem, (parent, leaf_offset, height), room
        )
        begin, end = offset_B[b], offset_B[b] + len(query_nodes)
        if len(history_BT) == 1:
            nodes, values = query_nodes, query_mem
        elif end > len(nodes):
            nodes, values = _with_room(nodes, begin, 2 * end), _with_room(values, begin, 2 * end)
        nodes[begin:end], values[begin:end] = query_nodes, query_mem
        offset_B[b + 1] = end
    return offset_B, nodes[: offset_B[-1]], values[: offset_B[-1]]


@compiled()
def _with_room(array: Array, used: int, size: int) -> Array:
    larger = np.empty(size, array.dtype)
    larger[:used] = array[:used]
    return larger


@compiled()
def above_live_leaves(
    mem_leaves: Array, handles: Array, leaves: Any, leaf_item: Array, leaf_offset: int, sum_L: Array, sum_R: Array
) -> tuple[Array, Array]:
    """The parents (int64, ascending) of eligible live leaves with memory, and these leaves' mem (float32). Sets `sum_R` to 0 again."""
    entries, eligible_R, handle_I = leaves
    room, count = len(handles) + len(mem_leaves), 0
    parents, mem = np.empty(room, np.int64), np.empty(room, np.float32)
    for handle in handles:
        if handle < len(eligible_R) and eligible_R[handle]:
            entry = entry_of(handle, entries)
            if entry > 0:
                parents[count], mem[count] = entries.rows[entry, KEY], sum_R[handle]
                count += int(mem[count] > 0)
        sum_R[handle] = 0
    for leaf in mem_leaves if len(handle_I) > 0 else mem_leaves[:0]:
        handle = np.int64(handle_I[leaf_item[leaf - leaf_offset]])
        if 0 <= handle < len(eligible_R) and eligible_R[handle]:
            entry = entry_of(handle, entries)
            if entry > 0:
                parents[count], mem[count] = entries.rows[entry, KEY], sum_L[leaf - leaf_offset]
                count += int(mem[count] > 0)
    order = in_order((parents[:count] << INDEX_BITS) + np.arange(count), leaf_offset << INDEX_BITS, INDEX_BITS) & LAST_INDEX
    return parents[:count][order], mem[:count][order]


@compiled()
def levels_above(
    leaves: Array,
    sum_L: Array,
    eligible_N: Array,
    excluded_X: Array,
    live_parents: Array,
    live_mem: Array,
    tree: tuple[Array, int, int],
    room: int,
) -> tuple[Array, Array]:
    """The nodes of the levels 1 … `height` with memory (int64, ascending) and their mem (float32). Sets `sum_L` to 0 again.

    leaves      ascending
    eligible_N  bool[N], or empty: all nodes are eligible
    excluded_X  leaves that are not eligible, ascending, padded at the end with −1
    live_parents, live_mem  parents of live leaves, ascending, repeats allowed, and these leaves' mem (float32, above 0)
    tree        parent, leaf_offset, height
    room        upper bound of the number of nodes
    """
    parent, leaf_offset, height = tree
    nodes, values = np.empty(room, np.int64), np.empty(room, np.float32)
    begin = room  # filled from the end: each level comes before the one below it
    x = len(excluded_X)
    while x > 0 and excluded_X[x - 1] < 0:
        x -= 1
    for i in range(len(leaves) - 1, -1, -1):
        leaf = leaves[i]
        mem = np.float32(sum_L[leaf - leaf_offset])
        sum_L[leaf - leaf_offset] = 0
        while x > 0 and excluded_X[x - 1] > leaf:
            x -= 1
        if (x > 0 and excluded_X[x - 1] == leaf) or (len(eligible_N) > 0 and not eligible_N[leaf]) or not mem > 0:
            continue
        begin -= 1
        nodes[begin], values[begin] = leaf, mem
    end = room
    for step in range(height - 1):
        below = begin
        last, largest = np.int64(-1), np.float32(0)
        if step == 0 and len(live_parents) > 0:
            i, j = end - 1, len(live_parents) - 1
            while i >= below or j >= 0:
                if j < 0 or (i >= below and parent[nodes[i]] >= live_parents[j]):
                    above, value = parent[nodes[i]], values[i]
                    i -= 1
                else:
                    above, value = live_parents[j], live_mem[j]
                    j -= 1
                largest = value if above != last or value > largest else largest
                begin -= int(above != last)
                nodes[begin], values[begin] = above, largest
                last = above
            end = below
            continue
        for i in range(end - 1, below - 1, -1):  # without a branch: which nodes share a parent cannot be predicted
            above, value = parent[nodes[i]], values[i]
            is_new = above != last
            largest = value if is_new or value > largest else largest
            begin -= int(is_new)
            nodes[begin], values[begin] = above, largest
            last = above
        end = below
    return nodes[begin:], values[begin:]
