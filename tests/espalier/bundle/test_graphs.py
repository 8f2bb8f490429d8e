"""Graphs in a bundle: what they may hold."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from espalier.bundle import Bundle
from espalier.engines.onnx.compose import Plan, compose
from espalier.errors import (
    BundleCorrupt,
)
from tests.espalier.bundle.parts import model_with


def custom_operator(model: onnx.ModelProto) -> None:
    model.graph.node[-1].domain = "com.evil"
    model.opset_import.append(helper.make_opsetid("com.evil", 1))


def control_flow(model: onnx.ModelProto) -> None:
    logits = model.graph.node[-1].output[0]
    model.graph.node[-1].output[0] = "raw"
    branch = helper.make_graph(
        [helper.make_node("Identity", ["raw"], ["chosen"])], "branch", [], [helper.make_tensor_value_info("chosen", 1, ["B", "C"])]
    )
    model.graph.initializer.append(numpy_helper.from_array(np.array(True), "always"))
    model.graph.node.append(helper.make_node("If", ["always"], [logits], then_branch=branch, else_branch=branch))


def external_data(model: onnx.ModelProto) -> None:
    tensor = next(tensor for tensor in model.graph.initializer if tensor.name == "u")
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="secrets.bin")


def external_constant(model: onnx.ModelProto) -> None:
    external_data(model)
    tensor = next(tensor for tensor in model.graph.initializer if tensor.name == "u")
    model.graph.node.insert(0, helper.make_node("Constant", [], ["u"], value=tensor))
    model.graph.initializer.remove(tensor)


@pytest.mark.parametrize("change", [custom_operator, control_flow, external_data, external_constant])
@pytest.mark.parametrize("plan", [Plan(1, 1), Plan(4, 7, single=True)])
def test_a_graph_with_more_than_plain_operators_is_refused(original: Bundle, change: Callable[[onnx.ModelProto], None], plan: Plan) -> None:
    manifest = original.manifest
    scorer = model_with(original, change)
    with pytest.raises(BundleCorrupt, match=r"scorer\.onnx: "):
        compose(original.graph("query.onnx"), scorer, original.tree, manifest.ranking, original.graph_kind, original.graph_scorer, plan)


def rename_input(model: onnx.ModelProto) -> None:
    old = model.graph.input[0].name
    model.graph.input[0].name = "surprise"
    for node in model.graph.node:
        for i, name in enumerate(node.input):
            if name == old:
                node.input[i] = "surprise"


def old_opset(model: onnx.ModelProto) -> None:
    model.opset_import[0].version = 17


def newer_opset(model: onnx.ModelProto) -> None:
    model.opset_import[0].version = 21


def compose_with(bundle: Bundle, scorer: bytes) -> bytes:
    manifest = bundle.manifest
    return compose(bundle.graph("query.onnx"), scorer, bundle.tree, manifest.ranking, bundle.graph_kind, bundle.graph_scorer, Plan(1, 1))


@pytest.mark.parametrize(("change", "message"), [(old_opset, "opset 17, expected 18 to 23"), (newer_opset, "opset 20, scorer.onnx 21")])
def test_a_graph_of_another_opset_is_refused(original: Bundle, change: Callable[[onnx.ModelProto], None], message: str) -> None:
    with pytest.raises(BundleCorrupt, match=message):
        compose_with(original, model_with(original, change))


def test_a_graph_with_an_input_outside_the_contract_is_refused(original: Bundle) -> None:
    with pytest.raises(BundleCorrupt, match="surprise"):
        compose_with(original, model_with(original, rename_input))
