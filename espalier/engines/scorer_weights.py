"""The weights of a bundle's scorer.onnx: an inner product, or an MLP that the query state enters in its first layer.

The manifest declares which of the two it is and which arrays of the graph are its weights. The declaration is compared with the graph on
random inputs, so that a wrong one is refused and never served.

Legend: B queries, C candidates, D node row, S state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator

from espalier.bundle import Bundle
from espalier.engines.graphs import read_graph
from espalier.errors import UnsupportedGraph
from espalier.manifest import DenseLayer, InnerProductForm, ScorerForm

Floats = NDArray[np.float32]
MAX_HIDDEN = 4
"""Most hidden layers of an MLP in the kernels."""
MAX_MATRIX = 256 * 128
"""Most weights of one layer, padded: more do not fit the shared memory of a GPU's multiprocessor."""


@dataclass(frozen=True)
class Layer:
    """x → x · weight + bias, then max(x, 0) + slope · min(x, 0), all by output."""

    weight: Floats
    bias: Floats
    slope: Floats


@dataclass(frozen=True)
class ScorerWeights:
    """logit = ⟨state, row⟩ where there are no layers; else out(… layer₂(φ(row · weight₁ + bias₁ + state)) …).

    layers       hidden layers; the state is added before the first one's activation
    out, offset  float32[last width], float: the output layer
    """

    layers: tuple[Layer, ...] = ()
    out: Floats = field(default_factory=lambda: np.empty(0, np.float32))
    offset: float = 0.0

    def logits(self, state_BS: Floats, rows_BCD: Floats) -> Floats:
        """float32[B, C]: the logits that the kernels must compute, in NumPy."""
        if not self.layers:
            return np.asarray(np.einsum("bcd,bd->bc", rows_BCD, state_BS), np.float32)
        x: Any = rows_BCD
        for i, layer in enumerate(self.layers):
            x = x @ layer.weight + layer.bias + (state_BS[:, None] if i == 0 else 0)
            x = np.where(x >= 0, x, layer.slope * x)
        return np.asarray(x @ self.out + self.offset, np.float32)


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
    """The arrays that a form names, as kernels read them."""
    if isinstance(form, InnerProductForm):
        return ScorerWeights()
    arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    if any(layer.slope is None for layer in form.layers) or form.out.slope is not None:
        raise UnsupportedGraph("scorer.form: each hidden layer has an activation, and the output layer has none")
    layers = tuple(_layer(arrays, layer) for layer in form.layers)
    out = _layer(arrays, form.out)
    if out.weight.shape[1] != 1:
        raise UnsupportedGraph(f"scorer.form: the output layer has {out.weight.shape[1]} outputs, expected 1")
    return ScorerWeights(layers, out.weight[:, 0], float(out.bias[0]))


def _layer(arrays: Mapping[str, NDArray[Any]], layer: DenseLayer) -> Layer:
    weight = _array(arrays, layer.weight)
    if weight.ndim != 2:
        raise UnsupportedGraph(f"scorer.form: {layer.weight} is {weight.dtype}{list(weight.shape)}, expected a matrix")
    weight = weight.T if layer.transposed else weight
    return Layer(weight, _vector(arrays, layer.bias, 0.0, weight.shape[1]), _vector(arrays, layer.slope, 1.0, weight.shape[1]))


def _vector(arrays: Mapping[str, NDArray[Any]], entry: str | float | None, default: float, width: int) -> Floats:
    """float32[width]: a named array or a number, one for each output of a layer."""
    values = _array(arrays, entry).reshape(-1) if isinstance(entry, str) else np.array([default if entry is None else entry], np.float32)
    if values.size not in (1, width):
        raise UnsupportedGraph(f"scorer.form: {entry} has {values.size} numbers, expected 1 or {width}")
    return np.ascontiguousarray(np.broadcast_to(values, width))


def _array(arrays: Mapping[str, NDArray[Any]], name: str) -> Floats:
    if name not in arrays:
        raise UnsupportedGraph(f"scorer.form names {name!r}, which is no initialiser of scorer.onnx")
    return np.asarray(arrays[name], np.float32)
