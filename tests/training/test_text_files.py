"""Text as it comes: encodings, quotes, decimal commas, headers, units of times, rows that cannot be read; files of the XMC repository."""

from __future__ import annotations

import calendar
import codecs
import gzip
import itertools
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from scipy.sparse import random_array

from benchmarks.random_bundles import sparse_rows
from espalier.errors import InvalidData, InvalidQuery
from espalier.logs import log_values, text_files
from espalier.logs.log_values import Timestamps
from espalier.logs.text_files import encoding_of
from espalier.text.sparse_rows import SparseRows
from tests.training.text_logs import lists, read
from training.data import xmc
from training.data.csr import as_matrix
from training.data.xmc import LabelledPoints, read_xmc

# -- encodings ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [{}, {"quote": ""}, {"format": "lists", "separator": " "}])
@pytest.mark.parametrize("rows", [2, 200])
def test_line_ends_of_cr_alone_are_named(tmp_path: Path, form: dict[str, Any], rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "MAX_LINE", 1000)
    monkeypatch.setattr(text_files, "READ_BYTES", 500)
    (tmp_path / "log.csv").write_bytes(b"user,item\r" + b"u,a b\r" * rows)
    with pytest.raises(InvalidData, match=r"log\.csv: got 'line ends of CR alone', expected lines that end with LF, or with CR and LF"):
        read(tmp_path / "log.csv", **form)


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


def test_bytes_that_are_none_of_the_encoding_are_refused_or_left_out(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    log.write_bytes(b"user,item\nu,a\nu,\x81\nu,b\n")
    with pytest.raises(InvalidData, match=r"line 3, column item: .* text in cp1252, or data.format.encoding = .*bad_rows = .skip. leaves"):
        read(log, encoding="cp1252")
    found = read(log, encoding="cp1252", bad_rows="skip")
    assert (lists(found), found.bad_rows) == ({"u": ["a", "b"]}, {"not cp1252": 1})
    log.write_bytes("user,item\nu,a\nu,b".encode("utf-16") + b"x")  # the end of the file cuts a letter
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
    with pytest.raises(InvalidData, match=r"quotes may be plain characters: say so with data.format.quote = \"\""):
        read(tmp_path / "log.csv", block_bytes=64)


@pytest.mark.parametrize("end", ["", "v,a,x\n" * 50_000])
@pytest.mark.parametrize("title", ['"two\nlines"', '"two"\n', '7" by 5"\n', '"two" words\n'])
def test_quotes_that_do_not_end_are_refused_where_they_begin(tmp_path: Path, title: str, end: str) -> None:
    (tmp_path / "log.csv").write_text(f'user,item,title\nu,a,{title}\nu,b,"unfinished\n{end}')
    with pytest.raises(InvalidData, match=r"line 4: got '\"', expected quotes that end with a field; .* data.format.quote = \"\""):
        read(tmp_path / "log.csv")


@pytest.mark.parametrize("other", ['"low fat" cake', '"Heroes', 'a,"b" c'])
def test_quotes_of_two_lines_do_not_swallow_those_between(tmp_path: Path, other: str) -> None:
    rows = "".join(f'u{row},a,"two\nlines" \nv{row},b,"one ""line"""\n\n' for row in range(50))
    (tmp_path / "log.csv").write_text(f"user,item,title\n{rows}")
    assert len(lists(read(tmp_path / "log.csv"))) == 100
    (tmp_path / "log.csv").write_text(f'user,item,title\n{rows}u,c,"how to\n{rows}u,d,{other}\n{rows}')
    with pytest.raises(InvalidData, match=r"line 202: .* expected quotes that end with a field"):
        read(tmp_path / "log.csv")


def test_a_refused_line_ends_the_parser_before_the_interpreter(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("user,item\n" + "u,a\nu,a,b\n" * 500_000)
    program = (
        "import sys; from pathlib import Path; from espalier.logs.log_values import BadRows; from espalier.logs.text_files import *\n"
        "table = TextTableFile(Path(sys.argv[1]), ',', True)\n"
        "for _ in text_batches(table, {'user': 'user'}, BadRows('refuse', 'data.format')): pass"
    )
    for _ in range(4):
        run = subprocess.run([sys.executable, "-c", program, tmp_path / "log.csv"], capture_output=True, text=True)
        assert (run.returncode, "line 3: got 'u,a,b', expected 2 fields, not 3" in run.stderr) == (1, True), run.stderr


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
        ("datetime", "2023-11-14 22:13:20.250000999", "."),
        ("datetime", "2023-11-14 22:13:20.250000999 UTC", "."),
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
        ("integer", "2025-05-01T07:45:00Z", "datetime"),
        ("float", "2024-01-01T00:00:00Z", "datetime"),
    ],
)
def test_a_time_of_another_unit_is_refused_with_the_option_that_reads_it(tmp_path: Path, kind: str, value: str, option: str) -> None:
    (tmp_path / "log.csv").write_text(f"user,item,time\nu,a,{value}\n")
    with pytest.raises(InvalidData, match=f'line 2, column timestamp: got .*, or data.format.timestamp_type = "{option}"'):
        read(tmp_path / "log.csv", timestamp="time", timestamp_type=kind)


@pytest.mark.parametrize(
    ("time_format", "row"),
    [
        ("%d.%m.%Y", "{d}.{m:02}.{y}"),
        ("%F", "{y}-{m:02}-{d:02}"),
        ("%e %b %Y %H:%M", "{d} {name} {y} 23:59"),
        ("%m/%d/%Y %H:%M %z", "{m}/{d}/{y} 00:00 +1400"),
        ("%m/%d/%Y %H:%M %z", "{m}/{d}/{y} 23:59 -1200"),
    ],
)
def test_days_that_a_month_does_not_have_are_unreadable(time_format: str, row: str) -> None:
    dates = list(itertools.product((1900, 2000, 2023, 2024), range(1, 13), range(1, 32)))
    texts = pa.array([row.format(y=y, m=m, d=d, name=calendar.month_abbr[m]) for y, m, d in dates])
    unreadable = [position for position, (y, m, d) in enumerate(dates) if d > calendar.monthrange(y, m)[1]]
    assert Timestamps("datetime", time_format=time_format).unreadable(texts, None).tolist() == unreadable


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


def test_few_looks_find_few_rows() -> None:
    looks: list[int] = []

    def can_read(values: pa.Array) -> bool:
        looks.append(len(values))
        return "x" not in values.to_pylist()

    values = pa.array(["x" if row in (3, 700, 701) else "" for row in range(1024)])
    assert log_values.unreadable_rows(values, can_read, None).tolist() == [3, 700, 701]
    assert len(looks) <= 2 * 3 * 11
    assert log_values.unreadable_rows(values, can_read, 1).tolist() == [3]


# -- files of the Extreme Classification Repository -----------------------------------------------------------------------


def test_rows_are_taken_and_normalised() -> None:
    rng = np.random.default_rng(0)
    dense = random_array((20, 9), density=0.3, rng=rng).toarray().astype(np.float32)
    dense[[0, 7, 19]] = 0
    rows = sparse_rows(dense)
    rows.check()
    order = np.array([3, 3, 0, 19, 5])
    assert_array_equal(as_matrix(rows.take(order)).toarray(), dense[order])
    lengths = np.linalg.norm(dense, axis=1, keepdims=True)
    assert_allclose(as_matrix(rows.normalised()).toarray(), dense / np.where(lengths > 0, lengths, 1), rtol=1e-6)


@pytest.mark.parametrize(
    ("indptr", "indices", "values", "expected"),
    [
        ([0, 0, 2], [0, 9], [1, 1], r"features.indices: got 9, expected feature numbers from 0 to 8"),
        ([0, 0, 2], [-1, 2], [1, 1], r"features.indices: got -1"),
        ([0, 0, 2], [2, 2], [1, 1], r"features.indices: got 2, expected ascending numbers within a row, none twice"),
        ([0, 0, 2], [1, 2], [1, np.inf], r"features.values: got inf, expected finite numbers"),
        ([0, 3], [0, 1], [1, 1], r"features.indptr: .*expected from 0 to 2, never decreasing"),
        ([0, 2], [0, 1], [1], r"features.values: got '1 numbers', expected 2, one per index"),
    ],
)
def test_rows_that_are_wrong_say_where(indptr: list[int], indices: list[int], values: list[float], expected: str) -> None:
    with pytest.raises(InvalidQuery, match=expected):
        SparseRows(np.array(indptr), np.array(indices, np.int32), np.array(values, np.float32), 9).check()
    with pytest.raises(InvalidQuery, match=r"features.indices: got 'int64\[2\]'"):
        SparseRows(np.array([0, 2]), np.array([0, 1]), np.ones(2, np.float32), 9)


def test_files_of_the_repository_are_read(tmp_path: Path) -> None:
    text = "4 5 3\n2,0 3:0.5 0:0 1:2 4:1e-60\n 0:1e-1\n1 \n\n\n \n"  # blank lines may follow the points
    (tmp_path / "a.txt").write_text(text)
    with gzip.open(tmp_path / "a.txt.gz", "wt") as file:
        file.write(text)
    for name in ("a.txt", "a.txt.gz"):
        data = read_xmc(tmp_path / name)
        assert_allclose(data.points.toarray(), [[0, 2, 0, 0.5, 0], [0.1, 0, 0, 0, 0], [0.0] * 5, [0.0] * 5], rtol=1e-6)
        assert data.points.nnz == 3, "a feature of value 0 is as if it were not there"
        assert_array_equal(data.labels.toarray(), [[1, 0, 1], [0, 0, 0], [0, 1, 0], [0, 0, 0]])
        part = data.take(np.array([2, 0]))
        assert_array_equal(part.labels.toarray(), [[0, 1, 0], [1, 0, 1]])


def test_labels_may_have_weights(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("4 5 3\n2:0.5,0:3 3:0.5 1:2\n 0:1e-1\n1:2\n1,0:0 4:1\n")
    data = read_xmc(file)
    assert_allclose(data.points.toarray(), np.array([[0, 2, 0, 0.5, 0], [0.1, 0, 0, 0, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 1]]), rtol=1e-6)
    assert_array_equal(data.labels.toarray(), [[3, 0, 0.5], [0, 0, 0], [0, 2, 0], [0, 1, 0]])
    assert data.labels.nnz == 4, "what has the weight 0 is not relevant"
    assert_array_equal(data.weights_of(0), [3, 0.5])
    file.write_text("2 5 3\n2:0.5 3:0.5\n1:4 2:1\n")
    assert read_xmc(file).labels.nnz == 0, "one pair at the beginning of a line is a feature unless said otherwise"
    assert_array_equal(read_xmc(file, label_weights=True).labels.toarray(), [[0, 0, 0.5], [0, 4, 0]])
    file.write_text("2 5 3\n2:0.5,1:1 3:0.5\n1:4 2:1\n")
    assert_array_equal(read_xmc(file).labels.toarray(), [[0, 1, 0.5], [0, 4, 0]])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4 5 3\n0 4:1\n1\n1 3:1 -1:1\n0 5:1\n", "line 4: got -1, expected features from 0 to 4"),
        ("4 5 3\n0 4:1\n1\n1 4:1 3:1 4:1\n0 1:inf\n", "line 4: got 4, expected features each once in a point"),
        ("4 5\n", r"line 1: got '4 5', expected three numbers: points, features, labels"),
        ("2 5 3\n0 1:1\n", r"got '1 points', expected 2, as its first line says"),
        ("3 5 3\n0 2 3:1\n0 4:\n0 1:1\n", r"line 2: got '2 3:1', expected feature:value pairs"),
        ("2 5 3\n0 1:1\n0 1:1 2:x\n", r"line 3: got '1:1 2:x', expected feature:value pairs"),
        ("1 5 3\n0 1:1\n\n0 1:1\n", r"got 'more than 1 points', expected 1, as its first line says"),
        (f"{'1' * 5000} 5 3\n0 1:1\n", r"line 1: got '1111.*', expected three numbers: points, features, labels"),
        ("1 5 3000000000\n0 1:1\n", r"line 1: got 3000000000, expected at most 2147483647 features and labels"),
        *(
            (f"1 5 3\n{line}\n", expected)
            for line, expected in (
                ("3 1:1", "line 2: got 3, expected labels from 0 to 2"),
                ("0;1 1:1", "line 2: got '0;1', expected labels with commas between them"),
                ("0 1:1 2", "line 2: got '1:1 2', expected feature:value pairs"),
                ("0 1.5:1", "line 2: got '1.5:1', expected feature:value pairs"),
                ("0 2 3:1:4", "line 2: got '2 3:1:4', expected feature:value pairs"),
                ("0 2:1 3: :4", "line 2: got '2:1 3: :4', expected feature:value pairs"),
                ("0 1:1_0", "line 2: got '1:1_0', expected feature:value pairs"),
                ("1_0 1:1", "line 2: got '1_0', expected labels with commas between them"),
                ("0 4:1 5:1", "line 2: got 5, expected features from 0 to 4"),
                ("0 4294967297:1", "got 4294967297, expected features from 0 to 4"),
                ("0 1:1 1:2", "line 2: got 1, expected features each once in a point"),
                ("0 1:nan", "line 2: got nan, expected features each once in a point, with finite values"),
                ("0 inf:1", "got inf, expected features from 0 to 4"),
                ("0 1:1e300", "expected features each once in a point, with finite values"),
                ("0:-1,1:1 1:1", "line 2, label 0: got -1.0, expected 0, or a number from 1e-09 to 1e.09"),
                ("0:1,1:nan 1:1", "line 2, label 1: got nan, expected 0, or"),
                ("0:1,1:inf 1:1", "line 2, label 1: got inf, expected 0, or"),
                ("0:1,1:1e10 1:1", "line 2, label 1: got 10000000000.0, expected 0, or"),
                ("0:1,1:1e-10 1:1", "line 2, label 1: got 1e-10, expected 0, or"),
                ("0:1,3:1 1:1", "line 2: got 3, expected labels from 0 to 2"),
                ("0:1,-1:0 1:1", "line 2: got -1, expected labels from 0 to 2"),
                ("0:1,:1 1:1", "line 2: got '0:1,:1', expected labels with commas between them"),
                ("0:1,1: 1:1", "line 2: got '0:1,1:', expected labels with commas between them"),
                ("0:1,1:x 1:1", "line 2: got '0:1,1:x', expected labels with commas between them"),
                ("0:1,1:1,1:2 1:1", "line 2, label 1: got 2.0, expected one weight, and 1 came before"),
            )
        ),
    ],
)
def test_files_that_are_wrong_say_where(tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "a.txt").write_text(text)
    with pytest.raises(InvalidData, match=expected):
        read_xmc(tmp_path / "a.txt")


def test_files_are_parsed_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("7 5 3\n" + "".join(f"{b % 3} {b % 5}:{b + 1}\n" for b in range(7)))
    (tmp_path / "none.txt").write_text("0 5 3\n")
    whole, parse, sizes = read_xmc(tmp_path / "a.txt"), xmc.parse_points, []

    def parsed(path: Path, body: Sequence[bytes], *others: Any) -> LabelledPoints:
        sizes.append(len(body))
        return parse(path, body, *others)

    monkeypatch.setattr(xmc, "parse_points", parsed)
    for name, limit, expected in (("BLOCK", 3, [3, 3, 1]), ("BLOCK_BYTES", 10, [2, 2, 2, 1])):
        with monkeypatch.context() as patch:
            patch.setattr(xmc, name, limit)
            found = read_xmc(tmp_path / "a.txt")
        assert sizes == expected
        assert_array_equal(found.points.toarray(), whole.points.toarray())
        assert_array_equal(found.labels.toarray(), whole.labels.toarray())
        sizes.clear()
    assert read_xmc(tmp_path / "none.txt").points.shape == (0, 5)


def test_files_that_cannot_be_read_to_their_end_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = gzip.compress(b"1 5 3\n0 1:1\n" * 50)
    for name, data in (("cut.txt.gz", whole[:-9]), ("other.txt.gz", b"plain"), ("spoilt.txt.gz", whole[:12] + b"\xff" * 9 + whole[21:])):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(InvalidData, match=name):
            read_xmc(tmp_path / name)
    with pytest.raises(InvalidData, match=r"none\.txt"):
        read_xmc(tmp_path / "none.txt")
    monkeypatch.setattr(xmc, "LONGEST_LINE", 40)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"2 5 3\n0 " + b"1:1 " * 20))
    with pytest.raises(InvalidData, match="line 2: got 'more than 40 bytes', expected a shorter line"):
        read_xmc(tmp_path / "a.txt.gz")
