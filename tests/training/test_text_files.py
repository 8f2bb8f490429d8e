"""Text as it comes: encodings, quotes, decimal commas, headers in any case, units of times, and rows that cannot be read."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import tomllib
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from espalier.errors import InvalidConfig, InvalidData
from training.data import log_values, text_files
from training.data.interactions import Interactions, read_interactions
from training.data.item_tables import item_table
from training.data.log_values import BadRows
from training.data.query_logs import read_log
from training.data.text_files import encoding_of
from training.new_configuration import write_configuration
from training.specification.linear import LogData
from training.specification.log_format import LOG_FORMAT, TextTable
from training.specification.models import SPECIFICATION

MOMENT = 1_700_000_000
ROWS = [(f"u{user}", f"i{(user + place) % 7}", MOMENT + 100 * place + user) for place in range(6) for user in range(20)]
"""User, item, seconds since 1970: 120 events of 20 users, oldest first."""


def read(file: Path, block_bytes: int = 1 << 24, **form: Any) -> Interactions:
    return read_interactions(file, LOG_FORMAT.checked({"min_user_events": 1, **form}), file.parent / "work", block_bytes=block_bytes)


def lists(log: Interactions) -> dict[str, list[str]]:
    items = log.item_ids.to_pylist()
    return {name: [items[row] for row in log.of(user)] for user, name in enumerate(log.user_ids.to_pylist())}


EXPECTED = {f"u{user}": [item for name, item, _ in ROWS if name == f"u{user}"] for user in range(20)}


def text(header: str, row: Callable[[str, str, int], str], end: str = "\n") -> str:
    return end.join([header, *(row(*event) for event in ROWS)]) + end


# -- awkward logs, found out by `new` -----------------------------------------------------------------------------------------


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


# -- encodings ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["utf-8", "UTF8", "utf-8-sig", "latin-1", "cp1252", "utf-16", "utf-16-le", "utf-16-be", "mac-roman"])
@pytest.mark.parametrize("block_bytes", [48, 1 << 24])
def test_any_encoding_is_read_the_same(tmp_path: Path, encoding: str, block_bytes: int) -> None:
    log = tmp_path / "log.csv"
    log.write_bytes("user,item\nü,é\nü,ñ\n".encode(encoding))
    assert lists(read(log, block_bytes, encoding=encoding)) == {"ü": ["é", "ñ"]}
    log.write_bytes("ü é ñ\n".encode(encoding))
    assert lists(read(log, block_bytes, encoding=encoding, format="lists", separator=" ")) == {"ü": ["é", "ñ"]}


@pytest.mark.parametrize("encoding", ["gbk", "shift_jis", "utf-16"])
def test_a_letter_may_lie_on_both_sides_of_a_block(tmp_path: Path, encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "READ_BYTES", 3)
    (tmp_path / "log.csv").write_bytes("user,item\n中,文\n中,日本\n".encode(encoding))
    assert lists(read(tmp_path / "log.csv", encoding=encoding)) == {"中": ["文", "日本"]}


@pytest.mark.parametrize("name", ["klingon", "hex", "rot13", "undefined", "utf\0"])
def test_a_wrong_encoding_is_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidConfig, match=r"encoding: got .*, expected a text encoding that Python knows, such as"):
        LOG_FORMAT.checked({"encoding": name})


@pytest.mark.parametrize(
    ("content", "encoding"),
    [
        ("plain", "utf-8"),
        ("é".encode(), "utf-8"),
        ("éé".encode() + b"\xe9", "utf-8"),
        ("é".encode() + b"\xe9", "latin-1"),
        ("Käse".encode("latin-1"), "latin-1"),
        ("5 €".encode("cp1252"), "cp1252"),
        ("a".encode("utf-16"), "utf-16"),
        (codecs.BOM_UTF16_BE + "a".encode("utf-16-be"), "utf-16"),
        ("a".encode("utf-32"), "utf-32"),
        (codecs.BOM_UTF32_BE + "a".encode("utf-32-be"), "utf-32"),
        ("abcd".encode("utf-16-le"), "utf-16-le"),
        ("abcd".encode("utf-16-be"), "utf-16-be"),
        (b"x" * (1 << 20) + "é".encode("latin-1"), "latin-1"),
    ],
)
def test_an_encoding_is_known_by_its_bytes(tmp_path: Path, content: str | bytes, encoding: str) -> None:
    (tmp_path / "log").write_bytes(content.encode() if isinstance(content, str) else content)
    assert encoding_of(tmp_path / "log") == encoding


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
def test_a_mark_of_another_encoding_is_refused_with_the_option_that_reads_it(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "log.csv").write_bytes("user,item\nu,a\n".encode(encoding))
    with pytest.raises(InvalidData, match=f'log.csv: line 1: .* data.format.encoding = "{encoding}", as which it begins'):
        read(tmp_path / "log.csv")


def test_bytes_that_are_none_of_the_encoding_are_refused_or_left_out(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    log.write_bytes(b"user,item\nu,a\nu,\x81\nu,b\n")
    with pytest.raises(InvalidData, match=r"line 3, column item: .* text in cp1252, or data.format.encoding = .*bad_rows = .skip. leaves"):
        read(log, encoding="cp1252")
    found = read(log, encoding="cp1252", bad_rows="skip")
    assert (lists(found), found.bad_rows) == ({"u": ["a", "b"]}, {"not cp1252": 1})


def test_a_letter_that_the_end_of_the_file_cuts_is_none(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    log.write_bytes("user,item\nu,a\nu,b".encode("utf-16") + b"x")
    assert read(log, encoding="utf-16", bad_rows="skip").bad_rows == {"not utf-16": 1}


@pytest.mark.parametrize("longest", [50, 51])
def test_a_line_has_a_limit(tmp_path: Path, longest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "MAX_LINE", 50)
    monkeypatch.setattr(text_files, "READ_BYTES", 1)
    log = tmp_path / "log.csv"
    log.write_text("user,item\nu," + "x" * (longest - 2) + "\n")
    if longest == 50:
        assert read(log).event_count == 1
    else:
        with pytest.raises(InvalidData, match=r"log.csv: a line: got 'more than 50 bytes', expected text with shorter lines"):
            read(log)


# -- columns ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("header", ["USER, Item ,Timestamp", "User,ITEM,TIMESTAMP"])
def test_names_of_columns_are_found_in_any_case(tmp_path: Path, header: str) -> None:
    (tmp_path / "log.csv").write_text(f"{header}\nu,b,2\nu,a,1\n")
    assert lists(read(tmp_path / "log.csv", timestamp="timestamp")) == {"u": ["a", "b"]}
    pq.write_table(pa.table(dict(zip(header.split(","), (["u", "u"], ["b", "a"], [2, 1]), strict=True))), tmp_path / "log.parquet")
    assert lists(read(tmp_path / "log.parquet", timestamp="timestamp")) == {"u": ["a", "b"]}


def test_the_very_name_comes_before_others_and_two_others_are_refused(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("User,user,ITEM,Item\nx,u,a,b\n")
    assert lists(read(tmp_path / "log.csv", item="Item")) == {"u": ["b"]}
    with pytest.raises(InvalidData, match=r"log.csv: column item: got 'item', expected one of \['User', 'user', 'ITEM', 'Item'\], once"):
        read(tmp_path / "log.csv")


def test_another_separator_and_quote_are_named(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("user\titem\nu\ta\n")
    with pytest.raises(InvalidData, match=r"the first line has '\\t' between fields: say so with data.format.separator = \"\\t\""):
        read(tmp_path / "log.csv")
    (tmp_path / "log.tsv").write_text("user\titem\nu\ta\n")
    assert lists(read(tmp_path / "log.tsv")) == {"u": ["a"]}, "the name says the separator"
    (tmp_path / "log.csv").write_text('user,item\nu,"a\n' + "u,b\n" * 100)
    with pytest.raises(InvalidData, match=r"if quotes are plain characters, say so with data.format.quote = \"\""):
        read(tmp_path / "log.csv", block_bytes=64)


@pytest.mark.parametrize("end", ["", "v,a,x\n" * 50_000])
@pytest.mark.parametrize("title", ['"two\nlines"', '"two"\n', '7" by 5"\n', '"two" words\n'])
def test_quotes_that_do_not_end_are_refused_where_they_begin(tmp_path: Path, title: str, end: str) -> None:
    (tmp_path / "log.csv").write_text(f'user,item,title\nu,a,{title}\nu,b,"unfinished\n{end}')
    with pytest.raises(InvalidData, match=r"line 4: got '\"', expected quotes that end; .* data.format.quote = \"\""):
        read(tmp_path / "log.csv")


@pytest.mark.parametrize(
    ("before", "line"),
    [
        ('u,a,5" disk', 3),
        ('u,a,"two\nlines"', 4),
        ('u,a,"6"" and\n""7"" disks"', 4),
        ('u,a,"a ""\n"', 4),
        ('u,"a",', 3),
        ('u,a,"b" and "c', 3),
        ("", 3),
        ('"\n\n",a,b', 5),
    ],
)
def test_a_wrong_record_is_named_by_the_line_on_which_it_begins(tmp_path: Path, before: str, line: int) -> None:
    (tmp_path / "log.csv").write_text(f"\n\nuser,item,title\n{before}\nv,b\n")
    with pytest.raises(InvalidData, match=f"log.csv: line {line + 2}: got 'v,b', expected 3 fields, not 2"):
        read(tmp_path / "log.csv")


def test_an_odd_quote_inside_a_field_is_a_character(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text('user,item,title\nu,a,5" disk\nu,b,"two\nlines"\n')
    assert lists(read(tmp_path / "log.csv")) == {"u": ["a", "b"]}


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ({"quote": "''"}, "quote"),
        ({"quote": "é"}, "a quote of one ASCII character"),
        ({"quote": "\n"}, "a quote of one ASCII character"),
        ({"quote": "'", "separator": "'"}, "a separator without line end, quote"),
        ({"quote": ","}, "another quote than ',', which separates fields by default, or a separator beside it"),
        ({"quote": "\t"}, "another quote than '.t', which separates fields by default"),
        ({"decimal": ";"}, "decimal"),
        ({"bad_rows": "repair"}, "bad_rows: got 'repair', expected 'refuse' or 'skip'"),
    ],
)
def test_options_that_cannot_be_are_refused(form: dict[str, str], expected: str) -> None:
    with pytest.raises(InvalidConfig, match=expected):
        LOG_FORMAT.checked(form)


# -- times --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "value", "decimal"),
    [
        ("seconds", "1700000000.25", "."),
        ("seconds", "1700000000,25", ","),
        ("milliseconds", "1700000000250", "."),
        ("microseconds", "1700000000250000", "."),
        ("nanoseconds", "1700000000250000000", "."),
        ("datetime", "2023-11-14T22:13:20.25", "."),
        ("datetime", "2023-11-14T23:13:20.250+01:00", "."),
    ],
)
def test_times_of_any_unit_are_the_same_moment(tmp_path: Path, kind: str, value: str, decimal: str) -> None:
    (tmp_path / "log.csv").write_text(f"user;item;time\nu;a;{value}\n")
    found = read(tmp_path / "log.csv", separator=";", timestamp="time", timestamp_type=kind, decimal=decimal)
    assert found.time_of_event_E is not None
    assert found.time_of_event_E.tolist() == [1_700_000_000_250_000]


@pytest.mark.parametrize(
    ("kind", "value", "option"),
    [
        ("seconds", "1700000000000", "milliseconds"),
        ("milliseconds", "1700000000000000", "microseconds"),
        ("microseconds", "1700000000000000000", "nanoseconds"),
        ("seconds", "2024-01-01", "datetime"),
        ("integer", "1.5", "float"),
        ("float", "2024-01-01T00:00:00Z", "datetime"),
    ],
)
def test_a_time_of_another_unit_is_refused_with_the_option_that_reads_it(tmp_path: Path, kind: str, value: str, option: str) -> None:
    (tmp_path / "log.csv").write_text(f"user,item,time\nu,a,{value}\n")
    with pytest.raises(InvalidData, match=f'line 2, column timestamp: got .*, or data.format.timestamp_type = "{option}"'):
        read(tmp_path / "log.csv", timestamp="time", timestamp_type=kind)


@pytest.mark.parametrize(("value", "is_read"), [((1 << 53) - 1, True), (1 << 53, False), (-(1 << 53) + 1, True), (-(1 << 53), False)])
def test_moments_are_within_what_a_float_counts(tmp_path: Path, value: int, is_read: bool) -> None:
    (tmp_path / "log.csv").write_text(f"user,item,time\nu,a,{value}\n")
    if is_read:
        found = read(tmp_path / "log.csv", timestamp="time", timestamp_type="microseconds").time_of_event_E
        assert found is not None
        assert found.tolist() == [value]
    else:
        with pytest.raises(InvalidData, match="microseconds since 1970, before the year 2255"):
            read(tmp_path / "log.csv", timestamp="time", timestamp_type="microseconds")


def test_dates_of_a_split_may_be_compared_with_seconds(tmp_path: Path) -> None:
    log = {"log": "log.csv", "split": {"kind": "date", "test_from": "2024-01-01"}}
    for kind, is_right in (("seconds", True), ("integer", False)):
        raw = {"kind": "otm-robust", "name": "a", "data": log | {"format": {"timestamp": "time", "timestamp_type": kind}}}
        if is_right:
            SPECIFICATION.checked(raw)
        else:
            with pytest.raises(InvalidConfig, match=r"data\.split\.test_from"):
                SPECIFICATION.checked(raw)


# -- rows that cannot be read -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_bytes", [64, 1 << 24])
@pytest.mark.parametrize("separator", [",", "::"])
def test_bad_rows_are_left_out_counted_and_the_first_of_each_reason_is_shown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, block_bytes: int, separator: str
) -> None:
    rows = ["user,item,time", "u,a,1", "u,b", "u,b,2", "", ",c,3", "u,c,soon", "u,c,3", "u", "u,,late", "u,d,4", "u,d,never"]
    (tmp_path / "log").write_text("\n".join(rows).replace(",", separator) + "\nu,e,5\nv,f,6\n".replace(",", separator))
    form: dict[str, Any] = {"timestamp": "time", "separator": separator}
    found = read(tmp_path / "log", block_bytes, bad_rows="skip", **form)
    assert lists(found) == {"u": ["a", "b", "c", "d", "e"], "v": ["f"]}
    assert found.bad_rows == {"wrong number of fields": 2, "no user": 1, "no item": 1, "unreadable timestamp": 2}
    shown = [message for message in caplog.messages if message.startswith("left out: ")]
    places = ("line 3: got", "line 6, column user: got ''", "line 10, column item: got ''", "line 7, column timestamp: got 'soon'")
    assert len(shown) == len(places)
    assert all(any(f"log: {place}" in message for message in shown) for place in places)
    with pytest.raises(InvalidData, match=r'line 3: .* fields, not .*; data.format.bad_rows = "skip" leaves such rows out$'):
        read(tmp_path / "log", **form)


def test_rows_of_lists_and_of_parquet_are_left_out_too(tmp_path: Path) -> None:
    (tmp_path / "lists").write_bytes(b"u a b\nv  a\nw \xe9\nx c\n")
    found = read(tmp_path / "lists", format="lists", separator=" ", bad_rows="skip")
    assert (lists(found), found.bad_rows) == ({"u": ["a", "b"], "x": ["c"]}, {"no id": 1, "not utf-8": 1})
    with pytest.raises(InvalidData, match=r"lists: line 3: .*; data.format.bad_rows = .skip. leaves such rows out"):
        read(tmp_path / "lists", format="lists", separator=" ")
    pl.DataFrame({"user": ["u", None, "u"], "item": ["a", "b", "c"]}).write_parquet(tmp_path / "log.parquet")
    found = read(tmp_path / "log.parquet", bad_rows="skip")
    assert (lists(found), found.bad_rows) == ({"u": ["a", "c"]}, {"no user": 1})


@pytest.mark.parametrize(("wrong", "is_read"), [(5, True), (6, False)])
def test_at_most_half_of_the_rows_are_left_out(tmp_path: Path, wrong: int, is_read: bool) -> None:
    (tmp_path / "log.csv").write_text("user,item\n" + ",x\n" * wrong + "u,a\n" * 5)
    if is_read:
        assert read(tmp_path / "log.csv", bad_rows="skip").bad_rows == {"no user": 5}
    else:
        with pytest.raises(InvalidData, match=r"data.format.bad_rows: got '6 of 11 rows left out \(no user: 6\)', expected at most half"):
            read(tmp_path / "log.csv", bad_rows="skip")


@pytest.mark.parametrize(("patience", "is_read"), [(3, True), (2, False)])
def test_a_wrong_format_does_not_take_the_time_of_the_whole_log(
    tmp_path: Path, patience: int, is_read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_values, "PATIENCE", patience)
    bad_rows = BadRows("skip", "data")
    bad_rows.add("no user", np.arange(5), lambda row: log_values.Problem("f", row, "x"))
    if is_read:
        bad_rows.add_kept(2)
        bad_rows.add_kept(3)
        bad_rows.finish()
    else:
        with pytest.raises(InvalidData, match="5 of 7 rows left out"):
            bad_rows.add_kept(2)


def test_few_looks_find_few_rows() -> None:
    looks: list[int] = []

    def can_read(values: pa.Array) -> bool:
        looks.append(len(values))
        return "x" not in values.to_pylist()

    values = pa.array(["x" if row in (3, 700, 701) else "" for row in range(1024)])
    assert log_values.unreadable_rows(values, can_read, None).tolist() == [3, 700, 701]
    assert len(looks) <= 2 * 3 * 11
    assert log_values.unreadable_rows(values, can_read, 1).tolist() == [3]
