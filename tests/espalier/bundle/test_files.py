"""Files of a bundle: arrays are written block by block as the library writes them whole, and mapped where the header makes sense; the item
table finds its ids, and hands out nothing that is not in the file; queries; and tables that are changed in place while they are open.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.testing import assert_array_equal
from safetensors.numpy import save_file

import espalier.items as items_module
from benchmarks.random_bundles import make_linear_bundle, random_queries, random_tree
from espalier import bundle_files
from espalier.bundle import Bundle
from espalier.bundle_files import DTYPES, Gathered, map_safetensors, read_parquet, write_safetensors
from espalier.checks.heldout import read_heldout
from espalier.engines import open_engine
from espalier.engines.linear import feature_tables
from espalier.errors import BundleCorrupt, InvalidData
from espalier.items import HASH_COLUMN, ROW_COLUMN, ItemTable
from espalier.manifest import Ranking
from espalier.search import SearchParams
from tests.espalier.bundle.parts import MADE


@pytest.mark.parametrize("block", [1, 7, 1 << 20])
def test_the_bytes_are_the_librarys_whatever_the_size_of_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(bundle_files, "BLOCK_BYTES", block)
    rng = np.random.default_rng(block)
    shapes = [(5,), (0,), (3, 4), (2, 0), (1, 2, 3)]
    arrays = {
        f"{'zayb'[i % 4]}{i}": rng.integers(0, 200, shape).astype(dtype)
        for i, (shape, dtype) in enumerate((shape, dtype) for shape in shapes for dtype in DTYPES.values())
    }
    save_file(arrays, tmp_path / "library")
    write_safetensors(tmp_path / "blocks", arrays)
    assert (tmp_path / "blocks").read_bytes() == (tmp_path / "library").read_bytes()
    found = map_safetensors(tmp_path / "blocks")
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert_array_equal(found[name], array, strict=True)


def test_arrays_that_are_not_contiguous_are_written_in_the_order_of_their_rows(tmp_path: Path) -> None:
    rows = np.arange(12, dtype=np.float32).reshape(3, 4)
    write_safetensors(tmp_path / "file", {"fortran": np.asfortranarray(rows), "steps": rows[::2, ::3]})
    found = map_safetensors(tmp_path / "file")
    assert_array_equal(found["fortran"], rows)
    assert_array_equal(found["steps"], [[0, 3], [8, 11]])


@pytest.mark.parametrize("block", [1, 30, 1 << 20])
def test_gathered_rows_are_those_of_their_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(bundle_files, "BLOCK_BYTES", block)
    rng = np.random.default_rng(0)
    sources = [rng.normal(size=(size, 3)).astype(np.float16) for size in (4, 9, 2)]
    source_R = rng.integers(0, 3, 50)
    row_R = np.array([rng.integers(len(sources[source])) for source in source_R])
    expected = np.stack([sources[source][row] for source, row in zip(source_R, row_R, strict=True)])
    one, several = Gathered(sources[:1], None, row_R % 4), Gathered(sources, source_R, row_R)
    write_safetensors(tmp_path / "file", {"one": one, "several": several})
    found = map_safetensors(tmp_path / "file")
    assert_array_equal(found["several"], expected, strict=True)
    assert_array_equal(found["one"], sources[0][row_R % 4], strict=True)
    assert_array_equal(np.asarray(several), expected)


# -- headers that somebody made -------------------------------------------------------------------------------------------


def safetensors(header: object, data: bytes, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(**changed: object) -> dict[str, object]:
    return {"rows": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]} | changed}


@pytest.mark.parametrize(
    "content",
    [
        b"\x10" + bytes(6),
        safetensors(entry(), bytes(16), length=10**6),
        safetensors(entry(), bytes(16), length=2**64 - 1),
        safetensors(b"{not json", bytes(16)),
        safetensors(b"\xff\xfe\xfd", bytes(16)),
        safetensors(b"[" * 100_000, bytes(16)),
        *[safetensors(header, bytes(16)) for header in ([], [1], "text", 3, None)],
        safetensors({"rows": {}}, bytes(16)),
        safetensors({"rows": "F32"}, bytes(16)),
        safetensors({"rows": [1, 2]}, bytes(16)),
        *[safetensors(entry(dtype=dtype), bytes(16)) for dtype in ("BF16", 4)],
        *[safetensors(entry(shape=shape), bytes(16)) for shape in ([3, 2], [-2, -2], "22")],
        *[safetensors(entry(data_offsets=offsets), bytes(16)) for offsets in ([16], [0, 12], [0, 17], ["0", "16"])],
        safetensors(entry(shape=[2**32, 2**32], data_offsets=[0, 0]), bytes(16)),
    ],
)
def test_a_header_that_makes_no_sense_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(BundleCorrupt, match="file: not a readable safetensors file"):
        map_safetensors(tmp_path / "file")


@pytest.mark.parametrize("begin", [-8, -4096, 1, 1 << 20])
def test_arrays_lie_in_their_file(tmp_path: Path, begin: int) -> None:
    (tmp_path / "file").write_bytes(safetensors(entry(data_offsets=[begin, begin + 16]), bytes(16)))
    with pytest.raises(BundleCorrupt, match=rf"rows: bytes {begin} to {begin + 16} are not in the file"):
        map_safetensors(tmp_path / "file")


def test_a_header_of_absurd_size_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = safetensors(entry() | {"__metadata__": {}}, bytes(16))
    (tmp_path / "file").write_bytes(content)
    size = int.from_bytes(content[:8], "little")
    monkeypatch.setattr(bundle_files, "MAX_HEADER_BYTES", size)
    assert map_safetensors(tmp_path / "file").keys() == {"rows"}
    monkeypatch.setattr(bundle_files, "MAX_HEADER_BYTES", size - 1)
    with pytest.raises(BundleCorrupt, match=rf"a header of {size} bytes, expected at most {size - 1}"):
        map_safetensors(tmp_path / "file")


# -- queries --------------------------------------------------------------------------------------------------------------


def test_queries_that_unpack_to_any_size_are_not_read(tmp_path: Path) -> None:
    """Two million equal rows take some kilobytes of a file."""
    for rows in (1 << 20, (1 << 20) + 1):
        pq.write_table(pa.table({"m": np.zeros(rows, np.int64)}), tmp_path / "golden.parquet")
        assert (tmp_path / "golden.parquet").stat().st_size < 20_000
        if rows == 1 << 20:
            assert len(read_parquet(tmp_path / "golden.parquet")) == rows
            continue
        with pytest.raises(BundleCorrupt, match=r"golden\.parquet: 1048577 rows .* expected at most 1048576"):
            read_parquet(tmp_path / "golden.parquet")


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
    pq.write_table(pa.table(right), bundle.path / "heldout.parquet")
    assert len(read_heldout(bundle).queries) == 1
    pq.write_table(pa.table(right | {column: values}), bundle.path / "heldout.parquet")
    with pytest.raises(BundleCorrupt, match=r"heldout\.parquet: "):
        read_heldout(bundle)


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
    expected = [IDS.index(item_id) if item_id in IDS else -1 for item_id in asked]
    assert [table.row_of(item_id) for item_id in asked] == expected
    table = ItemTable.open(tmp_path / "items.arrow")  # which remembers none of them
    assert table.rows_of(asked).tolist() == table.rows_of(asked).tolist() == expected
    assert table.rows_of([]).tolist() == []
    assert table.ids_of(np.array([2, 0])) == ["梨", "b12"]
    assert len(table) == len(IDS)


def test_parts_of_a_table_and_joined_tables_hash_no_id_again(monkeypatch: pytest.MonkeyPatch) -> None:
    table = ItemTable.build(pa.table({"id": IDS, "place": range(len(IDS))}))
    rows = np.random.default_rng(4).permutation(len(IDS))
    halves = rows[:3], rows[3:]
    with monkeypatch.context() as patched:
        patched.delattr(items_module, "_hash")
        parts = [table.take(half) for half in halves]
        joined = ItemTable.joined(parts, halves)
        with pytest.raises(InvalidData, match="each id once"):
            table.take(np.array([1, 0, 1]))
    for part, half in zip(parts, halves, strict=True):
        assert part.rows_of([IDS[row] for row in half]).tolist() == list(range(len(half)))
        assert part.values("place", np.arange(len(half))) == half.tolist()
    assert joined.rows_of(IDS).tolist() == list(range(len(IDS)))
    assert joined.to_table().equals(table.to_table())


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
        (pa.table({"id": ["a", None]}), r"items\.id: got null, expected a non-empty string"),
        (pa.table({"id": ["a", ""]}), r"items\.id: got '', expected ids of 1 to 512 bytes"),
        (pa.table({"id": pa.array([], pa.string())}), "at least one id"),
        (pa.table({"id": ["b", "a" * 513]}), rf"items\.id: got '{'a' * 60}… \(513 bytes\)', expected ids of 1 to 512 bytes"),
        (pa.table({"id": ["é" * 257]}), r"é… \(514 bytes\)'"),
        (pa.table({"id": ["a", "梨", "梨"]}), r"items\.id: got '梨', expected each id once"),
    ],
)
def test_a_bad_item_table_is_refused(table: pa.Table, message: str) -> None:
    with pytest.raises(InvalidData, match=message):
        ItemTable.build(table)


# -- files that somebody made ---------------------------------------------------------------------------------------------


def item_file(path: Path, **columns: pa.Array) -> Path:
    """An item table of three items with other columns, as a file."""
    ItemTable.build(pa.table({"id": ["a", "b", "c"]})).write(path)
    with pa.OSFile(str(path), "rb") as source:
        whole = pa.ipc.open_file(source).read_all()
    for name, column in columns.items():
        whole = whole.set_column(whole.column_names.index(name), pa.field(name, column.type), column)
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


@pytest.mark.parametrize(
    ("name", "column", "said"),
    [
        (HASH_COLUMN, pa.array([0, 1, 2], pa.int64()), "expected a column '__hash' of type uint64"),
        ("id", pa.array(["a", None, "c"], pa.large_string()), "is missing"),
        (ROW_COLUMN, pa.array([0, None, 2], pa.int64()), "is missing"),
        (HASH_COLUMN, pa.array([0, None, 2], pa.uint64()), "is missing"),
        (ROW_COLUMN, pa.array([0, 1, 3], pa.int64()), "the index has rows outside 0 … 2"),
        (ROW_COLUMN, pa.array([0, -1, 2], pa.int64()), "the index has rows outside"),
        (ROW_COLUMN, pa.array([0, 1, 2**62], pa.int64()), "the index has rows outside"),
    ],
)
def test_an_index_that_is_none_of_these_items_is_refused(tmp_path: Path, name: str, column: pa.Array, said: str) -> None:
    with pytest.raises(BundleCorrupt, match=said):
        ItemTable.open(item_file(tmp_path / "items.arrow", **{name: column}))


@pytest.mark.parametrize("kind", ["plain", "dictionary"])
@pytest.mark.parametrize("options", [{}, {"metadata_version": pa.ipc.MetadataVersion.V4}])
def test_an_item_table_that_unpacks_to_any_size_is_not_read(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    file, titles = tmp_path / "items.arrow", pa.array(["x" * (1 << 20)] * 2)
    table = ItemTable.build(pa.table({"id": ["a", "b"], "title": titles if kind == "plain" else titles.dictionary_encode()}))
    table.write(file)
    with pa.OSFile(str(file), "rb") as source:
        whole = pa.ipc.open_file(source).read_all()
    for compression in (None, "zstd", "lz4"):
        written = pa.ipc.IpcWriteOptions(compression=compression, **options)
        with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, whole.schema, options=written) as writer:
            writer.write_table(whole)
        if compression is None and not options:
            assert ItemTable.open(file).ids_of(np.arange(2)) == ["a", "b"]
            continue
        with pytest.raises(BundleCorrupt, match="its buffers may be compressed, expected plain ones"):
            ItemTable.open(file)


def test_an_item_table_is_mapped_not_read(tmp_path: Path) -> None:
    ItemTable.build(pa.table({"id": ["a", "b"], "title": ["x" * (1 << 20)] * 2})).write(tmp_path / "items.arrow")
    before = pa.total_allocated_bytes()
    table = ItemTable.open(tmp_path / "items.arrow")
    assert pa.total_allocated_bytes() - before < 1 << 16
    assert len(table) == 2


@pytest.mark.parametrize("content", [b"ARROW1", b"ARROW1\0\0" + b"\xff" * 40, b"ARROW1\0\0\xff\xff\xff\xff\x10\0\0\0" + b"\0" * 64])
def test_a_file_that_only_begins_as_an_item_table_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "items.arrow").write_bytes(content)
    with pytest.raises(BundleCorrupt, match=r"items\.arrow: not a readable Arrow file"):
        ItemTable.open(tmp_path / "items.arrow")


# -- files that are changed in place ------------------------------------------------------------------------------------


WRONG = 1 << 30
"""Far outside every table."""


PARTS = {"memory": "memory.safetensors", "linear": "chunks.safetensors", "tail": "tail.safetensors", "stacking": "stacking.safetensors"}


def spoil(file: Path, way: str) -> None:
    if way == "cut":
        with file.open("r+b") as stream:
            stream.truncate(0)
        return
    header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    with file.open("r+b") as stream:
        stream.seek(header)
        stream.write(np.full((file.stat().st_size - header) // 4, WRONG, np.int32).tobytes())


def main(folder: Path, way: str) -> None:
    """In a process of its own, which may be killed: what it was at is printed."""
    feature_tables.DIRECT_BYTES = 0  # as for very many features: rows of weights are read where the bundle has them
    for kind, name in PARTS.items():
        print(kind, flush=True)
        spoil_while_open(MADE[kind](folder / kind).path, name, way)


def spoil_while_open(path: Path, name: str, way: str) -> None:
    """Answers before and after a file was spoilt are the same."""
    shutil.copytree(path, path.with_name("twin"))
    bundle = Bundle.open(path)
    engine, rng = open_engine(bundle, "cpu"), np.random.default_rng(5)
    before, after = (random_queries(rng, bundle, 20, integer=False) for _ in range(2))
    params = SearchParams.uniform(20, 4, 9)
    engine.search(before, params)
    spoil(path / name, way)
    found = engine.search(after, params)
    twin = Bundle.open(path.with_name("twin"), verify=False)
    expected = open_engine(twin, "cpu").search(after, params)
    assert np.array_equal(found.item_rows_BM, expected.item_rows_BM)
    assert np.array_equal(found.keys_BM, expected.keys_BM)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["overwritten", "cut"])
def test_answers_stay_right_where_a_file_is_changed_in_place(tmp_path: Path, way: str) -> None:
    done = subprocess.run([sys.executable, "-m", __name__, str(tmp_path), way], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
