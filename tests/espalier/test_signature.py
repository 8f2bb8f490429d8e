"""The signature test: every engine searches as the reference does.

(a) With integer weights all arithmetic is exact, so results must be equal, ties included. (b) With real weights the reference rescores
the beams that the engine kept: it must find the same candidates of the same ranks, up to the engine's rounding, and every kept candidate
must be at least as good as the best dropped one, less that rounding.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from numpy.typing import NDArray

from benchmarks.engine_comparison import differences, replayed, wrong_alone, wrong_beams
from benchmarks.random_bundles import make_bundle, random_masks, random_memory, random_queries, random_tree
from espalier.bundle import Bundle
from espalier.engines import open_engine
from espalier.engines.reference import ReferenceEngine, Step
from espalier.errors import InvalidQuery
from espalier.queries import QueryBatch
from espalier.search import Engine, NodeMask, SearchParams, SearchResult

MANY = 128
KINDS = ("history", "product", "vector", "history sequence", "history memory", "product memory", "product sequence memory")
"""Of `make_bundle`, the first word being its kind."""


def shapes_of(*kinds: str) -> st.SearchStrategy[dict[str, Any]]:
    """Bundles of these kinds, and calls."""
    return st.fixed_dictionaries(
        {
            "seed": st.integers(0, 2**32 - 1),
            "branching_height": st.sampled_from([(2, 3), (2, 6), (3, 4), (4, 3), (8, 2), (32, 2), (2, 1)]),
            "ragged": st.booleans(),
            "empty_share": st.sampled_from([0.0, 0.2, 0.9]),
            "kind": st.sampled_from(kinds),
            "dtype": st.sampled_from(["float32", "float16", "int8"]),
            "gamma": st.sampled_from([0.0, 0.5, 1.0]),
            "exclude": st.sampled_from([0, 3, 40]),
            "passing": st.sampled_from([None, 0.0, 0.05, 0.5]),
            "batch": st.integers(1, 4),
        }
    )


shapes = shapes_of(*KINDS)


def draw(
    folder: Path, shape: dict[str, Any], integer: bool, own: Literal["logit", "log_activation"] = "logit"
) -> tuple[Bundle, QueryBatch, SearchParams]:
    rng = np.random.default_rng(shape["seed"])
    branching, height = shape["branching_height"]
    tree = random_tree(rng, height, branching, shape["ragged"], shape["empty_share"])
    kind: Any
    kind, *parts = shape["kind"].split()
    memory = random_memory(rng, tree.item_count, int(rng.integers(1, 6)), integer) if "memory" in parts else None
    bundle = make_bundle(
        folder, rng, tree, kind, shape["gamma"], own, integer, name=f"m{rng.integers(1 << 60)}", dtype=shape["dtype"],
        memory=memory, encoder="sequence" if "sequence" in parts else "levels",
    )  # fmt: skip
    queries = random_queries(rng, bundle, shape["batch"], integer)
    exclude = rng.integers(-1, tree.item_count, (shape["batch"], shape["exclude"])) if shape["exclude"] else None
    masks = None if shape["passing"] is None else random_masks(rng, tree, shape["batch"], shape["passing"])
    params = SearchParams(rng.integers(1, 40, shape["batch"]), rng.integers(1, 50, shape["batch"]), exclude, mask_B=masks)
    return bundle, queries, params


def engines(bundle: Bundle) -> list[Engine]:
    """The engines for graphs that run on any CPU, and the reference's trees in a pipeline."""
    return [open_engine(bundle, engine=name) for name in ("compiled-cpu", "onnx-cpu", "reference")]


def eligible_rows(bundle: Bundle, params: SearchParams, b: int) -> set[int]:
    """The item rows that query b may get."""
    mask = None if params.mask_B is None else params.mask_B[b]
    rows = np.arange(bundle.tree.item_count) if mask is None else np.flatnonzero(mask.eligible_N[bundle.tree.leaf_of_item])
    return set(rows.tolist()) - (set() if params.exclude_BE is None else set(params.exclude_BE[b].tolist()))


@given(shape=shapes)
def test_engines_equal_the_reference_exactly_with_integer_weights(tmp_path_factory: pytest.TempPathFactory, shape: dict[str, Any]) -> None:
    bundle, queries, params = draw(tmp_path_factory.mktemp("models"), shape, integer=True)
    expected = ReferenceEngine(bundle).search(queries, params)
    for engine in engines(bundle):
        assert_same(engine.search(queries, params), expected)


def test_many_exclusions_beside_few_and_none(tmp_path: Path) -> None:
    """With and without masks; scattered and in whole subtrees."""
    rng = np.random.default_rng(11)
    tree = random_tree(rng, 9, 2, ragged=False, empty_share=0.1)
    bundle = make_bundle(tmp_path, rng, tree, "product", 0.5)
    exclude_BE = np.full((8, 2 * MANY), -1)
    for row, count in zip(exclude_BE, (0, 3, MANY, MANY + 1, 2 * MANY, 2 * MANY, MANY + 1, 2 * MANY), strict=True):
        row[:count] = rng.permutation(tree.item_count)[:count]
    together = tree.leaf_item[: 3 * MANY]
    exclude_BE[5] = together[together >= 0][: 2 * MANY]
    masks = (None, None, None, None, None, None, *random_masks(rng, tree, 2, 0.5))
    params = SearchParams(rng.integers(1, 40, 8), rng.integers(1, 500, 8), exclude_BE, mask_B=masks)
    queries = random_queries(rng, bundle, 8)
    expected = ReferenceEngine(bundle).search(queries, params)
    for engine in engines(bundle):
        got = engine.search(queries, params)
        assert_array_equal(got.item_rows_BM, expected.item_rows_BM)
        assert_array_equal(got.count_B, expected.count_B)
        assert_array_equal(got.complete_B, expected.complete_B)


@given(shape=shapes, own=st.sampled_from(["logit", "log_activation"]))
def test_kept_beams_are_the_best_with_real_weights(
    tmp_path_factory: pytest.TempPathFactory, shape: dict[str, Any], own: Literal["logit", "log_activation"]
) -> None:
    bundle, queries, params = draw(tmp_path_factory.mktemp("models"), shape, integer=False, own=own)
    for engine in engines(bundle):
        assert_best_beams(engine, bundle, queries, params)


def assert_same(got: SearchResult, expected: SearchResult) -> None:
    assert differences(got, expected) == []


def assert_wide_beams_bring_enough(engine: Engine, bundle: Bundle, queries: QueryBatch, params: SearchParams) -> None:
    """With beams of at least m, every query gets min(m, eligible) distinct eligible items."""
    params = SearchParams(np.maximum(params.beam_size_B, params.m_B), params.m_B, params.exclude_BE, mask_B=params.mask_B)
    result = engine.search(queries, params)
    for b in range(len(queries)):
        eligible = eligible_rows(bundle, params, b)
        rows = result.item_rows_BM[b][: result.count_B[b]].tolist()
        assert len(rows) == len(set(rows)) == min(params.m_B[b], len(eligible))
        assert set(rows) <= eligible
        assert result.complete_B[b]


def assert_best_beams(engine: Engine, bundle: Bundle, queries: QueryBatch, params: SearchParams) -> None:
    """The engine's beams, traced, are among the best by the reference's scores."""
    assert wrong_beams(engine, bundle, queries, params) == []


def assert_alone_as_together(engine: Engine, queries: QueryBatch, params: SearchParams) -> None:
    """Each query gets the same answer alone as in the batch."""
    assert wrong_alone(engine, queries, params) == []


def replay(
    reference: ReferenceEngine, queries: QueryBatch, params: SearchParams, b: int, kept: dict[int, NDArray[Any]], rounding: float
) -> list[Step]:
    """Every beam that the engine kept is, by the reference's scores, a best one among its candidates. Returns the reference's steps."""
    steps, wrong = replayed(reference, queries, params, b, kept, rounding)
    assert wrong == []
    return steps


@given(shape=shapes)
def test_a_query_gets_the_same_answer_in_any_batch(tmp_path_factory: pytest.TempPathFactory, shape: dict[str, Any]) -> None:
    bundle, queries, params = draw(tmp_path_factory.mktemp("models"), shape, integer=False)
    for engine in engines(bundle):
        assert_alone_as_together(engine, queries, params)


@given(shape=shapes, beam=st.integers(1, 60))
def test_a_beam_of_at_least_m_brings_min_of_m_and_eligible(
    tmp_path_factory: pytest.TempPathFactory, shape: dict[str, Any], beam: int
) -> None:
    bundle, queries, params = draw(tmp_path_factory.mktemp("models"), shape, integer=True)
    batch = len(queries)
    params = replace(params, beam_size_B=np.full(batch, beam), m_B=np.full(batch, max(1, beam // 2)))
    for engine in engines(bundle):
        assert_wide_beams_bring_enough(engine, bundle, queries, params)


def test_a_filter_that_no_item_passes_gives_an_empty_and_complete_answer(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    bundle = make_bundle(tmp_path, rng, random_tree(rng, 5, 2), "product")
    nothing = NodeMask(np.zeros(bundle.tree.node_count, np.bool_), 0)
    for engine in (*engines(bundle), ReferenceEngine(bundle)):
        result = engine.search(random_queries(rng, bundle, 2), SearchParams.uniform(2, 4, 6, mask=nothing))
        assert_array_equal(result.item_rows_BM, np.full((2, 6), -1))
        assert_array_equal(result.scores_BM, np.zeros((2, 6)))
        assert result.complete_B.all()


def test_masks_must_fit_the_batch_and_the_tree(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    bundle = make_bundle(tmp_path, rng, random_tree(rng, 3, 2, ragged=False), "product")
    queries, small = random_queries(rng, bundle, 2), NodeMask(np.ones(3, np.bool_), 1)
    for engine in (*engines(bundle), ReferenceEngine(bundle)):
        with pytest.raises(InvalidQuery, match=r"mask_B: got '1 masks', expected 2, one per query"):
            engine.search(queries, SearchParams(np.array([2, 2]), np.array([2, 2]), mask_B=(None,)))
        with pytest.raises(InvalidQuery, match=r"mask_B: got 'bool\[3\]', expected bool\[15\]"):
            engine.search(queries, SearchParams.uniform(2, 2, 2, mask=small))


def test_a_mask_is_not_kept_alive_by_the_engine(tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    bundle = make_bundle(tmp_path, rng, random_tree(rng, 5, 2))
    engine, mask = open_engine(bundle, "cpu"), NodeMask(np.ones(bundle.tree.node_count, np.bool_), bundle.tree.item_count)
    engine.search(random_queries(rng, bundle, 1), SearchParams.uniform(1, 4, 4, mask=mask))
    alive = weakref.ref(mask)
    del mask
    assert alive() is None


@pytest.mark.parametrize("slope", [np.full((1, 1, 6), 0.5), np.array([0.5, 0.25, -1, 1, 0, 0.5]), np.array([2, 0.25, -1, 1, 0, 0.5])])
def test_prelu_is_rewritten_exactly(tmp_path: Path, slope: NDArray[Any]) -> None:
    rng = np.random.default_rng(5)
    bundle = make_bundle(tmp_path, rng, random_tree(rng, 5, 2), slope=slope.astype(np.float32))
    queries, params = random_queries(rng, bundle, 3), SearchParams.uniform(3, 4, 6)
    expected = ReferenceEngine(bundle).search(queries, params)
    for name in ("onnx-cpu", "compiled-cpu"):
        assert_array_equal(open_engine(bundle, engine=name).search(queries, params).ranks_BM, expected.ranks_BM)
