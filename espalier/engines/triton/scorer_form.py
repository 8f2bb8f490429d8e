"""What a bundle's scorer.onnx computes, as weights: an inner product, or an MLP that the query state enters in its first layer.

Knows one ONNX graph. A graph is followed operator by operator from `node_rows` to `logits`; what was read out of it is then compared with
the graph itself on random inputs, so that a graph that is misread is refused and never served.

Legend: B queries, C candidates, D node row, S state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from espalier.engines.triton.torch_graph import constant_of
from espalier.errors import UnsupportedGraph

Floats = NDArray[np.float32]
MAX_HIDDEN = 4
"""Hidden layers of an MLP that the kernels take."""
MAX_MATRIX = 256 * 128
"""Weights of one layer, padded, that a program can hold: more of them do not fit the shared memory of a processor."""
RESHAPING = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Expand"})
"""Operators that leave each node's numbers as they are; that they do is seen in the comparison."""


@dataclass(frozen=True)
class Layer:
    """x → x · weight + bias, then max(x, 0) + slope · min(x, 0), all by output."""

    weight: Floats
    bias: Floats
    slope: Floats


@dataclass(frozen=True)
class ScorerForm:
    """logit = ⟨state, row⟩ where there are no layers; else out(… layer₂(φ(row · weight₁ + bias₁ + state)) …).

    layers       hidden layers; the state is added before the first one's activation
    out, offset  float32[last width], float: the output layer
    """

    layers: tuple[Layer, ...] = ()
    out: Floats = field(default_factory=lambda: np.empty(0, np.float32))
    offset: float = 0.0

    def logits(self, state_BS: Floats, rows_BCD: Floats) -> Floats:
        """float32[B, C], in NumPy: what the kernels are to compute."""
        if not self.layers:
            return np.asarray(np.einsum("bcd,bd->bc", rows_BCD, state_BS), np.float32)
        x: Any = rows_BCD
        for place, layer in enumerate(self.layers):
            x = x @ layer.weight + layer.bias + (state_BS[:, None] if place == 0 else 0)
            x = np.where(x >= 0, x, layer.slope * x)
        return np.asarray(x @ self.out + self.offset, np.float32)


@dataclass(frozen=True)
class _Chain:
    """A value on the way: the layers so far, the last of them still growing."""

    weights: tuple[Floats, ...] = ()
    biases: tuple[Floats | None, ...] = ()
    slopes: tuple[Floats | None, ...] = ()
    has_state: bool = False
    product: bool = False


@dataclass(frozen=True)
class _State:
    """The query state, perhaps with more axes."""


def scorer_form(model: onnx.ModelProto, state_dim: int, node_dim: int) -> ScorerForm:
    """What a checked scorer graph computes. Raises UnsupportedGraph, with the reason, when it is neither of the two forms."""
    form = _read(model)
    rng = np.random.default_rng(0)
    state_BS = rng.standard_normal((2, state_dim), np.float32)
    rows_BCD = rng.standard_normal((2, 5, node_dim), np.float32)
    try:
        expected = np.asarray(next(iter(ReferenceEvaluator(model).run(None, {"query_state": state_BS, "node_rows": rows_BCD}))))
        got = form.logits(state_BS, rows_BCD)
    except Exception as error:  # the evaluator raises many kinds, none of them ours
        raise UnsupportedGraph(f"scorer.onnx cannot be run ({error})") from error
    if expected.shape != got.shape or not np.allclose(got, expected, rtol=1e-4, atol=1e-4 * max(1.0, float(np.abs(expected).max()))):
        raise UnsupportedGraph("scorer.onnx computes something else than the operators it is made of seem to say")
    if len(form.layers) > MAX_HIDDEN:
        raise UnsupportedGraph(f"scorer.onnx has {len(form.layers)} hidden layers, at most {MAX_HIDDEN} are known")
    widths = [node_dim, *(len(layer.bias) for layer in form.layers)]
    for before, after in pairwise(max(16, 1 << (width - 1).bit_length()) for width in widths):
        if before * after > MAX_MATRIX:
            raise UnsupportedGraph(f"scorer.onnx has a layer of {before} × {after} weights, at most {MAX_MATRIX} are known")
    return form


def _read(model: onnx.ModelProto) -> ScorerForm:
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    values: dict[str, Any] = {"node_rows": _Chain(), "query_state": _State()}
    for node in model.graph.node:
        attributes = {entry.name: helper.get_attribute_value(entry) for entry in node.attribute}
        if node.op_type == "Constant":
            constants[node.output[0]] = constant_of(attributes)
            continue
        inputs = [values.get(name, constants.get(name)) for name in node.input]
        if not any(isinstance(value, _Chain | _State) for value in inputs) or node.op_type == "Shape":
            continue  # shape arithmetic, which nothing but a reshape uses
        values[node.output[0]] = _step(node.op_type, inputs, attributes)
    end = values.get(model.graph.output[0].name)
    if not isinstance(end, _Chain):
        raise UnsupportedGraph("scorer.onnx has logits that do not come from node rows")
    if end.product:
        return ScorerForm()
    if not end.has_state or len(end.weights) < 2 or end.weights[-1].shape[1] != 1 or end.slopes[-1] is not None:
        raise UnsupportedGraph("scorer.onnx is no MLP with one output that the query state enters")
    layers = tuple(
        Layer(weight, _or(bias, 0.0, weight), _or(slope, 1.0, weight))
        for weight, bias, slope in zip(end.weights[:-1], end.biases, end.slopes, strict=False)
    )
    return ScorerForm(layers, end.weights[-1][:, 0], float(_or(end.biases[-1], 0.0, end.weights[-1])[0]))


def _step(operator: str, inputs: Sequence[Any], attributes: dict[str, Any]) -> _Chain | _State:
    chain = next((value for value in inputs if isinstance(value, _Chain)), None)
    state = next((value for value in inputs if isinstance(value, _State)), None)
    constant = next((value for value in inputs[1:] if isinstance(value, np.ndarray)), None)
    if operator in RESHAPING and (chain is None) != (state is None):
        return chain or _State()
    if chain is not None and state is not None:
        if operator == "MatMul" and not chain.weights:
            return _Chain(product=True)
        if operator == "Add" and len(chain.weights) == 1 and not chain.has_state and chain.slopes[-1] is None:
            return replace(chain, has_state=True)
    elif chain is not None and not chain.product:
        if operator == "MatMul" and inputs[0] is chain and constant is not None and constant.ndim == 2:
            return _grown(chain, constant)
        if operator == "Gemm" and inputs[0] is chain and constant is not None and not attributes.get("transA", 0):
            weight = constant.T if attributes.get("transB", 0) else constant
            grown = _grown(chain, weight * np.float32(attributes.get("alpha", 1.0)))
            return grown if len(inputs) < 3 else _biased(grown, inputs[2] * np.float32(attributes.get("beta", 1.0)))
        if operator == "Add" and chain.weights and chain.slopes[-1] is None:
            other = inputs[1] if inputs[0] is chain else inputs[0]
            if isinstance(other, np.ndarray):
                return _biased(chain, other)
        if operator in ("Relu", "LeakyRelu", "PRelu") and chain.weights and chain.slopes[-1] is None:
            slope = constant if operator == "PRelu" else np.float32(0 if operator == "Relu" else attributes.get("alpha", 0.01))
            if slope is not None:
                return replace(chain, slopes=(*chain.slopes[:-1], _wide(slope, chain.weights[-1])))
    raise UnsupportedGraph(f"scorer.onnx has a {operator} where neither an inner product nor an MLP has one")


def _grown(chain: _Chain, weight: Any) -> _Chain:
    if chain.weights and chain.slopes[-1] is None:
        raise UnsupportedGraph("scorer.onnx has two products of matrices without an activation between them")
    if len(chain.weights) == 1 and not chain.has_state:
        raise UnsupportedGraph("scorer.onnx has an MLP that the query state does not enter in its first layer")
    return replace(
        chain, weights=(*chain.weights, np.asarray(weight, np.float32)), biases=(*chain.biases, None), slopes=(*chain.slopes, None)
    )


def _biased(chain: _Chain, bias: Any) -> _Chain:
    wide = _wide(bias, chain.weights[-1])
    before = chain.biases[-1]
    return replace(chain, biases=(*chain.biases[:-1], wide if before is None else before + wide))


def _wide(values: Any, weight: Floats) -> Floats:
    """One number per output of a layer."""
    flat = np.asarray(values, np.float32).reshape(-1)
    if flat.size not in (1, weight.shape[1]):
        raise UnsupportedGraph(f"scorer.onnx has a bias or a slope of {flat.size} numbers in a layer of {weight.shape[1]}")
    return np.ascontiguousarray(np.broadcast_to(flat, weight.shape[1]))


def _or(values: Floats | None, otherwise: float, weight: Floats) -> Floats:
    return np.full(weight.shape[1], otherwise, np.float32) if values is None else values
