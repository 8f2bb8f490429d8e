"""Writes a shard of a bundle: an ordinary bundle of some subtrees with their items.

A shard holds all ancestors of its items, so items have the same ranks as in the whole bundle. Its memory keeps the entries of every item,
since histories may hold any item. The parts that need all items stay with the whole bundle: the query encoder, the re-ranker, the stacker,
the content graph, held-out queries and the network's weights. Golden queries are not answered here: see training/shard.

Legend: N nodes of the bundle that is cut; n nodes and D numbers of a row of a shard.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from espalier.bundle import Bundle
from espalier.bundle_files import Gathered, sha256_of
from espalier.bundle_writer import GraphContent, LinearContent, write_bundle
from espalier.chunks import TreeChunks
from espalier.errors import BundleCorrupt
from espalier.live.fold import content_of
from espalier.manifest import ManifestDraft, ShardInfo
from espalier.shard_parts import ShardParts
from espalier.shards.cut_tables import cut_chunks, cut_memory, cut_tail, cut_tree
from espalier.shards.layout import kept_nodes, node_shards, nodes_above_items, shard_items


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
        return ShardParts(
            items, (kept_nodes(first, self._shard_N, index), *(nodes_above_items(tree, items, vacant=index == 0) for tree in others))
        )

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
        """A tree of linear scorers with its weights."""
        tree, chunks = self.bundle.trees[tree_index]
        nodes = shard_rows.nodes[tree_index]
        return TreeChunks(cut_tree(tree, nodes, shard_rows.items), cut_chunks(tree, chunks, nodes))
