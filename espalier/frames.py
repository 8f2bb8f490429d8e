"""Converts data frames: pandas, polars, Arrow and files to Arrow's tables, and tables to data frames.

Knows columns. Does not know models.
"""

from __future__ import annotations

import csv
import gzip
import importlib
import importlib.util
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.dataset as pa_dataset
import pyarrow.parquet as pq
from numpy.typing import NDArray

from espalier.errors import InvalidInput
from espalier.log_columns import as_iso, check_unit, is_header, position_of
from espalier.wording import option

Frame = Literal["pandas", "polars", "arrow"]
"""The library of the data frames that answers are returned as."""
DELIMITERS, MAX_RECORD = (",", ";", "\t", "|"), 1 << 24
LIBRARIES: tuple[Literal["pandas", "polars"], ...] = ("pandas", "polars")
WHOLE = 2**53
"""Floats hold every whole number below this one."""
IDS = 'strings or whole numbers below 2^53: make all ids strings, in pandas with .astype("string"), in polars with .cast(pl.String)'
"""The expected values of a column of ids."""


def installed_frame() -> Frame:
    """pandas or polars if one is installed, else Arrow."""
    for name in LIBRARIES:
        if importlib.util.find_spec(name) is not None:
            return name
    return "arrow"


def frame_like(data: Any) -> Frame:
    """The library of a data frame; for a file, the installed library."""
    for name in LIBRARIES:
        if type(data).__module__.partition(".")[0] == name:
            return name
    return "arrow" if isinstance(data, pa.Table) else installed_frame()


def as_frame(table: pa.Table, frame: Frame) -> Any:
    """A table of Arrow as a data frame."""
    if frame == "pandas":
        return table.to_pandas()
    if frame == "polars":
        return importlib.import_module("polars").from_arrow(table)
    return table


def as_table(field: str, data: Any, id_columns: Sequence[str | None] = ()) -> pa.Table:
    """A data frame, or a CSV, TSV or Parquet file, as a table of Arrow. Raises InvalidInput, naming the argument, for anything else.

    id_columns  read as text from a text file, so that leading zeros stay. The delimiter of a .csv is a comma, or the first of `;`, tab and
                `|` that gives its first line all these columns. In other data, floats that are all whole numbers or missing become
                integers, as which pandas holds no missing values; None: in every column. If all are numbers, and the first line of a text
                file has no usual name of a column, the file has no header; they are positions from 0, which then name the columns
    """
    table = _read(field, data, id_columns)
    ids = {position_of(table.column_names, name) for name in id_columns if name is not None}
    for position, (name, column) in enumerate(zip(table.column_names, table.columns, strict=True)):
        if (None in id_columns or position in ids) and pa.types.is_floating(column.type) and not len(_fractions(column)):
            table = table.set_column(position, name, _without_nan(column).cast(pa.int64()))
    return table


def _read(field: str, data: Any, id_columns: Sequence[str | None]) -> pa.Table:
    if isinstance(data, pa.Table):
        return data
    if isinstance(data, str | Path):
        file = Path(data)
        if not file.exists():
            raise InvalidInput(field, str(file), "a file that exists")
        name = file.name.removesuffix(".gz")
        if name.endswith((".csv", ".tsv")):
            columns = [name for name in id_columns if name is not None]
            try:
                delimiter, names = _first_line(file, "\t" if name.endswith(".tsv") else None, columns)
                positions = [*map(int, columns)] if names is None else [position_of(names, name) for name in columns]
                kinds = {f"f{at}" if names is None else names[at]: pa.string() for at in positions if at is not None}
                convert = pa_csv.ConvertOptions(column_types=kinds, strings_can_be_null=True, null_values=[""])  # "NA" may be an id
                parse = pa_csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
                read = pa_csv.ReadOptions(autogenerate_column_names=names is None, block_size=MAX_RECORD)
                table = pa_csv.read_csv(file, read, parse, convert)
                return table if names is not None else table.rename_columns([*map(str, range(table.num_columns))])
            except (OSError, EOFError, csv.Error, pa.ArrowInvalid) as error:  # not gzip, truncated, or without columns
                raise InvalidInput(field, str(file), f"a text file in UTF-8 with a line of columns first ({error})") from error
        try:
            return _folder(file) if file.is_dir() else pq.ParquetFile(file).read()
        except (OSError, pa.ArrowException) as error:
            expected = "a file that ends in .csv or .tsv, gzipped or not, or Parquet, also a folder of it"
            raise InvalidInput(field, str(file), f"{expected} ({error})") from error
    module = type(data).__module__.partition(".")[0]
    if module == "polars" and hasattr(data, "to_arrow"):
        return data.to_arrow()
    if module == "pandas" and hasattr(data, "columns"):
        return _from_pandas(field, data)
    expected = "a data frame of pandas or polars, a table of Arrow, or the path of a CSV, TSV or Parquet file"
    raise InvalidInput(field, type(data).__name__, expected)


def _folder(folder: Path) -> pa.Table:
    """A folder of Parquet. Columns that are part of the paths, as in `day=2024-05-01`, are text."""
    names = {path.name.partition("=")[0] for path in folder.rglob("*=*") if path.is_dir()}
    return pq.read_table(folder, partitioning=pa_dataset.partitioning(pa.schema(dict.fromkeys(names, pa.string())), flavor="hive"))


def _from_pandas(field: str, data: Any) -> pa.Table:
    """Raises InvalidInput, which names the column and the first value that does not fit those before it."""
    names = [str(name) for name in data.columns]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise InvalidInput(field, repeated, "each column once")
    columns = {}
    for name in data.columns:
        try:
            columns[str(name)] = pa.Array.from_pandas(data[name])
        except (pa.ArrowException, OverflowError) as error:
            values = np.asarray(data[name], object)
            row = bisect_left(range(len(values) - 1), True, key=partial(_is_mixed, values))
            expected = f'a value of one type with those above it; {field}[{name!r}].astype("string") makes all of them strings'
            raise InvalidInput(f"{field}[{name!r}], row {row} (from 0)", values[row], expected) from error
    return pa.table(columns)


def _is_mixed(values: NDArray[np.object_], last: int) -> bool:
    """Whether Arrow cannot hold the values up to the last one in one column."""
    try:
        pa.Array.from_pandas(values[: last + 1])
    except (pa.ArrowException, OverflowError):
        return True
    return False


def _without_nan(numbers: pa.ChunkedArray) -> pa.ChunkedArray:
    known = numbers.cast(pa.float64())
    return pc.if_else(pc.is_nan(known), None, known)


def _fractions(numbers: pa.ChunkedArray) -> pa.ChunkedArray:
    """The floats that stand for no whole number."""
    known = _without_nan(numbers)
    return known.filter(pc.invert(pc.and_(pc.equal(pc.floor(known), known), pc.less(pc.abs(known), WHOLE))))


def _first_line(file: Path, delimiter: str | None, columns: Sequence[str]) -> tuple[str, list[str] | None]:
    """The delimiter, and the names in the first line; None if it has none.

    delimiter  None: the first of DELIMITERS that gives the line all these columns, names or positions; a comma if there is none
    """
    with gzip.open(file, "rb") if file.name.endswith(".gz") else file.open("rb") as opened:
        lines = iter(lambda: opened.readline(MAX_RECORD).decode("utf-8", "replace").removeprefix("\ufeff"), "")
        line = next((line for line in lines if line.strip("\r\n")), "").partition("\r")[0].rstrip("\n")
    is_named = not columns or not all(map(str.isdecimal, columns))
    cells_of = {sign: next(csv.reader([line], delimiter=sign), []) for sign in ([delimiter] if delimiter else DELIMITERS)}

    def has_columns(sign: str) -> bool:
        cells = cells_of[sign]
        return all(position_of(cells, name) is not None if is_named else int(name) < len(cells) for name in columns)

    sign = next(filter(has_columns, cells_of), next(iter(cells_of)))
    return sign, cells_of[sign] if is_named or is_header(cells_of[sign]) else None


def column_of(table: pa.Table, field: str, name: str) -> pa.ChunkedArray:
    """A column by its name, ignoring case and outer blanks. Raises InvalidInput, which names the argument (`field`)."""
    if table.column_names.count(name) > 1:
        raise InvalidInput(field, name, "a column that the table has once")
    position = position_of(table.column_names, name)
    if position is None:
        is_position = "; positions are for text without a header, and for all columns" * name.isdecimal()
        raise InvalidInput(field, name, f"one of the columns {', '.join(table.column_names)}{is_position}")
    return table.column(position)


def ids_of(table: pa.Table, field: str, name: str) -> pa.ChunkedArray:
    """A column of ids by its name. Raises InvalidInput, which names the argument (`field`), also for floats: 1.5 is no id."""
    column = column_of(table, field, name)
    if pa.types.is_nested(column.type) or pa.types.is_binary(column.type):
        raise InvalidInput(field, f"{name}: {column.type}", IDS)
    if pa.types.is_floating(column.type):
        raise InvalidInput(field, f"{name}: {next(iter(_fractions(column)), column.type)}", IDS)
    return column


def lists_of(table: pa.Table, user: str, item: str, time: str | None) -> dict[Any, list[str]]:
    """User → items, oldest first by the column of times, or in the order of the rows without one.

    Rows without a user, an item or a time are left out. Raises InvalidInput, also if these are more than the others.

    time  None, `file` or `none`: no column
    """
    users, items = ids_of(table, option("user"), user), ids_of(table, option("item"), item)
    is_whole = pc.and_(users.is_valid(), items.is_valid())
    times = None
    if time not in (None, "file", "none"):
        times = _moments(column_of(table, option("time"), time))
        if not (pa.types.is_temporal(times.type) or pa.types.is_integer(times.type) or pa.types.is_floating(times.type)):
            values = [*filter(None, times.to_pylist())]
            first = next((value for value in values if not _is_time(value)), values[0] if values else None)
            expected = "a column of numbers, or of times as ISO 8601 has them (2026-03-08 07:24), all with a zone or all without"
            raise InvalidInput(option("time"), f"{time}: {first}", expected)
        if not pa.types.is_temporal(times.type):
            check_unit(f"column {time!r}", times.drop_null().to_numpy())
        if pa.types.is_floating(times.type):
            times = _without_nan(times)
        is_whole = pc.and_(is_whole, times.is_valid())
    rows = pa.array(np.flatnonzero(is_whole.to_numpy()))
    if len(table) - len(rows) > len(rows):
        found = f"{len(table) - len(rows):,} of {len(table):,} rows without a user, an item or a time"
        raise InvalidInput(option("user"), found, "at most half")
    if times is not None:
        rows = rows.take(pc.array_sort_indices(times.take(rows).combine_chunks()))  # stable
    lists: dict[Any, list[str]] = {}
    for owner, item_id in zip(users.take(rows).to_pylist(), items.take(rows).to_pylist(), strict=True):
        lists.setdefault(owner, []).append(str(item_id))
    return lists


def _moments(times: pa.ChunkedArray) -> pa.ChunkedArray:
    """Texts of dates and times, all with a zone or all without, as points in time; other values come back as they are.

    An empty text is no time.
    """
    if pa.types.is_dictionary(times.type):
        times = times.cast(times.type.value_type)
    if times.type not in (pa.string(), pa.large_string(), pa.string_view()):
        return times
    times = times.cast(pa.string())
    texts = as_iso(pc.if_else(pc.equal(times, ""), None, times))
    for zone in (None, "UTC"):
        with suppress(pa.ArrowInvalid):
            return texts.cast(pa.timestamp("us", zone))
    return times


def _is_time(text: object) -> bool:
    """Whether a value of a column of texts is a number, or a time as ISO 8601 has it."""
    for read in (float, datetime.fromisoformat):
        with suppress(ValueError):
            read(str(text))
            return True
    return False
