"""Operators of query encoders in torch: each computes what ONNX's own evaluator does."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from numpy.testing import assert_allclose
from numpy.typing import NDArray
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

if importlib.util.find_spec("triton") is None:  # there are no wheels of it outside Linux
    pytest.skip("triton is not installed", allow_module_level=True)

from espalier.engines.triton.torch_graph import TorchGraph
from espalier.engines.triton.torch_operators import OPERATORS
from espalier.errors import UnsupportedGraph

pytestmark = pytest.mark.slow

RNG = np.random.default_rng(3)
X = RNG.standard_normal((2, 3, 4)).astype(np.float32)
Y = RNG.standard_normal((2, 3, 4)).astype(np.float32)
WITH_NAN = np.array([[1, np.nan, -np.inf]], np.float32)
WHOLE = RNG.integers(-5, 6, (2, 3))
TRUE, FALSE = X > 0, Y > 0
LAST = np.array([-1])


@pytest.mark.parametrize(
    ("operator", "inputs", "attributes"),
    [
        ("And", [TRUE, FALSE], {}),
        ("Or", [TRUE, FALSE], {}),
        ("Not", [TRUE], {}),
        ("Equal", [WHOLE, WHOLE[:1]], {}),
        ("Greater", [X, Y], {}),
        ("Less", [X, Y], {}),
        ("LessOrEqual", [WHOLE, WHOLE[:1]], {}),
        ("IsNaN", [WITH_NAN], {}),
        ("Neg", [X], {}),
        ("Pow", [np.abs(X), np.array(1.5, np.float32)], {}),
        ("Sqrt", [np.abs(X)], {}),
        ("Erf", [X], {}),
        ("Tanh", [X], {}),
        ("Sigmoid", [X], {}),
        ("Gelu", [X], {}),
        ("Gelu", [X], {"approximate": "tanh"}),
        ("Softmax", [10 * X], {}),
        ("Softmax", [10 * X], {"axis": 1}),
        ("Softmax", [np.array([[0, -np.inf, 200], [-np.inf, 3, -np.inf]], np.float32)], {}),
        ("LayerNormalization", [X, Y[0, 0], Y[0, 1]], {"epsilon": 0.25}),
        ("LayerNormalization", [X, Y[0]], {"axis": 1}),
        ("ReduceMean", [X, np.array([1, -1])], {"keepdims": 0}),
        ("ReduceMean", [X, LAST], {}),
        ("ReduceL2", [X, LAST], {}),
        ("ReduceMax", [X, np.array([0, 2])], {"keepdims": 0}),
        ("ReduceMax", [WHOLE, LAST], {}),
        ("CumSum", [WHOLE, np.array(1)], {}),
        ("GatherElements", [X, np.array([[[1, 1, 0, -1]], [[2, 0, 0, -3]]])], {"axis": 1}),
        ("GatherND", [X, np.array([[[1, 2], [0, -3]]])], {}),
        ("GatherND", [X, np.array([[1], [-2], [1]])], {}),
        ("Split", [X], {"axis": -1, "num_outputs": 3}),
        ("Split", [X, np.array([3, 1])], {"axis": 2}),
    ],
)
def test_an_operator_computes_what_onnx_says(operator: str, inputs: list[NDArray[Any]], attributes: dict[str, Any]) -> None:
    """All inputs but the first are constants of the graph, as axes and weights are."""
    outputs = ["y", "z"] if operator == "Split" else ["y"]
    names = [f"x{place}" for place in range(len(inputs))]
    types = [helper.np_dtype_to_tensor_dtype(array.dtype) for array in inputs]
    model = helper.make_model(
        helper.make_graph(
            [helper.make_node(operator, names, [*outputs, *(["rest"] if "num_outputs" in attributes else [])], **attributes)],
            "graph",
            [helper.make_tensor_value_info("x0", types[0], inputs[0].shape)],
            [helper.make_tensor_value_info(outputs[-1], onnx.TensorProto.UNDEFINED, None)],
            [numpy_helper.from_array(array, name) for array, name in zip(inputs[1:], names[1:], strict=True)],
        ),
        opset_imports=[helper.make_opsetid("", 20)],
        ir_version=10,
    )
    expected = np.asarray(next(iter(ReferenceEvaluator(model).run(None, {"x0": inputs[0]}))))
    got = TorchGraph(model, torch.device("cpu"))(x0=torch.from_numpy(inputs[0])).numpy()
    assert got.dtype == expected.dtype
    assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("operator", "inputs", "attributes", "reason"),
    [
        ("CumSum", [X, np.array(1)], {}, "CumSum of other than whole numbers"),
        ("CumSum", [WHOLE, np.array(1)], {"reverse": 1}, "in reverse"),
        ("GatherND", [X, np.array([[1], [0]])], {"batch_dims": 1}, "batch_dims"),
    ],
)
def test_forms_of_an_operator_that_are_not_known_are_refused(
    operator: str, inputs: list[NDArray[Any]], attributes: dict[str, Any], reason: str
) -> None:
    arguments = [[int(inputs[1])] if operator == "CumSum" else torch.from_numpy(inputs[1])]
    with pytest.raises(UnsupportedGraph, match=reason):
        OPERATORS[operator](attributes, torch.from_numpy(inputs[0]), *arguments)
