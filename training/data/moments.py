"""Points in time among the events of a log: where they cut lists, and which one a share of the events lies before.

Knows times as the log's numbers. Timestamps are read in chunks, so that a log of any size has them.

Legend: U users, E events.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import numpy as np
from numpy.typing import NDArray

from training.data import grouping
from training.data.cut_lists import counts_by_user
from training.data.grouping import user_chunks
from training.data.interactions import Interactions
from training.data.log_values import Stamps
from training.specification.splits import microseconds

Int64 = NDArray[np.int64]


def events_before(interactions: Interactions, time_E: Stamps, moment: int | float) -> Int64:
    """int64[U]: how many of a user's events, which are in time order, lie before a moment."""
    count_U = np.zeros(interactions.user_count, np.int64)
    for first, last in user_chunks(interactions.offset_U1, grouping.CHUNK):
        offset = interactions.offset_U1[first : last + 1]
        count_U[first:last] = counts_by_user(time_E[offset[0] : offset[-1]] < moment, offset)
    return count_U


def moment_of(value: int | float | str | None, time_E: Stamps, share: float) -> int | float:
    """A configured time, or the time before which `share` of the events lie, in the log's numbers."""
    if value is None:
        return _nth_smallest(time_E, min(int(share * len(time_E)), len(time_E) - 1))
    return microseconds(value) if isinstance(value, str) else value


def _nth_smallest(values_E: Stamps, n: int) -> int | float:
    """The n-th smallest value, from 0, without a copy of all: bisection over int64 keys that are in the order of the values."""
    low, high = (int(_keys(np.array([extreme(values_E)]))[0]) for extreme in (np.min, np.max))
    while low < high:
        middle = (low + high) // 2
        chunks = (values_E[start : start + grouping.CHUNK] for start in range(0, len(values_E), grouping.CHUNK))
        if sum(int(np.count_nonzero(_keys(chunk) <= middle)) for chunk in chunks) > n:
            high = middle
        else:
            low = middle + 1
    key = np.array([low])
    if values_E.dtype == np.int64:
        return int(key[0])
    return float(np.where(key < 0, key ^ np.int64(2**63 - 1), key).view(np.float64)[0])


def _keys(values: Stamps) -> Int64:
    """Integers as they are; of floats their bits, those of negative numbers in reverse."""
    if values.dtype == np.int64:
        return np.asarray(values, np.int64)
    bits = np.ascontiguousarray(values).view(np.int64)
    return np.where(bits < 0, bits ^ np.int64(2**63 - 1), bits)


def iso(moment: int) -> str:
    return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=moment)).isoformat()
