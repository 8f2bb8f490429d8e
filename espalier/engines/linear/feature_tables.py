"""Linear node scorers with tables that find the weights of a feature for the children of a node.

There are two layouts. *By feature*, if a slot for every inner node and feature takes at most 64 MiB: each level has a slot for each feature
and node, with the nodes of a feature side by side, and their weights too. A query's features are read one after the other, each for all
nodes of the beam, so a wide beam reads contiguous memory. By node, every look-up waited for memory once the trees did not fit the cache.

*By node* otherwise: a table per node, direct-addressed if it needs at most 8 slots a row, else a hash table with open addressing. Weights
stay in the order of the bundle.

In both layouts, a row with weights for at least a quarter of the children is also stored densely, with a weight (maybe 0) for every child.
Adding it to the logits is then one vector operation.

Legend: P inner nodes, N nodes, R rows, F features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from espalier.arrays import Array, read_only
from espalier.chunks import Chunks
from espalier.compiled_code import compiled
from espalier.stored_numbers import stored
from espalier.tree import Tree

DIRECT_SLOTS = 8
"""Most slots per row of a direct-addressed table."""
DIRECT_BYTES = 64 << 20
"""Most memory of tables with a slot for every inner node and feature."""
DENSE_SHARE = 0.25
"""A row with weights for at least this share of a node's children is stored densely."""
ENTRY_COUNTS = 1 << 16
"""More than the entries of any row: a location is first entry · ENTRY_COUNTS + number of entries."""
NO_ROW = np.iinfo(np.int64).min


class FeatureTables(NamedTuple):
    """The scorers of a tree, as compiled code reads them. All arrays are read-only.

    first_child, chunk_row, row_feature, row_entry, bias   as in Tree and Chunks
    entry_child, entry_weight  as in Chunks; by feature: in that layout's order. A weight is stored as `stored_numbers` says
    table_from      int64[P + 1]  by node: where each node's slots begin; empty by feature, where the slots of a level begin at F times its
                                  first node
    is_direct       bool[P]       by node: whether the slots are addressed by the feature number, or by its hash
    slot_feature    int32[slots]  the feature in each slot of a hash table; empty if there is none
    slot_location   int64[slots]  of the feature's row: its entries (see ENTRY_COUNTS), −1 − its begin in dense_weight, or NO_ROW
    dense_weight    the dense rows
    root_T, last_T  int64[T]: the root of each tree, 0 for a single tree, and the level whose nodes are results
    slots_T         int64[T]: by feature, added to the position at which a tree's slots begin (`joined`)
    """

    first_child: Array
    chunk_row: Array
    row_feature: Array
    row_entry: Array
    entry_child: Array
    entry_weight: Array
    bias: Array
    table_from: Array
    is_direct: Array
    slot_feature: Array
    slot_location: Array
    dense_weight: Array
    root_T: Array
    last_T: Array
    slots_T: Array

    @staticmethod
    def of(tree: Tree, chunks: Chunks, last: int) -> FeatureTables:
        """The scorers with tables for the nodes above level `last`."""
        inner = int(tree.level_offset[last])
        rows_P, children_P = np.diff(chunks.chunk_row)[:inner], np.diff(tree.first_child)[:inner]
        is_dense_R, dense_rows_P = np.zeros(chunks.chunk_row[inner], np.bool_), np.zeros(inner, np.int64)
        shared = read_only(tree.first_child, chunks.chunk_row, chunks.row_feature, chunks.row_entry)
        _find_dense(shared, is_dense_R, dense_rows_P)
        weights = stored(chunks.entry_weight)
        dense_weight = np.zeros(int(dense_rows_P @ children_P), weights.dtype)
        children, bias = chunks.entry_child, chunks.bias
        if inner * chunks.width * 8 <= DIRECT_BYTES:
            entries = int(np.diff(chunks.row_entry[: len(is_dense_R) + 1])[~is_dense_R].sum())
            sparse_children, sparse_weights = np.empty(entries, np.uint16), np.empty(entries, weights.dtype)
            slot_location = np.full(inner * chunks.width, NO_ROW, np.int64)
            scorers = (*shared, *read_only(children, weights))
            out = sparse_children, sparse_weights, slot_location, dense_weight
            _fill_by_feature(scorers, read_only(tree.level_offset[: last + 1])[0], chunks.width, is_dense_R, out)
            table_from, is_direct, slot_feature = (np.empty(0, dtype) for dtype in (np.int64, np.bool_, np.int32))
            children, weights = sparse_children, sparse_weights
        else:
            is_direct = rows_P * DIRECT_SLOTS >= chunks.width
            hash_slots_P = 1 << np.ceil(np.log2(np.maximum(rows_P * 2, 2))).astype(np.int64)
            table_from = np.concatenate([[0], np.cumsum(np.where(is_direct, chunks.width, hash_slots_P))]).astype(np.int64)
            dense_from = np.concatenate([[0], np.cumsum(dense_rows_P * children_P)]).astype(np.int64)
            slot_feature = np.full(1 if is_direct.all() else table_from[-1], -1, np.int32)
            slot_location = np.full(table_from[-1], NO_ROW, np.int64)
            scorers = (*shared, *read_only(children, weights, table_from, is_direct))
            _fill_by_node(scorers, is_dense_R, dense_from, (slot_feature, slot_location, dense_weight))
        tables = read_only(children, weights, bias, table_from, is_direct, slot_feature, slot_location, dense_weight)
        zero = np.zeros(1, np.int64)
        return FeatureTables(*shared, *tables, *read_only(zero, np.full(1, last, np.int64), zero))

    @property
    def by_feature(self) -> bool:
        return len(self.table_from) == 0

    @staticmethod
    def joined(trees: Sequence[FeatureTables], width: int) -> FeatureTables:
        """Several trees' tables by feature as one, with nodes numbered tree after tree. width: F."""
        nodes, slots, entries, dense = (
            np.concatenate([[0], np.cumsum([len(getattr(tree, name)) for tree in trees])])
            for name in ("bias", "slot_location", "entry_child", "dense_weight")
        )
        first_child = [tree.first_child[:-1] + base for tree, base in zip(trees, nodes, strict=False)]
        locations = []
        for tree, entry, number in zip(trees, entries, dense, strict=False):
            shifted = np.where(tree.slot_location >= 0, tree.slot_location + entry * ENTRY_COUNTS, tree.slot_location - number)
            locations.append(np.where(tree.slot_location == NO_ROW, NO_ROW, shifted))
        arrays = {
            "first_child": np.concatenate([*first_child, nodes[-1:]]),
            "slot_location": np.concatenate(locations),
            "root_T": nodes[:-1],
            "last_T": np.concatenate([tree.last_T for tree in trees]),
            "slots_T": slots[:-1] - nodes[:-1] * width,
        }
        arrays |= {
            name: np.concatenate([getattr(tree, name) for tree in trees])
            for name in ("entry_child", "entry_weight", "bias", "dense_weight")
        }
        return trees[0]._replace(**dict(zip(arrays, read_only(*arrays.values()), strict=True)))


@compiled()
def slot_of(feature: int, size: int) -> Any:
    """The first slot to probe for a feature in a hash table of 2^n slots (Fibonacci hashing)."""
    return np.int64((np.uint64(feature) * np.uint64(11400714819323198485)) >> np.uint64(32)) & (size - 1)


@compiled()
def _find_dense(shared: tuple[Array, ...], is_dense_R: Array, dense_rows_P: Array) -> None:
    """Write which rows are stored densely, and how many of them each node has."""
    first_child, chunk_row, _, row_entry = shared
    for p in range(len(dense_rows_P)):
        least = DENSE_SHARE * (first_child[p + 1] - first_child[p])
        for row in range(chunk_row[p], chunk_row[p + 1]):
            is_dense_R[row] = row_entry[row + 1] - row_entry[row] >= least
            dense_rows_P[p] += is_dense_R[row]


@compiled()
def _fill_by_feature(scorers: tuple[Array, ...], level_offset: Array, width: int, is_dense_R: Array, out: tuple[Array, ...]) -> None:
    """Write slots, entries and dense rows, level by level and feature by feature.

    out  entry_child, entry_weight, slot_location, dense_weight
    """
    first_child, chunk_row, row_feature, row_entry, entry_child, entry_weight = scorers
    sparse_child, sparse_weight, slot_location, dense_weight = out
    entry_F, dense_F = np.empty(width, np.int64), np.empty(width, np.int64)
    entries, numbers = 0, 0
    for level in range(len(level_offset) - 1):
        begin, end = level_offset[level], level_offset[level + 1]
        entry_F[:], dense_F[:] = 0, 0
        for p in range(begin, end):  # count each feature's entries and dense numbers
            for row in range(chunk_row[p], chunk_row[p + 1]):
                if is_dense_R[row]:
                    dense_F[row_feature[row]] += first_child[p + 1] - first_child[p]
                else:
                    entry_F[row_feature[row]] += row_entry[row + 1] - row_entry[row]
        for feature in range(width):  # turn the counts into offsets
            entries, entry_F[feature] = entries + entry_F[feature], entries
            numbers, dense_F[feature] = numbers + dense_F[feature], numbers
        for p in range(begin, end):
            for row in range(chunk_row[p], chunk_row[p + 1]):
                feature, first, count = row_feature[row], row_entry[row], row_entry[row + 1] - row_entry[row]
                if is_dense_R[row]:
                    target = dense_F[feature]
                    for e in range(first, first + count):
                        dense_weight[target + entry_child[e]] = entry_weight[e]
                    location = -1 - target
                    dense_F[feature] += first_child[p + 1] - first_child[p]
                else:
                    target = entry_F[feature]
                    for e in range(count):
                        sparse_child[target + e], sparse_weight[target + e] = entry_child[first + e], entry_weight[first + e]
                    location = target * ENTRY_COUNTS + count
                    entry_F[feature] += count
                slot_location[begin * width + feature * (end - begin) + p - begin] = location


@compiled()
def _fill_by_node(scorers: tuple[Array, ...], is_dense_R: Array, dense_from: Array, out: tuple[Array, ...]) -> None:
    """Write the slots and the dense rows, node by node.

    out  slot_feature, slot_location, dense_weight
    """
    first_child, chunk_row, row_feature, row_entry, entry_child, entry_weight, table_from, is_direct = scorers
    slot_feature, slot_location, dense_weight = out
    for p in range(len(is_direct)):
        start, size = table_from[p], table_from[p + 1] - table_from[p]
        children, dense_rows = first_child[p + 1] - first_child[p], 0
        for row in range(chunk_row[p], chunk_row[p + 1]):
            feature, first, end = row_feature[row], row_entry[row], row_entry[row + 1]
            location = first * ENTRY_COUNTS + end - first
            if is_dense_R[row]:
                begin = dense_from[p] + dense_rows * children
                for e in range(first, end):
                    dense_weight[begin + entry_child[e]] = entry_weight[e]
                location = -1 - begin
                dense_rows += 1
            slot = feature
            if not is_direct[p]:
                slot = slot_of(feature, size)
                while slot_location[start + slot] != NO_ROW:
                    slot = (slot + 1) & (size - 1)
                slot_feature[start + slot] = feature
            slot_location[start + slot] = location
