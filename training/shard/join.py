"""The shards of a bundle as one bundle, its only shard, to be cut anew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from espalier.bundle import Bundle, find_versions, versions_in
from espalier.bundle_writer import GraphContent, LinearContent, write_bundle
from espalier.errors import BundleCorrupt, BundleNotFound
from espalier.items import ItemTable
from espalier.live.fold import content_of
from espalier.manifest import ManifestDraft, ShardInfo
from espalier.shard_parts import ShardParts

from ..shard.golden import unanswered_golden
from ..shard.joined_tables import JoinedTree, joined_chunks, joined_memory, joined_tail


def is_folder_of_shards(model: Path) -> bool:
    """Whether a folder is OUT of OUT/INDEX/VERSION: it has the first shard, and is neither a bundle nor the folder of a model."""
    return not (model / "manifest.json").is_file() and "0" in find_versions(model) and not versions_in(model)


def shards_in(folder: Path, version: int | None, verify: bool = True) -> list[Bundle]:
    """All shards of a version, by their index; None: of the highest version that is complete. verify: as in `Bundle.open`.

    Raises BundleNotFound where the folder has none that is complete, BundleCorrupt where shards are not of one layout.
    """
    versions = find_versions(folder)
    wanted = [version] if version is not None else sorted(versions["0"], reverse=True)
    for number in wanted:
        path = folder / "0" / str(number)
        first = Bundle.open(path, verify=False).manifest.shard if number in versions["0"] else None
        paths = [] if first is None else [folder / str(index) / str(number) for index in range(first.count)]
        if paths and all((shard / "manifest.json").is_file() for shard in paths):
            return _of_one_layout([Bundle.open(shard, verify) for shard in paths])
    what = "of any version" if version is None else f"of version {version}"
    raise BundleNotFound(f"{folder}: it has not all shards {what}; cut the bundle itself")


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
    """Write folder/0/VERSION, the only shard of the bundle that was cut; its golden queries have no answers.

    Raises BundleCorrupt where the shards have not all items and nodes of the bundle.
    """
    first, info = shards[0], _info(shards[0])
    parts = [shard.shard for shard in shards if shard.shard is not None]
    items = [own.items for own in parts]
    trees = [JoinedTree([shard.alone[t].tree for shard in shards], [own.nodes[t] for own in parts], items) for t in range(len(first.alone))]
    for name, numbers, count in (("items", np.sort(np.concatenate(items)), info.items), ("nodes", trees[0].node_N, info.nodes)):
        if not np.array_equal(numbers, np.arange(count)):
            raise BundleCorrupt(f"{first.path.parent.parent}: {len(numbers)} {name} in all shards, expected {count}, each once")
    scratch = folder / "arrays"
    scratch.mkdir(parents=True)
    table = ItemTable.joined([shard.items for shard in shards], items)
    whole = ShardParts(np.arange(info.items), tuple(tree.node_N for tree in trees))
    content = replace(content_of(first), items=table, golden=unanswered_golden(first), shard=whole)
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


def _joined_linear(content: LinearContent, shards: Sequence[Bundle], trees: Sequence[JoinedTree], scratch: Path) -> LinearContent:
    parts = []
    for place, tree in enumerate(trees):
        own = scratch / str(place)
        own.mkdir()
        parts.append(joined_chunks(tree, [shard.trees[place].chunks for shard in shards], own))
    tails = [shard.tail for shard in shards if shard.tail is not None]
    tail = joined_tail(tails, trees[0].items) if tails else None
    first, *others = parts
    return replace(content, tree=first.tree, chunks=first.chunks, others=others, tail=tail)
