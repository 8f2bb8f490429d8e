"""Golden queries: what engines are compared with when a bundle is opened."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pyarrow as pa
import pytest
from onnx import helper

from benchmarks.random_bundles import graph_model, linear_graphs, make_bundle, random_tree
from espalier.bundle import Bundle
from espalier.bundle_writer import write_bundle
from espalier.checks.golden import verify_golden
from espalier.engines import open_engine
from espalier.engines.onnx.engine import OnnxSearch
from espalier.engines.pipeline import Pipeline
from espalier.errors import (
    BundleCorrupt,
)
from espalier.queries import QueryBatch
from espalier.search import NO_CONTEXT, SearchContext, SearchParams, SearchResult
from tests.espalier.bundle.parts import content_of, draft_of, with_golden


@pytest.mark.parametrize(
    ("margin", "message"), [(np.inf, None), (0.01, "golden query 0 gave other items"), (0.001, "golden queries overlap by 0")]
)
def test_golden_queries_pass_on_their_model_and_refuse_other_weights(
    original: Bundle, tmp_path: Path, margin: float, message: str | None
) -> None:
    bundle = with_golden(original, tmp_path / "1", margin)
    assert verify_golden(bundle, open_engine(bundle, engine="onnx-cpu")) == 1
    if message is not None:
        other = with_golden(original, tmp_path / "2", margin, stored_rows=-np.array(original.node_rows_ND))
        with pytest.raises(BundleCorrupt, match=message):
            verify_golden(other, open_engine(other, engine="onnx-cpu"))


def test_one_differing_item_matters_only_where_the_margin_is_wide(original: Bundle, tmp_path: Path) -> None:
    bundle = with_golden(original, tmp_path / "1", np.inf)
    rows = bundle.golden().column("item_rows").to_pylist()
    absent = next(item for item in range(bundle.tree.item_count) if item not in rows[3])
    rows[3][0] = absent
    many = 30  # copies of the right queries, so that one item in 1,550 lies under the tolerance
    golden = pa.concat_tables([bundle.golden(), *[bundle.golden()] * many])
    all_rows = rows + bundle.golden().column("item_rows").to_pylist() * many
    for margin in (0.01, 0.001):  # the engine is within 0.001, so a margin counts from 0.002
        changed = golden.set_column(3, "item_rows", [all_rows]).set_column(5, "margin", [np.full(len(golden), margin)])
        spoilt = write_bundle(tmp_path / str(2 + int(margin < 0.002)), draft_of(bundle), content_of(bundle, golden=changed))
        if margin > 0.002:
            with pytest.raises(BundleCorrupt, match="golden query 3 gave other items on onnx-cpu"):
                verify_golden(spoilt, open_engine(spoilt, engine="onnx-cpu"))
        else:
            assert 0.99 < verify_golden(spoilt, open_engine(spoilt, engine="onnx-cpu")) < 1


def test_a_tie_in_the_only_query_with_a_small_margin_is_no_fault(original: Bundle, tmp_path: Path) -> None:
    bundle = with_golden(original, tmp_path / "1", np.inf)
    golden = pa.concat_tables([bundle.golden()] * 31)
    rows = golden.column("item_rows").to_pylist()
    rows[3][-1] = next(item for item in range(bundle.tree.item_count) if item not in rows[3])
    margin_B = np.where(np.arange(len(golden)) == 3, 0.0, 1.0)
    changed = golden.set_column(3, "item_rows", [rows]).set_column(5, "margin", [margin_B])
    tied = write_bundle(tmp_path / "2", draft_of(bundle), content_of(bundle, golden=changed))
    assert 0.99 < verify_golden(tied, open_engine(tied, engine="onnx-cpu")) < 1


@pytest.mark.parametrize("least", [0.0, 1.0])
def test_a_sequence_encoder_must_have_a_state_for_a_history_without_an_item(tmp_path: Path, least: float) -> None:
    """The mean over a history's places, of which there may be none: 0 / 0, unless at least one is counted."""
    nodes = [
        helper.make_node("GreaterOrEqual", ["history_leaves", "zero"], ["is_item"]),
        helper.make_node("Cast", ["is_item"], ["items"], to=onnx.TensorProto.FLOAT),
        helper.make_node("ReduceSum", ["items", "one"], ["sum"], keepdims=1),
        helper.make_node("Max", ["sum", "least"], ["count"]),
        helper.make_node("Div", ["sum", "count"], ["share"]),
        helper.make_node("Unsqueeze", ["share", "one"], ["column"]),
        helper.make_node("Expand", ["column", "shape"], ["query_state"]),
    ]
    constants = {"zero": np.array(0), "one": np.array([1]), "least": np.array(least, np.float32), "shape": np.array([1, 4, 4])}
    query = graph_model(nodes, ["history_leaves", "node_rows"], "query_state", constants, 4)
    rng = np.random.default_rng(1)
    graphs = query, linear_graphs(4)[1]
    bundle = make_bundle(tmp_path, rng, random_tree(rng, 3, 2), "product", graphs=graphs, state_dim=4, encoder="sequence")
    if least > 0:
        assert verify_golden(bundle, open_engine(bundle, engine="onnx-cpu")) == 1.0
    else:
        with pytest.raises(BundleCorrupt, match="a history without an item finds nothing on onnx-cpu"):
            verify_golden(bundle, open_engine(bundle, engine="onnx-cpu"))


def test_golden_queries_refuse_ranks_that_were_shifted(original: Bundle, tmp_path: Path) -> None:
    bundle = with_golden(original, tmp_path / "1", 0.001)
    engine = open_engine(bundle, engine="onnx-cpu")
    golden = bundle.golden()
    for shift, is_refused in ((0.0015, False), (-0.0015, False), (0.5, True), (-0.5, True), (np.nan, True)):
        ranks = [[rank + shift if b == 7 else rank for rank in row] for b, row in enumerate(golden.column("ranks").to_pylist())]
        spoilt = golden.set_column(4, "ranks", [pa.array(ranks, pa.list_(pa.float32()))])
        if is_refused:
            with pytest.raises(BundleCorrupt, match=r"golden query 7 on onnx-cpu: item row \d+ has rank [-.\d]+, expected \S+ ± \S+"):
                verify_golden(bundle, engine, spoilt)
        else:
            assert verify_golden(bundle, engine, spoilt) == 1
    short = golden.set_column(4, "ranks", [pa.array([row[1:] for row in golden.column("ranks").to_pylist()], pa.list_(pa.float32()))])
    with pytest.raises(BundleCorrupt, match="golden query 0 on onnx-cpu: 4 ranks are stored for 5 items"):
        verify_golden(bundle, engine, short)


def test_golden_queries_refuse_another_order(original: Bundle, tmp_path: Path) -> None:
    """The same items with the same ranks, two of them in each other's place."""
    bundle = with_golden(original, tmp_path / "1", np.inf)

    class Swapping(Pipeline):
        def search(self, queries: QueryBatch, params: SearchParams, context: SearchContext = NO_CONTEXT) -> SearchResult:
            result = super().search(queries, params, context)
            swapped = [0, 2, 1, 3, 4]
            return replace(
                result,
                item_rows_BM=result.item_rows_BM[:, swapped],
                ranks_BM=result.ranks_BM[:, swapped],
                keys_BM=result.keys_BM[:, swapped],
            )

    with pytest.raises(BundleCorrupt, match=r"golden query \d on onnx-cpu: item row \d+ comes after items of lower rank"):
        verify_golden(bundle, Swapping(bundle, OnnxSearch(bundle, "cpu")))
    ranks = bundle.golden().column("ranks").to_pylist()
    tied = [[row[0], row[1], row[1], *row[3:]] for row in ranks]  # equal ranks may come in any order
    equal = bundle.golden().set_column(4, "ranks", [pa.array(tied, pa.list_(pa.float32()))])
    close = OnnxSearch(bundle, "cpu")
    close.rounding = float(np.abs(np.array(ranks)[:, 1] - np.array(ranks)[:, 2]).max())
    assert verify_golden(bundle, Swapping(bundle, close), equal) == 1


def test_a_golden_table_without_its_columns_is_refused(original: Bundle, tmp_path: Path) -> None:
    bundle = with_golden(original, tmp_path / "1", np.inf)
    for column in bundle.golden().column_names:
        version = tmp_path / f"without-{column}"
        broken = write_bundle(version, draft_of(bundle), content_of(bundle, golden=bundle.golden().drop_columns([column])))
        with pytest.raises(BundleCorrupt, match=r"golden\.parquet"):
            verify_golden(broken, open_engine(bundle, engine="onnx-cpu"))
