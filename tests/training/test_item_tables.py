"""Item tables as Parquet and as text, and what content a model may take from them."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from espalier.errors import InvalidConfig, InvalidData
from espalier.items import ItemTable
from training.data import item_content as module
from training.data.item_content import item_content
from training.data.item_tables import item_table
from training.specification.deep import ContentConfig
from training.specification.log_format import TextTable

TEXT = '\ufeffid,title,year,price,live\r\n1,"Toy, ""Story""",1995,2.5,true\r\n02,Heat,,3,false\r\n'
COLUMNS: dict[str, list[Any]] = {
    "id": ["1", "02"],
    "title": ['Toy, "Story"', "Heat"],
    "year": [1995, None],
    "price": [2.5, 3.0],
    "live": [True, False],
}


@pytest.mark.parametrize("name", ["items.csv", "items.csv.gz", "items.tsv", "items.parquet"])
def test_a_table_of_any_format_has_the_same_columns(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    if name.endswith(".gz"):
        file.write_bytes(gzip.compress(TEXT.encode()))
    elif name.endswith(".csv"):
        file.write_text(TEXT)
    elif name.endswith(".tsv"):
        file.write_text('id\ttitle\tyear\tprice\tlive\n1\t"Toy, ""Story"""\t1995\t2.5\ttrue\n02\tHeat\t\t3\tfalse\n')
    else:
        pq.write_table(pa.table(COLUMNS), file)
    table = item_table(file, pa.array(["02", "1", "3"]), TextTable()).to_table()
    assert [str(kind) for kind in table.schema.types[2:]] == ["int64", "double", "bool"]
    assert table.column("id").to_pylist() == ["02", "1", "3"]
    for column, (first, second) in COLUMNS.items():
        assert column == "id" or table.column(column).to_pylist() == [second, first, None]


def test_text_that_is_no_table_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "items.csv"
    for text, expected in (
        ("name,year\na,1\n", "a column named 'id'"),
        ("", "a column named 'id'"),
        ("id,a\n1,2,3\n", r"items.csv: line 2: got '1,2,3', expected 2 fields, not 3; data\.items_format\.bad_rows = .skip. leaves"),
        ("id;a\n1;2\n", "a column named 'id'; .* data.items_format.separator"),
    ):
        file.write_text(text)
        with pytest.raises((InvalidConfig, InvalidData), match=expected):
            item_table(file, pa.array(["1"]), TextTable())


def test_columns_of_codes_and_of_numbers_that_are_too_large_stay_text(tmp_path: Path) -> None:
    file = tmp_path / "items.csv"
    file.write_text("id,postcode,long,mixed,small,none\n1,01067,9223372036854775808,1,-1e-3,\n2,80331,2,x,2.50,\n")
    table = item_table(file, pa.array(["1", "2"]), TextTable()).to_table()
    found = {name: table.column(name).to_pylist() for name in table.column_names[1:]}
    assert found == {
        "postcode": ["01067", "80331"],
        "long": ["9223372036854775808", "2"],
        "mixed": ["1", "x"],
        "small": [-0.001, 2.5],
        "none": [None, None],
    }


# -- content ------------------------------------------------------------------------------------------------------------


def table(**columns: Any) -> ItemTable:
    count = len(next(iter(columns.values()), []))
    return ItemTable.build(pa.table({"id": [f"i{row}" for row in range(count or 3)], **columns}))


def names(items: ItemTable, **config: Any) -> list[str]:
    content = item_content(items, ContentConfig(**({"columns": "auto"} | config)))
    return [] if content is None else [column.name for column in content.info.columns]


def test_auto_takes_what_it_can_use() -> None:
    items = table(
        title=["a", "a", "b"],
        tags=[["x"], ["x"], None],
        year=[1, 2, None],
        same=[4, 4, 4],
        when=pa.array([0, 1, 2], pa.timestamp("s")),
        counts=[[1], [2], []],
        infinite=[np.inf, 1.0, 2.0],
    )
    assert names(items) == ["title", "tags", "year", "infinite"]
    assert names(items, columns=("year",)) == ["year"]
    assert names(items, columns=()) == []


def test_nothing_shared_is_no_content() -> None:
    assert names(table()) == []
    assert names(table(title=["a", "b", "c"])) == []


def test_whole_numbers_that_no_float_holds_are_rounded() -> None:
    """Such as times in nanoseconds."""
    content = item_content(table(when=[2**60 + 1, 2**60 + 2**40, 2**60 + 2**41]), ContentConfig(columns="auto"))
    assert content is not None
    assert content.rows.values.reshape(3, 2)[:, 1].tolist() == pytest.approx([-1.2247, 0, 1.2247], abs=1e-3)


@pytest.mark.parametrize("column", ["id", "nothing", "when"])
def test_a_column_that_cannot_be_used_is_named(column: str) -> None:
    items = table(title=["a", "a", "b"], when=pa.array([0, 1, 2], pa.timestamp("s")))
    with pytest.raises(InvalidConfig, match=rf"content\.columns: got '{column}'"):
        item_content(items, ContentConfig(columns=(column,)))


def test_features_have_a_limit_values_before_words() -> None:
    items = table(tags=[[f"t{i % 20}" for i in range(row, row + 9)] for row in range(60)], title=["one two three four five six"] * 60)
    small, large = (item_content(items, ContentConfig(columns="auto", features=features)) for features in (16, 64))
    assert small is not None
    assert large is not None
    assert (small.info.features, small.info.values, small.info.blocks) == (16, 15, ())
    assert large.info.values == 21  # twenty tags, and the title as a whole
    assert (large.rows.width, small.rows.width) == (large.info.features, 16)


def test_blocks_of_items_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    items = table(title=[f"w{row % 7} v{row % 3}" for row in range(50)], price=[float(row) for row in range(50)])
    whole = item_content(items, ContentConfig(columns="auto"))
    monkeypatch.setattr(module, "BLOCK", 3)
    parts = item_content(items, ContentConfig(columns="auto"))
    assert whole is not None
    assert parts is not None
    for name in ("indptr", "indices", "values"):
        np.testing.assert_array_equal(getattr(whole.rows, name), getattr(parts.rows, name))
