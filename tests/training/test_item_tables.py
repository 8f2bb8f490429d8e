"""Item tables as Parquet and as text."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from espalier.errors import InvalidConfig
from training.data.item_tables import item_table

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
    table = item_table(file, pa.array(["02", "1", "3"])).to_table()
    assert [str(kind) for kind in table.schema.types[2:]] == ["int64", "double", "bool"]
    assert table.column("id").to_pylist() == ["02", "1", "3"]
    for column, (first, second) in COLUMNS.items():
        assert column == "id" or table.column(column).to_pylist() == [second, first, None]


def test_text_that_is_no_table_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "items.csv"
    for text, expected in (
        ("name,year\na,1\n", "a column named 'id'"),
        ("", "a Parquet file, or text named"),
        ("id,a\n1,2,3\n", "a Parquet file, or"),
    ):
        file.write_text(text)
        with pytest.raises(InvalidConfig, match=expected):
            item_table(file, pa.array(["1"]))


def test_columns_of_codes_and_of_numbers_that_are_too_large_stay_text(tmp_path: Path) -> None:
    file = tmp_path / "items.csv"
    file.write_text("id,postcode,long,mixed,small,none\n1,01067,9223372036854775808,1,-1e-3,\n2,80331,2,x,2.50,\n")
    table = item_table(file, pa.array(["1", "2"])).to_table()
    found = {name: table.column(name).to_pylist() for name in table.column_names[1:]}
    assert found == {
        "postcode": ["01067", "80331"],
        "long": ["9223372036854775808", "2"],
        "mixed": ["1", "x"],
        "small": [-0.001, 2.5],
        "none": [None, None],
    }
