"""Forests: items rank by the mean of their scores in all trees, and by a tail; stacking orders the best anew. Bundles of several trees are
written, read and checked.

That engines search them as the reference does is in test_signature.py, too.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from benchmarks.papers.xreg.xmc import relevance_of
from benchmarks.random_bundles import make_linear_bundle, random_chunks, random_queries, random_tree, tree_over
from espalier.bundle import Bundle
from espalier.bundle_writer import with_parts
from espalier.checks.golden import verify_golden
from espalier.chunks import TreeChunks
from espalier.engines import open_engine
from espalier.engines.linear.beam import search_queries
from espalier.engines.reference import ReferenceEngine
from espalier.engines.reference_stacking import candidate_features
from espalier.errors import BundleCorrupt, InvalidQuery
from espalier.manifest import MAX_TREES, Calibration, Manifest, Ranking
from espalier.masks.eligibility import forest_mask, node_mask
from espalier.queries import QueryBatch
from espalier.scores import log_scores, scores_of_ranks
from espalier.search import NO_ITEM, SearchParams, SearchResult
from espalier.stacking import FEATURES, Stacking, StackingTables
from espalier.tail import FLOOR
from espalier.text.sparse_rows import SparseRows
from tests.espalier.second_stages import POINTS, SIGMOID, F, Form, random_stacking, random_tail, rewritten, with_stacking, with_tail
from tests.espalier.test_signature import L3_HINGE, assert_alone_as_together, assert_same
from training.golden import golden_answers
from training.inspect import inspect
from training.linear.prepare import written_features


def some_forest(folder: Path, trees: int = 3, ranking: Ranking = SIGMOID) -> Bundle:
    rng = np.random.default_rng(5)
    tree = random_tree(rng, 3, 4, empty_share=0.1)
    others = [tree_over(rng, tree.item_count, 3 + place) for place in range(trees - 1)]
    return make_linear_bundle(folder, rng, tree, ranking, integer=False, others=others)


@pytest.mark.parametrize("ranking", [SIGMOID, Ranking(own="logit", gamma=0.5)])
def test_a_score_is_the_mean_over_the_trees_and_0_where_a_tree_did_not_score_the_item(tmp_path: Path, ranking: Ranking) -> None:
    bundle = some_forest(tmp_path, ranking=ranking)
    queries = random_queries(np.random.default_rng(1), bundle, 4)
    params = SearchParams.uniform(4, 2, 100)
    alone = [open_engine(tree, "cpu").search(queries, params) for tree in bundle.alone]
    together = open_engine(bundle, "cpu").search(queries, params)
    for b in range(4):
        mean: dict[int, float] = {}
        for result in alone:
            for row, score in zip(result.item_rows_BM[b].tolist(), result.scores_BM[b].tolist(), strict=True):
                if row != NO_ITEM:
                    mean[row] = mean.get(row, 0.0) + score / 3
        best = sorted(mean, key=lambda row: -mean[row])
        rows = together.item_rows_BM[b, : together.count_B[b]].tolist()
        assert rows == best
        assert len(best) > max(int(result.count_B[b]) for result in alone)  # trees score different items
        assert_allclose(together.scores_BM[b, : len(rows)], [mean[row] for row in rows], rtol=1e-5)
        assert_allclose(np.exp(together.ranks_BM[b, : len(rows)]), together.scores_BM[b, : len(rows)], rtol=1e-6)


def test_scores_too_small_for_floats_keep_their_order(tmp_path: Path) -> None:
    """Hinges of large negative products: scores of e^−1000 are 0, and their ranks are not."""
    bundle = some_forest(tmp_path, ranking=L3_HINGE)
    queries = random_queries(np.random.default_rng(2), bundle, 3)
    queries = QueryBatch(queries.kind, replace(queries.features, values=queries.features.values * np.float32(60)))
    engine, params = open_engine(bundle, "cpu"), SearchParams.uniform(3, 30, 200)
    result = engine.search(queries, params)
    assert engine.search(queries.take(np.empty(0, np.int64)), SearchParams.uniform(0, 1, 1)).item_rows_BM.shape[0] == 0
    assert np.any(result.ranks_BM[result.item_rows_BM >= 0] < -1000)
    expected = ReferenceEngine(bundle).search(queries, params)
    assert_allclose(result.ranks_BM, expected.ranks_BM, rtol=1e-4)
    assert result.complete_B.all()


@pytest.mark.parametrize("m", [1, 2, 5])
def test_items_whose_means_are_nearly_equal_are_told_apart(tmp_path: Path, m: int) -> None:
    """Whatever an item's best tree says, it may be the second best by its mean, or tie with it: none that can be may be left out."""
    rng = np.random.default_rng(8)
    trees = [tree_over(rng, 60, 4) for _ in range(3)]
    bundle = make_linear_bundle(tmp_path, rng, trees[0], L3_HINGE.model_copy(update={"gamma": 0}), others=trees[1:])
    queries = random_queries(rng, bundle, 200)
    scaled = QueryBatch(queries.kind, replace(queries.features, values=queries.features.values / np.float32(8)))
    params = SearchParams.uniform(200, 60, m)
    result = open_engine(bundle, "cpu").search(scaled, params)
    assert_same(result, ReferenceEngine(bundle).search(scaled, params))
    tied = sum(
        len(set(ranks)) < len(ranks)
        for ranks in ReferenceEngine(bundle).search(scaled, SearchParams.uniform(200, 60, 60)).ranks_BM.tolist()
    )
    assert tied > 20


def test_logs_of_scores_are_those_of_the_scores() -> None:
    ranks = np.array([-30, -3, -0.5, 0.0], np.float32)
    for ranking in (
        SIGMOID,
        Ranking(own="logit", gamma=0),
        Ranking(own="logit", gamma=0.5, calibration=Calibration(slope=2, intercept=-1, knots=((-4, -9), (0, 1)))),
    ):
        assert_allclose(np.exp(log_scores(ranking, ranks)), scores_of_ranks(ranking, ranks), rtol=1e-6, atol=1e-40)
        far = log_scores(ranking, np.array([-1e30, -np.inf], np.float32))
        assert np.isfinite(far[0])
        assert far[1] == -np.inf


def test_a_single_query_that_cannot_be_searched_is_refused_and_leaves_nothing_behind(tmp_path: Path) -> None:
    bundle = some_forest(tmp_path)
    engine, query = open_engine(bundle, "cpu"), random_queries(np.random.default_rng(1), bundle, 1)
    params = SearchParams.uniform(1, 3, 5)
    expected = engine.search(query, params)
    wrong = SparseRows(np.array([0, 2]), np.array([3, 20], np.int32), np.ones(2, np.float32), query.features.width)
    with pytest.raises(InvalidQuery, match=r"features\.indices: got 20, expected feature numbers from 0 to 19"):
        engine.search(QueryBatch(query.kind, wrong), params)
    with pytest.raises(InvalidQuery, match="beam_size_B"):
        engine.search(query, SearchParams.uniform(1, 0, 5))
    assert_same(engine.search(query, params), expected)


def test_a_mask_must_be_of_every_tree(tmp_path: Path) -> None:
    bundle = some_forest(tmp_path)
    eligible_I = np.arange(bundle.tree.item_count) % 2 == 0
    queries, engine = random_queries(np.random.default_rng(1), bundle, 1), open_engine(bundle, "cpu")
    for mask in (node_mask(bundle.tree, eligible_I), forest_mask([tree for tree, _ in bundle.trees[:2]], eligible_I)):
        with pytest.raises(InvalidQuery, match=r"mask_B: got 'a mask of \d trees', expected a mask of at least \d, as the forest has"):
            engine.search(queries, SearchParams.uniform(1, 5, 5, mask=mask))
    wrong = forest_mask([bundle.tree] * 3, eligible_I)
    with pytest.raises(InvalidQuery, match="mask_B"):
        engine.search(queries, SearchParams.uniform(1, 5, 5, mask=wrong))
    right = forest_mask([tree for tree, _ in bundle.trees], eligible_I)
    assert set(engine.search(queries, SearchParams.uniform(1, 500, 500, mask=right)).item_rows_BM[0].tolist()) == {
        *np.flatnonzero(eligible_I).tolist(),
        NO_ITEM,
    }


def test_trees_that_do_not_fit_or_are_too_many_are_refused_with_the_reason(tmp_path: Path) -> None:
    bundle, rng = some_forest(tmp_path), np.random.default_rng(1)
    items, full = bundle.tree.item_count, [bundle.trees[0], *[bundle.trees[1]] * (MAX_TREES - 1)]
    fewer, features = tree_over(rng, items - 1, 4), tree_over(rng, items, 4)
    for version, trees, said in (
        (2, [*full, full[1]], f"a forest of {MAX_TREES + 1} trees: at most {MAX_TREES}"),
        (3, [*full[:2], TreeChunks(fewer, random_chunks(rng, fewer, 20))], rf"tree 3 holds {items - 1} items, the first one {items}"),
        (4, [*full[:2], TreeChunks(features, random_chunks(rng, features, 21))], "tree 3 has scorers of 21 features, the first one of 20"),
    ):
        with pytest.raises((BundleCorrupt, ValueError), match=said):
            rewritten(bundle, tmp_path / "linear" / str(version), trees)
    largest = rewritten(bundle, tmp_path / "linear" / "5", full)
    assert len(largest.trees) == MAX_TREES
    raw = largest.manifest.model_dump()
    with pytest.raises(ValueError, match="at most 15 items"):
        Manifest.model_validate(raw | {"trees": [*raw["trees"], raw["trees"][0]]})


def test_the_margin_of_a_golden_query_is_the_smallest_of_all_trees_and_of_the_last_cut(tmp_path: Path) -> None:
    bundle = some_forest(tmp_path)
    queries, params = random_queries(np.random.default_rng(4), bundle, 12), SearchParams.uniform(12, 2, 3)
    table = golden_answers(bundle, queries, written_features(queries.features), params)
    reference, of_trees = ReferenceEngine(bundle), set()
    for b, margin in enumerate(table.column("margin").to_pylist()):
        gaps = []
        for place in range(3):
            for step in reference.steps(queries, params, b, t=place)[:-1]:
                kept = np.isin(step.candidates_C, step.kept_K)
                if not kept.all():
                    gaps.append((float(step.keys_C[kept].min() - step.keys_C[~kept].max()), place))
        ranks = reference.search(queries, SearchParams.uniform(12, 2, 4)).ranks_BM[b]
        gaps.append((float(ranks[2] - ranks[3]), 3))
        assert margin == pytest.approx(min(gaps)[0], abs=1e-6)
        of_trees.add(min(gaps)[1])
    assert len(of_trees) > 2, "cuts of several trees should be the closest ones"
    verified = with_parts(bundle, tmp_path / "linear" / "2", {}, {"golden.parquet": table})
    assert verify_golden(verified, open_engine(verified, "cpu")) == 1
    ranks = table.column("ranks").to_pylist()
    ranks[0][0] += 0.1
    damaged = table.set_column(table.column_names.index("ranks"), "ranks", pa.array(ranks, pa.list_(pa.float32())))
    with pytest.raises(BundleCorrupt, match="golden query 0 on sparse-cpu: item row"):
        verify_golden(verified, open_engine(verified, "cpu"), damaged)


# -- tails --------------------------------------------------------------------------------------------------------------


@given(st.integers(0, 1000), st.sampled_from(["product", "gaussian"]), st.sampled_from([0.1, 0.5, 0.95]), st.integers(2, 3), st.booleans())
def test_engines_rank_with_the_tail_as_its_formula_says(
    tmp_path_factory: pytest.TempPathFactory, seed: int, form: Form, alpha: float, trees: int, full: bool
) -> None:
    bundle, plain = with_tail(tmp_path_factory.mktemp("models"), seed, form, alpha, trees, full)
    rng, tail = np.random.default_rng(seed), bundle.tail
    assert tail is not None
    queries, items = random_queries(rng, bundle, 9, integer=False), bundle.manifest.tree.items
    params = SearchParams(rng.integers(1, 9, 9), rng.integers(1, items + 3, 9))
    results = [engine.search(queries, params) for engine in (open_engine(bundle, "cpu"), ReferenceEngine(bundle))]
    everything = open_engine(plain, "cpu").search(queries, SearchParams(params.beam_size_B, np.full(9, items)))
    for b, count in enumerate(everything.count_B.tolist()):
        of_trees = zip(everything.item_rows_BM[b, :count].tolist(), everything.ranks_BM[b, :count].tolist(), strict=True)
        rank_of = {item: alpha * rank + tail.part(*queries.features.row(b), item) for item, rank in of_trees}
        expected = np.sort([*rank_of.values()])[::-1][: params.m_B[b]]
        for result in results:
            assert result.count_B[b] == len(expected)
            found = result.item_rows_BM[b, : len(expected)].tolist()
            assert_allclose(result.ranks_BM[b, : len(expected)], expected, atol=1e-4)
            assert_allclose([rank_of[item] for item in found], expected, atol=1e-4)
            assert_allclose(result.scores_BM[b, : len(expected)], np.exp(np.minimum(expected, 0)), rtol=1e-3)
    assert_alone_as_together(open_engine(bundle, "cpu"), queries, params)


@pytest.mark.parametrize("form", ["product", "gaussian"])
def test_an_items_part_is_what_the_formula_says(form: Form) -> None:
    rng = np.random.default_rng(2)
    tail, query_F = random_tail(rng, 20, form, 0.3), rng.normal(size=F) * (rng.random(F) < 0.6)
    features = np.flatnonzero(query_F).astype(np.int32)
    rows_IF = np.zeros((20, F))
    rows_IF[np.repeat(np.arange(20), np.diff(tail.row_begin)), tail.feature] = tail.value
    near_I = np.maximum(rows_IF @ query_F, FLOOR) if form == "product" else 1 / (1 + np.exp(1.5 * ((query_F - rows_IF) ** 2).sum(1)))
    parts = [tail.part(features, query_F[features].astype(np.float32), item) for item in range(20)]
    assert_allclose(parts, 0.7 * np.log(near_I), atol=1e-6)


# -- stacking -----------------------------------------------------------------------------------------------------------


@given(st.integers(0, 1000), st.integers(1, 3), st.sampled_from([1, 4, 60]))
def test_engines_order_candidates_as_the_reference(
    tmp_path_factory: pytest.TempPathFactory, seed: int, trees: int, candidates: int
) -> None:
    bundle, plain = with_stacking(tmp_path_factory.mktemp("models"), seed, candidates, trees)
    rng = np.random.default_rng(seed)
    queries, items = random_queries(rng, bundle, 9, integer=False), bundle.manifest.tree.items
    exclude_BE = rng.integers(NO_ITEM, items, (9, 2))
    params = SearchParams(rng.integers(1, 9, 9), rng.integers(1, items + 3, 9), exclude_BE)
    engine = open_engine(bundle, "cpu")
    found, expected = engine.search(queries, params), ReferenceEngine(bundle).search(queries, params)
    assert engine.name == "sparse-cpu"
    assert engine.rounding == pytest.approx(20 * open_engine(plain, "cpu").rounding)
    assert_array_equal(found.count_B, expected.count_B)
    assert_array_equal(found.complete_B, expected.complete_B)
    assert_allclose(found.keys_BM, expected.keys_BM, atol=engine.rounding)
    came = open_engine(plain, "cpu").search(queries, SearchParams(params.beam_size_B, np.full(9, items), exclude_BE))
    for b in range(9):
        rows = found.item_rows_BM[b, : found.count_B[b]]
        assert (np.diff(found.keys_BM[b, : len(rows)]) <= 0).all()
        assert not set(rows.tolist()) & set(exclude_BE[b].tolist())
        best = came.item_rows_BM[b, : min(candidates, came.count_B[b])]
        assert set(rows[:candidates].tolist()) <= set(best.tolist())
        assert_array_equal(rows[candidates:], came.item_rows_BM[b, candidates : len(rows)])  # what comes later keeps its order
        assert_allclose(found.scores_BM[b, : len(rows)], np.exp(found.keys_BM[b, : len(rows)].astype(np.float64)), rtol=1e-5, atol=1e-37)
    assert_alone_as_together(engine, queries, params)


@pytest.mark.parametrize("trees", [1, 3])
def test_who_wants_no_stacking_gets_the_order_of_the_trees(tmp_path: Path, trees: int) -> None:
    bundle, plain = with_stacking(tmp_path, 7, trees=trees)
    queries = random_queries(np.random.default_rng(1), bundle, 20, integer=False)
    params, expected = SearchParams.uniform(20, 3, 9), open_engine(plain, "cpu").search(queries, SearchParams.uniform(20, 3, 9))
    for engine in (open_engine(bundle, "cpu"), open_engine(bundle, engine="reference")):
        found, stacked = engine.candidates(queries, params), engine.search(queries, params)
        assert_array_equal(found.item_rows_BM, expected.item_rows_BM)
        assert_allclose(found.scores_BM, expected.scores_BM, rtol=1e-5)
        assert (found.item_rows_BM != stacked.item_rows_BM).any()


def test_keys_weigh_items(tmp_path: Path) -> None:
    """Power 0 orders by the probability alone; estimates of relevance do not depend on it."""
    answers = []
    for power in (0.0, 1.0):
        bundle, _ = with_stacking(tmp_path / f"{power}", 3, power=power)
        queries = random_queries(np.random.default_rng(1), bundle, 5, integer=False)
        answers.append((bundle, open_engine(bundle, "cpu").search(queries, SearchParams.uniform(5, 9, 6))))
    (bundle, probable), (_, relevant) = answers
    stacking = bundle.stacking
    assert stacking is not None
    for b in range(5):
        rows = np.sort(probable.item_rows_BM[b])
        assert_array_equal(rows, np.sort(relevant.item_rows_BM[b]))
        by_row = [found.scores_BM[b][np.argsort(found.item_rows_BM[b])] for _, found in answers]
        assert_allclose(relevance_of(stacking, rows, by_row[0]), by_row[1], rtol=1e-4)
    assert (probable.scores_BM.sum() - relevant.scores_BM.sum()) > 0


def test_features_say_what_they_are_named() -> None:
    """One query, three points, four items: computed by hand."""
    begin = np.array([0, 2, 3, 3], np.int64)
    tables = StackingTables(
        feature_weight=np.array([1, 2, 1], np.float32),
        posting_begin=begin,
        posting_point=np.array([0, 1, 1], np.uint16),
        posting_value=np.array([1.0, 0.6, 0.8], np.float16),
        label_begin=np.array([0, 1, 3, 3], np.int64),
        label=np.array([0, 0, 2], np.int32),
        label_value=np.array([1, 0.5, 1], np.float32),
        beside_begin=np.array([0, 1, 1, 2, 2], np.int64),
        beside=np.array([2, 0], np.int32),
        beside_share=np.array([0.5, 0.25], np.float32),
        log_count=np.log1p(np.array([2, 0, 1, 0])).astype(np.float32),
        log_weight=np.zeros(4, np.float32),
    )
    tables.check(4, 3)
    rows, scores = np.array([2, 0, 1]), np.array([0.5, 0.4, 1e-9])
    found_CX = candidate_features(tables, np.array([0, 1], np.int32), np.array([3, 2], np.float32), rows, np.log(scores))
    found = dict(zip(FEATURES, found_CX.T, strict=True))
    cosines = np.array([3 / 5, (3 * 0.6 + 4 * 0.8) / 5])  # of points 0 and 1; point 2 shares nothing
    share = cosines / cosines[1]
    for name, power in (("vote.5", 8), ("vote.20", 4), ("vote.100", 1)):
        weights = share**power
        assert_allclose(found[name], [weights[1] / weights.sum(), (weights[0] + 0.5 * weights[1]) / weights.sum(), 0], rtol=1e-3)
    assert_allclose(found["near.1"], cosines[1], rtol=1e-3)
    assert_allclose(found["near.20"], 0)
    assert_allclose(found["beside"], [0.4 * 0.5, 0.5 * 0.25, 0], rtol=1e-3)
    assert_allclose(found["beside.share"], [1, 0.625, 0], rtol=1e-3)
    assert_allclose(found["score.log"], np.log([0.5, 0.4, 1e-6]), rtol=1e-3)
    assert_allclose(found["score.logit"][:2], [0, np.log(0.4 / 0.6)], atol=1e-9)
    assert_allclose(found["score.below"], np.log([1, 0.8, 2e-6]), rtol=1e-3)
    assert_allclose(found["score.best"], np.log(0.5))
    assert_allclose(found["score.sum"], 0.9 + 1e-6, rtol=1e-3)
    assert_allclose(found["item.count"], np.log([2, 3, 1]), rtol=1e-3)
    assert_allclose(found["query.length"], np.log(3))


def test_threads_share_what_stacking_writes_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With trees that give all threads their answer at once."""
    bundle, _ = with_stacking(tmp_path, 7, candidates=20)
    engine, params = open_engine(bundle, "cpu"), SearchParams.uniform(2000, 9, 20)
    batch = random_queries(np.random.default_rng(1), bundle, 2000, integer=False)
    expected, ready = engine.search(batch, params), engine.candidates(batch, params)  # 20 results: as many as candidates
    monkeypatch.setattr(engine, "candidates", lambda *_: ready)
    with ThreadPoolExecutor(4) as threads:
        for own in threads.map(lambda _: engine.search(batch, params), range(8)):
            assert_array_equal(own.item_rows_BM, expected.item_rows_BM)
            assert_array_equal(own.keys_BM, expected.keys_BM)


@pytest.mark.parametrize("trees", [1, 2])
def test_threads_that_search_linear_scorers_at_once_do_not_disturb_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trees: int
) -> None:
    """They share the arrays that a search writes to: two at once would crash the process."""
    rng = np.random.default_rng(8)
    tree = random_tree(rng, 3, 4)
    others = [tree_over(rng, tree.item_count, 4) for _ in range(trees - 1)]
    bundle = make_linear_bundle(tmp_path, rng, tree, Ranking(own="log_activation", gamma=1), integer=False, others=others)
    engine, queries = open_engine(bundle), random_queries(rng, bundle, 8, integer=False)
    running: list[int] = []

    def search_slowly(*arguments: Any) -> Any:
        assert not running
        _, (*_, beam_size_B, _, _), *_, work, _ = arguments
        assert len(work[2]) >= beam_size_B[0], "the room is this search's"
        running.append(1)
        time.sleep(0.005)
        try:
            return search_queries(*arguments)
        finally:
            running.pop()

    def found(b: int) -> SearchResult:
        return engine.search(queries.take(np.array([b])), SearchParams.uniform(1, 1 + b, 1 + b))

    beams = range(7, -1, -1)  # the largest first: the next ones need less room
    expected = [found(b) for b in beams]
    monkeypatch.setattr("espalier.engines.linear.chunk_search.search_queries", search_slowly)
    with ThreadPoolExecutor(4) as threads:
        for own, alone in zip(threads.map(found, beams), expected, strict=True):
            assert_array_equal(own.item_rows_BM, alone.item_rows_BM)
            assert_array_equal(own.ranks_BM, alone.ranks_BM)


def test_tables_have_limits_and_the_manifest_says_how_many_points_vote(monkeypatch: pytest.MonkeyPatch) -> None:
    stacking = random_stacking(np.random.default_rng(0), 9, 4)
    for limit in ("MOST_POINTS", "MOST_LABELS", "MOST_BESIDE", "MOST_UNITS"):
        with monkeypatch.context() as patched:
            patched.setattr(f"espalier.stacking.{limit}", 1)
            with pytest.raises(BundleCorrupt, match=r"at most 1 expected|0 … 1 expected"):
                Stacking.of_arrays(stacking.arrays(), stacking.info, 9, F)
    Stacking.of_arrays(stacking.arrays(), stacking.info, 9, F)
    with pytest.raises(BundleCorrupt, match=f"{POINTS} points, the manifest says 3"):
        Stacking.of_arrays(stacking.arrays(), stacking.info.model_copy(update={"points": 3}), 9, F)


@pytest.mark.parametrize("huge", ["weight_3", "log_weight"])
def test_keys_are_finite_whatever_the_network_says(tmp_path: Path, huge: str) -> None:
    """Numbers that float32 cannot hold as a key: the items come, with its lowest number."""
    bundle, _ = with_stacking(tmp_path, 4)
    stacking = bundle.stacking
    assert stacking is not None
    lowest = np.finfo(np.float32).min
    network = {name: np.abs(getattr(stacking.network, name)) * np.float32(1e30) for name in ("weight_1", "weight_2", "weight_3")}
    tables = stacking.tables._replace(log_weight=np.full_like(stacking.tables.log_weight, lowest if huge == "log_weight" else 0))
    hostile = replace(stacking, tables=tables, network=replace(stacking.network, **network | {"weight_3": -network["weight_3"]}))
    Stacking.of_arrays(hostile.arrays(), hostile.info, bundle.manifest.tree.items, F)
    object.__setattr__(bundle, "stacking", hostile)
    queries, params = random_queries(np.random.default_rng(1), bundle, 5, integer=False), SearchParams.uniform(5, 9, 20)
    found, expected = open_engine(bundle, "cpu").search(queries, params), ReferenceEngine(bundle).search(queries, params)
    assert_array_equal(found.item_rows_BM, expected.item_rows_BM)
    assert_array_equal(found.keys_BM, expected.keys_BM)
    assert (found.keys_BM[found.item_rows_BM >= 0] == lowest).any()
    assert np.isfinite(found.keys_BM[found.item_rows_BM >= 0]).all()


def test_a_margin_knows_the_cut_at_the_candidates(tmp_path: Path) -> None:
    """Another engine may take the next item as a candidate where the trees' ranks of both are nearly equal."""
    bundle, plain = with_stacking(tmp_path, 7, candidates=3)
    queries, params = random_queries(np.random.default_rng(1), bundle, 8, integer=False), SearchParams.uniform(8, 100, 5)
    ranks_BM = ReferenceEngine(plain).search(queries, params).ranks_BM
    margins = golden_answers(bundle, queries, pa.nulls(8), params).column("margin").to_numpy()
    keys = [ReferenceEngine(bundle).scored_items(queries, params, b).keys for b in range(8)]
    assert_array_equal(margins, np.minimum(ranks_BM[:, 2] - ranks_BM[:, 3], [own[4] - own[5] for own in keys]))


def test_a_manifest_says_nothing_of_what_its_bundle_lacks(tmp_path: Path) -> None:
    """One tree is written as before there were forests."""
    (stacked, plain), (tailed, forest) = with_stacking(tmp_path / "a", 3), with_tail(tmp_path / "b", 3)
    assert (plain.stacking, forest.tail) == (None, None)
    said, of_forest = ((bundle.path / "manifest.json").read_text() for bundle in (plain, forest))
    assert not [name for name in ("trees", "tail", "stacking") if f'"{name}"' in said]
    assert '"trees"' in of_forest
    assert '"tail"' not in of_forest
    assert not list(plain.path.glob("*-2.safetensors"))
    assert plain.alone == (plain,)
    assert plain.trees == ((plain.tree, plain.chunks),)
    assert tailed.manifest.tail is not None
    assert [alone.manifest.tail for alone in tailed.alone] == [None, None]
    assert f"stacking: a network orders the best 6 anew, {POINTS} training points vote" in inspect(stacked)
    assert "stacking" not in inspect(plain)
