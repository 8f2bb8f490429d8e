"""The engine over shards finds what one of the whole bundle finds: of one shard whatever the beam, of more where the beam holds all.

Weights are integers, so results are equal to the bit.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from benchmarks.random_bundles import Rng, make_bundle, make_linear_bundle, random_memory, random_queries, random_tree, tree_over
from benchmarks.random_live import random_state
from espalier.bundle import Bundle
from espalier.engines import open_engine
from espalier.engines.pipeline import Pipeline
from espalier.live.masks import live_mask
from espalier.live.state import LiveState
from espalier.manifest import Ranking
from espalier.masks.eligibility import bundle_alone, forest_mask
from espalier.queries import HistoryKind, QueryBatch
from espalier.search import NO_ITEM, SearchParams, SearchResult
from service.router.config import RouterConfig
from service.router.fleet import Fleet
from service.router.shard_search import ShardSearch
from service.watch.metrics import Metrics
from tests.espalier.second_stages import with_stacking, with_tail
from tests.service.router.cluster import PATIENCE_S, LocalTransport, serve_shards
from tests.service.shards.cutting import KINDS, LIMITS, cut, whole_bundle

BATCH, EVERYTHING = 5, 64
EXACT = ("item_rows_BM", "count_B", "complete_B", "finite_B")
ROUNDED = ("ranks_BM", "keys_BM", "scores_BM")
"""Logarithms of one engine and of another may differ in the last bit, in forests and under log activation."""


@contextmanager
def sharded(whole: Bundle, folder: Path, count: int, **settings: Any) -> Iterator[Pipeline]:
    """The engine of a router over the shards of a bundle, whose services have these settings."""
    cut(whole, folder, count)
    registry = serve_shards(folder, **settings)
    config = RouterConfig(shards=("http://all",), poll_s=0.05)
    fleet = Fleet(LocalTransport({"http://all": registry}), config.shards, config, Metrics())
    fleet.start()
    try:
        assert fleet.wait_until_polled(PATIENCE_S)
        yield Pipeline(whole, ShardSearch(whole, fleet))
    finally:
        fleet.close()
        asyncio.run(registry.drain(1.0))


def queries_of(rng: Rng, state: LiveState) -> QueryBatch:
    """Queries in whose histories live items stand, too."""
    queries = random_queries(rng, state.bundle, BATCH)
    if isinstance(queries.kind, HistoryKind):
        array = queries.array.copy()
        known = np.flatnonzero(rng.random(array.shape).ravel() < 0.4)
        array.ravel()[known] = rng.integers(0, state.bundle.manifest.tree.items + state.table.handles, len(known))
        return QueryBatch(queries.kind, array)
    return queries


def params_of(rng: Rng, state: LiveState, beam_size: int | None) -> SearchParams:
    """Several beams and m in a call, filters of trained and live items, exclusions, frozen queries, with and without a trace."""
    overlay, trees = state.overlay(), [alone.tree for alone in state.bundle.alone]
    beam_size_B = rng.integers(1, 12, BATCH) if beam_size is None else np.full(BATCH, beam_size)
    passing_I, passing_R = rng.random(overlay.items) < 0.4, rng.random(overlay.handles) < 0.5
    own = overlay.item_R < overlay.items
    passing_R[own] = passing_I[overlay.item_R[own]]
    mask = live_mask(trees, overlay, forest_mask(trees, passing_I), passing_R)
    exclude_BE = rng.integers(0, overlay.items + overlay.handles, (BATCH, 12))
    exclude_BE[rng.random(exclude_BE.shape) < 0.3] = NO_ITEM
    frozen_B = rng.random(BATCH) < 0.3
    exclude_BE[frozen_B] = np.where(exclude_BE[frozen_B] < overlay.items, exclude_BE[frozen_B], NO_ITEM)
    alone = bundle_alone(trees)
    mask_B = tuple(alone if frozen_B[b] else mask if b % 2 else None for b in range(BATCH))
    return SearchParams(beam_size_B, rng.integers(1, 30, BATCH), exclude_BE, trace=bool(rng.random() < 0.5), mask_B=mask_B)


def assert_same(found: SearchResult, expected: SearchResult) -> None:
    for name in EXACT:
        assert_array_equal(getattr(found, name), getattr(expected, name), name)
    for name in ROUNDED:
        assert_allclose(getattr(found, name), getattr(expected, name), rtol=1e-5, err_msg=name)
    for one, other in zip(found.traces, expected.traces, strict=True):
        by_level = {level.level: level for level in other}
        assert one[-1].level == other[-1].level
        for level in one:
            for nodes in ("nodes_BK", "candidates_BC"):
                mine, theirs = getattr(level, nodes), getattr(by_level[level.level], nodes)
                for b in range(BATCH):
                    assert mine[b][mine[b] >= 0].tolist() == theirs[b][theirs[b] >= 0].tolist(), (level.level, nodes)


@pytest.mark.parametrize(("count", "beam_size"), [(1, None), (3, EVERYTHING)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_search_over_shards_is_one_of_the_whole_bundle_with_live_items_too(
    tmp_path: Path, kind: str, count: int, beam_size: int | None
) -> None:
    whole = whole_bundle(tmp_path / "models", kind, seed=5 + count)
    rng = np.random.default_rng(count)
    with sharded(whole, tmp_path / "shards", count) as engine:
        oracle = open_engine(whole, "cpu")
        for state in (None, random_state(rng, whole), random_state(rng, whole, new=20, deleted=0, changed=0)):
            overlay = None if state is None else state.overlay()
            engine.set_overlay(overlay)
            oracle.set_overlay(overlay)
            queries = random_queries(rng, whole, BATCH) if state is None else queries_of(rng, state)
            params = params_of(rng, state or LiveState(whole), beam_size)
            for knobs in (params, replace(params, mask_B=None), replace(params, exclude_BE=None, mask_B=None)):
                found = engine.search(queries, knobs)
                assert_same(found, oracle.search(queries, knobs))
                assert found.coverage is not None
                assert found.coverage.answered_BS.all()


@pytest.mark.parametrize("settings", [{"mask_cache_bytes": 1}, {"max_queries": 2}, {"max_search_values": 30}])
@pytest.mark.parametrize("kind", KINDS[:2])
def test_a_batch_that_is_more_than_shards_take_is_searched_in_parts(tmp_path: Path, kind: str, settings: dict[str, int]) -> None:
    whole = whole_bundle(tmp_path / "models", kind, seed=9)
    rng = np.random.default_rng(9)
    with sharded(whole, tmp_path / "free", 2) as free, sharded(whole, tmp_path / "limited", 2, **settings) as limited:
        for _ in range(3):
            state, trees = LiveState(whole), [alone.tree for alone in whole.alone]
            overlay = state.overlay()
            masks = [forest_mask(trees, rng.random(overlay.items) < 0.4) for _ in range(BATCH)]
            mask_B = tuple(live_mask(trees, overlay, mask, np.ones(overlay.handles, np.bool_)) for mask in masks)
            queries, params = random_queries(rng, whole, BATCH), replace(params_of(rng, state, None), trace=False, mask_B=mask_B)
            found = limited.search(queries, params)
            assert_same(found, free.search(queries, params))
            assert found.coverage is not None
            assert found.coverage.answered_BS.all()
            one, other = (engine.parents(queries, replace(params, exclude_BE=None, mask_B=None)) for engine in (limited, free))
            for mine, theirs in zip(one.frontiers, other.frontiers, strict=True):
                for b in range(BATCH):
                    assert mine.nodes_BK[b][mine.nodes_BK[b] >= 0].tolist() == theirs.nodes_BK[b][theirs.nodes_BK[b] >= 0].tolist()


@pytest.mark.parametrize("trees", [1, 2])
def test_stacking_orders_what_shards_found(tmp_path: Path, trees: int) -> None:
    whole, _ = with_stacking(tmp_path / "models", seed=3, trees=trees)
    queries = random_queries(np.random.default_rng(0), whole, BATCH, integer=False)
    params = SearchParams.uniform(BATCH, EVERYTHING, 9)
    with sharded(whole, tmp_path / "shards", 3) as engine:
        oracle = open_engine(whole, "cpu")
        for found, expected in zip(
            *((one.search(queries, params), one.candidates(queries, params)) for one in (engine, oracle)), strict=True
        ):
            assert_array_equal(found.item_rows_BM, expected.item_rows_BM)
            assert_allclose(found.keys_BM, expected.keys_BM, rtol=1e-4, atol=1e-5)
            assert found.coverage is not None


# -- a router searches a version in several threads at once (`calls`): each answer is the one that a single thread gets ---


THREADS, QUESTIONS, ROUNDS = 4, 6, 6
WIDTH = 8000
"""Of features: with long rows, threads are in the same compiled code for a while."""
PATH = Ranking(own="log_activation", gamma=1.0)


def history(folder: Path, rng: Rng, **parts: Any) -> Bundle:
    tree = random_tree(rng, 3, 8, empty_share=0.2)
    memory = replace(random_memory(rng, tree.item_count, 3), key_weight=2.0)
    return make_bundle(folder, rng, tree, gamma=0.5, memory=memory, **parts, **LIMITS)


def linear(folder: Path, rng: Rng, trees: int) -> Bundle:
    tree = random_tree(rng, 3, 8, empty_share=0.2)
    others = [tree_over(rng, tree.item_count, 4) for _ in range(trees - 1)]
    return make_linear_bundle(folder, rng, tree, PATH, width=WIDTH, others=others, **LIMITS)


MADE = {
    "history and memory": lambda folder, rng: history(folder, rng, kind="history"),
    "sequence and memory": lambda folder, rng: history(folder, rng, kind="product", encoder="sequence"),
    "vector": lambda folder, rng: make_bundle(folder, rng, random_tree(rng, 3, 8, empty_share=0.2), "vector", width=32, **LIMITS),
    "linear": lambda folder, rng: linear(folder, rng, 1),
    "linear and stacking": lambda folder, rng: with_stacking(folder, 1)[0],
    "forest": lambda folder, rng: linear(folder, rng, 2),
    "forest and tail": lambda folder, rng: with_tail(folder, 1)[0],
    "forest and stacking": lambda folder, rng: with_stacking(folder, 1, trees=2)[0],
}


@pytest.fixture
def eager_switches() -> Iterator[None]:
    """The interpreter goes from thread to thread as often as it can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


class Question(NamedTuple):
    """One search, and what a single thread was answered."""

    queries: QueryBatch
    params: SearchParams
    expected: SearchResult


def questions(rng: Rng, engine: Pipeline, state: LiveState, count: int) -> list[Question]:
    """Searches with and without filters, exclusions and traces, for one query and for several, live items in their histories."""
    asked = []
    for number in range(count):
        queries, params = queries_of(rng, state), params_of(rng, state, None if number % 2 else 64)
        if number % 3:
            params = replace(params, mask_B=None, exclude_BE=None, trace=False)
        if number % 3 == 1:
            queries, params = queries.take(np.array([0])), params.take(np.array([0]))
        asked.append(Question(queries, params, engine.search(queries, params)))
    return asked


def differs(found: SearchResult, expected: SearchResult) -> bool:
    names = ("item_rows_BM", "ranks_BM", "keys_BM", "scores_BM", "count_B", "complete_B")
    return not all(np.array_equal(getattr(found, name), getattr(expected, name)) for name in names)


@pytest.mark.slow
@pytest.mark.usefixtures("eager_switches")
@pytest.mark.parametrize("kind", MADE)
def test_answers_of_four_threads_are_those_of_one(tmp_path: Path, kind: str) -> None:
    rng = np.random.default_rng(8)
    whole = MADE[kind](tmp_path / "models", rng)
    state = random_state(rng, whole, new=whole.manifest.tree.items // 2)
    with sharded(whole, tmp_path / "shards", 2) as engine, ThreadPoolExecutor(THREADS) as threads:
        engine.set_overlay(state.overlay())
        asked = [questions(rng, engine, state, QUESTIONS) for _ in range(THREADS)]
        start = threading.Barrier(THREADS)

        def wrong(own: Sequence[Question]) -> int:
            start.wait()
            return sum(differs(engine.search(one.queries, one.params), one.expected) for _ in range(ROUNDS) for one in own)

        assert sum(threads.map(wrong, asked)) == 0


@pytest.mark.slow
@pytest.mark.usefixtures("eager_switches")
@pytest.mark.parametrize("kind", ["linear", "forest", "history and memory"])
def test_a_search_sees_one_state_of_the_catalogue_while_others_come(tmp_path: Path, kind: str) -> None:
    """Four threads search while the live items change: every answer is one of those that a single thread got."""
    rng = np.random.default_rng(9)
    whole = MADE[kind](tmp_path / "models", rng)
    states = [random_state(rng, whole, new=whole.manifest.tree.items // few, deleted=0, changed=0) for few in (2, 8)]
    few = states[1]
    with sharded(whole, tmp_path / "shards", 1) as engine, ThreadPoolExecutor(THREADS) as threads:
        queries = [queries_of(rng, few) for _ in range(THREADS)]
        params = SearchParams.uniform(len(queries[0]), 64, 40)
        expected: list[list[SearchResult]] = []
        for state in states:
            engine.set_overlay(state.overlay())
            expected.append([engine.search(own, params) for own in queries])
        is_over = threading.Event()

        def wrong(number: int) -> int:
            count, found = 0, 0
            while not (is_over.is_set() and count):
                answer = engine.search(queries[number], params)
                count, found = count + 1, found + all(differs(answer, right[number]) for right in expected)
            return found

        searching = [threads.submit(wrong, number) for number in range(THREADS)]
        for change in range(60):
            engine.set_overlay(states[change % 2].overlay())
        is_over.set()
        assert [future.result() for future in searching] == [0] * THREADS
