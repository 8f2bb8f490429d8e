"""The oracle of a live catalogue: a search of a bundle with an overlay finds what a search of its fold finds.

Of all kinds of models and engines: trees and forests, memories, tails and stacking, live items in histories, filters, exclusions, batches.
"""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from onnx import helper, numpy_helper

from benchmarks.engine_comparison import differences
from benchmarks.random_bundles import make_bundle, make_linear_bundle, product_graphs, random_memory, random_queries, random_tree, tree_over
from benchmarks.random_live import random_row, random_state
from espalier.bundle import Bundle
from espalier.engines import forest_mean, open_engine, overflow_scores, pipeline
from espalier.engines.encode import histories_of
from espalier.engines.onnx.engine import OnnxSearch
from espalier.engines.pipeline import Pipeline
from espalier.engines.reference import ReferenceEngine
from espalier.engines.scorer_weights import ScorerWeights
from espalier.engines.stages import Leaves, TreeQuery
from espalier.errors import InvalidQuery, UnsupportedGraph
from espalier.live.fold import write_fold
from espalier.live.folded_tables import FoldedRows
from espalier.live.live_tree import LEAST_ROOM
from espalier.live.masks import live_mask
from espalier.live.rows import Placement
from espalier.live.state import Change, LiveState
from espalier.manifest import LinearScorer, Ranking
from espalier.masks.eligibility import bundle_alone, forest_mask
from espalier.queries import HistoryKind, QueryBatch, pad_histories
from espalier.search import NO_ITEM, LevelTrace, SearchParams, SearchResult
from tests.espalier import drawn_bundles
from tests.espalier.drawn_bundles import KINDS, drawn_bundle, is_exact

BATCH = 4
CALLS: dict[str, st.SearchStrategy[Any]] = {
    "together": st.booleans(),
    "passing": st.sampled_from([None, 0.0, 0.1, 0.5]),
    "excluded": st.sampled_from([0, 3, 30]),
}
graphs: st.SearchStrategy[dict[str, Any]] = st.builds(dict, drawn_bundles.graphs, **CALLS)
linear: st.SearchStrategy[dict[str, Any]] = st.builds(dict, drawn_bundles.linear, **CALLS)


class Oracle:
    """A bundle with an overlay, and its fold. Queries and parameters are those of the former."""

    def __init__(self, folder: Path, shape: dict[str, Any]) -> None:
        self.rng, self.exact = np.random.default_rng(shape["seed"]), is_exact(shape)
        self.bundle = drawn_bundle(folder, self.rng, shape, self.exact)
        self.trees = [alone.tree for alone in self.bundle.alone]
        level = np.array(self.bundle.tree.level(self.bundle.tree.height - 1))
        parents = self.rng.choice(level, 3) if shape["together"] else None
        touched = min(7, self.bundle.tree.item_count - 1)
        deleted, new = int(self.rng.integers(0, touched + 1)), int(self.rng.integers(0, LEAST_ROOM - touched + 1))
        self.state = random_state(self.rng, self.bundle, new, deleted, touched - deleted, self.exact, parents)
        self.overlay = self.state.overlay()
        self.fold = write_fold(folder / "fold" / "2", self.bundle, self.overlay, self.state.table)
        self.rows = FoldedRows.of(self.overlay)
        self.there = np.concatenate([self.rows.kept_rows, len(self.rows.row_I) + self.rows.new_handles])
        """The item rows of bundle and overlay that the fold has, in its order."""

    def queries(self) -> QueryBatch:
        """Of the bundle's kind; histories of items that the fold has, empty ones too."""
        kind: Any = self.bundle.manifest.query
        if not isinstance(kind, HistoryKind):
            return random_queries(self.rng, self.bundle, BATCH, self.exact)
        return pad_histories(kind, [self.rng.choice(self.there, self.rng.integers(0, kind.length + 2)) for _ in range(BATCH)])

    def params(self, passing: float | None, excluded: int) -> tuple[SearchParams, SearchParams]:
        """Of a call with the overlay, and of the same call of the fold: exclusions also of items that are gone."""
        rng, rows = self.rng, self.rows
        live = folded = SearchParams(rng.integers(1, 40, BATCH), rng.integers(1, 50, BATCH))
        if passing is not None:
            passing_J = rng.random(len(self.there)) < passing
            passing_J[rows.row_I[rows.row_I >= 0][:1]] = True
            passing_I, passing_R = (np.append(passing_J, False)[row] for row in (rows.row_I, rows.row_R))
            masks = (
                live_mask(self.trees, self.overlay, forest_mask(self.trees, passing_I), passing_R),
                forest_mask([alone.tree for alone in self.fold.alone], passing_J),
            )
            masked = rng.random(BATCH) < 0.7
            live, folded = (replace(live, mask_B=tuple(mask if own else None for own in masked)) for mask in masks)
        if excluded:
            exclude_BE = rng.integers(-1, self.overlay.items + self.overlay.handles, (BATCH, excluded))
            live, folded = replace(live, exclude_BE=exclude_BE), replace(folded, exclude_BE=rows.of_rows(exclude_BE))
        return live, folded

    def expected(self, queries: QueryBatch, params: SearchParams) -> SearchResult:
        """What the reference finds in the fold."""
        if isinstance(queries.kind, HistoryKind):
            queries = QueryBatch(queries.kind, self.rows.of_rows(queries.array))
        return ReferenceEngine(self.fold).search(queries, params)

    def of_fold(self, result: SearchResult) -> SearchResult:
        """A result of the overlay, by the fold's item rows."""
        assert set(result.item_rows_BM.flat) <= {*self.there.tolist(), -1}
        return replace(result, item_rows_BM=self.rows.of_rows(result.item_rows_BM), traces=())

    def assert_same(self, found: SearchResult, expected: SearchResult, engine: str) -> None:
        """Where numbers are not whole: the same items, and numbers up to rounding."""
        if self.exact:
            assert differences(found, expected) == [], engine
            assert_array_equal(found.finite_B, expected.finite_B, engine)
        else:
            for name in ("item_rows_BM", "count_B", "complete_B"):
                assert_array_equal(getattr(found, name), getattr(expected, name), f"{engine} {name}")
            assert_allclose(found.keys_BM, expected.keys_BM, rtol=1e-4, atol=1e-4)
            assert_allclose(found.scores_BM, expected.scores_BM, rtol=1e-3, atol=1e-6)

    def engines(self) -> list[Pipeline]:
        """Those that run on any CPU, with the overlay; one for a scorer that compiled code does not know."""
        if isinstance(self.bundle.manifest.scorer, LinearScorer):
            engines = [open_engine(self.bundle, engine=name) for name in ("reference", "sparse-cpu")]
        else:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(overflow_scores, "scorer_weights", unknown_form)
                engines = [open_engine(self.bundle, engine="onnx-cpu")]
                engines[0].set_overlay(self.overlay)
            engines += [open_engine(self.bundle, engine=name) for name in ("reference", "onnx-cpu", "compiled-cpu")]
        for engine in engines:
            engine.set_overlay(self.overlay)
        return engines


def unknown_form(bundle: Bundle) -> ScorerWeights:
    raise UnsupportedGraph("of no form")


@given(shape=st.one_of(graphs, linear), block=st.sampled_from([1, forest_mean.BLOCK]))
def test_live_items_are_found_as_if_folded(tmp_path_factory: pytest.TempPathFactory, shape: dict[str, Any], block: int) -> None:
    oracle = Oracle(tmp_path_factory.mktemp("models"), shape)
    queries, (params, folded) = oracle.queries(), oracle.params(shape["passing"], shape["excluded"])
    expected = oracle.expected(queries, folded)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "BLOCK", block)
        for engine in oracle.engines():
            traced = engine.search(queries, replace(params, trace=True))
            for result in (engine.search(queries, params), traced):
                oracle.assert_same(oracle.of_fold(result), expected, engine.name)
            for b in range(BATCH):  # the answer and the beams are the same, whichever queries are searched together
                one, own = queries.take(np.array([b])), params.take(np.array([b]))
                assert_array_equal(engine.search(one, own).item_rows_BM[0], traced.item_rows_BM[b, : own.m_B[0]])
                for trace, alone in zip(traced.traces, engine.search(one, replace(own, trace=True)).traces, strict=True):
                    levels = {level.level: level for level in trace}
                    for level in alone:
                        for nodes, keys in (("nodes_BK", "keys_BK"), ("candidates_BC", "candidate_keys_BC")):
                            assert listed(level, nodes, keys, 0) == listed(levels[level.level], nodes, keys, b)


def listed(level: LevelTrace, nodes: str, keys: str, b: int) -> dict[int, float]:
    pairs = zip(getattr(level, nodes)[b].tolist(), getattr(level, keys)[b].tolist(), strict=True)
    return {node: key for node, key in pairs if node >= 0}


@given(shape=st.one_of(graphs, linear))
def test_frozen_queries_see_the_bundle_alone(tmp_path_factory: pytest.TempPathFactory, shape: dict[str, Any]) -> None:
    """Beside queries that see what is live, which get what they get alone. So do all once the overlay is gone."""
    oracle = Oracle(tmp_path_factory.mktemp("models"), shape)
    queries, frozen_B = oracle.queries(), np.array([True, False, True, False])
    items = oracle.overlay.items
    exclude_BE = oracle.rng.integers(-1, items, (BATCH, shape["excluded"])) if shape["excluded"] else None
    params = SearchParams(oracle.rng.integers(1, 40, BATCH), oracle.rng.integers(1, 50, BATCH), exclude_BE)
    known = queries
    if isinstance(queries.kind, HistoryKind):  # live items are unknown to them
        known = pad_histories(queries.kind, [np.where(row < items, row, -1) for row in queries.array])
    expected = ReferenceEngine(oracle.bundle).search(known, params)
    alone = bundle_alone(oracle.trees)
    some = replace(params, mask_B=tuple(alone if frozen else None for frozen in frozen_B))
    for engine in oracle.engines():
        live, whole = engine.search(queries, params), engine.search(queries, replace(params, mask_B=(alone,) * BATCH))
        oracle.assert_same(whole, expected, engine.name)
        got = engine.search(queries, some)
        for name in ("item_rows_BM", "ranks_BM", "keys_BM", "scores_BM", "count_B", "complete_B"):
            for b in range(BATCH):
                assert_array_equal(getattr(got, name)[b], getattr(whole if frozen_B[b] else live, name)[b], name)
        engine.set_overlay(None)
        oracle.assert_same(engine.search(known, params), expected, engine.name)


def test_a_trace_of_a_forest_has_the_live_leaves_of_every_tree(tmp_path: Path) -> None:
    """As nodes N + handle, with the ranks that the mean is made of."""
    rng = np.random.default_rng(4)
    tree = random_tree(rng, 3, 3)
    bundle = make_linear_bundle(tmp_path, rng, tree, Ranking(own="logit", gamma=0.5), others=[tree_over(rng, tree.item_count, 4)])
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


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_search_with_live_items_builds_nothing(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it needs is there once an overlay is set, for the usual beam. Compiled code that is missing is refused in every test."""
    made: list[str] = []
    monkeypatch.setattr(OnnxSearch, "__init__", recorded(made, OnnxSearch.__init__))
    shape = {"seed": 5, "branching_height": (3, 4), "ragged": True, "empty_share": 0.0, "kind": kind, "dtype": "float32", "gamma": 0.5}
    oracle = Oracle(tmp_path, shape | {"together": False})
    queries = oracle.queries()
    usual = oracle.bundle.manifest.search
    for engine in oracle.engines()[2:]:
        made.clear()
        for b in range(BATCH):
            result = engine.search(queries.take(np.array([b])), SearchParams.uniform(1, usual.beam_size, usual.m))
            assert result.count_B[0] == usual.m
        assert made == []


def recorded(calls: list[str], function: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(str(args[0]))
        return function(*args, **kwargs)

    return call


# -- histories with live items: the states of query.onnx over all rows, live ones too -------------------------------------


def test_unknown_items_are_left_out_and_the_others_move_up(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    bundle = make_bundle(tmp_path, rng, random_tree(rng, 3, 3), "product")
    overlay = random_state(rng, bundle, new=8, deleted=2, changed=2).overlay()
    items, dead = overlay.items, int(np.flatnonzero(~overlay.leaf_R & (overlay.item_R >= overlay.items))[0])
    live = int(np.flatnonzero(overlay.leaf_R & (overlay.item_R >= items))[0])
    moved, deleted = int(overlay.row_W[0]), int(np.setdiff1d(overlay.hidden, overlay.row_W)[0])
    rows_BT = np.array([[-1, items + live, items + dead, moved, deleted]] * 3)
    frozen_B = np.array([False, True, False])
    known_BT, handles_BT = histories_of(overlay, rows_BT, frozen_B, countable=True)
    assert known_BT[0].tolist() == known_BT[2].tolist() == [-1, -1, items + live, moved, deleted]
    assert known_BT[1].tolist() == [-1, -1, -1, moved, deleted]
    handle = int(overlay.handle_I[moved])
    assert handles_BT.tolist() == [[-1, -1, live, handle, -1], [-1] * 5, [-1, -1, live, handle, -1]]
    known_BT, handles_BT = histories_of(overlay, rows_BT, None, countable=False)
    assert known_BT.tolist() == [[-1, -1, -1, moved, deleted]] * 3
    assert (handles_BT == -1).all()
    with pytest.raises(InvalidQuery, match=f"queries: got {items + overlay.handles}, expected item rows from 0 to"):
        histories_of(overlay, np.full_like(rows_BT, items + overlay.handles), None, countable=True)


def scaled_by_node_rows(query: onnx.ModelProto) -> onnx.ModelProto:
    """Adds the largest of all node rows to the states."""
    return _with_summand(query, [helper.make_node("ReduceMax", ["node_rows"], ["summand"], keepdims=0)])


def with_a_table_of_its_own(query: onnx.ModelProto) -> onnx.ModelProto:
    """Adds numbers that the graph keeps by node."""
    table = numpy_helper.from_array(np.arange(5000, dtype=np.float32), "table")
    query.graph.initializer.append(table)
    nodes = [
        helper.make_node("Gather", ["table", "safe"], ["of_nodes"]),
        helper.make_node("ReduceSum", ["of_nodes"], ["summand"], keepdims=0),
    ]
    return _with_summand(query, nodes)


def _with_summand(query: onnx.ModelProto, nodes: list[onnx.NodeProto]) -> onnx.ModelProto:
    last = query.graph.node[-1]
    last.output[0] = "before"
    query.graph.node.extend([*nodes, helper.make_node("Add", ["before", "summand"], ["query_state"])])
    return query


@pytest.mark.parametrize(
    ("changed", "reason"), [(scaled_by_node_rows, "ReduceMax reads node_rows"), (with_a_table_of_its_own, "other states over a part")]
)
def test_live_items_are_unknown_in_histories_to_graphs_that_do_more_than_look_rows_up(
    tmp_path: Path, changed: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    rng = np.random.default_rng(3)
    graphs = product_graphs(rng, 4, True)
    graphs = graphs._replace(query_onnx=changed(onnx.load_from_string(graphs.query_onnx)).SerializeToString())
    bundle = make_bundle(tmp_path, rng, random_tree(rng, 4, 4), "product", graphs=graphs)
    engine, overlay = open_engine(bundle, engine="onnx-cpu"), random_state(rng, bundle).overlay()
    engine.set_overlay(overlay)
    assert re.search(f"live items do not count in histories .*{reason}", caplog.text)
    known = random_queries(rng, bundle, 3)
    with_live = QueryBatch(known.kind, np.append(known.array[:, 1:], np.full((3, 1), overlay.items), axis=1))
    without = QueryBatch(known.kind, np.append(np.full((3, 1), -1), known.array[:, 1:], axis=1))
    params = SearchParams.uniform(3, 5, 10)
    assert_array_equal(engine.search(with_live, params).ranks_BM, engine.search(without, params).ranks_BM)
    assert not np.array_equal(engine.search(without, params).ranks_BM, ReferenceEngine(bundle).search(without, params).ranks_BM)


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
        for level, wanted in zip(chain(*found.traces), chain(*expected.traces), strict=True):
            assert_array_equal(level.nodes_BK, wanted.nodes_BK)
    assert [query.frontier or any(query.eligible_T[0].mask_B) for query in asked] == [False] * (1 + BATCH)
    history = np.full((1, queries.array.shape[1]), len(bundle.items))  # of the item that is gone
    found = searched.search(QueryBatch(queries.kind, history), SearchParams.uniform(1, 3, 6))
    assert asked[-1].eligible_T[0].live_BR == ()  # no live leaf is looked for
    blank = np.full_like(history, -1)
    assert_array_equal(found.ranks_BM, alone.search(QueryBatch(queries.kind, blank), SearchParams.uniform(1, 3, 6)).ranks_BM)
