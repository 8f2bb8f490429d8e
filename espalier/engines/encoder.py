"""query.onnx of a bundle in ONNX Runtime, one query a run: queries in, their states on all levels out.

If the graph takes histories of any length (`takes_any_length`), it runs at the length of each query, so a short history costs little.
Node rows of float16 or int8 stay as they are in the bundle: the graph is rewritten to widen only the rows that it looks up.

Legend: B queries, T history, L levels, N nodes, D node row, S state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper

from espalier.arrays import Array, Float32, Int64
from espalier.bundle import Bundle
from espalier.compiled_code import compiled
from espalier.engines.graphs import load_graph
from espalier.engines.runtime import opened_session, ort
from espalier.errors import BundleCorrupt, UnsupportedGraph
from espalier.queries import HistoryKind, blank_queries

MOST = np.iinfo(np.int64).max
"""The end of a slice up to the last column."""


class QueryEncoder:
    """See the module. Any number of threads may call it.

    rows          the node rows as the bundle stores them, or widened to float32, contiguous; the session does not copy them
    other_use     how the graph uses node rows other than by looking them up; empty: it only looks them up
    shape         H + 1 or 1, S: of a query's states
    Raises UnsupportedGraph where the graph cannot be run, or does more with narrow rows than look them up; BundleCorrupt where states have
    another shape than declared.
    """

    def __init__(self, bundle: Bundle, rows: Array) -> None:
        model = load_graph("query.onnx", bundle.graph("query.onnx"))
        self.takes_any_length = takes_any_length(model)
        free_inputs(model)
        inputs = {entry.name for entry in model.graph.input}
        self.rows, self.other_use = rows, _other_use(model)
        if rows.dtype != np.float32 and "node_rows" in inputs:
            if self.other_use:
                raise UnsupportedGraph(self.other_use)
            look_up_narrow(model, rows.dtype)
        self._row_value = ort.OrtValue.ortvalue_from_numpy(rows) if "node_rows" in inputs else None
        tree, scorer = bundle.tree, bundle.graph_scorer
        self.reads_sequences = scorer.encoder == "sequence"
        self._history = isinstance(bundle.graph_kind, HistoryKind)
        self._per_level = scorer.state_levels > 1
        self._input = "history_leaves" if self.reads_sequences else "history_nodes" if self._history else "vector"
        if unknown := sorted(inputs - {self._input, "node_rows"}):
            raise BundleCorrupt(f"query.onnx: inputs {unknown}, which {bundle.graph_kind.kind} queries of this manifest do not have")
        self.shape = (tree.height + 1 if self._per_level else 1), scorer.state_dim
        self._height, self._leaf_of_item, self._parent = tree.height, tree.leaf_of_item, tree.parent
        try:
            self._session = opened_session(model)
            states_LS = self._states(blank_queries(bundle.graph_kind, 1).array, 0)
        except Exception as error:  # ONNX Runtime's own classes derive from nothing narrower
            raise UnsupportedGraph(f"ONNX Runtime cannot run query.onnx alone ({error})") from error
        if states_LS.shape != self.shape:
            raise BundleCorrupt(f"query.onnx: a query's states are {list(states_LS.shape)}, the manifest says {list(self.shape)}")

    @staticmethod
    def open(bundle: Bundle) -> QueryEncoder:
        """The encoder of a bundle of graphs. If query.onnx does more than look node rows up, they are widened to float32."""
        rows = np.require(bundle.stored_rows, requirements=["C", "A"])
        try:
            return QueryEncoder(bundle, rows)
        except UnsupportedGraph:
            if rows.dtype == np.float32:
                raise
            return QueryEncoder(bundle, np.asarray(bundle.node_rows_ND, np.float32))

    def states(self, queries: Array, first_B: Sequence[int]) -> Float32:
        """float32[B, H + 1 or 1, S]: the states of each query on the levels from first_B on; 0 above them.

        queries  the array of a checked QueryBatch: int64[B, T] item rows, −1 as padding, or float32[B, F]
        """
        states_BLS = np.zeros((len(queries), *self.shape), np.float32)
        for b, first in enumerate(first_B):
            states_LS = self._states(queries[b : b + 1], first)
            states_BLS[b, self.shape[0] - len(states_LS) :] = states_LS
        return states_BLS

    def run(self, query: Array, rows: Any) -> Array:
        """float32[L or 1, S]: one query's states, as the graph returns them.

        query  int64[1, L, T] nodes of a history, int64[1, T] leaves of a sequence, or float32[1, F]
        rows   the table that these nodes or leaves index, stored as `self.rows` is
        """
        feeds = {self._input: query}
        if self._row_value is not None:
            feeds["node_rows"] = rows
        states_LS: Array = self._session.run(None, feeds)[0][0]
        return states_LS

    def _states(self, query: Array, first: int) -> Array:
        """float32[H + 1 − first or 1, S]: one query's states."""
        if self.takes_any_length:
            query = query[:, -read_length(query[0]) :]
        if self.reads_sequences:
            return self.run(np.where(query >= 0, self._leaf_of_item[query], -1), self._row_value)[first:]
        if not self._history:
            return self.run(np.ascontiguousarray(query), self._row_value)
        nodes_1LT = np.empty((1, self._height + 1 - (first if self._per_level else 0), query.shape[1]), np.int64)
        history_nodes(query[0], self._leaf_of_item, self._parent, nodes_1LT[0])
        return self.run(nodes_1LT, self._row_value)


def takes_any_length(model: onnx.ModelProto) -> bool:
    """Whether a query encoder takes histories of any length, up to that of the manifest: padding in front may be left out."""
    for entry in model.graph.input:
        if entry.name.startswith("history"):
            sizes = entry.type.tensor_type.shape.dim
            return len(sizes) > 0 and not sizes[-1].HasField("dim_value")
    return False


def read_length(history_T: Int64) -> int:
    """How many entries of a history (item rows, −1 as padding) are read: the power of two that holds all items, at most T.

    ONNX Runtime plans its memory for each new length, so there are only a few lengths.
    """
    first = int((history_T >= 0).argmax())  # 0 for an empty one, too
    if history_T[first] < 0:
        return 1
    return min(len(history_T), 1 << (len(history_T) - first - 1).bit_length())


@compiled()
def history_nodes(history_T: Array, leaf_of_item: Array, parent: Array, nodes_LT: Array) -> None:
    """Write the ancestors of a history's items (int64[T] item rows, −1 as padding) on the last L levels; −1 for padding."""
    last = len(nodes_LT) - 1
    for t in range(len(history_T)):
        node = np.int64(-1) if history_T[t] < 0 else leaf_of_item[history_T[t]]
        for level in range(last, -1, -1):
            nodes_LT[level, t] = node
            if node >= 0:
                node = parent[node]


def free_inputs(model: onnx.ModelProto) -> None:
    """Drop the input `node_rows` if no operator reads it, and the shapes of the exporter's example, which had fewer rows."""
    graph = model.graph
    used_names = {name for node in graph.node for name in node.input}
    inputs = [entry for entry in graph.input if entry.name != "node_rows" or entry.name in used_names]
    for entry in inputs:
        entry.type.tensor_type.ClearField("shape")
    del graph.input[:], graph.value_info[:]
    graph.input.extend(inputs)


def _other_use(model: onnx.ModelProto) -> str:
    """How a graph uses node rows other than by looking them up; empty: it only looks them up."""
    for node in model.graph.node:
        axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 0)
        if "node_rows" in node.input and (node.op_type != "Gather" or list(node.input).index("node_rows") != 0 or axis != 0):
            return f"query.onnx does not only look rows up: {node.op_type} reads node_rows"
    return ""


def look_up_narrow(model: onnx.ModelProto, dtype: np.dtype[Any]) -> None:
    """Make `node_rows`, which are only looked up, an input of float16, or of int8 with exponents (espalier.node_rows), and widen the
    gathered rows.
    """
    nodes, packed = list(model.graph.node), dtype == np.int8
    del model.graph.node[:]
    for node in nodes:
        model.graph.node.append(node)
        if "node_rows" not in node.input:
            continue
        gather = model.graph.node[-1]
        rows, gather.output[0] = gather.output[0], f"{gather.output[0]}/stored"
        numbers = f"{rows}/numbers" if packed else rows
        model.graph.node.append(helper.make_node("Cast", [gather.output[0]], [numbers], to=onnx.TensorProto.FLOAT))
        if packed:
            model.graph.node.extend(_scaled(numbers, rows))
    if packed:
        tables = {"node_rows/two": np.array(2, np.float32)}
        tables |= {f"node_rows/{name}": np.array([value]) for name, value in (("first", 0), ("last", -1), ("end", MOST))}
        model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in tables.items())
    for entry in model.graph.input:
        if entry.name == "node_rows":
            entry.type.tensor_type.elem_type = onnx.TensorProto.INT8 if packed else onnx.TensorProto.FLOAT16


def _scaled(stored: str, rows: str) -> list[onnx.NodeProto]:
    """rows = stored[…, :−1] · 2^stored[…, −1:]."""
    codes, exponent, scale = (f"{rows}/{name}" for name in ("codes", "exponent", "scale"))
    return [
        helper.make_node("Slice", [stored, "node_rows/first", "node_rows/last", "node_rows/last"], [codes]),
        helper.make_node("Slice", [stored, "node_rows/last", "node_rows/end", "node_rows/last"], [exponent]),
        helper.make_node("Pow", ["node_rows/two", exponent], [scale]),
        helper.make_node("Mul", [codes, scale], [rows]),
    ]
