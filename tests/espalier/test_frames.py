"""Files as tables: what stands between the columns of a text file, and times that are none."""

from __future__ import annotations

import gzip
from pathlib import Path

import pyarrow as pa
import pytest

from espalier.errors import InvalidInput
from espalier.frames import as_table, lists_of

ROWS = [("customer", "item no", "at"), ("007", "a,b", "2026-03-08 07:24"), ("8", "NA", "2026-03-08 07:25")]


@pytest.mark.parametrize("sign", [";", "\t", "|"])
@pytest.mark.parametrize("packed", [False, True])
def test_the_first_line_says_what_stands_between_columns(tmp_path: Path, sign: str, packed: bool) -> None:
    text = "\ufeff" + "\r\n".join(sign.join(row) for row in ROWS) + "\r\n"
    file = tmp_path / ("log.csv.gz" if packed else "log.csv")
    file.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    table = as_table("--queries", file, ("customer", "item no"))
    assert table.column_names == list(ROWS[0])
    assert table.column("customer").to_pylist() == ["007", "8"]
    assert lists_of(table, "customer", "item no", "at") == {"007": ["a,b"], "8": ["NA"]}


def test_a_comma_is_what_stands_there_where_no_sign_gives_the_columns(tmp_path: Path) -> None:
    file = tmp_path / "log.csv"
    file.write_text('"user;id",item\n1,2\n')
    assert as_table("--queries", file, ("user;id", "item")).column_names == ["user;id", "item"]
    with pytest.raises(InvalidInput, match="expected one of the columns user;id, item"):
        lists_of(as_table("--queries", file, ("nobody", "item")), "nobody", "item", None)


def test_times_that_are_texts_are_shown_with_what_was_expected() -> None:
    table = pa.table({"user": ["1"], "item": ["2"], "at": ["08.03.2026 07:24"]})
    with pytest.raises(InvalidInput, match=r"time: got 'at: 08\.03\.2026 07:24', expected a column of numbers, or of times as ISO 8601"):
        lists_of(table, "user", "item", "at")
