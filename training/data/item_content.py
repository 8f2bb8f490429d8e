"""The content of a catalogue as sparse features: chooses the values and words that count, and makes a row for each item.

Knows item tables. Does not know node rows (`training.deep.content_rows`), nor how one item's features are made (`espalier.content`).

Legend: I items, F features, V known values.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from espalier.arrays import Array, Bool
from espalier.content.features import TEXT, ContentFeatures, value_hash
from espalier.content_info import MOST_COLUMNS, ContentColumn, ContentInfo
from espalier.errors import InvalidConfig, InvalidData
from espalier.items import ItemTable
from espalier.logs.log_values import is_text_type
from espalier.text.blocks import TextBlock
from espalier.text.sparse_rows import SparseRows, concatenated
from espalier.text.vectoriser import Vectoriser

from ..specification.deep import ContentConfig

log = logging.getLogger(__name__)

BLOCK = 4096
"""Items whose fields are Python objects at the same time."""
MIN_ITEMS = 2
"""Least items that share a value or word. One of a single item says nothing about others."""
MOST_ENTRIES = 256
"""Most features of an item."""
NO_CONTENT = "content.columns = auto: no column of the item table distinguishes items, so the model has no content"


@dataclass(frozen=True, eq=False)
class ItemContent:
    """info, arrays: parameters that turn fields into features; rows: the features of every item."""

    info: ContentInfo
    arrays: dict[str, Array]
    rows: SparseRows

    @property
    def known_I(self) -> Bool:
        """bool[I]: whether an item has more than the feature that all items have."""
        known_I: Bool = np.diff(self.rows.indptr) > 1
        return known_I


def item_content(items: ItemTable, config: ContentConfig) -> ItemContent | None:
    """The content of an item table by a configuration; None if it names no column, or `auto` finds none that distinguishes items.

    Raises InvalidConfig for a missing column, one of another type, or one that says nothing.
    """
    columns = _columns(items, config)
    if not columns:
        if config.columns == "auto":
            log.warning(NO_CONTENT)
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
    for name in () if config.columns == "auto" else config.columns:
        if all(len(features.of(part).indices) == len(part) for part in _fields(items, [name])):
            expected = f"a column with a value or word that at least {MIN_ITEMS} items share, and not all but one"
            raise InvalidConfig("content.columns", name, expected)
    rows = concatenated([features.of(part) for part in _fields(items, [column.name for column in columns])])
    longest = int(np.diff(rows.indptr).max())
    if longest == 1:
        log.warning(NO_CONTENT)
        return None
    log.info("content: %d features of %s, at most %d of an item", info.features, ", ".join(c.name for c in columns), longest)
    return ItemContent(info.model_copy(update={"entries": longest}), arrays, rows)


def _columns(items: ItemTable, config: ContentConfig) -> list[ContentColumn]:
    names = [name for name in items.fields if name != "id"] if config.columns == "auto" else dict.fromkeys(config.columns)
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
    if len(columns) > MOST_COLUMNS:
        raise InvalidConfig("content.columns", f"{len(columns):,} columns", f"at most {MOST_COLUMNS:,}: name some")
    return columns


def _column(name: str, column: pa.ChunkedArray) -> ContentColumn | None:
    """The kind and scale of a column; None for other types, and for numbers that are all equal."""
    kind = column.type
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
        numbers = column.cast(pa.float64(), safe=False).drop_null().to_numpy()
        numbers = numbers[np.isfinite(numbers)].astype(np.longdouble)  # squares of large numbers are above float64
        if not len(numbers) or numbers.min() == numbers.max():  # of equal numbers std need not be 0
            return None
        scale = float(numbers.std())
        return ContentColumn(name=name, kind="number", mean=float(numbers.mean()), scale=scale) if scale > 0 else None
    text = text_kind(kind)
    return None if text is None else ContentColumn(name=name, kind=text)


def text_kind(kind: pa.DataType) -> Literal["string", "list"] | None:
    """Whether a column has a text or a list of texts for each item."""
    if is_text_type(kind):
        return "string"
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    return "list" if is_list and is_text_type(kind.value_type) else None


def _values(items: ItemTable, columns: Sequence[ContentColumn], most: int) -> dict[str, Array]:
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
    values = sorted(frequent[:most])
    items_of_value = np.array([items_of for _, items_of in values], np.float64)
    weight = np.maximum(np.log(len(items) / (items_of_value + 1)), 0)
    return {"value_hash": np.array([value for value, _ in values], np.uint64), "value_weight": weight.astype(np.float32)}


def _vectoriser(items: ItemTable, columns: Sequence[str], most: int) -> Vectoriser | None:
    """A vectoriser of the words of the string columns; None if no word is in MIN_ITEMS items, or `most` is below 1."""
    if not columns or most < 1:
        return None
    texts = ["\n".join(value for value in item.values() if value) for part in _fields(items, columns) for item in part]
    try:
        return Vectoriser.fit(texts, [TextBlock(unit="word", n=1, max_features=most, min_count=MIN_ITEMS)])
    except InvalidData:
        return None


def _fields(items: ItemTable, columns: Sequence[str]) -> Iterator[list[dict[str, Any]]]:
    """The fields of all items, in blocks."""
    table = pa.table({name: items.column(name) for name in columns})
    for start in range(0, len(table), BLOCK):
        yield table.slice(start, BLOCK).to_pylist()
