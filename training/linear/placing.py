"""Place new items in a trained model of linear scorers, without training: items that have a text but no queries yet.

A new item goes to a near leaf cluster, the first of the beam for its own text x that has less than 4 times the mean number of children.
What it weighs there is said by `espalier.placement.linear_rows`, which a live catalogue uses, too.

All other weights and all item rows stay, so answers over old items alone do not change. Texts of old items are read from the item table.
A model of features has no texts, so neighbours give its new items nothing. In a forest new items are placed in each tree. In a tail the row
of a new item is x, as if its text were its only training point.

Legend: n new items, I old items, P clusters (nodes of the level above the leaves), F features, K neighbours.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from scipy.sparse import csr_array

from espalier.bundle import Bundle
from espalier.bundle_writer import LinearContent
from espalier.checks.golden import encode_table
from espalier.checks.heldout import read_heldout
from espalier.chunks import MAX_CHILDREN, Chunks, TreeChunks
from espalier.engines.linear.chunk_search import BeamParams, ChunkSearch
from espalier.errors import InvalidConfig, InvalidData
from espalier.items import ItemTable
from espalier.manifest import LinearScorer, ManifestDraft, Ranking
from espalier.packed_chunks import rounded, widened
from espalier.placement.linear_rows import CHOSEN, LinearRows, Placing
from espalier.placement.near_items import NearItems
from espalier.search import SearchParams
from espalier.tail import Tail
from espalier.tree import Tree, tree_from_children
from training.data.csr import Csr, as_rows
from training.evaluate import LabelledQueries
from training.linear.export import GoldenQueries, publish_linear
from training.linear.new_items import own_texts, read_new_items

log = logging.getLogger(__name__)

Array = NDArray[Any]
Int64 = NDArray[np.int64]

BEAM = 100
"""Clusters that are candidates for a new item."""
Near = tuple[Int64, NDArray[np.float32]]
"""Rows of the nearest old items [n, K], the nearest first, and their cosines."""


def place(model: Path, file: Path, columns: Sequence[str], out: Path, how: Placing = CHOSEN) -> Bundle:
    """Write models/NAME/VERSION, a model with the new items of `file` beside its own, verified and measured on its held-out queries.

    columns  of the item table that are an item's text; none for a model of features
    Raises what `read_new_items` does; InvalidConfig where the model has no linear scorers; InvalidData where its clusters are full.
    """
    begin = time.perf_counter()
    bundle = Bundle.open(model)
    if not isinstance(bundle.manifest.scorer, LinearScorer):
        raise InvalidConfig("--model", str(model), f"a model of linear scorers, not of {bundle.manifest.scorer.kind}")
    if bundle.manifest.ranker is not None:
        log.warning(
            "%s version %d has a ranker, the new version has none: fit-ranker trains one for it",
            bundle.manifest.name,
            bundle.manifest.version,
        )
    if bundle.stacking is not None:
        log.warning("the new version has no stacking, which knows nothing of new items: train a new model for one")
    new = read_new_items(bundle, file, columns)
    near = None if not columns else _nearest(bundle, new.own, columns, how.neighbours)
    trees = [_with_new_items(tree, chunks, bundle.manifest.ranking, new.own, near, how, file) for tree, chunks in bundle.trees]
    items = ItemTable.build(pa.concat_tables([bundle.items.to_table(), new.table]))
    count = new.own.shape[0]
    log.info("%d items placed in each of %d trees, %.1f s after the start", count, len(trees), time.perf_counter() - begin)
    golden, heldout = bundle.golden(), read_heldout(bundle)
    params = SearchParams(np.asarray(golden.column("beam_size"), np.int64), np.asarray(golden.column("m"), np.int64))
    queries = GoldenQueries(encode_table(bundle, golden), golden.column(bundle.manifest.query.kind).combine_chunks(), params)
    counts = bundle.label_counts()
    if counts is not None:
        counts = replace(counts, counts_I=np.append(counts.counts_I, np.zeros(count, np.int64)))
    vectoriser = bundle.vectoriser if columns else None
    tail = None if bundle.tail is None else grown_tail(bundle.tail, new.own)
    content = LinearContent(*trees[0], items, golden, bundle.heldout(), vectoriser, counts, trees[1:], tail)
    draft = _draft(bundle, out, file, columns, count)
    return publish_linear(out, draft, content, queries, LabelledQueries(heldout.queries, heldout.relevant), {})


def _with_new_items(tree: Tree, chunks: Chunks, ranking: Ranking, own: Csr, near: Near | None, how: Placing, file: Path) -> TreeChunks:
    """A tree with the new items in its clusters. Raises InvalidData where these are full."""
    cluster_n = nearest_clusters(tree, chunks, ranking, own, how)
    if (cluster_n < 0).any():
        expected = f"at most {int((cluster_n >= 0).sum())} items like these, since the clusters near them are full; train a new model"
        raise InvalidData(str(file), f"{len(cluster_n)} items", expected)
    wide = widened(chunks)
    weights, bias = new_weights(tree, wide, own, near, how)
    larger, scorers = grown(tree, wide, cluster_n, weights, np.full(len(cluster_n), bias, np.float32))
    if chunks.entry_weight.dtype == np.float16:
        scorers = rounded(scorers) or scorers
    log.info("%d items placed in %d of %d clusters, which hold up to %d", len(cluster_n), len(np.unique(cluster_n)),
             tree.level_size(tree.height - 1), larger.max_children[-1])  # fmt: skip
    return TreeChunks(larger, scorers)


def nearest_clusters(tree: Tree, chunks: Chunks, ranking: Ranking, own: Csr, how: Placing = CHOSEN) -> Int64:
    """int64[n]: the cluster of each item, see the module; −1 where all clusters of the beam are full.

    A cluster with too little room takes the items with the highest ranks; the others go to the next cluster of their beams.
    """
    span = tree.level(tree.height - 1)
    nodes_nK, ranks_nK = np.zeros((own.shape[0], 1), np.int64), np.zeros((own.shape[0], 1), np.float32)
    if tree.height > 1:
        search = ChunkSearch(tree, chunks, ranking, last=tree.height - 1)
        beam = min(BEAM, len(span))
        found = search.search(as_rows(own), BeamParams.uniform(own.shape[0], beam, beam))
        search.close()
        nodes_nK, ranks_nK = found.leaves_BM, found.ranks_BM
    children_P = np.diff(tree.first_child[span.start : span.stop + 1])
    room_P = np.maximum(min(how.room * -(-tree.leaf_count // len(span)), MAX_CHILDREN) - children_P, 0)
    cluster_n = np.full(own.shape[0], -1, np.int64)
    for nodes, ranks in zip(nodes_nK.T, ranks_nK.T, strict=True):
        waiting = np.flatnonzero((cluster_n < 0) & (nodes >= 0))
        waiting = waiting[np.lexsort((-ranks[waiting], nodes[waiting]))]
        wanted = nodes[waiting] - span.start
        fits = np.arange(len(wanted)) - np.searchsorted(wanted, wanted) < room_P[wanted]
        cluster_n[waiting[fits]] = span.start + wanted[fits]
        room_P -= np.bincount(wanted[fits], minlength=len(span))
    return cluster_n


def _nearest(bundle: Bundle, own: Csr, columns: Sequence[str], count: int) -> Near:
    old = as_rows(own_texts(bundle, bundle.items.to_table(), columns))
    return NearItems(old).nearest(as_rows(own), count)


def new_weights(tree: Tree, chunks: Chunks, own: Csr, near: Near | None, how: Placing = CHOSEN) -> tuple[Csr, float]:
    """float32[n, F] and the bias of all of them."""
    leaves, rows = LinearRows(tree, chunks, how), as_rows(own)
    parts = []
    for i in range(len(rows)):
        entries = slice(int(rows.indptr[i]), int(rows.indptr[i + 1]))
        item_K, cosine_K = ((), ()) if near is None else (near[0][i], near[1][i])
        parts.append(leaves.row((rows.indices[entries], rows.values[entries]), item_K, cosine_K))
    indptr = np.cumsum([0, *(len(row.feature) for row in parts)])
    feature, weight = np.concatenate([row.feature for row in parts]), np.concatenate([row.values for row in parts])
    return csr_array((weight, feature, indptr), shape=(len(parts), chunks.width)), leaves.bias


def grown(tree: Tree, chunks: Chunks, cluster_n: Int64, weights: Csr, bias_n: NDArray[np.float32]) -> tuple[Tree, Chunks]:
    """The tree and its scorers with a leaf for each of the items I, I + 1, …, after the other children of its cluster.

    cluster_n  int64[n]: the nodes that they go to · weights: rows [n, F] · bias_n: float32[n]
    """
    span = tree.level(tree.height - 1)
    order = np.argsort(cluster_n, kind="stable")
    place_n = cluster_n[order] - span.start  # of each new leaf's cluster on its level
    counts = [np.diff(tree.first_child[tree.level(h).start : tree.level(h).stop + 1]) for h in range(tree.height)]
    end_n = tree.first_child[span.start + 1 : span.stop + 1][place_n]
    child_n = counts[-1][place_n] + np.arange(len(order)) - np.searchsorted(place_n, place_n)
    counts[-1] = counts[-1] + np.bincount(place_n, minlength=len(span))
    leaf_item = np.insert(tree.leaf_item, end_n - tree.leaf_offset, tree.item_count + order)
    scorers = _with_entries(chunks, span, place_n, child_n, weights[order])
    return tree_from_children(counts, leaf_item), replace(scorers, bias=np.insert(chunks.bias, end_n, bias_n[order]))


def grown_tail(tail: Tail, own: Csr) -> Tail:
    """A tail with rows for the items I, I + 1, …: `own` [n, F], of length 1."""
    own.sort_indices()
    row_begin = np.append(tail.row_begin, tail.row_begin[-1] + own.indptr[1:])
    feature, value = np.append(tail.feature, own.indices.astype(np.int32)), np.append(tail.value, own.data.astype(np.float32))
    return Tail(tail.info.model_copy(update={"entries": len(feature)}), row_begin, feature, value, tail.width)


def _with_entries(chunks: Chunks, span: range, place_n: Int64, child_n: Int64, weights: Csr) -> Chunks:
    """The chunks with the weights of new leaves, as the last entries of their rows; `bias` stays as it is.

    span     the nodes of the clusters' level
    place_n  each new leaf's cluster on that level, ascending; child_n: its number among the cluster's children
    """
    weights.sort_indices()
    entries_n = np.diff(weights.indptr)
    key: Int64 = np.repeat(place_n, entries_n) * chunks.width + weights.indices  # of an entry's row: its cluster and feature
    by_row = np.argsort(key, kind="stable")
    row_key, count = np.unique(key, return_counts=True)

    begin = int(chunks.chunk_row[span.start])
    known_key = np.repeat(np.arange(len(span)), np.diff(chunks.chunk_row[span.start :])) * chunks.width + chunks.row_feature[begin:]
    at = np.searchsorted(known_key, row_key)
    is_known = np.append(known_key, -1)[at] == row_key
    place, feature = np.divmod(row_key[~is_known], chunks.width)
    row_entries = np.insert(np.diff(chunks.row_entry), begin + at[~is_known], 0)
    row_entries[begin + at + np.cumsum(~is_known) - ~is_known] += count  # each row is moved up by the new ones before it
    chunk_row = np.array(chunks.chunk_row)
    chunk_row[span.start + 1 :] += np.cumsum(np.bincount(place, minlength=len(span)))
    end = np.repeat(chunks.row_entry[begin + at + is_known], count)
    return replace(
        chunks,
        chunk_row=chunk_row,
        row_feature=np.insert(chunks.row_feature, begin + at[~is_known], feature.astype(np.int32)),
        row_entry=np.concatenate([[0], np.cumsum(row_entries)]),
        entry_child=np.insert(np.asarray(chunks.entry_child, np.uint16), end, np.repeat(child_n, entries_n)[by_row].astype(np.uint16)),
        entry_weight=np.insert(np.asarray(chunks.entry_weight, np.float32), end, weights.data[by_row]),
    )


def _draft(bundle: Bundle, out: Path, file: Path, columns: Sequence[str], count: int) -> ManifestDraft:
    """The model's manifest, with the placed items added to its data."""
    manifest = bundle.manifest
    with file.open("rb") as stream:
        fingerprint = hashlib.file_digest(stream, "sha256").hexdigest()
    placed = {"items": count, "sha256": fingerprint, "text": list(columns), "into": f"{manifest.name}/{manifest.version}"}
    data = manifest.data | {"items": len(bundle.items) + count, "placed": [*manifest.data.get("placed", []), placed]}
    fields = {name: getattr(manifest, name) for name in ManifestDraft.model_fields}
    changed = {"name": out.absolute().parent.name, "version": int(out.name), "created": datetime.now(UTC), "data": data, "metrics": {}}
    return ManifestDraft(**fields | changed)
