"""Batches of item sequences for models that predict at every place of them: the next item, or several of those that follow.

Batches hold sequences of about one length, so that little padding is computed: a list of six items does not cost what the longest one
costs. Knows lists and their order. Does not know trees or models.

Legend: B sequences, T places, W windows, N places that are trained, P targets of a place.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from espalier.errors import InvalidData

from ...arrays import Int64
from ...data.interactions import Interactions


@dataclass(frozen=True)
class SequenceBatch:
    """int64[B, T], oldest first, −1 behind the last: at each place an item row and the row of the item after it.

    first_B   int64[B]: the first item's place among all events; the others follow it there
    events_E  int[E]: the item rows of all events, in the order of this epoch
    """

    history_BT: Int64
    target_BT: Int64
    first_B: Int64
    events_E: NDArray[np.integer]


class SequenceSource:
    """The lists of some users (int64 rows), those with at least two events.

    length  most places of a sequence. A longer list is cut into windows, elsewhere in each epoch, that hold every pair of neighbours once
    places  most places of a batch, padding included; at least one sequence is in it

    A list without an order is shuffled for each epoch.
    """

    def __init__(self, lists: Interactions, users: Int64, length: int, places: int, seed: int) -> None:
        self.lists, self.length, self.places, self.seed = lists, length, places, seed
        self.users = users[np.diff(lists.offset_U1)[users] >= 2]
        if len(self.users) == 0:
            raise InvalidData("log", f"{len(users)} training users", "at least one with two events or more")
        self.targets = int((np.diff(lists.offset_U1)[self.users] - 1).sum())

    def epoch(self, number: int) -> Iterator[SequenceBatch]:
        """The batches of one epoch, in random order; they depend on (seed, number) alone."""
        rng = np.random.default_rng([self.seed, 2, number])
        start_W, count_W = self._windows(rng)
        events_E = self._shuffled(rng) if self.lists.order == "none" else self.lists.item_of_event_E
        by_length_W = np.lexsort((rng.random(len(count_W)), np.minimum(count_W, self.length)))
        cuts = _cuts(np.minimum(count_W, self.length)[by_length_W], self.places)
        for batch in rng.permutation(len(cuts) - 1):
            chosen_B = by_length_W[cuts[batch] : cuts[batch + 1]]
            yield self._batch(events_E, start_W[chosen_B], count_W[chosen_B])

    def _windows(self, rng: np.random.Generator) -> tuple[Int64, Int64]:
        """(first event, places) of each window: a list's places are cut at every multiple of `length` after a random first cut."""
        start_U = self.lists.offset_U1[self.users]
        places_U = self.lists.offset_U1[self.users + 1] - start_U - 1
        first_U = np.where(places_U <= self.length, places_U, 1 + (rng.random(len(start_U)) * self.length).astype(np.int64))
        windows_U = 1 + -(-(places_U - first_U) // self.length)
        user_W = np.repeat(np.arange(len(windows_U)), windows_U)
        number_W = np.arange(len(user_W)) - np.repeat(np.cumsum(windows_U) - windows_U, windows_U)
        end_W = np.minimum(first_U[user_W] + number_W * self.length, places_U[user_W])
        begin_W = np.where(number_W == 0, 0, first_U[user_W] + (number_W - 1) * self.length)
        return start_U[user_W] + begin_W, end_W - begin_W

    def _shuffled(self, rng: np.random.Generator) -> NDArray[np.int32]:
        """int32[E]: the events, those of each list in another order."""
        user_E = np.repeat(np.arange(self.lists.user_count), np.diff(self.lists.offset_U1))
        return self.lists.item_of_event_E[np.lexsort((rng.random(len(user_E)), user_E))]

    def _batch(self, events_E: NDArray[np.integer], start_B: Int64, count_B: Int64) -> SequenceBatch:
        place_T = np.arange(min(int(count_B.max()), self.length) + 1)
        place_BT = np.where(place_T <= count_B[:, None], start_B[:, None] + place_T, -1)
        items_BT = np.where(place_BT >= 0, events_E[np.maximum(place_BT, 0)], -1).astype(np.int64)
        return SequenceBatch(np.where(items_BT[:, 1:] >= 0, items_BT[:, :-1], -1), items_BT[:, 1:], start_B, events_E)


def _cuts(length_W: Int64, places: int) -> list[int]:
    """Where ascending lengths are cut so that each part times its longest is at most `places`; a part holds at least one."""
    cuts = [0]
    while cuts[-1] < len(length_W):
        first = cuts[-1]
        # The longest of a part is its last: part size × length grows with the part, so the last that fits is searched for.
        size = np.arange(1, 1 + min(len(length_W) - first, max(1, places // max(1, int(length_W[first])))))
        fits = int(np.count_nonzero(size * length_W[first : first + len(size)] <= places))
        cuts.append(first + max(1, fits))
    return cuts


@dataclass(frozen=True)
class Places:
    """Some places of a batch, each before the first item or after one.

    sequence_N, place_N  int64[N]: which sequence, and how many items were read, 0 … T
    target_NP            int64[N, P]: item rows, nearest first; an item may stand there several times
    """

    sequence_N: Int64
    place_N: Int64
    target_NP: Int64

    def of(self, sequences: slice, inner_N: Int64) -> tuple[Places, Int64]:
        """The places of some sequences, numbered from their first, and where those of the ascending inner_N are among them."""
        first, stop = sequences.start, sequences.stop
        own_N = np.flatnonzero((self.sequence_N >= first) & (self.sequence_N < stop))
        inner = np.flatnonzero(np.isin(own_N, inner_N))
        return Places(self.sequence_N[own_N] - first, self.place_N[own_N], self.target_NP[own_N]), inner


def trained_places(
    lists: Interactions, batch: SequenceBatch, targets: int, nearness: float, cold_share: float, rng: np.random.Generator
) -> Places:
    """All places behind an item, and of those where a list begins as many as make `cold_share` of all, at random.

    targets   of a place. One is the next item; several are drawn from all items that follow in the list, systematically: with replacement,
              but each as often as it is likely to be, rounded up or down
    nearness  a: the chance of the d-th item that follows is in proportion to the integral of t^−a over d ± ½

    Before the first item, targets are any items of the list: a user without a history is not one at the start of theirs.
    """
    sequence_N, place_N = np.nonzero(batch.target_BT >= 0)
    place_N += 1
    begins = np.flatnonzero(lists.offset_U1[np.searchsorted(lists.offset_U1, batch.first_B)] == batch.first_B)
    cold = rng.permutation(begins)[: round(len(place_N) * cold_share / (1 - cold_share))]
    sequence_N, place_N = np.concatenate([np.sort(cold), sequence_N]), np.concatenate([np.zeros(len(cold), np.int64), place_N])
    next_N = batch.first_B[sequence_N] + place_N
    left_N = lists.offset_U1[np.searchsorted(lists.offset_U1, next_N, side="right")] - next_N
    share_NP = (np.arange(targets) + rng.random((len(next_N), 1))) / targets
    skipped_NP = np.zeros((len(next_N), 1), np.int64) if targets == 1 else _drawn(share_NP, left_N[:, None], nearness)
    skipped_NP[: len(cold)] = _drawn(share_NP[: len(cold)], left_N[: len(cold), None], 0.0)
    target_NP = batch.events_E[next_N[:, None] + skipped_NP].astype(np.int64)
    return Places(sequence_N, place_N, target_NP)


def _drawn(share: NDArray[np.float64], left: Int64, nearness: float) -> Int64:
    """How many items are skipped, 0 … left − 1: where shares (0 to 1) of the integral of t^−nearness from ½ to left + ½ end."""
    if abs(1 - nearness) < 1e-6:
        end = 0.5 * (2 * left + 1.0) ** share
    else:
        power = 1 - nearness
        end = (0.5**power + share * ((left + 0.5) ** power - 0.5**power)) ** (1 / power)
    return np.minimum(end - 0.5, left - 1).astype(np.int64)  # a share that was rounded to 1 ends behind the last
