"""The nodes that a memory lifts, for histories: sums over a history's items at the leaves, and their maxima above.

The one function for all engines but the reference, which shares no code. Knows nothing of ranks or beams.

Legend: B queries, T history, L leaves, N nodes, X nodes of a query's list.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from espalier.compiled_code import compiled
from espalier.masks.eligibility import EligibleNodes
from espalier.memory import Memory
from espalier.read_only import read_only
from espalier.tree import Tree

Array = NDArray[Any]
EVERY_NODE, NO_NODES, NO_VALUES = read_only(np.empty(0, np.bool_), np.empty(0, np.int64), np.empty(0, np.float32))
"""For compiled code: no mask, no list."""


@dataclass(frozen=True, eq=False)
class MemoryLists:
    """The nodes of the levels 1 … H that have memory, for each query of a batch; every other node has mem 0.

    offset_B  int64[B + 1]: query b's nodes are offset_B[b] … offset_B[b + 1] − 1
    nodes     int64, ascending for each query
    values    float32: their mem, above 0
    """

    offset_B: NDArray[np.int64]
    nodes: NDArray[np.int64]
    values: NDArray[np.float32]

    def take(self, queries: NDArray[np.int64]) -> MemoryLists:
        """Those of some queries (int64 positions)."""
        if len(self.offset_B) == 2 and len(queries) == 1:
            return self
        parts = [self.of(b) for b in queries.tolist()]
        offset_B = np.append(0, np.cumsum([len(nodes) for nodes, _ in parts])).astype(np.int64)
        nodes, values = zip((NO_NODES, np.empty(0, np.float32)), *parts, strict=True)
        return MemoryLists(offset_B, np.concatenate(nodes), np.concatenate(values))

    def padded(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """int64[B, X] and float32[B, X], X ≥ 1: the root, which is never a candidate, and 0 as padding."""
        count_B = np.diff(self.offset_B)
        if len(count_B) == 1 and len(self.nodes):
            return self.nodes[None], self.values[None]
        shape = len(count_B), max(1, int(count_B.max(initial=0)))
        nodes_BX, values_BX = np.zeros(shape, np.int64), np.zeros(shape, np.float32)
        slot = np.arange(len(self.nodes)) - np.repeat(self.offset_B[:-1], count_B)
        query = np.repeat(np.arange(len(count_B)), count_B)
        nodes_BX[query, slot], values_BX[query, slot] = self.nodes, self.values
        return nodes_BX, values_BX

    def of(self, b: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The nodes and values of query b."""
        mine = slice(int(self.offset_B[b]), int(self.offset_B[b + 1]))
        return self.nodes[mine], self.values[mine]


class MemoryLookup(Protocol):
    """What an engine asks for the nodes with memory; it takes another in place of its own, see `espalier.live.memory`."""

    @property
    def item_count(self) -> int:
        """Item rows of histories must be below this."""
        ...

    def lists(self, history_BT: Array, eligible: EligibleNodes) -> MemoryLists:
        """The nodes with memory for histories of item rows (int64[B, T], −1: no item, the last item last).

        eligible  what each query may visit: memory of other leaves does not count
        """
        ...


class MemoryTree:
    """A memory on its tree: makes the lists of histories. Used by any number of threads."""

    def __init__(self, memory: Memory, tree: Tree) -> None:
        self._entries = read_only(memory.offset, memory.item, memory.value, memory.weight)
        self._leaf_of_item, self._parent = read_only(tree.leaf_of_item, tree.parent)
        self._leaf_offset, self._height = tree.leaf_offset, tree.height
        self._sizes = np.diff(tree.level_offset)[1:]
        self._own = threading.local()  # float64[#leaves], all 0 between calls

    @property
    def item_count(self) -> int:
        return len(self._leaf_of_item)

    def lists(self, history_BT: Array, eligible: EligibleNodes) -> MemoryLists:
        """See `MemoryLookup`."""
        sum_L = getattr(self._own, "sum_L", None)
        if sum_L is None:
            sum_L = self._own.sum_L = np.zeros(int(self._sizes[-1]))
        offset, item, value, weight = self._entries
        nodes, values, offset_B = [], [], np.zeros(len(history_BT) + 1, np.int64)
        for b, history_T in enumerate(history_BT):
            (own_T,) = read_only(history_T)
            leaves = leaf_sums(own_T, offset, item, value, weight, self._leaf_of_item, self._leaf_offset, sum_L)
            leaves.sort()
            mask = eligible.mask_B[b]
            excluded_X = NO_NODES if eligible.excluded is None else read_only(eligible.excluded.leaves_BX[b])[0]
            eligible_N = EVERY_NODE if mask is None else read_only(mask.eligible_N)[0]
            room = int(np.minimum(len(leaves), self._sizes).sum())
            tree = self._parent, self._leaf_offset, self._height
            own, mem = levels_above(leaves, sum_L, eligible_N, excluded_X, NO_NODES, NO_VALUES, tree, room)
            nodes.append(own)
            values.append(mem)
            offset_B[b + 1] = offset_B[b] + len(own)
        if len(nodes) == 1:
            return MemoryLists(offset_B, nodes[0], values[0])
        return MemoryLists(offset_B, np.concatenate([NO_NODES, *nodes]), np.concatenate([np.empty(0, np.float32), *values]))


@compiled()
def leaf_sums(
    history_T: Array, offset: Array, item: Array, value: Array, weight: Array, leaf_of_item: Array, leaf_offset: int, sum_L: Array
) -> Array:
    """int64: the leaves with memory, in no order; mem is added up in `sum_L` (float64[#leaves], 0 before), in the order d = 0, 1, …"""
    total, d = 0, 0
    for t in range(len(history_T) - 1, -1, -1):
        a = history_T[t]
        if a >= 0 and d < len(weight):
            total += offset[a + 1] - offset[a]
            d += 1
    leaves = np.empty(min(total, len(sum_L)), np.int64)
    count, d = 0, 0
    for t in range(len(history_T) - 1, -1, -1):
        a = history_T[t]
        if a < 0:
            continue
        if d == len(weight):
            break
        for e in range(offset[a], offset[a + 1]):
            part = np.float64(weight[d]) * np.float64(value[e])
            if part > 0:
                leaf = leaf_of_item[item[e]]
                if sum_L[leaf - leaf_offset] == 0:
                    leaves[count] = leaf
                    count += 1
                sum_L[leaf - leaf_offset] += part
        d += 1
    return leaves[:count]


@compiled()
def levels_above(
    leaves: Array,
    sum_L: Array,
    eligible_N: Array,
    excluded_X: Array,
    others: Array,
    others_mem: Array,
    tree: tuple[Array, int, int],
    room: int,
) -> tuple[Array, Array]:
    """The nodes of the levels 1 … `height` with memory (int64, ascending) and their mem (float32); `sum_L` is 0 again afterwards.

    leaves      ascending
    eligible_N  bool[N], or empty: all nodes are eligible
    excluded_X  leaves that are not eligible, ascending, −1 as padding behind
    others      nodes above leaves, ascending, repeats allowed, that have memory (others_mem, float32, above 0) from elsewhere too
    tree        parent, leaf_offset, height
    room        at least as many as there can be
    """
    parent, leaf_offset, height = tree
    nodes, values = np.empty(room, np.int64), np.empty(room, np.float32)
    begin = room  # filled from the end: each level stands before the one below it
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
        last, most = np.int64(-1), np.float32(0)
        if step == 0 and len(others) > 0:
            i, j = end - 1, len(others) - 1
            while i >= below or j >= 0:
                if j < 0 or (i >= below and parent[nodes[i]] >= others[j]):
                    above, value = parent[nodes[i]], values[i]
                    i -= 1
                else:
                    above, value = others[j], others_mem[j]
                    j -= 1
                most = value if above != last or value > most else most
                begin -= int(above != last)
                nodes[begin], values[begin] = above, most
                last = above
            end = below
            continue
        for i in range(end - 1, below - 1, -1):  # without a branch: which nodes share a parent cannot be predicted
            above, value = parent[nodes[i]], values[i]
            is_new = above != last
            most = value if is_new or value > most else most
            begin -= int(is_new)
            nodes[begin], values[begin] = above, most
            last = above
        end = below
    return nodes[begin:], values[begin:]
