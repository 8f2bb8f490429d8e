"""The signature test: every engine searches as the reference does.

(a) With integer weights all arithmetic is exact, so results must be equal, ties included. (b) With real weights the reference rescores
the beams that the engine kept: every kept candidate must be at least as good as the best dropped one, less the engine's rounding.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from numpy.typing import NDArray

from espalier.bundle import Bundle
from espalier.engines.compose import Plan, compose
from espalier.engines.onnx_graph import Grid, OnnxEngine
from espalier.engines.reference import ReferenceEngine
from espalier.queries import QueryBatch
from espalier.search import SearchParams
from tests.builders import make_bundle, random_queries, random_tree

SMALL_GRID = Grid(batches=(2, 4), wanted=(8, 64), excluded=64)

shapes = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**32 - 1),
        "branching_height": st.sampled_from([(2, 3), (2, 6), (3, 4), (4, 3), (8, 2), (32, 2), (2, 1)]),
        "ragged": st.booleans(),
        "empty_share": st.sampled_from([0.0, 0.2, 0.9]),
        "kind": st.sampled_from(["history", "vector"]),
        "gamma": st.sampled_from([0.0, 0.5, 1.0]),
        "exclude": st.sampled_from([0, 3, 40]),
        "batch": st.integers(1, 4),
        "fixed": st.booleans(),
    }
)


def draw(
    folder: Path, shape: dict[str, Any], integer: bool, own: Literal["logit", "log_activation"] = "logit"
) -> tuple[Bundle, QueryBatch, SearchParams]:
    rng = np.random.default_rng(shape["seed"])
    branching, height = shape["branching_height"]
    tree = random_tree(rng, height, branching, shape["ragged"], shape["empty_share"])
    bundle = make_bundle(folder, rng, tree, shape["kind"], shape["gamma"], own, integer, name=f"m{rng.integers(1 << 60)}")
    queries = random_queries(rng, bundle, shape["batch"], integer)
    exclude = rng.integers(-1, tree.item_count, (shape["batch"], shape["exclude"])) if shape["exclude"] else None
    params = SearchParams(rng.integers(1, 40, shape["batch"]), rng.integers(1, 50, shape["batch"]), exclude)
    return bundle, queries, params


@settings(max_examples=120)
@given(shape=shapes)
def test_engines_equal_the_reference_exactly_with_integer_weights(tmp_path_factory: pytest.TempPathFactory, shape: dict[str, Any]) -> None:
    bundle, queries, params = draw(tmp_path_factory.mktemp("models"), shape, integer=True)
    engine = OnnxEngine(bundle, "cpu", grid=SMALL_GRID if shape["fixed"] else None)
    expected, got = ReferenceEngine(bundle).search(queries, params), engine.search(queries, params)
    assert_array_equal(got.item_rows_BM, expected.item_rows_BM)
    assert_array_equal(got.ranks_BM, expected.ranks_BM)
    assert_array_equal(got.scores_BM, expected.scores_BM)
    assert_array_equal(got.count_B, expected.count_B)
    assert_array_equal(got.complete_B, expected.complete_B)


@settings(max_examples=60)
@given(shape=shapes, own=st.sampled_from(["logit", "log_activation"]))
def test_kept_beams_are_the_best_with_real_weights(
    tmp_path_factory: pytest.TempPathFactory, shape: dict[str, Any], own: Literal["logit", "log_activation"]
) -> None:
    bundle, queries, params = draw(tmp_path_factory.mktemp("models"), shape, integer=False, own=own)
    params = SearchParams(params.beam_size_B, params.m_B, params.exclude_BE, trace=True)
    engine, reference = OnnxEngine(bundle, "cpu"), ReferenceEngine(bundle)
    result = engine.search(queries, params)
    assert result.trace is not None
    for b in range(len(queries)):
        kept = {level.level: level.nodes_BK[b][level.nodes_BK[b] >= 0] for level in result.trace}
        start = bundle.tree.start_level(1 << int(params.beam_size_B[b]).bit_length() - 1)
        kept = {level: nodes for level, nodes in kept.items() if level >= start}  # above it other buckets' queries were scored
        replay(reference, queries, params, b, kept, engine.rounding)


def replay(
    reference: ReferenceEngine, queries: QueryBatch, params: SearchParams, b: int, kept: dict[int, NDArray[Any]], rounding: float
) -> None:
    """Every beam that the engine kept is, by the reference's scores, a best one among its candidates."""
    for step in reference.steps(queries, params, b, follow=kept):
        mine = np.isin(step.candidates_C, kept.get(step.level, step.kept_K))
        assert mine.sum() == len(kept.get(step.level, step.kept_K)), "a kept node was no candidate"
        if step.level < reference.bundle.tree.height:
            assert mine.sum() == min(len(mine), params.beam_size_B[b])
        if mine.any() and not mine.all():
            assert step.ranks_C[mine].min() >= step.ranks_C[~mine].max() - rounding


@settings(max_examples=30)
@given(shape=shapes)
def test_a_query_gets_the_same_answer_in_any_batch(tmp_path_factory: pytest.TempPathFactory, shape: dict[str, Any]) -> None:
    bundle, queries, params = draw(tmp_path_factory.mktemp("models"), shape, integer=False)
    engine = OnnxEngine(bundle, "cpu")
    together = engine.search(queries, params)
    for b in range(len(queries)):
        one = np.array([b])
        exclude = None if params.exclude_BE is None else params.exclude_BE[one]
        alone = engine.search(queries.take(one), SearchParams(params.beam_size_B[one], params.m_B[one], exclude))
        m = params.m_B[b]
        assert_array_equal(alone.item_rows_BM[0], together.item_rows_BM[b, :m])
        assert_array_equal(alone.ranks_BM[0], together.ranks_BM[b, :m])


@settings(max_examples=60)
@given(shape=shapes, beam=st.integers(1, 60))
def test_a_beam_of_at_least_m_brings_min_of_m_and_eligible(
    tmp_path_factory: pytest.TempPathFactory, shape: dict[str, Any], beam: int
) -> None:
    bundle, queries, params = draw(tmp_path_factory.mktemp("models"), shape, integer=True)
    batch = len(queries)
    params = SearchParams.uniform(batch, beam, max(1, beam // 2), params.exclude_BE)
    result = OnnxEngine(bundle, "cpu").search(queries, params)
    for b in range(batch):
        out = set() if params.exclude_BE is None else set(params.exclude_BE[b].tolist()) - {-1}
        rows = result.item_rows_BM[b][: result.count_B[b]]
        assert result.count_B[b] == min(params.m_B[b], bundle.tree.item_count - len(out))
        assert result.complete_B[b]
        assert len(set(rows.tolist())) == len(rows)
        assert not out & set(rows.tolist())
        assert np.all((rows >= 0) & (rows < bundle.tree.item_count))


@pytest.mark.parametrize("slope", [np.full((1, 1, 6), 0.5), np.array([0.5, 0.25, -1, 1, 0, 0.5]), np.array([2, 0.25, -1, 1, 0, 0.5])])
def test_prelu_is_rewritten_exactly(tmp_path: Path, slope: NDArray[Any]) -> None:
    rng = np.random.default_rng(5)
    bundle = make_bundle(tmp_path, rng, random_tree(rng, 5, 2), slope=slope.astype(np.float32))
    queries, params = random_queries(rng, bundle, 3), SearchParams.uniform(3, 4, 6)
    expected, got = ReferenceEngine(bundle).search(queries, params), OnnxEngine(bundle, "cpu").search(queries, params)
    assert_array_equal(got.ranks_BM, expected.ranks_BM)


@pytest.mark.parametrize("kind", ["history", "vector"])
@pytest.mark.parametrize("gamma", [0.0, 0.5])
def test_a_fixed_plan_has_no_shape_left_to_compute(tmp_path: Path, kind: Literal["history", "vector"], gamma: float) -> None:
    """What a CUDA graph needs: known outputs, and neither shape arithmetic nor operators whose output size depends on data."""
    rng = np.random.default_rng(3)
    bundle = make_bundle(tmp_path, rng, random_tree(rng, 6, 3, empty_share=0.2), kind, gamma)
    manifest = bundle.manifest
    plan = Plan(4, 7, excluded="leaves and inner", wanted=64)
    graphs = (bundle.graph("query.onnx"), bundle.graph("scorer.onnx"))
    model = compose(*graphs, bundle.tree, manifest.ranking, manifest.query, manifest.scorer, plan)
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    options.log_severity_level = 3
    for name, size in {"B": 4, "excluded_leaves_X": 16, "excluded_inner_X": 16}.items():
        options.add_free_dimension_override_by_name(name, size)
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    assert all(isinstance(dim, int) for entry in session.get_outputs() for dim in entry.shape)
    operators = {node.op_type for node in onnx.load(tmp_path / "optimised.onnx").graph.node}
    assert not operators & {"Shape", "Range", "NonZero", "ConstantOfShape", "If", "Loop"}
