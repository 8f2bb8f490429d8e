"""The places of a batch of sequences at which targets are predicted, and these targets: the next item, or several later ones.

Knows lists and batches. Does not know trees or models.

Legend: B sequences, T places after the start, X = T + 1, N places that are trained, P targets of a place.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from training.data.interactions import Interactions
from training.deep.sequence.batches import SequenceBatch

Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class Places:
    """Some places of a batch, each before the first item or after one.

    sequence_N, place_N  int64[N]: which sequence, and how many items were read, 0 … T
    target_NP            int64[N, P]: item rows, the next item first, −1 where there are fewer
    """

    sequence_N: Int64
    place_N: Int64
    target_NP: Int64


def trained_places(lists: Interactions, batch: SequenceBatch, targets: int, cold_share: float, rng: np.random.Generator) -> Places:
    """All places behind an item, and of those where a list begins as many as make `cold_share` of all, at random.

    lists    have an order
    targets  most targets of a place: of more items that follow in the list, the next one and a systematic sample of the others. With one
             target, that of a place before the first item is any item of the list
    """
    sequence_N, place_N = np.nonzero(batch.target_BT >= 0)
    place_N += 1
    begins = np.flatnonzero(np.isin(batch.first_B, lists.offset_U1))
    cold = rng.permutation(begins)[: round(len(place_N) * cold_share / (1 - cold_share))]
    sequence_N, place_N = np.concatenate([np.sort(cold), sequence_N]), np.concatenate([np.zeros(len(cold), np.int64), place_N])
    next_N = batch.first_B[sequence_N] + place_N
    if targets == 1:  # a user without a history is not one at the start of theirs: any item of the list is as likely
        first_n = next_N[: len(cold)]
        length_n = lists.offset_U1[np.searchsorted(lists.offset_U1, first_n, side="right")] - first_n
        next_N[: len(cold)] += (rng.random(len(cold)) * length_n).astype(np.int64)
        event_NP = next_N[:, None]
    else:
        end_N = lists.offset_U1[np.searchsorted(lists.offset_U1, next_N, side="right")]
        later_N1 = (end_N - next_N - 1)[:, None]
        slot_p = np.arange(min(targets - 1, int(later_N1.max())))
        drawn_Np = ((slot_p + rng.random((len(next_N), 1))) * later_N1 / (targets - 1)).astype(np.int64)
        offset_Np = np.where(later_N1 < targets, slot_p, drawn_Np)
        event_Np = np.where(offset_Np < later_N1, next_N[:, None] + 1 + offset_Np, -1)
        event_NP = np.concatenate([next_N[:, None], event_Np], 1)
    target_NP = np.where(event_NP >= 0, lists.item_of_event_E[np.maximum(event_NP, 0)], -1).astype(np.int64)
    return Places(sequence_N, place_N, target_NP)
