"""A shard of a bundle, as it is written: an ordinary bundle of some subtrees, over its own items.

Ranks of its items are those that the whole bundle gives, as all their ancestors are there. A memory keeps the entries of every item, since
histories hold any of them. What needs all items stays with the whole bundle: encoding histories, the re-ranker, stacking, what content says
of rows, held-out queries, weights for training on. Golden queries are not answered here: see training/shard.

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

    bundle  whole, or one that has all items of a whole one: its only shard
    Raises InvalidConfig where the tree has not enough subtrees, BundleCorrupt where the bundle is one of several shards.
    """

    def __init__(self, bundle: Bundle, count: int) -> None:
        shard = bundle.manifest.shard
        if shard is not None and shard.count > 1:
            raise BundleCorrupt(f"{bundle.path}: shard {shard.index} of {shard.count}, expected a bundle of all items")
        self.bundle, self.count = bundle, count
        self._shard_N = node_shards(bundle.tree, count)
        self._items = shard_items(bundle.tree, count)

    def info(self, index: int) -> ShardInfo:
        """What the manifest of a shard says of it."""
        return ShardInfo(**self._whole | {"index": index, "count": self.count})

    @cached_property
    def _whole(self) -> dict[str, Any]:
        """What all shards say of the whole bundle."""
        manifest = self.bundle.manifest
        if manifest.shard is not None:
            return manifest.shard.model_dump()
        digest, tree = sha256_of(self.bundle.path / "manifest.json"), manifest.tree
        return {"of": manifest.name, "version": manifest.version, "digest": digest, "items": tree.items, "nodes": tree.nodes}

    def _kept(self, index: int) -> ShardParts:
        """The items and nodes of a shard, by the numbers that they have in the bundle."""
        items = self._items[index]
        first, *others = (alone.tree for alone in self.bundle.alone)
        return ShardParts(
            items, (kept_nodes(first, self._shard_N, index), *(nodes_above_items(tree, items, vacant=index == 0) for tree in others))
        )

    def parts(self, index: int) -> ShardParts:
        """The items and nodes of a shard, by their numbers in the whole bundle."""
        kept, own = self._kept(index), self.bundle.shard
        if own is None:
            return kept
        return ShardParts(own.items[kept.items], tuple(numbers[nodes] for numbers, nodes in zip(own.nodes, kept.nodes, strict=True)))

    def write(self, path: Path, index: int) -> Bundle:
        """Write a shard to `path`, …/<index>/<version>, without golden queries. Raises as `write_bundle`."""
        return write_bundle(path, self._draft(index), self._content(index), check_padding=False)

    def _draft(self, index: int) -> ManifestDraft:
        fields = {name: getattr(self.bundle.manifest, name) for name in ManifestDraft.model_fields}
        made = {"name": str(index), "created": datetime.now(UTC), "metrics": {}, "live": None, "shard": self.info(index)}
        return ManifestDraft(**fields | made)

    def _content(self, index: int) -> GraphContent | LinearContent:
        """Everything of a shard; node rows are gathered as they are written."""
        kept, content = self._kept(index), content_of(self.bundle)
        items, heldout = content.items.take(kept.items), content.heldout.slice(0, 0)
        content = replace(content, items=items, heldout=heldout, shard=self.parts(index))
        if isinstance(content, GraphContent):
            (nodes,) = kept.nodes
            memory = None if content.memory is None else cut_memory(content.memory, kept.items)
            stored = Gathered([self.bundle.stored_rows], None, nodes)
            tree = cut_tree(content.tree, nodes, kept.items)
            return replace(content, tree=tree, stored_rows=stored, memory=memory, weights={}, content=None, counts=None)
        (tree, chunks), *others = (self._chunks(place, kept) for place in range(len(kept.nodes)))
        tail = None if content.tail is None else cut_tail(content.tail, kept.items)
        return replace(content, tree=tree, chunks=chunks, others=others, tail=tail, stacking=None, counts=None)

    def _chunks(self, place: int, kept: ShardParts) -> TreeChunks:
        """A tree of linear scorers with its weights."""
        tree, chunks = self.bundle.trees[place]
        nodes = kept.nodes[place]
        return TreeChunks(cut_tree(tree, nodes, kept.items), cut_chunks(tree, chunks, nodes))
