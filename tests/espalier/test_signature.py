"""The signature test: every engine searches as the reference does, in bundles of graphs and of linear scorers.

(a) With integer weights all arithmetic is exact, so results must be equal, ties included. (b) With real weights the reference rescores
the beams that the engine kept: it must find the same candidates of the same ranks, up to the engine's rounding, and every kept candidate
must be at least as good as the best dropped one, less that rounding. The engines of a GPU are in test_gpu_engines.py.
"""

from __future__ import annotations

import tracemalloc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from benchmarks.engine_comparison import differences, replayed, wrong_alone, wrong_beams
from benchmarks.random_bundles import make_bundle, make_linear_bundle, random_masks, random_memory, random_queries, random_tree
from espalier.arrays import Array, Int64
from espalier.bundle import Bundle
from espalier.engines import open_engine, pipeline
from espalier.engines.onnx.engine import OnnxSearch
from espalier.engines.pipeline import Pipeline
from espalier.engines.reference import ReferenceEngine, Step
from espalier.engines.stages import GivenQueries
from espalier.errors import DeviceUnavailable, InvalidQuery
from espalier.manifest import GraphScorer, Ranking
from espalier.queries import FeaturesKind, QueryBatch, blank_queries
from espalier.search import Engine, NodeMask, SearchParams, SearchResult
from espalier.tree import Tree, tree_from_children
from tests.espalier import drawn_bundles
from tests.espalier.drawn_bundles import drawn_bundle

MANY = 128
L3_HINGE = Ranking(activation="l3-hinge", own="log_activation", gamma=1)
Shape = dict[str, Any]
Drawn = tuple[Bundle, QueryBatch, SearchParams]

CALLS: dict[str, st.SearchStrategy[Any]] = {
    "own": st.sampled_from(["logit", "log_activation"]),
    "exclude": st.sampled_from([0, 3, 40]),
    "passing": st.sampled_from([None, 0.0, 0.05, 0.5]),
}
shapes: st.SearchStrategy[Shape] = st.builds(dict, drawn_bundles.graphs, batch=st.integers(1, 4), **CALLS)
"""Bundles of graphs, and calls."""


def draw(folder: Path, shape: Shape, integer: bool, most_beam: int = 40, most_m: int = 50) -> Drawn:
    rng = np.random.default_rng(shape["seed"])
    bundle = drawn_bundle(folder, rng, shape, integer)
    tree, *others = (alone.tree for alone in bundle.alone)
    batch: int = shape["batch"]
    queries = random_queries(rng, bundle, batch, integer)
    exclude = rng.integers(-1, tree.item_count, (batch, shape["exclude"])) if shape["exclude"] else None
    masks = None if shape["passing"] is None else random_masks(rng, tree, batch, shape["passing"], others)
    return bundle, queries, SearchParams(rng.integers(1, most_beam, batch), rng.integers(1, most_m, batch), exclude, mask_B=masks)


def linear_shapes(**changed: st.SearchStrategy[Any]) -> st.SearchStrategy[Shape]:
    """Bundles of linear scorers, calls, and how many threads search; `changed` are keys that are drawn otherwise."""
    drawn: dict[str, st.SearchStrategy[Any]] = {
        "kind": st.just("linear"),
        "branching_height": st.sampled_from([(2, 6), (3, 4), (8, 2), (32, 2), (2, 1)]),
        "trees": st.integers(1, 4),
        "activation": st.sampled_from(["sigmoid", "l1-hinge", "l2-hinge", "l3-hinge", "l4-hinge"]),
        "width": st.sampled_from([1, 20, 300]),
        "threads": st.sampled_from([1, 2]),
        "batch": st.sampled_from([1, 3, 12]),
    }
    return st.fixed_dictionaries(drawn_bundles.TREES | CALLS | drawn | changed)


def draw_small_linear(folder: Path, shape: Shape, integer: bool) -> Drawn:
    """With real weights logits of a few units, which `rounding` is for, and few queries, which are replayed one by one."""
    if integer:
        return draw(folder, shape, integer)
    bundle, queries, params = draw(folder, shape | {"batch": min(shape["batch"], 3)}, integer)
    rows = queries.features
    return bundle, QueryBatch(queries.kind, replace(rows, values=rows.values / np.float32(4))), params


class Family(NamedTuple):
    """Bundles of one kind of scorers, the engines for them that run on any CPU, and the reference's trees in a pipeline."""

    shapes: st.SearchStrategy[Shape]
    draw: Callable[[Path, Shape, bool], Drawn]
    make: Callable[[Path, np.random.Generator, Tree], Bundle]
    names: Sequence[str]

    def engines(self, bundle: Bundle, threads: int = 1) -> list[Pipeline]:
        return [open_engine(bundle, engine=name, threads=threads) for name in self.names]


def product_bundle(folder: Path, rng: np.random.Generator, tree: Tree) -> Bundle:
    return make_bundle(folder, rng, tree, "product", 0.5)


def linear_bundle(folder: Path, rng: np.random.Generator, tree: Tree) -> Bundle:
    return make_linear_bundle(folder, rng, tree, L3_HINGE)


GRAPHS = Family(shapes, draw, product_bundle, ("compiled-cpu", "onnx-cpu", "reference"))
LINEAR = Family(linear_shapes(), draw_small_linear, linear_bundle, ("sparse-cpu", "reference"))
each_family = pytest.mark.parametrize("family", [GRAPHS, LINEAR], ids=["graphs", "linear"])


def buckets_of(history_T: Int64) -> dict[int, list[int]]:
    """The items of a history, and the buckets of how many places ago each came, the last time first."""
    buckets: dict[int, list[int]] = {}
    for place, item in enumerate(int(a) for a in history_T[::-1] if a >= 0):
        buckets.setdefault(item, []).append([place < 1, place < 2, place < 4, place < 8, place < 16, True].index(True))
    return buckets


def eligible_rows(bundle: Bundle, queries: QueryBatch, params: SearchParams, b: int) -> set[int]:
    """The item rows that query b may get."""
    mask = None if params.mask_B is None else params.mask_B[b]
    rows = np.arange(bundle.tree.item_count) if mask is None else np.flatnonzero(mask.eligible_N[bundle.tree.leaf_of_item])
    excluded = set() if params.exclude_BE is None else set(params.exclude_BE[b].tolist())
    if bundle.memory is not None:
        excluded |= {item for item, buckets in buckets_of(queries.array[b]).items() if bundle.memory.left_out[buckets[0]]}
    return set(rows.tolist()) - excluded


def assert_same(got: SearchResult, expected: SearchResult) -> None:
    assert differences(got, expected) == []


def assert_wide_beams_bring_enough(engine: Engine, bundle: Bundle, queries: QueryBatch, params: SearchParams) -> None:
    """With beams of at least m, every query gets min(m, eligible) distinct eligible items."""
    params = replace(params, beam_size_B=np.maximum(params.beam_size_B, params.m_B))
    result = engine.search(queries, params)
    for b in range(len(queries)):
        eligible = eligible_rows(bundle, queries, params, b)
        rows = result.item_rows_BM[b][: result.count_B[b]].tolist()
        assert len(rows) == len(set(rows)) == min(params.m_B[b], len(eligible))
        assert set(rows) <= eligible
        assert result.complete_B[b]


def assert_best_beams(engine: Engine, bundle: Bundle, queries: QueryBatch, params: SearchParams) -> None:
    """The engine's beams, traced, are among the best by the reference's scores."""
    assert wrong_beams(engine, bundle, queries, params) == []


def assert_alone_as_together(engine: Engine, queries: QueryBatch, params: SearchParams) -> None:
    """Each query gets the same answer alone as in the batch."""
    assert wrong_alone(engine, queries, params) == []


def replay(
    reference: ReferenceEngine, queries: QueryBatch, params: SearchParams, b: int, kept: dict[int, Array], rounding: float
) -> list[Step]:
    """Every beam that the engine kept is, by the reference's scores, a best one among its candidates. Returns the reference's steps."""
    steps, wrong = replayed(reference, queries, params, b, kept, rounding)
    assert wrong == []
    return steps


# -- (a) and (b) ----------------------------------------------------------------------------------------------------------


@each_family
@given(data=st.data())
def test_engines_equal_the_reference_exactly_with_integer_weights(
    tmp_path_factory: pytest.TempPathFactory, family: Family, data: st.DataObject
) -> None:
    shape = data.draw(family.shapes)
    bundle, queries, params = family.draw(tmp_path_factory.mktemp("models"), shape, True)
    expected, engines = ReferenceEngine(bundle).search(queries, params), family.engines(bundle, shape.get("threads", 1))
    if family is GRAPHS:  # as on a GPU, where ONNX Runtime scores several queries together
        engines.append(Pipeline(bundle, OnnxSearch(bundle, "cpu", group_size=3)))
    for engine in engines:
        assert_same(engine.search(queries, params), expected)
        assert_wide_beams_bring_enough(engine, bundle, queries, params)
        engine.close()


@each_family
@given(data=st.data())
def test_kept_beams_are_the_best_with_real_weights_and_answers_those_of_any_batch(
    tmp_path_factory: pytest.TempPathFactory, family: Family, data: st.DataObject
) -> None:
    shape = data.draw(family.shapes)
    bundle, queries, params = family.draw(tmp_path_factory.mktemp("models"), shape, False)
    for engine in family.engines(bundle, shape.get("threads", 1)):
        assert_best_beams(engine, bundle, queries, params)
        assert_alone_as_together(engine, queries, params)
        engine.close()


def many_exclusions(rng: np.random.Generator, tree: Tree, room: int) -> SearchParams:
    """None, few, as many as there is room for and more, scattered and in whole subtrees; the last two queries have masks, too."""
    counts = (0, 3, room, room + 1, 2 * room, 2 * room, room + 1, 2 * room)
    exclude_BE = np.full((8, 2 * room), -1)
    for row, count in zip(exclude_BE, counts, strict=True):
        drawn = rng.permutation(tree.item_count)[:count]
        row[: len(drawn)] = drawn
    held = tree.leaf_item[tree.leaf_item >= 0]
    exclude_BE[5] = np.resize(held[: 2 * room], 2 * room)
    masks = (*[None] * 6, *random_masks(rng, tree, 2, 0.5))
    return SearchParams(rng.integers(1, 40, 8), rng.integers(1, 500, 8), exclude_BE, mask_B=masks)


@each_family
def test_many_exclusions_beside_few_and_none(tmp_path: Path, family: Family) -> None:
    rng = np.random.default_rng(11)
    tree = random_tree(rng, 9, 2, ragged=False, empty_share=0.1)
    bundle, params = family.make(tmp_path, rng, tree), many_exclusions(rng, tree, MANY)
    queries = random_queries(rng, bundle, 8)
    expected = ReferenceEngine(bundle).search(queries, params)
    for engine in family.engines(bundle):
        assert_same(engine.search(queries, params), expected)


@each_family
def test_nothing_of_a_search_is_left_for_the_next(tmp_path: Path, family: Family) -> None:
    rng = np.random.default_rng(5)
    bundle = family.make(tmp_path, rng, random_tree(rng, 3, 4))
    queries, params = random_queries(rng, bundle, 4), SearchParams.uniform(4, 3, 5)
    for engine in family.engines(bundle):
        before = engine.search(queries, params)
        masks = random_masks(rng, bundle.tree, 4, 0.3)
        engine.search(queries, SearchParams.uniform(4, 40, 50, exclude_BE=rng.integers(0, bundle.tree.item_count, (4, 9))))
        engine.search(queries, SearchParams(np.full(4, 9), np.full(4, 9), trace=True, mask_B=masks))
        assert_same(engine.search(queries, params), before)


# -- masks ----------------------------------------------------------------------------------------------------------------


@each_family
def test_masks_that_pass_nothing_that_do_not_fit_and_that_are_let_go(tmp_path: Path, family: Family) -> None:
    rng = np.random.default_rng(2)
    bundle = family.make(tmp_path, rng, random_tree(rng, 3, 2, ragged=False))
    queries, small = random_queries(rng, bundle, 2), NodeMask(np.ones(3, np.bool_), 1)
    opened: list[Engine] = [*family.engines(bundle), ReferenceEngine(bundle)]
    for engine in opened:
        mask = NodeMask(np.zeros(bundle.tree.node_count, np.bool_), 0)
        result = engine.search(queries, SearchParams.uniform(2, 4, 6, mask=mask))
        assert_array_equal(result.item_rows_BM, np.full((2, 6), -1))
        assert_array_equal(result.scores_BM, np.zeros((2, 6)))
        assert result.complete_B.all()
        with pytest.raises(InvalidQuery, match=r"mask_B: got '1 masks', expected 2, one per query"):
            engine.search(queries, SearchParams(np.array([2, 2]), np.array([2, 2]), mask_B=(None,)))
        with pytest.raises(InvalidQuery, match=r"mask_B: got 'bool\[3\]', expected bool\[15\]"):
            engine.search(queries, SearchParams.uniform(2, 2, 2, mask=small))
        alive = weakref.ref(mask)
        del mask
        assert alive() is None


# -- which bundles and queries --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slope", [np.full(6, 0.5), np.array([2, 0.25, -1, 1, 0, 0.5])])
def test_prelu_is_rewritten_exactly(tmp_path: Path, slope: Array) -> None:
    rng = np.random.default_rng(5)
    bundle = make_bundle(tmp_path, rng, random_tree(rng, 5, 2), slope=slope.astype(np.float32))
    queries, params = random_queries(rng, bundle, 3), SearchParams.uniform(3, 4, 6)
    expected = ReferenceEngine(bundle).search(queries, params)
    for name in ("onnx-cpu", "compiled-cpu"):
        assert_array_equal(open_engine(bundle, engine=name).search(queries, params).ranks_BM, expected.ranks_BM)


def test_a_trace_takes_memory_for_what_was_scored_and_no_more(tmp_path: Path) -> None:
    """One request with `explain` over a forest of many leaves took gigabytes: arrays as wide on all levels as the leaves are many."""
    rng = np.random.default_rng(8)
    children = [[2] * 2**h for h in range(7)] + [[25] * 2**7]
    tree = tree_from_children(children, rng.permutation(25 * 2**7))
    bundle = make_linear_bundle(tmp_path, rng, tree, Ranking(own="log_activation", gamma=1), integer=False)
    engine, queries, params = open_engine(bundle, "cpu"), random_queries(rng, bundle, 8), SearchParams.uniform(8, 200, 10)
    plain = engine.search(queries, params)
    tracemalloc.start()
    traced = engine.search(queries, replace(params, trace=True))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert_array_equal(traced.item_rows_BM, plain.item_rows_BM)
    scored = sum(level.candidates_BC.size for level in traced.traces[0])
    assert scored == 8 * tree.leaf_count
    assert peak < 3 * 12 * scored, "12 bytes for each node that was scored, and room for the levels of one query"


def test_queries_and_engines_must_be_the_bundles(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    tree, one = random_tree(rng, 2, 4), SearchParams.uniform(1, 1, 1)
    linear, dense = linear_bundle(tmp_path, rng, tree), make_bundle(tmp_path, rng, tree, "vector")
    assert open_engine(linear).name == open_engine(linear, "cpu").name == "sparse-cpu"
    with pytest.raises(InvalidQuery, match=r"queries: got .*width=21.*expected .*width=20"):
        open_engine(linear).search(blank_queries(FeaturesKind(width=21), 1), one)
    with pytest.raises(InvalidQuery, match=r"queries: got .*, expected .*features"):
        open_engine(linear).search(random_queries(rng, dense, 1), one)
    with pytest.raises(InvalidQuery, match=r"queries: got .*features.*, expected kind='vector'"):
        open_engine(dense, "cpu", "onnx-cpu").search(random_queries(rng, linear, 1), one)
    with pytest.raises(
        DeviceUnavailable, match="onnx-cpu cannot search linear, which has linear scorers: expected one of sparse-cuda, sparse-cpu"
    ):
        open_engine(linear, engine="onnx-cpu")
    with pytest.raises(DeviceUnavailable, match="sparse-cpu cannot search tiny, which has graphs scorers: expected one of triton, onnx"):
        open_engine(dense, engine="sparse-cpu")


# -- the beams above the leaves, and queries that somebody else has encoded -------------------------------------------------


@settings(max_examples=10)
@each_family
@given(data=st.data(), trace=st.booleans(), block=st.sampled_from([1, 1 << 20]))
def test_the_eligible_children_of_a_frontier_are_the_leaves_that_were_scored(
    tmp_path_factory: pytest.TempPathFactory, family: Family, data: st.DataObject, trace: bool, block: int
) -> None:
    """In every tree and on every engine, with ranks that the leaves' own follow from; and the result is that of a search."""
    bundle, queries, params = family.draw(tmp_path_factory.mktemp("models"), data.draw(family.shapes), True)
    reference, gamma = ReferenceEngine(bundle), bundle.manifest.ranking.gamma
    for engine in family.engines(bundle):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pipeline, "BLOCK", block)
            found = engine.parents(queries, replace(params, trace=trace))
        assert_same(found, engine.search(queries, params))
        for place, (alone, frontier) in enumerate(zip(bundle.alone, found.frontiers, strict=True)):
            for b in range(len(queries)):
                *above, last = reference.steps(queries, params, b, t=place)
                nodes_K = frontier.nodes_BK[b][frontier.nodes_BK[b] >= 0]
                eligible_N = reference.eligible_nodes(queries, params, b, place).eligible_N
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
@given(shape=shapes)
def test_queries_that_are_encoded_already_find_the_same(tmp_path_factory: pytest.TempPathFactory, shape: Shape) -> None:
    bundle, queries, params = draw(tmp_path_factory.mktemp("models"), shape, integer=True)
    given = GivenQueries(queries.kind, queries.rows, ReferenceEngine(bundle).states(queries), frontier=True)
    for engine in GRAPHS.engines(bundle):
        found, parents = engine.search(given, params), engine.parents(queries, params)
        assert_same(found, parents)
        assert_array_equal(found.frontiers[0].nodes_BK, parents.frontiers[0].nodes_BK)
        assert engine.search(replace(given, frontier=False), params).frontiers == ()


@pytest.mark.parametrize("gamma", [0.0, 0.5])
def test_histories_beside_states_are_read_by_a_memory_alone(tmp_path: Path, gamma: float) -> None:
    rng = np.random.default_rng(6)
    tree, params = random_tree(rng, 3, 3), SearchParams.uniform(2, 3, 4)
    for memory in (None, random_memory(rng, tree.item_count, 2)):
        bundle = make_bundle(tmp_path / str(memory is None), rng, tree, "product", gamma, memory=memory)
        known = random_queries(rng, bundle, 2)
        unknown = QueryBatch(known.kind, known.array + 1000)
        states_BLS = ReferenceEngine(bundle).states(known)
        for engine in GRAPHS.engines(bundle):
            if memory is None:
                found = engine.search(GivenQueries(known.kind, unknown.rows, states_BLS), params)
                assert_same(found, engine.search(known, params))
            else:
                with pytest.raises(InvalidQuery, match="item rows from 0 to"):
                    engine.search(GivenQueries(known.kind, unknown.rows, states_BLS), params)


def test_states_for_linear_scorers_or_of_another_shape_are_refused(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    tree = random_tree(rng, 3, 3)
    bundle, linear = make_bundle(tmp_path, rng, tree), linear_bundle(tmp_path, rng, tree)
    queries, own, params = random_queries(rng, bundle, 2), random_queries(rng, linear, 2), SearchParams.uniform(2, 3, 4)
    for shape in ((2, 4, 5), (1, 4, 6), (2, 3, 6)):
        with pytest.raises(InvalidQuery, match=r"states_BLS: .* expected float32\[2, 4, 6\]"):
            open_engine(bundle).search(GivenQueries(queries.kind, queries.rows, np.zeros(shape, np.float32)), params)
    with pytest.raises(InvalidQuery, match="linear scorers have none"):
        open_engine(linear).search(GivenQueries(own.kind, own.rows, np.zeros((2, 4, 6), np.float32)), params)
