"""Linear node scorers with a table per inner node that finds the row of a feature.

A table is direct-addressed if it needs at most 8 slots a row, or if all tables fit in 64 MiB when they are direct-addressed; otherwise
it is a hash table with open addressing. A row with weights for at least a quarter of the children is also stored densely, with a weight
(maybe 0) for every child: adding it to the logits is then one vector operation.

Legend: P inner nodes, N nodes, R rows, F features.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from espalier.chunks import Chunks
from espalier.compiled_code import compiled
from espalier.read_only import read_only
from espalier.tree import Tree

Array = NDArray[Any]
DIRECT_SLOTS = 8
"""Slots per row up to which a table is direct-addressed."""
DIRECT_BYTES = 64 << 20
"""Memory up to which all tables are direct-addressed."""
DENSE_SHARE = 0.25
"""Share of a node's children from which on a row is stored densely."""
ENTRY_COUNTS = 1 << 16
"""More than the entries of any row: a location is first entry · ENTRY_COUNTS + number of entries."""
NO_ROW = np.iinfo(np.int64).min


class FeatureTables(NamedTuple):
    """The scorers of a tree, as compiled code reads them. All arrays are read-only.

    first_child, chunk_row … bias   as Tree and Chunks have them
    table_from      int64[P + 1]  where each node's slots begin
    is_direct       bool[P]       whether the slots are addressed by the feature number, or by its hash
    slot_feature    int32[slots]  the feature in each slot of a hash table; empty if all tables are direct-addressed
    slot_location   int64[slots]  of the feature's row: its entries (see ENTRY_COUNTS), −1 − its begin in dense_weight, or NO_ROW
    dense_weight    float32[…]    the dense rows
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

    @staticmethod
    def of(tree: Tree, chunks: Chunks, inner: int) -> FeatureTables:
        """The scorers with tables for the first `inner` nodes."""
        rows_P, children_P = np.diff(chunks.chunk_row)[:inner], np.diff(tree.first_child)[:inner]
        is_direct = rows_P * DIRECT_SLOTS >= chunks.width
        if inner * chunks.width * 8 <= DIRECT_BYTES:
            is_direct[:] = True
        hash_slots_P = 1 << np.ceil(np.log2(np.maximum(rows_P * 2, 2))).astype(np.int64)
        table_from = np.concatenate([[0], np.cumsum(np.where(is_direct, chunks.width, hash_slots_P))]).astype(np.int64)
        is_dense_R = np.diff(chunks.row_entry)[: chunks.chunk_row[inner]] >= DENSE_SHARE * np.repeat(children_P, rows_P)
        dense_rows_P = np.add.reduceat(np.append(is_dense_R, False), chunks.chunk_row[:inner]) * (rows_P > 0)
        dense_from = np.concatenate([[0], np.cumsum(dense_rows_P * children_P)]).astype(np.int64)
        slot_feature = np.full(1 if is_direct.all() else table_from[-1], -1, np.int32)
        slot_location = np.full(table_from[-1], NO_ROW, np.int64)
        dense_weight = np.zeros(dense_from[-1], np.float32)
        given = (tree.first_child, chunks.chunk_row, chunks.row_feature, chunks.row_entry, chunks.entry_child, chunks.entry_weight)
        scorers = read_only(*given, chunks.bias, table_from, is_direct)
        empty = FeatureTables(*(*scorers, slot_feature, slot_location, dense_weight))
        _fill(empty, is_dense_R, dense_from)
        return FeatureTables(*read_only(*empty))


@compiled()
def slot_of(feature: int, size: int) -> Any:
    """Where the search for a feature begins in a hash table of 2^n slots (Fibonacci hashing)."""
    return np.int64((np.uint64(feature) * np.uint64(11400714819323198485)) >> np.uint64(32)) & (size - 1)


@compiled()
def _fill(tables: FeatureTables, is_dense_R: Array, dense_from: Array) -> None:
    """Write the slots and the dense rows."""
    for p in range(len(tables.is_direct)):
        start, size = tables.table_from[p], tables.table_from[p + 1] - tables.table_from[p]
        children, dense_rows = tables.first_child[p + 1] - tables.first_child[p], 0
        for row in range(tables.chunk_row[p], tables.chunk_row[p + 1]):
            feature, first, end = tables.row_feature[row], tables.row_entry[row], tables.row_entry[row + 1]
            location = first * ENTRY_COUNTS + end - first
            if is_dense_R[row]:
                begin = dense_from[p] + dense_rows * children
                for e in range(first, end):
                    tables.dense_weight[begin + tables.entry_child[e]] = tables.entry_weight[e]
                location = -1 - begin
                dense_rows += 1
            slot = feature
            if not tables.is_direct[p]:
                slot = slot_of(feature, size)
                while tables.slot_location[start + slot] != NO_ROW:
                    slot = (slot + 1) & (size - 1)
                tables.slot_feature[start + slot] = feature
            tables.slot_location[start + slot] = location
