"""A first configuration for a log (`espalier new LOG`): looks at its first rows, and writes the TOML file that trains on it.

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
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from espalier.errors import InvalidConfig, InvalidData

from .data.interactions import read_interactions
from .data.log_files import without_end
from .data.log_values import LAST_MICROSECOND, BadRows, Timestamps, is_text_type
from .data.parquet_logs import files_of, is_parquet, opened
from .data.text_files import encoding_of, fields_of, open_text, quoted_fields, separator_of
from .specification.linear import LogData
from .specification.log_format import LOG_FORMAT, BadRowsPolicy, Column, CsvFormat, TextTable, TimestampType
from .specification.models import LINEAR_KINDS, SPECIFICATION

if TYPE_CHECKING:
    import polars as pl

ROWS = 1000
LOOKED_BYTES = 1 << 20
SEPARATORS = ("::", "\t", ",", ";", "|", " ")
NAMES = {
    "user": ("user", "customer", "client", "visitor", "account", "member", "reader", "reviewer", "session", "u"),
    "item": ("item", "product", "article", "movie", "book", "song", "track", "video", "business", "sku", "asin", "parentasin", "i"),
    "time": ("timestamp", "time", "datetime", "eventtime", "createdat", "created", "date", "ts", "unixtime", "unixreviewtime", "at", "t"),
    "query": ("query", "querytext", "searchquery", "searchterm", "search", "keywords", "keyword"),
}
"""Names of columns by role, the surest first: in lower case, with letters and digits alone, and without an `id` at the end."""
POSITIONS = {"user": 0, "item": 1}
EPOCHS: dict[TimestampType, tuple[int, int]] = {
    "seconds": (10**8, 10**10),
    "milliseconds": (10**11, 10**13),
    "microseconds": (10**14, LAST_MICROSECOND),
    "nanoseconds": (10**17, 1000 * LAST_MICROSECOND),
}
"""What times since 1970 are in each unit: from 1973 to 2286, the last two to 2255."""
DATES = ("%d.%m.%Y", "%d.%m.%y", "%d/%m/%Y", "%m/%d/%Y", "%d/%m/%y", "%m/%d/%y", "%d-%m-%Y", "%m-%d-%Y", "%Y/%m/%d")
TIMES = ("", " %H:%M", " %H:%M:%S", " %I:%M %p", " %I:%M:%S %p")
"""How dates and times are written that are not ISO 8601. Between dots the day comes first everywhere."""
MOST_BAD = 0.05
"""Share of rows that cannot be read and yet are taken for damaged; with more of them the log is read in a wrong way."""
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
        for name in found:
            blanks = any(isinstance(value, str) and value != value.strip() for value in self.values[name].to_pylist())
            self.said.append(f"{role}: column {name!r}, {by}{'; blanks around its values are part of them' if blanks else ''}")
        return found[0] if found else None

    def time(self, others: list[object]) -> dict[str, object]:
        """`timestamp` and `timestamp_type`; empty where no column looks like times. Raises InvalidData as `column` does."""
        if self.given["time"] in ("file", "none"):
            return {}
        decimal = str(self.form.get("decimal", "."))
        types = {name: _time_type(values, decimal) for name, values in self.values.items()}
        column = self.column("time", is_needed=False)
        if column is None:
            dated = [name for name in types if name not in others and _looks_dated(name, types[name])]
            column = dated[0] if dated else None
            by_values = f"time: column {column!r}, by its values"
            in_order = "no column looks like times: events count as in order of the file. If they have no order, say --time none"
            self.said.append(in_order if column is None else by_values)
        if column is None:
            return {}
        kind = types[column]
        if kind is None:
            raise InvalidData(
                f"{self.log.name}: column {column!r}",
                _first_without_time(self.values[column], decimal),
                "a number, or a time such as 2026-03-08 07:24, 08.03.2026 or 03/28/2026, without blanks around it: name another column "
                "with --time, or say --time file if the rows are in order",
            )
        if kind == "datetime" and (written := _formats(self.values[column])):
            if len(written) > 1:
                first, expected = self.values[column][0].as_py(), " or ".join(written)
                expected = (
                    f"days and months that can be told apart ({expected}): say --time file if the rows are in order, or write time_format"
                )
                raise InvalidData(f"{self.log.name}: column {column!r}", first, expected)
            self.said.append(f"times: written {written[0]}, by the values")
            return {"timestamp": column, "timestamp_type": kind, "time_format": written[0]}
        words = {"datetime": "ISO 8601", "integer": "whole numbers of no known unit", "float": "numbers of no known unit"}
        self.said.append(f"times: {words.get(kind, f'{kind} since 1970')}, by the values")
        return {"timestamp": column, "timestamp_type": kind}

    def say_unused(self, used: Sequence[object]) -> None:
        """Note the columns that no role has."""
        unused = [name for name in self.values if name not in used]
        if unused:
            self.said.append(f"not used: column{'s' * (len(unused) > 1)} {', '.join(map(repr, unused))}")

    def bad_rows(self, counts: Mapping[str, int], section: str) -> dict[str, object]:
        """`bad_rows` where some rows are left out that cannot be read."""
        if not counts:
            return {}
        reasons = ", ".join(f"{reason}: {count:,}" for reason, count in counts.items())
        self.said.append(f"rows that cannot be read are left out, {reasons}; without {section}.bad_rows the first one ends the training")
        return {"bad_rows": "skip"}


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
    lines = [f"# Written by `espalier new`; `espalier options {kind}` lists all keys. It is trained by"]
    lines += [f"#     espalier fit --config {out} --out models/{name}/1", "# What was found:"]
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
    if is_parquet(log):
        file = files_of(log)[0]
        with opened(file, file.name, scratch) as parquet:
            batch = next(parquet.iter_batches(ROWS), pa.record_batch([]))
        return Layout(log, {"format": "parquet"}, dict(zip(batch.schema.names, batch.columns, strict=True)), given, ["Parquet"])
    encoding = encoding_of(log)
    with open_text(log, CsvFormat(encoding=encoding), None) as text:
        sample = text.read(LOOKED_BYTES).decode("utf-8", "replace")
    lines = [line for line in re.split(r"\r?\n", sample) if line]
    if len(sample.encode()) >= LOOKED_BYTES:
        lines.pop()  # its end is not there
    form: dict[str, object] = {} if encoding == "utf-8" else {"encoding": encoding}
    said = [] if encoding == "utf-8" else [f"encoding {encoding}, by the bytes of the file: if letters look wrong, write another"]
    return _text(log, lines[:ROWS], given, form, said)


def _text(log: Path, lines: list[str], given: Mapping[str, str | None], form: dict[str, object], said: list[str]) -> Layout:
    """A table where a separator gives nearly all lines as many fields, at least two; lists of ids where no line names columns.

    form, said  of Layout, as far as they are known
    """
    splits = [_split(lines, separator) for separator in SEPARATORS]
    splits = [split for split in splits if split.rows and len(split.rows[0]) > 1 and min(map(len, split.alike)) > 1]
    tables = [split for split in splits if len(split.alike) == len(split.rows) or _is_header(split.rows[0], given)]
    tables = [split for split in tables if len(split.rows) - len(split.alike) <= len(split.rows) * MOST_BAD]
    split = max(tables or splits, key=lambda split: len(split.rows[0]), default=None)
    expected = f"as many fields as in every line, at least 2, or ids alone, with one of {', '.join(map(repr, SEPARATORS))} between them"
    lists = [] if split is None or tables else [without_end(line, split.separator).split(split.separator) for line in lines]
    if split is None or (not tables and min(map(len, lists)) < 2):
        raise InvalidData(f"{log.name}: first line", lines[0] if lines else None, expected)
    first, *rest = split.alike
    is_header = _is_header(first, given)
    if not tables:
        if is_header or any(" " in cell or not cell for row in lists for cell in row):
            raise InvalidData(f"{log.name}: first line", lines[0], expected)
        form = {"format": "lists", "separator": split.separator} | form
        return Layout(log, form, {}, given, [*said, f"a user a line, {split.separator!r} between ids"])
    if not is_header and not any(map(str.isdecimal, "".join(first))) and given["user"] is None:
        expected = "names of columns: say which with --user and --item; --user 0 if it is an event"
        raise InvalidData(f"{log.name}: first line", first, expected)
    if is_header and not rest:
        raise InvalidData(log.name, "names of columns alone", "events")
    names: list[Column] = [*first] if is_header else [*range(len(first))]
    values = {name: pa.array(column) for name, column in zip(names, zip(*(rest or [first]), strict=True), strict=True)}
    said.append(f"text with {split.separator!r} between fields; the first line {'names the columns' if is_header else 'is an event'}")
    form |= {"format": "csv", "separator": split.separator, "header": is_header}
    if split.quote != '"':
        form["quote"] = split.quote
        said.append(f"quotes around fields: {split.quote or 'none'}, since fields fit so")
    commas = next((name for name, column in values.items() if _has_decimal_commas(column)), None)
    if commas is not None:
        form["decimal"] = ","
        said.append(f"decimal commas: by the values of column {commas!r}")
    layout = Layout(log, form, values, given, said)
    is_wide = split.separator == " " and len(first) > 2
    types = [(name, _time_type(column, str(form.get("decimal", ".")))) for name, column in values.items()] if is_wide else []
    if is_wide and not is_header and given["user"] is None and not any(_looks_dated(*column) for column in types):
        expected = '--user 0 --item 1 if a line is an event; if it is a user, write format = { format = "lists", separator = " " } yourself'
        raise InvalidData(f"{log.name}: first line", first, expected)
    return layout


@dataclass(frozen=True)
class _Split:
    """Lines split into fields. alike: the rows with as many fields as the first."""

    separator: str
    quote: str
    rows: list[list[str]]

    @cached_property
    def alike(self) -> list[list[str]]:
        return [row for row in self.rows if len(row) == len(self.rows[0])]


def _split(lines: list[str], separator: str) -> _Split:
    """With the quote that gives most rows as many fields as the first; if several do, single quotes where most lines have such fields."""
    if len(separator) > 1:
        return _Split(separator, '"', [line.split(separator) for line in lines])
    single = quoted_fields(separator, "'")
    most_single = 2 * sum(single.findall(line)[-1:] == ["'"] for line in lines) > len(lines)
    quotes = ("'", '"', "") if most_single else ('"', "")
    splits = [_Split(separator, quote, _rows(lines, separator, quote)) for quote in quotes]
    return max(splits, key=lambda split: len(split.alike))


def _rows(lines: list[str], separator: str, quote: str) -> list[list[str]]:
    """The fields of each record. The last one may end inside of quotes where there are more lines, and is left out."""
    try:
        rows = list(filter(None, fields_of(lines, separator, quote)))
    except csv.Error:  # a field above the reader's limit
        return []
    return rows[:-1] if len(lines) == ROWS else rows


def _is_header(first: list[str], given: Mapping[str, str | None]) -> bool:
    return any(cell in given.values() or _word(cell) in words for cell in first for words in NAMES.values())


def _has_decimal_commas(values: pa.Array) -> bool:
    texts = [text for text in values.to_pylist() if text]
    return all(re.fullmatch(r"-?[0-9]+(,[0-9]+)?", text) for text in texts) and any("," in text for text in texts)


def _texts(layout: Layout, query: Column) -> list[str]:
    from .data.query_logs import read_log  # needs polars

    item = layout.column("item")
    layout.say_unused([query, item])
    form = {key: value for key, value in layout.form.items() if key in TextTable.model_fields}
    if form.get("separator") == separator_of(layout.log):
        del form["separator"]

    def read(policy: BadRowsPolicy) -> tuple[pl.DataFrame, Mapping[str, int]]:
        bad_rows = BadRows(policy, LogData.SECTION)
        table = TextTable.model_validate(form | {"bad_rows": policy})
        return read_log(layout.log, str(query), str(item), {}, table, bad_rows), bad_rows.counts

    frame, bad_rows = read("skip")
    if _are_many(bad_rows, len(frame)):
        frame, bad_rows = read("refuse")
    form |= layout.bad_rows(bad_rows, "data")
    layout.said.append(f"{len(frame):,} rows, {frame['query'].n_unique():,} texts, {frame['item'].n_unique():,} items")
    lines = ['format = "log"', f"train = {_toml(str(layout.log))}", f"query = {_toml(query)}", f"item = {_toml(item)}"]
    return [*lines, *(f"{key} = {_toml(value)}" for key, value in form.items())]


def _histories(layout: Layout, kind: str | None, scratch: Path) -> tuple[str, list[str]]:
    """The kind, and the lines of the configuration from `data` on."""
    form = layout.form | ({"order": "none"} if layout.given["time"] == "none" else {})
    if layout.values:
        form |= {role: layout.column(role) for role in POSITIONS}
        form |= layout.time([form[role] for role in POSITIONS])
        layout.say_unused([form[role] for role in (*POSITIONS, "timestamp") if role in form])
    checked = form | {"min_user_events": 1}
    interactions = read_interactions(layout.log, LOG_FORMAT.checked(checked | {"bad_rows": "skip"}), scratch)
    if _are_many(interactions.bad_rows, interactions.event_count):
        interactions = read_interactions(layout.log, LOG_FORMAT.checked(checked), scratch)
    form |= layout.bad_rows(interactions.bad_rows, "data.format")
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
    if interactions.order != "none" or kind in (None, "otm-sequence", "neighbours"):
        return kind or "otm-sequence", lines
    window = int(np.clip(np.quantile(length_U, 0.95), 1, MOST_IN_WINDOW))
    more = [f"windows = [{window}] # lists have no order: one window, as long as 95 of 100 lists", "targets = 20"]
    return kind, [*lines, "", "[instances]", *more]


def _are_many(bad_rows: Mapping[str, int], kept: int) -> bool:
    """Whether so many rows cannot be read that the log is probably read in a wrong way."""
    return sum(bad_rows.values()) > MOST_BAD * (sum(bad_rows.values()) + kept)


def _time_type(values: pa.Array, decimal: str) -> TimestampType | None:
    """data.format.timestamp_type of values; None where too many of them are no times."""
    if pa.types.is_temporal(values.type):
        return "datetime"
    most = int(MOST_BAD * len(values))
    kinds: tuple[TimestampType, ...] = ("integer", "float", "datetime")
    for kind in kinds:
        timestamps = Timestamps(kind, decimal)
        wrong = timestamps.unreadable(values, most + 1)
        if len(wrong) <= most:
            stamps = timestamps.read(values.take(pa.array(np.delete(np.arange(len(values)), wrong))))
            known = stamps[stamps != 0]  # 0 is how some logs say that they do not know
            if kind == "datetime" or not len(known):
                return kind
            units = (unit for unit, (least, last) in EPOCHS.items() if least <= known.min() and known.max() < last)
            return next(units, kind)
    return "datetime" if _formats(values) else None


def _formats(values: pa.Array) -> list[str]:
    """How dates and times are written in texts that are not ISO 8601; several where day and month are not told apart, none of others."""
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if not is_text_type(values.type):
        return []
    most = int(MOST_BAD * len(values))
    read = [(written, Timestamps("datetime", written=written)) for written in (day + time for day in DATES for time in TIMES)]
    is_iso = len(Timestamps("datetime").unreadable(values, most + 1)) <= most
    return [] if is_iso else [written for written, times in read if len(times.unreadable(values, most + 1)) <= most]


def _looks_dated(column: Column, kind: TimestampType | None) -> bool:
    """Whether a column has times by its values alone: numbers may be times where no line names them."""
    return kind == "datetime" or (isinstance(column, int) and kind in EPOCHS)


def _first_without_time(values: pa.Array, decimal: str) -> object:
    """The first value that is no time as the first one is; the first one where it is none."""
    kind = _time_type(values[:1], decimal)
    written = next(iter(_formats(values[:1])), None)
    wrong = [0] if kind is None else Timestamps(kind, decimal, written).unreadable(values, 1).tolist()
    return values[wrong[0]].as_py()


def _word(name: object) -> str:
    """A column's name as NAMES has it; "" for a position."""
    return re.sub(r"[^a-z0-9]", "", name.lower()).removesuffix("id") if isinstance(name, str) else ""


def _toml(value: object) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
