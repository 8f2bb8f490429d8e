"""The weights of a bundle's scorer.onnx: an inner product, or an MLP that the query state enters in its first layer.

The manifest declares which of the two it is; an MLP's arrays have the names that `scorer_graph` gives them. The declaration is compared
with the graph on random inputs, so that a wrong one is refused and never served.

Legend: B queries, C candidates, D node row, S state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from espalier.arrays import Array, Float32
from espalier.bundle import Bundle
from espalier.engines.graphs import read_graph
from espalier.errors import UnsupportedGraph
from espalier.manifest import InnerProductForm, MlpForm, ScorerForm

MAX_HIDDEN = 4
"""Most hidden layers of an MLP in the kernels."""
OPSET, IR_VERSION = 20, 10
"""Of the graphs that are written here."""
MAX_MATRIX = 256 * 128
"""Most weights of one layer, padded: more do not fit the shared memory of a GPU's multiprocessor."""


@dataclass(frozen=True)
class Layer:
    """x → x · weight + bias, then max(x, 0) + slope · min(x, 0), all by output."""

    weight: Float32
    bias: Float32
    slope: Float32


@dataclass(frozen=True)
class ScorerWeights:
    """logit = ⟨state, row⟩ where there are no layers; else out(… layer₂(φ(row · weight₁ + bias₁ + state)) …).

    layers       hidden layers; the state is added before the first one's activation
    out, offset  float32[last width], float: the output layer
    """

    layers: tuple[Layer, ...] = ()
    out: Float32 = field(default_factory=lambda: np.empty(0, np.float32))
    offset: float = 0.0

    @property
    def form(self) -> ScorerForm:
        """The formula, for the manifest."""
        return MlpForm(layers=len(self.layers)) if self.layers else InnerProductForm()

    def logits(self, state_BS: Float32, rows_BCD: Float32) -> Float32:
        """float32[B, C]: the logits that the kernels must compute, in NumPy."""
        if not self.layers:
            return np.asarray(np.einsum("bcd,bd->bc", rows_BCD, state_BS), np.float32)
        x: Any = rows_BCD
        for i, layer in enumerate(self.layers):
            x = x @ layer.weight + layer.bias + (state_BS[:, None] if i == 0 else 0)
            x = np.where(x >= 0, x, layer.slope * x)
        return np.asarray(x @ self.out + self.offset, np.float32)


def scorer_graph(weights: ScorerWeights, state_dim: int, node_dim: int) -> bytes:
    """The bytes of scorer.onnx. torch's exporter would take over a second, and name the arrays as it likes."""
    product = [
        helper.make_node("Unsqueeze", ["query_state", "two"], ["column"]),
        helper.make_node("MatMul", ["node_rows", "column"], ["products"]),
        helper.make_node("Squeeze", ["products", "two"], ["logits"]),
    ]
    operators = _mlp_operators(len(weights.layers)) if weights.layers else product
    arrays: dict[str, Array] = {"one": np.array([1]), "two": np.array([2]), "all": np.array([-1])}
    for i, layer in enumerate(weights.layers):
        arrays |= {f"layers.{i}.weight": layer.weight, f"layers.{i}.bias": layer.bias, f"layers.{i}.slope": layer.slope}
    arrays |= {"out.weight": weights.out[:, None], "out.bias": np.array([weights.offset], np.float32)}
    read = {name for operator in operators for name in operator.input}

    def info(name: str, shape: list[str | int]) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)

    graph = helper.make_graph(
        operators,
        "scorer",
        [info("query_state", ["B", state_dim]), info("node_rows", ["B", "C", node_dim])],
        [info("logits", ["B", "C"])],
        [numpy_helper.from_array(array, name) for name, array in arrays.items() if name in read],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    serialised: bytes = model.SerializeToString()
    return serialised


def _mlp_operators(layers: int) -> list[onnx.NodeProto]:
    """After the first layer, all candidates of all queries are the rows of one matrix: Gemm is faster than MatMul."""
    operators = [
        helper.make_node("MatMul", ["node_rows", "layers.0.weight"], ["node_part"]),
        helper.make_node("Add", ["query_state", "layers.0.bias"], ["query_part"]),
        helper.make_node("Unsqueeze", ["query_part", "one"], ["query_parts"]),
        helper.make_node("Add", ["node_part", "query_parts"], ["sums_BCS"]),
        helper.make_node("Shape", ["sums_BCS"], ["batch_and_candidates"], end=2),
        helper.make_node("Shape", ["sums_BCS"], ["width"], start=2),
        helper.make_node("Concat", ["all", "width"], ["rows_and_width"], axis=0),
        helper.make_node("Reshape", ["sums_BCS", "rows_and_width"], ["sums.0"]),
        helper.make_node("PRelu", ["sums.0", "layers.0.slope"], ["layers.0"]),
    ]
    for i in range(1, layers):
        operators += [
            helper.make_node("Gemm", [f"layers.{i - 1}", f"layers.{i}.weight", f"layers.{i}.bias"], [f"sums.{i}"]),
            helper.make_node("PRelu", [f"sums.{i}", f"layers.{i}.slope"], [f"layers.{i}"]),
        ]
    return [
        *operators,
        helper.make_node("Gemm", [f"layers.{layers - 1}", "out.weight", "out.bias"], ["column"]),
        helper.make_node("Reshape", ["column", "batch_and_candidates"], ["logits"], allowzero=1),
    ]


def scorer_weights(bundle: Bundle) -> ScorerWeights:
    """The weights of a bundle's scorer. Raises UnsupportedGraph, with the reason, if no form is declared or the graph has another form."""
    scorer = bundle.graph_scorer
    if scorer.form is None:
        raise UnsupportedGraph("the manifest declares no form of scorer.onnx (scorer.form)")
    model = read_graph("scorer.onnx", bundle.graph("scorer.onnx"))
    return verified_weights(model, scorer.form, scorer.state_dim, scorer.node_dim)


def verified_weights(model: onnx.ModelProto, form: ScorerForm, state_dim: int, node_dim: int) -> ScorerWeights:
    """The arrays that a form names in a checked scorer graph. Raises UnsupportedGraph if they give other logits than the graph."""
    weights = _named(model, form)
    if len(weights.layers) > MAX_HIDDEN:
        raise UnsupportedGraph(f"scorer.onnx has {len(weights.layers)} hidden layers, at most {MAX_HIDDEN} are known")
    widths = [node_dim, *(len(layer.bias) for layer in weights.layers)]
    first_width = widths[min(1, len(weights.layers))]
    if state_dim != first_width:  # NumPy would repeat a state of one number below; compiled code would read past its end
        raise UnsupportedGraph(f"the {form.kind} that the manifest declares takes states of {first_width} numbers, not of {state_dim}")
    for before, after in pairwise(max(16, 1 << (width - 1).bit_length()) for width in widths):
        if before * after > MAX_MATRIX:
            raise UnsupportedGraph(f"scorer.onnx has a layer of {before} × {after} weights, at most {MAX_MATRIX} are known")
    rng = np.random.default_rng(0)
    state_BS = rng.standard_normal((2, state_dim), np.float32)
    rows_BCD = rng.standard_normal((2, 5, node_dim), np.float32)
    try:
        expected = np.asarray(next(iter(ReferenceEvaluator(model).run(None, {"query_state": state_BS, "node_rows": rows_BCD}))))
    except Exception as error:  # the evaluator raises many kinds, none of them ours
        raise UnsupportedGraph(f"scorer.onnx cannot be run ({error})") from error
    try:
        got = weights.logits(state_BS, rows_BCD)
    except ValueError as error:
        raise UnsupportedGraph(f"the declared form of scorer.onnx has shapes that do not fit ({error})") from error
    if expected.shape != got.shape or not np.allclose(got, expected, rtol=1e-4, atol=1e-4 * max(1.0, float(np.abs(expected).max()))):
        raise UnsupportedGraph(f"scorer.onnx computes something else than the {form.kind} that the manifest declares")
    return weights


def _named(model: onnx.ModelProto, form: ScorerForm) -> ScorerWeights:
    """The arrays of a form, as kernels read them."""
    if isinstance(form, InnerProductForm):
        return ScorerWeights()
    arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    layers = tuple(_layer(arrays, f"layers.{i}") for i in range(form.layers))
    out = _array(arrays, "out.weight", 2)
    if out.shape[1] != 1:
        raise UnsupportedGraph(f"scorer.onnx: out.weight is float32{list(out.shape)}, expected one column")
    return ScorerWeights(layers, out[:, 0], float(_vector(arrays, "out.bias", 1)[0]))


def _layer(arrays: Mapping[str, Array], name: str) -> Layer:
    weight = _array(arrays, f"{name}.weight", 2)
    return Layer(weight, *(_vector(arrays, f"{name}.{part}", weight.shape[1]) for part in ("bias", "slope")))


def _vector(arrays: Mapping[str, Array], name: str, width: int) -> Float32:
    vector = _array(arrays, name, 1)
    if len(vector) != width:
        raise UnsupportedGraph(f"scorer.onnx: {name} has {len(vector)} numbers, expected {width}")
    return vector


def _array(arrays: Mapping[str, Array], name: str, dimensions: int) -> Float32:
    """A float32 array that is contiguous. Raises UnsupportedGraph if there is none of this name and number of dimensions."""
    array = arrays.get(name)
    if array is None or array.dtype != np.float32 or array.ndim != dimensions:
        actual = "nothing" if array is None else f"{array.dtype}{list(array.shape)}"
        raise UnsupportedGraph(f"scorer.onnx: expected {name} in float32 with {dimensions} dimensions, got {actual}")
    return np.ascontiguousarray(array)
