"""A fold: a bundle with an overlay in it. It is the next version without training, and the oracle of every search of live items.

`search(bundle + overlay)` is `search(fold(bundle, overlay))`: inner levels stay, live leaves hang at their slots, and items that are gone
leave vacant leaves. Items get new rows; `Folded.rows` maps old rows to new ones. Golden queries are not answered here, and trees are not
checked for padding: see training/live.

Legend: N nodes, D node row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from espalier.arrays import Array
from espalier.bundle import CONTENT, CONTENT_ARRAYS, WEIGHTS, Bundle
from espalier.bundle_files import map_safetensors
from espalier.bundle_writer import ContentParts, GraphContent, Graphs, LinearContent, write_bundle
from espalier.chunks import TreeChunks
from espalier.errors import BundleCorrupt
from espalier.live.folded_chunks import FoldedTree, folded_chunks, folded_tree
from espalier.live.folded_tables import FoldedRows, folded_counts, folded_items, folded_memory, folded_stacking, folded_tail
from espalier.live.items import LiveItems
from espalier.live.overlay import LiveLeaves, Overlay
from espalier.manifest import LinearScorer, LiveInfo, ManifestDraft
from espalier.node_rows import stored_as
from espalier.queries import TextKind


@dataclass(frozen=True, eq=False)
class Folded:
    """content: everything of a bundle, without golden queries; rows: its items; trees: its trees, with the origin of their leaves."""

    content: GraphContent | LinearContent
    rows: FoldedRows
    trees: tuple[FoldedTree, ...]


def folded(bundle: Bundle, overlay: Overlay, table: LiveItems) -> Folded:
    """The bundle with the overlay in it. table: the items of the bundle with the live ones.

    Unchanged arrays of the bundle are not copied. Raises InvalidData if live leaves do not fit the trees.
    """
    rows = FoldedRows.of(overlay)
    trees = tuple(_folded_tree(single, rows, overlay, leaves) for single, leaves in zip(bundle.alone, overlay.trees, strict=True))
    content = content_of(bundle)
    counts = None if content.counts is None else folded_counts(content.counts, rows, overlay.trees[0])
    items = folded_items(bundle.items, table, rows, np.union1d(overlay.changed[1], overlay.row_W))
    content = replace(content, items=items, counts=counts)
    if isinstance(content, GraphContent):
        memory = content.memory
        if memory is not None and overlay.memory is not None:
            memory = folded_memory(memory, overlay.memory, rows)
        stored = folded_rows(bundle, trees[0], overlay.trees[0])
        return Folded(replace(content, tree=trees[0].tree, stored_rows=stored, memory=memory), rows, trees)
    first, *others = (_folded_chunks(single, tree, leaves) for single, tree, leaves in zip(bundle.alone, trees, overlay.trees, strict=True))
    return Folded(
        replace(
            content,
            tree=first.tree,
            chunks=first.chunks,
            others=others,
            tail=None if content.tail is None else folded_tail(content.tail, rows, overlay),
            stacking=None if content.stacking is None else folded_stacking(content.stacking, rows),
        ),
        rows,
        trees,
    )


def write_fold(path: Path, bundle: Bundle, overlay: Overlay, table: LiveItems) -> Bundle:
    """Write the fold to models/<name>/<version>/, without golden queries, measurements or a ranker, whatever its padding."""
    return write_bundle(path, fold_draft(bundle, path, overlay), folded(bundle, overlay, table).content, check_padding=False)


def fold_draft(bundle: Bundle, path: Path, overlay: Overlay) -> ManifestDraft:
    """The draft of a fold's manifest."""
    manifest = bundle.manifest
    fields = {name: getattr(manifest, name) for name in ManifestDraft.model_fields}
    items = int(np.count_nonzero(FoldedRows.of(overlay).row_I[: manifest.trained_items.items] >= 0))  # they stay the first, in their order
    trained = manifest.trained_items.model_copy(update={"items": items})
    live = LiveInfo(through=overlay.sequence, folded_from=manifest.version, trained=trained)
    new_fields = {"name": path.absolute().parent.name, "version": int(path.name), "created": datetime.now(UTC), "live": live}
    return ManifestDraft(**fields | new_fields)


def content_of(bundle: Bundle) -> GraphContent | LinearContent:
    """Everything that a bundle was written from, without its ranker and with unanswered golden queries."""
    manifest, golden = bundle.manifest, bundle.golden().slice(0, 0)
    if isinstance(manifest.scorer, LinearScorer):
        (tree, chunks), *others = bundle.trees
        vectoriser = bundle.vectoriser if isinstance(manifest.query, TextKind) else None
        counts = bundle.label_counts()
        tail, stacking = bundle.tail, bundle.stacking
        return LinearContent(tree, chunks, bundle.items, golden, bundle.heldout(), vectoriser, counts, others, tail, stacking)
    content = None
    if manifest.content is not None:
        content = ContentParts(manifest.content, map_safetensors(bundle.path / CONTENT_ARRAYS), bundle.graph(CONTENT))
    graphs = Graphs(bundle.graph("query.onnx"), bundle.graph("scorer.onnx"), manifest.scorer.state_dim, manifest.scorer.form)
    return GraphContent(
        tree=bundle.tree,
        stored_rows=bundle.stored_rows,
        state_levels=manifest.scorer.state_levels,
        graphs=graphs,
        items=bundle.items,
        golden=golden,
        heldout=bundle.heldout(),
        weights=bundle.weights() if WEIGHTS in manifest.files else {},
        memory=bundle.memory,
        encoder=manifest.scorer.encoder,
        content=content,
        counts=bundle.label_counts(),
    )


def folded_rows(bundle: Bundle, folded: FoldedTree, leaves: LiveLeaves) -> Array:
    """The stored rows of the folded tree. Live rows were rounded to what the bundle stores when they were placed."""
    old_rows, offset = bundle.stored_rows, bundle.tree.leaf_offset
    if leaves.rows_PD is None:
        raise BundleCorrupt(f"{bundle.path}: the overlay has no node rows")
    stored = np.empty((folded.tree.node_count, old_rows.shape[1]), old_rows.dtype)
    stored[:offset] = old_rows[:offset]
    stored[offset:][folded.live] = stored_as(leaves.rows_PD[leaves.entry_X[-1 - folded.source[folded.live]]], old_rows.dtype)
    stored[offset:][~folded.live] = old_rows[offset + folded.source[~folded.live]]
    return stored


def _folded_tree(bundle: Bundle, rows: FoldedRows, overlay: Overlay, leaves: LiveLeaves) -> FoldedTree:
    row_I = rows.row_I.copy()
    row_I[overlay.hidden] = -1
    return folded_tree(bundle.tree, row_I, leaves.parent_X, leaves.slot_X, rows.row_R[leaves.handle_X])


def _folded_chunks(bundle: Bundle, folded: FoldedTree, leaves: LiveLeaves) -> TreeChunks:
    if leaves.sparse is None:
        raise BundleCorrupt(f"{bundle.path}: the overlay has no weights of leaves")
    return TreeChunks(folded.tree, folded_chunks(bundle.tree, bundle.chunks, folded, leaves.sparse, leaves.entry_X))
