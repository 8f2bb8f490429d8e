"""Query encoders in torch: each operator computes what ONNX's own evaluator does, and what cannot be run is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.synthetic import trained_kind
from espalier.arrays import Array
from espalier.engines.graphs import read_graph
from espalier.errors import BundleCorrupt, UnsupportedGraph

pytest.importorskip("triton", reason="there are no wheels of it outside Linux")

from espalier.engines.triton.kernels.matmul import matmul
from espalier.engines.triton.torch_graph import TorchGraph, encoder_of
from espalier.engines.triton.torch_operators import constant_of

pytestmark = pytest.mark.release

RNG = np.random.default_rng(3)
X = RNG.standard_normal((2, 3, 4)).astype(np.float32)
Y = RNG.standard_normal((2, 3, 4)).astype(np.float32)
WITH_NAN = np.array([[1, np.nan, -np.inf]], np.float32)
WHOLE = RNG.integers(-5, 6, (2, 3))
TRUE, FALSE = X > 0, Y > 0


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
        ("ReduceMean", [X, np.array([-1])], {}),
        ("ReduceL2", [X, np.array([-1])], {}),
        ("ReduceMax", [X, np.array([0, 2])], {"keepdims": 0}),
        ("ReduceMax", [WHOLE, np.array([-1])], {}),
        ("CumSum", [WHOLE, np.array(1)], {}),
        ("GatherElements", [X, np.array([[[1, 1, 0, -1]], [[2, 0, 0, -3]]])], {"axis": 1}),
        ("GatherND", [X, np.array([[[1, 2], [0, -3]]])], {}),
        ("GatherND", [X, np.array([[1], [-2], [1]])], {}),
        ("Split", [X], {"axis": -1, "num_outputs": 3}),
        ("Split", [X, np.array([3, 1])], {"axis": 2}),
    ],
)
def test_an_operator_computes_what_onnx_says(operator: str, inputs: list[Array], attributes: dict[str, Any]) -> None:
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


# -- query encoders -------------------------------------------------------------------------------------------------------


class NoCopies(TorchDispatchMode):
    """Fails where a tensor is copied from the host to the device, as a CUDA graph would."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = [value for value in args if isinstance(value, torch.Tensor)]
        copied = func.overloadpacket in (torch.ops.aten._to_copy, torch.ops.aten.copy_)
        assert not (copied and out.device.type == "meta" and any(value.device.type == "cpu" for value in given)), func
        return out


def product(left: torch.Tensor, right: torch.Tensor, index: torch.Tensor | None = None) -> torch.Tensor:
    """What `matmul` computes, by torch."""
    return left @ (right if index is None else right[index].float())


@pytest.mark.parametrize("kind", ["product", "mlp", "sequence"])
def test_a_query_encoder_goes_neither_to_the_host_nor_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """A CUDA graph cannot. Tensors on torch's `meta` device have no values, so that reading one fails."""

    monkeypatch.setattr("espalier.engines.triton.torch_graph.matmul", product)
    monkeypatch.setattr("espalier.engines.triton.torch_operators.matmul", product)
    bundle = trained_kind(tmp_path, kind, (32,), np.random.default_rng(5))
    encoder = TorchGraph(read_graph("query.onnx", bundle.graph("query.onnx")), torch.device("meta"))
    nodes = torch.empty((4, 5) if kind == "sequence" else (4, 4, 5), dtype=torch.int64, device="meta")
    rows = torch.empty((40, 24), dtype=torch.float16, device="meta")
    with NoCopies():  # type: ignore[no-untyped-call]  # torch leaves it untyped
        states = encoder(**{"history_leaves" if kind == "sequence" else "history_nodes": nodes}, node_rows=rows)
    assert states.shape == (4, 4, bundle.graph_scorer.state_dim)
    assert states.dtype == torch.float32


def test_a_product_reads_no_row_that_a_table_lacks() -> None:
    """A graph's indices are its bundle's: those past the end count as zeros, negative ones from the end, as ONNX counts."""
    rng = np.random.default_rng(5)
    room_RN = torch.from_numpy(rng.standard_normal((20, 3)).astype(np.float32))
    table_RN, left = room_RN[5:12], torch.from_numpy(rng.standard_normal((1, 2, 4)).astype(np.float32))
    rows = torch.zeros((1, 4, 3))
    rows[0, 1:3] = table_RN[[3, -1]]
    got = matmul(left, table_RN, torch.tensor([[7, 3, -1, -8]]))
    assert_allclose(got.numpy(), (left @ rows).numpy(), rtol=1e-6, atol=1e-6)


def query_graph(*nodes: onnx.NodeProto, **constants: Array) -> onnx.ModelProto:
    """vector [B, 4] → query_state [B, 1, S]."""
    info = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in ("vector", "query_state")]
    tensors = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph(list(nodes), "graph", info[:1], info[1:], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


LAST = helper.make_node("Unsqueeze", ["x", "one"], ["query_state"])
ONE = np.array([1])


def test_a_known_encoder_gives_the_states_of_its_graph() -> None:
    known = query_graph(helper.make_node("Gather", ["vector", "order"], ["x"], axis=1), LAST, one=ONE, order=np.array([3, 0, -1]))
    assert encoder_of(known, torch.device("cpu"), 4, 3, 4, (1, 3))(vector=torch.arange(4.0)[None]).tolist() == [[[3.0, 0.0, 3.0]]]


@pytest.mark.parametrize(
    ("operator", "constants", "attributes", "reason"),
    [
        ("Acosh", {}, {}, r"query\.onnx has the operators Acosh"),
        ("CumSum", {"axis": np.array(1)}, {}, "CumSum of other than whole numbers"),
        ("CumSum", {"axis": np.array(1)}, {"reverse": 1}, "in reverse"),
        ("GatherND", {"index": np.array([[1], [0]])}, {"batch_dims": 1}, "batch_dims"),
        ("Slice", {"start": np.array([3]), "end": np.array([-9]), "axis": ONE, "step": np.array([-1])}, {}, "negative step"),
        ("Cast", {}, {"to": onnx.TensorProto.FLOAT16}, "casts to ONNX type"),
    ],
)
def test_operators_that_cannot_be_run_are_found_when_a_bundle_is_opened(
    operator: str, constants: dict[str, Array], attributes: dict[str, Any], reason: str
) -> None:
    node = helper.make_node(operator, ["vector", *constants], ["x"], **attributes)
    with pytest.raises(UnsupportedGraph, match=reason):
        encoder_of(query_graph(node, LAST, one=ONE, **constants), torch.device("cpu"), 4, 3, 4, (1, 3))


@pytest.mark.parametrize(("first", "states", "found"), [(2, (1, 4), "[1, 1, 4]"), (1, (1, 5), "[2, 1, 4]"), (1, (3, 4), "[2, 1, 4]")])
def test_states_of_another_shape_than_declared_are_refused(first: int, states: tuple[int, int], found: str) -> None:
    """Kernels would read past their end. The graph leaves the queries before `first` out, of each two."""
    nodes = [
        helper.make_node("Slice", ["vector", "first", "end", "zero"], ["x"]),
        helper.make_node("Unsqueeze", ["x", "one"], ["query_state"]),
    ]
    constants = {"first": np.array([first - 1]), "end": np.array([9]), "zero": np.array([0]), "one": np.array([1])}
    with pytest.raises(BundleCorrupt, match=re.escape(f"the states of two queries are {found}, the manifest says {[2, *states]}")):
        encoder_of(query_graph(*nodes, **constants), torch.device("cpu"), 4, 3, 4, states)


@pytest.mark.parametrize(
    ("given", "expected"), [({"value_int": 3}, 3), ({"value_floats": [0.5, 1.0]}, [0.5, 1]), ({"value_ints": [2]}, [2])]
)
def test_constants_in_every_form(given: dict[str, Any], expected: Any) -> None:
    assert_array_equal(constant_of(given), expected)
    with pytest.raises(UnsupportedGraph, match="value_string"):
        constant_of({"value_string": b"x"})
