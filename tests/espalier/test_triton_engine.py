"""The `triton` engine, in Triton's interpreter: it searches as the reference does. Its kernels are compiled for a GPU as well.

What only a GPU can show (CUDA graphs, the compiled kernels' answers, times) is for `python -m benchmarks.gpu_all`.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from numpy.typing import NDArray

from benchmarks.gpu.beams import wrong_parents
from benchmarks.random_bundles import make_bundle, random_masks, random_memory, random_queries, random_tree
from benchmarks.trained_bundles import trained_kind
from espalier.bundle import Bundle
from espalier.bundle_writer import write_bundle
from espalier.engines.pipeline import Pipeline
from espalier.engines.stages import GivenQueries, TreeQuery
from espalier.errors import DeviceUnavailable, UnsupportedGraph
from espalier.masks.eligibility import eligible_nodes, unrestricted_mask
from espalier.memory import Memory
from espalier.queries import HistoryKind, QueryBatch, pad_histories
from espalier.search import NodeMask, Precision, SearchParams
from espalier.tree import complete_tree
from tests.espalier.bundle.parts import content_of, draft_of
from tests.espalier.compile_kernels import Recorder, compiled_elsewhere
from tests.espalier.test_signature import assert_alone_as_together, assert_best_beams, assert_same, draw, shapes

if importlib.util.find_spec("triton") is None:  # there are no wheels of it outside Linux
    pytest.skip("triton is not installed", allow_module_level=True)

import triton
import triton.language as tl

from espalier.engines.reference import ReferenceEngine
from espalier.engines.triton import cells as gpu_cells
from espalier.engines.triton import graph_engine as gpu
from espalier.engines.triton.cells import FixedShapes, Tuning
from espalier.engines.triton.gpu_engine import refuse_what_does_not_fit
from espalier.engines.triton.graph_engine import TritonSearch, device_bytes
from espalier.engines.triton.kernels.numbers import log_sigmoid

pytestmark = pytest.mark.slow

SHAPES, ONE = FixedShapes(batches=(2, 4), m_sizes=(8, 64), excluded=16), FixedShapes(batches=(1,), m_sizes=(64,))
BITS = st.sampled_from([1, 2, 4])


def search_of(bundle: Bundle, precision: Precision = "float32", **tuning: int) -> TritonSearch:
    return TritonSearch(bundle, "cpu", precision, SHAPES, Tuning(tile=16, **tuning))


def engine_of(bundle: Bundle, precision: Precision = "float32", **tuning: int) -> Pipeline:
    return Pipeline(bundle, search_of(bundle, precision, **tuning))


@settings(max_examples=12)
@given(shape=shapes, bits=BITS, whole=st.sampled_from([128, 4096]), busy=st.sampled_from([1, 2048]))
def test_it_equals_the_reference_exactly_with_integer_weights(
    tmp_path_factory: pytest.TempPathFactory, shape: dict[str, Any], bits: int, whole: int, busy: int
) -> None:
    bundle, queries, params = draw(tmp_path_factory.mktemp("models"), shape, integer=True)
    engine, reference = engine_of(bundle, bits=bits, whole=whole, busy_tiles=busy), ReferenceEngine(bundle)
    expected = reference.search(queries, params)
    assert_same(engine.search(queries, params), expected)
    assert wrong_parents(engine, bundle, queries, params) == []
    assert_same(engine.search(GivenQueries(queries.kind, queries.rows, reference.states(queries)), params), expected)


def test_queries_that_bring_states_stand_beside_those_that_do_not(tmp_path: Path) -> None:
    """In one call, under beams of several buckets; rows of states that are not meant are not looked at."""
    rng = np.random.default_rng(3)
    bundle = make_bundle(tmp_path, rng, random_tree(rng, 4, 3), gamma=0.5)
    queries, params = random_queries(rng, bundle, 6), SearchParams(np.array([2, 2, 3, 9, 9, 9]), np.array([4, 1, 6, 6, 9, 2]))
    eligible = eligible_nodes(bundle.tree, params, unrestricted_mask(bundle.tree))
    query = TreeQuery(queries, None, params.beam_size_B, params.m_B, (eligible,), frontier=True)
    encoded_B, states_BLS = np.array([True, False, True, False, True, False]), ReferenceEngine(bundle).states(queries)
    states_BLS[~encoded_B] = np.nan
    search = search_of(bundle)
    alone, beside = search.search(query), search.search(replace(query, states_BLS=states_BLS, encoded_B=encoded_B))
    for name in ("rows_BTM", "ranks_BTM", "keys_BTM", "count_BT", "finite_B", "leaf_states_BS"):
        assert_array_equal(getattr(beside, name), getattr(alone, name))
    assert_array_equal(beside.frontiers[0].nodes_BK, alone.frontiers[0].nodes_BK)
    assert alone.rows_BTM.shape == (6, 1, 9)
    assert_array_equal(alone.count_BT[:, 0], params.m_B)


@pytest.fixture(scope="module")
def exact_dot() -> Iterator[None]:
    """The interpreter's products are BLAS's, in which a row's sum depends on where in a tile it stands; on a GPU it does not."""
    interpreter = importlib.import_module("triton.runtime.interpreter")

    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        product = a.data.astype(np.float64) @ b.data.astype(np.float64)
        return interpreter.TensorHandle((product + d.data).astype(d.data.dtype), d.dtype.scalar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
        yield


@pytest.mark.usefixtures("exact_dot")
@settings(max_examples=6)
@given(shape=shapes, own=st.sampled_from(["logit", "log_activation"]))
def test_kept_beams_are_the_best_with_real_weights_and_answers_those_of_any_batch(
    tmp_path_factory: pytest.TempPathFactory, shape: dict[str, Any], own: Literal["logit", "log_activation"]
) -> None:
    bundle, queries, params = draw(tmp_path_factory.mktemp("models"), shape, integer=False, own=own)
    engine = engine_of(bundle)
    assert_best_beams(engine, bundle, queries, params)
    assert_alone_as_together(engine, queries, params)


def test_more_queries_and_exclusions_than_a_cell_has_room_for(tmp_path: Path) -> None:
    """Exclusions scattered and in whole subtrees, beside queries with few or none, with and without masks."""
    rng = np.random.default_rng(11)
    tree = random_tree(rng, 7, 2, ragged=False, empty_share=0.1)
    bundle = make_bundle(tmp_path, rng, tree, gamma=0.5)
    exclude_BE = np.full((6, 40), -1)
    for row, count in zip(exclude_BE, (0, 3, 16, 17, 40, 40), strict=True):
        row[:count] = rng.permutation(tree.item_count)[:count]
    held = tree.leaf_item[:60]
    exclude_BE[4] = held[held >= 0][:40]
    masks = (None, None, None, None, *random_masks(rng, tree, 2, 0.5))
    params = SearchParams(rng.integers(1, 40, 6), rng.integers(1, 200, 6), exclude_BE, mask_B=masks)
    queries = random_queries(rng, bundle, 6)
    got, expected = engine_of(bundle).search(queries, params), ReferenceEngine(bundle).search(queries, params)
    assert_array_equal(got.item_rows_BM, expected.item_rows_BM)
    assert_array_equal(got.count_B, expected.count_B)
    assert_array_equal(got.complete_B, expected.complete_B)


def test_nodes_and_leaves_are_chosen_by_key_and_ranks_go_down(tmp_path: Path) -> None:
    """Item 0 remembers item 3, by far. Another query of the call remembers nothing, and one excludes what it remembers."""
    tree = complete_tree(np.arange(64), 2)
    entries = np.array([3, 5, 60], np.int32), np.array([40, 1, 20], np.float32)
    memory = Memory(np.append(0, np.full(64, 3)), *entries, np.array([1, 0.5], np.float32), 2.0)
    bundle = make_bundle(tmp_path, np.random.default_rng(1), tree, gamma=0.5, memory=memory)
    queries = pad_histories(HistoryKind(length=5), [np.array([0]), np.array([7]), np.array([0])])
    params = SearchParams(np.full(3, 1), np.full(3, 2), np.array([[-1], [-1], [3]]), trace=True)
    expected, got = ReferenceEngine(bundle).search(queries, params), engine_of(bundle).search(queries, params)
    assert_same(got, expected)
    assert got.item_rows_BM[0, 0] == 3
    assert 3 not in got.item_rows_BM[1:]
    assert got.keys_BM[0, 0] == got.ranks_BM[0, 0] + 80
    assert_array_equal(got.keys_BM[1], got.ranks_BM[1])
    assert got.trace is not None
    for level in got.trace:
        remembered = tree.ancestors(np.array([tree.leaf_of_item[3]]))[0, level.level]
        assert remembered in level.nodes_BK[0]
        at = level.nodes_BK[0] == remembered
        assert level.keys_BK[0, at] == level.ranks_BK[0, at] + 80


def test_memory_lists_of_any_length_go_to_the_device_and_rows_past_a_call_have_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first call needs more room than there is; a later one leaves a row of its cell empty, whose old addresses are gone."""
    monkeypatch.setattr("espalier.engines.triton.device_lists.ROOM", 2)
    rng = np.random.default_rng(7)
    tree = complete_tree(rng.permutation(64), 2)
    memory = random_memory(rng, tree.item_count, 5)
    bundle = make_bundle(tmp_path, rng, tree, memory=replace(memory, weight=memory.weight + 1))
    search, queries = search_of(bundle), pad_histories(HistoryKind(length=5), [np.arange(5), np.arange(20, 25)])
    engine = Pipeline(bundle, search)
    for batch in (queries, queries.take(np.array([1])), queries):
        params = SearchParams.uniform(len(batch), 4, 8)
        assert_same(engine.search(batch, params), ReferenceEngine(bundle).search(batch, params))
        listed_B3 = search.cell(2, 2, 8).inputs["memory"].numpy()
        assert (listed_B3[: len(batch), 2] > 1).all()
        assert not listed_B3[len(batch) :].any()


def test_without_a_memory_kernels_have_none(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path, np.random.default_rng(7), complete_tree(np.arange(8), 2))
    cell = search_of(bundle).cell(1, 1, 4)
    assert not cell.memory
    assert "memory" not in cell.inputs
    beam = gpu_cells.Beam(1, 4, torch.device("cpu"), cell.memory)
    assert beam.keys is beam.ranks


@pytest.mark.parametrize(
    ("kind", "hidden"),
    [("product", (32,)), ("product", ()), ("mlp", (128, 64, 24)), ("mlp", (20,)), ("mlp", (18, 17, 20, 5)), ("sequence", ())],
)
def test_the_scorers_that_training_exports(tmp_path: Path, kind: str, hidden: tuple[int, ...]) -> None:
    rng = np.random.default_rng(5)
    bundle = trained_kind(tmp_path, kind, hidden, rng)
    queries, params = random_queries(rng, bundle, 3), SearchParams(np.array([1, 4, 9]), np.array([3, 20, 7]))
    got, expected = engine_of(bundle).search(queries, params), ReferenceEngine(bundle).search(queries, params)
    assert_allclose(got.ranks_BM, expected.ranks_BM, rtol=0, atol=engine_of(bundle).rounding)
    assert_array_equal(got.item_rows_BM, expected.item_rows_BM)


# The interpreter cannot multiply matrices of bfloat16.
@pytest.mark.parametrize(("kind", "precision"), [("product", "float16"), ("product", "bfloat16"), ("mlp", "float16")])
def test_lower_precision_stays_within_its_rounding(tmp_path: Path, kind: str, precision: Precision) -> None:
    rng = np.random.default_rng(5)
    bundle = trained_kind(tmp_path, kind, (32,), rng)
    queries, params = random_queries(rng, bundle, 4), SearchParams.uniform(4, 27, 27)  # nothing is dropped
    engine = engine_of(bundle, precision)
    exact, got = ReferenceEngine(bundle).search(queries, params), engine.search(queries, params)
    for b in range(len(queries)):
        assert sorted(exact.item_rows_BM[b]) == sorted(got.item_rows_BM[b])
        by_item = [result.ranks_BM[b][np.argsort(result.item_rows_BM[b])] for result in (exact, got)]
        assert 0 < np.abs(by_item[0] - by_item[1]).max() < engine.rounding


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_rows_of_int8_are_the_same_numbers_in_every_precision(tmp_path: Path, precision: Precision) -> None:
    rng = np.random.default_rng(6)
    bundle = make_bundle(tmp_path, rng, random_tree(rng, 4, 3), "product", dtype="int8", integer=False)
    rows_ND = search_of(bundle, precision).node_rows_ND
    assert_array_equal(rows_ND.float().numpy(), np.asarray(bundle.node_rows_ND, np.float32))


@pytest.mark.parametrize("slope", [np.full((1, 1, 6), 0.5), np.array([0.5, 0.25, -1, 1, 0, 2])])
def test_slopes_by_channel(tmp_path: Path, slope: NDArray[Any]) -> None:
    rng = np.random.default_rng(5)
    bundle = make_bundle(tmp_path, rng, random_tree(rng, 5, 2), slope=slope.astype(np.float32))
    queries, params = random_queries(rng, bundle, 3), SearchParams.uniform(3, 4, 6)
    assert_array_equal(engine_of(bundle).search(queries, params).ranks_BM, ReferenceEngine(bundle).search(queries, params).ranks_BM)


def test_warm_up_builds_every_cell_that_a_query_may_need(tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    bundle = make_bundle(tmp_path, rng, random_tree(rng, 3, 2), max_beam_size=10, max_m=12)
    search = search_of(bundle)
    engine = Pipeline(bundle, search)
    engine.warm_up()
    warm = search.cell_count
    for exclude_BE in (None, rng.integers(0, bundle.tree.item_count, (4, 3))):
        params = SearchParams(rng.integers(1, 11, 4), rng.integers(1, 13, 4), exclude_BE, mask_B=random_masks(rng, bundle.tree, 4, 0.5))
        engine.search(random_queries(rng, bundle, 4), params)
    assert search.cell_count == warm > 0
    engine.close()
    engine.close()
    assert search.cell_count == 0


def test_a_mask_is_not_kept_alive_by_the_engine(tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    bundle = make_bundle(tmp_path, rng, random_tree(rng, 4, 2))
    engine, mask = engine_of(bundle), NodeMask(np.ones(bundle.tree.node_count, np.bool_), bundle.tree.item_count)
    engine.search(random_queries(rng, bundle, 1), SearchParams.uniform(1, 4, 4, mask=mask))
    alive = weakref.ref(mask)
    del mask
    assert alive() is None


def test_a_bundle_that_does_not_fit_is_refused_with_figures(tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    bundle = make_bundle(tmp_path, rng, complete_tree(rng.permutation(64), 2), width=16)  # 127 nodes
    needed = device_bytes(bundle, "float16")
    assert needed == 127 * 16 * 2 + 4 * (64 + 64) < device_bytes(bundle, "float32")
    refuse_what_does_not_fit(bundle, needed, "its rows", needed, 10**9)
    with pytest.raises(
        DeviceUnavailable, match=r"tiny version 1 needs 0\.00 GB on the GPU, for its rows and the tree; 0\.00 of its 1\.00 GB"
    ):
        refuse_what_does_not_fit(bundle, needed, "its rows", needed - 1, 10**9)


@pytest.mark.parametrize(
    ("kind", "hidden", "reason"),
    [
        ("attention", (16,), r"declares no form of scorer\.onnx"),
        ("mlp", (16,) * 5, r"5 hidden layers, at most 4 are known"),
        ("mlp", (512, 256), "a layer of 512 × 256 weights"),
    ],
)
def test_a_scorer_that_it_does_not_know_is_left_to_another_engine(tmp_path: Path, kind: str, hidden: tuple[int, ...], reason: str) -> None:
    bundle = trained_kind(tmp_path, kind, hidden, np.random.default_rng(5))
    with pytest.raises(UnsupportedGraph, match=reason):
        TritonSearch(bundle, "cpu")


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning", "ignore:invalid value encountered:RuntimeWarning")
def test_what_is_no_number_is_no_result(tmp_path: Path) -> None:
    """A rank that overflowed has no place in any order; without care it would bring a former query's items back."""
    rng = np.random.default_rng(5)
    bundle = make_bundle(tmp_path, rng, complete_tree(rng.permutation(64), 2), kind="vector", integer=False)
    engine, params = engine_of(bundle), SearchParams.uniform(1, 64, 64)
    assert engine.search(random_queries(rng, bundle, 1, False), params).count_B[0] == 64
    huge = QueryBatch(bundle.manifest.query, np.array([[3e38, -3e38, 3e38, -3e38]], np.float32))
    result, fresh = engine.search(huge, params), engine_of(bundle).search(huge, params)
    assert 0 < result.count_B[0] < 64
    assert not np.isnan(result.ranks_BM).any()
    assert_array_equal(result.item_rows_BM, fresh.item_rows_BM)


def test_more_results_than_the_grid_has(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    bundle = make_bundle(tmp_path, rng, complete_tree(rng.permutation(128), 2), max_m=100, max_beam_size=3)
    search = search_of(bundle)
    engine = Pipeline(bundle, search)
    engine.prepare(SearchParams.uniform(1, 3, 100))
    prepared = search.cell_count
    queries = random_queries(rng, bundle, 1)
    for m in (65, 90, 100):
        expected = ReferenceEngine(bundle).search(queries, SearchParams.uniform(1, 3, m))
        assert_array_equal(engine.search(queries, SearchParams.uniform(1, 3, m)).item_rows_BM, expected.item_rows_BM)
    assert search.cell_count == prepared == 1


@pytest.mark.parametrize("sizes", [{"bits": 3}, {"whole": 1 << 16}])
def test_sizes_that_would_change_answers_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="expected 1, 2 or 4"):
        Tuning(**sizes)


@triton.jit  # type: ignore[untyped-decorator]
def log_sigmoid_kernel(x_N: Any, out_N: Any, count: Any, TILE: tl.constexpr) -> None:
    n = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tl.store(out_N + n, log_sigmoid(tl.load(x_N + n, mask=n < count, other=0.0)), mask=n < count)


def test_the_log_of_the_sigmoid_is_exact_far_from_0() -> None:
    """log(1 + e^−x) is 0 from 16.7 on in float32, where log1p goes on falling; compared with float64, in shares of the result."""
    x_N = torch.linspace(-120, 86, 9001)
    out_N = torch.empty_like(x_N)
    log_sigmoid_kernel[(triton.cdiv(len(x_N), 256),)](x_N, out_N, len(x_N), 256)
    exact = -np.logaddexp(0, -x_N.numpy().astype(np.float64))
    assert_allclose(out_N.numpy(), exact, rtol=5e-7, atol=0)
    assert len(np.unique(out_N.numpy()[x_N.numpy() > 17])) > 2000, "nodes of large logits keep their order"


@pytest.mark.parametrize("large", [20.0, 60.0])
def test_large_logits_keep_their_order_in_path_products(tmp_path: Path, large: float) -> None:
    """Logits of 17 and more have sigmoids that are 1 in float32, but logs of them that differ."""
    tree = complete_tree(np.arange(4), 2)
    bundle = make_bundle(tmp_path, np.random.default_rng(5), tree, "vector", 1.0, "log_activation", width=1)
    rows_ND = np.array([[0], [1], [1], [0.95], [1], [0.9], [0.99]], np.float32)
    bundle = write_bundle(tmp_path / "tiny" / "2", draft_of(bundle), content_of(bundle, stored_rows=rows_ND))
    queries, params = QueryBatch(bundle.manifest.query, np.array([[large]], np.float32)), SearchParams.uniform(1, 4, 4)
    assert engine_of(bundle).search(queries, params).item_rows_BM.tolist() == [[1, 3, 0, 2]]
    assert ReferenceEngine(bundle).search(queries, params).item_rows_BM.tolist() == [[1, 3, 0, 2]]


# -- the compiler ---------------------------------------------------------------------------------------------------------


def test_the_kernels_compile_for_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel, as a search launches it, with each form of scorer and precision, for a Hopper GPU; none spills registers."""
    launches: list[dict[str, Any]] = []
    for module, kernels in (
        (gpu, ("history_nodes_kernel", "rank_level_kernel", "score_children_kernel", "score_levels_kernel")),
        (gpu_cells, ("order_kernel", "select_kernel")),
    ):
        for name in kernels:
            monkeypatch.setattr(module, name, Recorder(getattr(module, name), launches))
    matmul = sys.modules["espalier.engines.triton.kernels.matmul"]
    monkeypatch.setattr(matmul, "matmul_kernel", Recorder(matmul.matmul_kernel, launches))
    rng = np.random.default_rng(5)
    precisions: tuple[Precision, ...] = ("float32", "float16")
    for place, (kind, hidden) in enumerate([("product", (32,)), ("mlp", (128, 64, 24))]):
        bundle = trained_kind(tmp_path, kind, hidden, rng, name=f"m{place}")
        memory = random_memory(rng, bundle.tree.item_count, 3, False)
        remembering = write_bundle(bundle.path.with_name("2"), draft_of(bundle), content_of(bundle, memory=memory))
        for each, precision in itertools.product((bundle, remembering), precisions):
            engine = Pipeline(each, TritonSearch(each, "cpu", precision, ONE))
            engine.search(random_queries(rng, each, 1), SearchParams.uniform(1, 5, 9))
    ragged = make_bundle(tmp_path, rng, random_tree(rng, 4, 3, empty_share=0.2), own="log_activation", gamma=1.0)
    Pipeline(ragged, TritonSearch(ragged, "cpu", shapes=ONE)).search(random_queries(rng, ragged, 1), SearchParams.uniform(1, 5, 9))
    wide = make_bundle(tmp_path, rng, complete_tree(rng.permutation(32), 32), name="wide")
    several = Pipeline(wide, TritonSearch(wide, "cpu", shapes=ONE, tuning=Tuning(whole=16, busy_tiles=1, bits=1)))
    several.search(random_queries(rng, wide, 1), SearchParams.uniform(1, 5, 9))
    launches += [json.loads(json.dumps(launch).replace('"*fp16"', '"*bf16"')) for launch in launches]
    assert {launch["kernel"] for launch in launches} >= {"select_kernel", "matmul_kernel", "rank_level_kernel", "history_nodes_kernel"}
    # One launch of each kernel with each type of arguments and scorer: the others differ in sizes.
    distinct = {}
    for launch in launches:
        names = ("S0", "UNIFORM", "GATHERED", "LOG_ACTIVATION", "WHOLE", "BITS", "TILES", "MEMORY")
        form = {name: value for name, value in launch["constants"].items() if name in names}
        distinct[launch["kernel"], str(form), str(launch["types"])] = launch
    with_and_without = {kernel for kernel, form, _ in distinct if "'MEMORY': True" in form} & {
        kernel for kernel, form, _ in distinct if "'MEMORY': False" in form
    }
    assert with_and_without == {"score_children_kernel", "select_kernel", "order_kernel"}
    for entry in compiled_elsewhere(list(distinct.values()), tmp_path):
        assert entry["stack_bytes"] <= 64, entry
