"""The states of histories with live items: those of query.onnx over all node rows and the live ones; other graphs are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.testing import assert_array_equal
from onnx import helper, numpy_helper

from benchmarks.random_bundles import make_bundle, product_graphs, random_queries, random_tree
from benchmarks.random_live import random_state
from espalier.engines import open_engine
from espalier.engines.histories import histories_of
from espalier.engines.live_encoder import LiveEncoder
from espalier.engines.reference import ReferenceEngine
from espalier.errors import InvalidQuery, UnsupportedGraph
from espalier.manifest import InnerProductForm
from espalier.queries import QueryBatch
from espalier.search import SearchParams


def test_unknown_items_are_left_out_and_the_others_move_up(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    bundle = make_bundle(tmp_path, rng, random_tree(rng, 3, 3), "product")
    overlay = random_state(rng, bundle, new=8, deleted=2, changed=2).overlay()
    items, dead = overlay.items, int(np.flatnonzero(~overlay.leaf_R & (overlay.item_R >= overlay.items))[0])
    live = int(np.flatnonzero(overlay.leaf_R & (overlay.item_R >= items))[0])
    moved, deleted = int(overlay.row_W[0]), int(np.setdiff1d(overlay.hidden, overlay.row_W)[0])
    rows_BT = np.array([[-1, items + live, items + dead, moved, deleted]] * 3)
    frozen_B = np.array([False, True, False])
    histories = histories_of(overlay, rows_BT, frozen_B, countable=True)
    assert histories.rows_BT[0].tolist() == histories.rows_BT[2].tolist() == [-1, -1, items + live, moved, deleted]
    assert histories.rows_BT[1].tolist() == [-1, -1, -1, moved, deleted]
    handle = int(overlay.handle_I[moved])
    assert histories.handles_BT.tolist() == [[-1, -1, live, handle, -1], [-1] * 5, [-1, -1, live, handle, -1]]
    trained = histories_of(overlay, rows_BT, None, countable=False)
    assert trained.rows_BT.tolist() == [[-1, -1, -1, moved, deleted]] * 3
    assert (trained.handles_BT == -1).all()
    with pytest.raises(InvalidQuery, match=f"queries: got {items + overlay.handles}, expected item rows from 0 to"):
        histories_of(overlay, np.full_like(rows_BT, items + overlay.handles), None, countable=True)


def scaled_by_node_rows(query: onnx.ModelProto) -> onnx.ModelProto:
    """Adds the largest of all node rows to the states."""
    return _with_summand(query, [helper.make_node("ReduceMax", ["node_rows"], ["summand"], keepdims=0)])


def with_a_table_of_its_own(query: onnx.ModelProto) -> onnx.ModelProto:
    """Adds numbers that the graph keeps by node."""
    table = numpy_helper.from_array(np.arange(5000, dtype=np.float32), "table")
    query.graph.initializer.append(table)
    nodes = [
        helper.make_node("Gather", ["table", "safe"], ["of_nodes"]),
        helper.make_node("ReduceSum", ["of_nodes"], ["summand"], keepdims=0),
    ]
    return _with_summand(query, nodes)


def _with_summand(query: onnx.ModelProto, nodes: list[onnx.NodeProto]) -> onnx.ModelProto:
    last = query.graph.node[-1]
    last.output[0] = "before"
    query.graph.node.extend([*nodes, helper.make_node("Add", ["before", "summand"], ["query_state"])])
    return query


@pytest.mark.parametrize(
    ("changed", "reason"), [(scaled_by_node_rows, "ReduceMax reads node_rows"), (with_a_table_of_its_own, "other states over a part")]
)
def test_live_items_are_unknown_in_histories_to_graphs_that_do_more_than_look_rows_up(
    tmp_path: Path, changed: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    rng = np.random.default_rng(3)
    query, scorer = product_graphs(rng, 4, True)
    graphs = changed(onnx.load_from_string(query)).SerializeToString(), scorer
    bundle = make_bundle(tmp_path, rng, random_tree(rng, 4, 4), "product", graphs=graphs, state_dim=4, form=InnerProductForm())
    with pytest.raises(UnsupportedGraph, match=reason):
        LiveEncoder(bundle)
    engine, overlay = open_engine(bundle, engine="onnx-cpu"), random_state(rng, bundle).overlay()
    engine.set_overlay(overlay)
    assert "live items do not count in histories" in caplog.text
    known = random_queries(rng, bundle, 3)
    with_live = QueryBatch(known.kind, np.append(known.array[:, 1:], np.full((3, 1), overlay.items), axis=1))
    without = QueryBatch(known.kind, np.append(np.full((3, 1), -1), known.array[:, 1:], axis=1))
    params = SearchParams.uniform(3, 5, 10)
    assert_array_equal(engine.search(with_live, params).ranks_BM, engine.search(without, params).ranks_BM)
    assert not np.array_equal(engine.search(without, params).ranks_BM, ReferenceEngine(bundle).search(without, params).ranks_BM)
