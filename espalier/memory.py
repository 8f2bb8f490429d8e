"""The memory of a bundle: which items occur together, and what that adds to an item's key.

    mem(leaf of item b) = Σ_d w_d · S[h_d, b] + r(b), h_d the d-th last item of the history, d = 0 … length − 1
    mem(inner node)     = the largest mem of the eligible leaves below it, 0 where none has any
    key(n)              = rank(n) + λ · mem(n)

r(b), the repeat term, is 0 for items outside the history. For an item of the history it is a sum over its occurrences; each adds a number
that depends on how many items came after it. These numbers of items are grouped in buckets. An item is excluded, as if the query excluded
it, if the bucket of its last occurrence is left out.

Beams are cut and leaves ordered by key; only the rank is passed down the tree. This module has the arrays and their checks.
`memory_lists.py` computes mem for a history.

Histories may hold any item, so a shard has entries for every item of the whole bundle, but only those that lead to the shard's items: h is
an item row of the whole bundle, b one of the shard.

Legend: I items, E entries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from espalier.arrays import Array, Bool, Float32, Int32, Int64, read_only
from espalier.errors import BundleCorrupt
from espalier.manifest import LARGEST, MemoryFormula, MemoryInfo
from espalier.queries import MAX_HISTORY
from espalier.stored_arrays import Dtypes, check_arrays, check_length, check_rows

MAX_ROW = 4096
"""Most entries of an item. A query adds up at most `length` rows."""
MAX_VISITS = 1 << 20
"""Most entries that a query may add up: history length times the entries of the longest item. Some 70 ms."""
LARGEST_VALUE = float(np.finfo(np.float16).max)
BUCKETS = 6
"""Buckets of how many items came after an occurrence: 0, 1, 2–3, 4–7, 8–15, 16 and more."""
NO_REPEAT, NONE_LEFT_OUT = read_only(np.zeros(BUCKETS, np.float32), np.zeros(BUCKETS, np.bool_))
DTYPES: Dtypes = {"offset": np.int64, "item": np.int32, "value": np.float16, "weight": np.float32}
"""The arrays of memory.safetensors."""


@dataclass(frozen=True, eq=False)
class Memory:
    """S by item, sparse, and the weights of the positions of a history.

    offset      int64[I + 1]: the entries of item a are offset[a] … offset[a + 1] − 1
    item        int32[E]: item rows, ascending within the entries of an item
    value       float16[E]: S[a, item] ≥ 0
    weight      float32[length]: w_d ≥ 0, for d = 0, the last item of a history, and so on
    key_weight  λ > 0
    repeat      float32[BUCKETS]: what an occurrence adds to r, by its bucket; ≥ 0
    left_out    bool[BUCKETS]: whether an item is excluded, by the bucket of its last occurrence
    formula     how S was computed from lists of items; None: unknown
    """

    offset: Int64
    item: Int32
    value: NDArray[np.float16]
    weight: Float32
    key_weight: float
    repeat: Float32 = field(default_factory=lambda: NO_REPEAT)
    left_out: Bool = field(default_factory=lambda: NONE_LEFT_OUT)
    formula: MemoryFormula | None = None

    @staticmethod
    def of_arrays(arrays: Mapping[str, Array], info: MemoryInfo, items: int, sources: int) -> Memory:
        """The memory of a bundle's arrays, checked; items and sources as in `check`. Raises BundleCorrupt."""
        check_arrays(arrays, DTYPES)
        check_length("weight", arrays["weight"], info.length)
        check_length("item", arrays["item"], info.entries)
        repeat, left_out = np.array(info.occurrence, np.float32), np.array(info.left_out)
        memory = Memory(**arrays, key_weight=info.weight, repeat=repeat, left_out=left_out, formula=info.formula)
        memory.check(items, sources)
        return memory

    @property
    def info(self) -> MemoryInfo:
        """The manifest's entry."""
        return MemoryInfo(
            weight=self.key_weight,
            length=len(self.weight),
            entries=len(self.item),
            occurrence=tuple(self.repeat.tolist()),
            left_out=tuple(self.left_out.tolist()),
            formula=self.formula,
        )

    def sources(self, history_T: Array, item: int, value_of: Callable[[int], float] | None = None) -> list[tuple[int, float]]:
        """The items of a history that raise an item's key, with the terms λ · Σ w_d · S that they add, largest first.

        history_T  item rows, the last item last; −1: no item
        value_of   source → S[source, item]; None: `self.value_of`
        """
        terms: dict[int, float] = {}
        items_T = history_T[history_T >= 0][::-1]
        for source, weight in zip(items_T.tolist(), self.weight.tolist(), strict=False):
            terms[source] = terms.get(source, 0.0) + self.key_weight * weight * (
                value_of(source) if value_of else self.value_of(source, item)
            )
        for position in np.flatnonzero(items_T == item).tolist():
            terms[item] = terms.get(item, 0.0) + self.key_weight * float(self.repeat[bucket_of(position)])
        return sorted(((source, term) for source, term in terms.items() if term > 0), key=lambda entry: -entry[1])

    def leaves_out(self, history_T: Array, item: int) -> bool:
        """Whether an item of a history is excluded, because its bucket is left out."""
        positions = np.flatnonzero(history_T[history_T >= 0][::-1] == item)
        return len(positions) > 0 and bool(self.left_out[bucket_of(int(positions[0]))])

    def value_of(self, source: int, item: int) -> float:
        """S[source, item]."""
        begin, end = self.offset[source : source + 2]
        entry = begin + np.searchsorted(self.item[begin:end], item)
        return float(self.value[entry]) if entry < end and self.item[entry] == item else 0.0

    def bounded(self) -> Memory:
        """The memory with only the largest entries of items that have more than a bundle may hold; ties go to the lower item row."""
        count = np.diff(self.offset)
        most = min(MAX_ROW, MAX_VISITS // len(self.weight))
        if count.max(initial=0) <= most:
            return self
        source = np.repeat(np.arange(len(count)), count)
        order = np.lexsort((-self.value, source))
        kept_entries = np.sort(order[np.arange(len(order)) - self.offset[source] < most])
        offset = np.append(0, np.cumsum(np.minimum(count, most)))
        return replace(self, offset=offset, item=self.item[kept_entries], value=self.value[kept_entries])

    def arrays(self) -> dict[str, Array]:
        """By their names in memory.safetensors."""
        return {name: getattr(self, name) for name in DTYPES}

    def check(self, items: int, sources: int | None = None) -> None:
        """Raise BundleCorrupt unless the arrays are a valid memory of `items` items.

        sources  number of items that may be in a history: for a shard, those of the whole bundle; None: `items`
        Neither mem nor λ · mem may come near the largest float32.
        """
        check_arrays(self.arrays(), DTYPES)
        check_rows("item", self.item, self.offset, items if sources is None else sources, items)
        check_length("value", self.value, len(self.item))
        if not np.all((self.value >= 0) & np.isfinite(self.value)):
            raise BundleCorrupt("value: expected finite numbers of at least 0")
        longest = int(np.diff(self.offset).max())
        if longest > MAX_ROW:
            raise BundleCorrupt(f"offset: {longest} entries of an item, at most {MAX_ROW} expected")
        if not len(self.weight) or not np.all((self.weight >= 0) & np.isfinite(self.weight)):
            raise BundleCorrupt("weight: expected at least one, finite and at least 0")
        if len(self.weight) * longest > MAX_VISITS:
            raise BundleCorrupt(f"weight: {len(self.weight)} places over rows of up to {longest} entries, at most {MAX_VISITS} together")
        largest_mem = float(self.weight.sum(dtype=np.float64)) * float(self.value.max(initial=0))
        largest_mem += MAX_HISTORY * float(self.repeat.max())
        for quantity, largest in (("", largest_mem), ("key_weight · ", self.key_weight * largest_mem)):
            if not largest <= LARGEST / 2:
                raise BundleCorrupt(f"value: {quantity}sums of weight · value reach {largest:.3g}, expected at most {LARGEST / 2:.3g}")


def bucket_of(position: int) -> int:
    """The bucket for a number of items after an occurrence (`position`, from the end of the history)."""
    return min(position.bit_length(), BUCKETS - 1)


def as_stored(value: float) -> float:
    """A value rounded as a memory stores it, so that a live entry counts as much as after a fold."""
    return float(np.float16(min(value, LARGEST_VALUE)))
