"""Searches of the ONNX engine with a memory or a sequence encoder, beyond the signature test: calls in a row, limits, float32's end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import helper

from espalier.bundle import Bundle
from espalier.bundle_writer import write_bundle
from espalier.checks.random_bundles import graph_model, linear_graphs, make_bundle, random_memory, random_queries, random_tree
from espalier.engines import open_engine
from espalier.engines.onnx import engine as onnx_engine
from espalier.engines.onnx.engine import FixedShapes, OnnxEngine
from espalier.engines.reference import ReferenceEngine
from espalier.errors import BundleCorrupt
from espalier.memory import Memory
from espalier.queries import PADDING, QueryBatch
from espalier.search import SearchParams
from espalier.tree import complete_tree
from tests.espalier.bundle.parts import content_of, draft_of
from tests.espalier.test_signature import SMALL_SHAPES, assert_same


def remembering(folder: Path) -> Bundle:
    rng = np.random.default_rng(3)
    tree = random_tree(rng, 5, 2, empty_share=0.1)
    return make_bundle(folder, rng, tree, gamma=0.5, memory=random_memory(rng, tree.item_count, 4), encoder="sequence")


@pytest.mark.parametrize("shapes", [None, SMALL_SHAPES])
def test_nothing_of_a_call_is_left_in_the_next(tmp_path: Path, shapes: FixedShapes | None) -> None:
    bundle, rng = remembering(tmp_path), np.random.default_rng(5)
    engine, reference = OnnxEngine(bundle, "cpu", shapes=shapes), ReferenceEngine(bundle)
    for _ in range(12):
        batch = int(rng.integers(1, 5))
        queries = random_queries(rng, bundle, batch)
        exclude_BE = rng.integers(-1, bundle.tree.item_count, (batch, 3)) if rng.random() < 0.5 else None
        params = SearchParams.uniform(batch, 4, 5, exclude_BE)
        assert_same(engine.search(queries, params), reference.search(queries, params))


def test_runs_of_many_queries_are_split_where_their_memory_would_be_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = remembering(tmp_path)
    queries, params = random_queries(np.random.default_rng(1), bundle, 4), SearchParams.uniform(4, 3, 6)
    expected = ReferenceEngine(bundle).search(queries, params)
    for cells, sizes in ((1, [1, 1, 1, 1]), (3 * bundle.tree.node_count, [3, 1]), (4 * bundle.tree.node_count, [4])):
        monkeypatch.setattr(onnx_engine, "MEMORY_CELLS", cells)
        engine = OnnxEngine(bundle, "cpu", shapes=SMALL_SHAPES)
        assert [len(members) for members, _ in engine._groups(params)] == sizes
        assert_same(engine.search(queries, params), expected)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("beam", [1, 4])
@pytest.mark.parametrize("inner", [False, True])
def test_a_node_whose_key_is_not_finite_is_no_candidate(tmp_path: Path, batch: int, beam: int, inner: bool) -> None:
    """Logits and memory are finite; their sums are not, at items 0 and 3, and where `inner` above item 3."""
    tree = complete_tree(np.arange(8), 2)
    large = np.float32(1.6e38)
    memory = Memory(np.append(0, np.full(8, 2)), np.array([0, 3], np.int32), np.full(2, large), np.ones(1, np.float32), 1.0)
    nodes = [
        helper.make_node("GreaterOrEqual", ["history_nodes", "zero"], ["present"]),
        helper.make_node("Cast", ["present"], ["float"], to=onnx.TensorProto.FLOAT),
        helper.make_node("ReduceMax", ["float", "two"], ["query_state"], keepdims=1),
    ]
    one = graph_model(nodes, ["history_nodes", "node_rows"], "query_state", {"zero": np.array(0), "two": np.array([2])}, 1)
    graphs = one, linear_graphs(1)[1]  # logits are node rows
    bundle = make_bundle(tmp_path, np.random.default_rng(1), tree, graphs=graphs, memory=memory, width=1, state_dim=1)
    rows_ND = np.zeros((15, 1), np.float32)
    rows_ND[[7, 10]] = 2.4e38  # the leaves of items 0 and 3
    rows_ND[4] = 3e38 if inner else 0  # the parent of items 2 and 3
    bundle = write_bundle(tmp_path / "tiny" / "2", draft_of(bundle), content_of(bundle, node_rows_ND=rows_ND, memory=memory))
    queries = QueryBatch(bundle.manifest.query, np.array([[PADDING] * 4 + [0]] * batch))
    params = SearchParams.uniform(batch, beam, 8)
    reference, engine = ReferenceEngine(bundle), OnnxEngine(bundle, "cpu", shapes=None if batch == 1 else SMALL_SHAPES)
    expected, got = reference.search(queries, params), engine.search(queries, params)
    assert_same(got, expected)
    rows = got.item_rows_BM[0].tolist()
    assert 0 not in rows
    assert 3 not in rows
    assert rows[0] != -1


def test_a_sequence_encoder_that_takes_something_else_is_refused(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    bundle = make_bundle(tmp_path, rng, random_tree(rng, 3, 2))
    wrong = write_bundle(tmp_path / "tiny" / "2", draft_of(bundle), content_of(bundle, encoder="sequence"))
    engine = open_engine(wrong, "cpu")
    with pytest.raises(BundleCorrupt, match=r"query\.onnx: inputs \['history_nodes'\]"):
        engine.search(random_queries(rng, wrong, 1), SearchParams.uniform(1, 2, 2))


def test_a_trace_has_the_keys(tmp_path: Path) -> None:
    bundle = remembering(tmp_path)
    queries, params = random_queries(np.random.default_rng(1), bundle, 2), replace(SearchParams.uniform(2, 4, 5), trace=True)
    expected, got = ReferenceEngine(bundle).search(queries, params), OnnxEngine(bundle, "cpu").search(queries, params)
    assert expected.trace is not None
    assert got.trace is not None
    assert any(np.any(level.keys_BK > level.ranks_BK) for level in got.trace)
    for level, same in zip(got.trace, expected.trace, strict=True):
        assert level.level == same.level
        for b in range(2):
            assert key_of(level.nodes_BK[b], level.keys_BK[b]) == key_of(same.nodes_BK[b], same.keys_BK[b])
            assert key_of(level.candidates_BC[b], level.candidate_keys_BC[b]) == key_of(same.candidates_BC[b], same.candidate_keys_BC[b])


def key_of(nodes: NDArray[np.int64], keys: NDArray[np.float32]) -> dict[int, float]:
    return {int(node): float(key) for node, key in zip(nodes, keys, strict=True) if node >= 0}
