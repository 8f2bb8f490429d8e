"""Operators of query encoders in torch: each computes what ONNX's own evaluator does, and so do whole sequence encoders."""

from __future__ import annotations

import importlib.util
import warnings
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from numpy.testing import assert_allclose
from numpy.typing import NDArray
from onnx import helper, inliner, numpy_helper
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn

if importlib.util.find_spec("triton") is None:  # there are no wheels of it outside Linux
    pytest.skip("triton is not installed", allow_module_level=True)

from espalier.engines.triton.torch_graph import SPECIAL, TorchGraph, encoder_of
from espalier.engines.triton.torch_operators import OPERATORS
from espalier.errors import UnsupportedGraph
from tests.espalier.test_triton_engine import NoCopies, product
from training.baselines.sequence_encoder import SequenceEncoder

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


# -- whole encoders -------------------------------------------------------------------------------------------------------


class Aligned(nn.Module):
    """Moves each history to the front of its row, which its padding was at, and takes the state of the last place."""

    def __init__(self, width: int, length: int, levels: int) -> None:
        super().__init__()
        self.encoder = SequenceEncoder(width, 2, 2, length)
        self.heads, self.levels = nn.Linear(width, levels * width), levels

    def forward(self, history_leaves: Tensor, node_rows: Tensor) -> Tensor:
        there_BT = history_leaves >= 0
        length, count_B = history_leaves.shape[1], there_BT.sum(1)
        place_BT = torch.arange(length) + (length - count_B)[:, None]
        leaf_BT = history_leaves.gather(1, place_BT.clamp(max=length - 1))
        known_BT = (place_BT < length).float()
        x_BTD = self.encoder(node_rows[leaf_BT.clamp(min=0)] * known_BT[..., None])
        last_B = (count_B - 1).clamp(min=0)
        last_BD = x_BTD.gather(1, last_B[:, None, None].expand(-1, 1, x_BTD.shape[2]))[:, 0]
        return self.states(last_BD)

    def states(self, last_BD: Tensor) -> Tensor:
        """[B, D] → [B, L, D]."""
        state_BLD: Tensor = self.heads(last_BD).view(-1, self.levels, last_BD.shape[1])
        return state_BLD


class Masked(Aligned):
    """Leaves padding where it is: places are counted from the newest, and no place looks at padding."""

    def forward(self, history_leaves: Tensor, node_rows: Tensor) -> Tensor:
        there_BT = history_leaves >= 0
        length = history_leaves.shape[1]
        rows_BTD = nn.functional.embedding(history_leaves.clamp(min=0), node_rows)
        x_BTD = torch.where(there_BT[..., None], rows_BTD, 0.0) + self.encoder.position_TD.flip(0)
        seen_TT = torch.ones(length, length).tril().bool()
        mask_BHTT = torch.where((there_BT[:, None, :] & seen_TT)[:, None], 0.0, -1e9)
        for block in self.encoder.blocks:
            x_BTD = block(x_BTD, mask_BHTT, None)
        last_BD = self.encoder.norm(x_BTD)[:, -1]
        return nn.functional.normalize(self.states(last_BD), dim=-1)


def exported(kind: type[Aligned], opset: int) -> tuple[Aligned, Tensor, Tensor, onnx.ModelProto]:
    """A model, histories, node rows, and query.onnx."""
    torch.manual_seed(2)
    model = kind(8, 6, 3).eval()
    history_BT = torch.tensor([[-1, -1, 3, 4, 5, 1], [-1] * 6, [0, 1, 2, 3, 4, 5], [-1, -1, -1, -1, 7, 7]])
    rows_ND = torch.randn(8, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter
        program = torch.onnx.export(
            model, (history_BT, rows_ND), dynamo=True, opset_version=opset, verbose=False,
            input_names=["history_leaves", "node_rows"], output_names=["query_state"],
            dynamic_shapes={"history_leaves": {0: "B"}, "node_rows": {0: "N"}},
        )  # fmt: skip
    assert program is not None
    return model, history_BT, rows_ND, inliner.inline_local_functions(program.model_proto)


@pytest.mark.parametrize(("kind", "opset"), [(Aligned, 18), (Masked, 18), (Masked, 20)])
def test_a_sequence_encoder_as_torch_exports_it_is_known(kind: type[Aligned], opset: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, history_BT, rows_ND, graph = exported(kind, opset)
    assert {node.op_type for node in graph.graph.node} <= OPERATORS.keys() | SPECIAL
    encoder = encoder_of(graph, torch.device("cpu"), 8, 3, 6)
    with torch.no_grad():
        expected_BLS = model(history_BT, rows_ND).numpy()
    assert_allclose(encoder(history_leaves=history_BT, node_rows=rows_ND).numpy(), expected_BLS, rtol=1e-4, atol=1e-5)
    halves = encoder(history_leaves=history_BT, node_rows=rows_ND.half())
    assert halves.dtype == torch.float32
    assert_allclose(halves.numpy(), expected_BLS, rtol=0, atol=0.02)

    monkeypatch.setattr("espalier.engines.triton.torch_graph.matmul", product)
    monkeypatch.setattr("espalier.engines.triton.torch_operators.matmul", product)
    on_device, leaves, rows = TorchGraph(graph, torch.device("meta")), history_BT.to("meta"), rows_ND.half().to("meta")
    with NoCopies():  # type: ignore[no-untyped-call]  # torch leaves it untyped
        states = on_device(history_leaves=leaves, node_rows=rows)
    assert states.shape == expected_BLS.shape, "in a CUDA graph nothing goes to the host"
