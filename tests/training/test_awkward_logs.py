"""Logs as they come out of other systems: `new` finds out how they are written, and they are read so."""

from __future__ import annotations

import csv
import gzip
import io
import tomllib
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from espalier.errors import InvalidData
from tests.training.text_logs import EXPECTED, MOMENT, ROWS, lists, read, text
from training.data.item_tables import item_table
from training.data.log_values import BadRows
from training.data.query_logs import read_log
from training.new_configuration import write_configuration
from training.specification.linear import LogData
from training.specification.log_format import TextTable
from training.specification.models import SPECIFICATION


def quoted() -> str:
    file = io.StringIO()
    writer = csv.writer(file, quoting=csv.QUOTE_ALL)
    writer.writerow(["user", "item", "title", "timestamp"])
    writer.writerows((user, item, f'The "best", part\nof {item}', at) for user, item, at in ROWS)
    return file.getvalue()


def zoned(at: int) -> str:
    return datetime.fromtimestamp(at, timezone(timedelta(hours=2))).isoformat()


AWKWARD: dict[str, tuple[bytes, dict[str, Any], str]] = {
    "a latin-1 CSV with semicolons and decimal commas": (
        text("user_id;item_id;Bewertung;Name", lambda user, item, at: f"{user};{item};{at % 5},5;Käse").encode("latin-1"),
        {"encoding": "latin-1", "separator": ";", "decimal": ",", "user": "user_id", "item": "item_id"},
        "# - decimal commas: by the values of column 'Bewertung'",
    ),
    "a UTF-16 TSV of a spreadsheet": (
        text(
            "User\tItem\tTime", lambda *row: f"{row[0]}\t{row[1]}\t{datetime.fromtimestamp(row[2], UTC):%Y-%m-%d %H:%M:%S}", "\r\n"
        ).encode("utf-16"),
        {"encoding": "utf-16", "separator": "\t", "user": "User", "timestamp": "Time", "timestamp_type": "datetime"},
        "# - encoding utf-16, by the bytes of the file",
    ),
    "ISO times with a zone": (
        text("user,item,begin", lambda user, item, at: f"{user},{item},{zoned(at)}").encode(),
        {"timestamp": "begin", "timestamp_type": "datetime"},
        "# - times: ISO 8601, by the values",
    ),
    "milliseconds": (
        text("user,item,ts", lambda user, item, at: f"{user},{item},{at * 1000 + 7}").encode(),
        {"timestamp": "ts", "timestamp_type": "milliseconds"},
        "# - times: milliseconds since 1970, by the values",
    ),
    "a header in another order and case": (
        text("Item;USER;Timestamp", lambda user, item, at: f"{item};{user};{at}").encode(),
        {"separator": ";", "user": "USER", "item": "Item", "timestamp": "Timestamp", "timestamp_type": "seconds"},
        "# - times: seconds since 1970",
    ),
    "a mark, quotes, separators and line ends in them": (
        quoted().encode("utf-8-sig"),
        {"user": "user", "timestamp": "timestamp", "timestamp_type": "seconds"},
        "# - not used: column 'title'",
    ),
    "single quotes": (
        text("'user','item','title'", lambda user, item, at: f"'{user}','{item}','a, b'").encode(),
        {"quote": "'", "user": "user", "item": "item"},
        "# - quotes around fields: ', since fields fit so",
    ),
    "single quotes around every field, none with a separator": (
        text("'user','item'", lambda user, item, at: f"'{user}','{item}'").encode(),
        {"quote": "'", "user": "user", "item": "item"},
        "# - quotes around fields: ', since fields fit so",
    ),
    "single quotes below a header without, one doubled": (
        text("user,item,title", lambda user, item, at: f"{user},'{item}','it''s'").encode(),
        {"quote": "'", "user": "user", "item": "item"},
        "# - quotes around fields: ', since fields fit so",
    ),
    "apostrophes that are no quotes": (
        text("user,item,title", lambda user, item, at: f"{user},{item},'Til There Was You").encode(),
        {"user": "user", "item": "item"},
        "# - not used: column 'title'",
    ),
    "times of which some are unknown": (
        text("user,item,time", lambda user, item, at: f"{user},{item},{0 if at == MOMENT else at * 1000}").encode(),
        {"timestamp": "time", "timestamp_type": "milliseconds"},
        "# - times: milliseconds since 1970, by the values",
    ),
    "UTF-32 with a mark": (
        text("user,item,time", lambda *row: f"{row[0]},{row[1]},{row[2]}").encode("utf-32"),
        {"encoding": "utf-32", "timestamp": "time", "timestamp_type": "seconds"},
        "# - encoding utf-32, by the bytes of the file",
    ),
    "quotes that are plain characters": (
        text("user\titem\ttitle", lambda user, item, at: f"{user}\t{item}\t{'' if at % 2 else chr(34)}x").encode(),
        {"quote": "", "user": "user", "item": "item"},
        "# - quotes around fields: none, since fields fit so",
    ),
}


def new(log: Path) -> tuple[dict[str, Any], str]:
    """The configuration that `new` writes, and the file's text."""
    roles: dict[str, str | None] = dict.fromkeys(("user", "item", "time", "query"))
    written = write_configuration(log, log.with_name("new.toml"), True, None, roles).read_text()
    SPECIFICATION.checked(tomllib.loads(written))
    return tomllib.loads(written), written


@pytest.mark.parametrize("name", AWKWARD)
@pytest.mark.parametrize("zipped", [False, True])
def test_new_finds_out_what_a_log_looks_like_and_the_log_is_read_so(tmp_path: Path, name: str, zipped: bool) -> None:
    content, form, said = AWKWARD[name]
    log = tmp_path / ("log.csv.gz" if zipped else "log.csv")
    log.write_bytes(gzip.compress(content) if zipped else content)
    raw, written = new(log)
    found = raw["data"]["format"]
    assert form.items() <= found.items()
    assert said in written
    assert not {"encoding", "quote", "decimal", "bad_rows"} & (found.keys() - form.keys()), "defaults are not written"
    assert lists(read(log, **found)) == EXPECTED


def broken(every: int, rows: int = 200) -> bytes:
    """One row in `every` is broken, in four ways."""
    wrong = [b"u1,i3", b"u1,,1700000000", b"u1,i3,soon", b"u1,\xe9,1700000000"]
    lines = [f"u{row % 9},é{row % 5},{MOMENT + row}".encode() for row in range(rows)]
    for place, row in enumerate(range(every - 1, rows, every)):
        lines[row] = wrong[place % 4]
    return b"user,item,timestamp\n" + b"\n".join(lines) + b"\n"


def test_new_leaves_out_the_rows_of_a_damaged_log_and_counts_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "log.csv").write_bytes(broken(50))
    raw, written = new(tmp_path / "log.csv")
    assert raw["data"]["format"]["bad_rows"] == "skip"
    counts = "wrong number of fields: 1, not utf-8: 1, no item: 1, unreadable timestamp: 1"
    assert f"# - rows that cannot be read are left out, {counts}; without data.format.bad_rows the first one ends" in written
    assert f"4 rows were left out: {counts}; 196 rows were read" in caplog.messages


@pytest.mark.parametrize(("every", "is_read"), [(20, True), (18, False)])
def test_a_log_with_more_than_a_twentieth_of_broken_rows_is_refused_by_new(tmp_path: Path, every: int, is_read: bool) -> None:
    (tmp_path / "log.csv").write_bytes(broken(every))
    if is_read:
        assert new(tmp_path / "log.csv")[0]["data"]["format"]["bad_rows"] == "skip"
    else:
        with pytest.raises(InvalidData, match=r"log\.csv: line 19"):
            new(tmp_path / "log.csv")


def test_a_log_of_texts_has_the_same_options(tmp_path: Path) -> None:
    log = tmp_path / "searches.csv"
    log.write_bytes("".join(["query;item;Wert\n", *(f"größe {item};{item};0,5\n" for _, item, _ in ROWS), ";x;1\n"]).encode("cp1252"))
    raw, _ = new(log)
    form = {"encoding": "latin-1", "separator": ";", "decimal": ",", "bad_rows": "skip"}
    assert raw["data"] == {"format": "log", "train": str(log), "query": "query", "item": "item"} | form
    data = LogData.model_validate(raw["data"] | {"weight": "WERT"})
    bad_rows = BadRows("skip", "data")
    frame = read_log(log, "query", "item", data.numbers, data, bad_rows)
    assert (frame["query"][0], set(frame["weight"]), dict(bad_rows.counts)) == ("größe i0", {0.5}, {"wrong query": 1})
    log.write_text("query,item,weight\na,x,1\nb,y,many\n,z,1\na,x\n")
    data = LogData(format="log", train=log, weight="weight", bad_rows="skip")
    bad_rows = BadRows("skip", "data")
    with pytest.raises(InvalidData, match=r"data.bad_rows: got '3 of 4 rows left out"):
        read_log(log, "query", "item", data.numbers, data, bad_rows)


def test_an_item_table_has_the_same_options(tmp_path: Path) -> None:
    file = tmp_path / "items.csv"
    file.write_bytes("Titel;ID;Preis\nKäse;1;2,5\nBrot;2;3\nleer\nMüsli;4;1,25\n".encode("latin-1"))
    ids = pa.array(["1", "2", "4"])
    with pytest.raises(
        InvalidData, match=r"items.csv: line 4: got 'leer', expected 3 fields, not 1; data\.items_format\.bad_rows = .skip."
    ):
        item_table(file, ids, TextTable(encoding="latin-1", separator=";"))
    table = item_table(file, ids, TextTable(encoding="latin-1", separator=";", decimal=",", bad_rows="skip")).to_table()
    assert table.column("id").to_pylist() == ["1", "2", "4"]
    assert (table.column("Titel").to_pylist(), table.column("Preis").to_pylist()) == (["Käse", "Brot", "Müsli"], [2.5, 3.0, 1.25])
