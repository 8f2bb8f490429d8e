"""The row of a live item's leaf in one tree, and its placement: immutable, with the same bytes in every process.

Knows numbers and their bytes. Does not know how a row is computed (espalier.placement) nor who searches it.

Legend: D node row.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field

import numpy as np
import orjson

from espalier.arrays import Float32, Int32
from espalier.errors import InvalidData
from espalier.label_counts import MAX_COUNT

FORMAT = 2
MAX_NUMBERS = 1 << 20
"""Most numbers of a row, and most entries of a memory."""
HEAD = struct.Struct("<BBIIIfd")
"""Format, whether dense, count of numbers, count of numbers of the tail, bytes of the memory's JSON, bias, count of events."""
TAIL_TOLERANCE = 1e-3
"""How far a tail row's squared length may be from 1, as in a bundle."""
NO_FEATURES, NO_VALUES = np.empty(0, np.int32), np.empty(0, np.float32)

Entries = tuple[tuple[str, float], ...]


@dataclass(frozen=True, eq=False)
class LiveRow:
    """The row of a leaf.

    values       float32[D] of a model of graphs, or the weights of `feature` of a linear one
    feature      int32, ascending: features with a weight; empty for graphs
    bias         of a linear model
    dense        whether `values` are a node row
    memory_to    (item id, S[this item, that item]): the items that a history with this item lifts
    memory_from  (item id, S[that item, this item]): the items that lift this one
    tail_feature, tail_value  int32 ascending, float32, of length 1 or empty: the item's features, where a bundle has a tail; only in the
                              row of the first tree
    count        assumed number of events of the item, of a model of graphs
    """

    values: Float32
    feature: Int32 = field(default_factory=lambda: NO_FEATURES)
    bias: float = 0.0
    dense: bool = True
    memory_to: Entries = ()
    memory_from: Entries = ()
    tail_feature: Int32 = field(default_factory=lambda: NO_FEATURES)
    tail_value: Float32 = field(default_factory=lambda: NO_VALUES)
    count: float = 0.0

    def __post_init__(self) -> None:
        if self.values.dtype != np.float32 or self.feature.dtype != np.int32 or self.values.ndim != 1 or self.feature.ndim != 1:
            raise InvalidData("row", f"{self.values.dtype} and {self.feature.dtype}", "float32 values and int32 features")
        if len(self.feature) != (0 if self.dense else len(self.values)) or len(self.values) > MAX_NUMBERS:
            raise InvalidData("row", f"{len(self.values)} values, {len(self.feature)} features", "a feature for each weight")
        memory = [value for _, value in self.memory_to + self.memory_from]
        if not np.isfinite(self.values).all() or not all(map(math.isfinite, (*memory, self.bias))):
            raise InvalidData("row", "a number that is not finite", "finite numbers")
        if memory and min(memory) < 0:
            raise InvalidData("row.memory", "a number below 0", "numbers of at least 0")
        if not 0 <= self.count <= MAX_COUNT:
            raise InvalidData("row.count", self.count, f"a number from 0 to {MAX_COUNT}")
        _check_ascending("row.feature", self.feature)
        self._check_tail()

    def _check_tail(self) -> None:
        feature, value = self.tail_feature, self.tail_value
        if feature.dtype != np.int32 or value.dtype != np.float32 or feature.shape != value.shape or not len(value) <= MAX_NUMBERS:
            raise InvalidData("row.tail", f"{value.dtype}{list(value.shape)}, {feature.dtype}{list(feature.shape)}", "a value by feature")
        if not len(value):
            return
        _check_ascending("row.tail_feature", feature)
        square = float((value.astype(np.float64) ** 2).sum())
        if not abs(square - 1) <= TAIL_TOLERANCE:
            raise InvalidData("row.tail_value", f"a row of squared length {square:.4g}", "a row of length 1, or no entry")

    @property
    def numbers(self) -> int:
        """How many numbers the row holds, without its memory."""
        return len(self.values) + len(self.tail_value)

    def to_bytes(self) -> bytes:
        memory = orjson.dumps([self.memory_to, self.memory_from]) if self.memory_to or self.memory_from else b""
        head = HEAD.pack(FORMAT, int(self.dense), len(self.values), len(self.tail_value), len(memory), self.bias, self.count)
        arrays = (self.feature, "<i4"), (self.values, "<f4"), (self.tail_feature, "<i4"), (self.tail_value, "<f4")
        return b"".join([head, *(array.astype(dtype).tobytes() for array, dtype in arrays), memory])

    @staticmethod
    def from_bytes(data: bytes) -> LiveRow:
        """Raises InvalidData for bytes that `to_bytes` did not make."""
        if len(data) < HEAD.size:
            raise InvalidData("row", f"{len(data)} bytes", f"at least {HEAD.size}")
        format_number, dense, count, tail, memory_bytes, bias, events = HEAD.unpack_from(data)
        features = 0 if dense else count
        numbers = features + count + 2 * tail
        if format_number != FORMAT or max(count, tail) > MAX_NUMBERS or len(data) != HEAD.size + 4 * numbers + memory_bytes:
            raise InvalidData("row", f"format {format_number}, {len(data)} bytes", f"a row of format {FORMAT}")
        begins = HEAD.size, HEAD.size + 4 * features, HEAD.size + 4 * (features + count), HEAD.size + 4 * (features + count + tail)
        feature = np.frombuffer(data, "<i4", features, begins[0]).astype(np.int32) if features else NO_FEATURES
        values = np.frombuffer(data, "<f4", count, begins[1]).astype(np.float32)
        tail_feature = np.frombuffer(data, "<i4", tail, begins[2]).astype(np.int32) if tail else NO_FEATURES
        tail_value = np.frombuffer(data, "<f4", tail, begins[3]).astype(np.float32) if tail else NO_VALUES
        memory_to: Entries = ()
        memory_from: Entries = ()
        if memory_bytes:
            try:
                memories = orjson.loads(data[-memory_bytes:])
                memory_to, memory_from = (tuple((str(item), float(value)) for item, value in entries) for entries in memories)
            except (ValueError, TypeError) as error:
                raise InvalidData("row.memory", "something else", "pairs of ids and numbers") from error
        return LiveRow(values, feature, float(bias), bool(dense), memory_to, memory_from, tail_feature, tail_value, events)


def _check_ascending(name: str, feature: Int32) -> None:
    if len(feature) and (feature[0] < 0 or bool(np.any(feature[1:] <= feature[:-1]))):
        raise InvalidData(name, feature[:8].tolist(), "ascending feature numbers")


@dataclass(frozen=True, eq=False)
class Placement:
    """A live item's leaf in one tree.

    tree    its number, from 0
    parent  node of the level above the leaves
    slot    its position among the parent's children in a fold
    """

    tree: int
    parent: int
    slot: int
    row: LiveRow
