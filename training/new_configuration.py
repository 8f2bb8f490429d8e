"""A first configuration for a log (`python -m training new LOG`): looks at its first rows, and writes the TOML file that trains on it.

The file says in comments what was decided and from what. Columns are known by their usual names, by options, or by their values.
"""

from __future__ import annotations

import csv
import json
import re
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa

from espalier.errors import InvalidConfig, InvalidData
from training.data.interactions import read_interactions
from training.data.item_tables import separator_of
from training.data.log_files import not_utf8, open_text
from training.data.log_values import Timestamps
from training.data.parquet_logs import files_of, opened
from training.specification.log_format import LOG_FORMAT, Column
from training.specification.models import LINEAR_KINDS, SPECIFICATION

ROWS = 1000
SEPARATORS = ("::", "\t", ",", ";", "|", " ")
NAMES = {
    "user": ("user", "customer", "client", "visitor", "account", "member", "reader", "reviewer", "session", "u"),
    "item": ("item", "product", "article", "movie", "book", "song", "track", "video", "business", "sku", "asin", "parentasin", "i"),
    "time": ("timestamp", "time", "datetime", "eventtime", "createdat", "created", "date", "ts", "unixtime", "unixreviewtime", "t"),
    "query": ("query", "querytext", "searchquery", "searchterm", "search", "keywords", "keyword"),
}
"""Names of columns by role, the surest first: in lower case, with letters and digits alone, and without an `id` at the end."""
POSITIONS = {"user": 0, "item": 1}
EPOCH = range(10**8, 10**19)
"""Whole numbers that may be times where no line names the columns: seconds since 1973, up to nanoseconds."""
LEAST_EVENTS = (10, 5, 3, 2)
"""Of a user: the first of these with which half of the events stay."""
MOST_IN_WINDOW = 200


@dataclass(frozen=True)
class Layout:
    """A log by its first rows.

    form    keys of data.format
    values  by column; columns are positions where no line names them, and lists have none
    given   role → column as its option has it, or None; the time may also be `file` or `none`
    said    what was decided, in words
    """

    log: Path
    form: dict[str, object]
    values: Mapping[Column, pa.Array]
    given: Mapping[str, str | None]
    said: list[str]

    def column(self, role: str, is_needed: bool = True) -> Column | None:
        """The column of a role; None where none looks like it. Raises InvalidData where it is needed, or where several look like it."""
        names, given = list(self.values), self.given[role]
        found, by = [name for name in names if str(name) == given], f"as --{role} says"
        if given is None:
            found, by = next(filter(None, ([name for name in names if _word(name) == word] for word in NAMES[role])), []), "by its name"
        if given is None and not found and role in POSITIONS and POSITIONS[role] in names:
            found, by = [POSITIONS[role]], "by its position, since no line names the columns"
        if len(found) > 1 or (not found and (is_needed or given is not None)):
            raise InvalidData(f"{self.log.name}: column {role}", given or found or None, f"one of {names}: say which with --{role}")
        self.said.extend(f"{role}: column {name!r}, {by}" for name in found)
        return found[0] if found else None

    def time(self, others: list[object]) -> dict[str, object]:
        """`timestamp` and `timestamp_type`; empty where no column looks like times. Raises InvalidData as `column` does."""
        if self.given["time"] in ("file", "none"):
            return {}
        types = {name: _time_type(values) for name, values in self.values.items()}
        column = self.column("time", is_needed=False)
        if column is None:
            column = next((name for name in types if name not in others and (types[name] == "datetime" or self.has_epochs(name))), None)
            by_values = f"time: column {column!r}, by its values"
            in_order = "no column looks like times: events count as in order of the file. If they have no order, say --time none"
            self.said.append(in_order if column is None else by_values)
        elif types[column] is None:
            kinds = [_time_type(self.values[column].slice(row, 1)) for row in range(len(self.values[column]))]
            wrong = next((row for row, kind in enumerate(kinds) if kind != kinds[0] or kind is None), 0)
            value = self.values[column][wrong].as_py()
            raise InvalidData(
                f"{self.log.name}: column {column!r}",
                value,
                "a time: name another column with --time, or say --time file",
            )
        return {} if column is None else {"timestamp": column, "timestamp_type": types[column]}

    def say_unused(self, used: Sequence[object]) -> None:
        """Note the columns that no role has."""
        unused = [name for name in self.values if name not in used]
        if unused:
            self.said.append(f"not used: column{'s' * (len(unused) > 1)} {', '.join(map(repr, unused))}")

    def has_epochs(self, column: Column) -> bool:
        """Whether all values of a column that has no name may be times."""
        texts = self.values[column].to_pylist()
        return isinstance(column, int) and all(re.fullmatch(r"[0-9]+(\.[0-9]+)?", text) and int(float(text)) in EPOCH for text in texts)


def write_configuration(log: Path, out: Path | None, force: bool, kind: str | None, given: Mapping[str, str | None]) -> Path:
    """Write the configuration for a log; returns where. The log is read as a whole, so that its errors come up now.

    out    the file; by default in the current folder, named after the log
    force  write over a file that is there
    kind   what is trained; None: by the log
    given  as in Layout
    Raises InvalidConfig, and InvalidData that names the columns and the option, where the log does not say enough.
    """
    name = re.sub(r"[^a-z0-9._-]+", "-", log.name.lower().partition(".")[0]).strip("._-")[:64] or "model"
    out = Path(f"{name}.toml") if out is None else out
    _check_out(out, log, force)
    with tempfile.TemporaryDirectory(dir=out.absolute().parent, prefix=".new-") as scratch:
        layout = _look(log, given, Path(scratch))
        query = layout.column("query", is_needed=kind in LINEAR_KINDS) if kind in (None, *LINEAR_KINDS) else None
        if query is None:
            kind, body = _histories(layout, kind, Path(scratch))
        elif kind is None and given["query"] is None and layout.column("user", is_needed=False) is not None:
            raise InvalidConfig("--kind", None, f"xr-linear for texts, or otm-sequence for lists of users, since {log.name} has both")
        else:
            kind, body = kind or "xr-linear", _texts(layout, query)
    lines = [f"# Written by `python -m training new`; `python -m training options {kind}` lists all keys. It is trained by"]
    lines += [f"#     python -m training fit --config {out} --out models/{name}/1", "# What was found:"]
    lines += [*(f"# - {words}" for words in layout.said), f'kind = "{kind}"', f'name = "{name}"', "", "[data]", *body, ""]
    SPECIFICATION.checked(tomllib.loads("\n".join(lines)))
    out.write_text("\n".join(lines))
    return out


def _check_out(out: Path, log: Path, force: bool) -> None:
    if not str(out).isprintable():
        raise InvalidConfig("--out", str(out), "a name without control characters")
    if not out.absolute().parent.is_dir():
        raise InvalidConfig("--out", str(out), "a file in a folder that exists")
    if out.exists() and log.exists() and out.samefile(log):
        raise InvalidConfig("--out", str(out), "another file than the log")
    if out.is_dir() or (out.exists() and not force):
        raise InvalidConfig("--out", str(out), "a file that does not exist yet, or --force to write over it")


def _look(log: Path, given: Mapping[str, str | None], scratch: Path) -> Layout:
    if not str(log).isprintable():  # surrogates of a name that is not UTF-8, too
        raise InvalidData("log", str(log).encode("utf-8", "backslashreplace").decode(), "a name in UTF-8 without control characters")
    if not log.exists():
        raise InvalidData("log", str(log), "a file that exists, or a folder of Parquet files")
    if log.is_dir() or log.name.endswith((".parquet", ".parquet.gz")):
        file = files_of(log)[0]
        with opened(file, file.name, scratch) as parquet:
            batch = next(parquet.iter_batches(ROWS), pa.record_batch([]))
        return Layout(log, {"format": "parquet"}, dict(zip(batch.schema.names, batch.columns, strict=True)), given, ["Parquet"])
    try:
        with open_text(log, None) as text:
            lines = [line for line in re.split(r" *\r?\n", b"".join(islice(text, ROWS)).decode("utf-8-sig")) if line]
    except UnicodeDecodeError:
        raise not_utf8(log) from None
    except OSError as error:
        raise InvalidData("log", str(log), f"a file that can be read to its end ({error})") from error
    return _text(log, lines, given)


def _text(log: Path, lines: list[str], given: Mapping[str, str | None]) -> Layout:
    """A table where a separator gives all lines as many fields, at least two; lists of ids where no line names columns."""
    rows_by = {separator: _rows(lines, separator) for separator in SEPARATORS}
    split = {separator: rows for separator, rows in rows_by.items() if rows and min(map(len, rows)) > 1}
    tables = [separator for separator, rows in split.items() if len({len(row) for row in rows}) == 1]
    separator = max(tables or split, key=lambda separator: len(split[separator][0]), default=None)
    expected = f"as many fields as in every line, at least 2, or ids alone, with one of {', '.join(map(repr, SEPARATORS))} between them"
    if separator is None:
        raise InvalidData(f"{log.name}: first line", lines[0] if lines else None, expected)
    first, *rest = split[separator]
    is_wide = separator == " " and len(first) > 2
    is_header = any(cell in given.values() or _word(cell) in words for cell in first for words in NAMES.values())
    if not tables:
        if is_header or any(" " in cell or not cell for row in split[separator] for cell in row):
            raise InvalidData(f"{log.name}: first line", lines[0], expected)
        return Layout(log, {"format": "lists", "separator": separator}, {}, given, [f"a user a line, {separator!r} between ids"])
    if not is_header and not any(map(str.isdecimal, "".join(first))) and given["user"] is None:
        expected = "names of columns: say which with --user and --item; --user 0 if it is an event"
        raise InvalidData(f"{log.name}: first line", first, expected)
    if is_header and not rest:
        raise InvalidData(log.name, "names of columns alone", "events")
    names: list[Column] = [*first] if is_header else [*range(len(first))]
    values = {name: pa.array(column) for name, column in zip(names, zip(*(rest or [first]), strict=True), strict=True)}
    said = [f"text with {separator!r} between fields; the first line {'names the columns' if is_header else 'is an event'}"]
    layout = Layout(log, {"format": "csv", "separator": separator, "header": is_header}, values, given, said)
    if is_wide and not is_header and given["user"] is None and not any(map(layout.has_epochs, names)):
        expected = '--user 0 --item 1 if a line is an event; if it is a user, write format = { format = "lists", separator = " " } yourself'
        raise InvalidData(f"{log.name}: first line", first, expected)
    return layout


def _rows(lines: list[str], separator: str) -> list[list[str]]:
    """The fields of each line. The last line may end inside of quotes where there are more, and is left out."""
    if len(separator) > 1:
        return [line.split(separator) for line in lines]
    try:
        rows = list(filter(None, csv.reader(lines, delimiter=separator)))
    except csv.Error:  # a field above the reader's limit
        return []
    return rows[:-1] if len(lines) == ROWS else rows


def _texts(layout: Layout, query: Column) -> list[str]:
    from training.data.query_logs import read_log  # needs polars

    item, separator = layout.column("item"), str(layout.form.get("separator", ""))
    separator = "" if separator == separator_of(layout.log) or len(separator) > 1 else separator
    layout.say_unused([query, item])
    frame = read_log(layout.log, str(query), str(item), {}, separator or None)
    layout.said.append(f"{len(frame):,} rows, {frame['query'].n_unique():,} texts, {frame['item'].n_unique():,} items")
    lines = ['format = "log"', f"train = {_toml(str(layout.log))}", f"query = {_toml(query)}", f"item = {_toml(item)}"]
    return lines if not separator else [*lines, f"separator = {_toml(separator)}"]


def _histories(layout: Layout, kind: str | None, scratch: Path) -> tuple[str, list[str]]:
    """The kind, and the lines of the configuration from `data` on."""
    form = layout.form | ({"order": "none"} if layout.given["time"] == "none" else {})
    if layout.values:
        form |= {role: layout.column(role) for role in POSITIONS}
        form |= layout.time([form[role] for role in POSITIONS])
        layout.say_unused([form[role] for role in (*POSITIONS, "timestamp") if role in form])
    interactions = read_interactions(layout.log, LOG_FORMAT.checked(form | {"min_user_events": 1}), scratch)
    length_U = np.diff(interactions.offset_U1)
    kept = (least for least in LEAST_EVENTS if 2 * length_U[length_U >= least].sum() >= length_U.sum())
    form["min_user_events"] = next(kept, None)
    if form["min_user_events"] is None:
        expected = "at least half of them of users with 2 or more; is the column of users another one? Say so with --user"
        raise InvalidData(f"{layout.log.name}: events", f"{interactions.event_count:,} of {interactions.user_count:,} users", expected)
    layout.said.append(f"{interactions.user_count:,} users, {interactions.item_count:,} items, {interactions.event_count:,} events")
    layout.said.append(f"min_user_events: of {LEAST_EVENTS} the first with which half of the events stay")
    written = ", ".join(f"{key} = {_toml(value)}" for key, value in form.items())
    lines = [f"log = {_toml(str(layout.log))}", f"format = {{ {written} }}"]
    if interactions.order != "none":
        return kind or "otm-sequence", lines
    window = int(np.clip(np.quantile(length_U, 0.95), 1, MOST_IN_WINDOW))
    more = [f"windows = [{window}] # lists have no order: one window, as long as 95 of 100 lists", "targets = 20"]
    return kind or "otm-robust", lines if kind == "otm-sequence" else [*lines, "", "[instances]", *more]


def _time_type(values: pa.Array) -> str | None:
    """data.format.timestamp_type of values; None where they are no times."""
    if pa.types.is_temporal(values.type):
        return "datetime"
    for kind, to in (("integer", pa.int64()), ("float", pa.float64())):
        try:
            values.cast(to)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            continue
        return kind
    is_text = pa.types.is_string(values.type) or pa.types.is_large_string(values.type)
    return "datetime" if is_text and Timestamps("datetime").can_read(values) else None


def _word(name: object) -> str:
    """A column's name as NAMES has it; "" for a position."""
    return re.sub(r"[^a-z0-9]", "", name.lower()).removesuffix("id") if isinstance(name, str) else ""


def _toml(value: object) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
