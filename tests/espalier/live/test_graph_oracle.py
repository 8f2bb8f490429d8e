"""The oracle of a live catalogue for models of graphs: with integer weights, a bundle with an overlay is searched as the plain reference
searches its fold. Live items in histories, memories, encoders of sequences, filters, exclusions and frozen queries, all at once.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba.core.dispatcher import Dispatcher
from numpy.typing import NDArray

from benchmarks.engine_comparison import differences
from benchmarks.random_bundles import make_bundle, random_memory, random_tree
from benchmarks.random_live import random_state
from espalier.bundle import Bundle
from espalier.engines import open_engine
from espalier.engines.onnx.engine import OnnxSearch
from espalier.engines.pipeline import Pipeline
from espalier.engines.reference import ReferenceEngine
from espalier.live.fold import write_fold
from espalier.live.folded_tables import FoldedRows
from espalier.live.live_tree import LEAST_ROOM
from espalier.live.masks import live_mask
from espalier.live.state import LiveState
from espalier.masks.eligibility import bundle_alone, node_mask
from espalier.queries import HistoryKind, QueryBatch, VectorKind, pad_histories
from espalier.search import LevelTrace, SearchParams, SearchResult
from tests.espalier.test_signature import KINDS

Rng = np.random.Generator


class Oracle:
    """A bundle of graphs with an overlay, and its fold. Queries and parameters are those of the former."""

    def __init__(self, folder: Path, rng: Rng, bundle: Bundle, state: LiveState) -> None:
        self.rng, self.bundle, self.state = rng, bundle, state
        self.overlay = state.overlay()
        self.fold = write_fold(folder / "fold" / "2", bundle, self.overlay, state.table)
        self.rows = FoldedRows.of(self.overlay)
        self.there = np.concatenate([self.rows.kept, len(self.rows.row_I) + self.rows.new])
        """The item rows of bundle and overlay that the fold has, in its order."""

    def queries(self, batch: int) -> QueryBatch:
        """Vectors, or histories of items that the fold has; empty ones too."""
        kind: Any = self.bundle.manifest.query
        if isinstance(kind, VectorKind):
            return QueryBatch(kind, self.rng.integers(-2, 3, (batch, kind.width)).astype(np.float32))
        return pad_histories(kind, [self.rng.choice(self.there, self.rng.integers(0, kind.length + 2)) for _ in range(batch)])

    def params(self, batch: int, passing: float | None, excluded: int) -> tuple[SearchParams, SearchParams]:
        """Of a call with the overlay, and of the same call of the fold."""
        rng, tree = self.rng, self.bundle.tree
        beam_size_B, m_B = rng.integers(1, 40, batch), rng.integers(1, 50, batch)
        live, folded = SearchParams(beam_size_B, m_B), SearchParams(beam_size_B, m_B)
        if passing is not None:
            passing_J = rng.random(len(self.there)) < passing
            passing_J[self.rows.row_I[self.rows.row_I >= 0][:1]] = True
            passing_I = np.append(passing_J, False)[self.rows.row_I]
            mask = live_mask([tree], self.overlay, node_mask(tree, passing_I), np.append(passing_J, False)[self.rows.row_R])
            masked = rng.random(batch) < 0.7
            live = replace(live, mask_B=tuple(mask if own else None for own in masked))
            folded = replace(folded, mask_B=tuple(node_mask(self.fold.tree, passing_J) if own else None for own in masked))
        if excluded:
            exclude_BE = rng.choice(np.append(self.there, -1), (batch, excluded))
            live, folded = replace(live, exclude_BE=exclude_BE), replace(folded, exclude_BE=self.rows.of_rows(exclude_BE))
        return live, folded

    def expected(self, queries: QueryBatch, params: SearchParams) -> SearchResult:
        """What the reference finds in the fold."""
        if isinstance(queries.kind, HistoryKind):
            queries = QueryBatch(queries.kind, self.rows.of_rows(queries.array))
        return ReferenceEngine(self.fold).search(queries, params)

    def of_fold(self, result: SearchResult) -> SearchResult:
        """A result of the overlay, by the fold's item rows."""
        assert set(result.item_rows_BM.flat) <= {*self.there.tolist(), -1}
        return replace(result, item_rows_BM=self.rows.of_rows(result.item_rows_BM), trace=None)

    def engines(self) -> list[Pipeline]:
        """Those that run on any CPU, with the overlay."""
        engines = [open_engine(self.bundle, engine=name) for name in ("reference", "onnx-cpu", "compiled-cpu")]
        for engine in engines:
            engine.set_overlay(self.overlay)
        return engines


def random_oracle(folder: Path, shape: dict[str, Any]) -> Oracle:
    rng = np.random.default_rng(shape["seed"])
    branching, height = shape["branching_height"]
    tree = random_tree(rng, height, branching, shape["ragged"], shape["empty_share"])
    kind: Any
    kind, *parts = shape["kind"].split()
    memory = random_memory(rng, tree.item_count, int(rng.integers(1, 6))) if "memory" in parts else None
    encoder: Any = "sequence" if "sequence" in parts else "levels"
    bundle = make_bundle(folder, rng, tree, kind, shape["gamma"], dtype=shape["dtype"], memory=memory, encoder=encoder)
    touched = min(7, tree.item_count - 1)
    deleted = int(rng.integers(0, touched + 1))
    parents = rng.choice(np.array(tree.level(height - 1)), 3) if shape["together"] else None
    state = random_state(rng, bundle, int(rng.integers(0, LEAST_ROOM + 1)), deleted, touched - deleted, parents=parents)
    return Oracle(folder, rng, bundle, state)


shapes = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**32 - 1),
        "branching_height": st.sampled_from([(2, 3), (2, 6), (3, 4), (8, 2), (32, 2), (6, 1)]),
        "ragged": st.booleans(),
        "empty_share": st.sampled_from([0.0, 0.2, 0.9]),
        "kind": st.sampled_from(KINDS),
        "dtype": st.sampled_from(["float32", "float16", "int8"]),
        "gamma": st.sampled_from([0.0, 0.5, 1.0]),
        "together": st.booleans(),
        "passing": st.sampled_from([None, 0.0, 0.1, 0.5]),
        "excluded": st.sampled_from([0, 3, 30]),
    }
)


@given(shape=shapes)
def test_live_items_are_found_as_if_folded(tmp_path_factory: pytest.TempPathFactory, shape: dict[str, Any]) -> None:
    oracle = random_oracle(tmp_path_factory.mktemp("models"), shape)
    queries, (params, folded) = oracle.queries(3), oracle.params(3, shape["passing"], shape["excluded"])
    expected = oracle.expected(queries, folded)
    for engine in oracle.engines():
        traced = engine.search(queries, replace(params, trace=True))
        for result in (engine.search(queries, params), traced):
            assert differences(oracle.of_fold(result), expected) == [], engine.name
        assert traced.trace is not None
        for b in range(3):  # the beams of a trace are those that were searched, whichever queries were searched together
            alone = engine.search(queries.take(np.array([b])), replace(params.take(np.array([b])), trace=True)).trace
            assert alone is not None
            levels = {level.level: level for level in traced.trace}
            for level in alone:
                for nodes, keys in (("nodes_BK", "keys_BK"), ("candidates_BC", "candidate_keys_BC")):
                    assert listed(level, nodes, keys, 0) == listed(levels[level.level], nodes, keys, b)


def listed(level: LevelTrace, nodes: str, keys: str, b: int) -> dict[int, float]:
    pairs = zip(getattr(level, nodes)[b].tolist(), getattr(level, keys)[b].tolist(), strict=True)
    return {node: key for node, key in pairs if node >= 0}


@given(shape=shapes)
def test_frozen_queries_see_the_bundle_alone(tmp_path_factory: pytest.TempPathFactory, shape: dict[str, Any]) -> None:
    """Beside queries that see what is live, which get what they get alone."""
    oracle = random_oracle(tmp_path_factory.mktemp("models"), shape)
    queries, frozen_B = oracle.queries(4), np.array([True, False, True, False])
    params = SearchParams(oracle.rng.integers(1, 40, 4), oracle.rng.integers(1, 50, 4))
    kind, items = queries.kind, oracle.bundle.tree.item_count
    known = queries
    if isinstance(kind, HistoryKind):  # live items are unknown to them
        known = pad_histories(kind, [np.where(row < items, row, -1) for row in queries.array])
    expected = ReferenceEngine(oracle.bundle).search(known, params)
    alone = bundle_alone([oracle.bundle.tree])
    some, all_of_them = (
        replace(params, mask_B=tuple(alone if frozen else None for frozen in frozen_B)),
        replace(params, mask_B=(alone,) * 4),
    )
    for engine in oracle.engines():
        got, live = engine.search(queries, some), engine.search(queries, params)
        for name in ("item_rows_BM", "ranks_BM", "keys_BM", "scores_BM", "count_B", "complete_B"):
            for b in range(4):
                right: NDArray[Any] = getattr(expected if frozen_B[b] else live, name)[b]
                np.testing.assert_array_equal(getattr(got, name)[b], right)
            for asked in (queries, known):
                whole = engine.search(asked, all_of_them)
                np.testing.assert_array_equal(getattr(whole, name), getattr(expected, name))


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_search_with_live_items_compiles_and_builds_nothing(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it needs is there once an overlay is set, for the usual beam."""
    made: list[str] = []
    monkeypatch.setattr(Dispatcher, "compile", recorded(made, Dispatcher.compile))
    monkeypatch.setattr(OnnxSearch, "__init__", recorded(made, OnnxSearch.__init__))
    shape = {"seed": 5, "branching_height": (3, 4), "ragged": True, "empty_share": 0.0, "kind": kind, "dtype": "float32", "gamma": 0.5}
    oracle = random_oracle(tmp_path, shape | {"together": False})
    queries = oracle.queries(6)
    usual = oracle.bundle.manifest.search
    for engine in oracle.engines()[1:]:
        made.clear()
        for b in range(6):
            result = engine.search(queries.take(np.array([b])), SearchParams.uniform(1, usual.beam_size, usual.m))
            assert result.count_B[0] == usual.m
        assert made == []


def recorded(calls: list[str], function: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(str(args[0]))
        return function(*args, **kwargs)

    return call
