"""Text files as tables of strings: their encoding, header, separator and quotes, and the line of each row.

Knows bytes, lines and fields. Does not know what columns mean. A file is read in blocks, and no line may be longer than MAX_LINE bytes.

Legend: R rows of a block. A record is a non-empty line with its fields, or several lines if a field in quotes has line ends.
"""

from __future__ import annotations

import codecs
import csv
import io
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextvars import copy_context
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, AnyStr

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv

from espalier.arrays import Int64
from espalier.errors import InvalidData
from espalier.logs.log_columns import Column, position_of
from espalier.logs.log_values import BadRows, RowSource, as_text, unreadable_rows
from espalier.wording import configured

UNIT_SEPARATOR = "\x1f"
"""Replaces a separator of several bytes before parsing. No text log has it in a field."""
MAX_LINE = 1 << 24
"""Bytes of the longest line, and of a block."""
READ_BYTES = 1 << 20
MARKS = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
"""Byte order mark → encoding, the longest first: UTF-32's mark begins with UTF-16's."""
SEPARATORS = (";", "\t", "|", ",")
"""Separators of fields, the surest first. Commas are last, since texts contain them."""
UNDECODABLE = "espalier.undecodable"
"""Codec error handler. Undecodable bytes become invalid UTF-8, so that `unreadable_rows` finds their fields."""
codecs.register_error(UNDECODABLE, lambda error: ("\udc80", getattr(error, "end", 0)))


class EndlessQuotes(InvalidData):
    """A quote begins a field that no quote ends."""


@dataclass(frozen=True)
class TextTableFile:
    """A text file and its format.

    separator   between fields
    header      whether the first record names the columns
    quote_mark  around fields with separators of one byte; empty: none
    section     dotted name of the configuration's section with these keys, for messages
    """

    path: Path
    separator: str
    header: bool = True
    encoding: str = "utf-8"
    quote_mark: str = '"'
    section: str = "data.format"

    @property
    def one_byte(self) -> bool:
        return len(self.separator.encode()) == 1

    @property
    def quote(self) -> str:
        """The quote; empty if fields have none."""
        return self.quote_mark if self.one_byte else ""

    def hint(self, about: str, key: str, value: str) -> str:
        """The end of a message: what may be the case, and the key of the configuration that says so."""
        return configured(f'; {about}: say so with {self.section}.{key} = "{value}"'.replace("\t", "\\t"))

    def encoding_expected(self, other: str = "latin-1", which: str = "or whichever other it is in") -> str:
        """The expected encoding, and the key of the configuration that changes it."""
        return f"text in {self.encoding}" + configured(f', or {self.section}.encoding = "{other}", {which}')


def without_end(line: AnyStr, separator: AnyStr) -> AnyStr:
    """The line without separators at its end, if these are blanks."""
    while separator.isspace() and line.endswith(separator):
        line = line.removesuffix(separator)
    return line


def separator_of(file: Path) -> str:
    return "\t" if file.name.removesuffix(".gz").endswith(".tsv") else ","


def text_batches(
    table: TextTableFile, columns: Mapping[str, Column] | None, bad_rows: BadRows, block_bytes: int = MAX_LINE
) -> Iterator[tuple[RowSource, pa.RecordBatch]]:
    """The columns of each role as strings, block by block, each block with its source.

    columns      role → column; None: all columns by their names
    block_bytes  how much is parsed at a time; at least the longest record

    Raises InvalidData for a missing column. If `bad_rows` refuses them, also for a record with too few or too many fields, and for a field
    that is not in the encoding. The error names the file, the line and the column.
    """
    names = first_record(table)
    if not names:
        return
    columns = {name: name for name in names} if columns is None else columns
    position_of_role = {role: _position(table, names, role, column) for role, column in columns.items()}
    for record_R, batch in _records(table, sorted(set(position_of_role.values())), bad_rows, block_bytes):
        source = _source(table, record_R, columns)
        batch = pa.RecordBatch.from_arrays([batch.column(f"f{position}") for position in position_of_role.values()], list(columns))
        for role in columns:
            values = batch.column(role)
            wrong_rows = unreadable_rows(values, lambda part: as_text(part) is not None, bad_rows.most)
            source, batch = source.without(batch, role, wrong_rows, bad_rows, f"not {table.encoding}", table.encoding_expected())
        yield source, pa.RecordBatch.from_arrays([as_text(values) for values in batch], list(columns))


def whole_table(table: TextTableFile, columns: Mapping[str, Column] | None, bad_rows: BadRows) -> tuple[pa.Table, RowSource]:
    """The columns of each role as strings, with null for empty fields, and their source. Raises InvalidData as `text_batches` does.

    The caller adds the rows that it keeps to `bad_rows.rows_read`.
    """
    sources, batches = [], []
    for source, batch in text_batches(table, columns, bad_rows):
        sources.append(source)
        batches.append(pa.RecordBatch.from_arrays([pc.if_else(pc.equal(values, ""), None, values) for values in batch], batch.schema.names))

    def position(row: int) -> str:
        for source, batch in zip(sources, batches, strict=True):
            if row < len(batch):
                return source.position(row)
            row -= len(batch)
        raise IndexError(row)

    if not batches:  # only a header, or an empty file
        names = first_record(table) if columns is None else list(columns)
        return pa.table({name: pa.array([], pa.string()) for name in names}), RowSource(table.path.name, columns or {}, position)
    return pa.Table.from_batches(batches), RowSource(table.path.name, sources[0].columns, position)


def first_record(table: TextTableFile) -> list[str]:
    """The fields of the first record; none of an empty file. Raises InvalidData for names not in the encoding, or a quote without end."""
    with open_text(table, None) as file:
        lines = (line.decode("utf-8", "surrogateescape") for line in file)
        first = next((line for line in lines if line.strip("\r\n")), None)
        if first is None:
            return []
        if not table.one_byte:
            record = first.rstrip("\r\n").split(table.separator)
        else:
            try:
                record = next(fields_of(chain([first], lines), table.separator, table.quote))
            except csv.Error as error:
                raise InvalidData(f"{table.path.name}: first line", first[:100], f"fields ({error}){_unquoted(table)}") from None
    if table.header and any("\udc80" <= character <= "\udcff" for name in record for character in name):
        line = line_of(table, 0)
        raise InvalidData(f"{table.path.name}: line {line}", first.encode("utf-8", "surrogateescape"), table.encoding_expected())
    return record


def fields_of(lines: Iterable[str], separator: str, quote: str) -> Iterator[list[str]]:
    """The fields of each record. Raises csv.Error for a field above the limit of Python's reader."""
    if quote:
        return csv.reader(lines, delimiter=separator, quotechar=quote)
    return csv.reader(lines, delimiter=separator, quoting=csv.QUOTE_NONE)


def line_of(table: TextTableFile, record: int) -> int:
    """The line on which a record begins, from 1 as in an editor. Record 0 is the header, or the first event if there is no header.

    Reads the file from its beginning, so only error messages use it.
    """
    return next(islice(_record_lines(table), record, None), record + 1)


def _record_lines(table: TextTableFile) -> Iterator[int]:
    """The line, from 1, on which each record begins. Raises InvalidData for quotes around a line end that do not end with a field: they are
    characters, and would swallow the lines between them.
    """
    begin, inside = 1, False
    fields = quoted_fields(table.separator, table.quote) if table.quote else None
    with open_text(table, None) as lines:
        for number, line in enumerate(lines, 1):
            if not inside and line.strip(b"\r\n"):
                begin = number
                yield number
            if fields is not None:  # inside quotes, a leading quote lets the pattern match
                text = table.quote * inside + line.decode("latin-1").rstrip("\r\n")
                quoted = [*fields.finditer(text)]
                rest = text[quoted[0].end() :].lstrip(" ") if inside and quoted and quoted[0][1] else ""
                if rest and not rest.startswith(table.separator.lstrip(" ")):
                    raise _endless_quotes(table, begin)
                inside = bool(quoted) and not quoted[-1][1]
    if inside:
        raise _endless_quotes(table, begin)


def _endless_quotes(table: TextTableFile, line: int) -> EndlessQuotes:
    return EndlessQuotes(f"{table.path.name}: line {line}", table.quote, f"quotes that end with a field{_unquoted(table)}")


def quoted_fields(separator: str, quote: str) -> re.Pattern[str]:
    """A pattern for the fields in quotes of a line. Its group is the closing quote, empty if the line ends before it.

    As for the parser, a quote inside a field that does not begin with one is a character, and so are two quotes inside quotes.
    """
    mark = re.escape(quote)
    return re.compile(f"(?:^|{re.escape(separator)}){mark}[^{mark}]*(?:{mark}{mark}[^{mark}]*)*({mark}?)")


def open_text(table: TextTableFile, separator: str | None) -> io.BufferedReader:
    """The unzipped text in UTF-8, without a byte order mark. Each `separator` is replaced by UNIT_SEPARATOR.

    Raises InvalidData, also during reading, for a file that cannot be read to its end, a line longer than MAX_LINE, and text in UTF-16 or
    UTF-32 if the format says UTF-8.
    """
    return io.BufferedReader(_Lines(table, separator), READ_BYTES)


def encoding_of(path: Path) -> str:
    """The likely encoding of a text file. The whole file is read, since the first letter outside ASCII may be far from the beginning.

    UTF-32 has a byte order mark, UTF-16 a mark or zeros between its bytes. Text is UTF-8 if more of its letters outside ASCII are valid
    UTF-8 than not; any other text is in a Western code page.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(UNDECODABLE)
    letters, undecodable, controls = 0, 0, 0
    for number, block in enumerate(chain(_blocks(path), [b""])):
        if number == 0 and (encoding := _encoding_by_mark(block)):
            return encoding
        if number == 0 and block and 4 * block.count(b"\0") > len(block):
            return "utf-16-le" if block[1:2] == b"\0" else "utf-16-be"
        text = decoder.decode(block, not block)
        if not text.isascii():
            undecodable += text.count("\udc80")
            letters += len(text) - len(text.encode("ascii", "ignore")) - text.count("\udc80")
        controls += len(block) - len(block.translate(None, bytes(range(0x80, 0xA0))))
    if undecodable == 0 or undecodable < letters:
        return "utf-8"
    return "cp1252" if controls else "latin-1"


def _encoding_by_mark(text: bytes) -> str | None:
    return next((encoding for mark, encoding in MARKS.items() if text.startswith(mark)), None)


def _blocks(path: Path) -> Iterator[bytes]:
    try:
        with pa.input_stream(str(path), compression="gzip" if path.suffix == ".gz" else None) as stream:
            while block := stream.read(READ_BYTES):
                yield block
    except FileNotFoundError as error:
        raise InvalidData(path.name, "no such file", "a readable file") from error
    except OSError as error:
        raise InvalidData(path.name, str(error), "a file that can be read to its end") from error


def _position(table: TextTableFile, names: list[str], role: str, column: Column) -> int:
    position = position_of(names, column) if isinstance(column, str) else column
    if position is None or position >= len(names):
        choices = names if isinstance(column, str) else list(range(len(names)))
        raise InvalidData(f"{table.path.name}: column {role}", column, f"one of {choices}, once{other_separator(table, names)}")
    return position


def other_separator(table: TextTableFile, names: list[str]) -> str:
    """A hint for a first line that seems to have another separator; empty if it has none of SEPARATORS."""
    likely = next((mark for mark in SEPARATORS if len(names) == 1 and mark in names[0]), None)
    return "" if likely is None else table.hint(f"the first line has {likely!r} between fields", "separator", likely)


def _unquoted(table: TextTableFile) -> str:
    return table.hint("quotes may be plain characters", "quote", "") if table.quote else ""


def _source(table: TextTableFile, record_R: Int64, columns: Mapping[str, Column]) -> RowSource:
    return RowSource(table.path.name, columns, lambda row: f"line {line_of(table, int(record_R[row]))}")


def _records(table: TextTableFile, positions: list[int], bad_rows: BadRows, block_bytes: int) -> Iterator[tuple[Int64, pa.RecordBatch]]:
    """int64[R], the record numbers of the rows after the header, and their fields at some positions, as bytes."""
    names = [f"f{position}" for position in positions]
    skipped: deque[int] = deque()  # records of blocks that the parser has read ahead
    refused: list[InvalidData] = []

    def handle(row: pa_csv.InvalidRow) -> str:
        record = row.number - 1
        try:
            if not refused:
                bad_rows.add("wrong number of fields", np.array([record]), lambda _: _wrong_fields(table, row))
        except InvalidData as error:
            refused.append(error)
            lines.end()  # and not "error": the parser's thread, which reads ahead, must be over before the interpreter is
        skipped.append(record)
        return "skip"

    context = copy_context()  # the parser may call from a thread of its own, and messages are for the caller of this function
    # One thread: only then does the parser know row numbers.
    read = pa_csv.ReadOptions(use_threads=False, block_size=block_bytes, autogenerate_column_names=True)
    parse = pa_csv.ParseOptions(
        delimiter=table.separator if table.one_byte else UNIT_SEPARATOR,
        quote_char=table.quote or False,
        newlines_in_values=bool(table.quote),
        invalid_row_handler=lambda row: context.run(handle, row),
    )
    convert = pa_csv.ConvertOptions(include_columns=names, column_types=dict.fromkeys(names, pa.binary()), strings_can_be_null=False)
    lines = _Lines(table, None if table.one_byte else table.separator)
    begin = 0
    try:
        with io.BufferedReader(lines, READ_BYTES) as file, pa_csv.open_csv(file, read, parse, convert) as reader:
            for batch in reader:
                if refused:
                    continue
                end, without = begin + len(batch), []
                while skipped and skipped[0] < end:
                    without.append(skipped.popleft())
                    end += 1
                record_R = np.delete(np.arange(begin, end), np.array(without, np.int64) - begin)
                header = int(begin == 0 and table.header)
                yield record_R[header:], batch.slice(header)
                begin = end
        if refused:
            raise refused[0]
        if lines.quotes % 2 or (lines.quotes and lines.count > begin):
            deque(_record_lines(table), maxlen=0)  # raises if quotes that are characters have swallowed lines
    except pa.ArrowInvalid as error:
        if refused:
            raise refused[0] from None
        if "Empty CSV file" in str(error):
            return
        expected = f"readable text with one event a line, of fewer than {block_bytes:,} bytes{_unquoted(table)}"
        raise InvalidData(table.path.name, str(error), expected) from error


def _wrong_fields(table: TextTableFile, row: pa_csv.InvalidRow) -> InvalidData:
    text = row.text.replace(UNIT_SEPARATOR, table.separator)
    expected = f"{row.expected_columns} fields, not {row.actual_columns}"
    return InvalidData(f"{table.path.name}: line {line_of(table, row.number - 1)}", text, expected)


class _Lines(io.RawIOBase):
    """A stream of lines for the parser: in UTF-8, with separators of several bytes replaced, and a line end after the last line.

    Without that line end, pyarrow takes a single line without a header for an empty file. `count` is the number of lines so far that are
    not blank, and perhaps of some that are; `quotes` that of quotes.
    """

    def __init__(self, table: TextTableFile, separator: str | None) -> None:
        self._table, self._blocks, self._name, self._separator = table, _blocks(table.path), table.path.name, separator
        is_utf8 = codecs.lookup(table.encoding).name == "utf-8"
        self._decoder = None if is_utf8 else codecs.getincrementaldecoder(table.encoding)(UNDECODABLE)
        self._at_start, self._has_line_ends = True, False
        self._lines, self._rest = b"", b""
        self.count, self.quotes, self._is_over = 0, 0, False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._lines and not self._is_over:
            block = next(self._blocks, b"")
            text = self._rest + self._as_utf8(block)
            if not block and not text:
                return 0
            # Only whole lines are rewritten: a block may end in the middle of a separator, a line may not.
            whole, newline, self._rest = (text if block else text + b"\n").rpartition(b"\n")
            self._has_line_ends |= b"\n" in text
            if not self._has_line_ends and b"\r" in text and (not block or len(self._rest) > MAX_LINE):
                raise InvalidData(self._name, "line ends of CR alone", "lines that end with LF, or with CR and LF")
            if len(self._rest) > MAX_LINE:
                raise InvalidData(f"{self._name}: a line", f"more than {MAX_LINE:,} bytes", "text with shorter lines")
            self._lines = whole + newline
            self.count += self._lines.count(b"\n") - self._lines.count(b"\n\n") - self._lines.count(b"\n\r\n")
            self.quotes += self._lines.count(self._table.quote.encode()) if self._table.quote else 0
            if self._separator is not None:
                self._lines = self._lines.replace(self._separator.encode(), UNIT_SEPARATOR.encode())
        size = min(len(buffer), len(self._lines))
        buffer[:size] = self._lines[:size]
        self._lines = self._lines[size:]
        return size

    def end(self) -> None:
        """Give nothing more than what is at hand."""
        self._is_over = True

    def _as_utf8(self, block: bytes) -> bytes:
        if self._decoder is None:
            if self._at_start and (marked := _encoding_by_mark(block)):
                raise InvalidData(f"{self._name}: line 1", block[:20], self._table.encoding_expected(marked, "as which it begins"))
            text = block
        else:
            text = self._decoder.decode(block, not block).encode("utf-8", "surrogatepass")
        if self._at_start and text:
            self._at_start = False
            return text.removeprefix(codecs.BOM_UTF8)
        return text
