"""A bundle on disk: what is written comes back, what is damaged is refused, and nothing half-written is ever seen."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.testing import assert_array_equal
from onnx import helper, numpy_helper

import espalier.bundle as bundle_module
import espalier.items as items_module
from espalier.bundle import GRAPH_PARTS, Bundle, GraphContent, find_versions, is_model_name, with_ranker, write_bundle
from espalier.checks.golden import verify_golden
from espalier.checks.random_bundles import make_bundle, make_linear_bundle, random_tree
from espalier.engines.onnx.compose import Plan, compose
from espalier.engines.onnx.engine import OnnxEngine
from espalier.engines.onnx.graphs import load_graph
from espalier.engines.reference import ReferenceEngine
from espalier.errors import (
    BundleCorrupt,
    BundleError,
    BundleExists,
    BundleNotFound,
    EspalierError,
    InvalidData,
    InvalidTree,
    UnsupportedSchema,
)
from espalier.items import ItemTable
from espalier.manifest import ManifestDraft, RankerInfo, Ranking
from espalier.queries import HistoryKind, QueryBatch, pad_histories
from espalier.search import SearchParams, SearchResult
from espalier.tree import complete_tree, tree_from_children
from tests.file_modes import assert_every_user_can_read, umask


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    rng = np.random.default_rng(11)
    return make_bundle(tmp_path_factory.mktemp("original"), rng, random_tree(rng, 3, 3, empty_share=0.2))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    rng = np.random.default_rng(12)
    folder = tmp_path_factory.mktemp("other")
    bundle = make_bundle(folder, rng, random_tree(rng, 3, 4), width=5)
    return with_golden(bundle, folder / "tiny" / "2", 0.0, heldout=pa.table({"history": [["item-1"]], "relevant": [["item-2"]]}))


@pytest.fixture
def copy(original: Bundle, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original.path, tmp_path / "models" / "tiny" / "1"))


def content_of(bundle: Bundle, **changed: Any) -> GraphContent:
    scorer = bundle.graph_scorer
    parts: dict[str, Any] = {
        "tree": bundle.tree,
        "node_rows_ND": np.array(bundle.node_rows_ND),
        "state_levels": scorer.state_levels,
        "state_dim": scorer.state_dim,
        "query_onnx": bundle.graph("query.onnx"),
        "scorer_onnx": bundle.graph("scorer.onnx"),
        "items": bundle.items,
        "golden": bundle.golden(),
        "heldout": bundle.heldout(),
        "form": scorer.form,
    }
    return GraphContent(**(parts | changed))


def draft_of(bundle: Bundle) -> ManifestDraft:
    return ManifestDraft(**{name: getattr(bundle.manifest, name) for name in ManifestDraft.model_fields})


def reseal(path: Path, **changed: Any) -> None:
    """Give the files as they are now their sizes and checksums, so that only their content can be refused."""
    manifest = json.loads((path / "manifest.json").read_text()) | changed
    for name in GRAPH_PARTS:
        manifest["files"][name] = {"sha256": bundle_module._sha256(path / name), "size": (path / name).stat().st_size}
    (path / "manifest.json").write_text(json.dumps(manifest))


def read_everything(bundle: Bundle) -> None:
    _ = bundle.tree, bundle.node_rows_ND, bundle.items, bundle.golden(), bundle.heldout()
    for name in ("query.onnx", "scorer.onnx"):
        load_graph(name, bundle.graph(name))


# -- round trip ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_what_is_written_comes_back(original: Bundle, tmp_path: Path, dtype: type[np.generic]) -> None:
    draft, content = draft_of(original), content_of(original, node_rows_ND=np.array(original.node_rows_ND, dtype))
    written = write_bundle(tmp_path / "tiny" / "1", draft, content)
    opened = Bundle.open(written.path)
    assert opened.manifest == written.manifest
    assert draft_of(opened) == draft
    for name in ("level_offset", "first_child", "leaf_item"):
        assert_array_equal(getattr(opened.tree, name), getattr(content.tree, name))
    assert opened.node_rows_ND.dtype == dtype
    assert_array_equal(opened.node_rows_ND, content.node_rows_ND)
    assert (opened.graph("query.onnx"), opened.graph("scorer.onnx")) == (content.query_onnx, content.scorer_onnx)
    assert opened.items.to_table() == content.items.to_table()
    assert (opened.golden(), opened.heldout()) == (content.golden, content.heldout)
    assert sorted(file.name for file in opened.path.iterdir()) == sorted([*GRAPH_PARTS, "manifest.json"])


def test_arrays_that_lie_side_by_side_in_memory_in_another_order_are_written_right(original: Bundle, tmp_path: Path) -> None:
    rows_ND = np.asfortranarray(original.node_rows_ND)
    assert_array_equal(write_bundle(tmp_path / "1", draft_of(original), content_of(original, node_rows_ND=rows_ND)).node_rows_ND, rows_ND)


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


def test_a_models_folder_that_is_there_keeps_its_mode(original: Bundle, tmp_path: Path) -> None:
    folder = tmp_path / "models" / "tiny"
    folder.mkdir(parents=True)
    folder.chmod(0o750)
    write_bundle(folder / "1", draft_of(original), content_of(original))
    assert folder.stat().st_mode & 0o777 == 0o750


def test_node_rows_are_mapped_not_read(original: Bundle) -> None:
    rows = Bundle.open(original.path).node_rows_ND
    assert isinstance(rows, np.memmap)
    assert Path(str(rows.filename)) == original.path / "nodes.safetensors"
    assert not rows.flags.writeable
    assert not rows.flags.owndata


def test_the_manifest_names_every_file_with_its_size(original: Bundle) -> None:
    assert {name: info.size for name, info in original.manifest.files.items()} == {
        name: (original.path / name).stat().st_size for name in GRAPH_PARTS
    }


# -- damage -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", GRAPH_PARTS)
def test_a_single_changed_byte_is_found(copy: Path, part: str) -> None:
    whole = (copy / part).read_bytes()
    rng = np.random.default_rng(3)
    for place in {0, len(whole) - 1, *rng.integers(len(whole), size=6).tolist()}:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << int(rng.integers(8))
        (copy / part).write_bytes(damaged)
        with pytest.raises(BundleCorrupt, match=f"{part}: its SHA-256"):
            Bundle.open(copy)
    (copy / part).write_bytes(whole)
    Bundle.open(copy)


@pytest.mark.parametrize("part", GRAPH_PARTS)
@pytest.mark.parametrize("verify", [True, False])
def test_a_truncated_or_grown_part_is_found_without_reading_it(copy: Path, part: str, verify: bool) -> None:
    whole = (copy / part).read_bytes()
    for damaged in (whole[:-1], whole[: len(whole) // 2], b"", whole + b"\0"):
        (copy / part).write_bytes(damaged)
        with pytest.raises(BundleCorrupt, match=rf"{part}: {len(damaged)} bytes, the manifest says {len(whole)}"):
            Bundle.open(copy, verify=verify)


@pytest.mark.parametrize("part", GRAPH_PARTS)
def test_a_missing_part_is_found(copy: Path, part: str) -> None:
    (copy / part).unlink()
    with pytest.raises(BundleNotFound, match=f"{part}: missing"):
        Bundle.open(copy)
    (copy / part).mkdir()
    with pytest.raises(BundleNotFound, match=f"{part}: missing"):
        Bundle.open(copy)


@pytest.mark.parametrize("part", GRAPH_PARTS)
def test_a_part_of_another_model_is_found(copy: Path, other: Bundle, part: str) -> None:
    shutil.copy(other.path / part, copy / part)
    with pytest.raises(BundleCorrupt, match=part):
        Bundle.open(copy)


@pytest.mark.parametrize("part", ["tree.safetensors", "nodes.safetensors", "items.arrow"])
def test_a_part_of_another_model_with_its_checksum_still_does_not_fit(copy: Path, other: Bundle, part: str) -> None:
    shutil.copy(other.path / part, copy / part)
    reseal(copy)
    with pytest.raises(BundleCorrupt, match=part):
        read_everything(Bundle.open(copy))


@pytest.mark.parametrize("part", ["tree.safetensors", "nodes.safetensors", "items.arrow", "query.onnx", "scorer.onnx"])
@pytest.mark.parametrize("content", [b"", b"nonsense", b"\xff" * 64, b"PAR1" + bytes(40) + b"PAR1"])
def test_nonsense_with_a_right_checksum_is_refused_when_read(copy: Path, part: str, content: bytes) -> None:
    (copy / part).write_bytes(content)
    reseal(copy)
    with pytest.raises(BundleCorrupt, match=part):
        read_everything(Bundle.open(copy))


def safetensors(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(**changed: object) -> dict[str, object]:
    return {"node_rows": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]} | changed}


@pytest.mark.parametrize(
    "content",
    [
        safetensors(entry(), bytes(16), length=10**6),
        safetensors(entry(), bytes(16), length=2**64 - 1),
        safetensors(b"{not json", bytes(16)),
        safetensors(b"\xff\xfe\xfd", bytes(16)),
        safetensors({"node_rows": {}}, bytes(16)),
        safetensors({"node_rows": "F32"}, bytes(16)),
        safetensors({"node_rows": [1, 2]}, bytes(16)),
        safetensors(entry(dtype="BF16"), bytes(16)),
        safetensors(entry(dtype=4), bytes(16)),
        safetensors(entry(shape=[3, 2]), bytes(16)),
        safetensors(entry(shape=[-2, -2]), bytes(16)),
        safetensors(entry(shape="22"), bytes(16)),
        safetensors(entry(data_offsets=[0, 17]), bytes(17)),
        safetensors(entry(data_offsets=[16]), bytes(16)),
        safetensors(entry(data_offsets=[-16, 0]), bytes(16)),
        safetensors(entry(data_offsets=["0", "16"]), bytes(16)),
        safetensors(entry(), bytes(15)),
        safetensors(entry(data_offsets=[10**9, 10**9 + 16]), bytes(16)),
        safetensors({}, bytes(16)),
    ],
)
@pytest.mark.parametrize("part", ["tree.safetensors", "nodes.safetensors"])
def test_a_safetensors_header_that_makes_no_sense_is_refused(copy: Path, part: str, content: bytes) -> None:
    (copy / part).write_bytes(content)
    reseal(copy)
    with pytest.raises(BundleCorrupt, match=part):
        read_everything(Bundle.open(copy))


def test_a_safetensors_shape_that_overflows_is_refused(copy: Path) -> None:
    (copy / "nodes.safetensors").write_bytes(safetensors(entry(shape=[2**32, 2**32], data_offsets=[0, 0]), bytes(16)))
    reseal(copy)
    with pytest.raises(BundleCorrupt, match=r"nodes\.safetensors"):
        read_everything(Bundle.open(copy))


@pytest.mark.parametrize("header", [[], [1], "text", 3, None])
def test_a_safetensors_header_that_is_no_object_is_refused(copy: Path, header: object) -> None:
    (copy / "nodes.safetensors").write_bytes(safetensors(header, bytes(16)))
    reseal(copy)
    with pytest.raises(BundleCorrupt, match=r"nodes\.safetensors"):
        read_everything(Bundle.open(copy))


# -- the manifest -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [b"", b"{", b"not json", b'{"schema_version": 1', b"\xff\xfe\x00"])
def test_a_manifest_that_is_no_json_is_refused(copy: Path, text: bytes) -> None:
    (copy / "manifest.json").write_bytes(text)
    with pytest.raises(BundleCorrupt, match=r"manifest\.json: not JSON"):
        Bundle.open(copy)


@pytest.mark.parametrize("schema", [0, 3, "1", None, [1], True, 1.0])
def test_another_generation_of_the_format_is_refused(copy: Path, schema: object) -> None:
    manifest = json.loads((copy / "manifest.json").read_text())
    (copy / "manifest.json").write_text(json.dumps(manifest | {"schema_version": schema}))
    with pytest.raises(UnsupportedSchema, match="this software reads 1 and 2"):
        Bundle.open(copy)


def test_a_bundle_of_schema_version_1_opens_and_has_none_of_the_parts_of_version_2(copy: Path) -> None:
    manifest = json.loads((copy / "manifest.json").read_text())
    assert manifest["schema_version"] == 2
    del manifest["command"], manifest["scorer"]["form"]
    manifest["schema_version"] = 1
    (copy / "manifest.json").write_text(json.dumps(manifest))
    opened = Bundle.open(copy)
    assert (opened.manifest.command, opened.graph_scorer.form) == (None, None)
    for part in ({"command": "fit"}, {"scorer": manifest["scorer"] | {"form": {"kind": "inner-product"}}}):
        (copy / "manifest.json").write_text(json.dumps(manifest | part))
        with pytest.raises(BundleCorrupt, match="schema version 1 has neither a command nor a scorer's form"):
            Bundle.open(copy)
    for part in ({"memory": {}}, {"scorer": manifest["scorer"] | {"form": {"kind": "mixture"}}}):
        (copy / "manifest.json").write_text(json.dumps(manifest | part | {"schema_version": 2}))
        with pytest.raises(BundleCorrupt, match=r"manifest\.json: (memory|scorer\.graphs\.form)"):
            Bundle.open(copy)


@pytest.mark.parametrize("text", ["[]", "3", "null", "{}"])
def test_a_manifest_without_a_schema_version_is_refused(copy: Path, text: str) -> None:
    (copy / "manifest.json").write_text(text)
    with pytest.raises(UnsupportedSchema):
        Bundle.open(copy)


@pytest.mark.parametrize("key", ["name", "version", "algorithm", "created", "query", "ranking", "search", "tree", "scorer", "files"])
def test_a_missing_key_of_the_manifest_is_named(copy: Path, key: str) -> None:
    manifest = json.loads((copy / "manifest.json").read_text())
    del manifest[key]
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(BundleCorrupt, match=rf"manifest\.json: {key}: .*required"):
        Bundle.open(copy)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("name",), "../evil"),
        (("version",), 0),
        (("ranking", "gamma"), 2),
        (("ranking", "own"), "softmax"),
        (("query", "kind"), "telepathy"),
        (("scorer", "dtype"), "float8"),
        (("tree", "levels"), 1),
        (("files", "query.onnx", "sha256"), "0"),
        (("search", "beam_size"), 0),
        (("unknown",), 1),
    ],
)
def test_a_wrong_value_of_the_manifest_is_named(copy: Path, place: tuple[str, ...], value: object) -> None:
    manifest = json.loads((copy / "manifest.json").read_text())
    inner = manifest
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(BundleCorrupt, match=f"manifest.json: {place[0]}"):
        Bundle.open(copy)


def test_a_part_that_the_manifest_does_not_list_is_named(copy: Path) -> None:
    manifest = json.loads((copy / "manifest.json").read_text())
    del manifest["files"]["heldout.parquet"]
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(BundleCorrupt, match=r"does not list heldout\.parquet"):
        Bundle.open(copy)


def test_a_manifest_of_absurd_size_is_not_read(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (copy / "manifest.json").open("r+b") as file:
        file.truncate(1 << 40)  # a hole: it takes no space
    monkeypatch.setattr(json, "loads", lambda *_: pytest.fail("the manifest was parsed"))
    with pytest.raises(BundleCorrupt, match=r"manifest\.json: 1099511627776 bytes, at most"):
        Bundle.open(copy)


def test_a_deeply_nested_manifest_is_refused(copy: Path) -> None:
    (copy / "manifest.json").write_bytes(b"[" * 100_000)
    with pytest.raises(BundleCorrupt):
        Bundle.open(copy)


def test_a_folder_without_a_manifest_is_no_bundle(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(BundleNotFound, match=r"manifest\.json: missing"):
            Bundle.open(path)


# -- writing ------------------------------------------------------------------------------------------------------------


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def test_a_version_is_never_overwritten(original: Bundle, other: Bundle, tmp_path: Path) -> None:
    path = write_bundle(tmp_path / "tiny" / "1", draft_of(original), content_of(original)).path
    before = snapshot(tmp_path)
    with pytest.raises(BundleExists, match="never overwritten"):
        write_bundle(path, draft_of(other), content_of(other))
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("obstacle", [Path.mkdir, Path.touch], ids=["folder", "file"])
def test_not_even_an_empty_folder_or_a_file_is_overwritten(original: Bundle, tmp_path: Path, obstacle: Callable[[Path], None]) -> None:
    obstacle(tmp_path / "1")
    with pytest.raises(BundleExists):
        write_bundle(tmp_path / "1", draft_of(original), content_of(original))
    assert [file.name for file in tmp_path.iterdir()] == ["1"]


def test_a_version_that_appears_meanwhile_is_not_overwritten(original: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, flush = tmp_path / "tiny" / "1", bundle_module._flush

    def appear(file: Path) -> None:
        path.mkdir(exist_ok=True)
        (path / "manifest.json").write_text("theirs")
        flush(file)

    monkeypatch.setattr(bundle_module, "_flush", appear)
    with pytest.raises(BundleExists, match="appeared while"):
        write_bundle(path, draft_of(original), content_of(original))
    assert snapshot(tmp_path) == {"tiny/1/manifest.json": b"theirs"}


STEPS = {
    "tree and nodes": (bundle_module, "save_file"),
    "items": (items_module.ItemTable, "write"),
    "tables": (pq, "write_table"),
    "checksums": (bundle_module, "_sha256"),
    "flush": (bundle_module, "_flush"),
    "rename": (Path, "rename"),
}


@pytest.mark.parametrize("step", STEPS)
def test_a_writer_that_fails_leaves_nothing(original: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    draft, content = draft_of(original), content_of(original)

    def fail(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(*STEPS[step], fail)
    with pytest.raises(KeyboardInterrupt):
        write_bundle(tmp_path / "tiny" / "1", draft, content)
    assert list((tmp_path / "tiny").iterdir()) == []
    assert find_versions(tmp_path) == {}


@pytest.mark.parametrize("step", STEPS)
def test_what_a_killed_writer_leaves_is_not_listed(original: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    draft, content = draft_of(original), content_of(original)
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)  # a killed process tidies nothing up

    def fail(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(*STEPS[step], fail)
        with pytest.raises(KeyboardInterrupt):
            write_bundle(tmp_path / "tiny" / "1", draft, content)
    left = [file.name for file in (tmp_path / "tiny").iterdir()]
    assert left
    assert all(name.startswith(".") for name in left)
    assert find_versions(tmp_path) == {}
    write_bundle(tmp_path / "tiny" / "1", draft, content)
    assert find_versions(tmp_path) == {"tiny": (1,)}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"node_rows_ND": np.zeros((3, 4), np.float32)}, r"node_rows: expected .*got float32\[3, 4\]"),
        ({"node_rows_ND": "float64"}, "node_rows: expected float32 or float16 .*got float64"),
        ({"items": ItemTable.build(pa.table({"id": ["only"]}))}, "items: 1 rows, the tree holds"),
    ],
)
def test_parts_that_do_not_fit_each_other_are_not_written(original: Bundle, tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    if isinstance(changed.get("node_rows_ND"), str):
        changed = {"node_rows_ND": np.array(original.node_rows_ND, changed["node_rows_ND"])}
    with pytest.raises(BundleCorrupt, match=message):
        write_bundle(tmp_path / "1", draft_of(original), content_of(original, **changed))
    assert list(tmp_path.iterdir()) == []


def test_a_tree_whose_padding_more_than_doubles_a_level_is_refused(original: Bundle, tmp_path: Path) -> None:
    def write(counts: list[int], version: int) -> None:
        tree = tree_from_children([[len(counts)], counts], np.arange(sum(counts)))
        rows, items = np.zeros((tree.node_count, 4), np.float32), ItemTable.build(pa.table({"id": [str(i) for i in range(sum(counts))]}))
        write_bundle(tmp_path / str(version), draft_of(original), content_of(original, tree=tree, node_rows_ND=rows, items=items))

    write([4, 1, 1, 2], 1)  # padded to 16 candidates for 8 nodes: exactly twice
    with pytest.raises(InvalidTree, match=r"level 1: its largest node has 5 children, .* 20 candidates for 9 nodes"):
        write([5, 1, 1, 2], 2)
    assert [file.name for file in tmp_path.iterdir()] == ["1"]


# -- finding ------------------------------------------------------------------------------------------------------------


def test_versions_are_found_and_other_names_ignored(original: Bundle, tmp_path: Path) -> None:
    def place(name: str) -> None:
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "manifest.json").touch()

    for name in ("books/1", "books/12", "books/3", "games-2.0/7"):
        place(name)
    junk = ("books/01", "books/-1", "books/1.5", "books/v2", "books/２", "books/.4.tmp", "books/4 ", "Upper/1", ".hidden/1", "sp ace/1")
    for name in junk:
        place(name)
    (tmp_path / "books" / "5").mkdir()  # no manifest
    (tmp_path / "books" / "6").touch()  # a file
    (tmp_path / "README.md").touch()
    (tmp_path / "empty").mkdir()
    assert find_versions(tmp_path) == {"books": (1, 3, 12), "games-2.0": (7,)}


def test_a_models_folder_that_is_not_there_holds_nothing(tmp_path: Path) -> None:
    assert find_versions(tmp_path / "none") == {}


def test_there_is_no_version_zero(tmp_path: Path) -> None:
    (tmp_path / "books" / "0").mkdir(parents=True)
    (tmp_path / "books" / "0" / "manifest.json").touch()
    assert find_versions(tmp_path) == {}


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "A", "é", "-a", "a" * 65, "a\n"])
def test_what_is_no_model_name(name: str) -> None:
    assert not is_model_name(name)
    assert is_model_name("a" * 64)


# -- golden queries -----------------------------------------------------------------------------------------------------


def with_golden(bundle: Bundle, path: Path, margin: float, **changed: Any) -> Bundle:
    """The bundle with ten golden queries that the reference answered on it, then perhaps other parts."""
    kind = bundle.manifest.query
    assert isinstance(kind, HistoryKind)
    rng = np.random.default_rng(5)
    histories = [rng.integers(0, bundle.tree.item_count, size) for size in range(10)]
    params = SearchParams.uniform(10, 4, 5)
    result = ReferenceEngine(bundle).search(pad_histories(kind, histories), params)
    golden = pa.table(
        {
            "history": pa.array([bundle.items.ids_of(history) for history in histories], pa.list_(pa.string())),
            "beam_size": params.beam_size_B,
            "m": params.m_B,
            "item_rows": result.item_rows_BM.tolist(),
            "ranks": result.ranks_BM.tolist(),
            "margin": np.full(10, margin),
        }
    )
    return write_bundle(path, draft_of(bundle), content_of(bundle, golden=golden, **changed))


@pytest.mark.parametrize("margin", [np.inf, 0.01, 0.0])
def test_golden_queries_pass_on_the_model_they_were_made_with(original: Bundle, tmp_path: Path, margin: float) -> None:
    bundle = with_golden(original, tmp_path / "1", margin)
    assert verify_golden(bundle, OnnxEngine(bundle, "cpu")) == 1.0


@pytest.mark.parametrize(("margin", "message"), [(0.01, "golden query 0 gave other items"), (0.001, "golden queries overlap by 0")])
def test_golden_queries_refuse_a_model_with_other_weights(original: Bundle, tmp_path: Path, margin: float, message: str) -> None:
    bundle = with_golden(original, tmp_path / "1", margin, node_rows_ND=-np.array(original.node_rows_ND))
    with pytest.raises(BundleCorrupt, match=message):
        verify_golden(bundle, OnnxEngine(bundle, "cpu"))


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
                verify_golden(spoilt, OnnxEngine(spoilt, "cpu"))
        else:
            assert 0.99 < verify_golden(spoilt, OnnxEngine(spoilt, "cpu")) < 1


def test_golden_queries_refuse_ranks_that_were_shifted(original: Bundle, tmp_path: Path) -> None:
    bundle = with_golden(original, tmp_path / "1", 0.001)
    engine = OnnxEngine(bundle, "cpu")
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

    class Swapping(OnnxEngine):
        def search(self, queries: QueryBatch, params: SearchParams) -> SearchResult:
            result = super().search(queries, params)
            swapped = [0, 2, 1, 3, 4]
            return replace(result, item_rows_BM=result.item_rows_BM[:, swapped], ranks_BM=result.ranks_BM[:, swapped])

    with pytest.raises(BundleCorrupt, match=r"golden query \d on onnx-cpu: item row \d+ comes after items of lower rank"):
        verify_golden(bundle, Swapping(bundle, "cpu"))
    ranks = bundle.golden().column("ranks").to_pylist()
    tied = [[row[0], row[1], row[1], *row[3:]] for row in ranks]  # equal ranks may come in any order
    equal = bundle.golden().set_column(4, "ranks", [pa.array(tied, pa.list_(pa.float32()))])
    close = Swapping(bundle, "cpu")
    close.rounding = float(np.abs(np.array(ranks)[:, 1] - np.array(ranks)[:, 2]).max())
    assert verify_golden(bundle, close, equal) == 1


def test_a_golden_table_without_its_columns_is_refused(original: Bundle, tmp_path: Path) -> None:
    bundle = with_golden(original, tmp_path / "1", np.inf)
    for column in bundle.golden().column_names:
        version = tmp_path / f"without-{column}"
        broken = write_bundle(version, draft_of(bundle), content_of(bundle, golden=bundle.golden().drop_columns([column])))
        with pytest.raises(BundleCorrupt, match=r"golden\.parquet"):
            verify_golden(broken, OnnxEngine(bundle, "cpu"))


# -- graphs -------------------------------------------------------------------------------------------------------------


def model_with(bundle: Bundle, change: Callable[[onnx.ModelProto], None], part: str = "scorer.onnx") -> bytes:
    model = onnx.load_from_string(bundle.graph(part))
    change(model)
    data: bytes = model.SerializeToString()
    return data


def custom_operator(model: onnx.ModelProto) -> None:
    model.graph.node[-1].domain = "com.evil"
    model.opset_import.append(helper.make_opsetid("com.evil", 1))


def control_flow(model: onnx.ModelProto) -> None:
    logits = model.graph.node[-1].output[0]
    model.graph.node[-1].output[0] = "raw"
    branch = helper.make_graph(
        [helper.make_node("Identity", ["raw"], ["chosen"])], "branch", [], [helper.make_tensor_value_info("chosen", 1, ["B", "C"])]
    )
    model.graph.initializer.append(numpy_helper.from_array(np.array(True), "always"))
    model.graph.node.append(helper.make_node("If", ["always"], [logits], then_branch=branch, else_branch=branch))


def external_data(model: onnx.ModelProto) -> None:
    tensor = next(tensor for tensor in model.graph.initializer if tensor.name == "u")
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="secrets.bin")


def external_constant(model: onnx.ModelProto) -> None:
    external_data(model)
    tensor = next(tensor for tensor in model.graph.initializer if tensor.name == "u")
    model.graph.node.insert(0, helper.make_node("Constant", [], ["u"], value=tensor))
    model.graph.initializer.remove(tensor)


@pytest.mark.parametrize("change", [custom_operator, control_flow, external_data, external_constant])
@pytest.mark.parametrize("plan", [Plan(1, 1), Plan(4, 7, single=True)])
def test_a_graph_with_more_than_plain_operators_is_refused(original: Bundle, change: Callable[[onnx.ModelProto], None], plan: Plan) -> None:
    manifest = original.manifest
    scorer = model_with(original, change)
    with pytest.raises(BundleCorrupt, match=r"scorer\.onnx: "):
        compose(original.graph("query.onnx"), scorer, original.tree, manifest.ranking, original.graph_kind, original.graph_scorer, plan)


def rename_input(model: onnx.ModelProto) -> None:
    old = model.graph.input[0].name
    model.graph.input[0].name = "surprise"
    for node in model.graph.node:
        for i, name in enumerate(node.input):
            if name == old:
                node.input[i] = "surprise"


def old_opset(model: onnx.ModelProto) -> None:
    model.opset_import[0].version = 17


def newer_opset(model: onnx.ModelProto) -> None:
    model.opset_import[0].version = 21


def compose_with(bundle: Bundle, scorer: bytes) -> bytes:
    manifest = bundle.manifest
    return compose(bundle.graph("query.onnx"), scorer, bundle.tree, manifest.ranking, bundle.graph_kind, bundle.graph_scorer, Plan(1, 1))


@pytest.mark.parametrize(("change", "message"), [(old_opset, "opset 17, expected 18 to 23"), (newer_opset, "opset 20, scorer.onnx 21")])
def test_a_graph_of_another_opset_is_refused(original: Bundle, change: Callable[[onnx.ModelProto], None], message: str) -> None:
    with pytest.raises(BundleCorrupt, match=message):
        compose_with(original, model_with(original, change))


def test_a_graph_with_an_input_outside_the_contract_is_refused(original: Bundle) -> None:
    with pytest.raises(BundleCorrupt, match="surprise"):
        compose_with(original, model_with(original, rename_input))


# -- the item table -----------------------------------------------------------------------------------------------------

IDS = ["b12", "né", "梨", "🦊", " ", "a b", "x" * 512, "b1", "B12", "12b"]


def reopened(table: ItemTable, path: Path) -> ItemTable:
    table.write(path)
    return ItemTable.open(path)


@pytest.mark.parametrize("bits", [64, 2, 0], ids=["no collisions", "many collisions", "one hash for all"])
def test_ids_are_found_whatever_their_hashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bits: int) -> None:
    hash_of = items_module._hash
    monkeypatch.setattr(items_module, "_hash", lambda item_id: hash_of(item_id) % (1 << bits))
    table = reopened(ItemTable.build(pa.table({"id": IDS})), tmp_path / "items.arrow")
    asked = [*IDS[::-1], "unknown", "", "b12 ", "ne", "\ud800", *IDS[:2]]
    assert table.rows_of(asked).tolist() == [IDS.index(item_id) if item_id in IDS else -1 for item_id in asked]
    assert table.rows_of([]).tolist() == []
    assert table.ids_of(np.array([2, 0])) == ["梨", "b12"]
    assert len(table) == len(IDS)


def test_titles_and_attributes_come_back_by_row(tmp_path: Path) -> None:
    source = pa.table({"title": ["A", None, "C"], "id": ["a", "b", "c"], "tags": [["x"], [], ["y", "z"]], "price": [1.5, 2.0, None]})
    table = reopened(ItemTable.build(source), tmp_path / "items.arrow")
    assert table.fields == ("title", "id", "tags", "price")
    assert table.values("title", np.array([2, 1, 2])) == ["C", None, "C"]
    assert table.values("tags", np.array([2])) == [["y", "z"]]
    assert table.to_table().equals(source.set_column(1, "id", source.column("id").cast(pa.large_string())))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (pa.table({"name": ["a"]}), "a column named 'id'"),
        (pa.table({"id": ["a", None]}), r"items\.id: got None, expected a non-empty string"),
        (pa.table({"id": ["a", ""]}), "1 to 512 bytes"),
        (pa.table({"id": pa.array([], pa.string())}), "at least one id"),
        (pa.table({"id": ["a" * 513]}), "1 to 512 bytes"),
        (pa.table({"id": ["é" * 257]}), "1 to 512 bytes"),
        (pa.table({"id": ["a", "梨", "梨"]}), r"items\.id: got '梨', expected each id once"),
    ],
)
def test_a_bad_item_table_is_refused(table: pa.Table, message: str) -> None:
    with pytest.raises(InvalidData, match=message):
        ItemTable.build(table)


def test_an_item_table_without_its_index_is_refused(tmp_path: Path) -> None:
    with pa.OSFile(str(tmp_path / "items.arrow"), "wb") as sink, pa.ipc.new_file(sink, pa.schema([("id", pa.large_string())])) as writer:
        writer.write_table(pa.table({"id": pa.array(["a"], pa.large_string())}))
    with pytest.raises(BundleCorrupt, match="items: expected a column '__hash' of type uint64"):
        ItemTable.open(tmp_path / "items.arrow")


@pytest.mark.parametrize("part", GRAPH_PARTS)
def test_random_damage_that_a_checksum_covers_up_raises_our_errors_or_none(copy: Path, part: str) -> None:
    whole = (copy / part).read_bytes()
    rng = np.random.default_rng(17)
    for _ in range(60):
        damaged = bytearray(whole)
        for place in rng.integers(len(whole), size=rng.integers(1, 4)):
            damaged[place] = rng.integers(256)
        (copy / part).write_bytes(damaged[: len(whole) if rng.random() < 0.7 else int(rng.integers(len(whole)))])
        reseal(copy)
        try:
            read_everything(Bundle.open(copy))
        except EspalierError as error:
            assert isinstance(error, BundleError)  # noqa: PT017  # anything else escapes and fails the test
