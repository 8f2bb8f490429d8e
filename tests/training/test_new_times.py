"""`espalier new` recognises the times of a log by their values, or says which are in doubt."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from espalier.errors import InvalidData
from tests.training.new_logs import new, rows, written
from tests.training.text_logs import MOMENT


def test_times_finer_than_a_microsecond_are_times(tmp_path: Path) -> None:
    users, items, seconds = zip(*rows(), strict=True)
    times = pa.array([10**9 * at + 1 for at in seconds], pa.timestamp("ns"))
    pq.write_table(pa.table({"user": users, "item": items, "bought": times, "time": times}), tmp_path / "log.parquet")
    assert written(tmp_path / "log.parquet")["data"]["format"]["timestamp_type"] == "datetime"


def dated(date: Callable[[int], str]) -> str:
    """A log whose row n has a date."""
    return "user,item,time\n" + "".join(f"{user},{item},{date(row)}\n" for row, (user, item, _) in enumerate(rows()))


def test_days_and_months_that_could_be_either_are_asked_for(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    log.write_text(dated(lambda row: f"{1 + row % 12}/5/2024"))
    with pytest.raises(InvalidData, match=r"column 'time': got '1/5/2024', expected days and months .* \(%d/%m/%Y or %m/%d/%Y\)"):
        written(log)
    assert "timestamp" not in written(log, time="file")["data"]["format"]
    log.write_text(dated(lambda row: f"26-{1 + row % 12:02}-15"))
    with pytest.raises(InvalidData, match=r"column 'time': got '26-\d+-15', expected a number, or a time such as"):
        written(log)  # not the 26th of a month of the year 15


@pytest.mark.parametrize(("date", "form"), [("13-05-2024", "%d-%m-%Y"), ("05-13-2024", "%m-%d-%Y")])
def test_one_row_tells_days_and_months_apart(tmp_path: Path, date: str, form: str) -> None:
    log = tmp_path / "log.csv"
    log.write_text(dated(lambda row: date if row == 400 else f"{1 + row % 12:02}-05-2024"))
    assert written(log)["data"]["format"]["time_format"] == form


@pytest.mark.parametrize(("first", "every"), [("30/5/2024", 480), ("5/30/2024", 480), ("30/5/2024", 3)])
def test_rows_that_contradict_each_other_in_the_order_of_day_and_month_are_both_shown(tmp_path: Path, first: str, every: int) -> None:
    log = tmp_path / "log.csv"
    dates = {1: first, 2: "5/31/2024" if first == "30/5/2024" else "31/5/2024"}
    log.write_text(dated(lambda row: dates.get(row % every, "1/5/2024")))
    shown = (
        r"\['3\d/5/2024', '5/3\d/2024'\], expected days and months in one order \(%d/%m/%Y or %m/%d/%Y\): write data\.format\.time_format"
    )
    with pytest.raises(InvalidData, match=f"column 'time': got {shown} yourself, or say --time file"):
        written(log)


def test_dates_of_a_data_frame_are_found_out_too(tmp_path: Path) -> None:
    user, item, at = zip(*rows(), strict=True)
    texts = pa.array([f"{1 + moment % 28:02}.{1 + moment % 12:02}.2024" for moment in at])
    for values in (texts.dictionary_encode(), texts.cast(pa.large_string()), texts.cast(pa.string_view())):
        pq.write_table(pa.table({"user": user, "item": item, "time": values}), tmp_path / "log.parquet")
        assert written(tmp_path / "log.parquet")["data"]["format"]["time_format"] == "%d.%m.%Y"


@pytest.mark.parametrize(
    ("factor", "examples"),
    [
        (lambda row: 1000 ** (row % 3), r"1500000000 \(seconds\), 1500000\d{6} \(milliseconds\), 1500000\d{9} \(microseconds\)"),
        (lambda row: 1000 if row >= 2940 else 1, r"1500000000 \(seconds\), 1500002940000 \(milliseconds\)"),
        (lambda row: 1000 if row >= 1000 else 1, r"1500000000 \(seconds\), 1500001000000 \(milliseconds\)"),
        (lambda row: 1 if row >= 1000 else 1000, r"1500001000 \(seconds\), 1500000000000 \(milliseconds\)"),
        (lambda row: 10**9 if row >= 2940 else 10**6, r"1500000000000000 \(microseconds\), 15000029400\d{8} \(nanoseconds\)"),
    ],
)
@pytest.mark.parametrize("parquet", [False, True])
def test_times_in_several_units_are_refused_with_one_of_each(
    tmp_path: Path, factor: Callable[[int], int], examples: str, parquet: bool
) -> None:
    rows = [(f"u{row % 100}", f"i{row * 7 % 30}", (1_500_000_000 + row) * factor(row)) for row in range(3000)]
    log = tmp_path / "log"
    if parquet:
        pq.write_table(pa.table(dict(zip(("user", "item", "time"), map(list, zip(*rows, strict=True)), strict=True))), log)
    else:
        log.write_text("user,item,time\n" + "".join(f"{user},{item},{at}\n" for user, item, at in rows))
    with pytest.raises(InvalidData, match=f"^log: column 'time': got '{examples}', expected times in one unit: .* --time file"):
        written(log)
    assert "timestamp" not in written(log, time="file")["data"]["format"]


@pytest.mark.parametrize("date", ["%Y-%m-%dT%H:%M:%S", "%Y-%m-%d %H:%M:%S UTC", "%d.%m.%Y"])
@pytest.mark.parametrize("first", [0, 1])
def test_numbers_among_dates_are_named_as_two_forms_of_times(tmp_path: Path, date: str, first: int) -> None:
    log, shown_times = tmp_path / "log.csv", [str(MOMENT), f"{datetime.fromtimestamp(MOMENT, UTC):{date}}"]
    log.write_text("user,item,time\n" + "".join(f"u{row % 9},i{row % 7},{shown_times[(row + first) % 2]}\n" for row in range(200)))
    expected = f"column 'time': got {shown_times}, expected times all as numbers or all as dates: "
    with pytest.raises(InvalidData, match=re.escape(expected)):
        written(log)


@pytest.mark.parametrize("shown_times", [["2026-03-08 07:24", "2026-03-08T07:25:00Z"], ["2026-03-08T07:25:00+01:00", "2026-03-08T07:24"]])
def test_times_of_which_some_have_a_zone_are_named_with_one_of_each(tmp_path: Path, shown_times: list[str]) -> None:
    log = tmp_path / "log.csv"
    log.write_text("user,item,time\n" + "".join(f"u{row % 9},i{row % 7},{shown_times[row % 2]}\n" for row in range(200)))
    expected = (
        f"column 'time': got {shown_times}, expected times all with a zone or all without one: convert the others, or say --time file"
    )
    with pytest.raises(InvalidData, match=re.escape(expected)):
        written(log)


def test_counters_and_a_damaged_time_are_no_other_unit(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    log.write_text("user,item,time\n" + "".join(f"u{row % 9},i{row % 7},{row * 1_000_003}\n" for row in range(2000)))
    raw, comments = new(log)
    assert raw["data"]["format"]["timestamp_type"] == "integer"
    assert "# - times: whole numbers of no known unit, by the values\n" in comments
    log.write_text("user,item,time\n" + "".join(f"u{row % 9},i{row % 7},{MOMENT * (1 if row < 1500 else 37)}\n" for row in range(1510)))
    raw, comments = new(log)
    assert {"timestamp_type": "seconds", "bad_rows": "skip"}.items() <= raw["data"]["format"].items()
    assert "left out, unreadable timestamp: 10;" in comments
    log.write_text("user,item,time\n" + "".join(f"u{row % 9},i{row % 7},{MOMENT + row if row else -5}\n" for row in range(200)))
    raw, comments = new(log)
    assert raw["data"]["format"]["timestamp_type"] == "seconds"


@pytest.mark.parametrize("kind", [pa.duration("s"), pa.time32("s"), pa.bool_()])
def test_durations_times_of_day_and_booleans_are_no_times(tmp_path: Path, kind: pa.DataType) -> None:
    user, item, at = zip(*rows(), strict=True)
    odd = pa.array([moment % 2 for moment in at], pa.int32()).cast(pa.int64() if kind == pa.duration("s") else pa.int32()).cast(kind)
    pq.write_table(pa.table({"user": user, "item": item, "time": odd}), tmp_path / "log.parquet")
    with pytest.raises(InvalidData, match=r"column 'time': got .*, expected a number, or a time such as"):
        written(tmp_path / "log.parquet")
