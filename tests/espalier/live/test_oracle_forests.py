"""The oracle of a live catalogue for forests, tails and stacking: a search with an overlay finds what a search of the fold finds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from benchmarks.random_bundles import make_linear_bundle, random_queries, random_tree, tree_over
from benchmarks.random_live import random_state
from espalier.bundle import Bundle
from espalier.engines import forest_mean, open_engine, pipeline
from espalier.engines.pipeline import Pipeline
from espalier.engines.reference import ReferenceEngine
from espalier.live.state import LiveState
from espalier.manifest import Ranking
from espalier.masks.eligibility import bundle_alone
from espalier.search import Engine, SearchParams
from tests.espalier.live.test_oracle import BATCH, check, fold_of, params_of, queries_of
from tests.espalier.second_stages import with_stacking, with_tail


def some_forest(folder: Path, seed: int, height: int = 3) -> Bundle:
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, height, 3, empty_share=0.3 * (seed % 2))
    others = [tree_over(rng, tree.item_count, int(rng.integers(2, 6))) for _ in range(1 + seed % 2)]
    ranking = Ranking(activation="l3-hinge", own=("logit", "log_activation")[seed // 2 % 2], gamma=(0.0, 0.5, 1.0)[seed % 3])
    return make_linear_bundle(folder, rng, tree, ranking, others=others)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("engine", ["reference", "sparse-cpu"])
@pytest.mark.parametrize("block", [1, forest_mean.BLOCK])
def test_a_forest_with_live_items_is_the_forest_of_the_fold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, seed: int, block: int
) -> None:
    monkeypatch.setattr(pipeline, "BLOCK", block)
    check(tmp_path, np.random.default_rng(seed), some_forest(tmp_path, seed, 1 + seed % 4), engine, seed)


def assert_close(state: LiveState, engine: Pipeline, oracle: Engine, folder: Path) -> None:
    """Where numbers are not whole: the same items, and ranks up to rounding."""
    rng = np.random.default_rng(0)
    fold, rows = fold_of(folder, state)
    for masked, excluding in ((False, False), (True, False), (False, True), (True, True)):
        queries, folded_queries = queries_of(rng, state, rows, live_histories=False)
        params, folded_params = params_of(rng, state, fold, rows, masked, excluding)
        found, expected = engine.search(queries, params), oracle.search(folded_queries, folded_params)
        assert_array_equal(rows.of_rows(found.item_rows_BM), expected.item_rows_BM)
        assert_allclose(found.keys_BM, expected.keys_BM, rtol=1e-4, atol=1e-4)
        assert_allclose(found.scores_BM, expected.scores_BM, rtol=1e-3, atol=1e-6)
        assert_array_equal(found.complete_B, expected.complete_B)
        for b in range(BATCH):
            alone = engine.search(queries.take(np.array([b])), replace(params.take(np.array([b])), trace=False))
            assert_array_equal(rows.of_rows(alone.item_rows_BM[0]), expected.item_rows_BM[b, : params.m_B[b]])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("engine", ["reference", "sparse-cpu"])
@pytest.mark.parametrize("form", ["product", "gaussian"])
@pytest.mark.parametrize("full", [True, False])
def test_the_tail_of_a_live_item_is_its_own_features(
    tmp_path: Path, full: bool, form: Literal["product", "gaussian"], engine: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    bundle, _ = with_tail(tmp_path, seed, form, full=full)
    state = random_state(rng, bundle, integer=False)
    searched = open_engine(bundle, engine=engine)
    searched.set_overlay(state.overlay())
    fold, _ = fold_of(tmp_path, state)
    assert_close(state, searched, ReferenceEngine(fold), tmp_path / "again")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("engine", ["reference", "sparse-cpu"])
@pytest.mark.parametrize("trees", [1, 3])
def test_stacking_knows_nothing_of_live_items_as_in_the_fold(tmp_path: Path, trees: int, engine: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    bundle, _ = with_stacking(tmp_path, seed, trees=trees)
    state = random_state(rng, bundle, new=60, integer=False)
    searched = open_engine(bundle, engine=engine)
    searched.set_overlay(state.overlay())
    fold, _ = fold_of(tmp_path, state)
    assert_close(state, searched, ReferenceEngine(fold), tmp_path / "again")
    searched.set_overlay(None)
    queries, params = random_queries(rng, bundle, BATCH), SearchParams.uniform(BATCH, 4, 9)
    assert_array_equal(searched.search(queries, params).item_rows_BM, open_engine(bundle).search(queries, params).item_rows_BM)


def test_frozen_queries_of_a_forest_see_the_bundle_alone(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    bundle = some_forest(tmp_path, 2)
    state = random_state(rng, bundle)
    searched = open_engine(bundle)
    searched.set_overlay(state.overlay())
    queries, frozen_B = random_queries(rng, bundle, BATCH), np.array([True, False, True, True, False])
    params = SearchParams.uniform(BATCH, 4, 12, rng.integers(0, bundle.manifest.tree.items, (BATCH, 5)))
    trained = bundle_alone([alone.tree for alone in bundle.alone])
    some_frozen = replace(params, mask_B=tuple(trained if frozen else None for frozen in frozen_B))
    found, expected = searched.search(queries, some_frozen), open_engine(bundle).search(queries, params)
    assert_array_equal(found.item_rows_BM[frozen_B], expected.item_rows_BM[frozen_B])
    assert (found.item_rows_BM[~frozen_B] != expected.item_rows_BM[~frozen_B]).any()


def test_a_trace_of_a_forest_has_the_live_leaves_of_every_tree(tmp_path: Path) -> None:
    """As nodes N + handle, with the ranks that the mean is made of."""
    rng = np.random.default_rng(4)
    bundle = some_forest(tmp_path, 4)
    state = random_state(rng, bundle, new=30)
    overlay = state.overlay()
    searched = open_engine(bundle)
    searched.set_overlay(overlay)
    queries, params = random_queries(rng, bundle, BATCH), SearchParams.uniform(BATCH, 50, 500, trace=True)
    found = searched.search(queries, params)
    assert len(found.traces) == len(bundle.alone)
    handles = set(overlay.item_R[overlay.leaf_R].tolist())
    for alone, trace in zip(bundle.alone, found.traces, strict=True):
        for b in range(BATCH):
            live = trace[-1].nodes_BK[b][trace[-1].nodes_BK[b] >= alone.tree.node_count] - alone.tree.node_count
            assert set(overlay.item_R[live].tolist()) == handles


def test_live_items_that_no_beam_reached_make_an_answer_incomplete(tmp_path: Path) -> None:
    """Also where more items come back than were trained."""
    rng = np.random.default_rng(3)
    tree = random_tree(rng, 2, 3)
    bundle = make_linear_bundle(tmp_path, rng, tree, Ranking(own="logit", gamma=0), others=[tree_over(rng, tree.item_count, 3)])
    state = random_state(rng, bundle, new=32, deleted=0, changed=0)
    searched = open_engine(bundle)
    searched.set_overlay(state.overlay())
    found = searched.search(random_queries(rng, bundle, BATCH), SearchParams.uniform(BATCH, 1, 100))
    assert state.overlay().standing is None
    assert (found.count_B > tree.item_count).any()
    assert (found.count_B < state.overlay().eligible).all()
    assert not found.complete_B.any()


def test_an_answer_with_all_eligible_items_is_complete_and_with_fewer_is_not(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    bundle, _ = with_tail(tmp_path, 2, full=True)
    state = random_state(rng, bundle, integer=False)
    searched = open_engine(bundle)
    searched.set_overlay(state.overlay())
    wide, narrow = (searched.search(random_queries(rng, bundle, 1), SearchParams.uniform(1, beam_size, 500)) for beam_size in (500, 1))
    assert (wide.count_B.tolist(), wide.complete_B.tolist()) == ([state.overlay().eligible], [True])
    assert narrow.complete_B.tolist() == [False]
