"""A router searches a version in several threads at once (`calls`): each answer is the one that a single thread gets."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from benchmarks.random_bundles import Rng, make_bundle, make_linear_bundle, random_memory, random_tree, tree_over
from benchmarks.random_live import random_state
from espalier.bundle import Bundle
from espalier.engines.pipeline import Pipeline
from espalier.live.state import LiveState
from espalier.manifest import Ranking
from espalier.queries import QueryBatch
from espalier.search import SearchParams, SearchResult
from tests.espalier.second_stages import with_stacking, with_tail
from tests.service.router.test_engines import params_of, queries_of, sharded
from tests.service.shards.cutting import LIMITS

pytestmark = pytest.mark.slow
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


@pytest.fixture(autouse=True)
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
