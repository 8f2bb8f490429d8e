"""The frontier of a search: the beam above the leaves, and the same search from states that come with the parameters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from espalier.checks.random_bundles import (
    make_bundle,
    make_linear_bundle,
    random_queries,
    random_tree,
    tree_over,
)
from espalier.engines import forest
from espalier.engines.linear.engine import open_sparse_cpu
from espalier.engines.reference import ReferenceEngine
from espalier.errors import InvalidQuery
from espalier.manifest import Ranking
from espalier.search import Frontier, SearchParams
from tests.espalier import test_forest, test_sparse_engine
from tests.espalier.test_signature import assert_same, draw, shapes


def nodes_of(frontier: Frontier, b: int) -> list[int]:
    return [int(node) for node in frontier.nodes_BK[b] if node >= 0]


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


def test_a_tree_of_height_1_has_its_root(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    bundle = make_bundle(tmp_path, rng, random_tree(rng, 1, 4), gamma=0.5)
    (frontier,) = (
        ReferenceEngine(bundle).search(random_queries(rng, bundle, 2), replace(SearchParams.uniform(2, 1, 1), frontier=True)).frontiers
    )
    assert_array_equal(frontier.nodes_BK, [[0], [0]])
    assert_array_equal(frontier.ranks_BK, [[0], [0]])


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


@given(shape=test_sparse_engine.shapes, trace=st.booleans())
def test_linear_scorers_give_the_frontier_of_the_reference(
    tmp_path_factory: pytest.TempPathFactory, shape: dict[str, Any], trace: bool
) -> None:
    bundle, queries, params = test_sparse_engine.draw(tmp_path_factory.mktemp("models"), shape, integer=True)
    engine = open_sparse_cpu(bundle, shape["threads"])
    got = engine.search(queries, replace(params, frontier=True, trace=trace))
    assert_same(replace(got, trace=None), ReferenceEngine(bundle).search(queries, replace(params, frontier=True)))
    assert engine.search(queries, params).frontiers == ()
    engine.close()


@given(shape=test_forest.shapes, trace=st.booleans(), block=st.sampled_from([1, 1 << 20]))
def test_a_forest_gives_the_frontier_of_each_tree(
    tmp_path_factory: pytest.TempPathFactory, shape: dict[str, Any], trace: bool, block: int
) -> None:
    bundle, queries, params = test_forest.draw(tmp_path_factory.mktemp("models"), shape, integer=True)
    engine = open_sparse_cpu(bundle, shape["threads"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forest, "BLOCK", block)
        got = engine.search(queries, replace(params, frontier=True, trace=trace))
    expected = ReferenceEngine(bundle).search(queries, replace(params, frontier=True))
    assert_same(replace(got, trace=None, other_traces=()), expected)
    assert engine.search(queries, params).frontiers == ()
    engine.close()
