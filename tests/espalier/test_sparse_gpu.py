"""`sparse-cuda`, in Triton's interpreter: it searches bundles of linear scorers as the reference does, and compiles for a GPU.

What only a GPU can show is for `python -m benchmarks.gpu_all`.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from benchmarks.gpu.beams import wrong_parents
from benchmarks.random_bundles import (
    make_linear_bundle,
    random_chunks,
    random_masks,
    random_queries,
    random_tree,
    sparse_rows,
    tree_over,
)
from espalier.bundle import Bundle
from espalier.checks.golden import verify_golden
from espalier.engines import open_engine, pipeline
from espalier.engines.forest_mean import most_leaves
from espalier.engines.pipeline import Pipeline
from espalier.engines.reference import ReferenceEngine
from espalier.engines.triton import chunk_tiles, device_lists
from espalier.engines.triton import linear_engine as sparse_gpu
from espalier.engines.triton.chunk_tiles import TILE, TileSizes, bucket_of, laid_out
from espalier.errors import DeviceUnavailable, InvalidQuery
from espalier.manifest import Ranking
from espalier.queries import FeaturesKind, QueryBatch, blank_queries
from espalier.search import Precision, SearchParams
from espalier.tree import tree_from_children
from tests.espalier.compile_kernels import Recorder, compiled_elsewhere
from tests.espalier.linear_shapes import draw_linear, linear_shapes
from tests.espalier.test_signature import assert_alone_as_together, assert_best_beams, assert_same
from tests.espalier.test_stacking import with_stacking
from tests.espalier.test_tail import with_tail
from training.golden import golden_answers
from training.linear.prepare import written_features

if importlib.util.find_spec("triton") is None:  # there are no wheels of it outside Linux
    pytest.skip("triton is not installed", allow_module_level=True)

from espalier.engines.triton import gpu_engine
from espalier.engines.triton.cells import FixedShapes, Tuning
from espalier.engines.triton.gpu_engine import refuse_what_does_not_fit
from espalier.engines.triton.linear_engine import FEATURES, SparseCudaSearch, device_bytes

pytestmark = pytest.mark.slow

SHAPES, ONE = FixedShapes(batches=(1, 3), m_sizes=(8, 64), excluded=16), FixedShapes(batches=(1,), m_sizes=(64,))
L3_HINGE = Ranking(activation="l3-hinge", own="log_activation", gamma=1)

shapes = linear_shapes(
    branching_height=st.sampled_from([(2, 3), (3, 3), (8, 2), (40, 2), (70, 1), (2, 1)]),
    trees=st.sampled_from([1, 1, 2, 3]),
    width=st.sampled_from([1, 20, 90]),
    batch=st.integers(1, 3),
)
SMALL = {"most_beam": 13, "most_m": 30}


def search_of(bundle: Bundle, precision: Precision = "float32", shapes: FixedShapes = SHAPES, **tuning: int) -> SparseCudaSearch:
    return SparseCudaSearch(bundle, "cpu", precision, shapes, Tuning(**tuning))


def engine_of(bundle: Bundle, precision: Precision = "float32", shapes: FixedShapes = SHAPES, **tuning: int) -> Pipeline:
    return Pipeline(bundle, search_of(bundle, precision, shapes, **tuning))


@settings(max_examples=20)
@given(shape=shapes, whole=st.sampled_from([64, 4096]))
def test_it_equals_the_reference_exactly_with_integer_weights(
    tmp_path_factory: pytest.TempPathFactory, shape: dict[str, Any], whole: int
) -> None:
    bundle, queries, params = draw_linear(tmp_path_factory.mktemp("models"), shape, True, **SMALL)
    engine = engine_of(bundle, whole=whole)
    assert_same(engine.search(queries, params), ReferenceEngine(bundle).search(queries, params))
    assert wrong_parents(engine, bundle, queries, params) == []


@settings(max_examples=8)
@given(shape=shapes)
def test_kept_beams_are_the_best_with_real_weights(tmp_path_factory: pytest.TempPathFactory, shape: dict[str, Any]) -> None:
    bundle, queries, params = draw_linear(tmp_path_factory.mktemp("models"), shape, False, **SMALL)
    engine = engine_of(bundle)
    assert_best_beams(engine, bundle, queries, params)
    assert_alone_as_together(engine, queries, params)


def test_queries_may_have_any_number_of_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None, one, some blocks and more than the buffer has room for, in any order of calls, each as if alone."""
    monkeypatch.setattr(device_lists, "ROOM", 64)
    rng = np.random.default_rng(5)
    bundle = make_linear_bundle(tmp_path, rng, random_tree(rng, 2, 5), L3_HINGE, False, width=400)
    engine, params = engine_of(bundle), SearchParams.uniform(4, 2, 5)
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
    engine = engine_of(bundle)
    all_ranks = [engine.search(queries, SearchParams.uniform(2, beam, 16)).ranks_BM for beam in (8, 4, 5)]
    assert_array_equal(all_ranks[0], all_ranks[1])
    assert_array_equal(all_ranks[0], all_ranks[2])
    assert_alone_as_together(engine, queries, SearchParams.uniform(2, 2, 16))


def test_many_queries_with_many_exclusions_and_masks(tmp_path: Path) -> None:
    rng = np.random.default_rng(11)
    tree = random_tree(rng, 3, 5, empty_share=0.1)
    bundle = make_linear_bundle(tmp_path, rng, tree, L3_HINGE)
    exclude_BE = np.full((7, 40), -1)
    for row, count in zip(exclude_BE, (0, 3, 16, 17, 40, 40, 5), strict=True):
        row[: min(count, tree.item_count)] = rng.permutation(tree.item_count)[:count]
    held = tree.leaf_item[:60]
    exclude_BE[4] = np.resize(held[held >= 0], 40)
    masks = (None, None, None, None, *random_masks(rng, tree, 3, 0.5))
    params = SearchParams(rng.integers(1, 9, 7), rng.integers(1, 60, 7), exclude_BE, mask_B=masks)
    queries = random_queries(rng, bundle, 7)
    assert_same(engine_of(bundle).search(queries, params), ReferenceEngine(bundle).search(queries, params))


def test_traces_are_those_of_the_cpu_from_the_start_level_on(tmp_path: Path) -> None:
    rng = np.random.default_rng(12)
    bundle = make_linear_bundle(tmp_path, rng, random_tree(rng, 4, 3), L3_HINGE)
    queries, params = random_queries(rng, bundle, 1), replace(SearchParams.uniform(1, 4, 9), trace=True)
    mine, other = engine_of(bundle).search(queries, params).trace, open_engine(bundle, "cpu").search(queries, params).trace
    assert mine is not None
    assert other is not None
    assert [level.level for level in mine] == list(range(bundle.tree.start_level(4), 5))
    for level, theirs in zip(mine, other, strict=True):
        for nodes, ranks in (("candidates_BC", "candidate_ranks_BC"), ("nodes_BK", "ranks_BK")):
            real = [getattr(entry, nodes)[0] >= 0 for entry in (level, theirs)]
            assert_array_equal(getattr(level, nodes)[0][real[0]], getattr(theirs, nodes)[0][real[1]])
            assert_array_equal(getattr(level, ranks)[0][real[0]], getattr(theirs, ranks)[0][real[1]])


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_lower_precision_stays_within_its_rounding(tmp_path: Path, precision: Precision) -> None:
    rng = np.random.default_rng(5)
    bundle = make_linear_bundle(tmp_path, rng, random_tree(rng, 2, 6), L3_HINGE, False)
    queries = random_queries(rng, bundle, 3, False)
    params = SearchParams.uniform(3, 36, 36)  # nothing is dropped
    engine, reference = engine_of(bundle, precision), ReferenceEngine(bundle)
    exact, got = reference.search(queries, params), engine.search(queries, params)
    by_item = [np.take_along_axis(result.ranks_BM, np.argsort(result.item_rows_BM, 1), 1) for result in (exact, got)]
    found = np.isfinite(by_item[0])
    assert 0 < np.abs(by_item[0][found] - by_item[1][found]).max() < engine.rounding


def test_golden_queries_are_answered(tmp_path: Path) -> None:
    rng = np.random.default_rng(8)
    bundle = make_linear_bundle(tmp_path, rng, random_tree(rng, 2, 6), L3_HINGE, False)
    queries = random_queries(rng, bundle, 12, False)
    golden = golden_answers(bundle, queries, written_features(queries.features), SearchParams.uniform(12, 3, 5))
    assert verify_golden(bundle, engine_of(bundle), golden) == 1


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning", "ignore:invalid value encountered:RuntimeWarning")
def test_what_is_no_number_is_no_result(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    bundle = make_linear_bundle(tmp_path, rng, random_tree(rng, 2, 6, ragged=False), Ranking(own="logit", gamma=1))
    engine, params = engine_of(bundle), SearchParams.uniform(1, 36, 36)
    assert engine.search(random_queries(rng, bundle, 1), params).count_B[0] == 36
    huge = QueryBatch(bundle.manifest.query, sparse_rows(np.where(np.arange(20) % 2, 3e38, -3e38)[None]))
    with np.errstate(over="ignore", invalid="ignore"):  # the interpreter computes in NumPy
        result, fresh = engine.search(huge, params), engine_of(bundle).search(huge, params)
    assert result.count_B[0] < 36
    assert np.isfinite(result.ranks_BM[0, : result.count_B[0]]).all()
    assert_array_equal(result.item_rows_BM, fresh.item_rows_BM)


def test_queries_must_be_the_bundles(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    bundle = make_linear_bundle(tmp_path, rng, random_tree(rng, 2, 4), L3_HINGE)
    engine, one = engine_of(bundle), SearchParams.uniform(1, 1, 1)
    with pytest.raises(InvalidQuery, match=r"queries: got .*width=21.*expected .*width=20"):
        engine.search(blank_queries(FeaturesKind(width=21), 1), one)
    for wrong in (-1, 20):
        rows = sparse_rows(np.eye(1, 20))
        rows.indices[:] = wrong
        with pytest.raises(InvalidQuery, match=rf"features.indices: got {wrong}, expected feature numbers from 0 to 19"):
            engine.search(QueryBatch(bundle.manifest.query, rows), one)


def test_warm_up_builds_every_cell_that_a_query_may_need(tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    bundle = make_linear_bundle(tmp_path, rng, random_tree(rng, 2, 4), L3_HINGE, max_beam_size=10, max_m=12)
    search = search_of(bundle)
    engine = Pipeline(bundle, search)
    engine.warm_up()
    warm = search.cell_count
    for exclude_BE in (None, rng.integers(0, bundle.tree.item_count, (3, 3))):
        params = SearchParams(rng.integers(1, 11, 3), rng.integers(1, 13, 3), exclude_BE, mask_B=random_masks(rng, bundle.tree, 3, 0.5))
        engine.search(random_queries(rng, bundle, 3), params)
    assert search.cell_count == warm > 0
    engine.close()
    engine.close()
    assert search.cell_count == 0


# -- tables ---------------------------------------------------------------------------------------------------------------


@given(
    seed=st.integers(0, 2**32 - 1),
    branching_height=st.sampled_from([(2, 4), (32, 1), (33, 2), (100, 1)]),
    block=st.sampled_from([1, 30, 1 << 24]),
)
def test_every_weight_is_found_in_its_tile_and_none_besides(seed: int, branching_height: tuple[int, int], block: int) -> None:
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, branching_height[1], branching_height[0])
    chunks = random_chunks(rng, tree, 50)
    sizes = TileSizes.of(tree, chunks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk_tiles, "BLOCK", block)
        blocks = list(laid_out(tree, chunks, sizes))
    assert [n for tiles, _ in blocks for n in tiles] == list(range(len(sizes.row_from) - 1))
    first_key, keys, places, weights, tiles = (
        np.concatenate([getattr(part, name) for _, part in blocks])
        for name in ("first_key_U", "keys_R", "places_R2", "weights_W", "tiles_T4")
    )
    assert sizes.nbytes(4) == sum(part.nbytes for part in (first_key, keys, places, weights, tiles))
    found = []
    for h in range(tree.height):
        for p in tree.level(h):
            for j in range(sizes.per_node[h]):
                unit, row, weight, size = tiles[sizes.first_tile[h] + (p - tree.level(h).start) * sizes.per_node[h] + j].tolist()
                buckets, longest = size % 2**32, size >> 32
                for bucket in range(buckets):
                    mine = range(row + first_key[unit + bucket], row + first_key[unit + bucket + 1])
                    assert len(mine) <= longest
                    for at in mine:
                        assert bucket_of(int(keys[at]), buckets) == bucket
                        bits = int(places[at, 0]) % 2**32
                        children = [c for c in range(TILE) if bits >> c & 1]
                        begin = weight + places[at, 1]
                        found += [(p, int(keys[at]), TILE * j + c, w) for c, w in zip(children, weights[begin:].tolist(), strict=False)]
    row_of_entry = np.repeat(np.arange(len(chunks.row_feature)), np.diff(chunks.row_entry))
    parents = np.searchsorted(chunks.chunk_row, row_of_entry, "right") - 1
    rows = zip(parents, chunks.row_feature[row_of_entry], chunks.entry_child, chunks.entry_weight, strict=True)
    assert sorted(found) == sorted((int(p), int(f), int(c), float(w)) for p, f, c, w in rows)


def test_tables_take_no_more_memory_than_is_said() -> None:
    """Rows of the usual kind in less than the bundle's; the worst, one weight in each tile of a wide node, in three times that."""
    rng = np.random.default_rng(7)
    wide = tree_from_children([[32 * 30]], np.arange(32 * 30))
    chunks = random_chunks(rng, wide, 3000)
    every = replace(
        chunks,
        chunk_row=np.array([0, 3000]),
        row_feature=np.arange(3000, dtype=np.int32),
        row_entry=np.arange(0, 90001, 30),
        entry_child=np.tile(np.arange(0, 32 * 30, 32, dtype=np.uint16), 3000),
        entry_weight=np.ones(90000, np.float32),
    )
    every.check(wide)
    worst = TileSizes.of(wide, every).nbytes(4) / every.nbytes
    assert 2.5 < worst < 3
    tree = random_tree(rng, 2, 32)
    usual = random_chunks(rng, tree, 3000)
    assert TileSizes.of(tree, usual).nbytes(4) < usual.nbytes


def test_a_bundle_that_does_not_fit_is_refused_with_figures(tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    bundle = make_linear_bundle(tmp_path, rng, random_tree(rng, 2, 6), L3_HINGE)
    needed = device_bytes(bundle, TileSizes.of(bundle.tree, bundle.chunks), "float32")
    halves = device_bytes(bundle, TileSizes.of(bundle.tree, bundle.chunks), "float16")
    assert needed - halves == 2 * len(bundle.chunks.entry_weight)
    search = search_of(bundle)
    held = [tensor for part in (search.tiles[0], search.contexts[0].tables) for tensor in vars(part).values()]
    on_device = sum(tensor.nbytes for tensor in held if hasattr(tensor, "nbytes"))
    assert abs(on_device - needed) < 100  # small change
    with pytest.raises(
        DeviceUnavailable, match=r"linear version 1 needs 0\.00 GB on the GPU, for 9 weights and the tree; 0\.00 of its 1\.00"
    ):
        refuse_what_does_not_fit(bundle, needed, "9 weights", needed - 1, 10**9)


# -- the compiler ---------------------------------------------------------------------------------------------------------


def test_the_kernels_compile_for_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels that only this engine has, with each precision and width of tiles, for a Hopper GPU; none spills registers."""
    launches: list[dict[str, Any]] = []
    for name in ("score_chunks_kernel", "score_level_kernel"):
        monkeypatch.setattr(sparse_gpu, name, Recorder(getattr(sparse_gpu, name), launches))
    rng = np.random.default_rng(5)
    cases: list[tuple[int, bool, Ranking, Precision, int]] = [
        (2, True, Ranking(own="log_activation", gamma=1), "float32", 2),
        (40, True, L3_HINGE, "float32", 40),
        (32, False, L3_HINGE, "float16", 40),
        (32, False, Ranking(own="logit", gamma=0), "bfloat16", 3),
    ]
    for place, (branching, ragged, ranking, precision, beam) in enumerate(cases):
        tree = random_tree(rng, 2, branching, ragged)
        bundle = make_linear_bundle(tmp_path, rng, tree, ranking, False, f"m{place}")
        engine = Pipeline(bundle, SparseCudaSearch(bundle, "cpu", precision, ONE))
        engine.search(random_queries(rng, bundle, 1, False), SearchParams.uniform(1, beam, 4))
    assert {launch["kernel"] for launch in launches} == {"score_chunks_kernel", "score_level_kernel"}
    assert {launch["types"]["weights_W"] for launch in launches} == {"*fp32", "*fp16", "*bf16"}
    for entry in compiled_elsewhere(launches, tmp_path):
        assert entry["stack_bytes"] == 0, entry


@pytest.mark.parametrize("form", ["product", "gaussian"])
def test_a_tail_enters_the_scores_as_in_the_reference(tmp_path: Path, form: Literal["product", "gaussian"]) -> None:
    bundle, plain = with_tail(tmp_path, 5, form, alpha=0.3)
    queries = random_queries(np.random.default_rng(5), bundle, 6, integer=False)
    params = SearchParams.uniform(6, 4, 9)
    engine = engine_of(bundle)
    got, expected = engine.search(queries, params), ReferenceEngine(bundle).search(queries, params)
    assert_array_equal(got.item_rows_BM, expected.item_rows_BM)
    assert_allclose(got.ranks_BM, expected.ranks_BM, atol=1e-4)
    assert_allclose(got.scores_BM, expected.scores_BM, rtol=1e-3)
    assert (got.item_rows_BM != ReferenceEngine(plain).search(queries, params).item_rows_BM).any()
    assert_alone_as_together(engine, queries, params)
    engine.close()


def test_stacking_orders_what_the_card_found(tmp_path: Path) -> None:
    bundle, plain = with_stacking(tmp_path, 5, trees=2)
    queries = random_queries(np.random.default_rng(5), bundle, 6, integer=False)
    params = SearchParams.uniform(6, 4, 9)
    engine = engine_of(bundle)
    got, expected = engine.search(queries, params), ReferenceEngine(bundle).search(queries, params)
    assert_array_equal(got.item_rows_BM, expected.item_rows_BM)
    assert_allclose(got.keys_BM, expected.keys_BM, atol=2e-3)
    assert (got.item_rows_BM != ReferenceEngine(plain).search(queries, params).item_rows_BM).any()
    assert_alone_as_together(engine, queries, params)
    engine.close()


def test_warming_up_a_forest_builds_the_cells_of_its_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every batch for small beams; for large ones the smallest alone, since calls are cut to at most BLOCK scored leaves."""
    rng = np.random.default_rng(5)
    first = random_tree(rng, 3, 4)
    others = [tree_over(rng, first.item_count, 3)]
    bundle = make_linear_bundle(tmp_path, rng, first, L3_HINGE, others=others, max_beam_size=16, beam_size=4)
    block = 2 * most_leaves([alone.tree for alone in bundle.alone], 2)  # two queries of a beam of 2 take a cell of three
    monkeypatch.setattr(gpu_engine, "BLOCK", block)
    monkeypatch.setattr(pipeline, "BLOCK", block)
    search = search_of(bundle)
    engine = Pipeline(bundle, search)
    engine.warm_up()
    built = search.cell_count
    assert built == 2 * (5 + 2 + 1)  # in each tree: beams of 1, 2, 4, 8, 16; batches of 3 for the first two; the usual beam with live items
    queries = random_queries(rng, bundle, 7)
    for beam_size in (1, 2, 3, 16):
        engine.search(queries, SearchParams.uniform(7, beam_size, 5))
        engine.prepare(SearchParams.uniform(1, beam_size, 5))
    assert search.cell_count == built
    engine.close()
