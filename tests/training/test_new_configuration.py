"""`espalier new`: what a log looks like is found in it, said, and written as a configuration that reads it and trains."""

from __future__ import annotations

import gzip
import tomllib
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import espalier
from espalier.bundle import Bundle
from espalier.errors import InvalidConfig, InvalidData
from espalier.logs.log_events import histories
from espalier.logs.log_values import BadRows
from tests.training import text_logs
from tests.training.commands import command
from tests.training.new_logs import ITEMS, Rows, new, rows, written
from tests.training.text_logs import EXPECTED, MOMENT, lists, read
from training.data.item_tables import item_table
from training.data.query_logs import read_log
from training.new_configuration import write_configuration
from training.specification.linear import LogData
from training.specification.log_format import TextTable


def text(separator: str, events: Rows, header: str | None, time: Callable[[int], object] = int) -> str:
    lines = [separator.join([user, item, "4.5", str(time(at))]) for user, item, at in events]
    return "\n".join(([] if header is None else [header]) + lines) + "\n"


def test_a_user_a_line_are_lists(tmp_path: Path) -> None:
    items: dict[str, list[str]] = {}
    for place, (user, item, _) in enumerate(rows()):
        if place % 7:  # lists of several lengths
            items.setdefault(user, []).append(item)
    (tmp_path / "lists.txt").write_text("".join(" ".join([user, *row]) + "\n" for user, row in items.items()))
    raw = written(tmp_path / "lists.txt")
    assert raw["data"]["format"] == {"format": "lists", "separator": " "}
    raw = written(tmp_path / "lists.txt", time="none")
    assert (raw["kind"], raw["data"]["format"]["order"], "instances" in raw) == ("otm-sequence", "none", False)
    raw = written(tmp_path / "lists.txt", time="none", kind="otm-robust")
    assert (raw["kind"], len(raw["instances"]["windows"])) == ("otm-robust", 1)


def test_users_without_an_item_are_no_reason_to_refuse_lists(tmp_path: Path) -> None:
    (tmp_path / "lists.txt").write_text("u1 c a b\nu2 a b\nu3\nu4 b c d a\n")
    assert written(tmp_path / "lists.txt")["data"]["format"] == {"format": "lists", "separator": " "}
    (tmp_path / "lists.txt").write_text("u1 c a b\nu2\nu3\nu4\n")
    with pytest.raises(InvalidData, match="line 2: got 'u2'"):
        written(tmp_path / "lists.txt")


@pytest.mark.parametrize("name", ["{}", "item {:04d}"])
def test_events_that_are_sorted_by_item_have_no_order(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    rng = np.random.default_rng(0)
    of_user = [np.sort(rng.choice(40, rng.integers(3, 9), replace=False)) for _ in range(60)]
    of_user[7] = of_user[7][::-1]  # a few may be otherwise
    log, lists_log = tmp_path / "log.csv", tmp_path / "lists.txt"
    log.write_text("user,item\n" + "".join(f"u{user},{name.format(item)}\n" for user, items in enumerate(of_user) for item in items))
    lists_log.write_text("".join(" ".join([f"u{user}", *map(str, items)]) + "\n" for user, items in enumerate(of_user)))
    for file in (log, lists_log):
        assert written(file)["data"]["format"]["order"] == "none"
        assert "order" not in written(file, time="file")["data"]["format"]
    with caplog.at_level("WARNING"):
        espalier.fit(log, user="user", item="item", kind="neighbours")
    assert 'sorted by item id. If that is not the order of time, say time="none"' in caplog.text
    shuffled = [rng.permutation(items) for items in of_user]
    lists_log.write_text("".join(" ".join([f"u{user}", *map(str, items)]) + "\n" for user, items in enumerate(shuffled)))
    assert "order" not in written(lists_log)["data"]["format"]


@pytest.mark.parametrize("folder", [False, True])
def test_parquet_has_names_and_types(tmp_path: Path, folder: bool) -> None:
    user, item, at = zip(*rows(), strict=True)
    times = pa.array(np.array(at) * 1_000_000, pa.timestamp("us"))
    table = pa.table({"customer": user, "asin": item, "stars": [4] * len(user), "when": times})
    log = tmp_path / ("events" if folder else "events.parquet")
    (log if folder else tmp_path).mkdir(exist_ok=True)
    pq.write_table(table, log / "part-0.parquet" if folder else log)
    named = {"user": "customer", "item": "asin", "timestamp": "when", "timestamp_type": "datetime"}
    assert written(log)["data"]["format"] == {"format": "parquet"} | named
    assert "timestamp" not in written(log, time="file")["data"]["format"]


def test_a_folder_of_text_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "p0.csv").write_text(text(",", rows(), "user,item,rating,time"))
    with pytest.raises(
        InvalidData, match=r"^log/p0\.csv: got .*, expected a Parquet file; .* write parts of text into one file, with one header"
    ):
        written(tmp_path / "log")


@pytest.mark.parametrize("name", ["searches.csv", "searches.txt", "searches", "searches.log.gz"])
def test_texts_that_lead_to_items_are_learned_by_xr_linear_whatever_the_name_of_their_log(tmp_path: Path, name: str) -> None:
    log, content = tmp_path / name, ("query,product\n" + "".join(f'"find {item}, please",{item}\n' for _, item, _ in rows())).encode()
    log.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    raw = written(log)
    assert (raw["kind"], raw["name"]) == ("xr-linear", "searches")
    assert raw["data"] == {"format": "log", "train": str(log), "query": "query", "item": "product"}
    assert written(log, kind="xreg")["kind"] == "xreg"


def test_a_log_of_users_who_search_needs_a_kind_or_a_column(tmp_path: Path) -> None:
    log = tmp_path / "both.csv"
    log.write_text("user,query,item\n" + "".join(f"{user},find {item},{item}\n" for user, item, _ in rows()))
    with pytest.raises(
        InvalidConfig, match=r"--kind is missing; expected xr-linear for texts, or otm-sequence for lists of users, since both.csv has both"
    ):
        written(log)
    assert written(log, kind="xr-linear")["data"]["query"] == "query"
    assert written(log, query="query")["kind"] == "xr-linear"
    assert written(log, kind="otm-robust")["data"]["format"]["user"] == "user"


def test_a_line_with_a_time_is_an_event_though_a_word_in_it_is_a_usual_name(tmp_path: Path) -> None:
    log = tmp_path / "words.csv"
    log.write_text("".join(f"{user},{'at' if row == 0 else f'word{item}'},{at}\n" for row, (user, item, at) in enumerate(rows())))
    assert written(log)["data"]["format"]["header"] is False
    assert sum(map(len, histories(log, "0", "1").lists.values())) == len(rows())
    assert written(log, user="u0", item="at", time="1500000000")["data"]["format"]["header"] is True


def test_options_say_what_names_do_not(tmp_path: Path) -> None:
    log = tmp_path / "odd.csv"
    log.write_text("who,what,n\n" + "".join(f"{user},{item},{at}\n" for user, item, at in rows()))
    with pytest.raises(
        InvalidData, match=r"odd\.csv: first line: got \['who', 'what', 'n'\], expected names .* --user NAME and --item NAME; --user 0 if"
    ):
        written(log)
    with pytest.raises(InvalidData, match=r"column item is missing; expected one of \['who', 'what', 'n'\]: say which with --item"):
        written(log, user="who")
    raw = written(log, user="who", item="what", time="n", kind="otm")
    assert raw["kind"] == "otm"
    named = {"user": "who", "item": "what", "timestamp": "n", "timestamp_type": "seconds"}
    assert named.items() <= raw["data"]["format"].items()


def numbered(header: str, columns: tuple[int, ...] = (0, 1, 2, 3)) -> str:
    """Events of users and items that are numbers, the first of them 1,0,4,TIME, with their columns in some order."""
    events = [(str(row % 5 + 1), str(row * 7 % 30), "4", str(1_500_000_000 + row)) for row in range(200)]
    return header + "".join(",".join(event[column] for column in columns) + "\n" for event in events)


@pytest.mark.parametrize("given", [{"user": "0", "item": "1"}, {"user": "0", "item": "1", "time": "3"}, {"item": "1", "time": "none"}])
def test_a_number_in_an_option_is_a_position_whatever_the_first_event_contains(tmp_path: Path, given: dict[str, str]) -> None:
    log = tmp_path / "log.csv"
    log.write_text(numbered("").replace("1,0,4", "1,0,none"))
    form = written(log, **given)["data"]["format"]
    assert {"header": False, "user": 0, "item": 1}.items() <= form.items()
    assert form.get("timestamp") == (None if given.get("time") == "none" else 3)
    events = read(log, **form)
    assert (events.user_count, events.item_count, events.event_count) == (5, 30, 200)


def test_ids_in_brackets_are_no_json(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text("[[wiki]] b c\n" + "a b\n" * 9)
    assert read(log, **written(log)["data"]["format"] | {"min_user_events": 1}).event_count == 11


def test_columns_whose_names_are_numbers_need_another_name_in_the_header(tmp_path: Path) -> None:
    log, given = tmp_path / "log.csv", {"user": "0", "item": "1"}
    log.write_text(numbered("1,0,2,timestamp\n", (1, 0, 2, 3)))
    form = written(log, **given)["data"]["format"]
    assert {"header": True, "user": "0", "item": "1", "timestamp": "timestamp"}.items() <= form.items()
    assert read(log, **form).user_count == 5
    log.write_text(numbered("0,1,2,3\n"))
    form = written(log, **given)["data"]["format"]
    assert {"header": False, "user": 0, "item": 1}.items() <= form.items(), "a header of numbers alone is an event"
    assert read(log, **form | {"min_user_events": 1}).event_count == 201


@pytest.mark.parametrize(
    ("content", "given", "message"),
    [
        ("", {}, "log.csv: first line is missing; expected as many fields"),
        ("one\ntwo\n", {}, "first line: got 'one', expected as many fields"),
        ('{"user": 1, "item": 2}\n', {}, "first line: got '{.user.: 1, .item.: 2}', expected CSV, TSV, .* looks like JSON"),
        ('[\n  {"user": 1}\n]\n', {}, "first line: got '\\[', expected CSV, TSV, .* looks like JSON"),
        ("[88, 11, 17]\n[5, 11]\n", {}, "first line: got '\\[88, 11, 17\\]', expected CSV, TSV, .* looks like JSON"),
        (100_000 * "[" + "\nb\n", {}, "first line: got '\\[\\[.*, expected as many fields"),
        ("[[88, 11],\n[5, 11]]\n", {}, "first line: got '\\[\\[88, 11\\],', expected CSV, TSV, .* looks like JSON"),
        ("user,item\na,b\nc\n", {}, "log.csv: line 3: got 'c', expected as many fields as in every line, .*; the first line has 2"),
        ("user,item\na,b\nc,d,e\n", {}, "log.csv: line 3: got 'c,d,e', expected as many fields"),
        ("\n'user';'item'\n\n'a\nb';'c'\nc;'d';e\n", {}, "log.csv: line 6: got 'c;d;e', expected as many fields"),
        ("1::2::3\n4\n", {}, "log.csv: line 2: got '4', expected as many fields"),
        ("user_id,userid,item\n1,2,3\n", {}, r"column user: got \['user_id', 'userid'\], expected one of .*: say which with --user"),
        ("user,item\n1,2\n", {"user": "users"}, r"column user: got 'users', expected one of \['user', 'item'\]: say which with --user"),
        ("user,item,date\n1,2,May\n", {}, "column 'date': got 'May', expected a number, or a time such as 2026-03-08 07:24"),
        ("user,item,time\n1,2,170\n1,3,\n", {}, "log.csv: line 3, column timestamp: got '', expected an integer in column 'time'"),
        ("user,item\n", {}, "log.csv: got 'no rows', expected events"),
        (
            "user,item\n1,2\n3,4\n",
            {},
            "log.csv: users: got '2 of 2 with one event only', expected users with 2 events or more, who .* --user",
        ),
        ("u1 i1 i2\nu2 i3 i4\n", {}, "first line: .* --user 0 and --item 1 if a line is an event; if it is a user, write data.format"),
        (f"user,item\n1,{'x' * 200_000}\n", {}, "first line: got"),
        ("user,item\n1,2\n,3\n", {}, "line 3, column user: got '', expected an id"),
        ("user,item\n1,2\n", {"kind": "xr-linear"}, r"column query is missing; expected one of \['user', 'item'\]: say which with --query"),
        ("user,item\n1,2\n1,3\n", {"kind": "tree"}, "kind: got 'tree', expected 'otm-robust'"),
    ],
)
def test_a_log_that_cannot_be_read_or_says_too_little_is_refused(tmp_path: Path, content: str, given: dict[str, str], message: str) -> None:
    (tmp_path / "log.csv").write_bytes(content.encode("latin-1"))
    with pytest.raises((InvalidData, InvalidConfig), match=message):
        written(tmp_path / "log.csv", **given)
    assert not (tmp_path / "new.toml").exists()


@pytest.mark.parametrize(
    ("name", "begin", "expected"),
    [
        (
            "log.csv",
            gzip.compress(b"user,item\n1,2\n", mtime=0),
            r"a file compressed by gzip', expected a name that ends in \.gz, log\.csv\.gz",
        ),
        ("log.csv", b"\x28\xb5\x2f\xfd\x04", "a file compressed by zstd', expected text, Parquet or gzip: decompress it first"),
        ("log.zip", b"PK\3\4", "a file compressed by zip', expected text, Parquet or gzip: decompress it first"),
        ("log.csv.gz", b"\xfd7zXZ\0", "a file compressed by xz', expected text, Parquet or gzip: decompress it first"),
    ],
)
def test_a_compressed_file_with_another_name_is_refused_by_what_it_is(tmp_path: Path, name: str, begin: bytes, expected: str) -> None:
    (tmp_path / name).write_bytes(begin)
    with pytest.raises(InvalidData, match=rf"^{name}: got '{expected}"):
        written(tmp_path / name)


def test_a_cut_archive_is_refused_by_name(tmp_path: Path) -> None:
    whole = gzip.compress(text(",", rows(), "user,item,rating,time").encode())
    for content in (whole[: len(whole) // 2], b"user,item\n1,2\n"):
        (tmp_path / "log.csv.gz").write_bytes(content)
        with pytest.raises(InvalidData, match=r"log\.csv\.gz: got .*, expected a file that can be read to its end"):
            written(tmp_path / "log.csv.gz")


def test_the_log_is_never_written_over_and_odd_names_are_refused_or_kept(tmp_path: Path) -> None:
    content = text(",", rows(), "user,item,rating,time")
    log = tmp_path / 'a "b\x7f.csv'
    log.write_text(content)
    (tmp_path / "link.toml").symlink_to(log)
    roles: dict[str, str | None] = dict.fromkeys(("user", "item", "time", "query"))
    with pytest.raises(InvalidData, match="a name in UTF-8 without control characters"):
        write_configuration(log, tmp_path / "new.toml", True, None, roles)
    log = log.rename(tmp_path / 'a "b.csv')
    (tmp_path / "link.toml").unlink()
    (tmp_path / "link.toml").symlink_to(log)
    for out, expected in ((log, "another file than the log"), (tmp_path / "link.toml", "another file than the log")):
        with pytest.raises(InvalidConfig, match=expected):
            write_configuration(log, out, True, None, roles)
    for name, expected in (("a\nb.toml", "without control characters"), ("none/x.toml", "in a folder that exists")):
        with pytest.raises(InvalidConfig, match=f"--out: .*{expected}"):
            write_configuration(log, tmp_path / name, True, None, roles)
    assert log.read_text() == content
    assert tomllib.loads(write_configuration(log, tmp_path / "new.toml", True, None, roles).read_text())["data"]["log"] == str(log)


def test_lines_end_where_the_reader_ends_them(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text(text(",", rows(), "user,item,title,time").replace("4.5", "a\u2028b\x0bc"))
    assert written(tmp_path / "log.csv")["data"]["format"]["item"] == "item"
    for separator in " \t":
        (tmp_path / "lists.txt").write_text("u1 i1 i2 \nu2 i3 i4 i5 \n".replace(" ", separator))
        form = {"format": "lists", "separator": separator}
        assert written(tmp_path / "lists.txt")["data"]["format"] == form


def test_blanks_are_part_of_values_as_for_the_reader(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    log.write_text("user,item\n" + "".join(f"{user},{item} \n" for user, item, _ in rows()))
    written(log)
    assert "# - user: column 'user', by its name\n" in (tmp_path / "new.toml").read_text()
    assert "# - item: column 'item', by its name; blanks around its values are part of them\n" in (tmp_path / "new.toml").read_text()
    log.write_text(text(",", rows(), "user,item,rating,time", lambda at: f"{at} "))
    with pytest.raises(InvalidData, match="column 'time': got '1500000000 ', expected a number, or a time such as 2026-03-08 07:24"):
        written(log)
    log.write_text(text(" ", rows(), "user item rating time", lambda at: f"{at} "))
    with pytest.raises(InvalidData, match="expected as many fields as in every line"):
        written(log)


def test_a_file_that_is_there_is_only_written_over_by_force(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("My clicks.csv").write_text(text(",", rows(), "user,item,rating,time"))
    new = command("new", "My clicks.csv")
    first = Path("my-clicks.toml").read_text()
    assert (new.status, new.out) == (0, first)
    assert "# - user: column 'user', by its name\n" in first
    refused = command("new", "My clicks.csv", "--kind", "otm")
    assert refused.status == 1
    assert "--out: got 'my-clicks.toml', expected a file that does not exist yet, or --force" in refused.err
    assert Path("my-clicks.toml").read_text() == first
    assert command("new", "My clicks.csv", "--kind", "otm", "--force").status == 0
    assert 'kind = "otm"\n' in Path("my-clicks.toml").read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"My clicks.csv", "my-clicks.toml"}


# -- logs as they come out of other systems -----------------------------------------------------------------------------------


def shown(header: str, row: str, end: str = "\n") -> str:
    """The events, each with its user u, item i, seconds `at` and moment t put into `row`."""
    return text_logs.text(header, lambda u, i, at: row.format(u=u, i=i, at=at, t=datetime.fromtimestamp(at, UTC)), end)


AWKWARD: dict[str, tuple[bytes, dict[str, Any], str]] = {
    "a latin-1 CSV with semicolons and decimal commas": (
        shown("user_id;item_id;Bewertung;Name", "{u};{i};{t:%S},5;Käse").encode("latin-1"),
        {"encoding": "latin-1", "separator": ";", "decimal": ",", "user": "user_id", "item": "item_id"},
        "# - decimal commas: by the values of column 'Bewertung'",
    ),
    "a UTF-16 TSV of a spreadsheet": (
        shown("User\tItem\tTime", "{u}\t{i}\t{t:%Y-%m-%d %H:%M:%S}", "\r\n").encode("utf-16"),
        {"encoding": "utf-16", "separator": "\t", "user": "User", "timestamp": "Time", "timestamp_type": "datetime"},
        "# - encoding utf-16, by the bytes of the file",
    ),
    "ISO times with a zone": (
        shown("user,item,begin", "{u},{i},{t:%Y-%m-%dT%H:%M:%S}+02:00").encode(),
        {"timestamp": "begin", "timestamp_type": "datetime"},
        "# - times: ISO 8601, by the values",
    ),
    "times with a blank before UTC": (
        shown("event_time,event_type,product_id,user_id", "{t:%Y-%m-%d %H:%M:%S} UTC,view,{i},{u}").encode(),
        {"user": "user_id", "item": "product_id", "timestamp": "event_time", "timestamp_type": "datetime"},
        "# - times: ISO 8601, by the values",
    ),
    "days before months between dots": (
        shown("user;item;Datum", "{u};{i};{t:%d.%m.%Y %H:%M:%S}").encode(),
        {"separator": ";", "timestamp": "Datum", "timestamp_type": "datetime", "time_format": "%d.%m.%Y %H:%M:%S"},
        "# - times: written %d.%m.%Y %H:%M:%S, by the values",
    ),
    "months before days, and half days": (
        shown("user,item,time", "{u},{i},{t:%m/%d/%Y %I:%M:%S %p}").encode(),
        {"timestamp": "time", "timestamp_type": "datetime", "time_format": "%m/%d/%Y %I:%M:%S %p"},
        "# - times: written %m/%d/%Y %I:%M:%S %p, by the values",
    ),
    "years of two digits": (
        shown("user;item;Datum", "{u};{i};{t:%d.%m.%y}").encode(),
        {"separator": ";", "timestamp": "Datum", "timestamp_type": "datetime", "time_format": "%d.%m.%y"},
        "# - times: written %d.%m.%y, by the values",
    ),
    "milliseconds": (
        shown("user,item,ts", "{u},{i},{at}007").encode(),
        {"timestamp": "ts", "timestamp_type": "milliseconds"},
        "# - times: milliseconds since 1970, by the values",
    ),
    "a header in another order and case": (
        shown("Item;USER;Timestamp", "{i};{u};{at}").encode(),
        {"separator": ";", "user": "USER", "item": "Item", "timestamp": "Timestamp", "timestamp_type": "seconds"},
        "# - times: seconds since 1970",
    ),
    "a mark, quotes, separators and line ends in them": (
        shown('"user","item","title","timestamp"', '"{u}","{i}","The ""best"", part\nof {i}","{at}"').encode("utf-8-sig"),
        {"user": "user", "timestamp": "timestamp", "timestamp_type": "seconds"},
        "# - not used: column 'title'",
    ),
    "single quotes": (
        shown("'user','item','title'", "'{u}','{i}','a, b'").encode(),
        {"quote": "'", "user": "user", "item": "item"},
        "# - quotes around fields: ', since fields fit so",
    ),
    "single quotes around every field, none with a separator": (
        shown("'user','item'", "'{u}','{i}'").encode(),
        {"quote": "'", "user": "user", "item": "item"},
        "# - quotes around fields: ', since fields fit so",
    ),
    "single quotes below a header without, one doubled": (
        shown("user,item,title", "{u},'{i}','it''s'").encode(),
        {"quote": "'", "user": "user", "item": "item"},
        "# - quotes around fields: ', since fields fit so",
    ),
    "apostrophes that are no quotes": (
        shown("user,item,title", "{u},{i},'Til There Was You").encode(),
        {"user": "user", "item": "item"},
        "# - not used: column 'title'",
    ),
    "times of which some are unknown": (
        shown("user,item,time", "{u},{i},{at}000").replace(f"{MOMENT}000", "0").encode(),
        {"timestamp": "time", "timestamp_type": "milliseconds"},
        "# - times: milliseconds since 1970, by the values",
    ),
    "UTF-32 with a mark": (
        shown("user,item,time", "{u},{i},{at}").encode("utf-32"),
        {"encoding": "utf-32", "timestamp": "time", "timestamp_type": "seconds"},
        "# - encoding utf-32, by the bytes of the file",
    ),
    "names of other words, and fractions of seconds": (
        shown("session;sku;rating;ts", "{u};{i};4.5;{at}.5").encode(),
        {"separator": ";", "user": "session", "item": "sku", "timestamp": "ts", "timestamp_type": "seconds"},
        "# - times: seconds since 1970",
    ),
    "columns that no line names": (
        "".join(f"{user}::{item}::4.5::{at}\n" for user, item, at in text_logs.ROWS).encode(),
        {"separator": "::", "header": False, "user": 0, "item": 1, "timestamp": 3, "timestamp_type": "seconds"},
        "# - user: column 0, by its position, since no line names the columns",
    ),
    "quotes that are plain characters": (
        shown("user\titem\ttitle", '{u}\t{i}\t"x').replace('i0\t"', "i0\t").encode(),
        {"quote": "", "user": "user", "item": "item"},
        "# - quotes around fields: none, since fields fit so",
    ),
}


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


@pytest.mark.parametrize("query", [False, True], ids=["histories", "texts"])
def test_quotes_of_which_some_do_not_end_are_characters_unless_fields_are_in_quotes(tmp_path: Path, query: bool) -> None:
    header = "query,item,title" if query else "user,item,title"
    rows = [f"u{row % 9},é{row % 5},plain" for row in range(2000)]
    rows[1500], rows[1700] = 'u0,é0,"7 inch', 'u1,é1,"9 inch'
    log = tmp_path / "log.csv"
    log.write_text("\n".join([header, *rows, ""]))
    raw, written = new(log)
    assert (raw["data"] if query else raw["data"]["format"])["quote"] == ""
    assert "# - quotes around fields: none, since fields fit so" in written
    assert written.count("column 'item', by its name") == 1
    assert "2,000 rows" in written if query else "2,000 events" in written
    rows[3] = 'u3,é3,"a title"'
    log.write_text("\n".join([header, *rows, ""]))
    key = "data.quote" if query else "data.format.quote"
    with pytest.raises(InvalidData, match=rf"log\.csv: line 1502: got '\"', expected quotes that end with a field; .* {key} = \"\""):
        new(log)


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
    assert f"rows left out: 4 ({counts}); rows read: 196" in caplog.messages


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
    log.write_bytes(
        "".join(["query;item;Wert\n", *(f"größe {item};{item};0,5\n" for _, item, _ in text_logs.ROWS), ";x;1\n"]).encode("cp1252")
    )
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


@pytest.mark.parametrize("repeats", [19, 20])
def test_items_of_the_history_are_answers_if_many_events_repeat_them(tmp_path: Path, repeats: int) -> None:
    """Of 100 events, so many are of the user's first item."""
    lists = [[f"i{user}-{place}" for place in range(20)] for user in range(5)]
    for number in range(repeats):
        lists[number % 5][-1 - number // 5] = lists[number % 5][0]
    log = tmp_path / "songs.csv"
    log.write_text("user,item\n" + "".join(f"u{user},{item}\n" for user, items in enumerate(lists) for item in items))
    raw = written(log, time="file")
    assert raw.get("search") == ({"exclude_seen": False} if repeats == 20 else None)
    note = "# - 20% of the events are of an item that the user had before"
    assert (note in log.with_name("new.toml").read_text()) == (repeats == 20)


@pytest.mark.parametrize(("repeats", "unique"), [(0, True), (24, True), (25, False)])
def test_events_that_were_written_twice_are_no_reason_to_return_items_again(tmp_path: Path, repeats: int, unique: bool) -> None:
    """Each of 100 events is written twice, and so many have an item that the user had before, at another time."""
    events = [(f"u{number % 5}", f"i{0 if number < repeats else number}", 1_500_000_000 + number) for number in range(100)]
    log = tmp_path / "shop.csv"
    log.write_text("user,item,time\n" + "".join(2 * f"{user},{item},{at}\n" for user, item, at in events))
    raw, notes = new(log)
    assert raw["data"]["format"].get("unique", False) == unique
    assert ("search" in raw) != unique
    assert ("# - 50% of the events are as another, also in their time: an item counts once for a user" in notes) == unique
    log.write_text("user,item,time\n" + "".join(2 * f"{user},{item},{at - at % 86400}\n" for user, item, at in events))
    assert "unique" not in new(log)[0]["data"]["format"], "days are no times"


def query_vectors(folder: Path, kind: pa.DataType, **columns: list[Any]) -> Path:
    vectors = np.random.default_rng(0).normal(size=(40, 3)).tolist()
    pq.write_table(pa.table({"embedding": pa.array(vectors, kind)} | columns), folder / "captions.parquet")
    return folder / "captions.parquet"


@pytest.mark.parametrize("kind", [pa.list_(pa.float32()), pa.list_(pa.float64(), 3), pa.large_list(pa.float32())], ids=str)
def test_query_vectors_are_recognised(tmp_path: Path, kind: pa.DataType) -> None:
    ids = [f"i{row % 9}" for row in range(40)]
    raw, notes = new(query_vectors(tmp_path, kind, images=[[item, "i3"] for item in ids]))
    assert (raw["kind"], raw["data"]["format"]) == ("otm-robust", {"format": "vectors", "vector": "embedding", "items": "images"})
    assert "# - vectors: column 'embedding', by its values; their items: column 'images'" in notes
    assert "# - 40 vectors, 9 items, 80 pairs" in notes
    raw, notes = new(query_vectors(tmp_path, kind, sku=ids, query_id=list(range(40))))
    assert raw["data"]["format"]["items"] == "sku"
    assert "# - not used: column 'query_id'" in notes
    with pytest.raises(InvalidData, match=r"column item is missing; expected one of .*: say which with --item NAME"):
        new(query_vectors(tmp_path, kind, a=ids, b=ids))
    assert written(query_vectors(tmp_path, kind, a=ids, b=ids), item="a")["data"]["format"]["items"] == "a"
    log = query_vectors(tmp_path, kind, user=[f"u{row // 8}" for row in range(40)], item=ids)
    assert written(log, time="file")["data"]["format"]["user"] == "user"


def test_query_vectors_have_a_table_of_items(tmp_path: Path) -> None:
    log = query_vectors(tmp_path, pa.list_(pa.float32()), item=[f"i{row % 9}" for row in range(40)])
    pq.write_table(pa.table({"sku": [f"i{row}" for row in range(9)], "title": ["a title"] * 9}), tmp_path / "items.parquet")
    options = dict.fromkeys(("user", "item", "time", "query"))
    file = write_configuration(log, tmp_path / "new.toml", True, None, options, tmp_path / "items.parquet")
    data = tomllib.loads(file.read_text())["data"]
    assert (data["items"], data["items_id"], "own_texts" in data) == (str(tmp_path / "items.parquet"), "sku", False)


def test_numbers_of_queries_are_no_texts(tmp_path: Path) -> None:
    log = tmp_path / "searches.csv"
    log.write_text("query_id,query,product_id,label\n" + "".join(f"{row},shoe {row % 5},p{row % 3},1\n" for row in range(30)))
    assert new(log)[0]["data"] == {"format": "log", "train": str(log), "query": "query", "item": "product_id"}
    log.write_text("query_id,product_id\n" + "".join(f"{row},p{row % 3}\n" for row in range(30)))
    with pytest.raises(InvalidData, match=r"column user is missing; .* --user NAME"):
        new(log)
    log.write_text("query,product_id\n" + "".join(f"{row},p{row % 3}\n" for row in range(30)))
    with pytest.raises(
        InvalidData, match=r"^searches\.csv: column 'query': got '0', expected texts, or lists of users: .* --query NAME or --user NAME"
    ):
        new(log)
    assert written(log, query="query")["data"]["query"] == "query"


@pytest.mark.parametrize(
    ("header", "values", "weight"),
    [
        ("clicked", ["0", "1"], "clicked"),
        ("Clicks", ["3", "0.5"], "Clicks"),
        ("times", ["1", ""], "times"),
        ("rank", ["1", "2"], None),
        ("clicked", ["yes", "no"], None),
        ("clicks", ["-1", "2"], None),
        ("clicks,orders", ["1,2", "2,0"], None),
    ],
)
def test_a_column_of_weights_is_used(tmp_path: Path, header: str, values: list[str], weight: str | None) -> None:
    log = tmp_path / "searches.csv"
    log.write_text(f"query,item,{header}\n" + "".join(f"shoe {row % 7},i{row % 5},{values[row % 40 == 0]}\n" for row in range(80)))
    raw, notes = new(log)
    assert raw["data"].get("weight") == weight
    assert (f"# - weight: column '{header}', by its name; rows of weight 0 teach nothing" in notes) == (weight is not None)
    assert ("not used" in notes) == (weight is None)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["otm-sequence", "xr-linear"])
def test_what_it_writes_is_trained_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("training.deep.sequence.rules.LEAST_STEPS", 5)  # passes over this small log end before
    log = Path("shop.csv")
    if kind == "xr-linear":
        log.write_text("query,item\n" + "".join(f"find {item} number {at},{item}\n" for _, item, at in rows()))
    else:
        log.write_text(text(",", rows(), "user,item,rating,time"))
    assert command("new", log).status == 0
    assert command("fit", "--config", "shop.toml", "--out", "models/shop/1", "--device", "cpu").status == 0
    bundle = Bundle.open(tmp_path / "models" / "shop" / "1")
    assert (bundle.manifest.algorithm, len(bundle.items)) == (kind, ITEMS)
