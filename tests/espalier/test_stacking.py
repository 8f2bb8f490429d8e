"""Stacking: the best candidates of a search, ordered anew by a network that sees training points."""

from __future__ import annotations

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
from benchmarks.random_bundles import make_linear_bundle, random_queries, random_tree, tree_over
from espalier.bundle import STACKING, Bundle
from espalier.engines import open_engine
from espalier.engines.reference import ReferenceEngine
from espalier.engines.reference_stacking import candidate_features
from espalier.engines.stacked_keys import StackingArrays
from espalier.errors import BundleCorrupt
from espalier.manifest import Ranking, StackingInfo
from espalier.queries import QueryBatch
from espalier.search import NO_ITEM, SearchContext, SearchParams, SearchResult
from espalier.stacking import FEATURES, TABLES, Stacking, StackingNetwork, StackingTables
from tests.espalier.second_stages import with_second_stage
from tests.espalier.test_signature import assert_alone_as_together
from training.golden import golden_answers
from training.inspect import inspect

F, POINTS = 12, 130
RANKING = Ranking(own="log_activation", gamma=1)


def sparse(rng: np.random.Generator, rows: int, columns: int, share: float) -> tuple[Any, Any, Any]:
    """Rows of numbers in (0, 1]: where each begins, columns, values."""
    present = rng.random((rows, columns)) < share
    row, column = np.nonzero(present)
    begin = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=rows))]).astype(np.int64)
    return begin, column.astype(np.int32), (1 - rng.random(len(row))).astype(np.float32)


def random_stacking(rng: np.random.Generator, items: int, candidates: int, power: float = 1.0) -> Stacking:
    posting_begin, posting_point, posting_value = sparse(rng, F, POINTS, 0.3)
    label_begin, label, label_value = sparse(rng, POINTS, items, 0.2)
    beside_begin, beside, beside_share = sparse(rng, items, items, 0.3)
    tables = StackingTables(
        feature_weight=rng.random(F, np.float32) + np.float32(0.1),
        posting_begin=posting_begin,
        posting_point=posting_point.astype(np.uint16),
        posting_value=posting_value.astype(np.float16),
        label_begin=label_begin,
        label=label,
        label_value=label_value,
        beside_begin=beside_begin,
        beside=beside,
        beside_share=beside_share,
        log_count=np.log1p(rng.integers(0, 50, items)).astype(np.float32),
        log_weight=-rng.random(items, np.float32),
    )
    known = len(FEATURES)
    shapes = [(known,), (known,), (known, 5), (5,), (5, 3), (3,), (3,), (1,)]
    network = StackingNetwork(*(rng.normal(size=shape).astype(np.float32) for shape in shapes))
    info = StackingInfo(candidates=candidates, power=power, points=POINTS)
    return Stacking(info, tables, replace(network, scale=np.abs(network.scale)))


def with_stacking(folder: Path, seed: int, candidates: int = 6, trees: int = 1, power: float = 1.0) -> tuple[Bundle, Bundle]:
    """A bundle with stacking, and without."""
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, 3, 3, empty_share=0.1)
    others = [tree_over(rng, tree.item_count, 4) for _ in range(trees - 1)]
    plain = make_linear_bundle(folder, rng, tree, RANKING, integer=False, width=F, others=others)
    stacking = random_stacking(rng, tree.item_count, candidates, power)
    return with_second_stage(plain, folder / "stacked" / "1", stacking=stacking), plain


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
    assert_allclose(found["score.sum"], 0.9 + 1e-6, rtol=1e-3)
    assert_allclose(found["item.count"], np.log([2, 3, 1]), rtol=1e-3)
    assert_allclose(found["query.length"], np.log(3))


def test_a_query_without_features_is_answered(tmp_path: Path) -> None:
    bundle, _ = with_stacking(tmp_path, 5)
    queries = random_queries(np.random.default_rng(1), bundle, 1, integer=False)
    own = queries.features
    empty = replace(queries, rows=replace(own, indptr=np.zeros(2, np.int64), indices=own.indices[:0], values=own.values[:0]))
    params = SearchParams.uniform(1, 9, 5)
    found, expected = open_engine(bundle, "cpu").search(empty, params), ReferenceEngine(bundle).search(empty, params)
    assert_array_equal(found.item_rows_BM, expected.item_rows_BM)
    assert np.isfinite(found.keys_BM).all()


def test_no_more_candidates_are_asked_for_than_there_are_items(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle, _ = with_stacking(tmp_path, 7, candidates=1000)
    engine, items, asked = open_engine(bundle, "cpu"), bundle.manifest.tree.items, list[int]()
    candidates = engine.candidates

    def noted(queries: QueryBatch, params: SearchParams, context: SearchContext) -> SearchResult:
        asked.extend(params.m_B.tolist())
        return candidates(queries, params, context)

    monkeypatch.setattr(engine, "candidates", noted)
    queries = random_queries(np.random.default_rng(1), bundle, 2, integer=False)
    engine.search(queries, SearchParams(np.array([3, 3]), np.array([2, items + 5])))
    assert asked == [items, items + 5]


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


def test_the_manifest_says_how_many_points_vote() -> None:
    stacking = random_stacking(np.random.default_rng(0), 9, 4)
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
    tables = replace(stacking.tables, log_weight=np.full_like(stacking.tables.log_weight, lowest if huge == "log_weight" else 0))
    hostile = replace(stacking, tables=tables, network=replace(stacking.network, **network | {"weight_3": -network["weight_3"]}))
    hostile.check(bundle.manifest.tree.items, F)
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
    keys = [ReferenceEngine(bundle).found(queries, params, b).keys for b in range(8)]
    assert_array_equal(margins, np.minimum(ranks_BM[:, 2] - ranks_BM[:, 3], [own[4] - own[5] for own in keys]))


def test_tables_have_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    stacking = random_stacking(np.random.default_rng(0), 9, 4)
    for limit in ("MOST_POINTS", "MOST_LABELS", "MOST_BESIDE", "MOST_UNITS"):
        with monkeypatch.context() as patched:
            patched.setattr(f"espalier.stacking.{limit}", 1)
            with pytest.raises(BundleCorrupt, match=r"at most 1 expected|0 … 1 expected"):
                stacking.check(9, F)
    stacking.check(9, F)


def test_a_manifest_without_stacking_says_nothing_of_it(tmp_path: Path) -> None:
    bundle, plain = with_stacking(tmp_path, 3)
    assert plain.stacking is None
    assert '"stacking"' not in (plain.path / "manifest.json").read_text()
    assert f"stacking: a network orders the best 6 anew, {POINTS} training points vote" in inspect(bundle)
    assert "stacking" not in inspect(plain)
    (bundle.path / STACKING).unlink()
    with pytest.raises(Exception, match=STACKING):
        Bundle.open(bundle.path)


def test_compiled_code_reads_tables_in_their_order() -> None:
    assert StackingArrays._fields == tuple(TABLES)
