"""The query kinds and how a batch of them becomes arrays.

Knows `history` (item ids, oldest first) and `vector` (a dense vector). Does not know what a model makes of them.

Legend: B queries, T history length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from espalier.errors import InvalidQuery
from espalier.items import ItemTable

MAX_HISTORY = 4096
"""The longest history that a model may take."""

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
    width: int = Field(ge=1, le=65536)


QueryKind = Annotated[HistoryKind | VectorKind, Field(discriminator="kind")]


@dataclass(frozen=True)
class QueryBatch:
    """A batch of queries as the engine takes it.

    kind    the model's query kind
    array   history: int64[B, T] item rows, right-aligned (the newest last), PADDING in front;
            vector: float32[B, width]
    """

    kind: HistoryKind | VectorKind
    array: NDArray[np.int64] | NDArray[np.float32]

    def __post_init__(self) -> None:
        width, dtype = (self.kind.length, np.int64) if isinstance(self.kind, HistoryKind) else (self.kind.width, np.float32)
        if self.array.ndim != 2 or self.array.shape[1] != width or self.array.dtype != dtype:
            raise InvalidQuery("queries", f"{self.array.dtype}{list(self.array.shape)}", f"{np.dtype(dtype)}[B, {width}]")

    def __len__(self) -> int:
        return len(self.array)

    def check(self, items: int) -> None:
        """Raise InvalidQuery when a history has an item row that a catalogue of `items` items lacks."""
        if isinstance(self.kind, HistoryKind) and self.array.size and not (self.array.min() >= PADDING and self.array.max() < items):
            bad = int(self.array.max() if self.array.max() >= items else self.array.min())
            raise InvalidQuery("queries", bad, f"item rows from 0 to {items - 1}, or {PADDING} as padding")

    def take(self, rows: NDArray[np.int64]) -> QueryBatch:
        """The queries at `rows` (int64)."""
        return QueryBatch(self.kind, self.array[rows])


def blank_queries(kind: HistoryKind | VectorKind, batch: int) -> QueryBatch:
    """Empty histories or zero vectors, for warming up."""
    if isinstance(kind, HistoryKind):
        return QueryBatch(kind, np.full((batch, kind.length), PADDING, np.int64))
    return QueryBatch(kind, np.zeros((batch, kind.width), np.float32))


def pad_histories(kind: HistoryKind, histories: Sequence[NDArray[np.int64]]) -> QueryBatch:
    """A batch from item rows, oldest first; entries below 0 (unknown items) are skipped, then the last T count."""
    array = np.full((len(histories), kind.length), PADDING, np.int64)
    for row, history in zip(array, histories, strict=True):
        known = history[history >= 0][-kind.length :]
        if len(known):
            row[-len(known) :] = known
    return QueryBatch(kind, array)


def encode_histories(kind: HistoryKind, items: ItemTable, histories: Sequence[Sequence[str]]) -> tuple[QueryBatch, list[NDArray[np.int64]]]:
    """A batch from item ids, and each history's item rows (−1 for an id that the catalogue does not have)."""
    if len(histories) == 1:
        rows = [items.rows_of(histories[0])]
    else:
        flat = items.rows_of([item_id for history in histories for item_id in history])
        rows = np.split(flat, np.cumsum([len(history) for history in histories])[:-1]) if histories else []
    return pad_histories(kind, rows), rows


def encode_vectors(kind: VectorKind, vectors: Sequence[Sequence[float]]) -> QueryBatch:
    """A batch from lists of numbers. Raises InvalidQuery (field `queries[i].vector`) on a wrong length or a number that is not finite."""
    array = np.empty((len(vectors), kind.width), np.float32)
    for i, vector in enumerate(vectors):
        if len(vector) != kind.width:
            raise InvalidQuery(f"queries[{i}].vector", f"{len(vector)} numbers", f"{kind.width} numbers")
        wide = np.asarray(vector, np.float64)
        bad = ~(np.abs(wide) <= np.finfo(np.float32).max)  # also true for NaN
        if bad.any():
            raise InvalidQuery(f"queries[{i}].vector", float(wide[bad][0]), "finite 32-bit numbers")
        array[i] = wide
    return QueryBatch(kind, array)
