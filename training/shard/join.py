"""Joins the shards of a bundle into one bundle with a single shard, which can be cut anew.

Rows of its tables have their numbers of the whole bundle. The other trees of a forest have no empty leaves: these have no number. Entries
of memories and of linear scorers go to memory-mapped files, since they may exceed the memory.

Legend: S shards, N nodes and I items of the whole, n nodes and i items of a shard, E entries, R rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from espalier.arrays import Array, Bool, Int64
from espalier.bundle import Bundle, find_versions, versions_in
from espalier.bundle_files import Gathered
from espalier.bundle_writer import GraphContent, LinearContent, write_bundle
from espalier.checks.golden import HISTORY_ROWS, STATES
from espalier.chunks import Chunks, TreeChunks
from espalier.errors import BundleCorrupt, BundleNotFound
from espalier.items import ItemTable
from espalier.live.fold import content_of
from espalier.manifest import ManifestDraft, ShardInfo
from espalier.memory import Memory
from espalier.shard_parts import ShardParts
from espalier.shards.cut import blocks
from espalier.stored_arrays import spans
from espalier.tail import Tail
from espalier.tree import EMPTY_LEAF, Tree


def is_folder_of_shards(model: Path) -> bool:
    """Whether a folder is the OUT of OUT/INDEX/VERSION: it has shard 0, and is neither a bundle nor the folder of a model."""
    return not (model / "manifest.json").is_file() and "0" in find_versions(model) and not versions_in(model)


def shards_in(folder: Path, version: int | None, verify: bool = True) -> list[Bundle]:
    """All shards of a version, by index. A version of None is the highest complete one. verify: as in `Bundle.open`.

    Raises BundleNotFound if no such version is complete, BundleCorrupt if its shards belong to several layouts.
    """
    versions = find_versions(folder)
    candidate_versions = [version] if version is not None else sorted(versions["0"], reverse=True)
    for number in candidate_versions:
        path = folder / "0" / str(number)
        first = Bundle.open(path, verify=False).manifest.shard if number in versions["0"] else None
        paths = [] if first is None else [folder / str(index) / str(number) for index in range(first.count)]
        if paths and all((shard / "manifest.json").is_file() for shard in paths):
            return _of_one_layout([Bundle.open(shard, verify) for shard in paths])
    version_text = "of any version" if version is None else f"of version {version}"
    raise BundleNotFound(f"{folder}: it has not all shards {version_text}; cut the bundle itself")


def _of_one_layout(shards: list[Bundle]) -> list[Bundle]:
    first = _info(shards[0])
    for index, shard in enumerate(shards):
        if shard.manifest.shard != first.model_copy(update={"index": index}):
            raise BundleCorrupt(f"{shard.path}: not shard {index} of {first.count} of {first.of} version {first.version}, {first.digest}")
    return shards


def _info(shard: Bundle) -> ShardInfo:
    if shard.manifest.shard is None:
        raise BundleCorrupt(f"{shard.path}: a whole bundle, expected a shard")
    return shard.manifest.shard


def joined(shards: Sequence[Bundle], folder: Path) -> Bundle:
    """Write folder/0/VERSION: the whole bundle as a single shard. Its golden queries have no answers.

    Raises BundleCorrupt if items or nodes of the bundle are missing from the shards.
    """
    first, info = shards[0], _info(shards[0])
    cuts = [shard.shard for shard in shards if shard.shard is not None]
    items = [cut.items for cut in cuts]
    trees = [JoinedTree([shard.alone[t].tree for shard in shards], [cut.nodes[t] for cut in cuts], items) for t in range(len(first.alone))]
    for name, numbers, count in (("items", np.sort(np.concatenate(items)), info.items), ("nodes", trees[0].node_N, info.nodes)):
        if not np.array_equal(numbers, np.arange(count)):
            raise BundleCorrupt(f"{first.path.parent.parent}: {len(numbers)} {name} in all shards, expected {count}, each once")
    scratch = folder / "arrays"
    scratch.mkdir(parents=True)
    table = ItemTable.joined([shard.items for shard in shards], items)
    whole = ShardParts(np.arange(info.items), tuple(tree.node_N for tree in trees))
    content = replace(content_of(first), items=table, golden=_unanswered(first), shard=whole)
    if isinstance(content, GraphContent):
        memories = [shard.memory for shard in shards if shard.memory is not None]
        memory = joined_memory(memories, items, scratch) if memories else None
        stored = trees[0].rows([shard.stored_rows for shard in shards])
        content = replace(content, tree=trees[0].tree, stored_rows=stored, memory=memory)
    else:
        content = _joined_linear(content, shards, trees, scratch)
    fields = {name: getattr(first.manifest, name) for name in ManifestDraft.model_fields}
    only = info.model_copy(update={"index": 0, "count": 1})
    return write_bundle(folder / "0" / str(info.version), ManifestDraft(**fields | {"shard": only}), content, check_padding=False)


def _unanswered(shard: Bundle) -> pa.Table:
    """The golden queries of a shard without their answers."""
    golden = shard.golden()
    columns = (shard.manifest.query.kind, "beam_size", "m", HISTORY_ROWS, STATES)
    return golden.select([name for name in columns if name in golden.column_names])


def _joined_linear(content: LinearContent, shards: Sequence[Bundle], trees: Sequence[JoinedTree], scratch: Path) -> LinearContent:
    joined_trees = []
    for t, tree in enumerate(trees):
        tree_folder = scratch / str(t)
        tree_folder.mkdir()
        joined_trees.append(joined_chunks(tree, [shard.trees[t].chunks for shard in shards], tree_folder))
    tails = [shard.tail for shard in shards if shard.tail is not None]
    tail = joined_tail(tails, trees[0].items) if tails else None
    first_tree, *other_trees = joined_trees
    return replace(content, tree=first_tree.tree, chunks=first_tree.chunks, others=other_trees, tail=tail)


@dataclass(frozen=True, eq=False)
class JoinedTree:
    """A tree of all shards' nodes.

    trees   the tree of each shard
    nodes   for each shard int64[n]: the numbers of its nodes in the whole tree
    items   for each shard int64[i]: the rows of its items in the whole bundle
    """

    trees: Sequence[Tree]
    nodes: Sequence[Int64]
    items: Sequence[Int64]

    @cached_property
    def node_N(self) -> Int64:
        """int64[N]: the number in the whole tree of each joined node, ascending."""
        return np.unique(np.concatenate(self.nodes))

    @cached_property
    def joined_nodes(self) -> list[Int64]:
        """For each shard int64[n]: the joined node of each of its nodes."""
        return [np.searchsorted(self.node_N, nodes) for nodes in self.nodes]

    @cached_property
    def tree(self) -> Tree:
        """The joined tree. Raises BundleCorrupt if the shards' trees differ in height, InvalidTree if the result is not a tree."""
        if len({tree.height for tree in self.trees}) > 1:
            raise BundleCorrupt(f"trees of {sorted({tree.height + 1 for tree in self.trees})} levels, expected parts of one tree")
        count, height = len(self.node_N), self.trees[0].height
        parent_N, level_N = np.full(count, -1, np.int64), np.zeros(count, np.int64)
        for tree, nodes in zip(self.trees, self.joined_nodes, strict=True):
            parent_N[nodes[1:]] = nodes[tree.parent[1:]]
            level_N[nodes] = np.repeat(np.arange(height + 1), np.diff(tree.level_offset))
        level_offset = np.searchsorted(level_N, np.arange(height + 2))
        leaf_item = np.full(count - level_offset[-2], EMPTY_LEAF, np.int64)
        for tree, nodes, items in zip(self.trees, self.joined_nodes, self.items, strict=True):
            occupied = np.flatnonzero(tree.leaf_item != EMPTY_LEAF)
            leaf_item[nodes[occupied + tree.leaf_offset] - level_offset[-2]] = items[tree.leaf_item[occupied]]
        children = np.bincount(parent_N[1:], minlength=count)
        return Tree(level_offset, np.append(1, 1 + np.cumsum(children)), leaf_item)

    def rows(self, arrays: Sequence[Array]) -> Gathered:
        """[N, …]: the rows of all nodes. A node that several shards have has the same row in each."""
        source_N, row_N = np.empty(len(self.node_N), np.uint16), np.empty(len(self.node_N), np.int64)
        for source, nodes in enumerate(self.joined_nodes):
            source_N[nodes], row_N[nodes] = source, np.arange(len(nodes))
        return Gathered(arrays, source_N, row_N)


def joined_memory(memories: Sequence[Memory], items: Sequence[Int64], folder: Path) -> Memory:
    """The memory of all shards' items. folder: holds the files of its entries."""
    offset = np.sum([memory.offset for memory in memories], axis=0)
    item = _room(folder / "memory-item", offset[-1], np.int32)
    value = _room(folder / "memory-value", offset[-1], np.float16)
    for block in blocks(np.diff(offset)):
        columns: list[list[Array]] = [[], [], []]
        for memory, rows in zip(memories, items, strict=True):
            counts = np.diff(memory.offset[block.start : block.stop + 1])
            shard_entries = slice(memory.offset[block.start], memory.offset[block.stop])
            _extend(columns, np.repeat(np.arange(len(counts)), counts), rows[memory.item[shard_entries]], memory.value[shard_entries])
        source_e, item_e, value_e = map(np.concatenate, columns)
        order, entries = np.lexsort((item_e, source_e)), slice(offset[block.start], offset[block.stop])
        item[entries], value[entries] = item_e[order], value_e[order]
    return replace(memories[0], offset=offset, item=item, value=value)


def joined_tail(tails: Sequence[Tail], items: Sequence[Int64]) -> Tail:
    """The tail with the rows of all shards' items."""
    row, begins = np.concatenate(items), np.cumsum([0, *(len(tail.feature) for tail in tails)])
    begin_I, end_I = np.empty(len(row), np.int64), np.empty(len(row), np.int64)
    for tail, rows, before in zip(tails, items, begins, strict=False):
        begin_I[rows], end_I[rows] = tail.row_begin[:-1] + before, tail.row_begin[1:] + before
    entries = spans(begin_I, end_I)
    feature, value = (np.concatenate([getattr(tail, name) for tail in tails])[entries] for name in ("feature", "value"))
    info = tails[0].info.model_copy(update={"entries": len(entries)})
    return Tail(info, np.append(0, np.cumsum(end_I - begin_I)), feature, value, tails[0].width)


def joined_chunks(joined: JoinedTree, chunks: Sequence[Chunks], folder: Path) -> TreeChunks:
    """A tree with the weights of all its nodes. folder: holds the files of their rows and entries."""
    tree, inner = joined.tree, joined.tree.leaf_offset
    inner_s = [node_of[: part.leaf_offset] for node_of, part in zip(joined.joined_nodes, joined.trees, strict=True)]  # of each shard
    size_p = np.zeros(inner, np.int64)
    for inner_n, part in zip(inner_s, chunks, strict=True):
        size_p[inner_n] += part.row_entry[part.chunk_row[1:]] - part.row_entry[part.chunk_row[:-1]] + np.diff(part.chunk_row)
    rows, weights = sum(len(part.row_feature) for part in chunks), sum(len(part.entry_weight) for part in chunks)
    row_feature, row_count = _room(folder / "row-feature", rows, np.int32), _room(folder / "row-count", rows, np.int64)
    entry_child = _room(folder / "entry-child", weights, np.uint16)
    entry_weight = _room(folder / "entry-weight", weights, chunks[0].entry_weight.dtype)
    rows_p, row, entry = np.zeros(inner, np.int64), 0, 0
    for block in blocks(size_p):
        columns: list[list[Array]] = [[], [], [], []]
        for inner_n, part, shard_tree, node_of in zip(inner_s, chunks, joined.trees, joined.joined_nodes, strict=True):
            _extend(columns, *_entries(part, shard_tree, node_of, np.searchsorted(inner_n, (block.start, block.stop))))
        parent_e, feature_e, node_e, weight_e = map(np.concatenate, columns)
        order = np.lexsort((node_e, feature_e, parent_e))
        order = order[_changes(parent_e[order], feature_e[order], node_e[order])]  # nodes above the cut are in several shards
        parent_e, feature_e, node_e = parent_e[order], feature_e[order], node_e[order]
        first = np.flatnonzero(_changes(parent_e, feature_e))
        rows_p[block] = np.bincount(parent_e[first] - block.start, minlength=block.stop - block.start)
        row_feature[row : row + len(first)] = feature_e[first]
        row_count[row : row + len(first)] = np.diff(np.append(first, len(parent_e)))
        entry_child[entry : entry + len(order)] = node_e - tree.first_child[parent_e]
        entry_weight[entry : entry + len(order)] = weight_e[order]
        row, entry = row + len(first), entry + len(order)
    bias = np.asarray(joined.rows([part.bias for part in chunks]))
    chunk_row, row_entry = (np.append(0, np.cumsum(counts)) for counts in (rows_p, row_count[:row]))
    entries = entry_child[:entry], entry_weight[:entry]
    return TreeChunks(tree, Chunks(chunk_row, row_feature[:row], row_entry, *entries, bias, chunks[0].width))


def _entries(chunks: Chunks, tree: Tree, node_of: Int64, inner_range: Array) -> tuple[Array, Array, Array, Array]:
    """Joined parent, feature, joined node and weight of the entries of a range of a shard's inner nodes. node_of: node → joined node."""
    begin, end = chunks.chunk_row[inner_range[0]], chunks.chunk_row[inner_range[1]]
    parent_r = np.repeat(np.arange(inner_range[0], inner_range[1]), np.diff(chunks.chunk_row[inner_range[0] : inner_range[1] + 1]))
    counts = np.diff(chunks.row_entry[begin : end + 1])
    entries = slice(chunks.row_entry[begin], chunks.row_entry[end])
    parent_e = np.repeat(parent_r, counts)
    node_e = node_of[tree.first_child[parent_e] + chunks.entry_child[entries]]
    return node_of[parent_e], np.repeat(chunks.row_feature[begin:end], counts), node_e, chunks.entry_weight[entries]


def _changes(*columns: Array) -> Bool:
    """Whether each row differs from the one before; true for the first row."""
    changes = np.ones(len(columns[0]), np.bool_)
    changes[1:] = np.any([column[1:] != column[:-1] for column in columns], axis=0)
    return changes


def _extend(columns: list[list[Array]], *arrays: Array) -> None:
    for column, array in zip(columns, arrays, strict=True):
        column.append(array)


def _room(file: Path, size: int, dtype: Any) -> Array:
    """An array in a memory-mapped file, since it may exceed the memory."""
    return np.memmap(file, dtype, "w+", shape=(int(size),)) if size else np.empty(0, dtype)
