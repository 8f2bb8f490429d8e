"""Logs of Parquet, a file or a folder: columns in the path, types of ids and times, and what cannot be read."""

from __future__ import annotations

import gzip
from datetime import UTC, date, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from espalier.errors import InvalidData
from espalier.logs.parquet_logs import is_parquet
from tests.training.text_logs import lists, read
from training.data import grouping
from training.data.interactions import read_interactions
from training.specification.log_format import LOG_FORMAT

TIMED: dict[str, Any] = {"timestamp": "time", "order": "timestamp"}


def write_parquet(file: Path, row_group_size: int = 1 << 20, **columns: Any) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), file, row_group_size=row_group_size)
    return file


def refused(path: Path, **options: Any) -> InvalidData:
    with pytest.raises(InvalidData) as error:
        read(path, **options)
    return error.value


def test_the_files_of_a_folder_are_one_log_in_the_order_of_their_paths_but_for_marks_of_other_programs(tmp_path: Path) -> None:
    write_parquet(tmp_path / "log" / "b" / "0.parquet", user=["u"], item=["third"])
    write_parquet(tmp_path / "log" / "a" / "1.parquet", user=["u", "v"], item=["second", "x"])
    write_parquet(tmp_path / "log" / "a" / "0.parquet", user=["u"], item=["first"])
    write_parquet(tmp_path / "log" / "a" / "empty", user=pa.array([], pa.string()), item=pa.array([], pa.string()))
    for name in ("_SUCCESS", ".part-0.crc", "_temporary/0/part-1", ".hidden/part-1"):
        (tmp_path / "log" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "log" / name).write_bytes(b"nothing that can be read")
    assert lists(read(tmp_path / "log")) == {"u": ["first", "second", "third"], "v": ["x"]}


def test_a_column_may_be_in_the_path(tmp_path: Path) -> None:
    write_parquet(tmp_path / "log" / "day=2024-05-02" / "kind=toys%20and%20games" / "0.parquet", user=["u"], item=["a"])
    write_parquet(tmp_path / "log" / "day=2024-05-01" / "kind=__HIVE_DEFAULT_PARTITION__" / "0.parquet", user=["u"], item=["b"])
    log = read(tmp_path / "log", timestamp="day", timestamp_type="datetime", order="timestamp", category="kind")
    assert lists(log) == {"u": ["b", "a"]}
    assert log.category_names == ("toys and games",)
    assert log.category_of_item_I is not None
    assert log.category_of_item_I.tolist() == [0, -1]


@pytest.mark.parametrize(
    "times",
    [
        (pa.array([date(2024, 5, 2)]), pa.array([date(2024, 5, 1)])),
        (pa.array([datetime(2024, 5, 2)], pa.timestamp("ms")), pa.array([datetime(2024, 5, 1)], pa.timestamp("ns"))),
        (pa.array([datetime(2024, 5, 2, tzinfo=UTC)], pa.timestamp("s", "UTC")), pa.array([1714521600000000], pa.timestamp("us", "UTC"))),
    ],
)
def test_times_may_have_another_unit_in_each_file(tmp_path: Path, times: tuple[pa.Array, pa.Array]) -> None:
    for number, time in enumerate(times):
        write_parquet(tmp_path / "log" / f"{number}.parquet", user=["u"], item=[str(number)], time=time)
    assert lists(read(tmp_path / "log", timestamp_type="datetime", **TIMED)) == {"u": ["1", "0"]}


def test_ids_may_have_another_width_or_encoding_in_each_file(tmp_path: Path) -> None:
    users = (pa.int32(), pa.uint64(), pa.int8(), pa.int8())
    items = (pa.string(), pa.large_string(), pa.dictionary(pa.int8(), pa.string()), pa.string_view())
    for number, (user, item) in enumerate(zip(users, items, strict=True)):
        write_parquet(tmp_path / "log" / f"{number}.parquet", user=pa.array([7], user), item=pa.array([f"é{number}"], item))
    assert lists(read(tmp_path / "log")) == {"7": ["é0", "é1", "é2", "é3"]}


@pytest.mark.parametrize(
    ("columns", "field", "value", "expected"),
    [
        ({"user": ["v"], "item": [5]}, "column item", "column 'item' of numbers", "column 'item' of strings, as in log/a"),
        ({"user": ["v"], "item": [None]}, "column item", "column 'item' of null", "column 'item' of strings, as in log/a"),
        ({"user": ["v"], "thing": ["a"]}, "column item", "item", "one of ['user', 'thing'], once"),
        ({"user": ["v"], "item": ["a"], "time": ["1"]}, "column timestamp", "column 'time' of strings", "column 'time' of numbers"),
    ],
)
def test_a_file_with_other_columns_than_the_first_is_named_before_anything_is_read(
    tmp_path: Path, columns: dict[str, Any], field: str, value: str, expected: str
) -> None:
    write_parquet(tmp_path / "log" / "a", user=[""], item=["a"], time=[1])  # reading it would fail
    write_parquet(tmp_path / "log" / "b", **columns)
    timed = TIMED if "time" in columns else {}
    error = refused(tmp_path / "log", **timed)
    assert error.field == f"log/b: {field}"
    assert str(value) in str(error)
    assert expected in str(error)


def test_a_bad_value_is_named_with_file_row_and_column(tmp_path: Path) -> None:
    write_parquet(tmp_path / "log" / "a", user=["u"], item=["a"])
    write_parquet(tmp_path / "log" / "day=1" / "b", row_group_size=50, user=["u"] * 90, item=["a"] * 80 + [None] + ["a"] * 9)
    with pytest.raises(InvalidData) as error:
        read_interactions(tmp_path / "log", LOG_FORMAT.checked({"format": "parquet"}), tmp_path / "work", block_bytes=32 * 7)
    assert (error.value.field, error.value.value) == ("log/day=1/b: row 80 (from 0), column item", None)


@pytest.mark.parametrize("content", [b"", b"user,item\nu,a\n", b"PAR1" + bytes(100) + b"PAR1"])
def test_a_file_that_is_no_parquet_is_named(tmp_path: Path, content: bytes) -> None:
    write_parquet(tmp_path / "log" / "a", user=["u"], item=["a"])
    (tmp_path / "log" / "readme.txt").write_bytes(content)
    error = refused(tmp_path / "log")
    assert error.field == "log/readme.txt"
    assert error.expected == "a Parquet file; only folders of Parquet files are logs: write parts of text into one file, with one header"
    (tmp_path / "log.parquet.gz").write_bytes(gzip.compress(content)[:-9])
    assert refused(tmp_path / "log.parquet.gz").expected == "a Parquet file"


def test_a_damaged_page_is_named_with_its_row_group(tmp_path: Path) -> None:
    file = write_parquet(tmp_path / "log" / "a", row_group_size=1000, user=[f"{u * 7919 % 1000}" for u in range(3000)], item=["a"] * 3000)
    column = pq.ParquetFile(file).metadata.row_group(1).column(0)
    start = column.dictionary_page_offset or column.data_page_offset
    content = bytearray(file.read_bytes())
    content[start : start + column.total_compressed_size] = b"\xff" * column.total_compressed_size
    file.write_bytes(content)
    assert refused(tmp_path / "log").field == "log/a: row group 2"


def test_folders_without_rows_or_files_and_folders_of_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    assert "a folder with Parquet files" in str(refused(tmp_path / "log"))
    write_parquet(tmp_path / "log" / "a", user=pa.array([], pa.string()), item=pa.array([], pa.string()))
    assert refused(tmp_path / "log").value == "no events"
    assert "a folder holds Parquet files" in str(refused(tmp_path / "log", format="lists"))


def test_the_fingerprint_of_a_folder_follows_names_and_contents(tmp_path: Path) -> None:
    def fingerprint(name: str, item: str) -> str:
        for file in (tmp_path / "log").glob("*"):
            file.unlink()
        write_parquet(tmp_path / "log" / name, user=["u"], item=[item])
        return read(tmp_path / "log").fingerprint

    assert fingerprint("a", "x") == fingerprint("a", "x")
    assert len({fingerprint("a", "x"), fingerprint("b", "x"), fingerprint("a", "y")}) == 3


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    events=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 9), st.integers(0, 5)), min_size=1, max_size=60),
    cuts=st.lists(st.integers(0, 60), max_size=4),
    timed=st.booleans(),
    unique=st.booleans(),
    chunk=st.integers(1, 9),
)
def test_a_folder_is_read_as_the_same_log_in_text(
    tmp_path: Path, events: list[tuple[int, int, int]], cuts: list[int], timed: bool, unique: bool, chunk: int
) -> None:
    options: dict[str, Any] = (TIMED if timed else {}) | {"unique": unique}
    text = tmp_path / "log.csv"
    text.write_text("user,item,time\n" + "".join(f"{u},{i},{t}\n" for u, i, t in events))
    folder = tmp_path / "log"
    for file in folder.glob("*"):
        file.unlink()
    edges = sorted({0, *(min(cut, len(events)) for cut in cuts), len(events)})
    for number, (first, last) in enumerate(pairwise(edges)):
        user, item, time = zip(*events[first:last], strict=True)
        write_parquet(folder / f"{number:02}", row_group_size=3, user=user, item=item, time=time)
    whole = read(text, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouping, "CHUNK", chunk)
        patch.setattr(grouping, "MOST_PARTS", 3)
        parts = read_interactions(folder, LOG_FORMAT.checked({"min_user_events": 1} | options), tmp_path / "other", block_bytes=64)
    assert lists(parts) == lists(whole)
    assert parts.user_ids.equals(whole.user_ids)
    assert parts.item_ids.equals(whole.item_ids)
    assert np.array_equal(parts.item_of_event_E, whole.item_of_event_E)
    assert not timed or (parts.time_of_event_E is not None and np.array_equal(parts.time_of_event_E, np.asarray(whole.time_of_event_E)))


def test_links_are_followed_and_none_is_passed_over(tmp_path: Path) -> None:
    write_parquet(tmp_path / "elsewhere" / "0.parquet", user=["u"], item=["b"])
    write_parquet(tmp_path / "log" / "day=1" / "0.parquet", user=["u"], item=["a"])
    (tmp_path / "log" / "day=2").symlink_to(tmp_path / "elsewhere")
    assert lists(read(tmp_path / "log")) == {"u": ["a", "b"]}
    (tmp_path / "log" / "day=3.parquet").symlink_to(tmp_path / "nowhere")
    assert "day=3.parquet" in str(refused(tmp_path / "log"))
    (tmp_path / "log" / "day=3.parquet").unlink()
    (tmp_path / "log" / "day=4").symlink_to(tmp_path / "log")
    assert "a link leads to one that was read" in str(refused(tmp_path / "log"))


@pytest.mark.parametrize(("kind", "last"), [(pa.float64(), 2**53), (pa.float32(), 2**24), (pa.float16(), 2**11)])
def test_floats_that_are_whole_numbers_are_ids_as_integers_are(tmp_path: Path, kind: pa.DataType, last: int) -> None:
    integers = write_parquet(tmp_path / "log" / "0.parquet", user=[1, 1], item=[last - 1, 3])
    users, items = np.array([1, 1, np.nan, 2]), np.array([last - 1, 3, 3, -3])
    floats = write_parquet(
        tmp_path / "log" / "1.parquet", user=pa.array(users, kind, from_pandas=True), item=pa.array(items, pa.float64()).cast(kind)
    )
    expected = {"1": [str(last - 1), "3"]}
    assert lists(read(tmp_path / "log", bad_rows="skip")) == {"1": expected["1"] * 2, "2": ["-3"]}
    assert lists(read(integers)) == expected
    assert lists(read(floats, bad_rows="skip")) == expected | {"2": ["-3"]}
    assert refused(floats).field == "1.parquet: row 2 (from 0), column user"
    write_parquet(floats, user=pa.array(users, kind), item=["a"] * 4)  # NaN instead of null
    assert lists(read(floats, bad_rows="skip")) == {"1": ["a", "a"], "2": ["a"]}
    for wrong, name in ((0.5, "0.5"), (float(last), str(float(last))), (float("inf"), "inf")):
        write_parquet(floats, user=pa.array([wrong], pa.float64()).cast(kind), item=["a"])
        error = refused(floats)
        assert (error.field, error.value) == ("1.parquet: column user", f"{kind} {name}")
        assert error.expected.endswith("in column 'user': convert the column")


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())])
@pytest.mark.parametrize("zone", ["Z", " Z", "UTC", " UTC", " GMT", " +00:00", " +0000", " +02:00", "+02:00"])
def test_a_zone_may_follow_a_blank_and_have_a_name(tmp_path: Path, kind: pa.DataType, zone: str) -> None:
    times = pa.array([f"2024-01-02 01:00:00{zone}", "2024-01-01 23:30:00Z", f"2024-01-01 00:00:00.25{zone}"]).cast(kind)
    write_parquet(tmp_path / "log.parquet", user=["u"] * 3, item=["c", "b", "a"], time=times)
    log = read(tmp_path / "log.parquet", **TIMED, timestamp_type="datetime")
    hours = 2 if "2" in zone else 0
    assert lists(log) == {"u": ["a", "c", "b"] if hours else ["a", "b", "c"]}
    assert log.time_of_event_E is not None
    assert log.time_of_event_E[0] == 1_704_067_200_250_000 - hours * 3_600_000_000


@pytest.mark.parametrize("zone", [None, "Europe/Berlin"])
def test_times_are_read_to_a_microsecond(tmp_path: Path, zone: str | None) -> None:
    times = pa.array([1_704_067_200_000_002_001, 1_704_067_200_000_001_999], pa.timestamp("ns", zone))
    write_parquet(tmp_path / "log.parquet", user=["u"] * 2, item=["b", "a"], time=times)
    log = read(tmp_path / "log.parquet", **TIMED, timestamp_type="datetime")
    assert lists(log) == {"u": ["a", "b"]}
    assert log.time_of_event_E is not None
    assert log.time_of_event_E.tolist() == [1_704_067_200_000_001, 1_704_067_200_000_002]


def test_text_that_begins_as_parquet_does_is_text(tmp_path: Path) -> None:
    file = tmp_path / "log.csv"
    for content, expected in ((b"PAR1,i1\nu2,i2\n", False), (b"PAR1,i1\nu2,PAR1", True), (b"PAR", False), (b"", False)):
        file.write_bytes(content)
        assert is_parquet(file) == expected
