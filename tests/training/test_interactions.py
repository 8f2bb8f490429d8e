"""Reading interaction logs: formats of text, order, filters, and what is said about bad input."""

from __future__ import annotations

import gzip
import hashlib
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from espalier.errors import InvalidConfig, InvalidData, spelled
from espalier.logs.log_values import BadRows
from espalier.wording import in_python
from tests.training.text_logs import lists, read
from training.data import grouping
from training.data import interactions as module
from training.data.interactions import read_interactions
from training.data.query_logs import read_log as read_pairs
from training.data.vocabulary import Vocabulary
from training.specification.log_format import LOG_FORMAT, ListsFormat, TextTable

EVENTS = [("u2", "b", 30), ("u1", "c", 10), ("u2", "a", 20), ("u1", "a", 5), ("u2", "c", 20), ("u2", "b", 40)]
"""User, item, time: u1 = a c by time; u2 = a c b b by time (a before c: the tie keeps file order)."""

BY_TIME = {"u1": ["a", "c"], "u2": ["a", "c", "b", "b"]}
BY_FILE = {"u1": ["c", "a"], "u2": ["b", "a", "c", "b"]}


def text(separator: str, header: bool = True) -> str:
    lines = ["user,item,time"] if header else []
    lines += [f"{user},{item},{time}" for user, item, time in EVENTS]
    return "\n".join(lines).replace(",", separator) + "\n"


def write(folder: Path, name: str, content: str) -> Path:
    path = folder / name
    path.write_bytes(gzip.compress(content.encode()) if name.endswith(".gz") else content.encode())
    return path


TIMED: dict[str, Any] = {"timestamp": "time", "order": "timestamp"}
TIMED_BY_POSITION: dict[str, Any] = {"user": 0, "item": 1, "timestamp": 2, "order": "timestamp"}


@pytest.mark.parametrize("columns", [TIMED, TIMED_BY_POSITION, TIMED_BY_POSITION | {"header": False}])
@pytest.mark.parametrize("separator", [",", "\t", " ", ";", "::", "||", "→"])
def test_text_with_any_separator_by_name_and_position_plain_and_gzipped(tmp_path: Path, separator: str, columns: dict[str, Any]) -> None:
    for ending in ("", ".gz"):
        path = write(tmp_path, "log" + ending, text(separator, columns.get("header", True)))
        assert lists(read(path, separator=separator, **columns)) == BY_TIME


@pytest.mark.parametrize("columns", [TIMED | {"format": "parquet"}, TIMED_BY_POSITION, TIMED | {"separator": "\t"}])
@pytest.mark.parametrize("name", ["log.parquet", "log.txt", "log.gz"])
def test_parquet_is_known_by_its_first_bytes_whatever_the_format_says_of_text(tmp_path: Path, name: str, columns: dict[str, Any]) -> None:
    users, items, times = zip(*EVENTS, strict=True)
    plain, path = tmp_path / "plain", tmp_path / name
    table = {"user": pa.array(users).dictionary_encode(), "item": pa.array(items, pa.large_string()), "time": pa.array(times, pa.int32())}
    pq.write_table(pa.table(table), plain)
    path.write_bytes(gzip.compress(plain.read_bytes()) if name.endswith(".gz") else plain.read_bytes())
    assert lists(read(path, **columns)) == BY_TIME


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("separator", [" ", ",", "::", "→"])
@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\n\n"])
def test_lists_have_a_user_and_then_the_items_on_each_line(tmp_path: Path, separator: str, ending: str, line_end: str) -> None:
    lines = [separator.join([user, *items]) for user, items in BY_TIME.items()]
    path = write(tmp_path, "log" + ending, line_end.join(lines))
    assert lists(read(path, format="lists", separator=separator)) == BY_TIME


def test_users_without_items_and_blanks_at_the_end_of_a_line_are_passed_over(tmp_path: Path) -> None:
    """As published files of what is to be found have them."""
    for text in ("u a b \nv \nw c\n", "v\nu a b\nw c  \n", "u a b\r\nv \r\nw c \r\n"):
        assert lists(read(write(tmp_path, "log", text), format="lists", separator=" ")) == {"u": ["a", "b"], "w": ["c"]}
    with pytest.raises(InvalidData, match="none of them empty"):
        read(write(tmp_path, "log", "u,a,\n"), format="lists", separator=",")


@pytest.mark.parametrize(
    ("content", "separator", "line"),
    [
        ("usér,item\nu1,i1\n".encode("latin-1"), ",", 1),
        ("user::item\nu1::i1\nu2::é\n".encode("latin-1"), "::", 3),
        ("user\titem\nu1\té\n".encode("latin-1"), "\t", 2),
        ("user,item\nu1,i1\n".encode("utf-16"), ",", 1),
        ("user::item\nu1::i1\n".encode("utf-16"), "::", 1),
    ],
)
def test_rows_that_are_not_utf8_are_refused_with_file_and_line(tmp_path: Path, content: bytes, separator: str, line: int) -> None:
    (tmp_path / "log.csv").write_bytes(content)
    option = 'data.format.encoding = "' + ("utf-16" if content.startswith(b"\xff\xfe") else "latin-1")
    for columns in ({}, {"header": False, "user": 0, "item": 1}):
        with pytest.raises(InvalidData, match=f"^log.csv: line {line}[:,]") as error:
            read(tmp_path / "log.csv", separator=separator, **columns)
        assert error.value.expected.startswith(f"text in utf-8, or {option}")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lines=st.lists(st.tuples(st.integers(0, 4), st.lists(st.integers(0, 30), min_size=1, max_size=8)), min_size=1, max_size=20),
    block_bytes=st.integers(1, 40),
)
def test_lists_are_the_same_in_blocks_of_any_size(tmp_path: Path, lines: list[tuple[int, list[int]]], block_bytes: int) -> None:
    path = write(tmp_path, "log", "\n".join(" ".join(map(str, [user, *items])) for user, items in lines))
    expected: dict[str, list[str]] = {}
    for user, items in sorted(lines, key=lambda line: line[0]):
        expected.setdefault(str(user), []).extend(map(str, items))
    log_format = ListsFormat(separator=" ", min_user_events=1)
    assert lists(read_interactions(path, log_format, tmp_path / "work", block_bytes=block_bytes)) == expected


@pytest.mark.parametrize(
    ("content", "line", "value", "expected"),
    [
        (b"\nu;a\nv;b\n", 2, "'u;a'", "then at least one of an item"),
        (b"u a\n\n a b\n", 3, "' a b'", "none of them empty"),
        (b"u a b\nv a  b\n", 2, "'v a  b'", "none of them empty"),
        (b" u a\n", 1, "' u a'", "none of them empty"),
        (b"u a\nv \xff\n", 2, r"b'v \xff'", "text in utf-8, or data.format.encoding"),
    ],
)
@pytest.mark.parametrize("block_bytes", [1, 1000])
def test_bad_lists_are_refused_with_file_line_and_value(
    tmp_path: Path, content: bytes, line: int, value: str, expected: str, block_bytes: int
) -> None:
    (tmp_path / "log").write_bytes(content)
    with pytest.raises(InvalidData, match=expected) as error:
        read_interactions(tmp_path / "log", ListsFormat(separator=" "), tmp_path / "work", block_bytes=block_bytes)
    assert (error.value.field, spelled(error.value.value, is_json=False)) == (f"log: line {line}", value)


def test_a_log_without_order_keeps_file_order_and_says_so(tmp_path: Path) -> None:
    log = read(write(tmp_path, "log", text(",")), order="none")
    assert (lists(log), log.order) == (BY_FILE, "none")
    of_lists = read(write(tmp_path, "lists", "\ufeffu a b\n"), format="lists", separator=" ", order="none")
    assert (lists(of_lists), of_lists.order) == ({"u": ["a", "b"]}, "none"), "a byte order mark is no part of the first id"


@pytest.mark.parametrize(
    ("kind", "times"),
    [
        ("integer", [2**60 + 2, 2**60 + 1, 2**60]),  # nanoseconds: too fine for a float
        ("float", [0.5, 0.25, -1e-3]),
        ("datetime", ["2020-01-02 00:00:01", "2020-01-02 00:00:00", "2019-12-31"]),
        ("datetime", ["2020-01-02T00:00:01Z", "2020-01-02T00:30:00+01:00", "2020-01-01T00:00:00Z"]),
    ],
)
def test_timestamps_of_every_type_order_a_list(tmp_path: Path, kind: str, times: list[object]) -> None:
    lines = [f"u,{item},{time}" for item, time in zip("cba", times, strict=True)]
    log = read(write(tmp_path, "log", "\n".join(["user,item,time", *lines])), timestamp_type=kind, **TIMED)
    assert lists(log) == {"u": ["a", "b", "c"]}


@pytest.mark.parametrize("block_bytes", [24, 1 << 24])
@pytest.mark.parametrize(
    ("times", "row", "expected"),
    [
        (["2020-01-01T00:00:00"] * 3 + ["2020-01-01T00:00:00Z"], 4, "date and time without a zone, as the log's first, in column 'time'"),
        (["2020-01-01T00:00:00Z"] * 2 + ["2020-01-01"], 3, "date and time with a zone, as the log's first, in column 'time'"),
    ],
)
def test_times_with_and_without_a_zone_are_refused_in_one_log_of_any_blocks(
    tmp_path: Path, times: list[str], row: int, expected: str, block_bytes: int
) -> None:
    path = write(tmp_path, "log", "\n".join(["user,item,time", *(f"u,a,{time}" for time in times)]))
    log = LOG_FORMAT.checked({"min_user_events": 1, "timestamp_type": "datetime", **TIMED})
    with pytest.raises(InvalidData, match=expected) as error:
        read_interactions(path, log, tmp_path / "work", block_bytes=block_bytes)
    assert (error.value.field, spelled(error.value.value, is_json=False)) == (f"log: line {row + 1}, column timestamp", repr(times[-1]))


def test_quoted_fields_may_hold_the_separator_and_line_ends_unless_quotes_are_plain_characters(tmp_path: Path) -> None:
    assert lists(read(write(tmp_path, "log", 'user,item\n"u, 1","a\nb"\n'))) == {"u, 1": ["a\nb"]}
    assert lists(read(write(tmp_path, "log", 'user\titem\nu\t5" disc\n'), separator="\t", quote="")) == {"u": ['5" disc']}
    odd = write(tmp_path, "log", 'user,item,title\nu,a,5" disk\nu,b,"two\nlines"\n')
    assert lists(read(odd)) == {"u": ["a", "b"]}, "an odd quote inside a field is a character"


def test_the_first_category_of_an_item_counts_and_an_empty_one_and_that_of_no_kept_item_is_none(tmp_path: Path) -> None:
    path = write(tmp_path, "log", "user,item,kind\nu,a,\nu,a,toys\nu,b,books\nu,b,toys\nu,c,\nu,d,toys\n")
    log = read(path, category="kind")
    assert log.category_names == ("books", "toys")
    assert log.category_of_item_I is not None
    assert log.category_of_item_I.tolist() == [1, 0, -1, 1]
    assert read(path, category="kind", min_item_events=2, unique=False).category_names == ("books", "toys")
    kept = read(write(tmp_path, "few", "user,item,kind\nu,a,x\nu,b,y\nv,b,y\n"), category="kind", min_item_events=2)
    assert kept.category_names == ("y",)
    assert read(write(tmp_path, "none", text(","))).category_of_item_I is None


def test_the_result_holds_the_stated_types_and_leaves_one_file_that_a_later_reading_does_not_touch(tmp_path: Path) -> None:
    path = write(tmp_path, "log.gz", text(","))
    log = read(path)
    assert (log.user_count, log.item_count, log.event_count) == (2, 3, 6)
    assert [array.dtype.name for array in (log.offset_U1, log.item_of_event_E, log.of(0))] == ["int64", "int32", "int64"]
    assert isinstance(log.item_of_event_E, np.memmap)
    assert [path.name for path in (tmp_path / "work").iterdir()] == [module.EVENTS_FILE]
    assert log.fingerprint == hashlib.sha256(path.read_bytes()).hexdigest()
    read(write(tmp_path, "other", "user,item\nx,z\n"))
    assert lists(log) == BY_FILE


EVENT = st.tuples(st.integers(0, 5), st.integers(0, 8), st.integers(0, 4), st.integers(0, 2))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    events=st.lists(EVENT, min_size=1, max_size=60),
    unique=st.booleans(),
    minimum=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    order=st.sampled_from(["timestamp", "file"]),
    separator=st.sampled_from([",", "::"]),
)
def test_tiny_blocks_equal_one_block_and_a_plain_reading(
    tmp_path: Path,
    events: list[tuple[int, int, int, int]],
    unique: bool,
    minimum: tuple[int, int],
    order: str,
    separator: str,
) -> None:
    path = write(tmp_path, "log", "\n".join(separator.join(map(str, event)) for event in events))
    timed = order == "timestamp"
    log_format = LOG_FORMAT.checked(
        {"separator": separator, "header": False, "user": 0, "item": 1, "timestamp": 2 if timed else None, "category": 3, "order": order}
        | {"unique": unique, "min_item_events": minimum[0], "min_user_events": minimum[1]}
    )

    expected: dict[str, list[str]] = {}
    for user, item, _, _ in sorted(events, key=lambda event: event[2]) if timed else events:
        have = expected.setdefault(str(user), [])
        if not (unique and str(item) in have):
            have.append(str(item))
    every = [item for items in expected.values() for item in items]
    expected = {user: [item for item in items if every.count(item) >= minimum[0]] for user, items in expected.items()}
    expected = {user: items for user, items in sorted(expected.items()) if len(items) >= minimum[1]}
    if not expected:
        with pytest.raises(InvalidData, match=r"a filter that leaves|users with at least"):
            read_interactions(path, log_format, tmp_path / "work")
        return

    whole = read_interactions(path, log_format, tmp_path / "work")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouping, "CHUNK", 3)
        pieces = read_interactions(path, log_format, tmp_path / "pieces", block_bytes=16)
    assert lists(whole) == lists(pieces) == expected
    assert whole.item_ids.to_pylist() == pieces.item_ids.to_pylist() == sorted({item for item in every if every.count(item) >= minimum[0]})
    assert whole.category_names == pieces.category_names
    assert whole.category_of_item_I is not None
    assert pieces.category_of_item_I is not None
    assert whole.category_of_item_I.tolist() == pieces.category_of_item_I.tolist()
    shutil.rmtree(tmp_path / "pieces")


@pytest.mark.parametrize(
    ("content", "options", "field", "value", "expected"),
    [
        ("user,thing\nu,a\n", {}, "log: column item", "'item'", r"one of \['user', 'thing'\]"),
        ("u,a\n", {"header": False, "user": 0, "item": 2}, "log: column item", "2", r"one of \[0, 1\]"),
        ("user::thing\nu::a\n", {"separator": "::"}, "log: column item", "'item'", r"one of \['user', 'thing'\]"),
        ("user,item,time\nu,a,1\nu,b,soon\n", TIMED, "log: line 3, column timestamp", "'soon'", "an integer in column 'time'"),
        ("user,item,time\nu,a,nan\n", TIMED | {"timestamp_type": "float"}, "log: line 2, column timestamp", "'nan'", "a finite number"),
        (
            "user,item,time\nu,a,1.2.2024\nu,b,2024-02-01\n",
            TIMED | {"timestamp_type": "datetime", "time_format": "%d.%m.%Y"},
            "log: line 3, column timestamp",
            "'2024-02-01'",
            "a date and time written %d.%m.%Y",
        ),
        (
            "user,item,time\nu,a,29.02.2024\nu,b,31.02.2024\n",
            TIMED | {"timestamp_type": "datetime", "time_format": "%d.%m.%Y"},
            "log: line 3, column timestamp",
            "'31.02.2024'",
            "a date and time written %d.%m.%Y",
        ),
        ("user,item,time\nu,a,\n", TIMED | {"timestamp_type": "datetime"}, "log: line 2, column timestamp", "''", "ISO 8601"),
        ("user,item\nu,a\n,b\n", {}, "log: line 3, column user", "''", "an id in column 'user'"),
        ("user,item\nu,a\nu,\n", {}, "log: line 3, column item", "''", "an id in column 'item'"),
        ("user,item\nu,a\nu\n", {}, "log: line 3", "'u'", "2 fields, not 1"),
        ("u::a\nu::b::c\n", {"separator": "::", "header": False, "user": 0, "item": 1}, "log: line 2", "'u::b::c'", "2 fields, not 3"),
        ("h,i\nu,a\nu\n", {"user": 0, "item": 1}, "log: line 3", "'u'", "2 fields, not 1"),
        ("", {}, "log", "'no events'", "at least one event"),
        ("user,item\n", {}, "log", "'no events'", "at least one event"),
        ("user,item\nu,a\nv,b\n", {"min_item_events": 2}, "min_item_events", "2", "the most frequent one has 1 events"),
        ("user,item\nu,a\nu,b\n", {"min_user_events": 3}, "log", "'lists of at most 2 events'", "users with at least 3 events"),
    ],
)
def test_bad_text_is_refused_with_file_line_column_and_value(
    tmp_path: Path, content: str, options: dict[str, Any], field: str, value: str, expected: str
) -> None:
    with pytest.raises(InvalidData, match=expected) as error:
        read(write(tmp_path, "log", content), **options)
    assert (error.value.field, spelled(error.value.value, is_json=False)) == (field, value)


def test_users_with_few_events_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = write(tmp_path, "log", "user,item\nu,a\nu,b\nv,a\nw,a\nw,c\n")
    with caplog.at_level("INFO"):
        read(log, min_user_events=2)
        read(log, min_user_events=1)
    assert caplog.messages == ["1 of 3 users have fewer than 2 events and are left out"]


def test_texts_of_whole_floats_are_other_ids_than_integers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """pandas writes such a file if some values are missing."""
    pairs = "u,12.0\nu,-3.0\nv,12.0\n"
    assert read(write(tmp_path, "log.csv", "user,book\n" + pairs), item="Book").item_ids.to_pylist() == ["-3.0", "12.0"]
    read_pairs(tmp_path / "log.csv", "user", "book", {}, TextTable(), BadRows("refuse", "data"))
    warning = "WARNING: log.csv: all ids in column {} end in .0. '12.0' is another id than '12': if they were integers, write them as such"
    assert caplog.messages == [warning.format("'Book'"), warning.format("'book'")]
    read(write(tmp_path, "log.csv", "user,item\nv,2.50\n" + pairs))
    pq.write_table(pa.table({"user": ["u", "u"], "item": [12.0, 3.0]}), tmp_path / "log.csv")
    assert read(tmp_path / "log.csv").item_ids.to_pylist() == ["12", "3"]
    assert len(caplog.messages) == 2


def test_files_that_are_not_what_they_should_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidData, match="a file that exists"):
        read(tmp_path / "missing")
    with pytest.raises(InvalidData, match="a Parquet file"):
        read(write(tmp_path, "log", "user,item\nu,a\n"), format="parquet")
    cut_off = write(tmp_path, "log.gz", text(",") * 1000)
    cut_off.write_bytes(cut_off.read_bytes()[:-20])
    for format_ in ("csv", "lists"):
        with pytest.raises(InvalidData) as error:
            read(cut_off, format=format_)
        assert error.value.field == "log.gz"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"user": "item"}, "different columns"),
        ({"user": 0}, "all by name or all by position"),
        ({"header": False}, r"expected columns by position \(0, 1, …\) where there is no header, not \['user', 'item'\]$"),
        ({"user": 0, "item": -1}, r"expected columns at positions from 0, not \[0, -1\]$"),
        ({"order": "timestamp"}, "expected a timestamp column, since"),
        ({"timestamp": "time", "order": "file"}, "expected order 'timestamp', since"),
        ({"separator": "\n"}, "separator"),
        ({"format": "lists", "timestamp": "time"}, "timestamp: .* expected no such key here: it is one of format 'csv'"),
        *(({"encoding": name}, "encoding: got .*, expected a text encoding that Python knows") for name in ("klingon", "hex", "utf\0")),
        ({"quote": "é"}, "a quote of one ASCII character"),
        ({"quote": "\n"}, "a quote of one ASCII character"),
        ({"quote": "'", "separator": "'"}, "a separator without line end, quote"),
        ({"quote": ","}, "another quote than ',', which separates fields by default, or a separator beside it"),
        ({"quote": "\t"}, "another quote than '.t', which separates fields by default"),
    ],
)
def test_a_format_that_contradicts_itself_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        LOG_FORMAT.checked(options)


def test_a_row_that_the_parser_reads_ahead_is_refused_in_the_words_of_the_caller(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("user,item\n" + "u,a\n" * 500 + "u\n")
    with in_python(), pytest.raises(InvalidData, match=r"log\.csv: line 502: got 'u', expected 2 fields, not 1; or leave such rows out"):
        read_interactions(tmp_path / "log.csv", LOG_FORMAT.checked({}), tmp_path / "work")


def test_rows_that_are_added_while_a_log_is_read_are_not_in_its_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, "log", text(","))
    content, group = path.read_bytes(), grouping.group

    def added(*arguments: Any) -> Any:
        path.write_bytes(content + b"u9,i9\n")
        return group(*arguments)

    monkeypatch.setattr(grouping, "group", added)
    log = read(path)
    assert "u9" not in lists(log)
    assert log.fingerprint == hashlib.sha256(content).hexdigest()


@settings(deadline=None)
@given(blocks=st.lists(st.lists(st.one_of(st.none(), st.text(max_size=3)), max_size=30), max_size=6))
def test_ids_are_numbered_by_first_appearance_over_all_blocks(blocks: list[list[str | None]]) -> None:
    words, code_of = Vocabulary(), dict[str, int]()
    for block in blocks:
        expected = [-1 if word is None else code_of.setdefault(word, len(code_of)) for word in block]
        assert words.encode(pa.array(["", *block], pa.string()).slice(1)).tolist() == expected
    assert words.ids.to_pylist() == list(code_of)
    assert [words.ids[code].as_py() for code in words.sorted_codes().tolist()] == sorted(code_of, key=str.encode)


def test_ids_of_one_hash_are_two_ids() -> None:
    words, other = Vocabulary(), Vocabulary()
    words.encode(pa.array(["a"]))
    other.encode(pa.array(["b"]))
    words._hash_V, words._slots = other._hash_V, other._slots  # as if a had the hash of b
    assert words.encode(pa.array(["b", "b"])).tolist() == [1, 1]
    assert words.ids.to_pylist() == ["a", "b"]
