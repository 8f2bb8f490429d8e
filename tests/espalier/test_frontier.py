"""The frontier of a search: the beam above the leaves, and the same search from states that come with the parameters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from espalier.bundle_writer import write_bundle
from espalier.checks.engines import wrong_frontiers
from espalier.checks.random_bundles import (
    make_bundle,
    make_linear_bundle,
    random_memory,
    random_queries,
    random_tree,
    tree_over,
)
from espalier.engines import forest
from espalier.engines.linear.engine import open_sparse_cpu
from espalier.engines.reference import ReferenceEngine
from espalier.errors import InvalidQuery
from espalier.manifest import Ranking
from espalier.queries import QueryBatch, VectorKind
from espalier.search import Frontier, SearchParams
from tests.espalier import test_forest, test_sparse_engine
from tests.espalier.bundle.parts import content_of, draft_of
from tests.espalier.test_signature import assert_same, draw, engines, shapes


def nodes_of(frontier: Frontier, b: int) -> list[int]:
    return [int(node) for node in frontier.nodes_BK[b] if node >= 0]


@settings(max_examples=10)
@given(shape=shapes)
def test_the_reference_scores_exactly_the_children_of_its_frontier(tmp_path_factory: pytest.TempPathFactory, shape: dict[str, Any]) -> None:
    bundle, queries, params = draw(tmp_path_factory.mktemp("models"), shape, integer=True)
    tree, engine = bundle.tree, ReferenceEngine(bundle)
    plain = engine.search(queries, params)
    (frontier,) = engine.search(queries, replace(params, frontier=True)).frontiers
    assert plain.frontiers == ()
    for b in range(len(queries)):
        nodes, count = nodes_of(frontier, b), int(np.count_nonzero(frontier.nodes_BK[b] >= 0))
        eligible_N = engine.eligible_nodes(params, b).eligible_N
        last = engine.steps(queries, params, b)[-1]
        children_C, parent_C = tree.children(np.array(nodes, np.int64))
        assert children_C[eligible_N[children_C]].tolist() == last.candidates_C.tolist()
        assert_array_equal(frontier.nodes_BK[b, count:], -1)
        assert_array_equal(frontier.ranks_BK[b, count:], -np.inf)
        assert frontier.states_BS is not None
        logits_C = engine.logits(frontier.states_BS[b : b + 1], tree.height, last.candidates_C)
        gamma = np.float32(bundle.manifest.ranking.gamma)
        assert_array_equal(logits_C + gamma * frontier.ranks_BK[b][parent_C[eligible_N[children_C]]], last.ranks_C)
        if tree.start_level(int(params.beam_size_B[b])) == tree.height > 1:
            level = np.arange(tree.level(tree.height - 1).start, tree.leaf_offset)
            assert nodes == level[eligible_N[level]].tolist()


@settings(max_examples=10)
@given(shape=shapes)
def test_engines_have_the_frontier_of_the_reference(tmp_path_factory: pytest.TempPathFactory, shape: dict[str, Any]) -> None:
    """And the same answers as without it; so they have from states that come with the parameters, whatever the queries hold."""
    bundle, queries, params = draw(tmp_path_factory.mktemp("models"), shape, integer=True)
    reference, wanted = ReferenceEngine(bundle), replace(params, frontier=True)
    expected = reference.search(queries, wanted)
    given = replace(wanted, states_BLS=reference.states(queries))
    for engine in engines(bundle, shape["fixed"]):
        plain = engine.search(queries, params)
        assert plain.frontiers == ()
        for result in (engine.search(queries, wanted), engine.search(queries, given), engine.search(queries, replace(wanted, trace=True))):
            assert_same(result, expected)
        assert_same(plain, replace(expected, frontiers=()))
    assert_same(reference.search(queries, given), expected)


@settings(max_examples=10)
@given(shape=shapes)
def test_a_frontier_is_the_same_in_any_batch(tmp_path_factory: pytest.TempPathFactory, shape: dict[str, Any]) -> None:
    bundle, queries, params = draw(tmp_path_factory.mktemp("models"), shape, integer=False)
    for engine in engines(bundle):
        (together,) = engine.search(queries, replace(params, frontier=True)).frontiers
        for b in range(len(queries)):
            one = np.array([b])
            (alone,) = engine.search(queries.take(one), replace(params.take(one), frontier=True)).frontiers
            assert nodes_of(alone, 0) == nodes_of(together, b)
            assert_array_equal(alone.ranks_BK[0][alone.nodes_BK[0] >= 0], together.ranks_BK[b][together.nodes_BK[b] >= 0])


@pytest.mark.parametrize("gamma", [0.0, 0.5])
def test_histories_beside_given_states_are_read_by_a_memory_alone(tmp_path: Path, gamma: float) -> None:
    rng = np.random.default_rng(6)
    tree = random_tree(rng, 3, 3)
    for memory in (None, random_memory(rng, tree.item_count, 2)):
        bundle = make_bundle(tmp_path / str(memory is None), rng, tree, "product", gamma, memory=memory)
        known = random_queries(rng, bundle, 2)
        states_BLS = ReferenceEngine(bundle).states(known)
        params = replace(SearchParams.uniform(2, 3, 4), states_BLS=states_BLS)
        unknown = QueryBatch(known.kind, known.array + 1000)
        for engine in (ReferenceEngine(bundle), *engines(bundle)):
            if memory is None:
                assert_same(engine.search(unknown, params), engine.search(known, params))
            else:
                with pytest.raises(InvalidQuery, match="item rows from 0 to"):
                    engine.search(unknown, params)


@pytest.mark.parametrize("gamma", [0.0, 0.5])
def test_nodes_of_infinite_ranks_are_in_no_frontier_that_was_scored(tmp_path: Path, gamma: float) -> None:
    rng = np.random.default_rng(7)
    tree = random_tree(rng, 3, 3, ragged=False)
    rows_ND = np.zeros((tree.node_count, 4), np.float32)
    rows_ND[:, 0] = rng.integers(-3, 4, tree.node_count)
    rows_ND[tree.level(2).start + 1, 1] = 3e38
    small = make_bundle(tmp_path, rng, tree, "vector", gamma)
    bundle = write_bundle(tmp_path / "wide", draft_of(small), replace(content_of(small), node_rows_ND=rows_ND))
    queries = QueryBatch(VectorKind(width=4), np.array([[1, 10, 0, 0], [1, 0, 0, 0]] * 2, np.float32))
    params = SearchParams(np.array([5, 5, 30, 30]), np.full(4, 6), frontier=True)
    expected = ReferenceEngine(bundle).search(queries, params)
    assert [tree.level(2).start + 1 in nodes_of(expected.frontiers[0], b) for b in (0, 2)] == [False, gamma == 0]
    for engine in engines(bundle):
        assert wrong_frontiers(engine.search(queries, params), expected) == []


def test_a_forest_has_the_frontier_of_each_tree(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    tree = random_tree(rng, 3, 3)
    others = [tree_over(rng, tree.item_count, 4) for _ in range(2)]
    bundle = make_linear_bundle(tmp_path, rng, tree, Ranking(own="log_activation", gamma=1, activation="sigmoid"), others=others)
    queries = random_queries(rng, bundle, 3)
    result = ReferenceEngine(bundle).search(queries, replace(SearchParams.uniform(3, 4, 5), trace=True, frontier=True))
    assert [frontier.states_BS for frontier in result.frontiers] == [None] * 3
    for frontier, trace in zip(result.frontiers, result.traces, strict=True):
        assert_array_equal(frontier.nodes_BK, trace[-2].nodes_BK)
        assert_array_equal(frontier.ranks_BK, trace[-2].ranks_BK)


def test_states_for_linear_scorers_or_of_another_shape_are_refused(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    tree = random_tree(rng, 3, 3)
    bundle = make_bundle(tmp_path, rng, tree)
    queries, params = random_queries(rng, bundle, 2), SearchParams.uniform(2, 3, 4)
    for shape in ((2, 4, 5), (1, 4, 6), (2, 3, 6)):
        with pytest.raises(InvalidQuery, match=r"states_BLS: .* expected float32\[2, 4, 6\]"):
            ReferenceEngine(bundle).search(queries, replace(params, states_BLS=np.zeros(shape, np.float32)))
    linear = make_linear_bundle(tmp_path, rng, tree, Ranking(own="log_activation", gamma=1, activation="sigmoid"))
    params = replace(params, states_BLS=np.zeros((2, 4, 6), np.float32))
    with pytest.raises(InvalidQuery, match="linear scorers have none"):
        ReferenceEngine(linear).search(random_queries(rng, linear, 2), params)


@pytest.mark.parametrize("drawn", [test_sparse_engine, test_forest], ids=["one tree", "forest"])
@settings(max_examples=12)
@given(data=st.data(), trace=st.booleans(), block=st.sampled_from([1, 1 << 20]))
def test_linear_scorers_and_forests_give_the_frontiers_of_the_reference(
    tmp_path_factory: pytest.TempPathFactory, drawn: Any, data: st.DataObject, trace: bool, block: int
) -> None:
    shape = data.draw(drawn.shapes)
    bundle, queries, params = drawn.draw(tmp_path_factory.mktemp("models"), shape, integer=True)
    engine = open_sparse_cpu(bundle, shape["threads"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forest, "BLOCK", block)
        got = engine.search(queries, replace(params, frontier=True, trace=trace))
    assert_same(replace(got, trace=None, other_traces=()), ReferenceEngine(bundle).search(queries, replace(params, frontier=True)))
    assert engine.search(queries, params).frontiers == ()
    engine.close()
