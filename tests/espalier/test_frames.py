"""Files as tables: what stands between the columns of a text file, and times that are none."""

from __future__ import annotations

import gzip
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from espalier import frames
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


def test_line_ends_in_quotes_are_part_of_a_field_wherever_a_block_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_RECORD", 1000)
    rows = [(f"u{n}", f"i{n % 7}", f"red,{n % 3}\n,soft\n,,new\n" * (n % 5)) for n in range(600)]
    file = tmp_path / "log.csv"
    file.write_text("user,item,review\n" + "".join(f'{user},{item},"{review}"\n' for user, item, review in rows))
    table = as_table("--queries", file, ("user", "item"))
    assert table.column("user").to_pylist() == [user for user, _, _ in rows]
    assert lists_of(table, "user", "item", None) == {user: [item] for user, item, _ in rows}


def test_names_are_found_as_for_training(tmp_path: Path) -> None:
    file = tmp_path / "log.csv"
    file.write_text("User, ITEM,At\n007,1,2026-03-08 07:25:00 UTC\n007,02,2026-03-08 09:24:00 +02:00\n")
    assert lists_of(as_table("--queries", file, ("user", "item")), "user", "item", "at") == {"007": ["02", "1"]}
    table = pa.table({"User": [1.0, 1.0], "item": ["a", "b"], "at": ["2026-03-08 07:25", "2026-03-08 07:24:59.123456789"]})
    assert lists_of(as_table("--queries", table, ("user", "item")), "user", "item", "AT") == {1: ["b", "a"]}


@pytest.mark.parametrize("text", [b"user,item\r007,i1\r007,i2\r", b"\n\r\nuser,item\n007,i1\n007,i2\n"])
def test_lines_may_end_with_cr_and_the_first_may_be_blank(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "log.csv").write_bytes(text)
    assert lists_of(as_table("--queries", tmp_path / "log.csv", ("user", "item")), "user", "item", None) == {"007": ["i1", "i2"]}
    (tmp_path / "log.csv").write_bytes(text[text.index(b"007") :])
    assert lists_of(as_table("--queries", tmp_path / "log.csv", ("0", "1")), "0", "1", None) == {"007": ["i1", "i2"]}


def test_a_field_beyond_what_is_read_is_an_error_of_the_input(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text(f"u,{'i' * 200_000}\n")
    with pytest.raises(InvalidInput, match="field larger than field limit"):
        as_table("--queries", tmp_path / "log.csv", ("0", "1"))


def test_ids_in_the_names_of_folders_are_text(tmp_path: Path) -> None:
    for item in ("007", "08"):
        (tmp_path / f"item={item}").mkdir()
        pq.write_table(pa.table({"user": ["u"]}), tmp_path / f"item={item}" / "part.parquet")
    assert lists_of(as_table("--queries", tmp_path, ("user", "item")), "user", "item", None) == {"u": ["007", "08"]}


def test_a_folder_of_parquet_is_a_table(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / f"day=2026-01-0{number}").mkdir()
        pq.write_table(pa.table({"user": ["u"], "item": [f"i{number}"]}), tmp_path / f"day=2026-01-0{number}" / "part.parquet")
    assert lists_of(as_table("--queries", tmp_path, ("user", "item")), "user", "item", "day") == {"u": ["i1", "i2"]}
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "log.csv").write_text("user,item\nu,i\n")
    with pytest.raises(InvalidInput, match=r"--queries: got .*other., expected a file that ends in \.csv or \.tsv"):
        as_table("--queries", tmp_path / "other", ("user", "item"))


def test_times_that_are_texts_are_shown_with_what_was_expected() -> None:
    table = pa.table({"user": ["1"], "item": ["2"], "at": ["08.03.2026 07:24"]})
    with pytest.raises(InvalidInput, match=r"time: got 'at: 08\.03\.2026 07:24', expected a column of numbers, or of times as ISO 8601"):
        lists_of(table, "user", "item", "at")


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())])
def test_an_empty_text_is_no_time(kind: pa.DataType) -> None:
    times = pa.array(["2026-03-08 07:25", "", "2026-03-08 07:24"]).cast(kind)
    assert lists_of(pa.table({"user": ["1"] * 3, "item": ["a", "b", "c"], "at": times}), "user", "item", "at") == {"1": ["c", "a"]}


def test_times_of_which_some_have_a_zone_are_no_column_of_times() -> None:
    table = pa.table({"user": ["1"] * 2, "item": ["a", "b"], "at": ["2026-03-08 07:24", "2026-03-08 07:24Z"]})
    with pytest.raises(InvalidInput, match=r"got 'at: 2026-03-08 07:24', expected .*, all with a zone or all without"):
        lists_of(table, "user", "item", "at")


def test_the_value_that_is_no_time_is_named() -> None:
    table = pa.table({"user": ["1"] * 4, "item": ["2"] * 4, "at": ["10", "2026-03-08 07:24", "", "xx"]})
    with pytest.raises(InvalidInput, match="time: got 'at: xx', expected"):
        lists_of(table, "user", "item", "at")


@pytest.mark.parametrize("missing", [None, np.nan])
def test_rows_without_a_user_an_item_or_a_time_are_left_out_unless_they_are_many(missing: float | None) -> None:
    many = list[int | None](range(60))
    columns = {"user": [1] * 60, "item": many, "at": pa.array([missing, *range(1, 60)], pa.float64())}
    assert lists_of(pa.table(columns), "user", "item", "at") == {1: [str(item) for item in range(1, 60)]}
    columns |= {"user": [1, None, *[1] * 58], "item": [0, 1, None, *many[3:]]}
    assert lists_of(pa.table(columns), "user", "item", "at") == {1: [str(item) for item in range(3, 60)]}
    columns |= {"user": [1] * 30 + [None] * 30}
    with pytest.raises(InvalidInput, match="user: got '32 of 60 rows without a user, an item or a time', expected at most half"):
        lists_of(pa.table(columns), "user", "item", "at")


class Pandas(dict[str, "np.ndarray[Any, Any]"]):
    """What is read of a data frame of pandas, which is not installed."""

    __module__ = "pandas"

    @property
    def columns(self) -> list[str]:
        return [*self]


def objects(*values: object) -> np.ndarray[Any, Any]:
    return np.array(values, object)


@pytest.mark.parametrize(
    ("values", "row"), [(objects(7, None, "7", 8), 2), (objects("7", "8", 9), 2), (objects(1, 2, 2**70), 2), (objects(2**70, 1), 0)]
)
def test_ids_of_several_types_are_shown_with_what_makes_them_one(values: np.ndarray[Any, Any], row: int) -> None:
    with pytest.raises(InvalidInput) as raised:
        as_table("data", Pandas(user=objects("a", "b"), item=values))
    assert (raised.value.field, raised.value.value) == (f"data['item'], row {row} (from 0)", values[row])
    assert raised.value.expected.endswith("""; data['item'].astype("string") makes all of them strings""")


@pytest.mark.parametrize("kind", [pa.float64(), pa.float32(), pa.float16()])
def test_ids_that_are_whole_floats_are_integers(kind: pa.DataType) -> None:
    table = pa.table({"user": pa.array([7.0, None, -1.0, np.nan], kind), "price": [1.0, 2.0, 3.0, 4.0]})
    users = as_table("data", table, ("user", "item")).column("user")
    assert (users.type, users.to_pylist()) == (pa.int64(), [7, None, -1, None])
    assert as_table("data", table, ("user", "item")).schema.field("price").type == pa.float64()
    assert as_table("data", table, ("item", None)).column("user").equals(users)
    frame = Pandas(user=np.array([7.0, np.nan]), item=objects("a", "b"))
    assert lists_of(as_table("data", frame, ("user", "item")), "user", "item", None) == {7: ["a"]}


@pytest.mark.parametrize("value", [1.5, 2.0**53, -(2.0**60), np.inf])
def test_other_floats_are_no_ids(value: float) -> None:
    table = as_table("data", pa.table({"user": [1.0, value], "item": ["a", "b"]}), ("user", "item"))
    with pytest.raises(
        InvalidInput, match=rf"user: got 'user: {re.escape(str(pa.scalar(value)))}', expected strings or whole numbers below 2\^53"
    ):
        lists_of(table, "user", "item", None)


@pytest.mark.parametrize(("name", "sign"), [("log.tsv", "\t"), ("log.tsv.gz", "\t"), ("log.csv", ","), ("log.csv", ";")])
def test_columns_that_are_numbers_are_positions_in_text_without_a_header(tmp_path: Path, name: str, sign: str) -> None:
    text = "\n".join(sign.join(row) for row in [("0", "007", "1", "30"), ("0", "8", "3", "20"), ("1", "NA", "5", "10")]).encode()
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    table = as_table("--queries", tmp_path / name, ("0", "1"))
    assert lists_of(table, "0", "1", "3") == {"1": ["NA"], "0": ["8", "007"]}
    with pytest.raises(InvalidInput, match="time: got '4', expected one of the columns 0, 1, 2, 3"):
        lists_of(table, "0", "1", "4")
    with pytest.raises(
        InvalidInput, match=r"user: got '2', expected one of .*; positions are for text without a header, and for all columns"
    ):
        lists_of(as_table("--queries", tmp_path / name, ("2", "item")), "2", "item", None)
