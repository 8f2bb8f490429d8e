"""A query encoder's ONNX graph, run as torch operations on any device, also inside a CUDA graph.

Knows graphs; single operators are in `torch_operators.py`. Does not know trees or searches. Shapes and axes stay on the host, so a run
never waits for the device; products of matrices go through `kernels.matmul`, whose rows do not depend on the batch.

Legend: B queries, L levels, T history, N nodes, D node row, S state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from torch import Tensor

from espalier.engines.triton.kernels.matmul import matmul
from espalier.engines.triton.torch_operators import HOST_INPUTS, OPERATORS, constant_of
from espalier.errors import BundleCorrupt, UnsupportedGraph


@dataclass(frozen=True)
class _Rows:
    """Rows of the node table, not looked up yet, because a product can gather them itself: index int64[...] → [..., D]."""

    table_ND: Tensor
    index: Tensor

    def looked_up(self) -> Tensor:
        return self.table_ND[self.index].float()


def encoder_of(
    model: onnx.ModelProto, device: torch.device, node_dim: int, levels: int, query_width: int, states: tuple[int, int]
) -> TorchGraph:
    """A query encoder, compared with its graph on an empty and a random query. Raises UnsupportedGraph where it differs or cannot run.

    levels, query_width  of histories: the number of levels, and T; of vectors query_width is F
    states               the declared L and S of the states: kernels read so many numbers. Raises BundleCorrupt for other states
    """
    encoder = TorchGraph(model, device)
    rng = np.random.default_rng(0)
    nodes = np.full((2, levels, query_width), -1)
    nodes[1, :, query_width // 2 :] = rng.integers(0, 8, (levels, query_width - query_width // 2))
    leaves = nodes[:, -1]
    vectors = np.stack([np.zeros(query_width), rng.standard_normal(query_width)]).astype(np.float32)
    rows = rng.standard_normal((8, node_dim)).astype(np.float32)
    feeds = {"history_nodes": nodes, "history_leaves": leaves, "vector": vectors, "node_rows": rows}
    feeds = {name: array for name, array in feeds.items() if name in encoder.inputs}
    try:
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):  # an empty vector may have no direction
            expected = np.asarray(next(iter(ReferenceEvaluator(model).run(None, feeds))))
        got = encoder(**{name: torch.from_numpy(array).to(device) for name, array in feeds.items()}).cpu().numpy()
    except Exception as error:  # ONNX's evaluator and torch raise many kinds, none of them ours
        raise error if isinstance(error, UnsupportedGraph) else UnsupportedGraph(f"query.onnx cannot be run ({error})") from error
    largest = float(np.max(np.abs(expected), where=np.isfinite(expected), initial=1.0))
    if got.shape != expected.shape or not np.allclose(got, expected, rtol=1e-4, atol=1e-4 * largest, equal_nan=True):
        raise UnsupportedGraph("query.onnx computes something else in torch than in ONNX")
    if got.shape != (len(nodes), *states):
        raise BundleCorrupt(f"query.onnx: the states of two queries are {list(got.shape)}, the manifest says {[len(nodes), *states]}")
    return encoder


Value = Tensor | _Rows
SPECIAL = frozenset({"Constant", "Shape", "MatMul"})


class TorchGraph:
    """Runs the graph: named tensors in, its one output out.

    model   a checked graph without local functions; node_rows may be float16, all else is float32 and int64
    device  where constants are kept, and inputs are expected

    Raises UnsupportedGraph when an operator is not supported.
    """

    def __init__(self, model: onnx.ModelProto, device: torch.device) -> None:
        graph = model.graph
        unknown = sorted({node.op_type for node in graph.node} - OPERATORS.keys() - SPECIAL)
        if unknown:
            raise UnsupportedGraph(f"query.onnx has the operators {', '.join(unknown)}")
        self._nodes = [(node, {entry.name: helper.get_attribute_value(entry) for entry in node.attribute}) for node in graph.node]
        self.inputs = frozenset(entry.name for entry in graph.input)
        self._output = graph.output[0].name
        constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
        constants |= {node.output[0]: constant_of(attributes) for node, attributes in self._nodes if node.op_type == "Constant"}
        self._on_host = {name: torch.from_numpy(np.array(array)) for name, array in constants.items()}
        self._on_device = {name: tensor.to(device) for name, tensor in self._on_host.items()}

    def __call__(self, **inputs: Tensor) -> Tensor:
        values: dict[str, Value] = {name: inputs[name] for name in self.inputs}
        for node, attributes in self._nodes:
            if node.op_type != "Constant":
                outputs = self._run(node, attributes, values)
                values.update(zip(node.output, outputs if isinstance(outputs, list) else [outputs], strict=False))
        return self._tensor(values[self._output])

    def _run(self, node: onnx.NodeProto, attributes: dict[str, Any], values: dict[str, Value]) -> Value | list[Tensor]:
        operator = node.op_type
        if operator == "Shape":
            source = values[node.input[0]]
            shape = source.shape if isinstance(source, Tensor) else (*source.index.shape, source.table_ND.shape[1])
            return torch.tensor(list(shape)[attributes.get("start", 0) : attributes.get("end")])
        table = values.get(node.input[0])
        if operator in ("Gather", "GatherND") and node.input[0] == "node_rows" and isinstance(table, Tensor):
            index = self._tensor(self._value(node.input[1], values))
            return _Rows(table, index if operator == "Gather" else index.squeeze(-1))
        if operator == "MatMul":
            left, right = (self._value(name, values) for name in node.input)
            if isinstance(right, _Rows) and right.index.ndim > 0:
                return matmul(self._tensor(left), right.table_ND, right.index)
            return matmul(self._tensor(left), self._tensor(right))
        host = HOST_INPUTS.get(operator, ())
        arguments = [
            None if not name else self._host_value(name, values) if i in host else self._tensor(self._value(name, values))
            for i, name in enumerate(node.input)
        ]
        # Values computed from shapes stay on the host. Constants are on both sides, and are taken from where the other inputs are.
        computed = [values[name] for i, name in enumerate(node.input) if name in values and i not in host]
        if computed and all(isinstance(value, Tensor) and value.device.type == "cpu" for value in computed):
            arguments = [
                argument if i in host else self._on_host.get(name, argument)
                for i, (name, argument) in enumerate(zip(node.input, arguments, strict=True))
            ]
        return OPERATORS[operator](attributes, *arguments)

    def _value(self, name: str, values: dict[str, Value]) -> Value:
        return values[name] if name in values else self._on_device[name]

    def _host_value(self, name: str, values: dict[str, Value]) -> list[int]:
        tensor = self._on_host[name] if name in self._on_host else values[name]
        if not isinstance(tensor, Tensor) or tensor.device.type != "cpu":
            raise UnsupportedGraph(f"query.onnx works its shapes out from what a query holds ({name})")
        return [int(entry) for entry in tensor.flatten().tolist()]

    @staticmethod
    def _tensor(value: Value) -> Tensor:
        return value if isinstance(value, Tensor) else value.looked_up()
