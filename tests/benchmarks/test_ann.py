"""Nearest neighbours against a full scan, and the systems of `benchmarks.engine_cpu` that search by them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from numpy.typing import NDArray

from benchmarks.papers.product_search.ann import AnnIndex, Kind, faiss_is_installed
from benchmarks.speed import ann_systems, engine_cpu

Float32 = NDArray[np.float32]
needs_faiss = pytest.mark.skipif(not faiss_is_installed(), reason="faiss is not installed (the extra `ann`)")


def random_vectors(seed: int, items: int, width: int) -> tuple[Float32, Float32]:
    """Item vectors of very different lengths, with which the nearest is not the one of the largest product; and user vectors."""
    rng = np.random.default_rng(seed)
    item_ID = rng.normal(size=(items, width)) * rng.lognormal(0, 0.7, (items, 1))
    return item_ID.astype(np.float32), rng.normal(size=(8, width)).astype(np.float32)


def exact(item_ID: Float32, user_BD: Float32, m: int) -> NDArray[np.int64]:
    return np.argsort(-(user_BD @ item_ID.T), axis=1)[:, :m]


@needs_faiss
@given(seed=st.integers(0, 2**32 - 1), items=st.integers(1, 600), m=st.integers(1, 30))
def test_at_full_effort_ivf_finds_the_exact_neighbours(seed: int, items: int, m: int) -> None:
    """Not so hnsw, whose graph need not connect all items."""
    item_ID, user_BD = random_vectors(seed, items, 6)
    index = AnnIndex("ivf", item_ID)
    found_BM = index.search(user_BD, m, index.full_effort)
    best_BM, score_BI = exact(item_ID, user_BD, m), user_BD @ item_ID.T
    assert all(len(set(row)) == best_BM.shape[1] for row in found_BM[:, :items].tolist())
    # Distances round otherwise than products, so that near ties may change places.
    assert_allclose(np.take_along_axis(score_BI, found_BM[:, :items], 1), np.take_along_axis(score_BI, best_BM, 1), atol=1e-3)
    assert (found_BM[:, items:] == -1).all()


@needs_faiss
@pytest.mark.parametrize("kind", ["hnsw", "ivf"])
def test_more_effort_finds_more_and_the_knob_can_be_turned_back(kind: Kind) -> None:
    item_ID, user_BD = random_vectors(4, 3000, 16)
    index = AnnIndex(kind, item_ID)
    best_BM = exact(item_ID, user_BD, 10)
    little_BM, much_BM, again_BM = (index.search(user_BD, 10, effort) for effort in (1, index.full_effort, 1))
    assert np.isin(little_BM, best_BM).mean() < 0.9
    assert_array_equal(much_BM, best_BM)
    assert_array_equal(again_BM, little_BM)


# -- the benchmark --------------------------------------------------------------------------------------------------------


def test_time_is_told_by_its_parts_and_recall_counts_exact_answers_that_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    clock_s = 0.0

    def encode(query: NDArray[np.float64]) -> int:
        nonlocal clock_s
        clock_s += 0.001
        return len(query)

    def search(state: int) -> NDArray[np.int64]:
        nonlocal clock_s
        clock_s += 0.002
        return np.arange(state, state + 4)[None]

    monkeypatch.setattr("benchmarks.speed.ann_systems.time.perf_counter", lambda: clock_s)
    queries = [np.array([0.0, 1.0]), np.array([1.0, 0.0])]
    some = ann_systems.System("some", 7, encode, search)
    none = ann_systems.System("none", None, len, lambda state: np.zeros((1, 0), np.int64))
    assert ann_systems.timed([some, none], queries, rounds=3) == [
        {"ms_per_query": 3.0, "encode_ms": 1.0, "search_ms": 2.0},
        {"ms_per_query": 0.0, "encode_ms": 0.0, "search_ms": 0.0},
    ]
    exact_BM = np.array([[2, 9], [3, 4]])
    assert [engine_cpu.recall(system, queries, exact_BM) for system in (some, none)] == [0.75, 0.0]
