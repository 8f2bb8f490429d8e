"""New items of a table, checked against the model that they are placed in, and their features.

Knows columns, types and texts. Does not know trees or weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from espalier.bundle import Bundle
from espalier.errors import InvalidConfig, InvalidData, InvalidQuery
from espalier.items import ItemTable
from espalier.queries import FeaturesKind, TextKind, encode_features
from espalier.text.sparse_rows import SparseRows
from training.data.query_logs import texts_of

FEATURES = "features"
"""The column of structs of `indices` and `values` that new items of a model of features have besides the model's columns."""


@dataclass(frozen=True, eq=False)
class NewItems:
    """table: the items, with the columns of the model's item table and their types; own: the features of each."""

    table: pa.Table
    own: SparseRows

    def __len__(self) -> int:
        return len(self.own)


def read_new_items(bundle: Bundle, file: Path, columns: Sequence[str]) -> NewItems:
    """The items of a Parquet file.

    columns  of the item table: their values are an item's text; none for a model of features, whose new items have a column `features`
    Raises InvalidConfig where `columns` are not the model's, InvalidData where the file does not fit the model.
    """
    kind = bundle.manifest.query
    if isinstance(kind, TextKind) != bool(columns):
        expected = "columns of the item table that are its items' text" if isinstance(kind, TextKind) else "none: the model takes features"
        raise InvalidConfig("--text", list(columns), expected)
    if unknown := [name for name in columns if name not in bundle.items.fields]:
        raise InvalidConfig("--text", unknown[0], f"a column of the model's item table: {', '.join(bundle.items.fields)}")
    given = _read(file)
    extra = [FEATURES] if isinstance(kind, FeaturesKind) else []
    wanted = [*bundle.items.fields, *extra]
    for name in wanted:
        if name not in given.column_names:
            raise InvalidData(f"{file}, columns", given.column_names, f"a column {name!r}, as the model's item table has")
    if more := [name for name in given.column_names if name not in wanted]:
        raise InvalidData(f"{file}, columns", more[0], f"columns of the model's item table: {', '.join(wanted)}")
    table = pa.table({name: _cast(file, given, bundle, name) for name in bundle.items.fields})
    ids = ItemTable.build(table).column("id").to_pylist()
    known = np.flatnonzero(bundle.items.rows_of(ids) >= 0)
    if len(known):
        raise InvalidData(f"{file}, id", ids[int(known[0])], "an id that the model does not have")
    own = _features(file, given, ids, kind) if isinstance(kind, FeaturesKind) else bundle.vectoriser.transform(_texts(table, columns))
    blank = np.flatnonzero(np.diff(own.indptr) == 0)
    if len(blank):
        what = "features" if isinstance(kind, FeaturesKind) else ", ".join(columns)
        value = None if isinstance(kind, FeaturesKind) else _texts(table, columns)[int(blank[0])]
        raise InvalidData(f"{file}, item {ids[int(blank[0])]!r}, {what}", value, "something that the model has features for")
    return NewItems(table, own)


def _texts(table: pa.Table, columns: Sequence[str]) -> list[str]:
    frame = pl.from_arrow(table.select(list(dict.fromkeys(columns))))
    return texts_of(frame, columns) if isinstance(frame, pl.DataFrame) else []


def _read(file: Path) -> pa.Table:
    try:
        return pq.read_table(file)
    except (pa.ArrowException, OSError) as error:
        raise InvalidData(str(file), str(error), "a readable Parquet file") from error


def _cast(file: Path, given: pa.Table, bundle: Bundle, name: str) -> pa.ChunkedArray:
    """A column, cast to the type of the model's. Values never change: 1.5 is not an integer, and "12" is not a number."""
    column, wanted = given.column(name), bundle.items.column(name).type
    if _family(column.type) != _family(wanted) and not pa.types.is_null(column.type):
        raise InvalidData(f"{file}, {name}", str(column.type), f"{wanted}, as in the model")
    try:
        return column.cast(wanted)
    except pa.ArrowException as error:
        raise InvalidData(f"{file}, {name}", str(error), f"values of {wanted}, as in the model") from error


def _family(kind: pa.DataType) -> str:
    """A type without its width: types of one family hold the same kind of values."""
    if pa.types.is_dictionary(kind):
        return _family(kind.value_type)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return f"list of {_family(kind.value_type)}"
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return "string"
    return "number" if pa.types.is_integer(kind) or pa.types.is_floating(kind) else str(kind)


def _features(file: Path, given: pa.Table, ids: Sequence[str], kind: FeaturesKind) -> SparseRows:
    pairs = []
    for item_id, value in zip(ids, given.column(FEATURES).to_pylist(), strict=True):
        if not isinstance(value, dict) or value.keys() != {"indices", "values"} or None in value.values():
            raise InvalidData(f"{file}, item {item_id!r}, {FEATURES}", value, "a struct of the lists indices and values")
        pairs.append((value["indices"], value["values"]))
    try:
        return encode_features(kind, pairs).features
    except InvalidQuery as error:
        row = int(error.field.split("[")[1].split("]")[0])
        raise InvalidData(f"{file}, item {ids[row]!r}, {error.field.split('.', 1)[1]}", error.value, error.expected) from error
