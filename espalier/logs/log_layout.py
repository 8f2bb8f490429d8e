"""The layout of a log, from its first rows: its format, its columns, and which of them have which role.

Columns are recognised by option, by usual name, or by their values. Knows files and rows. Does not know configurations.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa

from espalier.arrays import Int64
from espalier.errors import MISSING, InvalidData
from espalier.logs.log_columns import MOST_BAD, NAMES, Column, is_header, position_of, unless_in_order, word_of
from espalier.logs.log_times import first_without_time, formats, looks_dated, time_type, two_kinds
from espalier.logs.log_values import BadRows, RowSource, present
from espalier.logs.parquet_logs import first_rows, is_parquet, parquet_batches
from espalier.logs.text_files import TextTableFile, encoding_of, fields_of, line_of, open_text, quoted_fields, text_batches, without_end
from espalier.wording import configured, option

ROWS = 1000
PARQUET_ROWS = 1 << 16
"""Rows of Parquet read at a time."""
SAMPLE_BYTES = 1 << 20
SEPARATORS = ("::", "\t", ",", ";", "|", " ")
POSITIONS = {"user": 0, "item": 1}
ZIPPED = b"\x1f\x8b"
COMPRESSED = {ZIPPED: "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"\xfd7zXZ\0": "xz", b"PK\3\4": "zip"}
"""First bytes of a file → how it is compressed."""


@dataclass(frozen=True)
class Layout:
    """The format and columns of a log, from its first rows.

    form            keys of data.format
    values          column → its values; columns are positions if no line names them; lists have no columns
    column_options  role → value of its command-line option, or None; the time may also be `file` or `none`
    notes           the decisions, in words
    """

    log: Path
    form: dict[str, Any]
    values: Mapping[Column, pa.Array]
    column_options: Mapping[str, str | None]
    notes: list[str]

    def column(self, role: str, is_needed: bool = True) -> Column | None:
        """The column of a role, or None. Raises InvalidData if a needed column is missing, or if several columns match."""
        names, named = list(self.values), self.column_options[role]
        position = position_of([*map(str, names)], named) if named is not None else None
        matches, reason = [] if position is None else [names[position]], f"as --{role} says"
        if named is None:
            texts_or_ids = [name for name in names if role != "query" or not str(name).strip().casefold().endswith("id")]
            by_word = ([name for name in texts_or_ids if word_of(name) == word] for word in NAMES[role])
            matches, reason = next(filter(None, by_word), []), "by its name"
        if named is None and not matches and role in POSITIONS and POSITIONS[role] in names:
            matches, reason = [POSITIONS[role]], "by its position, since no line names the columns"
        if len(matches) > 1 or (not matches and (is_needed or named is not None)):
            expected = f"one of {names}: say which with {option(role, 'NAME')}" if names else "an event a row: this is a user a line"
            raise InvalidData(f"{self.log.name}: column {role}", named or matches or MISSING, expected)
        for name in matches:
            values = [] if pa.types.is_temporal(self.values[name].type) else self.values[name].to_pylist()
            blanks = any(isinstance(value, str) and value != value.strip() for value in values)
            self.notes.append(f"{role}: column {name!r}, {reason}{'; blanks around its values are part of them' if blanks else ''}")
        return matches[0] if matches else None

    def time(self, role_columns: list[object]) -> dict[str, Any]:
        """The keys `timestamp`, `timestamp_type` and, if needed, `time_format`; empty if no column has times. Raises as `column`."""
        if self.column_options["time"] in ("file", "none"):
            return {}
        decimal = str(self.form.get("decimal", "."))
        column = self.column("time", is_needed=False)
        if column is None:
            others = (name for name in self.values if name not in role_columns)
            column = next((name for name in others if looks_dated(name, time_type(present(self.values[name]), decimal))), None)
            self.notes.append("no column looks like times" if column is None else f"time: column {column!r}, by its values")
        if column is None:
            return {}
        values = present(self.values[column])
        timestamp_type = time_type(values, decimal)
        if len(self.values[column]) and not len(values):
            found, expected = f"nothing in the first {len(self.values[column]):,} rows", f"times, {unless_in_order()}"
            raise InvalidData(f"{self.log.name}: column {column!r}", found, expected)
        if timestamp_type is None:
            form = "a number, or a time such as 2026-03-08 07:24, 08.03.2026 or 03/28/2026, without blanks around it"
            value, expected = two_kinds(values, decimal) or (
                first_without_time(values, decimal),
                f"{form}: name another column with {option('time', 'NAME')}",
            )
            raise InvalidData(f"{self.log.name}: column {column!r}", value, f"{expected}, {unless_in_order()}")
        if timestamp_type == "datetime" and (fitting := formats(values)):
            time_format = self._one_format(column, fitting)
            self.notes.append(f"times: written {time_format}, by the values")
            return {"timestamp": column, "timestamp_type": timestamp_type, "time_format": time_format}
        type_names = {"datetime": "ISO 8601", "integer": "whole numbers of no known unit", "float": "numbers of no known unit"}
        self.notes.append(f"times: {type_names.get(timestamp_type, f'{timestamp_type} since 1970')}, by the values")
        return {"timestamp": column, "timestamp_type": timestamp_type}

    def _one_format(self, column: Column, fitting: Mapping[str, Int64]) -> str:
        """The only one of the formats that fit. Raises InvalidData if there are two."""
        if len(fitting) == 1:
            return next(iter(fitting))
        values, rows = present(self.values[column]), [int(row) for rows in fitting.values() for row in rows[:1]]
        value = [values[row].as_py() for row in rows] if rows else values[0].as_py()
        told = "in one order" if rows else "that can be told apart"
        others = configured("write data.format.time_format yourself", "make them dates, as `pandas.to_datetime` does")
        expected = f"days and months {told} ({' or '.join(fitting)}): {others}, {unless_in_order()}"
        raise InvalidData(f"{self.log.name}: column {column!r}", value, expected)

    @property
    def text(self) -> TextTableFile:
        """The file, if it is text with columns."""
        form = self.form
        return TextTableFile(self.log, form["separator"], form["header"], form.get("encoding", "utf-8"), form.get("quote", '"'))

    def batches(self, columns: Mapping[str, Column], bad_rows: BadRows, scratch: Path) -> Iterator[tuple[RowSource, pa.RecordBatch]]:
        """The columns of each role, block by block, each block with its source. Raises InvalidData."""
        if self.form["format"] == "parquet":
            return parquet_batches(self.log, columns, scratch, PARQUET_ROWS)
        return text_batches(self.text, columns, bad_rows)

    def say_unused(self, used_columns: Sequence[object]) -> None:
        """Note the columns that have no role."""
        unused = [name for name in self.values if name not in used_columns]
        if unused:
            self.notes.append(f"not used: column{'s' * (len(unused) > 1)} {', '.join(map(repr, unused))}")

    def bad_rows(self, counts: Mapping[str, int], section: str) -> dict[str, Any]:
        """The key `bad_rows`, if some rows cannot be read and are left out."""
        if not counts:
            return {}
        reasons = ", ".join(f"{reason}: {count:,}" for reason, count in counts.items())
        self.notes.append(f"rows that cannot be read are left out, {reasons}; without {section}.bad_rows the first one ends the training")
        return {"bad_rows": "skip"}


def look(log: Path, column_options: Mapping[str, str | None], scratch: Path, quote: str | None = None, has_header: bool = False) -> Layout:
    """The layout of a file, or of a folder of Parquet. Raises InvalidData, which names the log, the line and what is wrong.

    column_options  as in Layout
    scratch         a folder for the unzipped copy of a gzipped Parquet file
    quote           around fields of text, empty for none; None: by the first rows
    has_header      the first line of text names columns, whatever their names are
    """
    if not str(log).isprintable():  # surrogates of a name that is not UTF-8, too
        raise InvalidData("log", str(log).encode("utf-8", "backslashreplace").decode(), "a name in UTF-8 without control characters")
    if not log.exists():
        raise InvalidData("log", str(log), "a file that exists, or a folder of Parquet files")
    if is_parquet(log):
        batch = first_rows(log, scratch, ROWS)
        return Layout(log, {"format": "parquet"}, dict(zip(batch.schema.names, batch.columns, strict=True)), column_options, ["Parquet"])
    _check_compression(log)
    encoding = encoding_of(log)
    with open_text(TextTableFile(log, "", encoding=encoding), None) as text:
        sample = text.read(SAMPLE_BYTES).decode("utf-8", "replace")
    lines = [line for line in re.split(r"\r?\n", sample) if line]
    if len(sample.encode()) >= SAMPLE_BYTES:
        lines.pop()  # the sample ends inside this line
    form: dict[str, Any] = {} if encoding == "utf-8" else {"encoding": encoding}
    notes = [] if encoding == "utf-8" else [f"encoding {encoding}, by the bytes of the file: if letters look wrong, write another"]
    return _text(log, lines[:ROWS], quote, has_header, column_options, form, notes)


def _check_compression(log: Path) -> None:
    """Raise InvalidData for a compressed file that is not named as one that is read."""
    with log.open("rb") as file:
        begin = file.read(max(map(len, COMPRESSED)))
    for magic, name in COMPRESSED.items():
        if begin.startswith(magic) and not (magic == ZIPPED and log.suffix == ".gz"):
            expected = f"a name that ends in .gz, {log.name}.gz" if magic == ZIPPED else "text, Parquet or gzip: decompress it first"
            raise InvalidData(log.name, f"a file compressed by {name}", expected)


def _is_array(line: str) -> bool:
    """Whether a line is a JSON array, or one of an array of such."""
    text = line.strip().removesuffix(",")
    for array in (text, text.removeprefix("[")):
        with suppress(ValueError, RecursionError):
            if isinstance(json.loads(array), list):
                return True
    return False


def _text(
    log: Path,
    lines: list[str],
    quote: str | None,
    has_header: bool,
    column_options: Mapping[str, str | None],
    form: dict[str, Any],
    notes: list[str],
) -> Layout:
    """A table, if some separator splits nearly all lines into the same number of fields, at least two; otherwise lists of ids.

    form, notes  of Layout, as far as they are known
    """
    if lines and (re.match(r"(\[\s*)?\{|\[\s*$", lines[0]) or _is_array(lines[0])):
        raise InvalidData(f"{log.name}: first line", lines[0], "CSV, TSV, lists of ids or Parquet, and this looks like JSON")
    names_in_options = _names_in(column_options)

    def names_columns(first_row: list[str]) -> bool:
        return has_header or is_header(first_row, names_in_options)

    split, is_table = _best_split([_split(lines, separator, quote) for separator in SEPARATORS], names_columns, names_in_options)
    expected = f"as many fields as in every line, at least 2, or ids alone, with one of {', '.join(map(repr, SEPARATORS))} between them"
    if split is None:
        raise InvalidData(f"{log.name}: first line", lines[0] if lines else MISSING, expected)
    lists = [] if is_table else [without_end(line, split.separator).split(split.separator) for line in lines]
    if lists and 2 * sum(len(row) < 2 for row in lists) >= len(lists):  # a few users without an item are left out
        raise _other_fields(log, form, split, expected)
    first_row, *later_rows = split.full_rows
    has_names = names_columns(first_row)
    if not is_table:
        if has_names or any(" " in cell or not cell for row in lists for cell in row):
            raise _other_fields(log, form, split, expected)
        form = {"format": "lists", "separator": split.separator} | form
        return Layout(log, form, {}, column_options, [*notes, f"a user a line, {split.separator!r} between ids"])
    if not has_names and not any(map(str.isdecimal, "".join(first_row))) and column_options.get("user") is None:
        which = f"{option('user', 'NAME')} and {option('item', 'NAME')}"
        expected = f"names of columns: say which with {which}; {option('user', '0')} if it is an event"
        raise InvalidData(f"{log.name}: first line", first_row, expected)
    names: list[Column] = [*first_row] if has_names else [*range(len(first_row))]
    rows = later_rows if has_names else split.full_rows
    values = {name: pa.array([row[position] for row in rows], pa.string()) for position, name in enumerate(names)}
    notes.append(f"text with {split.separator!r} between fields; the first line {'names the columns' if has_names else 'is an event'}")
    form |= {"format": "csv", "separator": split.separator, "header": has_names}
    if split.quote != '"':
        form["quote"] = split.quote
        notes.append(f"quotes around fields: {split.quote or 'none'}, since fields fit so")
    commas = next((name for name, column in values.items() if _has_decimal_commas(column)), None)
    if commas is not None:
        form["decimal"] = ","
        notes.append(f"decimal commas: by the values of column {commas!r}")
    layout = Layout(log, form, values, column_options, notes)
    is_wide = split.separator == " " and len(first_row) > 2
    types = [(name, time_type(column, str(form.get("decimal", ".")))) for name, column in values.items()] if is_wide else []
    if is_wide and not has_names and column_options.get("user") is None and not any(looks_dated(*column) for column in types):
        user_lines = configured('; if it is a user, write data.format = { format = "lists", separator = " " } yourself')
        expected = f"{option('user', '0')} and {option('item', '1')} if a line is an event{user_lines}"
        raise InvalidData(f"{log.name}: first line", first_row, expected)
    return layout


def _other_fields(log: Path, form: Mapping[str, Any], split: _Split, expected: str) -> InvalidData:
    """The error of the first row with more or fewer fields than the first line, with its line."""
    fields = len(split.rows[0])
    record = next(position for position, row in enumerate(split.rows) if len(row) != fields)
    table = TextTableFile(log, split.separator, encoding=form.get("encoding", "utf-8"), quote_mark=split.quote)
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


def _best_split(
    splits: list[_Split], names_columns: Callable[[list[str]], bool], names_in_options: Collection[str]
) -> tuple[_Split | None, bool]:
    """The split that fits best, and whether it is a table: nearly all rows have as many fields as the first, at least two. None if no split
    has two fields. Most names of the options in the first row win, then most fields.
    """
    splits = [split for split in splits if split.rows and len(split.rows[0]) > 1 and min(map(len, split.full_rows)) > 1]
    tables = [split for split in splits if len(split.full_rows) == len(split.rows) or names_columns(split.rows[0])]
    tables = [split for split in tables if len(split.rows) - len(split.full_rows) <= len(split.rows) * MOST_BAD]

    def fit(split: _Split) -> tuple[int, int]:
        return sum(position_of(split.rows[0], name) is not None for name in names_in_options), len(split.rows[0])

    return max(tables or splits, key=fit, default=None), bool(tables)


def _split(lines: list[str], separator: str, quote: str | None) -> _Split:
    """Split with the quote; if it is None, with that which gives the largest share of full rows. At ties, single quotes win if most lines
    have such fields.
    """
    if len(separator) > 1:
        return _Split(separator, '"', [line.split(separator) for line in lines])
    single = quoted_fields(separator, "'")
    most_single = 2 * sum(single.findall(line)[-1:] == ["'"] for line in lines) > len(lines)
    quotes = (quote,) if quote is not None else ("'", '"', "") if most_single else ('"', "")
    splits = [_Split(separator, quote, _rows(lines, separator, quote)) for quote in quotes]
    return max(splits, key=lambda split: (len(split.full_rows) / max(1, len(split.rows)), len(split.full_rows)))


def _rows(lines: list[str], separator: str, quote: str) -> list[list[str]]:
    """The fields of each record, as far as the reader's limit of a field lets it read.

    The last record is left out if the file has more lines: it may end inside quotes.
    """
    rows: list[list[str]] = []
    try:
        rows.extend(filter(None, fields_of(lines, separator, quote)))
    except csv.Error:  # a field above the limit
        return rows if len(rows) > 1 else []
    return rows[:-1] if len(lines) == ROWS else rows


def _names_in(column_options: Mapping[str, str | None]) -> set[str]:
    """The names of columns in options, where whole numbers are positions."""
    orders = ("time", "file"), ("time", "none")
    return {name for role, name in column_options.items() if name and not name.isdecimal() and (role, name) not in orders}


def _has_decimal_commas(values: pa.Array) -> bool:
    texts = [text for text in values.to_pylist() if text]
    return all(re.fullmatch(r"-?[0-9]+(,[0-9]+)?", text) for text in texts) and any("," in text for text in texts)
