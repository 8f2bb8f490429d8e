"""The oracle of a live catalogue for the GPU's engines, in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.random_bundles import make_bundle, random_queries, random_tree
from benchmarks.random_live import random_state
from espalier.engines.pipeline import Pipeline
from espalier.manifest import LinearScorer
from espalier.search import SearchParams
from tests.espalier.live.test_oracle import Oracle, graphs, linear

pytest.importorskip("triton", reason="there are no wheels of it outside Linux")


from espalier.engines.triton.cells import FixedShapes, Tuning
from espalier.engines.triton.graph_engine import TritonSearch
from espalier.engines.triton.linear_engine import SparseCudaSearch

pytestmark = [pytest.mark.release, pytest.mark.usefixtures("stores_inside")]

SHAPES = FixedShapes(batches=(1, 3), m_sizes=(8, 64), excluded=4)


@settings(max_examples=18)
@given(shape=st.one_of(graphs, linear))
def test_live_items_are_found_as_if_folded(tmp_path_factory: pytest.TempPathFactory, shape: dict[str, Any]) -> None:
    oracle = Oracle(tmp_path_factory.mktemp("models"), shape)
    queries, (params, folded) = oracle.queries(), oracle.params(shape["passing"], shape["excluded"])
    if isinstance(oracle.bundle.manifest.scorer, LinearScorer):
        searched = Pipeline(oracle.bundle, SparseCudaSearch(oracle.bundle, "cpu", shapes=SHAPES))
    else:
        searched = Pipeline(oracle.bundle, TritonSearch(oracle.bundle, "cpu", shapes=SHAPES, tuning=Tuning(tile=16)))
    searched.set_overlay(oracle.overlay)
    oracle.assert_same(oracle.of_fold(searched.search(queries, params)), oracle.expected(queries, folded), searched.name)


def test_usual_searches_with_live_items_find_their_cells_built(tmp_path: Path) -> None:
    """By warm-up, for calls of every size: a capture takes a tenth of a second on a GPU, for which requests would wait."""
    rng = np.random.default_rng(3)
    bundle = make_bundle(tmp_path, rng, random_tree(rng, 3, 3), "product")
    trees, state, search = TritonSearch(bundle, "cpu", shapes=SHAPES), random_state(rng, bundle), bundle.manifest.search
    searched = Pipeline(bundle, trees)
    searched.warm_up()
    searched.set_overlay(state.overlay())
    built = len(trees.cells)
    for batch in SHAPES.batches:
        for row in (0, bundle.manifest.tree.items):  # trained and live
            queries = random_queries(rng, bundle, batch)
            queries.array[:, -1] = row
            searched.search(queries, SearchParams.uniform(batch, search.beam_size, search.m))
    assert len(trees.cells) == built
