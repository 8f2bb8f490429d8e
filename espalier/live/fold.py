"""A bundle with an overlay in it: the next version without training, and what every search of live items must equal.

`search(bundle + overlay)` is `search(fold(bundle, overlay))`: inner levels stay, live leaves hang at their slots, and items that are gone
leave vacant leaves. Item rows are counted anew, so `Folded.rows` says which is which. Golden queries are not answered here, and trees are
not checked for padding: see training/fold.

Legend: N nodes, D node row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from espalier.bundle import CONTENT, CONTENT_ARRAYS, WEIGHTS, Bundle
from espalier.bundle_files import map_safetensors
from espalier.bundle_writer import ContentParts, GraphContent, LinearContent, write_bundle
from espalier.chunks import TreeChunks
from espalier.errors import BundleCorrupt
from espalier.label_counts import LabelCounts
from espalier.live.folded_chunks import FoldedTree, folded_chunks, folded_tree
from espalier.live.folded_tables import FoldedRows, folded_counts, folded_items, folded_memory, folded_stacking, folded_tail
from espalier.live.items import LiveItems
from espalier.live.overlay import LiveLeaves, Overlay
from espalier.manifest import LinearScorer, LiveInfo, ManifestDraft
from espalier.node_rows import stored_as
from espalier.queries import TextKind


@dataclass(frozen=True, eq=False)
class Folded:
    """content: everything of a bundle, without golden queries; rows: which items it has; trees: where their leaves come from."""

    content: GraphContent | LinearContent
    rows: FoldedRows
    trees: tuple[FoldedTree, ...]


def folded(bundle: Bundle, overlay: Overlay, table: LiveItems) -> Folded:
    """The bundle with the overlay in it; `table`: its items with those that are live.

    Arrays of the bundle that stay as they are are not copied. Raises InvalidData where live leaves do not fit the trees.
    """
    rows = FoldedRows.of(overlay)
    trees = tuple(_folded_tree(alone, rows, overlay, leaves) for alone, leaves in zip(bundle.alone, overlay.trees, strict=True))
    content = content_of(bundle)
    content = replace(content, items=folded_items(bundle.items, table, rows, np.union1d(overlay.changed[1], overlay.row_W)))
    if isinstance(content, GraphContent):
        memory = content.memory
        if memory is not None and overlay.memory is not None:
            memory = folded_memory(memory, overlay.memory, rows)
        stored = folded_rows(bundle, trees[0], overlay.trees[0])
        content = replace(content, tree=trees[0].tree, stored_rows=stored, memory=memory, counts=_folded_counts(content, rows, overlay))
        return Folded(content, rows, trees)
    first, *others = (_folded_chunks(*parts) for parts in zip(bundle.alone, trees, overlay.trees, strict=True))
    return Folded(
        replace(
            content,
            tree=first.tree,
            chunks=first.chunks,
            others=others,
            counts=_folded_counts(content, rows, overlay),
            tail=None if content.tail is None else folded_tail(content.tail, rows, overlay),
            stacking=None if content.stacking is None else folded_stacking(content.stacking, rows),
        ),
        rows,
        trees,
    )


def write_fold(path: Path, bundle: Bundle, overlay: Overlay, table: LiveItems) -> Bundle:
    """Write the fold to models/<name>/<version>/, without golden queries, measurements or a ranker, whatever its padding."""
    return write_bundle(path, fold_draft(bundle, path, overlay.sequence), folded(bundle, overlay, table).content, check_padding=False)


def fold_draft(bundle: Bundle, path: Path, through: int) -> ManifestDraft:
    """What the manifest of a fold says beside what follows from its files; `through`: the last operation in it."""
    fields = {name: getattr(bundle.manifest, name) for name in ManifestDraft.model_fields}
    live = LiveInfo(through=through, folded_from=bundle.manifest.version)
    made = {"name": path.absolute().parent.name, "version": int(path.name), "created": datetime.now(UTC), "live": live}
    return ManifestDraft(**fields | made)


def content_of(bundle: Bundle) -> GraphContent | LinearContent:
    """Everything that a bundle was written from, but its ranker, with golden queries that are not answered."""
    manifest, golden = bundle.manifest, bundle.golden().slice(0, 0)
    if isinstance(manifest.scorer, LinearScorer):
        (tree, chunks), *others = bundle.trees
        vectoriser = bundle.vectoriser if isinstance(manifest.query, TextKind) else None
        counts = bundle.label_counts()
        second = bundle.tail, bundle.stacking
        return LinearContent(tree, chunks, bundle.items, golden, bundle.heldout(), vectoriser, counts, others, *second)
    content = None
    if manifest.content is not None:
        content = ContentParts(manifest.content, map_safetensors(bundle.path / CONTENT_ARRAYS), bundle.graph(CONTENT))
    return GraphContent(
        tree=bundle.tree,
        stored_rows=bundle.stored_rows,
        state_levels=manifest.scorer.state_levels,
        state_dim=manifest.scorer.state_dim,
        query_onnx=bundle.graph("query.onnx"),
        scorer_onnx=bundle.graph("scorer.onnx"),
        items=bundle.items,
        golden=golden,
        heldout=bundle.heldout(),
        weights=bundle.weights() if WEIGHTS in manifest.files else {},
        form=manifest.scorer.form,
        memory=bundle.memory,
        encoder=manifest.scorer.encoder,
        content=content,
        counts=bundle.label_counts(),
    )


def _folded_counts(content: GraphContent | LinearContent, rows: FoldedRows, overlay: Overlay) -> LabelCounts | None:
    return None if content.counts is None else folded_counts(content.counts, rows, overlay.trees[0])


def folded_rows(bundle: Bundle, folded: FoldedTree, leaves: LiveLeaves) -> NDArray[Any]:
    """The stored rows of the folded tree. Live rows were rounded to what the bundle stores when they were placed."""
    before, offset = bundle.stored_rows, bundle.tree.leaf_offset
    if leaves.rows_PD is None:
        raise BundleCorrupt(f"{bundle.path}: the overlay has no node rows")
    stored = np.empty((folded.tree.node_count, before.shape[1]), before.dtype)
    stored[:offset] = before[:offset]
    stored[offset:][folded.live] = stored_as(leaves.rows_PD[leaves.entry_X[-1 - folded.source[folded.live]]], before.dtype)
    stored[offset:][~folded.live] = before[offset + folded.source[~folded.live]]
    return stored


def _folded_tree(alone: Bundle, rows: FoldedRows, overlay: Overlay, leaves: LiveLeaves) -> FoldedTree:
    own_I = rows.row_I.copy()
    own_I[overlay.hidden] = -1
    return folded_tree(alone.tree, own_I, leaves.parent_X, leaves.slot_X, rows.row_R[leaves.handle_X])


def _folded_chunks(alone: Bundle, folded: FoldedTree, leaves: LiveLeaves) -> TreeChunks:
    if leaves.sparse is None:
        raise BundleCorrupt(f"{alone.path}: the overlay has no weights of leaves")
    return TreeChunks(folded.tree, folded_chunks(alone.tree, alone.chunks, folded, leaves.sparse, leaves.entry_X))
