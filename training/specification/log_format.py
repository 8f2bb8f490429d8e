"""The format of logs and other text files, and which events of a log count: the keys of `data.format`."""

from __future__ import annotations

import codecs
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from espalier.logs.log_columns import Column
from espalier.logs.log_values import BadRowsPolicy, TimestampType
from espalier.logs.text_files import UNIT_SEPARATOR, TextTableFile, separator_of

from ..specification.sections import Form, Section, default_kind

Order = Literal["timestamp", "file", "none"]


class Rows(Section):
    """Whether unreadable rows are refused or skipped."""

    bad_rows: BadRowsPolicy = "refuse"
    """unreadable rows: `"refuse"`, `"skip"`. `"refuse"`: the first one ends the reading. `"skip"`: they are left out and counted,
    as long as they are no more than half"""


class TextFile(Rows):
    """How the bytes of a text file are read.

    SECTION  dotted name of the section that has these keys, for messages
    """

    SECTION: ClassVar[str]
    encoding: str = "utf-8"
    """text encoding, by its name in Python, such as `"latin-1"`"""

    @field_validator("encoding")
    @classmethod
    def _known_encoding(cls, name: str) -> str:
        try:
            "a".encode(name)
            codecs.getincrementaldecoder(name)
        except (LookupError, ValueError):
            raise ValueError(f'a text encoding that Python knows, such as "utf-8", "latin-1" or "utf-16", not {name!r}') from None
        return name


class TextTable(TextFile):
    """How a table in text is read, its first line being the names of its columns."""

    SECTION = "data.items_format"
    separator: str | None = Field(default=None, min_length=1)
    """one or more characters between fields. By default a tab where the name ends in .tsv, else a comma"""
    quote: str = Field(default='"', max_length=1)
    """quote character, doubled inside of quoted fields. Empty: none. With a separator of one byte only"""
    decimal: Literal[".", ","] = "."
    """decimal separator of numbers"""

    @model_validator(mode="after")
    def _can_be_parsed(self) -> TextTable:
        if self.separator is not None:
            check_separator(self.separator, self.quote)
        elif self.quote in (",", "\t"):
            raise ValueError(f"another quote than {self.quote!r}, which separates fields by default, or a separator beside it")
        if not self.quote.isascii() or self.quote in ("\r", "\n", UNIT_SEPARATOR):
            raise ValueError(f"a quote of one ASCII character, or none, not {self.quote!r}")
        return self

    def file(self, path: Path, header: bool = True) -> TextTableFile:
        """A file of this format."""
        return TextTableFile(path, self.separator or separator_of(path), header, self.encoding, self.quote, self.SECTION)


class _Format(Section):
    unique: bool = False
    """keep only the first event of a user with an item"""
    min_item_events: int = Field(default=1, ge=1)
    """drop items with fewer events. After `unique`"""
    min_user_events: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
    """drop users with fewer events; `"auto"`: those with one, and users with few are learned from, but not held out. After items. The OTM
    paper drops users with fewer than 10"""


class TableFormat(_Format, Rows):
    """One event a row, with columns."""

    user: Column = "user"
    """column of user ids. A name in any case, or a position from 0; all columns the same way"""
    item: Column = "item"
    """column of item ids"""
    timestamp: Column | None = None
    """column of times. The log is then read in its order"""
    timestamp_type: TimestampType = "integer"
    """`"integer"` or `"float"` of any unit, `"datetime"` (ISO 8601), or `"seconds"`, `"milliseconds"`, `"microseconds"`,
    `"nanoseconds"` since 1970. Dates of `data.split` need one of the last five"""
    time_format: str | None = Field(default=None, min_length=1)
    """how `timestamp_type = "datetime"` is written, if not as ISO 8601: in the directives of `strptime`, such as `"%d.%m.%Y %H:%M"`"""
    category: Column | None = None
    """column of item categories. For `tree.kind = "category"` and for items without training users"""
    order: Order = "file"
    """order of a list: `"timestamp"` (the default with a timestamp column), `"file"`, `"none"`. `"timestamp"`: oldest first, ties in file
    order. `"file"`: the log is in order. `"none"`: items have no order"""

    @property
    def columns(self) -> dict[str, Column]:
        """Role → column, for the columns that are read."""
        every = {"user": self.user, "item": self.item, "timestamp": self.timestamp, "category": self.category}
        return {role: column for role, column in every.items() if column is not None}

    @property
    def by_name(self) -> bool:
        return isinstance(self.user, str)

    @model_validator(mode="before")
    @classmethod
    def _ordered_by_time(cls, raw: object) -> object:
        has_time = isinstance(raw, dict) and raw.get("timestamp") is not None and "order" not in raw
        return {**raw, "order": "timestamp"} if isinstance(raw, dict) and has_time else raw

    @model_validator(mode="after")
    def _columns_fit_together(self) -> TableFormat:
        columns = list(self.columns.values())
        if len(set(columns)) != len(columns):
            raise ValueError(f"different columns for user, item, timestamp and category, not {columns}")
        if len({type(column) for column in columns}) > 1:
            raise ValueError(f"columns all by name or all by position, not {columns}")
        if any(isinstance(column, int) and column < 0 for column in columns):
            raise ValueError(f"columns at positions from 0, not {columns}")
        if self.order == "timestamp" and self.timestamp is None:
            raise ValueError("a timestamp column, since order is 'timestamp'")
        if self.order != "timestamp" and self.timestamp is not None:
            raise ValueError(f"order 'timestamp', since there is a timestamp column, not {self.order!r}")
        if self.time_format is not None and self.timestamp_type != "datetime":
            raise ValueError(f"timestamp_type 'datetime' beside time_format, not {self.timestamp_type!r}")
        return self


class CsvFormat(TableFormat, TextTable):
    """Text with one event a line. A name that ends in `.gz` is unzipped."""

    SECTION = "data.format"
    format: Literal["csv"] = "csv"
    header: bool = True
    """the first line names the columns"""

    @model_validator(mode="after")
    def _names_have_a_header(self) -> CsvFormat:
        if self.by_name and not self.header:
            raise ValueError(f"columns by position (0, 1, …) where there is no header, not {list(self.columns.values())}")
        return self


class ParquetFormat(TableFormat):
    """A Parquet file, or a folder of them, with one event a row. A folder is Parquet, and so is a file that begins as such files do."""

    format: Literal["parquet"] = "parquet"


class VectorsFormat(_Format):
    """Parquet with one query a row: a dense vector, and the items that it should lead to. Rows with equal vectors are one query."""

    timestamp: ClassVar[None] = None
    category: ClassVar[None] = None
    order: ClassVar[Literal["none"]] = "none"
    format: Literal["vectors"] = "vectors"
    vector: str = "vector"
    """column of vectors. Lists of numbers, all of one length"""
    items: str = "items"
    """column of item ids. A list of them in each row, or one"""
    min_user_events: int = Field(default=1, ge=1)
    """drop queries with fewer items. After items"""

    @property
    def columns(self) -> dict[str, Column]:
        """Role → column."""
        return {"vector": self.vector, "items": self.items}

    @model_validator(mode="after")
    def _two_columns(self) -> VectorsFormat:
        if self.vector == self.items:
            raise ValueError(f"different columns for vector and items, not {self.vector!r} twice")
        return self


class ListsFormat(_Format, TextFile):
    """Text with one user a line: the id, then the items in time order."""

    SECTION = "data.format"
    timestamp: ClassVar[None] = None
    category: ClassVar[None] = None
    format: Literal["lists"] = "lists"
    separator: str = Field(default=",", min_length=1)
    """one or more characters"""
    order: Literal["file", "none"] = "file"
    """order of a list: `"file"`, `"none"`. `"file"`: the items are in time order. `"none"`: they have no order"""

    @model_validator(mode="after")
    def _can_be_parsed(self) -> ListsFormat:
        check_separator(self.separator, '"')
        return self


EventFormat = CsvFormat | ListsFormat | ParquetFormat
"""The formats of histories: which user touched which item."""
LogFormat = Annotated[CsvFormat | ListsFormat | ParquetFormat | VectorsFormat, Field(discriminator="format"), default_kind("csv", "format")]
LOG_FORMAT: Form[LogFormat] = Form(LogFormat)


def check_separator(separator: str, quote: str) -> None:
    """Raises ValueError for a separator with a line end, the quote or the unit separator."""
    if any(character in separator for character in f"\r\n{quote}{UNIT_SEPARATOR}"):
        raise ValueError(f"a separator without line end, quote and unit separator, not {separator!r}")
