"""The weights of linear scorers with live leaves in them.

Rows of parents without live leaves are copied as they are; those of the others are made anew from their entries.

Legend: P parents of leaves that have live ones, n live leaves, R rows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from espalier.chunks import Chunks
from espalier.live.folded_tree import FoldedTree
from espalier.live.overlay import SparsePool
from espalier.packed_chunks import rounded, widened
from espalier.tree import Tree

Array = NDArray[Any]
Int64 = NDArray[np.int64]


def folded_chunks(tree: Tree, chunks: Chunks, folded: FoldedTree, pool: SparsePool, place_X: Int64) -> Chunks:
    """The scorers of a folded tree.

    place_X  where the weights of each live leaf are in `pool`
    Weights are float16 where the bundle's are and no live weight loses by it, else float32.
    """
    leaf_n = np.flatnonzero(folded.live)
    place_n = place_X[-1 - folded.source[leaf_n]]
    bias = np.empty(folded.tree.node_count, np.float32)
    bias[: tree.leaf_offset] = chunks.bias[: tree.leaf_offset]
    of_leaves = bias[tree.leaf_offset :]
    of_leaves[~folded.live] = chunks.bias[tree.leaf_offset :][folded.source[~folded.live]]
    of_leaves[leaf_n] = pool.bias_P[place_n]
    parent_n = folded.tree.parent[leaf_n + tree.leaf_offset]
    child_n = leaf_n + tree.leaf_offset - folded.tree.first_child[parent_n]
    begin_n, end_n = pool.begin_P[place_n], pool.end_P[place_n]
    entries = spans(begin_n, end_n)
    new = np.repeat(parent_n, end_n - begin_n), pool.feature[entries], np.repeat(child_n, end_n - begin_n), pool.weight[entries]
    found = replace(_with_rows(widened(chunks), np.unique(parent_n), (parent_n, child_n), new), bias=bias)
    if chunks.entry_weight.dtype == np.float32:
        return found
    narrow = rounded(found)
    return found if narrow is None or not np.array_equal(narrow.entry_weight.astype(np.float32), found.entry_weight) else narrow


def _with_rows(chunks: Chunks, parent_P: Int64, gone: tuple[Int64, Int64], new: tuple[Array, Array, Array, Array]) -> Chunks:
    """The chunks with the rows of some parents (ascending) made anew: without the entries of some children, and with new ones.

    gone  parents and child numbers · new: parent, feature, child number and weight of each entry
    """
    row_begin, row_end = chunks.chunk_row[parent_P], chunks.chunk_row[parent_P + 1]
    rows = spans(row_begin, row_end)
    entries = spans(chunks.row_entry[rows], chunks.row_entry[rows + 1])
    size_R = chunks.row_entry[rows + 1] - chunks.row_entry[rows]
    parent = np.repeat(np.repeat(parent_P, row_end - row_begin), size_R)
    feature, child = np.repeat(chunks.row_feature[rows], size_R), chunks.entry_child[entries].astype(np.int64)
    most = 1 + int(max(gone[1].max(initial=0), child.max(initial=0)))
    kept = ~np.isin(parent * most + child, gone[0] * most + gone[1])
    columns = [np.append(old[kept], more) for old, more in zip((parent, feature, child, chunks.entry_weight[entries]), new, strict=True)]
    kept = columns[3] != 0  # a row holds weights that are not 0
    parent, feature, child, weight = (column[kept] for column in columns)
    order = np.lexsort((child, feature, parent))
    parent, feature, child, weight = parent[order], feature[order], child[order], weight[order]
    first = np.flatnonzero(np.append(True, (np.diff(parent) != 0) | (np.diff(feature) != 0))[: len(parent)])
    new_row = np.searchsorted(parent[first], parent_P), np.searchsorted(parent[first], parent_P, side="right")
    new_entry = tuple(np.append(first, len(parent))[place] for place in new_row)
    old_entry = chunks.row_entry[row_begin], chunks.row_entry[row_end]
    row_count = np.diff(chunks.chunk_row)
    row_count[parent_P] = new_row[1] - new_row[0]
    row_size = replaced(np.diff(chunks.row_entry), (row_begin, row_end), np.diff(np.append(first, len(parent))), new_row)
    return replace(
        chunks,
        chunk_row=np.append(0, np.cumsum(row_count)),
        row_feature=replaced(chunks.row_feature, (row_begin, row_end), feature[first].astype(np.int32), new_row),
        row_entry=np.append(0, np.cumsum(row_size)),
        entry_child=replaced(chunks.entry_child, old_entry, child.astype(np.uint16), new_entry),
        entry_weight=replaced(chunks.entry_weight, old_entry, weight.astype(np.float32), new_entry),
    )


def spans(begin: Int64, end: Int64) -> Int64:
    """begin[0] … end[0] − 1, begin[1] … end[1] − 1, …"""
    count = end - begin
    return np.asarray(np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count) + np.repeat(begin, count))


def replaced(old: Array, gone: tuple[Int64, ...], new: Array, coming: tuple[Int64, ...]) -> Array:
    """`old` with its spans `gone` (begins and ends, ascending) replaced by the spans `coming` of `new`."""
    pieces, at = [], 0
    for begin, end, new_begin, new_end in zip(*(ends.tolist() for ends in (*gone, *coming)), strict=True):
        pieces += [old[at:begin], new[new_begin:new_end]]
        at = end
    return np.concatenate([*pieces, old[at:]])
