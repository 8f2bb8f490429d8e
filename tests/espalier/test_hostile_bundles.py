"""Bundles that somebody made to harm whoever opens them, every checksum right: refused before anything trusts them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from espalier import bundle_files
from espalier.bundle import CHUNKS, Bundle
from espalier.bundle_writer import with_ranker
from espalier.checks.heldout import read_heldout
from espalier.checks.random_bundles import make_bundle, make_linear_bundle, random_tree
from espalier.chunks import ARRAYS, MAX_CHILDREN, Chunks
from espalier.errors import BundleCorrupt, InvalidTree
from espalier.items import HASH_COLUMN, ROW_COLUMN, ItemTable
from espalier.manifest import RankerInfo, Ranking
from espalier.rerank.ranker import GOLDEN_SCORES
from espalier.tree import Tree, complete_tree, tree_from_children
from tests.rankers import weighted_sum

WRAPPING = 2**63 - 1
"""Differences of int64 that pass it begin again below 0: 1, WRAPPING, −2, 3 seems to rise all the way."""


def reseal(folder: Path, **fields: Any) -> None:
    """Sizes and checksums of a bundle as its files are now, and other fields of its manifest."""
    file = folder / "manifest.json"
    manifest = json.loads(file.read_text()) | fields
    for name, info in manifest["files"].items():
        if (folder / name).is_file():
            data = (folder / name).read_bytes()
            info |= {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    file.write_text(json.dumps(manifest))


@pytest.fixture
def linear(tmp_path: Path) -> Bundle:
    rng = np.random.default_rng(2)
    return make_linear_bundle(tmp_path / "models", rng, random_tree(rng, 3, 4), Ranking(own="log_activation", gamma=1))


@pytest.fixture
def graphs(tmp_path: Path) -> Bundle:
    rng = np.random.default_rng(2)
    return make_bundle(tmp_path / "models", rng, complete_tree(rng.permutation(8), 2))


# -- numbers that wrap ----------------------------------------------------------------------------------------------------


def test_children_whose_numbers_only_seem_to_rise_are_no_tree() -> None:
    """A compiled search would follow them out of its arrays."""
    tree = tree_from_children([[4], [1, 1, 1, 1]], np.arange(4))
    first = tree.first_child.copy()
    first[1:5] = 5, WRAPPING, -2, 8
    with np.errstate(over="ignore"):
        assert (np.diff(first[:5]) > 0).all()
    with pytest.raises(InvalidTree, match="every inner node needs at least one child"):
        Tree(tree.level_offset, first, tree.leaf_item)


def test_levels_that_only_seem_to_rise_are_no_tree() -> None:
    offset = np.array([0, 1, WRAPPING, -2, 4])
    with pytest.raises(InvalidTree, match="strictly rising"):
        Tree(offset, np.array([1, 4, 4, 4, 4]), np.arange(3))


@pytest.mark.parametrize("name", ["chunk_row", "row_entry"])
def test_chunks_whose_rows_only_seem_to_rise_are_refused(linear: Bundle, name: str) -> None:
    chunks = linear.chunks
    arrays = {array: np.array(getattr(chunks, array)) for array in ARRAYS}
    arrays[name][1:3] = WRAPPING, -2
    with pytest.raises(BundleCorrupt, match=f"{name} has .* never decrease"):
        Chunks(**arrays, width=chunks.width).check(linear.tree)


@pytest.mark.parametrize("children", [[1, 0], [1, 1]])
def test_a_row_with_a_child_twice_or_in_no_order_is_refused(children: list[int]) -> None:
    """Engines would disagree on its weight."""
    tree = tree_from_children([[2]], np.arange(2))
    chunks = Chunks(
        np.array([0, 2]), np.array([0, 1], np.int32), np.array([0, 2, 4]), np.array([0, 1, *children], np.uint16), np.ones(4, np.float32),
        np.zeros(3, np.float32), 2,
    )  # fmt: skip
    with pytest.raises(BundleCorrupt, match="entry_child is not strictly ascending within a row"):
        chunks.check(tree)


def test_rows_side_by_side_may_begin_with_any_child() -> None:
    tree = tree_from_children([[2]], np.arange(2))
    chunks = Chunks(
        np.array([0, 3]), np.array([0, 1, 2], np.int32), np.array([0, 2, 2, 4]), np.array([0, 1, 0, 1], np.uint16), np.ones(4, np.float32),
        np.zeros(3, np.float32), 3,
    )  # fmt: skip
    chunks.check(tree)


# -- the manifest ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../../../escaped", "/etc/hostname", "..", ".hidden", "a/b", "a\\b", "", "x" * 65, "a\n"])
def test_a_file_of_a_bundle_lies_in_its_folder(graphs: Bundle, name: str) -> None:
    files = json.loads((graphs.path / "manifest.json").read_text())["files"]
    reseal(graphs.path, files=files | {name: files["query.onnx"]})
    with pytest.raises(BundleCorrupt, match=r"manifest\.json: files"):
        Bundle.open(graphs.path)


def test_nothing_but_its_parts_goes_into_a_bundles_next_version(graphs: Bundle, tmp_path: Path) -> None:
    """A manifest may list what is no part of it; a link there would be followed."""
    (tmp_path / "secret").write_text("secret")
    (graphs.path / "extra.txt").symlink_to(tmp_path / "secret")
    files = json.loads((graphs.path / "manifest.json").read_text())["files"]
    reseal(graphs.path, files=files | {"extra.txt": {"size": 6, "sha256": "0" * 64}})
    opened = Bundle.open(graphs.path)
    golden = opened.golden().append_column(GOLDEN_SCORES, opened.golden().column("ranks"))
    info = RankerInfo(features=("retrieval.rank",), depth=2, max_depth=4)
    ranked = with_ranker(opened, graphs.path.parent / "2", info, weighted_sum({"retrieval.rank": 1.0}), golden)
    assert not (ranked.path / "extra.txt").exists()
    assert ranked.manifest.files.keys() == files.keys() | {"ranker.onnx"}


@pytest.mark.parametrize("limit", ["max_beam_size", "max_m", "beam_size", "m"])
@pytest.mark.parametrize("value", [2**24 + 1, 10**30])
def test_limits_that_no_search_has_room_for_are_refused(graphs: Bundle, limit: str, value: int) -> None:
    search = json.loads((graphs.path / "manifest.json").read_text())["search"]
    reseal(graphs.path, search=search | {limit: value})
    with pytest.raises(BundleCorrupt, match=rf"search\.{limit}"):
        Bundle.open(graphs.path)


# -- arrays ---------------------------------------------------------------------------------------------------------------


def header(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a safetensors header in place."""
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    head = json.loads(data[8 : 8 + length])
    change(head)
    text = json.dumps(head).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


@pytest.mark.parametrize("begin", [-8, -4096, 1 << 20])
def test_arrays_lie_in_their_file(graphs: Bundle, begin: int) -> None:
    def move(head: dict[str, Any]) -> None:
        old, end = head["leaf_item"]["data_offsets"]
        head["leaf_item"]["data_offsets"] = [begin, begin + end - old]

    header(graphs.path / "tree.safetensors", move)
    reseal(graphs.path)
    with pytest.raises(BundleCorrupt, match=r"tree\.safetensors: .*not in the file"):
        _ = Bundle.open(graphs.path).tree


def test_a_header_of_absurd_size_is_not_read(graphs: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle_files, "MAX_HEADER_BYTES", 64)
    with pytest.raises(BundleCorrupt, match=r"a header of .* expected at most 64"):
        _ = Bundle.open(graphs.path).tree


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["entry_weight", "bias"])
def test_weights_are_finite(linear: Bundle, name: str, value: float) -> None:
    arrays = {array: np.array(getattr(linear.chunks, array)) for array in ARRAYS}
    arrays[name][len(arrays[name]) // 2] = value
    save_file(arrays, linear.path / CHUNKS)
    reseal(linear.path)
    with pytest.raises(BundleCorrupt, match="must be finite"):
        _ = Bundle.open(linear.path).chunks


# -- Arrow and Parquet ----------------------------------------------------------------------------------------------------


def item_file(path: Path, **columns: pa.Array) -> Path:
    """An item table of three items with other columns, as a file."""
    whole = ItemTable.build(pa.table({"id": ["a", "b", "c"]}))._table
    for name, column in columns.items():
        place = whole.column_names.index(name)
        whole = whole.set_column(place, pa.field(name, column.type), column)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, whole.schema) as writer:
        writer.write_table(whole)
    return path


@pytest.mark.parametrize("offsets", [(0, 1, 2, 4096), (0, 1, 1 << 40, 3), (0, 2, 1, 3), (-64, 1, 2, 3)])
def test_strings_whose_offsets_lead_out_of_their_buffer_are_refused(tmp_path: Path, offsets: tuple[int, ...]) -> None:
    """They would show what else is in the process's memory."""
    file = item_file(tmp_path / "items.arrow")
    data, right = file.read_bytes(), np.arange(4, dtype=np.int64).tobytes()
    assert data.count(right) == 1
    file.write_bytes(data.replace(right, np.array(offsets, np.int64).tobytes()))
    with pytest.raises(BundleCorrupt, match=r"items\.arrow: not a readable Arrow file"):
        ItemTable.open(file)


@pytest.mark.parametrize("rows", [[0, 1, 3], [0, -1, 2], [0, 1, 2**62]])
def test_an_index_of_rows_that_are_not_there_is_refused(tmp_path: Path, rows: list[int]) -> None:
    with pytest.raises(BundleCorrupt, match="the index has rows outside"):
        ItemTable.open(item_file(tmp_path / "items.arrow", **{ROW_COLUMN: pa.array(rows, pa.int64())}))


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("id", pa.array(["a", None, "c"], pa.large_string())),
        (ROW_COLUMN, pa.array([0, None, 2], pa.int64())),
        (HASH_COLUMN, pa.array([0, None, 2], pa.uint64())),
    ],
)
def test_an_item_table_has_no_holes(tmp_path: Path, name: str, column: pa.Array) -> None:
    with pytest.raises(BundleCorrupt, match="is missing"):
        ItemTable.open(item_file(tmp_path / "items.arrow", **{name: column}))


@pytest.mark.parametrize("part", ["golden.parquet", "heldout.parquet"])
def test_queries_that_unpack_to_any_size_are_not_read(graphs: Bundle, part: str) -> None:
    """Two million equal rows take some kilobytes of a file."""
    count: NDArray[np.int64] = np.zeros(1 << 21, np.int64)
    pq.write_table(pa.table({"m": count}), graphs.path / part)
    assert (graphs.path / part).stat().st_size < 20_000
    reseal(graphs.path)
    opened = Bundle.open(graphs.path)
    with pytest.raises(BundleCorrupt, match=rf"{part}: 2097152 rows .* expected at most 1048576"):
        opened.golden() if part == "golden.parquet" else opened.heldout()


@pytest.mark.parametrize("kind", ["plain", "dictionary"])
@pytest.mark.parametrize("options", [{}, {"metadata_version": pa.ipc.MetadataVersion.V4}])
def test_an_item_table_that_unpacks_to_any_size_is_not_read(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    titles = pa.array(["x" * (1 << 20)] * 2)
    table = ItemTable.build(pa.table({"id": ["a", "b"], "title": titles if kind == "plain" else titles.dictionary_encode()}))
    for compression in (None, "zstd", "lz4"):
        written = pa.ipc.IpcWriteOptions(compression=compression, **options)
        with pa.OSFile(str(tmp_path / "items.arrow"), "wb") as sink, pa.ipc.new_file(sink, table._table.schema, options=written) as writer:
            writer.write_table(table._table)
        if compression is None and not options:
            assert ItemTable.open(tmp_path / "items.arrow").ids_of(np.arange(2)) == ["a", "b"]
            continue
        with pytest.raises(BundleCorrupt, match="its buffers may be compressed, expected plain ones"):
            ItemTable.open(tmp_path / "items.arrow")


def test_an_item_table_is_mapped_not_read(tmp_path: Path) -> None:
    ItemTable.build(pa.table({"id": ["a", "b"], "title": ["x" * (1 << 20)] * 2})).write(tmp_path / "items.arrow")
    before = pa.total_allocated_bytes()
    table = ItemTable.open(tmp_path / "items.arrow")
    assert pa.total_allocated_bytes() - before < 1 << 16
    assert len(table) == 2


@pytest.mark.parametrize(
    "content", [b"", b"ARROW1", b"ARROW1\0\0", b"ARROW1\0\0" + b"\xff" * 40, b"ARROW1\0\0\xff\xff\xff\xff\x10\0\0\0" + b"\0" * 64]
)
def test_a_file_that_only_begins_as_an_item_table_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "items.arrow").write_bytes(content)
    with pytest.raises(BundleCorrupt, match=r"items\.arrow: not a readable Arrow file"):
        ItemTable.open(tmp_path / "items.arrow")


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("features", ["text"]),
        ("features", [None]),
        ("relevant", [None]),
        ("relevant", [[1]]),
        ("relevance", [["much"]]),
        ("relevance", [1.0]),
        ("recall@5", ["much"]),
        (f"recall@{'9' * 5000}", [1.0]),
    ],
)
def test_held_out_queries_of_other_things_are_refused(tmp_path: Path, column: str, values: list[Any]) -> None:
    rng = np.random.default_rng(1)
    bundle = make_linear_bundle(tmp_path, rng, random_tree(rng, 2, 3), Ranking(own="logit", gamma=1))
    right: dict[str, list[Any]] = {"features": [{"indices": [0], "values": [1.0]}], "relevant": [["item-0"]], "relevance": [[1.0]]}
    for columns in (right, right | {column: values}):
        pq.write_table(pa.table(columns), bundle.path / "heldout.parquet")
        if columns is right:
            assert len(read_heldout(bundle).queries) == 1
            continue
        with pytest.raises(BundleCorrupt, match=r"heldout\.parquet: "):
            read_heldout(bundle)


def test_a_node_of_more_children_than_chunks_can_number_is_refused() -> None:
    """A row with entries for 2^16 of its children would be taken for one without an entry."""
    tree = tree_from_children([[MAX_CHILDREN + 1]], np.arange(MAX_CHILDREN + 1))
    arrays = {name: np.zeros(0, dtype) for name, dtype in ARRAYS.items()}
    arrays |= {"chunk_row": np.zeros(2, np.int64), "row_entry": np.zeros(1, np.int64), "bias": np.zeros(tree.node_count, np.float32)}
    with pytest.raises(BundleCorrupt, match="a node of 65537 children, at most 65536 can be numbered"):
        Chunks(**arrays, width=4).check(tree)
