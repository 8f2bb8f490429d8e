"""Writes lists without held-out events to a file beside the log's, and finds the points in time at which lists are cut.

Knows users, their events and times as the log's numbers. Does not know which events are held out, or why. Events are read in chunks, so
that a log of any size can be cut.

Legend: U users, E events.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np

from espalier.arrays import Bool, Int64
from espalier.errors import InvalidData
from espalier.logs.log_values import Stamps

from ..data import grouping
from ..data.grouping import user_chunks
from ..data.interactions import Interactions
from ..specification.splits import microseconds

EventMask = Callable[[slice], Bool]
"""A slice of the events of some whole users → whether each event stays."""

LISTS_FILE = "lists.int32"
"""Name, inside the work folder, of the file with the events of cut lists."""
MOST_TIMES = 1 << 24
"""Most times that are sorted in memory."""


def first_events(interactions: Interactions, count_U: Int64) -> EventMask:
    """A mask of the first `count_U` events of each user."""
    offset_U1 = interactions.offset_U1

    def is_first(events: slice) -> Bool:
        first, last = np.searchsorted(offset_U1, [events.start, events.stop]).tolist()
        end = offset_U1[first:last] + count_U[first:last]
        before: Bool = np.arange(events.start, events.stop) < np.repeat(end, np.diff(offset_U1[first : last + 1]))
        return before

    return is_first


def with_events(interactions: Interactions, event_mask: EventMask, work: Path) -> Interactions:
    """The same users and items with the events that the mask keeps, in a file under `work`."""
    offset_U1, count_U = interactions.offset_U1, np.zeros(interactions.user_count, np.int64)
    with tempfile.NamedTemporaryFile(dir=work, prefix=".reading-", delete=False) as file:
        for first, last in user_chunks(offset_U1, grouping.CHUNK):
            events = slice(int(offset_U1[first]), int(offset_U1[last]))
            if events.start < events.stop:
                kept_E = event_mask(events)
                interactions.item_of_event_E[events][kept_E].tofile(file)
                count_U[first:last] = counts_by_user(kept_E, offset_U1[first : last + 1])
    if not count_U.any():
        Path(file.name).unlink()
        raise InvalidData("log", f"{interactions.event_count} events, all held out", "data.split that leaves events to learn from")
    os.replace(file.name, work / LISTS_FILE)  # replacing: an earlier result that still maps the old file stays intact
    return replace(
        interactions,
        offset_U1=np.concatenate([[0], np.cumsum(count_U)]).astype(np.int64),
        item_of_event_E=np.memmap(work / LISTS_FILE, np.int32, mode="r"),
        time_of_event_E=None,
    )


def counts_by_user(true_E: Bool, offset: Int64) -> Int64:
    """How many events of each user are true. `true_E` has the events offset[0] … offset[−1] − 1."""
    before = np.concatenate([[0], np.cumsum(true_E)])
    counts: Int64 = np.diff(before[offset - offset[0]]).astype(np.int64)
    return counts


def events_before(interactions: Interactions, time_E: Stamps, moment: int | float) -> Int64:
    """int64[U]: how many of a user's events, which are in time order, are before a moment."""
    count_U = np.zeros(interactions.user_count, np.int64)
    for first, last in user_chunks(interactions.offset_U1, grouping.CHUNK):
        offset = interactions.offset_U1[first : last + 1]
        count_U[first:last] = counts_by_user(time_E[offset[0] : offset[-1]] < moment, offset)
    return count_U


def moment_of(value: int | float | str | None, time_E: Stamps, share: float) -> int | float:
    """A configured time, or the time before which a `share` of the events is, in the log's numbers. Of more than MOST_TIMES events, evenly
    spaced ones are counted."""
    if value is None:
        sample = np.sort(time_E[:: -(-len(time_E) // MOST_TIMES)])
        moment: int | float = sample[min(int(share * len(sample)), len(sample) - 1)].item()
        return moment
    return microseconds(value) if isinstance(value, str) else value


def iso(moment: int) -> str:
    return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=moment)).isoformat()
