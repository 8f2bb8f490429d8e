"""The query kinds, and batches of queries as arrays.

Knows `history` (item ids, oldest first), `vector` (dense), `features` (sparse) and `text`. Does not know models.

Legend: B queries, T history length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from espalier.arrays import Float32, Float64, Int64
from espalier.errors import InvalidQuery
from espalier.items import Items
from espalier.text.blocks import TextBlock
from espalier.text.sparse_rows import MAX_FEATURES, SparseRows, concatenated
from espalier.text.vectoriser import Vectoriser

MAX_HISTORY = 4096
"""The longest history that a model may take."""

MAX_VECTOR_WIDTH = 65_536
"""The widest dense vector that a model may take."""

PADDING = -1
"""Item row of an empty history slot."""


class HistoryKind(BaseModel):
    """Histories of item ids, oldest first; the last `length` known ones count."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    kind: Literal["history"] = "history"
    length: int = Field(ge=1, le=MAX_HISTORY)


class VectorKind(BaseModel):
    """Dense vectors of `width` finite numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    kind: Literal["vector"] = "vector"
    width: int = Field(ge=1, le=MAX_VECTOR_WIDTH)


class FeaturesKind(BaseModel):
    """Sparse vectors of `width` features: feature numbers with their values.

    unit  a query is divided by its length (L2) before it is searched with, as training points were
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    kind: Literal["features"] = "features"
    width: int = Field(ge=1, le=MAX_FEATURES)
    unit: bool = False


class TextKind(BaseModel):
    """Texts, which the bundle's vectoriser turns into `width` features."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    kind: Literal["text"] = "text"
    width: int = Field(ge=1, le=MAX_FEATURES)
    blocks: tuple[TextBlock, ...] = Field(min_length=1)


Kind = HistoryKind | VectorKind | FeaturesKind | TextKind
QueryKind = Annotated[Kind, Field(discriminator="kind")]
KIND_NAMES: tuple[Literal["history", "vector", "features", "text"], ...] = ("history", "vector", "features", "text")


@dataclass(frozen=True)
class QueryBatch:
    """A batch of queries as the engine takes it.

    kind  the model's query kind
    rows  history: int64[B, T] item rows, right-aligned (the newest last), PADDING in front; vector: float32[B, width];
          features, text: SparseRows [B, width]
    """

    kind: Kind
    rows: Int64 | Float32 | SparseRows

    def __post_init__(self) -> None:
        if isinstance(self.kind, FeaturesKind | TextKind):
            if self.features.width != self.kind.width:
                raise InvalidQuery("queries", f"rows of {self.features.width} features", f"rows of {self.kind.width}")
            return
        width, dtype = (self.kind.length, np.int64) if isinstance(self.kind, HistoryKind) else (self.kind.width, np.float32)
        if self.array.ndim != 2 or self.array.shape[1] != width or self.array.dtype != dtype:
            raise InvalidQuery("queries", f"{self.array.dtype}{list(self.array.shape)}", f"{np.dtype(dtype)}[B, {width}]")

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def array(self) -> Int64 | Float32:
        """The rows of histories or vectors. Raises InvalidQuery for other kinds."""
        if isinstance(self.rows, SparseRows):
            raise InvalidQuery("queries", f"{self.kind.kind} queries", "histories or vectors")
        return self.rows

    @property
    def features(self) -> SparseRows:
        """The rows of features or texts. Raises InvalidQuery for other kinds."""
        if not isinstance(self.rows, SparseRows):
            raise InvalidQuery("queries", f"{self.kind.kind} queries", "features or texts")
        return self.rows

    def check(self, items: int) -> None:
        """Raise InvalidQuery when a history has an item row that a catalogue of `items` items lacks, or another query a number that is not
        finite, or a feature that the model lacks.
        """
        if isinstance(self.kind, HistoryKind):
            if self.array.size and not (self.array.min() >= PADDING and self.array.max() < items):
                bad = int(self.array.max() if self.array.max() >= items else self.array.min())
                raise InvalidQuery("queries", bad, f"item rows from 0 to {items - 1}, or {PADDING} as padding")
        elif isinstance(self.rows, SparseRows):
            self.rows.check_numbers()
        elif not (finite := np.isfinite(self.rows)).all():
            raise InvalidQuery("vector", float(self.rows[~finite][0]), "finite numbers")

    def take(self, rows: Int64) -> QueryBatch:
        """The queries at `rows` (int64)."""
        return QueryBatch(self.kind, self.rows.take(rows) if isinstance(self.rows, SparseRows) else self.rows[rows])

    def fits(self, other: QueryBatch) -> bool:
        """Whether one batch may have the queries of both batches, which are of the same model."""
        return type(self) is type(other)

    @staticmethod
    def joined(batches: Sequence[QueryBatch]) -> QueryBatch:
        """The queries of several batches that fit each other, one after the other."""
        return batches[0]._joined(batches)

    def _joined(self, batches: Sequence[Any]) -> QueryBatch:
        """`joined` for batches of this class."""
        if isinstance(self.kind, FeaturesKind | TextKind):
            return QueryBatch(self.kind, concatenated([batch.features for batch in batches]))
        return QueryBatch(self.kind, np.concatenate([batch.array for batch in batches]))


def blank_queries(kind: Kind, batch: int) -> QueryBatch:
    """Empty histories, zero vectors or rows without features, for warming up."""
    if isinstance(kind, FeaturesKind | TextKind):
        empty_rows = SparseRows(np.zeros(batch + 1, np.int64), np.empty(0, np.int32), np.empty(0, np.float32), kind.width)
        return QueryBatch(kind, empty_rows)
    if isinstance(kind, HistoryKind):
        return QueryBatch(kind, np.full((batch, kind.length), PADDING, np.int64))
    return QueryBatch(kind, np.zeros((batch, kind.width), np.float32))


def pad_histories(kind: HistoryKind, histories: Sequence[Int64]) -> QueryBatch:
    """A batch from item rows, oldest first; entries below 0 (unknown items) are skipped, then the last T count."""
    array = np.full((len(histories), kind.length), PADDING, np.int64)
    for row, history in zip(array, histories, strict=True):
        known_rows = history[history >= 0][-kind.length :]
        if len(known_rows):
            row[-len(known_rows) :] = known_rows
    return QueryBatch(kind, array)


def encode_histories(kind: HistoryKind, items: Items, histories: Sequence[Sequence[str]]) -> tuple[QueryBatch, list[Int64]]:
    """A batch from item ids, and each history's item rows (−1 for an id that the catalogue does not have)."""
    if len(histories) == 1:
        rows = [items.rows_of(histories[0])]
    else:
        all_rows = items.rows_of([item_id for history in histories for item_id in history])
        rows = np.split(all_rows, np.cumsum([len(history) for history in histories])[:-1]) if histories else []
    return pad_histories(kind, rows), rows


def encode_vectors(kind: VectorKind, vectors: Sequence[Sequence[float]]) -> QueryBatch:
    """A batch from lists of numbers. Raises InvalidQuery (field `queries[i].vector`) for a wrong length or a number that is not finite."""
    array = np.empty((len(vectors), kind.width), np.float32)
    for i, vector in enumerate(vectors):
        if len(vector) != kind.width:
            raise InvalidQuery(f"queries[{i}].vector", f"{len(vector)} numbers", f"{kind.width} numbers")
        array[i] = _in_32_bits(f"queries[{i}].vector", vector)
    return QueryBatch(kind, array)


def encode_features(kind: FeaturesKind, queries: Sequence[tuple[Sequence[int], Sequence[float]]]) -> QueryBatch:
    """A batch from (feature numbers, values) pairs, in any order of the numbers. Values that are 0 as float32 count as absent.

    Raises InvalidQuery (field `queries[i].features.…`) for different lengths, a number that the model lacks or that is repeated, and a
    value that is not finite.
    """
    counts = [len(indices) for indices, _ in queries]
    indptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    indices, values = np.empty(indptr[-1], np.int32), np.empty(indptr[-1], np.float32)
    for i, (feature_numbers, weights) in enumerate(queries):
        field = f"queries[{i}].features"
        if len(feature_numbers) != len(weights):
            raise InvalidQuery(f"{field}.values", f"{len(weights)} numbers", f"{len(feature_numbers)}, one for each index")
        if not len(feature_numbers):
            continue
        low, high = min(feature_numbers), max(feature_numbers)  # as Python integers: some do not fit into NumPy's
        if low < 0 or high >= kind.width:
            raise InvalidQuery(f"{field}.indices", int(high if high >= kind.width else low), f"feature numbers from 0 to {kind.width - 1}")
        numbers, wide = np.asarray(feature_numbers, np.int64), _in_32_bits(f"{field}.values", weights)
        order = np.argsort(numbers, kind="stable")
        numbers = numbers[order]
        repeated = numbers[1:] == numbers[:-1]
        if repeated.any():
            raise InvalidQuery(f"{field}.indices", int(numbers[1:][repeated][0]), "each feature number once")
        indices[indptr[i] : indptr[i + 1]], values[indptr[i] : indptr[i + 1]] = numbers, wide[order]
    rows = SparseRows(indptr, indices, values, kind.width).without_zeros()
    return QueryBatch(kind, rows.normalised() if kind.unit else rows)


def _in_32_bits(field: str, numbers: Sequence[float]) -> Float64:
    """The numbers as an array. Raises InvalidQuery for a number that no finite float32 holds."""
    wide = np.asarray(numbers, np.float64)
    too_large = ~(np.abs(wide) <= np.finfo(np.float32).max)  # also true for NaN
    if too_large.any():
        raise InvalidQuery(field, float(wide[too_large][0]), "finite 32-bit numbers")
    return wide


def encode_texts(kind: TextKind, vectoriser: Vectoriser, texts: Sequence[str]) -> QueryBatch:
    """A batch from texts."""
    return QueryBatch(kind, vectoriser.transform(texts))
