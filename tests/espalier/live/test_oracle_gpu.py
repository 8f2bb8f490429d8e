"""The oracle of a live catalogue for the GPU's engines, in Triton's interpreter."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from benchmarks.engine_comparison import differences
from benchmarks.random_bundles import make_bundle, make_linear_bundle, random_queries, random_tree
from benchmarks.random_live import random_state
from espalier.engines.pipeline import Pipeline
from espalier.manifest import Ranking
from espalier.search import SearchParams
from tests.espalier.live.test_graph_oracle import random_oracle, shapes
from tests.espalier.live.test_oracle import check
from tests.espalier.live.test_oracle_forests import some_forest

if importlib.util.find_spec("triton") is None:  # there are no wheels of it outside Linux
    pytest.skip("triton is not installed", allow_module_level=True)


from espalier.engines.triton.cells import FixedShapes, Tuning
from espalier.engines.triton.graph_engine import TritonSearch
from espalier.engines.triton.linear_engine import SparseCudaSearch

pytestmark = pytest.mark.slow

SHAPES = FixedShapes(batches=(1, 3), m_sizes=(8, 64), excluded=4)


@settings(max_examples=15)
@given(shape=shapes)
def test_triton_finds_live_items_as_if_folded(tmp_path_factory: pytest.TempPathFactory, shape: dict[str, Any]) -> None:
    """Live items in histories, memories, encoders of sequences, filters and exclusions."""
    oracle = random_oracle(tmp_path_factory.mktemp("models"), shape)
    queries, (params, folded) = oracle.queries(3), oracle.params(3, shape["passing"], shape["excluded"])
    searched = Pipeline(oracle.bundle, TritonSearch(oracle.bundle, "cpu", shapes=SHAPES, tuning=Tuning(tile=16)))
    searched.set_overlay(oracle.overlay)
    assert differences(oracle.of_fold(searched.search(queries, params)), oracle.expected(queries, folded)) == []


@pytest.mark.parametrize("seed", range(2))
def test_sparse_cuda_finds_what_it_finds_in_the_fold(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, 1 + seed, 3, empty_share=0.3 * (seed % 2))
    bundle = make_linear_bundle(tmp_path, rng, tree, Ranking(own="logit", gamma=(0.0, 0.5, 1.0)[seed % 3]))
    check(tmp_path, rng, bundle, Pipeline(bundle, SparseCudaSearch(bundle, "cpu", shapes=SHAPES)), seed)


@pytest.mark.parametrize("seed", range(2))
def test_so_does_a_forest(tmp_path: Path, seed: int) -> None:
    bundle = some_forest(tmp_path, seed, 2)
    check(tmp_path, np.random.default_rng(seed), bundle, Pipeline(bundle, SparseCudaSearch(bundle, "cpu", shapes=SHAPES)), seed)


def test_usual_searches_with_live_items_find_their_cells_built(tmp_path: Path) -> None:
    """By warm-up, for calls of every size: a capture takes a tenth of a second on a GPU, for which requests would wait."""
    rng = np.random.default_rng(3)
    bundle = make_bundle(tmp_path, rng, random_tree(rng, 3, 3), "product")
    trees, state, search = TritonSearch(bundle, "cpu", shapes=SHAPES), random_state(rng, bundle), bundle.manifest.search
    searched = Pipeline(bundle, trees)
    searched.warm_up()
    searched.set_overlay(state.overlay())
    built = trees.cell_count
    for batch in SHAPES.batches:
        for row in (0, bundle.manifest.tree.items):  # trained and live
            queries = random_queries(rng, bundle, batch)
            queries.array[:, -1] = row
            searched.search(queries, SearchParams.uniform(batch, search.beam_size, search.m))
    assert trees.cell_count == built
