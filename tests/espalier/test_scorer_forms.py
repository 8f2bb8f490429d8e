"""Declared forms of scorers: what the manifest says of a graph is compared with what the graph computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from espalier.engines.scorer_weights import verified_weights
from espalier.errors import UnsupportedGraph
from espalier.manifest import DenseLayer, InnerProductForm, MlpForm, ScorerForm


def scorer_graph(*nodes: onnx.NodeProto, width: int = 4, **constants: NDArray[Any]) -> onnx.ModelProto:
    def info(name: str, shape: list[int | str]) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)

    graph = helper.make_graph(
        list(nodes),
        "graph",
        [info("query_state", ["B", width]), info("node_rows", ["B", "C", 4])],
        [info("logits", ["B", "C"])],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


PRODUCT = [
    helper.make_node("Unsqueeze", ["query_state", "two"], ["column"]),
    helper.make_node("MatMul", ["rows", "column"], ["product"]),
    helper.make_node("Squeeze", ["product", "two"], ["logits"]),
]


PRODUCT_OF_ROWS = [helper.make_node("Identity", ["node_rows"], ["rows"]), *PRODUCT]


def test_what_a_graph_seems_to_say_is_compared_with_what_it_computes() -> None:
    """Slopes by candidate, in a layer as wide as there are candidates, look like slopes by channel."""
    nodes = [
        helper.make_node("MatMul", ["node_rows", "w"], ["product"]),
        helper.make_node("Unsqueeze", ["query_state", "one"], ["state"]),
        helper.make_node("Add", ["product", "state"], ["sum"]),
        helper.make_node("PRelu", ["sum", "slope"], ["hidden"]),
        helper.make_node("MatMul", ["hidden", "v"], ["column"]),
        helper.make_node("Squeeze", ["column", "two"], ["logits"]),
    ]
    weights: dict[str, Any] = {"w": np.eye(4, 5), "v": np.ones((5, 1)), "slope": np.linspace(0, 1, 5)}
    weights = {name: array.astype(np.float32) for name, array in weights.items()} | {"one": np.array([1]), "two": np.array([2])}
    form = MlpForm(layers=(DenseLayer(weight="w", slope="slope"),), out=DenseLayer(weight="v"))
    assert verified_weights(scorer_graph(*nodes, width=5, **weights), form, 5, 4).layers[0].slope.tolist() == [0, 0.25, 0.5, 0.75, 1]
    weights["slope"] = weights["slope"][:, None]
    with pytest.raises(UnsupportedGraph, match=r"computes something else than the mlp"):
        verified_weights(scorer_graph(*nodes, width=5, **weights), form, 5, 4)
    weights["v"] = weights["v"][:4]
    with pytest.raises(UnsupportedGraph, match=r"cannot be run"):
        verified_weights(scorer_graph(*nodes, width=5, **weights), form, 5, 4)


def mlp(*layers: DenseLayer, out: str = "out") -> MlpForm:
    return MlpForm(layers=layers, out=DenseLayer(weight=out))


@pytest.mark.parametrize(
    ("nodes", "form", "reason"),
    [
        ([helper.make_node("Sigmoid", ["node_rows"], ["rows"]), *PRODUCT], InnerProductForm(), "something else than the inner-product"),
        ([helper.make_node("MatMul", ["node_rows", "w"], ["rows"]), *PRODUCT], mlp(DenseLayer(weight="w", slope=0)), "else than the mlp"),
        (PRODUCT_OF_ROWS, mlp(DenseLayer(weight="u", slope=0)), "names 'u', which is no initialiser"),
        (PRODUCT_OF_ROWS, mlp(DenseLayer(weight="w")), "each hidden layer has an activation"),
        (PRODUCT_OF_ROWS, mlp(DenseLayer(weight="one", slope=0)), r"one is float32\[1\], expected a matrix"),
        (PRODUCT_OF_ROWS, mlp(DenseLayer(weight="w", slope=0, bias="two_biases")), "two_biases has 2 numbers, expected 1 or 4"),
        (PRODUCT_OF_ROWS, mlp(DenseLayer(weight="w", slope=0), out="w"), "the output layer has 4 outputs, expected 1"),
        (PRODUCT_OF_ROWS, mlp(DenseLayer(weight="wide", slope=0)), "takes states of 5 numbers, not of 4"),
    ],
)
def test_a_wrong_declaration_of_a_scorer_is_refused(nodes: list[onnx.NodeProto], form: ScorerForm, reason: str) -> None:
    floats = {"w": np.eye(4), "wide": np.eye(5), "out": np.ones((4, 1)), "two_biases": np.zeros(2)}
    constants: dict[str, Any] = {name: array.astype(np.float32) for name, array in floats.items()}
    with pytest.raises(UnsupportedGraph, match=reason):
        verified_weights(scorer_graph(*nodes, one=np.array([1]), two=np.array([2]), **constants), form, 4, 4)
