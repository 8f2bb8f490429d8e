"""JTM's assignment of items to nodes: greedy with rebalancing (Zhu et al. 2019, Alg. 2 and its supplement).

Where the supplement keeps the heaviest items of an over-full node, this keeps those that would lose the most elsewhere: weights are sums
of negative numbers, so the most frequent targets would be sent away first. Items that are no sample's target weigh nothing anywhere; they
fill the remaining places, their own node first.

Knows weights and room. Does not know trees or scorers.

Legend: I items, P parents, C columns (descendants of a parent), G items of the columns that are being emptied.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]


def assign(weight_IC: Float32, parent_I: Int64, room_PC: Int64, home_I: Int64, seen_I: NDArray[np.bool_]) -> Int64:
    """int64[I]: a column for every item, at most room_PC items in each, with a large sum of weights (JTM's greedy with rebalancing).

    weight_IC  float32[I, C]
    parent_I   int64[I]: the row of room_PC that an item's columns belong to; no parent has more items than room
    room_PC    int64[P, C]: 0 where a parent has fewer columns
    home_I     int64[I]: the column that an item comes from, −1 = none of them; it is kept at a tie
    seen_I     whether an item has weights at all

    Each item takes its best column. Then, as long as a column holds too many, each parent's fullest such column keeps those that would
    lose the most by leaving and sends the others to their best column among those that have not done so yet. Unseen items come last.
    """
    slot_I = np.full(len(parent_I), -1, np.int64)
    seen = np.flatnonzero(seen_I)
    slot_I[seen] = _assign_seen(weight_IC[seen], parent_I[seen], room_PC, home_I[seen])
    _fill(slot_I, parent_I, room_PC, home_I)
    return slot_I


def _assign_seen(weight_IC: Float32, parent_I: Int64, room_PC: Int64, home_I: Int64) -> Int64:
    parents, columns = room_PC.shape
    weight_IC = np.where(room_PC[parent_I] > 0, weight_IC, -np.inf).astype(np.float32)
    everyone = np.arange(len(parent_I))
    slot_I = weight_IC.argmax(1) if len(everyone) else np.zeros(0, np.int64)
    at_tie_I = (home_I >= 0) & (weight_IC[everyone, home_I] == weight_IC[everyone, slot_I])
    slot_I = np.where(at_tie_I, home_I, slot_I)
    done_PC = room_PC == 0
    while True:
        count_PC = np.bincount(parent_I * columns + slot_I, minlength=parents * columns).reshape(parents, columns)
        excess_PC = np.where(done_PC, 0, count_PC - room_PC)
        worst_P = excess_PC.argmax(1)
        over_P = excess_PC[np.arange(parents), worst_P] > 0
        if not over_P.any():
            return slot_I
        done_PC[over_P, worst_P[over_P]] = True
        inside = np.flatnonzero(over_P[parent_I] & (slot_I == worst_P[parent_I]))
        parent_G = parent_I[inside]
        elsewhere_GC = np.where(done_PC[parent_G], -np.inf, weight_IC[inside])
        other_G = elsewhere_GC.argmax(1)
        loss_G = weight_IC[inside, slot_I[inside]] - elsewhere_GC[np.arange(len(inside)), other_G]
        stranger_G = home_I[inside] != slot_I[inside]
        order = np.lexsort((stranger_G, -loss_G, parent_G))
        leaving = order[_rank_within(parent_G[order]) >= room_PC[parent_G, slot_I[inside]][order]]
        slot_I[inside[leaving]] = other_G[leaving]


def _fill(slot_I: Int64, parent_I: Int64, room_PC: Int64, home_I: Int64) -> None:
    """Give the items without a column (−1) one that has room: their home if they can, else any."""
    parents, columns = room_PC.shape
    placed = slot_I >= 0
    free_PC = room_PC.ravel() - np.bincount((parent_I * columns + slot_I)[placed], minlength=parents * columns)
    waiting = np.flatnonzero(~placed & (home_I >= 0))
    home = parent_I[waiting] * columns + home_I[waiting]
    order = np.argsort(home, kind="stable")
    stay = order[_rank_within(home[order]) < free_PC[home[order]]]
    slot_I[waiting[stay]] = home_I[waiting[stay]]
    free_PC -= np.bincount(home[stay], minlength=parents * columns)
    waiting = np.flatnonzero(slot_I < 0)
    waiting = waiting[np.argsort(parent_I[waiting], kind="stable")]
    seat = np.repeat(np.arange(parents * columns), free_PC)
    first_P = np.searchsorted(seat, np.arange(parents) * columns)
    taken = seat[first_P[parent_I[waiting]] + _rank_within(parent_I[waiting])]
    slot_I[waiting] = taken - parent_I[waiting] * columns


def _rank_within(group_G: Int64) -> Int64:
    """int64[G]: 0, 1, 2, … inside each run of equal numbers."""
    starts = np.flatnonzero(np.diff(group_G, prepend=-1) != 0)
    return np.arange(len(group_G)) - np.repeat(starts, np.diff(starts, append=len(group_G)))
