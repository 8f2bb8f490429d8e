"""What a live item's leaf is made of in one tree, and where it hangs: immutable, and the same bytes for every process.

Knows numbers and their bytes. Does not know how a row is found (placement.py) nor what searches it.

Legend: D node row.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from espalier.errors import InvalidData

FORMAT = 1
MAX_NUMBERS = 1 << 20
"""Most numbers of a row, and most entries of a memory."""
HEAD = struct.Struct("<BBIIf")
"""Format, whether dense, count of numbers, bytes of the memory's JSON, bias."""
NO_FEATURES = np.empty(0, np.int32)

Entries = tuple[tuple[str, float], ...]


@dataclass(frozen=True, eq=False)
class LiveRow:
    """The row of a leaf.

    values       float32[D] of a model of graphs, or the weights of `feature` of a linear one
    feature      int32, ascending: features with a weight; empty for graphs
    bias         of a linear model
    dense        whether `values` are a node row
    memory_to    (item id, S[this item, that item]), what a history with this item lifts
    memory_from  (item id, S[that item, this item]), the items that lift this one
    """

    values: NDArray[np.float32]
    feature: NDArray[np.int32] = field(default_factory=lambda: NO_FEATURES)
    bias: float = 0.0
    dense: bool = True
    memory_to: Entries = ()
    memory_from: Entries = ()

    def __post_init__(self) -> None:
        if self.values.dtype != np.float32 or self.feature.dtype != np.int32 or self.values.ndim != 1 or self.feature.ndim != 1:
            raise InvalidData("row", f"{self.values.dtype} and {self.feature.dtype}", "float32 values and int32 features")
        if len(self.feature) != (0 if self.dense else len(self.values)) or len(self.values) > MAX_NUMBERS:
            raise InvalidData("row", f"{len(self.values)} values, {len(self.feature)} features", "a feature for each weight")
        numbers = (*(value for _, value in self.memory_to + self.memory_from), self.bias)
        if not np.isfinite(self.values).all() or not all(np.isfinite(number) for number in numbers):
            raise InvalidData("row", "a number that is not finite", "finite numbers")
        if any(value < 0 for _, value in self.memory_to + self.memory_from):
            raise InvalidData("row.memory", "a number below 0", "numbers of at least 0")
        if len(self.feature) and (self.feature[0] < 0 or bool(np.any(np.diff(self.feature) <= 0))):
            raise InvalidData("row.feature", self.feature[:8].tolist(), "ascending feature numbers")

    def to_bytes(self) -> bytes:
        memory = json.dumps([self.memory_to, self.memory_from]).encode() if self.memory_to or self.memory_from else b""
        head = HEAD.pack(FORMAT, int(self.dense), len(self.values), len(memory), self.bias)
        return head + self.feature.astype("<i4").tobytes() + self.values.astype("<f4").tobytes() + memory

    @staticmethod
    def from_bytes(data: bytes) -> LiveRow:
        """Raises InvalidData where the bytes are not what `to_bytes` made."""
        if len(data) < HEAD.size:
            raise InvalidData("row", f"{len(data)} bytes", f"at least {HEAD.size}")
        number, dense, count, memory_bytes, bias = HEAD.unpack_from(data)
        features = 0 if dense else count
        if number != FORMAT or count > MAX_NUMBERS or len(data) != HEAD.size + 4 * (features + count) + memory_bytes:
            raise InvalidData("row", f"format {number}, {len(data)} bytes", f"a row of format {FORMAT}")
        feature = np.frombuffer(data, "<i4", features, HEAD.size).astype(np.int32)
        values = np.frombuffer(data, "<f4", count, HEAD.size + 4 * features).astype(np.float32)
        to: Entries = ()
        of: Entries = ()
        if memory_bytes:
            try:
                to, of = (tuple((str(item), float(value)) for item, value in entries) for entries in json.loads(data[-memory_bytes:]))
            except (ValueError, TypeError) as error:
                raise InvalidData("row.memory", "something else", "pairs of ids and numbers") from error
        return LiveRow(values, feature, float(bias), bool(dense), to, of)


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
