"""Numbers at float32's ends: no engine keeps a rank that is not finite, none writes where it must not, and a query that cannot be scored
is refused.

A query of one number has one product a node, so that its ranks are exact and engines must agree over float32's whole range, infinities
included. Queries of many numbers overflow in an order of each engine's own: of these only what no order changes is asked.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from onnx import helper

from benchmarks.random_bundles import linear_graphs, make_bundle, make_linear_bundle, query_graph, random_tree, sparse_rows
from espalier.arrays import Float32
from espalier.bundle import Bundle
from espalier.chunks import LARGEST_RANK, Chunks
from espalier.engines import open_engine
from espalier.engines.best_nodes import best_positions
from espalier.engines.onnx.engine import OnnxSearch
from espalier.engines.pipeline import Pipeline
from espalier.engines.reference import ReferenceEngine
from espalier.errors import InvalidQuery
from espalier.manifest import Activation, Ranking
from espalier.queries import QueryBatch, VectorKind
from espalier.search import Engine, SearchParams, SearchResult
from espalier.text.sparse_rows import SparseRows
from espalier.tree import complete_tree
from tests.espalier.test_signature import assert_same
from tests.service.running import problem, run

LARGEST = float(np.finfo(np.float32).max)
WITHOUT_SHRINKING = (Phase.explicit, Phase.reuse, Phase.generate)
"""A smaller seed is no simpler case."""
ON_GPU = [pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"), pytest.mark.slow]
GRAPH_ENGINES = ["compiled-cpu", "onnx-cpu", "onnx-batched", pytest.param("triton", marks=ON_GPU)]
LINEAR_ENGINES = ["sparse-cpu", pytest.param("sparse-cuda", marks=ON_GPU)]
OF_LINEAR_SCORERS = ("sparse-cpu", "sparse-cuda")


def opened(bundle: Bundle, name: str) -> Engine:
    if name in ("triton", "sparse-cuda"):
        from tests.espalier.gpu_families import GRAPHS, LINEAR

        return (GRAPHS if name == "triton" else LINEAR).opened(bundle)
    if name == "onnx-batched":  # as CUDA runs it: several queries a call
        return Pipeline(bundle, OnnxSearch(bundle, "cpu", group_size=3))
    return ReferenceEngine(bundle) if name == "reference" else open_engine(bundle, engine=name)


def random_bundle(rng: np.random.Generator, folder: Path, name: str, ranking: Ranking) -> Bundle:
    """One that the engine takes: of vectors, or of features."""
    tree = random_tree(rng, 3, 3, ragged=bool(rng.random() < 0.5), empty_share=0.1)
    if name in OF_LINEAR_SCORERS:
        return make_linear_bundle(folder, rng, tree, ranking, width=6)
    return make_bundle(folder, rng, tree, "vector", ranking.gamma, ranking.own)


def queries_of(bundle: Bundle, dense_BF: Float32) -> QueryBatch:
    """The rows as vectors, or as the features that are not 0."""
    kind = bundle.manifest.query
    return QueryBatch(kind, dense_BF if isinstance(kind, VectorKind) else sparse_rows(dense_BF))


def any_floats(rng: np.random.Generator, shape: tuple[int, ...]) -> Float32:
    """Finite numbers of float32's whole range, every exponent as likely: large ones, small ones, denormal ones."""
    bits = rng.integers(0, 1 << 32, shape, np.uint64).astype(np.uint32)
    floats = bits.view(np.float32)
    return np.where(np.isfinite(floats), floats, np.float32(LARGEST)).astype(np.float32)


def one_number(rng: np.random.Generator, batch: int, width: int) -> Float32:
    dense_BF = np.zeros((batch, width), np.float32)
    dense_BF[np.arange(batch), rng.integers(0, width, batch)] = any_floats(rng, (batch,))
    dense_BF[0, dense_BF[0] != 0] = LARGEST
    return dense_BF


def answer(engine: Engine, queries: QueryBatch, params: SearchParams) -> SearchResult:
    """Triton's interpreter computes in NumPy, which would warn of every infinity."""
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        return engine.search(queries, params)


def assert_sound(result: SearchResult, params: SearchParams, items: int) -> None:
    """What holds of any answer."""
    for b, count in enumerate(result.count_B.tolist()):
        rows = result.item_rows_BM[b, :count]
        assert count <= params.m_B[b]
        assert len(set(rows.tolist())) == count
        assert np.all((rows >= 0) & (rows < items))
        assert np.all(result.item_rows_BM[b, count:] == -1)
        assert np.isfinite(result.ranks_BM[b, :count]).all()
    assert not np.isnan(result.ranks_BM).any()
    assert np.all((result.scores_BM >= 0) & (result.scores_BM <= 1))


# -- every engine ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*GRAPH_ENGINES, *LINEAR_ENGINES])
@settings(max_examples=4, phases=WITHOUT_SHRINKING)
@given(seed=st.integers(0, 2**32 - 1), gamma=st.sampled_from([0.0, 0.5, 1.0]))
def test_queries_of_one_number_of_any_size_are_searched_as_the_reference_does(
    tmp_path_factory: pytest.TempPathFactory, name: str, seed: int, gamma: float
) -> None:
    rng = np.random.default_rng(seed)
    bundle = random_bundle(rng, tmp_path_factory.mktemp("models"), name, Ranking(own="logit", gamma=gamma))
    dense_BF = one_number(rng, 4, 6 if name in OF_LINEAR_SCORERS else 4)
    queries, params = queries_of(bundle, dense_BF), SearchParams(2 ** rng.integers(0, 5, 4), rng.integers(1, 60, 4))  # ends of buckets
    expected, got = ReferenceEngine(bundle).search(queries, params), answer(opened(bundle, name), queries, params)
    assert_same(got, expected)
    assert_sound(got, params, bundle.tree.item_count)
    if expected.finite_B is not None and got.finite_B is not None:
        assert not np.any(got.finite_B & ~expected.finite_B)
        overflow_B = np.abs(dense_BF).max(1) > LARGEST / 2  # rows have entries up to 2
        assert np.all(got.finite_B | overflow_B)  # engines may also score nodes that are not eligible, which the reference does not
    assert (got.finite_B is None) == (expected.finite_B is None) == (name in OF_LINEAR_SCORERS)


@pytest.mark.parametrize("name", GRAPH_ENGINES)
@settings(max_examples=4, phases=WITHOUT_SHRINKING)
@given(seed=st.integers(0, 2**32 - 1), gamma=st.sampled_from([0.0, 1.0]), own=st.sampled_from(["logit", "log_activation"]))
def test_answers_to_any_vector_are_sound(
    tmp_path_factory: pytest.TempPathFactory, name: str, seed: int, gamma: float, own: Literal["logit", "log_activation"]
) -> None:
    rng = np.random.default_rng(seed)
    bundle = random_bundle(rng, tmp_path_factory.mktemp("models"), name, Ranking(own=own, gamma=gamma))
    queries, params = QueryBatch(bundle.manifest.query, any_floats(rng, (4, 4))), SearchParams(np.full(4, 3), np.full(4, 9), trace=True)
    result = answer(opened(bundle, name), queries, params)
    assert_sound(result, params, bundle.tree.item_count)
    for level in result.traces[0]:
        assert np.isfinite(level.candidate_ranks_BC[level.candidates_BC >= 0]).all()
        assert np.isfinite(level.ranks_BK[level.nodes_BK >= 0]).all()


@pytest.mark.parametrize("name", LINEAR_ENGINES)
@settings(max_examples=4, phases=WITHOUT_SHRINKING)
@given(
    seed=st.integers(0, 2**32 - 1),
    gamma=st.sampled_from([0.0, 0.5, 1.0]),
    own=st.sampled_from(["logit", "log_activation"]),
    activation=st.sampled_from(["sigmoid", "l1-hinge", "l3-hinge", "l4-hinge"]),
)
def test_answers_to_any_features_are_sound_and_right_where_the_query_is_not_refused(
    tmp_path_factory: pytest.TempPathFactory,
    name: str,
    seed: int,
    gamma: float,
    own: Literal["logit", "log_activation"],
    activation: Activation,
) -> None:
    rng, ranking = np.random.default_rng(seed), Ranking(own=own, activation=activation, gamma=gamma)
    bundle = random_bundle(rng, tmp_path_factory.mktemp("models"), name, ranking)
    tree = bundle.tree
    scale = np.float32(10.0) ** rng.choice([-42, -3, 0, 2, 38])
    with np.errstate(over="ignore"):  # 4 · 10³⁸ is no float32
        dense_BF = np.where(rng.random((4, 6)) < 0.5, any_floats(rng, (4, 6)), rng.normal(size=(4, 6)) * scale).astype(np.float32)
    queries = queries_of(bundle, np.where(np.isfinite(dense_BF), dense_BF, np.float32(LARGEST)))
    whole = SearchParams.uniform(4, tree.node_count, tree.item_count)
    result, expected = answer(opened(bundle, name), queries, whole), ReferenceEngine(bundle).search(queries, whole)
    assert_sound(result, whole, tree.item_count)
    weight, bias = bundle.chunks.largest
    for b in range(4):
        mine = queries.take(np.array([b]))
        if refused(bundle, mine):
            continue
        assert result.count_B[b] == expected.count_B[b] == tree.item_count
        by_item, ours = (np.empty(tree.item_count) for _ in range(2))
        by_item[expected.item_rows_BM[b]], ours[result.item_rows_BM[b]] = expected.ranks_BM[b], result.ranks_BM[b]
        logit = 1 + bias + weight * float(np.abs(mine.features.values.astype(np.float64)).sum())
        power = int(activation[1]) if own == "log_activation" and activation != "sigmoid" else 1
        np.testing.assert_allclose(ours, by_item, rtol=0, atol=1e-5 * logit**power)


def refused(bundle: Bundle, queries: QueryBatch) -> bool:
    try:
        bundle.chunks.check_sizes(queries.features, bundle.manifest.ranking, bundle.tree.height)
    except InvalidQuery:
        return True
    return False


@pytest.mark.parametrize("name", ["reference", *GRAPH_ENGINES])
def test_a_state_that_is_not_finite_finds_nothing_and_says_so(tmp_path: Path, name: str) -> None:
    """A query encoder that divides a vector by its length makes 0 / 0 of an empty one; the other queries of the call do not notice."""
    bundle = unit_vectors(tmp_path)
    vectors_BF = np.array([[1, 2, 3, 4], [0, 0, 0, 0], [4, 3, 2, 1]], np.float32)
    queries, params = QueryBatch(bundle.manifest.query, vectors_BF), SearchParams.uniform(3, 4, 5)
    engine = opened(bundle, name)
    result = answer(engine, queries, params)
    assert result.finite_B is not None
    assert result.finite_B.tolist() == [True, False, True]
    assert result.count_B.tolist() == [5, 0, 5]
    assert result.complete_B.tolist() == [True, False, True]
    alone = np.array([0])
    assert_array_equal(answer(engine, queries.take(alone), params.take(alone)).item_rows_BM[0], result.item_rows_BM[0])


def unit_vectors(folder: Path) -> Bundle:
    """A model of vectors whose encoder divides them by their lengths."""
    nodes = [
        helper.make_node("Mul", ["vector", "vector"], ["squares"]),
        helper.make_node("ReduceSum", ["squares", "one"], ["sum"], keepdims=1),
        helper.make_node("Div", ["vector", "sum"], ["divided"]),
        helper.make_node("Unsqueeze", ["divided", "one"], ["query_state"]),
    ]
    query = query_graph(nodes, ["vector"], {"one": np.array([1])}, 4)
    rng = np.random.default_rng(3)
    tree = complete_tree(rng.permutation(16), 2)
    return make_bundle(folder, rng, tree, "vector", integer=False, graphs=linear_graphs(4)._replace(query_onnx=query), name="units")


@pytest.mark.parametrize("name", ["reference", *GRAPH_ENGINES, *LINEAR_ENGINES])
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_engines_refuse_queries_that_hold_no_number(tmp_path: Path, name: str, wrong: float) -> None:
    rng = np.random.default_rng(3)
    params = SearchParams.uniform(1, 4, 5)
    if name not in OF_LINEAR_SCORERS:
        queries = QueryBatch(VectorKind(width=4), np.array([[1, wrong, 0, 0]], np.float32))
        with pytest.raises(InvalidQuery, match=rf"vector: got {wrong}, expected finite numbers"):
            opened(unit_vectors(tmp_path), name).search(queries, params)
    if name in ("reference", *OF_LINEAR_SCORERS):
        linear = make_linear_bundle(tmp_path, rng, random_tree(rng, 2, 4), Ranking(own="logit", gamma=1))
        rows = SparseRows(np.array([0, 2]), np.array([1, 4], np.int32), np.array([1, wrong], np.float32), 20)
        with pytest.raises(InvalidQuery, match=rf"features\.values: got {wrong}, expected finite numbers"):
            opened(linear, name).search(QueryBatch(linear.manifest.query, rows), params)


# -- the compiled search --------------------------------------------------------------------------------------------------


@pytest.mark.parts
@pytest.mark.parametrize("wanted", [1, 2, 5, 19, 20, 30])
def test_the_selection_is_a_stable_sorts_first(wanted: int) -> None:
    """Ties, both zeros and the ends of float32 among them. Of what is no number it keeps anything, but never more than is wanted."""
    rng = np.random.default_rng(wanted)
    ends = np.array([0.0, -0.0, 1, -1, LARGEST, -LARGEST, 1e-45, -1e-45], np.float32)
    every = [rng.normal(size=20), rng.integers(-2, 3, 20), np.zeros(20), rng.choice(ends, 20), -np.abs(rng.normal(size=20))]
    every += [np.full(20, np.nan), np.where(rng.random(20) < 0.5, np.nan, rng.normal(size=20)), np.append(np.nan, rng.normal(size=19))]
    for keys in every:
        keys = keys.astype(np.float32)
        positions = np.full(40, -7)
        count = best_positions(keys, 20, wanted, np.empty(20, np.int32), positions)
        assert count <= wanted
        assert np.all(positions[min(wanted, 20) :] == -7)
        if not np.isnan(keys).any():
            assert positions[:count].tolist() == np.sort(np.argsort(-keys, kind="stable")[:wanted]).tolist()


# -- refused queries ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder, rng = tmp_path_factory.mktemp("models"), np.random.default_rng(4)
    unit_vectors(folder)
    make_linear_bundle(folder, rng, random_tree(rng, 3, 4), Ranking(own="log_activation", activation="l3-hinge", gamma=1), name="rows")
    with run(folder, lambda bundle: open_engine(bundle, "cpu")) as running:
        yield running


@pytest.mark.parametrize(
    ("model", "query", "good", "field"),
    [
        ("rows", '"features": {"indices": [0, 1], "values": [3e38, 3e38]}', False, "features.values"),
        ("rows", '"features": {"indices": [0, 1], "values": [1e30, 0]}', False, "features.values"),
        ("rows", '"features": {"indices": [0, 1], "values": [-2e20, 1]}', False, "features.values"),
        ("rows", '"features": {"indices": [0, 1], "values": [1, -1e-45]}', True, ""),
        ("units", '"vector": [0, 0, 0, 0]', False, "vector"),
        ("units", '"vector": [1e-40, 0, 0, 0]', False, "vector"),
        ("units", '"vector": [3e38, 0, 0, 3e38]', True, ""),
    ],
)
def test_a_query_that_no_score_can_be_made_of_is_422_and_named(served: Any, model: str, query: str, good: bool, field: str) -> None:
    first = '"vector": [1, 2, 3, 4]' if model == "units" else '"features": {"indices": [0], "values": [1]}'
    got = post(served, f'{{"model": "{model}", "queries": [{{{first}}}, {{{query}}}]}}')
    assert got.status_code == (200 if good else 422)
    if not good:
        assert f"queries[1].{field}" in problem(got)["detail"]
    elif model == "units":  # ∞ in the denominator: a finite state of zeros, equal ranks, a plain answer
        assert [item["score"] for item in got.json()["results"][1]["items"]] == [0.5] * 5


@pytest.mark.parametrize("number", ["1e39", "-1e39", "1e400", "NaN", "1" + 400 * "0"])
def test_numbers_that_no_float32_can_hold_are_refused(served: Any, number: str) -> None:
    for model, query in (("units", f'"vector": [1, 2, 3, {number}]'), ("rows", f'"features": {{"indices": [1], "values": [{number}]}}')):
        assert post(served, f'{{"model": "{model}", "queries": [{{{query}}}]}}').status_code in (400, 422)


def post(served: Any, body: str) -> Any:
    return served.client.post("/retrieve", content=body, headers={"Content-Type": "application/json"})


def test_the_bound_counts_hinges_and_paths() -> None:
    """Values up to the bound are taken, and twice as large ones are not, for every formula of a rank."""
    chunks = Chunks(
        np.array([0, 1]), np.array([0], np.int32), np.array([0, 1]), np.array([0], np.uint16), np.array([2], np.float32),
        np.zeros(3, np.float32), 1,
    )  # fmt: skip
    for ranking, most in (
        (Ranking(own="logit", gamma=0), LARGEST_RANK / 2),
        (Ranking(own="logit", gamma=1), LARGEST_RANK / 2 / 3),
        (Ranking(own="log_activation", gamma=1), LARGEST_RANK / 2 / 3),
        (Ranking(own="log_activation", activation="l4-hinge", gamma=0.5), (LARGEST_RANK / 1.75) ** 0.25 / 2),
    ):

        def row(value: float) -> SparseRows:
            return SparseRows(np.array([0, 0, 1]), np.array([0], np.int32), np.array([value], np.float32), 1)

        chunks.check_sizes(row(-0.9 * most), ranking, 3)
        with pytest.raises(InvalidQuery, match=r"queries\[1\]\.features\.values"):
            chunks.check_sizes(row(1.1 * most), ranking, 3)
