"""Small random trees and bundles, with hand-made ONNX graphs so that no trainer is needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import pyarrow as pa
from onnx import helper, numpy_helper

from espalier.arrays import Array, Float32, Float64
from espalier.bundle import Bundle
from espalier.bundle_writer import GraphContent, Graphs, LinearContent, write_bundle
from espalier.checks.golden import GOLDEN_COLUMNS, columns_of_golden
from espalier.chunks import Chunks, TreeChunks
from espalier.engines.scorer_weights import Layer, ScorerWeights, scorer_graph
from espalier.items import ItemTable
from espalier.manifest import ManifestDraft, MemoryFormula, Ranking, SearchDefaults
from espalier.masks.eligibility import forest_mask
from espalier.memory import BUCKETS, Memory
from espalier.node_rows import stored_as
from espalier.queries import FeaturesKind, HistoryKind, QueryBatch, QueryKind, TextKind, VectorKind, pad_histories
from espalier.search import NodeMask
from espalier.text.sparse_rows import SparseRows
from espalier.tree import EMPTY_LEAF, Tree, tree_from_children

Rng = np.random.Generator


def random_tree(rng: Rng, height: int, branching: int, ragged: bool = True, empty_share: float = 0.0) -> Tree:
    """A tree of up to `branching` children a node (at least half as many, so that padding stays allowed)."""
    children: list[list[int]] = []
    size = 1
    for _ in range(height):
        low = max(1, (branching + 1) // 2) if ragged else branching
        counts = rng.integers(low, branching + 1, size)
        children.append([int(count) for count in counts])
        size = int(counts.sum())
    filled = rng.random(size) >= empty_share
    filled[rng.integers(size)] = True
    leaf_item = np.full(size, EMPTY_LEAF, np.int64)
    leaf_item[filled] = rng.permutation(int(filled.sum()))
    return tree_from_children(children, leaf_item)


def tree_over(rng: Rng, items: int, branching: int) -> Tree:
    """A random tree over `items` items, for a forest: as low as possible, its spare leaves empty."""
    children: list[list[int]] = []
    size = 1
    while size < items or not children:
        counts = rng.integers(max(1, (branching + 1) // 2), branching + 1, size)
        children.append([int(count) for count in counts])
        size = int(counts.sum())
    leaf_item = np.full(size, EMPTY_LEAF, np.int64)
    leaf_item[rng.permutation(size)[:items]] = rng.permutation(items)
    return tree_from_children(children, leaf_item)


def linear_graphs(width: int) -> Graphs:
    """Vector queries: state = vector; logit = ⟨state, row⟩."""
    query = query_graph([helper.make_node("Unsqueeze", ["vector", "one"], ["query_state"])], ["vector"], {"one": np.array([1])}, width)
    return graphs_of(query, ScorerWeights(), width, width)


def graphs_of(query_onnx: bytes, weights: ScorerWeights, state_dim: int, node_dim: int) -> Graphs:
    """The graphs of an encoder and a scorer with these weights."""
    return Graphs(query_onnx, scorer_graph(weights, state_dim, node_dim), state_dim, weights.form)


def drawn(rng: Rng, shape: tuple[int, ...], integer: bool, step: float | None = None) -> Float32:
    """float32: small whole numbers, or normal ones, see `stepped`."""
    raw = rng.integers(-2, 3, shape) if integer else stepped(rng.normal(size=shape), step)
    return raw.astype(np.float32)


def stepped(raw: Float64, step: float | None) -> Float64:
    """The nearest multiples of `step`, a power of two, less than 256 steps from 0; None: the numbers themselves.

    bfloat16 and float16 hold such numbers exactly. A search in lower precision then rounds nothing but its sums, which are float32, and
    is compared as strictly as one in float32.
    """
    return raw if step is None else np.clip(np.rint(raw / step), -255, 255) * step


def _present_rows(nodes: str) -> list[onnx.NodeProto]:
    """Operators for the `rows` of nodes, and for a `mask` that is 0 at padding."""
    return [
        helper.make_node("Clip", [nodes, "zero"], ["safe"]),
        helper.make_node("Gather", ["node_rows", "safe"], ["rows"]),
        helper.make_node("GreaterOrEqual", [nodes, "zero"], ["present"]),
        helper.make_node("Cast", ["present"], ["mask"], to=onnx.TensorProto.FLOAT),
    ]


def history_graphs(rng: Rng, width: int, hidden: int, integer: bool, slope: Float32, step: float | None = None) -> Graphs:
    """History queries: state = W · Σ rows of the history's ancestors; logit = v · PReLU(state + U row)."""

    def weights(*shape: int) -> Float32:
        return drawn(rng, shape, integer, step)

    query_operators = [
        *_present_rows("history_nodes"),
        helper.make_node("Unsqueeze", ["mask", "last"], ["mask_column"]),
        helper.make_node("Mul", ["rows", "mask_column"], ["masked"]),
        helper.make_node("ReduceSum", ["masked", "two"], ["pooled"], keepdims=0),
        helper.make_node("MatMul", ["pooled", "w"], ["query_state"]),
    ]
    constants = {"zero": np.array(0), "two": np.array([2]), "last": np.array([-1]), "w": weights(width, hidden)}
    query = query_graph(query_operators, ["history_nodes", "node_rows"], constants, width)
    layer = Layer(weights(width, hidden), np.zeros(hidden, np.float32), slope)
    return graphs_of(query, ScorerWeights((layer,), weights(hidden)), hidden, width)


def sequence_query(rng: Rng, width: int, hidden: int, levels: int, length: int, integer: bool, step: float | None = None) -> bytes:
    """A sequence encoder: states[h] = W_h · Σ_t p_t · row of the leaf at position t, p_t a weight of the position."""
    operators = [
        *_present_rows("history_leaves"),
        helper.make_node("Shape", ["mask"], ["length"], start=1),
        helper.make_node("Neg", ["length"], ["begin"]),
        helper.make_node("Slice", ["place", "begin", "end"], ["own"]),
        helper.make_node("Mul", ["mask", "own"], ["weights"]),
        helper.make_node("Unsqueeze", ["weights", "last"], ["weights_column"]),
        helper.make_node("Mul", ["rows", "weights_column"], ["weighted"]),
        helper.make_node("ReduceSum", ["weighted", "one"], ["pooled"], keepdims=0),
        helper.make_node("MatMul", ["pooled", "w"], ["all_states"]),
        helper.make_node("Reshape", ["all_states", "shape"], ["query_state"]),
    ]
    constants = {
        "zero": np.array(0),
        "one": np.array([1]),
        "last": np.array([-1]),
        "shape": np.array([-1, levels, hidden]),
        "place": drawn(rng, (length,), integer, step),
        "end": np.array([length]),
        "w": drawn(rng, (width, levels * hidden), integer, step),
    }
    return query_graph(operators, ["history_leaves", "node_rows"], constants, width)


def random_memory(rng: Rng, items: int, length: int, integer: bool = True) -> Memory:
    """Entries of most items, with many ties and zeros. integer: whole numbers and λ = 0.5; otherwise real numbers.

    Half of the memories have a repeat term. A third leave out some items of the histories.
    """
    rows = [np.flatnonzero(rng.random(items) < rng.choice([0.0, 3 / items, 0.3])) for _ in range(items)]
    item = np.concatenate(rows).astype(np.int32)
    value, weight = (rng.integers(0, 4, size) if integer else rng.random(size) for size in (len(item), length))
    offset = np.append(0, np.cumsum([len(row) for row in rows])).astype(np.int64)
    repeat = rng.integers(0, 4, BUCKETS) * rng.integers(0, 2) if integer else rng.random(BUCKETS) * rng.choice([0.0, 1.0])
    left_out = rng.random(BUCKETS) < rng.choice([0.0, 0.0, 0.3])
    return Memory(
        offset,
        item,
        value.astype(np.float16),
        weight.astype(np.float32),
        0.5 if integer else float(rng.choice([0.1, 10.0])),
        repeat.astype(np.float32),
        left_out,
        MemoryFormula(row=0.5, column=0.3, power=0.5, shrink=1, user=0.5, back=0.5, decay=0.8, window=20, unit=0.5),
    )


def product_graphs(rng: Rng, width: int, integer: bool, step: float | None = None) -> Graphs:
    """History queries: state = W · Σ rows of the history's ancestors; logit = ⟨state, row⟩."""
    slope = np.ones(width, np.float32)
    return linear_graphs(width)._replace(query_onnx=history_graphs(rng, width, width, integer, slope, step).query_onnx)


def make_bundle(
    folder: Path,
    rng: Rng,
    tree: Tree,
    kind: Literal["history", "product", "vector"] = "history",
    gamma: float = 0.0,
    own: Literal["logit", "log_activation"] = "logit",
    integer: bool = True,
    slope: Float32 | None = None,
    name: str = "tiny",
    width: int = 4,
    length: int = 5,
    version: int = 1,
    columns: Mapping[str, Any] | None = None,
    graphs: Graphs | None = None,
    weights: Mapping[str, Float32] | None = None,
    step: float | None = None,
    memory: Memory | None = None,
    encoder: Literal["levels", "sequence"] = "levels",
    dtype: Literal["float32", "float16", "int8"] = "float32",
    rows: Float32 | None = None,
    **search: int,
) -> Bundle:
    """A bundle with random node rows, or given ones, over items `item-0` …, with `columns` beside their titles, written under `folder`.

    kind    of queries; `product`: histories too, with an inner product as the scorer
    graphs  in place of hand-made ones; with the `weights` of their network
    step    node rows and weights that are no integers are `stepped`
    memory  as `random_memory` makes one
    encoder `sequence`: the query encoder is that of `sequence_query`
    """
    slope = np.full(6, 0.25, np.float32) if slope is None else slope
    query_kind = VectorKind(width=width) if kind == "vector" else HistoryKind(length=length)
    if graphs is None:
        if kind == "history":
            graphs = history_graphs(rng, width, 6, integer, slope, step)
        else:
            graphs = product_graphs(rng, width, integer, step) if kind == "product" else linear_graphs(width)
        if encoder == "sequence":
            query = sequence_query(rng, width, graphs.state_dim, tree.height + 1, length, integer, step)
            graphs = graphs._replace(query_onnx=query)
    rows = drawn(rng, (tree.node_count, width), integer, step) if rows is None else rows
    vector = pa.array([[1.0] * width], pa.list_(pa.float32()))
    example = vector if kind == "vector" else pa.array([["item-0"]], pa.list_(pa.string()))
    draft = _draft(name, version, query_kind, Ranking(own=own, gamma=gamma), search)
    content = GraphContent(
        tree=tree,
        stored_rows=stored_as(rows, dtype),
        state_levels=1 if kind == "vector" else tree.height + 1,
        weights=weights or {},
        graphs=graphs,
        items=_items(tree, columns),
        golden=pa.table({query_kind.kind: example.slice(0, 0)} | {name: pa.array([], t) for name, t in columns_of_golden(memory).items()}),
        heldout=pa.table({query_kind.kind: example, "relevant": pa.array([["item-0"]])}),
        memory=memory,
        encoder=encoder,
    )
    return write_bundle(folder / name / str(version), draft, content)


def _items(tree: Tree, columns: Mapping[str, Any] | None) -> ItemTable:
    default_columns = {"id": [f"item-{i}" for i in range(tree.item_count)], "title": [f"Title {i}" for i in range(tree.item_count)]}
    return ItemTable.build(pa.table(default_columns | dict(columns or {})))


def _draft(name: str, version: int, query: QueryKind, ranking: Ranking, search: Mapping[str, int]) -> ManifestDraft:
    limits = SearchDefaults(**{"beam_size": 10, "m": 5, "max_beam_size": 64, "max_m": 100, **search})
    created = datetime(2026, 1, 1, tzinfo=UTC)
    return ManifestDraft(name=name, version=version, algorithm="random", created=created, query=query, ranking=ranking, search=limits)


def sparse_rows(dense_BF: Array) -> SparseRows:
    """The numbers of a matrix that are not 0."""
    row, column = np.nonzero(dense_BF)
    indptr = np.searchsorted(row, np.arange(len(dense_BF) + 1)).astype(np.int64)
    return SparseRows(indptr, column.astype(np.int32), dense_BF[row, column].astype(np.float32), dense_BF.shape[1])


def random_chunks(rng: Rng, tree: Tree, width: int, integer: bool = True, step: float | None = None) -> Chunks:
    """Random chunks. Integer weights give equal ranks, to test ties. step: other weights are `stepped`."""
    rows, entries, features, children, weights = [0], [0], [], [], []
    for p in range(tree.leaf_offset):
        count = int(tree.first_child[p + 1] - tree.first_child[p])
        for feature in np.flatnonzero(rng.random(width) < rng.choice([0.05, 0.4, 0.9])):
            entry_children = np.flatnonzero(rng.random(count) < 0.5)
            if len(entry_children):
                features.append(feature)
                children.append(entry_children)
                weights.append(rng.integers(-2, 3, len(entry_children)) if integer else 0.1 * rng.normal(size=len(entry_children)))
                entries.append(entries[-1] + len(entry_children))
        rows.append(len(features))
    bias = rng.integers(-1, 2, tree.node_count) if integer else 0.5 * rng.normal(size=tree.node_count)
    return Chunks(
        np.array(rows, np.int64), np.array(features, np.int32), np.array(entries, np.int64),
        np.concatenate([*children, np.empty(0)]).astype(np.uint16),
        stepped(np.concatenate([*weights, np.empty(0)]), None if integer else step).astype(np.float32),
        bias.astype(np.float32), width,
    )  # fmt: skip


def make_linear_bundle(
    folder: Path,
    rng: Rng,
    tree: Tree,
    ranking: Ranking,
    integer: bool = True,
    name: str = "linear",
    width: int = 20,
    version: int = 1,
    step: float | None = None,
    others: Sequence[Tree] = (),
    columns: Mapping[str, Sequence[Any]] | None = None,
    heldout: pa.Table | None = None,
    **search: int,
) -> Bundle:
    """A bundle of random linear scorers over items `item-0` …, with `columns` beside their titles, for feature queries.

    step     weights that are no integers are `stepped`
    others   a forest's other trees, over the same items
    heldout  instead of one query
    """
    features = pa.array([{"indices": [0], "values": [1.0]}], pa.struct({"indices": pa.list_(pa.int64()), "values": pa.list_(pa.float32())}))
    draft = _draft(name, version, FeaturesKind(width=width), ranking, search)
    content = LinearContent(
        tree=tree,
        chunks=random_chunks(rng, tree, width, integer, step),
        items=_items(tree, columns),
        golden=pa.table({"features": features.slice(0, 0)} | {name: pa.array([], t) for name, t in GOLDEN_COLUMNS.items()}),
        heldout=pa.table({"features": features, "relevant": pa.array([["item-0"]])}) if heldout is None else heldout,
        others=[TreeChunks(other, random_chunks(rng, other, width, integer, step)) for other in others],
    )
    return write_bundle(folder / name / str(version), draft, content)


def random_queries(rng: Rng, bundle: Bundle, batch: int, integer: bool = True) -> QueryBatch:
    """Random queries of the bundle's kind; histories of every length, empty ones included."""
    kind = bundle.manifest.query
    if isinstance(kind, FeaturesKind | TextKind):
        mask = rng.random((batch, kind.width)) < rng.choice([0.1, 0.5])
        return QueryBatch(kind, sparse_rows(np.where(mask, rng.integers(-2, 3, mask.shape) if integer else rng.normal(size=mask.shape), 0)))
    if isinstance(kind, VectorKind):
        raw = rng.integers(-2, 3, (batch, kind.width)) if integer else rng.normal(size=(batch, kind.width))
        return QueryBatch(kind, raw.astype(np.float32))
    histories = [rng.integers(-1, bundle.tree.item_count, rng.integers(0, kind.length + 2)) for _ in range(batch)]
    return pad_histories(kind, histories)


def random_masks(rng: Rng, tree: Tree, batch: int, share: float, others: Sequence[Tree] = ()) -> tuple[NodeMask | None, ...]:
    """A mask for each query: None, one that passes about `share` of the items at random, or one that passes neighbouring leaves.

    others  a forest's other trees
    """
    scattered = rng.random(tree.item_count) < share
    clustered = np.zeros(tree.item_count, np.bool_)
    begin = rng.integers(tree.leaf_count)
    clustered_items = tree.leaf_item[begin : begin + 1 + int(share * tree.leaf_count)]
    clustered[clustered_items[clustered_items != EMPTY_LEAF]] = True
    masks = (None, forest_mask((tree, *others), scattered), forest_mask((tree, *others), clustered))
    return tuple(masks[i] for i in rng.integers(0, 3, batch))


def query_graph(nodes: list[onnx.NodeProto], inputs: list[str], constants: dict[str, Array], width: int) -> bytes:
    """The bytes of query.onnx; `width` is that of vectors and of node rows."""
    inputs_by_name = {
        "vector": helper.make_tensor_value_info("vector", onnx.TensorProto.FLOAT, ["B", width]),
        "history_nodes": helper.make_tensor_value_info("history_nodes", onnx.TensorProto.INT64, ["B", "L", "T"]),
        "history_leaves": helper.make_tensor_value_info("history_leaves", onnx.TensorProto.INT64, ["B", "T"]),
        "node_rows": helper.make_tensor_value_info("node_rows", onnx.TensorProto.FLOAT, ["N", width]),
    }
    graph = helper.make_graph(
        nodes,
        "graph",
        [inputs_by_name[name] for name in inputs],
        [helper.make_tensor_value_info("query_state", onnx.TensorProto.FLOAT, ["B", "L", "S"])],
        initializer=[numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    serialised: bytes = model.SerializeToString()
    return serialised
