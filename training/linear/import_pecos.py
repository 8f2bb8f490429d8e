"""Import a saved PECOS XR-Linear model as a bundle that finds the same labels (Yu et al. 2022; github.com/amzn/pecos).

PECOS's level d is level d + 1 here: PECOS has no root. Nodes are sorted by parent, then by column. Ties between children of one parent go
to the lower column in both. Between parents, PECOS prefers the child of the better parent, a bundle the child of the first parent.

Differences from PECOS: scores are never logs, so log- processors give the exponential of PECOS's score. noop gives the sigmoid of PECOS's
score, and PECOS's score as the rank. Ranks are sums of logs, which differ where PECOS's products round to 1 or 0 and its order is that of
the columns.

`pecos_files.py` reads the files. Queries are features: PECOS's vectorisers are not imported.

Legend: L clusters of a level, F features, P parents.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from espalier.arrays import Int64
from espalier.bundle import Bundle
from espalier.bundle_writer import LinearContent, write_bundle
from espalier.chunks import Chunks
from espalier.errors import InvalidConfig
from espalier.items import ItemTable
from espalier.manifest import Activation, ManifestDraft, Ranking, SearchDefaults
from espalier.queries import FeaturesKind, encode_features
from espalier.search import SearchParams
from espalier.tree import Tree, tree_from_children

from ..data.item_tables import as_json
from ..golden import golden_answers
from ..linear.node_scorers import LevelScorers, as_chunks
from ..linear.pecos_files import Layer, read_model
from ..publish import GOLDEN_QUERIES, golden_beams, publish, unanswered

log = logging.getLogger(__name__)

Features = tuple[list[int], list[float]]
"""Feature numbers and their values."""

BEAM_SIZE, M = 10, 20
"""PECOS's defaults, for models that have none."""
LARGEST = 2000
"""Largest beam size and m of a request, unless the model's own are larger or it has fewer labels."""
DRAWS = 4
"""Random queries drawn for each golden query; the one with the largest margin becomes it."""
GOLDEN_FEATURES = 64
GOLDEN_LOGIT = 4.0
FEATURES = pa.struct({"indices": pa.list_(pa.int64()), "values": pa.list_(pa.float32())})


def import_pecos(folder: Path, out: Path, items: Path | None = None) -> Bundle:
    """Write models/<name>/<version>/ (`out`) from a saved model and return the bundle, its golden queries verified on `sparse-cpu`.

    folder  the model's folder, or its `ranker`
    items   a Parquet file with a column `id` and a row per label, in the order of the labels; by default ids are the labels' numbers
    Raises InvalidData where the folder is not an XR-Linear model with a tree, InvalidConfig for the item file.
    """
    layers, params = read_model(folder)
    tree, chunks = as_tree(layers)
    log.info("%s: %d labels below %d clusters on %d levels", folder, tree.item_count, tree.leaf_offset - 1, len(layers) - 1)
    table = label_table(items, tree.item_count)
    draft = _draft(out, tree, chunks.width, layers, params)
    heldout = pa.table({"features": pa.array([], FEATURES), "relevant": pa.array([], pa.list_(pa.string()))})
    content = LinearContent(tree, chunks, table, golden=unanswered(heldout, "features"), heldout=heldout)
    return publish(out, lambda folder: write_bundle(folder, draft, content), golden_table, lambda written, engine: {})


# -- the bundle -----------------------------------------------------------------------------------------------------------


def as_tree(layers: Sequence[Layer]) -> tuple[Tree, Chunks]:
    """The tree of clusters over the labels as items, and its scorers."""
    position_L = np.zeros(1, np.int64)  # of each cluster on its level of the tree
    orders, children = [], []
    for layer in layers:
        counts = np.zeros(layer.clusters, np.int64)
        counts[position_L] = np.bincount(layer.parent_L, minlength=layer.clusters)
        orders.append(np.argsort(position_L[layer.parent_L], kind="stable"))
        children.append(counts)
        position_L = np.empty(len(layer.parent_L), np.int64)
        position_L[orders[-1]] = np.arange(len(position_L))
    tree = tree_from_children(children, orders[-1])
    levels = [_scorers_of(layer, order, counts) for layer, order, counts in zip(layers, orders, children, strict=True)]
    return tree, as_chunks(levels, tree, layers[0].weights.shape[0])


def _scorers_of(layer: Layer, order_L: Int64, children_P: Int64) -> LevelScorers:
    """The scorers of one level.

    order_L     the columns in the order of the tree
    children_P  the number of children of each parent
    """
    by_row = layer.weights[:, order_L].tocsr()  # by feature, then by position in the tree
    first_P = np.cumsum(children_P) - children_P
    parent = np.repeat(np.arange(len(children_P)), children_P)[by_row.indices]
    feature = np.repeat(np.arange(by_row.shape[0], dtype=np.int32), np.diff(by_row.indptr))
    by_parent = np.argsort(parent, kind="stable")
    parent, feature, node = parent[by_parent], feature[by_parent], by_row.indices[by_parent]
    row = np.flatnonzero((np.diff(parent, prepend=-1) != 0) | (np.diff(feature, prepend=-1) != 0))
    return LevelScorers(
        row_feature=feature[row],
        row_count=np.diff(row, append=len(parent)).astype(np.int32),
        entry_child=(node - first_P[parent]).astype(np.uint16),
        entry_weight=by_row.data[by_parent],
        bias=layer.bias_L[order_L],
        node_rows=np.bincount(parent[row], minlength=len(children_P)),
    )


def label_table(file: Path | None, labels: int) -> ItemTable:
    """The item table: a row per label."""
    if file is None:
        return ItemTable.build(pa.table({"id": [str(label) for label in range(labels)]}))
    if not file.is_file():
        raise InvalidConfig("--items", str(file), "a Parquet file that exists")
    try:
        table = pq.read_table(file)
    except (pa.ArrowException, OSError) as error:
        raise InvalidConfig("--items", str(file), f"a Parquet file ({error})") from error
    if "id" not in table.column_names:
        raise InvalidConfig("--items", table.column_names, "a column named 'id'")
    if len(table) != labels:
        raise InvalidConfig("--items", f"{len(table)} rows", f"{labels}, one per label in the order of the labels")
    named = zip(table.column_names, table.columns, strict=True)
    columns = [column.cast(pa.large_string()) if name == "id" else as_json(column) for name, column in named]
    return ItemTable.build(pa.table(columns, names=table.column_names))


def ranking_of(post_processor: str) -> Ranking:
    """The ranking of a post-processor: products along the path become sums of logs."""
    if post_processor == "noop":
        return Ranking(own="logit", gamma=0)
    return Ranking(activation=cast(Activation, post_processor.removeprefix("log-")), own="log_activation", gamma=1)


def _draft(out: Path, tree: Tree, width: int, layers: Sequence[Layer], params: dict[str, Any]) -> ManifestDraft:
    beams = [layer.only_topk or BEAM_SIZE for layer in layers[:-1]] or [BEAM_SIZE]
    if len(set(beams)) > 1:
        log.warning("only_topk of the inner levels is %s: the beam is %d on all of them", beams, max(beams))
    beam_size, m = min(max(beams), tree.item_count), min(layers[-1].only_topk or M, tree.item_count)
    return ManifestDraft(
        name=out.absolute().parent.name,
        version=int(out.name),
        algorithm="xr-linear",
        created=datetime.now(UTC),
        query=FeaturesKind(width=width),
        ranking=ranking_of(layers[0].post_processor),
        search=SearchDefaults(
            beam_size=beam_size,
            m=m,
            max_beam_size=max(beam_size, min(tree.item_count, LARGEST)),
            max_m=max(m, min(tree.item_count, LARGEST)),
        ),
        training={"imported_from": "PECOS", "pecos": params},
    )


# -- golden queries -------------------------------------------------------------------------------------------------------


def golden_table(bundle: Bundle) -> pa.Table:
    """Golden queries of random features; the first has none.

    Each is the one of several draws whose answer has the largest margin, so that rounding does not decide it.
    """
    rng = np.random.default_rng(0)
    search, kind = bundle.manifest.search, FeaturesKind(width=bundle.chunks.width)
    weighted_features = np.unique(bundle.chunks.row_feature).astype(np.int64)
    largest = float(np.abs(bundle.chunks.entry_weight).max(initial=0))
    no_features: Features = ([], [])
    queries = [no_features if i < DRAWS else _random_features(rng, weighted_features, largest) for i in range(GOLDEN_QUERIES * DRAWS)]
    beam_size_B = np.repeat(golden_beams(search.beam_size, GOLDEN_QUERIES), DRAWS)
    written = pa.array([{"indices": indices, "values": values} for indices, values in queries], FEATURES)
    params = SearchParams(beam_size_B, np.full(len(queries), search.m))
    table = golden_answers(bundle, encode_features(kind, queries), written, params)
    margin = table.column("margin").to_numpy().reshape(GOLDEN_QUERIES, DRAWS)
    return table.take(pa.array(np.arange(GOLDEN_QUERIES) * DRAWS + margin.argmax(1)))


def _random_features(rng: np.random.Generator, weighted_features: Int64, largest: float) -> Features:
    """Some features that the model has weights for, with positive values so small that logits stay near their biases."""
    count = int(rng.integers(1, min(len(weighted_features), GOLDEN_FEATURES) + 1)) if len(weighted_features) else 0
    values = rng.uniform(0.1, 1, count)
    values *= GOLDEN_LOGIT / max(float(values.sum()) * largest, 1e-6)
    return np.sort(rng.choice(weighted_features, count, replace=False)).tolist(), values.astype(np.float32).tolist()
