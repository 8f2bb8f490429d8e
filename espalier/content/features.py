"""Fields of items as sparse features, the same in training and for an item that comes later.

An item's features, by number: feature 0 is 1 for every item. Then one for each number column: (x − mean) / scale, cut off at ±FAR. Then the
known values of string and list columns, weighted by inverse document frequency and scaled to length 1 together. Then the n-grams of the
strings, from the vectoriser (`espalier.text`), also of length 1. Values and n-grams that training did not see are left out.

Knows fields and feature numbers. Does not know rows of nodes.

Legend: I items, F features, V known values.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from espalier.arrays import Array
from espalier.content_info import ContentColumn, ContentInfo
from espalier.errors import BundleCorrupt, InvalidQuery
from espalier.stored_arrays import check_arrays, check_length
from espalier.text.sparse_rows import SparseRows
from espalier.text.vectoriser import Vectoriser

FAR = 3.0
"""Largest distance of a number from the mean, in scales. Numbers further away are cut off."""
LARGEST_NUMBER = float(np.finfo(np.float64).max)
LARGEST_WEIGHT = 44.0
"""Above ln 2⁶³, the inverse document frequency in any catalogue."""
Cell = tuple[ContentColumn, str | float | list[str] | None]
NO_NGRAMS = np.zeros(0, np.int32), np.zeros(0, np.float32)
TEXT = "text."
"""Prefix of the vectoriser's arrays."""


class ContentFeatures:
    """Turns fields into features.

    arrays  value_hash uint64[V]    ascending; see `value_hash`
            value_weight float32[V] inverse document frequencies
            text.*                  those of the vectoriser, if the info has blocks

    Raises BundleCorrupt if arrays do not fit each other or the info.
    """

    def __init__(self, info: ContentInfo, arrays: Mapping[str, Array]) -> None:
        self.info = info
        _check_values(info, arrays)
        self._hash, self._weight = arrays["value_hash"], arrays["value_weight"]
        self._vectoriser = _vectoriser(info, arrays)
        self._number_feature = {name: 1 + i for i, name in enumerate(column.name for column in info.columns if column.kind == "number")}
        self._first_value = 1 + info.numbers
        self._first_ngram = self._first_value + info.values
        width = self._first_ngram + (0 if self._vectoriser is None else self._vectoriser.width)
        if width != info.features:
            raise BundleCorrupt(f"content: {width} features, the manifest says {info.features}")

    def of(self, fields: Sequence[Mapping[str, Any]]) -> SparseRows:
        """A row for each item, from its fields by column. A missing field counts as None, as do NaN and infinite numbers; fields without a
        column are ignored.

        Raises InvalidQuery, naming the item and the field, for a value of another kind.
        """
        columns = self.info.columns
        cells = [[(column, _checked(i, column, item.get(column.name))) for column in columns] for i, item in enumerate(fields)]
        texts = ["\n".join(value for _, value in row if isinstance(value, str)) for row in cells]
        ngrams = None if self._vectoriser is None else self._vectoriser.transform(texts)
        rows = [self._row(row, *(NO_NGRAMS if ngrams is None else ngrams.row(i))) for i, row in enumerate(cells)]
        indptr = np.concatenate([[0], np.cumsum([len(features) for features, _ in rows])]).astype(np.int64)
        indices = np.concatenate([np.zeros(0, np.int32), *(features for features, _ in rows)]).astype(np.int32)
        values = np.concatenate([np.zeros(0, np.float32), *(sizes for _, sizes in rows)]).astype(np.float32)
        return SparseRows(indptr, indices, values, self.info.features)

    def knows(self, fields: Mapping[str, Any]) -> bool:
        """Whether an item with these fields has more than the feature that all items have. Raises as `of` does."""
        return len(self.of([fields]).indices) > 1

    def _known(self, hashes: Sequence[int]) -> Array:
        """int64, ascending, each once: the numbers of the known values among some hashes, without those of all items but one at most, whose
        weight is 0.
        """
        if not len(self._hash):
            return np.zeros(0, np.int64)
        sorted_hashes = np.unique(np.array(hashes, np.uint64))
        positions = np.minimum(np.searchsorted(self._hash, sorted_hashes), len(self._hash) - 1)
        known_values: Array = positions[(self._hash[positions] == sorted_hashes) & (self._weight[positions] > 0)]
        return known_values

    def _row(self, cells: Sequence[Cell], ngrams: Array, ngram_sizes: Array) -> tuple[Array, Array]:
        numbers, hashes = [(0, 1.0)], []  # feature 0 of every item
        for column, value in cells:
            if isinstance(value, float):
                scaled = (value - (column.mean or 0.0)) / (column.scale or 1.0)
                numbers.append((self._number_feature[column.name], max(-FAR, min(FAR, scaled))))
            elif value is not None:
                hashes += [value_hash(column.name, entry) for entry in ([value] if isinstance(value, str) else value)]
        values = self._known(hashes)
        weight = self._weight[values].astype(np.float64)
        length = math.sqrt(float(weight @ weight))
        number_features, number_values = zip(*numbers, strict=True)
        features = np.concatenate([number_features, self._first_value + values, self._first_ngram + ngrams.astype(np.int64)])
        unit = weight / length if length > 0 else weight
        weights = np.concatenate([number_values, unit, ngram_sizes.astype(np.float64)]).astype(np.float32)
        if len(features) > self.info.entries:
            largest = np.sort(np.argsort(-np.abs(weights), kind="stable")[: self.info.entries])
            features, weights = features[largest], weights[largest]
        return features, weights


def value_hash(column: str, value: str) -> int:
    """64 bits of a value of a column. Stored with models, so it may never change."""
    text = f"{column}\0{value}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def _checked(i: int, column: ContentColumn, value: object) -> str | float | list[str] | None:
    """A field's value in its column's type; None if it is missing. Raises InvalidQuery."""
    if column.kind == "number":
        if value is None or (isinstance(value, float) and not math.isfinite(value)):
            return None
        if not isinstance(value, int | float) or abs(value) > LARGEST_NUMBER:
            raise InvalidQuery(f"items[{i}].{column.name}", value, "a finite number, or nothing")
        return float(value)
    if value is None:
        return None
    if column.kind == "string":
        if not isinstance(value, str):
            raise InvalidQuery(f"items[{i}].{column.name}", value, "a string, or nothing")
        return value
    if not isinstance(value, list | tuple) or not all(entry is None or isinstance(entry, str) for entry in value):
        raise InvalidQuery(f"items[{i}].{column.name}", value, "a list of strings, or nothing")
    return [entry for entry in value if entry is not None]


def _check_values(info: ContentInfo, arrays: Mapping[str, Array]) -> None:
    value_arrays = {name: array for name, array in arrays.items() if not name.startswith(TEXT)}
    check_arrays(value_arrays, {"value_hash": np.uint64, "value_weight": np.float32})
    for name, array in value_arrays.items():
        check_length(name, array, info.values)
    hashes, weights = arrays["value_hash"], arrays["value_weight"]
    if (hashes[1:] <= hashes[:-1]).any():
        raise BundleCorrupt("content: value_hash does not ascend")
    if not ((weights >= 0) & (weights <= LARGEST_WEIGHT)).all():  # NaN fails too
        raise BundleCorrupt(f"content: value_weight has numbers outside 0 … {LARGEST_WEIGHT:g}")


def _vectoriser(info: ContentInfo, arrays: Mapping[str, Array]) -> Vectoriser | None:
    texts = {name.removeprefix(TEXT): array for name, array in arrays.items() if name.startswith(TEXT)}
    if not info.blocks:
        if texts:
            raise BundleCorrupt(f"content: arrays {sorted(texts)} of a vectoriser, and no blocks in the manifest")
        return None
    return Vectoriser.from_arrays(info.blocks, texts)
