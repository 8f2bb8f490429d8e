"""JTM's training samples: events of training users with the history before them.

Knows interactions. Does not know trees or scorers.

Legend: S samples, B samples of a block, U users, I items, T history.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from espalier.arrays import Bool, Float32, Int32, Int64
from espalier.errors import InvalidData

from ..data.interactions import Interactions
from ..deep.instances import QueryRows

ROWS = 1 << 15
"""Histories that are made at a time."""
KEYS = 1 << 20
"""Random keys that are held at a time, one for each event of a list without an order."""


@dataclass(frozen=True)
class Samples:
    """Training samples, in ascending order of their targets.

    history_ST  int32[S, T]: item rows, newest last, −1 = padding
    target_S    int64[S]: the targets, numbered from 0; item rows if all items are targets
    query_S     int64[S]: rows of vectors_UF float32[U, F], the queries if the log is of vectors; then T = 0
    """

    history_ST: Int32
    target_S: Int64
    query_S: Int64 | None = None
    vectors_UF: Float32 | None = None

    def queries(self, block: slice) -> QueryRows:
        """The queries of some samples."""
        if self.query_S is not None and self.vectors_UF is not None:
            return np.asarray(self.vectors_UF[self.query_S[block]])
        return self.history_ST[block].astype(np.int64)


def draw_samples(interactions: Interactions, users: Int64, length: int, most: int, *, seed: int, wanted_I: Bool | None = None) -> Samples:
    """Every event of `users` (pass training users) with the history before it, or `most` random ones; a first event is no sample.
    Where lists have no order: every event of a list of at least two, with a random part of the list's other events as its history.
    Where users are vectors: every event, with the vector.
    wanted_I  bool[I]: the items whose events are drawn; None: all items
    Raises InvalidData if no item has such an event; the items in wanted_I need not have any.
    """
    rng = np.random.default_rng([seed, 2])
    events = _NumberedEvents(interactions, users)
    if events.count == 0:
        raise InvalidData("log", f"{len(users)} training users", "at least one with two events or more")
    candidates = None if wanted_I is None else events.with_target(wanted_I)
    total = events.count if candidates is None else len(candidates)
    drawn_S = np.arange(total) if total <= most else rng.choice(total, most, replace=False, shuffle=False)
    user_S, event_S = events.user_and_event(drawn_S if candidates is None else candidates[drawn_S])
    target_S = np.asarray(interactions.item_of_event_E[event_S], np.int64)
    order = np.lexsort((event_S, target_S))
    if interactions.vectors_UF is not None:
        return Samples(np.zeros((len(order), 0), np.int32), target_S[order], users[user_S[order]], interactions.vectors_UF)
    begin_S, length_S, event_S = events.begin_U[user_S[order]], events.length_U[user_S[order]], event_S[order]
    history_ST = np.full((len(order), length), -1, np.int32)
    size = ROWS if interactions.order != "none" else max(1, min(ROWS, KEYS // int(length_S.max(initial=1))))
    for start in range(0, len(order), size):
        block = slice(start, start + size)
        if interactions.order == "none":
            event_BT = _other_events(rng, begin_S[block], length_S[block], event_S[block], length)
        else:
            event_BT = event_S[block, None] + np.arange(-length, 0)
            event_BT[event_BT < begin_S[block, None]] = -1
        history_ST[block] = np.where(event_BT >= 0, interactions.item_of_event_E[np.maximum(event_BT, 0)], -1)
    return Samples(history_ST, target_S[order])


class _NumberedEvents:
    """The events that can be samples, numbered user by user: 0 … count − 1."""

    def __init__(self, interactions: Interactions, users: Int64) -> None:
        self._item_of_event_E = interactions.item_of_event_E
        self.begin_U, self.length_U = interactions.offset_U1[users], np.diff(interactions.offset_U1)[users]
        first = 0 if interactions.order == "none" else 1  # without an order every event has others beside it
        least = 2 if interactions.vectors_UF is None else 1
        self._stop_U: Int64 = np.cumsum(np.where(self.length_U >= least, self.length_U - first, 0))
        self.count = int(self._stop_U[-1]) if len(users) else 0

    def user_and_event(self, number_S: Int64) -> tuple[Int64, Int64]:
        """User (a position in `users`) and event of each number."""
        user_S = np.searchsorted(self._stop_U, number_S, side="right")
        return user_S, self.begin_U[user_S] + self.length_U[user_S] - (self._stop_U[user_S] - number_S)

    def with_target(self, target_I: Bool) -> Int64:
        """The numbers of the events whose item is a target (bool[I]), ascending."""
        blocks = (np.arange(start, min(start + KEYS, self.count)) for start in range(0, self.count, KEYS))
        return np.concatenate([block[target_I[self._item_of_event_E[self.user_and_event(block)[1]]]] for block in blocks])


def _other_events(rng: np.random.Generator, begin_B: Int64, length_B: Int64, event_B: Int64, length: int) -> Int64:
    """int64[B, T]: some of the other events of each list, −1 in front: of n at least one and at most n − 1, and no more than T."""
    position_E = np.arange(length_B.max())
    key_BE = rng.random((len(begin_B), len(position_E)))
    key_BE[(position_E >= length_B[:, None]) | (position_E == (event_B - begin_B)[:, None])] = 2
    count_B = 1 + (rng.random(len(begin_B)) * (length_B - 1)).astype(np.int64)
    drawn_BX = np.argsort(key_BE, axis=1)[:, :length]
    drawn_BX = np.where(np.arange(drawn_BX.shape[1]) < count_B[:, None], begin_B[:, None] + drawn_BX, -1)
    return np.pad(drawn_BX[:, ::-1], ((0, 0), (length - drawn_BX.shape[1], 0)), constant_values=-1)
