"""The item table on disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import espalier.items as items_module
from espalier.bundle import GRAPH_PARTS, Bundle
from espalier.errors import (
    BundleCorrupt,
    BundleError,
    EspalierError,
    InvalidData,
)
from espalier.items import ItemTable
from tests.espalier.bundle.parts import read_everything, reseal

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
