"""Import a saved PECOS XR-Linear model as a bundle that finds the same labels (Yu et al. 2022; github.com/amzn/pecos).

    MODEL/param.json                        what `XLinearModel.save` writes; RANKER = MODEL/ranker
    RANKER/param.json                       "HierarchicalMLModel": depth D, nr_features F, nr_labels
    RANKER/<d>.model/param.json             "MLModel", d = 0 … D − 1: bias, pred_kwargs {only_topk, post_processor}
    RANKER/<d>.model/W.npz                  [F (+ 1 where bias > 0), L_d]: a column of weights per cluster, or label on the last level
    RANKER/<d>.model/C.npz                  [L_d, L_{d − 1}]: the cluster of each column; may be missing on level 0, which has one cluster

PECOS's level d is level d + 1 here: PECOS has no root. Nodes are sorted by parent, then by column. Ties between children of one parent go
to the lower column in both. Between parents, PECOS prefers the child of the better parent, a bundle the child of the first parent.

Differences from PECOS: scores are never logs, so log- processors give the exponential of PECOS's score. noop gives the sigmoid of PECOS's
score, and PECOS's score as the rank. Ranks are sums of logs, which differ where PECOS's products round to 1 or 0 and its order is that of
the columns.

Knows PECOS's files. Does not know its training or its vectorisers: queries are features.

Legend: D depth, L clusters of a level, F features, N nodes, B queries.
"""

from __future__ import annotations

import json
import logging
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from scipy.sparse import csc_array, load_npz

from espalier.bundle import Bundle
from espalier.bundle_writer import LinearContent, write_bundle
from espalier.chunks import MAX_CHILDREN, Chunks
from espalier.errors import InvalidConfig, InvalidData
from espalier.items import ItemTable
from espalier.manifest import Activation, ManifestDraft, Ranking, SearchDefaults
from espalier.queries import FeaturesKind, encode_features
from espalier.search import SearchParams
from espalier.tree import Tree, tree_from_children
from training.golden import golden_answers
from training.publish import GOLDEN_QUERIES, publish, unanswered

log = logging.getLogger(__name__)

Int64 = NDArray[np.int64]
Features = tuple[list[int], list[float]]
"""Feature numbers and their values."""

PROCESSORS = ("noop", *(f"{log_}{name}" for name in get_args(Activation) for log_ in ("", "log-")))
BEAM_SIZE, M = 10, 20
"""PECOS's defaults, for models that have none."""
LARGEST = 2000
"""Largest beam size and m of a request, unless the model's own are larger or it has fewer labels."""
MAX_LEVELS = 63
DRAWS = 4
"""Random queries of which the clearest becomes a golden query."""
GOLDEN_FEATURES = 64
GOLDEN_LOGIT = 4.0
FEATURES = pa.struct({"indices": pa.list_(pa.int64()), "values": pa.list_(pa.float32())})
HOW = "save the model with XLinearModel.save() and give that folder"


@dataclass(frozen=True, eq=False)
class Layer:
    """One level of a PECOS model.

    weights    [F, L], columns sorted, without zeros
    bias_L     float32[L]: the bias's weight times its value
    parent_L   int64[L]: each column's cluster on the level above
    clusters   number of clusters on the level above
    """

    weights: csc_array[np.float32]
    bias_L: NDArray[np.float32]
    parent_L: Int64
    clusters: int
    only_topk: int | None
    post_processor: str


def import_pecos(folder: Path, out: Path, items: Path | None = None) -> Bundle:
    """Write models/<name>/<version>/ (`out`) from a saved model and return the bundle, its golden queries verified on `sparse-cpu`.

    folder  the model's folder, or its `ranker`
    items   a Parquet file with a column `id` and a row per label, in the order of the labels; by default ids are the labels' numbers
    Raises InvalidData where the folder is not an XR-Linear model with a tree, InvalidConfig for the item file.
    """
    ranker, params = find_ranker(folder)
    layers = read_layers(ranker, params)
    tree, chunks = as_tree(ranker, layers)
    table = label_table(items, tree.item_count)
    draft = _draft(out, tree, chunks.width, layers, params)
    heldout = pa.table({"features": pa.array([], FEATURES), "relevant": pa.array([], pa.list_(pa.string()))})
    content = LinearContent(tree, chunks, table, golden=unanswered(heldout, "features"), heldout=heldout)
    return publish(out, lambda folder: write_bundle(folder, draft, content), golden_table, lambda bare, engine: {})


# -- PECOS's files --------------------------------------------------------------------------------------------------------


def find_ranker(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The ranker's folder, and the content of each param.json by its path below `folder`."""
    found: dict[str, Any] = {}
    if not folder.is_dir():
        raise InvalidData(str(folder), "no folder", f"a folder with a PECOS model; {HOW}")
    if not (folder / "param.json").is_file():
        text = (folder / "xlinear_ensemble").is_dir()
        inside = f"one model of a Text2Text model, such as {folder / 'xlinear_ensemble' / '0'}" if text else f"an XLinearModel; {HOW}"
        raise InvalidData(str(folder), "no param.json", inside)
    params = found["param.json"] = _read_json(folder / "param.json")
    kind, ranker = _kind(params), folder
    if kind == "XLinearModel":
        ranker = folder / "ranker"
        params = found["ranker/param.json"] = _read_json(ranker / "param.json")
        kind = _kind(params)
    if kind != "HierarchicalMLModel":
        where = ranker / "param.json"
        if kind == "MLModel":
            raise InvalidData(str(where), "MLModel, one level of a model", "an XLinearModel: give the folder that holds all levels")
        raise InvalidData(
            str(where),
            kind,
            f"an XLinearModel: only linear scorers of sparse features can be imported. Train one with XLinearModel.train(), {HOW}",
        )
    depth = params.get("depth")
    if not isinstance(depth, int) or not 1 <= depth <= MAX_LEVELS:
        raise InvalidData(str(ranker / "param.json"), depth, f"a depth of 1 to {MAX_LEVELS}")
    _refuse_mmap(ranker, params)
    for d in range(depth):
        name = (ranker / f"{d}.model" / "param.json").relative_to(folder)
        found[str(name)] = _read_json(folder / name)
        _refuse_mmap(ranker / f"{d}.model", found[str(name)])
    return ranker, found


def read_layers(ranker: Path, params: dict[str, Any]) -> list[Layer]:
    """All levels, the top one first. `params` as `find_ranker` returns them."""
    by_folder = {Path(name).parent.name: one for name, one in params.items()}
    depth = sum(name.endswith(".model") for name in by_folder)
    layers: list[Layer] = []
    clusters = 1
    for d in range(depth):
        layers.append(_read_layer(ranker / f"{d}.model", by_folder[f"{d}.model"], clusters, is_first=d == 0))
        clusters = len(layers[-1].parent_L)
        width, first = layers[-1].weights.shape[0], layers[0].weights.shape[0]
        if width != first:
            raise InvalidData(str(ranker / f"{d}.model" / "W.npz"), f"weights of {width} features", f"{first} as on level 0")
        if layers[-1].post_processor != layers[0].post_processor:
            field, wanted = str(ranker / f"{d}.model" / "param.json"), layers[0].post_processor
            raise InvalidData(field, f"post_processor {layers[-1].post_processor!r}", f"{wanted!r} as on level 0: the same on all levels")
    top = next(one for one in params.values() if _kind(one) == "HierarchicalMLModel")
    for name, value in (("nr_features", layers[0].weights.shape[0]), ("nr_labels", clusters)):
        if top.get(name, value) != value:
            raise InvalidData(str(ranker / "param.json"), f"{name} {top[name]}", f"{value} as in the matrices")
    return layers


def _read_layer(folder: Path, params: dict[str, Any], clusters: int, is_first: bool) -> Layer:
    bias, options = params.get("bias", -1.0), params.get("pred_kwargs", {})
    where = str(folder / "param.json")
    if not isinstance(bias, int | float) or not np.isfinite(bias):
        raise InvalidData(where, f"bias {bias!r}", "a finite number")
    if not isinstance(options, dict):
        raise InvalidData(where, f"pred_kwargs {options!r}", "only_topk and post_processor")
    only_topk, processor = options.get("only_topk"), options.get("post_processor", "l3-hinge")
    if processor not in PROCESSORS:
        raise InvalidData(where, f"post_processor {processor!r}", f"one of {', '.join(PROCESSORS)}")
    if only_topk is not None and (not isinstance(only_topk, int) or only_topk < 1):
        raise InvalidData(where, f"only_topk {only_topk!r}", "a whole number of at least 1")
    matrix = _read_matrix(folder / "W.npz")
    rows, columns = matrix.shape
    width = rows - (bias > 0)
    if width < 1 or columns < 1 or params.get("nr_features", width) != width or params.get("nr_labels", columns) != columns:
        wanted = (
            f"{params.get('nr_features', 'F')} rows{', one more for the bias' if bias > 0 else ''}, {params.get('nr_labels', 'L')} columns"
        )
        raise InvalidData(str(folder / "W.npz"), f"{rows} rows, {columns} columns", wanted)
    if not np.isfinite(matrix.data).all():
        raise InvalidData(str(folder / "W.npz"), "weights that are not finite", "finite 32-bit numbers")
    bias_L = np.zeros(columns, np.float32)
    if bias > 0:
        bias_L += np.float32(bias) * matrix[[width], :].toarray()[0].astype(np.float32)
    weights = csc_array(matrix[:width, :], dtype=np.float32)
    weights.eliminate_zeros()
    parent_L = _read_parents(folder / "C.npz", columns, clusters, is_first)
    return Layer(weights, bias_L, parent_L, clusters, only_topk, processor)


def _read_parents(file: Path, columns: int, clusters: int, is_first: bool) -> Int64:
    """int64[L]: the cluster of each column. As in PECOS, entries of C count whatever their values."""
    if is_first and not file.exists():
        return np.zeros(columns, np.int64)
    matrix = _read_matrix(file)
    if is_first and matrix.shape[1] != 1:
        raise InvalidData(str(file), f"{matrix.shape[1]} clusters above level 0", "1: a whole model, not the lower part of one")
    if matrix.shape != (columns, clusters):
        raise InvalidData(str(file), f"{matrix.shape[0]} rows, {matrix.shape[1]} columns", f"{columns} rows, {clusters} columns")
    count_L = np.bincount(matrix.indices, minlength=columns)
    for wrong_L, what in ((count_L == 0, "no cluster"), (count_L > 1, "several clusters")):
        if wrong_L.any():
            raise InvalidData(str(file), f"row {_positions(wrong_L)} in {what}", "each row in one cluster")
    children = np.diff(matrix.indptr)
    if (children == 0).any():
        raise InvalidData(str(file), f"column {_positions(children == 0)} without an entry", "no cluster without children")
    if children.max() > MAX_CHILDREN:
        raise InvalidData(str(file), f"a cluster of {children.max()} children", f"at most {MAX_CHILDREN}: train with a tree")
    parent_L = np.empty(columns, np.int64)
    parent_L[matrix.indices] = np.repeat(np.arange(clusters), children)
    return parent_L


def _positions(wrong: NDArray[np.bool_]) -> str:
    """The first positions where something is wrong, for a message."""
    places = np.flatnonzero(wrong)
    return ", ".join(map(str, places[:5])) + (f" and {len(places) - 5} more" if len(places) > 5 else "")


def _read_matrix(file: Path) -> csc_array[Any]:
    if not file.is_file():
        raise InvalidData(str(file), "no file", f"a matrix; {HOW}")
    try:
        with file.open("rb") as stream:  # NumPy may not close the stream of a damaged file that it opened itself
            matrix = csc_array(load_npz(stream))
        matrix.check_format(full_check=True)
        matrix.sum_duplicates()
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, zipfile.BadZipFile) as error:
        raise InvalidData(str(file), str(error), "a sparse matrix as scipy.sparse.save_npz writes it") from error
    return matrix


def _read_json(file: Path) -> dict[str, Any]:
    try:
        params = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidData(str(file), str(error), f"a JSON file; {HOW}") from error
    if not isinstance(params, dict):
        raise InvalidData(str(file), params, "a JSON object")
    return params


def _kind(params: dict[str, Any]) -> str | None:
    """The class that saved a param.json, None if it has no name of one."""
    named = params.get("model")
    if named is None and isinstance(params.get("__meta__"), dict):
        named = str(params["__meta__"].get("class_fullname", "")).rpartition("###")[2] or None
    return None if named is None else str(named)


def _refuse_mmap(folder: Path, params: dict[str, Any]) -> None:
    if params.get("is_mmap") or (folder / "W.mmap_store").exists():
        raise InvalidData(
            str(folder), "a memory-mapped model", f"W.npz and C.npz: give the folder that compile_mmap_model() made this from, or {HOW}"
        )


# -- the bundle -----------------------------------------------------------------------------------------------------------


def as_tree(ranker: Path, layers: Sequence[Layer]) -> tuple[Tree, Chunks]:
    """The tree of clusters over the labels as items, and its scorers."""
    place_L = np.zeros(1, np.int64)  # of each cluster on its level of the tree
    orders, children = [], []
    for layer in layers:
        counts = np.zeros(layer.clusters, np.int64)
        counts[place_L] = np.bincount(layer.parent_L, minlength=layer.clusters)
        orders.append(np.argsort(place_L[layer.parent_L], kind="stable"))
        children.append(counts)
        place_L = np.empty(len(layer.parent_L), np.int64)
        place_L[orders[-1]] = np.arange(len(place_L))
    tree = tree_from_children(children, orders[-1])
    log.info("%s: %d labels below %d clusters on %d levels", ranker, tree.item_count, tree.leaf_offset - 1, len(layers) - 1)
    parts = [_chunks_of(layer, order, counts) for layer, order, counts in zip(layers, orders, children, strict=True)]
    rows, features, entries, numbers, weights = zip(*parts, strict=True)
    return tree, Chunks(
        chunk_row=_running(rows),
        row_feature=np.concatenate(features),
        row_entry=_running(entries),
        entry_child=np.concatenate(numbers),
        entry_weight=np.concatenate(weights),
        bias=np.concatenate([np.zeros(1, np.float32), *(layer.bias_L[order] for layer, order in zip(layers, orders, strict=True))]),
        width=layers[0].weights.shape[0],
    )


def _chunks_of(
    layer: Layer, order_L: Int64, children_P: Int64
) -> tuple[Int64, NDArray[np.int32], Int64, NDArray[np.uint16], NDArray[np.float32]]:
    """A level's part of Chunks: the number of rows of each parent; feature and number of entries of each row; the entries.

    order_L     the columns in the order of the tree
    children_P  the number of children of each parent
    """
    by_row = layer.weights[:, order_L].tocsr()  # by feature, then by place in the tree
    first_P = np.cumsum(children_P) - children_P
    parent = np.repeat(np.arange(len(children_P)), children_P)[by_row.indices]
    feature = np.repeat(np.arange(by_row.shape[0], dtype=np.int32), np.diff(by_row.indptr))
    by_parent = np.argsort(parent, kind="stable")
    parent, feature, node = parent[by_parent], feature[by_parent], by_row.indices[by_parent]
    begins = np.ones(len(parent), np.bool_)
    begins[1:] = (np.diff(parent) != 0) | (np.diff(feature) != 0)
    row = np.flatnonzero(begins)
    return (
        np.bincount(parent[row], minlength=len(children_P)),
        feature[row],
        np.diff(np.append(row, len(parent))),
        (node - first_P[parent]).astype(np.uint16),
        by_row.data[by_parent],
    )


def _running(counts: Sequence[Int64]) -> Int64:
    """0 and the cumulative sum of all levels' counts."""
    return np.concatenate([[0], np.cumsum(np.concatenate(counts))]).astype(np.int64)


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
    return ItemTable.build(table.set_column(table.column_names.index("id"), "id", table.column("id").cast(pa.large_string())))


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


def golden_table(bundle: Bundle, seed: int = 0) -> pa.Table:
    """Golden queries of random features; the first has none.

    Each is the one of several draws whose answer has the largest margin, so that rounding does not decide it.
    """
    rng = np.random.default_rng(seed)
    search, kind = bundle.manifest.search, FeaturesKind(width=bundle.chunks.width)
    known = np.unique(bundle.chunks.row_feature).astype(np.int64)
    largest = float(np.abs(bundle.chunks.entry_weight).max(initial=0))
    nothing: Features = ([], [])
    drawn = [nothing if i < DRAWS else _random_features(rng, known, largest) for i in range(GOLDEN_QUERIES * DRAWS)]
    beam_size_B = np.array([max(1, search.beam_size // (1 + i // DRAWS % 4)) for i in range(len(drawn))])
    written = pa.array([{"indices": indices, "values": values} for indices, values in drawn], FEATURES)
    params = SearchParams(beam_size_B, np.full(len(drawn), search.m))
    table = golden_answers(bundle, encode_features(kind, drawn), written, params)
    margin = table.column("margin").to_numpy().reshape(GOLDEN_QUERIES, DRAWS)
    return table.take(pa.array(np.arange(GOLDEN_QUERIES) * DRAWS + margin.argmax(1)))


def _random_features(rng: np.random.Generator, known: Int64, largest: float) -> Features:
    """Some features that the model has weights for, with positive values so small that logits stay near their biases."""
    count = int(rng.integers(1, min(len(known), GOLDEN_FEATURES) + 1)) if len(known) else 0
    values = rng.uniform(0.1, 1, count)
    values *= GOLDEN_LOGIT / max(float(values.sum()) * largest, 1e-6)
    return np.sort(rng.choice(known, count, replace=False)).tolist(), values.astype(np.float32).tolist()
