"""The oracle of a live catalogue for the GPU's engines, in Triton's interpreter."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from espalier.engines.live.engine import LiveEngine
from espalier.engines.live.forest import LiveForestEngine
from hypothesis import given, settings

from espalier.checks.engines import differences
from espalier.checks.random_bundles import make_bundle, make_linear_bundle, random_queries, random_tree
from espalier.checks.random_live import random_state
from espalier.manifest import Ranking
from espalier.search import SearchParams
from tests.espalier.live.test_graph_oracle import random_oracle, shapes
from tests.espalier.live.test_oracle import check
from tests.espalier.live.test_oracle_forests import some_forest

if importlib.util.find_spec("triton") is None:  # there are no wheels of it outside Linux
    pytest.skip("triton is not installed", allow_module_level=True)

from espalier.engines.forest import ForestEngine

from espalier.engines.triton.cells import FixedShapes, Tuning
from espalier.engines.triton.graph_engine import TritonEngine
from espalier.engines.triton.linear_engine import SparseCudaEngine, open_sparse_cuda

pytestmark = pytest.mark.slow

SHAPES = FixedShapes(batches=(1, 3), m_sizes=(8, 64), excluded=4)


@settings(max_examples=15)
@given(shape=shapes)
def test_triton_finds_live_items_as_if_folded(tmp_path_factory: pytest.TempPathFactory, shape: dict[str, Any]) -> None:
    """Live items in histories, memories, encoders of sequences, filters and exclusions."""
    oracle = random_oracle(tmp_path_factory.mktemp("models"), shape)
    queries, (params, folded) = oracle.queries(3), oracle.params(3, shape["passing"], shape["excluded"])
    searched = oracle.live(TritonEngine(oracle.bundle, "cpu", shapes=SHAPES, tuning=Tuning(tile=16)))
    assert differences(oracle.of_fold(searched.search(queries, params)), oracle.expected(queries, folded)) == []


@pytest.mark.parametrize("seed", range(2))
def test_sparse_cuda_finds_what_it_finds_in_the_fold(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, 1 + seed, 3, empty_share=0.3 * (seed % 2))
    bundle = make_linear_bundle(tmp_path, rng, tree, Ranking(own="logit", gamma=(0.0, 0.5, 1.0)[seed % 3]))
    check(tmp_path, rng, bundle, LiveEngine(bundle, SparseCudaEngine(bundle, "cpu", shapes=SHAPES)), seed)


@pytest.mark.parametrize("seed", range(2))
def test_so_does_a_forest(tmp_path: Path, seed: int) -> None:
    bundle = some_forest(tmp_path, seed, 2)
    opened = open_sparse_cuda(bundle, "cpu", shapes=SHAPES)
    assert isinstance(opened, ForestEngine)
    check(tmp_path, np.random.default_rng(seed), bundle, LiveForestEngine(opened), seed)


def test_the_first_overlay_builds_what_usual_searches_need(tmp_path: Path) -> None:
    """For calls of every size: a capture takes a tenth of a second on a GPU, for which requests would wait."""
    rng = np.random.default_rng(3)
    bundle = make_bundle(tmp_path, rng, random_tree(rng, 3, 3), "product")
    inner = TritonEngine(bundle, "cpu", shapes=SHAPES)
    searched, state, search = LiveEngine(bundle, inner), random_state(rng, bundle), bundle.manifest.search
    assert inner.cell_count == 0
    searched.set_overlay(state.overlay())
    built = inner.cell_count
    assert built >= len(SHAPES.batches)
    for batch in SHAPES.batches:
        for row in (0, bundle.manifest.tree.items):  # trained and live
            queries = random_queries(rng, bundle, batch)
            queries.array[:, -1] = row
            searched.search(queries, SearchParams.uniform(batch, search.beam_size, search.m))
    assert inner.cell_count == built
