"""Writing: what is written comes back, whole or not at all, and is found again; golden queries, which engines are compared with."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.testing import assert_array_equal
from onnx import helper

import espalier.bundle_writer as bundle_writer
import espalier.items as items_module
from benchmarks.random_bundles import linear_graphs, make_bundle, make_linear_bundle, query_graph, random_tree
from espalier.bundle import GRAPH_PARTS, Bundle, find_versions, is_model_name
from espalier.bundle_writer import write_bundle
from espalier.checks.golden import verify_golden
from espalier.durable import flush
from espalier.engines import open_engine
from espalier.engines.onnx.engine import OnnxSearch
from espalier.engines.pipeline import Pipeline
from espalier.errors import BundleCorrupt, BundleExists, InvalidTree
from espalier.items import ItemTable
from espalier.manifest import FileInfo, RankerInfo, Ranking
from espalier.node_rows import stored_as
from espalier.queries import QueryBatch
from espalier.rerank.ranker import GOLDEN_SCORES
from espalier.search import NO_CONTEXT, SearchContext, SearchParams, SearchResult
from espalier.shard_parts import ShardParts
from espalier.tree import complete_tree, tree_from_children
from tests.espalier.bundle.parts import content_of, draft_of, reseal, shard_info, with_golden
from tests.file_modes import assert_every_user_can_read, umask
from tests.rankers import weighted_sum, with_ranker


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int8])
def test_what_is_written_comes_back(original: Bundle, tmp_path: Path, dtype: type[np.generic]) -> None:
    draft, content = draft_of(original), content_of(original, stored_rows=stored_as(original.node_rows_ND, dtype))
    written = write_bundle(tmp_path / "tiny" / "1", draft, content)
    opened = Bundle.open(written.path)
    assert opened.manifest == written.manifest
    assert draft_of(opened) == draft
    for name in ("level_offset", "first_child", "leaf_item"):
        assert_array_equal(getattr(opened.tree, name), getattr(content.tree, name))
    assert opened.stored_rows.dtype == dtype
    assert_array_equal(opened.stored_rows, content.stored_rows)
    assert opened.node_rows_ND.shape == original.node_rows_ND.shape
    assert (opened.graph("query.onnx"), opened.graph("scorer.onnx")) == content.graphs[:2]
    assert opened.items.to_table() == content.items.to_table()
    assert (opened.golden(), opened.heldout()) == (content.golden, content.heldout)
    assert sorted(file.name for file in opened.path.iterdir()) == sorted([*GRAPH_PARTS, "manifest.json"])
    assert {name: info.size for name, info in opened.manifest.files.items()} == {
        name: (opened.path / name).stat().st_size for name in GRAPH_PARTS
    }


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_every_user_can_read_what_anybody_has_written(original: Bundle, tmp_path: Path, mask: int) -> None:
    """The container's user is another one than the host's, and safetensors writes for its own user alone."""
    models = tmp_path / "models"
    with umask(mask):
        write_bundle(models / "tiny" / "1", draft_of(original), content_of(original))
        written = Bundle.open(models / "tiny" / "1")
        info = RankerInfo(features=("retrieval.score",), depth=10, max_depth=10)
        with_ranker(written, models / "tiny" / "2", info, b"not opened here", written.golden())
        make_linear_bundle(models, np.random.default_rng(3), complete_tree(np.arange(8), 2), Ranking(own="logit", gamma=0.0))
    assert {"nodes.safetensors", "chunks.safetensors", "ranker.onnx", "items.arrow"} <= {path.name for path in models.rglob("*")}
    assert_every_user_can_read(models)


def test_a_version_is_never_overwritten(original: Bundle, other: Bundle, tmp_path: Path) -> None:
    """Not even an empty folder, or a file; and the model's folder keeps its mode."""
    model = tmp_path / "tiny"
    (model / "2").mkdir(parents=True)
    (model / "3").touch()
    model.chmod(0o750)
    write_bundle(model / "1", draft_of(original), content_of(original))
    before = snapshot(tmp_path)
    for version in ("1", "2", "3"):
        with pytest.raises(BundleExists, match="never overwritten"):
            write_bundle(model / version, draft_of(other), content_of(other))
    assert snapshot(tmp_path) == before
    assert model.stat().st_mode & 0o777 == 0o750


def test_a_version_that_appears_meanwhile_is_not_overwritten(original: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tiny" / "1"

    def appear(file: Path) -> None:
        path.mkdir(exist_ok=True)
        (path / "manifest.json").write_text("theirs")
        flush(file)

    monkeypatch.setattr(bundle_writer, "flush", appear)
    with pytest.raises(BundleExists, match="appeared while"):
        write_bundle(path, draft_of(original), content_of(original))
    assert snapshot(tmp_path) == {"tiny/1/manifest.json": b"theirs"}


STEPS = {
    "tree and nodes": (bundle_writer, "write_safetensors"),
    "items": (items_module.ItemTable, "write"),
    "tables": (pq, "write_table"),
    "checksums": (FileInfo, "of"),
    "flush": (bundle_writer, "flush"),
    "rename": (Path, "rename"),
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("ends", ["fails", "is killed"])
def test_a_writer_that_ends_early_leaves_no_version(
    original: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, ends: str
) -> None:
    """One that fails leaves nothing at all; one that is killed, hidden files."""
    draft, content, model = draft_of(original), content_of(original), tmp_path / "tiny"

    def fail(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        if ends == "is killed":
            broken.setattr(shutil, "rmtree", lambda *_, **__: None)  # a killed process tidies nothing up
        broken.setattr(*STEPS[step], fail)
        with pytest.raises(KeyboardInterrupt):
            write_bundle(model / "1", draft, content)
    left = [file.name for file in model.iterdir()]
    assert (left != []) == (ends == "is killed")
    assert all(name.startswith(".") for name in left)
    assert find_versions(tmp_path) == {}
    write_bundle(model / "1", draft, content)
    assert find_versions(tmp_path) == {"tiny": (1,)}


def test_parts_that_do_not_fit_each_other_are_not_written(original: Bundle, tmp_path: Path) -> None:
    for changed, message in (
        ({"stored_rows": np.zeros((3, 4), np.float32)}, r"node_rows .*got float32\[3, 4\]"),
        ({"items": ItemTable.build(pa.table({"id": ["only"]}))}, r"items\.arrow: 1 items, the tree holds"),
    ):
        with pytest.raises(BundleCorrupt, match=message):
            write_bundle(tmp_path / "1", draft_of(original), content_of(original, **changed))
    assert list(tmp_path.iterdir()) == []


def test_a_tree_whose_padding_more_than_doubles_a_level_is_refused(original: Bundle, tmp_path: Path) -> None:
    def write(counts: list[int], version: int) -> None:
        tree = tree_from_children([[len(counts)], counts], np.arange(sum(counts)))
        rows, items = np.zeros((tree.node_count, 4), np.float32), ItemTable.build(pa.table({"id": [str(i) for i in range(sum(counts))]}))
        changed = content_of(original, tree=tree, stored_rows=rows, items=items, state_levels=tree.height + 1)
        write_bundle(tmp_path / str(version), draft_of(original), changed)

    write([4, 1, 1, 2], 1)  # padded to 16 candidates for 8 nodes: exactly twice
    with pytest.raises(InvalidTree, match=r"level 1: its largest node has 5 children, .* 20 candidates for 9 nodes"):
        write([5, 1, 1, 2], 2)
    assert [file.name for file in tmp_path.iterdir()] == ["1"]


def test_versions_are_found_and_other_names_ignored(original: Bundle, tmp_path: Path) -> None:
    def place(name: str) -> None:
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "manifest.json").touch()

    for name in ("books/1", "books/12", "books/3", "games-2.0/7"):
        place(name)
    junk = ["books/0", "books/01", "books/-1", "books/1.5", "books/v2", "books/２", "books/.4.tmp", "books/4 "]
    junk += ["Upper/1", ".hidden/1", "sp ace/1"]
    for name in junk:
        place(name)
    (tmp_path / "books" / "5").mkdir()  # no manifest
    (tmp_path / "books" / "6").touch()  # a file
    (tmp_path / "README.md").touch()
    (tmp_path / "empty").mkdir()
    assert find_versions(tmp_path) == {"books": (1, 3, 12), "games-2.0": (7,)}
    assert find_versions(tmp_path / "none") == {}


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "A", "é", "-a", "a" * 65, "a\n"])
def test_what_is_no_model_name(name: str) -> None:
    assert not is_model_name(name)
    assert is_model_name("a" * 64)


# -- what goes into a version ---------------------------------------------------------------------------------------------


def test_a_shard_is_written_with_both_of_its_parts_or_with_neither(original: Bundle, tmp_path: Path) -> None:
    items, nodes = original.tree.item_count, original.tree.node_count
    whole, shard = (draft_of(original).model_copy(update={"shard": info}) for info in (None, shard_info(original, items, nodes)))
    parts = ShardParts(np.arange(items), (np.arange(nodes),))
    for draft, given in ((whole, parts), (shard, None)):
        with pytest.raises(BundleCorrupt, match="shard: expected both an entry of the manifest and the items and nodes, or neither"):
            write_bundle(tmp_path / "0" / "1", draft, content_of(original, shard=given))
    with pytest.raises(BundleCorrupt, match="items is not strictly ascending"):
        write_bundle(tmp_path / "0" / "1", shard, content_of(original, shard=ShardParts(np.zeros(items, np.int64), parts.nodes)))
    assert not (tmp_path / "0" / "1").exists()


def test_nothing_but_its_parts_goes_into_a_bundles_next_version(copy: Path, tmp_path: Path) -> None:
    """A manifest may list what is no part of it; a link there would be followed."""
    (tmp_path / "secret").write_text("secret")
    (copy / "extra.txt").symlink_to(tmp_path / "secret")
    files = json.loads((copy / "manifest.json").read_text())["files"]
    reseal(copy, files=files | {"extra.txt": {"size": 6, "sha256": "0" * 64}})
    opened = Bundle.open(copy)
    golden = opened.golden().append_column(GOLDEN_SCORES, opened.golden().column("ranks"))
    info = RankerInfo(features=("retrieval.rank",), depth=2, max_depth=4)
    ranked = with_ranker(opened, copy.parent / "2", info, weighted_sum({"retrieval.rank": 1.0}), golden)
    assert not (ranked.path / "extra.txt").exists()
    assert ranked.manifest.files.keys() == files.keys() | {"ranker.onnx"}


# -- golden queries -------------------------------------------------------------------------------------------------------


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
    query = query_graph(nodes, ["history_leaves", "node_rows"], constants, 4)
    rng = np.random.default_rng(1)
    graphs = linear_graphs(4)._replace(query_onnx=query)
    bundle = make_bundle(tmp_path, rng, random_tree(rng, 3, 2), "product", graphs=graphs, encoder="sequence")
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
