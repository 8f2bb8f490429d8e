"""Batches of item sequences for models that predict at every position: the next item, or several of the items that follow.

A batch holds sequences of about one length, so that it has little padding: a list of six items costs less than the longest one. Knows lists
and their order. Does not know trees or models.

Legend: B sequences, T positions, W windows, N positions that are trained, P targets of a position.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from espalier.arrays import Float64, Int32, Int64
from espalier.errors import InvalidData

from ...data.interactions import Interactions


@dataclass(frozen=True)
class SequenceBatch:
    """int64[B, T], oldest first, −1 after the last: at each position an item row (history_BT) and the next item's row (target_BT).

    first_B   int64[B]: the first item's position among all events; the others follow it there
    events_E  int[E]: the item rows of all events, in the order of this epoch
    """

    history_BT: Int64
    target_BT: Int64
    first_B: Int64
    events_E: NDArray[np.integer]


class SequenceSource:
    """The lists of some users (int64 rows), those with at least two events.

    length  most positions of a sequence. A longer list is cut into windows, elsewhere in each epoch; every pair of neighbours is in one
    places  most positions of a batch, padding included; a batch has at least one sequence

    A list without an order is shuffled for each epoch.
    """

    def __init__(self, lists: Interactions, users: Int64, length: int, places: int, seed: int) -> None:
        self.lists, self.length, self.places, self.seed = lists, length, places, seed
        self.users = users[np.diff(lists.offset_U1)[users] >= 2]
        if len(self.users) == 0:
            raise InvalidData("log", f"{len(users)} training users", "at least one with two events or more")
        self.targets = int((np.diff(lists.offset_U1)[self.users] - 1).sum())

    def epoch(self, number: int) -> Iterator[SequenceBatch]:
        """The batches of one epoch, in random order; they depend only on (seed, number)."""
        rng = np.random.default_rng([self.seed, 2, number])
        start_W, count_W = self._windows(rng)
        events_E = self._shuffled(rng) if self.lists.order == "none" else self.lists.item_of_event_E
        by_length_W = np.lexsort((rng.random(len(count_W)), np.minimum(count_W, self.length)))
        cuts = _cuts(np.minimum(count_W, self.length)[by_length_W], self.places)
        for batch in rng.permutation(len(cuts) - 1):
            chosen_B = by_length_W[cuts[batch] : cuts[batch + 1]]
            yield self._batch(events_E, start_W[chosen_B], count_W[chosen_B])

    def _windows(self, rng: np.random.Generator) -> tuple[Int64, Int64]:
        """(first event, positions) of each window: a list is cut at every multiple of `length` after a random first cut."""
        start_U = self.lists.offset_U1[self.users]
        places_U = self.lists.offset_U1[self.users + 1] - start_U - 1
        first_U = np.where(places_U <= self.length, places_U, 1 + (rng.random(len(start_U)) * self.length).astype(np.int64))
        windows_U = 1 + -(-(places_U - first_U) // self.length)
        user_W = np.repeat(np.arange(len(windows_U)), windows_U)
        number_W = np.arange(len(user_W)) - np.repeat(np.cumsum(windows_U) - windows_U, windows_U)
        end_W = np.minimum(first_U[user_W] + number_W * self.length, places_U[user_W])
        begin_W = np.where(number_W == 0, 0, first_U[user_W] + (number_W - 1) * self.length)
        return start_U[user_W] + begin_W, end_W - begin_W

    def _shuffled(self, rng: np.random.Generator) -> Int32:
        """int32[E]: the events, those of each list in another order."""
        user_E = np.repeat(np.arange(self.lists.user_count), np.diff(self.lists.offset_U1))
        return self.lists.item_of_event_E[np.lexsort((rng.random(len(user_E)), user_E))]

    def _batch(self, events_E: NDArray[np.integer], start_B: Int64, count_B: Int64) -> SequenceBatch:
        position_T = np.arange(min(int(count_B.max()), self.length) + 1)
        position_BT = np.where(position_T <= count_B[:, None], start_B[:, None] + position_T, -1)
        items_BT = np.where(position_BT >= 0, events_E[np.maximum(position_BT, 0)], -1).astype(np.int64)
        return SequenceBatch(np.where(items_BT[:, 1:] >= 0, items_BT[:, :-1], -1), items_BT[:, 1:], start_B, events_E)


def _cuts(length_W: Int64, places: int) -> list[int]:
    """Cuts ascending lengths so that the size of each part times its longest length is at most `places`; a part holds at least one."""
    cuts = [0]
    while cuts[-1] < len(length_W):
        first = cuts[-1]
        # The longest of a part is its last, so size × length grows with the part: take the largest part that fits.
        size = np.arange(1, 1 + min(len(length_W) - first, max(1, places // max(1, int(length_W[first])))))
        fits = int(np.count_nonzero(size * length_W[first : first + len(size)] <= places))
        cuts.append(first + max(1, fits))
    return cuts


@dataclass(frozen=True)
class TrainedPositions:
    """The positions of a batch at which the model is trained, each before the first item or after one.

    sequence_N, position_N  int64[N]: the sequence, and how many of its items the model has read, 0 … T
    target_NP               int64[N, P]: item rows, nearest first; an item may be there several times
    """

    sequence_N: Int64
    position_N: Int64
    target_NP: Int64

    def of(self, sequences: slice, inner_N: Int64) -> tuple[TrainedPositions, Int64]:
        """The positions of some sequences, numbered from their first, and the indices of those that are in the ascending inner_N."""
        first, stop = sequences.start, sequences.stop
        member_N = np.flatnonzero((self.sequence_N >= first) & (self.sequence_N < stop))
        inner_members = np.flatnonzero(np.isin(member_N, inner_N))
        return TrainedPositions(self.sequence_N[member_N] - first, self.position_N[member_N], self.target_NP[member_N]), inner_members


def trained_positions(
    lists: Interactions, batch: SequenceBatch, targets: int, nearness: float, cold_share: float, rng: np.random.Generator
) -> TrainedPositions:
    """All positions after an item, and random ones where a list begins, so that these make `cold_share` of all.

    targets   of a position. One target is the next item. Several are a systematic sample with replacement of the items that follow in the
              list: each is drawn as often as expected, rounded up or down
    nearness  a: the chance of the d-th item that follows is in proportion to the integral of t^−a over d ± ½

    Before the first item, targets are any items of the list: a user without a history may be anywhere in a list.
    """
    sequence_N, position_N = np.nonzero(batch.target_BT >= 0)
    position_N += 1
    begins = np.flatnonzero(lists.offset_U1[np.searchsorted(lists.offset_U1, batch.first_B)] == batch.first_B)
    cold = rng.permutation(begins)[: round(len(position_N) * cold_share / (1 - cold_share))]
    sequence_N, position_N = np.concatenate([np.sort(cold), sequence_N]), np.concatenate([np.zeros(len(cold), np.int64), position_N])
    next_N = batch.first_B[sequence_N] + position_N
    remaining_N = lists.offset_U1[np.searchsorted(lists.offset_U1, next_N, side="right")] - next_N
    share_NP = (np.arange(targets) + rng.random((len(next_N), 1))) / targets
    skipped_NP = np.zeros((len(next_N), 1), np.int64) if targets == 1 else _skip_counts(share_NP, remaining_N[:, None], nearness)
    skipped_NP[: len(cold)] = _skip_counts(share_NP[: len(cold)], remaining_N[: len(cold), None], 0.0)
    target_NP = batch.events_E[next_N[:, None] + skipped_NP].astype(np.int64)
    return TrainedPositions(sequence_N, position_N, target_NP)


def _skip_counts(share: Float64, remaining: Int64, nearness: float) -> Int64:
    """How many items are skipped, 0 … remaining − 1: where shares (0 to 1) of the integral of t^−nearness from ½ to remaining + ½ end."""
    if abs(1 - nearness) < 1e-6:
        end = 0.5 * (2 * remaining + 1.0) ** share
    else:
        power = 1 - nearness
        end = (0.5**power + share * ((remaining + 0.5) ** power - 0.5**power)) ** (1 / power)
    return np.minimum(end - 0.5, remaining - 1).astype(np.int64)  # a share that was rounded to 1 would skip all
