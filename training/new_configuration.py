"""A first configuration for a log (`espalier new LOG`): reads the log's first rows and writes a TOML file that trains on it.

Comments in the file list every decision and its reason. Columns are recognised by option, by usual name, or by their values.
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
from numpy.typing import NDArray

from espalier.errors import MISSING, InvalidConfig, InvalidData
from espalier.log_columns import EPOCHS, LAST_MICROSECOND, MOST_BAD, NAMES, check_unit, is_header, unless_in_order, word_of
from espalier.wording import either, option

from .data.interactions import Interactions, read_interactions
from .data.log_files import without_end
from .data.log_values import MICROSECONDS, BadRows, Timestamps, is_text_type
from .data.parquet_logs import files_of, is_parquet, name_of, opened
from .data.text_files import TextTableFile, encoding_of, fields_of, line_of, open_text, quoted_fields, separator_of
from .neighbours.cooccurrence import LONGEST, lists_of
from .specification.linear import LogData
from .specification.log_format import LOG_FORMAT, BadRowsPolicy, Column, CsvFormat, TextTable, TimestampType
from .specification.models import LINEAR_KINDS, SPECIFICATION

if TYPE_CHECKING:
    import polars as pl

ROWS = 1000
SAMPLE_BYTES = 1 << 20
SEPARATORS = ("::", "\t", ",", ";", "|", " ")
POSITIONS = {"user": 0, "item": 1}
DATES = (
    *(("%d.%m.%Y",), ("%d.%m.%y",), ("%d/%m/%Y", "%m/%d/%Y"), ("%d/%m/%y", "%m/%d/%y")),
    *(("%d-%m-%Y", "%m-%d-%Y"), ("%Y/%m/%d",)),
)
TIMES = ("", " %H:%M", " %H:%M:%S", " %I:%M %p", " %I:%M:%S %p")
"""Formats of dates, in each order of day and month, and of times, other than ISO 8601. With dots, the day comes first everywhere."""
MOST_IN_WINDOW = 200
MANY_REPEATS = 0.2
"""If at least this share of the events is of items that the user had before, as in logs of songs, to find these is part of the task."""


@dataclass(frozen=True)
class Layout:
    """The format and columns of a log, from its first rows.

    form            keys of data.format
    values          column → its values; columns are positions if no line names them; lists have no columns
    column_options  role → value of its command-line option, or None; the time may also be `file` or `none`
    notes           the decisions, in words
    """

    log: Path
    form: dict[str, object]
    values: Mapping[Column, pa.Array]
    column_options: Mapping[str, str | None]
    notes: list[str]

    def column(self, role: str, is_needed: bool = True) -> Column | None:
        """The column of a role, or None. Raises InvalidData if a needed column is missing, or if several columns match."""
        names, named = list(self.values), self.column_options[role]
        matches, reason = [name for name in names if str(name) == named], f"as --{role} says"
        if named is None:
            by_word = ([name for name in names if word_of(name) == word] for word in NAMES[role])
            matches, reason = next(filter(None, by_word), []), "by its name"
        if named is None and not matches and role in POSITIONS and POSITIONS[role] in names:
            matches, reason = [POSITIONS[role]], "by its position, since no line names the columns"
        if len(matches) > 1 or (not matches and (is_needed or named is not None)):
            expected = f"one of {names}: say which with {option(role, 'NAME')}"
            raise InvalidData(f"{self.log.name}: column {role}", named or matches or MISSING, expected)
        for name in matches:
            values = [] if pa.types.is_temporal(self.values[name].type) else self.values[name].to_pylist()
            blanks = any(isinstance(value, str) and value != value.strip() for value in values)
            self.notes.append(f"{role}: column {name!r}, {reason}{'; blanks around its values are part of them' if blanks else ''}")
        return matches[0] if matches else None

    def time(self, role_columns: list[object]) -> dict[str, object]:
        """The keys `timestamp`, `timestamp_type` and, if needed, `time_format`; empty if no column has times. Raises as `column`."""
        if self.column_options["time"] in ("file", "none"):
            return {}
        decimal = str(self.form.get("decimal", "."))
        types = {name: _time_type(values, decimal) for name, values in self.values.items()}
        column = self.column("time", is_needed=False)
        if column is None:
            dated = [name for name in types if name not in role_columns and _looks_dated(name, types[name])]
            column = dated[0] if dated else None
            by_values = f"time: column {column!r}, by its values"
            in_order = "no column looks like times: events count as in order of the file. If they have no order, say --time none"
            self.notes.append(in_order if column is None else by_values)
        if column is None:
            return {}
        timestamp_type = types[column]
        if timestamp_type is None:
            form = "a number, or a time such as 2026-03-08 07:24, 08.03.2026 or 03/28/2026, without blanks around it"
            value, expected = _two_kinds(self.values[column], decimal) or (
                _first_without_time(self.values[column], decimal),
                f"{form}: name another column with {option('time', 'NAME')}",
            )
            raise InvalidData(f"{self.log.name}: column {column!r}", value, f"{expected}, {unless_in_order()}")
        if timestamp_type == "datetime" and (formats := _formats(self.values[column])):
            time_format = self._one_format(column, formats)
            self.notes.append(f"times: written {time_format}, by the values")
            return {"timestamp": column, "timestamp_type": timestamp_type, "time_format": time_format}
        type_names = {"datetime": "ISO 8601", "integer": "whole numbers of no known unit", "float": "numbers of no known unit"}
        self.notes.append(f"times: {type_names.get(timestamp_type, f'{timestamp_type} since 1970')}, by the values")
        return {"timestamp": column, "timestamp_type": timestamp_type}

    def _one_format(self, column: Column, formats: Mapping[str, NDArray[np.int64]]) -> str:
        """The only one of `_formats`. Raises InvalidData if there are two."""
        if len(formats) == 1:
            return next(iter(formats))
        values, rows = self.values[column], [int(row) for rows in formats.values() for row in rows[:1]]
        value = [values[row].as_py() for row in rows] if rows else values[0].as_py()
        told = "in one order" if rows else "that can be told apart"
        others = either("write data.format.time_format yourself", "make them dates, as `pandas.to_datetime` does")
        expected = f"days and months {told} ({' or '.join(formats)}): {others}, {unless_in_order()}"
        raise InvalidData(f"{self.log.name}: column {column!r}", value, expected)

    def say_unused(self, used_columns: Sequence[object]) -> None:
        """Note the columns that have no role."""
        unused = [name for name in self.values if name not in used_columns]
        if unused:
            self.notes.append(f"not used: column{'s' * (len(unused) > 1)} {', '.join(map(repr, unused))}")

    def bad_rows(self, counts: Mapping[str, int], section: str) -> dict[str, object]:
        """The key `bad_rows`, if some rows cannot be read and are left out."""
        if not counts:
            return {}
        reasons = ", ".join(f"{reason}: {count:,}" for reason, count in counts.items())
        self.notes.append(f"rows that cannot be read are left out, {reasons}; without {section}.bad_rows the first one ends the training")
        return {"bad_rows": "skip"}


def write_configuration(log: Path, out: Path | None, force: bool, kind: str | None, column_options: Mapping[str, str | None]) -> Path:
    """Write the configuration for a log and return its path. The whole log is read, so that its errors come up now.

    out             the file; by default in the current folder, named after the log
    force           overwrite an existing file
    kind            kind of model; None: chosen by the log
    column_options  as in Layout
    Raises InvalidConfig, and InvalidData, which names the columns and the option, if the log leaves the choice open.
    """
    name = re.sub(r"[^a-z0-9._-]+", "-", log.name.lower().partition(".")[0]).strip("._-")[:64] or "model"
    out = Path(f"{name}.toml") if out is None else out
    _check_out(out, log, force)
    with tempfile.TemporaryDirectory(dir=out.absolute().parent, prefix=".new-") as scratch:
        layout = _look(log, column_options, Path(scratch))
        query = layout.column("query", is_needed=kind in LINEAR_KINDS) if kind in (None, *LINEAR_KINDS) else None
        if query is None:
            kind, body = _histories(layout, kind, Path(scratch))
        elif kind is None and column_options["query"] is None and layout.column("user", is_needed=False) is not None:
            raise InvalidConfig(
                option("kind"), MISSING, f"xr-linear for texts, or otm-sequence for lists of users, since {log.name} has both"
            )
        else:
            kind, body = kind or "xr-linear", _texts(layout, query)
    lines = [f"# Written by `espalier new`; `espalier options {kind}` lists all keys. It is trained by"]
    lines += [f"#     espalier fit --config {out} --out models/{name}/1", "# What was found:"]
    lines += [*(f"# - {words}" for words in layout.notes), f'kind = "{kind}"', f'name = "{name}"', "", "[data]", *body, ""]
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


def _look(log: Path, column_options: Mapping[str, str | None], scratch: Path) -> Layout:
    if not str(log).isprintable():  # surrogates of a name that is not UTF-8, too
        raise InvalidData("log", str(log).encode("utf-8", "backslashreplace").decode(), "a name in UTF-8 without control characters")
    if not log.exists():
        raise InvalidData("log", str(log), "a file that exists, or a folder of Parquet files")
    if is_parquet(log):
        file = files_of(log)[0]
        with opened(file, name_of(file, log), scratch) as parquet:
            batch = next(parquet.iter_batches(ROWS), pa.record_batch([]))
        return Layout(log, {"format": "parquet"}, dict(zip(batch.schema.names, batch.columns, strict=True)), column_options, ["Parquet"])
    encoding = encoding_of(log)
    with open_text(log, CsvFormat(encoding=encoding), None) as text:
        sample = text.read(SAMPLE_BYTES).decode("utf-8", "replace")
    lines = [line for line in re.split(r"\r?\n", sample) if line]
    if len(sample.encode()) >= SAMPLE_BYTES:
        lines.pop()  # the sample ends inside this line
    form: dict[str, object] = {} if encoding == "utf-8" else {"encoding": encoding}
    notes = [] if encoding == "utf-8" else [f"encoding {encoding}, by the bytes of the file: if letters look wrong, write another"]
    return _text(log, lines[:ROWS], column_options, form, notes)


def _text(log: Path, lines: list[str], column_options: Mapping[str, str | None], form: dict[str, object], notes: list[str]) -> Layout:
    """A table, if some separator splits nearly all lines into the same number of fields, at least two; otherwise lists of ids.

    form, notes  of Layout, as far as they are known
    """
    if lines and re.match(r"(\[\s*)?\{|\[\s*$", lines[0]):
        raise InvalidData(f"{log.name}: first line", lines[0], "CSV, TSV, lists of ids or Parquet, and this looks like JSON")
    splits = [_split(lines, separator) for separator in SEPARATORS]
    splits = [split for split in splits if split.rows and len(split.rows[0]) > 1 and min(map(len, split.full_rows)) > 1]
    tables = [split for split in splits if len(split.full_rows) == len(split.rows) or _is_header(split.rows[0], column_options)]
    tables = [split for split in tables if len(split.rows) - len(split.full_rows) <= len(split.rows) * MOST_BAD]
    split = max(tables or splits, key=lambda split: len(split.rows[0]), default=None)
    expected = f"as many fields as in every line, at least 2, or ids alone, with one of {', '.join(map(repr, SEPARATORS))} between them"
    if split is None:
        raise InvalidData(f"{log.name}: first line", lines[0] if lines else MISSING, expected)
    lists = [] if tables else [without_end(line, split.separator).split(split.separator) for line in lines]
    if not tables and min(map(len, lists)) < 2:
        raise _other_fields(log, form, split, expected)
    first_row, *later_rows = split.full_rows
    is_header = _is_header(first_row, column_options)
    if not tables:
        if is_header or any(" " in cell or not cell for row in lists for cell in row):
            raise _other_fields(log, form, split, expected)
        form = {"format": "lists", "separator": split.separator} | form
        return Layout(log, form, {}, column_options, [*notes, f"a user a line, {split.separator!r} between ids"])
    if not is_header and not any(map(str.isdecimal, "".join(first_row))) and column_options["user"] is None:
        which = f"{option('user', 'NAME')} and {option('item', 'NAME')}"
        expected = f"names of columns: say which with {which}; {option('user', '0')} if it is an event"
        raise InvalidData(f"{log.name}: first line", first_row, expected)
    if is_header and not later_rows:
        raise InvalidData(log.name, "names of columns alone", "events")
    names: list[Column] = [*first_row] if is_header else [*range(len(first_row))]
    values = {name: pa.array(column) for name, column in zip(names, zip(*(later_rows or [first_row]), strict=True), strict=True)}
    notes.append(f"text with {split.separator!r} between fields; the first line {'names the columns' if is_header else 'is an event'}")
    form |= {"format": "csv", "separator": split.separator, "header": is_header}
    if split.quote != '"':
        form["quote"] = split.quote
        notes.append(f"quotes around fields: {split.quote or 'none'}, since fields fit so")
    commas = next((name for name, column in values.items() if _has_decimal_commas(column)), None)
    if commas is not None:
        form["decimal"] = ","
        notes.append(f"decimal commas: by the values of column {commas!r}")
    layout = Layout(log, form, values, column_options, notes)
    is_wide = split.separator == " " and len(first_row) > 2
    types = [(name, _time_type(column, str(form.get("decimal", ".")))) for name, column in values.items()] if is_wide else []
    if is_wide and not is_header and column_options["user"] is None and not any(_looks_dated(*column) for column in types):
        user_lines = either('; if it is a user, write data.format = { format = "lists", separator = " " } yourself', "")
        expected = f"{option('user', '0')} and {option('item', '1')} if a line is an event{user_lines}"
        raise InvalidData(f"{log.name}: first line", first_row, expected)
    return layout


def _other_fields(log: Path, form: Mapping[str, object], split: _Split, expected: str) -> InvalidData:
    """The error of the first row with more or fewer fields than the first line, with its line."""
    fields = len(split.rows[0])
    record = next(position for position, row in enumerate(split.rows) if len(row) != fields)
    table = TextTableFile(log, CsvFormat.model_validate(dict(form) | {"quote": split.quote}), split.separator)
    text = split.separator.join(split.rows[record])
    return InvalidData(f"{log.name}: line {line_of(table, record)}", text, f"{expected}; the first line has {fields}")


@dataclass(frozen=True)
class _Split:
    """Lines split into fields. full_rows: the rows with as many fields as the first row."""

    separator: str
    quote: str
    rows: list[list[str]]

    @cached_property
    def full_rows(self) -> list[list[str]]:
        return [row for row in self.rows if len(row) == len(self.rows[0])]


def _split(lines: list[str], separator: str) -> _Split:
    """Split with the quote that gives the most full rows. At ties, single quotes win if most lines have single-quoted fields."""
    if len(separator) > 1:
        return _Split(separator, '"', [line.split(separator) for line in lines])
    single = quoted_fields(separator, "'")
    most_single = 2 * sum(single.findall(line)[-1:] == ["'"] for line in lines) > len(lines)
    quotes = ("'", '"', "") if most_single else ('"', "")
    splits = [_Split(separator, quote, _rows(lines, separator, quote)) for quote in quotes]
    return max(splits, key=lambda split: len(split.full_rows))


def _rows(lines: list[str], separator: str, quote: str) -> list[list[str]]:
    """The fields of each record. The last record is left out if the file has more lines: it may end inside quotes."""
    try:
        rows = list(filter(None, fields_of(lines, separator, quote)))
    except csv.Error:  # a field above the reader's limit
        return []
    return rows[:-1] if len(lines) == ROWS else rows


def _is_header(first_row: list[str], column_options: Mapping[str, str | None]) -> bool:
    """Whether the first line names the columns, by usual names or those in options. Whole numbers in options are positions."""
    orders = ("time", "file"), ("time", "none")
    names = {name for role, name in column_options.items() if name and not name.isdecimal() and (role, name) not in orders}
    return is_header(first_row, names)


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
    layout.notes.append(f"{len(frame):,} rows, {frame['query'].n_unique():,} texts, {frame['item'].n_unique():,} items")
    lines = ['format = "log"', f"train = {_toml(str(layout.log))}", f"query = {_toml(query)}", f"item = {_toml(item)}"]
    return [*lines, *(f"{key} = {_toml(value)}" for key, value in form.items())]


def _histories(layout: Layout, kind: str | None, scratch: Path) -> tuple[str, list[str]]:
    """The kind, and the lines of the configuration from `data` on."""
    form = layout.form | ({"order": "none"} if layout.column_options["time"] == "none" else {})
    if layout.values:
        form |= {role: layout.column(role) for role in POSITIONS}
        form |= layout.time([form[role] for role in POSITIONS])
        layout.say_unused([form[role] for role in (*POSITIONS, "timestamp") if role in form])
    interactions = _checked_events(layout, form | {"min_user_events": 1}, scratch)
    form |= layout.bad_rows(interactions.bad_rows, "data.format")
    length_U = np.diff(interactions.offset_U1)
    if 2 * length_U[length_U > 1].sum() < length_U.sum():
        lone_users = f"{np.count_nonzero(length_U == 1):,} of {interactions.user_count:,} with one event only"
        expected = "users with 2 events or more, who have half of all events: a model learns what follows in a user's list"
        other_column = f"if another column names the users, say so with {option('user', 'NAME')}"
        raise InvalidData(f"{layout.log.name}: users", lone_users, f"{expected}; {other_column}")
    layout.notes.append(f"{interactions.user_count:,} users, {interactions.item_count:,} items, {interactions.event_count:,} events")
    format_text = ", ".join(f"{key} = {_toml(value)}" for key, value in form.items())
    lines = [f"log = {_toml(str(layout.log))}", f"format = {{ {format_text} }}"]
    if interactions.order == "none" and kind not in (None, "otm-sequence", "neighbours"):
        window = int(np.clip(np.quantile(length_U, 0.95), 1, MOST_IN_WINDOW))
        more = [f"windows = [{window}] # lists have no order: one window, as long as 95 of 100 lists", "targets = 20"]
        lines += ["", "[instances]", *more]
    return kind or "otm-sequence", [*lines, *_repeats(layout, interactions)]


def _repeats(layout: Layout, interactions: Interactions) -> list[str]:
    """The lines that let items of the history be answers, if many events are of such items."""
    events = np.minimum(np.diff(interactions.offset_U1), LONGEST).sum()
    distinct = lists_of(interactions, np.arange(interactions.user_count), distinct=True).length_U.sum()
    repeats = events - distinct
    if repeats < MANY_REPEATS * events:
        return []
    layout.notes.append(f"{repeats / events:.0%} of the events are of an item that the user had before: such items count as answers")
    return ["", "[search]", "exclude_seen = false # true: choose and measure without items of the history"]


def _checked_events(layout: Layout, form: dict[str, object], scratch: Path) -> Interactions:
    """The log's events. Raises InvalidData for times in several units, and the first error if many rows cannot be read."""

    def read(**changes: object) -> Interactions:
        return read_interactions(layout.log, LOG_FORMAT.checked(form | changes), scratch)

    unit = next((unit for unit in EPOCHS if unit == form.get("timestamp_type")), None)
    log = read(bad_rows="skip") if unit is None else read(bad_rows="skip", timestamp_type="float")  # all numbers: also of another unit
    if log.time_of_event_E is not None and form["timestamp_type"] != "datetime":
        check_unit(f"{layout.log.name}: column {form['timestamp']!r}", log.time_of_event_E)
    if unit is not None and log.time_of_event_E is not None:
        last = LAST_MICROSECOND / MICROSECONDS[unit]
        if max(-log.time_of_event_E.min(), log.time_of_event_E.max()) >= last:
            log = read(bad_rows="skip")
    return read() if _are_many(log.bad_rows, log.event_count) else log


def _are_many(bad_rows: Mapping[str, int], read_rows: int) -> bool:
    """Whether more rows are unreadable than damage explains."""
    return sum(bad_rows.values()) > MOST_BAD * (sum(bad_rows.values()) + read_rows)


def _time_type(values: pa.Array, decimal: str) -> TimestampType | None:
    """The data.format.timestamp_type of values; None if too many of them are not times."""
    if any(is_other(values.type) for is_other in (pa.types.is_boolean, pa.types.is_duration, pa.types.is_time)):
        return None
    if pa.types.is_temporal(values.type):
        return "datetime"
    most_unreadable = int(MOST_BAD * len(values))
    kinds: tuple[TimestampType, ...] = ("integer", "float", "datetime")
    for kind in kinds:
        timestamps = Timestamps(kind, decimal)
        unreadable = timestamps.unreadable(values, most_unreadable + 1)
        if len(unreadable) <= most_unreadable:
            stamps = timestamps.read(values.take(pa.array(np.delete(np.arange(len(values)), unreadable))))
            known_stamps = stamps[stamps != 0]  # some logs write 0 for an unknown time
            if kind == "datetime" or not len(known_stamps):
                return kind
            is_inside = {unit: (least <= known_stamps) & (known_stamps < last) for unit, (least, last) in EPOCHS.items()}
            return next((unit for unit in EPOCHS if is_inside[unit].mean() >= 1 - MOST_BAD), kind)
    return "datetime" if _formats(values) else None


def _formats(values: pa.Array) -> dict[str, NDArray[np.int64]]:
    """The formats that fit texts of dates and times other than ISO 8601, and the rows that no other format fits.

    Two formats fit if day and month could be swapped: in all rows, or in some rows while others contradict each other.
    """
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if not is_text_type(values.type):
        return {}
    most = int(MOST_BAD * len(values))
    if len(Timestamps("datetime").unreadable(values, most + 1)) <= most:  # ISO 8601
        return {}
    for orders in ([day + time for day in days] for days in DATES for time in TIMES):
        fits = np.ones((len(orders), len(values)), np.bool_)
        for order, form in enumerate(orders):
            fits[order, Timestamps("datetime", time_format=form).unreadable(values, None)] = False
        if np.count_nonzero(~fits.any(axis=0)) <= most:
            only_rows = {form: np.flatnonzero(fits[order] & (fits.sum(axis=0) == 1)) for order, form in enumerate(orders)}
            return {form: rows for form, rows in only_rows.items() if len(rows)} or only_rows
    return {}


def _looks_dated(column: Column, kind: TimestampType | None) -> bool:
    """Whether a column's values alone show that it has times. Numbers count only if no line names the columns."""
    return kind == "datetime" or (isinstance(column, int) and kind in EPOCHS)


def _two_kinds(values: pa.Array, decimal: str) -> tuple[object, str] | None:
    """The first time of each kind, and what is expected, if a column has times of two kinds; else None."""
    pairs: dict[TimestampType, str] = {"float": "as numbers or all as dates", "datetime": "with a zone or all without one"}
    for kind, words in pairs.items():
        others = Timestamps(kind, decimal).unreadable(values, None)
        if 0 < len(others) < len(values) and _time_type(values.take(pa.array(others)), decimal) == "datetime":
            first = next(row for row in range(len(values)) if row not in others)
            return [values[first].as_py(), values[int(others[0])].as_py()], f"times all {words}: convert the others"
    return None


def _first_without_time(values: pa.Array, decimal: str) -> object:
    """The first value that is not a time of the same format as the first value; the first value itself if it is no time."""
    kind = _time_type(values[:1], decimal)
    time_format = next(iter(_formats(values[:1])), None)
    wrong_rows = [0] if kind is None else Timestamps(kind, decimal, time_format).unreadable(values, 1).tolist()
    return values[wrong_rows[0]].as_py()


def _toml(value: object) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
