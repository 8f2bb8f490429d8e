"""Writing: what is written comes back, whole or not at all, and is found again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.testing import assert_array_equal

import espalier.bundle_writer as bundle_writer
import espalier.items as items_module
from benchmarks.random_bundles import make_linear_bundle
from espalier.bundle import GRAPH_PARTS, Bundle, find_versions, is_model_name
from espalier.bundle_writer import with_ranker, write_bundle
from espalier.durable import flush
from espalier.errors import BundleCorrupt, BundleExists, InvalidTree
from espalier.items import ItemTable
from espalier.manifest import RankerInfo, Ranking
from espalier.node_rows import stored_as
from espalier.rerank.ranker import GOLDEN_SCORES
from espalier.shard_parts import ShardParts
from espalier.tree import complete_tree, tree_from_children
from tests.espalier.bundle.parts import content_of, draft_of, reseal, shard_info
from tests.file_modes import assert_every_user_can_read, umask
from tests.rankers import weighted_sum


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
    assert (opened.graph("query.onnx"), opened.graph("scorer.onnx")) == (content.query_onnx, content.scorer_onnx)
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
    "checksums": (bundle_writer, "sha256_of"),
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
        ({"stored_rows": np.zeros((3, 4), np.float32)}, r"node_rows: expected .*got float32\[3, 4\]"),
        ({"stored_rows": np.array(original.node_rows_ND, np.float64)}, "node_rows: expected float32, float16 or int8 .*got float64"),
        ({"items": ItemTable.build(pa.table({"id": ["only"]}))}, "items: 1 rows, the tree holds"),
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
    with pytest.raises(BundleCorrupt, match="items: expected ascending"):
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
