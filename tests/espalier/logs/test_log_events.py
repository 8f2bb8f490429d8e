"""Histories of logs in any form that training reads, and times that are none."""

from __future__ import annotations

import gzip
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from espalier.errors import InvalidData
from espalier.logs import log_layout
from espalier.logs.log_events import histories, read_table
from espalier.logs.text_files import text_batches
from espalier.wording import in_python

ROWS = [("customer", "item no", "at"), ("007", "a,b", "2026-03-08 07:24"), ("8", "NA", "2026-03-08 07:25")]


def of_text(folder: Path, text: str | bytes, user: str, item: str, time: str | None = None, name: str = "log.csv") -> dict[str, list[str]]:
    (folder / name).write_bytes(text.encode() if isinstance(text, str) else text)
    return histories(folder / name, user, item, time).lists


def of_table(folder: Path, time: str | None = None, **columns: Any) -> dict[str, list[str]]:
    pq.write_table(pa.table(columns), folder / "log.parquet")
    return histories(folder / "log.parquet", "user", "item", time).lists


@pytest.mark.parametrize("sign", [";", "\t", "|", "::"])
@pytest.mark.parametrize("packed", [False, True])
def test_the_rows_say_what_stands_between_columns(tmp_path: Path, sign: str, packed: bool) -> None:
    text = ("\ufeff" + "\r\n".join(sign.join(row) for row in ROWS) + "\r\n").encode()
    name, text = ("log.csv.gz", gzip.compress(text)) if packed else ("log.csv", text)
    assert of_text(tmp_path, text, "customer", "item no", "at", name) == {"007": ["a,b"], "8": ["NA"]}
    table = read_table(tmp_path / name, ("customer", "item no"))
    assert (table.column_names, table["customer"].to_pylist()) == (list(ROWS[0]), ["007", "8"])


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "latin-1", "cp1252", "utf-8-sig"])
def test_letters_are_read_in_the_encoding_of_the_file(tmp_path: Path, encoding: str) -> None:
    text = "Käufer;Artikel\nJosé;Öl\nZoë;Tür\n"
    assert of_text(tmp_path, text.encode(encoding), "käufer", "artikel") == {"José": ["Öl"], "Zoë": ["Tür"]}


@pytest.mark.parametrize(
    ("later", "earlier"),
    [
        ("31.12.2024 23:59", "31.1.2024 23:59"),
        ("12/31/2024", "01/31/2024"),
        ("1735689600,5", "1735689600,25"),
        ("2024-12-31T23:59:00.123456789", "2024-12-31T23:58"),
        ("2026-03-08 07:25:00 UTC", "2026-03-08 09:24:00 +02:00"),
        ("1735689600001", "1735689600000"),
        ("10", "9"),
    ],
)
def test_times_are_read_as_for_training(tmp_path: Path, later: str, earlier: str) -> None:
    assert of_text(tmp_path, f"user;item;at\nu;b;{later}\nu;a;{earlier}\n", "user", "item", "at") == {"u": ["a", "b"]}


def test_line_ends_in_quotes_are_part_of_a_field_wherever_a_block_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [(f"u{n}", f"i{n % 7}", f"red,{n % 3}\n,soft\n,,new\n" * (n % 5)) for n in range(600)]
    text = "user,item,review\n" + "".join(f'{user},{item},"{review}"\n' for user, item, review in rows)
    monkeypatch.setattr(log_layout, "text_batches", partial(text_batches, block_bytes=1000))
    assert of_text(tmp_path, text, "user", "item") == {user: [item] for user, item, _ in rows}


def test_a_text_longer_than_the_reader_of_the_layout_takes_hides_no_columns(tmp_path: Path) -> None:
    for quote in ("", '"'):
        text = f"user,item,review\na,x,short\nb,y,{quote}{'word ' * 40_000}{quote}\na,z,short\n"
        assert of_text(tmp_path, text, "user", "item") == {"a": ["x", "z"], "b": ["y"]}


def test_names_in_options_say_what_stands_between_columns(tmp_path: Path) -> None:
    for event, found in (("", {}), ("a,x,the cat is on\n", {"a": ["x"]})):
        assert of_text(tmp_path, f"user id,item id,event time\n{event}", "user id", "item id") == found


def test_times_may_be_whole_in_the_first_rows_alone(tmp_path: Path) -> None:
    times = np.append(np.zeros(log_layout.ROWS), [1.5, 0.5])
    ids = [str(row) for row in range(len(times))]
    assert of_table(tmp_path, "at", user=["u"] * len(ids), item=ids, at=times)["u"][-2:] == [ids[-1], ids[-2]]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("text\nred shoes\nblue shirt\ngreen hat for men\n", {"text": ["red shoes", "blue shirt", "green hat for men"]}),
        ('name;text\n1;"red; soft"\n;blue, new\n', {"name": ["1", None], "text": ["red; soft", "blue, new"]}),
        ("name,text\n", {"name": [], "text": []}),
    ],
)
def test_the_first_line_of_a_table_names_its_columns(tmp_path: Path, text: str, expected: dict[str, list[str | None]]) -> None:
    (tmp_path / "queries.csv").write_text(text)
    assert read_table(tmp_path / "queries.csv", ["text"]).to_pydict() == expected


@pytest.mark.parametrize("kind", [pa.string(), pa.int64(), pa.int32(), pa.float64()])
def test_users_keep_their_type(tmp_path: Path, kind: pa.DataType) -> None:
    ids = pa.array([7, None, 8]).cast(kind)
    pq.write_table(pa.table({"user": ids, "item": ["a", "b", "c"]}), tmp_path / "log.parquet")
    found = histories(tmp_path / "log.parquet", "user", "item")
    assert found.lists == {"7": ["a"], "8": ["c"]}
    assert found.users.type == (pa.int64() if kind == pa.float64() else kind)


def test_a_folder_of_parquet_is_read_as_for_training(tmp_path: Path) -> None:
    for day, item in (("2026-01-02", "08"), ("2026-01-01", "007"), ("__HIVE_DEFAULT_PARTITION__", "9")):
        folder = tmp_path / "log" / f"day={day}" / f"item={item}"
        folder.mkdir(parents=True)
        pq.write_table(pa.table({"user": ["u"]}), folder / "part.parquet")
        (folder / "_SUCCESS").write_text("")
        (folder / ".part.parquet.crc").write_text("no Parquet")
    assert histories(tmp_path / "log", "user", "item").lists == {"u": ["007", "08", "9"]}
    assert histories(tmp_path / "log", "user", "item", "day").lists == {"u": ["007", "08"]}
    assert read_table(tmp_path / "log")["day"].to_pylist() == ["2026-01-01", "2026-01-02", None]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "log.csv").write_text("user,item\nu,i\n")
    with pytest.raises(InvalidData, match=r"other/log\.csv: got .*, expected a Parquet file; only folders of Parquet"):
        histories(tmp_path / "other", "user", "item")


def test_a_log_without_events_has_no_histories(tmp_path: Path) -> None:
    assert of_table(tmp_path, user=pa.array([], pa.int64()), item=pa.array([], pa.string())) == {}
    assert of_text(tmp_path, "user,item\n", "user", "item") == {}


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())])
def test_an_empty_text_is_no_time(tmp_path: Path, kind: pa.DataType) -> None:
    times = pa.array(["2026-03-08 07:25", "", "2026-03-08 07:24"]).cast(kind)
    assert of_table(tmp_path, "at", user=["1"] * 3, item=["a", "b", "c"], at=times) == {"1": ["c", "a"]}


@pytest.mark.parametrize("missing", [None, np.nan])
def test_rows_without_a_user_an_item_or_a_time_are_left_out_unless_they_are_many(tmp_path: Path, missing: float | None) -> None:
    many = list[int | None](range(60))
    columns = {"user": [1] * 60, "item": many, "at": pa.array([*[missing] * 20, *range(20, 60)], pa.float64())}
    assert of_table(tmp_path, "at", **columns) == {"1": [str(item) for item in range(20, 60)]}
    columns |= {"user": [1, None, *[1] * 58], "item": [0, 1, None, *many[3:]]}
    assert of_table(tmp_path, "at", **columns) == {"1": [str(item) for item in range(20, 60)]}
    columns |= {"user": [1] * 30 + [None] * 30}
    with pytest.raises(InvalidData, match=r"data: got '50 of 60 rows left out \(no user: 30, .*', expected at most half"):
        of_table(tmp_path, "at", **columns)


@pytest.mark.parametrize(
    ("text", "columns", "message"),
    [
        ("user,item,at\n1,2,10\n1,2,xx\n", ("user", "item", "at"), "column 'at': got 'xx', expected a number, or a time"),
        ("user,item,at\n1,2,\n1,3,\n", ("user", "item", "at"), "column 'at': got 'nothing in the first 2 rows', expected times, or say"),
        ("user,item,at\n1,2,2026-03-08 07:24\n1,2,2026-03-08 07:24Z\n", ("user", "item", "at"), "times all with a zone or all without one"),
        (
            "user;id,item\n1,2\n",
            ("nobody", "item"),
            "column user: got 'nobody', expected one of ['user;id', 'item']: say which",
        ),
        ("user,item,item\na,x,y\n", ("user", "item"), "expected one of ['user', 'item', 'item'], once"),
        ("user,item\rA,x\r", ("user", "item"), "got 'line ends of CR alone', expected lines that end with LF"),
        (f"u,{'i' * 200_000}\n", ("0", "1"), "expected as many fields as in every line"),
        ("1 2 3\n4 5\n", ("0", "1"), "expected an event a row: this is a user a line"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, columns: tuple[str, ...], message: str) -> None:
    with pytest.raises(InvalidData, match=re.escape(message)) as refused:
        of_text(tmp_path, text, *columns)
    assert "data.format" not in str(refused.value), "nobody wrote a configuration"


@pytest.mark.parametrize("ids", [[[1]], [{"a": 1}], [b"x"], [1.5], [2.0**53], [-(2.0**60)], [np.inf]])
def test_values_that_are_no_ids_are_refused(tmp_path: Path, ids: list[Any]) -> None:
    with pytest.raises(InvalidData, match=r"log\.parquet: column user: got '.*', expected strings"):
        of_table(tmp_path, user=ids, item=["x"])


@pytest.mark.parametrize(("name", "sign"), [("log.tsv", "\t"), ("log.tsv.gz", "\t"), ("log.csv", ","), ("log.csv", ";")])
def test_columns_that_are_numbers_are_positions_in_text_without_a_header(tmp_path: Path, name: str, sign: str) -> None:
    text = "\n".join(sign.join(row) for row in [("0", "007", "1", "30"), ("0", "8", "3", "20"), ("1", "NA", "5", "10")]).encode()
    text = gzip.compress(text) if name.endswith(".gz") else text
    assert of_text(tmp_path, text, "0", "1", "3", name) == {"1": ["NA"], "0": ["8", "007"]}
    with pytest.raises(InvalidData, match=r"column time: got '4', expected one of \[0, 1, 2, 3\]"):
        of_text(tmp_path, text, "0", "1", "4", name)


def test_threads_read_different_logs_at_once_and_each_is_told_as_its_caller(tmp_path: Path) -> None:
    logs = [tmp_path / f"{number}.csv" for number in range(8)]
    for number, log in enumerate(logs):
        rows = [f"u{row % 9},i{number},{'' if number % 2 else row}" for row in range(200)]
        log.write_text("\n".join(["user,item,at", *rows]), "utf-16" if number % 3 else "utf-8")

    def found(number: int) -> Any:
        with in_python() if number % 4 == 1 else nullcontext():
            try:
                return histories(logs[number], "user", "item", "at").lists
            except InvalidData as error:
                return str(error)

    alone = [found(number) for number in range(8)]
    assert [text.rpartition("say ")[2][:6] for text in alone[1::2]] == ['time="', "--time"] * 2
    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(found, [*range(8)] * 2)] == alone * 2
