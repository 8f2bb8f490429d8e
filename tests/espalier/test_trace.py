"""A trace has the same levels on every engine: from each query's start level to the leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from espalier.checks.random_bundles import make_bundle, make_linear_bundle, random_queries, random_tree
from espalier.engines.compiled.engine import CompiledEngine
from espalier.engines.linear.engine import SparseCpuEngine
from espalier.engines.onnx.engine import OnnxEngine
from espalier.engines.reference import ReferenceEngine
from espalier.manifest import Ranking
from espalier.search import LevelTrace, SearchParams

ENGINES: dict[str, Any] = {
    "reference": ReferenceEngine,
    "compiled-cpu": CompiledEngine,
    "onnx-cpu": lambda bundle: OnnxEngine(bundle, "cpu"),
    "sparse-cpu": SparseCpuEngine,
}
HEIGHT = 5


@pytest.mark.parametrize("gamma", [0.0, 0.5])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_trace_begins_at_each_querys_start_level(tmp_path: Path, engine: str, gamma: float) -> None:
    """Alone, and in a call of several beams, one of which no level above the leaves exceeds."""
    rng = np.random.default_rng(5)
    tree = random_tree(rng, HEIGHT, 2, ragged=False)
    if engine == "sparse-cpu":
        bundle = make_linear_bundle(tmp_path, rng, tree, Ranking(own="logit", gamma=gamma), integer=True)
    else:
        bundle = make_bundle(tmp_path, rng, tree, "product", gamma, integer=True)
    beam_size_B = np.array([1, 3, 4, 7, 8, 30])
    queries, params = random_queries(rng, bundle, 6, True), SearchParams(beam_size_B, np.full(6, 4), trace=True)
    opened, reference = ENGINES[engine](bundle), ReferenceEngine(bundle)
    together = opened.search(queries, params).trace
    starts = [1, 2, 3, 3, 4, 5]  # levels have 2, 4, 8, 16 and 32 nodes
    assert [level.level for level in together] == [1, 2, 3, 4, 5]
    for b, start in enumerate(starts):
        one = np.array([b])
        alone = opened.search(queries.take(one), params.take(one)).trace
        assert [level.level for level in alone] == list(range(start, HEIGHT + 1))
        assert [level.level for level in together if listed(level, b)] == list(range(start, HEIGHT + 1))
        steps = reference.steps(queries, params, b)
        for level in alone:
            assert listed(level, 0) == listed(together[level.level - 1], b) == steps[level.level - 1].candidates_C.tolist()


def test_a_level_above_a_querys_start_has_nothing_of_it(tmp_path: Path) -> None:
    rng = np.random.default_rng(6)
    bundle = make_bundle(tmp_path, rng, random_tree(rng, HEIGHT, 2, ragged=False), "product")
    params = SearchParams(np.array([1, 8]), np.full(2, 4), trace=True)
    first = (CompiledEngine(bundle).search(random_queries(rng, bundle, 2), params).trace or ())[0]
    assert_array_equal(first.nodes_BK[1], -1)
    for name in ("ranks_BK", "keys_BK", "candidate_ranks_BC", "candidate_keys_BC"):
        assert np.all(getattr(first, name)[1] == -np.inf)
        assert getattr(first, name).dtype == np.float32
        assert np.isfinite(getattr(first, name)[0]).any()


def listed(level: LevelTrace, b: int) -> list[int]:
    """The candidates of query b on a level, ascending."""
    return sorted(level.candidates_BC[b][level.candidates_BC[b] >= 0].tolist())
