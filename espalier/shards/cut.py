"""Writes a shard of a bundle: an ordinary bundle of some subtrees with their items.

A shard holds all ancestors of its items, so items have the same ranks as in the whole bundle. Its memory keeps the entries of every item,
since histories may hold any item. The parts that need all items stay with the whole bundle: the query encoder, the re-ranker, the stacker,
the content graph, held-out queries and the network's weights. Golden queries are not answered here: see training/shard.

Legend: N nodes and I items of the bundle that is cut; n nodes, i items and p inner nodes of a shard; r rows and e entries of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from espalier.arrays import Array, Int64
from espalier.bundle import Bundle
from espalier.bundle_files import Gathered, sha256_of
from espalier.bundle_writer import GraphContent, LinearContent, write_bundle
from espalier.chunks import Chunks, TreeChunks
from espalier.errors import BundleCorrupt
from espalier.live.fold import content_of
from espalier.manifest import ManifestDraft, ShardInfo
from espalier.memory import Memory
from espalier.packed_chunks import narrowed
from espalier.shard_parts import ShardParts
from espalier.shards.layout import node_shards, nodes_above_items, shard_items, with_ancestors
from espalier.stored_arrays import row_blocks, spans
from espalier.tail import Tail
from espalier.tree import EMPTY_LEAF, Tree

BLOCK = 1 << 20
"""Entries that are processed at a time."""


class Cut:
    """How a bundle is cut into `count` shards.

    bundle  a whole bundle, or the only shard of one: it has all items
    Raises InvalidConfig if the tree has too few subtrees, BundleCorrupt if the bundle is one of several shards.
    """

    def __init__(self, bundle: Bundle, count: int) -> None:
        shard = bundle.manifest.shard
        if shard is not None and shard.count > 1:
            raise BundleCorrupt(f"{bundle.path}: shard {shard.index} of {shard.count}, expected a bundle of all items")
        self.bundle, self.count = bundle, count
        self._shard_N = node_shards(bundle.tree, count)
        self._items = shard_items(bundle.tree, count)

    def info(self, index: int) -> ShardInfo:
        """The manifest's entry for a shard."""
        return ShardInfo(**self._whole | {"index": index, "count": self.count})

    @cached_property
    def _whole(self) -> dict[str, Any]:
        """The fields of that entry that all shards share: which bundle was cut."""
        manifest = self.bundle.manifest
        if manifest.shard is not None:
            return manifest.shard.model_dump()
        digest, tree = sha256_of(self.bundle.path / "manifest.json"), manifest.tree
        return {"of": manifest.name, "version": manifest.version, "digest": digest, "items": tree.items, "nodes": tree.nodes}

    def _rows_in_bundle(self, index: int) -> ShardParts:
        """The items and nodes of a shard, by their rows and numbers in the bundle that is cut, which may be a shard itself."""
        items = self._items[index]
        first, *others = (alone.tree for alone in self.bundle.alone)
        nodes = (nodes_above_items(tree, items, vacant=index == 0) for tree in others)
        return ShardParts(items, (with_ancestors(first, self._shard_N == index), *nodes))

    def parts(self, index: int) -> ShardParts:
        """The items and nodes of a shard, by their rows and numbers in the whole bundle."""
        shard_rows, bundle_rows = self._rows_in_bundle(index), self.bundle.shard
        if bundle_rows is None:
            return shard_rows
        nodes = tuple(numbers[nodes] for numbers, nodes in zip(bundle_rows.nodes, shard_rows.nodes, strict=True))
        return ShardParts(bundle_rows.items[shard_rows.items], nodes)

    def write(self, path: Path, index: int) -> Bundle:
        """Write a shard to `path`, …/<index>/<version>, without golden queries. Raises as `write_bundle`."""
        return write_bundle(path, self._draft(index), self._content(index), check_padding=False)

    def _draft(self, index: int) -> ManifestDraft:
        fields = {name: getattr(self.bundle.manifest, name) for name in ManifestDraft.model_fields}
        changes = {"name": str(index), "created": datetime.now(UTC), "metrics": {}, "live": None, "shard": self.info(index)}
        return ManifestDraft(**fields | changes)

    def _content(self, index: int) -> GraphContent | LinearContent:
        """The content of a shard; node rows are gathered while they are written."""
        shard_rows, content = self._rows_in_bundle(index), content_of(self.bundle)
        items, heldout = content.items.take(shard_rows.items), content.heldout.slice(0, 0)
        content = replace(content, items=items, heldout=heldout, shard=self.parts(index))
        if isinstance(content, GraphContent):
            (nodes,) = shard_rows.nodes
            memory = None if content.memory is None else cut_memory(content.memory, shard_rows.items)
            stored = Gathered([self.bundle.stored_rows], None, nodes)
            tree = cut_tree(content.tree, nodes, shard_rows.items)
            return replace(content, tree=tree, stored_rows=stored, memory=memory, weights={}, content=None, counts=None)
        (tree, chunks), *others = (self._chunks(tree_index, shard_rows) for tree_index in range(len(shard_rows.nodes)))
        tail = None if content.tail is None else cut_tail(content.tail, shard_rows.items)
        return replace(content, tree=tree, chunks=chunks, others=others, tail=tail, stacking=None, counts=None)

    def _chunks(self, tree_index: int, shard_rows: ShardParts) -> TreeChunks:
        tree, chunks = self.bundle.trees[tree_index]
        nodes = shard_rows.nodes[tree_index]
        return TreeChunks(cut_tree(tree, nodes, shard_rows.items), cut_chunks(tree, chunks, nodes))


# -- the tables of a bundle: tree, memory, weights of linear scorers, tail ----------------------------------------------------


def new_numbers(kept_numbers: Int64, count: int) -> Int64:
    """int64[count]: the shard's number of each of the whole bundle's `count` numbers; −1 for those not in `kept_numbers` (ascending)."""
    numbers = np.full(count, -1, np.int64)
    numbers[kept_numbers] = np.arange(len(kept_numbers))
    return numbers


def cut_tree(tree: Tree, node_n: Int64, item_i: Int64) -> Tree:
    """The tree of some leaves and all their ancestors (`node_n`), over the items of these leaves (`item_i`)."""
    level_offset = np.searchsorted(node_n, tree.level_offset)
    leaf = node_n[level_offset[-2] :] - tree.leaf_offset
    row_I = np.append(new_numbers(item_i, tree.item_count), EMPTY_LEAF)  # EMPTY_LEAF, −1, indexes the last entry
    first_child = np.append(np.searchsorted(node_n, tree.first_child[node_n]), len(node_n))
    return Tree(level_offset, first_child, row_I[tree.leaf_item[leaf]])


def cut_memory(memory: Memory, item_i: Int64) -> Memory:
    """The memory of every item of the whole bundle, with only those entries that lead to some items."""
    row_I = new_numbers(item_i, len(memory.offset) - 1).astype(np.int32)
    counts, items, values = [np.zeros(1, np.int64)], [np.empty(0, np.int32)], [np.empty(0, np.float16)]
    for first, end in row_blocks(memory.offset, BLOCK):
        begin = memory.offset[first : end + 1]
        rows = row_I[memory.item[begin[0] : begin[-1]]]
        in_shard = rows >= 0
        counts.append(np.diff(np.append(0, np.cumsum(in_shard))[begin - begin[0]]))
        items.append(rows[in_shard])
        values.append(memory.value[begin[0] : begin[-1]][in_shard])
    offset = np.cumsum(np.concatenate(counts))
    return replace(memory, offset=offset, item=np.concatenate(items), value=np.concatenate(values))


def cut_tail(tail: Tail, item_i: Int64) -> Tail:
    """The rows of some items."""
    begin, end = tail.row_begin[item_i], tail.row_begin[item_i + 1]
    entries = spans(begin, end)
    info = tail.info.model_copy(update={"entries": len(entries)})
    return Tail(info, np.append(0, np.cumsum(end - begin)), tail.feature[entries], tail.value[entries], tail.width)


def cut_chunks(tree: Tree, chunks: Chunks, node_n: Int64) -> Chunks:
    """The weights of some nodes (ascending, all their ancestors among them). Rows without a weight are dropped."""
    number_N = new_numbers(node_n, tree.node_count)
    parent_p = node_n[: np.searchsorted(node_n, tree.leaf_offset)]
    first_p = np.searchsorted(node_n, tree.first_child[parent_p])
    row_begin, row_end = chunks.chunk_row[parent_p], chunks.chunk_row[parent_p + 1]
    size_p = chunks.row_entry[row_end] - chunks.row_entry[row_begin]
    rows_p = np.zeros(len(parent_p), np.int64)
    tables: list[tuple[Array, ...]] = [(np.empty(0, np.int32), np.empty(0, np.int64), chunks.entry_child[:0], chunks.entry_weight[:0])]
    for block in blocks(size_p + row_end - row_begin):
        rows = spans(row_begin[block], row_end[block])
        entries_r = chunks.row_entry[rows + 1] - chunks.row_entry[rows]
        entries = spans(chunks.row_entry[rows], chunks.row_entry[rows + 1])
        parent_r = np.repeat(np.arange(block.start, block.stop), row_end[block] - row_begin[block])
        parent_e, row_e = np.repeat(parent_r, entries_r), np.repeat(np.arange(len(rows)), entries_r)
        node_e = number_N[tree.first_child[parent_p[parent_e]] + chunks.entry_child[entries]]
        kept_e = node_e >= 0
        count_r = np.bincount(row_e[kept_e], minlength=len(rows))
        kept_r = count_r > 0
        rows_p[block] = np.bincount(parent_r[kept_r] - block.start, minlength=block.stop - block.start)
        child = (node_e - first_p[parent_e])[kept_e].astype(chunks.entry_child.dtype)
        tables.append((chunks.row_feature[rows[kept_r]], count_r[kept_r], child, chunks.entry_weight[entries[kept_e]]))
    row_feature, count, child, weight = (np.concatenate(arrays) for arrays in zip(*tables, strict=True))
    return Chunks(
        chunk_row=np.append(0, np.cumsum(rows_p)),
        row_feature=row_feature,
        row_entry=np.append(0, np.cumsum(count)),
        entry_child=narrowed(child) if weight.dtype == np.float16 else child,
        entry_weight=weight,
        bias=chunks.bias[node_n],
        width=chunks.width,
    )


def blocks(sizes: Int64) -> Iterator[slice]:
    """Consecutive positions that are processed together: at most BLOCK entries (`sizes`), or one position with more."""
    return (slice(*block) for block in row_blocks(np.append(0, np.cumsum(sizes)), BLOCK))
