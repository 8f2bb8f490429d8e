"""What runs a bundle's graphs on a CPU: which scorers are compiled and which are left to ONNX Runtime, how histories are encoded, rows as
they are stored, threads, and MLPs in compiled code.

That engines search as the reference does is in test_signature.py and test_finite_ranks.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import njit
from numpy.testing import assert_allclose, assert_array_equal
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from benchmarks.random_bundles import (
    linear_graphs,
    make_bundle,
    product_graphs,
    query_graph,
    random_masks,
    random_memory,
    random_queries,
    random_tree,
)
from espalier.arrays import Array, Float32, Int64, read_only
from espalier.bundle import Bundle
from espalier.bundle_writer import write_bundle
from espalier.engines import open_engine
from espalier.engines.compiled.engine import DenseSearch
from espalier.engines.compiled.mlp import packed
from espalier.engines.encoder import read_length, takes_any_length
from espalier.engines.graphs import load_graph
from espalier.engines.overflow_scores import dense_logits
from espalier.engines.reference import ReferenceEngine
from espalier.engines.runtime import opened_session
from espalier.engines.scorer_weights import Layer, ScorerWeights, scorer_graph, verified_weights
from espalier.errors import BundleCorrupt, DeviceUnavailable, UnsupportedGraph
from espalier.manifest import InnerProductForm, MlpForm
from espalier.search import SearchParams
from espalier.stored_numbers import number
from tests import ROOT
from tests.espalier.bundle.parts import content_of, draft_of
from tests.espalier.test_signature import assert_same


def small(folder: Path, kind: Literal["history", "product", "vector"] = "product", seed: int = 1, **options: Any) -> Bundle:
    rng = np.random.default_rng(seed)
    return make_bundle(folder, rng, random_tree(rng, 5, 3, empty_share=0.1), kind, name=f"{kind}-{seed}", **options)


@pytest.mark.parametrize("kind", ["product", "vector", "history"])
def test_products_and_mlps_are_compiled_and_undeclared_scorers_left_to_onnx_runtime(
    tmp_path: Path, kind: Literal["history", "product", "vector"], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    bundle = small(tmp_path, kind)
    assert open_engine(bundle, "cpu").name == "compiled-cpu"
    assert open_engine(bundle, "cpu", "onnx-cpu").name == "onnx-cpu"
    assert "there is a GPU" not in caplog.text
    undeclared = declaring(bundle, form=None)
    assert open_engine(undeclared, "cpu").name == "onnx-cpu"
    with pytest.raises(DeviceUnavailable, match=f"compiled-cpu cannot run {kind}-1 version 1: the manifest declares no form"):
        open_engine(undeclared, engine="compiled-cpu")


def declaring(bundle: Bundle, **changed: Any) -> Bundle:
    """A bundle whose manifest says something else of its scorer."""
    return replace(bundle, manifest=bundle.manifest.model_copy(update={"scorer": bundle.graph_scorer.model_copy(update=changed)}))


def test_float16_is_widened_exactly() -> None:
    every = np.arange(1 << 16, dtype=np.uint16)
    finite = every[np.isfinite(every.view(np.float16))]

    @njit
    def widened(stored: Any, out: Any) -> None:
        for i in range(len(stored)):
            out[i] = number(stored[i])

    out = np.empty(len(finite), np.float32)
    widened(finite.view(np.int16), out)
    assert_array_equal(out, finite.view(np.float16).astype(np.float32))
    assert_array_equal(np.signbit(out), np.signbit(finite.view(np.float16)))


def test_rows_are_read_where_the_bundle_maps_them(tmp_path: Path) -> None:
    for dtype in ("float32", "float16", "int8"):
        bundle = small(tmp_path / dtype, dtype=dtype)
        rows = Bundle.open(bundle.path).stored_rows
        assert isinstance(rows.base, np.memmap)
        assert (rows.flags.writeable, rows.flags.owndata) == (False, False)
        assert np.shares_memory(DenseSearch.of(bundle)._rows_ND, bundle.stored_rows)


@pytest.mark.parametrize("kind", ["product", "vector"])
def test_infinite_numbers_in_rows_of_float16_are_infinite(tmp_path: Path, kind: Literal["product", "vector"]) -> None:
    bundle = small(tmp_path, kind, dtype="float16", integer=False)
    rows_ND = np.array(bundle.node_rows_ND)
    rows_ND[-5:, 0] = [np.inf, -np.inf, np.nan, np.inf, 1]
    bundle = write_bundle(tmp_path / bundle.manifest.name / "2", draft_of(bundle), content_of(bundle, stored_rows=rows_ND))
    queries = random_queries(np.random.default_rng(1), bundle, 6, integer=True)
    params = SearchParams.uniform(6, 500, 500)
    with np.errstate(all="ignore"):
        expected = ReferenceEngine(bundle).search(queries, params)
    got = open_engine(bundle, engine="compiled-cpu").search(queries, params)
    assert_array_equal(got.count_B, expected.count_B)
    assert expected.count_B.min() < bundle.tree.item_count


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_an_encoder_that_does_more_than_look_narrow_rows_up_gets_wider_ones(tmp_path: Path, dtype: Literal["float16", "int8"]) -> None:
    graphs = product_graphs(np.random.default_rng(1), 4, integer=True)
    model = onnx.load_from_string(graphs.query_onnx)
    for node in model.graph.node:
        if node.op_type == "Gather":
            node.input[0] = "doubled"
    model.graph.node.insert(0, helper.make_node("Add", ["node_rows", "node_rows"], ["doubled"]))
    graphs = graphs._replace(query_onnx=model.SerializeToString())
    narrow, wide = (small(tmp_path / dtype, dtype=dtype, graphs=graphs) for dtype in (dtype, "float32"))
    params = SearchParams.uniform(3, 4, 5)
    for bundle in (narrow, wide):
        queries = random_queries(np.random.default_rng(2), bundle, 3)
        assert_same(open_engine(bundle, "cpu").search(queries, params), ReferenceEngine(bundle).search(queries, params))


def test_states_of_another_shape_than_declared_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleCorrupt, match=r"query.onnx: a query's states are \[6, 4\], the manifest says \[1, 4\]"):
        open_engine(declaring(small(tmp_path), state_levels=1), engine="compiled-cpu")


def test_an_encoder_of_vectors_that_was_exported_with_a_few_node_rows_is_taken(tmp_path: Path) -> None:
    """An exporter keeps an input that nothing reads, and the shape of its example."""
    graphs = linear_graphs(4)
    model = onnx.load_from_string(graphs.query_onnx)
    model.graph.input.append(helper.make_tensor_value_info("node_rows", onnx.TensorProto.FLOAT, [3, 4]))
    bundle = small(tmp_path, "vector", graphs=graphs._replace(query_onnx=model.SerializeToString()), dtype="float16")
    queries, params = random_queries(np.random.default_rng(1), bundle, 2), SearchParams.uniform(2, 4, 9)
    assert_same(open_engine(bundle, engine="compiled-cpu").search(queries, params), ReferenceEngine(bundle).search(queries, params))


def test_an_encoder_that_cannot_be_run_is_refused_with_the_reason(tmp_path: Path) -> None:
    nodes = [helper.make_node("Reshape", ["vector", "seven"], ["query_state"])]
    query = query_graph(nodes, ["vector"], {"seven": np.array([1, 7])}, 4)
    bundle = small(tmp_path, "vector", graphs=linear_graphs(4)._replace(query_onnx=query))
    with pytest.raises(DeviceUnavailable, match="compiled-cpu cannot run vector-1 version 1: ONNX Runtime cannot run"):
        open_engine(bundle, engine="compiled-cpu")


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_change_no_answer(tmp_path: Path, threads: int) -> None:
    """Queries of several beams and masks."""
    rng = np.random.default_rng(2)
    tree = random_tree(rng, 5, 3, empty_share=0.1)
    bundle = make_bundle(tmp_path, rng, tree, "product", 0.5, integer=False, memory=random_memory(rng, tree.item_count, 4, integer=False))
    queries = random_queries(rng, bundle, 37, integer=False)
    exclude_BE = rng.integers(-1, bundle.tree.item_count, (37, 2))
    masks = random_masks(rng, bundle.tree, 37, 0.5)
    params = SearchParams(rng.integers(1, 40, 37), rng.integers(1, 50, 37), exclude_BE, mask_B=masks)
    expected = open_engine(bundle, engine="compiled-cpu").search(queries, params)
    engine = open_engine(bundle, engine="compiled-cpu", threads=threads)
    assert_same(engine.search(queries, params), expected)
    with ThreadPoolExecutor(4) as callers:
        for got in callers.map(lambda _: engine.search(queries, params), range(8)):
            assert_same(got, expected)
    engine.close()


# -- MLPs --------------------------------------------------------------------------------------------------------------


def random_scorer(rng: np.random.Generator, widths: list[int], integer: bool) -> ScorerWeights:
    def numbers(*shape: int) -> Float32:
        return (rng.integers(-2, 3, shape) if integer else rng.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)

    def slopes(width: int) -> Float32:
        return (rng.integers(0, 2, width) if integer else rng.uniform(-1, 1, width)).astype(np.float32)

    layers = tuple(Layer(numbers(before, after), numbers(after), slopes(after)) for before, after in pairwise(widths))
    return ScorerWeights(layers, numbers(widths[-1]), float(numbers(1)[0]))


def logits_of(scorer: ScorerWeights, counts: list[int], rows_PD: Float32, place_X: Int64, states_BS: Float32) -> Float32:
    """Those of all rows for queries of so many of them each."""
    begin_B = np.append(0, np.cumsum(counts))
    logits_C: Float32 = dense_logits(*read_only(begin_B, place_X, rows_PD, states_BS), packed(scorer))
    return logits_C


@pytest.mark.parts
@given(
    seed=st.integers(0, 2**32 - 1),
    widths=st.lists(st.integers(1, 40), min_size=2, max_size=5),
    counts=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    integer=st.booleans(),
)
def test_logits_of_a_compiled_mlp_are_those_of_its_weights(seed: int, widths: list[int], counts: list[int], integer: bool) -> None:
    rng = np.random.default_rng(seed)
    scorer, total = random_scorer(rng, widths, integer), sum(counts)
    rows_PD: Any = rng.integers(-2, 3, (total, widths[0])) if integer else rng.standard_normal((total, widths[0]))
    states_BS: Any = rng.integers(-2, 3, (len(counts), widths[1])) if integer else rng.standard_normal((len(counts), widths[1]))
    rows_PD, states_BS, place_X = rows_PD.astype(np.float32), states_BS.astype(np.float32), rng.permutation(total)
    found_C = logits_of(scorer, counts, rows_PD, place_X, states_BS)
    last = logits_of(scorer, [counts[-1]], rows_PD, place_X[total - counts[-1] :], states_BS[-1:])
    assert_array_equal(last, found_C[total - counts[-1] :])  # whichever rows stand beside a row
    rows_CD = rows_PD[place_X]
    expected_C = scorer.logits(np.repeat(states_BS, counts, axis=0), rows_CD[:, None])[:, 0]
    if integer:
        assert_array_equal(found_C, expected_C)
    else:
        assert_allclose(found_C, expected_C, rtol=1e-4, atol=1e-4)


@pytest.mark.parts
@pytest.mark.parametrize("widths", [[16, 2048], [1, 16, 2048, 3]])
def test_the_widest_layers_fit_a_compiled_mlp(widths: list[int]) -> None:
    rng = np.random.default_rng(5)
    scorer = random_scorer(rng, widths, True)
    rows_PD, states_BS = rng.integers(-2, 3, (7, widths[0])).astype(np.float32), np.ones((1, widths[1]), np.float32)
    assert_array_equal(logits_of(scorer, [7], rows_PD, np.arange(7), states_BS), scorer.logits(states_BS, rows_PD[None])[0])


@pytest.mark.parts
def test_a_row_that_overflows_in_a_compiled_mlp_leaves_the_others_alone() -> None:
    rng = np.random.default_rng(3)
    scorer, rows_PD, states_BS = random_scorer(rng, [5, 7, 3], False), rng.standard_normal((6, 5), np.float32), np.zeros((1, 7), np.float32)
    before_C = logits_of(scorer, [6], rows_PD, np.arange(6), states_BS)
    rows_PD[2] = 3e38
    after_C = logits_of(scorer, [6], rows_PD, np.arange(6), states_BS)
    assert np.flatnonzero(~np.isfinite(after_C)).tolist() == [2]
    assert_array_equal(np.delete(after_C, 2), np.delete(before_C, 2))


# -- declared forms of scorers: what the manifest says is compared with what the graph computes -------------------------


@given(seed=st.integers(0, 999), widths=st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_the_weights_of_a_graph_are_those_that_it_was_written_from(seed: int, widths: list[int]) -> None:
    scorer = random_scorer(np.random.default_rng(seed), widths, integer=False) if len(widths) > 1 else ScorerWeights()
    state_dim = widths[min(1, len(widths) - 1)]
    model = load_graph("scorer.onnx", scorer_graph(scorer, state_dim, widths[0]))
    weights = verified_weights(model, scorer.form, state_dim, widths[0])
    for layer, written in zip(weights.layers, scorer.layers, strict=True):
        for name in ("weight", "bias", "slope"):
            assert_array_equal(getattr(layer, name), getattr(written, name))
    assert_array_equal(weights.out, scorer.out)
    assert weights.offset == np.float32(scorer.offset)
    for queries, candidates in ((0, 3), (2, 0), (0, 0)):
        inputs = np.zeros((queries, state_dim), np.float32), np.zeros((queries, candidates, widths[0]), np.float32)
        for session in (ReferenceEvaluator(model), opened_session(model)):
            (logits,) = session.run(None, dict(zip(("query_state", "node_rows"), inputs, strict=True)))
            assert np.shape(logits) == (queries, candidates)


def operator(model: onnx.ModelProto, kind: str) -> onnx.NodeProto:
    node: onnx.NodeProto = next(node for node in model.graph.node if node.op_type == kind)
    return node


def with_array(model: onnx.ModelProto, name: str, array: Array) -> None:
    initializer = next(tensor for tensor in model.graph.initializer if tensor.name == name)
    initializer.CopyFrom(numpy_helper.from_array(array, name))


def another_function(model: onnx.ModelProto) -> None:
    operator(model, "PRelu").op_type = "Add"


def rows_of_another_network(model: onnx.ModelProto) -> None:
    model.graph.node.insert(0, helper.make_node("Sigmoid", ["node_rows"], ["rows"]))
    operator(model, "MatMul").input[0] = "rows"


@pytest.mark.parametrize(
    ("widths", "change", "reason"),
    [
        ([4], rows_of_another_network, "something else than the inner-product"),
        ([4, 4], another_function, "something else than the mlp"),
        ([4, 4, 2], lambda model: with_array(model, "layers.1.weight", np.ones(4, np.float32)), r"layers.1.weight .* 2 dim.*float32\[4\]"),
        ([4, 4], lambda model: with_array(model, "layers.0.slope", np.ones((4, 1), np.float32)), r"layers.0.slope .* got float32\[4, 1\]"),
        ([4, 4], lambda model: with_array(model, "layers.0.bias", np.ones(4)), r"layers.0.bias in float32 .* got float64\[4\]"),
        ([4, 4, 2], lambda model: with_array(model, "layers.1.bias", np.ones(1, np.float32)), "layers.1.bias has 1 numbers, expected 2"),
        ([4, 4], lambda model: with_array(model, "out.weight", np.ones((4, 2), np.float32)), "out.weight is .* expected one column"),
        ([4, 4], lambda model: with_array(model, "layers.0.weight", np.ones((5, 4), np.float32)), "cannot be run"),
        ([4, 5], lambda model: None, "takes states of 5 numbers, not of 4"),
    ],
)
def test_a_graph_of_another_form_than_declared_is_refused(
    widths: list[int], change: Callable[[onnx.ModelProto], None], reason: str
) -> None:
    scorer = random_scorer(np.random.default_rng(1), widths, integer=False) if len(widths) > 1 else ScorerWeights()
    model = onnx.load_from_string(scorer_graph(scorer, 4, 4))
    change(model)
    with pytest.raises(UnsupportedGraph, match=reason):
        verified_weights(model, scorer.form, 4, 4)


def test_a_form_of_more_layers_than_the_graph_has_is_refused() -> None:
    model = onnx.load_from_string(scorer_graph(random_scorer(np.random.default_rng(1), [4, 4], False), 4, 4))
    with pytest.raises(UnsupportedGraph, match=r"expected layers.1.weight in float32 with 2 dimensions, got nothing"):
        verified_weights(model, MlpForm(layers=2), 4, 4)


def test_a_state_narrower_than_a_node_row_is_refused() -> None:
    """A state of one number times the sum of a row: in NumPy, which repeats it, that is an inner product."""
    model = onnx.load_from_string(scorer_graph(ScorerWeights(), 1, 4))
    del model.graph.node[:]
    model.graph.node.extend(
        [
            helper.make_node("Unsqueeze", ["query_state", "two"], ["column"]),
            helper.make_node("Mul", ["node_rows", "column"], ["products"]),
            helper.make_node("ReduceSum", ["products", "two"], ["logits"], keepdims=0),
        ]
    )
    with pytest.raises(UnsupportedGraph, match="takes states of 4 numbers, not of 1"):
        verified_weights(model, InnerProductForm(), 1, 4)


# -- at how many places histories are read ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("items", "length", "read"),
    [(0, 6, 1), (1, 6, 1), (2, 6, 2), (3, 6, 4), (4, 6, 4), (5, 6, 6), (6, 6, 6), (64, 100, 64), (65, 100, 100), (1, 1, 1), (0, 1, 1)],
)
def test_a_history_is_read_at_the_power_of_two_that_holds_it_and_at_most_at_its_length(items: int, length: int, read: int) -> None:
    history_T = np.full(length, -1)
    history_T[length - items :] = np.arange(items)
    assert read_length(history_T) == read
    history_T[length - items + 1 :] = -1  # padding behind and between items is read
    assert read_length(history_T) == read


@pytest.mark.parametrize(
    ("name", "shape", "is_own"),
    [
        ("history_leaves", ["B", "T"], True),
        ("history_leaves", [None, None], True),
        ("history_leaves", ["B", 6], False),
        ("history_leaves", None, False),
        ("history_nodes", ["B", "L", "T"], True),
        ("history_nodes", ["B", "L", 6], False),
        ("vector", ["B", "F"], False),
    ],
)
def test_only_histories_whose_length_is_no_number_are_cut(name: str, shape: list[str | int | None] | None, is_own: bool) -> None:
    rows = helper.make_tensor_value_info("node_rows", onnx.TensorProto.FLOAT, ["N", 4])
    query = helper.make_tensor_value_info(name, onnx.TensorProto.INT64, shape)
    graph = helper.make_graph([], "query", [rows, query], [])
    assert takes_any_length(helper.make_model(graph)) is is_own


# -- in a process of its own ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_warming_up_leaves_no_code_to_be_waited_for_and_writes_nothing_below_the_home_folder(models: Path, tmp_path: Path) -> None:
    """Even without golden queries. ONNX Runtime's telemetry would write a device id, and what it has seen."""
    assert len(Bundle.open(models / "books" / "1").golden()) == 0
    code = """
import sys, pathlib, espalier
from espalier.engines.compiled.beam import search_queries
engine = espalier.open_engine(espalier.Bundle.open(pathlib.Path(sys.argv[1])), "cpu")
assert not search_queries.overloads
engine.warm_up()
assert search_queries.overloads
"""
    environment = {name: text for name, text in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"} | {"HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code, str(models / "books" / "1")], cwd=ROOT, env=environment, check=True)
    assert list(tmp_path.rglob("*")) == []
