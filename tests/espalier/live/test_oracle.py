"""The oracle of a live catalogue: a search of a bundle with an overlay finds what a search of its fold finds, on every engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from benchmarks.random_bundles import Rng, make_bundle, make_linear_bundle, random_memory, random_queries, random_tree
from benchmarks.random_live import random_row, random_state
from espalier.bundle import Bundle
from espalier.engines import open_engine, overflow_graph
from espalier.engines.pipeline import Pipeline
from espalier.engines.reference import ReferenceEngine
from espalier.engines.scorer_weights import ScorerWeights
from espalier.engines.stages import Leaves, TreeQuery
from espalier.errors import UnsupportedGraph
from espalier.live.fold import write_fold
from espalier.live.folded_tables import FoldedRows
from espalier.live.masks import live_mask
from espalier.live.rows import Placement
from espalier.live.state import Change, LiveState
from espalier.manifest import LinearScorer, Ranking
from espalier.masks.eligibility import bundle_alone, forest_mask
from espalier.queries import HistoryKind, QueryBatch
from espalier.search import NO_ITEM, Engine, NodeMask, SearchParams, SearchResult

BATCH = 5


def fold_of(tmp_path: Path, state: LiveState) -> tuple[Bundle, FoldedRows]:
    folder = tmp_path / "folded" / state.bundle.manifest.name / "2"
    return write_fold(folder, state.bundle, state.overlay(), state.table), FoldedRows.of(state.overlay())


def queries_of(rng: Rng, state: LiveState, rows: FoldedRows, live_histories: bool) -> tuple[QueryBatch, QueryBatch]:
    """The same queries over the items of the overlay and of the fold. Gone items are in none: a fold does not know them."""
    queries = random_queries(rng, state.bundle, BATCH)
    if not isinstance(queries.kind, HistoryKind):
        return queries, queries
    array = queries.array.copy()
    if live_histories:
        known = np.flatnonzero(rng.random(array.shape).ravel() < 0.4)
        array.ravel()[known] = rng.integers(0, state.bundle.manifest.tree.items + state.table.handles, len(known))
    folded = rows.of_rows(array)
    if not live_histories:
        folded[(array >= 0) & np.isin(array, state.overlay().row_W)] = -1
    array = np.where(folded < 0, -1, array)
    return QueryBatch(queries.kind, array), QueryBatch(queries.kind, folded)


def params_of(
    rng: Rng, state: LiveState, fold: Bundle, rows: FoldedRows, masked: bool, excluding: bool
) -> tuple[SearchParams, SearchParams]:
    """The same parameters for both: several beams and m in a call, filters, exclusions of trained and live items."""
    overlay, trees = state.overlay(), [alone.tree for alone in state.bundle.alone]
    beam_size_B, m_B = rng.integers(1, 12, BATCH), rng.integers(1, 30, BATCH)
    mask_B: list[NodeMask | None] = [None] * BATCH
    folded_B: list[NodeMask | None] = [None] * BATCH
    if masked:
        passing_I, passing_R = rng.random(overlay.items) < 0.4, rng.random(overlay.handles) < 0.5
        own = overlay.item_R < overlay.items
        passing_R[own] = passing_I[overlay.item_R[own]]
        eligible_J = np.zeros(rows.items, np.bool_)
        for row_of, passing in ((rows.row_I, passing_I), (rows.row_R, passing_R)):
            eligible_J[row_of[passing & (row_of >= 0)]] = True
        live = live_mask(trees, overlay, forest_mask(trees, passing_I), passing_R)
        folded = forest_mask([alone.tree for alone in fold.alone], eligible_J)
        for b in range(0, BATCH, 2):
            mask_B[b], folded_B[b] = live, folded
    exclude_BE = None
    folded_BE = None
    if excluding:
        exclude_BE = rng.integers(0, overlay.items + overlay.handles, (BATCH, 12))
        exclude_BE[rng.random(exclude_BE.shape) < 0.2] = NO_ITEM
        folded_BE = rows.of_rows(exclude_BE)
    return (
        SearchParams(beam_size_B, m_B, exclude_BE, True, tuple(mask_B)),
        SearchParams(beam_size_B, m_B, folded_BE, True, tuple(folded_B)),
    )


def assert_same(found: SearchResult, expected: SearchResult, rows: FoldedRows) -> None:
    assert_array_equal(rows.of_rows(found.item_rows_BM), expected.item_rows_BM)
    for name in ("ranks_BM", "keys_BM", "scores_BM", "count_B", "complete_B", "finite_B"):
        assert_array_equal(getattr(found, name), getattr(expected, name), name)


KINDS = ("history", "product", "vector")


@pytest.mark.parametrize("engine", ["reference", "onnx-cpu", "compiled-cpu"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(6))
def test_a_search_with_live_items_is_a_search_of_the_fold(
    tmp_path: Path, engine: str, kind: Literal["history", "product", "vector"], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, int(rng.integers(1, 5)), 3, empty_share=0.3 * (seed % 2))
    gamma = (0.0, 0.5, 1.0)[seed % 3]
    bundle = make_bundle(tmp_path, rng, tree, kind, gamma=gamma)
    check(tmp_path, rng, bundle, engine, seed)


@pytest.mark.parametrize("kind", ["history", "vector"])
def test_so_is_one_of_a_scorer_that_compiled_code_does_not_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Literal["history", "vector"]
) -> None:
    def unknown(bundle: Bundle) -> ScorerWeights:
        raise UnsupportedGraph("of no form")

    monkeypatch.setattr(overflow_graph, "scorer_weights", unknown)
    rng = np.random.default_rng(7)
    check(tmp_path, rng, make_bundle(tmp_path, rng, random_tree(rng, 3, 3), kind, gamma=0.5), "onnx-cpu", 7)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("engine", ["reference", "sparse-cpu"])
def test_so_is_one_of_linear_scorers(tmp_path: Path, engine: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, int(rng.integers(1, 5)), 3, empty_share=0.3 * (seed % 2))
    ranking = Ranking(own="logit", gamma=(0.0, 0.5, 1.0)[seed % 3])
    check(tmp_path, rng, make_linear_bundle(tmp_path, rng, tree, ranking), engine, seed)


def check(
    tmp_path: Path,
    rng: Rng,
    bundle: Bundle,
    engine: str | Pipeline,
    seed: int,
    live_histories: bool = False,
    open_oracle: Callable[[Bundle], Engine] = ReferenceEngine,
) -> None:
    """Random live items, in an engine by name or one that was opened, against what the oracle finds in the fold."""
    items, parents = bundle.manifest.tree.items, None
    if seed % 2:  # all under a few parents
        level = bundle.tree.level(bundle.tree.height - 1)
        parents = rng.choice(np.array(level), min(2, len(level)), replace=False) if bundle.tree.height < 3 else None
    new = 12 if bundle.tree.height > 1 else 8
    state = random_state(rng, bundle, new, min(4, items // 4), min(3, items // 4), parents=parents)
    fold, rows = fold_of(tmp_path, state)
    searched = open_engine(bundle, engine=engine) if isinstance(engine, str) else engine
    searched.set_overlay(state.overlay())
    oracle = open_oracle(fold)
    for masked in (False, True):
        for excluding in (False, True):
            queries, folded_queries = queries_of(rng, state, rows, live_histories)
            params, folded_params = params_of(rng, state, fold, rows, masked, excluding)
            expected = oracle.search(folded_queries, folded_params)
            assert_same(searched.search(queries, params), expected, rows)
            plain = SearchParams(params.beam_size_B, params.m_B, params.exclude_BE, False, params.mask_B)
            assert_same(searched.search(queries, plain), expected, rows)
            for b in range(BATCH):  # alone as in a batch
                alone = searched.search(queries.take(np.array([b])), plain.take(np.array([b])))
                width = int(params.m_B[b])
                assert_array_equal(rows.of_rows(alone.item_rows_BM[0]), expected.item_rows_BM[b, :width])
    if isinstance(bundle.manifest.scorer, LinearScorer):
        assert state.overlay().trees[0].sparse is not None


@pytest.mark.parametrize("with_memory", [False, True])
def test_once_all_that_came_has_gone_a_search_is_that_of_the_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_memory: bool
) -> None:
    """The same answers, at the same cost: nothing is asked of the tree that a search of the bundle would not ask."""
    rng = np.random.default_rng(5)
    tree = random_tree(rng, 3, 3)
    bundle = make_bundle(tmp_path, rng, tree, "product", memory=random_memory(rng, tree.item_count, 3) if with_memory else None)
    state = LiveState(bundle)
    parent = int(tree.level(tree.height - 1)[0])
    row = random_row(rng, bundle, integer=True)
    state.apply([Change(1, "new", "put", placements=(Placement(0, parent, state.next_slot(0, parent), row),))])
    state.apply([Change(2, "new", "delete")])
    alone, searched = open_engine(bundle, engine="compiled-cpu"), open_engine(bundle, engine="compiled-cpu")
    searched.set_overlay(state.overlay())
    asked: list[TreeQuery] = []
    search_trees = searched.tree_search.search

    def search(query: TreeQuery) -> Leaves:
        asked.append(query)
        return search_trees(query)

    monkeypatch.setattr(searched.tree_search, "search", search)
    queries, exclude_BE = random_queries(rng, bundle, BATCH), rng.integers(0, len(bundle.items) + 1, (BATCH, 3))
    for trace in (False, True):
        params = SearchParams.uniform(BATCH, 3, 6, exclude_BE, trace=trace)
        known = replace(params, exclude_BE=np.where(exclude_BE < len(bundle.items), exclude_BE, NO_ITEM))
        found, expected = searched.search(queries, params), alone.search(queries, known)
        for name in ("item_rows_BM", "ranks_BM", "keys_BM", "scores_BM", "count_B", "complete_B"):
            assert_array_equal(getattr(found, name), getattr(expected, name), name)
        for level, wanted in zip(found.trace or (), expected.trace or (), strict=True):
            assert_array_equal(level.nodes_BK, wanted.nodes_BK)
    assert [query.frontier or any(query.eligible_T[0].mask_B) for query in asked] == [False, False]
    history = np.full((1, queries.array.shape[1]), len(bundle.items))  # of the item that is gone
    found = searched.search(QueryBatch(queries.kind, history), SearchParams.uniform(1, 3, 6))
    assert asked[-1].eligible_T[0].live_BR == ()  # no live leaf is looked for
    blank = np.full_like(history, -1)
    assert_array_equal(found.ranks_BM, alone.search(QueryBatch(queries.kind, blank), SearchParams.uniform(1, 3, 6)).ranks_BM)


def test_frozen_queries_see_the_bundle_alone(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    bundle = make_bundle(tmp_path, rng, random_tree(rng, 3, 3), "product")
    state = random_state(rng, bundle)
    searched, alone = open_engine(bundle, engine="onnx-cpu"), ReferenceEngine(bundle)
    searched.set_overlay(state.overlay())
    queries = random_queries(rng, bundle, BATCH)
    params = SearchParams.uniform(BATCH, 4, 12, rng.integers(0, bundle.manifest.tree.items, (BATCH, 5)))
    frozen_B = np.array([True, False, True, True, False])
    trained = bundle_alone([bundle.tree])
    mask_B = tuple(trained if frozen else None for frozen in frozen_B)
    found = searched.search(queries, SearchParams(params.beam_size_B, params.m_B, params.exclude_BE, mask_B=mask_B))
    expected = alone.search(queries, params)
    assert_array_equal(found.item_rows_BM[frozen_B], expected.item_rows_BM[frozen_B])
    assert (found.item_rows_BM[~frozen_B] != expected.item_rows_BM[~frozen_B]).any()
    searched.set_overlay(None)
    assert_array_equal(searched.search(queries, params).item_rows_BM, expected.item_rows_BM)
