"""The content of a catalogue as sparse features: which values and words count, and a row for each item.

Knows item tables. Does not know node rows: see `training.deep.content_rows`; nor how one item's features are made: `espalier.content`.

Legend: I items, F features, V known values.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from espalier.content.features import TEXT, ContentFeatures, value_hash
from espalier.content_info import ContentColumn, ContentInfo
from espalier.errors import InvalidConfig, InvalidData
from espalier.items import ItemTable
from espalier.text.blocks import TextBlock
from espalier.text.sparse_rows import SparseRows, concatenated
from espalier.text.vectoriser import Vectoriser

from ..data.log_values import is_text_type
from ..specification.deep import ContentConfig

log = logging.getLogger(__name__)

BLOCK = 4096
"""Items whose fields are Python objects at a time."""
MIN_ITEMS = 2
"""A value or word of fewer items says nothing about others."""
MOST_ENTRIES = 256
"""Features of an item that count, at most."""


@dataclass(frozen=True, eq=False)
class ItemContent:
    """info, arrays: what makes features of fields; rows: those of every item of the catalogue."""

    info: ContentInfo
    arrays: dict[str, NDArray[Any]]
    rows: SparseRows

    @property
    def known_I(self) -> NDArray[np.bool_]:
        """bool[I]: the items that have more than the feature of every item."""
        known_I: NDArray[np.bool_] = np.diff(self.rows.indptr) > 1
        return known_I


def item_content(items: ItemTable, config: ContentConfig) -> ItemContent | None:
    """What a configuration makes of an item table; None where it names no column, or "auto" finds none that says anything.

    Raises InvalidConfig for a column that is not there, or holds something else.
    """
    columns = _columns(items, config)
    if not columns:
        return None
    room = config.features - 1 - sum(column.kind == "number" for column in columns)
    if room < 0:
        raise InvalidConfig("content.features", config.features, f"at least {1 + len(columns)}, for {len(columns)} columns")
    arrays = _values(items, columns, room)
    strings = [column.name for column in columns if column.kind == "string"]
    vectoriser = _vectoriser(items, strings, room - len(arrays["value_hash"]))
    if vectoriser is not None:
        arrays |= {f"{TEXT}{name}": array for name, array in vectoriser.arrays().items()}
    info = ContentInfo(
        columns=tuple(columns),
        blocks=() if vectoriser is None else vectoriser.blocks,
        values=len(arrays["value_hash"]),
        features=config.features - room + len(arrays["value_hash"]) + (0 if vectoriser is None else vectoriser.width),
        entries=MOST_ENTRIES,
    )
    features = ContentFeatures(info, arrays)
    rows = concatenated([features.of(part) for part in _fields(items, [column.name for column in columns])])
    longest = int(np.diff(rows.indptr).max())
    if longest == 1:
        return None
    log.info("content: %d features of %s, at most %d of an item", info.features, ", ".join(c.name for c in columns), longest)
    return ItemContent(info.model_copy(update={"entries": longest}), arrays, rows)


def _columns(items: ItemTable, config: ContentConfig) -> list[ContentColumn]:
    names = [name for name in items.fields if name != "id"] if config.columns == "auto" else config.columns
    columns = []
    for name in names:
        if name not in items.fields or name == "id":
            expected = f"some of the item table's columns besides id: {', '.join(items.fields[1:]) or 'it has none'}"
            raise InvalidConfig("content.columns", name, expected)
        column = _column(name, items.column(name))
        if column is not None:
            columns.append(column)
        elif config.columns != "auto":
            expected = f"a column of strings, lists of strings or numbers; {name} is {items.column(name).type}, or says nothing"
            raise InvalidConfig("content.columns", name, expected)
    return columns


def _column(name: str, column: pa.ChunkedArray) -> ContentColumn | None:
    """None for other types, and for numbers that are all the same."""
    kind = column.type
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
        numbers = column.cast(pa.float64(), safe=False).drop_null().to_numpy()
        numbers = numbers[np.isfinite(numbers)]
        scale = float(numbers.std()) if len(numbers) else 0.0
        return ContentColumn(name=name, kind="number", mean=float(numbers.mean()), scale=scale) if 0 < scale < np.inf else None
    if is_text_type(kind):
        return ContentColumn(name=name, kind="string")
    if (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and is_text_type(kind.value_type):
        return ContentColumn(name=name, kind="list")
    return None


def _values(items: ItemTable, columns: Sequence[ContentColumn], most: int) -> dict[str, NDArray[Any]]:
    """The most frequent values that at least MIN_ITEMS items share, with their inverse document frequencies."""
    count: Counter[int] = Counter()
    for column in columns:
        if column.kind != "number":
            for chunk in items.column(column.name).iterchunks():
                for start in range(0, len(chunk), BLOCK):
                    for value in chunk.slice(start, BLOCK).to_pylist():
                        entries = (value,) if isinstance(value, str) else set(value or ())
                        count.update(value_hash(column.name, entry) for entry in entries if entry is not None)
    frequent = sorted((entry for entry in count.items() if entry[1] >= MIN_ITEMS), key=lambda entry: (-entry[1], entry[0]))
    kept = sorted(frequent[:most])
    found = np.array([items_of for _, items_of in kept], np.float64)
    weight = np.maximum(np.log(len(items) / (found + 1)), 0)
    return {"value_hash": np.array([value for value, _ in kept], np.uint64), "value_weight": weight.astype(np.float32)}


def _vectoriser(items: ItemTable, columns: Sequence[str], most: int) -> Vectoriser | None:
    """Of the words of the string columns; None where no word is in MIN_ITEMS items, or there is no room."""
    if not columns or most < 1:
        return None
    texts = ["\n".join(value for value in item.values() if value) for part in _fields(items, columns) for item in part]
    try:
        return Vectoriser.fit(texts, [TextBlock(unit="word", n=1, max_features=most, min_count=MIN_ITEMS)])
    except InvalidData:
        return None


def _fields(items: ItemTable, columns: Sequence[str]) -> Iterator[list[dict[str, Any]]]:
    """The fields of some items at a time."""
    table = pa.table({name: _finite(items.column(name)) for name in columns})
    for start in range(0, len(table), BLOCK):
        yield table.slice(start, BLOCK).to_pylist()


def _finite(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Infinite numbers are missing."""
    return pc.if_else(pc.is_finite(column), column, None) if pa.types.is_floating(column.type) else column
