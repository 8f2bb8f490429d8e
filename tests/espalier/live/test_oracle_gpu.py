"""The oracle of a live catalogue for the GPU's engines, in Triton's interpreter."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from espalier.checks.random_bundles import make_bundle, make_linear_bundle, random_tree
from espalier.engines.live.engine import LiveEngine
from espalier.engines.live.forest import LiveForestEngine
from espalier.manifest import Ranking
from tests.espalier.live.test_oracle import check
from tests.espalier.live.test_oracle_forests import some_forest

if importlib.util.find_spec("triton") is None:  # there are no wheels of it outside Linux
    pytest.skip("triton is not installed", allow_module_level=True)

from espalier.engines.forest import ForestEngine
from espalier.engines.triton.cells import FixedShapes
from espalier.engines.triton.graph_engine import TritonEngine
from espalier.engines.triton.linear_engine import SparseCudaEngine, open_sparse_cuda

pytestmark = pytest.mark.slow

SHAPES = FixedShapes(batches=(1, 3), m_sizes=(8, 64), excluded=4)


@pytest.mark.parametrize("kind", ["history", "product", "vector"])
@pytest.mark.parametrize("seed", range(3))
def test_triton_finds_what_it_finds_in_the_fold(tmp_path: Path, kind: Literal["history", "product", "vector"], seed: int) -> None:
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, 1 + seed, 3, empty_share=0.3 * (seed % 2))
    bundle = make_bundle(tmp_path, rng, tree, kind, gamma=(0.0, 0.5, 1.0)[seed % 3])
    check(tmp_path, rng, bundle, LiveEngine(bundle, TritonEngine(bundle, "cpu", shapes=SHAPES)), seed)


@pytest.mark.parametrize("seed", range(3))
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
