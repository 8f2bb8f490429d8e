"""The places of a batch of sequences at which targets are predicted, and these targets: the next item, or several of those that follow.

Knows lists and batches. Does not know trees or models.

Legend: B sequences, T places after the start, X = T + 1, N places that are trained, P targets of a place.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...data.interactions import Interactions
from ...deep.sequence.batches import SequenceBatch

Int64 = NDArray[np.int64]


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
