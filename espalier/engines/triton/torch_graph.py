"""A query encoder's ONNX graph, run as torch operations on any device, in a CUDA graph too.

Knows ONNX operators. Does not know trees or searches. Shapes and axes stay on the host, so a run waits for no device; products of matrices
go through `kernels.matmul`, whose rows do not depend on the batch.

Legend: B queries, L levels, T history, N nodes, D node row, S state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from torch import Tensor

from espalier.engines.triton.kernels.matmul import matmul
from espalier.errors import UnsupportedGraph


@dataclass(frozen=True)
class _Rows:
    """Rows of the node table that nothing but a product may need: index int64[...] → [..., D]."""

    table_ND: Tensor
    index: Tensor

    def looked_up(self) -> Tensor:
        return self.table_ND[self.index].float()


def encoder_of(model: onnx.ModelProto, device: torch.device, node_dim: int, levels: int, query_width: int) -> TorchGraph:
    """A query encoder, compared with its graph on an empty and a random query. Raises UnsupportedGraph where it differs or cannot run.

    levels, query_width  of histories: how many levels they are given on, and T; of vectors query_width is F
    """
    encoder = TorchGraph(model, device)
    rng = np.random.default_rng(0)
    nodes = np.full((2, levels, query_width), -1)
    nodes[1, :, query_width // 2 :] = rng.integers(0, 8, (levels, query_width - query_width // 2))
    vectors = np.stack([np.zeros(query_width), rng.standard_normal(query_width)]).astype(np.float32)
    feeds = {"history_nodes": nodes, "vector": vectors, "node_rows": rng.standard_normal((8, node_dim)).astype(np.float32)}
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
    return encoder


Value = Tensor | _Rows
Operator = Callable[..., Tensor]


class TorchGraph:
    """Calls like the graph: named tensors in, its one output out.

    model   a checked graph without local functions; node_rows may be float16, all else is float32 and int64
    device  where constants are kept, and inputs are expected

    Raises UnsupportedGraph when an operator is not known.
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
                values[node.output[0]] = self._run(node, attributes, values)
        return self._tensor(values[self._output])

    def _run(self, node: onnx.NodeProto, attributes: dict[str, Any], values: dict[str, Value]) -> Value:
        operator = node.op_type
        if operator == "Shape":
            source = values[node.input[0]]
            shape = source.shape if isinstance(source, Tensor) else (*source.index.shape, source.table_ND.shape[1])
            return torch.tensor(list(shape)[attributes.get("start", 0) : attributes.get("end")])
        table = values.get(node.input[0])
        if operator == "Gather" and node.input[0] == "node_rows" and isinstance(table, Tensor):
            return _Rows(table, self._tensor(self._value(node.input[1], values)))
        if operator == "MatMul":
            left, right = (self._value(name, values) for name in node.input)
            if isinstance(right, _Rows) and right.index.ndim > 0:
                return matmul(self._tensor(left), right.table_ND, right.index)
            return matmul(self._tensor(left), self._tensor(right))
        host = HOST_INPUTS.get(operator, ())
        arguments = [
            None if not name else self._host_value(name, values) if place in host else self._tensor(self._value(name, values))
            for place, name in enumerate(node.input)
        ]
        # What is worked out from shapes stays on the host; constants join those that they meet.
        there = [values[name] for place, name in enumerate(node.input) if name in values and place not in host]
        if there and all(isinstance(value, Tensor) and value.device.type == "cpu" for value in there):
            arguments = [self._on_host.get(name, argument) for name, argument in zip(node.input, arguments, strict=True)]
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


def _gather(attributes: dict[str, Any], data: Tensor, index: Tensor) -> Tensor:
    axis = attributes.get("axis", 0) % data.ndim
    picked = data.index_select(axis, torch.where(index < 0, index + data.shape[axis], index).flatten())
    return picked.view(*data.shape[:axis], *index.shape, *data.shape[axis + 1 :])


def _slice(
    attributes: dict[str, Any], data: Tensor, starts: Sequence[int], ends: Sequence[int], axes: Sequence[int] | None = None,
    steps: Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    for place, (start, end) in enumerate(zip(starts, ends, strict=True)):
        axis = axes[place] if axes is not None else place
        step = 1 if steps is None else steps[place]
        if step < 1:
            raise UnsupportedGraph("query.onnx has a Slice with a negative step")
        length = data.shape[axis]
        index = range(length)[slice(start, end, step)]
        data = data.narrow(axis, index.start, max(0, index.stop - index.start)) if step == 1 else data.index_select(
            axis, torch.arange(index.start, index.stop, step, device=data.device)
        )  # fmt: skip
    return data


def _reshape(attributes: dict[str, Any], data: Tensor, shape: Sequence[int]) -> Tensor:
    if not attributes.get("allowzero", 0):
        shape = [data.shape[place] if size == 0 else size for place, size in enumerate(shape)]
    return data.reshape(list(shape))


def _unsqueeze(attributes: dict[str, Any], data: Tensor, axes: Sequence[int]) -> Tensor:
    rank = data.ndim + len(axes)
    for axis in sorted(axis % rank for axis in axes):
        data = data.unsqueeze(axis)
    return data


def _squeeze(attributes: dict[str, Any], data: Tensor, axes: Sequence[int] | None = None) -> Tensor:
    return data.squeeze() if axes is None else data.squeeze([axis % data.ndim for axis in axes])


def _reduce_sum(attributes: dict[str, Any], data: Tensor, axes: Sequence[int] | None = None) -> Tensor:
    if not axes:
        raise UnsupportedGraph("query.onnx has a ReduceSum without axes")
    keep = bool(attributes.get("keepdims", 1))
    if not data.is_floating_point():
        return data.sum(list(axes), keepdim=keep)
    for axis in sorted((axis % data.ndim for axis in axes), reverse=True):
        moved = data.movedim(axis, -1).unsqueeze(-2)  # [..., 1, K] · ones: a product's sums do not depend on the batch
        summed = matmul(moved, torch.ones((data.shape[axis], 1), device=data.device)).squeeze(-1)
        data = summed.movedim(-1, axis) if keep else summed.squeeze(-1)
    return data


def _gemm(attributes: dict[str, Any], left: Tensor, right: Tensor, added: Tensor | None = None) -> Tensor:
    left = left.T if attributes.get("transA", 0) else left
    right = right.T if attributes.get("transB", 0) else right
    product = matmul(left, right) * float(attributes.get("alpha", 1.0))
    return product if added is None else product + float(attributes.get("beta", 1.0)) * added


def _expand(attributes: dict[str, Any], data: Tensor, shape: Sequence[int]) -> Tensor:
    return data.expand(np.broadcast_shapes(tuple(data.shape), tuple(shape)))


def _concat(attributes: dict[str, Any], *parts: Tensor) -> Tensor:
    if len({part.device for part in parts}) > 1:  # a copy between them would wait, which a CUDA graph cannot
        raise UnsupportedGraph("query.onnx joins what it works out from shapes with what a query holds")
    return torch.cat(parts, attributes["axis"])


def _divide(attributes: dict[str, Any], a: Tensor, b: Tensor) -> Tensor:
    return a / b if a.is_floating_point() else torch.div(a, b, rounding_mode="trunc")


def _clip(attributes: dict[str, Any], data: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
    data = data if low is None else torch.maximum(data, low.to(data.dtype))
    return data if high is None else torch.minimum(data, high.to(data.dtype))


def _cast(attributes: dict[str, Any], data: Tensor) -> Tensor:
    dtype = DTYPES.get(attributes["to"])
    if dtype is None:
        raise UnsupportedGraph(f"query.onnx casts to ONNX type {attributes['to']}")
    return data.to(dtype)


def _transpose(attributes: dict[str, Any], data: Tensor) -> Tensor:
    return data.permute(attributes.get("perm", list(reversed(range(data.ndim)))))


def _prelu(attributes: dict[str, Any], x: Tensor, slope: Tensor) -> Tensor:
    return torch.where(x >= 0, x, x * slope)


def constant_of(attributes: dict[str, Any]) -> NDArray[Any]:
    """The array of a Constant node, in whichever way it is given."""
    for name, dtype in (("value_int", np.int64), ("value_ints", np.int64), ("value_float", np.float32), ("value_floats", np.float32)):
        if name in attributes:
            return np.array(attributes[name], dtype)
    if "value" not in attributes:
        raise UnsupportedGraph(f"a Constant is given as {', '.join(attributes)}")
    return numpy_helper.to_array(attributes["value"])


DTYPES = {onnx.TensorProto.FLOAT: torch.float32, onnx.TensorProto.INT64: torch.int64, onnx.TensorProto.BOOL: torch.bool}
SPECIAL = frozenset({"Constant", "Shape", "MatMul"})
HOST_INPUTS: dict[str, tuple[int, ...]] = {
    "Slice": (1, 2, 3, 4),
    "Reshape": (1,),
    "Expand": (1,),
    "Unsqueeze": (1,),
    "Squeeze": (1,),
    "ReduceSum": (1,),
}
"""Which inputs of an operator are shapes or axes."""

OPERATORS: dict[str, Operator] = {
    "Add": lambda _, a, b: a + b,
    "Cast": _cast,
    "Clip": _clip,
    "Concat": _concat,
    "Div": _divide,
    "Expand": _expand,
    "Gather": _gather,
    "Gemm": _gemm,
    "GreaterOrEqual": lambda _, a, b: a >= b,
    "Identity": lambda _, a: a,
    "LeakyRelu": lambda attributes, a: torch.nn.functional.leaky_relu(a, attributes.get("alpha", 0.01)),
    "Max": lambda _, first, *others: _folded(torch.maximum, first, others),
    "Min": lambda _, first, *others: _folded(torch.minimum, first, others),
    "Mul": lambda _, a, b: a * b,
    "PRelu": _prelu,
    "ReduceSum": _reduce_sum,
    "Relu": lambda _, a: torch.relu(a),
    "Reshape": _reshape,
    "Slice": _slice,
    "Squeeze": _squeeze,
    "Sub": lambda _, a, b: a - b,
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
    "Where": lambda _, condition, a, b: torch.where(condition, a, b),
}


def _folded(operator: Callable[[Tensor, Tensor], Tensor], first: Tensor, others: Sequence[Tensor]) -> Tensor:
    for other in others:
        first = operator(first, other)
    return first
