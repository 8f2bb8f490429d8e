"""`triton` and `sparse-cuda`, in Triton's interpreter: they search as the reference does, and their kernels compile for a GPU.

What only a GPU can show (CUDA graphs, the compiled kernels' answers, times) is for `python -m benchmarks.gpu_all`.
"""

from __future__ import annotations

import importlib
import itertools
import json
import sys
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from benchmarks.engine_comparison import wrong_parents
from benchmarks.random_bundles import (
    make_bundle,
    make_linear_bundle,
    random_masks,
    random_memory,
    random_queries,
    random_tree,
    sparse_rows,
    tree_over,
)
from benchmarks.random_live import random_state
from benchmarks.synthetic import trained_kind
from espalier.bundle import Bundle
from espalier.bundle_writer import write_bundle
from espalier.engines import pipeline
from espalier.engines.forest_mean import most_leaves
from espalier.engines.pipeline import Pipeline
from espalier.engines.reference import ReferenceEngine
from espalier.engines.stages import GivenQueries, TreeQuery
from espalier.errors import DeviceUnavailable, InvalidQuery
from espalier.manifest import LinearScorer, Ranking
from espalier.masks.eligibility import eligible_nodes, unrestricted_mask
from espalier.queries import HistoryKind, QueryBatch, pad_histories
from espalier.search import NodeMask, Precision, SearchParams
from espalier.tree import complete_tree
from tests.espalier.bundle.parts import content_of, draft_of
from tests.espalier.compile_kernels import Recorder, compiled_elsewhere
from tests.espalier.live.test_oracle import Oracle, graphs, linear
from tests.espalier.test_signature import (
    L3_HINGE,
    assert_alone_as_together,
    assert_best_beams,
    assert_same,
    linear_bundle,
    many_exclusions,
)

pytest.importorskip("triton", reason="there are no wheels of it outside Linux")

import triton
import triton.language as tl

from espalier.engines.triton import cells, chunk_tiles, gpu_engine, graph_engine, linear_engine
from espalier.engines.triton.cells import FixedShapes, Tuning
from espalier.engines.triton.chunk_tiles import TileSizes
from espalier.engines.triton.gpu_engine import refuse_what_does_not_fit
from espalier.engines.triton.graph_engine import TritonSearch
from espalier.engines.triton.kernels.scoring import log_sigmoid
from espalier.engines.triton.linear_engine import FEATURES, SparseCudaSearch
from tests.espalier.gpu_families import GRAPHS, LINEAR, Family, each_family

pytestmark = [pytest.mark.release, pytest.mark.usefixtures("stores_inside")]

ONE, BUSY = (FixedShapes(batches=(batch,), m_sizes=(64,)) for batch in (1, 65))


@pytest.fixture(scope="module")
def exact_dot() -> Iterator[None]:
    """The interpreter's products are BLAS's, in which a row's sum depends on where in a tile it stands; on a GPU it does not."""
    interpreter = importlib.import_module("triton.runtime.interpreter")

    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        product = a.data.astype(np.float64) @ b.data.astype(np.float64)
        return interpreter.TensorHandle((product + d.data).astype(d.data.dtype), d.dtype.scalar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
        yield


# -- as the reference -----------------------------------------------------------------------------------------------------


@each_family
@settings(max_examples=8)
@given(data=st.data())
def test_it_equals_the_reference_exactly_with_integer_weights(
    tmp_path_factory: pytest.TempPathFactory, family: Family, data: st.DataObject
) -> None:
    bundle, queries, params = family.draw(tmp_path_factory.mktemp("models"), data.draw(family.drawn), True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk_tiles, "BLOCK", data.draw(st.sampled_from([1, 30, 1 << 24])))
        engine, reference = family.opened(bundle, tuning=data.draw(family.tunings)), ReferenceEngine(bundle)
    expected = reference.search(queries, params)
    assert_same(engine.search(queries, params), expected)
    assert wrong_parents(engine, bundle, queries, params) == []
    if family is GRAPHS:
        assert_same(engine.search(GivenQueries(queries.kind, queries.rows, reference.states(queries)), params), expected)


@pytest.mark.usefixtures("exact_dot")
@each_family
@settings(max_examples=4)
@given(data=st.data())
def test_kept_beams_are_the_best_with_real_weights_and_answers_those_of_any_batch(
    tmp_path_factory: pytest.TempPathFactory, family: Family, data: st.DataObject
) -> None:
    bundle, queries, params = family.draw(tmp_path_factory.mktemp("models"), data.draw(family.drawn), False)
    engine = family.opened(bundle)
    assert_best_beams(engine, bundle, queries, params)
    assert_alone_as_together(engine, queries, params)


@each_family
def test_more_queries_and_exclusions_than_a_cell_has_room_for(tmp_path: Path, family: Family) -> None:
    rng = np.random.default_rng(11)
    tree = random_tree(rng, 3, 5, empty_share=0.1)
    bundle, params = family.make(tmp_path, rng, tree), many_exclusions(rng, tree, 16)
    queries = random_queries(rng, bundle, 8)
    assert_same(family.opened(bundle).search(queries, params), ReferenceEngine(bundle).search(queries, params))


@pytest.mark.parametrize(
    "tuning",
    [Tuning(tile=16), Tuning(tile=16, chosen_candidates=0), Tuning(tile=16, counted_pairs=0), Tuning(tile=16, level_kernel_queries=0)],
    ids=["chosen", "counted", "selected", "programs"],
)
def test_every_way_of_selecting_keeps_as_many_as_each_query_wants_and_the_lower_nodes_of_equals(tmp_path: Path, tuning: Tuning) -> None:
    """Beams of one cell, on levels that its kernels choose, count or select; scores of few values, so that there are ties."""
    rng = np.random.default_rng(7)
    for place, memory in enumerate((None, random_memory(rng, 64, 3, True))):
        bundle = make_bundle(
            tmp_path, rng, complete_tree(rng.permutation(64), 2), "product", name=f"ties-{place}", gamma=0.5, memory=memory
        )
        queries, params = random_queries(rng, bundle, 4), SearchParams(np.array([4, 5, 6, 7]), np.array([3, 9, 14, 1]))
        engine = GRAPHS.opened(bundle, tuning=tuning)
        assert_same(engine.search(queries, params), ReferenceEngine(bundle).search(queries, params))


def test_queries_that_bring_states_stand_beside_those_that_do_not(tmp_path: Path) -> None:
    """In one call, under beams of several buckets; rows of states that are not meant are not looked at."""
    rng = np.random.default_rng(3)
    bundle = make_bundle(tmp_path, rng, random_tree(rng, 4, 3), gamma=0.5)
    queries, params = random_queries(rng, bundle, 6), SearchParams(np.array([2, 2, 3, 9, 9, 9]), np.array([4, 1, 6, 6, 9, 2]))
    eligible = eligible_nodes(bundle.tree, params, unrestricted_mask(bundle.tree))
    query = TreeQuery(queries, None, params.beam_size_B, params.m_B, (eligible,), frontier=True)
    encoded_B, states_BLS = np.array([True, False, True, False, True, False]), ReferenceEngine(bundle).states(queries)
    states_BLS[~encoded_B] = np.nan
    search = GRAPHS.searching(bundle)
    alone, beside = search.search(query), search.search(replace(query, states_BLS=states_BLS, encoded_B=encoded_B))
    for name in ("rows_BTM", "ranks_BTM", "keys_BTM", "count_BT", "finite_B", "leaf_states_BS"):
        assert_array_equal(getattr(beside, name), getattr(alone, name))
    assert_array_equal(beside.frontiers[0].nodes_BK, alone.frontiers[0].nodes_BK)
    assert alone.rows_BTM.shape == (6, 1, 9)
    assert_array_equal(alone.count_BT[:, 0], params.m_B)


def test_memory_lists_of_any_length_go_to_the_device_and_rows_past_a_call_have_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first call needs more room than there is; a later one leaves a row of its cell empty, whose old addresses are gone."""
    monkeypatch.setattr(gpu_engine, "LIST_ROOM", 2)
    rng = np.random.default_rng(7)
    tree = complete_tree(rng.permutation(64), 2)
    memory = random_memory(rng, tree.item_count, 5)
    bundle = make_bundle(tmp_path, rng, tree, memory=replace(memory, weight=memory.weight + 1))
    search, queries = GRAPHS.searching(bundle), pad_histories(HistoryKind(length=5), [np.arange(5), np.arange(20, 25)])
    engine = Pipeline(bundle, search)
    for batch in (queries, queries.take(np.array([1])), queries):
        params = SearchParams.uniform(len(batch), 4, 8)
        assert_same(engine.search(batch, params), ReferenceEngine(bundle).search(batch, params))
        listed_B3 = search.cell(2, 2, 8).inputs["memory"].numpy()
        assert (listed_B3[: len(batch), 2] > 1).all()
        assert not listed_B3[len(batch) :].any()


def test_queries_may_have_any_number_of_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None, one, some blocks and more than the buffer has room for, in any order of calls, each as if alone."""
    monkeypatch.setattr(gpu_engine, "LIST_ROOM", 64)
    rng = np.random.default_rng(5)
    bundle = make_linear_bundle(tmp_path, rng, random_tree(rng, 2, 5), L3_HINGE, False, width=400)
    engine, params = LINEAR.opened(bundle), SearchParams.uniform(4, 2, 5)
    dense = rng.normal(size=(4, 400)) / 10
    for share, count in ((0.01, 2), (0.3, 4), (0.9, 2), (0.02, 3)):
        dense_BF = np.where(rng.random((count, 400)) < share, dense[:count], 0)
        dense_BF[0] = 0
        queries, mine = QueryBatch(bundle.manifest.query, sparse_rows(dense_BF)), params.take(np.arange(count))
        assert len(queries.features.indices) > 4 * FEATURES or share < 0.9
        got, expected = engine.search(queries, mine), ReferenceEngine(bundle).search(queries, mine)
        assert_allclose(got.ranks_BM, expected.ranks_BM, rtol=0, atol=engine.rounding)
        assert_array_equal(got.item_rows_BM, expected.item_rows_BM)
        assert_alone_as_together(engine, queries, mine)


def test_a_score_does_not_depend_on_what_else_is_in_the_call(tmp_path: Path) -> None:
    """A query of one block of features beside one of many, and under beams that score the level above whole or not."""
    rng = np.random.default_rng(6)
    bundle = make_linear_bundle(tmp_path, rng, random_tree(rng, 2, 4, ragged=False), L3_HINGE, False, width=5 * FEATURES)
    queries = QueryBatch(bundle.manifest.query, sparse_rows(rng.normal(size=(2, 5 * FEATURES)) * (np.arange(5 * FEATURES) < [[50], [300]])))
    engine = LINEAR.opened(bundle)
    all_ranks = [engine.search(queries, SearchParams.uniform(2, beam, 16)).ranks_BM for beam in (8, 4, 5)]
    assert_array_equal(all_ranks[0], all_ranks[1])
    assert_array_equal(all_ranks[0], all_ranks[2])
    assert_alone_as_together(engine, queries, SearchParams.uniform(2, 2, 16))


@pytest.mark.parametrize(
    ("kind", "hidden"),
    [("product", (32,)), ("product", ()), ("mlp", (128, 64, 24)), ("mlp", (20,)), ("mlp", (18, 17, 20, 5)), ("sequence", ())],
)
def test_the_scorers_that_training_exports(tmp_path: Path, kind: str, hidden: tuple[int, ...]) -> None:
    rng = np.random.default_rng(5)
    bundle = trained_kind(tmp_path, kind, hidden, rng)
    queries, params = random_queries(rng, bundle, 3), SearchParams(np.array([1, 4, 9]), np.array([3, 20, 7]))
    engine = GRAPHS.opened(bundle)
    got, expected = engine.search(queries, params), ReferenceEngine(bundle).search(queries, params)
    assert_allclose(got.ranks_BM, expected.ranks_BM, rtol=0, atol=engine.rounding)
    assert_array_equal(got.item_rows_BM, expected.item_rows_BM)


# The interpreter cannot multiply matrices of bfloat16.
@pytest.mark.parametrize(
    ("kind", "precision"),
    [("product", "float16"), ("product", "bfloat16"), ("mlp", "float16"), ("linear", "float16"), ("linear", "bfloat16")],
)
def test_lower_precision_stays_within_its_rounding(tmp_path: Path, kind: str, precision: Precision) -> None:
    rng, family = np.random.default_rng(5), LINEAR if kind == "linear" else GRAPHS
    if family is LINEAR:
        bundle = make_linear_bundle(tmp_path, rng, random_tree(rng, 2, 6), L3_HINGE, False)
    else:
        bundle = trained_kind(tmp_path, kind, (32,), rng)
    queries, params = random_queries(rng, bundle, 4, family is GRAPHS), SearchParams.uniform(4, 36, 36)  # nothing is dropped
    engine = family.opened(bundle, precision)
    exact, got = ReferenceEngine(bundle).search(queries, params), engine.search(queries, params)
    by_item = [np.take_along_axis(result.ranks_BM, np.argsort(result.item_rows_BM, 1), 1) for result in (exact, got)]
    found = np.isfinite(by_item[0])
    assert_array_equal(found, np.isfinite(by_item[1]))
    assert_array_equal(np.sort(exact.item_rows_BM, 1), np.sort(got.item_rows_BM, 1))
    assert 0 < np.abs(by_item[0][found] - by_item[1][found]).max() < engine.rounding


# -- cells ----------------------------------------------------------------------------------------------------------------


@each_family
def test_warm_up_builds_every_cell_that_a_query_may_need_and_no_mask_is_kept_alive(tmp_path: Path, family: Family) -> None:
    rng = np.random.default_rng(7)
    bundle = family.make(tmp_path, rng, random_tree(rng, 3, 2), max_beam_size=10, max_m=12)
    search = family.searching(bundle)
    engine = Pipeline(bundle, search)
    engine.warm_up()
    warm = len(search.cells)
    for exclude_BE in (None, rng.integers(0, bundle.tree.item_count, (3, 3))):
        params = SearchParams(rng.integers(1, 11, 3), rng.integers(1, 13, 3), exclude_BE, mask_B=random_masks(rng, bundle.tree, 3, 0.5))
        engine.search(random_queries(rng, bundle, 3), params)
    mask = NodeMask(np.ones(bundle.tree.node_count, np.bool_), bundle.tree.item_count)
    engine.search(random_queries(rng, bundle, 1), SearchParams.uniform(1, 4, 4, mask=mask))
    assert len(search.cells) == warm > 0
    alive = weakref.ref(mask)
    del mask
    assert alive() is None
    engine.close()
    engine.close()
    assert len(search.cells) == 0


def test_warming_up_a_forest_builds_the_cells_of_its_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every batch for small beams; for large ones the smallest alone, since calls are cut to at most BLOCK scored leaves."""
    rng = np.random.default_rng(5)
    first = random_tree(rng, 3, 4)
    others = [tree_over(rng, first.item_count, 3)]
    bundle = make_linear_bundle(tmp_path, rng, first, L3_HINGE, others=others, max_beam_size=16, beam_size=4)
    block = 2 * most_leaves([alone.tree for alone in bundle.alone], 2)  # two queries of a beam of 2 take a cell of three
    monkeypatch.setattr(gpu_engine, "BLOCK", block)
    monkeypatch.setattr(pipeline, "BLOCK", block)
    search = LINEAR.searching(bundle)
    engine = Pipeline(bundle, search)
    engine.warm_up()
    built = len(search.cells)
    assert built == 2 * (5 + 2 + 1)  # in each tree: beams of 1, 2, 4, 8, 16; batches of 3 for the first two; the usual beam with live items
    queries = random_queries(rng, bundle, 7)
    for beam_size in (1, 2, 3, 16):
        engine.search(queries, SearchParams.uniform(7, beam_size, 5))
    assert len(search.cells) == built


def test_more_results_than_the_grid_has(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    bundle = make_bundle(tmp_path, rng, complete_tree(rng.permutation(128), 2), max_m=100, max_beam_size=3)
    search = GRAPHS.searching(bundle)
    engine = Pipeline(bundle, search)
    queries = random_queries(rng, bundle, 1)
    for m in (65, 90, 100):
        expected = ReferenceEngine(bundle).search(queries, SearchParams.uniform(1, 3, m))
        assert_array_equal(engine.search(queries, SearchParams.uniform(1, 3, m)).item_rows_BM, expected.item_rows_BM)
    assert len(search.cells) == 1


def test_a_bundle_that_does_not_fit_is_refused_with_figures(tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    bundle = make_bundle(tmp_path, rng, complete_tree(rng.permutation(64), 2), width=16)  # 127 nodes
    needed = graph_engine.device_bytes(bundle, "float16")
    assert needed == 127 * 16 * 2 + 4 * (64 + 64) < graph_engine.device_bytes(bundle, "float32")
    refuse_what_does_not_fit(bundle, needed, "its rows", needed, 10**9)
    with pytest.raises(
        DeviceUnavailable, match=r"tiny version 1 needs 0\.00 GB on the GPU, for its rows and the tree; 0\.00 of its 1\.00 GB"
    ):
        refuse_what_does_not_fit(bundle, needed, "its rows", needed - 1, 10**9)
    linear = linear_bundle(tmp_path, rng, random_tree(rng, 2, 6))
    tiles = TileSizes.of(linear.tree, linear.chunks)
    wide, narrow = (linear_engine.device_bytes(linear, tiles, precision) for precision in ("float32", "float16"))
    assert wide - narrow == 2 * len(linear.chunks.entry_weight)
    search = LINEAR.searching(linear)
    held = [tensor for part in (search.tiles[0], search.contexts[0].tables) for tensor in vars(part).values()]
    on_device = sum(tensor.nbytes for tensor in held if hasattr(tensor, "nbytes"))
    assert abs(on_device - wide) < 100  # small change


def test_a_size_that_would_change_answers_is_refused() -> None:
    with pytest.raises(ValueError, match="register_candidates 65536: expected 1 to 32768"):
        Tuning(register_candidates=1 << 16)


# -- numbers at their ends --------------------------------------------------------------------------------------------------


@each_family
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning", "ignore:invalid value encountered:RuntimeWarning")
def test_what_is_no_number_is_no_result(tmp_path: Path, family: Family) -> None:
    """A rank that overflowed has no place in any order; without care it would bring a former query's items back."""
    rng, tree = np.random.default_rng(5), complete_tree(np.arange(36), 6)
    if family is LINEAR:
        bundle = make_linear_bundle(tmp_path, rng, tree, Ranking(own="logit", gamma=1))
        rows: Any = sparse_rows(np.where(np.arange(20) % 2, 3e38, -3e38)[None])
    else:
        bundle = make_bundle(tmp_path, rng, tree, "vector", integer=False)
        rows = np.array([[3e38, -3e38, 3e38, -3e38]], np.float32)
    engine, params = family.opened(bundle), SearchParams.uniform(1, 36, 36)
    assert engine.search(random_queries(rng, bundle, 1), params).count_B[0] == 36
    huge = QueryBatch(bundle.manifest.query, rows)
    with np.errstate(over="ignore", invalid="ignore"):  # the interpreter computes in NumPy
        result, fresh = engine.search(huge, params), family.opened(bundle).search(huge, params)
    assert result.count_B[0] < 36
    assert np.isfinite(result.ranks_BM[0, : result.count_B[0]]).all()
    assert not np.isnan(result.ranks_BM).any()
    assert_array_equal(result.item_rows_BM, fresh.item_rows_BM)


def test_features_must_be_the_models(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    bundle = linear_bundle(tmp_path, rng, random_tree(rng, 2, 4))
    engine, rows = LINEAR.opened(bundle), sparse_rows(np.eye(1, 20))
    for wrong in (-1, 20):
        rows.indices[:] = wrong
        with pytest.raises(InvalidQuery, match=rf"features.indices: got {wrong}, expected feature numbers from 0 to 19"):
            engine.search(QueryBatch(bundle.manifest.query, rows), SearchParams.uniform(1, 1, 1))


@triton.jit  # type: ignore[untyped-decorator]
def log_sigmoid_kernel(x_N: Any, out_N: Any, count: Any, TILE: tl.constexpr) -> None:
    n = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tl.store(out_N + n, log_sigmoid(tl.load(x_N + n, mask=n < count, other=0.0)), mask=n < count)


def test_the_log_of_the_sigmoid_is_exact_far_from_0() -> None:
    """log(1 + e^−x) is 0 from 16.7 on in float32, where log1p goes on falling; compared with float64, in shares of the result."""
    x_N = torch.linspace(-120, 86, 9001)
    out_N = torch.empty_like(x_N)
    log_sigmoid_kernel[(triton.cdiv(len(x_N), 256),)](x_N, out_N, len(x_N), 256)
    exact = -np.logaddexp(0, -x_N.numpy().astype(np.float64))
    assert_allclose(out_N.numpy(), exact, rtol=5e-7, atol=0)
    assert len(np.unique(out_N.numpy()[x_N.numpy() > 17])) > 2000, "nodes of large logits keep their order"


@pytest.mark.parametrize("large", [20.0, 60.0])
def test_large_logits_keep_their_order_in_path_products(tmp_path: Path, large: float) -> None:
    """Logits of 17 and more have sigmoids that are 1 in float32, but logs of them that differ."""
    tree = complete_tree(np.arange(4), 2)
    bundle = make_bundle(tmp_path, np.random.default_rng(5), tree, "vector", 1.0, "log_activation", width=1)
    rows_ND = np.array([[0], [1], [1], [0.95], [1], [0.9], [0.99]], np.float32)
    bundle = write_bundle(tmp_path / "tiny" / "2", draft_of(bundle), content_of(bundle, stored_rows=rows_ND))
    queries, params = QueryBatch(bundle.manifest.query, np.array([[large]], np.float32)), SearchParams.uniform(1, 4, 4)
    for engine in (GRAPHS.opened(bundle), ReferenceEngine(bundle)):
        assert engine.search(queries, params).item_rows_BM.tolist() == [[1, 3, 0, 2]]


# -- live items ---------------------------------------------------------------------------------------------------------------


@settings(max_examples=18)
@given(shape=st.one_of(graphs, linear))
def test_live_items_are_found_as_if_folded(tmp_path_factory: pytest.TempPathFactory, shape: dict[str, Any]) -> None:
    """As on a CPU, see live/test_oracle.py."""
    oracle = Oracle(tmp_path_factory.mktemp("models"), shape)
    queries, (params, folded) = oracle.queries(), oracle.params(shape["passing"], shape["excluded"])
    searched = (LINEAR if isinstance(oracle.bundle.manifest.scorer, LinearScorer) else GRAPHS).opened(oracle.bundle)
    searched.set_overlay(oracle.overlay)
    oracle.assert_same(oracle.of_fold(searched.search(queries, params)), oracle.expected(queries, folded), searched.name)


def test_usual_searches_with_live_items_find_their_cells_built(tmp_path: Path) -> None:
    """By warm-up, for calls of every size: a capture takes a tenth of a second on a GPU, for which requests would wait."""
    rng = np.random.default_rng(3)
    bundle = make_bundle(tmp_path, rng, random_tree(rng, 3, 3), "product")
    trees, usual = GRAPHS.searching(bundle), bundle.manifest.search
    searched = Pipeline(bundle, trees)
    searched.warm_up()
    searched.set_overlay(random_state(rng, bundle).overlay())
    built = len(trees.cells)
    for batch in GRAPHS.cells.batches:
        for row in (0, bundle.manifest.tree.items):  # trained and live
            queries = random_queries(rng, bundle, batch)
            queries.array[:, -1] = row
            searched.search(queries, SearchParams.uniform(batch, usual.beam_size, usual.m))
    assert len(trees.cells) == built


# -- the compiler ---------------------------------------------------------------------------------------------------------


def test_the_kernels_compile_for_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel, as a search launches it, with each form of scorer, precision and width of tiles, for a Hopper GPU; none spills
    more than a few registers.
    """
    launches: list[dict[str, Any]] = []
    for module, names in (
        (graph_engine, ("history_nodes_kernel", "rank_level_kernel", "score_children_kernel", "score_levels_kernel", "search_kernel")),
        (cells, ("count_kernel", "select_kernel")),
        (linear_engine, ("score_chunks_kernel", "score_level_kernel")),
        (sys.modules["espalier.engines.triton.kernels.matmul"], ("matmul_kernel",)),
    ):
        for name in names:
            monkeypatch.setattr(module, name, Recorder(getattr(module, name), launches))
    rng = np.random.default_rng(5)

    def searched(
        bundle: Bundle,
        engine: Any,
        precision: Precision = "float32",
        beam: int = 5,
        tuning: Tuning | None = None,
        shapes: FixedShapes = ONE,
    ) -> None:
        opened = Pipeline(bundle, engine(bundle, "cpu", precision, shapes, tuning))
        opened.search(random_queries(rng, bundle, 1), SearchParams.uniform(1, beam, 9))

    precisions: tuple[Precision, ...] = ("float32", "float16")
    for place, (kind, hidden) in enumerate([("product", (32,)), ("mlp", (128, 64, 24))]):
        bundle = trained_kind(tmp_path, kind, hidden, rng, name=f"m{place}")
        memory = random_memory(rng, bundle.tree.item_count, 3, False)
        remembering = write_bundle(bundle.path.with_name("2"), draft_of(bundle), content_of(bundle, memory=memory))
        for each, precision, counted in itertools.product((bundle, remembering), precisions, (0, 1 << 24)):
            searched(each, TritonSearch, precision, tuning=Tuning(counted_pairs=counted))
        for each, precision in itertools.product((bundle, remembering), precisions):
            searched(each, TritonSearch, precision, tuning=Tuning(level_kernel_queries=0))
    for place, hidden in enumerate([(128, 64, 24), (200,), (128, 128)]):
        searched(trained_kind(tmp_path, "mlp", hidden, rng, name=f"busy-{place}"), TritonSearch, "float16", shapes=BUSY)
    searched(make_bundle(tmp_path, rng, random_tree(rng, 4, 3, empty_share=0.2), own="log_activation", gamma=1.0), TritonSearch)
    wide = make_bundle(tmp_path, rng, complete_tree(rng.permutation(32), 32), name="wide")
    searched(wide, TritonSearch, tuning=Tuning(register_candidates=16, busy_tiles=1, counted_pairs=0))
    launches += [json.loads(json.dumps(launch).replace('"*fp16"', '"*bf16"')) for launch in launches]
    launches[:] = [json.loads(json.dumps(launch).replace('"DEPENDENT": false', '"DEPENDENT": true')) for launch in launches]
    # One launch of each kernel with each type of arguments and scorer: the others differ in sizes.
    distinct = {}
    for launch in launches:
        options = ("S0", "UNIFORM", "GATHERED", "LOG_ACTIVATION", "WHOLE", "ITEMS", "BEFORE", "MEMORY", "TILE")
        form = {name: value for name, value in launch["constants"].items() if name in options}
        distinct[launch["kernel"], str(form), str(launch["types"])] = launch
    assert {kernel for kernel, _, _ in distinct} >= {
        "select_kernel",
        "matmul_kernel",
        "rank_level_kernel",
        "history_nodes_kernel",
        "search_kernel",
    }
    with_memory, without = ({kernel for kernel, form, _ in distinct if f"'MEMORY': {has}" in form} for has in (True, False))
    assert {launch["constants"]["TILE"] for launch in distinct.values() if launch["constants"].get("S0") == 256} == {64}
    assert {launch["constants"]["TILE"] for launch in distinct.values() if launch["constants"].get("S0") == 128} >= {16, 64}
    assert with_memory & without == {"score_children_kernel", "select_kernel", "count_kernel", "search_kernel"}
    linear_cases: list[tuple[int, bool, Ranking, Precision, int]] = [
        (2, True, Ranking(own="log_activation", gamma=1), "float32", 2),
        (40, True, L3_HINGE, "float32", 40),
        (32, False, L3_HINGE, "float16", 40),
        (32, False, Ranking(own="logit", gamma=0), "bfloat16", 3),
    ]
    launches.clear()
    for place, (branching, ragged, ranking, linear_precision, beam) in enumerate(linear_cases):
        linear = make_linear_bundle(tmp_path, rng, random_tree(rng, 2, branching, ragged), ranking, False, f"linear-{place}")
        searched(linear, SparseCudaSearch, linear_precision, beam)
    of_linear = [launch for launch in launches if launch["kernel"] in ("score_chunks_kernel", "score_level_kernel")]
    assert {launch["kernel"] for launch in of_linear} == {"score_chunks_kernel", "score_level_kernel"}
    assert {launch["types"]["weights_W"] for launch in of_linear} == {"*fp32", "*fp16", "*bf16"}
    for entry in compiled_elsewhere([*distinct.values(), *of_linear], tmp_path):
        most = {"score_chunks_kernel": 0, "score_level_kernel": 0, "search_kernel": 96}
        assert entry["stack_bytes"] <= most.get(entry["kernel"], 64), entry
