"""A tree with live leaves in it, and the weights of linear scorers for it.

Inner levels stay. A live leaf at the slot of a trained leaf replaces it; that leaf must be vacant. Other live leaves follow the trained
children of their parent, in ascending order of slots. So all leaves are in the order of (parent, slot).

Rows of parents without live leaves are copied. Rows of the other parents are rebuilt from their entries.

Legend: N nodes, I items of the bundle, P parents with live leaves, n live leaves, R rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from espalier.arrays import Array, Bool, Int64
from espalier.chunks import Chunks
from espalier.errors import InvalidData
from espalier.live.overlay import SparsePool
from espalier.packed_chunks import rounded, widened
from espalier.stored_arrays import spans
from espalier.tree import EMPTY_LEAF, Tree, tree_from_children


@dataclass(frozen=True, eq=False)
class FoldedTree:
    """A tree, and the origin of each of its leaves.

    source  int64[#leaves]: the number of a trained leaf, counted from the first one, or −1 − k for the k-th live leaf
    """

    tree: Tree
    source: Int64

    @property
    def live(self) -> Bool:
        """bool[#leaves]: which leaves are live."""
        return self.source < 0


def folded_tree(tree: Tree, row_I: Int64, parent_n: Int64, slot_n: Int64, row_n: Int64) -> FoldedTree:
    """The tree with live leaves at their slots.

    row_I     each trained item's row in the fold; −1 where its leaf becomes vacant
    parent_n  nodes of the level above the leaves · slot_n: positions among their children · row_n: the live leaves' item rows

    Raises InvalidData for a live leaf whose parent has no leaves, or whose slot is occupied.
    """
    span = tree.level(tree.height - 1)
    outside = np.flatnonzero((parent_n < span.start) | (parent_n >= span.stop) | (slot_n < 0))
    if len(outside):
        k = int(outside[0])
        expected = f"a parent from {span.start} to {span.stop - 1} and a slot of at least 0"
        raise InvalidData("placement", f"parent {parent_n[k]}, slot {slot_n[k]}", expected)
    leaf_item = np.append(row_I, EMPTY_LEAF)[tree.leaf_item]  # EMPTY_LEAF is −1, the index of the last
    source = np.arange(tree.leaf_count)
    count_n = tree.first_child[parent_n + 1] - tree.first_child[parent_n]
    inside = np.flatnonzero(slot_n < count_n)
    at = tree.first_child[parent_n[inside]] - tree.leaf_offset + slot_n[inside]
    occupied = np.flatnonzero(leaf_item[at] != EMPTY_LEAF)
    order = np.lexsort((slot_n, parent_n))
    repeated = np.flatnonzero((np.diff(parent_n[order]) == 0) & (np.diff(slot_n[order]) == 0))
    if len(occupied) or len(repeated):
        k = int(inside[occupied[0]]) if len(occupied) else int(order[repeated[0]])
        raise InvalidData("placement", f"parent {parent_n[k]}, slot {slot_n[k]}", "a slot that no other leaf has")
    leaf_item[at], source[at] = row_n[inside], -1 - inside
    behind = order[slot_n[order] >= count_n[order]]
    end = tree.first_child[parent_n[behind] + 1] - tree.leaf_offset
    counts = [np.diff(tree.first_child[tree.level(h).start : tree.level(h).stop + 1]) for h in range(tree.height)]
    counts[-1] = counts[-1] + np.bincount(parent_n[behind] - span.start, minlength=len(span))
    return FoldedTree(tree_from_children(counts, np.insert(leaf_item, end, row_n[behind])), np.insert(source, end, -1 - behind))


def folded_chunks(tree: Tree, chunks: Chunks, folded: FoldedTree, pool: SparsePool, entry_X: Int64) -> Chunks:
    """The scorers of a folded tree.

    entry_X  entry in `pool` of each live leaf's weights
    Weights are float16 if the bundle's are and float16 holds every live weight exactly, else float32.
    """
    leaf_n = np.flatnonzero(folded.live)
    entry_n = entry_X[-1 - folded.source[leaf_n]]
    bias = np.empty(folded.tree.node_count, np.float32)
    bias[: tree.leaf_offset] = chunks.bias[: tree.leaf_offset]
    leaf_bias = bias[tree.leaf_offset :]
    leaf_bias[~folded.live] = chunks.bias[tree.leaf_offset :][folded.source[~folded.live]]
    leaf_bias[leaf_n] = pool.bias_P[entry_n]
    parent_n = folded.tree.parent[leaf_n + tree.leaf_offset]
    child_n = leaf_n + tree.leaf_offset - folded.tree.first_child[parent_n]
    begin_n, end_n = pool.begin_P[entry_n], pool.end_P[entry_n]
    entries = spans(begin_n, end_n)
    new = np.repeat(parent_n, end_n - begin_n), pool.feature[entries], np.repeat(child_n, end_n - begin_n), pool.weight[entries]
    wide = replace(_with_rows(widened(chunks), np.unique(parent_n), (parent_n, child_n), new), bias=bias)
    if chunks.entry_weight.dtype == np.float32:
        return wide
    narrow = rounded(wide)
    return wide if narrow is None or not np.array_equal(narrow.entry_weight.astype(np.float32), wide.entry_weight) else narrow


def _with_rows(chunks: Chunks, parent_P: Int64, gone: tuple[Int64, Int64], new: tuple[Array, Array, Array, Array]) -> Chunks:
    """The chunks with the rows of some parents (ascending) rebuilt: without the entries of some children, and with new entries.

    gone  parents and numbers of the children · new: parent, feature, child number and weight of each entry
    """
    row_begin, row_end = chunks.chunk_row[parent_P], chunks.chunk_row[parent_P + 1]
    rows = spans(row_begin, row_end)
    entries = spans(chunks.row_entry[rows], chunks.row_entry[rows + 1])
    size_R = chunks.row_entry[rows + 1] - chunks.row_entry[rows]
    parent = np.repeat(np.repeat(parent_P, row_end - row_begin), size_R)
    feature, child = np.repeat(chunks.row_feature[rows], size_R), chunks.entry_child[entries].astype(np.int64)
    most = 1 + int(max(gone[1].max(initial=0), child.max(initial=0)))
    stays = ~np.isin(parent * most + child, gone[0] * most + gone[1])
    columns = [np.append(old[stays], more) for old, more in zip((parent, feature, child, chunks.entry_weight[entries]), new, strict=True)]
    is_nonzero = columns[3] != 0  # chunks hold no weight of 0
    parent, feature, child, weight = (column[is_nonzero] for column in columns)
    order = np.lexsort((child, feature, parent))
    parent, feature, child, weight = parent[order], feature[order], child[order], weight[order]
    first = np.flatnonzero(np.append(True, (np.diff(parent) != 0) | (np.diff(feature) != 0))[: len(parent)])
    new_row = np.searchsorted(parent[first], parent_P), np.searchsorted(parent[first], parent_P, side="right")
    new_entry = tuple(np.append(first, len(parent))[row] for row in new_row)
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


def replaced(old: Array, old_spans: tuple[Int64, ...], new: Array, new_spans: tuple[Int64, ...]) -> Array:
    """`old` with its spans `old_spans` (begins and ends, ascending) replaced by the spans `new_spans` of `new`."""
    pieces, at = [], 0
    for begin, end, new_begin, new_end in zip(*(ends.tolist() for ends in (*old_spans, *new_spans)), strict=True):
        pieces += [old[at:begin], new[new_begin:new_end]]
        at = end
    return np.concatenate([*pieces, old[at:]])
