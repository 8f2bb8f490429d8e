"""Hostile graphs in bundles: none may bring data from another file, hide anything in a corner, or grow without end.

Each runs in a folder with a `.env`, which is what a graph without these checks can read, and shows through scores.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from benchmarks.random_bundles import make_bundle
from espalier.bundle import RANKER, Bundle
from espalier.bundle_writer import write_bundle
from espalier.engines import graphs, open_engine
from espalier.engines.graphs import messages, parsed_model, read_graph
from espalier.engines.reference import ReferenceEngine
from espalier.engines.runtime import opened_session
from espalier.errors import BundleCorrupt
from espalier.manifest import RankerInfo
from espalier.rerank.ranker import GOLDEN_SCORES, Reranker
from espalier.tree import complete_tree
from tests.espalier.bundle.parts import content_of, draft_of
from tests.rankers import weighted_sum, with_ranker

Change = Callable[[onnx.ModelProto], None]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with something in it that nobody should read."""
    folder = tmp_path / "here"
    folder.mkdir()
    (folder / ".env").write_bytes(b"ESPALIER_ADMIN_KEYS=hunter2-hunter2-hunter2-hunter2-hunter2-hunter2-hunter2-hunter2-hunter2")
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    rng = np.random.default_rng(1)
    return make_bundle(tmp_path / "models", rng, complete_tree(rng.permutation(8), 2))


def secret(name: str, *dims: int) -> TensorProto:
    """A tensor whose numbers are the first bytes of `.env`."""
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=dims, data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value=".env")
    return tensor


def in_an_initializer(model: onnx.ModelProto) -> None:
    tensor = next(tensor for tensor in model.graph.initializer if tensor.data_type == TensorProto.FLOAT)
    tensor.CopyFrom(secret(tensor.name, *tensor.dims))


def in_a_constant(model: onnx.ModelProto) -> None:
    tensor = next(tensor for tensor in model.graph.initializer if tensor.data_type == TensorProto.FLOAT)
    model.graph.node.insert(0, helper.make_node("Constant", [], [tensor.name], value=secret(tensor.name, *tensor.dims)))
    model.graph.initializer.remove(tensor)


def called(model: onnx.ModelProto, function: onnx.FunctionProto) -> None:
    """Let a graph end with a call of a local function of one input and one output."""
    last = model.graph.node[-1]
    end, last.output[0] = last.output[0], "before"
    model.graph.node.append(helper.make_node(function.name, ["before"], [end], domain=function.domain))
    model.functions.append(function)
    if function.domain not in {entry.domain for entry in model.opset_import}:
        model.opset_import.append(helper.make_opsetid(function.domain, 1))


def a_function(nodes: list[onnx.NodeProto], name: str = "f") -> onnx.FunctionProto:
    imports = [helper.make_opsetid("", 20), helper.make_opsetid("local", 1)]
    return helper.make_function("local", name, ["x"], ["y"], nodes, imports)


def in_a_function(model: onnx.ModelProto) -> None:
    constant = helper.make_node("Constant", [], ["c"], value=secret("c", 1))
    called(model, a_function([constant, helper.make_node("Add", ["x", "c"], ["y"])]))


BRANCH = helper.make_graph([], "branch", [], [helper.make_tensor_value_info("c", TensorProto.FLOAT, [1])])


def in_a_branch(model: onnx.ModelProto) -> None:
    model.graph.node[0].attribute.append(helper.make_attribute("branch", BRANCH))


def in_a_list_of_branches(model: onnx.ModelProto) -> None:
    model.graph.node[0].attribute.append(helper.make_attribute("branches", [BRANCH]))


def in_a_sparse_initializer(model: onnx.ModelProto) -> None:
    indices = numpy_helper.from_array(np.array([0]), "i")
    model.graph.sparse_initializer.append(onnx.SparseTensorProto(values=secret("s", 1), indices=indices, dims=[4]))


def in_training_information(model: onnx.ModelProto) -> None:
    model.training_info.add().initialization.initializer.append(secret("c", 1))


def said_without_the_mark(model: onnx.ModelProto) -> None:
    """A place of external data, but not the mark that it counts: some reader may not look at the mark."""
    tensor = next(tensor for tensor in model.graph.initializer if tensor.data_type == TensorProto.FLOAT)
    tensor.external_data.add(key="location", value=".env")


EVERYWHERE: list[Change] = [
    in_an_initializer, in_a_constant, in_a_function, in_a_branch, in_a_list_of_branches, in_a_sparse_initializer,
    in_training_information, said_without_the_mark,
]  # fmt: skip
"""In any other place a message is found in the same way, see `test_every_message_of_a_model_is_looked_at`."""


def changed(data: bytes, change: Change) -> bytes:
    model = onnx.load_from_string(data)
    change(model)
    serialised: bytes = model.SerializeToString()
    return serialised


@pytest.mark.parametrize("change", EVERYWHERE)
@pytest.mark.parametrize("part", ["query.onnx", "scorer.onnx", RANKER])
def test_a_graph_that_refers_to_another_file_is_refused(bundle: Bundle, part: str, change: Change) -> None:
    data = weighted_sum({"retrieval.rank": 2.0, "retrieval.score": 1.0}) if part == RANKER else bundle.graph(part)
    read_graph(part, data)
    with pytest.raises(BundleCorrupt, match=rf"{part}: .*not accepted"):
        read_graph(part, changed(data, change))


@pytest.mark.parametrize("part", ["query.onnx", "scorer.onnx"])
def test_no_engine_serves_it(bundle: Bundle, part: str) -> None:
    """Not from a bundle that is sealed with its checksum, either."""
    content, data = content_of(bundle), changed(bundle.graph(part), in_an_initializer)
    graphs = content.graphs._replace(query_onnx=data) if part == "query.onnx" else content.graphs._replace(scorer_onnx=data)
    hostile = write_bundle(bundle.path.with_name("2"), draft_of(bundle), replace(content, graphs=graphs))
    openers: list[Callable[[Bundle], object]] = [ReferenceEngine, lambda bundle: open_engine(bundle, engine="onnx-cpu")]
    if importlib.util.find_spec("triton") is not None:
        from espalier.engines.triton.graph_engine import TritonSearch

        openers.append(lambda bundle: TritonSearch(bundle, "cpu"))
    for opened in openers:
        with pytest.raises(BundleCorrupt, match="external data"):
            opened(hostile)


def test_no_ranker_serves_it(bundle: Bundle) -> None:
    info = RankerInfo(features=("retrieval.rank",), depth=4, max_depth=8)
    golden = bundle.golden().append_column(GOLDEN_SCORES, bundle.golden().column("ranks"))
    graph = changed(weighted_sum({"retrieval.rank": 2.0}), in_an_initializer)
    hostile = with_ranker(bundle, bundle.path.parent / "2", info, graph, golden)
    with pytest.raises(BundleCorrupt, match=r"ranker\.onnx: .*not accepted"):
        Reranker(hostile)


# -- operators of the contract --------------------------------------------------------------------------------------------


def custom_operator(model: onnx.ModelProto) -> None:
    """ONNX Runtime knows operators of its own that open files (EPContext)."""
    model.graph.node[-1].domain = "com.microsoft"
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))


def control_flow(model: onnx.ModelProto) -> None:
    logits = model.graph.node[-1].output[0]
    model.graph.node[-1].output[0] = "raw"
    chosen = helper.make_tensor_value_info("chosen", TensorProto.FLOAT, ["B", "C"])
    branch = helper.make_graph([helper.make_node("Identity", ["raw"], ["chosen"])], "branch", [], [chosen])
    model.graph.initializer.append(numpy_helper.from_array(np.array(True), "always"))
    model.graph.node.append(helper.make_node("If", ["always"], [logits], then_branch=branch, else_branch=branch))


def another_input(model: onnx.ModelProto) -> None:
    old = model.graph.input[0].name
    model.graph.input[0].name = "surprise"
    for node in model.graph.node:
        for i, name in enumerate(node.input):
            if name == old:
                node.input[i] = "surprise"


def opset(version: int) -> Change:
    def change(model: onnx.ModelProto) -> None:
        model.opset_import[0].version = version

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (custom_operator, "custom operators"),
        (control_flow, r"scorer\.onnx: "),
        (another_input, "surprise"),
        (opset(17), "opset 17, expected 18 to 23"),
        (opset(24), "opset 24, expected 18 to 23"),
    ],
)
def test_a_graph_outside_the_contract_is_refused(bundle: Bundle, change: Change, said: str) -> None:
    scorer = changed(bundle.graph("scorer.onnx"), change)
    with pytest.raises(BundleCorrupt, match=said):
        read_graph("scorer.onnx", scorer)


def test_a_ranker_keeps_the_contract() -> None:
    whole = weighted_sum({"retrieval.rank": 2.0})
    for data, said in (
        (changed(whole, custom_operator), "custom operators"),
        (changed(whole, opset(13)), "opset 13, expected 18 to 23"),
        (b"\x08\x00\x00\x00ORTM" + bytes(64), r"ranker\.onnx: not a valid ONNX model"),  # ONNX Runtime's own format, told by these letters
    ):
        with pytest.raises(BundleCorrupt, match=said):
            read_graph(RANKER, data)


@pytest.mark.parametrize("change", [in_an_initializer, in_a_constant])
def test_onnx_runtime_finds_no_file_even_where_a_graph_came_through(change: Change, here: Path) -> None:
    """The second lock: sessions are told of no folder in which data could be."""
    graph = changed(weighted_sum({"retrieval.rank": 2.0, "retrieval.score": 1.0}), change)
    with pytest.raises(Exception, match="External data path validation failed"):
        opened_session(onnx.load_from_string(graph))
    assert os.getcwd() == str(here)


# -- graphs that grow -----------------------------------------------------------------------------------------------------


def test_functions_that_call_each_other_twice_each_are_refused(bundle: Bundle) -> None:
    """Forty of them, written out, would be 2⁴⁰ operators."""

    def laughs(model: onnx.ModelProto) -> None:
        called(model, a_function([helper.make_node("Identity", ["x"], ["y"])], "f0"))
        for i in range(1, 40):
            before = f"f{i - 1}"
            nodes = [helper.make_node(before, ["x"], ["z"], domain="local"), helper.make_node(before, ["z"], ["y"], domain="local")]
            model.functions.append(a_function(nodes, f"f{i}"))
        model.graph.node[-1].op_type = "f39"

    with pytest.raises(BundleCorrupt, match="more than 100000 operators"):
        read_graph("scorer.onnx", changed(bundle.graph("scorer.onnx"), laughs))


def test_functions_that_call_themselves_are_refused(bundle: Bundle) -> None:
    def endless(model: onnx.ModelProto) -> None:
        called(model, a_function([helper.make_node("g", ["x"], ["y"], domain="local")], "f"))
        model.functions.append(a_function([helper.make_node("f", ["x"], ["y"], domain="local")], "g"))

    with pytest.raises(BundleCorrupt, match="call each other without end"):
        read_graph("scorer.onnx", changed(bundle.graph("scorer.onnx"), endless))


def test_plain_functions_are_written_out(bundle: Bundle) -> None:
    whole = changed(bundle.graph("scorer.onnx"), lambda model: called(model, a_function([helper.make_node("Neg", ["x"], ["y"])])))
    model = read_graph("scorer.onnx", whole)
    assert not model.functions
    assert model.graph.node[-1].op_type == "Neg"


def test_graphs_of_too_many_operators_are_refused(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MAX_NODES", 3)
    with pytest.raises(BundleCorrupt, match="more than 3 operators"):
        read_graph("scorer.onnx", bundle.graph("scorer.onnx"))


@pytest.mark.parametrize("dims", [[2**62, 2**62], [-1, -4], [10**9]])
def test_a_tensor_that_declares_more_than_it_holds_is_refused(bundle: Bundle, dims: list[int]) -> None:
    def swell(model: onnx.ModelProto) -> None:
        del model.graph.initializer[0].dims[:]
        model.graph.initializer[0].dims.extend(dims)

    with pytest.raises(BundleCorrupt, match="more than it holds"):
        read_graph("scorer.onnx", changed(bundle.graph("scorer.onnx"), swell))


def test_a_deeply_nested_message_is_refused(bundle: Bundle) -> None:
    """Graphs in attributes of nodes of graphs …, by hand: protobuf would not write so many."""
    inner = b""
    for _ in range(2000):
        for tag in (b"\x32", b"\x2a", b"\x0a"):  # attribute.g, node.attribute, graph.node
            inner = tag + _varint(len(inner)) + inner
    with pytest.raises(BundleCorrupt, match="not a valid ONNX model"):
        parsed_model("scorer.onnx", b"\x3a" + _varint(len(inner)) + inner)


def _varint(number: int) -> bytes:
    out = b""
    while number > 127:
        out, number = out + bytes([number & 127 | 128]), number >> 7
    return out + bytes([number])


def test_what_this_software_has_no_field_for_is_dropped(bundle: Bundle) -> None:
    """Another reader of the same bytes might know it."""
    hidden = b"\xfa\x3f" + _varint(6) + b"stowed"  # field 1023
    data = bundle.graph("scorer.onnx") + hidden
    assert b"stowed" in data
    assert b"stowed" not in read_graph("scorer.onnx", data).SerializeToString()


def test_every_message_of_a_model_is_looked_at(bundle: Bundle) -> None:
    """Counted against the text form, in which each message opens one brace."""
    model = onnx.load_from_string(bundle.graph("query.onnx"))
    in_a_function(model)
    in_a_branch(model)
    assert sum(1 for _ in messages(model)) - 1 == str(model).count("{\n")
