"""The item table on disk: ids are found, columns come back, and nothing is handed out that is not in the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import espalier.items as items_module
from espalier.errors import BundleCorrupt, InvalidData
from espalier.items import HASH_COLUMN, ROW_COLUMN, ItemTable

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
