"""ONNX operators as torch operations: (attributes, inputs) → the first output, or a list of all.

A query's result does not depend on the batch: sums go through `kernels.matmul`, because torch's own order of a sum depends on the number of
rows. Shapes and axes come as integers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import numpy_helper
from torch import Tensor

from espalier.engines.triton.kernels.matmul import matmul
from espalier.errors import UnsupportedGraph

Operator = Callable[..., Tensor | list[Tensor]]


def _gather(attributes: dict[str, Any], data: Tensor, index: Tensor) -> Tensor:
    axis = attributes.get("axis", 0) % data.ndim
    picked = data.index_select(axis, _from_start(index, data.shape[axis]).flatten())
    return picked.view(*data.shape[:axis], *index.shape, *data.shape[axis + 1 :])


def _gather_elements(attributes: dict[str, Any], data: Tensor, index: Tensor) -> Tensor:
    axis = attributes.get("axis", 0) % data.ndim
    return data.gather(axis, _from_start(index, data.shape[axis]))


def _gather_nd(attributes: dict[str, Any], data: Tensor, index: Tensor) -> Tensor:
    if attributes.get("batch_dims", 0):
        raise UnsupportedGraph("query.onnx has a GatherND with batch_dims")
    return data[tuple(index.unbind(-1))]


def _from_start(index: Tensor, size: int) -> Tensor:
    """Indices counted from the start: ONNX counts negative ones from the end."""
    return torch.where(index < 0, index + size, index)


def _split(attributes: dict[str, Any], data: Tensor, sizes: Sequence[int] | None = None) -> list[Tensor]:
    axis = attributes.get("axis", 0)
    return list(torch.split(data, -(-data.shape[axis] // attributes["num_outputs"]) if sizes is None else list(sizes), axis))


def _slice(
    attributes: dict[str, Any], data: Tensor, starts: Sequence[int], ends: Sequence[int], axes: Sequence[int] | None = None,
    steps: Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
        axis = axes[i] if axes is not None else i
        step = 1 if steps is None else steps[i]
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
        shape = [data.shape[i] if size == 0 else size for i, size in enumerate(shape)]
    return data.reshape(list(shape))


def _unsqueeze(attributes: dict[str, Any], data: Tensor, axes: Sequence[int]) -> Tensor:
    rank = data.ndim + len(axes)
    for axis in sorted(axis % rank for axis in axes):
        data = data.unsqueeze(axis)
    return data


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


def _reduce_mean(attributes: dict[str, Any], data: Tensor, axes: Sequence[int] | None = None) -> Tensor:
    summed = _reduce_sum(attributes, data, axes)
    return summed / (data.numel() // max(1, summed.numel()))


def _reduce_max(attributes: dict[str, Any], data: Tensor, axes: Sequence[int] | None = None) -> Tensor:
    if not axes:
        raise UnsupportedGraph("query.onnx has a ReduceMax without axes")
    return data.amax(list(axes), keepdim=bool(attributes.get("keepdims", 1)))


def _softmax(attributes: dict[str, Any], data: Tensor) -> Tensor:
    axis = attributes.get("axis", -1)
    raised = torch.exp(data - data.amax(axis, keepdim=True))
    return raised / _reduce_sum({}, raised, [axis])


def _layer_normalisation(attributes: dict[str, Any], data: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    axes = list(range(attributes.get("axis", -1) % data.ndim, data.ndim))
    centred = data - _reduce_mean({}, data, axes)
    variance = _reduce_mean({}, centred * centred, axes)
    normal = centred / torch.sqrt(variance + attributes.get("epsilon", 1e-5)) * scale
    return normal if bias is None else normal + bias


def _cumulative_sum(attributes: dict[str, Any], data: Tensor, axis: Sequence[int]) -> Tensor:
    if data.is_floating_point() or attributes.get("exclusive", 0) or attributes.get("reverse", 0):
        raise UnsupportedGraph("query.onnx has a CumSum of other than whole numbers, or one that is exclusive or in reverse")
    return data.cumsum(axis[0])


def _gemm(attributes: dict[str, Any], left: Tensor, right: Tensor, added: Tensor | None = None) -> Tensor:
    left = left.T if attributes.get("transA", 0) else left
    right = right.T if attributes.get("transB", 0) else right
    product = matmul(left, right) * float(attributes.get("alpha", 1.0))
    return product if added is None else product + float(attributes.get("beta", 1.0)) * added


def _concat(attributes: dict[str, Any], *tensors: Tensor) -> Tensor:
    if len({tensor.device for tensor in tensors}) > 1:  # a copy between them would wait, which a CUDA graph cannot
        raise UnsupportedGraph("query.onnx joins what it works out from shapes with what a query holds")
    return torch.cat(tensors, attributes["axis"])


def _clip(attributes: dict[str, Any], data: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
    data = data if low is None else torch.maximum(data, low.to(data.dtype))
    return data if high is None else torch.minimum(data, high.to(data.dtype))


def _cast(attributes: dict[str, Any], data: Tensor) -> Tensor:
    dtype = DTYPES.get(attributes["to"])
    if dtype is None:
        raise UnsupportedGraph(f"query.onnx casts to ONNX type {attributes['to']}")
    return data.to(dtype)


def constant_of(attributes: dict[str, Any]) -> NDArray[Any]:
    """The array of a Constant node, whichever attribute holds it."""
    for name, dtype in (("value_int", np.int64), ("value_ints", np.int64), ("value_float", np.float32), ("value_floats", np.float32)):
        if name in attributes:
            return np.array(attributes[name], dtype)
    if "value" not in attributes:
        raise UnsupportedGraph(f"a Constant is given as {', '.join(attributes)}")
    return numpy_helper.to_array(attributes["value"])


DTYPES = {onnx.TensorProto.FLOAT: torch.float32, onnx.TensorProto.INT64: torch.int64, onnx.TensorProto.BOOL: torch.bool}
_OF_SHAPES = ("Reshape", "Expand", "Unsqueeze", "Squeeze", "ReduceSum", "ReduceL2", "ReduceMax", "ReduceMean", "CumSum", "Split")
HOST_INPUTS: dict[str, tuple[int, ...]] = dict.fromkeys(_OF_SHAPES, (1,)) | {"Slice": (1, 2, 3, 4)}
"""Which inputs of an operator are shapes or axes."""

OPERATORS: dict[str, Operator] = {
    "Add": lambda _, a, b: a + b,
    "And": lambda _, a, b: a & b,
    "Cast": _cast,
    "Clip": _clip,
    "Concat": _concat,
    "CumSum": _cumulative_sum,
    "Div": lambda _, a, b: a / b if a.is_floating_point() else torch.div(a, b, rounding_mode="trunc"),
    "Equal": lambda _, a, b: a == b,
    "Erf": lambda _, a: torch.erf(a),
    "Expand": lambda _, data, shape: data.expand(np.broadcast_shapes(tuple(data.shape), tuple(shape))),
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "Gelu": lambda attributes, a: torch.nn.functional.gelu(a, approximate=attributes.get("approximate", b"none").decode()),
    "Gemm": _gemm,
    "Greater": lambda _, a, b: a > b,
    "GreaterOrEqual": lambda _, a, b: a >= b,
    "Identity": lambda _, a: a,
    "IsNaN": lambda _, a: torch.isnan(a),
    "LayerNormalization": _layer_normalisation,
    "LeakyRelu": lambda attributes, a: torch.nn.functional.leaky_relu(a, attributes.get("alpha", 0.01)),
    "Less": lambda _, a, b: a < b,
    "LessOrEqual": lambda _, a, b: a <= b,
    "Max": lambda _, first, *others: _folded(torch.maximum, first, others),
    "Min": lambda _, first, *others: _folded(torch.minimum, first, others),
    "Mul": lambda _, a, b: a * b,
    "Neg": lambda _, a: -a,
    "Not": lambda _, a: ~a,
    "Or": lambda _, a, b: a | b,
    "PRelu": lambda _, x, slope: torch.where(x >= 0, x, x * slope),
    "Pow": lambda _, a, b: torch.pow(a, b),
    "ReduceL2": lambda attributes, data, axes=None: torch.sqrt(_reduce_sum(attributes, data * data, axes)),
    "ReduceMax": _reduce_max,
    "ReduceMean": _reduce_mean,
    "ReduceSum": _reduce_sum,
    "Relu": lambda _, a: torch.relu(a),
    "Reshape": _reshape,
    "Sigmoid": lambda _, a: torch.sigmoid(a),
    "Slice": _slice,
    "Softmax": _softmax,
    "Split": _split,
    "Sqrt": lambda _, a: torch.sqrt(a),
    "Squeeze": lambda _, data, axes=None: data.squeeze() if axes is None else data.squeeze([axis % data.ndim for axis in axes]),
    "Sub": lambda _, a, b: a - b,
    "Tanh": lambda _, a: torch.tanh(a),
    "Transpose": lambda attributes, data: data.permute(attributes.get("perm", list(reversed(range(data.ndim))))),
    "Unsqueeze": _unsqueeze,
    "Where": lambda _, condition, a, b: torch.where(condition, a, b),
}


def _folded(operator: Callable[[Tensor, Tensor], Tensor], first: Tensor, others: Sequence[Tensor]) -> Tensor:
    for other in others:
        first = operator(first, other)
    return first
