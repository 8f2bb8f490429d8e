"""The two families of GPU engines as tests draw them: bundles, cells and tunings of each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import strategies as st

from benchmarks.random_bundles import (
    make_bundle,
    make_linear_bundle,
)
from espalier.bundle import Bundle
from espalier.engines.pipeline import Pipeline
from espalier.search import Precision
from espalier.tree import Tree
from tests.espalier.test_signature import (
    L3_HINGE,
    Drawn,
    draw,
    linear_shapes,
    shapes,
)

pytest.importorskip("triton", reason="there are no wheels of it outside Linux")


from espalier.engines.triton import graph_engine, linear_engine
from espalier.engines.triton.cells import FixedShapes, Tuning
from espalier.engines.triton.graph_engine import TritonSearch
from espalier.engines.triton.linear_engine import SparseCudaSearch


class Family(NamedTuple):
    """An engine, where it is made, which engine of a CPU stands in for it, bundles that it searches, its cells and its tuning."""

    engine: str
    module: ModuleType
    search: Any
    on_cpu: str
    make: Callable[..., Bundle]
    drawn: st.SearchStrategy[dict[str, Any]]
    draw: Callable[[Path, dict[str, Any], bool], Drawn]
    cells: FixedShapes
    tunings: st.SearchStrategy[Tuning]

    def searching(self, bundle: Bundle, precision: Precision = "float32", tuning: Tuning | None = None) -> Any:
        return self.search(bundle, "cpu", precision, self.cells, tuning or Tuning(tile=16))

    def opened(self, bundle: Bundle, precision: Precision = "float32", tuning: Tuning | None = None) -> Pipeline:
        return Pipeline(bundle, self.searching(bundle, precision, tuning))


def make_linear(folder: Path, rng: np.random.Generator, tree: Tree, **options: Any) -> Bundle:
    return make_linear_bundle(folder, rng, tree, L3_HINGE, **options)


def draw_small(folder: Path, shape: dict[str, Any], integer: bool) -> Drawn:
    return draw(folder, shape, integer, most_beam=13, most_m=30)


GRAPHS = Family(
    "triton", graph_engine, TritonSearch, "compiled-cpu", make_bundle, shapes, draw,
    FixedShapes(batches=(2, 4), m_sizes=(8, 64), excluded=16),
    st.builds(
        Tuning, tile=st.just(16), register_candidates=st.sampled_from([128, 4096]), busy_tiles=st.sampled_from([1, 2048]),
        counted_pairs=st.sampled_from([0, 300, 1 << 24]), chosen_candidates=st.sampled_from([0, 8, 128]),
        level_kernel_queries=st.sampled_from([0, 64]),
    ),
)  # fmt: skip
LINEAR = Family(
    "sparse-cuda", linear_engine, SparseCudaSearch, "sparse-cpu", make_linear,
    linear_shapes(
        branching_height=st.sampled_from([(2, 3), (3, 3), (8, 2), (40, 2), (70, 1), (2, 1)]),
        trees=st.sampled_from([1, 1, 2, 3]),
        width=st.sampled_from([1, 20, 90]),
        batch=st.integers(1, 3),
    ),
    draw_small, FixedShapes(batches=(1, 3), m_sizes=(8, 64), excluded=16),
    st.builds(Tuning, register_candidates=st.sampled_from([64, 4096]), counted_pairs=st.sampled_from([0, 1 << 24])),
)  # fmt: skip
each_family = pytest.mark.parametrize("family", [GRAPHS, LINEAR], ids=lambda family: family.engine)
