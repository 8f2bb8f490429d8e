"""The comparisons of `benchmarks.engine_comparison` find what is wrong with a search, each thing by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from benchmarks.engine_comparison import differences, wrong_alone, wrong_beams
from benchmarks.random_bundles import make_bundle, random_queries, random_tree, stepped
from espalier.bundle import Bundle
from espalier.engines import open_engine
from espalier.queries import QueryBatch
from espalier.search import NO_CONTEXT, LevelTrace, SearchContext, SearchParams, SearchResult


class Changed:
    """An engine whose results are changed by a function before anybody sees them."""

    def __init__(self, bundle: Bundle, change: Callable[[SearchResult, int], SearchResult]) -> None:
        self._engine, self._change = open_engine(bundle, engine="onnx-cpu"), change
        self.name, self.rounding = "changed", 1e-3

    def search(self, queries: QueryBatch, params: SearchParams, context: SearchContext = NO_CONTEXT) -> SearchResult:
        return self._change(self._engine.search(queries, params, context), len(queries))

    def warm_up(self) -> None:
        """Nothing to build."""

    def close(self) -> None:
        self._engine.close()


class Searched(NamedTuple):
    bundle: Bundle
    queries: QueryBatch
    params: SearchParams

    def wrong_beams(self, change: Callable[[SearchResult], SearchResult]) -> list[str]:
        """Of an engine whose results are changed."""
        return wrong_beams(Changed(self.bundle, lambda result, batch: change(result)), *self)


@pytest.fixture
def searched(tmp_path: Path) -> Searched:
    rng = np.random.default_rng(3)
    bundle = make_bundle(tmp_path, rng, random_tree(rng, 5, 2, ragged=False), gamma=0.5, integer=False)
    return Searched(bundle, random_queries(rng, bundle, 3, False), SearchParams(np.array([4, 4, 5]), np.array([6, 3, 5])))


def last(result: SearchResult, **changed: Any) -> SearchResult:
    """The result with another trace of the last level."""
    (trace,) = result.traces
    return replace(result, traces=((*trace[:-1], replace(trace[-1], **changed)),))


def test_nothing_is_wrong_with_a_search_as_it_is(searched: Searched) -> None:
    bundle, queries, params = searched
    engine = Changed(bundle, lambda result, batch: result)
    result = engine.search(queries, params)
    assert differences(result, result) == []
    assert wrong_beams(engine, bundle, queries, params) == []
    assert wrong_alone(engine, queries, params) == []


@pytest.mark.parametrize("name", ["item_rows_BM", "ranks_BM", "keys_BM", "scores_BM", "count_B", "complete_B"])
def test_an_array_that_differs_is_named_with_its_first_difference(searched: Searched, name: str) -> None:
    bundle, queries, params = searched
    result = open_engine(bundle, engine="onnx-cpu").search(queries, params)
    array = getattr(result, name).copy()
    array.flat[-1] = not array.flat[-1] if array.dtype == np.bool_ else array.flat[0] + 7
    (line,) = differences(replace(result, **{name: array}), result)
    assert line.startswith(f"{name}: 1 of {array.size} differ, at ")
    (line,) = differences(replace(result, **{name: array[:-1]}), result)
    assert "got the shape" in line


def swapped(level: LevelTrace) -> dict[str, Any]:
    """The first query's beam with its first node replaced by a candidate that was dropped, under that candidate's rank."""
    nodes_BK, ranks_BK, keys_BK = level.nodes_BK.copy(), level.ranks_BK.copy(), level.keys_BK.copy()
    dropped = [c for c in range(level.candidates_BC.shape[1]) if level.candidates_BC[0, c] not in nodes_BK[0]]
    worst = min(dropped, key=lambda c: level.candidate_ranks_BC[0, c])
    nodes_BK[0, 0], ranks_BK[0, 0] = level.candidates_BC[0, worst], level.candidate_ranks_BC[0, worst]
    keys_BK[0, 0] = level.candidate_keys_BC[0, worst]
    return {"nodes_BK": nodes_BK, "ranks_BK": ranks_BK, "keys_BK": keys_BK}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (swapped, "a kept node is worse than a dropped one"),
        (lambda level: {"candidate_ranks_BC": level.candidate_ranks_BC + np.float32(0.01)}, "away, rounding 0.001"),
        (lambda level: {"ranks_BK": level.ranks_BK + np.float32(0.5)}, "a kept node has another rank than as a candidate"),
        (lambda level: {"candidates_BC": np.where(level.candidates_BC % 2, level.candidates_BC, -1)}, "the reference has"),
        (lambda level: {"nodes_BK": np.where(level.nodes_BK == level.nodes_BK.max(), -1, level.nodes_BK)}, "candidates kept, expected"),
        (lambda level: {"nodes_BK": np.where(level.nodes_BK == level.nodes_BK.max(), 0, level.nodes_BK)}, "kept nodes are no candidates"),
    ],
)
def test_a_wrong_beam_is_described(searched: Searched, change: Callable[[LevelTrace], dict[str, Any]], said: str) -> None:
    found = searched.wrong_beams(lambda result: last(result, **change(result.traces[0][-1])) if result.traces else result)
    assert said in "; ".join(found)


def test_answers_that_a_trace_changes_are_wrong(searched: Searched) -> None:
    turned = searched.wrong_beams(lambda result: result if result.traces else replace(result, item_rows_BM=result.item_rows_BM[:, ::-1]))
    assert turned == ["item_rows_BM: a search without a trace finds other items"]
    short = searched.wrong_beams(lambda result: replace(result, traces=tuple(trace[1:] for trace in result.traces)))
    assert "query 0: the trace has levels [4, 5], expected all from 3 to 5" in short
    assert searched.wrong_beams(lambda result: replace(result, traces=())) == ["the engine gave no trace"]


def test_answers_that_depend_on_the_batch_are_wrong(searched: Searched) -> None:
    bundle, queries, params = searched
    engine = Changed(bundle, lambda result, batch: replace(result, ranks_BM=result.ranks_BM + np.float32(batch)))
    assert [line.split(":")[0] for line in wrong_alone(engine, queries, params)] == ["query 0", "query 1", "query 2"]
    assert len(wrong_alone(engine, queries, params, 2)) == 2


def test_stepped_numbers_are_exact_in_every_precision() -> None:
    torch = pytest.importorskip("torch")
    raw = np.random.default_rng(1).normal(size=10_000) * 5
    numbers = torch.from_numpy(stepped(raw, 2.0**-5))
    for kind in (torch.float16, torch.bfloat16):
        assert torch.equal(numbers.to(kind).double(), numbers)
    assert np.abs(numbers.numpy() - np.clip(raw, -7.96875, 7.96875)).max() <= 2.0**-6
    assert stepped(raw, None) is raw
