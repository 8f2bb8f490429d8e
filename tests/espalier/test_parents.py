"""The beams above the leaves, and queries that somebody else has encoded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from benchmarks.random_bundles import make_bundle, make_linear_bundle, random_memory, random_queries, random_tree
from espalier.bundle import Bundle
from espalier.engines import open_engine, pipeline
from espalier.engines.pipeline import Pipeline
from espalier.engines.reference import ReferenceEngine
from espalier.engines.stages import GivenQueries, ShardResult
from espalier.errors import InvalidQuery
from espalier.manifest import GraphScorer, Ranking
from espalier.queries import QueryBatch
from espalier.search import SearchParams
from tests.espalier import test_signature
from tests.espalier.linear_shapes import draw_linear, linear_shapes

ENGINES = ("compiled-cpu", "onnx-cpu", "sparse-cpu", "reference")
DRAWN: dict[str, tuple[Callable[..., tuple[Bundle, QueryBatch, SearchParams]], st.SearchStrategy[dict[str, Any]]]] = {
    "graphs": (test_signature.draw, test_signature.shapes),
    "linear": (draw_linear, linear_shapes()),
}


def opened(bundle: Bundle) -> list[Pipeline]:
    linear = not isinstance(bundle.manifest.scorer, GraphScorer)
    return [open_engine(bundle, engine=name) for name in ENGINES if name == "reference" or linear == (name == "sparse-cpu")]


@settings(max_examples=10)
@pytest.mark.parametrize("kind", DRAWN)
@given(data=st.data(), trace=st.booleans(), block=st.sampled_from([1, 1 << 20]))
def test_the_eligible_children_of_a_frontier_are_the_leaves_that_were_scored(
    tmp_path_factory: pytest.TempPathFactory, kind: str, data: st.DataObject, trace: bool, block: int
) -> None:
    """In every tree and on every engine, with ranks that the leaves' own follow from; and the result is that of a search."""
    draw, shapes = DRAWN[kind]
    bundle, queries, params = draw(tmp_path_factory.mktemp("models"), data.draw(shapes), integer=True)
    reference, gamma = ReferenceEngine(bundle), bundle.manifest.ranking.gamma
    for engine in opened(bundle):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pipeline, "BLOCK", block)
            found = engine.parents(queries, replace(params, trace=trace))
        test_signature.assert_same(found.result, engine.search(queries, params))
        for place, (alone, frontier) in enumerate(zip(bundle.alone, found.frontiers, strict=True)):
            for b in range(len(queries)):
                *above, last = reference.steps(queries, params, b, place=place)
                nodes_K = frontier.nodes_BK[b][frontier.nodes_BK[b] >= 0]
                eligible_N = reference.eligible_nodes(params, b, place).eligible_N
                children_C, parent_C = alone.tree.children(nodes_K)
                is_open_C = eligible_N[children_C]
                assert children_C[is_open_C].tolist() == last.candidates_C.tolist()
                assert_array_equal(frontier.nodes_BK[b, len(nodes_K) :], -1)
                if gamma > 0 and above:
                    ranks = dict(zip(above[-1].candidates_C.tolist(), above[-1].ranks_C.tolist(), strict=True))
                    used = np.unique(parent_C[is_open_C])
                    assert_allclose(frontier.ranks_BK[b][used], [ranks[node] for node in nodes_K[used].tolist()])
        if isinstance(bundle.manifest.scorer, GraphScorer):
            assert found.leaf_states_BS is not None
            assert_array_equal(found.leaf_states_BS, reference.states(queries)[:, -1])
        else:
            assert found.leaf_states_BS is None


@settings(max_examples=10)
@given(shape=test_signature.shapes)
def test_queries_that_are_encoded_already_find_the_same(tmp_path_factory: pytest.TempPathFactory, shape: dict[str, Any]) -> None:
    bundle, queries, params = test_signature.draw(tmp_path_factory.mktemp("models"), shape, integer=True)
    given = GivenQueries(queries.kind, queries.rows, ReferenceEngine(bundle).states(queries), frontier=True)
    for engine in opened(bundle):
        found, parents = engine.search(given, params), engine.parents(queries, params)
        assert isinstance(found, ShardResult)
        test_signature.assert_same(found, parents.result)
        assert_array_equal(found.frontiers[0].nodes_BK, parents.frontiers[0].nodes_BK)
        assert not isinstance(engine.search(replace(given, frontier=False), params), ShardResult)


@pytest.mark.parametrize("gamma", [0.0, 0.5])
def test_histories_beside_states_are_read_by_a_memory_alone(tmp_path: Path, gamma: float) -> None:
    rng = np.random.default_rng(6)
    tree, params = random_tree(rng, 3, 3), SearchParams.uniform(2, 3, 4)
    for memory in (None, random_memory(rng, tree.item_count, 2)):
        bundle = make_bundle(tmp_path / str(memory is None), rng, tree, "product", gamma, memory=memory)
        known = random_queries(rng, bundle, 2)
        unknown = QueryBatch(known.kind, known.array + 1000)
        states_BLS = ReferenceEngine(bundle).states(known)
        for engine in opened(bundle):
            if memory is None:
                found = engine.search(GivenQueries(known.kind, unknown.rows, states_BLS), params)
                test_signature.assert_same(found, engine.search(known, params))
            else:
                with pytest.raises(InvalidQuery, match="item rows from 0 to"):
                    engine.search(GivenQueries(known.kind, unknown.rows, states_BLS), params)


def test_states_for_linear_scorers_or_of_another_shape_are_refused(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    tree = random_tree(rng, 3, 3)
    bundle = make_bundle(tmp_path, rng, tree)
    queries, params = random_queries(rng, bundle, 2), SearchParams.uniform(2, 3, 4)
    for shape in ((2, 4, 5), (1, 4, 6), (2, 3, 6)):
        with pytest.raises(InvalidQuery, match=r"states_BLS: .* expected float32\[2, 4, 6\]"):
            open_engine(bundle).search(GivenQueries(queries.kind, queries.rows, np.zeros(shape, np.float32)), params)
    linear = make_linear_bundle(tmp_path, rng, tree, Ranking(own="log_activation", gamma=1, activation="sigmoid"))
    own = random_queries(rng, linear, 2)
    with pytest.raises(InvalidQuery, match="linear scorers have none"):
        open_engine(linear).search(GivenQueries(own.kind, own.rows, np.zeros((2, 4, 6), np.float32)), params)
